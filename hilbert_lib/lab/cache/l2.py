"""What a cache of a given size can reuse: the reads of a dilated attention kernel against an exact LRU model.

The model is a fully associative cache that forgets the least recently used unit. A GPU's L2 is set-associative, hashed,
shared with other traffic, and tags lines of four sectors: a prediction to test, not a measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.cache.cache import LINE_BYTES, SECTOR_BYTES, Storage, branch_rows, row_units
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.pattern import DilatedPattern


@dataclass(frozen=True)
class Gpu:
    """The two numbers of a GPU that the model needs, as its vendor states them."""

    name: str
    l2_bytes: int
    multiprocessors: int


# NVIDIA's architecture documents for GP104 (GeForce GTX 1080), GA100 (A100) and GH100 (H100 and H200, SXM form). The
# H200 is specified with 50 MiB; 60 MiB is quoted for it too, so the model answers for both.
GPUS = (
    Gpu("GTX 1080", 2 * 2**20, 20),
    Gpu("A100", 40 * 2**20, 108),
    Gpu("H200, 50 MiB", 50 * 2**20, 132),
    Gpu("H200, 60 MiB", 60 * 2**20, 132),
)


@dataclass(frozen=True)
class Trace:
    """Reads of k and v in the order in which they reach a cache; tensors are (reads,) int64.

    requests: programs in step that ask for the unit. sectors: of the unit, that each asks for, where they were counted.
    """

    units: Tensor
    requests: Tensor
    unit_bytes: int
    sectors: Tensor | None = None


def kernel_trace(
    storage: Storage,
    pattern: DilatedPattern,
    *,
    unit_bytes: int = LINE_BYTES,
    tile_queries: int = 128,
    tile_keys: int = 64,
    concurrent: int = 1,
    key_order: str = "storage",
    joined_keys: int | None = None,
) -> Trace:
    """The reads of k and v by a flash-attention kernel that runs one program a block of `tile_queries` queries.

    Programs start in the order branch, head, segment, query block, `concurrent` at a time; those of a wave walk over
    the key tiles of their segment in step, the tile of k and then that of v. joined_keys: keys, one after the other,
    whose reads of a unit are one, with its sectors counted; by default those of a tile, and no sectors.
    """
    joined = tile_keys if joined_keys is None else joined_keys
    device = storage.ordering.device
    k_units = -(-storage.length * storage.heads * storage.row_bytes // unit_bytes)
    tile_count = -(-storage.length // tile_keys)
    of_unit = unit_bytes if joined_keys is None else SECTOR_BYTES  # what is told apart within a unit
    in_unit, in_tile = unit_bytes // of_unit, -(-tile_keys // joined)
    reads, programs, groups = [], [], 0  # a group is the programs of one segment, which share their keys
    for branch in range(len(pattern.branches)):
        for head in pattern.branch_heads(branch, storage.heads):
            rows = branch_rows(storage, pattern, branch=branch, head=head, tile_keys=tile_keys, key_order=key_order)
            found, row = row_units(storage.addresses(rows.positions, head), storage.row_bytes, of_unit)
            _, group, sizes = rows.segments.unique_consecutive(return_inverse=True, return_counts=True)
            place = torch.arange(len(group), device=device) - (sizes.cumsum(0) - sizes)[group]  # in the segment
            together = ((groups + group) * tile_count + rows.tiles) * in_tile + place % tile_keys // joined
            # What is read together, once each, ascending.
            reads.append((together[row] * (k_units * in_unit) + found).unique())
            programs.append(-(-sizes // tile_queries))
            groups += len(sizes)
    reads, programs = torch.cat(reads), torch.cat(programs)
    reads, sectors = (reads // in_unit).unique_consecutive(return_counts=True)
    tile, unit = reads // (k_units * in_tile), reads % k_units

    # Which groups run in which wave, and with how many programs.
    program_group = torch.arange(groups, device=device).repeat_interleave(programs)
    wave = torch.arange(len(program_group), device=device) // concurrent
    wave_group, requests = (wave * groups + program_group).unique_consecutive(return_counts=True)
    wave, group = wave_group // groups, wave_group % groups

    # Each of them reads all tiles of its group, and a wave takes one step a tile: the stable sort keeps k before v.
    size = (tile // tile_count).bincount(minlength=groups)
    member = torch.arange(len(group), device=device).repeat_interleave(size[group])
    start = (size.cumsum(0) - size)[group] - (size[group].cumsum(0) - size[group])
    read = torch.arange(len(member), device=device) + start[member]
    step = wave[member] * tile_count + tile[read] % tile_count
    order = step.repeat(2).argsort(stable=True)
    return Trace(
        units=torch.cat([unit[read], k_units + unit[read]])[order],
        requests=requests[member].repeat(2)[order],
        unit_bytes=unit_bytes,
        sectors=None if joined_keys is None else sectors[read].repeat(2)[order],
    )


def lru_hit_rates(trace: Trace, capacities: Sequence[int]) -> pd.DataFrame:
    """Hit rates of LRU caches of several sizes [bytes] on one trace, exactly; of its sectors too, where it has them."""
    requests = int(trace.requests.sum())
    table = pd.DataFrame({"capacity_bytes": list(capacities), "requests": requests})
    missed = [_missed(trace.units.tolist(), capacity // trace.unit_bytes) for capacity in capacities]
    table["misses"] = [len(reads) for reads in missed]
    table["hit_rate"] = 1 - table.misses / requests
    table["memory_bytes"] = table.misses * trace.unit_bytes
    if trace.sectors is not None:
        asked = int((trace.requests * trace.sectors).sum())
        table["sector_hit_rate"] = [1 - int(trace.sectors[reads].sum()) / asked for reads in missed]
    return table


def _missed(units: list[int], capacity: int) -> list[int]:
    # The reads that miss in an LRU cache of so many units: Python's own is one.
    missed = []
    read = lru_cache(maxsize=capacity)(lambda unit: missed.append(at))
    for at, unit in enumerate(units):  # noqa: B007  the cache's function sees it
        read(unit)
    return missed


def hit_rates(
    pattern: DilatedPattern,
    *,
    length: int,
    row_bytes: Sequence[int],
    capacities: Sequence[int],
    names: Sequence[str] = (),
    **kernel,
) -> pd.DataFrame:
    """Hit rates of a kernel's reads of one head of k and v, for every ordering (or `names`), row size and capacity."""
    tables = []
    orderings = compared_orderings(length, pattern.dilation_rates[0])
    for name in names or orderings:
        for size in row_bytes:
            trace = kernel_trace(Storage(orderings[name], size, layout="bhsd"), pattern, **kernel)
            tables.append(lru_hit_rates(trace, capacities).assign(ordering=name, row_bytes=size))
    return pd.concat(tables, ignore_index=True)
