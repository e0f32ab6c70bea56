"""A run's manifest: what ran, where, with what, and how it ended. It is a JSON file in the run's folder."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hilbert_lib.files import json_text, one_line, write_whole
from hilbert_lib.lab.environment import sm_clocks_mhz
from hilbert_lib.lab.suite.points import Point
from hilbert_lib.machine import code_hash

MANIFEST = "manifest.json"
OK, FAILURE, INTERRUPTION = "ok", "failed", "interrupted"  # how a run ends; "running" until then


def start_manifest(point: Point, folder: Path, facts: dict) -> dict:
    """Write the manifest of a run that begins now.

    facts: of `environment`.
    """
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
        "start": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "end": None,
        "status": "running",
        "error": None,
        "figures": [],
    }
    _write(manifest, folder)
    return manifest


def end_manifest(manifest: dict, folder: Path, error: dict | None, *, seconds: float = 0, status: str = "") -> None:
    """Write how a run ended, into the dictionary and its file.

    error: type, message and cell of what ended the run; None if it finished.
    seconds: how long it took. The system's clock may have been set anew since the start.
    status: by default "ok" without an error, else "failed".
    """
    pictures = sorted(folder.rglob("*.png"), key=lambda path: path.stat().st_mtime_ns)
    end = datetime.fromisoformat(manifest["start"]) + timedelta(seconds=seconds)
    manifest |= {
        "status": status or (FAILURE if error else OK),
        "error": error,
        "end": end.isoformat(timespec="milliseconds"),
        "sm_clocks_mhz": {**manifest["sm_clocks_mhz"], "after": sm_clocks_mhz()},
        "figures": [path.relative_to(folder).as_posix() for path in pictures],
    }
    _write(manifest, folder)


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a run's folder; None if there is none, or none that can be read: others use this name too."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and {"key", "notebook", "status"} <= manifest.keys() else None


def error_line(manifest: dict) -> str:
    """Error that ended a run, in one line.

    >>> error_line({"error": {"type": "ValueError", "message": "too short", "cell": 3}})
    'ValueError: too short (cell In [3])'
    """
    error = manifest["error"]
    place = f" (cell In [{error['cell']}])" if error["cell"] else ""
    return f"{one_line(error['type'])}: {one_line(error['message'])}{place}"


def _write(manifest: dict, folder: Path) -> None:
    write_whole(folder / MANIFEST, json_text(manifest, indent=1) + "\n")
