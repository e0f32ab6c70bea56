"""An isolated call: how its end is told, what its memory is capped at, and when it is ended."""

import os
import signal
import sys
import time

import pytest

from hilbert_lib.launch import isolated
from hilbert_lib.launch.isolated import run_isolated

pytestmark = pytest.mark.usefixtures("nothing_is_left")

WHILE_TELLING = "import os, sys; print('Timeout (0:00:30)!', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"


@pytest.mark.parametrize(
    ("program", "status", "cause"),
    [
        ("import os; os.write(3, b'{'); os.abort()", "crashed", "by SIGABRT"),  # while it writes a record
        (WHILE_TELLING, "timed out", "longer than 30 s"),  # while it tells where it hangs
        ("raise OSError(12, 'Cannot allocate memory')", "out of memory", "OSError: [Errno 12] Cannot allocate memory"),
        (f"import signal; signal.raise_signal({signal.SIGRTMIN + 6})", "killed", f"by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_an_end_is_told_with_its_cause(program, status, cause):
    ending = run_isolated("builtins:exec", [program], seconds=30)
    assert (ending.status, ending.cause) == (status, cause)


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


def test_an_error_names_no_path_of_this_machine():
    missing = os.path.join(os.path.abspath(sys.path[0]), "missing")
    ending = run_isolated("builtins:open", [missing], seconds=30)
    assert ending.cause == "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"


def test_records_are_read_however_late_their_reader_is(monkeypatch):
    read, records = isolated._read, []

    def late(stream, take):
        time.sleep(0.5)  # as on a machine with more to do
        read(stream, take)

    monkeypatch.setattr(isolated, "_read", late)
    ending = run_isolated("builtins:list", [[{"length": 8}]], seconds=20, on_record=records.append)
    assert (ending.status, records) == ("ok", [{"length": 8}])


def test_without_sessions_of_processes_nothing_is_started(monkeypatch):
    monkeypatch.delattr(os, "getsid")
    with pytest.raises(RuntimeError, match="this platform lacks"):
        run_isolated("builtins:dict", [], seconds=20)
