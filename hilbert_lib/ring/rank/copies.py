"""Copies of rows by index, and sums of them, of a rank that holds a part of a grid.

On CUDA each step is one kernel; elsewhere, and as the reference, it is torch's own by index, tensor by tensor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.merge import kernel_serves
from hilbert_lib.attention.request import Tensors
from hilbert_lib.ring.rank.halo_layout import Border, HaloLayout


def packed(k: Tensor, v: Tensor, layout: HaloLayout, mask: Tensor | None = None) -> list[Tensor]:
    """Rows of k and v for other ranks, (rows, 2, batch, head_dim), and of a padding mask, (rows, batch) uint8."""
    if kernel_serves(k):
        from hilbert_lib.attention.triton.copies import Copy, gather_rows  # triton is imported only where it is used

        count, batch = sum(layout.sent), len(k)
        sent = [k.new_empty(count, 2, batch, k.shape[3])]
        copies = [Copy(_of_sent(sent[0], n), x, layout.packed) for n, x in enumerate((k, v))]
        if mask is not None:
            sent.append(mask.new_empty(count, batch, dtype=torch.uint8))
            copies.append(Copy(_of_mask(sent[1].T), _of_mask(mask.view(torch.uint8)), layout.rows[0]))
        gather_rows(copies)
        return sent
    rows, heads, _ = layout.rows
    sent = [torch.stack([x.permute(1, 2, 0, 3)[rows, heads] for x in (k, v)], 1)]
    return sent if mask is None else [*sent, mask.byte().T[rows]]


class Framed(NamedTuple):
    """The tensors that a border is computed from."""

    k: Tensor  # in the border's frame, as v
    v: Tensor
    by_query: list[Tensor]  # rows of the border's queries
    by_lse: list[Tensor | None]  # the same of tensors (batch, heads, rows)
    mask: Tensor | None  # (batch, rows) bool, of the frame's keys, where there is one


def framed(
    k: Tensor,
    v: Tensor,
    received: Tensor,
    borders: Sequence[Border],
    by_query: Sequence[Tensor],
    by_lse: Sequence[Tensor | None] = (),
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Framed]:
    """Of each border k and v in its frame, and the rows of its queries.

    by_query: (batch, rows, heads, head_dim) each. by_lse: (batch, heads, rows) each, or None. masks: a padding mask
    (batch, rows) bool, and that of the received rows (rows, batch) uint8.
    """
    if kernel_serves(k):
        return _framed_by_kernel(k, v, received, borders, by_query, by_lse, masks)
    results = []
    for border in borders:
        places, rows = border.their_rows
        frames = [own_in_frame(x, border) for x in (k, v)]
        for n, frame in enumerate(frames):
            by_head = frame.view(len(frame), -1, frame.shape[-1])
            by_head.index_copy_(1, places, received[:, n].index_select(0, rows).transpose(0, 1))
            if border.lacking is not None:  # a NaN in the row that stands there would reach its neighbours
                by_head.index_fill_(1, border.lacking, 0.0)
        query_rows, lse_rows = list(by_query), list(by_lse)
        if border.queries is not None:
            query_rows = [x.index_select(1, border.queries) for x in by_query]
            lse_rows = [None if x is None else x.index_select(2, border.queries) for x in by_lse]
        results.append(Framed(*frames, query_rows, lse_rows, _framed_mask(border, k.shape[2], *masks)))
    return results


def _framed_mask(border: Border, kv_heads: int, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    places, rows = border.their_rows
    framed_mask = own_in_frame(mask, border)
    framed_mask[:, places // kv_heads] = padding[rows].bool().T
    return framed_mask


def own_in_frame(x: Tensor, border: Border) -> Tensor:
    """Own rows of a tensor (batch, rows, ...) in a border's frame; any in the places of others, of no rows zeros."""
    if x.shape[1]:
        return x.index_select(1, border.filled)
    return x.new_zeros(len(x), len(border.filled), *x.shape[2:])


def placed(
    shard_rows: Tensor,
    border_rows: Sequence[Tensor],
    layout: HaloLayout,
    lse: Tensor | None = None,
    lses: Sequence[Tensor] = (),
) -> None:
    """Writes the rows of each border's queries into the shard's (batch, rows, heads, head_dim), and `lses` into lse."""
    queries = [border.queries for border in layout.borders]
    if kernel_serves(shard_rows):
        from hilbert_lib.attention.triton.copies import Copy, scatter_rows

        copies = [Copy(rows, shard_rows, places) for rows, places in zip(border_rows, queries, strict=True)]
        copies += [Copy(_by_row(rows), _by_row(lse), places) for rows, places in zip(lses, queries, strict=False)]
        scatter_rows(copies)
        return
    for rows, places in zip(border_rows, queries, strict=True):
        shard_rows.index_copy_(1, places, rows)
    for rows, places in zip(lses, queries, strict=False):
        lse.index_copy_(2, places, rows)


