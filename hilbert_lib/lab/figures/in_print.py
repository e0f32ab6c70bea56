"""Pictures of windows along a curve: what a query sees, beside the window that stands for it."""

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hilbert_lib.lab.figures.plots import key_of, panel_grid

PARTS = {"kept": ("#0072B2", "seen, in the window"), "away": ("#E69F00", "seen, outside of it")}
PARTS |= {"lost": ("#999999", "in the window, not seen"), "other": ("#F4F4F4", "")}


def draw_kept(data: pd.DataFrame, *, title: str) -> Figure:
    """The cells around a query that a published pattern keeps of its window, loses, and sees elsewhere.

    data: panel, row, col, part (of `PARTS`) and is_query, from `cells_kept`. A star marks the query.
    """
    panels = list(data.groupby("panel", sort=False))
    figure, grid = panel_grid(len(panels), len(panels), (4.2, 4.2), (0, 0.8))
    for axes, (panel, cells) in zip(grid, panels, strict=True):
        table = np.zeros((cells.row.max() + 1, cells.col.max() + 1), dtype=int)
        table[cells.row, cells.col] = cells.part.map(list(PARTS).index)
        colours = [colour for colour, _ in PARTS.values()]
        axes.imshow(table, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5, interpolation="nearest")
        window, token = cells[cells.part.isin(["kept", "lost"])], cells[cells.is_query].iloc[0]
        corner = window.col.min() - 0.5, window.row.min() - 0.5
        sides = np.ptp(window.col) + 1, np.ptp(window.row) + 1
        axes.add_patch(Rectangle(corner, *sides, fill=False, ec="black", lw=1.4))
        axes.plot(token.col, token.row, "*", color="white", markeredgecolor="black", markersize=10)
        axes.set(title=panel, xlabel="column (cells)", ylabel="row (cells)")
        axes.spines[:].set(visible=True, color="0.7")
        axes.locator_params(integer=True, nbins=5)
    figure.legend(handles=key_of(PARTS.values()), loc="outside lower center", ncols=len(PARTS))
    figure.suptitle(title)
    return figure
