"""Places of single cells along the Hilbert and the Morton curve of a cube, from their coordinates: without a table."""

import torch
from torch import Tensor

MOST_BITS = 63  # of a code


def hilbert_codes(cells: Tensor) -> Tensor:
    """The place of each cell along the Hilbert curve of the smallest cube of side 2^k that holds all.

    J. Skilling, "Programming the Hilbert curve", AIP Conf. Proc. 707 (2004). Where k * axes is more than 63, the lowest
    bits of coordinates are left out: cells beside each other then share a code.

    Args:
        cells: (axes, n) integers, at least 0.

    Returns:
        (n,) int64

    >>> hilbert_codes(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])).tolist()
    [0, 1, 2, 3]
    """
    axes = cells.shape[0]
    cells, bits = _of_most_bits(cells)
    lines = list(cells.unbind(0))
    for level in range(bits - 1, 0, -1):
        low = (1 << level) - 1  # the bits below this level
        for axis in range(axes):
            is_far = ((lines[axis] >> level) & 1).bool()
            # In a far half the curve is mirrored, in a near one its first axis changes places with this one.
            swapped = (lines[0] ^ lines[axis]) & low
            first = torch.where(is_far, lines[0] ^ low, lines[0] ^ swapped)
            if axis:
                lines[axis] = torch.where(is_far, lines[axis], lines[axis] ^ swapped)
            lines[0] = first
    for axis in range(1, axes):  # the code of Gray
        lines[axis] = lines[axis] ^ lines[axis - 1]
    turned = torch.zeros_like(lines[0])
    for level in range(bits - 1, 0, -1):
        turned = torch.where(((lines[-1] >> level) & 1).bool(), turned ^ ((1 << level) - 1), turned)
    return _interleaved([line ^ turned for line in lines], bits)


def morton_codes(cells: Tensor) -> Tensor:
    """The place of each cell along the Morton curve of the same cube: the bits of its coordinates in turn.

    Arguments and result are as of `hilbert_codes`.

    >>> morton_codes(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])).tolist()
    [0, 1, 2, 3]
    """
    cells, bits = _of_most_bits(cells)
    return _interleaved(list(cells.unbind(0)), bits)


def _of_most_bits(cells: Tensor) -> tuple[Tensor, int]:
    # Coordinates without the bits that a code has no room for, and the number of their bits.
    axes, count = cells.shape
    cells = cells.long()
    bits = int(cells.amax()).bit_length() if count else 0
    most = MOST_BITS // axes
    return (cells >> (bits - most), most) if bits > most else (cells, bits)


def _interleaved(lines: list[Tensor], bits: int) -> Tensor:
    # The bits of all lines, the highest of the first line first.
    code = torch.zeros_like(lines[0])
    for level in reversed(range(bits)):
        for line in lines:
            code = (code << 1) | ((line >> level) & 1)
    return code
