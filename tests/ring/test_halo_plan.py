"""What travels between the ranks of a grid, against who sees whom, one by one."""

import re
from dataclasses import astuple, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
import torch
from cases import GROUPED_WINDOWS, ORDERS, SCALE, assert_close, expected_on_grid, grids, positions, refusals, shortest
from click.testing import CliRunner
from counts import lines_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import mask_of
from ring_ranks import run_threads

from hilbert_lib import Neighbourhood, Ordering
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.cli.main import main
from hilbert_lib.patterns.neighbourhood import Axis, HeadNeighbourhoods
from hilbert_lib.ring import Rectangles, Runs, plan_halo
from hilbert_lib.ring.plan.cost import Sizes
from hilbert_lib.ring.plan.points import PointCounts, PointPlan
from hilbert_lib.ring.plan.shards import hull
from hilbert_lib.ring.rank import copies, halo
from hilbert_lib.ring.rank.halo import HaloJob
from hilbert_lib.ring.rank.halo_layout import layout_of

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}


@st.composite
def cases(draw):
    """A neighbourhood, or one for each of two heads, and shards of up to 8 ranks that may be uneven or empty."""
    near = draw(grids())
    smaller = tuple(
        max(1, step, side - draw(st.integers(0, 2))) for side, step in zip(near.window, near.stride, strict=True)
    )
    each = draw(st.sampled_from([(near, near), (near, replace(near, window=smaller))]))
    if draw(st.booleans()):
        order = ORDERS[draw(st.sampled_from(["hilbert", "random"]))](near.shape)
        inner = sorted(draw(st.lists(st.integers(0, near.length), max_size=5)))
        return each, Runs(order, tuple(b - a for a, b in pairwise([0, *inner, near.length])))
    parts = tuple(draw(st.integers(1, (8, 3, 2)[len(near.shape) - 1])) for _ in near.shape)
    cuts = []
    for side, count in zip(near.shape, parts, strict=True):
        cut = draw(st.lists(st.integers(0, side), min_size=count - 1, max_size=count - 1))
        cuts.append(draw(st.sampled_from([None, tuple(sorted(cut))])))
    return each, Rectangles(parts, draw(st.sampled_from([None, tuple(cuts)])))


