"""The backward for Hopper, warp-specialised: dk, dv and dq in one kernel of five products.

A program holds 128 keys, 64 for each of two groups of warps. It walks over the queries that see them, 64 at a time.
Scores are computed transposed, keys by queries, so that the weights stay in registers for dv and dk. Only their
gradient goes through shared memory, where the halves of both groups meet for the product with k:

    group 0   k q -> scores of keys  0 to 63  -> dv, dk      gradients --+
                                                                         +--> product with k -> dq, one block late
    group 1   k q -> scores of keys 64 to 127 -> dv, dk      gradients --+

One block late, no group waits for the other within a block. The copy engine adds dq in global memory, in an order that
differs from run to run. The loops over a segment are functions, since Triton compiles the body of a loop twice at every
level of loops, and a function once.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import dropout, tiles

# Numbers of the hardware's barriers.
DQ_THERE = tiles.FIRST_BARRIER  # both groups have stored their parts of a block's dq
SCORES_THERE = gl.constexpr(
    DQ_THERE + 1
)  # the first of four (`_scores_of`): a group has stored its gradients of scores
FREE = gl.constexpr(DQ_THERE + 5)  # the first of STAGES, up to 64 columns: both groups gave the tiles of a stage back
# Buffers of gradients of scores. While a group stores a block's, the other may multiply those of two blocks before.
SCORE_BUFFERS = gl.constexpr(3)


class Shared(NamedTuple):
    """Shared memory of a program: tiles, rows and barriers. Without dq the tiles of its product are not used."""

    k_tile: gl.shared_memory_descriptor  # [keys, columns]
    v_tile: gl.shared_memory_descriptor
    q_tiles: gl.shared_memory_descriptor  # [stages, 1, queries, 1, 1, columns], as the copy engine writes them
    d_tiles: gl.shared_memory_descriptor  # tiles of dout, shaped alike
    s_tiles: gl.shared_memory_descriptor  # gradients of scores, [buffers, keys, queries]
    lse_rows: gl.shared_memory_descriptor  # [stages, queries]
    delta_rows: gl.shared_memory_descriptor
    dq_tiles: gl.shared_memory_descriptor  # [groups, ...]: half of the columns for each group
    k_full: gl.shared_memory_descriptor
    dq_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


@gluon.constexpr_function
def keys_in_registers(columns):
    """Whether a group keeps its rows of k and v in registers. Products then read less of shared memory."""
    return columns <= 64


@gluon.constexpr_function
def scores_ahead(columns, with_dq):
    """Whether a step starts the scores of the next block; otherwise it computes its own.

    Without dq ptxas (12.8) would put the gradients of scores into the registers of v, which the next step reads: dk
    is wrong. With 128 columns there are too few registers.
    """
    return keys_in_registers(columns) and with_dq


@gluon.constexpr_function
def float_layout(columns):
    """Layout of a 2-D float32 tile in shared memory, as the copy engine takes it: rows of up to 128 bytes."""
    return gl.NVMMASharedLayout(min(128, 4 * columns), 32, 2)


@gluon.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def backward_kernel(
    k, v, lse, delta, dk, dv,
    q0, d0, dq0, q1, d1, dq1, q2, d2, dq2, q3, d3, dq3, q4, d4, dq4, q5, d5, dq5,
    branches, offsets, branch_ids, items, classes, documents, padding, seed,
    scale, drop_below, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr, WITH_DQ: gl.constexpr,
    READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of 128 keys, and its share of dq (float32, without the factor `scale`).

    documents: of packed documents the places that `packed.places_kernel` finds, which need CUT; otherwise None.
    With CUT some tiles have fewer than 128 keys. With READ_PARTIAL dk and dv are added to those in memory. With PADDING
    some keys are masked: they are read as zeros, and no query is read where all keys of a tile are. Rows of the next
    segment lie past a segment's end, with weight 0: a NaN among them does reach the gradients of this segment. With
    DROPOUT the keys of a tile must be neighbours in one branch, from a multiple of four on: four share random bits.
    """
    # q0 to dq5: descriptors of q, dout and dq as [batch, row, residue, head, dim], three for each branch.
    gl.static_assert(BLOCK_M == tiles.GROUP_ROWS)
    gl.static_assert(N_BRANCHES == 1 or not DROPOUT, "keys that are neighbours in one branch are not in another")
    gl.static_assert(not keys_in_registers(BLOCK_D) or FREE + STAGES <= 16, "the hardware has 16 barriers")
    dtype: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = 2 * tiles.GROUP_ROWS
    k_tile = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_D], tiles.shared_layout(BLOCK_D))
    v_tile = gl.allocate_shared_memory(dtype, [KEYS, BLOCK_D], tiles.shared_layout(BLOCK_D))
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], q0.layout)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], d0.layout)
    s_tiles, dq_tiles = k_tile, v_tile  # [KEYS, BLOCK_D] each; these stand in for them without dq
    if WITH_DQ:
        s_tiles = gl.allocate_shared_memory(dtype, [SCORE_BUFFERS, KEYS, BLOCK_M], tiles.shared_layout(BLOCK_M))
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M, 1, 1, dq0.block_shape[4]], dq0.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=2)
    mbarrier.init(dq_free, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(free.index(stage), count=2)
    shared = Shared(
        k_tile, v_tile, q_tiles, d_tiles, s_tiles, lse_rows, delta_rows, dq_tiles, k_full, dq_free, full, free
    )
    PACKED: gl.constexpr = documents is not None
    tables, sizes = (branches, offsets, items, classes), (keys, kv_heads, group)
    if PACKED:
        tables = (branches, offsets, items, classes, documents)
    grid = (chunk, stride, chunks, phases, count)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_differentiate, (
            0, k, v, dk, dv, tables, branch_ids, shared, seed, scale, drop_below,
            stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            sizes, grid, padding, HEAD_DIM, N_BRANCHES, CAUSAL, CUT, WITH_DQ, READ_PARTIAL, PADDING, DROPOUT, PACKED,
        )),
        (_differentiate, (
            1, k, v, dk, dv, tables, branch_ids, shared, seed, scale, drop_below,
            stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            sizes, grid, padding, HEAD_DIM, N_BRANCHES, CAUSAL, CUT, WITH_DQ, READ_PARTIAL, PADDING, DROPOUT, PACKED,
        )),
        (_copy, (
            (q0, q1, q2, q3, q4, q5), (d0, d1, d2, d3, d4, d5), lse, delta, tables, shared, sizes, grid, padding,
            N_BRANCHES, CAUSAL, PADDING, PACKED,
        )),
        (_add, (
            (dq0, dq1, dq2, dq3, dq4, dq5), tables, shared, sizes, grid, padding, N_BRANCHES, CAUSAL, WITH_DQ, PADDING,
            PACKED,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@gluon.jit
def tile_of(tables, sizes, grid, PACKED: gl.constexpr):
    """Sequence, KV head and tile of the program, its branches as `segment_of` takes them, and its `geometry.Place`."""
    keys, kv_heads, _group = sizes
    b, g, tile, place = geometry.placed_tile(gl.program_id(0), tables, 0, keys, keys, kv_heads, 1, grid, PACKED)
    return b, g, tile, (tables[0], tables[1], kv_heads, g), place


@gluon.jit
def is_kept(padding, b, tile, rows, keys):
    """Whether the keys of some rows of a tile are there and not masked."""
    position = geometry.tile_positions(tile, rows)  # [rows]
    exists = (rows < tile.size) & (position < tile.end)  # [rows]
    return gl.load(padding + b.to(gl.int64) * keys + position, mask=exists, other=1) == 0


@gluon.jit
def read_count_of(
    padding, b, tile, keys, KEYS: gl.constexpr, WARPS: gl.constexpr, PADDING: gl.constexpr
):  # fmt: skip
    """Number of a tile's rows or, with PADDING, of its keys that are not masked; each of WARPS warps counts them."""
    count = tile.size
    if PADDING:
        rows = gl.arange(0, KEYS, gl.BlockedLayout([KEYS // 32], [32], [WARPS], [0]))  # [rows]
        count = gl.sum(is_kept(padding, b, tile, rows, keys).to(gl.int32), 0)
    return count


@gluon.jit
def range_of(start, w, r, o, lowest, keys, CAUSAL: gl.constexpr):
    """Numbers of the first query of a segment that sees a key from `lowest` on, and of the last query + 1."""
    n = geometry.segment_rows(start, w, r, o, keys)
    begin = 0
    if CAUSAL:
        begin = first_query_of(lowest, start + o, r)
    return begin, n


@gluon.jit
def first_query_of(position, origin, r):
    """Number of the first query that sees a position; queries are at origin, origin + r, ..."""
    return gl.maximum(0, position - origin + r - 1) // r


@gluon.jit
def _copy(
    q_descriptors, d_descriptors, lse, delta, tables, shared, sizes, grid, padding,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, PADDING: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Copy tiles of q and dout, lse (to base 2) and delta into the ring of stages, in the order of their use."""
    b, g, tile, branches, place = tile_of(tables, sizes, grid, PACKED)
    keys = sizes[0]
    if PACKED:  # position 0 of the document
        lse += place.origin
        delta += place.origin
    read_count = read_count_of(padding, b, tile, keys, 2 * tiles.GROUP_ROWS, 1, PADDING)
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
        if (read_count > 0) & inside:
            begin, n = range_of(start, w, r, o, tile.lowest, place.keys, CAUSAL)
            row, residue = tiles.placed_coordinates(start + o, place, r, n, keys, PACKED)
            block = _copy_segment(
                q_descriptors[i], d_descriptors[i], lse, delta, shared, block, begin, n, row, residue, start + o, r,
                b, g, sizes,
            )  # fmt: skip


@gluon.jit
def _copy_segment(
    q_descriptor, d_descriptor, lse, delta, shared, block, begin, n, row, residue, origin, r, b, g, sizes
):
    """Copy queries `begin` to n of a segment, one head of the group after the other."""
    keys, kv_heads, group = sizes
    STAGES: gl.constexpr = shared.q_tiles.shape[0]
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    for member in range(group):
        h = g * group + member
        lse_head = lse + (b.to(gl.int64) * kv_heads * group + h) * keys
        delta_head = delta + (b.to(gl.int64) * kv_heads * group + h) * keys
        for j in range(begin, n, BLOCK_M):
            stage = block % STAGES
            if not keys_in_registers(shared.q_tiles.shape[5]):
                mbarrier.wait(shared.free.index(stage), (block // STAGES & 1) ^ 1)
            elif block >= STAGES:
                tiles.meet(FREE + stage)
            mbarrier.expect(shared.full.index(stage), 2 * q_descriptor.block_type.nbytes)
            coordinates = [b, row + j, residue, h, 0]
            tiles.async_load(q_descriptor, coordinates, shared.full.index(stage), shared.q_tiles.index(stage))
            tiles.async_load(d_descriptor, coordinates, shared.full.index(stage), shared.d_tiles.index(stage))
            number = j + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))  # [BLOCK_M]
            query = origin + number * r  # [BLOCK_M]
            # Weight 0 past the end of the segment, and where a query saw no key.
            lse_row = gl.load(lse_head + query, mask=number < n, other=float("inf"))  # [BLOCK_M]
            lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK_M]
            shared.lse_rows.index(stage).store(lse_row * geometry.LOG2_E)
            shared.delta_rows.index(stage).store(gl.load(delta_head + query, mask=number < n, other=0.0))
            mbarrier.arrive(shared.full.index(stage))
            block += 1
    return block


@gluon.jit
def _add(
    dq_descriptors, tables, shared, sizes, grid, padding, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    WITH_DQ: gl.constexpr, PADDING: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Add the groups' products to dq; rows past a segment's end are zero.

    The groups hand products over one block late: the first is of no block.
    """
    if WITH_DQ:
        b, g, tile, branches, place = tile_of(tables, sizes, grid, PACKED)
        keys, _kv_heads, group = sizes
        read_count = read_count_of(padding, b, tile, keys, 2 * tiles.GROUP_ROWS, 1, PADDING)
        is_first = True
        for i in gl.static_range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if (read_count > 0) & inside:
                begin, n = range_of(start, w, r, o, tile.lowest, place.keys, CAUSAL)
                row, residue = tiles.placed_coordinates(start + o, place, r, n, keys, PACKED)
                for member in range(group):
                    for j in range(begin, n, shared.q_tiles.shape[2]):
                        if is_first:
                            tiles.meet(DQ_THERE)
                            mbarrier.arrive(shared.dq_free)
                            is_first = False
                        tiles.meet(DQ_THERE)
                        for half in gl.static_range(2):
                            coordinates = [b, row + j, residue, g * group + member, half * shared.dq_tiles.shape[5]]
                            tiles.async_add(dq_descriptors[i], coordinates, shared.dq_tiles.index(half))
                        tma.store_wait(0)
                        mbarrier.arrive(shared.dq_free)


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, k, v, dk, dv, tables, branch_ids, shared, seed, scale, drop_below, stride_kb, stride_kn,
    stride_kh, stride_vb, stride_vn, stride_vh, sizes, grid, padding, HEAD_DIM: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr, WITH_DQ: gl.constexpr,
    READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 keys of the tile against every block of queries."""
    dtype: gl.constexpr = k.dtype.element_ty
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    BLOCK_D: gl.constexpr = shared.q_tiles.shape[5]
    SCORES: gl.constexpr = tiles.product_layout(BLOCK_M)
    GRADIENTS: gl.constexpr = tiles.product_layout(BLOCK_D)
    ROWS: gl.constexpr = tiles.row_layout(BLOCK_D)
    b, g, tile, branches, place = tile_of(tables, sizes, grid, PACKED)
    keys, kv_heads, group = sizes
    if PACKED:  # position 0 of the document
        k += place.origin.to(gl.int64) * stride_kn
        v += place.origin.to(gl.int64) * stride_vn
        dk += place.origin.to(gl.int64) * kv_heads * HEAD_DIM
        dv += place.origin.to(gl.int64) * kv_heads * HEAD_DIM
    if tile.size > 0:
        rows = NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, ROWS))  # [GROUP_ROWS]
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS))  # [BLOCK_D]
        position = geometry.tile_positions(tile, rows)  # [GROUP_ROWS]
        row_mask = ((rows < tile.size) & (position < tile.end))[:, None] & (
            dims[None, :] < HEAD_DIM
        )  # [GROUP_ROWS, BLOCK_D]
        if PADDING:
            row_mask = row_mask & is_kept(padding, b, tile, rows, keys)[:, None]  # [GROUP_ROWS, BLOCK_D]
        row = position.to(gl.int64)  # [GROUP_ROWS]
        k_ptrs = (
            k + b.to(gl.int64) * stride_kb + g.to(gl.int64) * stride_kh + row[:, None] * stride_kn + dims[None, :]
        )  # [GROUP_ROWS, BLOCK_D]
        v_ptrs = (
            v + b.to(gl.int64) * stride_vb + g.to(gl.int64) * stride_vh + row[:, None] * stride_vn + dims[None, :]
        )  # [GROUP_ROWS, BLOCK_D]
        k_rows = shared.k_tile.slice(NUMBER * tiles.GROUP_ROWS, tiles.GROUP_ROWS, 0)  # [GROUP_ROWS, BLOCK_D]
        v_rows = shared.v_tile.slice(NUMBER * tiles.GROUP_ROWS, tiles.GROUP_ROWS, 0)  # [GROUP_ROWS, BLOCK_D]
        k_rows.store(gl.load(k_ptrs, mask=row_mask, other=0.0))
        v_rows.store(gl.load(v_ptrs, mask=row_mask, other=0.0))
        if WITH_DQ:
            _store_scores(NUMBER, shared, gl.zeros([tiles.GROUP_ROWS, BLOCK_M], dtype, SCORES), -1)
        fence_async_shared()
        # The product for dq takes the keys of both groups.
        mbarrier.arrive(shared.k_full)
        mbarrier.wait(shared.k_full, 0)
        if keys_in_registers(BLOCK_D):
            k_rows = k_rows.load(gl.DotOperandLayout(0, SCORES, 2))  # [GROUP_ROWS, BLOCK_D]
            v_rows = v_rows.load(gl.DotOperandLayout(0, SCORES, 2))  # [GROUP_ROWS, BLOCK_D]
        key_rows = NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
        key_position = geometry.tile_positions(tile, key_rows)  # [GROUP_ROWS]

        is_there = (key_rows < tile.size) & (key_position < tile.end)  # [GROUP_ROWS]
        if PADDING:
            is_there = is_kept(padding, b, tile, key_rows, keys)  # [GROUP_ROWS]
        read_count = read_count_of(padding, b, tile, keys, 2 * tiles.GROUP_ROWS, 4, PADDING)
        # A causal group is seen by fewer queries than its tile, and more of them see all of it.
        own_lowest = geometry.tile_positions(tile, NUMBER * tiles.GROUP_ROWS)
        own_highest = geometry.tile_positions(tile, (NUMBER + 1) * tiles.GROUP_ROWS - 1)
        is_empty = tile.size <= NUMBER * tiles.GROUP_ROWS
        is_full = (tile.size >= (NUMBER + 1) * tiles.GROUP_ROWS) & (own_highest < tile.end)

        dk_acc = gl.zeros([tiles.GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)  # [GROUP_ROWS, BLOCK_D]
        dv_acc = gl.zeros([tiles.GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)  # [GROUP_ROWS, BLOCK_D]
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if PADDING:
                inside = inside & (read_count > 0)
            if inside:
                begin, n = range_of(start, w, r, o, tile.lowest, place.keys, CAUSAL)
                origin = start + o
                # First come blocks of queries that see no key of the group, then those that need a mask.
                first_masked = 0
                first_free = 0
                if CAUSAL:
                    first_masked = (first_query_of(own_lowest, origin, r) - begin) // BLOCK_M
                    first_free = gl.cdiv(first_query_of(own_highest, origin, r) - begin, BLOCK_M)
                if CUT:
                    blocks = gl.cdiv(n - begin, BLOCK_M)
                    first_masked = gl.where(is_empty, blocks, gl.minimum(first_masked, blocks))
                    first_free = gl.where(is_full, first_free, blocks)
                free_from = gl.minimum(n, begin + first_free * BLOCK_M)
                for member in range(group):
                    drops, branch = scale, i
                    if DROPOUT:
                        drops = drops_of(NUMBER, tile, seed, drop_below, place.sequence, g * group + member, SCORES)
                        branch = gl.load(branch_ids + i)
                    dk_acc, dv_acc, block = _walk(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_D], scalar
                        NUMBER, dk_acc, dv_acc, block, begin, n, first_masked, free_from, origin, r, is_there,
                        key_position, k_rows, v_rows, shared, drops, branch, scale, drop_below, CAUSAL, CUT, WITH_DQ,
                        PADDING, DROPOUT,
                    )  # fmt: skip
        if WITH_DQ:
            tiles.meet(_scores_of(1 - NUMBER, block - 1), 256)
            if block > 0:
                part = warpgroup_mma_wait(0, deps=[_late_dq(NUMBER, shared, block)])  # [GROUP_ROWS, COLUMNS]
                _hand_over(NUMBER, part, shared, block)
        # Positions in this layout come after the loop: in it they would take registers.
        out_rows = gl.convert_layout(key_position, gl.SliceLayout(1, GRADIENTS))  # [GROUP_ROWS]
        out_number = NUMBER * tiles.GROUP_ROWS + gl.arange(
            0, tiles.GROUP_ROWS, gl.SliceLayout(1, GRADIENTS)
        )  # [GROUP_ROWS]
        out_dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, GRADIENTS))  # [BLOCK_D]
        written = ((out_number < tile.size) & (out_rows < tile.end))[:, None] & (
            out_dims[None, :] < HEAD_DIM
        )  # [GROUP_ROWS, BLOCK_D]
        dkv_rows = ((b.to(gl.int64) * keys + out_rows) * kv_heads + g) * HEAD_DIM  # [GROUP_ROWS]
        if DROPOUT:
            dv_acc = dv_acc * geometry.kept_factor(drop_below)  # [GROUP_ROWS, BLOCK_D]
        dk_acc = dk_acc * scale  # [GROUP_ROWS, BLOCK_D]
        if READ_PARTIAL:
            dk_acc += gl.load(dk + dkv_rows[:, None] + out_dims[None, :], mask=written, other=0.0).to(gl.float32)
            dv_acc += gl.load(dv + dkv_rows[:, None] + out_dims[None, :], mask=written, other=0.0).to(gl.float32)
        gl.store(dk + dkv_rows[:, None] + out_dims[None, :], dk_acc.to(dtype), mask=written)
        gl.store(dv + dkv_rows[:, None] + out_dims[None, :], dv_acc.to(dtype), mask=written)


@gluon.jit
def drops_of(NUMBER: gl.constexpr, tile, seed, drop_below, b, h, SCORES: gl.constexpr):
    """`dropout.Drops` of a group's keys: the rows of the tile are neighbours in their segment."""
    scores = gl.zeros([tiles.GROUP_ROWS, tiles.GROUP_ROWS], gl.int32, SCORES)  # [GROUP_ROWS, GROUP_ROWS]
    shaped = dropout.by_threads(scores)  # [GROUP_ROWS, GROUP_ROWS // 8, QUADS, 2]
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, shaped.type.layout))
    number = (
        tile.u + NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, ROWS))
    )  # [GROUP_ROWS]
    fours = number[:, None] // 4 + gl.zeros([tiles.GROUP_ROWS, 4], gl.int32, ROWS)  # [GROUP_ROWS, 4]
    return dropout.drops_of(seed, drop_below, b, h, fours)


@gluon.jit
def _walk(
    NUMBER: gl.constexpr, dk_acc, dv_acc, block, begin, n, first_masked, free_from, origin, r, is_there, key_position,
    k_rows, v_rows, shared, drops, branch, scale, drop_below, CAUSAL: gl.constexpr, CUT: gl.constexpr,
    WITH_DQ: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """A group's keys against queries `begin` to n of one head in a segment.

    queries  begin ............... free_from ....... n
    blocks   first_masked | masked           | no mask
             see no key
    """
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    if CAUSAL or CUT:
        for _j in range(first_masked):
            _empty_step(NUMBER, shared, block, WITH_DQ)
            block += 1
        # The number of the first query that sees each key: n, which is none, for a key that is not there.
        sees = gl.zeros_like(key_position)  # [GROUP_ROWS]
        if CAUSAL:
            sees = (key_position - origin + r - 1) // r  # [GROUP_ROWS]
        sees = gl.where(is_there, sees, n)  # [GROUP_ROWS]
        masked_from = begin + first_masked * BLOCK_M
        if masked_from < free_from:
            scores = _first_scores(k_rows, shared, block, WITH_DQ)  # [GROUP_ROWS, BLOCK_M]
            for j in range(masked_from, free_from, BLOCK_M):
                dk_acc, dv_acc, scores = _step(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_M]
                    NUMBER, dk_acc, dv_acc, scores, k_rows, v_rows, shared, sees - j, is_there, block,
                    j + BLOCK_M < free_from, drops, branch, origin + j * r, r, scale, drop_below, WITH_DQ, True,
                    PADDING, DROPOUT,
                )  # fmt: skip
                block += 1
    if free_from < n:
        scores = _first_scores(k_rows, shared, block, WITH_DQ)  # [GROUP_ROWS, BLOCK_M]
        for j in range(free_from, n, BLOCK_M):
            dk_acc, dv_acc, scores = _step(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_M]
                NUMBER, dk_acc, dv_acc, scores, k_rows, v_rows, shared, key_position, is_there, block, j + BLOCK_M < n,
                drops, branch, origin + j * r, r, scale, drop_below, WITH_DQ, False, PADDING, DROPOUT,
            )  # fmt: skip
            block += 1
    return dk_acc, dv_acc, block


@gluon.jit
def _first_scores(k_rows, shared, block, WITH_DQ: gl.constexpr):
    """The scores of the first block of a walk, or zeros where each step computes its own."""
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    scores = gl.zeros([tiles.GROUP_ROWS, BLOCK_M], gl.float32, tiles.product_layout(BLOCK_M))  # [GROUP_ROWS, BLOCK_M]
    if scores_ahead(shared.q_tiles.shape[5], WITH_DQ):
        scores = warpgroup_mma_wait(0, deps=[_start_scores(k_rows, shared, block)])  # [GROUP_ROWS, BLOCK_M]
    return scores


@gluon.jit
def _start_scores(k_rows, shared, block):
    """The product of keys and a block of queries, started once the queries are there."""
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    tiles.wait_full(shared.full, block)
    zeros = gl.zeros([tiles.GROUP_ROWS, BLOCK_M], gl.float32, tiles.product_layout(BLOCK_M))  # [GROUP_ROWS, BLOCK_M]
    q_tile = tiles.tile_of_stage(shared.q_tiles, block)  # [BLOCK_M, BLOCK_D]
    return warpgroup_mma(k_rows, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(
    NUMBER: gl.constexpr, dk_acc, dv_acc, scores, k_rows, v_rows, shared, sees, is_there, block, goes_on, drops, branch,
    first_query, rate, scale, drop_below, WITH_DQ: gl.constexpr, MASKED: gl.constexpr, PADDING: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """dk, dv, and the next block's scores. With MASKED the queries from column `sees` on see a key.

    With PADDING alone they see the keys that are there.
    """
    dtype: gl.constexpr = shared.k_tile.dtype
    STAGES: gl.constexpr = shared.q_tiles.shape[0]
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    BLOCK_D: gl.constexpr = shared.q_tiles.shape[5]
    SCORES: gl.constexpr = tiles.product_layout(BLOCK_M)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, tiles.product_layout(BLOCK_D), 2)
    AHEAD: gl.constexpr = scores_ahead(BLOCK_D, WITH_DQ)
    gl.static_assert(WITH_DQ or not AHEAD, "scores that are asked for ahead are taken beside dq")
    stage = block % STAGES
    q_tile = tiles.tile_of_stage(shared.q_tiles, block)  # [BLOCK_M, BLOCK_D]
    d_tile = tiles.tile_of_stage(shared.d_tiles, block)  # [BLOCK_M, BLOCK_D]
    zeros = gl.zeros([tiles.GROUP_ROWS, BLOCK_M], gl.float32, SCORES)  # [GROUP_ROWS, BLOCK_M]
    if not AHEAD:
        score_token = _start_scores(k_rows, shared, block)  # [GROUP_ROWS, BLOCK_M]
    if DROPOUT:  # before the next product, whose result takes registers
        kept = dropout.kept_rows(drops, branch, first_query, rate, BLOCK_M)  # [GROUP_ROWS, 4]
    weight_token = warpgroup_mma(
        v_rows, d_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
    )  # [GROUP_ROWS, BLOCK_M]
    if not AHEAD:
        scores = warpgroup_mma_wait(1, deps=[score_token])  # [GROUP_ROWS, BLOCK_M]
    lse_row = shared.lse_rows.index(stage).load(gl.SliceLayout(0, SCORES))  # [BLOCK_M]
    weights = gl.exp2(scores * (scale * geometry.LOG2_E) - lse_row[None, :])  # [GROUP_ROWS, BLOCK_M]
    if MASKED:
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))  # [BLOCK_M]
        weights = gl.where(column[None, :] >= sees[:, None], weights, 0.0)  # [GROUP_ROWS, BLOCK_M]
    elif PADDING:
        weights = gl.where(is_there[:, None], weights, 0.0)  # [GROUP_ROWS, BLOCK_M]
    kept_weights = weights  # [GROUP_ROWS, BLOCK_M]
    if DROPOUT:
        kept_weights = dropout.without_dropped(weights, kept, True)  # [GROUP_ROWS, BLOCK_M]
    dv_weights = gl.convert_layout(kept_weights.to(dtype), WEIGHTS)  # [GROUP_ROWS, BLOCK_M]
    dv_token = warpgroup_mma(dv_weights, d_tile, dv_acc, is_async=True)  # [GROUP_ROWS, BLOCK_D]
    if AHEAD:
        # The last step of a walk computes its own once more, unused.
        after = gl.where(goes_on, block + 1, block)
        score_token = _start_scores(k_rows, shared, after)  # [GROUP_ROWS, BLOCK_M]
        dweights = warpgroup_mma_wait(2, deps=[weight_token])  # [GROUP_ROWS, BLOCK_M]
    else:
        dweights = warpgroup_mma_wait(1, deps=[weight_token])  # [GROUP_ROWS, BLOCK_M]
    if DROPOUT:
        dweights = dropout.without_dropped(dweights, kept, True)  # [GROUP_ROWS, BLOCK_M]
        dweights = dweights * geometry.kept_factor(drop_below)  # [GROUP_ROWS, BLOCK_M]
    delta_row = shared.delta_rows.index(stage).load(gl.SliceLayout(0, SCORES))  # [BLOCK_M]
    dscores = (weights * (dweights - delta_row[None, :])).to(dtype)  # [GROUP_ROWS, BLOCK_M]
    if WITH_DQ:
        tiles.meet(_scores_of(1 - NUMBER, block - 1), 256)
        _store_scores(NUMBER, shared, dscores, block)
        dq_token = _late_dq(NUMBER, shared, block)  # [GROUP_ROWS, COLUMNS]
    dk_token = warpgroup_mma(
        gl.convert_layout(dscores, WEIGHTS), q_tile, dk_acc, is_async=True
    )  # [GROUP_ROWS, BLOCK_D]
    if WITH_DQ:  # handed over beside the product for dk
        if AHEAD:
            dv_acc, scores, part = warpgroup_mma_wait(
                1, deps=[dv_token, score_token, dq_token]
            )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, BLOCK_M], [GROUP_ROWS, COLUMNS]
        else:
            dv_acc, part = warpgroup_mma_wait(
                1, deps=[dv_token, dq_token]
            )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, COLUMNS]
        _hand_over(NUMBER, part, shared, block)
        dk_acc = warpgroup_mma_wait(0, deps=[dk_token])  # [GROUP_ROWS, BLOCK_D]
    else:
        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])  # [GROUP_ROWS, BLOCK_D] each
    _give_back(shared, block)
    return dk_acc, dv_acc, scores


