"""The backward for Hopper, warp-specialised: dk, dv and dq in one kernel of five products.

A program holds 128 keys, two groups of warps 64 each, and walks over the queries that see them. The scores are
computed transposed, keys by queries, so that the weights stay in registers for dv and dk. Only their gradient goes
through shared memory, where both groups' halves meet for the product with k. The copy engine adds that to dq in
global memory, in an order that differs from run to run.
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
from hilbert_lib.attention.triton.hopper_tiles import (
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

# The hardware's barriers, by number: both groups have stored a block's gradients of scores; their parts of its dq.
SCORES_THERE = gl.constexpr(FIRST_BARRIER)
DQ_THERE = gl.constexpr(FIRST_BARRIER + 1)


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
    scale,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr, WITH_DQ: gl.constexpr,
    READ_PARTIAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of 128 keys, and its share of dq (float32, without the factor `scale`).

    q0 to dq5 are descriptors of q, dout and dq as (batch, row, residue, head, dim), three for each branch. CUT says
    whether any tile has fewer than 128 keys. With READ_PARTIAL dk and dv are added to what is there. Past a segment's
    end stand rows of the next one, with weight 0: a NaN among them does reach the gradients of this segment.
    """
    dtype: gl.constexpr = k.dtype.element_ty
    k_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    v_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], q0.layout)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], d0.layout)
    if WITH_DQ:
        s_tiles = gl.allocate_shared_memory(dtype, [2, 2 * GROUP_ROWS, BLOCK_M], shared_layout())
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
            count, BLOCK_M, STAGES, N_BRANCHES, CAUSAL,
        )),
        (_add, (
            (dq0, dq1, dq2, dq3, dq4, dq5), branches, offsets, items, classes, dq_tiles, dq_free, keys,
            kv_heads, group, chunk, stride, chunks, phases, count, BLOCK_M, N_BRANCHES, CAUSAL, WITH_DQ,
        )),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@gluon.jit
