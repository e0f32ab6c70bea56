"""Save a figure with the data it was drawn from, and draw it again from that data alone."""

import gzip
import importlib
import json
import math
import warnings
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import matplotlib
import pandas as pd
from IPython import get_ipython
from IPython.core.pylabtools import print_figure
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from PIL import Image

from hilbert_lib.files import json_text, write_whole

FIGURES = "figures.json.gz"  # of a folder: what each of its figures is drawn from
ROOM = "hilbert_lib.lab.figures"

AS_IT_IS = {"compress_level": 0}  # of a picture that is read at once, and compressed in its few colours
STYLE = {
    "figure.dpi": 90,  # in a notebook, which stays small; the files beside it are finer
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "legend.frameon": False,
}


def show(draw: Callable[..., Figure], data: pd.DataFrame, *, output_dir: str = "", name: str = "", **options) -> Figure:
    """Draw a table and, where a folder is given, keep there NAME.png, NAME.csv and what `redraw` needs.

    `draw` is a function of `hilbert_lib.lab.figures` (else a ValueError: it could not be found again), whose name is
    the figure's by default; `options` go to it, and are values that JSON can hold.
    """
    source = f"{draw.__module__}:{draw.__name__}"
    _check_source(source)
    entry = {"draw": source, "options": options, "table": _columns(data)}
    entry = json.loads(json.dumps(entry, default=lambda x: x.item()))  # a number of numpy or torch becomes Python's
    if shell := get_ipython():  # without pyplot nobody else tells the notebook how to show a figure
        shell.display_formatter.formatters["image/png"].for_type(Figure, _shown)
    if not output_dir:
        return _drawn(draw, data, options)
    folder, name = Path(output_dir), name or draw.__name__
    folder.mkdir(parents=True, exist_ok=True)
    figure = _drawn(draw, data, options, folder / name)
    write_figures(folder, {**read_figures(folder), name: entry})
    return figure


def redraw(folder: str | Path) -> list[Path]:
    """Draw every figure below a folder again, PNG and CSV, without running a notebook; gives the PNG files.

    A figure that cannot be drawn is named in a warning, and the others are drawn.
    """
    written = []
    for path in sorted(Path(folder).rglob(FIGURES)):
        for name, figure in read_figures(path.parent).items():
            try:
                _check_source(figure["draw"])
                module, function = figure["draw"].split(":")
                draw = getattr(importlib.import_module(module), function)
                _drawn(draw, _table(figure["table"]), figure["options"], path.with_name(name))
                written.append(path.with_name(f"{name}.png"))
            except Exception as error:
                warnings.warn(f"{name} of {path} was not redrawn: {error!r}", stacklevel=2)
    return written


def write_figures(folder: Path, figures: dict[str, dict]) -> None:
    """Write what each figure of a folder is drawn from, a table that several share once."""
    names, kept = {}, {}
    for name, figure in figures.items():
        first = names.setdefault(json.dumps(figure["table"]), name)
        kept[name] = figure if first == name else {**figure, "table": first}
    text = json_text(kept, separators=(",", ":"))
    write_whole(folder / FIGURES, gzip.compress(text.encode(), mtime=0))


def read_figures(folder: str | Path) -> dict[str, dict]:
    """Sources of the figures of a folder: name to `draw`, `options` and `table`, its columns by name."""
    path = Path(folder) / FIGURES
    figures = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    for figure in figures.values():
        if isinstance(figure["table"], str):  # of another figure
            figure["table"] = figures[figure["table"]]["table"]
    return figures


def _columns(table: pd.DataFrame) -> dict[str, list]:
    values = {str(name): table[name].tolist() for name in table}
    return {name: [None if x is pd.NA or x != x else x for x in column] for name, column in values.items()}  # NaN


def _table(columns: dict[str, list]) -> pd.DataFrame:
    return pd.DataFrame({name: [math.nan if x is None else x for x in values] for name, values in columns.items()})


def _check_source(source: str) -> None:
    if not source.startswith(ROOM):
        raise ValueError(f"draw must be a function of {ROOM}, got {source}")


def _drawn(draw: Callable[..., Figure], table: pd.DataFrame, options: dict, stem: Path | None = None) -> Figure:
    """The figure, laid out; with a stem, its picture and its table are written there."""
    with matplotlib.rc_context(STYLE):
        figure = _laid_out(draw(table, **options))
        if stem:
            _save(figure, stem)
            table.to_csv(stem.parent / f"{stem.name}.csv", index=False)
    return figure


def _laid_out(figure: Figure) -> Figure:
    # Once, instead of anew for each of the pictures made of it.
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)
    return figure


def _box(figure: Figure) -> Bbox:
    # What is drawn; asked for "tight", each picture would be drawn once more to find it.
    return figure.get_tightbbox().padded(matplotlib.rcParams["savefig.pad_inches"])


def _shown(figure: Figure) -> str:
    png = print_figure(figure, "png", bbox_inches=_box(figure), pil_kwargs=AS_IT_IS)
    return b64encode(in_256_colours(png)).decode()


def _save(figure: Figure, stem: Path) -> None:
    with BytesIO() as png:
        figure.savefig(png, format="png", bbox_inches=_box(figure), pil_kwargs=AS_IT_IS)
        stem.with_name(f"{stem.name}.png").write_bytes(in_256_colours(png.getvalue()))


def in_256_colours(png: bytes) -> bytes:
    """A PNG without transparency in 256 colours: a third of the bytes, each colour off by some 20 of 255 at most."""
    return in_colours(png, 256)


def in_colours(png: bytes, count: int) -> bytes:
    """A PNG without transparency in at most so many colours."""
    with Image.open(BytesIO(png)) as image, BytesIO() as small:
        # Others spend the colours on the shades that are the most frequent, and miss those of thin lines.
        few = image.convert("RGB").quantize(count, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "PNG", optimize=True)
        return small.getvalue()
