"""Timing and statistics: what a reader of a measurement relies on."""

import gc
import weakref
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import refusals
from fake_machine import FakeMachine

from hilbert_lib.lab import timers
from hilbert_lib.lab.timers import old_objects_apart
from hilbert_lib.lab.timing import Case, compare_paired, interval_of, measure, resampled_medians


@pytest.fixture
def machine(monkeypatch):
    return FakeMachine(monkeypatch)


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
            current_device=lambda: 0,
        )
        self.device = torch.device

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
    monkeypatch.setattr(timers, "spin", gpu.sleep)
    monkeypatch.setattr(timers, "torch", gpu)
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter_ns=lambda: gpu.now * 1e6))
    monkeypatch.setattr(timers.CudaTimer, "sm_clock_mhz", lambda self: 1980)
    return gpu


def test_the_median_of_known_samples(machine):
    times = iter([9.0, 1.0, 2.0, 3.0, 4.0, 100.0])  # the first is the warm-up
    record = measure(machine.case("known", lambda: next(times)), device="cpu", repetitions=5, warmup=1).record()
    assert record["samples_ms"] == (1.0, 2.0, 3.0, 4.0, 100.0)
    assert (record["n"], record["median_ms"], record["host_ms"]) == (5, 3.0, 3.0)


def test_short_calls_are_repeated_and_reported_by_call(machine):
    measurement = measure(machine.case("short", 0.1), device="cpu", repetitions=4, warmup=2, min_sample_ms=1.0)
    assert measurement.calls_per_sample == 10
    assert measurement.host_ms == measurement.call_ms == pytest.approx(0.1)
    assert len(machine.log) == 2 + 4 * 10
    assert measurement.samples_ms == pytest.approx([0.1] * 4)


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    rng = np.random.default_rng(1)
    trials = 300
    covered = 0
    for _ in range(trials):
        samples = rng.lognormal(mean=0.0, sigma=0.3, size=25)  # true median 1
        low, high = interval_of(resampled_medians(samples, rng))
        covered += low <= 1.0 <= high
    assert 0.90 <= covered / trials <= 0.99


def test_pairs_cancel_the_drift_of_a_slowing_machine(machine):
    def slowing(milliseconds):
        return lambda: milliseconds * (1 + 0.005 * len(machine.log))

    a, b = machine.case("a", slowing(3.0)), machine.case("b", slowing(2.0))
    comparison = compare_paired(a, b, device="cpu", repetitions=40)
    assert comparison.a.samples_ms[-1] > 1.5 * comparison.a.samples_ms[0]  # the drift is there
    assert comparison.ratio == pytest.approx(1.5, rel=0.01)
    assert comparison.interval == pytest.approx((1.5, 1.5), rel=0.02)


def test_the_ratio_is_the_median_of_those_within_pairs(machine):
    """Not the ratio of the medians, 2 / 3. A warm-up comes first, and an untimed call before each sample."""
    of_a, of_b = (
        iter([1.0, *(x for each in times for x in (1.0, each))]) for times in ((1.0, 2.0, 9.0), (1.0, 4.0, 3.0))
    )
    a, b = machine.case("a", lambda: next(of_a)), machine.case("b", lambda: next(of_b))
    comparison = compare_paired(a, b, device="cpu", repetitions=3, warmup=1)
    assert (comparison.a.samples_ms, comparison.b.samples_ms) == ((1.0, 2.0, 9.0), (1.0, 4.0, 3.0))
    assert comparison.ratio == 1.0
    assert comparison.interval == (0.5, 3.0)


def test_each_case_of_a_pair_is_repeated_as_often_as_its_own_call_is_short(machine):
    comparison = compare_paired(machine.case("a", 0.1), machine.case("b", 0.5), device="cpu", repetitions=2, warmup=1)
    assert (comparison.a.calls_per_sample, comparison.b.calls_per_sample) == (10, 2)
    assert (machine.log.count("a"), machine.log.count("b")) == (1 + 2 * 11, 1 + 2 * 3)
    assert comparison.b.samples_ms == pytest.approx((0.5, 0.5))


def test_the_two_cases_take_turns_and_keep_their_samples(machine):
    a_times, b_times = iter(range(1, 100)), iter(range(1000, 1100))
    a, b = machine.case("a", lambda: next(a_times)), machine.case("b", lambda: next(b_times))
    comparison = compare_paired(a, b, device="cpu", repetitions=3, warmup=1)
    assert machine.log == ["a", "b", *"aabb", *"bbaa", *"aabb"]  # each sample behind an untimed call of its own
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


def case(run=lambda: pytest.fail("was run"), **known):
    return Case("any", run, **{"parameters": {}, "error": 0.0, **known})


