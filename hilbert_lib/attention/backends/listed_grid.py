"""Neighbourhoods and unions of them by the kernels for packed lists, which serve grids and points alike.

The lists are made of the rules of the grid when a call needs them, and kept within `grid_lists.LARGEST` bytes: make the
first call outside of a CUDA graph. A union is one pass over the lists of all its patterns where `is_one_pass` says so.
"""

from dataclasses import replace
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor

from hilbert_lib.attention import grid_lists
from hilbert_lib.attention.backends import listed
from hilbert_lib.attention.backends.backend import Backend, Backward, Forward
from hilbert_lib.attention.backends.fused import absence, kernel_limits
from hilbert_lib.attention.grid_lists import Box, Patterns
from hilbert_lib.attention.grid_parts import has_all_keys
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.attention.triton.limits import MOST_SEQUENCES
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.union import Union

# Of a short call: of more cells, or more pairs in all heads and sequences, the device takes longer than the host.
MOST_CELLS, MOST_PAIRS = 1024, 2**19
# Of a union in one pass, over the tiles of its parts. One pass took 0.59 to 0.90 of the time of its parts and their
# merge at up to 1.11 times the tiles. From 1.26 times on it took 0.87 to 2.05, short calls apart (an H200,
# reports/HISTORY.md).
MOST_TILES = 1.125
# Of a union in one pass (the same record): the most cells of a window, and the most head_dim. The bound of cells holds
# for a dilated window, too.
MOST_WINDOW, MOST_HEAD_DIM = 343, 128
# From head_dim 65 on: cells of a window, or else boxes over tiles of lists, without a gradient and with one.
WIDE_HEAD_DIM, SMALL_WINDOW, LEAST_BOXES = 65, 81, {False: 1.5, True: 1.15}
# Of a dilated window: the most cells of a residue and of the grid along an axis (tiles of a longer side take long to
# count); and by the most head_dim, the fewest products of boxes for a tile of lists at which lists come first.
MOST_RANKS, MOST_SIDE = 32, 2**16
LEAST_PRODUCTS = {64: 2.0, 128: 2.4}
NOTE = "kernels that walk over lists of keys, made once for each grid and kept"


