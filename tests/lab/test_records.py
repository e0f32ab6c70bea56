"""Records of what was measured, and runs side by side."""

import json
import shutil
import threading
import warnings

import numpy as np
import pytest
from fake_machine import FakeMachine

from hilbert_lib.lab import records
from hilbert_lib.lab.records import RESULTS, append_records, compare_runs, last_record, read_records
from hilbert_lib.lab.timing import compare_paired, measure


@pytest.fixture
def machine(monkeypatch):
    return FakeMachine(monkeypatch)


@pytest.fixture
def on_hardware(monkeypatch):
    """Record as if on the named hardware."""
    return lambda name: monkeypatch.setattr(records, "environment", lambda: {"hardware": name})


def test_records_hold_samples_statistics_error_and_environment(machine, tmp_path):
    case = machine.case("a", 2.0, parameters={"seq_len": 8}, error=1e-6, useful_flop=4.0)
    append_records([measure(case, device="cpu", repetitions=3)], tmp_path)
    append_records([compare_paired(case, case, device="cpu", repetitions=3)], tmp_path)
    measurement, comparison = read_records(tmp_path / RESULTS)
    expected = {
        "kind": "measurement", "name": "a", "parameters": {"seq_len": 8}, "samples_ms": [2.0, 2.0, 2.0], "n": 3,
        "median_ms": 2.0, "iqr_ms": 0.0, "warmup": 5, "calls_per_sample": 1, "cache": "warm", "error": 1e-6,
        "useful_flop": 4.0, "flop_per_s": 2000.0, "useful_bytes": None, "bytes_per_s": None, "device": "cpu",
        "sm_clock_mhz": [None, None],
    }  # fmt: skip
    assert expected.items() <= measurement.items()
    assert {"hardware", "torch", "code_hash", "kernel_mode"} <= measurement["environment"].keys()
    assert (comparison["kind"], comparison["ratio"], comparison["interval"]) == ("comparison", 1.0, [1.0, 1.0])
    assert comparison["a"]["samples_ms"] == comparison["b"]["samples_ms"] == [2.0, 2.0, 2.0]


def test_records_are_strict_json(machine, tmp_path):
    append_records([measure(machine.case("a", 2.0), device="cpu")], tmp_path)

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    json.loads((tmp_path / RESULTS).read_text(), parse_constant=refuse)


