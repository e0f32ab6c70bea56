"""The order of a tile's blocks of keys in the forward for Hopper: where some are cut off, whole ones first.

That is so above head_dim 64, unless the copying warp lists the blocks (`steps.whole_first`).

A block is whole where every query of the tile sees all its keys. Steps on whole blocks need no mask, and one loop takes
those of all branches. The others follow in two parts: those that the first group sees, and those that the second sees
alone. So the first group writes its results while the second goes on.

    branch 0        w w w s e         w: whole, s: seen by both groups, e: by the second alone
    branch 1        w w s e
    copied          w w w  w w | s  s | e  e
    first group     . . .  . . | .  . |
    second group    . . .  . . | .  . | .  .

The copying warp writes beside each block where it is cut off. So the groups need not know whose block it is.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import tiles

PARTS = gl.constexpr(3)  # whole blocks, those that both groups see, and those that the second sees alone


class Cuts(NamedTuple):
    """The cut of the block in each stage, as the copying warp writes it; all are [stages, 1]."""

    left: gl.shared_memory_descriptor  # keys of the segment from the block on
    key: gl.shared_memory_descriptor  # position of the block's first key
    rate: gl.shared_memory_descriptor


class Spans(NamedTuple):
    """The blocks and keys of each branch, which the copying warp keeps for itself; all are [branches, 1].

    Computed again for each part they took 2 % of a launch's time (reports/HISTORY.md).
    """

    whole: gl.shared_memory_descriptor  # numbers of blocks, as `ends_of` has them
    first: gl.shared_memory_descriptor
    every: gl.shared_memory_descriptor
    key: gl.shared_memory_descriptor  # position of the first key
    rate: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    row: gl.shared_memory_descriptor  # of the first key in the branch's descriptors
    residue: gl.shared_memory_descriptor


class Sight(NamedTuple):
    """The queries of a group, and the cuts that say which keys of a block they see."""

    cuts: Cuts
    query: gl.tensor  # [GROUP_ROWS]: position of each row's query, negative where there is none
    lowest: gl.tensor  # position of the group's first query


@gluon.jit
def cuts_of(STAGES: gl.constexpr):
    """Room for the `Cuts` of a ring."""
    return Cuts(_numbers(STAGES), _numbers(STAGES), _numbers(STAGES))


@gluon.jit
def spans_of(N_BRANCHES: gl.constexpr):
    """Room for the `Spans` of a launch's branches."""
    return Spans(
        _numbers(N_BRANCHES), _numbers(N_BRANCHES), _numbers(N_BRANCHES), _numbers(N_BRANCHES),
        _numbers(N_BRANCHES), _numbers(N_BRANCHES), _numbers(N_BRANCHES), _numbers(N_BRANCHES),
    )  # fmt: skip


@gluon.jit
def _numbers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def ends_of(start, w, r, o, keys, tile, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Numbers of a branch's blocks: whole, seen by the first group, and seen by the tile; each holds the one before.

    Of one branch these are numbers, of all branches at once tensors of 8.
    """
    _n, full, end = geometry.key_range(
        start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
    )  # [8] each
    last = gl.minimum(tile.size, tiles.GROUP_ROWS) - 1
    # Rows before the tile's lowest query are not there, and may be all that the first group has.
    first_highest = gl.maximum(tile.lowest, gl.minimum(tile.highest, geometry.tile_positions(tile, last)))
    _n, _full, first_end = geometry.key_range(
        start, w, r, o, keys, tile.lowest, first_highest, BLOCK_N, CAUSAL, False
    )  # [8] each
    whole = gl.minimum(full, end) // BLOCK_N  # [8]
    return whole, gl.cdiv(first_end, BLOCK_N), gl.cdiv(end, BLOCK_N)


@gluon.jit
def keep(spans, i, ends, key, rate, keys, row, residue):
    """Keep a branch's `ends_of` and where its keys are for the parts after the first.

    key, keys: the position of its first key, and their number. row, residue: of the first in the descriptors.
    """
    tiles.tell(spans.whole, i, ends[0])
    tiles.tell(spans.first, i, ends[1])
    tiles.tell(spans.every, i, ends[2])
    tiles.tell(spans.key, i, key)
    tiles.tell(spans.rate, i, rate)
    tiles.tell(spans.keys, i, keys)
    tiles.tell(spans.row, i, row)
    tiles.tell(spans.residue, i, residue)


@gluon.jit
def keep_none(spans, i):
    """Keep that a branch has no blocks, since the tile is not in it."""
    tiles.tell(spans.whole, i, 0)
    tiles.tell(spans.first, i, 0)
    tiles.tell(spans.every, i, 0)


@gluon.jit
def kept_blocks(spans, i, part):
    """Numbers of the first block of a branch's part and of the first after it; part is 1 or 2."""
    first = tiles.told(spans.first, i, 1)
    begin, end = tiles.told(spans.whole, i, 1), first
    if part == 2:
        begin, end = first, tiles.told(spans.every, i, 1)
    return begin, end


@gluon.jit
def kept_keys(spans, i):
    """Position of a kept branch's first key, its rate, its number of keys, and their row and residue."""
    key, rate, keys = tiles.told(spans.key, i, 1), tiles.told(spans.rate, i, 1), tiles.told(spans.keys, i, 1)
    return key, rate, keys, tiles.told(spans.row, i, 1), tiles.told(spans.residue, i, 1)


@gluon.jit
def counts_of(segments, keys, tile, NUMBER: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Numbers of blocks of all branches: whole, seen by group NUMBER, and seen by the tile."""
    inside, start, w, r, o = segments  # [8] each
    whole, first, every = ends_of(start, w, r, o, keys, tile, BLOCK_N, CAUSAL)  # [8] each
    own = first if NUMBER == 0 else every  # [8]
    return _sum_of(whole, inside), _sum_of(own, inside), _sum_of(every, inside)


@gluon.jit
def _sum_of(counts, inside):
    return gl.sum(gl.where(inside, counts, 0), 0)


@gluon.jit
def tell(cuts, block, left, key, rate):
    """Write where a block is cut off, for its stage."""
    tiles.tell(cuts.left, block, left)
    tiles.tell(cuts.key, block, key)
    tiles.tell(cuts.rate, block, rate)


@gluon.jit
def seen_keys(n, key, r, query, CAUSAL: gl.constexpr):
    """Number of keys that each query sees, of the n keys of a segment at positions key, key + r, ..."""
    seen_count = gl.zeros_like(query) + n  # [GROUP_ROWS]
    if CAUSAL:
        seen_count = gl.minimum(seen_count, (query - key + r) // r)  # [GROUP_ROWS]
    return seen_count


@gluon.jit
def masked(scores, seen_count):
    """Scores, -inf from column `seen_count` of a row on."""
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))  # [rows]
    return gl.where(column[None, :] < seen_count[:, None], scores, float("-inf"))


@gluon.jit
def as_seen(scores, sight, block, CAUSAL: gl.constexpr):
    """Scores of a block whose stage is full, -inf for the keys that a row does not see."""
    left, key, rate = tiles.told(sight.cuts.left, block), 0, 1
    fewest = left  # of the keys that a row sees: the group's lowest query sees fewest
    if CAUSAL:
        key, rate = tiles.told(sight.cuts.key, block), tiles.told(sight.cuts.rate, block)
        fewest = gl.minimum(left, (sight.lowest - key + rate) // rate)
    if fewest < scores.shape[1]:
        scores = masked(scores, seen_keys(left, key, rate, sight.query, CAUSAL))  # [GROUP_ROWS, KEYS]
    return scores
