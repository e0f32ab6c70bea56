"""Division of branches among launches of the warp-specialised kernels, so that tiles are full and short.

Branches that share a launch make more lists of rows (`schedule`). Each list may end with a tile that is not full. The
rows of a tile lie farther apart, so that causality cuts off less. A launch of their own reads the queries again and
merges its results.
"""

from functools import lru_cache
from math import ceil

import numpy as np
import torch

from hilbert_lib.attention.triton import schedule
from hilbert_lib.patterns.dilated import DilatedPattern

BLOCK = 128  # rows of a tile, and keys of a block
BRANCHES = 6  # most branches of one launch: the kernels take so many descriptors
# Costs in blocks of scores, of a tile besides its blocks and of a launch, at whose end multiprocessors wait. The chosen
# division took at most 2.4 % longer than the fastest one timed on an H200 (reports/HISTORY.md).
TILE, LAUNCH = 5, 750
NARROW = 128  # the largest head_dim of the kernel that sums dq beside dk and dv; wider heads have two kernels
LAUNCHES = 8  # most launches of these kernels in one call: each rounds the results of its rows once more
CLASSES = 4096  # most residues for which tiles are counted; with more, which would take seconds, launches are fewest
CHUNKS, HEADS = 64, 16  # most chunks and heads whose tiles are counted
GOLDEN = (5**0.5 - 1) / 2


@lru_cache(maxsize=1024)
def launches(
    pattern: DilatedPattern, length: int, kv_heads: int, is_causal: bool, without: int | None = None,
    reached: tuple[int, ...] | None = None,
) -> tuple[tuple[schedule.Pass, ...], tuple[schedule.Pass, ...]]:  # fmt: skip
    """The launches of one call: of the warp-specialised kernels, and of the plain ones for the other branches.

    The finest rates come first. A launch changes the rows of its branches and nothing else. The choice counts the work
    of one sequence with as many heads of q as of k: so the bits of a sequence do not depend on the batch. without: a
    branch that other kernels compute. reached: the branches whose rows TMA can load, where `length` does not
    tell: of packed documents the rows of all do.

    >>> pattern = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    >>> [launch.branches for launch in launches(pattern, 65536, 16, False)[0]]
    [(0, 1, 2), (3, 4)]
    """
    if reached is None:
        reached = tuple(i for i, branch in enumerate(pattern.branches) if is_reached(*branch, length))
    hopper, plain = [], []
    for whole_pass in reversed(schedule.passes(pattern, length, BLOCK)):
        own = tuple(i for i in whole_pass.branches if i != without)
        within = tuple(i for i in own if i in reached)
        parts = _divided(pattern, within, length, kv_heads, is_causal)[: LAUNCHES - len(hopper)] if within else []
        hopper += parts
        served = {i for part in parts for i in part.branches}
        if left := tuple(i for i in own if i not in served):
            plain.append(schedule.pass_of(pattern, left, length))
    if not plain and len(hopper) > 1 and (one := _in_one_launch(pattern, tuple(hopper), length, kv_heads, is_causal)):
        hopper = [one]
    return tuple(hopper), tuple(plain)


def _in_one_launch(
    pattern: DilatedPattern, launches: tuple[schedule.Pass, ...], length: int, kv_heads: int, is_causal: bool
) -> schedule.Pass | None:
    # One launch of all branches of a short call, whose launches take longer than its tiles, where that is less work.
    branches = tuple(i for each in launches for i in each.branches)
    one = schedule.pass_of(pattern, branches, length)
    if len(branches) > BRANCHES or not one.is_aligned or max(each.stride for each in (one, *launches)) > CLASSES:
        return None
    work, *several = (_work(pattern, each, length, kv_heads, is_causal) for each in (one, *launches))
    return one if max(several) < 2 * LAUNCH and work < sum(several) else None


