"""Queries of sequences that begin at unequal rows.

Of a few queries the keys that each may see are gathered, and no others are read:

position of the query     -> positions that it may see, as many for each -> their rows of k -> one softmax

Of more queries a CPU, which knows the rows, computes one sequence after the other. Elsewhere masks are dense.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.grid_parts import part_of_box
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import begins_of, lengths_of, positions_of
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

# The most times that a row of k is gathered, on average; with dense masks it is read once. On a CPU with one thread one
# query of 16,384 keys took a third of the time of dense masks for two branches, and a tenth for a window of 1,024.
GATHERED_PER_KEY = 4


def results(
    inputs: Tensors, request: Request, run: Callable[[Tensors, Request], tuple[Tensor, Tensor]] | None
) -> tuple[Tensor, Tensor]:
    """Output and lse as `reference.forward`.

    run: the forward of one sequence that begins at a number, where the host may read the beginnings; else None.
    """
    if _gathers(inputs, request):
        return _gathered_results(inputs, request)
    is_known = isinstance(request.pattern, DilatedPattern | HeadNeighbourhoods)
    # Dropout goes by the number of a sequence in its batch, and a table by rows of the whole k.
    if run is None or not is_known or request.dropout_p > 0.0 or request.inverse is not None:
        return reference.forward_by_rows(inputs, request)
    return _one_by_one(inputs, request, run)


def _one_by_one(
    inputs: Tensors, request: Request, run: Callable[[Tensors, Request], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    (batch, queries, heads, _), keys = inputs.q.shape, inputs.k.shape[1]
    out = inputs.q.new_zeros(inputs.q.shape)
    lse = inputs.q.new_full((batch, heads, queries), -torch.inf, dtype=WORKING_DTYPE[inputs.q.dtype])
    begins = _numbers(request.key_start, 0, batch)
    firsts = _numbers(request.query_starts, request.first_query, batch)
    for b, (begin, first) in enumerate(zip(begins, firsts, strict=True)):
        begin = min(max(begin, 0), keys)
        low, high = max(begin, first), min(keys, first + queries)  # rows of k at which there are queries
        if low >= high:
            continue
        own, rows = slice(b, b + 1), slice(low - first, high - first)
        extra = (None if x is None else x[own] for x in inputs.extra)
        alone = Tensors(inputs.q[own, rows], inputs.k[own, begin:], inputs.v[own, begin:], *extra, inputs.bias)
        out[own, rows], lse[own, :, rows] = run(alone, _request_alone(request, own, begin, low, high, keys))
    return out, lse


def _numbers(starts: Tensor | None, otherwise: int, batch: int) -> list[int]:
    # Where memory is counted there are no values: from row 0 on a sequence takes the most.
    if starts is None or starts.is_meta:
        return [otherwise] * batch
    return starts.tolist()


def _request_alone(request: Request, own: slice, begin: int, low: int, high: int, keys: int) -> Request:
    # The request of one sequence from row `begin` of k on, with queries at rows low to high - 1.
    padding, extra_padding = request.key_padding_mask, request.extra_padding_mask
    alone = replace(
        request,
        query_starts=None,
        key_start=None,
        key_padding_mask=None if padding is None else padding[own, begin:],
        extra_padding_mask=None if extra_padding is None else extra_padding[own],
    )
    start, stop, length = low - begin, high - begin, keys - begin
    if isinstance(request.pattern, DilatedPattern):
        return replace(alone, query_start=None if (start, stop) == (0, length) else start)
    line = HeadNeighbourhoods(tuple(replace(near, shape=(length,)) for near in request.neighbourhoods))
    return replace(alone, query_start=None, pattern=line, part=part_of_box([(start, stop)], (length,)))


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
