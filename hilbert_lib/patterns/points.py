"""Points: cells that are occupied, in a space of 1 to 3 axes. Each sees those in a window around it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.internals import mark_rows_dynamic
from hilbert_lib.patterns.packed_lists import PackedLists, both_ways
from hilbert_lib.patterns.pattern import Pattern, Specification
from hilbert_lib.patterns.point_lists import FAR, in_order, packed

INTEGERS = (torch.int32, torch.int64)
ON_POINTS = frozenset(("extra_q", "extra_k", "extra_v", "extra_padding_mask"))


@dataclass(frozen=True, eq=False, init=False, repr=False)
class PointNeighbourhood(Pattern):
    """Each point attends to the points in a window of cells around it. A point is an occupied cell of 1 to 3 axes.

    Tokens are voxels, pixels of a mask or tiles of a slide, stored as `coordinates` are, in any order, without padding.
    Query x sees the keys y with x - w // 2 <= y <= x - w // 2 + w - 1 along each axis, in its own cloud. It is what
    "clip" is on a grid. Lists of the pairs are made once, here: make one of these for each cloud, and give it to every
    layer. Make it outside of torch.compile and of CUDA graphs. It is compared and hashed by identity. A compiled
    function has two graphs for clouds of all sizes, and more for no point, for one, and for few that one tile holds.

    q, k, v, masks and the output are stored as coordinates are. Extra keys and extra queries belong to all clouds. Not
    served: dropout, a bias by offset, extra tokens of one cloud, several windows in a call. Positions in q and k, as by
    RoPE on coordinates, are the caller's. Of points on several ranks each rank makes a `PointShard`.

    Args:
        coordinates: (n, axes) int32 or int64 [cells], of any sign: the cell of each query, and of each key unless
            `keys` is given. No cell occurs twice in a cloud. Values must not change later.
        window: cells that a query sees along each axis, odd or even. One value, or one for each axis, as dilation.
        batch: (n,) int32 or int64, the cloud of each cell: clouds do not see each other. Any values in any order.
        keys: (m, axes) cells of keys, if k and v live on other cells than q, such as coarser ones.
        key_batch: (m,) the cloud of each key; with `keys` and `batch`.
        dilation: distance of two neighbouring keys, 1 by default. Query x sees y if y - x is a multiple, as many of
            them as without.

    Raises:
        TypeError: if coordinates are no integers: floor them by the size of a cell first.
        ValueError: naming the argument, its value and what is allowed; if a cell occurs twice in a cloud.

    >>> from hilbert_lib import attend
    >>> points = PointNeighbourhood(torch.tensor([[0, 0], [5, 7], [1, 1]]), 3)
    >>> points.keys(0).tolist(), points.pairs
    ([0, 2], 5)
    >>> x = torch.ones(1, 3, 2, 4)
    >>> attend(x, x, x, points).shape
    torch.Size([1, 3, 2, 4])
    """

    kind: ClassVar[str] = "points"
    options: ClassVar[frozenset[str]] = ON_POINTS
    names_of_keys: ClassVar[tuple[str, str]] = "keys", "key_batch"  # the arguments of their cells and clouds, in errors
    keys_in_words: ClassVar[str] = "its points"

    coordinates: Tensor
    window: tuple[int, ...]
    batch: Tensor | None
    key_coordinates: Tensor | None
    key_batch: Tensor | None
    dilation: tuple[int, ...]
    lists: PackedLists  # of the keys that queries see
    turned: PackedLists  # of the queries that see keys: the same lists where every window is odd
    _copies: dict = field(compare=False)

    def __init__(
        self,
        coordinates: Tensor,
        window: int | tuple[int, ...],
        batch: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        key_batch: Tensor | None = None,
        dilation: int | tuple[int, ...] = 1,
    ) -> None:
        self._set_cells(coordinates, window, batch, keys, key_batch, dilation)
        self._set_lists(*lists_of(self))

    def _set_cells(self, coordinates, window, batch, keys, key_batch, dilation) -> None:
        # The arguments, checked one by one.
        axes = _check_cells("coordinates", coordinates, None)
        if keys is not None:
            _check_cells("keys", keys, coordinates)
        _check_clouds("batch", batch, "coordinates", coordinates)
        if keys is None and key_batch is not None:
            raise ValueError("key_batch must be None where keys is None, got a tensor")
        if keys is not None and (batch is None) != (key_batch is None):
            given, missing = ("batch", "key_batch") if key_batch is None else ("key_batch", "batch")
            raise ValueError(f"{missing} must be given where keys and {given} are, got None")
        _check_clouds("key_batch", key_batch, "keys", keys)
        window, dilation = _by_axis("window", window, axes), _by_axis("dilation", dilation, axes)
        self._set(
            coordinates=coordinates,
            window=window,
            batch=batch,
            key_coordinates=keys,
            key_batch=key_batch,
            dilation=dilation,
            _copies={},
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_lists(self, lists: PackedLists, turned: PackedLists) -> None:
        self._set(lists=lists, turned=turned)
        for x in self.list_tensors:  # numbers of tiles may be alike by chance: torch.compile would keep them
            mark_rows_dynamic(x)

    def __repr__(self) -> str:
        keys = "" if self.key_coordinates is None else f", keys={self.lists.keys}"
        return f"PointNeighbourhood({self.lists.queries} points, window={self.window}{keys}, dilation={self.dilation})"

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.coordinates.device

    @property
    def has_keys(self) -> bool:
        """Whether k and v live on other cells than q."""
        return self.key_coordinates is not None

    @property
    def key_cells(self) -> Tensor:
        """The cell of each row of k: (m, axes). They are `coordinates` unless points have keys."""
        return self.coordinates if self.key_coordinates is None else self.key_coordinates

    @cached_property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that attend."""
        return self.lists.pairs

    @property
    def order(self) -> Tensor:
        """The order of work: (n,) int64, the row of the token at each place. Tokens may be stored so, and need not.

        `point_order` finds it without the lists.
        """
        return self.lists.query_rows[: self.lists.queries].long()

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of rows (...) int64 that broadcast.

        >>> points = PointNeighbourhood(torch.tensor([[0], [2], [3]]), 3)
        >>> points.attends(torch.arange(3)[:, None], torch.arange(3)).int().tolist()
        [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
        """
        queries, keys, clouds, key_clouds = _sides_of(self)
        attends = torch.ones((), dtype=torch.bool, device=self.device)
        if clouds is not None:
            attends = clouds[query] == key_clouds[key]
        for x, y, w, d in zip(queries.unbind(1), keys.unbind(1), self.window, self.dilation, strict=True):
            ahead = y[key].long() - x[query].long()
            rank = ahead // d + w // 2
            attends = attends & (ahead % d == 0) & (rank >= 0) & (rank < w)
        return attends

    def keys(self, query: int) -> Tensor:
        """The rows of k that a query sees: (n,) int64, ascending."""
        query = checks.integer("query", query, least=0, most=self.lists.queries - 1)
        query = torch.tensor(query, device=self.device)
        return self.attends(query, torch.arange(self.lists.keys, device=self.device)).nonzero()[:, 0]

    def queries(self, key: int) -> Tensor:
        """The rows of q that see a key: (n,) int64, ascending."""
        key = checks.integer("key", key, least=0, most=self.lists.keys - 1)
        key = torch.tensor(key, device=self.device)
        return self.attends(torch.arange(self.lists.queries, device=self.device), key).nonzero()[:, 0]

    def to(self, device: torch.device | str) -> Self:
        """The same points on a device, made once for each device. Raises ValueError for one that is not here."""
        device = checks.device_here(device)
        if device == self.device:
            return self
        if device not in self._copies:
            copy = object.__new__(type(self))
            lists = self.lists.to(device)
            copy._set_lists(lists, lists if self.turned is self.lists else self.turned.to(device))
            copy._set(window=self.window, dilation=self.dilation, _copies={})
            for name in ("coordinates", "batch", "key_coordinates", "key_batch"):
                value = getattr(self, name)
                copy._set(**{name: None if value is None else value.to(device)})
            self._copies[device] = copy
        return self._copies[device]

    @property
    def list_tensors(self) -> tuple[Tensor, ...]:
        """The arrays of the lists, then those of the lists turned round where these are others."""
        return self.lists.tensors if self.turned is self.lists else (*self.lists.tensors, *self.turned.tensors)

    @property
    def form(self) -> tuple:
        """All but the cells: the validation of a call and the choice of a backend hang on no more."""
        lists, turned = self.lists, self.turned
        return self.kind, lists.queries, lists.keys, lists.tiles, turned.tiles, self.device

    @property
    def specification(self) -> Specification:
        """Points have none: tensors do not go into words and integers."""
        raise TypeError(f"{self.noun} must be given to `attend` as it is: it has no words and integers")


def point_order(coordinates: Tensor, batch: Tensor | None = None) -> Tensor:
    """Order of points in which those of a run lie close together: by cloud, then along a Hilbert curve, then halved.

    Ranks that hold runs of this order need few rows of each other. A `PointNeighbourhood` works in such an order.

    Args:
        coordinates, batch: as for a `PointNeighbourhood`.

    Returns:
        (n,) int64, the row of the point at each place: `coordinates[point_order(coordinates)]` are in order.

    Raises:
        TypeError, ValueError: as `PointNeighbourhood`; cells may occur twice.

    >>> point_order(torch.tensor([[0, 0], [7, 7], [0, 1], [7, 6]])).tolist()
    [0, 2, 1, 3]
    """
    axes = _check_cells("coordinates", coordinates, None)
    _check_clouds("batch", batch, "coordinates", coordinates)
    cells = _counted(coordinates.long().T, batch, (1,) * axes)
    return in_order(cells, has_clouds=len(cells) > axes).order


@dataclass(frozen=True, eq=False)
class ListedPairs(Pattern):
    """The pairs of packed lists, which a request holds as tensors: `with_lists` puts them together."""

    kind: ClassVar[str] = "listed"
    noun: ClassVar[str] = "PointNeighbourhood"
    function: ClassVar[str] = "attend with a PointNeighbourhood"
    options: ClassVar[frozenset[str]] = ON_POINTS

    lists: PackedLists | None = None  # None where a request holds them

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of rows (...) int64 that broadcast."""
        return self.lists.mask.to(query.device)[query, key]

    def part_keys(self, part: int, query: int, length: int, **options) -> Tensor:
        """The rows of k that a query sees: (n,) int64 on the CPU, ascending."""
        return self.lists.keys_of(query).cpu()

    @property
    def specification(self) -> Specification:
        """The pattern as words alone."""
        return self.kind, ()


def with_lists(pattern: Pattern, tensors: tuple[Tensor, ...], queries: int, keys: int) -> Pattern:
    """A request's pattern; of points one that holds the lists. tensors, queries, keys: as in `both_ways`."""
    return ListedPairs(both_ways(tensors, queries, keys)[0]) if tensors else pattern


def _check_cells(name: str, cells: object, queries: Tensor | None) -> int:
    # Returns the number of axes. queries: the coordinates that keys go with.
    if not isinstance(cells, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(cells).__name__}")
    checks.dense_tensor(name, cells)
    if cells.dtype not in INTEGERS:
        hint = ": floor them by the size of a cell first, as in coordinates // 256" if cells.is_floating_point() else ""
        raise TypeError(f"{name} must be int32 or int64, got {cells.dtype}{hint}")
    if cells.dim() != 2 or not 1 <= cells.shape[1] <= 3:
        raise ValueError(f"{name} must be (points, axes) of 1 to 3 axes, got shape {tuple(cells.shape)}")
    if cells.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the meta device")
    if queries is not None:
        if cells.shape[1] != queries.shape[1]:
            raise ValueError(f"{name} must have the {queries.shape[1]} axes of coordinates, got {cells.shape[1]}")
        if cells.device != queries.device:
            raise ValueError(f"{name} must be on the device of coordinates ({queries.device}), got {cells.device}")
    return cells.shape[1]


def _check_clouds(name: str, clouds: object, cells_name: str, cells: Tensor | None) -> None:
    if clouds is None:
        return
    if not isinstance(clouds, Tensor) or clouds.dtype not in INTEGERS:
        got = clouds.dtype if isinstance(clouds, Tensor) else type(clouds).__name__
        raise TypeError(f"{name} must be a tensor of int32 or int64, or None; got {got}")
    if clouds.shape != cells.shape[:1]:
        raise ValueError(
            f"{name} must be ({len(cells)},), a number for each of {cells_name}; got shape {tuple(clouds.shape)}"
        )
    if clouds.device != cells.device:
        raise ValueError(f"{name} must be on the device of {cells_name} ({cells.device}), got {clouds.device}")


def _by_axis(name: str, value: object, axes: int) -> tuple[int, ...]:
    if not checks.is_listed(value):
        return (checks.integer(name, value, least=1, most=checks.LARGEST_SIZE),) * axes
    values = checks.integers(name, value, least=1)
    if len(values) != axes:
        raise ValueError(f"{name} must be one integer, or one for each of the {axes} axes; got {value!r}")
    return tuple(checks.integer(name, each, most=checks.LARGEST_SIZE) for each in values)


def _sides_of(points: PointNeighbourhood) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    # Coordinates of queries and of keys, and their clouds.
    if points.key_coordinates is None:
        return points.coordinates, points.coordinates, points.batch, points.batch
    return points.coordinates, points.key_coordinates, points.batch, points.key_batch


def lists_of(points: PointNeighbourhood) -> tuple[PackedLists, PackedLists]:
    """The lists of some points, and those turned round; ValueError if a cell occurs twice in a cloud."""
    has_keys = points.key_coordinates is not None
    cells, split = _counted_cells(points)
    _check_distinct(points, cells[:, split:] if has_keys else cells)
    has_clouds = cells.shape[0] > len(points.window)
    window = ((1,) if has_clouds else ()) + points.window
    before = tuple(w // 2 for w in window)
    after = tuple(w - 1 - n for w, n in zip(window, before, strict=True))
    queries = in_order(cells[:, :split], has_clouds)
    keys = in_order(cells[:, split:], has_clouds) if has_keys else queries
    lists = packed(queries, keys, before, window)
    if not has_keys and before == after:
        return lists, lists
    return lists, packed(keys, queries, after, window)


def _counted_cells(points: PointNeighbourhood) -> tuple[Tensor, int]:
    # Cells of queries, then of keys if they are others, and how many are those of queries.
    queries, keys, clouds, key_clouds = _sides_of(points)
    split = len(queries)
    if points.key_coordinates is None:
        keys, key_clouds = keys[:0], None if key_clouds is None else key_clouds[:0]
    lines = torch.cat([queries.long(), keys.long()]).T
    cloud = None if clouds is None else torch.cat([clouds.long(), key_clouds.long()])
    return _counted(lines, cloud, points.dilation, has_keys=points.key_coordinates is not None), split


def _counted(
    lines: Tensor, cloud: Tensor | None, dilations: tuple[int, ...], *, has_keys: bool = False
) -> Tensor:  # fmt: skip
    # Cells (axes, n) as int32 from 0 on. A first axis has the number of the cloud where there are several. The cells of
    # a cloud that share all residues of a dilation are a cloud.
    if not lines.shape[1]:
        return lines.int()
    for axis, dilation in enumerate(dilations):
        if dilation > 1:
            residue = _numbered(lines[axis] % dilation)
            cloud = residue if cloud is None else _numbered(cloud) * lines.shape[1] + residue
    lines = divided(lines, dilations)
    least = lines.amin(1)
    check_span(least, lines.amax(1), has_keys=has_keys)
    lines = (lines - least[:, None]).int()
    return lines if cloud is None else torch.cat([_numbered(cloud)[None].int(), lines])


def divided(lines: Tensor, dilations: tuple[int, ...]) -> Tensor:
    """Cells (axes, n) in steps of a dilation: neighbouring keys of a query are 1 apart."""
    return lines.div(torch.tensor(dilations, device=lines.device)[:, None], rounding_mode="floor")


def check_span(least: Tensor, largest: Tensor, *, has_keys: bool) -> None:
    """Raise ValueError if cells lie too far apart.

    Args:
        least, largest: (axes,) int64.
        has_keys: whether they are those of `keys`, too.
    """
    names = "coordinates and keys together" if has_keys else "coordinates"
    for axis, (low, high) in enumerate(zip(least.tolist(), largest.tolist(), strict=True)):
        if high - low >= FAR:
            raise ValueError(f"{names} must span fewer than {FAR} cells of an axis, got {low} to {high} on {axis}")


def _numbered(clouds: Tensor) -> Tensor:
    # Clouds of any numbers, counted from 0.
    return clouds.unique(return_inverse=True)[1]


def _check_distinct(points: PointNeighbourhood, cells: Tensor) -> None:
    # cells: those of keys, (axes, n) from 0 on.
    if cells.shape[1] < 2:
        return
    number, count = cells[0].long(), int(cells[0].amax()) + 1
    for line in cells[1:]:
        side = int(line.amax()) + 1
        if count * side >= 2**63:
            number, count = _numbered(number), cells.shape[1]
        number, count = number * side + line, count * side
    sorted_numbers, order = number.sort(stable=True)
    twice = (sorted_numbers[1:] == sorted_numbers[:-1]).nonzero()
    if len(twice):
        row = int(order[int(twice[0]) + 1])
        _, given, _, clouds = _sides_of(points)
        has_keys = points.key_coordinates is not None
        name, word = points.names_of_keys if has_keys else ("coordinates", "batch")
        where = "" if clouds is None else f" in cloud {int(clouds[row])}"
        hint = f": were these several clouds? pass {word}=" if clouds is None else ""
        raise ValueError(f"{name} must be distinct cells of a cloud, got {given[row].tolist()} twice{where}{hint}")
