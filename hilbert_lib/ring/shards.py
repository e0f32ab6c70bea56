"""A sequence split into contiguous shards, in rank order, and put together again."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.checks import integer
from hilbert_lib.ring.agreement import resolved
from hilbert_lib.ring.plan.balance import shard_lengths_for


def shard(x: Tensor, dim: int = 1, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; differentiable.

    Args:
        x: any tensor, the same on all ranks.
        dim: the axis of positions.
        group: the ranks; by default all.

    Returns:
        A view of `shard_lengths_for(x.shape[dim], ranks)[rank]` positions. Nothing is sent.

    Raises:
        TypeError, ValueError: if x is no tensor or has no positions, dim no axis of it, or group no group of this rank.

    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    >>> shard(torch.arange(8), dim=0)
    tensor([3, 4, 5])
    >>> dist.destroy_process_group()
    """
    dim = _axis(x, dim)
    group = resolved(group)
    lengths = shard_lengths_for(x.shape[dim], group.size())
    return x.split(lengths, dim)[group.rank()]


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
    dim = _axis(x, dim)
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
    return torch.cat([each[:length] for each, length in zip(shards, lengths, strict=True)]).movedim(0, dim)


def _axis(x: object, dim: object) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    return integer("dim", dim, least=-x.dim(), most=x.dim() - 1)
