"""Names that say nothing: how many of the names that a file assigns are words without a meaning of their own.

    python scripts/count_names.py                                    # the library
    python scripts/count_names.py hilbert_lib/patterns tests/cases.py

Every place that binds a name counts once: an assignment, an argument, a field, the target of a loop, of a
comprehension, of `with` and of `:=`. Underscores around a name and digits at its end are left out: `_found` and
`found2` are `found`. A name of several words (`own_lowest`) is not empty. The first column counts the thirteen words of
`EMPTY`, the second those of `AS_EMPTY`, which has others too.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

EMPTY = {"each", "side", "own", "given", "found", "at", "seen", "told", "one", "asked", "held", "kept", "more"}
# Other words that stand where a noun should.
AS_EMPTY = EMPTY | {
    *("data", "obj", "stuff", "temp", "thing", "things", "tmp", "todo"),
    *("every", "most", "other", "others", "some", "these", "those", "whole"),
    *("known", "made", "said", "taken", "wanted"),
    *("here", "now", "there"),
}
ROOT = Path(__file__).resolve().parents[1]


def names(source: str) -> Iterator[str]:
    """Every name that a source binds, as often as it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def word(name: str) -> str:
    return name.strip("_").rstrip("0123456789").rstrip("_")


def counted(path: Path) -> tuple[int, Counter[str]]:
    """How many names a file binds, and how often each empty word is one."""
    bound = [word(name) for name in names(path.read_text(encoding="utf-8"))]
    return len(bound), Counter(name for name in bound if name in AS_EMPTY)


def table(paths: list[Path]) -> Iterator[str]:
    """A line for each file with empty names, those with the largest share first; then all files."""
    counts = {path: counted(path) for path in paths}
    total, empty = sum(count for count, _ in counts.values()), sum((words for _, words in counts.values()), Counter())
    yield f"{'thirteen':>15} {'all empty':>15} {'of':>7}  file: words"
    for path, (count, words) in sorted(counts.items(), key=lambda item: -item[1][1].total() / max(1, item[1][0])):
        if words:
            yield line(count, words, str(path.relative_to(ROOT)))
    yield line(total, empty, "all")


def line(count: int, words: Counter[str], where: str) -> str:
    thirteen = sum(times for name, times in words.items() if name in EMPTY)
    shares = " ".join(f"{times:7} {times / max(1, count):7.1%}" for times in (thirteen, words.total()))
    return f"{shares} {count:7}  {where}: " + " ".join(f"{name} {times}" for name, times in words.most_common())


def main() -> None:
    """Print the table of the files and folders named, or of the library."""
    roots = [Path(argument).resolve() for argument in sys.argv[1:]] or [ROOT / "hilbert_lib"]
    paths = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    print(*table(paths), sep="\n")


if __name__ == "__main__":
    main()
