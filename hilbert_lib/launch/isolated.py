"""One call in a process of its own, which no fault of it outlives: ended at a limit, and told by its cause."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TextIO

import psutil

from hilbert_lib.checks import positive
from hilbert_lib.limits.watch import Watcher

CHILD = Path(__file__).with_name("child.py")
MARK = "HILBERT_ISOLATED"  # environment variable that the process and all that it starts carry
LAST_LINES = 30  # of the output that an ending keeps
POLL_SECONDS = 0.05
DUMP_SECONDS = 0.5  # past the time limit, in which a hanging process writes where it hangs
EXIT_SECONDS = 2.0  # in which all its processes have to be gone once they are killed

OVER_A_LIMIT = "over a limit"  # of the machine, at that moment
NO_PROCESS = "no process could be started: "
CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS"}  # by name: Windows lacks some
SIGNALS = {int(each): each.name for each in signal.Signals}  # real-time ones between the first and the last lack
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What torch, CUDA, its libraries (cuBLAS, cuDNN) and C++ say of memory that they did not get.
NO_MEMORY = ("out of memory", "OUT_OF_MEMORY", "_STATUS_ALLOC_FAILED")
NO_MEMORY += ("can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc")
# What torch, Triton and packages that call the driver themselves say of a fault of the GPU.
CUDA_FAULT = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUDA_ERROR_")


@dataclass(frozen=True)
class Ending:
    """How an isolated call ended.

    Attributes:
        status: "ok", "out of memory", "timed out", "crashed", "killed", "CUDA error", "disk full", "over a limit" (of
            the machine, be it that no process could be started) or, of any other exception, "failed".
        cause: one line; empty where status is "ok".
        output: the last lines that it printed.
        left: processes that did not end though they were killed.
        seconds: from its start until nothing was left of it.
        peaks: the highest values that its watcher saw, by the names of `watch.Peaks`.
    """

    status: str
    cause: str
    output: tuple[str, ...]
    left: tuple[int, ...]
    seconds: float
    peaks: dict


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

    Another process stands above it. On Linux whatever the call starts stays below that one, which ends it all when the
    call has ended, or this process.

    Args:
        target: "module:function"; what it returns or yields are records, dictionaries that JSON can hold, or None.
        arguments: of the call; values that JSON can hold.
        seconds: the process is ended after this time.
        on_record: is given each record as soon as it comes.
        watch: makes the `Watcher` of a process's number; the process is ended as soon as its `cause` says why.
        host_bytes: address space that the call may take beyond what its imports have; None sets no limit. CUDA reserves
            terabytes of it: where that is used, `watch` has to do.
        gpu_share: share of the GPU's memory that torch may allocate; None sets no limit.
        device: that GPU, by default the current one.

    Returns:
        How it ended. An exception in this process (KeyboardInterrupt) goes on after all is ended.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed; for arguments that JSON cannot hold.
        RuntimeError: on a platform without sessions of processes (Windows).

    >>> run_isolated("signal:raise_signal", [11], seconds=10).cause
    'by SIGSEGV'
    """
    if not isinstance(target, str) or target.count(":") != 1:
        raise ValueError(f"target must be 'module:function', got {target!r}")
    seconds = positive("seconds", seconds)
    if not hasattr(os, "getsid"):
        raise RuntimeError(
            "a process of its own has a session of its own, which this platform lacks: use Linux, macOS or WSL"
        )
    start = time.monotonic()
    mark = uuid.uuid4().hex
    paths = os.pathsep.join(map(os.path.abspath, sys.path))  # the child imports what this process can
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, MARK: mark},
        )
    except OSError as error:  # no memory, processes or files are left to start it with
        return Ending(OVER_A_LIMIT, f"{NO_PROCESS}{error}", (), (), time.monotonic() - start, {})
    lines, last = SimpleQueue(), deque(maxlen=LAST_LINES)
    readers = [
        Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
        Thread(target=_read, args=(process.stderr, last.append), daemon=True),
    ]
    order = {"target": target, "arguments": list(arguments), "seconds": seconds}
    order |= {"host_bytes": host_bytes, "gpu_share": gpu_share, "device": device}
    try:
        for reader in readers:
            reader.start()
        with suppress(BrokenPipeError):  # it is dead already: `diagnosis` says of what
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        with nullcontext() if watch is None else watch(process.pid) as watcher:
            stopped, error = _follow(process, readers[0], lines, start + seconds + DUMP_SECONDS, on_record, watcher)
    finally:
        left = _end_all(process, mark)
    for reader in readers:
        reader.join(EXIT_SECONDS)
    output = tuple(_without_paths(line) for line in last)
    # At its time a child writes where it is, from beside a thread that goes on: that alone can crash it.
    died_at_its_time = not stopped and process.returncode < 0 and any(line.startswith("Timeout (") for line in output)
    if stopped == "timed out" or died_at_its_time:
        status, cause = "timed out", f"longer than {seconds:g} s"
    elif stopped:
        status, cause = OVER_A_LIMIT, stopped
    else:
        status, cause = diagnosis(error, process.returncode, output)
    peaks = {} if watcher is None else vars(watcher.peaks)
    return Ending(status, cause, output, left, time.monotonic() - start, peaks)


