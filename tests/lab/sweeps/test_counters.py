"""Hardware counters: what `ncu` prints or refuses, and launches in every order beside the model of what is counted."""

import json
import subprocess
import sys
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import pandas as pd
import psutil
import pytest
import torch
from own_processes import wait_for

from hilbert_lib.lab.cache.l2 import Gpu
from hilbert_lib.lab.cache.predicted import QUANTITIES
from hilbert_lib.lab.records import read_records
from hilbert_lib.lab.sweeps import counters as benchmarks
from hilbert_lib.lab.sweeps.counters import METRICS, count_calls, found_percent, parse_counters
from hilbert_lib.machine import NO_GPU

HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
VALUES = {name: f"{10**n:,}" for n, name in enumerate(METRICS)}


def printed(launches=2, values=VALUES):
    rows = [
        f'"{launch}","7","forward_kernel","Command line profiler metrics","{METRICS[name]}","sector","{value}"'
        for launch in range(launches)
        for name, value in values.items()
    ]
    before = ["==PROF== Connected to process 7", 'the program says "ID", too']
    return "\n".join([*before, HEADER, *rows, "==PROF== Disconnected from process 7"])


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A stand-in for ncu that prints what it is told, or runs a script; and the file where it notes its arguments."""

    def install(text="", status=0, script=""):
        note = f"open({str(tmp_path / 'args')!r}, 'w').write(repr(sys.argv))"
        prints = f"#!{sys.executable}\nimport sys\n{note}\nprint({text!r})\nsys.exit({status})\n"
        (tmp_path / "ncu").write_text(script or prints)
        (tmp_path / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "args"

    return install


def test_every_launch_is_a_row_in_order_and_every_metric_a_column():
    table = parse_counters(printed(), METRICS)
    assert table.columns.tolist() == ["kernel", *METRICS]
    assert table.values.tolist() == [["forward_kernel", *(10.0**n for n in range(len(METRICS)))]] * 2
    assert parse_counters("nothing", METRICS).empty


def test_a_child_makes_the_calls_and_one_kernel_of_it_is_counted(ncu):
    arguments = ncu(printed(1))
    assert len(count_calls({"n": 2}, kernel="forward_kernel")) == 1
    given = arguments.read_text()
    for option in ("'--clock-control', 'none'", "'--cache-control', 'all'", "'--profile-from-start', 'off'"):
        assert option in given
    assert "'--kernel-name', 'forward_kernel'" in given
    program = "from hilbert_lib.lab.sweeps.counters import make_calls; make_calls()"
    assert given.endswith(f"""'-c', '{program}', '{{"n": 2}}']""")


def test_a_program_that_takes_too_long_ends_with_the_ncu_that_watches_it(ncu, monkeypatch, tmp_path):
    pid, communicate = tmp_path / "pid", subprocess.Popen.communicate
    ncu(script=f"#!/bin/sh\n/bin/sleep 600 &\necho $! > {pid}.new\n/bin/mv {pid}.new {pid}\nwait\n")

    def once_both_run(process, *, timeout):  # the limit begins
        wait_for(pid.exists)
        return communicate(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_both_run)
    with pytest.raises(RuntimeError, match=r"ncu took longer than 0.1 s over \{\}"):
        count_calls({}, kernel="forward_kernel", timeout=0.1)
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(int(pid.read_text()))
        wait_for(lambda: program.status() == psutil.STATUS_ZOMBIE)


def test_what_keeps_ncu_from_counting_is_said(ncu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ncu is not on the PATH"):
        count_calls({}, kernel="forward_kernel")
    for text, status, words in (
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "may not read the GPU's counters"),
        ("==ERROR== LibraryNotLoaded", 9, "status 9: ==ERROR== LibraryNotLoaded"),
        ("==WARNING== No kernels were profiled.", 0, "launched no kernel named 'forward_kernel'"),
    ):
        ncu(text, status)
        with pytest.raises(RuntimeError, match=words):
            count_calls({}, kernel="forward_kernel")


@pytest.mark.parametrize("value", ["n/a", None])
def test_a_metric_without_a_number_is_named_and_the_others_are_read(ncu, value):
    values = {**VALUES, "far_sectors": value} if value else {k: v for k, v in VALUES.items() if k != "far_sectors"}
    ncu(printed(values=values))
    with pytest.warns(UserWarning, match=r"no number for lts__t_sectors_srcunit_ltcfabric_op_read\.sum$"):
        table = count_calls({}, kernel="forward_kernel")
    assert table.far_sectors.isna().all()
    assert table.drop(columns="far_sectors").notna().all(axis=None)


def test_each_call_is_made_once_before_the_one_that_is_counted(monkeypatch):
    said = []
    calls = [partial(said.append, i) for i in range(2)]
    monkeypatch.setattr(benchmarks, "calls", lambda n, device: [Mock(call=lambda each=each: each) for each in calls])
    monkeypatch.setattr(sys, "argv", ["-c", '{"n": 2}'])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    benchmarks.make_calls()
    assert said == [0, "start", 0, "stop", 1, "start", 1, "stop"]


def test_what_l2_finds_in_either_half_or_joins_is_found():
    table = parse_counters(printed(1), METRICS).assign(
        l1_sectors=200, l2_sectors=150, l2_hit_sectors=90, far_hit_sectors=40
    )
    assert found_percent(table).tolist() == [90.0]  # 20 of 200 sectors come from memory


GPU = Gpu("small", 2**16, 4)
SIZES = {"lengths": [32], "heads": 2, "dilations": [1, 4], "row_bytes": [32, 64], "keys": 4}


@pytest.fixture
def counting(monkeypatch):
    """A stand-in for ncu, and its arguments: the works' launches, counted as their number plus 100; it in L2."""
    asked = []

    def count_calls(arguments, *, kernel):
        asked.append((arguments, kernel))
        launches = range(len(list(benchmarks.calls(**arguments))))
        counted = pd.DataFrame({name: [100.0 + n for n in launches] for name in METRICS})
        return counted.assign(l2_hit_sectors=[float(n) for n in launches], far_hit_sectors=0.0)

    info = {name: value for name, value in vars(NO_GPU).items() if name not in ("l2_bytes", "multiprocessors")}
    known = type(NO_GPU)(**info, l2_bytes=2**16, multiprocessors=4)
    monkeypatch.setattr(benchmarks, "count_calls", count_calls)
    monkeypatch.setattr(benchmarks, "get_gpu_info", lambda: known)
    return asked


