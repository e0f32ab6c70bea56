"""Dense attention over gathered rows, by the library's own backends: one branch of rate 1, whose segment is all."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention import operators
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.choice import choose
from hilbert_lib.attention.dense import Eager, Problem
from hilbert_lib.attention.dropout import keep_mask
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.layout import Block


@dataclass(frozen=True)
class Request:
    """What the attentions of one rank have in common.

    Attributes:
        scale: factor of the scores.
        dropout_p: share of attention probabilities dropped.
        backend: its name, or "auto".
        gradient: whether the backward will run.
    """

    scale: float
    dropout_p: float
    backend: str
    gradient: bool


@dataclass(frozen=True, eq=False)
class Masks:
    """What takes weight from some pairs of a block.

    Attributes:
        padded: (segments, keys, batch) bool, True = no weight; or None.
        seed: (1,) int64, the key of the dropout bits; or None.
        queries, keys: (segments, rows, kv_heads), positions in the sequence, where there is dropout.
    """

    padded: Tensor | None = None
    seed: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None


def forward(q: Tensor, kv: Tensor, block: Block, request: Request, masks: Masks) -> tuple[Tensor, Tensor]:
    """Output and lse of a block.

    Args:
        q: (segments, queries, kv_heads, group, batch, head_dim).
        kv: (segments, keys, kv_heads, 2, batch, head_dim), k and v.
        block: which rows these are.
        request, masks: the rest.

    Returns:
        out like q, lse (segments, queries, kv_heads, group, batch).
    """
    segments, group, batch = q.shape[0], q.shape[3], q.shape[4]
    queries, k, v = _dense_queries(q), *map(_dense_keys, kv.unbind(3))
    if request.dropout_p > 0.0:
        problem = _with_dropout(block, request, masks, group, batch)
        out, lse = Eager.forward(*_heads_first(queries, k, v, group), problem)
        out = out.transpose(1, 2)
    else:
        call, name = _call(queries, k, block, request, masks.padded)
        out, lse = operators.forward(queries, *_lengthened(call, k, v), call, name)
    return _query_rows(out, segments, group), _query_rows(lse.transpose(1, 2)[..., None], segments, group)[..., 0]


def backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    kv: Tensor,
    block: Block,
    request: Request,
    masks: Masks,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv, shaped like them, from the gradient of out and the merged out and lse.

    Args:
        dout, q, out: (segments, queries, kv_heads, group, batch, head_dim). lse: likewise, with 1 for head_dim.
        kv, block, request, masks: as for `forward`.
    """
    segments, group, batch = q.shape[0], q.shape[3], q.shape[4]
    dout, queries, out, lse = map(_dense_queries, (dout, q, out, lse))
    k, v = map(_dense_keys, kv.unbind(3))
    lse = lse[..., 0].transpose(1, 2)
    if request.dropout_p > 0.0:
        problem = _with_dropout(block, request, masks, group, batch)
        rows = _heads_first(queries, k, v, group)
        dq, *grads = Eager.backward(dout.transpose(1, 2), *rows, out.transpose(1, 2), lse, problem)
        dq, grads = dq.transpose(1, 2), [x.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for x in grads]
    else:
        call, name = _call(queries, k, block, request, masks.padded)
        # The operators return out and lse dense, and kernels take them so.
        dense = out.contiguous(), lse.contiguous()
        dq, *grads = operators.backward(dout, queries, *_lengthened(call, k, v), *dense, call, name)
    dkv = torch.stack([_key_rows(x[:, : k.shape[1]], segments) for x in grads], 3)
    return _query_rows(dq, segments, group), dkv


def _call(q: Tensor, k: Tensor, block: Block, request: Request, padded: Tensor | None) -> tuple[Call, str]:
    queries, keys = q.shape[1], k.shape[1]
    mask = None if padded is None else padded.transpose(1, 2).flatten(0, 1)
    call = Call(DilatedPattern((max(queries, keys),), (1,)), block.is_causal, request.scale, key_padding_mask=mask)
    name = choose(q, call, request.backend, gradient=request.gradient)
    if name == "triton" and queries != keys:
        # Its kernels look for a query's segment among those that the keys fill, and take lengths that differ for
        # decoding: keys that have no weight make up for those that are missing.
        missing = max(0, queries - keys)
        if missing:
            mask = torch.zeros(q.shape[0], keys, dtype=torch.bool, device=q.device) if mask is None else mask
            mask = pad(mask, (0, missing), value=True)
        call = replace(call, key_padding_mask=mask, query_start=0)
    return call, name


def _lengthened(call: Call, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    missing = 0 if call.key_padding_mask is None else call.key_padding_mask.shape[1] - k.shape[1]
    return tuple(pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (k, v))


def _with_dropout(block: Block, request: Request, masks: Masks, group: int, batch: int) -> Problem:
    queries, keys = (
        x.transpose(1, 2).repeat_interleave(group, 1)[:, None] for x in (masks.queries, masks.keys)
    )  # (segments, 1, heads, rows)
    heads = (block.kv_heads[:, None] * group + torch.arange(group, device=block.kv_heads.device)).flatten()
    kept = keep_mask(
        masks.seed,
        request.dropout_p,
        batch=torch.arange(batch, device=heads.device)[:, None, None, None],
        head=heads[:, None, None],
        branch=block.branch,
        queries=queries[..., None],
        keys=keys[..., None, :],
    )
    return Problem(
        request.scale,
        block.is_causal,
        allowed=None if masks.padded is None else ~masks.padded.transpose(1, 2).flatten(0, 1)[:, None, None],
        kept=kept.flatten(0, 1) / (1.0 - request.dropout_p),
    )


def _dense_queries(x: Tensor) -> Tensor:
    """(segments, rows, kv_heads, group, batch, d) -> (segments * batch, rows, heads, d)."""
    return x.permute(0, 4, 1, 2, 3, 5).flatten(3, 4).flatten(0, 1)


def _dense_keys(x: Tensor) -> Tensor:
    """(segments, rows, kv_heads, batch, d) -> (segments * batch, rows, kv_heads, d)."""
    return x.permute(0, 3, 1, 2, 4).flatten(0, 1)


def _query_rows(x: Tensor, segments: int, group: int) -> Tensor:
    return x.unflatten(2, (-1, group)).unflatten(0, (segments, -1)).permute(0, 2, 3, 4, 1, 5)


def _key_rows(x: Tensor, segments: int) -> Tensor:
    return x.unflatten(0, (segments, -1)).permute(0, 2, 3, 1, 4)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `Eager` takes them, with as many heads of k and v as of q."""
    return q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
