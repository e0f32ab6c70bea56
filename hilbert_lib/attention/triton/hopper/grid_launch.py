"""Launches of the warp-specialised kernels for grids, and the calls that these serve."""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from math import ceil, gcd, prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.failures import importing
from hilbert_lib.attention.grid_parts import on_its_keys, refusal_of_part
from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.triton import grid_launch as plain
from hilbert_lib.attention.triton.arguments import strides_of
from hilbert_lib.attention.triton.geometry import block_d, power_of_2
from hilbert_lib.attention.triton.hopper.bias_tables import bound_kernel, gradient_kernel, table_kernel
from hilbert_lib.attention.triton.start import FLAG, Made, Start, start
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood

# Number of axes of a grid -> cells of a box along each of three axes; and the axes along which two groups may make a
# tile, of which the first is taken unless another one lets a tile's queries share their window.
BOXES = {1: ((1, 1, 64),), 2: ((1, 8, 8),), 3: ((4, 4, 4), (2, 8, 4), (2, 4, 8))}
STACKS = {1: (2,), 2: (1, 2), 3: (1, 2)}
EXTRA_BOX = (1, 1, 64)

# (columns, whether tiles are of keys) -> boxes in the backward's two rings, as many as shared memory has room for. dq
# needs a box of v for less time than one of k.
RINGS = {(64, False): (4, 4), (64, True): (4, 4), (128, False): (4, 2), (128, True): (3, 3)}

# Columns past 128 of a wide row -> boxes of k and of v in the forward's rings, and buffers of queries.
WIDE = {64: (2, 3, 2), 128: (2, 3, 1)}

# Columns past 128 of a wide row -> boxes in the two rings of its backward, of dq and of dk and dv.
WIDE_RINGS = {(64, False): (4, 2), (64, True): (4, 2), (128, False): (3, 1), (128, True): (2, 2)}
# Number of axes of a grid -> cells of a box of 128 keys, of which windows may be made up.
WHOLE = {1: ((1, 1, 128),), 2: ((1, 16, 8), (1, 8, 16)), 3: ((2, 8, 8), (4, 8, 4), (4, 4, 8), (2, 4, 16))}
WHOLE_EXTRA = (1, 1, 128)
WHOLE_STAGES = 2  # boxes in its ring
# Number of axes of a grid -> other boxes of 64 keys for the forward, which small windows meet fewer of.
SMALL = {1: (), 2: ((1, 4, 16), (1, 16, 4)), 3: ()}
NO_STACK = -1  # for `boxes.Rules`: a tile is one box, which both groups of warps share

BUFFERS = 2  # of tiles: the next one is copied while the groups work on this one
# Shared memory for the sums of the gradient of a bias: columns -> (bytes, boxes in dq's rings, buffers of tiles), least
# first. The compiler takes at most 48 KiB in this way.
BESIDE_SUMS = {64: ((48 * 1024, (4, 4), 2),), 128: ((18 * 1024, (3, 2), 2), (48 * 1024, (4, 2), 1))}

# Whether tensors of a launch have a row for each query; not by identity, since q may be k. Of a forward: q, k, v, out.
FORWARD_ROWS = (True, False, False, True)
DQ_ROWS = (True, True, False, False, True, True)  # q, dout, k, v, dq, dq; of dk and dv the other way round

PLACES = 1024  # of a table of bias, that a program makes or reads

ROUNDS = 16  # rounds of programs for a part of a grid: between two, kernels of an exchange get a free multiprocessor


