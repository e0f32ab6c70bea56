"""Work on rows, each read and written once: merge or sum of two results; sum of parts; in place by index; in place
with zero keys.

In plain torch a merge takes some twelve kernels. By index it takes up to seventeen, as an addition does: a gather, the
arithmetic and a scatter. With zero keys it takes six.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.attention.triton.start import Made, Start, start

ELEMENTS = 2048  # elements of a tile: 16 a thread


def merge_rows(out: Tensor, lse: Tensor, index: tuple[Tensor, ...], other_out: Tensor, other_lse: Tensor) -> None:
    """`hilbert_lib.attention.merge.merge_rows` in one kernel."""
    _launch(merge_kernel, index, [(out, other_out), (lse, other_lse)])


def add_rows(total: Tensor, index: tuple[Tensor, ...], addend: Tensor) -> None:
    """`hilbert_lib.attention.merge.add_rows` in one kernel."""
    _launch(add_kernel, index, [(total, addend)])


def merge_results(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`hilbert_lib.attention.merge.merge_results` in one kernel."""
    batch, queries, heads, head_dim = out.shape
    inputs = [x.contiguous() for x in (out, lse, other_out, other_lse)]
    if not lse.numel():
        return out.new_empty(out.shape, dtype=dtype), torch.empty_like(inputs[1])
    block_d = power_of_2(head_dim)
    block_m = max(1, ELEMENTS // block_d)
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m}
    grid, sizes = (triton.cdiv(queries, block_m) * heads * batch,), (queries, heads, batch)

    def starts(*results: Tensor) -> list[Start]:
        return [Start(results_kernel, grid, (*inputs, *results, *sizes), named)]

    made = Made(out.shape, dtype), Made(lse.shape, lse.dtype)
    return tuple(start(starts, inputs, results_kernel, dtype, made=made))


