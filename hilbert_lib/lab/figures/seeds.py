"""Figures of what the documents under examination compared."""

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch


def draw_key_sets(data: pd.DataFrame, *, length: int, dilation_rate: int) -> Figure:
    """The keys of the documents' two kernels side by side, and where they agree.

    Args:
        data: columns query, key, standard, hilbert, as `key_set_table` gives them.
        length: tokens.
        dilation_rate: for the title.
    """
    shades = ("#FFFFFF", "#9ECAE1", "#F4A582", "#08306B")  # none, only standard, only "Hilbert", both
    grids = np.zeros((3, length, length), dtype=int)
    grids[0, data["query"], data["key"]] = np.where(data["standard"], 1, 0)
    grids[1, data["query"], data["key"]] = np.where(data["hilbert"], 2, 0)
    grids[2] = grids[0] + grids[1]
    figure = Figure(figsize=(11, 4), layout="constrained")
    titles = ("the standard kernel", 'the "Hilbert" kernel', "both: dark where they agree")
    for axes, grid, title in zip(figure.subplots(1, 3, sharey=True), grids, titles, strict=True):
        axes.imshow(grid, cmap=ListedColormap(shades), vmin=0, vmax=3, interpolation="nearest")
        axes.set(title=title, xlabel="key (position)")
        axes.spines[:].set_visible(True)
    figure.axes[0].set_ylabel("query (position)")
    names = ("no kernel", "standard only", '"Hilbert" only', "both")
    patches = [Patch(facecolor=c, edgecolor="#888888", label=name) for c, name in zip(shades, names, strict=True)]
    figure.legend(handles=patches, title="key read by", loc="outside right center")
    what = "One function here" if data["standard"].equals(data["hilbert"]) else "Two functions"
    figure.suptitle(f"{what}: the keys that the documents' kernels read at dilation {dilation_rate}")
    return figure


def draw_overlap(data: pd.DataFrame) -> Figure:
    """Overlap of the two key sets and difference of the two outputs against the dilation rate.

    Args:
        data: columns dilation_rate, overlap, output_difference, as `seed_kernels_compared` gives them.
    """
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(data["dilation_rate"], data["overlap"], "o-", color="#0072B2", label="keys in common / keys")
    axes.plot(
        data["dilation_rate"],
        data["output_difference"],
        "s--",
        color="#D55E00",
        label="output difference / output (norms)",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(data["dilation_rate"], data["dilation_rate"])
    axes.set(xlabel="dilation rate (tokens)", ylabel="share (1)", ylim=(-0.03, None), title="One function, or two?")
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend()
    return figure
