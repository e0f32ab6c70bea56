"""Reports: pages that read without a network, built from what lies in the folders."""

import html
import json
import re

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tiny_notebooks import LOADS, make_run

from hilbert_lib.lab.records import RESULTS, append_lines
from hilbert_lib.lab.suite import report

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WIDGET = "application/vnd.jupyter.widget-view+json"
PROSE = """# Is $x^2$ a square?

One formula $\\sum_{i<n} i$ here, none in `$code$`, and alone

$$\\frac{a}{b}$$

[onward](01_next.ipynb#end), [nowhere](02_missing.ipynb), [outward](https://example.org/01_next.ipynb)
"""
MANIFEST = {"title": "Is it?", "status": "ok", "error": None, "changes": {}}


@pytest.fixture
def executed(tmp_path):
    """An executed notebook with every kind of output, and a widget beside its picture."""
    outputs = [
        new_output("display_data", {"image/png": PIXEL, WIDGET: {"model_id": "abc", "version_major": 2}}),
        new_output("display_data", {"text/latex": "$\\beta$"}),
        new_output("display_data", {"text/html": "<b>table</b>"}),
        new_output("stream", name="stdout", text="said"),
    ]
    state = {"abc": {"model_name": "IntSliderModel", "model_module": "@jupyter-widgets/controls", "state": {}}}
    widgets = {"application/vnd.jupyter.widget-state+json": {"state": state, "version_major": 2, "version_minor": 0}}
    attached = new_markdown_cell("![x](attachment:x.png)", attachments={"x.png": {"image/png": PIXEL}})
    cells = [new_markdown_cell(PROSE), attached, new_code_cell("1", outputs=outputs)]
    path = tmp_path / "00_a.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"widgets": widgets}), path)
    return path


def page_of(notebook, **changed):
    def lead(path):
        return {"01_next.ipynb": "../01_next-0123abcd/01_next.html"}.get(path)

    return report.write_notebook_page(notebook, MANIFEST | changed, lead).read_text()


def test_the_page_of_a_notebook_asks_no_host_for_anything(executed):
    from nbconvert import HTMLExporter

    page = page_of(executed)
    assert not LOADS.findall(page)
    assert not re.findall("require.min.js|MathJax", page)
    stock, _ = HTMLExporter().from_filename(str(executed))
    assert len(LOADS.findall(stock)) >= 3  # the search finds what the stock page loads


def test_formulas_become_mathml_and_a_widget_its_picture(executed):
    page = page_of(executed)
    assert page.count("<math") == 4  # heading, sum, fraction, and the output that is LaTeX
    assert 'display="block"' in page
    assert "<mfrac>" in page
    assert "<code>$code$</code>" in page
    assert "\\frac" not in page
    assert page.count(f"data:image/png;base64,{PIXEL}") == 2  # the widget's, and the one attached to a cell
    assert not re.findall(r"widget-(?:view|state)\+json", page)


def test_links_lead_to_pages_back_to_the_index_and_none_to_a_missing_one(executed):
    page = page_of(executed, changes={"seq_len": 16})
    assert 'href="../01_next-0123abcd/01_next.html#end"' in page
    assert 'href="../index.html"' in page
    assert "02_missing" not in page
    assert "nowhere" in page
    assert 'href="https://example.org/01_next.ipynb"' in page
    assert "<title>Is it? (seq_len = 16)</title>" in page


def test_the_page_of_a_failed_run_says_why_literally_at_its_top(executed):
    said = "costs $\\frac$ of $x$, no __init__ for *args*, <script>alert(1)</script>\n\n# b"
    page = page_of(executed, status="failed", error={"type": "ValueError", "message": said, "cell": 3})
    assert page.index("did not finish") < page.index("<mfrac>")
    (shown,) = re.findall(r"<pre>(ValueError: .*?)</pre>", page)
    assert html.unescape(shown) == f"ValueError: {said.splitlines()[0]} (cell In [3])"


def links_of(page):
    return re.findall(r"(?:href|src)=\"([^\"#]+)\"", page.read_text())


