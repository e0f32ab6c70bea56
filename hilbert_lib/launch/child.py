"""The script that `isolated` runs: a supervisor, and below it the worker that calls the target.

The supervisor leaves nothing of the call behind. It reads the order, one line of JSON; the worker writes a line for
each record. The script imports next to nothing: it is the target that imports torch.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

try:
    import resource
except ImportError:  # Windows, where no call runs apart
    resource = None

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
GRACE_SECONDS = 0.1  # after success: in it multiprocessing's tracker frees shared memory that was forgotten
END_SECONDS = 2.0  # in which all processes below have to be gone once they are killed
POLL_SECONDS = 0.01


def main() -> None:
    """Start the worker, wait until it and all that it started are gone, and end as it did."""
    order = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would fill the disk
    _ask_linux(SET_CHILD_SUBREAPER, 1)  # orphans below become this process's children: none can get away
    supervisor = os.getpid()
    try:
        begin, allow = os.pipe()
        if worker := os.fork():
            threading.Thread(target=_end_with_caller, daemon=True).start()
    except (OSError, RuntimeError) as error:  # no memory, processes or threads are left to start it with
        print(json.dumps({"refused": str(error)}), flush=True)
        kill_all_below()
        return
    if worker == 0:
        # If the supervisor is killed, and its caller too, nobody else is left to end the worker.
        _ask_linux(SET_PDEATHSIG, signal.SIGKILL)
        os.close(allow)
        # Nobody ends a worker whose supervisor has no thread for it, or was killed before the line that asks Linux.
        if not os.read(begin, 1) or os.getppid() != supervisor:
            os._exit(1)
        os.close(begin)
        _run(order)
        leave()
    os.write(allow, b"\n")
    os.close(allow)
    os.close(begin)
    ended, status = os.wait()
    while ended != worker:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    _end_all_below(grace=0 if code else GRACE_SECONDS)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def leave() -> None:
    """End this process with status 0, now that all of its results are written.

    Python's own end is left out. In it a thread of a library may still want the interpreter, and end the process by
    SIGABRT ("terminate called without an active exception"): a finished result would then look like a crash.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the process began without it
        with contextlib.suppress(OSError, ValueError):  # it is closed, or its reader is gone
            stream.flush()
    os._exit(0)


def _ask_linux(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_caller() -> None:
    # The caller keeps this pipe open until it wants the end; if it is killed, nothing stays behind.
    os.read(sys.stdin.fileno(), 1)
    kill_all_below()
    time.sleep(END_SECONDS)  # in which this process ends, unless it waits for one that could not be killed
    os._exit(1)


def _end_all_below(grace: float) -> None:
    start = time.monotonic()
    with contextlib.suppress(ChildProcessError):  # none is left
        while (passed := time.monotonic() - start) < grace + END_SECONDS:
            if passed >= grace:
                kill_all_below()
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(POLL_SECONDS)


def kill_all_below() -> None:
    """Kill all that this process started, and all that those started."""
    for descendant in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            descendant.kill()


def _run(order: dict) -> None:
    # The pipe is for records alone: all else that is printed goes to standard error, and reads find an empty input.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    faulthandler.enable(all_threads=False)  # a crash shows where
    faulthandler.dump_traceback_later(order["seconds"])  # and so does a hang, shortly before it is ended
    # If memory runs out, the kernel shall end this process, not its parent or its caller. Where there is no such file
    # (not Linux) or it cannot be written, the kernel chooses.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        target = function_of(order["target"])
        _limit_memory(order["host_bytes"], order["gpu_share"], order["device"])
        for record in target(*order["arguments"]) or ():
            print(json.dumps({"record": record}), file=results, flush=True)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, before)  # reporting takes memory too
        traceback.print_exc()
        print(json.dumps(report_of(error)), file=results, flush=True)
        sys.exit(1)


def function_of(target: str) -> Callable:
    """The function of "module:function", imported."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def report_of(error: BaseException) -> dict:
    """The facts of an error by which `isolated.diagnosis` judges it."""
    return {"error": {"type": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}}


def _limit_memory(host_bytes: int | None, gpu_share: float | None, device: str) -> None:
    """Cap the address space, in bytes beyond what is in use, and the share of the GPU's memory; None is no limit."""
    if host_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = [pages * resource.getpagesize() + host_bytes, *resource.getrlimit(resource.RLIMIT_AS)]
        soft = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (soft, limits[2]))
    if gpu_share is not None:
        import torch

        # torch needs an index here; a device without one is the child's first.
        torch.cuda.set_per_process_memory_fraction(gpu_share, torch.device(device).index or 0)


if __name__ == "__main__":
    main()
