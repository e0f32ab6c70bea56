"""Reading hardware counters: what `ncu` prints becomes a table, and what keeps it from printing is said."""

import sys
from contextlib import suppress
from functools import partial

import psutil
import pytest
import torch
from own_processes import wait_for

from hilbert_lib.lab.sweeps import counters
from hilbert_lib.lab.sweeps.counters import METRICS, count_calls, found_percent, parse_counters

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
    table = parse_counters(printed())
    assert table.columns.tolist() == list(METRICS)
    assert table.values.tolist() == [[10.0**n for n in range(len(METRICS))]] * 2
    assert parse_counters("nothing").empty


def test_a_child_makes_the_calls_and_one_kernel_of_it_is_counted(ncu):
    arguments = ncu(printed(1))
    assert len(count_calls({"n": 2}, kernel="forward_kernel")) == 1
    given = arguments.read_text()
    for option in ("'--clock-control', 'none'", "'--cache-control', 'all'", "'--profile-from-start', 'off'"):
        assert option in given
    assert "'--kernel-name', 'forward_kernel'" in given
    program = "from hilbert_lib.lab.sweeps.counters import make_calls; make_calls()"
    assert given.endswith(f"""'-c', '{program}', '{{"n": 2}}']""")


def test_a_program_that_takes_too_long_ends_with_the_ncu_that_watches_it(ncu, tmp_path):
    pid = tmp_path / "pid"
    ncu(script=f"#!/bin/sh\n/bin/sleep 60 &\necho $! > {pid}\nwait\n")
    with pytest.raises(RuntimeError, match=r"ncu took longer than 1 s over \{\}"):
        count_calls({}, kernel="forward_kernel", timeout=1)
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(int(pid.read_text()))
        wait_for(lambda: program.status() == psutil.STATUS_ZOMBIE, 5)


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
    monkeypatch.setattr(counters, "calls", lambda n: (partial(said.append, i) for i in range(n)))
    monkeypatch.setattr(sys, "argv", ["-c", '{"n": 2}'])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    counters.make_calls()
    assert said == [0, "start", 0, "stop", 1, "start", 1, "stop"]


def test_what_l2_finds_in_either_half_or_joins_is_found():
    table = parse_counters(printed(1)).assign(l1_sectors=200, l2_sectors=150, l2_hit_sectors=90, far_hit_sectors=40)
    assert found_percent(table).tolist() == [90.0]  # 20 of 200 sectors come from memory
