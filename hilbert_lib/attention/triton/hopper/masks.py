"""What a group of warps sees of a box, and its scores without what a query does not see.

A box is masked along the axes on which it is cut, and only there: masking every box would take more time than exp.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.grid import WRAP, queries_of, window
from hilbert_lib.attention.triton.hopper import boxes

FAR = gl.constexpr(2**30)  # beyond every rank


class Sight(NamedTuple):
    """What a group sees along an axis, in ranks that go on past the end: cells that some row sees, and that all do."""

    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    low: gl.tensor  # of each row the window's first rank, and how many it has
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
    low, high = window(ranks, m, reach.w, STRIDE, CAUSAL, EDGE)
    begin, full_end = window(own, m, reach.w, STRIDE, CAUSAL, EDGE)
    full_begin, end = window(gl.minimum(own + boxes.side(RULES, AXIS), stop) - 1, m, reach.w, STRIDE, CAUSAL, EDGE)
    none = own >= stop
    begin, end = gl.where(none, FAR, begin + reach.moved), gl.where(none, -FAR, end + reach.moved)
    full_begin = full_begin + reach.moved
    if EDGE == WRAP:
        everywhere = reach.is_round & (own < stop)
        begin, end = gl.where(everywhere, -FAR, begin), gl.where(everywhere, FAR, end)
        full_begin = gl.where(everywhere, FAR, full_begin)
    return Sight(begin, end, full_begin, full_end + reach.moved, low + reach.moved, high - low)


@gluon.jit
def sees(sights, box, RULES: gl.constexpr):
    """Whether a group of queries sees a box. Along all axes but that of the groups it sees what its tile does."""
    if boxes.stack(RULES) == 1:
        return _overlaps(sights[1], box.rank[1], box.left[1], boxes.side(RULES, 1))
    return _overlaps(sights[2], box.rank[2], box.left[2], boxes.side(RULES, 2))


@gluon.jit
def _overlaps(sight, rank, left, SIDE: gl.constexpr):
    return (rank < sight.end) & (rank + gl.minimum(left, SIDE) > sight.begin)


@gluon.jit
def allowed(
    scores, sights, box, place, axes, padding, extra_padding, j, extra, RULES: gl.constexpr, EXTRA: gl.constexpr,
    PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr,
):  # fmt: skip
    """Scores of a group of queries and a box of keys, -inf where they do not attend. Extra keys are box j from 0 on."""
    if EXTRA:
        if j >= 0:
            scores = _of_extra(scores, extra_padding, place.b, j * scores.shape[1], extra, EXTRA_PADDING)
        else:
            scores = _of_grid(scores, sights, box, place, axes, padding, RULES, PADDING)
    else:
        scores = _of_grid(scores, sights, box, place, axes, padding, RULES, PADDING)
    return scores


@gluon.jit
def _of_grid(scores, sights, box, place, axes, padding, RULES: gl.constexpr, PADDING: gl.constexpr):
    scores = _cut_off(scores, sights[0], box.rank[0], box.left[0], axes.m[0], 0, RULES)
    scores = _cut_off(scores, sights[1], box.rank[1], box.left[1], axes.m[1], 1, RULES)
    scores = _cut_off(scores, sights[2], box.rank[2], box.left[2], axes.m[2], 2, RULES)
    if PADDING:
        scores = _without_padding(scores, padding, place, box, axes, RULES)
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
            shaped = _shaped(scores, boxes.before(RULES, AXIS), SIDE)
            ALONG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, shaped.type.layout))
            cell = gl.arange(0, SIDE, gl.SliceLayout(0, ALONG))[None, :]
            ahead = cell - (gl.convert_layout(sight.low, gl.SliceLayout(1, ALONG)) - rank)[:, None]
            if WRAPS:
                ahead = gl.where(ahead < 0, ahead + m, ahead)
            seen = _is_below(ahead, gl.convert_layout(sight.length, gl.SliceLayout(1, ALONG))[:, None])
            if WRAPS:
                seen = seen & (cell < left)
            scores = _without(scores, shaped, seen)
    return scores


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
    shaped = gl.where(seen.expand_dims(1).expand_dims(3), shaped, float("-inf"))
    return gl.convert_layout(shaped.reshape(scores.shape), scores.type.layout)


@gluon.jit
def is_seen_by(own, box, reaches, axes, RULES: gl.constexpr):
    """Whether some query of a box may see a group's keys; only the axis of the groups tells them apart."""
    if boxes.stack(RULES) == 1:
        return _is_seen_by(own[1], box.rank[1], box.left[1], reaches[1], axes.m[1], 1, RULES)
    return _is_seen_by(own[2], box.rank[2], box.left[2], reaches[2], axes.m[2], 2, RULES)


