"""The page "In your model": every block runs as it stands."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

PAGE = (Path(__file__).parents[2] / "docs/in_your_model.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if "```python" in text])
def test_every_block_runs(title, request):
    if title.startswith("torchscale"):
        request.getfixturevalue("torchscale")
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S)
    exec(code, {})
