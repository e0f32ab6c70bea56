"""The `hilbert` command: what it prints, what it refuses, and its exit status."""

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote_to_bytes

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from command import call
from own_processes import PATIENCE
from tiny_notebooks import PARAMETERS, make_run, write_notebook

from hilbert_lib.cli.main import main
from hilbert_lib.lab.ledger import claims
from hilbert_lib.lab.records import append_records, read_records
from hilbert_lib.lab.suite import doctor
from hilbert_lib.lab.suite.points import Point, left_out, read_notebook
from hilbert_lib.lab.timing import Case, compare_paired
from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import Ending

WRITE = "import json, pathlib\nvalues = json.dumps({'n': [seq_len, rates, scale]})\n"
WRITE += "pathlib.Path(output_dir, 'results.jsonl').write_text(values + '\\n')"
FAIL_AT_2 = "if seq_len == 2:\n    raise ValueError('two is too short')"


@pytest.fixture
def hilbert(tmp_path, monkeypatch):
    """Call the command in an empty folder; tests say which notebooks there are."""
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # another test of this process may have imported triton

    def hilbert(*words, status=0):
        notebooks = ["--notebooks", "notebooks"] if words[0] in ("run", "sweep", "list") else []
        return call(*words, *notebooks, status=status)

    return hilbert


def test_the_module_is_the_command_and_help_waits_for_no_large_package():
    script = "import sys\nfrom hilbert_lib.cli import run\ntry: run()\nfinally: print(*sys.modules)"
    for words in (["--help"], ["bench", "attention", "-h"], ["list"], ["sweep", "00_question", "--dry-run"]):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
        *_, modules = done.stdout.splitlines()
        assert not {"torch", "pandas", "numpy", "papermill", "matplotlib"} & set(modules.split()), words
    command = [sys.executable, "-m", "hilbert_lib.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: hilbert [OPTIONS] COMMAND")
    assert "_HILBERT_COMPLETE=bash_source" in done.stdout


@pytest.mark.usefixtures("kernels_are_copied")
def test_a_run_ends_with_its_index_and_a_second_one_reuses_it(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    first = hilbert("run")
    index = Path(first.splitlines()[-1])
    assert index.is_file()
    assert re.fullmatch(r"reports/local/[^/]+/index\.html", index.as_posix())
    names = {path.name for path in (index.parent / "00_a").iterdir()}
    assert names == {"00_a.ipynb", "00_a.html", "manifest.json", "results.jsonl.gz"}
    assert Path("reports/local/index.html").is_file()
    assert str(Path.cwd()) not in (index.parent / "00_a" / "00_a.ipynb").read_text()
    stamps = {path: path.stat().st_mtime_ns for path in (index.parent / "00_a").iterdir()}
    second = hilbert("run")
    assert re.search(r"^reused +00_a$", second, re.MULTILINE)
    assert second.splitlines()[-1] == first.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in (index.parent / "00_a").iterdir()} == stamps
    assert re.search(r"^ok +00_a$", hilbert("run", "00_a", "--force"), re.MULTILINE)
    write_notebook(Path("notebooks"), "00_a", WRITE, "print('edited')")
    assert re.search(r"^ok +00_a$", hilbert("run"), re.MULTILINE)


@pytest.mark.parametrize("words", [["run"], ["sweep", "00_a"]], ids=str)
def test_a_package_that_the_pages_need_is_missed_before_anything_runs(hilbert, monkeypatch, words):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    monkeypatch.setitem(sys.modules, "nbconvert", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "hilbert_lib.lab.suite.report", raising=False)
    result = CliRunner().invoke(main, [*words, "--notebooks", "notebooks"])
    assert "nbconvert" in str(result.exception)
    assert not Path("reports").exists()


@pytest.mark.usefixtures("kernels_are_copied")
def test_a_rival_that_is_asked_for_and_does_not_load_is_told_before_and_after(hilbert, monkeypatch):
    """A sweep ran fifteen minutes without the rival that it was for, which could not be imported."""
    reason = "flash-attn-4 4.0 cannot be imported: ModuleNotFoundError: No module named 'cutlass'"

    def import_in_a_process(_target, arguments, *, on_record, **_):
        on_record({package: reason if package == "flash_attn_4" else "" for package in arguments[0]})
        return Ending("ok", "", (), (), 0.0, {})

    monkeypatch.setattr(isolated, "run_isolated", import_in_a_process)
    parameters = PARAMETERS + '\nrivals: list[str] = ["flash_attn_4"]  # what is timed beside it'
    write_notebook(Path("notebooks"), "00_a", WRITE, parameters=parameters)
    lines = hilbert("run", "-p", "rivals", "xformers,flash_attn_4").splitlines()
    told = f"00_a: rivals has flash_attn_4, which cannot be used here: {reason}"
    shown = [line for line in lines if "xformers, which" in line or line == told or line.startswith("ok ")]
    assert [line == told for line in shown] == [True, False, True]
    # Nobody asked for those that a notebook has by itself.
    assert told not in hilbert("run")


