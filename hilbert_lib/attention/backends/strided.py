"""Dilated attention by dense kernels over zero-copy views: few launches, of many heads each.

The rows of one residue in all whole segments of a branch are `x[:, :whole].unflatten(1, (segments, w))[:, :, o::r]`,
a view of shape (batch, segments, rows, heads, head_dim). Heads that share an offset are a slice of it. Heads whose
offsets follow each other are a view too: the step to the next one is the stride of a head plus that of a position. The
way with fewer views is taken: 16 heads at rate 16 are one view. Dense kernels take four dimensions, so batch and
segments are folded into one where the strides allow it; otherwise the shorter of batch and heads is looped over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends.kernel import LSE_COLUMNS, Eager, Kernel, Problem, gradients
from hilbert_lib.attention.dropout import Branch, keep_mask
from hilbert_lib.attention.merge import merge
from hilbert_lib.attention.request import WORKING_DTYPE, Request, StridedRows, Tensors
from hilbert_lib.attention.tape import stepped
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.dilated import DilatedPattern, rows_in_segment


def forward(inputs: Tensors, call: Request, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Output and lse of dilated attention; shapes as in `reference.forward`."""
    q, k, v, *_ = inputs
    if _is_one_attention(q, k, call):
        return stepped(partial(_forward_of_all, kernel, Problem(call.scale, call.is_causal)), q, k, v)
    if _merges_at_once(q, kernel):
        from hilbert_lib.attention.triton.merge import merge_parts  # triton is imported only where a kernel is used

        parts = []
        for step in steps(call, [q], [k, v]):
            out, lse = kernel.forward(*step.queries, *step.keys, step.problem)
            parts.append(step.query_part(out.to(q.dtype), lse))
        return merge_parts(parts, q)
    dtype = WORKING_DTYPE[q.dtype]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((*q.shape[:3], 1), -torch.inf, dtype=dtype, device=q.device)
    for step in steps(call, [q, out, lse], [k, v]):
        qs, outs, lses = step.queries
        results = kernel.forward(qs, *step.keys, step.problem)
        if not step.is_first:
            results = merge(outs, lses[..., 0], *results)
        outs.copy_(results[0])
        lses[..., 0].copy_(results[1])
    return out.to(q.dtype), lse[..., 0].transpose(1, 2)


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, call: Request, kernel: Kernel, dlse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: every branch's backward with the merged out and lse, summed."""
    q, k, v, *_ = inputs
    if dlse is None and _is_one_attention(q, k, call):
        run = partial(_backward_of_all, kernel, Problem(call.scale, call.is_causal))
        return stepped(run, dout, q, k, v, out, lse)
    # lse in the layout of the others: in its own, batch and segments would not fold into one dimension.
    query_side = [q, dout, out, *(x.transpose(1, 2).contiguous()[..., None] for x in (lse, dlse) if x is not None)]
    if _merges_at_once(q, kernel):
        from hilbert_lib.attention.triton.merge import sum_parts

        parts = [], [], []
        for step in steps(call, query_side, [k, v]):
            dq, dk, dv = (x.to(q.dtype) for x in _gradients(kernel, step, dlse is not None))
            step_parts = step.query_part(dq), step.key_part(dk), step.key_part(dv)
            for grad_parts, part in zip(parts, step_parts, strict=True):
                grad_parts.append(part)
        return tuple(sum_parts(grad_parts, x) for grad_parts, x in zip(parts, (q, k, v), strict=True))
    dq, dk, dv = (torch.zeros(x.shape, dtype=WORKING_DTYPE[x.dtype], device=x.device) for x in (q, k, v))
    for step in steps(call, [*query_side, dq], [k, v, dk, dv]):
        for total, part in zip(
            (step.queries[-1], *step.keys[2:]), _gradients(kernel, step, dlse is not None), strict=True
        ):
            total += part
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward_of_all(kernel: Kernel, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # One dense attention of all rows and heads, (batch, rows, heads, head_dim) each, and lse (batch, heads, rows).
    out, lse = kernel.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), problem)
    return _rows_first(out, q.dtype), lse.contiguous()


