"""Shifts from tiles of queries to blocks of keys on a grid, and the sums that the gradient of a bias keeps of each.

Imports no triton: estimates of memory read it. The kernels are in `grid_bias.py`.
"""

from math import prod
from typing import NamedTuple

from torch import Tensor

from hilbert_lib.attention.request import Request

# Cells of a tile along each axis, of queries and, for dk and dv, of keys: 16 where interpreted, else `cells_of`.
TILES = {
    64: {1: (1, 1, 64), 2: (1, 8, 8), 3: (4, 4, 4)},
    32: {1: (1, 1, 32), 2: (1, 4, 8), 3: (2, 4, 4)},
    16: {1: (1, 1, 16), 2: (1, 4, 4), 3: (2, 2, 4)},
}
PROGRAMS = 1024  # of a launch at least, if there are so many tiles: about two for each that a large GPU runs at once


def cells_of(q: Tensor) -> int:
    """Number of cells of a compiled program's tile. Float32 has fewer past 64 columns: shared memory binds."""
    if q.element_size() < 4 or q.shape[-1] <= 64:
        return 64
    return 32 if q.shape[-1] <= 128 else 16


class Shifts(NamedTuple):
    """Blocks of keys, as large as a tile, that hold every key that a tile of queries sees.

    Along an axis with T cells of a tile, block i begins at rank `lowest + i * T`, counted from the tile's first.
    """

    lowest: tuple[int, int, int]
    counts: tuple[int, int, int]  # of blocks along each axis

    @property
    def blocks(self) -> int:
        """Number of blocks of a tile."""
        return prod(self.counts)


def shifts_of(request: Request, sides: tuple[int, int, int]) -> Shifts:
    """The shifts of a call. sides: cells of a tile along three axes, of which a grid's are the last."""
    lowest, counts = [0, 0, 0], [1, 1, 1]
    axes_of_heads = zip(*(near.axes for near in request.neighbourhoods), strict=True)
    for n, axes in enumerate(axes_of_heads, start=3 - len(request.pattern.shape)):
        distances = [axis.distances() for axis in axes]
        least, most = min(low for low, _ in distances), max(high for _, high in distances)
        # The last query of a tile sees a key `sides[n] - 1` ranks further on than its first.
        lowest[n], counts[n] = least, -(-(most - least + sides[n]) // sides[n])
    return Shifts(tuple(lowest), tuple(counts))


def runs_of(shifts: Shifts, heads: int, tiles: int) -> int:
    """Runs into which the tiles of all sequences are cut: a program adds up one run. No device decides it."""
    return min(tiles, -(-PROGRAMS // (heads * shifts.blocks)))


def tiles_of(request: Request, sides: tuple[int, int, int], *, keys: bool) -> int:
    """Number of tiles of queries or of keys of a sequence."""
    axes, part, tiles = request.neighbourhoods[0].axes, request.part, 1
    for n, (axis, tile_cells) in enumerate(zip(axes, sides[3 - len(axes) :], strict=True)):
        cells = len((part.keys if keys else part.queries)[n]) if part else axis.cells
        ranks = -(-cells // axis.dilation)
        tiles *= axis.dilation * -(-ranks // tile_cells)
    return tiles


def shape_of_sums(request: Request, batch: int, heads: int, rows: int) -> tuple[int, int, int, int, int]:
    """Shape of the sums of pairs: (runs, heads, blocks, rows, rows), of tiles of so many rows."""
    sides = TILES[rows][len(request.pattern.shape)]
    shifts = shifts_of(request, sides)
    runs = runs_of(shifts, heads, batch * tiles_of(request, sides, keys=False))
    return runs, heads, shifts.blocks, rows, rows
