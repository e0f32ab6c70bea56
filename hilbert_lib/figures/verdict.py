"""Figures of the verdict: what is claimed beside what was measured, and where an ordering pays."""

import numpy as np
import pandas as pd
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from hilbert_lib.figures.record import MARKERS

GRID = "#009E73"
AS_CLAIMED, NOT_AS_CLAIMED, CLAIMED = "#0072B2", "#D55E00", "#BBBBBB"


def draw_claimed_and_measured(data: pd.DataFrame, *, source: str) -> Figure:
    """The claimed ranges of ratios of times as bars, the measured cases as points with their intervals, a line a claim.

    Args:
        data: `ledger.claim.ratio_cases`.
        source: where it was measured, for the title.

    Returns:
        The figure.
    """
    claims = list(dict.fromkeys(data.id))
    figure = Figure(figsize=(11, 0.42 * len(claims) + 1.6), layout="constrained")
    axes = figure.subplots()
    left, right = 0.45, max(12.0, 1.2 * data.value.max()) if data.value.notna().any() else 12.0
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
    _plain_ticks(axes.xaxis, [0.5, 1, 2, 4, 8] + [right] * bool(right > 16))
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3)
    axes.set_title(f"Claimed and measured, {source}")
    return figure


def draw_map(data: pd.DataFrame, *, bound: float, line_bytes: int, source: str) -> Figure:
    """Where an ordering pays: row size against arithmetic intensity, coloured by what the fastest order gains.

    Args:
        data: `ledger.kernels.places`, and `grid_places` below it.
        bound: useful FLOP for each byte above which arithmetic binds, by the ceilings of the same run.
        line_bytes: of a cache line.
        source: where it was measured, for the title.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(9.5, 6), layout="constrained")
    axes = figure.subplots()
    data = data.sort_values("value")
    # Works on one place stand side by side.
    spot = data.groupby([data.row_bytes, np.log2(data.intensity).round(0)])
    count, place = spot.value.transform("size"), spot.cumcount()
    at = data.row_bytes * 2 ** (0.2 * (place - (count - 1) / 2))
    norm = TwoSlopeNorm(vmin=min(0.95, data.value.min()), vcenter=1, vmax=max(1.05, data.value.max()))
    for order, rows in data.groupby("order"):
        is_faster = rows.low > 1.01
        style = {"marker": MARKERS[order].replace("x", "X"), "s": 70, "zorder": 3}  # "x" has no face to colour
        style |= {"edgecolors": np.where(is_faster, "black", "#AAAAAA"), "linewidths": np.where(is_faster, 1.4, 0.6)}
        shown = axes.scatter(at[rows.index], rows.intensity, c=rows.value, cmap="RdBu_r", norm=norm, **style)
        axes.scatter([], [], marker=style["marker"], color="white", edgecolors="black", label=order)
        for index in rows.index[is_faster]:
            axes.annotate(f"{rows.value[index]:.2f}", (at[index], rows.intensity[index]), (0, 7), ha="center",
                          textcoords="offset points", fontsize=8,
                          color=GRID if rows.work[index] == "window on a grid" else "black")  # fmt: skip
    sizes = sorted(data.row_bytes.unique())
    axes.set(xscale="log", yscale="log", xlabel="bytes of one head's row", ylabel="useful FLOP for each useful byte")
    axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    _plain_ticks(axes.xaxis, sizes)
    axes.axhline(bound, color="black", ls="--", lw=0.8)
    axes.annotate("arithmetic binds above, bytes below", (sizes[-1] * 1.55, bound), (0, -10), ha="right",
                  textcoords="offset points", fontsize=8)  # fmt: skip
    axes.axvline(line_bytes * 2**-0.5, color="black", ls=":", lw=0.8)
    axes.annotate(" rows of whole lines", (line_bytes * 2**-0.5, axes.get_ylim()[0]), (2, 4),
                  textcoords="offset points", fontsize=8)  # fmt: skip
    figure.colorbar(shown, ax=axes, label="time, linear or raster over the fastest order")
    title = "the fastest order; framed where faster by a per cent; gains in green: attention to a window on a grid"
    figure.legend(loc="outside lower center", ncols=7, title=title)
    axes.set_title(f"Where an ordering pays, {source}")
    return figure


def _shortened(text: str, width: int = 72) -> str:
    return text if len(text) <= width else f"{text[: width - 1].rsplit(' ', 1)[0]} …"


def _plain_ticks(axis, values: list[float]) -> None:
    axis.set_ticks(values)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
