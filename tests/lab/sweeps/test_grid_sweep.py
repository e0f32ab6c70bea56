"""The sweep of notebook 08 holds every order against float64; its tables and pictures show what was counted."""

import pytest
import torch
from grid_cases import exact
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib.attention.grids import api, flex
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.cache.neighbourhood import block_reach, block_shares, count_blocks
from hilbert_lib.lab.figures.grids import draw_block_maps, draw_idea
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.sweeps.grids import REORDERED, GridWork, compare_orders
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.ordering import Ordering

CPU = torch.device("cpu")
ORDERS = ("snake", "tile", "morton", "hilbert")


def attention(q, k, v, order, work):
    given, request = api.validated(q, k, v, work.neighbourhood, ordering=order)
    return flex.attend(given, request, block_size=work.block_size)[0]


def reordered(q, k, v, order, work):
    return order.undo(attention(*(order.apply(x, dim=1) for x in (q, k, v)), order, work), dim=1)


def dense(q, k, v, order, work):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


@pytest.fixture(scope="module")
def records():
    works = [
        GridWork(Neighbourhood((side, side), window), block, 2, 8, CPU, "float32")
        for side, window, block in ((16, 3, 16), (16, 7, 32), (6, 3, 16))
    ]
    return run_sides(compare_orders(works, attention, reordered, dense, orders=ORDERS), device=CPU)


def test_every_order_is_paired_with_raster_and_dense_once_a_grid(records):
    pairs = ratio_table(records, "neighbourhood")
    against = pairs[pairs.a == "raster"].groupby(["side", "window", "block_size"]).b.apply(tuple)
    assert against.to_dict() == {(16, 3, 16): ORDERS, (16, 7, 32): ORDERS, (6, 3, 16): ORDERS}
    assert pairs[pairs.a == "dense"][["b", "side"]].values.tolist() == [["hilbert", 16], ["hilbert", 6]]
    assert pairs[pairs.a == "hilbert"].b.tolist() == [REORDERED] * 3


def test_every_side_computes_its_function_with_the_counted_blocks(records):
    sides = side_table(records, "neighbourhood")
    assert sides.error.max() < 1e-5
    assert set(sides.name) == {"raster", *ORDERS, "dense", REORDERED}
    counts = count_blocks([(16, 16)], windows=[3, 7], block_sizes=[16, 32])
    keys = ["window", "block_size"]
    merged = sides[sides.side == 16].merge(counts, left_on=["name", *keys], right_on=["order", *keys])
    assert len(merged) == 2 * 5
    assert merged[["touched_x", "full_x"]].values.tolist() == merged[["touched_y", "full_y"]].values.tolist()


@pytest.mark.parametrize("window", [5, 12])
def test_the_error_sees_a_wrong_row_and_the_order_of_storage(window):
    near = Neighbourhood((12, 12), window)
    work = GridWork(near, 16, heads=2, head_dim=4, device=CPU, dtype="float64")
    q, k, v, dout = work.tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = exact(*leaves, near)
    gradients = torch.autograd.grad(out, leaves, dout)
    ordering = Ordering.from_curve("hilbert", 144, grid=(12, 12))
    stored = [[ordering.apply(x, dim=1) for x in results] for results in ((out.detach(),), gradients)]
    for results in stored:
        assert work.sampled.error(results, ordering.inverse) < 1e-12
        assert work.sampled.error(results) > 0.1
    for wrong in range(3 if window < 12 else 1):
        changed = [x.clone() for x in stored[1]]
        changed[wrong] *= 1.5
        assert work.sampled.error(changed, ordering.inverse) == pytest.approx(0.5)


def test_the_pictures_say_what_is_counted():
    near, sizes = Neighbourhood((16, 16), 5), {"block_size": 4}
    table = block_reach(near, names=["raster", "hilbert"], **sizes)
    figure = draw_idea(table, window=5, **sizes)
    counts = count_blocks([(16, 16)], windows=[5], block_sizes=[4]).set_index("order")
    for axes, name, touched in zip(figure.axes, ("raster", "hilbert"), (15, 9), strict=True):
        mean = counts.per_query_block[name] / 64
        assert f"{touched} of 64 blocks of keys ({touched / 64:.0%})" in axes.get_xlabel()
        assert f"over all blocks of queries: {mean:.0%}" in axes.get_xlabel()
        assert len(axes.patches) == touched
        assert (table[table.order == name].part != "skipped").sum() == 4 * touched
        cells = table[table.order == name].assign(position=lambda cell: 16 * cell.row + cell.col)
        own = torch.tensor(cells[cells.part == "queries"].position.to_numpy())
        seen = near.attends(own[:, None], torch.arange(256)).any(0).nonzero().flatten()
        assert set(cells[cells.part.isin(["queries", "seen"])].position) == set(seen.tolist())
    maps = draw_block_maps(block_shares(near, **sizes), title="a test")
    shown = {axes.get_title() for axes in maps.axes}
    assert shown >= {f"{name}: {counts.per_query_block[name] / 64:.0%} touched" for name in ("raster", "tile")}


def test_a_record_has_one_number_for_a_window_of_equal_sides():
    for window, recorded in (((5, 5), 5), ((3, 5), [3, 5])):
        work = GridWork(Neighbourhood((12, 12), window), 16, 1, 8, CPU, "float32")
        raster, _ = next(compare_orders([work], attention, reordered, dense, orders=ORDERS))
        assert raster.parameters["window"] == recorded
