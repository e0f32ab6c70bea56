"""Neighbourhood attention on grids of up to three axes, for tokens stored in any order: plain kernels for any GPU.

A program takes a tile of queries, which is a rectangle of cells of one residue, and walks over the rectangle of keys
that they see. Along an axis with dilation d, cell x has residue x % d and rank x // d (`neighbourhood.Axis` has the
rules of windows):

    cells      0  1  2  3  4  5  6  7  8  9 10 11       d = 2
    ranks of   0     1     2     3     4     5          residue 0
    queries          [ tile ]                           ranks 1 and 2, window 3
    keys       [     walk        ]                      ranks 0 to 3

dk and dv come from tiles of keys, which walk over the queries that see them. Extra keys come last. There are no
atomics: the bits are the same every time. For a part of a grid `boxes` holds eight numbers an axis: the first cell of
q, its number of cells, its first computed cell, its last computed cell + 1, and the same for k. A bias is read from its
table pair by pair; its gradient is in `grid_bias.py`.
"""

import triton
import triton.language as tl

from hilbert_lib.attention.triton.geometry import LOG2_E

SHIFT, CLIP, WRAP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # indices in patterns.neighbourhood.EDGES
NOT_SPECIALIZED = [
    "heads", "group", "extra", "q_rows", "k_rows", "n0", "n1", "n2", "d0", "d1", "d2", "s0", "s1", "s2",
    "entries0", "entries1", "entries2",
]  # fmt: skip


@triton.jit
def axis_box(boxes, n, AXIS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr):
    """An axis of q or k: first cell, number of cells, first computed cell, last computed cell + 1."""
    first, cells, begin, stop = n * 0, n, n * 0, n
    if PART:
        extent = boxes + 8 * AXIS + 4 * KEYS
        first, cells, begin, stop = tl.load(extent), tl.load(extent + 1), tl.load(extent + 2), tl.load(extent + 3)
    return first, cells, begin, stop


@triton.jit
def tile_along(tile, begin, stop, n, d, T: tl.constexpr):
    """A tile of the cells from begin to stop: first rank, last rank of its residue + 1, residue, ranks of the axis."""
    cell = begin + tile // ((((stop - begin + d - 1) // d) + T - 1) // T)
    first = cell // d + tile % ((((stop - begin + d - 1) // d) + T - 1) // T) * T
    residue = cell % d
    return first, (stop - residue + d - 1) // d, residue, (n - residue + d - 1) // d


