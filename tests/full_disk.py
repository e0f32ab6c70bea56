"""A disk that is full, for the tests of what is written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def room_for(length: int) -> Iterator[None]:
    """Inside, no file can grow past a length, as on a disk with that much room. Nothing may be reported meanwhile."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
