"""One call, validated: the tensors with gradients, and a `Request` of all else."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern

# The dtype in which softmax, merges and sums are done.
WORKING_DTYPE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float32)
WORKING_DTYPE[torch.float64] = torch.float64


class Tensors(NamedTuple):
    """The tensors with gradients."""

    q: Tensor  # (batch, queries, heads, head_dim)
    k: Tensor  # (batch, keys, kv_heads, head_dim)
    v: Tensor
    extra_k: Tensor | None = None  # (batch, extra, kv_heads, head_dim), keys that every query sees; extra may be 0
    extra_v: Tensor | None = None
    # (heads, entries along each axis), added to scaled scores: q's dtype or the working one
    bias: Tensor | None = None

    @property
    def extra(self) -> tuple[Tensor | None, Tensor | None]:
        """The extra keys and their values."""
        return self.extra_k, self.extra_v

    @property
    def with_rows(self) -> tuple[Tensor | None, ...]:
        """The tensors with a row for each query or key: all but the bias."""
        return self[:5]


@dataclass(frozen=True)
class Ends:
    """A range of cells as torch.compile and torch.export take it: they make constants of the ends of a `range`."""

    start: int
    stop: int


class GridPart(NamedTuple):
    """Some queries of a grid and what they see: boxes of cells, a range for each axis, stored row by row.

    On an axis that wraps, index `cells + i` means cell i. With `Request.slots` a box ends with the grid, and says no
    more than where cells may be. Under torch.compile ranges are `Ends`.
    """

    rows: tuple[range, ...]  # the cells of q, out and lse
    queries: tuple[range, ...]  # those of them that are computed
    keys: tuple[range, ...]  # the cells of k and v: all that these see, each once
    in_float: bool = False  # whether gradients of k and v are returned as they are summed, in float32 or float64


# All of some points, which lie on no grid: their lists say which are computed.
POINTS, POINTS_IN_FLOAT = GridPart((), (), ()), GridPart((), (), (), in_float=True)


@dataclass(frozen=True, eq=False)
class Request:
    """One validated call of attention, but for the tensors with gradients."""

    pattern: Pattern  # which keys a query sees, of so many KV heads as k has
    is_causal: bool = False  # whether keys after the query are excluded
    scale: float = 1.0  # factor of the scores
    dropout_p: float = 0.0  # share of attention probabilities that are dropped, in [0, 1)
    seed: Tensor | None = None  # (1,) int64 on the device of q where dropout_p > 0: the key of the dropout bits
    key_padding_mask: Tensor | None = None  # (batch, keys) bool, True = no weight; on a grid by slots
    query_start: int | None = None  # row of k at which q begins; None where both have the same rows
    inverse: Tensor | None = None  # (keys,) int32, the slot in which k and v hold each position; None in sequence order
    # Whether the merged out and lse that the backward is given hold more than this call. Only "flex" has to know: it
    # differentiates its own results.
    is_part: bool = False
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32, where each document of a batch of 1 begins, and the end
    max_seqlen: int | None = None  # no document is longer
    # On grids alone.
    ordering: Ordering | None = None  # in which tokens are stored; None row by row
    extra_padding_mask: Tensor | None = None  # (batch, extra) bool, True = no weight
    part: GridPart | None = None  # of the grid
    slots: Tensor | None = None  # (cells of the grid,) int32, each one's row in k, -1 for none: q has the first ones
    # Of sequences that begin at rows which only the device knows: see `starts.py`.
    query_starts: Tensor | None = None  # (batch,) int32 or int64: query_start of each
    key_start: Tensor | None = None  # (batch,) likewise: the row of k at which each begins
    # Of points: the four arrays of `PackedLists`, then those of the lists turned round where these are others. On grids
    # "lists" makes them for its kernels.
    lists: tuple[Tensor, ...] = ()
    # What a choice hangs on besides, on grids.
    has_bias: bool = False  # whether there is a bias
    bias_gradient: bool = False  # whether there is one, and a gradient of anything may follow

    @property
    def first_query(self) -> int:
        """Position of q's first row."""
        return self.query_start or 0

    @cached_property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors that the kernels of sequences read."""
        return self.seed, self.key_padding_mask, self.inverse, self.cu_seqlens

    @cached_property
    def options(self) -> tuple:
        """All but tensors."""
        return _options(self)

    @property
    def neighbourhoods(self) -> tuple[Neighbourhood, ...]:
        """The neighbourhood of each KV head, on a grid."""
        return self.pattern.by_head

    @cached_property
    def heads_by_window(self) -> dict[Neighbourhood, list[int]]:
        """The KV heads of each neighbourhood that occurs, on a grid."""
        heads: dict[Neighbourhood, list[int]] = {}
        for head, near in enumerate(self.neighbourhoods):
            heads.setdefault(near, []).append(head)
        return heads


# The tensors of a request, each of them or None, for autograd; a function of C, since every call asks twice.
TENSORS = tuple(field.name for field in fields(Request) if field.type == Tensor | None)
tensors_of = attrgetter(*TENSORS)
BIAS = ("has_bias", "bias_gradient")  # the fields that say of a bias
ARGUMENTS = {"query_starts": "query_start"}  # those that users give by another name


def with_tensors(request: Request, tensors: tuple[Tensor | None, ...]) -> Request:
    """The request with other tensors in the places of those that `tensors_of` gives."""
    if not any(x is not None for x in tensors):
        return request
    return replace(request, **dict(zip(TENSORS, tensors, strict=True)))


def without_tensors(request: Request) -> Request:
    """The request with None in their places."""
    return replace(request, **dict.fromkeys(TENSORS))


_OF_TENSORS = (Tensor | None, tuple[Tensor, ...])
_options = attrgetter(*(field.name for field in fields(Request) if field.type not in _OF_TENSORS))


@dataclass(frozen=True, eq=False)
class StridedRows:
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
