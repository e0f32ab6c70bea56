"""Sequences that are padded on the left, moved to row 0, so that every backend serves them.

    rows of k and q   .  .  .  a  b  c  d  e    key_start = 3
    moved             a  b  c  d  e  .  .  .    rows past the end are seen by no row before it where all is causal;
                                                elsewhere a key_padding_mask hides them

It costs a copy of q, k, v and out.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.starts import begins_of
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.union import Union


def is_alignable(request: Request) -> bool:
    """Whether sequences may be moved to row 0: q has all rows, and no query's keys depend on the sequence's length."""
    if request.key_start is None or request.query_start is not None or request.query_starts is not None:
        return False
    return all(map(_has_no_end, _patterns(request)))


def aligned_request(request: Request) -> Request:
    """The request of sequences at row 0, for the choice of a backend. A mask that it needs is empty here."""
    padding = request.key_padding_mask
    if padding is None and not _is_causal(request):
        padding = request.key_start.new_empty(0, dtype=torch.bool)
    return replace(request, key_start=None, key_padding_mask=padding)


def aligned_forward(run: Callable, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output and lse. run: the forward of a backend, which is given sequences at row 0."""
    rows = _Rows(request, inputs)
    out, lse = run(rows.moved(inputs), rows.request())
    lse = rows.back(lse.transpose(1, 2), -torch.inf).transpose(1, 2)
    return rows.back(out, 0.0), lse


def aligned_backward(
    run: Callable, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Gradients. run: the backward of a backend, which is given sequences at row 0."""
    rows = _Rows(request, inputs)
    # Rows past the end of a sequence have probability exp(score - inf) = 0, and no gradient.
    lse = rows.to_front(lse.transpose(1, 2), torch.inf).transpose(1, 2).contiguous()
    if dlse is not None:
        dlse = rows.to_front(dlse.transpose(1, 2), 0.0).transpose(1, 2).contiguous()
    dout, out = (rows.to_front(x, 0.0) for x in (dout, out))
    dq, dk, dv, *extra = run(dout, rows.moved(inputs), out, lse, rows.request(), dlse=dlse)
    return Tensors(*(rows.back(x, 0.0) for x in (dq, dk, dv)), *extra)


class _Rows:
    """The rows of a batch, moved so that each sequence begins at row 0, and back."""

    def __init__(self, request: Request, inputs: Tensors):
        count = inputs.k.shape[1]
        begins, row = begins_of(request, count), torch.arange(count, device=inputs.k.device)
        self._unaligned = request
        self._source, self._target = (row + begins) % count, (row - begins) % count  # (batch, count)
        self._before, self._past = row < begins, row >= count - begins

    def moved(self, inputs: Tensors) -> Tensors:
        """q, k and v with each sequence at row 0."""
        return Tensors(*(_rows(x, self._source) for x in inputs[:3]), *inputs[3:])

    def to_front(self, x: Tensor, past: float) -> Tensor:
        """A tensor (batch, rows, ...) with each sequence at row 0, and this value past its end."""
        return _rows(x, self._source).masked_fill_(_as_wide(self._past, x), past)

    def back(self, x: Tensor, before: float) -> Tensor:
        """The rows moved back, with this value before each sequence."""
        return _rows(x, self._target).masked_fill_(_as_wide(self._before, x), before)

    def request(self) -> Request:
        """The request of the moved rows."""
        padding = self._unaligned.key_padding_mask
        padding = None if padding is None else _rows(padding, self._source)
        if not _is_causal(self._unaligned):
            padding = self._past if padding is None else padding | self._past
        return replace(self._unaligned, key_start=None, key_padding_mask=padding)


def _rows(x: Tensor, numbers: Tensor) -> Tensor:
    # These rows of each sequence of x (batch, rows, ...), with heads first in memory where x has them so. With one
    # index torch copies whole rows, with two single elements. One serves where rows, or heads and rows, lie evenly.
    (batch, count), sequence = x.shape[:2], torch.arange(len(x), device=x.device)[:, None]
    if x.stride(0) == count * x.stride(1):
        return x.flatten(0, 1).index_select(0, (sequence * count + numbers).flatten()).view(x.shape)
    if x.dim() == 4 and x.stride(2) == count * x.stride(1) and x.stride(0) == x.shape[2] * x.stride(2):
        heads_first = x.transpose(1, 2)
        head = torch.arange(batch * x.shape[2], device=x.device).view(batch, -1, 1)
        each = (head * count + numbers[:, None]).flatten()
        return heads_first.flatten(0, 2).index_select(0, each).view(heads_first.shape).transpose(1, 2)
    return x[sequence, numbers]


def _as_wide(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


def _patterns(request: Request) -> tuple[Pattern, ...]:
    return request.pattern.patterns if isinstance(request.pattern, Union) else (request.pattern,)


def _has_no_end(pattern: Pattern) -> bool:
    # Whether a query sees the same keys however long its sequence is, but for those past the end. It does not where a
    # window is moved inside, or where the end cuts the last group of a stride.
    if isinstance(pattern, HeadNeighbourhoods):
        near = pattern.by_head[0]
        return near.stride[0] == 1 and (near.is_causal[0] or near.edge[0] == "clip")
    return pattern.length is None


def _is_causal(request: Request) -> bool:
    # Whether no query sees a later key.
    return all(
        pattern.by_head[0].is_causal[0] if isinstance(pattern, HeadNeighbourhoods) else request.is_causal
        for pattern in _patterns(request)
    )
