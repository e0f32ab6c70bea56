"""A small grammar of figures: lines, bars, points and heat maps of one table, whose axes the notebook's cell names.

`x` and `y` are columns, `by` gives each of its values a colour and a marker, `across` and `down` a panel, `low` and
`high` an interval. All options are plain values, so that a figure can be drawn again from its table (`record.redraw`).
What all figures share stands at the end: panels, legends, looks, and tokens in few letters.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator

from hilbert_lib.attention.backends.registry import BACKENDS

# Okabe and Ito first: told apart by colour-blind readers, and by lightness in grey print. Each has a marker and a
# hatch: told apart without colour too.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#882255", "#44AA99", "#999999")
SHAPES, HATCHES = "os^DvPxh<*", ("", "//", "..", "\\\\", "xx", "--", "", "oo", "**", "++")
LOOKS = {
    "hilbert": ("#D55E00", "o"),
    "morton": ("#E69F00", "s"),
    "snake": ("#009E73", "^"),
    "raster": ("#56B4E9", "v"),
    "linear": ("#56B4E9", "v"),
    "tile": ("#CC79A7", "D"),
    "residue": ("#0072B2", "P"),
    "random": ("#000000", "x"),
    "hilbert per segment": ("#882255", "h"),
    "no table": ("#999999", "*"),
    "torchscale": ("#CC79A7", "D"),
    "fkodom": ("#000000", "x"),
}
_NAMES = sorted(BACKENDS, key="triton".__eq__)  # the last one, so that the others keep the markers of older figures
LOOKS |= {name: (BACKENDS[name].colour, SHAPES[n % len(SHAPES)]) for n, name in enumerate(_NAMES)}


def lines(data: pd.DataFrame, **axes) -> Figure:
    """A line for each value of `by`, through the points at every `x`; options as of `panels`."""
    return panels(data, "line", **axes)


def points(data: pd.DataFrame, **axes) -> Figure:
    """A marker for each row, where y is no NaN; those of one `x` that is a name stand side by side."""
    return panels(data, "point", **axes)


def bars(data: pd.DataFrame, *, x: str, **axes) -> Figure:
    """A bar for each row: a place on the axis for each `x`, taken as a name, in it one bar for each value of `by`."""
    return panels(data.assign(**{x: data[x].map(str)}), "bar", x=x, **axes)


def panels(
    data: pd.DataFrame,
    kind: str,
    *,
    x: str,
    y: str,
    title: str,
    by: str = "",
    across: str = "",
    down: str = "",
    low: str = "",
    high: str = "",
    expected: str = "",
    xlabel: str = "",
    ylabel: str = "",
    logx: int = 0,
    logy: int = 0,
    level: float | None = None,
    columns: int = 4,
    size: Sequence[float] = (4.2, 3.2),
    share_y: bool = True,
    from_zero: bool = False,
    apart: bool = False,
    write: str = "",
) -> Figure:
    """A grid of panels: a column for each value of `across` (wrapped after `columns`), a row for each of `down`.

    Args:
        data: the table. kind: "line", "point" or "bar".
        x, y: columns. title: the finding, and where it was measured.
        by, across, down: columns, or "" for one colour and one panel. low, high: columns of an interval of y.
        expected: a column through whose values a line is drawn.
        xlabel, ylabel: with units; by default the columns' names.
        logx, logy: base of a logarithmic axis; 0 for a linear one.
        level: where a line of reference is drawn.
        size: width and height of a panel [inches]. share_y: one scale for all panels. from_zero: y begins at 0.
        apart: points and lines of one x stand side by side. write: format of a number over each bar.

    Raises:
        ValueError: for a column that the table lacks, or an empty table.
    """
    if missing := {x, y, by, across, down, low, high, expected} - {"", *data}:
        raise ValueError(f"the table must have the columns {', '.join(sorted(missing))}; it has {', '.join(data)}")
    if data.empty:
        raise ValueError(f"the table must have rows to draw, got none: {title}")
    parts = list(_parts(data, down, across))
    columns = data[across].nunique() if across and down else columns
    figure, grid = panel_grid(len(parts), columns, size, (0, 0.9), sharey=share_y)
    names = list(dict.fromkeys(data[by])) if by else [""]
    looks = styles(names)
    for axes, (heading, part) in zip(grid, parts, strict=True):
        places = _places(axes, data[x] if share_y else part[x], logx)
        for place, name in enumerate(names):
            rows, shift = part[part[by] == name] if by else part, place - (len(names) - 1) / 2
            if places is None:
                rows = rows.sort_values(x)
                where = rows[x] * 2 ** (0.08 * shift) if apart else rows[x]
            else:
                middle = rows[x].map(places).astype(float)  # of no rows pandas makes strings
                where = middle + shift * 0.85 / len(names) * (apart or kind != "line")
            spread = [rows[y] - rows[low], rows[high] - rows[y]] if low else None
            look = {"color": looks[name]["color"], "label": str(name)}
            if expected and kind == "bar":  # behind the bars: across them it would strike them out
                axes.plot(where, rows[expected], color="black", lw=1.2, ls=":", zorder=0.5)
            elif expected:
                axes.plot(where, rows[expected], color=look["color"], lw=1.2)
            if kind == "bar":
                look |= {"width": 0.85 / len(names), "hatch": looks[name]["hatch"], "edgecolor": "white"}
                drawn = axes.bar(where, rows[y], yerr=spread, ecolor="black", error_kw={"lw": 1}, **look)
                if write:
                    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # lines pass behind the numbers
                    axes.bar_label(drawn, fmt=partial(_written, write), padding=2, fontsize=8, bbox=paper)
                    axes.margins(y=0.15)  # room for the numbers below the panel's title
            else:
                look |= {"marker": looks[name]["marker"], "markersize": 5, "fillstyle": "none"}
                axes.errorbar(where, rows[y], spread, ls="-" if kind == "line" else "", capsize=2, lw=1.2, **look)
        if level is not None:
            axes.axhline(level, color="black", lw=0.8, ls="--")
        axes.set(title=heading, xlabel=xlabel or x)
        axes.grid(axis="both" if places is None else "y", color="#DDDDDD")
        axes.set_axisbelow(True)
        if axes.get_subplotspec().is_first_col() or not share_y:
            axes.set_ylabel(ylabel or y)
        if logy:
            axes.set_yscale("log", base=logy)
            _plain_ticks(axes)
    for axes in grid if from_zero else ():  # once all are drawn: panels that share a scale no longer widen it then
        axes.set_ylim(bottom=0)
    if len(names) > 1:
        entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid)
        handles = {label: handle for of_panel in entries for handle, label in of_panel}
        columns = min(len(handles), 2 + 2 * grid[0].get_gridspec().ncols)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns)
    figure.suptitle(title)
    return figure


def heat(
    data: pd.DataFrame, *, row: str, column: str, value: str, title: str, across: str = "", frame: str = ""
) -> Figure:
    """Numbers in coloured cells, a row of data each, red above 1 and blue below it, the darkest at 8 and 1/8.

    row, column, value: columns of data. across: column that has a panel a value. frame: column, true for framed cells.
    """
    parts, norm = list(_parts(data, across)), LogNorm(1 / 8, 8, clip=True)
    names, rows = list(dict.fromkeys(data[column])), max(part[row].nunique() for _, part in parts)
    figure = Figure(figsize=(2.4 + 0.8 * len(names) * len(parts), 1.8 + 0.3 * rows), layout="constrained")
    for axes, (heading, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        works = list(dict.fromkeys(part[row]))
        table = part.pivot(index=row, columns=column, values=value).reindex(works, columns=names).astype(float)
        axes.imshow(table, cmap="RdBu_r", norm=norm, aspect="auto")
        for cell in part[part[value].notna()].to_dict("records"):
            along, below = names.index(cell[column]), works.index(cell[row])
            colour = "white" if abs(np.log(cell[value])) > 0.6 * np.log(8) else "black"
            axes.text(along, below, f"{cell[value]:.2f}", ha="center", va="center", fontsize=8, color=colour)
            if frame and cell[frame]:
                axes.add_patch(Rectangle((along - 0.47, below - 0.46), 0.94, 0.92, fill=False, ec="black", lw=1.8))
        axes.set_xticks(range(len(names)), names, rotation=45, ha="left")
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(works)), works if axes.get_subplotspec().is_first_col() else [""] * len(works))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(heading)
    figure.suptitle(title)
    return figure


def panel_grid(
    count: int, columns: int, size: Sequence[float], margins: tuple[float, float], **subplots
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, at most so many in a row, the last row as long as they reach.

    size: width and height that each panel adds to the figure, margins: those beside the panels [inches]. subplots: as
    of `Figure.subplots`.

    >>> figure, panels = panel_grid(5, 3, (2, 3), (1, 0))
    >>> figure.get_size_inches().tolist(), len(figure.axes), len(panels)
    ([7.0, 6.0], 5, 5)
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figsize = max(6, columns * size[0] + margins[0]), rows * size[1] + margins[1]  # wide enough for a title
    figure = Figure(figsize=figsize, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def by_hand(width: float, height: float, **margins: float) -> Figure:
    """A figure under widgets, placed by hand: a layout engine would double the time that a slider waits."""
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(**margins)
    return figure


def key_of(parts: Iterable[tuple[str, str]]) -> list[Patch]:
    """Labels of a legend with (colour, label) each, but those without a label."""
    return [Patch(fc=colour, ec="0.5", label=label) for colour, label in parts if label]


def short(number: float) -> str:
    """A number of tokens as K, M and G of 2^10, 2^20 and 2^30, where it is whole.

    >>> short(3 * 2**20)
    '3M'
    """
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number / 2**power:.0f}{unit}"
    return f"{number:.9g}" if isinstance(number, float) else str(number)


def _written(form: str, number: float) -> str:
    # A number over a bar: in its format, and without an exponent.
    text = form.format(number)
    return text if "e+" not in text else f"{number:,.0f}"


def styles(names: Sequence[object]) -> dict[object, dict[str, str]]:
    """Colour, marker and hatch of each name: an order or a backend has the same in every figure."""
    fixed_colours = {LOOKS[name][0] for name in names if name in LOOKS}
    pairs = list(zip(PALETTE, SHAPES, strict=True))
    spare = cycle([look for look in pairs if look[0] not in fixed_colours] or pairs)
    looks = {}
    for name, hatch in zip(names, cycle(HATCHES)):
        colour, marker = LOOKS.get(name) or next(spare)
        looks[name] = {"color": colour, "marker": marker, "hatch": hatch}
    return looks


def _parts(data: pd.DataFrame, *columns: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each combination of the columns' values, and what they have in common."""
    columns = [name for name in columns if name]
    for values in product(*(dict.fromkeys(data[name]) for name in columns)):
        part, labels = data, []
        for name, value in zip(columns, values, strict=True):
            part = part[part[name] == value]
            labels.append(value if isinstance(value, str) else f"{name.replace('_', ' ')} {short(value)}")
        yield ", ".join(labels), part


def _places(axes: Axes, values: pd.Series, base: int) -> dict[object, int] | None:
    # Names have places side by side; numbers stand where they are.
    ticks = list(dict.fromkeys(values))
    if values.dtype.kind not in "iuf":
        axes.set_xticks(range(len(ticks)), ticks)
        return {tick: place for place, tick in enumerate(ticks)}
    if base:
        axes.set_xscale("log", base=base)
    ticks = sorted(ticks)
    apart = np.diff(np.log(ticks) / 4 if base else ticks) / (1 if base else (ticks[-1] - ticks[0]) or 1)
    if len(ticks) <= 12 and (apart > 0.04).all():  # otherwise their numbers would overlap
        axes.set_xticks(ticks, map(short, ticks))
        axes.xaxis.minorticks_off()
    return None


def _plain_ticks(axes: Axes) -> None:
    # Few ticks of a logarithmic axis, written out; where none of these steps is in sight, matplotlib takes others.
    low, high = axes.get_ylim()
    steps = (1, 1.5, 2, 3, 4, 6, 8) if high < 8 * low else (1, 2, 5) if high < 200 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(10, steps))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
