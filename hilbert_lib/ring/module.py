"""Attention over ranks as modules; and a sequence split into shards in rank order, and put together again."""

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention.api import check_neighbourhood
from hilbert_lib.attention.transforms import Layer, refuse_tracers
from hilbert_lib.attention.validation import check_backend, check_dropout, check_scale
from hilbert_lib.checks import boolean, dense_tensor, integer, unscripted
from hilbert_lib.internals import untraced
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.ring.agreement import check_group, resolved, rows_of_ranks
from hilbert_lib.ring.attention import ring_dilated_attention, ring_neighbourhood_attention
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import Shards
from hilbert_lib.ring.plan.plan import check_planning
from hilbert_lib.ring.points import PointShard
from hilbert_lib.ring.spread import DEFAULTS, GridSpread, cells_of_rank, check_spec


class _RingAttention(Layer):
    """The base of modules over ranks: the group, options of every kind, and calls with the module's own arguments."""

    _options: ClassVar[tuple[str, ...]]  # the attributes that a call is made with
    is_spread = True

    def __init__(
        self, group: ProcessGroup | DeviceMesh | None, scale: float | None, backend: str, kind: type[Pattern],
        validate: bool,
    ):  # fmt: skip
        super().__init__()
        self.group = check_group(group)
        self.scale = None if scale is None else check_scale(scale)
        self.backend = check_backend(backend, kind)
        self.validate = boolean("validate", validate)

    def _call_options(self) -> dict[str, object]:
        """The arguments that a call is made with."""
        return {name: getattr(self, name) for name in ("group", *self._options)}

    def __deepcopy__(self, memo: dict) -> Self:
        # The copy shares the group, which cannot be copied.
        memo |= {id(self.group): self.group}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


class RingDilatedAttention(_RingAttention):
    """`ring_dilated_attention` as a module, without parameters. Train and eval differ only by dropout.

    It takes the place of `attention` in a `MultiheadDilatedAttention`.

    Args:
        pattern: which keys a query sees, over the whole sequence.
        group, transport, weights, memory_limit, scale, kv_ordering, backend, validate: as in `ring_dilated_attention`.
        dropout: share of attention probabilities dropped while training, in [0, 1); 0.0 by default.

    Raises:
        TypeError, ValueError: for arguments that `ring_dilated_attention` refuses for all shards and ranks.

    >>> RingDilatedAttention(DilatedPattern((4,), (2,)), transport="ring").transport
    'ring'
    """

    _options = ("transport", "weights", "memory_limit", "scale", "kv_ordering", "backend", "validate")
    shown = ("pattern", *_options[:3], "dropout", *_options[3:])

    def __init__(
        self,
        pattern: DilatedPattern,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        transport: str = "auto",
        weights: Sequence[float] | None = None,
        memory_limit: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        kv_ordering: OrderingSpec | None = None,
        backend: str = "auto",
        validate: bool = True,
    ):
        super().__init__(group, scale, backend, DilatedPattern, validate)
        self.pattern = check_dilated(pattern)
        self.transport, self.weights, self.memory_limit = check_planning(transport, weights, memory_limit).values()
        self.dropout = check_dropout("dropout", dropout)  # a call in eval would not check it
        self.kv_ordering = check_spec(kv_ordering)

    @untraced  # as the ring itself
    def first_position(self, q: Tensor) -> int:
        """The position of the first row of this rank's shard in the sequence. All ranks must call it."""
        group = resolved(self.group)
        return sum(rows_of_ranks(q.shape[1], group)[: group.rank()])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """The output (batch, rows, heads, head_dim) of `ring_dilated_attention`, which raises what is refused.

        Args:
            q: (batch, rows, heads, head_dim). k, v: (batch, rows, kv_heads, head_dim), stored in `kv_ordering`.
            key_padding_mask: (batch, rows) bool, True = no weight.
            is_causal: whether keys after the query are excluded.
        """
        refuse_tracers(q, k, v)
        dropout_p = self.dropout if self.training else 0.0
        options = {"is_causal": is_causal, "key_padding_mask": key_padding_mask, "dropout_p": dropout_p}
        return ring_dilated_attention(q, k, v, self.pattern, **options, **self._call_options())


