"""Whatever a measured side does, it ends its own process alone, is recorded with its cause, and leaves nothing."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from own_processes import child_with, marked_processes, start_python, wait_for

from hilbert_lib import DilatedPattern
from hilbert_lib.lab import records as committed
from hilbert_lib.lab.figures.safety import draw_memory
from hilbert_lib.lab.guarded import cases as benchmarks
from hilbert_lib.lab.guarded.cases import Benchmark
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner
from hilbert_lib.lab.records import RESULTS, append_lines, read_records
from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import MARK, run_isolated
from hilbert_lib.limits import watch
from hilbert_lib.limits.config import LONGEST_SECONDS, SafetyConfig
from hilbert_lib.limits.estimate import MemoryEstimate
from hilbert_lib.limits.memory import GB, Memory
from hilbert_lib.limits.watch import Watcher

pytestmark = pytest.mark.usefixtures("nothing_is_left")

FAULTY = Benchmark("faulty_sides:measure")


@pytest.fixture
def runner(tmp_path):
    """A runner of faulty sides on all of the host's memory, with one file a test."""

    def make(benchmark=FAULTY, **limits):
        config = SafetyConfig(**{"min_free_host_gb": 0, "max_memory_share": 1} | limits)
        return SafeBenchmarkRunner(tmp_path / "points.jsonl", benchmark=benchmark, config=config, device="cpu")

    return make


def point(*sides, length=8):
    return {"length": length, "sides": list(sides)}


@pytest.mark.parametrize(
    ("fault", "status", "cause"),
    [
        ("uses all memory", "out of memory", "MemoryError"),
        ("gets no GPU memory", "out of memory", "OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."),
        ("hangs", "timed out", "longer than 1 s"),
        ("aborts", "crashed", "by SIGABRT"),
        ("segfaults", "crashed", "by SIGSEGV"),
        ("is killed", "killed", "by SIGKILL: from outside, or by the kernel for want of memory"),
        ("reads illegally", "CUDA error", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("fills the disk", "disk full", "OSError: [Errno 28] No space left on device"),
        ("exits", "failed", "exit status 7: running exits"),
        ("ends early", "failed", "it ended without a record"),
        ("is wrong", "failed", "IndexError: list index out of range"),
    ],
)
def test_a_fault_ends_its_side_alone_and_is_recorded_with_its_cause(runner, fault, status, cause):
    first, second = runner(max_seconds=1 if fault == "hangs" else 30).run(
        [point("good", fault), point("good", "fine", length=9)]
    )
    found = first["outcomes"][fault]
    assert (found["status"], found["cause"], found["paired"]) == (status, cause, False)
    together, alone, faulty = first["attempts"]
    assert (together["status"], alone["status"], faulty["status"]) == (status, "ok", status)
    assert f"running {fault}" in faulty["output"]
    assert faulty["left"] == ()
    alone = f"timed alone, since all together: {status}, {cause}"
    assert first["outcomes"]["good"] == {"status": "ok", "cause": alone, "paired": False}
    assert {side: outcome["status"] for side, outcome in second["outcomes"].items()} == {"good": "ok", "fine": "ok"}


def test_a_hang_shows_where_it_hangs(runner):
    (line,) = runner(max_seconds=1).run([point("hangs")])
    assert any("run" in text and "faulty_sides.py" in text for text in line["attempts"][0]["output"])


def test_sides_without_a_record_are_tried_alone_and_marked_unpaired(runner):
    (line,) = runner().run([point("good", "early", "aborts", "late")])
    outcomes = line["outcomes"]
    assert list(outcomes) == ["good", "early", "aborts", "late"]
    assert {side: outcome["paired"] for side, outcome in outcomes.items()} == {
        "good": True,
        "early": True,
        "aborts": False,
        "late": False,
    }
    assert outcomes["late"]["status"] == "ok"
    pids = [(record.get("b") or record)["pid"] for record in line["records"]]
    assert [record["kind"] for record in line["records"]] == ["comparison", "measurement"]
    assert len({*pids, os.getpid()}) == 3, "each attempt must have a process of its own"


def test_processes_that_a_side_started_end_with_it(runner):
    (line,) = runner(max_seconds=1).run([point("starts others and hangs")])
    assert line["outcomes"]["starts others and hangs"]["status"] == "timed out"
    assert not marked_processes(having=MARK)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent for the processes that lost theirs")
@pytest.mark.parametrize(("then", "status"), [("", "ok"), (" and hangs", "timed out"), (" and aborts", "crashed")])
def test_processes_without_session_mark_or_parent_in_common_end_with_their_side(runner, then, status):
    side = "starts strangers" + then
    (line,) = runner(max_seconds=3 if "hangs" in then else 30).run([point(side)])
    assert line["outcomes"][side]["status"] == status
    told = next(text for text in line["attempts"][0]["output"] if text.startswith("strangers"))
    pids = [int(word) for word in told.split()[1:]]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_process_that_dies_while_it_writes_a_record_is_a_crash():
    ending = run_isolated("builtins:exec", ["import os; os.write(3, b'{'); os.abort()"], seconds=30)
    assert (ending.status, ending.cause) == ("crashed", "by SIGABRT")


def test_a_process_that_crashes_while_it_tells_where_it_hangs_timed_out():
    die = "import os, sys; print('Timeout (0:00:30)!', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    ending = run_isolated("builtins:exec", [die], seconds=30)
    assert (ending.status, ending.cause) == ("timed out", "longer than 30 s")


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("Triton Error [CUDA]: an illegal memory access was encountered", "CUDA error"),
        ("CUDA driver error: unspecified launch failure", "CUDA error"),
        ("cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA error"),
        ("Triton Error [CUDA]: out of memory", "out of memory"),
        ("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"),
        ("unable to mmap 4096 bytes from file: Cannot allocate memory (12)", "out of memory"),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", "failed"),
    ],
)
def test_what_torch_triton_and_the_driver_say_is_told_as_a_fault_of_the_gpu_or_a_want_of_memory(message, status):
    error = {"type": "RuntimeError", "message": message, "errno": None}
    assert isolated.diagnosis(error, 1, ()) == (status, f"RuntimeError: {message}")


