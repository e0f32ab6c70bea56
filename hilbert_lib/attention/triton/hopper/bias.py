"""Bias by relative position: tiles that the products of queries and keys are added to.

A program reads the table of its head from global memory, through the first cache: beside the rings shared memory has no
room for it. The launch divides the table by the scale and pads it, so that no pair of a group and a box that it sees
needs a bound:

    place of a pair, along an axis    rank of the column - rank of the row + centre
    places of the table               0 | margin | entry 0 ... entry 2 w - 2 | margin | up to a round number

Columns are keys or, for dk and dv, queries; then the table is flipped. A pair that does not attend has any entry.

The gradient is summed in whole numbers, whose sum is the same in any order: the bits are the same every time.

    a pair's gradient * unit        rounded; some pairs of a thread that share an entry are added before
    sums of a tile of queries       32 bits, in shared memory
    sums of the launch              64 bits, in global memory; `bias_tables` divides them by the unit
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hilbert_lib.attention.triton.grid import WRAP, window
from hilbert_lib.attention.triton.hopper import boxes, tiles
from hilbert_lib.attention.triton.hopper.bias_tables import unit_of


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


@gluon.constexpr_function
def _words(form):
    """Places of the sums of a tile: whole kilobytes, since the tiles that follow begin at such."""
    size = form.sides[0] * form.sides[1] * form.sides[2]
    return (size + 255) // 256 * 256


@gluon.constexpr_function
def _wraps(rules):
    """Whether places hang on more than the ranks of a row and of a column."""
    return 2 in rules.edge


class Sums(NamedTuple):
    """The gradient of a table of bias, where a launch computes it."""

    total: gl.tensor  # (heads, places) int64: a pointer
    bounds: gl.tensor  # (heads, 3) int32: a pointer
    address: gl.tensor  # of a tile's sums in shared memory
    full: gl.shared_memory_descriptor  # both groups added theirs
    free: gl.shared_memory_descriptor  # both groups cleared their half


class Table(NamedTuple):
    """The table of a head, beside a group of rows."""

    entries: gl.tensor  # a pointer
    ranks: tuple  # of the rows, along each axis
    place: gl.tensor  # [GROUP_ROWS], what the rows and the centre add to a place; axes that wrap are left to each box


@gluon.jit
def table_of(bias, h, ranks, RULES: gl.constexpr, FORM: gl.constexpr):
    """The `Table` of a head and a group of rows with these ranks."""
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
        return ranks * 0


@gluon.jit
def tile_of(
    table, box, reaches, axes, is_extra, RULES: gl.constexpr, FORM: gl.constexpr, OF_KEYS: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """The bias of a group of rows and a box, over the scale; that of extra keys is 0.

    With OF_KEYS rows are keys, and columns are queries.
    """
    if EXTRA:
        tile = gl.zeros(
            [tiles.GROUP_ROWS, tiles.GROUP_ROWS], gl.float32, tiles.product_layout(tiles.GROUP_ROWS)
        )  # [GROUP_ROWS, GROUP_ROWS]
        if not is_extra:
            tile = _of_box(table, box, reaches, axes, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, GROUP_ROWS]
        return tile
    else:
        return _of_box(table, box, reaches, axes, RULES, FORM, OF_KEYS)


@gluon.jit
def _of_box(table, box, reaches, axes, RULES: gl.constexpr, FORM: gl.constexpr, OF_KEYS: gl.constexpr):
    rows, cells = _places_of(
        table, box, reaches, axes, tiles.product_layout(tiles.GROUP_ROWS), RULES, FORM, OF_KEYS
    )  # [GROUP_ROWS, 1], [1, GROUP_ROWS]
    # Cells come last: what they add to an address is then a constant of each load.
    return gl.load(table.entries + rows + cells)


@gluon.jit
def _places_of(
    table, box, reaches, axes, SCORES: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr, OF_KEYS: gl.constexpr
):
    """Two parts of the places of a group of rows and a box, which are their sum."""
    column = gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(0, SCORES))  # [GROUP_ROWS]
    rows = (table.place + _of_corner(box, RULES, FORM))[:, None]  # [GROUP_ROWS, 1]
    rows = _round(rows, table, column, box, reaches, axes, 0, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1]
    rows = _round(rows, table, column, box, reaches, axes, 1, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1]
    rows = _round(rows, table, column, box, reaches, axes, 2, RULES, FORM, OF_KEYS)  # [GROUP_ROWS, 1]
    return rows, _of_cells(column, RULES, FORM)[None, :]


@gluon.jit
def _of_corner(box, RULES: gl.constexpr, FORM: gl.constexpr):
    """Addends to places from the corner of a box."""
    place = _along(box.rank[0], 0, RULES, FORM) + _along(box.rank[1], 1, RULES, FORM)
    return place + _along(box.rank[2], 2, RULES, FORM)


@gluon.jit
def _of_cells(number, RULES: gl.constexpr, FORM: gl.constexpr):
    """Addends to places from cells of a box, by their numbers."""
    ranks = boxes.ranks_of(number, (0, 0, 0), RULES)
    place = _along(ranks[0], 0, RULES, FORM) + _along(ranks[1], 1, RULES, FORM)  # [GROUP_ROWS]
    return place + _along(ranks[2], 2, RULES, FORM)


@gluon.jit
def _along(rank, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr):
    STEP: gl.constexpr = _step(FORM, AXIS)
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) != WRAP:
        return rank * STEP
    else:
        return rank * 0


@gluon.jit
def _round(
    rows, table, column, box, reaches, axes, AXIS: gl.constexpr, RULES: gl.constexpr, FORM: gl.constexpr,
    OF_KEYS: gl.constexpr,
):  # fmt: skip
    """Places with those along an axis that wraps: a key's rank is counted on from the start of its query's window."""
    if boxes.exists(RULES, AXIS) and boxes.edge(RULES, AXIS) == WRAP:
        STEP: gl.constexpr = _step(FORM, AXIS)
        CENTRE: gl.constexpr = _centre(FORM, AXIS)
        m = axes.m[AXIS]
        own = table.ranks[AXIS][:, None]  # [GROUP_ROWS, 1]
        others = (box.corner[AXIS] + boxes.ranks_of(column, (0, 0, 0), RULES)[AXIS])[None, :]  # [1, GROUP_ROWS]
        key, query = (own, others) if OF_KEYS else (others, own)
        start, _ = window(query, m, reaches[AXIS].w, boxes.stride(RULES, AXIS), False, WRAP)
        ahead = key - start  # [GROUP_ROWS, columns]
        ahead = gl.where(ahead < 0, ahead + m, ahead)  # [GROUP_ROWS, columns]
        ahead = gl.where(ahead >= m, ahead - m, ahead)  # [GROUP_ROWS, columns]
        away = ahead + start - query  # [GROUP_ROWS, columns]
        away = 0 - away if OF_KEYS else away  # [GROUP_ROWS, columns]
        # Cells outside of the grid, and keys that no query sees, may lie anywhere.
        place = gl.minimum(gl.maximum(away + CENTRE, 0), 2 * CENTRE)  # [GROUP_ROWS, columns]
        rows = rows + place * STEP  # [GROUP_ROWS, 1]
    return rows


@gluon.jit
def shared_sums(first, FORM: gl.constexpr):
    """The address of a tile's sums in shared memory. Gluon tells no address of its own tiles; `first` is any number."""
    return gl.inline_asm_elementwise(_shared_asm(_words(FORM)), "=r,r", [first], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _shared_asm(words):
    return f"{{ .shared .align 1024 .b32 bias_sums[{words}]; mov.u32 $0, bias_sums; }}"


@gluon.jit
def clear(NUMBER: gl.constexpr, sums, FORM: gl.constexpr):
    """Clear a group's half of the sums in shared memory, which hold anything at first."""
    HALF: gl.constexpr = _words(FORM) // 2
    number = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))  # [128]
    for first in range(NUMBER * HALF, (NUMBER + 1) * HALF, 128):
        _taken(sums.address + 4 * (first + number))
    _arrive(sums.free)


