"""The oracle of neighbourhood attention: dense masks, one softmax. Slow, obvious, any dtype."""

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.call import working_dtype
from hilbert_lib.attention.grids.request import Request, Tensors, as_returned, cells_of, padding_of


def forward(given: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    q = given.q
    out = torch.zeros(q.shape, dtype=working_dtype(q.dtype), device=q.device)
    lse = out.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    for g, heads in enumerate(_groups(given)):
        qh, kh, vh, mask = _head(given, request, heads, g)
        scores = (torch.einsum("bqhd,bkd->bhqk", qh, kh) * request.scale).masked_fill(~mask, -torch.inf)
        lse[:, heads] = scores.logsumexp(-1)
        there = mask & lse[:, heads, :, None].ne(-torch.inf)
        weights = torch.where(there, scores.softmax(-1), 0.0)
        out[:, :, heads] = _weighted_sum(weights, vh, mask)
    return out.to(q.dtype), lse


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request) -> Tensors:
    """Gradients of q, k, v and of the extra keys: dS = P * (dP - delta), delta = rowsum(dout * out)."""
    dtype = working_dtype(dout.dtype)
    grads = Tensors(*(torch.zeros(x.shape, dtype=dtype, device=x.device) for x in given))
    keys = given.k.shape[1]
    for g, heads in enumerate(_groups(given)):
        qh, kh, vh, mask = _head(given, request, heads, g)
        dh = dout[:, :, heads].to(dtype)
        delta = (dh * out[:, :, heads].to(dtype)).sum(-1).transpose(1, 2)
        scores = torch.einsum("bqhd,bkd->bhqk", qh, kh) * request.scale
        own = lse[:, heads, :, None]
        weights = torch.where(mask & own.ne(-torch.inf), (scores - own).exp(), 0.0)
        dv = torch.einsum("bhqk,bqhd->bkd", weights, dh)
        dscores = weights * (torch.einsum("bqhd,bkd->bhqk", dh, vh) - delta[..., None])
        dk = torch.einsum("bhqk,bqhd->bkd", dscores, qh) * request.scale
        grads.q[:, :, heads] = torch.einsum("bhqk,bkd->bqhd", dscores, kh) * request.scale
        for whole, extra, both in ((grads.k, grads.extra_k, dk), (grads.v, grads.extra_v, dv)):
            whole[:, :, g], extra[:, :, g] = both[:, :keys], both[:, keys:]
    return as_returned(grads, given, request)


def _groups(given: Tensors) -> list[slice]:
    # The query heads of each KV head.
    group = given.q.shape[2] // given.k.shape[2]
    return [slice(g * group, (g + 1) * group) for g in range(given.k.shape[2])]


def _head(given: Tensors, request: Request, heads: slice, g: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # q of the heads, all keys and values of their KV head, and who sees whom (batch, 1, seq, keys + extra).
    dtype = working_dtype(given.q.dtype)
    k, v = torch.cat([given.k, given.extra_k], 1)[:, :, g], torch.cat([given.v, given.extra_v], 1)[:, :, g]
    queries, keys = cells_of(given, request)
    batch, extra = given.extra_k.shape[:2]
    mask = request.neighbourhoods[g].attends(queries[:, None].clamp(min=0), keys)
    mask = torch.nn.functional.pad(mask, (0, extra), value=True) & (queries >= 0)[:, None]
    mask = mask.expand(batch, 1, -1, -1)
    return given.q[:, :, heads].to(dtype), k.to(dtype), v.to(dtype), mask & ~padding_of(given, request)[:, None, None]


def _weighted_sum(weights: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    # weights @ v. A NaN or inf in a row of v reaches only the queries that attend to it, though 0 * NaN is NaN.
    finite = v.isfinite().all(-1)
    out = torch.einsum("bhqk,bkd->bqhd", weights, v.masked_fill(~finite[..., None], 0.0))
    for b, key in (~finite).nonzero().tolist():
        reached = weights[b, :, :, key].T[..., None] * v[b, key]
        out[b] += torch.where(mask[b, 0, :, key, None, None], reached, 0.0)
    return out


BACKEND = Backend(
    name="reference",
    note="dense masks: memory grows with length squared",
    colour="#AA4499",
    functions=lambda device: (forward, backward),
    reads_orderings=True,
    options=("part",),
)
