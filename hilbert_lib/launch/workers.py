"""A function on every rank of a process group, for notebooks and tests: watched, and nothing is left of the ranks."""

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from hilbert_lib import checks
from hilbert_lib.launch import REFUSED
from hilbert_lib.launch.isolated import LAST_LINES, diagnosis, run_isolated, runs
from hilbert_lib.launch.worker_main import AGENT, BACKENDS, IMPORTING, STALL_SECONDS, beat_file, result_file
from hilbert_lib.limits.config import LONGEST_SECONDS
from hilbert_lib.limits.watch import Peaks

LIMIT_SECONDS = 300.0
DUMP_SECONDS = 0.5  # in which a rank that has to end writes where it was
# Errors of gloo, NCCL and the store after a wait that was too long.
TORCH_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
TIMEOUT = re.compile("timed out|(collective operation|wait|socket) timeout", re.IGNORECASE)
# Errors of gloo and the store where another rank is gone.
CLOSED = re.compile("connection (closed|reset) by peer|broken pipe|connection was likely closed", re.IGNORECASE)
TAIL_BYTES = 2**16  # of a rank's standard error, searched for its cause


class RankError(RuntimeError):
    """A run of ranks ended because of some of them; the text names them, the cause and their last lines.

    Attributes:
        ranks: those at fault; empty where torchrun itself failed.
        status: "stalled", or one of `isolated.Ending`.
        cause: one line.
        output: the last lines of their standard error. Of ranks with the same cause only the first one's lines are
            shown. Where ranks returned while another one waited, the waiting one's lines follow.
    """

    def __init__(self, ranks: tuple[int, ...], status: str, cause: str, output: tuple[str, ...]):
        self.ranks, self.status, self.cause, self.output = ranks, status, cause, output
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "torchrun"
        super().__init__("\n  ".join([f"{who} {status}: {cause}", *output]))


def run_ranks(
    target: str,
    ranks: int,
    arguments: dict | None = None,
    *,
    seconds: float = LIMIT_SECONDS,
    stall_seconds: float = STALL_SECONDS,
    backend: str | None = None,
) -> list:
    """Call a function on every rank of a process group; torchrun starts a process for each rank.

    What rank 0 prints appears here line by line, as it comes; an error shows the last lines of the ranks at fault.

    Args:
        target: "module:function", importable from here. The function finds the process group initialised, and with nccl
            its GPU made the current device. Each rank imports the module: where that calls `run_ranks` itself, it must
            do so under `if __name__ == "__main__":`.
        ranks: how many, at least 1.
        arguments: the function's one argument, a dictionary that JSON can hold, with strings as keys; by default an
            empty one.
        seconds: all ranks are ended after this time.
        stall_seconds: a rank is stalled if it shows no sign of life for so long, or if others wait for it for so long
            in a collective. With nccl this includes the time in which a collective waits for earlier work of the GPU:
            a long run needs more. Groups that the function makes have timeouts of their own.
        backend: "gloo" or "nccl"; by default nccl, with one GPU a rank, where there is a GPU.

    Returns:
        What the function returned on each rank, as JSON gives it back.

    Raises:
        RankError: when a rank fails, dies, stalls, takes too long or returns while another one waits for it; all ranks
            are ended then.
        TypeError, ValueError: naming the argument, its value and what is allowed.
        RuntimeError: in a rank that imports its target.

    >>> run_ranks("builtins:dict", 2, {"tokens": 8}, backend="gloo")
    [{'tokens': 8}, {'tokens': 8}]
    """
    if importing := os.environ.get(IMPORTING):  # each rank would start as many, and so on
        raise RuntimeError(
            f"run_ranks was called while a rank imports {importing!r}: put the call under if __name__ == '__main__'"
        )
    ranks = checks.integer("ranks", ranks, least=1, most=checks.LARGEST_RANKS)
    gpus = torch.cuda.device_count()
    backend = ("nccl" if gpus else "gloo") if backend is None else backend
    checks.one_of("backend", backend, BACKENDS)
    if backend == "nccl" and ranks > gpus:
        raise ValueError(f"ranks must be at most {gpus} with nccl, one for each GPU, got {ranks}")
    if not isinstance(target, str) or not re.fullmatch(r"[\w.]+:\w+", target):
        raise ValueError(f"target must be 'module:function', got {target!r}")
    seconds = checks.positive("seconds", seconds, most=LONGEST_SECONDS / 2)
    stall_seconds = checks.positive("stall_seconds", stall_seconds, most=LONGEST_SECONDS)
    try:
        text = checks.json_text("arguments", dict(arguments or {}))
    except ValueError:
        raise TypeError(f"arguments must be a dictionary, got {arguments!r}") from None
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        order = folder / "arguments.json"
        order.write_text(text, encoding="utf-8")
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        options += [f"--log-dir={folder}", "--redirects=3", "-m", "hilbert_lib.launch.worker_main", target]
        options += [f"--arguments={order}", f"--results={folder}", f"--backend={backend}"]
        options += [f"--stall-seconds={stall_seconds}"]
        exits = {}  # exit code by rank
        supervisor = _Supervisor(folder, ranks, seconds, stall_seconds)
        ending = run_isolated(
            "hilbert_lib.launch.workers:launch",
            [options],
            seconds=2 * seconds,  # the supervisor's limit comes first: it names the ranks
            on_record=lambda record: exits.update({int(rank): code for rank, code in record["exits"].items()}),
            watch=lambda pid: supervisor,
        )
        supervisor.print_rank_0(is_over=True)
        if fault := supervisor.fault:
            raise RankError(*fault, _last_lines(folder, fault[0]))
        if ending.status != "ok":
            raise RankError((), ending.status, ending.cause, ending.output)
        paths = [result_file(folder, rank) for rank in range(ranks)]
        reports = [json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths]
        if not all("result" in report for report in reports):
            raise _fault(folder, reports, exits)
        return [report["result"] for report in reports]


