"""Neighbourhood attention by a dense kernel over tiles: rectangles of queries within the rectangles that they see.

Memory is O(seq * window): the queries of a tile share their keys, and tiles are taken in steps. What a query does not
see has -inf added to its score.

    rows of q, of k and v -> kernel, given what is added to the scores -> out and lse, or dq and sums of dk and dv
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib.attention.backends import gathered, reference
from hilbert_lib.attention.backends.backend import SPREADS, Backend, Backward, Forward
from hilbert_lib.attention.backends.dense import ON_CPU
from hilbert_lib.attention.backends.kernel import Eager, Kernel, Problem, gradients, with_lse_columns
from hilbert_lib.attention.backends.tile_groups import PAIRS_OF_STEP, AxisBias, Group, Rows, Tiles, groups, sides_on_cpu
from hilbert_lib.attention.grid_parts import as_returned
from hilbert_lib.attention.request import BIAS, WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts
from hilbert_lib.attention.tape import stepped
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood

# Of matrix products: the queries of a tile along each axis, and the scores held at a time.
SIDES = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}
CHUNK = 2**22


class _Step(NamedTuple):
    """Some tiles of one call as a kernel takes them."""

    tiles: Tiles
    queries: Rows  # in storage
    keys: Rows
    group: int  # query heads of a KV head
    q: Tensor  # (batch * tiles, kv_heads, group * rows, head_dim)
    k: Tensor  # (batch * tiles, kv_heads, keys + extra, head_dim)
    v: Tensor
    problem: Problem

    def of_queries(self, x: Tensor) -> Tensor:
        """Rows of x (batch, seq, heads, n) in the layout of q."""
        return _of_queries(x, self.queries, self.tiles.count, self.group)

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse: (batch, tiles * rows, heads, n)."""
        x = x.transpose(1, 2) if self.group == 1 else _with_group_last(x, self.group)
        return x if self.tiles.count == 1 else x.unflatten(0, (-1, self.tiles.count)).flatten(1, 2)


