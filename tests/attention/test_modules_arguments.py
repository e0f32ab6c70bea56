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
        "kv_ordering must be None, an Ordering, .* got 'hilbert'",
    ),
    "no pattern": (lambda: multihead(None), "pattern must be a DilatedPattern, got NoneType"),
    "heads": (lambda: MultiheadDilatedAttention(16, 3, DILATED), "num_heads must divide embed_dim 16, got 3"),
    "head_dim": (
        lambda: MultiheadDilatedAttention(514, 2, DILATED),
        "embed_dim / num_heads must be at most 256, got 514 / 2 = 257",
    ),
    "flag": (lambda: multihead(batch_first="yes"), "batch_first must be True or False, got 'yes'"),
    "device": (lambda: multihead(device="gpu"), "device must be a device that torch knows, .* got 'gpu'"),
    "dtype of integers": (lambda: multihead(dtype=torch.int8), "dtype must be one of torch.float16, .* got torch.int8"),
    "complex dtype": (lambda: multihead(dtype=torch.complex64), "dtype must be one of .* got torch.complex64"),
    "dtype by name": (lambda: multihead(dtype="float32"), "dtype must be one of torch.float16, .* got 'float32'"),
    "half tokens": (
        lambda: multihead()(tokens(2, 9).half()),
        r"query must have the dtype of the parameters \(torch.float32\), got torch.float16",
    ),
    "half value": (lambda: multihead()(tokens(2, 9), value=tokens(2, 9).half()), "value must have the dtype of"),
    "double tokens under autocast": (
        lambda: torch.autocast("cpu", torch.bfloat16)(multihead())(tokens(2, 9).double()),
        r"query must have the dtype of the parameters \(torch.float32\), got torch.float64",
    ),
    "meta tokens": (
        lambda: multihead()(tokens(2, 9).to("meta")),
        r"query must be on the device of the parameters \(cpu\), got meta",
    ),
    "no tensor": (lambda: multihead()([1.0]), "query must be a tensor, got list"),
    "key no tensor": (lambda: multihead()(tokens(2, 9), 3), "key must be a tensor, got int"),
    "weights": (lambda: multihead()(tokens(2, 9), need_weights=True), "need_weights must be False"),
    "mask": (lambda: multihead()(tokens(2, 9), attn_mask="causal", is_causal=True), "attn_mask must be .* got str"),
    "mask of another kind": (
        lambda: multihead()(tokens(2, 9), attn_mask=torch.ones(9, 9)),
        r"attn_mask must be None unless is_causal=True: .* got a mask of shape \(9, 9\)",
    ),
    "v of another length": (
        lambda: DilatedAttention(DILATED, kv_ordering=HILBERT)(*tokens(2, 1, 9, 2), tokens(1, 3, 2)),
        r"v must have the shape of k \(1, 9, 2, 16\), got \(1, 3, 2, 16\)",
    ),
    "k no tensor": (
        lambda: DilatedAttention(DILATED, kv_ordering=HILBERT)(tokens(1, 9, 2), 3, 3),
        "k must be a tensor",
    ),
    "ordering of a function": (
        lambda: DilatedAttention(DILATED, kv_ordering=lambda length: "hilbert")(*tokens(3, 1, 9, 2)),
        "kv_ordering must be an Ordering such as .*, or None; got ",
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_takes_tokens_of_another_dtype_than_the_parameters(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert multihead()(tokens(2, 9).to(dtype))[0].dtype == torch.bfloat16
