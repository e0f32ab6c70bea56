"""Boxes of keys or queries on a grid: what the warp-specialised kernels for grids share.

The copy engine reads a rectangle of cells of one residue, which is stored row by row, as 64 rows of a tile: it begins
wherever it is told, and is zero outside of the grid. A program has two groups of 64 cells that lie side by side along
one axis, and walks over the boxes that hold what either of them sees. All coordinates are ranks (`neighbourhood`),
and there are always three axes.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from hilbert_lib.attention.triton.grid import WRAP, queries_of, window
from hilbert_lib.attention.triton.hopper import tiles

BUFFERS = gl.constexpr(2)  # of tiles: the next one comes while one is at work


class Rules(NamedTuple):
    """What a kernel is compiled for: a value for each of three axes, of which the first may have one cell."""

    box: tuple[int, int, int]  # cells along each axis, 64 in all
    stack: int  # the axis along which the two groups lie side by side
    stride: tuple[int, int, int]
    is_causal: tuple[bool, bool, bool]
    edge: tuple[int, int, int]  # of patterns.neighbourhood.EDGES
    axes: int  # that the grid has, the last of the three
    is_dilated: bool
    is_part: bool  # of the grid of keys, q has some cells or some are computed


# Gluon reads no attributes of a constant, but asks functions.
@gluon.constexpr_function
def side(rules, axis):
    """Cells of a box along an axis."""
    return rules.box[axis]


@gluon.constexpr_function
def size(rules, axis):
    """Cells of both groups along an axis."""
    return rules.box[axis] * (2 if axis == rules.stack else 1)


@gluon.constexpr_function
def before(rules, axis):
    """Cells of a box along all earlier axes."""
    return (1, rules.box[0], rules.box[0] * rules.box[1])[axis]


@gluon.constexpr_function
def stride(rules, axis):
    return rules.stride[axis]


@gluon.constexpr_function
def causal(rules, axis):
    return rules.is_causal[axis]


@gluon.constexpr_function
def edge(rules, axis):
    return rules.edge[axis]


@gluon.constexpr_function
def exists(rules, axis):
    """Whether the grid has an axis."""
    return axis >= 3 - rules.axes


@gluon.constexpr_function
def stack(rules):
    return rules.stack


@gluon.constexpr_function
def is_dilated(rules):
    return rules.is_dilated


@gluon.constexpr_function
def is_part(rules):
    return rules.is_part


class Asked(NamedTuple):
    """The queries of a launch among the keys, a value for each axis."""

    first: tuple  # rank of the first that q has
    cells: tuple  # that q has
    begin: tuple  # ranks of those computed, from the first to the last and one
    stop: tuple


class Axes(NamedTuple):
    """The sizes of a grid of keys, a value for each of three axes."""

    m: tuple  # ranks of a residue
    d: tuple  # dilation
    n: tuple  # cells
    part: tuple  # `Asked`, or nothing where queries are all of the grid


class Place(NamedTuple):
    """A tile: its sequence, head and KV head, and along each axis its first rank and its residue."""

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor
    first: tuple
    residue: tuple


class Reach(NamedTuple):
    """What the boxes of a program cover along an axis: `count` cells from `begin` on, round the end where it wraps."""

    w: gl.tensor  # the window
    begin: gl.tensor
    count: gl.tensor
    run: gl.tensor  # of them before the axis ends
    boxes: gl.tensor
    moved: gl.tensor  # what was added to ranks below 0
    is_round: gl.tensor  # windows of the tile overlap themselves


class Box(NamedTuple):
    """A box, a value for each axis: where it begins, its rank (which goes on past the end), and cells that count."""

    at: tuple
    rank: tuple
    left: tuple


@gluon.jit
def axes_of(n, d, part, RULES: gl.constexpr):
    """The axes of a launch. part: for each axis the first cell of q, how many, and the first and last + 1 computed."""
    m = n[0] // d[0], n[1] // d[1], n[2] // d[2]
    if is_part(RULES):
        first0, cells0, begin0, stop0 = _line(part, d[0])
        first1, cells1, begin1, stop1 = _line(part + 8, d[1])
        first2, cells2, begin2, stop2 = _line(part + 16, d[2])
        own = Asked((first0, first1, first2), (cells0, cells1, cells2), (begin0, begin1, begin2), (stop0, stop1, stop2))
        return Axes(m, d, n, own)
    else:
        return Axes(m, d, n, ())


@gluon.jit
def _line(at, d):
    return gl.load(at) // d, gl.load(at + 1), gl.load(at + 2) // d, gl.load(at + 3) // d


@gluon.jit
def asked(axes, RULES: gl.constexpr):
    """The queries of a launch."""
    if is_part(RULES):
        return axes.part
    else:
        return Asked((0, 0, 0), axes.n, (0, 0, 0), axes.m)


@gluon.jit
def own_ranks(NUMBER: gl.constexpr, first, RULES: gl.constexpr):
    """The first ranks of a group's cells."""
    if stack(RULES) == 1:
        return first[0], first[1] + NUMBER * side(RULES, 1), first[2]
    return first[0], first[1], first[2] + NUMBER * side(RULES, 2)


