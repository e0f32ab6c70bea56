"""Run points one after another through papermill, so that the death of one costs no other.

A run's manifest says what ran, where, with what, and how it ended.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import click

from hilbert_lib.files import json_text, one_line, write_whole
from hilbert_lib.lab.environment import MACHINE, sm_clocks_mhz
from hilbert_lib.lab.records import FAILED, pack_records
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point, say_values
from hilbert_lib.machine import code_hash

MANIFEST = "manifest.json"
LIVING = ".living"  # locked by the process that runs a point; its bytes are room for the manifest on a full disk
RESERVE_BYTES = 256 * 1024
RUNNING = "running.ipynb"  # to papermill a path may be a URL, standard input or a pattern with braces
EARLIER = ".earlier"  # in the folder that replaces it
DAY = 86400


def run_points(
    points: list[Point], run_folder: Path, facts: dict, *, timeout: float = 3600, force: bool = False
) -> dict[str, str]:
    """Run every point that is not finished, in `timeout` seconds each; with `force` finished ones too, and all anew.

    One that fails does not end the others; a KeyboardInterrupt does, after the running point's manifest says so. Gives
    the outcome of each point by its name: "ok", "reused" or "failed".
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    for name in close_abandoned(run_folder):
        click.echo(f"interrupted {name}: the process of an earlier run was killed; see {name}.failed")
    outcomes = {}
    for point in points:
        outcome, line = "reused", f"{point.name}  {say_values(point.changes)}"
        found = read_manifest(run_folder / point.name)
        if force or not found or (found["status"], found["key"]) != ("ok", point.key):
            manifest = run_point(point, run_folder, facts, timeout=timeout, resume=not force)
            outcome = manifest["status"]
            if outcome != "ok":
                line += f"  {error_line(manifest)}"
                if (final := final_folder(run_folder, manifest)).exists():
                    line += f"; see {final}"
        outcomes[point.name] = outcome
        click.echo(f"{outcome:<11} {line}".rstrip())
    return outcomes


def run_point(point: Point, run_folder: Path, facts: dict, *, timeout: float = 3600, resume: bool = True) -> dict:
    """Run one notebook and leave its folder, under its name if it finished, else under NAME.failed; gives the manifest.

    The folder appears whole, so that an earlier result stays until a new one is complete. With `resume` the records of
    an attempt that did not finish lie there when it starts. An OSError says that not even the manifest was written.
    """
    with work_folder(run_folder, point.name) as work:
        try:
            shutil.copy(point.notebook.path, work / RUNNING)
            for records in (run_folder / f"{point.name}{FAILED}").glob("*.jsonl") if resume else ():
                shutil.copy(records, work)
            manifest = start_manifest(point, work, facts)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise OSError(f"{point.name}: {error}") from error
        begun, caught, start = [], None, time.monotonic()
        try:
            _reserve(work)
            _execute(work, point, timeout, begun)
            for records in work.glob("*.jsonl"):
                pack_records(records)
        except (Exception, KeyboardInterrupt) as error:
            caught = error
        # papermill's own record says "completed" even of a killed kernel: only its return counts.
        error = caught and _describe(caught, len(begun))
        status = "interrupted" if isinstance(caught, KeyboardInterrupt) else ""
        try:
            end_manifest(manifest, work, error, seconds=time.monotonic() - start, status=status)
            put_in_place(work, run_folder, manifest)
        except OSError:
            if work.exists():
                raise
            # There is nothing left to write into, which is no reason to end the others.
            gone = {
                "type": "FileNotFoundError",
                "message": "its folder went away while it ran",
                "cell": len(begun) or None,
            }
            manifest |= {"status": status or "failed", "error": gone}
    if isinstance(caught, KeyboardInterrupt):
        raise caught
    return manifest


def _reserve(work: Path) -> None:
    """Take the room that the manifest needs in the end, so that nothing starts on a disk that has none."""
    try:
        (work / LIVING).write_bytes(bytes(RESERVE_BYTES))
    except OSError as error:
        raise OSError(f"no room for the notebook to start: {error.strerror}") from error


