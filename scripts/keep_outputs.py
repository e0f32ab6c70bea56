"""Keep what the newest local run of each notebook showed in the notebook itself, so that a code host shows it.

`make figures` runs the notebooks and then this.
"""

import hashlib
import json
from pathlib import Path

from hilbert_lib.lab.suite.site import SLIDER, is_slider

ROOT = Path(__file__).parents[1]
KEPT = "kept_outputs"  # in the notebook's metadata: a hash of the code that its outputs are from


def code_hash(notebook: dict) -> str:
    """A hash of a notebook's code, whoever ran it."""
    is_own = [cell for cell in notebook["cells"] if "injected-parameters" not in cell["metadata"].get("tags", [])]
    sources = ["".join(cell["source"]) for cell in is_own if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:8]


def keep(path: Path, executed: list[Path]) -> str:
    """Write the outputs of the newest run of the same code into a notebook; says which, or that there is none."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for run in sorted(executed, key=lambda run: run.stat().st_mtime, reverse=True):
        ran = json.loads(run.read_text(encoding="utf-8"))
        if code_hash(ran) == code_hash(notebook):
            outputs = {cell["id"]: cell["outputs"] for cell in ran["cells"] if cell["cell_type"] == "code"}
            own = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
            for place, cell in enumerate(own, start=1):
                cell["outputs"] = [shown for each in outputs[cell["id"]] if (shown := _shown(each))]
                cell["execution_count"] = place  # nbval refuses outputs of a cell that never ran
            notebook["metadata"][KEPT] = code_hash(notebook)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            return f"{path.name}: from {run.relative_to(ROOT)}"
    return f"{path.name}: no finished local run of this code"


def _shown(output: dict) -> dict | None:
    """An output as a code host can show it: a widget is its picture there, and its slider waits for `make pages`."""
    data = {kind: value for kind, value in output.get("data", {}).items() if "widget" not in kind}
    if is_slider(data):
        slider = data.pop("text/html")
        output = {**output, "metadata": {**output["metadata"], SLIDER: slider}}
    if "data" in output and not ({"image/png", "text/html"} & data.keys() or output["output_type"] == "execute_result"):
        return None
    output = {**output, **({"data": data} if data else {})}
    return {**output, "execution_count": None} if "execution_count" in output else output


if __name__ == "__main__":
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(keep(path, list(ROOT.glob(f"reports/local/*/{path.stem}/{path.name}"))))
