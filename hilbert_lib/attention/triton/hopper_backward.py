"""The backward for Hopper, warp-specialised: dk, dv and dq in one kernel of five products; dq by atomic sums.

A program holds 128 keys, two groups of warps 64 each, and walks over the queries that see them. The scores are
computed transposed, keys by queries, so that the weights stay in registers for dv and dk. Only their gradient goes
through shared memory, where both groups' halves meet for the product with k that adds to dq.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton.geometry import NOT_SPECIALIZED, is_in, segment_rows, tile_of, tile_positions
from hilbert_lib.attention.triton.hopper import GROUP_ROWS, LOG2_E, product_layout, row_layout, shared_layout


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_kernel(
    k, v, lse, delta, dq, dk, dv,
    q0, d0, q1, d1, q2, d2, q3, d3, q4, d4, q5, d5,
    branches, offsets, items, classes,
    scale,
    stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of 128 keys, and its share of dq (float32, without the factor `scale`).

    q0 to d5 are descriptors of q and dout as (batch, row, residue, head, dim), a pair for each branch.
    """
    dtype: gl.constexpr = k.dtype.element_ty
    k_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    v_tile = gl.allocate_shared_memory(dtype, [2 * GROUP_ROWS, BLOCK_D], shared_layout())
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], q0.layout)
    d_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, 1, BLOCK_D], d0.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [2, 2 * GROUP_ROWS, BLOCK_M], shared_layout())
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=2)
    for half in gl.static_range(2):
        mbarrier.init(s_full.index(half), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    # Written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_first_group, (
            k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
            k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES,
            N_BRANCHES, CAUSAL,
        )),
        (_second_group, (
            k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
            k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES,
            N_BRANCHES, CAUSAL,
        )),
        (_copy, (
            (q0, q1, q2, q3, q4, q5), (d0, d1, d2, d3, d4, d5), branches, offsets, items, classes, q_tiles, d_tiles,
            full, free, keys, kv_heads, group, chunk, stride, chunks, phases, count, BLOCK_M, STAGES, N_BRANCHES,
            CAUSAL,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _queries(
    branches, offsets, i, kv_heads, g, first, lowest, highest, keys, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr
):
    """The queries of a branch that see any of the keys from `lowest` to `highest`.

    Returns:
        inside: whether the tile is in the branch. key: position of the segment's query 0. r: rate. begin, n: number of
        the first query, and past the last. masked: number from which on, in steps of BLOCK_M from begin, all keys are
        seen.
    """
    w = gl.load(branches + 2 * i)
    r = gl.load(branches + 2 * i + 1)
    o = gl.load(offsets + i * kv_heads + g)
    start = first // w * w
    inside = (o >= 0) & is_in(first, start, r, o)
    n = segment_rows(start, w, r, o, keys)
    begin = 0
    masked = 0
    if CAUSAL:
        begin = gl.maximum(0, lowest - start - o + r - 1) // r
        masked = gl.maximum(begin, (highest - start - o + r - 1) // r)
        masked = gl.minimum(n, begin + (masked - begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    return inside, start + o, r, begin, masked, n


@gluon.jit
def _copy(
    q_descriptors, d_descriptors, branches, offsets, items, classes, q_tiles, d_tiles, full, free, keys, kv_heads,
    group, chunk, stride, chunks, phases, count, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Tiles of q and dout into the ring of stages, in the order in which the groups take them."""
    b, g, _, _, _, _, size, _, first, lowest, highest = tile_of(
        gl.program_id(0), items, classes, 0, keys, chunk, stride, chunks, phases, count, kv_heads, 1
    )
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, key, r, begin, _masked, n = _queries(
            branches, offsets, i, kv_heads, g, first, lowest, highest, keys, BLOCK_M, CAUSAL
        )
        if (size > 0) & inside:
            row = key // r
            residue = key % r
            # Where r does not divide the length, the last rows are reached from the residues past r.
            late = row + n > keys // r
            row = gl.where(late, row - 1, row)
            residue = gl.where(late, residue + r, residue)
            for member in range(group):
                h = g * group + member
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
                    block += 1


@gluon.jit
def _first_group(
    k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
    k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _differentiate(
        0, k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
        k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, N_BRANCHES,
        CAUSAL,
    )  # fmt: skip


@gluon.jit
def _second_group(
    k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
    k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    _differentiate(
        1, k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles, d_tiles, s_tiles,
        k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        keys, kv_heads, group, chunk, stride, chunks, phases, count, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, N_BRANCHES,
        CAUSAL,
    )  # fmt: skip


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, k, v, lse, delta, dq, dk, dv, branches, offsets, items, classes, k_tile, v_tile, q_tiles,
    d_tiles, s_tiles, k_full, s_full, full, free, scale, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, keys, kv_heads, group, chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
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

        dk_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        dv_acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, GRADIENTS)
        block = 0
        for i in range(N_BRANCHES):
            inside, key, r, begin, masked, n = _queries(
                branches, offsets, i, kv_heads, g, first, lowest, highest, keys, BLOCK_M, CAUSAL
            )
            if inside:
                for member in range(group):
                    h = g * group + member
                    scalars = (b.to(gl.int64) * kv_heads * group + h) * keys
                    dq_head = dq + (b.to(gl.int64) * keys * kv_heads * group + h) * HEAD_DIM
                    if CAUSAL:
                        sees = (key_position - key + r - 1) // r  # number of the first query that sees each key
                        for j in range(begin, masked, BLOCK_M):
                            dk_acc, dv_acc = _step(
                                NUMBER, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, s_full,
                                full, free, lse + scalars, delta + scalars, dq_head, sees, block, j, n, key, r, scale,
                                kv_heads * group * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, True,
                            )  # fmt: skip
                            block += 1
                    for j in range(gl.maximum(begin, masked), n, BLOCK_M):
                        dk_acc, dv_acc = _step(
                            NUMBER, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, s_full,
                            full, free, lse + scalars, delta + scalars, dq_head, key_position, block, j, n, key, r,
                            scale, kv_heads * group * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_M, STAGES, False,
                        )  # fmt: skip
                        block += 1
        dkv_rows = ((b.to(gl.int64) * keys + row) * kv_heads + g) * HEAD_DIM
        gl.store(dk + dkv_rows[:, None] + dims[None, :], gl.convert_layout((dk_acc * scale).to(dtype), ROWS), mask=here)
        gl.store(dv + dkv_rows[:, None] + dims[None, :], gl.convert_layout(dv_acc.to(dtype), ROWS), mask=here)


@gluon.jit
def _step(
    NUMBER: gl.constexpr, dk_acc, dv_acc, k_tile, k_rows, v_rows, q_tiles, d_tiles, s_tiles, s_full, full, free,
    lse, delta, dq_head, sees, block, j, n, key, r, scale, stride_dq, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dk, dv and dq of a block of queries, numbers j to j + BLOCK_M of a segment."""
    dtype: gl.constexpr = k_tile.dtype
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, product_layout(BLOCK_D), 2)
    stage = block % STAGES
    number = j + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
    query = key + number * r
    lse_row = gl.load(lse + query, mask=number < n, other=float("inf"))  # past the end: weight 0
    delta_row = gl.load(delta + query, mask=number < n, other=0.0)
    # Both products begin at what is subtracted from them: no register holds it meanwhile.
    below_lse = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, SCORES) - (lse_row / scale)[None, :]
    below_delta = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, SCORES) - delta_row[None, :]

    mbarrier.wait(full.index(stage), block // STAGES & 1)
    q_tile = q_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    d_tile = d_tiles.index(stage)._reinterpret(dtype, [BLOCK_M, BLOCK_D], shared_layout())
    score_token = warpgroup_mma(k_rows, q_tile.permute((1, 0)), below_lse, is_async=True)
    weight_token = warpgroup_mma(v_rows, d_tile.permute((1, 0)), below_delta, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[score_token])
    weights = gl.exp2(scores * (scale * LOG2_E))
    if MASKED:
        weights = gl.where(number[None, :] >= sees[:, None], weights, 0.0)
    dv_weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
    dv_token = warpgroup_mma(dv_weights, d_tile, dv_acc, is_async=True)
    dweights = warpgroup_mma_wait(1, deps=[weight_token])
    dscores = (weights * dweights).to(dtype)
    s_tile = s_tiles.index(block % 2)
    s_tile.slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 0).store(dscores)
    fence_async_shared()
    mbarrier.arrive(s_full.index(block % 2))
    dk_token = warpgroup_mma(gl.convert_layout(dscores, WEIGHTS), q_tile, dk_acc, is_async=True)

    mbarrier.wait(s_full.index(block % 2), block // 2 & 1)
    if BLOCK_M == GROUP_ROWS:  # each group takes half of the columns
        COLUMNS: gl.constexpr = BLOCK_D // 2
        left = s_tile.permute((1, 0))
        right = k_tile.slice(NUMBER * COLUMNS, COLUMNS, 1)
        row0: gl.constexpr = 0
        column0: gl.constexpr = NUMBER * COLUMNS
    else:  # half of the rows
        COLUMNS: gl.constexpr = BLOCK_D
        left = s_tile.slice(NUMBER * GROUP_ROWS, GROUP_ROWS, 1).permute((1, 0))
        right = k_tile
        row0: gl.constexpr = NUMBER * GROUP_ROWS
        column0: gl.constexpr = 0
    PART: gl.constexpr = product_layout(COLUMNS)
    dq_token = warpgroup_mma(
        left, right, gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, PART), use_acc=False, is_async=True
    )
    dv_acc, dk_acc = warpgroup_mma_wait(1, deps=[dv_token, dk_token])
    mbarrier.arrive(free.index(stage))
    part = warpgroup_mma_wait(0, deps=[dq_token])
    dq_number = j + row0 + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, PART))
    dq_dims = column0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, PART))
    dq_rows = (key + dq_number * r).to(gl.int64) * stride_dq
    here = (dq_number < n)[:, None] & (dq_dims[None, :] < HEAD_DIM)
    gl.atomic_add(dq_head + dq_rows[:, None] + dq_dims[None, :], part, mask=here, sem="relaxed")
    return dk_acc, dv_acc
