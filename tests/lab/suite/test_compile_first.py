"""A first pass computes each case once in several processes, and takes nothing from the run that follows."""

import ast
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import call
from own_processes import PATIENCE, mark, marked_processes, wait_for
from tiny_notebooks import write_notebook

from hilbert_lib import lab
from hilbert_lib.lab import first_pass as passes
from hilbert_lib.lab import sweeps
from hilbert_lib.lab.calls import Call
from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.first_pass import VARIABLE, FirstPass, LeftOut
from hilbert_lib.lab.pairs import Side, run_back_to_back, run_sides, sweep
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.suite import compiling, execute
from hilbert_lib.lab.suite import run as runs
from hilbert_lib.lab.suite.manifest import read_manifest
from hilbert_lib.lab.suite.points import Point, read_notebook
from hilbert_lib.lab.sweeps.options import run_options
from hilbert_lib.lab.timing import Case
from hilbert_lib.lab.training import fit, run_trainings
from hilbert_lib.launch.isolated import Ending
from hilbert_lib.patterns.neighbourhood import Neighbourhood

PROCESSES = 2
# Cases that note who computes them. In a first pass the first case of each process waits for that of every other one.
CASES = f"""
import os, time
from pathlib import Path
import torch
from hilbert_lib.lab import Side, run_back_to_back

notes, is_first_pass = Path(NOTES), {VARIABLE!r} in os.environ

display("what a notebook has without an import")

def note(what):
    with (notes / f"{{'first' if is_first_pass else 'real'}} {{os.getpid()}}").open("a") as file:
        file.write(what + "\\n")

def computed(case):
    note(case)
    while is_first_pass and len(list(notes.glob("first *"))) < {PROCESSES}:
        time.sleep(0.01)
    if is_first_pass and case == "1":
        raise ValueError("one is too short")
    return (torch.ones(1),)

def cases(*names):
    return [(Side("one", {{"sweep": "s", "case": n}}, lambda n=n: computed(n), lambda results: 0.0),) for n in names]

sweep = {{"device": "cpu", "output_dir": output_dir, "seconds": 1e-3}}
"""
CODE = ["records = run_back_to_back(cases(*'0123'), **sweep)", "found = records[3]['sides']"]
CODE += ["more = run_back_to_back(cases(*'4567'), **sweep)", "note('end')\nassert len(records + more) == 8"]


@pytest.fixture(scope="module")
def facts():
    return environment()