@gluon.jit
def _arrive(barrier):
    """Arrive for a group once all of its warps are here. Triton does not see what assembly does in shared memory."""
    tiles.group_barrier()
    mbarrier.arrive(barrier.index(0))


@gluon.jit
def begin(sums, h, turn):
    """The unit of a head, once the sums of the tile before are cleared."""
    mbarrier.wait(sums.free.index(0), turn & 1)
    bounds = sums.bounds + 3 * h
    return unit_of(gl.load(bounds), gl.load(bounds + 1), gl.load(bounds + 2))


@gluon.jit
def flush(NUMBER: gl.constexpr, sums, h, turn, FORM: gl.constexpr):
    """Add the sums of a tile to those of the launch, once both groups have added theirs; each group moves a half."""
    HALF: gl.constexpr = _words(FORM) // 2
    _arrive(sums.full)
    mbarrier.wait(sums.full.index(0), turn & 1)
    number = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))  # [128]
    total = sums.total + h.to(gl.int64) * _size(FORM)
    for first in range(NUMBER * HALF, (NUMBER + 1) * HALF, 128):
        place = first + number  # [128]
        value = _taken(sums.address + 4 * place)  # [128]
        gl.atomic_add(total + place, value.to(gl.int64), mask=(place < _size(FORM)) & (value != 0), sem="relaxed")
    _arrive(sums.free)


