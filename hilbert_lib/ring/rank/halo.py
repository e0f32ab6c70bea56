"""One rank's part of attention on a grid: the interior, rows of k and v on their way beside it, then the border.

Of points the interior is the queries that see own keys alone, as its lists say, and there is one border.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention import operators
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.ring.rank import copies
from hilbert_lib.ring.rank.exchange import Beside, Saved, alive, exchange
from hilbert_lib.ring.rank.halo_layout import Border, HaloLayout


@dataclass(frozen=True, eq=False)
class HaloJob:
    """The work of a rank, without its tensors."""

    layout: HaloLayout
    request: Request  # with the shard's padding mask
    backend: str  # of the interior
    border_backends: tuple[str, ...]  # one for each border
    known_group: "ref[ProcessGroup]"

    @property
    def borders(self) -> Iterator[tuple[Border, str]]:
        """The borders, and the backend of each."""
        return zip(self.layout.borders, self.border_backends, strict=True)


def results(tensors: Tensors, job: HaloJob, confirm: Callable[[], None]) -> tuple[Tensor, Tensor, Saved]:
    """Output like q and lse (batch, heads, rows) of a rank's queries, and what the backward needs of other ranks.

    `confirm` is called when the interior is under way, before anything is sent.
    """
    layout, q, out = job.layout, tensors.q, None
    # First: these small kernels would find no room beside the interior.
    packed = copies.packed(tensors.k, tensors.v, layout, job.request.key_padding_mask)
    beside = Beside(q.device)
    if layout.interior:
        request = replace(job.request, part=layout.interior, lists=layout.interior_lists)
        out, lse = operators.attention(tensors, request, job.backend)
    confirm()
    with beside:
        received, padding = _received(packed, job)
        border_results = _borders_forward(tensors, job, received, padding)
    saved = {"received": received} if padding is None else {"received": received, "padding": padding}
    if out is None:  # the border is all, or there are no cells
        empty = q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], 0, dtype=WORKING_DTYPE[q.dtype])
        return *(border_results[0] if border_results else empty), saved
    outs, lses = zip(*border_results, strict=True) if border_results else ((), ())
    copies.placed(out, outs, layout, lse, lses)
    return out, lse, saved


def gradients(
    dout: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, job: HaloJob, saved: Saved, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of a rank's tensors, from those of its out and lse and what `results` returned; the same bits always.

    Gradients of k and v are summed in float32 (float64 for float64): borders, then other ranks, then the interior.
    """
    layout, dq, bias_grads = job.layout, None, []
    received, padding = saved["received"], saved.get("padding")
    beside = Beside(dout.device)
    if layout.interior:
        request = replace(job.request, part=layout.interior, lists=layout.interior_lists)
        own_lse, own_dlse = _of_interior(lse, dlse, layout)
        grads = operators.attention_backward(dout, tensors, out, own_lse, request, job.backend, own_dlse)
        bias_grads.append(grads.bias)
        dq, *grads = grads.with_rows
    with beside:
        border_grads = _borders_backward(dout, tensors, out, lse, dlse, job, received, padding)
        answer = copies.answered(border_grads, received, layout, lse.dtype)
        if layout.travels:
            answer = exchange(answer, layout.received, layout.sent, alive(job.known_group)).wait()
        extra = _extra_sums(border_grads, answer, tensors)
        bias_grads += [part.bias for part in border_grads]
        if not layout.interior:
            grads = copies.added(None, border_grads, answer, tensors.k, layout)
    if not layout.interior:
        extra = [x.to(y.dtype) for x, y in zip(extra, tensors.extra, strict=True)]
        dq = border_grads[0].q if border_grads else torch.empty_like(tensors.q)
        return Tensors(dq, *grads, *extra, _bias_sum(bias_grads, tensors.bias))
    copies.placed(dq, [part.q for part in border_grads], layout)
    grads[:2] = copies.added(grads[:2], border_grads, answer, tensors.k, layout)
    for grad, extra_grad in zip(grads[2:], extra, strict=True):
        grad.add_(extra_grad)
    return Tensors(dq, *grads, _bias_sum(bias_grads, tensors.bias))