def _backward_of_all(
    kernel: Kernel, problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    return tuple(_rows_first(grad, q.dtype) for grad in kernel.backward(*tensors, lse, problem))


def _rows_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    # (batch, heads, rows, head_dim) as results are returned. To ask for the dtype costs less than `to`.
    x = x.transpose(1, 2)
    return (x if x.dtype == dtype else x.to(dtype)).contiguous()


def _gradients(kernel: Kernel, step: "Step", with_dlse: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, dout, out, lse, *rest = step.queries
    dlse = rest[0][..., 0] if with_dlse else None
    return gradients(kernel, dout, q, *step.keys[:2], out, lse[..., 0], dlse, step.problem)


def _is_one_attention(q: Tensor, k: Tensor, call: Request) -> bool:
    # Whether one call of a dense kernel is all there is, of all rows, with a head of k for each of q: nothing is to be
    # merged or summed up.
    has_options = call.dropout_p > 0.0 or call.key_padding_mask is not None or call.query_start is not None
    if has_options or q.shape[2] != k.shape[2] or len(call.pattern.segment_lengths) > 1:
        return False
    ((segment_length, rate),) = call.pattern.branches
    return rate == 1 and segment_length >= max(q.shape[1], k.shape[1])


def _is_on_gpu(q: Tensor, kernel: Kernel) -> bool:
    return q.is_cuda and kernel is not Eager


def _merges_at_once(q: Tensor, kernel: Kernel) -> bool:
    # Whether all results are kept until one Triton kernel merges or sums them. That takes memory for sum(1 / rate) more
    # of out and lse, or of dq, and of dk and dv with as many heads as q. Else each goes into a float32 tensor.
    # Eager's results are float32, of any head_dim. A captured graph would replay a table whose host copy is gone.
    if not _is_on_gpu(q, kernel) or torch.cuda.is_current_stream_capturing():
        return False
    return kernel_mode() == "compiled"


@dataclass(frozen=True)
class _Block:
    """Equal segments of some heads of one branch, each segment a dense attention."""

    branch: int
    segment_length: int
    rate: int
    kv_heads: slice
    shift: int  # positions from the first row of one head to the first of the next: 1, or 0 where they share an offset
    segments: int
    start: int  # position at which the first segment begins
    first_query: int  # first row of q, counted from there
    queries: int  # rows of q in a segment
    first_key: int
    keys: int

    def view(self, x: Tensor, start: int, first: int, rows: int) -> Tensor:
        """(batch, segments, rows, heads, ...) of x (batch, seq, kv_heads, ...); start: row of the first segment."""
        heads = range(x.shape[2])[self.kv_heads]
        batch_step, row_step, head_step, *rest = x.stride()
        begin = x.storage_offset() + (start + first) * row_step + heads.start * head_step
        # Cut to the length, which only steps that are never taken exceed: 64 bits hold no larger ones.
        segment_length, rate = (min(size, x.shape[1]) for size in (self.segment_length, self.rate))
        strides = segment_length * row_step, rate * row_step, heads.step * head_step + self.shift * row_step
        shape = x.shape[0], self.segments, rows, len(heads), *x.shape[3:]
        return x.as_strided(shape, (batch_step, *strides, *rest), begin)

    def positions(self, first: int, rows: int, device: torch.device) -> Tensor:
        """(segments, rows) int64."""
        starts = self.start + torch.arange(self.segments, device=device)[:, None] * self.segment_length
        return starts + first + torch.arange(rows, device=device) * self.rate


@lru_cache(maxsize=256)
def _blocks(
    pattern: DilatedPattern, first: int, queries: int, keys: int, kv_heads: int, is_masked: bool
) -> tuple[_Block, ...]:
    # first: position of the first query.
    blocks, end = [], first + queries
    for branch, (w, r) in enumerate(pattern.branches):
        # Whole segments with all their queries share blocks, of as many as kernels take; a cut segment is one block.
        full_segments = range(-(-first // w), max(-(-first // w), end // w))
        cut = {segment for segment in (first // w, (end - 1) // w) if segment not in full_segments}
        firsts = full_segments[::MOST_SEQUENCES]
        runs = [(segment, min(MOST_SEQUENCES, full_segments.stop - segment)) for segment in firsts]
        groups = pattern.offset_heads(branch, kv_heads)
        for segment, segments in runs + [(segment, 1) for segment in sorted(cut)]:
            start, rows = segment * w, {}
            for offset in groups:  # rows of its keys, of the positions before the first query, of its queries
                before, until = (rows_in_segment(x - start, r, offset) for x in (first, min(start + w, end)))
                rows[offset] = rows_in_segment(min(w, keys - start), r, offset), before, until - before
            for heads, offset, shift in _views(groups, kv_heads, rows, is_masked):
                key_rows, before, query_rows = rows[offset]
                first_row = offset + before * r
                blocks.append(
                    _Block(branch, w, r, heads, shift, segments, start, first_row, query_rows, offset, key_rows)
                )
    return tuple(blocks)


def _views(
    groups: dict[int, slice], kv_heads: int, rows: dict[int, tuple[int, int, int]], is_masked: bool
) -> list[tuple[slice, int, int]]:
    # The heads of each view, the offset of the first head, and the step to the offset of the next. Either a view holds
    # the heads of one offset, or a run of evenly spaced heads with successive offsets and as many rows.
    heads_of = {offset: range(kv_heads)[heads] for offset, heads in groups.items() if rows[offset][2] > 0}
    ways = [[(groups[offset], offset, 0) for offset in heads_of]]
    offset_of = {head: offset for offset, heads in heads_of.items() for head in heads}
    if len(heads_of) > 1 and not is_masked:  # a mask is of one offset
        for distance in {1, max(map(len, heads_of.values()))}:
            runs: dict[int, list[int]] = {}  # by their last heads
            for head in sorted(offset_of):
                before, offset = head - distance, offset_of[head]
                follows = offset_of.get(before) == offset - 1 and rows[offset - 1] == rows[offset]
                runs[head] = [*(runs.pop(before) if follows else ()), head]
            ways.append(
                [(slice(run[0], run[-1] + 1, distance), offset_of[run[0]], int(len(run) > 1)) for run in runs.values()]
            )
    return min(ways, key=len)


@dataclass(frozen=True)
class _Fold:
    """The way from five dimensions to four: batch and segments fold, or one head's segments take the place of heads."""

    batch: slice
    head: int | None = None

    def of_rows(self, x: Tensor) -> Tensor:
        """(batch, segments, rows, heads, d) -> (batch, heads, rows, d) for a dense kernel."""
        return x[:, :, :, self.head] if self.head is not None else x[self.batch].flatten(0, 1).transpose(1, 2)

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """(batch, segments, heads, queries, keys), likewise."""
        if mask is None:
            return None
        return mask[:, :, self.head] if self.head is not None else mask[self.batch].flatten(0, 1)

    def part(self, block: _Block, start: int, heads: range, *results: Tensor) -> StridedRows:
        """A dense kernel's results, (batch, heads, rows, ...), whose first row of the first of `heads` is `start`."""
        if self.head is None:
            tensors = tuple(x.transpose(1, 2).unflatten(0, (-1, block.segments)) for x in results)
        else:
            tensors = tuple(x[:, :, :, None] for x in results)
            heads, start = heads[self.head : self.head + 1], start + self.head * block.shift
        head_slice = slice(heads.start, heads.stop, heads.step)
        return StridedRows(tensors, self.batch, head_slice, start, block.segment_length, block.rate, block.shift)


@dataclass(frozen=True)
class Step:
    """One dense attention, with (batch, heads, rows, ...) views of the tensors of queries and of keys."""

    problem: Problem
    queries: list[Tensor]
    keys: list[Tensor]
    rate: int
    is_first: bool  # whether no step before it has its rows of its heads
    query_part: Callable[..., StridedRows]  # of results with a row for each query
    key_part: Callable[..., StridedRows]  # and for each key


class _Layout(NamedTuple):
    """A view as `as_strided` makes it; the offset counts from a tensor's first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, x: Tensor) -> Tensor:
        """The view of a tensor."""
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset)


class _Plan(NamedTuple):
    """One dense attention of every call with tensors of the same shapes and strides."""

    block: _Block
    member: int  # of the query heads of each KV head
    fold: _Fold
    causal_shift: int
    queries: tuple[_Layout, ...]
    keys: tuple[_Layout, ...]


def steps(call: Request, query_side: list[Tensor], key_side: list[Tensor]) -> Iterator[Step]:
    """The dense attentions that one call falls into.

    query_side: q and what has its rows, (batch, queries, heads, ...); key_side: k, v and what has their rows.
    """
    batch, _, heads, _ = query_side[0].shape
    kv_heads, first = key_side[0].shape[2], call.query_start or 0
    group, masked = heads // kv_heads, None
    is_masked = call.dropout_p > 0.0 or call.key_padding_mask is not None
    forms = (tuple((x.shape, x.stride()) for x in side) for side in (query_side, key_side))
    for plan in _plans(call.pattern, first, *forms, is_masked):
        block, member, fold = plan.block, plan.member, plan.fold
        if masked != (block, member):
            masks, masked = _masks(call, block, batch, range(member, heads, group), query_side[0]), (block, member)
        query_heads, key_heads = range(member, heads, group)[block.kv_heads], range(kv_heads)[block.kv_heads]
        yield Step(
            Problem(call.scale, call.is_causal, plan.causal_shift, *map(fold.of_mask, masks)),
            [layout.of(x) for layout, x in zip(plan.queries, query_side, strict=True)],
            [layout.of(x) for layout, x in zip(plan.keys, key_side, strict=True)],
            block.rate,
            block.branch == 0 or call.pattern.mixing == "head_groups",
            partial(fold.part, block, block.start - first + block.first_query, query_heads),
            partial(fold.part, block, block.start + block.first_key, key_heads),
        )


@lru_cache(maxsize=256)
def _plans(
    pattern: DilatedPattern, first: int, query_forms: tuple, key_forms: tuple, is_masked: bool
) -> tuple[_Plan, ...]:
    # first: position of the first query. query_forms, key_forms: the shape and strides of each tensor.
    # The views are taken once, of tensors without memory.
    nothing, plans = torch.empty(0, device="meta"), []
    query_side, key_side = ([nothing.as_strided(*form) for form in forms] for forms in (query_forms, key_forms))
    _, queries, heads, _ = query_side[0].shape
    _, keys, kv_heads, _ = key_side[0].shape
    members = [x.unflatten(2, (kv_heads, heads // kv_heads)) for x in query_side]
    for block in _blocks(pattern, first, queries, keys, kv_heads, is_masked):
        causal_shift = (block.first_query - block.first_key) // block.rate
        key_views = [block.view(x, block.start, block.first_key, block.keys) for x in key_side]
        for member in range(heads // kv_heads):
            query_views = [
                block.view(x[:, :, :, member], block.start - first, block.first_query, block.queries) for x in members
            ]
            for fold in _folds([*query_views, *key_views]):
                sides = (tuple(_layout(fold.of_rows(x)) for x in views) for views in (query_views, key_views))
                plans.append(_Plan(block, member, fold, causal_shift, *sides))
    return tuple(plans)


def _layout(x: Tensor) -> _Layout:
    return _Layout(tuple(x.shape), x.stride(), x.storage_offset())


def _folds(views: list[Tensor]) -> list[_Fold]:
    batch, segments, _, heads, _ = views[0].shape
    fits = batch * segments <= MOST_SEQUENCES and all(x.stride(0) == segments * x.stride(1) for x in views)
    if batch == 1 or segments == 1 or fits:
        return [_Fold(slice(None))]
    if batch <= heads:
        return [_Fold(slice(b, b + 1)) for b in range(batch)]
    return [_Fold(slice(None), h) for h in range(heads)]


def _masks(call: Request, block: _Block, batch: int, heads: range, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    # The keys that padding allows, and the dropout factor: (batch, segments, heads, queries, keys) each, or None.
    # heads: one query head of every KV head.
    if call.dropout_p == 0.0 and call.key_padding_mask is None:
        return None, None
    device = q.device
    head = torch.arange(heads.start, heads.stop, heads.step, device=device)[block.kv_heads]
    key = block.positions(block.first_key, block.keys, device)
    allowed = dropout_factor = None
    if call.key_padding_mask is not None:
        # Expanded last: `~` writes out whatever it is given.
        allowed = (~call.key_padding_mask[:, key])[:, :, None, None].expand(-1, -1, len(head), block.queries, -1)
    if call.dropout_p > 0.0:
        query = block.positions(block.first_query, block.queries, device)
        dropout_factor = keep_mask(
            call.seed,
            call.dropout_p,
            batch=torch.arange(batch, device=device)[:, None, None, None, None],
            head=head[:, None, None],
            branch=Branch(block.branch, *call.pattern.branch_of(block.branch)),
            queries=query[:, None, :, None],
            keys=key[:, None, None, :],
        ).to(WORKING_DTYPE[q.dtype]) / (1.0 - call.dropout_p)
    return allowed, dropout_factor


def over_views(
    kernel: Kernel, sizes: dict[int, tuple[int, int, int]] | None = None, on_cuda: Kernel | None = None
) -> dict:
    """The functions and the workspace of a backend that runs a dense kernel over views.

    Args:
        kernel: the dense kernel; on_cuda: another one for CUDA.
        sizes: by bytes of an element, the bytes that the kernel's backward takes beside its results: for each element
            of q where the rate is 1, for each where it is above 1 (some copy what is strided), and for each row of q.
            Its forward takes nothing. Without sizes the workspace is found by running it on meta tensors.
    """
    kernels = (kernel, on_cuda or kernel)
    pairs = [(partial(forward, kernel=dense), partial(backward, kernel=dense)) for dense in kernels]
    workspace = partial(_workspace, sizes=sizes) if sizes else None
    return {
        "functions": lambda device: pairs[device.type == "cuda"],
        "workspace": workspace,
        "lse_columns": LSE_COLUMNS,
    }


def _workspace(
    arguments: tuple, call: Request, direction: str, device: torch.device, returned: int, sizes: dict
) -> dict[str, int] | None:
    # The peak where all results are kept and merged at once, as on CUDA.
    if device.type != "cuda":
        return None
    q, k, *_ = arguments[0] if direction == "forward" else arguments[1]
    if _is_one_attention(q, k, call):
        dense, _, per_row = (0, 0, 0) if direction == "forward" else sizes[q.element_size()]
        return {"temporary": dense * q.numel() + per_row * q.numel() // q.shape[3]}
    if direction == "forward":
        (q, k, v, *_), lse_size, copies = arguments[0], 4, 0
        query_side, workspace = [q], (0, 0, 0)
    else:
        dout, (q, k, v, *_), out, lse = arguments
        lse_size, copies = 0, lse.nbytes  # of a copy in another layout
        query_side = [q, dout, out, lse.transpose(1, 2).contiguous()[..., None]]
        workspace = sizes[q.element_size()]
    peak, (dense, thinned, per_row) = 0, workspace
    for step in steps(call, query_side, [k, v]):
        per_element = dense if step.rate == 1 else thinned
        q, k = step.queries[0], step.keys[0]
        rows = q.numel() // q.shape[-1]
        copies += q.nbytes + lse_size * rows + (2 * k.nbytes if direction == "backward" else 0)
        peak = max(peak, copies + per_element * q.numel() + per_row * rows)
    return {"temporary": max(peak, copies + returned) - returned}
