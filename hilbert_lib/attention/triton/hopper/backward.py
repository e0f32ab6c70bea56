"""The backward for Hopper, warp-specialised: dk, dv and dq in one kernel of five products.

A program holds 128 keys, 64 for each of two groups of warps, and walks over the queries that see them, 64 at a time.
Scores are computed transposed, keys by queries, so that the weights stay in registers for dv and dk. Only their
gradient goes through shared memory, where both groups' halves meet for the product with k. That product comes one block
late, so that no group waits for the other within a block; the copy engine adds it to dq in global memory, in an order
that differs from run to run. The loops over a segment are functions: Triton visits the body of a loop twice at every
level of loops, and a function once.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton.geometry import NOT_SPECIALIZED, segment_rows, tile_of, tile_positions
from hilbert_lib.attention.triton.hopper.tiles import (
    FIRST_BARRIER,
    GROUP_ROWS,
    LOG2_E,
    arrive,
    meet,
    product_layout,
    row_layout,
    segment_coordinates,
    segment_of,
    shared_layout,
)

# Numbers of the hardware's barriers.
DQ_THERE = gl.constexpr(FIRST_BARRIER)  # both groups have stored their parts of a block's dq
SCORES_THERE = gl.constexpr(FIRST_BARRIER + 1)  # and 3 more (`_scores_of`): a group has stored its gradients of scores
FREE = gl.constexpr(FIRST_BARRIER + 5)  # and on, with 64 columns: both groups are done with the tiles of a stage
# Of gradients of scores: while a group stores a block's, the other may still multiply those of two blocks before.
SCORE_BUFFERS = gl.constexpr(3)


@gluon.constexpr_function
def keys_in_registers(columns):
    """Whether a group keeps its rows of k and v in registers, so that products read less of shared memory."""
    return columns == 64


@gluon.constexpr_function
def scores_ahead(columns, with_dq):
    """Whether a step starts the next block's scores; where not, it computes its own.

    Without dq ptxas (12.8) would put the gradients of scores where the rows of v are, which the next step takes: a
    wrong dk. With 128 columns there are too few registers.
    """
    return keys_in_registers(columns) and with_dq


@gluon.constexpr_function
def float_layout():
    """Of a 2-D float32 tile in shared memory, as the copy engine takes it."""
    return gl.NVMMASharedLayout(128, 32, 2)


@builtin
def add_shared_to_global(descriptor, coordinates, source, _semantic=None):
    """Adds a tile in shared memory to global memory: the copy engine's reduction, which Gluon has no name for yet."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_kernel(
    k, v, lse, delta, dk, dv,
    q0, d0, dq0, q1, d1, dq1, q2, d2, dq2, q3, d3, dq3, q4, d4, dq4, q5, d5, dq5,
    branches, offsets, items, classes,
    scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr, WITH_DQ: gl.constexpr,
    READ_PARTIAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of 128 keys, and its share of dq (float32, without the factor `scale`).

    With CUT some tiles have fewer than 128 keys; with READ_PARTIAL dk and dv are added to what is there. Past a
    segment's end lie rows of the next one, with weight 0: a NaN among them does reach the gradients of this segment.
    """
    # q0 to dq5: descriptors of q, dout and dq as [batch, row, residue, head, dim], three for each branch.
    gl.static_assert(BLOCK_M == GROUP_ROWS)
    gl.static_assert(not keys_in_registers(BLOCK_D) or FREE + STAGES <= 16, "the hardware has 16 barriers")
    dtype: gl.constexpr = k.dtype.element_ty
    k_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    v_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], q0.layout)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], d0.layout)
    if WITH_DQ:
        s_tiles = gl.allocate_shared_memory(dtype, [SCORE_BUFFERS, 2 * GROUP_ROWS, BLOCK_M], shared_layout())
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, GROUP_ROWS, 1, 1, dq0.block_shape[4]], dq0.layout)
    else:  # these stand in for them
        s_tiles, dq_tiles = k_tile, v_tile
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
    # Written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_differentiate, (
            0, k, v, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles, lse_rows,
            delta_rows, dq_tiles, k_full, dq_free, full, free, scale, stride_kb, stride_kn,
            stride_kh, stride_vb, stride_vn, stride_vh, keys, kv_heads, group, chunk, stride, chunks, phases, count,
            HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, N_BRANCHES, CAUSAL, CUT, WITH_DQ, READ_PARTIAL,
        )),
        (_differentiate, (
            1, k, v, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles, lse_rows,
            delta_rows, dq_tiles, k_full, dq_free, full, free, scale, stride_kb, stride_kn,
            stride_kh, stride_vb, stride_vn, stride_vh, keys, kv_heads, group, chunk, stride, chunks, phases, count,
            HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, N_BRANCHES, CAUSAL, CUT, WITH_DQ, READ_PARTIAL,
        )),
        (_copy, (
            (q0, q1, q2, q3, q4, q5), (d0, d1, d2, d3, d4, d5), lse, delta, branches, offsets, items, classes,
            q_tiles, d_tiles, lse_rows, delta_rows, full, free, keys, kv_heads, group, chunk, stride, chunks, phases,
            count, BLOCK_D, BLOCK_M, STAGES, N_BRANCHES, CAUSAL,
        )),
        (_add, (
            (dq0, dq1, dq2, dq3, dq4, dq5), branches, offsets, items, classes, dq_tiles, dq_free, keys,
            kv_heads, group, chunk, stride, chunks, phases, count, BLOCK_M, N_BRANCHES, CAUSAL, WITH_DQ,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@gluon.jit
def _range(start, w, r, o, lowest, keys, CAUSAL: gl.constexpr):
    """The numbers of the first query of a segment that sees a key from `lowest` on, and past the last."""
    n = segment_rows(start, w, r, o, keys)
    begin = 0
    if CAUSAL:
        begin = _first_query(lowest, start + o, r)
    return begin, n


@gluon.jit
def _first_query(position, origin, r):
    """The number of the first query that sees a position, of those at origin, origin + r, ..."""
    return gl.maximum(0, position - origin + r - 1) // r


@gluon.jit
def _copy(
    q_descriptors, d_descriptors, lse, delta, branches, offsets, items, classes, q_tiles, d_tiles, lse_rows,
    delta_rows, full, free, keys, kv_heads, group, chunk, stride, chunks, phases, count, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Copies tiles of q and dout, lse (to base 2) and delta into the ring of stages, in the order of their use."""
    b, g, _, _, _, _, size, _, first, lowest, _ = tile_of(
        gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
    )
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
        if (size > 0) & inside:
            begin, n = _range(start, w, r, o, lowest, keys, CAUSAL)
            row, residue = segment_coordinates(start + o, r, n, keys)
            block = _copy_segment(
                q_descriptors[i], d_descriptors[i], lse, delta, q_tiles, d_tiles, lse_rows, delta_rows, full, free,
                block, begin, n, row, residue, start + o, r, b, g, keys, kv_heads, group, BLOCK_D, BLOCK_M, STAGES,
            )  # fmt: skip