def _of_interior(lse: Tensor, dlse: Tensor | None, layout: HaloLayout) -> tuple[Tensor, Tensor | None]:
    # Those of the interior's backward. Of points, the lists that are turned round hold the border's queries, too: with
    # an lse of +inf these have no weight.
    if not layout.interior_lists:
        return lse, dlse
    for border in layout.borders:
        lse = lse.index_fill(2, border.queries, torch.inf)
        dlse = None if dlse is None else dlse.index_fill(2, border.queries, 0.0)
    return lse, dlse


def _bias_sum(bias_grads: list[Tensor], bias: Tensor | None) -> Tensor | None:
    # The gradient of a bias, of the interior and then of each border: of this rank's queries.
    if bias is None:
        return None
    total = bias.new_zeros(bias.shape, dtype=WORKING_DTYPE[bias.dtype])
    for grad in bias_grads:
        total += grad
    return total.to(bias.dtype)


def _extra_sums(border_grads: list[Tensors], answer: Tensor, tensors: Tensors) -> list[Tensor]:
    # Gradients of the extra keys, summed over this rank's borders.
    sums = [answer.new_zeros(x.shape) for x in tensors.extra]
    for grads in border_grads:
        for total, grad in zip(sums, grads.extra, strict=True):
            total += grad
    return sums


def _borders_forward(
    tensors: Tensors, job: HaloJob, received: Tensor, padding: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    masks, borders = (job.request.key_padding_mask, padding), job.layout.borders
    framed, results = copies.framed(tensors.k, tensors.v, received, borders, [tensors.q], masks=masks), []
    for (border, backend), frame in zip(job.borders, framed, strict=True):
        border_tensors, border_request = _of_border(tensors, border, frame, job.request)
        results.append(operators.attention(border_tensors, border_request, backend))
    return results


def _borders_backward(
    dout: Tensor, tensors: Tensors, out: Tensor, lse: Tensor, dlse: Tensor | None, job: HaloJob, received: Tensor,
    padding: Tensor | None,
) -> list[Tensors]:  # fmt: skip
    by_query, borders = (tensors.q, dout, out), job.layout.borders
    masks = job.request.key_padding_mask, padding
    framed, results = copies.framed(tensors.k, tensors.v, received, borders, by_query, (lse, dlse), masks), []
    for (border, backend), frame in zip(job.borders, framed, strict=True):
        border_tensors, border_request = _of_border(tensors, border, frame, job.request)
        _, own_dout, own_out = frame.by_query
        own_lse, own_dlse = frame.by_lse
        results.append(
            operators.attention_backward(own_dout, border_tensors, own_out, own_lse, border_request, backend, own_dlse)
        )
    return results


def _received(packed: list[Tensor], job: HaloJob) -> tuple[Tensor, Tensor | None]:
    # The rows of other ranks, shaped as `copies.packed` gives them, and their padding. All ranks call it.
    layout = job.layout
    if layout.travels:
        group = alive(job.known_group)
        arriving = [exchange(x, layout.sent, layout.received, group) for x in packed]
        packed = [message.wait() for message in arriving]
    return packed[0], packed[1] if len(packed) > 1 else None


def _of_border(tensors: Tensors, border: Border, frame: copies.Framed, request: Request) -> tuple[Tensors, Request]:
    # A border's tensors (its queries, and its frame for k and v), and its request.
    how = {"part": border.part, "slots": border.slots, "lists": border.lists, "key_padding_mask": frame.mask}
    _, _, _, *extra = tensors.with_rows
    return Tensors(frame.by_query[0], frame.k, frame.v, *extra, tensors.bias), replace(request, **how)
