"""Descriptors of boxes of cells for the copy engine, and the tensors that it can read."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hilbert_lib.attention.triton.hopper import tiles


class Extent(NamedTuple):
    """The grid in whose order a tensor's rows lie, and the residues that a launch reads, along three axes."""

    shape: tuple[int, ...]  # cells
    dilation: tuple[int, ...]
    ranks: tuple[int, ...]  # cells of a residue
    last: tuple[int, ...]  # the last residue


def extra_extent(count: int) -> Extent:
    """The extent of extra keys."""
    return Extent((1, 1, count), (1, 1, 1), (1, 1, count), (0, 0, 0))


def unit_of(x: Tensor) -> int:
    """Elements of one step along the axis of heads of a descriptor; that axis holds sequences and residues too."""
    return x.stride(2) if x.shape[2] > 1 else x.stride(1)


def described(x: Tensor, extent: Extent, box: tuple[int, ...], columns: int):
    """The copy engine's descriptor for boxes of x (batch, seq, heads, head_dim), whose rows are cells of a grid.

    Its five axes are [rank 0, rank 1, rank 2, heads with sequences and residues in steps of `unit_of`, head_dim].
    """
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(_described(tuple(x.shape), x.stride(), x.dtype, unit_of(x), extent, box, columns))
    descriptor.base = x
    return descriptor


@lru_cache(maxsize=1024)
def _described(sizes, strides, dtype, unit, extent, box, columns) -> dict:
    batch, _, heads, head_dim = sizes
    _, rows, cells = extent.shape
    steps = rows * cells * strides[1], cells * strides[1], strides[1]
    far = (batch - 1) * strides[0] + (heads - 1) * strides[2]
    far += sum(residue * step for residue, step in zip(extent.last, steps, strict=True))
    aligned = 16 // dtype.itemsize
    along = [d * step if n > 1 else aligned for d, step, n in zip(extent.dilation, steps, extent.ranks, strict=True)]
    return vars(
        TensorDescriptor(
            torch.empty(0, dtype=dtype, device="cpu"),
            [*extent.ranks, far // unit + 1, head_dim],
            [*along, unit, 1],
            [*box, 1, columns],
            layout(box, columns, dtype),
        )
    )


@lru_cache
def layout(box: tuple[int, ...], columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Layout of a box in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([*box, 1, columns], tiles.element(dtype))


def steps_of(x: Tensor, extent: Extent) -> tuple[int, ...]:
    """Numbers of steps of `unit_of` from a sequence to the next, and from a residue to the next along each axis."""
    shape, dilation = extent.shape, extent.dilation
    unit, row = unit_of(x), x.stride(1)
    to_next = x.stride(0) // unit if x.shape[0] > 1 else 0
    if dilation == (1, 1, 1):
        return to_next, 0, 0, 0
    steps = shape[1] * shape[2] * row, shape[2] * row, row
    return (to_next, *(step // unit if d > 1 else 0 for step, d in zip(steps, dilation, strict=True)))


def is_reached(x: Tensor, extent: Extent) -> bool:
    """Whether the copy engine reaches every cell of x. Steps must be whole units, and units multiples of 16 bytes."""
    shape, dilation = extent.shape, extent.dilation
    unit, row = unit_of(x), x.stride(1)
    steps = [shape[1] * shape[2] * row, shape[2] * row, row]
    used = [step for step, d in zip(steps, dilation, strict=True) if d > 1]
    used += [x.stride(0)] if x.shape[0] > 1 else []
    aligned = 16 // x.element_size()
    return (
        x.stride(3) == 1
        and unit > 0
        and row > 0
        and not any(step % aligned for step in (unit, row))
        and not any(step % unit for step in used)
        and x.data_ptr() % 16 == 0
    )
