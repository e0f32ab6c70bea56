"""What sets the project up: scripts/setup.sh with stand-ins for python, pip and df, and the files for conda."""

import json
import platform
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from own_processes import PATIENCE
from packaging.requirements import Requirement
from rattler import MatchSpec, Version, VersionSpec

ROOT = Path(__file__).parents[1]
TOOLS = ("sh", "cat", "cksum", "awk", "tail", "grep", "mkdir", "cp", "chmod", "dirname")

# One script stands in for every interpreter; the files beside the project say what it lacks. It logs its calls.
PYTHON = """#!/bin/sh
echo "$*" >>calls.log
case "$*" in
    *version_info*) [ ! -e too-old ] ;;
    *ensurepip*) [ ! -e no-venv-module ] ;;
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
        [ ! -e no-ensurepip ] || { echo "ensurepip is not available" >&2; exit 1; }
        echo pip >"$3/has-pip" ;;
    "-m pip --version") [ -e .venv/has-pip ] ;;
    "-m pip "*)
        [ -e .venv/has-pip ] || { echo "No module named pip" >&2; exit 1; }
        [ ! -e pip-says ] || { cat pip-says; exit 1; } ;;
    --version) echo "Python 3.12.0" ;;
esac
"""
DF = """#!/bin/sh
echo "$*" >df-of
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/disk 99999999 1 $((1024 * $(cat free-mb))) 1% /"
"""


class Project:
    """A copy of what setup.sh reads, and a PATH that holds nothing else."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        (folder / "scripts").mkdir()
        self.bin.mkdir()
        for file in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
            shutil.copy(ROOT / file, folder / file)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.program("python3", PYTHON)
        self.program("df", DF)
        self.put("free-mb", "50000")

    def program(self, name, script):
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def put(self, name, text=""):
        (self.folder / name).write_text(text)

    def setup(self, venv=".venv", extras=None, **variables):
        return subprocess.run(
            [self.bin / "sh", "scripts/setup.sh", venv, *([extras] if extras else [])],
            cwd=self.folder,
            env={"PATH": str(self.bin), **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def installations(self):
        return (self.folder / "calls.log").read_text().count("-m pip install")


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_the_environment_is_made_and_a_second_call_does_nothing_until_the_pins_change(project):
    (project.bin / "python3").rename(project.bin / "mine")  # the interpreter that is named is taken
    done = project.setup(PYTHON="mine")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "setup: ready"
    assert project.installations() == 1
    calls = (project.folder / "calls.log").read_text()
    assert "-c constraints.txt -e .[dev]" in calls
    done = project.setup()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (project.folder / "calls.log").read_text() == calls
    project.put("constraints.txt", "numpy==2.0.0\n")
    (project.bin / "mine").rename(project.bin / "python3")
    assert project.setup().returncode == 0
    assert project.installations() == 2


NO_PYTHON = "no Python 3.11 or later was found"


@pytest.mark.parametrize(
    ("lack", "how", "words"),
    [
        ("python3", {}, (NO_PYTHON, "make PYTHON=")),
        ("too-old", {}, (NO_PYTHON,)),
        ("too-old", {"PYTHON": "python3"}, ("PYTHON=python3", "3.11 or later")),
        ("no-venv-module", {}, ("python3 has no venv module", "apt install python3-venv")),
        ("free-mb", {}, ("the disk of . has 100 MB free", "needs 4000 MB")),
        ("free-mb", {"venv": "other disk/new/.venv"}, ("the disk of other disk has 100 MB free",)),
    ],
)
def test_what_is_missing_is_told_in_one_line_before_anything_is_made(project, lack, how, words):
    (project.folder / "other disk").mkdir()
    if lack == "python3":
        (project.bin / "python3").unlink()
    else:
        project.put(lack, "100")
    done = project.setup(**how)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ")
    assert all(word in line for word in words)
    assert not (project.folder / ".venv").exists()
    if lack == "free-mb":
        measured = "other disk" if how else "."
        assert (project.folder / "df-of").read_text() == f"-Pk {measured}\n"


@pytest.mark.parametrize(
    ("fault", "text", "shown", "last"),
    [
        ("pip-says", "[Errno 28] No space left on device", "", "the disk is full; free some space"),
        ("pip-says", "No matching distribution found", "No matching distribution", "pip could not install the"),
        ("no-ensurepip", "", "", "python3 could not make a virtual environment in .venv."),
    ],
)
def test_a_set_up_that_failed_says_why_and_is_tried_again(project, fault, text, shown, last):
    project.put(fault, f"ERROR: {text}\n")
    done = project.setup()
    assert done.returncode == 1
    assert shown in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"setup: {last}")
    (project.folder / fault).unlink()
    assert project.setup().returncode == 0
    assert project.installations() == 1 + (fault == "pip-says")


def test_the_public_workflow_runs_the_commands_with_the_pinned_torch():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    expected = {
        "test": ["make test", "make test-releases", "make test-public", "make reports"],
        "clients": ["make test-clients"],
    }
    assert jobs.keys() == expected.keys()
    for name, job in jobs.items():
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands[1:] == expected[name]
        assert pin in commands[0].split()


def test_the_image_sets_up_what_the_workflow_does_and_leaves_out_nothing_that_setup_reads():
    """Held against the files that it names: nothing here can build it."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    steps = re.sub(r"\\\n\s*", "", dockerfile)
    base = re.search(r"^FROM python:(\d+\.\d+)-slim", steps, re.M).group(1)
    assert Requirement(f"python{PYPROJECT['requires-python']}").specifier.contains(base)
    assert f"Python {base}" in (ROOT / "constraints.txt").read_text().splitlines()[0]
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]["steps"]
    (torch_install,) = [
        line for step in workflow for line in step.get("run", "").splitlines() if "--torch-backend" in line
    ]
    assert torch_install.split()[-1] == pin
    assert f"--torch-backend=cpu {pin}\n" in steps
    system = re.search(r"apt-get install -y --no-install-recommends ([\w+ ]+?) *&&", steps).group(1).split()
    assert {"git", "make", "g++"} <= set(system)  # the README's two, and torch.compile's
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    command = json.loads(re.search(r"^CMD (.+)$", steps, re.M).group(1))
    called = [*re.findall(r"(?:RUN|hilbert) make ([a-z]+)", steps), command[1]]
    assert set(called) <= targets
    assert {"setup", "lab"} <= set(called)
    assert steps.index("COPY --chown=reader . ./") < steps.index("RUN make setup")
    ignored = (ROOT / ".dockerignore").read_text().split()
    needed = [
        "pyproject.toml",
        "constraints.txt",
        "scripts/setup.sh",
        "README.md",
        "LICENSE",
        "hilbert_lib",
        "notebooks",
    ]
    for path in [*needed, "reports/h200", "reports/README.md", "docs"]:
        assert (ROOT / path).exists()
        assert not any(fnmatch(f"{path}/", f"{pattern.rstrip('/')}/*") or path == pattern for pattern in ignored), path


