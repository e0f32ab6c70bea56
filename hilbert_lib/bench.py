"""Timing that can be trusted later: raw samples with their error, paired comparisons, records with provenance.

A sample is one timed stretch of calls; a measurement is the samples of one case; a comparison takes the
samples of two cases in turn, within one run, so that both see the same machine.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from hilbert_lib.environment import MACHINE, environment
from hilbert_lib.timers import CpuTimer, CudaTimer

RESULTS = "results.jsonl"
FAILED = ".failed"  # ends the name of the folder of an attempt that did not finish
REPORTS = Path(__file__).parents[1] / "reports"  # the committed evidence, in a checkout
CASE_KEY = ("name", "parameters", "device", "cache")  # equal in two runs: the same case
RESAMPLES, SEED = 5000, 0  # of every bootstrap: the same samples give the same interval


@dataclass(frozen=True)
class Case:
    """Something to time, and what is known about it.

    Args:
        name: what runs, such as the backend's name.
        run: the call to time, without arguments; its result is dropped.
        parameters: what distinguishes this case from others of its name: values that JSON can hold.
        error: of the result against the float64 reference, as the caller measured it; 0.0 where the two
            are equal bit for bit. Required: a fast wrong answer is not a speed.
        useful_flop: floating-point operations that the task needs, whatever this case spends.
        useful_bytes: bytes that the task must move at least.

    Raises:
        TypeError: if parameters is no dict that JSON can hold, or error is not a number.
        ValueError: if error is negative or not finite, or a count is not positive.

    >>> Case("add", lambda: 1 + 1, parameters={"n": 1}, error=0.0).name
    'add'
    """

    name: str
    run: Callable[[], object]
    parameters: dict
    error: float
    useful_flop: float | None = None
    useful_bytes: float | None = None

    def __post_init__(self):
        if not isinstance(self.parameters, dict):
            raise TypeError(f"parameters must be a dict, got {self.parameters!r}")
        try:
            json.dumps(self.parameters, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise TypeError(f"parameters must hold values of JSON, got {self.parameters!r}: {cause}") from None
        if isinstance(self.error, bool) or not isinstance(self.error, int | float):
            raise TypeError(f"error must be a number (0.0 for bit-equal results), got {self.error!r}")
        if not 0 <= self.error < math.inf:
            raise ValueError(f"error must be finite and at least 0, got {self.error!r}")
        for count in ("useful_flop", "useful_bytes"):
            value = getattr(self, count)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{count} must be None, or finite and above 0, got {value!r}")


@dataclass(frozen=True)
class Measurement:
    """The samples of one case, and how they were taken. Times are milliseconds a call.

    `sm_clock_mhz` holds the GPU's clock before and after; on the CPU both are None. `with_launches` says whether the
    GPU waited for the host in some sample, whose time then holds launches.
    """

    name: str
    parameters: dict
    error: float
    useful_flop: float | None
    useful_bytes: float | None
    device: str
    cache: str  # "warm" or "cold"
    warmup: int
    calls_per_sample: int
    samples_ms: tuple[float, ...]
    sm_clock_mhz: tuple[int | None, int | None]
    with_launches: bool = False
    utc: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))

    @property
    def iqr_ms(self) -> float:
        low, high = np.quantile(self.samples_ms, [0.25, 0.75])
        return float(high - low)

    @property
    def flop_per_s(self) -> float | None:
        return self.useful_flop and self.useful_flop / self.median_ms * 1e3

    @property
    def bytes_per_s(self) -> float | None:
        return self.useful_bytes and self.useful_bytes / self.median_ms * 1e3

    def record(self) -> dict:
        """Everything as one flat dictionary for JSON, statistics included."""
        statistics = ("median_ms", "iqr_ms", "flop_per_s", "bytes_per_s")
        computed = {"n": len(self.samples_ms), **{name: getattr(self, name) for name in statistics}}
        return {"kind": "measurement", **asdict(self), **computed}


@dataclass(frozen=True)
class Comparison:
    """Two cases timed in turn. `ratio` is the median of a's time over b's: above 1, b is the faster one.

    `interval` is the 95 % bootstrap interval of that median.
    """

    a: Measurement
    b: Measurement
    ratio: float
    interval: tuple[float, float]

    def record(self) -> dict:
        """Everything as one dictionary for JSON; `a` and `b` hold the two measurements."""
        sides = {"a": self.a.record(), "b": self.b.record()}
        return {"kind": "comparison", "ratio": self.ratio, "interval": self.interval, **sides}


def measure(
    case: Case,
    *,
    device: torch.device | str,
    repetitions: int = 30,
    warmup: int = 5,
    min_sample_ms: float = 1.0,
    cold_cache: bool = False,
) -> Measurement:
    """Time one case.

    Args:
        case: what to time.
        device: where it computes: "cpu" is timed by the clock, a CUDA device by events on its stream, which
            leave out what the host spends on launches.
        repetitions: number of samples.
        warmup: untimed calls before them.
        min_sample_ms: a sample repeats a shorter call until it lasts about as long, in ms.
        cold_cache: overwrite the GPU's L2 before each sample, which then is a single call.

    Returns:
        The measurement.

    Raises:
        ValueError: if a count is below 1, or cold_cache is asked of a CPU.

    >>> case = Case("add", lambda: 1 + 1, parameters={}, error=0.0)
    >>> len(measure(case, device="cpu", repetitions=3, min_sample_ms=0.01).samples_ms)
    3
    """
    (measurement,) = _measure_in_turn([case], device, repetitions, warmup, min_sample_ms, cold_cache)
    return measurement


def compare_paired(
    a: Case,
    b: Case,
    *,
    device: torch.device | str,
    repetitions: int = 30,
    warmup: int = 5,
    min_sample_ms: float = 1.0,
    cold_cache: bool = False,
) -> Comparison:
    """Time two cases in turn (a b, b a, a b, ...) and take the ratio within each pair.

    Clocks and neighbours drift over seconds; the two samples of a pair are milliseconds apart, so that the
    drift cancels in their ratio. With a warm cache each sample follows an untimed call of its own case.

    Args:
        a, b: the two cases, for example baseline and candidate.
        device, repetitions, warmup, min_sample_ms, cold_cache: as in `measure`.

    Returns:
        The comparison.

    Raises:
        ValueError: as `measure`.

    >>> case = Case("add", lambda: 1 + 1, parameters={}, error=0.0)
    >>> comparison = compare_paired(case, case, device="cpu", repetitions=3, min_sample_ms=0.01)
    >>> comparison.interval[0] <= comparison.ratio <= comparison.interval[1]
    True
    """
    of_a, of_b = _measure_in_turn([a, b], device, repetitions, warmup, min_sample_ms, cold_cache)
    ratios = np.divide(of_a.samples_ms, of_b.samples_ms)
    interval = _interval(_resampled_medians(ratios, np.random.default_rng(SEED)))
    return Comparison(of_a, of_b, float(np.median(ratios)), interval)


def append_records(records: Sequence[Measurement | Comparison], output_dir: str | Path = "") -> None:
    """Add measurements to a folder's results.jsonl: one line each, the environment with every line.

    Args:
        records: what `measure` and `compare_paired` returned.
        output_dir: the folder, made where it is missing; empty writes nothing.

    >>> append_records([])
    """
    if not output_dir or not records:
        return
    facts = environment()
    lines = "".join(json.dumps({**each.record(), "environment": facts}) + "\n" for each in records).encode()
    path = Path(output_dir) / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        lines = b"\n" + lines  # a killed run's half line stays a line of its own
    # A buffer for all of it makes one write call, which appends whole lines whoever else appends.
    with path.open("ab", buffering=len(lines) + 1) as file:
        file.write(lines)


def read_records(path: str | Path) -> list[dict]:
    """The records of one results.jsonl.

    Args:
        path: the file.

    Returns:
        One dictionary a line, oldest first. A line that a killed run left unfinished is skipped with a
        warning that names it.
    """
    records = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line:
            continue  # a writer saw another's line half written, and began a new one
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            warnings.warn(f"{path}, line {number}: unfinished record skipped", stacklevel=2)
    return records


def measured_before(output_dir: str | Path) -> list[dict]:
    """What a folder's results.jsonl holds from this code on this hardware: nothing of it has to be measured again.

    Args:
        output_dir: the folder; empty for none.

    >>> measured_before("")
    []
    """
    path = Path(output_dir) / RESULTS
    if not output_dir or not path.exists():
        return []
    facts = environment()
    return [
        each for each in read_records(path) if all(each["environment"].get(name) == facts[name] for name in MACHINE)
    ]


def compare_runs(folder_a: str | Path, folder_b: str | Path) -> pd.DataFrame:
    """Set the measurements of two runs on the same hardware side by side.

    The two runs are not paired: whatever differed between them (clocks, neighbours) is in the ratio, and
    the interval covers only the spread within each. Samples of repeated measurements are pooled.

    Args:
        folder_a, folder_b: the runs' folders; every results.jsonl below them counts, but those of
            unfinished (hidden) and failed points.

    Returns:
        One row for each case of either run: `name`, `parameters`, `device`, `cache`, `found` ("both",
        "only in A", "only in B"), `median_a_ms`, `median_b_ms`, `ratio` (a over b: above 1, b is faster),
        its 95 % interval `low` to `high`, and `error_a`, `error_b`. What is missing is NaN.

    Raises:
        ValueError: if a folder holds no measurements, or the hardware differs within or between the runs.
    """
    runs = [_read_run(Path(folder)) for folder in (folder_a, folder_b)]
    hardware = [sorted({each["environment"]["hardware"] for each in run}) for run in runs]
    if hardware[0] != hardware[1] or len(hardware[0]) != 1:
        names = [" and ".join(each) for each in hardware]
        raise ValueError(
            f"only runs of the same hardware are compared: {folder_a} ran on {names[0]}, {folder_b} on {names[1]}"
        )
    cases_a, cases_b = (_pool(run) for run in runs)
    missing = ([math.nan], math.nan)
    rows = []
    for key in cases_a | cases_b:
        (samples_a, error_a), (samples_b, error_b) = cases_a.get(key, missing), cases_b.get(key, missing)
        found = "only in B" if key not in cases_a else "only in A" if key not in cases_b else "both"
        median_a, median_b = float(np.median(samples_a)), float(np.median(samples_b))
        rng = np.random.default_rng(SEED)
        low, high = _interval(_resampled_medians(samples_a, rng) / _resampled_medians(samples_b, rng))
        rows.append(
            {
                **dict(zip(CASE_KEY, key, strict=True)),
                "found": found,
                "median_a_ms": median_a,
                "median_b_ms": median_b,
                "ratio": median_a / median_b,
                "low": low,
                "high": high,
                "error_a": error_a,
                "error_b": error_b,
            }
        )
    return pd.DataFrame(rows)


def _measure_in_turn(
    cases: list[Case],
    device: torch.device | str,
    repetitions: int,
    warmup: int,
    min_sample_ms: float,
    cold_cache: bool,
) -> list[Measurement]:
    device = torch.device(device)
    for argument, value in (("repetitions", repetitions), ("warmup", warmup)):
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {device}")
    if cold_cache and device.type == "cpu":
        raise ValueError("cold_cache=True needs a CUDA device: only the GPU's L2 can be overwritten, got cpu")
    timer = CudaTimer(device, cold_cache) if device.type == "cuda" else CpuTimer()
    calls = []
    for case in cases:
        for _ in range(warmup):
            timer.sample(case.run, 1)
        shortest_ms = max(min(timer.finish()), 1e-4)  # 100 ns, the coarsest resolution of perf_counter_ns
        calls.append(1 if cold_cache else max(1, math.ceil(min_sample_ms / shortest_ms)))
    clock_before = timer.sm_clock_mhz()
    turn = list(range(len(cases)))
    schedule = (turn + turn[::-1]) * (repetitions // 2) + turn * (repetitions % 2)
    for index in schedule:
        if len(cases) > 1 and not cold_cache:
            cases[index].run()  # the other case has taken the cache
        timer.sample(cases[index].run, calls[index])
    times, waited = np.array(timer.finish()), np.array(timer.waited)
    clocks = (clock_before, timer.sm_clock_mhz())
    return [
        Measurement(
            case.name,
            case.parameters,
            case.error,
            case.useful_flop,
            case.useful_bytes,
            device=timer.device,
            cache="cold" if cold_cache else "warm",
            warmup=warmup,
            calls_per_sample=calls[index],
            samples_ms=tuple((times[np.equal(schedule, index)] / calls[index]).tolist()),
            sm_clock_mhz=clocks,
            with_launches=bool(np.any(waited[np.equal(schedule, index)])),
        )
        for index, case in enumerate(cases)
    ]


def _resampled_medians(samples: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Medians of RESAMPLES draws of the samples with replacement (the bootstrap; Efron 1979)."""
    return np.median(rng.choice(samples, (RESAMPLES, len(samples))), axis=1)


def _interval(statistics: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(statistics, [0.025, 0.975])
    return float(low), float(high)


def _read_run(folder: Path) -> list[dict]:
    """The measurements of a run, those inside comparisons too, each with its environment."""
    measurements = []
    for path in sorted(folder.rglob(RESULTS)):
        inside = path.relative_to(folder).parts
        if any(part.startswith(".") or part.endswith(FAILED) for part in inside):
            continue  # what the suite has not finished, or could not
        for record in read_records(path):
            if record["kind"] == "counters":
                continue  # no times
            sides = (record["a"], record["b"]) if record["kind"] == "comparison" else (record,)
            measurements += [{**side, "environment": record["environment"]} for side in sides]
    if not measurements:
        raise ValueError(f"no measurements: {folder} has no records in any {RESULTS} below it")
    return measurements


def _pool(run: list[dict]) -> dict[tuple, tuple[list[float], float]]:
    """The samples and the largest error of each case."""
    cases = {}
    for each in run:
        parameters = ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(each["parameters"].items()))
        key = (each["name"], parameters, each["device"], each["cache"])
        samples, error = cases.get(key, ([], 0.0))
        cases[key] = (samples + each["samples_ms"], max(error, each["error"]))
    return cases