def _read(stream: TextIO, take: Callable[[str], object]) -> None:
    with stream:
        for line in stream:
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
    """Until the process ends, by itself or because it has to: why it has to, and the error that it told."""
    error, ended = None, math.inf
    while True:
        if ended == math.inf and process.poll() is not None:
            ended = time.monotonic()
        # Asked before the queue is: then an empty queue is all there was. What the process started may hold the pipe.
        all_read = not reader.is_alive() or time.monotonic() > ended + EXIT_SECONDS
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except Empty:
            if ended < math.inf and all_read:
                return "", error
        else:
            told = json.loads(line) if line.endswith("\n") else {}  # it died while it wrote
            error = told.get("error")
            if "record" in told:
                on_record(told["record"])
            if "refused" in told:
                return NO_PROCESS + told["refused"], error
        if watcher is not None and watcher.cause:
            return watcher.cause, error
        if time.monotonic() > deadline:
            return "timed out", error


def _end_all(process: subprocess.Popen, mark: str) -> tuple[int, ...]:
    with suppress(BrokenPipeError):  # what a dead process did not read
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # it ends what it started first, down to the last
        process.wait(EXIT_SECONDS)
    deadline = time.monotonic() + EXIT_SECONDS
    while (left := _living(process, mark)) and time.monotonic() < deadline:
        for each in left:
            with suppress(psutil.Error):  # it has just ended, or is another user's
                each.kill()
        process.poll()
        psutil.wait_procs(left, timeout=0.1)
    process.poll()
    return tuple(each.pid for each in left)


def _living(process: subprocess.Popen, mark: str) -> set[psutil.Process]:
    """What is left where the process itself was killed, or does not get on: by descent, or by what it was given."""
    found = {each for each in psutil.process_iter() if _belongs(each, process.pid, mark)}
    if process.poll() is None:  # afterwards its number may be another process's
        with suppress(psutil.NoSuchProcess):
            found.update(filter(_runs, psutil.Process(process.pid).children(recursive=True)))
    return found


def _belongs(process: psutil.Process, session: int, mark: str) -> bool:
    # By its session, or by the mark in its environment: one left the session, another got an environment of its own.
    try:
        return _runs(process) and (os.getsid(process.pid) == session or process.environ().get(MARK) == mark)
    except (psutil.Error, OSError):  # it has just ended, or is another user's
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def diagnosis(error: dict | None, returncode: int, output: tuple[str, ...]) -> tuple[str, str]:
    """Status and cause of a process that ended by itself, from the error it told or else from its exit status."""
    if error is None and returncode == 0:
        return "ok", ""
    if error is None:
        number = -returncode if returncode < 0 else None
        if any(words in line for line in output for words in NO_MEMORY):
            return "out of memory", next(line for line in output if any(words in line for words in NO_MEMORY))
        if number is None:
            return "failed", f"exit status {returncode}" + (f": {output[-1]}" if output else "")
        name = SIGNALS.get(number, f"signal {number}")
        if name in CRASHES:
            return "crashed", f"by {name}"
        hint = ": from outside, or by the kernel for want of memory" if name == "SIGKILL" else ""
        return "killed", f"by {name}{hint}"
    kind, message = error["type"], error["message"].strip().split("\n")[0]
    cause = f"{kind}: {_without_paths(message)}" if message else kind
    lacking = kind in ("MemoryError", "OutOfMemoryError") or error["errno"] == errno.ENOMEM
    if lacking or any(words in message for words in NO_MEMORY):
        return "out of memory", cause
    if kind == "AcceleratorError" or any(words in message for words in CUDA_FAULT):
        return "CUDA error", cause
    if error["errno"] in FULL_DISK or os.strerror(errno.ENOSPC) in message:
        return "disk full", cause
    return "failed", cause
