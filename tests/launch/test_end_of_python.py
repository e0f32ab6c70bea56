"""The end of Python: a thread that wants the interpreter then ends the process by SIGABRT, after all work is done.

Before Python 3.14 such a thread is ended where it stands. In a function of C++ that gave the interpreter away, as
torch's operators do, no thread may be ended: C++ says "terminate called without an active exception", and aborts.
Here the end is made long, so that every thread of that kind gets there.
"""

import signal
import subprocess
import sys
import textwrap

import pytest
from own_processes import PATIENCE

LINGERING = """
    import sys, time

    class Lingering:
        def __del__(self, sleep=time.sleep, seconds={seconds}):
            sleep(seconds)  # the interpreter is free, and its end has begun

    sys.modules["lingering"] = Lingering()
"""
OPERATORS_IN_A_THREAD = """
    import threading
    import torch

    def compute():
        x = torch.ones(2000)
        while True:
            x.sin()

    threading.Thread(target=compute, daemon=True).start()
    print("done", flush=True)
"""
# A dozen kernels compile beside each other, those of a backward in a thread of autograd's.
MANY_KINDS = """
    from contextlib import suppress
    from itertools import product
    import torch
    from hilbert_lib import DilatedPattern, Neighbourhood, Union, attend

    PATTERNS = {
        128: [DilatedPattern([64, 128], [1, 2]), Neighbourhood((128,), 9)],
        256: [Neighbourhood((16, 16), 5), Union([Neighbourhood((16, 16), 3), Neighbourhood((16, 16), 3, dilation=2)])],
    }
    CALLS = [
        (rows, pattern, *how)
        for rows, patterns in PATTERNS.items()
        for pattern in patterns
        for how in product(("auto", "triton", "flex"), (torch.bfloat16, torch.float32), (False, True))
    ]
    for rows, pattern, backend, dtype, has_gradient in CALLS:
        q, k, v = (torch.randn(1, rows, 2, 64, device="cuda", dtype=dtype).requires_grad_(has_gradient) for _ in "qkv")
        with suppress(ValueError):  # not every backend serves every call
            out = attend(q, k, v, pattern, backend=backend)
            if has_gradient:
                out.sum().backward()
    print("done", flush=True)
"""


def end_of(program: str, seconds: float) -> subprocess.CompletedProcess:
    """How a process ends whose end takes so long."""
    lines = textwrap.dedent(LINGERING.format(seconds=seconds)) + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a thread that comes late waits there, and is not ended")
def test_a_thread_in_an_operator_of_torch_ends_the_process_when_python_ends():
    # Far longer than it takes: the process ends as soon as the thread comes.
    ended = end_of(OPERATORS_IN_A_THREAD, seconds=60)
    assert ended.stdout == "done\n"
    assert ended.returncode == -signal.SIGABRT
    assert "terminate called without an active exception" in ended.stderr


@pytest.mark.gpu
def test_on_a_gpu_no_thread_is_left_that_wants_the_interpreter():
    ended = end_of(MANY_KINDS, seconds=10)
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr
