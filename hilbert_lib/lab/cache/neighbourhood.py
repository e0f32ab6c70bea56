"""What an order of a grid's cells makes of neighbourhood attention: tables of blocks touched and bytes exchanged."""

from collections.abc import Sequence
from itertools import product

import pandas as pd

from hilbert_lib import checks
from hilbert_lib.grid import Neighbourhood, block_pairs, mask_blocks, rows_exchanged
from hilbert_lib.ordering import Ordering

CURVES = ("raster", "snake", "tile", "morton", "hilbert")


def neighbourhood_orderings(shape: Sequence[int]) -> dict[str, Ordering]:
    """The orders of a grid's cells that are compared: five curves, and a random one as control.

    Args:
        shape: rows and columns.

    >>> list(neighbourhood_orderings((4, 4)))
    ['raster', 'snake', 'tile', 'morton', 'hilbert', 'random']
    """
    rows, cols = shape
    curves = {kind: Ordering.from_curve(kind, rows * cols, grid=(rows, cols)) for kind in CURVES}
    return curves | {"random": Ordering.random(rows * cols, seed=0)}


def count_blocks(
    shapes: Sequence[Sequence[int]], *, windows: Sequence[int], block_sizes: Sequence[int]
) -> pd.DataFrame:
    """Blocks of the mask that a kernel must compute, for every order, grid, window and block size.

    Args:
        shapes: rows and columns of each grid.
        windows: cells along a side of the window; one wider than a grid is left out there.
        block_sizes: tokens of a block, each way.

    Returns:
        order, grid, window, block_size, touched and full (blocks), per_query_block (touched blocks for each block of
        queries) and used (share of the touched blocks' pairs that attend).

    Raises:
        TypeError, ValueError: naming the argument where it is empty or holds one twice, and where no window fits.

    >>> table = count_blocks([(16, 16)], windows=[3], block_sizes=[16])
    >>> table.set_index("order").touched[["raster", "random"]].to_dict()
    {'raster': 48, 'random': 256}
    """
    if not shapes:
        raise ValueError(f"shapes must hold at least one grid, got {shapes}")
    check_windows(windows, [min(shape) for shape in shapes])
    checks.integers("block_sizes", block_sizes, least=1, distinct=True)
    rows = []
    for shape, window, size in product(shapes, windows, block_sizes):
        if window > min(shape):
            continue
        near = Neighbourhood(tuple(shape), window)
        for name, ordering in neighbourhood_orderings(shape).items():
            blocks = mask_blocks(near, ordering, q_block=size, kv_block=size)
            full = int(blocks.full.sum())
            touched = int(blocks.partial.sum()) + full
            shares = touched / len(blocks.full), near.pairs / (touched * size**2)
            rows.append((name, "{} x {}".format(*shape), window, size, touched, full, *shares))
    columns = ["order", "grid", "window", "block_size", "touched", "full", "per_query_block", "used"]
    return pd.DataFrame(rows, columns=columns)


def check_windows(windows: Sequence[int], sides: Sequence[int]) -> None:
    """Refuses windows of which none fits, or one is there twice.

    Args:
        windows: cells along a side of the window.
        sides: cells along the shorter side of each grid.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed.

    >>> check_windows([3, 65], [16])
    >>> check_windows([33], [16, 20])
    Traceback (most recent call last):
    ValueError: windows must hold one of at most 20, the side of a grid, got [33]
    """
    longest = max(checks.integers("sides", sides, least=1))
    if min(checks.integers("windows", windows, least=1, distinct=True)) > longest:
        raise ValueError(f"windows must hold one of at most {longest}, the side of a grid, got {windows}")


def block_shares(neighbourhood: Neighbourhood, *, block_size: int) -> pd.DataFrame:
    """The share of each block's pairs that attend, for every order; pair by pair, for small grids.

    Args:
        neighbourhood: which keys a query attends to.
        block_size: tokens of a block, each way.

    Returns:
        order, q_block, kv_block, share; one row for each block, empty ones included.

    >>> block_shares(Neighbourhood((2, 2), 1), block_size=4).share.unique().tolist()
    [0.25]
    """
    tables = []
    for name, ordering in neighbourhood_orderings(neighbourhood.shape).items():
        pairs = block_pairs(neighbourhood, ordering, q_block=block_size, kv_block=block_size)
        q_block, kv_block = (axis.flatten() for axis in pairs.new_ones(pairs.shape).nonzero().unbind(1))
        share = pairs.flatten().double() / block_size**2
        tables.append(pd.DataFrame({"order": name, "q_block": q_block, "kv_block": kv_block, "share": share}))
    return pd.concat(tables, ignore_index=True)


def count_exchange(neighbourhood: Neighbourhood, *, ranks: Sequence[int], row_bytes: int) -> pd.DataFrame:
    """What ranks exchange when each holds a run of consecutive slots: exactly the rows of k and v that they need.

    Args:
        neighbourhood: which keys a query attends to.
        ranks: how many ranks.
        row_bytes: bytes of a token's row of k, all heads; v has as many.

    Returns:
        order, ranks, total_bytes (received by all ranks together), most_bytes (by the rank that receives most) and
        most_peers (the ranks that one rank receives from, at most).

    Raises:
        TypeError, ValueError: naming the argument, where ranks is empty, or holds one twice or more than cells.

    >>> table = count_exchange(Neighbourhood((8, 8), 3), ranks=[4], row_bytes=1).set_index("order")
    >>> table.total_bytes[["raster", "hilbert"]].to_dict()
    {'raster': 96, 'hilbert': 72}
    """
    ranks = checks.integers("ranks", ranks, least=1, distinct=True)
    rows = []
    for name, ordering in neighbourhood_orderings(neighbourhood.shape).items():
        for count in ranks:
            needed = rows_exchanged(neighbourhood, ordering, count)
            received = 2 * row_bytes * needed.sum(dim=1)
            peers = (needed > 0).sum(dim=1)
            rows.append((name, count, int(received.sum()), int(received.max()), int(peers.max())))
    return pd.DataFrame(rows, columns=["order", "ranks", "total_bytes", "most_bytes", "most_peers"])
