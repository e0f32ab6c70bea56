"""The pages of a report and the table of a sweep, built from what lies in the runs' folders and from nothing else.

Pages read without a network: Markdown, and executed notebooks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import nbformat
import pandas as pd
from jinja2 import pass_context
from latex2mathml.converter import convert as mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath

from hilbert_lib.files import write_whole
from hilbert_lib.lab.environment import describe_environment, say_hardware
from hilbert_lib.lab.records import FAILED, RESULTS, TIMED, has_records, read_records
from hilbert_lib.lab.suite.manifest import MANIFEST, error_line, read_manifest
from hilbert_lib.lab.suite.points import say_values
from hilbert_lib.lab.tables import sides_of

TITLE = "When does a Hilbert order make attention faster?"
INDEX, README = "index.html", "README.md"
SHOWN = 3  # figures of a notebook on the index: the last ones, as a notebook ends with its answer
PageOf = Callable[[str], str | None]  # where the page of a linked notebook lies, by its path; None where there is none
# nbconvert's own page asks other hosts for require.js, MathJax, mermaid and the widgets' manager.
TEMPLATE = """
{%- extends "lab/index.html.j2" -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_css -%}
<style>
main { max-width: 72rem; margin: 0 auto; padding: 0 1rem; }
.jp-RenderedHTMLCommon math[display="block"] { margin: 1em 0; font-size: 1.1em; }
.jp-CodeMirrorEditor.jp-InputArea-editor { overflow-x: auto; }
.failed { color: #d1242f; font-weight: 600; }
img[loading] { width: 31%; vertical-align: top; }
main pre { white-space: pre-wrap; }
@media print { .highlight pre { white-space: pre-wrap; } }
</style>
{%- endblock -%}
{%- block data_latex -%}
<div class="jp-RenderedLatex jp-OutputArea-output">{{ output.data["text/latex"] | markdown2html }}</div>
{%- endblock -%}
"""


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder, at any depth: those folders whose own folders hold manifests. ValueError without any."""
    runs = sorted({file.parent.parent for file in folder.rglob(MANIFEST) if read_points(file.parent.parent)})
    if not runs:
        raise ValueError(f"no runs in {folder}: no folder there holds a {MANIFEST} that can be read")
    return runs


def read_points(run_folder: Path) -> list[tuple[Path, dict]]:
    """The folders of a run's points that have ended, sorted, with their manifests. Hidden ones are still running; what
    a loss of power left of a manifest tells nothing."""
    folders = sorted(path.parent for path in run_folder.glob(f"[!.]*/{MANIFEST}"))
    return [(folder, manifest) for folder in folders if (manifest := read_manifest(folder))]


def write_report(run_folder: Path, root: Path | None = None, *, rebuild: bool = False) -> Path:
    """Write a run's index, which leads back to that of `root` (by default the folder above), and gives its path.

    The HTML of its notebooks is written where it is missing; with `rebuild` all of it.
    """
    points = read_points(run_folder)
    # What did not finish comes first; below a notebook's defaults, its other points in the order of their run.
    points.sort(key=lambda p: (p[1]["status"] == "ok", p[1]["notebook"], p[1]["changes"] != {}, p[1]["start"]))
    finished = sum(manifest["status"] == "ok" for _, manifest in points)
    latest = max((manifest for _, manifest in points), key=lambda manifest: manifest["end"])
    back = "../" * len(run_folder.relative_to(root or run_folder.parent).parts)
    lines = [
        f"[All runs]({back}{INDEX})",
        f"# {TITLE}",
        f"On {say_hardware(latest['environment'])}: {finished} of {len(points)} finished, the last on "
        f"{_say_moment(latest['end'])}.",
        *(line for folder, manifest in points for line in _card(folder, manifest, rebuild)),
        f"## Where it ran\n\n<pre>{describe_environment(latest['environment'])}</pre>",
    ]
    return write_page(run_folder / INDEX, TITLE, "\n\n".join(lines), partial(_page_of, run_folder, ""))


def _card(folder: Path, manifest: dict, rebuild: bool) -> Iterator[str]:
    """Entry of a point in the index, in Markdown; writes its HTML where it is missing."""
    notebook, link, is_ok = folder / f"{manifest['notebook']}.ipynb", _url(folder.name), manifest["status"] == "ok"
    page, note = notebook.with_suffix(".html"), ""
    if notebook.exists() and (rebuild or not page.exists()):
        try:
            write_notebook_page(notebook, manifest, partial(_page_of, folder.parent, "../"))
        except Exception as error:  # a file that was cut off, a cell that no page can show: the others can
            note = literally(f"The notebook cannot be shown: {type(error).__name__}: {error}")
    has_title = manifest["title"] != manifest["notebook"]  # else it is a file's name, and no Markdown
    title = manifest["title"] if has_title else plain(manifest["notebook"])
    yield f"## [{title}]({link}/{_url(page.name)})" if page.exists() else f"## {title}"
    status = "ok" if is_ok else f'<span class="failed">{manifest["status"]}</span>'
    yield f"{plain(manifest['notebook'])}: {status}, {_seconds(manifest):.1f} s"
    if manifest["changes"]:
        yield literally(say_values(manifest["changes"]))
    yield manifest["question"]
    yield f"> {manifest['answer']}" if is_ok else literally(error_line(manifest))
    yield note
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    shown = [f"{link}/{_url(name)}" for name in manifest["figures"] if name in files][-SHOWN:]
    yield " ".join(f'<a href="{path}"><img src="{path}" alt="{path}" loading="lazy"></a>' for path in shown)
    yield " ".join(f'<a href="{link}/{_url(name)}">{plain(name)}</a>' for name in files if name != page.name)


def _page_of(run_folder: Path, base: str, path: str) -> str | None:
    """Path of the page of a notebook of the same run, seen from `base`; its defaults before other points."""
    name = Path(path).stem
    points = [folder.name for folder, manifest in read_points(run_folder) if manifest["notebook"] == name]
    points = [point for point in points if not point.endswith(FAILED)]
    return f"{base}{_url(min(points, key=len))}/{_url(name)}.html" if points else None


def _url(path: str) -> str:
    """A path as a link has it, whatever a name holds: `#`, `%`, `?`, a line's end, bytes that are no text."""
    return quote(os.fsencode(path), safe="/=+")


def write_index(root: Path) -> Path:
    """Write the page that leads to every run below a folder, under the text of its README where there is one."""
    rows = []
    for run in find_runs(root):
        manifests = [manifest for _, manifest in read_points(run)]
        unfinished = sum(manifest["status"] != "ok" for manifest in manifests)
        progress = f"{len(manifests) - unfinished} finished" + (f", {unfinished} not" if unfinished else "")
        end, place = max(manifest["end"] for manifest in manifests), run.relative_to(root).as_posix()
        facts = manifests[0]["environment"]
        code = (facts["commit"] or "unknown code")[:7] + (" with local changes" if facts["dirty"] else "")
        name = f"{say_hardware(facts)}, torch {facts['torch']}, {code}"
        link = f"[{plain(name)}]({_url(place)}/{INDEX})"
        rows.append((end, f"| {link} | {_say_moment(end)} | {progress} | {plain(place)} |"))
    text = (root / README).read_text("utf-8", "replace") if (root / README).exists() else f"# {TITLE}"
    head = "## Every run\n\n| run | last change | notebooks | folder |\n| --- | --- | --- | --- |\n"
    table = "\n".join(row for _, row in sorted(rows, reverse=True))

    def page_of(path: str) -> str | None:
        page = Path(path).with_suffix(".html")
        return _url(page.as_posix()) if (root / page).exists() else None

    return write_page(root / INDEX, TITLE, f"{text}\n\n{head}{table}", page_of)


def write_table(run_folder: Path, notebook: str) -> Path:
    """Write NOTEBOOK.csv: each point's parameters, how it ended, and a row for each of its measurements and pairs.

    Of a pair it is b's time, and the ratio (time of a over b's) with its interval.
    """
    points = [(folder, manifest) for folder, manifest in read_points(run_folder) if manifest["notebook"] == notebook]
    turned = dict.fromkeys(name for _, manifest in points for name in manifest["changes"])
    rows = []
    for folder, manifest in points:
        point = {"point": folder.name, "status": manifest["status"], "seconds": _seconds(manifest)}
        point |= {name: manifest["parameters"].get(name) for name in turned}
        records = read_records(folder / RESULTS) if has_records(folder / RESULTS) else []
        rows.append(point)
        for record in records:
            if record.get("kind") in TIMED:
                *_, timing = sides = sides_of(record)
                row = {"case": " | ".join(case["name"] for case in sides), "median_ms": timing["median_ms"]}
                row |= {"error": timing["error"], "ratio": record.get("ratio"), "interval": record.get("interval")}
                rows.append({**point, **row})
    table = pd.DataFrame(rows).to_csv(index=False)
    return write_whole(run_folder / f"{notebook}.csv", table.encode(errors="backslashreplace"))


def _say_moment(time: str) -> str:
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"


def _seconds(manifest: dict) -> float:
    return (datetime.fromisoformat(manifest["end"]) - datetime.fromisoformat(manifest["start"])).total_seconds()


class _Renderer(IPythonRenderer):
    """Markdown with formulas as MathML, and with links between notebooks led to their HTML, or to nothing."""

    def __init__(self, page_of: PageOf, **options) -> None:
        super().__init__(**options)
        self.page_of = page_of

    def inline_math(self, body: str) -> str:
        return _formula(body, "inline")

    def block_math(self, body: str) -> str:
        return _formula(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")

    def image(self, text: str, url: str, title: str | None = None) -> str:
        try:
            return super().image(text, url, title)
        except InvalidNotebook:  # the picture is not attached
            return plain(text or url)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        with suppress(ValueError):  # of what is no URL, and stays as it is
            parts = urlsplit(url)
            if not parts.scheme and not parts.netloc and parts.path.endswith(".ipynb"):
                page = self.page_of(unquote(parts.path, errors="surrogateescape"))
                if page is None:
                    return text
                url = parts._replace(path=page).geturl()
        return super().link(text, url, title)


def _formula(body: str, display: str) -> str:
    """A formula as MathML; its source where it is none, or more than the converter knows."""
    try:
        return mathml(body, display=display)
    except Exception:  # of a kind of its own for each fault, and IndexError
        return f"<code>{plain(body)}</code>"


def write_page(path: Path, title: str, markdown: str, page_of: PageOf, notebook: nbformat.NotebookNode | None = None):
    """Write a page of Markdown, above a notebook where there is one; gives its path."""
    notebook = notebook or nbformat.v4.new_notebook()
    notebook.metadata.title = title
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(markdown))

    @pass_context
    def markdown2html(context, source: str) -> str:
        attachments = context.get("cell", {}).get("attachments", {})
        renderer = _Renderer(page_of, escape=False, attachments=attachments, exclude_anchor_links=True)
        try:
            return MarkdownWithMath(renderer=renderer).render(source)
        except Exception:  # what cannot be shown is shown as it was written
            return f"<pre>{plain(source)}</pre>"

    exporter = HTMLExporter(raw_template=TEMPLATE, filters={"markdown2html": markdown2html})
    page, _resources = exporter.from_notebook_node(notebook)
    return write_whole(path, page.encode(errors="backslashreplace"))  # a file's name may be no text


def write_notebook_page(notebook_file: Path, manifest: dict, page_of: PageOf) -> Path:
    """Write the HTML of an executed notebook beside it; how a run ended that did not finish stands at its top."""
    notebook = nbformat.read(notebook_file, as_version=4)
    notebook.metadata.pop("widgets", None)  # the page shows each widget's picture instead
    changes = say_values(manifest["changes"])
    top = "[All notebooks of this run](../index.html)" + (f": this one with\n\n{literally(changes)}" if changes else "")
    if manifest["status"] != "ok":
        top += f"\n\n**This run did not finish: {manifest['status']}.**\n\n{literally(error_line(manifest))}"
    title = manifest["title"] + (f" ({changes})" if changes else "")
    return write_page(notebook_file.with_suffix(".html"), title, top, page_of, notebook)


def literally(text: str) -> str:
    """A line of its own for Markdown, as it is."""
    return f"<pre>{plain(' '.join(text.split()))}</pre>"


def plain(text: str) -> str:
    """Text for Markdown as it is: what an error says, or a file's name, may look like Markdown, a formula or HTML."""
    readable = text.encode(errors="backslashreplace").decode()
    return "".join(char if char.isalnum() or char in " .-" else f"&#{ord(char)};" for char in readable)
