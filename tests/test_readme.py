"""What the README says can be done, is done here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/hilbert ((?:list|run|sweep).*?)(?:  +#.*)?$", README, re.M)
HELP = re.findall(r"Example: hilbert ((?:run|sweep).*)$", (ROOT / "hilbert_lib/cli.py").read_text(), re.M)


def test_the_library_example_runs_and_an_ordering_changes_nothing():
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S).group(1), names)
    assert names["out"].equal(names["same"])


@pytest.mark.parametrize("command", COMMANDS + HELP)
def test_its_commands_and_those_of_the_help_are_understood(command):
    arguments = [*command.split(), *([] if command == "list" else ["--dry-run"])]
    run = [sys.executable, "-c", "from hilbert_lib.cli import main; main()", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_notebook_is_listed():
    assert re.findall(r"\(notebooks/(\w+\.ipynb)\)", README) == [
        path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    ]


def test_every_make_target_that_it_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)) - {"names"}:
        assert re.search(rf"^{target}:", makefile, re.M), target