def refusal(q: Tensor, request: Request) -> str:
    """The reason why the warp-specialised kernels do not serve a call, from shapes and options alone, or ""."""
    if q.element_size() != 2:
        return f"serves float16 and bfloat16, got {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8 or not 16 <= q.shape[-1] <= 256:
        return f"serves a head_dim of 16 to 256, a multiple of 8; got {q.shape[-1]}"
    if is_wide(q) and request.has_bias:
        return f"serves a bias at a head_dim up to 128, got {q.shape[-1]}"
    if request.ordering is not None:
        return f"reads boxes of tokens that are stored row by row, got {request.ordering!r}"
    if request.slots is not None:
        return "reads boxes of tokens that are stored row by row, got runs of an ordering"
    axes = request.neighbourhoods[0].axes
    if request.part and (refused := refusal_of_part(axes, request.part)):
        return f"reads no such part of a grid: {refused}"
    for n, axis in enumerate(axes):
        if request.part and axis.cells % axis.dilation:
            sides = f"{axis.cells} and {axis.dilation} along axis {n}"
            return f"reads parts only of grids whose sides are multiples of dilation, got {sides}"
    return _refusal_of_bias_gradient(q, request) if request.bias_gradient else ""


def is_wide(q: Tensor) -> bool:
    """Whether rows are two parts of columns, for which there are kernels of their own."""
    return q.shape[-1] > 128


def columns_of(q: Tensor) -> int:
    """Columns of a box; narrower heads are padded."""
    return max(64, power_of_2(q.shape[-1]))


