"""Files that are whole or not there, and what is written: JSON, and lines."""

import json
import os
import re
import uuid
from pathlib import Path


def json_text(value: object, **layout) -> str:
    """A value as JSON, which has no word for what is no number: NaN is null, and infinity 1e999, which is read as such.

    Args:
        value: what `json.dumps` takes. layout: its other arguments.

    >>> json_text({"error": float("nan"), "limits": [0.5, float("-inf")], "cause": "NaN"})
    '{"error": null, "limits": [0.5, -1e999], "cause": "NaN"}'
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:  # there is one, or a circle, which raises again
        return _WORDS.sub(lambda match: _NUMBERS.get(match[0], match[0]), json.dumps(value, **layout))


_NUMBERS = {"NaN": "null", "Infinity": "1e999", "-Infinity": "-1e999"}
_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')  # strings too, which may hold any of these


LONGEST_LINE = 500
_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])")  # colours and the like, of a terminal


def one_line(text: object) -> str:
    """The first line of a text that says something, in printable characters, at most 500; "" if there is none.

    An error's message may hold anything: line ends of every kind, a terminal's colours, a megabyte.

    >>> one_line("\\x1b[31m\\r\\n too\\tshort \\x00\\n at line 3")
    'too short'
    """
    for line in str(text).splitlines():
        printable = _ESCAPE_SEQUENCES.sub("", line[: 20 * LONGEST_LINE])
        words = "".join(character if character.isprintable() else " " for character in printable).split()
        if line_text := " ".join(words):
            return line_text if len(line_text) <= LONGEST_LINE else f"{line_text[: LONGEST_LINE - 1]}…"
    return ""


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
