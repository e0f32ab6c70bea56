"""A small grammar of figures: lines, bars, points and heat maps of one table, whose axes the notebook's cell names.

`x` and `y` are columns, `by` gives each of its values a colour and a marker, `across` and `down` a panel, `low` and
`high` an interval. All options are plain values, so that a figure can be drawn again from its table (`record.redraw`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.lab.figures.axes import plain_ticks, short
from hilbert_lib.lab.figures.record import COLOURS, MARKERS

# Okabe and Ito's colours first, a marker and a hatch each: told apart without colour too.
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#882255", "#44AA99", "#999999")
SHAPES, HATCHES = "os^DvPxh<*", ("", "//", "..", "\\\\", "xx", "--", "", "oo", "**", "++")
GREY = "#DDDDDD"


def lines(data: pd.DataFrame, *, x: str, y: str, **axes) -> Figure:
    """A line for each value of `by`, through the points at every `x`.

    Args:
        data: one row a point.
        x, y: columns of numbers.
        **axes: as `panels` takes them.

    >>> table = pd.DataFrame({"tokens": [1024, 2048], "ms": [1.0, 2.0], "backend": "eager"})
    >>> len(lines(table, x="tokens", y="ms", by="backend", title="Twice the tokens, twice the time").axes)
    1
    """
    return panels(data, _points, x=x, y=y, line="-", **axes)


def points(data: pd.DataFrame, *, x: str, y: str, **axes) -> Figure:
    """A marker for each row; those of one `x`, where that is a name or `apart` is set, stand side by side.

    Args:
        data: one row a point; where y is NaN, only what was expected is drawn.
        x, y: columns.
        **axes: as `panels` takes them; `expected` is a column through whose values a line is drawn.
    """
    return panels(data, _points, x=x, y=y, line="", **axes)


def bars(data: pd.DataFrame, *, x: str, y: str, **axes) -> Figure:
    """A bar for each row: a place on the axis for each `x`, in it one bar for each value of `by`.

    Args:
        data: one row a bar.
        x, y: columns; x is taken as names.
        **axes: as `panels` takes them; `write` is the format of a number over each bar.
    """
    return panels(data.assign(**{x: data[x].map(str)}), _bars, x=x, y=y, **axes)


def panels(
    data: pd.DataFrame,
    draw: Callable,
    *,
    x: str,
    y: str,
    title: str,
    by: str = "",
    across: str = "",
    down: str = "",
    low: str = "",
    high: str = "",
    xlabel: str = "",
    ylabel: str = "",
    logx: int = 0,
    logy: int = 0,
    level: float | None = None,
    columns: int = 4,
    size: Sequence[float] = (4.2, 3.2),
    share_y: bool = True,
    from_zero: bool = False,
    **marks,
) -> Figure:
    """A grid of panels: a column for each value of `across` (wrapped after `columns`), a row for each of `down`.

    Args:
        data: the table. draw: what puts one panel's rows into its axes.
        x, y: columns. title: the finding, and where it was measured.
        by, across, down: columns, or "" for one colour and one panel. low, high: columns of an interval of y.
        xlabel, ylabel: with units; by default the columns' names.
        logx, logy: base of a logarithmic axis; 0 for a linear one.
        level: where a line of reference is drawn.
        size: width and height of a panel [inches]. share_y: one scale for all panels. from_zero: y begins at 0.
        **marks: of the kind: `apart`, `expected`, `write`.

    Raises:
        ValueError: for a column that the table lacks, or an empty table.
    """
    if missing := {name for name in (x, y, by, across, down, low, high, marks.get("expected")) if name} - set(data):
        raise ValueError(f"the table must have the columns {', '.join(sorted(missing))}; it has {', '.join(data)}")
    if data.empty:
        raise ValueError(f"the table must have rows to draw, got none: {title}")
    parts = list(_parts(data, across, down))
    across_count = len(set(data[across])) if across and down else min(columns, len(parts))
    rows = -(-len(parts) // across_count)
    figure = Figure(figsize=(max(6, across_count * size[0]), rows * size[1] + 0.9), layout="constrained")
    grid = list(figure.subplots(rows, across_count, squeeze=False, sharey=share_y).flat)
    names = list(dict.fromkeys(data[by])) if by else [""]
    looks = styles(names)
    for axes, (heading, part) in zip(grid, parts, strict=False):
        at = _places(axes, data[x] if share_y else part[x], logx)
        for place, name in enumerate(names):
            own = part[part[by] == name] if by else part
            if len(own):
                shift = place - (len(names) - 1) / 2
                draw(axes, own, at, shift, len(names), (x, y, low, high), {**looks[name], "label": str(name)}, **marks)
        if level is not None:
            axes.axhline(level, color="black", lw=0.8, ls="--")
        axes.set(title=heading, xlabel=xlabel or x)
        axes.grid(axis="y" if isinstance(at, dict) else "both", color=GREY)
        axes.set_axisbelow(True)
        if axes.get_subplotspec().is_first_col() or not share_y:
            axes.set_ylabel(ylabel or y)
        if logy:
            axes.set_yscale("log", base=logy)
            shown = [name for name in (y, low, high, marks.get("expected")) if name]
            plain_ticks(axes, pd.concat([data[name] for name in shown]).dropna())
    for axes in grid[len(parts) :]:
        axes.remove()
    if from_zero:
        for axes in grid[: len(parts)]:
            axes.set_ylim(bottom=0)
    if by and len(names) > 1:
        entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid)
        handles = {label: handle for of_panel in entries for handle, label in of_panel}
        figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 2 + 2 * across_count)
        )
    figure.suptitle(title)
    return figure


def heat(
    data: pd.DataFrame,
    *,
    row: str,
    column: str,
    value: str,
    title: str,
    across: str = "",
    frame: str = "",
    write: str = "{:.2f}",
    middle: float = 1.0,
    most: float = 8.0,
    blank: str = "",
) -> Figure:
    """Numbers in coloured cells, red above `middle` and blue below it, a panel for each value of `across`.

    Args:
        data: one row a cell.
        row, column: columns whose values are the rows and columns of the map. value: the number in a cell.
        title: the finding. across: column that has a panel a value.
        frame: a column that is true for cells to be framed. write: format of a number.
        middle: the value without colour. most: the colours end at this many times the middle.
        blank: what a cell without a number means, told below the map.

    >>> table = pd.DataFrame({"work": ["a", "a"], "backend": ["x", "y"], "slower": [1.0, 2.0]})
    >>> len(heat(table, row="work", column="backend", value="slower", title="y takes twice as long").axes)
    1
    """
    parts = list(_parts(data, across, ""))
    names, rows = list(dict.fromkeys(data[column])), max(part[row].nunique() for _, part in parts)
    width = 2.4 + 0.8 * len(names) * len(parts)
    figure = Figure(figsize=(width, 1.8 + 0.3 * rows), layout="constrained")
    for axes, (heading, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        works = list(dict.fromkeys(part[row]))
        table = part.pivot(index=row, columns=column, values=value).reindex(works, columns=names).astype(float)
        norm = LogNorm(middle / most, middle * most)
        axes.imshow(table.clip(middle / most, middle * most), cmap="RdBu_r", norm=norm, aspect="auto")
        framed = {(each[row], each[column]) for each in part[part[frame]].to_dict("records")} if frame else ()
        for (down, along), number in np.ndenumerate(table.to_numpy()):
            if np.isfinite(number):
                dark = abs(np.log(number / middle)) > 0.6 * np.log(most)
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else "black"}
                axes.text(along, down, write.format(number), **style)
            if (works[down], names[along]) in framed:
                axes.add_patch(Rectangle((along - 0.47, down - 0.46), 0.94, 0.92, fill=False, ec="black", lw=1.8))
        axes.set_xticks(range(len(names)), names, rotation=45, ha="left")
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(works)), works if axes.get_subplotspec().is_first_col() else [""] * len(works))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(heading)
    figure.suptitle(title)
    if blank:
        figure.supxlabel(f"empty: {blank}", fontsize=9)
    return figure


def styles(names: Sequence[object]) -> dict[object, dict[str, str]]:
    """Colour, marker and hatch of each name: an order or a backend has the same in every figure.

    >>> styles(["hilbert"])["hilbert"]["color"]
    '#D55E00'
    """
    known = {name: (COLOURS[name], MARKERS[name]) for name in COLOURS}
    known |= {name: (backend.colour, SHAPES[n % len(SHAPES)]) for n, (name, backend) in enumerate(BACKENDS.items())}
    taken = {known[name][0] for name in names if name in known}
    every = list(zip(PALETTE, SHAPES, strict=True))
    spare = cycle([look for look in every if look[0] not in taken] or every)
    looks = {}
    for place, name in enumerate(names):
        colour, marker = known.get(name) or next(spare)
        looks[name] = {"color": colour, "marker": marker, "hatch": HATCHES[place % len(HATCHES)]}
    return looks


def _parts(data: pd.DataFrame, across: str, down: str) -> Iterator[tuple[str, pd.DataFrame]]:
    for high in dict.fromkeys(data[down]) if down else [None]:
        of_row = data if high is None else data[data[down] == high]
        values = dict.fromkeys(data[across] if down else of_row[across]) if across else [None]
        for wide in values:
            part = of_row if wide is None else of_row[of_row[across] == wide]
            yield (
                ", ".join(_told(name, each) for name, each in ((down, high), (across, wide)) if each is not None),
                part,
            )


def _told(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    number = short(int(value)) if isinstance(value, int | np.integer) and not isinstance(value, bool) else value
    return f"{name.replace('_', ' ')} {number}"


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
        axes.set_xticks(ticks, [short(int(n)) if n == int(n) else f"{n:g}" for n in ticks])
        axes.xaxis.minorticks_off()
    return None


def _points(
    axes: Axes, rows: pd.DataFrame, at: dict | None, shift: float, count: int, columns: tuple[str, ...], look: dict,
    *, line: str, apart: bool = False, expected: str = "",
) -> None:  # fmt: skip
    x, y, low, high = columns
    look = {name: look[name] for name in ("color", "marker", "label")}
    if at is None:
        rows = rows.sort_values(x)
        where = rows[x] * 2 ** (0.08 * shift) if apart else rows[x]
    else:
        where = rows[x].map(at) + shift * 0.7 / count * (apart or not line)
    if expected:
        axes.plot(where, rows[expected], "-", color=look["color"], lw=1.2)
    spread = [rows[y] - rows[low], rows[high] - rows[y]] if low else None
    axes.errorbar(where, rows[y], spread, ls=line, capsize=2, lw=1.2, markersize=5, fillstyle="none", **look)


def _bars(
    axes: Axes, rows: pd.DataFrame, at: dict, shift: float, count: int, columns: tuple[str, ...], look: dict,
    *, write: str = "",
) -> None:  # fmt: skip
    x, y, low, high = columns
    width = 0.85 / count
    where = rows[x].map(at) + shift * width
    look = {name: look[name] for name in ("color", "hatch", "label")}
    axes.bar(where, rows[y], width, edgecolor="white", **look)
    if low:
        axes.errorbar(where, rows[y], [rows[y] - rows[low], rows[high] - rows[y]], fmt="none", ecolor="black", lw=1)
    for place, value, top in zip(where, rows[y], rows[high or y], strict=True) if write else ():
        axes.annotate(write.format(value), (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