def _range(start, w, r, o, lowest, highest, keys, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Which queries of a segment see any of the keys from `lowest` to `highest`.

    Returns:
        begin, n: number of the first, and past the last. free: number from which on, in steps of BLOCK_M from begin,
        they see all of these keys.
    """
    n = segment_rows(start, w, r, o, keys)
    begin = 0
    free = 0
    if CAUSAL:
        begin = gl.maximum(0, lowest - start - o + r - 1) // r
        free = gl.maximum(begin, (highest - start - o + r - 1) // r)
        free = gl.minimum(n, begin + (free - begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    return begin, free, n


@gluon.jit
def _copy(
    q_descriptors, d_descriptors, lse, delta, branches, offsets, items, classes, q_tiles, d_tiles, lse_rows,
    delta_rows, full, free, keys, kv_heads, group, chunk, stride, chunks, phases, count, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tiles of q and dout, with lse (to base 2) and delta, into the ring of stages, in the order of their use."""
    b, g, _, _, _, _, size, _, first, lowest, highest = tile_of(
        gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
    )
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
        if (size > 0) & inside:
            begin, _free, n = _range(start, w, r, o, lowest, highest, keys, BLOCK_M, CAUSAL)
            row, residue = segment_coordinates(start + o, r, n, keys)
            for member in range(group):
                h = g * group + member
                lse_head = lse + (b.to(gl.int64) * kv_heads * group + h) * keys
                delta_head = delta + (b.to(gl.int64) * kv_heads * group + h) * keys
                for j in range(begin, n, BLOCK_M):
                    stage = block % STAGES
                    mbarrier.wait(free.index(stage), (block // STAGES & 1) ^ 1)
                    mbarrier.expect(full.index(stage), 2 * q_descriptors[i].block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        q_descriptors[i], [b, row + j, residue, h, 0], full.index(stage), q_tiles.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        d_descriptors[i], [b, row + j, residue, h, 0], full.index(stage), d_tiles.index(stage)
                    )
                    number = j + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
                    query = start + o + number * r
                    # Weight 0 past the end of the segment, and where a query saw no key.
                    lse_row = gl.load(lse_head + query, mask=number < n, other=float("inf"))
                    lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row)
                    lse_rows.index(stage).store(lse_row * LOG2_E)
                    delta_rows.index(stage).store(gl.load(delta_head + query, mask=number < n, other=0.0))
                    mbarrier.arrive(full.index(stage))
                    block += 1


@gluon.jit
def _add(
    dq_descriptors, branches, offsets, items, classes, dq_tiles, dq_free, keys, kv_heads, group, chunk,
    stride, chunks, phases, count, BLOCK_M: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Adds what the groups computed for a block of queries to dq. Rows past a segment's end are zero there."""
    if WITH_DQ:
        b, g, _, _, _, _, size, _, first, lowest, highest = tile_of(
            gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
        )
        for i in gl.static_range(N_BRANCHES):
            inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
            if (size > 0) & inside:
                begin, _free, n = _range(start, w, r, o, lowest, highest, keys, BLOCK_M, CAUSAL)
                row, residue = segment_coordinates(start + o, r, n, keys)
                for member in range(group):
                    for j in range(begin, n, BLOCK_M):
                        meet(DQ_THERE)
                        for half in gl.static_range(2):
                            if BLOCK_M == GROUP_ROWS:
                                coordinates = [b, row + j, residue, g * group + member, half * dq_tiles.shape[5]]
                            else:
                                coordinates = [b, row + j + half * GROUP_ROWS, residue, g * group + member, 0]
                            add_shared_to_global(dq_descriptors[i], coordinates, dq_tiles.index(half))
                        tma.store_wait(0)
                        mbarrier.arrive(dq_free)


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, k, v, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
    lse_rows, delta_rows, dq_tiles, k_full, dq_free, full, free, scale, stride_kb, stride_kn,
    stride_kh, stride_vb, stride_vn, stride_vh, keys, kv_heads, group, chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, CUT: gl.constexpr, WITH_DQ: gl.constexpr,
    READ_PARTIAL: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 keys of the tile against every block of queries."""
    dtype: gl.constexpr = k.dtype.element_ty
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    GRADIENTS: gl.constexpr = product_layout(BLOCK_D)
    ROWS: gl.constexpr = row_layout(BLOCK_D)
    b, g, chunk_start, members, n_classes, u, size, chunk_end, first, lowest, highest = tile_of(
        gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
    )
    if size > 0:
        if CUT:
            is_empty = size <= NUMBER * GROUP_ROWS
            if WITH_DQ:  # noqa: SIM102 - known when it compiles, the other one not
                if is_empty:
                    for half in gl.static_range(2):
                        nothing = gl.zeros([GROUP_ROWS, BLOCK_M], dtype, SCORES)
                        s_tiles.index(half).slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0).store(nothing)
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
        fence_async_shared()
        # The product for dq takes the keys of both groups.
        mbarrier.arrive(k_full)
        mbarrier.wait(k_full, 0)
        key_rows = NUMBER * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
        key_position = tile_positions(chunk_start, members, n_classes, u + key_rows, stride)

        is_there = (key_rows < size) & (key_position < chunk_end)
        is_full = (size == 2 * GROUP_ROWS) & (
            tile_positions(chunk_start, members, n_classes, u + 2 * GROUP_ROWS - 1, stride) < chunk_end
        )

        dk_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        dv_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = segment_of(branches, offsets, i, kv_heads, g, first)
            if inside:
                begin, unmasked, n = _range(start, w, r, o, lowest, highest, keys, BLOCK_M, CAUSAL)
                key = start + o
                if CUT:
                    unmasked = gl.where(is_full, unmasked, n)
                members_left = group
                if CUT:
                    if is_empty:
                        for _j in range(group * gl.cdiv(n - begin, BLOCK_M)):
                            _empty_step(
                                NUMBER, k_tile, s_tiles, dq_tiles, dq_free, full, free, block,
                                BLOCK_D, BLOCK_M, STAGES, WITH_DQ,
                            )  # fmt: skip
                            block += 1
                    members_left = gl.where(is_empty, 0, group)
                for _member in range(members_left):
                    if CAUSAL or CUT:
                        # The number of the first query that sees each key; for a key that is not there, none.
                        sees = gl.zeros_like(key_position)
                        if CAUSAL:
                            sees = (key_position - key + r - 1) // r
                        sees = gl.where(is_there, sees, n)
                        for j in range(begin, unmasked, BLOCK_M):
                            dk_acc, dv_acc = _step(
                                NUMBER, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles,
                                dq_free, full, free, lse_rows, delta_rows, sees - j, block, scale,
                                BLOCK_D, BLOCK_M, STAGES, WITH_DQ, True,
                            )  # fmt: skip
                            block += 1
                    for _j in range(gl.maximum(begin, unmasked), n, BLOCK_M):
                        dk_acc, dv_acc = _step(
                            NUMBER, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles,
                            dq_free, full, free, lse_rows, delta_rows, key_position, block, scale,
                            BLOCK_D, BLOCK_M, STAGES, WITH_DQ, False,
                        )  # fmt: skip
                        block += 1
        # From where the products lie: positions in another layout would take registers all through the loop.
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
def _step(
    NUMBER: gl.constexpr, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, dq_tiles,
    dq_free, full, free, lse_rows, delta_rows, sees, block, scale, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dk, dv and dq of a block of queries; with MASKED, a key is seen from column `sees` on."""
    dtype: gl.constexpr = k_tile.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_D), 2)
    stage = block % STAGES
    mbarrier.wait(full.index(stage), block // STAGES & 1)
    q_tile = q_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    d_tile = d_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    zeros = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    score_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    weight_token = warpgroup_mma(v_rows, d_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[score_token])
    lse_row = lse_rows.index(stage).load(gl.SliceLayout(0, SCORES))
    weights = gl.exp2(scores * (scale * LOG2_E) - lse_row[None, :])
    if MASKED:
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
        weights = gl.where(column[None, :] >= sees[:, None], weights, 0.0)
    dv_weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    dv_token = warpgroup_mma(dv_weights, d_tile, dv_acc, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=[weight_token])
    delta_row = delta_rows.index(stage).load(gl.SliceLayout(0, SCORES))
    dscores = (weights * (dweights - delta_row[None, :])).to(dtype)
    if WITH_DQ:
        s_tiles.index(block % 2).slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0).store(dscores)
        fence_async_shared()
        dq_token = _share_of_dq(NUMBER, k_tile, s_tiles, block, BLOCK_D, BLOCK_M)
    dk_token = warpgroup_mma(gl.convert_layout(dscores, WEIGHTS), q_tile, dk_acc, is_async=True)
    if WITH_DQ:  # handed over beside the product for dk
        dv_acc, part = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        _hand_over(NUMBER, part, dq_tiles, dq_free, block)
        dk_acc = warpgroup_mma_wait(0, deps=[dk_token])
    else:
        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])
    mbarrier.arrive(free.index(stage))
    return dk_acc, dv_acc


