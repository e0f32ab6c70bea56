"""The one associative merge of partial attention results: of branches, of ranks, of ring steps."""

import torch
from torch import Tensor

from hilbert_lib.environment import kernel_mode


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two multisets of keys, from the attention over each.

    With L = log(exp(lse) + exp(other_lse)), the merged output is exp(lse - L) out + exp(other_lse - L) other_out:
    the weighting by softmax denominators of LongNet (arXiv 2307.02486, eqs. 9-10). The weights are the logistic
    functions of lse - other_lse and its negative. The operation is associative and commutative; (0, -inf) is its
    neutral element.

    Args:
        out, other_out: (..., head_dim) partial outputs, float32 or float64.
        lse, other_lse: (...) natural logs of the softmax denominators; -inf for a row that saw no key.

    Returns:
        out and lse of the union. Where both lse are -inf: 0 and -inf.

    >>> nothing = torch.zeros(1, 2), torch.full((1,), -torch.inf)
    >>> out, lse = merge(*nothing, *nothing)
    >>> out.tolist(), lse.tolist()
    ([[0.0, 0.0]], [-inf])
    """
    merged = torch.logaddexp(lse, other_lse)
    nothing = merged == -torch.inf  # -inf minus -inf is NaN
    # Not exp(lse - merged): that has the rounding of merged, which grows with lse, and its weights do not sum to one.
    weight = (lse - other_lse).sigmoid().masked_fill(nothing, 0.0)
    other_weight = (other_lse - lse).sigmoid().masked_fill(nothing, 0.0)
    return weight[..., None] * out + other_weight[..., None] * other_out, merged


def merge_rows(out: Tensor, lse: Tensor, at: tuple[Tensor, ...], other_out: Tensor, other_lse: Tensor) -> None:
    """`merge` of some rows of a whole, in place: in the dtype of lse, and rounded once. One kernel on CUDA.

    Args:
        out: (*whole, group, batch, head_dim), of any strides. lse: (*whole, group, batch).
        at: which rows, as they index out: for each of the one or two dimensions of the whole an int64 tensor, all of
            one shape (*rows). No row is named twice.
        other_out: (*rows, group, batch, head_dim). other_lse: (*rows, group, batch).

    >>> out, lse = torch.zeros(3, 1, 1, 2), torch.full((3, 1, 1), -torch.inf)
    >>> merge_rows(out, lse, (torch.tensor([2]),), torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    >>> out.flatten().tolist(), lse.flatten().tolist()
    ([0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [-inf, -inf, 0.0])
    """
    if _kernel_serves(out):
        from hilbert_lib.attention.triton import rows  # triton is imported only where a kernel is used

        rows.merge_rows(out, lse, at, other_out, other_lse)
        return
    dtype = lse.dtype
    merged, merged_lse = merge(out[at].to(dtype), lse[at], other_out.to(dtype), other_lse)
    out[at], lse[at] = merged.to(out.dtype), merged_lse


def add_rows(total: Tensor, at: tuple[Tensor, ...], more: Tensor) -> None:
    """Adds to some rows of a whole, in place: in the wider of the two dtypes, and rounded once. One kernel on CUDA.

    Args:
        total: (*whole, group, batch, head_dim), of any strides.
        at: which rows, as for `merge_rows`.
        more: (*rows, group, batch, head_dim).

    >>> total = torch.zeros(3, 1, 1, 2)
    >>> add_rows(total, (torch.tensor([2, 0]),), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 1, 2))
    >>> total.flatten().tolist()
    [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]
    """
    if _kernel_serves(total):
        from hilbert_lib.attention.triton import rows

        rows.add_rows(total, at, more)
        return
    total[at] = (total[at] + more).to(total.dtype)


def _kernel_serves(x: Tensor) -> bool:
    return x.is_cuda and kernel_mode() == "compiled"
