"""Packed documents: the document and the tile of each program, computed on the device.

A document is a sequence of its own. Its chunks have the tiles that `schedule` lists, ordered by their first rows. Tiles
that begin before the document's end come first, and each of them gets a program:

    documents        |  0         |  1 |  2            |
    tiles            | 0 1 2 3 4  | 0  | 0 1 2 3 4 5   |
    program of tile    0 1 2 3 4    5    6 7 8 9 10 11    12 and 13 end at once

The number of tiles is known on the device alone. The host starts as many programs as its upper bound, and never waits.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern


class Packed(NamedTuple):
    """The tables of a pass for documents up to some length, and bounds on their number of tiles."""

    tables: schedule.Tables
    first: Tensor  # (count,) int64, ascending: the lowest row of a chunk at which a tile of that number begins
    bounds: list[tuple[int, int]]  # (a, b): a document of n rows has at most (a * n + b) / chunk tiles


def scheduled_length(call: Request, keys: int) -> int:
    """The length of the sequence that tables are made for: that of k or, of packed documents, a bound of few values.

    >>> pattern = DilatedPattern((8, 100), (1, 2))
    >>> [scheduled_length(Request(pattern, cu_seqlens=torch.zeros(2), max_seqlen=n), 1000) for n in (5, 33, 65, 101)]
    [8, 64, 100, 128]
    """
    if call.cu_seqlens is None:
        return keys
    longest = max(1, min(keys, call.max_seqlen or keys))
    # Few lengths need few tables. A document that fits into one segment stays within it.
    return min(power_of_2(longest), *(w for w in (*call.pattern.segment_lengths, 2 * longest) if w >= longest))


@cached_for_graphs()
def tables(
    pattern: DilatedPattern, branch_pass: schedule.Pass, length: int, kv_heads: int, block: int, device: torch.device
) -> Packed:
    """The tables of one pass for documents of up to `length` rows."""
    unsorted = schedule.tables(pattern, branch_pass, length, kv_heads, block, 0, torch.device("cpu"))
    start, classes, row, size = unsorted.items.long().unbind(-1)
    first = unsorted.classes[start + row % classes] + row // classes * branch_pass.stride
    first = torch.where(size > 0, first, unsorted.chunk)  # tiles of 0 rows come last
    first, order = first.sort(dim=-1, stable=True)
    items = unsorted.items.gather(2, order[..., None].expand(unsorted.items.shape))
    first = first.amin((0, 1))
    # Lines a * n + b lie above the tiles of a document of n rows. The flattest, whose slope is that of whole chunks,
    # bounds long documents best.
    slopes = [len(first) << n for n in range(unsorted.chunk.bit_length())]
    begun = first[first < unsorted.chunk] + 1  # rows of the shortest document with 1, 2, ... tiles
    tiles = torch.arange(1, len(begun) + 1)
    bounds = [(a, max([0, *(tiles * unsorted.chunk - a * begun).tolist()])) for a in slopes]
    named = {"branches": unsorted.branches, "offsets": unsorted.offsets, "branch_ids": unsorted.branch_ids}
    named |= {"items": items, "classes": unsorted.classes}
    return Packed(replace(unsorted, **{name: x.to(device) for name, x in named.items()}), first.to(device), bounds)


def places(cu_seqlens: Tensor, total: int, packed: Packed) -> Tensor:
    """(programs of a head, 5) int32: document, its first row, its length, number of the chunk, number of the tile.

    A program without a tile has a length of 0.
    """
    chunk, count = packed.tables.chunk, len(packed.first)
    lengths, number_of = cu_seqlens.long().diff(), len(cu_seqlens) - 1
    tiles = lengths // chunk * count + torch.searchsorted(packed.first, lengths % chunk)
    ends = tiles.cumsum(0)
    programs = max(1, min(a * total + b * min(number_of, total) for a, b in packed.bounds) // chunk)
    program = torch.arange(programs, device=cu_seqlens.device)
    document = torch.searchsorted(ends, program, right=True)
    exists = document < number_of
    document = document.clamp(max=number_of - 1)
    tile = program - (ends - tiles)[document]
    columns = document, cu_seqlens[document], torch.where(exists, lengths[document], 0), tile // count, tile % count
    return torch.stack([column.int() for column in columns], 1)
