"""Packed documents: the document and the tile of each program, computed on the device.

A document is a sequence of its own. Its chunks have the tiles that `schedule` lists, ordered by their first rows. Tiles
that begin before the document's end come first, and each of them gets a program:

    documents        |  0         |  1 |  2            |
    tiles            | 0 1 2 3 4  | 0  | 0 1 2 3 4 5   |
    program of tile    0 1 2 3 4    5    6 7 8 9 10 11    12 and 13 end at once

The number of tiles is known on the device alone. The host starts as many programs as its upper bound, and never waits.
A kernel finds the places of a launch's programs first: torch's own operators would take the host longer than all else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.attention.triton.start import Made, Start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern

COLUMNS = 5  # numbers of a place
PLACE = tl.constexpr(COLUMNS)
PROGRAMS, DOCUMENTS = 64, 128  # places that one program of `places_kernel` finds, and documents that it sees together
Launch = tuple[schedule.Pass, int]  # a pass, and the rows of its tiles
Places = Mapping[Launch, Tensor]  # of each launch's programs


class Packed(NamedTuple):
    """The tables of a pass for documents up to some length, and bounds on their number of tiles."""

    tables: schedule.Tables
    first: Tensor  # (count,) int32, ascending: the lowest row of a chunk at which a tile of that number begins
    bounds: list[tuple[int, int]]  # (a, b): a document of n rows has at most (a * n + b) / chunk tiles


def scheduled_length(call: Request, keys: int) -> int:
    """The length that tables are made for: that of k, or a bound of packed documents, which takes few values.

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
    first = first.to(device, torch.int32)
    return Packed(replace(unsorted, **{name: x.to(device) for name, x in named.items()}), first, bounds)


def program_count(cu_seqlens: Tensor, total: int, packed: Packed) -> int:
    """The programs of a head: an upper bound of the tiles of so many documents of `total` rows."""
    number_of = len(cu_seqlens) - 1
    return max(1, min(a * total + b * min(number_of, total) for a, b in packed.bounds) // packed.tables.chunk)


@triton.jit(do_not_specialize=["documents", "programs", "chunk", "count"])
def places_kernel(
    cu_seqlens, first_rows, places, documents, programs, chunk, count, PROGRAMS: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """The places of PROGRAMS programs of a launch, (programs, 5) int32; those without a tile have a length of 0.

    A place is a document, its first row, its length, the number of a chunk in it, and that of a tile in the chunk.
    """
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)  # [PROGRAMS]
    before = tl.zeros([PROGRAMS], tl.int32)  # [PROGRAMS]; documents all of whose tiles come before the program's
    begun = tl.zeros([PROGRAMS], tl.int32)  # [PROGRAMS]; the tiles of these
    end = tl.program_id(0) * 0  # of the tiles of the documents that were seen
    for document in range(0, documents, DOCUMENTS):
        number = document + tl.arange(0, DOCUMENTS)  # [DOCUMENTS]
        is_there = number < documents  # [DOCUMENTS]
        first_row = tl.load(cu_seqlens + number, mask=is_there, other=0)  # [DOCUMENTS]
        last_row = tl.load(cu_seqlens + number + 1, mask=is_there, other=0)  # [DOCUMENTS]
        tiles = _tiles_of(last_row - first_row, first_rows, chunk, count)  # [DOCUMENTS]
        ends = end + tl.cumsum(tiles, 0)  # [DOCUMENTS]
        is_over = is_there[None, :] & (ends[None, :] <= program[:, None])  # [PROGRAMS, DOCUMENTS]
        before += tl.sum(is_over.to(tl.int32), 1)  # [PROGRAMS]
        begun = tl.maximum(begun, tl.max(tl.where(is_over, ends[None, :], 0), 1))  # [PROGRAMS]
        end += tl.sum(tiles, 0)
    exists = before < documents  # [PROGRAMS]
    first_row = tl.load(cu_seqlens + before, mask=exists, other=0)  # [PROGRAMS]
    length = tl.load(cu_seqlens + before + 1, mask=exists, other=0) - first_row  # [PROGRAMS]
    tile = program - begun  # [PROGRAMS]
    place = places + program * PLACE  # [PROGRAMS]
    is_program = program < programs  # [PROGRAMS]
    tl.store(place, before, mask=is_program)
    tl.store(place + 1, first_row, mask=is_program)
    tl.store(place + 2, length, mask=is_program)
    tl.store(place + 3, tile // count, mask=is_program)
    tl.store(place + 4, tile % count, mask=is_program)


@triton.jit
def _tiles_of(length, first_rows, chunk, count):
    """Number of tiles of documents of these lengths: those that begin before the document's end."""
    rest = length % chunk  # [DOCUMENTS]
    low = length * 0  # [DOCUMENTS]
    high = low + count  # [DOCUMENTS]
    left = count
    while left > 0:  # by halves, among ascending rows
        middle = (low + high) // 2  # [DOCUMENTS]
        is_open = low < high  # [DOCUMENTS]
        is_before = is_open & (tl.load(first_rows + middle, mask=is_open, other=0) < rest)  # [DOCUMENTS]
        low = tl.where(is_before, middle + 1, low)  # [DOCUMENTS]
        high = tl.where(is_before, high, middle)  # [DOCUMENTS]
        left = left // 2
    return length // chunk * count + low


class Documents:
    """The places of the programs of a call's launches."""

    def __init__(self, call: Request, k: Tensor, launches: Iterable[Launch]):
        self._cu_seqlens, length = call.cu_seqlens, scheduled_length(call, k.shape[1])
        self._packed = {
            (one, block): tables(call.pattern, one, length, k.shape[2], block, k.device) for one, block in launches
        }
        self._different = list({id(each): each for each in self._packed.values()}.values())
        rows = [program_count(call.cu_seqlens, k.shape[1], each) for each in self._different]
        self.made = tuple(Made((count, COLUMNS), torch.int32) for count in rows)

    def found(self, made: Sequence[Tensor]) -> tuple[list[Start], Places]:
        """The starts that find the places, given the tensors `made`; and the places of each launch."""
        by_tables = {id(each): places for each, places in zip(self._different, made, strict=True)}
        starts = [places_start(self._cu_seqlens, *both) for both in zip(self._different, made, strict=True)]
        return starts, {launch: by_tables[id(each)] for launch, each in self._packed.items()}


def places_start(cu_seqlens: Tensor, packed: Packed, places: Tensor) -> Start:
    """The start of a kernel that fills the places of a launch's programs."""
    count = len(places)
    sizes = len(cu_seqlens) - 1, count, packed.tables.chunk, len(packed.first)
    named = {"PROGRAMS": PROGRAMS, "DOCUMENTS": DOCUMENTS, "num_warps": 4}
    return Start(places_kernel, (-(-count // PROGRAMS),), (cu_seqlens, packed.first, places, *sizes), named)
