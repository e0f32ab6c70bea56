"""The `hilbert` command: what it prints, what it refuses, and its exit status."""

import json
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from tiny_notebooks import write_notebook

from hilbert_lib.cli.main import main
from hilbert_lib.lab.ledger import claim
from hilbert_lib.lab.records import append_records
from hilbert_lib.lab.suite import doctor
from hilbert_lib.lab.timing import Case, measure

WRITE = "import pathlib\npathlib.Path(output_dir, 'results.jsonl').write_text(f'{seq_len} {rates} {scale}')"
FAIL_AT_2 = "if seq_len == 2:\n    raise ValueError('two is too short')"


@pytest.fixture
def hilbert(tmp_path, monkeypatch):
    """Call the command in an empty folder; tests say which notebooks there are."""
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # another test of this process may have imported triton

    def call(*words, status=0):
        notebooks = ["--notebooks", "notebooks"] if words[0] in ("run", "sweep", "list") else []
        result = CliRunner().invoke(main, [*map(str, words), *notebooks])
        assert result.exit_code == status, result.output + repr(result.exception)
        return result.output

    return call


def test_the_module_is_the_command_where_nothing_is_installed():
    command = [sys.executable, "-m", "hilbert_lib.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: hilbert [OPTIONS] COMMAND")


def test_a_run_ends_with_the_path_of_its_index_and_a_second_one_reuses_it(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    first = hilbert("run")
    index = Path(first.splitlines()[-1])
    assert index.is_file()
    assert re.fullmatch(r"reports/local/[^/]+/index\.html", index.as_posix())
    names = {path.name for path in (index.parent / "00_a").iterdir()}
    assert names == {"00_a.ipynb", "00_a.html", "manifest.json", "results.jsonl"}
    assert Path("reports/local/index.html").is_file()
    assert not re.search(re.escape(str(Path.cwd())), (index.parent / "00_a" / "00_a.ipynb").read_text())

    stamp = (index.parent / "00_a" / "manifest.json").stat().st_mtime_ns
    second = hilbert("run")
    assert re.search(r"^reused +00_a$", second, re.MULTILINE)
    assert second.splitlines()[-1] == first.splitlines()[-1]
    assert (index.parent / "00_a" / "manifest.json").stat().st_mtime_ns == stamp

    assert re.search(r"^ok +00_a$", hilbert("run", "00_a", "--force"), re.MULTILINE)
    assert (index.parent / "00_a" / "manifest.json").stat().st_mtime_ns > stamp


def test_the_shards_of_a_sweep_meet_in_one_folder(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    grid = ["sweep", "00_a", "-p", "seq_len", "1,2", "-p", "rates", "3;4,5"]
    for shard in ("1/4", "3/4"):
        assert "1 runs: 1 ok" in hilbert(*grid, "--shard", shard)
    (run_folder,) = Path("reports/local").iterdir()
    results = [(folder / "results.jsonl").read_text() for folder in run_folder.iterdir()]
    assert sorted(results) == ["1 [3] 0.5", "2 [3] 0.5"]
    assert hilbert(*grid, "--shard", "1/4").startswith("reused")


def test_a_failing_point_is_named_and_the_rest_is_finished_and_resumed(hilbert):
    write_notebook(Path("notebooks"), "00_a", FAIL_AT_2, WRITE)
    grid = ["sweep", "00_a", "-p", "seq_len", "2,4", "-p", "scale", "1"]
    output = hilbert(*grid, status=1)
    assert "ValueError: two is too short" in output
    failed = re.search(r"failed: (00_a-\w{8})$", output, re.MULTILINE)[1]
    (run_folder,) = Path("reports/local").iterdir()
    assert not list(run_folder.glob("*.html"))  # jobs of an array would write it at the same time
    assert (run_folder / f"{failed}.failed" / "manifest.json").is_file()
    again = hilbert(*grid, status=1)
    assert re.search(r"^reused +00_a-", again, re.MULTILINE)
    assert re.search(rf"^failed +{failed} ", again, re.MULTILINE)

    shown = hilbert("report")
    assert shown.splitlines()[-1] == str(run_folder / "index.html")
    assert (run_folder / f"{failed}.failed" / "00_a.html").is_file()


def test_list_parameters_reach_the_notebook_as_lists(hilbert):
    write_notebook(Path("notebooks"), "00_a", "assert rates == [3, 4], rates\nassert scale == 2 and causal is True")
    Path("sizes.yaml").write_text("rates: [7]\nscale: 2\n")
    hilbert("run", "00_a", "-f", "sizes.yaml", "-p", "rates", "3,4", "-p", "causal", "true")


def test_a_folder_of_files_gives_each_notebook_its_own_and_the_rest_their_defaults(hilbert):
    for name in ("00_a", "01_b", "02_c"):
        write_notebook(Path("notebooks"), name)
    Path("sizes").mkdir()
    Path("sizes/00_a.yaml").write_text("seq_len: 16\nscale: 2\n")
    Path("sizes/02_c.yaml").write_text("rates: [7]\n")
    lines = hilbert("run", "-f", "sizes", "--dry-run").splitlines()
    assert lines[-1] == "3 of 3 to run"
    assert [line.split("  ")[1] for line in lines[:3]] == ["seq_len=16 scale=2.0", "with its defaults", "rates=[7]"]
    assert all(
        "seq_len=4" in line
        for line in hilbert("run", "-f", "sizes", "-p", "seq_len", "4", "--dry-run").splitlines()[:3]
    )
    assert "rates=[7] seq_len=2" in hilbert("sweep", "02_c", "-f", "sizes", "-p", "seq_len", "1,2", "--dry-run")


def test_a_run_with_a_folder_of_files_finishes_what_is_left(hilbert):
    for name in ("00_a", "01_b"):
        write_notebook(Path("notebooks"), name, FAIL_AT_2)
    Path("sizes").mkdir()
    Path("sizes/01_b.yaml").write_text("seq_len: 2\n")
    assert "2 runs: 1 ok, 1 failed" in hilbert("run", "-f", "sizes", status=1)
    Path("sizes/01_b.yaml").write_text("seq_len: 4\n")
    assert "2 runs: 1 reused, 1 ok" in hilbert("run", "-f", "sizes")


def test_a_dry_run_shows_the_grid_and_its_size_and_runs_nothing(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    output = hilbert("sweep", "00_a", "-p", "seq_len", "1,2,3", "-p", "rates", "1;1,2", "--dry-run")
    assert output.splitlines()[-1] == "6 of 6 to run"
    assert "seq_len=3 rates=[1]" in output
    sharded = hilbert("sweep", "00_a", "-p", "seq_len", "1,2,3", "--shard", "2/2", "--dry-run")
    assert sharded.splitlines()[-1] == "1 of 3 to run"
    assert "00_a  with its defaults" in hilbert("run", "--dry-run")
    assert not Path("reports").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "00_aa"], "did you mean '00_a'"),
        (["run", "-p", "seq_lne", "4"], "did you mean 'seq_len'"),
        (["run", "-p", "seq_len", "4.5"], "seq_len must be int, got '4.5'"),
        (["run", "-p", "causal", "1"], "causal must be bool"),
        (["run", "-p", "seq_len", "4", "-p", "seq_len", "5"], "given more than once"),
        (["run", "-p", "seq_len=4", "--out", "folder"], "-p takes two words, as -p seq_len 4; got 'seq_len=4'"),
        (["sweep", "00_a", "-p", "seq_len=4", "--out", "folder"], "as -p seq_len 4; got 'seq_len=4'"),
        (["run", "-f", "sections.yaml"], "must be flat"),
        (["run", "-f", "quoted.yaml"], "seq_len must be int, got '8'"),
        (["run", "-f", "sizes"], "no notebook is named '00_aa'; did you mean '00_a'"),
        (["run", "-f", "twice"], "00_a must have one file of parameters, got 00_a.yaml and 00_a.yml"),
        (["run", "00_a", "-f", "notebooks"], "notebooks holds no parameters (NAME.yaml"),
        (["run", "-p", "output_dir", "x"], "--out"),
        (["run", "--timeout", "0"], "timeout"),
        (["sweep", "00_a", "-p", "seq_len", "1,x"], "each value of seq_len must be int, got '1,x'"),
        (["sweep", "00_a", "-p", "seq_len", "1,,2"], "each value of seq_len must be int, got '1,,2'"),
        (["run", "99"], "99.ipynb: "),
        (["sweep", "99"], "99.ipynb: "),
        (["list"], "99.ipynb: "),
        (["sweep", "00_a", "--shard", "3/2"], "shard must be i/n"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_runs(hilbert, words, message):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    Path("sections.yaml").write_text("00_a:\n  seq_len: 8\n")
    Path("quoted.yaml").write_text("seq_len: '8'\n")
    Path("sizes").mkdir()
    Path("sizes/00_aa.yaml").write_text("seq_len: 8\n")
    Path("twice").mkdir()
    for ending in ("yaml", "yml"):
        Path(f"twice/00_a.{ending}").write_text("seq_len: 8\n")
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


def test_every_command_says_what_it_is_for_with_an_example():
    for name, command in main.commands.items():
        output = CliRunner().invoke(main, [name, "--help"]).output
        assert f"Example: hilbert {name}" in output
        assert len(command.help.split("Example")[0].split()) > 15


def test_short_help_and_the_version_are_there():
    short, long = (CliRunner().invoke(main, ["bench", "attention", word]).output for word in ("-h", "--help"))
    assert short == long != ""
    assert CliRunner().invoke(main, ["--version"]).output.endswith(f" {version('hilbert-lib')}\n")


def test_a_warning_is_told_in_a_line_without_the_code_that_gave_it(hilbert, monkeypatch):
    told, usual = [], warnings.formatwarning
    monkeypatch.setattr(claim, "read_ledger", lambda: told.append(warnings.formatwarning("twice", UserWarning, "a", 1)))
    hilbert("claims", "K3", status=1)  # it has no ledger then
    assert told == ["UserWarning: twice\n"]
    assert warnings.formatwarning is usual


def test_claims_without_a_checkout_are_told_of_in_a_line(hilbert, monkeypatch):
    monkeypatch.setattr(claim.read_ledger, "__defaults__", (Path("elsewhere/claims.yml"),))
    assert "no ledger of claims at elsewhere/claims.yml" in hilbert("claims", status=2)


def test_a_report_of_nothing_is_refused(hilbert):
    Path("empty").mkdir()
    assert "no runs in empty" in hilbert("report", "empty", status=2)


def test_figures_are_drawn_again_from_their_tables(hilbert, monkeypatch):
    write_notebook(Path("notebooks"), "00_a")
    index = Path(hilbert("run").splitlines()[-1])
    redrawn = []
    monkeypatch.setattr("hilbert_lib.lab.figures.redraw", lambda folder: redrawn.append(folder) or ["a.png", "b.png"])
    assert "2 figures redrawn" in hilbert("report", "--redraw")
    assert redrawn == [index.parent]


def test_runs_are_compared_on_the_same_hardware_alone(hilbert):
    for name in ("a", "b"):
        Path(name).mkdir()
        append_records([measure(Case("add", lambda: 1 + 1, {"n": 1}, error=0.0), device="cpu", repetitions=3)], name)
    assert re.search(r"^ *name .*ratio.*\n *add ", hilbert("compare", "a", "b"))
    record = json.loads(Path("b/results.jsonl").read_text())
    record["environment"]["hardware"] = "NVIDIA H200"
    Path("b/results.jsonl").write_text(json.dumps(record) + "\n")
    assert "b on NVIDIA H200" in hilbert("compare", "a", "b", status=2)


def test_doctor_finds_this_machine_healthy(hilbert):
    output = hilbert("doctor")
    assert "BROKEN" not in output
    kernels = [] if doctor.kernel_mode() == "absent" else ["kernels"]
    for subject in ("python", "packages", "pins", "gpu", *kernels, "kernel", "reports", "disk"):
        assert re.search(rf"^ok +{subject} ", output, re.MULTILINE)


def test_doctor_says_how_to_mend_a_gpu_that_torch_cannot_use(hilbert, monkeypatch):
    def refuse():
        raise RuntimeError("this torch cannot use the GPU: torch 2.13.0+cpu; install torch's CUDA build")

    monkeypatch.setattr(doctor, "check_gpu", refuse)
    output = hilbert("doctor", status=1)
    assert re.search(r"^BROKEN +gpu +this torch cannot use the GPU", output, re.MULTILINE)
    assert "fix: install torch's CUDA build" in output


@pytest.mark.parametrize("fault", [TypeError("only 0-dimensional arrays\nin numpy"), None], ids=["raises", "is wrong"])
def test_doctor_runs_the_kernels_that_it_tells_of(hilbert, monkeypatch, fault):
    pytest.importorskip("triton")
    attend = doctor.dilated_attention

    def fail(q, k, v, pattern, *, backend):
        if backend == "triton" and fault is not None:
            raise fault
        return attend(q, k, v, pattern, backend=backend) + (backend == "triton")

    monkeypatch.setattr(doctor, "dilated_attention", fail)
    output = hilbert("doctor", status=1)
    told = "not what the reference gives" if fault is None else "TypeError: only 0-dimensional arrays$"
    assert re.search(rf"^BROKEN +kernels +the fused ones fail on 16 tokens: {told}", output, re.MULTILINE)


def test_doctor_says_how_to_mend_packages_disk_and_folder(hilbert, monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _name: ["torch>=99", "no-such-package"])
    monkeypatch.setattr(doctor, "NEEDED_MB", 2**40)

    def refuse(**_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    output = hilbert("doctor", status=1)
    assert output.count("BROKEN") == output.count("fix:") == 3
    assert "no-such-package is missing" in output


def test_doctor_serves_a_library_that_runs_from_its_folder(hilbert, monkeypatch):
    def absent(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "requires", absent)
    assert "not known: the library runs from its folder" in hilbert("doctor")


@pytest.mark.parametrize("program", ["elsewhere/bin/python", "gone/bin/python"])
def test_doctor_tells_an_environment_from_another_one_of_the_same_interpreter(monkeypatch, tmp_path, program):
    other = tmp_path / "elsewhere/bin/python"
    other.parent.mkdir(parents=True)
    other.symlink_to(Path(sys.executable).resolve())
    for path, found in ((tmp_path / program, "another Python"), (Path(sys.executable), "in this Python")):
        monkeypatch.setattr(doctor.KernelSpecManager, "get_kernel_spec", lambda *_, path=path: Mock(argv=[str(path)]))
        assert found in doctor._kernel().found


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_variable_that_says_nothing_of_the_code_is_told_without_a_traceback(hilbert, monkeypatch, command):
    def refuse():
        raise ValueError("HILBERT_DIRTY must be 0 or 1, got 'perhaps'")

    write_notebook(Path("notebooks"), "00_a")
    for module in ("lab.environment", "lab.suite.doctor"):
        monkeypatch.setattr(f"hilbert_lib.{module}.environment", refuse)
    assert "HILBERT_DIRTY must be 0 or 1" in hilbert(command, status=2)


def test_an_axis_without_a_value_is_refused(hilbert):
    write_notebook(Path("notebooks"), "00_a", WRITE)
    assert "seq_len must have at least one value" in hilbert("sweep", "00_a", "-p", "seq_len", "", status=2)
