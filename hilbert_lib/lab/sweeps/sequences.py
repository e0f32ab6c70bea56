"""Attention along a sequence over ranks: ways to share it, what is planned of each, and its call (notebook 07)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.exact_rows import sampled_positions
from hilbert_lib.lab.sweeps.spread import ALONE, ComparedRows
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.plan.plan import plan_ring

TRANSPORTS = ("auto", "ring", "all_gather", "all_to_all")
GATHERED, DENSE_RING = "gathered", "dense ring"
ORDERS = {"linear order": "linear", "hilbert order": "hilbert"}
SIDES = {
    "auto": "dilated rows of k and v travel, each branch by the way that the plan chooses",
    "ring": "dilated rows travel from rank to rank (isend, irecv)",
    "all_gather": "dilated rows travel in one collective",
    "all_to_all": "heads travel: a rank computes some heads of a whole segment",
    GATHERED: "all rows of k and v, dilated or not, are gathered on every rank: the same function",
    DENSE_RING: "all rows of k and v go round a ring, and attention is dense: another function",
    ALONE: "every rank computes the branches inside its shard, without the others",
    **dict.fromkeys(ORDERS, "auto, with k and v of a shard read through the table of this order"),
}
SAMPLED_QUERIES = 16  # of each head
FIELDS = ("tokens", "heads", "kv_heads", "head_dim", "segment_lengths", "dilation_rates", "is_causal", "dtype")
COUNTS_BYTES = False  # whether a record holds the bytes that were handed to the collectives


def check(workload: Workload, ranks: int, sides: tuple[str, ...]) -> None:
    """ValueError for an unknown side, or for shards that are not equal."""
    if unknown := set(sides) - set(SIDES):
        raise ValueError(f"sides must be of {', '.join(SIDES)}; got {', '.join(sorted(unknown))}")
    if workload.length % ranks:
        raise ValueError(f"tokens must be a multiple of the ranks, {ranks}, got {workload.length}")


def fields_of(workload: Workload) -> dict:
    """The workload in a record: `FIELDS`."""
    branches = workload.pattern.segment_lengths, workload.pattern.dilation_rates
    sizes = workload.length, workload.heads, workload.kv_heads, workload.head_dim
    return dict(zip(FIELDS, (*sizes, *branches, workload.is_causal, workload.dtype), strict=True))


def workload_of(record: dict) -> Workload:
    """The workload that a record tells of."""
    pattern = DilatedPattern(record["segment_lengths"], record["dilation_rates"])
    sizes = {name: record[name] for name in ("heads", "kv_heads", "head_dim", "is_causal", "dtype") if name in record}
    return Workload(pattern, record["tokens"], device=torch.device("cpu"), **sizes)


def pattern_of(workload: Workload, ranks: int, side: str) -> DilatedPattern:
    """The pattern of what a side computes."""
    if side == DENSE_RING:
        return DilatedPattern((workload.length,), (1,))
    if side == ALONE:
        inside = [branch for branch in workload.pattern.branches if workload.length // ranks % branch[0] == 0]
        return DilatedPattern(*zip(*inside, strict=True))
    return workload.pattern


def planned(workload: Workload, ranks: int, side: str, *, backward: bool) -> dict:
    """Plan of the costliest rank: bytes sent, FLOP, and bytes of memory."""
    dtype, rows = getattr(torch, workload.dtype), workload.length // ranks
    sizes = {
        "batch": 1,
        "heads": workload.heads,
        "kv_heads": workload.kv_heads,
        "head_dim": workload.head_dim,
        "dtype": dtype,
    }
    how = {"is_causal": workload.is_causal, "transport": _transport(side), "ordered": side in ORDERS, **sizes}
    costs = plan_ring(pattern_of(workload, ranks, side), (rows,) * ranks, **how).ranks
    names = {name: name for name in ("sent_forward", "sent_backward", "flop_forward")}
    names["planned_bytes"] = "memory_backward" if backward else "memory_forward"
    costliest = {name: max(getattr(cost, planned) for cost in costs) for name, planned in names.items()}
    if side == GATHERED:
        sent = 2 * rows * workload.kv_heads * workload.head_dim * (ranks - 1)
        costliest |= {"sent_forward": sent * dtype.itemsize, "sent_backward": sent * 4, "planned_bytes": None}
    return costliest


def attention(
    workload: Workload, ranks: int, side: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """A call that gives a side's output on this rank's shard, and the leaves that it depends on."""
    pattern, options = pattern_of(workload, ranks, side), {}
    if side in ORDERS:
        options["kv_ordering"] = OrderingSpec(ORDERS[side])
        order = options["kv_ordering"].ordering(k.shape[1]).to(k.device)
        k, v = (order.apply(x.detach(), dim=1).requires_grad_(x.requires_grad) for x in (k, v))

    def attend() -> Tensor:
        if side == GATHERED:
            gathered, start = map(_Gathered.apply, (k, v)), q.shape[1] * dist.get_rank()
            return dilated_attention(q, *gathered, pattern, is_causal=workload.is_causal, query_start=start)
        if side == ALONE:
            return dilated_attention(q, k, v, pattern, is_causal=workload.is_causal)
        how = {"transport": _transport(side), "is_causal": workload.is_causal}
        out = ring_dilated_attention(q, k, v, pattern, **how, **options)
        options["validate"] = False  # the first call was, and the shards are equal
        return out

    return attend, (q, k, v)


def compared_rows(workload: Workload, ranks: int, side: str, device: torch.device) -> ComparedRows | None:
    """The rows that are held against float64; None of attention that is another function."""
    if side == DENSE_RING:
        return None
    pattern, group = pattern_of(workload, ranks, side), workload.heads // workload.kv_heads
    sampled = partial(sampled_positions, pattern, workload.length, kv_heads=workload.kv_heads, count=SAMPLED_QUERIES)
    rows, rank = workload.length // ranks, dist.get_rank()

    def row_of(positions: Tensor) -> Tensor:
        return torch.where(positions // rows == rank, positions - rank * rows, -1)

    return ComparedRows(pattern, [sampled(kv_head=head // group) for head in range(workload.heads)], row_of, keys=0)


def _transport(method: str) -> str:
    return "ring" if method == DENSE_RING else method if method in TRANSPORTS else "auto"


class _Gathered(torch.autograd.Function):
    """Every rank's rows of a tensor; gradients are summed in float32, as the ring does."""

    @staticmethod
    def forward(_, shard: Tensor) -> Tensor:
        rows = shard.new_empty(1, shard.shape[1] * dist.get_world_size(), *shard.shape[2:])
        dist.all_gather_into_tensor(rows[0], shard[0])
        return rows

    @staticmethod
    def backward(_, grad: Tensor) -> Tensor:
        shard_grad = grad.new_empty(1, grad.shape[1] // dist.get_world_size(), *grad.shape[2:], dtype=torch.float32)
        dist.reduce_scatter_tensor(shard_grad[0], grad[0].float())
        return shard_grad.to(grad.dtype)