@gluon.jit
def ranks_of(number, own, RULES: gl.constexpr):
    """The ranks of the cells of a box, by their numbers."""
    SIDE1: gl.constexpr = side(RULES, 1)
    SIDE2: gl.constexpr = side(RULES, 2)
    return own[0] + number // (SIDE1 * SIDE2), own[1] + number // SIDE2 % SIDE1, own[2] + number % SIDE2


@gluon.jit
def is_there(ranks, stop):
    """Whether ranks are below those where the grid, or what is computed of it, stops."""
    return (ranks[0] < stop[0]) & (ranks[1] < stop[1]) & (ranks[2] < stop[2])


@gluon.jit
def cell_of(ranks, residue, d, n):
    """The position of a cell, row by row."""
    row = ((ranks[0] * d[0] + residue[0]) * n[1] + ranks[1] * d[1] + residue[1]) * n[2]  # [rows]
    return row + ranks[2] * d[2] + residue[2]


@gluon.jit
def row_of(sequence, ranks, residue, axes, RULES: gl.constexpr):
    """The row of a query in lse and delta, of a sequence's head."""
    own = asked(axes, RULES)
    row = sequence * own.cells[0] * own.cells[1] * own.cells[2]
    return row + cell_of(within(ranks, own.first), residue, axes.d, own.cells)


@gluon.jit
def within(ranks, first):
    """Ranks from the first that a tensor has."""
    return ranks[0] - first[0], ranks[1] - first[1], ranks[2] - first[2]


@gluon.jit
def moved(head, place, moves):
    """A coordinate on a descriptor's axis of heads, which holds sequences and residues as well."""
    residue = place.residue
    return head + place.b * moves[0] + residue[0] * moves[1] + residue[1] * moves[2] + residue[2] * moves[3]


