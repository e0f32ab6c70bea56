"""The pages of the checkout as one site that reads without a network: notebooks as run, documents, the evidence.

    sources    the Markdown and the notebooks, at their places in the checkout, with links that lead to pages
    index      a card with a picture for each notebook; every page in the sidebar, under a name that says what it is
    build      Sphinx, with its search, which works from a file

`make pages` calls `write_site`.
"""

import json
import re
import shutil
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath, relpath

from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.records import FAILED, MACHINES
from hilbert_lib.lab.suite.manifest import MANIFEST, read_manifest
from hilbert_lib.lab.suite.points import say_values

SLIDER = "slider"  # in the metadata of an output that is kept: the HTML that code hosts would not show
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "reports/*.md")
LINK = re.compile(r"(?<!\!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r'<img src="([^"]+)"[^>]*? alt="([^"]*)"[^>]*>')  # whose file Sphinx would not copy
SLOT = re.compile(r"<!--\w*-->|<!--/-->")  # of numbers: comments, which would cut a paragraph at the start of a line
STYLE = """\
.bd-header { display: none; }
.bd-page-width { max-width: 110rem; }
.bd-main .bd-content .bd-article-container { max-width: 75rem; }
.bd-article-container img { max-width: 100%; height: auto; }
.cell_output table { font-size: 0.85em; }
.cell_output td, .cell_output th { padding: 0.2em 0.6em; }
.cell_output pre { white-space: pre; overflow-x: auto; }
article table code { overflow-wrap: anywhere; }
.sd-card-img-top { height: 11rem; object-fit: contain; background: white; padding: 0.3rem; }
.hilbert-slider label { margin-right: 1.5rem; }
"""


@dataclass(frozen=True)
class Page:
    """A page of the site."""

    place: str  # of its source in the checkout, and in the site
    name: str  # in the sidebar
    section: str


def is_slider(data: dict) -> bool:
    """Whether an output's data are those of a slider over pictures."""
    return "hilbert-slider" in "".join(data.get("text/html", ""))


def pages_of(root: Path) -> list[Page]:
    """Every page of a checkout, in the order of the sidebar."""
    pages = [Page("README.md", "What this is", "Start")]
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        pages.append(Page(f"notebooks/{path.name}", f"{path.stem.partition('_')[0]} {_title(path)}", "Notebooks"))
    for pattern in TEXTS[1:]:
        for path in sorted(root.glob(pattern)):
            place = path.relative_to(root).as_posix()
            section = "Evidence" if place.startswith("reports/") else "Documents"
            pages.append(Page(place, _heading(path), section))
    return pages + [run for run, _ in runs_of(root)]


def runs_of(root: Path) -> Iterator[tuple[Page, dict]]:
    """The committed runs that finished and kept their notebook, with their manifests; the newest of each first."""
    found = []
    for file in (root / "reports").glob(f"{MACHINES}/*/*/{MANIFEST}"):
        manifest = read_manifest(file.parent)
        notebook = file.parent / f"{manifest['notebook'] if manifest else ''}.ipynb"
        if manifest and notebook.exists() and not file.parent.name.endswith(FAILED):
            found.append((manifest, notebook.relative_to(root).as_posix()))
    for manifest, place in sorted(found, key=lambda each: (each[0]["notebook"], each[0]["end"]), reverse=True):
        yield Page(place, say_run(manifest), "Runs"), manifest


def say_run(manifest: dict) -> str:
    """The name of a run for readers: its notebook, the hardware and the end.

    >>> facts = {"gpus": [], "cpu": "a CPU", "cores": 2, "hardware": "a CPU"}
    >>> say_run({"notebook": "08_where", "environment": facts, "end": "2026-11-28T09:46:07+00:00"})
    '08_where: a CPU, 2026-11-28 09:46'
    """
    hardware = say_hardware(manifest["environment"]).removeprefix("NVIDIA ")
    return f"{manifest['notebook']}: {hardware}, {manifest['end'][:16].replace('T', ' ')}"


def write_site(root: Path, out: Path) -> Path:
    """Build the site of a checkout in a folder, which is made anew, and give the path of its index.

    root: the checkout. out: of the pages; their sources lie beside it.

    Raises:
        RuntimeError: if Sphinx ends with an error; it has said which.
    """
    from sphinx.cmd.build import build_main  # loads docutils and Jinja: not where a notebook runs

    sources = out.with_name(f"{out.name}-sources")
    for folder in (out, sources):
        shutil.rmtree(folder, ignore_errors=True)
    write_sources(root, sources)
    if build_main(["-q", "-j", "auto", "-b", "html", str(sources), str(out)]):
        raise RuntimeError(f"sphinx-build could not make {out} of {sources}; its words are above")
    shutil.rmtree(out / ".doctrees", ignore_errors=True)
    return out / "index.html"


def write_sources(root: Path, sources: Path) -> None:
    """Write what Sphinx reads: settings, pages and pictures of a checkout, at the same places."""
    pages = pages_of(root)
    known = {page.place for page in pages}
    (sources / "_static").mkdir(parents=True)
    (sources / "_static/pages.css").write_text(STYLE, encoding="utf-8")
    shutil.copy(root / "docs/conf.py", sources / "conf.py")
    for path in (root / "notebooks").glob("*.png"):
        (sources / "notebooks").mkdir(exist_ok=True)
        shutil.copy(path, sources / "notebooks")
    manifests = {page.place: manifest for page, manifest in runs_of(root)}
    for page in pages:
        target = sources / page.place
        target.parent.mkdir(parents=True, exist_ok=True)
        if page.place.endswith(".md"):
            text = (root / page.place).read_text(encoding="utf-8")
            target.write_text(_for_pages(text, page.place, root, known), encoding="utf-8")
        else:
            notebook = json.loads((root / page.place).read_text(encoding="utf-8"))
            about = about_run(page, manifests[page.place]) if page.place in manifests else ""
            target.write_text(json.dumps(_notebook(notebook, page.place, root, known, about)), encoding="utf-8")
    (sources / "index.md").write_text(_index(root, sources, pages), encoding="utf-8")


def about_run(page: Page, manifest: dict) -> str:
    """A note at the top of a run's page: what it is, and the command that makes it again."""
    changes = say_values(manifest["changes"])
    commit = manifest["environment"].get("commit") or "unknown"
    lines = [f"A committed run, as it ran: {page.name} UTC, commit {commit[:12]}."]
    lines += [f"Parameters that differ from the defaults: `{changes}`."] if changes else []
    folder = Path(page.place).parent.as_posix()
    newest = f"[the evidence]({relpath('reports/README.md', folder)})"
    lines += [f"It keeps the text of its day: where {newest} names another number, that is the newer one."]
    return "```{note}\n" + "\n".join(lines) + f"\n\nIts records lie in `{folder}`.\n```"


def _for_pages(text: str, place: str, root: Path, known: set[str]) -> str:
    """Markdown whose links lead to pages of the site, or to nothing where there is none."""
    base = Path(place).parent.as_posix()

    def lead(match: re.Match) -> str:
        label, url = match.groups()
        path, mark, anchor = url.partition("#")
        if not path or re.match(r"\w+:", url):
            return match[0]
        target = normpath(f"{base}/{path}")
        if target in known:
            return match[0]
        inside = [page for page in known if page.startswith(f"{target}/") and page.endswith(".ipynb")]
        if (root / target).is_dir() and len(inside) == 1:
            return f"[{label}]({relpath(inside[0], base)}{mark}{anchor})"
        return label

    return LINK.sub(lead, IMAGE.sub(r"![\2](\1)", SLOT.sub("", text)))


def _notebook(notebook: dict, place: str, root: Path, known: set[str], about: str) -> dict:
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cells.append({**cell, "source": _for_pages(source, place, root, known)})
            continue
        if cell["cell_type"] != "code" or not source.strip():
            continue
        tags = [*cell["metadata"].get("tags", []), "hide-input"]
        outputs = [_output(output) for output in cell["outputs"]]
        cells.append({**cell, "metadata": {**cell["metadata"], "tags": tags}, "outputs": outputs})
    if about:
        first, *rest = cells
        heading, _, text = first["source"].partition("\n")
        cells = [{**first, "source": f"{heading}\n\n{about}\n\n{text}"}, *rest]
    metadata = {name: value for name, value in notebook["metadata"].items() if name != "widgets"}
    return {**notebook, "cells": cells, "metadata": metadata}


def _output(output: dict) -> dict:
    # A widget is its slider, or its picture.
    if "data" not in output:
        return output
    data = {kind: value for kind, value in output["data"].items() if "widget" not in kind}
    metadata = dict(output.get("metadata", {}))
    if slider := metadata.pop(SLIDER, None):
        data["text/html"] = slider
    if is_slider(data):
        data = {"text/html": data["text/html"]}
    return {**output, "data": data, "metadata": metadata}


def _index(root: Path, sources: Path, pages: list[Page]) -> str:
    lines = ["# When does a Hilbert order make attention faster?", ""]
    lines += [
        "[What this is, and the answers](README.md). Each notebook asks one question; its page shows it as it ran."
    ]
    lines += ["", "::::{grid} 1 2 3 3", ":gutter: 3", ""]
    for page in pages:
        if page.section == "Notebooks":
            lines += _card(root / page.place, page, sources)
    lines += ["::::", ""]
    for section in dict.fromkeys(page.section for page in pages):
        inside = [page for page in pages if page.section == section]
        lines += ["```{toctree}", ":hidden:", f":caption: {section}", ""]
        lines += [f"{page.name} <{page.place.rpartition('.')[0]}>" for page in inside]
        lines += ["```", ""]
    return "\n".join(lines)


def _card(path: Path, page: Page, sources: Path) -> list[str]:
    lines = [f":::{{grid-item-card}} {page.name}", f":link: {page.place.rpartition('.')[0]}", ":link-type: doc"]
    if picture := cover(json.loads(path.read_text(encoding="utf-8"))):
        (sources / f"_static/{path.stem}.png").write_bytes(picture)
        lines.append(f":img-top: _static/{path.stem}.png")
    return [*lines, "", ":::", ""]


def cover(notebook: dict) -> bytes | None:
    """The picture of a notebook: of the cell that its metadata names as cover, or its last; None without any."""
    wanted = notebook["metadata"].get("hilbert", {}).get("cover")
    pictures = [
        output["data"]["image/png"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and wanted in (None, cell["id"])
        for output in cell["outputs"]
        if "image/png" in output.get("data", {}) and SLIDER not in output.get("metadata", {})
    ]
    return b64decode("".join(pictures[-1])) if pictures else None


def _title(path: Path) -> str:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "".join(notebook["cells"][0]["source"]).splitlines()[0].removeprefix("# ")


def _heading(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), path.stem)


if __name__ == "__main__":
    print(write_site(Path.cwd(), Path(sys.argv[1])))
