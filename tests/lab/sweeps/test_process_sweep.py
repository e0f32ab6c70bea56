"""Headline pairs in fresh processes: what is repeated, what is kept, and what a table and a number say of it."""

import json

import pytest

from hilbert_lib import DilatedPattern
from hilbert_lib.lab.ledger import kernels, numbers
from hilbert_lib.lab.record_schema import faults_below
from hilbert_lib.lab.records import RESULTS, committed_records
from hilbert_lib.lab.sweeps import processes
from hilbert_lib.lab.sweeps.processes import PROCESSES, process_table, repeat_in_processes
from hilbert_lib.launch.isolated import Ending

pytest.importorskip("triton", reason="triton has no build for this platform")
SIZES = {"length": 32, "heads": 2, "head_dims": [16], "rows": 2**20, "device": "cpu"}
HOW = {"seconds": 1e-3, "repetitions": 5}
PATTERN = DilatedPattern((16, 32), (1, 2))


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs what a fresh process would, and gives the calls. Each call's ratios are twice those of the one before."""
    calls = []

    def run_isolated(target, arguments, *, seconds, on_record):
        calls.append((target, json.loads(json.dumps(arguments))))
        for direction in ("forward", "backward"):
            about = {"sweep": PROCESSES, "pattern": "reference", "length": 65536, "is_causal": False, "head_dim": 128}
            sides = [
                {"name": n, "parameters": about | {"direction": direction}, "error": 0.0} for n in ("flex", "hopper")
            ]
            ratio = 1.25 * 2 ** len(calls)
            on_record(
                {"kind": "comparison", "a": sides[0], "b": sides[1], "ratio": ratio, "interval": [ratio, ratio]}
                | {"output_difference": 0.0}
            )
        return Ending("ok", "", (), (), 1.0, {})

    monkeypatch.setattr(processes, "run_isolated", run_isolated)
    return calls


@pytest.mark.usefixtures("calls_are_copied")
def test_each_pair_is_timed_in_processes_of_its_own(tmp_path):
    records = repeat_in_processes(PATTERN, ["eager"], processes=2, output_dir=str(tmp_path), **SIZES, **HOW)
    assert [record["process"] for record in records] == [0, 0, 1, 1]
    assert {record["a"]["parameters"]["direction"] for record in records} == {"forward", "backward"}
    assert all(record["a"]["samples_ms"] and record["b"]["error"] < 0.02 for record in records)
    assert {side["parameters"]["sweep"] for record in records for side in (record["a"], record["b"])} == {PROCESSES}
    table = process_table(records)
    assert table.processes.tolist() == [2, 2]
    assert (table.low < table.high).all()
    assert list(faults_below(tmp_path)) == []


def test_processes_that_ended_are_not_run_again(tmp_path, in_this_process):
    first = repeat_in_processes(PATTERN, ["flex"], processes=2, output_dir=str(tmp_path), **SIZES)
    again = repeat_in_processes(PATTERN, ["flex"], processes=3, output_dir=str(tmp_path), **SIZES)
    assert len(in_this_process) == 3
    assert again[:4] == first
    assert repeat_in_processes(PATTERN, ["flex"], processes=0, **SIZES) == []
    (target, (work,)) = in_this_process[0]
    assert target == "hilbert_lib.lab.sweeps.processes:in_process"
    assert work["opponents"] == ["flex"]
    assert work["length"] == 32


def test_a_process_that_fails_leaves_no_half_of_its_records(tmp_path, monkeypatch):
    def run_isolated(target, arguments, *, seconds, on_record):
        on_record({"kind": "comparison"})
        return Ending("out of memory", "CUDA out of memory", (), (), 1.0, {})

    monkeypatch.setattr(processes, "run_isolated", run_isolated)
    with pytest.raises(RuntimeError, match="process 0 of 3: out of memory, CUDA out of memory"):
        repeat_in_processes(PATTERN, ["flex"], processes=3, output_dir=str(tmp_path), **SIZES)
    assert not (tmp_path / RESULTS).exists()


def test_the_spread_between_processes_is_the_median_with_the_least_and_the_largest(in_this_process):
    table = process_table(repeat_in_processes(PATTERN, ["flex"], processes=3, **SIZES))
    assert table[["processes", "ratio", "low", "high"]].to_numpy().tolist() == [[3, 5.0, 2.5, 10.0]] * 2
    assert process_table([]).empty


@pytest.mark.evidence
def test_a_number_of_the_readme_tells_the_spread_where_a_record_has_it(in_this_process):
    committed = committed_records()
    without = numbers._speeds([record for record in committed if "process" not in record])
    assert without["ratio_ends"] == "its 95 % interval within one process"
    speeds = kernels.fused_speeds(committed, length=65536)
    (nearest,) = speeds.query("direction == 'forward' and head_dim == 128").other
    records = repeat_in_processes(PATTERN, ["flex"], processes=3, **SIZES)
    for record in records:  # of the backend that is nearest in the record
        record["a"]["name"] = nearest
    slots = numbers._speeds([record for record in committed if "process" not in record] + records)
    ends = [slots[f"forward_128_ratio{end}"] for end in ("", "_low", "_high")]
    assert ends == ["5.00", "2.50", "10.00"]
    assert slots["ratio_ends"] == "least and largest of 3 processes"
    assert slots["forward_64_ratio"] == without["forward_64_ratio"]  # which no process timed again
    assert numbers._speeds(records + committed, 2**20, "long_")["long_ratio_ends"] == without["ratio_ends"]
