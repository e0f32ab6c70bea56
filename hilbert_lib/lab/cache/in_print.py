"""Neighbours that published windows along a curve keep of the windows they stand for, counted: notebook 12."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.cache.neighbourhood import BLOCK
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.blocks import touched_blocks
from hilbert_lib.patterns.neighbourhood import Axis, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern

Rule = Callable[[Tensor, Tensor], Tensor]  # of the places of queries and keys that broadcast: whether they attend
CENTRE = 4  # the centre that all tokens see has a fourth of the picture's side: 16 of 64 cells, 32 of 128
QUERIES_AT_ONCE = 256

# Grids and windows for which 2511.05832's notebook has its cells, "window" for squares that do not overlap.
WINDOWS = [("window", (128, 128), 16), ("window", (64, 64), 8), ("window", (56, 56), 7)]
WINDOWS += [("slide", (56, 56), 7), ("slide", (96, 96), 11), ("slide", (96, 96), 17)]
# Grids, tokens of text and tiles of 2509.26538's repository.
TILES = [((64, 64), 512, 4), ((64, 64), 512, 16), ((128, 128), 512, 4), ((128, 128), 512, 16)]
# Grids, windows and strides that 2502.04507 and NATTEN's profiler pages give.
STRIDES = [((30, 48, 80), (18, 24, 24), (6, 8, 8)), ((30, 48, 80), (18, 24, 24), (16, 8, 8))]
STRIDES += [((256, 256), (80, 80), (16, 16))]


@dataclass(frozen=True, eq=False)
class AlongOrder(Pattern):
    """Each token sees those that a rule of two places along an order names."""

    kind: ClassVar[str] = "along_order"

    places: Tensor  # (n,) integers: the place of each token
    rule: Rule

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of positions (...) int64 that broadcast."""
        places = self.places.to(query.device)
        return self.rule(places[query], places[key])


def chunks_of(size: int) -> Rule:
    """Places see those of their own chunk of `size`.

    >>> chunks_of(2)(torch.tensor(1), torch.arange(4)).tolist()
    [True, True, False, False]
    """
    return lambda own, other: own // size == other // size


def reach_of(keys: int) -> Rule:
    """Places see the `keys` places around them, an odd number; fewer at the ends.

    >>> reach_of(3)(torch.tensor(1), torch.arange(4)).tolist()
    [True, True, True, False]
    """
    return lambda own, other: (own - other).abs() <= keys // 2


