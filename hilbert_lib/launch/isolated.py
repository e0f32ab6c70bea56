"""Run one call in a subprocess: stop it at a limit, leave nothing behind, report why it ended."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TextIO

import psutil

from hilbert_lib.checks import json_text, positive
from hilbert_lib.files import one_line
from hilbert_lib.limits.config import LONGEST_SECONDS
from hilbert_lib.limits.watch import Watcher

CHILD = Path(__file__).with_name("child.py")
MARK = "HILBERT_ISOLATED"  # environment variable that the process and all that it starts carry
LAST_LINES = 30  # of the output that an ending keeps
POLL_SECONDS = 0.05
DUMP_SECONDS = 0.5  # past the time limit, in which a hanging process writes where it hangs
EXIT_SECONDS = 2.0  # in which all its processes have to be gone once they are killed

OVER_A_LIMIT = "over a limit"  # of the machine, at that moment
LONGEST_LINE = 2**16  # characters of standard error that are kept as one
NO_PROCESS = "no process could be started: "
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS"}  # by name: Windows lacks some
SIGNALS = {int(each): each.name for each in signal.Signals}  # without the real-time ones between first and last
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Errors of torch, CUDA, its libraries (cuBLAS, cuDNN) and C++ where they got no memory.
NO_MEMORY = re.compile(
    "out of memory|OUT_OF_MEMORY|_STATUS_ALLOC_FAILED|can't allocate memory|Cannot allocate memory"
    "|not enough memory|bad_alloc"
)
# Errors of torch, Triton and packages that call the driver themselves, for a fault of the GPU.
CUDA_FAULT = re.compile(r"CUDA error|CUDA driver error|Triton Error \[CUDA\]|CUDA_ERROR_")


@dataclass(frozen=True)
class Ending:
    """The end of an isolated call."""

    # "ok", "out of memory", "timed out", "crashed", "killed", "CUDA error", "disk full", "over a limit" (the machine's,
    # or no process could be started) or, for any other exception, "failed"
    status: str
    cause: str  # one line; empty where status is "ok"
    output: tuple[str, ...]  # the last lines that it printed
    left: tuple[int, ...]  # processes that did not end though they were killed
    seconds: float  # from its start until nothing was left of it
    peaks: dict  # the highest values that its watcher saw, by the names of `watch.Peaks`


def run_isolated(
    target: str,
    arguments: Sequence,
    *,
    seconds: float,
    on_record: Callable[[dict], object] = lambda record: None,
    watch: Callable[[int], Watcher] | None = None,
    host_bytes: int | None = None,
    gpu_share: float | None = None,
    device: str = "cuda",
) -> Ending:
    """Call a function in a process and a session of its own, and leave nothing of it behind.

    A supervising process stands above it. On Linux all that the call starts stays below the supervisor, which ends it
    all when the call or this process has ended.

    Args:
        target: "module:function", which returns or yields records (dictionaries that JSON can hold), or returns None.
        arguments: of the call; values that JSON can hold.
        seconds: the process is ended after this time, at most 10^8, three years.
        on_record: called with each record as soon as it comes.
        watch: makes the `Watcher` of a process number; the process is ended as soon as the watcher has a `cause`.
        host_bytes: address space that the call may take in addition to its imports; None sets no limit. CUDA reserves
            terabytes of address space: limit a call on a GPU by `watch`.
        gpu_share: share of the GPU's memory that torch may allocate; None sets no limit.
        device: that GPU, by default the current one.

    Returns:
        How it ended. An exception in this process (KeyboardInterrupt) goes on after all is ended.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed; for arguments that JSON cannot hold.
        RuntimeError: on a platform without sessions of processes (Windows).

    >>> run_isolated("signal:raise_signal", [11], seconds=600).cause
    'by SIGSEGV'
    """
    if not isinstance(target, str) or target.count(":") != 1:
        raise ValueError(f"target must be 'module:function', got {target!r}")
    seconds = positive("seconds", seconds, most=LONGEST_SECONDS)
    if not hasattr(os, "getsid"):
        raise RuntimeError(
            "a process of its own has a session of its own, which this platform lacks: use Linux, macOS or WSL"
        )
    order = {"target": target, "arguments": list(arguments), "seconds": seconds}
    order |= {"host_bytes": host_bytes, "gpu_share": gpu_share, "device": device}
    order = json_text("arguments", order)
    start = time.monotonic()
    mark = uuid.uuid4().hex
    paths = os.pathsep.join(map(os.path.abspath, sys.path))  # the child imports what this process can
    command, environment = [sys.executable, "-P", str(CHILD)], {**os.environ, "PYTHONPATH": paths, MARK: mark}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True, "errors": "replace"}
    try:
        process = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
    except OSError as error:  # no memory, processes or files are left to start it with
        return Ending(OVER_A_LIMIT, f"{NO_PROCESS}{error}", (), (), time.monotonic() - start, {})
    lines, last = SimpleQueue(), deque(maxlen=LAST_LINES)
    streams = ((process.stdout, lines.put, -1), (process.stderr, last.append, LONGEST_LINE))
    readers = [Thread(target=_read, args=stream, daemon=True) for stream in streams]
    try:
        for reader in readers:
            reader.start()
        with suppress(BrokenPipeError):  # it is dead already: `diagnosis` says why
            process.stdin.write(order + "\n")
            process.stdin.flush()
        with nullcontext() if watch is None else watch(process.pid) as watcher:
            stopped, error = _follow(process, readers[0], lines, start + seconds + DUMP_SECONDS, on_record, watcher)
    finally:
        left = _end_all(process, mark)
    for reader in readers:
        reader.join(EXIT_SECONDS)
    output = tuple(_without_paths(line) for line in last)
    # At the time limit a child dumps its stack while its thread goes on: that alone can crash it.
    died_dumping = not stopped and process.returncode < 0 and any(line.startswith("Timeout (") for line in output)
    if stopped == "timed out" or died_dumping:
        status, cause = "timed out", f"longer than {seconds:g} s"
    elif stopped:
        status, cause = OVER_A_LIMIT, stopped
    else:
        status, cause = diagnosis(error, process.returncode, output)
    peaks = {} if watcher is None else vars(watcher.peaks)
    return Ending(status, cause, output, left, time.monotonic() - start, peaks)


def _read(stream: TextIO, take: Callable[[str], object], longest: int) -> None:
    # A longer line comes in parts: one that never ends takes no memory. -1 is no limit.
    with stream:
        for line in iter(partial(stream.readline, longest), ""):
            take(line)


def _without_paths(line: str) -> str:
    # Records are public; where this machine keeps its files is not.
    for folder in sorted({os.path.abspath(path) for path in sys.path}, key=len, reverse=True):
        line = line.replace(folder + os.sep, "")
    return line.rstrip()


def _follow(
    process: subprocess.Popen,
    reader: Thread,
    lines: SimpleQueue,
    deadline: float,
    on_record: Callable[[dict], object],
    watcher: Watcher | None,
) -> tuple[str, dict | None]:
    """Wait until the process ends or has to: why it has to, and the error that it reported."""
    error, ended = None, math.inf
    while True:
        if ended == math.inf and process.poll() is not None:
            ended = time.monotonic()
        # Asked before the queue: then an empty queue is all there was. What the process started may hold the pipe.
        all_read = not reader.is_alive() or time.monotonic() > ended + EXIT_SECONDS
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except Empty:
            if ended < math.inf and all_read:
                return "", error
        else:
            message = json.loads(line) if line.endswith("\n") else {}  # it died while it wrote
            error = message.get("error")
            if "record" in message:
                on_record(message["record"])
            if "refused" in message:
                return NO_PROCESS + message["refused"], error
        if watcher is not None and watcher.cause:
            return watcher.cause, error
        if time.monotonic() > deadline:
            return "timed out", error


def _end_all(process: subprocess.Popen, mark: str) -> tuple[int, ...]:
    with suppress(BrokenPipeError):  # what a dead process did not read
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # it first ends all that it started
        process.wait(EXIT_SECONDS)
    deadline = time.monotonic() + EXIT_SECONDS
    while (left := _living(process, mark)) and time.monotonic() < deadline:
        for survivor in left:
            with suppress(psutil.Error):  # it has just ended, or is another user's
                survivor.kill()
        process.poll()
        psutil.wait_procs(left, timeout=0.1)
    process.poll()
    return tuple(survivor.pid for survivor in left)


def _living(process: subprocess.Popen, mark: str) -> set[psutil.Process]:
    """The processes that still run, found by session, by mark and by descent: the supervisor may be dead, or hang."""
    living = set()
    for candidate in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has just ended, or is another user's
            # Some leave the session, others get an environment of their own.
            if runs(candidate.pid) and (
                os.getsid(candidate.pid) == process.pid or candidate.environ().get(MARK) == mark
            ):
                living.add(candidate)
    if process.poll() is None:  # afterwards its number may be another process's
        with suppress(psutil.Error):
            descendants = psutil.Process(process.pid).children(recursive=True)
            living.update(candidate for candidate in descendants if runs(candidate.pid))
    return living


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie; a stopped one runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def diagnosis(error: dict | None, returncode: int, output: tuple[str, ...]) -> tuple[str, str]:
    """Status and cause of a process that ended by itself, from the error it reported, else from its exit status."""
    if error is None:
        if returncode == 0:
            return "ok", ""
        if lines := list(filter(NO_MEMORY.search, output)):
            return "out of memory", one_line(lines[0])
        if returncode > 0:
            return "failed", f"exit status {returncode}" + (f": {one_line(output[-1])}" if output else "")
        name = SIGNALS.get(-returncode, f"signal {-returncode}")
        if name in CRASHES:
            return "crashed", f"by {name}"
        hint = ": from outside, or by the kernel for want of memory" if name == "SIGKILL" else ""
        return "killed", f"by {name}{hint}"
    kind, message = error["type"], error["message"].strip().split("\n")[0]
    cause = one_line(f"{kind}: {_without_paths(message)}" if message else kind)
    lacks_memory = kind in ("MemoryError", "OutOfMemoryError") or error["errno"] == errno.ENOMEM
    if lacks_memory or NO_MEMORY.search(message):
        return "out of memory", cause
    if kind == "AcceleratorError" or CUDA_FAULT.search(message):
        return "CUDA error", cause
    if error["errno"] in FULL_DISK or os.strerror(errno.ENOSPC) in message:
        return "disk full", cause
    return "failed", cause
