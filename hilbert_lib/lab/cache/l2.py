"""Hit rates that the LRU model predicts: by ordering and capacity, and for the L2 of three GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from hilbert_lib.lab.cache.cache import LINE_BYTES, Storage
from hilbert_lib.lab.cache.lru import kernel_trace, lru_hit_rates
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.ordering import Ordering
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
    pattern: DilatedPattern,
    *,
    length: int,
    row_bytes: Sequence[int],
    capacities: Sequence[int],
    concurrent: int,
    heads: int = 1,
    layout: str = "bhsd",
    unit_bytes: int = LINE_BYTES,
    tile_queries: int = 128,
    tile_keys: int = 64,
    key_order: str = "storage",
    chunk: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Hit rates of a kernel's reads for every ordering, row size and capacity.

    Args:
        pattern: the branches; residue-major is made for the first one's rate.
        length: tokens.
        row_bytes: the sizes of one head's row.
        capacities: bytes of each cache.
        concurrent, unit_bytes, tile_queries, tile_keys, key_order: as in `kernel_trace`.
        heads, layout: as in `Storage`.
        chunk, seed: as in `compared_orderings`.

    Returns:
        One row a row size, ordering and capacity: row_bytes, ordering, and the columns of `lru_hit_rates`.

    >>> table = hit_rates(
    ...     DilatedPattern((64,), (4,)), length=64, row_bytes=[32], capacities=[2048], concurrent=1, tile_queries=4
    ... )
    >>> table.set_index("ordering").misses[["linear", "residue"]].to_dict()
    {'linear': 128, 'residue': 8}
    """
    tables = []
    for name, ordering in compared_orderings(length, pattern.dilation_rates[0], chunk=chunk, seed=seed).items():
        for size in row_bytes:
            trace = kernel_trace(
                Storage(ordering, size, heads, layout),
                pattern,
                unit_bytes=unit_bytes,
                tile_queries=tile_queries,
                tile_keys=tile_keys,
                concurrent=concurrent,
                key_order=key_order,
            )
            table = lru_hit_rates(trace, capacities)
            table.insert(0, "ordering", name)
            table.insert(0, "row_bytes", size)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def l2_hit_rates(pattern: DilatedPattern, *, length: int, row_bytes: Sequence[int], **options) -> pd.DataFrame:
    """`hit_rates` in the L2 of each GPU of `GPUS`, with one program on each of its multiprocessors.

    Args:
        pattern, length, row_bytes: as in `hit_rates`.
        **options: the other arguments of `hit_rates`.

    Returns:
        The table of `hit_rates` with a first column gpu.
    """
    tables = []
    for gpu in GPUS:
        table = hit_rates(
            pattern,
            length=length,
            row_bytes=row_bytes,
            capacities=[gpu.l2_bytes],
            concurrent=gpu.multiprocessors,
            **options,
        )
        table.insert(0, "gpu", gpu.name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def l2_hit_rates_of_whole_rows(
    key_counts: Sequence[int], row_bytes: int, *, tile_queries: int = 128, tile_keys: int = 64
) -> pd.DataFrame:
    """Hit rates in each GPU's L2 by the number of keys, for rows that fill whole lines: those of every ordering.

    Where each row fills its lines, an ordering only renames the lines, and LRU does not look at names. So one layout
    answers for all; k and v are taken packed, and a whole key tile is one unit, which makes long sequences cheap.

    Args:
        key_counts: keys of one head in one segment (segment length over dilation rate), each a multiple of tile_keys.
        row_bytes: bytes a row, a multiple of a line.
        tile_queries, tile_keys: as in `kernel_trace`.

    Returns:
        One row a GPU and key count: gpu, keys, kv_bytes, hit_rate, and memory_ratio, the bytes read from memory over
        the bytes of k and v.

    Raises:
        ValueError: where row_bytes or a key count is no such multiple.
    """
    if row_bytes % LINE_BYTES:
        raise ValueError(f"row_bytes must be a multiple of {LINE_BYTES}, got {row_bytes}")
    cases = []
    for gpu in GPUS:
        for keys in key_counts:
            if keys % tile_keys:
                raise ValueError(f"key_counts must be multiples of tile_keys={tile_keys}, got {keys}")
            storage = Storage(Ordering.linear(keys), row_bytes, layout="bhsd")
            trace = kernel_trace(
                storage,
                DilatedPattern((keys,), (1,)),
                unit_bytes=tile_keys * row_bytes,
                tile_queries=tile_queries,
                tile_keys=tile_keys,
                concurrent=gpu.multiprocessors,
            )
            result = lru_hit_rates(trace, [gpu.l2_bytes]).iloc[0]
            kv_bytes = 2 * storage.tensor_bytes
            cases.append((gpu.name, keys, kv_bytes, result.hit_rate, result.memory_bytes / kv_bytes))
    return pd.DataFrame(cases, columns=["gpu", "keys", "kv_bytes", "hit_rate", "memory_ratio"])
