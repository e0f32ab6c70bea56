"""Run points one after another through papermill, so that the death of one costs no other."""

import logging
import math
import shutil
import time
from contextlib import chdir
from pathlib import Path

import click

from hilbert_lib.lab.records import FAILED, pack_records
from hilbert_lib.lab.suite.manifest import (
    RUNNING,
    close_abandoned,
    end_manifest,
    error_line,
    final_folder,
    is_finished,
    put_in_place,
    start_manifest,
    work_folder,
)
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point, say_values

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
        if force or not is_finished(point, run_folder):
            manifest = run_point(point, run_folder, facts, timeout=timeout, resume=not force)
            outcome = manifest["status"]
            if outcome != "ok":
                line += f"  {error_line(manifest)}; see {final_folder(run_folder, manifest)}"
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
        if manifest["status"] == "running":
            try:
                _execute(work, point, timeout, begun)
                for records in work.glob("*.jsonl"):
                    pack_records(records)
            except (Exception, KeyboardInterrupt) as error:
                caught = error
            # papermill's own record says "completed" even of a killed kernel: only its return counts.
            error, status = caught and _describe(caught, len(begun)), ""
            if isinstance(caught, KeyboardInterrupt):
                status = "interrupted"
            end_manifest(manifest, work, error, seconds=time.monotonic() - start, status=status)
        put_in_place(work, run_folder, manifest)
    if isinstance(caught, KeyboardInterrupt):
        raise caught
    return manifest


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
                coalesce_streams=True,
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel, which warns of its transport at every start
            )
    except CellTimeoutError:
        check_time()
        raise


def _describe(error: BaseException, cell: int) -> dict:
    kind = type(error).__name__
    if kind == "PapermillExecutionError":
        return {"type": error.ename, "message": error.evalue, "cell": error.exec_count}
    message = str(error).strip().split("\n")[0]
    if kind == "DeadKernelError":
        message = "the kernel process died: killed from outside, out of memory, or crashed"
    return {"type": kind, "message": message, "cell": cell or None}
