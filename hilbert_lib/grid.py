"""Which keys a cell of a grid attends to in neighbourhood attention, and what an ordering of the cells makes of it.

Everything here is exact and free of tables of length squared: the blocks of a mask come from sets of key blocks, kept
as bits of a word for each cell, and the rows that ranks exchange from running sums over the grid.
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

        Raises TypeError or ValueError, as `queries` does, where the position is no integer or not on the grid.
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
        # `coordinates` takes a position off the grid without a word.
        position = integer("position", position, least=0, most=self.length - 1)
        return self.coordinates(torch.tensor(position, device="cpu"))

    def _rectangle(self, rows: Sequence[int] | Tensor, cols: Sequence[int] | Tensor) -> Tensor:
        rows, cols = (torch.as_tensor(line, dtype=torch.int64, device="cpu") for line in (rows, cols))
        return (rows[:, None] * self.shape[1] + cols).flatten()


class Blocks(NamedTuple):
    """Blocks of an attention mask: (query blocks, key blocks) bool each.

    Attributes:
        partial: some pairs of the block attend, or all of a block that the sequence does not fill.
        full: all do.
    """

    partial: Tensor
    full: Tensor


def mask_blocks(neighbourhood: Neighbourhood, ordering: Ordering, *, q_block: int, kv_block: int) -> Blocks:
    """Which blocks of the mask hold pairs that attend, when the cells are stored in an ordering?

    Args:
        neighbourhood: which keys a query attends to.
        ordering: of the cells.
        q_block, kv_block: rows and columns of a block, in slots.

    Returns:
        The blocks, on the CPU; one that is neither partial nor full is empty.

    Raises:
        ValueError: if the ordering has not the length of the grid, or a block is empty.

    >>> row = Neighbourhood((1, 4), 1)
    >>> mask_blocks(row, Ordering.linear(4), q_block=2, kv_block=2).partial.int().tolist()
    [[1, 0], [0, 1]]
    """
    _check_length(neighbourhood, ordering)
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


def block_pairs(neighbourhood: Neighbourhood, ordering: Ordering, *, q_block: int, kv_block: int) -> Tensor:
    """How many pairs attend in each block: (query blocks, key blocks) int64; pair by pair, for small grids.

    Args:
        neighbourhood, ordering, q_block, kv_block: as in `mask_blocks`.

    Raises:
        ValueError: if the ordering has not the length of the grid.

    >>> block_pairs(Neighbourhood((2, 2), 2), Ordering.linear(4), q_block=2, kv_block=4).tolist()
    [[8], [8]]
    """
    _check_length(neighbourhood, ordering)
    cells = neighbourhood.coordinates(ordering.perm.cpu())
    first = neighbourhood.first(cells) @ torch.tensor([neighbourhood.shape[1], 1], device="cpu")
    keys = first[:, None] + (neighbourhood.keys(0))
    blocks = [-(-neighbourhood.length // size) for size in (q_block, kv_block)]
    q = torch.arange(neighbourhood.length, device="cpu")[:, None] // q_block
    kv = ordering.inverse.cpu()[keys] // kv_block
    return (q * blocks[1] + kv).flatten().bincount(minlength=blocks[0] * blocks[1]).view(blocks)


def rows_exchanged(neighbourhood: Neighbourhood, ordering: Ordering, ranks: int) -> Tensor:
    """Key rows that ranks need from each other when each holds a run of consecutive slots.

    Args:
        neighbourhood: which keys a query attends to.
        ordering: of the cells; the runs are as long as `torch.tensor_split` makes them.
        ranks: how many, from 1 to the number of cells.

    Returns:
        (ranks, ranks) int64: in row i, column j the rows of j's that i's queries attend to; 0 on the diagonal.

    Raises:
        ValueError: if the ordering has not the length of the grid, or ranks is out of range.

    >>> rows_exchanged(Neighbourhood((1, 6), 1), Ordering.linear(6), 2).tolist()
    [[0, 0], [0, 0]]
    """
    _check_length(neighbourhood, ordering)
    ranks = integer("ranks", ranks, least=1, most=neighbourhood.length)
    runs = ordering.perm.cpu().tensor_split(ranks)
    owner = torch.empty(neighbourhood.length, dtype=torch.int64, device="cpu")
    for rank, run in enumerate(runs):
        owner[run] = rank
    rows = torch.stack([owner[_seen(neighbourhood, run)].bincount(minlength=ranks) for run in runs])
    return rows.fill_diagonal_(0)


def _window_start(x: Tensor, side: int, window: int) -> Tensor:
    return (x - window // 2).clamp(0, side - window)


def _check_length(neighbourhood: Neighbourhood, ordering: Ordering) -> None:
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


def _seen(neighbourhood: Neighbourhood, positions: Tensor) -> Tensor:
    # The positions that some of these queries attend to: each window adds 1 at its corners, and sums run over the grid.
    rows, cols = neighbourhood.shape
    corners = torch.zeros(rows + 1, cols + 1, dtype=torch.int32, device=positions.device)
    row, col = neighbourhood.first(neighbourhood.coordinates(positions)).unbind(-1)
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = (row + down * neighbourhood.window, col + right * neighbourhood.window)
        corners.index_put_(at, corners.new_tensor(1 if down == right else -1), accumulate=True)
    covered = corners.cumsum(0).cumsum(1)[:rows, :cols]
    return covered.flatten().nonzero()[:, 0]
