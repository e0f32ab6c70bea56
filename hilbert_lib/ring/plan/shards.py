"""The cells of a grid spread over ranks, and the cells that the windows of a rank's queries reach."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from math import prod

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood

Box = tuple[range, ...]  # cells along each axis; on an axis that wraps, index `cells + i` means cell `i`


@dataclass(frozen=True)
class Rectangles:
    """Each rank holds a rectangle of the grid, stored row by row; the parts are counted row by row too.

    Args:
        parts: into how many each axis is cut, as (p_y, p_x): rank = row of parts * p_x + column. (p, 1) are strips.
        cuts: where, for each axis: parts - 1 cells at which a part begins, ascending; None, also for one axis, cuts a
            side of n cells at n * i // parts. Parts may be empty.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> Rectangles((2, 2)).box((5, 6), rank=3)
    (range(2, 5), range(3, 6))
    """

    parts: tuple[int, ...]
    cuts: tuple[tuple[int, ...] | None, ...] | None = None

    def __post_init__(self) -> None:
        parts = checks.integers("parts", self.parts, least=1)
        object.__setattr__(self, "parts", parts)
        if self.cuts is None:
            return
        if not checks.is_listed(self.cuts) or len(self.cuts) != len(parts):
            raise ValueError(f"cuts must be None or have one for each of the {len(parts)} axes, got {self.cuts!r}")
        cuts = []
        for n, (cut, count) in enumerate(zip(self.cuts, parts, strict=True)):
            cuts.append(None if cut is None else checks.integers(f"cuts[{n}]", cut, least=0, empty=True))
            if cut is not None and (len(cut) != count - 1 or list(cuts[n]) != sorted(cuts[n])):
                raise ValueError(f"cuts[{n}] must hold {count - 1} cells, ascending, got {cut!r}")
        object.__setattr__(self, "cuts", tuple(cuts))

    @classmethod
    def compact(cls, shape: tuple[int, ...], ranks: int) -> "Rectangles":
        """The rectangles of a grid, one for each of so many ranks, whose parts have the smallest border.

        >>> Rectangles.compact((512, 512), 8).parts
        (2, 4)
        """
        ranks = checks.integer("ranks", ranks, least=1, most=checks.LARGEST_RANKS)
        return cls(_compact_parts(checks.integers("shape", shape, least=1), ranks))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.parts)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless a grid can be cut so."""
        if len(self.parts) != len(shape):
            raise ValueError(f"parts must have one for each of the {len(shape)} axes of {shape}, got {self.parts}")
        for n, cut in enumerate(self.cuts or ()):
            if cut and cut[-1] > shape[n]:
                raise ValueError(f"cuts[{n}] must be at most the side of {shape[n]} cells, got {cut}")

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """The cells of a rank along each axis of a grid."""
        self.check(shape)
        rank = checks.integer("rank", rank, least=0, most=self.ranks - 1)
        place = [rank // prod(self.parts[n + 1 :]) % count for n, count in enumerate(self.parts)]
        return tuple(range(*self._ends(shape, n)[part : part + 2]) for n, part in enumerate(place))

    def count(self, shape: tuple[int, ...], rank: int) -> int:
        """The number of cells of a rank."""
        return prod(map(len, self.box(shape, rank)))

    def cells(self, shape: tuple[int, ...], rank: int) -> Tensor:
        """The positions of a rank's cells, as it stores them."""
        return positions([torch.tensor(line, dtype=torch.int64, device="cpu") for line in self.box(shape, rank)], shape)

    def owner(self, shape: tuple[int, ...], cells: Tensor) -> Tensor:
        """The rank of each cell."""
        self.check(shape)
        _check_cells(shape, cells)
        rank = torch.zeros_like(cells)
        for n, line in enumerate(torch.unravel_index(cells, shape)):
            inner = torch.tensor(self._ends(shape, n)[1:-1], dtype=torch.int64, device="cpu")
            rank = rank * self.parts[n] + torch.bucketize(line.contiguous(), inner, right=True)
        return rank

    def slot(self, shape: tuple[int, ...], cells: Tensor, rank: int) -> Tensor:
        """The slot in which a rank stores each of some of its own cells."""
        box = self.box(shape, rank)
        _check_cells(shape, cells)
        inside = [line - span.start for line, span in zip(torch.unravel_index(cells, shape), box, strict=True)]
        return positions_of(inside, [len(span) for span in box])

    def reached(self, neighbourhood: Neighbourhood, rank: int) -> Tensor:
        """The positions that the windows of a rank's queries reach, ascending."""
        box = self.box(neighbourhood.shape, rank)
        lines = [
            line_reached(axis, queries).nonzero()[:, 0] for axis, queries in zip(neighbourhood.axes, box, strict=True)
        ]
        return positions(lines, neighbourhood.shape)

    def arriving_cells(self, neighbourhood: Neighbourhood) -> list[int]:
        """By rank: the number of other ranks' cells that its windows reach, from the parts of each axis alone.

        >>> Rectangles((2, 2)).arriving_cells(Neighbourhood((8, 8), 3))
        [9, 9, 9, 9]
        """
        shape, reached, own = neighbourhood.shape, [1], [1]
        for n, axis in enumerate(neighbourhood.axes):
            parts = [range(*between) for between in pairwise(self._ends(shape, n))]
            counts = [int(line_reached(axis, queries).sum()) for queries in parts]
            reached = [before * count for before in reached for count in counts]
            own = [before * len(queries) for before in own for queries in parts]
        return [all_cells - own_cells for all_cells, own_cells in zip(reached, own, strict=True)]

    def _ends(self, shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return _part_ends(shape[n], self.parts[n], self.cuts and self.cuts[n])


@lru_cache(maxsize=64)  # a plan asks for the same axes again for every rank
def _part_ends(side: int, count: int, cut: tuple[int, ...] | None) -> tuple[int, ...]:
    # The cells at which the parts of an axis begin, and its end.
    return (0, *cut, side) if cut is not None else tuple(side * i // count for i in range(count + 1))


@lru_cache(maxsize=64)
def _compact_parts(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    counts = [n for n in range(1, ranks + 1) if ranks % n == 0]

    def border(parts: tuple[int, ...]) -> int:
        lengths = [-(-n // count) for n, count in zip(shape, parts, strict=True)]
        # The border of a part in the middle: an axis cut more than once has neighbours on both sides of it.
        return sum(prod(lengths) // length * min(count - 1, 2) for length, count in zip(lengths, parts, strict=True))

    return min((cut for cut in product(counts, repeat=len(shape)) if prod(cut) == ranks), key=border)


@dataclass(frozen=True)
class Runs:
    """Each rank holds a run of consecutive slots of an ordering of the cells, in rank order.

    Args:
        ordering: of the cells of the grid.
        lengths: cells of each rank, in sum all; some may be 0.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> Runs(Ordering.from_curve("snake", 6, grid=(2, 3)), (2, 4)).cells((2, 3), rank=1).tolist()
    [2, 5, 4, 3]
    """

    ordering: Ordering
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.ordering, Ordering):
            raise TypeError(f"ordering must be an Ordering, got {self.ordering!r}")
        lengths = checks.integers("lengths", self.lengths, least=0)
        if sum(lengths) != self.ordering.length:
            raise ValueError(f"lengths must be {self.ordering.length} cells in sum, got {lengths}")
        object.__setattr__(self, "lengths", lengths)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.lengths)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the ordering has a grid's cells."""
        if self.ordering.length != prod(shape):
            raise ValueError(f"ordering must have the {prod(shape)} cells of the grid {shape}, got {self.ordering!r}")

    def count(self, shape: tuple[int, ...], rank: int) -> int:
        """The number of cells of a rank."""
        return self.lengths[self._rank(shape, rank)]

    def cells(self, shape: tuple[int, ...], rank: int) -> Tensor:
        """The positions of a rank's cells, as it stores them."""
        rank = self._rank(shape, rank)
        return self.ordering.to("cpu").perm[slice(*self._ends[rank : rank + 2])]

    def owner(self, shape: tuple[int, ...], cells: Tensor) -> Tensor:
        """The rank of each cell."""
        self.check(shape)
        _check_cells(shape, cells)
        inner = torch.tensor(self._ends[1:-1], dtype=torch.int64, device="cpu")
        return torch.bucketize(self.ordering.to("cpu").inverse[cells], inner, right=True)

    def slot(self, shape: tuple[int, ...], cells: Tensor, rank: int) -> Tensor:
        """The slot in which a rank stores each of some of its own cells."""
        rank = self._rank(shape, rank)
        _check_cells(shape, cells)
        return self.ordering.to("cpu").inverse[cells] - self._ends[rank]

    def reached(self, neighbourhood: Neighbourhood, rank: int) -> Tensor:
        """The positions that the windows of a rank's queries reach, ascending."""
        shape, own = neighbourhood.shape, self.cells(neighbourhood.shape, rank)
        if not len(own):
            return own
        # The box around the queries, and of its lines along each axis those that are reached: a grid has many more.
        places = torch.unravel_index(own, shape)
        box = [range(int(place.min()), int(place.max()) + 1) for place in places]
        inside = positions_of(
            [place - span.start for place, span in zip(places, box, strict=True)], list(map(len, box))
        )
        queries = torch.zeros(prod(map(len, box)), dtype=torch.bool, device="cpu")
        queries[inside] = True
        queries = queries.view([len(span) for span in box])
        lines = []
        for n, axis in enumerate(neighbourhood.axes):  # a window is a product of axes, and so one goes on from the last
            reached = _reached(axis, box[n], queries.movedim(n, 0))
            lines.append(reached.reshape(axis.cells, -1).any(1).nonzero()[:, 0])
            queries = reached[lines[n]].movedim(0, n)
        return positions(lines, shape)[queries.flatten()]

    def _rank(self, shape: tuple[int, ...], rank: int) -> int:
        self.check(shape)
        return checks.integer("rank", rank, least=0, most=self.ranks - 1)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))


def _check_cells(shape: tuple[int, ...], cells: Tensor) -> None:
    first, last = (int(cells.min()), int(cells.max())) if cells.numel() else (0, 0)
    if first < 0 or last >= prod(shape):
        raise ValueError(f"cells must be 0 to {prod(shape) - 1}, those of the grid {shape}, got {first} to {last}")


def line_reached(axis: Axis, queries: range) -> Tensor:
    """The cells of an axis that the windows of a run of queries reach: (cells,) bool."""
    return _reached(axis, queries, torch.ones(len(queries), dtype=torch.bool, device="cpu"))


@lru_cache(maxsize=8)  # a plan asks for the same axes again for every rank
def _windows(axis: Axis) -> tuple[Tensor, Tensor]:
    # The first key of each cell's window, and how many keys it has. On an axis that wraps, the window may pass the end:
    # index `cells + i` means cell `i`.
    cell = torch.arange(axis.cells, device="cpu")
    (rank, count), first = axis.ranks(cell), axis.start(cell)
    if axis.edge == "wrap":
        first, end = first % count, first % count + axis.window
    else:
        end = rank + 1 if axis.is_causal else torch.minimum(first + axis.window, count)
        first = first.clamp(min=0)
    return first * axis.dilation + cell % axis.dilation, end - first


def _reached(axis: Axis, span: range, queries: Tensor) -> Tensor:
    # Whether each cell (cells, ...) is a key of one of the queries (span, ...), bool.
    # A window adds 1 where it begins and takes it away past its end; the sum in steps of dilation is then above 0.
    reached = torch.zeros(axis.cells, *queries.shape[1:], dtype=torch.bool, device="cpu")
    if not span:
        return reached
    first, keys = (x[span.start : span.stop] for x in _windows(axis))
    past = first + keys * axis.dilation
    begin = int(first.min()) // axis.dilation * axis.dilation
    steps = (int(past.max()) - begin) // axis.dilation + 1
    change = torch.zeros(steps * axis.dilation, *queries.shape[1:], dtype=torch.int32, device="cpu")
    change.index_add_(0, first - begin, queries.int())
    change.index_add_(0, past - begin, -queries.int())
    is_reached = change.unflatten(0, (steps, axis.dilation)).cumsum(0).flatten(0, 1) > 0
    inside, round_ = is_reached[: axis.cells - begin], is_reached[axis.cells - begin :][: axis.cells]
    reached[begin : begin + len(inside)] = inside
    reached[: len(round_)] |= round_
    return reached


def positions(lines: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The cells of a product of lines, one for each axis, row by row, as positions in a box of this shape."""
    return positions_of(torch.meshgrid(*lines, indexing="ij"), shape).flatten()


def positions_of(cells: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The positions of cells in a box of this shape, row by row."""
    position = cells[0]
    for line, axis_length in zip(cells[1:], shape[1:], strict=True):
        position = position * axis_length + line
    return position


def interior(axis: Axis, cells: range) -> range:
    """The longest run of queries among a rank's `cells` of an axis whose windows stay among these cells."""
    if len(cells) == axis.cells:  # windows that go round stay too
        return cells
    first, keys = (x[cells.start : cells.stop] for x in _windows(axis))
    query, last = torch.arange(cells.start, cells.stop, device="cpu"), first + (keys - 1) * axis.dilation
    outside = query[(first < cells.start) | (last >= cells.stop)].tolist()
    return max((range(a + 1, b) for a, b in pairwise([cells.start - 1, *outside, cells.stop])), key=len)


def hull(axis: Axis, reached: Tensor) -> range:
    """The shortest run of cells that holds all reached ones. On an axis that wraps, it may pass the end."""
    cells = reached.nonzero()[:, 0]
    if axis.edge != "wrap" or len(cells) == axis.cells:
        return range(int(cells[0]), int(cells[-1]) + 1)
    gaps = cells.diff(append=cells[:1] + axis.cells)
    widest_gap = int(gaps.argmax())
    first = int(cells[(widest_gap + 1) % len(cells)])
    return range(first, first + axis.cells - int(gaps[widest_gap]) + 1)
