"""Which rows a program takes: tiles along residue classes, so that a whole tile is in a branch or not.

A tile holds rows `start + c + stride * i` of one chunk: `stride` is the lcm of the rates, so all its rows have one
residue modulo every rate, and `chunk` is the smallest segment length, so that it seldom crosses a segment. Where the
lcm outgrows the segments (a tile would be mostly empty), branches are split into groups, one pass each.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import torch
from torch import Tensor

from hilbert_lib.pattern import DilatedPattern


@dataclass(frozen=True)
class Pass:
    """One launch: some branches, and the rows that it visits.

    Attributes:
        branches: indices of the pattern's branches.
        chunk: rows of one tile lie in one stretch of this many positions.
        stride: positions between two rows of a tile; every rate divides it.
        covers_all: whether it visits every row, also those in none of its branches.
    """

    branches: tuple[int, ...]
    chunk: int
    stride: int
    covers_all: bool


def passes(pattern: DilatedPattern, length: int, block: int, *, is_causal: bool = False) -> tuple[Pass, ...]:
    """The launches of one call, the finest last: it visits every row and writes the result.

    Args:
        pattern: the pattern.
        length: tokens.
        block: rows of a tile.
        is_causal: whether keys after the query are excluded. Then branches of different rates go apart: a tile of
            stride R spans block * R / r keys of a branch of rate r, and half of that diagonal is computed in vain.

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
        if same_rows or (groups and not is_causal and stride * block <= shortest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return tuple(
        Pass(
            branches=tuple(group),
            chunk=max(1, min(length, *(pattern.segment_lengths[i] for i in group))),
            stride=lcm(*(pattern.dilation_rates[i] for i in group)),
            covers_all=number == 0,
        )
        for number, group in reversed(list(enumerate(groups)))
    )


@lru_cache(maxsize=64)
def tables(
    pattern: DilatedPattern, one: Pass, kv_heads: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel reads of a pass.

    Returns:
        Four int32 tensors. branches (branches, 2): segment length, capped to 2^31 - 1, and rate. offsets (branches,
        kv_heads): -1 where the head does not use the branch. classes (kv_heads, ranks): the residues that a head
        visits, those in most branches first, so that long programs start first; -1 fills up. branch_ids (branches,):
        indices in the pattern, which key the dropout bits.
    """
    used = [pattern.branches[i] for i in one.branches]
    offsets = [
        [pattern.offset(i, g, kv_heads) if g in pattern.branch_heads(i, kv_heads) else -1 for g in range(kv_heads)]
        for i in one.branches
    ]
    # Where chunks begin at residue 0 of every branch, a class is in the same branches in all of them.
    repeats = all(one.chunk % r == 0 and w % one.chunk == 0 for w, r in used)
    classes = []
    for g in range(kv_heads):
        depth = [sum(c % r == o[g] for (_, r), o in zip(used, offsets, strict=True)) for c in range(one.stride)]
        visited = [c for c in range(one.stride) if one.covers_all or not repeats or depth[c]]
        classes.append(sorted(visited, key=lambda c: -depth[c]))
    ranks = max(map(len, classes))
    classes = [row + [-1] * (ranks - len(row)) for row in classes]
    branches = [(min(w, 2**31 - 1), r) for w, r in used]
    return tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in (branches, offsets, classes, one.branches))
