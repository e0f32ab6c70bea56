"""Pairs of calls: each held against float64, against each other, timed in turn, recorded as soon as they are known."""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import isfinite

import torch
from torch import Tensor

from hilbert_lib.files import one_line
from hilbert_lib.lab.first_pass import first_pass
from hilbert_lib.lab.records import Kept
from hilbert_lib.lab.sustained import back_to_back, seconds_of_a_call
from hilbert_lib.lab.tables import BACK_TO_BACK, identity_of, sides_of
from hilbert_lib.lab.timers import old_objects_apart
from hilbert_lib.lab.timing import Case, Comparison, Measurement, Sustained, compare_paired, measure
from hilbert_lib.limits.memory import begin_peak

Results = tuple[Tensor, ...]
MIN_SAMPLE_MS = 0.02  # longer calls are timed one by one, so that their launches hide behind the device's lead
VERY_SLOW = 2.0  # seconds of a call


@dataclass(frozen=True)
class Side:
    """One of two calls; what it is made of is as in `timing.Case`. Nothing is allocated before `run` is called.

    run: both sides of a pair return the same tensors to rounding, or one nothing. error: of what it returned.
    """

    name: str
    parameters: dict
    run: Callable[[], Results]
    error: Callable[[Results], float]
    useful_flop: float | None = None
    useful_bytes: float | None = None


