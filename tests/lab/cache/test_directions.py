"""Counts of the documents' other directions are those of loops: blocks of grids, swaps of points, heads on a curve."""

import itertools

import numpy as np
import pytest
import torch

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, PointNeighbourhood
from hilbert_lib.lab.cache import along_curve, annealing, bound
from hilbert_lib.lab.cache.points import HALVED, point_orders
from hilbert_lib.lab.clouds import made_tissue


@pytest.mark.parametrize(("shape", "window"), [((8, 8), 5), ((8, 16), 3), ((4, 8, 4), 3)], ids=str)
def test_keys_and_blocks_of_a_wrapped_grid_are_those_of_its_neighbourhood(shape, window):
    near, block = Neighbourhood(shape, window, edge="wrap"), 2 ** len(shape)
    for name in ("raster", "tile", bound.BRICKS, "random"):
        ordering = bound.bound_ordering(name, shape, block=block)
        seen = bound.seen_by_blocks(ordering, shape, window, block=block)
        members = ordering.perm.view(-1, block)
        members = members[:: -(-len(members) // bound.SAMPLED)]
        for row, cells in zip(seen, members.tolist(), strict=True):
            assert set(row.nonzero()[:, 0].tolist()) == {key for cell in cells for key in near.keys(cell).tolist()}
        table = bound.count_bound([(shape, [window])], orders=[name], block=block).set_index("order")
        blocks = [{int(ordering.inverse[key]) // block for key in row.nonzero()[:, 0]} for row in seen]
        assert table.blocks[name] == np.mean([len(each) for each in blocks])
        assert table["keys"][name] == seen.sum(1).double().mean()


@pytest.mark.parametrize("shape", [(16, 32), (8, 8, 16)], ids=str)
def test_bricks_are_whole_squares_of_which_no_two_rows_stand_on_each_other(shape):
    side = 4
    cells = torch.stack(torch.unravel_index(bound.brick_ordering(shape, side).perm, shape), 1).view(
        -1, side ** len(shape), len(shape)
    )
    first_rows = {}
    for brick in cells:
        corner = tuple(brick[0].tolist())
        steps = (brick - brick[0]) % torch.tensor(shape)
        assert set(map(tuple, steps.tolist())) == set(itertools.product(range(side), repeat=len(shape)))
        first_rows.setdefault(corner[:-1], set()).add(corner[-1] % side)
    assert {frozenset(starts) for starts in first_rows.values()} == {frozenset({0}), frozenset({side // 2})}


def test_squares_reach_the_bound_and_bricks_touch_fewer_blocks_at_narrow_windows():
    table = bound.count_bound([((64, 64), (5, 9, 17)), ((16, 16, 16), (3, 5))])
    keys = table.pivot(index=["grid", "window"], columns="order", values="keys")
    for name in ("tile", "morton", "hilbert", bound.BRICKS):
        assert (keys[name] - keys[bound.BOUND]).abs().max() < 1e-9, name
    assert (keys.raster > keys[bound.BOUND]).all()
    blocks = table.pivot(index=["grid", "window"], columns="order", values="blocks")
    assert blocks[bound.BRICKS].tolist() == [17, 17, 7, 7, 11]
    assert blocks.hilbert.tolist() == [27, 27, 9, 9, 9]


def test_every_set_is_counted_and_none_is_below_the_bound():
    table = bound.every_set(3, 5)
    assert table.sets.tolist() == [9, 36, 84, 126, 126, 84, 36, 9, 1]
    assert (table["keys"] >= table.bound - 1e-9).all()
    for size in (2, 4, 9):
        sets = itertools.combinations(itertools.product(range(3), repeat=2), size)
        seen = [{(r + i, c + j) for r, c in cells for i in range(5) for j in range(5)} for cells in sets]
        assert table.set_index("cells")["keys"][size] == min(map(len, seen))


def test_the_panels_hold_the_block_its_keys_and_the_blocks_that_hold_them():
    panels = bound.block_panels((16, 16), 3, ["raster", "hilbert"], block=4)
    for title, panel in panels.items():
        assert (panel == 3).sum() == 4
        assert f": {(panel >= 2).sum()} keys,\nin {(panel >= 1).sum() // 4} blocks" in title
    assert [int((panel >= 2).sum()) for panel in panels.values()] == [18, 16]


def test_swaps_keep_the_counts_of_keys_and_a_search_finds_fewer():
    points = PointNeighbourhood(made_tissue(512), 5)
    start = point_orders(points)["hilbert"]
    blocks = annealing.Blocks(points, start)
    before = blocks.keys
    tried = annealing.anneal(blocks, 4000)
    order = torch.from_numpy(blocks.members.flatten())
    assert order.sort().values.equal(torch.arange(512))
    assert annealing.Blocks(points, order).keys == blocks.keys == tried[-1] < before == tried[0]
    assert len(tried) == 11
    counted = [len({key for token in row for key in points.keys(token).tolist()}) for row in blocks.members.tolist()]
    assert blocks.keys == np.mean(counted)


def test_a_swap_that_adds_too_many_keys_is_not_made():
    points = PointNeighbourhood(made_tissue(256), 3)
    blocks = annealing.Blocks(points, point_orders(points)[HALVED])
    one, other = int(blocks.members[0, 0]), int(blocks.members[-1, 0])
    before = blocks.keys
    assert blocks.swap(one, other, most=0) is None
    assert blocks.keys == before
    added = blocks.swap(one, other, most=1e9)
    assert blocks.keys * len(blocks.members) == before * len(blocks.members) + added
    assert blocks.swap(other, one, most=1e9) == -added


def test_records_of_a_search_are_kept_and_tabled(tmp_path):
    how = {"works": [("tissue", 5)], "output_dir": str(tmp_path)}
    records = annealing.run_annealing(200, 500, **how)
    assert annealing.run_annealing(200, 500, **how) == records
    table = annealing.annealing_table([*records, {"kind": "training"}])
    assert table.points.unique() == [256]
    assert table.tried.max() == 500
    assert table.groupby("start")["keys"].last().to_dict() == {each["name"]: each["keys"][-1] for each in records}
    with pytest.raises(ValueError, match="records must hold one of kind 'annealing'"):
        annealing.annealing_table([])


@pytest.mark.parametrize("offsets", ["head", "head_block", "branch"])
def test_heads_that_see_a_key_are_those_of_the_patterns_masks(offsets):
    pattern, every = DilatedPattern((6, 12), (2, 3), offsets=offsets), torch.arange(20)
    masks = torch.zeros(20, 20)
    for head in range(3):
        parts = pattern.head_parts(head, 3)
        of_head = [pattern.mask(part, every, every, kv_head=head, kv_heads=3) for part in parts]
        masks += torch.stack(of_head).any(0)
    torch.testing.assert_close(along_curve.heads_that_see(pattern, every[:, None], every, heads=3), masks / 3)


def test_shares_of_windows_are_means_over_cells_on_the_grid(monkeypatch):
    pattern, shape = DilatedPattern((8, 32), (1, 4)), (8, 8)
    ordering = Ordering.from_curve("hilbert", 64, grid=shape)
    shares = along_curve.shares_of_windows(pattern, ordering, shape, [3, 5], heads=4)
    for window in (3, 5):
        near, seen, cells = Neighbourhood(shape, window, edge="clip"), 0.0, 0
        for query in range(64):
            keys = near.keys(query)
            of_heads = along_curve.cells_seen(pattern, ordering, shape, divmod(query, 8), heads=4)
            seen, cells = seen + of_heads.flatten()[keys].sum().item(), cells + len(keys)
        assert shares[window] == pytest.approx(seen / cells)


def test_at_equal_work_a_curve_shows_more_neighbours_than_rows_and_a_window_all():
    table = along_curve.count_along_curve(windows=[17]).set_index("order").share
    assert table.raster == pytest.approx(0.56, abs=0.02)
    assert table.morton == pytest.approx(0.85, abs=0.02)
    assert table.hilbert == pytest.approx(0.85, abs=0.02)
    assert table["window 63"] == 1
    assert along_curve.window_of(3968) == 63  # 3,969 keys
    assert along_curve.window_of(248) == 15  # 16 is even
