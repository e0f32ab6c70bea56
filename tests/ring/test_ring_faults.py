"""Whatever happens to a rank, all end, the error names the rank and the cause, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from forked_ranks import fork_ranks
from own_processes import PATIENCE, mark, marked_processes, start_python, wait_for

from hilbert_lib.launch import REFUSED, workers
from hilbert_lib.launch.worker_main import _beat, beat_file
from hilbert_lib.launch.workers import RankError, _fault, _Supervisor, run_ranks
from hilbert_lib.limits.config import LONGEST_SECONDS

BEGAN = "HILBERT_TEST_BEGAN"
SILENCE = 2  # seconds


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path_factory):
    mark(monkeypatch)
    monkeypatch.setenv(BEGAN, str(tmp_path_factory.mktemp("began")))
    yield
    wait_for(lambda: not marked_processes())


def seconds_since_the_last_rank_began():
    """What its start took before depends on what else the machine does."""
    return time.time() - max((path.stat().st_mtime for path in Path(os.environ[BEGAN]).iterdir()), default=0)


def fault_of(target, ranks, arguments=None, **options):
    """The error of a run that has to fail, and not by a limit of its own or when what hangs comes to its end."""
    with pytest.raises(RankError) as caught:
        run_ranks(target, ranks, arguments, **{"backend": "gloo", "seconds": LONGEST_SECONDS / 2} | options)
    assert seconds_since_the_last_rank_began() < PATIENCE, str(caught.value)
    return caught.value


@pytest.fixture
def silence_is_told_by_others_beats(monkeypatch):
    """Time passes for the supervisor as the ranks' beats say, once all have begun; and collectives wait for long."""
    last_beat, beats = workers._last_beat, {}

    def noted(folder, rank):
        beats[rank] = last_beat(folder, rank)
        return beats[rank]

    def monotonic():
        return max(beats.values()) if len(os.listdir(os.environ[BEGAN])) == len(beats) > 0 else 0.0

    def supervisor(folder, ranks, seconds, stall_seconds):
        return _Supervisor(folder, ranks, seconds, SILENCE)

    monkeypatch.setattr(workers, "_last_beat", noted)
    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=time.sleep, monotonic=monotonic))
    monkeypatch.setattr(workers, "_Supervisor", supervisor)


BROKEN = {  # by fault: the rank's status and the cause
    "is killed": ("killed", "by SIGKILL: from outside, or by the kernel for want of memory"),
    "stalls": ("stalled", "rank [01] waited: .*Timed out"),
    "is stopped": ("stalled", f"no sign of life for {SILENCE} s"),
    "returns early": ("failed", "returned while rank 0 waited: RuntimeError: .*Connection (closed|reset) by peer"),
    "fills the memory": ("out of memory", "can't allocate memory: you"),
    "ends early": ("failed", "it ended without a result"),
    "raises": ("failed", "ValueError: pattern must be the same on every rank"),
    "exits": ("failed", "SystemExit: 3"),
    "returns no JSON": ("failed", "TypeError: .* is not JSON serializable"),
}


# The others wait in a collective or, here, in attention on a grid.
ON_GRID = [pytest.param(x, True, marks=pytest.mark.full) for x in ("is killed", "stalls", "raises")]
MORE = [pytest.param(x, False, marks=pytest.mark.full) for x in list(BROKEN)[4:]]


@pytest.mark.parametrize(("fault", "on_grid"), [*((x, False) for x in list(BROKEN)[:4]), *MORE, *ON_GRID])
def test_the_rank_that_broke_is_named_with_its_cause(request, monkeypatch, fault, on_grid):
    fork_ranks(monkeypatch)
    status, cause = BROKEN[fault]
    last = 2 if on_grid or fault == "stalls" else 1  # of two that wait, none may be taken for the one that stalls
    arguments, options = {"fault": fault, "on_grid": on_grid}, {"stall_seconds": PATIENCE}
    if fault == "is stopped":
        request.getfixturevalue("silence_is_told_by_others_beats")
    if fault == "stalls":  # those that wait end together, also on a busy machine
        arguments["tell_seconds"], options = 5, {"stall_seconds": 5}
    error = fault_of("faulty_ranks:last_rank_breaks", last + 1, arguments, **options)
    assert (error.ranks, error.status) == ((last,), status)
    assert re.search(cause, error.cause)
    assert str(error).startswith(f"rank {last} {status}: {error.cause}")
    assert f"this rank {fault}" in error.output
    assert fault != "stalls" or any("in stall" in line for line in error.output), "it must show where"