def _execute(work: Path, point: Point, timeout: float, begun: list) -> None:
    """Run the notebook that lies in a folder, and leave it executed; `begun` gets an item for each cell that begins."""
    import papermill  # half a second, which reading manifests does not need
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it says of a failure is in our own line
    deadline = time.monotonic() + timeout

    def check_time() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the notebook took longer than {timeout:g} s")

    def start_cell(**cell) -> None:
        check_time()
        begun.append(cell)

    own = {OUTPUT_DIR: "."} if OUTPUT_DIR in point.notebook.parameters else {}
    try:
        with chdir(work):
            papermill.execute_notebook(
                RUNNING,
                RUNNING,
                point.changes | own,
                progress_bar={"desc": point.name, "disable": None, "leave": False},  # shown to a terminal alone
                # nbclient counts whole seconds, and its clock ends before infinity.
                timeout_func=lambda _cell: max(1, math.ceil(min(deadline - time.monotonic(), 1000 * DAY))),
                on_cell_execute=start_cell,
                # nbclient's own coalesce_streams takes time that grows with the square of a line.
                on_cell_executed=lambda cell, **_: cell.update(outputs=coalesced(cell.outputs)),
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel, which warns of its transport at every start
            )
    except CellTimeoutError:
        check_time()
        raise


def coalesced(outputs: list[dict]) -> list[dict]:
    r"""The outputs of a cell, each stream as one, standard output before errors that stand next to it.

    Of a line that carriage returns rewrote, as bars do, the last state is left.

    >>> coalesced([{"output_type": "stream", "name": "stdout", "text": text} for text in ("1 of 2", "\r2 of 2", "\n")])
    [{'output_type': 'stream', 'name': 'stdout', 'text': '2 of 2\n'}]
    """
    texts, found = {}, []
    for output in outputs:
        if output["output_type"] != "stream":
            found.append(output)
            continue
        if output["name"] not in texts:
            texts[output["name"]] = []
            found.append(output)
        texts[output["name"]].append(output["text"])
    for output in found:
        if output["output_type"] == "stream":
            output["text"] = "\n".join(map(_last_state, "".join(texts[output["name"]]).split("\n")))
    for n in range(len(found) - 1):
        if [each.get("name") for each in found[n : n + 2]] == ["stderr", "stdout"]:
            found[n : n + 2] = found[n + 1], found[n]
    return found


def _last_state(line: str) -> str:
    # A carriage return at its end rewrites nothing.
    return line[line.rfind("\r", 0, len(line) - 1) + 1 :] if line else line


def _describe(error: BaseException, cell: int) -> dict:
    kind = type(error).__name__
    if kind == "PapermillExecutionError":
        return {"type": error.ename, "message": error.evalue, "cell": error.exec_count}
    message = one_line(error)
    if kind == "DeadKernelError":
        message = "the kernel process died: killed from outside, out of memory, or crashed"
    return {"type": kind, "message": message, "cell": cell or None}


def run_id(facts: dict) -> str:
    """The folder of every run of this code on this hardware with these versions, as `cpu-torch2.13.0-0a1b2c3d`.

    A second call finds what the first one finished, and the jobs of an array share one folder. The commit is no part
    of it: one that leaves the library alone would run everything again.
    """
    deciding = json.dumps([facts[name] for name in (*MACHINE, "python", "numpy")])
    digest = hashlib.sha256(deciding.encode()).hexdigest()[:8]
    device = facts["hardware"] if facts["gpus"] else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{slug}-torch{facts['torch'].split('+')[0]}-{digest}"


@contextmanager
def work_folder(run_folder: Path, name: str) -> Iterator[Path]:
    """Where a point runs: hidden, so that its folder appears whole, by renaming; nobody else takes it meanwhile."""
    work = run_folder / f".{name}.{uuid.uuid4().hex[:8]}"
    work.mkdir(parents=True)
    with (work / LIVING).open("ab") as file:
        with suppress(OSError):  # on a file system without locks nobody can take it either
            _lock(file, wait=True)  # for one that looks whether it is abandoned
        yield work


