"""Attention in windows on a square grid, from twenty naive lines to boxes: the kernels of notebook 11, in Gluon.

Tensors are (cells, heads, D), contiguous, cells row by row. On a GPU Triton compiles this file; elsewhere `numpy_tiles`
runs it. They are lessons: the library's own kernels are in `attention/triton`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib import internals

TILE = gl.constexpr(64)  # queries of a program, and keys of a tile
LOW = gl.constexpr(-1e30)  # below every score, and finite: -inf - -inf would be NaN
# Whether keys are read in all tiles of the grid, in those that a window touches, or from the windows' own corner on.
ALL, TOUCHED, CORNER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
group_barrier = internals.group_barrier()
async_load = internals.async_load()
reinterpret = internals.reinterpret()


@gluon.constexpr_function
def score_layout(columns):
    """Layout of a [64, columns] product in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(columns):
    """Layout of a [rows, columns] tile that is read row by row, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def shared_layout():
    """Layout of a [64, columns] tile in shared memory, as the tensor cores take it."""
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.jit
def first_seen(cell, side, window):
    """The first row or column of a window around a cell: windows at a border are moved inside."""
    return gl.minimum(gl.maximum(cell - window // 2, 0), side - window)


@gluon.jit
def is_seen(y, x, key_y, key_x, side, window):
    """Whether queries at rows y, columns x see keys at key_y, key_x, which may lie outside of the grid."""
    top, left = first_seen(y, side, window), first_seen(x, side, window)  # [TILE, 1] each
    return (key_y >= top) & (key_y < top + window) & (key_x >= left) & (key_x < left + window)


# Step 1.


@gluon.jit
def row_kernel(q, k, v, out, side, window, scale, heads, D: gl.constexpr):
    """One query a program. It computes its scores with all keys twice: for the largest, then for the sums."""
    ROWS: gl.constexpr = row_layout(D)
    query, head = gl.program_id(0), gl.program_id(1)
    column = gl.arange(0, D, gl.SliceLayout(0, ROWS))  # [D]
    number = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))  # [TILE]
    q_row = gl.load(q + (query * heads + head) * D + column).to(gl.float32)  # [D]
    largest = gl.full([], LOW, gl.float32)
    for start in range(0, side * side, TILE):
        scores = row_scores(q_row, k, start + number, column, query, head, side, window, scale, heads, D)  # [TILE]
        largest = gl.maximum(largest, gl.max(scores, 0))
    total = gl.zeros([], gl.float32)
    acc = gl.zeros([D], gl.float32, gl.SliceLayout(0, ROWS))  # [D]
    for start in range(0, side * side, TILE):
        scores = row_scores(q_row, k, start + number, column, query, head, side, window, scale, heads, D)  # [TILE]
        weights = gl.exp2(scores - largest)  # [TILE]
        at = ((start + number) * heads + head) * D  # [TILE]
        v_rows = gl.load(v + at[:, None] + column[None, :]).to(gl.float32)  # [TILE, D]
        total += gl.sum(weights, 0)
        acc += gl.sum(weights[:, None] * v_rows, 0)  # [D]
    gl.store(out + (query * heads + head) * D + column, (acc / total).to(out.dtype.element_ty))


@gluon.jit
def row_scores(q_row, k, keys, column, query, head, side, window, scale, heads, D: gl.constexpr):
    """Scores of one query with some keys, [TILE]; -inf where it does not see a key."""
    at = (keys * heads + head) * D  # [TILE]
    k_rows = gl.load(k + at[:, None] + column[None, :]).to(gl.float32)  # [TILE, D]
    seen = is_seen(query // side, query % side, keys // side, keys % side, side, window)  # [TILE]
    return gl.where(seen, gl.sum(k_rows * q_row[None, :], 1) * scale, float("-inf"))


# Steps 2 to 7. All that the steps change is a constant.


@gluon.jit
def tile_kernel(
    q, k, v, out, side, window, scale, heads,
    D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries a program, a rectangle of ROWS x COLUMNS cells, against rectangles of keys of the same shape.

    KEYS: which rectangles: ALL, TOUCHED or CORNER. STAGES: 0 reads each element by its address. 1 has TMA copy a whole
    rectangle, for which k and v are descriptors. 2 has it copy the next one meanwhile.
    """
    SCORES: gl.constexpr = score_layout(TILE)
    head = gl.program_id(1)
    top = gl.program_id(0) // (side // COLUMNS) * ROWS
    left = gl.program_id(0) % (side // COLUMNS) * COLUMNS
    number = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))  # [TILE]
    key_number = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))  # [TILE]
    y, x = top + number // COLUMNS, left + number % COLUMNS  # [TILE] each
    q_tile = gl.allocate_shared_memory(out.dtype.element_ty, [TILE, D], shared_layout())
    q_tile.store(read(q, top, left, head, side, heads, D, ROWS, COLUMNS))
    fence_async_shared()  # else the tensor cores may not see what was stored
    if STAGES == 0:
        k_tiles = gl.allocate_shared_memory(q_tile.dtype, [1, TILE, D], shared_layout())
        v_tiles = gl.allocate_shared_memory(q_tile.dtype, [1, TILE, D], shared_layout())
        full = 0
    else:
        k_tiles = gl.allocate_shared_memory(q_tile.dtype, [STAGES, ROWS, COLUMNS, 1, D], k.layout)
        v_tiles = gl.allocate_shared_memory(q_tile.dtype, [STAGES, ROWS, COLUMNS, 1, D], v.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
    first_y, stop_y = reach(top, top + ROWS - 1, side, window, ROWS, KEYS)
    first_x, stop_x = reach(left, left + COLUMNS - 1, side, window, COLUMNS, KEYS)
    across = gl.cdiv(stop_x - first_x, COLUMNS)
    count = gl.cdiv(stop_y - first_y, ROWS) * across
    largest = gl.full([TILE], LOW, gl.float32, gl.SliceLayout(1, SCORES))  # [TILE]
    total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, SCORES))  # [TILE]
    acc = gl.zeros([TILE, D], gl.float32, score_layout(D))  # [TILE, D]
    if STAGES == 2:
        copy(k, v, first_y, first_x, head, k_tiles, v_tiles, full, 0)
    for j in range(count):
        key_top, key_left = first_y + j // across * ROWS, first_x + j % across * COLUMNS
        group_barrier()  # all warps are done with the tile that is written next
        if STAGES == 0:
            k_tiles.index(0).store(read(k, key_top, key_left, head, side, heads, D, ROWS, COLUMNS))
            v_tiles.index(0).store(read(v, key_top, key_left, head, side, heads, D, ROWS, COLUMNS))
            fence_async_shared()
        else:
            ahead = j + STAGES - 1
            if ahead < count:
                ahead_top, ahead_left = first_y + ahead // across * ROWS, first_x + ahead % across * COLUMNS
                copy(k, v, ahead_top, ahead_left, head, k_tiles, v_tiles, full, ahead)
            mbarrier.wait(full.index(j % STAGES), j // STAGES & 1)
        k_tile, v_tile = rows_of(k_tiles, j, D), rows_of(v_tiles, j, D)  # [TILE, D] each
        key_y, key_x = key_top + key_number // COLUMNS, key_left + key_number % COLUMNS  # [TILE] each
        seen = is_seen(y[:, None], x[:, None], key_y[None, :], key_x[None, :], side, window)  # [TILE, TILE]
        scores = product(q_tile, k_tile.permute((1, 0)), gl.zeros([TILE, TILE], gl.float32, SCORES))  # [TILE, TILE]
        scores = gl.where(seen, scores * scale, float("-inf"))  # [TILE, TILE]
        before = largest  # [TILE]
        largest = gl.maximum(before, gl.max(scores, 1))  # [TILE]
        decay = gl.exp2(before - largest)  # [TILE]
        weights = gl.exp2(scores - largest[:, None])  # [TILE, TILE]
        total = total * decay + gl.sum(weights, 1)  # [TILE]
        decay = gl.convert_layout(decay, gl.SliceLayout(1, score_layout(D)))  # [TILE]
        weights = weights.to(q_tile.dtype)  # [TILE, TILE]
        weights = gl.convert_layout(weights, gl.DotOperandLayout(0, score_layout(D), 2))  # [TILE, TILE]
        acc = product(weights, v_tile, acc * decay[:, None])  # [TILE, D]
    total = gl.convert_layout(total, gl.SliceLayout(1, score_layout(D)))  # [TILE]
    write(out, (acc / total[:, None]).to(q_tile.dtype), top, left, head, side, heads, D, ROWS, COLUMNS)


@gluon.jit
def reach(first, last, side, window, STEP: gl.constexpr, KEYS: gl.constexpr):
    """Rows, or columns, of the keys that queries from `first` to `last` are held against: the first, and past the last.

    Rectangles are STEP apart. TOUCHED begins where a rectangle of the grid begins, CORNER where the window does.
    """
    if KEYS == ALL:
        start = side * 0
        stop = side
    else:
        start = first_seen(first, side, window)
        stop = first_seen(last, side, window) + window
        if KEYS == TOUCHED:
            start = start // STEP * STEP
    return start, stop


@gluon.jit
def places(x, top, left, head, side, heads, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Addresses of a rectangle of cells, and which of them lie on the grid; both [TILE, D]."""
    LAYOUT: gl.constexpr = row_layout(D)
    number = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))  # [TILE]
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))  # [D]
    cell_y, cell_x = top + number // COLUMNS, left + number % COLUMNS  # [TILE] each
    at = ((cell_y * side + cell_x) * heads + head) * D  # [TILE]
    exists = (cell_y < side) & (cell_x < side)  # [TILE]
    return x + at[:, None] + column[None, :], exists[:, None] & (column >= 0)[None, :]


@gluon.jit
def read(x, top, left, head, side, heads, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A rectangle of cells, [TILE, D], zero outside of the grid, each element by its address."""
    pointers, exists = places(x, top, left, head, side, heads, D, ROWS, COLUMNS)  # [TILE, D] each
    return gl.load(pointers, exists, other=0.0)


@gluon.jit
def write(x, values, top, left, head, side, heads, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Store a [TILE, D] rectangle of cells."""
    pointers, exists = places(x, top, left, head, side, heads, D, ROWS, COLUMNS)  # [TILE, D] each
    gl.store(pointers, gl.convert_layout(values, row_layout(D)), exists)


@gluon.jit
def copy(k, v, top, left, head, k_tiles, v_tiles, full, number):
    """Have TMA copy a box of k and of v that begins at any cell, zeros outside of the grid, to the next stage."""
    stage = number % k_tiles.shape[0]
    mbarrier.expect(full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
    async_load(k, [top, left, head, 0], full.index(stage), k_tiles.index(stage))
    async_load(v, [top, left, head, 0], full.index(stage), v_tiles.index(stage))


@gluon.jit
def rows_of(tiles, number, D: gl.constexpr):
    """The tile of a stage as rows of keys, [TILE, D]."""
    tile = tiles.index(number % tiles.shape[0])  # [ROWS, COLUMNS, 1, D]
    return reinterpret(tile, tile.dtype, [TILE, D], shared_layout())


@gluon.jit
def product(a, b, acc):
    """acc + a @ b on the tensor cores, waited for."""
    return warpgroup_mma_wait(0, deps=[warpgroup_mma(a, b, acc, is_async=True)])
