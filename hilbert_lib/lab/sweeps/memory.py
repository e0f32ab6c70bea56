"""What CUDA graphs, memory pools and caches of patterns are worth: time, and memory, against doing without.

All times are from an idle device to the finished result: what the host spends on launches and allocations counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.lab.pairs import (
    MIN_SAMPLE_MS,
    Recorded,
    Results,
    Side,
    identity,
    record_identity,
    relative_difference,
)
from hilbert_lib.lab.sweep import sweep
from hilbert_lib.lab.tables import of_sweep, ratio_table
from hilbert_lib.lab.timing import Case, compare_paired
from hilbert_lib.lab.workload import Workload
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.ordering import Ordering, ordering_tables

Calls = Callable[[int], Results]  # of a length


def require_cuda(device: torch.device) -> None:
    """Raise ValueError unless a device is a CUDA device: graphs and the allocator's counters exist nowhere else."""
    if checks.device(device).type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")


def from_idle(call: Callable[[], Results], device: torch.device) -> Results:
    """A call that begins when the device has done all before it: its launches cannot hide behind earlier work."""
    torch.cuda.synchronize(device)
    return call()


def captured(run: Callable[[], Results], pool: tuple[int, int] | None = None) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A CUDA graph of a call, in a memory pool, and the tensors into which every replay writes its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and fills the caches: a graph cannot
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run()
    return graph, results


def pair_table(records: list[dict], sweep: str) -> pd.DataFrame:
    """`ratio_table` of a sweep that was timed, with the two medians, a_ms and b_ms."""
    medians = {f"{side}_ms": [record[side]["median_ms"] for record in of_sweep(records, sweep)] for side in "ab"}
    return ratio_table(records, sweep).assign(**medians)


def graph_gains(works: Iterable[Workload]) -> Iterator[tuple[Side, Side]]:
    """The two modules called, beside replays of their CUDA graphs with the copy of their inputs.

    direction: "forward", or "training" with the backward. Errors are against float64.
    """
    for work, kind, direction in product(works, ("attention", "multihead"), ("forward", "training")):
        require_cuda(work.device)
        about = {name: value for name, value in work.parameters.items() if name != "is_causal"}
        parameters = {"sweep": "graphs", "module": kind, "direction": direction, **about}
        yield _eager_and_replay(cache(partial(_module_and_inputs, kind, work)), parameters, work.device)


def _eager_and_replay(prepared: Callable, parameters: dict, device: torch.device) -> tuple[Side, Side]:
    def call() -> Results:
        return _called(*prepared(), parameters["direction"])

    @cache
    def graph() -> tuple[torch.cuda.CUDAGraph, Results]:
        with torch.cuda.device(device):  # a graph is of the current one's stream
            return captured(call)

    fresh = cache(lambda: [x.detach().clone() for x in prepared()[1]])

    def replay() -> Results:
        (replayed, results), values = graph(), fresh()
        torch.cuda.synchronize(device)
        with torch.no_grad():
            for x, value in zip(prepared()[1], values, strict=True):
                x.copy_(value)
        replayed.replay()
        return results

    @cache
    def exact() -> Results:
        module, inputs = prepared()
        wide = deepcopy(module).double()
        getattr(wide, "attention", wide).backend = "eager"
        return _called(wide, [x.detach().double().requires_grad_() for x in inputs], parameters["direction"])

    def error(results: Results) -> float:
        return relative_difference(results, exact())

    return Side("eager", parameters, partial(from_idle, call, device), error), Side("replay", parameters, replay, error)


def _module_and_inputs(kind: str, work: Workload) -> tuple[torch.nn.Module, list[Tensor]]:
    if kind == "attention":
        return DilatedAttention(work.pattern), list(work.leaves)
    to = {"device": work.device, "dtype": getattr(torch, work.dtype)}
    module = MultiheadDilatedAttention(work.heads * work.head_dim, work.heads, work.pattern, batch_first=True, **to)
    return module, [work.tensors[0].flatten(2).requires_grad_()]


def _called(module: torch.nn.Module, inputs: list[Tensor], direction: str) -> Results:
    # The output; with "training" also the gradients of half its squared norm: the output is its own gradient.
    with torch.set_grad_enabled(direction == "training"):
        result = module(*inputs)
        out = result[0] if isinstance(result, tuple) else result
        if direction == "forward":
            return (out,)
        return out.detach(), *torch.autograd.grad(out, [*inputs, *module.parameters()], out.detach())


