"""Attention over points that ranks share: what is planned of it, and its call (notebook 07)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.api import attend
from hilbert_lib.lab.clouds import CLOUDS, parse_work
from hilbert_lib.lab.sweeps.spread import ALONE, ComparedRows
from hilbert_lib.patterns.points import PointNeighbourhood, point_order
from hilbert_lib.ring.attention import ring_attend
from hilbert_lib.ring.points import PointShard

SHARED = "runs of points"
SIDES = (SHARED, ALONE)
CLOUD_RESULTS = "clouds.jsonl"  # beside the results of sequences, which have other columns
SAMPLED_QUERIES = 3  # of each head: the last of a rank and the first of the next, and one anywhere
FIELDS = ("cloud", "points", "window", "heads", "head_dim", "dtype")
COUNTS_BYTES = True  # whether a record holds the bytes that were handed to the collectives


@dataclass(frozen=True)
class CloudWork:
    """A call over a made cloud, whose points are stored in `point_order`. Its cells are made by the ranks.

    length: points of all ranks.
    """

    cloud: str  # a name of `CLOUDS`
    length: int
    window: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"

    is_causal = False

    @property
    def kv_heads(self) -> int:
        """Of k and v."""
        return self.heads

    @classmethod
    def named(cls, text: str, ranks: int) -> "CloudWork":
        """A cloud of which each rank has as many points as a text says, which `parse_work` takes.

        >>> CloudWork.named("room 1000 5 2x16", 4).length
        4000
        """
        cloud, count, window, heads, head_dim = parse_work(text)
        return cls(cloud, ranks * count, window, heads, head_dim)


def check(work: CloudWork, ranks: int, sides: tuple[str, ...]) -> None:
    """ValueError for an unknown side or cloud, or for parts that are not equal."""
    if unknown := set(sides) - set(SIDES):
        raise ValueError(f"sides must be of {', '.join(SIDES)}; got {', '.join(sorted(unknown))}")
    checks.one_of("cloud", work.cloud, CLOUDS)
    if work.length % ranks:
        raise ValueError(f"points must be a multiple of the ranks, {ranks}, got {work.length}")


def fields_of(work: CloudWork) -> dict:
    """The work in a record: `FIELDS`."""
    return dict(zip(FIELDS, (work.cloud, work.length, work.window, work.heads, work.head_dim, work.dtype), strict=True))


def workload_of(record: dict) -> CloudWork:
    """The work that a record tells of."""
    sizes = {name: record[name] for name in ("window", "heads", "head_dim", "dtype") if name in record}
    return CloudWork(record["cloud"], record["points"], **sizes)


def planned(work: CloudWork, ranks: int, side: str, *, backward: bool) -> dict:
    """Plan of the costliest rank: bytes received, the share of its border, FLOP, and bytes of memory. All ranks ask."""
    points = _shard(work, _device()) if side == SHARED else _own_points(work, _device())
    pairs = torch.tensor(points.pairs, device=points.device)
    dist.all_reduce(pairs, dist.ReduceOp.MAX)
    costs = {"flop_forward": 4 * work.heads * work.head_dim * int(pairs)}
    if side == ALONE:
        return costs | {"received_forward": 0, "received_backward": 0, "border": 0.0, "planned_bytes": None}
    sizes = {"batch": 1, "heads": work.heads, "kv_heads": work.heads, "head_dim": work.head_dim}
    plan = points.plan(dtype=getattr(torch, work.dtype), **sizes)
    for name in ("received_forward", "received_backward"):
        costs[name] = max(getattr(cost, name) for cost in plan.ranks)
    costs["border"] = max(cost.border / cost.cells for cost in plan.ranks)
    memory = "memory_backward" if backward else "memory_forward"
    return costs | {"planned_bytes": max(getattr(cost, memory) for cost in plan.ranks)}


def attention(
    work: CloudWork, ranks: int, side: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """A call that gives a side's output on this rank's points, and the leaves that it depends on."""
    if side == ALONE:
        return partial(attend, q, k, v, _own_points(work, q.device)), (q, k, v)
    points, options = _shard(work, q.device), {}

    def attend_shared() -> Tensor:
        out = ring_attend(q, k, v, points, **options)
        options["validate"] = False  # the first call was
        return out

    return attend_shared, (q, k, v)


def compared_rows(work: CloudWork, ranks: int, side: str, device: torch.device) -> ComparedRows | None:
    """Rows where two ranks meet, and anywhere; None where ranks compute parts of their own."""
    if side == ALONE:
        return None
    points = PointNeighbourhood(_cells(work, device), work.window)
    rows, rank = work.length // ranks, dist.get_rank()
    generator = torch.Generator("cpu").manual_seed(0)
    queries = torch.randint(work.length, (work.heads, SAMPLED_QUERIES), generator=generator, device="cpu")
    queries[:, 0], queries[:, 1] = rows - 1, rows % work.length

    def row_of(positions: Tensor) -> Tensor:
        return torch.where(positions // rows == rank, positions - rank * rows, -1)

    return ComparedRows(points, list(queries), row_of, keys=1)


def _device() -> torch.device:
    is_on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


@cache
def _cells(work: CloudWork, device: torch.device) -> Tensor:
    cells = CLOUDS[work.cloud](work.length).to(device)
    return cells[point_order(cells)]


def _own_cells(work: CloudWork, device: torch.device) -> Tensor:
    return _cells(work, device).tensor_split(dist.get_world_size())[dist.get_rank()]


@cache
def _shard(work: CloudWork, device: torch.device) -> PointShard:
    return PointShard(_own_cells(work, device), work.window)


@cache
def _own_points(work: CloudWork, device: torch.device) -> PointNeighbourhood:
    return PointNeighbourhood(_own_cells(work, device), work.window)
