"""One harness for every sweep: nothing is measured twice, and each record is on the disk at once."""

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.records import RESULTS, append_lines, measured_before

Point = TypeVar("Point")


class Kept:
    """The records of a folder's file from this code on this hardware, by key, and the way to add one.

    An empty output_dir keeps nothing on the disk; write says whether what is added goes there. The key of a record of
    another sweep is None.

    >>> kept = Kept("", key=lambda record: record.get("length"))
    >>> kept.add({"length": 8})["environment"] == environment(), 8 in kept.known
    (True, True)
    """

    def __init__(
        self, output_dir: str | Path, key: Callable[[dict], Hashable], *, write: bool = True, file: str = RESULTS
    ):
        self._path = Path(output_dir) / file if output_dir and write else None
        self._key, self._facts = key, environment()
        self.known = {key(record): record for record in measured_before(output_dir, file)}
        self.known.pop(None, None)

    def add(self, record: dict) -> dict:
        """Keeps a record with its environment, and returns both."""
        record = {**record, "environment": self._facts}
        if self._path:
            append_lines([record], self._path)
        self.known[self._key(record)] = record
        return record


def sweep(
    points: Iterable[Point],
    measure: Callable[[Point], dict],
    *,
    key: Callable[[Point], Hashable],
    of_record: Callable[[dict], Hashable],
    output_dir: str | Path = "",
    write: bool = True,
    label: Callable[[Point], str] = str,
    line: Callable[[dict], str] | None = None,
) -> list[dict]:
    """Measure each point once, and keep each record as soon as it is known.

    A point that the folder's results.jsonl holds from this code on this hardware is not measured again, so that an
    interrupted sweep goes on where it was. A point without room in the device's memory is left out and said so.

    points: asked for one at a time, so that a generator keeps one workload in memory. measure: of a point: its record,
    which JSON can hold. key: of a point. of_record: the same of its record; None for a record of another sweep.
    output_dir, write: as of `Kept`. label: what a point is called where it is left out, and before its `line`.
    line: of a record, to be printed; by default nothing is.

    >>> sweep([1, 2], lambda n: {"n": n, "ms": 0.5 * n}, key=int, of_record=lambda each: each.get("n"))[1]["ms"]
    1.0
    """
    kept, records = Kept(output_dir, of_record, write=write), []
    for point in points:
        record = kept.known.get(key(point))
        try:
            records.append(kept.add(measure(point)) if record is None else record)
        except torch.OutOfMemoryError as error:
            print(f"{label(point)}: left out, no room: {str(error).splitlines()[0]}", flush=True)
            continue
        if line:
            print(f"{label(point)}: {line(records[-1])}", flush=True)
    return records
