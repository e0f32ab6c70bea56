"""Dense attention over gathered rows, by the library's own backends: one branch of rate 1, whose segment is all."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention import operators
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.choice import choose
from hilbert_lib.attention.dropout import NAME, named
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.rank.layout import Block


@dataclass(frozen=True)
class Request:
    """What the attentions of one rank have in common.

    Attributes:
        scale: factor of the scores.
        dropout_p: share of attention probabilities dropped.
        seed: (1,) int64, the key of the dropout bits; or None.
        backend: its name, or "auto".
        gradient: whether the backward will run.
    """

    scale: float
    dropout_p: float
    seed: Tensor | None
    backend: str
    gradient: bool


def forward(q: Tensor, kv: Tensor, block: Block, request: Request, padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and lse of a block.

    Args:
        q: (segments, queries, kv_heads, group, batch, head_dim).
        kv: (segments, keys, kv_heads, 2, batch, head_dim), k and v.
        block: which rows these are.
        request: what it has in common with others.
        padded: (segments, keys, batch) bool, True = no weight; or None.

    Returns:
        out like q, lse (segments, queries, kv_heads, group, batch).
    """
    segments, group = q.shape[0], q.shape[3]
    queries, k, v = _dense_queries(q), *map(_dense_keys, kv.unbind(3))
    call, name = _call(queries, k, block, request, padded)
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
    padded: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv, shaped like them, from the gradient of out and the merged out and lse.

    Args:
        dout, q, out: (segments, queries, kv_heads, group, batch, head_dim). lse: likewise, with 1 for head_dim.
        kv, block, request, padded: as for `forward`.
    """
    segments, group = q.shape[0], q.shape[3]
    dout, queries, out, lse = map(_dense_queries, (dout, q, out, lse))
    k, v = map(_dense_keys, kv.unbind(3))
    call, name = _call(queries, k, block, request, padded)
    # The operators return out and lse dense, and kernels take them so.
    dense = out.contiguous(), lse[..., 0].transpose(1, 2).contiguous()
    dq, *grads = operators.backward(dout, queries, *_lengthened(call, k, v), *dense, call, name)
    dkv = torch.stack([_key_rows(x[:, : k.shape[1]], segments) for x in grads], 3)
    return _query_rows(dq, segments, group), dkv


def _call(q: Tensor, k: Tensor, block: Block, request: Request, padded: Tensor | None) -> tuple[Call, str]:
    queries, keys = q.shape[1], k.shape[1]
    mask = None if padded is None else padded.transpose(1, 2).flatten(0, 1)
    call = Call(
        DilatedPattern((max(queries, keys),), (1,)),
        block.is_causal,
        request.scale,
        request.dropout_p,
        _named(block, request, q.shape[0], q.shape[2]),
        mask,
        is_part=True,
    )
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


def _named(block: Block, request: Request, rows: int, heads: int) -> Tensor | None:
    """The seed of a call of so many rows (a segment of a sequence each) and query heads."""
    if request.seed is None:
        return None
    segments, group = block.names.shape[1], heads // len(block.kv_heads)
    batch = torch.arange(rows // segments, device=request.seed.device)
    head = block.kv_heads[:, None] * group + torch.arange(group, device=batch.device)
    words = torch.broadcast_tensors(batch[:, None, None], head, *block.names[:, :, None, :, None])
    return named(request.seed, torch.stack(words, -1).view(rows, heads, NAME), (block.branch,))


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
