"""The backward's dk and dv for Hopper at a head_dim above 128, with the same bits every time: one program for 64 keys.

Two groups of warps share the keys, in the steps of `wide`: x and y are k and v, a and b blocks of 64 queries of q and
dout. Scores are computed transposed, keys by queries, so that weights and slopes stay in registers for dv and dk:

    group     product            makes                               adds to
    weights   k q (scores)       p = exp(scores - lse)               dv: p dout
    slopes    v dout             slopes = p (v dout - delta)         dk: slopes q

A key is one row of every product. So keys that are masked or not there need no mask before the end, whatever they hold.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import backward, dropout, steps, tiles, wide
from hilbert_lib.attention.triton.hopper.wide import LOW


class Shared(NamedTuple):
    """Shared memory of a program: its tile of k and v, rings of blocks of q and dout, and what the groups exchange."""

    x: wide.Parts  # [1, ...]
    y: wide.Parts
    a: wide.Parts  # [stages, ...]
    b: wide.Parts  # [B_STAGES, ...]
    lse_rows: gl.shared_memory_descriptor  # [stages, 64]
    delta_rows: gl.shared_memory_descriptor  # [B_STAGES, 64]
    weights: gl.shared_memory_descriptor  # [64, 64], float32; with dropout those that are dropped have a minus
    a_full: gl.shared_memory_descriptor
    a_free: gl.shared_memory_descriptor
    b_full: gl.shared_memory_descriptor
    b_free: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor
    weights_free: gl.shared_memory_descriptor


@gluon.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def wide_keys_kernel(
    k, v, lse, delta, dk, dv,
    q0, d0, q1, d1, q2, d2, q3, d3, q4, d4, q5, d5,
    q0_high, d0_high, q1_high, d1_high, q2_high, d2_high, q3_high, d3_high, q4_high, d4_high, q5_high, d5_high,
    branches, offsets, branch_ids, items, classes, padding, seed,
    scale, drop_below, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr, B_STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of 64 keys.

    With READ_PARTIAL they are added to those in memory. With PADDING no query is read where all keys of a tile are
    masked. The last block of a segment also holds rows of the next one, with weight 0: a NaN in these does reach the
    gradients of this segment. With DROPOUT the keys of a tile must be neighbours in one branch, from a multiple of
    four on: four share random bits.
    """
    # q0 to d5: descriptors of q and dout as [batch, row, residue, head, dim], a pair for each branch. Those of high
    # parts differ where these have fewer columns than low ones.
    gl.static_assert(N_BRANCHES == 1 or not DROPOUT, "keys that are neighbours in one branch are not in another")
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    x_tiles = wide.allocated_rows(q0, 1, BLOCK_E)
    y_tiles = wide.allocated_rows(q0, 1, BLOCK_E)
    a_tiles = wide.allocated_rows(q0, STAGES, BLOCK_E)
    b_tiles = wide.allocated_rows(q0, B_STAGES, BLOCK_E)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], row_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [B_STAGES, ROWS], row_layout)
    # Eight rows of a quarter of a product, which a warp writes at once, lie in all banks.
    exchanged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    weights = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], exchanged)
    # Rows of lse come with a, rows of delta with b: the copying warp arrives once more.
    a_full = wide.barriers(STAGES, 2)  # [STAGES, 1]
    a_free = wide.barriers(STAGES, 2)  # [STAGES, 1]
    b_full = wide.barriers(B_STAGES, 2)  # [B_STAGES, 1]
    b_free = wide.barriers(B_STAGES, 2)  # [B_STAGES, 1]
    weights_full = wide.barriers(1, 1)  # [COUNT, 1]
    weights_free = wide.barriers(1, 1)  # [COUNT, 1]
    shared = Shared(
        x_tiles, y_tiles, a_tiles, b_tiles, lse_rows, delta_rows, weights, a_full, a_free, b_full, b_free, weights_full,
        weights_free,
    )  # fmt: skip
    tables, sizes = (branches, offsets, items, classes), (keys, kv_heads, group)
    grid = (chunk, stride, chunks, phases, count)
    # The arguments are written out: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_weigh, (
            k, dv, tables, branch_ids, shared, seed, scale, drop_below, stride_kb, stride_kn, stride_kh,
            sizes, grid, padding, HEAD_DIM, BLOCK_E, N_BRANCHES, CAUSAL, READ_PARTIAL, PADDING, DROPOUT,
        )),
        (_slope, (
            v, dk, tables, shared, scale, drop_below, stride_vb, stride_vn, stride_vh,
            sizes, grid, padding, HEAD_DIM, BLOCK_E, N_BRANCHES, CAUSAL, READ_PARTIAL, PADDING, DROPOUT,
        )),
        (_copy, (
            (q0, q1, q2, q3, q4, q5), (d0, d1, d2, d3, d4, d5),
            (q0_high, q1_high, q2_high, q3_high, q4_high, q5_high),
            (d0_high, d1_high, d2_high, d3_high, d4_high, d5_high),
            lse, delta, tables, shared, sizes, grid, padding, BLOCK_E, N_BRANCHES, CAUSAL, PADDING,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _read_count(padding, b, tile, keys, WARPS: gl.constexpr, PADDING: gl.constexpr):
    """Number of a tile's rows or, with PADDING, of its keys that are not masked."""
    return backward.read_count_of(padding, b, tile, keys, tiles.GROUP_ROWS, WARPS, PADDING)


@gluon.jit
def _copy(
    q_low, d_low, q_high, d_high, lse, delta, tables, shared, sizes, grid, padding, BLOCK_E: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, PADDING: gl.constexpr,
):  # fmt: skip
    """Copy blocks of q and dout, lse (to base 2) and delta into the rings, in the order of their use."""
    b, g, tile, branches, _place = backward.tile_of(tables, sizes, grid, False)
    keys = sizes[0]
    read_count = _read_count(padding, b, tile, keys, 1, PADDING)
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
        if (read_count > 0) & inside:
            begin, n = backward.range_of(start, w, r, o, tile.lowest, keys, CAUSAL)
            row, residue = tiles.segment_coordinates(start + o, r, n, keys)
            if BLOCK_E == LOW:
                block = _copy_segment(
                    q_low[i], q_low[i], d_low[i], d_low[i], lse, delta, shared, block, begin, n, row, residue,
                    start + o, r, b, g, sizes,
                )  # fmt: skip
            else:
                block = _copy_segment(
                    q_low[i], q_high[i], d_low[i], d_high[i], lse, delta, shared, block, begin, n, row, residue,
                    start + o, r, b, g, sizes,
                )  # fmt: skip


@gluon.jit
def _copy_segment(
    q_low, q_high, d_low, d_high, lse, delta, shared, block, begin, n, row, residue, origin, r, b, g, sizes
):
    """Copy queries `begin` to n of a segment, one head of the group after the other."""
    keys, kv_heads, group = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    for member in range(group):
        h = g * group + member
        lse_head = lse + (b.to(gl.int64) * kv_heads * group + h) * keys
        delta_head = delta + (b.to(gl.int64) * kv_heads * group + h) * keys
        for j in range(begin, n, ROWS):
            corner = (b, row + j, residue)
            wide.fetch(q_low, q_high, corner, h, shared.a, shared.a_full, shared.a_free, block)
            wide.fetch(d_low, d_high, corner, h, shared.b, shared.b_full, shared.b_free, block)
            number = j + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))  # [GROUP_ROWS]
            query = origin + number * r  # [GROUP_ROWS]
            # Weight 0 past the end of the segment, and where a query saw no key.
            lse_row = gl.load(lse_head + query, mask=number < n, other=float("inf"))  # [GROUP_ROWS]
            lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row) * geometry.LOG2_E  # [GROUP_ROWS]
            delta_row = gl.load(delta_head + query, mask=number < n, other=0.0)  # [GROUP_ROWS]
            wide.hand_rows_over(lse_row, delta_row, shared, block)
            block = tiles.counted(block + 1)
    return block


