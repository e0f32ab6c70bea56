"""Figures of how times and memory are measured, and of tests that grow until a limit."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.axes import plain_ticks

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
BACKEND_STYLES = (("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#56B4E9", "v"))
MIB = 2**20


def draw_samples(data: pd.DataFrame, *, warmup: int, source: str) -> Figure:
    """The time of each call in turn, and how the calls after the warm-up are distributed.

    Args:
        data: columns call (from 1) and ms.
        warmup: calls that are left out.
        source: hardware, for the title.
    """
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    series, counts = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    kept = data[data.call > warmup].ms
    series.plot(data.call, data.ms, ".", color=BLUE, markersize=5)
    series.axvspan(0.5, warmup + 0.5, color="#EEEEEE", label="warm-up, left out")
    counts.hist(kept, bins=np.geomspace(kept.min(), kept.max(), 25), orientation="horizontal", color=BLUE, alpha=0.6)
    marks = {
        "mean": (kept.mean(), ORANGE, ":"),
        "median": (kept.median(), GREEN, "-"),
        "best": (kept.min(), GREY, "--"),
    }
    for name, (value, colour, line) in marks.items():
        for axes in (series, counts):
            axes.axhline(value, color=colour, linestyle=line, linewidth=1.4, label=f"{name} {value:.3g} ms")
    low, high = kept.quantile([0.25, 0.75])
    series.axhspan(low, high, color=GREEN, alpha=0.15, label=f"interquartile range {high - low:.2g} ms")
    series.set_yscale("log")
    plain_ticks(series, data.ms)
    series.set(xlabel="call", ylabel="time of one call (ms)", xlim=(0.5, len(data) + 0.5))
    counts.set(xlabel="calls")
    series.set_title("Each call in turn")
    counts.set_title("After the warm-up")
    figure.legend(*series.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(f"One call is no measurement: {source}")
    return figure


def draw_pairs(data: pd.DataFrame, *, a: str, b: str, ratio: float, low: float, high: float, source: str) -> Figure:
    """The samples of two sides that were timed in turn, and the ratio within each pair.

    Args:
        data: columns pair (from 1), a_ms, b_ms.
        a, b: names of the sides.
        ratio, low, high: median of the ratios and its 95 % interval.
        source: hardware, for the title.
    """
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    times.plot(data.pair, data.a_ms, "o-", color=BLUE, markersize=4, linewidth=0.8, label=a)
    times.plot(data.pair, data.b_ms, "s-", color=ORANGE, markersize=4, linewidth=0.8, label=b)
    times.set(xlabel="pair", ylabel="time of one call (ms)", title="Both sides see the same machine", ylim=(0, None))
    times.legend()
    ratios.plot(data.pair, data.a_ms / data.b_ms, "o", color=GREY, markersize=4, label="one pair")
    ratios.axhline(ratio, color=GREEN, label=f"median {ratio:.3f}")
    ratios.axhspan(low, high, color=GREEN, alpha=0.2, label=f"95 % interval {low:.3f} to {high:.3f}")
    ratios.axhline(1, color="black", linewidth=0.8, linestyle=":")
    ratios.set(xlabel="pair", ylabel=f"time of {a} / time of {b}", title="What is kept: the ratio within each pair")
    ratios.legend()
    figure.suptitle(f"A paired comparison: {source}")
    return figure


def draw_memory(data: pd.DataFrame, *, source: str) -> Figure:
    """Predicted and measured memory of a call by length, a panel a direction; backends stand side by side.

    A cross on the prediction is a side without a measurement, and its words say why.

    Args:
        data: `predicted_memory` of `hilbert_lib.lab.guarded.cases`; without a status, of measured sides.
        source: hardware, for the title.
    """
    directions = list(data.direction.unique())
    figure = Figure(figsize=(4.8 * len(directions) + 1.5, 3.9), layout="constrained")
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    backends = list(data.backend.unique())
    styles = dict(zip(backends, BACKEND_STYLES * len(data), strict=False))
    for axes, direction in zip(panels, directions, strict=True):
        for backend, rows in data[data.direction == direction].groupby("backend", sort=False):
            colour, marker = styles[backend]
            rows = rows.sort_values("length")
            beside = rows.length * 1.12 ** (backends.index(backend) - (len(backends) - 1) / 2)
            axes.plot(beside, rows.predicted_bytes / MIB, "-", color=colour, linewidth=1.2)
            axes.plot(beside, rows.peak_bytes / MIB, marker, color=colour, markersize=7, label=backend)
            lost = rows[rows.peak_bytes.isna()]
            axes.plot(
                beside[lost.index], lost.predicted_bytes / MIB, "x", color=colour, markersize=9, markeredgewidth=2
            )
            for x, row in zip(beside[lost.index], lost.itertuples(), strict=True):
                style = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
                axes.annotate(row.status, (x, row.predicted_bytes / MIB), (-8, 3), **style)
        _length_axis(axes, data.length)
        axes.set_yscale("log")
        axes.set_title(direction)
        axes.grid(axis="y", color="#DDDDDD")
    panels[0].set_ylabel("memory of a call, inputs apart (MiB)")
    plain_ticks(panels[0], pd.concat([data.peak_bytes, data.predicted_bytes]) / MIB)
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles,
        title="predicted (lines)\nmeasured (markers)\nnot measured (crosses)",
        loc="outside right center",
    )
    figure.suptitle(f"Memory, predicted before the call and measured: {source}")
    return figure


def draw_progressive(data: pd.DataFrame, *, limit: str, source: str) -> Figure:
    """A progressive test: the memory predicted at each length, what was measured, and the limit that it kept.

    Args:
        data: columns length, room_bytes, predicted_bytes, measured_bytes, status, as `ProgressiveResult.table` gives
            them.
        limit: what stopped it.
        source: hardware, for the title.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(data.length, data.predicted_bytes / MIB, "-", color=GREY, label="predicted")
    axes.plot(data.length, data.measured_bytes / MIB, "o", color=BLUE, markersize=7, label="measured")
    for status, rows in data[data.status != "ran"].groupby("status"):
        style = {"color": ORANGE, "markersize": 10, "markeredgewidth": 2.5, "label": status}
        axes.plot(rows.length, rows.predicted_bytes / MIB, "x", **style)
    axes.plot(data.length, data.room_bytes / MIB, "_--", color=ORANGE, markersize=12, label="allowed at that moment")
    _length_axis(axes, data.length)
    axes.set_yscale("log")
    plain_ticks(axes, pd.concat([data.predicted_bytes, data.room_bytes]) / MIB)
    axes.set(ylabel="memory with inputs (MiB)", title=f"Longer until the next would not fit: {source}")
    axes.text(0.5, -0.24, limit, transform=axes.transAxes, ha="center", va="top", fontsize=8, wrap=True)
    axes.legend()
    return figure


def _length_axis(axes: Axes, lengths: pd.Series) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(lengths.unique())
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xticks(ticks, [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("tokens")
