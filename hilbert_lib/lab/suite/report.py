"""The pages of a report, built from what lies in its folders and from nothing else."""

from datetime import datetime
from functools import partial
from pathlib import Path

from jinja2 import Environment
from nbformat.reader import NotJSONError

from hilbert_lib.files import write_whole
from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.suite.html import markdown_html, write_html
from hilbert_lib.lab.suite.manifest import MANIFEST, error_line, read_manifest
from hilbert_lib.lab.suite.pages import RUN, RUNS, STYLE

TITLE = "When does a Hilbert order make attention faster?"
KERNELS = {
    "compiled": "GPU kernels were compiled and ran on the GPU.",
    "interpreted": "There was no GPU. Triton kernels, where used, were interpreted: right results, meaningless "
    "times. All other times are the CPU's own.",
    "absent": "No GPU kernels ran: there is no GPU, or no Triton for this platform.",
}
FACTS = {
    "hardware": "Hardware",
    "platform": "Platform",
    "commit": "Commit",
    "dirty": "Local changes",
    "code_hash": "Hash of the library",
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "numpy": "NumPy",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "NVIDIA driver",
    "memory_gib": "Memory (GiB)",
}


def find_runs(folder: Path) -> list[Path]:
    """The runs in a folder: those folders whose own folders hold manifests.

    Args:
        folder: of one run, or of many at any depth.

    Returns:
        The runs' folders, sorted.

    Raises:
        ValueError: if there is none.
    """
    runs = sorted({manifest.parent.parent for manifest in folder.rglob(MANIFEST) if _is_shown(manifest.parent)})
    if not runs:
        raise ValueError(f"no runs in {folder}: no folder there holds a {MANIFEST} that can be read")
    return runs


def write_report(run_folder: Path, *, rebuild: bool = False) -> Path:
    """Write a run's pages: the HTML of its notebooks, its index, and the index of the runs beside it.

    Args:
        run_folder: folder of the run-id.
        rebuild: write the HTML of the notebooks again even where it stands.

    Returns:
        The run's index.html.
    """
    points = [_describe(folder, rebuild) for folder in point_folders(run_folder)]
    # What did not finish comes first; below a notebook's defaults, its other points in the order of their run.
    points.sort(key=lambda p: (p["status"] == "ok", p["notebook"], p["changes"] != {}, p["start"]))
    latest = max(points, key=lambda point: point["end"])
    facts = latest["environment"]
    page = render(
        RUN,
        points=points,
        hardware=say_hardware(facts),
        summary=_summary(points),
        kernels=KERNELS[facts["kernel_mode"]],
        environment=[(label, _say(facts[name])) for name, label in FACTS.items() if facts[name] is not None],
    )
    runs = [_describe_run(run) for run in _runs_beside(run_folder)]
    runs.sort(key=lambda run: run["end"], reverse=True)
    write_whole(run_folder.parent / "index.html", render(RUNS, runs=runs))
    return write_whole(run_folder / "index.html", page)


def point_folders(run_folder: Path) -> list[Path]:
    """The folders of a run's points that have ended, sorted.

    Args:
        run_folder: folder of the run-id.
    """
    return sorted(path.parent for path in run_folder.glob(f"*/{MANIFEST}") if _is_shown(path.parent))


def say_moment(time: str) -> str:
    """A moment of a manifest, to the minute.

    >>> say_moment("2026-01-02T03:04:05.678+00:00")
    '2026-01-02 03:04 UTC'
    """
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"


def render(template: str, **content) -> str:
    """The text of a page.

    Args:
        template: of `pages`.
        **content: what it shows; escaped unless the template says that it is safe.
    """
    return Environment(autoescape=True).from_string(template).render(title=TITLE, style=STYLE, **content)


def _is_shown(folder: Path) -> bool:
    # Hidden ones are still running; what a loss of power left of a manifest tells nothing.
    return not folder.name.startswith(".") and read_manifest(folder) is not None


def _page_of(run_folder: Path, base: str, name: str) -> str | None:
    """Where the page of a notebook of the same run lies, seen from `base`; its defaults before other points."""
    points = [run_folder / name, *sorted(run_folder.glob(f"{name}-" + "[0-9a-f]" * 8))]
    return next((f"{base}{each.name}/{name}.html" for each in points if _is_shown(each)), None)


def _runs_beside(run_folder: Path) -> list[Path]:
    return sorted(folder for folder in run_folder.parent.iterdir() if folder.is_dir() and point_folders(folder))


def _describe(folder: Path, rebuild: bool) -> dict:
    """A point's manifest, with what its card shows and links to; writes its HTML where it is missing."""
    manifest = read_manifest(folder)
    page_of = partial(_page_of, folder.parent, "")
    notebook = folder / f"{manifest['notebook']}.ipynb"
    html, note = notebook.with_suffix(".html"), ""
    if notebook.exists() and (rebuild or not html.exists()):
        try:
            write_html(notebook, manifest, partial(_page_of, folder.parent, "../"))
        except NotJSONError:
            note = "The notebook's file was cut off while it was written, and cannot be shown."
    if manifest["status"] != "ok" and (folder.parent / manifest["name"]).exists():
        note += " An earlier attempt finished; its result stands below."
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        **manifest,
        "figures": [name for name in manifest["figures"] if name in files],
        "folder": folder.name,
        "html": html.name if html.exists() else None,
        "ipynb": notebook.name if notebook.exists() else None,
        "data": [name for name in files if name not in (html.name, notebook.name, MANIFEST)],
        "question": markdown_html(manifest["question"], page_of),
        "answer": markdown_html(manifest["answer"], page_of) if manifest["status"] == "ok" else "",
        "error": error_line(manifest) if manifest["error"] else None,
        "note": note.strip(),
        "duration": _duration(_seconds(manifest)),
    }


def _describe_run(run_folder: Path) -> dict:
    manifests = [read_manifest(folder) for folder in point_folders(run_folder)]
    finished = [manifest for manifest in manifests if manifest["status"] == "ok"]
    return {
        "folder": run_folder.name,
        "hardware": say_hardware(manifests[0]["environment"]),
        "end": say_moment(max(manifest["end"] for manifest in manifests)),
        "ok": len(finished),
        "failed": len(manifests) - len(finished),
    }


def _summary(points: list[dict]) -> str:
    finished = sum(point["status"] == "ok" for point in points)
    total = _duration(sum(map(_seconds, points)))
    return f"{finished} of {len(points)} finished, in {total}, the last on {say_moment(max(p['end'] for p in points))}"


def _seconds(manifest: dict) -> float:
    span = datetime.fromisoformat(manifest["end"]) - datetime.fromisoformat(manifest["start"])
    return span.total_seconds()


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _say(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
