"""Records of what was measured: written line by line, packed when a run is done, found, read back and compared."""

import errno
import gzip
import json
import math
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING

import numpy as np

from hilbert_lib.attention.triton.hopper.division import is_reached
from hilbert_lib.files import json_text, write_whole
from hilbert_lib.lab.environment import MACHINE, environment, say_hardware
from hilbert_lib.lab.first_pass import first_pass
from hilbert_lib.lab.tables import sides_of
from hilbert_lib.lab.timing import SEED, Comparison, Measurement, interval_of, resampled_medians

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

RESULTS, PACKED = "results.jsonl", ".gz"
FAILED = ".failed"  # ends the name of the folder of an attempt that did not finish
REPORTS = Path(__file__).parents[2] / "reports"  # the committed evidence, in a checkout
MACHINES = "h[12]00*"  # its folders of committed runs; local ones lie beside them
# Notebooks that were cells of another one. A run of that notebook with this parameter of theirs holds their records.
CAME_FROM = {
    "06b_orders_and_counters": ("06_kernel_benchmarks", "layout_length"),
    "08b_kernels_on_grids": ("08_where_a_curve_pays", "works"),
}
OF_SEVERAL_GPUS = ("07_ring_attention",)  # notebooks whose run says more the more GPUs it had
HOPPER_FOLDERS = ("nvidia-h100-", "nvidia-h200-")  # begin the names of folders of runs on one card, or on several
TIMED = ("measurement", "comparison", "back to back")  # kinds of records that hold times of sides


def append_records(records: Sequence[Measurement | Comparison], output_dir: str | Path = "") -> None:
    """Add what `measure` and `compare_paired` returned to a folder's results.jsonl; an empty name writes nothing."""
    if output_dir and records:
        facts = environment()
        append_lines([{**timing.record(), "environment": facts} for timing in records], Path(output_dir) / RESULTS)


def append_lines(lines: Sequence[dict], path: Path) -> None:
    """Add dictionaries to a file of JSON lines, whoever else appends. OSError where there is no room for all of it."""
    text = "".join(json_text(line) + "\n" for line in lines).encode()
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
    """Compress a file of records into NAME.gz, with what is there already. A file without records stays."""
    if not (records := _as_written(path)):
        return
    lines = "".join(json_text(record, separators=(",", ":")) + "\n" for record in records)
    write_whole(Path(f"{path}{PACKED}"), gzip.compress(lines.encode(), mtime=0))
    path.unlink(missing_ok=True)


def read_records(path: str | Path) -> list[dict]:
    """The records of a results.jsonl, of its NAME.gz and of both, oldest first.

    Backends have the names of today (`with_names_of_today`). A line that a killed run left unfinished, or that holds
    anything else, is skipped with a warning that names it.
    """
    return [with_names_of_today(record, Path(path)) for record in _as_written(Path(path))]


def _as_written(path: Path) -> list[dict]:
    # Older files keep each environment once, in their first line. A record there has [number, what differs].
    lines = [line for file in _files(path) or [path] for line in _read_lines(file)]
    environments, records = [], []
    for line in lines:
        if "environments" in line:
            environments = line["environments"]
            continue
        if isinstance(line.get("environment"), list):
            number, differing = line["environment"]
            line["environment"] = {**environments[number], **differing}
        records.append(line)
    return records


def with_names_of_today(record: dict, path: Path) -> dict:
    """A record in which "triton" of old reads as "hopper" where those kernels ran.

    Along a sequence "triton" was the name of the plain kernels and of the warp-specialised ones. These ran on a Hopper
    card, in half precision, for shapes that they serve. The environment of a record lists the backends since they have
    two names. path: of the file, whose folder is named after the card; the oldest records have no environment.

    >>> side = {"name": "triton", "parameters": {"branches": "64:1", "length": 128, "head_dim": 64}}
    >>> side["parameters"]["dtype"] = "bfloat16"
    >>> with_names_of_today({**side, "environment": {"gpus": [{"capability": "9.0"}]}}, Path(RESULTS))["name"]
    'hopper'
    """
    facts = record.get("environment")
    if facts is None:
        is_on_hopper = any(part.startswith(HOPPER_FOLDERS) for part in path.parts)
    else:
        is_on_hopper = any(gpu.get("capability") == "9.0" for gpu in facts.get("gpus", ()))
    is_named_apart = facts is not None and "backends" in facts
    return _renamed(record) if is_on_hopper and not is_named_apart else record


