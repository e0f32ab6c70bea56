"""The manifest of a run: what ran, where, with what, and how it ended."""

import hashlib
import json
import os
import platform
import re
import shutil
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from json import JSONDecodeError
from pathlib import Path

import psutil

from hilbert_lib.files import write_whole
from hilbert_lib.lab.environment import MACHINE, sm_clocks_mhz
from hilbert_lib.lab.records import FAILED
from hilbert_lib.lab.suite.points import Point
from hilbert_lib.machine import code_hash

MANIFEST = "manifest.json"
RESERVE = ".reserve"  # space held while a notebook runs, so that a full disk still takes the manifest
RESERVE_BYTES = 256 * 1024


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


def new_work_folder(run_folder: Path, name: str) -> Path:
    """Where a point runs: hidden, so that its folder appears whole, by renaming."""
    return run_folder / f".{name}.{uuid.uuid4().hex[:8]}"


def start_manifest(point: Point, folder: Path, facts: dict) -> dict:
    """Write the manifest of a run that begins now; "failed" where the disk has no room for more than the manifest."""
    parameters = point.parameters
    manifest = {
        "name": point.name,
        "notebook": point.notebook.name,
        "title": point.notebook.title,
        "question": point.notebook.question,
        "answer": point.notebook.answer,
        "parameters": parameters,
        "changes": point.changes,
        "seeds": {name: value for name, value in parameters.items() if re.search(r"(^|_)seeds?$", name)},
        "notebook_hash": point.notebook.code_hash,
        "library_hash": code_hash(),
        "key": point.key,
        "environment": facts,
        "sm_clocks_mhz": {"before": sm_clocks_mhz(), "after": None},
        "start": _now(),
        "end": None,
        "status": "running",
        "error": None,
        "figures": [],
        "process": _this_process(),
    }
    _write_manifest(folder, manifest)
    try:
        (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
    except OSError as error:
        message = f"no room for the notebook to start: {error.strerror}"
        end_manifest(manifest, folder, {"type": "OSError", "message": message, "cell": None})
    return manifest


def end_manifest(manifest: dict, folder: Path, error: dict | None, *, interrupted: bool = False) -> None:
    """Write how a run ended: `error` holds type, message and cell of what ended it, None where it finished."""
    pictures = sorted(folder.rglob("*.png"), key=lambda path: path.stat().st_mtime_ns)
    (folder / RESERVE).unlink(missing_ok=True)
    manifest |= {
        "status": "interrupted" if interrupted else "failed" if error else "ok",
        "error": error,
        "end": _now(),
        "sm_clocks_mhz": {**manifest["sm_clocks_mhz"], "after": sm_clocks_mhz()},
        "figures": [path.relative_to(folder).as_posix() for path in pictures],
    }
    _write_manifest(folder, manifest)


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a run's folder; None if there is none, or none that can be read."""
    try:
        return json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, JSONDecodeError):
        return None


def is_finished(point: Point, run_folder: Path) -> bool:
    """Whether this very point, in this version of the code, is finished."""
    manifest = read_manifest(run_folder / point.name)
    return manifest is not None and manifest["status"] == "ok" and manifest["key"] == point.key


def final_folder(run_folder: Path, manifest: dict) -> Path:
    """Where a run that has ended belongs: its point's name, or NAME.failed, so that no failure replaces a result."""
    return run_folder / (manifest["name"] + ("" if manifest["status"] == "ok" else FAILED))


def put_in_place(work: Path, run_folder: Path, manifest: dict) -> None:
    """Let the folder of a run that has ended appear at once under its final name, in place of an earlier one."""
    final = final_folder(run_folder, manifest)
    earlier = work.with_name(f"{work.name}.earlier")
    with suppress(FileNotFoundError):
        final.rename(earlier)
    try:
        work.rename(final)
    except OSError:
        if final.exists():  # another job's has appeared, and goes the same way
            shutil.rmtree(earlier, ignore_errors=True)
            return put_in_place(work, run_folder, manifest)
        if earlier.exists():
            earlier.rename(final)
        raise
    for folder in (earlier, *([run_folder / f"{manifest['name']}{FAILED}"] if manifest["status"] == "ok" else [])):
        shutil.rmtree(folder, ignore_errors=True)


def close_abandoned(run_folder: Path) -> list[str]:
    """Put in place what dead processes of this machine left, and name the points that were running."""
    closed = []
    for work in sorted(run_folder.glob(".*/")):
        manifest = read_manifest(work)
        if manifest is None or _may_live(manifest["process"]):
            continue
        with suppress(FileNotFoundError):  # another job has taken it
            work = work.rename(new_work_folder(run_folder, manifest["name"]))
            if manifest["status"] == "running":
                message = f"process {manifest['process']['pid']} ended without a word: killed, or power lost"
                end_manifest(manifest, work, {"type": "Killed", "message": message, "cell": None}, interrupted=True)
                closed.append(manifest["name"])
            later = read_manifest(final_folder(run_folder, manifest))
            if later and later["start"] > manifest["start"]:
                shutil.rmtree(work, ignore_errors=True)
            else:
                put_in_place(work, run_folder, manifest)
    return closed


def error_line(manifest: dict) -> str:
    """What ended a run, in one line.

    >>> error_line({"error": {"type": "ValueError", "message": "too short", "cell": 3}})
    'ValueError: too short (cell In [3])'
    """
    error = manifest["error"]
    place = f" (cell In [{error['cell']}])" if error["cell"] else ""
    return f"{error['type']}: {error['message']}{place}"


def _write_manifest(folder: Path, manifest: dict) -> None:
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _this_process() -> dict:
    # A process number alone says nothing on another machine, or once it is used again. The machine's name
    # is hashed: reports are public.
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    return {"pid": os.getpid(), "started": psutil.Process().create_time(), "machine": machine}


def _may_live(process: dict) -> bool:
    if process["machine"] != _this_process()["machine"]:
        return True
    try:
        return abs(psutil.Process(process["pid"]).create_time() - process["started"]) < 1
    except psutil.NoSuchProcess:
        return False