def _kept(call: Calls, lengths: Sequence[int]) -> Calls:
    buffers = [torch.empty_like(x) for x in call(max(lengths))]

    def run(length: int) -> Results:
        return tuple(buffer[:, :length].copy_(x) for buffer, x in zip(buffers, call(length), strict=True))

    return run


def _pool(call: Calls, lengths: Sequence[int]) -> Calls:
    pool = torch.cuda.MemPool()

    def run(length: int) -> Results:
        with torch.cuda.use_mem_pool(pool):
            return call(length)

    return run


def _graphs(call: Calls, lengths: Sequence[int]) -> Calls:
    handle = torch.cuda.graph_pool_handle()
    graphs = {length: captured(partial(call, length), handle) for length in sorted(set(lengths), reverse=True)}

    def run(length: int) -> Results:
        graph, results = graphs[length]
        graph.replay()
        return results

    return run


STRATEGIES = {
    "caching": lambda call, lengths: call,  # torch's caching allocator, as everyone has it
    "kept": _kept,  # the seeds': buffers of the largest size, made once, into which results are copied
    "pool": _pool,  # a torch.cuda.MemPool of one's own; the threads of a backward pass do not allocate from it
    "graph": _graphs,  # a CUDA graph a length: every buffer at an address of its own, in one pool
}


def pool_comparison(
    workloads: Iterable[Sequence[Workload]], *, direction: str = "forward", output_dir: str = "", repetitions: int = 20
) -> list[dict]:
    """Each strategy of holding buffers beside torch's caching allocator: time, and memory allocated and reserved.

    A workload is calls one after the other, alike but for their lengths, among which memory can fragment. Every
    strategy begins with empty caches and serves it twice before its memory is read: peak_bytes and reserved_bytes are
    what was allocated, and held by the allocator, beyond the inputs. direction: "forward", or "training" for both.
    """
    if direction not in ("forward", "training"):
        raise ValueError(f"direction must be forward or training, got {direction!r}")
    workloads = [tuple(works) for works in workloads]
    for works in workloads:
        require_cuda(works[0].device)

    def points() -> Iterator[tuple]:
        for works in workloads:
            # What is kept of a workload is dropped before the next one's memory is watched.
            caching = cache(lambda works=works: _watched("caching", works, direction))
            for name in STRATEGIES:
                if name != "caching":
                    yield works, name, caching

    def measure(point: tuple) -> dict:
        works, name, caching = point
        with torch.cuda.device(works[0].device):  # pools and graphs are of the current one
            base, other = caching(), _watched(name, works, direction)
            difference = relative_difference(other.results(), base.results())
            how = {"device": works[0].device, "warmup": 2, "min_sample_ms": MIN_SAMPLE_MS}
            pair = compare_paired(base.case, other.case, repetitions=repetitions, **how)
        record = Recorded(pair, (base.allocated_bytes, other.allocated_bytes), difference).record()
        return record | {"reserved_bytes": (base.reserved_bytes, other.reserved_bytes)}

    def key(point: tuple) -> str:
        parameters = _pool_parameters(point[0], direction)
        return identity(*(Case(name, None, parameters, 0.0) for name in ("caching", point[1])))

    return sweep(
        points(),
        measure,
        key=key,
        of_record=record_identity,
        output_dir=output_dir,
        label=lambda point: f"{point[1]} at {', '.join(str(work.length) for work in point[0])} tokens",
    )


def _pool_parameters(works: Sequence[Workload], direction: str) -> dict:
    lengths = " ".join(str(work.length) for work in works)
    about = {name: value for name, value in works[0].parameters.items() if name != "length"}
    return {"sweep": "pools", "lengths": lengths, "direction": direction, **about}


class _Watched(NamedTuple):
    """A strategy at work on a workload."""

    case: Case
    results: Callable[[], Results]
    allocated_bytes: int
    reserved_bytes: int


