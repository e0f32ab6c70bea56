"""What stands above an isolated process ends it, and all below it, also where it is hindered or killed itself."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from own_processes import mark, marked_processes

from hilbert_lib.safety import isolated
from hilbert_lib.safety.isolated import MARK, run_isolated


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    mark(monkeypatch)
    yield
    assert not psutil.Process().children(recursive=True)
    assert not marked_processes(having=MARK)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process whose parent was killed")
def test_a_process_ends_when_the_one_above_it_is_killed(monkeypatch):
    monkeypatch.setattr(isolated, "_living", lambda *_: set())  # as if the caller were killed too
    kill = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(20)"
    ending = run_isolated("builtins:exec", [kill], seconds=30)
    assert (ending.status, ending.cause[:10]) == ("killed", "by SIGKILL")
    assert not marked_processes(having=MARK)


@pytest.mark.parametrize(("returncode", "found"), [(None, True), (0, False)])
def test_descent_is_asked_of_a_process_that_has_not_ended_alone_since_its_number_is_free_then(returncode, found):
    ended = SimpleNamespace(pid=os.getpid(), poll=lambda: returncode)  # this process has its number now
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep, start_new_session=True) as stranger:
        try:
            living = isolated._living(ended, "no mark")
            assert (stranger.pid in {each.pid for each in living}) is found
        finally:
            stranger.kill()
