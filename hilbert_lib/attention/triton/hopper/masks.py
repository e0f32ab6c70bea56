"""Masks of boxes: the cells of a box that a group of warps sees, and its scores without the others.

A box is masked along the axes on which it is cut, and only there. A mask of every box would take more time than exp:

    ranks                 begin     full_begin      full_end      end
    all rows see                    |---------------|
    some rows see         |---------------------------------------|
    boxes       | unseen |  cut    |  full |  full |  cut  |  cut  | unseen |

Along a last axis of at most eight cells a thread has only two cells, in all its scores. There the mask of queries is
part of the number that exp subtracts, which is nearly free (`is_apart`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hilbert_lib.attention.triton.geometry import LOG2_E
from hilbert_lib.attention.triton.grid import WRAP, window
from hilbert_lib.attention.triton.hopper import boxes, steps, tiles

FAR = gl.constexpr(2**30)  # beyond every rank


class Sight(NamedTuple):
    """The cells that a group sees along an axis, or that see it. Ranks go on past the end of an axis that wraps."""

    begin: gl.tensor  # some row sees ranks from begin to end - 1
    end: gl.tensor
    full_begin: gl.tensor  # all rows see ranks from full_begin to full_end - 1
    full_end: gl.tensor
    low: gl.tensor  # first rank that each row sees
    length: gl.tensor  # number of ranks that each row sees


class KeyMasks(NamedTuple):
    """The windows and the padding of a launch, which decide which keys a query sees."""

    windows: gl.tensor  # (kv_heads, 3)
    ceilings: steps.Ceilings  # of the boxes in a ring, where a launch has padding


class Padding(NamedTuple):
    """Masks of a launch, 1 for keys without weight, which the copying warp tells the groups by ceilings."""

    cells: gl.tensor  # (batch, keys)
    extra: gl.tensor  # (batch, extra keys)


@gluon.jit
def sights_of(corner, number, reaches, axes, RULES: gl.constexpr):
    """The `Sight` of a group of queries along each axis; `number` has the numbers of its rows."""
    ranks = boxes.ranks_of(number, corner, RULES)
    stop = boxes.launch_queries(axes, RULES).stop
    sight0 = _sight(corner[0], ranks[0], reaches[0], axes.m[0], stop[0], 0, RULES)
    sight1 = _sight(corner[1], ranks[1], reaches[1], axes.m[1], stop[1], 1, RULES)
    sight2 = _sight(corner[2], ranks[2], reaches[2], axes.m[2], stop[2], 2, RULES)
    return sight0, sight1, sight2


@gluon.jit
def _sight(first_rank, ranks, reach, m, stop, AXIS: gl.constexpr, RULES: gl.constexpr):
    if not boxes.exists(RULES, AXIS):
        return Sight(0, 1, 0, 1, ranks, ranks)
    STRIDE: gl.constexpr = boxes.stride(RULES, AXIS)
    CAUSAL: gl.constexpr = boxes.causal(RULES, AXIS)
    EDGE: gl.constexpr = boxes.edge(RULES, AXIS)
    last = gl.minimum(first_rank + boxes.side(RULES, AXIS), stop) - 1
    rows, first = window(ranks, m, reach.w, STRIDE, CAUSAL, EDGE), window(first_rank, m, reach.w, STRIDE, CAUSAL, EDGE)
    return _sight_of(
        rows, first, window(last, m, reach.w, STRIDE, CAUSAL, EDGE), reach, first_rank < stop, m, EDGE == WRAP
    )


@gluon.jit
def _sight_of(rows, first, last, reach, exists, m, WRAPS: gl.constexpr):
    """The `Sight` of a group, which sees nothing unless `exists`.

    rows, first, last: (first rank, last rank + 1) that each row sees, the first row, and the last row that exists.
    """
    begin = gl.where(exists, first[0] + reach.moved, FAR)
    end = gl.where(exists, last[1] + reach.moved, -FAR)
    full_begin, full_end = last[0] + reach.moved, first[1] + reach.moved
    low = rows[0] + reach.moved  # [GROUP_ROWS]
    if WRAPS:
        everywhere = reach.is_round & exists
        begin, end = gl.where(everywhere, -FAR, begin), gl.where(everywhere, FAR, end)
        full_begin = gl.where(everywhere, FAR, full_begin)
        # With a stride, boxes of queries begin up to stride - 1 ranks before the first query that sees.
        low = gl.where(low - reach.begin >= m, low - m, low)  # [GROUP_ROWS]
    return Sight(begin, end, full_begin, full_end, low, rows[1] - rows[0])


@gluon.jit
def sees(sights, box, RULES: gl.constexpr):
    """Whether a group sees a box, or is seen by it.

    Only the axis of the groups decides. Along the others both groups see all boxes of their tile.
    """
    if boxes.stack(RULES) == 1:
        return _overlaps(sights[1], box.rank[1], box.left[1], boxes.key_side(RULES, 1))
    return _overlaps(sights[2], box.rank[2], box.left[2], boxes.key_side(RULES, 2))


@gluon.jit
def sees_or_extra(sights, box, corner, stop, j, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """Whether a group of queries sees a box of the grid or, for j >= 0, box j of the extra keys."""
    is_seen = sees(sights, box, RULES)
    if EXTRA:
        is_seen = (is_seen & (j < 0)) | ((j >= 0) & boxes.is_there(corner, stop))
    return is_seen


@gluon.jit
def following(step, sights, reaches, corner, stop, j, axes, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """The next step, its box, and whether a group sees the box or, with EXTRA, box j of the extra keys."""
    step = boxes.following(step, reaches, RULES)
    box = boxes.box_of(step, reaches, axes, RULES)
    return step, box, sees_or_extra(sights, box, corner, stop, j, RULES, EXTRA)


@gluon.jit
def _overlaps(sight, rank, left, SIDE: gl.constexpr):
    return (rank < sight.end) & (rank + gl.minimum(left, SIDE) > sight.begin)


@gluon.jit
def told_of(key_masks, block, PADDING: gl.constexpr):
    """The copying warp's word on the padding in a box, for `with_weight`: read while the scores are computed."""
    told = ()
    if PADDING:
        told = steps.told_of(key_masks.ceilings, block, tiles.GROUP_ROWS)
    return told


