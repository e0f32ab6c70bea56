"""Dropout bits are Philox keyed by position: published vectors, statistics, independence of the implementation."""

import pytest
import torch
from cases import attended, drawn

from hilbert_lib import DilatedPattern, Ordering, dilated_attention
from hilbert_lib.attention.dropout import Branch, drop_below, keep_mask, name_table, named, philox

PATTERN = DilatedPattern((8, 16, 24), (1, 2, 3))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # known answers of Philox4x32-10 published with Random123
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, answer):
    as_tensors = lambda words: tuple(torch.tensor([w]) for w in words)  # noqa: E731
    words = philox(as_tensors(counter), as_tensors(key))
    assert " ".join(f"{word.item():08x}" for word in words) == answer


def test_four_keys_side_by_side_in_a_segment_share_a_philox():
    """Segments of 24 positions at rate 3: keys 1, 4, ..., 22 of the first and 25, ... of the second are 0 to 7."""
    keys, queries, seed = torch.arange(1, 48, 3), torch.arange(20), torch.tensor([77])
    found = keep_mask(
        seed, 0.4, batch=keys[:1], head=keys[1:2], branch=Branch(5, 24, 3), queries=queries[:, None], keys=keys
    )
    for column in range(16):
        number = column % 8
        counter = torch.tensor(number // 4), queries, torch.tensor(4 | 5 << 16), torch.tensor(1)
        word = philox(counter, (seed, torch.tensor(0)))[number % 4]
        assert found[:, column].equal(word >= drop_below(0.4))


def test_every_coordinate_changes_the_bits():
    p = torch.arange(64)
    first, second = (Branch(number, 1024, 1) for number in range(2))
    base = {"batch": p[:1], "head": p[:1], "branch": first, "queries": p[:, None], "keys": p}
    changes = [{"batch": p[1:2]}, {"head": p[1:2]}, {"branch": second}, {"queries": p[:, None] + 64}, {"keys": p + 64}]
    changes += [{"head": p[1:2], "branch": second}, {"seed": 1}, {"seed": 2**32}, {"keys": p + 1}]
    masks = [keep_mask(torch.tensor([3 + more.pop("seed", 0)]), 0.5, **{**base, **more}) for more in [{}, *changes]]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert 0.45 < (mask == other).float().mean().item() < 0.55, number


def test_a_call_of_some_rows_drops_what_they_drop_in_the_larger_call():
    """Rows 3, 7, 11, ... of q, and 1 and 5 of k and, behind a gap of two of these, 17 and 21; of two heads."""
    seed, p = torch.tensor([12345 + 2**40]), torch.arange(16)
    names = torch.tensor([[[2, head, 4, 3, 1, 2, 2] for head in (5, 3)]])
    of_call = {"batch": p[:1], "head": p[:2, None, None], "queries": p[:, None], "keys": p[:4]}
    table = name_table(names, (Branch(0, 8, 1), Branch(4, 12, 2)))
    found = keep_mask(named(seed, table), 0.5, branch=Branch(1, 64, 1), **of_call)
    of_larger = {"batch": p[2:3], "head": torch.tensor([5, 3])[:, None, None], "branch": Branch(4, 12, 2)}
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
