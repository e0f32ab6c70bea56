"""Figures of notebook 08: blocks touched, where they lie, bytes exchanged, and what that does to the time."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.record import COLOURS, MARKERS


def draw_blocks(data: pd.DataFrame, *, grid: str) -> Figure:
    """Blocks of keys that a block of queries touches, by window, a line an order, a panel a block size.

    Args:
        data: `count_blocks`.
        grid: which grid, as its column names it.
    """
    shown = data[data.grid == grid]
    sizes = sorted(shown.block_size.unique())
    figure = Figure(figsize=(5 * len(sizes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        panel = shown[shown.block_size == size]
        _lines(axes, panel, "window", "per_query_block")
        fewest = panel.assign(fewest=panel.per_query_block * panel.used).drop_duplicates("window")
        axes.plot(fewest.window, fewest.fewest, color="black", ls="--", label="if no pair were wasted")
        axes.set(title=f"blocks of {size}", xlabel="window [cells a side]", yscale="log")
    panels[0].set_ylabel("blocks of keys for a block of queries")
    _legend(figure, panels[0])
    figure.suptitle(f"Prediction: blocks that a kernel must compute, grid {grid}")
    return figure


def draw_block_maps(data: pd.DataFrame, *, title: str) -> Figure:
    """The mask in blocks, a panel an order: the share of each block's pairs that attend; white blocks are skipped.

    Args:
        data: `block_shares`.
        title: what was counted.
    """
    names = list(dict.fromkeys(data.order))
    columns = -(-len(names) // 2)
    figure = Figure(figsize=(3.2 * columns, 7), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, sharex=True, sharey=True)
    scale = LogNorm(data.share[data.share > 0].min(), 1)
    for axes, name in zip(panels.flat, names, strict=False):
        table = data[data.order == name].pivot(index="q_block", columns="kv_block", values="share").to_numpy()
        image = axes.imshow(np.ma.masked_equal(table, 0), norm=scale, cmap="viridis_r", interpolation="nearest")
        axes.set_title(f"{name}: {(table > 0).mean():.0%} touched")
    for axes in panels[-1]:
        axes.set_xlabel("block of keys")
    for axes in panels[:, 0]:
        axes.set_ylabel("block of queries")
    bar = figure.colorbar(image, ax=panels, shrink=0.6, format="{x:.0%}")
    bar.set_label("pairs of the block that attend")
    figure.suptitle(title)
    return figure


def draw_exchange(data: pd.DataFrame, *, title: str) -> Figure:
    """MiB of k and v that ranks receive, all together and the one that receives most, a line an order.

    Args:
        data: `count_exchange`.
        title: of which work.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"total_bytes": "all ranks together", "most_bytes": "the rank that receives most"}
    for axes, (column, label) in zip(panels, titles.items(), strict=True):
        _lines(axes, data.assign(mib=data[column] / 2**20), "ranks", "mib")
        axes.set(title=label, xlabel="ranks", yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(data.ranks.unique()), sorted(data.ranks.unique()))
        axes.xaxis.minorticks_off()
    panels[0].set_ylabel("k and v received [MiB]")
    _legend(figure, panels[0])
    figure.suptitle(f"Prediction: {title}")
    return figure


def draw_speedups(data: pd.DataFrame, *, block_size: int, source: str) -> Figure:
    """Raster's time over that of each order, with its interval; a row a direction, a column a grid.

    Args:
        data: `ratio_table` of the sweep, the pairs with raster.
        block_size: tokens of a block.
        source: where it was measured, for the title.
    """
    shown = data[data.block_size == block_size]
    directions, sides = list(dict.fromkeys(shown.direction)), sorted(shown.side.unique())
    windows, names = sorted(shown.window.unique()), list(dict.fromkeys(shown.b))
    figure = Figure(figsize=(3.6 * len(sides), 3.2 * len(directions) + 1), layout="constrained")
    panels = figure.subplots(len(directions), len(sides), squeeze=False, sharex=True, sharey=True)
    for axes_row, direction in zip(panels, directions, strict=True):
        for axes, side in zip(axes_row, sides, strict=True):
            panel = shown[(shown.direction == direction) & (shown.side == side)]
            for name, rows in panel.groupby("b", sort=False):
                spread = [rows.ratio - rows.low, rows.high - rows.ratio]
                style = {"color": COLOURS[name], "marker": MARKERS[name], "label": name}
                # Side by side, or orders that are as fast hide each other.
                at = rows.window.map(windows.index) + 0.16 * (names.index(name) - (len(names) - 1) / 2)
                axes.errorbar(at, rows.ratio, spread, capsize=2, ls="", **style)
            axes.set_xticks(range(len(windows)), windows)
            axes.axhline(1, color="black", lw=0.8)
            axes.set(title=f"{direction}, {side} x {side}")
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.grid(color="#DDDDDD")
        axes_row[0].set_ylabel("time, raster over order")
    for axes in panels[-1]:
        axes.set_xlabel("window [cells a side]")
    _legend(figure, max(panels.flat, key=lambda axes: len(axes.get_legend_handles_labels()[1])))
    figure.suptitle(f"Above 1 an order is faster than raster, blocks of {block_size}, {source}")
    return figure


def draw_time_by_blocks(data: pd.DataFrame, *, source: str) -> Figure:
    """Time of a call against the blocks that its mask touches, a panel a direction and block size.

    Args:
        data: `side_table` of the sweep, the sides that have a mask.
        source: where it was measured, for the title.
    """
    cases = list(data.groupby(["direction", "block_size"], sort=False))
    figure = Figure(figsize=(4.2 * len(cases), 4.4), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, ((direction, size), table) in zip(panels, cases, strict=True):
        for name, rows in table.groupby("name", sort=False):
            style = {"color": COLOURS[name], "marker": MARKERS[name], "label": name}
            axes.plot(rows.touched, rows.median_ms, ls="", fillstyle="none", **style)
        axes.set(title=f"{direction}, blocks of {size:.0f}", xlabel="blocks touched", xscale="log", yscale="log")
        axes.grid(color="#DDDDDD")
    panels[0].set_ylabel("median time [ms]")
    _legend(figure, panels[0])
    figure.suptitle(f"Time by the blocks that are touched, {source}")
    return figure


def _lines(axes: Axes, data: pd.DataFrame, x: str, y: str) -> None:
    for order, rows in data.groupby("order", sort=False):
        axes.plot(rows[x], rows[y], color=COLOURS[order], marker=MARKERS[order], label=order, fillstyle="none")
    axes.grid(color="#DDDDDD")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
