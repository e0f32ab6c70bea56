"""Coordinates along space-filling curves, for any rectangle or box, and the inverse.

A curve is a table of cells in the order in which it meets them: `curve_coordinates` makes the whole table, and
`curve_index` makes it too and inverts it, for however few cells it is asked. The Hilbert curve is built from blocks. A
block has a major axis: it is entered at its corner (0, 0, 0) and left at the far end of that axis, (m - 1, 0, 0).
`split` says where it is cut, `block_axes` how a block lies, and `children` into which smaller blocks it falls: closed
forms of the block's sides. On a GPU the kernels of `kernels.py` walk these blocks instead, without the whole table.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.environment import kernel_mode

TILE_SIDE = {2: 8, 3: 4}  # by number of axes: a tile is 64 cells either way

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


def curve_coordinates(kind: str, shape: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """The cells of a grid in the order in which a curve meets them.

    Args:
        kind: "hilbert" is the classical curve for side 2^k (every step to a neighbour, every quarter or octant visited
            whole before the next) and the generalised one elsewhere: steps of one, and one diagonal step exactly if
            the longest side is odd and the product of the others even. "morton" interleaves the bits of the
            coordinates, "snake" turns round at each border, "raster" starts each row anew, "tile" is a raster of
            tiles (8 x 8 or 4 x 4 x 4 cells, cut off at the border) with a raster inside.
        shape: 2 or 3 sides, each at least 1; the last is the fastest in "raster".
        device: where to compute; by default the CPU.

    Returns:
        (cells, ndim) int64, axes as in shape.

    Raises:
        ValueError: if kind or device is unknown or shape is not 2 or 3 positive sides.
        TypeError: if shape is no sequence of integers.

    Hilbert, "Ueber die stetige Abbildung einer Linie auf ein Flaechenstueck", Math. Ann. 38 (1891). Morton, "A
    computer oriented geodetic data base" (1966).

    >>> curve_coordinates("hilbert", (2, 2)).tolist()
    [[0, 0], [0, 1], [1, 1], [1, 0]]
    >>> curve_coordinates("morton", (2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    sides = checked_shape(shape)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return _CURVES[kind](sides, checks.device(device))


def curve_index(kind: str, coordinates: Tensor, shape: Sequence[int]) -> Tensor:
    """The place of each cell along a curve: the inverse of `curve_coordinates`.

    It costs the whole table, however few cells are asked for; only the Hilbert curve on a GPU costs what is asked.

    Args:
        kind: as in `curve_coordinates`.
        coordinates: (..., ndim) integers, axes as in shape.
        shape: 2 or 3 sides, each at least 1.

    Returns:
        (...) int64 on the device of coordinates, 0 for the first cell of the curve.

    Raises:
        ValueError: if kind or shape is not as in `curve_coordinates`, or a coordinate lies outside of shape.
        TypeError: if coordinates or shape are not integers.

    >>> curve_index("hilbert", torch.tensor([[1, 0], [0, 0]]), (2, 2)).tolist()
    [3, 0]
    """
    sides = checked_shape(shape)
    if not isinstance(coordinates, Tensor):
        raise TypeError(f"coordinates must be a tensor of integers, got {type(coordinates).__name__}")
    if coordinates.is_floating_point() or coordinates.is_complex() or coordinates.dtype == torch.bool:
        raise TypeError(f"coordinates must be integers, got {coordinates.dtype}")
    coordinates = coordinates.long()  # unsigned types cannot be compared
    if coordinates.shape[-1:] != (len(sides),):
        raise ValueError(f"coordinates must have {len(sides)} in the last axis, got {tuple(coordinates.shape)}")
    if kind == "hilbert" and _has_kernel(coordinates.device):
        from hilbert_lib.curves import kernels as curves_triton

        place, all_inside = curves_triton.index(coordinates, sides)
        if not all_inside:
            _check_inside(coordinates, sides)
        return place
    _check_inside(coordinates, sides)
    order = raster_index(curve_coordinates(kind, sides, device=coordinates.device), sides)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place[raster_index(coordinates, sides)]


def _check_inside(coordinates: Tensor, sides: tuple[int, ...]) -> None:
    outside = (coordinates < 0) | (coordinates >= torch.tensor(sides, device=coordinates.device))
    if outside.any():
        cell = coordinates[outside.any(dim=-1)][0].tolist()
        raise ValueError(f"coordinates must lie inside the shape {sides}, got {cell}")


def raster_index(coordinates: Tensor, shape: Sequence[int]) -> Tensor:
    """The place of each cell in raster order (the last axis runs fastest).

    Args:
        coordinates: (..., ndim) int64, inside of shape.
        shape: the sides.

    Returns:
        (...) int64.

    >>> raster_index(torch.tensor([[1, 2]]), (2, 3)).tolist()
    [5]
    """
    index = coordinates[..., 0]
    for axis in range(1, len(shape)):
        index = index * shape[axis] + coordinates[..., axis]
    return index


def checked_shape(shape: Sequence[int], name: str = "shape") -> tuple[int, ...]:
    """The sides of a grid as a tuple, after the checks that every curve needs; name is the argument's, for errors.

    Raises:
        ValueError: if there are not 2 or 3 sides, or one is below 1.
        TypeError: if shape is no sequence of integers.

    >>> checked_shape([3, 4])
    (3, 4)
    """
    sides = checks.integers(name, shape, least=1)
    if len(sides) not in (2, 3):
        raise ValueError(f"{name} must have 2 or 3 sides, got {sides}")
    return sides


def _raster(sides: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.arange(prod(sides), device=device)
    return torch.stack(torch.unravel_index(index, sides), dim=1)


def _snake(sides: tuple[int, ...], device: torch.device) -> Tensor:
    cells = _raster(sides, device)
    index = torch.arange(len(cells), device=device)
    for axis, side in enumerate(sides):
        backwards = index // prod(sides[axis:]) % 2 == 1  # an odd number of runs along this axis came before
        cells[:, axis] = torch.where(backwards, side - 1 - cells[:, axis], cells[:, axis])
    return cells


def _sorted_by(keys: list[Tensor]) -> Tensor:
    """The cells in ascending order of a key that is the sum of one term for each axis."""
    total = keys[0]
    for key in keys[1:]:
        total = total[..., None] + key
    return torch.stack(torch.unravel_index(total.flatten().argsort(), total.shape), dim=1)


def _morton(sides: tuple[int, ...], device: torch.device) -> Tensor:
    # A bit that no coordinate of an axis has is left out of the code: the order is the same and 63 bits suffice.
    keys = [torch.zeros(side, dtype=torch.int64, device=device) for side in sides]
    place = 0
    for bit in range(max(side - 1 for side in sides).bit_length()):
        for axis in reversed(range(len(sides))):
            if (sides[axis] - 1) >> bit:
                keys[axis] += (torch.arange(sides[axis], device=device) >> bit & 1) << place
                place += 1
    return _sorted_by(keys)


def _tile(sides: tuple[int, ...], device: torch.device) -> Tensor:
    tile = TILE_SIDE[len(sides)]
    tiles = [-(-side // tile) for side in sides]
    keys = []
    for axis, side in enumerate(sides):
        x = torch.arange(side, device=device)
        inside = x % tile * tile ** (len(sides) - 1 - axis)
        keys.append(x // tile * prod(tiles[axis + 1 :]) * tile ** len(sides) + inside)
    return _sorted_by(keys)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and kernel_mode() == "compiled"


def _hilbert(sides: tuple[int, ...], device: torch.device) -> Tensor:
    if _has_kernel(device):
        from hilbert_lib.curves import kernels as curves_triton

        return curves_triton.coordinates(sides, device)
    axes, block = whole_block(sides)
    cells = block_cells(block, device, {})
    return torch.stack([cells[axes.index(axis)] for axis in range(len(sides))], dim=1)


def whole_block(sides: Sequence[int]) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The block that a grid is: its axes (a, b, c) among those of the grid, and its sides along them.

    >>> whole_block((3, 5))
    ((1, 0, 2), (5, 3, 1))
    """
    box = (*sides, 1)[:3]
    axes = block_axes(box.index(max(box)), box)
    return axes, tuple(box[axis] for axis in axes)


def block_axes(major: int, sides: Sequence[int]) -> tuple[int, int, int]:
    """The axes of a block as (a, b, c): the major one, then the longer of the other two.

    Where the major side is 1 or 2 an even side comes before a longer one: the block then goes out through one layer
    along b and comes back through the other, and a layer with an even b has a path of unit steps.

    >>> block_axes(0, (8, 2, 3))
    (0, 2, 1)
    """

    def rank(axis: int) -> tuple[bool, int]:
        return sides[major] <= 2 and sides[axis] % 2 == 0, sides[axis]

    b, c = sorted((axis for axis in range(3) if axis != major), key=rank, reverse=True)
    return major, b, c


def _even_half(side: int) -> int:
    """The even number next to half of a side, the smaller of two; 0 for sides 1 and 2."""
    return (side + 1) // 4 * 2


def split(m: int, n: int, p: int) -> tuple[int, tuple[int, int], int]:
    """Where a block of sides (a, b, c) = (m, n, p) is cut.

    Colour the cells like a chessboard: unit steps from (0, 0, 0) to (m - 1, 0, 0) exist only if m is even or n * p is
    odd. Even cuts pass that condition on: every child but one has an even major side, and the one left over meets the
    condition exactly if its parent does. So a curve has no diagonal step where parity allows none, and one elsewhere.

    Returns:
        The cut on a; the cuts on b in the first and in the second half of a; the cut on c. A cut of p on c means that
        c stays whole and the block falls into the four children of `_PLANE`, else into the eight of `_OCTANTS`.

    >>> split(8, 8, 1)
    (4, (4, 4), 1)
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
    """One of the blocks that a block falls into, where a, b, c are the axes of the parent.

    Attributes:
        halves: 0 or 1 for the half of a, b and c that it lies in.
        sides: along its own axes.
        axes: its own axes, as numbers among the parent's.
        corner: where it is entered, along a, b and c.
        steps: 1 or -1 along a, b and c: which way its own coordinates run.
    """

    halves: tuple[int, int, int]
    sides: tuple[int, int, int]
    axes: tuple[int, int, int]
    corner: tuple[int, int, int]
    steps: tuple[int, int, int]


def children(sides: tuple[int, int, int]) -> Iterator[Child]:
    """The blocks that a block of more than one cell falls into, in the order of the curve; empty ones are left out.

    >>> [child.corner for child in children((2, 2, 1))]
    [(0, 0, 0), (1, 1, 0)]
    """
    cut_a, cuts_b, cut_c = split(*sides)
    for halves, major, far in _PLANE if cut_c == sides[2] else _OCTANTS:
        cuts = (cut_a, cuts_b[halves[0]], cut_c)
        bounds = [((0, cut), (cut, side))[half] for half, cut, side in zip(halves, cuts, sides, strict=True)]
        extents = [high - low for low, high in bounds]
        if all(extents):
            axes = block_axes(major, extents)
            corner = tuple(high - 1 if axis in far else low for axis, (low, high) in enumerate(bounds))
            steps = tuple(-1 if axis in far else 1 for axis in range(3))
            yield Child(halves, tuple(extents[axis] for axis in axes), axes, corner, steps)


def block_cells(sides: tuple[int, int, int], device: torch.device, known: dict) -> Tensor:
    """The curve through a block, along its own axes: (3, cells) int64.

    Blocks of equal sides have equal curves, and few sizes exist on a level: `known` keeps them, so the work is that of
    a few levels of copies and no loop runs over cells.

    >>> block_cells((2, 2, 1), torch.device("cpu"), {}).tolist()
    [[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
    """
    if sides in known:
        return known[sides]
    cells = torch.zeros(3, prod(sides), dtype=torch.int64, device=device)
    if cells.shape[1] > 1:
        start = 0
        for child in children(sides):
            stop = start + prod(child.sides)
            for row, axis in zip(block_cells(child.sides, device, known), child.axes, strict=True):
                torch.add(child.corner[axis], row, alpha=child.steps[axis], out=cells[axis, start:stop])
            start = stop
    known[sides] = cells
    return cells


_CURVES = {"hilbert": _hilbert, "morton": _morton, "snake": _snake, "raster": _raster, "tile": _tile}
KINDS = tuple(_CURVES)
