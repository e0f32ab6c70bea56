"""What stands above an isolated process ends it, and all below it, also where it is hindered or killed itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from own_processes import child_with, marked_processes, wait_for

from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import MARK, run_isolated

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process whose parent was killed")
def test_a_process_ends_when_the_one_above_it_is_killed(monkeypatch):
    monkeypatch.setattr(isolated, "_living", lambda *_: set())  # as if the caller were killed too
    kill = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(20)"
    ending = run_isolated("builtins:exec", [kill], seconds=30)
    assert (ending.status, ending.cause[:10]) == ("killed", "by SIGKILL")
    assert not marked_processes(having=MARK)


@pytest.mark.parametrize(("returncode", "found"), [(None, True), (0, False)])
def test_descent_is_asked_of_a_process_that_has_not_ended(returncode, found):
    ended = SimpleNamespace(pid=os.getpid(), poll=lambda: returncode)  # this process has its number now
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep, start_new_session=True) as stranger:
        try:
            living = isolated._living(ended, "no mark")
            assert (stranger.pid in {each.pid for each in living}) is found
        finally:
            stranger.kill()


REFUSE = """
    def refuse(process):
        raise psutil.AccessDenied(process.pid)

    psutil.Process.kill = refuse  # as of a program that runs as another user
    child.END_SECONDS = 0.5
"""


def test_what_cannot_be_killed_is_told_and_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(isolated, "CHILD", child_with(REFUSE, tmp_path))
    monkeypatch.setattr(psutil.Process, "kill", Mock(side_effect=psutil.AccessDenied()))
    start = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    ending = run_isolated("builtins:exec", [start], seconds=30)
    pid = int(ending.output[0])
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not marked_processes(having=MARK), 5)
    assert (ending.status, ending.left) == ("ok", (pid,))


def test_a_supervisor_without_caller_ends_beside_what_cannot_be_killed(tmp_path):
    order = {"target": "time:sleep", "arguments": [60], "seconds": 60}
    order |= {"host_bytes": None, "gpu_share": None, "device": "cpu"}
    command = [sys.executable, "-P", str(child_with(REFUSE, tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as above:
        try:
            above.stdin.write(json.dumps(order) + "\n")
            above.stdin.flush()
            wait_for(psutil.Process(above.pid).children, 20)
            above.stdin.close()
            above.wait(10)
        finally:
            above.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows shared memory as files")
def test_what_tidies_up_after_a_process_that_succeeded_is_given_time_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(isolated, "CHILD", child_with("child.GRACE_SECONDS = 10", tmp_path))  # of a busy machine
    forget = "from multiprocessing.shared_memory import SharedMemory as S; print(S(create=True, size=1).name)"
    ending = run_isolated("builtins:exec", [forget], seconds=30)
    path = Path("/dev/shm", ending.output[0])
    left = path.exists()
    path.unlink(missing_ok=True)
    assert (ending.status, left) == ("ok", False)
