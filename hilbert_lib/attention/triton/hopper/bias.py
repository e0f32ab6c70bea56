"""Bias by relative position: tiles that the products of queries and keys are added to.

A program reads the table of its head from global memory, through the first cache: beside the rings shared memory has no
room for it. The launch divides the table by the scale and pads it, so that no pair of a group and a box that it sees
needs a bound:

    place of a pair, along an axis    rank of the column - rank of the row + centre
    places of the table               0 | margin | entry 0 ... entry 2 w - 2 | margin | up to a round number

Columns are keys or, for dk and dv, queries; then the table is flipped. A pair that does not attend has any entry.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton.grid import WRAP, window
from hilbert_lib.attention.triton.hopper import boxes, tiles


class Form(NamedTuple):
    """Constants of a padded table, a value for each of three axes."""

    centre: tuple[int, int, int]  # the place of a key whose rank is its query's
    sides: tuple[int, int, int]  # places


# Gluon reads no attributes of a constant. These functions do.
@gluon.constexpr_function
def _centre(form, axis):
    return form.centre[axis]


@gluon.constexpr_function
def _step(form, axis):
    """Places from one to the next along an axis."""
    return (form.sides[1] * form.sides[2], form.sides[2], 1)[axis]


@gluon.constexpr_function
def _size(form):
    """Places of the table of a head."""
    return form.sides[0] * form.sides[1] * form.sides[2]


class Table(NamedTuple):
    """The table of a head, beside a group of rows."""

    entries: gl.tensor  # a pointer
    ranks: tuple  # of the rows, along each axis
    place: gl.tensor  # [GROUP_ROWS], what the rows and the centre add to a place; axes that wrap are left to each box


@gluon.jit
def table_of(bias, h, ranks, RULES: gl.constexpr, FORM: gl.constexpr):
    """The `Table` of a head and a group of rows with these ranks, or () without a bias."""
    if FORM is None:
        return ()
    else:
        place = _of_row(ranks[0], 0, RULES, FORM) + _of_row(ranks[1], 1, RULES, FORM)  # [GROUP_ROWS]
        place = place + _of_row(ranks[2], 2, RULES, FORM)  # [GROUP_ROWS]
        return Table(bias + h.to(gl.int64) * _size(FORM), ranks, place)


@gluon.jit
def _of_row(ranks, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr):
    STEP: gl.constexpr = _step(FORM, AXIS)
    CENTRE: gl.constexpr = _centre(FORM, AXIS)
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) != WRAP:
        return (CENTRE - ranks) * STEP
    else:
        return gl.zeros_like(ranks)


@gluon.jit
def tile_of(
    table, box, reaches, axes, is_extra, RULES: gl.constexpr, FORM: gl.constexpr, OF_KEYS: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """The bias of a group of rows and a box, over the scale; that of extra keys is 0. Without a bias it is None.

    With OF_KEYS rows are keys, and columns are queries.
    """
    if FORM is None:
        return None
    elif EXTRA:
        tile = gl.zeros(
            [tiles.GROUP_ROWS, tiles.GROUP_ROWS], gl.float32, tiles.product_layout(tiles.GROUP_ROWS)
        )  # [GROUP_ROWS, columns]
        if not is_extra:
            tile = _of_box(table, box, reaches, axes, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, columns]
        return tile
    else:
        return _of_box(table, box, reaches, axes, RULES, FORM, OF_KEYS)


@gluon.jit
def _of_box(table, box, reaches, axes, RULES: gl.constexpr, FORM: gl.constexpr, OF_KEYS: gl.constexpr):
    SCORES: gl.constexpr = tiles.product_layout(tiles.GROUP_ROWS)
    column = gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(0, SCORES))  # [columns]
    ranks = boxes.ranks_of(column, (0, 0, 0), RULES)
    # The box's own place is one number, and those of its cells are constants of each thread's loads.
    corner = _of_corner(box, 0, RULES, FORM) + _of_corner(box, 1, RULES, FORM) + _of_corner(box, 2, RULES, FORM)
    cells = _of_cell(ranks, 0, RULES, FORM) + _of_cell(ranks, 1, RULES, FORM)  # [columns]
    cells = cells + _of_cell(ranks, 2, RULES, FORM)  # [columns]
    entries = table.entries + corner + table.place[:, None]  # [GROUP_ROWS, 1]
    entries = _round(entries, table, ranks, box, reaches, axes, 0, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1 or columns]
    entries = _round(entries, table, ranks, box, reaches, axes, 1, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1 or columns]
    entries = _round(entries, table, ranks, box, reaches, axes, 2, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1 or columns]
    return gl.load(entries + cells[None, :])


@gluon.jit
def _of_corner(box, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr):
    STEP: gl.constexpr = _step(FORM, AXIS)
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) != WRAP:
        return box.rank[AXIS] * STEP
    else:
        return 0


@gluon.jit
def _of_cell(ranks, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr):
    STEP: gl.constexpr = _step(FORM, AXIS)
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) != WRAP:
        return ranks[AXIS] * STEP
    else:
        return gl.zeros_like(ranks[AXIS])


@gluon.jit
def _round(
    entries, table, ranks, box, reaches, axes, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr,
    OF_KEYS: gl.constexpr,
):  # fmt: skip
    """Entries moved along an axis that wraps: a key's rank is counted on from the start of its query's window."""
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) == WRAP:
        STEP: gl.constexpr = _step(FORM, AXIS)
        CENTRE: gl.constexpr = _centre(FORM, AXIS)
        m = axes.m[AXIS]
        rows, columns = table.ranks[AXIS][:, None], (box.corner[AXIS] + ranks[AXIS])[None, :]
        key, query = (rows, columns) if OF_KEYS else (columns, rows)
        start, _ = window(query, m, reaches[AXIS].w, boxes.stride(RULES, AXIS), False, WRAP)
        ahead = key - start  # [GROUP_ROWS, columns]
        ahead = gl.where(ahead < 0, ahead + m, ahead)  # [GROUP_ROWS, columns]
        ahead = gl.where(ahead >= m, ahead - m, ahead)  # [GROUP_ROWS, columns]
        away = ahead + start - query  # [GROUP_ROWS, columns]
        away = -away if OF_KEYS else away  # [GROUP_ROWS, columns]
        # Cells outside of the grid, and keys that no query sees, may lie anywhere.
        place = gl.minimum(gl.maximum(away + CENTRE, 0), 2 * CENTRE)  # [GROUP_ROWS, columns]
        entries = entries + place * STEP  # [GROUP_ROWS, columns]
    return entries
