"""Locality measures: against counts by hand and by loops, and what they must say of curves whose locality is known."""

from itertools import product
from math import dist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_lib.lab.cache.grid import block_compactness, block_map, grid_orderings, neighbour_distance, step_distance
from hilbert_lib.ordering import Ordering

SHAPES = [(5, 7), (8, 8), (1, 9), (3, 4, 5)]
CASES = [
    pytest.param(name, ordering, shape, id=f"{name}-{shape}")
    for shape in SHAPES
    for name, ordering in grid_orderings(shape, rate=3).items()
]


def cells_in_order(ordering, shape):
    cells = list(product(*map(range, shape)))
    return [cells[p] for p in ordering.perm.tolist()]


@pytest.mark.parametrize(("name", "ordering", "shape"), CASES)
def test_measures_agree_with_loops_over_cells(name, ordering, shape):
    cells = cells_in_order(ordering, shape)
    slot = {cell: s for s, cell in enumerate(cells)}

    def neighbours(cell):
        for axis in range(len(shape)):
            for change in (-1, 1):
                yield (*cell[:axis], cell[axis] + change, *cell[axis + 1 :])

    gaps = sorted(abs(slot[a] - slot[b]) for a in cells for b in neighbours(a) if b in slot)
    row = neighbour_distance({name: ordering}, shape).iloc[0]
    assert row.order == name
    assert row.mean_slots == pytest.approx(sum(gaps) / len(gaps))
    assert row.worst_slots == gaps[-1]

    for row in step_distance({name: ordering}, shape, steps=(1, 5)).itertuples():
        apart = [dist(a, b) for a, b in zip(cells, cells[row.steps :], strict=False)]
        assert row.mean_cells == pytest.approx(sum(apart) / len(apart))
        assert row.worst_cells == pytest.approx(max(apart))

    for row in block_compactness({name: ordering}, shape, block_sizes=(1, 4)).itertuples():
        blocks = [set(cells[i : i + row.block_size]) for i in range(0, len(cells), row.block_size)]
        blocks = [block for block in blocks if len(block) == row.block_size]
        perimeters = [sum(b not in block for a in block for b in neighbours(a)) for block in blocks]
        boxes = []
        for block in blocks:
            box = 1
            for axis in zip(*block, strict=True):
                box *= max(axis) - min(axis) + 1
            boxes.append(box)
        assert row.mean_perimeter == pytest.approx(sum(perimeters) / len(blocks))
        assert row.worst_perimeter == max(perimeters)
        assert row.mean_box == pytest.approx(sum(boxes) / len(blocks))
        assert row.worst_box == max(boxes)


def test_aligned_blocks_of_hilbert_morton_and_tile_are_squares():
    blocks = block_compactness(grid_orderings((64, 64), rate=8), (64, 64), block_sizes=[64]).set_index("order")
    for name in ("hilbert", "morton", "tile"):
        assert blocks.loc[name, "worst_perimeter"] == 4 * 8
        assert blocks.loc[name, "worst_box"] == 64
    assert blocks.loc["raster", "mean_perimeter"] == 2 * (64 + 1)


def test_block_map_cuts_the_ordering_into_runs():
    ordering = Ordering.from_curve("hilbert", 20, grid=(4, 5))
    cells = block_map({"hilbert": ordering}, (4, 5), block_size=6).set_index(["row", "col"])["block"]
    assert [cells[cell] for cell in cells_in_order(ordering, (4, 5))] == [slot // 6 for slot in range(20)]


def test_no_ordering_beats_a_square_block():
    blocks = block_compactness(grid_orderings((40, 56), rate=8), (40, 56), block_sizes=[16, 64])
    assert (blocks.mean_perimeter >= 4 * blocks.block_size**0.5).all()


@settings(max_examples=30)
@given(rows=st.integers(2, 20), cols=st.integers(2, 20))
def test_raster_neighbours_are_one_slot_or_one_row_apart(rows, cols):
    row = neighbour_distance({"raster": Ordering.linear(rows * cols)}, (rows, cols)).iloc[0]
    down, right = (rows - 1) * cols, rows * (cols - 1)
    assert row.worst_slots == cols
    assert row.mean_slots == pytest.approx((down * cols + right) / (down + right))


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda: neighbour_distance({"x": Ordering.linear(5)}, (2, 3)), r"length of the grid \(2, 3\).*linear\(5\)"),
        (lambda: neighbour_distance({"x": Ordering.linear(1)}, (1, 1)), r"a side above 1, got \(1, 1\)"),
        (lambda: step_distance({"x": Ordering.linear(6)}, (2, 3), steps=[6]), "between 1 and 5, got 6"),
        (lambda: block_compactness({"x": Ordering.linear(6)}, (2, 3), block_sizes=[7]), "between 1 and 6, got 7"),
        (lambda: block_compactness({"x": Ordering.linear(6)}, (2, 3), block_sizes=[2, 2]), "once, got"),
        (lambda: block_map({"x": Ordering.linear(6)}, (2, 3), block_size=0), "at least 1, got 0"),
        (lambda: block_map({"x": Ordering.linear(6)}, (1, 2, 3), block_size=1), r"2 sides, got \(1, 2, 3\)"),
        (lambda: grid_orderings((0, 4), rate=2), "at least 1"),
    ],
)
def test_bad_arguments_are_named(measure, words):
    with pytest.raises(ValueError, match=words):
        measure()


@pytest.mark.gpu
def test_measures_are_the_same_on_the_gpu():
    here = grid_orderings((16, 24), rate=4)
    there = {name: ordering.to("cuda") for name, ordering in here.items()}
    for measure in (neighbour_distance, step_distance, block_compactness):
        torch.testing.assert_close(
            torch.tensor(measure(here, (16, 24)).drop(columns="order").to_numpy(float)),
            torch.tensor(measure(there, (16, 24)).drop(columns="order").to_numpy(float)),
        )
