"""Launches of the plain kernels for grids: arguments of `grid.query_kernel` and `grid.key_kernel`."""

from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.triton.arguments import as_computed, fitting, for_device, is_interpreted, strides_of
from hilbert_lib.attention.triton.backward import delta_kernel
from hilbert_lib.attention.triton.decode_line import attend_in_windows
from hilbert_lib.attention.triton.geometry import block_d, products_of_float32
from hilbert_lib.attention.triton.grid import key_kernel, query_kernel
from hilbert_lib.attention.triton.grid_bias import entry_kernel, pair_kernel
from hilbert_lib.attention.triton.limits import parts_of_extra_keys
from hilbert_lib.attention.triton.rows import sum_of_parts
from hilbert_lib.attention.triton.shifts import TILES, cells_of, shape_of_sums, shifts_of, tiles_of
from hilbert_lib.attention.triton.start import Made, Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.neighbourhood import EDGES, Axis, Neighbourhood

AXES = "012"
ENTRIES = 32  # entries of a table of bias that a program sums up


class Steps(NamedTuple):
    """A kernel's steps, and its warps."""

    rows: int
    num_warps: int
    # With three stages Triton 3.6 computes a wrong float32 dq where rows are looked up in a table (on an H200).
    num_stages: int = 2


class Config(NamedTuple):
    """Steps of the kernels for one dtype and head_dim; `shifts.cells_of` are a program's cells."""

    keys: Steps  # of `query_kernel`
    queries: Steps  # of `key_kernel`


