"""The committed evidence stays readable and small: every record loads, every figure is drawn from its own data."""

import re
import warnings
from pathlib import Path

import pytest

from hilbert_lib.lab.figures import record as drawing
from hilbert_lib.lab.records import MACHINES, REPORTS, read_records
from hilbert_lib.lab.suite.manifest import read_manifest

pytestmark = pytest.mark.evidence
RUNS = sorted({file.parent for file in REPORTS.glob(f"{MACHINES}/*/*/*.json*")})
KEPT = {".json", ".gz", ".ipynb", ".png"}
MOST, MOST_OF_ALL = 500_000, 8_000_000  # bytes of a run, and of all reports
LARGER = "2026-11-26T13"  # runs that began before may be larger than a run may be now


def test_there_is_evidence_to_read():
    assert len(RUNS) >= 10
    assert sum(len(drawing.read_figures(run)) for run in RUNS) >= 50


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.parents[1].name}/{run.name}")
def test_every_committed_record_loads_and_draws(run, monkeypatch, rough_pictures):
    drawn = {}
    monkeypatch.setattr(drawing, "_save", lambda figure, stem: drawn.update({stem.name: figure}))
    monkeypatch.setattr(drawing.pd.DataFrame, "to_csv", lambda *_, **__: None)
    with warnings.catch_warnings(action="error"):  # a line that is no record, a figure that no function draws
        for file in run.glob("*.jsonl.gz"):
            records = read_records(file)
            assert records
            assert all(each.get("environment") for each in records if "point" not in each)
        drawing.redraw(run)
    assert set(drawn) == set(drawing.read_figures(run))
    assert all(any(axes.has_data() or axes.tables for axes in figure.axes) for figure in drawn.values())
    if (run / "manifest.json").exists():
        assert read_manifest(run)["status"] == "ok"


def test_records_are_small_and_hold_nothing_that_a_command_makes_again():
    readme = (REPORTS.parent / "README.md").read_text() + (REPORTS / "README.md").read_text()
    files = [file for run in RUNS for file in run.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= KEPT, "git ignores what `hilbert report` makes; results are packed"
    unshown = [file for file in files if file.suffix == ".png" and file.relative_to(REPORTS).as_posix() not in readme]
    assert not unshown, "of the pictures only those that a README shows are committed"
    for run in RUNS:
        if ((read_manifest(run) or {}).get("start") or "") > LARGER:
            assert sum(file.stat().st_size for file in run.rglob("*")) <= MOST, f"{run} is larger than {MOST} bytes"
    everything = [file for file in REPORTS.rglob("*") if file.is_file() and "local" not in file.parts]
    assert sum(file.stat().st_size for file in everything) <= MOST_OF_ALL


@pytest.mark.parametrize("page", [REPORTS / "README.md", REPORTS.parent / "README.md"], ids=["reports", "top"])
def test_links_into_the_evidence_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert len(links) > 10
    assert not [link for link in links if not (Path(page).parent / link).exists()]
