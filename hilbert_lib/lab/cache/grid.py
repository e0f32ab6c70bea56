"""Compactness in the grid of blocks of consecutive slots, in every order of the cells."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.curves.coordinates import KINDS, checked_shape
from hilbert_lib.ordering import Ordering


def grid_orderings(shape: Sequence[int], *, rate: int) -> dict[str, Ordering]:
    """The orderings that are compared on a grid of these sides: every curve, and two controls.

    >>> list(grid_orderings((4, 4), rate=2))
    ['hilbert', 'morton', 'snake', 'raster', 'tile', 'residue', 'random']
    """
    cells = torch.Size(checked_shape(shape)).numel()
    curves = {kind: Ordering.from_curve(kind, cells, grid=shape) for kind in KINDS}
    return curves | {"residue": Ordering.residue(cells, rate), "random": Ordering.random(cells, seed=0)}


def block_compactness(
    orderings: Mapping[str, Ordering], shape: Sequence[int], block_sizes: Sequence[int] = (64, 128)
) -> pd.DataFrame:
    """mean_perimeter and worst_perimeter of blocks of consecutive slots, by order and block_size.

    A perimeter is the sides of cells, in 3-D faces, between a block and what is outside of it, the border of the grid
    included. Position p is cell p in raster order; a last block that is not full is left out.
    """
    block_sizes = checks.integers("block_sizes", block_sizes, distinct=True)
    sides = checked_shape(shape)
    rows = []
    for name, ordering in orderings.items():
        if torch.Size(sides).numel() != ordering.length:
            raise ValueError(f"orderings must have the length of the grid {sides}, got {ordering!r}")
        slots = ordering.inverse.view(sides)
        for size in block_sizes:
            checks.integer("block_sizes", size, least=1, most=ordering.length)
            inner = _inner_sides(slots // size)[: ordering.length // size]
            perimeter = 2 * slots.ndim * size - 2 * inner
            mean = perimeter.sum().item() / len(perimeter)  # of whole numbers: the same on every device
            rows.append((name, size, mean, perimeter.max().item()))
    return pd.DataFrame(rows, columns=["order", "block_size", "mean_perimeter", "worst_perimeter"])


def _inner_sides(block: Tensor) -> Tensor:
    """For each block, the sides between two of its own cells; block holds the block of each cell of the grid."""
    counts = torch.zeros(int(block.max()) + 1, dtype=torch.int64, device=block.device)
    for axis in range(block.ndim):
        last = block.shape[axis] - 1
        first, second = block.narrow(axis, 0, last), block.narrow(axis, 1, last)
        counts += first[first == second].bincount(minlength=len(counts))
    return counts
