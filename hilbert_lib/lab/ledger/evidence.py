"""The committed runs of several machines as one page, its twin in Markdown, and the numbers in the README above."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from hilbert_lib.files import write_whole
from hilbert_lib.lab.committed import MACHINES, TELLING, newest_run, run_environment
from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.ledger.advice import CHOICE, GRIDS, KERNELS, short_answer
from hilbert_lib.lab.ledger.kernels import grid_gains
from hilbert_lib.lab.ledger.numbers import RING, kernel_numbers, key_numbers
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.suite.html import markdown_html
from hilbert_lib.lab.suite.manifest import MANIFEST, read_manifest
from hilbert_lib.lab.suite.pages import EVIDENCE, EVIDENCE_MARKDOWN, NUMBERS_MARKDOWN, README_MARKDOWN
from hilbert_lib.lab.suite.points import read_notebook
from hilbert_lib.lab.suite.report import point_folders, render, say_moment

INDEX, README, HISTORY = "index.html", "README.md", "HISTORY.md"
BLOCK = re.compile(r"(<!-- from the records[^>]*-->\n).*?(<!-- end of the records -->)", re.DOTALL)
NOTEBOOK_LINK = re.compile(r"\[([^\]]+)\]\(([\w-]+)\.ipynb(?:#[^)]*)?\)")
CAPTION = (
    "Attention to a window of cells on a grid, the same function in every order, in blocks of {block}: how many times "
    "as fast as storage row by row (raster) an order is, by the size of the window; the grids grow from left to right, "
    "and random order, the control, was timed on the first alone."
)
HOW = (
    "Of each notebook the newest run on each kind of machine. `hilbert run -f notebooks/configs/h200 --out "
    "reports/h200` makes all those of one H200 again, `hilbert run NAME -f notebooks/configs/MACHINE --out "
    "reports/MACHINE` one of them, and `hilbert report reports` this page."
)


def write_evidence(folder: Path) -> list[Path]:
    """Write what `evidence_pages` gives.

    Args:
        folder: of the machines' folders.

    Returns:
        The files that were written.
    """
    return [write_whole(path, text) for path, text in evidence_pages(folder).items()]


def evidence_pages(folder: Path) -> dict[Path, str]:
    """What the index, its twin in Markdown and the README above the folder must hold, by the records there are now.

    Runs in other folders than those of committed machines, as local ones, are left out.

    Args:
        folder: of the machines' folders.

    Returns:
        Path to text: FOLDER/index.html, FOLDER/README.md and, where it has a block for it, README.md beside FOLDER.
        Empty where FOLDER holds no such machine.

    Raises:
        ValueError: if the records no longer bear out a sentence of the answer, or a figure is missing.
    """
    machines = [each for each in sorted(folder.glob(MACHINES)) if any(map(point_folders, each.glob("*/")))]
    if not machines:
        return {}
    telling = [each for each in machines if each.match(TELLING)]
    others = [each for each in machines if each not in telling]
    found = {name: newest_run(name, machines=telling) for name in (KERNELS, GRIDS, RING, CHOICE)}
    waiting = [name for name, run in found.items() if run is None]
    told = None if waiting else _told(found, newest_run(KERNELS, machines=others), folder)
    content = {
        "told": told,
        "waiting": waiting,
        "notebooks": _notebooks(folder, machines),
        "machines": [machine.name for machine in machines],
        "others": _others(folder, machines),
        "history": HISTORY if (folder / HISTORY).exists() else None,
        "how": HOW,
        "how_html": markdown_html(HOW),
    }
    table = render(NUMBERS_MARKDOWN, told=told, base="") if told else ""
    pages = {folder / INDEX: render(EVIDENCE, **content)}
    pages[folder / README] = render(EVIDENCE_MARKDOWN, table=table, **content) + "\n"
    above = folder.absolute().parent / README
    text = above.read_text(encoding="utf-8") if above.exists() else ""
    if told and BLOCK.search(text):
        base = f"{folder.absolute().name}/"
        table = render(NUMBERS_MARKDOWN, told=told, base=base)
        block = render(README_MARKDOWN, told=told, table=table, base=base)
        pages[above] = BLOCK.sub(lambda match: f"{match[1]}{block}\n{match[2]}", text)
    return pages


def _told(found: dict[str, Path], elsewhere: Path | None, folder: Path) -> dict:
    """The answer, its figure and the numbers, with paths from the folder; the kernels' of another GPU too."""
    records = {name: read_records(run / RESULTS) for name, run in found.items()}
    try:
        answer = short_answer(records[KERNELS], records[GRIDS], records[CHOICE])
        numbers = _placed(key_numbers(records[KERNELS], records[GRIDS], records[RING]), found, folder)
        if elsewhere:
            numbers += _placed(kernel_numbers(read_records(elsewhere / RESULTS)), {KERNELS: elsewhere}, folder)
    except (LookupError, AttributeError, ValueError) as error:
        runs = ", ".join(run.relative_to(folder).as_posix() for run in (*found.values(), elsewhere) if run)
        raise ValueError(f"the newest records lack what is told of them ({error}): {runs}") from error
    if not answer.premise.all():
        raise ValueError(f"the records no longer bear this out: {' '.join(answer.answer[~answer.premise])}")
    at = {name: run.relative_to(folder).as_posix() for name, run in found.items()}
    # There is one for each size of a block; that with the best of the answer is shown.
    gains = grid_gains(records[GRIDS])
    block = gains.block_size[gains[gains.order == "hilbert"].value.idxmax()]
    for run, figure in ((found[GRIDS], f"speedups_{block}.png"), (found[KERNELS], "speeds.png")):
        if not (run / figure).exists():
            raise ValueError(f"{run} holds no {figure}; hilbert report {run.parent} --redraw draws what has a table")
    return {
        "answer": [{"text": row.answer, "notebooks": row.rests_on.split(", ")} for row in answer.itertuples()],
        "numbers": numbers,
        "figure": f"{at[GRIDS]}/speedups_{block}.png",
        "alt": "Times as fast as storage row by row, of every order on grids",
        "caption": CAPTION.format(block=block),
        "speeds": f"{at[KERNELS]}/speeds.png",
        "speeds_alt": "Speed of the fused kernel beside the others that notebook 06 timed",
    }


