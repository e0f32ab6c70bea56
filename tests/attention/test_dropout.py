"""Dropout bits are Philox keyed by position: published vectors, statistics, independence of the implementation."""

import pytest
import torch
from cases import attended, drawn

from hilbert_lib import DilatedPattern, Ordering, dilated_attention
from hilbert_lib.attention.dropout import keep_mask, name_table, named, philox

PATTERN = DilatedPattern((8, 16, 24), (1, 2, 3))


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [  # known answers of Philox4x32-10 published with Random123
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox_gives_the_published_words(counter, key, word):
    as_tensors = lambda words: tuple(torch.tensor([w]) for w in words)  # noqa: E731
    assert philox(as_tensors(counter), as_tensors(key)).item() == word


def test_every_coordinate_changes_the_bits():
    p = torch.arange(64)
    base = {"batch": p[:1], "head": p[:1], "branch": 0, "queries": p[:, None], "keys": p}
    changes = [{"batch": p[1:2]}, {"head": p[1:2]}, {"branch": 1}, {"queries": p[:, None] + 64}, {"keys": p + 64}]
    changes += [{"head": p[1:2], "branch": 1}, {"seed": 1}, {"seed": 2**32}]
    masks = [keep_mask(torch.tensor([3 + more.pop("seed", 0)]), 0.5, **{**base, **more}) for more in [{}, *changes]]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert 0.45 < (mask == other).float().mean().item() < 0.55, number


def test_a_call_of_some_rows_drops_what_they_drop_in_the_larger_call():
    """Rows 3, 7, 11, ... of q, and 1 and 5 of k and, behind a gap of two of these, 17 and 21; of two heads."""
    seed, p = torch.tensor([12345 + 2**40]), torch.arange(16)
    names = torch.tensor([[[2, head, 4, 3, 1, 2, 2] for head in (5, 3)]])
    of_call = {"batch": p[:1], "head": p[:2, None, None], "branch": 1, "queries": p[:, None], "keys": p[:4]}
    found = keep_mask(named(seed, name_table(names, (0, 4))), 0.5, **of_call)
    of_larger = {"batch": p[2:3], "head": torch.tensor([5, 3])[:, None, None], "branch": 4}
    of_larger |= {"queries": 3 + 4 * p[:, None], "keys": torch.tensor([1, 5, 17, 21])}
    assert found.shape == (2, 16, 4)
    assert found.equal(keep_mask(seed, 0.5, **of_larger))


def run(tensors, **options):
    torch.manual_seed(11)
    return attended(tensors, PATTERN, dropout_p=0.3, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_backends_share_the_bits_and_lse_is_undropped(is_causal):
    tensors = drawn(29, 4, 2, 8, batch=2, dtype=torch.float64)
    plain, plain_lse, *_ = attended(tensors, PATTERN, "auto", is_causal=is_causal)
    found, other = (run(tensors, backend=name, is_causal=is_causal) for name in ("reference", "eager"))
    torch.testing.assert_close(other, found)
    torch.testing.assert_close(found[1], plain_lse)
    assert (found[0] - plain).abs().max() > 0.1


def test_dropout_does_not_depend_on_ordering_or_on_decoding():
    q, k, v, dout = drawn(29, 4, 2, 8, batch=2, dtype=torch.float64)
    out = run((q, k, v, dout), backend="auto")[0]
    order = Ordering.from_curve("hilbert", 29)
    stored = [q, order.apply(k, dim=1), order.apply(v, dim=1), dout]
    torch.testing.assert_close(run(stored, backend="auto", kv_ordering=order)[0], out)
    few = run((q[:, 20:23], k, v, dout[:, 20:23]), backend="auto", query_start=20)
    torch.testing.assert_close(few[0], out[:, 20:23])


def test_dropout_repeats_with_the_seed_and_keeps_the_expectation():
    # Many copies of one sequence: each has bits of its own, because the batch index is in the key.
    q, k, v = (x.expand(400, -1, -1, -1) for x in drawn(16, 4, 2, 8)[:3])
    pattern = DilatedPattern((8, 16), (1, 2))
    torch.manual_seed(0)
    out = dilated_attention(q, k, v, pattern, dropout_p=0.3)
    assert not torch.equal(out, dilated_attention(q, k, v, pattern, dropout_p=0.3))
    torch.manual_seed(0)
    assert torch.equal(out, dilated_attention(q, k, v, pattern, dropout_p=0.3))
    error = out.mean(0) - dilated_attention(q, k, v, pattern)[0]
    standard_error = out.std(0) / len(out) ** 0.5
    assert (error.abs() / standard_error).mean() < 1.0  # 0.8 for a normal error


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_what_is_kept_is_scaled_in_the_dtype_of_the_call(backend):
    ones = torch.ones(1, 16, 1, 2, dtype=torch.float64)
    every = DilatedPattern((1,), (1,))  # a query sees itself: out is 0 or 1 / (1 - p)
    out = dilated_attention(ones, ones, ones, every, dropout_p=0.3, backend=backend)
    assert set(out.unique().tolist()) == {0.0, 1 / 0.7}
