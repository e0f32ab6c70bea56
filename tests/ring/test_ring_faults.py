"""Whatever happens to a rank, all end within seconds, the error names the rank and the cause, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from own_processes import mark, marked_processes, wait_for

from hilbert_lib.launch import workers
from hilbert_lib.launch.worker_main import beat_file
from hilbert_lib.launch.workers import RankError, _fault, _Supervisor, run_ranks

BEGAN = "HILBERT_TEST_BEGAN"
PATIENCE = 20  # seconds, for a busy machine; what hangs in these tests hangs for ten minutes
STALLED = {"stall_seconds": 2}  # the others keep the default, for a busy machine


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path_factory):
    mark(monkeypatch)
    monkeypatch.setenv(BEGAN, str(tmp_path_factory.mktemp("began")))
    yield
    wait_for(lambda: not marked_processes(), PATIENCE)


def seconds_since_the_last_rank_began():
    """What its start took before depends on what else the machine does."""
    return time.time() - max((path.stat().st_mtime for path in Path(os.environ[BEGAN]).iterdir()), default=0)


def fault_of(target, ranks, arguments=None, **options):
    """The error of a run that has to fail within 30 seconds from when all ranks have begun."""
    with pytest.raises(RankError) as caught:
        run_ranks(target, ranks, arguments, **{"backend": "gloo"} | options)
    assert seconds_since_the_last_rank_began() < 30, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("is killed", "killed", "by SIGKILL: from outside, or by the kernel for want of memory"),
        ("fills the memory", "out of memory", "can't allocate memory: you tried to allocate"),
        ("stalls", "stalled", "rank [01] waited: .*Timed out"),
        ("is stopped", "stalled", "no sign of life for 2 s"),
        ("returns early", "failed", "returned while rank 0 waited: RuntimeError: .*Connection (closed|reset) by peer"),
        pytest.param("ends early", "failed", "it ended without a result", marks=pytest.mark.full),
        pytest.param("exits", "failed", "SystemExit: 3", marks=pytest.mark.full),
        pytest.param("returns no JSON", "failed", "TypeError: .* is not JSON serializable", marks=pytest.mark.full),
    ],
)
def test_the_rank_that_broke_is_named_with_its_cause(fault, status, cause):
    last = 2 if fault == "stalls" else 1  # of two that wait, none may be taken for the one that stalls
    error = fault_of(
        "faulty_ranks:last_rank_breaks", last + 1, {"fault": fault}, **STALLED if status == "stalled" else {}
    )
    assert (error.ranks, error.status) == ((last,), status)
    assert re.search(cause, error.cause)
    assert str(error).startswith(f"rank {last} {status}: {error.cause}")
    assert f"this rank {fault}" in error.output
    if fault == "stalls":
        assert any("faulty_ranks.py" in line and "in stall" in line for line in error.output), "it must show where"


def test_ranks_with_other_patterns_or_orderings_all_raise_and_the_message_names_both_sides():
    error = fault_of("faulty_ranks:disagree", 2)
    assert error.ranks == (0, 1)
    for name, sides in {
        "pattern": r"dilation_rates=\(1,\).* on rank 0; .*dilation_rates=\(2,\).* on rank 1",
        "kv_ordering": "rate=1.* on rank 0; .*rate=2.* on rank 1",
    }.items():
        assert re.search(f"{name} must be the same on all ranks, got .*{sides}", str(error))


def test_a_rank_that_refuses_its_arguments_is_named_and_not_those_that_it_told():
    error = fault_of("faulty_ranks:last_rank_refuses", 3)
    assert (error.ranks, error.cause) == ((2,), "ValueError: dropout_p must be in [0, 1), got 2.0")
    assert error.output[0] == "rank 2:"


def test_a_run_that_takes_too_long_is_ended_and_shows_where_each_rank_was(monkeypatch):
    def monotonic():  # the limit passes as soon as both hang, which on a busy machine takes long
        return time.monotonic() + 1000 * (len(os.listdir(os.environ[BEGAN])) == 2)

    monkeypatch.setattr(workers, "time", SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=monotonic))
    error = fault_of("faulty_ranks:all_hang", 2, seconds=500)
    assert (error.ranks, error.status, error.cause) == ((0, 1), "timed out", "longer than 500 s")
    assert error.output[0] == "rank 0:"
    assert "rank 1:" in error.output
    assert sum("in all_hang" in line for line in error.output) == 2


def test_a_rank_that_waited_is_not_taken_for_the_one_that_stalls(tmp_path):
    # NCCL ends a rank that waited too long by an abort; torchrun ends the others, those that waited as long too.
    waited = "Watchdog caught collective operation timeout"
    for rank, text in enumerate([waited, waited, "Current thread"]):
        log = tmp_path / f"run/attempt_0/{rank}/stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    error = _fault(tmp_path, [{}, {}, {}], {0: -signal.SIGABRT, 1: -signal.SIGTERM, 2: -signal.SIGTERM})
    assert (error.ranks, error.status) == ((2,), "stalled")
    assert error.output == ("rank 2:", "Current thread")


@pytest.mark.parametrize(
    ("kind", "killed", "ranks"), [("RuntimeError", 0, (1, 3)), ("OSError", 0, (0,)), ("RuntimeError", 2, (2,))]
)
def test_ranks_that_returned_are_at_fault_only_where_one_waited_and_none_had_died(kind, killed, ranks, tmp_path):
    lost = {"error": {"type": kind, "message": "Connection closed by peer", "errno": None}, "time": 1.0}
    exits = {killed: -signal.SIGKILL} if killed else {2: -signal.SIGTERM}
    assert _fault(tmp_path, [lost, {"result": 1}, {}, {"result": 3}], exits).ranks == ranks


def test_a_rank_that_returned_is_at_fault_where_one_was_ended_for_waiting_too_long(tmp_path):
    log = tmp_path / "run/attempt_0/0/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("Watchdog caught collective operation timeout")
    error = _fault(tmp_path, [{}, {"result": 1}], {0: -signal.SIGABRT})
    assert (error.ranks, error.cause) == ((1,), "returned while rank 0 waited: by SIGABRT")
    assert error.output == ("rank 1:", "rank 0:", "Watchdog caught collective operation timeout")


@pytest.mark.parametrize(("kind", "ranks"), [("OSError", (0,)), ("RuntimeError", (1,))])
def test_a_rank_whose_own_download_timed_out_did_not_wait_for_another(kind, ranks, tmp_path):
    report = {"error": {"type": kind, "message": "Timed out", "errno": None}, "time": 1.0}
    log = tmp_path / "run/attempt_0/0/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{kind}: Timed out")
    assert _fault(tmp_path, [report, {}], {1: -signal.SIGTERM}).ranks == ranks


def test_a_rank_that_has_ended_is_not_taken_for_one_that_is_silent(tmp_path):
    def begin(*command):
        process = subprocess.Popen(command)
        beat = beat_file(tmp_path, 0)
        beat.write_text(str(process.pid))
        os.utime(beat, (1, 1))
        return process

    ended = begin(sys.executable, "-c", "")  # and torchrun has not asked for its exit status yet
    wait_for(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE, PATIENCE)
    with _Supervisor(tmp_path, 1, 60, 2) as supervisor:
        assert supervisor.cause == ""
        ended.wait()
        assert supervisor.cause == ""
        begin("sleep", "60")
        assert supervisor.cause == "no sign of life for 2 s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(number, tmp_path):
    program = """
        from hilbert_lib.launch.workers import run_ranks
        run_ranks("faulty_ranks:all_hang", 2, backend="gloo")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in a background
    )
    # This process, the one that ends all below it, torchrun, two ranks, and what each of them started.
    wait_for(lambda: len(marked_processes()) == 7, 300)  # on busy cores too; what is tested comes after
    process.send_signal(number)
    assert process.wait(PATIENCE) != 0
    wait_for(lambda: not marked_processes(), PATIENCE)
    assert number == signal.SIGKILL or not list(tmp_path.iterdir()), "its files must go too"


