"""Gradients without atomics, the same bits every time.

delta = rowsum(dout * out) - dlse; dq comes from tiles of queries, dk and dv from tiles of keys. Each has a kernel. In a
short call `backward_kernel` computes them all: its programs compute delta of the queries that they read.
"""

import triton
import triton.language as tl

from hilbert_lib.attention.triton import geometry


@triton.jit(do_not_specialize=["rows", "queries", "heads"])
def delta_kernel(
    out, dout, dlse, delta, stride_db, stride_dn, stride_dh, rows, queries, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, sums=None,
):  # fmt: skip
    """delta (batch, heads, queries) of dense out and strided dout. A row is one (sequence, query, head).

    dlse lies like delta, or is None. sums, float32, lies like out and is cleared for a later kernel; or is None.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = row < rows  # [BLOCK_M]
    mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    h, t = row % heads, row // heads % queries  # [BLOCK_M] each
    b = row // heads // queries  # [BLOCK_M]
    o = tl.load(out + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    o = o.to(tl.float32)  # [BLOCK_M, BLOCK_D]
    d_offsets = b * stride_db + t * stride_dn + h * stride_dh  # [BLOCK_M]
    do = tl.load(dout + d_offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    scalars = (b * heads + h) * queries + t  # [BLOCK_M]
    delta_ptrs, products = delta + scalars, tl.sum(o * do, 1)  # [BLOCK_M] each
    if dlse is not None:
        products -= tl.load(dlse + scalars, mask=exists, other=0.0)
    tl.store(delta_ptrs, products, mask=exists)
    if sums is not None:
        tl.store(sums + row[:, None] * HEAD_DIM + dims[None, :], tl.zeros_like(o), mask=mask)


@triton.jit
def _delta_of(out, dlse, rows, scalars, d_tile, exists, HEAD_DIM: tl.constexpr):
    """delta of queries from out, dlse and d_tile, their dout. rows, scalars: their places in out and in dlse."""
    dims = tl.arange(0, d_tile.shape[1])  # [BLOCK_D]
    mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    o_tile = tl.load(out + rows[:, None] + dims[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    products = tl.sum(o_tile.to(tl.float32) * d_tile.to(tl.float32), 1)  # [BLOCK_M]
    if dlse is not None:
        products -= tl.load(dlse + scalars, mask=exists, other=0.0)
    return products


@triton.jit(do_not_specialize=["count"])
def scale_kernel(sums, out, scale, count, BLOCK: tl.constexpr):
    """out, contiguous as sums (float32) are, is sums times scale; `count` elements, a multiple of 8."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    # Eight elements share a mask: with one mask an element the compiler would move them one by one.
    exists = place // 8 < count // 8  # [BLOCK]
    products = tl.load(sums + place, mask=exists, other=0.0) * scale  # [BLOCK]
    tl.store(out + place, products.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def dq_kernel(
    q, k, v, dout, lse, delta, dq, partial_dq,
    branches, offsets, branch_ids, items, classes, documents, inverse, padding, seed,
    scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    first_query, queries, keys, heads, group,
    chunk, stride, chunks, phases, count, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    READ_PARTIAL: tl.constexpr, WRITE_PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (batch, queries, heads, head_dim) of one tile of queries. It walks over keys as the forward does."""
    b, h, tile, name, origin, keys = geometry.place_of(
        tl.program_id(0), documents, items, classes, first_query, queries, keys, heads, group,
        chunk, stride, chunks, phases, count,
    )  # fmt: skip
    if tile.size == 0:
        return
    _dq_of_tile(
        b, h, tile, name, origin, q, k, v, dout, None, lse, None, delta, dq, partial_dq,
        branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
        stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        stride_db, stride_dn, stride_dh,
        first_query, queries, keys, heads, group, n_branches,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, GATHER, PADDING, DROPOUT, READ_PARTIAL, WRITE_PARTIAL, PRECISION,
    )  # fmt: skip


@triton.jit
def _dq_of_tile(
    b, h, tile, name, origin, q, k, v, dout, out, lse, dlse, delta, dq, partial_dq,
    branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    first_query, queries, keys, heads, group, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    READ_PARTIAL: tl.constexpr, WRITE_PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries. delta is computed from out and dlse where out is given."""
    g = h // group
    rows = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    position = geometry.tile_positions(tile, rows)  # [BLOCK_M]
    exists = (rows < tile.size) & (position >= tile.lowest) & (position < tile.end)  # [BLOCK_M]
    row = (position - first_query).to(tl.int64) + origin  # [BLOCK_M]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = exists[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    q_ptrs = (
        q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + row[:, None] * stride_qn + dims[None, :]
    )  # [BLOCK_M, BLOCK_D]
    d_ptrs = (
        dout + b.to(tl.int64) * stride_db + h.to(tl.int64) * stride_dh + row[:, None] * stride_dn + dims[None, :]
    )  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(q_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    d_tile = tl.load(d_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    scalars = (b.to(tl.int64) * heads + h) * queries + row  # [BLOCK_M]
    lse_row = tl.load(lse + scalars, mask=exists, other=float("-inf"))  # [BLOCK_M]
    lse_row = tl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK_M]; rows without keys: probability 0
    k_head = k + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kh + origin * stride_kn
    v_head = v + b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vh + origin * stride_vn
    padding_row = padding + b.to(tl.int64) * keys
    dq_rows = ((b.to(tl.int64) * queries + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    if out is None:
        delta_row = tl.load(delta + scalars, mask=exists, other=0.0)  # [BLOCK_M]
    else:
        delta_row = _delta_of(out, dlse, dq_rows, scalars, d_tile, exists, HEAD_DIM)  # [BLOCK_M]

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    if READ_PARTIAL:
        acc = tl.load(partial_dq + dq_rows[:, None] + dims[None, :], mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
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
                    acc = _dq_walk(  # [BLOCK_M, BLOCK_D]
                        acc, q_tile, d_tile, lse_row, delta_row, k_head, v_head, padding_row, inverse, seed, position,
                        start, w, o, r, n, full if MASKED else 0, end if MASKED else full, name, h, branch, scale,
                        drop_below, stride_kn, stride_vn, dims,
                        HEAD_DIM, BLOCK_N, MASKED, CAUSAL, GATHER, PADDING, DROPOUT, PRECISION,
                    )  # fmt: skip
    if WRITE_PARTIAL:
        tl.store(partial_dq + dq_rows[:, None] + dims[None, :], acc, mask=row_mask)
    else:
        tl.store(dq + dq_rows[:, None] + dims[None, :], (acc * scale).to(dq.dtype.element_ty), mask=row_mask)


@triton.jit
def _dq_walk(
    acc, q_tile, d_tile, lse_row, delta_row, k_head, v_head, padding_row, inverse, seed, position,
    start, w, o, r, n, begin, end, b, h, branch, scale, drop_below, stride_kn, stride_vn, dims,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, GATHER: tl.constexpr,
    PADDING: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq after keys `begin` to `end` of one segment of a branch, without the scale."""
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    for j in range(begin, end, BLOCK_N):
        valid = j + cols < n  # [BLOCK_N]
        key, slot, load = geometry.key_rows(
            start + o, r, j + cols, valid, in_dim, inverse, MASKED, GATHER
        )  # [BLOCK_N], [BLOCK_N], [BLOCK_N, BLOCK_D]
        if MASKED and PADDING:  # 0 * NaN is NaN: what is masked is not read
            valid &= tl.load(padding_row + key, mask=valid, other=1) == 0
            load = valid[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_head + slot[:, None] * stride_kn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_head + slot[:, None] * stride_vn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        weights = tl.exp2((scores * scale - lse_row[:, None]) * geometry.LOG2_E)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            allowed = (
                valid[None, :] & (position[:, None] >= start) & (position[:, None] - start < w)
            )  # [BLOCK_M, BLOCK_N]
            if CAUSAL:
                allowed &= key[None, :] <= position[:, None]
            weights = tl.where(allowed, weights, 0.0)  # [BLOCK_M, BLOCK_N]
        dweights = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if DROPOUT:
            dweights *= geometry.block_dropout_factor(seed, drop_below, b, h, branch, w, r, position, key, j, BLOCK_N)
        dscores = weights * (dweights - delta_row[:, None])  # [BLOCK_M, BLOCK_N]
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return acc


@triton.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def dkv_kernel(
    q, k, v, dout, lse, delta, dk, dv, partial_dk, partial_dv,
    branches, offsets, branch_ids, items, classes, documents, inverse, padding, seed,
    scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    first_query, queries, keys, kv_heads, group,
    chunk, stride, chunks, phases, count, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    READ_PARTIAL: tl.constexpr, WRITE_PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (batch, keys, kv_heads, head_dim) of one tile of BLOCK_N keys. Partial results may be dk and dv.

    Queries and keys of a segment are the same positions. So the walk over queries mirrors that over keys.
    """
    b, g, tile, name, origin, keys = geometry.place_of(
        tl.program_id(0), documents, items, classes, 0, keys, keys, kv_heads, 1,
        chunk, stride, chunks, phases, count,
    )  # fmt: skip
    if tile.size == 0:
        return
    _dkv_of_tile(
        b, g, tile, name, origin, q, k, v, dout, None, lse, None, delta, dk, dv, partial_dk, partial_dv,
        branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
        stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        stride_db, stride_dn, stride_dh,
        first_query, queries, keys, kv_heads, group, n_branches,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, GATHER, PADDING, DROPOUT, READ_PARTIAL, WRITE_PARTIAL, PRECISION,
    )  # fmt: skip


@triton.jit
def _dkv_of_tile(
    b, g, tile, name, origin, q, k, v, dout, out, lse, dlse, delta, dk, dv, partial_dk, partial_dv,
    branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    first_query, queries, keys, kv_heads, group, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    READ_PARTIAL: tl.constexpr, WRITE_PARTIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys. delta is computed from out and dlse where out is given."""
    rows = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    position = geometry.tile_positions(tile, rows)  # [BLOCK_N]
    exists = (rows < tile.size) & (position < tile.end)  # [BLOCK_N]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = exists[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
    slot = position.to(tl.int64) + origin  # [BLOCK_N]
    if GATHER:
        slot = tl.load(inverse + position, mask=exists, other=0).to(tl.int64)  # [BLOCK_N]
    k_ptrs = (
        k + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kh + slot[:, None] * stride_kn + dims[None, :]
    )  # [BLOCK_N, BLOCK_D]
    v_ptrs = (
        v + b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vh + slot[:, None] * stride_vn + dims[None, :]
    )  # [BLOCK_N, BLOCK_D]
    sees = exists  # [BLOCK_N]
    if PADDING:
        sees &= tl.load(padding + b.to(tl.int64) * keys + position, mask=exists, other=1) == 0
    # 0 * NaN is NaN: what is masked is not read.
    k_tile = tl.load(k_ptrs, mask=sees[:, None] & in_dim, other=0.0)  # [BLOCK_N, BLOCK_D]
    v_tile = tl.load(v_ptrs, mask=sees[:, None] & in_dim, other=0.0)  # [BLOCK_N, BLOCK_D]
    dkv_rows = ((b.to(tl.int64) * keys + slot) * kv_heads + g) * HEAD_DIM  # [BLOCK_N]

    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    if READ_PARTIAL:
        dk_before = tl.load(
            partial_dk + dkv_rows[:, None] + dims[None, :], mask=row_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        dk_acc = dk_before.to(tl.float32) / scale  # [BLOCK_N, BLOCK_D]
        dv_before = tl.load(
            partial_dv + dkv_rows[:, None] + dims[None, :], mask=row_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        dv_acc = dv_before.to(tl.float32)  # [BLOCK_N, BLOCK_D]
    last_query = first_query + queries - 1
    for i in range(n_branches):
        w = tl.load(branches + 2 * i)
        r = tl.load(branches + 2 * i + 1)
        o = tl.load(offsets + i * kv_heads + g)
        branch = tl.load(branch_ids + i)
        for s in range(tile.lowest // w, tile.highest // w + 1):
            start = s * w
            if (o >= 0) & geometry.is_in(tile.first, start, r, o):
                # Queries of the segment by number are begin to end. From `full` on they see all keys of the tile.
                end = geometry.segment_rows(start, w, r, o, keys)
                end = tl.minimum(end, geometry.segment_rows(start, w, r, o, last_query + 1))
                begin = geometry.segment_rows(start, w, r, o, first_query)
                is_one_segment = (start <= tile.lowest) & (tile.highest - start < w)
                full = begin
                if CAUSAL:
                    begin = tl.maximum(begin, (tl.maximum(tile.lowest - start, 0) - o + r - 1) // r)
                    full = tl.maximum(begin, (tile.highest - start - o + r - 1) // r)
                # Tiles up to `free` need a mask, and so does the last one, from `tail` to `end`, which is not full.
                free = begin + (full - begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M
                free = tl.where(is_one_segment, tl.minimum(free, end), end)
                if PADDING:
                    free = end
                tail = free + tl.maximum(end - free, 0) // BLOCK_M * BLOCK_M
                for member in range(group):
                    h = g * group + member
                    q_head = q + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh + origin * stride_qn
                    d_head = dout + b.to(tl.int64) * stride_db + h.to(tl.int64) * stride_dh + origin * stride_dn
                    scalars = (b.to(tl.int64) * kv_heads * group + h) * queries + origin
                    o_head, own_dlse, own_delta = out, dlse, delta
                    if out is None:
                        own_delta = delta + scalars
                    else:
                        o_head = out + ((b.to(tl.int64) * queries + origin) * kv_heads * group + h) * HEAD_DIM
                    if dlse is not None:
                        own_dlse = dlse + scalars
                    dk_acc, dv_acc = _dkv_walk(  # [BLOCK_N, BLOCK_D] each
                        dk_acc, dv_acc, k_tile, v_tile, q_head, d_head, o_head, kv_heads * group * HEAD_DIM,
                        lse + scalars, own_dlse, own_delta, seed, position, sees, start, w, o, r,
                        begin, free, tail, end, first_query, name, h, branch, scale, drop_below,
                        stride_qn, stride_dn, dims, HEAD_DIM, BLOCK_M, True, CAUSAL, DROPOUT, PRECISION,
                    )  # fmt: skip
                    dk_acc, dv_acc = _dkv_walk(  # [BLOCK_N, BLOCK_D] each
                        dk_acc, dv_acc, k_tile, v_tile, q_head, d_head, o_head, kv_heads * group * HEAD_DIM,
                        lse + scalars, own_dlse, own_delta, seed, position, sees, start, w, o, r,
                        free, tail, tail, tail, first_query, name, h, branch, scale, drop_below,
                        stride_qn, stride_dn, dims, HEAD_DIM, BLOCK_M, False, CAUSAL, DROPOUT, PRECISION,
                    )  # fmt: skip
    if WRITE_PARTIAL:
        tl.store(partial_dk + dkv_rows[:, None] + dims[None, :], dk_acc * scale, mask=row_mask)
        tl.store(partial_dv + dkv_rows[:, None] + dims[None, :], dv_acc, mask=row_mask)
    else:
        tl.store(dk + dkv_rows[:, None] + dims[None, :], (dk_acc * scale).to(dk.dtype.element_ty), mask=row_mask)
        tl.store(dv + dkv_rows[:, None] + dims[None, :], dv_acc.to(dv.dtype.element_ty), mask=row_mask)


@triton.jit
def _dkv_walk(
    dk_acc, dv_acc, k_tile, v_tile, q_head, d_head, o_head, stride_on, lse, dlse, delta, seed, position, sees,
    start, w, o, r, begin, stop, again, end, first_query, b, h, branch, scale, drop_below, stride_qn, stride_dn, dims,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv after queries of one segment of a branch; dk without the scale."""
    # Queries from begin to stop and from again to end, in one loop: two loops would take twice as long to compile.
    cols = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    for i in range(begin, stop + end - again, BLOCK_M):
        j = tl.where(i < stop, i, i + again - stop)
        valid = j + cols < end  # [BLOCK_M]
        query = start + o + (j + cols) * r  # [BLOCK_M]
        row = (query - first_query).to(tl.int64)  # [BLOCK_M]
        load = in_dim  # [1, BLOCK_D]
        if MASKED:
            load = valid[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
            lse_row = tl.load(lse + row, mask=valid, other=float("inf"))  # [BLOCK_M]
        else:
            lse_row = tl.load(lse + row)  # [BLOCK_M]
        lse_row = tl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK_M]
        q_tile = tl.load(q_head + row[:, None] * stride_qn + dims[None, :], mask=load, other=0.0)  # [BLOCK_M, BLOCK_D]
        d_tile = tl.load(d_head + row[:, None] * stride_dn + dims[None, :], mask=load, other=0.0)  # [BLOCK_M, BLOCK_D]
        if delta is None:
            delta_row = _delta_of(o_head, dlse, row * stride_on, row, d_tile, valid, HEAD_DIM)  # [BLOCK_M]
        elif MASKED:
            delta_row = tl.load(delta + row, mask=valid, other=0.0)  # [BLOCK_M]
        else:
            delta_row = tl.load(delta + row)  # [BLOCK_M]
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        weights = tl.exp2((scores * scale - lse_row[None, :]) * geometry.LOG2_E)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            allowed = (
                valid[None, :] & (sees & (position >= start) & (position - start < w))[:, None]
            )  # [BLOCK_N, BLOCK_M]
            if CAUSAL:
                allowed &= position[:, None] <= query[None, :]
            weights = tl.where(allowed, weights, 0.0)  # [BLOCK_N, BLOCK_M]
        dweights = tl.dot(v_tile, tl.trans(d_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        dropped = weights  # [BLOCK_N, BLOCK_M]
        if DROPOUT:
            factor = geometry.dropout_factor(
                seed, drop_below, b, h, branch, w, r, query[None, :], position[:, None]
            )  # [BLOCK_N, BLOCK_M]
            dweights *= factor
            dropped *= factor
        dv_acc = tl.dot(dropped.to(d_tile.dtype), d_tile, dv_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
        dscores = weights * (dweights - delta_row[None, :])  # [BLOCK_N, BLOCK_M]
        dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def backward_kernel(
    q, k, v, out, lse, dout, dlse, dq, dk, dv,
    branches, offsets, branch_ids, items, classes, inverse, padding, seed,
    scale, drop_below,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    queries, batch, kv_heads, group,
    chunk, stride, chunks, phases, count, n_branches,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a short call, of as many queries as keys, in one pass of square tiles.

    The first programs, one for each KV head and tile, compute dk and dv. Those of each query head compute dq.
    """
    program = tl.program_id(0)
    of_keys = batch * kv_heads * chunks * count
    if program < of_keys:
        b, g, key_tile = geometry.tile_of(
            program, items, classes, 0, queries, kv_heads, 1, chunk, stride, chunks, phases, count
        )
        if key_tile.size > 0:
            _dkv_of_tile(
                b, g, key_tile, b, tl.full([], 0, tl.int64), q, k, v, dout, out, lse, dlse, None, dk, dv, dk, dv,
                branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
                stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
                stride_db, stride_dn, stride_dh,
                0, queries, queries, kv_heads, group, n_branches,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, GATHER, PADDING, DROPOUT, False, False, PRECISION,
            )  # fmt: skip
    else:
        b, h, query_tile = geometry.tile_of(
            program - of_keys, items, classes, 0, queries, kv_heads * group, group, chunk, stride, chunks, phases, count
        )
        if query_tile.size > 0:
            _dq_of_tile(
                b, h, query_tile, b, tl.full([], 0, tl.int64), q, k, v, dout, out, lse, dlse, None, dq, dq,
                branches, offsets, branch_ids, inverse, padding, seed, scale, drop_below,
                stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
                stride_db, stride_dn, stride_dh,
                0, queries, queries, kv_heads * group, group, n_branches,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, GATHER, PADDING, DROPOUT, False, False, PRECISION,
            )  # fmt: skip
