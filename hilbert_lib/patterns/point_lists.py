"""Packed lists of points: the pairs of cells that lie in each other's windows, found without n squared tests.

order       cells by cloud, then along a Hilbert curve, then halved until 64 lie together
boxes       the least and the largest cell of each 64
trees       8 boxes make a larger one; both trees are walked together, and boxes that do not meet are left
met         which keys of a block any query of another sees
words       of these keys, packed in tiles of 64, which ones each query sees

Clouds are an axis of their own, along which a window is 1. It takes O(n log n), and waits for the device: lists are
made outside of CUDA graphs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.curves.codes import hilbert_codes
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists, tiles_of, words_of

FAN = 8  # boxes that make one of the next level
CHUNK = 4096  # cells of the curve that are halved
BLOCKS_AT_ONCE = 2**10  # pairs of blocks that are compared together
FAR = 2**30  # more than any coordinate, here counted from 0


class Cells(NamedTuple):
    """Cells in the order of work."""

    places: Tensor  # (axes, blocks * 64) int32: coordinates of the cell at each place; past the end any
    order: Tensor  # (n,) int64: the row of the cell at each place


class Windows(NamedTuple):
    """Windows of queries, and the cells of keys, in the order of work."""

    keys: Tensor  # (axes, key places) int32: the cell of each key
    least: Tensor  # (axes, query places) int32: the least cell that each query sees
    largest: Tensor
    query_count: int  # further places hold nobody
    key_count: int


def in_order(cells: Tensor, has_clouds: bool) -> Cells:
    """Cells (axes, n) int32, each coordinate from 0 to FAR - 1, in the order of work.

    has_clouds: whether the first axis is the number of a cloud.
    """
    count = cells.shape[1]
    order = hilbert_codes(cells[1:] if has_clouds else cells).argsort(stable=True)
    if has_clouds:
        order = order[cells[0, order].argsort(stable=True)]
    order = _halved(cells, order, has_clouds)
    return Cells(pad(cells[:, order], (0, -count % BLOCK)), order)


def _halved(cells: Tensor, order: Tensor, has_clouds: bool) -> Tensor:
    # Chunks of an order are halved along their longest side, at multiples of 64, until 64 cells are left.
    axes, count = cells.shape
    part = torch.arange(count, device=cells.device)
    size = CHUNK
    while size > BLOCK:
        parts = -(-count // size)
        lines = cells[:, order]
        least = pad(lines, (0, parts * size - count), value=FAR).view(axes, parts, size).amin(2)
        largest = pad(lines, (0, parts * size - count), value=-1).view(axes, parts, size).amax(2)
        sides = largest - least
        if has_clouds:  # clouds are parted first
            sides[0] = sides[0].sign() * FAR
        along = lines.gather(0, sides.argmax(0)[part // size][None])[0]
        order = order[((part // size) * FAR + along).argsort(stable=True)]
        size //= 2
    return order


def packed(queries: Cells, keys: Cells, before: tuple[int, ...], window: tuple[int, ...]) -> PackedLists:
    """The lists of all pairs for which key - query is from -before to window - 1 - before along each axis."""
    least, largest = reached(queries, before, window)
    counts = len(queries.order), len(keys.order)
    query_blocks, key_blocks = meeting(boxes(least, largest, counts[0]), boxes(keys.places, keys.places, counts[1]))
    windows = Windows(keys.places, least, largest, *counts)
    pair, key = _met(windows, query_blocks, key_blocks).nonzero(as_tuple=True)
    place = key_blocks[pair] * BLOCK + key
    tile_blocks, starts, tile_places = tiles_of(query_blocks[pair], place, queries.places.shape[1] // BLOCK)
    words = _words(windows, tile_blocks, tile_places)
    key_rows = tile_places
    if len(tile_places):
        key_rows = keys.order[tile_places.clamp(min=0)].where(tile_places >= 0, -1)
    query_rows = pad(queries.order, (0, -counts[0] % BLOCK), value=-1)
    return PackedLists(query_rows.int(), starts, key_rows.int(), words, *counts)


def reached(queries: Cells, before: tuple[int, ...], window: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The least and the largest cell that the query at each place sees: (axes, places) int32 each."""
    # Wider windows than all cells would leave 32 bits.
    reach_before = [min(n, FAR) for n in before]
    reach_after = [min(w - 1 - n, FAR) for w, n in zip(window, before, strict=True)]
    reach = torch.tensor([reach_before, reach_after], dtype=torch.int32, device=queries.places.device)[:, :, None]
    return queries.places - reach[0], queries.places + reach[1]


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and kernel_mode() == "compiled"