def test_under_a_plain_torchrun_a_stalled_rank_ends_all_within_the_timeout_of_the_group(tmp_path):
    (tmp_path / "arguments.json").write_text('{"fault": "stalls"}')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "hilbert_lib.launch.worker_main", "faulty_ranks:last_rank_breaks"]
    command += ["--stall-seconds=3", "--backend=gloo"]
    command += [f"--arguments={tmp_path / 'arguments.json'}", f"--results={tmp_path / 'results'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert seconds_since_the_last_rank_began() < 30
    assert done.returncode != 0
    assert "Timed out waiting 3000ms" in done.stderr
    assert "in stall" in done.stderr, "the stalled rank must show where it was"
    assert not re.search("error_file: [^<]", done.stderr), "torchrun fails where its signal cuts one off"


@pytest.mark.multigpu
@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("is killed", "killed"),
        ("fills the memory", "out of memory"),
        ("raises", "failed"),
        ("stalls", "stalled"),
        ("is stopped", "stalled"),
    ],
)
def test_over_nccl_the_rank_that_broke_is_named_too(fault, status):
    ranks = torch.cuda.device_count()
    options = {"stall_seconds": 5} if status == "stalled" else {}
    error = fault_of("faulty_ranks:last_rank_breaks", ranks, {"fault": fault}, backend="nccl", seconds=60, **options)
    assert (error.ranks, error.status) == ((ranks - 1,), status), str(error)
