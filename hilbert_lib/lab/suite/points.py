"""Notebooks, and points: a notebook with values for its parameters, known by a key."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat

from hilbert_lib.lab.suite.parameters import (
    Parameter,
    Value,
    check_name,
    check_value,
    parse_value,
    read_parameter_file,
    read_parameters,
)
from hilbert_lib.machine import code_hash

OUTPUT_DIR = "output_dir"  # the parameter that the suite sets itself


@dataclass(frozen=True)
class Notebook:
    """A notebook as the suite needs it.

    `title` and `question` are its first heading and what stands below, `answer` the paragraph below the
    heading that says "Answer"; empty where there is none.
    """

    path: Path
    title: str
    question: str
    answer: str
    parameters: dict[str, Parameter]
    code_hash: str

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Point:
    """One run to be made: a notebook and those parameters that differ from its defaults."""

    notebook: Notebook
    changes: dict[str, Value]

    @property
    def parameters(self) -> dict[str, Value]:
        """All parameters with their values, but for the output folder."""
        defaults = {name: parameter.default for name, parameter in self.notebook.parameters.items()}
        return {name: self.changes.get(name, value) for name, value in defaults.items() if name != OUTPUT_DIR}

    @property
    def name(self) -> str:
        """Of the point's folder: the notebook's, and a hash of what differs from its defaults."""
        return f"{self.notebook.name}-{_digest(self.changes)}" if self.changes else self.notebook.name

    @property
    def key(self) -> str:
        """What makes two runs the same run: code of the notebook and of the library, and parameters."""
        return _digest([self.notebook.name, self.notebook.code_hash, code_hash(), self.parameters])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def notebooks_folder() -> Path:
    """The notebooks of the checkout that this library belongs to, else those of the current folder.

    Raises:
        ValueError: if neither is there.
    """
    candidates = [Path(__file__).parents[3] / "notebooks", Path.cwd() / "notebooks"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ValueError(f"no folder of notebooks: neither {candidates[0]} nor {candidates[1]}; name one")


def find_notebooks(folder: Path, names: Iterable[str] = ()) -> list[Notebook]:
    """The notebooks of a folder that are named, or all of them.

    Only these are read, so that a broken one stops no call for another.

    Args:
        folder: where they lie.
        names: with or without folder and `.ipynb`; none selects all.

    Returns:
        The notebooks, in the order of their names.

    Raises:
        ValueError: if there is none; for an unknown name, with the nearest one; for one that cannot be read.
    """
    paths = {path.stem: path for path in folder.glob("*.ipynb")}
    if not paths:
        raise ValueError(f"{folder} holds no notebooks (*.ipynb)")
    wanted = sorted({Path(name).name.removesuffix(".ipynb") for name in names} or paths)
    for name in wanted:
        check_name(name, sorted(paths), "notebook")
    return [read_notebook(paths[name]) for name in wanted]


def read_notebook(path: Path) -> Notebook:
    """What the suite needs to know of one notebook.

    Args:
        path: of the notebook.

    Raises:
        ValueError: naming the file, if it or its parameters cannot be read.
    """
    try:
        return _read_notebook(path)
    except Exception as error:  # nbformat and papermill raise a dozen types for a file that is no notebook
        raise ValueError(f"{path.name}: {error}") from error


def read_parameter_folder(folder: Path, notebooks: Path) -> dict[str, dict[str, object]]:
    """The values of every notebook's own file, NAME.yaml; a notebook without one has its defaults.

    Args:
        folder: of the files.
        notebooks: folder of the notebooks.

    Returns:
        Name of a notebook to its values, not yet checked against it.

    Raises:
        ValueError: if there is no file, or two for one notebook; for one that no notebook is named as, with the nearest
            name; or that `read_parameter_file` refuses.
    """
    files = sorted(folder.glob("*.y*ml"))
    if not files:
        raise ValueError(f"{folder} holds no parameters (NAME.yaml, as the notebook is named)")
    for file in files:
        check_name(file.stem, sorted(path.stem for path in notebooks.glob("*.ipynb")), "notebook")
        if len(same := [other.name for other in files if other.stem == file.stem]) > 1:
            raise ValueError(f"{file.stem} must have one file of parameters, got {' and '.join(same)}")
    return {file.stem: read_parameter_file(file) for file in files}


def make_points(
    notebooks: list[Notebook],
    texts: dict[str, str],
    values: dict[str, object],
    own: Mapping[str, dict[str, object]] | None = None,
) -> list[Point]:
    """Each notebook once: with values for all from the command line, and below them from a file or files.

    Args:
        notebooks: to be run.
        texts: name to word of the command line.
        values: name to value of a YAML file for all.
        own: `read_parameter_folder`; by default no notebook has values of its own.

    Returns:
        The points, in the order of the notebooks.

    Raises:
        ValueError: for a name that no notebook has, with the nearest one; or that only some have.
        TypeError: for a value of another type.
    """
    for name in [*values, *texts]:
        lacking = [notebook.name for notebook in notebooks if name not in notebook.parameters]
        if 0 < len(lacking) < len(notebooks):
            raise ValueError(
                f"{name} is no parameter of {', '.join(lacking)}; every notebook of the call must have it, "
                "so name only those that do"
            )
    return [_make_point(notebook, texts, values | (own or {}).get(notebook.name, {})) for notebook in notebooks]


def make_grid(notebook: Notebook, texts: dict[str, str], values: dict[str, object]) -> list[Point]:
    """One point for every combination of the values given on the command line.

    Args:
        notebook: to be run.
        texts: name to values: `1,2,4`, and for parameters that are lists `1,2;1,2,4`.
        values: name to the one value that a YAML file gives for all points.

    Returns:
        The points, the last name turning fastest, each once.

    Raises:
        ValueError: for a name that the notebook lacks, with the nearest one; for no value.
        TypeError: for a value of another type.
    """
    _check_names(notebook, texts)
    axes = {}
    for name, text in texts.items():
        annotation = notebook.parameters[name].annotation
        if not text:
            raise ValueError(f"{name} must have at least one value, got {text!r}")
        if annotation.startswith("list"):
            axes[name] = [parse_value(name, part, annotation) for part in text.split(";")]
            continue
        try:
            axes[name] = parse_value(name, text, f"list[{annotation}]")
        except TypeError as error:
            raise TypeError(f"each value of {name} must be {annotation}, got {text!r}") from error
    choices = (dict(zip(axes, choice, strict=True)) for choice in itertools.product(*axes.values()))
    points = [_make_point(notebook, {}, values | choice) for choice in choices]
    return list({point.name: point for point in points}.values())


def take_shard(points: list[Point], shard: str) -> list[Point]:
    """Every n-th point, for the i-th of n jobs.

    Args:
        points: all of them, in the same order for every job.
        shard: `i/n` with i from 1 to n.

    Returns:
        The points of this job; the n jobs together have each point once.

    Raises:
        ValueError: if shard is not of that form.

    >>> take_shard(["a", "b", "c"], "1/2")
    ['a', 'c']
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard must be i/n with i from 1 to n, as 1/4, got {shard!r}")
    return points[int(match[1]) - 1 :: int(match[2])]