class RingNeighbourhoodAttention(_RingAttention):
    """`ring_neighbourhood_attention` as a module, without parameters.

    It is put into a `NeighbourhoodAttention` as its `attention`.

    Args:
        neighbourhood: which cells a query sees, on the whole grid; or a tuple of one for each KV head.
        shards, ordering, group, scale, backend, validate: as in `ring_neighbourhood_attention`.

    Raises:
        TypeError, ValueError: for arguments that `ring_neighbourhood_attention` refuses on all ranks.

    >>> RingNeighbourhoodAttention(Neighbourhood((4, 6), 3), backend="eager").backend
    'eager'
    """

    _options = ("shards", "ordering", "scale", "backend", "validate")
    shown = ("neighbourhood", *_options)

    def __init__(
        self,
        neighbourhood: Neighbourhood | tuple[Neighbourhood, ...],
        *,
        shards: Shards | None = None,
        ordering: Ordering | None = None,
        group: ProcessGroup | DeviceMesh | None = None,
        scale: float | None = None,
        backend: str = "auto",
        validate: bool = True,
    ):
        super().__init__(group, scale, backend, HeadNeighbourhoods, validate)
        if isinstance(neighbourhood, PointShard):
            raise TypeError(
                f"neighbourhood must be a Neighbourhood, got {neighbourhood!r}: each cloud has its own, which "
                "ring_neighbourhood_attention takes"
            )
        self.neighbourhood, self.shards, self.ordering = neighbourhood, shards, ordering
        spreading = DEFAULTS | {"shards": shards, "ordering": ordering}
        GridSpread.checked(check_neighbourhood(neighbourhood, "ring_"), spreading, 1 if shards is None else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the whole grid."""
        return check_neighbourhood(self.neighbourhood).shape

    @untraced  # as the ring itself
    def own_cells(self, q: Tensor) -> Tensor:
        """The cells of this rank, as it stores them: (cells,) int64 on the device of q, counted row by row."""
        group = resolved(self.group)
        spreading = DEFAULTS | {"shards": self.shards, "ordering": self.ordering}
        spread = GridSpread.checked(check_neighbourhood(self.neighbourhood, "ring_"), spreading, group.size())
        return cells_of_rank(spread.shards, self.shape, group.rank(), q.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """The output (batch, rows, heads, head_dim) of `ring_neighbourhood_attention`, which raises what is refused.

        Args:
            q: (batch, rows, heads, head_dim). k, v: (batch, rows, kv_heads, head_dim).
            options: key_padding_mask, extra_q, extra_k, extra_v, extra_padding_mask, bias and return_lse, as there.
        """
        refuse_tracers(q, k, v)
        return ring_neighbourhood_attention(q, k, v, self.neighbourhood, **self._call_options(), **options)


@unscripted
def shard(x: Tensor, dim: int = 1, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """The part of this rank of a tensor that every rank holds whole; differentiable.

    Args:
        x: any tensor, the same on all ranks.
        dim: the axis of positions.
        group: the ranks; by default all.

    Returns:
        A view of `shard_lengths_for(x.shape[dim], ranks)[rank]` positions. Nothing is sent.

    Raises:
        TypeError, ValueError: if x is no tensor or has no positions, dim no axis of it, or group no group of this rank.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard(torch.arange(3), dim=0)
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    dim = _axis("shard", x, dim)
    group = resolved(group)
    lengths = shard_lengths_for(x.shape[dim], group.size())
    return x.split(lengths, dim)[group.rank()]


@unscripted
def gather(x: Tensor, dim: int = 1, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """The whole tensor, on every rank, from the shards that the ranks hold.

    Args:
        x: this rank's shard, of any length along dim, also 0; other axes and dtype are the same on all ranks.
        dim: the axis of positions.
        group: the ranks; by default all.

    Returns:
        The shards one after the other, in rank order; detached, since each rank has its own loss.

    Raises:
        TypeError, ValueError: if x is no tensor, dim no axis of it, or group no group of this rank.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> gather(torch.arange(3), dim=0)
    tensor([0, 1, 2])
    >>> dist.destroy_process_group()
    """
    dim = _axis("gather", x, dim)
    if x.is_meta:
        raise TypeError("x must be a tensor with values, got one on the meta device")
    group = resolved(group)
    rows = x.detach().movedim(dim, 0).contiguous()
    lengths = [torch.empty(1, dtype=torch.int64, device=x.device) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=x.device), group=group)
    lengths = [int(length) for length in lengths]
    # Padded to one length: no collective gathers tensors of different sizes on every backend.
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    shards = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(shards, padded, group=group)
    return torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)]).movedim(0, dim)


def _axis(function: str, x: object, dim: object) -> int:
    refuse_tracers(x, name=function)
    dense_tensor("x", x)
    return integer("dim", dim, least=-x.dim(), most=x.dim() - 1)
