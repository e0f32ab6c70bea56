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
from hilbert_lib.pattern import DilatedPattern

LARGEST_TABLE = 1 << 18  # classes that are looked at for one table; beyond it every class is a list of its own
TILES_TOGETHER = 256  # of several chunks, the longest first: about two for each program that a large GPU runs at a time


@dataclass(frozen=True)
class Pass:
    """One launch: some branches, and the rows that it visits.

    Attributes:
        branches: indices of the pattern's branches.
        chunk: rows of one tile lie in one stretch of this many positions.
        stride: every rate divides it; the chunk, where that is shorter.
        segment_lengths: of the branches; one that ends past the sequence ends with its last chunk.
        covers_all: whether it also visits rows that are in none of its branches.
    """

    branches: tuple[int, ...]
    chunk: int
    stride: int
    segment_lengths: tuple[int, ...]
    covers_all: bool

    @property
    def is_aligned(self) -> bool:
        """Whether every tile lies in one segment of each branch."""
        return all(w % self.chunk == 0 for w in self.segment_lengths)


@dataclass(frozen=True)
class Tables:
    """What a kernel reads of a pass: int32 tensors, and their sizes.

    Attributes:
        branches: (branches, 2), segment length and rate, at most the length of the sequence.
        offsets: (branches, kv_heads), -1 where the head does not use the branch.
        branch_ids: (branches,), indices in the pattern, which key the dropout bits.
        items: (kv_heads, phases, count, 4), the tiles of a chunk, those in most branches, the longest, first. A tile is
            (start in `classes`, number of classes, first row, rows); rows 0 fills up. Row u of a list of n classes is
            at `chunk start + classes[start + u % n] + stride * (u // n)`; of the last chunk some lie past the end.
        classes: positions from the start of a chunk, list after list.
        chunk: positions of such a chunk: one of the pass, or several together.
        cut: whether some tile is not full: the end of its list, or of the sequence.
    """

    branches: Tensor
    offsets: Tensor
    branch_ids: Tensor
    items: Tensor
    classes: Tensor
    chunk: int
    cut: bool