def forward(inputs: Tensors, request: Request, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    batch, seq, heads, _ = inputs.q.shape
    dtype = WORKING_DTYPE[inputs.q.dtype]
    if (added := _only_added(inputs, request, kernel)) is not None:
        return stepped(partial(_forward_of_tile, kernel, request.scale), *inputs[:3], added)
    if (step := _only_step(inputs, request, kernel)) is not None:
        out, lse = kernel.forward(step.q, step.k, step.v, step.problem)
        return step.by_row(out).to(inputs.q.dtype).contiguous(), lse.reshape(batch, heads, seq)
    inputs = _with_past(inputs, request)
    out = torch.zeros_like(inputs.q, memory_format=torch.contiguous_format)
    lse = out.new_zeros(*out.shape[:3], 1, dtype=dtype)
    for near, kv_heads in request.heads_by_window.items():
        window_inputs, which = _of_heads(inputs, kv_heads)
        outs, lses = out[:, :, which], lse[:, :, which]
        for step in _steps(window_inputs, near, request, kernel):
            step_out, step_lse = kernel.forward(step.q, step.k, step.v, step.problem)
            _put(outs, step.queries, step.by_row(step_out).to(out.dtype))
            _put(lses, step.queries, step.by_row(step_lse[..., None]))
        if not isinstance(which, slice):
            out[:, :, which], lse[:, :, which] = outs, lses
    return out[:, :seq].contiguous(), lse[:, :seq, :, 0].transpose(1, 2).contiguous()


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, kernel: Kernel,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Gradients of q, k, v and of the extra keys, from the merged out and lse."""
    given, inputs, dtype = inputs, _with_past(inputs, request), WORKING_DTYPE[dout.dtype]
    if inputs.bias is not None:  # whose gradient is made of the gradients of all scores
        kernel = Eager
    # lse in the layout of the others.
    row_side = [dout, out, *(x.transpose(1, 2).contiguous()[..., None] for x in (lse, dlse) if x is not None)]
    row_side = [_past(x, request) for x in row_side]
    if inputs.bias is None and (step := _only_step(inputs, request, kernel)) is not None:
        dq, dk, dv = _gradients(kernel, row_side, step)
        keys = inputs.k.shape[1]
        extra = (x[:, :, keys:].transpose(1, 2) for x in (dk, dv))
        dk, dv = (x[:, :, :keys].transpose(1, 2) for x in (dk, dv))
        return as_returned(Tensors(step.by_row(dq), dk, dv, *extra), given, request)
    sums = [x.new_zeros(x.shape, dtype=dtype) for x in inputs.with_rows]
    dbias = None if inputs.bias is None else torch.zeros_like(inputs.bias, dtype=dtype)
    for near, kv_heads in request.heads_by_window.items():
        window_inputs, which = _of_heads(inputs, kv_heads)
        heads = [which, *[which if isinstance(which, slice) else kv_heads] * 4]  # of q, and of what keys have
        window_sums = [x[:, :, own] for x, own in zip(sums, heads, strict=True)]
        window_side = [x[:, :, which] for x in row_side]
        for step in _steps(window_inputs, near, request, kernel):
            if dbias is None:
                dq, dk, dv = _gradients(kernel, window_side, step)
            else:
                dq, dk, dv, dscores = _gradients_with_scores(window_side, step)
                keys = dscores.shape[-1] - inputs.extra_k.shape[1]
                dbias[which] += _summed_by_entry(_of_tiles(dscores[..., :keys], step), step.tiles.bias)
            _put(window_sums[0], step.queries, step.by_row(dq))
            for n, part in ((1, dk), (2, dv)):
                _add_keys(window_sums[n], window_sums[n + 2], step, part.transpose(1, 2))
        if not isinstance(which, slice):
            for total, part, own in zip(sums, window_sums, heads, strict=True):
                total[:, :, own] = part
    grads = [x[:, : y.shape[1]] for x, y in zip(sums, given.with_rows, strict=True)]
    return as_returned(Tensors(*grads, dbias), given, request)


def _gradients(kernel: Kernel, row_side: list[Tensor], step: _Step) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse, dlse = _of_step(row_side, step)
    return gradients(kernel, dout, step.q, step.k, step.v, out, lse, dlse, step.problem)


def _gradients_with_scores(row_side: list[Tensor], step: _Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # dq, dk, dv, and the gradient of the scores.
    dout, out, lse, dlse = _of_step(row_side, step)
    tensors = dout, step.q, step.k, step.v, out
    tensors = tensors if dlse is None else with_lse_columns(*tensors, dlse)
    *grads, dscores = Eager.backward_with_scores(*tensors, lse, step.problem)
    return *(x[..., : step.q.shape[-1]] for x in grads), dscores


def _of_step(row_side: list[Tensor], step: _Step) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # dout, out, lse and dlse of a step's queries.
    dout, out, lse, *dlse = (step.of_queries(x).to(step.q.dtype) for x in row_side)
    return dout, out, lse[..., 0], dlse[0][..., 0] if dlse else None


def _with_past(inputs: Tensors, request: Request) -> Tensors:
    return inputs if request.slots is None else Tensors(*(_past(x, request) for x in inputs[:3]), *inputs[3:])


def _past(x: Tensor, request: Request) -> Tensor:
    # With a row of zeros past the end, where those cells of a tile lie that no rank holds.
    return x if request.slots is None else pad(x, (0, 0, 0, 0, 0, 1))


def _of_heads(inputs: Tensors, kv_heads: list[int]) -> tuple[Tensors, slice | Tensor]:
    # The inputs of some KV heads with their query heads, and the index of these query heads.
    count = inputs.k.shape[2]
    if len(kv_heads) == count:
        return inputs, slice(None)
    group = inputs.q.shape[2] // count
    heads = torch.tensor([g * group + n for g in kv_heads for n in range(group)], device=inputs.q.device)
    bias = None if inputs.bias is None else inputs.bias[heads]
    return Tensors(inputs.q[:, :, heads], *(x[:, :, kv_heads] for x in inputs[1:5]), bias), heads


def _summed_by_entry(dscores: Tensor, bias: list[AxisBias]) -> Tensor:
    # The gradient of a table of bias (heads, entries along each axis), of (batch, tiles, kv_heads, group * rows, keys).
    # Along an axis a row has each entry with one key at most. So no sum depends on an order that the device chooses.
    pairs = dscores.sum(0)
    count = len(bias)
    tiles, kv_heads = pairs.shape[:2]
    rows, keys = ([x.shape[n] for x, *_ in bias] for n in (1, 2))
    pairs = pairs.view(tiles, kv_heads * pairs.shape[2] // prod(rows), *rows, *keys)
    row, key = 2, 2 + count  # of each axis in turn: its rows go, and entries take the place of its keys
    for _, met, exists in bias:
        shape, size = [1] * pairs.dim(), list(pairs.shape)
        shape[0], shape[row], shape[key] = met.shape
        size[key] = met.shape[2]
        pairs = pairs.gather(key, met.view(shape).expand(size)).masked_fill_(~exists.view(shape), 0.0).sum(row)
    return pairs.sum(0)


def _flat_entries(lines: list[Tensor], sides: tuple[int, ...]) -> Tensor:
    # The entry of a flat table for each pair of a tile (tiles, rows, keys), from those along each axis.
    entries = lines[0]
    for line, side in zip(lines[1:], sides[1:], strict=True):
        entries = entries[:, :, None, :, None] * side + line[:, None, :, None, :]
        entries = entries.flatten(3, 4).flatten(1, 2)
    return entries


def _taken(x: Tensor, rows: Rows) -> Tensor:
    if not isinstance(rows, slice):
        return x.index_select(1, rows)
    return x if rows == slice(0, x.shape[1], 1) else x[:, rows]


def _put(x: Tensor, rows: Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[:, rows] = values
    else:
        x.index_copy_(1, rows, values)


def _add_keys(total: Tensor, extra_total: Tensor, step: _Step, part: Tensor) -> None:
    # Add part (batch * tiles, keys + extra, kv_heads, n) to the sums over keys and over extra keys.
    if extra := extra_total.shape[1]:
        extra_total += _of_tiles(part[:, -extra:], step).sum(1)
        part = part[:, :-extra]
    if isinstance(step.keys, slice):
        total[:, step.keys] += part
    else:
        total.index_add_(1, step.keys, _of_tiles(part, step).flatten(1, 2))


def _of_tiles(x: Tensor, step: _Step) -> Tensor:
    # (batch * tiles, ...) -> (batch, tiles, ...)
    return x.unflatten(0, (-1, step.tiles.count))


def _by_tile(x: Tensor, rows: Rows, tiles: int) -> Tensor:
    # Rows of x (batch, seq, ...) by tiles: (batch * tiles, rows, ...).
    x = _taken(x, rows)
    return x if tiles == 1 else x.unflatten(1, (tiles, -1)).flatten(0, 1)


def _of_queries(x: Tensor, rows: Rows, tiles: int, group: int) -> Tensor:
    x = _by_tile(x, rows, tiles)
    if group == 1:
        return x.transpose(1, 2)
    return x.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _with_group_last(x: Tensor, group: int) -> Tensor:
    # (batch, kv_heads, group * rows, n) -> (batch, rows, heads, n)
    return x.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _only_step(inputs: Tensors, request: Request, kernel: Kernel) -> _Step | None:
    # The step that is all of a call, with the rows of q and of k as they are stored; None where there is none.
    if len(request.heads_by_window) > 1 or request.slots is not None or request.ordering is not None:
        return None
    near = next(iter(request.heads_by_window))
    tile_groups, _ = _groups(inputs, near, request, kernel)
    if len(tile_groups) > 1 or not tile_groups[0].is_whole:
        return None
    return _step(tile_groups[0].kept or tile_groups[0].tiles(0, 1), inputs, request)


def _only_added(inputs: Tensors, request: Request, kernel: Kernel) -> Tensor | None:
    # What is added to all scores of a call, a table that calls share: None unless a dense kernel takes q, k and v as
    # they are, and nothing else.
    q, k, _, extra_k, _, bias = inputs
    has_masks = request.key_padding_mask is not None or extra_k.shape[1] > 0
    is_plain = request.part is None and request.slots is None and request.ordering is None and not has_masks
    if kernel is Eager or not is_plain or bias is not None or q.shape[2] != k.shape[2]:
        return None
    if q.dtype != WORKING_DTYPE[q.dtype] or len(request.heads_by_window) > 1:
        return None
    (group, *others), _ = _groups(inputs, next(iter(request.heads_by_window)), request, kernel)
    return group.kept.added if group.is_whole and group.kept is not None and not others else None


def _forward_of_tile(
    kernel: Kernel, scale: float, q: Tensor, k: Tensor, v: Tensor, added: Tensor
) -> tuple[Tensor, Tensor]:
    problem = Problem(scale, False, added=added[:, None])
    out, lse = kernel.forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), problem)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def _groups(inputs: Tensors, near: Neighbourhood, request: Request, kernel: Kernel) -> tuple[list[Group], int]:
    # The groups of tiles, and the pairs of a step.
    q, k, _, extra_k, _, bias = inputs
    batch, _, heads, _ = q.shape
    kv_heads, extra = k.shape[2], extra_k.shape[1]
    bias_sides = () if bias is None else request.pattern.bias_sides
    if kernel is Eager:
        sides, chunk = SIDES[len(near.axes)], CHUNK
    else:
        has_padding = request.key_padding_mask is not None or request.extra_padding_mask is not None
        added = (batch if has_padding else 1) * (1 if bias is None else heads)
        sides = sides_on_cpu(near, request.part, extra, heads // kv_heads, batch * kv_heads, added)
        chunk = PAIRS_OF_STEP
    dtype = WORKING_DTYPE[q.dtype]
    return groups(near, request.part, request.slots is not None, sides, bias_sides, dtype, q.device), chunk


def _steps(inputs: Tensors, near: Neighbourhood, request: Request, kernel: Kernel) -> Iterator[_Step]:
    batch, _, heads, _ = inputs.q.shape
    tile_groups, chunk = _groups(inputs, near, request, kernel)
    for group in tile_groups:
        count = max(1, chunk // (batch * heads * group.rows * (group.keys + inputs.extra_k.shape[1])))
        if group.kept is not None and count >= group.count:
            yield _step(group.kept, inputs, request)
            continue
        firsts = range(0, group.count, count)
        for first in firsts[:3] if inputs.q.is_meta else firsts:  # where memory is counted: the others take no more
            yield _step(group.tiles(first, min(count, group.count - first)), inputs, request)


def _step(tiles: Tiles, inputs: Tensors, request: Request) -> _Step:
    q, k, v, extra_k, extra_v, bias = inputs
    group, dtype = q.shape[2] // k.shape[2], WORKING_DTYPE[q.dtype]
    queries, keys, added = _stored(tiles, request, q, k)
    q = _of_queries(q, queries, tiles.count, group).to(dtype)
    k, v = (_by_tile(x, keys, tiles.count).to(dtype) for x in (k, v))
    if extra_k.shape[1]:
        extra = (x.to(dtype).repeat_interleave(tiles.count, 0) for x in (extra_k, extra_v))
        k, v = (torch.cat(both, 1) for both in zip((k, v), extra, strict=True))
    added = _added(added, keys, tiles, request, len(inputs.q), group, extra_k.shape[1], bias)
    problem = Problem(request.scale, False, added=added)
    return _Step(tiles, queries, keys, group, q, k.transpose(1, 2), v.transpose(1, 2), problem)


def _stored(tiles: Tiles, request: Request, q: Tensor, k: Tensor) -> tuple[Rows, Rows, Tensor]:
    # Rows of q and of k in storage, and what is added to the scores: -inf for keys that lie nowhere.
    if request.slots is None and request.ordering is None:
        return tiles.queries, tiles.keys, tiles.added
    if request.slots is None:
        slots = request.ordering.to(q.device).inverse
        return slots[tiles.queries], slots[tiles.keys], tiles.added
    queries, keys = request.slots[tiles.queries].long(), request.slots[tiles.keys].long()
    past_q, past_k = q.shape[1] - 1, k.shape[1] - 1
    queries = queries.where((queries >= 0) & (queries < past_q), past_q)
    added = tiles.added.masked_fill((keys < 0).view(tiles.count, 1, -1), -torch.inf)
    return queries, keys.where(keys >= 0, past_k), added


def _added(
    added: Tensor, keys: Rows, tiles: Tiles, request: Request, batch: int, group: int, extra: int, bias: Tensor | None
) -> Tensor:
    # What is added to the scores of some tiles: (batch * tiles or 1, kv_heads or 1, group * rows, keys + extra).
    # added: (tiles, rows, keys), 0 or -inf.
    count, has_padding = tiles.count, request.key_padding_mask is not None
    if bias is None and not extra and not has_padding and group == 1 and 1 in (batch, count):
        return added[:, None]
    added = added[None]
    if has_padding:
        padding = request.key_padding_mask if request.slots is None else pad(request.key_padding_mask, (0, 1))
        added = added.masked_fill(_taken(padding, keys).view(batch, count, 1, -1), -torch.inf)
    added = added[:, :, None, None]  # [batch or 1, tiles, kv_heads or 1, group or 1, rows, keys]
    if bias is not None:
        entries = _flat_entries([x.entries for x in tiles.bias], request.pattern.bias_sides)
        own = bias.to(added.dtype).flatten(1).unflatten(0, (-1, group))[:, :, entries]
        added = added + own.permute(2, 0, 1, 3, 4)  # [kv_heads, group, tiles, rows, keys] before
    if extra:
        added = pad(added, (0, extra))
        if request.extra_padding_mask is not None:
            added = added.repeat(batch // len(added), 1, 1, 1, 1, 1)
            hidden = request.extra_padding_mask[:, None, None, None, None]
            added[..., -extra:].masked_fill_(hidden, -torch.inf)
    if group > 1:
        added = added.expand(-1, -1, -1, group, -1, -1)
    if count > 1:
        added = added.expand(batch, -1, -1, -1, -1, -1)
    return added.flatten(3, 4).flatten(0, 1)


def _forward(inputs: Tensors, request: Request, kernel: Kernel) -> tuple[Tensor, Tensor]:
    # Tiles are of a line of which all sequences have the same cells. Asked here, a warm call opens no file for it.
    if request.key_start is None and request.query_starts is None:
        return forward(inputs, request, kernel)
    return gathered.results(inputs, request, partial(forward, kernel=kernel) if kernel is ON_CPU else None)


def _backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None, *,
    kernel: Kernel,
) -> Tensors:  # fmt: skip
    if has_starts(request):
        return reference.backward_by_rows(dout, inputs, out, lse, request, dlse)
    return backward(dout, inputs, out, lse, request, kernel, dlse)


def _functions_of(kernel: Kernel) -> tuple[Forward, Backward]:
    return partial(_forward, kernel=kernel), partial(_backward, kernel=kernel)


_ON_CPU, _ELSEWHERE = _functions_of(ON_CPU), _functions_of(Eager)
BACKENDS = (
    Backend(
        serves=HeadNeighbourhoods,
        name="eager",
        note="tiles, by torch's fused kernel on a CPU and by matrix products elsewhere",
        colour="#999999",
        functions=lambda device: _ON_CPU if device.type == "cpu" else _ELSEWHERE,
        reads_orderings=True,
        caveat=SPREADS,
        options=("part", *STARTS, *BIAS),
    ),
)
