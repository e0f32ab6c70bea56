"""Run points one after another, so that the death of one costs no other.

`folders` says where a run lies while it goes on and afterwards, `execute` runs its notebook, `manifest` says how it
ended.
"""

import shutil
import time
from pathlib import Path

import click

from hilbert_lib.lab.records import FAILED, pack_records
from hilbert_lib.lab.suite.compiling import compile_first
from hilbert_lib.lab.suite.execute import Deadline, Ending, execute
from hilbert_lib.lab.suite.folders import (
    RUNNING,
    close_abandoned,
    conclude,
    final_folder,
    reserve_room,
    work_folder,
)
from hilbert_lib.lab.suite.manifest import FAILURE, OK, error_line, read_manifest, start_manifest
from hilbert_lib.lab.suite.points import Point, say_values

REUSED = "reused"


def run_points(
    points: list[Point],
    run_folder: Path,
    facts: dict,
    *,
    timeout: float = 3600,
    force: bool = False,
    compilers: int = 0,
) -> dict[str, str]:
    """Run every point that is not finished, in `timeout` seconds each; with `force` finished ones too, and all anew.

    One that fails does not end the others; a
    KeyboardInterrupt does, after the running point's manifest says so. Gives the outcome of each point by its name:
    "ok", "reused" or "failed".

    compilers: as of `run_point`.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    for name in close_abandoned(run_folder):
        click.echo(f"interrupted {name}: the process of an earlier run was killed; see {name}.failed")
    outcomes = {}
    for point in points:
        line = f"{point.name}  {say_values(point.changes)}"
        if not force and _is_finished(point, run_folder):
            outcomes[point.name] = REUSED
        else:
            how = {"timeout": timeout, "resume": not force, "compilers": compilers}
            manifest = run_point(point, run_folder, facts, **how)
            outcomes[point.name] = manifest["status"]
            line += _failure(manifest, run_folder)
        click.echo(f"{outcomes[point.name]:<11} {line}".rstrip())
    return outcomes


def _is_finished(point: Point, run_folder: Path) -> bool:
    """Whether a result of the same code and values is there."""
    manifest = read_manifest(run_folder / point.name)
    return bool(manifest) and (manifest["status"], manifest["key"]) == (OK, point.key)


def _failure(manifest: dict, run_folder: Path) -> str:
    """Error that ended a run, and where to look; empty where it finished."""
    if manifest["status"] == OK:
        return ""
    final = final_folder(run_folder, manifest)
    return f"  {error_line(manifest)}" + (f"; see {final}" if final.exists() else "")


def run_point(
    point: Point, run_folder: Path, facts: dict, *, timeout: float = 3600, resume: bool = True, compilers: int = 0
) -> dict:
    """Run one notebook and leave its folder, under its name if it finished, else under NAME.failed.

    The folder appears whole, so that an earlier result stays until a new one is complete.

    resume: whether the records of an attempt that did not finish lie there when the notebook starts.
    compilers: processes of a first pass over the notebook, which `timeout` includes; 0 for none.

    Returns the manifest. Raises OSError where not even a manifest can be written, and KeyboardInterrupt after the
    manifest says so.
    """
    with work_folder(run_folder, point.name) as work:
        manifest = _prepare(point, work, facts, resume_from=run_folder / f"{point.name}{FAILED}" if resume else None)
        ending = _attempt(point, work, timeout, compilers, gpus=len(facts["gpus"]))
        try:
            conclude(work, run_folder, manifest, ending.error, seconds=ending.seconds, status=ending.status)
        except OSError:
            if work.exists():
                raise
            # There is nothing left to write into, which is no reason to end the others.
            manifest |= _went_away(ending)
    if isinstance(ending.cause, KeyboardInterrupt):
        raise ending.cause
    return manifest


def _prepare(point: Point, work: Path, facts: dict, *, resume_from: Path | None) -> dict:
    """Lay the notebook and the records of an earlier attempt into the folder of work; gives the manifest."""
    try:
        shutil.copy(point.notebook.path, work / RUNNING)
        for records in resume_from.glob("*.jsonl") if resume_from else ():
            shutil.copy(records, work)
        return start_manifest(point, work, facts)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise OSError(f"{point.name}: {error}") from error


def _attempt(point: Point, work: Path, timeout: float, compilers: int, gpus: int) -> Ending:
    """Execute the notebook, after a first pass if there are compilers, and pack its records, whatever happens."""
    begun, cause, start = [], None, time.monotonic()
    try:
        reserve_room(work)
        deadline = Deadline(timeout)
        if compilers:
            compile_first(point, work, processes=compilers, gpus=gpus, seconds=deadline.seconds_left())
        execute(point, work, RUNNING, deadline=deadline, begun=begun)
        for records in work.glob("*.jsonl"):
            pack_records(records)
    except (Exception, KeyboardInterrupt) as error:
        # papermill's own record says "completed" even of a killed kernel: only its return counts.
        cause = error
    return Ending(cause, cells=len(begun), seconds=time.monotonic() - start)


def _went_away(ending: Ending) -> dict:
    """Entry of the manifest for a notebook whose folder was deleted under it."""
    message = "its folder went away while it ran"
    error = {"type": "FileNotFoundError", "message": message, "cell": ending.cells or None}
    return {"status": FAILURE if ending.status == OK else ending.status, "error": error}
