"""Parts of a grid: the smaller grid of a part's keys, and the cell in each row."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from hilbert_lib.attention.request import Ends, GridPart, Request, Tensors
from hilbert_lib.checks import integer, is_listed
from hilbert_lib.patterns.neighbourhood import Axis, HeadNeighbourhoods, Neighbourhood


def part_of_box(query_box: object, shape: tuple[int, ...]) -> GridPart | None:
    """The argument `query_box`, checked, as a part of the grid whose keys are all cells; None for all cells."""
    if query_box is None:
        return None
    if not is_listed(query_box):
        raise TypeError(f"query_box must be (start, stop) for each axis of the grid {shape}, got {query_box!r}")
    if len(query_box) != len(shape):
        raise ValueError(f"query_box must be (start, stop) for each axis of the grid {shape}, got {query_box!r}")
    line = Ends if torch.compiler.is_compiling() else range
    box, is_whole = [], True
    for n, (ends, cells) in enumerate(zip(query_box, shape, strict=True)):
        if not is_listed(ends):
            raise TypeError(f"query_box[{n}] must be (start, stop), got {ends!r}")
        if len(ends) != 2:
            raise ValueError(f"query_box[{n}] must be (start, stop), got {ends!r}")
        start, stop = (integer(f"query_box[{n}][{end}]", row) for end, row in enumerate(ends))
        if not 0 <= start < stop <= cells:
            allowed = f"(start, stop), start at least 0 and below stop, stop at most the side {cells}"
            raise ValueError(f"query_box[{n}] must be {allowed}; got {(start, stop)}")
        box.append(line(start, stop))
        is_whole = is_whole and start == 0 and stop == cells
    # A box of all cells is the call without one, which every backend serves.
    return None if is_whole else GridPart(tuple(box), tuple(box), tuple(line(0, cells) for cells in shape))


def has_all_keys(part: GridPart, shape: tuple[int, ...]) -> bool:
    """Whether all queries of a part are computed, and its keys are all cells of the grid, as with a query_box."""
    for rows, queries, keys, cells in zip(part.rows, part.queries, part.keys, shape, strict=True):
        if rows.start != queries.start or rows.stop != queries.stop or keys.start != 0 or keys.stop != cells:
            return False
    return True


def on_its_keys(request: Request) -> Request:
    """A part of a grid as a part of the smaller grid that its keys are: each query sees the same keys there.

    Raises ValueError where the rules along an axis are not those of a grid that ends with the keys.
    """
    frames, part = _on_its_keys(request.neighbourhoods, request.part)
    return replace(request, pattern=HeadNeighbourhoods(frames), part=part)


def refusal_of_part(axes: tuple[Axis, ...], part: GridPart) -> str:
    """The reason why the keys of a part are no grid with the same rules, so that `on_its_keys` raises; or ""."""
    for n, axis in enumerate(axes):
        if refused := _refusal_along(n, axis, part):
            return refused
    return ""


def _refusal_along(n: int, axis: Axis, part: GridPart) -> str:
    keys = part.keys[n]
    if _is_whole(n, axis, part):
        return ""
    if axis.dilation > 1:
        return f"axis {n} is dilated, and the queries or keys are not all of its cells"
    if keys.start % axis.stride or (axis.is_causal and keys.stop % axis.stride and keys.stop != axis.cells):
        return f"the keys along axis {n} cut a group of its stride"
    if axis.edge == "wrap" and keys.stop - keys.start == axis.cells:
        return f"axis {n} goes round, and the queries, unlike the keys, are not all of its cells"
    return ""


def _is_whole(n: int, axis: Axis, part: GridPart) -> bool:
    # Whether a part holds all queries and keys of an axis, and computes them.
    return all(box[n].start == 0 and box[n].stop == axis.cells for box in (part.rows, part.queries, part.keys))


@lru_cache(maxsize=256)
def _on_its_keys(
    windows: tuple[Neighbourhood, ...], part: GridPart
) -> tuple[tuple[Neighbourhood, ...], GridPart | None]:
    lines = [_on_keys(n, axis, part) for n, axis in enumerate(windows[0].axes)]
    rows, queries, edges = zip(*lines, strict=True)
    shape = tuple(map(len, part.keys))
    frames = tuple(Neighbourhood(shape, x.window, x.dilation, x.stride, x.is_causal, edges) for x in windows)
    frame_part = GridPart(rows, queries, tuple(map(range, shape)), part.in_float)
    is_grid = frame_part.rows == frame_part.queries == frame_part.keys and not frame_part.in_float
    return frames, None if is_grid else frame_part


def _on_keys(n: int, axis: Axis, part: GridPart) -> tuple[range, range, str]:
    # Of one axis, counted from the first key: the rows of q, those computed, and the rule at the ends.
    rows, queries, keys = part.rows[n], part.queries[n], part.keys[n]
    if refused := _refusal_along(n, axis, part):
        raise ValueError(refused)
    is_whole = _is_whole(n, axis, part)
    wraps = axis.edge == "wrap" and not axis.is_causal
    first = (queries.start - keys.start) % axis.cells
    before = first - (queries.start - rows.start)
    edge = "clip" if wraps and not is_whole else axis.edge
    return range(before, before + len(rows)), range(first, first + len(queries)), edge


def cells_of(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """The cell in each row of q, -1 where it is not computed, and in each row of k."""
    device, part, pattern = inputs.q.device, request.part, request.pattern
    if request.slots is not None:
        stored = (request.slots >= 0).nonzero()[:, 0]
        cells = stored[request.slots[stored].argsort()]
        return cells[: inputs.q.shape[1]], cells
    if part is None:
        cells = torch.arange(pattern.length, device=device)
        cells = cells if request.ordering is None else request.ordering.to(device).perm
        return cells, cells
    lines = [torch.arange(length, device=device)[None] for length in pattern.shape]
    queries = [x.where((x >= span.start) & (x < span.stop), -1) for x, span in zip(lines, part.queries, strict=True)]
    queries = [x[:, span.start : span.stop] for x, span in zip(queries, part.rows, strict=True)]
    keys = [x.repeat(1, 2)[:, span.start : span.stop] for x, span in zip(lines, part.keys, strict=True)]
    (queries, exists), (keys, _) = joined(pattern.shape, queries), joined(pattern.shape, keys)
    return queries.where(exists, -1)[0], keys[0]


def joined(shape: tuple[int, ...], lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Positions in a box of the cells (tiles, n) of a product of lines, and which exist: on no line below 0."""
    cell, exists = lines[0], lines[0] >= 0
    for length, line in zip(shape[1:], lines[1:], strict=True):
        cell = (cell[:, :, None] * length + line[:, None]).flatten(1)
        exists = (exists[:, :, None] & (line >= 0)[:, None]).flatten(1)
    return cell, exists


def cells_in(box: tuple[range, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The positions of the cells of a box of a grid, row by row: int64."""
    cells, _ = joined(shape, [torch.arange(line.start, line.stop, device=device)[None] for line in box])
    return cells[0]


def padding_of(inputs: Tensors, request: Request) -> Tensor:
    """The keys without weight: (batch, seq + extra) bool."""
    masks = []
    for mask, x in ((request.key_padding_mask, inputs.k), (request.extra_padding_mask, inputs.extra_k)):
        if x is not None:
            masks.append(x.new_zeros(x.shape[:2], dtype=torch.bool) if mask is None else mask)
    return torch.cat(masks, 1)


def as_returned(sums: Tensors, inputs: Tensors, request: Request) -> Tensors:
    """Gradients in the dtypes in which they are returned."""
    unrounded = range(1, 3) if request.part and request.part.in_float else ()
    pairs = enumerate(zip(sums, inputs, strict=True))
    return Tensors(*(x if x is None or n in unrounded else x.to(y.dtype) for n, (x, y) in pairs))
