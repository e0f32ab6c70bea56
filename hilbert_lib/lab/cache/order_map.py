"""Tiles that kernels touch with the cells of a grid stored row by row, over those in another order, counted.

A cell of the map is a grid, a window, a dilation and a kernel. Above 1 the order lets the kernel skip more.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod

import pandas as pd
import torch

from hilbert_lib import checks
from hilbert_lib.lab.cache.neighbourhood import BLOCK, used_by_boxes
from hilbert_lib.lab.cache.points import HALVED, count_lists
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns import blocks
from hilbert_lib.patterns.neighbourhood import Neighbourhood

SIDES, WINDOWS, DILATIONS, BLOCKS = (64, 128, 256), (3, 5, 7, 9, 11, 13, 17, 33, 65), (1, 2, 4), (128, 64)
ROWS, HILBERT, APART = "raster", "hilbert", "hilbert, residues apart"
POINTS = 4096  # of each made cloud
CASE = ["kernel", "block_size", "order", "side", "dilation", "window"]  # of a cell on a grid


def residues_apart(shape: Sequence[int], dilation: int, *, kind: str = HILBERT) -> Ordering:
    """The cells of one residue side by side, each residue class along a curve of its own grid.

    shape: sides of a grid of two axes. dilation: of both axes. kind: a name of a curve.

    >>> residues_apart((2, 4), 2, kind="raster").perm.tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    grid = torch.arange(prod(shape), device="cpu").view(*shape)
    classes = []
    for row, column in product(range(dilation), repeat=2):
        cells = grid[row::dilation, column::dilation]
        order = Ordering.from_curve(kind, cells.numel(), grid=tuple(cells.shape))
        classes.append(cells.flatten()[order.perm])
    return Ordering.from_permutation(torch.cat(classes))


def map_orders(shape: Sequence[int], dilation: int) -> dict[str, Ordering]:
    """The orders of storage that the map compares, by name; row by row comes first.

    >>> list(map_orders((8, 8), 2))
    ['raster', 'hilbert', 'hilbert, residues apart']
    """
    orders = {kind: Ordering.from_curve(kind, prod(shape), grid=tuple(shape)) for kind in (ROWS, HILBERT)}
    return orders | ({APART: residues_apart(shape, dilation)} if dilation > 1 else {})


def touched_blocks(near: Neighbourhood, order: Ordering, size: int, *, device: object = None) -> int:
    """Blocks of `size` x `size` tokens that hold a pair that attends, of cells that are stored in an order."""
    return int(blocks.touched_blocks(near, order, q_block=size, kv_block=size, device=device).sum())


def count_order_map(
    *,
    sides: Sequence[int] = SIDES,
    windows: Sequence[int] = WINDOWS,
    dilations: Sequence[int] = DILATIONS,
    block_sizes: Sequence[int] = BLOCKS,
    device: object = None,
) -> pd.DataFrame:
    """Count every cell of the map on square grids: kernel, block_size, order, side, dilation, window, counted.

    Of "blocks", as FlexAttention has them, counted is the number of touched blocks row by row over that in the order.
    Of "boxes", which read plain rows, it is the share of computed pairs that attend, over that of blocks of 128 in the
    better of row by row and Hilbert order. Cells whose window, times the dilation, is wider than the grid are left out.

    >>> count_order_map(sides=[16], windows=[5], dilations=[1], block_sizes=[16]).kernel.tolist()
    ['blocks', 'boxes']
    """
    given = {"sides": sides, "windows": windows, "dilations": dilations, "block_sizes": block_sizes}
    for name, values in given.items():
        checks.integers(name, values, least=1, distinct=True)
    rows = []
    for side, dilation, window in product(sides, dilations, windows):
        if window * dilation <= side:
            near = Neighbourhood((side, side), window, dilation=dilation)
            rows += [(*case, side, dilation, window, counted) for *case, counted in _cells(near, block_sizes, device)]
    if not rows:
        raise ValueError(f"windows must hold one of at most {max(sides)}, the side of a grid, got {list(windows)}")
    return pd.DataFrame(rows, columns=[*CASE, "counted"])


def _cells(near: Neighbourhood, block_sizes: Sequence[int], device: object) -> Iterator[tuple[str, int, str, float]]:
    # Kernel, block size, order and ratio.
    orders = map_orders(near.shape, near.dilation[0])
    count = cache(lambda name, size: touched_blocks(near, orders[name], size, device=device))
    for size in block_sizes:
        yield from (("blocks", size, name, count(ROWS, size) / count(name, size)) for name in orders if name != ROWS)
    if near.dilation == (1, 1):
        fewest = min(count(name, BLOCK) for name in (ROWS, HILBERT))
        yield "boxes", BLOCK, ROWS, used_by_boxes(near) * fewest * BLOCK**2 / near.pairs


def count_point_map(count: int = POINTS) -> pd.DataFrame:
    """Count the cells of the map over points, row by row over an order: kernel, cloud, points, window, counted.

    Of "lists" the order is that of work, as `PointNeighbourhood` takes it; of "blocks" of 64 it is Hilbert order, in
    which tokens are stored.

    >>> count_point_map(200).groupby("kernel").size().to_dict()
    {'blocks': 8, 'lists': 8}
    """
    rows = []
    for (cloud, window), counts in count_lists(count, orders=[ROWS, HILBERT, HALVED]).groupby(["cloud", "window"]):
        of_order = counts.set_index("order")
        lists = of_order.tiles[ROWS] / of_order.tiles[HALVED]
        blocks = of_order.blocks[ROWS] / of_order.blocks[HILBERT]
        rows += [("lists", cloud, count, window, lists), ("blocks", cloud, count, window, blocks)]
    return pd.DataFrame(rows, columns=["kernel", "cloud", "points", "window", "counted"])
