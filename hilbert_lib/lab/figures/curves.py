"""Paths through grids in two and three dimensions."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from mpl_toolkits.mplot3d.art3d import Line3DCollection
from torch import Tensor

from hilbert_lib.lab.figures.plots import panel_grid

# Dark to bright in grey print; its brightest end, which paper swallows, is left out.
ALONG = ListedColormap(colormaps["plasma"](np.linspace(0, 0.85, 256)))
AXES = {2: ["row", "col"], 3: ["a", "b", "c"]}


def path_table(panels: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> pd.DataFrame:
    """Table that `draw_paths` and `draw_volumes` take, a row for each cell of each path.

    `panels` holds by title the (cells, 2) or (cells, 3) coordinates in the order of the path, and the grid's sides.
    """
    tables = []
    for panel, (cells, shape) in panels.items():
        if len(cells) < 2:
            raise ValueError(f"a path must have 2 cells or more, got {len(cells)}: {panel!r}")
        axes = AXES[len(shape)]
        sides = {f"{axis}s": side for axis, side in zip(axes, shape, strict=True)}
        tables.append(pd.DataFrame(cells.cpu().numpy(), columns=axes).assign(panel=panel, **sides))
    return pd.concat(tables, ignore_index=True)


def draw_paths(data: pd.DataFrame, *, title: str, walked: int = 100) -> Figure:
    """Paths through grids, side by side: dark at the start, bright at the end.

    A step to a cell that does not touch the last one is dotted, a cell never visited a cross, and a visit outside of
    the grid a triangle. Behind the path lies a picture, where the table has a column grey (0 black to 1 white). What
    comes after `walked` % of the cells is grey.
    """
    panels = list(data.groupby("panel", sort=False))
    rows, cols = panels[0][1][["rows", "cols"]].iloc[0]
    width = 3.1 if len(panels) > 1 else 5
    figure, axes = panel_grid(len(panels), 3, (width, width * np.clip(rows / cols, 0.5, 1.2) + 0.2), (0.9, 0.5))
    for axis, (panel, path) in zip(axes, panels, strict=True):
        _draw_path(axis, path, -(-len(path) * walked // 100))
        axis.set(title=panel, xlabel="column (cells)", ylabel="row (cells)", aspect="equal")
        axis.locator_params(integer=True, nbins=6)
    _finish(figure, axes, title)
    return figure


def _draw_path(axis: Axes, path: pd.DataFrame, walked: int) -> None:
    rows, cols = path[["rows", "cols"]].iloc[0]
    points = path[["col", "row"]].to_numpy()
    outside = ((points < 0) | (points >= [cols, rows])).any(axis=1)
    seen = np.zeros((rows, cols))
    seen[*points[~outside].T[::-1]] = 1 if "grey" not in path else path.grey
    if "grey" in path:  # half its contrast, so that the path stands out
        axis.imshow(0.45 + 0.55 * seen, cmap="gray", vmin=0, vmax=1)
    else:
        axis.scatter(*np.argwhere(seen == 0).T[::-1], marker="x", s=24, color="0.45")
    axis.plot(*points[walked - 1 :].T, color="0.85", linewidth=0.8, zorder=1)
    steps = np.stack([points[:-1], points[1:]], axis=1)[: walked - 1]
    jump = abs(steps[:, 1] - steps[:, 0]).max(axis=1) > 1
    width = np.clip(40 / max(rows, cols), 0.8, 3)
    for chosen, style, thin in ((~jump, "solid", 1.0), (jump, (0, (1, 1.5)), 0.4)):
        lines = LineCollection(steps[chosen], cmap=ALONG, linestyles=style, linewidths=width * thin, zorder=2)
        lines.set_array(np.linspace(0, 1, len(points) - 1)[: walked - 1][chosen])
        lines.set_clim(0, 1)
        axis.add_collection(lines)
    axis.scatter(*points[outside].T, marker="^", s=42, facecolor="none", edgecolor="black", zorder=3)
    if walked < len(points):
        axis.scatter(*points[walked - 1], s=60, color="black", zorder=3)
    axis.set(xlim=(min(points[:, 0].min(), 0) - 0.7, max(points[:, 0].max() + 1, cols) - 0.3))
    axis.set(ylim=(max(points[:, 1].max() + 1, rows) - 0.3, min(points[:, 1].min(), 0) - 0.7))


def draw_volumes(data: pd.DataFrame, *, title: str) -> Figure:
    """Paths through boxes, side by side: dark at the start, bright at the end."""
    panels = list(data.groupby("panel", sort=False))
    figure, axes = panel_grid(len(panels), 3, (3.3, 3.4), (1, 0.4), subplot_kw={"projection": "3d"})
    for axis, (panel, path) in zip(axes, panels, strict=True):
        points, sides = path[["a", "b", "c"]].to_numpy(), path[["as", "bs", "cs"]].iloc[0].to_numpy()
        lines = Line3DCollection(np.stack([points[:-1], points[1:]], axis=1), cmap=ALONG)
        lines.set(array=np.linspace(0, 1, len(points) - 1), linewidth=np.clip(16 / sides.max(), 1.2, 4))
        axis.add_collection3d(lines)
        axis.set(xlim=(0, sides[0] - 1), ylim=(0, sides[1] - 1), zlim=(0, sides[2] - 1))
        axis.set_box_aspect(np.maximum(sides - 1, 1), zoom=0.8)
        axis.set(title=panel, xlabel="a (cells)", ylabel="b (cells)", zlabel="c (cells)")
        axis.locator_params(integer=True, nbins=4)
        axis.view_init(elev=22, azim=-58)
    _finish(figure, axes, title)
    return figure


def _finish(figure: Figure, axes: list[Axes], title: str) -> None:
    figure.suptitle(title)
    along = LineCollection([], cmap=ALONG, clim=(0, 100))
    figure.colorbar(along, ax=axes, label="place along the path (% of its cells)", shrink=0.8, aspect=30)
