"""Reports: pages that read without a network, built from what lies in the folders."""

import html
import json
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tiny_notebooks import LOADS, make_run

from hilbert_lib.lab.suite.html import markdown_html, write_html
from hilbert_lib.lab.suite.report import find_runs, write_report

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WIDGET = "application/vnd.jupyter.widget-view+json"
PROSE = """# Is $x^2$ a square?

One formula $\\sum_{i<n} i$ here, none in `$code$`, and alone

$$\\frac{a}{b}$$

[onward](01_next.ipynb#end), [nowhere](02_missing.ipynb), [outward](https://example.org/01_next.ipynb)
"""


def page_of(name):
    return {"01_next": "../01_next-0123abcd/01_next.html"}.get(name)


@pytest.fixture
def manifest():
    return {"title": "Is it?", "status": "ok", "error": None}


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
    cells = [new_markdown_cell(PROSE), new_code_cell("1", outputs=outputs)]
    path = tmp_path / "00_a.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"widgets": widgets}), path)
    return path


def test_the_page_of_a_notebook_asks_no_host_for_anything(executed, manifest):
    page = write_html(executed, manifest, page_of).read_text()
    assert not LOADS.findall(page)
    assert "require.min.js" not in page
    assert "MathJax" not in page


def test_the_search_for_loads_finds_what_the_stock_page_loads(executed):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(executed))
    assert len(LOADS.findall(page)) >= 3


def test_formulas_become_mathml_and_code_stays(executed, manifest):
    page = write_html(executed, manifest, page_of).read_text()
    assert page.count("<math") == 4  # heading, sum, fraction, and the output that is LaTeX
    assert 'display="block"' in page
    assert "<mfrac>" in page
    assert "<code>$code$</code>" in page
    assert "\\frac" not in page


def test_a_widget_is_shown_as_its_picture(executed, manifest):
    page = write_html(executed, manifest, page_of).read_text()
    assert f"data:image/png;base64,{PIXEL}" in page
    assert "widget-view+json" not in page
    assert "widget-state+json" not in page
    assert "widgets" in nbformat.read(executed, as_version=4).metadata  # JupyterLab still finds it


def test_links_between_notebooks_lead_to_their_pages_and_none_to_a_missing_one(executed, manifest):
    page = write_html(executed, manifest, page_of).read_text()
    assert 'href="../01_next-0123abcd/01_next.html#end"' in page
    assert "02_missing" not in page
    assert "nowhere" in page
    assert 'href="https://example.org/01_next.ipynb"' in page


def test_the_page_of_a_failed_run_says_so_at_its_top(executed, manifest):
    error = {"type": "ValueError", "message": "too short", "cell": 3}
    page = write_html(executed, manifest | {"status": "failed", "error": error}, page_of).read_text()
    assert page.index("did not finish") < page.index("<mfrac>")
    assert "ValueError: too short (cell In [3])" in page


@pytest.mark.parametrize(
    "said", ["costs $\\frac$ of $x$", "no __init__ for *args*", "<script>alert(1)</script>", "a\n\n# b"]
)
def test_what_an_error_says_is_shown_literally(executed, manifest, said):
    error = {"type": "ValueError", "message": said, "cell": 3}
    page = write_html(executed, manifest | {"status": "failed", "error": error}, page_of).read_text()
    (shown,) = re.findall(r"<pre>(ValueError: .*?)</pre>", page)
    assert html.unescape(shown) == f"ValueError: {' '.join(said.split())} (cell In [3])"


def test_markdown_with_an_attached_picture_carries_it():
    page = markdown_html("![x](attachment:x.png)", attachments={"x.png": {"image/png": PIXEL}})
    assert f"data:image/png;base64,{PIXEL}" in page


