"""Packed lists of grids hold the pairs of the oracle's windows, each as often as a union's patterns do."""

import re
from math import prod
from pathlib import Path

import pytest
import torch
from cases import grids, positions
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import mask_of

from hilbert_lib import Neighbourhood, Ordering
from hilbert_lib.attention import grid_lists
from hilbert_lib.lab.cache import count_grid_lists
from hilbert_lib.patterns.neighbourhood import Axis
from hilbert_lib.patterns.packed_lists import PackedLists, both_ways

CPU = torch.device("cpu")
DOCS = Path(__file__).parents[3] / "docs"


def made(
    patterns: tuple, ordering: Ordering | None = None, box: tuple | None = None
) -> tuple[PackedLists, PackedLists]:
    """The lists of some patterns and those turned round, made anew."""
    tensors = grid_lists.grid_lists.__wrapped__(patterns, ordering, box, CPU)
    length = patterns[0].length
    return both_ways(tensors, length if box is None else prod(map(len, box)), length)


def times_seen(lists: PackedLists) -> torch.Tensor:
    """How often each row of q sees each row of k: (queries, keys) int64."""
    times = torch.zeros(lists.queries + 1, lists.keys + 1, dtype=torch.int64)
    own = lists.query_rows.view(-1, 64)[lists.tile_blocks].long()
    index = own[:, :, None].expand(-1, 64, 64), lists.key_rows[:, None].long().expand(-1, 64, 64)
    times.index_put_(index, lists.attends().long(), accumulate=True)
    assert not times[-1].any()  # places past the end
    assert not times[:, -1].any()
    return times[:-1, :-1]


def assert_lists(patterns: tuple, ordering: Ordering | None = None, box: tuple | None = None) -> None:
    """Both lists hold the pairs of all patterns, and each own row stands in one block."""
    keys = torch.arange(patterns[0].length) if ordering is None else ordering.perm
    queries = keys if box is None else positions(box, patterns[0].shape)
    times = sum(mask_of(near).long() for near in patterns)[queries][:, keys]
    for lists, expected in zip(made(patterns, ordering, box), (times, times.T), strict=True):
        assert times_seen(lists).equal(expected)
        own = lists.query_rows[lists.query_rows >= 0]
        assert own.sort().values.equal(torch.arange(len(expected), dtype=torch.int32))


@settings(max_examples=60)
@given(grids(), st.sampled_from(("rows", "random", "box")), st.integers(0, 100))
def test_lists_hold_the_pairs_of_windows(near, stored, seed):
    box = None
    if stored == "box":
        generator = torch.Generator().manual_seed(seed)
        ends = [torch.randint(0, side + 1, (2,), generator=generator).sort().values.tolist() for side in near.shape]
        box = tuple(
            range(min(start, side - 1), max(stop, min(start, side - 1) + 1))
            for (start, stop), side in zip(ends, near.shape, strict=True)
        )
    ordering = Ordering.random(near.length, seed) if stored == "random" else None
    assert_lists((near,), ordering, box)
    tensors = grid_lists.grid_lists((near,), ordering, box, CPU)
    assert sum(x.nbytes for x in tensors) == grid_lists.lists_bytes((near,), box)


UNIONS = {
    "near and far": (Neighbourhood((9, 12), 3), Neighbourhood((9, 12), (3, 4), dilation=(3, 2))),
    "overlapping": (Neighbourhood((70,), 7, edge="clip"), Neighbourhood((70,), 30, edge="clip", is_causal=True)),
    "two rates": (Neighbourhood((12, 12), 3, dilation=2), Neighbourhood((12, 12), 3, dilation=3, edge="wrap")),
    "three": (Neighbourhood((5, 6, 7), 3),) * 2 + (Neighbourhood((5, 6, 7), (1, 9, 2), edge="clip"),),
}


@pytest.mark.parametrize("patterns", UNIONS.values(), ids=UNIONS)
def test_a_key_of_two_patterns_of_a_union_counts_twice(patterns):
    assert_lists(patterns)
    assert_lists(patterns, Ordering.random(patterns[0].length, seed=1))


