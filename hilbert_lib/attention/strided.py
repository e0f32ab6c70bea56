"""Dilated attention by dense kernels over zero-copy views: one branch, one offset, one view.

The rows of one residue in all whole segments of a branch are `x[:, :whole].unflatten(1, (segments, w))[:, :, o::r]`,
a view of shape (batch, segments, rows, heads, head_dim). Heads that share an offset are a slice of it, and so is one
member of every group of query heads. Dense kernels take four dimensions, so batch and segments are folded into one
where the strides allow it; otherwise the shorter of batch and heads is looped over. Nothing is copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.attention.call import Call, working_dtype
from hilbert_lib.attention.dense import Kernel, Problem
from hilbert_lib.attention.dropout import keep_mask
from hilbert_lib.attention.merge import merge
from hilbert_lib.pattern import rows_in_segment


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`."""
    dtype = working_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((*q.shape[:3], 1), -torch.inf, dtype=dtype, device=q.device)
    for problem, (qs, outs, lses), (ks, vs) in _problems(call, [q, out, lse], [k, v]):
        part, part_lse = kernel.forward(qs, ks, vs, problem)
        merged, merged_lse = merge(outs, lses[..., 0], part, part_lse)
        outs.copy_(merged)
        lses[..., 0].copy_(merged_lse)
    return out.to(q.dtype), lse[..., 0].transpose(1, 2)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, kernel: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: every branch's backward with the merged out and lse, summed."""
    dtype = working_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    query_side = [q, dout, out, lse.transpose(1, 2)[..., None], dq]
    for problem, (qs, douts, outs, lses, dqs), (ks, vs, dks, dvs) in _problems(call, query_side, [k, v, dk, dv]):
        parts = kernel.backward(douts, qs, ks, vs, outs, lses[..., 0], problem)
        for total, part in zip((dqs, dks, dvs), parts, strict=True):
            total += part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class _Block:
    """Equal segments of one branch and one offset; every segment is a dense attention of its own."""

    branch: int
    segment_length: int
    rate: int
    kv_heads: slice
    segments: int
    start: int  # position at which the first segment begins
    first_query: int  # first row of q, counted from there
    queries: int  # rows of q in a segment
    first_key: int
    keys: int

    def view(self, x: Tensor, start: int, first: int, rows: int) -> Tensor:
        """(batch, segments, rows, heads, ...) of x (batch, seq, kv_heads, ...); start: row of the first segment."""
        if self.segments == 1:
            begin = start + first  # start is negative where q begins inside the segment
            return x[:, None, begin : begin + rows * self.rate : self.rate, self.kv_heads]
        whole = x[:, start : start + self.segments * self.segment_length]
        return whole.unflatten(1, (self.segments, self.segment_length))[:, :, first :: self.rate, self.kv_heads]

    def positions(self, first: int, rows: int, device: torch.device) -> Tensor:
        """(segments, rows) int64."""
        starts = self.start + torch.arange(self.segments, device=device)[:, None] * self.segment_length
        return starts + first + torch.arange(rows, device=device) * self.rate


def _blocks(call: Call, queries: int, keys: int, kv_heads: int) -> Iterator[_Block]:
    first, end = call.first_query, call.first_query + queries
    for branch, (w, r) in enumerate(call.pattern.branches):
        # Whole segments with all their queries are one block; what the queries or the sequence cut is one each.
        whole = range(-(-first // w), max(-(-first // w), end // w))
        cut = {first // w, (end - 1) // w} - set(whole)
        runs = [(whole.start, len(whole))] if whole else []
        for offset, heads in call.pattern.offset_heads(branch, kv_heads).items():
            for segment, segments in runs + [(segment, 1) for segment in sorted(cut)]:
                start = segment * w
                key_rows = rows_in_segment(min(w, keys - start), r, offset)
                before = rows_in_segment(first - start, r, offset)
                rows = rows_in_segment(min(w, end - start), r, offset) - before
                if rows > 0:
                    yield _Block(branch, w, r, heads, segments, start, offset + before * r, rows, offset, key_rows)


def _problems(
    call: Call, query_side: list[Tensor], key_side: list[Tensor]
) -> Iterator[tuple[Problem, list[Tensor], list[Tensor]]]:
    # Every dense attention of the call, with (batch, heads, rows, ...) views of the tensors on either side.
    batch, queries, heads, _ = query_side[0].shape
    _, keys, kv_heads, _ = key_side[0].shape
    group = heads // kv_heads
    members = [x.unflatten(2, (kv_heads, group)) for x in query_side]
    for block in _blocks(call, queries, keys, kv_heads):
        start = block.start - call.first_query
        key_views = [block.view(x, block.start, block.first_key, block.keys) for x in key_side]
        for member in range(group):
            query_views = [block.view(x[:, :, :, member], start, block.first_query, block.queries) for x in members]
            kept, allowed = _masks(call, block, batch, kv_heads, group, member, query_side[0])
            for index in _folds([*query_views, *key_views]):
                yield (
                    Problem(
                        call.scale,
                        call.is_causal,
                        causal_shift=(block.first_query - block.first_key) // block.rate,
                        allowed=None if allowed is None else index.of_mask(allowed),
                        kept=None if kept is None else index.of_mask(kept),
                    ),
                    [index.of_rows(x) for x in query_views],
                    [index.of_rows(x) for x in key_views],
                )


@dataclass(frozen=True)
class _Fold:
    """How five dimensions become four: all at once, one sequence of the batch, or one head."""

    sequence: int | None = None
    head: int | None = None

    def of_rows(self, x: Tensor) -> Tensor:
        """(batch, segments, rows, heads, d) -> (batch, heads, rows, d) for a dense kernel."""
        if self.head is not None:
            return x[:, :, :, self.head]  # the segments stand where heads do
        return (x.flatten(0, 1) if self.sequence is None else x[self.sequence]).transpose(1, 2)

    def of_mask(self, mask: Tensor) -> Tensor:
        """(batch, segments, heads, queries, keys), likewise."""
        if self.head is not None:
            return mask[:, :, self.head]
        return mask.flatten(0, 1) if self.sequence is None else mask[self.sequence]


def _folds(views: list[Tensor]) -> list[_Fold]:
    batch, segments, _, heads, _ = views[0].shape
    if batch == 1 or segments == 1 or all(x.stride(0) == segments * x.stride(1) for x in views):
        return [_Fold()]
    if batch <= heads:
        return [_Fold(sequence=b) for b in range(batch)]
    return [_Fold(head=h) for h in range(heads)]


def _masks(
    call: Call, block: _Block, batch: int, kv_heads: int, group: int, member: int, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    # The dropout factor and the keys that padding allows, (batch, segments, heads, queries, keys), where asked for.
    if call.dropout_p == 0.0 and call.key_padding_mask is None:
        return None, None
    device = q.device
    head = torch.arange(kv_heads, device=device)[block.kv_heads] * group + member
    key = block.positions(block.first_key, block.keys, device)
    kept = allowed = None
    if call.key_padding_mask is not None:
        allowed = ~call.key_padding_mask[:, key][:, :, None, None].expand(-1, -1, len(head), block.queries, -1)
    if call.dropout_p > 0.0:
        query = block.positions(block.first_query, block.queries, device)
        kept = keep_mask(
            call.seed,
            call.dropout_p,
            batch=torch.arange(batch, device=device)[:, None, None, None, None],
            head=head[:, None, None],
            branch=block.branch,
            queries=query[:, None, :, None],
            keys=key[:, None, None, :],
        ).to(working_dtype(q.dtype)) / (1.0 - call.dropout_p)
    return kept, allowed
