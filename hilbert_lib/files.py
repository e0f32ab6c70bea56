"""Text files that are whole or not there."""

import os
import uuid
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write a file; a reader finds the old one or the new one, never half of one, whoever else writes it.

    Args:
        path: of the file, in a folder that exists.
        text: all that it holds.

    Raises:
        OSError: if it cannot be written; nothing is left of it then.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "one.txt", "whole").read_text()
    'whole'
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a name that outlives a loss of power would else be that of an empty file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path
