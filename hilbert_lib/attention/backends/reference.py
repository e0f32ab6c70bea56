"""The oracle: dense masks, one softmax over the multiset of keys. Slow, obvious, any dtype; the specification."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.dropout import keep_mask


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention.

    q: (batch, queries, heads, head_dim). k, v: (batch, keys, kv_heads, head_dim). out: like q, lse: (batch, heads,
    queries).
    """
    dtype = working_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = out.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    for heads, g, mask, kept in _head_groups(q, k, call):
        qh, kh, vh = q[:, :, heads].to(dtype), k[:, :, g].to(dtype), v[:, :, g].to(dtype)
        scores = torch.einsum("bqhd,bkd->bhqk", qh, kh) * call.scale
        # The multiset union: the keys once for each branch, one after the other.
        scores = torch.cat([scores.masked_fill(~m, -torch.inf) for m in mask], dim=-1)
        lse[:, heads] = scores.logsumexp(-1)
        # A row without keys is NaN here and 0 after the mask; so is one whose scores are all -inf, which weigh nothing.
        there = torch.cat(mask, -1) & lse[:, heads, :, None].ne(-torch.inf)
        weights = torch.where(there, scores.softmax(-1), 0.0) * torch.cat(kept, -1)
        out[:, :, heads] = _weighted_sum(weights, vh, mask)
    return out.to(q.dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dS = P * (dP - delta), delta = rowsum(dout * out), summed over the branches."""
    dtype = working_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for heads, g, mask, kept in _head_groups(q, k, call):
        qh, kh, vh = q[:, :, heads].to(dtype), k[:, :, g].to(dtype), v[:, :, g].to(dtype)
        dh = dout[:, :, heads].to(dtype)
        delta = (dh * out[:, :, heads].to(dtype)).sum(-1).transpose(1, 2)  # (batch, heads, queries)
        scores = torch.einsum("bqhd,bkd->bhqk", qh, kh) * call.scale
        dscores = 0.0
        for branch_mask, branch_kept in zip(mask, kept, strict=True):
            probabilities = _probabilities(scores, lse[:, heads], branch_mask)
            dv[:, :, g] += torch.einsum("bhqk,bqhd->bkd", probabilities * branch_kept, dh)
            dprobabilities = torch.einsum("bqhd,bkd->bhqk", dh, vh) * branch_kept
            dscores = dscores + probabilities * (dprobabilities - delta[..., None])
        dq[:, :, heads] = torch.einsum("bhqk,bkd->bqhd", dscores, kh) * call.scale
        dk[:, :, g] = torch.einsum("bhqk,bqhd->bkd", dscores, qh) * call.scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _head_groups(q: Tensor, k: Tensor, call: Call) -> Iterator[tuple[slice, int, list[Tensor], list[Tensor]]]:
    # For each KV head: its query heads, the head, and for each branch a mask (batch, 1, queries, keys) and a dropout
    # factor (batch, group, queries, keys).
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    query = torch.arange(call.first_query, call.first_query + queries, device=q.device)
    key = torch.arange(keys, device=q.device)
    sequence = torch.arange(batch, device=q.device)[:, None, None, None]
    pairs = {"batch": sequence, "queries": query[:, None], "keys": key}
    for g in range(kv_heads):
        head = torch.arange(g * group, (g + 1) * group, device=q.device)[:, None, None]
        masks, kept = [], []
        for i in call.pattern.head_branches(g, kv_heads):
            mask = call.pattern.mask(i, query, key, kv_head=g, kv_heads=kv_heads, is_causal=call.is_causal)
            mask = mask.expand(batch, 1, queries, keys)
            if call.key_padding_mask is not None:
                mask = mask & ~call.key_padding_mask[:, None, None, :]
            masks.append(mask)
            factor = torch.ones((), dtype=working_dtype(q.dtype), device=q.device)
            if call.dropout_p > 0.0:
                is_kept = keep_mask(call.seed, call.dropout_p, head=head, branch=i, **pairs)
                factor = is_kept.to(factor.dtype) / (1.0 - call.dropout_p)
            kept.append(factor.expand(batch, group, queries, keys))
        yield slice(g * group, (g + 1) * group), g, masks, kept


def _probabilities(scores: Tensor, lse: Tensor, mask: Tensor) -> Tensor:
    # Zero where nothing attends, also in rows whose lse is -inf and next to scores that are NaN.
    return torch.where(mask & lse[..., None].ne(-torch.inf), (scores - lse[..., None]).exp(), 0.0)


def _weighted_sum(weights: Tensor, v: Tensor, mask: list[Tensor]) -> Tensor:
    # weights @ v. A NaN or inf in a row of v reaches only the queries that attend to it, though 0 * NaN is NaN.
    keys = v.shape[1]
    per_key = weights.unflatten(-1, (len(mask), keys)).sum(-2)
    finite = v.isfinite().all(-1)  # (batch, keys)
    out = torch.einsum("bhqk,bkd->bqhd", per_key, v.masked_fill(~finite[..., None], 0.0))
    attends = torch.stack(mask).any(0)
    for b, key in (~finite).nonzero().tolist():
        reached = per_key[b, :, :, key].T[..., None] * v[b, key]  # (queries, heads, head_dim)
        out[b] += torch.where(attends[b, 0, :, key, None, None], reached, 0.0)
    return out


BACKENDS = (
    Backend(
        name="reference",
        note="dense masks: memory grows with length squared",
        colour="#AA4499",
        functions=lambda device: (forward, backward),
    ),
)
