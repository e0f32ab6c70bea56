"""What the README and the pages of docs/ say can be done, is done here."""

import inspect
import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import oracle
import pytest
import torch
from click.testing import CliRunner
from forked_ranks import fork_ranks

from hilbert_lib import DilatedAttention, DilatedPattern, Ordering
from hilbert_lib.cli import main as cli
from hilbert_lib.lab.ledger.numbers import numbers
from hilbert_lib.lab.records import RESULTS, committed_runs, read_records

DOCS = Path(__file__).parents[1] / "docs"
NAMES = (DOCS / "names.md").read_text()
SEED_NAMES = re.findall(r"^\| `(\w+)` \| `(.*?)`", NAMES.split("## Their scripts")[0], re.M)
SCRIPTS = re.findall(r"^\| `(\w+\.py)` \| `hilbert (.*?)`", NAMES, re.M)
PAGES = "".join((DOCS / page).read_text() for page in ("recipes.md", "coming_from.md"))
RECIPES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGES, re.M | re.S))
README = (DOCS.parent / "README.md").read_text()
EVERY_PAGE = README + "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
PAGES_AND_NOTEBOOKS = [
    path for at in ("*.md", "docs/*.md", "reports/*.md", "notebooks/*.ipynb") for path in sorted(DOCS.parent.glob(at))
]
COMMANDS = re.findall(r"^\.venv/bin/hilbert ((?:list|run|sweep|plan|bench).*?)(?:  +#.*)?$", EVERY_PAGE, re.M)
COMMANDS += re.findall(r"Example: hilbert ((?:run|sweep).*)$", inspect.getsource(cli), re.M)


def recipes():
    """The recipes with code; those that take another library are run beside the adapters' tests."""
    for title, text in RECIPES.items():
        if "```python" in text:
            has_client = re.search(r"^from (peft|transformers)\b", text, re.M)
            yield pytest.param(title, marks=[pytest.mark.clients] if has_client else [])


@pytest.mark.parametrize("title", list(recipes()))
def test_every_recipe_runs(title, tmp_path, monkeypatch, calls_are_copied):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES[title], re.S)
    fork_ranks(monkeypatch)
    recipe = ModuleType("recipe")
    monkeypatch.setitem(sys.modules, "recipe", recipe)  # where torch looks for the functions that it traces
    exec(code, vars(recipe))


def test_the_recipe_that_stores_tokens_in_an_order_has_a_window_that_gains_by_it():
    recipe = RECIPES["Tokens on a grid: store them once"]
    ((side, _, window),) = re.findall(r"Neighbourhood\(\((\d+), (\d+)\), window=(\d+)\)", recipe)
    assert int(window) >= int(numbers()[f"least_window_{side}"])
    told = dict(re.findall(r"\b(\d+) on (?:a grid of )?(\d+) x \2\b", recipe.replace("\n", " ")))
    assert {f"least_window_{side}": window for window, side in told.items()} == {
        name: value for name, value in numbers().items() if name.startswith("least_window_")
    }


@pytest.mark.parametrize("call", [call for _, call in SEED_NAMES if call.startswith("DilatedAttention(")])
def test_every_module_of_the_documents_names_equals_the_oracle(call):
    if "triton" in call:
        pytest.importorskip("triton")
    pattern = DilatedPattern((16, 32), (1, 2), mixing="head_groups")
    names = {"DilatedAttention": DilatedAttention, "Ordering": Ordering, "partial": partial, "pattern": pattern}
    made = eval(call, names)
    assert made.kv_ordering(32) != Ordering.linear(32)
    q, k, v = torch.randn(3, 1, 32, 2, 16).unbind()
    torch.testing.assert_close(made(q, k, v), oracle.attention(q, k, v, pattern)[0].float())


def test_every_name_of_the_documents_is_there_and_their_orders_are_a_hilbert_curve_and_our_snake():
    # Of which 6 are the ring's, 2 + 1 those of the test above and of this one.
    assert len({theirs for theirs, _ in SEED_NAMES}) == len(SEED_NAMES) == 9
    assert len(SCRIPTS) == 3
    ((_, call),) = [row for row in SEED_NAMES if row[0] == "HilbertAttentionMixin"]
    assert eval(call, {"Ordering": Ordering, "length": 64}) == Ordering.from_curve("hilbert", 64)
    (call,) = re.findall(r"`create_hilbert_mapping\(n\)` \| `(.*?)`", NAMES)
    for n, side in ((16, 4), (20, 5), (256, 16)):
        rows = [list(range(row * side, min(n, (row + 1) * side)))[:: -1 if row % 2 else 1] for row in range(side)]
        assert eval(call, {"Ordering": Ordering, "n": n}).tolist() == list(itertools.chain(*rows))