def without_moment(records):
    """Records as JSON holds them, but for when they were made."""
    return [{**each, "environment": None} for each in json.loads(json.dumps(records))]


@pytest.mark.parametrize("kernel", benchmarks.COUNTED_KERNELS)
def test_the_call_of_a_work_gives_the_same_in_every_order(kernel):
    results = {}
    for work in benchmarks.calls(kernel, **SIZES | {"heads": 1, "row_bytes": [32]}):  # interpreted
        results.setdefault(work.record["parameters"]["dilation"], []).append(work.call()())
    assert len(results) == 2
    for rate, found in results.items():
        assert len(found) == 7 + (kernel == "forward" and 4 * rate < 32)  # a curve a segment
        assert all(torch.equal(found[0], other) for other in found)
        rows = {"forward": (1, 32, 1, 16), "decoding": (1, 1, 1, 16), "gather": (32 // rate, 16)}
        assert found[0].shape == rows[kernel]
        assert found[0].abs().sum() > 0
    if kernel == "gather":  # it copies the rows of the branch head by head
        work = next(benchmarks.calls("gather", **SIZES | {"dilations": [4]}))
        k = work.inputs.tensors[1]
        assert torch.equal(work.call()(), torch.cat([k[0, ::4, head] for head in range(2)]))


def test_every_work_is_recorded_once_with_what_was_counted_and_predicted(counting, tmp_path):
    records = benchmarks.count("decoding", output_dir=str(tmp_path), **SIZES)
    arguments, kernel = counting[0]
    assert json.loads(json.dumps(arguments)) == {"kernel": "decoding", **SIZES}
    assert kernel == "regex:^decode_kernel"
    works = list(benchmarks.calls("decoding", **SIZES))
    assert len(records) == len(works) == 28
    assert [record["kind"] for record in records] == ["counters"] * 28
    for n, (work, record) in enumerate(zip(works, records, strict=True)):
        assert record["parameters"] == work.record["parameters"]
        assert record["parameters"]["row_bytes"] == work.storage.row_bytes
        assert record["counted"]["l1_sectors"] == 100 + n
        assert record["predicted"] == vars(work.predicted(GPU))
    assert without_moment(read_records(tmp_path / "results.jsonl")) == without_moment(records)
    again = benchmarks.count("decoding", output_dir=str(tmp_path), **SIZES)
    assert len(counting) == 1
    assert without_moment(again) == without_moment(records)
    benchmarks.count("gather", output_dir=str(tmp_path), **SIZES)
    benchmarks.count("decoding", output_dir=str(tmp_path), **SIZES | {"lengths": [32, 64]})
    assert len(counting) == 3
    assert len(read_records(tmp_path / "results.jsonl")) == 3 * 28, "what is known is not added again"


def test_launches_that_are_not_one_a_call_are_refused(counting, monkeypatch):
    count_calls = benchmarks.count_calls
    monkeypatch.setattr(benchmarks, "count_calls", lambda *asked, **how: count_calls(*asked, **how)[1:])
    with pytest.raises(RuntimeError, match="each call must be one launch, got 13 launches of 14 calls"):
        benchmarks.count("gather", **SIZES | {"dilations": [4]})


def test_the_table_has_the_last_record_of_each_work(counting):
    old, new = (benchmarks.count("forward", **SIZES | {"lengths": [32, 64]}) for _ in range(2))
    for record in new:
        record["counted"]["time_ns"] = None  # not known to this GPU
    table = benchmarks.counter_table([{"kind": "comparison"}, *old, *new])
    assert len(table) == len(new)
    assert table.length.value_counts().to_dict() == {32: 32, 64: 32}
    assert table.time_ns.isna().all()
    assert {"kernel", "layout", *QUANTITIES, *(f"predicted_{name}" for name in QUANTITIES)} <= set(table)
    by_segment = table[table.layout == "hilbert per segment"]
    assert set(zip(by_segment.length, by_segment.dilation, strict=True)) == {(32, 1), (32, 4), (64, 1), (64, 4)}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", benchmarks.COUNTED_KERNELS)
def test_on_a_gpu_each_call_is_one_launch_of_its_kernel(kernel):
    from torch.profiler import ProfilerActivity, profile

    from hilbert_lib.attention.triton import arguments

    assert not arguments.is_interpreted()
    sizes = SIZES | {"lengths": [4096], "keys": 1024, "dilations": [4], "device": "cuda"}
    call = next(benchmarks.calls(kernel, **sizes)).call()
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = {"forward": ["forward_kernel"], "decoding": ["decode_kernel"], "gather": ["gather", "index"]}[kernel]
    launched = [event.count for event in seen.key_averages() if any(name in event.key.lower() for name in names)]
    assert sum(launched) == 1
