"""What memory pools and caches of patterns are worth: time, and memory allocated and reserved, against doing without.

All times are from an idle device to the finished result: what the host spends on allocations counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.modules import DilatedAttention
from hilbert_lib.attention.triton import schedule
from hilbert_lib.attention.triton.hopper import division
from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.pairs import MIN_SAMPLE_MS, Recorded, Results, identity, recorded_before, relative_difference
from hilbert_lib.lab.records import append_records, measured_before
from hilbert_lib.lab.sweeps.graphs import captured, from_idle, require_cuda
from hilbert_lib.lab.timing import Case, compare_paired
from hilbert_lib.lab.workload import Workload
from hilbert_lib.limits.memory import begin_peak
from hilbert_lib.ordering import Ordering, ordering_tables
from hilbert_lib.pattern import DilatedPattern

# "Memory Usage" of seeds/004: GB by tokens, without a pool, and with one and the Hilbert order. Its sizes are not told.
SEED_MEMORY_GB = {8192: (0.08, 0.25), 16384: (0.92, 0.92), 32768: (1.08, 1.08)}

Calls = Callable[[int], Results]


def _caching(call: Calls, lengths: Sequence[int]) -> Calls:
    return call


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
    "caching": _caching,  # torch's caching allocator, as everyone has it
    "kept": _kept,  # the seeds': buffers of the largest size, made once, into which results are copied
    "pool": _pool,  # a torch.cuda.MemPool of one's own; the threads of a backward pass do not allocate from it
    "graph": _graphs,  # a CUDA graph a length: every buffer at an address of its own, in one pool
}


@dataclass(frozen=True)
class PoolRecord(Recorded):
    """A pair of strategies, and the device memory that each had at its peak beyond the inputs.

    Attributes:
        reserved_bytes: what the allocator held. What exceeds `peak_bytes`, that which was allocated, is fragmentation;
            of a graph it is also what its replays work in, for no one allocates that again.
    """

    reserved_bytes: tuple[int, ...] = ()

    def record(self) -> dict:
        return {**super().record(), "reserved_bytes": self.reserved_bytes}


def pool_comparison(
    workloads: Sequence[Sequence[int]],
    *,
    pattern: DilatedPattern,
    heads: int,
    head_dim: int,
    device: torch.device,
    direction: str = "forward",
    dtype: str = "bfloat16",
    curve: str = "",
    sweep: str = "pools",
    output_dir: str = "",
    repetitions: int = 20,
) -> list[dict]:
    """Each strategy of holding buffers beside torch's caching allocator: time, and memory allocated and reserved.

    Every strategy begins with empty caches, is set up, and serves the workload twice before its memory is read. One
    that the folder's results.jsonl holds from this code on this hardware is not run again.

    Args:
        workloads: lengths in tokens that are called one after the other; of one length, or of several, among which
            memory can fragment.
        pattern: which keys a query sees.
        heads, head_dim: of q, k and v.
        device: a CUDA device.
        direction: "forward", or "training" for forward and backward.
        dtype: name of a torch dtype.
        curve: "" to leave k and v as they are, or the curve in whose order the compared strategies store them first,
            torch's caching allocator then among them.
        sweep: name of the records.
        output_dir: folder of results.jsonl; empty writes nothing.
        repetitions: samples a side.

    Returns:
        A record a workload and strategy, which `pool_table` tabulates. A workload without room is left out and said so.

    Raises:
        ValueError: if device is no CUDA device, or direction another.
    """
    require_cuda(device)
    if direction not in ("forward", "training"):
        raise ValueError(f"direction must be forward or training, got {direction!r}")
    facts, records, before = environment(), [], measured_before(output_dir)
    for lengths in workloads:
        works = {n: Workload(pattern, n, heads, head_dim, device, dtype=dtype) for n in lengths}
        parameters = {"sweep": sweep, "lengths": " ".join(map(str, lengths)), "direction": direction}
        parameters |= {name: value for name, value in works[lengths[0]].parameters.items() if name != "length"}
        asked = {**parameters, "curve": curve}.items()
        known = [each for each in before if "b" in each and asked <= each["b"]["parameters"].items()]
        records += known
        done = {each["b"]["name"] for each in known} | ({"caching"} if not curve else set())
        missing = [name for name in STRATEGIES if name not in done]
        if not missing:
            continue
        try:
            with torch.cuda.device(device):  # pools and graphs are of the current one
                for record in _pool_records(missing, lengths, works, parameters, curve, repetitions):
                    append_records([record], output_dir)
                    records.append({**record.record(), "environment": facts})
        except torch.OutOfMemoryError as error:
            print(f"{lengths}: left out, no room: {str(error).splitlines()[0]}", flush=True)
    return records


@dataclass(frozen=True)
class _Watched:
    """A strategy at work on a workload."""

    case: Case
    results: Callable[[], Results]
    allocated_bytes: int
    reserved_bytes: int


def _pool_records(
    strategies: Sequence[str],
    lengths: Sequence[int],
    works: dict[int, Workload],
    parameters: dict,
    curve: str,
    repetitions: int,
) -> Iterator[PoolRecord]:
    device = works[lengths[0]].device
    caching = _watched("caching", lengths, works, parameters, "")
    how = {"device": device, "repetitions": repetitions, "warmup": 2, "min_sample_ms": MIN_SAMPLE_MS}
    for name in strategies:
        other = _watched(name, lengths, works, parameters, curve)
        difference = relative_difference(other.results(), caching.results())
        measured = compare_paired(caching.case, other.case, **how)
        allocated, reserved = zip(*((x.allocated_bytes, x.reserved_bytes) for x in (caching, other)), strict=True)
        yield PoolRecord(measured, allocated, difference, reserved)
        del other  # its memory, before the next is watched


def _watched(name: str, lengths: Sequence[int], works: dict[int, Workload], parameters: dict, curve: str) -> _Watched:
    ordering = partial(Ordering.from_curve, curve) if curve else None
    module = DilatedAttention(works[lengths[0]].pattern, kv_ordering=ordering)
    device, is_forward = works[lengths[0]].device, parameters["direction"] == "forward"

    def call(length: int) -> Results:
        work = works[length]
        if is_forward:
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
    peak = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    inputs = [x for work in works.values() for x in (work.tensors[:3] if is_forward else work.tensors)]
    parameters = {**parameters, "curve": curve, "input_bytes": sum(x.nbytes for x in inputs)}
    case = Case(name, partial(from_idle, serve, device), parameters, works[lengths[-1]].error(serve()))
    return _Watched(case, serve, peak[0] - before, peak[1] - before)


def _emptied(device: torch.device) -> int:
    # Bytes allocated once what nobody holds is given back; the peaks begin there. What segments that others hold a part
    # of have to spare stays reserved, and may serve: it counts for every strategy alike.
    begin_peak(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def pool_table(records: list[dict], sweep: str) -> pd.DataFrame:
    """Every strategy on every workload of a sweep, torch's caching allocator in sequence order first.

    Args:
        records: of `pool_comparison`, or of a results.jsonl.
        sweep: the value of the parameter of that name.

    Returns:
        lengths, strategy, curve, the other parameters, allocated_bytes, reserved_bytes (both at their peaks),
        fragmented_bytes (their difference), median_ms, and ratio (time of the caching allocator over the strategy's)
        with its interval low to high.
    """
    rows = {}
    for record in (each for each in records if "a" in each and each["a"]["parameters"]["sweep"] == sweep):
        intervals = (1.0, 1.0, 1.0), (record["ratio"], *record["interval"])
        held = zip(record["peak_bytes"], record["reserved_bytes"], strict=True)
        for side, (allocated, reserved), (ratio, low, high) in zip(
            (record["a"], record["b"]), held, intervals, strict=True
        ):
            given = side["parameters"]
            row = {"lengths": given["lengths"], "strategy": side["name"], **given}
            row |= {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmented_bytes": reserved - allocated}
            row |= {"median_ms": side["median_ms"], "ratio": ratio, "low": low, "high": high, "error": side["error"]}
            rows.setdefault((given["lengths"], side["name"], given["curve"], given["direction"]), row)
    return pd.DataFrame(list(rows.values()))


def memory_table(records: list[dict]) -> pd.DataFrame:
    """The documents' table of memory (seeds/004) beside ours: peak memory with the inputs, without and with a pool.

    Args:
        records: of `pool_comparison` at 8192, 16384 and 32768 tokens with a curve, of the sweep "memory table".

    Returns:
        tokens, configuration, allocated_gib, reserved_gib (the inputs in both), claimed_gb (NaN where the documents
        have none).
    """
    rows = []
    for row in pool_table(records, "memory table").itertuples():
        tokens, without = int(row.lengths), row.strategy == "caching"
        is_claimed = (row.strategy, bool(row.curve)) in (("caching", False), ("pool", True))
        claimed = SEED_MEMORY_GB[tokens][not without] if is_claimed and tokens in SEED_MEMORY_GB else float("nan")
        rows.append(
            {
                "tokens": tokens,
                "configuration": f"{row.strategy}, {row.curve or 'linear'}",
                "allocated_gib": (row.allocated_bytes + row.input_bytes) / 2**30,
                "reserved_gib": (row.reserved_bytes + row.input_bytes) / 2**30,
                "claimed_gb": claimed,
            }
        )
    return pd.DataFrame(rows)


def pattern_cache(
    lengths: Sequence[int],
    *,
    pattern: DilatedPattern,
    heads: int,
    head_dim: int,
    device: torch.device,
    output_dir: str = "",
    repetitions: int = 20,
) -> list[dict]:
    """What is kept of a pattern and of an ordering: the time to build it, beside a look-up and beside a whole call.

    "schedule tables" are those that the fused kernels read, "Hilbert ordering" the permutation, its inverse and the
    kernels' table of slots. Times are the host's, and true without a GPU too: nothing here is interpreted.

    Args:
        lengths: tokens.
        pattern: which keys a query sees.
        heads, head_dim: of q, k and v.
        device: where the tables go; on a CUDA device a forward in bfloat16 stands beside them.
        output_dir: folder of results.jsonl; empty writes nothing.
        repetitions: samples a side.

    Returns:
        A record a length, table and opponent: the ratio is the time to build over that of a look-up, or of a call.

    Raises:
        ValueError: if what is built is not what is found.
    """
    facts, done, records = environment(), recorded_before(output_dir), []
    for length in lengths:
        ordering = Ordering.from_curve("hilbert", length).to(device)
        tables = partial(_schedule_tables, pattern, length, heads, device)
        kept = {
            "schedule tables": (partial(tables, division.launches.__wrapped__, schedule.tables.__wrapped__), tables),
            "Hilbert ordering": (
                partial(ordering_tables.__wrapped__, ordering, ordering.device),
                lambda o=ordering: (o.perm, o.inverse, o.slots(o.device)),
            ),
        }
        for what, (build, find) in kept.items():
            built, found = build(), find()
            if not all(map(torch.equal, built, found)):
                raise ValueError(f"{what} must be found as they are built, at {length} tokens")
            work = Workload(pattern, length, heads, head_dim, device)
            parameters = {"sweep": "pattern cache", "what": what, "tables_on": device.type, **work.parameters}
            opponents = [Case("look-up", find, parameters, 0.0)]
            if device.type == "cuda":
                call = partial(DilatedAttention(pattern), *work.tensors[:3])
                opponents.append(Case("call", partial(_finished, call, device), parameters, work.error((call(),))))
            build_case = Case("build", partial(_finished, build, device), parameters, 0.0)
            for opponent in opponents:
                if before := done.get(identity(build_case, opponent)):
                    records.append(before)
                    continue
                measured = compare_paired(build_case, opponent, device="cpu", repetitions=repetitions, warmup=2)
                record = Recorded(measured, (sum(x.nbytes for x in built), 0), None)
                append_records([record], output_dir)
                records.append({**record.record(), "environment": facts})
    return records


def _schedule_tables(
    pattern: DilatedPattern,
    length: int,
    kv_heads: int,
    device: torch.device,
    launches: Callable = division.launches,
    tables: Callable = schedule.tables,
) -> list[Tensor]:
    ones = chain(*launches(pattern, length, kv_heads, False))
    found = [tables(pattern, one, length, kv_heads, division.BLOCK, schedule.TILES_TOGETHER, device) for one in ones]
    return [x for each in found for x in (each.branches, each.offsets, each.branch_ids, each.items, each.classes)]


def _finished(call: Callable[[], object], device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
