"""The site of pages: every notebook and document has one, each leads to all, and nothing is asked of a network."""

import json
import re
import shutil
from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from own_scripts import load_script
from tiny_notebooks import LOADS, make_run

from hilbert_lib.lab.suite import site

ROOT = Path(__file__).parents[3]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SLIDER = '<div class="hilbert-slider"><input type="range"></div>'
WIDGET = "application/vnd.jupyter.widget-view+json"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Scripts of the theme lie beside the pages.
SOURCES = re.compile(r"<(?:script|link|img)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]+)\"")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout of one notebook, two documents and a committed run."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs/conf.py", root / "docs/conf.py")
    run = make_run(root / "reports/h200/gpu-1", prose="# Is it so?\n\nSee [the other](00_a.ipynb).")
    place = run.relative_to(root).as_posix()
    (root / "README.md").write_text(
        "# Ours\n\nIt ran\n<!--fast-->1.5<!--/--> times as fast ([run]("
        + place
        + "), [recipe](docs/recipes.md), [licence](LICENSE), [out](https://example.org)).\n\n"
        '<img src="notebooks/map.png" width="60%" alt="a map">\n'
    )
    (root / "notebooks").mkdir(exist_ok=True)
    (root / "notebooks/map.png").write_bytes(b64decode(PIXEL))
    (root / "docs/recipes.md").write_text("# Recipes\n\nA quokka, and $x^2$.\n")
    (root / "reports/README.md").write_text("# The evidence\n\n[back](../README.md)\n")
    shutil.rmtree(root / "reports/notebooks")
    data = {"image/png": PIXEL, WIDGET: {"model_id": "abc"}}
    outputs = [
        new_output("display_data", data, metadata={site.SLIDER: SLIDER}),
        new_output("stream", name="stdout", text="a line"),
    ]
    cells = [
        new_markdown_cell("# Does it pay?\n\n[To the recipes](../docs/recipes.md), [gone](../docs/none.md)"),
        new_code_cell("secret = 1", outputs=outputs, id="figure"),
        new_code_cell("2", outputs=[new_output("display_data", {"image/png": PIXEL})], id="cover"),
    ]
    (root / "notebooks").mkdir(exist_ok=True)
    for path in (root / "notebooks").glob("*.ipynb"):
        path.unlink()
    nbformat.write(new_notebook(cells=cells), root / "notebooks/03_pay.ipynb")
    return root


@pytest.fixture(scope="module")
def pages(checkout, tmp_path_factory):
    return site.write_site(checkout, tmp_path_factory.mktemp("site") / "pages").parent


def test_every_page_leads_to_all_and_the_index_has_a_picture(checkout, pages):
    places = [page.place for page in site.pages_of(checkout)]
    assert len(places) == 5
    for place in ("index", *(place.rpartition(".")[0] for place in places)):
        page = (pages / f"{place}.html").read_text()
        links = re.findall(r'class="reference internal" href="([^"#]+)"', page)
        reached = {((pages / place).parent / link).resolve() for link in links}
        assert {
            pages / f"{other.rpartition('.')[0]}.html" for other in places if other.rpartition(".")[0] != place
        } <= reached
        assert all(target.exists() for target in reached)
    index = (pages / "index.html").read_text()
    assert re.search(r'<img [^>]*src="_images/03_pay\.png"', index)
    assert "03 Does it pay?" in index


