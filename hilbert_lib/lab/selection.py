"""Choosing a backend by measurement: each candidate beside what "auto" takes, and what the choice is worth."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.choice import rule_for
from hilbert_lib.attention.explain import explain_backend
from hilbert_lib.attention.measured_rules import ShapeClass, device_name, folder, remember
from hilbert_lib.attention.validation import as_pattern, autocast_dtype
from hilbert_lib.checks import boolean
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.sweeps.kernels import Named, Pairs
from hilbert_lib.lab.tables import of_sweep, ratio_table
from hilbert_lib.lab.workload import BOTH, Workload, by_backend
from hilbert_lib.limits.memory import GB, MemorySafetyChecker
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood

SELECTION = "selection"
# Options of a call with which no measurement is made.
SPECIAL = (
    "key_padding_mask",
    "query_start",
    "key_start",
    "ordering",
    "query_box",
    "extra_q",
    "extra_k",
    "bias",
    "cu_seqlens",
)


def candidates(work: Workload, *, gradient: bool) -> list[str]:
    """The backends worth measuring: those that serve, without the reference and without interpreted kernels."""
    passed_over = {"reference"} | ({"triton", "lists"} if kernel_mode() == "interpreted" else set())
    names = [name for name in backends_for(work.call.pattern) if name not in passed_over]
    return [name for name in names if not work.refusal(name, gradient=gradient)]


def chosen(work: Workload, *, gradient: bool) -> str:
    """Backend that "auto" takes for this work."""
    q, k = work.stand_ins(gradient=gradient)
    return explain_backend(q, k, k, work.pattern, is_causal=work.is_causal).chosen


def choice_pairs(works: Named, attend: Callable[..., Tensor], names: Sequence[str] = ()) -> Pairs:
    """Each candidate, or backend of `names` that serves, beside what "auto" takes: forward; both directions.

    works: of `workload.grid`. attend: the output of (backend, q, k, v, work).
    """
    for label, work in works:  # not `product`, which would keep the tensors of all works
        for gradient in (False, True):
            yield from _beside_choice(label, work, attend, names or candidates(work, gradient=gradient), gradient)


def _beside_choice(label: str, work: Workload, attend: Callable, names: Sequence[str], gradient: bool) -> Pairs:
    base = chosen(work, gradient=gradient)
    about = {"direction": BOTH if gradient else "forward", "sweep": SELECTION, "pattern": label}
    for name in names:
        if name != base and not work.refusal(name, gradient=gradient):
            yield tuple(work.side(backend, partial(attend, backend), **about) for backend in (name, base))


def choice_table(records: list[dict], *, on_device: bool = False) -> pd.DataFrame:
    """Worth of the automatic choice, work by work; each backend's column is its time over the choice's.

    Calls follow each other, and so take the device's time or the host's to queue them, whichever is longer; with
    on_device, as in a CUDA graph, and in records without the host's, the device's alone.
    """
    ratios = ratio_table(records, SELECTION)
    ratios["ratio"] = [_ratio(record, on_device=on_device) for record in of_sweep(records, SELECTION)]
    work = ["pattern", "branches", "length", "heads", "head_dim", "is_causal", "dtype", "direction"]
    rows = []
    for key, group in ratios.groupby(work, sort=False):
        times = {group.b.iloc[0]: 1.0, **dict(zip(group.a, group.ratio, strict=True))}
        summary = {"automatic": group.b.iloc[0], "best": min(times, key=times.get)}
        summary |= {"over_best": 1 / min(times.values()), "over_worst": max(times.values())}
        rows.append({**dict(zip(work, key, strict=True)), **summary, **times})
    return pd.DataFrame(rows)


def measured_times(work: Workload, *, gradient: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Time all candidates that fit into memory, as `estimate_memory` predicts it.

    Each candidate's time over that of the automatic choice, the fastest first; and the milliseconds of a call.
    """
    names = [name for name in candidates(work, gradient=gradient) if _fits(work, name, gradient)]
    base = chosen(work, gradient=gradient)
    # Where the choice itself does not fit, nothing can stand beside it.
    sides = _beside_choice("", work, by_backend, names, gradient) if base in names else ()
    records = run_sides(sides, device=work.device, seconds=1.0, on_cpu=True)
    if not records:
        raise RuntimeError(f"no two backends could be timed on {work.parameters}, within memory: {names}")
    times = {base: 1.0} | {record["a"]["name"]: _ratio(record) for record in records}
    medians = {timing["name"]: timing["call_ms"] for record in records for timing in (record["b"], record["a"])}
    return dict(sorted(times.items(), key=itemgetter(1))), medians


