"""Ranks for notebooks and tests: a function on every rank of a process group, watched, and nothing left of them."""

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

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from hilbert_lib.checks import integer, positive
from hilbert_lib.launch import REFUSED
from hilbert_lib.launch.isolated import LAST_LINES, diagnosis, run_isolated
from hilbert_lib.launch.worker_main import AGENT, BACKENDS, IMPORTING, STALL_SECONDS, beat_file, result_file
from hilbert_lib.limits.watch import Peaks

LIMIT_SECONDS = 300.0
DUMP_SECONDS = 0.5  # in which a rank that has to end writes where it was
# What gloo, NCCL and the store say of a wait that was too long.
TORCH_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
TIMEOUT = re.compile("timed out|(collective operation|wait|socket) timeout", re.IGNORECASE)
# What gloo and the store say where another rank is gone.
CLOSED = re.compile("connection (closed|reset) by peer|broken pipe|connection was likely closed", re.IGNORECASE)
TAIL_BYTES = 2**16  # of a rank's standard error, in which its cause is looked for


class RankError(RuntimeError):
    """A run of ranks ended because of some of them; the text names them, the cause and their last lines.

    Attributes:
        ranks: those at fault; empty where torchrun itself failed.
        status: "failed", "out of memory", "killed", "crashed", "stalled", "timed out" or another of `isolated.Ending`.
        cause: one line.
        output: the last lines of their standard error; of ranks that tell the same, those of the first. Of ranks that
            returned while another one waited, those of that one too.
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
    """Call a function on every rank of a process group, each a process of its own started by torchrun.

    What rank 0 prints appears here line by line, as it comes; of the others' output the last lines stand in an error.

    Args:
        target: "module:function", importable from here. It finds the process group initialised, and with nccl its GPU
            made the current device. Each rank imports the module: where that calls `run_ranks` itself, it must do so
            under `if __name__ == "__main__":`.
        ranks: how many, at least 1.
        arguments: what it is called with, a dictionary that JSON can hold; by default an empty one.
        seconds: all ranks are ended after this time.
        stall_seconds: a rank that shows no sign of life for so long, or that others wait for so long in a collective
            of the process group, is stalled. With nccl the time counts in which a collective waits for what the GPU
            was given before: a long run needs more. A group that the function makes waits as long as it is told.
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
    ranks = integer("ranks", ranks, least=1)
    backend = _backend(backend, ranks)
    if not isinstance(target, str) or not re.fullmatch(r"[\w.]+:\w+", target):
        raise ValueError(f"target must be 'module:function', got {target!r}")
    seconds, stall_seconds = positive("seconds", seconds), positive("stall_seconds", stall_seconds)
    try:
        text = json.dumps(dict(arguments or {}))
    except (TypeError, ValueError):
        raise TypeError(f"arguments must be a dictionary that JSON can hold, got {arguments!r}") from None
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        order = folder / "arguments.json"
        order.write_text(text)
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
        options += [f"--log-dir={folder}", "--redirects=3", "-m", "hilbert_lib.launch.worker_main", target]
        options += [f"--arguments={order}", f"--results={folder}", f"--backend={backend}"]
        options += [f"--stall-seconds={stall_seconds}"]
        exits = {}
        supervisor = _Supervisor(folder, ranks, seconds, stall_seconds)
        ending = run_isolated(
            "hilbert_lib.launch.workers:launch",
            [options],
            seconds=2 * seconds,  # the supervisor's limit comes first: it names the ranks
            on_record=lambda record: exits.update({int(rank): code for rank, code in record["exits"].items()}),
            watch=lambda pid: supervisor,
        )
        supervisor.tell(is_over=True)
        if found := supervisor.error():
            raise found
        if ending.status != "ok":
            raise RankError((), ending.status, ending.cause, ending.output)
        reports = [_report(folder, rank) for rank in range(ranks)]
        if not all("result" in report for report in reports):
            raise _fault(folder, reports, exits)
        return [report["result"] for report in reports]


def launch(options: list[str]) -> Iterator[dict]:
    """torchrun, in this process.

    Args:
        options: its command line.

    Yields:
        Where ranks failed: {"exits": exit code by rank}, negative for a signal.
    """
    os.environ[AGENT] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it where nobody has
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        yield {"exits": {rank: failure.exitcode for rank, failure in error.failures.items()}}