def _met(windows: Windows, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
    # Which keys of a block any query of another sees: (pairs, 64) bool.
    if _has_kernel(query_blocks.device):
        from hilbert_lib.patterns import point_kernels  # triton is imported only where a kernel is used

        return point_kernels.met(*windows, query_blocks, key_blocks)
    places = key_blocks[:, None] * BLOCK + torch.arange(BLOCK, device=key_blocks.device)
    chunks = zip(query_blocks.split(BLOCKS_AT_ONCE), places.split(BLOCKS_AT_ONCE), strict=True)
    return torch.cat([_seen(windows, *chunk).any(1) for chunk in chunks])


def _words(windows: Windows, tile_blocks: Tensor, tile_places: Tensor) -> Tensor:
    # Which keys of a tile each query of its block sees: (tiles, 64) int64.
    if _has_kernel(tile_blocks.device):
        from hilbert_lib.patterns import point_kernels  # triton is imported only where a kernel is used

        return point_kernels.words(*windows, tile_blocks, tile_places)
    chunks = zip(tile_blocks.split(BLOCKS_AT_ONCE), tile_places.split(BLOCKS_AT_ONCE), strict=True)
    return torch.cat([words_of(_seen(windows, *chunk)) for chunk in chunks])


def _seen(windows: Windows, blocks: Tensor, places: Tensor) -> Tensor:
    # Whether each query of some blocks sees the keys at some places (blocks, 64), -1 for none: (blocks, 64, 64).
    rows = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)
    seen = (rows < windows.query_count)[:, :, None] & ((places >= 0) & (places < windows.key_count))[:, None]
    places = places.clamp(min=0)
    for key, first, last in zip(windows.keys, windows.least, windows.largest, strict=True):
        own = key[places][:, None]
        seen &= (own >= first[rows][:, :, None]) & (own <= last[rows][:, :, None])
    return seen


def boxes(least: Tensor, largest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The least and the largest cell of each block: (axes, blocks) each. Places past the end are in no box."""
    exists = (torch.arange(least.shape[1], device=least.device) < count).view(-1, BLOCK)
    sides = least.unflatten(1, exists.shape), largest.unflatten(1, exists.shape)
    return sides[0].where(exists, 2 * FAR - 1).amin(2), sides[1].where(exists, -2 * FAR).amax(2)


def meeting(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Pairs of boxes that meet, by the first and then by the second: (pairs,) int64 each.

    queries, keys: least and largest cell of each box, (axes, boxes) each.
    """
    device = queries[0].device
    nobody = torch.empty(0, dtype=torch.int64, device=device)
    if not queries[0].shape[1] or not keys[0].shape[1]:
        return nobody, nobody
    levels = [(queries, keys)]
    while max(queries[0].shape[1], keys[0].shape[1]) > 1:
        queries, keys = _joined(*queries), _joined(*keys)
        levels.append((queries, keys))
    query = key = torch.zeros(1, dtype=torch.int64, device=device)
    child = torch.arange(FAN, device=device)
    for queries, keys in levels[-2::-1]:
        query = (query[:, None, None] * FAN + child[:, None]).expand(-1, FAN, FAN).flatten()
        key = (key[:, None, None] * FAN + child).expand(-1, FAN, FAN).flatten()
        exist = (query < queries[0].shape[1]) & (key < keys[0].shape[1])
        query, key = query[exist], key[exist]
        meet = boxes_meet(queries, keys, query, key)
        query, key = query[meet], key[meet]
    order = (query * levels[0][1][0].shape[1] + key).argsort()
    return query[order], key[order]


def boxes_meet(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], query: Tensor, key: Tensor) -> Tensor:
    """Whether boxes of these numbers (pairs,) meet: (pairs,) bool."""
    meet = torch.ones_like(query, dtype=torch.bool)
    for query_least, query_largest, key_least, key_largest in zip(*queries, *keys, strict=True):
        meet &= (query_least[query] <= key_largest[key]) & (query_largest[query] >= key_least[key])
    return meet


def _joined(least: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    # The boxes of each FAN boxes.
    missing = -least.shape[1] % FAN
    least, largest = pad(least, (0, missing), value=2 * FAR - 1), pad(largest, (0, missing), value=-2 * FAR)
    return least.unflatten(1, (-1, FAN)).amin(2), largest.unflatten(1, (-1, FAN)).amax(2)