def _lock(file: BinaryIO, *, wait: bool = False) -> None:
    """Lock a file until it is closed or this process ends; without `wait` an OSError says that another one holds it.

    A process's number and start say less: containers share numbers, and the system's clock may be set anew.
    """
    import fcntl  # Windows has none: there the commands need WSL, and reading manifests does not

    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def start_manifest(point: Point, folder: Path, facts: dict) -> dict:
    """Write the manifest of a run that begins now."""
    parameters = point.parameters
    manifest = {
        "name": point.name,
        "notebook": point.notebook.name,
        "title": point.notebook.title,
        "question": point.notebook.question,
        "answer": point.notebook.answer,
        "parameters": parameters,
        "changes": point.changes,
        "seeds": {name: value for name, value in parameters.items() if re.search(r"(^|_)seeds?$", name)},
        "notebook_hash": point.notebook.code_hash,
        "library_hash": code_hash(),
        "key": point.key,
        "environment": facts,
        "sm_clocks_mhz": {"before": sm_clocks_mhz(), "after": None},
        "start": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "end": None,
        "status": "running",
        "error": None,
        "figures": [],
    }
    write_whole(folder / MANIFEST, json_text(manifest, indent=1) + "\n")
    return manifest


def end_manifest(manifest: dict, folder: Path, error: dict | None, *, seconds: float = 0, status: str = "") -> None:
    """Write how a run ended: `error` holds type, message and cell of what ended it, None where it finished."""
    pictures = sorted(folder.rglob("*.png"), key=lambda path: path.stat().st_mtime_ns)
    with suppress(FileNotFoundError):
        os.truncate(folder / LIVING, 0)
        (folder / RUNNING).rename(folder / f"{manifest['notebook']}.ipynb")
    # By the seconds that it took: the system's clock may have been set anew since the start.
    end = datetime.fromisoformat(manifest["start"]) + timedelta(seconds=seconds)
    manifest |= {
        "status": status or ("failed" if error else "ok"),
        "error": error,
        "end": end.isoformat(timespec="milliseconds"),
        "sm_clocks_mhz": {**manifest["sm_clocks_mhz"], "after": sm_clocks_mhz()},
        "figures": [path.relative_to(folder).as_posix() for path in pictures],
    }
    write_whole(folder / MANIFEST, json_text(manifest, indent=1) + "\n")


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a run's folder; None if there is none, or none that can be read: others use this name too."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and {"key", "notebook", "status"} <= manifest.keys() else None


def final_folder(run_folder: Path, manifest: dict) -> Path:
    """Where a run that has ended belongs: its point's name, or NAME.failed, so that no failure replaces a result."""
    return run_folder / (manifest["name"] + ("" if manifest["status"] == "ok" else FAILED))


def put_in_place(work: Path, run_folder: Path, manifest: dict) -> None:
    """Let the folder of a run that has ended appear at once under its final name, in place of an earlier one."""
    final, earlier = final_folder(run_folder, manifest), work / EARLIER
    with suppress(FileNotFoundError):
        final.rename(earlier)
    try:
        work.rename(final)
    except OSError:
        if work.exists() and final.exists():  # another job's has appeared, and goes the same way
            shutil.rmtree(earlier, ignore_errors=True)
            return put_in_place(work, run_folder, manifest)
        if earlier.exists():
            earlier.rename(final)
        raise
    (final / LIVING).unlink(missing_ok=True)
    shutil.rmtree(final / EARLIER, ignore_errors=True)
    if manifest["status"] == "ok":
        shutil.rmtree(run_folder / f"{manifest['name']}{FAILED}", ignore_errors=True)


def close_abandoned(run_folder: Path) -> list[str]:
    """Put in place what dead processes left, and name the points that were running."""
    closed = []
    for work in sorted(run_folder.glob(".*/")):
        with suppress(OSError), (work / LIVING).open("rb+") as file:
            _lock(file)  # an OSError where its process lives, or another job has taken it
            if (manifest := read_manifest(work)) and manifest["status"] == "running":
                error = {"type": "Killed", "message": "its process was killed, or power was lost", "cell": None}
                end_manifest(manifest, work, error, status="interrupted")
                closed.append(manifest["name"])
            if manifest:
                put_in_place(work, run_folder, manifest)
    return closed


def error_line(manifest: dict) -> str:
    """What ended a run, in one line.

    >>> error_line({"error": {"type": "ValueError", "message": "too short", "cell": 3}})
    'ValueError: too short (cell In [3])'
    """
    error = manifest["error"]
    place = f" (cell In [{error['cell']}])" if error["cell"] else ""
    return f"{one_line(error['type'])}: {one_line(error['message'])}{place}"
