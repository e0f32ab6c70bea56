"""The one associative merge of partial attention results: of branches, ranks, ring steps and calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hilbert_lib.attention.request import WORKING_DTYPE
from hilbert_lib.checks import dense_tensor, is_listed, suggesting, unscripted
from hilbert_lib.machine import kernel_mode


@unscripted
@suggesting
def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of several calls, from the out and lse of each: one softmax over all (arXiv 2307.02486).

    A key of two calls counts twice. Differentiable in every out and lse. Sums are in float32 (float64 for float64); out
    is rounded once. A row for which no call has keys has out 0, lse -inf and gradient 0.

    Args:
        outs: (batch, seq, heads, head_dim) each, of one shape and dtype, one at least; 0 where its lse is -inf.
        lses: (batch, heads, seq) each, as many: float32, float64 for float64, as `return_lse` gives them.

    Returns:
        out (batch, seq, heads, head_dim) in the dtype of outs, and lse (batch, heads, seq).

    Raises:
        TypeError, ValueError: naming the tensor, and what is allowed.

    >>> v = torch.tensor([1.0, 4.0]).view(2, 1, 1, 1, 1)  # of two keys, one in each call
    >>> out, lse = merge_attention(list(v), [torch.zeros(1, 1, 1), torch.full((1, 1, 1), 2.0).log()])
    >>> out.item(), lse.exp().item()
    (3.0, 3.0)
    """
    _check_results(outs, lses)
    dtype = outs[0].dtype
    parts = [(out.to(lse.dtype), lse.transpose(1, 2)) for out, lse in zip(outs, lses, strict=True)]
    merged, *others = parts
    # One call is merged with one without keys, which holds back the gradients of its rows without keys.
    for other in others or [(torch.zeros_like(merged[0]), torch.full_like(merged[1], -torch.inf))]:
        merged = merge(*merged, *other)
    out, lse = merged
    return out.to(dtype), lse.transpose(1, 2).contiguous()


def _check_results(outs: object, lses: object) -> None:
    for name, results in (("outs", outs), ("lses", lses)):
        if isinstance(results, Tensor) or not is_listed(results):
            raise TypeError(f"{name} must be a list of tensors, got {type(results).__name__}")
    if not len(outs):
        raise ValueError("outs must hold at least one tensor, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses must hold as many tensors as outs ({len(outs)}), got {len(lses)}")
    first = dense_tensor("outs[0]", outs[0])
    if first.dim() != 4:
        raise ValueError(f"outs[0] must be (batch, seq, heads, head_dim), got shape {tuple(first.shape)}")
    if first.dtype not in WORKING_DTYPE:
        raise TypeError(f"outs[0] must be float16, bfloat16, float32 or float64, got {first.dtype}")
    batch, seq, heads, _ = first.shape
    rows, working_dtype = (batch, heads, seq), WORKING_DTYPE[first.dtype]
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        _check_like(f"outs[{n}]", out, first, first.shape, first.dtype)
        _check_like(f"lses[{n}]", lse, first, rows, working_dtype)


def _check_like(name: str, x: object, first: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    dense_tensor(name, x)
    if x.shape != shape:
        raise ValueError(
            f"{name} must have shape {tuple(shape)} beside outs[0] of {tuple(first.shape)}, got {tuple(x.shape)}"
        )
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} beside outs[0] of {first.dtype}, got {x.dtype}")
    if x.device != first.device:
        raise ValueError(f"{name} must be on the device of outs[0] ({first.device}), got {x.device}")


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two multisets of keys, from the attention over each.

    With L = log(exp(lse) + exp(other_lse)), the merged output is exp(lse - L) out + exp(other_lse - L) other_out:
    the weighting by softmax denominators of LongNet (arXiv 2307.02486, eqs. 9-10). The operation is associative and
    commutative; (0, -inf) is its neutral element. out: (..., head_dim) float32 or float64. lse: (...), -inf for a row
    that saw no key. Differentiable; the gradients of a row that saw no key are 0.
    """
    nothing = (lse == -torch.inf) & (other_lse == -torch.inf)  # -inf minus -inf is NaN, and so is its gradient
    lse, other_lse = (x.masked_fill(nothing, 0.0) for x in (lse, other_lse))
    merged = torch.logaddexp(lse, other_lse).masked_fill(nothing, -torch.inf)
    # Logistic functions, not exp(lse - merged): merged is rounded, more so for a large lse, and then the weights do not
    # sum to one.
    weight = (lse - other_lse).sigmoid().masked_fill(nothing, 0.0)
    other_weight = (other_lse - lse).sigmoid().masked_fill(nothing, 0.0)
    return weight[..., None] * out + other_weight[..., None] * other_out, merged


def merge_results(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`merge` of two results of a call, out rounded to a dtype once. One kernel on CUDA.

    Args:
        out, other_out: (batch, queries, heads, head_dim). lse, other_lse: (batch, heads, queries), in which dtype out
            is merged.
        dtype: of the output.
    """
    if kernel_serves(out):
        from hilbert_lib.attention.triton import rows  # triton is imported only where a kernel is used

        return rows.merge_results(out, lse, other_out, other_lse, dtype)
    # (batch, heads, queries, head_dim), as lse lies
    outs = (x.to(lse.dtype).transpose(1, 2) for x in (out, other_out))
    merged, merged_lse = merge(next(outs), lse, next(outs), other_lse)
    return merged.transpose(1, 2).to(dtype).contiguous(), merged_lse


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


def add_tensors(xs: Sequence[Tensor], ys: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """x + y in a dtype, of each pair: added in float32 (float64 for float64) and rounded once. One start on CUDA."""
    if kernel_serves(xs[0]):
        from hilbert_lib.attention.triton import rows  # triton is imported only where a kernel is used

        return rows.add_tensors(xs, ys, dtypes)
    return [_added(x, y, dtype) for x, y, dtype in zip(xs, ys, dtypes, strict=True)]


def _added(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > x.itemsize:
        x = x.to(dtype)  # torch rounds the sum of two tensors of a half precision to it, whatever `out` is
    return torch.add(x, y, out=torch.empty_like(x, dtype=dtype))


def kernel_serves(x: Tensor) -> bool:
    """Whether Triton's kernels for rows serve a tensor."""
    return x.is_cuda and kernel_mode() == "compiled"
