"""What the documents under examination published, restated so that it can be run: the claims, not our code."""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.checks import integer, integers
from hilbert_lib.lab.samples import text_qkv
from hilbert_lib.ordering import Ordering


def seed_hilbert_d2xy(n: int, d: int) -> tuple[int, int]:
    """The function under test, as printed in seeds/000: said to be the Hilbert curve, and not one.

    It is the well-known conversion but for one letter: the reflection uses the side of the whole grid, n - 1, where the
    side of the square built so far, s - 1, belongs.

    Args:
        n: side of the grid, a power of two.
        d: place along the curve, 0 to n * n - 1.

    Returns:
        (x, y), which should lie inside the grid and often does not.

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
    """Which keys the documents' two kernels select for every query: the "standard" one and the "Hilbert" one.

    With h the 2-D snake, program row m of the standard kernel reads keys s + i r, i < w / r, with s = (m div w) w. Row
    m of the Hilbert kernel serves query h[m] and reads keys h[s + i r] with s = (h[m] div w) w.

    Args:
        length: tokens, a multiple of segment_length.
        segment_length: w.
        dilation_rate: r, at most w.

    Returns:
        Two (length, length) bool tensors, query by key.

    Raises:
        ValueError: if segment_length does not divide length, or dilation_rate is not from 1 to segment_length.
        TypeError: if one of them is no integer.

    >>> standard, hilbert = seed_key_sets(16, 8, 2)
    >>> (standard & hilbert).sum().item(), standard.sum().item()
    (32, 64)
    """
    length = integer("length", length, least=1)
    segment_length = integer("segment_length", segment_length, least=1, most=length)
    dilation_rate = integer("dilation_rate", dilation_rate, least=1, most=segment_length)
    if length % segment_length:
        raise ValueError(f"segment_length must divide length ({length}), got {segment_length}")
    h = Ordering.from_curve("snake", length).perm
    steps = torch.arange(segment_length // dilation_rate, device="cpu") * dilation_rate
    row = torch.arange(length, device="cpu")
    standard, hilbert = torch.zeros(2, length, length, dtype=torch.bool, device="cpu")
    standard[row[:, None], row[:, None] // segment_length * segment_length + steps] = True
    hilbert[h[:, None], h[h[:, None] // segment_length * segment_length + steps]] = True
    return standard, hilbert


def seed_kernels_compared(
    length: int, segment_length: int, dilation_rates: Sequence[int], *, head_dim: int = 64
) -> pd.DataFrame:
    """How far the two key sets of `seed_key_sets` overlap, and how far apart the attention over them is.

    Args:
        length, segment_length: tokens of the sequence and of a segment.
        dilation_rates: rates to compare at, at least one.
        head_dim: size of the one head; q, k and v are embedded text (`text_qkv`).

    Returns:
        A row a rate: dilation_rate, keys (a query), shared_keys (mean over queries), overlap (shared / keys),
        same_queries (share of queries with equal key sets), output_difference (Frobenius norm of the difference of
        the outputs over that of the standard output).

    Raises:
        ValueError, TypeError: as `seed_key_sets` and `text_qkv` do, or if there is no rate.

    >>> seed_kernels_compared(16, 8, [1], head_dim=4).overlap.tolist()
    [1.0]
    """
    dilation_rates = integers("dilation_rates", dilation_rates, least=1)
    q, k, v = (x[0, :, 0] for x in text_qkv(length, heads=1, head_dim=head_dim))
    rows = []
    for rate in dilation_rates:
        standard, hilbert = seed_key_sets(length, segment_length, rate)
        outputs = [torch.nn.functional.scaled_dot_product_attention(q, k, v, mask) for mask in (standard, hilbert)]
        shared = (standard & hilbert).sum(-1)
        rows.append(
            {
                "dilation_rate": rate,
                "keys": segment_length // rate,
                "shared_keys": shared.double().mean().item(),
                "overlap": shared.double().mean().item() / (segment_length // rate),
                "same_queries": (standard == hilbert).all(-1).double().mean().item(),
                "output_difference": ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item(),
            }
        )
    return pd.DataFrame(rows)


def key_set_table(length: int, segment_length: int, dilation_rate: int) -> pd.DataFrame:
    """The pairs of `seed_key_sets` as a table: columns query, key, standard, hilbert (both bool).

    >>> key_set_table(16, 8, 8).standard.sum()
    np.int64(16)
    """
    standard, hilbert = seed_key_sets(length, segment_length, dilation_rate)
    query, key = (standard | hilbert).nonzero(as_tuple=True)
    columns = {"query": query, "key": key, "standard": standard[query, key], "hilbert": hilbert[query, key]}
    return pd.DataFrame({name: column.numpy() for name, column in columns.items()})
