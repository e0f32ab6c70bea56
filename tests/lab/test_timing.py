"""Timing and statistics: what a reader of a measurement relies on."""

import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_machine import FakeMachine

from hilbert_lib.lab import timers
from hilbert_lib.lab.timing import Case, compare_paired, interval_of, measure, resampled_medians


@pytest.fixture
def machine(monkeypatch):
    return FakeMachine(monkeypatch)


def spin(milliseconds):
    end = time.thread_time_ns() + round(1e6 * milliseconds)
    while time.thread_time_ns() < end:
        pass


class FakeGpu:
    """A device that does what it was given in turn, and a host that gives it until the queue of launches is full.

    Both go by one clock, in ms.
    """

    QUEUE = 256

    def __init__(self):
        self.now = self.done = 0.0
        self.spins, self.queue = [], deque()
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: SimpleNamespace(**self.event()),
            device=lambda device: nullcontext(),
            synchronize=lambda device=None: setattr(self, "now", max(self.now, self.done)),
            _sleep=self.sleep,
            current_device=lambda: 0,
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=1),
        )
        self.device, self.uint8 = torch.device, torch.uint8

    def empty(self, size, **options):
        return torch.empty(size)

    def launch(self, host, device):
        self.now += host
        while self.queue and self.queue[0] <= self.now:
            self.queue.popleft()
        if len(self.queue) == self.QUEUE:
            self.now = self.queue.popleft()
        self.done = max(self.now, self.done) + device
        self.queue.append(self.done)

    def sleep(self, cycles):
        self.spins.append(cycles / 2e6)
        self.launch(0.0, cycles / 2e6)

    def event(self):
        at = []
        return {
            "record": lambda: at.append(max(self.now, self.done)),
            "query": lambda: self.now >= at[0],
            "elapsed_time": lambda other: other.at[0] - at[0],
            "at": at,
        }


@pytest.fixture
def gpu(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(timers, "torch", gpu)
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter_ns=lambda: gpu.now * 1e6))
    monkeypatch.setattr(timers.CudaTimer, "sm_clock_mhz", lambda self: 1980)
    return gpu


# Statistics


def test_median_quartiles_and_rates_of_known_samples(machine):
    times = iter([9.0, 1.0, 2.0, 3.0, 4.0, 100.0])  # the first is the warm-up
    case = machine.case("known", lambda: next(times), useful_flop=6e6, useful_bytes=3e6)
    measurement = measure(case, device="cpu", repetitions=5, warmup=1)
    assert measurement.samples_ms == (1.0, 2.0, 3.0, 4.0, 100.0)
    assert (measurement.median_ms, measurement.iqr_ms) == (3.0, 2.0)
    assert (measurement.flop_per_s, measurement.bytes_per_s) == (2e9, 1e9)


def test_short_calls_are_repeated_and_reported_by_call(machine):
    measurement = measure(machine.case("short", 0.1), device="cpu", repetitions=4, warmup=2, min_sample_ms=1.0)
    assert measurement.calls_per_sample == 10
    assert measurement.host_ms == measurement.call_ms == pytest.approx(0.1)
    assert len(machine.log) == 2 + 4 * 10
    assert measurement.samples_ms == pytest.approx([0.1] * 4)


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    trials = 300
    covered = 0
    for _ in range(trials):
        samples = rng.lognormal(mean=0.0, sigma=0.3, size=25)  # true median 1
        low, high = interval_of(resampled_medians(samples, rng))
        covered += low <= 1.0 <= high
    assert 0.90 <= covered / trials <= 0.99


# Paired comparisons


def test_paired_comparison_recovers_the_ratio_of_two_busy_loops(monkeypatch):
    # Both the work and the clock count this thread's own time: a busy machine cannot fail the test.
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter_ns=time.thread_time_ns))
    jitter = np.random.default_rng(5)
    slow = Case("slow", lambda: spin(1.0 * jitter.uniform(0.9, 1.1)), parameters={}, error=0.0)
    fast = Case("fast", lambda: spin(0.5 * jitter.uniform(0.9, 1.1)), parameters={}, error=0.0)
    comparison = compare_paired(slow, fast, device="cpu", repetitions=40)
    low, high = comparison.interval
    assert comparison.ratio == pytest.approx(2.0, rel=0.05)  # spinning ends a little late, by what the clock costs
    assert high - low < 0.4


