"""The oracle: dense masks, one softmax over the multiset of keys, for every pattern. Slow, obvious, any dtype."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend
from hilbert_lib.attention.dropout import Branch, keep_mask
from hilbert_lib.attention.grid_parts import as_returned, cells_of, padding_of
from hilbert_lib.attention.request import BIAS, WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts, lengths_of, positions_of
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import with_lists

SCORES_AT_ONCE = 2**22  # of "eager", which takes some rows of q at a time; of all query heads of a KV head


class _Head(NamedTuple):
    """A KV head with its query heads, in the working dtype; keys are those of k, then the extra ones."""

    kv_head: int
    heads: slice  # its query heads
    q: Tensor  # (batch, queries, group, head_dim)
    k: Tensor  # (batch, keys, head_dim)
    v: Tensor  # (batch, keys, head_dim)
    masks: list[Tensor]  # of each part, which keys a query sees: (batch, 1, queries, keys) bool
    dropout_factors: list[Tensor]  # of each part: (batch, group, queries, keys)
    bias_entries: Tensor | None  # of the grid's keys: (batch or 1, queries, keys of k), of a flat table
    bias: Tensor | None  # (group, entries)

    def scores(self, scale: float) -> Tensor:
        """Scaled scores with their bias, of keys that are seen or not: (batch, group, queries, keys)."""
        scores = torch.einsum("bqhd,bkd->bhqk", self.q, self.k) * scale
        if self.bias is None:
            return scores
        extra = scores.shape[-1] - self.bias_entries.shape[-1]
        return scores + torch.nn.functional.pad(self.bias[:, self.bias_entries].transpose(0, 1), (0, extra))


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, queries)."""
    return _forward(inputs, request, [slice(0, inputs.q.shape[1])], _weighted_sum)


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients: dS = P * (dP - delta), delta = rowsum(dout * out) - dlse, summed over the parts."""
    return _backward(dout, inputs, out, lse, dlse, request, [slice(0, inputs.q.shape[1])])


def forward_by_rows(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """`forward`, some rows of q at a time. The host does not wait where sequences begin at rows of the device."""
    weighted_sum = _weighted_sum_of_seen if has_starts(request) else _weighted_sum
    return _forward(inputs, request, _row_chunks(inputs), weighted_sum)


def backward_by_rows(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """`backward`, some rows of q at a time."""
    return _backward(dout, inputs, out, lse, dlse, request, _row_chunks(inputs))


def _row_chunks(inputs: Tensors) -> list[slice]:
    batch, queries, heads, _ = inputs.q.shape
    keys = inputs.k.shape[1] + (0 if inputs.extra_k is None else inputs.extra_k.shape[1])
    count = max(1, SCORES_AT_ONCE // max(1, batch * heads // inputs.k.shape[2] * keys))
    return [slice(first, min(first + count, queries)) for first in range(0, queries, count)]


def _forward(inputs: Tensors, request: Request, chunks: list[slice], weighted_sum: Callable) -> tuple[Tensor, Tensor]:
    q = inputs.q
    out = torch.zeros(q.shape, dtype=WORKING_DTYPE[q.dtype], device=q.device)
    lse = out.new_zeros(q.shape[0], q.shape[2], q.shape[1])
    for rows in chunks:
        for head in _heads(inputs, request, rows):
            scores = head.scores(request.scale)
            # The multiset union: the keys once for each part, one after the other.
            scores = torch.cat([scores.masked_fill(~mask, -torch.inf) for mask in head.masks], dim=-1)
            own_lse = scores.logsumexp(-1)
            # A row without keys is NaN here and 0 after the mask; so is one whose scores are all -inf.
            attends = torch.cat(head.masks, -1) & own_lse[..., None].ne(-torch.inf)
            weights = torch.where(attends, scores.softmax(-1), 0.0) * torch.cat(head.dropout_factors, -1)
            out[:, rows, head.heads] = weighted_sum(weights, head.v, head.masks)
            lse[:, head.heads, rows] = own_lse
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, request: Request, chunks: list[slice]
) -> Tensors:
    dtype = WORKING_DTYPE[dout.dtype]
    grads = Tensors(*(None if x is None else torch.zeros(x.shape, dtype=dtype, device=x.device) for x in inputs))
    keys = inputs.k.shape[1]
    for rows in chunks:
        for head in _heads(inputs, request, rows):
            own_dout = dout[:, rows, head.heads].to(dtype)
            delta = (own_dout * out[:, rows, head.heads].to(dtype)).sum(-1).transpose(1, 2)  # (batch, group, queries)
            own_lse = lse[:, head.heads, rows]
            if dlse is not None:
                delta = delta - dlse[:, head.heads, rows]
            scores = head.scores(request.scale)
            dscores, dv = 0.0, 0.0
            for mask, factor in zip(head.masks, head.dropout_factors, strict=True):
                probabilities = _probabilities(scores, own_lse, mask)
                dv = dv + torch.einsum("bhqk,bqhd->bkd", probabilities * factor, own_dout)
                dprobabilities = torch.einsum("bqhd,bkd->bhqk", own_dout, head.v) * factor
                dscores = dscores + probabilities * (dprobabilities - delta[..., None])
            if head.bias is not None:
                grads.bias[head.heads] += _summed_by_entry(dscores, head).reshape(grads.bias[head.heads].shape)
            grads.q[:, rows, head.heads] = torch.einsum("bhqk,bkd->bqhd", dscores, head.k) * request.scale
            dk = torch.einsum("bhqk,bqhd->bkd", dscores, head.q) * request.scale
            for key_grad, extra_grad, both in ((grads.k, grads.extra_k, dk), (grads.v, grads.extra_v, dv)):
                key_grad[:, :, head.kv_head] += both[:, :keys]
                if extra_grad is not None:
                    extra_grad[:, :, head.kv_head] += both[:, keys:]
    return as_returned(grads, inputs, request)


def _heads(inputs: Tensors, request: Request, rows: slice) -> Iterator[_Head]:
    # Every KV head, with some rows of q.
    dtype = WORKING_DTYPE[inputs.q.dtype]
    pattern = with_lists(request.pattern, request.lists, inputs.q.shape[1], inputs.k.shape[1])
    batch, _, heads, _ = inputs.q.shape
    kv_heads = inputs.k.shape[2]
    group = heads // kv_heads
    queries, keys = _positions(inputs, request)
    queries = queries[:, rows]
    options = {"is_causal": request.is_causal, "lengths": lengths_of(request, inputs.k.shape[1])}
    k, v = inputs.k, inputs.v
    extra = 0 if inputs.extra_k is None else inputs.extra_k.shape[1]
    if extra:
        k, v = torch.cat([k, inputs.extra_k], 1), torch.cat([v, inputs.extra_v], 1)
    hidden = padding_of(inputs, request)[:, None, None]
    for kv_head in range(kv_heads):
        query_heads = slice(kv_head * group, (kv_head + 1) * group)
        masks, dropout_factors = [], []
        for number, part in enumerate(pattern.head_parts(kv_head, kv_heads)):
            mask = pattern.batch_mask(
                part, queries.clamp(min=0), keys.clamp(min=0), kv_head=kv_head, kv_heads=kv_heads, **options
            )
            # Every query sees the extra keys once, whatever parts there are.
            mask = torch.nn.functional.pad(mask & (keys >= 0)[:, None], (0, extra), value=number == 0)
            mask = mask & (queries >= 0)[:, :, None]
            masks.append(mask[:, None].expand(batch, 1, -1, -1) & ~hidden)
            factor = _dropout_factor(request, part, queries, keys, batch, query_heads, dtype)
            dropout_factors.append(factor.expand(batch, group, *mask.shape[1:]))
        entries = bias = None
        if inputs.bias is not None:
            pairs = queries.clamp(min=0)[:, :, None], keys.clamp(min=0)[:, None]
            entries = pattern.bias_entries(*pairs, kv_head=kv_head)
            bias = inputs.bias[query_heads].to(dtype).flatten(1)
        yield _Head(
            kv_head,
            query_heads,
            inputs.q[:, rows, query_heads].to(dtype),
            k[:, :, kv_head].to(dtype),
            v[:, :, kv_head].to(dtype),
            masks,
            dropout_factors,
            entries,
            bias,
        )


def _positions(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    # The position of each row of q, below 0 where it is not computed, and of each row of k, below 0 where nobody sees
    # it: of each sequence, or of all, (batch or 1, rows).
    if request.pattern.length is not None and not has_starts(request):
        queries, keys = cells_of(inputs, request)
        return queries[None], keys[None]
    return positions_of(request, inputs.q.shape[1], inputs.k.shape[1], inputs.q.device)


def _dropout_factor(
    request: Request, part: int, queries: Tensor, keys: Tensor, batch: int, heads: slice, dtype: torch.dtype
) -> Tensor:
    # 0 for what dropout drops, otherwise 1 / (1 - dropout_p); it broadcasts to (batch, group, queries, keys).
    if request.dropout_p == 0.0:
        return torch.ones((), dtype=dtype, device=queries.device)
    is_kept = keep_mask(
        request.seed,
        request.dropout_p,
        batch=torch.arange(batch, device=queries.device)[:, None, None, None],
        head=torch.arange(heads.start, heads.stop, device=queries.device)[:, None, None],
        branch=Branch(part, *request.pattern.branch_of(part)),
        queries=queries.clamp(min=0)[:, None, :, None],
        keys=keys.clamp(min=0)[:, None, None],
    )
    return is_kept.to(dtype) / (1.0 - request.dropout_p)


def _probabilities(scores: Tensor, lse: Tensor, mask: Tensor) -> Tensor:
    # exp(score - lse); zero where nothing attends, also in rows whose lse is -inf and next to scores that are NaN.
    return torch.where(mask & lse[..., None].ne(-torch.inf), (scores - lse[..., None]).exp(), 0.0)


def _summed_by_entry(dscores: Tensor, head: _Head) -> Tensor:
    # The gradient of a flat table of bias: (group, entries). Sorted pairs are summed in one order, which index_add_ on
    # CUDA does not keep.
    entries = head.bias_entries
    dscores = dscores[..., : entries.shape[-1]]
    if len(entries) == 1:
        dscores = dscores.sum(0, keepdim=True)
    pairs = dscores.transpose(0, 1).flatten(1)
    flat = entries.flatten()
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(head.bias.shape[1] + 1, device=flat.device))
    return torch.segment_reduce(pairs[:, order].T.contiguous(), "sum", lengths=ends.diff(), axis=0).T


def _weighted_sum(weights: Tensor, v: Tensor, masks: list[Tensor]) -> Tensor:
    # weights @ v. A NaN or inf in a row of v reaches only the queries that attend to it, though 0 * NaN is NaN.
    per_key = weights.unflatten(-1, (len(masks), v.shape[1])).sum(-2)
    finite = v.isfinite().all(-1)  # (batch, keys)
    out = torch.einsum("bhqk,bkd->bqhd", per_key, v.masked_fill(~finite[..., None], 0.0))
    attends = torch.stack(masks).any(0)
    for b, key in (~finite).nonzero().tolist():
        reached = per_key[b, :, :, key].T[..., None] * v[b, key]  # (queries, group, head_dim)
        out[b] += torch.where(attends[b, 0, :, key, None, None], reached, 0.0)
    return out


def _weighted_sum_of_seen(weights: Tensor, v: Tensor, masks: list[Tensor]) -> Tensor:
    # weights @ v without a wait for the device. A NaN or inf in a row of v that none of these queries sees, as of a
    # cache that is not full, reaches none.
    per_key = weights.unflatten(-1, (len(masks), v.shape[1])).sum(-2)
    seen = torch.stack(masks).any(0).any(2)[:, 0]  # (batch, keys)
    return torch.einsum("bhqk,bkd->bqhd", per_key, v.masked_fill(~seen[..., None], 0.0))


BACKENDS = (
    Backend(
        serves=Pattern,
        name="reference",
        note="dense masks: memory grows with length squared",
        colour="#AA4499",
        functions=lambda device: (forward, backward),
        reads_starts=True,
        options=("part", "lists", *STARTS, *BIAS),
    ),
    Backend(
        serves=Pattern,
        name="eager",
        note="dense masks of some queries at a time",
        colour="#999999",
        functions=lambda device: (forward_by_rows, backward_by_rows),
        options=("part", *STARTS),
    ),
)
