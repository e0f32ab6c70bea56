"""Runs: what a death of a notebook, of its kernel or of the whole process leaves behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from full_disk import room_for
from own_processes import PATIENCE
from tiny_notebooks import write_notebook

from hilbert_lib.cli.stop import Interrupted, interruptible
from hilbert_lib.lab.environment import MACHINE, environment
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.suite import execute, folders
from hilbert_lib.lab.suite import manifest as manifests
from hilbert_lib.lab.suite import run as runs
from hilbert_lib.lab.suite.manifest import MANIFEST, error_line, read_manifest
from hilbert_lib.lab.suite.points import Point, read_notebook

WRITE = "import pathlib\npathlib.Path(output_dir, 'results.jsonl').write_text('{\"n\": 1}\\n')"
DIE = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
FILL = "with open('/dev/full', 'w') as file:\n    file.write('x')"


@pytest.fixture(scope="module")
def facts():
    return environment()


@pytest.fixture(scope="module")
def batch(tmp_path_factory, facts):
    """One run of notebooks that end in every way."""
    folder = tmp_path_factory.mktemp("batch")
    codes = {
        "00_fails": ["print(1)", "raise ValueError('too short')"],
        "01_killed": [DIE],
        "02_full_disk": [FILL],
        "03_ok": [WRITE],
    }
    points = [point_of(folder, *code, name=name) for name, code in codes.items()]
    outcomes = runs.run_points(points, folder / "run", facts)
    return folder / "run", points, outcomes


def point_of(folder, *code, name="00_a"):
    return Point(read_notebook(write_notebook(folder, name, *code)), {})


def stop_by(signal_name, folder):
    """Code of a cell whose kernel signals the process that runs it, and then keeps on working."""
    return (
        "import os, pathlib, signal, time\n"
        f"pathlib.Path({str(folder)!r}, 'pid').write_text(str(os.getpid()))\n"
        f"os.kill(os.getppid(), signal.{signal_name})\n"
        "time.sleep(600)"
    )


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ENDS = [("00_fails", "ValueError", "too short", 4), ("01_killed", "DeadKernelError", "the kernel process died", 3)]
ENDS += [("02_full_disk", "OSError", "No space left", 3)] * (sys.platform == "linux")  # which alone has /dev/full


@pytest.mark.parametrize(("name", "kind", "message", "cell"), ENDS)
def test_the_manifest_says_what_ended_a_notebook_and_where(batch, name, kind, message, cell):
    run_folder, _, _ = batch
    manifest = read_manifest(run_folder / f"{name}.failed")
    error = manifest["error"]
    assert (manifest["status"], error["type"], error["cell"]) == ("failed", kind, cell)
    assert message in error["message"]
    assert not (run_folder / name).exists()


def test_a_runs_folder_is_of_this_code_on_this_hardware_with_these_versions(facts):
    named = folders.run_id(facts)
    for name in (*MACHINE, "python", "numpy"):
        assert folders.run_id(facts | {name: "another"}) != named, name
    for name in {*facts} - {*MACHINE, "python", "numpy", "gpus"}:  # a commit, a moment
        assert folders.run_id(facts | {name: "another"}) == named, name


FOUND = {  # what lies in a point's folder, and whether the point is run all the same
    "nothing": (None, True),
    "its result": ({}, False),
    "another code's or other values'": ({"key": "0123abcd"}, True),
    "a result that is none": ({"status": "interrupted"}, True),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("what", FOUND)
def test_only_a_finished_result_of_the_same_key_is_reused(tmp_path, monkeypatch, what, force):
    (changed, runs_again), point, ran = FOUND[what], point_of(tmp_path), []
    found = {"key": point.key, "status": "ok", "notebook": "00_a"}

    def run_point(point, run_folder, facts, *, timeout, resume, compilers):
        ran.append(resume)
        return {"status": "ok"}

    monkeypatch.setattr(runs, "run_point", run_point)
    monkeypatch.setattr(runs, "read_manifest", lambda folder: None if changed is None else found | changed)
    outcome = "ok" if runs_again or force else "reused"
    assert runs.run_points([point], tmp_path / "run", {}, force=force) == {"00_a": outcome}
    assert ran == [not force] * (outcome == "ok")


@pytest.mark.usefixtures("kernels_are_copied")
def test_the_time_of_a_notebook_is_limited_as_a_whole(tmp_path, facts, monkeypatch):
    # Time stands still until the parameters are set; the next cell has one second left, and it is up when that is over.
    looks = chain([0] * 5, [2999] * 2, repeat(3000))
    monkeypatch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    sleeping = point_of(tmp_path, "import time\ntime.sleep(600)")
    one_cell = runs.run_point(sleeping, tmp_path / "run", facts, timeout=3000)
    # Each of these cells alone would be in time: between two looks at the clock 500 s pass.
    cells, looks = point_of(tmp_path, *["pass"] * 20), count(0, 500)
    monkeypatch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    many_cells = runs.run_point(cells, tmp_path / "run", facts, timeout=3000)
    for manifest in (one_cell, many_cells):
        assert manifest["error"]["type"] == "TimeoutError"
        assert manifest["error"]["message"] == "the notebook took longer than 3000 s"
    assert one_cell["error"]["cell"] == 3
    assert 1 <= many_cells["error"]["cell"] <= 6


def test_a_finished_run_after_failed_ones_holds_notebook_records_and_manifest(batch):
    run_folder, points, outcomes = batch
    assert [*outcomes.values()] == ["failed"] * 3 + ["ok"]
    files = {path.name for path in (run_folder / "03_ok").iterdir()}
    assert files == {"03_ok.ipynb", "manifest.json", "results.jsonl.gz"}
    assert not list(run_folder.glob(".*"))
    assert not [child for child in psutil.Process().children() if "ipykernel_launcher" in " ".join(child.cmdline())]
    assert read_records(run_folder / "03_ok" / RESULTS) == [{"n": 1}]
    manifest = read_manifest(run_folder / "03_ok")
    assert (manifest["status"], manifest["error"]) == ("ok", None)
    assert manifest["parameters"] == points[-1].parameters
    assert manifest["seeds"] == {"seed": 0}
    assert {"commit", "dirty", "torch", "triton", "cuda", "driver", "python", "gpus", "kernel_mode"} <= set(
        manifest["environment"]
    )
    assert len(manifest["notebook_hash"]) == 8
    assert manifest["library_hash"] == manifest["environment"]["code_hash"]
    assert set(manifest["sm_clocks_mhz"]) == {"before", "after"}
    assert manifest["start"] < manifest["end"]


@pytest.mark.usefixtures("kernels_are_copied")
def test_the_time_that_a_run_took_is_right_whatever_happens_to_the_clock(tmp_path, facts, monkeypatch):
    class SetBack(datetime):
        hours = count()

        @classmethod
        def now(cls, zone=None):
            return datetime(2026, 1, 1, tzinfo=zone) - timedelta(hours=next(cls.hours))

    monkeypatch.setattr(manifests, "datetime", SetBack)
    point = point_of(tmp_path, "import time\ntime.sleep(0.5)")
    manifest = runs.run_point(point, tmp_path / "run", facts, timeout=math.inf)
    start, end = (datetime.fromisoformat(manifest[name]) for name in ("start", "end"))
    assert 0.5 < (end - start).total_seconds() < 3000
    assert manifest["status"] == "ok"


@pytest.mark.usefixtures("kernels_are_copied")
def test_a_failure_keeps_the_earlier_result_and_a_result_replaces_both(tmp_path, facts):
    run_folder = tmp_path / "run"
    assert runs.run_point(point_of(tmp_path, WRITE), run_folder, facts)["status"] == "ok"
    earlier = snapshot(run_folder / "00_a")
    assert runs.run_point(point_of(tmp_path, "1 / 0"), run_folder, facts)["status"] == "failed"
    assert snapshot(run_folder / "00_a") == earlier
    assert read_manifest(run_folder / "00_a.failed")["error"]["type"] == "ZeroDivisionError"
    assert runs.run_point(point_of(tmp_path, WRITE, "print('new')"), run_folder, facts)["status"] == "ok"
    assert snapshot(run_folder / "00_a") != earlier
    assert {path.name for path in run_folder.iterdir()} == {"00_a"}


@pytest.mark.usefixtures("kernels_are_copied")
def test_an_attempt_begins_with_the_records_of_the_failed_one(tmp_path, facts):
    measure = "from pathlib import Path\npath = Path(output_dir, 'results.jsonl')\n"
    measure += "before = path.read_text() if path.exists() else ''\npath.write_text(before + '{}\\n')\n"
    point = point_of(tmp_path, measure, "assert before, 'measured, and then it failed'")
    for how, outcome in (({}, "failed"), ({"force": True}, "failed"), ({}, "ok")):
        assert runs.run_points([point], tmp_path / "run", facts, **how) == {"00_a": outcome}
    assert read_records(tmp_path / "run/00_a" / RESULTS) == [{}, {}]
    assert not (tmp_path / "run/00_a.failed").exists()


def test_a_disk_without_room_fails_a_notebook_before_it_starts(tmp_path, facts):
    point, run_folder = point_of(tmp_path, WRITE), tmp_path / "run"
    with room_for(64 * 1024):  # the manifest fits, the reserve does not
        manifest = runs.run_point(point, run_folder, facts)
    assert manifest == read_manifest(run_folder / "00_a.failed")
    assert (manifest["status"], manifest["error"]["type"]) == ("failed", "OSError")
    assert "no room for the notebook to start" in manifest["error"]["message"]
    assert {path.name for path in run_folder.rglob("*")} == {"00_a.failed", "00_a.ipynb", "manifest.json"}
    assert folders.close_abandoned(run_folder) == []


@pytest.mark.usefixtures("kernels_are_copied")
def test_room_for_the_manifest_is_held_while_a_notebook_runs_and_free_when_it_ends(tmp_path, facts, monkeypatch):
    end_manifest, sizes = folders.end_manifest, []

    def ended(manifest, folder, error, **how):
        sizes.append((folder / folders.LIVING).stat().st_size)
        end_manifest(manifest, folder, error, **how)

    monkeypatch.setattr(folders, "end_manifest", ended)
    look = f"import os\nassert os.stat({folders.LIVING!r}).st_size == {folders.RESERVE_BYTES}"
    assert runs.run_point(point_of(tmp_path, look), tmp_path / "run", facts)["status"] == "ok"
    assert sizes == [0]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_sigterm_ends_the_command_and_keeps_what_is_finished(tmp_path):
    show = "import os, pathlib\npathlib.Path(output_dir, 'set').write_text(os.environ.get('TRITON_INTERPRET', ''))"
    write_notebook(tmp_path, "00_ok", show)
    write_notebook(tmp_path, "01_slow", stop_by("SIGTERM", tmp_path))
    write_notebook(tmp_path, "02_never")
    hilbert = [sys.executable, "-c", "from hilbert_lib.cli.main import main; main()"]
    command = [*hilbert, "run", "--notebooks", tmp_path, "--out", tmp_path / "out"]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE)
    assert process.returncode == 143
    assert "stopped by SIGTERM: what has ended is kept" in process.stderr
    (run_folder,) = (tmp_path / "out").iterdir()
    assert {path.name for path in run_folder.iterdir()} == {"00_ok", "01_slow.failed"}
    ok = read_manifest(run_folder / "00_ok")
    assert ok["status"] == "ok"
    # The notebooks' kernels are told to interpret Triton where there is no GPU, and only there.
    assert (run_folder / "00_ok" / "set").read_text() == ("" if ok["environment"]["gpus"] else "1")
    slow = read_manifest(run_folder / "01_slow.failed")
    assert (slow["status"], slow["error"]["message"]) == ("interrupted", "stopped by SIGTERM")
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(PATIENCE)  # busy cores take a while to let it go


HOLD = """
import sys, time
from pathlib import Path
from hilbert_lib.lab.suite.folders import work_folder
from hilbert_lib.lab.suite.manifest import start_manifest
from hilbert_lib.lab.suite.points import Point, read_notebook
with work_folder(Path(sys.argv[2]), "00_a") as work:
    start_manifest(Point(read_notebook(Path(sys.argv[1])), {}), work, {})
    print("running", flush=True)
    time.sleep(600)
