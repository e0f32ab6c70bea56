"""Isolated calls that are copies of the process that notebooks' kernels are copies of: it has loaded torch.

How such a call is really started, and what is left of it, is tested in tests/launch and tests/lab/guarded.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace

# In the environment: the socket at which copies are asked for; empty where it is that of this process.
DOOR = "HILBERT_TEST_COPIES"


def copy_calls(monkeypatch, door: str | None = None) -> None:
    """From here on `run_isolated` copies the process at the door; not where a copy might use a GPU, which none can.

    door: by default that of the process which this one's tests share.
    """
    import torch

    from hilbert_lib.launch import isolated

    if not torch.cuda.is_available():
        monkeypatch.setenv(DOOR, door or "")
        monkeypatch.setattr(isolated, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Call}))


class Call:
    """What is asked of the `subprocess.Popen` of an isolated call."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], **_):
        (read_order, order), (lines, write_lines), (errors, write_errors) = os.pipe(), os.pipe(), os.pipe()
        self.args, self.returncode = command, None
        self._status = socket.socket(socket.AF_UNIX)
        self._status.connect(os.environ[DOOR] or importlib.import_module("copied_kernels").shared().door)
        text = json.dumps({"script": command[-1], "env": env, "cwd": os.getcwd()}).encode()
        given = read_order, write_lines, write_errors
        socket.send_fds(self._status, [len(text).to_bytes(4)], given)
        self._status.sendall(text)
        self._answers = self._status.makefile("r")
        self.pid = int(self._answers.readline())
        for number in given:
            os.close(number)
        self.stdin = os.fdopen(order, "w")
        self.stdout, self.stderr = (os.fdopen(number, errors="replace") for number in (lines, errors))

    def poll(self) -> int | None:
        self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._hear(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _hear(self, seconds: float | None) -> None:
        if self.returncode is not None:
            return
        self._status.settimeout(seconds)
        try:
            told = self._status.recv(16)
        except (BlockingIOError, TimeoutError):
            return
        self.returncode = int(told) if told else -signal.SIGKILL
        self._answers.close()
        self._status.close()


class Copier:
    """In the process that is copied: takes orders of calls, and tells how they ended."""

    def __init__(self, path: str):
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(path)
        self.door.listen()
        self._ends = {}  # of a copy by its number: where its exit status is told

    def fileno(self) -> int:
        return self.door.fileno()

    def copy(self) -> None:
        """Take one order."""
        asked, _ = self.door.accept()
        size, given, _, _ = socket.recv_fds(asked, 4, 3)
        order = json.loads(asked.recv(int.from_bytes(size), socket.MSG_WAITALL))
        with without_signals(signal.SIGCHLD):  # its end is told once it is known here
            copy = os.fork()
            if copy:
                self._ends[copy] = asked
        if copy == 0:
            run(given, **order)
        for number in given:
            os.close(number)
        asked.sendall(f"{copy}\n".encode())

    def tell(self, copy: int, status: int) -> None:
        """Tell whoever asked for a copy how it ended, if this is one."""
        if copy in self._ends:
            asked = self._ends.pop(copy)
            with asked, suppress(OSError):  # who asked may have ended
                asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())


class without_signals:
    """A block in which a signal waits."""

    def __init__(self, *numbers: int):
        self.numbers = numbers

    def __enter__(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)

    def __exit__(self, *_error):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)


def run(given: Sequence[int], script: str, env: dict[str, str], cwd: str) -> None:
    """Run a script in this copy, as a new process would, and end."""
    import runpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, place in enumerate(given):
        os.dup2(place, number)
    os.closerange(3, 1024)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = env["PYTHONPATH"].split(os.pathsep)
    sys.argv = [script]
    sys.stdin = os.fdopen(0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