INTERPRETED = Config(Steps(16, 4), Steps(16, 4))
# (bytes of an element, largest head_dim) -> configuration, for Hopper; those of float32 are the fastest of some on an
# H200 (reports/HISTORY.md, "float32"), but past 128 columns, which were not timed.
CONFIGS = {
    (2, 128): Config(Steps(64, 4), Steps(32, 4)), (2, 256): Config(Steps(32, 8), Steps(16, 8)),
    (4, 64): Config(Steps(32, 4), Steps(32, 4)), (4, 128): Config(Steps(32, 4), Steps(32, 4)),
    (4, 256): Config(Steps(16, 8, 1), Steps(16, 8, 1)),
}  # fmt: skip
# The same for every other GPU, as `arguments.ELSEWHERE`. With two stages dk and dv at a head_dim of 64 keep
# registers in memory whatever their steps: docs/kernels.md says how many bytes.
ELSEWHERE = {
    (2, 64): Config(Steps(32, 4), Steps(32, 8, 1)), (2, 128): Config(Steps(32, 8), Steps(16, 8)),
    (2, 256): Config(Steps(16, 8), Steps(16, 8)),
    (4, 64): Config(Steps(16, 4), Steps(16, 4)), (4, 128): Config(Steps(16, 4), Steps(16, 4)),
    (4, 256): Config(Steps(16, 8, 1), Steps(16, 8, 1)),
}  # fmt: skip
ON_B200 = ELSEWHERE | {
    (2, 64): Config(Steps(64, 8), Steps(32, 8, 1)), (2, 128): Config(Steps(32, 8), Steps(16, 4, 1)),
}  # fmt: skip


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    if request.query_starts is not None or request.key_start is not None:
        return attend_in_windows(inputs, request)
    made = Made(inputs.q.shape, inputs.q.dtype), Made(by_row(inputs.q), torch.float32)
    inputs = _computed(inputs)

    def starts(out: Tensor, lse: Tensor) -> list[Start]:
        return [of_queries(inputs, request, out=out, lse=lse)]

    tensors = (*inputs, *tensors_of(request, inputs.q.device))
    return start(starts, tensors, "grid forward", *request.options, made=made)


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of the inputs, from the merged out and lse. The bits are the same every time."""
    in_float = request.part is not None and request.part.in_float
    sums = None if inputs.bias is None else sums_of(inputs, request)
    made = Made(by_row(inputs.q), torch.float32), sums, *gradients_of(inputs, in_float), *totals_of(inputs)
    dout, out = as_computed(dout, out)
    inputs, lse = _computed(inputs), lse.contiguous()

    def starts(delta: Tensor, sums: Tensor | None, *grads_and_totals: Tensor | None) -> list[Start]:
        grads, totals = Tensors(*grads_and_totals[:-2]), grads_and_totals[-2:]
        launches = [
            delta_of(dout, out, delta, dlse),
            of_queries(inputs, request, out=out, lse=lse, dout=dout, delta=delta, dq=grads.q),
            of_keys(dout, inputs, lse, delta, request, grads, extra=False),
        ]
        if inputs.extra_k.shape[1]:
            launches += of_extra_keys(dout, inputs, lse, delta, request, grads, totals)
        if sums is not None:
            launches += of_bias(dout, inputs, lse, delta, request, sums, grads.bias)
        return launches

    tensors = (*inputs, dout, out, lse, dlse, *tensors_of(request, out.device))
    finish = partial(with_totals, 2, -2)
    return start(starts, tensors, "grid backward", *request.options, made=made, finish=finish)


def gradients_of(inputs: Tensors, in_float: bool) -> tuple[Made | None, ...]:
    """The gradients of inputs as the kernels leave them.

    Those of the extra keys are as they are returned. Of several parts of the queries they are in parts, (parts, batch,
    extra, kv_heads, head_dim) float32; None without extra keys. in_float: whether those of k and v are in float32.
    """
    q, k, v, extra_k, _, bias = inputs
    key_dtype = torch.float32 if in_float else k.dtype
    parts = parts_of_extra_keys(q.shape[1], extra_k.shape)
    of_extra = Made((parts, *extra_k.shape), torch.float32) if parts > 1 else None
    if parts == 1:
        of_extra = Made(extra_k.shape, extra_k.dtype)
    of_bias = None if bias is None else Made(bias.shape, bias.dtype)
    return Made(q.shape, q.dtype), Made(k.shape, key_dtype), Made(v.shape, key_dtype), of_extra, of_extra, of_bias


def totals_of(inputs: Tensors) -> tuple[Made | None, Made | None]:
    """The gradients of the extra keys where they are sums of parts; otherwise None."""
    extra_k = inputs.extra_k
    is_in_parts = parts_of_extra_keys(inputs.q.shape[1], extra_k.shape) > 1
    like = Made(extra_k.shape, extra_k.dtype) if is_in_parts else None
    return like, like


def with_totals(first: int, totals: int, made: list[Tensor | None]) -> Tensors:
    """The gradients, of which those of the extra keys are the sums of their parts, always in the same order.

    first, totals: numbers of the first gradient, and of the first such sum, among the made tensors.
    """
    grads = Tensors(*made[first : first + len(Tensors._fields)])
    if made[totals] is None:  # of one part
        return grads
    return grads._replace(extra_k=made[totals], extra_v=made[totals + 1])


def _computed(inputs: Tensors) -> Tensors:
    # As the kernels take them: a bias is contiguous.
    bias = None if inputs.bias is None else as_computed(inputs.bias.contiguous())[0]
    return Tensors(*as_computed(*inputs.with_rows), bias)


def by_row(q: Tensor) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def delta_of(dout: Tensor, out: Tensor, delta: Tensor, dlse: Tensor | None = None) -> Start:
    """The launch that computes delta, the sum of dout * out over head_dim less dlse, which every gradient needs."""
    batch, seq, heads, head_dim = out.shape
    rows, block = batch * seq * heads, 4096 // block_d(head_dim)
    sizes = {"rows": rows, "queries": seq, "heads": heads, "HEAD_DIM": head_dim}
    sizes |= {"BLOCK_D": block_d(head_dim), "BLOCK_M": block}
    return Start(delta_kernel, (-(-rows // block),), (out.contiguous(), dout, dlse, delta, *dout.stride()[:3]), sizes)


def of_queries(
    inputs: Tensors, request: Request, *, out: Tensor, lse: Tensor, dout=None, delta=None, dq=None, flag=None
) -> Start:  # fmt: skip
    """The launch of the forward or, with `dout`, of dq. With a `flag` it runs only where the flag is set.

    q stands in for tensors that are not used.
    """
    q, extra = inputs.q, inputs.extra_k.shape[1]
    named = rules(inputs, request)
    sides = _sides(q, request)
    tiles = tiles_of(request, sides, keys=False)
    names = {f"T{n}": cells for n, cells in zip(AXES, sides, strict=True)}
    strides = strides_of("qkvef", inputs.with_rows) | strides_of("d", (q if dout is None else dout,))
    masks = {"PADDING": request.key_padding_mask is not None, "EXTRA_PADDING": request.extra_padding_mask is not None}
    steps = config_of(q).keys
    flags = {"EXTRA": extra > 0, "BACKWARD": dout is not None, "BLOCK_N": steps.rows, **_resources_of(steps)}
    flags |= {"IF_FLAG": flag is not None}
    tensors = inputs._asdict() | {"out": out, "lse": lse, "extra_padding": extra_padding(inputs, request)}
    optional = {"dout": dout, "delta": delta, "dq": dq, "flag": flag}
    tensors |= {name: q if x is None else x for name, x in optional.items()}
    named |= strides | masks | flags | names | tensors
    named |= table_of_bias(inputs, request)
    named.pop("q")
    return Start(query_kernel, (tiles, q.shape[2], q.shape[0]), (q,), named)


def of_extra_keys(
    dout: Tensor, inputs: Tensors, lse: Tensor, delta: Tensor, request: Request, grads: Tensors, totals: tuple
) -> list[Start]:  # fmt: skip
    """The launches of the gradients of the extra keys: of one part, or of several and of their totals."""
    parts = of_keys(dout, inputs, lse, delta, request, grads, extra=True)
    if totals[0] is None:
        return [parts]
    return [parts, *(sum_of_parts(x, total) for x, total in zip(grads.extra, totals, strict=True))]


def of_keys(
    dout: Tensor, inputs: Tensors, lse: Tensor, delta: Tensor, request: Request, grads: Tensors, *, extra: bool
) -> Start:  # fmt: skip
    """The launch of dk and dv, of the grid's keys or, in parts, of the extra keys."""
    (k, v), (dk, dv) = (x.extra if extra else x[1:3] for x in (inputs, grads))
    named = rules(inputs, request)
    padding = request.extra_padding_mask if extra else request.key_padding_mask
    sides = _sides(inputs.q, request)
    sides = (1, 1, prod(sides)) if extra else sides
    named |= {f"T{n}": cells for n, cells in zip(AXES, sides, strict=True)}
    named |= strides_of("qkvd", (inputs.q, k, v, dout))
    named |= {"k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, "dk": dk, "dv": dv, "EXTRA": extra}
    named |= {"PADDING": padding is not None, "padding": inputs.q if padding is None else padding.contiguous()}
    steps = config_of(inputs.q).queries
    named |= {"BLOCK_M": steps.rows, **_resources_of(steps)}
    named |= table_of_bias(inputs._replace(bias=None) if extra else inputs, request)
    if extra:
        tiles = -(-k.shape[1] // prod(sides)) * parts_of_extra_keys(inputs.q.shape[1], k.shape)
    else:
        tiles = tiles_of(request, sides, keys=True)
    return Start(key_kernel, (tiles, k.shape[2], k.shape[0]), (inputs.q,), named)


def sums_of(inputs: Tensors, request: Request) -> Made:
    """The scratch of `of_bias`."""
    return Made(shape_of_sums(request, inputs.q.shape[0], inputs.q.shape[2], _cells(inputs.q)), torch.float32)


def of_bias(
    dout: Tensor, inputs: Tensors, lse: Tensor, delta: Tensor, request: Request, sums: Tensor, dbias: Tensor
) -> list[Start]:  # fmt: skip
    """The launches of the gradient of a bias: sums of pairs, and of these the sum for each entry."""
    sides, (batch, _, heads, _) = _sides(inputs.q, request), inputs.q.shape
    shifts, table = shifts_of(request, sides), table_of_bias(inputs, request)
    shared = {f"T{n}": cells for n, cells in zip(AXES, sides, strict=True)}
    shared |= {f"lowest{n}": rank for n, rank in zip(AXES, shifts.lowest, strict=True)}
    shared |= {f"shifts{n}": count for n, count in zip(AXES, shifts.counts, strict=True)}
    shared |= {"sums": sums, "heads": heads}
    of_pairs = rules(inputs, request) | table | shared | strides_of("qkvd", (*inputs[:3], dout))
    of_pairs |= {"k": inputs.k, "v": inputs.v, "dout": dout, "lse": lse, "delta": delta, "batch": batch}
    of_pairs |= {"tiles": tiles_of(request, sides, keys=False), "PADDING": request.key_padding_mask is not None}
    of_entries = shared | table | {"dbias": dbias, "runs": len(sums), "ROWS": prod(sides), "BLOCK": ENTRIES}
    of_entries.pop("sums")
    of_entries.pop("bias")
    of_pairs.pop("extra")
    blocks = -(-dbias[0].numel() // ENTRIES)
    return [
        Start(pair_kernel, (shifts.blocks, heads, len(sums)), (inputs.q,), of_pairs),
        Start(entry_kernel, (blocks, heads), (sums,), of_entries),
    ]


def config_of(q: Tensor) -> Config:
    """The configuration of the kernels for the dtype, the head_dim and the device of q."""
    if is_interpreted():
        return INTERPRETED
    return fitting(for_device(q.device, CONFIGS, ELSEWHERE, ON_B200), q)


def _resources_of(steps: Steps) -> dict[str, int]:
    # Triton's options.
    return {"num_warps": steps.num_warps, "num_stages": steps.num_stages}


def _sides(q: Tensor, request: Request) -> tuple[int, int, int]:
    return TILES[_cells(q)][len(request.neighbourhoods[0].shape)]


def _cells(q: Tensor) -> int:
    # Of a tile.
    return 16 if is_interpreted() else cells_of(q)


@lru_cache(maxsize=256)
def axes_of(near: Neighbourhood) -> tuple[Axis, Axis, Axis]:
    """Three axes: those of a grid, after axes of one cell."""
    return (Axis(1, 1, 1, 1, False, "shift"),) * (3 - len(near.axes)) + near.axes


@lru_cache(maxsize=256)
def _of_axes(near: Neighbourhood) -> dict:
    # Arguments of the kernels for the axes.
    named = {}
    for n, axis in zip(AXES, axes_of(near), strict=True):
        named |= {f"n{n}": axis.cells, f"d{n}": axis.dilation, f"s{n}": axis.stride}
        named |= {f"C{n}": axis.is_causal, f"E{n}": edge_of(axis)}
    return named


def extra_padding(inputs: Tensors, request: Request) -> Tensor:
    """The mask of extra keys; q stands in where there is none."""
    return inputs.q if request.extra_padding_mask is None else request.extra_padding_mask.contiguous()


def table_of_bias(inputs: Tensors, request: Request) -> dict:
    """Arguments of the kernels for a bias: the table and its entries along three axes, or None for each of them."""
    sides = (None,) * 3
    if inputs.bias is not None:
        sides = (1,) * (3 - len(request.pattern.bias_sides)) + request.pattern.bias_sides
    return {"bias": inputs.bias} | {f"entries{n}": side for n, side in zip(AXES, sides, strict=True)}


def inverse_of(request: Request, device: torch.device) -> Tensor | None:
    """The row in storage of each cell; None where cells are stored row by row."""
    return request.slots if request.ordering is None else request.ordering.slots(device)


def tensors_of(request: Request, device: torch.device) -> tuple[Tensor | None, ...]:
    """Tensors of a call that kernels read and that have no gradient."""
    return request.key_padding_mask, request.extra_padding_mask, inverse_of(request, device)


def rules(inputs: Tensors, request: Request) -> dict:
    """Arguments that every kernel for grids takes, the warp-specialised ones too."""
    q, near, part = inputs.q, request.neighbourhoods[0], request.part
    windows = tuple(tuple(axis.window for axis in axes_of(each)) for each in request.neighbourhoods)
    inverse = inverse_of(request, q.device)
    return _of_axes(near) | {
        "windows": _windows(windows, q.device),
        "boxes": q if part is None else _boxes(part, near.shape if request.slots is not None else None, q.device),
        "inverse": q if inverse is None else inverse,
        "padding": q if request.key_padding_mask is None else request.key_padding_mask.contiguous(),
        "scale": request.scale, "heads": q.shape[2], "group": q.shape[2] // inputs.k.shape[2],
        "extra": inputs.extra_k.shape[1], "q_rows": q.shape[1], "k_rows": inputs.k.shape[1], "HEAD_DIM": q.shape[3],
        "BLOCK_D": block_d(q.shape[3]), "GATHER": inverse is not None, "PART": part is not None,
        "PRECISION": products_of_float32(), "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def edge_of(axis: Axis) -> int:
    """The index in `EDGES` of the edge rule of an axis. A causal axis is clipped."""
    return EDGES.index("clip" if axis.is_causal else axis.edge)


@cached_for_graphs(maxsize=256)
def _windows(windows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(windows, dtype=torch.int32, device=device)


@cached_for_graphs(maxsize=256)
def _boxes(part: GridPart, grid: tuple[int, ...] | None, device: torch.device) -> Tensor:
    # (3, 8): for each axis the extent of q, then that of k. Rows that are looked up in a table lie in the whole grid.
    lines = [(0, 1, 0, 1) * 2] * (3 - len(part.rows))
    for n, (rows, queries, keys) in enumerate(zip(part.rows, part.queries, part.keys, strict=True)):
        q_cells, k_cells = (range(grid[n]), range(grid[n])) if grid else (rows, keys)
        lines.append((*_extent(q_cells, queries), *_extent(k_cells, keys)))
    return torch.tensor(lines, dtype=torch.int32, device=device)


def _extent(cells: range, computed: range) -> tuple[int, int, int, int]:
    # First cell, number of cells, first computed cell, and the cell after the last computed one.
    return cells.start, len(cells), computed.start, computed.stop
