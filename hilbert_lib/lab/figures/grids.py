"""Pictures of the orders of a grid: the idea on 16 x 16 cells, and the blocks of a mask."""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.cache.neighbourhood import block_reach
from hilbert_lib.lab.figures.record import STYLE

PARTS = {
    "queries": ("#D55E00", "one block of queries"),
    "seen": ("#F5C199", "keys in their windows"),
    "computed": ("#BBBBBB", "computed in vain"),
    "skipped": ("#FFFFFF", ""),
}


def draw_idea(data: pd.DataFrame, *, block_size: int, window: int) -> Figure:
    """The cells of a grid in each order: a block of queries, what it attends to, and the blocks of keys it touches.

    Args:
        data: `block_reach`.
        block_size: tokens of a block. window: cells along a side of the window.
    """
    names, side = list(dict.fromkeys(data.order)), int(data.row.max()) + 1
    figure = Figure(figsize=(4.3 * len(names), 5.4), layout="constrained")
    colours = ListedColormap([colour for colour, _ in PARTS.values()])
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        cells = data[data.order == name].sort_values("slot")
        part = cells.part.map(list(PARTS).index)
        picture = np.zeros((side, side))
        picture[cells.row, cells.col] = part
        axes.imshow(picture, cmap=colours, vmin=-0.5, vmax=len(PARTS) - 0.5)
        axes.plot(cells.col, cells.row, color="#0072B2", lw=0.7, alpha=0.5)
        blocks = cells.slot // block_size
        for _, block in cells[cells.part != "skipped"].groupby(blocks):
            (top, left), (bottom, right) = block[["row", "col"]].min(), block[["row", "col"]].max()
            corner, size = (left - 0.5, top - 0.5), (right - left + 1, bottom - top + 1)
            axes.add_patch(Rectangle(corner, *size, fill=False, ec="black", lw=1))
        touched, every = blocks[cells.part != "skipped"].nunique(), blocks.nunique()
        axes.set(xticks=[], yticks=[], title=f"stored in {name.replace('hilbert', 'Hilbert')} order")
        axes.spines[:].set(visible=True, color="0.7")
        share = f"touches {touched} of {every} blocks of keys ({touched / every:.0%})"
        axes.set_xlabel(f"{share}\nover all blocks of queries: {cells.mean_share.iloc[0]:.0%}", fontsize=11)
    handles = [Patch(fc=colour, ec="0.5", label=label) for colour, label in PARTS.values() if label]
    handles.append(Patch(fill=False, ec="black", label="blocks of keys touched"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10)
    sizes = f"{side} x {side} tokens, window {window} x {window}, blocks of {block_size}"
    figure.suptitle(f"A kernel computes whole blocks: compact ones touch fewer\n{sizes}")
    return figure


def write_idea(path: str | Path) -> None:
    """Write the README's picture of the idea to a PNG file: what `make picture` calls."""
    table = block_reach(Neighbourhood((16, 16), 5), block_size=4, names=["raster", "hilbert"])
    with matplotlib.rc_context(STYLE):
        draw_idea(table, block_size=4, window=5).savefig(path)


def draw_block_maps(data: pd.DataFrame, *, title: str) -> Figure:
    """The mask in blocks, a panel an order: the share of each block's pairs that attend; white blocks are skipped.

    Args:
        data: `block_shares`.
        title: what was counted.
    """
    names, size = list(dict.fromkeys(data.order)), 1 + int(data[["q_block", "kv_block"]].to_numpy().max())
    figure = Figure(figsize=(2.6 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        own, table = data[data.order == name], np.zeros((size, size))
        table[own.q_block, own.kv_block] = own.share
        scale = LogNorm(data.share.min(), 1)
        image = axes.imshow(np.ma.masked_equal(table, 0), norm=scale, cmap="viridis_r", interpolation="nearest")
        axes.set(title=f"{name}: {(table > 0).mean():.0%} touched", xlabel="block of keys")
    panels[0].set_ylabel("block of queries")
    figure.colorbar(image, ax=panels, shrink=0.7, format="{x:.0%}", label="pairs that attend")
    figure.suptitle(title)
    return figure
