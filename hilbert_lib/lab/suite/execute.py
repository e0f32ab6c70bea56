"""Execute one notebook by papermill, within a time, and say how it ended."""

import logging
import math
import time
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from hilbert_lib.files import one_line
from hilbert_lib.lab.suite.manifest import FAILURE, INTERRUPTION, OK
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point

DAY = 86400


@dataclass(frozen=True)
class Ending:
    """End of the execution of a notebook.

    cause: what ended it before its last cell; None where it finished.
    cells: how many cells had begun.
    seconds: how long it took.
    """

    cause: BaseException | None
    cells: int
    seconds: float

    @property
    def status(self) -> str:
        """As a manifest has it."""
        if self.cause is None:
            return OK
        return INTERRUPTION if isinstance(self.cause, KeyboardInterrupt) else FAILURE

    @property
    def error(self) -> dict | None:
        """Type, message and cell of the cause; None where there is none."""
        if self.cause is None:
            return None
        kind = type(self.cause).__name__
        if kind == "PapermillExecutionError":
            return {"type": self.cause.ename, "message": self.cause.evalue, "cell": self.cause.exec_count}
        message = one_line(self.cause)
        if kind == "DeadKernelError":
            message = "the kernel process died: killed from outside, out of memory, or crashed"
        return {"type": kind, "message": message, "cell": self.cells or None}


class Deadline:
    """The time of a notebook as a whole, in seconds from now.

    >>> Deadline(60.0).check()
    """

    def __init__(self, timeout: float):
        self._timeout, self._end = timeout, time.monotonic() + timeout

    def check(self) -> None:
        """TimeoutError where it has passed."""
        if time.monotonic() >= self._end:
            raise TimeoutError(f"the notebook took longer than {self._timeout:g} s")

    def seconds_left(self) -> int:
        """For the next cell: nbclient counts whole seconds, and its clock ends before infinity."""
        return max(1, math.ceil(min(self._end - time.monotonic(), 1000 * DAY)))


def execute(point: Point, folder: Path, notebook: str, *, deadline: Deadline, begun: list[dict]) -> None:
    """Execute the notebook of that name in a folder, and leave it there with its outputs.

    begun: gets an item for each cell that begins.

    Raises TimeoutError where the deadline passes, and what papermill raises of a cell that failed or a kernel that
    died.
    """
    import papermill  # half a second, which reading manifests does not need
    from nbclient.exceptions import CellTimeoutError

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it says of a failure is in our own line

    def start_cell(**cell) -> None:
        deadline.check()
        begun.append(cell)

    output = {OUTPUT_DIR: "."} if OUTPUT_DIR in point.notebook.parameters else {}
    try:
        with chdir(folder):
            papermill.execute_notebook(
                notebook,
                notebook,
                point.changes | output,
                progress_bar={"desc": point.name, "disable": None, "leave": False},  # shown to a terminal alone
                timeout_func=lambda _cell: deadline.seconds_left(),
                on_cell_execute=start_cell,
                # nbclient's own coalesce_streams takes time that grows with the square of a line.
                on_cell_executed=lambda cell, **_: cell.update(outputs=coalesced(cell.outputs)),
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel, which warns of its transport at every start
            )
    except CellTimeoutError:
        deadline.check()
        raise


def coalesced(outputs: list[dict]) -> list[dict]:
    r"""The outputs of a cell, each stream as one, standard output before errors that stand next to it.

    Of a line that carriage returns rewrote, as bars do, the last state is left.

    >>> coalesced([{"output_type": "stream", "name": "stdout", "text": text} for text in ("1 of 2", "\r2 of 2", "\n")])
    [{'output_type': 'stream', 'name': 'stdout', 'text': '2 of 2\n'}]
    """
    texts: dict[str, list[str]] = {}  # of each stream
    kept = []  # of each stream the first output alone
    for output in outputs:
        if output["output_type"] != "stream":
            kept.append(output)
            continue
        if output["name"] not in texts:
            texts[output["name"]] = []
            kept.append(output)
        texts[output["name"]].append(output["text"])
    for output in kept:
        if output["output_type"] == "stream":
            lines = "".join(texts[output["name"]]).split("\n")
            output["text"] = "\n".join(map(_last_state, lines))
    for n in range(len(kept) - 1):
        if [output.get("name") for output in kept[n : n + 2]] == ["stderr", "stdout"]:
            kept[n : n + 2] = kept[n + 1], kept[n]
    return kept


def _last_state(line: str) -> str:
    # A carriage return at its end rewrites nothing.
    return line[line.rfind("\r", 0, len(line) - 1) + 1 :] if line else line
