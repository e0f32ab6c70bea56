"""Keys that a block of cells sees in its windows, at least: a bound, orders that reach it, and bricks.

On a grid of Z^d a set of B cells whose windows have w cells along each axis sees at least (B^(1/d) + w - 1)^d cells:
Brunn and Minkowski's inequality, on unit cubes. So no order of work lets 64 queries share their keys better.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.curves.coordinates import curve_index
from hilbert_lib.ordering import Ordering

BLOCK = 64
BRICKS = "bricks"
BOUND = "bound"
SAMPLED = 16  # blocks of an order that are counted, at equal distances
# Wrapped grids of the tables, and odd windows.
COUNTED = (((128, 128), (5, 9, 17, 33)), ((32, 32, 32), (3, 5, 7, 11)))
ORDERS = ("raster", "tile", "morton", "hilbert", BRICKS)


def least_keys(cells: int, window: int, axes: int) -> float:
    """The bound on the keys that so many cells see: (cells^(1/axes) + window - 1)^axes.

    >>> round(least_keys(64, 5, axes=2), 6)
    144.0
    """
    return (cells ** (1 / axes) + window - 1) ** axes


def brick_ordering(shape: Sequence[int], side: int) -> Ordering:
    """Cells of a wrapped grid in squares (cubes) of a side, one after the other, laid like bricks.

    Every second row of them is moved by half a side along the last axis, and of three axes every second layer along the
    middle one. ValueError: where a side of the grid is no multiple of two bricks.

    >>> brick_ordering((4, 4), 2).perm.view(4, 4)[2:].tolist()  # cells of the second row, the last one goes round
    [[9, 10, 13, 14], [11, 8, 15, 12]]
    """
    if any(length % (2 * side) for length in shape):
        raise ValueError(f"shape must have sides that are multiples of {2 * side}, got {tuple(shape)}")
    cells = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).flatten(0, -2)
    moved = cells.clone()
    for axis in range(1, len(shape)):
        is_second = moved[:, axis - 1] // side % 2
        moved[:, axis] = (cells[:, axis] - is_second * (side // 2)) % shape[axis]
    brick, inside = moved // side, moved % side
    number = torch.zeros(len(cells), dtype=torch.int64)
    for part, sides in ((brick, [length // side for length in shape]), (inside, [side] * len(shape))):
        for axis, length in enumerate(sides):
            number = number * length + part[:, axis]
    return Ordering.from_permutation(number.argsort())


def bound_ordering(name: str, shape: Sequence[int], *, block: int = BLOCK) -> Ordering:
    """An order of `ORDERS`, or "random", whose blocks are runs of so many cells of a grid."""
    if name == "random":
        return Ordering.random(prod(shape), seed=0)
    side = round(block ** (1 / len(shape)))
    if name == BRICKS:
        return brick_ordering(shape, side)
    if name == "tile":  # squares of the block's size, row by row
        cells = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).flatten(0, -2)
        inside = curve_index("raster", cells % side, (side,) * len(shape))
        tiles = curve_index("raster", cells // side, [length // side for length in shape])
        return Ordering.from_permutation((tiles * block + inside).argsort())
    return Ordering.from_curve(name, prod(shape), grid=tuple(shape))


def seen_by_blocks(ordering: Ordering, shape: Sequence[int], window: int, *, block: int = BLOCK) -> Tensor:
    """The cells that blocks of consecutive slots see on a wrapped grid: (blocks, cells) bool, at most `SAMPLED` blocks.

    window: odd.

    >>> seen_by_blocks(Ordering.linear(8), (8,), 3, block=4).sum(1).tolist()
    [6, 6]
    """
    cells = prod(shape)
    members = ordering.perm.view(-1, block)
    members = members[:: -(-len(members) // SAMPLED)]
    seen = torch.zeros(len(members), cells, dtype=torch.bool)
    seen.scatter_(1, members, True)
    seen = seen.view(-1, *shape)
    for axis in range(1, seen.dim()):
        seen = _widened(seen, window, axis)
    return seen.flatten(1)


def _widened(seen: Tensor, window: int, axis: int) -> Tensor:
    # True at most window // 2 cells away along an axis that goes round. Widths double from step to step.
    width, widened = 1, seen
    while width < window:
        step = min(width, window - width)
        widened = widened | widened.roll(step, axis)
        width += step
    return widened.roll(-(window // 2), axis)


def count_bound(
    works: Sequence[tuple[Sequence[int], Sequence[int]]] = COUNTED,
    *,
    orders: Sequence[str] = ORDERS,
    block: int = BLOCK,
) -> pd.DataFrame:
    """Count what blocks of cells see and touch on wrapped grids, for every window and order, and the bound.

    grid: its sides. keys: cells that a block sees, on average. used: the share of the pairs of its cells and keys
    that attend. blocks: those that hold its keys, on average; of the bound NaN.
    """
    rows = []
    for shape, windows in works:
        orderings = {name: bound_ordering(name, shape, block=block) for name in orders}
        grid = " x ".join(map(str, shape))
        for window in windows:
            pairs = window ** len(shape)  # of a query
            for name, ordering in orderings.items():
                seen = seen_by_blocks(ordering, shape, window, block=block)
                touched = seen[:, ordering.perm].unflatten(1, (-1, block)).any(2).sum(1).double().mean().item()
                keys = seen.sum(1).double().mean().item()
                rows.append((grid, window, name, keys, pairs / keys, touched))
            least = least_keys(block, window, len(shape))
            rows.append((grid, window, BOUND, least, pairs / least, np.nan))
    return pd.DataFrame(rows, columns=["grid", "window", "order", "keys", "used", "blocks"])


def block_panels(
    shape: tuple[int, int], window: int, orders: Sequence[str], *, block: int = BLOCK
) -> dict[str, Tensor]:
    """The middle block of each order on a wrapped grid of two axes, cell by cell, under a title that counts.

    3: its cells. 2: other cells that it sees. 1: cells that it does not see, of blocks that hold one that it sees.
    """
    panels = {}
    for name in orders:
        ordering = bound_ordering(name, shape, block=block)
        own = ordering.inverse // block == ordering.inverse[shape[0] // 2 * shape[1] + shape[1] // 2] // block
        seen = own.view(shape)
        for axis in (0, 1):
            seen = _widened(seen, window, axis)
        seen = seen.flatten()
        touched = torch.isin(ordering.inverse // block, (ordering.inverse // block)[seen])
        blocks = int(touched.sum()) // block
        title = f"{name.replace('hilbert', 'Hilbert')}: {int(seen.sum())} keys,\nin {blocks} blocks"
        panels[title] = (touched.int() + seen.int() + own.int()).view(shape)
    return panels


def every_set(side: int, window: int) -> pd.DataFrame:
    """All sets of cells of a square: by their number of cells, the fewest keys that one sees, and the bound.

    cells; sets: how many have so many; keys: the fewest; row: the keys of as many cells in a row; bound. Sides up to 4:
    there are 2^(side^2) sets.

    >>> every_set(2, 3).keys().tolist(), every_set(2, 3)["keys"].tolist()
    (['cells', 'sets', 'keys', 'row', 'bound'], [9, 12, 15, 16])
    """
    count = side * side
    numbers = np.arange(1, 2**count, dtype=np.uint32)
    members = (numbers[:, None] >> np.arange(count, dtype=np.uint32)) & 1
    sets = torch.from_numpy(members.astype(np.bool_)).view(-1, side, side)
    wide = torch.nn.functional.pad(sets, (0, window - 1, 0, window - 1))
    for axis in (1, 2):
        wide = _widened(wide, window, axis)  # goes round into the margin alone
    cells, keys = sets.sum((1, 2)), wide.sum((1, 2))
    rows = []
    for size in range(1, count + 1):
        of_size = keys[cells == size]
        row = window * (size + window - 1)
        rows.append((size, len(of_size), int(of_size.min()), row, least_keys(size, window, axes=2)))
    return pd.DataFrame(rows, columns=["cells", "sets", "keys", "row", "bound"])