def answered(border_grads: Sequence[Tensors], received: Tensor, layout: HaloLayout, dtype: torch.dtype) -> Tensor:
    """Gradients of the received rows, (rows, 2, batch, head_dim): the borders', one after the other."""
    if kernel_serves(received):
        from hilbert_lib.attention.triton.copies import Part, sum_rows

        answer = received.new_empty(received.shape, dtype=dtype)
        parts = [
            Part(part.k, part.v, border.received) for border, part in zip(layout.borders, border_grads, strict=True)
        ]
        sum_rows((_of_sent(answer, 0), _of_sent(answer, 1)), None, parts)
        return answer
    answer = received.new_zeros(received.shape, dtype=dtype)
    for border, part in zip(layout.borders, border_grads, strict=True):
        places, rows = border.their_rows
        for n in (0, 1):  # no row twice in a border: no sum depends on chance
            arrived = part[n + 1].flatten(1, 2).index_select(1, places)
            answer[:, n].index_add_(0, rows, arrived.transpose(0, 1))
    return answer


def added(
    grads: Sequence[Tensor] | None, border_grads: Sequence[Tensors], answer: Tensor, k: Tensor, layout: HaloLayout
) -> list[Tensor]:
    """Gradients of k and v, summed in this order: the borders, other ranks by rank, the interior.

    grads: those of the interior, which are added to in place. None if there is no interior: then all rows are touched.
    border_grads: the gradients of each border's tensors. Each sum is rounded once.
    """
    if kernel_serves(k):
        return _added_by_kernel(grads, border_grads, answer, k, layout)
    sums = [answer.new_zeros(len(k), len(layout.touched), *k.shape[2:]) for _ in (0, 1)]
    for border, part in zip(layout.borders, border_grads, strict=True):
        places, touched = border.own_rows
        for n in (0, 1):
            sums[n].index_add_(1, touched, part[n + 1].index_select(1, places))
    for span, touched in layout.answers:
        for n in (0, 1):
            sums[n].flatten(1, 2).index_add_(1, touched, answer[span, n].transpose(0, 1))
    if grads is None:
        return [x.to(k.dtype) for x in sums]
    for grad, total in zip(grads, sums, strict=True):
        grad.index_copy_(1, layout.touched, grad.index_select(1, layout.touched).add_(total))
    return list(grads)


def _framed_by_kernel(
    k: Tensor,
    v: Tensor,
    received: Tensor,
    borders: Sequence[Border],
    by_query: Sequence[Tensor],
    by_lse: Sequence[Tensor | None],
    masks: tuple[Tensor | None, Tensor | None],
) -> list[Framed]:
    from hilbert_lib.attention.triton.copies import Copy, gather_rows

    batch, _, kv_heads, head_dim = k.shape
    copies, results = [], []
    for border in borders:
        frames = [k.new_empty(batch, len(border.filled), kv_heads, head_dim) for _ in (0, 1)]
        copies += [Copy(frames[n], x, border.frame, _of_sent(received, n)) for n, x in enumerate((k, v))]
        query_rows, lse_rows = list(by_query), list(by_lse)
        if border.queries is not None:
            count = len(border.queries)
            query_rows = [x.new_empty(batch, count, *x.shape[2:]) for x in by_query]
            copies += [Copy(target, x, border.queries) for target, x in zip(query_rows, by_query, strict=True)]
            lse_rows = [None if x is None else x.new_empty(*x.shape[:2], count) for x in by_lse]
            copies += [
                Copy(_by_row(target), _by_row(x), border.queries)
                for target, x in zip(lse_rows, by_lse, strict=True)
                if x is not None
            ]
        framed_mask, (mask, padding) = None, masks
        if mask is not None:
            framed_mask = mask.new_empty(batch, len(border.filled))
            own_and_theirs = _of_mask(mask.view(torch.uint8)), border.cells, _of_mask(padding.T)
            copies.append(Copy(_of_mask(framed_mask.view(torch.uint8)), *own_and_theirs))
        results.append(Framed(*frames, query_rows, lse_rows, framed_mask))
    gather_rows(copies)
    return results


def _added_by_kernel(
    grads: Sequence[Tensor] | None, border_grads: Sequence[Tensors], answer: Tensor, k: Tensor, layout: HaloLayout
) -> list[Tensor]:
    from hilbert_lib.attention.triton.copies import Answers, Part, sum_rows

    parts = [Part(part.k, part.v, border.touched) for border, part in zip(layout.borders, border_grads, strict=True)]
    totals = [k.new_empty(k.shape) for _ in (0, 1)] if grads is None else list(grads)
    sum_rows(tuple(totals), None if grads is None else layout.touched, parts, Answers(answer, layout.returned))
    return totals


def _of_sent(rows: Tensor, n: int) -> Tensor:
    # k (n = 0) or v (n = 1) out of rows (rows, 2, batch, head_dim), as (batch, rows, 1, head_dim).
    return rows[:, n].transpose(0, 1)[:, :, None]


def _of_mask(mask: Tensor) -> Tensor:
    # (batch, rows) as rows of one head of one element.
    return mask[:, :, None, None]


def _by_row(lse: Tensor) -> Tensor:
    return lse.transpose(1, 2)[..., None]
