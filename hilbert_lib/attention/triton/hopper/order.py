"""The order of a tile's blocks of keys in the forward for Hopper where some are cut off: whole ones first.

A block is whole where every query of the tile sees all its keys. Steps on whole blocks need no mask, and one loop takes
those of all branches. The others follow in two parts: those that the first group sees, and those that the second sees
alone. So the first group ends with its part.

    branch 0        w w w s e         w: whole, s: seen by both groups, e: by the second alone
    branch 1        w w s e
    copied          w w w  w w | s  s | e  e
    first group     . . .  . . | .  . |          its results are written meanwhile
    second group    . . .  . . | .  . | .  .

The copying warp writes beside each block where it is cut off. So the groups need not know whose block it is.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import tiles

PARTS = gl.constexpr(3)


class Cuts(NamedTuple):
    """The cut of the block in each stage, as the copying warp writes it; all are [stages, 1]."""

    left: gl.shared_memory_descriptor  # keys of the segment from the block on
    key: gl.shared_memory_descriptor  # position of the block's first key
    rate: gl.shared_memory_descriptor


class Sight(NamedTuple):
    """The queries of a group, and the cuts that say which keys of a block they see."""

    cuts: Cuts
    query: gl.tensor  # [GROUP_ROWS]: position of each row's query, negative where there is none
    lowest: gl.tensor  # position of the group's first query


@gluon.jit
def cuts_of(STAGES: gl.constexpr):
    """Room for the `Cuts` of a ring."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Cuts(
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
    )


@gluon.jit
def ends_of(start, w, r, o, keys, tile, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Numbers of a branch's blocks: whole, seen by the first group, and seen by the tile; each holds the one before."""
    _n, full, end = geometry.key_range(
        start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
    )  # [8] each
    last = gl.minimum(tile.size, tiles.GROUP_ROWS) - 1
    first_highest = gl.minimum(tile.highest, geometry.tile_positions(tile, last))
    _n, _full, first_end = geometry.key_range(
        start, w, r, o, keys, tile.lowest, first_highest, BLOCK_N, CAUSAL, False
    )  # [8] each
    whole = gl.minimum(full, end) // BLOCK_N  # [8]
    return whole, gl.cdiv(first_end, BLOCK_N), gl.cdiv(end, BLOCK_N)


@gluon.jit
def part_of(part, start, w, r, o, keys, tile, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The keys of a branch from which and to which its blocks of a part go."""
    whole, first, every = ends_of(start, w, r, o, keys, tile, BLOCK_N, CAUSAL)
    begin = gl.where(part == 0, 0, gl.where(part == 1, whole, first))
    end = gl.where(part == 0, whole, gl.where(part == 1, first, every))
    return begin * BLOCK_N, end * BLOCK_N


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
    fewest = left  # keys that some row sees
    if CAUSAL:
        key, rate = tiles.told(sight.cuts.key, block), tiles.told(sight.cuts.rate, block)
        fewest = gl.minimum(left, (sight.lowest - key + rate) // rate)
    if fewest < scores.shape[1]:
        scores = masked(scores, seen_keys(left, key, rate, sight.query, CAUSAL))  # [GROUP_ROWS, KEYS]
    return scores
