"""Lengths that grow: predicted before they are tried, and stopped before a limit."""

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from own_processes import PATIENCE

from hilbert_lib.launch import progressive
from hilbert_lib.launch.progressive import ProgressiveTester
from hilbert_lib.limits import memory
from hilbert_lib.limits.config import SafetyConfig
from hilbert_lib.limits.memory import GB, Memory

CONFIG = SafetyConfig(max_memory_share=1, min_free_host_gb=2, max_seconds=100, growth_factor=2)


@pytest.fixture
def machine(monkeypatch):
    """A host with 10 GB left, of which 8 may be taken, and a clock that a run moves; the lengths that ran."""

    class Machine:
        def __init__(self):
            self.now, self.ran = 0.0, []

        def run(self, length, seconds_per_token=0.0):
            self.ran.append(length)
            self.now += length * seconds_per_token

    one = Machine()
    monkeypatch.setattr(memory, "host_memory", lambda: Memory("host", 20 * GB, 10 * GB))
    monkeypatch.setattr(progressive.time, "perf_counter", lambda: one.now)
    monkeypatch.setattr(progressive, "measure_peak", lambda run, device: run() and 7)
    return one


def progress(machine, start, end, *, config=CONFIG, gb_per_token=0.0, run=None):
    return ProgressiveTester(config, "cpu").run_progressive_test(
        start, end, run=run or machine.run, estimate=lambda n: int(n * gb_per_token * GB)
    )


@pytest.mark.parametrize(("start", "ran"), [(1, [1, 2, 4, 8]), (16, [])])
def test_the_run_stops_before_memory_would_run_out_and_says_why(machine, start, ran):
    result = progress(machine, start, 64, gb_per_token=1.0)
    assert machine.ran == ran
    assert [row.status for row in result.rows] == ["ran"] * len(ran) + ["not tried"]
    assert result.longest == max(ran, default=0)
    for words in ("16 tokens were not tried", "16.000 GB required", "10.0 GB of host available", "must stay free"):
        assert words in result.limit


def test_the_run_stops_before_it_would_take_too_long(machine):
    result = progress(machine, 1, 64, run=lambda n: machine.run(n, seconds_per_token=4.0))
    # 4 s, 8, 16, 32; the next could take 4 times 32.
    assert machine.ran == [1, 2, 4, 8]
    assert "16 tokens were not tried: up to 128.0 s expected, allowed are 100" in result.limit


@pytest.mark.parametrize(
    ("factor", "lengths"), [(1.5, [10, 15, 23, 35, 50]), (1.01, [1, 2, 3]), (1e308, [16, 64]), (2, [32])]
)
def test_lengths_grow_by_any_factor_and_the_last_is_the_end(machine, factor, lengths):
    config = SafetyConfig(growth_factor=factor, min_free_host_gb=0)
    result = progress(machine, lengths[0], lengths[-1], config=config)
    assert machine.ran == result.table().length.tolist() == lengths
    assert result.limit == f"none was met up to {lengths[-1]} tokens, where the test ends"
    assert set(result.table().measured_bytes) == {7}


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")), "memory: CUDA out of memory."),
        (lambda: torch.empty(2**60, dtype=torch.uint8, device="cpu"), "can't allocate memory"),
        (Mock(side_effect=MemoryError()), "out of memory: "),
    ],
)
def test_memory_that_runs_out_all_the_same_ends_the_test_and_other_errors_pass(machine, fail, words):
    result = progress(machine, 1, 64, run=lambda length: fail() if length > 2 else None)
    assert [(row.length, row.status) for row in result.rows] == [(1, "ran"), (2, "ran"), (4, "ended")]
    assert result.rows[-1].measured_bytes is None
    assert words in result.limit
    assert "more" not in result.limit
    with pytest.raises(RuntimeError, match="a mistake"):
        progress(machine, 1, 64, run=Mock(side_effect=RuntimeError("a mistake")))


def test_a_run_that_passes_a_limit_on_its_way_is_ended():
    def run(length):
        time.sleep(PATIENCE)
        pytest.fail("nothing ended it")

    tester = ProgressiveTester(SafetyConfig(max_seconds=0.2), "cpu")
    result = tester.run_progressive_test(8, 64, run=run, estimate=lambda length: 1)
    assert [row.status for row in result.rows] == ["ended"]
    assert "allowed are 0.2" in result.limit
    assert result.longest == 0


@pytest.mark.parametrize(
    ("device", "start", "end", "free_gb", "slack"),
    [
        ("cpu", 512, 8192, 0.1, 2**20),
        pytest.param("cuda", 2**16, 2**20, 1, 64 * 2**20, marks=[pytest.mark.gpu, pytest.mark.alone]),
    ],
)
def test_attention_takes_what_was_predicted(device, start, end, free_gb, slack):
    config = SafetyConfig(growth_factor=4, min_free_host_gb=free_gb)
    result = ProgressiveTester(config, device).run_progressive_test(start, end)
    assert [row.length for row in result.rows] == [start, 4 * start, 16 * start]
    for row in result.rows:
        assert row.status == "ran", result.limit
        assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=0.1, abs=slack)


def test_outside_of_the_main_thread_it_is_refused_and_says_where_to_call_it(machine):
    with ThreadPoolExecutor(1, "other") as threads, pytest.raises(ValueError, match=r"in the main thread, got .*other"):
        threads.submit(progress, machine, 1, 64).result()
    assert machine.ran == []
