"""Packed lists of grids, made from the rules of the axes, for cells that are stored in any order.

    run      up to so many cells along an axis that share cell % rate, and the range of ranks that they see
    block    a run along each axis: 64 cells or fewer, of a rectangle
    list     the product of the ranges of its runs, packed in tiles of 64
    words    the rule itself, asked pair by pair

A union counts a key of two of its patterns twice, and a bit cannot: a block has the lists of all patterns, one after
the other. Lists that are turned round, for dk and dv, have the queries that may see the keys of a run as their ranges.
How many tiles there are follows from the ranges alone: nothing is made to count them.
"""

from collections import Counter
from functools import lru_cache, reduce
from itertools import product
from math import lcm, prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention.grid_parts import joined
from hilbert_lib.curves.codes import hilbert_codes
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists, words_of

SIDES = (1, 2, 4, 8, 16, 32, 64)  # that a block may have, in cells
TILES_AT_ONCE = 2**11  # whose pairs are asked together
LARGEST = 2**30  # bytes of the lists that are kept, and of those of one call
TILE_BYTES = BLOCK * (4 + 8)  # of a tile: rows and words
BLOCK_BYTES = BLOCK * 4 + 4  # of a block: rows and the first tile

Patterns = tuple[Neighbourhood, ...]  # on one grid: more than one for a union
Box = tuple[range, ...]  # of cells, a range along each axis


class Runs(NamedTuple):
    """Runs of cells along one axis, and for each a range of ranks: of all that they see, or of all that see them."""

    low: Tensor  # (runs,) int64, the first cell
    high: Tensor  # (runs,) int64, the last cell
    first: Tensor  # (runs,) int64, the first rank; with edge="wrap" ranks are modulo those of the axis
    count: Tensor  # (runs,) int64, the number of ranks


class Blocking(NamedTuple):
    """Cells along each axis of a block, and the rate at which they lie there."""

    sides: tuple[int, ...]
    rates: tuple[int, ...]


def blocking(patterns: Patterns, box: Box | None = None) -> Blocking:
    """The blocks of 64 cells whose lists have the fewest tiles; of several the most compact ones.

    box: the cells of q; None for all. Cells of a block share their residues of every pattern's dilation.

    >>> blocking((Neighbourhood((64, 64), 9),)).sides, blocking((Neighbourhood((64, 64), (1, 33)),)).sides
    ((8, 8), (1, 64))
    """
    return _blocking(patterns, _all_cells(patterns) if box is None else box)


def count_tiles(
    patterns: Patterns, box: Box | None = None, *, is_turned: bool = False, sides: tuple[int, ...] | None = None
) -> int:
    """The number of tiles of the lists, or of those turned round. sides: of other blocks than those of `blocking`."""
    cells = _all_cells(patterns)
    rows = cells if box is None else box
    blocks = _blocking(patterns, rows)
    blocks = blocks if sides is None else blocks._replace(sides=sides)
    return _count_tiles(patterns, blocks, *((cells, rows) if is_turned else (rows, cells)), is_turned)


@lru_cache(maxsize=1024)
def lists_bytes(patterns: Patterns, box: Box | None = None) -> int:
    """Bytes of the lists, and of those turned round where these are others."""
    cells = _all_cells(patterns)
    size = 0
    for is_turned in (False,) if _is_symmetric(patterns, box) else (False, True):
        blocks, own = blocking(patterns, box), cells if is_turned or box is None else box
        count = prod(len(low) for low, _ in map(_ends, own, blocks.rates, blocks.sides))
        size += count_tiles(patterns, box, is_turned=is_turned) * TILE_BYTES + count * BLOCK_BYTES + 4
    return size


@cached_for_graphs(LARGEST, size=lambda patterns, ordering, box, device: lists_bytes(patterns, box))
@torch.inference_mode(False)  # lists made in inference mode could not serve a later backward pass
def grid_lists(
    patterns: Patterns, ordering: Ordering | None, box: Box | None, device: torch.device
) -> tuple[Tensor, ...]:
    """The arrays of the lists, then those of the lists turned round where these are others, as `both_ways` takes them.

    patterns: of one grid; the lists hold the keys of all. ordering: in which q, k and v are stored; None row by row.
    box: the cells of q, row by row; None for all.
    """
    length, cells = patterns[0].length, _all_cells(patterns)
    k_rows = torch.arange(length, device=device) if ordering is None else ordering.to(device).inverse
    q_rows, rows = k_rows, cells
    if box is not None:
        rows, q_rows = box, torch.full((length,), -1, device=device)
        held, _ = joined(patterns[0].shape, [torch.arange(x.start, x.stop, device=device)[None] for x in box])
        q_rows[held[0]] = torch.arange(held.shape[1], device=device)
    blocks = blocking(patterns, box)
    lists = _packed(patterns, blocks, (rows, cells), (q_rows, k_rows), is_turned=False)
    if _is_symmetric(patterns, box):
        return lists.tensors
    turned = _packed(patterns, blocks, (cells, rows), (k_rows, q_rows), is_turned=True)
    return *lists.tensors, *turned.tensors


