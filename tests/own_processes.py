"""The processes that a test started, and waiting for what they do."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil

from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import CHILD
from hilbert_lib.limits.config import LONGEST_SECONDS

PATIENCE = 300.0  # seconds after which a wait is taken for a hang: no verdict hangs on how busy the machine is
OWN_MARK = "HILBERT_TEST"  # in the environment of the running test, and of all that it starts


def mark(monkeypatch) -> None:
    """Mark what is started from here on: other runs of the same tests have processes too."""
    monkeypatch.setenv(OWN_MARK, str(uuid.uuid4()))


def marked_processes(*, having: str = OWN_MARK) -> list[psutil.Process]:
    """Every process that the running test started, orphans too, whose environment has this name."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            own = process.pid != os.getpid() and environ.get(OWN_MARK) == os.environ[OWN_MARK]
            if own and having in environ:
                found.append(process)
    return found


def start_python(program: str, folder: Path) -> subprocess.Popen:
    """Python on a program, in a folder; it hears SIGINT also where the tests run in a background."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def child_with(patch: str, folder: Path) -> Path:
    """A script in the folder that runs what `isolated` runs, as the module `child`, after this patch."""
    path = folder / "patched_child.py"
    begin = f"import os, sys, threading\nsys.path.insert(0, {str(CHILD.parent)!r})\nimport child, psutil\n"
    path.write_text(f"{begin}{textwrap.dedent(patch)}\nsys.path.pop(0)\nchild.main()\n")
    return path


def let_time_pass_when(is_over: Callable[[], object], monkeypatch) -> None:
    """Time stands still for what ends isolated calls, until this holds: then every limit of theirs is passed."""
    monkeypatch.setattr(isolated, "time", SimpleNamespace(monotonic=lambda: LONGEST_SECONDS * bool(is_over())))


def wait_for(condition: Callable[[], object]) -> None:
    """Until the condition holds; an error once patience is at its end."""
    deadline, pause = time.monotonic() + PATIENCE, 0.02
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.3)  # to ask which processes there are takes longer than what is waited for moves on