@triton.jit
def tiles_along(begin, stop, d, T: tl.constexpr):
    return d * ((((stop - begin + d - 1) // d) + T - 1) // T)


@triton.jit
def window(rank, m, w, s, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """First rank, which may be below 0, and last rank + 1 of the keys that a query sees."""
    group = rank // s * s  # [rows]
    if CAUSAL:
        start = tl.maximum(tl.minimum(group + s - 1, m - 1) - w + 1, 0)  # [rows]
        end = rank + 1  # [rows]
    else:
        start = tl.minimum(group + s // 2, m - 1) - w // 2  # [rows]
        if EDGE == SHIFT:
            start = tl.minimum(tl.maximum(start, 0), m - w)  # [rows]
        end = start + w  # [rows]
        if EDGE == CLIP:
            end = tl.minimum(end, m)  # [rows]
    return start, end


@triton.jit
def _keys_of(first, last, m, w, s, T: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """First rank and number of the keys that a tile of queries sees."""
    start, _ = window(first, m, w, s, CAUSAL, EDGE)
    _, end = window(tl.minimum(first + T, last) - 1, m, w, s, CAUSAL, EDGE)
    if EDGE == WRAP:
        return start, tl.minimum(end - start, m)
    start = tl.maximum(start, 0)
    return start, tl.minimum(end, m) - start


@triton.jit
def queries_of(first, stop, m, w, s, T: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """First rank and last rank + 1 of the queries that see one of T keys before `stop`.

    They may lie past the ends of the axis. With a stride a few queries more are among them.
    """
    last = tl.minimum(first + T, stop) - 1  # [GROUP_ROWS]
    if CAUSAL:
        return first, last + w + s - 1
    start = first - w + 1 + w // 2  # [GROUP_ROWS]
    end = last + w // 2 + 1  # [GROUP_ROWS]
    if EDGE == SHIFT:  # windows are moved inside
        start = tl.where(first < w, 0, start)  # [GROUP_ROWS]
        end = tl.where(last >= m - w, m, end)  # [GROUP_ROWS]
    return start - (s - 1), end + s - 1


@triton.jit
def _queries_of(first, stop, q_first, q_last, m, w, s, T: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """First rank and number of the queries that see a tile of keys.

    Where the axis does not wrap, only queries from q_first to q_last - 1 count.
    """
    start, end = queries_of(first, stop, m, w, s, T, CAUSAL, EDGE)
    if EDGE == WRAP:
        return start, tl.minimum(end - start, m)
    start = tl.maximum(start, q_first)
    return start, tl.maximum(tl.minimum(end, q_last) - start, 0)


@triton.jit
def around(rank, m, EDGE: tl.constexpr):
    return (rank % m + m) % m if EDGE == WRAP else rank


@triton.jit
def _sees(start, end, key, m, EDGE: tl.constexpr):
    """Whether a window holds a key; ranks broadcast."""
    if EDGE == WRAP:
        return around(key - start, m, EDGE) < end - start
    return (key >= start) & (key < end)


@triton.jit
def line_of(rank, residue, d, n, first, EDGE: tl.constexpr, PART: tl.constexpr):
    """The number of a cell among the stored cells of an axis."""
    cell = rank * d + residue  # [rows]
    if PART:
        if EDGE == WRAP:
            cell = tl.where(cell < first, cell + n, cell)  # [rows]
        cell -= first
    return cell


@triton.jit
def rows_of(c0, c1, c2, n1, n2, inverse, exists, GATHER: tl.constexpr):
    """Rows of cells in storage; -1 for a cell that a part of a grid does not hold."""
    cell = (c0 * n1 + c1) * n2 + c2  # [rows]
    if GATHER:
        cell = tl.load(inverse + cell, mask=exists, other=0)  # [rows]
    return cell.to(tl.int64)


@triton.jit
def place(r0, r1, r2, entries1, entries2):
    """Places of keys in a table of bias. The entry of a pair is the place of its key less that of its query."""
    return (r0 * entries1 + r1) * entries2 + r2  # [rows]


@triton.jit
def query_place(r0, r1, r2, entries0, entries1, entries2):
    """Places of queries: a key with the same ranks has the entry in the middle of the table."""
    return place(r0 - entries0 // 2, r1 - entries1 // 2, r2 - entries2 // 2, entries1, entries2)  # [rows]


@triton.jit
def bias_of(head_bias, q_place, k_place, entries):
    """Bias of pairs, whose places broadcast. A pair that does not attend has some entry of the table.

    Entries are copied ahead, for which a mask of pairs would be computed anew. Bounds are two instructions.
    """
    entry = tl.minimum(tl.maximum(k_place - q_place, 0), entries - 1)  # [rows, columns]
    return tl.load(head_bias + entry).to(tl.float32)


@triton.jit
def counted_on(start, key, m, EDGE: tl.constexpr):
    """Ranks of keys, counted on from the start of a window where the axis wraps; ranks broadcast."""
    return start + around(key - start, m, EDGE) if EDGE == WRAP else key


@triton.jit
def _joined(acc, total, m, q_tile, k_tile, v_tile, bias_tile, allowed, scale, PRECISION: tl.constexpr):
    """Output, sum of weights and maximum after one more tile of keys."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if bias_tile is not None:
        scores = scores * scale + bias_tile  # [BLOCK_M, BLOCK_N]
        scale = 1.0
    scores = tl.where(allowed, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
    largest = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_M]
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]
    weights = tl.exp2((scores - finite[:, None]) * (scale * LOG2_E))  # [BLOCK_M, BLOCK_N]
    decay = tl.exp2((m - finite) * (scale * LOG2_E))  # [BLOCK_M]
    total = total * decay + tl.sum(weights, 1)  # [BLOCK_M]
    acc = acc * decay[:, None]  # [BLOCK_M, BLOCK_D]
    # 0 * NaN is NaN: a row of v that is not finite must reach only the queries that may see it.
    bad = (v_tile - v_tile) != 0.0  # [BLOCK_N, BLOCK_D]
    if tl.max(tl.max(bad.to(tl.int32), 1), 0) > 0:
        reached = tl.dot(
            allowed.to(v_tile.dtype), bad.to(v_tile.dtype), input_precision=PRECISION
        )  # [BLOCK_M, BLOCK_D]
        acc = tl.where(reached > 0.0, float("nan"), acc)  # [BLOCK_M, BLOCK_D]
        v_tile = tl.where(bad, 0.0, v_tile)  # [BLOCK_N, BLOCK_D]
    return tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION), total, largest


@triton.jit
def _gradients(
    acc, q_tile, k_tile, v_tile, bias_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """dq of a tile of queries after one more tile of keys, without the scale."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if bias_tile is not None:
        scores = scores * scale + bias_tile  # [BLOCK_M, BLOCK_N]
        scale = 1.0
    weights = tl.where(
        allowed, tl.exp2(scores * (scale * LOG2_E) - (lse_row * LOG2_E)[:, None]), 0.0
    )  # [BLOCK_M, BLOCK_N]
    slopes = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    slopes = tl.where(allowed, weights * (slopes - delta_row[:, None]), 0.0)  # [BLOCK_M, BLOCK_N]
    return tl.dot(slopes.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    q, k, v, extra_k, extra_v, bias, out, lse, dout, delta, dq, windows, boxes, inverse, padding, extra_padding, flag,
    scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_eb, stride_en, stride_eh, stride_fb, stride_fn, stride_fh, stride_db, stride_dn, stride_dh,
    heads, group, extra, q_rows, k_rows, n0, n1, n2, d0, d1, d2, s0, s1, s2, entries0, entries1, entries2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    BLOCK_N: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, EXTRA: tl.constexpr, EXTRA_PADDING: tl.constexpr,
    PART: tl.constexpr, BACKWARD: tl.constexpr, IF_FLAG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile of queries of one head or, with BACKWARD, dq. With IF_FLAG only where flag is set."""
    if IF_FLAG:  # noqa: SIM102 (a constant is not joined with a tensor)
        if tl.load(flag) == 0:
            return
    BLOCK_M: tl.constexpr = T0 * T1 * T2
    q0, _, begin0, stop0 = axis_box(boxes, n0, 0, 0, PART)
    q1, q_cells1, begin1, stop1 = axis_box(boxes, n1, 1, 0, PART)
    q2, q_cells2, begin2, stop2 = axis_box(boxes, n2, 2, 0, PART)
    f0, _, _, _ = axis_box(boxes, n0, 0, 1, PART)
    f1, k_cells1, _, _ = axis_box(boxes, n1, 1, 1, PART)
    f2, k_cells2, _, _ = axis_box(boxes, n2, 2, 1, PART)
    tiles1, tiles2 = tiles_along(begin1, stop1, d1, T1), tiles_along(begin2, stop2, d2, T2)
    program = tl.program_id(0)
    tile2 = program % tiles2
    tile1 = program // tiles2 % tiles1
    tile0 = program // (tiles2 * tiles1)
    h = tl.program_id(1).to(tl.int64)  # a head's stride times its number may pass 2^31
    b = tl.program_id(2).to(tl.int64)
    g = h // group
    w0, w1, w2 = tl.load(windows + 3 * g), tl.load(windows + 3 * g + 1), tl.load(windows + 3 * g + 2)
    first0, last0, residue0, m0 = tile_along(tile0, begin0, stop0, n0, d0, T0)
    first1, last1, residue1, m1 = tile_along(tile1, begin1, stop1, n1, d1, T1)
    first2, last2, residue2, m2 = tile_along(tile2, begin2, stop2, n2, d2, T2)

    rows = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    r0 = first0 + rows // (T1 * T2)  # [BLOCK_M]
    r1 = first1 + rows // T2 % T1  # [BLOCK_M]
    r2 = first2 + rows % T2  # [BLOCK_M]
    exists = (r0 < last0) & (r1 < last1) & (r2 < last2)  # [BLOCK_M]
    start0, end0 = window(r0, m0, w0, s0, C0, E0)  # [BLOCK_M] each
    start1, end1 = window(r1, m1, w1, s1, C1, E1)  # [BLOCK_M] each
    start2, end2 = window(r2, m2, w2, s2, C2, E2)  # [BLOCK_M] each
    c0 = line_of(r0, residue0, d0, n0, q0, E0, PART)  # [BLOCK_M]
    c1 = line_of(r1, residue1, d1, n1, q1, E1, PART)  # [BLOCK_M]
    c2 = line_of(r2, residue2, d2, n2, q2, E2, PART)  # [BLOCK_M]
    row = rows_of(c0, c1, c2, q_cells1, q_cells2, inverse, exists, GATHER)  # [BLOCK_M]
    if PART and GATHER:
        exists &= (row >= 0) & (row < q_rows)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = exists[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(
        q + b * stride_qb + h * stride_qh + row[:, None] * stride_qn + dims[None, :], mask=row_mask, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    scalars = (b * heads + h) * q_rows + row  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    d_tile, lse_row, delta_row = q_tile, m, total  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
    if BACKWARD:
        d_ptrs = dout + b * stride_db + h * stride_dh + row[:, None] * stride_dn + dims[None, :]  # [BLOCK_M, BLOCK_D]
        d_tile = tl.load(d_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
        lse_row = tl.load(lse + scalars, mask=exists, other=float("-inf"))  # [BLOCK_M]
        lse_row = tl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK_M]
        delta_row = tl.load(delta + scalars, mask=exists, other=0.0)  # [BLOCK_M]

    begin0, span0 = _keys_of(first0, last0, m0, w0, s0, T0, C0, E0)
    begin1, span1 = _keys_of(first1, last1, m1, w1, s1, T1, C1, E1)
    begin2, span2 = _keys_of(first2, last2, m2, w2, s2, T2, C2, E2)
    if PART:  # a tile may hold no query
        span0 = tl.where(tl.max(exists.to(tl.int32), 0) > 0, span0, 0)
    if bias is not None:
        entries = entries0 * entries1 * entries2
        head_bias = bias + h * entries
        q_place = query_place(r0, r1, r2, entries0, entries1, entries2)  # [BLOCK_M]
    k_head, v_head = k + b * stride_kb + g * stride_kh, v + b * stride_vb + g * stride_vh
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    for j in range(0, span0 * span1 * span2, BLOCK_N):
        key = j + cols  # [BLOCK_N]
        is_key = key < span0 * span1 * span2  # [BLOCK_N]
        k0 = around(begin0 + key // (span1 * span2), m0, E0)  # [BLOCK_N]
        k1 = around(begin1 + key // span2 % span1, m1, E1)  # [BLOCK_N]
        k2 = around(begin2 + key % span2, m2, E2)  # [BLOCK_N]
        x0 = line_of(k0, residue0, d0, n0, f0, E0, PART)  # [BLOCK_N]
        x1 = line_of(k1, residue1, d1, n1, f1, E1, PART)  # [BLOCK_N]
        x2 = line_of(k2, residue2, d2, n2, f2, E2, PART)  # [BLOCK_N]
        slot = rows_of(x0, x1, x2, k_cells1, k_cells2, inverse, is_key, GATHER)  # [BLOCK_N]
        if PART and GATHER:
            is_key &= slot >= 0
        if PADDING:
            is_key &= tl.load(padding + b * k_rows + slot, mask=is_key, other=1) == 0
        allowed = is_key[None, :] & exists[:, None]  # [BLOCK_M, BLOCK_N]
        allowed &= _sees(start0[:, None], end0[:, None], k0[None, :], m0, E0)
        allowed &= _sees(start1[:, None], end1[:, None], k1[None, :], m1, E1)
        allowed &= _sees(start2[:, None], end2[:, None], k2[None, :], m2, E2)
        key_mask = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(
            k_head + slot[:, None] * stride_kn + dims[None, :], mask=key_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(
            v_head + slot[:, None] * stride_vn + dims[None, :], mask=key_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        bias_tile = None
        if bias is not None:
            k_place = place(
                counted_on(start0[:, None], k0[None, :], m0, E0),
                counted_on(start1[:, None], k1[None, :], m1, E1),
                counted_on(start2[:, None], k2[None, :], m2, E2),
                entries1,
                entries2,
            )  # [BLOCK_M, BLOCK_N]
            bias_tile = bias_of(head_bias, q_place[:, None], k_place, entries)  # [BLOCK_M, BLOCK_N]
        if BACKWARD:
            acc = _gradients(
                acc, q_tile, k_tile, v_tile, bias_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION
            )  # [BLOCK_M, BLOCK_D]
        else:
            acc, total, m = _joined(
                acc, total, m, q_tile, k_tile, v_tile, bias_tile, allowed, scale, PRECISION
            )  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
    if EXTRA:
        k_head, v_head = extra_k + b * stride_eb + g * stride_eh, extra_v + b * stride_fb + g * stride_fh
        for j in range(0, extra, BLOCK_N):
            is_key = j + cols < extra  # [BLOCK_N]
            if EXTRA_PADDING:
                is_key &= tl.load(extra_padding + b * extra + j + cols, mask=is_key, other=1) == 0
            allowed = is_key[None, :] & exists[:, None]  # [BLOCK_M, BLOCK_N]
            key_mask = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
            k_tile = tl.load(
                k_head + (j + cols)[:, None] * stride_en + dims[None, :], mask=key_mask, other=0.0
            )  # [BLOCK_N, BLOCK_D]
            v_tile = tl.load(
                v_head + (j + cols)[:, None] * stride_fn + dims[None, :], mask=key_mask, other=0.0
            )  # [BLOCK_N, BLOCK_D]
            bias_tile = None if bias is None else 0.0
            if BACKWARD:
                acc = _gradients(
                    acc, q_tile, k_tile, v_tile, bias_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION
                )  # [BLOCK_M, BLOCK_D]
            else:
                acc, total, m = _joined(
                    acc, total, m, q_tile, k_tile, v_tile, bias_tile, allowed, scale, PRECISION
                )  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]

    out_rows = ((b * q_rows + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    if BACKWARD:
        tl.store(dq + out_rows[:, None] + dims[None, :], (acc * scale).to(dq.dtype.element_ty), mask=row_mask)
    else:
        denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys; NaN stays NaN
        result = acc / denominator[:, None]  # [BLOCK_M, BLOCK_D]
        tl.store(out + out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=row_mask)
        largest = m * scale if bias is None else m  # [BLOCK_M]
        result_lse = tl.where(total == 0.0, float("-inf"), largest + tl.log(denominator))  # [BLOCK_M]
        tl.store(lse + scalars, result_lse, mask=exists)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    q, k, v, bias, dout, lse, delta, dk, dv, windows, boxes, inverse, padding, scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    heads, group, extra, q_rows, k_rows, n0, n1, n2, d0, d1, d2, s0, s1, s2, entries0, entries1, entries2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    BLOCK_M: tl.constexpr, C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, GATHER: tl.constexpr, PADDING: tl.constexpr, EXTRA: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of a KV head. With EXTRA the tile is a run of extra keys, which all queries see.

    There are few extra keys, and many queries of each. So programs beside each other take a part of the queries, and
    write the part's sums: (parts, batch, extra, kv_heads, head_dim).
    """
    BLOCK_N: tl.constexpr = T0 * T1 * T2
    kv_heads = heads // group
    g = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    q0, _, q_begin0, q_stop0 = axis_box(boxes, n0, 0, 0, PART)
    q1, q_cells1, q_begin1, q_stop1 = axis_box(boxes, n1, 1, 0, PART)
    q2, q_cells2, q_begin2, q_stop2 = axis_box(boxes, n2, 2, 0, PART)
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if EXTRA:
        runs = tl.cdiv(extra, BLOCK_N)
        part = tl.program_id(0) // runs
        slot = (tl.program_id(0) % runs * BLOCK_N + cols).to(tl.int64)  # [BLOCK_N]
        exists, keys = slot < extra, extra  # [BLOCK_N], scalar
        length = tl.cdiv(tl.cdiv(q_rows, BLOCK_M), tl.num_programs(0) // runs) * BLOCK_M
        first_query = part * length
        span0, span1, span2 = 1, 1, tl.minimum(length, q_rows - first_query)  # below 0 past the last query
    else:
        keys = k_rows
        f0, _, begin0, stop0 = axis_box(boxes, n0, 0, 1, PART)
        f1, k_cells1, begin1, stop1 = axis_box(boxes, n1, 1, 1, PART)
        f2, k_cells2, begin2, stop2 = axis_box(boxes, n2, 2, 1, PART)
        tiles1, tiles2 = tiles_along(begin1, stop1, d1, T1), tiles_along(begin2, stop2, d2, T2)
        program = tl.program_id(0)
        w0, w1, w2 = tl.load(windows + 3 * g), tl.load(windows + 3 * g + 1), tl.load(windows + 3 * g + 2)
        first0, last0, residue0, m0 = tile_along(program // (tiles2 * tiles1), begin0, stop0, n0, d0, T0)
        first1, last1, residue1, m1 = tile_along(program // tiles2 % tiles1, begin1, stop1, n1, d1, T1)
        first2, last2, residue2, m2 = tile_along(program % tiles2, begin2, stop2, n2, d2, T2)
        k0 = first0 + cols // (T1 * T2)  # [BLOCK_N]
        k1 = first1 + cols // T2 % T1  # [BLOCK_N]
        k2 = first2 + cols % T2  # [BLOCK_N]
        exists = (k0 < last0) & (k1 < last1) & (k2 < last2)  # [BLOCK_N]
        c0 = line_of(k0, residue0, d0, n0, f0, E0, PART)  # [BLOCK_N]
        c1 = line_of(k1, residue1, d1, n1, f1, E1, PART)  # [BLOCK_N]
        c2 = line_of(k2, residue2, d2, n2, f2, E2, PART)  # [BLOCK_N]
        slot = rows_of(c0, c1, c2, k_cells1, k_cells2, inverse, exists, GATHER)  # [BLOCK_N]
        if PART and GATHER:
            exists &= slot >= 0
        from0, to0 = (q_begin0 - residue0 + d0 - 1) // d0, (q_stop0 - residue0 + d0 - 1) // d0
        from1, to1 = (q_begin1 - residue1 + d1 - 1) // d1, (q_stop1 - residue1 + d1 - 1) // d1
        from2, to2 = (q_begin2 - residue2 + d2 - 1) // d2, (q_stop2 - residue2 + d2 - 1) // d2
        begin0, span0 = _queries_of(first0, last0, from0, to0, m0, w0, s0, T0, C0, E0)
        begin1, span1 = _queries_of(first1, last1, from1, to1, m1, w1, s1, T1, C1, E1)
        begin2, span2 = _queries_of(first2, last2, from2, to2, m2, w2, s2, T2, C2, E2)
        if PART:  # a tile may hold no key
            span0 = tl.where(tl.max(exists.to(tl.int32), 0) > 0, span0, 0)
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = exists[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
    k_ptrs = k + b * stride_kb + g * stride_kh + slot[:, None] * stride_kn + dims[None, :]  # [BLOCK_N, BLOCK_D]
    v_ptrs = v + b * stride_vb + g * stride_vh + slot[:, None] * stride_vn + dims[None, :]  # [BLOCK_N, BLOCK_D]
    k_tile = tl.load(k_ptrs, mask=row_mask, other=0.0)  # [BLOCK_N, BLOCK_D]
    v_tile = tl.load(v_ptrs, mask=row_mask, other=0.0)  # [BLOCK_N, BLOCK_D]
    has_weight = exists  # [BLOCK_N]
    if PADDING:
        has_weight &= tl.load(padding + b * keys + slot, mask=exists, other=1) == 0
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)  # [BLOCK_N, BLOCK_D]
    rows = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    for h in range(g * group, (g + 1) * group):
        for j in range(0, span0 * span1 * span2, BLOCK_M):
            query = j + rows  # [BLOCK_M]
            is_query = query < span0 * span1 * span2  # [BLOCK_M]
            if EXTRA:
                query += first_query  # [BLOCK_M]
                row = query.to(tl.int64)  # [BLOCK_M]
                if PART and not GATHER:  # only computed queries count
                    x0 = q0 + query // (q_cells1 * q_cells2)  # [BLOCK_M]
                    x1 = q1 + query // q_cells2 % q_cells1  # [BLOCK_M]
                    x2 = q2 + query % q_cells2  # [BLOCK_M]
                    is_query &= (x0 >= q_begin0) & (x0 < q_stop0) & (x1 >= q_begin1) & (x1 < q_stop1)
                    is_query &= (x2 >= q_begin2) & (x2 < q_stop2)
                allowed = has_weight[:, None] & is_query[None, :]  # [BLOCK_N, BLOCK_M]
            else:
                r0 = around(begin0 + query // (span1 * span2), m0, E0)  # [BLOCK_M]
                r1 = around(begin1 + query // span2 % span1, m1, E1)  # [BLOCK_M]
                r2 = around(begin2 + query % span2, m2, E2)  # [BLOCK_M]
                if PART and E0 == WRAP:  # queries that are not computed are among them
                    is_query &= (r0 >= from0) & (r0 < to0)
                if PART and E1 == WRAP:
                    is_query &= (r1 >= from1) & (r1 < to1)
                if PART and E2 == WRAP:
                    is_query &= (r2 >= from2) & (r2 < to2)
                x0 = line_of(r0, residue0, d0, n0, q0, E0, PART)  # [BLOCK_M]
                x1 = line_of(r1, residue1, d1, n1, q1, E1, PART)  # [BLOCK_M]
                x2 = line_of(r2, residue2, d2, n2, q2, E2, PART)  # [BLOCK_M]
                row = rows_of(x0, x1, x2, q_cells1, q_cells2, inverse, is_query, GATHER)  # [BLOCK_M]
                if PART and GATHER:
                    is_query &= (row >= 0) & (row < q_rows)
                start0, end0 = window(r0, m0, w0, s0, C0, E0)  # [BLOCK_M] each
                start1, end1 = window(r1, m1, w1, s1, C1, E1)  # [BLOCK_M] each
                start2, end2 = window(r2, m2, w2, s2, C2, E2)  # [BLOCK_M] each
                allowed = has_weight[:, None] & is_query[None, :]  # [BLOCK_N, BLOCK_M]
                allowed &= _sees(start0[None, :], end0[None, :], k0[:, None], m0, E0)
                allowed &= _sees(start1[None, :], end1[None, :], k1[:, None], m1, E1)
                allowed &= _sees(start2[None, :], end2[None, :], k2[:, None], m2, E2)
            query_mask = is_query[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
            q_ptrs = q + b * stride_qb + h * stride_qh + row[:, None] * stride_qn + dims[None, :]  # [BLOCK_M, BLOCK_D]
            d_ptrs = (
                dout + b * stride_db + h * stride_dh + row[:, None] * stride_dn + dims[None, :]
            )  # [BLOCK_M, BLOCK_D]
            q_tile = tl.load(q_ptrs, mask=query_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
            d_tile = tl.load(d_ptrs, mask=query_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
            scalars = (b * heads + h) * q_rows + row  # [BLOCK_M]
            lse_row = tl.load(lse + scalars, mask=is_query, other=float("-inf"))  # [BLOCK_M]
            lse_row = tl.where(lse_row == float("-inf"), float("inf"), lse_row)  # [BLOCK_M]
            delta_row = tl.load(delta + scalars, mask=is_query, other=0.0)  # [BLOCK_M]
            # Keys are the rows: with 64 rows all four products are asynchronous on Hopper. Beside a product of 32 rows,
            # which is not, Triton 3.7 copies the next queries over those that the product for dk still reads.
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            factor = scale
            if bias is not None:
                q_place = query_place(r0, r1, r2, entries0, entries1, entries2)  # [BLOCK_M]
                k_place = place(
                    counted_on(start0[None, :], k0[:, None], m0, E0),
                    counted_on(start1[None, :], k1[:, None], m1, E1),
                    counted_on(start2[None, :], k2[:, None], m2, E2),
                    entries1,
                    entries2,
                )  # [BLOCK_N, BLOCK_M]
                entries = entries0 * entries1 * entries2
                bias_tile = bias_of(bias + h * entries, q_place[None, :], k_place, entries)  # [BLOCK_N, BLOCK_M]
                scores = scores * scale + bias_tile  # [BLOCK_N, BLOCK_M]
                factor = 1.0
            weights = tl.where(
                allowed, tl.exp2(scores * (factor * LOG2_E) - (lse_row * LOG2_E)[None, :]), 0.0
            )  # [BLOCK_N, BLOCK_M]
            dv_acc = tl.dot(weights.to(d_tile.dtype), d_tile, dv_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
            slopes = tl.dot(v_tile, tl.trans(d_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            slopes = tl.where(allowed, weights * (slopes - delta_row[None, :]), 0.0)  # [BLOCK_N, BLOCK_M]
            dk_acc = tl.dot(slopes.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    if EXTRA:
        b += part.to(tl.int64) * tl.num_programs(2)
    dkv_offsets = ((b * keys + slot) * kv_heads + g)[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_N, BLOCK_D]
    tl.store(dk + dkv_offsets, (dk_acc * scale).to(dk.dtype.element_ty), mask=row_mask)
    tl.store(dv + dkv_offsets, dv_acc.to(dv.dtype.element_ty), mask=row_mask)
