"""The page "In your model": every block runs as it stands."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

PAGE = (Path(__file__).parents[2] / "docs/in_your_model.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.fixture
def programs_are_compiled_in_haste():
    """Headers that are compiled ahead serve many programs; here is one, and its speed is not seen."""
    from torch._inductor import config

    with config.patch({"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if "```python" in text])
def test_every_block_runs(title, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where AOTInductor writes its package
    if title.startswith("torchscale"):
        request.getfixturevalue("torchscale")
    if "AOTInductor" in title:
        request.getfixturevalue("programs_are_compiled_in_haste")
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[title], re.S)
    exec(code, {})
