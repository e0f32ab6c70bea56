"""Timing that can be trusted later: raw samples with their error, and paired comparisons.

A sample is one timed stretch of calls; a measurement is the samples of one case; a comparison takes the samples of two
cases in turn, so that both see the same machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import numpy as np
import torch

from hilbert_lib import checks
from hilbert_lib.lab.timers import timer_of

RESAMPLES, SEED = 5000, 0  # of every bootstrap: the same samples give the same interval


@dataclass(frozen=True)
class Case:
    """Something to time, and what is known about it.

    run: the call, without arguments; its result is dropped. parameters: what distinguishes this case from others of its
    name: values that JSON can hold, else a TypeError. error: of the result against the float64 reference, finite.
    Required: a fast wrong answer is not a speed. useful_flop, useful_bytes: what the task needs at least.
    """

    name: str
    run: Callable[[], object]
    parameters: dict
    error: float
    useful_flop: float | None = None
    useful_bytes: float | None = None

    def __post_init__(self):
        checks.json_text("parameters", self.parameters, allow_nan=False)
        if not 0 <= checks.number("error", self.error) < math.inf:
            raise ValueError(f"error must be finite and at least 0, got {self.error!r}")

    @property
    def facts(self) -> dict:
        """All but the call."""
        return {name: value for name, value in vars(self).items() if name != "run"}


@dataclass(frozen=True)
class Measurement:
    """The samples of one case, in milliseconds a call, and how they were taken: each follows a call of its own case."""

    name: str
    parameters: dict
    error: float
    useful_flop: float | None
    useful_bytes: float | None
    device: str
    warmup: int
    calls_per_sample: int
    samples_ms: tuple[float, ...]
    sm_clock_mhz: tuple[int | None, int | None]  # before and after; None on the CPU
    with_launches: bool = False  # whether the GPU waited for the host in some sample, whose time then holds launches
    host_ms: float | None = None  # median of the host's time for a call; None where it had to wait for the GPU
    utc: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))

    @property
    def call_ms(self) -> float:
        """Cost of a call among others like it: the longer of the device's time and the host's."""
        return max(self.median_ms, self.host_ms or 0.0)

    def record(self) -> dict:
        """Everything as one flat dictionary for JSON."""
        summary = {"n": len(self.samples_ms), "median_ms": self.median_ms, "call_ms": self.call_ms}
        return {"kind": "measurement", **asdict(self), **summary}


@dataclass(frozen=True)
class Sustained(Measurement):
    """The same of windows of calls back to back, and what the GPU told meanwhile; None where it tells nothing."""

    watts: float | None = None
    joules: float | None = None  # of a call
    celsius: float | None = None
    held_by: str | None = None  # why the driver held the clock down

    @property
    def call_ms(self) -> float:
        """The median: windows hold what the host takes, which runs ahead where it can."""
        return self.median_ms


@dataclass(frozen=True)
class Comparison:
    """Two cases timed in turn. `ratio` is the median of a's time over b's: above 1, b is faster."""

    a: Measurement
    b: Measurement
    ratio: float
    interval: tuple[float, float]  # 95 %, by the bootstrap

    def record(self) -> dict:
        """Everything as one dictionary for JSON; `a` and `b` hold the two measurements."""
        sides = {"a": self.a.record(), "b": self.b.record()}
        return {"kind": "comparison", "ratio": self.ratio, "interval": self.interval, **sides}


def measure(case: Case, **how) -> Measurement:
    """Time one case.

    device: where it computes: "cpu" is timed by the clock, a CUDA device by events on its stream, which leave out what
    the host spends on launches. repetitions: number of samples (30). warmup: untimed calls before them (5).
    min_sample_ms: a sample repeats a shorter call until it lasts about as long (1.0).

    >>> case = Case("add", lambda: 1 + 1, parameters={}, error=0.0)
    >>> len(measure(case, device="cpu", repetitions=3, min_sample_ms=0.01).samples_ms)
    3
    """
    (measurement,) = _measure_in_turn([case], **how)
    return measurement


def compare_paired(a: Case, b: Case, **how) -> Comparison:
    """Time two cases in turn (a b, b a, a b, ...) and take the ratio within each pair; options as of `measure`.

    Clocks and neighbours drift over seconds. The samples of a pair are milliseconds apart: the drift cancels in their
    ratio. Each sample follows an untimed call of its own case, for the other has taken the cache.

    >>> case = Case("add", lambda: 1 + 1, parameters={}, error=0.0)
    >>> comparison = compare_paired(case, case, device="cpu", repetitions=3, min_sample_ms=0.01)
    >>> comparison.interval[0] <= comparison.ratio <= comparison.interval[1]
    True
    """
    of_a, of_b = _measure_in_turn([a, b], **how)
    ratios = np.divide(of_a.samples_ms, of_b.samples_ms)
    interval = interval_of(resampled_medians(ratios, np.random.default_rng(SEED)))
    return Comparison(of_a, of_b, float(np.median(ratios)), interval)


def _measure_in_turn(
    cases: list[Case], *, device: torch.device | str, repetitions: int = 30, warmup: int = 5, min_sample_ms: float = 1.0
) -> list[Measurement]:
    timer = timer_of(device)
    checks.integer("repetitions", repetitions, least=1)
    checks.integer("warmup", warmup, least=1)
    checks.positive("min_sample_ms", min_sample_ms)
    calls = []
    for case in cases:
        shortest_ms = min(timer.sample(case.run, 1).ms for _ in range(warmup))
        calls.append(math.ceil(min_sample_ms / max(shortest_ms, 1e-4)))  # 100 ns, the resolution of perf_counter_ns
    clock_before = timer.sm_clock_mhz()
    turn = list(range(len(cases)))
    samples = [[] for _ in cases]
    for index in (turn + turn[::-1]) * (repetitions // 2) + turn * (repetitions % 2):
        if len(cases) > 1:
            cases[index].run()  # the other case has taken the cache
        samples[index].append(timer.sample(cases[index].run, calls[index]))
    clocks = clock_before, timer.sm_clock_mhz()
    measured = []
    for case, case_samples, count in zip(cases, samples, calls, strict=True):
        free = [sample.host_ms / count for sample in case_samples if not sample.waited]
        measured.append(
            Measurement(
                **case.facts,
                device=timer.device,
                warmup=warmup,
                calls_per_sample=count,
                samples_ms=tuple(sample.ms / count for sample in case_samples),
                sm_clock_mhz=clocks,
                with_launches=any(sample.waited for sample in case_samples),
                host_ms=float(np.median(free)) if free else None,
            )
        )
    return measured


def resampled_medians(samples: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Medians of RESAMPLES draws of the samples with replacement (the bootstrap; Efron 1979)."""
    return np.median(rng.choice(samples, (RESAMPLES, len(samples))), axis=1)


def interval_of(statistics: np.ndarray) -> tuple[float, float]:
    """Interval that 95 % of them lie within."""
    low, high = np.quantile(statistics, [0.025, 0.975])
    return float(low), float(high)
