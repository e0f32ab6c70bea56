"""What one call asks for, validated: everything but the tensors q, k and v; and a part of its result."""

from dataclasses import dataclass, fields
from operator import attrgetter

import torch
from torch import Tensor

from hilbert_lib.pattern import DilatedPattern


@dataclass(frozen=True, eq=False)
class Call:
    """One validated request for dilated attention."""

    pattern: DilatedPattern  # which keys a query sees
    is_causal: bool = False  # whether keys after the query are excluded
    scale: float = 1.0  # factor of the scores
    dropout_p: float = 0.0  # share of attention probabilities that are dropped, in [0, 1)
    seed: Tensor | None = None  # (1,) int64 on the device of q where dropout_p > 0: the key of the dropout bits
    key_padding_mask: Tensor | None = None  # (batch, keys) bool, True = no weight
    query_start: int | None = None  # position of q's first row; None where q, k and v cover the same positions
    inverse: Tensor | None = None  # (keys,) int32, the slot in which k and v hold each position; None in sequence order
    # Whether the merged out and lse that the backward is given hold more than this call. Only "flex" has to know: it
    # differentiates its own results.
    is_part: bool = False
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32, where each document of a batch of 1 begins, and the end
    max_seqlen: int | None = None  # no document is longer

    @property
    def first_query(self) -> int:
        """Position of q's first row."""
        return self.query_start or 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that kernels read."""
        return self.seed, self.key_padding_mask, self.inverse, self.cu_seqlens

    @property
    def options(self) -> tuple:
        """All but tensors."""
        return _options(self)


_options = attrgetter(*(each.name for each in fields(Call) if each.type != Tensor | None))


@dataclass(frozen=True, eq=False)
class Part:
    """A partial result as a dense kernel left it, and which rows of the whole it holds.

    Row i of segment s of its head h is row `start + h * shift + s * segment_length + i * rate` of the whole.
    """

    # (batch, segments, rows, heads, head_dim) or, of scalars, (batch, segments, rows, heads)
    tensors: tuple[Tensor, ...]
    batch: slice  # of the whole, as are heads
    heads: slice
    start: int  # row of the whole that the first row of its first head is
    segment_length: int  # rows between two segments
    rate: int  # between two rows of one
    shift: int  # between two heads


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, merges and sums are done: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
