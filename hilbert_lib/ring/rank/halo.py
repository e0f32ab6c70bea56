"""One rank's part of attention on a grid: the interior, rows of k and v on their way beside it, then the border."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention import operators
from hilbert_lib.attention.request import GridPart, Request, Tensors, working_dtype
from hilbert_lib.ring.plan.halo import HaloPlan, Slab
from hilbert_lib.ring.plan.shards import Box, Runs, positions
from hilbert_lib.ring.rank.exchange import Beside, Kept, alive, exchange


@dataclass(frozen=True, eq=False)
class Border:
    """Queries of a rank whose keys, own ones and others', are put together in a frame."""

    part: GridPart
    slots: Tensor | None  # as in `Request`
    queries: Tensor | None  # their rows in the shard; None for all
    filled: Tensor  # of each row of the frame the shard's that it holds, or 0 where that is another's
    own: tuple[Tensor, Tensor]  # own rows in the frame, and which they are of those touched
    theirs: tuple[Tensor, Tensor]  # rows of KV heads in the frame, all heads of a cell in turn; of those received
    lacking: Tensor | None  # rows of KV heads in the frame that are neither, which nobody sees; None for none


@dataclass(frozen=True, eq=False)
class HaloLayout:
    """What one rank computes and exchanges, as index tensors."""

    interior: GridPart | None
    borders: tuple[Border, ...]
    touched: Tensor  # own rows of k and v whose gradients come from more than the interior
    rows: Tensor  # (3, rows sent), rows in the shard, KV heads, and rows of heads touched, destination by destination
    sent: tuple[int, ...]  # how many to each rank
    received: tuple[int, ...]  # how many from each rank
    travels: bool  # whether any rank sends anything

    @cached_property
    def answers(self) -> tuple[tuple[slice, Tensor], ...]:
        """For each rank that rows are sent to: which these are of those sent, and their rows of heads touched."""
        ends = tuple(accumulate(self.sent))
        spans = [slice(end - count, end) for end, count in zip(ends, self.sent, strict=True) if count]
        return tuple((span, self.rows[2, span]) for span in spans)


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


def layout_of(plan: HaloPlan, rank: int, device: torch.device) -> HaloLayout:
    """A rank's part of a plan, on a device."""
    rows, sent = [], []
    for cells, heads, source in plan.arriving:
        cells, heads = cells[source == rank], heads[source == rank]
        rows.append(torch.stack([plan.shards.slot(plan.shape, cells, rank), heads]))
        sent.append(len(cells))
    rows, received = torch.cat(rows, 1), plan.arriving[rank][2].bincount(minlength=plan.shards.ranks)
    inside, own, slabs = plan.interior(rank), plan.own(rank), plan.border(rank)
    frames = [_frame(plan, rank, slab) for slab in slabs]
    stored = [_own_rows(plan, rank, frame) for frame in frames]
    touched = torch.arange(plan.shards.count(plan.shape, rank), device="cpu")
    if inside:
        touched = torch.cat([rows[0], *(at for _, at in stored)]).unique()
    borders = []
    for slab, frame, (places, at) in zip(slabs, frames, stored, strict=True):
        queries = plan.shards.slot(plan.shape, _cells(slab.queries, plan.shape), rank) if inside else None
        filled = torch.zeros(len(frame), dtype=torch.int64, device="cpu").index_copy_(0, places, at)
        own_rows = places, torch.searchsorted(touched, at)
        theirs = _their_rows(plan, rank, frame)
        index = _slots(plan, frame), queries, filled, own_rows, theirs, _lacking(plan, len(frame), places, theirs[0])
        part = GridPart(slab.queries, slab.queries, slab.keys, in_float=True)
        borders.append(Border(part, *_on(index, device)))
    return HaloLayout(
        GridPart(own, inside, own) if inside else None,
        tuple(borders),
        touched.to(device),
        torch.cat([rows, torch.searchsorted(touched, rows[:1]) * len(plan.neighbourhoods) + rows[1:]]).to(device),
        tuple(sent),
        tuple(received.tolist()),
        bool(plan.rows),
    )


def _frame(plan: HaloPlan, rank: int, slab: Slab) -> Tensor:
    # The cells whose k and v are put together, in that order; those that a query sees are own ones or arrive.
    if isinstance(plan.shards, Runs):
        return torch.cat([plan.shards.cells(plan.shape, rank), plan.arriving[rank][0].unique()])
    return _cells(slab.keys, plan.shape)


def _cells(box: Box, shape: tuple[int, ...]) -> Tensor:
    lines = [torch.tensor(line, device="cpu") % side for line, side in zip(box, shape, strict=True)]
    return positions(lines, shape)


def _own_rows(plan: HaloPlan, rank: int, frame: Tensor) -> tuple[Tensor, Tensor]:
    # Of the own cells in a frame: rows in the frame, and in the shard.
    places = (plan.shards.owner(plan.shape, frame) == rank).nonzero()[:, 0]
    return places, plan.shards.slot(plan.shape, frame[places], rank)


def _their_rows(plan: HaloPlan, rank: int, frame: Tensor) -> tuple[Tensor, Tensor]:
    # Of the rows received that lie in a frame: rows of KV heads in the frame, and which they are.
    cells, heads, _ = plan.arriving[rank]
    ordered, place = frame.sort()
    at = torch.searchsorted(ordered, cells).clamp(max=len(frame) - 1)
    found = (ordered[at] == cells).nonzero()[:, 0]
    return place[at[found]] * len(plan.neighbourhoods) + heads[found], found


def _lacking(plan: HaloPlan, rows: int, own: Tensor, theirs: Tensor) -> Tensor | None:
    held = torch.zeros(rows, len(plan.neighbourhoods), dtype=torch.bool, device="cpu")
    held[own] = True
    lacking = (~held.flatten().index_fill_(0, theirs, True)).nonzero()[:, 0]
    return lacking if len(lacking) else None


def _slots(plan: HaloPlan, frame: Tensor) -> Tensor | None:
    if not isinstance(plan.shards, Runs):
        return None
    slots = torch.full((plan.neighbourhoods[0].length,), -1, dtype=torch.int32, device="cpu")
    slots[frame] = torch.arange(len(frame), dtype=torch.int32, device="cpu")
    return slots


def _on(index: tuple, device: torch.device) -> tuple:
    return tuple(_on(x, device) if isinstance(x, tuple) else x if x is None else x.to(device) for x in index)


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