def test_a_run_that_takes_too_long_shows_where_each_rank_was(monkeypatch):
    def monotonic():  # the limit passes as soon as both hang, which on a busy machine takes long
        return time.monotonic() + 1000 * (len(os.listdir(os.environ[BEGAN])) == 2)

    fork_ranks(monkeypatch)
    monkeypatch.setattr(workers, "time", SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=monotonic))
    error = fault_of("faulty_ranks:all_hang", 2, seconds=500, stall_seconds=5000)
    assert (error.ranks, error.status, error.cause) == ((0, 1), "timed out", "longer than 500 s")
    assert error.output[0] == "rank 0:"
    assert "rank 1:" in error.output
    assert sum("in all_hang" in line for line in error.output) == 2


def said(kind: str, message: str) -> dict:
    return {"error": {"type": kind, "message": message, "errno": None}, "time": 1.0}


WATCHDOG = "Watchdog caught collective operation timeout"  # with an abort by NCCL; torchrun ends the others
HERE, TORCHS, OSS = ("rank 2:", "here"), "RuntimeError", "OSError"
ABORTED, ENDED, KILLED = -signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL
LOST, OWN = ([said(kind, "Connection closed by peer"), {"result": 1}, {}, {"result": 3}] for kind in (TORCHS, OSS))
TOLD = said("ValueError", f"rank 1 {REFUSED} TypeError: x must be")
TIMED, SHOWN = "Timed out", ("rank 1:", "rank 0:", WATCHDOG)
# A kernel's error, which the rank tells, and then NCCL aborts it: it shows what each thread did.
RAISED = ("Traceback (most recent call last):", "  File x", "AcceleratorError: an illegal access", "a hint")
DUMPED = "\n".join([*RAISED, "", "frame #4: libc", "Fatal Python error: Aborted", "", *["  no Python frame"] * 40])
# Reports, exit codes and logs of ranks; those at fault, status or cause, and what is shown of their logs.
FAULTS = {
    "it waited in vain": ([{}] * 3, {0: ABORTED, 1: ENDED, 2: ENDED}, [WATCHDOG] * 2 + ["here"], (2,), "stalled", HERE),
    "others returned": (LOST, {2: ENDED}, [], (1, 3), "returned while rank 0 waited", ()),
    "a connection of its own": (OWN, {2: ENDED}, [], (0,), "Connection closed", ()),
    "another one had died": (LOST, {2: KILLED}, [], (2,), "by SIGKILL", ()),
    "one returned before": ([{}, {"result": 1}], {0: ABORTED}, [WATCHDOG], (1,), "rank 0 waited: by SIGABRT", SHOWN),
    "a download of its own": ([said(OSS, TIMED), {}], {1: ENDED}, [f"{OSS}: {TIMED}"], (0,), "OSError", ()),
    "all raise alike": ([said("ValueError", "pattern must be")] * 2, {}, [], (0, 1), "pattern must be", ()),
    "the other one refused": ([TOLD, said("TypeError", "x must be")], {}, [], (1,), "TypeError: x must be", ()),
    "NCCL aborted it": ([{}, {}], {0: ABORTED, 1: ENDED}, [DUMPED], (0,), "by SIGABRT", ("rank 0:", *RAISED)),
    "it waited too long": ([said(TORCHS, TIMED), {}], {1: ENDED}, [f"{TORCHS}: {TIMED}"], (1,), "rank 0 waited", ()),
}