def test_nothing_is_asked_of_a_network_and_the_search_knows_every_word(pages):
    assert LOADS.search('<script src="https://a.b/c.js"></script>')
    for page in pages.rglob("*.html"):
        assert SOURCES.findall(page.read_text()) == [], page
    index = (pages / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert '"quokka":' in index
    assert "searchindex.js" in (pages / "search.html").read_text()  # by a script, which a file may load


def test_a_notebook_shows_what_it_showed_and_moves_without_a_kernel(pages):
    page = (pages / "notebooks/03_pay.html").read_text()
    assert SLIDER in page
    assert "a line" in page
    assert "Show the code" in page
    assert "widget-view" not in page


def test_links_lead_to_pages_or_are_words(pages):
    readme = (pages / "README.html").read_text()
    assert "It ran\n1.5 times" in readme  # a comment at the start of a line would end the paragraph
    assert 'href="reports/h200/gpu-1/00_a/00_a.html"' in readme
    assert 'href="docs/recipes.html"' in readme
    assert "licence" in readme
    assert "LICENSE" not in readme
    assert 'href="https://example.org"' in readme
    assert "gone" in (pages / "notebooks/03_pay.html").read_text()
    assert re.search(r'<img alt="a map" [^>]*src="_images/map\.png"', readme)
    assert (pages / "_images/map.png").exists()
    assert "<msup>" in (pages / "docs/recipes.html").read_text()


def test_a_run_says_what_it_is(checkout, pages):
    (run,) = (page for page in site.pages_of(checkout) if page.section == "Runs")
    assert re.fullmatch(r"00_a: .+, \d{4}-\d\d-\d\d \d\d:\d\d", run.name)
    page = (pages / "reports/h200/gpu-1/00_a/00_a.html").read_text()
    assert f"A committed run, as it ran: {run.name} UTC" in page
    assert re.search(r'keeps the text of its day: where <a [^>]*href="\.\./\.\./\.\./README\.html"', page)


def test_the_cover_is_the_cell_that_is_named_or_the_last_picture(checkout):
    notebook = json.loads((checkout / "notebooks/03_pay.ipynb").read_text())
    assert site.cover(notebook)
    notebook["metadata"]["hilbert"] = {"cover": "elsewhere"}
    assert site.cover(notebook) is None
    assert site.cover({**notebook, "cells": notebook["cells"][:1], "metadata": {}}) is None


def test_settings_that_sphinx_cannot_read_end_the_build(checkout, tmp_path):
    broken = tmp_path / "checkout"
    shutil.copytree(checkout, broken)
    (broken / "docs/conf.py").write_text("raise OSError('no settings')")
    with pytest.raises(RuntimeError, match="sphinx-build could not make"):
        site.write_site(broken, tmp_path / "pages")


def test_every_notebook_and_document_of_the_checkout_has_a_page_under_a_name_for_readers():
    pages = site.pages_of(ROOT)
    places = {page.place for page in pages}
    assert {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")} <= places
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= places
    assert {"README.md", "reports/README.md", "reports/HISTORY.md"} <= places
    assert not [page.name for page in pages if re.search(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,}\b", page.name)]  # hashes
    covers = {path.stem: site.cover(json.loads(path.read_text())) for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert covers["08_where_a_curve_pays"]


def test_a_slider_is_kept_where_code_hosts_do_not_look():
    shown = load_script("keep_outputs")._shown
    data = {"image/png": PIXEL, WIDGET: {}, "text/html": SLIDER}
    kept = shown({"output_type": "display_data", "data": data, "metadata": {}})
    assert kept["data"] == {"image/png": PIXEL}
    assert kept["metadata"] == {site.SLIDER: SLIDER}


@pytest.mark.browser
def test_search_and_sliders_work_from_a_file(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    pages = site.write_site(ROOT, tmp_path / "pages").parent
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{pages}/search.html?q=boxes")
        page.wait_for_selector("#search-results li a")
        for notebook in ("01_hilbert_curves", "08_where_a_curve_pays"):
            page.goto(f"file://{pages}/notebooks/{notebook}.html")
            before = page.get_attribute(".hilbert-slider img", "src")
            page.focus(".hilbert-slider input")
            page.keyboard.press("ArrowLeft")
            page.keyboard.press("ArrowRight")
            page.focus(".hilbert-slider label:last-of-type input")
            page.keyboard.press("ArrowRight")
            assert page.get_attribute(".hilbert-slider img", "src") != before
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