WRONG = {
    TypeError: [
        (lambda: case(error=None), "error must be a number"),
        (lambda: case(parameters={"dtype": torch.float32}), "parameters must hold values of JSON.*float32"),
        (lambda: case(parameters={"scale": float("nan")}), "parameters must hold values of JSON"),
        (lambda: case(parameters={"sides": {1: 2}}), "parameters must have strings as the keys .*, got 1"),
    ],
    ValueError: [
        (lambda: case(error=float("nan")), "error must be finite"),
        (lambda: case(error=-1.0), "error must be finite"),
        (lambda: measure(case(), device="cpu", repetitions=0), "repetitions must be an integer of at least 1, got 0"),
        (lambda: measure(case(), device="cpu", warmup=0), "warmup must be an integer of at least 1, got 0"),
        (lambda: measure(case(), device="cpu", min_sample_ms=-1), "min_sample_ms must be finite and above 0, got -1"),
        (lambda: measure(case(), device="meta"), "device must be a CPU or a CUDA device, got meta"),
    ],
}
test_what_a_record_could_not_tell_and_what_cannot_be_timed_is_refused = refusals(WRONG)


def test_launches_that_outlast_the_lead_are_given_a_longer_one(gpu):
    many, one = case(lambda: [gpu.launch(0.1, 0.01) for _ in range(50)]), case(lambda: gpu.launch(0.1, 2.0))
    comparison = compare_paired(many, one, device="cuda", repetitions=3, min_sample_ms=0.1)
    assert (comparison.a.median_ms, comparison.b.median_ms) == (pytest.approx(0.5), pytest.approx(2.0))
    assert not comparison.a.with_launches
    assert (comparison.a.host_ms, comparison.b.host_ms) == (pytest.approx(5.0), pytest.approx(0.1))
    assert comparison.record()["a"]["call_ms"] == comparison.a.host_ms  # one of many such calls waits for the host
    assert comparison.record()["b"]["call_ms"] == comparison.b.median_ms  # and one of these for the device
    assert max(gpu.spins) == 8.0  # ms: the first of 2, 4, ... that five ms of launches fit under
    assert gpu.spins.count(4.0) == 1  # found once


def test_the_hosts_time_holds_no_wait_for_room_in_the_queue(gpu):
    many, long = case(lambda: [gpu.launch(0.01, 0.05) for _ in range(180)]), case(lambda: gpu.launch(0.1, 50.0))
    comparison = compare_paired(many, long, device="cuda", repetitions=4, min_sample_ms=0.1)
    assert (comparison.a.host_ms, comparison.b.host_ms) == (pytest.approx(1.8), pytest.approx(0.1))
    assert not comparison.a.with_launches


def test_a_call_that_waits_for_the_device_says_so(gpu):
    def waiting():
        gpu.launch(3.0, 1.0)
        gpu.cuda.synchronize()

    comparison = compare_paired(case(waiting), case(lambda: gpu.launch(0.1, 2.0)), device="cuda", repetitions=3)
    assert comparison.record()["a"]["with_launches"] is comparison.a.with_launches is True
    assert comparison.a.host_ms is None  # it cannot be told from the device's
    assert comparison.a.call_ms == comparison.a.median_ms
    assert not comparison.b.with_launches
    assert comparison.b.median_ms == pytest.approx(2.0)
    assert gpu.spins.count(64.0) == 1  # found once that none is long enough


@pytest.mark.gpu
@pytest.mark.alone
def test_a_kernel_shorter_than_its_launch_is_timed_without_the_launch():
    x, y = torch.ones(2**18, device="cuda"), torch.empty((), device="cuda")
    measurement = measure(case(lambda: torch.sum(x, 0, out=y)), device="cuda")
    graph = torch.cuda.CUDAGraph()  # launches a hundred of them at once
    with torch.cuda.graph(graph):
        for _ in range(100):
            torch.sum(x, 0, out=y)
    replayed = measure(case(graph.replay), device="cuda")
    assert measurement.median_ms == pytest.approx(replayed.median_ms / 100, rel=0.3)


@pytest.mark.gpu
@pytest.mark.alone
def test_paired_comparison_recovers_the_ratio_of_two_products():
    x = torch.randn(4096, 4096, device="cuda")
    comparison = compare_paired(case(lambda: (x @ x, x @ x)), case(lambda: x @ x), device="cuda")
    assert comparison.ratio == pytest.approx(2.0, rel=0.05)


class Holder:
    """In a cycle with itself."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def nothing_apart():
    gc.unfreeze()
    yield
    gc.freeze()  # as conftest.py left it


def test_garbage_made_inside_is_freed_inside_and_older_objects_after_it(nothing_apart):
    old = Holder()
    seen_old = weakref.ref(old)
    with old_objects_apart():
        new = Holder()
        seen_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert (seen_new() is None, seen_old() is None) == (True, False)
    gc.collect()
    assert seen_old() is None
    assert gc.get_freeze_count() == 0


def test_what_others_set_apart_stays_so(nothing_apart):
    gc.freeze()
    apart = gc.get_freeze_count()
    with old_objects_apart(), old_objects_apart():
        assert gc.get_freeze_count() <= apart
    assert gc.get_freeze_count() > apart // 2


def test_the_few_objects_that_python_itself_sets_apart_count_for_nothing(nothing_apart, monkeypatch):
    # Python 3.12 does with immortal objects, some hundred of them, at the first collection.
    counted = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted() + 400)
    here = len(gc.get_objects())
    with old_objects_apart():
        assert len(gc.get_objects()) < here // 2
    assert len(gc.get_objects()) >= here // 2
