"""How branches are divided among launches of the warp-specialised kernels, so that their tiles are full and short.

Branches that share a launch make more lists of rows: each may end with a tile that is not full, and the rows of a tile
lie farther apart, so that causality cuts off less. A further launch reads its queries again and merges its results.
"""

from functools import lru_cache
from math import ceil

import numpy as np
import torch

from hilbert_lib.attention.triton import schedule
from hilbert_lib.patterns.dilated import DilatedPattern

BLOCK = 128  # rows of a tile, and keys of a block
BRANCHES = 6  # of one launch: those for which the kernels have descriptors
# In blocks of scores: what a tile takes besides its own, and a further launch, at whose end multiprocessors wait. What
# they choose took at most 2.4 % longer than the fastest division timed on an H200 (reports/HISTORY.md).
TILE, LAUNCH = 5, 750
LAUNCHES = 8  # of these kernels in one call: each rounds the results of its rows once more
CLASSES = 4096  # residues up to which tiles are counted, since more would take seconds: then the fewest launches
CHUNKS, HEADS = 64, 16  # of which tiles are counted, where there are more
GOLDEN = (5**0.5 - 1) / 2


@lru_cache(maxsize=1024)
def launches(
    pattern: DilatedPattern, length: int, kv_heads: int, is_causal: bool
) -> tuple[tuple[schedule.Pass, ...], tuple[schedule.Pass, ...]]:
    """The launches of one call: those of the warp-specialised kernels, and those of the plain ones for what is left.

    The finest rates come first. A launch changes the rows of its branches and nothing else. The choice counts one
    sequence, with as many heads of q as of k, so that a sequence's bits do not depend on others in the batch.

    >>> pattern = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
    >>> [one.branches for one in launches(pattern, 65536, 16, False)[0]]
    [(0, 1, 2), (3, 4)]
    """
    ours, theirs = [], []
    for one in reversed(schedule.passes(pattern, length, BLOCK)):
        within = tuple(i for i in one.branches if is_reached(*pattern.branches[i], length))
        parts = _divided(pattern, within, length, kv_heads, is_causal)[: LAUNCHES - len(ours)] if within else []
        ours += parts
        served = {i for part in parts for i in part.branches}
        if left := tuple(i for i in one.branches if i not in served):
            theirs.append(schedule.pass_of(pattern, left, length))
    return tuple(ours), tuple(theirs)


def is_reached(segment_length: int, rate: int, length: int) -> bool:
    """Whether the copy engine reaches all rows of a branch.

    It finds rows past the last multiple of the rate from the row before, which segment 0 may not have.

    >>> is_reached(32768, 12, 65536), is_reached(32768, 12, 32768)
    (True, False)
    """
    return min(segment_length, length) <= length // rate * rate


def _divided(
    pattern: DilatedPattern, branches: tuple[int, ...], length: int, kv_heads: int, is_causal: bool
) -> list[schedule.Pass]:
    # The launches of least work for branches that could share a pass, found by dynamic programming.
    if len(branches) == 1:
        return [schedule.pass_of(pattern, branches, length)]
    is_counted = schedule.pass_of(pattern, branches, length).stride <= CLASSES
    # The cost and the launches of the cheapest way for the first n branches. One branch alone is always a choice.
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


def _work(pattern: DilatedPattern, one: schedule.Pass, length: int, kv_heads: int, is_causal: bool) -> float:
    # The work of one launch in blocks of scores. Its tables are not kept with those of calls.
    tables = schedule.tables.__wrapped__(pattern, one, length, kv_heads, BLOCK, 0, torch.device("cpu"))
    branches, offsets, items, classes = (
        x.numpy() for x in (tables.branches, tables.offsets, tables.items, tables.classes)
    )
    chunks = ceil(length / one.chunk)
    some_chunks, some_heads = _some(chunks, CHUNKS), _some(kv_heads, HEADS)
    head = some_heads[:, None, None]
    item = items[head, some_chunks[:, None] % items.shape[1], np.arange(items.shape[2])]
    chunk_start = some_chunks[:, None] * one.chunk
    members, n, u, size = (item[..., i] for i in range(4))

    def position(row):
        return chunk_start + classes[members + row % n] + row // n * one.stride

    first = position(u)
    last = np.minimum(position(u + np.maximum(size, 1) - 1), np.minimum(chunk_start + one.chunk, length) - 1)
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
    return work * (chunks / len(some_chunks)) * (kv_heads / len(some_heads)) + LAUNCH


def _some(count: int, most: int) -> np.ndarray:
    # All numbers below count, or some, spread evenly but not in steps that could be those of segments.
    if count <= most:
        return np.arange(count)
    return np.unique((np.arange(most) * GOLDEN % 1 * count).astype(int))
