"""Records of what was measured: written line by line, packed when a run is done, found, read back and compared."""

import errno
import gzip
import json
import math
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import pandas as pd

from hilbert_lib.files import write_whole
from hilbert_lib.lab.environment import MACHINE, environment, say_hardware
from hilbert_lib.lab.timing import SEED, Comparison, Measurement, interval_of, resampled_medians

RESULTS, PACKED = "results.jsonl", ".gz"
FAILED = ".failed"  # ends the name of the folder of an attempt that did not finish
REPORTS = Path(__file__).parents[2] / "reports"  # the committed evidence, in a checkout
MACHINES = "h[12]00*"  # its folders of committed runs; local ones lie beside them
TELLING = "h200*"  # those that numbers and advice are from
OF_SEVERAL_GPUS = ("07_ring_attention",)  # notebooks whose run says more the more GPUs it had
CASE_KEY = ("name", "parameters", "device", "cache")  # equal in two runs: the same case
PAIR_KEY = ("a", "a_parameters", "b", "b_parameters", "cache")  # likewise for a pair, whatever the device
VARYING = ("utc", "gpus")  # facts that change within a run: the moment, and the clocks


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
    """Add dictionaries to a file of JSON lines, whoever else appends. OSError where there is no room for all of it."""
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


def pack_records(path: Path) -> None:
    """Replace a file of records by NAME.gz, which holds each environment once. A file without records stays."""
    if not (records := _read_lines(path)):
        return
    known, lines = [], []
    for record in records:
        if isinstance(facts := record.get("environment"), dict):
            fixed = {name: value for name, value in facts.items() if name not in VARYING}
            if fixed not in known:
                known.append(fixed)
            varying = {name: facts[name] for name in VARYING if name in facts}
            record = {**record, "environment": [known.index(fixed), varying]}
        lines.append(record)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [{"environments": known}, *lines])
    write_whole(path.with_name(path.name + PACKED), gzip.compress(text.encode(), mtime=0))
    path.unlink()


def read_records(path: str | Path) -> list[dict]:
    """The records of a results.jsonl, or its NAME.gz, oldest first, each with its whole environment.

    A line that a killed run left unfinished, or that holds anything else, is skipped with a warning that names it.
    """
    path, environments, records = Path(path), [], []
    for record in [line for file in _files(path) for line in _read_lines(file)]:
        if "environments" in record:
            environments = record["environments"]
            continue
        if isinstance(facts := record.get("environment"), list):
            record["environment"] = {**environments[facts[0]], **facts[1]}
        records.append(record)
    return records


def has_records(path: Path) -> bool:
    """Whether there is a file of records, packed or not."""
    return any(file.exists() for file in (path, path.with_name(path.name + PACKED)))


def _files(path: Path) -> list[Path]:
    if path.suffix == PACKED:
        return [path]
    packed = path.with_name(path.name + PACKED)
    return [file for file in (packed, path) if file.exists()] or [path]


def _read_lines(path: Path) -> list[dict]:
    """The dictionaries of a file of JSON lines."""
    records, content = [], path.read_bytes()
    content = gzip.decompress(content) if path.suffix == PACKED else content
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue  # a writer saw another's line half written, and began a new one
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            warnings.warn(f"{path}, line {number}: unfinished or no record, skipped", stacklevel=3)
    return records


def measured_before(output_dir: str | Path, file: str = RESULTS) -> list[dict]:
    """What a folder's results.jsonl, or another file, holds from this code on this hardware: it need not be measured
    again.

    >>> measured_before("")
    []
    """
    if not output_dir or not has_records(path := Path(output_dir) / file):
        return []
    facts = environment()

    def is_same(made: dict) -> bool:
        return all(made.get(name) == facts[name] for name in MACHINE)

    return [each for each in read_records(path) if is_same(each.get("environment") or {})]


def newest_run(name: str, file: str = RESULTS, machines: Iterable[Path] | None = None) -> Path | None:
    """The folder of a notebook's newest finished run that holds a file, of `OF_SEVERAL_GPUS` on the most GPUs; or None.

    By default it is one of the committed runs of `TELLING` with a GPU, else any of the given machines' folders.

    >>> run = newest_run("06_kernel_benchmarks")
    >>> run is None or (run / "manifest.json").exists()
    True
    """
    anywhere, machines = machines is not None, REPORTS.glob(TELLING) if machines is None else machines
    folders = [run for machine in machines for kind in (name, f"{name}-*") for run in machine.glob(f"*/{kind}/")]
    # What was measured before an attempt failed is no record.
    runs = [run for run in folders if not run.name.endswith(FAILED) and has_records(run / file)]
    facts = {run: run_environment(run, file) for run in runs}

    def rank(run: Path) -> tuple[int, str]:
        return len(facts[run]["gpus"]) if name in OF_SEVERAL_GPUS else 1, facts[run]["utc"]

    return max((run for run in runs if anywhere or facts[run]["gpus"]), key=rank, default=None)


def run_environment(run: Path, file: str = RESULTS) -> dict:
    """The environment of a run: that of its manifest, or of the newest record where there is none."""
    manifest = run / "manifest.json"
    if manifest.exists():
        return json.loads(manifest.read_text())["environment"]
    return read_records(run / (RESULTS if has_records(run / RESULTS) else file))[-1]["environment"]


def committed_records(notebook: str = "06_kernel_benchmarks") -> list[dict]:
    """The records of a notebook's `newest_run`; empty where there is none."""
    run = newest_run(notebook)
    return read_records(run / RESULTS) if run else []