@gluon.jit
def with_weight(scores, told, PADDING: gl.constexpr):
    """Scores of a box, -inf for keys that are padding."""
    if PADDING:
        scores = steps.without_told(scores, told)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def allowed(scores, sights, box, axes, j, extra, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """Scores of a group of queries and a box of keys, -inf where the keys are not in the queries' windows.

    For j >= 0 the box is box j of the extra keys. Where `is_apart`, the last axis is left to `seen_last`.
    """
    if EXTRA:
        if j >= 0:  # noqa: SIM108 - a kernel computes one of both
            scores = _of_extra(scores, j * scores.shape[1], extra)  # [GROUP_ROWS, columns]
        else:
            scores = _of_grid(scores, sights, box, axes, RULES)  # [GROUP_ROWS, columns]
    else:
        scores = _of_grid(scores, sights, box, axes, RULES)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _of_grid(scores, sights, box, axes, RULES: gl.constexpr):
    scores = _cut_off(scores, sights[0], box.rank[0], box.left[0], axes.m[0], 0, RULES)  # [GROUP_ROWS, columns]
    scores = _cut_off(scores, sights[1], box.rank[1], box.left[1], axes.m[1], 1, RULES)  # [GROUP_ROWS, columns]
    if not is_apart(RULES):
        scores = _cut_off(scores, sights[2], box.rank[2], box.left[2], axes.m[2], 2, RULES)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _cut_off(scores, sight, rank, left, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    if boxes.exists(RULES, AXIS):
        SIDE: gl.constexpr = boxes.key_side(RULES, AXIS)
        WRAPS: gl.constexpr = boxes.edge(RULES, AXIS) == WRAP
        is_cut = (rank < sight.full_begin) | (rank + SIDE > sight.full_end)
        if WRAPS:
            is_cut = is_cut | (left < SIDE)
        if is_cut:
            shaped = _shaped(scores, boxes.before(RULES, AXIS), SIDE)  # [GROUP_ROWS, BEFORE, SIDE, cells]
            ALONG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, shaped.type.layout))
            sees_cell = _seen(
                gl.arange(0, SIDE, gl.SliceLayout(0, ALONG)), sight, rank, left, m, WRAPS
            )  # [GROUP_ROWS, SIDE]
            scores = _without(scores, shaped, sees_cell)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _seen(cell, sight, rank, left, m, WRAPS: gl.constexpr):
    """Whether each row sees each cell of a box along an axis."""
    cell = cell[None, :]  # [1, columns]
    ROWS: gl.constexpr = gl.SliceLayout(1, cell.type.layout)
    ahead = cell - (gl.convert_layout(sight.low, ROWS) - rank)[:, None]  # [GROUP_ROWS, columns]
    if WRAPS:
        ahead = gl.where(ahead < 0, ahead + m, ahead)  # [GROUP_ROWS, columns]
    sees_cell = _is_below(ahead, gl.convert_layout(sight.length, ROWS)[:, None])  # [GROUP_ROWS, columns]
    if WRAPS:
        sees_cell = sees_cell & (cell < left)  # [GROUP_ROWS, columns]
    return sees_cell


