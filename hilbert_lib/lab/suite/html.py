"""An executed notebook as one HTML file that reads without a network."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert as mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from hilbert_lib.files import write_whole
from hilbert_lib.lab.suite.manifest import error_line

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
@media print { .highlight pre { white-space: pre-wrap; } }
</style>
{%- endblock -%}
{%- block data_latex -%}
<div class="jp-RenderedLatex jp-OutputArea-output">{{ output.data["text/latex"] | markdown2html }}</div>
{%- endblock -%}
"""


PageOf = Callable[[str], str | None]  # where the page of a notebook lies, by its name; None where there is none


class _Renderer(IPythonRenderer):
    """Markdown with formulas as MathML, and with links between notebooks led to their HTML, or to nothing."""

    def __init__(self, page_of: PageOf, **options) -> None:
        super().__init__(**options)
        self.page_of = page_of

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, display="block")

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", display="block")

    def link(self, text: str, url: str, title: str | None = None) -> str:
        parts = urlsplit(url)
        if not parts.scheme and not parts.netloc and parts.path.endswith(".ipynb"):
            page = self.page_of(Path(parts.path).stem)
            if page is None:
                return text
            url = parts._replace(path=page).geturl()
        return super().link(text, url, title)


class _OfflineExporter(HTMLExporter):
    page_of: PageOf

    @pass_context
    def markdown2html(self, context, source: str) -> str:
        attachments = context.get("cell", {}).get("attachments", {})
        return markdown_html(source, self.page_of, attachments)


def markdown_html(source: str, page_of: PageOf = lambda _name: None, attachments: dict | None = None) -> str:
    """Markdown as HTML, its formulas as MathML.

    Args:
        source: Markdown of a cell.
        page_of: where a link to a notebook leads; one to a notebook without a page becomes plain text.
        attachments: the pictures that the cell carries.

    Returns:
        HTML that loads nothing.

    >>> markdown_html("of $n$").count("<mi>n</mi>")
    1
    """
    renderer = _Renderer(page_of, escape=False, attachments=attachments, exclude_anchor_links=True)
    return MarkdownWithMath(renderer=renderer).render(source)


def write_html(notebook_file: Path, manifest: dict, page_of: PageOf) -> Path:
    """Write the HTML of an executed notebook beside it.

    Args:
        notebook_file: the executed notebook.
        manifest: of its run; what did not finish is said at the top of the page.
        page_of: as in `markdown_html`.

    Returns:
        The HTML file.

    Raises:
        nbformat.reader.NotJSONError: if the notebook's file was cut off.
    """
    notebook = nbformat.read(notebook_file, as_version=4)
    notebook.metadata.pop("widgets", None)  # the page shows each widget's picture instead
    notebook.metadata.title = manifest["title"]
    if manifest["status"] != "ok":
        # Literally: what an error says may look like Markdown, a formula or HTML.
        said = escape(" ".join(error_line(manifest).split())).replace("$", "&#36;")
        text = f"**This run did not finish: {manifest['status']}.**\n\n<pre>{said}</pre>"
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell(text))
    exporter = _OfflineExporter(raw_template=TEMPLATE)
    exporter.page_of = page_of
    page, _resources = exporter.from_notebook_node(notebook)
    return write_whole(notebook_file.with_suffix(".html"), page)
