"""What ranks measure of the ring: a record a side, on the disk as soon as it is known (notebook 07)."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.exact_rows import sampled_positions
from hilbert_lib.lab.records import RESULTS, Kept, append_lines
from hilbert_lib.lab.sustained import WARM_WINDOWS, back_to_back, wait
from hilbert_lib.lab.sweeps.halos import ALONE, OF_ALL_SIDES, GridOverRanks, Spread, spread_errors
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern
from hilbert_lib.lab.sweeps.ring_trace import counted, exchange_of
from hilbert_lib.launch.workers import run_ranks
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.ordering import OrderingSpec
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.plan.plan import plan_ring

Pass = Callable[[], object]
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
SAMPLED_QUERIES = 16  # of each KV head
LARGEST_ERROR = 0.02  # bfloat16 keeps 8 bits
NOT_TRACED = {"exchange_ms": None, "hidden": None, "exchange_begins_ms": None}
WARM_UP = 1  # after the calls that were checked
SECONDS = 540.0  # of all that one number of ranks measures
STALL_SECONDS = 180.0  # the first call of a kernel is compiled while other ranks wait


@dataclass(frozen=True)
class Work:
    """One sequence over some ranks, and the sides that compute it in turn.

    tokens: of the whole sequence, which is split into equal shards. sides: of `SIDES`. backward: whether gradients are
    computed too. repetitions: samples a side. sustained_seconds: how long forwards and backwards run back to back
    before they are timed so too, in windows of a fifth of it; 0 for single calls alone.
    """

    sweep: str
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    sides: tuple[str, ...] = ("auto",)
    is_causal: bool = False
    backward: bool = True
    repetitions: int = 10
    dtype: str = "bfloat16"
    sustained_seconds: float = 0.0
    is_counted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates", "sides"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if unknown := set(self.sides) - set(SIDES):
            raise ValueError(f"sides must be of {', '.join(SIDES)}; got {', '.join(sorted(unknown))}")
        if self.tokens % self.ranks:
            raise ValueError(f"tokens must be a multiple of the ranks, {self.ranks}, got {self.tokens}")

    @classmethod
    def spanning(
        cls, sweep: str, ranks: int, tokens: int, *, heads: int, first_segment: int, growth: int = 2, **rest
    ) -> "Work":
        """A work with the branches of `spanning_pattern`, and as many KV heads as heads."""
        pattern = spanning_pattern(tokens, first_segment, growth)
        branches = {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
        return cls(sweep, ranks, tokens, heads=heads, kv_heads=heads, **branches, **rest)

    def pattern_of(self, side: str) -> DilatedPattern:
        """The pattern of what a side computes."""
        if side == DENSE_RING:
            return DilatedPattern((self.tokens,), (1,))
        pattern = DilatedPattern(self.segment_lengths, self.dilation_rates)
        if side == ALONE:
            inside = [branch for branch in pattern.branches if self.tokens // self.ranks % branch[0] == 0]
            return DilatedPattern(*zip(*inside, strict=True))
        return pattern

    def identity(self, side: str) -> dict:
        """What a record of a side is known by."""
        return {name: value for name, value in asdict(self).items() if name not in OF_ALL_SIDES} | {"side": side}

    @property
    def rows(self) -> int:
        """How many tokens a rank holds."""
        return self.tokens // self.ranks

    def planned(self, side: str) -> dict:
        """What the plan says of the costliest rank."""
        dtype = getattr(torch, self.dtype)
        sizes = {"batch": 1, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": dtype}
        how = {"is_causal": self.is_causal, "transport": _transport(side), "ordered": side in ORDERS, **sizes}
        costs = plan_ring(self.pattern_of(side), (self.rows,) * self.ranks, **how).ranks
        names = {name: name for name in ("sent_forward", "sent_backward", "flop_forward")}
        names["planned_bytes"] = "memory_backward" if self.backward else "memory_forward"
        found = {name: max(getattr(cost, planned) for cost in costs) for name, planned in names.items()}
        if side == GATHERED:
            sent = 2 * self.rows * self.kv_heads * self.head_dim * (self.ranks - 1)
            found |= {"sent_forward": sent * dtype.itemsize, "sent_backward": sent * 4, "planned_bytes": None}
        return found

    def attention(self, side: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
        """A call that gives a side's output, and the leaves that it depends on."""
        pattern, options = self.pattern_of(side), {}
        if side in ORDERS:
            options["kv_ordering"] = OrderingSpec(ORDERS[side])
            order = options["kv_ordering"].ordering(k.shape[1]).to(k.device)
            k, v = (order.apply(x.detach(), dim=1).requires_grad_(self.backward) for x in (k, v))

        def attend() -> Tensor:
            if side == GATHERED:
                whole, start = map(_Gathered.apply, (k, v)), q.shape[1] * dist.get_rank()
                return dilated_attention(q, *whole, pattern, is_causal=self.is_causal, query_start=start)
            if side == ALONE:
                return dilated_attention(q, k, v, pattern, is_causal=self.is_causal)
            how = {"transport": _transport(side), "is_causal": self.is_causal}
            out = ring_dilated_attention(q, k, v, pattern, **how, **options)
            options["validate"] = False  # the first call was, and the shards are equal
            return out

        return attend, (q, k, v)

    def errors(self, side: str, inputs: Sequence[Tensor | None], out: Tensor, grads: Sequence[Tensor]) -> dict:
        """Relative errors of sampled rows of out and dq; none for attention that is another function."""
        if side == DENSE_RING:
            return {}
        start, pattern = self.rows * dist.get_rank(), self.pattern_of(side)

        def row_of(positions: Tensor) -> Tensor:
            return torch.where(positions // self.rows == dist.get_rank(), positions - start, -1)

        drawn = {"kv_heads": self.kv_heads, "count": SAMPLED_QUERIES}
        heads = range(self.kv_heads)
        queries = [sampled_positions(pattern, self.tokens, kv_head=g, **drawn) for g in heads]
        spread = partial(Spread, length=self.tokens, heads=self.kv_heads, row_of=row_of)
        return spread_errors(spread, pattern, queries, inputs, out, grads, keys=0, is_causal=self.is_causal)


def run_works(
    works: Iterable[Work | GridOverRanks], *, output_dir: str = "", file: str = RESULTS, backend: str | None = None
) -> list[dict]:
    """Measure works, those of equal ranks in one process group, and print a line for each side.

    What the folder's file holds from this code on this hardware is not measured again, and what ranks found
    before one of them failed is in it.

    Args:
        works: what to measure. output_dir: folder of the file; empty writes nothing. backend: as in `run_ranks`.

    Returns:
        The records of `measure`, in order, each with its environment.
    """
    works, found = list(works), Kept(output_dir, _key, file=file).known
    for ranks in sorted({work.ranks for work in works}):
        todo = []
        for work in (each for each in works if each.ranks == ranks):
            sides = tuple(side for side in work.sides if _key(work.identity(side)) not in found)
            todo += [asdict(replace(work, sides=sides))] if sides else []
        if todo:
            path = str(Path(output_dir).resolve() / file) if output_dir else ""
            order = {"works": todo, "file": path, "facts": environment()}
            limits = {"seconds": SECONDS, "stall_seconds": STALL_SECONDS, "backend": backend}
            for record in run_ranks("hilbert_lib.lab.sweeps.ring:measure_all", ranks, order, **limits)[0]:
                found[_key(record)] = record
                size = f"{record['tokens']:,} tokens" if "tokens" in record else f"{record['shape']} cells"
                title = f"{record['sweep']}, {ranks} ranks, {size}, {record['side']}"
                print(f"{title}: errors {record['out_error']}, {record['dq_error']}", flush=True)
    return [found[_key(work.identity(side))] for work in works for side in work.sides]


def measure_all(order: dict) -> list[dict]:
    """A target of `run_ranks`: measures "works"; rank 0 adds each record, with "facts", to "file"."""
    records = []
    for given in order["works"]:
        for record in measure(work_of(given)):
            records.append({**record, "environment": order["facts"]})
            if order["file"] and dist.get_rank() == 0:
                append_lines(records[-1:], Path(order["file"]))
    return records


def work_of(given: dict) -> Work | GridOverRanks:
    """A work by its fields."""
    return (GridOverRanks if "window" in given else Work)(**given)


def measure(work: Work | GridOverRanks) -> list[dict]:
    """Times one work on this rank and all others, its sides in turn.

    Returns:
        For each side its identity, and over all ranks: forward_ms and backward_ms (medians), forward_samples_ms and
        backward_samples_ms (each the slowest rank's), forward_by_rank_ms and backward_by_rank_ms (each rank's median),
        and likewise sustained_ms and so on of both together, a sample a window, with host_by_rank, mhz_by_rank and
        watts_by_rank as `back_to_back` finds them; sent_forward and sent_backward (planned bytes of the costliest
        rank), flop_forward (of the costliest rank), peak_bytes (None without a GPU) and planned_bytes of memory;
        out_error and dq_error of sampled rows against float64 (None for "dense ring"); exchange_ms, hidden and
        exchange_begins_ms, each _forward and _backward, as `_traced` finds them. What was not asked for is None. A grid
        has received_forward and received_backward in place of what is sent, and what was counted_ of both.
    """
    q, k, v, dout = _inputs(work)
    records = {side: work.identity(side) | work.planned(side) for side in work.sides}
    for side, record in records.items():  # alone: another side's tensors would count as this one's
        record |= _checked(side, work, _passes(side, work, q, k, v, dout), (q, k, v, dout))
    passes = {side: _passes(side, work, q, k, v, dout) for side in work.sides}
    for side, times in _times(passes, work, q.device).items():
        records[side] |= times
    for side, record in records.items():  # after single calls, whose clocks it would lower, and before any trace
        record |= _sustained(passes[side][: 1 + work.backward], record, work, q.device)
    for side, record in records.items():
        for name, run in zip(("forward", "backward"), passes[side], strict=True):  # one backward for each forward
            traced = _traced(run, q.device) if name == "forward" or work.backward else NOT_TRACED
            record |= {f"{what}_{name}": value for what, value in traced.items()}
    return list(records.values())


def _transport(side: str) -> str:
    return "ring" if side == DENSE_RING else side if side in TRANSPORTS else "auto"


def _inputs(work: Work | GridOverRanks) -> list[Tensor | None]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shapes = [(1, work.rows, n, work.head_dim) for n in (work.heads, work.kv_heads, work.kv_heads)]
    shapes += [shapes[0]] * work.backward
    like = {"generator": generator, "dtype": getattr(torch, work.dtype), "device": device}
    q, k, v, *dout = (torch.randn(shape, **like) for shape in shapes)
    return [*(x.requires_grad_(work.backward) for x in (q, k, v)), *(dout or [None])]


def _passes(side: str, work: Work | GridOverRanks, *inputs: Tensor | None) -> tuple[Pass, Pass]:
    # The forward keeps its output for the backward after it, which drops it.
    *given, dout = inputs
    (attend, leaves), graph = work.attention(side, *given), []

    def forward() -> Tensor:
        graph.clear()
        graph.append(attend())
        return graph[-1]

    return forward, lambda: torch.autograd.grad(graph.pop(), leaves, dout)


class _Gathered(torch.autograd.Function):
    """Every rank's rows of a tensor; gradients are summed in float32, as the ring does."""

    @staticmethod
    def forward(_, own: Tensor) -> Tensor:
        whole = own.new_empty(1, own.shape[1] * dist.get_world_size(), *own.shape[2:])
        dist.all_gather_into_tensor(whole[0], own[0])
        return whole

    @staticmethod
    def backward(_, grad: Tensor) -> Tensor:
        own = grad.new_empty(1, grad.shape[1] // dist.get_world_size(), *grad.shape[2:], dtype=torch.float32)
        dist.reduce_scatter_tensor(own[0], grad[0].float())
        return own.to(grad.dtype)


def _checked(side: str, work: Work | GridOverRanks, passes: tuple[Pass, Pass], inputs: Sequence[Tensor | None]) -> dict:
    # The first call compiles; the second one's memory is looked at, and its bytes and results.
    device, found = inputs[0].device, {"peak_bytes": None, "out_error": None, "dq_error": None}
    for _ in range(2):
        out, grads = None, ()
        if device.type == "cuda":
            begin_peak(device)
        with counted() as there:
            out = passes[0]().detach()
        with counted() as back:
            grads = passes[1]() if work.backward else ()
    if device.type == "cuda":
        found["peak_bytes"] = int(max(_from_ranks(float(torch.cuda.max_memory_allocated()), device)))
    for name, total in (("forward", there), ("backward", back)) if work.is_counted else ():
        found[f"counted_{name}"] = int(max(_from_ranks(float(total["received"]), device)))
    errors = work.errors(side, [x if x is None else x.detach() for x in inputs], out, grads)
    if any(error is not None and not error < LARGEST_ERROR for error in errors.values()):  # NaN too
        raise ArithmeticError(f"{side} of {work} is off by more than rounding: {errors}")
    return found | {f"{name}_error": error for name, error in errors.items()}


def _times(passes: dict[str, tuple[Pass, Pass]], work: Work | GridOverRanks, device: torch.device) -> dict[str, dict]:
    samples = {side: {"forward": [], "backward": []} for side in passes}
    for n in range(WARM_UP + work.repetitions):
        for side, calls in passes.items():
            for name, call in list(zip(samples[side], calls, strict=True))[: 1 + work.backward]:
                _meet(device)
                started = time.perf_counter()
                call()
                wait(device)
                samples[side][name] += [(time.perf_counter() - started) * 1e3] if n >= WARM_UP else []
    return {
        side: _over_ranks("forward", own["forward"], device) | _over_ranks("backward", own["backward"], device)
        for side, own in samples.items()
    }


def _over_ranks(name: str, own_ms: list[float], device: torch.device) -> dict[str, list[float | None] | float | None]:
    # Samples of the slowest rank, their median, and the median of each rank.
    if not own_ms:
        return {f"{name}_samples_ms": [], f"{name}_ms": None, f"{name}_by_rank_ms": None}
    slowest = torch.tensor(own_ms, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = {f"{name}_samples_ms": slowest.tolist(), f"{name}_ms": statistics.median(slowest.tolist())}
    return found | {f"{name}_by_rank_ms": _from_ranks(statistics.median(own_ms), device)}


def _sustained(calls: Sequence[Pass], single: dict, work: Work | GridOverRanks, device: torch.device) -> dict:
    names = ("host", "mhz", "watts")
    if not work.sustained_seconds:
        return _over_ranks("sustained", [], device) | {f"{name}_by_rank": None for name in names}
    call_ms = single["forward_ms"] + (single["backward_ms"] or 0.0)  # of the slowest rank: the same on all
    count = math.ceil(work.sustained_seconds / WARM_WINDOWS * 1e3 / call_ms)
    _meet(device)
    (own,) = back_to_back([lambda: [call() for call in calls]], device, calls=[count])
    told = {f"{name}_by_rank": _from_ranks(own.get(name), device) for name in names}
    return _over_ranks("sustained", own["windows_ms"], device) | told


def _meet(device: torch.device) -> None:
    wait(device)
    dist.barrier()
    wait(device)


def _from_ranks(value: float | None, device: torch.device) -> list[float | None]:
    own = torch.tensor([math.nan if value is None else value], device=device, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [None if one.isnan() else one.item() for one in every]


def _traced(run: Pass, device: torch.device) -> dict[str, float | list[float | None] | None]:
    # exchange_ms: the longest that a rank's exchange took; hidden: the least share of it under other kernels; when each
    # began after the ranks had met. None where nothing was exchanged, or without a GPU.
    if device.type != "cuda":
        run()
        return NOT_TRACED
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        _meet(device)  # a profile begins at another time on each rank
        run()
        wait(device)
    kernels = (event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    own = exchange_of((event.name, event.time_range.start, event.time_range.end) for event in kernels)
    took, hidden, begins = (_from_ranks(value, device) for value in own or (None, None, None))
    if all(each is None for each in took):
        return NOT_TRACED
    longest, least = max(filter(None, took)), min(each for each in hidden if each is not None)
    return {"exchange_ms": longest, "hidden": least, "exchange_begins_ms": begins}


def _key(record: dict) -> str:
    names = {*Work.__dataclass_fields__, *GridOverRanks.__dataclass_fields__, "side"} - set(OF_ALL_SIDES)
    return json.dumps({name: record[name] for name in names if name in record}, sort_keys=True)
