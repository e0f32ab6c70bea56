"""The form that every notebook here has, so that people, papermill and nbval can rely on it."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tiny_notebooks import write_notebook

from hilbert_lib.lab.suite.parameters import read_parameters

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STRICT = re.search(r"^STRICT := (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def cells(path):
    return nbformat.read(path, as_version=4).cells


def code_of(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def test_it_opens_with_a_question_and_closes_with_an_answer_and_a_link(cells):
    texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert re.match(r"# .*\?$", texts[0].splitlines()[0])
    assert any(re.search(r"^## Answer$", text, re.M) for text in texts[-2:])
    assert ".ipynb)" in texts[-1]


def test_its_parameters_are_typed_explained_literals_and_the_last_is_output_dir(path, cells):
    parameters = list(read_parameters(path).values())  # refuses what papermill would misread
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert parameters[-1].name == "output_dir"
    assert parameters[-1].default == ""
    assert all(parameter.meaning for parameter in parameters)


def test_its_first_cell_after_the_parameters_prints_the_environment(cells):
    first, second = code_of(cells)[:2]
    assert "parameters" in first.metadata.tags
    assert "describe_environment()" in second.source
    assert "nbval-ignore-output" in second.metadata.tags


def test_it_is_thin_and_states_what_to_believe(cells):
    code = code_of(cells)
    assert max(len(cell.source.splitlines()) for cell in code[1:]) <= 20
    assert any(re.search(r"^\s*assert ", cell.source, re.M) for cell in code)
    assert not any("sys.path" in cell.source for cell in code)
    functions = [
        node for cell in code for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.FunctionDef)
    ]
    assert all(node.end_lineno - node.lineno < 5 for node in functions), "logic belongs in the library, with a test"


def test_its_links_lead_to_notebooks_that_exist(path, cells):
    targets = re.findall(r"\(([\w-]+\.ipynb)\)", "\n".join(cell.source for cell in cells))
    assert targets
    assert all((path.parent / target).exists() for target in targets)


def test_only_the_strictly_checked_notebooks_hold_outputs_and_they_do(path, cells):
    with_text = [
        cell
        for cell in code_of(cells)
        if any("text" in output or "text/plain" in output.get("data", {}) for output in cell.outputs)
    ]
    if f"notebooks/{path.name}" in STRICT:
        compared = [cell for cell in with_text if "nbval-ignore-output" not in cell.metadata.get("tags", [])]
        assert len(compared) >= 3
    else:
        assert not with_text
        assert all(cell.execution_count is None and not cell.outputs for cell in code_of(cells))


def test_the_strict_notebooks_exist():
    assert STRICT
    assert all((ROOT / name).exists() for name in STRICT)


def test_a_cell_that_writes_to_stderr_fails_under_nbval(tmp_path):
    write_notebook(tmp_path, "quiet", "print('a result')")
    write_notebook(tmp_path, "warns", "import warnings\n\nwarnings.warn('look here')")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-rf", "--color=no", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert re.search(r"^1 failed, 3 passed", done.stdout.splitlines()[-1].strip("= ")), done.stdout
    assert "FAILED warns.ipynb::Cell 1" in done.stdout
    assert "the cell wrote to stderr" in done.stdout
    assert "UserWarning: look here" in done.stdout
