"""The map of where an order pays, in panels of coloured cells: counted and timed gains, told apart."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

COLUMNS = 3  # panels side by side
LARGEST = 4  # the gain, or its inverse, of the darkest colour
CELL_WIDTH, CELL_HEIGHT = 0.42, 0.34  # inches


def draw_order_map(data: pd.DataFrame, *, title: str) -> Figure:
    """A panel for each value of `panel`, a line of cells for each `row`, a column for each `window`.

    data: panel, row, window, counted and timed (NaN where a cell has none). Above 1, in blue, the order pays. A cell
    that was timed has a frame, its time's gain in bold letters and colour, and below it what was counted.
    """
    panels = list(dict.fromkeys(data.panel))
    columns = min(COLUMNS, len(panels))
    shapes = data.groupby("panel")[["row", "window"]].nunique().loc[panels]
    place = np.arange(len(panels))
    heights, widths = shapes.row.groupby(place // columns).max(), shapes.window.groupby(place % columns).max()
    size = (CELL_WIDTH * widths.sum() + 1.5 * columns, CELL_HEIGHT * heights.sum() + 1.0 * len(heights) + 1.6)
    figure = Figure(figsize=size, layout="constrained")
    ratios = {"width_ratios": widths.tolist(), "height_ratios": heights.tolist()}
    grid = figure.subplots(len(heights), columns, squeeze=False, **ratios)
    norm = LogNorm(1 / LARGEST, LARGEST, clip=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        image = _draw_panel(axes, data[data.panel == panel], norm)
        axes.set_title(panel, fontsize=9, loc="left")
    bar = figure.colorbar(image, ax=grid, shrink=0.5, aspect=30, ticks=[0.25, 0.5, 1, 2, 4], format="{x:g}")
    bar.ax.minorticks_off()
    bar.set_label("rows over the order: tiles where counted, time where timed\nabove 1 the order pays")
    handles = [
        Patch(fc="white", ec="0.8", label="counted"),
        Patch(fc="white", ec="black", lw=1.6, label="timed: bold, with the count below"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_panel(axes: Axes, part: pd.DataFrame, norm: LogNorm):
    rows, windows = list(dict.fromkeys(part.row)), sorted(part.window.unique())
    values = part.assign(value=part.timed.fillna(part.counted)).pivot(index="row", columns="window", values="value")
    image = axes.imshow(values.reindex(rows), cmap="RdBu", norm=norm, aspect="auto")
    for cell in part.to_dict("records"):
        along, below = windows.index(cell["window"]), rows.index(cell["row"])
        is_timed = not np.isnan(cell["timed"])
        value = cell["timed"] if is_timed else cell["counted"]
        colour = "white" if abs(np.log(value)) > 0.65 * np.log(LARGEST) else "black"
        look = {"ha": "center", "color": colour}
        if not is_timed:
            axes.text(along, below, f"{value:.2f}", va="center", fontsize=7.5, **look)
            continue
        axes.text(along, below - 0.16, f"{value:.2f}", va="center", fontsize=7.5, weight="bold", **look)
        if not np.isnan(cell["counted"]):
            axes.text(along, below + 0.28, f"{cell['counted']:.2f}", va="center", fontsize=5.5, **look)
        axes.add_patch(Rectangle((along - 0.46, below - 0.45), 0.92, 0.9, fill=False, ec="black", lw=1.4))
    axes.set_xticks(range(len(windows)), windows, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("window (cells along an axis)", fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image
