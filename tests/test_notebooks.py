"""The form that every notebook here has, so that people, papermill and nbval can rely on it."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
from own_processes import PATIENCE
from own_scripts import load_script
from tiny_notebooks import write_notebook

from hilbert_lib.lab.suite.points import read_notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_PARAMETERS = 12
keep_outputs = load_script("keep_outputs")
STRICT = re.search(r"^STRICT := (.+)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()


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


def test_its_parameters_are_few_typed_explained_literals(path, cells):
    parameters = list(read_notebook(path).parameters.values())  # refuses what has no type
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert parameters[-1].name == "output_dir"
    assert parameters[-1].default == ""
    assert all(parameter.meaning for parameter in parameters)
    assert len(parameters) <= MOST_PARAMETERS + 1


def test_it_is_thin_states_what_to_believe_and_prints_the_environment(cells):
    code = [cell for cell in code_of(cells) if "parameters" not in cell.metadata.get("tags", [])]
    assert max(len(cell.source.splitlines()) for cell in code) <= 20
    assert any(re.search(r"^\s*assert ", cell.source, re.M) for cell in code)
    assert not any("sys.path" in cell.source for cell in code)
    (cell,) = (cell for cell in code if "describe_environment()" in cell.source)
    assert "nbval-ignore-output" in cell.metadata.tags


def asserted(name, words):
    """The one assertion of a notebook's code that holds some words, as code that says whether it passes."""
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    lines = (line for cell in code_of(cells) for line in ast.walk(ast.parse(cell.source)))
    (found,) = (line.test for line in lines if isinstance(line, ast.Assert) and words in ast.unparse(line.test))
    return compile(ast.Expression(found), name, "eval")


def apart(**columns):
    """One row of a table whose figures are as far off as is told."""
    return pd.DataFrame({name: [value] for name, value in columns.items()})


ONES = [torch.ones(3)] * 2
HALF_AN_ULP_MORE = [ONES[0], torch.ones(3).nextafter(torch.tensor(2.0))]
# The words of an assertion, the names that it reads where its promise is just kept, and where it is just broken.
KEPT_AND_BROKEN = {
    ("02_dilated_attention", "by denominators"): [
        {"weights": pd.DataFrame({"by denominators": [0.5, 0.5], "one softmax": [0.5, 0.5 - off]})}
        for off in (5e-13, 2e-12)
    ],
    ("02_dilated_attention", "mixed"): [{"out": off * ONES[0], "mixed": 0 * ONES[0]} for off in (9e-6, 2e-5)],
    ("02_dilated_attention", "found.values"): [
        {"pairs": n, "found": {"a": torch.tensor([1, 2]), "b": torch.tensor(1)}} for n in (4, 5)
    ],
    ("02_dilated_attention", "torch.equal"): [{"results": [ONES], "other": x} for x in (ONES, HALF_AN_ULP_MORE)],
    ("02_dilated_attention", "nunique"): [
        {"own": pd.DataFrame({"backend": ["reference", "eager", other]})} for other in ("sdpa", "eager")
    ],
    ("02_dilated_attention", "tolerances"): [
        {"own": apart(error=off), "tolerances": {"float64": 1e-12}, "dtype": "float64"} for off in (9e-13, 2e-12)
    ],
    ("06_kernel_benchmarks", "sides.error"): [{"sides": apart(error=off)} for off in (0.019, 0.02)],
    ("06_kernel_benchmarks", "pairs.output_difference"): [
        {"pairs": apart(output_difference=off)} for off in (0.019, 0.02)
    ],
    ("06b_orders_and_counters", "sides.error"): [{"sides": apart(error=off)} for off in (0.019, 0.02)],
    ("06b_orders_and_counters", "'no table'"): [{"pairs": apart(b="a", output_difference=off)} for off in (0.0, 1e-9)],
    ("07_ring_attention", "checks"): [{"checks": apart(out_error=0.0, dq_error=off)} for off in (9e-6, 2e-5)],
    ("07_ring_attention", "same["): [{"same": apart(out_error=0.0, dq_error=off)} for off in (0.019, 0.02)],
    ("10_in_a_model", "verdict"): [{"verdict": verdict} for verdict in ("holds", "does not hold (1 of 2 cases)")],
    ("10_in_a_model", "through"): [{"through": torch.tensor([0.5, weight])} for weight in (0.5, 0.501)],
    ("11_inside_a_kernel", "counts.error"): [{"counts": apart(error=off)} for off in (9e-6, 2e-5)],
    ("11_inside_a_kernel", "sides.error"): [{"sides": apart(error=off)} for off in (0.019, 0.02)],
    ("12_in_print", ".all()"): [{"found": apart(found=share), "whole": pd.Series([True])} for share in (1.0, 0.999)],
    ("12_in_print", "errors.error"): [{"errors": apart(error=off)} for off in (0.019, 0.02)],
    ("12_in_print", "of_strides"): [{"of_strides": apart(found=share)} for share in (0.81, 0.79)],
    ("14_directions", "max(off)"): [{"off": (off, 0.0)} for off in (9e-13, 2e-12)],
    ("14_directions", "sets.bound"): [{"sets": apart(keys=keys, bound=16.0)} for keys in (16, 15)],
    ("14_directions", "found.max"): [{"found": pd.Series([less])} for less in (0.09, 0.11)],
    ("14_directions", "by_rule"): [{"by_rule": times, "lost": {"hilbert": 1.2}} for times in (1.09, 1.11)],
    ("08_where_a_curve_pays", "exact"): [{"exact": [0.0, off, 0.0]} for off in (9e-10, 2e-9)],
    ("08_where_a_curve_pays", "again"): [
        {"again": torch.full((2,), off, dtype=torch.float64), "out": torch.zeros(2, dtype=torch.float64)}
        for off in (9e-13, 2e-12)
    ],
}


