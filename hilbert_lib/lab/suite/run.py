"""Run points one after another through papermill, so that a death of one costs no other."""

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

import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from hilbert_lib.lab.records import FAILED
from hilbert_lib.lab.suite.manifest import end_manifest, put_in_place, start_manifest
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. asyncio lets a KeyboardInterrupt through and swallows other exceptions here."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `Interrupted` and ignore those that follow, which would break the
    writing of the manifest; restores the handlers at the end."""

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


def run_point(
    point: Point,
    run_folder: Path,
    facts: dict,
    *,
    timeout: float = 3600,
    resume: bool = True,
    on_cell: Callable[[str, int], None] = lambda name, cell: None,
) -> dict:
    """Run one notebook and leave its folder: under its name if it finished, else under NAME.failed.

    The work is done in a hidden folder beside them and appears by renaming, so that an earlier result stays
    until a new one is complete. The records (*.jsonl) of an attempt that did not finish lie in the notebook's folder
    when it starts: a benchmark that finds a measurement there, by the same code on the same hardware, keeps it.

    Args:
        point: what to run.
        run_folder: folder of the run-id; made where missing.
        facts: as `hilbert_lib.lab.environment.environment` gives them.
        timeout: seconds for the whole notebook, and so for each of its cells.
        resume: whether to begin with the records of an attempt that did not finish.
        on_cell: called with the point's name and the number of each code cell when it starts.

    Returns:
        The manifest; `status` is "ok" or "failed".

    Raises:
        Interrupted: after the manifest says so.
        OSError: naming the point, if not even its manifest can be written; nothing of it is left.
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
    if manifest["status"] == "failed":
        put_in_place(work, run_folder, manifest)
        return manifest
    cell = 0

    def start_cell() -> None:
        nonlocal cell
        cell += 1
        on_cell(point.name, cell)

    try:
        _execute(point, work, timeout, start_cell)
        error = None
    except (Exception, Interrupted) as caught:
        error = caught
    # papermill's own record says "completed" even of a killed kernel: only its return counts.
    stopped = isinstance(error, Interrupted)
    end_manifest(manifest, work, error and _describe(error, cell), interrupted=stopped)
    put_in_place(work, run_folder, manifest)
    if stopped:
        raise error
    return manifest


def _execute(point: Point, work: Path, timeout: float, on_cell: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout

    def check_time() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the notebook took longer than {timeout:g} s")

    def start_cell(**_unused) -> None:
        check_time()
        on_cell()

    def seconds_left(_cell: NotebookNode) -> int:  # whole seconds: what nbclient counts in
        return max(1, math.ceil(deadline - time.monotonic()))

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
            timeout_func=seconds_left,
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
    if isinstance(error, PapermillExecutionError):
        return {"type": error.ename, "message": error.evalue, "cell": error.exec_count}
    message = str(error).strip().split("\n")[0]
    if isinstance(error, DeadKernelError):
        message = "the kernel process died: killed from outside, out of memory, or crashed"
    return {"type": type(error).__name__, "message": message, "cell": cell or None}