def test_the_index_shows_every_point_with_links_that_lead_somewhere(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    make_run(run_folder)
    make_run(run_folder, changes={"seq_len": 16})
    make_run(run_folder, "01_b", error={"type": "ValueError", "message": "<too short>", "cell": 4})
    index = write_report(run_folder)
    page = index.read_text()
    assert not LOADS.findall(page)
    assert "2 of 3 finished" in page
    assert "ValueError: &lt;too short&gt; (cell In [4])" in page
    assert page.index("01_b.failed") < page.index("00_a/")  # what failed comes first
    assert "seq_len = 16" in page
    assert "The answer." in page
    links = re.findall(r"(?:href|src)=\"([^\"]+)\"", page)
    assert {"00_a/00_a.html", "00_a/00_a.ipynb", "00_a/a_table.csv", "00_a/b_first.png"} <= set(links)
    assert all((run_folder / link).exists() for link in links)


def test_notebooks_of_a_run_lead_to_each_other_whatever_their_parameters(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    first = make_run(run_folder, prose="# First?\n\nThen [the next](01_b.ipynb), not [this](02_c.ipynb).")
    second = make_run(run_folder, "01_b", changes={"seq_len": 16}, prose="# Next?\n\nAfter [it](00_a.ipynb).")
    index = write_report(run_folder)
    pages = [index, first / "00_a.html", second / "01_b.html"]
    links = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r'href="([^"#]+_[^"#]+)"', page.read_text())
    }
    assert {first / "00_a.html", second / "01_b.html"} <= links
    assert all(link.exists() for link in links)


def test_the_index_of_all_runs_links_each_of_them(tmp_path):
    for run_id in ("cpu-1", "cpu-2"):
        make_run(tmp_path / "local" / run_id)
        write_report(tmp_path / "local" / run_id)
    page = (tmp_path / "local" / "index.html").read_text()
    assert not LOADS.findall(page)
    assert {"cpu-1/index.html", "cpu-2/index.html"} <= set(re.findall(r"href=\"([^\"]+)\"", page))


def test_runs_are_found_at_any_depth_and_running_ones_are_not_shown(tmp_path):
    run_folder = tmp_path / "reports" / "local" / "cpu-1"
    make_run(run_folder)
    (run_folder / "00_a").rename(run_folder / ".00_a.0123abcd")
    with pytest.raises(ValueError, match="no runs in"):
        find_runs(tmp_path / "reports")
    make_run(run_folder, "01_b")
    assert find_runs(tmp_path / "reports") == find_runs(run_folder) == [run_folder]
    assert "00_a" not in write_report(run_folder).read_text()


def test_a_notebook_that_was_cut_off_does_not_stop_the_report(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    folder = make_run(run_folder, error={"type": "OSError", "message": "No space left", "cell": 1})
    (folder / "00_a.ipynb").write_text('{"cells": [')
    assert "cut off" in write_report(run_folder).read_text()


def test_a_manifest_that_was_cut_off_does_not_stop_the_report_of_the_others(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    (make_run(run_folder) / "manifest.json").write_text("")
    with pytest.raises(ValueError, match="no runs in"):
        find_runs(tmp_path)
    point = make_run(run_folder, "01_b", prose="# Title\n\nSee [it](00_a.ipynb).")
    assert find_runs(tmp_path) == [run_folder]
    pages = [path.read_text() for path in (write_report(run_folder), point / "01_b.html")]
    assert "1 of 1 finished" in pages[0]
    assert not any("00_a/" in page for page in pages)  # it has no page to lead to


def test_an_earlier_result_is_pointed_to_beside_a_failure(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    make_run(run_folder)
    make_run(run_folder, error={"type": "ValueError", "message": "no", "cell": 1})
    assert "An earlier attempt finished" in write_report(run_folder).read_text()


def test_an_interpreter_is_never_taken_for_a_gpu(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    folder = make_run(run_folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["environment"]["kernel_mode"] = "interpreted"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "There was no GPU. Triton kernels, where used, were interpreted" in write_report(run_folder).read_text()


def test_the_index_shows_the_figures_that_were_drawn_last(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    make_run(run_folder, figures=("z.png", "y.png", "b.png", "answer.png"))
    shown = re.findall(r'<img src="00_a/([^"]+)"', write_report(run_folder).read_text())
    assert shown == ["y.png", "b.png", "answer.png"]


def test_a_figure_that_is_not_there_is_not_shown(tmp_path):
    point = make_run(tmp_path / "run")
    manifest = json.loads((point / "manifest.json").read_text())
    (point / "here.png").touch()
    (point / "manifest.json").write_text(json.dumps({**manifest, "figures": ["gone.png", "here.png"]}))
    page = write_report(tmp_path / "run").read_text()
    assert "here.png" in page
    assert "gone.png" not in page


def test_pages_are_written_again_only_on_request(tmp_path):
    run_folder = tmp_path / "local" / "cpu-1"
    folder = make_run(run_folder)
    write_report(run_folder)
    (folder / "00_a.html").write_text("kept")
    write_report(run_folder)
    assert (folder / "00_a.html").read_text() == "kept"
    write_report(run_folder, rebuild=True)
    assert "kept" not in (folder / "00_a.html").read_text()