def records_to_draw(records: list[dict], notebook: str = "06_kernel_benchmarks") -> tuple[list[dict], str]:
    """These records where they hold times, otherwise a notebook's committed ones; and their source, for a title."""
    if any(record.get("kind") != "check" for record in records):
        return records, say_hardware(records[0]["environment"])
    committed = committed_records(notebook)
    return committed, f"committed record, {say_hardware(committed[0]['environment'])}" if committed else ""


def compare_runs(*folders: str | Path) -> pd.DataFrame:
    """Set the measurements of two or more runs side by side, each beside the first, which is A.

    Times are compared on the same hardware alone, and unpaired: whatever differed between two runs (clocks, neighbours)
    is in the ratio. Of different hardware the ratios of pairs are compared, which were timed in turn.

    Args:
        folders: of the runs. Every results.jsonl below them counts, but those of unfinished and failed points.

    Returns:
        A row for each case and each later run. On one hardware `name`, `parameters`, `device`, `cache`, `run` ("B",
        "C"), `found` ("both", "only in A", "only in B"), `median_a_ms`, `median_b_ms`, `ratio` (A over the other: above
        1, the other is faster), its 95 % interval `low` to `high`, `error_a`, `error_b`. On different hardware a row a
        pair: `a`, `b`, their parameters, `run`, `found`, `ratio_here` (of A), `ratio_there`, `ratio_of_ratios` (there
        over here: above 1, b gains more there), `low`, `high`. What is missing is NaN.

    Raises:
        ValueError: for fewer than two runs; if one has no measurements, or of several hardwares; if runs of different
            hardware have no pairs.
    """
    if len(folders) < 2:
        raise ValueError(f"two runs or more are compared, got {len(folders)}")
    runs = [_read_run(Path(folder)) for folder in folders]
    hardware = [{each["environment"]["hardware"] for each in run} for run in runs]
    for folder, names in zip(folders, hardware, strict=True):
        if len(names) > 1:
            raise ValueError(f"a run must be of one hardware, got {' and '.join(sorted(names))} in {folder}")
    if len(set().union(*hardware)) == 1:
        key, pools, row = CASE_KEY, [_pool_times(run) for run in runs], _times_row
    else:
        key, pools, row = PAIR_KEY, [_pool_pairs(run) for run in runs], _ratios_row
        if not all(pools):
            names = " and ".join(sorted(set().union(*hardware)))
            raise ValueError(f"runs on different hardware ({names}) are compared by their pairs, and one has none")
    rows = []
    for letter, pool in zip(ascii_uppercase[1:], pools[1:], strict=False):
        for case in pools[0] | pool:
            found = f"only in {letter}" if case not in pools[0] else "only in A" if case not in pool else "both"
            here, there = pools[0].get(case, ([math.nan], math.nan)), pool.get(case, ([math.nan], math.nan))
            rows.append({**dict(zip(key, case, strict=True)), "run": letter, "found": found, **row(here, there)})
    return pd.DataFrame(rows)


def _read_run(folder: Path) -> list[dict]:
    """The measurements and comparisons of a run."""
    paths = sorted({path.with_name(RESULTS) for path in folder.rglob(f"{RESULTS}*")})
    within = {path: path.relative_to(folder).parts for path in paths}
    hidden = {path for path, parts in within.items() if any(p.startswith(".") or p.endswith(FAILED) for p in parts)}
    records = [record for path in paths if path not in hidden for record in read_records(path)]
    # Counters, points and ranks go into other tables than these.
    records = [record for record in records if record.get("kind") in ("measurement", "comparison")]
    if not records:
        raise ValueError(
            f"no measurements: {folder} has none in any {RESULTS} below it; counters and the runs of rings are others"
        )
    return records


def _times_row(here: tuple, there: tuple) -> dict:
    rng, medians = np.random.default_rng(SEED), [float(np.median(samples)) for samples, _ in (here, there)]
    low, high = interval_of(resampled_medians(here[0], rng) / resampled_medians(there[0], rng))
    times = {"median_a_ms": medians[0], "median_b_ms": medians[1], "ratio": medians[0] / medians[1]}
    return {**times, "low": low, "high": high, "error_a": here[1], "error_b": there[1]}


def _ratios_row(here: tuple, there: tuple) -> dict:
    rng, medians = np.random.default_rng(SEED), [float(np.median(ratios)) for ratios, _ in (here, there)]
    low, high = interval_of(resampled_medians(there[0], rng) / resampled_medians(here[0], rng))
    ratios = {"ratio_here": medians[0], "ratio_there": medians[1], "ratio_of_ratios": medians[1] / medians[0]}
    return {**ratios, "low": low, "high": high}


def _pool_times(run: list[dict]) -> dict[tuple, tuple[list[float], float]]:
    """The samples and the largest error of each case, those inside comparisons too."""
    cases = {}
    for each in [side for record in run for side in _sides(record)]:
        key = (each["name"], _say(each["parameters"]), each["device"], each["cache"])
        samples, error = cases.get(key, ([], 0.0))
        cases[key] = (samples + each["samples_ms"], max(error, each["error"]))
    return cases


def _pool_pairs(run: list[dict]) -> dict[tuple, tuple[list[float], float]]:
    """The paired ratios of each comparison."""
    pairs = {}
    for a, b in (_sides(record) for record in run if record["kind"] == "comparison"):
        key = (a["name"], _say(a["parameters"]), b["name"], _say(b["parameters"]), a["cache"])
        ratios = [one / other for one, other in zip(a["samples_ms"], b["samples_ms"], strict=True)]
        pairs[key] = (pairs.get(key, ([], 0.0))[0] + ratios, 0.0)
    return pairs


def _sides(record: dict) -> list[dict]:
    return [record["a"], record["b"]] if record["kind"] == "comparison" else [record]


def _say(parameters: dict) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(parameters.items()))