def test_no_folder_or_no_records_write_nothing(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_records([measure(machine.case("a", 2.0), device="cpu")], "")
    append_records([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_costs_its_unfinished_line_alone(machine, tmp_path, on_hardware):
    on_hardware("one")
    path = tmp_path / RESULTS
    measured = [measure(machine.case(name, 2.0), device="cpu", repetitions=3) for name in "abc"]
    append_records(measured[:2], tmp_path)
    path.write_bytes(path.read_bytes()[:-30])  # killed while it wrote b
    with pytest.warns(UserWarning, match="line 2: unfinished or no record, skipped"):
        assert [each["name"] for each in read_records(path)] == ["a"]
    assert last_record(path)["name"] == "a"
    append_records(measured[2:], tmp_path)  # resumed
    with pytest.warns(UserWarning, match="line 2: unfinished or no record, skipped"):
        assert [each["name"] for each in read_records(path)] == ["a", "c"]
    assert last_record(path)["name"] == "c"
    path.write_text("\n{")
    with pytest.raises(ValueError, match="holds no record"):
        last_record(path)


@pytest.mark.parametrize("line", [b"[1, 2]", b"5", b"null", b'"a"', b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000])
def test_a_line_that_is_no_record_is_skipped_with_a_warning(tmp_path, line):
    path = tmp_path / RESULTS
    path.write_bytes(b'{"name": "a"}\n' + line + b"\n")
    with pytest.warns(UserWarning, match="line 2: unfinished or no record, skipped"):
        assert read_records(path) == [{"name": "a"}]
    assert last_record(path) == {"name": "a"}


def test_writers_at_the_same_time_do_not_mix_their_lines(machine, tmp_path, on_hardware):
    on_hardware("one")
    records = [measure(machine.case("a", 2.0), device="cpu", repetitions=1000)] * 3  # longer than any buffer
    writers = [threading.Thread(target=append_records, args=(records, tmp_path)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_records(tmp_path / RESULTS)) == 24


# Runs side by side


@pytest.fixture
def run_folder(machine, on_hardware, tmp_path):
    """Make a run's folder: names and times of its cases, and its hardware."""

    def make(folder, times_ms, hardware="one GPU"):
        on_hardware(hardware)
        jitter = np.random.default_rng(len(folder))
        (tmp_path / folder / "06_notebook").mkdir(parents=True)
        for name, milliseconds in times_ms.items():
            case = machine.case(
                name,
                lambda milliseconds=milliseconds: milliseconds * jitter.uniform(0.95, 1.05),
                parameters={"seq_len": 8, "layout": "hilbert"},
                error=milliseconds * 1e-6,
            )
            append_records([measure(case, device="cpu")], tmp_path / folder / "06_notebook")
        return tmp_path / folder

    return make


def test_compare_runs_gives_ratio_interval_and_errors_and_lists_what_is_missing(run_folder):
    a = run_folder("a", {"kernel": 6.0, "old": 2.0})
    b = run_folder("bb", {"kernel": 4.0, "new": 2.0})
    table = compare_runs(a, b).set_index("name")
    kernel = table.loc["kernel"]
    assert kernel["parameters"] == 'layout="hilbert", seq_len=8'
    assert kernel["ratio"] == pytest.approx(1.5, rel=0.05)
    assert kernel["low"] < kernel["ratio"] < kernel["high"]
    assert kernel["low"] < 1.5 < kernel["high"]
    assert (kernel["error_a"], kernel["error_b"]) == (6e-6, 4e-6)
    assert table["found"].to_dict() == {"kernel": "both", "old": "only in A", "new": "only in B"}
    assert np.isnan(table.loc["old", "ratio"])
    assert np.isnan(table.loc["old", "low"])


def test_compare_runs_refuses_different_hardware_and_names_both(machine, run_folder):
    a, b = run_folder("a", {"kernel": 6.0}, "NVIDIA H200"), run_folder("b", {"kernel": 4.0}, "GTX 1080")
    with pytest.raises(ValueError, match=r"same hardware.*NVIDIA H200.*GTX 1080"):
        compare_runs(a, b)
    append_records([measure(machine.case("x", 2.0), device="cpu")], a)  # recorded as a GTX 1080 too
    with pytest.raises(ValueError, match="GTX 1080 and NVIDIA H200"):
        compare_runs(a, a)


def test_compare_runs_takes_the_sides_of_comparisons_and_pools_repeats(machine, on_hardware, tmp_path):
    on_hardware("one")
    case = machine.case("a", 2.0, error=1e-3)
    append_records([compare_paired(case, machine.case("b", 1.0), device="cpu", repetitions=30)], tmp_path)
    append_records([measure(machine.case("a", 4.0, error=1e-6), device="cpu", repetitions=29)], tmp_path)
    table = compare_runs(tmp_path, tmp_path).set_index("name")
    assert list(table.index) == ["a", "b"]
    assert table.loc["a", ["median_a_ms", "error_a"]].to_list() == [2.0, 1e-3]  # of 30 at 2 ms and 29 at 4 ms


def test_compare_runs_refuses_a_folder_without_measurements(run_folder, tmp_path):
    with pytest.raises(ValueError, match=r"no measurements.*nowhere"):
        compare_runs(run_folder("a", {"kernel": 6.0}), tmp_path / "nowhere")


def test_compare_runs_leaves_out_what_failed_or_was_not_finished(run_folder):
    whole = run_folder("whole", {"kernel": 6.0})
    broken = run_folder("broken", {"kernel": 60.0, "other": 1.0}) / "06_notebook"
    broken.rename(whole / "06_notebook.failed")
    shutil.copytree(whole / "06_notebook.failed", whole / ".06_notebook.1")
    assert compare_runs(whole, whole)["name"].to_list() == ["kernel"]


def test_compare_runs_passes_over_records_of_other_kinds(run_folder):
    folder = run_folder("a", {"kernel": 6.0})
    ranks = {"side": "auto", "ranks": 4, "forward_ms": 1.0, "environment": {"hardware": "elsewhere"}}  # notebook 07's
    with (folder / "06_notebook" / RESULTS).open("a") as file:
        file.write("".join(json.dumps({**ranks, **kind}) + "\n" for kind in ({}, {"kind": "counters"})))
    assert compare_runs(folder, folder)["name"].to_list() == ["kernel"]