def _parts_of(q: Tensor) -> tuple[int, ...]:
    # Columns of each part of a row.
    return (128, 64 if q.shape[-1] <= 192 else 128) if is_wide(q) else (columns_of(q),)


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, seq)."""
    request = on_its_keys(request) if request.part else request
    inputs = Tensors(*_as_read(inputs.with_rows, request), as_contiguous(inputs.bias))
    q, k, v, extra_k, extra_v, _ = inputs
    made = Made(q.shape, q.dtype), Made(plain.by_row(q), torch.float32), FLAG, *_tables(inputs, request, 1)
    if tiling := _whole_boxes(q, request):
        return _forward_of_whole_boxes(inputs, request, tiling, made[:2])
    kernel, moves, constants = _forward_kernel(q, request)

    def starts(out: Tensor, lse: Tensor, flag: Tensor, table: Tensor | None) -> list[Start]:
        tensors = (q, k, v), (extra_k, extra_v), (out,)
        return [
            *([] if table is None else [_of_tables(inputs.bias, request, table)]),
            *_starts(
                kernel, moves, (lse, flag), tensors, FORWARD_ROWS, inputs, request, table, q.shape[2], **constants
            ),
            plain.of_queries(inputs, request, out=out, lse=lse, flag=flag),
        ]

    call = (*inputs, *plain.tensors_of(request, q.device))
    return start(starts, call, "grid forward on hopper", *request.options, made=made, finish=itemgetter(0, 1))


def _whole_boxes(q: Tensor, request: Request) -> "_Tiling | None":
    # Tiles and boxes of 128 keys of which all windows of a call are made up, if there are such.
    is_plain = not request.has_bias and request.part is None and request.key_padding_mask is None
    if not is_plain or request.extra_padding_mask is not None or not 64 < q.shape[-1] <= 128:
        return None
    return _tiling_of_whole_windows(request.neighbourhoods)


@lru_cache(maxsize=256)
def _tiling_of_whole_windows(neighbourhoods: tuple[Neighbourhood, ...]) -> "_Tiling | None":
    # Tiles whose queries share their window, the fewest, and a box of 128 keys of which all windows are made up.
    first, ndim = neighbourhoods[0], len(neighbourhoods[0].axes)

    def is_made_up(tiling: _Tiling, near: Neighbourhood) -> bool:
        return all(
            axis.edge == "shift"
            and not axis.is_causal
            and axis.window % keys == 0
            and axis.window <= axis.cells // axis.dilation  # in the residues that have the fewest cells, too
            and (axis.stride % queries == 0 or axis.window * axis.dilation == axis.cells)
            for axis, keys, queries in zip(plain.axes_of(near), tiling.keys, tiling.tile, strict=True)
        )

    tilings = (_Tiling(*each) for each in product(BOXES[ndim], WHOLE[ndim], STACKS[ndim]))
    fitting = [each for each in tilings if all(is_made_up(each, near) for near in neighbourhoods)]
    return min(fitting, key=lambda each: _all_tiles(first, each.tile), default=None)


def _forward_of_whole_boxes(inputs: Tensors, request: Request, tiling: "_Tiling", made: tuple) -> tuple:
    with importing("the module of the forward by whole boxes"):
        from hilbert_lib.attention.triton.hopper.grid_whole import MOVES, whole_kernel

    q, k, v, extra_k, extra_v, _ = inputs

    constants = {"tiling": tiling, "STAGES": WHOLE_STAGES}

    def starts(out: Tensor, lse: Tensor) -> list[Start]:
        tensors = (q, k, v), (extra_k, extra_v), (out,)
        return _starts(
            whole_kernel, MOVES, (lse,), tensors, FORWARD_ROWS, inputs, request, None, q.shape[2], **constants
        )

    call = (*inputs, *plain.tensors_of(request, q.device))
    return start(starts, call, "grid forward of whole boxes on hopper", *request.options, made=made)


def _tiling_of_forward(request: Request) -> "_Tiling":
    # With the box of 64 keys that a group meets fewest of. Tiles of a bias have the form of a group's.
    near = request.neighbourhoods[0]
    tiling = _tiling_of(near)
    if request.has_bias:
        return tiling
    axes = plain.axes_of(near)
    seen = [_seen(axis, size, is_strided=False) for axis, size in zip(axes, tiling.box, strict=True)]

    def count(keys: tuple[int, int, int]) -> int:
        return prod(ceil(cells / side) for cells, side in zip(seen, keys, strict=True))

    return tiling._replace(keys=min((tiling.box, *SMALL[len(near.axes)]), key=count))


def _forward_kernel(q: Tensor, request: Request) -> tuple:
    # The kernel of the forward, its names of steps, and the constants of its launch.
    with importing("the module of the forward by boxes"):
        from hilbert_lib.attention.triton.hopper import grid_forward, grid_wide

    if is_wide(q):
        stages, v_stages, buffers = WIDE[_parts_of(q)[1]]
        constants = {"STAGES": stages, "V_STAGES": v_stages, "BUFFERS": buffers}
        return grid_wide.wide_kernel, grid_wide.MOVES, constants
    constants = {"STAGES": 4, "tiling": _tiling_of_forward(request)}
    if not grid_forward.holds_queries(columns_of(q)):
        constants |= {"maxnreg": 80, "programs": 2}
    return grid_forward.forward_kernel, grid_forward.MOVES, constants


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None,
    delta: Tensor | None = None,
) -> Tensors:  # fmt: skip
    """Gradients of q, k, v and of the extra keys, from out and lse. The bits are the same every time.

    delta: that of out, dout and dlse, where it is known; a call with a bias takes none.
    """
    with importing("the module of the backward by boxes"):
        from hilbert_lib.attention.triton.hopper.grid_backward import MOVES, backward_kernel
        from hilbert_lib.attention.triton.hopper.grid_wide_backward import wide_backward_kernel

    request = on_its_keys(request) if request.part else request
    in_float = request.part is not None and request.part.in_float
    *read, dout = _as_read((*inputs.with_rows, dout), request)
    q, k, v, extra_k, extra_v = read
    inputs = Tensors(*read, as_contiguous(inputs.bias))
    tables, lse = _tables(inputs, request, 2), lse.contiguous()
    sums = bounds = None
    if inputs.bias is not None:
        sums = Made(tables[0].shape, torch.int64)
        bounds = Made((len(inputs.bias), 3), torch.int32)

    def starts(
        made_delta: Tensor | None, sums: Tensor | None, bounds: Tensor | None, *others: Tensor | None
    ) -> list[Start]:
        grads, tables, totals = Tensors(*others[:-4]), others[-4:-2], others[-2:]
        of_queries = (q, dout, k, v), (extra_k, extra_v), (grads.q, grads.q)
        of_keys = (k, v, q, dout), (extra_k, extra_v), (grads.k, grads.v)
        of_rows = made_delta if delta is None else delta
        if inputs.bias is not None:
            of_tables = _of_tables(inputs.bias, request, tables[0], flipped=tables[1], sums=sums, bounds=bounds)
            launches = [of_tables, _of_bounds(dout, out, lse, dlse, inputs, request, of_rows, bounds)]
        else:
            launches = [plain.delta_of(dout, out, of_rows, dlse)] if delta is None else []
        for tensors, heads, table in ((of_queries, q.shape[2], tables[0]), (of_keys, k.shape[2], tables[1])):
            kernel, rings = (wide_backward_kernel, WIDE_RINGS) if is_wide(q) else (backward_kernel, RINGS)
            (stages, b_stages), buffers = rings[_parts_of(q)[-1], tensors is of_keys], BUFFERS
            if inputs.bias is not None and tensors is of_queries:
                (stages, b_stages), buffers = _beside_sums(columns_of(q), request)
            constants = {"STAGES": stages, "B_STAGES": b_stages, "BUFFERS": buffers, "OF_KEYS": tensors is of_keys}
            if is_wide(q):
                constants["tiling"] = _tiling_of(request.neighbourhoods[0])._replace(stack=NO_STACK)
            constants["IN_FLOAT"] = q.shape[3] if in_float and tensors is of_keys else 0
            constants |= {"dbias": sums, "bounds": bounds} if tensors is of_queries else {"dbias": None, "bounds": None}
            by_query = DQ_ROWS if tensors is of_queries else tuple(not each for each in DQ_ROWS)
            launches += _starts(
                kernel, MOVES, (lse, of_rows), tensors, by_query, inputs, request, table, heads, **constants
            )
        if extra_k.shape[1]:
            launches += plain.of_extra_keys(dout, inputs, lse, of_rows, request, grads, totals)
        if inputs.bias is not None:
            launches.append(_of_gradient(sums, bounds, grads.bias, request))
        return launches

    call = (*inputs, dout, out, lse, dlse, delta, *plain.tensors_of(request, q.device))
    of_delta = Made(plain.by_row(q), torch.float32) if delta is None else None
    grads = plain.gradients_of(inputs, in_float)
    made = of_delta, sums, bounds, *grads, *tables, *plain.totals_of(inputs)
    finish = partial(plain.with_totals, 3, -2)
    return start(starts, call, "grid backward on hopper", *request.options, made=made, finish=finish)


def _starts(
    kernel, moves: tuple[str, ...], pointers: tuple, tensors: tuple, by_query: tuple[bool, ...], inputs: Tensors,
    request: Request, table: Tensor | None, heads: int, **named,
) -> list[Start]:  # fmt: skip
    # The launches of a kernel, one for the residues of each size.
    given = moves, pointers, tensors, by_query, inputs, request, table, heads
    return [_start(kernel, *given, each, **named) for each in _residues_of(request.neighbourhoods[0])]


def _start(
    kernel, moves: tuple[str, ...], pointers: tuple, tensors: tuple, by_query: tuple[bool, ...], inputs: Tensors,
    request: Request, table: Tensor | None, heads: int, residues: "_Residues", *, programs: int = 1,
    tiling: "_Tiling | None" = None, **named,
) -> Start:  # fmt: skip
    # The launch for the tiles of `heads` heads and of `residues`, with `programs` on a multiprocessor. tensors:
    # (tensors on the grid that are read, extra keys, results). by_query: whether what is read, and each result, has a
    # row for each query. moves: argument names of steps along axes of heads, of the read tensors, of the results, and
    # of the extra keys. table: of bias. tiling: unless it is that of `_tiling_of`.
    from hilbert_lib.attention.triton.hopper import box_descriptors as descriptors

    near = request.neighbourhoods[0]
    q, (read, extra, results) = inputs.q, tensors
    form = _form(near, request.part, tiling or _tiling_of(near), residues)
    parts, count, grid = _parts_of(q), extra[0].shape[1], [*read, *results]
    extents = [form.of_queries if is_of_queries else form.of_keys for is_of_queries in by_query]
    sides = [form.rules.box if is_of_queries else form.rules.keys for is_of_queries in by_query]
    described = [
        x if x.dtype == torch.float32 else descriptors.described(x, extent, box, columns)
        for x, extent, box in zip(grid, extents, sides, strict=True)
        for columns in parts
    ]
    end = len(read) * len(parts)  # of descriptors of what is read on the grid
    extra_described = described[end - 2 * len(parts) : end]
    of_extra = descriptors.extra_extent(max(count, 1))
    if count:
        box = WHOLE_EXTRA if prod(form.rules.keys) == 128 else EXTRA_BOX
        extra_described = [descriptors.described(x, of_extra, box, columns) for x in extra for columns in parts]
    described[end:end] = extra_described
    steps = [step for x, extent in zip(grid, extents, strict=True) for step in descriptors.steps_of(x, extent)]
    steps += [descriptors.steps_of(x, of_extra)[0] for x in extra]
    is_of_keys, at_once = named.get("OF_KEYS", False), programs * multiprocessors(q.device)
    total = form.tiles[is_of_keys] * q.shape[0] * heads
    if is_of_keys and _is_strided(near):
        at_once = programs_of_strided_keys(total, at_once)
    rules = plain.rules(inputs, request)
    part = _ranks(residues.ranks, q.device) if form.rules.is_split else rules["boxes"]
    named = rules | {"part": part} | named | dict(zip(moves, steps, strict=True)) | {
        "extra_padding": plain.extra_padding(inputs, request), "BLOCK_D": parts[0], "BLOCK_E": parts[-1],
        "RULES": form.rules, "EXTRA": count > 0, "PADDING": request.key_padding_mask is not None,
        "EXTRA_PADDING": request.extra_padding_mask is not None,
        "bias": table, "BIAS": None if table is None else bias_form(request),
        "total": total, "programs": min(total, at_once),
    }  # fmt: skip
    names = _names(kernel)
    used = {name: value for name, value in named.items() if name in names}
    count = _started(total, named["programs"], ROUNDS if request.part else 1)
    return Start(kernel, (count,), (*pointers, *described), used)


def as_contiguous(bias: Tensor | None) -> Tensor | None:
    """A bias whose entries lie one after the other."""
    return None if bias is None else bias.contiguous()


def _tables(inputs: Tensors, request: Request, count: int) -> list[Made | None]:
    # Padded tables of bias, or None for each.
    if inputs.bias is None:
        return [None] * count
    return [Made(padded_sides(request, len(inputs.bias)), torch.float32)] * count


def _of_tables(bias: Tensor, request: Request, table: Tensor, *, flipped=None, sums=None, bounds=None) -> Start:
    # The launch that makes padded tables of a bias and, for the backward, clears sums and bounds.
    tensors, sizes = (bias, table, flipped, sums, bounds), _sizes_of_tables(request)
    named = sizes | {"scale": request.scale, "BLOCK": PLACES}
    return Start(table_kernel, (ceil(sizes["places"] / PLACES), len(bias)), tensors, named)


def _of_bounds(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, inputs: Tensors, request: Request, delta: Tensor,
    bounds: Tensor,
) -> Start:  # fmt: skip
    # The launch that computes delta, and the bounds of the gradient of a bias.
    (batch, queries, heads, head_dim), keys, padding = inputs.q.shape, inputs.k.shape[1], request.key_padding_mask
    mask = dout if padding is None else padding.contiguous()
    tensors = (out.contiguous(), dout, lse, dlse, inputs.v, mask, delta, bounds)
    block = 4096 // block_d(head_dim)
    named = strides_of("dv", (dout, inputs.v)) | {"queries": queries, "keys": keys, "heads": heads}
    named |= {"group": heads // inputs.v.shape[2], "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim)}
    named |= {"BLOCK_M": block, "PADDING": padding is not None}
    return Start(bound_kernel, (ceil(max(queries, keys) / block), heads, batch), tensors, named)


def _of_gradient(sums: Tensor, bounds: Tensor, dbias: Tensor, request: Request) -> Start:
    # The launch that makes the gradient of a bias of its sums.
    grid, named = (ceil(dbias[0].numel() / PLACES), len(dbias)), _sizes_of_tables(request) | {"BLOCK": PLACES}
    return Start(gradient_kernel, grid, (sums, bounds, dbias), named)


def _sizes_of_tables(request: Request) -> dict[str, int]:
    # Arguments for the entries, the margins and the places of a padded table along three axes.
    entries = request.pattern.bias_sides
    entries = (1,) * (3 - len(entries)) + entries
    centre, sides = _places(request.neighbourhoods[0], request.pattern.bias_sides)
    margins = [place - count // 2 for place, count in zip(centre, entries, strict=True)]
    named = {f"entries{n}": count for n, count in zip(plain.AXES, entries, strict=True)}
    named |= {f"margin{n}": margin for n, margin in zip(plain.AXES, margins, strict=True)}
    return named | {"sides1": sides[1], "sides2": sides[2], "places": prod(sides)}


def padded_sides(request: Request, heads: int) -> tuple[int, ...]:
    """The shape of a padded table of bias: heads, and places along each axis of the grid."""
    entries = request.pattern.bias_sides
    _, sides = _places(request.neighbourhoods[0], entries)
    return heads, *sides[3 - len(entries) :]


def bias_form(request: Request) -> "Form":  # noqa: F821 - of a module that is imported where it runs
    """The sizes of a padded table of bias."""
    from hilbert_lib.attention.triton.hopper.bias import Form

    return Form(*_places(request.neighbourhoods[0], request.pattern.bias_sides))


@lru_cache(maxsize=256)
def _places(near: Neighbourhood, entries: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Along each of three axes the place of entry w - 1 in a padded table, and the number of places.
    missing, centre, sides = 3 - len(entries), [], []
    for n, (axis, side, count) in enumerate(
        zip(plain.axes_of(near), _box_of(near), (1,) * missing + entries, strict=True)
    ):
        # A query and a key of a group and a box that it sees are so many ranks farther apart than some pair that
        # attends. On an axis that wraps places have bounds instead.
        margin = 0 if n < missing or axis.edge == "wrap" else 2 * (side - 1) + 2 * (axis.stride - 1)
        centre.append(count // 2 + margin)
        sides.append(count + 2 * margin)
    return tuple(centre), tuple(sides)


def _refusal_of_bias_gradient(q: Tensor, request: Request) -> str:
    # Why the sums of the gradient of a bias have no room in shared memory, or "".
    request = on_its_keys(request) if request.part else request
    (room, *_), needed = BESIDE_SUMS[columns_of(q)][-1], _bytes_of_sums(request)
    if needed > room:
        return (
            f"sums the gradient of a bias in {room:,} bytes of shared memory: "
            f"windows {request.neighbourhoods[0].window} need {needed:,}"
        )
    return ""


def _bytes_of_sums(request: Request) -> int:
    # In whole kilobytes, as `hopper.bias` takes them.
    return ceil(4 * prod(padded_sides(request, 1)) / 1024) * 1024


def _beside_sums(columns: int, request: Request) -> tuple[tuple[int, int], int]:
    # Boxes in dq's two rings and buffers of its tiles, with as much room for the sums as they need.
    needed = _bytes_of_sums(request)
    return next((rings, buffers) for room, rings, buffers in BESIDE_SUMS[columns] if needed <= room)


def _started(total: int, programs: int, rounds: int) -> int:
    # Number of programs with a tile, in at most `rounds` rounds of `programs`. `places.tiles_of` deals tiles out alike.
    length = ceil(ceil(total / programs) / rounds) * programs
    full = (total - 1) // length  # rounds before the last
    return full * programs + min(programs, total - full * length)


def programs_of_strided_keys(tiles: int, most: int) -> int:
    """The number of programs, up to `most`, that share so many strided tiles of keys: the largest prime number.

    Program p takes the tiles p, p + programs, ... With strides every second or fourth tile along an axis has more boxes
    of queries. Some programs would get all long tiles, if their number had a common divisor with that pattern. Few
    tiles may need one round more by the prime, which costs more than that: then all take part.

    >>> programs_of_strided_keys(4096, 132), programs_of_strided_keys(132, 132)
    (131, 132)
    """
    prime = _largest_prime(most)
    return prime if 31 * ceil(tiles / prime) <= 32 * ceil(tiles / most) else most


@cache
def _largest_prime(most: int) -> int:
    return next(n for n in range(most, 0, -1) if all(n % divisor for divisor in range(2, int(n**0.5) + 1)))


@cache
def _names(kernel) -> frozenset[str]:
    return frozenset(kernel.arg_names) | {"num_warps", "maxnreg"}


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return get_gpu_info(device).multiprocessors


class _Tiling(NamedTuple):
    """Cells of a group's box and of a box of keys; the rest as in `boxes.Rules`."""

    box: tuple[int, int, int]
    keys: tuple[int, int, int]
    stack: int

    @property
    def tile(self) -> tuple[int, ...]:
        return tuple(side * (1 + (n == self.stack)) for n, side in enumerate(self.box))


