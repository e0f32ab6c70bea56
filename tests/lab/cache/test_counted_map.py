"""The map of orders is counted as one pair after another would be, for every order, block and dilation."""

import pytest
import torch

from hilbert_lib.lab.cache.neighbourhood import block_pairs, used_by_blocks, used_by_boxes
from hilbert_lib.lab.cache.order_map import (
    APART,
    HILBERT,
    ROWS,
    count_order_map,
    count_point_map,
    map_orders,
    residues_apart,
)
from hilbert_lib.lab.cache.points import HALVED, count_lists
from hilbert_lib.patterns.neighbourhood import Neighbourhood


def touched_by_pairs(near, order, size):
    return int((block_pairs(near, order, q_block=size, kv_block=size) > 0).sum())


@pytest.mark.parametrize(("side", "cells"), [(12, 16), (16, 20)])  # a window of 5 at dilation 3 is wider than 12
def test_blocks_are_counted_as_pair_by_pair(side, cells):
    counts = count_order_map(sides=[side], windows=[3, 5], dilations=[1, 2, 3], block_sizes=[8, 16])
    blocks = counts[counts.kernel == "blocks"]
    assert len(blocks) == cells
    for cell in blocks.itertuples():
        near = Neighbourhood((side, side), cell.window, dilation=cell.dilation)
        orders = map_orders(near.shape, cell.dilation)
        rows, own = (touched_by_pairs(near, orders[name], cell.block_size) for name in (ROWS, cell.order))
        assert cell.counted == pytest.approx(rows / own)


def test_boxes_stand_beside_blocks_of_128_in_the_better_order():
    counts = count_order_map(sides=[64], windows=[3, 13], dilations=[1, 2], block_sizes=[64])
    boxes = counts[counts.kernel == "boxes"].set_index("window").counted
    assert list(boxes.index) == [3, 13]
    for window, better in ((3, ROWS), (13, HILBERT)):
        near = Neighbourhood((64, 64), window)
        used = {name: used_by_blocks(near, order) for name, order in map_orders(near.shape, 1).items()}
        assert max(used, key=used.get) == better
        assert boxes[window] == pytest.approx(used_by_boxes(near) / used[better])


@pytest.mark.parametrize(("shape", "dilation"), [((6, 6), 2), ((7, 5), 3)])
def test_residues_lie_apart_each_along_a_curve(shape, dilation):
    order = residues_apart(shape, dilation)
    row, column = torch.unravel_index(order.perm, shape)
    classes = row % dilation * dilation + column % dilation
    assert len(classes.unique_consecutive()) == dilation**2
    steps = (row.diff().abs() + column.diff().abs())[classes.diff() == 0]
    assert (steps <= 2 * dilation).all()  # neighbours of one class; odd sides make a diagonal step


def test_a_window_wider_than_every_grid_is_refused():
    with pytest.raises(ValueError, match=r"windows must hold one of at most 16, the side of a grid, got \[17\]"):
        count_order_map(sides=[16], windows=[17])


def test_points_are_counted_as_notebook_13_counts_them():
    counts = count_point_map(300).set_index(["kernel", "cloud", "window"]).counted
    lists = count_lists(300, works=[("room", [5])]).set_index("order")
    assert counts["lists", "room", 5] == pytest.approx(lists.used[HALVED] / lists.used[ROWS])
    assert counts["blocks", "room", 5] == pytest.approx(lists.block_used[HILBERT] / lists.block_used[ROWS])


def test_orders_with_a_dilation_are_three():
    assert list(map_orders((4, 4), 1)) == [ROWS, HILBERT]
    assert list(map_orders((4, 4), 2)) == [ROWS, HILBERT, APART]