def remember_times(work: Workload, times: dict[str, float], medians: dict[str, float], *, gradient: bool) -> Path:
    """Keep what `measured_times` found in the file that is returned; "auto" goes by its order from then on."""
    rule_order = rule_for(work.stand_ins(gradient=gradient)[0], work.call, gradient=gradient).order
    order = (*times, *(name for name in rule_order if name not in times))  # the rest for what those cannot serve
    return remember(shape_class(work, gradient=gradient), order, medians)


def shape_class(work: Workload, *, gradient: bool) -> ShapeClass:
    """The class of calls that a measurement of this work speaks for."""
    sizes = work.length, work.heads, work.head_dim
    return ShapeClass(device_name(work.device), work.dtype, *sizes, work.is_causal, gradient, work.pattern)


def select_attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: DilatedPattern | Neighbourhood | tuple[Neighbourhood, ...],
    *,
    benchmark_backends: bool = False,
    **options,
) -> str:
    """The name of the backend that `attend` would run for the same arguments; options as in `explain_backend`.

    With benchmark_backends the candidates are timed first, on random tensors of the size of q, unless this machine has
    timed calls of this class before. The result is remembered. If one backend alone serves, none is timed. Refused with
    dropout, masks, extra queries or keys, packed documents, query_start, key_start, a query_box, a bias, an ordering of
    a grid, windows that differ by head, a union, a pattern of one's own, or a backend. RuntimeError if no two backends
    serve within memory.

    >>> q = torch.ones(1, 8, 2, 4)
    >>> select_attention_backend(q, q, q, DilatedPattern((4,), (1,)))
    'sdpa'
    """
    boolean("benchmark_backends", benchmark_backends)
    explain = partial(explain_backend, q, k, v, pattern, **options)
    explanation = explain()
    if benchmark_backends:
        pattern = as_pattern(pattern).of_any_heads()
        special = [name for name in SPECIAL if options.get(name) is not None]
        if not isinstance(pattern, DilatedPattern | Neighbourhood):
            special += ["a window for each head" if isinstance(pattern, HeadNeighbourhoods) else f"a {pattern.noun}"]
        special += ["dropout_p"] if options.get("dropout_p", 0.0) > 0.0 else []
        special += ["backend"] if options.get("backend", "auto") != "auto" else []
        if special:
            raise ValueError(f"benchmark_backends must be False where {special[0]} is given, got True")
        if not explanation.is_measured and q.numel():
            gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            work = _like(q, pattern, options.get("is_causal", False))
            if len(candidates(work, gradient=gradient)) < 2:
                return explanation.chosen
            times, medians = measured_times(work, gradient=gradient)
            try:
                remember_times(work, times, medians, gradient=gradient)
            except OSError as error:
                warnings.warn(f"measured, but not kept: {folder()}: {error.strerror or error}", stacklevel=2)
                return next((name for name in times if explain(backend=name).chosen), explanation.chosen)
            explanation = explain()
    if not explanation.chosen:
        name = options["backend"]
        raise ValueError(f"backend={name!r} {explanation.reasons[name]}; see explain_backend")
    return explanation.chosen


def _like(q: Tensor, pattern: DilatedPattern | Neighbourhood, is_causal: bool) -> Workload:
    # The sequences of a batch count as heads; autocast decides in which dtype a call will run.
    batch, length, heads, head_dim = q.shape
    dtype = str(autocast_dtype(q)).removeprefix("torch.")
    return Workload(pattern, length, batch * heads, head_dim, q.device, is_causal, dtype=dtype)


def _ratio(record: dict, *, on_device: bool = False) -> float:
    a, b = record["a"], record["b"]
    waits_for_host = any((side.get("host_ms") or 0.0) > side["median_ms"] for side in (a, b))
    return a["call_ms"] / b["call_ms"] if waits_for_host and not on_device else record["ratio"]


def _fits(work: Workload, name: str, gradient: bool) -> bool:
    checker = MemorySafetyChecker(device=work.device)
    if not checker.check_memory_available(work.input_bytes / GB)[0]:
        return False  # an estimate takes the longer, the longer the sequence is
    directions = ("forward", "backward") if gradient else ("forward",)
    needs = [work.estimate(name, direction).total_gb for direction in directions]
    return checker.check_memory_available(max(needs))[0]
