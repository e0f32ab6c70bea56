"""Attention over packed lists by matrix products: blocks of 64 queries by all keys that any of them sees.

Blocks with about as many keys are taken together, in chunks. dk and dv walk the lists turned round, so that each row is
written once, and the bits are the same every time. The host reads how many tiles each block has, and so waits for the
device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.fused import absence, kernel_limits
from hilbert_lib.attention.failures import not_compiled
from hilbert_lib.attention.grid_parts import as_returned
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.triton import limits
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists, both_ways
from hilbert_lib.patterns.points import ListedPairs

CHUNK = 2**22  # scores held at a time, of all heads and sequences
CAVEAT = "a NaN in a key reaches gradients of queries that do not see it, in its block"


class _Blocks(NamedTuple):
    """Some blocks of rows and the rows that are listed for them. The row past the end stands where there is none."""

    own: Tensor  # (blocks, 64) int64
    listed: Tensor  # (blocks, listed rows) int64
    attends: Tensor  # (blocks, 64, listed rows) bool


class _Queries(NamedTuple):
    """Blocks of queries with their keys, the extra ones last. A KV head has the rows of its group, head by head."""

    rows: Tensor  # (blocks * 64,) int64
    q: Tensor  # (batch, blocks, kv_heads, group * 64, head_dim)
    k: Tensor  # (batch, blocks, kv_heads, keys + extra, head_dim)
    v: Tensor
    attends: Tensor  # (batch or 1, blocks, 1, group * 64, keys + extra) bool
    scores: Tensor  # (batch, blocks, kv_heads, group * 64, keys + extra), -inf where a query does not see a key
    keys: int  # those of k, without the extra ones


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, queries)."""
    batch, count, heads, head_dim = inputs.q.shape
    out = inputs.q.new_zeros(batch, count + 1, heads, head_dim)
    lse = inputs.q.new_full((batch, count + 1, heads), -torch.inf, dtype=WORKING_DTYPE[inputs.q.dtype])
    for block in _blocks_of_queries(inputs, request):
        own_lse = block.scores.logsumexp(-1, keepdim=True)
        # Not exp(scores - lse): where scores are large, lse is rounded so much that these do not sum to 1.
        weights = block.scores.softmax(-1).masked_fill_(own_lse == -torch.inf, 0.0)
        out.index_copy_(1, block.rows, _by_row(_weighted(weights, block), heads).to(out.dtype))
        lse.index_copy_(1, block.rows, _by_row(own_lse, heads)[..., 0])
    return out[:, :count].contiguous(), lse[:, :count].transpose(1, 2).contiguous()


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse."""
    dtype = WORKING_DTYPE[dout.dtype]
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.transpose(1, 2)
    by_query = [_with_last_row(x) for x in (dout.to(dtype), lse.transpose(1, 2)[..., None], delta[..., None])]
    grads = [x.new_zeros(x.shape[0], x.shape[1] + 1, *x.shape[2:], dtype=dtype) for x in inputs.with_rows]
    _add_gradients_of_queries(grads, by_query, inputs, request)
    _add_gradients_of_keys(grads, by_query, inputs, request)
    grads = [x[:, : y.shape[1]] for x, y in zip(grads, inputs.with_rows, strict=True)]
    return as_returned(Tensors(*grads), inputs, request)


def _add_gradients_of_queries(grads: list[Tensor], by_query: list[Tensor], inputs: Tensors, request: Request) -> None:
    # Into grads[0], and grads[3] and grads[4], those of the extra keys. by_query: dout, lse and delta.
    for block in _blocks_of_queries(inputs, request):
        douts, lses, deltas = (_gathered(x, block.rows, block.q) for x in by_query)
        weights = (block.scores - _finite(lses)).exp_()
        dscores = torch.where(block.attends, weights * (douts @ block.v.mT - deltas), 0.0)
        grads[0].index_copy_(1, block.rows, _by_row(dscores @ block.k, inputs.q.shape[2]) * request.scale)
        if inputs.extra_k.shape[1]:
            of_extra = slice(block.keys, None)
            grads[3][:, :-1] += (dscores[..., of_extra].mT @ block.q).sum(1).transpose(1, 2) * request.scale
            grads[4][:, :-1] += (weights[..., of_extra].mT @ douts).sum(1).transpose(1, 2)


def _add_gradients_of_keys(grads: list[Tensor], by_query: list[Tensor], inputs: Tensors, request: Request) -> None:
    # Into grads[1] and grads[2], those of k and v. by_query: dout, lse and delta.
    q, k, v = (_with_last_row(x.to(WORKING_DTYPE[x.dtype])) for x in inputs[:3])
    _, turned = both_ways(request.lists, inputs.q.shape[1], inputs.k.shape[1])
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    shown = _shown_keys(request, inputs.k)
    for blocks in _chunks(turned, q):
        rows = blocks.own.flatten()
        like = q.new_empty(q.shape[0], len(blocks.own), kv_heads, 0, 0)
        ks, vs = (_gathered(x, rows, like) for x in (k, v))
        qs, douts, lses, deltas = (_gathered(x, blocks.listed.flatten(), like) for x in (q, *by_query))
        attends = blocks.attends[None, :, None]
        if shown is not None:
            attends = attends & shown[:, blocks.own][:, :, None, :, None]
        attends = attends.repeat(1, 1, 1, 1, group)
        scores = (ks @ qs.mT).mul_(request.scale)
        weights = torch.where(attends, (scores - _finite(lses).mT).exp_(), 0.0)
        dscores = torch.where(attends, weights * (vs @ douts.mT - deltas.mT), 0.0)
        grads[1].index_copy_(1, rows, _by_row(dscores @ qs, kv_heads) * request.scale)
        grads[2].index_copy_(1, rows, _by_row(weights @ douts, kv_heads))


def _blocks_of_queries(inputs: Tensors, request: Request) -> Iterator[_Queries]:
    dtype = WORKING_DTYPE[inputs.q.dtype]
    q, k, v = (_with_last_row(x.to(dtype)) for x in inputs[:3])
    extra_k, extra_v = (x.to(dtype).transpose(1, 2)[:, None] for x in inputs.extra)
    (batch, _, heads, _), kv_heads, extra = q.shape, k.shape[2], extra_k.shape[3]
    lists, _ = both_ways(request.lists, inputs.q.shape[1], inputs.k.shape[1])
    shown = _shown_keys(request, inputs.k)
    for blocks in _chunks(lists, q, extra):
        rows, count = blocks.own.flatten(), len(blocks.own)
        qs = _gathered(q, rows, q.new_empty(batch, count, kv_heads, 0, 0))
        ks, vs = (_gathered(x, blocks.listed.flatten(), qs) for x in (k, v))
        attends = blocks.attends[None]
        if shown is not None:
            attends = attends & shown[:, blocks.listed][:, :, None]
        if extra:
            ks, vs = (torch.cat([x, y.expand(-1, count, -1, -1, -1)], 3) for x, y in ((ks, extra_k), (vs, extra_v)))
            of_extra = attends.new_ones(1, 1, 1, extra)
            if request.extra_padding_mask is not None:
                of_extra = ~request.extra_padding_mask[:, None, None]
            sizes = max(len(attends), len(of_extra)), count, BLOCK
            attends = torch.cat([attends.expand(*sizes, -1), of_extra.expand(*sizes, -1)], 3)
        attends = attends.repeat(1, 1, heads // kv_heads, 1)[:, :, None]
        scores = (qs @ ks.mT).mul_(request.scale).masked_fill_(~attends, -torch.inf)
        yield _Queries(rows, qs, ks, vs, attends, scores, blocks.listed.shape[1])


def _shown_keys(request: Request, k: Tensor) -> Tensor | None:
    # Whether each row of k, and the one past the end, has a weight: (batch, keys + 1) bool; None where all have.
    mask = request.key_padding_mask
    return None if mask is None else torch.nn.functional.pad(~mask, (0, 1))


def _chunks(lists: PackedLists, q: Tensor, extra: int = 0) -> Iterator[_Blocks]:
    # All blocks, those with the most tiles first. extra: further keys of each.
    starts = lists.starts.long()
    tiles, by_tiles = starts.diff().sort(descending=True, stable=True)
    tiles, first, taken = tiles.tolist(), 0, 0
    rows_of_scores = q.shape[0] * q.shape[2]
    while first < len(tiles) and not (q.is_meta and taken == 3):  # where memory is counted: the others take no more
        most = tiles[first]
        size = max(1, CHUNK // (rows_of_scores * BLOCK * max(1, most * BLOCK + extra)))
        blocks = by_tiles[first : first + size]
        first, taken = first + size, taken + 1
        tile = starts[blocks][:, None] + torch.arange(most, device=blocks.device)
        exists = tile < starts[blocks + 1][:, None]
        tile = tile.where(exists, 0)
        listed = lists.key_rows[tile].long().where(exists[:, :, None], -1).flatten(1)
        attends = (lists.attends(tile) & exists[:, :, None, None]).transpose(1, 2).flatten(2)
        own = lists.query_rows.view(-1, BLOCK)[blocks].long()
        chunk = _Blocks(own.where(own >= 0, lists.queries), listed.where(listed >= 0, lists.keys), attends)
        yield _Blocks(*(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in chunk)) if q.is_meta else chunk


def _with_last_row(x: Tensor) -> Tensor:
    # A row of zeros past the end of x (batch, rows, heads, n).
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))


def _gathered(x: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    # Rows of x (batch, rows, heads, n) by block and KV head, those of the heads of a group one after the other:
    # (batch, blocks, kv_heads, group * rows, n). like: has the first three of these sides.
    batch, blocks, kv_heads, _, _ = like.shape
    gathered = x.index_select(1, rows).view(batch, blocks, -1, kv_heads, x.shape[2] // kv_heads, x.shape[3])
    return gathered.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)


def _by_row(x: Tensor, heads: int) -> Tensor:
    # The inverse of `_gathered`: (batch, blocks * rows, heads, n).
    batch, _, kv_heads, _, width = x.shape
    return x.unflatten(3, (heads // kv_heads, -1)).permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, width)


def _finite(lse: Tensor) -> Tensor:
    # lse, but 0 for a row without keys: all its scores are -inf, and -inf - -inf would be NaN.
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _weighted(weights: Tensor, block: _Queries) -> Tensor:
    # weights @ v. A NaN or inf in a row of v reaches only the queries that attend to it, though 0 * NaN is NaN.
    is_finite = block.v.isfinite().all(-1, keepdim=True)
    if is_finite.is_meta or is_finite.all():
        return weights @ block.v
    out = weights @ block.v.masked_fill(~is_finite, 0.0)
    for key in (~is_finite[..., 0]).flatten(0, 2).any(0).nonzero()[:, 0].tolist():
        reached = weights[..., key, None] * block.v[..., None, key, :].masked_fill(is_finite[..., None, key, :], 0.0)
        out = out + torch.where(block.attends[..., key, None], reached, 0.0)
    return out


def kernels(device: torch.device) -> tuple[Forward, Backward]:
    """The launches of the kernels. Raises `KernelError` where they do not load."""
    try:
        from hilbert_lib.attention.triton import lists_launch  # triton is imported only where a kernel is used
    except (ImportError, AttributeError) as error:
        raise not_compiled("the module of kernels for lists", error) from error

    return lists_launch.forward, lists_launch.backward


def _kernel_limits(q: Tensor, request: Request) -> str:
    if q.shape[0] > MOST_SEQUENCES:
        return f"serves up to {MOST_SEQUENCES:,} sequences, got {q.shape[0]:,}"
    # Not `max(..., default=0)`: the compiler of torch 2.11 does not trace that.
    if (tiles := max([0, *(len(listed) for listed in request.lists[2::4])])) > limits.TILES:
        return f"serves up to {limits.TILES:,} tiles of lists, got {tiles:,}"
    return kernel_limits(q, q.shape[1], request.scale)


def kernel_workspace(
    arguments: tuple, request: Request, direction: str, device: torch.device, returned: int, tiles: int | None = None
) -> dict[str, int]:
    """The scratch of `lists_launch.py`. Interpreted kernels count as compiled ones.

    tiles: as of `lists_launch.is_at_once`; None for those of the request.
    """
    if direction == "forward":
        return {}
    from hilbert_lib.attention.triton import lists_launch  # triton is imported only where a kernel is used

    inputs = Tensors(*arguments[1])
    if tiles is None:
        tiles = max(map(len, request.lists[2::4]))
    if lists_launch.is_at_once(inputs, tiles):
        return {}
    workspace = {"lse and delta": 8 * inputs.q.numel() // inputs.q.shape[3]}
    if splits := lists_launch.splits_of(inputs):
        workspace["parts of the gradients of extra keys, float32"] = 2 * 4 * splits * inputs.extra_k.numel()
    return workspace


BACKENDS = (
    Backend(
        serves=ListedPairs,
        name="triton",
        note="kernels that walk over lists of keys",
        colour="#D55E00",
        functions=kernels,
        limits=_kernel_limits,
        of_keys=lambda q, k, request: kernel_limits(q, k.shape[1], request.scale),
        here=lambda q, request: absence(q.device),
        caveat=CAVEAT,
        workspace=kernel_workspace,
        options=("lists", "part"),
    ),
    Backend(
        serves=ListedPairs,
        name="eager",
        note="matrix products of blocks of 64 queries by the keys that they see, in chunks",
        colour="#999999",
        functions=lambda device: (forward, backward),
        caveat=CAVEAT,
        options=("lists", "part"),
    ),
)
