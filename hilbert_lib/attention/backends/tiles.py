"""Neighbourhood attention by matrix products of tiles: rectangles of queries within the rectangles that they see.

Memory is O(seq * window): the queries of a tile share their keys, and tiles are taken in chunks. Rows that a tile does
not fill lie in a row past the end, which is cut off.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends import gathered, reference
from hilbert_lib.attention.backends.backend import SPREADS, Backend
from hilbert_lib.attention.grid_parts import as_returned, joined, slots_of
from hilbert_lib.attention.request import BIAS, WORKING_DTYPE, GridPart, Request, Tensors
from hilbert_lib.attention.starts import STARTS, has_starts
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.blocks import AxisTiles, axis_tiles
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood

TILE = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}  # queries of a tile along each axis
CHUNK = 2**22  # scores held at a time, of all heads and sequences


class _Tile(NamedTuple):
    """A chunk of tiles of some heads: rows in storage (the row past the end where there is none) and their scores."""

    queries: Tensor  # (tiles * rows,) int64
    keys: Tensor  # (tiles * keys,) int64
    q: Tensor  # (batch, tiles, kv_heads, group * rows, head_dim)
    k: Tensor  # (batch, tiles, kv_heads, keys + extra, head_dim)
    v: Tensor
    scores: Tensor  # (batch, tiles, kv_heads, group * rows, keys + extra), -inf where a query does not see a key
    bias: list["_AxisBias"]  # of these tiles, along each axis; empty where there is no bias


class _AxisBias(NamedTuple):
    """The entries of a table of bias that the pairs of one axis's tiles have."""

    entries: Tensor  # (tiles, rows, keys) int64, the entry of each pair
    keys: Tensor  # (tiles, rows, entries) int64, the key with which a row meets an entry
    exists: Tensor  # the same shape, bool: whether there is one


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    batch, seq, heads, head_dim = inputs.q.shape
    out = inputs.q.new_zeros(batch, seq + 1, heads, head_dim)
    lse = inputs.q.new_zeros(batch, seq + 1, heads, dtype=WORKING_DTYPE[inputs.q.dtype])
    for near, kv_heads in request.heads_by_window.items():
        window_inputs, which = _of_heads(inputs, kv_heads)
        outs, lses = out[:, :, which], lse[:, :, which]
        for tile in _chunks(window_inputs, near, request):
            part_lse = tile.scores.logsumexp(-1)
            # Not exp(scores - lse): where scores are large, lse is rounded so much that these do not sum to 1.
            weights = tile.scores.softmax(-1).masked_fill_(part_lse[..., None] == -torch.inf, 0.0)
            outs.index_copy_(1, tile.queries, _by_row(weights @ tile.v, outs).to(out.dtype))
            lses.index_copy_(1, tile.queries, _by_row(part_lse[..., None], outs)[..., 0])
        if not isinstance(which, slice):
            out[:, :, which], lse[:, :, which] = outs, lses
    return out[:, :seq].contiguous(), lse[:, :seq].transpose(1, 2).contiguous()


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse."""
    dtype = WORKING_DTYPE[dout.dtype]
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.transpose(1, 2)[..., None]
    rows = [x.new_zeros(x.shape[0], x.shape[1] + 1, *x.shape[2:], dtype=dtype) for x in inputs.with_rows]
    dbias = None if inputs.bias is None else torch.zeros_like(inputs.bias, dtype=dtype)
    for near, kv_heads in request.heads_by_window.items():
        window_inputs, which = _of_heads(inputs, kv_heads)
        sums = [x[:, :, which if n == 0 else kv_heads] for n, x in enumerate(rows)]
        row_side = [x[:, :, which] for x in (dout.to(dtype), lse.transpose(1, 2)[..., None], delta)]
        for tile in _chunks(window_inputs, near, request):
            douts, lses, deltas = (_gathered(x, tile.queries, tile.q) for x in row_side)
            weights = (tile.scores - _finite(lses)).exp_()
            dscores = weights * (douts @ tile.v.mT - deltas)
            sums[0].index_copy_(1, tile.queries, _by_row(dscores @ tile.k, sums[0]) * request.scale)
            keys = tile.keys.numel() // tile.q.shape[1]
            if dbias is not None:
                dbias[which] += _summed_by_entry(dscores[..., :keys], tile.bias)
            for n, both in ((1, dscores.mT @ tile.q * request.scale), (2, weights.mT @ douts)):
                sums[n].index_add_(1, tile.keys, both[..., :keys, :].transpose(2, 3).flatten(1, 2))
                sums[n + 2][:, : inputs.extra_k.shape[1]] += both[..., keys:, :].sum(1).transpose(1, 2)
        for n, (grad, part) in enumerate(zip(rows, sums, strict=True)):
            grad[:, :, which if n == 0 else kv_heads] = part
    grads = [x[:, : y.shape[1]] for x, y in zip(rows, inputs.with_rows, strict=True)]
    return as_returned(Tensors(*grads, dbias), inputs, request)


def _of_heads(inputs: Tensors, kv_heads: list[int]) -> tuple[Tensors, slice | Tensor]:
    # The inputs of some KV heads with their query heads, and the index of these query heads.
    count = inputs.k.shape[2]
    if len(kv_heads) == count:
        return inputs, slice(None)
    group = inputs.q.shape[2] // count
    heads = torch.tensor([g * group + n for g in kv_heads for n in range(group)], device=inputs.q.device)
    bias = None if inputs.bias is None else inputs.bias[heads]
    return Tensors(inputs.q[:, :, heads], *(x[:, :, kv_heads] for x in inputs[1:5]), bias), heads


def _summed_by_entry(dscores: Tensor, bias: list[_AxisBias]) -> Tensor:
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


def _finite(lse: Tensor) -> Tensor:
    # lse, but 0 for a row without keys: all its scores are -inf, and -inf - -inf would be NaN.
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _gathered(x: Tensor, rows: Tensor, q: Tensor) -> Tensor:
    # Rows of x (batch, seq, heads, n) in the layout of q's tiles.
    batch, tiles, kv_heads, _, _ = q.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))
    part = padded.index_select(1, rows).view(batch, tiles, -1, kv_heads, x.shape[2] // kv_heads, x.shape[3])
    return part.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)


def _by_row(x: Tensor, like: Tensor) -> Tensor:
    # The inverse of `_gathered`: (batch, tiles * rows, heads, n).
    batch, _, kv_heads, _, width = x.shape
    group = like.shape[2] // kv_heads
    return x.unflatten(3, (group, -1)).permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, like.shape[2], width)


def _chunks(inputs: Tensors, near: Neighbourhood, request: Request) -> Iterator[_Tile]:
    *with_rows, bias = inputs
    q, k, v, extra_k, extra_v = (x.to(WORKING_DTYPE[x.dtype]) for x in with_rows)
    bias = None if bias is None else bias.to(q.dtype).flatten(1)
    gathered = request.slots is not None
    axes, q_sides, k_sides = _axes(near, request.part, gathered, q.device)
    bias_axes = [] if bias is None else _bias_axes(near, request.pattern.bias_sides, request.part, q.device)
    rows, keys = prod(axis.queries.shape[1] for axis in axes), prod(axis.keys.shape[1] for axis in axes)
    tiles = prod(len(axis.queries) for axis in axes)
    size = max(1, CHUNK // (q.shape[0] * q.shape[2] * rows * (keys + extra_k.shape[1])))
    past_q, past_k = (torch.full((), x.shape[1], device=q.device) for x in (q, k))
    firsts = range(0, tiles, size)
    for first in firsts[:3] if q.is_meta else firsts:  # where memory is counted: the others take no more
        number = torch.arange(first, min(first + size, tiles), device=q.device)
        tile_index = []
        for axis in reversed(axes):  # torch's unravel_index copies from the host, which a CUDA graph cannot capture
            tile_index.insert(0, number % len(axis.queries))
            number = number // len(axis.queries)
        queries, is_query = joined(q_sides, [axis.queries[n] for axis, n in zip(axes, tile_index, strict=True)])
        cells, is_key = joined(k_sides, [axis.keys[n] for axis, n in zip(axes, tile_index, strict=True)])
        tile_bias = [_AxisBias(*(x[n] for x in axis)) for axis, n in zip(bias_axes, tile_index, strict=False)]
        attends = _attends([axis.attends[n] for axis, n in zip(axes, tile_index, strict=True)])
        queries, cells = slots_of(request, queries), slots_of(request, cells)
        if gathered:  # a box holds cells of others too
            is_query, is_key = is_query & (queries >= 0) & (queries < past_q), is_key & (cells >= 0)
        queries, slots = queries.where(is_query, past_q).flatten(), cells.where(is_key, past_k).flatten()
        qs = _gathered(q, queries, q.new_empty(q.shape[0], len(number), k.shape[2], 0, 0))
        ks, vs = (_gathered(x, slots, qs) for x in (k, v))
        hidden = ~attends[None]
        if request.key_padding_mask is not None:
            padding = torch.nn.functional.pad(request.key_padding_mask, (0, 1)).index_select(1, slots)
            hidden = hidden | padding.view(len(padding), len(number), 1, -1)
        if extra_k.shape[1]:
            ks, vs = (
                torch.cat([x, y.transpose(1, 2)[:, None].expand(-1, len(number), -1, -1, -1)], 3)
                for x, y in ((ks, extra_k), (vs, extra_v))
            )
            hidden = torch.nn.functional.pad(hidden, (0, extra_k.shape[1]))
            if request.extra_padding_mask is not None:
                hidden = hidden.repeat(len(q) // len(hidden), 1, 1, 1)
                hidden[..., -extra_k.shape[1] :] |= request.extra_padding_mask[:, None, None]
        scores = (qs @ ks.mT).mul_(request.scale)
        split = scores.unflatten(3, (-1, rows))
        if bias is not None:
            entries = _flat_entries([x.entries for x in tile_bias], request.pattern.bias_sides)
            own = bias.view(k.shape[2], -1, bias.shape[1])[:, :, entries]  # (kv_heads, group, tiles, rows, keys)
            split[..., :keys] += own.permute(2, 0, 1, 3, 4)
        split.masked_fill_(hidden[:, :, None, None], -torch.inf)
        yield _Tile(queries, slots, qs, ks, vs, scores, tile_bias)


@cached_for_graphs(maxsize=64)
def _axes(
    near: Neighbourhood, part: GridPart | None, gathered: bool, device: torch.device
) -> tuple[list[AxisTiles], tuple[int, ...], tuple[int, ...]]:
    # Tiles along each axis, and the sides of the boxes whose cells number their queries and their keys.
    axes = [AxisTiles(*(x.to(device) for x in host_axis)) for host_axis in _axes_on_host(near, part)]
    if part is None or gathered:
        return axes, near.shape, near.shape
    for n, ((queries, keys, attends), length) in enumerate(zip(axes, near.shape, strict=True)):
        queries = (queries - part.rows[n].start).where(queries >= 0, -1)
        keys = ((keys - part.keys[n].start) % length).where(keys >= 0, -1)
        axes[n] = AxisTiles(queries, keys, attends)
    return axes, tuple(map(len, part.rows)), tuple(map(len, part.keys))


def _axes_on_host(near: Neighbourhood, part: GridPart | None) -> list[AxisTiles]:
    # Values are computed on the host: "meta", where memory is counted, has none.
    tiles, cells = TILE[len(near.axes)], part.queries if part else [None] * len(near.axes)
    return [axis_tiles(axis, size, "cpu", spans) for axis, size, spans in zip(near.axes, tiles, cells, strict=True)]


@cached_for_graphs(maxsize=64)
def _bias_axes(
    near: Neighbourhood, sides: tuple[int, ...], part: GridPart | None, device: torch.device
) -> list[_AxisBias]:
    # sides: entries of the table along each axis.
    axes = []
    for axis, side, (queries, keys, attends) in zip(near.axes, sides, _axes_on_host(near, part), strict=True):
        entries = axis.distance(queries[:, :, None], keys[:, None]) + side // 2
        number = torch.arange(keys.shape[1], device="cpu").expand(entries.shape)
        # A pair that does not attend is written past the end, which is cut off.
        met = torch.full((*queries.shape, side + 1), -1, device="cpu")
        met = met.scatter_(2, entries.where(attends, side), number)[..., :side]
        of_axis = entries.clamp(0, side - 1), met.clamp(min=0), met >= 0
        axes.append(_AxisBias(*(x.to(device) for x in of_axis)))
    return axes


def _flat_entries(lines: list[Tensor], sides: tuple[int, ...]) -> Tensor:
    # The entry of a flat table for each pair of a tile (tiles, rows, keys), from those along each axis.
    entries = lines[0]
    for line, side in zip(lines[1:], sides[1:], strict=True):
        entries = entries[:, :, None, :, None] * side + line[:, None, :, None, :]
        entries = entries.flatten(3, 4).flatten(1, 2)
    return entries


def _attends(lines: list[Tensor]) -> Tensor:
    # Which keys each row sees (tiles, rows, keys), from the same along each axis.
    attends = lines[0]
    for line in lines[1:]:
        attends = (attends[:, :, None, :, None] & line[:, None, :, None, :]).flatten(3, 4).flatten(1, 2)
    return attends


def _forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    # Tiles are of a line of which all sequences have the same cells. Asked here, a warm call opens no file for it.
    if request.key_start is None and request.query_starts is None:
        return forward(inputs, request)
    return gathered.results(inputs, request)


def _backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    run = reference.backward_by_rows if has_starts(request) else backward
    return run(dout, inputs, out, lse, request, dlse)


BACKENDS = (
    Backend(
        serves=HeadNeighbourhoods,
        name="eager",
        note="matrix products of tiles, in chunks",
        colour="#999999",
        functions=lambda device: (_forward, _backward),
        reads_orderings=True,
        caveat=SPREADS,
        options=("part", *STARTS, *BIAS),
    ),
)