@gluon.jit
def _weigh(
    k, dv, tables, branch_ids, shared, seed, scale, drop_below, stride_b, stride_n, stride_h, sizes, grid, padding,
    HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """The weights of the keys and every block of queries, transposed, and dv."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    b, g, tile, branches, _place = backward.tile_of(tables, sizes, grid, False)
    keys, _kv_heads, group = sizes
    if tile.size > 0:
        position = _positions_of(tile)  # [GROUP_ROWS]
        k_head = k + b.to(gl.int64) * stride_b + g.to(gl.int64) * stride_h
        wide.read(k_head, stride_n, position, shared.x, 0, HEAD_DIM)
        low, high = wide.nothing(LOW), wide.nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        operand = steps.as_operand(wide.nothing(ROWS), shared.x.low.dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        read_count = _read_count(padding, b, tile, keys, 4, PADDING)
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if (read_count > 0) & inside:
                begin, n = backward.range_of(start, w, r, o, tile.lowest, keys, CAUSAL)
                origin = start + o
                # The number of the first query that sees each key, and of the first that sees them all.
                sees = gl.convert_layout(position, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
                free_from = begin
                if CAUSAL:
                    sees = (sees - origin + r - 1) // r  # [GROUP_ROWS]
                    free_from = backward.first_query_of(tile.highest, origin, r)
                for member in range(group):
                    drops, branch = scale, i
                    if DROPOUT:
                        drops = backward.drops_of(0, tile, seed, drop_below, b, g * group + member, SCORES)
                        branch = gl.load(branch_ids + i)
                    low, high, operand, block = _weigh_segment(
                        low, high, operand, shared, block, begin, n, free_from, sees, origin, r, drops, branch, scale,
                        BLOCK_E, CAUSAL, DROPOUT,
                    )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS], scalar  # fmt: skip
        low, high = wide.last(
            operand, low, high, shared.b, shared.b_full, shared, block, 0, BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        if DROPOUT:
            factor = geometry.kept_factor(drop_below)
            low, high = low * factor, high * factor  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        _write(low, high, dv, padding, b, g, tile, sizes, HEAD_DIM, READ_PARTIAL, PADDING)


@gluon.jit
def _weigh_segment(
    low, high, operand, shared, block, begin, n, free_from, sees, origin, r, drops, branch, scale,
    BLOCK_E: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dv after queries `begin` to n of one head in a segment, of which those from `free_from` on see all keys."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    for j in range(begin, n, ROWS):
        low, high, token = wide.begun(  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
            operand, low, high, shared.b, shared.b_full, shared.x, shared.a, shared.a_full, block, 0, BLOCK_E
        )  # fmt: skip
        if DROPOUT:
            kept = dropout.kept_rows(drops, branch, origin + j * r, r, ROWS)  # [GROUP_ROWS, 4]
        low, high, scores = wide.ended(
            low, high, token, shared, block, 0
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
        weights = wide.weights_of(scores, scale, shared, block)  # [GROUP_ROWS, GROUP_ROWS]
        if CAUSAL:
            weights = _seen(weights, j, sees, free_from)  # [GROUP_ROWS, GROUP_ROWS]
        if DROPOUT:
            kept_weights = dropout.without_dropped(weights, kept, True)  # [GROUP_ROWS, GROUP_ROWS]
            wide.hand_over(2.0 * kept_weights - weights, shared, block)
            weights = kept_weights  # [GROUP_ROWS, GROUP_ROWS]
        else:
            wide.hand_over(weights, shared, block)
        operand = steps.as_operand(weights, shared.x.low.dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        block = tiles.counted(block + 1)
    return low, high, operand, block


@gluon.jit
def _seen(weights, j, sees, free_from):
    """Weights of a block of queries from number j on, 0 where a query does not see a key."""
    if j < free_from:
        column = gl.arange(0, weights.shape[1], gl.SliceLayout(0, weights.type.layout))  # [GROUP_ROWS]
        weights = gl.where(column[None, :] >= (sees - j)[:, None], weights, 0.0)  # [GROUP_ROWS, GROUP_ROWS]
    return weights


@gluon.jit
def _slope(
    v, dk, tables, shared, scale, drop_below, stride_b, stride_n, stride_h, sizes, grid, padding,
    HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """The slopes of the same weights, and dk."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    b, g, tile, branches, _place = backward.tile_of(tables, sizes, grid, False)
    keys, _kv_heads, group = sizes
    if tile.size > 0:
        position = _positions_of(tile)  # [GROUP_ROWS]
        v_head = v + b.to(gl.int64) * stride_b + g.to(gl.int64) * stride_h
        wide.read(v_head, stride_n, position, shared.y, 0, HEAD_DIM)
        read_count = _read_count(padding, b, tile, keys, 4, PADDING)
        blocks = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if (read_count > 0) & inside:
                begin, n = backward.range_of(start, w, r, o, tile.lowest, keys, CAUSAL)
                blocks += group * gl.cdiv(n - begin, ROWS)
        low, high = wide.nothing(LOW), wide.nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        operand = steps.as_operand(wide.nothing(ROWS), shared.y.low.dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        block = 0
        for _number in range(blocks):
            low, high, token = wide.begun(  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
                operand, low, high, shared.a, shared.a_full, shared.y, shared.b, shared.b_full, block, 0, BLOCK_E
            )  # fmt: skip
            low, high, products = wide.ended(
                low, high, token, shared, block, 0
            )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
            slopes = wide.slopes_of(products, shared, block, drop_below, DROPOUT)  # [GROUP_ROWS, GROUP_ROWS]
            operand = steps.as_operand(slopes, shared.y.low.dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
            block = tiles.counted(block + 1)
        low, high = wide.last(
            operand, low, high, shared.a, shared.a_full, shared, block, 0, BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        _write(low * scale, high * scale, dk, padding, b, g, tile, sizes, HEAD_DIM, READ_PARTIAL, PADDING)


@gluon.jit
def _positions_of(tile):
    """Positions of the keys of a tile, -1 for those that are not there.

    A thread computes one and hands it on. Divisions for every row that it reads would outlast the reads.
    """
    number = gl.arange(0, tiles.GROUP_ROWS, gl.BlockedLayout([1], [32], [4], [0]))  # [GROUP_ROWS]
    position = geometry.tile_positions(tile, number)  # [GROUP_ROWS]
    return gl.where((number < tile.size) & (position < tile.end), position, -1)


@gluon.jit
def _write(
    low, high, to, padding, b, g, tile, sizes, HEAD_DIM: gl.constexpr, READ_PARTIAL: gl.constexpr,
    PADDING: gl.constexpr,
):  # fmt: skip
    """Write both parts of a gradient, 0 for masked keys."""
    keys, kv_heads, _group = sizes
    position = _positions_of(tile)  # [GROUP_ROWS]
    if PADDING:
        mask = gl.load(padding + b.to(gl.int64) * keys + position, mask=position >= 0, other=1)  # [GROUP_ROWS]
        low, high = _kept(low, mask), _kept(high, mask)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
    head = to + b.to(gl.int64) * keys * kv_heads * HEAD_DIM + g.to(gl.int64) * HEAD_DIM
    wide.write(low, high, head, kv_heads * HEAD_DIM, position, HEAD_DIM, READ_PARTIAL)


@gluon.jit
def _kept(part, mask):
    """A part of a gradient, 0 for masked keys."""
    is_masked = gl.convert_layout(mask.to(gl.int32), gl.SliceLayout(1, part.type.layout))[:, None]  # [GROUP_ROWS, 1]
    return gl.where(is_masked == 0, part, 0.0)
