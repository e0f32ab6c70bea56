"""The sweep of notebook 08b holds every order against float64; its tables and pictures show what was counted."""

import gc
import weakref
from itertools import product

import numpy as np
import oracle
import pytest
import torch
from matplotlib.colors import to_rgb

from hilbert_lib.attention import neighbourhood_attention
from hilbert_lib.lab import exact_rows
from hilbert_lib.lab.cache import neighbourhood as counting
from hilbert_lib.lab.cache.neighbourhood import block_reach, block_shares, count_blocks, neighbourhood_orderings
from hilbert_lib.lab.figures.grids import PARTS, draw_block_maps, draw_idea, draw_reads
from hilbert_lib.lab.pairs import run_back_to_back, run_sides
from hilbert_lib.lab.sweeps.grids import REORDERED, attend_by_flex, compare_kernels, sustained_sides
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood

CPU = torch.device("cpu")
KERNELS = {"blocks": ("raster", "tile", "hilbert"), "plain": ("raster", "snake"), "boxes": ("raster",)}
GRIDS = [((12, 12), 5), ((3, 4, 6), (3, 2, 5))]


def attention(q, k, v, order, work, kernel):
    return neighbourhood_attention(q, k, v, work.pattern, ordering=order)


def works(**how):
    size = {"heads": 2, "head_dim": 8, "device": CPU, "dtype": "float32"} | how
    patterns = (Neighbourhood(shape, window) for shape, window in GRIDS)
    return (Workload(near, near.length, **size) for near in patterns)


@pytest.fixture(scope="module")
def records():
    return run_sides(compare_kernels(works(), attention, kernels=KERNELS), device=CPU)


def test_flex_by_itself_computes_the_librarys_function_in_an_order():
    near, (q, k, v) = Neighbourhood((6, 10), 3), torch.randn(3, 1, 60, 2, 8).unbind()
    order = neighbourhood_orderings(near.shape)["hilbert"]
    out = attend_by_flex(q, k, v, near, order)
    torch.testing.assert_close(out, neighbourhood_attention(q, k, v, near, ordering=order))
    assert (out - neighbourhood_attention(q, k, v, near)).abs().max() > 0.1


def test_orders_stand_beside_raster_and_kernels_beside_boxes(records):
    pairs = ratio_table(records, "neighbourhood").query("side == 12")
    orders = [("raster", "tile"), ("raster", "hilbert"), ("plain, raster", "plain, snake")]
    kernels = [(name, "boxes, raster") for name in ("raster", "tile", "hilbert", "plain, raster")]
    both = orders + kernels
    assert list(zip(pairs.a, pairs.b, strict=True)) == [*both, ("hilbert", REORDERED), *both]
    assert pairs.direction.tolist() == ["forward"] * (len(both) + 1) + ["backward"] * len(both)


def test_every_side_computes_its_function_and_knows_its_pairs(records):
    sides = side_table(records, "neighbourhood")
    assert sides.error.max() < 1e-5
    assert sides.groupby(["side", "direction"]).size().tolist() == [6, 7, 6, 7]
    assert set(sides.window) == {5, "3 x 2 x 5"}
    used = sides.dropna(subset="used").set_index(["side", "order", "kernel"]).used
    for shape, window in GRIDS:
        near, side = Neighbourhood(shape, window), counting.of_axes(shape)
        for order in KERNELS["blocks"]:
            share = share_in_blocks(near, neighbourhood_orderings(shape)[order])
            assert used[side, order, "blocks"].unique() == pytest.approx(share, abs=1e-4)
        assert used[side, "raster", "boxes"].unique() == pytest.approx(pairs_of_boxes(near), abs=1e-4)


def share_in_blocks(near, ordering):
    pairs = counting.block_pairs(near, ordering, q_block=128, kv_block=128)
    return int(pairs.sum()) / (128 * 128 * int((pairs > 0).sum()))


def test_full_blocks_count_too():
    near, ordering = Neighbourhood((32, 32), 31), Ordering.from_curve("tile", 1024, grid=(32, 32))
    assert (counting.block_pairs(near, ordering, q_block=128, kv_block=128) == 128 * 128).any()
    assert counting.used_by_blocks(near, ordering) == pytest.approx(share_in_blocks(near, ordering))


