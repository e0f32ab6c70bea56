"""Tiles of a grid as dense kernels take them: rectangles of queries within the rectangles that they see.

    axis, queries of a tile -> runs of queries, the keys that they see, -inf where a query does not see a key: `Line`
    lines of all axes       -> tiles with as many queries and as many keys: `Group`
    some tiles of a group   -> rows of the box of q and of the box of k, and what is added to the scores: `Tiles`

`sides_on_cpu` chooses the queries of a tile. One tile may hold the whole grid.
"""

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.request import GridPart
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.blocks import axis_tiles
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood

Rows = Tensor | slice  # rows of a tensor: (tiles * rows,) int64, or a slice of them
Box = tuple[int, ...]  # its sides

# Measured for torch's kernel on a CPU with AVX-512, one thread, heads of 64: where a tile has 256 queries a pair takes
# 3.9 ns forward and 10 backward, with 128 queries 4.3 and 11, with 64 4.8 and 14, with 32 6.9 and 22, with 16 9.4 and
# 36. That is as if each key had QUERIES_BESIDE more. Below 192 queries are taken 32 at a time, and 49 take as long as
# 64. Of several tiles keys and their gradients are copied, which takes as long as QUERIES_COPIED.
QUERIES_BESIDE, QUERIES_COPIED = 40, 20
QUERIES_AT_A_TIME, MOST_AT_A_TIME = 32, 192
PAIRS_BESIDE = 2**14  # pairs that take as long as a step does besides: 40 us
PAIRS_OF_STEP = 2**20  # pairs of a step, of all heads and sequences
MOST_ADDED = 2**20  # elements that are added to scores at a time: 4 MB
SMALLEST, LARGEST = 4, 1024  # queries of a tile along an axis
KEPT = 2**16  # pairs of all tiles up to which what is added to their scores is kept from call to call


class AxisBias(NamedTuple):
    """The entries of a table of bias that the pairs of one axis's tiles have."""

    entries: Tensor  # (tiles, rows, keys) int64, the entry of each pair
    keys: Tensor  # (tiles, rows, entries) int64, the key with which a row meets an entry
    exists: Tensor  # the same shape, bool: whether there is one


class Line(NamedTuple):
    """Tiles along one axis that have as many queries and as many keys."""

    queries: Tensor  # (tiles, rows) int64, along the box of q
    keys: Tensor  # (tiles, keys) int64, along the box of k
    added: Tensor  # (tiles, rows, keys): 0 where a query sees a key, -inf where not
    bias: AxisBias | None
    slices: list[tuple[slice, slice] | None]  # the queries and keys of each tile, or None where steps are uneven


class Tiles(NamedTuple):
    """Some tiles with as many queries and as many keys."""

    count: int
    queries: Rows  # of the box of q
    keys: Rows  # of the box of k
    added: Tensor  # (tiles, rows, keys): 0 or -inf
    bias: list[AxisBias]  # of these tiles, along each axis; empty where there is no bias


class Group(NamedTuple):
    """All tiles that have as many queries and as many keys along each axis."""

    lines: tuple[Line, ...]  # of each axis
    boxes: tuple[Box, Box]  # the sides of the boxes of q and of k
    count: int  # tiles
    rows: int  # queries of a tile
    keys: int
    kept: Tiles | None  # all of them where they are few
    is_whole: bool  # whether one tile holds all rows of both boxes in order

    def tiles(self, first: int, count: int) -> Tiles:
        """Tiles `first` to `first + count - 1`, row by row."""
        numbers, index = torch.arange(first, first + count, device=self.lines[0].queries.device), []
        for line in reversed(self.lines):  # torch's unravel_index copies from the host, as no CUDA graph may
            index.insert(0, numbers % len(line.queries))
            numbers = numbers // len(line.queries)
        lines = list(zip(self.lines, index, strict=True))
        added = _sums_of_pairs([line.added[n] for line, n in lines])
        bias = [AxisBias(*(x[n] for x in line.bias)) for line, n in lines if line.bias is not None]
        rows = self.slices(first) if count == 1 else None
        if rows is None:
            queries = _cells([line.queries[n] for line, n in lines], self.boxes[0])
            rows = queries, _cells([line.keys[n] for line, n in lines], self.boxes[1])
        return Tiles(count, *rows, added, bias)

    def slices(self, number: int) -> tuple[slice, slice] | None:
        """The rows of one tile as slices, or None where they are none."""
        slices = []
        for line in reversed(self.lines):
            slices.insert(0, line.slices[number % len(line.queries)])
            number //= len(line.queries)
        if None in slices:
            return None
        rows = [_flat_slice([x[n] for x in slices], box) for n, box in enumerate(self.boxes)]
        return None if None in rows else tuple(rows)


