"""Dilated attention over ranks as a module."""

import copy
from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.attention.api import check_backend, check_dropout, check_scale
from hilbert_lib.checks import boolean
from hilbert_lib.ordering import OrderingSpec
from hilbert_lib.pattern import DilatedPattern, check_pattern
from hilbert_lib.ring.agreement import check_group
from hilbert_lib.ring.attention import checked_spec, ring_dilated_attention
from hilbert_lib.ring.plan.plan import check_planning

PLANNING = ("transport", "weights", "memory_limit")
OPTIONS = ("scale", "kv_ordering", "backend", "validate")


class RingDilatedAttention(nn.Module):
    """`ring_dilated_attention` as a module, without parameters. Train and eval differ only by dropout.

    Args:
        pattern: which keys a query sees, over the whole sequence.
        group, transport, weights, memory_limit, scale, kv_ordering, backend, validate: as in `ring_dilated_attention`.
        dropout: share of attention probabilities dropped while training, in [0, 1); 0.0 by default.

    Raises:
        TypeError, ValueError: for arguments that `ring_dilated_attention` refuses for all shards and ranks.

    >>> RingDilatedAttention(DilatedPattern((4,), (2,)), transport="ring").transport
    'ring'
    """

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
        super().__init__()
        self.pattern = check_pattern(pattern)
        self.group = check_group(group)
        self.transport, self.weights, self.memory_limit = check_planning(transport, weights, memory_limit).values()
        self.dropout = check_dropout("dropout", dropout)  # a call in eval would not check it
        self.scale = None if scale is None else check_scale(scale)
        self.kv_ordering = checked_spec(kv_ordering)
        self.backend = check_backend(backend)
        self.validate = boolean("validate", validate)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """The output (batch, rows, heads, head_dim) of `ring_dilated_attention`, which raises what is refused.

        Args:
            q: (batch, rows, heads, head_dim). k, v: (batch, rows, kv_heads, head_dim), stored in `kv_ordering`.
            key_padding_mask: (batch, rows) bool, True = no weight.
            is_causal: whether keys after the query are excluded.
        """
        options = {"is_causal": is_causal, "key_padding_mask": key_padding_mask}
        options["dropout_p"] = self.dropout if self.training else 0.0
        options |= {name: getattr(self, name) for name in ("group", *PLANNING, *OPTIONS)}
        return ring_dilated_attention(q, k, v, self.pattern, **options)

    def __deepcopy__(self, memo: dict) -> Self:
        # The copy shares the group, which cannot be copied.
        memo |= {id(self.group): self.group}
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def extra_repr(self) -> str:
        names = ("pattern", *PLANNING, "dropout", *OPTIONS)
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