@gluon.jit
def _copy_segment(
    q_descriptor, d_descriptor, lse, delta, q_tiles, d_tiles, lse_rows, delta_rows, full, free, block, begin, n, row,
    residue, origin, r, b, g, keys, kv_heads, group, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies queries `begin` to n of a segment, one head of the group after the other."""
    for member in range(group):
        h = g * group + member
        lse_head = lse + (b.to(gl.int64) * kv_heads * group + h) * keys
        delta_head = delta + (b.to(gl.int64) * kv_heads * group + h) * keys
        for j in range(begin, n, BLOCK_M):
            stage = block % STAGES
            if not keys_in_registers(BLOCK_D):
                mbarrier.wait(free.index(stage), (block // STAGES & 1) ^ 1)
            elif block >= STAGES:
                meet(FREE + stage)
            mbarrier.expect(full.index(stage), 2 * q_descriptor.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_descriptor, [b, row + j, residue, h, 0], full.index(stage), q_tiles.index(stage)
            )
            tma.async_copy_global_to_shared(
                d_descriptor, [b, row + j, residue, h, 0], full.index(stage), d_tiles.index(stage)
            )
            number = j + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
            query = origin + number * r
            # Weight 0 past the end of the segment, and where a query saw no key.
            lse_row = gl.load(lse_head + query, mask=number < n, other=float("inf"))
            lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row)
            lse_rows.index(stage).store(lse_row * LOG2_E)
            delta_rows.index(stage).store(gl.load(delta_head + query, mask=number < n, other=0.0))
            mbarrier.arrive(full.index(stage))
            block += 1
    return block


@gluon.jit
def _add(
    dq_descriptors, branches, offsets, items, classes, dq_tiles, dq_free, keys, kv_heads, group, chunk, stride, chunks,
    phases, count, BLOCK_M: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Adds the groups' products to dq, where rows past a segment's end are zero.

    The groups hand them over a block late: the first is of no block.
    """
    if WITH_DQ:
        b, g, _, _, _, _, size, _, first, lowest, _ = tile_of(
            gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
        )
        is_first = True
        for i in gl.static_range(N_BRANCHES):
            inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
            if (size > 0) & inside:
                begin, n = _range(start, w, r, o, lowest, keys, CAUSAL)
                row, residue = segment_coordinates(start + o, r, n, keys)
                for member in range(group):
                    for j in range(begin, n, BLOCK_M):
                        if is_first:
                            meet(DQ_THERE)
                            mbarrier.arrive(dq_free)
                            is_first = False
                        meet(DQ_THERE)
                        for half in gl.static_range(2):
                            coordinates = [b, row + j, residue, g * group + member, half * dq_tiles.shape[5]]
                            add_shared_to_global(dq_descriptors[i], coordinates, dq_tiles.index(half))
                        tma.store_wait(0)
                        mbarrier.arrive(dq_free)


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, k, v, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
    lse_rows, delta_rows, dq_tiles, k_full, dq_free, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb,
    stride_vn, stride_vh, keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    CUT: gl.constexpr, WITH_DQ: gl.constexpr, READ_PARTIAL: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 keys of the tile against every block of queries."""
    dtype: gl.constexpr = k.dtype.element_ty
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    GRADIENTS: gl.constexpr = product_layout(BLOCK_D)
    ROWS: gl.constexpr = row_layout(BLOCK_D)
    b, g, chunk_start, members, n_classes, u, size, chunk_end, first, lowest, _ = tile_of(
        gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
    )
    if size > 0:
        rows = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, ROWS))
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS))
        position = tile_positions(chunk_start, members, n_classes, u + rows, stride)
        here = ((rows < size) & (position < chunk_end))[:, None] & (dims[None, :] < HEAD_DIM)
        row = position.to(gl.int64)
        k_ptrs = k + b.to(gl.int64) * stride_kb + g.to(gl.int64) * stride_kh + row[:, None] * stride_kn + dims[None, :]
        v_ptrs = v + b.to(gl.int64) * stride_vb + g.to(gl.int64) * stride_vh + row[:, None] * stride_vn + dims[None, :]
        k_rows = k_tile.slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0)
        v_rows = v_tile.slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0)
        k_rows.store(gl.load(k_ptrs, mask=here, other=0.0))
        v_rows.store(gl.load(v_ptrs, mask=here, other=0.0))
        if WITH_DQ:
            _store_scores(NUMBER, s_tiles, gl.zeros([GROUP_ROWS, BLOCK_M], dtype, SCORES), -1)
        fence_async_shared()
        # The product for dq takes the keys of both groups.
        mbarrier.arrive(k_full)
        mbarrier.wait(k_full, 0)
        if keys_in_registers(BLOCK_D):
            k_rows = k_rows.load(gl.DotOperandLayout(0, SCORES, 2))
            v_rows = v_rows.load(gl.DotOperandLayout(0, SCORES, 2))
        key_rows = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
        key_position = tile_positions(chunk_start, members, n_classes, u + key_rows, stride)

        is_there = (key_rows < size) & (key_position < chunk_end)
        # Where causal, fewer queries see a group than its tile, and more of them see all of it.
        own_lowest = tile_positions(chunk_start, members, n_classes, u + NUMBER * GROUP_ROWS, stride)
        own_highest = tile_positions(chunk_start, members, n_classes, u + (NUMBER + 1) * GROUP_ROWS - 1, stride)
        is_empty = size <= NUMBER * GROUP_ROWS
        is_full = (size >= (NUMBER + 1) * GROUP_ROWS) & (own_highest < chunk_end)

        dk_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        dv_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
            if inside:
                begin, n = _range(start, w, r, o, lowest, keys, CAUSAL)
                origin = start + o
                # First come blocks of queries that see no key of the group, then those that need a mask.
                first_masked = 0
                first_free = 0
                if CAUSAL:
                    first_masked = (_first_query(own_lowest, origin, r) - begin) // BLOCK_M
                    first_free = gl.cdiv(_first_query(own_highest, origin, r) - begin, BLOCK_M)
                if CUT:
                    blocks = gl.cdiv(n - begin, BLOCK_M)
                    first_masked = gl.where(is_empty, blocks, gl.minimum(first_masked, blocks))
                    first_free = gl.where(is_full, first_free, blocks)
                free_from = gl.minimum(n, begin + first_free * BLOCK_M)
                for _member in range(group):
                    dk_acc, dv_acc, block = _walk(
                        NUMBER, dk_acc, dv_acc, block, begin, n, first_masked, free_from, origin, r, is_there,
                        key_position, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles, dq_free, full, free,
                        lse_rows, delta_rows, scale, BLOCK_D, BLOCK_M, STAGES, CAUSAL, CUT, WITH_DQ,
                    )  # fmt: skip
        if WITH_DQ:
            meet(_scores_of(1 - NUMBER, block - 1), 256)
            if block > 0:
                part = warpgroup_mma_wait(0, deps=[_late_dq(NUMBER, k_tile, s_tiles, block, BLOCK_D)])
                _hand_over(NUMBER, part, dq_tiles, dq_free, block)
        # Made only here: positions in this layout would take registers all through the loop.
        out_rows = gl.convert_layout(key_position, gl.SliceLayout(1, GRADIENTS))
        out_number = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, GRADIENTS))
        out_dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, GRADIENTS))
        written = ((out_number < size) & (out_rows < chunk_end))[:, None] & (out_dims[None, :] < HEAD_DIM)
        at = ((b.to(gl.int64) * keys + out_rows) * kv_heads + g) * HEAD_DIM
        dk_acc = dk_acc * scale
        if READ_PARTIAL:
            dk_acc += gl.load(dk + at[:, None] + out_dims[None, :], mask=written, other=0.0).to(gl.float32)
            dv_acc += gl.load(dv + at[:, None] + out_dims[None, :], mask=written, other=0.0).to(gl.float32)
        gl.store(dk + at[:, None] + out_dims[None, :], dk_acc.to(dtype), mask=written)
        gl.store(dv + at[:, None] + out_dims[None, :], dv_acc.to(dtype), mask=written)


@gluon.jit
def _walk(
    NUMBER: gl.constexpr, dk_acc, dv_acc, block, begin, n, first_masked, free_from, origin, r, is_there, key_position,
    k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles, dq_free, full, free, lse_rows, delta_rows, scale,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr,
    WITH_DQ: gl.constexpr,
):  # fmt: skip
    """A group's keys against queries `begin` to n of one head in a segment.

    `first_masked` blocks see no key, those up to query `free_from` need a mask, the rest see all.
    """
    if CAUSAL or CUT:
        for _j in range(first_masked):
            _empty_step(
                NUMBER, k_tile, s_tiles, dq_tiles, dq_free, full, free, block, BLOCK_D, BLOCK_M, STAGES, WITH_DQ,
            )  # fmt: skip
            block += 1
        # The number of the first query that sees each key: n, which is none, for a key that is not there.
        sees = gl.zeros_like(key_position)
        if CAUSAL:
            sees = (key_position - origin + r - 1) // r
        sees = gl.where(is_there, sees, n)
        masked_from = begin + first_masked * BLOCK_M
        if masked_from < free_from:
            scores = _first_scores(k_rows, q_tiles, full, block, BLOCK_D, BLOCK_M, STAGES, WITH_DQ)
            for j in range(masked_from, free_from, BLOCK_M):
                dk_acc, dv_acc, scores = _step(
                    NUMBER, dk_acc, dv_acc, scores, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles,
                    dq_tiles, dq_free, full, free, lse_rows, delta_rows, sees - j, block,
                    j + BLOCK_M < free_from, scale, BLOCK_D, BLOCK_M, STAGES, WITH_DQ, True,
                )  # fmt: skip
                block += 1
    if free_from < n:
        scores = _first_scores(k_rows, q_tiles, full, block, BLOCK_D, BLOCK_M, STAGES, WITH_DQ)
        for j in range(free_from, n, BLOCK_M):
            dk_acc, dv_acc, scores = _step(
                NUMBER, dk_acc, dv_acc, scores, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles,
                dq_tiles, dq_free, full, free, lse_rows, delta_rows, key_position, block,
                j + BLOCK_M < n, scale, BLOCK_D, BLOCK_M, STAGES, WITH_DQ, False,
            )  # fmt: skip
            block += 1
    return dk_acc, dv_acc, block


@gluon.jit
def _first_scores(
    k_rows, q_tiles, full, block, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):  # fmt: skip
    """The scores of the first block of a walk; unused zeros where each step computes its own."""
    scores = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, product_layout(BLOCK_M))
    if scores_ahead(BLOCK_D, WITH_DQ):
        token = _start_scores(k_rows, q_tiles, full, block, BLOCK_D, BLOCK_M, STAGES)
        scores = warpgroup_mma_wait(0, deps=[token])
    return scores


@gluon.jit
def _start_scores(k_rows, q_tiles, full, block, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    """Starts the product of keys and a block of queries, once these are there."""
    stage = block % STAGES
    mbarrier.wait(full.index(stage), block // STAGES & 1)
    q_tile = q_tiles.index(stage)._reinterpret(q_tiles.dtype, [BLOCK_M, BLOCK_D], shared_layout())
    zeros = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, product_layout(BLOCK_M))
    return warpgroup_mma(k_rows, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _step(
    NUMBER: gl.constexpr, dk_acc, dv_acc, scores, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles,
    dq_free, full, free, lse_rows, delta_rows, sees, block, goes_on, scale, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dk, dv and dq of a block of queries, the next block's scores. With MASKED a key is seen from column `sees` on."""
    dtype: gl.constexpr = k_tile.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_D), 2)
    AHEAD: gl.constexpr = scores_ahead(BLOCK_D, WITH_DQ)
    gl.static_assert(WITH_DQ or not AHEAD, "scores that are asked for ahead are taken beside dq")
    stage = block % STAGES
    q_tile = q_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    d_tile = d_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    zeros = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    if not AHEAD:
        score_token = _start_scores(k_rows, q_tiles, full, block, BLOCK_D, BLOCK_M, STAGES)
    weight_token = warpgroup_mma(v_rows, d_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not AHEAD:
        scores = warpgroup_mma_wait(1, deps=[score_token])
    lse_row = lse_rows.index(stage).load(gl.SliceLayout(0, SCORES))
    weights = gl.exp2(scores * (scale * LOG2_E) - lse_row[None, :])
    if MASKED:
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
        weights = gl.where(column[None, :] >= sees[:, None], weights, 0.0)
    dv_weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    dv_token = warpgroup_mma(dv_weights, d_tile, dv_acc, is_async=True)
    if AHEAD:
        # The last step of a walk computes its own once more, unused.
        after = gl.where(goes_on, block + 1, block)
        score_token = _start_scores(k_rows, q_tiles, full, after, BLOCK_D, BLOCK_M, STAGES)
        dweights = warpgroup_mma_wait(2, deps=[weight_token])
    else:
        dweights = warpgroup_mma_wait(1, deps=[weight_token])
    delta_row = delta_rows.index(stage).load(gl.SliceLayout(0, SCORES))
    dscores = (weights * (dweights - delta_row[None, :])).to(dtype)
    if WITH_DQ:
        meet(_scores_of(1 - NUMBER, block - 1), 256)
        _store_scores(NUMBER, s_tiles, dscores, block)
        dq_token = _late_dq(NUMBER, k_tile, s_tiles, block, BLOCK_D)
    dk_token = warpgroup_mma(gl.convert_layout(dscores, WEIGHTS), q_tile, dk_acc, is_async=True)
    if WITH_DQ:  # handed over beside the product for dk
        if AHEAD:
            dv_acc, scores, part = warpgroup_mma_wait(1, deps=[dv_token, score_token, dq_token])
        else:
            dv_acc, part = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        _hand_over(NUMBER, part, dq_tiles, dq_free, block)
        dk_acc = warpgroup_mma_wait(0, deps=[dk_token])
    else:
        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    _give_back(free, stage, BLOCK_D)
    return dk_acc, dv_acc, scores


@gluon.jit
def _empty_step(
    NUMBER: gl.constexpr, k_tile, s_tiles, dq_tiles, dq_free, full, free, block,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """A step of a group whose keys no query of the block sees: only its part of the product for dq."""
    mbarrier.wait(full.index(block % STAGES), block // STAGES & 1)
    _give_back(free, block % STAGES, BLOCK_D)
    if WITH_DQ:
        meet(_scores_of(1 - NUMBER, block - 1), 256)
        nothing = gl.zeros([GROUP_ROWS, BLOCK_M], k_tile.dtype, product_layout(BLOCK_M))
        _store_scores(NUMBER, s_tiles, nothing, block)
        part = warpgroup_mma_wait(0, deps=[_late_dq(NUMBER, k_tile, s_tiles, block, BLOCK_D)])
        _hand_over(NUMBER, part, dq_tiles, dq_free, block)


@gluon.jit
def _give_back(free, stage, BLOCK_D: gl.constexpr):
    """A group is done with the tiles of a stage."""
    if keys_in_registers(BLOCK_D):
        arrive(FREE + stage)
    else:
        mbarrier.arrive(free.index(stage))


@gluon.jit
def _scores_of(NUMBER: gl.constexpr, block):
    """The barrier at which a group says that its gradients of a block's scores are stored.

    It may arrive for a block before the other group has met it for the last one: two barriers take turns.
    """
    return SCORES_THERE + 2 * NUMBER + (block & 1)


@gluon.jit
def _store_scores(NUMBER: gl.constexpr, s_tiles, dscores, block):
    """Stores a group's gradients of a block's scores for the other group."""
    buffer = (block + SCORE_BUFFERS) % SCORE_BUFFERS  # the block before the first has one, too
    s_tiles.index(buffer).slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0).store(dscores)
    fence_async_shared()
    arrive(_scores_of(NUMBER, block), 256)


@gluon.jit
def _late_dq(NUMBER: gl.constexpr, k_tile, s_tiles, block, BLOCK_D: gl.constexpr):
    """Starts a group's half of the columns of the last block's dq: both groups' gradients of scores times k."""
    COLUMNS: gl.constexpr = BLOCK_D // 2
    left = s_tiles.index((block + SCORE_BUFFERS - 1) % SCORE_BUFFERS).permute((1, 0))
    right = k_tile.slice(NUMBER * COLUMNS, COLUMNS, 1)
    zeros = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(NUMBER: gl.constexpr, part, dq_tiles, dq_free, block):
    """Hands a group's part of dq to the warp that adds it."""
    mbarrier.wait(dq_free, (block & 1) ^ 1)
    dq_tiles.index(NUMBER)._reinterpret(gl.float32, part.shape, float_layout()).store(part)
    fence_async_shared()
    arrive(DQ_THERE)