def launch(options: list[str]) -> Iterator[dict]:
    """Run torchrun in this process; yields {"exits": exit code by rank}, negative for a signal, where ranks failed."""
    os.environ[AGENT] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it where nobody has
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        yield {"exits": {rank: failure.exitcode for rank, failure in error.failures.items()}}


class _Supervisor:
    """Finds ranks that stall or take too long, for `run_isolated` in place of a `Watcher`; prints rank 0's output."""

    def __init__(self, folder: Path, ranks: int, seconds: float, stall_seconds: float):
        self.peaks = Peaks()
        self._folder, self._ranks = folder, ranks
        self._seconds, self._stall_seconds = seconds, stall_seconds
        self.fault: tuple[tuple[int, ...], str, str] | None = None  # ranks, status and cause
        self._printed_bytes = 0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_error) -> None:
        if self.fault is None:
            return
        for rank in self.fault[0]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has not begun, or is gone
                os.kill(_pid(self._folder, rank), signal.SIGTERM)
        time.sleep(DUMP_SECONDS)

    def print_rank_0(self, *, is_over: bool = False) -> None:
        """Print the whole lines that rank 0 has printed since the last time, and in the end what is left."""
        for path in self._folder.glob("*/attempt_0/0/stdout.log"):
            with path.open("rb") as file:
                file.seek(self._printed_bytes)
                text = file.read()
            text = text if is_over else text[: text.rfind(b"\n") + 1]
            self._printed_bytes += len(text)
            if text:
                print(text.decode(errors="replace"), end="", flush=True)

    @property
    def cause(self) -> str:
        """The reason why the run has to end; "" as long as it may go on."""
        self.print_rank_0()
        running = tuple(rank for rank in range(self._ranks) if not result_file(self._folder, rank).exists())
        # A rank that still imports torch has given no sign of life yet; torchrun reports how ended ranks ended.
        begun = [(rank, time.monotonic() - beat) for rank in running if (beat := _last_beat(self._folder, rank))]
        late = [rank for rank, silence in begun if silence > self._stall_seconds]
        if silent := tuple(rank for rank in late if runs(_pid(self._folder, rank))):
            self.fault = silent, "stalled", f"no sign of life for {self._stall_seconds:g} s"
        elif running and time.monotonic() - self._start > self._seconds:
            self.fault = running, "timed out", f"longer than {self._seconds:g} s"
        return "" if self.fault is None else self.fault[2]


