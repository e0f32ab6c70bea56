"""Pairs of calls: each held against float64, against each other, timed in turn, recorded as soon as they are known."""

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.lab.sweep import Kept, sweep
from hilbert_lib.lab.timing import Case, Comparison, Measurement, compare_paired, measure
from hilbert_lib.limits.memory import begin_peak

Results = tuple[Tensor, ...]
MIN_SAMPLE_MS = 0.02  # longer calls are timed one by one, so that their launches hide behind the device's lead


@dataclass(frozen=True)
class Side:
    """One of two calls. Nothing is allocated before `run` is called.

    Args:
        name, parameters, useful_flop, useful_bytes: as in `bench.Case`.
        run: the call, without arguments. Both sides of a pair return the same tensors to rounding, or one nothing.
        error: of what `run` returned, against float64.
    """

    name: str
    parameters: dict
    run: Callable[[], Results]
    error: Callable[[Results], float]
    useful_flop: float | None = None
    useful_bytes: float | None = None


@dataclass(frozen=True)
class Recorded:
    """What was measured of one side or of a pair, and what `bench` does not know of it.

    Attributes:
        measured: as `bench` gives it.
        peak_bytes: device memory that a call of each side took at its peak, its results included; by `run_sides` what
            it asked for, where torch may have given a little more.
        output_difference: of the results of a pair, as `relative_difference`; None where there is nothing to compare.
    """

    measured: Measurement | Comparison
    peak_bytes: tuple[int, ...]
    output_difference: float | None

    def record(self) -> dict:
        """One dictionary for JSON: that of `bench`, and these."""
        more = {"peak_bytes": self.peak_bytes, "output_difference": self.output_difference}
        return {**self.measured.record(), **more}