@pytest.mark.parametrize("command", COMMANDS + [command for _, command in SCRIPTS])
def test_every_command_of_the_pages_and_of_the_help_is_understood(command, monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    if "--help" not in command and not command.startswith(("plan", "list")):
        command += " --dry-run"
    done = CliRunner().invoke(cli.main, command.split())
    assert done.exit_code == 0, done.output


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 2000
    assert max(map(len, README.splitlines())) <= 300, "raw, a line is no more than a few slots"


def test_the_readme_answers_before_it_draws():
    assert README.index("## The answer") < README.index("notebooks/map.png") < README.index("## Start")


def test_a_rival_that_was_not_tried_is_said_not_to_have_been():
    rivals = {
        record[side]["name"]
        for name in ("05_backend_selection", "06_kernel_benchmarks")
        for run in committed_runs(name)
        for record in read_records(run / RESULTS)
        if "a" in record
        for side in "ab"
    }
    assert "flash_attn_4" in rivals
    assert not {"flash_attn_2", "flash_attn_3"} & rivals, "README says that these packages ran on no GPU"
    assert "FlashAttention-3 was not tried" in README.replace("\n", " ")


def markdown_of(path):
    """The Markdown of a page, or of a notebook's cells, by where it stands."""
    if path.suffix == ".md":
        return {path.name: path.read_text(encoding="utf-8")}
    cells = enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"])
    return {f"{path.name}, cell {i}": "".join(c["source"]) for i, c in cells if c["cell_type"] == "markdown"}


def broken_paragraphs(text):
    """Lines that begin with a comment, which ends their paragraph in CommonMark. Three tables are their own blocks."""
    return re.findall(r"^\s*(?:[-*+>]\s+|\d+\.\s+)?<!--(?!(?:runs|directions|artifact)-->$|/-->$).*", text, re.M)


@pytest.mark.parametrize("path", PAGES_AND_NOTEBOOKS, ids=lambda path: path.stem)
def test_no_line_begins_with_a_slot(path):
    for where, text in markdown_of(path).items():
        assert not broken_paragraphs(text), where


def test_a_line_that_begins_with_a_slot_is_seen_and_filling_makes_none():
    for line in ("<!--a-->1<!--/-->, and", "  <!--a-->1<!--/-->", "- <!--a-->1<!--/--> is", "2. <!--a-->1<!--/-->"):
        assert broken_paragraphs(f"a sentence of\n{line}\n")
    assert not broken_paragraphs("of <!--a-->1<!--/--> and\n| <!--a-->1<!--/--> |\n<!--runs-->\n| a |\n<!--/-->\n")
    assert [name for name, value in numbers().items() if "\n" in value] == ["runs", "directions", "artifact"]


def test_the_readmes_example_runs_and_equals_the_oracle():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    smaller = {"1, 4096, 8, 64": "1, 1024, 2, 16", "4096": "1024", "(64, 64)": "(32, 32)"}
    for large, small in smaller.items():
        code = code.replace(large, small)
    exec(code, names)
    expected, _ = oracle.attention(names["q"], names["k"], names["v"], names["pattern"], is_causal=True)
    torch.testing.assert_close(names["out"], expected.float())
    on_grid, _ = oracle.attention(names["q"], names["k"], names["v"], names["window"])
    torch.testing.assert_close(names["on_grid"], on_grid.float())


def test_the_readme_lists_every_notebook():
    notebooks = sorted(path.name for path in (DOCS.parent / "notebooks").glob("*.ipynb"))
    assert re.findall(r"\(notebooks/(\w+\.ipynb)\)", README) == notebooks


def test_every_make_target_of_the_pages_exists():
    makefile = (DOCS.parent / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", EVERY_PAGE, re.M)) - {"names"}:
        assert re.search(rf"^{target}:", makefile, re.M), target
