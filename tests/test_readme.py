"""What the README says can be done, is done here."""

import re
from functools import partial
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import hilbert_lib
from hilbert_lib import DilatedPattern, Ordering, RingDilatedAttention, dilated_attention
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


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("theirs", "call"), SEED_NAMES, ids=[theirs for theirs, _ in SEED_NAMES])
def test_the_call_beside_each_name_of_the_documents_does_its_job(one_rank, theirs, call):
    if "triton" in call:
        pytest.importorskip("triton")
    length, segment_length = 32, 16
    pattern = DilatedPattern((segment_length, length), (1, 2), mixing="head_groups")
    named = {name: getattr(hilbert_lib, name) for name in hilbert_lib.__all__}
    made = eval(call, {**named, "partial": partial, "pattern": pattern, "length": length, "segment_length": 16})
    q, k, v = torch.randn(3, 1, length, 2, 16).unbind()
    expected = dilated_attention(q, k, v, pattern, backend="reference")
    if isinstance(made, Ordering):
        assert torch.equal(made.undo(made.apply(k, dim=1), dim=1), k)
        return
    if isinstance(made, RingDilatedAttention) and made.kv_ordering:
        order = made.kv_ordering.ordering(length)
        assert order != Ordering.linear(length)
        k, v = order.apply(k, dim=1), order.apply(v, dim=1)
    torch.testing.assert_close(made(q, k, v), expected)


def test_every_name_of_the_documents_is_there():
    assert len({theirs for theirs, _ in SEED_NAMES}) == len(SEED_NAMES) == 9


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