def _all_cells(patterns: Patterns) -> Box:
    return tuple(range(side) for side in patterns[0].shape)


def _is_symmetric(patterns: Patterns, box: Box | None) -> bool:
    # Whether whoever sees a cell is seen by it. Where windows are moved inside that is not so, even if they are odd.
    axes = [axis for near in patterns for axis in near.axes]
    odd = all(axis.window % 2 and axis.stride == 1 and not axis.is_causal for axis in axes)
    return box is None and odd and all(axis.edge != "shift" for axis in axes)


@lru_cache(maxsize=1024)
def _blocking(patterns: Patterns, rows: Box) -> Blocking:
    rates = tuple(lcm(*(near.axes[n].dilation for near in patterns)) for n in range(len(rows)))
    shapes = [x for x in product(SIDES, repeat=len(rows)) if prod(x) == BLOCK]
    cells = _all_cells(patterns)
    # The first of equals is taken: the most compact one.
    choices = [Blocking(sides, rates) for sides in sorted(shapes, key=sum)]
    return min(choices, key=lambda blocks: _count_tiles(patterns, blocks, rows, cells, False))


@lru_cache(maxsize=4096)
def _count_tiles(patterns: Patterns, blocks: Blocking, own: Box, listed: Box, is_turned: bool) -> int:
    tiles = 0
    for near in patterns:
        blocks_by_keys = Counter({1: 1})  # of the lists of many blocks few lengths differ
        for axis, rate, side, *cells in zip(near.axes, blocks.rates, blocks.sides, own, listed, strict=True):
            longer: Counter[int] = Counter()
            for keys, count in blocks_by_keys.items():
                for ranks, runs in _runs_by_ranks(axis, rate, *cells, is_turned)[side]:
                    longer[keys * ranks] += count * runs
            blocks_by_keys = longer
        tiles += sum(-(-keys // BLOCK) * count for keys, count in blocks_by_keys.items())
    return tiles


@lru_cache(maxsize=1024)
def _runs_by_ranks(
    axis: Axis, rate: int, own: range, listed: range, is_turned: bool
) -> dict[int, list[tuple[int, int]]]:  # fmt: skip
    # For runs of each side: numbers of ranks that a run sees, and how many runs see so many. All sides are asked
    # together: of a small grid a question takes the host long, and a cell next to nothing.
    ends = [_ends(own, rate, side) for side in SIDES]
    runs = _seen_from(axis, *(torch.cat(x) for x in zip(*ends, strict=True)), listed, is_turned)
    counts = runs.count.split([len(low) for low, _ in ends])
    found = (x.unique(return_counts=True) for x in counts)
    return {side: [*zip(*map(Tensor.tolist, each), strict=True)] for side, each in zip(SIDES, found, strict=True)}


def _tiles(keys: Tensor) -> Tensor:
    return (keys + BLOCK - 1) // BLOCK


def _runs(
    near: Neighbourhood, blocks: Blocking, own: Box, listed: Box, is_turned: bool, device: torch.device
) -> list[Runs]:
    # own: the cells of blocks; listed: those that may be in their lists.
    lines = zip(near.axes, blocks.rates, blocks.sides, own, listed, strict=True)
    return [_runs_along(*line, is_turned, device) for line in lines]


def _ends(own: range, rate: int, side: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    # The first and the last cell of each run.
    residue = torch.arange(own.start, own.start + min(rate, len(own)), device=device)
    ahead = torch.arange(0, -(-len(own) // rate), side, device=device) * rate
    low = (residue[:, None] + ahead).flatten()
    low = low[low < own.stop]
    last = own.stop - 1 - (own.stop - 1 - low) % rate
    return low, torch.minimum(low + (side - 1) * rate, last)


def _runs_along(
    axis: Axis, rate: int, side: int, own: range, listed: range, is_turned: bool, device: torch.device
) -> Runs:
    return _seen_from(axis, *_ends(own, rate, side, device), listed, is_turned)


def _seen_from(axis: Axis, low: Tensor, high: Tensor, listed: range, is_turned: bool) -> Runs:
    # low, high: the first and the last cell of each run.
    seen = axis.seen_by if is_turned else axis.seen
    first, last = seen(low)[0], seen(high)[1]
    if axis.edge == "wrap":
        last = torch.minimum(last, first + axis.ranks(low)[1] - 1)
    else:
        residue, dilation = low % axis.dilation, axis.dilation
        first = torch.maximum(first, (listed.start - residue + dilation - 1) // dilation)
        last = torch.minimum(last, (listed.stop - 1 - residue) // dilation)
    return Runs(low, high, first, (last - first + 1).clamp(min=0))


def _cells(runs: Runs, rate: int, side: int, number: Tensor) -> Tensor:
    # The cells of some runs: (n, side) int64, -1 past the end.
    cells = runs.low[number, None] + torch.arange(side, device=number.device) * rate
    return cells.where(cells <= runs.high[number, None], -1)


def _packed(
    patterns: Patterns, blocks: Blocking, boxes: tuple[Box, Box], rows: tuple[Tensor, Tensor], *, is_turned: bool
) -> PackedLists:
    # boxes: the cells of blocks, and those that may be in their lists. rows: the row of each cell as the one and as the
    # other, -1 for none.
    own_rows, listed_rows = rows
    device = own_rows.device
    runs = [_runs(near, blocks, *boxes, is_turned, device) for near in patterns]
    numbers = _along_a_curve([len(x.low) for x in runs[0]], device)
    own, exists = joined(patterns[0].shape, list(map(_cells, runs[0], blocks.rates, blocks.sides, numbers)))
    own = own.where(exists, -1)  # (blocks, 64)
    by_pattern = [reduce(mul, _counts(part, numbers)) for part in runs]
    tiles = _tiles(torch.stack(by_pattern, 1)).flatten()  # (blocks * patterns,)
    ends = tiles.cumsum(0)
    starts = pad(ends.view(-1, len(patterns))[:, -1], (1, 0))
    count = int(starts[-1])
    owner = torch.arange(len(tiles), device=device).repeat_interleave(tiles, output_size=count)
    number = torch.arange(count, device=device) - (ends - tiles)[owner]  # of a tile in its block and pattern
    listed = torch.empty(count, BLOCK, dtype=torch.int32, device=device)
    words = torch.empty(count, BLOCK, dtype=torch.int64, device=device)
    for n, (near, part) in enumerate(zip(patterns, runs, strict=True)):
        for chunk in (owner % len(patterns) == n).nonzero()[:, 0].split(TILES_AT_ONCE):
            block = owner[chunk] // len(patterns)
            place = number[chunk, None] * BLOCK + torch.arange(BLOCK, device=device)
            cells = _listed(near, part, [x[block] for x in numbers], place)
            listed_row = listed_rows[cells.clamp(min=0)].where(cells >= 0, -1)
            sides = own[block][:, :, None], cells[:, None]
            attends = near.attends(*(x.clamp(min=0) for x in (reversed(sides) if is_turned else sides)))
            listed[chunk] = listed_row.int()
            words[chunk] = words_of(attends & (own[block] >= 0)[:, :, None] & (listed_row >= 0)[:, None])
    own_row = own_rows[own.clamp(min=0)].where(own >= 0, -1)
    counts = (prod(map(len, box)) for box in boxes)
    return PackedLists(own_row.flatten().int(), starts.int(), listed, words, *counts)


def _along_a_curve(counts: list[int], device: torch.device) -> list[Tensor]:
    # The number of each block's run along each axis, of blocks in the order of work: along a Hilbert curve, so that
    # programs beside each other read the same rows.
    numbers = torch.unravel_index(torch.arange(prod(counts), device=device), counts)
    order = hilbert_codes(torch.stack(numbers)).argsort(stable=True)
    return [x[order] for x in numbers]


def _counts(runs: list[Runs], numbers: list[Tensor]) -> list[Tensor]:
    return [x.count[number] for x, number in zip(runs, numbers, strict=True)]


def _listed(near: Neighbourhood, runs: list[Runs], numbers: list[Tensor], place: Tensor) -> Tensor:
    # The positions at some places (tiles, 64) of lists, -1 for none. numbers: of a tile's runs. The last axis is the
    # fastest.
    counts = [x[:, None] for x in _counts(runs, numbers)]
    exists = place < reduce(mul, counts)
    position, step = torch.zeros_like(place), 1
    for n in reversed(range(len(runs))):
        axis, count = near.axes[n], counts[n].clamp(min=1)
        low = runs[n].low[numbers[n], None]
        rank = (runs[n].first[numbers[n], None] + place % count) % axis.ranks(low)[1]
        position += (rank * axis.dilation + low % axis.dilation) * step
        place, step = place // count, step * near.shape[n]
    return position.where(exists, -1)
