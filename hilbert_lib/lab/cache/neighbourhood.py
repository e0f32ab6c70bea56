"""Blocks touched and rows exchanged by neighbourhood attention in each order of a grid's cells, counted."""

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention import grid_lists
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.blocks import axis_tiles, check_length, mask_blocks, touched_blocks
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.ring.plan.shards import Runs

CURVES = ("raster", "snake", "tile", "morton", "hilbert")
COMPACT = ("tile", "morton", "hilbert")
BLOCK, BOX = 128, 64  # tokens of a block of FlexAttention, cells of a box of queries or keys, each way
# The sides that a box of the warp-specialised kernels may have, by the axes of the grid (hopper/grid_launch).
BOXES = {2: ((8, 8),), 3: ((4, 4, 4), (2, 8, 4), (2, 4, 8))}
# Grids and windows of images, video and NAT that users run, for which others publish times.
USERS = [((256, 256), 17), ((256, 256), 33), ((256, 256), 65), ((128, 128), 13), ((30, 48, 80), (18, 24, 24))]

# Grids, windows and dilations for which lists are counted: docs/lists.md has the table.
LISTED = [((256, 256), window, 1) for window in (3, 5, 7, 9, 17, 33, 65)]
LISTED += [((256, 256), 9, 3), ((256, 256), 33, 3), ((257, 257), 33, 2), ((56, 56), 7, 8), ((256, 256), (1, 33), 1)]
LISTED += [((64, 64, 64), 3, 1), ((64, 64, 64), 7, 1), ((30, 48, 80), (18, 24, 24), 1), ((24, 44, 80), 5, (1, 11, 5))]
LISTED += [((65536,), 2048, 1), ((1024, 1024), 33, 1), ((1024, 1024), 65, 1)]


def neighbourhood_orderings(shape: Sequence[int]) -> dict[str, Ordering]:
    """The orders of a grid's cells that are compared: five curves, and a random one as control."""
    cells = prod(shape)
    curves = {kind: Ordering.from_curve(kind, cells, grid=tuple(shape)) for kind in CURVES}
    return curves | {"random": Ordering.random(cells, seed=0)}


def of_axes(values: Sequence[int]) -> int | str:
    """One number for a grid or a window of equal sides, else all of them: "30 x 48 x 80"."""
    return values[0] if len(set(values)) == 1 else " x ".join(map(str, values))


def used_by_blocks(neighbourhood: Neighbourhood, ordering: Ordering, *, device: object = None) -> float:
    """The share of the pairs in the blocks that FlexAttention computes which attend, cells stored in an order."""
    touched = touched_blocks(neighbourhood, ordering, q_block=BLOCK, kv_block=BLOCK, device=device)
    return neighbourhood.pairs / (int(touched.sum()) * BLOCK**2)


def least_window(shape: Sequence[int], *, order: str = "hilbert") -> int:
    """The smallest odd window with which blocks in an order hold fewer useless pairs than blocks row by row.

    ValueError: where no window of the grid is so wide.
    """
    raster, compact = (Ordering.from_curve(kind, prod(shape), grid=tuple(shape)) for kind in ("raster", order))
    for window in range(3, min(shape) + 1, 2):
        near = Neighbourhood(tuple(shape), window)
        if used_by_blocks(near, compact) > used_by_blocks(near, raster):
            return window
    raise ValueError(f"shape must have a window that gains by {order} order, got {tuple(shape)}")


def used_by_boxes(neighbourhood: Neighbourhood) -> float:
    """The same of boxes of keys that begin where the windows of a box of queries do, at the best sides of a box."""
    computed = []  # pairs of boxes, which along an axis are those of its tiles
    for sides in BOXES[len(neighbourhood.shape)]:
        reach = (axis_tiles(*of_axis).keys >= 0 for of_axis in zip(neighbourhood.axes, sides, strict=True))
        tiles = (int((reached.sum(1) / side).ceil().sum()) for reached, side in zip(reach, sides, strict=True))
        computed.append(prod(tiles))
    return neighbourhood.pairs / (min(computed) * BOX**2)


def count_used(works: Sequence[tuple[Sequence[int], int | Sequence[int]]] = USERS) -> pd.DataFrame:
    """Both shares for some grids and windows: used, by order, of which "boxes" need none."""
    rows = []
    for shape, window in works:
        near = Neighbourhood(tuple(shape), window)
        orderings = neighbourhood_orderings(shape)
        used = {name: used_by_blocks(near, orderings[name]) for name in ("raster", *COMPACT)} | {
            "boxes": used_by_boxes(near)
        }
        rows += [(of_axes(near.shape), of_axes(near.window), name, share) for name, share in used.items()]
    return pd.DataFrame(rows, columns=["side", "window", "order", "used"])


