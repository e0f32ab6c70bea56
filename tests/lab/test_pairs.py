"""Pairs of calls: errors are real, times are never an interpreter's, and nothing is measured twice."""

import json
from dataclasses import replace
from itertools import groupby, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hilbert_lib.lab import pairs as paired
from hilbert_lib.lab import records as committed
from hilbert_lib.lab import sustained
from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.pairs import Side, relative_difference, run_back_to_back, run_sides, time_cases
from hilbert_lib.lab.records import append_lines
from hilbert_lib.lab.sustained import WARM_WINDOWS, WINDOWS
from hilbert_lib.lab.tables import both_ways, ratio_table, side_table
from hilbert_lib.lab.timing import Case, compare_paired


def one(name, value, *, exact=1.0):
    """A side that returns a number, which should be `exact`."""
    true = [torch.tensor([exact])]
    run, error = lambda: (torch.tensor([value]),), lambda results: relative_difference(results, true)
    return Side(name, {"sweep": "numbers"}, run, error)


def timed(a, b):
    """A pair's record as a GPU would leave it; the times are those of two additions on the CPU."""
    cases = [Case(side.name, lambda: 1 + 1, side.parameters, 0.0, 4e9, 2e6) for side in (a, b)]
    pair = compare_paired(*cases, device="cpu", repetitions=5)
    return pair.record() | {"peak_bytes": (2**20, 2**21), "output_difference": 0.0}


def test_on_the_cpu_each_side_runs_once_errors_are_known_and_nothing_is_timed_or_written(tmp_path):
    runs = []
    shared = replace(one("b", 1.5), run=lambda: runs.append(1) or (torch.tensor([1.5]),))
    records = run_sides([(one(name, 1.0), shared) for name in "acd"], device="cpu", output_dir=str(tmp_path))
    assert len(runs) == 1
    for record in records:
        assert (record["kind"], record["a"]["error"]) == ("check", 0)
        assert record["b"]["error"] == record["output_difference"] == 0.5
    assert ratio_table(records, "numbers").ratio.isna().all()
    assert side_table(records, "numbers").median_ms.isna().all()
    assert not list(tmp_path.iterdir())


def test_back_to_back_sides_run_in_windows_in_turn_and_not_again(tmp_path, monkeypatch):
    calls, how = [], {"device": "cpu", "output_dir": str(tmp_path), "seconds": 0.02}
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * len(calls))  # each takes a millisecond
    monkeypatch.setattr(paired, "time", clock)
    monkeypatch.setattr(sustained, "time", clock)
    sides = [replace(one(x, 1.5), run=lambda x=x: calls.append(x) or (torch.tensor([1.5]),)) for x in "ab"]
    (record,) = run_back_to_back([sides], **how)
    table = side_table([record], "numbers, back to back")
    assert table.error.tolist() == [0.5, 0.5]
    assert table.median_ms.tolist() == pytest.approx([1, 1])
    assert record["output_difference"] == 0
    counts = [side["calls_per_sample"] for side in record["sides"]]
    assert counts == [20, 20]
    assert [side["n"] for side in record["sides"]] == [WINDOWS] * 2
    rounds, ran = WARM_WINDOWS // 2 + WINDOWS, len(calls)
    turns = [(name, len(list(own))) for name, own in groupby(calls[-rounds * sum(counts) :])]
    assert turns == list(zip("ab", counts, strict=True)) * rounds
    assert run_back_to_back([sides], **how) == [json.loads(json.dumps(record))]
    assert len(calls) == ran


def test_both_ways_of_timing_stand_side_by_side():
    sides = (replace(one("a", 1.0), useful_flop=1e6), replace(one("b", 1.0), useful_flop=1e6))
    records = run_sides([sides], device="cpu", on_cpu=True, repetitions=2)
    assert both_ways(records, "numbers").empty
    records += run_back_to_back([sides], device="cpu", seconds=1e-3)
    table = both_ways(records, "numbers")
    assert table.name.tolist() == ["a", "b"]
    assert table.singly.tolist() == side_table(records, "numbers").tflop_per_s.tolist()
    assert (table.host_ms > 0).all()
    assert table.joules.isna().all(), "a CPU tells no joules"