def test_pairs_cancel_the_drift_of_a_slowing_machine(machine):
    def slowing(milliseconds):
        return lambda: milliseconds * (1 + 0.005 * len(machine.log))

    a, b = machine.case("a", slowing(3.0)), machine.case("b", slowing(2.0))
    comparison = compare_paired(a, b, device="cpu", repetitions=40)
    assert comparison.a.samples_ms[-1] > 1.5 * comparison.a.samples_ms[0]  # the drift is there
    assert comparison.ratio == pytest.approx(1.5, rel=0.01)
    assert comparison.interval == pytest.approx((1.5, 1.5), rel=0.02)


def test_the_two_cases_take_turns_and_swap_who_is_first(machine):
    compare_paired(machine.case("a", 2.0), machine.case("b", 2.0), device="cpu", repetitions=3, warmup=1)
    assert machine.log == ["a", "b", *"aabb", *"bbaa", *"aabb"]  # each sample behind an untimed call of its own


def test_samples_stay_with_their_case_and_in_order(machine):
    a_times, b_times = iter(range(1, 100)), iter(range(1000, 1100))
    a, b = machine.case("a", lambda: next(a_times)), machine.case("b", lambda: next(b_times))
    comparison = compare_paired(a, b, device="cpu", repetitions=3, warmup=1)
    assert comparison.a.samples_ms == (3, 5, 7)
    assert comparison.b.samples_ms == (1002, 1004, 1006)


def test_same_samples_give_the_same_interval(machine):
    def compare():
        jitter = np.random.default_rng(3)
        a, b = (machine.case(name, lambda: jitter.uniform(2, 3)) for name in "ab")
        return compare_paired(a, b, device="cpu")

    first, second = compare(), compare()
    assert first.a.samples_ms == pytest.approx(second.a.samples_ms)
    assert first.interval == pytest.approx(second.interval)
    assert first.interval[0] < first.ratio < first.interval[1]


# Bad input


def test_a_speed_without_an_error_is_refused():
    with pytest.raises(TypeError, match="error"):
        Case("fast", lambda: None, parameters={})
    for error, exception in ((None, TypeError), (True, TypeError), (float("nan"), ValueError), (-1.0, ValueError)):
        with pytest.raises(exception, match="error must be"):
            Case("fast", lambda: None, parameters={}, error=error)


@pytest.mark.parametrize(
    ("bad", "exception", "message"),
    [
        ({"parameters": {"dtype": torch.float32}}, TypeError, "parameters must hold values of JSON.*float32"),
        ({"parameters": {"scale": float("nan")}}, TypeError, "parameters must hold values of JSON"),
        ({"parameters": [1]}, TypeError, "parameters must be a dict"),
        ({"useful_flop": 0}, ValueError, "useful_flop must be None, or finite and above 0, got 0"),
        ({"useful_bytes": float("inf")}, ValueError, "useful_bytes"),
    ],
)
def test_cases_refuse_what_a_record_could_not_tell(bad, exception, message):
    with pytest.raises(exception, match=message):
        Case("bad", lambda: None, **{"parameters": {}, "error": 0.0, **bad})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"repetitions": 0}, "repetitions must be an integer of at least 1, got 0"),
        ({"warmup": 0}, "warmup must be an integer of at least 1, got 0"),
        ({"min_sample_ms": -1}, "min_sample_ms must be at least 0 and finite, got -1"),
        ({"min_sample_ms": float("nan")}, "min_sample_ms must be at least 0 and finite, got nan"),
        ({"cold_cache": True}, "cold_cache=True needs a CUDA device.*cpu"),
        ({"device": "meta"}, "device must be a CPU or a CUDA device, got meta"),
    ],
)
def test_measure_refuses_what_it_cannot_time(bad, message):
    case = Case("never run", lambda: pytest.fail("was run"), parameters={}, error=0.0)
    with pytest.raises(ValueError, match=message):
        measure(case, **{"device": "cpu", **bad})


# The clock of a GPU


