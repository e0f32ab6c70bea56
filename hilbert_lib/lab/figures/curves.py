"""Figures of curves: their paths in two and three dimensions, the blocks they cut a grid into, and their locality."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from mpl_toolkits.mplot3d.art3d import Line3DCollection
from torch import Tensor

from hilbert_lib.curves.coordinates import curve_coordinates
from hilbert_lib.lab.figures.axes import panel_grid
from hilbert_lib.lab.figures.record import COLOURS, MARKERS

# Dark to bright in grey print; its brightest end, which paper swallows, is left out.
ALONG = ListedColormap(colormaps["plasma"](np.linspace(0, 0.85, 256)))
AXIS_COLUMNS = {2: ["row", "col"], 3: ["a", "b", "c"]}
GRIDS = {  # rows and columns, of n = 2^order; the last has an odd longest side, where one step must be diagonal
    "n x n": lambda n: (n, n),
    "n x 2n": lambda n: (n, 2 * n),
    "n x (n + 1)": lambda n: (n, n + 1),
}


def path_table(panels: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> pd.DataFrame:
    """The table that `draw_paths` and `draw_volumes` take.

    Args:
        panels: for each panel's title, (cells, 2) or (cells, 3) coordinates in the order of the path, and the sides of
            the grid under it.

    Returns:
        Columns: panel; row, col and rows, cols, or a, b, c and their sides. One row for each cell of each path.

    Raises:
        ValueError: if a grid has not 2 or 3 sides, or not as many as the others, or is one cell.

    >>> import torch
    >>> path_table({"a row": (torch.tensor([[0, 0], [0, 1]]), (1, 2))})
       panel  row  col  rows  cols
    0  a row    0    0     1     2
    1  a row    0    1     1     2
    """
    tables = []
    sides = {len(shape) for _, shape in panels.values()}
    if len(sides) > 1 or not sides <= AXIS_COLUMNS.keys():
        raise ValueError(f"panels must all have 2 sides or all 3, got {', '.join(panels)}")
    for panel, (coordinates, shape) in panels.items():
        if len(coordinates) < 2:
            raise ValueError(f"a path must have at least 2 cells, got {panel!r} of {len(coordinates)}")
        columns = AXIS_COLUMNS[len(shape)]
        table = pd.DataFrame(coordinates.cpu().numpy(), columns=columns)
        table.insert(0, "panel", panel)
        for column, side in zip(columns, shape, strict=True):
            table[f"{column}s"] = side
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def draw_paths(data: pd.DataFrame, *, title: str) -> Figure:
    """Paths through grids, side by side: dark at the start, bright at the end.

    A step to a cell that does not touch the last one is a dotted line, a cell never visited a cross, and a visit
    outside of the grid an open triangle.

    Args:
        data: from `path_table`, in 2-D.
        title: what is to be seen.
    """
    panels = list(data.groupby("panel", sort=False))
    figure, axes = panel_grid(len(panels), 3, (3.1, 3.3), (0.9, 0.5))
    figure.suptitle(title)
    for axis, (panel, path) in zip(axes, panels, strict=True):
        _draw_path(axis, path)
        axis.set_title(panel)
        axis.set_ylabel("row (cells)")
        axis.set_xlabel("column (cells)")
    _bar_along(figure, axes)
    return figure


def _draw_path(axis: Axes, path: pd.DataFrame) -> None:
    rows, cols = path[["rows", "cols"]].iloc[0]
    points = path[["col", "row"]].to_numpy()
    axis.add_patch(Rectangle((-0.5, -0.5), cols, rows, fill=False, edgecolor="0.6", linewidth=0.8))
    _draw_steps(axis, points, np.linspace(0, 1, len(points) - 1), width=np.clip(40 / max(rows, cols), 0.8, 3))
    if len(points) <= 64:
        axis.scatter(*points.T, s=9, color="black", zorder=3)
    outside = ((points < 0) | (points >= [cols, rows])).any(axis=1)
    axis.scatter(*points[outside].T, marker="^", s=42, facecolor="none", edgecolor="black", zorder=4)
    visited = np.zeros((rows, cols), dtype=bool)
    visited[points[~outside, 1], points[~outside, 0]] = True
    missed_row, missed_col = np.nonzero(~visited)
    axis.scatter(missed_col, missed_row, marker="x", s=24, color="0.45", zorder=2)
    axis.set_aspect("equal")
    axis.margins(0.06)
    axis.invert_yaxis()
    axis.locator_params(integer=True, nbins=5)


def _draw_steps(axis: Axes, points: np.ndarray, along: np.ndarray, *, width: float) -> None:
    segments = np.stack([points[:-1], points[1:]], axis=1)
    jump = abs(np.diff(points, axis=0)).max(axis=1) > 1
    for chosen, style, thin in ((~jump, "solid", 1.0), (jump, (0, (1, 1.5)), 0.4)):
        lines = LineCollection(segments[chosen], cmap=ALONG, linestyles=style, linewidths=width * thin)
        lines.set_array(along[chosen])
        lines.set_clim(0, 1)
        lines.set_capstyle("butt" if thin < 1 else "projecting")
        lines.set_rasterized(len(segments) > 2**14)  # or the file has megabytes of lines too thin to be told apart
        axis.add_collection(lines)


def _bar_along(figure: Figure, axes: list[Axes]) -> None:
    mappable = LineCollection([], cmap=ALONG)
    mappable.set_clim(0, 100)
    figure.colorbar(mappable, ax=axes, label="place along the path (% of its cells)", shrink=0.8, aspect=30)


def draw_walk(*, curve: str, order: int, shape: str, walked: int) -> Figure:
    """A path through a grid up to some place on it, over the grey rest of the path.

    Args:
        curve: kind of `curve_coordinates`.
        order: n is 2^order cells.
        shape: of the grid, a key of `GRIDS`.
        walked: how far, 1 to 100 % of the cells; a part of a cell counts as one.
    """
    rows, cols = GRIDS[shape](2**order)
    points = curve_coordinates(curve, (rows, cols)).flip(1).numpy()  # column, row
    count = -(-len(points) * walked // 100)
    figure = Figure(figsize=(6.5, 6.5 * rows / cols + 0.9) if cols > rows + 1 else (5.2, 5.6))
    axis = figure.subplots()
    axis.plot(*points.T, color="0.85", linewidth=0.8, zorder=0)
    along = np.linspace(0, 1, len(points) - 1)[: count - 1]
    _draw_steps(axis, points[:count], along, width=np.clip(50 / max(rows, cols), 1, 4))
    axis.scatter(*points[count - 1], s=60, color="black", zorder=4)
    col, row = points[count - 1]
    axis.set_title(f"{curve}, {rows} x {cols}: cell {count} of {len(points)} is row {row}, column {col}")
    axis.set(xlabel="column (cells)", ylabel="row (cells)", xlim=(-0.7, cols - 0.3), ylim=(rows - 0.3, -0.7))
    axis.set_aspect("equal")
    axis.locator_params(integer=True, nbins=8)
    return figure


def draw_on_image(data: pd.DataFrame, *, title: str) -> Figure:
    """A picture in grey, and the same picture with the path on it.

    Args:
        data: columns row, col and grey (0 black to 1 white); one row for each pixel, in the order of the path.
        title: what is to be seen.
    """
    rows, cols = data["row"].max() + 1, data["col"].max() + 1
    picture = np.empty((rows, cols))
    picture[data["row"], data["col"]] = data["grey"]
    figure = Figure(figsize=(9, 9 * 0.47 * rows / cols + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, 2)
    for axis, subtitle in zip(axes, ("the picture, one token a pixel", "the order of its tokens"), strict=True):
        # Half contrast towards white under the path, so that the path stands out.
        washed = picture if axis is axes[0] else 0.45 + 0.55 * picture
        axis.imshow(washed, cmap="gray", vmin=0, vmax=1)
        axis.set_title(subtitle)
        axis.set_ylabel("row (pixels)")
        axis.set_xlabel("column (pixels)")
    _draw_path(axes[1], data.assign(rows=rows, cols=cols))
    axes[1].set_xlim(axes[0].get_xlim())
    axes[1].set_ylim(axes[0].get_ylim())
    _bar_along(figure, axes)
    return figure


def draw_volumes(data: pd.DataFrame, *, title: str) -> Figure:
    """Paths through boxes, side by side: dark at the start, bright at the end.

    Args:
        data: from `path_table`, in 3-D.
        title: what is to be seen.
    """
    panels = list(data.groupby("panel", sort=False))
    figure, axes = panel_grid(len(panels), 2, (3.9, 4), (1, 0.4), subplot_kw={"projection": "3d"})
    figure.suptitle(title)
    for axis, (panel, path) in zip(axes, panels, strict=True):
        points = path[["a", "b", "c"]].to_numpy()
        sides = path[["as", "bs", "cs"]].iloc[0].to_numpy()
        segments = np.stack([points[:-1], points[1:]], axis=1)
        lines = Line3DCollection(segments, cmap=ALONG, linewidths=np.clip(16 / sides.max(), 1.2, 4))
        lines.set_array(np.linspace(0, 1, len(segments)))
        axis.add_collection3d(lines)
        axis.set(xlim=(0, sides[0] - 1), ylim=(0, sides[1] - 1), zlim=(0, sides[2] - 1))
        axis.set_box_aspect(np.maximum(sides - 1, 1), zoom=0.9)
        axis.set(title=panel, xlabel="a (cells)", ylabel="b (cells)", zlabel="c (cells)")
        axis.locator_params(integer=True, nbins=4)
        axis.view_init(elev=22, azim=-58)
    _bar_along(figure, axes)
    return figure


def draw_block_map(data: pd.DataFrame, *, title: str) -> Figure:
    """Which cells share a block of consecutive tokens: a line wherever two neighbours do not.

    Args:
        data: from `hilbert_lib.lab.cache.grid.block_map`.
        title: what is to be seen.
    """
    maps = list(data.groupby("order", sort=False))
    figure, axes = panel_grid(len(maps), 4, (2.3, 2.6), (0, 0.5))
    figure.suptitle(title)
    for axis, (order, cells) in zip(axes, maps, strict=True):
        block = cells.pivot(index="row", columns="col", values="block").to_numpy()
        # 5 greys in turn and one block in colour, so that the eye can follow one.
        axis.imshow(0.72 + 0.06 * (block * 3 % 5), cmap="gray", vmin=0, vmax=1)
        one = np.where(block == block.max() // 3, 1.0, np.nan)
        axis.imshow(one, cmap=ListedColormap([COLOURS["hilbert"]]))
        borders = [((c + 0.5, r - 0.5), (c + 0.5, r + 0.5)) for r, c in np.argwhere(np.diff(block, axis=1))]
        borders += [((c - 0.5, r + 0.5), (c + 0.5, r + 0.5)) for r, c in np.argwhere(np.diff(block, axis=0))]
        # Tens of thousands of lines: megabytes of SVG, were they not drawn as points there too.
        axis.add_collection(LineCollection(borders, colors="black", linewidths=0.5, rasterized=True))
        axis.set(title=order, xlabel="column (cells)", ylabel="row (cells)")
        axis.locator_params(integer=True, nbins=5)
    return figure


def draw_neighbour_distance(data: pd.DataFrame, *, title: str) -> Figure:
    """Distance along the order between neighbours in the grid: mean and worst for each order.

    Args:
        data: from `hilbert_lib.lab.cache.grid.neighbour_distance`.
        title: what is to be seen.
    """
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(data))
    looks = (("mean_slots", "mean", "0.85", ""), ("worst_slots", "worst", "0.45", "//"))
    for shift, (column, label, grey, hatch) in zip((-0.2, 0.2), looks, strict=True):
        bars = axis.bar(places + shift, data[column], 0.4, color=grey, edgecolor="black", hatch=hatch, label=label)
        axis.bar_label(bars, fmt="{:.4g}", fontsize=8)
    axis.set_yscale("log")
    axis.set_ylim(bottom=0.7)
    axis.set_xticks(places, data["order"])
    axis.set(title=title, xlabel="order", ylabel="distance along the order (slots)")
    axis.legend(ncols=2, loc="upper left")
    axis.set_ylim(top=axis.get_ylim()[1] * 3)  # room for the legend
    return figure


def draw_step_distance(data: pd.DataFrame, *, title: str) -> Figure:
    """Distance in the grid between cells that are so many slots apart: mean on the left, worst on the right.

    Args:
        data: from `hilbert_lib.lab.cache.grid.step_distance`.
        title: what is to be seen.
    """
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, column, subtitle in zip(axes, ("mean_cells", "worst_cells"), ("mean", "worst"), strict=True):
        for order, rows in data.groupby("order", sort=False):
            axis.plot(
                rows["steps"], rows[column], color=COLOURS[order], marker=MARKERS[order], markersize=5, label=order
            )
        steps = np.sort(data["steps"].unique())
        axis.plot(steps, np.sqrt(6 * steps), color="0.4", linestyle=":", label=r"$\sqrt{6k}$")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(steps, steps)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(title=subtitle, xlabel="distance k along the order (slots)")
    axes[0].set_ylabel("distance in the grid (cells)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def draw_block_perimeter(data: pd.DataFrame, *, title: str) -> Figure:
    """Perimeter of blocks of consecutive tokens, as a multiple of a square's: mean as a bar, worst as a mark.

    Args:
        data: from `hilbert_lib.lab.cache.grid.block_compactness`, of a grid in 2-D.
        title: what is to be seen.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    orders = list(data["order"].unique())
    sizes = sorted(data["block_size"].unique())
    width = 0.8 / len(sizes)
    for i, size in enumerate(sizes):
        rows = data[data["block_size"] == size].set_index("order").loc[orders]
        square = 4 * size**0.5
        places = np.arange(len(orders)) + (i - (len(sizes) - 1) / 2) * width
        grey = str(0.9 - 0.6 * i / max(len(sizes) - 1, 1))
        mean, worst = rows["mean_perimeter"] / square, rows["worst_perimeter"] / square
        axis.bar(places, mean, width, color=grey, edgecolor="black", label=f"{size} tokens")
        axis.scatter(places, worst, marker="v", s=26, color=COLOURS["hilbert"], edgecolor="black", zorder=3)
        for place, value, top in zip(places, mean, worst, strict=True):
            axis.annotate(
                f"{value:.2f}",
                (place, top),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                rotation=90,
            )
    axis.scatter([], [], marker="v", s=26, color=COLOURS["hilbert"], edgecolor="black", label="worst block")
    axis.axhline(1, color="black", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(orders)), orders)
    axis.set(title=title, xlabel="order", ylabel="perimeter of a block\n(multiples of a square of as many cells)")
    axis.margins(y=0.12)
    axis.legend(loc="upper left", title="bar and number: mean")
    return figure


def draw_timing(data: pd.DataFrame, *, title: str) -> Figure:
    """Time to compute a curve: the median as a bar on a logarithmic axis, every sample as a dot.

    Args:
        data: columns name and sample_ms, one row for each sample.
        title: what is to be seen.
    """
    names = list(data["name"].unique())
    figure = Figure(figsize=(7.5, 0.8 * len(names) + 1.3), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        samples = data.loc[data["name"] == name, "sample_ms"]
        axis.barh(place, samples.median(), 0.6, color="0.8", edgecolor="black")
        axis.scatter(samples, np.full(len(samples), place), s=18, color="black", zorder=3)
        axis.annotate(
            f"  {samples.median():.4g} ms",
            (samples.max(), place),
            va="center",
            xytext=(6, 0),
            textcoords="offset points",
        )
    axis.set_xscale("log")
    axis.set_xlim(data["sample_ms"].min() / 3, data["sample_ms"].max() * 4)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(title=title, xlabel="time (ms, median and samples)")
    return figure
