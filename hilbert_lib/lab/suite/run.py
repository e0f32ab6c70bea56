"""Run points one after another through papermill, so that the death of one costs no other."""

import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from hilbert_lib.files import write_whole
from hilbert_lib.lab.records import FAILED, pack_records
from hilbert_lib.lab.suite.manifest import (
    close_abandoned,
    end_manifest,
    error_line,
    final_folder,
    is_finished,
    put_in_place,
    start_manifest,
)
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point

END_LINES = 10  # of a long output of text, which the records hold too: so many stay at either end


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. asyncio lets a KeyboardInterrupt through and swallows other exceptions here."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted`; later ones would break the writing of the manifest."""

    def stop(signal_number: int, _frame) -> None:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signal_number)

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        # Raised in a finalizer or a callback of the garbage collector, where Python drops it: sent again, out of there.
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        for number in handlers:
            signal.signal(number, stop)
        again = unraisable.exc_value.exit_status - 128
        threading.Timer(0.01, os.kill, (os.getpid(), again)).start()

    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_points(
    points: list[Point], run_folder: Path, facts: dict, *, timeout: float = 3600, force: bool = False
) -> dict[str, str]:
    """Run every point that is not finished, in `timeout` seconds each; with `force` finished ones too, and all anew.

    One that fails does not end the others; `Interrupted` does, after the running point's manifest says so.

    Returns:
        Name of each point to its outcome: "ok", "reused" or "failed".
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in close_abandoned(run_folder):
        click.echo(f"interrupted {name}: the process of an earlier run was killed; see {name}.failed")

    def show_cell(name: str, cell: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"{len(outcomes) + 1} of {len(points)}: {name} In [{cell}]\r", nl=False, err=True)

    with interruptible():
        for point in points:
            line = point.name
            if is_finished(point, run_folder) and not force:
                outcome = "reused"
            else:
                manifest = run_point(point, run_folder, facts, timeout=timeout, resume=not force, on_cell=show_cell)
                outcome = manifest["status"]
                if outcome != "ok":
                    line += f"  {error_line(manifest)}; see {final_folder(run_folder, manifest)}"
            outcomes[point.name] = outcome
            click.echo(f"{outcome:<11} {line}")
    return outcomes


def run_point(
    point: Point,
    run_folder: Path,
    facts: dict,
    *,
    timeout: float = 3600,
    resume: bool = True,
    on_cell: Callable[[str, int], None] = lambda name, cell: None,
) -> dict:
    """Run one notebook and leave its folder, under its name if it finished, else under NAME.failed; gives the manifest.

    The work is done in a hidden folder and appears by renaming, so that an earlier result stays until a new one is
    complete. With `resume` the records (*.jsonl) of an attempt that did not finish lie there when it starts and are
    not measured again. A finished run's records are packed. An OSError says that not even the manifest was written.
    """
    work = run_folder / f".{point.name}.{uuid.uuid4().hex[:8]}"
    try:
        work.mkdir(parents=True)
        for records in (run_folder / f"{point.name}{FAILED}").glob("*.jsonl") if resume else ():
            shutil.copy(records, work)
        manifest = start_manifest(point, work, facts)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise OSError(f"{point.name}: {error}") from error
    cell, caught = 0, None

    def start_cell() -> None:
        nonlocal cell
        cell += 1
        on_cell(point.name, cell)

    if manifest["status"] == "running":
        try:
            _execute(point, work, timeout, start_cell)
            for records in work.glob("*.jsonl"):
                pack_records(records)
            for notebook in work.glob("*.ipynb"):
                shorten_outputs(notebook)
        except (Exception, Interrupted) as error:
            caught = error
        # papermill's own record says "completed" even of a killed kernel: only its return counts.
        end_manifest(manifest, work, caught and _describe(caught, cell), interrupted=isinstance(caught, Interrupted))
    put_in_place(work, run_folder, manifest)
    if isinstance(caught, Interrupted):
        raise caught
    return manifest


def shorten_outputs(notebook_file: Path) -> None:
    """Join the lines that an executed notebook's cells printed, and cut the middle of what is long."""
    notebook = json.loads(notebook_file.read_text(encoding="utf-8"))
    for cell in (cell for cell in notebook["cells"] if cell.get("outputs")):
        joined = []
        for output in cell["outputs"]:
            if joined and output["output_type"] == "stream" and output["name"] == joined[-1].get("name"):
                joined[-1]["text"] = [*joined[-1]["text"], *output["text"]]
            else:
                joined.append(output)
        for output in (output for output in joined if output["output_type"] == "stream"):
            lines = output["text"] = "".join(output["text"]).splitlines(keepends=True)
            if (more := len(lines) - 2 * END_LINES) > END_LINES:
                lines[END_LINES:-END_LINES] = [f"... {more} more lines\n"]
        cell["outputs"] = joined
    write_whole(notebook_file, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _execute(point: Point, work: Path, timeout: float, on_cell: Callable[[], None]) -> None:
    import papermill  # half a second, which reading manifests does not need
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it says of a failure is in our own line
    deadline = time.monotonic() + timeout

    def check_time() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the notebook took longer than {timeout:g} s")

    def start_cell(**_unused) -> None:
        check_time()
        on_cell()

    parameters = dict(point.changes)
    if OUTPUT_DIR in point.notebook.parameters:
        parameters[OUTPUT_DIR] = "."  # the kernel runs in `work`, which will be renamed
    try:
        papermill.execute_notebook(
            _literal(point.notebook.path),
            _literal(work / point.notebook.path.name),
            parameters,
            cwd=work,
            progress_bar=False,
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
