"""The cache model against programs that are slower and more obvious."""

from collections import OrderedDict
from itertools import product

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilbert_lib.lab.cache import l2, sweeps
from hilbert_lib.lab.cache.cache import (
    LAYOUTS,
    LINE_BYTES,
    SECTOR_BYTES,
    Storage,
    branch_rows,
    row_units,
    tile_requests,
    units_touched,
)
from hilbert_lib.lab.cache.lru import NEVER, Trace, kernel_trace, lru_hit_rates, stack_distances
from hilbert_lib.lab.figures import locality as figures
from hilbert_lib.lab.figures import redraw, show
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

DILATIONS = [1, 2, 4, 8]


@pytest.fixture(scope="module")
def counts():
    return sweeps.count_units(
        length=1024,
        segment_length=256,
        dilation_rates=DILATIONS,
        row_bytes=[4, 16, 48, 64, 128, 256],
        page_bytes=4096,
        heads=4,
    )


def naive_misses(units, capacity):
    cache, misses = OrderedDict(), 0
    for unit in units:
        if unit not in cache:
            misses += 1
            if len(cache) == capacity:
                cache.popitem(last=False)
        cache[unit] = None
        cache.move_to_end(unit)
    return misses


def naive_kernel(storage, pattern, unit_bytes, tile_queries, tile_keys, concurrent, key_order):
    """The programs of `kernel_trace` one by one, each a list of steps, and waves that walk them in step."""
    programs, v_start = [], -(-storage.tensor_bytes // unit_bytes)
    for branch, (w, r) in enumerate(pattern.branches):
        for head in pattern.branch_heads(branch, storage.heads):
            offset = pattern.offset(branch, head, storage.heads)
            for start in range(0, storage.length, w):
                keys = list(range(start + offset, min(start + w, storage.length), r))
                queries = len(keys)
                if key_order == "storage":
                    keys.sort(key=lambda key: int(storage.ordering.inverse[key]))
                tiles = []
                for first in range(0, len(keys), tile_keys):
                    tile = set()
                    for key in keys[first : first + tile_keys]:
                        byte = int(storage.addresses(torch.tensor(key), head))
                        tile.update(range(byte // unit_bytes, (byte + storage.row_bytes - 1) // unit_bytes + 1))
                    tiles += [sorted(tile), [unit + v_start for unit in sorted(tile)]]
                programs += [((branch, head, start), tiles)] * -(-queries // tile_queries)
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
    assert int((distances >= capacity).sum()) == naive_misses(units, capacity)
    assert int((distances == NEVER).sum()) == len(set(units))


def test_cyclic_reads_have_the_distance_of_the_cycle():
    distances = stack_distances(torch.arange(1000).repeat(50))
    assert (distances[1000:] == 999).all()


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=60), st.integers(1, 10))
def test_requests_of_programs_in_step_count_like_reads_one_after_the_other(reads, capacity):
    units, requests = (torch.tensor(column) for column in zip(*reads, strict=True))
    result = lru_hit_rates(Trace(units, requests, unit_bytes=32), [32 * capacity]).iloc[0]
    expanded = units.repeat_interleave(requests).tolist()
    assert (result.requests, result.misses) == (len(expanded), naive_misses(expanded, capacity))
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_fill_the_tensor_without_overlap(layout):
    storage = Storage(Ordering.random(30, seed=1), row_bytes=12, heads=5, layout=layout)
    addresses = torch.cat([storage.addresses(torch.arange(30), head) for head in range(5)])
    assert addresses.sort().values.tolist() == list(range(0, storage.tensor_bytes, 12))


def test_addresses_are_those_of_a_tensor_stored_in_the_ordering():
    ordering = Ordering.from_curve("morton", 20)
    k = torch.arange(20 * 3 * 4).view(1, 20, 3, 4)  # each element is its own place in sequence order
    stored = {"bshd": ordering.apply(k, dim=1), "bhsd": ordering.apply(k, dim=1).transpose(1, 2).contiguous()}
    for layout, head in product(LAYOUTS, range(3)):
        addresses = Storage(ordering, row_bytes=4, heads=3, layout=layout).addresses(torch.arange(20), head)
        assert torch.equal(stored[layout].flatten()[addresses], k[0, :, head, 0])


@pytest.mark.parametrize("key_order", ["storage", "position"])
def test_reading_order_has_the_keys_of_the_pattern_whatever_the_ordering(key_order):
    pattern = DilatedPattern((12,), (5,))
    for ordering in sweeps.compared_orderings(50, rate=5).values():
        rows = branch_rows(Storage(ordering, 16, heads=4), pattern, head=3, tile_keys=2, key_order=key_order)
        for segment in range(5):
            mine = rows.positions[rows.segments == segment].tolist()
            assert sorted(mine) == [p for p in range(12 * segment, min(12 * segment + 12, 50)) if p % 12 % 5 == 3]
        walked = rows.positions if key_order == "position" else ordering.inverse[rows.positions]
        assert all((walked[rows.segments == s].diff() > 0).all() for s in range(5))


def test_rows_of_whole_units_are_counted_alike_in_every_ordering(counts):
    whole = counts[counts.row_bytes % counts.unit_bytes == 0]
    assert {"sector", "line"} <= set(whole.unit)
    assert (whole.touched == whole.fewest).all()
    assert (whole.requested == whole.fewest).all()


def test_tokens_of_whole_units_are_counted_alike_in_every_ordering(counts):
    token_bytes = counts.row_bytes * counts.layout.map({"bshd": 4, "bhsd": 1})
    alike = counts[(token_bytes % counts.unit_bytes == 0) | (counts.dilation == 1)]
    assert (alike.groupby(["layout", "row_bytes", "dilation", "unit"]).touched.nunique() == 1).all()


def test_residue_major_touches_the_fewest_units(counts):
    case = ["layout", "row_bytes", "dilation", "unit"]
    touched = counts.pivot(index=case, columns="ordering", values="touched")
    assert touched.residue.equals(touched.min(axis=1))
    assert (touched.residue < touched.hilbert).any()
    packed = counts.query("ordering == 'residue' and layout == 'bhsd'")
    assert (packed.touched == packed.fewest).all()


def test_one_residue_storage_serves_the_rates_that_divide_its_own_and_no_others(counts):
    rates = [1, 2, 3, 4, 8]
    options = {"length": 1024, "segment_length": 256, "row_bytes": [16, 64], "page_bytes": 2**12, "heads": 4}
    counts = sweeps.count_units(dilation_rates=rates, residue_rate=8, **options).query("layout == 'bhsd'")
    lines = counts[counts.unit == "line"].pivot(
        index=["row_bytes", "dilation", "fewest"], columns="ordering", values="touched"
    )
    lines = lines.reset_index()
    divides = lines.dilation != 3
    assert (lines.residue == lines.fewest)[divides].all()
    assert (lines.residue >= lines.linear)[~divides].all()
    pages = counts.query("unit == 'page' and ordering == 'residue' and row_bytes == 16")
    assert (pages.touched > pages.fewest).any()  # a class is half a page


def test_savings_are_shares_of_the_linear_count():
    table = pd.DataFrame({"dilation": [4, 4, 8, 8, 16, 16], "ordering": ["linear", "hilbert"] * 3})
    table = table.assign(layout="bhsd", row_bytes=16, unit="line", unit_bytes=128, touched=[8, 6, 10, 12, 10, 5])
    assert sweeps.saving_against_linear(table).saving.tolist() == pytest.approx([0.25, -0.2, 0.5])
    reach = sweeps.ordering_reach(table).iloc[0]
    assert (reach.best, reach.worst, reach.hilbert) == pytest.approx((0.5, -0.2, 0.5))
    found = sweeps.savings_between(table, ordering="hilbert", unit="line", least=0.25, most=0.4)
    assert found.values.tolist() == [["bhsd", 16, [4]]]


@pytest.mark.parametrize("key_order", ["storage", "position"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_ordering_changes_the_hit_rate_of_rows_of_whole_lines(layout, key_order):
    pattern = DilatedPattern((256,), (4,))
    options = {"length": 512, "capacities": [2**k for k in range(9, 18)], "concurrent": 3, "heads": 2}
    options |= {"layout": layout, "key_order": key_order, "tile_queries": 16, "tile_keys": 16}
    rates = l2.hit_rates(pattern, row_bytes=[128], **options)
    assert (rates.groupby("capacity_bytes").misses.nunique() == 1).all()
    assert rates.misses.nunique() > 1  # the capacities straddle what is reused
    if layout == "bhsd":
        small = l2.hit_rates(pattern, row_bytes=[32], **options)
        assert (small.groupby("capacity_bytes").misses.nunique() > 1).any()


def test_whole_tiles_as_units_give_the_hit_rates_of_lines(monkeypatch):
    monkeypatch.setattr(l2, "GPUS", (l2.Gpu("small", 160 * 1024, 3), l2.Gpu("smaller", 32 * 1024, 2)))
    by_tile = l2.l2_hit_rates_of_whole_rows([512, 1024], row_bytes=128).set_index(["gpu", "keys"])
    assert by_tile.hit_rate.nunique() > 2
    for keys in (512, 1024):
        by_line = l2.l2_hit_rates(DilatedPattern((2 * keys,), (2,)), length=2 * keys, row_bytes=[128])
        for row in by_line.itertuples():
            assert row.hit_rate == pytest.approx(by_tile.hit_rate[row.gpu, keys])
            assert row.memory_bytes == by_tile.memory_ratio[row.gpu, keys] * by_tile.kv_bytes[row.gpu, keys]


@pytest.mark.usefixtures("rough_pictures")
def test_every_figure_is_drawn_again_from_its_table(tmp_path, counts):
    pattern = DilatedPattern((256,), (4,))
    orderings = sweeps.compared_orderings(1024, rate=4)
    rates = l2.hit_rates(pattern, length=1024, row_bytes=[32, 128], capacities=[2048, 4096], concurrent=2)
    show(figures.draw_storage_map, sweeps.storage_map(orderings, pattern, 64), output_dir=tmp_path, row_bytes=16)
    show(figures.draw_unit_counts, counts, output_dir=tmp_path, dilation=4)
    show(figures.draw_savings, sweeps.saving_against_linear(counts), output_dir=tmp_path)
    show(figures.draw_reach, sweeps.ordering_reach(counts), output_dir=tmp_path, heads=4, dilations="1 to 8")
    show(figures.draw_hit_rates, rates, output_dir=tmp_path, title="hit rates")
    show(
        figures.draw_l2_hit_rates,
        rates.assign(gpu="A100").query("capacity_bytes == 4096"),
        output_dir=tmp_path,
        title="L2",
    )
    show(figures.draw_l2_by_keys, l2.l2_hit_rates_of_whole_rows([64, 128], 128), output_dir=tmp_path, row_bytes=128)
    before = {path: path.with_suffix(".svg").read_bytes() for path in tmp_path.glob("*.png")}
    assert len(before) == 7
    assert set(redraw(tmp_path)) == set(before)
    assert all(path.with_suffix(".svg").read_bytes() == drawn for path, drawn in before.items())


def test_figures_are_no_wider_than_a_page_whatever_the_number_of_panels(counts):
    assert figures.draw_unit_counts(counts, dilation=4).get_figwidth() <= 9
    for sizes in ([16], [16, 32, 128]):
        rates = l2.hit_rates(DilatedPattern((64,), (4,)), length=64, row_bytes=sizes, capacities=[2048], concurrent=2)
        for figure in (
            figures.draw_hit_rates(rates, title="hit rates"),
            figures.draw_l2_hit_rates(rates.assign(gpu="A100"), title="L2"),
        ):
            assert figure.get_figwidth() <= 9
            panels = [axes for axes in figure.axes if axes.get_title().startswith("rows of")]
            assert len(panels) == len(sizes)
            assert all(axes.get_xticks().size for axes in panels)


LINEAR = Ordering.linear(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Storage(LINEAR, 0), "row_bytes must be at least 1, got 0"),
        (lambda: Storage(LINEAR, 16, heads=0), "heads must be at least 1, got 0"),
        (lambda: Storage(LINEAR, 16, layout="sbhd"), "layout must be one of .*'bhsd'.*got 'sbhd'"),
        (lambda: Storage(LINEAR, 16, heads=2).addresses(torch.arange(2), 2), "head must be from 0 to 1, got 2"),
        (lambda: row_units(torch.arange(2), 16, 0), "unit_bytes must be at least 1, got 0"),
        (
            lambda: branch_rows(Storage(LINEAR, 16), DilatedPattern((8,), (2,)), key_order="random"),
            "key_order must be one of .*'storage'.*got 'random'",
        ),
        (
            lambda: kernel_trace(Storage(LINEAR, 16), DilatedPattern((8,), (2,)), concurrent=0),
            "concurrent must be at least 1, got 0",
        ),
        (
            lambda: lru_hit_rates(Trace(torch.arange(2), torch.ones(2), LINE_BYTES), [SECTOR_BYTES]),
            "capacities must hold a unit of 128 bytes, got 32",
        ),
        (
            lambda: figures.draw_unit_counts(pd.DataFrame({"dilation": [4, 1, 4]}), dilation=8),
            r"dilation must be one that was counted \(1, 4\), got 8",
        ),
        (lambda: l2.l2_hit_rates_of_whole_rows([64], 64), "row_bytes must be a multiple of 128, got 64"),
        (lambda: l2.l2_hit_rates_of_whole_rows([65], 128), "key_counts must be multiples of tile_keys=64, got 65"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
