"""The figure of the verdict: what is claimed beside what was measured."""

from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

AS_CLAIMED, NOT_AS_CLAIMED, CLAIMED = "#0072B2", "#D55E00", "#BBBBBB"
LEFT, RIGHT, WIDTH = 0.45, 40.0, 72


def draw_claimed_and_measured(data: pd.DataFrame, *, title: str) -> Figure:
    """The claimed ranges of ratios of times as bars, the measured `ratio_cases` with their intervals."""
    claims = data.drop_duplicates("id")
    figure = Figure(figsize=(11, 0.46 * len(claims) + 1.6), layout="constrained")
    axes = figure.subplots()
    for line, (_, rows) in enumerate(data.groupby("id", sort=False)):
        ranges = rows[["claimed_least", "claimed_most"]].drop_duplicates().astype(float).clip(LEFT, RIGHT)
        axes.barh(line, ranges.claimed_most - ranges.claimed_least, 0.7, ranges.claimed_least, color=CLAIMED, alpha=0.6)
        # Spread over the line's height, so that cases on one value do not hide each other.
        at = line + np.linspace(-0.3, 0.3, len(rows)) * (len(rows) > 1)
        colours = np.where(rows.as_claimed.astype(bool), AS_CLAIMED, NOT_AS_CLAIMED)
        axes.hlines(at, rows.low, rows.high, colors=colours, lw=1)
        axes.scatter(rows.value, at, c=colours, s=9, zorder=3)
    legend = {"claimed": CLAIMED, "measured, as claimed": AS_CLAIMED, "measured, not as claimed": NOT_AS_CLAIMED}
    for label, colour in legend.items():
        axes.scatter([], [], color=colour, marker="s" if label == "claimed" else "o", label=label)
    axes.axvline(1, color="black", lw=0.8)
    labels = [fill(f"{each.id}  {each.claim}", WIDTH) for each in claims.itertuples()]
    axes.set(yticks=range(len(claims)), yticklabels=labels, ylim=(len(claims) - 0.5, -0.5))
    axes.set(xscale="log", xlim=(LEFT, RIGHT), xlabel="times as fast as what it is compared with")
    axes.set_xticks(ticks := [0.5, 1, 2, 4, 8, 16, 32], [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(title)
    return figure
