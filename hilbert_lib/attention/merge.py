"""The one associative merge of partial attention results: of branches, of ranks, of ring steps."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """A partial result as a dense kernel left it, and which rows of the whole it holds.

    Row i of segment s is row `start + s * segment_length + i * rate` of the whole.

    Attributes:
        tensors: results, (batch, segments, rows, heads, head_dim) or, of scalars, (batch, segments, rows, heads).
        batch, heads: the sequences and heads of the whole that it holds.
        start: row of the whole that its first row is.
        segment_length, rate: rows between two segments, and between two rows of one.
    """

    tensors: tuple[Tensor, ...]
    batch: slice
    heads: slice
    start: int
    segment_length: int
    rate: int


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
