"""Output and lse of all branches of a pass in one online softmax."""

import triton
import triton.language as tl

from hilbert_lib.attention.triton import geometry


@triton.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def forward_kernel(
    q, k, v, out, lse, partial_out, partial_lse, flag,
    branches, offsets, branch_ids, items, classes, documents, inverse, padding, seed,
    scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    first_query, queries, keys, heads, group,
    chunk, stride, chunks, phases, count, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    READ_PARTIAL: tl.constexpr, WRITE_PARTIAL: tl.constexpr, PRECISION: tl.constexpr, IF_FLAG: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head through the branches of one pass; with IF_FLAG only where flag is set.

    Partial results may be out and lse themselves. READ_PARTIAL begins with them, and WRITE_PARTIAL writes them.
    """
    # Dense: out [batch, queries, heads, HEAD_DIM], lse [batch, heads, queries], and the partial results.
    if IF_FLAG:  # noqa: SIM102 - a constant, apart from what is loaded
        if tl.load(flag) == 0:
            return
    b, h, tile, name, origin, keys = geometry.place_of(
        tl.program_id(0), documents, items, classes, first_query, queries, keys, heads, group,
        chunk, stride, chunks, phases, count,
    )  # fmt: skip
    if tile.size == 0:
        return
    g = h // group
    rows = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    position = geometry.tile_positions(tile, rows)  # [BLOCK_M]
    exists = (rows < tile.size) & (position >= tile.lowest) & (position < tile.end)  # [BLOCK_M]
    row = (position - first_query).to(tl.int64) + origin  # [BLOCK_M]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    q_ptrs = (
        q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + row[:, None] * stride_qn + dims[None, :]
    )  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=exists[:, None] & in_dim, other=0.0)  # [BLOCK_M, BLOCK_D]
    k_head = k + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kh + origin * stride_kn
    v_head = v + b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vh + origin * stride_vn
    padding_row = padding + b.to(tl.int64) * keys
    out_rows = ((b.to(tl.int64) * queries + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    lse_rows = (b.to(tl.int64) * heads + h) * queries + row  # [BLOCK_M]

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]; largest score so far, before scaling
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    if READ_PARTIAL:
        before = tl.load(partial_lse + lse_rows, mask=exists, other=float("-inf"))  # [BLOCK_M]
        has_keys = before != float("-inf")  # [BLOCK_M]; NaN is carried on
        m = before / scale  # [BLOCK_M]
        total = tl.where(has_keys, 1.0, 0.0)  # [BLOCK_M]
        acc = tl.load(
            partial_out + out_rows[:, None] + dims[None, :], mask=has_keys[:, None] & in_dim, other=0.0
        )  # [BLOCK_M, BLOCK_D]
        acc = acc.to(tl.float32)  # [BLOCK_M, BLOCK_D]

    for i in range(n_branches):
        w = tl.load(branches + 2 * i)
        r = tl.load(branches + 2 * i + 1)
        o = tl.load(offsets + i * (heads // group) + g)
        branch = tl.load(branch_ids + i)
        for s in range(tile.lowest // w, tile.highest // w + 1):
            start = s * w
            if (o >= 0) & geometry.is_in(tile.first, start, r, o):
                n, full, end = geometry.key_range(
                    start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, PADDING
                )
                for MASKED in tl.static_range(2):
                    acc, total, m = _walk(  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
                        acc, total, m, q_tile, k_head, v_head, padding_row, inverse, seed, position,
                        start, w, o, r, n, full if MASKED else 0, end if MASKED else full, name, h, branch, scale,
                        drop_below, stride_kn, stride_vn, dims,
                        HEAD_DIM, BLOCK_N, MASKED, CAUSAL, GATHER, PADDING, DROPOUT, PRECISION,
                    )  # fmt: skip

    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys; NaN stays NaN
    result = acc / denominator[:, None]  # [BLOCK_M, BLOCK_D]
    result_lse = tl.where(total == 0.0, float("-inf"), m * scale + tl.log(denominator))  # [BLOCK_M]
    store = exists[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    if WRITE_PARTIAL:
        tl.store(partial_out + out_rows[:, None] + dims[None, :], result, mask=store)
        tl.store(partial_lse + lse_rows, result_lse, mask=exists)
    else:
        tl.store(out + out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=store)
        tl.store(lse + lse_rows, result_lse, mask=exists)


@triton.jit
def _walk(
    acc, total, m, q_tile, k_head, v_head, padding_row, inverse, seed, position,
    start, w, o, r, n, begin, end, b, h, branch, scale, drop_below, stride_kn, stride_vn, dims,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, GATHER: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output, sum of weights and maximum after keys `begin` to `end` of one segment of a branch."""
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    for j in range(begin, end, BLOCK_N):
        valid = j + cols < n  # [BLOCK_N]
        key, slot, load = geometry.key_rows(
            start + o, r, j + cols, valid, in_dim, inverse, MASKED, GATHER
        )  # [BLOCK_N], [BLOCK_N], [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_head + slot[:, None] * stride_kn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            allowed = (
                valid[None, :] & (position[:, None] >= start) & (position[:, None] - start < w)
            )  # [BLOCK_M, BLOCK_N]
            if CAUSAL:
                allowed &= key[None, :] <= position[:, None]
            if PADDING:
                allowed &= (tl.load(padding_row + key, mask=valid, other=1) == 0)[None, :]
            scores = tl.where(allowed, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
        largest = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_M]
        finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]
        if v_head.dtype.element_ty == tl.float32:
            # Subtract first, then scale: the largest score then gives exactly 1, however large it is.
            weights = tl.exp2((scores - finite[:, None]) * (scale * geometry.LOG2_E))  # [BLOCK_M, BLOCK_N]
        else:
            # One fused instruction; at scores of 1e4 its rounding is a fifth of half precision's own.
            weights = tl.exp2(
                scores * (scale * geometry.LOG2_E) - (finite * (scale * geometry.LOG2_E))[:, None]
            )  # [BLOCK_M, BLOCK_N]
        decay = tl.exp2((m - finite) * (scale * geometry.LOG2_E))  # [BLOCK_M]
        total = total * decay + tl.sum(weights, 1)  # [BLOCK_M]
        m = largest  # [BLOCK_M]
        if DROPOUT:
            weights *= geometry.block_dropout_factor(seed, drop_below, b, h, branch, w, r, position, key, j, BLOCK_N)
        v_tile = tl.load(v_head + slot[:, None] * stride_vn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        acc = acc * decay[:, None]  # [BLOCK_M, BLOCK_D]
        if MASKED:
            # 0 * NaN is NaN: a row of v that is not finite must reach only the queries that may see it.
            bad = (v_tile - v_tile) != 0.0  # [BLOCK_N, BLOCK_D]
            if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
                reached = tl.dot(
                    allowed.to(v_tile.dtype), bad.to(v_tile.dtype), input_precision=PRECISION
                )  # [BLOCK_M, BLOCK_D]
                acc = tl.where(reached > 0.0, float("nan"), acc)  # [BLOCK_M, BLOCK_D]
                v_tile = tl.where(bad, 0.0, v_tile)  # [BLOCK_N, BLOCK_D]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return acc, total, m
