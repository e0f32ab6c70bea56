"""Predicted counts of one launch: sectors that the L1s ask of L2, what L2 finds, bytes from memory.

The model joins exact counts of what a kernel's loops load, as `cache` gives them, with the LRU cache of `l2`.
It takes rows of k and v past L1, as the kernels' asynchronous copies of 16 bytes go. What 8 threads of such a copy ask
for at once, a quarter of a warp, is one request: of two sectors that memory brings together both miss in L2 where one
quarter asks for both, and the second is found where another one does. L1 joins other loads of one tile, or of one warp.
The model knows nothing of the launch's own instructions, of registers that spill to memory, of writes
that take room in L2, or of two programs on one multiprocessor that find each other's indices in L1. So it is not within
10 % in sectors where a sequence is so short that spilled registers are most of what a launch reads, and where rows of
one sector at a large dilation make indices, each in a sector of its own, a third of it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.cache.cache import FETCH_BYTES, SECTOR_BYTES, Storage, branch_rows, tile_requests, units_touched
from hilbert_lib.lab.cache.l2 import Gpu, Trace, kernel_trace, lru_hit_rates
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

JOINED_BYTES = 128  # of k or v in one request to L2: 16 from each thread of a quarter of a warp
INDEX_BYTES, POSITION_BYTES = 4, 8  # of the kernels' table of slots, int32; of torch's index of rows, int64
# Quantities that are predicted and counted, and whether their error is in points rather than relative.
QUANTITIES = {"l1_sectors": False, "l2_found_percent": True, "dram_read_bytes": False}


@dataclass(frozen=True)
class Predicted:
    """Predicted reads of one launch with empty caches: sectors from L2 into the L1s, and bytes from memory."""

    l1_sectors: int
    l2_found_percent: float
    dram_read_bytes: int


# Of one kind of rows: sectors asked for, those of them that L2 has to fetch, and the bytes that it fetches with them.
Reads = tuple[int, float, int]


def attention_reads(
    storage: Storage, pattern: DilatedPattern, *, tile_queries: int | None, tile_keys: int, table_sectors: int, gpu: Gpu
) -> Predicted:
    """The reads of the fused forward, or of its decoding with one query, through a table of slots.

    The pattern has one branch in which all heads have one offset; q has as many heads as k. tile_queries: of a program;
    None for decoding, where a segment is the tokens of one program. table_sectors: that a program reads to know its
    work.
    """
    rows = branch_rows(storage, pattern, tile_keys=tile_keys, key_order="position")
    _, keys = rows.segments.unique_consecutive(return_counts=True)
    programs = torch.ones_like(keys) if tile_queries is None else -(-keys // tile_queries)
    everyone, heads = int(programs.sum()) * storage.heads, storage.heads
    row_sectors = storage.row_bytes // SECTOR_BYTES
    kv_sectors = 2 * int((programs * keys).sum()) * heads * row_sectors
    if storage.row_bytes % FETCH_BYTES:
        simulated, unit_bytes = storage, FETCH_BYTES
    else:  # rows of whole fetches: an ordering only gives them other names, and a row is one unit
        simulated, unit_bytes = replace(storage, ordering=Ordering.linear(storage.length)), storage.row_bytes
    hit_rate, kv_bytes = _simulated(simulated, pattern, tile_queries, tile_keys, gpu, unit_bytes)

    # Of the table, each program asks once for every sector of a tile's slots; lanes that share one are joined.
    index, a_segment = INDEX_BYTES * rows.positions, int(rows.tiles.max()) + 1
    tiles, _ = tile_requests(index, rows.segments * a_segment + rows.tiles, INDEX_BYTES, SECTOR_BYTES)
    sectors = tiles.bincount()
    index_sectors = int((sectors * programs[torch.arange(len(sectors), device="cpu") // a_segment]).sum()) * heads
    # A token of q has the rows of all heads, which are asked for one head after the other.
    tokens = rows.positions if tile_queries is not None else rows.positions[:1]
    token_bytes = heads * storage.row_bytes
    q_sectors = row_sectors * (everyone if tile_queries is None else len(tokens) * heads)
    parts = [
        (kv_sectors, kv_sectors * (1 - hit_rate), kv_bytes),
        _once(index, INDEX_BYTES, index_sectors, FETCH_BYTES),
        _once(tokens * token_bytes, token_bytes, q_sectors, storage.row_bytes),
        (table_sectors * everyone, table_sectors, table_sectors * FETCH_BYTES),
    ]
    return _predicted(parts)


def gather_reads(storage: Storage, pattern: DilatedPattern, *, gpu: Gpu) -> Predicted:
    """The reads of a kernel that copies the rows of k of a branch in its order: a warp a row, and the row's number."""
    positions = branch_rows(storage, pattern, key_order="position").positions
    rows, size = len(positions) * storage.heads, storage.row_bytes
    unit_bytes = FETCH_BYTES if size % FETCH_BYTES else size
    units = torch.cat([storage.addresses(positions, head) for head in range(storage.heads)]) // unit_bytes
    result = lru_hit_rates(Trace(units, torch.ones_like(units), unit_bytes), [gpu.l2_bytes]).iloc[0]
    sectors = rows * size // SECTOR_BYTES
    numbers = torch.zeros(1, dtype=torch.int64, device="cpu")  # one stretch of memory
    parts = [
        (sectors, sectors * (1 - result.hit_rate), int(result.memory_bytes)),
        _once(numbers, POSITION_BYTES * rows, rows, POSITION_BYTES),
    ]
    return _predicted(parts)


