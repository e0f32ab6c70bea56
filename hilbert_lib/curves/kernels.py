"""The Hilbert curve as Triton kernels: its cells in order, and the place of any cell, bit-equal to `curves.hilbert`.

A grid has millions of cells and few kinds of blocks: on one level of the curve a side takes two or three lengths, and a
block lies in one of a few ways. Each way in which a kind of block lies is a state, and the kernels walk a table of
states that fits into the caches. Blocks of at most LEAF_CELLS cells are leaves: their cells are listed, and one read
replaces the last levels of the walk.

Decoding writes 8 bytes a coordinate and should be bound by that. A program takes one leaf: it walks once, on scalars;
a cell then costs one read of the list, one multiply-add an axis and the unpacking. Encoding takes cells in any order,
but neighbours in memory are mostly neighbours in the grid: the two ends of the box around a program's cells walk first,
on scalars, and every lane walks by itself only from where they part.

Inside the kernels a cell is one number: its coordinates side by side, the first in the highest bits. So is the corner
of a block, and one subtraction makes a cell relative to it. A step along an axis of a leaf is a signed power of two.
"""

from math import prod
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.curves.hilbert import Child, block_cells, children, raster_index, whole_block
from hilbert_lib.graph_cache import cached_for_graphs

LEAF_CELLS = 1024  # at most: a coordinate inside of a leaf has 10 bits
# A compilation for every divisor of these would be one for most grids.
NOT_SPECIALIZED = ["count", "depth", "first_cut", "shift_0", "shift_1", "side_0", "side_1", "side_2"]

Block = tuple[int, int, int]  # sides along its own axes


class State(NamedTuple):
    """A block as it lies in the grid: sides along its own axes, which axes of the grid these are, and their signs."""

    sides: Block
    axes: tuple[int, int, int]
    signs: tuple[int, int, int]


class Rules(NamedTuple):
    """The division of one grid into blocks and leaves, as tables.

    State 0 is the grid. Halves are those of axes 0, 1 and 2 of the grid, as the bits 4, 2 and 1; an axis that is not
    cut has the upper one alone. A leaf is its own only child, so that a walk may be longer than its path.
    """

    # (states, 8, 4), for the child in each half: its state, the cells before it, its lowest corner, and where it is cut
    # itself, packed as a cell is, with 0 on axes that are not cut: 0 as a whole is a leaf.
    rows: Tensor
    before: Tensor  # (states, 8): for each child 8 times the leaves before it, plus its halves
    layouts: Tensor  # (states, 4): for a leaf the index of its lowest corner in `places`, and a step along each axis
    # (states, 8): for a leaf its start in `cells`, its number of cells, where its curve begins, steps along a, b and c.
    lists: Tensor
    cells: Tensor  # the cells of the leaves in order, 10 bits for each of a, b and c
    places: Tensor  # the place of each cell of a leaf, in raster order
    first_cut: int  # where the grid is cut
    depth: int  # levels
    leaves: int  # of the grid
    shifts: tuple[int, int]  # bits to the right of coordinates 0 and 1


def coordinates(sides: tuple[int, ...], device: torch.device) -> Tensor:
    """The cells of the Hilbert curve in its order, (cells, ndim) int64, like `curves.curve_coordinates`."""
    out = torch.empty(prod(sides), len(sides), dtype=torch.int64, device=device)
    rules = _rules(sides, LEAF_CELLS, out.device)
    with torch.cuda.device_of(out):
        decode_kernel[(rules.leaves,)](
            out, rules.rows, rules.before, rules.lists, rules.cells, rules.depth, *rules.shifts,
            NDIM=len(sides), STEP=256, num_warps=1,
        )  # fmt: skip
    return out


