"""What one call asks for, validated: everything but the tensors q, k and v; and a part of its result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.pattern import DilatedPattern


@dataclass(frozen=True, eq=False)
class Call:
    """One validated request for dilated attention.

    Attributes:
        pattern: which keys a query sees.
        is_causal: whether keys after the query are excluded.
        scale: factor of the scores.
        dropout_p: share of attention probabilities that are dropped, in [0, 1).
        seed: (1,) int64 on the device of q where dropout_p > 0; the key of the dropout bits.
        key_padding_mask: (batch, keys) bool, True = no weight, or None.
        query_start: position of q's first row, or None where q, k and v cover the same positions.
        inverse: (keys,) int32, the slot in which k and v hold each position, or None for sequence order.
        is_part: whether the merged out and lse that the backward is given hold more than this call. Only "flex" has to
            know: it differentiates its own results.
    """

    pattern: DilatedPattern
    is_causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | None = None
    key_padding_mask: Tensor | None = None
    query_start: int | None = None
    inverse: Tensor | None = None
    is_part: bool = False

    @property
    def first_query(self) -> int:
        """Position of q's first row."""
        return self.query_start or 0


@dataclass(frozen=True, eq=False)
class Part:
    """A partial result as a dense kernel left it, and which rows of the whole it holds.

    Row i of segment s of its head h is row `start + h * shift + s * segment_length + i * rate` of the whole.

    Attributes:
        tensors: results, (batch, segments, rows, heads, head_dim) or, of scalars, (batch, segments, rows, heads).
        batch, heads: the sequences and heads of the whole that it holds.
        start: row of the whole that the first row of its first head is.
        segment_length, rate, shift: rows between two segments, between two rows of one, and between two heads.
    """

    tensors: tuple[Tensor, ...]
    batch: slice
    heads: slice
    start: int
    segment_length: int
    rate: int
    shift: int


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, merges and sums are done: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