@gluon.jit
def reaches_of(place, windows, axes, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """The boxes of keys that a tile of queries sees, along each axis; with OF_KEYS of queries that see its keys."""
    reach0 = _reach(place, windows, axes, 0, RULES, OF_KEYS)
    reach1 = _reach(place, windows, axes, 1, RULES, OF_KEYS)
    reach2 = _reach(place, windows, axes, 2, RULES, OF_KEYS)
    return reach0, reach1, reach2


@gluon.jit
def _reach(place, windows, axes, AXIS: gl.constexpr, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    if not exists(RULES, AXIS):
        return Reach(1, 0, 1, 1, 1, 0, False)
    SIDE: gl.constexpr = side(RULES, AXIS)
    SIZE: gl.constexpr = size(RULES, AXIS)
    STRIDE: gl.constexpr = stride(RULES, AXIS)
    CAUSAL: gl.constexpr = causal(RULES, AXIS)
    EDGE: gl.constexpr = edge(RULES, AXIS)
    m, first = axes.m[AXIS], place.first[AXIS]
    w = gl.load(windows + 3 * place.g + AXIS)
    own = asked(axes, RULES)
    stop = own.stop[AXIS]
    if OF_KEYS:
        start, end = queries_of(first, m, m, w, STRIDE, SIZE, CAUSAL, EDGE)
    else:
        start, _ = window(first, m, w, STRIDE, CAUSAL, EDGE)
        _, end = window(gl.minimum(first + SIZE, stop) - 1, m, w, STRIDE, CAUSAL, EDGE)
    if EDGE == WRAP:
        more = gl.where(start < 0, m, 0) + gl.where(start < -m, m, 0)
        begin = start + more
        count = gl.minimum(end - start, m)
        run = gl.minimum(count, m - begin)
        return Reach(w, begin, count, run, gl.cdiv(run, SIDE) + gl.cdiv(count - run, SIDE), more, end - start > m)
    if OF_KEYS & is_part(RULES):
        begin = gl.maximum(start, own.begin[AXIS])
        count = gl.maximum(gl.minimum(end, stop) - begin, 0)
    else:
        begin = gl.maximum(start, 0)
        count = gl.minimum(end, m) - begin
    return Reach(w, begin, count, count, gl.cdiv(count, SIDE), 0, False)


@gluon.jit
def count_of(reaches):
    """How many boxes there are."""
    return reaches[0].boxes * reaches[1].boxes * reaches[2].boxes


@gluon.jit
def box_of(step, reaches, axes, RULES: gl.constexpr):
    """The box of a step: its numbers along the axis of the groups and along the two others."""
    if stack(RULES) == 1:
        j0, j1, j2 = step[1], step[0], step[2]
    else:
        j0, j1, j2 = step[1], step[2], step[0]
    at0, rank0, left0 = _along(j0, reaches[0], axes.m[0], side(RULES, 0), edge(RULES, 0))
    at1, rank1, left1 = _along(j1, reaches[1], axes.m[1], side(RULES, 1), edge(RULES, 1))
    at2, rank2, left2 = _along(j2, reaches[2], axes.m[2], side(RULES, 2), edge(RULES, 2))
    return Box((at0, at1, at2), (rank0, rank1, rank2), (left0, left1, left2))


@gluon.jit
def _along(number, reach, m, SIDE: gl.constexpr, EDGE: gl.constexpr):
    at = reach.begin + number * SIDE
    rank = at
    left = reach.count - number * SIDE
    if EDGE == WRAP:
        boxes_before = gl.cdiv(reach.run, SIDE)
        late = number >= boxes_before
        at = gl.where(late, (number - boxes_before) * SIDE, at)
        rank = gl.where(late, at + m, at)
        left = gl.where(late, reach.count - reach.run - at, reach.run - number * SIDE)
    return at, rank, left


@gluon.jit
def following(step, reaches, RULES: gl.constexpr):
    """The next step; (0, 0, 0) is the first.

    The axis of the groups comes first: of each of its rows of boxes one group may not see the first, the other not the
    last, so that one group is a box ahead and its softmax runs beside the other's products.
    """
    s, a, b = step
    if stack(RULES) == 1:
        stacked, inner = reaches[1].boxes, reaches[2].boxes
    else:
        stacked, inner = reaches[2].boxes, reaches[1].boxes
    s = s + 1
    b = b + gl.where(s == stacked, 1, 0)
    a = a + gl.where(b == inner, 1, 0)
    return gl.where(s == stacked, 0, s), a, gl.where(b == inner, 0, b)


@gluon.jit
def fetch_tile(x, at, place, first, full, x_tiles, buffer, RULES: gl.constexpr):
    """Copies both groups' rows of a tile of x, which has ranks from `first` on."""
    for half in gl.static_range(2):
        own = within(own_ranks(half, place.first, RULES), first)
        tiles.async_load(x, [own[0], own[1], own[2], at, 0], full, x_tiles.index(2 * buffer + half))


@gluon.jit
def fetch(x, at, full, tile):
    """Copies a box to a stage of a ring, of another shape maybe."""
    tiles.async_load(x, at, full, tiles.reinterpret(tile, tile.dtype, x.block_shape, x.layout))


@gluon.jit
def rows_of(all_tiles, number):
    """The 64 rows of a group or of a box, as two axes."""
    ROWS: gl.constexpr = tiles.rows_of(all_tiles.shape)
    tile = all_tiles.index(number)  # [B0, B1, B2, 1]
    return tiles.reinterpret(tile, tile.dtype, [ROWS, all_tiles.shape[5]], tiles.shared_layout())


@gluon.jit
def send(values, all_tiles, number, descriptor, own, at):
    """Stores a result of a group in its rows of a tile, and sends it off; what lies outside of the grid is left out."""
    rows_of(all_tiles, number).store(values.to(all_tiles.dtype))
    fence_async_shared()
    if own[0] >= 0:  # without this ptxas 12.8 made an illegal instruction of it at 128 columns
        tiles.async_store(descriptor, [own[0], own[1], own[2], at, 0], all_tiles.index(number))
