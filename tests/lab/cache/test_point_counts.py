"""Counts over points are those of loops over the pairs that the oracle's windows hold."""

import math
from itertools import product

import oracle
import pytest
import torch
from cases import refusals

from hilbert_lib import PointNeighbourhood
from hilbert_lib.curves import curve_index
from hilbert_lib.lab.cache import points as counting
from hilbert_lib.lab.clouds import CLOUDS, made_room, made_tissue

SMALL = {"tissue": PointNeighbourhood(made_tissue(200) + 3, 5), "room": PointNeighbourhood(made_room(150) - 40, 3)}
CLOUD = pytest.mark.parametrize("cloud", SMALL)
NAMES = counting.WORK_ORDERS


def places_of(order):
    return {row: place for place, row in enumerate(order.tolist())}


def pairs_of(points):
    return oracle.points_seen(points).nonzero().tolist()


@CLOUD
def test_orders_are_those_of_the_curves_around_the_cloud(cloud):
    points = SMALL[cloud]
    orders = counting.point_orders(points)
    cells = points.coordinates - points.coordinates.amin(0)
    side = 2 ** int(cells.amax()).bit_length()
    shape = (side,) * cells.shape[1]
    assert tuple(orders) == NAMES
    for name, order in orders.items():
        assert order.sort().values.equal(torch.arange(len(cells))), name
    rows = [tuple(cell) for cell in cells[orders["raster"]].tolist()]
    assert rows == sorted(rows)
    assert curve_index("morton", cells[orders["morton"]], shape).diff().gt(0).all()
    steps = cells[orders["hilbert"]].diff(dim=0).abs().sum(1).double().mean()
    assert steps < cells[orders["raster"]].diff(dim=0).abs().sum(1).double().mean()
    assert orders[counting.HALVED].equal(points.order)


def test_a_random_order_is_left_out_where_there_are_many_points(monkeypatch):
    monkeypatch.setattr(counting, "MOST_RANDOM", 100)
    assert list(counting.point_orders(SMALL["room"])) == list(NAMES[:-1])