def _watched(name: str, works: Sequence[Workload], direction: str) -> _Watched:
    fresh, lengths = {work.length: replace(work) for work in works}, [work.length for work in works]
    device, module = works[0].device, DilatedAttention(works[0].pattern)

    def call(length: int) -> Results:
        work = fresh[length]  # whose tensors go with it
        if direction == "forward":
            with torch.no_grad():
                return (module(*work.tensors[:3]),)
        return torch.autograd.grad(module(*work.leaves), work.leaves, work.tensors[3])

    for length in lengths:
        call(length)  # draws inputs, compiles, fills caches
    before = _emptied(device)
    strategy = STRATEGIES[name](call, lengths)

    def serve() -> Results:
        for length in lengths[:-1]:
            strategy(length)
        return strategy(lengths[-1])

    _emptied(device)
    serve()
    serve()
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device) - before, torch.cuda.max_memory_reserved(device) - before
    error = fresh[lengths[-1]].error(serve())
    case = Case(name, partial(from_idle, serve, device), _pool_parameters(works, direction), error)
    return _Watched(case, serve, *peaks)


def _emptied(device: torch.device) -> int:
    # Bytes allocated once what nobody holds is given back; the peaks begin there. What segments that others hold a part
    # of have to spare stays reserved, and may serve: it counts for every strategy alike.
    begin_peak(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def pool_table(records: list[dict], sweep: str = "pools") -> pd.DataFrame:
    """Every strategy on every workload, torch's caching allocator first, with its time over the strategy's as `ratio`.

    allocated_bytes and reserved_bytes are at their peaks, fragmented_bytes is the difference.
    """
    rows = []
    for record in (each for each in records if "a" in each and each["a"]["parameters"]["sweep"] == sweep):
        held = zip(record["peak_bytes"], record["reserved_bytes"], strict=True)
        ratios = (1.0, 1.0, 1.0), (record["ratio"], *record["interval"])
        for name, (allocated, reserved), ratio in zip("ab", held, ratios, strict=True):
            side = record[name]
            given = {"curve": "", **side["parameters"]}
            row = {"lengths": given["lengths"], "strategy": side["name"], **given}
            row |= {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmented_bytes": reserved - allocated}
            row |= {"median_ms": side["median_ms"], "error": side["error"]}
            rows.append(row | dict(zip(("ratio", "low", "high"), ratio, strict=True)))
    return pd.DataFrame(rows).drop_duplicates(["lengths", "strategy", "direction", "curve"], ignore_index=True)


def table_pairs(works: Iterable[Workload]) -> Iterator[tuple[Side, Side]]:
    """Building what is kept of a pattern and of an ordering, beside looking it up and, on a GPU, beside a whole call.

    Times are the host's: `run_sides` takes them with device="cpu" and on_cpu=True.
    """
    for work, what in product(works, ("schedule tables", "Hilbert ordering")):
        build, find = _build_and_find(what, work)
        about = {"sweep": "pattern cache", "what": what, "tables_on": work.device.type, **work.parameters}
        building = Side("build", about, partial(_finished, build, work.device), lambda results: 0.0)
        yield building, Side("look-up", about, find, lambda results: 0.0)
        if work.device.type == "cuda":
            yield building, _whole_call(work, about)


def _build_and_find(what: str, work: Workload) -> tuple[Callable[[], Results], Callable[[], Results]]:
    if what == "schedule tables":
        found = division.launches, schedule.tables
        built = (each.__wrapped__ for each in found)
        return partial(_schedule_tables, work, *built), partial(_schedule_tables, work, *found)
    ordering = Ordering.from_curve("hilbert", work.length).to(work.device)
    build = partial(ordering_tables.__wrapped__, ordering, ordering.device)
    return build, lambda: (ordering.perm, ordering.inverse, ordering.slots(ordering.device))


def _schedule_tables(work: Workload, launches: Callable, tables: Callable) -> Results:
    ones, sizes = chain(*launches(work.pattern, work.length, work.heads, False)), (work.length, work.heads)
    how = *sizes, division.BLOCK, schedule.TILES_TOGETHER, work.device
    found = [tables(work.pattern, one, *how) for one in ones]
    return tuple(x for each in found for x in (each.branches, each.offsets, each.branch_ids, each.items, each.classes))


def _whole_call(work: Workload, about: dict) -> Side:
    call = cache(lambda: partial(DilatedAttention(work.pattern), *work.tensors[:3]))

    def run() -> Results:
        _finished(call(), work.device)
        return ()  # nothing that the other side computes too

    return Side("call", about, run, lambda _: work.error((call()(),)))


def _finished(call: Callable[[], Results], device: torch.device) -> Results:
    results = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results
