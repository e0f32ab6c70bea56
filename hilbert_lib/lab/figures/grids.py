"""Pictures of the orders of a grid: what a block of queries reads, cell by cell, and the blocks of a mask."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hilbert_lib.lab.cache.neighbourhood import block_reach
from hilbert_lib.lab.figures.plots import by_hand, key_of
from hilbert_lib.patterns.neighbourhood import Neighbourhood

PARTS = {
    "queries": ("#D55E00", "one block of queries"),
    "seen": ("#F5C199", "keys in their windows"),
    "computed": ("#BBBBBB", "computed in vain"),
    "skipped": ("#FFFFFF", ""),
}


def draw_idea(
    data: pd.DataFrame,
    *,
    block_size: int,
    window: int,
    title: str = "A kernel computes whole blocks: compact ones touch fewer",
) -> Figure:
    """The cells of a grid in each order: a block of queries, what it attends to, and the blocks of keys it touches.

    data: `block_reach`; with a column grey (0 black to 1 white) a picture lies below, in place of the path.
    """
    names, side = list(dict.fromkeys(data.order)), int(data.row.max()) + 1
    figure = Figure(figsize=(4.3 * len(names), 5.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        cells = data[data.order == name].sort_values("slot")
        block, look = cells.slot // block_size, {}
        if "grey" in cells:
            axes.imshow(_on_grid(cells, cells.grey), cmap="gray", vmin=0, vmax=1)
            look["alpha"] = _on_grid(cells, 0.55 * (cells.part != "skipped"))
        else:
            axes.plot(cells.col, cells.row, color="#0072B2", lw=0.7, alpha=0.5)
        touched = block.where(cells.part != "skipped", -1)
        _show_parts(axes, PARTS, _on_grid(cells, cells.part.map(list(PARTS).index)), **look)
        _frame(axes, _on_grid(cells, touched), color="black", lw=min(1, 40 / side))
        read, block_count = block[touched >= 0].nunique(), block.nunique()
        axes.set(xticks=[], yticks=[], title=f"stored in {name.replace('hilbert', 'Hilbert')} order")
        share = f"touches {read} of {block_count} blocks of keys ({read / block_count:.0%})"
        axes.set_xlabel(f"{share}\nover all blocks of queries: {cells.mean_share.iloc[0]:.0%}", fontsize=11)
    handles = key_of(PARTS.values())
    handles.append(Patch(fill=False, ec="black", label="blocks of keys touched"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10)
    figure.suptitle(f"{title}\n{side} x {side} tokens, window {window} x {window}, blocks of {block_size}")
    return figure


def draw_reads(
    *, side: int, block_size: int, window: int, dilation: int, edge: str, order: str, row: int, column: int
) -> Figure:
    """The keys of a query in a cell of a square grid, and the blocks that a kernel reads for it: there and in storage.

    All queries of a block are computed together. window, dilation, edge: as of `Neighbourhood`, on both axes. order: of
    `neighbourhood_orderings`.
    """
    near, position = Neighbourhood((side, side), window, dilation=dilation, edge=edge), row * side + column
    cells, keys = block_reach(near, block_size=block_size, names=[order], position=position), near.keys(position)
    parts = {"own": ("#0072B2", "keys of the query"), **PARTS}
    is_own = np.isin(cells.row * side + cells.col, keys)
    value = cells.part.mask(is_own, "own").map(list(parts).index)
    slot, block = int(cells.slot[(cells.row == row) & (cells.col == column)].iloc[0]), cells.slot // block_size
    touched = block.where(cells.part != "skipped", -1)
    figure = by_hand(9, 4.8, left=0.06, right=0.97, bottom=0.19, top=0.93, wspace=0.15)
    grid, storage = figure.subplots(1, 2)
    shown = {grid: (_on_grid(cells, value), _on_grid(cells, touched), (column, row))}
    lines = (table.to_numpy().reshape(side, side) for table in (value, touched))
    shown[storage] = (*lines, (slot % side, slot // side))
    for axes, (values, blocks, star) in shown.items():
        _show_parts(axes, parts, values)
        _frame(axes, blocks, color="black", lw=1)
        _frame(axes, np.where(blocks == slot // block_size, 0, -1), color=PARTS["queries"][0], lw=3)
        axes.plot(*star, "*", color="white", markeredgecolor="black", markersize=13)
    heading = f"{len(keys)} keys in any order (window {window}, dilation {dilation}, {edge})"
    grid.set(title=heading, xlabel="column", ylabel="row")
    read = touched[touched >= 0].nunique()
    heading = f"in storage, {order.replace('hilbert', 'Hilbert')} order: {read} of {block.nunique()} blocks are read"
    storage.set(title=heading, xlabel=f"storage, {side} tokens in a line", ylabel="line")
    figure.legend(handles=key_of(parts.values()), loc="lower center", ncols=len(parts) - 1)
    return figure


def _show_parts(axes: Axes, parts: dict[str, tuple[str, str]], values: np.ndarray, **look) -> None:
    colours = ListedColormap([colour for colour, _ in parts.values()])
    axes.imshow(values, cmap=colours, vmin=-0.5, vmax=len(parts) - 0.5, **look)
    axes.spines[:].set(visible=True, color="0.7")


def _on_grid(cells: pd.DataFrame, values: pd.Series) -> np.ndarray:
    table = np.zeros((cells.row.max() + 1, cells.col.max() + 1), dtype=values.dtype)
    table[cells.row, cells.col] = values
    return table


def _frame(axes: Axes, blocks: np.ndarray, **look) -> None:
    # Lines between cells of two blocks, around those of at least 0: a block of any shape.
    for turned in (False, True):
        table = np.pad(blocks.T if turned else blocks, ((0, 0), (1, 1)), constant_values=-1)
        line, place = np.nonzero(table[:, 1:] != table[:, :-1])
        ends = [np.stack([place - 0.5, line + end], axis=1) for end in (-0.5, 0.5)]
        edges = np.stack(ends, axis=1)
        axes.add_collection(LineCollection(edges[..., ::-1] if turned else edges, capstyle="projecting", **look))


def draw_block_maps(data: pd.DataFrame, *, title: str) -> Figure:
    """The mask in blocks, a panel an order: the share of each block's pairs that attend; white is skipped."""
    names, size = list(dict.fromkeys(data.order)), 1 + int(data[["q_block", "kv_block"]].to_numpy().max())
    figure = Figure(figsize=(2.6 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        cells, table = data[data.order == name], np.zeros((size, size))
        table[cells.q_block, cells.kv_block] = cells.share
        scale = LogNorm(data.share.min(), 1)
        image = axes.imshow(np.ma.masked_equal(table, 0), norm=scale, cmap="viridis_r", interpolation="nearest")
        axes.set(title=f"{name}: {(table > 0).mean():.0%} touched", xlabel="block of keys")
    panels[0].set_ylabel("block of queries")
    figure.colorbar(image, ax=panels, shrink=0.7, format="{x:.0%}", label="pairs that attend")
    figure.suptitle(title)
    return figure
