"""Measurements of the ring by its ranks: a record a side, on the disk as soon as it is known (notebook 07)."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.records import RESULTS, Kept, append_lines
from hilbert_lib.lab.sustained import WARM_WINDOWS, back_to_back, wait
from hilbert_lib.lab.sweeps.over_ranks import IDENTITY, OverRanks
from hilbert_lib.lab.sweeps.ring_trace import counted, exchange_of
from hilbert_lib.launch.workers import run_ranks
from hilbert_lib.limits.memory import begin_peak

Pass = Callable[[], object]
LARGEST_ERROR = 0.02  # bfloat16 keeps 8 bits
NOT_TRACED = {"exchange_ms": None, "hidden": None, "exchange_begins_ms": None}
WARM_UP = 1  # after the calls that were checked
SECONDS = 540.0  # of all that one number of ranks measures
STALL_SECONDS = 180.0  # the first call of a kernel is compiled while other ranks wait


def run_works(
    works: Iterable[OverRanks], *, output_dir: str = "", file: str = RESULTS, backend: str | None = None
) -> list[dict]:
    """Measure works, those of equal ranks in one process group, and print a line for each side.

    What the folder's file holds from this code on this hardware is not measured again, and what ranks found
    before one of them failed is in it.

    Args:
        works: what to measure. output_dir: folder of the file; empty writes nothing. backend: as in `run_ranks`.

    Returns:
        The records of `measure`, in order, each with its environment.
    """
    works, recorded = list(works), Kept(output_dir, _key, file=file).known
    for ranks in sorted({work.ranks for work in works}):
        unmeasured = []
        of_ranks = [work for work in works if work.ranks == ranks]
        for work in of_ranks:
            sides = tuple(method for method in work.sides if _key(work.identity(method)) not in recorded)
            unmeasured += [replace(work, sides=sides).fields] if sides else []
        if unmeasured:
            path = str(Path(output_dir).resolve() / file) if output_dir else ""
            order = {"works": unmeasured, "file": path, "facts": environment()}
            limits = {"seconds": SECONDS, "stall_seconds": STALL_SECONDS, "backend": backend}
            for record in run_ranks("hilbert_lib.lab.sweeps.ring:measure_all", ranks, order, **limits)[0]:
                recorded[_key(record)] = record
                title = f"{record['sweep']}, {ranks} ranks, {_size(record)}, {record['side']}"
                print(f"{title}: errors {record['out_error']}, {record['dq_error']}", flush=True)
    return [recorded[_key(work.identity(method))] for work in works for method in work.sides]


def _size(record: dict) -> str:
    if "shape" in record:
        return f"{record['shape']} cells"
    noun = "tokens" if "tokens" in record else "points"
    return f"{record[noun]:,} {noun}"


def measure_all(order: dict) -> list[dict]:
    """A target of `run_ranks`: measures "works"; rank 0 adds each record, with "facts", to "file"."""
    records = []
    for fields in order["works"]:
        for record in measure(OverRanks.of(fields)):
            records.append({**record, "environment": order["facts"]})
            if order["file"] and dist.get_rank() == 0:
                append_lines(records[-1:], Path(order["file"]))
    return records


def measure(work: OverRanks) -> list[dict]:
    """Times one work on this rank and all others, its sides in turn.

    Returns:
        For each side its identity, and over all ranks: forward_ms and backward_ms (medians), forward_samples_ms and
        backward_samples_ms (each the slowest rank's), forward_by_rank_ms and backward_by_rank_ms (each rank's median),
        and likewise sustained_ms and so on of both together, a sample a window, with host_by_rank, mhz_by_rank and
        watts_by_rank as `back_to_back` finds them; sent_forward and sent_backward (planned bytes of the costliest
        rank), flop_forward (of the costliest rank), peak_bytes (None without a GPU) and planned_bytes of memory;
        out_error and dq_error of sampled rows against float64 (None for "dense ring"); exchange_ms, hidden and
        exchange_begins_ms, each _forward and _backward, as `_traced` finds them. What was not asked for is None. A grid
        and a cloud have received_forward and received_backward in place of what is sent, and what was counted_ of both.
    """
    q, k, v, dout = _inputs(work)
    records = {method: work.identity(method) | work.planned(method) for method in work.sides}
    for method, record in records.items():  # alone: another side's tensors would count as this one's
        record |= _checked(method, work, _passes(method, work, q, k, v, dout), (q, k, v, dout))
    passes = {method: _passes(method, work, q, k, v, dout) for method in work.sides}
    for method, times in _times(passes, work, q.device).items():
        records[method] |= times
    for method, record in records.items():  # after single calls, whose clocks it would lower, and before any trace
        record |= _sustained(passes[method][: 1 + work.backward], record, work, q.device)
    for method, record in records.items():
        for name, run in zip(("forward", "backward"), passes[method], strict=True):  # one backward for each forward
            traced = _traced(run, q.device) if name == "forward" or work.backward else NOT_TRACED
            record |= {f"{what}_{name}": value for what, value in traced.items()}
    return list(records.values())


def _inputs(work: OverRanks) -> list[Tensor | None]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    workload = work.workload
    shapes = [
        (1, work.rows, heads, workload.head_dim) for heads in (workload.heads, workload.kv_heads, workload.kv_heads)
    ]
    shapes += [shapes[0]] * work.backward
    like = {"generator": generator, "dtype": getattr(torch, workload.dtype), "device": device}
    q, k, v, *dout = (torch.randn(shape, **like) for shape in shapes)
    return [*(x.requires_grad_(work.backward) for x in (q, k, v)), *(dout or [None])]


def _passes(method: str, work: OverRanks, *inputs: Tensor | None) -> tuple[Pass, Pass]:
    # The forward keeps its output for the backward after it, which drops it.
    *qkv, dout = inputs
    (attend, leaves), graph = work.attention(method, *qkv), []

    def output() -> Tensor:
        graph.clear()
        graph.append(attend())
        return graph[-1]

    return output, lambda: torch.autograd.grad(graph.pop(), leaves, dout)


def _checked(method: str, work: OverRanks, passes: tuple[Pass, Pass], inputs: Sequence[Tensor | None]) -> dict:
    # The first call compiles; the second one's memory is looked at, and its bytes and results.
    device, record = inputs[0].device, {"peak_bytes": None, "out_error": None, "dq_error": None}
    for _ in range(2):
        out, grads = None, ()
        if device.type == "cuda":
            begin_peak(device)
        with counted() as forward_traffic:
            out = passes[0]().detach()
        with counted() as backward_traffic:
            grads = passes[1]() if work.backward else ()
    if device.type == "cuda":
        record["peak_bytes"] = int(max(_from_ranks(float(torch.cuda.max_memory_allocated()), device)))
    for name, total in (("forward", forward_traffic), ("backward", backward_traffic)) if work.kind.COUNTS_BYTES else ():
        record[f"counted_{name}"] = int(max(_from_ranks(float(total["received"]), device)))
    errors = work.errors(method, [x if x is None else x.detach() for x in inputs], out, grads)
    if any(error is not None and not error < LARGEST_ERROR for error in errors.values()):  # NaN too
        raise ArithmeticError(f"{method} of {work} is off by more than rounding: {errors}")
    return record | {f"{name}_error": error for name, error in errors.items()}


def _times(passes: dict[str, tuple[Pass, Pass]], work: OverRanks, device: torch.device) -> dict[str, dict]:
    samples = {method: {"forward": [], "backward": []} for method in passes}
    for n in range(WARM_UP + work.repetitions):
        for method, calls in passes.items():
            for name, call in list(zip(samples[method], calls, strict=True))[: 1 + work.backward]:
                _meet(device)
                started = time.perf_counter()
                call()
                wait(device)
                samples[method][name] += [(time.perf_counter() - started) * 1e3] if n >= WARM_UP else []
    return {
        method: _over_ranks("forward", by_pass["forward"], device)
        | _over_ranks("backward", by_pass["backward"], device)
        for method, by_pass in samples.items()
    }


def _over_ranks(name: str, own_ms: list[float], device: torch.device) -> dict[str, list[float | None] | float | None]:
    # Samples of the slowest rank, their median, and the median of each rank.
    if not own_ms:
        return {f"{name}_samples_ms": [], f"{name}_ms": None, f"{name}_by_rank_ms": None}
    slowest = torch.tensor(own_ms, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = {f"{name}_samples_ms": slowest.tolist(), f"{name}_ms": statistics.median(slowest.tolist())}
    return times | {f"{name}_by_rank_ms": _from_ranks(statistics.median(own_ms), device)}


def _sustained(calls: Sequence[Pass], single: dict, work: OverRanks, device: torch.device) -> dict:
    names = ("host", "mhz", "watts")
    if not work.sustained_seconds:
        return _over_ranks("sustained", [], device) | {f"{name}_by_rank": None for name in names}
    call_ms = single["forward_ms"] + (single["backward_ms"] or 0.0)  # of the slowest rank: the same on all
    count = math.ceil(work.sustained_seconds / WARM_WINDOWS * 1e3 / call_ms)
    _meet(device)
    (timing,) = back_to_back([lambda: [call() for call in calls]], device, calls=[count])
    by_rank = {f"{name}_by_rank": _from_ranks(timing.get(name), device) for name in names}
    return _over_ranks("sustained", timing["windows_ms"], device) | by_rank


def _meet(device: torch.device) -> None:
    wait(device)
    dist.barrier()
    wait(device)


def _from_ranks(value: float | None, device: torch.device) -> list[float | None]:
    local = torch.tensor([math.nan if value is None else value], device=device, dtype=torch.float64)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return [None if scalar.isnan() else scalar.item() for scalar in gathered]


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
    exchange = exchange_of((event.name, event.time_range.start, event.time_range.end) for event in kernels)
    took, hidden, begins = (_from_ranks(value, device) for value in exchange or (None, None, None))
    if all(ms is None for ms in took):
        return NOT_TRACED
    longest, least = max(filter(None, took)), min(share for share in hidden if share is not None)
    return {"exchange_ms": longest, "hidden": least, "exchange_begins_ms": begins}


def _key(record: dict) -> str:
    return json.dumps({name: record[name] for name in IDENTITY if name in record}, sort_keys=True)
