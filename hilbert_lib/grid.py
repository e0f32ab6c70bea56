"""Which keys a cell of a grid attends to in neighbourhood attention, in one, two or three dimensions.

Everything about a window is a product over the axes of the grid, so `Axis` holds the rules and `Neighbourhood` joins
them. `axis_tiles` gives them as rectangles of queries within rectangles of keys, which is what kernels read, and
`mask_blocks` the blocks of the mask for cells stored in any order. Nothing holds a table of length squared.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.ordering import Ordering

EDGES = ("shift", "clip", "wrap")
WORD_BITS = 64


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

    def pairs(self) -> int:
        """Pairs of a query and a key that attend."""
        if not self.is_causal and self.edge != "clip":
            return self.cells * self.window
        cell = torch.arange(self.cells, device="cpu")
        (rank, count), start = self.ranks(cell), self.start(cell)
        end = rank + 1 if self.is_causal else torch.minimum(start + self.window, count)
        return int((end - start.clamp(min=0)).sum())


@dataclass(frozen=True)
class Neighbourhood:
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

    shape: tuple[int, ...]
    window: tuple[int, ...]
    dilation: tuple[int, ...] = 1
    stride: tuple[int, ...] = 1
    is_causal: tuple[bool, ...] = False
    edge: tuple[str, ...] = "shift"

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        shape = checks.integers("shape", shape, least=1)
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
    def length(self) -> int:
        """Cells of the grid."""
        return prod(self.shape)

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


def axis_tiles(axis: Axis, size: int, device: torch.device | str = "cpu") -> AxisTiles:
    """The queries of an axis, up to `size` of one residue in a tile, with the keys of each tile.

    >>> axis_tiles(Axis(4, 3, 1, 1, False, "clip"), 2).keys.tolist()
    [[-1, 0, 1, 2], [1, 2, 3, -1]]
    """
    residue = torch.arange(axis.dilation, device=device)[:, None, None]
    most = -(-axis.cells // axis.dilation)
    first = torch.arange(0, most, size, device=device)[None, :, None]
    queries = ((first + torch.arange(min(size, most), device=device)) * axis.dilation + residue).flatten(0, 1)
    there = queries < axis.cells
    queries, there = queries[there[:, 0]], there[there[:, 0]]
    own = queries.clamp(max=axis.cells - 1)
    rank, count = axis.ranks(own)
    start = axis.start(own)
    end = rank + 1 if axis.is_causal else start + axis.window
    begin = start.where(there, axis.cells).amin(1)
    span = int((end.where(there, -axis.cells).amax(1) - begin).amax())
    span = min(span, most) if axis.edge == "wrap" else span
    ranks = begin[:, None] + torch.arange(span, device=device)
    count = count[:, :1]
    inside = (ranks >= 0) & (ranks < count)
    if axis.edge == "wrap":
        ranks, inside = ranks % count, torch.ones_like(inside)
    keys = (ranks * axis.dilation + queries[:, :1] % axis.dilation).where(inside, -1)
    seen = axis.attends(own[:, :, None], keys.clamp(min=0)[:, None]) & there[:, :, None] & inside[:, None]
    return AxisTiles(queries.where(there, -1), keys, seen)


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
    length = neighbourhood.length
    perm = torch.arange(length, device=device) if ordering is None else ordering.perm.to(device)
    touched = _touched_blocks(neighbourhood, perm, q_block, kv_block)
    full = _full_blocks(neighbourhood, perm, q_block, kv_block)
    return Blocks(touched & ~full, full)


def check_length(neighbourhood: Neighbourhood, ordering: Ordering | None) -> None:
    """Raise ValueError unless the ordering has the length of the grid."""
    if ordering is not None and ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the length of the grid {neighbourhood.shape}, got {ordering!r}")


def _touched_blocks(neighbourhood: Neighbourhood, perm: Tensor, q_block: int, kv_block: int) -> Tensor:
    # Sets of up to 64 key blocks as bits of a word for each cell, of those cells that may see some of their keys.
    length, device = len(perm), perm.device
    q_blocks, kv_blocks = -(-length // q_block), -(-length // kv_block)
    at_once = WORD_BITS * kv_block
    slot = torch.empty_like(perm)
    slot[perm] = torch.arange(length, device=device)
    slot, block = slot.view(neighbourhood.shape), (slot // q_block).view(neighbourhood.shape)
    cells = torch.unravel_index(perm, neighbourhood.shape)
    limits = torch.stack([torch.stack(_most(cell, at_once)) for cell in cells]).permute(2, 0, 1).tolist()
    windows = [_windows(axis) for axis in neighbourhood.axes]
    bit = torch.ones((), dtype=torch.int64, device=device) << torch.arange(at_once, device=device) // kv_block
    words = torch.zeros(q_blocks, len(limits), dtype=torch.int64, device=device)
    for number, word in enumerate(limits):
        reach = tuple(_reach(axis, *ends) for axis, ends in zip(neighbourhood.axes, word, strict=True))
        keys = slice(number * at_once, min(length, (number + 1) * at_once))
        bits = torch.zeros([cut.stop - cut.start for cut in reach], dtype=torch.int64, device=device)
        inside = tuple(cell[keys] - cut.start for cell, cut in zip(cells, reach, strict=True))
        bits[inside] = bit[: keys.stop - keys.start]
        for n, axis in enumerate(neighbourhood.axes):
            bits = _union(bits, n, axis, *windows[n], reach[n])
        _add_by_block(words[:, number], block[reach].flatten(), slot[reach].flatten(), bits.flatten(), q_block)
    number = torch.arange(8, dtype=torch.uint8, device=device)
    octets = words.view(torch.uint8)  # the lowest first
    return (octets[..., None] >> number & 1).flatten(1)[:, :kv_blocks].view(torch.bool)


def _add_by_block(word: Tensor, block: Tensor, slots: Tensor, bits: Tensor, q_block: int) -> None:
    # The union of the bits of each block of slots, put in its place; slots that are not named have none.
    named = torch.zeros(len(word), dtype=torch.bool, device=word.device)
    named[block] = True
    named = named.nonzero()[:, 0]
    if len(named) < len(word):
        moved = torch.zeros_like(word)
        moved[named] = (named - torch.arange(len(named), device=word.device)) * q_block
        slots = slots - moved[block]
    stored = torch.zeros(len(named) * q_block, dtype=bits.dtype, device=word.device)
    stored[slots] = bits
    stored, left = stored.view(-1, q_block), q_block
    while left > 1:
        half = (left + 1) // 2
        stored, left = stored[:, :half] | stored[:, left - half : left], half
    word[named] = stored[:, 0]


def _reach(axis: Axis, low: int, high: int) -> slice:
    # The cells along an axis that may see a key from low to high, and those keys. Where it is cut within the axis, no
    # window as long as this one that begins or ends there holds such a key.
    if axis.edge == "wrap":
        return slice(0, axis.cells)
    far = (axis.window + axis.stride) * axis.dilation
    return slice(max(0, low - far), min(axis.cells, high + far + 1))


def _windows(axis: Axis) -> tuple[Tensor, Tensor]:
    # The first key of each cell's window on the axis, which may be past its end where it wraps, and how many they are.
    cell = torch.arange(axis.cells, device="cpu")
    (rank, count), first = axis.ranks(cell), axis.start(cell)
    if axis.edge == "wrap":
        first, end = first % count, first % count + axis.window
    else:
        end = rank + 1 if axis.is_causal else torch.minimum(first + axis.window, count)
        first = first.clamp(min=0)
    return first * axis.dilation + cell % axis.dilation, end - first


def _union(bits: Tensor, n: int, axis: Axis, first: Tensor, seen: Tensor, reach: slice) -> Tensor:
    # For each cell of `reach`, along axis n, the union over its window: two ranges of `width` keys cover it.
    first, seen = first[reach] - reach.start, seen[reach]
    union = torch.empty_like(bits)
    bits = torch.cat([bits, bits], n) if axis.edge == "wrap" else bits
    width = 1
    while True:
        step = min(width, axis.window - width)
        (fits,) = ((seen >= width) & (seen < width + step) if step else seen >= width).nonzero(as_tuple=True)
        if len(fits):
            low, high = first[fits], first[fits] + (seen[fits] - width) * axis.dilation
            low, high = (at.clamp(0, bits.shape[n] - 1).to(bits.device) for at in (low, high))
            found = bits.index_select(n, low)
            found = found | bits.index_select(n, high) if step else found
            if len(fits) == len(seen):
                return found
            union.index_copy_(n, fits.to(bits.device), found)
        if not step:
            return union
        left = bits.shape[n] - step * axis.dilation
        bits = bits.narrow(n, 0, left) | bits.narrow(n, step * axis.dilation, left)
        width += step


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
    padded = torch.cat([values, values[-1:].expand(-len(values) % block)]).reshape(-1, block)
    return padded.amin(1), padded.amax(1)
