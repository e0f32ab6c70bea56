"""Other people's ways to dilated attention, restated: what the fused kernels are measured against.

Each computes the function of `dilated_attention`, exactly. "torchscale" goes through the steps of that package in eager
mode: a copy of each branch's rows, dense attention, a full-length copy back, softmax over the stacked lse. Where the
package computes something else, the restatement keeps the steps and corrects that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends import flex
from hilbert_lib.attention.backends.dense import CpuFlash, Flash, Problem
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.patterns.dilated import DilatedPattern, rows_in_segment


class Baseline(NamedTuple):
    """Dilated attention without this library's kernels: why it cannot serve q and a call ("" if it can), and its
    output.
    """

    refusal: Callable[[Tensor, Request], str]
    run: Callable[[Tensor, Tensor, Tensor, Request], Tensor]


class _Torchscale(torch.autograd.Function):
    # The package holds the branches' weights constant in its backward, which is not the gradient of its output. Here
    # each branch's backward gets the merged out and lse.

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, call: Request) -> Tensor:
        kernel = Flash if q.is_cuda else CpuFlash
        outs, lses = [], []
        for branch in range(len(call.pattern.branches)):
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
            lse = torch.full(q.shape[:3], -torch.inf, dtype=WORKING_DTYPE[q.dtype], device=q.device)
            for rows in _gathers(call.pattern, branch, q.shape[1], q.shape[2], k.shape[2], q.device):
                qkv = *rows.gathered(rows.queries, q), *rows.gathered(rows.keys, k, v)
                part, part_lse = kernel.forward(*qkv, Problem(call.scale, call.is_causal))
                out.flatten(1, 2).index_copy_(1, rows.queries, rows.flat(part))
                lse.flatten(1, 2).index_copy_(1, rows.queries, rows.flat(part_lse))
            outs.append(out)
            lses.append(lse)
        stacked = torch.stack(lses)
        lse, weights = stacked.logsumexp(0), stacked.softmax(0).nan_to_num()  # 0 where no branch has a row
        out = sum(part * weight.to(part.dtype)[..., None] for part, weight in zip(outs, weights, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.kernel = call, kernel
        return out

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        call = ctx.call
        totals = [torch.zeros(x.shape, dtype=WORKING_DTYPE[x.dtype], device=x.device) for x in (q, k, v)]
        for branch in range(len(call.pattern.branches)):
            for rows in _gathers(call.pattern, branch, q.shape[1], q.shape[2], k.shape[2], q.device):
                dos, qs, outs, lses = rows.gathered(rows.queries, dout, q, out, lse)
                kvs = rows.gathered(rows.keys, k, v)
                parts = ctx.kernel.backward(dos, qs, *kvs, outs, lses, Problem(call.scale, call.is_causal))
                indices = rows.queries, rows.keys, rows.keys
                for total, index, part in zip(totals, indices, parts, strict=True):
                    total.flatten(1, 2).index_add_(1, index, rows.flat(part).to(total.dtype))
        return *(total.to(q.dtype) for total in totals), None


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of some segments and heads of a branch, as indices into (seq * heads) and (seq * kv_heads) rows."""

    shape: tuple[int, int, int]  # segments, rows, heads
    queries: Tensor
    keys: Tensor

    def gathered(self, index: Tensor, *tensors: Tensor) -> list[Tensor]:
        """(batch, seq, heads, ...) -> a copy of the rows of an index, (batch * segments, heads, rows, ...)."""
        rows = [x.flatten(1, 2).index_select(1, index).unflatten(1, self.shape) for x in tensors]
        return [x.flatten(0, 1).transpose(1, 2) for x in rows]

    def flat(self, part: Tensor) -> Tensor:
        """(batch * segments, heads, rows, ...) -> (batch, rows of the indices, ...)."""
        return part.transpose(1, 2).unflatten(0, (-1, self.shape[0])).flatten(1, 3)


@lru_cache(maxsize=64)
def _gathers(
    pattern: DilatedPattern, branch: int, length: int, heads: int, kv_heads: int, device: torch.device
) -> list[_Rows]:
    # One for all heads of the whole segments, and of the tail; more where r does not divide their length, so that
    # heads have a row more or less.
    w, r = pattern.branches[branch]
    gathers = []
    whole_segments, tail = divmod(length, w)
    for start, segments, size in ((0, whole_segments, w), (whole_segments * w, 1, tail))[not whole_segments :]:
        by_rows: dict[int, list[tuple[int, int, int]]] = {}
        for g in pattern.branch_heads(branch, kv_heads):
            offset = pattern.offset(branch, g, kv_heads)
            members = [(h, g, offset) for h in range(g * heads // kv_heads, (g + 1) * heads // kv_heads)]
            by_rows.setdefault(rows_in_segment(size, r, offset), []).extend(members)
        by_rows.pop(0, None)
        for rows, members in by_rows.items():
            head, kv_head, offset = torch.tensor(members, device=device).T
            position = start + torch.arange(segments, device=device)[:, None, None] * w + offset
            position = position + torch.arange(rows, device=device)[:, None] * r
            indices = (position * heads + head).flatten(), (position * kv_heads + kv_head).flatten()
            gathers.append(_Rows((segments, rows, len(members)), *indices))
    return gathers


def _eager_refusal(q: Tensor, call: Request) -> str:
    if call.inverse is not None:
        return "no kv_ordering: it takes k and v in sequence order"
    if call.cu_seqlens is not None:
        return "no cu_seqlens: its steps are those of one sequence"
    return BACKENDS["flash" if q.is_cuda else "sdpa"].refusal(q, call)


def _flex_refusal(q: Tensor, call: Request) -> str:
    if not q.is_cuda and q.requires_grad and torch.is_grad_enabled():
        return f"FlexAttention has no backward on {q.device.type}"
    return _eager_refusal(q, call) or (BACKENDS["flex"].refusal(q, call) if q.is_cuda else "")


BASELINES = {
    # Under autograd: unlike the backend, its backward runs no second forward.
    "flex": Baseline(_flex_refusal, lambda q, k, v, call: flex.attend(Tensors(q, k, v), call)[0]),
    "torchscale": Baseline(_eager_refusal, _Torchscale.apply),
}
