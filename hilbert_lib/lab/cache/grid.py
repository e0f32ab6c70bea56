"""How well an ordering keeps together on the line what is together in the grid, and the reverse.

Every measure takes orderings of the cells of one grid, where position p is cell p in raster order, and gives a table
with one row for each ordering and setting.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.curves.coordinates import KINDS, checked_shape
from hilbert_lib.ordering import Ordering


def grid_orderings(shape: Sequence[int], *, rate: int, seed: int = 0) -> dict[str, Ordering]:
    """The orderings that are compared on a grid: every curve, and two controls.

    Args:
        shape: sides of the grid.
        rate: of the residue ordering.
        seed: of the random ordering.

    Returns:
        Orderings of the cells by name: the curves, "residue" and "random".

    >>> list(grid_orderings((4, 4), rate=2))
    ['hilbert', 'morton', 'snake', 'raster', 'tile', 'residue', 'random']
    """
    cells = torch.Size(checked_shape(shape)).numel()
    curves = {kind: Ordering.from_curve(kind, cells, grid=shape) for kind in KINDS}
    return curves | {"residue": Ordering.residue(cells, rate), "random": Ordering.random(cells, seed)}


def neighbour_distance(orderings: Mapping[str, Ordering], shape: Sequence[int]) -> pd.DataFrame:
    """How far apart along the ordering are cells that share a side in the grid?

    Args:
        orderings: of the cells of the grid, by name.
        shape: sides of the grid, at least one of them above 1.

    Returns:
        Columns: order, mean_slots and worst_slots (distance in slots, over all pairs of neighbours).

    Raises:
        ValueError: if an ordering is not one of the cells of the grid, or the grid has no two neighbours.

    >>> neighbour_distance({"raster": Ordering.linear(6)}, (2, 3)).round(2)
        order  mean_slots  worst_slots
    0  raster        1.86            3
    """
    rows = []
    for name, ordering in orderings.items():
        slots = _slots(ordering, shape)
        gaps = torch.cat([slots.diff(dim=axis).abs().flatten() for axis in range(slots.ndim)])
        if len(gaps) == 0:
            raise ValueError(f"shape must have a side above 1, got {tuple(shape)}")
        rows.append((name, gaps.double().mean().item(), gaps.max().item()))
    return pd.DataFrame(rows, columns=["order", "mean_slots", "worst_slots"])


def step_distance(
    orderings: Mapping[str, Ordering], shape: Sequence[int], steps: Sequence[int] = (1, 4, 16, 64, 256)
) -> pd.DataFrame:
    """How far apart in the grid are cells that are so many slots apart along the ordering?

    Args:
        orderings: of the cells of the grid, by name.
        shape: sides of the grid.
        steps: distances in slots, each from 1 to the number of cells less 1.

    Returns:
        Columns: order, steps, mean_cells and worst_cells (Euclidean distance between cells, in sides of a cell).

    Raises:
        ValueError: if an ordering is not one of the cells of the grid, or a step is out of range.

    >>> step_distance({"raster": Ordering.linear(6)}, (2, 3), steps=[3])
        order  steps  mean_cells  worst_cells
    0  raster      3         1.0          1.0
    """
    rows = []
    for name, ordering in orderings.items():
        cells = _cells(ordering, shape).double()
        for step in steps:
            if not 1 <= step < len(cells):
                raise ValueError(f"steps must lie between 1 and {len(cells) - 1}, got {step}")
            distance = torch.linalg.vector_norm(cells[step:] - cells[:-step], dim=1)
            rows.append((name, step, distance.mean().item(), distance.max().item()))
    return pd.DataFrame(rows, columns=["order", "steps", "mean_cells", "worst_cells"])


def block_compactness(
    orderings: Mapping[str, Ordering], shape: Sequence[int], block_sizes: Sequence[int] = (64, 128)
) -> pd.DataFrame:
    """How compact in the grid are blocks of consecutive slots?

    Args:
        orderings: of the cells of the grid, by name.
        shape: sides of the grid.
        block_sizes: slots of a block, each from 1 to the number of cells; a last block that is not full is left out.

    Returns:
        Columns: order, block_size, mean_perimeter and worst_perimeter (sides of cells, in 3-D faces, between a block
        and what is outside of it, the border of the grid included), mean_box and worst_box (cells of the smallest
        upright box around a block).

    Raises:
        ValueError: if an ordering is not one of the cells of the grid, or a block size is out of range or there twice.

    >>> block_compactness({"raster": Ordering.linear(8)}, (2, 4), block_sizes=[4])
        order  block_size  mean_perimeter  worst_perimeter  mean_box  worst_box
    0  raster           4            10.0               10       4.0          4
    """
    block_sizes = checks.integers("block_sizes", block_sizes, distinct=True)
    rows = []
    for name, ordering in orderings.items():
        slots, cells = _slots(ordering, shape), _cells(ordering, shape)
        for size in block_sizes:
            if not 1 <= size <= ordering.length:
                raise ValueError(f"block_sizes must lie between 1 and {ordering.length}, got {size}")
            full = ordering.length // size
            perimeter = 2 * slots.ndim * size - 2 * _inner_sides(slots // size)[:full]
            blocks = cells[: full * size].view(full, size, -1)
            box = (blocks.amax(dim=1) - blocks.amin(dim=1) + 1).prod(dim=1)
            figures = (perimeter.double().mean(), perimeter.max(), box.double().mean(), box.max())
            rows.append((name, size, *(figure.item() for figure in figures)))
    columns = ["order", "block_size", "mean_perimeter", "worst_perimeter", "mean_box", "worst_box"]
    return pd.DataFrame(rows, columns=columns)


def block_map(orderings: Mapping[str, Ordering], shape: Sequence[int], block_size: int) -> pd.DataFrame:
    """Which block of consecutive slots is each cell of a rectangle in?

    Args:
        orderings: of the cells of the grid, by name.
        shape: the two sides of the grid.
        block_size: slots of a block, at least 1.

    Returns:
        Columns: order, row, col and block; one row for each cell of each ordering.

    Raises:
        ValueError: if an ordering is not one of the cells of the grid, shape has not 2 sides, or
            block_size is below 1.

    >>> block_map({"raster": Ordering.linear(2)}, (1, 2), block_size=1)
        order  row  col  block
    0  raster    0    0      0
    1  raster    0    1      1
    """
    if len(shape) != 2:
        raise ValueError(f"shape must have 2 sides, got {tuple(shape)}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    tables = []
    for name, ordering in orderings.items():
        row, col = np.indices(shape).reshape(2, -1)
        block = _slots(ordering, shape).flatten() // block_size
        tables.append(pd.DataFrame({"order": name, "row": row, "col": col, "block": block.numpy(force=True)}))
    return pd.concat(tables, ignore_index=True)


def _inner_sides(block: Tensor) -> Tensor:
    """For each block, the sides between two of its own cells; block holds the block of each cell of the grid."""
    counts = torch.zeros(int(block.max()) + 1, dtype=torch.int64, device=block.device)
    for axis in range(block.ndim):
        last = block.shape[axis] - 1
        here, there = block.narrow(axis, 0, last), block.narrow(axis, 1, last)
        counts += here[here == there].bincount(minlength=len(counts))
    return counts


def _slots(ordering: Ordering, shape: Sequence[int]) -> Tensor:
    """The slot of each cell: int64 in the shape of the grid."""
    sides = checked_shape(shape)
    if torch.Size(sides).numel() != ordering.length:
        raise ValueError(f"orderings must have the length of the grid {sides}, got {ordering!r}")
    return ordering.inverse.view(sides)


def _cells(ordering: Ordering, shape: Sequence[int]) -> Tensor:
    """The cell in each slot: (cells, ndim) int64."""
    slots = _slots(ordering, shape)
    return torch.stack(torch.unravel_index(ordering.perm, slots.shape), dim=1)
