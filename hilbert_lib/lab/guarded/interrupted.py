"""Ctrl-C for a runner whose point holds memory: what its file says then, how long its end takes and what is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from hilbert_lib.lab.records import read_records
from hilbert_lib.limits.memory import present_device

MEASURED, HOLDING = "measured before", "holds memory"  # the sides of the two points
HELD_BYTES = 2**28
BEGIN_SECONDS = 180.0  # in which the runner has to hold the memory: torch is imported three times until then
PATIENCE_SECONDS = 20.0
BEGUN = Path("begun")
PROGRAM = f"""
import signal, sys
from hilbert_lib.lab.guarded.cases import Benchmark
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this was started in a background
points = [{{"sides": [side], "device": sys.argv[1]}} for side in ({MEASURED!r}, {HOLDING!r})]
benchmark = Benchmark("hilbert_lib.lab.guarded.interrupted:measure")
SafeBenchmarkRunner("points.jsonl", benchmark=benchmark, device=sys.argv[1]).run(points)
"""


@dataclass(frozen=True)
class Interruption:
    """What became of a runner that was interrupted.

    Attributes:
        measured: status, in its file, of the point that had been measured; empty where the file has none.
        interrupted: status of the point that held memory, in the same way.
        seconds: from the interrupt until the runner and all its processes were gone.
        left: processes that were not gone after 20 s.
    """

    measured: str
    interrupted: str
    seconds: float
    left: tuple[int, ...]


def interrupt_runner(device: torch.device | str) -> Interruption:
    """Interrupt a `SafeBenchmarkRunner` in a process of its own while its second point holds 256 MiB of the device.

    Args:
        device: the CPU or a GPU.

    Raises:
        TypeError, ValueError: for what is no such device.
        RuntimeError: if the runner ended before it could be interrupted, or held no memory within three minutes.

    >>> stopped = interrupt_runner("cpu")
    >>> stopped.measured, stopped.interrupted, stopped.left
    ('ok', 'interrupted', ())
    """
    device = present_device(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = os.pathsep.join(map(os.path.abspath, sys.path))  # the runner imports what this process can
        command = [sys.executable, "-c", PROGRAM, str(device)]
        environ = {**os.environ, "PYTHONPATH": paths}
        runner = psutil.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + BEGIN_SECONDS
            while not (folder / BEGUN).exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the runner held no memory within {BEGIN_SECONDS:g} s: nothing to interrupt")
                if runner.poll() is not None:
                    raise RuntimeError(f"the runner ended before it could be interrupted, with {runner.returncode}")
                time.sleep(0.02)
            family = [runner, *runner.children(recursive=True)]
            start = time.monotonic()
            runner.send_signal(signal.SIGINT)
            _, living = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
            seconds = time.monotonic() - start
        finally:
            with suppress(psutil.Error):  # it has ended, or does not
                runner.kill()  # all that it started ends with it
                runner.wait(PATIENCE_SECONDS)
        lines = read_records(folder / "points.jsonl")
    statuses = {side: outcome["status"] for line in lines for side, outcome in line["outcomes"].items()}
    left = tuple(each.pid for each in living)
    return Interruption(statuses.get(MEASURED, ""), statuses.get(HOLDING, ""), seconds, left)


def measure(point: dict) -> Iterator[dict]:
    """A record of the first point at once; the second one holds memory, and would do so for a minute."""
    if point["sides"] == [HOLDING]:
        held = torch.ones(HELD_BYTES, dtype=torch.uint8, device=point["device"])
        BEGUN.touch()
        time.sleep(60)
        del held
    yield {"name": point["sides"][0]}