def index_unread(coordinates: Tensor, sides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The place of each cell (..., ndim) along the Hilbert curve, int64; and, on the device, 1 if a cell lies outside.

    The host does not wait. If a cell lies outside, the places mean nothing.
    """
    place = torch.empty(coordinates.shape[:-1], dtype=torch.int64, device=coordinates.device)
    outside = torch.zeros(1, dtype=torch.int32, device=coordinates.device)
    rules = _rules(sides, LEAF_CELLS, coordinates.device)
    block = 256
    if place.numel():
        with torch.cuda.device_of(coordinates):
            encode_kernel[(triton.cdiv(place.numel(), block),)](
                place, outside, coordinates.contiguous(), rules.rows, rules.layouts, rules.places,
                place.numel(), rules.first_cut, *rules.shifts, *(*sides, 1)[:3],
                NDIM=len(sides), BLOCK=block, num_warps=1,
            )  # fmt: skip
    return place, outside


@cached_for_graphs(maxsize=32)
def _rules(sides: tuple[int, ...], leaf_cells: int, device: torch.device) -> Rules:
    widths = [(length - 1).bit_length() for length in sides]
    if sum(widths) > 62:  # a step is one bit beyond at most, and then there is the sign
        raise ValueError(f"shape must have coordinates of at most 62 bits in all, got {sides}")
    axes, grid = whole_block(sides)
    numbers, families = _states(State(grid, axes, (1, 1, 1)), leaf_cells)
    leaves, depths, starts = {}, {}, {}
    cells, places, paths = [], [], {}

    def settle(block: Block) -> None:  # children before their parents: some are as large, and only turned
        for child in families[block]:
            if child.sides not in leaves:
                settle(child.sides)
        leaves[block] = sum(leaves[child.sides] for child in families[block]) or 1
        depths[block] = max((depths[child.sides] + 1 for child in families[block]), default=0)
        if not families[block]:
            starts[block] = sum(map(len, cells))
            path = block_cells(block, torch.device("cpu"), paths)
            cells.append(path[0] | path[1] << 10 | path[2] << 20)
            places.append(raster_index(path.T, block).argsort())

    settle(grid)
    dtype = np.int32 if sum(widths) <= 30 else np.int64
    cuts = np.zeros(len(numbers), dtype)
    rows = np.zeros((len(numbers), 8, 4), dtype)
    before = np.full((len(numbers), 8), np.iinfo(dtype).max, dtype)
    layouts = np.zeros((len(numbers), 4), dtype)
    lists = np.zeros((len(numbers), 8), dtype)
    shifts = sum(widths[1:]), sum(widths[2:]), 0
    for state, number in numbers.items():
        block, axes, signs = state
        steps = [1 << shifts[axis] for axis in axes]
        if not families[block]:
            first = [length - 1 if sign < 0 else 0 for length, sign in zip(block, signs, strict=True)]
            strides = block[1] * block[2], block[2], 1
            rows[number, 7, 0], before[number, 7] = number, 7
            layouts[number, 0] = starts[block] + np.dot(first, strides)
            layouts[number, 1 + np.array(axes)] = np.multiply(signs, strides)
            lists[number, :3] = starts[block], prod(block), np.dot(first, steps)
            lists[number, 3:6] = np.multiply(signs, steps)
            continue
        lows = [_lows(child, state) for child in families[block]]
        cut = np.max(lows, axis=0)  # where the upper halves begin; 0 on an axis that is not cut
        cuts[number] = np.dot(cut, steps)
        cells_before, leaves_before = 0, 0
        for child, low in zip(families[block], lows, strict=True):
            spans = [bounds == (0, length) for bounds, length in zip(child.bounds, block, strict=True)]
            halves = sum(4 >> axis for axis, start, full in zip(axes, low, spans, strict=True) if start or full)
            rows[number, halves, :3] = numbers[_lying(child, state)], cells_before, np.dot(low, steps)
            if spans[1] and cut[1]:  # though b is cut in the first half of a
                rows[number, halves ^ 4 >> axes[1]] = rows[number, halves]
            before[number, halves] = leaves_before * 8 + halves
            cells_before += prod(child.sides)
            leaves_before += leaves[child.sides]
    first_cut, cuts[0] = int(cuts[0]), 0  # the grid is no child: where none stands, a walk ends
    rows[..., 3] = cuts[rows[..., 0]]
    tables = [torch.from_numpy(table) for table in (rows, before, layouts, lists)]
    tables += [torch.cat(cells).int(), torch.cat(places).int()]
    tables = [table.to(device) for table in tables]
    return Rules(*tables, first_cut=first_cut, depth=depths[grid], leaves=leaves[grid], shifts=shifts[:2])


def _states(grid: State, leaf_cells: int) -> tuple[dict[State, int], dict[Block, list[Child]]]:
    """The number of each state that a walk from the grid can reach; and the children of each block, none for a leaf."""
    numbers, states, families = {grid: 0}, [grid], {}
    for state in states:  # grows on the way
        if state.sides not in families:
            families[state.sides] = list(children(state.sides)) if prod(state.sides) > leaf_cells else []
        for child in families[state.sides]:
            lying = _lying(child, state)
            if lying not in numbers:
                numbers[lying] = len(numbers)
                states.append(lying)
    return numbers, families


def _lying(child: Child, parent: State) -> State:
    axes = tuple(parent.axes[n] for n in child.axes)
    return State(child.sides, axes, tuple(parent.signs[n] * child.steps[n] for n in child.axes))


def _lows(child: Child, parent: State) -> list[int]:
    """Cells between a child and the start of the grid's axis, along a, b and c of its parent."""
    lying = zip(child.bounds, parent.sides, parent.signs, strict=True)
    return [low if sign > 0 else length - high for (low, high), length, sign in lying]


@triton.jit
def four(pointers):
    """Four numbers that stand side by side, by one read: shaped as pointers, each."""
    numbers = tl.load(pointers[:, None] + tl.arange(0, 4)[None, :])  # [BLOCK, 4]
    even, odd = tl.split(numbers.reshape(numbers.shape[0], 2, 2))  # [BLOCK, 2] each
    first, third = tl.split(even)  # [BLOCK] each
    second, fourth = tl.split(odd)  # [BLOCK] each
    return first, second, third, fourth


@triton.jit
def child_of(state, cell, cut, rest_0, rest_1, NDIM: tl.constexpr):
    """The row of the child that a cell lies in; the rests are the bits of the coordinates after 0 and after 1."""
    child = state * 8 + (cell >= (cut & ~rest_0)) * 4 + ((cell & rest_0) >= (cut & rest_0 & ~rest_1)) * 2  # [BLOCK]
    if NDIM == 2:
        return child + 1
    return child + ((cell & rest_1) >= (cut & rest_1))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def decode_kernel(out, rows, before, lists, cells, depth, shift_0, shift_1, NDIM: tl.constexpr, STEP: tl.constexpr):
    """The cells of one leaf, whose number is the program's."""
    dtype: tl.constexpr = rows.dtype.element_ty
    AXES: tl.constexpr = 2 if NDIM == 2 else 4
    one = tl.full((), 1, dtype)
    leaf = tl.program_id(0).to(dtype)
    state, place, corner = one * 0, one * 0, one * 0
    for _ in range(depth):
        starts = tl.load(before + state * 8 + tl.arange(0, 8))  # [8]
        start = tl.max(tl.where(starts <= leaf * 8 + 7, starts, 0))
        leaf -= start >> 3
        row = rows + (state * 8 + (start & 7)) * 4
        state = tl.load(row)
        place += tl.load(row + 1)
        corner += tl.load(row + 2)
    lists += state * 8
    listed, count = tl.load(lists), tl.load(lists + 1)
    corner += tl.load(lists + 2)
    a, b, c = tl.load(lists + 3), tl.load(lists + 4), tl.load(lists + 5)
    out += place.to(tl.int64) * NDIM
    axis = tl.arange(0, AXES)[None, :]  # [1, AXES]
    low = tl.where(axis == 0, shift_0, tl.where(axis == 1, shift_1, 0)).to(dtype)  # [1, AXES]
    TOP: tl.constexpr = dtype.primitive_bitwidth - 1
    high = tl.where(axis == 0, TOP, tl.where(axis == 1, shift_0, shift_1)).to(dtype)  # [1, AXES]
    bits = (one << high - low) - 1  # [1, AXES]
    for start in range(0, count, STEP):
        number = start + tl.arange(0, STEP)[:, None]  # [STEP, 1]
        packed = tl.load(cells + listed + number, mask=number < count, other=0)  # [STEP, 1]
        cell = corner + (packed & 1023) * a + (packed >> 10 & 1023) * b  # [STEP, 1]
        if NDIM == 3:
            cell += (packed >> 20) * c
        valid = number < count  # [STEP, 1]
        if NDIM == 3:
            valid = valid & (axis < NDIM)  # [STEP, AXES]
        tl.store(out + number * NDIM + axis, (cell >> low & bits).to(tl.int64), mask=valid)  # [STEP, AXES]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def encode_kernel(
    out, outside, coordinates, rows, layouts, places,
    count, first_cut, shift_0, shift_1, side_0, side_1, side_2,
    NDIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The places of BLOCK cells."""
    dtype: tl.constexpr = rows.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Past the end the last cell is repeated, so that it widens no box.
    number = tl.minimum(tl.arange(0, BLOCK), count - 1 - start).to(tl.int32)  # [BLOCK]
    coordinates += start * NDIM
    if NDIM == 2:
        x, y = tl.split(tl.load(coordinates + number[:, None] * 2 + tl.arange(0, 2)[None, :]))  # [BLOCK] each
        z = tl.zeros_like(x)  # [BLOCK]
    else:
        x = tl.load(coordinates + number * 3)  # [BLOCK]
        y = tl.load(coordinates + number * 3 + 1)  # [BLOCK]
        z = tl.load(coordinates + number * 3 + 2)  # [BLOCK]
    is_wide = False
    if dtype == tl.int32:  # of what that cannot hold, 2^31 to 2^32 - 1 becomes negative
        is_wide = tl.max(((x | y | z) >> 32).to(tl.uint32)) > 0
    x, y, z = x.to(dtype), y.to(dtype), z.to(dtype)  # [BLOCK] each
    x_low, y_low, z_low = tl.min(x), tl.min(y), tl.min(z)
    x_high, y_high, z_high = tl.max(x), tl.max(y), tl.max(z)
    is_below = (x_low < 0) | (y_low < 0) | (z_low < 0)
    if is_wide | is_below | (x_high >= side_0) | (y_high >= side_1) | (z_high >= side_2):
        tl.store(outside, 1)
        return

    cell = (x << shift_0) + (y << shift_1) + z  # [BLOCK]
    origin = (x_low << shift_0) + (y_low << shift_1) + z_low
    low, high = origin, (x_high << shift_0) + (y_high << shift_1) + z_high
    rest_0, rest_1 = ((origin * 0 + 1) << shift_0) - 1, ((origin * 0 + 1) << shift_1) - 1
    shared_state, shared_place, shared_cut, together = origin * 0, origin * 0, first_cut.to(dtype), True
    while together & (shared_cut > 0):
        child = child_of(shared_state, low, shared_cut, rest_0, rest_1, NDIM)
        together = child == child_of(shared_state, high, shared_cut, rest_0, rest_1, NDIM)
        if together:
            row = rows + child * 4
            shared_state = tl.load(row)
            shared_place += tl.load(row + 1)
            corner = tl.load(row + 2)
            shared_cut = tl.load(row + 3)
            low, high = low - corner, high - corner

    cell -= origin - low
    nothing = tl.zeros_like(cell)  # [BLOCK]
    state, place, cut = nothing + shared_state, nothing + shared_place, nothing + shared_cut  # [BLOCK] each
    while tl.max(cut) > 0:
        child = child_of(state, cell, cut, rest_0, rest_1, NDIM)  # [BLOCK]
        state, earlier, corner, cut = four(rows + child * 4)  # [BLOCK] each
        place, cell = place + earlier, cell - corner  # [BLOCK] each
    position, step_0, step_1, step_2 = four(layouts + state * 4)  # [BLOCK] each
    position += (cell >> shift_0) * step_0 + ((cell & rest_0) >> shift_1) * step_1
    if NDIM == 3:
        position += (cell & rest_1) * step_2
    place += tl.load(places + position)
    tl.store(out + start + number, place.to(tl.int64))