def tiles_beside(shared: int, size: int) -> Rule:
    """The first `shared` places see all and are seen by all; the others see their own tile of `size` besides.

    >>> tiles_beside(1, 2)(torch.arange(5)[:, None], torch.arange(5)).sum(1).tolist()
    [5, 3, 3, 3, 3]
    """

    def attends(own: Tensor, other: Tensor) -> Tensor:
        is_shared = (own < shared) | (other < shared)
        return is_shared | ((own - shared) // size == (other - shared) // size)

    return attends


@dataclass(frozen=True)
class Tiles:
    """Tokens of a text and of a picture, which attend in tiles along the Hilbert curve (2509.26538).

    Text, and the square in the picture's centre, see all and are seen by all. The rest of the picture is cut into
    `tiles` equal runs along the curve. Position p is text first, then the picture row by row.

    ValueError: where the tiles do not divide what is left of the picture.
    """

    shape: tuple[int, int]
    text: int
    tiles: int

    def __post_init__(self) -> None:
        if self.local % self.tiles:
            raise ValueError(f"tiles must divide the {self.local} cells outside of the centre, got {self.tiles}")

    @property
    def length(self) -> int:
        """Tokens of text and picture."""
        return self.text + prod(self.shape)

    @property
    def shared(self) -> int:
        """Tokens that all see."""
        return self.text + prod(side // CENTRE for side in self.shape)

    @property
    def local(self) -> int:
        """Cells in tiles."""
        return prod(self.shape) - prod(side // CENTRE for side in self.shape)

    @property
    def size(self) -> int:
        """Cells of a tile."""
        return self.local // self.tiles

    @property
    def order(self) -> Tensor:
        """The position at each place: text, the centre, then the other cells along the curve."""
        cells = Ordering.from_curve("hilbert", prod(self.shape), grid=self.shape).perm
        first = [side // 2 - side // CENTRE // 2 for side in self.shape]
        lines = zip(torch.unravel_index(cells, self.shape), first, self.shape, strict=True)
        in_centre = torch.stack([(line >= low) & (line < low + side // CENTRE) for line, low, side in lines]).all(0)
        return torch.cat([torch.arange(self.text), self.text + torch.cat([cells[in_centre], cells[~in_centre]])])

    @property
    def pattern(self) -> AlongOrder:
        """The pairs that attend, by positions."""
        return AlongOrder(inverse_of(self.order), tiles_beside(self.shared, self.size))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attend."""
        return self.shared * self.length + self.local * (self.shared + self.size)

    @property
    def window(self) -> int:
        """The side of the largest odd window, beside the text, with at most as many pairs."""
        cells = prod(self.shape)
        of_windows = self.pairs - self.text * self.length - cells * self.text
        side = min(isqrt(of_windows // cells), *self.shape)
        return side - 1 + side % 2


def inverse_of(order: Tensor) -> Tensor:
    """The place of each row in an order."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def squares(shape: Sequence[int], side: int) -> Neighbourhood:
    """Windows that do not overlap: each cell sees its own square of cells, as in Swin's window attention.

    >>> squares((4, 4), 2).keys(0).tolist()
    [0, 1, 4, 5]
    """
    return Neighbourhood(tuple(shape), side, stride=side)


def along_curve(attention: str, shape: Sequence[int], window: int, curve: str = "hilbert") -> AlongOrder:
    """The stand-in for a window of window x window cells in 2511.05832: as many places along a curve.

    attention: "window" for chunks that do not overlap, "slide" for the places around each.
    """
    places = Ordering.from_curve(curve, prod(shape), grid=tuple(shape)).inverse
    rule = chunks_of(window**2) if attention == "window" else reach_of(window**2)
    return AlongOrder(places, rule)


def stood_for(attention: str, shape: Sequence[int], window: int) -> Neighbourhood:
    """The windows that `along_curve` stands for."""
    return squares(shape, window) if attention == "window" else Neighbourhood(tuple(shape), window, edge="clip")


def neighbours_found(near: Neighbourhood, pattern: Pattern, first: int = 0) -> float:
    """The share of the pairs of a neighbourhood that a pattern keeps, each counted.

    first: the position of the first cell among the pattern's tokens.

    >>> neighbours_found(squares((4, 4), 2), along_curve("window", (4, 4), 2))
    1.0
    """
    cells = torch.arange(near.length)
    found = total = 0
    for queries in cells.split(QUERIES_AT_ONCE):
        by_axis = [
            axis.start(line)[:, None] + torch.arange(axis.window)
            for axis, line in zip(near.axes, torch.unravel_index(queries, near.shape), strict=True)
        ]
        keys = torch.zeros(len(queries), 1, dtype=torch.int64)
        is_cell = torch.ones(len(queries), 1, dtype=torch.bool)
        for lines, side in zip(by_axis, near.shape, strict=True):
            keys = (keys[:, :, None] * side + lines.clamp(0, side - 1)[:, None]).flatten(1)
            is_cell = (is_cell[:, :, None] & ((lines >= 0) & (lines < side))[:, None]).flatten(1)
        attends = pattern.attends(first + queries[:, None], first + keys)
        found += int((attends & is_cell).sum())
        total += int(is_cell.sum())
    return found / total


def cells_kept(near: Neighbourhood, pattern: Pattern, cell: tuple[int, int], first: int = 0) -> pd.DataFrame:
    """Every cell of a grid as one query has it: row, col, is_query, and part.

    part: "kept" is in the query's window and seen through the pattern, "lost" in the window alone, "away" seen alone,
    "other" neither. first: as of `neighbours_found`.

    >>> cells_kept(squares((2, 2), 2), along_curve("window", (2, 2), 1), (0, 1)).part.tolist()
    ['lost', 'kept', 'lost', 'lost']
    """
    query, keys = cell[0] * near.shape[1] + cell[1], torch.arange(near.length)
    in_window, seen = (
        near.attends(torch.tensor(query), keys),
        pattern.attends(first + torch.tensor(query), first + keys),
    )
    parts = {(True, True): "kept", (True, False): "lost", (False, True): "away", (False, False): "other"}
    row, col = torch.unravel_index(keys, near.shape)
    table = pd.DataFrame({"row": row.numpy(), "col": col.numpy(), "is_query": keys.numpy() == query})
    return table.assign(part=[parts[pair] for pair in zip(in_window.tolist(), seen.tolist(), strict=True)])


def pictured() -> list[tuple[str, Neighbourhood, AlongOrder, tuple[int, int], int]]:
    """Pictures of the notebook: a name, the windows, their stand-in, a cell, and tokens before the first cell."""
    tiles = Tiles((64, 64), 512, 16)
    works = [("window", (56, 56), 7, (24, 31)), ("slide", (56, 56), 7, (27, 30))]
    drawn = [
        (
            f"P1, {attention} {window} x {window}",
            stood_for(attention, shape, window),
            along_curve(attention, shape, window),
            cell,
            0,
        )
        for attention, shape, window, cell in works
    ]
    window = Neighbourhood(tiles.shape, tiles.window)
    return [*drawn, (f"P2, {tiles.tiles} tiles, text and centre", window, tiles.pattern, (17, 36), tiles.text)]


def stride_found(near: Neighbourhood) -> float:
    """The share of the neighbours of windows around each cell that windows with a stride keep.

    >>> stride_found(Neighbourhood((4,), 2, stride=2))
    0.875
    """
    return prod(_found_on(axis) for axis in near.axes)


def _found_on(axis: Axis) -> float:
    line = torch.arange(axis.cells)
    around = Axis(axis.cells, axis.window, axis.dilation, 1, axis.is_causal, axis.edge)
    own, shared = (each.attends(line[:, None], line) for each in (around, axis))
    return float((own & shared).sum() / own.sum())


def blocks_used(pattern: Neighbourhood, ordering: Ordering) -> tuple[int, float]:
    """Blocks of 128 x 128 that FlexAttention computes, and the share of their pairs that attend."""
    touched = int(touched_blocks(pattern, ordering, q_block=BLOCK, kv_block=BLOCK).sum())
    return touched, pattern.pairs / (touched * BLOCK**2)


def count_windows(works: Sequence[tuple[str, tuple[int, int], int]] = WINDOWS) -> pd.DataFrame:
    """P1: attention, grid, window, keys, and found: the share of the windows' neighbours along the Hilbert curve.

    Of exact windows in FlexAttention's blocks of 128 x 128, row by row and along the curve: the share of blocks that
    are empty (empty_raster, empty_hilbert) and of the others' pairs that attend (raster, hilbert).
    """
    rows = []
    for attention, shape, window in works:
        near = stood_for(attention, shape, window)
        row = {"attention": attention, "grid": of_grid(shape), "window": window, "keys": window**2}
        row["found"] = neighbours_found(near, along_curve(attention, shape, window))
        for curve in ("raster", "hilbert"):
            touched, used = blocks_used(near, Ordering.from_curve(curve, near.length, grid=shape))
            row |= {f"empty_{curve}": 1 - touched / (-(-near.length // BLOCK)) ** 2, curve: used}
        rows.append(row)
    return pd.DataFrame(rows)


def count_tiles(works: Sequence[tuple[tuple[int, int], int, int]] = TILES) -> pd.DataFrame:
    """P2: grid, text, tiles, cells of a tile; promised (dense pairs over those of tiles), the window of as many pairs,
    and the share of its neighbours that tiles keep.
    """
    rows = []
    for shape, text, count in works:
        tiles = Tiles(shape, text, count)
        near = Neighbourhood(shape, tiles.window)
        row = {"grid": of_grid(shape), "text": text, "tiles": count, "cells of a tile": tiles.size}
        row |= {"promised": tiles.length**2 / tiles.pairs, "window": tiles.window}
        rows.append(row | {"found": neighbours_found(near, tiles.pattern, first=text)})
    return pd.DataFrame(rows)


def count_orders(
    shape: tuple[int, int], *, windows: Sequence[int], orders: Sequence[str] = ("raster", "morton", "hilbert")
) -> pd.DataFrame:
    """P4: blocks of 128 x 128 that windows touch with cells stored in each order: window, order, touched, used."""
    rows = []
    for window in windows:
        near = Neighbourhood(shape, window)
        for name in orders:
            touched, used = blocks_used(near, Ordering.from_curve(name, near.length, grid=shape))
            rows.append({"window": window, "order": name, "touched": touched, "used": used})
    return pd.DataFrame(rows)


def count_strides(works: Sequence[tuple[tuple[int, ...], ...]] = STRIDES) -> pd.DataFrame:
    """P5, P6: grid, window, stride; promised (dense pairs over those of windows), and the share of the neighbours
    around each cell that windows with the stride keep.
    """
    rows = []
    for shape, window, stride in works:
        near = Neighbourhood(shape, window, stride=stride)
        row = {"grid": of_grid(shape), "window": of_grid(near.window), "stride": of_grid(stride)}
        rows.append(row | {"promised": near.length**2 / near.pairs, "found": stride_found(near)})
    return pd.DataFrame(rows)


def of_grid(sides: Sequence[int]) -> str:
    """Sides as they are written in works.

    >>> of_grid((30, 48, 80))
    '30x48x80'
    """
    return "x".join(map(str, sides))
