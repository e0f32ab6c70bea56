"""Neighbourhood attention by several kernels, with the tokens in every order, checked and timed (notebooks 08, 08b)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from hilbert_lib.attention.backends import flex
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK
from hilbert_lib.attention.validation import validated
from hilbert_lib.internals import buffers_kept
from hilbert_lib.lab.cache.neighbourhood import BLOCK, neighbourhood_orderings, of_axes, used_by_blocks, used_by_boxes
from hilbert_lib.lab.cache.order_map import HILBERT, ROWS, map_orders
from hilbert_lib.lab.pairs import Results, Side
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.pattern import Pattern

GRID_SWEEP, MAP_SWEEP, REORDERED = "neighbourhood", "map of orders", "hilbert, reordered"
BLOCKS, BOXES = "blocks", "boxes"  # the kernels whose pairs are counted
DIRECTIONS = ("forward", "backward")


def orders_of(work: Workload) -> dict[str, Ordering]:
    """The orders that are compared on a grid, by name, on its device."""
    return _orders(work.pattern.shape, work.device)


@lru_cache(maxsize=1)
def _orders(shape: tuple[int, ...], device: torch.device) -> dict[str, Ordering]:
    # By shape and device: a cache of workloads would keep their tensors.
    return {name: order.to(device) for name, order in neighbourhood_orderings(shape).items()}


# Of q, k and v that are stored in an order, and the kernel's name: the output, stored likewise.
Attention = Callable[[Tensor, Tensor, Tensor, Ordering, Workload, str], Tensor]


def attend_by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    ordering: Ordering,
    *,
    block_size: int = FLEX_BLOCK,
    kernel_options: dict | None = None,
    **options,
) -> Tensor:
    """The output of FlexAttention itself: behind the library's backend a backward would run the forward again.

    block_size, kernel_options: FlexAttention's own. options: those of `attend` that its mask knows.
    """
    call = validated(q, k, v, pattern, ordering=ordering, **options)
    return flex.attend(*call, block_size, kernel_options)[0]


def compare_kernels(
    works: Iterable[Workload], attention: Attention, *, kernels: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Side, Side]]:
    """Pairs for `run_sides`, forward and backward; a forward keeps what its backward needs.

    Of each kernel every order beside raster; beside boxes every order of the first kernel, and the others in raster
    order. Of the first kernel, Hilbert order beside a forward that stores q, k and v so, and puts the output back.

    Args:
        works: asked for one at a time.
        attention: by the kernel of a name.
        kernels: for each kernel the orders it is timed in, names of `neighbourhood_orderings`, raster among them. Sides
            of the first one are named by the order alone.
    """
    first = next(iter(kernels))
    for work in works:
        for direction in DIRECTIONS:
            side_of = partial(_side, work, attention, direction=direction, first=first)
            sides = {(kernel, name): side_of(kernel, name) for kernel, names in kernels.items() for name in names}
            yield from ((sides[key[0], "raster"], side) for key, side in sides.items() if key[1] != "raster")
            rivals = [key for key in sides if key[0] == first or key[1] == "raster"] if BOXES in kernels else []
            yield from ((sides[key], sides[BOXES, "raster"]) for key in rivals if key[0] != BOXES)
            if direction == "forward":
                yield sides[first, "hilbert"], side_of(first, "hilbert", anew=True)


def sustained_sides(
    works: Iterable[Workload], attention: Attention, *, kernels: Mapping[str, str]
) -> Iterator[tuple[Side, ...]]:
    """Cases for `run_back_to_back`, forward and backward: of each kernel the side of an order.

    On a GPU a forward is the replay of a CUDA graph: small ones take the host longer than the GPU.
    """
    first = next(iter(kernels))
    for work in works:
        for direction in DIRECTIONS:
            side_of = partial(_side, work, attention, direction=direction, first=first)
            sides = [side_of(kernel, name) for kernel, name in kernels.items()]
            # A backward alone cannot be captured, since autograd runs it on the stream of its forward.
            is_captured = work.device.type == "cuda" and direction == "forward"
            yield tuple(replace(side, run=_replay(side.run)) if is_captured else side for side in sides)


# Of q, k and v that are stored in an order, and the size of a block (None: boxes): the output, stored likewise.
MapAttention = Callable[[Tensor, Tensor, Tensor, Ordering, Workload, int | None], Tensor]


def parse_map_work(text: str, *, argument: str = "works", **where) -> Workload:
    """The work of a cell of the map, as `Workload.on_grid` reads it; ValueError unless its grid and window are squares.

    >>> parse_map_work("8x8 3x3:2 2x16", device=torch.device("cpu")).pattern.window
    (3, 3)
    """
    work = Workload.on_grid(text, argument=argument, **where)
    shape, window = work.pattern.shape, work.pattern.window
    # A record of the map has one number for the side of a grid, and one for the side of a window.
    if len(shape) != 2 or len({*shape}) > 1 or len({*window}) > 1:
        raise ValueError(f"{argument} must be square grids with square windows, such as 64x64 7x7 2x16; got {text!r}")
    return work


def compare_on_map(
    works: Iterable[Workload], attention: MapAttention, *, block_sizes: Sequence[int], boxes: bool = False
) -> Iterator[tuple[Side, Side]]:
    """Pairs of forwards for `run_sides`: of each block size rows beside each order of the map, and boxes beside blocks.

    Args:
        works: of `parse_map_work`, asked for one at a time.
        attention: the output by blocks of a size, or by boxes.
        block_sizes: tokens of a block of FlexAttention, each way.
        boxes: whether boxes in plain rows run beside blocks of 128 in rows and in Hilbert order, without a dilation.
    """
    for work in works:
        orders = map_orders(work.pattern.shape, work.pattern.dilation[0])
        for size in block_sizes:
            sides = {name: _map_side(work, attention, name, order, size) for name, order in orders.items()}
            yield from ((sides[ROWS], side) for name, side in sides.items() if name != ROWS)
            if boxes and size == BLOCK and work.pattern.dilation == (1, 1):
                plain = _map_side(work, attention, ROWS, orders[ROWS], None)
                yield from ((sides[name], plain) for name in (ROWS, HILBERT))


def _map_side(work: Workload, attention: MapAttention, name: str, order: Ordering, size: int | None) -> Side:
    near, order = work.pattern, order.to(work.device)
    parameters = {
        "sweep": MAP_SWEEP,
        "direction": "forward",
        "side": near.shape[0],
        "window": near.window[0],
        "dilation": near.dilation[0],
        "kernel": BOXES if size is None else BLOCKS,
        "block_size": size,
        "order": name,
        "heads": work.heads,
        "head_dim": work.head_dim,
        "dtype": work.dtype,
    }
    stored = cache(lambda: tuple(order.apply(x, dim=1) for x in work.tensors[:3]))

    @torch.no_grad()
    def attend() -> Tensor:
        return attention(*stored(), order, work, size)

    def run() -> Results:
        attend()
        return ()

    error = cache(lambda _: work.error((attend(),), order.inverse))
    title = f"{BOXES}, {name}" if size is None else name
    return Side(title, parameters, run, error, work.useful.flop_forward)


def _replay(run: Callable[[], Results]) -> Callable[[], Results]:
    graph = cache(lambda: captured(run)[0])
    return lambda: graph().replay() or ()


def _side(
    work: Workload, attention: Attention, kernel: str, name: str, *, direction: str, first: str, anew: bool = False,
) -> Side:  # fmt: skip
    # The sides of a pair store their results differently, so they return nothing to compare; each has its own error.
    near, orders = work.pattern, orders_of(work)
    order = orders[name]
    stored = orders["raster"] if anew else order
    parameters = {
        "sweep": GRID_SWEEP,
        "direction": direction,
        "side": of_axes(near.shape),
        "window": of_axes(near.window),
    }
    if set(near.dilation) != {1}:
        parameters["dilation"] = of_axes(near.dilation)
    parameters |= {"kernel": kernel, "order": name, "heads": work.heads, "head_dim": work.head_dim, "dtype": work.dtype}
    if kernel == BLOCKS:
        parameters |= {"block_size": BLOCK, "used": round(used_by_blocks(near, order, device=work.device), 4)}
    elif kernel == BOXES:
        parameters["used"] = round(used_by_boxes(near), 4)
    leaves = cache(lambda: tuple(stored.apply(x, dim=1).requires_grad_() for x in work.tensors[:3]))
    dout = cache(lambda: stored.apply(work.tensors[3], dim=1))

    def attend() -> Tensor:
        if not anew:
            return attention(*leaves(), order, work, kernel)
        return order.undo(attention(*(order.apply(x, dim=1) for x in leaves()), order, work, kernel), dim=1)

    out = cache(attend)

    def compute() -> Results:
        if direction == "forward":
            return (attend(),)
        with buffers_kept():  # or a compiled backward refuses to run again
            return torch.autograd.grad(out(), leaves(), dout(), retain_graph=True)

    def run() -> Results:
        compute()
        return ()

    error = cache(lambda _: work.error(compute(), stored.inverse))
    flop = work.useful.flop_forward if direction == "forward" else work.useful.flop_backward
    title = REORDERED if anew else name if kernel == first else f"{kernel}, {name}"
    return Side(title, parameters, run, error, flop)
