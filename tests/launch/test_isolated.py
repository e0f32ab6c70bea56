"""An isolated call: how its end is told, what its memory is capped at, and that all it started ends with it, also
where what stands above is hindered or killed itself."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from own_processes import PATIENCE, child_with, marked_processes, wait_for

from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import MARK, run_isolated, runs

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WHILE_TELLING = "import os, sys; print('Timeout (0:05:00)!', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"


@pytest.mark.parametrize(
    ("program", "status", "cause"),
    [
        ("import os; os.write(3, b'{'); os.abort()", "crashed", "by SIGABRT"),  # while it writes a record
        (WHILE_TELLING, "timed out", f"longer than {PATIENCE:g} s"),  # while it tells where it hangs
        ("raise OSError(12, 'Cannot allocate memory')", "out of memory", "OSError: [Errno 12] Cannot allocate memory"),
        (f"import signal; signal.raise_signal({signal.SIGRTMIN + 6})", "killed", f"by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_an_end_is_told_with_its_cause(program, status, cause):
    ending = run_isolated("builtins:exec", [program], seconds=PATIENCE)
    assert (ending.status, ending.cause) == (status, cause)


def test_what_ends_python_badly_after_the_last_result_is_no_crash():
    # As a thread of a library that still wants the interpreter: SIGABRT, after all work is done.
    records, program = [], "import atexit, os; atexit.register(os.abort); print('done')"
    ending = run_isolated("builtins:exec", [program], seconds=PATIENCE, on_record=records.append)
    assert (ending.status, ending.cause) == ("ok", "")
    assert ending.output == ("done",)


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("Triton Error [CUDA]: an illegal memory access was encountered", "CUDA error"),
        ("CUDA driver error: unspecified launch failure", "CUDA error"),
        ("cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA error"),
        ("Triton Error [CUDA]: out of memory", "out of memory"),
        ("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"),
        ("unable to mmap 4096 bytes from file: Cannot allocate memory (12)", "out of memory"),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", "failed"),
    ],
)
def test_messages_of_torch_triton_and_the_driver_are_told_apart(message, status):
    error = {"type": "RuntimeError", "message": message, "errno": None}
    assert isolated.diagnosis(error, 1, ()) == (status, f"RuntimeError: {message}")


@pytest.mark.parametrize(("number", "status"), [(errno.ENOMEM, "out of memory"), (errno.EDQUOT, "disk full")])
def test_an_error_of_the_system_is_known_by_its_number_whatever_it_says(number, status):
    error = {"type": "OSError", "message": "there is no room", "errno": number}
    assert isolated.diagnosis(error, 1, ()) == (status, "OSError: there is no room")


def test_an_error_names_no_path_of_this_machine():
    missing = os.path.join(os.path.abspath(sys.path[0]), "missing")
    ending = run_isolated("builtins:open", [missing], seconds=PATIENCE)
    assert ending.cause == "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"


def test_records_are_read_however_late_their_reader_is(monkeypatch):
    read, records = isolated._read, []
    before = {child.pid for child in psutil.Process().children()}  # a process of other tests, that is copied for them

    def late(*reading):
        wait_for(lambda: not any(runs(child.pid) for child in psutil.Process().children() if child.pid not in before))
        time.sleep(0.5)  # as on a machine with more to do
        read(*reading)

    monkeypatch.setattr(isolated, "_read", late)
    ending = run_isolated("builtins:list", [[{"length": 8}]], seconds=PATIENCE, on_record=records.append)
    assert (ending.status, records) == ("ok", [{"length": 8}])


def test_without_sessions_of_processes_nothing_is_started(monkeypatch):
    monkeypatch.delattr(os, "getsid")
    with pytest.raises(RuntimeError, match="this platform lacks"):
        run_isolated("builtins:dict", [], seconds=PATIENCE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process whose parent was killed")
def test_a_process_ends_when_the_one_above_it_is_killed(monkeypatch):
    monkeypatch.setattr(isolated, "_living", lambda *_: set())  # as if the caller were killed too
    kill = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
    ending = run_isolated("builtins:exec", [kill], seconds=PATIENCE)
    assert (ending.status, ending.cause[:10]) == ("killed", "by SIGKILL")
    wait_for(lambda: not marked_processes(having=MARK))


@pytest.mark.parametrize(("returncode", "found"), [(None, True), (0, False)])
def test_descent_is_asked_of_a_process_that_has_not_ended(returncode, found):
    ended = SimpleNamespace(pid=os.getpid(), poll=lambda: returncode)  # this process has its number now
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
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
    monkeypatch.setattr(isolated, "EXIT_SECONDS", 0.5)
    living = isolated._living

    def living_without_the_supervisor(process, mark):
        process.wait(PATIENCE)
        return living(process, mark)

    monkeypatch.setattr(isolated, "_living", living_without_the_supervisor)
    start = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    ending = run_isolated("builtins:exec", [start], seconds=PATIENCE)
    pid = int(ending.output[0])
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not marked_processes(having=MARK))
    assert (ending.status, ending.left) == ("ok", (pid,))


def test_a_supervisor_without_caller_ends_beside_what_cannot_be_killed(tmp_path):
    order = {"target": "time:sleep", "arguments": [600], "seconds": 600}
    order |= {"host_bytes": None, "gpu_share": None, "device": "cpu"}
    command = [sys.executable, "-P", str(child_with(REFUSE, tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as above:
        try:
            above.stdin.write(json.dumps(order) + "\n")
            above.stdin.flush()
            wait_for(psutil.Process(above.pid).children)
            above.stdin.close()
            above.wait(PATIENCE)
        finally:
            above.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows shared memory as files")
def test_what_tidies_up_after_a_process_that_succeeded_is_given_time_for_it(monkeypatch, tmp_path):
    monkeypatch.setattr(isolated, "CHILD", child_with(f"child.GRACE_SECONDS = {PATIENCE}", tmp_path))
    forget = "from multiprocessing.shared_memory import SharedMemory as S; print(S(create=True, size=1).name)"
    ending = run_isolated("builtins:exec", [forget], seconds=PATIENCE)
    path = Path("/dev/shm", ending.output[0])
    left = path.exists()
    path.unlink(missing_ok=True)
    assert (ending.status, left) == ("ok", False)


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2)])
def test_a_process_that_began_without_its_streams_leaves_with_status_0(closed):
    code = "from hilbert_lib.launch.child import leave; leave()"
    shut = " ".join(f"{number}>&-" for number in closed)
    assert subprocess.call(["sh", "-c", f'exec "$0" -c "$1" {shut}', sys.executable, code], timeout=PATIENCE) == 0