def _fault(folder: Path, reports: list[dict], exits: dict[int, int]) -> RankError:
    """The ranks at fault where some have no result.

    The rank that ended first explains why the others ended. How it ended says who is at fault:

        torch's error says                        and                                  at fault
        ----------------------------------------  -----------------------------------  --------------------------------
        a wait timed out                          torchrun ended ranks that had not    these ranks: "stalled"
                                                  timed out themselves
        a wait timed out, or a connection closed  other ranks returned their results   these ranks: "failed"
        neither, or nobody is left to blame       -                                    it, and those with the same cause
    """
    ranks = range(len(reports))
    errors = {rank: report for rank, report in enumerate(reports) if "error" in report}
    first = _first_ended(folder, reports, exits)
    status, cause = _ending(folder, first, reports[first], exits)
    may_have_waited = status in ("failed", "crashed")
    timed_out = {rank for rank in ranks if _says(TIMEOUT, folder, rank, errors.get(rank))}
    stalled = tuple(sorted(_terminated(reports, exits) - timed_out))
    if may_have_waited and first in timed_out and stalled:
        return RankError(stalled, "stalled", f"rank {first} waited: {cause}", _last_lines(folder, stalled))
    returned = tuple(rank for rank in ranks if "result" in reports[rank])
    was_left = first in timed_out or _says(CLOSED, folder, first, errors.get(first))
    if may_have_waited and was_left and returned:
        cause = f"returned while rank {first} waited: {cause}"
        return RankError(returned, "failed", cause, _last_lines(folder, (*returned, first)))
    alike = (rank for rank, report in errors.items() if _ending(folder, rank, report, exits) == (status, cause))
    return RankError(tuple(alike) or (first,), status, cause, _last_lines(folder, [first]))


def _first_ended(folder: Path, reports: list[dict], exits: dict[int, int]) -> int:
    """The rank without a result that ended first, among those that ended by themselves, if there are any."""
    errors = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    unreported = {rank for rank, report in enumerate(reports) if not report}
    terminated = _terminated(reports, exits)
    refused = {rank for rank, error in errors.items() if REFUSED in error["message"]}  # because of another rank
    by_themselves = (unreported - terminated) | (errors.keys() - refused)

    def end_time(rank: int) -> float:
        return reports[rank]["time"] if rank in errors else _last_beat(folder, rank)

    return min(by_themselves or refused or terminated, key=end_time)


def _terminated(reports: list[dict], exits: dict[int, int]) -> set[int]:
    # The ranks that torchrun ended because of another one: they had no time to report.
    return {rank for rank, report in enumerate(reports) if not report and exits.get(rank) == -signal.SIGTERM}


def _says(words: re.Pattern, folder: Path, rank: int, report: dict | None) -> bool:
    """Whether a rank missed another one, in these words: of torch's error, or of its log where an abort ended it."""
    if report is None:
        return words.search("\n".join(_stderr(folder, rank))) is not None
    return report["error"]["type"] in TORCH_ERRORS and words.search(report["error"]["message"]) is not None


def _ending(folder: Path, rank: int, report: dict, exits: dict[int, int]) -> tuple[str, str]:
    status, cause = diagnosis(report.get("error"), exits.get(rank, 0), _stderr(folder, rank))
    return ("failed", "it ended without a result") if status == "ok" else (status, cause)


def _last_beat(folder: Path, rank: int) -> float:
    # A time of `time.monotonic`, which all processes share: somebody may set the system's clock meanwhile.
    path = beat_file(folder, rank)
    return path.stat().st_mtime if path.exists() else 0.0


def _pid(folder: Path, rank: int) -> int:
    return int(beat_file(folder, rank).read_text(encoding="utf-8"))


def _stderr(folder: Path, rank: int) -> tuple[str, ...]:
    """The end of a rank's standard error, which torchrun keeps in a folder that it names itself."""
    lines = []
    for path in folder.glob(f"*/attempt_0/{rank}/stderr.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines += file.read().decode(errors="replace").splitlines()
    return tuple(lines)


def _last_lines(folder: Path, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(line for rank in ranks for line in (f"rank {rank}:", *_tail(_stderr(folder, rank))))


def _tail(lines: tuple[str, ...]) -> tuple[str, ...]:
    # The end of a log; or the error before it, where torch aborted the process after an error, as NCCL does where a
    # kernel failed: the end is then filled with what the threads were doing.
    errors = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if errors and any(line.startswith("Fatal Python error") for line in lines):
        lines = lines[errors[-1] :]
        lines = lines[: lines.index("") if "" in lines else None]
    return lines[-LAST_LINES:]
