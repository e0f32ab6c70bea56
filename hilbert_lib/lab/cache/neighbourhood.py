"""What an order of a grid's cells makes of neighbourhood attention: tables of blocks touched and bytes exchanged."""

from collections.abc import Sequence
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.grid import Neighbourhood, check_length, mask_blocks
from hilbert_lib.ordering import Ordering

CURVES = ("raster", "snake", "tile", "morton", "hilbert")


def neighbourhood_orderings(shape: Sequence[int]) -> dict[str, Ordering]:
    """The orders of a grid's cells that are compared: five curves, and a random one as control.

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
        shapes: rows and columns of each grid [cells].
        windows: cells along a side of the window; one wider than a grid is left out there.
        block_sizes: tokens of a block, each way.

    Returns:
        order, grid, window, block_size, touched and full (blocks), per_query_block (touched blocks for each block of
        queries) and used (share of the touched blocks' pairs that attend).

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
    """Refuses windows of which none fits into the grids' shorter sides, or one is there twice."""
    longest = max(checks.integers("sides", sides, least=1))
    if min(checks.integers("windows", windows, least=1, distinct=True)) > longest:
        raise ValueError(f"windows must hold one of at most {longest}, the side of a grid, got {windows}")


def block_shares(neighbourhood: Neighbourhood, *, block_size: int) -> pd.DataFrame:
    """The share of each block's pairs that attend, for every order; pair by pair, for small grids.

    Returns order, q_block, kv_block and share; a row for each block, empty ones included.
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


def block_pairs(neighbourhood: Neighbourhood, ordering: Ordering, *, q_block: int, kv_block: int) -> Tensor:
    """How many pairs attend in each block: (query blocks, key blocks) int64; pair by pair, for small grids."""
    check_length(neighbourhood, ordering)
    cells = neighbourhood.coordinates(ordering.perm.cpu())
    first = neighbourhood.first(cells) @ torch.tensor([neighbourhood.shape[1], 1], device="cpu")
    keys = first[:, None] + (neighbourhood.keys(0))
    blocks = [-(-neighbourhood.length // size) for size in (q_block, kv_block)]
    q = torch.arange(neighbourhood.length, device="cpu")[:, None] // q_block
    kv = ordering.inverse.cpu()[keys] // kv_block
    return (q * blocks[1] + kv).flatten().bincount(minlength=blocks[0] * blocks[1]).view(blocks)


def rows_exchanged(neighbourhood: Neighbourhood, ordering: Ordering, ranks: int) -> Tensor:
    """Key rows that ranks need from each other when each holds a run of slots (`torch.tensor_split`).

    (ranks, ranks) int64: in row i, column j the rows of j's that i's queries attend to; 0 on the diagonal.
    """
    check_length(neighbourhood, ordering)
    ranks = checks.integer("ranks", ranks, least=1, most=neighbourhood.length)
    runs = ordering.perm.cpu().tensor_split(ranks)
    owner = torch.empty(neighbourhood.length, dtype=torch.int64, device="cpu")
    for rank, run in enumerate(runs):
        owner[run] = rank
    rows = torch.stack([owner[_seen(neighbourhood, run)].bincount(minlength=ranks) for run in runs])
    return rows.fill_diagonal_(0)


def _seen(neighbourhood: Neighbourhood, positions: Tensor) -> Tensor:
    # The positions that some of these queries attend to: each window adds 1 at its corners, and sums run over the grid.
    rows, cols = neighbourhood.shape
    corners = torch.zeros(rows + 1, cols + 1, dtype=torch.int32, device=positions.device)
    row, col = neighbourhood.first(neighbourhood.coordinates(positions)).unbind(-1)
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = (row + down * neighbourhood.window, col + right * neighbourhood.window)
        corners.index_put_(at, corners.new_tensor(1 if down == right else -1), accumulate=True)
    covered = corners.cumsum(0).cumsum(1)[:rows, :cols]
    return covered.flatten().nonzero()[:, 0]
