"""Forward for a few queries on lines whose sequences begin at rows that only the device knows: sliding windows' caches.

A program takes one query of all heads of a KV head, and a chunk of its window. Another program takes the extra keys:

    keys of a query   | chunk 0 | chunk 1 | extra keys |
    programs            part 0    part 1    part 2       -> decode.merge_kernel -> out, lse
"""

from operator import itemgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.arguments import as_computed
from hilbert_lib.attention.triton.decode import (
    KEYS_PER_ROW,
    MERGED_ELEMENTS,
    NUM_STAGES,
    NUM_WARPS,
    PROGRAMS,
    made_of_parts,
    merge_kernel,
    products_of_few_rows,
    rows_held,
    starts_of_rows,
    step_keys,
)
from hilbert_lib.attention.triton.start import Made, Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.neighbourhood import EDGES

NOT_SPECIALIZED = [
    *("first_query", "queries", "keys", "kv_heads", "group", "dilation", "stride", "entries"),
    *("extra", "chunk", "tiles", "parts", "stride_pb", "stride_gb"),
]


def attend_in_windows(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output and lse of a line; deterministic, without atomics."""
    dtype = inputs.q.dtype
    q, k, v, extra_k, extra_v = as_computed(*inputs.with_rows)
    (batch, queries, heads, head_dim), (_, keys, kv_heads, _) = q.shape, k.shape
    group, extra = heads // kv_heads, extra_k.shape[1]
    axis, most = request.pattern.by_head[0].axes[0], max(near.axes[0].window for near in request.neighbourhoods)
    block_m, block_n = min(32, max(16, geometry.power_of_2(group))), step_keys(head_dim, k.element_size())
    most = min(most, keys)
    least = max(KEYS_PER_ROW * group, triton.cdiv(batch * kv_heads * queries * most, PROGRAMS))
    chunk = triton.cdiv(least, block_n) * block_n
    tiles, parts = triton.cdiv(group, block_m), triton.cdiv(most, chunk) + (extra > 0)
    padding, extra_padding = (
        None if mask is None else mask.contiguous() for mask in (request.key_padding_mask, request.extra_padding_mask)
    )
    bias = None if inputs.bias is None else as_computed(inputs.bias.contiguous())[0]
    windows, one_branch = _windows(request.neighbourhoods, q.device), _one_branch(kv_heads, q.device)
    numbers = (
        request.scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *extra_k.stride()[:3], *extra_v.stride()[:3],
        keys, extra, request.first_query, queries, keys, kv_heads, group, axis.dilation, axis.stride,
        request.pattern.bias_sides[0], extra,
        chunk, tiles, parts,
    )  # fmt: skip
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": geometry.block_d(head_dim)}
    named = {
        **sizes, "BLOCK_M": block_m, "BLOCK_N": block_n, "CAUSAL": axis.is_causal, "EDGE": EDGES.index(axis.edge),
        "PRECISION": products_of_few_rows(), "num_warps": NUM_WARPS, "num_stages": NUM_STAGES,
        "padding": padding, "extra_padding": extra_padding, "bias": bias,
        **starts_of_rows(request),
    }  # fmt: skip
    named_of_merge = sizes | {"BLOCK": MERGED_ELEMENTS // sizes["BLOCK_D"]}

    def starts(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> list[Start]:
        tensors = q, k, v, extra_k, extra_v, partial_out, partial_lse, windows
        # To the merge the parts are chunks of one key each, of one branch that holds every position.
        merged = (
            partial_out, partial_lse, out, lse, one_branch,
            0, queries, parts, heads, kv_heads, group, 1, 1, parts,
        )  # fmt: skip
        return [
            Start(line_kernel, (batch * kv_heads * queries * tiles * parts,), (*tensors, *numbers), named),
            Start(merge_kernel, (batch * queries * heads,), merged, named_of_merge),
        ]

    made = (*made_of_parts(q, parts), Made(q.shape, dtype), Made((batch, heads, queries), torch.float32))
    masks = request.key_padding_mask, request.extra_padding_mask, request.query_starts, request.key_start
    tensors = q, k, v, extra_k, extra_v, inputs.bias, *masks
    return start(starts, tensors, "decode a line", *request.options, made=made, finish=itemgetter(2, 3))


@cached_for_graphs()
def _windows(neighbourhoods: tuple, device: torch.device) -> Tensor:
    # (kv_heads,) int32
    return torch.tensor([near.axes[0].window for near in neighbourhoods], dtype=torch.int32, device=device)


@cached_for_graphs()
def _one_branch(kv_heads: int, device: torch.device) -> Tensor:
    return torch.tensor([[2**30, 1, 0]] * kv_heads, dtype=torch.int32, device=device)


@triton.jit
def window_of(position, cells, window, dilation, stride, CAUSAL: tl.constexpr, EDGE: tl.constexpr):
    """The first rank of a query's window, how many there are, its own rank, and the ranks of its sub-axis.

    The first rank is below 0 where the window goes round.
    """
    rank, ranks = position // dilation, (cells - position % dilation + dilation - 1) // dilation
    group = rank // stride * stride
    if CAUSAL:
        first = tl.maximum(tl.minimum(group + stride - 1, ranks - 1) - window + 1, 0)
        end = tl.minimum(rank + 1, first + window)
    else:
        first = tl.minimum(group + stride // 2, ranks - 1) - window // 2
        if EDGE == 0:
            first = tl.maximum(tl.minimum(first, ranks - window), 0)
        end = first + window
        if EDGE != 2:
            first, end = tl.maximum(first, 0), tl.minimum(end, ranks)
    return first, end - first, rank, ranks


@triton.jit
def attended(m, total, acc, scores, allowed, v_tile, PRECISION: tl.constexpr):
    """Largest score, sum of weights and weighted sum of one more tile of keys."""
    # scores [BLOCK_M, BLOCK_N], allowed [1, BLOCK_N], v_tile [BLOCK_N, BLOCK_D]
    scores = tl.where(allowed, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
    largest = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_M]
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]
    weights = tl.exp2((scores - finite[:, None]) * geometry.LOG2_E)  # [BLOCK_M, BLOCK_N]
    decay = tl.exp2((m - finite) * geometry.LOG2_E)  # [BLOCK_M]
    total = total * decay + tl.sum(weights, 1)  # [BLOCK_M]
    acc *= decay[:, None]
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return largest, total, acc


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def line_kernel(
    q, k, v, extra_k, extra_v, partial_out, partial_lse, windows,
    scale, stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_eb, stride_en, stride_eh, stride_fb, stride_fn, stride_fh, stride_pb, stride_gb,
    first_query, queries, keys, kv_heads, group, dilation, stride, entries, extra, chunk, tiles, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    padding=None, extra_padding=None, bias=None, query_starts=None, key_start=None,
):  # fmt: skip
    """Partial results of one query of the heads of a KV head, over one chunk of its window or over the extra keys."""
    # partial_out [batch, heads, queries, parts, HEAD_DIM], partial_lse [batch, heads, queries, parts]
    pid = tl.program_id(0)
    part, tile = pid % parts, pid // parts % tiles
    t = pid // parts // tiles % queries
    g = (pid // parts // tiles // queries % kv_heads).to(tl.int64)
    b = (pid // parts // tiles // queries // kv_heads).to(tl.int64)
    begin, cells, first_query, before, held = rows_held(b, first_query, queries, keys, query_starts, key_start, False)
    is_held = (t >= before) & (t - before < held)
    position = tl.where(is_held, first_query + t - before, 0)
    window = tl.load(windows + g)
    first, count, rank, ranks = window_of(position, tl.maximum(cells, 1), window, dilation, stride, CAUSAL, EDGE)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    h = g * group + rows  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    row_mask = (rows < group)[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    q_row = q + b * stride_qb + t.to(tl.int64) * stride_qn
    q_tile = tl.load(q_row + h[:, None] * stride_qh + dims[None, :], mask=row_mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    is_extra = (extra > 0) & (part == parts - 1)
    start = part * chunk
    end = tl.where(is_held & (is_extra == 0), tl.minimum(count, start + chunk), start)
    k_head, v_head = k + b * stride_kb + g * stride_kh, v + b * stride_vb + g * stride_vh
    for j in range(start, end, BLOCK_N):
        is_key = j + cols < end  # [BLOCK_N]
        place = first + j + cols  # [BLOCK_N]
        key_rank = place  # [BLOCK_N]
        if EDGE == 2:
            key_rank = (place + ranks) % ranks  # [BLOCK_N]
        row = (begin + key_rank * dilation + position % dilation).to(tl.int64)  # [BLOCK_N]
        if padding is not None:
            is_key &= tl.load(padding + b * stride_pb + row, mask=is_key, other=1) == 0
        load = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
        k_tile = tl.load(k_head + row[:, None] * stride_kn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_head + row[:, None] * stride_vn + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        if bias is not None:
            entry = h[:, None] * entries + (place - rank + entries // 2)[None, :]  # [BLOCK_M, BLOCK_N]
            mask = (rows < group)[:, None] & is_key[None, :]  # [BLOCK_M, BLOCK_N]
            scores += tl.load(bias + entry, mask=mask, other=0.0).to(tl.float32)
        m, total, acc = attended(
            m, total, acc, scores, is_key[None, :], v_tile, PRECISION
        )  # [BLOCK_M], [BLOCK_M], [BLOCK_M, BLOCK_D]
    extra_head, value_head = extra_k + b * stride_eb + g * stride_eh, extra_v + b * stride_fb + g * stride_fh
    for j in range(0, tl.where(is_held & is_extra, extra, 0), BLOCK_N):
        is_key = j + cols < extra  # [BLOCK_N]
        row = (j + cols).to(tl.int64)  # [BLOCK_N]
        if extra_padding is not None:
            is_key &= tl.load(extra_padding + b * stride_gb + row, mask=is_key, other=1) == 0
        load = is_key[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
        k_ptrs, v_ptrs = (
            extra_head + row[:, None] * stride_en,
            value_head + row[:, None] * stride_fn,
        )  # [BLOCK_N, 1] each
        k_tile = tl.load(k_ptrs + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        v_tile = tl.load(v_ptrs + dims[None, :], mask=load, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale  # [BLOCK_M, BLOCK_N]
        m, total, acc = attended(
            m, total, acc, scores, is_key[None, :], v_tile, PRECISION
        )  # [BLOCK_M], [BLOCK_M], [BLOCK_M, BLOCK_D]
    part_rows = ((b * kv_heads * group + h) * queries + t) * parts + part  # [BLOCK_M]
    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys; NaN stays NaN
    lse = tl.where(total == 0.0, float("-inf"), m + tl.log(denominator))  # [BLOCK_M]
    tl.store(partial_out + part_rows[:, None] * HEAD_DIM + dims[None, :], acc / denominator[:, None], mask=row_mask)
    tl.store(partial_lse + part_rows, lse, mask=rows < group)
