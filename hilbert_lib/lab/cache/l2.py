"""Hit rates that the LRU model predicts, by ordering, row size and capacity; and the L2 of four GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hilbert_lib.lab.cache.cache import Storage
from hilbert_lib.lab.cache.lru import kernel_trace, lru_hit_rates
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.pattern import DilatedPattern

MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """The two numbers of a GPU that the model needs, as its vendor states them."""

    name: str
    l2_bytes: int
    multiprocessors: int


# NVIDIA's architecture documents for GP104 (GeForce GTX 1080), GA100 (A100) and GH100 (H100 and H200, SXM form). The
# H200 is specified with 50 MiB; 60 MiB is quoted for it too, so the model answers for both.
GPUS = (
    Gpu("GTX 1080", 2 * MIB, 20),
    Gpu("A100", 40 * MIB, 108),
    Gpu("H200, 50 MiB", 50 * MIB, 132),
    Gpu("H200, 60 MiB", 60 * MIB, 132),
)


def hit_rates(
    pattern: DilatedPattern, *, length: int, row_bytes: Sequence[int], capacities: Sequence[int], **kernel
) -> pd.DataFrame:
    """Hit rates of a kernel's reads of one head of k and v, for every ordering, row size and capacity.

    Args:
        pattern: the branches; residue-major is made for the first one's rate.
        length: tokens.
        row_bytes: the sizes of one head's row [bytes].
        capacities: of each cache [bytes].
        **kernel: as in `kernel_trace`.

    Returns:
        A row a row size, ordering and capacity: row_bytes, ordering, and the columns of `lru_hit_rates`.

    >>> small = {"length": 64, "row_bytes": [32], "capacities": [2048], "tile_queries": 4}
    >>> table = hit_rates(DilatedPattern((64,), (4,)), **small)
    >>> table.set_index("ordering").misses[["linear", "residue"]].to_dict()
    {'linear': 128, 'residue': 8}
    """
    tables = []
    for name, ordering in compared_orderings(length, pattern.dilation_rates[0]).items():
        for size in row_bytes:
            trace = kernel_trace(Storage(ordering, size, layout="bhsd"), pattern, **kernel)
            table = lru_hit_rates(trace, capacities)
            table.insert(0, "ordering", name)
            table.insert(0, "row_bytes", size)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)
