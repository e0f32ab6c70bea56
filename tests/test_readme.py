"""What the README says can be done, is done here."""

import itertools
import re
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
from click.testing import CliRunner

from hilbert_lib import DilatedAttention, DilatedPattern, Ordering, run_ranks
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


def test_every_ring_of_the_documents_names_equals_the_oracle_on_two_ranks():
    calls = [call for _, call in SEED_NAMES if call.startswith("RingDilatedAttention(")]
    assert len(calls) == 6
    asked = {"calls": [["calls_of_the_documents", {"calls": calls, "segment_length": 16}]]}
    for (differences,) in run_ranks("ring_ranks:run", 2, asked):
        assert len(differences) == len(calls)
        assert max(differences) < 1e-5, dict(zip(calls, differences, strict=True))


@pytest.mark.parametrize("call", [call for _, call in SEED_NAMES if call.startswith("DilatedAttention(")])
def test_every_module_of_the_documents_names_equals_the_oracle(call):
    if "triton" in call:
        pytest.importorskip("triton")
    pattern = DilatedPattern((16, 32), (1, 2), mixing="head_groups")
    made = eval(
        call, {"DilatedAttention": DilatedAttention, "Ordering": Ordering, "partial": partial, "pattern": pattern}
    )
    assert made.kv_ordering(32) != Ordering.linear(32)
    q, k, v = torch.randn(3, 1, 32, 2, 16).unbind()
    torch.testing.assert_close(made(q, k, v), oracle.attention(q, k, v, pattern)[0].float())


def test_the_order_of_the_documents_mixin_is_a_hilbert_curve_and_is_undone():
    ((_, call),) = [row for row in SEED_NAMES if row[0] == "HilbertAttentionMixin"]
    order = eval(call, {"Ordering": Ordering, "length": 64})
    x = torch.randn(2, 64, 3)
    assert torch.equal(order.undo(order.apply(x, dim=1), dim=1), x)
    cells = [divmod(position, 8) for position in order.perm.tolist()]
    assert sorted(cells) == [(row, col) for row in range(8) for col in range(8)]
    assert all(abs(a - c) + abs(b - d) == 1 for (a, b), (c, d) in itertools.pairwise(cells))
    quarters = [(row // 4, col // 4) for row, col in cells]
    assert len([key for key, _ in itertools.groupby(quarters)]) == 4, "each quarter is visited whole"


def test_every_name_of_the_documents_is_there():
    assert len({theirs for theirs, _ in SEED_NAMES}) == len(SEED_NAMES) == 9  # 6 + 2 + 1 of the tests above


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
