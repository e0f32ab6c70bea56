"""Measured choices: what is compared, what the tables say of it, and the command that remembers it."""

import json
import re
import weakref
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
from command import call

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    Union,
    dilated_attention,
    explain_backend,
    select_attention_backend,
)
from hilbert_lib.attention import measured_rules as remembered
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.lab import selection, workload
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload, grid
from hilbert_lib.limits.estimate import MemoryEstimate

CPU = torch.device("cpu")
PATTERN = DilatedPattern((8, 32), (1, 4))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache folder of its own."""
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path / "cache"))
    remembered._rules_in.cache_clear()
    yield tmp_path / "cache"
    remembered._rules_in.cache_clear()


def attend(backend, q, k, v, work):
    return dilated_attention(q, k, v, work.pattern, is_causal=work.is_causal, backend=backend)


@pytest.fixture
def records(tmp_path):
    works = grid({"a": PATTERN}, lengths=[64], heads=2, head_dims=[8], dtype="float32", device=CPU)
    sides = selection.choice_pairs(works, attend, ["eager", "cudnn", "reference", "sdpa"])
    return run_sides(sides, device=CPU, output_dir=str(tmp_path), repetitions=5, seconds=0.01, on_cpu=True)


def test_every_backend_that_serves_is_timed_beside_the_choice(records, tmp_path):
    ratios = ratio_table(records, selection.SELECTION)
    assert set(ratios.b) == {"sdpa"}
    assert list(ratios.a) == ["eager", "reference"] * 4
    asked = product((False, True), ("forward", "forward and backward"))
    assert set(zip(ratios.is_causal, ratios.direction, strict=True)) == set(asked)
    assert (ratios.output_difference < 1e-5).all()
    assert ratios[["error_a", "error_b"]].max(axis=None) < 1e-5
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(records) == 8


def test_the_tables_say_what_the_choice_gains_and_loses(records):
    for record, ratio in zip(records, [4.0, 2.0, 1.0, 0.5, 4.0, 2.0, 4.0, 8.0], strict=True):
        record["ratio"] = ratio
    choices = selection.choice_table(records)
    assert choices.over_best.tolist() == [1, 2, 1, 1]
    assert choices.over_worst.tolist() == [4, 1, 4, 8]
    assert choices.best.tolist() == ["sdpa", "reference", "sdpa", "sdpa"]
    pd.testing.assert_frame_equal(selection.choice_table(records + records[:2]), choices)  # each work once


def test_a_choice_is_worth_what_its_calls_take_the_device_or_the_host(records):
    record = next(each for each in records if each["a"]["name"] == "eager")
    for side, device_ms, host_ms in (("a", 1.0, 6.0), ("b", 2.0, 0.5)):
        record[side] |= {"median_ms": device_ms, "host_ms": host_ms, "call_ms": max(device_ms, host_ms)}
    record["ratio"] = 0.5
    assert selection.choice_table([record]).over_worst.item() == 3  # eager is launched for longer than it computes
    assert selection.choice_table([record], on_device=True).over_best.item() == 2  # as in a CUDA graph
    for side in "ab":
        del record[side]["host_ms"], record[side]["call_ms"]  # as in the records made before it was kept
    assert selection.choice_table([record]).over_best.item() == 2


def test_a_sweep_keeps_the_tensors_of_one_work():
    seen, alive = [], []

    def works():
        for length in (16, 32, 64):
            alive.append(sum(each() is not None for each in seen))
            work = Workload(PATTERN, length, 2, 8, CPU, dtype="float32")
            seen.append(weakref.ref(work))
            yield "a", work

    how = {"device": CPU, "repetitions": 5, "seconds": 0.01, "on_cpu": True}
    assert len(run_sides(selection.choice_pairs(works(), attend, ["eager"]), **how)) == 6
    assert max(alive) == 1  # the loop's own, until it has the next


def test_nothing_is_timed_where_the_choice_itself_does_not_fit(monkeypatch):
    work, asked = Workload(PATTERN, 64, 2, 8, CPU, dtype="float32"), []
    assert selection.candidates(work, gradient=False) == ["sdpa", "eager"]  # no reference, and nothing interpreted

    def estimate(*_, backend, direction, **__):
        asked.append((backend, direction))
        return MemoryEstimate({}, 0, 2**60 if (backend, direction) == ("sdpa", "backward") else 0, 0)

    monkeypatch.setattr(workload, "estimate_memory", estimate)
    monkeypatch.setattr(selection, "run_sides", lambda sides, **_: list(sides))
    with pytest.raises(RuntimeError, match=r"no two backends could be timed .* within memory: \['eager'\]"):
        selection.measured_times(work, gradient=True)
    assert set(asked) == {(name, direction) for name in ("sdpa", "eager") for direction in ("forward", "backward")}
    # A length whose inputs do not fit is not estimated, which takes long.
    monkeypatch.setattr(workload, "estimate_memory", lambda *_, **__: pytest.fail("it takes long"))
    with pytest.raises(RuntimeError, match=r"no two backends could be timed .* within memory: \[\]"):
        selection.measured_times(Workload(PATTERN, 2**38, 2, 8, CPU, dtype="float32"), gradient=False)


def test_what_is_measured_is_the_call_and_the_other_backends_stay_behind(place, monkeypatch):
    asked = []

    def measured_times(work, *, gradient):
        asked.append((work.length, work.heads, work.head_dim, work.is_causal, gradient))
        return {"eager": 1.0}, {"eager": 3.0}

    monkeypatch.setattr(selection, "measured_times", measured_times)
    q = torch.ones(3, 8, 2, 4, requires_grad=True)
    how = {"pattern": DilatedPattern((4,), (1,)), "is_causal": True, "benchmark_backends": True}
    with torch.no_grad():
        assert selection.select_attention_backend(q, q, q, **how) == "eager"
    assert asked == [(8, 6, 4, True, False)]
    (path,) = place.iterdir()
    assert json.loads(path.read_text())["order"] == ["eager", "sdpa"]
    assert selection.select_attention_backend(q, q, q, **how)  # with gradients it is another class
    assert selection.select_attention_backend(q[:0], q[:0], q[:0], **how)  # nothing to measure
    assert [gradient for *_, gradient in asked] == [False, True]


def test_a_measured_time_is_the_longer_of_the_devices_and_the_hosts(monkeypatch):
    a = {"name": "eager", "median_ms": 1.0, "host_ms": 6.0, "call_ms": 6.0}
    b = {"name": "sdpa", "median_ms": 2.0, "host_ms": 0.5, "call_ms": 2.0}
    monkeypatch.setattr(selection, "run_sides", lambda *_, **__: [{"a": a, "b": b, "ratio": 0.5}])
    times, medians = selection.measured_times(Workload(PATTERN, 64, 2, 8, CPU, dtype="float32"), gradient=False)
    assert times == {"sdpa": 1.0, "eager": 3.0}
    assert medians == {"sdpa": 2.0, "eager": 6.0}


def test_the_command_measures_and_auto_goes_by_it(place):
    options = ["--lengths", "64,100", "--heads", "2", "--head-dim", "8"]
    options += ["--segment-lengths", "8,32", "--dilation-rates", "1,4"]
    lines = call("bench", "backends", *options).splitlines()
    assert len(lines) == 4
    assert " 1.00 (" in lines[0]
    for length, line in ((64, lines[0]), (100, lines[2])):
        q = torch.randn(1, length, 2, 8)
        explanation = explain_backend(q, q, q, PATTERN)
        assert explanation.is_measured
        assert line.startswith(f"{length}  {explanation.chosen} 1.00 (")
    held = [json.loads(path.read_text()) for path in place.iterdir()]
    assert len(held) == 2
    assert pd.Series(held[0]["times_ms"]).gt(0).all()


def test_the_command_shows_what_it_measured_and_cannot_keep(place):
    place.write_text("a file")
    output = call("bench", "backends", "--lengths", "64", "--heads", "2", "--head-dim", "8", status=1)
    assert output.startswith("64  ")
    assert f"measured, but not kept: {place}: File exists" in output


def test_a_grid_is_measured_as_a_sequence_is(monkeypatch):
    q, near = torch.randn(1, 64, 2, 8), Neighbourhood((8, 8), 3)
    assert select_attention_backend(q, q, q, near, benchmark_backends=True) == "eager"  # alone: nothing to time
    assert not explain_backend(q, q, q, near).is_measured
    backends = backends_for(near.of_heads(2))
    monkeypatch.setitem(backends, "sdpa", replace(backends["reference"], name="sdpa"))
    chosen = select_attention_backend(q, q, q, [near, near], benchmark_backends=True)
    explanation = explain_backend(q, q, q, near)
    assert explanation.is_measured
    assert explanation.chosen == chosen in ("eager", "sdpa")
    told, kept = call("bench", "grids", "8x8 3x3 2x8").splitlines()
    assert told.startswith(f"8x8 3x3 2x8  {explain_backend(q, q, q, near).chosen} 1.00 (")
    milliseconds, rate = map(float, re.search(r" 1\.00 \((\S+) ms, (\S+) TFLOP/s\)", told).groups())
    assert rate * milliseconds == pytest.approx(4 * 2 * 8 * near.pairs / 1e9, rel=0.02)  # both in three digits
    assert kept.startswith("kept in ")
    assert "works must be grids, windows" in call("bench", "grids", "8x8 0x3 2x8", status=2)
    order = Ordering.from_curve("hilbert", 64, grid=(8, 8))
    assert not explain_backend(q, q, q, near, ordering=order).is_measured  # another class of calls
    assert not explain_backend(q, q, q, Neighbourhood((8, 8), 5)).is_measured
    both = (near, Neighbourhood((8, 8), 5))
    with pytest.raises(ValueError, match="False where a window for each head is given"):
        select_attention_backend(q, q, q, both, benchmark_backends=True)
    with pytest.raises(ValueError, match="False where ordering is given"):
        select_attention_backend(q, q, q, near, benchmark_backends=True, ordering=order)


def test_windows_with_a_stride_and_causal_ones_are_measured_as_others(monkeypatch):
    backends = backends_for(Neighbourhood((8, 8), 3).of_heads(2))
    monkeypatch.setitem(backends, "sdpa", replace(backends["reference"], name="sdpa"))
    q = torch.randn(1, 64, 2, 8)
    for words, near in (
        (["8x8 4x4 2x8", "--stride", "2x1"], Neighbourhood((8, 8), 4, stride=(2, 1))),
        (["8x8 4x4 2x8", "--stride", "2", "--causal"], Neighbourhood((8, 8), 4, stride=2, is_causal=True)),
    ):
        assert not explain_backend(q, q, q, near).is_measured
        call("bench", "grids", *words)
        assert explain_backend(q, q, q, near).is_measured
    assert not explain_backend(q, q, q, Neighbourhood((8, 8), 4)).is_measured
    for wrong, said in (
        ("2y1", "stride must be a number, or one for each axis, as 16x8x8; got '2y1'"),
        ("5", "'8x8 4x4 2x8': stride must be at most the window of axis 0, 4; got 5"),
        ("2x2x2", "stride must be one value or one for each of the 2 axes, got (2, 2, 2)"),
    ):
        assert said in call("bench", "grids", "8x8 4x4 2x8", "--stride", wrong, status=2)


def test_a_pattern_in_which_groups_of_heads_differ_is_measured():
    q, pattern = torch.randn(1, 64, 2, 8), DilatedPattern((8, 32), (1, 4), mixing="head_groups")
    chosen = select_attention_backend(q, q, q, pattern, benchmark_backends=True)
    explanation = explain_backend(q, q, q, pattern)
    assert explanation.is_measured
    assert explanation.chosen == chosen


def test_a_union_is_not_measured():
    q = torch.randn(1, 64, 2, 8)
    with pytest.raises(ValueError, match="benchmark_backends must be False where a Union is given"):
        select_attention_backend(q, q, q, Union((PATTERN, PATTERN)), benchmark_backends=True)
