"""Whatever a measured side does, it ends its own process alone, is recorded with its cause, and leaves nothing."""

import json
import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from full_disk import room_for
from own_processes import PATIENCE, child_with, let_time_pass_when, marked_processes, start_python, wait_for

from hilbert_lib import DilatedPattern
from hilbert_lib.lab.guarded import cases as benchmarks
from hilbert_lib.lab.guarded.cases import Benchmark
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner, _conclude
from hilbert_lib.lab.records import append_lines, read_records
from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import MARK, run_isolated
from hilbert_lib.limits import watch
from hilbert_lib.limits.config import LONGEST_SECONDS, SafetyConfig
from hilbert_lib.limits.estimate import MemoryEstimate
from hilbert_lib.limits.memory import GB, Memory

pytestmark = pytest.mark.usefixtures("nothing_is_left")

FAULTY = Benchmark("faulty_sides:measure")
RUN = "hilbert_lib.lab.guarded.runner.run_isolated"


@pytest.fixture
def runner(tmp_path):
    """A runner of faulty sides on all of the host's memory, with one file a test."""

    def make(benchmark=FAULTY, **limits):
        config = SafetyConfig(**{"min_free_host_gb": 0, "max_memory_share": 1} | limits)
        return SafeBenchmarkRunner(tmp_path / "points.jsonl", benchmark=benchmark, config=config, device="cpu")

    return make


def point(*sides, length=8):
    return {"length": length, "sides": list(sides)}


def statuses(line):
    return {side: outcome["status"] for side, outcome in line["outcomes"].items()}


def needing(needs):
    return Benchmark(FAULTY.target, estimate=lambda point, side: MemoryEstimate({}, needs.get(side, 0), 0, 0))


# The child's limit of time begins where it hangs, not where its start begins, which on a busy machine takes long.
LIMIT_FROM_HERE = """
    set_limit, sleep, limits, supervisor = child.faulthandler.dump_traceback_later, child.time.sleep, [], os.getpid()
    child.faulthandler.dump_traceback_later = limits.append

    def sleep_within_the_limit(seconds):
        if os.getpid() != supervisor:
            set_limit(limits.pop())
        sleep(seconds)

    child.time.sleep = sleep_within_the_limit
"""


@pytest.fixture
def time_passes_once_it_prints(monkeypatch, tmp_path):
    """The limit of time is passed as soon as a process has printed a line like this, and not before."""

    def install(expression):
        read, printed = isolated._read, []

        def noting(stream, take, *more):
            read(stream, lambda line: (take(line), printed.append(re.search(expression, line))), *more)

        monkeypatch.setattr(isolated, "_read", noting)
        let_time_pass_when(lambda: any(printed), monkeypatch)
        monkeypatch.setattr(isolated, "CHILD", child_with(LIMIT_FROM_HERE, tmp_path))

    return install


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
def test_a_fault_is_recorded_with_its_cause(runner, time_passes_once_it_prints, fault, status, cause):
    if fault == "hangs":
        time_passes_once_it_prints(r"line \d+ in hang$")  # as faulthandler says where
    (line,) = runner(max_seconds=1 if fault == "hangs" else PATIENCE).run([point(fault)])
    assert line["outcomes"][fault] == {"status": status, "cause": cause, "paired": False}
    (attempt,) = line["attempts"]
    assert f"running {fault}" in attempt["output"]
    assert attempt["left"] == ()
    if fault in ("hangs", "is wrong"):  # where, without a path of this machine
        assert any("faulty_sides.py" in text and os.sep + "faulty" not in text for text in attempt["output"])