def patterns_of(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns of a union, or the one."""
    return pattern.patterns if isinstance(pattern, Union) else (pattern,)


@lru_cache(maxsize=256)
def heads_by_patterns(pattern: HeadNeighbourhoods | Union) -> dict[Patterns, tuple[int, ...]]:
    """The KV heads of each neighbourhood, or of each tuple of those of a union."""
    heads: dict[Patterns, tuple[int, ...]] = {}
    by_head = zip(*(part.by_head for part in patterns_of(pattern)), strict=True)
    for head, patterns in enumerate(by_head):
        heads[patterns] = (*heads.get(patterns, ()), head)
    return heads


def is_short(q: Tensor, request: Request) -> bool:
    """Whether a call on a grid takes its host longer than its device: "lists" has one launch each way, others several.

    Not of parts of a grid, which would each need lists of their own, nor of heads with different windows, which are
    copied.
    """
    parts = patterns_of(request.pattern)
    if not all(isinstance(part, HeadNeighbourhoods) for part in parts):
        return False
    if request.part is not None or request.slots is not None or request.has_bias or parts[0].length > MOST_CELLS:
        return False
    sets = heads_by_patterns(request.pattern)
    pairs = sum(near.pairs for near in next(iter(sets)))
    return len(sets) == 1 and q.shape[0] * q.shape[2] * pairs <= MOST_PAIRS


def is_one_pass(q: Tensor, request: Request) -> bool:
    """Whether a union is one pass over the lists of all patterns: in a short call, or where it has few tiles more."""
    return is_short(q, request) or shares_tiles(request.pattern, _box(request))


@lru_cache(maxsize=256)
def shares_tiles(union: Union, box: Box | None) -> bool:
    """Whether the lists of a union have at most `MOST_TILES` times the tiles of those of its patterns one by one.

    That is so where one kind of block suits all patterns, as windows of one dilation and alike in shape: one pass has
    the products of one by one, and no merge. A window of another dilation would spread the keys of each block.

    >>> from hilbert_lib import Neighbourhood
    >>> near, wide, far = (Neighbourhood((32, 32), *rules) for rules in ((5,), (9,), (5, 4)))
    >>> [shares_tiles(Union((near, other)).of_heads(1), None) for other in (wide, far)]
    [True, False]
    """
    for patterns in heads_by_patterns(union):
        alone = sum(grid_lists.count_tiles((near,), box) for near in patterns)
        if grid_lists.count_tiles(patterns, box) > MOST_TILES * alone:
            return False
    return True


def leads_boxes(q: Tensor, request: Request, *, gradient: bool) -> bool:
    """Whether "lists" take less time than boxes on Hopper: for a union of several narrow windows in one pass."""
    union = request.pattern
    if not isinstance(union, Union) or request.part is not None or q.shape[3] > MOST_HEAD_DIM:
        return False
    if len(union.patterns) == 1:  # boxes have one pass, too, as for the window itself
        return False
    if not all(isinstance(part, HeadNeighbourhoods) for part in union.patterns) or len(heads_by_patterns(union)) > 1:
        return False
    (patterns,) = heads_by_patterns(union)
    largest = max(prod(near.window) for near in patterns)
    if largest > MOST_WINDOW or not is_one_pass(q, request):
        return False
    if q.shape[3] < WIDE_HEAD_DIM or largest <= SMALL_WINDOW:
        return True
    return _boxes_over_tiles(patterns) >= LEAST_BOXES[gradient]


@lru_cache(maxsize=256)
def _boxes_over_tiles(patterns: Patterns) -> float:
    from hilbert_lib.attention.triton.hopper.grid_launch import count_boxes  # triton is imported only where it is used

    return sum(map(count_boxes, patterns)) / grid_lists.count_tiles(patterns)


def leads_residues(q: Tensor, request: Request) -> bool:
    """Whether "lists" take less time than boxes on Hopper for a dilated window: where residues are small.

    Boxes then compute many more products than lists have tiles. Not of strides, of larger residues, nor of larger
    windows: with as many products none was timed.
    """
    pattern = request.pattern
    if not isinstance(pattern, HeadNeighbourhoods) or request.part is not None or len(heads_by_patterns(pattern)) > 1:
        return False
    near = pattern.by_head[0]
    axes = near.axes  # whose windows and dilations are no larger than the grid
    if all(axis.dilation == 1 for axis in axes) or prod(axis.window for axis in axes) > MOST_WINDOW:
        return False
    if any(axis.stride > 1 or axis.cells > min(MOST_RANKS * axis.dilation, MOST_SIDE) for axis in axes):
        return False
    least = next((least for most, least in LEAST_PRODUCTS.items() if q.shape[3] <= most), None)
    return least is not None and _products_over_tiles(near) >= least


@lru_cache(maxsize=256)
def _products_over_tiles(near: Neighbourhood) -> float:
    from hilbert_lib.attention.triton.hopper.grid_launch import count_products  # triton is imported where it is used

    return count_products(near) / grid_lists.count_tiles((near,))


def forward(inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    """Output like q, and lse (batch, heads, queries)."""
    run, _ = listed.kernels(inputs.q.device)
    sets = heads_by_patterns(request.pattern)
    if len(sets) == 1:
        return run(inputs, _with_lists(request, *sets, inputs.q.device))
    batch, queries, heads, _ = inputs.q.shape
    # Contiguous whatever the strides of q, as torch.compile takes them to be.
    out, lse = inputs.q.new_empty(inputs.q.shape), inputs.q.new_empty(batch, heads, queries, dtype=torch.float32)
    for patterns, kv_heads in sets.items():
        own, own_kv = _heads(kv_heads, heads // inputs.k.shape[2], out.device)
        own_request = _with_lists(request, patterns, out.device)
        out[:, :, own], lse[:, own] = run(_of_heads(inputs, own, own_kv), own_request)
    return out, lse


def backward(
    dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request, dlse: Tensor | None = None
) -> Tensors:
    """Gradients of q, k, v and of the extra keys, from the merged out and lse. The bits are the same every time."""
    _, run = listed.kernels(inputs.q.device)
    sets = heads_by_patterns(request.pattern)
    if len(sets) == 1:
        return run(dout, inputs, out, lse, _with_lists(request, *sets, dout.device), dlse)
    grads = [x.new_empty(x.shape) for x in inputs.with_rows]
    for patterns, kv_heads in sets.items():
        own, own_kv = _heads(kv_heads, inputs.q.shape[2] // inputs.k.shape[2], dout.device)
        own_dlse = None if dlse is None else dlse[:, own]
        results = out[:, :, own], lse[:, own], _with_lists(request, patterns, dout.device), own_dlse
        of_q, *of_keys = run(dout[:, :, own], _of_heads(inputs, own, own_kv), *results)
        grads[0][:, :, own] = of_q
        for grad, own_grad in zip(grads[1:], of_keys, strict=False):
            if own_grad is not None:  # None without extra keys
                grad[:, :, own_kv] = own_grad.to(grad.dtype)
    return Tensors(*grads)


def _with_lists(request: Request, patterns: Patterns, device: torch.device) -> Request:
    # Kernels read the lists and not the pattern: of a union, too, they count extra keys once.
    return replace(request, lists=grid_lists.grid_lists(patterns, request.ordering, _box(request), device))


def _box(request: Request) -> Box | None:
    return request.part.rows if request.part else None


@cached_for_graphs(maxsize=256)
def _heads(kv_heads: tuple[int, ...], group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # The numbers of the query heads of some KV heads, and of these.
    own_kv = torch.tensor(kv_heads, device=device)
    return (own_kv[:, None] * group + torch.arange(group, device=device)).flatten(), own_kv


def _of_heads(inputs: Tensors, heads: Tensor, kv_heads: Tensor) -> Tensors:
    q, *with_keys = inputs.with_rows
    return Tensors(q[:, :, heads], *(x[:, :, kv_heads] for x in with_keys))


def _limits(q: Tensor, request: Request) -> str:
    part = request.part
    if request.slots is not None or (part and (part.in_float or not has_all_keys(part, request.pattern.shape))):
        return "computes no part of a grid but a query_box"
    if q.shape[0] > MOST_SEQUENCES:
        return f"serves up to {MOST_SEQUENCES:,} sequences, got {q.shape[0]:,}"
    return kernel_limits(q, q.shape[1], request.scale)


def _of_keys(q: Tensor, k: Tensor, request: Request) -> str:
    if refused := kernel_limits(q, k.shape[1], request.scale):
        return refused
    if torch.compiler.is_compiling():  # sides may be symbols there, of which no lists are made
        return ""
    if (size := _lists_bytes(q, request)) > grid_lists.LARGEST:
        return f"serves lists of up to {grid_lists.LARGEST:,} bytes, got {size:,}"
    return ""


def _lists_bytes(q: Tensor, request: Request) -> int:
    # Those of all patterns: a union one by one needs them all in each call.
    if isinstance(request.pattern, Union) and not is_one_pass(q, request):
        return sum(_lists_bytes(q, replace(request, pattern=pattern)) for pattern in request.pattern.patterns)
    return sum(grid_lists.lists_bytes(patterns, _box(request)) for patterns in heads_by_patterns(request.pattern))


def _tiles(patterns: Patterns, request: Request) -> int:
    # Of the lists, or of those turned round where these are more.
    return max(grid_lists.count_tiles(patterns, _box(request), is_turned=is_turned) for is_turned in (False, True))


def _workspace(
    arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
) -> dict[str, int]:
    # The lists are kept for later calls. Where windows differ by head, each set of heads is copied, with its results.
    inputs = Tensors(*(arguments[0] if direction == "forward" else arguments[1]))
    workspace = {"lists": _lists_bytes(inputs.q, request)}
    sets = heads_by_patterns(request.pattern).values()
    tiles = max(_tiles(patterns, request) for patterns in heads_by_patterns(request.pattern))
    workspace |= listed.kernel_workspace(arguments, request, direction, device, returned, tiles)
    if len(sets) == 1:
        return workspace
    lse = WORKING_DTYPE[inputs.q.dtype].itemsize * inputs.q.numel() // inputs.q.shape[3]
    copies = sum(x.nbytes for x in inputs.with_rows)
    copies = copies + inputs.q.nbytes + lse if direction == "forward" else 2 * (copies + inputs.q.nbytes) + lse
    return workspace | {"a set of heads": copies * max(map(len, sets)) // inputs.k.shape[2]}


def _functions(device: torch.device) -> tuple[Forward, Backward]:
    listed.kernels(device)  # raises where they do not load
    return forward, backward


def in_one_pass_where_it_pays(by_parts: Backend) -> Backend:
    """The backend for unions that is one pass where `is_one_pass`, and is another elsewhere.

    by_parts: that other one, pattern by pattern.
    """

    def functions(device: torch.device) -> tuple[Forward, Backward]:
        of_parts = by_parts.functions(device)
        return partial(_forward_of_union, of_parts[0]), partial(_backward_of_union, of_parts[1])

    def workspace(
        arguments: tuple, request: Request, direction: str, device: torch.device, returned: int
    ) -> dict[str, int] | None:
        inputs = Tensors(*(arguments[0] if direction == "forward" else arguments[1]))
        of_call = _workspace if is_one_pass(inputs.q, request) else by_parts.workspace
        return of_call(arguments, request, direction, device, returned)

    def of_keys(q: Tensor, k: Tensor, request: Request) -> str:
        return by_parts.of_keys(q, k, request) or _of_keys(q, k, request)

    note = f"{NOTE}; a union in one pass if short or of about as many tiles as its parts, else {by_parts.note}"
    return replace(by_parts, note=note, functions=functions, of_keys=of_keys, workspace=workspace)


def _forward_of_union(of_parts: Forward, inputs: Tensors, request: Request) -> tuple[Tensor, Tensor]:
    run = forward if is_one_pass(inputs.q, request) else of_parts
    return run(inputs, request)


def _backward_of_union(
    of_parts: Backward, dout: Tensor, inputs: Tensors, out: Tensor, lse: Tensor, request: Request,
    dlse: Tensor | None = None,
) -> Tensors:  # fmt: skip
    run = backward if is_one_pass(inputs.q, request) else of_parts
    return run(dout, inputs, out, lse, request, dlse=dlse)


BACKENDS = (
    Backend(
        serves=HeadNeighbourhoods,
        name="lists",
        note=NOTE,
        colour="#56B4E9",
        functions=_functions,
        limits=_limits,
        of_keys=_of_keys,
        here=lambda q, request: absence(q.device),
        reads_orderings=True,
        caveat=listed.CAVEAT,
        workspace=_workspace,
        options=("part",),
    ),
)
