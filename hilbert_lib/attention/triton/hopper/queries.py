"""The backward's dq for Hopper, warp-specialised, with the same bits every time: one program for 128 queries.

It walks over blocks of keys as the forward does, and its copying warp is the forward's. A step makes three products:

    tensor cores   q k, dout v                 dscores k -> dq
    the group                   -> dscores

Each product is waited for, while the other group has the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import dropout, forward, order, tiles
from hilbert_lib.attention.triton.hopper.steps import (
    as_operand,
    k_free,
    kept_of_block,
    nothing,
    pass_over,
    start_scores,
    v_free,
)


@gluon.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def dq_kernel(
    q, dout, lse, delta, dq,
    k0, v0, k1, v1, k2, v2, k3, v3, k4, v4, k5, v5,
    branches, offsets, branch_ids, items, classes, documents, seed,
    scale, drop_below, stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh,
    first_query, queries, keys, heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, READ_PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dq of one tile of 128 queries; with READ_PARTIAL it is added to that in memory.

    documents: of packed documents the places that `packed.places_kernel` finds; otherwise None.

    Rows of the next segment lie past a segment's end, with weight 0: a NaN among them does reach dq of this segment.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, tiles.GROUP_ROWS, BLOCK_D], tiles.shared_layout(BLOCK_D))
    d_tiles = gl.allocate_shared_memory(dtype, [2, tiles.GROUP_ROWS, BLOCK_D], tiles.shared_layout(BLOCK_D))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, 1, BLOCK_D], k0.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, 1, BLOCK_D], v0.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = tiles.Ring(k_tiles, v_tiles, k_full, v_full)
    numbers = k_full  # [STAGES, 1]; this stands in for them without dropout
    if DROPOUT:
        ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        fours = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers_of_branches = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers = dropout.Numbers(fours, numbers_of_branches)
    PACKED: gl.constexpr = documents is not None
    tables = (branches, offsets, items, classes)
    if PACKED:
        tables = (branches, offsets, items, classes, documents)
    sizes, grid = (first_query, queries, keys, heads, group), (chunk, stride, chunks, phases, count)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=2 if DROPOUT else 1)
        mbarrier.init(v_full.index(stage), count=1)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_differentiate, (
            0, q, dout, lse, delta, dq, tables, q_tiles, d_tiles, ring, numbers, seed, scale, drop_below,
            stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid,
            HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, READ_PARTIAL, DROPOUT, PACKED,
        )),
        (_differentiate, (
            1, q, dout, lse, delta, dq, tables, q_tiles, d_tiles, ring, numbers, seed, scale, drop_below,
            stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid,
            HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, READ_PARTIAL, DROPOUT, PACKED,
        )),
        (forward.copy_keys, (
            (k0, k1, k2, k3, k4, k5), (v0, v1, v2, v3, v4, v5), tables, branch_ids, q, ring, ring,
            numbers, ring, ring, sizes, grid, BLOCK_N, N_BRANCHES, CAUSAL, False, False, DROPOUT, PACKED,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, q, dout, lse, delta, dq, tables, q_tiles, d_tiles, ring, numbers, seed, scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid, HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr,
    READ_PARTIAL: gl.constexpr, DROPOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of the tile against every block of keys."""
    b, h, tile, branches, place = forward.tile_of(tables, sizes, grid, False, PACKED)
    first_query, queries, _keys, heads, _group = sizes
    keys = place.keys
    if tile.size > NUMBER * tiles.GROUP_ROWS:
        SCORES: gl.constexpr = tiles.product_layout(BLOCK_N)
        ROWS: gl.constexpr = tiles.row_layout(BLOCK_D)
        q_tile, d_tile = q_tiles.index(NUMBER), d_tiles.index(NUMBER)  # [GROUP_ROWS, BLOCK_D] each
        rows = NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, ROWS))  # [GROUP_ROWS]
        position = geometry.tile_positions(tile, rows)  # [GROUP_ROWS]
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS))[None, :]  # [1, BLOCK_D]
        row_mask = ((rows < tile.size) & (position >= tile.lowest) & (position < tile.end))[:, None] & (
            dims < HEAD_DIM
        )  # [GROUP_ROWS, BLOCK_D]
        row = (position - first_query).to(gl.int64)[:, None]  # [GROUP_ROWS, 1]
        q_head = q + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
        d_head = dout + b.to(gl.int64) * stride_db + h.to(gl.int64) * stride_dh
        if PACKED:  # position 0 of the document
            q_head += place.origin.to(gl.int64) * stride_qn
            d_head += place.origin.to(gl.int64) * stride_dn
            dq += place.origin.to(gl.int64) * heads * HEAD_DIM
            lse += place.origin
            delta += place.origin
        q_tile.store(gl.load(q_head + row * stride_qn + dims, mask=row_mask, other=0.0))
        d_tile.store(gl.load(d_head + row * stride_dn + dims, mask=row_mask, other=0.0))
        fence_async_shared()
        score_rows = NUMBER * tiles.GROUP_ROWS + gl.arange(
            0, tiles.GROUP_ROWS, gl.SliceLayout(1, SCORES)
        )  # [GROUP_ROWS]
        query = geometry.tile_positions(tile, score_rows)  # [GROUP_ROWS]
        exists = (score_rows < tile.size) & (query >= tile.lowest) & (query < tile.end)  # [GROUP_ROWS]
        lse_rows = (b.to(gl.int64) * heads + h) * queries + query - first_query  # [GROUP_ROWS]
        # Weight 0 where a query is not there or saw no key.
        lse_row = gl.load(lse + lse_rows, mask=exists, other=float("inf"))  # [GROUP_ROWS]
        lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row) * geometry.LOG2_E  # [GROUP_ROWS]
        delta_row = gl.load(delta + lse_rows, mask=exists, other=0.0)  # [GROUP_ROWS]
        last = gl.minimum(tile.size, (NUMBER + 1) * tiles.GROUP_ROWS) - 1
        own_lowest = gl.maximum(tile.lowest, geometry.tile_positions(tile, NUMBER * tiles.GROUP_ROWS))
        own_highest = gl.minimum(tile.highest, geometry.tile_positions(tile, last))
        acc, no_total, _m = nothing(BLOCK_D, BLOCK_N)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
        drops = scale
        if DROPOUT:
            drops = forward.drops_of(query, no_total, seed, drop_below, place.sequence, h)
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if inside:
                n, full, end = geometry.key_range(start, w, r, o, keys, own_lowest, own_highest, BLOCK_N, CAUSAL, False)
                full = gl.maximum(0, gl.minimum(full, end))
                for _j in range(0, full, BLOCK_N):
                    acc = _step(
                        acc, q_tile, d_tile, lse_row, delta_row, ring, numbers, drops, block, scale, drop_below, query,
                        False, DROPOUT,
                    )  # [GROUP_ROWS, BLOCK_D]  # fmt: skip
                    block += 1
                seen_count = order.seen_keys(n, start + o, r, query, CAUSAL)  # [GROUP_ROWS]
                for j in range(full, end, BLOCK_N):
                    acc = _step(
                        acc, q_tile, d_tile, lse_row, delta_row, ring, numbers, drops, block, scale, drop_below,
                        seen_count - j, True, DROPOUT,
                    )  # [GROUP_ROWS, BLOCK_D]  # fmt: skip
                    block += 1
                if CAUSAL:
                    _n, _full, tile_end = geometry.key_range(
                        start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
                    )
                    for _j in range(gl.cdiv(tile_end, BLOCK_N) - gl.cdiv(end, BLOCK_N)):
                        pass_over(ring, block)
                        block += 1
        # Rows in this layout come after the loop: in it they would take registers.
        GRADIENTS: gl.constexpr = acc.type.layout
        written = gl.where(exists, query - first_query, -1)  # [GROUP_ROWS]
        out_row = gl.convert_layout(written, gl.SliceLayout(1, GRADIENTS))[:, None]  # [GROUP_ROWS, 1]
        out_dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, GRADIENTS))[None, :]  # [1, BLOCK_D]
        dq_rows = ((b.to(gl.int64) * queries + out_row) * heads + h) * HEAD_DIM  # [GROUP_ROWS, 1]
        written_mask = (out_row >= 0) & (out_dims < HEAD_DIM)  # [GROUP_ROWS, BLOCK_D]
        acc = acc * scale  # [GROUP_ROWS, BLOCK_D]
        if READ_PARTIAL:
            acc += gl.load(dq + dq_rows + out_dims, mask=written_mask, other=0.0).to(gl.float32)
        gl.store(dq + dq_rows + out_dims, acc.to(q_tile.dtype), mask=written_mask)
    elif tile.size > 0:  # this group's half of the tile is empty
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if inside:
                _, _, end = geometry.key_range(start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False)
                for _j in range(0, end, BLOCK_N):
                    pass_over(ring, block)
                    block += 1