def model_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Errors of the model against the counts (`counter_table`), by kernel and quantity.

    median and worst are absolute, in "%" of what was counted or in "points"; above_10 counts cases further off than 10.
    """
    found = []
    for kernel, cases in table.groupby("kernel", sort=False):
        for quantity, in_points in QUANTITIES.items():
            error = (cases[f"predicted_{quantity}"] - cases[quantity]).abs()
            error = (error if in_points else 100 * error / cases[quantity]).dropna()
            if error.empty:
                continue
            worst = cases.loc[error.idxmax()]
            where = f"{worst.layout}, {worst.length} tokens, dilation {worst.dilation}, {worst.row_bytes} B"
            row = {"kernel": kernel, "quantity": quantity, "unit": "points" if in_points else "%", "cases": len(error)}
            row |= {"median": float(error.median()), "worst": float(error.max())}
            found.append({**row, "above_10": int((error > 10).sum()), "worst_case": where})
    return pd.DataFrame(found)


def _once(addresses: Tensor, row_bytes: int, sectors: int, together: int) -> Reads:
    # Rows that stay in L2 once they are there, so that only the first reads miss; together: bytes asked for at once. A
    # sector that a miss brings along for a later read is found by it.
    fetches = units_touched(addresses, row_bytes, FETCH_BYTES)
    missed = fetches * max(1, min(together, FETCH_BYTES) // SECTOR_BYTES)
    return sectors, min(missed, units_touched(addresses, row_bytes, SECTOR_BYTES)), fetches * FETCH_BYTES


@lru_cache(maxsize=64)
def _simulated(
    storage: Storage, pattern: DilatedPattern, tile_queries: int | None, tile_keys: int, gpu: Gpu, unit_bytes: int
) -> tuple[float, int]:
    trace = kernel_trace(
        storage,
        pattern,
        unit_bytes=unit_bytes,
        tile_queries=storage.length if tile_queries is None else tile_queries,
        tile_keys=tile_keys,
        concurrent=gpu.multiprocessors,
        key_order="position",
        joined_keys=JOINED_BYTES // storage.row_bytes if storage.row_bytes < unit_bytes else None,
    )
    result = lru_hit_rates(trace, [gpu.l2_bytes]).iloc[0]
    return float(result.hit_rate if trace.sectors is None else result.sector_hit_rate), int(result.memory_bytes)


def _predicted(parts: list[Reads]) -> Predicted:
    sectors, missed, fetched_bytes = map(sum, zip(*parts, strict=True))
    return Predicted(sectors, round(float(100 * (1 - missed / sectors)), 2), fetched_bytes)
