"""Which keys a cell of a grid attends to in neighbourhood attention, in one, two or three dimensions.

Everything about a window is a product over the axes of the grid, so `Axis` holds the rules and `Neighbourhood` joins
them. `axis_tiles` gives them as rectangles of queries within rectangles of keys, which is what kernels read, and
`mask_blocks` the blocks of the mask for cells stored in any order. Nothing holds a table of length squared.
"""

from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.pattern import Pattern, Specification

EDGES = ("shift", "clip", "wrap")
# The arguments of `attend` that patterns on grids take besides those of every kind.
ON_GRIDS = frozenset(("ordering", "extra_k", "extra_v", "extra_padding_mask"))
WORD_BITS = 64
CELLS_ON_CPU, CELLS_ON_GPU = 2**18, 2**22  # that hold sets of blocks at a time: within a cache, and within 130 MB


@dataclass(frozen=True)
class Axis:
    """One axis of a `Neighbourhood`. All rules act on the sub-axis of the cells that share cell % dilation.

    There cell x has the rank i = x // dilation, of m. Where not causal, the queries of a group of `stride` see the same
    keys, `window` of them around the group's middle, and causal ones the last `window` up to the group's end, but none
    past themselves.
    """

    cells: int
    window: int
    dilation: int
    stride: int
    is_causal: bool
    edge: str

    def ranks(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Rank of each cell on its sub-axis, and how many cells that has."""
        return cell // self.dilation, (self.cells - cell % self.dilation + self.dilation - 1) // self.dilation

    def start(self, cell: Tensor) -> Tensor:
        """The rank at which each cell's window begins; below 0 where it is clipped or goes round."""
        rank, count = self.ranks(cell)
        group = rank // self.stride * self.stride
        if self.is_causal:
            return (torch.minimum(group + self.stride - 1, count - 1) - self.window + 1).clamp(min=0)
        start = torch.minimum(group + self.stride // 2, count - 1) - self.window // 2
        return torch.minimum(start.clamp(min=0), count - self.window) if self.edge == "shift" else start

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of cells that broadcast."""
        (rank, _), (key_rank, count) = self.ranks(query), self.ranks(key)
        ahead = key_rank - self.start(query)
        if self.edge == "wrap":
            ahead = ahead % count
        seen = (ahead >= 0) & (ahead < self.window) & (query % self.dilation == key % self.dilation)
        return seen & (key_rank <= rank) if self.is_causal else seen

    def pairs(self, queries: slice = slice(None)) -> int:
        """Pairs of a query, of all or of some neighbouring ones, and a key that attend."""
        cell = torch.arange(self.cells, device="cpu")[queries]
        if not self.is_causal and self.edge != "clip":
            return len(cell) * self.window
        (rank, count), start = self.ranks(cell), self.start(cell)
        end = rank + 1 if self.is_causal else torch.minimum(start + self.window, count)
        return int((end - start.clamp(min=0)).sum())


@dataclass(frozen=True)
class Neighbourhood(Pattern):
    """Each cell of a grid attends to a window of cells around it; position p is cell p, row by row.

    Neighbourhood attention as in Hassani et al., "Neighborhood Attention Transformer" (arXiv 2204.07143), with its
    dilation (arXiv 2209.15001) and stride (arXiv 2504.16922). An axis of n cells with window w, dilation d and stride
    s is taken apart into the cells that share x % d, m of them; cell x is i = x // d there.

    Args:
        shape: 1, 2 or 3 sides [cells].
        window: cells that a query sees along each axis, odd or even. One value or one for each axis, as all below.
        dilation: distance of two neighbouring keys, 1 by default. window * dilation is at most the side.
        stride: so many neighbouring queries share one window, 1 by default, at most the window.
        is_causal: whether keys past the query along the axis are left out: keys c - w + 1 to i, where c, the last of
            the query's group, is min(i // s * s + s - 1, m - 1).
        edge: what happens to a window that begins at c - w // 2, with c = min(i // s * s + s // 2, m - 1), and leaves
            the axis. "shift" moves it inside, so that every query has w keys; "clip" leaves out what is outside;
            "wrap" goes round, along sides that are multiples of stride * dilation. Causal windows are clipped.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    >>> Neighbourhood((3, 4), 2).keys(0).tolist()
    [0, 1, 4, 5]
    >>> Neighbourhood((6,), 3, edge="wrap").keys(0).tolist()
    [0, 1, 5]
    """

    kind: ClassVar[str] = "neighbourhood"
    options: ClassVar[frozenset[str]] = ON_GRIDS

    shape: tuple[int, ...]
    window: tuple[int, ...]
    dilation: tuple[int, ...] = 1
    stride: tuple[int, ...] = 1
    is_causal: tuple[bool, ...] = False
    edge: tuple[str, ...] = "shift"

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        shape = checks.countable("shape", checks.integers("shape", shape, least=1))
        if len(shape) > 3:
            raise ValueError(f"shape must have 1 to 3 sides, got {shape}")
        made = {"shape": shape}
        for name in ("window", "dilation", "stride", "is_causal", "edge"):
            made[name] = _by_axis(name, getattr(self, name), len(shape))
        for name, value in made.items():
            object.__setattr__(self, name, value)
        axes = tuple(Axis(*values) for values in zip(*made.values(), strict=True))
        for n, axis in enumerate(axes):
            _check_axis(n, axis)
        object.__setattr__(self, "axes", axes)  # the rules along each axis

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attend."""
        return prod(axis.pairs() for axis in self.axes)

    def coordinates(self, positions: Tensor) -> Tensor:
        """The cell of each position: (..., axes) int64 of (...) int64."""
        return torch.stack(torch.unravel_index(positions, self.shape), dim=-1)

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of positions (...) int64 that broadcast.

        >>> Neighbourhood((1, 4), 1).attends(torch.arange(2)[:, None], torch.arange(3)).tolist()
        [[True, False, False], [False, True, False]]
        """
        cells = zip(
            self.axes, torch.unravel_index(query, self.shape), torch.unravel_index(key, self.shape), strict=True
        )
        return torch.stack(torch.broadcast_tensors(*(axis.attends(*pair) for axis, *pair in cells))).all(0)

    def keys(self, position: int) -> Tensor:
        """The positions that a query attends to: (n,) int64, ascending.

        Like `queries` it raises TypeError or ValueError if the position is no integer or not on the grid.
        """
        return self._positions([axis.attends(own, cells) for axis, own, cells in self._lines(position)])

    def queries(self, position: int) -> Tensor:
        """The positions that attend to a key: (n,) int64, ascending.

        >>> Neighbourhood((2, 4), 2).queries(0).tolist()
        [0, 1, 4, 5]
        """
        return self._positions([axis.attends(cells, own) for axis, own, cells in self._lines(position)])

    def _lines(self, position: int) -> list[tuple[Axis, Tensor, Tensor]]:
        # `coordinates` does not refuse a position off the grid.
        position = checks.integer("position", position, least=0, most=self.length - 1)
        cell = self.coordinates(torch.tensor(position, device="cpu"))
        return [(axis, own, torch.arange(axis.cells, device="cpu")) for axis, own in zip(self.axes, cell, strict=True)]

    def _positions(self, lines: list[Tensor]) -> Tensor:
        # Of the cells that are inside along every axis.
        inside = torch.zeros(1, dtype=torch.int64, device="cpu")
        for line in lines:
            inside = (inside[:, None] * len(line) + line.nonzero()[:, 0]).flatten()
        return inside

    def of_heads(self, kv_heads: int) -> "HeadNeighbourhoods":
        """The same neighbourhood for every KV head."""
        return HeadNeighbourhoods((self,) * kv_heads)

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers."""
        numbers = (*self.shape, *self.window, *self.dilation, *self.stride, *self.is_causal)
        return "neighbourhood " + ",".join(self.edge), numbers

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        edge = tuple(words[0].split(","))
        axes = len(edge)
        shape, window, dilation, stride, is_causal = (tuple(numbers[n : n + axes]) for n in range(0, 5 * axes, axes))
        return cls(shape, window, dilation, stride, tuple(map(bool, is_causal)), edge)


@dataclass(frozen=True)
class HeadNeighbourhoods(Pattern):
    """A `Neighbourhood` for each KV head; they differ in window alone.

    Args:
        by_head: one for each KV head.

    Raises:
        TypeError, ValueError: where by_head holds something else, nothing, or ones that differ in more than window.

    >>> near = HeadNeighbourhoods((Neighbourhood((4,), 1), Neighbourhood((4,), 3)))
    >>> near.mask(0, torch.arange(1), torch.arange(4), kv_head=1, kv_heads=2).int().tolist()
    [[1, 1, 1, 0]]
    """

    kind: ClassVar[str] = "neighbourhoods"
    function: ClassVar[str] = "neighbourhood_attention"
    noun: ClassVar[str] = "Neighbourhood"
    options: ClassVar[frozenset[str]] = ON_GRIDS

    by_head: tuple[Neighbourhood, ...]

    def __post_init__(self) -> None:
        for near in self.by_head:
            if not isinstance(near, Neighbourhood):
                raise TypeError(
                    f"neighbourhood must be a Neighbourhood, or a tuple of one for each KV head; got {near!r}"
                )
        if not self.by_head:
            raise ValueError("neighbourhood must hold one for each KV head, got none")
        first = self.by_head[0]
        rules = first.shape, first.dilation, first.stride, first.is_causal, first.edge
        for near in self.by_head:
            if (near.shape, near.dilation, near.stride, near.is_causal, near.edge) != rules:
                raise ValueError(f"neighbourhood must hold ones that differ in window alone, got {self.by_head}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the grid."""
        return self.by_head[0].shape

    def of_any_heads(self) -> Pattern:
        """The neighbourhood of every KV head, where it is one."""
        first = self.by_head[0]
        return first if all(near == first for near in self.by_head) else self

    def of_heads(self, kv_heads: int) -> Self:
        """The pattern itself; ValueError where it is not of so many KV heads."""
        if len(self.by_head) != kv_heads:
            raise ValueError(
                f"neighbourhood must hold one for each of the {kv_heads} KV heads, got {len(self.by_head)}"
            )
        return self

    def mask(
        self, part: int, queries: Tensor, keys: Tensor, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """Which pairs of cells attend: (nq, nk) bool of queries (nq,) and keys (nk,) int64."""
        return self.by_head[kv_head].attends(queries[:, None], keys)

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers."""
        words, rules = self.by_head[0].specification
        windows = [side for near in self.by_head for side in near.window]
        return words.replace("neighbourhood", "neighbourhoods", 1), (*rules, *windows)

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        axes = len(words[0].split(","))
        first, windows = Neighbourhood._of_words(words, numbers[: 5 * axes]), numbers[5 * axes :]
        each = [tuple(windows[n : n + axes]) for n in range(0, len(windows), axes)]
        return cls(tuple(replace(first, window=window) for window in each))


def _by_axis(name: str, value: object, axes: int) -> tuple:
    values = tuple(value) if checks.is_listed(value) else (value,) * axes
    if len(values) != axes:
        raise ValueError(f"{name} must be one value or one for each of the {axes} axes, got {value!r}")
    each = [f"{name}[{n}]" if checks.is_listed(value) else name for n in range(axes)]
    if name == "is_causal":
        return tuple(map(checks.boolean, each, values))
    if name == "edge":
        return tuple(checks.one_of(where, one, EDGES) for where, one in zip(each, values, strict=True))
    return tuple(checks.integer(where, one, least=1) for where, one in zip(each, values, strict=True))


def _check_axis(n: int, axis: Axis) -> None:
    if axis.window * axis.dilation > axis.cells:
        raise ValueError(
            f"window * dilation must be at most the side of axis {n}, {axis.cells} cells; got {axis.window} * "
            f"{axis.dilation}"
        )
    if axis.stride > axis.window:
        raise ValueError(f"stride must be at most the window of axis {n}, {axis.window}; got {axis.stride}")
    if axis.edge == "wrap" and axis.is_causal:
        raise ValueError(f"edge must be 'shift' or 'clip' along axis {n}, which is causal; got 'wrap'")
    if axis.edge == "wrap" and axis.cells % (axis.stride * axis.dilation):
        raise ValueError(
            f"shape must be a multiple of stride * dilation, {axis.stride * axis.dilation}, along axis {n}, whose edge "
            f"is 'wrap'; got {axis.cells}"
        )


class AxisTiles(NamedTuple):
    """Runs of queries along one axis, and for each a run of keys that holds all that its queries see."""

    queries: Tensor  # (tiles, queries) int64 cells, -1 where there is none
    keys: Tensor  # (tiles, keys) int64 cells, each once; -1 where there is none
    seen: Tensor  # (tiles, queries, keys) bool


def axis_tiles(axis: Axis, size: int, device: torch.device | str = "cpu", cells: range | None = None) -> AxisTiles:
    """The queries of an axis, or only `cells` of it, up to `size` of one residue in a tile; and the keys of each tile.

    >>> axis_tiles(Axis(4, 3, 1, 1, False, "clip"), 2).keys.tolist()
    [[-1, 0, 1, 2], [1, 2, 3, -1]]
    """
    cells = range(axis.cells) if cells is None else cells
    offset = torch.arange(cells.start, cells.start + axis.dilation, device=device)[:, None, None]
    most = -(-len(cells) // axis.dilation)
    first = torch.arange(0, most, size, device=device)[None, :, None]
    queries = ((first + torch.arange(min(size, most), device=device)) * axis.dilation + offset).flatten(0, 1)
    there = queries < cells.stop
    queries, there = queries[there[:, 0]], there[there[:, 0]]
    own = queries.clamp(max=axis.cells - 1)
    rank, count = axis.ranks(own)
    start = axis.start(own)
    end = rank + 1 if axis.is_causal else start + axis.window
    begin = start.where(there, axis.cells).amin(1)
    span = int((end.where(there, -axis.cells).amax(1) - begin).amax())
    span = min(span, axis.cells // axis.dilation) if axis.edge == "wrap" else span
    ranks = begin[:, None] + torch.arange(span, device=device)
    count = count[:, :1]
    inside = (ranks >= 0) & (ranks < count)
    if axis.edge == "wrap":
        ranks, inside = ranks % count, torch.ones_like(inside)
    keys = (ranks * axis.dilation + queries[:, :1] % axis.dilation).where(inside, -1)
    seen = axis.attends(own[:, :, None], keys.clamp(min=0)[:, None]) & there[:, :, None] & inside[:, None]
    return AxisTiles(queries.where(there, -1), keys.where(seen.any(1), -1), seen)


class Blocks(NamedTuple):
    """Blocks of an attention mask: (query blocks, key blocks) bool each."""

    partial: Tensor  # some pairs of the block attend, or all of a block that the sequence does not fill
    full: Tensor  # all do


def mask_blocks(
    neighbourhood: Neighbourhood, ordering: Ordering | None, *, q_block: int, kv_block: int, device: object = None
) -> Blocks:
    """Which blocks of q_block by kv_block slots hold pairs that attend, when the cells are stored in an ordering?

    A block that is neither partial nor full is empty. Where an edge wraps, some full ones count as partial.

    >>> row = Neighbourhood((1, 4), 1)
    >>> mask_blocks(row, Ordering.linear(4), q_block=2, kv_block=2).partial.int().tolist()
    [[1, 0], [0, 1]]
    """
    check_length(neighbourhood, ordering)
    q_block, kv_block = (checks.integer(n, x, least=1) for n, x in (("q_block", q_block), ("kv_block", kv_block)))
    device = checks.device(device)
    perm = torch.arange(neighbourhood.length, device=device) if ordering is None else ordering.perm.to(device)
    full = _full_blocks(neighbourhood, perm, q_block, kv_block)
    return Blocks(_touched_blocks(neighbourhood, perm, q_block, kv_block) & ~full, full)


def check_length(neighbourhood: Neighbourhood, ordering: Ordering | None) -> None:
    """Raise ValueError unless the ordering has the length of the grid."""
    if ordering is not None and ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the length of the grid {neighbourhood.shape}, got {ordering!r}")


class _Line(NamedTuple):
    """Along one axis, where the keys of each word of blocks lie, and where the queries that may see some of them."""

    axis: Axis
    low: Tensor  # (words,) the first cell of the keys
    keys: int  # cells from there that hold them all
    origin: Tensor  # (words,) the first cell of the queries, which go round
    queries: int


def _touched_blocks(neighbourhood: Neighbourhood, perm: Tensor, q_block: int, kv_block: int) -> Tensor:
    # Sets of up to 64 key blocks are bits of a word. Each word has a box of its own around its keys, where the sets are
    # spread along one axis after another to the queries that see them; as many words at a time as memory is meant for.
    length, device, at_once = len(perm), perm.device, WORD_BITS * kv_block
    cells = torch.unravel_index(perm, neighbourhood.shape)
    lines = _lines_of_words(neighbourhood.axes, [_most(cell, at_once) for cell in cells])
    met = True  # (words, query blocks): whether their boxes meet
    for line, (low, high) in zip(lines, (_most(cell, q_block) for cell in cells), strict=True):
        ahead = low - line.origin[:, None]
        met = met & ((ahead % line.axis.cells < line.queries) | (-ahead % line.axis.cells <= high - low))
    stored = [_in_blocks(cell, q_block) for cell in cells]
    slot = torch.arange(length, device=device)
    bit = torch.ones((), dtype=torch.int64, device=device) << slot % at_once // kv_block
    words = torch.zeros(met.shape[::-1], dtype=torch.int64, device=device)
    most = CELLS_ON_CPU if device.type == "cpu" else CELLS_ON_GPU
    size = max(1, most // prod(line.queries for line in lines))
    for begin in range(0, len(met), size):
        own, keys = slice(begin, begin + size), slice(begin * at_once, (begin + size) * at_once)
        word = slot[keys] // at_once
        bits = torch.zeros(len(met[own]), *(line.keys for line in lines), dtype=torch.int64, device=device)
        place = (cell[keys] - line.low[word] for cell, line in zip(cells, lines, strict=True))
        bits[word - begin, *place] = bit[keys]
        for n, line in enumerate(lines):
            bits = _spread(bits, n + 1, line, own)
        for pairs in met[own].nonzero().split(max(1, most // q_block)):
            word, block = pairs.T
            at, inside = word[:, None], True
            for cell, line in zip(stored, lines, strict=True):
                ahead = (cell[block] - line.origin[begin + word, None]) % line.axis.cells
                at, inside = at * line.queries + ahead, (ahead < line.queries) & inside
            words[block, begin + word] = _union(bits.flatten()[at.where(inside, 0)].where(inside, 0))
    octets = words.view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=device)  # lowest first
    return (octets & 1).flatten(1)[:, : -(-length // kv_block)].view(torch.bool)


def _lines_of_words(axes: tuple[Axis, ...], bounds: list[tuple[Tensor, Tensor]]) -> list[_Line]:
    # bounds: the least and the largest cell of each word.
    extents = torch.stack([(high - low).amax() for low, high in bounds]).tolist()
    found = []
    for axis, (low, _), extent in zip(axes, bounds, extents, strict=True):
        far = (axis.window - 1) * axis.dilation  # a window holds its cell
        found.append(_Line(axis, low, extent + 1, low - far, min(axis.cells, extent + 1 + 2 * far)))
    return found


def _spread(bits: Tensor, n: int, line: _Line, own: slice) -> Tensor:
    # For each query of some words, along axis n, the union over its window: two ranges of `width` keys cover it. A
    # window may leave the axis, where there are no keys.
    axis, far = line.axis, line.axis.window * line.axis.dilation
    cell = (line.origin[own, None] + torch.arange(line.queries, device=bits.device)) % axis.cells
    (rank, _), first, seen, least = axis.ranks(cell), axis.start(cell), torch.full_like(cell, axis.window), axis.window
    if axis.is_causal:
        first = torch.minimum(first, rank + 1 - seen).where(first == 0, first)
        seen, least = rank + 1 - first, axis.window + 1 - axis.stride
    first = first * axis.dilation + cell % axis.dilation - line.low[own, None] + far
    bits = torch.nn.functional.pad(bits, (0, 0) * (bits.dim() - 1 - n) + (far, far))
    shape, union, width = [*bits.shape[:n], line.queries, *bits.shape[n + 1 :]], None, 1
    as_bits = (len(cell), *[1] * (n - 1), -1, *[1] * (bits.dim() - 1 - n))
    while True:
        step = min(width, axis.window - width)
        if not step or width + step > least:
            begins = (first, first + (seen - width) * axis.dilation) if step else (first,)
            if axis.edge == "wrap":
                begins = [at + turn for at in begins for turn in (-axis.cells, 0, axis.cells)]
            begins = (at.clamp(0, bits.shape[n] - 1).view(as_bits).expand(shape) for at in begins)
            found = reduce(torch.bitwise_or, (bits.gather(n, at) for at in begins))
            union = found if union is None else found.where((seen >= width).view(as_bits), union)
        if not step:
            return union
        left = bits.shape[n] - step * axis.dilation
        bits = bits.narrow(n, 0, left) | bits.narrow(n, step * axis.dilation, left)
        width += step


def _union(bits: Tensor) -> Tensor:
    # Along the second axis.
    while (left := bits.shape[1]) > 1:
        half = (left + 1) // 2
        bits = bits[:, :half] | bits[:, left - half :]
    return bits[:, 0]


def _full_blocks(neighbourhood: Neighbourhood, perm: Tensor, q_block: int, kv_block: int) -> Tensor:
    # The windows of a query block have a rectangle in common, and a block of keys is full that lies inside of it.
    length = len(perm)
    full = torch.ones(-(-length // q_block), -(-length // kv_block), dtype=torch.bool, device=perm.device)
    for axis, cell in zip(neighbourhood.axes, torch.unravel_index(perm, neighbourhood.shape), strict=True):
        line = torch.arange(axis.cells, device=perm.device)
        (rank, count), start = axis.ranks(line), axis.start(line)
        end = rank + 1 if axis.is_causal else start + axis.window
        if axis.edge == "wrap":  # only windows that do not go round
            round_ = (start < 0) | (end > count)
            start, end = start.where(~round_, axis.cells), end.where(~round_, -1)
        low, high = _most(start.int()[cell], q_block)[1], _most(end.int()[cell], q_block)[0]
        key_low, key_high = _most(rank.int()[cell], kv_block)
        if length % q_block:  # what the cells do not fill is not full
            high[-1] = -1
        if length % kv_block:
            key_high[-1] = axis.cells + axis.window  # past the end of every window, clipped ones too
        full &= low[:, None] <= key_low
        full &= key_high < high[:, None]
        if axis.dilation > 1:
            (q_low, q_high), (k_low, k_high) = (_most(cell % axis.dilation, size) for size in (q_block, kv_block))
            full &= (q_low == q_high)[:, None] & (k_low == k_high) & (q_low[:, None] == k_low)
    return full


def _most(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # The least and the largest value of each block.
    return _in_blocks(values, block).aminmax(dim=1)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    # (blocks, block); the last value fills the last block.
    return torch.cat([values, values[-1:].expand(-len(values) % block)]).view(-1, block)