def relative_difference(results: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The largest over the tensors of |result - exact| / |exact|, Frobenius norms; |result| where |exact| is 0.

    Raises:
        ValueError: if it is not finite, or two tensors have different shapes.

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

    On the CPU nothing is timed, unless asked: the kernels run in Triton's interpreter there, whose times mean nothing,
    and a side of several pairs that are near each other runs once. A case that the folder's results.jsonl holds from
    this code on this hardware is not run again. A case without room in the device's memory is left out and said so; the
    others go on.

    Args:
        cases: one or two sides each; asked for one at a time, so that a generator keeps one workload in memory.
        device: where the sides compute.
        output_dir: folder of results.jsonl; empty writes nothing.
        repetitions: samples a side.
        seconds: a pair of slow calls takes fewer samples, at least 5, to stay near this time.
        on_cpu: whether to time on the CPU too, where no side is interpreted.

    Returns:
        A record a case, in order: as `bench` writes them, with peak_bytes and output_difference; where nothing is timed
        only names, parameters and errors.

    >>> one = Side("one", {}, lambda: (torch.ones(1),), lambda results: 0.0)
    >>> run_sides([(one, one)], device="cpu")[0]["output_difference"]
    0.0
    """
    device = torch.device(device)
    # What is not timed may be interpreted, which takes long, and pairs share sides.
    checked = None if on_cpu or device.type == "cuda" else lru_cache(maxsize=4)(lambda run: run())
    with nullcontext() if device.type == "cpu" else old_objects_apart():
        return sweep(
            cases,
            lambda sides: _run(sides, device, repetitions, seconds, checked),
            key=lambda sides: identity(*sides),
            of_record=record_identity,
            output_dir=output_dir,
            write=checked is None,
            label=lambda sides: f"{_work(sides[-1].parameters)}: {' | '.join(side.name for side in sides)}",
            line=_line if device.type == "cuda" else None,
        )


def record_identity(record: dict) -> str | None:
    """`identity` of what a record is of; None for a record that is of no sides.

    >>> record_identity({"kind": "point"}) is None
    True
    """
    return _identity(_sides(record)) if "a" in record or "name" in record else None


def recorded_before(output_dir: str) -> dict[str, dict]:
    """What a folder's results.jsonl holds from this code on this hardware, by `identity`."""
    return Kept(output_dir, record_identity).known


def identity(*sides: Side | Case) -> str:
    """What makes a case or a pair the same in another run: names and parameters.

    >>> identity(Case("a", None, {"length": 8}, 0.0))
    '[["a", {"length": 8}]]'
    """
    return _identity([vars(side) for side in sides])


def side_table(records: list[dict], sweep: str) -> pd.DataFrame:
    """Every side of a sweep once, with the samples of all its pairs.

    Args:
        records: of `run_sides`, or of a results.jsonl.
        sweep: the value of the parameter of that name.

    Returns:
        name, the parameters, useful_flop, useful_bytes, error (the largest), peak_bytes, low_ms, median_ms and high_ms
        (quartiles; NaN where nothing was timed), tflop_per_s, gb_per_s.

    Raises:
        ValueError: if there are no records of the sweep.
    """
    pooled: dict[str, dict] = {}
    for record in of_sweep(records, sweep):
        for side, peak in zip(_sides(record), record["peak_bytes"], strict=True):
            counts = {"useful_flop": side["useful_flop"], "useful_bytes": side["useful_bytes"]}
            row = {"name": side["name"], **side["parameters"], **counts, "error": 0.0, "peak_bytes": 0, "samples": []}
            row = pooled.setdefault(_identity([side]), row)
            row["error"] = max(row["error"], side["error"])
            row["peak_bytes"] = max(row["peak_bytes"], peak)
            row["samples"] += side.get("samples_ms", [])
    table = pd.DataFrame(list(pooled.values()))
    quartiles = [np.quantile(samples or [np.nan], [0.25, 0.5, 0.75]) for samples in table.pop("samples")]
    table[["low_ms", "median_ms", "high_ms"]] = np.array(quartiles)
    table["tflop_per_s"] = table.useful_flop.astype(float) / table.median_ms / 1e9
    table["gb_per_s"] = table.useful_bytes.astype(float) / table.median_ms / 1e6
    return table


def ratio_table(records: list[dict], sweep: str) -> pd.DataFrame:
    """Every pair of a sweep once.

    Args:
        records, sweep: as in `side_table`.

    Returns:
        a and b (names), the parameters of b, ratio (time of a over b's: above 1, b is faster) with its interval low to
        high (NaN where nothing was timed), output_difference, error_a, error_b.

    Raises:
        ValueError: if there are no records of the sweep.
    """
    rows = []
    for record in of_sweep(records, sweep):
        a, b = record["a"], record["b"]
        low, high = record.get("interval", (np.nan, np.nan))
        times = {"ratio": record.get("ratio", np.nan), "low": low, "high": high}
        errors = {"error_a": a["error"], "error_b": b["error"]}
        names = {"a": a["name"], "b": b["name"]}
        rows.append({**names, **b["parameters"], **times, "output_difference": record["output_difference"], **errors})
    return pd.DataFrame(rows)


def of_sweep(records: list[dict], sweep: str) -> list[dict]:
    """The records of one sweep, once each, the newest: two lists of a notebook's parameters may overlap.

    Args:
        records, sweep: as in `side_table`.

    Raises:
        ValueError: if there are no records of the sweep.
    """
    sweeps = [_sides(record)[0]["parameters"]["sweep"] for record in records]
    if sweep not in sweeps:
        raise ValueError(f"sweep must be one of the records' ({', '.join(sorted(set(sweeps)))}), got {sweep!r}")
    known = {_identity(_sides(each)): each for each, own in zip(records, sweeps, strict=True) if own == sweep}
    return list(known.values())


def _run(
    sides: tuple[Side, ...],
    device: torch.device,
    repetitions: int,
    seconds: float,
    checked: Callable[[Callable[[], Results]], Results] | None,
) -> dict:
    runs = [(checked(side.run), 0, 0.0) if checked else _once(side, device) for side in sides]
    results = [result for result, _, _ in runs]
    errors = [side.error(result) for side, result in zip(sides, results, strict=True)]
    difference = relative_difference(results[1], results[0]) if len(sides) == 2 and all(results) else None
    peaks = tuple(peak for _, peak, _ in runs)
    took = sum(each for _, _, each in runs)
    del runs, results  # they are as large as what is timed next
    if checked:
        names = ("name", "parameters", "useful_flop", "useful_bytes")
        parts = [
            {**{name: getattr(side, name) for name in names}, "error": error}
            for side, error in zip(sides, errors, strict=True)
        ]
        shown = dict(zip("ab", parts, strict=True)) if len(parts) == 2 else parts[0]
        return {"kind": "check", **shown, "peak_bytes": peaks, "output_difference": difference}
    cases = [
        Case(side.name, side.run, side.parameters, error, side.useful_flop, side.useful_bytes)
        for side, error in zip(sides, errors, strict=True)
    ]
    samples = max(5, min(repetitions, int(seconds / (2 * took))))  # a pair's sample follows an untimed call
    how = {"device": device, "repetitions": samples, "warmup": 2}
    if device.type == "cuda":
        how["min_sample_ms"] = MIN_SAMPLE_MS
    measured = compare_paired(*cases, **how) if len(cases) == 2 else measure(*cases, **how)
    return Recorded(measured, peaks, difference).record()


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


def _sides(record: dict) -> list[dict]:
    return [record["a"], record["b"]] if "a" in record else [record]


def _identity(sides: list[dict]) -> str:
    return json.dumps([[side["name"], side["parameters"]] for side in sides], sort_keys=True)


def _work(parameters: dict) -> str:
    # What tells one work of a sweep from the next.
    told = (
        "pair",
        "pattern",
        "length",
        "side",
        "window",
        "block_size",
        "row_bytes",
        "head_dim",
        "dilation",
        "direction",
    )
    words = [f"{name.replace('_', ' ')} {parameters[name]}" for name in told if parameters.get(name) not in (None, "")]
    words += ["causal"] * bool(parameters.get("is_causal"))
    return ", ".join([str(parameters[name]) for name in ("sweep",) if name in parameters] + words)


def _line(record: dict) -> str:
    sides = _sides(record)
    launches = [", launches in it" if side["with_launches"] else "" for side in sides]
    line = ", ".join(
        f"{side['median_ms']:.3g} ms (error {side['error']:.1e}{within})"
        for side, within in zip(sides, launches, strict=True)
    )
    return line + (f", ratio {record['ratio']:.3f}" if "ratio" in record else "")


@contextmanager
def old_objects_apart() -> Iterator[None]:
    """Inside, garbage collections skip objects that were made before: with torch's compiler loaded, one collection of
    all takes longer than a short call. Cycles of older objects are freed by a later collection.

    Objects that somebody has frozen before (`gc.freeze`) stay so, and none are added.
    """
    # More than half of them: from Python 3.12 on each collection freezes the immortal objects that it meets.
    if gc.get_freeze_count() > len(gc.get_objects()):
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
