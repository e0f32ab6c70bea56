"""The spread of a call's tokens over ranks: along a sequence, on a grid, and of points.

What else differs between these kinds of pattern is here: their options, what a rank holds, and what it computes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hilbert_lib.attention.autograd import needs_gradient
from hilbert_lib.attention.backends.backend import serves_all_keys
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.choice import serving
from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.attention.transforms import refuse_tracers
from hilbert_lib.attention.validation import as_pattern, refuse_options
from hilbert_lib.graph_cache import cached_for_graphs
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood
from hilbert_lib.patterns.union import Union
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import Shards, check_shards, plan_halo
from hilbert_lib.ring.plan.plan import check_planning, plan_ring
from hilbert_lib.ring.plan.shards import Rectangles, Runs
from hilbert_lib.ring.points import PointShard
from hilbert_lib.ring.rank import halo, passes
from hilbert_lib.ring.rank.blocks import Job
from hilbert_lib.ring.rank.call import by_pattern
from hilbert_lib.ring.rank.halo import HaloJob
from hilbert_lib.ring.rank.halo_layout import HaloLayout
from hilbert_lib.ring.rank.halo_layout import layout_of as halo_layout_of
from hilbert_lib.ring.rank.layout import Layout, layout_of, parts_of

# The options of a ring that one kind takes and the other does not, as they are where nobody gives them.
DEFAULTS = {"transport": "auto", "weights": None, "memory_limit": None, "shards": None}
Place = tuple[int, int]  # the number of a pattern in a union, and of how many
ALONE = 0, 1  # the place of a pattern that is the whole call


@dataclass(frozen=True, eq=False)
class SequenceSpread:
    """A contiguous shard of the sequence on each rank, in rank order; rows travel as `plan_ring` says."""

    planning: dict  # transport, weights and memory_limit, as `plan_ring` takes them
    kv_ordering: OrderingSpec | None  # in which each shard of k and v is stored
    return_lse: bool

    options: ClassVar[frozenset[str]] = frozenset(("transport", "weights", "memory_limit"))
    lengths_vary: ClassVar[bool] = True  # between calls: ranks tell each other
    passes: ClassVar = passes

    @classmethod
    def checked(cls, pattern: Pattern, options: dict, ranks: int) -> Self:
        """The spread that the options of a call on so many ranks ask for."""
        refuse_options(pattern, {name: options[name] for name in DEFAULTS}, DEFAULTS, cls.options)
        planning = check_planning(options["transport"], options["weights"], options["memory_limit"], ranks)
        if isinstance(pattern, Union) and planning["memory_limit"] is not None:
            raise ValueError(
                f"memory_limit must be None for a Union, whose patterns are planned one by one; "
                f"got {planning['memory_limit']}"
            )
        return cls(planning, check_spec(options["kv_ordering"]), options["return_lse"])

    def for_whole(self, k: Tensor) -> dict:
        """The arguments of `attend` on the one rank that there is."""
        return {"kv_ordering": self.ordering(k)}

    def for_shard(self, k: Tensor, rank: int) -> dict:
        """The arguments of `validated` for a rank's shard."""
        return {"kv_ordering": self.ordering(k)}

    def ordering(self, k: Tensor) -> Ordering | None:
        """The order in which a shard of k is stored."""
        refuse_tracers(k)  # as the first who reads a size
        # k itself is checked elsewhere.
        has_rows = isinstance(k, Tensor) and not k.is_nested and k.dim() > 1 and k.shape[1]
        return self.kv_ordering.ordering(k.shape[1]) if self.kv_ordering is not None and has_rows else None

    def check_backend(self, tensors: Tensors, request: Request, backend: str, group: ProcessGroup) -> None:
        """Raise ValueError where a backend that is asked for by name cannot serve the call."""
        if backend == "auto":
            return
        if reason := backends_for(request.pattern)[backend].refusal_whatever_the_keys(tensors.q, request):
            raise ValueError(f"backend={backend!r} {reason}")  # what hangs on keys is refused part by part: see `job`

    @property
    def words(self) -> dict[str, object]:
        """The options that ranks must agree on."""
        # Of return_lse, since a rank computes gradients of others' lse too.
        return self.planning | {"kv_ordering": self.kv_ordering, "return_lse": self.return_lse}

    def expected_lengths(
        self, tensors: Tensors, request: Request, agreed: tuple[int, ...] | None, rank: int
    ) -> tuple[int, ...] | None:
        """The lengths of all shards that a rank may go by while ranks compare what they ask for; None if it must wait.

        Mostly they are as in the last call. A rank waits with dropout, whose seed is sent first, and where it has
        nothing to compute. agreed: the lengths of the last validated call, if there was one.
        """
        is_as_before = agreed is not None and agreed[rank] == tensors.q.shape[1]
        return agreed if is_as_before and tensors.q.numel() and request.dropout_p == 0.0 else None

    def lengths_unvalidated(self, tensors: Tensors, agreed: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The lengths of all shards where ranks compare nothing."""
        rows = tensors.q.shape[1]
        if agreed[rank] == rows:
            return agreed
        if len(set(agreed)) > 1:  # this rank cannot know how many rows the others have now
            raise ValueError(
                f"validate must be True where shards of unequal length change: this rank's had {agreed[rank]} rows in "
                f"the last validated call, and has {rows}"
            )
        return (rows,) * len(agreed)

    def job(
        self, tensors: Tensors, request: Request, place: Place, backend: str, lengths: tuple[int, ...],
        group: ProcessGroup,
    ) -> Job:  # fmt: skip
        """The work of a rank for one pattern."""
        options = _sizes(tensors) | self.planning | {"is_causal": request.is_causal}
        options |= {"padded": request.key_padding_mask is not None, "ordered": self.kv_ordering is not None}
        key = request.pattern, lengths, tuple(options.items()), place
        layout = sequence_layout(*key, group.rank(), tensors.q.device)
        if backend != "auto" and (reason := _refusal_of_parts(*key, backend, tensors.q.device)):
            raise ValueError(f"backend={backend!r} {reason}")
        gradient = needs_gradient(*tensors)
        lse_gradient = gradient and self.return_lse
        return Job(layout, request, backend, gradient, self.ordering(tensors.k), ref(group), lse_gradient)


@dataclass(frozen=True, eq=False)
class GridSpread:
    """Some cells of the grid on each rank; rows of k and v travel as `plan_halo` says."""

    shards: Shards
    shape: tuple[int, ...]  # sides of the grid

    options: ClassVar[frozenset[str]] = frozenset(("shards",))
    lengths_vary: ClassVar[bool] = False
    passes: ClassVar = halo

    @classmethod
    def checked(cls, pattern: Pattern, options: dict, ranks: int | None) -> Self:
        """The spread over so many ranks, if known, that the options of a call ask for."""
        refuse_options(pattern, {name: options[name] for name in DEFAULTS}, DEFAULTS, cls.options)
        shards, ordering, shape = options["shards"], options["ordering"], pattern.shape
        if shards is not None and ordering is not None:
            raise ValueError("ordering must be None where shards are given: Runs have an ordering of their own")
        if ordering is not None:
            shards = (
                _runs(ordering, ranks) if isinstance(ordering, Ordering) else Runs(ordering, ())
            )  # which refuses it
        shards = Rectangles.compact(shape, ranks) if shards is None else check_shards(shards)
        shards.check(shape)
        if ranks is not None and shards.ranks != ranks:
            raise ValueError(f"shards must be those of {ranks} ranks, got {shards}")
        return cls(shards, shape)

    def for_whole(self, k: Tensor) -> dict:
        """The arguments of `attend` on the one rank that there is."""
        return {"ordering": self.shards.ordering if isinstance(self.shards, Runs) else None}

    def for_shard(self, k: Tensor, rank: int) -> dict:
        """The arguments of `validated` for a rank's cells."""
        return {"ordering": None, "shard_cells": (self.shards.count(self.shape, rank), f"rank {rank} in {self.shards}")}

    def check_backend(self, tensors: Tensors, request: Request, backend: str, group: ProcessGroup) -> None:
        """Raise ValueError where no backend, or not the one that is asked for by name, can serve the call."""
        grid_box = tuple(map(range, self.shape))
        whole_grid = GridPart(grid_box, grid_box, grid_box)
        _serving(tensors, replace(request, part=whole_grid), backend)  # refuse what no rank can do
        if backend != "auto" and tensors.q.shape[0]:
            for part_tensors, part in by_pattern(
                tensors, request
            ):  # this rank's parts alone may be refused: all ranks hear it
                self.job(part_tensors, part, ALONE, backend, (), group)

    @property
    def words(self) -> dict[str, object]:
        """The options that ranks must agree on."""
        return {"shards": self.shards}

    def expected_lengths(
        self, tensors: Tensors, request: Request, agreed: tuple[int, ...] | None, rank: int
    ) -> tuple[int, ...]:
        """The number of cells of each rank, which every rank knows."""
        return _counts(self.shards, self.shape)

    def lengths_unvalidated(self, tensors: Tensors, agreed: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
        """The number of cells of each rank."""
        return _counts(self.shards, self.shape)

    def job(
        self, tensors: Tensors, request: Request, place: Place, backend: str, lengths: tuple[int, ...],
        group: ProcessGroup,
    ) -> HaloJob:  # fmt: skip
        """The work of a rank for one pattern."""
        key = request.neighbourhoods, self.shards, tuple(_sizes(tensors).items())
        layout = grid_layout(*key, group.rank(), tensors.q.device)
        parts = (layout.interior, None), *((border.part, border.slots) for border in layout.borders)
        names = [_serving(tensors, replace(request, part=part, slots=slots), backend) for part, slots in parts]
        return HaloJob(layout, request, names[0], tuple(names[1:]), ref(group))


@dataclass(frozen=True, eq=False)
class PointSpread:
    """Some points on each rank, as a `PointShard` says; rows of k and v travel as its `plan` says."""

    points: PointShard

    options: ClassVar[frozenset[str]] = frozenset()
    lengths_vary: ClassVar[bool] = False
    passes: ClassVar = halo

    @classmethod
    def checked(cls, pattern: PointShard, options: dict, ranks: int) -> Self:
        """The spread over so many ranks that the options of a call ask for."""
        refuse_options(pattern, {name: options[name] for name in DEFAULTS}, DEFAULTS)
        if ranks != len(pattern.lengths):
            raise ValueError(f"group must be the {len(pattern.lengths)} ranks of {pattern}, got {ranks}")
        return cls(pattern)

    def for_whole(self, k: Tensor) -> dict:
        """The arguments of `attend` on the one rank that there is."""
        return {}

    def for_shard(self, k: Tensor, rank: int) -> dict:
        """The arguments of `validated` for a rank's points."""
        return {"shard_cells": (self.points.key_lengths[rank], f"rank {rank} in {self.points}")}

    def check_backend(self, tensors: Tensors, request: Request, backend: str, group: ProcessGroup) -> None:
        """Raise ValueError where no backend, or not the one that is asked for by name, can serve the call."""
        if group is not self.points.known_group():
            raise ValueError(f"group must be the one that {self.points} was made with, got another of as many ranks")
        if tensors.q.shape[0]:
            self.job(tensors, request, ALONE, backend, (), group)

    @property
    def words(self) -> dict[str, object]:
        """The options that ranks must agree on."""
        return {"points": f"{self.points} of which {self.points.travelling.by_ranks} travel"}

    def expected_lengths(
        self, tensors: Tensors, request: Request, agreed: tuple[int, ...] | None, rank: int
    ) -> tuple[int, ...]:
        """The number of points of each rank, which every rank knows."""
        return self.points.lengths

    def lengths_unvalidated(self, tensors: Tensors, agreed: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
        """The number of points of each rank."""
        return self.points.lengths

    def job(
        self, tensors: Tensors, request: Request, place: Place, backend: str, lengths: tuple[int, ...],
        group: ProcessGroup,
    ) -> HaloJob:  # fmt: skip
        """The work of a rank."""
        layout = self.points.layout(tensors.k.shape[2], tensors.q.device)
        interior = replace(request, part=layout.interior, lists=layout.interior_lists)
        names = [_serving(tensors, interior, backend)]
        for border in layout.borders:
            queries = tensors.q.shape[1] if border.queries is None else len(border.queries)
            sizes = queries, len(border.filled)
            rows = zip((tensors.q, tensors.k), sizes, strict=True)
            q, k = (x.new_empty(()).expand(len(x), count, *x.shape[2:]) for x, count in rows)  # without values
            part = replace(request, part=border.part, lists=border.lists)
            names.append(_serving(tensors._replace(q=q, k=k), part, backend))
        return HaloJob(layout, request, names[0], tuple(names[1:]), ref(group))


Spread = SequenceSpread | GridSpread | PointSpread


def spread_of(pattern: object) -> type[Spread]:
    """The kind of spread of a pattern; each kind refuses what is no pattern."""
    if isinstance(pattern, PointShard):
        return PointSpread
    is_by_head = isinstance(pattern, tuple | list)
    return GridSpread if is_by_head or getattr(pattern, "shape", None) is not None else SequenceSpread


SERVED = "a DilatedPattern, a Neighbourhood, a Union of these or a PointShard where ranks share the tokens"


def check_served(pattern: object) -> Pattern:
    """The argument as a pattern; TypeError unless a ring serves it."""
    pattern = as_pattern(pattern, SERVED)
    if isinstance(pattern, PointShard):
        return pattern
    if isinstance(pattern, PointNeighbourhood):
        raise TypeError(f"pattern must be a PointShard of each rank's cells where ranks share points, got {pattern!r}")
    for part in pattern.patterns if isinstance(pattern, Union) else (pattern,):
        if not isinstance(part, DilatedPattern | Neighbourhood | HeadNeighbourhoods):
            raise TypeError(f"pattern must be {SERVED}; got {part.noun}")
    return pattern


def check_spec(spec: object) -> OrderingSpec | None:
    """The argument kv_ordering of a ring, if it is an OrderingSpec or None."""
    if spec is not None and not isinstance(spec, OrderingSpec):
        raise TypeError(f"kv_ordering must be an OrderingSpec or None, got {type(spec).__name__}")
    return spec


def _serving(tensors: Tensors, request: Request, backend: str) -> str:
    return serving(tensors.q, tensors.k, request, backend, gradient=needs_gradient(*tensors)) if request.part else ""


def _sizes(tensors: Tensors) -> dict[str, object]:
    # The sizes of a call by the names that plans take.
    batch, _, heads, head_dim = tensors.q.shape
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": tensors.k.shape[2],
        "head_dim": head_dim,
        "dtype": tensors.q.dtype,
    }


@lru_cache(maxsize=64)
def _runs(ordering: Ordering, ranks: int) -> Runs:
    return Runs(ordering, shard_lengths_for(ordering.length, ranks))


@lru_cache(maxsize=64)
def _counts(shards: Shards, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shards.count(shape, rank) for rank in range(shards.ranks))


@cached_for_graphs(maxsize=64)
def sequence_layout(
    pattern: DilatedPattern, lengths: tuple[int, ...], options: tuple, place: Place, rank: int, device: torch.device
) -> Layout:
    """A rank's part of the plan of one pattern; options are those of `plan_ring`."""
    plan = plan_ring(pattern, lengths, **dict(options))
    number, count = place
    with torch.device("cpu"):  # where it is computed, whatever torch's default device is
        return layout_of(plan, rank, device, range(number, number + count * len(pattern.branches), count))


@lru_cache(maxsize=64)
def _refusal_of_parts(
    pattern: DilatedPattern, lengths: tuple[int, ...], options: tuple, place: Place, backend: str, device: torch.device
) -> str:
    # Why a backend does not serve some part of a rank, or "": the same answer on all ranks, so that all raise.
    own_backend, sizes = backends_for(pattern)[backend], dict(options)
    if own_backend.of_keys is serves_all_keys:
        return ""
    request = Request(pattern, sizes["is_causal"], sizes["head_dim"] ** -0.5)
    element = torch.empty(1, dtype=sizes["dtype"], device=device)
    for rank in range(len(lengths)):
        layout = sequence_layout(pattern, lengths, options, place, rank, torch.device("cpu"))
        for shape_of_q, shape_of_k, part in parts_of(layout, lengths[rank], sizes["batch"], sizes["heads"]):
            q, k = (element.expand(*shape, sizes["head_dim"]) for shape in (shape_of_q, shape_of_k))
            if reason := own_backend.refusal(q, replace(request, **part), k):
                return f"cannot serve a part of rank {rank}: {reason}"
    return ""


@cached_for_graphs(maxsize=64)
def grid_layout(neighbourhoods: tuple, shards: Shards, sizes: tuple, rank: int, device: torch.device) -> HaloLayout:
    """A rank's part of the plan of one pattern; sizes are those of `plan_halo`."""
    return halo_layout_of(plan_halo(neighbourhoods, shards, **dict(sizes)), rank, device)


@cached_for_graphs(maxsize=64)
def cells_of_rank(shards: Shards, shape: tuple[int, ...], rank: int, device: torch.device) -> Tensor:
    """The cells of a grid that a rank holds, as it stores them: (cells,) int64, counted row by row."""
    return shards.cells(shape, rank).to(device)