@gluon.jit
def _empty_step(NUMBER: gl.constexpr, shared, block, WITH_DQ: gl.constexpr):
    """A step of a group whose keys no query of the block sees: only its part of the product for dq."""
    BLOCK_M: gl.constexpr = shared.q_tiles.shape[2]
    tiles.wait_full(shared.full, block)
    _give_back(shared, block)
    if WITH_DQ:
        tiles.meet(_scores_of(1 - NUMBER, block - 1), 256)
        nothing = gl.zeros(
            [tiles.GROUP_ROWS, BLOCK_M], shared.k_tile.dtype, tiles.product_layout(BLOCK_M)
        )  # [GROUP_ROWS, BLOCK_M]
        _store_scores(NUMBER, shared, nothing, block)
        part = warpgroup_mma_wait(0, deps=[_late_dq(NUMBER, shared, block)])  # [GROUP_ROWS, COLUMNS]
        _hand_over(NUMBER, part, shared, block)


@gluon.jit
def _give_back(shared, block):
    """Give the tiles of a block back."""
    STAGES: gl.constexpr = shared.q_tiles.shape[0]
    stage = block % STAGES
    if keys_in_registers(shared.q_tiles.shape[5]):
        tiles.arrive(FREE + stage)
    else:
        mbarrier.arrive(shared.free.index(stage))


