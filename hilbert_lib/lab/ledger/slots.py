"""Numbers in sentences written by hand: `<!--name-->0.98<!--/-->` holds the number of that name.

`python -m hilbert_lib.lab.ledger.slots` writes the numbers of the newest records into every text that has slots.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from hilbert_lib.files import write_whole
from hilbert_lib.lab.ledger.claim import ROOT

SLOT = re.compile(r"<!--(\w+)-->(.*?)<!--/-->", re.DOTALL)
TEXTS = ("README.md", "reports/README.md", "notebooks/*.ipynb")


def fill(text: str, numbers: Mapping[str, str]) -> str:
    """A text with the numbers of its slots.

    Args:
        text: of a Markdown file, or of a notebook's file.
        numbers: by name.

    Raises:
        ValueError: for a slot of an unknown name.

    >>> fill("ran at <!--best-->?<!--/--> times the speed", {"best": "4.97"})
    'ran at <!--best-->4.97<!--/--> times the speed'
    """

    def filled(slot: re.Match) -> str:
        if slot[1] not in numbers:
            raise ValueError(f"a slot must have the name of a number of ledger/numbers.py, got {slot[1]!r}")
        return f"<!--{slot[1]}-->{numbers[slot[1]]}<!--/-->"

    return SLOT.sub(filled, text)


def filled_texts(root: Path = ROOT) -> dict[Path, str]:
    """Every text of the checkout that has slots, with the numbers of the newest records. Links lead from the file."""
    from hilbert_lib.lab.ledger.numbers import numbers

    texts = {}
    for path in (path for pattern in TEXTS for path in sorted(root.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        if SLOT.search(text):
            below = f"{path.relative_to(root).parent.as_posix()}/"  # of the folder that the links lie in already
            texts[path] = fill(text, {name: value.replace(f"]({below}", "](") for name, value in numbers().items()})
    return texts


if __name__ == "__main__":
    for path, text in filled_texts().items():
        print(write_whole(path, text))
