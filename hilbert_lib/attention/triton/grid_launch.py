"""Launches of the plain kernels for grids."""

from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention.grids.request import Request, Tensors
from hilbert_lib.attention.triton.arguments import as_computed, is_interpreted
from hilbert_lib.attention.triton.backward import delta_kernel
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.grid import key_kernel, query_kernel
from hilbert_lib.attention.triton.start import Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.grid import EDGES, Axis

# Cells of a tile along each axis, of queries and, for dk and dv, of keys: 64 where compiled, 16 where interpreted.
TILES = {64: {1: (1, 1, 64), 2: (1, 8, 8), 3: (4, 4, 4)}, 16: {1: (1, 1, 16), 2: (1, 4, 4), 3: (2, 2, 4)}}
AXES = "012"


def forward(given: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    out = torch.empty(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    lse = torch.empty(*_by_row(given.q), dtype=torch.float32, device=given.q.device)
    start([_of_queries(Tensors(*as_computed(*given)), request, out=out, lse=lse)])
    return out, lse


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse; the same bits every time."""
    grads = Tensors(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given))
    dout, out, *computed = as_computed(dout, out, *given)
    given = Tensors(*computed)
    lse, delta = lse.contiguous(), torch.empty(*_by_row(given.q), dtype=torch.float32, device=lse.device)
    batch, seq, heads, head_dim = given.q.shape
    rows = batch * seq * heads
    block = 4096 // block_d(head_dim)
    sizes = {"rows": rows, "queries": seq, "heads": heads, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(head_dim), "BLOCK_M": block}
    starts = [
        Start(delta_kernel, (-(-rows // block),), (out.contiguous(), dout, delta, *dout.stride()[:3]), sizes),
        _of_queries(given, request, out=out, lse=lse, dout=dout, delta=delta, dq=grads.q),
        _of_keys(dout, given, lse, delta, request, grads, extra=False),
    ]
    if given.extra_k.shape[1]:
        starts.append(_of_keys(dout, given, lse, delta, request, grads, extra=True))
    start(starts)
    return grads


def _by_row(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _of_queries(given: Tensors, request: Request, *, out: Tensor, lse: Tensor, dout=None, delta=None, dq=None) -> Start:
    # Forward or, with dout, dq. q stands in for what is not used.
    q, extra = given.q, given.extra_k.shape[1]
    named, tiles = _shared(given, request)
    names = {f"T{n}": side for n, side in zip(AXES, _sides(request), strict=True)}
    strides = _strides("qkvef", given) | _strides("d", (q if dout is None else dout,))
    masks = {"PADDING": request.key_padding_mask is not None, "EXTRA_PADDING": request.extra_padding_mask is not None}
    more = {"EXTRA": extra > 0, "BACKWARD": dout is not None, "BLOCK_N": 64 if not is_interpreted() else 16}
    extra_padding = q if request.extra_padding_mask is None else request.extra_padding_mask.contiguous()
    tensors = given._asdict() | {"out": out, "lse": lse}
    tensors |= {name: q if x is None else x for name, x in (("dout", dout), ("delta", delta), ("dq", dq))}
    named |= strides | masks | more | names | tensors | {"extra_padding": extra_padding}
    named.pop("q")
    return Start(query_kernel, (tiles, q.shape[0] * q.shape[2]), (q,), named)


def _of_keys(
    dout: Tensor, given: Tensors, lse: Tensor, delta: Tensor, request: Request, grads: Tensors, *, extra: bool
) -> Start:  # fmt: skip
    # dk and dv of the grid's keys, or of the extra ones.
    (k, v), (dk, dv) = (x[3:] if extra else x[1:3] for x in (given, grads))
    named, tiles = _shared(given, request)
    padding = request.extra_padding_mask if extra else request.key_padding_mask
    sides = (1, 1, prod(_sides(request))) if extra else _sides(request)
    named |= {f"T{n}": side for n, side in zip(AXES, sides, strict=True)}
    named |= _strides("qkvd", (given.q, k, v, dout))
    named |= {"k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "dk": dk, "dv": dv, "EXTRA": extra}
    named |= {"PADDING": padding is not None, "padding": given.q if padding is None else padding.contiguous()}
    named |= {"BLOCK_M": 32 if not is_interpreted() else 16}
    tiles = -(-k.shape[1] // prod(sides)) if extra else tiles
    return Start(key_kernel, (tiles, k.shape[0] * k.shape[2]), (given.q,), named)


def _strides(names: str, tensors: tuple[Tensor, ...]) -> dict[str, int]:
    pairs = zip(names, tensors, strict=True)
    return {f"stride_{own}{axis}": x.stride(n) for own, x in pairs for n, axis in enumerate("bnh")}


def _sides(request: Request) -> tuple[int, int, int]:
    return TILES[16 if is_interpreted() else 64][len(request.neighbourhoods[0].shape)]


def _shared(given: Tensors, request: Request) -> tuple[dict, int]:
    # What every kernel takes, and how many rectangles there are.
    q, near = given.q, request.neighbourhoods[0]
    none = Axis(1, 1, 1, 1, False, "shift")
    axes = (none,) * (3 - len(near.axes)) + near.axes
    sides = _sides(request)
    ranks = [(-(-axis.cells // axis.dilation), axis.dilation) for axis in axes]
    tiles = prod(d * -(-m // side) for (m, d), side in zip(ranks, sides, strict=True))
    windows = tuple((1,) * (3 - len(near.axes)) + each.window for each in request.neighbourhoods)
    named = {
        "windows": _windows(windows, q.device),
        "inverse": q if request.ordering is None else request.ordering.slots(q.device),
        "padding": q if request.key_padding_mask is None else request.key_padding_mask.contiguous(),
        "scale": request.scale, "heads": q.shape[2], "group": q.shape[2] // given.k.shape[2],
        "extra": given.extra_k.shape[1], "HEAD_DIM": q.shape[3], "BLOCK_D": block_d(q.shape[3]),
        "GATHER": request.ordering is not None, "PRECISION": products_of_float32(), "num_warps": 4,
    }  # fmt: skip
    for n, axis in zip(AXES, axes, strict=True):
        named |= {f"n{n}": axis.cells, f"d{n}": axis.dilation, f"s{n}": axis.stride}
        named |= {f"C{n}": axis.is_causal, f"E{n}": EDGES.index("clip" if axis.is_causal else axis.edge)}
    return named, tiles


@cached_for_graphs(maxsize=256)
def _windows(windows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(windows, dtype=torch.int32, device=device)
