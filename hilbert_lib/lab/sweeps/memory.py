"""Worth of CUDA graphs, memory pools and caches of patterns: time, and memory, against doing without.

All times are from an idle device to the finished result: what the host spends on launches and allocations counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from typing import TYPE_CHECKING

import torch

from hilbert_lib.attention.modules import DilatedAttention
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.lab.pairs import MIN_SAMPLE_MS, Results, Side, relative_difference, sweep
from hilbert_lib.lab.sustained import wait
from hilbert_lib.lab.tables import of_sweep, ratio_table
from hilbert_lib.lab.timing import Case, compare_paired
from hilbert_lib.lab.workload import Workload
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.ordering import Ordering, ordering_tables

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

Calls = Callable[[int], Results]  # of a length


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


def pair_table(records: list[dict], sweep: str) -> "pd.DataFrame":
    """`ratio_table` of a sweep that was timed, with the two medians, a_ms and b_ms."""
    medians = {f"{letter}_ms": [record[letter]["median_ms"] for record in of_sweep(records, sweep)] for letter in "ab"}
    return ratio_table(records, sweep).assign(**medians)


def _call(work: Workload, direction: str) -> Callable[[], Results]:
    # The output of the module, or with "training" the gradients, with a forward in their time.
    module = DilatedAttention(work.pattern)

    def run() -> Results:
        if direction == "forward":
            with torch.no_grad():
                return (module(*work.tensors[:3]),)
        return torch.autograd.grad(module(*work.leaves), work.leaves, work.tensors[3])

    return run


def _from_idle(call: Callable[[], Results], device: torch.device) -> Results:
    torch.cuda.synchronize(device)
    return call()


def graph_gains(works: Iterable[Workload]) -> Iterator[tuple[Side, Side]]:
    """`DilatedAttention` called, beside replays of its CUDA graph with the copy of its inputs.

    direction: "forward", or "training" with the backward.
    """
    for work, direction in product(works, ("forward", "training")):
        about = {name: value for name, value in work.parameters.items() if name != "is_causal"}
        about = {"sweep": "graphs", "module": "attention", "direction": direction, **about}
        call = _call(work, direction)
        eager = Side("eager", about, partial(_from_idle, call, work.device), work.error)
        yield eager, replace(eager, name="replay", run=_replay(call, work))


def _replay(call: Callable[[], Results], work: Workload) -> Callable[[], Results]:
    @cache
    def graph() -> tuple[torch.cuda.CUDAGraph, Results]:
        with torch.cuda.device(work.device):  # a graph is of the current one's stream
            return captured(call)

    fresh = cache(lambda: [x.clone() for x in work.tensors[:3]])

    def replay() -> Results:
        (replayed, results), values = graph(), fresh()
        torch.cuda.synchronize(work.device)
        for x, value in zip(work.tensors, values, strict=False):
            x.copy_(value)
        replayed.replay()
        return results

    return replay


def _kept(call: Calls, lengths: Sequence[int]) -> Calls:
    buffers = [torch.empty_like(x) for x in call(max(lengths))]

    return lambda length: tuple(buffer[:, :length].copy_(x) for buffer, x in zip(buffers, call(length), strict=True))


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

    def measure(works: Sequence[Workload], name: str) -> dict:
        with torch.cuda.device(works[0].device):  # pools and graphs are of the current one
            watched = [_watched(strategy, works, direction) for strategy in ("caching", name)]
            (base, serve_base, *base_bytes), (rival, serve_rival, *rival_bytes) = watched
            difference = relative_difference(serve_rival(), serve_base())
            how = {"device": works[0].device, "warmup": 2, "min_sample_ms": MIN_SAMPLE_MS}
            pair = compare_paired(base, rival, repetitions=repetitions, **how)
        allocated, reserved = zip(base_bytes, rival_bytes, strict=True)
        memory = {"peak_bytes": allocated, "reserved_bytes": reserved}
        return pair.record() | {**memory, "output_difference": difference}

    def sides(works: Sequence[Workload], name: str) -> tuple[Case, ...]:
        return tuple(Case(strategy, None, _pool_parameters(works, direction), 0.0) for strategy in ("caching", name))

    points = product(workloads, [name for name in STRATEGIES if name != "caching"])
    return sweep(((sides(*point), partial(measure, *point)) for point in points), output_dir)


def _pool_parameters(works: Sequence[Workload], direction: str) -> dict:
    lengths = " ".join(str(work.length) for work in works)
    about = {name: value for name, value in works[0].parameters.items() if name != "length"}
    return {"sweep": "pools", "lengths": lengths, "direction": direction, **about}


def _watched(name: str, works: Sequence[Workload], direction: str) -> tuple[Case, Callable[[], Results], int, int]:
    # A strategy on a workload: what is timed, what it gives, and bytes allocated and reserved at the peaks.
    fresh, lengths = {work.length: replace(work) for work in works}, [work.length for work in works]
    device, calls = works[0].device, {length: _call(work, direction) for length, work in fresh.items()}

    def call(length: int) -> Results:
        return calls[length]()  # of a work whose tensors go with it

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
    return Case(name, partial(_from_idle, serve, device), _pool_parameters(works, direction), error), serve, *peaks


def _emptied(device: torch.device) -> int:
    # Bytes allocated once what nobody holds is given back; the peaks begin there. What segments that others hold a part
    # of have to spare stays reserved, and may serve: it counts for every strategy alike.
    begin_peak(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def pool_table(records: list[dict]) -> "pd.DataFrame":
    """Every strategy on every workload, torch's caching allocator first, with its time over the strategy's as `ratio`.

    allocated_bytes and reserved_bytes are at their peaks, fragmented_bytes is the difference.
    """
    import pandas as pd

    rows = []
    for record in (pair for pair in records if "a" in pair and pair["a"]["parameters"]["sweep"] == "pools"):
        memory = zip(record["peak_bytes"], record["reserved_bytes"], strict=True)
        ratios = (1.0, 1.0, 1.0), (record["ratio"], *record["interval"])
        for name, (allocated, reserved), ratio in zip("ab", memory, ratios, strict=True):
            timing = record[name]
            row = {"lengths": timing["parameters"]["lengths"], "strategy": timing["name"], **timing["parameters"]}
            row |= {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmented_bytes": reserved - allocated}
            row |= {"median_ms": timing["median_ms"], "error": timing["error"]}
            rows.append(row | dict(zip(("ratio", "low", "high"), ratio, strict=True)))
    return pd.DataFrame(rows).drop_duplicates(["lengths", "strategy", "direction"], ignore_index=True)


def table_pairs(works: Iterable[Workload]) -> Iterator[tuple[Side, Side]]:
    """Building what is kept of a pattern and of an ordering, beside looking it up and, on a GPU, beside a whole call.

    Times are the host's: `run_sides` takes them with device="cpu" and on_cpu=True.
    """
    for work in works:
        order = Ordering.from_curve("hilbert", work.length).to(work.device)
        tables = division.launches, schedule.tables
        built = [cached.__wrapped__ for cached in tables]
        build_and_find = {
            "schedule tables": (partial(_schedule_tables, work, *built), partial(_schedule_tables, work, *tables)),
            "Hilbert ordering": (
                partial(ordering_tables.__wrapped__, order, order.device),
                lambda order=order: (order.perm, order.inverse, order.slots(order.device)),
            ),
        }
        for what, (build, find) in build_and_find.items():
            about = {"sweep": "pattern cache", "what": what, "tables_on": work.device.type, **work.parameters}
            building = Side("build", about, partial(_finished, build, work.device), lambda results: 0.0)
            yield building, replace(building, name="look-up", run=find)
            if work.device.type == "cuda":
                yield building, _whole_call(work, about)


def _schedule_tables(work: Workload, launches: Callable, tables: Callable) -> Results:
    all_launches, sizes = chain(*launches(work.pattern, work.length, work.heads, False)), (work.length, work.heads)
    how = *sizes, division.BLOCK, schedule.TILES_TOGETHER, work.device
    built = [tables(work.pattern, launch, *how) for launch in all_launches]
    return tuple(
        x for table in built for x in (table.branches, table.offsets, table.branch_ids, table.items, table.classes)
    )


def _whole_call(work: Workload, about: dict) -> Side:
    call = _call(work, "forward")
    # It returns nothing that the other side computes too.
    return Side("call", about, lambda: _finished(call, work.device)[:0], lambda _: work.error(call()))


def _finished(call: Callable[[], Results], device: torch.device) -> Results:
    results = call()
    wait(device)
    return results
