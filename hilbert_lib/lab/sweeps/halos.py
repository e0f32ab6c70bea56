"""Attention on a grid over ranks, as the ring's harness measures it, and plans of more ranks (notebook 07)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import prod
from typing import ClassVar

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.attention.api import neighbourhood_attention
from hilbert_lib.lab.exact_rows import SampledRows
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.ring.attention import ring_neighbourhood_attention
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import Shards, plan_halo
from hilbert_lib.ring.plan.shards import Rectangles, Runs

ALONE = "each by itself"  # every rank computes what it can without the others
RECTANGLES, STRIPS, RUNS = SHARDINGS = ("rectangles", "strips", "Hilbert runs")
GRID_RESULTS = "grids.jsonl"  # beside the results of sequences, which have other columns
OF_ALL_SIDES = ("sides", "repetitions")
SAMPLED_QUERIES = 3  # of each head: two where parts meet, one anywhere


def sharding(kind: str, shape: tuple[int, ...], ranks: int) -> Shards:
    """Equal shards of a kind.

    >>> sharding("strips", (8, 8), 4)
    Rectangles(parts=(4, 1), cuts=None)
    """
    if kind == RUNS:
        order = Ordering.from_curve("hilbert", prod(shape), grid=shape)
        return Runs(order, shard_lengths_for(prod(shape), ranks))
    return Rectangles((ranks, *[1] * (len(shape) - 1))) if kind == STRIPS else Rectangles.compact(shape, ranks)


@dataclass(frozen=True)
class GridOverRanks:
    """One grid over some ranks, and the sides that compute it in turn: shardings, or `ALONE`.

    Fields that `Work` has are its.
    """

    sweep: str
    ranks: int
    shape: tuple[int, ...]
    window: tuple[int, ...]
    heads: int
    head_dim: int
    sides: tuple[str, ...] = (RECTANGLES,)
    backward: bool = True
    repetitions: int = 10
    dtype: str = "bfloat16"
    sustained_seconds: float = 0.0
    is_counted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("shape", "window", "sides"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if unknown := set(self.sides) - {*SHARDINGS, ALONE}:
            raise ValueError(f"sides must be of {', '.join((*SHARDINGS, ALONE))}; got {', '.join(sorted(unknown))}")
        spread = [sharding(RECTANGLES if side == ALONE else side, self.shape, self.ranks) for side in self.sides]
        if len({one.count(self.shape, rank) for one in spread for rank in range(self.ranks)}) > 1:
            raise ValueError(f"shape must be cut into {self.ranks} equal parts by every side, got {self.shape}")

    @classmethod
    def scaled(cls, sweep: str, ranks: int, text: str, **rest) -> "GridOverRanks":
        """A grid of which each rank has as much as `Workload.on_grid` reads from a text; the longer axes grow last.

        >>> GridOverRanks.scaled("grid weak", 4, "16x32x32 3x5x5 2x16").shape
        (16, 64, 64)
        """
        one = Workload.on_grid(text, device=torch.device("cpu"))
        shape, factor = list(one.pattern.shape), 1
        while factor < ranks:
            step = next(n for n in range(2, ranks + 1) if ranks // factor % n == 0)
            shortest = min(range(len(shape))[-2:], key=lambda n: shape[n])
            shape[shortest], factor = shape[shortest] * step, factor * step
        return cls(sweep, ranks, tuple(shape), one.pattern.window, one.heads, one.head_dim, **rest)

    def identity(self, side: str) -> dict:
        """What a record of a side is known by, as JSON gives it back."""
        fields = {name: value for name, value in asdict(self).items() if name not in OF_ALL_SIDES}
        return fields | {"shape": list(self.shape), "window": list(self.window), "side": side}

    @property
    def kv_heads(self) -> int:
        """As many as heads."""
        return self.heads

    @property
    def rows(self) -> int:
        """How many cells a rank holds."""
        return prod(self.shape) // self.ranks

    @cached_property
    def near(self) -> Neighbourhood:
        """Who sees whom on the whole grid."""
        return Neighbourhood(self.shape, self.window)

    def planned(self, side: str) -> dict:
        """What the plan says of the costliest rank."""
        near, ranks = (self._own, 1) if side == ALONE else (self.near, self.ranks)
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "dtype": getattr(torch, self.dtype)}
        found = halo_costs(near, RECTANGLES if side == ALONE else side, ranks, **sizes)
        held = [found.pop(name) for name in ("memory_forward", "memory_backward")]
        found["planned_bytes"] = held[self.backward]
        return found | {"flop_forward": 4 * self.heads * self.head_dim * near.pairs // ranks}

    def attention(self, side: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
        """A call that gives a side's output, and the leaves that it depends on."""
        if side == ALONE:
            return partial(neighbourhood_attention, q, k, v, self._own), (q, k, v)
        options = {"shards": self._shards(side)}

        def attend() -> Tensor:
            out = ring_neighbourhood_attention(q, k, v, self.near, **options)
            options["validate"] = False  # the first call was
            return out

        return attend, (q, k, v)

    def errors(self, side: str, inputs: Sequence[Tensor | None], out: Tensor, grads: Sequence[Tensor]) -> dict:
        """Relative errors of rows at the grid's middle and anywhere; "dq" is the largest of dq, dk and dv."""
        if side == ALONE:
            return {}
        cells = self._shards(side).cells(self.shape, dist.get_rank()).to(out.device)
        slots = torch.full((self.near.length,), -1, dtype=torch.int64, device=out.device)
        slots[cells] = torch.arange(len(cells), device=out.device)
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randint(self.near.length, (self.heads, SAMPLED_QUERIES), generator=generator, device="cpu")
        middle = sum(n // 2 * prod(self.shape[axis + 1 :]) for axis, n in enumerate(self.shape))
        drawn[:, 0], drawn[:, 1] = middle, max(0, middle - 1)
        spread = partial(Spread, length=self.near.length, heads=self.heads, row_of=slots.__getitem__)
        return spread_errors(spread, self.near, list(drawn), inputs, out, grads, keys=1)

    def _shards(self, side: str) -> Shards:
        return sharding(side, self.shape, self.ranks)

    @property
    def _own(self) -> Neighbourhood:
        box = self._shards(RECTANGLES).box(self.shape, rank=0)
        return Neighbourhood(tuple(map(len, box)), self.window)


class Spread:
    """A tensor (1, rows, heads, head_dim) whose rows lie on the ranks: indexed as `exact_rows` does, all fetch them.

    length: of the whole. heads: those of k; of more, one in each group is shown. row_of: of positions the row of `own`,
    or -1.
    """

    def __init__(self, own: Tensor, *, length: int, heads: int, row_of: Callable[[Tensor], Tensor]):
        self._own, self._row_of, self.device = own, row_of, own.device
        self._group, self.shape = own.shape[2] // heads, (1, length, heads, own.shape[3])

    def __getitem__(self, at: tuple[int, Tensor, int]) -> Tensor:
        _, positions, head = at
        slots = self._row_of(positions)
        rows = torch.zeros(len(slots), self.shape[3], dtype=torch.float64, device=self.device)
        rows[slots >= 0] = self._own[0, slots[slots >= 0], head * self._group + head % self._group].double()
        dist.all_reduce(rows)
        return rows


def spread_errors(
    spread: Callable[[Tensor], Spread],
    pattern: Pattern,
    queries: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    out: Tensor,
    grads: Sequence[Tensor],
    *,
    keys: int,
    is_causal: bool = False,
) -> dict:
    """Relative errors of "out" and, where there are gradients, "dq", as `SampledRows` finds them over the ranks."""
    given = (*inputs[:3], out if inputs[3] is None else inputs[3])
    sampled = SampledRows([spread(x) for x in given], pattern, queries, keys=keys, is_causal=is_causal)
    found = {"out": sampled.error([spread(out)])}
    return found | ({"dq": sampled.error([spread(x) for x in grads])} if grads else {})


def halo_costs(near: Neighbourhood, kind: str, ranks: int, *, heads: int, head_dim: int, dtype: torch.dtype) -> dict:
    """Of a plan the most of any rank: bytes received, the share of queries at a border, and bytes of memory."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": dtype}
    costs = plan_halo(near, sharding(kind, near.shape, ranks), **sizes).ranks
    names = ("received_forward", "received_backward", "memory_forward", "memory_backward")
    most = {name: max(getattr(cost, name) for cost in costs) for name in names}
    return most | {"border": max(cost.border / cost.cells for cost in costs if cost.cells)}


def halo_table(near: Neighbourhood, ranks: Iterable[int], kinds: Iterable[str] = SHARDINGS, **sizes) -> pd.DataFrame:
    """`halo_costs` of one grid by ranks and sharding, a row a plan.

    >>> sizes = {"heads": 1, "head_dim": 8, "dtype": torch.bfloat16}
    >>> halo_table(Neighbourhood((16, 16), 5), [4], **sizes).received_forward.tolist()
    [1152, 2048, 1152]
    """
    rows = []
    for p in ranks:
        for kind in kinds:
            rows.append({"ranks": p, "sharding": kind, "cells": near.length // p} | halo_costs(near, kind, p, **sizes))
    return pd.DataFrame(rows)
