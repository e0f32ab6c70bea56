"""Markdown and executed notebooks as pages that read without a network."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import InvalidNotebook, IPythonRenderer, MarkdownWithMath

from hilbert_lib.files import write_whole
from hilbert_lib.lab.suite.manifest import error_line
from hilbert_lib.lab.suite.points import say_values

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

PageOf = Callable[[str], str | None]  # where the page of a linked notebook lies, by its path; None where there is none


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


class _OfflineExporter(HTMLExporter):
    page_of: PageOf

    @pass_context
    def markdown2html(self, context, source: str) -> str:
        attachments = context.get("cell", {}).get("attachments", {})
        renderer = _Renderer(self.page_of, escape=False, attachments=attachments, exclude_anchor_links=True)
        try:
            return MarkdownWithMath(renderer=renderer).render(source)
        except Exception:  # what cannot be shown is shown as it was written
            return f"<pre>{plain(source)}</pre>"


def write_page(path: Path, title: str, markdown: str, page_of: PageOf, notebook: nbformat.NotebookNode | None = None):
    """Write a page of Markdown, above a notebook where there is one; gives its path."""
    notebook = notebook or nbformat.v4.new_notebook()
    notebook.metadata.title = title
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(markdown))
    exporter = _OfflineExporter(raw_template=TEMPLATE)
    exporter.page_of = page_of
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
    return "".join(each if each.isalnum() or each in " .-" else f"&#{ord(each)};" for each in readable)