def test_a_fault_costs_its_neighbours_the_comparison_and_the_next_point_nothing(runner):
    first, second = runner().run([point("good", "early", "aborts", "late"), point("good", "fine", length=9)])
    outcomes = first["outcomes"]
    assert list(outcomes) == ["good", "early", "aborts", "late"]
    assert [outcome["status"] for outcome in outcomes.values()] == ["ok", "ok", "crashed", "ok"]
    assert [outcome["paired"] for outcome in outcomes.values()] == [True, True, False, False]
    assert outcomes["late"]["cause"] == "timed alone, since all together: crashed, by SIGABRT"
    pids = [(record.get("b") or record)["pid"] for record in first["records"]]
    assert [record["kind"] for record in first["records"]] == ["comparison", "measurement"]
    assert len({*pids, os.getpid()}) == 3, "each attempt must have a process of its own"
    assert statuses(second) == {"good": "ok", "fine": "ok"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent for the processes that lost theirs")
@pytest.mark.parametrize(("then", "status"), [("", "ok"), (" and hangs", "timed out"), (" and aborts", "crashed")])
def test_processes_that_a_side_started_end_with_it(runner, time_passes_once_it_prints, then, status):
    if "hangs" in then:
        time_passes_once_it_prints("started")
    side = "starts others" + then
    (line,) = runner(max_seconds=PATIENCE).run([point(side)])
    assert line["outcomes"][side]["status"] == status
    told = next(text for text in line["attempts"][0]["output"] if text.startswith("started"))
    pids = [int(word) for word in told.split()[1:]]
    assert len(pids) == 5
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not marked_processes(having=MARK)


def test_host_memory_is_capped_at_what_the_limits_leave(runner, monkeypatch):
    for room, status in ((GB // 2, "out of memory"), (2 * GB, "ok")):
        monkeypatch.setattr("hilbert_lib.lab.guarded.runner.host_memory", lambda room=room: Memory("host", 2**40, room))
        (line,) = runner(max_seconds=LONGEST_SECONDS).run([point("takes a GB")], retry_failed=True)
        assert line["outcomes"]["takes a GB"]["status"] == status


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that the watch finds cool at its first look and hot from then on, until the test cools it. The side that
    waits does so until then."""

    class Gpu:
        degrees = 95

        def __init__(self, device):
            self.looks = 0

        def look(self):
            self.looks += 1
            return Memory("cuda:0", 80 * GB, 80 * GB), Gpu.degrees if self.looks > 1 else 60

        @classmethod
        def cool_down(cls):
            cls.degrees = 60
            (tmp_path / "cool").touch()

    monkeypatch.setenv("WAITS_FOR", str(tmp_path / "cool"))
    monkeypatch.setattr(watch, "present_device", lambda device: torch.device("cuda:0"))
    monkeypatch.setattr(watch, "_Gpu", Gpu)
    return Gpu


def test_a_side_that_met_a_limit_of_the_machine_is_measured_again(runner, gpu):
    (line,) = runner().run([point("waits")])
    cause = "the GPU has 95 C, allowed are 90"
    assert line["outcomes"]["waits"] == {"status": "over a limit", "cause": cause, "paired": False}
    assert runner().would_try(point("waits")) == ["waits"]
    gpu.cool_down()
    assert statuses(*runner().run([point("waits")])) == {"waits": "ok"}
    assert runner().would_try(point("waits")) == []


def test_a_comparison_that_a_limit_of_the_machine_cost_is_measured_again(runner, gpu, monkeypatch):
    def cool_down(*arguments, **options):
        ending = run_isolated(*arguments, **options)
        gpu.cool_down()
        return ending

    monkeypatch.setattr(RUN, cool_down)
    (line,) = runner().run([point("good", "waits")])
    assert [attempt["status"] for attempt in line["attempts"]] == ["over a limit", "ok", "ok"]
    assert statuses(line) == {"good": "ok", "waits": "ok"}
    (line,) = runner().run([point("good", "waits")])
    assert all(outcome["paired"] for outcome in line["outcomes"].values())


REFUSAL = """
    import time

    def refuse(*_, **__):
        time.sleep(1)  # in which a worker that was started already would have measured
        raise {error!r}

    {call} = refuse
"""
BUSY = BlockingIOError(11, "Resource temporarily unavailable")
REFUSALS = [("subprocess.Popen", BUSY), ("os.fork", BUSY), ("threading.Thread.start", RuntimeError("no new thread"))]


@pytest.mark.parametrize(("call", "error"), REFUSALS)
def test_a_process_that_cannot_be_started_is_asked_for_again(runner, monkeypatch, tmp_path, call, error):
    with monkeypatch.context() as patched:
        if call == "subprocess.Popen":
            patched.setattr(isolated, "subprocess", SimpleNamespace(Popen=Mock(side_effect=error), PIPE=-1))
        else:
            patched.setattr(isolated, "CHILD", child_with(REFUSAL.format(call=call, error=error), tmp_path))
        (line,) = runner().run([point("good")])
    outcome = line["outcomes"]["good"]
    assert (outcome["status"], outcome["cause"]) == ("over a limit", f"no process could be started: {error}")
    assert statuses(*runner().run([point("good")])) == {"good": "ok"}


def test_what_would_not_fit_is_not_tried_and_what_cannot_serve_is_told(runner):
    benchmark = Benchmark(
        FAULTY.target,
        refusal=lambda point, side: "it is odd" if side == "odd" else "",
        inputs=lambda point: 2**60 if point["length"] == 9 else 0,
        estimate=lambda point, side: MemoryEstimate({}, 2**60 if side == "large" else 0, 0, 0),
    )
    (line,) = runner(benchmark).run([point("odd", "large", "good")])
    assert statuses(line) == {"odd": "cannot serve", "large": "not tried", "good": "ok"}
    assert line["outcomes"]["odd"]["cause"] == "it is odd"
    assert "1073741824.000 GB required" in line["outcomes"]["large"]["cause"]
    (line,) = runner(benchmark).run([point("good", length=9)])
    assert "its inputs alone" in line["outcomes"]["good"]["cause"]


def test_a_rerun_measures_only_what_is_missing(runner):
    points = [point("good"), point("aborts"), point("good", length=9)]
    first = runner().run(points[:2])
    assert first[0]["environment"]["code_hash"]
    seen = []
    again = runner().run([*points, points[2]], on_point=lambda line, reused: seen.append(reused))
    assert seen == [True, True, False, True]
    assert again[:2] == json.loads(json.dumps(first))
    retried = []
    runner().run(points, retry_failed=True, on_point=lambda line, reused: retried.append(reused))
    assert retried == [True, False, True]
    append_lines([{**first[0], "environment": {"hardware": "other"}}, {"kind": "other"}], runner().path)
    assert runner().would_try(points[0]) == []
    runner().path.unlink()
    append_lines([{**first[0], "environment": {"hardware": "other"}}], runner().path)
    assert runner().would_try(points[0]) == ["good"]


def test_a_side_that_could_not_serve_is_measured_once_it_can(runner):
    refused = {"late"}
    benchmark = Benchmark(FAULTY.target, refusal=lambda point, side: "it is refused" if side in refused else "")
    asked = point("good", "late")
    assert statuses(*runner(benchmark).run([asked])) == {"good": "ok", "late": "cannot serve"}
    assert runner(benchmark).would_try(asked) == []
    refused.clear()
    assert runner(benchmark).would_try(asked) == ["good", "late"]


@pytest.mark.parametrize("other", [{"target": "elsewhere:measure"}, {"length": 9}, {"sides": ["late", "good"]}])
def test_a_point_is_another_one_where_any_of_what_names_it_differs(runner, other):
    asked, target = point("good", "late"), other.get("target", FAULTY.target)
    asked_now = {**asked, **{name: value for name, value in other.items() if name != "target"}}
    keys = runner()._asked(asked)[0], runner(Benchmark(target))._asked(asked_now)[0]
    assert keys[0] != keys[1]
    assert keys[0] == runner()._asked(dict(reversed(asked.items())))[0]


def test_a_lost_comparison_is_told_and_measured_again_if_asked(runner, monkeypatch, tmp_path):
    monkeypatch.setenv("ABORTS_ONCE", str(tmp_path / "aborted"))
    asked = point("good", "aborts once")
    (first,) = runner().run([asked])
    assert statuses(first) == {"good": "ok", "aborts once": "ok"}
    assert all("all together: crashed, by SIGABRT" in outcome["cause"] for outcome in first["outcomes"].values())
    assert runner().would_try(asked) == []
    assert runner().would_try(asked, retry_failed=True) == ["good", "aborts once"]
    (again,) = runner().run([asked], retry_failed=True)
    assert all(outcome == {"status": "ok", "cause": "", "paired": True} for outcome in again["outcomes"].values())
    assert runner().would_try(asked, retry_failed=True) == []


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(RUN, lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "points.jsonl", tmp_path):
        with pytest.raises(OSError, match=str(path.parent)):
            SafeBenchmarkRunner(path, benchmark=FAULTY, device="cpu").run([point("good")])


def test_a_full_disk_under_the_file_loses_nothing_that_was_measured(runner):
    runner().run([point("good")])
    path, seen = runner().path, []
    with room_for(path.stat().st_size + 50), pytest.raises(OSError, match="No space left"):
        runner().run([point("good", length=9)], on_point=lambda line, reused: seen.append(line))
    assert list(map(statuses, seen)) == [{"good": "ok"}]
    with pytest.warns(UserWarning, match="unfinished or no record"):
        runner().run([point("good"), point("good", length=9)], on_point=lambda line, reused: seen.append(reused))
    assert seen[1:] == [True, False]
    with pytest.warns(UserWarning, match="unfinished or no record"):
        assert [line["point"]["length"] for line in read_records(path)] == [8, 9]


def test_a_measurement_outlives_a_lack_of_memory(runner):
    needs, seen = {}, []
    for need in ({"large": 2**60}, {"good": 2**60}, {"large": 2**60}):
        needs.clear()
        needs.update(need)
        (line,) = runner(needing(needs)).run([point("large", "good")])
        seen.append(statuses(line))
    assert seen == [{"large": "not tried", "good": "ok"}] + [{"large": "ok", "good": "ok"}] * 2
    assert len(line["records"]) == len(read_records(runner().path)) == 2


def test_a_side_that_is_measured_again_has_one_record():
    def pair(name, number):
        return {"a": {"name": "good"}, "b": {"name": name}, "number": number}

    before = [pair("late", 1), pair("large", 2)]
    line = {"records": [pair("late", 3)], "outcomes": {}, "attempts": [{"status": "ok", "sides": ["good", "late"]}]}
    _conclude(line, ["good", "late"], before)
    assert [record["number"] for record in line["records"]] == [2, 3]
    assert statuses(line) == dict.fromkeys(("good", "late", "large"), "ok")


def test_a_measurement_outlives_an_interrupted_retry(runner, monkeypatch):
    (first,) = runner().run([point("good", "aborts")])
    with monkeypatch.context() as patched:
        patched.setattr(RUN, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runner().run([point("good", "aborts")], retry_failed=True)
    kept = read_records(runner().path)[-1]
    assert statuses(kept) == {"good": "ok", "aborts": "interrupted"}
    assert kept["records"] == json.loads(json.dumps(first["records"]))
    assert statuses(*runner().run([point("good", "aborts")])) == {"good": "ok", "aborts": "crashed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_is_stopped_leaves_its_records_and_no_process(tmp_path, number):
    program = """
        from pathlib import Path
        from hilbert_lib.lab.guarded import runner
        from hilbert_lib.lab.guarded.cases import Benchmark

        def telling(*arguments, on_record, **options):
            def tell(record):
                on_record(record)
                if record["kind"] == "comparison":
                    Path("read").touch()

            return run_isolated(*arguments, on_record=tell, **options)

        run_isolated, runner.run_isolated = runner.run_isolated, telling
        points = [{"length": 8, "sides": ["good"]}, {"length": 8, "sides": ["good", "early", "hangs and says so"]}]
        faulty = Benchmark("faulty_sides:measure")
        runner.SafeBenchmarkRunner("points.jsonl", benchmark=faulty, device="cpu").run(points)
    """
    process = start_python(program, tmp_path)
    wait_for((tmp_path / "hangs").is_symlink)  # in the second point, when its first pair is measured
    stranger = int((tmp_path / "hangs").readlink().name)
    assert psutil.pid_exists(stranger)
    process.send_signal(number)
    process.wait(PATIENCE)
    wait_for(lambda: not (marked_processes(having=MARK) or psutil.pid_exists(stranger)))
    lines = read_records(tmp_path / "points.jsonl")
    assert statuses(lines[0]) == {"good": "ok"}
    if number == signal.SIGINT:
        assert statuses(lines[1]) == {"good": "ok", "early": "ok", "hangs and says so": "interrupted"}
        assert len(lines[1]["records"]) == 1


SIZES = {"lengths": [64], "backends": ["sdpa", "eager", "reference", "flash"], "heads": 2, "head_dim": 8}


def test_the_tables_show_the_last_line_of_every_point():
    points = benchmarks.attention_points(DilatedPattern((16,), (1,)), **{**SIZES, "lengths": [64, 128]})
    found = dict(zip(SIZES["backends"], ("ok", "out of memory", "not tried", "cannot serve"), strict=True))
    outcomes = {side: {"status": status, "cause": "", "paired": False} for side, status in found.items()}
    records = list(benchmarks.measure_attention({**points[0], "sides": ["sdpa"]}))
    lines = [{"key": str(n), "point": each, "outcomes": outcomes, "records": records} for n, each in enumerate(points)]
    early = {**lines[0], "records": [], "outcomes": {"sdpa": {**outcomes["sdpa"], "status": "failed"}}}
    table = benchmarks.outcome_table([{"kind": "comparison"}, early, *lines])
    assert table.status.tolist() == list(found.values()) * 2
    assert table.median_ms.notna().tolist() == [True, False, False, False] * 2
    table = benchmarks.predicted_memory(lines)
    assert table.status.tolist() == ["ok", "out of memory", "not tried"] * 2
    assert table.peak_bytes.notna().tolist() == [True, False, False] * 2
    predicted = [benchmarks.attention_estimate(each, side).peak for each in points for side in list(found)[:3]]
    assert table.predicted_bytes.tolist() == predicted


def test_memory_of_a_side_holds_everything_that_lies_beside_it_in_its_process():
    """Of 64 tokens in two heads of 8 numbers in float32, and one of lse for each head."""
    how = {**SIZES, "backends": ["sdpa", "eager"], "directions": ("forward", "backward")}
    forward, backward = benchmarks.attention_points(DilatedPattern((16,), (1,)), **how)
    out, lse = 64 * 2 * 8 * 4, 64 * 2 * 4
    for asked, side, beside in ((forward, "sdpa", out), (forward, "eager", out), (backward, "sdpa", 0),
                                (backward, "eager", out + lse)):  # fmt: skip
        alone = benchmarks._work(asked).estimate(side, asked["direction"])
        found = benchmarks.attention_estimate(asked, side)
        assert found.inputs - alone.inputs == beside
        assert sum(found.items.values()) - sum(alone.items.values()) == beside
        assert found.peak == alone.peak


def test_a_pair_is_timed_for_as_long_as_both_take_and_holds_the_peak_of_each(monkeypatch):
    taken, timed = {"sdpa": (10, 0.25), "eager": (20, 0.5), "reference": (30, 1.0)}, []

    def time_cases(*names, device, took):
        timed.append((names, took))
        return SimpleNamespace(record=dict)

    monkeypatch.setattr(benchmarks, "attention_cases", lambda point: ((name, *taken[name]) for name in point["sides"]))
    monkeypatch.setattr(benchmarks, "time_cases", time_cases)
    found = list(benchmarks.measure_attention({"device": "cpu", "sides": list(taken)}))
    assert timed == [(("sdpa", "eager"), 0.75), (("sdpa", "reference"), 1.25)]
    assert [each["peak_bytes"] for each in found] == [(10, 20), (10, 30)]
    (alone,) = benchmarks.measure_attention({"device": "cpu", "sides": ["eager"]})
    assert (timed[-1], alone["peak_bytes"]) == ((("eager",), 0.5), (20,))
