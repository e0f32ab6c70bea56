"""What an order of a grid's cells makes of neighbourhood attention: blocks touched and rows exchanged, counted."""

from collections.abc import Sequence
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.grid import Neighbourhood, check_length, mask_blocks
from hilbert_lib.ordering import Ordering
from hilbert_lib.ring.plan.shards import Runs

CURVES = ("raster", "snake", "tile", "morton", "hilbert")


def neighbourhood_orderings(shape: Sequence[int]) -> dict[str, Ordering]:
    """The orders of a grid's cells that are compared: five curves, and a random one as control."""
    cells = shape[0] * shape[1]
    curves = {kind: Ordering.from_curve(kind, cells, grid=tuple(shape)) for kind in CURVES}
    return curves | {"random": Ordering.random(cells, seed=0)}


def check_windows(windows: Sequence[int], sides: Sequence[int]) -> None:
    """Refuses windows of which none fits into a grid, or one is there twice."""
    longest = max(checks.integers("sides", sides, least=1))
    if min(checks.integers("windows", windows, least=1, distinct=True)) > longest:
        raise ValueError(f"windows must hold one of at most {longest}, the side of a grid, got {windows}")


def count_blocks(
    shapes: Sequence[Sequence[int]], *, windows: Sequence[int], block_sizes: Sequence[int]
) -> pd.DataFrame:
    """Count the blocks of the mask that a kernel must compute, for every order, grid, window and block size [tokens].

    touched and full: blocks; per_query_block: touched blocks for each block of queries; used: share of the touched
    blocks' pairs that attend. A window wider than a grid is left out there.

    >>> count_blocks([(16, 16)], windows=[3], block_sizes=[16]).touched[:1].tolist()
    [48]
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


def block_pairs(neighbourhood: Neighbourhood, ordering: Ordering, *, q_block: int, kv_block: int) -> Tensor:
    """How many pairs attend in each block: (query blocks, key blocks) int64; pair by pair, for small grids."""
    check_length(neighbourhood, ordering)
    q = kv = torch.zeros(1, dtype=torch.int64, device="cpu")  # positions of the pairs
    for axis in neighbourhood.axes:
        line = torch.arange(axis.cells, device="cpu")
        pairs = axis.attends(line[:, None], line).nonzero().unbind(1)
        q, kv = ((x[:, None] * axis.cells + own).flatten() for x, own in zip((q, kv), pairs, strict=True))
    blocks, slot = [-(-neighbourhood.length // size) for size in (q_block, kv_block)], ordering.inverse.cpu()
    at = slot[q] // q_block * blocks[1] + slot[kv] // kv_block
    return at.bincount(minlength=blocks[0] * blocks[1]).view(blocks)


def block_shares(neighbourhood: Neighbourhood, *, block_size: int) -> pd.DataFrame:
    """The share of each block's pairs that attend, for every order; blocks without a pair have no row."""
    tables = []
    for name, ordering in neighbourhood_orderings(neighbourhood.shape).items():
        pairs = block_pairs(neighbourhood, ordering, q_block=block_size, kv_block=block_size)
        q_block, kv_block = pairs.nonzero().unbind(1)
        share = pairs[q_block, kv_block].double() / block_size**2
        tables.append(pd.DataFrame({"order": name, "q_block": q_block, "kv_block": kv_block, "share": share}))
    return pd.concat(tables, ignore_index=True)


def block_reach(
    neighbourhood: Neighbourhood, *, block_size: int, names: Sequence[str], position: int | None = None
) -> pd.DataFrame:
    """What the block of queries that holds a position, by default the middle, reaches in each order: a row a cell.

    slot: of the cell, ascending. order: of `names`.
    part: "queries", "seen" (through a window), "computed" (not seen, but in a block of keys that is) or "skipped".
    mean_share: of the blocks of keys, those that a block of queries touches, over all blocks of queries.
    """
    rows, cols = neighbourhood.shape
    position = rows // 2 * cols + cols // 2 if position is None else position
    tables = []
    for name in names:
        ordering = neighbourhood_orderings(neighbourhood.shape)[name]
        positions, block = ordering.perm, torch.arange(rows * cols, device="cpu") // block_size
        own = block == block[ordering.inverse[position]]
        seen = neighbourhood.attends(positions[own][:, None], positions).any(0)
        parts = {"queries": own, "seen": seen, "computed": torch.isin(block, block[seen])}
        part = [next((one for one in parts if parts[one][slot]), "skipped") for slot in range(len(block))]
        touched = block_pairs(neighbourhood, ordering, q_block=block_size, kv_block=block_size) > 0
        table = {"order": name, "row": positions // cols, "col": positions % cols, "slot": range(len(block))}
        tables.append(pd.DataFrame(table | {"part": part, "mean_share": touched.double().mean().item()}))
    return pd.concat(tables, ignore_index=True)


def count_exchange(neighbourhood: Neighbourhood, *, ranks: Sequence[int], row_bytes: int) -> pd.DataFrame:
    """What ranks receive when each holds an equal run of consecutive slots: the rows of k and v that its windows reach.

    ranks: numbers of them, of which each divides the cells. row_bytes: of a token's row of k, all heads; v has as many.
    total_bytes: received by all ranks; most_bytes: by the rank that receives most.
    """
    cells, rows = neighbourhood.length, []
    for count in checks.integers("ranks", ranks, least=1, distinct=True):
        if cells % count:
            raise ValueError(f"ranks must divide the {cells} cells, got {count}")
        for name, ordering in neighbourhood_orderings(neighbourhood.shape).items():
            runs = Runs(ordering, (cells // count,) * count)
            needed = [len(runs.reached(neighbourhood, rank)) for rank in range(count)]
            received = [2 * row_bytes * (each - cells // count) for each in needed]  # a cell is in its own window
            rows.append((name, count, sum(received), max(received)))
    return pd.DataFrame(rows, columns=["order", "ranks", "total_bytes", "most_bytes"])