class _Residues(NamedTuple):
    """The residues of a launch: along each of three axes they have equally many cells."""

    ranks: tuple[int, ...]  # cells of a residue
    first: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def last(self) -> tuple[int, ...]:
        return tuple(first + count - 1 for first, count in zip(self.first, self.count, strict=True))


@lru_cache(maxsize=256)
def _residues_of(near: Neighbourhood) -> list[_Residues]:
    # Where a dilation does not divide its side, the first residues have a cell more than the others.
    sizes = []
    for axis in plain.axes_of(near):
        ranks, longer = divmod(axis.cells, axis.dilation)
        long, short = (ranks + 1, 0, longer), (ranks, longer, axis.dilation - longer)
        sizes.append([long, short] if longer else [short])
    return [_Residues(*zip(*each, strict=True)) for each in product(*sizes)]


@cached_for_graphs(maxsize=256)
def _ranks(ranks: tuple[int, ...], device: torch.device) -> Tensor:
    # As `boxes.axes_of` reads them.
    return torch.tensor(ranks, dtype=torch.int32, device=device)


class _Form(NamedTuple):
    """Sizes along three axes that the launches for the same residues share."""

    of_queries: "Extent"  # noqa: F821 - of a module that is imported where it runs
    of_keys: "Extent"  # noqa: F821
    tiles: tuple[int, int]  # number of tiles of queries, and of keys, of a sequence and head
    rules: "Rules"  # noqa: F821 - of a module that is imported where it runs


