"""Rows of each program: a whole tile is in a branch or not, since its rows are in the same branches.

Positions are cut into chunks of the smallest segment length. Positions of a chunk that are equal modulo `stride`, the
lcm of the rates, are a class: they are in the same branches. Classes that are in the same branches form one ascending
list of rows. A tile is `block` rows of a list. Two branches (12, 2) and (24, 3), chunk 12, stride 6, blocks of 3 rows:

    position       0  1  2  3  4  5  6  7  8  9 10 11 | 12 ...
    class          0  1  2  3  4  5  0  1  2  3  4  5
    branch 12, 2   x     x     x     x     x     x
    branch 24, 3   x        x        x        x

    list           in both: 0 6      in the first: 2 4 8 10       in the second: 3 9
    its classes    0                 2 4                          3
    tiles          0 6               2 4 8 | 10                   3 9

Every tile of a list but its last is full, whatever the rates are, and its rows lie close together. Where the lcm
outgrows the chunks, branches are split into groups, and each group is a pass of its own.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, lcm

import torch
from torch import Tensor

from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.dilated import DilatedPattern

# A short call takes its host longer than its device, so that one launch for all its branches stands before several.
# Bounds by reckoning: at 50 TFLOP/s a backward of 2^22 pairs of 64 columns, seven products, takes 75 us.
SHORT_ROWS, SHORT_TILES, SHORT_PAIRS = 1024, 512, 1 << 22  # rows of a sequence; tiles and pairs of the whole call
SHORT_BLOCK = 64  # rows of the tiles that are counted
LARGEST_TABLE = 1 << 18  # classes of one table; beyond it every class is a list of its own
TILES_TOGETHER = 256  # tiles of several chunks in one order: about two for each program that a large GPU runs at a time
Members = dict[tuple[int, ...], list[int]]  # the classes of a chunk, by the branches that they are in


@dataclass(frozen=True)
class Pass:
    """One launch: some branches, and the rows of its tiles."""

    branches: tuple[int, ...]  # indices of the pattern's
    chunk: int  # positions of a chunk; the rows of a tile lie in one chunk
    stride: int  # lcm of the rates, or the chunk where that is shorter
    is_aligned: bool  # whether every tile lies in one segment of each branch
    covers_all: bool  # whether rows that are in none of its branches have tiles too


@dataclass(frozen=True)
class Tables:
    """Tables of a pass that its kernel reads: int32 tensors, and their sizes.

    A tile is (start in `classes`, number of classes, first row, rows); tiles of 0 rows fill up. Row u of a list of n
    classes is at `chunk start + classes[start + u % n] + stride * (u // n)`. Some rows of the last chunk lie past the
    end.
    """

    branches: Tensor  # (branches, 2): segment length and rate, each at most the length of the sequence
    offsets: Tensor  # (branches, kv_heads): -1 where the head does not use the branch
    branch_ids: Tensor  # (branches,): indices in the pattern; dropout bits depend on them
    items: Tensor  # (kv_heads, phases, count, 4): the tiles of a chunk; tiles in most branches, the longest, come first
    classes: Tensor  # positions from the start of a chunk, list after list
    chunk: int  # positions of a chunk of the table: one chunk of the pass, or several together
    cut: bool  # whether some tile is not full, at the end of its list or of the sequence


@lru_cache(maxsize=1024)
def passes(pattern: DilatedPattern, length: int, block: int) -> tuple[Pass, ...]:
    """The launches of one call in tiles of `block` rows, the coarsest rates first.

    The last of several launches visits every row and writes the result.

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