def test_what_a_gpu_tells_of_a_side_in_several_cases_is_its_median():
    records = run_back_to_back([(one("a", 1.0),), (one("a", 1.0), one("b", 1.0))], device="cpu", seconds=1e-3)
    a, also_a = records[0]["sides"][0], records[1]["sides"][0]
    a |= {"joules": 2.0, "watts": 600.0, "held_by": "power"}
    also_a |= {"joules": 3.0, "watts": 700.0, "held_by": "power"}
    table = side_table(records, "numbers, back to back").set_index("name")
    assert table.loc["a", ["joules", "watts", "held_by"]].tolist() == [2.5, 650.0, "power"]
    assert table.median_ms["a"] == pytest.approx(np.median([*a["samples_ms"], *also_a["samples_ms"]]))
    assert np.isnan(table.joules["b"])


def test_what_is_not_finite_or_of_another_shape_is_never_a_small_error():
    with pytest.raises(ValueError, match=r"results must have the shape of exact, \(3,\), got \(1,\)"):
        relative_difference([torch.ones(1)], [torch.ones(3)])
    with pytest.raises(ValueError, match="results must be finite"):
        run_sides([(one("a", 1.0), one("b", float("nan")))], device="cpu")


def test_a_case_without_room_is_left_out_and_the_others_go_on(capsys):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    large = Side("large", {"sweep": "numbers", "length": 9}, full, lambda results: 0.0)
    records = run_sides([(large, one("b", 1.0)), (one("a", 1.0), one("b", 1.0))], device="cpu")
    assert [record["a"]["name"] for record in records] == ["a"]
    assert "large | b: left out, no room: CUDA out of memory" in capsys.readouterr().out


def test_what_the_folder_holds_is_not_measured_again(tmp_path):
    pair = one("a", 1.0), one("b", 1.0)
    append_lines([timed(*pair) | {"environment": environment()}], tmp_path / "results.jsonl")
    (found,) = run_sides([pair], device="cpu", output_dir=str(tmp_path))
    assert found == json.loads((tmp_path / "results.jsonl").read_text())


def test_a_side_of_several_pairs_is_in_the_table_once_with_all_its_samples():
    ours = one("triton", 1.0)
    records = [timed(one(name, 1.0), ours) for name in ("cudnn", "flash")]
    table = side_table(records, "numbers").set_index("name")
    assert table.index.tolist() == ["cudnn", "triton", "flash"]
    samples = [x for record in records for x in record["b"]["samples_ms"]]
    assert table.median_ms["triton"] == pytest.approx(torch.tensor(samples, dtype=torch.float64).quantile(0.5).item())
    assert table.tflop_per_s["triton"] == pytest.approx(4e9 / table.median_ms["triton"] / 1e9)
    assert table.gb_per_s["triton"] == pytest.approx(2e6 / table.median_ms["triton"] / 1e6)
    assert [table.low_ms["triton"], table.high_ms["triton"]] == pytest.approx(list(np.quantile(samples, [0.25, 0.75])))
    assert table.peak_bytes.to_dict() == {"cudnn": 2**20, "triton": 2**21, "flash": 2**20}
    with pytest.raises(ValueError, match=r"sweep must be one of the records' \(numbers\), got 'layouts'"):
        side_table(records, "layouts")


def told(name, error, **more):
    return {"name": name, "parameters": {"sweep": "s", "of": name}, "error": error, **more}


