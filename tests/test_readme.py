"""What the README says can be done, is done here."""

import re
from pathlib import Path

import oracle
import torch
from grid_cases import exact

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1400


def test_no_line_begins_with_a_slot():  # to Markdown a line that begins with a comment is a block of its own
    for text in (README, (ROOT / "reports/README.md").read_text()):
        assert not re.findall(r"^\s*<!--(?!runs|/)", text, re.M)


def test_its_example_runs_and_equals_the_oracle():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    smaller = {"1, 4096, 8, 64": "1, 1024, 2, 16", "4096": "1024", "(64, 64)": "(32, 32)"}
    for large, small in smaller.items():
        code = code.replace(large, small)
    exec(code, names)
    expected, _ = oracle.attention(names["q"], names["k"], names["v"], names["pattern"], is_causal=True)
    torch.testing.assert_close(names["out"], expected.float())
    on_grid = exact(names["q"], names["k"], names["v"], names["window"])
    torch.testing.assert_close(names["on_grid"], on_grid.float())


def test_every_notebook_is_listed():
    notebooks = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert re.findall(r"\(notebooks/(\w+\.ipynb)\)", README) == notebooks


def test_every_make_target_that_it_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    pages = README + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.M)) - {"names"}:
        assert re.search(rf"^{target}:", makefile, re.M), target
