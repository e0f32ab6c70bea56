"""The one associative merge of partial attention results: of branches, of ranks, of ring steps."""

import torch
from torch import Tensor

from hilbert_lib.machine import kernel_mode


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two multisets of keys, from the attention over each.

    With L = log(exp(lse) + exp(other_lse)), the merged output is exp(lse - L) out + exp(other_lse - L) other_out:
    the weighting by softmax denominators of LongNet (arXiv 2307.02486, eqs. 9-10). The operation is associative and
    commutative; (0, -inf) is its neutral element. out: (..., head_dim) float32 or float64. lse: (...), -inf for a row
    that saw no key.
    """
    merged = torch.logaddexp(lse, other_lse)
    nothing = merged == -torch.inf  # -inf minus -inf is NaN
    # Logistic functions, not exp(lse - merged): merged is rounded, more so for a large lse, and then the weights do not
    # sum to one.
    weight = (lse - other_lse).sigmoid().masked_fill(nothing, 0.0)
    other_weight = (other_lse - lse).sigmoid().masked_fill(nothing, 0.0)
    return weight[..., None] * out + other_weight[..., None] * other_out, merged


def merge_rows(out: Tensor, lse: Tensor, index: tuple[Tensor, ...], other_out: Tensor, other_lse: Tensor) -> None:
    """`merge` into some rows of a tensor, in place: in the dtype of lse, and rounded once. One kernel on CUDA.

    Args:
        out: (*shape, group, batch, head_dim), of any strides. lse: (*shape, group, batch).
        index: of the rows in out: an int64 tensor for each of the one or two dimensions of `shape`, all of one shape
            (*rows). No row is named twice.
        other_out: (*rows, group, batch, head_dim). other_lse: (*rows, group, batch).
    """
    if kernel_serves(out):
        from hilbert_lib.attention.triton import rows  # triton is imported only where a kernel is used

        rows.merge_rows(out, lse, index, other_out, other_lse)
        return
    dtype = lse.dtype
    merged, merged_lse = merge(out[index].to(dtype), lse[index], other_out.to(dtype), other_lse)
    out[index], lse[index] = merged.to(out.dtype), merged_lse


def add_rows(total: Tensor, index: tuple[Tensor, ...], addends: Tensor) -> None:
    """Add (*rows, group, batch, head_dim) to some rows of a tensor, in place; `index` as in `merge_rows`.

    Sums are in the wider of the two dtypes and rounded once. One kernel on CUDA.
    """
    if kernel_serves(total):
        from hilbert_lib.attention.triton import rows

        rows.add_rows(total, index, addends)
        return
    total[index] = (total[index] + addends).to(total.dtype)


def kernel_serves(x: Tensor) -> bool:
    """Whether Triton's kernels for rows serve a tensor."""
    return x.is_cuda and kernel_mode() == "compiled"
