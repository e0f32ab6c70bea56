"""A dilated pattern over the cells of a grid, stored in an order: the share of its neighbours that a head sees.

The pattern attends along the order, so here an order changes which keys a query sees: each is another function.
"""

from collections.abc import Sequence
from math import isqrt, prod

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.cache.neighbourhood import neighbourhood_orderings
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

HEADS = 16
SIDE = 256
PATTERN = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))  # LongNet's, on a grid of 256 x 256
WINDOWS = (5, 17, 33)
ORDERS = ("raster", "morton", "hilbert")
QUERIES = 512  # cells that are counted; the standard error of the mean is about a point
ONES = torch.tensor([float(byte.bit_count()) for byte in range(256)])


def keys_of_a_query(pattern: DilatedPattern, length: int, heads: int = HEADS) -> float:
    """Keys of a query and head, on average; a key of two branches counts twice.

    >>> keys_of_a_query(PATTERN, SIDE**2)
    3968.0
    """
    return pattern.pairs(length, heads=heads) / (length * heads)


def window_of(keys: float) -> int:
    """The side of the largest odd square window of at most so many keys, or of 1 % more.

    >>> window_of(3968)
    63
    """
    side = isqrt(int(1.01 * keys))
    return side - 1 + side % 2


def heads_that_see(pattern: DilatedPattern, queries: Tensor, keys: Tensor, heads: int = HEADS) -> Tensor:
    """The share of heads that see each key, from 0 to 1; positions along the order, which broadcast. Not causal.

    >>> heads_that_see(DilatedPattern((4,), (2,)), torch.tensor(0), torch.arange(6), heads=2).tolist()
    [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]
    """
    if heads > 32:
        raise ValueError(f"heads must be at most 32, got {heads}")
    positions = torch.arange(1 + int(max(queries.max(), keys.max())))
    seen = torch.zeros(torch.broadcast_shapes(queries.shape, keys.shape), dtype=torch.int64)  # a bit for each head
    for branch, (w, r) in enumerate(pattern.branches):
        bits = [0] * r
        for head in range(heads):
            bits[pattern.offset(branch, head, heads)] |= 1 << head
        groups = (positions // w * r + positions % w % r).int()  # that see each other
        together = groups[queries] == groups[keys]
        seen |= torch.tensor(bits)[queries % w % r] * together
    return sum(ONES[seen >> first & 255] for first in range(0, heads, 8)) / heads


def shares_of_windows(
    pattern: DilatedPattern, ordering: Ordering, shape: tuple[int, int], windows: Sequence[int], *, heads: int = HEADS
) -> dict[int, float]:
    """The share of the cells of each odd window that a head sees, the mean over heads and over cells of the grid.

    Windows are cut off at the border. At most `QUERIES` cells are counted, drawn at random.

    >>> shares_of_windows(DilatedPattern((16,), (1,)), Ordering.linear(16), (4, 4), [3], heads=1)
    {3: 1.0}
    """
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    queries = torch.randperm(rows * columns, generator=generator)[:QUERIES, None]
    apart = torch.cartesian_prod(*[torch.arange(max(windows)) - max(windows) // 2] * 2)
    row, column = queries // columns + apart[:, 0], queries % columns + apart[:, 1]
    is_cell = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    keys = row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)
    seen = heads_that_see(pattern, ordering.inverse[queries], ordering.inverse[keys], heads) * is_cell
    distance = apart.abs().amax(1)
    inside = {window: distance <= window // 2 for window in windows}
    return {window: float(seen[:, part].sum() / is_cell[:, part].sum()) for window, part in inside.items()}


def count_along_curve(
    pattern: DilatedPattern = PATTERN,
    shape: tuple[int, int] = (SIDE, SIDE),
    *,
    windows: Sequence[int] = WINDOWS,
    orders: Sequence[str] = ORDERS,
    heads: int = HEADS,
) -> pd.DataFrame:
    """The share of the neighbours that a head sees: order, window, share. Work is equal in all rows.

    The last rows of each window are of the window that computes as many pairs, named "window N" by its side.
    """
    orderings = neighbourhood_orderings(shape)
    rows = []
    for name in orders:
        shares = shares_of_windows(pattern, orderings[name], shape, windows, heads=heads)
        rows += [(name, window, share) for window, share in shares.items()]
    same_work = window_of(keys_of_a_query(pattern, prod(shape), heads))
    rows += [(f"window {same_work}", window, min(1.0, same_work / window) ** 2) for window in windows]
    return pd.DataFrame(rows, columns=["order", "window", "share"])


def cells_seen(
    pattern: DilatedPattern, ordering: Ordering, shape: tuple[int, int], cell: tuple[int, int], *, heads: int = HEADS
) -> Tensor:
    """The share of heads that see each cell of a grid from one cell: (rows, columns)."""
    query = ordering.inverse[cell[0] * shape[1] + cell[1]]
    return heads_that_see(pattern, query, ordering.inverse, heads).view(shape)
