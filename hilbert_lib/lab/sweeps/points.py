"""Attention over points by lists and by its rivals, checked and timed: notebook 13.

lists      packed lists, in the order of work of the library or in another one
patches    dense attention in patches of consecutive tokens of a curve, which lose neighbours
blocks     FlexAttention, whose blocks of stored tokens come from the lists
boxes      attention on the grid around all points, with a mask of its empty cells
gather     the rows of each query's neighbours, copied, and batched products
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hilbert_lib.attention import operators
from hilbert_lib.attention.api import attend
from hilbert_lib.attention.backends.flex import compiled_flex_attention
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK
from hilbert_lib.attention.validation import validated
from hilbert_lib.internals import buffers_kept, flex_tiles_within
from hilbert_lib.lab.cache.neighbourhood import of_axes
from hilbert_lib.lab.cache.points import (
    HALVED,
    PATCH,
    RANDOM,
    lists_in_order,
    pairs_by_block,
    patch_recall,
    patch_starts,
    point_orders,
    random_order,
)
from hilbert_lib.lab.clouds import CLOUDS, parse_work
from hilbert_lib.lab.pairs import Results, Side
from hilbert_lib.lab.workload import Workload
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

POINT_SWEEP, ORDER_SWEEP, LIST_SWEEP = "points", "orders of points", "lists of points"
LISTS, PATCHES, BLOCKS, BOXES, GATHER = "lists", "patches", "blocks", "boxes", "gather"
AS_GIVEN = ", stored raster"  # ends the name of a side whose tokens lie as clouds are given
DIRECTIONS = ("forward", "backward")
MOST_EMPTY = 8  # cells of the grid around the points, for each point, that boxes are timed with
GATHERED_BYTES = 2**30  # of the rows that "gather" holds at a time
CHECKED = 8  # queries whose keys are compared where lists are made


class PointWork(NamedTuple):
    """A call over a made cloud."""

    cloud: str  # a name of `CLOUDS`
    work: Workload

    @classmethod
    def named(cls, text: str, *, device: torch.device, dtype: str = "float32") -> Self:
        """The work that a text names, as `parse_work` takes it.

        >>> PointWork.named("room 100 3 2x16", device=torch.device("cpu")).work.length
        100
        """
        cloud, count, window, heads, head_dim = parse_work(text)
        points = PointNeighbourhood(CLOUDS[cloud](count).to(device), window)
        return cls(cloud, Workload(points, count, heads, head_dim, device, dtype=dtype))


@dataclass(frozen=True, eq=False)
class PointPatches(Pattern):
    """Each point sees those of its patch: of consecutive tokens of an order, as in Point Transformer V3."""

    kind: ClassVar[str] = "patches"

    places: Tensor  # (n,) int64: of each point in the order
    size: int

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of rows (...) int64 that broadcast."""
        places = self.places.to(query.device)
        first = patch_starts(len(places), self.size, query.device)[places[query] // self.size]
        return (places[key] >= first) & (places[key] < first + self.size)


@dataclass(frozen=True)
class Kernel:
    """One way to compute a work, and how its tokens are stored."""

    name: str
    rows: Tensor  # (places,) int64: the token that is stored at each place, -1 for none; a token may be there twice
    slots: Tensor  # (n,) int64: the place at which the output of each token lies
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # the output of stored q, k, v, stored likewise
    facts: dict  # what distinguishes it, for a record
    pattern: Pattern | None = None  # of patches, which compute another function
    has_backward: bool = True

    def stored(self, x: Tensor) -> Tensor:
        """A tensor (1, n, heads, head_dim) as the kernel reads it, 0 where there is no token."""
        rows = x[:, self.rows.clamp(min=0)]
        return rows.masked_fill((self.rows < 0)[:, None, None], 0)

    def stored_once(self, x: Tensor) -> Tensor:
        """The same with 0 where a token is stored again, for gradients of the output."""
        empty = x.new_zeros(1, len(self.rows), *x.shape[2:])
        return empty.index_copy(1, self.slots, x)

    def of_tokens(self, gradient: Tensor) -> Tensor:
        """A gradient of what was stored, by token: of one that was stored twice the sum."""
        exists = self.rows >= 0
        total = gradient.new_zeros(1, len(self.slots), *gradient.shape[2:])
        return total.index_add(1, self.rows[exists], gradient[:, exists])


def by_lists(work: Workload, order: str = HALVED, storage: str = "raster") -> Kernel:
    """Lists in an order of work, with tokens stored in an order; both are names of `point_orders`."""
    points, orders = work.pattern, point_orders(work.pattern)
    rows = random_order(points) if storage == RANDOM else orders[storage]
    if storage != "raster":
        points = PointNeighbourhood(points.coordinates[rows], points.window)
        orders = point_orders(points)
    lists = points.lists if order == HALVED else lists_in_order(points, orders[order])
    backend = "triton" if work.device.type == "cuda" else "eager"

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if order == HALVED:
            return attend(q, k, v, points, backend=backend)
        inputs, request = validated(q, k, v, points)
        return operators.attention(inputs, replace(request, lists=lists.tensors), backend)[0]

    facts = {"kernel": LISTS, "order": order, "storage": storage}
    facts["used"] = round(lists.pairs / (lists.tiles * BLOCK**2), 4)
    return Kernel(LISTS, rows, _inverse(rows), run, facts)


def by_patches(work: Workload, order: str = "hilbert", size: int = PATCH) -> Kernel:
    """Dense attention in patches, of tokens that are stored along a curve already."""
    points, place = work.pattern, point_orders(work.pattern)[order]
    size = min(size, work.length)
    starts = patch_starts(work.length, size, work.device)
    rows = place[(starts[:, None] + torch.arange(size, device=work.device)).flatten()]
    is_last = torch.arange(work.length, device=work.device) >= len(rows) - size  # of tokens by their place
    slots = torch.empty_like(place)
    # The last patch begins with tokens of the one before, whose outputs are taken from there.
    slots[place] = torch.arange(work.length, device=work.device) + is_last * (len(rows) - work.length)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        patches = (x.unflatten(1, (-1, size))[0].transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*patches).transpose(1, 2).flatten(0, 1)[None]

    facts = {"kernel": PATCHES, "order": order, "patch": size}
    facts["recall"] = round(patch_recall(points, place, size), 4)
    return Kernel(PATCHES, rows, slots, run, facts, PointPatches(_inverse(place), size))


def by_blocks(work: Workload, order: str = "hilbert", size: int = FLEX_BLOCK) -> Kernel:
    """FlexAttention over blocks of `size` tokens, which are stored in an order."""
    points, rows = work.pattern, point_orders(work.pattern)[order]
    lists = points.lists if order == HALVED else lists_in_order(points, rows)
    mask, touched = flex_mask(points, lists, rows, size)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run_flex(*(x.transpose(1, 2) for x in (q, k, v)), mask, size).transpose(1, 2)

    facts = {"kernel": BLOCKS, "order": order, "block_size": size}
    facts["used"] = round(lists.pairs / (touched * size**2), 4)
    has_backward = work.device.type == "cuda"  # FlexAttention has none elsewhere
    return Kernel(f"{BLOCKS} of {size}, {order}", rows, _inverse(rows), run, facts, has_backward=has_backward)


def run_flex(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask", size: int, **options) -> Tensor:
    """FlexAttention of q, k and v (batch, heads, seq, head_dim) with a mask of blocks of `size` tokens, and options of
    its own. On the CPU it is not compiled, and holds all pairs.
    """
    if q.is_cuda:
        with nullcontext() if size >= FLEX_BLOCK else flex_tiles_within(size):
            return compiled_flex_attention(q, k, v, block_mask=mask, **options)
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q, k, v, block_mask=mask, **options)


def flex_mask(points: PointNeighbourhood, lists: PackedLists, order: Tensor, size: int) -> tuple["BlockMask", int]:
    """FlexAttention's mask of tokens that are stored in an order, and how many blocks it computes.

    Lists of blocks are as wide as the longest on a GPU, and not (n / size) squared. A pair is tested by one number of
    each token, whose bits are its coordinates. Windows are odd, so that the lists turned round are the same.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count, device = len(order), order.device
    blocks = -(-count // size)
    number, pairs = pairs_by_block(lists, order, size)
    is_full = pairs == size**2
    partial, full = block_lists(number[~is_full], number[is_full], blocks=blocks, narrow=device.type == "cuda")
    mask = BlockMask(
        seq_lengths=(count, count),
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=partial[0],
        q_indices=partial[1],
        full_q_num_blocks=full[0],
        full_q_indices=full[1],
        BLOCK_SIZE=(size, size),
        mask_mod=_window_rule(points, order),
    )
    return mask, len(number)


def block_lists(*numbers: Tensor, blocks: int, narrow: bool) -> list[tuple[Tensor, Tensor]]:
    """Counts of the blocks of keys that each block of queries meets, (1, 1, blocks), and these, (1, 1, blocks, width).

    All lists are equally wide: torch 2.11 reads rows of full blocks by the stride of the partial ones' list, and ends
    in an illegal access to memory where they differ. numbers: a kind's pairs of blocks, query * blocks + key, each
    ascending. narrow: whether the width is that of the longest row, or else `blocks`.
    """
    counts = [(number // blocks).bincount(minlength=blocks) for number in numbers]
    width = max(1, *(int(count.amax()) for count in counts)) if narrow else blocks
    return [_block_rows(number, count, width) for number, count in zip(numbers, counts, strict=True)]


def _block_rows(number: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    blocks = len(counts)
    query, key = number // blocks, number % blocks
    first = counts.cumsum(0) - counts
    indices = torch.zeros(blocks, width, dtype=torch.int32, device=number.device)
    indices[query, torch.arange(len(query), device=number.device) - first[query]] = key.int()
    return counts.int()[None, None], indices[None, None]


def _window_rule(points: PointNeighbourhood, order: Tensor) -> Callable:
    # A `mask_mod` of the windows, that reads one number of each token.
    cells = (points.coordinates[order] - points.coordinates.amin(0)).long()
    bits = [int(line.amax()).bit_length() for line in cells.unbind(1)]
    shifts = [sum(bits[:axis]) for axis in range(len(bits))]
    codes = sum(line << shift for line, shift in zip(cells.unbind(1), shifts, strict=True))
    codes = codes.int() if sum(bits) < 32 else codes
    codes = pad(codes, (0, FLEX_BLOCK))  # FlexAttention may ask for places past the last of an uneven number
    reaches = [w // 2 for w in points.window]

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = codes[query], codes[key]
        by_axis = []
        for shift, width, reach in zip(shifts, bits, reaches, strict=True):
            low = (1 << width) - 1
            apart = ((own >> shift) & low) - ((other >> shift) & low)
            by_axis.append(apart.abs() <= reach)
        attends = by_axis[0]
        for on_axis in by_axis[1:]:
            attends = attends & on_axis
        return attends

    return seen


def fits_boxes(work: Workload) -> bool:
    """Whether the grid around the points has at most `MOST_EMPTY` cells for each point."""
    return prod(_grid_around(work.pattern)[1]) <= MOST_EMPTY * work.length


def _grid_around(points: PointNeighbourhood) -> tuple[Tensor, tuple[int, ...]]:
    # The cells of points from 0 on, (n, axes), and the sides of the grid that they span.
    cells = (points.coordinates - points.coordinates.amin(0)).long()
    return cells, tuple((cells.amax(0) + 1).tolist())


def by_boxes(work: Workload) -> Kernel:
    """Attention on the grid around the points, row by row, with a mask of the empty cells."""
    points = work.pattern
    cells, shape = _grid_around(points)
    slots = torch.zeros(work.length, dtype=torch.int64, device=work.device)
    for line, side in zip(cells.unbind(1), shape, strict=True):
        slots = slots * side + line
    rows = torch.full((prod(shape),), -1, dtype=torch.int64, device=work.device)
    rows[slots] = torch.arange(work.length, device=work.device)
    near, empty = Neighbourhood(shape, points.window, edge="clip"), (rows < 0)[None]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, near, key_padding_mask=empty)

    facts = {"kernel": BOXES, "order": "raster", "filled": round(work.length / prod(shape), 4)}
    return Kernel(BOXES, rows, slots, run, facts)


def by_gather(work: Workload) -> Kernel:
    """The rows of each query's neighbours, copied side by side, and batched products, as a sparse convolution does.

    It has a backward where all copied rows fit into `GATHERED_BYTES`: autograd keeps them.
    """
    table = neighbour_table(work.pattern.lists)
    rows = torch.arange(work.length, device=work.device)
    row_bytes = 2 * table.shape[1] * work.heads * work.head_dim * getattr(torch, work.dtype).itemsize
    queries_at_once = max(1, GATHERED_BYTES // row_bytes)
    scale = work.head_dim**-0.5

    def attend_to(q: Tensor, k: Tensor, v: Tensor, neighbours: Tensor) -> Tensor:
        exists, neighbours = neighbours >= 0, neighbours.clamp(min=0)
        scores = torch.einsum("qhd,qkhd->qhk", q, k[neighbours]) * scale
        weights = scores.masked_fill(~exists[:, None], -torch.inf).softmax(-1)
        return torch.einsum("qhk,qkhd->qhd", weights, v[neighbours])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q[0].split(queries_at_once), table.split(queries_at_once), strict=True)
        return torch.cat([attend_to(queries, k[0], v[0], neighbours) for queries, neighbours in parts])[None]

    facts = {"kernel": GATHER, "order": "raster"}
    facts["used"] = round(work.pattern.pairs / table.numel(), 4)
    return Kernel(GATHER, rows, rows, run, facts, has_backward=queries_at_once >= work.length)


def neighbour_table(lists: PackedLists) -> Tensor:
    """The keys of each query, ascending, -1 behind them: (queries, most keys of one) int64."""
    queries, keys = [], []
    query_rows = lists.query_rows.view(-1, BLOCK).long()
    for tiles in torch.arange(lists.tiles, device=lists.words.device).split(2**12):
        tile, query, key = lists.attends(tiles).nonzero(as_tuple=True)
        queries.append(query_rows[lists.tile_blocks[tiles][tile], query])
        keys.append(lists.key_rows[tiles][tile, key].long())
    query, key = torch.cat(queries), torch.cat(keys)
    order = (query * lists.keys + key).argsort()
    query, key = query[order], key[order]
    counts = query.bincount(minlength=lists.queries)
    first = counts.cumsum(0) - counts
    table = torch.full((lists.queries, int(counts.amax())), -1, dtype=torch.int64, device=query.device)
    table[query, torch.arange(len(query), device=query.device) - first[query]] = key
    return table


def compare_points(
    works: Iterable[PointWork], kernels: Callable[[Workload], Iterable[Kernel]]
) -> Iterator[tuple[Side, Side]]:
    """Pairs for `run_sides`, forward and backward: each kernel of a work, then lists."""
    for cloud, work in works:
        own, rivals = by_lists(work), list(kernels(work))
        for direction in DIRECTIONS:
            lists = _side(cloud, work, own, direction, POINT_SWEEP)
            served = [rival for rival in rivals if direction == "forward" or rival.has_backward]
            yield from ((_side(cloud, work, rival, direction, POINT_SWEEP), lists) for rival in served)


def compare_orders(
    works: Iterable[PointWork], *, orders: Iterable[str], storages: Iterable[str]
) -> Iterator[tuple[Side, Side]]:
    """Pairs of lists: in another order of work, or of tokens stored in another order, then the library's lists.

    A random order of work is left out where there are too many points for it (`point_orders`); a random storage is not.
    """
    for cloud, work in works:
        own = by_lists(work)
        others = [by_lists(work, order) for order in point_orders(work.pattern) if order in orders]
        others += [by_lists(work, storage=storage) for storage in storages]
        for direction in DIRECTIONS:
            lists = _side(cloud, work, own, direction, ORDER_SWEEP)
            for other in others:
                name = f"{other.facts['order']}, stored {other.facts['storage']}"
                yield _side(cloud, work, replace(other, name=name), direction, ORDER_SWEEP), lists


def build_sides(works: Iterable[PointWork]) -> Iterator[tuple[Side]]:
    """Sides that make the lists of a work, as a user does."""
    for cloud, work in works:
        points = work.pattern
        coordinates, window = points.coordinates, points.window
        facts = {"sweep": LIST_SWEEP, "cloud": cloud, "points": work.length, "window": of_axes(window)}
        yield (Side("lists made", facts, _builder(coordinates, window), _wrong_keys(points)),)


def _builder(coordinates: Tensor, window: tuple[int, ...]) -> Callable[[], Results]:
    return lambda: PointNeighbourhood(coordinates, window).list_tensors


def _wrong_keys(points: PointNeighbourhood) -> Callable[[Results], float]:
    # The share of some queries whose keys in the lists are not those of the rule.
    def error(results: Results) -> float:
        lists = PackedLists(*results[:4], points.lists.queries, points.lists.keys)
        queries = torch.linspace(0, lists.queries - 1, CHECKED).long().tolist()
        return sum(not lists.keys_of(query).equal(points.keys(query)) for query in queries) / CHECKED

    return error


def _side(cloud: str, work: Workload, kernel: Kernel, direction: str, sweep: str) -> Side:
    # The sides of a pair store their results differently, so they return nothing to compare; each has its own error.
    parameters = {"sweep": sweep, "direction": direction, "cloud": cloud, "points": work.length}
    parameters |= {"window": of_axes(work.pattern.window), "heads": work.heads, "head_dim": work.head_dim}
    parameters |= {"dtype": work.dtype, **kernel.facts}
    leaves = cache(lambda: tuple(kernel.stored(x).requires_grad_(kernel.has_backward) for x in work.tensors[:3]))
    dout = cache(lambda: kernel.stored_once(work.tensors[3]))
    out = cache(lambda: kernel.attend(*leaves()))
    exact = replace(work, pattern=kernel.pattern) if kernel.pattern else work

    def compute() -> Results:
        if direction == "forward":
            return (kernel.attend(*leaves()),)
        with buffers_kept():  # or a compiled backward refuses to run again
            return torch.autograd.grad(out(), leaves(), dout(), retain_graph=True)

    def run() -> Results:
        compute()
        return ()

    def error(_: Results) -> float:
        results = compute()
        if direction == "forward":
            return exact.error(results, kernel.slots)
        return exact.error(tuple(kernel.of_tokens(gradient) for gradient in results))

    flop = work.useful.flop_forward if direction == "forward" else work.useful.flop_backward
    return Side(kernel.name, parameters, run, cache(error), None if kernel.pattern else flop)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