@lru_cache(maxsize=256)
def _box_of(near: Neighbourhood) -> tuple[int, int, int]:
    # The box that needs the fewest products of a group and, with strides, the fewest copies for the two of a tile.
    # Without strides one group is a box ahead of the other: copies that only one of them needs cost nothing.
    stack, is_strided = STACKS[len(near.axes)][0], _is_strided(near)

    def work(box: tuple[int, int, int]) -> tuple[int, int]:
        return _copies(near, box, box), _copies(near, box, _Tiling(box, box, stack).tile) if is_strided else 0

    return min(BOXES[len(near.axes)], key=work)


def count_boxes(near: Neighbourhood) -> int:
    """Products of 64 queries and 64 keys for one sequence and head, with windows whole at the ends of axes."""
    box = _box_of(near)
    return _copies(near, box, box)


def count_products(near: Neighbourhood) -> int:
    """Products of 64 queries and 64 keys for one sequence and head, whatever the stride.

    Windows are cut at the ends of axes. Both halves of every tile count, also where one is empty.

    >>> count_products(Neighbourhood((64, 64), 7)), count_products(Neighbourhood((64, 64), 7, dilation=8))
    (384, 128)
    """
    tiling, axes = _tiling_of(near), plain.axes_of(near)
    seen = [axis.window + size - 1 for axis, size in zip(axes, tiling.tile, strict=True)]
    return 2 * sum(
        _tiles(each.ranks, each.count, tiling.tile)
        * prod(ceil(min(keys, n) / side) for keys, n, side in zip(seen, each.ranks, tiling.keys, strict=True))
        for each in _residues_of(near)
    )


