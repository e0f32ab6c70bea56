"""Figures of what rings of GPUs measured: the sides of a sweep beside each other, and scaling."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.axes import panel_grid, short
from hilbert_lib.lab.figures.plots import HATCHES, PALETTE, SHAPES

STYLES = list(zip(PALETTE, HATCHES, SHAPES, strict=True))


def draw_sides(data: pd.DataFrame, *, source: str) -> Figure:
    """Forward and backward times of every side, with quartiles, a panel a work, and what each sends and hides.

    Args:
        data: `ring.sweeps.ring_table` of works that many sides computed.
        source: where it was measured, for the title.
    """
    works = list(data.groupby(["sweep", "tokens", "is_causal"], sort=False))
    figure, panels = panel_grid(len(works), 2, (6.5, 3.6), (0, 0))
    for axes, ((_, tokens, is_causal), work) in zip(panels, works, strict=True):
        place = np.arange(len(work))
        for name, at, (colour, hatch, _) in (("forward", -0.2, STYLES[0]), ("backward", 0.2, STYLES[1])):
            times = work[f"{name}_ms"]
            spread = times - work[f"{name}_low"], work[f"{name}_high"] - times
            axes.barh(place + at, times, 0.38, label=name, color=colour, hatch=hatch, edgecolor="white")
            axes.errorbar(times, place + at, xerr=spread, fmt="none", ecolor="black", lw=1)
        for y, row in zip(place, work.itertuples(), strict=True):
            hidden = "" if pd.isna(row.hidden_forward) else f", {row.hidden_forward:.0%} hidden"
            longest = np.nanmax([row.forward_high, row.backward_high])
            axes.annotate(
                f"{row.sent_mb:,.1f} MB{hidden}",
                (longest, y),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(place, work.side)
        axes.invert_yaxis()
        ranks, most = work.ranks.iloc[0], work[["forward_ms", "backward_ms"]].max().max()
        fewest = work[["forward_ms", "backward_ms"]].min().min()
        axes.set(xlabel="slowest rank [ms]", xlim=(0, 1.6 * most))
        if most > 20 * fewest:
            axes.set(xscale="log", xlim=(fewest / 2, most * (most / fewest) ** 0.45))
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"{short(tokens)} tokens on {ranks} GPUs{', causal' if is_causal else ''}")
        axes.grid(axis="x", color="#DDDDDD")
        axes.set_axisbelow(True)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    figure.suptitle(f"Ways to exchange (median and quartiles; sent and hidden: forward), {source}")
    return figure


def draw_efficiency(data: pd.DataFrame, *, source: str) -> Figure:
    """What a GPU does in a second beside what it does on the fewest GPUs, by their number.

    Args:
        data: `ring.sweeps.efficiency`.
        source: where it was measured, for the title.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for ((sweep, tokens), rows), (colour, _, marker) in zip(data.groupby(["sweep", "tokens"]), STYLES, strict=False):
        what = "a GPU" if sweep == "weak" else "in all"
        label = f"{sweep}: {short(tokens)} tokens {what}"
        line = "-" if sweep == "weak" else "--"
        axes.plot(rows.ranks, 100 * rows.efficiency, color=colour, marker=marker, ls=line, label=label)
    axes.axhline(95, color="0.6", lw=1, ls=":")
    axes.annotate("95 %", (data.ranks.min(), 95), xytext=(2, 3), textcoords="offset points", fontsize=8, color="0.4")
    axes.set(xlabel="GPUs", ylabel="tokens a second and GPU,\nof those on the fewest [%]", ylim=(0, 110))
    axes.set_xticks(sorted(data.ranks.unique()))
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend()
    axes.set_title(f"Scaling, forward and backward, {source}")
    return figure
