"""Rows, by index merged with others or added to, or all with zero keys: in place, each read and written once.

In plain torch the first two take up to seventeen kernels, a gather, the arithmetic and a scatter; the last takes six.
"""

import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.attention.triton.start import Start, start

ELEMENTS = 2048  # of a tile: 16 a thread


def merge_rows(out: Tensor, lse: Tensor, at: tuple[Tensor, ...], other_out: Tensor, other_lse: Tensor) -> None:
    """As `hilbert_lib.attention.merge.merge_rows`."""
    _launch(merge_kernel, at, [(out, other_out), (lse, other_lse)])


def add_rows(total: Tensor, at: tuple[Tensor, ...], more: Tensor) -> None:
    """As `hilbert_lib.attention.merge.add_rows`."""
    _launch(add_kernel, at, [(total, more)])


def add_zero_keys(out: Tensor, lse: Tensor, log_count: Tensor) -> None:
    """Add exp(log_count) keys of zeros, (kv_heads, 1, queries), to out and lse; the latter two are contiguous."""
    batch, heads, queries = lse.shape
    if not lse.numel():
        return
    block_d = power_of_2(out.shape[3])
    block_m = max(1, ELEMENTS // block_d)
    sizes = queries, heads, batch, heads // log_count.shape[0], *out.stride()
    named = {"HEAD_DIM": out.shape[3], "BLOCK_D": block_d, "BLOCK_M": block_m}
    grid, tensors = (triton.cdiv(queries, block_m) * heads * batch,), (out, lse, log_count)
    start(lambda: [Start(zero_kernel, grid, (*tensors, *sizes), named)], tensors, zero_kernel)


def _launch(kernel: triton.JITFunction, at: tuple[Tensor, ...], pairs: list[tuple[Tensor, Tensor]]) -> None:
    rows = at[0].numel()
    if not rows:
        return
    group, batch, head_dim = pairs[0][0].shape[-3:]
    block_d = power_of_2(head_dim)
    block_m = max(1, ELEMENTS // block_d)
    tensors, strides = [], []
    for whole, others in pairs:
        tensors += [whole, others.contiguous()]
        # A single index is given twice, the second time with stride 0.
        strides += [*whole.stride()[: len(at)], *[0] * (2 - len(at)), *whole.stride()[len(at) :]]
    tensors += [at[0].contiguous(), at[-1].contiguous()]
    named = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": block_m}
    grid = (triton.cdiv(rows, block_m) * group * batch,)
    start(lambda: [Start(kernel, grid, (*tensors, rows, group, batch, *strides), named)], tensors, kernel, len(at))


@triton.jit(do_not_specialize=["rows"])
def merge_kernel(
    out, other_out, lse, other_lse, first, second, rows, group, batch,
    out_first, out_second, out_group, out_batch, out_dim, lse_first, lse_second, lse_group, lse_batch,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges one tile of rows, of one member of the group and one sequence, in the dtype of lse."""
    row, member, exists = _rows(rows, group * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    one, two = tl.load(first + row, mask=exists, other=0), tl.load(second + row, mask=exists, other=0)  # [BLOCK_M] each
    g, b = member // batch, member % batch
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    lse_at = lse + one * lse_first + two * lse_second + g * lse_group + b * lse_batch  # [BLOCK_M]
    out_at = (
        out + (one * out_first + two * out_second + g * out_group + b * out_batch)[:, None] + dims * out_dim
    )  # [BLOCK_M, BLOCK_D]
    other = row * group * batch + member  # [BLOCK_M]; others lie one after the other
    lse_own = tl.load(lse_at, mask=exists, other=float("-inf"))  # [BLOCK_M]
    lse_other = tl.load(other_lse + other, mask=exists, other=float("-inf"))  # [BLOCK_M]
    working = lse.dtype.element_ty
    share, other_share, merged = _shares(lse_own, lse_other, working)  # [BLOCK_M] each
    tile = tl.load(out_at, mask=inside, other=0.0).to(working)  # [BLOCK_M, BLOCK_D]
    more = tl.load(other_out + other[:, None] * HEAD_DIM + dims, mask=inside, other=0.0).to(
        working
    )  # [BLOCK_M, BLOCK_D]
    result = tile * share[:, None] + more * other_share[:, None]  # [BLOCK_M, BLOCK_D]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse_at, merged, mask=exists)


@triton.jit(do_not_specialize=["queries"])
def zero_kernel(
    out, lse, log_count, queries, heads, batch, group, out_batch, out_row, out_head, out_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds zero keys to one tile of rows, of one head and sequence."""
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
    total, more, first, second, rows, group, batch,
    total_first, total_second, total_group, total_batch, total_dim,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds one tile of rows, of one member of the group and one sequence, in the wider of the dtypes."""
    row, member, exists = _rows(rows, group * batch, BLOCK_M)  # [BLOCK_M], scalar, [BLOCK_M]
    one, two = tl.load(first + row, mask=exists, other=0), tl.load(second + row, mask=exists, other=0)  # [BLOCK_M] each
    g, b = member // batch, member % batch
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    at = one * total_first + two * total_second + g * total_group + b * total_batch  # [BLOCK_M]
    total_at = total + at[:, None] + dims * total_dim  # [BLOCK_M, BLOCK_D]
    other = (row * group * batch + member) * HEAD_DIM  # [BLOCK_M]
    tile = tl.load(total_at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    tile += tl.load(more + other[:, None] + dims, mask=inside, other=0.0)
    tl.store(total_at, tile.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _rows(rows, members, BLOCK_M: tl.constexpr):
    """Rows of this program and its member of each, int64; neighbours take the members of the same rows."""
    pid = tl.program_id(0)
    row = (pid // members).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    return row, (pid % members).to(tl.int64), row < rows


@triton.jit
def _shares(lse, other, dtype: tl.constexpr):
    """What each of two parts weighs in a row, and the row's lse.

    In float64: a GPU's own exponential and logarithm err in the seventh digit, and these are few.
    """
    lse, other = lse.to(tl.float64), other.to(tl.float64)  # [BLOCK_M] each
    largest = tl.maximum(lse, other)  # [BLOCK_M]
    finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]; -inf minus -inf would be NaN
    weight, other_weight = tl.exp(lse - finite), tl.exp(other - finite)  # [BLOCK_M] each
    total = weight + other_weight  # [BLOCK_M]
    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys
    merged = largest + tl.log(denominator)  # [BLOCK_M]
    return (weight / denominator).to(dtype), (other_weight / denominator).to(dtype), merged.to(dtype)