@gluon.constexpr_function
def is_apart(rules):
    """Whether the mask of the last axis is in the number subtracted from scores. A thread has two of eight cells."""
    return rules.keys[2] <= 8


@gluon.jit
def apart(scores, RULES: gl.constexpr):
    """Scores with an axis of their own for the cells along the last axis of a box."""
    SIDE: gl.constexpr = boxes.key_side(RULES, 2)
    return scores.reshape([scores.shape[0], scores.shape[1] // SIDE, SIDE])


@gluon.jit
def seen_last(shaped, sights, box, axes, is_extra, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """Whether each query sees each cell of a box along the last axis; it sees all extra keys."""
    cell = gl.arange(
        0, boxes.key_side(RULES, 2), gl.SliceLayout(0, gl.SliceLayout(1, shaped.type.layout))
    )  # [KEY_SIDE]
    sees_cell = _seen(
        cell, sights[2], box.rank[2], box.left[2], axes.m[2], boxes.edge(RULES, 2) == WRAP
    )  # [GROUP_ROWS, KEY_SIDE]
    if EXTRA:
        sees_cell = sees_cell | is_extra  # [GROUP_ROWS, KEY_SIDE]
    return sees_cell


@gluon.jit
def weights_of(scores, away, sights, box, axes, is_extra, scale, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """exp2 of `allowed` scores less a number of each row, and 0 where the last axis hides a cell."""
    if is_apart(RULES):
        sees_cell = seen_last(apart(scores, RULES), sights, box, axes, is_extra, RULES, EXTRA)  # [GROUP_ROWS, KEY_SIDE]
        weights = weights_apart(scores, away, sees_cell, scale, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    else:
        weights = gl.exp2(scores * (scale * LOG2_E) - away[:, None])  # [GROUP_ROWS, GROUP_ROWS]
    return weights


@gluon.jit
def weights_apart(scores, away, sees_cell, scale, RULES: gl.constexpr):
    """exp2 of scores less a number of each row, and 0 where a row does not see a cell along the last axis."""
    shaped = apart(scores, RULES)  # [GROUP_ROWS, columns, SIDE]
    away = gl.convert_layout(away, gl.SliceLayout(1, sees_cell.type.layout))[:, None]  # [GROUP_ROWS, 1]
    shaped = gl.exp2(
        shaped * (scale * LOG2_E) - gl.where(sees_cell, away, float("inf")).expand_dims(1)
    )  # [GROUP_ROWS, columns, SIDE]
    return gl.convert_layout(shaped.reshape(scores.shape), scores.type.layout)


@gluon.jit
def _shaped(scores, BEFORE: gl.constexpr, SIDE: gl.constexpr):
    """Scores as [rows, cells of earlier axes, cells of one axis, cells of later axes]."""
    return scores.reshape([scores.shape[0], BEFORE, SIDE, scores.shape[1] // (BEFORE * SIDE)])


@gluon.jit
def _is_below(ahead, length):
    """0 <= ahead < length by one comparison: a negative number is large when read without a sign."""
    return ahead.to(gl.uint32, bitcast=True) < length.to(gl.uint32, bitcast=True)


@gluon.jit
def _without(scores, shaped, sees_cell):
    shaped = gl.where(
        sees_cell.expand_dims(1).expand_dims(3), shaped, float("-inf")
    )  # [GROUP_ROWS, BEFORE, SIDE, cells]
    return gl.convert_layout(shaped.reshape(scores.shape), scores.type.layout)


@gluon.jit
def seers_of(corner, number, reaches, axes, RULES: gl.constexpr):
    """The `Sight` of the queries that see a group of keys, along each axis; `number` has the numbers of its rows."""
    ranks = boxes.ranks_of(number, corner, RULES)
    seers0 = _seers(corner[0], ranks[0], reaches[0], axes.m[0], 0, RULES)
    seers1 = _seers(corner[1], ranks[1], reaches[1], axes.m[1], 1, RULES)
    seers2 = _seers(corner[2], ranks[2], reaches[2], axes.m[2], 2, RULES)
    return seers0, seers1, seers2


@gluon.jit
def _seers(first_rank, ranks, reach, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    if not boxes.exists(RULES, AXIS):
        return Sight(0, 1, 0, 1, ranks, ranks)
    last = gl.minimum(first_rank + boxes.side(RULES, AXIS), m) - 1
    rows = boxes.seers_of(ranks, m, reach.w, 1, AXIS, RULES)
    first = boxes.seers_of(first_rank, m, reach.w, 1, AXIS, RULES)
    last = boxes.seers_of(last, m, reach.w, 1, AXIS, RULES)
    return _sight_of(rows, first, last, reach, first_rank < m, m, boxes.edge(RULES, AXIS) == WRAP)


@gluon.jit
def hidden(scores, seers, box, axes, RULES: gl.constexpr):
    """Scores of keys (rows) and a box of queries (columns), -inf where a query does not see a key.

    Queries outside of the grid do no harm.
    """
    scores = _cut_off(scores, seers[0], box.rank[0], box.left[0], axes.m[0], 0, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    scores = _cut_off(scores, seers[1], box.rank[1], box.left[1], axes.m[1], 1, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    return _cut_off(scores, seers[2], box.rank[2], box.left[2], axes.m[2], 2, RULES)


@gluon.jit
def _of_extra(scores, first, extra):
    """Scores of extra keys from `first` on, -inf past the last key."""
    column = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))  # [rows]
    return gl.where((column < extra)[None, :], scores, float("-inf"))


@gluon.jit
def kept_cells(padding, place, corner, axes, RULES: gl.constexpr, PADDING: gl.constexpr):
    """Whether each cell of a box of keys has weight, for `tell`. Cells outside of the grid do no harm."""
    number = _numbers()  # [GROUP_ROWS]
    is_kept = number >= 0  # [GROUP_ROWS]
    if PADDING:
        ranks = boxes.key_ranks_of(number, corner, RULES)
        cells = place.b.to(gl.int64) * (axes.n[0] * axes.n[1] * axes.n[2])
        padding_ptrs = padding.cells + cells + boxes.cell_of(ranks, place.residue, axes.d, axes.n)  # [GROUP_ROWS]
        is_kept = gl.load(padding_ptrs, mask=boxes.is_there(ranks, axes.m), other=0) == 0  # [GROUP_ROWS]
    return is_kept


@gluon.jit
def kept_extra(padding, b, first, extra, EXTRA_PADDING: gl.constexpr):
    """Whether each extra key from `first` on has weight, for `tell`."""
    number = _numbers()  # [GROUP_ROWS]
    is_kept = number >= 0  # [GROUP_ROWS]
    if EXTRA_PADDING:
        column = first + number  # [GROUP_ROWS]
        padding_ptrs = padding.extra + b.to(gl.int64) * extra + column  # [GROUP_ROWS]
        is_kept = gl.load(padding_ptrs, mask=column < extra, other=0) == 0  # [GROUP_ROWS]
    return is_kept


@gluon.jit
def _numbers():
    KEYS: gl.constexpr = tiles.GROUP_ROWS  # of a box; the copying warp alone holds them
    return gl.arange(0, KEYS, gl.BlockedLayout([KEYS // 32], [32], [1], [0]))


@gluon.jit
def tell(ceilings, full, block, is_kept):
    """Write the ceilings of a box, and arrive at the barrier of its stage. Both groups gave the stage back."""
    steps.tell_ceilings(ceilings, block, is_kept, gl.sum(is_kept.to(gl.int32), 0))
    mbarrier.arrive(full.index(block % full.shape[0]))
