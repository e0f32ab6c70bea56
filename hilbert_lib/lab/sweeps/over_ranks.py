"""A workload over several ranks, and the ways that compute it: what notebook 07 measures.

`sequences`, `halos` and `clouds` answer the same questions: along a sequence, on a grid, over points.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hilbert_lib.lab.sweeps import clouds, halos, sequences
from hilbert_lib.lab.sweeps.clouds import CloudWork
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern
from hilbert_lib.lab.sweeps.spread import spread_errors
from hilbert_lib.lab.workload import Workload
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

# What a record is known by besides the fields of its workload.
OWN_FIELDS = ("sweep", "ranks", "backward", "sustained_seconds")
IDENTITY = {*OWN_FIELDS, *sequences.FIELDS, *halos.FIELDS, *clouds.FIELDS, "side"}


@dataclass(frozen=True)
class OverRanks:
    """A workload that ranks share equally, and the sides that compute it in turn.

    workload: the call on all tokens, cells or points. A rank draws its own share of them.
    sides: of `sequences.SIDES`, `halos.SIDES` or `clouds.SIDES`; by default the first one.
    backward: whether gradients are computed too.
    repetitions: samples a side.
    sustained_seconds: how long forwards and backwards run back to back before they are timed so too, in windows of a
        fifth of it; 0 for single calls alone.

    Raises ValueError for shares that are not equal, an unknown side, or another pattern.
    """

    sweep: str
    ranks: int
    workload: Workload | CloudWork
    sides: tuple[str, ...] = ()
    backward: bool = True
    repetitions: int = 10
    sustained_seconds: float = 0.0

    def __post_init__(self) -> None:
        is_cloud = isinstance(self.workload, CloudWork)
        if not is_cloud and not isinstance(self.workload.pattern, DilatedPattern | Neighbourhood):
            raise ValueError(f"pattern must be a DilatedPattern or a Neighbourhood, got {self.workload.pattern}")
        object.__setattr__(self, "sides", tuple(self.sides) or (next(iter(self.kind.SIDES)),))
        self.kind.check(self.workload, self.ranks, self.sides)

    @classmethod
    def spanning(
        cls,
        sweep: str,
        ranks: int,
        tokens: int,
        *,
        heads: int,
        head_dim: int,
        first_segment: int,
        growth: int = 2,
        is_causal: bool = False,
        dtype: str = "bfloat16",
        **rest,
    ) -> "OverRanks":
        """A sequence with the branches of `spanning_pattern`. rest: sides and so on."""
        pattern, sizes = spanning_pattern(tokens, first_segment, growth), {"is_causal": is_causal, "dtype": dtype}
        return cls(sweep, ranks, Workload(pattern, tokens, heads, head_dim, torch.device("cpu"), **sizes), **rest)

    @classmethod
    def on_grid(cls, sweep: str, ranks: int, text: str, **rest) -> "OverRanks":
        """A grid of which each rank has as much as `Workload.on_grid` reads from a text. rest: sides and so on."""
        return cls(sweep, ranks, halos.scaled(Workload.on_grid(text, device=torch.device("cpu")), ranks), **rest)

    @classmethod
    def on_points(cls, sweep: str, ranks: int, text: str, **rest) -> "OverRanks":
        """A cloud of which each rank has as much as `CloudWork.named` reads from a text. rest: sides and so on."""
        return cls(sweep, ranks, CloudWork.named(text, ranks), **rest)

    @classmethod
    def of(cls, fields: dict) -> "OverRanks":
        """Side that `fields`, or a record, tell of. What is left out has its default."""
        kind = clouds if "cloud" in fields else halos if "shape" in fields else sequences
        options = {name: fields[name] for name in (*OWN_FIELDS, "sides", "repetitions") if name in fields}
        return cls(workload=kind.workload_of(fields), **options)

    @property
    def fields(self) -> dict:
        """All of it as JSON takes it."""
        values = {name: getattr(self, name) for name in (*OWN_FIELDS, "sides", "repetitions")}
        return values | self.kind.fields_of(self.workload)

    def identity(self, side: str) -> dict:
        """Fields by which a record of a side is known."""
        values = {name: getattr(self, name) for name in OWN_FIELDS}
        return values | self.kind.fields_of(self.workload) | {"side": side}

    @property
    def kind(self) -> ModuleType:
        """`sequences`, `halos` or `clouds`."""
        if isinstance(self.workload, CloudWork):
            return clouds
        return halos if isinstance(self.workload.pattern, Neighbourhood) else sequences

    @property
    def rows(self) -> int:
        """Number of tokens, cells or points of a rank."""
        return self.workload.length // self.ranks

    def planned(self, side: str) -> dict:
        """Plan of the costliest rank."""
        return self.kind.planned(self.workload, self.ranks, side, backward=self.backward)

    def attention(self, side: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
        """A call that gives a side's output, and the leaves that it depends on."""
        return self.kind.attention(self.workload, self.ranks, side, q, k, v)

    def errors(self, side: str, inputs: Sequence[Tensor | None], out: Tensor, grads: Sequence[Tensor]) -> dict:
        """Relative errors of "out" and "dq", as `spread_errors` finds them; empty where nothing is compared."""
        rows = self.kind.compared_rows(self.workload, self.ranks, side, out.device)
        return {} if rows is None else spread_errors(self.workload, rows, inputs, out, grads)
