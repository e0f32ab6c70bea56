"""The folders of runs: where a notebook runs, and where its folder belongs once the run has ended.

    reports/local/cpu-torch2.13.0-0a1b2c3d/     every run of this code on this hardware: `run_id`
        .05_choice.1a2b3c4d/                    a run that goes on: hidden, and locked by its process
            .living                             the locked file; its bytes are room for the manifest on a full disk
            running.ipynb                       what papermill executes
            manifest.json                       "status": "running"
        05_choice/                              a run that finished, in place of an earlier one
        05_choice.failed/                       one that failed or was interrupted, beside an earlier result

A run's folder goes this way. Each step is one rename, so that no reader ever sees half a run:

    work_folder ----> reserve_room ----> conclude ----> 05_choice/ or 05_choice.failed/
         |                                  ^
         '--- its process was killed ----> close_abandoned, called by the next run
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hilbert_lib.lab.environment import MACHINE
from hilbert_lib.lab.records import FAILED
from hilbert_lib.lab.suite.manifest import INTERRUPTION, OK, end_manifest, read_manifest

LIVING = ".living"
RESERVE_BYTES = 256 * 1024
RUNNING = "running.ipynb"  # to papermill a path may be a URL, standard input or a pattern with braces
EARLIER = ".earlier"  # in the folder that replaces it


def run_id(facts: dict) -> str:
    """The folder of every run of this code on this hardware with these versions, as `cpu-torch2.13.0-0a1b2c3d`.

    A second call finds what the first one finished, and the jobs of an array share one folder. The commit is no part
    of it: one that leaves the library alone would run everything again.
    """
    deciding = json.dumps([facts[name] for name in (*MACHINE, "python", "numpy")])
    digest = hashlib.sha256(deciding.encode()).hexdigest()[:8]
    device = facts["hardware"] if facts["gpus"] else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{slug}-torch{facts['torch'].split('+')[0]}-{digest}"


@contextmanager
def work_folder(run_folder: Path, name: str) -> Iterator[Path]:
    """A new hidden folder for the run of a point. It is locked: no other process takes it for abandoned."""
    work = run_folder / f".{name}.{uuid.uuid4().hex[:8]}"
    work.mkdir(parents=True)
    with (work / LIVING).open("ab") as file:
        with suppress(OSError):  # on a file system without locks nobody can take it either
            _lock(file, wait=True)  # for one that looks whether it is abandoned
        yield work


def reserve_room(work: Path) -> None:
    """Take the room that the manifest needs in the end, so that nothing starts on a disk that has none."""
    try:
        (work / LIVING).write_bytes(bytes(RESERVE_BYTES))
    except OSError as error:
        raise OSError(f"no room for the notebook to start: {error.strerror}") from error


def conclude(
    work: Path, run_folder: Path, manifest: dict, error: dict | None, *, seconds: float = 0, status: str = ""
) -> None:
    """End a run: write its manifest (arguments as of `end_manifest`), and put its folder in place."""
    with suppress(FileNotFoundError):
        os.truncate(work / LIVING, 0)
        (work / RUNNING).rename(work / f"{manifest['notebook']}.ipynb")
    end_manifest(manifest, work, error, seconds=seconds, status=status)
    put_in_place(work, run_folder, manifest)


def final_folder(run_folder: Path, manifest: dict) -> Path:
    """Folder of a run that has ended: its point's name, or NAME.failed, so that no failure replaces a result."""
    return run_folder / (manifest["name"] + ("" if manifest["status"] == OK else FAILED))


def put_in_place(work: Path, run_folder: Path, manifest: dict) -> None:
    """Let the folder of a run that has ended appear at once under its final name, in place of an earlier one."""
    final, earlier = final_folder(run_folder, manifest), work / EARLIER
    with suppress(FileNotFoundError):
        final.rename(earlier)
    try:
        work.rename(final)
    except OSError:
        if work.exists() and final.exists():  # another job's has appeared, and goes the same way
            shutil.rmtree(earlier, ignore_errors=True)
            return put_in_place(work, run_folder, manifest)
        if earlier.exists():
            earlier.rename(final)
        raise
    (final / LIVING).unlink(missing_ok=True)
    shutil.rmtree(final / EARLIER, ignore_errors=True)
    if manifest["status"] == OK:
        shutil.rmtree(run_folder / f"{manifest['name']}{FAILED}", ignore_errors=True)


def close_abandoned(run_folder: Path) -> list[str]:
    """Put in place what dead processes left, and name the points that were running."""
    closed = []
    for work in sorted(run_folder.glob(".*/")):
        with suppress(OSError), (work / LIVING).open("rb+") as file:
            _lock(file)  # an OSError where its process lives, or another job has taken it
            manifest = read_manifest(work)
            if manifest is None:
                continue
            if manifest["status"] == "running":
                error = {"type": "Killed", "message": "its process was killed, or power was lost", "cell": None}
                conclude(work, run_folder, manifest, error, status=INTERRUPTION)
                closed.append(manifest["name"])
            else:  # it died between its manifest and its place
                put_in_place(work, run_folder, manifest)
    return closed


def _lock(file: BinaryIO, *, wait: bool = False) -> None:
    """Lock a file until it is closed or this process ends; without `wait` an OSError says that another one holds it.

    A process's number and start say less: containers share numbers, and the system's clock may be set anew.
    """
    import fcntl  # Windows has none: there the commands need WSL, and reading manifests does not

    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