def each_alone(pattern: DilatedPattern, passes: tuple[schedule.Pass, ...], length: int) -> tuple[schedule.Pass, ...]:
    """The launches of these passes' branches one by one: then the rows of a tile are neighbours in their branch.

    >>> pattern = DilatedPattern((2048, 4096), (1, 2))
    >>> [launch.stride for launch in each_alone(pattern, launches(pattern, 4096, 2, False)[0], 4096)]
    [1, 2]
    """
    return tuple(schedule.pass_of(pattern, (i,), length) for each in passes for i in each.branches)


def is_reached(segment_length: int, rate: int, length: int) -> bool:
    """Whether the copy engine reaches all rows of a branch.

    It reads rows past the last multiple of the rate from the row before. Segment 0 may have no such row.

    >>> is_reached(32768, 12, 65536), is_reached(32768, 12, 32768)
    (True, False)
    """
    return min(segment_length, length) <= length // rate * rate


def _divided(
    pattern: DilatedPattern, branches: tuple[int, ...], length: int, kv_heads: int, is_causal: bool
) -> list[schedule.Pass]:
    # The launches of least work for branches that could share a pass, by dynamic programming.
    if len(branches) == 1:
        return [schedule.pass_of(pattern, branches, length)]
    is_counted = schedule.pass_of(pattern, branches, length).stride <= CLASSES
    # best[n]: cost and launches of the cheapest division of the first n branches. A branch may always stand alone.
    best: list[tuple[float, list[schedule.Pass]]] = [(0.0, [])]
    for end in range(1, len(branches) + 1):
        ways = []
        for begin in range(max(0, end - BRANCHES), end):
            part = schedule.pass_of(pattern, branches[begin:end], length)
            if part.is_aligned:
                work = _work(pattern, part, length, kv_heads, is_causal) if is_counted else LAUNCH
                ways.append((best[begin][0] + work, [*best[begin][1], part]))
        best.append(min(ways, key=lambda way: way[0]))
    return best[-1][1]


def _work(pattern: DilatedPattern, branch_pass: schedule.Pass, length: int, kv_heads: int, is_causal: bool) -> float:
    # The work of one launch in blocks of scores. The cache of tables is for calls: these stay out of it.
    tables = schedule.tables.__wrapped__(pattern, branch_pass, length, kv_heads, BLOCK, 0, torch.device("cpu"))
    branches, offsets, items, classes = (
        x.numpy() for x in (tables.branches, tables.offsets, tables.items, tables.classes)
    )
    chunks = ceil(length / branch_pass.chunk)
    sampled_chunks, sampled_heads = _sample(chunks, CHUNKS), _sample(kv_heads, HEADS)
    head = sampled_heads[:, None, None]
    item = items[head, sampled_chunks[:, None] % items.shape[1], np.arange(items.shape[2])]
    chunk_start = sampled_chunks[:, None] * branch_pass.chunk
    members, n, u, size = (item[..., i] for i in range(4))

    def position(row):
        return chunk_start + classes[members + row % n] + row // n * branch_pass.stride

    first = position(u)
    last = np.minimum(position(u + np.maximum(size, 1) - 1), np.minimum(chunk_start + branch_pass.chunk, length) - 1)
    exists = (size > 0) & (first <= last)
    blocks = np.zeros(exists.shape)
    for (w, r), offset in zip(branches, offsets, strict=True):
        o = offset[head]
        start = first // w * w
        keys = np.maximum(0, (np.minimum(w, length - start) - o + r - 1) // r)
        if is_causal:
            keys = np.minimum(keys, (last - start - o + r) // r)
        inside = exists & (o >= 0) & ((first - start) % r == o)
        blocks += np.where(inside, -(-keys // BLOCK), 0)
    work = np.sum(blocks + TILE * (blocks > 0))
    return work * (chunks / len(sampled_chunks)) * (kv_heads / len(sampled_heads)) + LAUNCH


def _sample(count: int, limit: int) -> np.ndarray:
    # All numbers below count, or `limit` of them, spread evenly. Equal steps could be those of segments.
    if count <= limit:
        return np.arange(count)
    return np.unique((np.arange(limit) * GOLDEN % 1 * count).astype(int))