@CLOUD
@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_loops_over_pairs(cloud, name):
    points = SMALL[cloud]
    order, count = counting.point_orders(points)[name], len(points.coordinates)
    place, pairs = places_of(order), pairs_of(points)
    lists = counting.lists_in_order(points, order)
    assert lists.mask.equal(oracle.points_seen(points))
    assert lists.query_rows[:count].equal(order.int())
    blocks = math.ceil(count / 64)
    seen = [{key for query, key in pairs if place[query] // 64 == block} for block in range(blocks)]
    tiles = sum(math.ceil(len(keys) / 64) for keys in seen)
    held = {}
    for query, key in pairs:
        block = place[query] // 64, place[key] // 64
        held[block] = held.get(block, 0) + 1
    row = counting._counts(points, order, name)
    expected = {"pairs": len(pairs) / count, "keys": sum(map(len, seen)) / blocks, "tiles": tiles / blocks}
    expected |= {"used": len(pairs) / tiles / 64**2, "blocks": len(held) / blocks}
    expected |= {"block_used": len(pairs) / len(held) / 64**2, "list_bytes": 768 * tiles / count}
    assert row.pop("order") == name
    assert row == pytest.approx(expected)
    number, in_block = counting.pairs_by_block(lists, order, 64)
    assert dict(zip([(n // blocks, n % blocks) for n in number.tolist()], in_block.tolist(), strict=True)) == held


@pytest.mark.parametrize(("count", "size", "starts"), [(10, 4, [0, 4, 6]), (8, 4, [0, 4]), (3, 4, [0])])
def test_the_last_patch_takes_tokens_of_the_one_before(count, size, starts):
    assert counting.patch_starts(count, size).tolist() == starts


@CLOUD
@pytest.mark.parametrize("size", [40, 64, 500])
def test_recall_is_the_share_of_pairs_within_a_patch(cloud, size):
    points = SMALL[cloud]
    order, count = counting.point_orders(points)["hilbert"], len(points.coordinates)
    place, pairs = places_of(order), pairs_of(points)
    kept = 0
    for query, key in pairs:
        start = min(place[query] // size * size, max(0, count - size))
        kept += start <= place[key] < start + size
    recall = counting.patch_recall(points, order, size)
    assert recall == kept / len(pairs)
    assert (recall == 1) == (size == 500)


def test_tables_have_a_row_for_each_cloud_window_and_order():
    works = [("tissue", [3, 5]), ("room", [3])]
    table = counting.count_lists(130, works=works, orders=["raster", "hilbert"])
    recall = counting.count_recall(130, works=works, size=64, orders=["raster", "hilbert"])
    cases = [("tissue", 3), ("tissue", 5), ("room", 3)]
    rows = [(*case, order) for case, order in product(cases, ("raster", "hilbert"))]
    for counted in (table, recall):
        assert list(zip(counted.cloud, counted.window, counted.order, strict=True)) == rows
    near = PointNeighbourhood(CLOUDS["tissue"](130), 5)
    assert table.pairs[2] == near.pairs / 130
    assert recall.recall[3] == counting.patch_recall(near, counting.point_orders(near)["hilbert"], 64)


def test_the_cost_of_each_kernel_is_that_of_loops():
    count, window, size = 200, 5, 90
    points = PointNeighbourhood(made_tissue(count), window)
    costs = counting.count_kernels(count, works=[("tissue", window)], size=size).set_index("kernel")
    pairs, orders = pairs_of(points), counting.point_orders(points)
    queries = [query for query, _ in pairs]
    assert costs.products["gather"] == costs.rows["gather"] == max(map(queries.count, set(queries)))
    assert costs.products["lists"] == 64 * points.lists.tiles / points.lists.blocks == 64 * costs.rows["lists"]
    assert costs.products["patches, hilbert"] == size == 128 * costs.rows["patches, hilbert"]
    assert costs.kept["patches, hilbert"] == counting.patch_recall(points, orders["hilbert"], size)
    assert (costs.kept.drop("patches, hilbert") == 1).all()
    for name in ("raster", "hilbert"):
        place = places_of(orders[name])
        touched = {(place[query] // 128, place[key] // 128) for query, key in pairs}
        assert costs.rows[f"blocks, {name}"] == len(touched) / 2
        assert costs.products[f"blocks, {name}"] == 128 * len(touched) / 2
    sides = (points.coordinates.amax(0) - points.coordinates.amin(0) + 1).tolist()
    boxes = [[], []]  # of keys, for each tile of 8 cells of an axis
    for axis, side in enumerate(sides):
        for first in range(0, side, 8):
            seen = min(first + 8 + 2, side) - max(first - 2, 0)
            boxes[axis].append(math.ceil(seen / 8))
    assert costs.products["boxes"] == pytest.approx(64 * 64 * sum(boxes[0]) * sum(boxes[1]) / count)


@pytest.mark.parametrize("name", ["raster", counting.HALVED])
def test_what_a_block_reaches_is_that_of_loops(name):
    points, query = SMALL["tissue"], 70
    order, place = counting.point_orders(points)[name], places_of(counting.point_orders(points)[name])
    seen = oracle.points_seen(points)
    table = counting.point_reach(points, ["hilbert", name], query)
    table = table[table.order == name].reset_index(drop=True)
    block = [row for row in place if place[row] // 64 == place[query] // 64]
    reached = seen[block].any(0)
    blocks = {place[row] // 64 for row in reached.nonzero()[:, 0].tolist()}
    for row, cell in enumerate(table.itertuples()):
        parts = {"own": seen[query, row], "queries": row in block, "seen": reached[row]}
        parts |= {"computed": place[row] // 64 in blocks, "skipped": True}
        assert cell.part == next(part for part, is_so in parts.items() if is_so)
        assert [cell.row, cell.col] == (points.coordinates[row] - points.coordinates.amin(0)).tolist()
        assert (cell.place, cell.is_query) == (place[row], row == query)
    words = counting.block_words(points, [name], query)
    rows = {place[row] % 64: row for row in block}
    keys = counting.lists_in_order(points, order).key_rows
    first = int(counting.lists_in_order(points, order).starts[place[query] // 64])
    found = {(rows[pair.query], int(keys[first + pair.key // 64, pair.key % 64])) for pair in words.itertuples()}
    assert found == {(row, key) for row in block for key in seen[row].nonzero()[:, 0].tolist()}


def in_order(**options):
    points = PointNeighbourhood(torch.tensor([[0, 0], [1, 1]]), **{"window": 3, **options})
    return lambda: counting.lists_in_order(points, points.order)


REFUSED = [
    (in_order(window=(3, 4)), r"window must be odd, got \(3, 4\)"),
    (in_order(batch=torch.tensor([0, 1])), "points must be one cloud"),
    (in_order(keys=torch.tensor([[0, 0]])), "points must be one cloud"),
    (in_order(dilation=2), "points must be one cloud"),
    (lambda: counting.count_lists(0), "count must be an integer of at least 1, got 0"),
]
test_bad_arguments_are_named = refusals({ValueError: REFUSED})
