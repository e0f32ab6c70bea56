"""The cache model against programs that are slower and more obvious."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lru import Lru

from hilbert_lib.lab.cache import l2, sweeps
from hilbert_lib.lab.cache.cache import LAYOUTS, Storage, row_units, tile_requests, units_touched
from hilbert_lib.lab.cache.l2 import NEVER, Trace, kernel_trace, lru_hit_rates, stack_distances
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern


def naive_tiles(storage, pattern, branch, head, unit_bytes, tile_keys, key_order):
    """For each segment of a branch, how many keys it has and the units of each of its tiles, key by key."""
    (w, r), offset = pattern.branches[branch], pattern.offset(branch, head, storage.heads)
    for start in range(0, storage.length, w):
        keys = list(range(start + offset, min(start + w, storage.length), r))
        if key_order == "storage":
            keys.sort(key=lambda key: int(storage.ordering.inverse[key]))
        tiles = []
        for first in range(0, len(keys), tile_keys):
            bytes_of = [int(storage.addresses(torch.tensor(key), head)) for key in keys[first : first + tile_keys]]
            units = [range(a // unit_bytes, (a + storage.row_bytes - 1) // unit_bytes + 1) for a in bytes_of]
            tiles.append(sorted(set().union(*units)))
        yield len(keys), tiles


def naive_kernel(storage, pattern, unit_bytes, tile_queries, tile_keys, concurrent, key_order):
    """The programs of `kernel_trace` one by one, each a list of steps, and waves that walk them in step."""
    programs, v_start = [], -(-storage.length * storage.heads * storage.row_bytes // unit_bytes)
    for branch in range(len(pattern.branches)):
        for head in pattern.branch_heads(branch, storage.heads):
            segments = naive_tiles(storage, pattern, branch, head, unit_bytes, tile_keys, key_order)
            for segment, (queries, tiles) in enumerate(segments):
                steps = [step for tile in tiles for step in (tile, [unit + v_start for unit in tile])]
                programs += [((branch, head, segment), steps)] * -(-queries // tile_queries)
    trace = []
    for first in range(0, len(programs), concurrent):
        wave = programs[first : first + concurrent]
        for step in range(max(len(tiles) for _, tiles in wave)):
            for group in dict.fromkeys(group for group, _ in wave):
                members = [tiles for other, tiles in wave if other == group]
                if step < len(members[0]):
                    trace += [unit for unit in members[0][step] for _ in members]
    return trace


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 14))
def test_hits_by_stack_distance_are_those_of_an_lru_cache(units, capacity):
    distances = stack_distances(torch.tensor(units, dtype=torch.int64))
    assert int((distances >= capacity).sum()) == Lru(capacity).count_misses(units)
    assert int((distances == NEVER).sum()) == len(set(units))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=60), st.integers(1, 10))
def test_requests_of_programs_in_step_count_like_reads_one_after_the_other(reads, capacity):
    units, requests = (torch.tensor(column) for column in zip(*reads, strict=True))
    result = lru_hit_rates(Trace(units, requests, unit_bytes=32), [32 * capacity]).iloc[0]
    expanded = units.repeat_interleave(requests).tolist()
    assert (result.requests, result.misses) == (len(expanded), Lru(capacity).count_misses(expanded))
    assert result.hit_rate == pytest.approx(1 - result.misses / len(expanded))
    assert result.memory_bytes == 32 * result.misses


@pytest.mark.parametrize(
    ("pattern", "concurrent", "key_order"),
    [
        (DilatedPattern((16,), (2,)), 1, "storage"),
        (DilatedPattern((16,), (3,)), 4, "position"),
        (DilatedPattern((8, 37), (2, 5), offsets="branch"), 7, "storage"),
        (DilatedPattern((8, 32), (1, 4), mixing="head_groups"), 3, "position"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trace_is_that_of_programs_run_one_by_one(pattern, concurrent, key_order, layout):
    storage = Storage(Ordering.from_curve("hilbert", 37), row_bytes=24, heads=3, layout=layout)
    options = {"unit_bytes": 32, "tile_queries": 3, "tile_keys": 4, "concurrent": concurrent, "key_order": key_order}
    trace = kernel_trace(storage, pattern, **options)
    assert trace.units.repeat_interleave(trace.requests).tolist() == naive_kernel(storage, pattern, **options)


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=30), st.integers(1, 300), st.integers(1, 300))
def test_units_are_those_of_every_byte(first_bytes, row_bytes, unit_bytes):
    addresses = torch.tensor(first_bytes)
    expected = [sorted({byte // unit_bytes for byte in range(a, a + row_bytes)}) for a in first_bytes]
    units, rows = row_units(addresses, row_bytes, unit_bytes)
    assert units.tolist() == [unit for row in expected for unit in row]
    assert rows.tolist() == [i for i, row in enumerate(expected) for _ in row]
    assert units_touched(addresses, row_bytes, unit_bytes) == len(set().union(*expected))
    tiles = torch.arange(len(addresses)) // 4
    in_tiles = [sorted(set().union(*expected[i : i + 4])) for i in range(0, len(expected), 4)]
    found = tile_requests(addresses, tiles, row_bytes, unit_bytes)
    assert list(zip(*map(torch.Tensor.tolist, found), strict=True)) == [
        (tile, unit) for tile, units in enumerate(in_tiles) for unit in units
    ]


def test_addresses_are_those_of_a_tensor_stored_in_the_ordering():
    ordering = Ordering.from_curve("morton", 20)
    k = torch.arange(20 * 3 * 4).view(1, 20, 3, 4)  # each element is its own place in sequence order
    stored = {"bshd": ordering.apply(k, dim=1), "bhsd": ordering.apply(k, dim=1).transpose(1, 2).contiguous()}
    for layout, head in product(LAYOUTS, range(3)):
        addresses = Storage(ordering, row_bytes=4, heads=3, layout=layout).addresses(torch.arange(20), head)
        assert torch.equal(stored[layout].flatten()[addresses], k[0, :, head, 0])


@pytest.mark.parametrize("key_order", ["storage", "position"])
@pytest.mark.parametrize("residue_rate", [None, 4])
def test_counts_are_those_of_every_key(key_order, residue_rate):
    sizes = {"length": 37, "segment_length": 12, "row_bytes": [24, 64], "heads": 3}
    how = {"tile_keys": 2, "key_order": key_order}
    counts = sweeps.count_units(dilation_rates=[5], residue_rate=residue_rate, **sizes, **how)
    orderings = sweeps.compared_orderings(37, residue_rate or 5)
    assert len(counts) == len(orderings) * 2 * 2 * 4
    for row in counts.itertuples():
        storage = Storage(orderings[row.ordering], row.row_bytes, 3, row.layout)
        found = list(naive_tiles(storage, DilatedPattern((12,), (5,)), 0, 0, row.unit_bytes, 2, key_order))
        tiles = [tile for _, tiles in found for tile in tiles]
        assert row.rows == sum(keys for keys, _ in found)
        assert row.fewest == -(-row.rows * row.row_bytes // row.unit_bytes)
        assert (row.touched, row.requested) == (len(set().union(*tiles)), sum(map(len, tiles)))


def test_hit_rates_are_those_of_each_ordering_and_size():
    options = {"capacities": [2**k for k in range(9, 18)], "tile_queries": 16, "tile_keys": 16, "concurrent": 3}
    rates = l2.hit_rates(DilatedPattern((256,), (4,)), length=512, row_bytes=[32, 128], **options)
    whole, small = (rates[rates.row_bytes == size].groupby("capacity_bytes").misses for size in (128, 32))
    assert (whole.nunique() == 1).all()  # rows of whole lines: an ordering only renames them
    assert whole.first().nunique() > 1  # the capacities straddle what is reused
    assert (small.nunique() > 1).any()
