"""Attention on a grid over ranks: ways to cut it, what is planned of each, and its call (notebook 07)."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.attention.api import neighbourhood_attention
from hilbert_lib.lab.sweeps.spread import ALONE, ComparedRows
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.ring.attention import ring_neighbourhood_attention
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import Shards, plan_halo
from hilbert_lib.ring.plan.shards import Rectangles, Runs

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

RECTANGLES, STRIPS, RUNS = SHARDINGS = ("rectangles", "strips", "Hilbert runs")
SIDES = (*SHARDINGS, ALONE)
GRID_RESULTS = "grids.jsonl"  # beside the results of sequences, which have other columns
SAMPLED_QUERIES = 3  # of each head: two where parts meet, one anywhere
FIELDS = ("shape", "window", "heads", "head_dim", "dtype")
COUNTS_BYTES = True  # whether a record holds the bytes that were handed to the collectives


def sharding(kind: str, shape: tuple[int, ...], ranks: int) -> Shards:
    """Equal shards of a kind.

    >>> sharding("strips", (8, 8), 4)
    Rectangles(parts=(4, 1), cuts=None)
    """
    if kind == RUNS:
        order = Ordering.from_curve("hilbert", prod(shape), grid=shape)
        return Runs(order, shard_lengths_for(prod(shape), ranks))
    return Rectangles((ranks, *[1] * (len(shape) - 1))) if kind == STRIPS else Rectangles.compact(shape, ranks)


def check(workload: Workload, ranks: int, sides: tuple[str, ...]) -> None:
    """ValueError for an unknown side, or for parts that are not equal."""
    if unknown := set(sides) - set(SIDES):
        raise ValueError(f"sides must be of {', '.join(SIDES)}; got {', '.join(sorted(unknown))}")
    shape = workload.pattern.shape
    cuts = [sharding(RECTANGLES if kind == ALONE else kind, shape, ranks) for kind in sides]
    if len({shards.count(shape, rank) for shards in cuts for rank in range(ranks)}) > 1:
        raise ValueError(f"shape must be cut into {ranks} equal parts by every side, got {shape}")


def fields_of(workload: Workload) -> dict:
    """The workload in a record, as JSON gives it back: `FIELDS`."""
    grid = list(workload.pattern.shape), list(workload.pattern.window)
    return dict(zip(FIELDS, (*grid, workload.heads, workload.head_dim, workload.dtype), strict=True))


def workload_of(record: dict) -> Workload:
    """The workload that a record tells of."""
    near = Neighbourhood(tuple(record["shape"]), tuple(record["window"]))
    sizes = {name: record[name] for name in ("heads", "head_dim", "dtype") if name in record}
    return Workload(near, near.length, device=torch.device("cpu"), **sizes)


def scaled(workload: Workload, ranks: int) -> Workload:
    """A grid of which each rank has as much as `workload`; the longer axes grow last.

    >>> scaled(Workload.on_grid("16x32x32 3x5x5 2x16", device=torch.device("cpu")), 4).pattern.shape
    (16, 64, 64)
    """
    shape, factor = list(workload.pattern.shape), 1
    while factor < ranks:
        step = next(n for n in range(2, ranks + 1) if ranks // factor % n == 0)
        shortest = min(range(len(shape))[-2:], key=lambda n: shape[n])
        shape[shortest], factor = shape[shortest] * step, factor * step
    near = replace(workload.pattern, shape=tuple(shape))
    return replace(workload, pattern=near, length=near.length)


def own_part(workload: Workload, ranks: int) -> Workload:
    """A rank's rectangle as a grid of its own."""
    box = sharding(RECTANGLES, workload.pattern.shape, ranks).box(workload.pattern.shape, rank=0)
    near = replace(workload.pattern, shape=tuple(map(len, box)))
    return replace(workload, pattern=near, length=near.length)


def planned(workload: Workload, ranks: int, side: str, *, backward: bool) -> dict:
    """Plan of the costliest rank: bytes received, FLOP, and bytes of memory."""
    kind = side
    if side == ALONE:
        workload, ranks, kind = own_part(workload, ranks), 1, RECTANGLES
    sizes = {"heads": workload.heads, "head_dim": workload.head_dim, "dtype": getattr(torch, workload.dtype)}
    costs = halo_costs(workload.pattern, kind, ranks, **sizes)
    memory = [costs.pop(name) for name in ("memory_forward", "memory_backward")]
    return costs | {"planned_bytes": memory[backward], "flop_forward": workload.useful.flop_forward // ranks}


def attention(
    workload: Workload, ranks: int, side: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """A call that gives a side's output on this rank's part, and the leaves that it depends on."""
    if side == ALONE:
        return partial(neighbourhood_attention, q, k, v, own_part(workload, ranks).pattern), (q, k, v)
    options = {"shards": sharding(side, workload.pattern.shape, ranks)}

    def attend() -> Tensor:
        out = ring_neighbourhood_attention(q, k, v, workload.pattern, **options)
        options["validate"] = False  # the first call was
        return out

    return attend, (q, k, v)


def compared_rows(workload: Workload, ranks: int, side: str, device: torch.device) -> ComparedRows | None:
    """Rows at the grid's middle and anywhere; None where ranks compute parts of their own."""
    if side == ALONE:
        return None
    shape, cells = workload.pattern.shape, workload.length
    local_cells = sharding(side, shape, ranks).cells(shape, dist.get_rank()).to(device)
    row_of = torch.full((cells,), -1, dtype=torch.int64, device=device)
    row_of[local_cells] = torch.arange(len(local_cells), device=device)
    generator = torch.Generator("cpu").manual_seed(0)
    queries = torch.randint(cells, (workload.heads, SAMPLED_QUERIES), generator=generator, device="cpu")
    middle = sum(n // 2 * prod(shape[axis + 1 :]) for axis, n in enumerate(shape))
    queries[:, 0], queries[:, 1] = middle, max(0, middle - 1)
    return ComparedRows(workload.pattern, list(queries), row_of.__getitem__, keys=1)


def halo_costs(near: Neighbourhood, kind: str, ranks: int, *, heads: int, head_dim: int, dtype: torch.dtype) -> dict:
    """Of a plan the most of any rank: bytes received, the share of queries at a border, and bytes of memory."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": dtype}
    costs = plan_halo(near, sharding(kind, near.shape, ranks), **sizes).ranks
    names = ("received_forward", "received_backward", "memory_forward", "memory_backward")
    largest = {name: max(getattr(cost, name) for cost in costs) for name in names}
    return largest | {"border": max(cost.border / cost.cells for cost in costs if cost.cells)}


def halo_table(near: Neighbourhood, ranks: Iterable[int], kinds: Iterable[str] = SHARDINGS, **sizes) -> "pd.DataFrame":
    """`halo_costs` of one grid by ranks and sharding, a row a plan.

    >>> sizes = {"heads": 1, "head_dim": 8, "dtype": torch.bfloat16}
    >>> halo_table(Neighbourhood((16, 16), 5), [4], **sizes).received_forward.tolist()
    [1152, 2048, 1152]
    """
    import pandas as pd

    rows = []
    for p in ranks:
        for kind in kinds:
            rows.append({"ranks": p, "sharding": kind, "cells": near.length // p} | halo_costs(near, kind, p, **sizes))
    return pd.DataFrame(rows)
