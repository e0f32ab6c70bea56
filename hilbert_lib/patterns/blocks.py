"""Neighbourhoods as kernels read them: rectangles of queries and keys along each axis, and blocks of a mask.

`axis_tiles` gives them as rectangles of queries within rectangles of keys, and `mask_blocks` the blocks of the mask for
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
CELLS_ON_CPU, CELLS_ON_GPU = 2**18, 2**22  # that hold sets of blocks at a time: within a cache, and within 130 MB


class AxisTiles(NamedTuple):
    """Runs of queries along one axis, and for each a run of keys that holds all that its queries see."""

    queries: Tensor  # (tiles, queries) int64 cells, -1 where there is none
    keys: Tensor  # (tiles, keys) int64 cells, each once; -1 where there is none
    seen: Tensor  # (tiles, queries, keys) bool


def axis_tiles(axis: Axis, size: int, device: torch.device | str = "cpu", cells: range | None = None) -> AxisTiles:
    """The queries of an axis, or only `cells` of it, up to `size` of one residue in a tile; and the keys of each tile.

    >>> axis_tiles(Axis(4, 3, 1, 1, False, "clip"), 2).keys.tolist()
    [[-1, 0, 1, 2], [1, 2, 3, -1]]
    """
    cells = range(axis.cells) if cells is None else cells
    offset = torch.arange(cells.start, cells.start + axis.dilation, device=device)[:, None, None]
    most = -(-len(cells) // axis.dilation)
    first = torch.arange(0, most, size, device=device)[None, :, None]
    queries = ((first + torch.arange(min(size, most), device=device)) * axis.dilation + offset).flatten(0, 1)
    there = queries < cells.stop
    queries, there = queries[there[:, 0]], there[there[:, 0]]
    own = queries.clamp(max=axis.cells - 1)
    rank, count = axis.ranks(own)
    start = axis.start(own)
    end = rank + 1 if axis.is_causal else start + axis.window
    begin = start.where(there, axis.cells).amin(1)
    span = int((end.where(there, -axis.cells).amax(1) - begin).amax())
    span = min(span, axis.cells // axis.dilation) if axis.edge == "wrap" else span
    ranks = begin[:, None] + torch.arange(span, device=device)
    count = count[:, :1]
    inside = (ranks >= 0) & (ranks < count)
    if axis.edge == "wrap":
        ranks, inside = ranks % count, torch.ones_like(inside)
    keys = (ranks * axis.dilation + queries[:, :1] % axis.dilation).where(inside, -1)
    seen = axis.attends(own[:, :, None], keys.clamp(min=0)[:, None]) & there[:, :, None] & inside[:, None]
    return AxisTiles(queries.where(there, -1), keys.where(seen.any(1), -1), seen)


class Blocks(NamedTuple):
    """Blocks of an attention mask: (query blocks, key blocks) bool each."""

    partial: Tensor  # some pairs of the block attend, or all of a block that the sequence does not fill
    full: Tensor  # all do


def mask_blocks(
    neighbourhood: Neighbourhood, ordering: Ordering | None, *, q_block: int, kv_block: int, device: object = None
) -> Blocks:
    """Which blocks of q_block by kv_block slots hold pairs that attend, when the cells are stored in an ordering?

    A block that is neither partial nor full is empty. Where an edge wraps, some full ones count as partial.

    >>> row = Neighbourhood((1, 4), 1)
    >>> mask_blocks(row, Ordering.linear(4), q_block=2, kv_block=2).partial.int().tolist()
    [[1, 0], [0, 1]]
    """
    check_length(neighbourhood, ordering)
    q_block, kv_block = (checks.integer(n, x, least=1) for n, x in (("q_block", q_block), ("kv_block", kv_block)))
    device = checks.device(device)
    perm = torch.arange(neighbourhood.length, device=device) if ordering is None else ordering.perm.to(device)
    full = _full_blocks(neighbourhood, perm, q_block, kv_block)
    return Blocks(_touched_blocks(neighbourhood, perm, q_block, kv_block) & ~full, full)


def check_length(neighbourhood: Neighbourhood, ordering: Ordering | None) -> None:
    """Raise ValueError unless the ordering has the length of the grid."""
    if ordering is not None and ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the length of the grid {neighbourhood.shape}, got {ordering!r}")


class _Line(NamedTuple):
    """Along one axis, where the keys of each word of blocks lie, and where the queries that may see some of them."""

    axis: Axis
    low: Tensor  # (words,) the first cell of the keys
    keys: int  # cells from there that hold them all
    origin: Tensor  # (words,) the first cell of the queries, which go round
    queries: int


def _touched_blocks(neighbourhood: Neighbourhood, perm: Tensor, q_block: int, kv_block: int) -> Tensor:
    # Sets of up to 64 key blocks are bits of a word. Each word has a box of its own around its keys, where the sets are
    # spread along one axis after another to the queries that see them; as many words at a time as memory is meant for.
    length, device, at_once = len(perm), perm.device, WORD_BITS * kv_block
    cells = torch.unravel_index(perm, neighbourhood.shape)
    lines = _lines_of_words(neighbourhood.axes, [_most(cell, at_once) for cell in cells])
    met = True  # (words, query blocks): whether their boxes meet
    for line, (low, high) in zip(lines, (_most(cell, q_block) for cell in cells), strict=True):
        ahead = low - line.origin[:, None]
        met = met & ((ahead % line.axis.cells < line.queries) | (-ahead % line.axis.cells <= high - low))
    stored = [_in_blocks(cell, q_block) for cell in cells]
    slot = torch.arange(length, device=device)
    bit = torch.ones((), dtype=torch.int64, device=device) << slot % at_once // kv_block
    words = torch.zeros(met.shape[::-1], dtype=torch.int64, device=device)
    most = CELLS_ON_CPU if device.type == "cpu" else CELLS_ON_GPU
    size = max(1, most // prod(line.queries for line in lines))
    for begin in range(0, len(met), size):
        own, keys = slice(begin, begin + size), slice(begin * at_once, (begin + size) * at_once)
        word = slot[keys] // at_once
        bits = torch.zeros(len(met[own]), *(line.keys for line in lines), dtype=torch.int64, device=device)
        place = (cell[keys] - line.low[word] for cell, line in zip(cells, lines, strict=True))
        bits[word - begin, *place] = bit[keys]
        for n, line in enumerate(lines):
            bits = _spread(bits, n + 1, line, own)
        for pairs in met[own].nonzero().split(max(1, most // q_block)):
            word, block = pairs.T
            at, inside = word[:, None], True
            for cell, line in zip(stored, lines, strict=True):
                ahead = (cell[block] - line.origin[begin + word, None]) % line.axis.cells
                at, inside = at * line.queries + ahead, (ahead < line.queries) & inside
            words[block, begin + word] = _union(bits.flatten()[at.where(inside, 0)].where(inside, 0))
    octets = words.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)  # lowest first
    return (octets & 1).flatten(1)[:, : -(-length // kv_block)].view(torch.bool)


def _lines_of_words(axes: tuple[Axis, ...], bounds: list[tuple[Tensor, Tensor]]) -> list[_Line]:
    # bounds: the least and the largest cell of each word.
    extents = torch.stack([(high - low).amax() for low, high in bounds]).tolist()
    found = []
    for axis, (low, _), extent in zip(axes, bounds, extents, strict=True):
        far = (axis.window - 1) * axis.dilation  # a window holds its cell
        found.append(_Line(axis, low, extent + 1, low - far, min(axis.cells, extent + 1 + 2 * far)))
    return found


def _spread(bits: Tensor, n: int, line: _Line, own: slice) -> Tensor:
    # For each query of some words, along axis n, the union over its window: two ranges of `width` keys cover it. A
    # window may leave the axis, where there are no keys.
    axis, far = line.axis, line.axis.window * line.axis.dilation
    cell = (line.origin[own, None] + torch.arange(line.queries, device=bits.device)) % axis.cells
    (rank, _), first, seen, least = axis.ranks(cell), axis.start(cell), torch.full_like(cell, axis.window), axis.window
    if axis.is_causal:
        first = torch.minimum(first, rank + 1 - seen).where(first == 0, first)
        seen, least = rank + 1 - first, axis.window + 1 - axis.stride
    first = first * axis.dilation + cell % axis.dilation - line.low[own, None] + far
    bits = torch.nn.functional.pad(bits, (0, 0) * (bits.dim() - 1 - n) + (far, far))
    shape, union, width = [*bits.shape[:n], line.queries, *bits.shape[n + 1 :]], None, 1
    as_bits = (len(cell), *[1] * (n - 1), -1, *[1] * (bits.dim() - 1 - n))
    while True:
        step = min(width, axis.window - width)
        if not step or width + step > least:
            begins = (first, first + (seen - width) * axis.dilation) if step else (first,)
            if axis.edge == "wrap":
                begins = [at + turn for at in begins for turn in (-axis.cells, 0, axis.cells)]
            begins = (at.clamp(0, bits.shape[n] - 1).view(as_bits).expand(shape) for at in begins)
            found = reduce(torch.bitwise_or, (bits.gather(n, at) for at in begins))
            union = found if union is None else found.where((seen >= width).view(as_bits), union)
        if not step:
            return union
        left = bits.shape[n] - step * axis.dilation
        bits = bits.narrow(n, 0, left) | bits.narrow(n, step * axis.dilation, left)
        width += step


def _union(bits: Tensor) -> Tensor:
    # Along the second axis.
    while (left := bits.shape[1]) > 1:
        half = (left + 1) // 2
        bits = bits[:, :half] | bits[:, left - half :]
    return bits[:, 0]


def _full_blocks(neighbourhood: Neighbourhood, perm: Tensor, q_block: int, kv_block: int) -> Tensor:
    # The windows of a query block have a rectangle in common, and a block of keys is full that lies inside of it.
    length = len(perm)
    full = torch.ones(-(-length // q_block), -(-length // kv_block), dtype=torch.bool, device=perm.device)
    for axis, cell in zip(neighbourhood.axes, torch.unravel_index(perm, neighbourhood.shape), strict=True):
        line = torch.arange(axis.cells, device=perm.device)
        (rank, count), start = axis.ranks(line), axis.start(line)
        end = rank + 1 if axis.is_causal else start + axis.window
        if axis.edge == "wrap":  # only windows that do not go round
            round_ = (start < 0) | (end > count)
            start, end = start.where(~round_, axis.cells), end.where(~round_, -1)
        low, high = _most(start.int()[cell], q_block)[1], _most(end.int()[cell], q_block)[0]
        key_low, key_high = _most(rank.int()[cell], kv_block)
        if length % q_block:  # what the cells do not fill is not full
            high[-1] = -1
        if length % kv_block:
            key_high[-1] = axis.cells + axis.window  # past the end of every window, clipped ones too
        full &= low[:, None] <= key_low
        full &= key_high < high[:, None]
        if axis.dilation > 1:
            (q_low, q_high), (k_low, k_high) = (_most(cell % axis.dilation, size) for size in (q_block, kv_block))
            full &= (q_low == q_high)[:, None] & (k_low == k_high) & (q_low[:, None] == k_low)
    return full


def _most(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # The least and the largest value of each block.
    return _in_blocks(values, block).aminmax(dim=1)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    # (blocks, block); the last value fills the last block.
    return torch.cat([values, values[-1:].expand(-len(values) % block)]).view(-1, block)
