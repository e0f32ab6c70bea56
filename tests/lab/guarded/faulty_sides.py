"""Sides that break in every way a benchmark can, for tests of the runner. Without torch, a process starts at once."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HANG_SECONDS = 600  # longer than any test waits


class OutOfMemoryError(RuntimeError):
    """Named and worded like torch's."""


def measure(point: dict) -> Iterator[dict]:
    """The first side beside each other, as the attention benchmark does it; a side's name is what it does."""
    first, *others = point["sides"]
    run(first)
    if not others:
        yield {"kind": "measurement", **record(first, point)}
    for other in others:
        run(other)
        yield {"kind": "comparison", "a": record(first, point), "b": record(other, point)}


def record(side: str, point: dict) -> dict:
    return {"name": side, "parameters": {"length": point["length"]}, "error": 0.0, "pid": os.getpid()}


def run(side: str) -> None:
    print(f"running {side}", flush=True)
    FAULTS.get(side, lambda: None)()


def fail(error: Exception) -> None:
    raise error


def fill_the_disk() -> None:
    with open("/dev/full", "w") as file:
        file.write("more than it holds")


def hang() -> None:
    time.sleep(HANG_SECONDS)


def hang_and_say_so() -> None:
    wait_for_file("read")  # the pairs before it
    Path("hangs").symlink_to(str(start_a_stranger()))  # whole at once
    hang()


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def abort_once() -> None:
    if not Path(os.environ["ABORTS_ONCE"]).exists():
        Path(os.environ["ABORTS_ONCE"]).touch()
        os.abort()


SLEEP = [sys.executable, "-c", f"import time; time.sleep({HANG_SECONDS})"]


def start_a_stranger() -> int:
    """The number of a process that has neither the session nor the mark of this one."""
    return subprocess.Popen(SLEEP, env={}, start_new_session=True).pid


def start_others(then: Callable[[], object]) -> None:
    """Children with the session, the mark or the parent of this one, and strangers that have none of them."""
    orphan = (
        "import subprocess as s, sys; p = s.Popen(sys.argv[1:], stdout=s.DEVNULL, start_new_session=True); print(p.pid)"
    )
    told = subprocess.run([sys.executable, "-c", orphan, *SLEEP], env={}, stdout=subprocess.PIPE, check=True)
    others = [subprocess.Popen(SLEEP, **how).pid for how in ({}, {"start_new_session": True}, {"env": {}})]
    print("started", start_a_stranger(), int(told.stdout), *others, flush=True)
    then()


ILLEGALLY = "CUDA error: an illegal memory access was encountered"
FAULTS = {
    "takes a GB": lambda: bytearray(2**30),
    "waits": lambda: wait_for_file(os.environ["WAITS_FOR"]),
    "uses all memory": lambda: bytearray(2**50),
    "gets no GPU memory": lambda: fail(OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nGPU 0 ...")),
    "hangs": hang,
    "hangs and says so": hang_and_say_so,
    "aborts": os.abort,
    "aborts once": abort_once,
    "segfaults": lambda: ctypes.string_at(0),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "reads illegally": lambda: fail(RuntimeError(f"{ILLEGALLY}\nCUDA kernel errors ...")),
    "fills the disk": fill_the_disk,
    "starts others": lambda: start_others(lambda: None),
    "starts others and hangs": lambda: start_others(hang),
    "starts others and aborts": lambda: start_others(os.abort),
    "exits": lambda: os._exit(7),
    "ends early": lambda: os._exit(0),
    "is wrong": lambda: [][1],
}
