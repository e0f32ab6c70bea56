"""The committed evidence stays readable: every record loads, every figure is drawn from its own data."""

import json
import warnings

import pytest

from hilbert_lib.lab.committed import MACHINES
from hilbert_lib.lab.figures import record as drawing
from hilbert_lib.lab.records import REPORTS, read_records
from hilbert_lib.lab.suite.manifest import read_manifest

RUNS = sorted({file.parent for file in REPORTS.glob(f"{MACHINES}/*/*/*.json*")})


def test_there_is_evidence_to_read():
    assert len(RUNS) >= 10
    assert sum("draw" in json.loads(file.read_text()) for run in RUNS for file in run.glob("*.json")) >= 50


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parents[1].name}/{run.name}")
def test_every_committed_record_loads_and_draws(run, monkeypatch, rough_pictures):
    recipes = [file for file in run.glob("*.json") if "draw" in json.loads(file.read_text())]
    drawn = {}
    monkeypatch.setattr(drawing, "_save", lambda figure, stem: drawn.update({stem.name: figure}))
    with warnings.catch_warnings(action="error"):  # a line that is no record, a recipe that no function draws
        for file in run.glob("*.jsonl"):
            records = read_records(file)
            assert records
            assert all(each.get("environment") for each in records if "point" not in each)
        drawing.redraw(run)
    assert set(drawn) == {file.stem for file in recipes}
    assert all(any(axes.has_data() or axes.tables for axes in figure.axes) for figure in drawn.values())
    if (run / "manifest.json").exists():
        assert read_manifest(run)["status"] == "ok"
