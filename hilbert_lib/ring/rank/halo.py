"""One rank's part of attention on a grid: the interior, rows of k and v on their way beside it, then the border."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention import operators
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.ring.rank import copies
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
        none = q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], 0, dtype=WORKING_DTYPE[q.dtype])
        return *(found[0] if found else none), kept
    outs, lses = zip(*found, strict=True) if found else ((), ())
    copies.placed(out, outs, layout, lse, lses)
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
        found = []
        for border, backend in job.borders:
            found.append(_border_backward(dout, given, out, lse, border, backend, job, received, padding))
        answer = copies.answered(found, received, layout, lse.dtype)
        if layout.travels:
            answer = exchange(answer, layout.received, layout.sent, alive(job.known_group)).wait()
        extra = _extra_sums(found, answer, given)
        if not layout.interior:
            grads = copies.added(None, found, answer, given.k, layout)
    if not layout.interior:
        extra = [x.to(y.dtype) for x, y in zip(extra, given[3:], strict=True)]
        return Tensors(found[0].q if found else torch.empty_like(given.q), *grads, *extra)
    copies.placed(dq, [more.q for more in found], layout)
    grads[:2] = copies.added(grads[:2], found, answer, given.k, layout)
    for grad, more in zip(grads[2:], extra, strict=True):
        grad.add_(more)
    return Tensors(dq, *grads)


def _extra_sums(found: list[Tensors], answer: Tensor, given: Tensors) -> list[Tensor]:
    # Gradients of the extra keys, from the borders here.
    sums = [answer.new_zeros(x.shape) for x in given[3:]]
    for more in found:
        for total, own in zip(sums, more[3:], strict=True):
            total += own
    return sums


def _border_forward(
    given: Tensors, border: Border, backend: str, job: HaloJob, *received: Tensor | None
) -> tuple[Tensor, Tensor]:
    framed, asked, *_ = _framed(given, border, job.request, *received)
    return operators.forward(framed, asked, backend)


def _border_backward(
    dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, border: Border, backend: str, job: HaloJob,
    *received: Tensor | None,
) -> Tensors:  # fmt: skip
    framed, asked, (dout, out), lse = _framed(given, border, job.request, *received, by_query=(dout, out), lse=lse)
    return operators.backward(dout, framed, out, lse, asked, backend)


def _packed(k: Tensor, v: Tensor, job: HaloJob) -> list[Tensor]:
    # k and v (rows, 2, batch, head_dim) for other ranks, and whether they are padded (rows, batch) where that is asked.
    mask, sent = job.request.key_padding_mask, [copies.packed(k, v, job.layout)]
    return sent if mask is None else [*sent, mask.byte().T[job.layout.rows[0]]]


def _received(packed: list[Tensor], job: HaloJob) -> tuple[Tensor, Tensor | None]:
    # As `_packed`, of other ranks; all ranks call it.
    layout = job.layout
    if layout.travels:
        group = alive(job.known_group)
        arriving = [exchange(x, layout.sent, layout.received, group) for x in packed]
        packed = [each.wait() for each in arriving]
    return packed[0], packed[1] if len(packed) > 1 else None


def _framed(
    given: Tensors, border: Border, request: Request, received: Tensor, padding: Tensor | None,
    by_query: tuple[Tensor, ...] = (), lse: Tensor | None = None,
) -> tuple[Tensors, Request, list[Tensor], Tensor | None]:  # fmt: skip
    # The queries of a border with its frame for k and v, and what else is known of these queries.
    q, k, v, *extra = given
    frames, (q, *more), lse = copies.framed(k, v, received, border, (q, *by_query), lse)
    mask = request.key_padding_mask
    if mask is not None:
        places, rows = border.theirs
        mask = mask.index_select(1, border.filled)
        mask[:, places // k.shape[2]] = padding[rows].bool().T
    asked = replace(request, part=border.part, slots=border.slots, key_padding_mask=mask)
    return Tensors(q, *frames, *extra), asked, more, lse
