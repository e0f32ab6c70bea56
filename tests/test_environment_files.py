"""What can be known of the conda files without a conda channel."""

import platform
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from rattler import MatchSpec, Version, VersionSpec

ROOT = Path(__file__).parents[1]
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


@pytest.fixture(params=FILES)
def file(request):
    return request.param


def test_every_line_parses_strictly_and_bounds_the_major_version(file):
    for name, spec in specs(file).items():
        bounds = spec.version.split(",")
        assert [bound.rstrip("0123456789.") for bound in bounds] == [">=", "<"], name
        assert "." not in bounds[1], f"{name}: the upper bound is a major version"


def test_conda_and_pyproject_ask_for_the_same_packages_in_ranges_that_the_installed_satisfy(file):
    assert specs(file).keys() == requirements(file).keys() | BESIDE_PYPROJECT
    assert specs(file)["python"].version.split(",")[0] == PYPROJECT["requires-python"]
    installed = {"python": platform.python_version(), "pip": version("pip")}
    for name, requirement in requirements(file).items():
        assert set(specs(file)[name].version.split(",")) == {str(bound) for bound in requirement.specifier}, name
        if requirement.marker is None or requirement.marker.evaluate():
            installed[name] = version(requirement.name)
    for name, found in installed.items():
        assert VersionSpec(specs(file)[name].version).matches(Version(found)), f"{name} {found}"


def test_pip_installs_the_project_alone_and_no_other_channel_is_asked(file):
    (pip_section,) = (line for line in contents(file)["dependencies"] if not isinstance(line, str))
    assert pip_section == {"pip": ["-e .[suite]"]}
    assert contents(file)["channels"] == ["conda-forge", "nodefaults"]


def test_the_two_files_differ_in_the_torch_line_alone():
    gpu, cpu = ((ROOT / file).read_text().splitlines() for file in FILES)
    assert len(gpu) == len(cpu)
    (difference,) = (pair for pair in zip(gpu, cpu, strict=True) if pair[0] != pair[1])
    assert difference == (difference[0], difference[0].replace("pytorch-gpu", "pytorch-cpu"))
    assert difference[0].strip().startswith("- pytorch-gpu ")
