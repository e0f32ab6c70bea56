"""Run points one after another through papermill, so that the death of one costs no other."""

import logging
import math
import os
import shutil
import time
from pathlib import Path

import click
import nbformat

from hilbert_lib.files import write_whole
from hilbert_lib.lab.records import FAILED, pack_records
from hilbert_lib.lab.suite.manifest import (
    close_abandoned,
    end_manifest,
    error_line,
    final_folder,
    is_finished,
    new_work_folder,
    put_in_place,
    start_manifest,
)
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point

END_LINES = 10  # of a long output of text, which the records hold too: so many stay at either end


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
        line = point.name
        if is_finished(point, run_folder) and not force:
            outcome = "reused"
        else:
            manifest = run_point(point, run_folder, facts, timeout=timeout, resume=not force)
            outcome = manifest["status"]
            if outcome != "ok":
                line += f"  {error_line(manifest)}; see {final_folder(run_folder, manifest)}"
        outcomes[point.name] = outcome
        click.echo(f"{outcome:<11} {line}")
    return outcomes


def run_point(point: Point, run_folder: Path, facts: dict, *, timeout: float = 3600, resume: bool = True) -> dict:
    """Run one notebook and leave its folder, under its name if it finished, else under NAME.failed; gives the manifest.

    The folder appears whole, so that an earlier result stays until a new one is complete. With `resume` the records of
    an attempt that did not finish lie there when it starts. An OSError says that not even the manifest was written.
    """
    work = new_work_folder(run_folder, point.name)
    try:
        work.mkdir(parents=True)
        for records in (run_folder / f"{point.name}{FAILED}").glob("*.jsonl") if resume else ():
            shutil.copy(records, work)
        manifest = start_manifest(point, work, facts)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise OSError(f"{point.name}: {error}") from error
    begun, caught = [], None
    if manifest["status"] == "running":
        try:
            _execute(point, work, timeout, begun)
            for records in work.glob("*.jsonl"):
                pack_records(records)
            for notebook in work.glob("*.ipynb"):
                shorten_outputs(notebook)
        except (Exception, KeyboardInterrupt) as error:
            caught = error
        # papermill's own record says "completed" even of a killed kernel: only its return counts.
        error = caught and _describe(caught, len(begun))
        end_manifest(manifest, work, error, interrupted=isinstance(caught, KeyboardInterrupt))
    put_in_place(work, run_folder, manifest)
    if isinstance(caught, KeyboardInterrupt):
        raise caught
    return manifest


def shorten_outputs(notebook_file: Path) -> None:
    """Join the lines that an executed notebook's cells printed, and cut the middle of what is long."""
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor  # a second, which reusing runs does not need

    notebook, _ = CoalesceStreamsPreprocessor().preprocess(nbformat.read(notebook_file, as_version=4), {})
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        lines = output.get("text", "").splitlines(keepends=True)
        if (more := len(lines) - 2 * END_LINES) > END_LINES:
            output.text = "".join([*lines[:END_LINES], f"... {more} more lines\n", *lines[-END_LINES:]])
    write_whole(notebook_file, nbformat.writes(notebook) + "\n")


def _execute(point: Point, work: Path, timeout: float, begun: list) -> None:
    """Run a notebook in a folder; `begun` gets an item for each cell that begins."""
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

    # The kernel runs in `work`, which will be renamed.
    own = {OUTPUT_DIR: "."} if OUTPUT_DIR in point.notebook.parameters else {}
    try:
        papermill.execute_notebook(
            _literal(point.notebook.path),
            _literal(work / point.notebook.path.name),
            point.changes | own,
            cwd=work,
            progress_bar={"desc": point.name, "disable": None, "leave": False},  # shown to a terminal alone
            timeout_func=lambda _cell: max(1, math.ceil(deadline - time.monotonic())),  # nbclient counts whole seconds
            on_cell_execute=start_cell,
            extra_arguments=["--log-level=CRITICAL"],  # of the kernel, which warns of its transport at every start
        )
    except CellTimeoutError:
        check_time()
        raise


def _literal(path: Path) -> str:
    # Relative, as papermill keeps it in the notebook; and papermill formats braces.
    return os.path.relpath(path).replace("{", "{{").replace("}", "}}")


def _describe(error: BaseException, cell: int) -> dict:
    kind = type(error).__name__
    if kind == "PapermillExecutionError":
        return {"type": error.ename, "message": error.evalue, "cell": error.exec_count}
    message = str(error).strip().split("\n")[0]
    if kind == "DeadKernelError":
        message = "the kernel process died: killed from outside, out of memory, or crashed"
    return {"type": kind, "message": message, "cell": cell or None}
