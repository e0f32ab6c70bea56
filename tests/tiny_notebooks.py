"""Notebooks of a few lines, for the tests of the suite."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PARAMETERS = """\
seq_len: int = 8  # tokens
scale: float = 0.5  # of the scores
causal: bool = False  # whether keys end at the query
order: str = "hilbert"  # of storage
rates: list[int] = [1, 2]  # dilations
seed: int = 0  # of the input
output_dir: str = ""  # where figures and data go; empty writes nothing"""


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
