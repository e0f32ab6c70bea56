"""The Hilbert curve of any rectangle or box, as a recursion of blocks.

A block has a major axis: it is entered at its corner (0, 0, 0) and left at the far end of that axis, (m - 1, 0, 0).
`split` says where it is cut, `block_axes` how a block lies, and `children` into which smaller blocks it falls: closed
forms of the block's sides.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

# The children of a block in the order of the curve: the half taken on axes a, b, c (a is the major axis), the child's
# own major axis, and the axes on which the child is entered from the far side. In a plane c has no second half.
_PLANE = (
    ((0, 0, 0), 1, ()),
    ((0, 1, 0), 0, ()),
    ((1, 1, 0), 0, ()),
    ((1, 0, 0), 1, (0, 1)),
)
_OCTANTS = (
    ((0, 0, 0), 1, ()),
    ((0, 1, 0), 2, ()),
    ((0, 1, 1), 0, ()),
    ((0, 0, 1), 1, (0, 1)),
    ((1, 0, 1), 1, ()),
    ((1, 1, 1), 0, ()),
    ((1, 1, 0), 2, (0, 2)),
    ((1, 0, 0), 1, (0, 1)),
)


def raster_index(coordinates: Tensor, shape: Sequence[int]) -> Tensor:
    """The place (...) int64 of each cell (..., ndim) in raster order: the last axis runs fastest."""
    index = coordinates[..., 0]
    for axis in range(1, len(shape)):
        index = index * shape[axis] + coordinates[..., axis]
    return index


def whole_block(sides: Sequence[int]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The block that a grid is: its axes (a, b, c) among those of the grid, and its sides along them."""
    box = (*sides, 1)[:3]
    axes = block_axes(box.index(max(box)), box)
    return axes, tuple(box[axis] for axis in axes)


def block_axes(major: int, sides: Sequence[int]) -> tuple[int, int, int]:
    """The axes of a block as (a, b, c): the major one, then the longer of the other two.

    Where the major side is 1 or 2 an even side comes before a longer one: the block then goes out through one layer
    along b and comes back through the other, and a layer with an even b has a path of unit steps.
    """

    def rank(axis: int) -> tuple[bool, int]:
        return sides[major] <= 2 and sides[axis] % 2 == 0, sides[axis]

    b, c = sorted((axis for axis in range(3) if axis != major), key=rank, reverse=True)
    return major, b, c


def _even_half(length: int) -> int:
    """The even number next to half of a side, the smaller of two; 0 for sides 1 and 2."""
    return (length + 1) // 4 * 2


def split(m: int, n: int, p: int) -> tuple[int, tuple[int, int], int]:
    """The cuts of a block of sides (a, b, c) = (m, n, p): on a; on b in the first and in the second half of a; on c.

    A cut of p on c leaves c whole: the block falls into the four children of `_PLANE`, else the eight of `_OCTANTS`.
    Colour the cells like a chessboard: unit steps from (0, 0, 0) to (m - 1, 0, 0) exist only if m is even or n * p is
    odd. Even cuts pass that condition on: every child but one has an even major side, and the one left over meets the
    condition exactly if its parent does. So a curve has no diagonal step where parity allows none, and one elsewhere.
    """
    if m <= 2:
        return 1, (n, n), p  # out through one layer, back through the other
    if m == 3:
        return 2, (n - 1, n), p  # out through two layers, back through the third
    # Halving a side makes a block squarer where that side is more than sqrt(2) times the other: 4 / 3 is near.
    cut_b = 0 if 3 * m > 4 * n else _even_half(n)
    cut_c = 0 if 3 * n > 4 * p or cut_b == 0 else _even_half(p)
    return _even_half(m), (cut_b, cut_b), cut_c or p


class Child(NamedTuple):
    """One of the blocks that a block falls into, where a, b, c are the axes of the parent."""

    sides: tuple[int, int, int]  # along its own axes
    axes: tuple[int, int, int]  # its own axes, as numbers among the parent's
    bounds: tuple[tuple[int, int], ...]  # where it begins and ends along a, b and c
    steps: tuple[int, int, int]  # 1 or -1 along a, b and c: which way its own coordinates run


def children(sides: tuple[int, int, int]) -> Iterator[Child]:
    """The blocks that a block of more than one cell falls into, in the order of the curve; empty ones are left out."""
    cut_a, cuts_b, cut_c = split(*sides)
    for halves, major, far in _PLANE if cut_c == sides[2] else _OCTANTS:
        cuts = (cut_a, cuts_b[halves[0]], cut_c)
        bounds = tuple(((0, cut), (cut, length))[half] for half, cut, length in zip(halves, cuts, sides, strict=True))
        extents = [high - low for low, high in bounds]
        if all(extents):
            axes = block_axes(major, extents)
            steps = tuple(-1 if axis in far else 1 for axis in range(3))
            yield Child(tuple(extents[axis] for axis in axes), axes, bounds, steps)


def block_cells(sides: tuple[int, int, int], device: torch.device, paths: dict) -> Tensor:
    """The curve through a block, along its own axes: (3, cells) int64.

    Blocks of equal sides have equal curves, and a level has few sizes: `paths` keeps them, so no loop runs over cells.
    """
    if sides in paths:
        return paths[sides]
    cells = torch.zeros(3, prod(sides), dtype=torch.int64, device=device)
    if cells.shape[1] > 1:
        start = 0
        for child in children(sides):
            stop = start + prod(child.sides)
            for row, axis in zip(block_cells(child.sides, device, paths), child.axes, strict=True):
                (low, high), step = child.bounds[axis], child.steps[axis]
                torch.add(low if step > 0 else high - 1, row, alpha=step, out=cells[axis, start:stop])
            start = stop
    paths[sides] = cells
    return cells
