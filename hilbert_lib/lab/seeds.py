"""Claims of the documents under examination, restated so that they can be run. They are not our code."""

import torch
from torch import Tensor

from hilbert_lib.ordering import Ordering


def seed_hilbert_d2xy(n: int, d: int) -> tuple[int, int]:
    """The function under test, as printed in document 000: said to be the Hilbert curve, and not one.

    It is the well-known conversion but for one letter: the reflection uses the side of the whole grid, n - 1, where the
    side of the square built so far, s - 1, belongs. n is a power of two, d from 0 to n * n - 1; (x, y) should lie
    inside the grid and often does not.

    >>> [seed_hilbert_d2xy(2, d) for d in range(4)]
    [(0, 0), (0, 1), (1, 1), (2, 1)]
    """
    x = y = 0
    s = 1
    while s < n:
        rx = (d // 2) & 1
        ry = (d ^ rx) & 1
        if ry == 0:
            if rx == 1:
                x, y = n - 1 - x, n - 1 - y
            x, y = y, x
        x, y = x + s * rx, y + s * ry
        d //= 4
        s *= 2
    return x, y


def seed_key_sets(length: int, segment_length: int, dilation_rate: int) -> tuple[Tensor, Tensor]:
    """Keys that the documents' two kernels select for every query: the "standard" one and the "Hilbert" one.

    With h the 2-D snake, program row m of the standard kernel reads keys s + i r, i < w / r, with s = (m div w) w. Row
    m of the Hilbert kernel serves query h[m] and reads keys h[s + i r] with s = (h[m] div w) w. The length is a
    multiple of the segment length w, which is at least the dilation rate r. Sets are (length, length), query by key.
    """
    h = Ordering.from_curve("snake", length).perm
    steps = torch.arange(segment_length // dilation_rate, device="cpu") * dilation_rate
    row = torch.arange(length, device="cpu")
    standard, hilbert = torch.zeros(2, length, length, dtype=torch.bool, device="cpu")
    standard[row[:, None], row[:, None] // segment_length * segment_length + steps] = True
    hilbert[h[:, None], h[h[:, None] // segment_length * segment_length + steps]] = True
    return standard, hilbert
