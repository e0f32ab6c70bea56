"""Boxes of keys or queries on a grid, for all warp-specialised kernels for grids.

The copy engine reads a box, a rectangle of cells of one residue, as 64 rows of a tile. A box may begin at any cell, and
is zero outside of the grid. A program has two groups of 64 cells that lie next to each other along one axis (`stack`).
It walks over the boxes that hold what either group sees:

    +---------+---------+---------+      each square is a box of keys
    |  +------+--+      |         |      group 0 and group 1 are the queries of the tile
    |  | group 0 |      |         |      the boxes begin where the first window begins
    +--+---------+------+---------+
    |  | group 1 |      |         |
    |  +------+--+      |         |
    +---------+---------+---------+

All coordinates are ranks (`neighbourhood`). There are always three axes; those that the grid lacks have one cell.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from hilbert_lib.attention.triton.grid import WRAP, queries_of, window
from hilbert_lib.attention.triton.hopper import tiles

BUFFERS = gl.constexpr(2)  # buffers of tiles: the next tile is copied while the groups work on this one


class Rules(NamedTuple):
    """Constants that a kernel is compiled for, with a value for each of three axes."""

    box: tuple[int, int, int]  # cells along each axis, 64 in all
    keys: tuple[int, int, int]  # the same of a box of keys: `box`, or one of 128 where windows are whole boxes
    stack: int  # the axis along which the two groups lie next to each other; none (-1) where they share a box
    stride: tuple[int, int, int]
    is_causal: tuple[bool, bool, bool]
    edge: tuple[int, int, int]  # indices in patterns.neighbourhood.EDGES
    axes: int  # number of axes of the grid, which are the last of the three
    is_dilated: bool
    is_part: bool  # whether q holds, or the launch computes, a part of the cells of the keys
    is_split: bool  # whether the launch has the residues of one size, since a dilation does not divide its side


# Gluon reads no attributes of a constant. These functions do.
@gluon.constexpr_function
def side(rules, axis):
    """Cells of a box along an axis."""
    return rules.box[axis]


@gluon.constexpr_function
def key_side(rules, axis):
    """Cells of a box of keys along an axis."""
    return rules.keys[axis]


@gluon.constexpr_function
def size(rules, axis):
    """Cells of a tile along an axis."""
    return rules.box[axis] * (2 if axis == rules.stack else 1)


@gluon.constexpr_function
def before(rules, axis):
    """Cells of a box of keys along all earlier axes."""
    return (1, rules.keys[0], rules.keys[0] * rules.keys[1])[axis]


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


@gluon.constexpr_function
def is_split(rules):
    return rules.is_split


class Queries(NamedTuple):
    """The queries of a launch among the cells of the keys, a value for each axis."""

    first: tuple  # rank of the first cell of q
    cells: tuple  # number of cells of q
    begin: tuple  # rank of the first query that is computed
    stop: tuple  # rank after the last query that is computed


class Axes(NamedTuple):
    """The sizes of a grid of keys, a value for each of three axes."""

    m: tuple  # ranks of a residue
    d: tuple  # dilation
    n: tuple  # cells
    part: tuple  # `Queries`, or () where the queries are all cells of the grid


class Place(NamedTuple):
    """A tile: its sequence, head and KV head, and along each axis its first rank and its residue."""

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor
    first: tuple
    residue: tuple


class Reach(NamedTuple):
    """The boxes of a program along an axis: they cover `count` cells from `begin` on, round the end where it wraps."""

    w: gl.tensor  # the window
    begin: gl.tensor
    count: gl.tensor
    run: gl.tensor  # cells before the axis ends
    boxes: gl.tensor  # number of boxes
    moved: gl.tensor  # cells that were added to ranks below 0
    is_round: gl.tensor  # whether windows of the tile overlap themselves


class Box(NamedTuple):
    """A box, a value for each axis."""

    corner: tuple  # rank of its first cell
    rank: tuple  # the same, counted on past the end of an axis that wraps
    left: tuple  # cells that count


@gluon.jit
def axes_of(n, d, part, RULES: gl.constexpr):
    """The axes of a launch.

    part: for each axis first cell of q, cells of q, first and last + 1 of those computed; of a launch with residues of
    one size, their ranks.
    """
    m = n[0] // d[0], n[1] // d[1], n[2] // d[2]
    if is_split(RULES):
        return Axes((gl.load(part), gl.load(part + 1), gl.load(part + 2)), d, n, ())
    elif is_part(RULES):
        first0, cells0, begin0, stop0 = _line(part, d[0])
        first1, cells1, begin1, stop1 = _line(part + 8, d[1])
        first2, cells2, begin2, stop2 = _line(part + 16, d[2])
        queries = Queries(
            (first0, first1, first2), (cells0, cells1, cells2), (begin0, begin1, begin2), (stop0, stop1, stop2)
        )
        return Axes(m, d, n, queries)
    else:
        return Axes(m, d, n, ())


@gluon.jit
def _line(extent, d):
    return gl.load(extent) // d, gl.load(extent + 1), gl.load(extent + 2) // d, gl.load(extent + 3) // d


@gluon.jit
def launch_queries(axes, RULES: gl.constexpr):
    """The queries of a launch."""
    if is_part(RULES):
        return axes.part
    else:
        return Queries((0, 0, 0), axes.n, (0, 0, 0), axes.m)


@gluon.jit
def residues_of(axes, AXIS: gl.constexpr, RULES: gl.constexpr):
    """The first residue of a launch along an axis, and their number."""
    d = axes.d[AXIS]
    if is_split(RULES):
        # d residues of m ranks would have more cells than the axis (these are the first, long residues), or fewer
        # (these are the last, short ones).
        excess = axes.m[AXIS] * d - axes.n[AXIS]
        return gl.maximum(0 - excess, 0), gl.where(excess > 0, d - excess, d + excess)
    else:
        return 0, d


@gluon.jit
def corner_of(NUMBER: gl.constexpr, first, RULES: gl.constexpr):
    """The corner of a group: its lowest rank along each axis."""
    if stack(RULES) == 1:
        return first[0], first[1] + NUMBER * side(RULES, 1), first[2]
    return first[0], first[1], first[2] + NUMBER * side(RULES, 2)


@gluon.jit
def ranks_of(number, corner, RULES: gl.constexpr):
    """Ranks of the cells with these numbers, in the box at a corner."""
    SIDE1: gl.constexpr = side(RULES, 1)
    SIDE2: gl.constexpr = side(RULES, 2)
    return corner[0] + number // (SIDE1 * SIDE2), corner[1] + number // SIDE2 % SIDE1, corner[2] + number % SIDE2


@gluon.jit
def key_ranks_of(number, corner, RULES: gl.constexpr):
    """The same of a box of keys."""
    SIDE1: gl.constexpr = key_side(RULES, 1)
    SIDE2: gl.constexpr = key_side(RULES, 2)
    return corner[0] + number // (SIDE1 * SIDE2), corner[1] + number // SIDE2 % SIDE1, corner[2] + number % SIDE2


@gluon.jit
def is_there(ranks, stop):
    """Whether ranks lie before the end of the grid, or of its computed part."""
    return (ranks[0] < stop[0]) & (ranks[1] < stop[1]) & (ranks[2] < stop[2])


@gluon.jit
def cell_of(ranks, residue, d, n):
    """The position of a cell, row by row."""
    row = ((ranks[0] * d[0] + residue[0]) * n[1] + ranks[1] * d[1] + residue[1]) * n[2]  # [GROUP_ROWS]
    return row + ranks[2] * d[2] + residue[2]


@gluon.jit
def row_of(sequence, ranks, residue, axes, RULES: gl.constexpr):
    """The row of a query in lse and delta; `sequence` counts sequences and heads."""
    queries = launch_queries(axes, RULES)
    row = sequence * queries.cells[0] * queries.cells[1] * queries.cells[2]
    return row + cell_of(within(ranks, queries.first), residue, axes.d, queries.cells)


@gluon.jit
def within(ranks, first):
    """Ranks counted from the first one that a tensor holds."""
    return ranks[0] - first[0], ranks[1] - first[1], ranks[2] - first[2]


@gluon.jit
def moved(head, place, moves):
    """The coordinate on the axis of heads of a descriptor, which holds sequences and residues too."""
    residue = place.residue
    return head + place.b * moves[0] + residue[0] * moves[1] + residue[1] * moves[2] + residue[2] * moves[3]


@gluon.jit
def reaches_of(place, windows, axes, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    """Along each axis, the boxes of keys that a tile of queries sees; with OF_KEYS, of queries that see its keys."""
    reach0 = _reach(place, windows, axes, 0, RULES, OF_KEYS)
    reach1 = _reach(place, windows, axes, 1, RULES, OF_KEYS)
    reach2 = _reach(place, windows, axes, 2, RULES, OF_KEYS)
    return reach0, reach1, reach2


@gluon.jit
def _reach(place, windows, axes, AXIS: gl.constexpr, RULES: gl.constexpr, OF_KEYS: gl.constexpr):
    if not exists(RULES, AXIS):
        return Reach(1, 0, 1, 1, 1, 0, False)
    SIDE: gl.constexpr = key_side(RULES, AXIS)  # boxes of queries are as large
    SIZE: gl.constexpr = size(RULES, AXIS)
    STRIDE: gl.constexpr = stride(RULES, AXIS)
    CAUSAL: gl.constexpr = causal(RULES, AXIS)
    EDGE: gl.constexpr = edge(RULES, AXIS)
    m, first = axes.m[AXIS], place.first[AXIS]
    w = gl.load(windows + 3 * place.g + AXIS)
    queries = launch_queries(axes, RULES)
    stop = queries.stop[AXIS]
    if OF_KEYS:
        if EDGE == WRAP:  # and up to stride - 1 ranks more at both ends
            start, end = queries_of(first, m, m, w, STRIDE, SIZE, CAUSAL, EDGE)
        else:
            start, end = seers_of(first, m, w, SIZE, AXIS, RULES)
    else:
        start, _ = window(first, m, w, STRIDE, CAUSAL, EDGE)
        _, end = window(gl.minimum(first + SIZE, stop) - 1, m, w, STRIDE, CAUSAL, EDGE)
    if EDGE == WRAP:
        turn = gl.where(start < 0, m, 0) + gl.where(start < -m, m, 0)
        begin = start + turn
        count = gl.minimum(end - start, m)
        run = gl.minimum(count, m - begin)
        return Reach(w, begin, count, run, gl.cdiv(run, SIDE) + gl.cdiv(count - run, SIDE), turn, end - start > m)
    if OF_KEYS & is_part(RULES):
        begin = gl.maximum(start, queries.begin[AXIS])
        count = gl.maximum(gl.minimum(end, stop) - begin, 0)
    else:
        begin = gl.maximum(start, 0)
        count = gl.minimum(end, m) - begin
    return Reach(w, begin, count, count, gl.cdiv(count, SIDE), 0, False)


@gluon.jit
def seers_of(first, m, w, SIZE: gl.constexpr, AXIS: gl.constexpr, RULES: gl.constexpr):
    """First rank and last rank + 1 of the queries that see one of SIZE keys: whole groups of a stride.

    On an axis that wraps they may lie past its ends.
    """
    STRIDE: gl.constexpr = stride(RULES, AXIS)
    CAUSAL: gl.constexpr = causal(RULES, AXIS)
    EDGE: gl.constexpr = edge(RULES, AXIS)
    start, end = queries_of(first, m, m, w, 1, SIZE, CAUSAL, EDGE)  # of leaders  # [GROUP_ROWS] each
    if STRIDE > 1:
        # The leader of group g is g * STRIDE + LEAD or, in the last group, m - 1. A leader sees each key (w >= STRIDE).
        LEAD: gl.constexpr = STRIDE - 1 if CAUSAL else STRIDE // 2
        # No negative number is divided, and none grows past 32 bits.
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
def count_of(reaches):
    """Number of boxes of a tile."""
    return reaches[0].boxes * reaches[1].boxes * reaches[2].boxes


@gluon.jit
def box_of(step, reaches, axes, RULES: gl.constexpr):
    """The box of a step; a step numbers boxes along the axis of the groups, then along the two other axes."""
    if stack(RULES) == 1:
        j0, j1, j2 = step[1], step[0], step[2]
    else:
        j0, j1, j2 = step[1], step[2], step[0]
    first0, rank0, left0 = _along(j0, reaches[0], axes.m[0], key_side(RULES, 0), edge(RULES, 0))
    first1, rank1, left1 = _along(j1, reaches[1], axes.m[1], key_side(RULES, 1), edge(RULES, 1))
    first2, rank2, left2 = _along(j2, reaches[2], axes.m[2], key_side(RULES, 2), edge(RULES, 2))
    return Box((first0, first1, first2), (rank0, rank1, rank2), (left0, left1, left2))


@gluon.jit
def _along(number, reach, m, SIDE: gl.constexpr, EDGE: gl.constexpr):
    first = reach.begin + number * SIDE
    rank = first
    left = reach.count - number * SIDE
    if EDGE == WRAP:
        boxes_before = gl.cdiv(reach.run, SIDE)
        late = number >= boxes_before
        first = gl.where(late, (number - boxes_before) * SIDE, first)
        rank = gl.where(late, first + m, first)
        left = gl.where(late, reach.count - reach.run - first, reach.run - number * SIDE)
    return first, rank, left


@gluon.jit
def following(step, reaches, RULES: gl.constexpr):
    """The step after this one; the first is (0, 0, 0).

    The axis of the groups comes first. In each row of boxes along it one group may not see the first box, and the other
    not the last. So one group is a box ahead, and its softmax runs beside the products of the other.
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
def fetch_tile(x, head_at, place, first, full, x_tiles, buffer, RULES: gl.constexpr, COLUMN: gl.constexpr = 0):
    """Copy both groups' rows of a tile of x, from a column on; the first rank that x holds is `first`."""
    for half in gl.static_range(2):
        corner = within(corner_of(half, place.first, RULES), first)
        tiles.async_load(x, [corner[0], corner[1], corner[2], head_at, COLUMN], full, x_tiles.index(2 * buffer + half))


@gluon.jit
def fetch(x, coordinates, full, tile):
    """Copy a box to a stage of a ring; the stage may have another shape."""
    tiles.async_load(x, coordinates, full, tiles.reinterpret(tile, tile.dtype, x.block_shape, x.layout))


@gluon.jit
def rows_of(all_tiles, number):
    """The 64 rows of a group, or of a box, as two axes."""
    ROWS: gl.constexpr = tiles.rows_of(all_tiles.shape)
    tile = all_tiles.index(number)  # [rows, columns, cells, 1]
    return tiles.reinterpret(tile, tile.dtype, [ROWS, all_tiles.shape[5]], tiles.shared_layout(all_tiles.shape[5]))


@gluon.jit
def send(values, all_tiles, number, descriptor, corner, head_at, COLUMN: gl.constexpr = 0):
    """Store a group's result in its rows of a tile, and send them off to the columns from one on.

    Cells outside of the grid are not written.
    """
    rows_of(all_tiles, number).store(values.to(all_tiles.dtype))
    fence_async_shared()
    if corner[0] >= 0:  # without this condition ptxas 12.8 makes an illegal instruction at 128 columns
        tiles.async_store(descriptor, [corner[0], corner[1], corner[2], head_at, COLUMN], all_tiles.index(number))