@gluon.jit
def _is_seen_by(own, rank, left, reach, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    SIDE: gl.constexpr = boxes.side(RULES, AXIS)
    EDGE: gl.constexpr = boxes.edge(RULES, AXIS)
    start, end = queries_of(own, m, m, reach.w, boxes.stride(RULES, AXIS), SIDE, boxes.causal(RULES, AXIS), EDGE)
    seen = (rank < end + reach.moved) & (rank + gl.minimum(left, SIDE) > start + reach.moved)
    if EDGE == WRAP:
        seen = seen | reach.is_round
    return seen & (own < m)


@gluon.jit
def cut_off_by(scores, own, number, box, reaches, axes, RULES: gl.constexpr):
    """-inf where a query of a box, a column, does not see a key, a row of the group; queries outside do no harm."""
    ranks = boxes.ranks_of(number, own, RULES)
    scores = _cut_off_by(scores, own[0], ranks[0], box.at[0], reaches[0].w, axes.m[0], 0, RULES)
    scores = _cut_off_by(scores, own[1], ranks[1], box.at[1], reaches[1].w, axes.m[1], 1, RULES)
    return _cut_off_by(scores, own[2], ranks[2], box.at[2], reaches[2].w, axes.m[2], 2, RULES)


@gluon.jit
def _cut_off_by(scores, own, ranks, at, w, m, AXIS: gl.constexpr, RULES: gl.constexpr):
    if boxes.exists(RULES, AXIS):
        SIDE: gl.constexpr = boxes.side(RULES, AXIS)
        STRIDE: gl.constexpr = boxes.stride(RULES, AXIS)
        CAUSAL: gl.constexpr = boxes.causal(RULES, AXIS)
        EDGE: gl.constexpr = boxes.edge(RULES, AXIS)
        low, _ = window(gl.minimum(at + SIDE, m) - 1, m, w, STRIDE, CAUSAL, EDGE)
        _, end = window(at, m, w, STRIDE, CAUSAL, EDGE)
        if (EDGE == WRAP) | (low > own) | (end < gl.minimum(own + SIDE, m)):
            shaped = _shaped(scores, boxes.before(RULES, AXIS), SIDE)
            ALONG: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, shaped.type.layout))
            queries = at + gl.arange(0, SIDE, gl.SliceLayout(0, ALONG))
            lows, ends = window(queries, m, w, STRIDE, CAUSAL, EDGE)
            ahead = gl.convert_layout(ranks, gl.SliceLayout(1, ALONG))[:, None] - lows[None, :]
            if EDGE == WRAP:
                ahead = gl.where(ahead < 0, ahead + m, gl.where(ahead < m, ahead, ahead - m))
            scores = _without(scores, shaped, _is_below(ahead, (ends - lows)[None, :]))
    return scores


@gluon.jit
def _without_padding(scores, padding, place, box, axes, RULES: gl.constexpr):
    """-inf where a key of a box has no weight."""
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    ranks = boxes.ranks_of(column, box.at, RULES)
    cells = place.b.to(gl.int64) * (axes.n[0] * axes.n[1] * axes.n[2])
    at = padding + cells + boxes.cell_of(ranks, place.residue, axes.d, axes.n)
    return gl.where((gl.load(at, mask=boxes.is_there(ranks, axes.m), other=1) == 0)[None, :], scores, float("-inf"))


@gluon.jit
def _of_extra(scores, padding, b, first, extra, PADDING: gl.constexpr):
    """-inf where an extra key, of those from `first` on, has no weight or is none."""
    column = first + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    allowed = column < extra
    if PADDING:
        at = padding + b.to(gl.int64) * extra + column
        allowed = allowed & (gl.load(at, mask=allowed, other=1) == 0)
    return gl.where(allowed[None, :], scores, float("-inf"))
