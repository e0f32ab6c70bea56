"""Which rows a program takes: rows that are in the same branches, so that a whole tile is in a branch or not.

Positions are cut into chunks of the smallest segment length. Within a chunk, positions of one residue modulo `stride`,
the lcm of the rates, are in the same branches; they are a class. Classes that are in the same branches are joined
to one ascending list of rows, and a tile is BLOCK rows of such a list: all but the last of a list are full whatever the
rates, and lie close together. Where the lcm outgrows the chunks, branches are split into groups, one pass each.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, lcm

import torch
from torch import Tensor

from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern

LARGEST_TABLE = 1 << 18  # classes that are looked at for one table; beyond it every class is a list of its own
TILES_TOGETHER = 256  # of several chunks, the longest first: about two for each program that a large GPU runs at a time
Members = dict[tuple[int, ...], list[int]]  # the classes of a chunk, by the branches that they are in


@dataclass(frozen=True)
class Pass:
    """One launch: some branches, and the rows that it visits."""

    branches: tuple[int, ...]  # indices of the pattern's
    chunk: int  # the rows of a tile lie in one stretch of this many positions
    stride: int  # every rate divides it; the chunk, where that is shorter
    is_aligned: bool  # whether every tile lies in one segment of each branch
    covers_all: bool  # whether it also visits rows that are in none of its branches


@dataclass(frozen=True)
class Tables:
    """What a kernel reads of a pass: int32 tensors, and their sizes.

    A tile is (start in `classes`, number of classes, first row, rows); tiles of 0 rows fill up. Row u of a list of n
    classes is at `chunk start + classes[start + u % n] + stride * (u // n)`; in the last chunk some lie past the end.
    """

    branches: Tensor  # (branches, 2): segment length and rate, at most the length of the sequence
    offsets: Tensor  # (branches, kv_heads): -1 where the head does not use the branch
    branch_ids: Tensor  # (branches,): indices in the pattern, which key the dropout bits
    items: Tensor  # (kv_heads, phases, count, 4): the tiles of a chunk; those in most branches, the longest, first
    classes: Tensor  # positions from the start of a chunk, list after list
    chunk: int  # positions of such a chunk: one of the pass, or several together
    cut: bool  # whether some tile is not full: at the end of its list, or of the sequence


@lru_cache(maxsize=1024)
def passes(pattern: DilatedPattern, length: int, block: int) -> tuple[Pass, ...]:
    """The launches of one call in tiles of `block` rows, the coarsest rates first.

    Of several, the last visits every row and writes the result.

    >>> [p.branches for p in passes(DilatedPattern((64, 4096), (1, 512)), 8192, 32)]
    [(1,), (0,)]
    """
    rates, segment_lengths = pattern.dilation_rates, pattern.segment_lengths
    first, *rest = sorted(range(len(pattern.branches)), key=lambda i: (rates[i], segment_lengths[i]))
    groups = [(first,)]
    for i in rest:
        joined = (*groups[-1], i)
        stride = lcm(*(rates[j] for j in joined))
        has_same_rows = stride == lcm(*(rates[j] for j in groups[-1]))
        if has_same_rows or stride * block <= min(length, *(segment_lengths[j] for j in joined)):
            groups[-1] = joined
        else:
            groups.append((i,))
    *further, last = reversed(groups)
    return *(pass_of(pattern, group, length) for group in further), pass_of(pattern, last, length, len(groups) > 1)


def pass_of(pattern: DilatedPattern, branches: tuple[int, ...], length: int, covers_all: bool = False) -> Pass:
    """The launch of some branches of a pattern."""
    lengths = [pattern.segment_lengths[i] for i in branches]
    chunk = max(1, min(length, *lengths))
    stride = min(chunk, lcm(*(pattern.dilation_rates[i] for i in branches)))
    is_aligned = all(w >= length or w % chunk == 0 for w in lengths)
    return Pass(branches, chunk, stride, is_aligned, covers_all)


@lru_cache(maxsize=1024)
def head_offsets(pattern: DilatedPattern, branch: int, kv_heads: int) -> tuple[int, ...]:
    """The offset of a branch for each head of k and v, -1 where the head does not use the branch."""
    used = pattern.branch_heads(branch, kv_heads)
    return tuple(pattern.offset(branch, g, kv_heads) if g in used else -1 for g in range(kv_heads))


def covers_all(pattern: DilatedPattern) -> bool:
    """Whether every row is in a branch, so that a single pass writes them all."""
    return 1 in pattern.dilation_rates and pattern.mixing == "softmax"


@cached_for_graphs()
def tables(
    pattern: DilatedPattern, one: Pass, length: int, kv_heads: int, block: int, together: int, device: torch.device
) -> Tables:
    """The tables of one pass, in tiles of `block` rows.

    A GPU begins programs in order, and would idle at the end if the last were long. So up to `together` tiles of
    several chunks stand together, the longest first: of so few chunks that the keys that their tiles share stay in the
    cache. Where all tiles are in as many branches chunks stand apart: nothing would be gained, and programs would read
    larger tables. `together` is 0 where a launch may visit a part of a sequence.
    """
    # Longer than the sequence is as good as its length, and fits 32 bits.
    used = [(min(pattern.branches[i][0], length), min(pattern.branches[i][1], length)) for i in one.branches]
    offsets = [head_offsets(pattern, i, kv_heads) for i in one.branches]
    chunks = max(1, ceil(length / one.chunk))
    # A segment begins again at residue 0 where its rate divides it; then its length does not matter.
    periods = [r if w % r == 0 or w >= length else w for w, r in used]
    phases = min(chunks, lcm(one.chunk, *periods) // one.chunk) if one.is_aligned else 1
    known = one.is_aligned and phases * one.stride <= LARGEST_TABLE

    chunks_together = 1
    if known:
        heads = list(zip(*offsets, strict=True))
        members = {  # heads with the same offsets share theirs
            head: [_members(head, used, one, phase * one.chunk) for phase in range(phases)]
            for head in dict.fromkeys(heads)
        }
        every = [each for by_phase in members.values() for each in by_phase]
        most = together // (phases * max(1, *(len(_tiles([each], one, block, [])) for each in every)))
        differ = len({len(inside) for each in every for inside in each}) > 1
        if differ and most:
            repeats = ceil(chunks / phases)
            # In equal shares: little of the last is past the end. One alone needs no whole periods.
            several = min(chunks, ceil(repeats / ceil(repeats / most)) * phases)
            chunks_together = several if several * one.stride <= LARGEST_TABLE else 1
    else:  # every head visits all rows, and each class is a list of its own
        heads = [()] * kv_heads
        members = {(): [{(c,): [c] for c in range(one.stride)}]}

    lists: list[int] = []
    tiles = {}
    for head, by_phase in members.items():
        several = [by_phase[n % phases] for n in range(chunks_together)]
        rows = [several] if chunks_together > 1 else [[each] for each in by_phase]
        tiles[head] = [_tiles(row, one, block, lists) for row in rows]
    every = [row for of_head in tiles.values() for row in of_head]
    count = max(1, *map(len, every))
    cut = bool(length % one.chunk) or any(rows < block for row in every for *_, rows in row)
    items = [[row + [(0, 1, 0, 0)] * (count - len(row)) for row in tiles[head]] for head in heads]
    data = (used, offsets, one.branches, items, lists or [0])
    made = [torch.tensor(each, dtype=torch.int32, device=device) for each in data]
    return Tables(*made, chunk=chunks_together * one.chunk, cut=cut)


def _members(head: tuple[int, ...], used: list[tuple[int, int]], one: Pass, start: int) -> Members:
    members: Members = {}
    for c in range(one.stride):
        inside = tuple(n for n, ((w, r), o) in enumerate(zip(used, head, strict=True)) if (start + c) % w % r == o)
        if inside or one.covers_all:
            members.setdefault(inside, []).append(c)
    return members


def _tiles(chunks: list[Members], one: Pass, block: int, lists: list[int]) -> list[tuple[int, int, int, int]]:
    # Tiles of the lists of some chunks, longest programs first; the lists are appended to `lists`.
    tiles = []
    for number, members in enumerate(chunks):
        for inside, classes in members.items():
            whole, rest = divmod(one.chunk, one.stride)
            rows = whole * len(classes) + sum(c < rest for c in classes)
            start = len(lists)
            lists.extend(number * one.chunk + c for c in classes)
            tiles += [(len(inside), (start, len(classes), u, min(block, rows - u))) for u in range(0, rows, block)]
    return [tile for _, tile in sorted(tiles, key=lambda t: -t[0])]