def _placed(numbers: pd.DataFrame, runs: dict[str, Path], folder: Path) -> list[dict]:
    """Each number with the hardware and the folder of the run that it is from."""
    on = {name: say_hardware(run_environment(run)) for name, run in runs.items()}
    at = {name: run.relative_to(folder).as_posix() for name, run in runs.items()}
    return [{**row, "on": on[row["record"]], "run": at[row["record"]]} for row in numbers.to_dict("records")]


def _notebooks(folder: Path, machines: list[Path]) -> list[dict]:
    """Each notebook in reading order, with its newest finished run on each machine: of `TELLING`, then of others."""
    points = [point for machine in machines for run in machine.glob("*/") for point in point_folders(run)]
    ended = sorted(((read_manifest(point), point) for point in points), key=lambda run: run[0]["end"])
    finished = [(manifest, point) for manifest, point in ended if manifest["status"] == "ok"]
    newest = {(point.parents[1], manifest["notebook"]): (manifest, point) for manifest, point in finished}
    runs: dict[str, list[tuple[dict, Path]]] = {}

    def rank(run: tuple[dict, Path]) -> tuple[bool, str]:
        return run[1].parents[1].match(TELLING), run[0]["end"]

    for manifest, point in sorted(newest.values(), key=rank, reverse=True):
        runs.setdefault(manifest["notebook"], []).append((manifest, point))

    def path_of(ending: str, name: str) -> str | None:
        return f"{runs[name][0][1].relative_to(folder).as_posix()}/{name}.{ending}" if name in runs else None

    in_html, in_markdown = partial(path_of, "html"), partial(path_of, "ipynb")
    return [
        {
            "name": name,
            "title": said["title"],
            "question": _linked(said["question"], in_markdown),
            "answer": _linked(said["answer"], in_markdown),
            "question_html": markdown_html(said["question"], in_html),
            "answer_html": markdown_html(said["answer"], in_html),
            "runs": [_run(*run, folder, said) for run in runs[name]],
        }
        for name in sorted(runs)
        for said in [_said(folder.parent / "notebooks" / f"{name}.ipynb", runs[name][0][0])]
    ]


def _others(folder: Path, machines: list[Path]) -> list[str]:
    """Folders of what no notebook recorded: claims measured again, benchmarks of the command line."""
    points = {path.parent for machine in machines for path in machine.glob("*/*/*.jsonl")}
    return sorted(point.relative_to(folder).as_posix() for point in points if not (point / MANIFEST).exists())


def _said(notebook: Path, newest: dict) -> dict:
    # The notebook beside the reports knows what its newest run showed; that run, what the ones before it did.
    return vars(read_notebook(notebook)) if notebook.exists() else newest


def _run(manifest: dict, point: Path, folder: Path, said: dict) -> dict:
    facts, at = manifest["environment"], point.relative_to(folder).as_posix()
    clean = facts["commit"] and not facts["dirty"]
    return {
        "folder": at,
        "html": f"{at}/{manifest['notebook']}.html",
        "ipynb": f"{at}/{manifest['notebook']}.ipynb",
        "all": f"{point.parent.relative_to(folder).as_posix()}/{INDEX}#{point.name}",
        "hardware": say_hardware(facts),
        "end": say_moment(manifest["end"]),
        "code": f"commit {facts['commit'][:7]}" if clean else f"library {facts['code_hash']}",
        # What it concludes may have been written before it ran, or of records since replaced.
        "is_revised": manifest["answer"] != said["answer"],
    }


def _linked(text: str, path_of: Callable[[str], str | None]) -> str:
    """Markdown whose links to notebooks lead to their runs; those to notebooks without one become plain text."""

    def lead(match: re.Match) -> str:
        path = path_of(match[2])
        return f"[{match[1]}]({path})" if path else match[1]

    return NOTEBOOK_LINK.sub(lead, text)
