"""A rank's part of a plan for a grid, as index tensors: what it computes, sends, receives and puts together."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hilbert_lib.attention.request import POINTS, POINTS_IN_FLOAT, GridPart
from hilbert_lib.ring.plan.halo import HaloPlan, Slab
from hilbert_lib.ring.plan.points import PointParts, Travelling
from hilbert_lib.ring.plan.shards import Box, Runs, positions


@dataclass(frozen=True, eq=False)
class Border:
    """Queries of a rank whose keys, own ones and others', are put together in a frame."""

    part: GridPart
    slots: Tensor | None  # as in `Request`
    queries: Tensor | None  # their rows in the shard; None for all
    filled: Tensor  # of each row of the frame the shard's that it holds, or 0 where that is another's
    own_rows: tuple[Tensor, Tensor]  # own rows in the frame, and which they are of those touched
    their_rows: tuple[Tensor, Tensor]  # rows of KV heads in the frame, all heads of a cell in turn; of those received
    lacking: Tensor | None  # rows of KV heads in the frame that are neither, which nobody sees; None for none
    # The same as a kernel looks it up, which walks over where rows go.
    frame: Tensor  # of each row of KV heads in the frame the shard's, or -2 - n for received row n, or -1 for none
    cells: Tensor  # of each row of the frame the shard's, or -2 - n for received row n, of any head, or -1 for none
    touched: Tensor  # of each touched row of the shard the frame's, or -1
    received: Tensor  # of each received row the row of KV heads in the frame, or -1
    lists: tuple[Tensor, ...] = ()  # of points, as in `Request`: of its queries and the rows of its frame


@dataclass(frozen=True, eq=False)
class HaloLayout:
    """The parts that one rank computes and the rows that it exchanges, as index tensors."""

    interior: GridPart | None
    borders: tuple[Border, ...]
    touched: Tensor  # own rows of k and v whose gradients come from more than the interior
    rows: Tensor  # (3, rows sent), rows in the shard, KV heads, and rows of heads touched, destination by destination
    sent: tuple[int, ...]  # how many to each rank
    received: tuple[int, ...]  # how many from each rank
    travels: bool  # whether any rank sends anything
    # The same as a kernel looks it up.
    packed: Tensor  # of each row sent the row of KV heads in the shard
    returned: Tensor  # (rows of heads touched, columns): which of those sent each one is, rank after rank, or -1
    interior_lists: tuple[Tensor, ...] = ()  # of points, as in `Request`

    @cached_property
    def answers(self) -> tuple[tuple[slice, Tensor], ...]:
        """Places of the rows sent to each rank: their span in the rows sent, and their rows of heads touched."""
        ends = tuple(accumulate(self.sent))
        spans = [slice(end - count, end) for end, count in zip(ends, self.sent, strict=True) if count]
        return tuple((span, self.rows[2, span]) for span in spans)


def layout_of(plan: HaloPlan, rank: int, device: torch.device) -> HaloLayout:
    """A rank's part of a plan, on a device."""
    rows, sent = [], []
    for cells, heads, source in plan.arriving:
        cells, heads = cells[source == rank], heads[source == rank]
        rows.append(torch.stack([plan.shards.slot(plan.shape, cells, rank), heads]))
        sent.append(len(cells))
    rows, received = torch.cat(rows, 1), plan.arriving[rank][2].bincount(minlength=plan.shards.ranks)
    inside, own_box, slabs = plan.interior(rank), plan.own(rank), plan.border(rank)
    frames = [_frame(plan, rank, slab) for slab in slabs]
    stored = [_own_rows(plan, rank, frame) for frame in frames]
    touched = torch.arange(plan.shards.count(plan.shape, rank), device="cpu")
    if inside:
        touched = torch.cat([rows[0], *(shard_rows for _, shard_rows in stored)]).unique()
    borders, kv_heads = [], len(plan.neighbourhoods)
    for slab, frame, (places, shard_rows) in zip(slabs, frames, stored, strict=True):
        queries = plan.shards.slot(plan.shape, _cells(slab.queries, plan.shape), rank) if inside else None
        filled = torch.zeros(len(frame), dtype=torch.int64, device="cpu").index_copy_(0, places, shard_rows)
        own_rows = places, torch.searchsorted(touched, shard_rows)
        theirs = _their_rows(plan, rank, frame)
        index = _slots(plan, frame), queries, filled, own_rows, theirs, _lacking(plan, len(frame), places, theirs[0])
        own_places = torch.full((len(touched),), -1, device="cpu").index_copy_(0, own_rows[1], places)
        their_places = torch.full((int(received.sum()),), -1, device="cpu").index_copy_(0, theirs[1], theirs[0])
        found = _found_in_frame(plan, filled, places, theirs)
        index += found, _cells_in_frame(found, kv_heads), own_places, their_places
        part = GridPart(slab.queries, slab.queries, slab.keys, in_float=True)
        borders.append(Border(part, *_on(index, device)))
    returned = torch.searchsorted(touched, rows[:1]) * kv_heads + rows[1:]
    return HaloLayout(
        GridPart(own_box, inside, own_box) if inside else None,
        tuple(borders),
        touched.to(device),
        torch.cat([rows, returned]).to(device),
        tuple(sent),
        tuple(received.tolist()),
        bool(plan.rows),
        (rows[0] * kv_heads + rows[1]).to(device),
        _columns(returned[0], len(touched) * kv_heads).to(device),
    )