def test_a_signal_without_a_name_is_told_by_its_number():
    ending = run_isolated("signal:raise_signal", [signal.SIGRTMIN + 6], seconds=30)
    assert (ending.status, ending.cause) == ("killed", f"by signal {signal.SIGRTMIN + 6}")


def test_an_error_is_told_without_this_machines_paths_and_a_want_of_memory_as_such():
    missing = os.path.join(os.path.abspath(sys.path[0]), "missing")
    ending = run_isolated("builtins:open", [missing], seconds=30)
    assert ending.cause == "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"
    ending = run_isolated("builtins:exec", ["raise OSError(12, 'Cannot allocate memory')"], seconds=30)
    assert ending.status == "out of memory"


def test_the_host_memory_of_a_call_is_capped():
    take = ["bytearray(2**28)"]
    assert run_isolated("builtins:exec", take, seconds=10).status == "ok"
    assert run_isolated("builtins:exec", take, seconds=10, host_bytes=2**30).status == "ok"
    assert run_isolated("builtins:exec", take, seconds=10, host_bytes=2**27).status == "out of memory"


def test_a_process_is_ended_when_its_watcher_says_so():
    watch = Watcher(SafetyConfig(max_seconds=0.01), "cpu", on_limit=lambda cause: None)
    ending = run_isolated("time:sleep", [60], seconds=30, watch=lambda pid: watch)
    assert (ending.status, ending.cause[:7]) == ("over a limit", "it ran ")
    assert ending.seconds < 5


