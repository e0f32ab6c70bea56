"""Notebooks, and points: a notebook with values for its parameters, known by a key."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hilbert_lib.lab.suite import parameters as given
from hilbert_lib.lab.suite.parameters import Parameter, Value, check_name, parse_value

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
        """Of the point's folder: the notebook, what differs from its defaults as far as it fits, and a hash of it all.

        >>> Point(Notebook(Path("00_a.ipynb"), "", "", "", {}, ""), {"rates": [1, 2], "causal": True}).name
        '00_a-rates=1+2-causal=true-d07a2231'
        """
        words, room = [self.notebook.name], LONGEST_NAME
        for name, value in self.changes.items():
            word = f"{name}={say_value(value)}"
            if (room := room - len(word)) < 0:
                break
            words.append(word)
        return "-".join([*words, _digest(self.changes)]) if self.changes else self.notebook.name

    @property
    def key(self) -> str:
        """What makes two runs the same run: code of the notebook and of the library, and parameters."""
        from hilbert_lib.machine import code_hash  # with torch, which listing notebooks does not need

        return _digest([self.notebook.name, self.notebook.code_hash, code_hash(), self.parameters])


def say_value(value: Value) -> str:
    """A value as a folder's name can hold it."""
    text = "+".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^\w.+]+", "_", text.lower() if isinstance(value, bool) else text)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def notebooks_folder() -> Path:
    """The notebooks of the checkout that this library belongs to, else those of the current folder."""
    candidates = [Path(__file__).parents[3] / "notebooks", Path.cwd() / "notebooks"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise ValueError(
        f"no notebooks: they come with the repository, not with the installed package, and neither {candidates[0]} nor "
        f"{candidates[1]} is there. Clone the repository and run hilbert in it, or name the folder: --notebooks FOLDER"
    )


def find_notebooks(folder: Path, names: Iterable[str] = ()) -> list[Notebook]:
    """The notebooks of a folder that are named, or all; only these are read, so that a broken one stops no other."""
    paths = {path.stem: path for path in folder.glob("*.ipynb")}
    if not paths:
        raise ValueError(f"{folder} holds no notebooks (*.ipynb)")
    wanted = sorted({Path(name).name.removesuffix(".ipynb") for name in names} or paths)
    for name in wanted:
        check_name(name, sorted(paths), "notebook")
    return [read_notebook(paths[name]) for name in wanted]


def read_notebook(path: Path) -> Notebook:
    """What the suite needs to know of one notebook; a ValueError names one that cannot be read."""
    try:
        cells = given.read_cells(path)
        prose = "\n\n".join(source for kind, source, _ in cells if kind == "markdown")
        title, question = _first_section(prose, r"#+ +(.+)")
        _, answer = _first_section(prose, r"#+ +(Answer.*)")
        # The hash is of what runs and what is read, not of outputs and counts, which an editor changes.
        return Notebook(path, title or path.stem, question, answer, given.read_parameters(path), _digest(cells))
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"{path.name}: {error!r}" if isinstance(error, LookupError) else f"{path.name}: {error}"
        ) from error


def _first_section(prose: str, heading: str) -> tuple[str, str]:
    """The first heading of that form, and the paragraph below it."""
    match = re.search(rf"^{heading}$\s*((?:.+\n?)*)", prose, re.MULTILINE)
    return (match[1].strip(), " ".join(match[2].split())) if match else ("", "")


def read_parameter_folder(folder: Path, notebooks: Path) -> dict[str, dict[str, object]]:
    """The values of every notebook's own file, NAME.yaml, by the notebook's name."""
    files = sorted(folder.glob("*.y*ml"))
    if not files:
        raise ValueError(f"{folder} holds no parameters (NAME.yaml, as the notebook is named)")
    for file in files:
        check_name(file.stem, sorted(path.stem for path in notebooks.glob("*.ipynb")), "notebook")
        if len(same := [other.name for other in files if other.stem == file.stem]) > 1:
            raise ValueError(f"{file.stem} must have one file of parameters, got {' and '.join(same)}")
    return {file.stem: given.read_parameter_file(file) for file in files}


def make_points(
    notebooks: list[Notebook],
    texts: dict[str, str],
    values: dict[str, object],
    own: Mapping[str, dict[str, object]] | None = None,
) -> list[Point]:
    """Each notebook once: with the command line's words (`texts`), before a file's values for all, before its `own`.

    ValueError for a name that not every notebook has, TypeError for a value of another type.
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
    """One point for every combination of the values in `texts` (`1,2,4`, of lists `1,2;1,2,4`), the last name turning
    fastest, with a file's `values` for all. ValueError for an unknown name or no value, TypeError for another type."""
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
    # What turns comes first, also in the folder's name.
    points = [_make_point(notebook, {}, choice | {**values, **choice}) for choice in choices]
    return list({point.name: point for point in points}.values())


def take_shard(points: list[Point], shard: str) -> list[Point]:
    """Every n-th point for the i-th of n jobs (`i/n`), which together have each point once.

    >>> take_shard(["a", "b", "c"], "1/2")
    ['a', 'c']
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard must be i/n with i from 1 to n, as 1/4, got {shard!r}")
    return points[int(match[1]) - 1 :: int(match[2])]


def _make_point(notebook: Notebook, texts: dict[str, str], values: dict[str, object]) -> Point:
    _check_names(notebook, [*values, *texts])
    known = notebook.parameters
    chosen = {name: given.check_value(name, value, known[name].annotation) for name, value in values.items()}
    chosen |= {name: parse_value(name, text, known[name].annotation) for name, text in texts.items()}
    return Point(notebook, {name: value for name, value in chosen.items() if value != known[name].default})


def _check_names(notebook: Notebook, names: Iterable[str]) -> None:
    settable = [name for name in notebook.parameters if name != OUTPUT_DIR]
    for name in names:
        if name == OUTPUT_DIR:
            raise ValueError(f"{OUTPUT_DIR} is set for every run to its own folder; choose where with --out")
        check_name(name, settable, f"parameter of {notebook.name}")
