"""What a notebook's parameters are, and whether given values fit them, before anything runs."""

import ast
import csv
import difflib
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

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


def parse_parameters(source: str) -> dict[str, Parameter]:
    """The parameters that the code of a cell declares, by name and in order; a ValueError says what is none."""
    lines = ast.parse(source).body
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0]: each.string[1:].strip() for each in tokens if each.type == tokenize.COMMENT}
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
            return items if is_list else items[0]
    raise TypeError(f"{name} must be {annotation}, got {value!r}")


def parse_value(name: str, text: Text, annotation: str) -> Value:
    """What a text means: `4`, `1e-3`, `true`, `any text`; of a list `1,2,4` or `[1, 2]`."""
    scalar, is_list = ANNOTATIONS[annotation], annotation.startswith("list")
    try:
        if is_list:
            items = split_items(text) if isinstance(text, str) else text
            return [parse_value(name, item, scalar.__name__) for item in items]
        text.encode()  # an error for a list, and for bytes of the command line that are no text
        return {"true": True, "false": False}[text.lower()] if scalar is bool else scalar(text)
    except (ValueError, KeyError, AttributeError, TypeError, csv.Error) as error:
        raise TypeError(f"{name} must be {annotation}, got {text!r}") from error


def split_items(text: str) -> list[str]:
    """What commas separate; what is in quotes stays together. Not YAML's: to it `# & * ! %` in a text have a meaning.

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
        if not all(isinstance(each, yaml.ScalarNode) for each in [name, *(node.value if is_list else [node])]):
            raise ValueError(f"{path} must be flat, lines `name: value`, and line {name.start_mark.line + 1} is not")
        if name.value in texts:
            raise ValueError(f"{path} gives {name.value} more than once")
        texts[name.value] = [each.value for each in node.value] if is_list else node.value
    return texts
