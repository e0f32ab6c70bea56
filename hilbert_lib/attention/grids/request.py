"""What one call of neighbourhood attention asks for, validated: everything but the tensors with gradients."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.grid import Neighbourhood
from hilbert_lib.ordering import Ordering


@dataclass(frozen=True, eq=False)
class Request:
    """One validated call of neighbourhood attention."""

    neighbourhoods: tuple[Neighbourhood, ...]  # one for each KV head
    scale: float = 1.0
    ordering: Ordering | None = None  # in which tokens are stored; None row by row
    key_padding_mask: Tensor | None = None  # (batch, seq) bool, True = no weight, by slots
    extra_padding_mask: Tensor | None = None  # (batch, extra) bool

    @cached_property
    def heads_by_window(self) -> dict[Neighbourhood, list[int]]:
        """The KV heads of each neighbourhood that occurs."""
        heads: dict[Neighbourhood, list[int]] = {}
        for head, near in enumerate(self.neighbourhoods):
            heads.setdefault(near, []).append(head)
        return heads


class Tensors(NamedTuple):
    """What has gradients: q (batch, seq, heads, head_dim), k, v with kv_heads, and the keys that every query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra_k: Tensor  # (batch, extra, kv_heads, head_dim), extra may be 0
    extra_v: Tensor


def cells_of(request: Request, device: torch.device) -> Tensor:
    """The cell in each slot."""
    if request.ordering is None:
        return torch.arange(request.neighbourhoods[0].length, device=device)
    return request.ordering.to(device).perm


def slots_of(request: Request, cells: Tensor) -> Tensor:
    """The slot of each cell."""
    return cells if request.ordering is None else request.ordering.to(cells.device).inverse[cells]


def padding_of(given: Tensors, request: Request) -> Tensor:
    """Which keys have no weight: (batch, seq + extra) bool."""
    masks = (request.key_padding_mask, given.k), (request.extra_padding_mask, given.extra_k)
    return torch.cat([x.new_zeros(x.shape[:2], dtype=torch.bool) if one is None else one for one, x in masks], 1)
