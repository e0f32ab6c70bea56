"""Notebooks, and points: a notebook with values for its parameters, known by a key."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hilbert_lib.lab.suite.parameters import (
    Parameter,
    Text,
    Value,
    check_name,
    parse_parameters,
    parse_value,
    read_parameter_file,
    split_items,
)

OUTPUT_DIR = "output_dir"  # the parameter that the suite sets itself
LONGEST_NAME = 80  # of the parameters in a folder's name; those that do not fit are left to the hash


@dataclass(frozen=True)
class Notebook:
    """A notebook as the suite needs it: `title` and `question` are its first heading and paragraph, `answer` the
    paragraph below the heading that says "Answer"; empty where there is none."""

    path: Path
    title: str
    question: str
    answer: str
    parameters: dict[str, Parameter]
    code_hash: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def settable(self) -> dict[str, Parameter]:
        """The parameters but for the output folder."""
        return {name: parameter for name, parameter in self.parameters.items() if name != OUTPUT_DIR}

    def facts(self) -> dict:
        """What there is to know before it runs, for programs."""
        parameters = [vars(parameter) for parameter in self.settable.values()]
        return {"name": self.name, "title": self.title, "question": self.question, "parameters": parameters}


@dataclass(frozen=True)
class Point:
    """One run to be made: a notebook and those parameters that differ from its defaults."""

    notebook: Notebook
    changes: dict[str, Value]

    @property
    def parameters(self) -> dict[str, Value]:
        """All parameters with their values, but for the output folder."""
        return {name: self.changes.get(name, known.default) for name, known in self.notebook.settable.items()}

    @property
    def name(self) -> str:
        """Of the point's folder: the notebook, what differs from its defaults as far as it fits, and a hash of it all.

        >>> Point(Notebook(Path("00_a.ipynb"), "", "", "", {}, ""), {"rates": [1, 2], "causal": True}).name
        '00_a-rates=1+2-causal=true-d07a2231'
        """
        words = []
        for name, value in self.changes.items():
            text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{name}=" + re.sub(r"[^\w.+]+", "_", text.lower() if isinstance(value, bool) else text))
        room = itertools.accumulate(map(len, words))
        words = [word for word, used in zip(words, room, strict=True) if used <= LONGEST_NAME]
        return "-".join([self.notebook.name, *words, *([_digest(self.changes)] if self.changes else [])])

    @property
    def key(self) -> str:
        """What makes two runs the same run: code of the notebook and of the library, and parameters."""
        from hilbert_lib.machine import code_hash  # with torch, which listing notebooks does not need

        return _digest([self.notebook.name, self.notebook.code_hash, code_hash(), self.parameters])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def say_values(values: dict[str, Value]) -> str:
    """Parameters in one line."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def find_notebooks(folder: Path | None = None, names: Iterable[str] = ()) -> list[Notebook]:
    """The notebooks of a folder that are named, or all; only these are read, so that a broken one stops no other.

    Without a folder, those of the checkout that this library belongs to, else of the current folder.
    """
    if folder is None:
        beside = Path(__file__).parents[3] / "notebooks"
        folder = beside if beside.is_dir() else Path("notebooks")
    paths = {path.stem: path for path in sorted(folder.glob("[!.]*.ipynb"))}
    if not paths:
        raise ValueError(
            f"{folder} holds no notebooks (*.ipynb): they come with the repository, not with the installed package. "
            "Run hilbert in a clone, or name the folder: --notebooks FOLDER"
        )
    wanted = sorted({Path(name).name.removesuffix(".ipynb") for name in names} or paths)
    for name in wanted:
        check_name(name, paths, "notebook")
    return [read_notebook(paths[name]) for name in wanted]


def read_notebook(path: Path) -> Notebook:
    """What the suite needs to know of one notebook; a ValueError names one that cannot be read."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        cells = [(cell["cell_type"], "".join(cell["source"]), cell["metadata"].get("tags", [])) for cell in cells]
        prose = "\n\n".join(source for kind, source, _ in cells if kind == "markdown")
        title, question = _first_section(prose, r"#+ +(.+)")
        _, answer = _first_section(prose, r"#+ +(Answer.*)")
        parameters = parse_parameters(next((source for _, source, tags in cells if "parameters" in tags), ""))
        # The hash is of what runs and what is read, not of outputs and counts, which an editor changes.
        return Notebook(path, title or path.stem, question, answer, parameters, _digest(cells))
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        told = repr(error) if isinstance(error, LookupError) else error
        raise ValueError(f"{path.name}: {told}") from error


def _first_section(prose: str, heading: str) -> tuple[str, str]:
    """The first heading of that form, and the paragraph below it."""
    match = re.search(rf"^{heading}$\s*((?:.+\n?)*)", prose, re.MULTILINE)
    return (match[1].strip(), " ".join(match[2].split())) if match else ("", "")


def make_points(
    notebook: Notebook, texts: dict[str, str], source: Path | None = None, *, is_sweep: bool = False
) -> list[Point]:
    """A notebook with the values of a file or folder (`source`) and, before these, the command line's words (`texts`).

    In a sweep each word is all values of its parameter, as `1,2,4` or of lists `1,2;1,2,4`: there is a point for every
    combination, the last name turning fastest. ValueError for an unknown name, TypeError for a value of another type.
    """
    axes = {name: _parse(notebook, name, text, is_sweep) for name, text in texts.items()}
    for name, text in _texts_of(source, notebook).items():
        try:
            axes.setdefault(name, _parse(notebook, name, text))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{source}: {error}") from error
    points = {}
    for values in itertools.product(*axes.values()):
        chosen = zip(axes, values, strict=True)
        point = Point(notebook, {name: value for name, value in chosen if value != notebook.parameters[name].default})
        points[point.name] = point
    return list(points.values())


def _parse(notebook: Notebook, name: str, text: Text, is_sweep: bool = False) -> list[Value]:
    """The values that a text gives to a parameter: one, or in a sweep all of them."""
    if name == OUTPUT_DIR:
        raise ValueError(f"{OUTPUT_DIR} is set for every run to its own folder; choose where with --out")
    check_name(name, notebook.settable, f"parameter of {notebook.name}")
    annotation = notebook.parameters[name].annotation
    parts = [text]
    if is_sweep:
        parts = text.split(";") if annotation.startswith("list") else split_items(text)
    return [parse_value(name, part, annotation) for part in parts]


def _texts_of(source: Path | None, notebook: Notebook) -> dict[str, Text]:
    """What a file sets for the notebook, or its own file NAME.yaml in a folder."""
    if source is None or not source.is_dir():
        return read_parameter_file(source) if source else {}
    if not (files := [path.name for path in source.glob("*.y*ml")]):
        raise ValueError(f"{source} holds no parameters (NAME.yaml, as the notebook is named)")
    for name in files:
        check_name(name, (f"{path.stem}.yaml" for path in notebook.path.parent.glob("*.ipynb")), "notebook's file")
    own = source / f"{notebook.name}.yaml"
    return read_parameter_file(own) if own.exists() else {}


def take_shard(points: list[Point], shard: str) -> list[Point]:
    """Every n-th point for the i-th of n jobs (`i/n`), which together have each point once.

    >>> take_shard(["a", "b", "c"], "1/2")
    ['a', 'c']
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard must be i/n with i from 1 to n, as 1/4, got {shard!r}")
    return points[int(match[1]) - 1 :: int(match[2])]
