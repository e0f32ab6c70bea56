"""Ranks that are copies of torchrun's process, which has imported torch: each is spared the second that this takes.

How a rank is really started is tested in tests/launch/test_workers.py, and by those of the faults that start torchrun.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from untimed_guards import leave_guards_untimed

from hilbert_lib.launch import isolated, worker_main, workers

HAVING = "HILBERT_TEST_RANKS_HAVE"


def fork_ranks(monkeypatch: pytest.MonkeyPatch, having: Sequence[str] = ()) -> None:
    """From here on `run_ranks` copies ranks; but not where one might use a GPU, which no copy of a process can.

    having: modules that the copied process imports for all of them.
    """

    def run_isolated(_target: str, *order, **limits) -> isolated.Ending:
        return isolated.run_isolated(f"{__name__}:launch", *order, **limits)

    if not torch.cuda.is_available():
        monkeypatch.setenv(HAVING, " ".join(having))
        monkeypatch.setattr(workers, "run_isolated", run_isolated)


def launch(options: list[str]) -> Iterator[dict]:
    """As `workers.launch`, of copied ranks."""
    for module in os.environ[HAVING].split():
        importlib.import_module(module)
    leave_guards_untimed()
    SubprocessHandler._popen = lambda handler, command, environment: Rank(
        command, environment, handler._stdout.fileno(), handler._stderr.fileno()
    )
    yield from workers.launch(options)


class Rank:
    """What torchrun asks of a `subprocess.Popen`, for a copy of this process that runs `worker_main`."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], stdout: int, stderr: int):
        self.args, self.returncode = command, None

        def copy() -> None:
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    _run(command, environment, stdout, stderr)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)

        # A thread of its own is in no calls of torchrun, and so is the copy: what it shows of its stack is the rank's.
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode


def _run(command: tuple[str, ...], environment: dict[str, str], stdout: int, stderr: int) -> None:
    # A new process would not have this one's terminal, streams, files and handlers of signals.
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, 1024)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    module = worker_main.__name__
    sys.argv = [module, *command[command.index(module) + 1 :]]
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    del sys.modules[module]  # it is run, under another name
    runpy.run_module(module, run_name="__main__", alter_sys=True)
