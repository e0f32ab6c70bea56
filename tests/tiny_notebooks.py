"""Notebooks of a few lines and their runs, for the tests of the suite."""

import os
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.suite.manifest import end_manifest, start_manifest
from hilbert_lib.lab.suite.points import Point, read_notebook

PARAMETERS = """\
seq_len: int = 8  # tokens
scale: float = 0.5  # of the scores
causal: bool = False  # whether keys end at the query
order: str = "hilbert"  # of storage
rates: list[int] = [1, 2]  # dilations
seed: int = 0  # of the input
output_dir: str = ""  # where figures and data go; empty writes nothing"""
# What a page could load from elsewhere: the attributes of elements that load, and styles.
LOADS = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|object|embed)\b[^>]*?\b(?:src|href|data|srcset)\s*=\s*[\"']?\s*"
    r"(?:https?:)?//|@import|url\(\s*[\"']?(?:https?:)?//|\bimport\s*\(?[\"']https?:|<script[^>]*\bsrc=",
    re.IGNORECASE,
)


def write_notebook(
    folder: Path, name: str, *code: str, parameters: str = PARAMETERS, prose: str = "# Title\n\nQuestion?"
) -> Path:
    cells = [
        new_markdown_cell(prose),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(new_code_cell, code),
        new_markdown_cell("## Answer\n\nThe answer."),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


def make_run(
    run_folder, name="00_a", *, changes=None, error=None, prose="# Title\n\nQuestion $n$?", figures=("b_first.png",)
):
    """A run's folder as `run_point` leaves it, without running anything."""
    path = write_notebook(run_folder.parent.parent / "notebooks", name, "print(1)", prose=prose)
    point = Point(read_notebook(path), changes or {})
    folder = run_folder / (point.name + (".failed" if error else ""))
    folder.mkdir(parents=True)
    manifest = start_manifest(point, folder, environment())
    (folder / path.name).write_bytes(path.read_bytes())
    for moment, picture in enumerate(figures):
        (folder / picture).write_bytes(b"png")
        os.utime(folder / picture, (moment, moment))
    (folder / "a_table.csv").write_text("a\n1\n")
    end_manifest(manifest, folder, error)
    return folder
