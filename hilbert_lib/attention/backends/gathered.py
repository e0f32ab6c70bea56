"""A few queries of sequences that begin at unequal rows: the keys that each may see are gathered. No others are read.

position of the query     -> positions that it may see, as many for each -> their rows of k -> one softmax
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import begins_of, lengths_of, positions_of
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

# The most times that a row of k is gathered, on average; with dense masks it is read once. On a CPU with one thread one
# query of 16,384 keys took a third of the time of dense masks for two branches, and a tenth for a window of 1,024.
GATHERED_PER_KEY = 4


def results(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output and lse as `reference.forward`; with many queries by dense masks."""
    if _gathers(inputs, request):
        return _gathered_results(inputs, request)
    return reference.forward_by_rows(inputs, request)


def _gathers(inputs: Tensors, request: Request) -> bool:
    # Whether there are so few queries that their keys are gathered.
    if (
        request.dropout_p > 0.0
        or inputs.bias is not None
        or not isinstance(request.pattern, DilatedPattern | HeadNeighbourhoods)
    ):
        return False
    queries, keys = inputs.q.shape[1], inputs.k.shape[1]
    return queries * sum(_counts(request, keys)) <= GATHERED_PER_KEY * keys


def _gathered_results(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    dtype, (batch, keys, kv_heads, _) = WORKING_DTYPE[inputs.q.dtype], inputs.k.shape
    q = inputs.q.to(dtype).unflatten(2, (kv_heads, -1))  # (batch, queries, kv_heads, group, head_dim)
    own, _ = positions_of(request, q.shape[1], keys, q.device)
    own = own.expand(batch, -1)[:, :, None, None]
    begins = 0 if request.key_start is None else begins_of(request, keys)[:, :, None, None]
    sequence = torch.arange(batch, device=q.device)[:, None, None, None]
    head, scores, values = torch.arange(kv_heads, device=q.device)[:, None], [], []
    for position, sees in _seen(request, own, keys, kv_heads):  # (batch, queries, kv_heads, count)
        row = position + begins
        sees = sees & (own >= 0) & (position >= 0) & (row < keys)
        row = row.clamp(0, keys - 1)
        if request.key_padding_mask is not None:
            sees = sees & ~request.key_padding_mask[sequence, row]
        scores.append(_scores(q, _rows(inputs.k, sequence, row, head), sees, request.scale))
        # A NaN or inf in a row that a query does not see does not reach it.
        values.append(_rows(inputs.v, sequence, row, head).to(dtype).masked_fill(~sees[..., None], 0.0))
    if inputs.extra_k is not None and inputs.extra_k.shape[1]:
        extra_k, extra_v = (x.transpose(1, 2)[:, None].expand(-1, q.shape[1], -1, -1, -1) for x in inputs.extra)
        sees = own >= 0
        if request.extra_padding_mask is not None:
            sees = sees & ~request.extra_padding_mask[:, None, None]
        scores.append(_scores(q, extra_k, sees.expand(extra_k.shape[:-1]), request.scale))
        values.append(extra_v.to(dtype))
    scores = torch.cat(scores, -1)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    out = torch.einsum("bqhgn,bqhnd->bqhgd", weights, torch.cat(values, 3))
    return out.flatten(2, 3).to(inputs.q.dtype), lse.flatten(2).transpose(1, 2)


def _rows(x: Tensor, sequence: Tensor, row: Tensor, head: Tensor) -> Tensor:
    # x[sequence, row, head]. As one list it is copied row by row: on a CPU with one thread one query of three branches
    # of 4,096 keys took 1.8 to 2.2 ms, and 3.0 to 4.0 without.
    if not x.is_contiguous():
        return x[sequence, row, head]
    _, rows, heads, head_dim = x.shape
    places = (sequence * rows + row) * heads + head
    return x.view(-1, head_dim).index_select(0, places.flatten()).view(*places.shape, head_dim)


def _scores(q: Tensor, k: Tensor, sees: Tensor, scale: float) -> Tensor:
    # (batch, queries, kv_heads, group, count), -inf where a query does not see a key.
    scores = torch.einsum("bqhgd,bqhnd->bqhgn", q, k.to(q.dtype)) * scale
    return scores.masked_fill(~sees[:, :, :, None], -torch.inf)


def _counts(request: Request, keys: int) -> list[int]:
    # The keys that are gathered for each query, part by part.
    if isinstance(request.pattern, DilatedPattern):
        return [-(-min(w, keys) // r) for w, r in request.pattern.branches]
    return [max(near.axes[0].window for near in request.neighbourhoods)]


def _seen(request: Request, own: Tensor, keys: int, kv_heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Positions (batch, queries, kv_heads, count) that a query may see, and whether it does; part by part.
    if isinstance(request.pattern, DilatedPattern):
        yield from _seen_in_segments(request, own, keys, kv_heads)
    else:
        yield _seen_in_windows(request, own, keys)


def _seen_in_segments(request: Request, own: Tensor, keys: int, kv_heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    pattern = request.pattern
    for branch, ((w, r), count) in enumerate(zip(pattern.branches, _counts(request, keys), strict=True)):
        w, r = min(w, keys), min(r, keys)  # no position reaches further
        offset = torch.full((kv_heads, 1), -1, device=own.device)  # of heads that do not use the branch
        for residue, heads in pattern.offset_heads(branch, kv_heads).items():
            offset[heads] = residue
        first = own - own % w
        position = first + offset + r * torch.arange(count, device=own.device)
        sees = (own % w % r == offset) & (position < first + w)
        yield position, sees & (position <= own) if request.is_causal else sees


def _seen_in_windows(request: Request, own: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    lengths, (count,) = lengths_of(request, keys), _counts(request, keys)
    windows = request.neighbourhoods if len(request.heads_by_window) > 1 else request.neighbourhoods[:1]
    positions, seen = [], []
    for near in windows:
        axis = near.axes[0]
        if lengths is not None:
            axis = replace(axis, cells=lengths[:, None, None, None])
        rank = axis.start(own) + torch.arange(count, device=own.device)
        if axis.edge == "wrap":
            rank = rank % axis.ranks(own)[1]
        positions.append(rank * axis.dilation + own % axis.dilation)
        seen.append(axis.attends(own, positions[-1]))
    return torch.cat(positions, 2), torch.cat(seen, 2)
