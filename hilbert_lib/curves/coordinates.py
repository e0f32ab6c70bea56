"""Coordinates along space-filling curves, for any rectangle or box, and the inverse.

A curve is a table of cells in the order in which it meets them. On a GPU the Hilbert curve needs no whole table.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.curves.hilbert import block_cells, raster_index, whole_block
from hilbert_lib.machine import kernel_mode

TILE_SIDE = {2: 8, 3: 4}  # by number of axes: a tile is 64 cells either way


@checks.unscripted
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
    checks.countable("shape", sides)  # of more there is no table
    return _CURVES[kind](sides, checks.device(device))


@checks.unscripted
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
    checks.dense_tensor("coordinates", coordinates)
    coordinates = coordinates.long()  # unsigned types cannot be compared
    if coordinates.shape[-1:] != (len(sides),):
        raise ValueError(f"coordinates must have {len(sides)} in the last axis, got {tuple(coordinates.shape)}")
    if coordinates.is_meta:
        return coordinates.new_empty(coordinates.shape[:-1])
    if kind == "hilbert" and _has_kernel(coordinates.device):
        from hilbert_lib.curves import kernels

        place, outside = kernels.index_unread(coordinates, sides)
        if not outside.item():
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


def checked_shape(shape: Sequence[int], name: str = "shape") -> tuple[int, ...]:
    """The 2 or 3 sides of a grid, each at least 1, as a tuple; else ValueError or TypeError, naming the argument."""
    sides = checks.integers(name, shape, least=1)
    if len(sides) not in (2, 3):
        raise ValueError(f"{name} must have 2 or 3 sides, got {sides}")
    if prod(sides) >= 2**63:
        raise ValueError(f"{name} must have fewer than 2^63 cells, got {sides}")
    return sides


def _raster(sides: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.arange(prod(sides), device=device)
    return torch.stack(torch.unravel_index(index, sides), dim=1)


def _snake(sides: tuple[int, ...], device: torch.device) -> Tensor:
    cells = _raster(sides, device)
    index = torch.arange(len(cells), device=device)
    for axis, length in enumerate(sides):
        backwards = index // prod(sides[axis:]) % 2 == 1  # an odd number of runs along this axis came before
        cells[:, axis] = torch.where(backwards, length - 1 - cells[:, axis], cells[:, axis])
    return cells


def _sorted_by(keys: list[Tensor]) -> Tensor:
    """The cells in ascending order of a key that is the sum of one term for each axis."""
    total = keys[0]
    for key in keys[1:]:
        total = total[..., None] + key
    return torch.stack(torch.unravel_index(total.flatten().argsort(), total.shape), dim=1)


def _morton(sides: tuple[int, ...], device: torch.device) -> Tensor:
    # A bit that no coordinate of an axis has is left out of the code: the order is the same and 63 bits suffice.
    keys = [torch.zeros(length, dtype=torch.int64, device=device) for length in sides]
    place = 0
    for bit in range(max(length - 1 for length in sides).bit_length()):
        for axis in reversed(range(len(sides))):
            if (sides[axis] - 1) >> bit:
                keys[axis] += (torch.arange(sides[axis], device=device) >> bit & 1) << place
                place += 1
    return _sorted_by(keys)


def _tile(sides: tuple[int, ...], device: torch.device) -> Tensor:
    tile = TILE_SIDE[len(sides)]
    tiles = [-(-length // tile) for length in sides]
    keys = []
    for axis, length in enumerate(sides):
        x = torch.arange(length, device=device)
        inside = x % tile * tile ** (len(sides) - 1 - axis)
        keys.append(x // tile * prod(tiles[axis + 1 :]) * tile ** len(sides) + inside)
    return _sorted_by(keys)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and kernel_mode() == "compiled"


def _hilbert(sides: tuple[int, ...], device: torch.device) -> Tensor:
    if _has_kernel(device):
        from hilbert_lib.curves import kernels

        return kernels.coordinates(sides, device)
    axes, block = whole_block(sides)
    cells = block_cells(block, device, {})
    return torch.stack([cells[axes.index(axis)] for axis in range(len(sides))], dim=1)


_CURVES = {"hilbert": _hilbert, "morton": _morton, "snake": _snake, "raster": _raster, "tile": _tile}
KINDS = tuple(_CURVES)
