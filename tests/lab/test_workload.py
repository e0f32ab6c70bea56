"""What a call should give, row by row in float64, and what of it counts as useful."""

import json
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, Union, dilated_attention
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.lab.exact_rows import exact_keys, exact_rows, sampled_positions
from hilbert_lib.lab.workload import BOTH, Workload, by_backend, grid
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern

CPU = torch.device("cpu")
PATTERNS = [
    DilatedPattern((7, 20, 64), (2, 3, 5), offsets="branch"),
    DilatedPattern((16, 16), (4, 1), mixing="head_groups"),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: str(pattern.branches))
def test_sampled_rows_equal_the_whole_reference(pattern, is_causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 50, 3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    call = Request(pattern, is_causal=is_causal, scale=0.5)
    out, lse = reference.forward(Tensors(q, k, v), call)
    dq, dk, dv, *_ = reference.backward(dout, Tensors(q, k, v), out, lse, call)
    for head in range(3):
        rows, keys = torch.arange(head, 50, 3), torch.tensor([0, 21, 49])
        exact = exact_rows(q, k, v, dout, pattern, head=head, queries=rows, is_causal=is_causal)
        torch.testing.assert_close(exact, (out[0, rows, head], dq[0, rows, head]), atol=1e-12, rtol=0)
        exact = exact_keys(q, k, v, dout, pattern, kv_head=head, keys=keys, is_causal=is_causal)
        torch.testing.assert_close(exact, (dk[0, keys, head], dv[0, keys, head]), atol=1e-12, rtol=0)


def test_sampled_rows_of_decoding_equal_the_reference():
    q, k, v = (torch.randn(1, rows, 2, 4, dtype=torch.float64) for rows in (3, 30, 30))
    call = Request(DilatedPattern((8, 30), (1, 4)), is_causal=True, scale=0.5, query_start=11)
    out, _ = reference.forward(Tensors(q, k, v), call)
    rows = {"queries": torch.arange(11, 14), "first": 11}
    exact, _ = exact_rows(q, k, v, q, call.pattern, head=1, is_causal=True, **rows)
    torch.testing.assert_close(exact, out[0, :, 1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [7, 41, 50])
@pytest.mark.parametrize("branch", [(10, 4), (9, 5), (64, 6)], ids=str)
def test_sampled_positions_lie_in_the_branch_where_their_segment_has_it(branch, length):
    pattern, every = DilatedPattern(branch[:1], branch[1:]), torch.arange(length)
    for kv_head in range(4):
        sampled = sampled_positions(pattern, length, kv_head=kv_head, kv_heads=4, count=1000)
        inside = pattern.contains(0, every, kv_head, 4)
        segment = every // branch[0]
        assert sampled.equal(every[inside | ~torch.isin(segment, segment[inside])])


def test_each_direction_is_timed_as_it_says_and_a_wrong_gradient_shows():
    work = Workload(DilatedPattern((8,), (2,)), 16, 2, 4, CPU, dtype="float64")
    calls = []

    def attend(q, k, v, of):
        calls.append(q.requires_grad)
        return dilated_attention(q, k, v, of.pattern, backend="reference")

    forward, backward, both = (work.side("a", attend, each, sweep="s") for each in ("forward", "backward", BOTH))
    flop = [side.useful_flop for side in (forward, backward, both)]
    assert flop[2] == flop[0] + flop[1]
    assert both.parameters == {"sweep": "s", "direction": BOTH, **work.parameters}
    assert forward.error(forward.run()) < 1e-12
    assert backward.error(backward.run()) < 1e-12
    backward.run()
    assert calls == [False, True]  # the forward of a backward is run once, before
    gradients = both.run()
    for wrong in range(3):
        changed = [x * 1.5 if n == wrong else x for n, x in enumerate(gradients)]
        assert work.error(changed) == pytest.approx(0.5)


def test_long_sequences_have_fewer_heads():
    works = grid({"a": PATTERNS[0]}, lengths=[8, 32], heads=2, head_dims=[4], device=CPU, rows=32)
    assert [(work.length, work.heads, work.is_causal) for _, work in works] == [
        (8, 2, False), (8, 2, True), (32, 1, False), (32, 1, True)
    ]  # fmt: skip


def test_rows_of_a_head_lie_side_by_side_in_every_layout():
    work = Workload(DilatedPattern((8,), (2,)), 20, 2, 4, CPU, heads_first=True)
    order = Ordering.from_curve("hilbert", 20)
    for x, stored in zip(work.tensors[1:3], work.stored(order), strict=True):
        assert stored.stride()[1:] == (4, 80, 1)
        assert torch.equal(order.undo(stored, dim=1), x)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("queries", [None, (16, 2)])
def test_bytes_of_the_inputs_are_those_of_what_is_drawn(queries, dtype):
    work = Workload(DilatedPattern((8,), (2,)), 20, 3, 4, CPU, queries=queries, dtype=dtype)
    assert work.input_bytes == sum(x.nbytes for x in work.tensors)


def test_the_error_of_decoding_is_that_of_its_own_rows():
    work = Workload(DilatedPattern((8,), (2,), offsets="zero"), 20, 2, 4, CPU, queries=(14, 4), dtype="float64")
    q, k, v, _ = work.tensors
    out = dilated_attention(q, k, v, work.pattern, query_start=14)
    assert work.error((out,)) < 1e-12
    assert work.error((out.flip(1),)) > 0.1


def test_decoding_counts_each_row_that_is_needed_once():
    work = Workload(DilatedPattern((16, 32), (1, 4), offsets="zero"), 32, 3, 8, CPU, queries=(16, 2))
    assert work.useful.flop_forward == 4 * 8 * 3 * (16 + 8 + 16)  # query 16 sees 16 and 8 keys, query 17 sees 16
    assert (
        work.useful.bytes_forward == 3 * (2 * (16 + 4) + 2 * 2) * 8 * 2
    )  # rows of k and v: 16 to 31, and 0, 4, 8, 12; q and out


@dataclass(frozen=True)
class EveryThird(Pattern):
    """A pattern of a user's own, along a sequence."""

    kind: ClassVar[str] = "every_third"

    def attends(self, query, key):
        return (query - key) % 3 == 0


NEAR, FAR = Neighbourhood((4, 6), 3), Neighbourhood((4, 6), (3, 5), dilation=(1, 1), edge="clip")
EVERY_KIND = {
    "sequence": (DilatedPattern((6, 24), (1, 4)), True),
    "grid": (NEAR, False),
    "windows by head": (HeadNeighbourhoods((NEAR, Neighbourhood((4, 6), (3, 5)))), False),
    "union on a grid": (Union((NEAR, FAR)), False),
    "union along a sequence": (Union((DilatedPattern((6,), (1,)), DilatedPattern((24,), (5,)))), True),
    "union with a pattern of one's own": (Union((DilatedPattern((6,), (1,)), EveryThird())), False),
    "a pattern of one's own": (EveryThird(), False),
}


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_workload_of_every_pattern_knows_its_error_flop_and_bytes(kind, heads):
    """Of two KV heads."""
    pattern, is_causal = EVERY_KIND[kind]
    work = Workload(pattern, 24, heads, 4, CPU, is_causal=is_causal, dtype="float64", kv_heads=2)
    by_reference = partial(by_backend, "reference")
    both = work.side("a", by_reference, BOTH, sweep="s")
    forward = work.side("a", by_reference, "forward", sweep="s")
    (out,), gradients = forward.run(), both.run()
    assert forward.error((out,)) < 1e-12
    assert both.error(gradients) < 1e-12
    assert forward.error((out * 1.5,)) == pytest.approx(0.5)
    for wrong in range(3):
        changed = [x * 1.5 if n == wrong else x for n, x in enumerate(gradients)]
        assert both.error(changed) == pytest.approx(0.5)
    pairs = heads // 2 * pairs_by_masks(pattern, is_causal)
    assert forward.useful_flop == 4 * 4 * pairs
    assert both.useful_flop == 14 * 4 * pairs
    if kind != "sequence":  # where a row that no branch uses is not read
        assert forward.useful_bytes == sum(x.nbytes for x in (*work.tensors[:3], out))
        assert both.useful_bytes == 3 * forward.useful_bytes
    assert work.input_bytes == sum(x.nbytes for x in work.tensors)
    assert json.loads(json.dumps(work.parameters)) == work.parameters


def pairs_by_masks(pattern, is_causal):
    """Pairs over two KV heads; a key of two parts counts twice."""
    every, total = torch.arange(24), 0
    for head in range(2):
        for part in pattern.of_heads(2).head_parts(head, 2):
            mask = pattern.of_heads(2).mask(part, every, every, kv_head=head, kv_heads=2, is_causal=is_causal)
            total += int(mask.sum())
    return total


def test_records_of_two_patterns_have_different_parameters():
    told = [str(Workload(pattern, 24, 2, 4, CPU).parameters) for pattern, _ in EVERY_KIND.values()]
    assert len(set(told)) == len(EVERY_KIND)


def test_a_workload_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="length must be that of the grid, 24, got 25"):
        Workload(NEAR, 25, 2, 4, CPU)
    with pytest.raises(ValueError, match=r"queries must be None for a Neighbourhood, got \(0, 1\)"):
        Workload(NEAR, 24, 2, 4, CPU, queries=(0, 1))
    with pytest.raises(ValueError, match="is_causal must be False for a Neighbourhood, got True"):
        Workload(NEAR, 24, 2, 4, CPU, is_causal=True)
    for text in ("64x64 7x7", "64x64 7x7 0x16", "8x8 0x9 1x16", "one two three"):
        with pytest.raises(
            ValueError, match=r"works must be grids, windows .*, heads .* and head_dim, such as .*; got"
        ):
            Workload.on_grid(text, device=CPU)


def test_what_serves_is_asked_with_the_shapes_of_the_call():
    work = Workload(DilatedPattern((8,), (2,)), 20, 4, 8, CPU, queries=(14, 3), dtype="float32", kv_heads=2)
    for gradient in (False, True):
        for x, drawn in zip(work.stand_ins(gradient=gradient), work.tensors, strict=False):
            assert (x.shape, x.dtype, x.device) == (drawn.shape, drawn.dtype, drawn.device)
            assert x.requires_grad == gradient
    assert work.refusal("reference", gradient=False) == ""
    assert work.refusal("sdpa", gradient=False).startswith("no query_start")