def add_tensors(xs: Sequence[Tensor], ys: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """`hilbert_lib.attention.merge.add_tensors`, a kernel for each pair that has elements: one start of all."""
    inputs = [x.contiguous() for x in (*xs, *ys) if x.numel()]
    firsts, seconds = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    made = [Made(x.shape, dtype) for x, dtype in zip(xs, dtypes, strict=True) if x.numel()]

    def starts(*totals: Tensor) -> list[Start]:
        return [
            Start(sum_kernel, (triton.cdiv(x.numel(), ELEMENTS),), (x, y, total, x.numel()), {"BLOCK": ELEMENTS})
            for x, y, total in zip(firsts, seconds, totals, strict=True)
        ]

    totals = iter(start(starts, inputs, sum_kernel, *dtypes, made=made) if inputs else ())
    return [next(totals) if x.numel() else x.to(dtype) for x, dtype in zip(xs, dtypes, strict=True)]


def sum_of_parts(parts: Tensor, total: Tensor) -> Start:
    """The launch that adds float32 parts (parts, *shape) up, always in the same order, and rounds once to the total."""
    count = total.numel()
    return Start(parts_kernel, (triton.cdiv(count, ELEMENTS),), (parts, total, len(parts), count), {"BLOCK": ELEMENTS})


def add_zero_keys(out: Tensor, lse: Tensor, log_count: Tensor) -> None:
    """Add exp(log_count) keys of zeros to out and lse; log_count is (kv_heads, 1, queries), contiguous like lse."""
    batch, heads, queries = lse.shape
    if not lse.numel():
        return
    block_d = power_of_2(out.shape[3])
    block_m = max(1, ELEMENTS // block_d)
    sizes = queries, heads, batch, heads // log_count.shape[0], *out.stride()
    named = {"HEAD_DIM": out.shape[3], "BLOCK_D": block_d, "BLOCK_M": block_m}
    grid, tensors = (triton.cdiv(queries, block_m) * heads * batch,), (out, lse, log_count)
    start(lambda: [Start(zero_kernel, grid, (*tensors, *sizes), named)], tensors, zero_kernel)


def _launch(kernel: triton.JITFunction, index: tuple[Tensor, ...], pairs: list[tuple[Tensor, Tensor]]) -> None:
    rows = index[0].numel()
    if not rows:
        return
    group, batch, head_dim = pairs[0][0].shape[-3:]
    block_d = power_of_2(head_dim)
    block_m = max(1, ELEMENTS // block_d)
    tensors, strides = [], []
    for x, other_rows in pairs:
        tensors += [x, other_rows.contiguous()]
        # A single index stands twice, the second time with stride 0.
        strides += [*x.stride()[: len(index)], *[0] * (2 - len(index)), *x.stride()[len(index) :]]
    tensors += [index[0].contiguous(), index[-1].contiguous()]
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m}
    grid = (triton.cdiv(rows, block_m) * group * batch,)
    start(lambda: [Start(kernel, grid, (*tensors, rows, group, batch, *strides), named)], tensors, kernel, len(index))


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, other_out, lse, other_lse, first, second, rows, group, batch,
    out_first, out_second, out_group, out_batch, out_dim, lse_first, lse_second, lse_group, lse_batch,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of merged rows, of one member of the group and one sequence, in the dtype of lse."""
    row, member, exists = _rows(rows, group * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    first_index, second_index = (
        tl.load(first + row, mask=exists, other=0),
        tl.load(second + row, mask=exists, other=0),
    )  # [BLOCK_M] each
    g, b = member // batch, member % batch
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    lse_at = lse + first_index * lse_first + second_index * lse_second + g * lse_group + b * lse_batch  # [BLOCK_M]
    out_at = (
        out
        + (first_index * out_first + second_index * out_second + g * out_group + b * out_batch)[:, None]
        + dims * out_dim
    )  # [BLOCK_M, BLOCK_D]
    other_row = row * group * batch + member  # [BLOCK_M]; others lie one after the other
    lse_own = tl.load(lse_at, mask=exists, other=float("-inf"))  # [BLOCK_M]
    lse_other = tl.load(other_lse + other_row, mask=exists, other=float("-inf"))  # [BLOCK_M]
    working = lse.dtype.element_ty
    share, other_share, merged = _shares(lse_own, lse_other, working)  # [BLOCK_M] each
    tile = tl.load(out_at, mask=inside, other=0.0).to(working)  # [BLOCK_M, BLOCK_D]
    other_tile = tl.load(other_out + other_row[:, None] * HEAD_DIM + dims, mask=inside, other=0.0).to(
        working
    )  # [BLOCK_M, BLOCK_D]
    result = tile * share[:, None] + other_tile * other_share[:, None]  # [BLOCK_M, BLOCK_D]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, merged, mask=exists)


@triton.jit(do_not_specialize=["queries"])
def results_kernel(
    out, lse, other_out, other_lse, result, result_lse, queries, heads, batch,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of merged rows of one head and sequence, in the dtype of lse. All tensors are contiguous."""
    row, member, exists = _rows(queries, heads * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    h, b = member % heads, member // heads
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    lse_at = (b * heads + h) * queries + row  # [BLOCK_M]
    out_at = (((b * queries + row) * heads + h) * HEAD_DIM)[:, None] + dims  # [BLOCK_M, BLOCK_D]
    lse_own = tl.load(lse + lse_at, mask=exists, other=float("-inf"))  # [BLOCK_M]
    lse_other = tl.load(other_lse + lse_at, mask=exists, other=float("-inf"))  # [BLOCK_M]
    working = lse.dtype.element_ty
    share, other_share, merged = _shares(lse_own, lse_other, working)  # [BLOCK_M] each
    tile = tl.load(out + out_at, mask=inside, other=0.0).to(working) * share[:, None]  # [BLOCK_M, BLOCK_D]
    tile += tl.load(other_out + out_at, mask=inside, other=0.0).to(working) * other_share[:, None]
    tl.store(result + out_at, tile.to(result.dtype.element_ty), mask=inside)
    tl.store(result_lse + lse_at, merged, mask=exists)


@triton.jit(do_not_specialize=["count"])
def sum_kernel(x, y, total, count, BLOCK: tl.constexpr):
    """x + y, added in float32 (float64 for float64) and rounded once. All tensors are contiguous."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    working: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    addend = tl.load(x + place, mask=place < count, other=0.0).to(working)  # [BLOCK]
    addend += tl.load(y + place, mask=place < count, other=0.0).to(working)
    tl.store(total + place, addend.to(total.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["parts", "count"])
def parts_kernel(x, total, parts, count, BLOCK: tl.constexpr):
    """Sums of float32 parts that lie one after the other, each of `count` elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    at, sums = x + place, tl.zeros([BLOCK], tl.float32)  # [BLOCK] each
    for _ in range(parts):
        sums += tl.load(at, mask=place < count, other=0.0)
        at += count
    tl.store(total + place, sums.to(total.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["queries"])
def zero_kernel(
    out, lse, log_count, queries, heads, batch, group, out_batch, out_row, out_head, out_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one head and sequence, merged with zero keys."""
    row, member, exists = _rows(queries, heads * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    h, b = member // batch, member % batch
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    lse_at = lse + (b * heads + h) * queries + row  # [BLOCK_M]
    out_at = out + (b * out_batch + h * out_head + row * out_row)[:, None] + dims * out_dim  # [BLOCK_M, BLOCK_D]
    lse_own = tl.load(lse_at, mask=exists, other=float("-inf"))  # [BLOCK_M]
    zeros = tl.load(log_count + h // group * queries + row, mask=exists, other=float("-inf"))  # [BLOCK_M]
    share, _, merged = _shares(lse_own, zeros, lse.dtype.element_ty)  # [BLOCK_M] each
    tile = tl.load(out_at, mask=inside, other=0.0) * share[:, None]  # [BLOCK_M, BLOCK_D]
    tl.store(out_at, tile.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, merged, mask=exists)


@triton.jit(do_not_specialize=["rows"])
def add_kernel(
    total, addend, first, second, rows, group, batch,
    total_first, total_second, total_group, total_batch, total_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of sums of rows, of one member of the group and one sequence, in the wider of the dtypes."""
    row, member, exists = _rows(rows, group * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    first_index, second_index = (
        tl.load(first + row, mask=exists, other=0),
        tl.load(second + row, mask=exists, other=0),
    )  # [BLOCK_M] each
    g, b = member // batch, member % batch
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    offsets = first_index * total_first + second_index * total_second + g * total_group + b * total_batch  # [BLOCK_M]
    total_at = total + offsets[:, None] + dims * total_dim  # [BLOCK_M, BLOCK_D]
    addend_at = (row * group * batch + member) * HEAD_DIM  # [BLOCK_M]
    tile = tl.load(total_at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    tile += tl.load(addend + addend_at[:, None] + dims, mask=inside, other=0.0)
    tl.store(total_at, tile.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _rows(rows, members, BLOCK_M: tl.constexpr):
    """Rows of this program, its member (int64), and whether each row exists.

    Neighbouring programs take members of the same rows.
    """
    pid = tl.program_id(0)
    row = (pid // members).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    return row, (pid % members).to(tl.int64), row < rows


@triton.jit
def _shares(lse, other_lse, dtype: tl.constexpr):
    """Weights of two parts in each row, and the row's lse.

    These few numbers are computed in float64: a GPU's exponential and logarithm err in the seventh digit.
    """
    lse, other_lse = lse.to(tl.float64), other_lse.to(tl.float64)  # [BLOCK_M] each
    largest = tl.maximum(lse, other_lse)  # [BLOCK_M]
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]; -inf minus -inf would be NaN
    weight, other_weight = tl.exp(lse - finite), tl.exp(other_lse - finite)  # [BLOCK_M] each
    total = weight + other_weight  # [BLOCK_M]
    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys
    merged = largest + tl.log(denominator)  # [BLOCK_M]
    return (weight / denominator).to(dtype), (other_weight / denominator).to(dtype), merged.to(dtype)
