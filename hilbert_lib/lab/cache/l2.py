"""Reads that a cache of a given size can reuse: those of a dilated attention kernel against an exact LRU model.

The model is a fully associative cache that forgets the least recently used unit. A GPU's L2 is set-associative, hashed,
shared with other traffic, and tags lines of four sectors: a prediction to test, not a measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.cache.cache import LINE_BYTES, SECTOR_BYTES, Storage, branch_rows, row_units
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.patterns.dilated import DilatedPattern

NEVER = torch.iinfo(torch.int64).max  # the distance of a first read: longer than any cache


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


def stack_distances(units: Tensor) -> Tensor:
    """LRU stack distance of every read: how many other units were read since the last read of the same unit.

    An LRU cache of C units hits exactly where it is below C, so that one pass answers for every capacity (Mattson,
    Gecsei, Slutz and Traiger, IBM Systems Journal 9(2), 1970). `NEVER` at a first read. O(n log n), vectorised.
    """
    previous = _previous(units)
    is_reused = previous >= 0
    last = previous[is_reused]
    # The reads j in (last, t) that bring a new unit are those with previous(j) <= last. All reads up to last fulfil
    # that too; so count the reads before t that do, and take last + 1 away.
    first_reads = (~is_reused).cumsum(0)[is_reused]
    is_last = torch.zeros_like(units).index_fill_(0, last, 1)
    rank = is_last.cumsum(0)[last] - 1
    distances = torch.full((len(units),), NEVER, device=units.device)
    distances[is_reused] = first_reads + _smaller_before(rank) - last - 1
    return distances


def _smaller_before(permutation: Tensor) -> Tensor:
    """For each element of a permutation of 0..n-1, how many smaller ones stand before it: a radix sort from the top.

    At bit b the elements that agree above b form a group, in their first order; group g fills the places from
    g * 2**(b+1) on. Two elements differ first in one bit: there the larger one counts a smaller one before it.
    """
    values = permutation
    places = torch.arange(len(values), device=values.device)
    origin, counts = places, torch.zeros_like(values)
    for bit in reversed(range(len(values).bit_length())):
        low = (values >> bit) & 1 == 0
        start = values >> (bit + 1) << (bit + 1)
        low_before = low.cumsum(0) - low.long() - (start >> 1)  # in the group: each full group has 2**bit low ones
        counts[origin[~low]] += low_before[~low]
        target = start + torch.where(low, low_before, (1 << bit) + places - start - low_before)
        values = torch.empty_like(values).scatter_(0, target, values)
        origin = torch.empty_like(origin).scatter_(0, target, origin)
    return counts


def lru_hit_rates(trace: Trace, capacities: Sequence[int]) -> pd.DataFrame:
    """Hit rates of LRU caches of several sizes [bytes] on one trace, exactly; of its sectors too, where it has them."""
    requests = int(trace.requests.sum())
    table = pd.DataFrame({"capacity_bytes": list(capacities), "requests": requests})
    if min(capacities) >= trace.units.unique().numel() * trace.unit_bytes:
        distances = torch.where(_previous(trace.units) < 0, NEVER, 0)  # nothing is ever forgotten
    else:
        distances = stack_distances(trace.units)
    missed = [distances >= capacity // trace.unit_bytes for capacity in capacities]
    table["misses"] = [int(reads.sum()) for reads in missed]
    table["hit_rate"] = 1 - table.misses / requests
    table["memory_bytes"] = table.misses * trace.unit_bytes
    if trace.sectors is not None:
        requested = int((trace.requests * trace.sectors).sum())
        table["sector_hit_rate"] = [1 - int(trace.sectors[reads].sum()) / requested for reads in missed]
    return table


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


def _previous(units: Tensor) -> Tensor:
    """Read of the same unit that came last before each read; -1 where none did."""
    by_unit = units.argsort(stable=True)
    again = units[by_unit[1:]] == units[by_unit[:-1]]
    previous = torch.full_like(units, -1)
    previous[by_unit[1:][again]] = by_unit[:-1][again]
    return previous