def test_a_runner_caps_the_host_memory_of_a_side_at_what_its_limits_leave(runner, monkeypatch):
    for room, status in ((GB // 2, "out of memory"), (2 * GB, "ok")):
        monkeypatch.setattr("hilbert_lib.lab.guarded.runner.host_memory", lambda room=room: Memory("host", 2**40, room))
        (line,) = runner().run([point("takes a GB")], retry_failed=True)
        assert line["outcomes"]["takes a GB"]["status"] == status


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that the watch finds cool at its first look, and then of the degrees that the test sets."""

    class Gpu:
        degrees = 95

        def __init__(self, device):
            self.looks = 0

        def look(self):
            self.looks += 1
            return Memory("cuda:0", 80 * GB, 80 * GB), Gpu.degrees if self.looks > 1 else 60

    monkeypatch.setattr(watch, "present_device", lambda device: torch.device("cuda:0"))
    monkeypatch.setattr(watch, "_Gpu", Gpu)
    return Gpu


def test_a_side_that_meets_a_limit_of_the_machine_is_told_and_measured_again(runner, gpu):
    (line,) = runner().run([point("waits")])
    cause = "the GPU has 95 C, allowed are 90"
    assert line["outcomes"]["waits"] == {"status": "over a limit", "cause": cause, "paired": False}
    assert runner().would_try(point("waits")) == ["waits"]
    gpu.degrees = 60
    (line,) = runner().run([point("waits")])
    assert line["outcomes"]["waits"]["status"] == "ok"
    assert runner().would_try(point("waits")) == []


def test_a_comparison_that_a_limit_of_the_machine_cost_is_measured_again(runner, gpu, monkeypatch):
    def cool_down(*arguments, **options):
        ending = run_isolated(*arguments, **options)
        gpu.degrees = 60
        return ending

    monkeypatch.setattr("hilbert_lib.lab.guarded.runner.run_isolated", cool_down)
    (line,) = runner().run([point("good", "waits")])
    assert [attempt["status"] for attempt in line["attempts"]] == ["over a limit", "ok", "ok"]
    assert {outcome["status"] for outcome in line["outcomes"].values()} == {"ok"}
    (line,) = runner().run([point("good", "waits")])
    assert all(outcome["paired"] for outcome in line["outcomes"].values())
    assert runner().would_try(point("good", "waits")) == []


REFUSAL = """
    def refuse(*_, **__):
        raise {error!r}

    {call} = refuse
"""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
        ("os.fork", BlockingIOError(11, "Resource temporarily unavailable")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_a_process_that_cannot_be_started_costs_its_point_alone_and_is_asked_again(
    runner, monkeypatch, tmp_path, call, error
):
    def refuse(*_, **__):
        raise error

    with monkeypatch.context() as patched:
        if call == "subprocess.Popen":
            patched.setattr(isolated, "subprocess", SimpleNamespace(Popen=refuse, PIPE=subprocess.PIPE))
        else:
            patched.setattr(isolated, "CHILD", child_with(REFUSAL.format(call=call, error=error), tmp_path))
        (line,) = runner().run([point("waits")])
    outcome = line["outcomes"]["waits"]
    assert outcome["status"] == "over a limit"
    assert outcome["cause"] == f"no process could be started: {error}"
    (line,) = runner().run([point("waits")])
    assert line["outcomes"]["waits"]["status"] == "ok"


def test_the_longest_time_limit_that_is_allowed_can_be_kept(runner):
    (line,) = runner(max_seconds=LONGEST_SECONDS).run([point("good")])
    assert line["outcomes"]["good"]["status"] == "ok"


def test_the_last_lines_hold_no_path_of_this_machine(runner):
    (line,) = runner().run([point("is wrong")])
    assert not any(os.sep + "faulty_sides.py" in text for text in line["attempts"][0]["output"])


def test_what_would_not_fit_is_not_tried_and_what_cannot_serve_is_told(runner):
    needs = {"good": 0, "large": 2**60, "odd": 0}
    benchmark = Benchmark(
        FAULTY.target,
        refusal=lambda point, side: "it is odd" if side == "odd" else "",
        estimate=lambda point, side: MemoryEstimate({}, needs[side], 0, 0),
    )
    (line,) = runner(benchmark).run([point("odd", "large", "good")])
    assert {side: outcome["status"] for side, outcome in line["outcomes"].items()} == {
        "odd": "cannot serve",
        "large": "not tried",
        "good": "ok",
    }
    assert line["outcomes"]["odd"]["cause"] == "it is odd"
    assert "required" in line["outcomes"]["large"]["cause"]


def test_inputs_that_do_not_fit_are_refused_without_an_estimate(runner):
    benchmark = Benchmark(FAULTY.target, inputs=lambda _: 2**60, estimate=lambda *_: pytest.fail("it takes long"))
    (line,) = runner(benchmark).run([point("good")])
    assert line["outcomes"]["good"]["status"] == "not tried"
    assert "1073741824.000 GB required" in line["outcomes"]["good"]["cause"]
    assert "its inputs alone" in line["outcomes"]["good"]["cause"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_inputs_of_a_point_are_not_more_than_its_estimate_says(direction):
    asked = {"backends": ["eager"], "directions": [direction], "dtype": "float32", "heads": 3, "head_dim": 8}
    (point,) = benchmarks.attention_points(DilatedPattern((16,), (1,)), lengths=[64], **asked)
    inputs = benchmarks.ATTENTION.inputs(point)
    assert inputs == 4 * 64 * 3 * 8 * 4
    assert inputs <= benchmarks.attention_estimate(point, "eager").inputs


def test_lines_that_are_no_points_are_skipped_with_a_warning_and_the_others_found(runner):
    runner().run([point("good")])
    path, seen = runner().path, []
    path.write_bytes(b'\xff\xfe\x00\n[1, 2]\nnull\n{"kind": "point"}\n{"kind": "other"}\n' + path.read_bytes())
    with pytest.warns(UserWarning, match="skipped") as warned:
        runner().run([point("good")], on_point=lambda line, reused: seen.append(reused))
    assert seen == [True]
    assert [str(each.message).partition(": ")[2] for each in warned] == [
        *["unfinished or no record, skipped"] * 3,
        "a point without key, point, outcomes, records, attempts is skipped",
    ]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("hilbert_lib.lab.guarded.runner.run_isolated", lambda *_, **__: begun.append("a process"))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "points.jsonl", tmp_path):
        with pytest.raises(OSError, match=str(path.parent)):
            SafeBenchmarkRunner(path, benchmark=FAULTY, device="cpu").run([point("good")])
    assert not begun


def test_a_file_is_opened_only_where_a_point_is_to_be_measured(runner, monkeypatch):
    with pytest.raises(ValueError, match="names of their sides"):
        runner().run([{"length": 8}])
    assert not runner().path.exists()
    runner().run([point("good")])
    seen, opened = [], Path.open

    def read_only(path, mode="r", *more, **options):
        if path == runner().path and mode != "r" and mode != "rb":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", read_only)
    runner().run([point("good")], on_point=lambda line, reused: seen.append(reused))
    assert seen == [True]
    with pytest.raises(PermissionError):
        runner().run([point("good", length=9)])


def test_a_rerun_measures_only_what_is_missing(runner):
    points = [point("good"), point("aborts"), point("good", length=9)]
    first = runner().run(points[:2])
    seen = []
    again = runner().run(points, on_point=lambda line, reused: seen.append(reused))
    assert seen == [True, True, False]
    assert again[:2] == json.loads(json.dumps(first))
    retried = []
    runner().run(points, retry_failed=True, on_point=lambda line, reused: retried.append(reused))
    assert retried == [True, False, True]


def test_a_comparison_that_a_fault_cost_is_told_and_measured_again_if_asked(runner, monkeypatch, tmp_path):
    points = [point("good", "aborts once")]
    once = tmp_path / "aborted"
    monkeypatch.setenv("ABORTS_ONCE", str(once))
    (first,) = runner().run(points)
    assert {side: outcome["status"] for side, outcome in first["outcomes"].items()} == {
        "good": "ok",
        "aborts once": "ok",
    }
    assert all("all together: crashed, by SIGABRT" in outcome["cause"] for outcome in first["outcomes"].values())
    assert runner().would_try(points[0]) == []
    assert runner().would_try(points[0], retry_failed=True) == ["good", "aborts once"]
    (again,) = runner().run(points, retry_failed=True)
    assert all(outcome == {"status": "ok", "cause": "", "paired": True} for outcome in again["outcomes"].values())
    assert runner().would_try(points[0], retry_failed=True) == []


@pytest.mark.parametrize("broken", [{"outcomes": {}}, {"outcomes": []}, {"records": None}])
def test_a_line_that_holds_half_of_a_point_is_no_measurement(runner, broken):
    (line,) = runner().run([point("good")])
    append_lines([{**line, **broken}], runner().path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which names the line where a part is missing
        (again,) = runner().run([point("good")])
    assert again["outcomes"]["good"]["status"] == "ok"


def test_what_cannot_be_read_again_is_refused_as_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match="path must be no pipe or device"):
            SafeBenchmarkRunner(path)


def test_a_side_that_does_not_fit_any_more_costs_no_measurement_and_one_that_fits_again_is_measured(runner):
    needs = {"good": 0, "large": 0}
    benchmark = Benchmark(FAULTY.target, estimate=lambda point, side: MemoryEstimate({}, needs[side], 0, 0))
    statuses = []
    for need in (2**60, 0, 2**60):
        needs["large"] = need
        (line,) = runner(benchmark).run([point("large", "good")])
        statuses.append([line["outcomes"][side]["status"] for side in ("large", "good")])
    assert statuses == [["not tried", "ok"], ["ok", "ok"], ["ok", "ok"]]
    assert len(read_records(runner().path)) == 2


def test_a_point_that_is_asked_for_twice_is_measured_once(runner):
    first, second = runner().run([point("good"), point("good")])
    assert first == second
    assert len(read_records(runner().path)) == 1


def test_what_a_call_wrote_is_read_however_late_its_reader_is(monkeypatch):
    read, records = isolated._read, []

    def late(stream, take):
        time.sleep(0.5)  # as on a machine with more to do
        read(stream, take)

    monkeypatch.setattr(isolated, "_read", late)
    ending = run_isolated("builtins:list", [[{"length": 8}]], seconds=20, on_record=records.append)
    assert (ending.status, records) == ("ok", [{"length": 8}])


def test_without_sessions_of_processes_nothing_is_started(monkeypatch):
    monkeypatch.delattr(os, "getsid")
    with pytest.raises(RuntimeError, match="this platform lacks"):
        run_isolated("builtins:dict", [], seconds=20)


def test_an_interrupted_point_is_measured_again(runner, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("hilbert_lib.lab.guarded.runner.run_isolated", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner().run([point("good")])
    (line,) = runner().run([point("good")])
    assert line["outcomes"]["good"]["status"] == "ok"


def test_what_was_measured_outlives_an_interrupted_retry_and_a_lack_of_memory(runner, monkeypatch):
    needs = {}
    benchmark = Benchmark(FAULTY.target, estimate=lambda point, side: MemoryEstimate({}, needs.get(side, 0), 0, 0))
    (first,) = runner(benchmark).run([point("good", "aborts")])
    with monkeypatch.context() as patched:
        patched.setattr("hilbert_lib.lab.guarded.runner.run_isolated", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner(benchmark).run([point("good", "aborts")], retry_failed=True)
    kept = read_records(runner().path)[-1]
    assert {side: outcome["status"] for side, outcome in kept["outcomes"].items()} == {
        "good": "ok",
        "aborts": "interrupted",
    }
    assert kept["records"] == json.loads(json.dumps(first["records"]))
    needs["large"] = 2**60
    runner(benchmark).run([point("good", "large")])
    needs |= {"large": 0, "good": 2**60}
    (line,) = runner(benchmark).run([point("good", "large")])
    assert [outcome["status"] for outcome in line["outcomes"].values()] == ["ok", "ok"]
    assert len(line["records"]) == 2


def raise_interrupt(*_arguments, **_options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("changed", ["code_hash", "hardware", "kernel_mode", "packages"])
def test_other_code_hardware_or_packages_measure_again(runner, monkeypatch, changed):
    facts = {"code_hash": "0", "hardware": "0", "kernel_mode": "0", "packages": {"flash-attn-4": "0"}}
    monkeypatch.setattr("hilbert_lib.lab.guarded.runner.environment", lambda: facts)
    seen = []
    for _ in range(2):
        runner().run([point("good")], on_point=lambda line, reused: seen.append(reused))
    facts[changed] = {"flash-attn-4": "1"} if changed == "packages" else "1"
    runner().run([point("good")], on_point=lambda line, reused: seen.append(reused))
    assert seen == [False, True, False]


def test_a_full_disk_under_the_file_loses_nothing_that_was_measured(runner):
    runner().run([point("good")])
    path = runner().path
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limit[1]))
    seen = []
    try:
        with pytest.raises(OSError, match="No space left"):
            runner().run([point("good", length=9)], on_point=lambda line, reused: seen.append(line))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [line["outcomes"]["good"]["status"] for line in seen] == ["ok"]
    seen = []
    with pytest.warns(UserWarning, match="unfinished or no record"):
        runner().run([point("good"), point("good", length=9)], on_point=lambda line, reused: seen.append(reused))
    assert seen == [True, False]
    with pytest.warns(UserWarning, match="unfinished or no record"):
        assert [line["point"]["length"] for line in read_records(path)] == [8, 9]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_is_stopped_leaves_its_records_and_no_process(tmp_path, number):
    program = """
        from hilbert_lib.lab.guarded.cases import Benchmark
        from hilbert_lib.limits.config import SafetyConfig
        from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner

        points = [{"length": 8, "sides": ["good"]}, {"length": 8, "sides": ["good", "early", "hangs and says so"]}]
        config = SafetyConfig(max_seconds=60)
        benchmark = Benchmark("faulty_sides:measure")
        SafeBenchmarkRunner("points.jsonl", benchmark=benchmark, config=config, device="cpu").run(points)
    """
    process = start_python(program, tmp_path)
    path = tmp_path / "points.jsonl"
    wait_for((tmp_path / "hangs").is_symlink, 180)  # in the second point, when its first pair is measured
    stranger = int((tmp_path / "hangs").readlink().name)
    assert psutil.pid_exists(stranger)
    start = time.monotonic()
    process.send_signal(number)
    process.wait(10)
    wait_for(lambda: not (marked_processes(having=MARK) or psutil.pid_exists(stranger)), 5)
    assert time.monotonic() - start < 5
    lines = read_records(path)
    assert lines[0]["outcomes"]["good"]["status"] == "ok"
    if number == signal.SIGINT:
        statuses = {side: outcome["status"] for side, outcome in lines[1]["outcomes"].items()}
        assert statuses == {"good": "ok", "early": "ok", "hangs and says so": "interrupted"}
        assert len(lines[1]["records"]) == 1


def test_every_side_that_can_serve_stands_beside_its_prediction_with_what_became_of_it():
    statuses = {"sdpa": "ok", "eager": "out of memory", "reference": "not tried", "flash": "cannot serve"}
    sizes = {"lengths": [64, 128], "backends": list(statuses), "heads": 2, "head_dim": 8}
    points = benchmarks.attention_points(DilatedPattern((16,), (1,)), **sizes)
    outcomes = {side: {"status": status, "cause": "", "paired": False} for side, status in statuses.items()}
    lines = [
        {"key": str(point["length"]), "point": point, "outcomes": outcomes}
        | {"records": list(benchmarks.measure_attention({**point, "sides": ["sdpa"]}))}
        for point in points
    ]
    table = benchmarks.predicted_memory(lines)
    assert table.backend.tolist() == ["sdpa", "eager", "reference"] * 2
    assert table.status.tolist() == ["ok", "out of memory", "not tried"] * 2
    assert table.peak_bytes.notna().tolist() == [True, False, False] * 2
    for point, (_, rows) in zip(points, table.groupby("length"), strict=True):
        expected = [benchmarks.attention_estimate(point, side).peak for side in rows.backend]
        assert rows.predicted_bytes.tolist() == expected
    (axes,) = draw_memory(table, source="here").axes
    told = {text.get_text(): text.xy[1] * 2**20 for text in axes.texts}
    last = table[table.length == 128].set_index("status").predicted_bytes
    assert told == pytest.approx(last.drop("ok").to_dict())
    draw_memory(table[table.status == "ok"].drop(columns="status"), source="an earlier record")


def test_the_committed_points_are_those_of_the_newest_run(monkeypatch, tmp_path):
    monkeypatch.setattr(committed, "REPORTS", tmp_path)
    assert benchmarks.committed_lines() == []
    outcome = {"status": "timed out", "cause": "longer than 1 s", "paired": False}
    for run, dates in {"early": ["2026-01-01"], "late": ["2026-01-02", "2026-01-03"]}.items():
        folder = tmp_path / "h200" / run / "04_safe_benchmarking-0"
        folder.mkdir(parents=True)
        (folder / RESULTS).write_text(json.dumps({"environment": {"utc": dates[-1], "gpus": [{}]}}))
        own = {"point": {"length": 8, "direction": "forward"}, "records": []}
        lines = [{**own, "key": date, "utc": date} for date in dates]
        path = folder / benchmarks.POINTS
        path.write_text("".join(json.dumps({**line, "outcomes": {"eager": outcome}}) + "\n" for line in lines))
    lines = benchmarks.committed_lines()
    assert [line["utc"] for line in lines] == ["2026-01-02", "2026-01-03"]
    assert benchmarks.outcome_table(lines).status.tolist() == ["timed out"] * 2
    later = {**lines[0], "outcomes": {"eager": {**outcome, "status": "interrupted"}}}
    assert benchmarks.outcome_table([*lines, later]).status.tolist() == ["interrupted", "timed out"]
