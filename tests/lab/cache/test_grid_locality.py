"""Perimeters of blocks: against loops over cells, and what they must say of curves whose locality is known."""

from itertools import product

import pytest
from cases import refusals

from hilbert_lib.lab.cache.grid import block_compactness, grid_orderings
from hilbert_lib.ordering import Ordering

CASES = [
    pytest.param(name, ordering, shape, id=f"{name}-{shape}")
    for shape in [(5, 7), (8, 8), (1, 9), (3, 4, 5)]
    for name, ordering in grid_orderings(shape, rate=3).items()
]


@pytest.mark.parametrize(("name", "ordering", "shape"), CASES)
def test_perimeters_agree_with_loops_over_cells(name, ordering, shape):
    every = list(product(*map(range, shape)))
    cells = [every[p] for p in ordering.perm.tolist()]

    def neighbours(cell):
        for axis in range(len(shape)):
            for change in (-1, 1):
                yield (*cell[:axis], cell[axis] + change, *cell[axis + 1 :])

    for row in block_compactness({name: ordering}, shape, block_sizes=(1, 4)).itertuples():
        blocks = [set(cells[i : i + row.block_size]) for i in range(0, len(cells), row.block_size)]
        blocks = [block for block in blocks if len(block) == row.block_size]
        perimeters = [sum(b not in block for a in block for b in neighbours(a)) for block in blocks]
        assert row.order == name
        assert row.mean_perimeter == pytest.approx(sum(perimeters) / len(blocks))
        assert row.worst_perimeter == max(perimeters)


def test_aligned_blocks_of_hilbert_morton_and_tile_are_squares():
    blocks = block_compactness(grid_orderings((64, 64), rate=8), (64, 64), block_sizes=[64]).set_index("order")
    assert (blocks.worst_perimeter[["hilbert", "morton", "tile"]] == 4 * 8).all()
    assert blocks.mean_perimeter["raster"] == 2 * (64 + 1)


WRONG = [
    (lambda: block_compactness({"x": Ordering.linear(5)}, (2, 3)), r"length of the grid \(2, 3\).*linear\(5\)"),
    (lambda: block_compactness({"x": Ordering.linear(6)}, (2, 3), [7]), "from 1 to 6, got 7"),
    (lambda: block_compactness({"x": Ordering.linear(6)}, (2, 3), [2, 2]), "once, got"),
    (lambda: grid_orderings((0, 4), rate=2), "at least 1"),
]
test_bad_arguments_are_named = refusals({ValueError: WRONG})


@pytest.mark.gpu
def test_perimeters_are_the_same_on_the_gpu():
    here = grid_orderings((16, 24), rate=4)
    there = {name: ordering.to("cuda") for name, ordering in here.items()}
    assert block_compactness(here, (16, 24)).equals(block_compactness(there, (16, 24)))
