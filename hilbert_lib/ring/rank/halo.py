"""One rank's part of attention on a grid: the interior, rows of k and v on their way beside it, then the border."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention import operators
from hilbert_lib.attention.request import Request, Tensors, working_dtype
from hilbert_lib.ring.rank.exchange import Beside, Kept, alive, exchange
from hilbert_lib.ring.rank.halo_layout import Border, HaloLayout


@dataclass(frozen=True, eq=False)
class HaloJob:
    """What a rank computes, but for its tensors."""

    layout: HaloLayout
    request: Request  # with the shard's padding mask
    backend: str  # of the interior
    border_backends: tuple[str, ...]  # one for each border
    known_group: "ref[ProcessGroup]"

    @property
    def borders(self) -> Iterator[tuple[Border, str]]:
        """The borders, and the backend of each."""
        return zip(self.layout.borders, self.border_backends, strict=True)


def forward(given: Tensors, job: HaloJob, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Kept]:
    """Output like q and lse (batch, heads, rows) of a rank's queries, and what the backward needs of other ranks.

    `confirm` is called when the interior is under way, before anything is sent.
    """
    layout, q, out = job.layout, given.q, None
    packed = _packed(given.k, given.v, job)  # first: these small kernels would find no room beside the interior
    beside = Beside(q.device)
    if layout.interior:
        out, lse = operators.forward(given, replace(job.request, part=layout.interior), job.backend)
    confirm()
    with beside:
        received, padding = _received(packed, job)
        found = [_border_forward(given, *border, job, received, padding) for border in job.borders]
    kept = {"received": received} if padding is None else {"received": received, "padding": padding}
    if out is None:  # the border is all, or there are no cells
        none = q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], 0, dtype=working_dtype(q.dtype))
        return *(found[0] if found else none), kept
    for border, (some_out, some_lse) in zip(layout.borders, found, strict=True):
        out.index_copy_(1, border.queries, some_out)
        lse.index_copy_(2, border.queries, some_lse)
    return out, lse, kept


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, job: HaloJob, kept: Kept) -> Tensors:
    """Gradients of a rank's tensors, from the gradient of its out and what `forward` returned; the same bits always.

    Those of k and v are added in float32 (float64 for float64): of borders, other ranks in their order, the interior.
    """
    layout, dq = job.layout, None
    received, padding = kept["received"], kept.get("padding")
    beside = Beside(dout.device)
    if layout.interior:
        dq, *grads = operators.backward(dout, given, out, lse, replace(job.request, part=layout.interior), job.backend)
    with beside:
        answer, found = received.new_zeros(received.shape, dtype=lse.dtype), []
        for border, backend in job.borders:
            found.append(_border_backward(dout, given, out, lse, border, backend, job, received, padding))
            places, rows = border.theirs
            for n in (0, 1):  # each row once: no sum depends on chance
                arrived = found[-1][n + 1].flatten(1, 2).index_select(1, places)
                answer[:, n].index_add_(0, rows, arrived.transpose(0, 1))
        if layout.travels:
            answer = exchange(answer, layout.received, layout.sent, alive(job.known_group)).wait()
        sums = _sums(found, answer, given, layout)
    if not layout.interior:
        sums = [x.to(y.dtype) for x, y in zip(sums, given[1:], strict=True)]
        return Tensors(found[0].q if found else torch.empty_like(given.q), *sums)
    for border, more in zip(layout.borders, found, strict=True):
        dq.index_copy_(1, border.queries, more.q)
    for grad, more in zip(grads[:2], sums[:2], strict=True):
        grad.index_copy_(1, layout.touched, grad.index_select(1, layout.touched).add_(more))
    for grad, more in zip(grads[2:], sums[2:], strict=True):
        grad.add_(more)
    return Tensors(dq, *grads)


def _sums(found: list[Tensors], answer: Tensor, given: Tensors, layout: HaloLayout) -> list[Tensor]:
    # Gradients of the touched rows of k and v, and of the extra keys, from the borders here and on other ranks.
    shapes = [(len(x), len(layout.touched), *x.shape[2:]) if n < 2 else x.shape for n, x in enumerate(given[1:])]
    sums = [answer.new_zeros(shape) for shape in shapes]
    for border, more in zip(layout.borders, found, strict=True):
        places, touched = border.own
        for n in (0, 1):
            sums[n].index_add_(1, touched, more[n + 1].index_select(1, places))
            sums[n + 2] += more[n + 3]
    for span, touched in layout.answers:
        for n in (0, 1):
            sums[n].flatten(1, 2).index_add_(1, touched, answer[span, n].transpose(0, 1))
    return sums


def _border_forward(
    given: Tensors, border: Border, backend: str, job: HaloJob, *received: Tensor | None
) -> tuple[Tensor, Tensor]:
    framed, asked = _framed(given, border, job.request, *received)
    return operators.forward(framed, asked, backend)


def _border_backward(
    dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, border: Border, backend: str, job: HaloJob,
    *received: Tensor | None,
) -> Tensors:  # fmt: skip
    framed, asked = _framed(given, border, job.request, *received)
    if border.queries is not None:
        dout, out = (x.index_select(1, border.queries) for x in (dout, out))
        lse = lse.index_select(2, border.queries)
    return operators.backward(dout, framed, out, lse, asked, backend)


def _packed(k: Tensor, v: Tensor, job: HaloJob) -> list[Tensor]:
    # k and v (rows, 2, batch, head_dim) for other ranks, and whether they are padded (rows, batch) where that is asked.
    mask, (rows, heads, _) = job.request.key_padding_mask, job.layout.rows
    packed = [torch.stack([x.permute(1, 2, 0, 3)[rows, heads] for x in (k, v)], 1)]
    return packed if mask is None else [*packed, mask.byte().T[rows]]


def _received(packed: list[Tensor], job: HaloJob) -> tuple[Tensor, Tensor | None]:
    # As `_packed`, of other ranks; all ranks call it.
    layout = job.layout
    if layout.travels:
        group = alive(job.known_group)
        arriving = [exchange(x, layout.sent, layout.received, group) for x in packed]
        packed = [each.wait() for each in arriving]
    return packed[0], packed[1] if len(packed) > 1 else None


def _framed(
    given: Tensors, border: Border, request: Request, received: Tensor, padding: Tensor | None
) -> tuple[Tensors, Request]:
    # The queries of a border, with its frame for k and v.
    q, k, v, *extra = given
    places, rows = border.theirs
    frames = [x.index_select(1, border.filled) for x in (k, v)]
    for n, frame in enumerate(frames):
        by_head = frame.view(len(frame), -1, frame.shape[-1])
        by_head.index_copy_(1, places, received[:, n].index_select(0, rows).transpose(0, 1))
        if border.lacking is not None:  # a NaN in the row that stands there would reach its neighbours
            by_head.index_fill_(1, border.lacking, 0.0)
    mask = request.key_padding_mask
    if mask is not None:
        mask = mask.index_select(1, border.filled)
        mask[:, places // k.shape[2]] = padding[rows].bool().T
    q = q if border.queries is None else q.index_select(1, border.queries)
    asked = replace(request, part=border.part, slots=border.slots, key_padding_mask=mask)
    return Tensors(q, *frames, *extra), asked
