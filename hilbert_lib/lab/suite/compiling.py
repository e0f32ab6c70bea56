"""A first pass over a notebook by several processes, so that the run that follows finds its kernels compiled.

Each process executes the notebook's cells, up to the last one with a sweep, in a folder that is thrown away. A sweep
computes the cases that no other process has taken (`lab/first_pass.py`), and gives no records.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Self

import click
import torch
from IPython.display import display

from hilbert_lib.lab.first_pass import FAILED, TOLD, VARIABLE, first_pass
from hilbert_lib.lab.suite.points import OUTPUT_DIR, Point
from hilbert_lib.launch.isolated import Ending, run_isolated
from hilbert_lib.limits.watch import Peaks

SWEEPS = ("run_sides", "run_back_to_back", "run_options", "run_in_print", "pool_comparison")  # which share their cases
POLL_SECONDS = 0.2


def compile_first(point: Point, records: Path, *, processes: int, gpus: int, seconds: float) -> None:
    """Compute the cases of a notebook's sweeps once, in so many processes, and print a line for each.

    Nothing of it is kept but what compilers cache. A failure is printed, and is none of the run's. Whatever this
    raises, KeyboardInterrupt too, no process is left.

    Args:
        point: the notebook and its parameters. records: folder of the records that need not be made again.
        gpus: of the machine; the processes take them in turn, unless CUDA_VISIBLE_DEVICES is set.
        seconds: after which the processes are ended.
    """
    cells = cells_to_run(point)
    if not cells:
        click.echo(f"{point.name}: nothing to compile first, no cell calls any of {', '.join(SWEEPS)}")
        return
    click.echo(f"{point.name}: compiles first, in {processes} processes")
    start = time.monotonic()
    with TemporaryDirectory(ignore_cleanup_errors=True) as name, ThreadPoolExecutor(processes) as pool:
        shared, stop = Path(name), _Stop()
        (shared / TOLD).touch()
        limits = {"seconds": seconds, "watch": lambda _pid: stop}
        calls = []
        try:
            for number in range(processes):
                own = shared / f"process_{number}"
                own.mkdir()
                for file in records.glob("*.jsonl"):
                    shutil.copy(file, own)
                order = {"cells": cells, "shared": str(shared), "own": str(own)}
                order |= {"environment": _environment(number, processes, gpus), "threads": _share_of_cores(processes)}
                calls.append(pool.submit(run_isolated, f"{__name__}:compute_cells", [order], **limits))
            told = list(_follow(calls, shared / TOLD, point.name))
        except BaseException:
            stop.cause = "interrupted"  # the pool waits until all have ended
            raise
    for cause in dict.fromkeys(call.result().cause for call in calls if call.result().cause):
        click.echo(f"{point.name}: the first pass ended early: {cause}")
    failed = sum(FAILED in line for line in told)
    took = time.monotonic() - start
    click.echo(f"{point.name}: {len(told)} cases computed first in {took:.0f} s, {failed} of them failed; now it runs")


def cells_to_run(point: Point) -> list[str]:
    """The code of the notebook's cells with the point's parameters, up to the last cell that calls one of `SWEEPS`."""
    sources, needed = [], 0
    for cell in json.loads(point.notebook.path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        sources.append(source)
        if any(f"{name}(" in source for name in SWEEPS):
            needed = len(sources)
        if "parameters" in cell["metadata"].get("tags", []):
            values = dict(point.changes)
            if OUTPUT_DIR in point.notebook.parameters:
                values[OUTPUT_DIR] = "."
            sources.append("\n".join(f"{name} = {value!r}" for name, value in values.items()))
    return sources[:needed]


def compute_cells(order: dict) -> None:
    """Execute cells one after another: a target of `run_isolated`.

    A cell that fails after a sweep may have missed its records: the next ones are executed all the same, since they may
    have sweeps of their own. What a cell raises before any sweep is raised.

    order: cells; shared and own, the folders of all processes and of this one; environment, variables that it sets;
    threads, how many torch takes: it is loaded before the variables are set.
    """
    torch.set_num_threads(order["threads"])
    os.environ.update(order["environment"] | {VARIABLE: order["shared"]})
    os.chdir(order["own"])
    main = sys.modules["__main__"] = ModuleType("__main__")  # torch looks there for the globals of a cell's functions
    main.display = display  # a notebook has it without an import
    for number, source in enumerate(order["cells"]):
        path = Path(f"cell_{number}.py").resolve()
        path.write_text(source, encoding="utf-8")  # Triton reads the source of a kernel from its file
        try:
            exec(compile(source, str(path), "exec"), vars(main))
        except Exception:  # after a sweep a cell may want its records, and what else is wrong the run meets and tells
            if not first_pass().lacks_records:
                raise


class _Stop:
    """Ends the processes of a first pass, for `run_isolated` in place of a `Watcher`."""

    def __init__(self):
        self.cause, self.peaks = "", Peaks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error) -> None:
        pass


def _environment(number: int, processes: int, gpus: int) -> dict[str, str]:
    """Variables of a process: its GPU, its share of the cores, and pictures that no screen shows."""
    variables = {"MPLBACKEND": "agg"}
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = str(_share_of_cores(processes))
    if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        variables["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
    return variables


def _share_of_cores(processes: int) -> int:
    return max(1, os.cpu_count() // processes)


def _follow(calls: list[Future[Ending]], told: Path, name: str) -> Iterator[str]:
    """Print what the processes tell, until all have ended; yields it line by line."""
    with told.open(encoding="utf-8") as file:
        running = set(calls)
        while running:
            running = wait(running, timeout=POLL_SECONDS).not_done
            while (line := file.readline()).endswith("\n"):
                click.echo(f"{name}: {line.rstrip()}")
                yield line