def pairs_of_boxes(near):
    """The share of the pairs of boxes that attend: box by box of queries, and of what each of them sees."""
    shares = []
    for sides in counting.BOXES[len(near.shape)]:
        computed, firsts = 0, product(*(range(0, n, side) for n, side in zip(near.shape, sides, strict=True)))
        for first in firsts:
            cells = product(*(range(a, min(a + s, n)) for a, s, n in zip(first, sides, near.shape, strict=True)))
            positions = [int(np.ravel_multi_index(cell, near.shape)) for cell in cells]
            keys = np.array(np.unravel_index(torch.cat([near.keys(p) for p in positions]).numpy(), near.shape))
            spans = keys.max(axis=1) - keys.min(axis=1) + 1
            computed += 64 * 64 * int(np.prod([-(-span // side) for span, side in zip(spans, sides, strict=True)]))
        shares.append(near.pairs / computed)
    return max(shares)


def test_boxes_are_those_that_the_kernels_read():
    grid_launch = pytest.importorskip("hilbert_lib.attention.triton.hopper.grid_launch")
    for ndim, own in counting.BOXES.items():
        assert own == tuple(sides[3 - ndim :] for sides in grid_launch.BOXES[ndim])


def test_shares_of_what_users_run_are_those_of_the_page_on_grids():
    used = counting.count_used(counting.USERS[:3]).set_index(["window", "order"]).used
    assert [used[window, "boxes"] for window in (17, 33, 65)] == pytest.approx([0.50, 0.68, 0.81], abs=0.006)
    assert (used.unstack().boxes > used.unstack().drop(columns="boxes").max(axis=1)).all()


def test_the_tensors_of_a_workload_go_when_its_sides_have_gone():
    (work, *_) = works()
    sides = list(compare_kernels([work], attention, kernels=KERNELS))
    run_sides(sides[:1], device=CPU)
    tensors = [weakref.ref(x) for x in work.tensors]
    del work, sides
    gc.collect()
    assert [ref() for ref in tensors] == [None] * 4


def test_kernels_run_back_to_back_in_turn():
    sides = sustained_sides(works(), attention, kernels={"blocks": "hilbert", "boxes": "raster"})
    records = run_back_to_back(sides, device=CPU, seconds=0.002)
    table = side_table(records, "neighbourhood, back to back")
    assert len(records) == 4
    assert table.name.tolist() == ["hilbert", "boxes, raster"] * 4
    assert table.error.max() < 1e-5
    assert (table.median_ms > 0).all()


@pytest.mark.parametrize("window", [5, 12])
def test_the_error_sees_a_wrong_row_and_the_order_of_storage(window, monkeypatch):
    monkeypatch.setattr(exact_rows, "QUERIES_AT_ONCE", 7)
    near = Neighbourhood((12, 12), window)
    work = Workload(near, near.length, heads=2, head_dim=4, device=CPU, dtype="float64")
    q, k, v, dout = work.tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = oracle.attention(*leaves, near)
    gradients = torch.autograd.grad(out, leaves, dout)
    ordering = Ordering.from_curve("hilbert", 144, grid=(12, 12))
    stored = [[ordering.apply(x, dim=1) for x in results] for results in ((out.detach(),), gradients)]
    for results in stored:
        assert work.error(results, ordering.inverse) < 1e-12
        assert work.error(results) > 0.1
    for wrong in range(3 if window < 12 else 1):
        changed = [x.clone() for x in stored[1]]
        changed[wrong] *= 1.5
        assert work.error(changed, ordering.inverse) == pytest.approx(0.5)


def borders(blocks):
    """The lines around cells of blocks of at least 0, where another block or none is beside: pairs of (x, y)."""
    lines = set()
    for (row, col), block in np.ndenumerate(blocks):
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            beside = row + down, col + right
            is_inside = all(0 <= at < side for at, side in zip(beside, blocks.shape, strict=True))
            if block >= 0 and (not is_inside or blocks[beside] != block):
                ends = [(right / 2 - down * side, down / 2 - right * side) for side in (-0.5, 0.5)]
                lines.add(frozenset((col + x, row + y) for x, y in ends))
    return lines


def framed(axes, colour):
    """The lines that a figure's frames of a colour are made of, as `borders` has them."""
    frames = [each for each in axes.collections if tuple(each.get_color()[0][:3]) == to_rgb(colour)]
    return {frozenset(map(tuple, line.tolist())) for each in frames for line in each.get_segments()}


@pytest.mark.parametrize(
    ("order", "window", "dilation", "edge", "row", "column", "block_size"),
    [("hilbert", 5, 1, "shift", 1, 6, 4), ("random", 3, 2, "wrap", 7, 0, 2), ("raster", 4, 2, "clip", 3, 7, 16)],
)
def test_the_widget_shows_the_keys_of_a_query_and_the_blocks_read(
    order, window, dilation, edge, row, column, block_size
):
    what = {"window": window, "dilation": dilation, "edge": edge, "order": order, "row": row, "column": column}
    figure = draw_reads(side=8, block_size=block_size, **what)
    grid, storage = figure.axes
    line = oracle.seen_along(8, window, dilation, 1, False, edge)
    ordering = neighbourhood_orderings((8, 8))[order]
    slots = {cell: int(ordering.inverse[8 * cell[0] + cell[1]]) for cell in product(range(8), repeat=2)}
    queries = {cell for cell, slot in slots.items() if slot // block_size == slots[row, column] // block_size}
    own = set(product(line[row], line[column]))
    seen = {key for y, x in queries for key in product(line[y], line[x])}
    read = {slots[key] // block_size for key in seen}
    values, blocks = np.empty((8, 8)), np.full((8, 8), -1)
    for cell, slot in slots.items():
        parts = cell in own, cell in queries, cell in seen, slot // block_size in read, True
        values[cell], blocks[cell] = parts.index(True), slot // block_size if slot // block_size in read else -1
    by_slot = [values.flat[int(position)] for position in ordering.perm]
    assert grid.images[0].get_array().tolist() == values.tolist()
    assert storage.images[0].get_array().flatten().tolist() == by_slot
    assert framed(grid, "black") == borders(blocks)
    assert framed(grid, PARTS["queries"][0]) == borders(np.where(blocks == slots[row, column] // block_size, 0, -1))
    assert framed(storage, "black") == borders(blocks.flatten()[ordering.perm].reshape(8, 8))
    for axes, (x, y) in ((grid, (column, row)), (storage, divmod(slots[row, column], 8)[::-1])):
        (star,) = axes.lines
        assert (star.get_xdata()[0], star.get_ydata()[0]) == (x, y)
    assert f"{len(own)} keys" in grid.get_title()
    assert f"{len(read)} of {64 // block_size} blocks are read" in storage.get_title()


def test_the_pictures_say_what_is_counted():
    near, sizes = Neighbourhood((16, 16), 5), {"block_size": 4}
    table = block_reach(near, names=["raster", "hilbert"], **sizes)
    figure = draw_idea(table, window=5, **sizes)
    counts = count_blocks([(16, 16)], windows=[5], block_sizes=[4]).set_index("order")
    for axes, name, touched in zip(figure.axes, ("raster", "hilbert"), (15, 9), strict=True):
        mean = counts.per_query_block[name] / 64
        assert f"{touched} of 64 blocks of keys ({touched / 64:.0%})" in axes.get_xlabel()
        assert f"over all blocks of queries: {mean:.0%}" in axes.get_xlabel()
        rows = table[table.order == name]
        blocks = np.full((16, 16), -1)
        blocks[rows.row, rows.col] = (rows.slot // 4).where(rows.part != "skipped", -1)
        assert framed(axes, "black") == borders(blocks)
        assert (table[table.order == name].part != "skipped").sum() == 4 * touched
        cells = table[table.order == name].assign(position=lambda cell: 16 * cell.row + cell.col)
        own = torch.tensor(cells[cells.part == "queries"].position.to_numpy())
        seen = near.attends(own[:, None], torch.arange(256)).any(0).nonzero().flatten()
        assert set(cells[cells.part.isin(["queries", "seen"])].position) == set(seen.tolist())
    table["grey"] = 0.25
    for axes in draw_idea(table, window=5, title="on a picture", **sizes).axes:
        below, above = axes.images
        assert (below.get_array() == 0.25).all()
        assert ((above.get_alpha() > 0) == (above.get_array() < 3)).all()  # what is skipped stays clear
    maps = draw_block_maps(block_shares(near, **sizes), title="a test")
    shown = {axes.get_title() for axes in maps.axes}
    assert shown >= {f"{name}: {counts.per_query_block[name] / 64:.0%} touched" for name in ("raster", "tile")}