@gluon.jit
def _empty_step(
    NUMBER: gl.constexpr, k_tile, s_tiles, dq_tiles, dq_free, full, free, block,
    BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """A step of a group without keys: its part of the product for dq alone."""
    mbarrier.wait(full.index(block % STAGES), block // STAGES & 1)
    mbarrier.arrive(free.index(block % STAGES))
    if WITH_DQ:
        dq_token = _share_of_dq(NUMBER, k_tile, s_tiles, block, BLOCK_D, BLOCK_M)
        _hand_over(NUMBER, warpgroup_mma_wait(0, deps=[dq_token]), dq_tiles, dq_free, block)


@gluon.jit
def _share_of_dq(
    NUMBER: gl.constexpr, k_tile, s_tiles, block, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """One group's part of the product of both groups' score gradients with k, once they are there."""
    meet(SCORES_THERE, 256)
    s_tile = s_tiles.index(block % 2)
    if BLOCK_M == GROUP_ROWS:  # each group takes half of the columns
        COLUMNS: gl.constexpr = BLOCK_D // 2
        left = s_tile.permute((1, 0))
        right = k_tile.slice(NUMBER * COLUMNS, COLUMNS, 1)
    else:  # half of the rows
        COLUMNS: gl.constexpr = BLOCK_D
        left = s_tile.slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 1).permute((1, 0))
        right = k_tile
    zeros = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def _hand_over(NUMBER: gl.constexpr, part, dq_tiles, dq_free, block):
    """A group's part of dq to the warp that adds it."""
    mbarrier.wait(dq_free, (block & 1) ^ 1)
    dq_tiles.index(NUMBER)._reinterpret(gl.float32, part.shape, float_layout()).store(part)
    fence_async_shared()
    arrive(DQ_THERE)