@pytest.mark.parametrize(("name", "words"), KEPT_AND_BROKEN)
def test_an_assertion_fails_as_soon_as_what_it_promises_is_broken(name, words):
    kept, broken = KEPT_AND_BROKEN[name, words]
    check = asserted(name, words)
    assert eval(check, {"torch": torch} | kept)
    assert not eval(check, {"torch": torch} | broken)


def test_tolerances_of_02_are_those_of_rounding():
    """The cell that compares backends, on errors that it finds just too large."""
    cells = nbformat.read(ROOT / "notebooks/02_dilated_attention.ipynb", as_version=4).cells
    (cell,) = (cell.source for cell in cells if cell.id == "check-errors")
    for dtype, error in {"float64": 2e-12, "float32": 2e-4, "float16": 0.01, "bfloat16": 0.07}.items():
        worst = pd.DataFrame({"dtype": dtype, "backend": ["reference", "eager", "sdpa"], "error": [0.0, error, 0.0]})
        with pytest.raises(AssertionError, match=f"{dtype}: off by"):
            exec(cell, {"worst": worst, "refused": {}})
        exec(cell, {"worst": worst.assign(error=worst.error / 2.5), "refused": {}})


ROOMS = (
    "hilbert_lib",
    *(f"hilbert_lib.{name}" for name in ("attention", "curves", "launch", "limits", "patterns", "ring")),
)
ROOMS += "hilbert_lib.ring.plan", "hilbert_lib.lab"
ROOMS += tuple(f"hilbert_lib.lab.{name}" for name in ("cache", "figures", "guarded", "inside", "ledger", "sweeps"))


def listed(room):
    """The names that a room lists: in its table, or in `__all__`."""
    module = importlib.import_module(room)
    table = getattr(module, "PUBLIC", {"": getattr(module, "__all__", ())})
    return {name for names in table.values() for name in names}


def taken_behind(code):
    """What a notebook's code takes of the library that no room lists, and private attributes of anything."""
    behind, rooms = [], {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias for alias in node.names if alias.name.partition(".")[0] == "hilbert_lib"]
            # `import hilbert_lib.lab` binds hilbert_lib, and through it every module behind: a room takes `as`.
            rooms |= {alias.asname or alias.name: alias.name for alias in imported}
            behind += [
                each.name for each in imported if each.name not in ROOMS or ("." in each.name and not each.asname)
            ]
        elif isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "hilbert_lib":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in ROOMS:
                    rooms[alias.asname or alias.name] = name
                elif node.module not in ROOMS or alias.name not in listed(node.module):
                    behind.append(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            room = rooms.get(node.value.id) if isinstance(node.value, ast.Name) else None
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            if is_private or (room and node.attr not in listed(room)):
                behind.append(f"{room or ast.unparse(node.value)}.{node.attr}")
    return behind


def test_it_takes_public_names_alone(cells):
    assert taken_behind("\n".join(cell.source for cell in code_of(cells))) == []


@pytest.mark.parametrize(
    ("code", "behind"),
    [
        ("from hilbert_lib import attend\nfrom hilbert_lib.lab import Workload, run_sides", []),
        ("import hilbert_lib\nhilbert_lib.attend", []),
        ("from hilbert_lib.lab import figures\nfigures.show", []),
        ("import hilbert_lib.lab as lab\nlab.run_sides", []),
        ("from hilbert_lib.attention.api import attend", ["hilbert_lib.attention.api.attend"]),
        ("from hilbert_lib.attention.backends import flex", ["hilbert_lib.attention.backends.flex"]),
        ("from hilbert_lib.lab.records import newest_run", ["hilbert_lib.lab.records.newest_run"]),
        ("from hilbert_lib.lab import records as kept\nkept.newest_run", ["hilbert_lib.lab.records"]),
        ("from hilbert_lib.lab import environment", ["hilbert_lib.lab.environment"]),
        ("from hilbert_lib import _version", ["hilbert_lib._version"]),
        ("def f():\n    from hilbert_lib.lab import no_name", ["hilbert_lib.lab.no_name"]),
        ("import hilbert_lib\nhilbert_lib.attention", ["hilbert_lib.attention"]),
        ("import hilbert_lib.lab.records", ["hilbert_lib.lab.records"]),
        ("import hilbert_lib.lab", ["hilbert_lib.lab"]),
        ("from hilbert_lib.lab import figures\nfigures.record", ["hilbert_lib.lab.figures.record"]),
        ("from hilbert_lib import Ordering\nOrdering._slots", ["Ordering._slots"]),
        ("from hilbert_lib.lab import *", ["hilbert_lib.lab.*"]),
    ],
)
def test_what_lies_behind_the_public_names_is_found(code, behind):
    assert taken_behind(code) == behind


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_gives_the_names_that_it_lists_and_none_is_that_of_a_file(room):
    """Else an import of the file, wherever it is, would change what the name is."""
    module = importlib.import_module(room)
    assert listed(room)
    for name in listed(room):
        assert hasattr(module, name), name
        assert not list(Path(module.__file__).parent.glob(f"{name}.py")), name


def test_its_links_lead_to_notebooks_that_exist(path, cells):
    targets = re.findall(r"\(([\w-]+\.ipynb)\)", "\n".join(cell.source for cell in cells))
    assert targets
    assert all((path.parent / target).exists() for target in targets)


def test_its_cells_have_ids_of_their_own_by_which_outputs_are_kept(path):
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]  # nbformat would give a new id to the second
    assert len(set(ids)) == len(ids)