def _copies(near: Neighbourhood, box: tuple[int, int, int], sizes: tuple[int, ...]) -> int:
    # Boxes of keys that tiles of so many queries along each axis see.
    axes = plain.axes_of(near)
    seen = (_seen(axis, size, _is_strided(near)) for axis, size in zip(axes, sizes, strict=True))
    boxes = prod(ceil(keys / side) for keys, side in zip(seen, box, strict=True))
    return _all_tiles(near, sizes) * boxes


def _is_strided(near: Neighbourhood) -> bool:
    return any(axis.stride > 1 for axis in near.axes)


def _seen(axis: Axis, size: int, is_strided: bool) -> int:
    # Most keys that a run of `size` queries sees, which begins at a multiple of `size`. Without strides windows count
    # as if the axis had no ends.
    aligned = axis.stride - gcd(axis.stride, size)  # the last place in a group at which a run may begin
    keys = axis.window + (aligned + size - 1) // axis.stride * axis.stride  # from the first leader to the last
    return min(keys, axis.cells // axis.dilation) if is_strided else keys


def _all_tiles(near: Neighbourhood, sizes: Iterable[int]) -> int:
    # Number of tiles of so many cells along each axis.
    return sum(_tiles(each.ranks, each.count, sizes) for each in _residues_of(near))


def _tiles(ranks: Iterable[int], residues: Iterable[int], sizes: Iterable[int]) -> int:
    # Number of tiles of so many residues, each of so many cells.
    return prod(count * ceil(n / size) for n, count, size in zip(ranks, residues, sizes, strict=True))


def _tiling_of(near: Neighbourhood) -> "_Tiling":
    # The tiles of a launch that has no other reason.
    box = _box_of(near)
    return _Tiling(box, box, STACKS[len(near.axes)][0])


@lru_cache(maxsize=256)
def _form(near: Neighbourhood, part: GridPart | None, tiling: "_Tiling", residues: _Residues) -> _Form:
    from hilbert_lib.attention.triton.hopper.box_descriptors import Extent
    from hilbert_lib.attention.triton.hopper.boxes import Rules

    axes, ndim = plain.axes_of(near), len(near.axes)
    shape, dilation = tuple(axis.cells for axis in axes), tuple(axis.dilation for axis in axes)
    rows, ranks, computed = shape, residues.ranks, residues.ranks  # of q, and of its queries that are computed
    if part:
        first = (1,) * (3 - ndim)
        rows, queries = ((*first, *map(len, x)) for x in (part.rows, part.queries))
        ranks, computed = (tuple(n // d for n, d in zip(x, dilation, strict=True)) for x in (rows, queries))
    rules = Rules(
        *tiling, tuple(axis.stride for axis in axes), tuple(axis.is_causal for axis in axes),
        tuple(map(plain.edge_of, axes)), ndim, any(step > 1 for step in dilation), part is not None,
        residues.count != dilation,
    )  # fmt: skip
    of_queries = Extent(rows, dilation, ranks, residues.last)
    of_keys = Extent(shape, dilation, residues.ranks, residues.last)
    tiles = tuple(_tiles(x, residues.count, tiling.tile) for x in (computed, residues.ranks))
    return _Form(of_queries, of_keys, tiles, rules)


def _as_read(inputs: Sequence[Tensor], request: Request) -> list[Tensor]:
    # The fields of `Tensors`, and perhaps dout. A tensor that the copy engine cannot read is copied once.
    from hilbert_lib.attention.triton.hopper.box_descriptors import extra_extent, is_reached

    near = request.neighbourhoods[0]
    form = _form(near, request.part, _tiling_of(near), _residues_of(near)[0])
    of_extra = extra_extent(inputs[3].shape[1])
    extents = form.of_queries, form.of_keys, form.of_keys, of_extra, of_extra, form.of_queries
    return [
        x if not x.numel() or is_reached(x, extent) else x.contiguous()
        for x, extent in zip(inputs, extents[: len(inputs)], strict=True)
    ]