def layout_of_points(parts: PointParts, travelling: Travelling, kv_heads: int, device: torch.device) -> HaloLayout:
    """A rank's part of points: an interior, and one border, in whose frame own keys stand before received ones.

    All KV heads of a point travel.
    It has no border where no query sees a key of another rank, and no interior where all do.
    """
    queries, keys = parts.border_queries.to(device), parts.border_keys.to(device)
    rows = travelling.rows.to(device)
    arriving, has_interior = sum(travelling.received), len(queries) < parts.queries
    touched = torch.cat([rows, keys]).unique() if has_interior else torch.arange(parts.keys, device=device)
    heads = torch.arange(kv_heads, device=device)
    received = torch.arange(arriving * kv_heads, device=device)
    their_places = len(keys) * kv_heads + received
    places = torch.arange(len(keys), device=device)
    border = Border(
        POINTS_IN_FLOAT,
        slots=None,
        queries=queries if has_interior else None,
        filled=torch.cat([keys, keys.new_zeros(arriving)]),
        own_rows=(places, torch.searchsorted(touched, keys)),
        their_rows=(their_places, received),
        lacking=None,
        frame=torch.cat([(keys[:, None] * kv_heads + heads).flatten(), -2 - received]),
        cells=torch.cat([keys, -2 - received.view(-1, kv_heads)[:, 0]]),
        touched=torch.full_like(touched, -1).index_copy_(0, torch.searchsorted(touched, keys), places),
        received=their_places,
        lists=tuple(x.to(device) for x in parts.border),
    )
    sent_rows, sent_heads = rows.repeat_interleave(kv_heads), heads.repeat(len(rows))
    returned = torch.searchsorted(touched, sent_rows) * kv_heads + sent_heads
    return HaloLayout(
        interior=POINTS if has_interior else None,
        borders=(border,) if len(queries) else (),
        touched=touched,
        rows=torch.stack([sent_rows, sent_heads, returned]),
        sent=tuple(count * kv_heads for count in travelling.sent),
        received=tuple(count * kv_heads for count in travelling.received),
        travels=bool(travelling.by_ranks),
        packed=sent_rows * kv_heads + sent_heads,
        returned=_columns(returned, len(touched) * kv_heads),
        interior_lists=tuple(x.to(device) for x in parts.interior),
    )


def _frame(plan: HaloPlan, rank: int, slab: Slab) -> Tensor:
    # The cells whose k and v are put together, in that order; those that a query sees are own ones or arrive.
    if isinstance(plan.shards, Runs):
        return torch.cat([plan.shards.cells(plan.shape, rank), plan.arriving[rank][0].unique()])
    return _cells(slab.keys, plan.shape)


def _cells(box: Box, shape: tuple[int, ...]) -> Tensor:
    lines = [torch.tensor(line, device="cpu") % cells for line, cells in zip(box, shape, strict=True)]
    return positions(lines, shape)


def _own_rows(plan: HaloPlan, rank: int, frame: Tensor) -> tuple[Tensor, Tensor]:
    # The own cells in a frame: their rows in the frame, and in the shard.
    places = (plan.shards.owner(plan.shape, frame) == rank).nonzero()[:, 0]
    return places, plan.shards.slot(plan.shape, frame[places], rank)


def _their_rows(plan: HaloPlan, rank: int, frame: Tensor) -> tuple[Tensor, Tensor]:
    # The received rows that lie in a frame: their rows of KV heads in the frame, and their numbers.
    cells, heads, _ = plan.arriving[rank]
    ordered, place = frame.sort()
    nearest = torch.searchsorted(ordered, cells).clamp(max=len(frame) - 1)
    arrivals = (ordered[nearest] == cells).nonzero()[:, 0]
    return place[nearest[arrivals]] * len(plan.neighbourhoods) + heads[arrivals], arrivals


def _lacking(plan: HaloPlan, rows: int, own_places: Tensor, their_rows: Tensor) -> Tensor | None:
    is_filled = torch.zeros(rows, len(plan.neighbourhoods), dtype=torch.bool, device="cpu")
    is_filled[own_places] = True
    lacking = (~is_filled.flatten().index_fill_(0, their_rows, True)).nonzero()[:, 0]
    return lacking if len(lacking) else None


def _found_in_frame(plan: HaloPlan, filled: Tensor, own_places: Tensor, their_rows: tuple[Tensor, Tensor]) -> Tensor:
    heads = torch.arange(len(plan.neighbourhoods), device="cpu")
    sources = torch.full((len(filled), len(heads)), -1, device="cpu")
    sources[own_places] = filled[own_places, None] * len(heads) + heads
    return sources.flatten().index_copy_(0, their_rows[0], -2 - their_rows[1])


def _cells_in_frame(found: Tensor, kv_heads: int) -> Tensor:
    # Of the rows of KV heads that were found in a frame, those of each cell; a cell of this rank has all its heads.
    by_cell = found.view(-1, kv_heads)
    return (by_cell.amax(1) // kv_heads).where(by_cell.amax(1) >= 0, by_cell.amin(1))


def _columns(places: Tensor, count: int) -> Tensor:
    # For each place the indices at which it occurs, ascending, then -1 (count, columns).
    ordered, numbers = places.sort(stable=True)
    column = torch.arange(len(places), device=places.device) - torch.searchsorted(ordered, ordered)
    table = torch.full((count, int(column.max()) + 1 if len(places) else 0), -1, device=places.device)
    table[ordered, column] = numbers
    return table


def _slots(plan: HaloPlan, frame: Tensor) -> Tensor | None:
    if not isinstance(plan.shards, Runs):
        return None
    slots = torch.full((plan.neighbourhoods[0].length,), -1, dtype=torch.int32, device="cpu")
    slots[frame] = torch.arange(len(frame), dtype=torch.int32, device="cpu")
    return slots


def _on(index: tuple, device: torch.device) -> tuple:
    return tuple(_on(x, device) if isinstance(x, tuple) else x if x is None else x.to(device) for x in index)
