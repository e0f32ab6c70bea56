"""Launches of the plain kernels for grids."""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.triton.arguments import as_computed, is_interpreted
from hilbert_lib.attention.triton.backward import delta_kernel
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.grid import key_kernel, query_kernel
from hilbert_lib.attention.triton.start import Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.neighbourhood import EDGES, Axis, Neighbourhood

# Cells of a tile along each axis, of queries and, for dk and dv, of keys: 64 where compiled, 16 where interpreted.
TILES = {64: {1: (1, 1, 64), 2: (1, 8, 8), 3: (4, 4, 4)}, 16: {1: (1, 1, 16), 2: (1, 4, 4), 3: (2, 2, 4)}}
AXES = "012"


def forward(given: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    out = torch.empty(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    lse = torch.empty(*_by_row(given.q), dtype=torch.float32, device=given.q.device)
    given = Tensors(*as_computed(*given))

    def starts() -> list[Start]:
        return [of_queries(given, request, out=out, lse=lse)]

    tensors = (*given, *tensors_of(request, out.device))
    start(starts, tensors, "grid forward", *request.options, made=(out, lse))
    return out, lse


def backward(dout: Tensor, given: Tensors, out: Tensor, lse: Tensor, request: Request) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse; the same bits every time."""
    in_float = request.part is not None and request.part.in_float
    dtypes = [torch.float32 if in_float and n in (1, 2) else x.dtype for n, x in enumerate(given)]
    grads = Tensors(*(torch.empty(x.shape, dtype=y, device=x.device) for x, y in zip(given, dtypes, strict=True)))
    dout, out, *computed = as_computed(dout, out, *given)
    given = Tensors(*computed)
    lse, delta = lse.contiguous(), torch.empty(*_by_row(given.q), dtype=torch.float32, device=lse.device)

    def starts() -> list[Start]:
        made = [
            delta_of(dout, out, delta),
            of_queries(given, request, out=out, lse=lse, dout=dout, delta=delta, dq=grads.q),
            of_keys(dout, given, lse, delta, request, grads, extra=False),
        ]
        if given.extra_k.shape[1]:
            made.append(of_keys(dout, given, lse, delta, request, grads, extra=True))
        return made

    tensors = (*given, dout, out, lse, *tensors_of(request, out.device))
    start(starts, tensors, "grid backward", *request.options, made=(delta, *grads))
    return grads


def _by_row(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def delta_of(dout: Tensor, out: Tensor, delta: Tensor) -> Start:
    """The sums over dout * out, which every gradient needs."""
    batch, seq, heads, head_dim = out.shape
    rows, block = batch * seq * heads, 4096 // block_d(head_dim)
    sizes = {"rows": rows, "queries": seq, "heads": heads, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(head_dim), "BLOCK_M": block}
    return Start(delta_kernel, (-(-rows // block),), (out.contiguous(), dout, delta, *dout.stride()[:3]), sizes)


def of_queries(
    given: Tensors, request: Request, *, out: Tensor, lse: Tensor, dout=None, delta=None, dq=None, flag=None
) -> Start:  # fmt: skip
    """The forward or, with dout, dq; with a flag only where that is set. q stands in for what is not used."""
    q, extra = given.q, given.extra_k.shape[1]
    named = rules(given, request)
    tiles = _tiles(request, keys=False)
    names = {f"T{n}": side for n, side in zip(AXES, _sides(request), strict=True)}
    strides = _strides("qkvef", given) | _strides("d", (q if dout is None else dout,))
    masks = {"PADDING": request.key_padding_mask is not None, "EXTRA_PADDING": request.extra_padding_mask is not None}
    more = {"EXTRA": extra > 0, "BACKWARD": dout is not None, "BLOCK_N": 64 if not is_interpreted() else 16}
    more |= {"IF_FLAG": flag is not None}
    tensors = given._asdict() | {"out": out, "lse": lse, "extra_padding": extra_padding(given, request)}
    optional = {"dout": dout, "delta": delta, "dq": dq, "flag": flag}
    tensors |= {name: q if x is None else x for name, x in optional.items()}
    named |= strides | masks | more | names | tensors
    named.pop("q")
    return Start(query_kernel, (tiles, q.shape[2], q.shape[0]), (q,), named)


def of_keys(
    dout: Tensor, given: Tensors, lse: Tensor, delta: Tensor, request: Request, grads: Tensors, *, extra: bool
) -> Start:  # fmt: skip
    """dk and dv of the grid's keys, or of the extra ones."""
    (k, v), (dk, dv) = (x[3:] if extra else x[1:3] for x in (given, grads))
    named = rules(given, request)
    padding = request.extra_padding_mask if extra else request.key_padding_mask
    sides = (1, 1, prod(_sides(request))) if extra else _sides(request)
    named |= {f"T{n}": side for n, side in zip(AXES, sides, strict=True)}
    named |= _strides("qkvd", (given.q, k, v, dout))
    named |= {"k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "dk": dk, "dv": dv, "EXTRA": extra}
    named |= {"PADDING": padding is not None, "padding": given.q if padding is None else padding.contiguous()}
    named |= {"BLOCK_M": 32 if not is_interpreted() else 16}
    tiles = -(-k.shape[1] // prod(sides)) if extra else _tiles(request, keys=True)
    return Start(key_kernel, (tiles, k.shape[2], k.shape[0]), (given.q,), named)


def _strides(names: str, tensors: tuple[Tensor, ...]) -> dict[str, int]:
    pairs = zip(names, tensors, strict=True)
    return {f"stride_{own}{axis}": x.stride(n) for own, x in pairs for n, axis in enumerate("bnh")}


def _sides(request: Request) -> tuple[int, int, int]:
    return TILES[16 if is_interpreted() else 64][len(request.neighbourhoods[0].shape)]


def _tiles(request: Request, *, keys: bool) -> int:
    # How many rectangles of queries or of keys there are.
    axes, part, found = request.neighbourhoods[0].axes, request.part, 1
    for n, (axis, side) in enumerate(zip(axes, _sides(request)[3 - len(axes) :], strict=True)):
        cells = len((part.keys if keys else part.queries)[n]) if part else axis.cells
        ranks = -(-cells // axis.dilation)
        found *= axis.dilation * -(-ranks // side)
    return found


@lru_cache(maxsize=256)
def axes_of(near: Neighbourhood) -> tuple[Axis, Axis, Axis]:
    """The axes of a grid, the last of three."""
    return (Axis(1, 1, 1, 1, False, "shift"),) * (3 - len(near.axes)) + near.axes


@lru_cache(maxsize=256)
def _of_axes(near: Neighbourhood) -> dict:
    # What kernels are told of the axes.
    named = {}
    for n, axis in zip(AXES, axes_of(near), strict=True):
        named |= {f"n{n}": axis.cells, f"d{n}": axis.dilation, f"s{n}": axis.stride}
        named |= {f"C{n}": axis.is_causal, f"E{n}": edge_of(axis)}
    return named


def extra_padding(given: Tensors, request: Request) -> Tensor:
    """The mask of extra keys; q stands in for it."""
    return given.q if request.extra_padding_mask is None else request.extra_padding_mask.contiguous()


def inverse_of(request: Request, device: torch.device) -> Tensor | None:
    """The row of each cell, where they are not stored row by row."""
    return request.slots if request.ordering is None else request.ordering.slots(device)


def tensors_of(request: Request, device: torch.device) -> tuple[Tensor | None, ...]:
    """Those of a call that kernels read besides those with gradients."""
    return request.key_padding_mask, request.extra_padding_mask, inverse_of(request, device)


def rules(given: Tensors, request: Request) -> dict:
    """What every kernel is told of a call, the warp-specialised ones too."""
    q, near, part = given.q, request.neighbourhoods[0], request.part
    windows = tuple((1,) * (3 - len(near.axes)) + each.window for each in request.neighbourhoods)
    inverse = inverse_of(request, q.device)
    return _of_axes(near) | {
        "windows": _windows(windows, q.device),
        "boxes": q if part is None else _boxes(part, near.shape if request.slots is not None else None, q.device),
        "inverse": q if inverse is None else inverse,
        "padding": q if request.key_padding_mask is None else request.key_padding_mask.contiguous(),
        "scale": request.scale, "heads": q.shape[2], "group": q.shape[2] // given.k.shape[2],
        "extra": given.extra_k.shape[1], "q_rows": q.shape[1], "k_rows": given.k.shape[1], "HEAD_DIM": q.shape[3],
        "BLOCK_D": block_d(q.shape[3]), "GATHER": inverse is not None, "PART": part is not None,
        "PRECISION": products_of_float32(), "num_warps": 4,
        # With three stages Triton 3.6 computes a wrong dq in float32 where rows are found in a table (seen on an H200).
        "num_stages": 2,
    }  # fmt: skip


def edge_of(axis: Axis) -> int:
    """The number of what happens at the ends of an axis, as kernels know it."""
    return EDGES.index("clip" if axis.is_causal else axis.edge)


@cached_for_graphs(maxsize=256)
def _windows(windows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(windows, dtype=torch.int32, device=device)


@cached_for_graphs(maxsize=256)
def _boxes(part: GridPart, gathered: tuple[int, ...] | None, device: torch.device) -> Tensor:
    # As the kernels read them; where rows are found through a table, by cells of the whole grid.
    lines = [(0, 1, 0, 1) * 2] * (3 - len(part.rows))
    for n, (rows, queries, keys) in enumerate(zip(part.rows, part.queries, part.keys, strict=True)):
        held = [range(gathered[n])] * 2 if gathered else [rows, keys]
        pairs = zip(held, (queries, keys), strict=True)
        lines.append([end for own, some in pairs for end in (own.start, len(own), some.start, some.stop)])
    return torch.tensor(lines, dtype=torch.int32, device=device)
