"""Figures of the verdict: what is claimed beside what was measured, and where an ordering pays."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.record import MARKERS

AS_CLAIMED, NOT_AS_CLAIMED, CLAIMED = "#0072B2", "#D55E00", "#BBBBBB"


def draw_claimed_and_measured(data: pd.DataFrame, *, source: str) -> Figure:
    """The claimed ranges of ratios of times as bars, the measured cases as points with their intervals, a line a claim.

    Args:
        data: `ledger.claim.ratio_cases`.
        source: where it was measured, for the title.
    """
    claims = list(dict.fromkeys(data.id))
    figure = Figure(figsize=(11, 0.42 * len(claims) + 1.6), layout="constrained")
    axes = figure.subplots()
    right = np.ceil(max(12.0, 1.2 * data.value.max())) if data.value.notna().any() else 12.0
    left = 0.45
    for line, (_, rows) in enumerate(data.groupby("id", sort=False)):
        measured = rows[rows.value.notna()]
        for least, most in (
            measured[["claimed_least", "claimed_most"]].drop_duplicates().astype(float).clip(left, right).values
        ):
            axes.barh(line, most - least, left=least, height=0.7, color=CLAIMED, alpha=0.6, zorder=1)
        if measured.empty:
            axes.text(1.02, line, rows.verdict.iloc[0], va="center", color="#666666", style="italic")
            continue
        # Spread over the line's height, so that cases on one value do not hide each other.
        at = line + (np.linspace(-0.3, 0.3, len(measured)) if len(measured) > 1 else np.zeros(1))
        values = measured[["value", "low", "high"]].astype(float)
        colours = np.where(measured.as_claimed.astype(bool), AS_CLAIMED, NOT_AS_CLAIMED)
        axes.hlines(at, values.low, values.high, colors=colours, lw=1, zorder=2)
        axes.scatter(values.value, at, c=colours, s=9, zorder=3)
    for label, colour, marker in (("claimed", CLAIMED, "s"), ("measured: as claimed", AS_CLAIMED, "o"),
                                  ("measured: not as claimed", NOT_AS_CLAIMED, "o")):  # fmt: skip
        axes.scatter([], [], color=colour, marker=marker, label=label)
    axes.axvline(1, color="black", lw=0.8)
    labels = [f"{claim}  {_shortened(data[data.id == claim].claim.iloc[0])}" for claim in claims]
    axes.set(
        yticks=range(len(claims)), yticklabels=labels, xscale="log", xlim=(left, right), ylim=(len(claims) - 0.5, -0.5)
    )
    axes.set_xlabel("ratio of times; above 1 what is claimed to be faster is the faster one")
    ticks = [0.5, 1, 2, 4, 8] + [right] * bool(right > 16)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3)
    axes.set_title(f"Claimed and measured, {source}")
    return figure


def draw_map(data: pd.DataFrame, *, bound: float, line_bytes: int, source: str) -> Figure:
    """Where an ordering pays: arithmetic intensity against row size, on grids against the grid, coloured by the gain.

    Args:
        data: `ledger.kernels.places`, and `grid_places` below it.
        bound: useful FLOP for each byte above which arithmetic binds, by the ceilings of the same run.
        line_bytes: of a cache line.
        source: where it was measured, for the title.
    """
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    on_grid = data.work == "window on a grid"
    sizes, sides = sorted(data.row_bytes[~on_grid].unique()), np.sqrt(data.length[on_grid]).astype(int)
    place = data.row_bytes[~on_grid].map({size: n for n, size in enumerate(sizes)})
    _draw_places(left, data[~on_grid], place, "linear, by a table, over the fastest order")
    columns = sorted(sides.unique())
    if columns:
        _draw_places(right, data[on_grid], sides.map(columns.index), "raster over the fastest order")
    else:
        right.text(0.5, 0.5, "nothing is committed of grids", ha="center", transform=right.transAxes)
    left.set(xlabel="bytes of one head's row", ylabel="useful FLOP for each useful byte", title="over sequences")
    left.set_xticks(
        range(len(sizes)), [f"{size}{'' if size % line_bytes else chr(10) + 'whole lines'}" for size in sizes]
    )
    right.set(xlabel="cells along a side of the grid", ylabel="the same, of its windows", title="a window on a grid")
    right.set_xticks(range(len(columns)), columns)
    left.axhline(bound, color="black", ls="--", lw=0.8, zorder=1)
    left.annotate("arithmetic binds above, bytes below", (0, bound), (0, -10), xycoords=("axes fraction", "data"),
                  textcoords="offset points", fontsize=8)  # fmt: skip
    for order in sorted(data.order.unique()):
        left.scatter([], [], marker=_marker(order), color="white", edgecolors="black", label=order)
    title = "the fastest order; framed where it gains a per cent, also over linear storage that is read without a table"
    figure.legend(loc="outside lower center", ncols=7, title=title)
    figure.suptitle(f"Where an ordering pays, {source}")
    return figure


def _draw_places(axes: Axes, data: pd.DataFrame, column: pd.Series, label: str) -> None:
    # Works of about one intensity in one column stand side by side, from the shortest to the longest.
    data = data.sort_values("length")
    spot = data.groupby([column[data.index], np.log2(data.intensity).round(0)])
    count, place = spot.value.transform("size"), spot.cumcount()
    at = column[data.index] + np.where(count > 2, 0.16, 0.34) * (place - (count - 1) / 2)
    norm = TwoSlopeNorm(vmin=min(0.95, data.value.min()), vcenter=1, vmax=max(1.05, data.value.max()))
    gains = (data.low > 1.01) & (data.over_plain_low > 1.01)
    for order, rows in data.groupby("order"):
        framed = gains[rows.index]
        style = {"marker": _marker(order), "s": 70, "zorder": 3, "linewidths": np.where(framed, 1.4, 0.6)}
        style |= {"edgecolors": np.where(framed, "black", "#AAAAAA"), "cmap": "RdBu_r", "norm": norm}
        shown = axes.scatter(at[rows.index], rows.intensity, c=rows.value, **style)
    for index in data.index[gains]:
        axes.annotate(f"{data.value[index]:.2f}", (at[index], data.intensity[index]), (0, 7), ha="center",
                      textcoords="offset points", fontsize=7, zorder=4,
                      bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none"})  # fmt: skip
    axes.set_yscale("log")
    axes.grid(axis="y", color="#EEEEEE")
    axes.margins(x=0.08, y=0.1)
    axes.figure.colorbar(shown, ax=axes, label=f"time, {label}", location="bottom", shrink=0.8)


def _marker(order: str) -> str:
    return MARKERS[order].replace("x", "X")  # "x" has no face to colour


def _shortened(text: str, width: int = 72) -> str:
    return text if len(text) <= width else f"{text[: width - 1].rsplit(' ', 1)[0]} …"
