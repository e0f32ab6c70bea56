"""Packed documents: which document, and which tile of it, each program takes. The device finds it, no host waits.

A document is a sequence of its own. Its chunks have the tiles that `schedule` lists, ordered by their first rows: those
that begin before the document's end come first, and a program is started for these alone. How many there are only the
device knows; the host knows a bound, and programs beyond the last tile end at once.
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
    """The tables of a pass for documents up to some length, and how many tiles a document has."""

    tables: schedule.Tables
    first: Tensor  # (count,) int64, ascending: the lowest row of a chunk at which a tile of that number begins
    bounds: list[tuple[int, int]]  # (a, b): a document of n rows has at most (a * n + b) / chunk tiles


def scheduled_length(call: Request, keys: int) -> int:
    """The length of a sequence by which a call of so many keys is scheduled; of documents a bound, of few values.

    >>> pattern = DilatedPattern((8, 100), (1, 2))
    >>> [scheduled_length(Request(pattern, cu_seqlens=torch.zeros(2), max_seqlen=n), 1000) for n in (5, 33, 65, 101)]
    [8, 64, 100, 128]
    """
    if call.cu_seqlens is None:
        return keys
    longest = max(1, min(keys, call.max_seqlen or keys))
    # Tables are made for few lengths. One segment stays one.
    return min(power_of_2(longest), *(w for w in (*call.pattern.segment_lengths, 2 * longest) if w >= longest))


@cached_for_graphs()
def tables(
    pattern: DilatedPattern, one: schedule.Pass, length: int, kv_heads: int, block: int, device: torch.device
) -> Packed:
    """The tables of one pass for documents of up to `length` rows."""
    made = schedule.tables(pattern, one, length, kv_heads, block, 0, torch.device("cpu"))
    start, classes, row, size = made.items.long().unbind(-1)
    first = made.classes[start + row % classes] + row // classes * one.stride
    first = torch.where(size > 0, first, made.chunk)  # those that fill up come last
    first, order = first.sort(dim=-1, stable=True)
    items = made.items.gather(2, order[..., None].expand(made.items.shape))
    first = first.amin((0, 1))
    # The more rows a document has, the flatter the line that bounds it best; the flattest is that of whole chunks.
    slopes = [len(first) << n for n in range(made.chunk.bit_length())]
    begun = first[first < made.chunk] + 1  # rows of the shortest documents that have one tile more
    tiles = torch.arange(1, len(begun) + 1)
    bounds = [(a, max([0, *(tiles * made.chunk - a * begun).tolist()])) for a in slopes]
    named = {"branches": made.branches, "offsets": made.offsets, "branch_ids": made.branch_ids}
    named |= {"items": items, "classes": made.classes}
    return Packed(replace(made, **{name: x.to(device) for name, x in named.items()}), first.to(device), bounds)


def places(cu_seqlens: Tensor, total: int, packed: Packed) -> Tensor:
    """(programs of a head, 5) int32: document, its first row, its length, the number of a chunk of it and of a tile.

    Programs without a tile have a length of 0.
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
    return torch.stack([each.int() for each in columns], 1)