def relative_difference(results: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The largest over the tensors of |result - exact| / |exact|, Frobenius norms; |result| where |exact| is 0.

    A ValueError says that it is not finite, or that two tensors have different shapes.

    >>> relative_difference([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 5.0])]).__round__(3)
    0.632
    """
    ratios = []
    for result, true in zip(results, exact, strict=True):
        if result.shape != true.shape:
            raise ValueError(f"results must have the shape of exact, {tuple(true.shape)}, got {tuple(result.shape)}")
        dtype = torch.float64 if true.dtype == torch.float64 else torch.float32
        norm = true.to(dtype).norm().item()
        ratios.append((result.to(dtype) - true.to(dtype)).norm().item() / (norm or 1.0))
        if not isfinite(ratios[-1]):
            raise ValueError(f"results must be finite, got a relative difference of {ratios[-1]}")
    return max(ratios)


def run_sides(
    cases: Iterable[tuple[Side, ...]],
    *,
    device: torch.device | str,
    output_dir: str = "",
    repetitions: int = 20,
    seconds: float = 2.0,
    on_cpu: bool = False,
) -> list[dict]:
    """Check each case, and on a CUDA device time it: alone, or two sides in turn.

    On the CPU nothing is timed, unless asked: Triton's kernels are interpreted there, and their times mean nothing.
    Cases and folder are as in `sweep`. Gives a record a case, in order: of `timing`, with peak_bytes (of each
    side's call, its results included: what it asked for) and output_difference (None where there is nothing to
    compare); where nothing is timed only names, parameters and errors.

    Args:
        cases: one or two sides each. device: where they compute. output_dir: folder of results.jsonl, or "".
        repetitions: samples a side; slow calls take fewer, at least 5, so that a pair stays near so many `seconds`.
        on_cpu: whether to time on the CPU too, where no side is interpreted.

    >>> one = Side("one", {}, lambda: (torch.ones(1),), lambda results: 0.0)
    >>> run_sides([(one, one)], device="cpu")[0]["output_difference"]
    0.0
    """
    device = torch.device(device)

    def singly(cases: list[Case], took: list[float]) -> dict:
        return time_cases(*cases, device=device, took=sum(took), repetitions=repetitions, seconds=seconds).record()

    # What is not timed may be interpreted, which takes long, and pairs share sides.
    checked = None if on_cpu or device.type == "cuda" else lru_cache(maxsize=4)(lambda run: run())
    with nullcontext() if device.type == "cpu" else old_objects_apart():
        measure = partial(_check, call=checked) if checked else partial(_time, device=device, timed=singly)
        points = ((sides, partial(measure, sides)) for sides in cases)
        return sweep(points, output_dir, write=checked is None, tells=device.type == "cuda")


def run_back_to_back(
    cases: Iterable[tuple[Side, ...]], *, device: torch.device | str, output_dir: str = "", seconds: float = 0.5
) -> list[dict]:
    """Time each case's sides among their own calls alone, as in training: windows of each in turn.

    Arguments as of `run_sides`; seconds: of a window, about. A record holds all sides of a case. Their samples are
    windows of calls, and the name of their sweep, a parameter that each side has, ends with `tables.BACK_TO_BACK`. n
    sides take some 10 + 10 n windows, and what they compile.

    >>> one = Side("one", {"sweep": "s"}, lambda: (torch.ones(1),), lambda results: 0.0)
    >>> len(run_back_to_back([(one,)], device="cpu", seconds=1e-3)[0]["sides"][0]["samples_ms"])
    10
    """
    device = torch.device(device)

    def timed(cases: list[Case], took: list[float]) -> dict:
        took = [seconds_of_a_call(case.run, device, alone) for case, alone in zip(cases, took, strict=True)]
        calls = [max(1, round(seconds / call_seconds)) for call_seconds in took]
        timings = back_to_back([case.run for case in cases], device, calls=calls)
        records = [
            _sustained(case, count, timing, device).record()
            for case, count, timing in zip(cases, calls, timings, strict=True)
        ]
        return {"kind": "back to back", "sides": records}

    points = ((sides, partial(_time, sides, device, timed)) for sides in map(_apart, cases))
    return sweep(points, output_dir, tells=device.type == "cuda")


def sweep(
    points: Iterable[tuple[tuple[Side | Case, ...], Callable[[], dict]]],
    output_dir: str = "",
    *,
    write: bool = True,
    tells: bool = False,
) -> list[dict]:
    """Measure each point once, and keep each record as soon as it is known.

    A point that the folder's results.jsonl holds from this code on this hardware is not measured again, so that an
    interrupted sweep goes on where it was. A point without room in the device's memory is left out and said so. In a
    first pass (`lab.first_pass`) this process only computes its part of the points; there are no records.

    points: sides, and what measures them; asked for one at a time, so that a generator keeps one workload in memory.
    In a first pass each side's `run` is called once, unless it is None.
    output_dir, write: as of `Kept`. tells: whether a line a point is printed.

    >>> one = Case("one", None, {"n": 1}, 0.0)
    >>> sweep([((one,), lambda: one.facts | {"ms": 0.5})])[0]["ms"]
    0.5
    """
    store, records = Kept(output_dir, _key, write=write, in_first_pass=True), []
    if compiling := first_pass():
        unknown = (sides for sides, _ in points if _identity(sides) not in store.known)
        compiling.compute((_label(sides), [side.run for side in sides if side.run]) for sides in unknown)
        return []
    for sides, measured in points:
        record = store.known.get(_identity(sides))
        try:
            records.append(store.add(measured()) if record is None else record)
        except torch.OutOfMemoryError as error:
            print(f"{_label(sides)}: left out, no room: {one_line(error)}", flush=True)
            continue
        if tells:
            print(f"{_label(sides)}: {_line(records[-1])}", flush=True)
    return records


def _apart(sides: tuple[Side, ...]) -> tuple[Side, ...]:
    # In a sweep of their own: single calls of the same sides are another measurement.
    named = [side.parameters | {"sweep": side.parameters["sweep"] + BACK_TO_BACK} for side in sides]
    return tuple(replace(side, parameters=parameters) for side, parameters in zip(sides, named, strict=True))


def _sustained(case: Case, calls: int, timing: dict, device: torch.device) -> Sustained:
    about = case.facts | {"device": str(device), "warmup": timing["warmup"], "calls_per_sample": calls}
    readings = {name: timing.get(name) for name in ("watts", "joules", "celsius", "held_by")}
    clocks = (timing.get("mhz"),) * 2
    return Sustained(
        **about, samples_ms=tuple(timing["windows_ms"]), sm_clock_mhz=clocks, host_ms=timing["host"], **readings
    )


def time_cases(
    *cases: Case, device: torch.device, took: float, repetitions: int = 20, seconds: float = 2.0
) -> Measurement | Comparison:
    """Time one case, or two in turn, whose calls take so long together; slow ones with fewer samples than asked.

    At least five samples after two untimed calls; three after one where a call takes longer than `VERY_SLOW` seconds.
    """
    least, warmup = (3, 1) if took > VERY_SLOW else (5, 2)
    samples = max(least, min(repetitions, int(seconds / (2 * took))))  # a pair's sample follows an untimed call
    how = {"device": device, "repetitions": samples, "warmup": warmup}
    if device.type == "cuda":
        how["min_sample_ms"] = MIN_SAMPLE_MS
    return compare_paired(*cases, **how) if len(cases) == 2 else measure(*cases, **how)


def _key(record: dict) -> str | None:
    return identity_of(sides_of(record)) if {"a", "name", "sides"} & record.keys() else None


def _check(sides: tuple[Side, ...], call: Callable[[Callable[[], Results]], Results]) -> dict:
    results = [call(side.run) for side in sides]
    parts = [case.facts for case in _cases(sides, results)]
    shown = dict(zip("ab", parts, strict=True)) if len(parts) == 2 else parts[0]
    return {"kind": "check", **shown, "peak_bytes": (0,) * len(sides), "output_difference": _difference(results)}


def _time(sides: tuple[Side, ...], device: torch.device, timed: Callable[[list[Case], list[float]], dict]) -> dict:
    runs = [_once(side, device) for side in sides]
    results = [result for result, _, _ in runs]
    cases, difference = _cases(sides, results), _difference(results)
    peaks, took = tuple(peak for _, peak, _ in runs), [seconds for _, _, seconds in runs]
    del runs, results  # they are as large as what is timed next
    return timed(cases, took) | {"peak_bytes": peaks, "output_difference": difference}


def _once(side: Side, device: torch.device) -> tuple[Results, int, float]:
    # Results, bytes asked for at a GPU's peak, and seconds of the second call; the first compiles and keeps its tables.
    side.run()
    if device.type == "cpu":
        start = time.perf_counter()
        return side.run(), 0, time.perf_counter() - start
    begin_peak(device)
    before, start = _requested_bytes("current", device), time.perf_counter()
    results = side.run()
    torch.cuda.synchronize(device)
    return results, _requested_bytes("peak", device) - before, time.perf_counter() - start


def _requested_bytes(when: str, device: torch.device) -> int:
    # What is given may be more: a block of the allocator's cache goes whole where little would be left of it.
    return torch.cuda.memory_stats(device)[f"requested_bytes.all.{when}"]


def _cases(sides: tuple[Side, ...], results: list[Results]) -> list[Case]:
    # The sides with their errors.
    return [Case(**vars(side) | {"error": side.error(result)}) for side, result in zip(sides, results, strict=True)]


def _difference(results: list[Results]) -> float | None:
    return relative_difference(results[1], results[0]) if len(results) == 2 and all(results) else None


def _identity(sides: tuple[Side | Case, ...]) -> str:
    return identity_of([vars(side) for side in sides])


def _label(sides: tuple[Side | Case, ...]) -> str:
    work = ", ".join(
        f"{name} {value}" for name, value in sides[-1].parameters.items() if value not in (None, "", False)
    )
    return f"{work}: {' | '.join(side.name for side in sides)}"


def _line(record: dict) -> str:
    sides = [f"{timing['median_ms']:.3g} ms (error {timing['error']:.1e})" for timing in sides_of(record)]
    return ", ".join(sides) + (f", ratio {record['ratio']:.3f}" if "ratio" in record else "")
