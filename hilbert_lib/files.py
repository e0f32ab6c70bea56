"""Files that are whole or not there."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file: a reader finds the old content or the new, whole, whoever else writes; an error keeps the old."""
    draft = path.with_name(f".{uuid.uuid4().hex[:8]}")  # short, as the name may be as long as any
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # a name that outlives a loss of power would else be that of an empty file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path