@pytest.mark.parametrize("what", FAULTS)
def test_the_fault_is_found_from_reports_exit_codes_and_logs(what, tmp_path):
    reports, exits, logs, ranks, words, output = FAULTS[what]
    for rank, text in enumerate(logs):
        log = tmp_path / f"run/attempt_0/{rank}/stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    error = _fault(tmp_path, reports, exits)
    assert error.ranks == ranks
    assert words == error.status or words in error.cause
    assert output in ((), error.output)


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_systems_clock_is_no_silence_and_hides_none(tmp_path, monkeypatch, step):
    def found():
        supervisor = _Supervisor(tmp_path, 2, 60, 2)
        supervisor._start = now  # not by a `with`, which would end this process as a rank that is silent
        return supervisor.cause and supervisor.fault

    clock, now = time.time, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for rank in (0, 1):
        beat_file(tmp_path, rank).write_text(str(os.getpid()))
        _beat(beat_file(tmp_path, rank))
    monkeypatch.setattr(time, "time", lambda: clock() + step)
    assert not found()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3)
    _beat(beat_file(tmp_path, 0))
    assert found() == ((1,), "stalled", "no sign of life for 2 s")


def test_a_rank_that_has_ended_is_not_taken_for_one_that_is_silent(tmp_path):
    def begin(*command):
        process = subprocess.Popen(command)
        beat = beat_file(tmp_path, 0)
        beat.write_text(str(process.pid))
        os.utime(beat, (1, 1))
        return process

    ended = begin(sys.executable, "-c", "")  # and torchrun has not asked for its exit status yet
    wait_for(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    with _Supervisor(tmp_path, 1, 60, 2) as supervisor:
        assert supervisor.cause == ""
        ended.wait()
        assert supervisor.cause == ""
        begin("sleep", "600")
        assert supervisor.cause == "no sign of life for 2 s"


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGKILL, 2)])
def test_ranks_end_with_the_process_that_started_them(number, ranks, tmp_path, monkeypatch):
    program = f"""
        import pytest
        from forked_ranks import fork_ranks
        from hilbert_lib.launch.workers import run_ranks
        fork_ranks(pytest.MonkeyPatch())
        run_ranks("faulty_ranks:all_hang", {ranks}, backend="gloo")
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start_python(program, tmp_path)
    # This process, the one that ends all below it, torchrun, the ranks, and what each of them started.
    wait_for(lambda: len(marked_processes()) == 3 + 2 * ranks)
    process.send_signal(number)
    assert process.wait(PATIENCE) != 0
    wait_for(lambda: not marked_processes())
    assert number == signal.SIGKILL or not list(tmp_path.iterdir()), "its files must go too"


def test_under_a_plain_torchrun_a_stalled_rank_ends_all(tmp_path):
    (tmp_path / "arguments.json").write_text('{"fault": "stalls"}')
    former = tmp_path / "results/rank-1.json"  # of the rank that stalls now
    former.parent.mkdir()
    former.write_text('{"result": 1}')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "hilbert_lib.launch.worker_main", "faulty_ranks:last_rank_breaks"]
    command += ["--stall-seconds=5", "--backend=gloo"]
    command += [f"--arguments={tmp_path / 'arguments.json'}", f"--results={tmp_path / 'results'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0
    assert "Timed out waiting 5000ms" in done.stderr
    assert "in stall" in done.stderr, "the stalled rank must show where it was"
    assert not re.search("error_file: [^<]", done.stderr), "torchrun fails where its signal cuts one off"
    assert not former.exists(), "a former run's result must not be taken for this one's"


@pytest.mark.multigpu
@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fault", ["is killed", "fills the memory", "raises", "stalls", "is stopped"])
def test_over_nccl_the_rank_that_broke_is_named_too(fault):
    ranks, status = torch.cuda.device_count(), BROKEN[fault][0]
    options = {"stall_seconds": 5} if status == "stalled" else {}
    error = fault_of("faulty_ranks:last_rank_breaks", ranks, {"fault": fault}, backend="nccl", **options)
    assert (error.ranks, error.status) == ((ranks - 1,), status), str(error)
