"""Which keys a cell of a grid attends to in neighbourhood attention, and which blocks of the mask that fills.

All of it is exact and free of tables of length squared: the blocks of a mask come from sets of key blocks, kept as bits
of a word for each cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hilbert_lib.checks import integer
from hilbert_lib.curves.coordinates import checked_shape
from hilbert_lib.ordering import Ordering

WORD_BITS = 64


@dataclass(frozen=True)
class Neighbourhood:
    """Each cell of a grid attends to window x window cells around it; position p is cell p in raster order.

    At the border the window is moved inside, so that every query has window**2 keys: along an axis of so many cells
    the window of cell x begins at min(max(x - window // 2, 0), cells - window). At the border the relation is
    therefore not symmetric. This is neighbourhood attention as in Hassani et al., "Neighborhood Attention
    Transformer" (arXiv 2204.07143).

    Args:
        shape: rows and columns of the grid.
        window: cells along each side of the window, from 1 to the shorter side of the grid.

    Raises:
        ValueError: if shape has not 2 positive sides, or window is out of range.
        TypeError: if one of them is no integer.

    >>> Neighbourhood((3, 4), 2).keys(0).tolist()
    [0, 1, 4, 5]
    """

    shape: tuple[int, int]
    window: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        if len(self.shape) != 2:
            raise ValueError(f"shape must have 2 sides, got {self.shape}")
        object.__setattr__(self, "window", integer("window", self.window, least=1, most=min(self.shape)))

    @property
    def length(self) -> int:
        """Cells of the grid."""
        return self.shape[0] * self.shape[1]

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attend."""
        return self.length * self.window**2

    def first(self, coordinates: Tensor) -> Tensor:
        """The first row and column of the window of each cell: (..., 2) int64 of (..., 2) int64."""
        axes = zip(coordinates.unbind(-1), self.shape, strict=True)
        return torch.stack([_window_start(x, side, self.window) for x, side in axes], dim=-1)

    def coordinates(self, positions: Tensor) -> Tensor:
        """Row and column of each position: (..., 2) int64 of (...) int64."""
        return torch.stack(torch.unravel_index(positions, self.shape), dim=-1)

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of positions (...) int64 that broadcast.

        >>> Neighbourhood((1, 4), 1).attends(torch.arange(2)[:, None], torch.arange(3)).tolist()
        [[True, False, False], [False, True, False]]
        """
        ahead = self.coordinates(key) - self.first(self.coordinates(query))
        return ((ahead >= 0) & (ahead < self.window)).all(dim=-1)

    def keys(self, position: int) -> Tensor:
        """The positions that a query attends to: (window**2,) int64, ascending.

        Like `queries` it raises TypeError or ValueError if the position is no integer or not on the grid.
        """
        row, col = self.first(self._cell(position)).tolist()
        return self._rectangle(range(row, row + self.window), range(col, col + self.window))

    def queries(self, position: int) -> Tensor:
        """The positions that attend to a key: (n,) int64, ascending.

        >>> Neighbourhood((2, 4), 2).queries(0).tolist()
        [0, 1, 4, 5]
        """
        lines = []
        for own, side in zip(self._cell(position).tolist(), self.shape, strict=True):
            start = _window_start(torch.arange(side, device="cpu"), side, self.window)
            lines.append(((start <= own) & (own < start + self.window)).nonzero()[:, 0])
        return self._rectangle(*lines)

    def _cell(self, position: int) -> Tensor:
        # `coordinates` does not refuse a position off the grid.
        position = integer("position", position, least=0, most=self.length - 1)
        return self.coordinates(torch.tensor(position, device="cpu"))

    def _rectangle(self, rows: Sequence[int] | Tensor, cols: Sequence[int] | Tensor) -> Tensor:
        rows, cols = (torch.as_tensor(line, dtype=torch.int64, device="cpu") for line in (rows, cols))
        return (rows[:, None] * self.shape[1] + cols).flatten()


class Blocks(NamedTuple):
    """Blocks of an attention mask: (query blocks, key blocks) bool each."""

    partial: Tensor  # some pairs of the block attend, or all of a block that the sequence does not fill
    full: Tensor  # all do


def mask_blocks(neighbourhood: Neighbourhood, ordering: Ordering, *, q_block: int, kv_block: int) -> Blocks:
    """Which blocks of q_block by kv_block slots hold pairs that attend, when the cells are stored in an ordering?

    The blocks are on the CPU; one that is neither partial nor full is empty.

    >>> row = Neighbourhood((1, 4), 1)
    >>> mask_blocks(row, Ordering.linear(4), q_block=2, kv_block=2).partial.int().tolist()
    [[1, 0], [0, 1]]
    """
    check_length(neighbourhood, ordering)
    sizes = [integer(name, size, least=1) for name, size in (("q_block", q_block), ("kv_block", kv_block))]
    length, (q_size, kv_size) = neighbourhood.length, sizes
    q_blocks, kv_blocks = (-(-length // size) for size in sizes)
    perm = ordering.perm.numpy(force=True)
    row, col = np.divmod(perm, neighbourhood.shape[1])
    q_block_of = (ordering.inverse.numpy(force=True) // q_size).reshape(neighbourhood.shape)
    words = np.zeros((-(-kv_blocks // WORD_BITS), q_blocks), dtype=np.uint64)
    for number, word in enumerate(words):
        slots = np.arange(number * WORD_BITS * kv_size, min(length, (number + 1) * WORD_BITS * kv_size))
        rows, cols = (
            _reach(cells, side, neighbourhood.window)
            for cells, side in zip((row[slots], col[slots]), neighbourhood.shape, strict=True)
        )
        bits = np.zeros((rows.stop - rows.start, cols.stop - cols.start), dtype=np.uint64)
        bit = np.uint64(1) << (slots // kv_size % WORD_BITS).astype(np.uint64)
        bits[row[slots] - rows.start, col[slots] - cols.start] = bit
        for axis in (0, 1):
            bits = _union_over_window(bits, neighbourhood.window, axis)
        np.bitwise_or.at(word, q_block_of[rows, cols].ravel(), bits.ravel())
    words = np.ascontiguousarray(words.T)
    touched = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=kv_blocks, bitorder="little")
    touched = torch.from_numpy(touched).bool()
    full = _full_blocks(neighbourhood, ordering, q_size, kv_size)
    return Blocks(touched & ~full, full)


def _window_start(x: Tensor, side: int, window: int) -> Tensor:
    return (x - window // 2).clamp(0, side - window)


def check_length(neighbourhood: Neighbourhood, ordering: Ordering) -> None:
    """Raise ValueError unless the ordering has the length of the grid."""
    if ordering.length != neighbourhood.length:
        raise ValueError(f"ordering must have the length of the grid {neighbourhood.shape}, got {ordering!r}")


def _reach(cells: np.ndarray, side: int, window: int) -> slice:
    # Along one axis, more than all queries that see some of these cells: windows at a cut end see none of them, so that
    # it does not matter that they are moved inside there, as at a border.
    return slice(max(0, int(cells.min()) - 2 * window), min(side, int(cells.max()) + 2 * window + 1))


def _union_over_window(bits: np.ndarray, window: int, axis: int) -> np.ndarray:
    # For each cell the union over its window along one axis; widths double, and the last step overlaps.
    bits = np.moveaxis(bits, axis, 0)
    side, width = len(bits), 1
    while width < window:
        step = min(width, window - width)
        bits = bits[:-step] | bits[step:]
        width += step
    return np.moveaxis(bits[_window_start(torch.arange(side, device="cpu"), side, window).numpy()], 0, axis)


def _full_blocks(neighbourhood: Neighbourhood, ordering: Ordering, q_block: int, kv_block: int) -> Tensor:
    # The windows of a query block have a rectangle in common, and a block of keys is full that lies inside of it.
    cells = neighbourhood.coordinates(ordering.perm.cpu())
    low_q, high_q = _boxes(cells, q_block)
    low_kv, high_kv = _boxes(cells, kv_block)
    begin, end = neighbourhood.first(high_q), neighbourhood.first(low_q) + neighbourhood.window
    # Axis by axis: a reduction over the two would cost more than all else here.
    above, left = (begin[:, axis, None] <= low_kv[:, axis] for axis in (0, 1))
    below, right = (high_kv[:, axis] < end[:, axis, None] for axis in (0, 1))
    whole_q, whole_kv = (
        torch.arange(len(low), device="cpu") < len(cells) // size
        for low, size in ((low_q, q_block), (low_kv, kv_block))
    )
    return above & below & left & right & whole_q[:, None] & whole_kv


def _boxes(cells: Tensor, block: int) -> tuple[Tensor, Tensor]:
    # The least and the largest row and column of each block: (blocks, 2) each.
    index = (torch.arange(len(cells), device=cells.device) // block)[:, None].expand(-1, 2)
    empty = cells.new_zeros(-(-len(cells) // block), 2)
    return tuple(empty.scatter_reduce(0, index, cells, how, include_self=False) for how in ("amin", "amax"))
