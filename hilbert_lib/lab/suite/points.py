"""Notebooks, their parameters, and points: a notebook with values for its parameters, known by a key.

Whether values fit their parameters is known before anything runs.
"""

import ast
import csv
import difflib
import hashlib
import io
import itertools
import json
import math
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

OUTPUT_DIR = "output_dir"  # the parameter that the suite sets itself
IMPORT_SECONDS = 300.0  # for the imports of packages
LONGEST_NAME = 80  # of the parameters in a folder's name; those that do not fit are left to the hash
SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
ANNOTATIONS = {**SCALARS, **{f"list[{name}]": scalar for name, scalar in SCALARS.items()}}

Value = int | float | bool | str | list
Text = str | list[str]  # of the command line or a file; a file has lists too


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: its annotation, its default and its comment."""

    name: str
    annotation: str
    default: Value
    meaning: str


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
        """Facts that are known before it runs, for programs."""
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
        return {name: self.changes.get(name, parameter.default) for name, parameter in self.notebook.settable.items()}

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
        """Identity of a run: code of the notebook and of the library, and parameters."""
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
    stems = sorted({Path(name).name.removesuffix(".ipynb") for name in names} or paths)
    for name in stems:
        check_name(name, paths, "notebook")
    return [read_notebook(paths[name]) for name in stems]


def read_notebook(path: Path) -> Notebook:
    """Facts that the suite needs of one notebook; a ValueError names one that cannot be read."""
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
        reason = repr(error) if isinstance(error, LookupError) else error
        raise ValueError(f"{path.name}: {reason}") from error


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


def left_out(points: Iterable[Point]) -> list[str]:
    """A line for each package of kernels that parameters other than the defaults name and that cannot be used here.

    Notebooks print such a line among their outputs, which nobody reads before the end. Packages are imported in a
    process of their own, which may crash.
    """
    from hilbert_lib.attention.backends.presence import MODULES  # loads torch
    from hilbert_lib.launch.isolated import run_isolated

    wanted = {}
    for point in points:
        for name, value in point.changes.items():
            for package in value if isinstance(value, list) else [value]:
                if package in MODULES:
                    wanted[point.notebook.name, name, package] = None
    if not wanted:
        return []
    reasons: dict[str, str] = {}
    packages = sorted({package for *_, package in wanted})
    ending = run_isolated(f"{__name__}:breakages", [packages], seconds=IMPORT_SECONDS, on_record=reasons.update)
    found = [(*place, reasons.get(place[-1], f"its import {ending.status}: {ending.cause}")) for place in wanted]
    return [
        f"{notebook}: {name} has {package}, which cannot be used here: {reason}"
        for notebook, name, package, reason in found
        if reason
    ]


def breakages(packages: list[str]) -> Iterator[dict[str, str]]:
    """For each package its name with the reason why it does not load, or with ""."""
    from hilbert_lib.attention.backends.presence import breakage

    for package in packages:
        yield {package: breakage(package)}


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
    """Values that a file sets for the notebook, or its own file NAME.yaml in a folder."""
    if source is None or not source.is_dir():
        return read_parameter_file(source) if source else {}
    if not (files := [path.name for path in source.glob("*.y*ml")]):
        raise ValueError(f"{source} holds no parameters (NAME.yaml, as the notebook is named)")
    for name in files:
        check_name(name, (f"{path.stem}.yaml" for path in notebook.path.parent.glob("*.ipynb")), "notebook's file")
    file = source / f"{notebook.name}.yaml"
    return read_parameter_file(file) if file.exists() else {}


def take_shard(points: list[Point], shard: str) -> list[Point]:
    """Every n-th point for the i-th of n jobs (`i/n`), which together have each point once."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard must be i/n with i from 1 to n, as 1/4, got {shard!r}")
    return points[int(match[1]) - 1 :: int(match[2])]


