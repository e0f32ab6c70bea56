"""The sweeps of notebook 06: which pairs of calls answer how fast the kernels are, and what a layout changes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call
from hilbert_lib.curves.coordinates import curve_coordinates, curve_index
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.pairs import Results, Side, relative_difference
from hilbert_lib.lab.records import RESULTS, newest_run, read_records
from hilbert_lib.lab.workload import Workload
from hilbert_lib.machine import kernel_mode
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

Pairs = Iterator[tuple[Side, Side]]
Attention = Callable[[Tensor, Tensor, Tensor, Call], Tensor]

NO_TABLE = "no table"


def backends(
    patterns: Mapping[str, DilatedPattern],
    *,
    opponents: Sequence[str],
    lengths: Sequence[int],
    heads: int,
    head_dims: Sequence[int],
    device: torch.device,
    rows: int = 2**22,
) -> Pairs:
    """Each opponent beside "triton" on the same work: forward and backward, causal and not.

    Args:
        patterns: by name.
        opponents: names of `BACKENDS` and `BASELINES`. One that cannot serve a work is left out and says why.
        lengths: tokens.
        heads: at most; fewer where length * heads would pass `rows`.
        head_dims: sizes of a head.
        device: where to compute.
        rows: rows of q at most.

    Yields:
        (opponent, triton), direction by direction. In the backward's time there is no forward.

    Raises:
        ValueError: for an unknown opponent.
    """
    for name in opponents:
        if name not in (*BACKENDS, *BASELINES):
            raise ValueError(f"opponents must be of {', '.join((*BACKENDS, *BASELINES))}; got {name!r}")
    told = set()
    for length, (label, pattern), head_dim, is_causal in product(lengths, patterns.items(), head_dims, (False, True)):
        fitting = max(1, min(heads, rows // length))
        work = Workload(pattern, length, fitting, head_dim, device, is_causal)
        ours = {direction: _side(work, "triton", label, direction) for direction in ("forward", "backward")}
        for name, direction in product(opponents, ours):
            if reason := _refusal(work, name, direction):
                if (name, reason) not in told:
                    print(f"{name} is left out: {reason}")
                told.add((name, reason))
            else:
                yield _side(work, name, label, direction), ours[direction]


def determinism(
    patterns: Mapping[str, DilatedPattern],
    *,
    lengths: Sequence[int],
    heads: int,
    head_dims: Sequence[int],
    device: torch.device,
    rows: int = 2**22,
) -> Pairs:
    """The backward of "triton" as torch's determinism asks for it, beside the one that is free to add in any order.

    Args:
        patterns, lengths, heads, head_dims, device, rows: as in `backends`.

    Yields:
        (deterministic, free), causal or not.
    """
    for length, (label, pattern), head_dim, is_causal in product(lengths, patterns.items(), head_dims, (False, True)):
        work = Workload(pattern, length, max(1, min(heads, rows // length)), head_dim, device, is_causal)
        free = _side(work, "triton", label, "backward")
        free = replace(free, parameters={**free.parameters, "sweep": "determinism"})

        def run(free=free) -> Results:
            before = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
            try:
                return free.run()
            finally:
                torch.use_deterministic_algorithms(before)

        yield replace(free, name="triton, deterministic", run=run), free


def layouts(
    *,
    lengths: Sequence[int],
    dilations: Sequence[int],
    row_bytes: Sequence[int],
    keys: int,
    heads: int,
    device: torch.device,
    queries: int = 0,
) -> Pairs:
    """The fused kernel on k and v stored in every order, beside linear storage read through the same kind of table.

    k and v are stored heads first: there a small row has rows of its own head beside it, so that an order can change
    how many cache lines are touched. All sides compute the same function.

    Args:
        lengths: tokens. dilations: r of the one branch, offset 0. row_bytes: bytes of one head's row, in bfloat16.
        keys: keys a query sees at most; the segment is as long as that takes.
        heads: heads.
        device: where to compute.
        queries: 0 for all of the sequence; otherwise so many, decoding, near its end.

    Yields:
        (linear, layout); the layout "no table" is linear storage read without a table, on some GPUs by another kernel.
    """
    for length, rate, size in product(lengths, dilations, row_bytes):
        segment = min(length, keys * rate)
        asked = ((length - queries) // rate * rate, queries) if queries else None
        pattern = DilatedPattern((segment,), (rate,), offsets="zero")
        work = Workload(pattern, length, heads, size // 2, device, queries=asked, heads_first=True)
        orders = compared_orderings(length, rate, segment=segment)
        linear = _stored_side(work, "linear", orders.pop("linear"))
        yield linear, _stored_side(work, NO_TABLE, None)
        for name, ordering in orders.items():
            yield linear, _stored_side(work, name, ordering)


def curves(shapes: Sequence[Sequence[int]], *, device: torch.device) -> Pairs:
    """The Hilbert curve, decoded and encoded, beside a copy that reads and writes as many bytes.

    Args:
        shapes: sides of the grids.
        device: where to compute.

    Yields:
        (copy, decode) and (copy, encode), and where the kernels run on the device the latter once more without the
        host's checks, for the last of which it waits. The error is the share of cells that do not come back from a
        round trip.
    """
    for shape in shapes:
        yield from _decode_and_encode(tuple(shape), device)


def _decode_and_encode(shape: tuple[int, ...], device: torch.device) -> Pairs:
    places = prod(shape)
    coordinates = cache(lambda: curve_coordinates("hilbert", shape, device=device))

    def decode() -> Results:
        return (curve_coordinates("hilbert", shape, device=device),)

    def encode() -> Results:
        return (curve_index("hilbert", coordinates(), shape),)

    def encode_unread() -> Results:
        from hilbert_lib.curves import kernels as curves_triton

        return (curves_triton.index_unread(coordinates(), shape)[0],)

    def lost(results: Results) -> float:
        (found,) = results
        index = found if found.ndim == 1 else curve_index("hilbert", found, shape)
        return (index != torch.arange(places, device=device)).double().mean().item()

    calls = [("decode", "hilbert curve", decode), ("encode", "hilbert curve", encode)]
    if kernel_mode() == ("compiled" if device.type == "cuda" else "interpreted"):
        calls.append(("encode", "hilbert curve, no wait", encode_unread))
    for direction, name, run in calls:
        parameters = {"sweep": "curves", "shape": " x ".join(map(str, shape)), "direction": direction}
        # Decoding writes the cells; encoding reads them and writes their places.
        moved = 8 * places * (len(shape) if direction == "decode" else len(shape) + 1)
        yield _copy(moved, parameters, device), Side(name, parameters, run, lost, useful_bytes=moved)


def ceilings(*, copied_bytes: int, matrix_side: int, device: torch.device) -> Iterator[tuple[Side]]:
    """What this device can do at best: a copy, and a bfloat16 matrix product.

    Args:
        copied_bytes: read and written together.
        matrix_side: n of an n x n x n product.
        device: where to compute.
    """
    parameters = {"sweep": "ceilings"}
    yield (_copy(copied_bytes, {**parameters, "bytes": copied_bytes}, device),)
    n = matrix_side

    @cache
    def matrices() -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(2, n, n, device=device, dtype=torch.bfloat16))

    def error(results: Results) -> float:
        a, b = matrices()
        return relative_difference([results[0][:8]], [a[:8].double() @ b.double()])

    yield (Side("matrix product", {**parameters, "n": n}, lambda: (matrices()[0] @ matrices()[1],), error, 2 * n**3),)


def committed_records(notebook: str = "06_kernel_benchmarks") -> list[dict]:
    """The records of a notebook's `newest_run`; empty where there is none.

    Args:
        notebook: its name.

    >>> all("environment" in record for record in committed_records())
    True
    """
    run = newest_run(notebook)
    return read_records(run / RESULTS) if run else []


def records_to_draw(records: list[dict], notebook: str = "06_kernel_benchmarks") -> tuple[list[dict], str]:
    """These records where they hold times, otherwise the committed ones, and where they come from, for a title.

    Args:
        records: of `paired.run_sides`.
        notebook: whose committed records.

    Returns:
        Records, empty where nothing was timed and nothing is committed; and their source.

    >>> records_to_draw([])[0] == committed_records()
    True
    """
    if any(record.get("kind") != "check" for record in records):
        return records, say_hardware(records[0]["environment"])
    committed = committed_records(notebook)
    return committed, f"committed record, {say_hardware(committed[0]['environment'])}" if committed else ""


def layout_verdicts(ratios: pd.DataFrame) -> pd.DataFrame:
    """How often a layout was faster or slower than linear storage, by row size.

    Args:
        ratios: `paired.ratio_table` of the sweep "layouts" or "decoding".

    Returns:
        row_bytes, b, cases, faster and slower (cases whose interval lies above or below 1), best and worst ratio.
    """
    marked = ratios.assign(faster=ratios.low > 1, slower=ratios.high < 1)
    return marked.groupby(["row_bytes", "b"], as_index=False, sort=False).agg(
        cases=("ratio", "size"),
        faster=("faster", "sum"),
        slower=("slower", "sum"),
        best=("ratio", "max"),
        worst=("ratio", "min"),
    )


def _side(work: Workload, name: str, label: str, direction: str) -> Side:
    flop_forward, bytes_forward, flop_backward, bytes_backward = work.flop_and_bytes
    run = _attention(name)
    parameters = {"sweep": "backends", "pattern": label, "direction": direction, **work.parameters}
    if direction == "forward":

        def forward() -> Results:
            with torch.no_grad():
                return (run(*work.tensors[:3], work.call),)

        return Side(name, parameters, forward, work.error, flop_forward, bytes_forward)
    out = cache(lambda: run(*work.leaves, work.call))

    def backward() -> Results:
        return torch.autograd.grad(out(), work.leaves, work.tensors[3], retain_graph=True)

    return Side(name, parameters, backward, work.error, flop_backward, bytes_backward)


def _attention(name: str) -> Attention:
    if name in BASELINES:
        return BASELINES[name].run
    return lambda q, k, v, call: dilated_attention(q, k, v, call.pattern, is_causal=call.is_causal, backend=name)


def _refusal(work: Workload, name: str, direction: str) -> str:
    # Why a call cannot be served, from a stand-in for q that takes no memory.
    shape = (1, work.length, work.heads, work.head_dim)
    one = torch.empty(1, device=work.device, dtype=getattr(torch, work.dtype))
    q = one.requires_grad_(direction == "backward").expand(shape)
    return {**BACKENDS, **BASELINES}[name].refusal(q, work.call)


def _stored_side(work: Workload, name: str, ordering: Ordering | None) -> Side:
    stored = cache(lambda: work.tensors[1:3] if ordering is None else work.stored(ordering))
    flop, moved, *_ = work.flop_and_bytes
    start, count = work.queries or (None, 0)
    parameters = {"sweep": "decoding" if count else "layouts", "queries": count, **work.parameters}
    ((_, rate),) = work.pattern.branches
    parameters |= {"dilation": rate, "row_bytes": 2 * work.head_dim}

    def forward() -> Results:
        asked = {"query_start": start, "kv_ordering": ordering, "backend": "triton"}
        return (dilated_attention(work.tensors[0], *stored(), work.pattern, **asked),)

    return Side(name, parameters, forward, work.error, flop, moved)


def _copy(moved: int, parameters: dict, device: torch.device) -> Side:
    @cache
    def buffers() -> tuple[Tensor, Tensor]:
        source = torch.randint(256, (moved // 2,), device=device, dtype=torch.uint8)
        return source, torch.empty_like(source)

    def copy() -> Results:
        source, target = buffers()
        target.copy_(source)
        return ()  # nothing that the other side computes too

    def error(results: Results) -> float:
        source, target = buffers()
        return (source != target).double().mean().item()

    return Side("copy", parameters, copy, error, useful_bytes=moved)