@gluon.jit
def _step(
    acc, q_tile, d_tile, lse_row, delta_row, ring, numbers, drops, block, scale, drop_below, seen_count,
    MASKED: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dq after a block of keys; with MASKED a row sees the first `seen_count`."""
    KEYS: gl.constexpr = tiles.rows_of(ring.k_tiles.shape)
    score_token = start_scores(q_tile, ring, block)  # [GROUP_ROWS, KEYS]
    tiles.wait_full(ring.v_full, block)
    zeros = gl.zeros([tiles.GROUP_ROWS, KEYS], gl.float32, tiles.product_layout(KEYS))  # [GROUP_ROWS, KEYS]
    weight_token = warpgroup_mma(
        d_tile, tiles.tile_of_stage(ring.v_tiles, block).permute((1, 0)), zeros, use_acc=False, is_async=True
    )  # [GROUP_ROWS, KEYS]
    if DROPOUT:
        kept = kept_of_block(drops, numbers, block, ring)  # [GROUP_ROWS, 4]
    scores = warpgroup_mma_wait(1, deps=[score_token])  # [GROUP_ROWS, KEYS]
    weights = gl.exp2(scores * (scale * geometry.LOG2_E) - lse_row[:, None])  # [GROUP_ROWS, KEYS]
    if MASKED:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, weights.type.layout))  # [KEYS]
        weights = gl.where(column[None, :] < seen_count[:, None], weights, 0.0)  # [GROUP_ROWS, KEYS]
    dweights = warpgroup_mma_wait(0, deps=[weight_token])  # [GROUP_ROWS, KEYS]
    tiles.arrive(v_free(ring, block))
    if DROPOUT:
        dweights = dropout.without_dropped(dweights, kept, False)  # [GROUP_ROWS, KEYS]
        dweights = dweights * geometry.kept_factor(drop_below)  # [GROUP_ROWS, KEYS]
    dscores = as_operand(weights * (dweights - delta_row[:, None]), q_tile.dtype, acc.shape[1])  # [GROUP_ROWS, KEYS]
    dq_token = warpgroup_mma(
        dscores, tiles.tile_of_stage(ring.k_tiles, block), acc, is_async=True
    )  # [GROUP_ROWS, BLOCK_D]
    acc = warpgroup_mma_wait(0, deps=[dq_token])  # [GROUP_ROWS, BLOCK_D]
    tiles.arrive(k_free(ring, block))
    return acc