@lru_cache(maxsize=1024)
def is_short(pattern: DilatedPattern, length: int, heads: int) -> bool:
    """Whether `whole_pass` serves a call of up to SHORT_ROWS rows. heads: of q, in all sequences.

    >>> [is_short(DilatedPattern((64, 256), (1, 2)), 256, heads) for heads in (8, 128)]
    [True, False]
    """
    one = whole_pass(pattern, length)
    tiles = ceil(length / one.chunk) * one.stride * ceil(one.chunk / one.stride / SHORT_BLOCK)  # or fewer
    pairs = sum(length * ceil(min(w, length) / r) // r for w, r in pattern.branches)
    return heads * tiles <= SHORT_TILES and heads * pairs <= SHORT_PAIRS


@lru_cache(maxsize=1024)
def whole_pass(pattern: DilatedPattern, length: int) -> Pass:
    """One launch of all branches, whose tiles need not be full.

    >>> whole_pass(DilatedPattern((64, 4096), (1, 512)), 1024).branches
    (0, 1)
    """
    return pass_of(pattern, tuple(range(len(pattern.branches))), length)


def pass_of(pattern: DilatedPattern, branches: tuple[int, ...], length: int, covers_all: bool = False) -> Pass:
    """The launch of these branches of a pattern."""
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


@lru_cache(maxsize=1024)
def covers_all(pattern: DilatedPattern) -> bool:
    """Whether every row is in a branch, so that a single pass writes all rows."""
    return 1 in pattern.dilation_rates and pattern.mixing == "softmax"


@cached_for_graphs()
def tables(
    pattern: DilatedPattern, branch_pass: Pass, length: int, kv_heads: int, block: int, together: int,
    device: torch.device,
) -> Tables:  # fmt: skip
    """The tables of one pass, in tiles of `block` rows.

    A GPU begins programs in order, and idles at the end if the last are long. So tiles of several chunks stand in one
    order, the longest first. At most `together` tiles do: the keys that they share then stay in the cache. Chunks stand
    apart where all tiles are in equally many branches, since an order gains nothing and larger tables cost reads.
    `together` is 0 where a launch may visit a part of a sequence.

    >>> pattern = DilatedPattern((12, 24), (2, 3), offsets="zero")
    >>> example = tables(pattern, pass_of(pattern, (0, 1), 12), 12, 1, 3, 0, torch.device("cpu"))
    >>> example.classes.tolist(), example.items.tolist()
    ([0, 2, 4, 3], [[[[0, 1, 0, 2], [1, 2, 0, 3], [1, 2, 3, 1], [3, 1, 0, 2]]]])
    """
    # A segment longer than the sequence is as good as its length, and fits 32 bits.
    branches = [(min(w, length), min(r, length)) for w, r in (pattern.branches[i] for i in branch_pass.branches)]
    offsets = [head_offsets(pattern, i, kv_heads) for i in branch_pass.branches]
    chunks = max(1, ceil(length / branch_pass.chunk))
    phases = _phases(branches, branch_pass, length, chunks)
    if branch_pass.is_aligned and phases * branch_pass.stride <= LARGEST_TABLE:
        heads = list(zip(*offsets, strict=True))
        members = {  # heads with the same offsets share them
            head: [_members(head, branches, branch_pass, phase * branch_pass.chunk) for phase in range(phases)]
            for head in dict.fromkeys(heads)
        }
        all_phases = [phase for by_phase in members.values() for phase in by_phase]
        chunks_together = _chunks_together(all_phases, branch_pass, chunks, phases, block, together)
    else:  # every head visits all rows, and each class is a list of its own
        heads = [()] * kv_heads
        members = {(): [{(c,): [c] for c in range(branch_pass.stride)}]}
        chunks_together = 1

    lists: list[int] = []
    tiles = {}
    for head, by_phase in members.items():
        if chunks_together > 1:
            rows = [[by_phase[n % phases] for n in range(chunks_together)]]
        else:
            rows = [[phase] for phase in by_phase]
        tiles[head] = [_tiles(row, branch_pass, block, lists) for row in rows]
    all_rows = [row for by_phase in tiles.values() for row in by_phase]
    count = max(1, *map(len, all_rows))
    cut = bool(length % branch_pass.chunk) or any(rows < block for row in all_rows for *_, rows in row)
    items = [[row + [(0, 1, 0, 0)] * (count - len(row)) for row in tiles[head]] for head in heads]
    numbers = (branches, offsets, branch_pass.branches, items, lists or [0])
    tensors = [torch.tensor(table, dtype=torch.int32, device=device) for table in numbers]
    return Tables(*tensors, chunk=chunks_together * branch_pass.chunk, cut=cut)


def _phases(branches: list[tuple[int, int]], branch_pass: Pass, length: int, chunks: int) -> int:
    # Number of chunks after which classes are in the same branches again.
    if not branch_pass.is_aligned:
        return 1
    # Residues go on across segments whose length their rate divides: the period is the rate, not the segment.
    periods = [r if w % r == 0 or w >= length else w for w, r in branches]
    return min(chunks, lcm(branch_pass.chunk, *periods) // branch_pass.chunk)


def _chunks_together(
    all_phases: list[Members], branch_pass: Pass, chunks: int, phases: int, block: int, together: int
) -> int:
    # Number of chunks whose tiles stand in one order: at most `together` tiles.
    longest = max(1, *(len(_tiles([members], branch_pass, block, [])) for members in all_phases))
    periods_together = together // (phases * longest)
    differ = len({len(inside) for members in all_phases for inside in members}) > 1
    if not differ or not periods_together:
        return 1
    periods = ceil(chunks / phases)
    # Equal shares leave little of the last one past the end. A single share needs no whole periods.
    share = ceil(periods / ceil(periods / periods_together))
    several = min(chunks, share * phases)
    return several if several * branch_pass.stride <= LARGEST_TABLE else 1


def _members(head: tuple[int, ...], branches: list[tuple[int, int]], branch_pass: Pass, start: int) -> Members:
    # The lists of a chunk at `start`, for a head with these offsets.
    members: Members = {}
    rules = [(w, r, o) for (w, r), o in zip(branches, head, strict=True)]
    for c in range(branch_pass.stride):
        inside = tuple(n for n, (w, r, o) in enumerate(rules) if (start + c) % w % r == o)
        if inside or branch_pass.covers_all:
            members.setdefault(inside, []).append(c)
    return members


def _tiles(
    chunks: list[Members], branch_pass: Pass, block: int, lists: list[int]
) -> list[tuple[int, int, int, int]]:  # fmt: skip
    # Tiles of the lists of some chunks, longest programs first; the lists are appended to `lists`.
    tiles = []
    for number, members in enumerate(chunks):
        for inside, classes in members.items():
            turns, rest = divmod(branch_pass.chunk, branch_pass.stride)
            rows = turns * len(classes) + sum(c < rest for c in classes)
            start = len(lists)
            lists.extend(number * branch_pass.chunk + c for c in classes)
            tiles += [(len(inside), (start, len(classes), u, min(block, rows - u))) for u in range(0, rows, block)]
    return [tile for _, tile in sorted(tiles, key=lambda t: -t[0])]