@lru_cache(maxsize=1024)
def passes(pattern: DilatedPattern, length: int, block: int) -> tuple[Pass, ...]:
    """The launches of one call, the coarsest rates first. Of several, the last visits every row and writes the result.

    Args:
        pattern: the pattern.
        length: tokens.
        block: rows of a tile.

    >>> [p.branches for p in passes(DilatedPattern((64, 4096), (1, 512)), 8192, 32)]
    [(1,), (0,)]
    """
    order = sorted(range(len(pattern.branches)), key=lambda i: (pattern.dilation_rates[i], pattern.segment_lengths[i]))
    groups: list[list[int]] = []
    for i in order:
        joined = [*groups[-1], i] if groups else [i]
        stride = lcm(*(pattern.dilation_rates[j] for j in joined))
        shortest = min(length, *(pattern.segment_lengths[j] for j in joined))
        same_rows = groups and stride == lcm(*(pattern.dilation_rates[j] for j in groups[-1]))
        if same_rows or (groups and stride * block <= shortest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return tuple(
        pass_of(pattern, tuple(group), length, covers_all=number == 0 and len(groups) > 1)
        for number, group in reversed(list(enumerate(groups)))
    )


def pass_of(pattern: DilatedPattern, branches: tuple[int, ...], length: int, covers_all: bool = False) -> Pass:
    """The launch of some branches of a pattern.

    Args:
        pattern: the pattern.
        branches: indices of its branches.
        length: tokens.
        covers_all: as in `Pass`.

    >>> pass_of(DilatedPattern((64, 128), (1, 2)), (1,), 256).chunk
    128
    """
    lengths = [pattern.segment_lengths[i] for i in branches]
    chunk = max(1, min(length, *lengths))
    end = max(1, ceil(length / chunk)) * chunk
    return Pass(
        branches=branches,
        chunk=chunk,
        stride=min(chunk, lcm(*(pattern.dilation_rates[i] for i in branches))),
        segment_lengths=tuple(end if w >= length else w for w in lengths),
        covers_all=covers_all,
    )


@lru_cache(maxsize=1024)
def head_offsets(pattern: DilatedPattern, branch: int, kv_heads: int) -> tuple[int, ...]:
    """The offset of a branch for each head of k and v, -1 where the head does not use the branch.

    >>> head_offsets(DilatedPattern((4, 8), (1, 2)), 1, 3)
    (0, 1, 0)
    """
    used = pattern.branch_heads(branch, kv_heads)
    return tuple(pattern.offset(branch, g, kv_heads) if g in used else -1 for g in range(kv_heads))


def covers_all(pattern: DilatedPattern) -> bool:
    """Whether every row is in a branch for sure, so that a single pass writes them all."""
    return 1 in pattern.dilation_rates and pattern.mixing == "softmax"


@cached_for_graphs()
def tables(
    pattern: DilatedPattern, one: Pass, length: int, kv_heads: int, block: int, together: int, device: torch.device
) -> Tables:
    """The tables of one pass.

    A GPU begins programs in their order. If the longest ones of the last chunk begin when most of its multiprocessors
    have nothing left, these wait. So the tiles of several chunks stand together, and those that are begun last are
    short; of so few chunks that the keys that their tiles share stay in the cache. Where all are in as many branches,
    chunks stand apart: nothing would be gained, and programs would read larger tables.

    Args:
        pattern: the pattern.
        one: one of its passes.
        length: tokens.
        kv_heads: heads of k and v.
        block: rows of a tile.
        together: tiles of several chunks that may stand together; 0 where a launch may visit a part of a sequence.
        device: where the tensors go.
    """
    # Longer than the sequence is as good as its length, and fits 32 bits.
    used = [(min(pattern.branches[i][0], length), min(pattern.branches[i][1], length)) for i in one.branches]
    offsets = [head_offsets(pattern, i, kv_heads) for i in one.branches]
    chunks = max(1, ceil(length / one.chunk))
    # A segment begins again at residue 0 where its rate divides it; then its length does not matter.
    periods = [r if w % r == 0 or w >= length else w for w, r in used]
    phases = min(chunks, lcm(one.chunk, *periods) // one.chunk) if one.is_aligned else 1
    known = one.is_aligned and phases * one.stride <= LARGEST_TABLE

    # Of heads with the same offsets one is looked at.
    heads = list(zip(*offsets, strict=True)) if known else [(0,) * len(used)]
    members = {
        head: [_members(head, used, one, phase if known else None) for phase in range(phases if known else 1)]
        for head in dict.fromkeys(heads)
    }
    tiles = max(1, *(len(_tiles([each], one, block, [])) for by_phase in members.values() for each in by_phase))
    chunks_together, most = 1, together // (phases * tiles)
    differ = len({len(inside) for by_phase in members.values() for each in by_phase for inside in each}) > 1
    if known and differ and most:
        repeats = ceil(chunks / phases)
        # In equal shares: of the last, little is past the end. One alone needs no whole periods.
        chunks_together = min(chunks, ceil(repeats / ceil(repeats / most)) * phases)
    if chunks_together * one.stride > LARGEST_TABLE:
        chunks_together = 1
    lists: list[int] = []
    of_head = {}
    for head, by_phase in members.items():
        several = [by_phase[n % phases] for n in range(chunks_together)]
        rows = [several] if chunks_together > 1 else [[each] for each in by_phase]
        of_head[head] = [_tiles(row, one, block, lists) for row in rows]
    items = [of_head[head] for head in heads]
    cut = bool(length % one.chunk) or any(0 < rows < block for head in items for row in head for *_, rows in row)
    most = max(1, *(len(row) for head in items for row in head))
    items = [[row + [(0, 1, 0, 0)] * (most - len(row)) for row in head] for head in items]
    if not known:
        items *= kv_heads  # of an unknown class, every head visits all rows
    data = (used, offsets, one.branches, items, lists or [0])
    made = [torch.tensor(each, dtype=torch.int32, device=device) for each in data]
    return Tables(*made, chunk=chunks_together * one.chunk, cut=cut)


def _members(
    head: tuple[int, ...], used: list[tuple[int, int]], one: Pass, phase: int | None
) -> dict[tuple[int, ...], list[int]]:
    # The classes of a chunk by the branches that they are in; None of a chunk of which that is not known.
    members: dict[tuple[int, ...], list[int]] = {}
    for c in range(min(one.stride, one.chunk)):
        if phase is None:
            members[(c,)] = [c]
            continue
        position = phase * one.chunk + c
        inside = tuple(n for n, ((w, r), o) in enumerate(zip(used, head, strict=True)) if position % w % r == o)
        if inside or one.covers_all:
            members.setdefault(inside, []).append(c)
    return members


def _tiles(
    chunks: list[dict[tuple[int, ...], list[int]]], one: Pass, block: int, lists: list[int]
) -> list[tuple[int, int, int, int]]:
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
