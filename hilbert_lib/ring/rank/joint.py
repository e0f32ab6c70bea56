"""Extra queries over the cells of all ranks: each rank's results over its own cells, gathered and merged by lse."""

from dataclasses import replace
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hilbert_lib.attention.merge import merge_attention
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.ring.rank.exchange import alive


def without_extra_keys(tensors: Tensors, request: Request) -> tuple[Tensors, Request]:
    """The call of a rank that leaves the extra keys to another: they count once."""
    extra_k, extra_v = (None if x is None else x[:, :0] for x in tensors.extra)
    return tensors._replace(extra_k=extra_k, extra_v=extra_v), replace(request, extra_padding_mask=None)


def merged_over_ranks(out: Tensor, lse: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Output (batch, extra, heads, head_dim) and lse (batch, heads, extra) over the cells of all ranks.

    out, lse: those over this rank's cells. All ranks call it, and if one runs its backward all do.
    """
    if not out.numel():
        return out, lse
    together = torch.cat([out.to(lse.dtype), lse.transpose(1, 2)[..., None]], -1)  # one message
    parts = _Gathered.apply(together, group)
    outs, lses = parts[..., :-1].unbind(), parts[..., -1].transpose(2, 3).unbind()
    merged, merged_lse = merge_attention(outs, lses)
    return merged.to(out.dtype), merged_lse


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, (ranks, ...). A rank's gradient is the sum over all ranks' losses."""

    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.known_group = ref(group)
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx, grads: Tensor) -> tuple[Tensor, None]:
        group, sums = alive(ctx.known_group), grads.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(sums, group=group)
        return sums[group.rank()], None
