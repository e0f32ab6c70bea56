"""What was measured, line by line: records with provenance, and two runs side by side."""

import errno
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from hilbert_lib.lab.environment import MACHINE, environment
from hilbert_lib.lab.timing import SEED, Comparison, Measurement, interval_of, resampled_medians

RESULTS = "results.jsonl"
FAILED = ".failed"  # ends the name of the folder of an attempt that did not finish
REPORTS = Path(__file__).parents[2] / "reports"  # the committed evidence, in a checkout
CASE_KEY = ("name", "parameters", "device", "cache")  # equal in two runs: the same case


def append_records(records: Sequence[Measurement | Comparison], output_dir: str | Path = "") -> None:
    """Add measurements to a folder's results.jsonl: one line each, the environment with every line.

    Args:
        records: what `measure` and `compare_paired` returned.
        output_dir: the folder, made where it is missing; empty writes nothing.

    >>> append_records([])
    """
    if not output_dir or not records:
        return
    facts = environment()
    append_lines([{**each.record(), "environment": facts} for each in records], Path(output_dir) / RESULTS)


def append_lines(lines: Sequence[dict], path: Path) -> None:
    """Add dictionaries to a file of JSON, a line each, whoever else appends and whatever a killed run left.

    Args:
        lines: what JSON can hold.
        path: the file; its folder is made where it is missing.

    Raises:
        OSError: where there is no room for all of it.
    """
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                text = b"\n" + text  # half a line that a killed run or a full disk left stays a line of its own
        if file.write(text) != len(text):  # one call, which appends whole lines whoever else appends
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def read_records(path: str | Path) -> list[dict]:
    """The records of one results.jsonl.

    Args:
        path: the file.

    Returns:
        One dictionary a line, oldest first. A line that a killed run left unfinished, or that holds anything else, is
        skipped with a warning that names it.
    """
    records = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue  # a writer saw another's line half written, and began a new one
        if (record := _record(line)) is None:
            warnings.warn(f"{path}, line {number}: unfinished or no record, skipped", stacklevel=2)
        else:
            records.append(record)
    return records


def last_record(path: str | Path) -> dict:
    """The newest record of a results.jsonl, found without reading the others.

    Args:
        path: the file.

    Raises:
        ValueError: if it holds no record.
    """
    for line in reversed(Path(path).read_bytes().splitlines()):
        if (record := _record(line)) is not None:
            return record
    raise ValueError(f"{path} holds no record")


def _record(line: bytes) -> dict | None:
    """What a line holds; None where it is empty, left unfinished, or no record."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, dict) else None


def measured_before(output_dir: str | Path, file: str = RESULTS) -> list[dict]:
    """What a folder's results.jsonl holds from this code on this hardware: nothing of it has to be measured again.

    Args:
        output_dir: the folder; empty for none. file: another name than results.jsonl.

    >>> measured_before("")
    []
    """
    path = Path(output_dir) / file
    if not output_dir or not path.exists():
        return []
    facts = environment()

    def is_same(made: dict) -> bool:
        return all(made.get(name) == facts[name] for name in MACHINE)

    return [each for each in read_records(path) if is_same(each.get("environment", {}))]


def compare_runs(folder_a: str | Path, folder_b: str | Path) -> pd.DataFrame:
    """Set the measurements of two runs on the same hardware side by side.

    The two runs are not paired: whatever differed between them (clocks, neighbours) is in the ratio, and
    the interval covers only the spread within each. Samples of repeated measurements are pooled.

    Args:
        folder_a, folder_b: the runs' folders; every results.jsonl below them counts, but those of
            unfinished (hidden) and failed points.

    Returns:
        One row for each case of either run: `name`, `parameters`, `device`, `cache`, `found` ("both",
        "only in A", "only in B"), `median_a_ms`, `median_b_ms`, `ratio` (a over b: above 1, b is faster),
        its 95 % interval `low` to `high`, and `error_a`, `error_b`. What is missing is NaN.

    Raises:
        ValueError: if a folder holds no measurements, or the hardware differs within or between the runs.
    """
    runs = [_read_run(Path(folder)) for folder in (folder_a, folder_b)]
    hardware = [sorted({each["environment"]["hardware"] for each in run}) for run in runs]
    if hardware[0] != hardware[1] or len(hardware[0]) != 1:
        names = [" and ".join(each) for each in hardware]
        raise ValueError(
            f"only runs of the same hardware are compared: {folder_a} ran on {names[0]}, {folder_b} on {names[1]}"
        )
    cases_a, cases_b = (_pool(run) for run in runs)
    missing = ([math.nan], math.nan)
    rows = []
    for key in cases_a | cases_b:
        (samples_a, error_a), (samples_b, error_b) = cases_a.get(key, missing), cases_b.get(key, missing)
        found = "only in B" if key not in cases_a else "only in A" if key not in cases_b else "both"
        median_a, median_b = float(np.median(samples_a)), float(np.median(samples_b))
        rng = np.random.default_rng(SEED)
        low, high = interval_of(resampled_medians(samples_a, rng) / resampled_medians(samples_b, rng))
        rows.append(
            {
                **dict(zip(CASE_KEY, key, strict=True)),
                "found": found,
                "median_a_ms": median_a,
                "median_b_ms": median_b,
                "ratio": median_a / median_b,
                "low": low,
                "high": high,
                "error_a": error_a,
                "error_b": error_b,
            }
        )
    return pd.DataFrame(rows)


def _read_run(folder: Path) -> list[dict]:
    """The measurements of a run, those inside comparisons too, each with its environment."""
    measurements = []
    for path in sorted(folder.rglob(RESULTS)):
        inside = path.relative_to(folder).parts
        if any(part.startswith(".") or part.endswith(FAILED) for part in inside):
            continue  # what the suite has not finished, or could not
        for record in read_records(path):
            if record.get("kind") not in ("measurement", "comparison"):
                continue  # counters, points, ranks: other tables than these
            sides = (record["a"], record["b"]) if record["kind"] == "comparison" else (record,)
            measurements += [{**side, "environment": record["environment"]} for side in sides]
    if not measurements:
        raise ValueError(
            f"no measurements: {folder} has none in any {RESULTS} below it; counters and the runs of rings are others"
        )
    return measurements


def _pool(run: list[dict]) -> dict[tuple, tuple[list[float], float]]:
    """The samples and the largest error of each case."""
    cases = {}
    for each in run:
        parameters = ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(each["parameters"].items()))
        key = (each["name"], parameters, each["device"], each["cache"])
        samples, error = cases.get(key, ([], 0.0))
        cases[key] = (samples + each["samples_ms"], max(error, each["error"]))
    return cases
