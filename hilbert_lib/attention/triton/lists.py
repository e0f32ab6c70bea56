"""Exact attention over packed lists: plain kernels for any GPU, which know no geometry.

The rows of a block see listed rows, which are packed in tiles of 64, and a word of each own row and tile says which:

    own     (blocks * OWN,)   int32   the row of each place, -1 past the end
    starts  (blocks + 1,)     int32   the first tile of each block
    listed  (tiles, 64)       int32   rows, -1 for none
    words   (tiles, OWN)      int64   bit j of the word of own row i: whether i and the tile's row j see each other

For the output and dq own rows are queries and listed ones are keys; dk and dv read lists that are turned round. Extra
keys come last. Heads are the fastest of a launch: programs beside each other read the same rows. There are no atomics:
the bits are the same every time.
"""

import triton
import triton.language as tl

from hilbert_lib.attention.triton.geometry import LOG2_E

LISTED = tl.constexpr(64)  # rows of a tile, bits of a word
NOT_SPECIALIZED = ["heads", "group", "extra", "q_rows", "k_rows", "tiles"]


@triton.jit
def _place(own, program, heads, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """Block of a program, places of its rows in the block, its rows, and its head."""
    head = (program % heads).to(tl.int64)  # a head's stride times its number may pass 2^31
    part = program // heads
    block = part // (OWN // BLOCK)
    places = part % (OWN // BLOCK) * BLOCK + tl.arange(0, BLOCK)  # [rows]
    row = tl.load(own + block * OWN + places).to(tl.int64)  # [rows]
    return block, places, row, head


@triton.jit
def _sees(words, tile, places, first, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """Whether rows of a block and BLOCK rows of a tile, from the first on, see each other."""
    cols = tl.arange(0, BLOCK)  # [rows]
    halves = words.to(tl.pointer_type(tl.int32)) + (tile * OWN + places) * 2  # [rows]
    if BLOCK == LISTED:
        low, high = tl.load(halves), tl.load(halves + 1)  # [rows] each
        word = tl.where(cols[None, :] < 32, low[:, None], high[:, None])  # [rows, columns]
    else:
        word = tl.load(halves + first // 32)[:, None]  # [rows, 1]
    return (word >> ((first + cols) % 32)[None, :]) & 1 != 0


@triton.jit
def _marked(acc, v_tile, allowed, PRECISION: tl.constexpr):
    """NaN in the output of queries that see what is not finite in a tile of v; and the tile with 0 in its place."""
    bad = (v_tile - v_tile) != 0.0  # [BLOCK_N, BLOCK_D]
    reached = tl.dot(allowed.to(v_tile.dtype), bad.to(v_tile.dtype), input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return tl.where(reached > 0.0, float("nan"), acc), tl.where(bad, 0.0, v_tile)


@triton.jit
def _joined(acc, total, m, q_tile, k_tile, v_tile, allowed, scale, PRECISION: tl.constexpr):
    """Output, sum of weights and maximum after one more tile of keys."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    scores = tl.where(allowed, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
    largest = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_M]
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]
    if v_tile.dtype == tl.float32:
        # Subtract first, then scale: the largest score then gives exactly 1, however large it is.
        weights = tl.exp2((scores - finite[:, None]) * (scale * LOG2_E))  # [BLOCK_M, BLOCK_N]
    else:
        # One fused instruction; at scores of 1e4 its rounding is a fifth of half precision's own.
        weights = tl.exp2(scores * (scale * LOG2_E) - (finite * (scale * LOG2_E))[:, None])  # [BLOCK_M, BLOCK_N]
    decay = tl.exp2((m - finite) * (scale * LOG2_E))  # [BLOCK_M]
    total = total * decay + tl.sum(weights, 1)  # [BLOCK_M]
    acc = acc * decay[:, None]  # [BLOCK_M, BLOCK_D]
    return tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION), total, largest


@triton.jit
def _gradients(
    acc, q_tile, k_tile, v_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION: tl.constexpr
):  # fmt: skip
    """dq after one more tile of keys, without the scale."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    weights = tl.exp2(scores * (scale * LOG2_E) - lse_row[:, None])  # [BLOCK_M, BLOCK_N]
    slopes = tl.dot(d_tile, tl.trans(v_tile), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    slopes = tl.where(allowed, weights * (slopes - delta_row[:, None]), 0.0)  # [BLOCK_M, BLOCK_N]
    return tl.dot(slopes.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit
def _of_row(lse_and_delta, at, exists):
    """lse to base 2, +inf for rows without keys, whose weights are then 0; and delta."""
    both = tl.load(lse_and_delta + at, mask=exists, other=0)  # [BLOCK_M]
    lse_row = both.to(tl.int32).to(tl.float32, bitcast=True)  # [BLOCK_M]
    delta_row = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)  # [BLOCK_M]
    return lse_row, delta_row


@triton.jit
def _as_weighed(lse_row, delta_row):
    """lse to base 2 and delta of rows. Those without keys get +inf and 0: weights are 0, and dlse reaches nobody."""
    delta_row = tl.where(lse_row == float("-inf"), 0.0, delta_row)  # [BLOCK_M]
    return tl.where(lse_row == float("-inf"), float("inf"), lse_row), delta_row


@triton.jit
def _row_of_out(out, lse, dlse, d_tile, query, exists, h, heads, q_rows, HEAD_DIM: tl.constexpr):
    """lse and delta of queries as `_of_row` gives them, from out, lse and dlse of a sequence. d_tile: dout."""
    dims = tl.arange(0, d_tile.shape[1])  # [BLOCK_D]
    mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    out_ptrs = out + ((query * heads + h) * HEAD_DIM)[:, None] + dims[None, :]  # [BLOCK_M, BLOCK_D]
    o_tile = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    delta_row = tl.sum(o_tile * d_tile.to(tl.float32), 1)  # [BLOCK_M]
    at = h * q_rows + query  # [BLOCK_M]
    if dlse is not None:
        delta_row -= tl.load(dlse + at, mask=exists, other=0.0)
    return _as_weighed(tl.load(lse + at, mask=exists, other=float("-inf")) * LOG2_E, delta_row)


@triton.jit
def _walk(
    q_tile, d_tile, lse_row, delta_row, k_head, v_head, extra_k_head, extra_v_head, listed, words, padding,
    extra_padding, places, first, last, extra, scale, stride_kn, stride_vn, stride_en, stride_fn,
    HEAD_DIM: tl.constexpr, OWN: tl.constexpr, BLOCK_N: tl.constexpr, PADDING: tl.constexpr, EXTRA: tl.constexpr,
    EXTRA_PADDING: tl.constexpr, BACKWARD: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output before its division, sum of weights and maximum of some queries; with BACKWARD dq without the scale.

    The keys are those of tiles first to last - 1, then the extra ones.
    """
    PARTS: tl.constexpr = LISTED // BLOCK_N
    acc = tl.zeros(q_tile.shape, tl.float32)  # [BLOCK_M, BLOCK_D]
    m = tl.full([q_tile.shape[0]], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([q_tile.shape[0]], tl.float32)  # [BLOCK_M]
    dims = tl.arange(0, q_tile.shape[1])  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    for part in range(first * PARTS, last * PARTS):
        tile = part // PARTS
        begin = (part - tile * PARTS) * BLOCK_N
        key = tl.load(listed + tile * LISTED + begin + cols).to(tl.int64)  # [BLOCK_N]
        is_key = key >= 0  # [BLOCK_N]
        allowed = _sees(words, tile, places, begin, OWN, BLOCK_N)  # [BLOCK_M, BLOCK_N]
        if PADDING:
            allowed &= (tl.load(padding + key, mask=is_key, other=1) == 0)[None, :]
        key_mask = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(
            k_head + key[:, None] * stride_kn + dims[None, :], mask=key_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(
            v_head + key[:, None] * stride_vn + dims[None, :], mask=key_mask, other=0.0
        )  # [BLOCK_N, BLOCK_D]
        if CAREFUL:
            acc, v_tile = _marked(acc, v_tile, allowed, PRECISION)  # [BLOCK_M, BLOCK_D], [BLOCK_N, BLOCK_D]
        if BACKWARD:
            acc = _gradients(
                acc, q_tile, k_tile, v_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION
            )  # [BLOCK_M, BLOCK_D]
        else:
            acc, total, m = _joined(
                acc, total, m, q_tile, k_tile, v_tile, allowed, scale, PRECISION
            )  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
    if EXTRA:
        for j in range(0, extra, BLOCK_N):
            key = (j + cols).to(tl.int64)  # [BLOCK_N]
            is_key = key < extra  # [BLOCK_N]
            has_weight = is_key  # [BLOCK_N]
            if EXTRA_PADDING:
                has_weight &= tl.load(extra_padding + key, mask=is_key, other=1) == 0
            allowed = has_weight[None, :] & (places >= 0)[:, None]  # [BLOCK_M, BLOCK_N]
            key_mask = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
            k_tile = tl.load(
                extra_k_head + key[:, None] * stride_en + dims[None, :], mask=key_mask, other=0.0
            )  # [BLOCK_N, BLOCK_D]
            v_tile = tl.load(
                extra_v_head + key[:, None] * stride_fn + dims[None, :], mask=key_mask, other=0.0
            )  # [BLOCK_N, BLOCK_D]
            if CAREFUL:
                acc, v_tile = _marked(acc, v_tile, allowed, PRECISION)  # [BLOCK_M, BLOCK_D], [BLOCK_N, BLOCK_D]
            if BACKWARD:
                acc = _gradients(
                    acc, q_tile, k_tile, v_tile, d_tile, lse_row, delta_row, allowed, scale, PRECISION
                )  # [BLOCK_M, BLOCK_D]
            else:
                acc, total, m = _joined(
                    acc, total, m, q_tile, k_tile, v_tile, allowed, scale, PRECISION
                )  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
    return acc, total, m


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def query_kernel(
    q, k, v, extra_k, extra_v, out, lse, dout, lse_and_delta, dq, own, starts, listed, words, padding, extra_padding,
    scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_eb, stride_en, stride_eh, stride_fb, stride_fn, stride_fh, stride_db, stride_dn, stride_dh,
    heads, group, extra, q_rows, k_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDING: tl.constexpr, EXTRA: tl.constexpr, EXTRA_PADDING: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of BLOCK_M queries of one block and head or, with BACKWARD, dq."""
    block, places, row, h = _place(own, tl.program_id(0), heads, OWN, BLOCK_M)  # scalar, [BLOCK_M], [BLOCK_M], scalar
    b = tl.program_id(1).to(tl.int64)
    g = h // group
    exists = row >= 0  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row_mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    q_tile = tl.load(
        q + b * stride_qb + h * stride_qh + row[:, None] * stride_qn + dims[None, :], mask=row_mask, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    d_tile, lse_row, delta_row = q_tile, 0.0, 0.0  # [BLOCK_M, BLOCK_D], scalar, scalar
    if BACKWARD:
        d_ptrs = dout + b * stride_db + h * stride_dh + row[:, None] * stride_dn + dims[None, :]  # [BLOCK_M, BLOCK_D]
        d_tile = tl.load(d_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
        lse_row, delta_row = _of_row(lse_and_delta, (b * heads + h) * q_rows + row, exists)  # [BLOCK_M] each
    first, last = tl.load(starts + block), tl.load(starts + block + 1)
    k_head, v_head = k + b * stride_kb + g * stride_kh, v + b * stride_vb + g * stride_vh
    extra_k_head, extra_v_head = extra_k + b * stride_eb + g * stride_eh, extra_v + b * stride_fb + g * stride_fh
    padding_row, extra_padding_row = padding + b * k_rows, extra_padding + b * extra
    acc, total, m = _walk(  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
        q_tile, d_tile, lse_row, delta_row, k_head, v_head, extra_k_head, extra_v_head, listed, words, padding_row,
        extra_padding_row, places, first, last, extra, scale, stride_kn, stride_vn, stride_en, stride_fn,
        HEAD_DIM, OWN, BLOCK_N, PADDING, EXTRA, EXTRA_PADDING, BACKWARD, False, PRECISION,
    )  # fmt: skip
    out_rows = ((b * q_rows + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    if BACKWARD:
        tl.store(dq + out_rows[:, None] + dims[None, :], (acc * scale).to(dq.dtype.element_ty), mask=row_mask)
    else:
        # 0 * NaN is NaN: a row of v that is not finite must reach only the queries that see it. Such rows are rare, so
        # they are looked for in the result, and then everything is computed again. It is one reduction: of two of a
        # product Triton 3.7 fails to compile for a B200.
        if tl.max(((acc - acc) != 0.0).to(tl.int32)) > 0:
            acc, total, m = _walk(  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
                q_tile, d_tile, lse_row, delta_row, k_head, v_head, extra_k_head, extra_v_head, listed, words,
                padding_row, extra_padding_row, places, first, last, extra, scale, stride_kn, stride_vn, stride_en,
                stride_fn, HEAD_DIM, OWN, BLOCK_N, PADDING, EXTRA, EXTRA_PADDING, BACKWARD, True, PRECISION,
            )  # fmt: skip
        denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys; NaN stays NaN
        result = acc / denominator[:, None]  # [BLOCK_M, BLOCK_D]
        tl.store(out + out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=row_mask)
        result_lse = tl.where(total == 0.0, float("-inf"), m * scale + tl.log(denominator))  # [BLOCK_M]
        tl.store(lse + (b * heads + h) * q_rows + row, result_lse, mask=exists)


@triton.jit
def _key_walk(
    k_tile, v_tile, q_head, d_head, lse_and_delta, listed, words, places, has_weight, first_head, group, first, last,
    q_rows, scale, stride_qn, stride_qh, stride_dn, stride_dh,
    HEAD_DIM: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, PADDING: tl.constexpr, EXTRA: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr, out=None, lse=None, dlse=None, heads=0,
):  # fmt: skip
    """dk, without the scale, and dv of some keys, over the queries of tiles first to last - 1 in all heads of a group.

    With EXTRA these are rows in order. With CAREFUL a value that is not finite reaches only those who see it. Without
    lse_and_delta these are computed from out, lse and dlse.
    """
    PARTS: tl.constexpr = LISTED // BLOCK_M
    dims = tl.arange(0, k_tile.shape[1])  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    dk_acc = tl.zeros(k_tile.shape, tl.float32)  # [BLOCK_N, BLOCK_D]
    dv_acc = tl.zeros(k_tile.shape, tl.float32)  # [BLOCK_N, BLOCK_D]
    cols = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    for h in range(first_head, first_head + group):
        for part in range(first * PARTS, last * PARTS):
            if EXTRA:
                query = (part * BLOCK_M + cols).to(tl.int64)  # [BLOCK_M]
                is_query = query < q_rows  # [BLOCK_M]
                allowed = has_weight[:, None] & is_query[None, :]  # [BLOCK_N, BLOCK_M]
            else:
                tile = part // PARTS
                begin = (part - tile * PARTS) * BLOCK_M
                query = tl.load(listed + tile * LISTED + begin + cols).to(tl.int64)  # [BLOCK_M]
                is_query = query >= 0  # [BLOCK_M]
                allowed = _sees(words, tile, places, begin, OWN, BLOCK_M)  # [BLOCK_N, BLOCK_M]
                if PADDING:
                    allowed &= has_weight[:, None]
            query_mask = is_query[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
            q_ptrs = q_head + h * stride_qh + query[:, None] * stride_qn + dims[None, :]  # [BLOCK_M, BLOCK_D]
            d_ptrs = d_head + h * stride_dh + query[:, None] * stride_dn + dims[None, :]  # [BLOCK_M, BLOCK_D]
            q_tile = tl.load(q_ptrs, mask=query_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
            d_tile = tl.load(d_ptrs, mask=query_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
            if lse_and_delta is None:
                lse_row, delta_row = _row_of_out(
                    out, lse, dlse, d_tile, query, is_query, h, heads, q_rows, HEAD_DIM
                )  # [BLOCK_M] each
            else:
                lse_row, delta_row = _of_row(lse_and_delta, h * q_rows + query, is_query)  # [BLOCK_M] each
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            weights = tl.where(
                allowed, tl.exp2(scores * (scale * LOG2_E) - lse_row[None, :]), 0.0
            )  # [BLOCK_N, BLOCK_M]
            dv_acc = tl.dot(weights.to(d_tile.dtype), d_tile, dv_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
            slopes = tl.dot(v_tile, tl.trans(d_tile), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            slopes = weights * (slopes - delta_row[None, :])  # [BLOCK_N, BLOCK_M]
            if CAREFUL:
                slopes = tl.where(allowed, slopes, 0.0)  # [BLOCK_N, BLOCK_M]
            dk_acc = tl.dot(slopes.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    return dk_acc, dv_acc


@triton.jit
def _gradients_of_keys(
    q, k, v, dout, lse_and_delta, dk, dv, listed, words, padding, scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    heads, group, q_rows, keys, b, to_b, g, places, row, exists, first, last,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, PADDING: tl.constexpr,
    EXTRA: tl.constexpr, PRECISION: tl.constexpr, out=None, lse=None, dlse=None,
):  # fmt: skip
    """Store dk and dv of some keys of sequence b and KV head g in the place of sequence to_b. As `_key_walk` else."""
    kv_heads = heads // group
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = exists[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
    k_ptrs = k + b * stride_kb + g * stride_kh + row[:, None] * stride_kn + dims[None, :]  # [BLOCK_N, BLOCK_D]
    v_ptrs = v + b * stride_vb + g * stride_vh + row[:, None] * stride_vn + dims[None, :]  # [BLOCK_N, BLOCK_D]
    k_tile = tl.load(k_ptrs, mask=row_mask, other=0.0)  # [BLOCK_N, BLOCK_D]
    v_tile = tl.load(v_ptrs, mask=row_mask, other=0.0)  # [BLOCK_N, BLOCK_D]
    has_weight = exists  # [BLOCK_N]
    if PADDING:
        has_weight &= tl.load(padding + b * keys + row, mask=exists, other=1) == 0
    q_head, d_head = q + b * stride_qb, dout + b * stride_db
    if lse_and_delta is None:
        out += b * q_rows * heads * HEAD_DIM
        lse += b * heads * q_rows
        if dlse is not None:
            dlse += b * heads * q_rows
    else:
        lse_and_delta += b * heads * q_rows
    dk_acc, dv_acc = _key_walk(  # [BLOCK_N, BLOCK_D] each
        k_tile, v_tile, q_head, d_head, lse_and_delta, listed, words, places, has_weight,
        g * group, group, first, last, q_rows, scale, stride_qn, stride_qh, stride_dn, stride_dh,
        HEAD_DIM, OWN, BLOCK_M, PADDING, EXTRA, False, PRECISION, out, lse, dlse, heads,
    )  # fmt: skip
    # 0 * NaN is NaN: a row of v that is not finite has no slope where nobody sees it.
    if tl.max(((dk_acc - dk_acc) != 0.0).to(tl.int32)) > 0:
        dk_acc, dv_acc = _key_walk(  # [BLOCK_N, BLOCK_D] each
            k_tile, v_tile, q_head, d_head, lse_and_delta, listed, words, places, has_weight,
            g * group, group, first, last, q_rows, scale, stride_qn, stride_qh, stride_dn, stride_dh,
            HEAD_DIM, OWN, BLOCK_M, PADDING, EXTRA, True, PRECISION, out, lse, dlse, heads,
        )  # fmt: skip
    to = ((to_b * keys + row) * kv_heads + g)[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_N, BLOCK_D]
    tl.store(dk + to, (dk_acc * scale).to(dk.dtype.element_ty), mask=row_mask)
    tl.store(dv + to, dv_acc.to(dv.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def key_kernel(
    q, k, v, dout, lse_and_delta, dk, dv, own, starts, listed, words, padding, scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_db, stride_dn, stride_dh,
    heads, group, extra, q_rows, k_rows, tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDING: tl.constexpr, EXTRA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one block and KV head, over the queries that see them: the lists turned round.

    With EXTRA they are extra keys, which all queries see. Program axis 2 then parts the queries, `tiles` tiles each,
    and dk and dv are sums of parts, in float32.
    """
    kv_heads = heads // group
    b = tl.program_id(1).to(tl.int64)
    to_b = b
    if EXTRA:
        g = (tl.program_id(0) % kv_heads).to(tl.int64)
        places = tl.program_id(0) // kv_heads * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        row, keys = places.to(tl.int64), extra  # [BLOCK_N], scalar
        exists = places < extra  # [BLOCK_N]
        first = tl.program_id(2) * tiles
        last = tl.minimum(first + tiles, tl.cdiv(q_rows, LISTED))
        to_b += tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    else:
        block, places, row, g = _place(
            own, tl.program_id(0), kv_heads, OWN, BLOCK_N
        )  # scalar, [BLOCK_N], [BLOCK_N], scalar
        keys, exists = k_rows, row >= 0  # scalar, [BLOCK_N]
        first, last = tl.load(starts + block), tl.load(starts + block + 1)
    _gradients_of_keys(
        q, k, v, dout, lse_and_delta, dk, dv, listed, words, padding, scale,
        stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
        stride_db, stride_dn, stride_dh,
        heads, group, q_rows, keys, b, to_b, g, places, row, exists, first, last,
        HEAD_DIM, BLOCK_D, OWN, BLOCK_M, PADDING, EXTRA, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "key_programs", "extra_programs"])
def backward_kernel(
    q, k, v, extra_k, extra_v, out, lse, dout, dlse, dq, dk, dv, extra_dk, extra_dv,
    own, starts, listed, words, key_own, key_starts, key_listed, key_words, padding, extra_padding, scale,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_eb, stride_en, stride_eh, stride_fb, stride_fn, stride_fh, stride_db, stride_dn, stride_dh,
    heads, group, extra, q_rows, k_rows, key_programs, extra_programs,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDING: tl.constexpr, EXTRA: tl.constexpr, EXTRA_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every gradient of a short call. Each program computes delta of the queries that it reads.

    programs   0 to key_programs - 1   the next extra_programs        the rest
    compute    dk, dv of listed keys   those of extra keys            dq
    read       lists turned round      all queries                    lists
    """
    b, program, kv_heads = tl.program_id(1).to(tl.int64), tl.program_id(0), heads // group
    if program < key_programs:
        block, places, row, g = _place(key_own, program, kv_heads, OWN, BLOCK_N)  # scalar, [BLOCK_N], [BLOCK_N], scalar
        _gradients_of_keys(
            q, k, v, dout, None, dk, dv, key_listed, key_words, padding, scale,
            stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
            stride_db, stride_dn, stride_dh,
            heads, group, q_rows, k_rows, b, b, g, places, row, row >= 0,
            tl.load(key_starts + block), tl.load(key_starts + block + 1),
            HEAD_DIM, BLOCK_D, OWN, BLOCK_M, PADDING, False, PRECISION, out, lse, dlse,
        )  # fmt: skip
    elif program < key_programs + extra_programs:
        if EXTRA:
            extra_places = (program - key_programs) // kv_heads * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            extra_row = extra_places.to(tl.int64)  # [BLOCK_N]
            extra_g = ((program - key_programs) % kv_heads).to(tl.int64)
            _gradients_of_keys(
                q, extra_k, extra_v, dout, None, extra_dk, extra_dv, listed, words, extra_padding, scale,
                stride_qb, stride_qn, stride_qh, stride_eb, stride_en, stride_eh, stride_fb, stride_fn, stride_fh,
                stride_db, stride_dn, stride_dh,
                heads, group, q_rows, extra, b, b, extra_g, extra_places, extra_row, extra_row < extra,
                0, tl.cdiv(q_rows, LISTED),
                HEAD_DIM, BLOCK_D, OWN, BLOCK_M, EXTRA_PADDING, True, PRECISION, out, lse, dlse,
            )  # fmt: skip
    else:
        q_block, q_places, query, h = _place(
            own, program - key_programs - extra_programs, heads, OWN, BLOCK_M
        )  # scalar, [BLOCK_M], [BLOCK_M], scalar
        k_head, v_head = k + b * stride_kb + h // group * stride_kh, v + b * stride_vb + h // group * stride_vh
        extra_k_head = extra_k + b * stride_eb + h // group * stride_eh
        extra_v_head = extra_v + b * stride_fb + h // group * stride_fh
        exists = query >= 0  # [BLOCK_M]
        dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        row_mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
        q_ptrs = q + b * stride_qb + h * stride_qh + query[:, None] * stride_qn + dims[None, :]  # [BLOCK_M, BLOCK_D]
        d_head = dout + b * stride_db + h * stride_dh
        d_ptrs = d_head + query[:, None] * stride_dn + dims[None, :]  # [BLOCK_M, BLOCK_D]
        q_tile = tl.load(q_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
        d_tile = tl.load(d_ptrs, mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
        own_dlse = dlse
        if dlse is not None:
            own_dlse = dlse + b * heads * q_rows
        lse_row, delta_row = _row_of_out(  # [BLOCK_M] each
            out + b * q_rows * heads * HEAD_DIM, lse + b * heads * q_rows, own_dlse, d_tile, query, exists, h, heads,
            q_rows, HEAD_DIM,
        )  # fmt: skip
        acc, _, _ = _walk(  # [BLOCK_M, BLOCK_D], [BLOCK_M], [BLOCK_M]
            q_tile, d_tile, lse_row, delta_row, k_head, v_head, extra_k_head, extra_v_head, listed, words,
            padding + b * k_rows, extra_padding + b * extra, q_places, tl.load(starts + q_block),
            tl.load(starts + q_block + 1), extra, scale, stride_kn, stride_vn, stride_en, stride_fn,
            HEAD_DIM, OWN, BLOCK_N, PADDING, EXTRA, EXTRA_PADDING, True, False, PRECISION,
        )  # fmt: skip
        to = ((b * q_rows + query) * heads + h)[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_M, BLOCK_D]
        tl.store(dq + to, (acc * scale).to(dq.dtype.element_ty), mask=row_mask)


@triton.jit(do_not_specialize=["rows", "q_rows", "heads"])
def delta_kernel(
    out, dout, lse, dlse, lse_and_delta, stride_db, stride_dn, stride_dh, rows, q_rows, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """lse to base 2 in the lower half of an int64, delta in the upper: what a gradient reads of a row, read at once.

    delta is the sum of dout * out over head_dim, less dlse, which lies like lse, or is None. out is dense, a row is one
    (sequence, query, head); lse_and_delta lies like lse.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = row < rows  # [BLOCK_M]
    mask = exists[:, None] & (dims[None, :] < HEAD_DIM)  # [BLOCK_M, BLOCK_D]
    h, query = row % heads, row // heads % q_rows  # [BLOCK_M] each
    b = row // heads // q_rows  # [BLOCK_M]
    o = tl.load(out + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_D]
    d_rows = b * stride_db + query * stride_dn + h * stride_dh  # [BLOCK_M]
    d = tl.load(dout + d_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    delta = tl.sum(o * d, 1)  # [BLOCK_M]
    scalars = (b * heads + h) * q_rows + query  # [BLOCK_M]
    if dlse is not None:
        delta -= tl.load(dlse + scalars, mask=exists, other=0.0)
    lse_row = tl.load(lse + scalars, mask=exists, other=0.0) * LOG2_E  # [BLOCK_M]
    lse_row, delta = _as_weighed(lse_row, delta)  # [BLOCK_M] each
    low, high = lse_row.to(tl.int32, bitcast=True), delta.to(tl.int32, bitcast=True)  # [BLOCK_M] each
    both = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)  # [BLOCK_M]
    tl.store(lse_and_delta + scalars, both, mask=exists)