class _Supervisor:
    """Finds the ranks that stall or take too long; `run_isolated` asks it as it asks a `Watcher`. Tells what rank 0
    prints."""

    def __init__(self, folder: Path, ranks: int, seconds: float, stall_seconds: float):
        self.peaks = Peaks()
        self._folder, self._ranks = folder, ranks
        self._seconds, self._stall_seconds = seconds, stall_seconds
        self._found = None
        self._told_bytes = 0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def __exit__(self, *_error) -> None:
        if self._found is None:
            return
        for rank in self._found[0]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has not come so far, or is gone
                os.kill(int(beat_file(self._folder, rank).read_text()), signal.SIGTERM)
        time.sleep(DUMP_SECONDS)

    def tell(self, *, is_over: bool = False) -> None:
        """Print the whole lines that rank 0 has printed since the last time, and in the end what is left."""
        for path in self._folder.glob("*/attempt_0/0/stdout.log"):
            with path.open("rb") as file:
                file.seek(self._told_bytes)
                printed = file.read()
            told = printed if is_over else printed[: printed.rfind(b"\n") + 1]
            self._told_bytes += len(told)
            if told:
                print(told.decode(errors="replace"), end="", flush=True)

    @property
    def cause(self) -> str:
        self.tell()
        running = tuple(rank for rank in range(self._ranks) if not result_file(self._folder, rank).exists())
        silent = tuple(rank for rank in running if _silence(self._folder, rank) > self._stall_seconds)
        silent = tuple(rank for rank in silent if _lives(self._folder, rank))  # how others end, torchrun tells
        if silent:
            self._found = silent, "stalled", f"no sign of life for {self._stall_seconds:g} s"
        elif running and time.monotonic() - self._start > self._seconds:
            self._found = running, "timed out", f"longer than {self._seconds:g} s"
        return "" if self._found is None else self._found[2]

    def error(self) -> RankError | None:
        """What it found, with what the ranks wrote."""
        return None if self._found is None else RankError(*self._found, _last_lines(self._folder, self._found[0]))


def _fault(folder: Path, reports: list[dict], exits: dict[int, int]) -> RankError:
    """Which ranks are at fault where some have no result.

    The first to end is, and the others found it gone; where it had waited, those that it waited for are.
    """
    errors = {rank: report for rank, report in enumerate(reports) if "error" in report}
    silent = {rank for rank, report in enumerate(reports) if not report}
    ended = {rank for rank in silent if exits.get(rank) == -signal.SIGTERM}  # by torchrun, because of another one
    told = {rank for rank, report in errors.items() if REFUSED in report["error"]["message"]}  # of another
    candidates = silent - ended | errors.keys() - told or told or ended
    first = min(candidates, key=lambda rank: errors[rank]["time"] if rank in errors else _last_beat(folder, rank))
    status, cause = _ending(folder, first, reports[first], exits)
    waiting = {rank for rank in range(len(reports)) if _waited(folder, rank, errors.get(rank))}
    if status in ("failed", "crashed") and first in waiting and ended - waiting:
        stalled = tuple(sorted(ended - waiting))
        return RankError(stalled, "stalled", f"rank {first} waited: {cause}", _last_lines(folder, stalled))
    returned = tuple(rank for rank, report in enumerate(reports) if "result" in report)
    left = first in waiting or _waited(folder, first, errors.get(first), CLOSED)
    if status in ("failed", "crashed") and left and returned:
        cause = f"returned while rank {first} waited: {cause}"
        return RankError(returned, "failed", cause, _last_lines(folder, (*returned, first)))
    alike = (rank for rank, report in errors.items() if _ending(folder, rank, report, exits) == (status, cause))
    return RankError(tuple(alike) or (first,), status, cause, _last_lines(folder, [first]))


def _waited(folder: Path, rank: int, report: dict | None, words: re.Pattern = TIMEOUT) -> bool:
    # torch's errors tell that another rank was missed; a rank that an abort ended has told none.
    if report is None:
        return words.search("\n".join(_stderr(folder, rank))) is not None
    return report["error"]["type"] in TORCH_ERRORS and words.search(report["error"]["message"]) is not None


def _ending(folder: Path, rank: int, report: dict, exits: dict[int, int]) -> tuple[str, str]:
    status, cause = diagnosis(report.get("error"), exits.get(rank, 0), _stderr(folder, rank))
    return ("failed", "it ended without a result") if status == "ok" else (status, cause)


def _backend(backend: str | None, ranks: int) -> str:
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if gpus else "gloo"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "nccl" and ranks > gpus:
        raise ValueError(f"ranks must be at most {gpus} with nccl, one for each GPU, got {ranks}")
    return backend


def _report(folder: Path, rank: int) -> dict:
    path = result_file(folder, rank)
    return json.loads(path.read_text()) if path.exists() else {}


def _last_beat(folder: Path, rank: int) -> float:
    path = beat_file(folder, rank)
    return path.stat().st_mtime if path.exists() else 0.0


def _silence(folder: Path, rank: int) -> float:
    # A rank that still imports torch has given no sign of life yet.
    beat = _last_beat(folder, rank)
    return time.time() - beat if beat else 0.0


def _lives(folder: Path, rank: int) -> bool:
    # A stopped process lives.
    try:
        return psutil.Process(int(beat_file(folder, rank).read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stderr(folder: Path, rank: int) -> tuple[str, ...]:
    """The end of what a rank wrote to standard error, which torchrun keeps in a folder that it names itself."""
    lines = []
    for path in folder.glob(f"*/attempt_0/{rank}/stderr.log"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines += file.read().decode(errors="replace").splitlines()
    return tuple(lines)


def _last_lines(folder: Path, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(line for rank in ranks for line in (f"rank {rank}:", *_stderr(folder, rank)[-LAST_LINES:]))
