"""Notebooks' kernels that are copies of one process, which has loaded what most of them load: torch and the figures.

That takes two to four seconds of each kernel. Not where there is a GPU, which no copy of a process can use. Kernels
that a test kills, or whose parent it asks for, are started as everywhere: only nbval's are copies.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from select import select

import psutil
from copied_calls import Copier, copy_calls
from copied_ranks import LOADED as LOADED_BY_RANKS
from kept_counts import MODULE, share_counts

LOADED = ("torch", "torch._dynamo", "pandas", "matplotlib.pyplot", "ipykernel.ipkernel", "ipykernel.kernelapp")
LOADED += ("ipywidgets", "hilbert_lib.lab", "hilbert_lib.lab.figures.record", "forked_ranks", *LOADED_BY_RANKS)
LOADED += ("hilbert_lib.lab.guarded.cases", "hilbert_lib.lab.sweeps.causes", MODULE)
INTERPRETING = "TRITON_INTERPRET"


class CopiedKernels:
    """The process that is copied, as the one that runs the notebooks sees it."""

    def __init__(self):
        own, other = socket.socketpair()
        command = [sys.executable, "-P", __file__, str(other.fileno())]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a test may have changed the variable
        env["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it
        self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=env, stdin=subprocess.DEVNULL)
        other.close()
        self._channel, self._answers = own, own.makefile("r")
        self.door = json.loads(self._answers.readline())  # where isolated calls are copied; None where nothing can be

    def launch(self, command: list[str], *, env: dict[str, str], cwd: str | None = None, **_) -> "Kernel":
        """In the place of `jupyter_client.launcher.launch_kernel`."""
        order = {"command": command, "env": env, "cwd": cwd or os.getcwd()}
        self._channel.sendall(json.dumps(order).encode() + b"\n")
        return Kernel(json.loads(self._answers.readline()))

    def end(self) -> None:
        """End the process, whose kernels have ended."""
        self._answers.close()
        self._channel.close()
        self._process.wait()


@cache
def shared() -> CopiedKernels:
    """The process that all of this one's tests and notebooks copy. It ends with this one, whose channel it reads."""
    return CopiedKernels()


class Kernel:
    """What is asked of a kernel's `subprocess.Popen`."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                return None
        self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve(channel: socket.socket) -> None:
    """Load what kernels load, and copy this process for each order."""
    import torch

    can_copy = not torch.cuda.is_available()
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # ipykernel reads it once: a kernel ends with this process
    if can_copy:
        from hilbert_lib.machine import prepare_kernels

        prepare_kernels()  # before torch's compiler loads Triton
        sys.path.append(str(Path(__file__).parents[1]))  # of the tests
        for name in LOADED:
            importlib.import_module(name)
        share_counts()
        gc.freeze()
    folder = tempfile.mkdtemp()  # no TemporaryDirectory, which the end of each copy would remove
    copier = Copier(f"{folder}/door")
    signal.signal(signal.SIGCHLD, partial(_reap, copier))
    channel.sendall(json.dumps(f"{folder}/door" if can_copy else None).encode() + b"\n")
    orders = channel.makefile("r")
    while True:
        asking, _, _ = select([channel, copier], [], [])
        if copier in asking:
            copier.copy()
            continue
        line = orders.readline()
        if not line:
            break
        if os.fork() == 0:
            os.setsid()  # before it is known: whoever interrupts a kernel interrupts its group
            channel.sendall(f"{os.getpid()}\n".encode())
            channel.close()
            copier.door.close()
            _run(**json.loads(line), door=f"{folder}/door")
    shutil.rmtree(folder)


def _reap(copier: Copier, *_) -> None:
    # Waited for at once: their processor time is then this process's, and its parent's.
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            copier.tell(*ended)


def _run(command: list[str], env: dict[str, str], cwd: str, door: str) -> None:
    import pytest
    from forked_ranks import fork_ranks

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # as nbval has it
    os.chdir(cwd)
    interpreting = {name: os.environ[name] for name in (INTERPRETING,) if name in os.environ}
    os.environ.clear()
    os.environ.update(env | interpreting)
    # Torch traces every call of flex_attention that is not compiled, which takes ten times as long as the rest. Tests
    # of grids and of the sweeps have it traced.
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
    pytest.MonkeyPatch().setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    copy_calls(pytest.MonkeyPatch(), door)
    fork_ranks(pytest.MonkeyPatch(), LOADED_BY_RANKS)
    _, _, module, *sys.argv[1:] = command
    status = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
