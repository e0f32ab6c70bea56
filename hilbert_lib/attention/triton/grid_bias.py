"""The gradient of a bias by relative position on grids, without atomics: the bits are the same every time.

A tile of queries meets a block of keys, as large as the tile, at a shift. Pair (m, n) of a row and a key then has the
same entry of the table in every tile. So a program of a head and a shift adds up the gradients of scores of many tiles,
pair by pair:

    ranks of queries   [0 1 2 3] [4 5 6 7] ...
    ranks of keys          [2 3 4 5] [6 7 8 9]        shift 2: from row m to key n it is 2 + n - m ranks, in each tile

For each entry a second kernel adds the sums of its pairs: each row of a tile has one, at some shift.
"""

import triton
import triton.language as tl

from hilbert_lib.attention.triton.geometry import LOG2_E
from hilbert_lib.attention.triton.grid import (
    NOT_SPECIALIZED,
    WRAP,
    around,
    axis_box,
    bias_of,
    line_of,
    place,
    query_place,
    rows_of,
    tile_along,
    tiles_along,
    window,
)

NUMBERS = ["shifts0", "shifts1", "shifts2", "lowest0", "lowest1", "lowest2", "batch", "tiles", "runs"]


@triton.jit
def _seen_along(first, last, m, w, s, T: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """First rank and last rank + 1 of the keys that a tile of queries sees; both count on where the axis wraps."""
    begin, _ = window(first, m, w, s, CAUSAL, EDGE)
    _, end = window(tl.minimum(first + T, last) - 1, m, w, s, CAUSAL, EDGE)
    if EDGE != WRAP:
        begin = tl.maximum(begin, 0)
        end = tl.minimum(end, m)
    return begin, end


@triton.jit(do_not_specialize=NOT_SPECIALIZED + NUMBERS)
def pair_kernel(
    q, k, v, bias, dout, lse, delta, sums, windows, boxes, inverse, padding, scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    heads, group, q_rows, k_rows, n0, n1, n2, d0, d1, d2, s0, s1, s2, entries0, entries1, entries2,
    shifts0, shifts1, shifts2, lowest0, lowest1, lowest2, batch, tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    GATHER: tl.constexpr, PADDING: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums over a run of tiles of the gradients of biased scores, for each pair of a row and a key at one shift."""
    BLOCK: tl.constexpr = T0 * T1 * T2
    shift = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    run = tl.program_id(2)
    g = h // group
    shift0 = lowest0 + shift // (shifts2 * shifts1) * T0
    shift1 = lowest1 + shift // shifts2 % shifts1 * T1
    shift2 = lowest2 + shift % shifts2 * T2
    q0, _, begin0, stop0 = axis_box(boxes, n0, 0, 0, PART)
    q1, q_cells1, begin1, stop1 = axis_box(boxes, n1, 1, 0, PART)
    q2, q_cells2, begin2, stop2 = axis_box(boxes, n2, 2, 0, PART)
    f0, _, _, _ = axis_box(boxes, n0, 0, 1, PART)
    f1, k_cells1, _, _ = axis_box(boxes, n1, 1, 1, PART)
    f2, k_cells2, _, _ = axis_box(boxes, n2, 2, 1, PART)
    tiles1, tiles2 = tiles_along(begin1, stop1, d1, T1), tiles_along(begin2, stop2, d2, T2)
    w0, w1, w2 = tl.load(windows + 3 * g), tl.load(windows + 3 * g + 1), tl.load(windows + 3 * g + 2)
    entries = entries0 * entries1 * entries2
    head_bias = bias + h * entries
    cells = tl.arange(0, BLOCK)  # [BLOCK] of a tile or of a block of keys
    cell0, cell1, cell2 = cells // (T1 * T2), cells // T2 % T1, cells % T2  # [BLOCK] each
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)  # [BLOCK, BLOCK]
    length = (batch * tiles + tl.num_programs(2) - 1) // tl.num_programs(2)
    for number in range(run * length, tl.minimum((run + 1) * length, batch * tiles)):
        b = (number // tiles).to(tl.int64)
        tile = number % tiles
        first0, last0, residue0, m0 = tile_along(tile // (tiles2 * tiles1), begin0, stop0, n0, d0, T0)
        first1, last1, residue1, m1 = tile_along(tile // tiles2 % tiles1, begin1, stop1, n1, d1, T1)
        first2, last2, residue2, m2 = tile_along(tile % tiles2, begin2, stop2, n2, d2, T2)
        from0, to0 = _seen_along(first0, last0, m0, w0, s0, T0, C0, E0)
        from1, to1 = _seen_along(first1, last1, m1, w1, s1, T1, C1, E1)
        from2, to2 = _seen_along(first2, last2, m2, w2, s2, T2, C2, E2)
        meets = (first0 + shift0 < to0) & (first0 + shift0 + T0 > from0)
        meets &= (first1 + shift1 < to1) & (first1 + shift1 + T1 > from1)
        meets &= (first2 + shift2 < to2) & (first2 + shift2 + T2 > from2)
        if meets:
            r0, r1, r2 = first0 + cell0, first1 + cell1, first2 + cell2  # [BLOCK] each
            exists = (r0 < last0) & (r1 < last1) & (r2 < last2)  # [BLOCK]
            x0 = line_of(r0, residue0, d0, n0, q0, E0, PART)  # [BLOCK]
            x1 = line_of(r1, residue1, d1, n1, q1, E1, PART)  # [BLOCK]
            x2 = line_of(r2, residue2, d2, n2, q2, E2, PART)  # [BLOCK]
            row = rows_of(x0, x1, x2, q_cells1, q_cells2, inverse, exists, GATHER)  # [BLOCK]
            if PART and GATHER:
                exists &= (row >= 0) & (row < q_rows)
            k0, k1, k2 = r0 + shift0, r1 + shift1, r2 + shift2  # [BLOCK] each
            is_key = (k0 >= from0) & (k0 < to0) & (k1 >= from1) & (k1 < to1) & (k2 >= from2) & (k2 < to2)  # [BLOCK]
            x0 = line_of(around(k0, m0, E0), residue0, d0, n0, f0, E0, PART)  # [BLOCK]
            x1 = line_of(around(k1, m1, E1), residue1, d1, n1, f1, E1, PART)  # [BLOCK]
            x2 = line_of(around(k2, m2, E2), residue2, d2, n2, f2, E2, PART)  # [BLOCK]
            slot = rows_of(x0, x1, x2, k_cells1, k_cells2, inverse, is_key, GATHER)  # [BLOCK]
            if PART and GATHER:
                is_key &= slot >= 0
            if PADDING:
                is_key &= tl.load(padding + b * k_rows + slot, mask=is_key, other=1) == 0
            start0, end0 = window(r0, m0, w0, s0, C0, E0)  # [BLOCK] each
            start1, end1 = window(r1, m1, w1, s1, C1, E1)  # [BLOCK] each
            start2, end2 = window(r2, m2, w2, s2, C2, E2)  # [BLOCK] each
            allowed = exists[:, None] & is_key[None, :]  # [BLOCK, BLOCK]
            allowed &= (k0[None, :] >= start0[:, None]) & (k0[None, :] < end0[:, None])
            allowed &= (k1[None, :] >= start1[:, None]) & (k1[None, :] < end1[:, None])
            allowed &= (k2[None, :] >= start2[:, None]) & (k2[None, :] < end2[:, None])
            row_mask, key_mask = exists[:, None] & in_dim, is_key[:, None] & in_dim  # [BLOCK, BLOCK_D] each
            q_ptrs = q + b * stride_qb + h * stride_qh + row[:, None] * stride_qn + dims[None, :]  # [BLOCK, BLOCK_D]
            d_ptrs = dout + b * stride_db + h * stride_dh + row[:, None] * stride_dn + dims[None, :]  # [BLOCK, BLOCK_D]
            k_ptrs = k + b * stride_kb + g * stride_kh + slot[:, None] * stride_kn + dims[None, :]  # [BLOCK, BLOCK_D]
            v_ptrs = v + b * stride_vb + g * stride_vh + slot[:, None] * stride_vn + dims[None, :]  # [BLOCK, BLOCK_D]
            q_tile = tl.load(q_ptrs, mask=row_mask, other=0.0)  # [BLOCK, BLOCK_D]
            d_tile = tl.load(d_ptrs, mask=row_mask, other=0.0)  # [BLOCK, BLOCK_D]
            k_tile = tl.load(k_ptrs, mask=key_mask, other=0.0)  # [BLOCK, BLOCK_D]
            v_tile = tl.load(v_ptrs, mask=key_mask, other=0.0)  # [BLOCK, BLOCK_D]
            scalars = (b * heads + h) * q_rows + row  # [BLOCK]
            lse_row = tl.load(lse + scalars, mask=exists, other=float("-inf"))  # [BLOCK]
            lse_row = tl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK]
            delta_row = tl.load(delta + scalars, mask=exists, other=0.0)  # [BLOCK]
            q_place = query_place(r0, r1, r2, entries0, entries1, entries2)  # [BLOCK]
            k_place = place(k0, k1, k2, entries1, entries2)  # [BLOCK]
            bias_tile = bias_of(head_bias, q_place[:, None], k_place[None, :], entries)  # [BLOCK, BLOCK]
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale + bias_tile  # [BLOCK, BLOCK]
            weights = tl.exp2(scores * LOG2_E - (lse_row * LOG2_E)[:, None])  # [BLOCK, BLOCK]
            slopes = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)  # [BLOCK, BLOCK]
            acc += tl.where(allowed, weights * (slopes - delta_row[:, None]), 0.0)
    number = ((run * heads + h) * tl.num_programs(0) + shift) * (BLOCK * BLOCK)
    tl.store(sums + number + cells[:, None] * BLOCK + cells[None, :], acc)


@triton.jit(do_not_specialize=[*NUMBERS, "heads", "entries0", "entries1", "entries2"])
def entry_kernel(
    sums, dbias, heads, entries0, entries1, entries2, shifts0, shifts1, shifts2, lowest0, lowest1, lowest2, runs,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a run of entries of one head's table."""
    entries = entries0 * entries1 * entries2
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    h = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # The key of each row, counted from the first block.
    k0 = (entry // (entries1 * entries2) - entries0 // 2 - lowest0)[None, :] + rows // (T1 * T2)  # [ROWS, BLOCK]
    k1 = (entry // entries2 % entries1 - entries1 // 2 - lowest1)[None, :] + rows // T2 % T1  # [ROWS, BLOCK]
    k2 = (entry % entries2 - entries2 // 2 - lowest2)[None, :] + rows % T2  # [ROWS, BLOCK]
    exists = (entry < entries)[None, :] & (k0 >= 0) & (k0 < shifts0 * T0)  # [ROWS, BLOCK]
    exists &= (k1 >= 0) & (k1 < shifts1 * T1) & (k2 >= 0) & (k2 < shifts2 * T2)
    shift = (k0 // T0 * shifts1 + k1 // T1) * shifts2 + k2 // T2  # [ROWS, BLOCK]
    key = (k0 % T0 * T1 + k1 % T1) * T2 + k2 % T2  # [ROWS, BLOCK]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)  # [ROWS, BLOCK]
    for run in range(runs):
        number = (run * heads + h) * (shifts0 * shifts1 * shifts2) + shift  # [ROWS, BLOCK]
        acc += tl.load(sums + (number * ROWS + rows) * ROWS + key, mask=exists, other=0.0)
    total = tl.sum(acc, 0)  # [BLOCK]
    tl.store(dbias + h * entries + entry, total.to(dbias.dtype.element_ty), mask=entry < entries)