@gluon.jit
def _scores_of(NUMBER: gl.constexpr, block):
    """Number of the barrier at which a group says that its gradients of a block's scores are stored.

    Two barriers take turns, since it may arrive for a block before the other group has met it for the last one.
    """
    return SCORES_THERE + 2 * NUMBER + (block & 1)


@gluon.jit
def _store_scores(NUMBER: gl.constexpr, shared, dscores, block):
    """Store a group's gradients of a block's scores for the other group."""
    buffer = (block + SCORE_BUFFERS) % SCORE_BUFFERS  # the block before the first has a buffer, too
    shared.s_tiles.index(buffer).slice(NUMBER * tiles.GROUP_ROWS, tiles.GROUP_ROWS, 0).store(dscores)
    fence_async_shared()
    tiles.arrive(_scores_of(NUMBER, block), 256)


@gluon.jit
def _late_dq(NUMBER: gl.constexpr, shared, block):
    """A group's half of the columns of the last block's dq, started: gradients of scores of both groups times k."""
    COLUMNS: gl.constexpr = shared.k_tile.shape[1] // 2
    left = shared.s_tiles.index((block + SCORE_BUFFERS - 1) % SCORE_BUFFERS).permute((1, 0))  # [BLOCK_M, KEYS]
    right = shared.k_tile.slice(NUMBER * COLUMNS, COLUMNS, 1)  # [KEYS, COLUMNS]
    zeros = gl.zeros([tiles.GROUP_ROWS, COLUMNS], gl.float32, tiles.product_layout(COLUMNS))  # [GROUP_ROWS, COLUMNS]
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(NUMBER: gl.constexpr, part, shared, block):
    """Hand a group's part of dq to the warp that adds it."""
    mbarrier.wait(shared.dq_free, (block & 1) ^ 1)
    tile = tiles.reinterpret(
        shared.dq_tiles.index(NUMBER), gl.float32, part.shape, float_layout(part.shape[1])
    )  # [GROUP_ROWS, COLUMNS]
    tile.store(part)
    fence_async_shared()
    tiles.arrive(DQ_THERE)