def count_grid_lists(works: Sequence[tuple] = LISTED) -> pd.DataFrame:
    """The packed lists of some grids, windows and dilations: their size, and the share of their pairs that attend.

    sides: of the blocks of queries. MiB: of the lists of both directions. KiB/query: the same for each cell. used: the
    share of the pairs of tiles that attend, in the forward; rows: that share if blocks were 64 cells in a row, as cells
    stored row by row are. On sides of 2^k runs of 64 cells of a Hilbert curve are the squares of 8 x 8.
    """
    rows = []
    for shape, window, dilation in works:
        near = (Neighbourhood(tuple(shape), window, dilation),)
        size, sides = grid_lists.lists_bytes(near), grid_lists.blocking(near).sides
        tiles = [grid_lists.count_tiles(near, sides=each) for each in (sides, (1,) * (len(shape) - 1) + (64,))]
        used = [round(near[0].pairs / (count * 64**2), 3) for count in tiles]
        grid = [of_axes(values) for values in (near[0].shape, near[0].window, near[0].dilation)]
        rows.append((*grid, of_axes(sides), round(size / 2**20, 1), round(size / 2**10 / near[0].length, 2), *used))
    columns = ["side", "window", "dilation", "sides", "MiB", "KiB/query", "used", "rows"]
    return pd.DataFrame(rows, columns=columns)


def count_blocks(
    shapes: Sequence[Sequence[int]], *, windows: Sequence[int], block_sizes: Sequence[int]
) -> pd.DataFrame:
    """Count the blocks of the mask that a kernel must compute, for every order, grid, window and block size [tokens].

    touched and full: blocks; per_query_block: touched blocks for each block of queries; used: share of the touched
    blocks' pairs that attend. A window wider than a grid is left out there.
    """
    if not shapes:
        raise ValueError(f"shapes must hold at least one grid, got {shapes}")
    longest = max(min(shape) for shape in shapes)
    if min(checks.integers("windows", windows, least=1, distinct=True)) > longest:
        raise ValueError(f"windows must hold one of at most {longest}, the side of a grid, got {windows}")
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
    """Number of attending pairs in each block: (query blocks, key blocks) int64; pair by pair, for small grids."""
    check_length(neighbourhood, ordering)
    q = kv = torch.zeros(1, dtype=torch.int64, device="cpu")  # positions of the pairs
    for axis in neighbourhood.axes:
        line = torch.arange(axis.cells, device="cpu")
        pairs = axis.attends(line[:, None], line).nonzero().unbind(1)
        q, kv = ((x[:, None] * axis.cells + cells).flatten() for x, cells in zip((q, kv), pairs, strict=True))
    blocks, slot = [-(-neighbourhood.length // size) for size in (q_block, kv_block)], ordering.inverse.cpu()
    block_index = slot[q] // q_block * blocks[1] + slot[kv] // kv_block
    return block_index.bincount(minlength=blocks[0] * blocks[1]).view(blocks)


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
    """Cells that a position's block of queries reaches in each order, a row a cell. The default is the middle.

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
        in_block = block == block[ordering.inverse[position]]
        attended = neighbourhood.attends(positions[in_block][:, None], positions).any(0)
        parts = {"queries": in_block, "seen": attended, "computed": torch.isin(block, block[attended])}
        part = np.select([mask.numpy() for mask in parts.values()], list(parts), "skipped")
        touched = block_pairs(neighbourhood, ordering, q_block=block_size, kv_block=block_size) > 0
        table = {"order": name, "row": positions // cols, "col": positions % cols, "slot": range(len(block))}
        tables.append(pd.DataFrame(table | {"part": part, "mean_share": touched.double().mean().item()}))
    return pd.concat(tables, ignore_index=True)


def count_exchange(neighbourhood: Neighbourhood, *, ranks: Sequence[int], row_bytes: int) -> pd.DataFrame:
    """Rows of k and v that ranks receive for their windows when each holds an equal run of consecutive slots.

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
            received = [2 * row_bytes * (reached - cells // count) for reached in needed]  # a cell is in its own window
            rows.append((name, count, sum(received), max(received)))
    return pd.DataFrame(rows, columns=["order", "ranks", "total_bytes", "most_bytes"])
