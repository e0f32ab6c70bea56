"""Neighbourhood attention: the keys that a cell of a grid attends to, in one, two or three dimensions.

A window is a product over the axes of the grid. `Axis` has the rules of one axis, and `Neighbourhood` joins them.
Nothing holds a table of length squared.

A window may be larger than the grid. The fields of a `Neighbourhood` are as given; `Neighbourhood.axes` has the fitted
numbers, with which every cell sees the same keys. Kernels, plans and counts read `axes` alone.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.patterns.pattern import Pattern, Specification

EDGES = ("shift", "clip", "wrap")
# Arguments of `attend` that patterns on grids take besides those of every kind. A bias is of neighbourhoods alone.
ON_GRIDS = frozenset(("ordering", "query_box", "extra_q", "extra_k", "extra_v", "extra_padding_mask", "bias"))
ON_LINES = ON_GRIDS | {"query_start", "key_start"}  # of one axis


@dataclass(frozen=True)
class Axis:
    """One axis of a `Neighbourhood`. All rules act on the sub-axis of the cells that share cell % dilation.

    Cell x has rank i = x // dilation there, of m ranks. `stride` neighbouring queries are a group, which shares a
    window of `window` keys around its middle. On a causal axis the window ends at the group's last query, and a query
    leaves out the keys past itself. A window that is moved inside has at most m keys.
    """

    cells: int
    window: int
    dilation: int
    stride: int
    is_causal: bool
    edge: str

    def fitted(self) -> "Axis":
        """The axis with the same keys for every cell, whose dilation, window and stride are at most its size.

        The longest sub-axis has M ranks. A window of M holds all of them if it is causal or moved inside; a clipped one
        does from 2 * M - 1 on. With edge="wrap" the numbers fit already.

        >>> Axis(6, 50, 1, 50, False, "shift").fitted().window, Axis(6, 50, 1, 50, False, "clip").fitted().window
        (6, 11)
        """
        if self.edge == "wrap":
            return self
        dilation = _least(self.dilation, self.cells)
        ranks = -(-self.cells // dilation)
        window = _least(self.window, ranks if self.is_causal or self.edge == "shift" else 2 * ranks - 1)
        return replace(self, dilation=dilation, window=window, stride=_least(self.stride, window))

    def ranks(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Rank of each cell on its sub-axis, and number of cells of that sub-axis."""
        return cell // self.dilation, (self.cells - cell % self.dilation + self.dilation - 1) // self.dilation

    def start(self, cell: Tensor) -> Tensor:
        """First rank of each cell's window; below 0 where the window is clipped or goes round."""
        rank, count = self.ranks(cell)
        group = rank // self.stride * self.stride
        if self.is_causal:
            return (torch.minimum(group + self.stride - 1, count - 1) - self.window + 1).clamp(min=0)
        start = torch.minimum(group + self.stride // 2, count - 1) - self.window // 2
        return torch.minimum(start, count - self.window).clamp(min=0) if self.edge == "shift" else start

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of cells that broadcast."""
        (rank, _), (key_rank, count) = self.ranks(query), self.ranks(key)
        ahead = key_rank - self.start(query)
        if self.edge == "wrap":
            ahead = ahead % count
        in_window = (ahead >= 0) & (ahead < self.window) & (query % self.dilation == key % self.dilation)
        return in_window & (key_rank <= rank) if self.is_causal else in_window

    def distance(self, query: Tensor, key: Tensor) -> Tensor:
        """Ranks from each query to each key that it attends to; cells broadcast.

        With edge="wrap" ranks count on past the end. For pairs that do not attend the values have no meaning.
        """
        (rank, _), (key_rank, count) = self.ranks(query), self.ranks(key)
        if self.edge != "wrap":
            return key_rank - rank
        start = self.start(query)
        return start + (key_rank - start) % count - rank

    def distances(self) -> tuple[int, int]:
        """The least and the most that `distance` may be for pairs that attend.

        >>> Axis(9, 3, 1, 1, False, "clip").distances(), Axis(9, 3, 1, 1, False, "shift").distances()
        ((-1, 1), (-2, 2))
        """
        if self.edge == "shift" and not self.is_causal:
            return 1 - self.window, self.window - 1
        return self._unmoved_distances()

    def _unmoved_distances(self) -> tuple[int, int]:
        # `distances` where no window is moved inside.
        if self.is_causal:
            return 1 - self.window, 0
        ahead = self.stride // 2 - self.window // 2  # from the first query of a group to the window's start
        return ahead - self.stride + 1, ahead + self.window - 1

    def seen(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """First and last rank that each cell sees; off the axis where its window is clipped or goes round.

        >>> Axis(9, 3, 1, 1, False, "clip").seen(torch.arange(2))
        (tensor([-1,  0]), tensor([1, 2]))
        """
        start = self.start(cell)
        return start, self.ranks(cell)[0] if self.is_causal else start + self.window - 1

    def seen_by(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """First and last rank of the queries that may see each cell; all others do not. They may lie off the axis.

        >>> Axis(9, 3, 1, 1, False, "shift").seen_by(torch.tensor([0, 2, 4]))
        (tensor([0, 0, 3]), tensor([1, 3, 5]))
        """
        rank, count = self.ranks(cell)
        least, most = self._unmoved_distances()
        first, last = rank - most, rank - least
        if self.edge == "shift" and not self.is_causal:  # all queries whose windows are moved see the keys of that end
            first = first.where(rank >= self.window, 0)
            last = last.where(rank < count - self.window, count - 1)
        return first, last

    def keys(self, cell: Tensor) -> Tensor:
        """The cells that one cell () attends to: (n,) int64, ascending."""
        _, count = self.ranks(cell)
        ranks = self.start(cell) + torch.arange(self.window, device="cpu")
        if self.edge == "wrap":
            ranks = (ranks % count).sort().values
        cells = ranks[(ranks >= 0) & (ranks < count)] * self.dilation + cell % self.dilation
        return cells[self.attends(cell, cells)]

    def pairs(self, queries: slice = slice(None)) -> int:
        """Number of pairs of a query and a key that attend, of all queries or of a slice of them."""
        cell = torch.arange(self.cells, device="cpu")[queries]
        if self.edge == "wrap":
            return len(cell) * self.window
        (rank, count), start = self.ranks(cell), self.start(cell)
        end = rank + 1 if self.is_causal else torch.minimum(start + self.window, count)
        return int((end - start.clamp(min=0)).sum())


def _least(a: int, b: int) -> int:
    # `min` would tell torch.export which of the two is smaller, and so bind the sides that its program serves. In
    # torch.compile it does not, and torch 2.11 has no `sym_min` of two constants there.
    return min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)


@dataclass(frozen=True)
class Neighbourhood(Pattern):
    """Each cell of a grid attends to a window of cells around it; position p is cell p, row by row.

    Neighbourhood attention as in Hassani et al., "Neighborhood Attention Transformer" (arXiv 2204.07143), with its
    dilation (arXiv 2209.15001) and stride (arXiv 2504.16922). An axis of n cells with window w, dilation d and stride
    s is taken apart into the cells that share x % d, m of them; cell x is i = x // d there.

    Args:
        shape: 1, 2 or 3 sides [cells].
        window: cells that a query sees along each axis, odd or even. One value, or one for each axis, as all below. It
            may be larger than the grid. With edge="wrap" window * dilation is at most the side.
        dilation: distance of two neighbouring keys, 1 by default.
        stride: so many neighbouring queries share one window, 1 by default, at most the window as given.
        is_causal: whether keys past the query along the axis are left out: keys c - w + 1 to i, where c, the last of
            the query's group, is min(i // s * s + s - 1, m - 1).
        edge: what happens to a window that begins at c - w // 2, with c = min(i // s * s + s // 2, m - 1), and leaves
            the axis. "shift" moves it inside, so that every query has w keys, or all m where w is larger; "clip"
            leaves out what is outside; "wrap" goes round, along sides that are multiples of stride * dilation. Causal
            windows are clipped.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is allowed.

    >>> Neighbourhood((3, 4), 2).keys(0).tolist()
    [0, 1, 4, 5]
    >>> Neighbourhood((6,), 3, edge="wrap").keys(0).tolist()
    [0, 1, 5]
    """

    kind: ClassVar[str] = "neighbourhood"

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
        values_by_name = {"shape": shape}
        for name in ("window", "dilation", "stride", "is_causal", "edge"):
            values_by_name[name] = _by_axis(name, getattr(self, name), len(shape))
        for name, value in values_by_name.items():
            object.__setattr__(self, name, value)
        axes = tuple(Axis(*values) for values in zip(*values_by_name.values(), strict=True))
        for n, axis in enumerate(axes):
            _check_axis(n, axis)
        object.__setattr__(self, "axes", tuple(axis.fitted() for axis in axes))  # the rules along each axis

    @property
    def options(self) -> frozenset[str]:
        """Arguments of `attend` that the pattern takes besides those of every kind."""
        return ON_LINES if len(self.shape) == 1 else ON_GRIDS

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that attend."""
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

        TypeError or ValueError if the position is no integer or not on the grid; `queries` raises the same.
        """
        return self._positions([axis.keys(cell) for axis, cell in self._places(position)])

    def part_keys(self, part: int, query: int, length: int, **options) -> Tensor:
        """The cells that a query attends to: `keys`, for every KV head; of a line also where its length is less."""
        if length == self.length:
            return self.keys(query)
        (axis,) = self.axes
        return replace(axis, cells=length).keys(torch.tensor(query, device="cpu"))

    def queries(self, position: int) -> Tensor:
        """The positions that attend to a key: (n,) int64, ascending.

        >>> Neighbourhood((2, 4), 2).queries(0).tolist()
        [0, 1, 4, 5]
        """
        lines = []
        for axis, cell in self._places(position):
            cells = torch.arange(axis.cells, device="cpu")
            lines.append(cells[axis.attends(cells, cell)])
        return self._positions(lines)

    def _places(self, position: int) -> list[tuple[Axis, Tensor]]:
        # Each axis, and the position's cell along it. `coordinates` takes positions off the grid too.
        position = checks.integer("position", position, least=0, most=self.length - 1)
        return list(zip(self.axes, self.coordinates(torch.tensor(position, device="cpu")), strict=True))

    def _positions(self, lines: list[Tensor]) -> Tensor:
        # Positions of the product of some cells of every axis.
        positions = torch.zeros(1, dtype=torch.int64, device="cpu")
        for side, cells in zip(self.shape, lines, strict=True):
            positions = (positions[:, None] * side + cells).flatten()
        return positions

    def of_heads(self, kv_heads: int) -> "HeadNeighbourhoods":
        """The same neighbourhood for every KV head."""
        # Not `(self,) * kv_heads`: the compiler of torch 2.11 does not trace that.
        return HeadNeighbourhoods(tuple(self for _ in range(kv_heads)))

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers."""
        numbers = (*self.shape, *self.window, *self.dilation, *self.stride, *map(int, self.is_causal))
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
        by_head: a Neighbourhood for each KV head.

    Raises:
        TypeError, ValueError: if by_head holds anything else, is empty, or its members differ in more than window.

    >>> near = HeadNeighbourhoods((Neighbourhood((4,), 1), Neighbourhood((4,), 3)))
    >>> near.mask(0, torch.arange(1), torch.arange(4), kv_head=1, kv_heads=2).int().tolist()
    [[1, 1, 1, 0]]
    """

    kind: ClassVar[str] = "neighbourhoods"
    function: ClassVar[str] = "neighbourhood_attention"
    noun: ClassVar[str] = "Neighbourhood"

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

    @property
    def options(self) -> frozenset[str]:
        """Arguments of `attend` that the pattern takes besides those of every kind."""
        return self.by_head[0].options

    def of_any_heads(self) -> Pattern:
        """The neighbourhood of every KV head where all are equal, else the pattern itself."""
        first = self.by_head[0]
        return first if all(near == first for near in self.by_head) else self

    def of_head_range(self, heads: range, kv_heads: int) -> Self:
        """The neighbourhoods of some KV heads."""
        return HeadNeighbourhoods(self.by_head[heads.start : heads.stop])

    def of_heads(self, kv_heads: int) -> Self:
        """The pattern itself; ValueError where it has another number of KV heads."""
        if len(self.by_head) != kv_heads:
            raise ValueError(
                f"neighbourhood must hold one for each of the {kv_heads} KV heads, got {len(self.by_head)}"
            )
        return self

    @property
    def bias_sides(self) -> tuple[int, ...]:
        """Entries of a table of bias along each axis: 2 * w - 1, of the largest window w as given."""
        return tuple(2 * max(windows) - 1 for windows in zip(*(near.window for near in self.by_head), strict=True))

    def bias_entries(self, queries: Tensor, keys: Tensor, *, kv_head: int) -> Tensor:
        """The entry of a flat table of bias for each pair that attends: int64 of positions that broadcast.

        For pairs that do not attend it is any entry.

        >>> near = HeadNeighbourhoods((Neighbourhood((4,), 3),))
        >>> near.bias_entries(torch.tensor(0), torch.arange(3), kv_head=0).tolist()
        [2, 3, 4]
        """
        cells = zip(torch.unravel_index(queries, self.shape), torch.unravel_index(keys, self.shape), strict=True)
        entries = 0
        for axis, side, pair in zip(self.by_head[kv_head].axes, self.bias_sides, cells, strict=True):
            entries = entries * side + (axis.distance(*pair) + side // 2).clamp(0, side - 1)
        return entries

    def mask(
        self, part: int, queries: Tensor, keys: Tensor, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """Whether each pair of cells attends: (nq, nk) bool of queries (nq,) and keys (nk,) int64."""
        return self.by_head[kv_head].attends(queries[:, None], keys)

    def part_keys(self, part: int, query: int, length: int, *, kv_head: int, **options) -> Tensor:
        """The cells that a query of a KV head attends to; `Neighbourhood.part_keys`."""
        return self.by_head[kv_head].part_keys(part, query, length)

    def batch_mask(
        self, part: int, queries: Tensor, keys: Tensor, *, kv_head: int, lengths: Tensor | None = None, **options
    ) -> Tensor:
        """`mask` of each sequence of a batch: (batch, nq, nk) bool of queries (batch, nq) and keys (batch, nk) int64.

        lengths: (batch,) int64, cells of each, where a line has fewer for some than for others.
        """
        near, queries, keys = self.by_head[kv_head], queries[:, :, None], keys[:, None]
        if lengths is None:
            return near.attends(queries, keys)
        return replace(near.axes[0], cells=lengths[:, None, None]).attends(queries, keys)

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers."""
        words, rules = self.by_head[0].specification
        windows = [size for near in self.by_head for size in near.window]
        return words.replace("neighbourhood", "neighbourhoods", 1), (*rules, *windows)

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        axes = len(words[0].split(","))
        first, windows = Neighbourhood._of_words(words, numbers[: 5 * axes]), numbers[5 * axes :]
        windows_by_head = [tuple(windows[n : n + axes]) for n in range(0, len(windows), axes)]
        return cls(tuple(replace(first, window=window) for window in windows_by_head))


def _by_axis(name: str, value: object, axes: int) -> tuple:
    values = tuple(value) if checks.is_listed(value) else (value,) * axes
    if len(values) != axes:
        raise ValueError(f"{name} must be one value or one for each of the {axes} axes, got {value!r}")
    places = [f"{name}[{n}]" if checks.is_listed(value) else name for n in range(axes)]
    if name == "is_causal":
        return tuple(map(checks.boolean, places, values))
    if name == "edge":
        return tuple(checks.one_of(where, x, EDGES) for where, x in zip(places, values, strict=True))
    return tuple(_cells_along(where, x) for where, x in zip(places, values, strict=True))


def _cells_along(name: str, value: object) -> int:
    # torch.compile's symbols are not compared with the largest size, which would bind them.
    most = None if isinstance(value, torch.SymInt) else checks.LARGEST_SIZE
    return checks.integer(name, value, least=1, most=most)


def _check_axis(n: int, axis: Axis) -> None:
    if axis.edge == "wrap" and axis.window * axis.dilation > axis.cells:
        raise ValueError(
            f"window * dilation must be at most the side of axis {n}, {axis.cells} cells, where edge is 'wrap'; got "
            f"{axis.window} * {axis.dilation}"
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
