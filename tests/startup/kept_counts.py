"""The map's counts are made once in a run of the tests: workers and notebooks' kernels would each count for seconds."""

import fcntl
import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

FOLDER = "HILBERT_TEST_COUNTS"  # in the environment: where this run's processes keep them
MODULE, NAMES = "hilbert_lib.lab.ledger.order_map", ("_counted_grids", "_counted_points")


def share_counts() -> None:
    """Where the module is loaded. What counts is tested by itself, and takes no arguments here."""
    if module := sys.modules.get(MODULE):
        for name in NAMES:
            setattr(module, name, kept(name, getattr(module, name)))


def kept(name: str, count: Callable) -> Callable:
    """A function's result, of whichever process asked first."""

    @cache
    def shared():
        with open(Path(os.environ[FOLDER], name), "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # who comes meanwhile waits
            file.seek(0)
            if text := file.read():
                return pickle.loads(text)
            counts = count()
            file.write(pickle.dumps(counts))
            return counts

    return shared
