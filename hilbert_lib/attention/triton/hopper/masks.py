"""What a group of warps sees of a box, and its scores without what a query does not see.

A box is masked along the axes on which it is cut, and only there: masking every box would take more time than exp.
Along a last axis of at most eight cells a thread has two cells alone, in all its scores: for queries the mask there is
in what exp subtracts, nearly free.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.geometry import LOG2_E
from hilbert_lib.attention.triton.grid import WRAP, queries_of, window
from hilbert_lib.attention.triton.hopper import boxes

FAR = gl.constexpr(2**30)  # beyond every rank


class Sight(NamedTuple):
    """What a group sees along an axis, or what sees it; in ranks that go on past the end: by some row, and by all."""

    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    low: gl.tensor  # of each row the first rank, and how many there are
    length: gl.tensor


@gluon.jit
def sights_of(own, number, reaches, axes, RULES: gl.constexpr):
    """What a group of queries sees along each axis; `number` are those of its rows."""
    ranks = boxes.ranks_of(number, own, RULES)
    stop = boxes.asked(axes, RULES).stop
    sight0 = _sight(own[0], ranks[0], reaches[0], axes.m[0], stop[0], 0, RULES)
    sight1 = _sight(own[1], ranks[1], reaches[1], axes.m[1], stop[1], 1, RULES)
    sight2 = _sight(own[2], ranks[2], reaches[2], axes.m[2], stop[2], 2, RULES)
    return sight0, sight1, sight2


@gluon.jit
def _sight(own, ranks, reach, m, stop, AXIS: gl.constexpr, RULES: gl.constexpr):
    if not boxes.exists(RULES, AXIS):
        return Sight(0, 1, 0, 1, ranks, ranks)
    STRIDE: gl.constexpr = boxes.stride(RULES, AXIS)
    CAUSAL: gl.constexpr = boxes.causal(RULES, AXIS)
    EDGE: gl.constexpr = boxes.edge(RULES, AXIS)
    last = gl.minimum(own + boxes.side(RULES, AXIS), stop) - 1
    rows, first = window(ranks, m, reach.w, STRIDE, CAUSAL, EDGE), window(own, m, reach.w, STRIDE, CAUSAL, EDGE)
    return _sight_of(rows, first, window(last, m, reach.w, STRIDE, CAUSAL, EDGE), reach, own < stop, m, EDGE == WRAP)


@gluon.jit
def _sight_of(rows, first, last, reach, exists, m, WRAPS: gl.constexpr):
    """The `Sight` of a group that has a row, if `exists`.

    rows, first, last: what each row sees, the first one and the last that exists, as ranks from and to.
    """
    begin = gl.where(exists, first[0] + reach.moved, FAR)
    end = gl.where(exists, last[1] + reach.moved, -FAR)
    full_begin, full_end = last[0] + reach.moved, first[1] + reach.moved
    low = rows[0] + reach.moved  # [GROUP_ROWS]
    if WRAPS:
        everywhere = reach.is_round & exists
        begin, end = gl.where(everywhere, -FAR, begin), gl.where(everywhere, FAR, end)
        full_begin = gl.where(everywhere, FAR, full_begin)
        # With a stride boxes of queries begin up to stride - 1 before the first that sees.
        low = gl.where(low - reach.begin >= m, low - m, low)  # [GROUP_ROWS]
    return Sight(begin, end, full_begin, full_end, low, rows[1] - rows[0])


@gluon.jit
def sees(sights, box, RULES: gl.constexpr):
    """Whether a group sees a box, or is seen by it.

    The axis of the groups alone is asked: along the others both have the boxes of their tile.
    """
    if boxes.stack(RULES) == 1:
        return _overlaps(sights[1], box.rank[1], box.left[1], boxes.side(RULES, 1))
    return _overlaps(sights[2], box.rank[2], box.left[2], boxes.side(RULES, 2))


@gluon.jit
def sees_or_extra(sights, box, own, stop, j, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """Whether a group of queries sees a box of the grid, or box j, from 0 on, of the extra keys."""
    seen = sees(sights, box, RULES)
    if EXTRA:
        seen = (seen & (j < 0)) | ((j >= 0) & boxes.is_there(own, stop))
    return seen


@gluon.jit
def following(step, sights, reaches, own, stop, j, axes, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """The next step, its box, and whether a group sees that or, with EXTRA, box j of the extra keys."""
    step = boxes.following(step, reaches, RULES)
    box = boxes.box_of(step, reaches, axes, RULES)
    return step, box, sees_or_extra(sights, box, own, stop, j, RULES, EXTRA)


@gluon.jit
def _overlaps(sight, rank, left, SIDE: gl.constexpr):
    return (rank < sight.end) & (rank + gl.minimum(left, SIDE) > sight.begin)


@gluon.jit
def allowed(
    scores, sights, box, place, axes, padding, extra_padding, j, extra, RULES: gl.constexpr, EXTRA: gl.constexpr,
    PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr,
):  # fmt: skip
    """Scores of a group of queries and a box of keys, -inf where they do not attend. Extra keys are box j from 0 on.

    Where `is_apart` the last axis is left to `seen_last`.
    """
    if EXTRA:
        if j >= 0:
            scores = _of_extra(
                scores, extra_padding, place.b, j * scores.shape[1], extra, EXTRA_PADDING
            )  # [GROUP_ROWS, columns]
        else:
            scores = _of_grid(scores, sights, box, place, axes, padding, RULES, PADDING)  # [GROUP_ROWS, columns]
    else:
        scores = _of_grid(scores, sights, box, place, axes, padding, RULES, PADDING)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _of_grid(scores, sights, box, place, axes, padding, RULES: gl.constexpr, PADDING: gl.constexpr):
    scores = _cut_off(scores, sights[0], box.rank[0], box.left[0], axes.m[0], 0, RULES)  # [GROUP_ROWS, columns]
    scores = _cut_off(scores, sights[1], box.rank[1], box.left[1], axes.m[1], 1, RULES)  # [GROUP_ROWS, columns]
    if not is_apart(RULES):
        scores = _cut_off(scores, sights[2], box.rank[2], box.left[2], axes.m[2], 2, RULES)  # [GROUP_ROWS, columns]
    if PADDING:
        scores = _without_padding(scores, padding, place, box, axes, RULES)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _cut_off(scores, sight, rank, left, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    if boxes.exists(RULES, AXIS):
        SIDE: gl.constexpr = boxes.side(RULES, AXIS)
        WRAPS: gl.constexpr = boxes.edge(RULES, AXIS) == WRAP
        is_cut = (rank < sight.full_begin) | (rank + SIDE > sight.full_end)
        if WRAPS:
            is_cut = is_cut | (left < SIDE)
        if is_cut:
            shaped = _shaped(scores, boxes.before(RULES, AXIS), SIDE)  # [GROUP_ROWS, BEFORE, SIDE, cells]
            ALONG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, shaped.type.layout))
            seen = _seen(
                gl.arange(0, SIDE, gl.SliceLayout(0, ALONG)), sight, rank, left, m, WRAPS
            )  # [GROUP_ROWS, SIDE]
            scores = _without(scores, shaped, seen)  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def _seen(cell, sight, rank, left, m, WRAPS: gl.constexpr):
    """[rows, cells]: which cells of a box along an axis each row sees."""
    cell = cell[None, :]  # [1, SIDE]
    ROWS: gl.constexpr = gl.SliceLayout(1, cell.type.layout)
    ahead = cell - (gl.convert_layout(sight.low, ROWS) - rank)[:, None]  # [GROUP_ROWS, SIDE]
    if WRAPS:
        ahead = gl.where(ahead < 0, ahead + m, ahead)  # [GROUP_ROWS, SIDE]
    seen = _is_below(ahead, gl.convert_layout(sight.length, ROWS)[:, None])  # [GROUP_ROWS, SIDE]
    if WRAPS:
        seen = seen & (cell < left)  # [GROUP_ROWS, SIDE]
    return seen


@gluon.constexpr_function
def is_apart(rules):
    """Whether the last axis of a box is masked by what is subtracted from scores: of eight cells a thread has two."""
    return rules.box[2] <= 8


@gluon.jit
def apart(scores, RULES: gl.constexpr):
    """Scores with the cells of a box along the last axis apart."""
    SIDE: gl.constexpr = boxes.side(RULES, 2)
    return scores.reshape([scores.shape[0], scores.shape[1] // SIDE, SIDE])


@gluon.jit
def seen_last(shaped, sights, box, axes, is_extra, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """[rows, cells]: which cells of a box along the last axis each query sees; all extra keys."""
    cell = gl.arange(0, boxes.side(RULES, 2), gl.SliceLayout(0, gl.SliceLayout(1, shaped.type.layout)))  # [SIDE]
    seen = _seen(
        cell, sights[2], box.rank[2], box.left[2], axes.m[2], boxes.edge(RULES, 2) == WRAP
    )  # [GROUP_ROWS, SIDE]
    if EXTRA:
        seen = seen | is_extra  # [GROUP_ROWS, SIDE]
    return seen


@gluon.jit
def weights_of(scores, away, sights, box, axes, is_extra, scale, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """exp2 of `allowed` scores less a value for each row, without what is still to be masked."""
    if is_apart(RULES):
        seen = seen_last(apart(scores, RULES), sights, box, axes, is_extra, RULES, EXTRA)  # [GROUP_ROWS, SIDE]
        weights = weights_apart(scores, away, seen, scale, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    else:
        weights = gl.exp2(scores * (scale * LOG2_E) - away[:, None])  # [GROUP_ROWS, GROUP_ROWS]
    return weights


@gluon.jit
def weights_apart(scores, away, seen, scale, RULES: gl.constexpr):
    """exp2 of scores less a value for each row, and 0 where a row does not see a cell along the last axis."""
    shaped = apart(scores, RULES)  # [GROUP_ROWS, columns, SIDE]
    away = gl.convert_layout(away, gl.SliceLayout(1, seen.type.layout))[:, None]  # [GROUP_ROWS, 1]
    shaped = gl.exp2(
        shaped * (scale * LOG2_E) - gl.where(seen, away, float("inf")).expand_dims(1)
    )  # [GROUP_ROWS, columns, SIDE]
    return gl.convert_layout(shaped.reshape(scores.shape), scores.type.layout)


@gluon.jit
def _shaped(scores, BEFORE: gl.constexpr, SIDE: gl.constexpr):
    """Scores with the cells of a box along one axis, those before and those behind it apart."""
    return scores.reshape([scores.shape[0], BEFORE, SIDE, scores.shape[1] // (BEFORE * SIDE)])


@gluon.jit
def _is_below(ahead, length):
    """0 <= ahead < length by one comparison: what is negative is large without a sign."""
    return ahead.to(gl.uint32, bitcast=True) < length.to(gl.uint32, bitcast=True)


@gluon.jit
def _without(scores, shaped, seen):
    shaped = gl.where(seen.expand_dims(1).expand_dims(3), shaped, float("-inf"))  # [GROUP_ROWS, BEFORE, SIDE, cells]
    return gl.convert_layout(shaped.reshape(scores.shape), scores.type.layout)


@gluon.jit
def seers_of(own, number, reaches, axes, RULES: gl.constexpr):
    """What sees a group of keys along each axis; `number` are those of its rows."""
    ranks = boxes.ranks_of(number, own, RULES)
    seers0 = _seers(own[0], ranks[0], reaches[0], axes.m[0], 0, RULES)
    seers1 = _seers(own[1], ranks[1], reaches[1], axes.m[1], 1, RULES)
    seers2 = _seers(own[2], ranks[2], reaches[2], axes.m[2], 2, RULES)
    return seers0, seers1, seers2


@gluon.jit
def _seers(own, ranks, reach, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    if not boxes.exists(RULES, AXIS):
        return Sight(0, 1, 0, 1, ranks, ranks)
    last = gl.minimum(own + boxes.side(RULES, AXIS), m) - 1
    rows, first = _queries_of(ranks, m, reach.w, AXIS, RULES), _queries_of(own, m, reach.w, AXIS, RULES)
    WRAPS: gl.constexpr = boxes.edge(RULES, AXIS) == WRAP
    return _sight_of(rows, first, _queries_of(last, m, reach.w, AXIS, RULES), reach, own < m, m, WRAPS)


@gluon.jit
def _queries_of(key, m, w, AXIS: gl.constexpr, RULES: gl.constexpr):
    """From where to where queries see a key, exactly: whole groups of a stride, by their leaders."""
    STRIDE: gl.constexpr = boxes.stride(RULES, AXIS)
    CAUSAL: gl.constexpr = boxes.causal(RULES, AXIS)
    EDGE: gl.constexpr = boxes.edge(RULES, AXIS)
    start, end = queries_of(key, m, m, w, 1, 1, CAUSAL, EDGE)  # [GROUP_ROWS] each
    if STRIDE > 1:
        # The leader of group g is g * STRIDE + LEAD or, in the last, m - 1; every key is seen by one (w >= STRIDE).
        LEAD: gl.constexpr = STRIDE - 1 if CAUSAL else STRIDE // 2
        # No number is divided that is below 0, and none grows past 32 bits.
        if EDGE == WRAP:
            start = (start + 2 * m - LEAD + STRIDE - 1) // STRIDE * STRIDE - 2 * m  # [GROUP_ROWS]
        elif not CAUSAL:
            start = (gl.maximum(start, 0) - LEAD + STRIDE - 1) // STRIDE * STRIDE  # [GROUP_ROWS]
        groups = (end - LEAD + STRIDE - 1) // STRIDE * STRIDE  # [GROUP_ROWS]
        if EDGE != WRAP:
            groups = gl.where(end >= m, m, groups)  # [GROUP_ROWS]
        end = groups  # [GROUP_ROWS]
    return start, end


@gluon.jit
def hidden(scores, seers, box, axes, RULES: gl.constexpr):
    """-inf where a query of a box, a column, does not see a key, a row of the group; queries outside do no harm."""
    scores = _cut_off(scores, seers[0], box.rank[0], box.left[0], axes.m[0], 0, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    scores = _cut_off(scores, seers[1], box.rank[1], box.left[1], axes.m[1], 1, RULES)  # [GROUP_ROWS, GROUP_ROWS]
    return _cut_off(scores, seers[2], box.rank[2], box.left[2], axes.m[2], 2, RULES)


@gluon.jit
def _without_padding(scores, padding, place, box, axes, RULES: gl.constexpr):
    """-inf where a key of a box has no weight."""
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))  # [rows]
    ranks = boxes.ranks_of(column, box.at, RULES)
    cells = place.b.to(gl.int64) * (axes.n[0] * axes.n[1] * axes.n[2])
    at = padding + cells + boxes.cell_of(ranks, place.residue, axes.d, axes.n)  # [rows]
    return gl.where((gl.load(at, mask=boxes.is_there(ranks, axes.m), other=1) == 0)[None, :], scores, float("-inf"))


@gluon.jit
def _of_extra(scores, padding, b, first, extra, PADDING: gl.constexpr):
    """-inf where an extra key, of those from `first` on, has no weight or is none."""
    column = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))  # [rows]
    allowed = column < extra  # [rows]
    if PADDING:
        at = padding + b.to(gl.int64) * extra + column  # [rows]
        allowed = allowed & (gl.load(at, mask=allowed, other=1) == 0)  # [rows]
    return gl.where(allowed[None, :], scores, float("-inf"))