def held(near, shards):
    """The positions of each rank in the order in which it stores them, from the definition."""
    if isinstance(shards, Runs):
        return shards.ordering.perm.split(shards.lengths)
    ends = []
    for n, (side, count) in enumerate(zip(near.shape, shards.parts, strict=True)):
        cut = shards.cuts and shards.cuts[n]
        ends.append([0, *cut, side] if cut is not None else [side * i // count for i in range(count + 1)])
    ranks = []
    for place in product(*map(range, shards.parts)):
        lines = [range(end[at], end[at + 1]) for end, at in zip(ends, place, strict=True)]
        ranks.append(positions(lines, near.shape))
    return ranks


def cells_of(box, shape):
    return set(positions(box, shape).tolist())


@settings(max_examples=60)
@given(cases())
def test_rows_that_travel_are_those_that_windows_of_other_ranks_reach(case):
    each, shards = case
    plan, own = plan_halo(each, shards, **SIZES), held(each[0], shards)
    expected = {}
    for rank, mine in enumerate(own):
        rows = set()
        for source, theirs in enumerate(own):
            wanted = {
                (c, head)
                for head, near in enumerate(each)
                for c in theirs[mask_of(near)[mine][:, theirs].any(0)].tolist()
            }
            if wanted and source != rank:
                expected[source, rank] = len(wanted)
                rows |= {(source, *row) for row in wanted}
        cells, heads, source = (x.tolist() for x in plan.arriving[rank])
        assert source == sorted(source)
        assert len(source) == len(rows)
        assert set(zip(source, cells, heads, strict=True)) == rows
        assert shards.cells(each[0].shape, rank).equal(mine)
        assert shards.slot(each[0].shape, mine, rank).equal(torch.arange(len(mine)))
    assert plan.rows == expected
    there, back = 2 * 2 * 8 * 2, 2 * 2 * 8 * 4  # of k and v in bfloat16, of their gradients in float32; two sequences
    for rank, cost in enumerate(plan.ranks):
        out, into = (sum(n for pair, n in expected.items() if pair[end] == rank) for end in (0, 1))
        assert astuple(cost)[:5] == (len(own[rank]), out * there, into * there, into * back, out * back)
        assert cost.interior + cost.border == len(own[rank])


@given(cases())
def test_rectangles_can_be_compared_without_a_plan(case):
    (near, _), shards = case
    if isinstance(shards, Rectangles):
        plan = plan_halo(near, shards, **SIZES)
        assert shards.arriving_cells(near) == [count // SIZES["kv_heads"] for count in plan.rows_into]


@pytest.mark.parametrize("shards", ["strips", "runs"])
def test_a_plan_of_a_grid_costs_by_the_ranks_and_not_by_their_pairs(shards):
    def lines(ranks):
        near = Neighbourhood((ranks, 32), 5)
        shared = Rectangles((ranks, 1)) if shards == "strips" else Runs(Ordering.linear(near.length), (32,) * ranks)
        return lines_run(lambda: str(plan_halo(near, shared, **SIZES)), most=10**7)

    lines(2)  # imports
    assert lines(128) < 2.3 * lines(64)


@settings(max_examples=60)
@given(cases())
@example(((Neighbourhood((16,), 3, edge="wrap"),) * 2, Rectangles((4,))))
@example(((Neighbourhood((16,), 3, edge="wrap"),) * 2, Runs(Ordering.linear(16), (8, 8))))
@example(((Neighbourhood((8, 4), 3, edge="wrap"),) * 2, Rectangles((2, 1))))  # a whole axis that goes round
def test_interior_and_slabs_are_a_ranks_queries_once_with_all_that_they_see(case):
    each, shards = case
    plan, shape = plan_halo(each, shards, **SIZES), each[0].shape
    seen = torch.stack([mask_of(near) for near in each]).any(0)
    for rank, mine in enumerate(held(each[0], shards)):
        inside = plan.interior(rank)
        inner = cells_of(inside, shape) if inside else set()
        alone = {q for q in mine.tolist() if set(seen[q].nonzero()[:, 0].tolist()) <= set(mine.tolist())}
        assert inner <= alone
        if isinstance(shards, Rectangles) and max(each[0].dilation) == 1:
            assert inner == alone
        slabs = plan.border(rank)
        assert len(slabs) <= 2 * len(shape)
        queries = [cells_of(slab.queries, shape) for slab in slabs]
        if isinstance(shards, Rectangles):
            assert sorted([*inner, *(q for each in queries for q in each)]) == sorted(mine.tolist())
        for slab, some in zip(slabs, queries, strict=True):
            keys = cells_of(slab.keys, shape)
            assert len(keys) == slab.sizes[1]
            if isinstance(shards, Rectangles):
                for n, (line, side) in enumerate(zip(slab.keys, shape, strict=True)):
                    reached = {k // prod(shape[n + 1 :]) % side for q in some for k in seen[q].nonzero()[:, 0].tolist()}
                    assert len(line) == len(shortest(side, reached, each[0].edge[n] == "wrap"))
            else:  # a table is read at each of these cells, and every row that it names gets gradients
                assert all(line.start >= 0 and line.stop <= side for line, side in zip(slab.keys, shape, strict=True))
                assert {*mine.tolist(), *plan.arriving[rank][0].tolist()} <= keys
            assert {int(k) for q in some & set(mine.tolist()) for k in seen[q].nonzero()[:, 0]} <= keys


def test_rectangles_receive_least_and_tables_say_so():
    words = "plan --grid 512x512 --window 17 --ranks 8 --heads 8 --head-dim 128"
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    received = dict(re.findall(r"^ *(strips 8 x 1|rectangles 2 x 4|Hilbert runs) +([\d.]+)", done.output, re.M))
    rows = {"strips 8 x 1": 16 * 512, "rectangles 2 x 4": 8 * (2 * (256 + 8) + 128), "Hilbert runs": 8 * 656}
    megabytes = {name: count * 8 * 2 * 128 * 2 / 1e6 for name, count in rows.items()}
    assert {name: float(x) for name, x in received.items()} == pytest.approx(megabytes, rel=0.01)
    how = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    table = str(plan_halo(Neighbourhood((512, 512), 17), Rectangles((8, 1)), **how))
    assert re.search(r"^ 1-6 +32,768 +33.6 +33.6 +67.1 +67.1 +24,576 +8,192 ", table, re.M), table


NEAR = Neighbourhood((4, 6), 3)


WRONG = [
    (lambda: Rectangles((0, 2)), "parts\\[0\\] must be an integer of at least 1, got 0"),
    (lambda: Rectangles((2, 2), cuts=((1,),)), "cuts must be None or have one for each of the 2 axes"),
    (lambda: Rectangles((3, 1), cuts=((2, 1), None)), r"cuts\[0\] must hold 2 cells, ascending, got \(2, 1\)"),
    (lambda: Runs(Ordering.linear(4), (1, 2)), "lengths must be 4 cells in sum"),
    (lambda: Runs("hilbert", (1, 2)), "ordering must be an Ordering"),
    (lambda: plan_halo(NEAR, Rectangles((2,)), **SIZES), "parts must have one for each of the 2 axes"),
    (lambda: plan_halo(NEAR, Rectangles((2, 1), ((5,), None)), **SIZES), r"cuts\[0\] must be at most the side"),
    (lambda: plan_halo(NEAR, Runs(Ordering.linear(4), (4,)), **SIZES), "ordering must have the 24 cells"),
    (lambda: plan_halo(NEAR, (2, 2), **SIZES), "shards must be Rectangles or Runs"),
    (lambda: plan_halo(NEAR, Rectangles((2, 1)), **SIZES | {"kv_heads": 3}), "kv_heads must divide heads"),
    (lambda: Rectangles((2, 2)).box((5, 6), rank=4), "rank must be an integer from 0 to 3, got 4"),
    (lambda: Rectangles((2, 2)).count((5,), rank=0), "parts must have one for each of the 1 axes"),
    (lambda: Rectangles((2, 2)).owner((4, 4), torch.tensor([16, 1])), r"cells must be 0 to 15, .* got 1 to 16"),
    (lambda: Rectangles.compact((4, 4), 0), "ranks must be an integer from 1 to 1048576, got 0"),
    (lambda: Runs(Ordering.linear(16), (8, 8)).cells((4, 4), 2), "rank must be an integer from 0 to 1, got 2"),
    (lambda: Runs(Ordering.linear(16), (8, 8)).count((4, 5), 0), "ordering must have the 20 cells"),
    (lambda: Runs(Ordering.linear(16), (8, 8)).owner((4, 4), torch.tensor([-1])), "cells must be 0 to 15"),
    (lambda: plan_halo(NEAR, Rectangles((2, 1)), **SIZES | {"dtype": torch.int8}), "dtype must be one of"),
]
test_what_cannot_be_planned_is_named = refusals({(TypeError, ValueError): WRONG})


@pytest.mark.parametrize(
    ("shape", "ranks", "parts"),
    [((64,), 5, (5,)), ((64, 64), 4, (2, 2)), ((8, 64), 4, (1, 4)), ((64, 8), 6, (6, 1)), ((16, 48, 80), 8, (1, 2, 4))],
)
def test_compact_rectangles_have_the_smallest_border(shape, ranks, parts):
    assert Rectangles.compact(shape, ranks) == Rectangles(parts)


def test_an_axis_that_goes_round_and_is_reached_whole_begins_at_its_first_cell():
    axis = Axis(8, 3, 1, 1, False, "wrap")
    assert hull(axis, torch.ones(8, dtype=torch.bool)) == range(8)
    assert hull(axis, torch.arange(8) != 2) == range(3, 10)


@pytest.mark.parametrize("shards", [Rectangles((2, 2)), Rectangles((3, 1)), Runs(Ordering.random(48, 1), (20, 3, 25))])
def test_each_ranks_part_is_that_of_the_whole_and_gradients_of_shared_rows_are_added(shards):
    """In one process; the windows of grouped heads differ."""
    shape, edges = (8, 6), ("clip", "shift")
    options = ((shape, (3, 3), 1, 1, False, edges), GROUPED_WINDOWS, "extra and padding", torch.float64, 4)
    near, given, dout, (hidden, extra_hidden), *exact = expected_on_grid(*options)
    plan = plan_halo(near, shards, batch=2, heads=4, kv_heads=2, head_dim=4, dtype=torch.float64)

    def attend(group):
        rows, layout = shards.cells(shape, group.own), layout_of(plan, group.own, torch.device("cpu"))
        own = Tensors(*(x[:, rows] for x in given[:3]), *given[3:])
        request = Request(
            HeadNeighbourhoods(tuple(near)),
            scale=SCALE * 0.5,
            key_padding_mask=hidden[:, rows],
            extra_padding_mask=extra_hidden,
        )
        job = HaloJob(layout, request, "eager", ("eager",) * len(layout.borders), lambda: group)
        out, lse, *received = halo.results(own, job, lambda: None)
        return rows, out, lse, *halo.gradients(dout[:, rows], own, out, lse, job, *received).with_rows

    found = run_threads(attend, shards.ranks)
    out, lse, (*grads, extra_dk, extra_dv) = exact
    for rows, *mine in found:
        right = [out[:, rows], lse[:, :, rows], *(x[:, rows] for x in grads)]
        assert_close(mine[:5], right, 1e-11)
    shares = zip(*(mine[-2:] for mine in found), strict=True)  # of the extra keys' gradients, one of each rank
    assert_close(map(sum, shares), [extra_dk, extra_dv], 1e-11)


def test_the_page_says_what_a_point_takes():
    page = (Path(__file__).parents[2] / "docs/several_gpus.md").read_text().replace("\n", " ")
    sizes = Sizes.checked(1, 8, 8, 64, torch.bfloat16, False)
    counts = PointCounts(10**6, 10**6, 0, 0, 10**8), PointCounts(0, 0, 0, 0, 0)
    plan = PointPlan(sizes, torch.bfloat16, counts, {}, (5, 5, 5))
    cost, nothing = plan.ranks
    of_point = [round((memory - 10**8) / 10**6 / 2**10) for memory in (cost.memory_forward, cost.memory_backward)]
    assert f"one layer holds {of_point[0]} KiB a point in a forward and {of_point[1]} KiB in a backward" in page
    assert not any(astuple(nothing))
    assert "80 GiB hold eight million points with a border of 5 %" in page
    points, border = 8 * 10**6, 4 * 10**5
    counts = (PointCounts(points, points, border, border, 512 * points),) * 2
    plan = PointPlan(sizes, torch.bfloat16, counts, {(0, 1): border, (1, 0): border}, (5, 5, 5))
    assert 0.9 < plan.ranks[0].memory_backward / 80 / 2**30 < 1.0


def test_rows_of_a_frame_are_own_ones_received_ones_or_zero():
    """With a smaller window a head receives less than the frame holds, which is no place for a NaN of another row."""
    near = Neighbourhood((16, 16), 7), Neighbourhood((16, 16), 3)
    layout = layout_of(plan_halo(near, Rectangles((2, 2)), **SIZES), 0, torch.device("cpu"))
    own = torch.full((2, 64, 2, 8), torch.nan)
    received = torch.ones(sum(layout.received), 2, 2, 8)
    all_framed = copies.framed(own, own, received, layout.borders, [own])
    for border, framed in zip(layout.borders, all_framed, strict=True):
        for frame in (framed.k, framed.v):
            kinds = [(x := frame[0, :, :, 0]).isnan().sum(), (x == 1).sum(), (x == 0).sum()]
            assert kinds[:2] == [2 * len(border.own_rows[0]), len(border.their_rows[0])]
            assert kinds[2] == x.numel() - sum(kinds[:2]) > 0