# Each edge on a grid of several blocks; the relation of the second and of the fourth is symmetric.
EDGES = {
    "shift": Neighbourhood((20, 18), (5, 7)),
    "clip": Neighbourhood((20, 18), (5, 7), edge="clip"),
    "clip, even": Neighbourhood((20, 18), (4, 7), edge="clip"),
    "wrap": Neighbourhood((20, 18), (5, 7), edge="wrap"),
    "stride": Neighbourhood((20, 18), (5, 7), stride=(2, 3), edge="clip"),
    "causal": Neighbourhood((20, 18), (5, 7), is_causal=(True, False), edge="clip"),
    "dilated": Neighbourhood((21, 19), (5, 3), dilation=(2, 3)),
}


@pytest.mark.parametrize("edge", EDGES)
def test_every_edge_fails_where_its_lists_are_wrong(edge, monkeypatch):
    near = (EDGES[edge],)
    assert_lists(near)
    is_symmetric = edge in ("clip", "wrap")
    assert (len(grid_lists.grid_lists(near, None, None, CPU)) == 4) == is_symmetric
    words_of = grid_lists.words_of
    faults = {"a bit of a word is dropped": (grid_lists, "words_of", lambda attends: words_of(attends) & ~(1 << 5))}
    if not is_symmetric:
        faults["lists in place of those turned round"] = grid_lists, "_is_symmetric", lambda *_: True
    if "shift" in near[0].edge:
        faults["windows of an end are not moved"] = Axis, "seen_by", unmoved
    for place, name, fault in faults.values():
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fault)
            with pytest.raises(AssertionError):
                assert_lists(near)


def unmoved(axis, cell):
    """`Axis.seen_by` as if no window were moved inside."""
    rank, _ = axis.ranks(cell)
    least, most = axis._unmoved_distances()
    return rank - most, rank - least


def test_blocks_are_the_rectangles_with_the_fewest_tiles():
    near = Neighbourhood((64, 64), 9, edge="wrap")
    squares, lines = (grid_lists.count_tiles((near,), sides=sides) for sides in (None, (1, 64)))
    assert grid_lists.blocking((near,)).sides == (8, 8)
    assert squares == 64 * 4  # (8 + 9 - 1)^2 keys
    assert lines == 64 * 9
    # Runs of 64 cells of a Hilbert curve are these squares.
    runs = Ordering.from_curve("hilbert", 4096, grid=(64, 64)).perm.view(64, 64)
    assert all(len((run // 64 // 8 * 8 + run % 64 // 8).unique()) == 1 for run in runs)
    assert grid_lists.blocking((Neighbourhood((64, 64), (1, 33)),)).sides == (1, 64)
    assert grid_lists.blocking((Neighbourhood((2, 64, 64), 5),)).sides == (2, 4, 8)


def test_the_table_of_the_page_is_counted():
    (table,) = re.findall(r"^```\n( +side .*?)^```", (DOCS / "lists.md").read_text(), re.M | re.S)
    counted = count_grid_lists().to_string(index=False)
    assert [line.split() for line in table.splitlines()] == [line.split() for line in counted.splitlines()]


def test_lists_are_kept_within_a_bound_of_bytes(monkeypatch):
    grid_lists.grid_lists.cache_clear()
    near = [Neighbourhood((16, 16), window, edge="clip") for window in (3, 5, 7)]
    sizes = [grid_lists.lists_bytes((each,)) for each in near]
    monkeypatch.setattr(grid_lists.grid_lists, "_maxsize", sum(sizes[:2]))
    for each in near:
        first = grid_lists.grid_lists((each,), None, None, CPU)
        assert grid_lists.grid_lists((each,), None, None, CPU) is first
    told = grid_lists.grid_lists.cache_info()
    assert (told.hits, told.misses) == (3, 3)
    assert told.size <= told.maxsize
    assert told.results < 3
    grid_lists.grid_lists.cache_clear()