def test_packages_that_do_not_load_are_told_with_their_reasons_also_of_a_process_that_dies(monkeypatch, tmp_path):
    notebook = read_notebook(write_notebook(tmp_path, "00_a", parameters='rivals: list[str] = ["cudnn"]  # others'))
    asked = [Point(notebook, {"rivals": ["cudnn", "flash_attn_3"]})]
    (line,) = left_out(asked)
    absent = "absent: there is no module flash_attn_interface"
    assert line.startswith(f"00_a: rivals has flash_attn_3, which cannot be used here: {absent}")
    ended = Ending("crashed", "SIGSEGV", (), (), 0.0, {})
    monkeypatch.setattr(isolated, "run_isolated", lambda *_, **__: ended)
    assert left_out(asked)[0].endswith("its import crashed: SIGSEGV")


@pytest.mark.usefixtures("kernels_are_copied")
def test_the_shards_of_a_sweep_meet_in_one_folder_with_one_table(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    grid = ["sweep", "00_a", "-p", "seq_len", "1,2", "-p", "rates", "3;4,5"]
    for shard in ("1/4", "3/4"):
        assert "1 runs: 1 ok" in (told := hilbert(*grid, "--shard", shard))
    (run_folder,) = Path("reports/local").iterdir()
    table = run_folder / "00_a.csv"
    assert f"the table: {table}" in told
    assert sorted(pd.read_csv(table).seq_len) == [1, 2]
    folders = sorted(folder for folder in run_folder.iterdir() if folder.is_dir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == [f"00_a-seq_len={n}-rates=3" for n in (1, 2)]
    results = [record["n"] for folder in folders for record in read_records(folder / "results.jsonl")]
    assert sorted(results) == [[1, [3], 0.5], [2, [3], 0.5]]
    assert hilbert(*grid, "--shard", "1/4").startswith("reused")


@pytest.mark.usefixtures("kernels_are_copied")
def test_a_failing_point_is_named_and_the_rest_is_finished(hilbert):
    write_notebook(Path("notebooks"), "00_a", FAIL_AT_2, WRITE)
    grid = ["sweep", "00_a", "-p", "seq_len", "2,4", "-p", "scale", "1"]
    output = hilbert(*grid, status=1)
    assert "ValueError: two is too short" in output
    failed = re.search(r"failed: (00_a-\S+)$", output, re.MULTILINE)[1]
    (run_folder,) = Path("reports/local").iterdir()
    assert not list(run_folder.glob("*.html"))  # jobs of an array would write it at the same time
    assert (run_folder / f"{failed}.failed" / "manifest.json").is_file()
    again = hilbert(*grid, status=1)
    assert re.search(r"^reused +00_a-", again, re.MULTILINE)
    assert re.search(rf"^failed +{failed} ", again, re.MULTILINE)
    *_, page, index = hilbert("report").splitlines()
    assert (page, index) == (str(run_folder / "index.html"), "reports/local/index.html")
    assert (run_folder / f"{failed}.failed" / "00_a.html").is_file()


@pytest.mark.usefixtures("kernels_are_copied")
def test_values_of_command_line_file_and_folder_reach_the_notebook(hilbert):
    write_notebook(Path("notebooks"), "00_a", "assert rates == [3, 4], rates\nassert scale == 2 and causal is True")
    Path("sizes.yaml").write_text("rates: [7]\nscale: 2\n")
    hilbert("run", "00_a", "-f", "sizes.yaml", "-p", "rates", "3,4", "-p", "causal", "true")
    for name in ("01_b", "02_c"):
        write_notebook(Path("notebooks"), name)
    Path("sizes").mkdir()
    Path("sizes/00_a.yaml").write_text("seq_len: 16\nscale: 2\n")
    Path("sizes/02_c.yaml").write_text("rates: [7]\n")
    lines = hilbert("run", "-f", "sizes", "--dry-run").splitlines()
    assert lines[-1] == "3 of 3 to run"
    values = [line.split("  ")[1] for line in lines[:3]]
    assert values == ["seq_len = 16, scale = 2.0", "with its defaults", "rates = [7]"]
    lines = hilbert("run", "-f", "sizes", "-p", "seq_len", "4", "--dry-run").splitlines()[:3]
    assert all("seq_len = 4" in line for line in lines)
    sharded = hilbert("sweep", "02_c", "-f", "sizes", "-p", "seq_len", "1,2", "--shard", "2/2", "--dry-run")
    assert sharded.splitlines()[-1] == "1 of 2 to run"
    assert "seq_len = 2, rates = [7]" in sharded


def test_folders_and_files_may_have_any_name(tmp_path):
    odd = os.fsdecode(b"-a b\n{c}#50%25?<i>&[e](f)|'\xff")
    work, nearby = tmp_path / odd / "deep", tmp_path / odd / "notebooks"
    work.mkdir(parents=True)
    (tmp_path / "link").symlink_to(work)
    for folder, told in ((tmp_path / "notebooks", "'another'"), (nearby, "'this one'")):
        for name in (odd, "01_b"):
            write_notebook(folder, "00_a", f"print({told})", prose="[Next](01_b.ipynb)?")
            text = (folder / "00_a.ipynb").read_text().replace("## Answer", "No heading: its name is its title.")
            (folder / f"{name}.ipynb").write_text(text)
        (folder / "00_a.ipynb").unlink()
    asked, waits = os.pipe()  # a terminal that says nothing
    done = subprocess.run(
        [sys.executable, "-m", "hilbert_lib.cli", "run", "--notebooks", "link/../notebooks", "--out", f"./{odd}/out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8:strict"},
        stdin=asked,
        capture_output=True,
        timeout=PATIENCE,
    )
    os.close(asked), os.close(waits)
    assert done.returncode == 0, done.stderr
    assert b"nbformat" not in done.stdout
    (index,) = (tmp_path / odd / "out").glob("*/index.html")
    assert done.stdout.endswith(os.fsencode(index.relative_to(tmp_path)) + b"\n")
    assert "'this one'" in (index.parent / odd / f"{odd}.ipynb").read_text()
    pages = [index, index.parents[1] / "index.html", *index.parent.glob("*/*.html")]
    assert len(pages) == 4
    assert re.search(
        r"<h2><a [^>]*>-a b {c}#50%25\?&lt;i&gt;&amp;\[e\]\(f\)\|'.udcff</a>", index.read_text().replace("\n", " ")
    )
    links = {(page, link) for page in pages for link in re.findall(r'(?:href|src)="([^"#:]+)"', page.read_text())}
    assert len(links) >= 9
    for page, link in links:
        assert os.path.exists(os.fsencode(page.parent) + b"/" + unquote_to_bytes(link)), link


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "00_aa"], "did you mean '00_a'"),
        (["run", "-p", "seq_lne", "4"], "did you mean 'seq_len'"),
        (["run", "-p", "seq_len", "4", "-p", "seq_len", "5"], "given more than once"),
        (["run", "-p", "seq_len=4", "--out", "folder"], "-p takes two words, as -p seq_len 4; got 'seq_len=4'"),
        (["run", "-f", "sections.yaml"], "must be flat"),
        (["run", "-f", "sizes"], "no notebook's file is named '00_aa.yaml'; did you mean '00_a.yaml'"),
        (["run", "-f", "twice"], "no notebook's file is named '00_a.yml'; did you mean '00_a.yaml'"),
        (["run", "00_a", "-f", "notebooks"], "notebooks holds no parameters (NAME.yaml"),
        *((["run", "--timeout", word], f"{word!r} is no time in seconds") for word in ("0", "-1", "nan", "soon")),
        (["sweep", "00_a", "-p", "seq_len", "1,,2"], "seq_len must be int, got ''"),
        (["sweep", "99"], "99.ipynb: "),
        (["list"], "99.ipynb: "),
        (["sweep", "00_a", "--shard", "3/2"], "shard must be i/n"),
        (["report", "notebooks"], "no runs in notebooks"),
        (["compare", "notebooks"], "two runs or more are compared, got 1"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_runs(hilbert, words, message):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    Path("sections.yaml").write_text("00_a:\n  seq_len: 8\n")
    for file in ("sizes/00_aa.yaml", "twice/00_a.yaml", "twice/00_a.yml"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("seq_len: 8\n")
    if "99" in words or words == ["list"]:
        Path("notebooks/99.ipynb").write_text("{")
    assert message in " ".join(hilbert(*words, status=2).split())
    assert not Path("reports").exists()


def test_list_shows_title_parameters_and_meanings(hilbert):
    write_notebook(Path("notebooks"), "00_a", prose="# What is asked?")
    output = hilbert("list")
    assert "00_a  What is asked?" in output
    assert re.search(r"rates: list\[int\] = \[1, 2\] +dilations", output)
    assert "output_dir" not in output
    (listed,) = json.loads(hilbert("list", "--json"))
    assert (listed["name"], listed["title"]) == ("00_a", "What is asked?")
    rates = {"name": "rates", "annotation": "list[int]", "default": [1, 2], "meaning": "dilations"}
    assert rates in listed["parameters"]


def test_every_command_says_what_it_is_for_with_an_example():
    for name, command in main.commands.items():
        short, long = call(name, "-h"), call(name, "--help")
        assert short == long
        assert f"Example: hilbert {name}" in long
        assert len(command.help.split("Example")[0].split()) > 15
    assert call("--version").endswith(f" {version('hilbert-lib')}\n")


def test_claims_are_a_plain_table_or_objects(hilbert, monkeypatch):
    monkeypatch.setattr(claims, "LEDGER", {name: claims.LEDGER[name] for name in ("B3", "C8")})
    lines = hilbert("claims").splitlines()
    assert re.match(r"id +verdict +value +claim$", lines[0])
    assert re.match(r"B3 +holds", lines[1])
    (told,) = json.loads(hilbert("claims", "B3", "--json"))
    assert (told["id"], told["verdict"]) == ("B3", "holds")


def test_claims_that_wait_for_a_record_are_named_and_shown(hilbert, monkeypatch):
    waiting = replace(claims.LEDGER["K7"], id="P9", record="12_none", verdict="waits for: 12_none")
    monkeypatch.setattr(claims, "LEDGER", {"B3": claims.LEDGER["B3"]})
    monkeypatch.setattr(claims, "WAITING", {"P9": waiting})
    assert hilbert("claims").splitlines()[-1] == "not tested yet, for want of a record: P9"
    assert re.search(r"^verdict +not tested yet, waits for: 12_none$", hilbert("claims", "P9"), re.M)
    assert "a claim must be one of B3; got 'P9'" in hilbert("claims", "--rerun", "P9", status=2)


def test_figures_are_drawn_again_on_request_and_warnings_are_a_line(hilbert, monkeypatch):
    def redraw(folder):
        warnings.warn(f"none in {folder}", stacklevel=1)
        return ["a.png"]

    make_run(Path.cwd() / "reports" / "local" / "cpu-1")
    monkeypatch.setattr("hilbert_lib.lab.figures.redraw", redraw)
    assert hilbert("report", "--redraw").startswith("warning: none in reports/local\n1 figures redrawn\n")
    index = Path.cwd() / "reports/local/cpu-1/index.html"
    monkeypatch.chdir(index.parent)  # a report of the current folder leads to the one above
    assert hilbert("report", ".").split() == [str(index), str(index.parents[1] / "index.html")]
    assert "1 of 1 finished" in index.read_text()


def test_two_runs_are_compared(hilbert):
    case = Case("add", lambda: 1 + 1, {"n": 1}, error=0.0)
    for name in ("a", "b"):
        append_records([compare_paired(case, case, device="cpu", repetitions=3)], name)
    assert re.search(r"^n=1\n *name .*ratio.*\n *add ", hilbert("compare", "a", "b"))
    (row,) = json.loads(hilbert("compare", "a", "b", "--json"))
    assert (row["name"], row["parameters"], row["found"]) == ("add", "n=1", "both")


def test_doctor_says_what_is_well_what_is_broken_and_how_to_mend_it(hilbert, monkeypatch):
    output = hilbert("doctor")
    assert "BROKEN" not in output
    kernels = [] if doctor.kernel_mode() == "absent" else ["kernels"]
    for subject in ("gpu", "versions", *kernels, "python", "reports"):
        assert re.search(rf"^ok +{subject} ", output, re.MULTILINE)
    pytest.importorskip("triton")
    attend = doctor.dilated_attention

    def wrong(q, k, v, pattern, *, backend):
        return attend(q, k, v, pattern, backend=backend) + (backend == "triton")

    no_gpu = RuntimeError("this torch cannot use the GPU: torch 2.13.0+cpu; install torch's CUDA build")
    monkeypatch.setattr(doctor, "dilated_attention", wrong)
    monkeypatch.setattr(doctor, "NEEDED_MB", 2**40)
    output = hilbert("doctor", status=1)
    assert re.search(r"^BROKEN +kernels +the fused ones fail on 16 tokens: AssertionError: .*\n +fix: ", output, re.M)
    assert re.search(r"^BROKEN +reports .* MB free\n +fix: free \d+ MB, or ", output, re.M)
    monkeypatch.setattr(doctor, "check_gpu", Mock(side_effect=no_gpu))
    no_file = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", no_file)
    output = hilbert("doctor", status=1)
    assert re.search(r"^BROKEN +gpu +this torch .*\n +fix: install torch's CUDA build$", output, re.M)
    assert re.search(r"^BROKEN +reports .* cannot be written: Permission denied\n +fix: ", output, re.M)


def test_doctor_says_whether_torch_and_triton_were_tried_together():
    for torch_version, triton_version in doctor.TRIED:
        said, fix = doctor.pair_of(f"{torch_version}+cpu", triton_version)
        assert "were tried: " in said
        assert fix == ""
    said, fix = doctor.pair_of("2.13.0+cpu", "3.9.0")
    assert said.startswith("torch 2.13 and triton 3.9 were not tried; of torch and triton these were: 2.11.0 and 3.6.")
    assert fix == ""
    assert "without triton" in doctor.pair_of("2.13.0", None)[0]


def test_a_wrong_variable_is_told_without_a_traceback(hilbert, monkeypatch):
    refuse = Mock(side_effect=ValueError("HILBERT_DIRTY must be 0 or 1, got 'perhaps'"))
    write_notebook(Path("notebooks"), "00_a")
    for module, command in (("lab.environment", "run"), ("lab.suite.doctor", "doctor")):
        monkeypatch.setattr(f"hilbert_lib.{module}.environment", refuse)
        assert "HILBERT_DIRTY must be 0 or 1" in hilbert(command, status=2)


COMMAND = [sys.executable, "-m", "hilbert_lib.cli"]
CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}


@pytest.mark.skipif(sys.platform == "win32", reason="a shell there closes no streams")
@pytest.mark.parametrize(
    "words", ["--help", "list --notebooks notebooks", "sweep 00_a --notebooks notebooks --dry-run"]
)
@pytest.mark.parametrize("closed", CLOSED)
def test_a_command_works_with_streams_that_are_closed(tmp_path, closed, words):
    write_notebook(tmp_path / "notebooks", "00_a")
    line = f"{shlex.join(COMMAND)} {words} {CLOSED[closed]}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=inherited(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed in ("stdin", "stderr"))


def test_a_file_that_is_opened_takes_no_closed_streams_number(tmp_path):
    """What a library prints into a closed stream would else be written into it."""
    script = "import os, sys; from hilbert_lib import cli; cli._open_streams(); opened = open('out.txt', 'w')\n"
    script += "os.write(1, b'lost'); print('lost', flush=True); opened.write(str(opened.fileno())); opened.close()\n"
    script += "assert os.get_inheritable(1)"
    line = f"{shlex.join([sys.executable, '-c', script])} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, env=inherited()).returncode == 0
    assert int((tmp_path / "out.txt").read_text()) > 2


@pytest.mark.parametrize("words", [["--help"], ["list", "--notebooks", "notebooks"]], ids=str)
def test_a_reader_that_is_gone_and_a_full_disk_end_a_command_without_a_traceback(tmp_path, words):
    write_notebook(tmp_path / "notebooks", "00_a")
    reading, writing = os.pipe()
    os.close(reading)
    places = [os.fdopen(writing, "wb")]
    if sys.platform == "linux":
        places.append(open("/dev/full", "wb"))  # noqa: SIM115
    for place in places:
        with place:
            done = subprocess.run(
                [*COMMAND, *words], cwd=tmp_path, env=inherited(), stdout=place, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert ("No space left on device" in done.stderr) == (place is not places[0])


def inherited():
    """The environment of a command in another folder, which finds the library."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