def _renamed(record: dict) -> dict:
    if "point" in record:
        return _renamed_point(record)
    names = {}
    for place in ("a", "b"):
        if place in record:
            names[place] = _renamed_side(record[place])
    if "sides" in record:
        names["sides"] = [_renamed_side(side) for side in record["sides"]]
    return {**record, **names} if names else _renamed_side(record)


def _renamed_side(side: dict) -> dict:
    name, work = side.get("name"), side.get("parameters", {})
    if not isinstance(name, str) or "branches" not in work:  # of grids both kinds have had two names
        return side
    branches = [tuple(map(int, branch.split(":"))) for branch in work["branches"].split()]
    backend, comma, options = name.partition(",")  # "triton, deterministic"
    return {**side, "name": f"hopper{comma}{options}"} if backend == "triton" and _ran_hopper(branches, work) else side


def _renamed_point(record: dict) -> dict:
    # Of a `SafeBenchmarkRunner`: its sides are names.
    point = record["point"]
    if "pattern" not in point or "sides" not in point:
        return record
    branches = list(zip(point["pattern"]["segment_lengths"], point["pattern"]["dilation_rates"], strict=True))
    if not _ran_hopper(branches, point):
        return record

    def renamed(name: str) -> str:
        return "hopper" if name == "triton" else name

    return {
        **record,
        "point": {**point, "sides": [renamed(name) for name in point["sides"]]},
        "outcomes": {renamed(name): outcome for name, outcome in record["outcomes"].items()},
        "records": [_renamed(measurement) for measurement in record["records"]],
    }


def _ran_hopper(branches: list[tuple[int, int]], work: dict) -> bool:
    is_half = work.get("dtype") in ("float16", "bfloat16")
    is_narrow = work.get("head_dim", 0) <= 128 and work.get("head_dim", 0) % 8 == 0
    return is_half and is_narrow and any(is_reached(w, r, work["length"]) for w, r in branches)


def has_records(path: Path) -> bool:
    """Whether there is a file of records, packed or not."""
    return bool(_files(path))


def _files(path: Path) -> list[Path]:
    """Files of records that are there: packed, and measured since."""
    return [file for file in (Path(f"{path}{PACKED}"), path) if file.exists()]


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
    """The lines of a results.jsonl, or another file, of this code on this hardware: they are not measured again."""
    if not output_dir or not has_records(path := Path(output_dir) / file):
        return []
    machine = itemgetter(*MACHINE)(environment())
    described = ((record, record.get("environment") or {}) for record in read_records(path))
    return [record for record, facts in described if tuple(map(facts.get, MACHINE)) == machine]


class Kept:
    """The records of a folder's file from this code on this hardware, by key, and the way to add one.

    An empty output_dir keeps nothing on the disk; write says whether what is added goes there. The key of a record of
    another sweep is None. in_first_pass: whether who keeps these shares its cases in a first pass, which else leaves
    them out.

    >>> kept = Kept("", key=lambda record: record.get("length"))
    >>> kept.add({"length": 8})["environment"].keys() == environment().keys(), 8 in kept.known
    (True, True)
    """

    def __init__(
        self,
        output_dir: str | Path,
        key: Callable[[dict], Hashable],
        *,
        write: bool = True,
        file: str = RESULTS,
        in_first_pass: bool = False,
    ):
        if (compiling := first_pass()) and not in_first_pass:
            compiling.leave_out("measuring one after another")
        self._path = Path(output_dir) / file if output_dir and write else None
        self._key, self._facts = key, environment()
        self.known = {key(record): record for record in measured_before(output_dir, file)}
        self.known.pop(None, None)

    def add(self, record: dict) -> dict:
        """Keeps a record with its environment, and returns both."""
        record = {**record, "environment": self._facts}
        if self._path:
            append_lines([record], self._path)
        self.known[self._key(record)] = record
        return record