"""


def test_a_run_is_taken_from_a_process_that_was_killed_and_never_from_a_living_one(tmp_path, monkeypatch):
    run_folder, notebook = tmp_path / "run", write_notebook(tmp_path, "00_a")
    (run_folder / ".ipynb_checkpoints").mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", HOLD, notebook, run_folder], stdout=subprocess.PIPE)
    process.stdout.readline()
    for stepped in (-3600, 3600):  # the system's clock is set anew, and with it the starts that psutil reckons
        with monkeypatch.context() as clock:
            now = time.time()
            clock.setattr(time, "time", lambda now=now + stepped: now)
            clock.setattr(psutil.Process, "create_time", lambda _, start=now + stepped: start)
            assert folders.close_abandoned(run_folder) == []
    process.kill()
    process.wait()
    assert folders.close_abandoned(run_folder) == ["00_a"]
    manifest = read_manifest(run_folder / "00_a.failed")
    assert (manifest["status"], manifest["start"]) == ("interrupted", manifest["end"])
    assert [path.name for path in (run_folder / "00_a.failed").iterdir()] == ["manifest.json"]
    assert sorted(path.name for path in run_folder.iterdir()) == [".ipynb_checkpoints", "00_a.failed"]
    assert folders.close_abandoned(run_folder) == []


def test_a_run_that_starts_waits_for_one_that_looks_whether_it_is_abandoned(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    flock, looking = fcntl.flock, []

    def met(file, how):
        """Lock a file that another job has just locked; it lets go after a while."""
        other = os.open(file.name, os.O_RDWR)
        flock(other, fcntl.LOCK_EX)
        looking.append(threading.Timer(0.2, os.close, (other,)))
        looking[0].start()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", met)
    with folders.work_folder(tmp_path, "00_a") as work, (work / folders.LIVING).open("rb+") as file:
        looking[0].join()
        with pytest.raises(BlockingIOError):
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_jobs_that_finish_one_point_together_leave_one_result(tmp_path, monkeypatch):
    rename, others = Path.rename, iter(["first", "second"])

    def make(text):
        work = tmp_path / f".00_a.{text}"
        work.mkdir()
        (work / "data").write_text(text)
        return work

    def later(path, target):  # another job's result appears between the two names
        if path.name == ".00_a.mine" and (other := next(others, None)):
            rename(make(other), tmp_path / "00_a")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", later)
    folders.put_in_place(make("mine"), tmp_path, {"name": "00_a", "status": "ok"})
    assert (tmp_path / "00_a" / "data").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["00_a"]


def test_the_run_id_follows_from_code_versions_and_hardware_alone(facts):
    assert folders.run_id(facts) == folders.run_id({**facts, "utc": "later", "commit": "0" * 40, "dirty": True})
    for name in ("code_hash", "torch", "hardware", "driver", "cudnn", "torch_threads", "kernel_mode"):
        assert folders.run_id(facts) != folders.run_id({**facts, name: "9.9"})
    assert folders.run_id(facts) != folders.run_id({**facts, "packages": {**facts["packages"], "flash-attn-4": "9.9"}})
    gpu = {**facts, "hardware": "NVIDIA H200", "gpus": [{"name": "NVIDIA H200"}], "torch": "2.11.0+cu128"}
    assert folders.run_id(gpu).startswith("nvidia-h200-torch2.11.0-")


@pytest.mark.parametrize("seconds", [0, 0.05])  # how long a busy machine stays where what is raised is dropped
def test_an_interrupt_that_a_finalizer_swallows_comes_again(seconds, monkeypatch):
    class Slow(threading.Thread):
        def start(self):
            super().start()
            time.sleep(seconds)

    monkeypatch.setattr(threading, "Thread", Slow)

    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def work():
        with interruptible():
            Dying()
            time.sleep(PATIENCE)

    before = sys.unraisablehook, *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert (sys.unraisablehook, *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))) == before


def stream(name, *texts):
    return [{"output_type": "stream", "name": name, "text": text} for text in texts]


PICTURE = {"output_type": "display_data", "data": {"image/png": ""}}
STREAMS = {  # what a cell gave, what is kept
    "parts": (stream("stdout", "a", "b\n", "", "c"), stream("stdout", "ab\nc")),
    "a bar": (
        stream("stderr", "1 of 3", "\r2 of 3", "\r", "3 of 3", "\n\r\nend\r"),
        stream("stderr", "3 of 3\n\r\nend\r"),
    ),
    "both": (
        stream("stderr", "e") + stream("stdout", "o") + stream("stderr", "E"),
        stream("stdout", "o") + stream("stderr", "eE"),
    ),
    "between": (
        [*stream("stderr", "e"), PICTURE, *stream("stdout", "o")],
        [*stream("stderr", "e"), PICTURE, *stream("stdout", "o")],
    ),
    "nothing": ([], []),
}


@pytest.mark.parametrize("given", STREAMS)
def test_streams_of_a_cell_are_joined_and_of_a_rewritten_line_the_last_state_is_kept(given):
    outputs, expected = STREAMS[given]
    assert execute.coalesced([dict(each) for each in outputs]) == expected


def test_a_long_line_is_joined_in_time_that_grows_with_it():
    """Counted against the time of a line that is a sixteenth: a machine may be busy."""

    def seconds(length):
        outputs = stream("stdout", *["x" * 1000] * (length // 1000)) + stream("stderr", "y" * length)
        begin = time.process_time()
        execute.coalesced(outputs)
        return time.process_time() - begin

    assert seconds(2**22) < 100 * max(seconds(2**18), 1e-3)  # 16, where a square would be 256 and minutes


@pytest.mark.usefixtures("kernels_are_copied")
def test_a_notebook_that_prints_one_long_line_ends_well(tmp_path, facts):
    point = point_of(tmp_path, "import sys\nprint('x' * 1_000_000)\nsys.stderr.write('y' * 1_000_000)\nprint('end')")
    assert runs.run_points([point], tmp_path / "run", facts, timeout=300) == {"00_a": "ok"}
    printed = nbformat.read(tmp_path / "run" / "00_a" / "00_a.ipynb", 4).cells[3].outputs
    assert [(each.name, len(each.text)) for each in printed] == [("stdout", 1_000_005), ("stderr", 1_000_000)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ({"type": "ValueError", "message": "\n\x1b[31mtoo\r\nshort", "cell": 3}, "ValueError: too (cell In [3])"),
        ({"type": "Two\nlines", "message": "", "cell": None}, "Two: "),
        ({"type": "ValueError", "message": "x" * 10**6, "cell": None}, f"ValueError: {'x' * 499}\u2026"),
    ],
)
def test_what_ended_a_run_is_told_in_one_line_whatever_it_said(error, line):
    assert error_line({"error": error}) == line


GOING = {"its folder": "Path.cwd()", "the run's folder": "Path.cwd().parent"}


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("what", GOING)
@pytest.mark.usefixtures("kernels_are_copied")
def test_a_notebook_whose_folder_goes_away_fails_alone(tmp_path, facts, capsys, what, earlier):
    point, other = (
        point_of(tmp_path, f"import shutil\nfrom pathlib import Path\nshutil.rmtree({GOING[what]})"),
        point_of(tmp_path, "print(1)", name="01_b"),
    )
    if earlier:  # a result of other code, which stays where only the new one's folder goes
        (tmp_path / "run" / "00_a").mkdir(parents=True)
        (tmp_path / "run" / "00_a" / "kept").touch()
    assert runs.run_points([point, other], tmp_path / "run", facts) == {"00_a": "failed", "01_b": "ok"}
    assert "00_a    FileNotFoundError: its folder went away while it ran (cell In [3])\n" in capsys.readouterr().out
    assert (tmp_path / "run" / "01_b" / MANIFEST).exists()
    assert (tmp_path / "run" / "00_a" / "kept").exists() == (earlier and what == "its folder")
    assert not list((tmp_path / "run").glob(".*"))