def test_its_outputs_are_of_its_code_and_small(path, cells):
    assert all((ROOT / name).exists() for name in STRICT)
    if f"notebooks/{path.name}" in STRICT:  # nbval compares them
        compared = [c for c in code_of(cells) if c.outputs and "nbval-ignore-output" not in c.metadata.get("tags", [])]
        assert len(compared) >= 3
    elif any(cell.outputs for cell in code_of(cells)):
        notebook = json.loads(path.read_text())
        assert notebook["metadata"][keep_outputs.KEPT] == keep_outputs.code_hash(notebook), "make figures"
    assert all(cell.execution_count for cell in code_of(cells) if cell.outputs), "nbval refuses others"
    assert path.stat().st_size <= 500_000


def test_outputs_of_the_newest_run_of_the_same_code_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(keep_outputs, "ROOT", tmp_path)
    path = write_notebook(tmp_path / "notebooks", "00_a", "1 + 1")
    ran = json.loads(path.read_text())
    cell = next(cell for cell in ran["cells"] if cell["source"] == ["1 + 1"])
    widget = {"image/png": "AA", "application/vnd.jupyter.widget-view+json": {}}
    cell["outputs"] = [{"output_type": "display_data", "data": widget, "metadata": {}}]
    ran["cells"].insert(2, {"cell_type": "code", "source": "n = 1", "metadata": {"tags": ["injected-parameters"]}})
    ran["cells"][2] |= {"id": "x", "outputs": []}
    run = tmp_path / "ran.ipynb"
    run.write_text(json.dumps(ran))
    assert "from ran.ipynb" in keep_outputs.keep(path, [run])
    kept = json.loads(path.read_text())
    assert [list(c["outputs"][0]["data"]) for c in kept["cells"] if c.get("outputs")] == [["image/png"]]
    write_notebook(tmp_path / "notebooks", "00_a", "2 + 2")
    assert "no finished local run of this code" in keep_outputs.keep(path, [run])


def test_a_cell_that_writes_to_stderr_fails_under_nbval_and_so_does_an_output_that_is_compared(tmp_path):
    write_notebook(tmp_path, "quiet", "print('a result')")
    write_notebook(tmp_path, "warns", "import warnings\n\nwarnings.warn('look here')")
    for name in ("compared", "not_compared"):
        path = write_notebook(tmp_path, name, "1 + 1")
        notebook = nbformat.read(path, as_version=4)
        cell = next(cell for cell in notebook.cells if cell.source == "1 + 1")
        cell.execution_count = 1
        cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "3"}, execution_count=1)]
        nbformat.write(notebook, path)
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copytree(ROOT / "tests/startup", tmp_path / "tests/startup")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-rf", "--color=no", "."]
    command.append("--compared=compared.ipynb")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert re.search(r"^2 failed, 6 passed", done.stdout.splitlines()[-1].strip("= ")), done.stdout
    assert "FAILED warns.ipynb::Cell 1" in done.stdout
    assert "FAILED compared.ipynb::Cell 1" in done.stdout
    assert "the cell wrote to stderr" in done.stdout
    assert "UserWarning: look here" in done.stdout