def newest_run(name: str, file: str = RESULTS, machines: Iterable[Path] | None = None) -> Path | None:
    """The folder of a notebook's newest run that holds a file, of `OF_SEVERAL_GPUS` on the most GPUs; or None.

    By default it is one of the committed runs with a GPU, else any of the given machines' folders. Where there
    is no manifest, the records alone were kept.
    """
    runs = committed_runs(name, file, machines)
    facts = {run: run_environment(run, file) for run in runs}

    def rank(run: Path) -> tuple[int, str]:
        return len(facts[run]["gpus"]) if name in OF_SEVERAL_GPUS else 1, facts[run]["utc"]

    return max((run for run in runs if machines is not None or facts[run]["gpus"]), key=rank, default=None)


def committed_runs(name: str, file: str = RESULTS, machines: Iterable[Path] | None = None) -> list[Path]:
    """The folders of all runs of a notebook, as `newest_run` looks for them, and of those under its older name."""
    folders = list(REPORTS.glob(MACHINES) if machines is None else machines)
    runs = _runs_named(name, folders)
    if name in CAME_FROM:
        older_name, parameter = CAME_FROM[name]
        runs += [run for run in _runs_named(older_name, folders) if parameter in _manifest(run).get("parameters", ())]
    # What was measured before an attempt failed is no record.
    return [run for run in runs if not run.name.endswith(FAILED) and has_records(run / file)]


def run_environment(run: Path, file: str = RESULTS) -> dict:
    """The environment of a run: that of its manifest, or of the newest record where there is none."""
    if manifest := _manifest(run):
        return manifest["environment"]
    return read_records(run / (RESULTS if has_records(run / RESULTS) else file))[-1]["environment"]


def _runs_named(name: str, folders: Iterable[Path]) -> list[Path]:
    return [run for folder in folders for kind in (name, f"{name}-*") for run in folder.glob(f"*/{kind}/")]


def _manifest(run: Path) -> dict:
    """A run's manifest; empty where the records alone were kept."""
    file = run / "manifest.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def committed_records(
    notebook: str = "06_kernel_benchmarks", file: str = RESULTS, *, with_gpu: bool = True
) -> list[dict]:
    """The records of a notebook's `newest_run`; empty where there is none.

    with_gpu: whether those of a machine without a GPU do not count; they do where no other run is.
    """
    run = newest_run(notebook, file)
    if run is None and not with_gpu:
        run = newest_run(notebook, file, machines=REPORTS.glob(MACHINES))
    return read_records(run / file) if run else []


def records_to_draw(
    records: list[dict], notebook: str = "06_kernel_benchmarks", file: str = RESULTS
) -> tuple[list[dict], str]:
    """These records where they hold times, otherwise a notebook's committed ones; and their source, for a title."""
    if any(record.get("kind") != "check" for record in records):
        return records, say_hardware(records[0]["environment"])
    committed = committed_records(notebook, file)
    return committed, f"committed record, {say_hardware(committed[0]['environment'])}" if committed else ""