def test_the_libraries_of_the_clients_are_pinned_and_in_an_environment_of_their_own(project):
    assert project.setup(".venv", extras="dev,clients").returncode == 0
    assert "-c constraints.txt -e .[dev,clients]" in (project.folder / "calls.log").read_text()
    pinned = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    clients = [Requirement(line).name for line in PYPROJECT["optional-dependencies"]["clients"]]
    assert set(clients) <= set(pinned)


def test_the_citation_has_the_version_and_the_licence_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PYPROJECT["version"], PYPROJECT["license"])


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = {"environment.yml": "pytorch-gpu", "environment-cpu.yml": "pytorch-cpu"}
# PyPI's name -> conda-forge's, where that is not the same in small letters; torch's is the file's own.
CONDA_NAMES = {"matplotlib": "matplotlib-base", "jupyter-client": "jupyter_client"}
PIP_ONLY = {"numpy-hilbert-curve"}  # has no conda package; `pip: -e .[suite]` installs it
BESIDE_PYPROJECT = {"python", "pip", "c-compiler", "cxx-compiler"}


def requirements(file):
    """conda's name -> PyPI's requirement."""
    lines = PYPROJECT["dependencies"] + PYPROJECT["optional-dependencies"]["suite"]
    names = CONDA_NAMES | {"torch": FILES[file]}
    return {
        names.get(each.name, each.name.lower()): each for each in map(Requirement, lines) if each.name not in PIP_ONLY
    }


def specs(file):
    """conda's name -> its line, read strictly."""
    lines = [line for line in contents(file)["dependencies"] if isinstance(line, str)]
    return {spec.name.normalized: spec for spec in (MatchSpec(line, strict=True) for line in lines)}


def contents(file):
    return yaml.safe_load((ROOT / file).read_text())


@pytest.mark.parametrize("file", FILES)
def test_conda_and_pyproject_ask_for_the_same_packages_in_ranges_that_the_installed_satisfy(file):
    for name, spec in specs(file).items():
        bounds = spec.version.split(",")
        assert [bound.rstrip("0123456789.") for bound in bounds] == [">=", "<"], name
        assert "." not in bounds[1], f"{name}: the upper bound is a major version"
    assert specs(file).keys() == requirements(file).keys() | BESIDE_PYPROJECT
    assert specs(file)["python"].version.split(",")[0] == PYPROJECT["requires-python"]
    installed = {"python": platform.python_version(), "pip": version("pip")}
    for name, requirement in requirements(file).items():
        assert set(specs(file)[name].version.split(",")) == {str(bound) for bound in requirement.specifier}, name
        if requirement.marker is None or requirement.marker.evaluate():
            installed[name] = version(requirement.name)
    for name, found in installed.items():
        assert VersionSpec(specs(file)[name].version).matches(Version(found)), f"{name} {found}"


def test_pip_installs_the_project_alone_no_other_channel_is_asked_and_the_files_differ_in_the_torch_line():
    for file in FILES:
        (pip_section,) = (line for line in contents(file)["dependencies"] if not isinstance(line, str))
        assert pip_section == {"pip": ["-e .[suite]"]}
        assert contents(file)["channels"] == ["conda-forge", "nodefaults"]
    gpu, cpu = ((ROOT / file).read_text().splitlines() for file in FILES)
    assert len(gpu) == len(cpu)
    (difference,) = (pair for pair in zip(gpu, cpu, strict=True) if pair[0] != pair[1])
    assert difference == (difference[0], difference[0].replace("pytorch-gpu", "pytorch-cpu"))
    assert difference[0].strip().startswith("- pytorch-gpu ")
