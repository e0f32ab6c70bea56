"""What one call of neighbourhood attention asks for, validated: everything but the tensors with gradients."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.grid import Axis, Neighbourhood
from hilbert_lib.ordering import Ordering


class Part(NamedTuple):
    """Some queries of a grid and what they see: boxes of cells, a range for each axis, stored row by row.

    Where an axis wraps, past its end stands for from 0. With `Request.slots` a box ends with the grid, and says no more
    than where cells may be.
    """

    rows: tuple[range, ...]  # the cells of q, out and lse
    queries: tuple[range, ...]  # those of them that are computed
    keys: tuple[range, ...]  # the cells of k and v: all that these see, each once
    in_float: bool = False  # whether gradients of k and v are returned as they are summed, in float32 or float64


@dataclass(frozen=True, eq=False)
class Request:
    """One validated call of neighbourhood attention."""

    neighbourhoods: tuple[Neighbourhood, ...]  # one for each KV head
    scale: float = 1.0
    ordering: Ordering | None = None  # in which tokens are stored; None row by row
    key_padding_mask: Tensor | None = None  # (batch, seq) bool, True = no weight, by slots
    extra_padding_mask: Tensor | None = None  # (batch, extra) bool
    part: Part | None = None  # of the grid
    slots: Tensor | None = None  # (cells of the grid,) int32, each one's row in k, -1 for none: q has the first ones

    @cached_property
    def heads_by_window(self) -> dict[Neighbourhood, list[int]]:
        """The KV heads of each neighbourhood that occurs."""
        heads: dict[Neighbourhood, list[int]] = {}
        for head, near in enumerate(self.neighbourhoods):
            heads.setdefault(near, []).append(head)
        return heads

    @property
    def options(self) -> tuple:
        """All but tensors."""
        return self.neighbourhoods, self.scale, self.ordering, self.part


class Tensors(NamedTuple):
    """What has gradients: q (batch, seq, heads, head_dim), k, v with kv_heads, and the keys that every query sees."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra_k: Tensor  # (batch, extra, kv_heads, head_dim), extra may be 0
    extra_v: Tensor


def on_its_keys(request: Request) -> Request:
    """A part of a grid as a part of the smaller grid that its keys are: each query sees the same keys there.

    Raises ValueError where the rules along an axis are not those of a grid that ends with the keys.
    """
    frames, part = _on_its_keys(request.neighbourhoods, request.part)
    return replace(request, neighbourhoods=frames, part=part)


@lru_cache(maxsize=256)
def _on_its_keys(windows: tuple[Neighbourhood, ...], part: Part) -> tuple[tuple[Neighbourhood, ...], Part | None]:
    lines = [_on_keys(n, axis, part) for n, axis in enumerate(windows[0].axes)]
    rows, queries, edges = zip(*lines, strict=True)
    shape = tuple(map(len, part.keys))
    frames = tuple(Neighbourhood(shape, x.window, x.dilation, x.stride, x.is_causal, edges) for x in windows)
    own = Part(rows, queries, tuple(map(range, shape)), part.in_float)
    is_whole = own.rows == own.queries == own.keys and not own.in_float
    return frames, None if is_whole else own


def _on_keys(n: int, axis: Axis, part: Part) -> tuple[range, range, str]:
    # Of an axis: the rows of q and those computed, from the first key on, and what happens at the ends.
    rows, queries, keys = part.rows[n], part.queries[n], part.keys[n]
    is_whole = keys == range(axis.cells) == queries == rows
    wraps = axis.edge == "wrap" and not axis.is_causal
    cuts_groups = keys.start % axis.stride or (axis.is_causal and keys.stop % axis.stride and keys.stop != axis.cells)
    goes_round = wraps and len(keys) == axis.cells
    if not is_whole and (axis.dilation > 1 or (axis.stride > 1 and cuts_groups) or goes_round):
        raise ValueError(f"the keys along axis {n} are not a grid with the same rules: {axis}, {queries}, {keys}")
    first = (queries.start - keys.start) % axis.cells
    before = first - (queries.start - rows.start)
    edge = "clip" if wraps and not is_whole else axis.edge
    return range(before, before + len(rows)), range(first, first + len(queries)), edge


def cells_of(given: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """The cell in each row of q, -1 where it is not computed, and in each row of k."""
    device, part, near = given.q.device, request.part, request.neighbourhoods[0]
    if request.slots is not None:
        there = (request.slots >= 0).nonzero()[:, 0]
        cells = there[request.slots[there].argsort()]
        return cells[: given.q.shape[1]], cells
    if part is None:
        cells = torch.arange(near.length, device=device)
        cells = cells if request.ordering is None else request.ordering.to(device).perm
        return cells, cells
    lines = [torch.arange(near.shape[n], device=device)[None] for n in range(len(near.shape))]
    queries = [x.where((x >= own.start) & (x < own.stop), -1) for x, own in zip(lines, part.queries, strict=True)]
    queries = [x[:, own.start : own.stop] for x, own in zip(queries, part.rows, strict=True)]
    keys = [x.repeat(1, 2)[:, own.start : own.stop] for x, own in zip(lines, part.keys, strict=True)]
    (queries, there), (keys, _) = joined(near.shape, queries), joined(near.shape, keys)
    return queries.where(there, -1)[0], keys[0]


def joined(shape: tuple[int, ...], lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Positions in a box of the cells (tiles, n) of a product of lines, and which exist: on no line below 0."""
    cell, there = lines[0], lines[0] >= 0
    for side, line in zip(shape[1:], lines[1:], strict=True):
        cell = (cell[:, :, None] * side + line[:, None]).flatten(1)
        there = (there[:, :, None] & (line >= 0)[:, None]).flatten(1)
    return cell, there


def slots_of(request: Request, cells: Tensor) -> Tensor:
    """The row of each cell in storage."""
    if request.slots is not None:
        return request.slots[cells].long()
    return cells if request.ordering is None else request.ordering.to(cells.device).inverse[cells]


def padding_of(given: Tensors, request: Request) -> Tensor:
    """Which keys have no weight: (batch, seq + extra) bool."""
    masks = (request.key_padding_mask, given.k), (request.extra_padding_mask, given.extra_k)
    return torch.cat([x.new_zeros(x.shape[:2], dtype=torch.bool) if one is None else one for one, x in masks], 1)


def as_returned(sums: Tensors, given: Tensors, request: Request) -> Tensors:
    """Gradients in the dtypes in which they are returned."""
    kept = range(1, 3) if request.part and request.part.in_float else ()
    return Tensors(*(x if n in kept else x.to(y.dtype) for n, (x, y) in enumerate(zip(sums, given, strict=True))))
