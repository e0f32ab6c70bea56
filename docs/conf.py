"""Settings of Sphinx for the pages that `make pages` builds: they need no network."""

from latex2mathml.converter import convert as mathml

project = "When does a Hilbert order make attention faster?"
html_title = project
html_short_title = "Hilbert order"
author = "the authors of hilbert_lib"
extensions = ["myst_nb", "sphinx_design"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header", "misc.highlighting_failure", "toc.not_included"]
html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_theme_options = {"show_navbar_depth": 1, "home_page_in_toc": True, "use_download_button": False}
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it fetches the pages that it quotes, which a page from a file may not
html_last_updated_fmt = None
html_math_renderer = "mathml"


def _inline(self, node) -> None:
    from docutils.nodes import SkipNode

    self.body.append(_formula(node.astext(), "inline"))
    raise SkipNode


def _block(self, node) -> None:
    from docutils.nodes import SkipNode

    self.body.append(_formula(node.astext(), "block"))
    raise SkipNode


def _formula(source: str, display: str) -> str:
    try:
        return mathml(source, display=display)
    except Exception:  # of a kind of its own for each fault
        return f"<code>{source}</code>"


def setup(app) -> None:
    """Formulas as MathML, which every browser draws by itself."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