def _read_notebook(path: Path) -> Notebook:
    cells = nbformat.read(path, as_version=4).cells
    # What runs and what is read; not the outputs, counts and identifiers that an editor changes.
    content = [[cell.cell_type, cell.source, cell.metadata.get("tags", [])] for cell in cells]
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    title, question = _first_section(prose, r"#+ +(.+)")
    _, answer = _first_section(prose, r"#+ +(Answer.*)")
    return Notebook(
        path=path,
        title=title or path.stem,
        question=question,
        answer=answer,
        parameters=read_parameters(path),
        code_hash=_digest(content),
    )


def _first_section(prose: str, heading: str) -> tuple[str, str]:
    """The first heading of that form, and the paragraph below it."""
    match = re.search(rf"^{heading}$\s*((?:.+\n?)*)", prose, re.MULTILINE)
    return (match[1].strip(), " ".join(match[2].split())) if match else ("", "")


def _make_point(notebook: Notebook, texts: dict[str, str], values: dict[str, object]) -> Point:
    _check_names(notebook, [*values, *texts])
    known = notebook.parameters
    chosen = {name: check_value(name, value, known[name].annotation) for name, value in values.items()}
    chosen |= {name: parse_value(name, text, known[name].annotation) for name, text in texts.items()}
    return Point(notebook, {name: value for name, value in chosen.items() if value != known[name].default})


def _check_names(notebook: Notebook, names: Iterable[str]) -> None:
    settable = [name for name in notebook.parameters if name != OUTPUT_DIR]
    for name in names:
        if name == OUTPUT_DIR:
            raise ValueError(f"{OUTPUT_DIR} is set for every run to its own folder; choose where with --out")
        check_name(name, settable, f"parameter of {notebook.name}")
