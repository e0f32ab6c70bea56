"""Tiles hold the rows of their branches, which are divided among launches where that makes less work."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.patterns.dilated import OFFSET_RULES

REFERENCE = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
PAPER = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))


def tiles_of(tables, one, g, length):
    """Positions of the rows of each tile of a head that the tables of a pass hold."""
    for at in range(-(-length // tables.chunk)):
        for start, members, u, size in tables.items[g, at % tables.items.shape[1]].tolist():
            row = u + torch.arange(size)
            tile = at * tables.chunk + tables.classes[start + row % members] + row // members * one.stride
            tile = tile[tile < min((at + 1) * tables.chunk, length)]
            if len(tile):
                yield tile


BRANCHES = st.lists(
    st.integers(1, 60).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w))), min_size=1, max_size=4
)


@settings(max_examples=100)
@given(
    BRANCHES, st.integers(1, 150), st.sampled_from(OFFSET_RULES), st.integers(1, 3), st.sampled_from([4, 16]),
    st.sampled_from([0, 4, 16, 256]),
)  # fmt: skip
@example([(50, 1), (100, 3)], 700, "zero", 1, 16, 40)  # several tables of several chunks, of two kinds
def test_tiles_hold_the_rows_of_their_branches_once(pairs, length, rule, kv_heads, block, together):
    pattern = DilatedPattern(*map(tuple, zip(*pairs, strict=True)), offsets=rule)
    todo = schedule.passes(pattern, length, block)
    assert sorted(i for one in todo for i in one.branches) == list(range(len(pairs)))
    assert [one.covers_all for one in todo] == [False] * (len(todo) - 1) + [len(todo) > 1]
    position = torch.arange(length)
    for one in todo:
        # With few together, several tables of several chunks.
        tables = schedule.tables(pattern, one, length, kv_heads, block, together, torch.device("cpu"))
        assert together or tables.chunk == one.chunk
        assert tables.chunk == one.chunk or tables.items.shape[2] <= together
        for g in range(kv_heads):
            tiles = list(tiles_of(tables, one, g, length))
            visited = torch.cat([torch.empty(0, dtype=torch.int64), *tiles]).sort().values
            needed = torch.full((length,), one.covers_all)
            for i in one.branches:
                inside = pattern.contains(i, position, g, kv_heads)
                needed |= inside
                if one.is_aligned:
                    assert all(len(inside[tile].unique()) == 1 for tile in tiles)
                    assert all(len((tile // pattern.segment_lengths[i]).unique()) == 1 for tile in tiles)
            assert len(visited.unique()) == len(visited)
            assert tables.cut or all(len(tile) == block for tile in tiles)
            assert torch.isin(position[needed], visited).all()
            assert all((tile.diff() > 0).all() for tile in tiles)


@pytest.mark.parametrize("dilation_rates", [(1, 2, 4), (1, 2, 6)])
def test_the_tiles_of_several_chunks_stand_together_the_longest_first(dilation_rates):
    pattern, length, heads = DilatedPattern((64, 128, 256), dilation_rates), 4096, 2
    (one,) = schedule.passes(pattern, length, 8)
    tables = schedule.tables(pattern, one, length, heads, 8, 256, torch.device("cpu"))
    assert tables.chunk % one.chunk == 0
    assert one.chunk < tables.chunk <= length
    assert tables.items.shape[1] == 1
    for g in range(heads):
        counts = [
            sum(bool(pattern.contains(i, tile[:1], g, heads)) for i in one.branches)
            for tile in tiles_of(tables, one, g, length)
        ]
        for some in torch.tensor(counts).split(tables.items.shape[2]):
            assert some.equal(some.sort(descending=True).values)


@pytest.mark.parametrize("segment_lengths", [(64,), (64, 64)])
def test_chunks_stand_apart_where_all_tiles_are_equally_long(segment_lengths):
    pattern = DilatedPattern(segment_lengths, (1,) * len(segment_lengths))
    (one,) = schedule.passes(pattern, 4096, 8)
    tables = schedule.tables(pattern, one, 4096, 1, 8, 256, torch.device("cpu"))
    assert tables.chunk == one.chunk


@pytest.mark.parametrize(
    ("branches", "length"),
    [
        *((tuple((2048 << n, 1 << n) for n in range(5)), length) for length in (36864, 67584, 50000, 65537)),
        (((2048, 1), (2**20, 3)), 8192),
        (((2048, 1), (2**20, 5)), 12288),
    ],
)
def test_few_programs_are_started_for_tiles_past_the_end(branches, length):
    pattern = DilatedPattern(*zip(*branches, strict=True))
    (one,) = schedule.passes(pattern, length, 128)
    programs = [
        tables.items.shape[2] * -(-length // tables.chunk)
        for tables in (schedule.tables(pattern, one, length, 1, 128, each, torch.device("cpu")) for each in (0, 512))
    ]
    assert programs[0] <= programs[1] <= 1.05 * programs[0]


def counted(pattern, one, length, kv_heads, is_causal, block):
    # Tiles, and blocks of keys that they visit, head by head and key by key.
    tables = schedule.tables(pattern, one, length, kv_heads, block, 0, torch.device("cpu"))
    position = torch.arange(length)
    tiles = blocks = 0
    for g in range(kv_heads):
        for tile in tiles_of(tables, one, g, length):
            visited = 0
            for i in one.branches:
                keys = pattern.contains(i, position, g, kv_heads)
                if keys[tile[0]]:
                    w = pattern.segment_lengths[i]
                    seen = keys & (position // w == tile[0] // w) & (position <= (tile[-1] if is_causal else length))
                    visited += -(-int(seen.sum()) // block)
            tiles += visited > 0
            blocks += visited
    return tiles, blocks


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([8, 16, 48]), st.integers(1, 7)), min_size=1, max_size=4),
    st.sampled_from([5, 48, 96, 144]),  # whole segments: kernels take a tile that the end cuts off to reach up to it
    st.integers(1, 3),
    st.booleans(),
)
@example([(16, 1), (48, 6)], 144, 3, True)
def test_the_work_of_a_launch_is_what_its_tiles_visit(pairs, length, kv_heads, is_causal):
    pattern = DilatedPattern(*map(tuple, zip(*pairs, strict=True)))
    one = schedule.passes(pattern, length, 8)[-1]
    if not one.is_aligned:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(division, "BLOCK", 8)
        work = division._work(pattern, one, length, kv_heads, is_causal)
    tiles, blocks = counted(pattern, one, length, kv_heads, is_causal, 8)
    assert work == pytest.approx(blocks + tiles * division.TILE + division.LAUNCH)


@pytest.mark.parametrize("length", [65537, 262144])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sample_of_tiles_tells_the_work_of_all(monkeypatch, length, is_causal):
    one = schedule.passes(PAPER, length, division.BLOCK)[-1]
    sample = division._work(PAPER, one, length, 24, is_causal)
    monkeypatch.setattr(division, "CHUNKS", length)
    monkeypatch.setattr(division, "HEADS", 24)
    assert sample == pytest.approx(division._work(PAPER, one, length, 24, is_causal), rel=0.03)


@pytest.mark.parametrize(
    ("pattern", "length", "is_causal", "parts"),
    [
        (REFERENCE, 65536, False, 1),  # all tiles are full
        (REFERENCE, 65536, True, 2),  # a tile of one class in sixteen spans a chunk
        (PAPER, 65536, False, 2),  # a third of the tiles would not be full
        (PAPER, 65536, True, 2),
        (REFERENCE, 2048, True, 1),  # too little to do for a second launch
        (DilatedPattern((2**20, 2**21), (2**12, 2**13)), 2**22, True, 1),  # more classes than are counted
        (DilatedPattern((2**21, 3 * 2**20), (2**13, 2**13)), 3 * 2**21, True, 2),  # and of both across segments
        (DilatedPattern((2**21,) * 7, (2**13,) * 7), 2**22, True, 2),  # and more branches than descriptors
        (DilatedPattern((64,), (1,)), 64, True, 1),
        (DilatedPattern([64 << n for n in range(9)], [1] * 9), 32768, False, 2),  # more than descriptors
        (DilatedPattern((2048, 8192, 12288), (1, 2, 6)), 98304, True, 2),  # 8192 does not divide 12288
    ],
)
def test_branches_are_divided_where_tiles_would_be_cut(pattern, length, is_causal, parts):
    found, left = division.launches(pattern, length, 16 if length < 2**20 else 1, is_causal)
    assert len(found) == parts
    assert sum((one.branches for one in found), ()) == tuple(range(len(pattern.branches)))
    assert all(one.is_aligned and len(one.branches) <= division.BRANCHES for one in found)
    assert left == ()


@pytest.mark.parametrize(
    ("branches", "length", "ours", "theirs"),
    [
        (((2048, 16384), (1, 6)), 16385, [(0,)], [(1,)]),  # rows past the last multiple of 6
        (((2048, 16384), (1, 2)), 16384, [(0, 1)], []),
        (((64, 256), (1, 2)), 256, [(0, 1)], []),  # a short call: a launch takes longer than its tiles
        (((64, 256), (1, 2)), 16384, [(0,), (1,)], []),
        (((2048, 3000), (1, 1)), 16384, [(0,), (1,)], []),  # a tile of both would lie across segments
        (((2048, 16384), (1, 64)), 16384, [(0,), (1,)], []),  # tiles of both would be short
        (((9,), (4,)), 10, [], [(0,)]),
        # No more launches than the results may be rounded by.
        ((range(1001, 1021, 2), [1] * 10), 8192, [(i,) for i in range(division.LAUNCHES)], [(8, 9)]),
    ],
)
def test_branches_that_the_copy_engine_does_not_reach_or_that_are_too_many_are_left(branches, length, ours, theirs):
    found = division.launches(DilatedPattern(*map(list, branches)), length, 1, False)
    assert [[one.branches for one in some] for some in found] == [ours, theirs]