def test_the_index_shows_every_point_with_links_that_lead_somewhere(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    make_run(run_folder, figures=("z.png", "y.png", "b.png", "answer.png"))
    make_run(run_folder, changes={"seq_len": 16})
    make_run(run_folder, error={"type": "ValueError", "message": "no", "cell": 1})
    make_run(run_folder, "01_b", error={"type": "ValueError", "message": "<too short>", "cell": 4})
    index = report.write_report(run_folder)
    report.write_index(run_folder.parent)
    page = index.read_text()
    assert not LOADS.findall(page)
    assert "2 of 4 finished" in page
    assert "ValueError: &lt;too short&gt; (cell In [4])" in page
    assert page.index("01_b.failed") < page.index("00_a/")  # what failed comes first
    assert "seq_len = 16" in page
    assert "The answer." in page
    assert "<mi>n</mi>" in page  # the question's formula
    shown = re.findall(r'<img [^>]*src="00_a/([^"]+)"', page)
    assert shown == ["y.png", "b.png", "answer.png"]  # drawn last
    assert {"00_a/00_a.html", "00_a/00_a.ipynb", "00_a/a_table.csv", "../index.html"} <= set(links_of(index))
    assert all((run_folder / link).exists() for link in links_of(index))


def test_notebooks_of_a_run_lead_to_each_other_and_pages_are_written_again_on_request_alone(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    first = make_run(run_folder, prose="# First?\n\nThen [the next](01_b.ipynb), not [this](02_c.ipynb).")
    second = make_run(run_folder, "01_b", changes={"seq_len": 16}, prose="# Next?\n\nAfter [it](00_a.ipynb).")
    index = report.write_report(run_folder)
    pages = [index, first / "00_a.html", second / "01_b.html"]
    links = {(page.parent / link).resolve() for page in pages for link in links_of(page)}
    assert {first / "00_a.html", second / "01_b.html", index} <= links
    assert all(link.exists() for link in links if "index" not in link.name)
    pages[1].write_text("kept")
    report.write_report(run_folder)
    assert pages[1].read_text() == "kept"
    report.write_report(run_folder, rebuild=True)
    assert pages[1].read_text() != "kept"


def test_the_index_of_all_runs_links_them_under_the_readme(tmp_path):
    root = tmp_path / "reports"
    for run in ("h200/gpu-1", "h100/gpu-2"):
        make_run(root / run)
    (root / "README.md").write_text("# Ours\n\n[one](h200/gpu-1/00_a/00_a.ipynb), [gone](h200/gpu-1/01/01.ipynb)")
    for run in report.find_runs(root):
        report.write_report(run, root)
        assert "../../index.html" in links_of(run / "index.html")
    index = report.write_index(root)
    assert not LOADS.findall(index.read_text())
    assert set(links_of(index)) == {"h200/gpu-1/index.html", "h100/gpu-2/index.html", "h200/gpu-1/00_a/00_a.html"}
    assert all((root / link).exists() for link in links_of(index))


def test_pages_tell_when_the_last_notebook_of_a_run_ended(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    for name, day in (("00_a", 3), ("01_b", 9), ("02_c", 5)):
        folder = make_run(run_folder, name)
        (folder / f"{name}.ipynb").unlink()  # nothing to show, which takes long
        manifest = json.loads((folder / "manifest.json").read_text())
        ended = {"start": f"2026-11-{day:02d}T11:00:00+00:00", "end": f"2026-11-{day:02d}T12:00:00+00:00"}
        (folder / "manifest.json").write_text(json.dumps(manifest | ended))
    assert "the last on 2026-11-09 12:00 UTC" in report.write_report(run_folder).read_text()
    assert re.findall(r"2026-11-\d\d", report.write_index(run_folder.parent).read_text()) == ["2026-11-09"]


def test_a_link_leads_to_a_notebooks_defaults_before_its_other_points(tmp_path):
    for changes in ({"seq_len": 16}, {}, {"causal": True}):
        make_run(tmp_path / "run", changes=changes)
    make_run(tmp_path / "run", "01_b", changes={"seq_len": 16})
    assert report._page_of(tmp_path / "run", "../", "00_a.ipynb") == "../00_a/00_a.html"
    assert re.fullmatch(r"01_b-seq_len=16-\w{8}/01_b.html", report._page_of(tmp_path / "run", "", "01_b.ipynb"))


def test_runs_are_found_at_any_depth_and_running_ones_are_not_shown(tmp_path):
    run_folder = tmp_path / "reports" / "local" / "cpu-1"
    make_run(run_folder)
    (run_folder / "00_a").rename(run_folder / ".00_a.0123abcd")
    with pytest.raises(ValueError, match="no runs in"):
        report.find_runs(tmp_path / "reports")
    make_run(run_folder, "01_b")
    assert report.find_runs(tmp_path / "reports") == report.find_runs(run_folder) == [run_folder]
    assert "00_a" not in report.write_report(run_folder).read_text()


def test_files_that_were_cut_off_do_not_stop_the_report_of_the_others(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    (make_run(run_folder) / "manifest.json").write_text("")
    with pytest.raises(ValueError, match="no runs in"):
        report.find_runs(tmp_path)
    point = make_run(run_folder, "01_b", prose="# Title\n\nSee [it](00_a.ipynb).")
    folder = make_run(run_folder, "02_c", error={"type": "OSError", "message": "No space left", "cell": 1})
    (folder / "02_c.ipynb").write_text('{"cells": [')
    manifest = json.loads((point / "manifest.json").read_text())
    (point / "manifest.json").write_text(json.dumps({**manifest, "figures": ["gone.png", "b_first.png"]}))
    page = report.write_report(run_folder).read_text()
    assert "1 of 2 finished" in page
    assert "cannot be shown" in page
    assert "b_first.png" in page
    assert "gone.png" not in page
    assert not any("00_a/" in text for text in (page, (point / "01_b.html").read_text()))  # it has no page to lead to


FORMULAS = ["\\left( x", "x^{2}'", "a^b^c", "\\begin{cases} a", "x^", " ", "{", "\\middle|", "\\frac", "\\vec"]


@pytest.mark.parametrize("prose", [*(f"of ${each}$ here" for each in FORMULAS), "of $$\\sqrt$$ here"])
def test_a_formula_that_cannot_be_shown_is_shown_as_it_is_written(tmp_path, prose):
    page = report.write_page(tmp_path / "a.html", "A", prose, str).read_text()
    shown = html.unescape(re.search(r"of (.*?) ?here", page.partition("<main")[2], re.DOTALL)[1])
    assert prose.split("$")[-2] in shown
    assert "<code>" in shown


@pytest.mark.parametrize("prose", ["$x^$", "![](attachment:gone.png)", "[a](http://[b)", "[a](//[b.ipynb)"])
def test_one_fault_of_a_page_takes_neither_the_index_nor_the_other_pages(tmp_path, prose):
    run_folder = tmp_path / "local" / "cpu-1"
    bad = make_run(run_folder, prose=f"# Title {prose}\n\nQuestion {prose}?")
    good = make_run(run_folder, "01_b")
    (make_run(run_folder, "02_c") / "02_c.ipynb").write_text('{"cells": 1, "nbformat": 4, "nbformat_minor": 5}')
    for other in ("[]", "{}", "\udcff", "{"):  # other programs have manifests too
        (tmp_path / "manifest.json").write_bytes(other.encode(errors="surrogateescape"))
        assert report.find_runs(tmp_path) == [run_folder]
    page = report.write_report(run_folder).read_text()
    assert "3 of 3 finished" in page
    assert "cannot be shown" in page
    assert 'href="01_b/01_b.html"' in page
    assert (bad / "00_a.html").exists()
    assert (good / "01_b.html").exists()


def test_a_sweep_leaves_one_table_of_all_its_points(tmp_path):
    for changes in ({"seq_len": 16}, {"rates": [1, 4]}):
        folder = make_run(tmp_path, changes=changes)
        side = {"name": "b", "median_ms": 2.0, "error": 1e-3}
        other = {"name": "a", "median_ms": 3.0, "error": 1e-2}
        pair = {"kind": "comparison", "a": other, "b": side, "ratio": 1.5, "interval": [1.4, 1.6]}
        append_lines([pair, {"kind": "measurement", **side}, {"kind": "counters"}], folder / RESULTS)
    make_run(tmp_path, changes={"seq_len": 32}, error={"type": "ValueError", "message": "no", "cell": 1})
    make_run(tmp_path, "01_b")
    table = pd.read_csv(report.write_table(tmp_path, "00_a"))
    assert len(report.read_points(tmp_path)) == 4
    assert table.point.nunique() == 3
    assert sorted(table.status) == ["failed", *["ok"] * 6]
    assert set(map(tuple, table[["seq_len", "rates"]].values)) == {(16, "[1, 2]"), (8, "[1, 4]"), (32, "[1, 2]")}
    assert table.case.value_counts().to_dict() == {"a | b": 2, "b": 2}
    assert table.ratio.dropna().to_list() == [1.5, 1.5]
    # Of a pair the figures of b, of which the ratio speaks.
    assert set(map(tuple, table[["median_ms", "error"]].dropna().values)) == {(2.0, 1e-3)}
