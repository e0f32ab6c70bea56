"""The pages of a report and the table of a sweep, built from what lies in the runs' folders and from nothing else."""

import os
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

from hilbert_lib.files import write_whole
from hilbert_lib.lab.environment import describe_environment, say_hardware
from hilbert_lib.lab.records import FAILED, RESULTS, has_records, read_records
from hilbert_lib.lab.suite.manifest import MANIFEST, error_line, read_manifest
from hilbert_lib.lab.suite.points import say_values
from hilbert_lib.lab.tables import sides_of

TITLE = "When does a Hilbert order make attention faster?"
INDEX, README = "index.html", "README.md"
SHOWN = 3  # figures of a notebook on the index: the last ones, as a notebook ends with its answer


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
    from hilbert_lib.lab.suite.html import write_page  # with nbconvert, which takes a second

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
    """What the index says of a point, in Markdown; writes its HTML where it is missing."""
    from hilbert_lib.lab.suite.html import literally, plain, write_notebook_page

    notebook, at, is_ok = folder / f"{manifest['notebook']}.ipynb", _url(folder.name), manifest["status"] == "ok"
    page, note = notebook.with_suffix(".html"), ""
    if notebook.exists() and (rebuild or not page.exists()):
        try:
            write_notebook_page(notebook, manifest, partial(_page_of, folder.parent, "../"))
        except Exception as error:  # a file that was cut off, a cell that no page can show: the others can
            note = literally(f"The notebook cannot be shown: {type(error).__name__}: {error}")
    has_title = manifest["title"] != manifest["notebook"]  # else it is a file's name, and no Markdown
    title = manifest["title"] if has_title else plain(manifest["notebook"])
    yield f"## [{title}]({at}/{_url(page.name)})" if page.exists() else f"## {title}"
    status = "ok" if is_ok else f'<span class="failed">{manifest["status"]}</span>'
    yield f"{plain(manifest['notebook'])}: {status}, {_seconds(manifest):.1f} s"
    if manifest["changes"]:
        yield literally(say_values(manifest["changes"]))
    yield manifest["question"]
    yield f"> {manifest['answer']}" if is_ok else literally(error_line(manifest))
    yield note
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    shown = [f"{at}/{_url(name)}" for name in manifest["figures"] if name in files][-SHOWN:]
    yield " ".join(f'<a href="{path}"><img src="{path}" alt="{path}" loading="lazy"></a>' for path in shown)
    yield " ".join(f'<a href="{at}/{_url(name)}">{plain(name)}</a>' for name in files if name != page.name)


def _page_of(run_folder: Path, base: str, path: str) -> str | None:
    """Where the page of a notebook of the same run lies, seen from `base`; its defaults before other points."""
    name = Path(path).stem
    points = [folder.name for folder, manifest in read_points(run_folder) if manifest["notebook"] == name]
    points = [each for each in points if not each.endswith(FAILED)]
    return f"{base}{_url(min(points, key=len))}/{_url(name)}.html" if points else None


def _url(path: str) -> str:
    """A path as a link has it, whatever a name holds: `#`, `%`, `?`, a line's end, bytes that are no text."""
    return quote(os.fsencode(path), safe="/=+")


def write_index(root: Path) -> Path:
    """Write the page that leads to every run below a folder, under the text of its README where there is one."""
    from hilbert_lib.lab.suite.html import plain, write_page

    rows = []
    for run in find_runs(root):
        manifests = [manifest for _, manifest in read_points(run)]
        unfinished = sum(manifest["status"] != "ok" for manifest in manifests)
        told = f"{len(manifests) - unfinished} finished" + (f", {unfinished} not" if unfinished else "")
        end, at = max(manifest["end"] for manifest in manifests), run.relative_to(root).as_posix()
        hardware = say_hardware(manifests[0]["environment"])
        rows.append((end, f"| [{plain(at)}]({_url(at)}/{INDEX}) | {hardware} | {_say_moment(end)} | {told} |"))
    text = (root / README).read_text("utf-8", "replace") if (root / README).exists() else f"# {TITLE}"
    head = "## Every run\n\n| run | hardware | last change | notebooks |\n| --- | --- | --- | --- |\n"
    table = "\n".join(row for _, row in sorted(rows, reverse=True))

    def page_of(path: str) -> str | None:
        page = Path(path).with_suffix(".html")
        return _url(page.as_posix()) if (root / page).exists() else None

    return write_page(root / INDEX, TITLE, f"{text}\n\n{head}{table}", page_of)


def write_table(run_folder: Path, notebook: str) -> Path:
    """Write NOTEBOOK.csv: each point's parameters, how it ended, and a row for each of its measurements and pairs.

    Of a pair it is b's time, and the ratio (time of a over b's) with its interval.
    """
    import pandas as pd

    points = [(folder, manifest) for folder, manifest in read_points(run_folder) if manifest["notebook"] == notebook]
    turned = dict.fromkeys(name for _, manifest in points for name in manifest["changes"])
    rows = []
    for folder, manifest in points:
        point = {"point": folder.name, "status": manifest["status"], "seconds": _seconds(manifest)}
        point |= {name: manifest["parameters"].get(name) for name in turned}
        records = read_records(folder / RESULTS) if has_records(folder / RESULTS) else []
        rows.append(point)
        for record in records:
            if record.get("kind") in ("measurement", "comparison"):
                *_, side = sides = sides_of(record)
                found = {"case": " | ".join(each["name"] for each in sides), "median_ms": side["median_ms"]}
                found |= {"error": side["error"], "ratio": record.get("ratio"), "interval": record.get("interval")}
                rows.append({**point, **found})
    return write_whole(
        run_folder / f"{notebook}.csv", pd.DataFrame(rows).to_csv(index=False).encode(errors="backslashreplace")
    )


def _say_moment(time: str) -> str:
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M} UTC"


def _seconds(manifest: dict) -> float:
    return (datetime.fromisoformat(manifest["end"]) - datetime.fromisoformat(manifest["start"])).total_seconds()
