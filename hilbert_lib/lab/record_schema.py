"""The schema of records, in which no speed stands without a check that passed, and what is wrong with a record.

`python -m hilbert_lib.lab.record_schema FOLDER` checks every record below a folder: a run that a stranger sends in.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from hilbert_lib.lab.records import PACKED, read_records

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).with_name("record_schema.json")
TIMED_KINDS = ("comparison", "measurement", "back to back", "point", "cause", "training")


def faults_of(record: dict) -> list[str]:
    """Everything that the schema finds wrong with a record, each with its place; empty where it holds.

    >>> faults_of({"kind": "counters", "counted": {}})
    []
    >>> faults_of({"kind": "counters", "median_ms": 0.5})
    ["record: 'median_ms' should not be valid under {'pattern': '(^|_)ms$|_ms_|per_s$'}"]
    """
    faults = []
    for error in _validator(_definition(record)).iter_errors(record):
        place = ".".join(map(str, error.absolute_path)) or "record"
        faults.append(f"{place}: {error.message[:300]}")
    return faults + [f"{place}: must be finite, got {value}" for place, value in _not_finite(record)]


def _not_finite(value: object, place: str = "") -> Iterator[tuple[str, float]]:
    # JSON has no such numbers, yet Python writes and reads them, and no bound of a schema holds one back.
    if isinstance(value, float) and not isfinite(value):
        yield place, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield from _not_finite(each, f"{place}.{name}" if place else str(name))


def faults_below(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The faults of every record below a folder: the file, the place in it, and the fault.

    A file without a record is a fault: nothing of what it was to show is checked.
    """
    for file in files_below(folder):
        records = read_records(file)  # which warns of a line that a killed run left unfinished
        if not records:
            yield file, "all lines", "no record"
        for place, record in enumerate(records, start=1):
            yield from ((file, f"record {place}", fault) for fault in faults_of(record))


def files_below(folder: Path) -> list[Path]:
    """The files of records below a folder, as `read_records` takes them."""
    return sorted({path.with_name(path.name.removesuffix(PACKED)) for path in folder.rglob("*.jsonl*")})


def _definition(record: dict) -> str:
    kind = record.get("kind")
    if kind in TIMED_KINDS:
        return kind.replace(" ", "_")
    return "ring" if kind is None and "ranks" in record else "untimed"


@cache
def _validator(definition: str) -> "Draft202012Validator":
    from jsonschema import Draft202012Validator  # of the tests and of who sends a run in; nothing measured needs it

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    where = {"properties": {"environment": {"$ref": "#/$defs/environment"}}}
    return Draft202012Validator({"$ref": f"#/$defs/{definition}", **where, "$defs": schema["$defs"]})


def main(*arguments: str) -> int:
    """Print the faults of the records below the folder that is the one argument; 1 if there is one."""
    if len(arguments) != 1:
        raise SystemExit(f"usage: python -m hilbert_lib.lab.record_schema FOLDER; got {len(arguments)} arguments")
    (folder,) = arguments
    if not Path(folder).is_dir():
        raise SystemExit(f"FOLDER must be a folder of runs, got {folder!r}")
    if not files_below(Path(folder)):
        raise SystemExit(f"FOLDER must hold files of records (*.jsonl, *.jsonl{PACKED}), got none below {folder!r}")
    count = 0
    for file, place, fault in faults_below(Path(folder)):
        count += 1
        print(f"{file}, {place}: {fault}")
    print(f"{count} faults")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
