"""Grids of cells in few shades: who sees whom, which cells share a block, what one query of a pattern sees."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib import rcParams
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hilbert_lib.lab.figures.plots import PALETTE, by_hand, panel_grid
from hilbert_lib.patterns.dilated import DilatedPattern


def cell_table(grids: Mapping[str, Tensor]) -> pd.DataFrame:
    """Table for `draw_cells` of (rows, columns) integers by title: panel, row, column and value of what is not 0."""
    tables = []
    for panel, grid in grids.items():
        values = grid.long().numpy()
        row, column = values.nonzero()
        tables.append(pd.DataFrame({"panel": panel, "row": row, "column": column, "value": values[row, column]}))
    return pd.concat(tables, ignore_index=True)


def draw_cells(
    data: pd.DataFrame,
    *,
    shape: Sequence[int],
    panels: Sequence[str],
    shades: Sequence[str],
    title: str,
    xlabel: str,
    ylabel: str,
    names: Sequence[str] = (),
) -> Figure:
    """Grids of a `shape` side by side, by title, each cell in the shade of its value; a legend tells their `names`."""
    # At least a pixel for each cell, beside 1.1 inches for labels and title.
    inches = (cells / rcParams["figure.dpi"] + 1.1 for cells in shape[::-1])
    size = [max(least, each) for least, each in zip((2.6, 2.9), inches, strict=True)]
    figure, axes = panel_grid(len(panels), 4, size, (1.4 if names else 0, 0.6))
    for axis, panel in zip(axes, panels, strict=True):
        grid, own = np.zeros(shape), data[data.panel == panel]
        grid[own.row, own.column] = own.value
        axis.imshow(grid, cmap=ListedColormap(shades), vmin=-0.5, vmax=len(shades) - 0.5, interpolation="nearest")
        axis.set(title=panel, xlabel=xlabel, ylabel=ylabel if axis.get_subplotspec().is_first_col() else "")
        axis.spines[:].set_visible(True)
        for line in (axis.xaxis, axis.yaxis):  # cells are whole
            line.set_major_locator(MaxNLocator(6, integer=True))
    patches = [Patch(facecolor=shade, edgecolor="#888888") for shade in shades]
    if names:
        figure.legend(patches, names, loc="outside right center")
    figure.suptitle(title)
    return figure


def draw_query(
    pattern: DilatedPattern, *, length: int, kv_heads: int, is_causal: bool, branch: int, head: int, position: int
) -> Figure:
    """Picture of one query's keys in one KV head and branch, in the grid of all queries and beside other branches."""
    every = torch.arange(length)
    heads = {"kv_head": head, "kv_heads": kv_heads, "is_causal": is_causal}
    masks = torch.stack([pattern.mask(i, every, every, **heads) for i in range(len(pattern.branches))]).numpy()
    figure = by_hand(10, 4.4, left=0.07, right=0.99, bottom=0.13, top=0.91, wspace=0.36)
    grid, strips = figure.subplots(1, 2, width_ratios=(1, 1.5))
    shades = ListedColormap(("#FFFFFF", "#DDDDDD", PALETTE[0]))
    grid.imshow(np.where(masks[branch], 2, masks.any(0)), cmap=shades, vmin=0, vmax=2, interpolation="nearest")
    grid.axhspan(position - 0.5, position + 0.5, fill=False, edgecolor="black", linewidth=1.2)
    grid.set(title=f"head {head}: through branch {branch}, others grey", xlabel="key", ylabel="query (position)")
    for i, (w, _) in enumerate(pattern.branches):
        start, keys = position // w * w, np.flatnonzero(masks[i, position])
        strips.barh(i, min(w, length - start), left=start - 0.5, height=0.7, color="#F0F0F0", edgecolor="#AAAAAA")
        colour = PALETTE[0] if i == branch else "#888888"
        strips.plot(keys, np.full(len(keys), i), "s", color=colour, markersize=np.clip(240 / length, 1, 6))
    strips.axvline(position, color="black", linewidth=1.2)
    names = [f"branch {i}\nw = {w}, r = {r}" for i, (w, r) in enumerate(pattern.branches)]
    strips.set_yticks(range(len(names)), names)
    strips.set(xlim=(-1, length), ylim=(len(names) - 0.4, -0.6), xlabel="key (position); a box is the query's segment")
    count = masks[:, position].sum(1)
    strips.set_title(f"position {position}: {count[branch]} keys through branch {branch}, {count.sum()} through all")
    return figure
