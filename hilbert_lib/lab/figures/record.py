"""Save a figure with the data it was drawn from, and draw it again from that data alone."""

import importlib
import json
import warnings
from base64 import b64encode
from collections import defaultdict
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

# Okabe and Ito's palette: told apart by colour-blind readers, and by lightness in grey print.
COLOURS = defaultdict(lambda: "#666666")  # an order or another's way that is not named yet
COLOURS |= {
    "hilbert": "#D55E00",
    "morton": "#E69F00",
    "snake": "#009E73",
    "raster": "#56B4E9",
    "linear": "#56B4E9",
    "tile": "#CC79A7",
    "residue": "#0072B2",
    "random": "#000000",
    "hilbert per segment": "#882255",
    "no table": "#999999",
    "torchscale": "#CC79A7",
    "fkodom": "#000000",
}
MARKERS = defaultdict(lambda: "*")
MARKERS |= {
    "hilbert": "o",
    "morton": "s",
    "snake": "^",
    "raster": "v",
    "linear": "v",
    "tile": "D",
    "residue": "P",
    "random": "x",
    "hilbert per segment": "h",
    "no table": "*",
    "torchscale": "D",
    "fkodom": "x",
}

STYLE = {
    "figure.dpi": 90,  # in a notebook, which stays small; the files beside it are finer
    "savefig.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "svg.hashsalt": "hilbert",  # the same figure gives the same SVG
    "svg.fonttype": "none",
}


def show(draw: Callable[..., Figure], data: pd.DataFrame, *, output_dir: str = "", name: str = "", **options) -> Figure:
    """Draw a table and, where a folder is given, keep figure and table side by side.

    Args:
        draw: a function of `hilbert_lib.lab.figures` that takes the table and the options.
        data: the table; its columns are those that `draw` names.
        output_dir: folder for NAME.png, NAME.svg, NAME.csv and NAME.json (what `redraw` needs); empty
            writes nothing.
        name: file name without ending; by default the name of `draw`.
        **options: passed to `draw`; plain values that JSON can hold.

    Returns:
        The figure, which a notebook shows as the value of its cell.

    Raises:
        ValueError: if `draw` does not live in `hilbert_lib.lab.figures` (it could not be found again).
    """
    if not draw.__module__.startswith("hilbert_lib.lab.figures"):
        raise ValueError(f"draw must be a function of hilbert_lib.lab.figures, got {draw.__module__}.{draw.__name__}")
    recipe = {"draw": f"{draw.__module__}:{draw.__name__}", "options": options}
    # Before any file is written; a number of numpy or torch becomes Python's.
    recipe = json.dumps(recipe, indent=1, default=lambda x: x.item()) + "\n"
    with matplotlib.rc_context(STYLE):
        figure = _laid_out(draw(data, **options))
        if shell := get_ipython():  # without pyplot nobody else tells the notebook how to show a figure
            shell.display_formatter.formatters["image/png"].for_type(Figure, _shown)
        if output_dir:
            stem = Path(output_dir) / (name or draw.__name__)
            stem.parent.mkdir(parents=True, exist_ok=True)
            data.to_csv(stem.with_suffix(".csv"), index=False)
            stem.with_suffix(".json").write_text(recipe)
            _save(figure, stem)
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
    return b64encode(in_256_colours(print_figure(figure, "png", bbox_inches=_box(figure)))).decode()


def in_256_colours(png: bytes) -> bytes:
    """A figure's PNG in 256 colours: a third of the bytes, each colour off by some 20 of 255 at most.

    Args:
        png: what a PNG file holds, without transparency.

    Returns:
        Likewise.

    >>> red = BytesIO()
    >>> Image.new("RGB", (2, 2), "red").save(red, "PNG")
    >>> Image.open(BytesIO(in_256_colours(red.getvalue()))).mode
    'P'
    """
    with Image.open(BytesIO(png)) as image, BytesIO() as small:
        # Others spend the colours on the shades that are the most frequent, and miss those of thin lines.
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "PNG", optimize=True)
        return small.getvalue()


def _save(figure: Figure, stem: Path) -> None:
    box = _box(figure)
    with BytesIO() as png:
        figure.savefig(png, format="png", bbox_inches=box)
        stem.with_suffix(".png").write_bytes(in_256_colours(png.getvalue()))
    figure.savefig(stem.with_suffix(".svg"), bbox_inches=box, metadata={"Date": None})


def redraw(folder: str | Path) -> list[Path]:
    """Draw every figure below a folder again from its CSV and JSON, without running a notebook.

    JSON that holds no recipe is passed over; a recipe that cannot be drawn is named in a warning, and the others are
    drawn.

    Args:
        folder: a report's folder.

    Returns:
        The PNG files that were written anew.
    """
    written = []
    for recipe_file in sorted(Path(folder).rglob("*.json")):
        try:
            recipe = json.loads(recipe_file.read_text())
            if isinstance(recipe, dict) and "draw" in recipe:
                _redraw(recipe, recipe_file)
                written.append(recipe_file.with_suffix(".png"))
        except Exception as error:
            warnings.warn(f"{recipe_file} was not redrawn: {error!r}", stacklevel=2)
    return written


def _redraw(recipe: dict, recipe_file: Path) -> None:
    module, function = recipe["draw"].split(":")
    if not module.startswith("hilbert_lib.lab.figures"):
        raise ValueError(f"draw must be a function of hilbert_lib.lab.figures, got {recipe['draw']}")
    draw = getattr(importlib.import_module(module), function)
    with matplotlib.rc_context(STYLE):
        figure = _laid_out(draw(pd.read_csv(recipe_file.with_suffix(".csv")), **recipe["options"]))
        _save(figure, recipe_file.with_suffix(""))