def compare_runs(*folders: str | Path) -> "pd.DataFrame":
    """Set the measurements of two or more runs side by side, each beside the first, which is A.

    Every results.jsonl below a folder counts, but those of points that failed or have not ended. On one hardware a row
    is a case, whose `ratio` of medians is A's time over the other's, unpaired. On different hardware it is a pair that
    both runs timed in turn, and `ratio_of_ratios` is above 1 where b gains more there than here, in A. Both have a 95 %
    interval, `low` to `high`; what is missing is NaN. A ValueError names a run that cannot be compared.
    """
    import pandas as pd

    if len(folders) < 2:
        raise ValueError(f"two runs or more are compared, got {len(folders)}")
    runs = [_read_run(Path(folder)) for folder in folders]
    hardware = [{record["environment"]["hardware"] for record in run} for run in runs]
    for folder, run_hardware in zip(folders, hardware, strict=True):
        if len(run_hardware) > 1:
            raise ValueError(f"a run must be of one hardware, got {' and '.join(sorted(run_hardware))} in {folder}")
    everywhere = set().union(*hardware)
    is_one = len(everywhere) == 1
    samples = [[row for record in run for row in _rows(record, is_one)] for run in runs]
    if not all(samples):
        names = " and ".join(sorted(everywhere))
        raise ValueError(f"runs on different hardware ({names}) are compared by their pairs, and one has none")
    (_, first), *others = zip(ascii_uppercase, map(_pooled, samples), strict=False)
    return pd.concat([_beside(first, other, letter, is_one=is_one) for letter, other in others], ignore_index=True)


def _read_run(folder: Path) -> list[dict]:
    """The times of a run; counters, points and ranks go into other tables."""
    paths = sorted({path.with_name(RESULTS) for path in folder.rglob(f"{RESULTS}*")})
    records = []
    for path in paths:
        if not any(part.startswith(".") or part.endswith(FAILED) for part in path.relative_to(folder).parts):
            records += [record for record in read_records(path) if record.get("kind") in TIMED]
    if not records:
        raise ValueError(
            f"no measurements: {folder} has none in any {RESULTS} below it; counters and the runs of rings are others"
        )
    return records


def _rows(record: dict, is_one: bool) -> list[dict]:
    """The cases of a record; or on different hardware its pair, whose samples are ratios."""
    names = ("name", "parameters", "device", "samples_ms", "error")
    sides = [
        {**{name: side[name] for name in names}, "parameters": _say(side["parameters"])} for side in sides_of(record)
    ]
    if is_one or len(sides) != 2:
        return sides if is_one else []
    a, b = sides
    key = {"a": a["name"], "a_parameters": a["parameters"], "b": b["name"], "b_parameters": b["parameters"]}
    return [{**key, "samples_ms": np.divide(a["samples_ms"], b["samples_ms"]).tolist(), "error": 0.0}]


def _say(parameters: dict) -> str:
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in sorted(parameters.items()))


def _pooled(rows: list[dict]) -> "pd.DataFrame":
    """The samples of each case or pair, all repeats together, and its largest error."""
    import pandas as pd

    table = pd.DataFrame(rows)
    key = [name for name in table if name not in ("samples_ms", "error")]
    return table.groupby(key, as_index=False).agg({"samples_ms": "sum", "error": "max"})  # the sum of lists is a list


def _beside(first: "pd.DataFrame", other: "pd.DataFrame", letter: str, *, is_one: bool) -> "pd.DataFrame":
    """A's cases or pairs beside those of another run."""
    import pandas as pd

    key = [name for name in first if name not in ("samples_ms", "error")]
    table = first.merge(other, "outer", on=key, suffixes=("_a", "_b"), indicator="found")
    found = {"both": "both", "left_only": "only in A", "right_only": f"only in {letter}"}
    table["found"] = table.found.astype(str).map(found)
    names = ("median_a_ms", "median_b_ms", "ratio") if is_one else ("ratio_here", "ratio_there", "ratio_of_ratios")
    rows = []
    for pair in table[["samples_ms_a", "samples_ms_b"]].to_numpy():
        a, b = (samples if isinstance(samples, list) else [math.nan] for samples in pair)
        rows.append((np.median(a), np.median(b), *(_quotient(a, b) if is_one else _quotient(b, a))))
    table = table.join(pd.DataFrame(rows, columns=[*names, "low", "high"])).assign(run=letter)
    return table[[*key, "run", "found", *names, "low", "high", *(["error_a", "error_b"] if is_one else [])]]


def _quotient(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """The ratio of two medians, and its 95 % interval."""
    rng = np.random.default_rng(SEED)
    interval = interval_of(resampled_medians(above, rng) / resampled_medians(below, rng))
    return np.median(above) / np.median(below), *interval
