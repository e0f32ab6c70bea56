"""Pictures of points: clouds along an order, the block of queries around one token, and the words of its tiles."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hilbert_lib.lab.figures.curves import ALONG
from hilbert_lib.lab.figures.grids import PARTS
from hilbert_lib.lab.figures.plots import key_of, panel_grid

BLOCK = 64  # queries of a block, and keys of a tile
REACH = {"own": ("#0072B2", "keys of the query"), **PARTS, "skipped": ("#EFEFEF", "other tokens")}
EMPTY = "#FFFFFF"


def draw_clouds(data: pd.DataFrame, *, title: str) -> Figure:
    """Clouds side by side, each token in the shade of its place along an order: dark at the start, bright at the end.

    data: panel, place, row, col, and of a cloud of three axes also height.
    """
    panels = list(data.groupby("panel", sort=False))
    figure = Figure(figsize=(5.2 * len(panels), 4.8), layout="constrained")
    for number, (panel, cloud) in enumerate(panels, start=1):
        cloud = cloud.sort_values("place")
        is_solid = cloud.height.notna().all()
        axes = figure.add_subplot(1, len(panels), number, projection="3d" if is_solid else None)
        (_draw_solid if is_solid else _draw_plane)(axes, cloud)
        axes.set_title(f"{panel}: {len(cloud):,} points")
    figure.suptitle(title)
    along = LineCollection([], cmap=ALONG, clim=(0, 100))
    figure.colorbar(along, ax=figure.axes, label="place along the curve (% of the points)", shrink=0.75, aspect=30)
    return figure


def _draw_plane(axes: Axes, cloud: pd.DataFrame) -> None:
    path = cloud[["col", "row"]].to_numpy()
    steps = np.stack([path[:-1], path[1:]], axis=1)
    lines = LineCollection(steps, cmap=ALONG, linewidths=1.1, array=np.linspace(0, 1, len(steps)))
    axes.add_collection(lines)
    axes.set(xlim=(-1, path[:, 0].max() + 1), ylim=(path[:, 1].max() + 1, -1), aspect="equal")
    axes.set(xlabel="column (cells)", ylabel="row (cells)")


def _draw_solid(axes: Axes, cloud: pd.DataFrame) -> None:
    sides = [cloud[name] for name in ("row", "col", "height")]
    shade = np.linspace(0, 1, len(cloud))
    axes.scatter(*sides, c=shade, cmap=ALONG, s=5, marker="s", linewidths=0, depthshade=False)
    axes.set_box_aspect([side.max() + 1 for side in sides], zoom=1.15)
    axes.set(xlabel="x (cells)", ylabel="y (cells)", zlabel="z")
    axes.locator_params(integer=True, nbins=4)
    axes.view_init(elev=48, azim=-62)


def draw_reach(data: pd.DataFrame, *, window: int, title: str) -> Figure:
    """A block of 64 queries in each order, in the plane and in the line of work: what it sees, and what it computes.

    data: `point_reach`. Above, the inner frame holds the queries and the outer one their windows. Below, a line is 64
    tokens of the order: the blocks of keys.
    """
    names = list(dict.fromkeys(data.order))
    figure = Figure(figsize=(3.9 * len(names), 7.4), layout="constrained")
    planes, lines = figure.subplots(2, len(names), squeeze=False, height_ratios=(1, 0.8))
    for plane, line, name in zip(planes, lines, names, strict=True):
        cells = data[data.order == name]
        value = cells.part.map(list(REACH).index) + 1
        queries = cells[cells.place // BLOCK == cells.place[cells.is_query].iloc[0] // BLOCK]
        token = cells[cells.is_query].iloc[0]
        _show(plane, (cells.row, cells.col), value, (token.col, token.row))
        for grown, width in ((0, 1.6), (window // 2, 1)):
            _frame(plane, queries, grown, width)
        _show(line, (cells.place // BLOCK, cells.place % BLOCK), value, (token.place % BLOCK, token.place // BLOCK))
        seen = cells.part.isin(["own", "queries", "seen"]).sum()
        blocks = (cells.place[cells.part != "skipped"] // BLOCK).nunique()
        plane.set_title(f"{name.replace('hilbert', 'Hilbert')}: {seen} keys, {-(-seen // BLOCK)} tiles")
        line.set_title(f"in {blocks} of {-(-len(cells) // BLOCK)} blocks of 64")
        line.set_xlabel("place in the block")
    planes[0].set_ylabel("row (cells)")
    lines[0].set_ylabel("block of 64 tokens")
    figure.legend(handles=key_of(REACH.values()), loc="outside lower center", ncols=len(REACH))
    figure.suptitle(title)
    return figure


def _show(axes: Axes, cells: tuple[pd.Series, pd.Series], value: pd.Series, token: tuple[int, int]) -> None:
    # Cells of a plane in the colours of their parts; a star marks the query.
    row, col = cells
    table = np.zeros((row.max() + 1, col.max() + 1), dtype=int)
    table[row, col] = value
    colours = [EMPTY, *(colour for colour, _ in REACH.values())]
    axes.imshow(table, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5, interpolation="nearest")
    axes.plot(*token, "*", color="white", markeredgecolor="black", markersize=11)
    axes.spines[:].set(visible=True, color="0.7")
    axes.locator_params(integer=True, nbins=5)


def _frame(axes: Axes, cells: pd.DataFrame, grown: int, width: float) -> None:
    # A rectangle around cells, so many cells wider on each side.
    left, top = cells.col.min() - grown - 0.5, cells.row.min() - grown - 0.5
    wide, high = np.ptp(cells.col) + 1 + 2 * grown, np.ptp(cells.row) + 1 + 2 * grown
    axes.add_patch(Rectangle((left, top), wide, high, fill=False, ec="black", lw=width))


def draw_words(data: pd.DataFrame, *, title: str) -> Figure:
    """The tiles of one block of 64 queries, an order below the other: a dot is a pair that attends.

    data: `block_words`.
    """
    names, keys = list(dict.fromkeys(data.order)), data.groupby("order").key.max() + 1
    figure, panels = panel_grid(len(names), 1, (9.5, 1.6), (0, 0.7))
    most_tiles = -(-keys.max() // BLOCK)
    for axes, name in zip(panels, names, strict=True):
        pairs, tiles = data[data.order == name], -(-keys[name] // BLOCK)
        table = np.zeros((BLOCK, tiles * BLOCK), dtype=bool)
        table[pairs["query"], pairs.key] = True
        axes.imshow(table, cmap=ListedColormap(["#FFFFFF", "#0072B2"]), aspect="auto", interpolation="nearest")
        for tile in range(1, tiles):
            axes.axvline(tile * BLOCK - 0.5, color="#D55E00", lw=1)
        axes.set(xlim=(-0.5, most_tiles * BLOCK - 0.5), ylabel="query")
        axes.set_title(f"{name}: {tiles} tiles, {table.mean():.0%} of their pairs attend", fontsize=11)
        axes.set_xticks(range(0, most_tiles * BLOCK + 1, BLOCK))
        axes.set_yticks([0, 63])
    panels[-1].set_xlabel("key of the block's tiles: tiles of 64 stand side by side")
    figure.suptitle(title)
    return figure
