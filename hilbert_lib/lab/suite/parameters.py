"""What a notebook's parameters are, and whether given values fit them, before anything runs."""

import ast
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


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: its annotation, its default and its comment."""

    name: str
    annotation: str
    default: Value
    meaning: str


def parse_parameters(source: str) -> dict[str, Parameter]:
    """The parameters that the code of a cell declares, by name and in order; a ValueError says what is none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}
    parameters = {}
    for line in ast.parse(source).body:
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


def parse_value(name: str, text: str, annotation: str) -> Value:
    """What a word of the command line means: `4`, `1e-3`, `true`, `any text`; of a list `1,2,4` or `[1, 2]`."""
    scalar = ANNOTATIONS[annotation]
    try:
        if not annotation.startswith("list"):
            return {"true": True, "false": False}[text.lower()] if scalar is bool else scalar(text)
        # BaseLoader leaves every item a string, so that items and scalars are read by one rule; quotes work.
        items = yaml.load(text if text.lstrip().startswith("[") else f"[{text}]", yaml.BaseLoader)
        if not all(isinstance(item, str) for item in items):
            raise TypeError("a list within the list")
        return [parse_value(name, item, scalar.__name__) for item in items]
    except (ValueError, KeyError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise TypeError(f"{name} must be {annotation}, got {text!r}") from error


def check_name(name: str, known: Iterable[str], what: str) -> None:
    """Refuse an unknown name with a ValueError that tells the nearest known one, or all where none is near."""
    if name not in (known := list(known)):
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
        raise ValueError(f"no {what} is named {name!r}; {advice}")


def read_parameter_file(path: Path) -> dict[str, object]:
    """The values of a flat YAML file, as `papermill -f` takes it too, not yet checked against a notebook."""
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ValueError(f"{path} must be flat, lines `name: value`, got {values!r}")
    return {str(name): value for name, value in values.items()}