def test_launches_that_outlast_the_lead_are_given_a_longer_one_and_are_not_in_the_time(gpu):
    many = Case("many", lambda: [gpu.launch(0.1, 0.01) for _ in range(50)], parameters={}, error=0.0)
    one = Case("one", lambda: gpu.launch(0.1, 2.0), parameters={}, error=0.0)
    comparison = compare_paired(many, one, device="cuda", repetitions=3, min_sample_ms=0.1)
    assert (comparison.a.median_ms, comparison.b.median_ms) == (pytest.approx(0.5), pytest.approx(2.0))
    assert not comparison.a.with_launches
    assert (comparison.a.host_ms, comparison.b.host_ms) == (pytest.approx(5.0), pytest.approx(0.1))
    assert comparison.record()["a"]["call_ms"] == comparison.a.host_ms  # one of many such calls waits for the host
    assert comparison.record()["b"]["call_ms"] == comparison.b.median_ms  # and one of these for the device
    assert max(gpu.spins) == 8.0  # ms: the first of 2, 4, ... that five ms of launches fit under
    assert gpu.spins.count(4.0) == 1  # found once


def test_the_hosts_time_holds_no_wait_for_room_in_a_queue_that_earlier_calls_filled(gpu):
    many = Case("many", lambda: [gpu.launch(0.01, 0.01) for _ in range(150)], parameters={}, error=0.0)
    long = Case("long", lambda: gpu.launch(0.1, 50.0), parameters={}, error=0.0)
    comparison = compare_paired(many, long, device="cuda", repetitions=4, min_sample_ms=0.1)
    assert (comparison.a.host_ms, comparison.b.host_ms) == (pytest.approx(1.5), pytest.approx(0.1))
    assert not comparison.a.with_launches


def test_a_call_that_waits_for_the_device_is_timed_with_its_launches_and_says_so(gpu):
    def waiting():
        gpu.launch(3.0, 1.0)
        gpu.cuda.synchronize()

    comparison = compare_paired(
        Case("waiting", waiting, parameters={}, error=0.0),
        Case("other", lambda: gpu.launch(0.1, 2.0), parameters={}, error=0.0),
        device="cuda",
        repetitions=3,
    )
    assert comparison.a.with_launches
    assert comparison.record()["a"]["with_launches"]
    assert comparison.a.host_ms is None  # it cannot be told from the device's
    assert comparison.a.call_ms == comparison.a.median_ms
    assert not comparison.b.with_launches
    assert comparison.b.median_ms == pytest.approx(2.0)
    assert gpu.spins.count(64.0) == 1  # found once that none is long enough


# On a GPU


@pytest.mark.gpu
@pytest.mark.alone
def test_cold_cache_reads_memory_and_warm_cache_reads_l2():
    x = torch.ones(2**22, device="cuda")  # 16 MB: fits in the L2 of the GPUs that this is run on
    y = torch.empty((), device="cuda")
    case = Case("sum", lambda: torch.sum(x, 0, out=y), parameters={}, error=0.0)
    warm, cold = (measure(case, device=x.device, cold_cache=cold_cache) for cold_cache in (False, True))
    assert (warm.cache, cold.cache, cold.calls_per_sample, cold.device) == ("warm", "cold", 1, "cuda:0")
    assert cold.median_ms > 1.2 * warm.median_ms
    assert all(clock > 0 for clock in cold.sm_clock_mhz)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_shorter_than_its_launch_is_timed_without_the_launch():
    x, y = torch.ones(2**18, device="cuda"), torch.empty((), device="cuda")
    measurement = measure(Case("sum", lambda: torch.sum(x, 0, out=y), parameters={}, error=0.0), device="cuda")
    graph = torch.cuda.CUDAGraph()  # launches a hundred of them at once
    with torch.cuda.graph(graph):
        for _ in range(100):
            torch.sum(x, 0, out=y)
    replayed = measure(Case("graph", graph.replay, parameters={}, error=0.0), device="cuda")
    assert measurement.median_ms == pytest.approx(replayed.median_ms / 100, rel=0.3)


@pytest.mark.gpu
@pytest.mark.alone
def test_paired_comparison_recovers_the_ratio_of_two_products():
    x = torch.randn(4096, 4096, device="cuda")

    def twice():
        return x @ x, x @ x

    two, one = Case("two", twice, {}, error=0.0), Case("one", lambda: x @ x, {}, error=0.0)
    comparison = compare_paired(two, one, device="cuda")
    assert comparison.ratio == pytest.approx(2.0, rel=0.05)
