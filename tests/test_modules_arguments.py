"""What a module is built from and called with is refused by name, value and what is allowed, not where it is used."""

from functools import partial

import pytest
import torch

from hilbert_lib import DilatedAttention, DilatedPattern, MultiheadDilatedAttention, Ordering

DILATED = DilatedPattern((4, 12), (1, 3))
HILBERT = partial(Ordering.from_curve, "hilbert")


def tokens(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, 16)


def multihead(pattern=DILATED, **options) -> MultiheadDilatedAttention:
    return MultiheadDilatedAttention(16, 4, pattern, **{"batch_first": True, **options})


WRONG = {
    "dropout of 1": (lambda: multihead(dropout=1), r"dropout must be in \[0, 1\), got 1"),
    "dropout NaN": (lambda: multihead(dropout=float("nan")), r"dropout must be in \[0, 1\), got nan"),
    "dropout a text": (lambda: multihead(dropout="0.1"), "dropout must be a number, got '0.1'"),
    "scale of 0": (lambda: DilatedAttention(DILATED, scale=0), "scale must be finite and above 0, got 0"),
    "unknown backend": (lambda: multihead(backend="fast"), "backend must be one of auto, .* got 'fast'"),
    "ordering by name": (
        lambda: multihead(kv_ordering="hilbert"),
        "kv_ordering must be None, 'auto', .* got 'hilbert'",
    ),
    "no pattern": (lambda: multihead(None), "pattern must be a DilatedPattern, got NoneType"),
    "heads": (lambda: MultiheadDilatedAttention(16, 3, DILATED), "num_heads must divide embed_dim 16, got 3"),
    "head_dim": (
        lambda: MultiheadDilatedAttention(514, 2, DILATED),
        "embed_dim / num_heads must be at most 256, got 514 / 2 = 257",
    ),
    "flag": (lambda: multihead(batch_first="yes"), "batch_first must be True or False, got 'yes'"),
    "device": (lambda: multihead(device="gpu"), "device must be a device that torch knows, .* got 'gpu'"),
    "no tensor": (lambda: multihead()([1.0]), "query must be a tensor, got list"),
    "key no tensor": (lambda: multihead()(tokens(2, 9), 3), "key must be a tensor, got int"),
    "weights": (lambda: multihead()(tokens(2, 9), need_weights=True), "need_weights must be False"),
    "mask": (lambda: multihead()(tokens(2, 9), attn_mask="causal", is_causal=True), "attn_mask must be .* got str"),
    "k no tensor": (
        lambda: DilatedAttention(DILATED, kv_ordering=HILBERT)(tokens(1, 9, 2), 3, 3),
        "k must be a tensor",
    ),
    "ordering of a function": (
        lambda: DilatedAttention(DILATED, kv_ordering=lambda length: "hilbert")(*tokens(3, 1, 9, 2)),
        "kv_ordering must be an Ordering or None, got str",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_is_refused_by_name_value_and_what_is_allowed(wrong):
    build, words = WRONG[wrong]
    with pytest.raises((ValueError, TypeError), match=words):
        build()


def test_the_largest_head_dim_is_served():
    module = MultiheadDilatedAttention(256, 1, DILATED, batch_first=True)
    assert module(torch.ones(1, 9, 256))[0].shape == (1, 9, 256)
