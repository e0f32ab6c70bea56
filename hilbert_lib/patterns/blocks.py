"""Neighbourhoods as kernels read them: rectangles of queries and keys along each axis, and blocks of a mask.

`axis_tiles` returns runs of queries and of the keys that they see. `mask_blocks` returns the blocks of the mask for
cells stored in any order. Nothing holds a table of length squared.
"""

from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood

WORD_BITS = 64
CELLS_ON_CPU, CELLS_ON_GPU = 2**18, 2**22  # cells that hold sets of blocks at a time: in a cache, and in 130 MB


class AxisTiles(NamedTuple):
    """Runs of queries along one axis, each with a run of keys that holds all that its queries see."""

    queries: Tensor  # (tiles, queries) int64 cells, -1 where there is none
    keys: Tensor  # (tiles, keys) int64 cells, each once; -1 where there is none
    attends: Tensor  # (tiles, queries, keys) bool


def axis_tiles(axis: Axis, size: int, device: torch.device | str = "cpu", cells: range | None = None) -> AxisTiles:
    """The tiles of an axis, or of its `cells`: up to `size` queries of one residue, and their keys.

    >>> axis_tiles(Axis(4, 3, 1, 1, False, "clip"), 2).keys.tolist()
    [[-1, 0, 1, 2], [1, 2, 3, -1]]
    """
    cells = range(axis.cells) if cells is None else cells
    offset = torch.arange(cells.start, cells.start + axis.dilation, device=device)[:, None, None]
    longest = -(-len(cells) // axis.dilation)
    first = torch.arange(0, longest, size, device=device)[None, :, None]
    queries = ((first + torch.arange(min(size, longest), device=device)) * axis.dilation + offset).flatten(0, 1)
    exists = queries < cells.stop
    queries, exists = queries[exists[:, 0]], exists[exists[:, 0]]
    cell = queries.clamp(max=axis.cells - 1)
    rank, count = axis.ranks(cell)
    start = axis.start(cell)
    end = rank + 1 if axis.is_causal else start + axis.window
    begin = start.where(exists, axis.cells).amin(1)
    span = int((end.where(exists, -axis.cells).amax(1) - begin).amax())
    span = min(span, axis.cells // axis.dilation) if axis.edge == "wrap" else span
    ranks = begin[:, None] + torch.arange(span, device=device)
    count = count[:, :1]
    inside = (ranks >= 0) & (ranks < count)
    if axis.edge == "wrap":
        ranks, inside = ranks % count, torch.ones_like(inside)
    keys = (ranks * axis.dilation + queries[:, :1] % axis.dilation).where(inside, -1)
    attends = axis.attends(cell[:, :, None], keys.clamp(min=0)[:, None]) & exists[:, :, None] & inside[:, None]
    return AxisTiles(queries.where(exists, -1), keys.where(attends.any(1), -1), attends)


class Blocks(NamedTuple):
    """Blocks of an attention mask: (query blocks, key blocks) bool each."""

    partial: Tensor  # some pairs attend, or all pairs of a block that the sequence does not fill
    full: Tensor  # all pairs attend


def mask_blocks(
    neighbourhood: Neighbourhood,
    ordering: Ordering | None,
    *,
    q_block: int,
    kv_block: int,
    device: object = None,
    queries: Tensor | None = None,
) -> Blocks:
    """The blocks of q_block by kv_block slots that hold pairs that attend, for cells stored in an ordering.

    A block that is neither partial nor full is empty. Where an edge wraps, some full blocks count as partial. queries:
    the cells of the queries as they are stored, int64; by default all, stored as the keys are.

    >>> row = Neighbourhood((1, 4), 1)
    >>> mask_blocks(row, Ordering.linear(4), q_block=2, kv_block=2).partial.int().tolist()
    [[1, 0], [0, 1]]
    """
    sizes = _block_sizes(q_block, kv_block)
    cells = _stored_cells(neighbourhood, ordering, device, queries)
    full = _full_blocks(neighbourhood, *cells, *sizes)
    return Blocks(_touched_blocks(neighbourhood, *cells, *sizes) & ~full, full)


def touched_blocks(
    neighbourhood: Neighbourhood, ordering: Ordering | None, *, q_block: int, kv_block: int, device: object = None
) -> Tensor:
    """The blocks that `mask_blocks` calls partial or full: (query blocks, key blocks) bool. It does not tell which."""
    sizes = _block_sizes(q_block, kv_block)
    return _touched_blocks(neighbourhood, *_stored_cells(neighbourhood, ordering, device), *sizes)


def _block_sizes(q_block: int, kv_block: int) -> tuple[int, int]:
    return checks.integer("q_block", q_block, least=1), checks.integer("kv_block", kv_block, least=1)


def _stored_cells(
    neighbourhood: Neighbourhood, ordering: Ordering | None, device: object, queries: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    # The cells of the queries and of the keys, as they are stored.
    check_length(neighbourhood, ordering)
    device = checks.device(device)
    perm = torch.arange(neighbourhood.length, device=device) if ordering is None else ordering.perm.to(device)
    return perm if queries is None else queries, perm


def check_length(neighbourhood: Neighbourhood, ordering: Ordering | None) -> None:
    """Raise ValueError unless the ordering has the length of the grid."""
    if ordering is not None and ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the length of the grid {neighbourhood.shape}, got {ordering!r}")


# The blocks that hold a pair, `_touched_blocks`, are found by sets of key blocks. A set is a word: bit n stands for the
# n-th of 64 key blocks. Along a row of cells, with blocks of two keys and windows of three cells:
#
#     cell                              0    1    2    3    4    5
#     1. keys set the bit of a block    a    a    b    b    c    c       one box of cells for each word
#     2. queries unite their windows    a    ab   ab   bc   bc   c       `_spread`, one axis after another
#     3. blocks unite their queries     |  ab   |   abc   |   bc   |     words (query blocks, words)


class _Line(NamedTuple):
    """A line of cells along one axis for each word: where its keys lie, and the queries that may see some of them."""

    axis: Axis
    low: Tensor  # (words,) the first cell of the keys
    keys: int  # cells from there that hold all keys
    origin: Tensor  # (words,) the first cell of the queries, which go round the axis
    queries: int  # cells from there that hold all queries


def _touched_blocks(neighbourhood: Neighbourhood, queries: Tensor, keys: Tensor, q_block: int, kv_block: int) -> Tensor:
    # (query blocks, key blocks) bool. As many words are worked on at a time as memory is meant for.
    device, slots_of_word = keys.device, WORD_BITS * kv_block
    cells = torch.unravel_index(keys, neighbourhood.shape)
    q_cells = torch.unravel_index(queries, neighbourhood.shape)
    lines = _lines_of_words(neighbourhood.axes, [_bounds(cell, slots_of_word) for cell in cells])
    reached = _reached(lines, [_bounds(cell, q_block) for cell in q_cells])
    q_cells = [_in_blocks(cell, q_block) for cell in q_cells]
    words = torch.zeros(reached.shape[::-1], dtype=torch.int64, device=device)
    cells_at_once = CELLS_ON_CPU if device.type == "cpu" else CELLS_ON_GPU
    words_at_once = max(1, cells_at_once // prod(line.queries for line in lines))
    for begin in range(0, len(reached), words_at_once):
        batch = slice(begin, begin + words_at_once)
        bits = _bits_of_keys(cells, lines, batch, kv_block)
        for n, line in enumerate(lines):
            bits = _spread(bits, n + 1, line, batch)
        for pairs in reached[batch].nonzero().split(max(1, cells_at_once // q_block)):
            word, block = pairs.T
            place, inside = _places(lines, [cell[block] for cell in q_cells], word, begin)
            words[block, begin + word] = _union(bits.flatten()[place.where(inside, 0)].where(inside, 0))
    octets = words.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)  # lowest first
    return (octets & 1).flatten(1)[:, : -(-len(keys) // kv_block)].view(torch.bool)


def _lines_of_words(axes: tuple[Axis, ...], bounds: list[tuple[Tensor, Tensor]]) -> list[_Line]:
    # bounds: for each axis the least and the largest cell of each word.
    extents = torch.stack([(high - low).amax() for low, high in bounds]).tolist()
    lines = []
    for axis, (low, _), extent in zip(axes, bounds, extents, strict=True):
        far = (axis.window - 1) * axis.dilation  # a window holds its own cell
        lines.append(_Line(axis, low, extent + 1, low - far, min(axis.cells, extent + 1 + 2 * far)))
    return lines


def _reached(lines: list[_Line], bounds: list[tuple[Tensor, Tensor]]) -> Tensor:
    # (words, query blocks) bool: whether the queries of a word may lie in the block. bounds: of each query block.
    reached = True
    for line, (low, high) in zip(lines, bounds, strict=True):
        ahead = low - line.origin[:, None]
        reached = reached & ((ahead % line.axis.cells < line.queries) | (-ahead % line.axis.cells <= high - low))
    return reached


def _bits_of_keys(cells: tuple[Tensor, ...], lines: list[_Line], batch: slice, kv_block: int) -> Tensor:
    # (words, *boxes of keys) int64: for each key of some words the bit of its block.
    device, slots_of_word = cells[0].device, WORD_BITS * kv_block
    slot = torch.arange(len(cells[0]), device=device)[batch.start * slots_of_word : batch.stop * slots_of_word]
    word = slot // slots_of_word
    words = len(lines[0].low[batch])
    bits = torch.zeros(words, *(line.keys for line in lines), dtype=torch.int64, device=device)
    box_cell = (cell[slot] - line.low[word] for cell, line in zip(cells, lines, strict=True))
    block = slot % slots_of_word // kv_block
    bits[word - batch.start, *box_cell] = torch.ones((), dtype=torch.int64, device=device) << block
    return bits


def _places(lines: list[_Line], cells: list[Tensor], word: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    # The places of queries in the boxes of queries of their words, flattened, and whether they lie inside.
    place, inside = word[:, None], True
    for cell, line in zip(cells, lines, strict=True):
        ahead = (cell - line.origin[begin + word, None]) % line.axis.cells
        place, inside = place * line.queries + ahead, (ahead < line.queries) & inside
    return place, inside


def _spread(bits: Tensor, n: int, line: _Line, batch: slice) -> Tensor:
    # For each query of some words, along axis n, the union over its window. Two ranges of `width` keys, a power of two
    # or the whole window, cover a window:
    #
    #     window    [first ............. first + length - 1]
    #     ranges    [--- width ---]
    #                        [--- width ---]
    #
    # A window may leave the axis, where there are no keys.
    axis, far = line.axis, line.axis.window * line.axis.dilation
    cell = (line.origin[batch, None] + torch.arange(line.queries, device=bits.device)) % axis.cells
    (rank, _), first = axis.ranks(cell), axis.start(cell)
    length, shortest = torch.full_like(cell, axis.window), axis.window
    if axis.is_causal:
        first = torch.minimum(first, rank + 1 - length).where(first == 0, first)
        length, shortest = rank + 1 - first, axis.window + 1 - axis.stride
    first = first * axis.dilation + cell % axis.dilation - line.low[batch, None] + far
    bits = torch.nn.functional.pad(bits, (0, 0) * (bits.dim() - 1 - n) + (far, far))
    shape, union, width = [*bits.shape[:n], line.queries, *bits.shape[n + 1 :]], None, 1
    along_n = (len(cell), *[1] * (n - 1), -1, *[1] * (bits.dim() - 1 - n))
    while True:
        step = min(width, axis.window - width)
        if not step or width + step > shortest:
            begins = [first, first + (length - width) * axis.dilation] if step else [first]
            if axis.edge == "wrap":
                begins = [begin + turn for begin in begins for turn in (-axis.cells, 0, axis.cells)]
            index = (begin.clamp(0, bits.shape[n] - 1).view(along_n).expand(shape) for begin in begins)
            covered = reduce(torch.bitwise_or, (bits.gather(n, begin) for begin in index))
            union = covered if union is None else covered.where((length >= width).view(along_n), union)
        if not step:
            return union
        left = bits.shape[n] - step * axis.dilation
        bits = bits.narrow(n, 0, left) | bits.narrow(n, step * axis.dilation, left)
        width += step


def _union(bits: Tensor) -> Tensor:
    # The union along the second axis.
    while (left := bits.shape[1]) > 1:
        half = (left + 1) // 2
        bits = bits[:, :half] | bits[:, left - half :]
    return bits[:, 0]


def _full_blocks(neighbourhood: Neighbourhood, queries: Tensor, keys: Tensor, q_block: int, kv_block: int) -> Tensor:
    # A block is full where its keys lie in the rectangle that all windows of its queries have in common.
    full = torch.ones(-(-len(queries) // q_block), -(-len(keys) // kv_block), dtype=torch.bool, device=keys.device)
    cells = (torch.unravel_index(positions, neighbourhood.shape) for positions in (queries, keys))
    for axis, q_cell, k_cell in zip(neighbourhood.axes, *cells, strict=True):
        line = torch.arange(axis.cells, device=keys.device)
        (rank, count), start = axis.ranks(line), axis.start(line)
        end = rank + 1 if axis.is_causal else start + axis.window
        if axis.edge == "wrap":  # only windows that do not go round count
            round_ = (start < 0) | (end > count)
            start, end = start.where(~round_, axis.cells), end.where(~round_, -1)
        low, high = _bounds(start.int()[q_cell], q_block)[1], _bounds(end.int()[q_cell], q_block)[0]
        key_low, key_high = _bounds(rank.int()[k_cell], kv_block)
        if len(queries) % q_block:  # a block that the cells do not fill is not full
            high[-1] = -1
        if len(keys) % kv_block:
            key_high[-1] = axis.cells + axis.window  # past the end of every window
        full &= low[:, None] <= key_low
        full &= key_high < high[:, None]
        if axis.dilation > 1:
            q_low, q_high = _bounds(q_cell % axis.dilation, q_block)
            k_low, k_high = _bounds(k_cell % axis.dilation, kv_block)
            full &= (q_low == q_high)[:, None] & (k_low == k_high) & (q_low[:, None] == k_low)
    return full


def _bounds(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # The least and the largest value of each block: two (blocks,) tensors.
    return _in_blocks(values, block).aminmax(dim=1)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    # (blocks, block); the last value fills the last block.
    return torch.cat([values, values[-1:].expand(-len(values) % block)]).view(-1, block)