@pytest.fixture
def in_first_pass(tmp_path, monkeypatch):
    """This process belongs to a first pass; gives what it has told."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    passes.first_pass.cache_clear()
    yield lambda: (folder / passes.TOLD).read_text().splitlines()
    passes.first_pass.cache_clear()


def with_cases(folder, *code, name="00_a"):
    """A notebook whose cases note who computes them in the folder "notes"."""
    (folder / "notes").mkdir(exist_ok=True)
    begin = CASES.replace("NOTES", repr(str(folder / "notes")))
    return write_notebook(folder / "notebooks", name, begin, *code)


def noted(folder, which):
    """What each process of a pass has noted."""
    return [path.read_text().split() for path in (folder / "notes").glob(f"{which} *")]


def kept_alone(*_arguments, **_options):
    return Ending("ok", "", (), (), 0.0, {})


@pytest.mark.usefixtures("kernels_are_copied", "calls_are_copied")
def test_each_case_is_computed_once_before_the_run_that_computes_and_records_all(tmp_path):
    with_cases(tmp_path, *CODE)
    words = ["--notebooks", tmp_path / "notebooks", "--out", tmp_path / "out", "--compile-first", PROCESSES]
    lines = call("run", *words).splitlines()
    first, (real,) = noted(tmp_path, "first"), noted(tmp_path, "real")
    assert len(first) == PROCESSES
    # Also of the sweep after a cell that lacked records. What comes after the last sweep is no part of it.
    assert sorted(chain(*first)) == [*"01234567"]
    assert {*real} == {*"01234567", "end"}
    (point,) = (tmp_path / "out").glob("*/00_a")
    records = read_records(point / RESULTS)
    assert [record["sides"][0]["parameters"]["case"] for record in records] == [*"01234567"]
    assert {path.name for path in point.iterdir()} == {"00_a.ipynb", "00_a.html", "manifest.json", f"{RESULTS}.gz"}
    # A line for each case, the one that failed among them, and no more fuss.
    told = [line for line in lines if ", case " in line]
    assert len(told) == 8
    (failure,) = (line for line in told if "failed" in line)
    assert failure == "00_a: sweep s, back to back, case 1: one: failed: ValueError: one is too short"
    assert [line for line in lines if line.startswith("ok")] == ["ok          00_a"]
    assert sum("8 cases computed first" in line and "1 of them failed" in line for line in lines) == 1


@pytest.mark.usefixtures("kernels_are_copied", "calls_are_copied")
def test_what_an_earlier_attempt_has_recorded_is_not_computed_first(tmp_path, facts, capsys):
    code = [CODE[0], "assert Path('../../again').exists(), 'the first attempt ends here'", CODE[2]]
    path = with_cases(tmp_path, *code)
    point = Point(read_notebook(path), {})
    assert runs.run_points([point], tmp_path / "out/run", facts) == {"00_a": "failed"}
    (tmp_path / "out/again").touch()
    assert runs.run_points([point], tmp_path / "out/run", facts, compilers=PROCESSES) == {"00_a": "ok"}
    assert sorted(chain(*noted(tmp_path, "first"))) == [*"4567"]


@pytest.mark.usefixtures("kernels_are_copied")
def test_without_the_option_and_without_a_sweep_there_is_no_first_pass(tmp_path, facts, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "run_isolated", lambda *_arguments, **_options: pytest.fail("a process was started"))
    swept = Point(read_notebook(with_cases(tmp_path, *CODE)), {})
    assert runs.run_points([swept], tmp_path / "run", facts) == {"00_a": "ok"}
    plain = Point(read_notebook(write_notebook(tmp_path / "notebooks", "01_b", "print(1)")), {})
    assert runs.run_points([plain], tmp_path / "run", facts, compilers=PROCESSES) == {"01_b": "ok"}
    assert "01_b: nothing to compile first" in capsys.readouterr().out


@pytest.mark.usefixtures("kernels_are_copied", "calls_are_copied")
def test_a_cell_that_fails_before_any_sweep_ends_the_first_pass_and_is_told_once(tmp_path, facts, capsys):
    fails = "assert not is_first_pass, 'too short'"
    point = Point(read_notebook(with_cases(tmp_path, fails, *CODE)), {})
    assert runs.run_points([point], tmp_path / "run", facts, compilers=PROCESSES) == {"00_a": "ok"}
    assert noted(tmp_path, "first") == []
    assert capsys.readouterr().out.count("the first pass ended early: AssertionError: too short") == 1


def test_cells_get_the_points_parameters_up_to_the_last_sweep(tmp_path):
    path = write_notebook(tmp_path, "00_a", "a = seq_len", "run_sides([])", "b = 1")
    cells = compiling.cells_to_run(Point(read_notebook(path), {"seq_len": 3, "rates": [4]}))
    values = {}
    exec("\n".join(cells[:-1]), values)
    assert (values["a"], values["rates"], values["scale"], values["output_dir"]) == (3, [4], 0.5, ".")
    assert cells[-1] == "run_sides([])"


def test_both_passes_share_the_time_of_a_notebook(tmp_path, facts, monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def compile_first(point, records, *, seconds, **_options):
        given.append(seconds)
        now[0] = 3000.0

    monkeypatch.setattr(runs, "compile_first", compile_first)
    point = Point(read_notebook(write_notebook(tmp_path, "00_a", "pass")), {})
    manifest = runs.run_point(point, tmp_path / "run", facts, timeout=3000, compilers=1)
    assert given == [3000]
    assert manifest["error"]["message"] == "the notebook took longer than 3000 s"


def test_a_first_pass_that_takes_too_long_is_ended(tmp_path, facts, monkeypatch, capsys):
    mark(monkeypatch)
    endless = "if is_first_pass:\n    note('begun')\n    time.sleep(600)\n" + CODE[0]
    point = Point(read_notebook(with_cases(tmp_path, endless)), {})
    compiling.compile_first(point, tmp_path, processes=1, gpus=0, seconds=0.5)
    assert "the first pass ended early: longer than 0.5 s" in capsys.readouterr().out
    assert marked_processes() == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_ends_all_processes(tmp_path, monkeypatch, name):
    mark(monkeypatch)
    # Of both processes, since the one that signals has waited for the other; the command stands two above.
    stop = "if is_first_pass:\n    import psutil, signal\n    computed('begun')\n"
    stop += "    if min(int(path.name.split()[1]) for path in notes.glob('first *')) == os.getpid():\n"
    stop += f"        os.kill(psutil.Process().parents()[1].pid, signal.{name})\n    time.sleep(600)\n{CODE[0]}"
    with_cases(tmp_path, stop)
    hilbert = [sys.executable, "-c", "from hilbert_lib.cli.main import main; main()"]
    command = [*hilbert, "run", "--notebooks", tmp_path / "notebooks", "--out", tmp_path / "out"]
    process = subprocess.run(
        [*command, "--compile-first", str(PROCESSES)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    number = signal.Signals[name]
    assert process.returncode == 128 + number, process.stderr
    assert noted(tmp_path, "first") == [["begun"]] * PROCESSES
    assert noted(tmp_path, "real") == []
    (failed,) = (tmp_path / "out").glob("*/*")
    assert failed.name == "00_a.failed"
    manifest = read_manifest(failed)
    assert (manifest["status"], manifest["error"]["message"]) == ("interrupted", f"stopped by {name}")
    wait_for(lambda: not marked_processes())


def test_processes_take_the_gpus_in_turn_unless_they_are_chosen(tmp_path, monkeypatch):
    orders = []
    monkeypatch.setattr(compiling, "run_isolated", lambda _target, order, **_how: orders.extend(order) or kept_alone())
    point = Point(read_notebook(with_cases(tmp_path, *CODE)), {})

    def shown(gpus):
        orders.clear()
        compiling.compile_first(point, tmp_path, processes=3, gpus=gpus, seconds=1)
        return Counter(order["environment"].get("CUDA_VISIBLE_DEVICES") for order in orders)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shown(2) == {"0": 2, "1": 1}
    assert shown(1) == {None: 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert shown(2) == {None: 3}


def test_a_sweep_of_a_first_pass_times_checks_and_writes_nothing(tmp_path, in_first_pass):
    ran = []

    def side(name):
        run, error = (lambda: ran.append(name) or (torch.ones(1),)), lambda results: pytest.fail("checked")
        return Side(name, {"sweep": "s"}, run, error)

    (tmp_path / "out").mkdir()
    how = {"device": "cpu", "output_dir": str(tmp_path / "out")}
    assert run_sides([(side("a"), side("b"))], on_cpu=True, **how) == []
    assert run_back_to_back([(side("c"),)], **how) == []
    assert sweep([((Case("d", None, {}, 0.0),), partial(pytest.fail, "measured"))]) == []
    assert ran == [*"abc"]
    assert list((tmp_path / "out").iterdir()) == []
    assert len(in_first_pass()) == 3


def test_an_option_is_computed_by_every_way_as_it_is_timed(in_first_pass, monkeypatch):
    precisions, gradients = [], []
    attend, grad = Call.by, torch.autograd.grad

    def by(call, *arguments):
        precisions.append(torch.get_float32_matmul_precision())
        return attend(call, *arguments)

    monkeypatch.setattr(Call, "by", by)
    monkeypatch.setattr(Call, "error", lambda *_arguments, **_options: pytest.fail("checked"))
    monkeypatch.setattr(torch.autograd, "grad", lambda *arguments: gradients.append(1) or grad(*arguments))
    cpu = torch.device("cpu")
    near = Call(Neighbourhood((4, 4), 3), 16, 2, 8, cpu, dtype="float32", allows_tf32=True)
    rivals = lambda _base, _option, call: {"itself": call.by}  # noqa: E731
    assert run_options([("grids", "base", near)], rivals, device=cpu) == []
    assert precisions == ["high"] * 4
    assert len(gradients) == 2
    assert [line.rpartition(": ")[2][-1] for line in in_first_pass()] == ["s", "s"]


def test_nothing_is_trained_in_a_first_pass(in_first_pass):
    never = SimpleNamespace(parameters={"seed": 0}, make=lambda: pytest.fail("trained"))
    with pytest.raises(LeftOut, match="training is no part of a first pass"):
        fit(never, device="cpu")
    with pytest.raises(LeftOut):
        run_trainings([never], device="cpu")
    assert passes.first_pass().lacks_records


def test_a_side_that_fails_keeps_none_from_being_computed(tmp_path):
    def fail():
        raise ValueError("refused")

    ran, one = [], FirstPass(tmp_path)
    one.compute([("a", [fail, partial(ran.append, 1)]), ("b", [partial(ran.append, 2)])])
    assert ran == [1, 2]
    first, second = (tmp_path / passes.TOLD).read_text().splitlines()
    assert first == "a: failed: ValueError: refused"
    assert second.startswith("b: ")


def test_a_process_whose_gpu_has_failed_takes_no_further_case(tmp_path, monkeypatch):
    def fault():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(SystemExit, match="its GPU serves it no more: CUDA error: an illegal memory access"):
        FirstPass(tmp_path).compute([("a", [print]), ("b", [partial(pytest.fail, "computed")])])
    assert (tmp_path / passes.TOLD).read_text().count("\n") == 1


def test_every_function_of_the_laboratory_that_sweeps_is_known_to_the_first_pass():
    callers = {}
    for path in Path(lab.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [each.func for each in ast.walk(function) if isinstance(each, ast.Call)]
                callers[function.name] = {each.id for each in calls if isinstance(each, ast.Name)}
    sweeping, before = {"sweep"}, set()
    while sweeping != before:
        before = set(sweeping)
        sweeping |= {name for name, called in callers.items() if called & before}
    taken = {name for names in (*lab.PUBLIC.values(), *sweeps.PUBLIC.values()) for name in names}
    assert {*compiling.SWEEPS} == sweeping & taken
