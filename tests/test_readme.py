"""What the README says can be done, is done here."""

import re
from pathlib import Path

import oracle
import pytest
import torch
from click.testing import CliRunner

from hilbert_lib.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/hilbert ((?:list|run|sweep).*?)(?:  +#.*)?$", README, re.M)
SEED_NAMES = re.findall(r"^\| `(\w+)` \| `(.*?)`", README.split("## From the documents' names")[1], re.M)
HELP = re.findall(r"Example: hilbert ((?:run|sweep).*)$", (ROOT / "hilbert_lib/cli/main.py").read_text(), re.M)


def test_the_library_examples_run_and_an_ordering_changes_nothing():
    first, grid = re.findall(r"```python\n(.*?)```", README, re.S)[:2]
    names = {}
    exec(first, names)
    assert names["out"].equal(names["same"])
    torch.manual_seed(0)
    exec(grid, names)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1024, 8, 64) for _ in range(3))
    torch.testing.assert_close(names["out"], oracle.neighbourhood_attention(q, k, v, names["near"]).float())


def test_its_names_of_the_documents_are_those_of_docs():
    theirs = re.findall(
        r"^\| `(\w+)` \| `(.*?)`", (ROOT / "docs/names.md").read_text().split("## Their scripts")[0], re.M
    )
    assert theirs == SEED_NAMES  # which tests/test_docs.py runs


@pytest.mark.parametrize("command", COMMANDS + HELP)
def test_its_commands_and_those_of_the_help_are_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(main, [*command.split(), *([] if command == "list" else ["--dry-run"])])
    assert done.exit_code == 0, done.output


def test_every_notebook_is_listed():
    assert re.findall(r"\(notebooks/(\w+\.ipynb)\)", README) == [
        path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    ]


def test_every_make_target_that_it_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.M)) - {"names"}:
        assert re.search(rf"^{target}:", makefile, re.M), target