@gluon.jit
def _taken(address):
    """The sums at some addresses, which become 0."""
    return gl.inline_asm_elementwise(
        "ld.shared.s32 $0, [$1]; st.shared.s32 [$1], 0;", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def added(slopes, sums, unit, table, box, reaches, axes, RULES: gl.constexpr, FORM: gl.constexpr):
    """The gradients of scores of a group of queries and a box, unchanged, once they are added to the tile's sums."""
    SCORES: gl.constexpr = slopes.type.layout
    if _wraps(RULES):
        rows, cells = _places_of(
            table, box, reaches, axes, SCORES, RULES, FORM, False
        )  # [GROUP_ROWS, 1], [1, GROUP_ROWS]
        return gl.inline_asm_elementwise(
            "{ .reg .s32 whole; .reg .f32 scaled; mul.f32 scaled, $1, $3; cvt.rni.s32.f32 whole, scaled; "
            "red.shared.add.s32 [$2], whole; mov.f32 $0, $1; }",
            "=f,0,r,f", [slopes, sums.address + 4 * (rows + cells), unit], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        ELEMENTS: gl.constexpr = tiles.of_a_thread(slopes.shape)
        # Of a thread's columns the first one: the others are 1, 8, 16 and 32 farther.
        column = gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(0, SCORES)) & 6  # [GROUP_ROWS]
        rows = (table.place + _of_corner(box, RULES, FORM))[:, None]  # [GROUP_ROWS, 1]
        address = sums.address + 4 * (rows + _of_cells(column, RULES, FORM)[None, :])  # [GROUP_ROWS, GROUP_ROWS]
        return gl.inline_asm_elementwise(
            _added_asm(RULES, FORM), _added_constraints(ELEMENTS), [slopes, address, unit],
            dtype=gl.float32, is_pure=False, pack=ELEMENTS,
        )  # fmt: skip


@gluon.constexpr_function
def _added_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n + ["f"] * n)


@gluon.constexpr_function
def _added_asm(rules, form):
    # A thread holds two rows, 8 apart, and 16 columns: two elements of each row in turn, the next ones 8 columns on.
    steps = (form.sides[1] * form.sides[2], form.sides[2], 1)

    def place(number):
        _, side1, side2 = rules.box
        ranks = number // (side1 * side2), number // side2 % side1, number % side2
        return sum(rank * step for rank, step in zip(ranks, steps))  # noqa: B905 - as many

    sharing = {}  # elements by their place
    for n in range(32):
        sharing.setdefault(place(8 * (n // 4) + n % 2) - place(8 * (n // 2 % 2)), []).append(n)
    lines = []
    for at, elements in sharing.items():
        lines += [f"mov.f32 sum, ${elements[0]};", *(f"add.f32 sum, sum, ${n};" for n in elements[1:])]
        lines += ["mul.f32 sum, sum, $96;", "cvt.rni.s32.f32 whole, sum;", f"red.shared.add.s32 [$64+{4 * at}], whole;"]
    return "{ .reg .f32 sum; .reg .s32 whole; " + " ".join(lines) + " }"
