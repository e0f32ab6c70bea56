"""The Hilbert curve as Triton kernels: its cells in order, and the place of any cell, bit-equal to `curves`.

A grid has millions of cells and few kinds of blocks: on one level of the curve a side takes two or three lengths. So
`curves.children` is asked once for each kind, which makes a table small enough for the first-level cache, and the
kernels walk down that table. Blocks of at most LEAF_CELLS cells are leaves: their cells are listed, and one read
replaces the last levels of the walk.

Decoding writes 8 bytes a coordinate and should be bound by that, so few instructions may go into a cell. A program
takes one leaf: it walks once, on scalars, and a cell then costs one read of the list, one multiply-add an axis and the
unpacking. Encoding takes cells in any order, so every lane walks by itself. A level costs it some reads of 16 bytes and
a comparison, a selection and an addition an axis, so that the number of levels binds.

Inside the kernels a cell is one number, its coordinates side by side in as many bits as the sides need. A step along an
axis of a block is one number too, a signed power of two, so that a block that lies turned or mirrored is no case apart.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.curves import block_cells, children, raster_index, split, whole_block

LEAF_CELLS = 1024  # at most: a coordinate inside of a leaf has 10 bits
# A compilation for every divisor of these would be one for most grids.
NOT_SPECIALIZED = ["count", "turn", "depth", "shift_0", "shift_1", "side_0", "side_1", "side_2"]


class Rules(NamedTuple):
    """How one grid falls into blocks and leaves.

    A turn is 7 bits: three that say which of a child's own axes run backwards, and twice two bits for the parent's axes
    that its a and b are. A leaf is its own only child, so that a walk may be longer than its path.

    Attributes:
        nodes: (blocks, 8): cuts on a, on b in the first and in the second half of a, on c; of a leaf also its sides b
            and c, its start in the lists and its cells. Block 0 is the grid.
        rows: (blocks, 8, 8): a child each, at 4, 2 and 1 times its halves of a, c and b: 128 times its block plus its
            turn, the cells before it, and what its own coordinates a, b and c have more than the turned ones.
        before: (blocks, 8): leaves before each child in the order of the curve: the Gray code of the halves of a, c, b.
        cells: the cells of the leaves in order, 10 bits for each of a, b and c.
        places: the place of each cell of a leaf, in raster order.
        turn: of the grid as a block. depth: levels. leaves: how many the grid has.
        shifts: bits to the right of coordinates 0 and 1.
    """

    nodes: Tensor
    rows: Tensor
    before: Tensor
    cells: Tensor
    places: Tensor
    turn: int
    depth: int
    leaves: int
    shifts: tuple[int, int]


def coordinates(sides: tuple[int, ...], device: torch.device) -> Tensor:
    """As `curves.curve_coordinates` for the Hilbert curve: (cells, ndim) int64."""
    out = torch.empty(prod(sides), len(sides), dtype=torch.int64, device=device)
    rules = _rules(sides, LEAF_CELLS, out.device)
    with torch.cuda.device_of(out):
        decode_kernel[(rules.leaves,)](
            *(out, rules.nodes, rules.rows, rules.before, rules.cells),
            *(rules.turn, rules.depth, *rules.shifts),
            NDIM=len(sides),
            STEP=256,
            num_warps=1,
        )
    return out


def index(coordinates: Tensor, sides: tuple[int, ...]) -> tuple[Tensor, bool]:
    """The place of each cell along the Hilbert curve, and whether all cells lie inside of the grid.

    Args:
        coordinates: (..., ndim) int64.
        sides: of the grid.

    Returns:
        (...) int64, without meaning for cells outside; and whether there are none of these.
    """
    place = torch.empty(coordinates.shape[:-1], dtype=torch.int64, device=coordinates.device)
    outside = torch.zeros(1, dtype=torch.int32, device=coordinates.device)
    rules = _rules(sides, LEAF_CELLS, coordinates.device)
    block = 256
    if place.numel():
        with torch.cuda.device_of(coordinates):
            encode_kernel[(triton.cdiv(place.numel(), block),)](
                *(place, outside, coordinates.contiguous(), rules.nodes, rules.rows, rules.places),
                *(place.numel(), rules.turn, rules.depth, *(*sides, 1)[:3]),
                NDIM=len(sides),
                BLOCK=block,
            )
    return place, not outside.item()


@lru_cache(maxsize=32)
def _rules(sides: tuple[int, ...], leaf_cells: int, device: torch.device) -> Rules:
    axes, grid = whole_block(sides)
    families = {}
    _collect(grid, leaf_cells, families)
    leaves, depths = {}, {}
    for block, family in families.items():
        leaves[block] = sum(leaves[child.sides] for child in family) or 1
        depths[block] = max((depths[child.sides] + 1 for child in family), default=0)
    widths = [(side - 1).bit_length() for side in sides]
    if sum(widths) > 63:
        raise ValueError(f"shape must have coordinates of at most 63 bits in all, got {sides}")
    dtype = np.int32 if prod(sides) < 2**31 and sum(widths) < 32 else np.int64
    nodes = np.zeros((len(families), 8), dtype)
    rows = np.zeros((len(families), 8, 8), dtype)
    before = np.full((len(families), 8), np.iinfo(dtype).max, dtype)
    numbers = {block: number for number, block in enumerate(reversed(families))}
    cells, places, listed, known = [], [], 0, {}
    for block, family in families.items():
        number, cells_before, leaves_before = numbers[block], 0, 0
        for child in family:
            a, b, c = child.halves
            signs = [child.steps[axis] for axis in child.axes]
            more = [-sign * child.corner[axis] for sign, axis in zip(signs, child.axes, strict=True)]
            code = numbers[child.sides] * 128 + _turn(child.axes, signs)
            rows[number, 4 * a + 2 * c + b, :5] = code, cells_before, *more
            before[number, 4 * a + 2 * (a ^ c) + (a ^ b ^ c)] = leaves_before
            cells_before += prod(child.sides)
            leaves_before += leaves[child.sides]
        if family:
            cut_a, cuts_b, cut_c = split(*block)
            nodes[number, :4] = cut_a, *cuts_b, cut_c
            continue
        m, n, p = block
        nodes[number] = m, n, n, p, n, p, listed, prod(block)  # cut at the far end: all of it is its first half
        rows[number, 0, 0] = number * 128 + _turn((0, 1, 2), (1, 1, 1))
        before[number, 0] = 0
        path = block_cells(block, torch.device("cpu"), known)
        cells.append(path[0] | path[1] << 10 | path[2] << 20)
        places.append(raster_index(path.T, block).argsort())
        listed += prod(block)
    tables = *map(torch.from_numpy, (nodes, rows, before)), torch.cat(cells).int(), torch.cat(places).int()
    return Rules(
        *(table.to(device) for table in tables),
        turn=_turn(axes, (1, 1, 1)),
        depth=depths[grid],
        leaves=leaves[grid],
        shifts=(sum(widths[1:]), sum(widths[2:])),
    )


def _collect(block: tuple[int, int, int], leaf_cells: int, families: dict) -> None:
    """Add the distinct blocks that a block falls into, then itself, each with its children; a leaf has none."""
    if block not in families:
        family = list(children(block)) if prod(block) > leaf_cells else []
        for child in family:
            _collect(child.sides, leaf_cells, families)
        families[block] = family


def _turn(axes: Sequence[int], signs: Sequence[int]) -> int:
    backwards = sum((sign < 0) << n for n, sign in enumerate(signs))
    return backwards | axes[0] << 3 | axes[1] << 5


@triton.jit
def turned(turn, a, b, c, NDIM: tl.constexpr):
    """Steps or coordinates along the axes of a child, from those along the axes of its parent."""
    if NDIM == 2:
        swap = (turn & 8) != 0
        first, second, third = tl.where(swap, b, a), tl.where(swap, a, b), c
    else:
        axis_a, axis_b = turn >> 3 & 3, turn >> 5 & 3
        first = tl.where(axis_a == 0, a, tl.where(axis_a == 1, b, c))
        second = tl.where(axis_b == 0, a, tl.where(axis_b == 1, b, c))
        third = a + b + c - first - second
        third = tl.where((turn & 4) != 0, -third, third)
    return tl.where((turn & 1) != 0, -first, first), tl.where((turn & 2) != 0, -second, second), third


@triton.jit
def four(pointers):
    """Four numbers that stand side by side, by one read: shaped as pointers, each."""
    numbers = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :])  # [BLOCK, 4]
    even, odd = tl.split(numbers.reshape(numbers.shape[0], 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(
    out, nodes, rows, before, cells, turn, depth, shift_0, shift_1, NDIM: tl.constexpr, STEP: tl.constexpr
):
    """The cells of one leaf, whose number is the program's."""
    dtype: tl.constexpr = nodes.dtype.element_ty
    AXES: tl.constexpr = 2 if NDIM == 2 else 4
    one = tl.full((), 1, dtype)
    a, b, c = turned(turn, one << shift_0, one << shift_1, one, NDIM)
    leaf = tl.program_id(0).to(dtype)
    node, place, corner = one * 0, one * 0, one * 0
    for _ in range(depth):
        leaves = tl.load(before + node * 8 + tl.arange(0, 8))
        rank = tl.max(tl.where(leaves <= leaf, tl.arange(0, 8), 0))
        leaf -= tl.load(before + node * 8 + rank)
        row = rows + (node * 8 + (rank ^ rank >> 1)) * 8
        code = tl.load(row)
        a, b, c = turned(code, a, b, c, NDIM)
        place += tl.load(row + 1)
        corner -= a * tl.load(row + 2) + b * tl.load(row + 3)
        if NDIM == 3:
            corner -= c * tl.load(row + 4)
        node = code >> 7
    listed = tl.load(nodes + node * 8 + 6)
    count = tl.load(nodes + node * 8 + 7)
    out += place.to(tl.int64) * NDIM
    axis = tl.arange(0, AXES)[None, :]
    low = tl.where(axis == 0, shift_0, tl.where(axis == 1, shift_1, 0)).to(dtype)
    high = tl.where(axis == 0, dtype.primitive_bitwidth - 1, tl.where(axis == 1, shift_0, shift_1)).to(dtype)
    bits = (one << high - low) - 1
    for start in range(0, count, STEP):
        number = start + tl.arange(0, STEP)[:, None]
        packed = tl.load(cells + listed + number, mask=number < count, other=0)  # [STEP, 1]
        cell = corner + (packed & 1023) * a + (packed >> 10 & 1023) * b
        if NDIM == 3:
            cell += (packed >> 20) * c
        valid = number < count
        if NDIM == 3:
            valid = valid & (axis < NDIM)
        tl.store(out + number * NDIM + axis, (cell >> low & bits).to(tl.int64), mask=valid)  # [STEP, AXES]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def encode_kernel(
    out,
    outside,
    coordinates,
    nodes,
    rows,
    places,
    count,
    turn,
    depth,
    side_0,
    side_1,
    side_2,
    NDIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places of BLOCK cells."""
    dtype: tl.constexpr = nodes.dtype.element_ty
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = number < count
    x = tl.load(coordinates + number * NDIM, mask=valid, other=0)
    y = tl.load(coordinates + number * NDIM + 1, mask=valid, other=0)
    z = tl.zeros_like(x)
    if NDIM == 3:
        z = tl.load(coordinates + number * NDIM + 2, mask=valid, other=0)
    is_outside = (x < 0) | (x >= side_0) | (y < 0) | (y >= side_1) | (z < 0) | (z >= side_2)
    tl.store(outside + tl.zeros_like(x), 1, mask=is_outside)
    inside = ~is_outside
    x, y, z = tl.where(inside, x, 0).to(dtype), tl.where(inside, y, 0).to(dtype), tl.where(inside, z, 0).to(dtype)
    a, b, c = turned(turn, x, y, z, NDIM)
    node, place = tl.zeros_like(a), tl.zeros_like(a)
    for _ in range(depth):
        cut_a, cut_b, cut_b_beyond, cut_c = four(nodes + node * 8)
        half_a = a >= cut_a
        half_b = b >= tl.where(half_a, cut_b_beyond, cut_b)
        child = node * 8 + half_a * 4 + half_b
        if NDIM == 3:
            child += (c >= cut_c) * 2
        code, earlier, more_a, more_b = four(rows + child * 8)
        a, b, c = turned(code, a, b, c, NDIM)
        a, b, place = a + more_a, b + more_b, place + earlier
        if NDIM == 3:
            more_c, _, _, _ = four(rows + child * 8 + 4)
            c += more_c
        node = code >> 7
    side_b, side_c, listed, _ = four(nodes + node * 8 + 4)
    place += tl.load(places + listed + (a * side_b + b) * side_c + c)
    tl.store(out + number, place.to(tl.int64), mask=valid)