@cached_for_graphs(maxsize=64)
def groups(
    near: Neighbourhood, part: GridPart | None, is_gathered: bool, sides: tuple[int, ...], bias_sides: tuple[int, ...],
    dtype: torch.dtype, device: torch.device,
) -> list[Group]:  # fmt: skip
    """The groups of all tiles of a grid, or of a part of it.

    Args:
        is_gathered: whether the part's cells are found by slots, so that its boxes are the grid.
        sides: the queries of a tile along each axis.
        bias_sides: the entries of a table of bias along each axis; () where there is none.
        dtype: of what is added to scores.
    """
    lines = []
    for n, (axis, side) in enumerate(zip(near.axes, sides, strict=True)):
        spans = None if part is None else (part.rows[n], part.queries[n], part.keys[n])
        entries = bias_sides[n] if bias_sides else None
        lines.append(_lines(axis, side, spans, is_gathered, entries, dtype))
    if device.type == "meta":  # where memory is counted for any order of storage: all but one take copies
        lines = [[line._replace(slices=[None] * len(line.slices)) for line in of_axis] for of_axis in lines]
    boxes = near.shape, near.shape
    if part is not None and not is_gathered:
        boxes = tuple(map(len, part.rows)), tuple(map(len, part.keys))
    made = []
    for of_axes in product(*lines):
        count, rows = (prod(line.queries.shape[n] for line in of_axes) for n in (0, 1))
        keys = prod(line.keys.shape[1] for line in of_axes)
        group = Group(of_axes, boxes, count, rows, keys, kept=None, is_whole=False)
        is_whole = count == 1 and group.slices(0) == tuple(slice(0, prod(box), 1) for box in boxes)
        kept = group.tiles(0, count) if count * rows * keys <= KEPT else None
        made.append(_moved(group._replace(kept=kept, is_whole=is_whole), device))
    return made


