"""The first pass of a notebook, as its sweeps see it: processes compute its cases once, so that kernels are compiled.

    process 1   cell 3  cell 9: case 0, case 2, ...        cell 15: case 41, ...
    process 2   cell 3  cell 9: case 1, case 3, ...        cell 15: case 40, ...

Every process numbers the cases of all sweeps alike, and a case belongs to the process that comes to it first. Compiled
kernels lie in caches on the disk, where the run that follows finds them. `suite/compiling.py` starts the processes.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path

import torch

from hilbert_lib.files import one_line

VARIABLE = "HILBERT_FIRST_PASS"  # environment variable: the folder that the processes of a first pass share
TOLD = "told"  # file in it: a line for each case
FAILED = "failed: "  # in such a line


class LeftOut(Exception):
    """Work that a first pass does not share: training, counting, ranks."""


class FirstPass:
    """The part of this process in a first pass.

    folder: shared by its processes; holds a file for each case that one of them has taken.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     one, other = FirstPass(folder), FirstPass(folder)
    ...     one.compute([("small", [lambda: print("computed")])])
    ...     other.compute([("small", [lambda: print("computed twice")])])
    computed
    """

    def __init__(self, folder: str | Path):
        self._folder, self._numbers = Path(folder), count()
        self.lacks_records = False  # whether later cells may fail for want of records

    def leave_out(self, what: str) -> None:
        """Raise `LeftOut`: this is not shared."""
        self.lacks_records = True
        raise LeftOut(f"{what} is no part of a first pass")

    def compute(self, cases: Iterable[tuple[str, Sequence[Callable[[], object]]]]) -> None:
        """Run the calls of each case that no other process has taken, and tell what became of it.

        cases: a label and calls. SystemExit where a GPU has met an error that no later call of this process survives.
        """
        self.lacks_records = True
        for label, runs in cases:
            try:
                (self._folder / f"case_{next(self._numbers)}").touch(exist_ok=False)
            except FileExistsError:
                continue
            self._tell(f"{label}: {_outcome(runs)}")
            _check_gpu()

    def _tell(self, line: str) -> None:
        with (self._folder / TOLD).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@cache
def first_pass() -> FirstPass | None:
    """The first pass that this process belongs to; None in a run, which measures."""
    folder = os.environ.get(VARIABLE)
    return FirstPass(folder) if folder else None


def _outcome(runs: Sequence[Callable[[], object]]) -> str:
    start, errors = time.perf_counter(), []
    for run in runs:
        try:
            run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:  # the run that follows meets it too, and judges it
            errors.append(f"{FAILED}{one_line(f'{type(error).__name__}: {error}')}")
    return "; ".join(errors) or f"{time.perf_counter() - start:.1f} s"


def _check_gpu() -> None:
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.exit(f"its GPU serves it no more: {one_line(error)}")
    torch.cuda.empty_cache()  # the other processes use the same memory