def parse_parameters(source: str) -> dict[str, Parameter]:
    """The parameters that the code of a cell declares, by name and in order; a ValueError says what is none."""
    lines = ast.parse(source).body
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}
    parameters = {}
    for line in lines:
        text = ast.unparse(line)
        if not isinstance(line, ast.AnnAssign) or line.value is None:
            raise ValueError(f"a parameters cell holds `name: type = literal` only, got `{text}`")
        name, annotation = ast.unparse(line.target), ast.unparse(line.annotation)
        if annotation not in ANNOTATIONS:
            raise ValueError(f"the type of a parameter must be one of {', '.join(ANNOTATIONS)}, got `{text}`")
        try:
            default = check_value(name, ast.literal_eval(line.value), annotation)
        except (ValueError, TypeError) as error:
            raise ValueError(f"`{text}` is no literal of its type: {error}") from error
        parameters[name] = Parameter(name, annotation, default, comments.get(line.end_lineno, ""))
    return parameters


def check_value(name: str, value: object, annotation: str) -> Value:
    """The value if it is of the annotated type, else a TypeError; an int serves as a float, nothing else is bent."""
    scalar, is_list = ANNOTATIONS[annotation], annotation.startswith("list")
    items = value if is_list else [value]
    if isinstance(items, list):
        items = [float(item) if scalar is float and type(item) is int else item for item in items]
        if all(type(item) is scalar for item in items):
            _check_finite(name, items)
            return items if is_list else items[0]
    raise TypeError(f"{name} must be {annotation}, got {value!r}")


def _check_finite(name: str, items: list) -> None:
    # A notebook and its manifest are JSON, which has no other numbers.
    for item in items:
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{name} must be finite, got {item}")


def parse_value(name: str, text: Text, annotation: str) -> Value:
    """Value of a text: `4`, `1e-3`, `true`, `any text`; of a list `1,2,4` or `[1, 2]`."""
    value = _read_value(name, text, annotation)
    _check_finite(name, value if isinstance(value, list) else [value])
    return value


def _read_value(name: str, text: Text, annotation: str) -> Value:
    scalar, is_list = ANNOTATIONS[annotation], annotation.startswith("list")
    try:
        if is_list:
            items = split_items(text) if isinstance(text, str) else text
            return [_read_value(name, item, scalar.__name__) for item in items]
        text.encode()  # an error for a list, and for bytes of the command line that are no text
        return {"true": True, "false": False}[text.lower()] if scalar is bool else scalar(text)
    except (ValueError, KeyError, AttributeError, TypeError, csv.Error) as error:
        raise TypeError(f"{name} must be {annotation}, got {text!r}") from error


def split_items(text: str) -> list[str]:
    """Parts between commas; what is in quotes stays together. Not YAML's: to it `# & * ! %` in a text have a meaning.

    >>> split_items("[a=1 # b, 'c,d']")
    ['a=1 # b', 'c,d']
    """
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    quotes = '"' if '"' in text else "'"
    (items,) = csv.reader([text], quotechar=quotes, skipinitialspace=True, strict=True)
    return [item.strip() for item in items]


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Refuse an unknown name with a ValueError that tells the nearest known one, or all where none is near."""
    if name not in (known := list(known)):
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise ValueError(f"no {what} is named {name!r}; {advice}")


def read_parameter_file(path: Path) -> dict[str, Text]:
    """The texts of a flat YAML file by name: to YAML 1.1 itself 010 is 8, 1:30 is 90, and 1e-3 is no number."""
    try:
        root = yaml.compose(path.read_bytes(), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} must be flat, lines `name: value`")
    texts = {}
    for name, node in root.value:
        is_list = isinstance(node, yaml.SequenceNode)
        if not all(isinstance(scalar, yaml.ScalarNode) for scalar in [name, *(node.value if is_list else [node])]):
            raise ValueError(f"{path} must be flat, lines `name: value`, and line {name.start_mark.line + 1} is not")
        if name.value in texts:
            raise ValueError(f"{path} gives {name.value} more than once")
        texts[name.value] = [scalar.value for scalar in node.value] if is_list else node.value
    return texts