def _moved(x: object, device: torch.device) -> object:
    # The tensors in nested tuples and lists on a device.
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple | list):
        items = [_moved(item, device) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def _lines(
    axis: Axis, side: int, spans: tuple[range, range, range] | None, is_gathered: bool, entries: int | None,
    dtype: torch.dtype,
) -> list[Line]:  # fmt: skip
    # The tiles of an axis by their sizes. Values are computed on the host: "meta", where memory is counted, has none.
    # spans: the rows, the queries and the keys of a part.
    queries, keys, attends = axis_tiles(axis, side, "cpu", spans and spans[1])
    sizes = torch.stack([(queries >= 0).sum(1), (keys >= 0).sum(1)], 1)
    lines = []
    for rows, count in sizes.unique(dim=0).tolist():
        same = (sizes == sizes.new_tensor([rows, count])).all(1).nonzero()[:, 0]
        tile_queries = queries[same, :rows]  # those that do not exist are the last ones
        place = (keys[same] < 0).to(torch.int8).argsort(dim=1, stable=True)[:, :count]
        tile_keys = keys[same].gather(1, place)
        seen = attends[same, :rows].gather(2, place[:, None].expand(-1, rows, -1))
        bias = None if entries is None else _axis_bias(axis, entries, tile_queries, tile_keys, seen)
        if spans is not None and not is_gathered:
            tile_queries = tile_queries - spans[0].start
            tile_keys = (tile_keys - spans[2].start) % axis.cells
        slices = [_both_slices(*both) for both in zip(tile_queries.tolist(), tile_keys.tolist(), strict=True)]
        added = torch.zeros(seen.shape, dtype=dtype, device="cpu").masked_fill_(~seen, -torch.inf)
        lines.append(Line(tile_queries, tile_keys, added, bias, slices))
    return lines


def _axis_bias(axis: Axis, side: int, queries: Tensor, keys: Tensor, attends: Tensor) -> AxisBias:
    # side: entries of the table along the axis.
    entries = axis.distance(queries[:, :, None], keys[:, None]) + side // 2
    number = torch.arange(keys.shape[1], device="cpu").expand(entries.shape)
    # A pair that does not attend is written past the end, which is cut off.
    met = torch.full((*queries.shape, side + 1), -1, device="cpu")
    met = met.scatter_(2, entries.where(attends, side), number)[..., :side]
    return AxisBias(entries.clamp(0, side - 1), met.clamp(min=0), met >= 0)


def _both_slices(queries: list[int], keys: list[int]) -> tuple[slice, slice] | None:
    slices = _slice(queries), _slice(keys)
    return None if None in slices else slices


def _slice(cells: list[int]) -> slice | None:
    step = cells[1] - cells[0] if len(cells) > 1 else 1
    is_even = step > 0 and cells == list(range(cells[0], cells[-1] + 1, step))
    return slice(cells[0], cells[-1] + 1, step) if is_even else None


def _flat_slice(slices: list[slice], box: Box) -> slice | None:
    # The cells of a rectangle in a box, row by row, if they are evenly spaced: all but the first axis are whole.
    first, *rest = slices
    inner = prod(box[1:])
    is_whole = all(x == slice(0, side, 1) for x, side in zip(rest, box[1:], strict=True))
    if not is_whole or (first.step > 1 and inner > 1):
        return None
    return slice(first.start * inner, (first.stop - 1) * inner + inner, first.step)


def _cells(lines: list[Tensor], box: Box) -> Tensor:
    # The cells in a box of the product of lines (tiles, n): (tiles * cells,).
    cells = lines[0]
    for line, side in zip(lines[1:], box[1:], strict=True):
        cells = (cells[:, :, None] * side + line[:, None]).flatten(1)
    return cells.flatten()


def _sums_of_pairs(lines: list[Tensor]) -> Tensor:
    # The sums (tiles, rows, keys) of what the axes have for their rows and keys.
    sums = lines[0]
    for line in lines[1:]:
        sums = (sums[:, :, None, :, None] + line[:, None, :, None, :]).flatten(3, 4).flatten(1, 2)
    return sums


@lru_cache(maxsize=256)
def sides_on_cpu(
    near: Neighbourhood, part: GridPart | None, extra: int, group: int, copies: int, added: int
) -> tuple[int, ...]:
    """The queries of a tile along each axis with which a fused kernel takes the least time on a CPU.

    Args:
        extra: keys beside the grid. group: query heads of a KV head.
        copies: of each tile: batch * kv_heads.
        added: elements that are added to the score of a pair: 1, or as many as differ between heads and sequences.
    """
    spans = [range(axis.cells) for axis in near.axes] if part is None else part.queries
    choices = [_choices(axis, span) for axis, span in zip(near.axes, spans, strict=True)]
    times = {}
    for of_axes in product(*choices):
        tiles, sides, keys = zip(*of_axes, strict=True)
        rows, keys_of_tile = group * prod(sides), prod(keys) + extra  # keys: exact for all tiles together
        if rows * keys_of_tile * added > MOST_ADDED and times:
            continue
        if rows < MOST_AT_A_TIME:
            rows = -(-rows // QUERIES_AT_A_TIME) * QUERIES_AT_A_TIME
        beside = QUERIES_BESIDE + QUERIES_COPIED * (prod(tiles) > 1)
        pairs = copies * prod(tiles) * keys_of_tile * (rows + beside)
        steps = max(prod(min(n, 3) for n in tiles), pairs / PAIRS_OF_STEP)
        times[sides] = pairs + PAIRS_BESIDE * steps
    return min(times, key=times.get)


def _choices(axis: Axis, span: range) -> list[tuple[int, int, float]]:
    # (tiles, queries of a tile, keys of a tile on average), the smallest tiles first.
    residues = min(axis.dilation, len(span))
    queries = -(-len(span) // residues)
    sides, side = [], min(SMALLEST, queries)
    while side <= LARGEST:
        sides.append(-(-queries // -(-queries // side)))  # all as large as the last
        side *= 2
        if side >= 2 * queries:
            break
    return [
        (residues * -(-queries // side), side, _mean_keys(axis, span, queries, side)) for side in dict.fromkeys(sides)
    ]


def _mean_keys(axis: Axis, span: range, queries: int, side: int) -> float:
    # The keys along an axis of a tile on average, over the tiles of the first residue.
    ranks = -(-axis.cells // axis.dilation)
    if axis.edge == "wrap" and not axis.is_causal:
        return min(ranks, axis.window + side - 1)
    first = torch.arange(0, queries, side, device="cpu")
    last = (first + side).clamp(max=queries) - 1
    begin, end = (axis.start(span.start + rank * axis.dilation) for rank in (first, last))
    end = span.start // axis.dilation + last + 1 if axis.is_causal else end + axis.window
    return (end.clamp(max=ranks) - begin.clamp(min=0)).double().mean().item()