def test_each_column_of_a_pair_is_of_its_own_side():
    pair = {"a": told("x", 0.25), "b": told("y", 0.5), "ratio": 2.0, "interval": (1.5, 3.0), "output_difference": 0.125}
    (row,) = ratio_table([pair], "s").to_dict("records")
    expected = {"a": "x", "b": "y", "sweep": "s", "of": "y", "ratio": 2.0, "low": 1.5, "high": 3.0}
    assert row == expected | {"output_difference": 0.125, "error_a": 0.25, "error_b": 0.5}


def test_pairs_that_differ_in_the_parameters_of_either_side_are_others():
    found = {"interval": (1.5, 3.0), "output_difference": 0.0}
    sides = [told("x", 0.0), told("x", 0.0) | {"parameters": {"sweep": "s", "of": "z"}}]
    records = [{"a": a, "b": b, "ratio": float(n)} | found for n, (a, b) in enumerate(product(sides, sides))]
    assert ratio_table(records, "s").ratio.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("figures", [(0.5, 9), (0.25, 8), (0.125, 7)], ids=["first", "middle", "last"])
def test_the_largest_error_and_peak_of_a_side_count_in_whichever_record_they_are(figures):
    order = [(0.5, 9), (0.25, 8), (0.125, 7)]
    order = order[order.index(figures) :] + order[: order.index(figures)]
    counts = {"useful_flop": 1.0, "useful_bytes": 2.0}
    records = [
        {"a": told(f"a{n}", 1.0, **counts), "b": told("b", error, **counts), "peak_bytes": (99, peak)}
        for n, (error, peak) in enumerate(order)
    ]
    row = side_table(records, "s").set_index("name").loc["b"]
    assert (row.error, row.peak_bytes) == (0.5, 9)


def test_of_a_pair_that_was_measured_twice_the_newest_counts():
    older, newer = (timed(one("flash", 1.0), one("triton", 1.0)) for _ in range(2))
    records = [older, timed(one("cudnn", 1.0), one("triton", 1.0)), newer, newer]
    assert ratio_table(records, "numbers").a.tolist() == ["flash", "cudnn"]
    assert side_table(records, "numbers").set_index("name").median_ms["flash"] == newer["a"]["median_ms"]


def test_a_peak_is_what_a_call_asked_for_beyond_what_was_there(monkeypatch):
    events = []
    side = replace(one("a", 1.0), run=lambda: events.append("run"))
    counts = {"requested_bytes.all.current": 100, "requested_bytes.all.peak": 1124, "allocated_bytes.all.peak": 2048}
    monkeypatch.setattr(paired, "begin_peak", lambda device: events.append("begin"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts)
    assert paired._once(side, torch.device("cuda"))[1] == 1024
    assert events == ["run", "begin", "run", "wait"]


def test_the_newest_committed_record_is_drawn_where_nothing_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "REPORTS", tmp_path)
    check = run_sides([(one("a", 1.0), one("b", 1.0))], device="cpu")
    assert committed.records_to_draw(check) == ([], "")
    for run, utc in (("new", "2026-02-02"), ("old", "2026-01-01")):
        folder = tmp_path / "h200" / run / "06_kernel_benchmarks-0a1b2c3d"
        facts = {"utc": utc, "hardware": "an H200", "gpus": [{}]}
        lines = 1 if run == "new" else 2  # the newest, not the longest
        append_lines([timed(one(run, 1.0), one("b", 1.0)) | {"environment": facts}] * lines, folder / "results.jsonl")
    records, source = committed.records_to_draw(check)
    assert records[0]["a"]["name"] == "new"
    assert source == "committed record, an H200"
    assert committed.records_to_draw(records) == (records, "an H200")


@pytest.mark.parametrize(("took", "samples"), [(0.001, 20), (0.1, 10), (1.0, 5), (9.0, 3)])
def test_slow_calls_are_timed_with_fewer_samples(took, samples):
    case = Case("nothing", lambda: None, {}, 0.0)
    assert len(time_cases(case, device=torch.device("cpu"), took=took).samples_ms) == samples
