"""Figures of notebook 06: speeds, the roofline, what a layout changes, and the documents' ratios beside ours."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.lab.cache.predicted import model_errors
from hilbert_lib.lab.figures.axes import panel_grid, powers_of_two
from hilbert_lib.lab.figures.record import COLOURS, MARKERS
from hilbert_lib.lab.sweeps.kernels import NO_TABLE

# Okabe and Ito's colours, a hatch and a marker each.
STYLES = [
    ("#D55E00", "", "o"),
    ("#0072B2", "//", "s"),
    ("#56B4E9", "..", "^"),
    ("#009E73", "\\\\", "D"),
    ("#E69F00", "xx", "v"),
    ("#CC79A7", "--", "P"),
    ("#000000", "", "x"),
    ("#999999", "++", "*"),
    ("#882255", "oo", "h"),
    ("#44AA99", "**", "<"),
    ("#F0E442", "//", ">"),
    ("#332288", "..", "p"),
    ("#AA4499", "\\\\", "X"),
    ("#661100", "xx", "d"),
]
# Every figure of speeds gives a backend its own colour, and others' ways theirs; a hatch and a marker go with each.
LOOKS = {colour: (colour, hatch, marker) for colour, hatch, marker in STYLES}
OTHERS = {"torchscale": "#CC79A7", "fkodom": "#000000", "triton, decoding": "#661100"}
BACKEND_STYLES = {
    name: LOOKS.get(colour, (colour, "", "o"))
    for name, colour in ({name: backend.colour for name, backend in BACKENDS.items()} | OTHERS).items()
}
LAYOUT_STYLES = {name: (COLOURS[name], MARKERS[name]) for name in COLOURS}
LAYOUT_STYLES |= {NO_TABLE: ("#999999", "*"), "hilbert per segment": ("#882255", "h")}
FEWEST_BYTES = 2**17  # the kernels' own code is 52 to 81 KiB, which the cache model leaves out


def draw_speeds(data: pd.DataFrame, *, length: int, source: str) -> Figure:
    """Useful TFLOP/s of every backend at one length, with its quartiles; a panel a direction and head size.

    Args:
        data: `side_table` of the sweep "backends".
        length: tokens.
        source: where it was measured, for the title.
    """
    shown = data[data.length == length]
    shown = shown.assign(work=shown.pattern.str.replace(" ", "\n") + np.where(shown.is_causal, "\ncausal", ""))
    names, works = _triton_first(shown.name), list(dict.fromkeys(shown.work))
    sizes = sorted(shown.head_dim.unique(), reverse=True)
    figure = Figure(figsize=(max(6, len(works)) * len(sizes), 7.5), layout="constrained")
    panels = figure.subplots(2, len(sizes), squeeze=False, sharex=True)
    width = 0.85 / len(names)
    for axes_row, direction in zip(panels, ("forward", "backward"), strict=True):
        for axes, size in zip(axes_row, sizes, strict=True):
            panel = shown[(shown.direction == direction) & (shown.head_dim == size)]
            table = panel.pivot(index="work", columns="name", values="tflop_per_s").reindex(works, columns=names)
            # The bars of a work stand side by side: a backend that cannot serve it leaves no gap.
            place = table.notna().cumsum(axis=1).sub((table.notna().sum(axis=1) + 1) / 2, axis=0)
            for name in names:
                colour, hatch, _ = BACKEND_STYLES[name]
                rows = panel[panel.name == name].set_index("work").reindex(works)
                at = np.arange(len(works)) + place[name] * width
                axes.bar(at, rows.tflop_per_s, width, label=name, color=colour, hatch=hatch, edgecolor="white")
                axes.errorbar(at, rows.tflop_per_s, _rate_spread(rows), fmt="none", ecolor="black", lw=1)
            axes.set(title=f"{direction}, head_dim {size}", xticks=range(len(works)), xticklabels=works)
            axes.grid(axis="y", color="#DDDDDD")
            axes.set_axisbelow(True)
        axes_row[0].set_ylabel("useful work [TFLOP/s]")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(f"Speed at {length} tokens (median and quartiles), {source}")
    return figure


def draw_speeds_by_length(data: pd.DataFrame, *, pattern: str, source: str) -> Figure:
    """Useful TFLOP/s by length, a line a backend, a panel a direction and head size, not causal.

    Args:
        data: `side_table` of the sweep "backends".
        pattern: which one.
        source: where it was measured, for the title.
    """
    shown = data[(data.pattern == pattern) & ~data.is_causal]
    names, sizes = _triton_first(shown.name), sorted(shown.head_dim.unique(), reverse=True)
    figure = Figure(figsize=(5 * len(sizes), 7), layout="constrained")
    panels = figure.subplots(2, len(sizes), squeeze=False, sharex=True)
    for axes_row, direction in zip(panels, ("forward", "backward"), strict=True):
        for axes, size in zip(axes_row, sizes, strict=True):
            panel = shown[(shown.direction == direction) & (shown.head_dim == size)]
            for name in names:
                colour, _, marker = BACKEND_STYLES[name]
                rows = panel[panel.name == name].sort_values("length")
                style = {"label": name, "color": colour, "marker": marker, "capsize": 2}
                axes.errorbar(rows.length, rows.tflop_per_s, _rate_spread(rows), **style)
            axes.set(title=f"{direction}, head_dim {size}", ylim=(0, None))
            powers_of_two(axes, panel.length)
        axes_row[0].set_ylabel("useful work [TFLOP/s]")
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(f"Speed by length, pattern {pattern}, not causal, {source}")
    return figure


def draw_roofline(data: pd.DataFrame, *, copy_gb_per_s: float, product_tflop_per_s: float, source: str) -> Figure:
    """Rate against useful FLOP per useful byte, under the two ceilings of the same run.

    Args:
        data: name, useful_flop, useful_bytes, median_ms; of any sweeps.
        copy_gb_per_s: measured rate of a copy, in GB/s.
        product_tflop_per_s: measured rate of a matrix product, in TFLOP/s.
        source: where it was measured, for the title.
    """
    intensity = data.useful_flop / data.useful_bytes
    rate = data.useful_flop / data.median_ms / 1e9
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    ridge = product_tflop_per_s / copy_gb_per_s * 1e3
    ends = np.array([min(intensity.min(), ridge) / 2, ridge, max(intensity.max(), ridge) * 2])
    axes.plot(ends, np.minimum(ends * copy_gb_per_s / 1e3, product_tflop_per_s), color="black", lw=2)
    for name in _triton_first(data.name):
        colour, _, marker = BACKEND_STYLES[name]
        rows = data.name == name
        axes.scatter(intensity[rows], rate[rows], color=colour, marker=marker, s=28, alpha=0.8, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="useful FLOP for each useful byte", ylabel="useful work [TFLOP/s]",
        title=f"Roofline, {source}\nceilings: copy {copy_gb_per_s / 1e3:.2f} TB/s, "
        f"matrix product {product_tflop_per_s:.0f} TFLOP/s",
    )  # fmt: skip
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.legend(ncols=2)
    return figure


def draw_layouts(data: pd.DataFrame, *, x: str, panel: str, source: str) -> Figure:
    """Time of linear storage over that of each layout, with its interval, one kernel and one function throughout.

    What linear storage gains that is read without a table, often far off the others, stands above each panel.

    Args:
        data: `ratio_table` of the sweep "layouts" or "decoding".
        x: the column along the axis: "dilation" or "length".
        panel: the column that has a panel a value: "row_bytes", "dilation" or "length".
        source: where it was measured, for the title.
    """
    values = sorted(data[panel].unique())
    figure, panels = panel_grid(len(values), 3, (4.2, 3.4), (0, 0.8), sharey=True)
    orders = data[data.b != NO_TABLE]
    names = _triton_first(orders.b)
    for axes, value in zip(panels, values, strict=True):
        part, without = (table[table[panel] == value] for table in (orders, data[data.b == NO_TABLE]))
        for place, name in enumerate(names):
            rows = part[part.b == name].sort_values(x)
            colour, marker = LAYOUT_STYLES[name]
            spread = [rows.ratio - rows.low, rows.high - rows.ratio]
            # A little apart, so that markers on one value do not hide each other.
            at = rows[x] * 2 ** (0.08 * (place - len(names) / 2))
            axes.errorbar(at, rows.ratio, spread, color=colour, marker=marker, label=name, lw=1, capsize=2)
        axes.axhline(1, color="black", lw=0.8)
        title = f"{_UNITS[panel][0]} {value}{_UNITS[panel][1]}"
        if len(without):
            title += f"\n({NO_TABLE}: {without.ratio.min():.2f} to {without.ratio.max():.2f})"
        axes.set(title=title, xlabel=_LABELS[x])
        powers_of_two(axes, part[x])
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("time, linear over layout")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(5, len(names)))
    figure.suptitle(f"Above 1 a layout is faster than linear storage read through the same kind of table, {source}")
    return figure


def draw_decoding(data: pd.DataFrame, *, copy_gb_per_s: float, source: str) -> Figure:
    """Useful bytes per second of decoding by layout and dilation: beside the rate of a copy, and over no table's.

    Args:
        data: `side_table` of the sweep "decoding", of one length and number of queries.
        copy_gb_per_s: measured rate of a copy, which reads and writes, in GB/s.
        source: where it was measured, for the title.
    """
    sizes, names = sorted(data.row_bytes.unique()), _triton_first(data.name)
    figure = Figure(figsize=(4.2 * len(sizes), 6.6), layout="constrained")
    panels = figure.subplots(2, len(sizes), squeeze=False, sharey="row")
    for (above, below), size in zip(panels.T, sizes, strict=True):
        of_size = data[data.row_bytes == size].sort_values("dilation").set_index("dilation")
        plain = of_size.gb_per_s[of_size.name == NO_TABLE]
        for name in names:
            rate = of_size.gb_per_s[of_size.name == name]
            colour, marker = LAYOUT_STYLES[name]
            style = {"color": colour, "marker": marker, "label": name, "fillstyle": "none"}
            above.plot(rate.index, rate / 1e3, **style)
            below.plot(rate.index, rate / plain.reindex(rate.index), **style)
        above.axhline(copy_gb_per_s / 1e3, color="black", ls="--", label="copy, reads and writes")
        above.set(title=f"rows of {size} B")
        below.set(xlabel=_LABELS["dilation"])
        for axes in (above, below):
            powers_of_two(axes, data.dilation)
    panels[0, 0].set_ylim(bottom=0)  # of all panels of the row, once all is drawn
    panels[0, 0].set_ylabel("rows that are needed [TB/s]")
    panels[1, 0].set_ylabel(f"the same, over that of {NO_TABLE}")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(names) + 1))
    figure.suptitle(f"Decoding, {data.queries.iloc[0]} of {data.length.iloc[0]} positions asked, {source}")
    return figure


def draw_claims(data: pd.DataFrame, *, source: str) -> Figure:
    """The documents' speed-ups beside those seen: of their two functions, and of one function on two layouts.

    Args:
        data: `claim_table`.
        source: where it was measured, for the title.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    at = np.arange(len(data))
    bars = {
        "claimed": (data.claimed, None, "#999999", "//"),
        "their two functions": (data.functions, "functions", "#0072B2", ".."),
        "one function, two layouts": (data.layouts, "layouts", "#D55E00", ""),
    }
    for place, (label, (values, prefix, colour, hatch)) in enumerate(bars.items()):
        spot = at + 0.27 * (place - 1)
        axes.bar(spot, values, 0.25, label=label, color=colour, hatch=hatch, edgecolor="white")
        if prefix:
            spread = [values - data[f"{prefix}_low"], data[f"{prefix}_high"] - values]
            axes.errorbar(spot, values, spread, fmt="none", ecolor="black", lw=1, capsize=3)
        for x, value in zip(spot, values, strict=True):
            if not np.isnan(value):
                axes.text(x, max(value, 1) * 1.04, f"{value:.2f}", ha="center", fontsize=9)
    labels = [
        f"L={row.length}, dilation {row.dilation}\noutputs differ:\n{row.functions_apart:.0%} | {row.layouts_apart:.0%}"
        for row in data.itertuples()
    ]
    axes.axhline(1, color="black", lw=0.8)
    axes.set(xticks=at, xticklabels=labels, yscale="log", ylabel="time, standard over Hilbert")
    ticks = [0.5, 1, 2, 4, 8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.minorticks_off()
    axes.legend()
    axes.set_title(f"Above 1 the Hilbert side is faster: claimed and seen, {source}")
    return figure


def draw_counters(data: pd.DataFrame, *, source: str) -> Figure:
    """What the cache model predicts against what the hardware counted, a panel a quantity, a point a launch.

    Launches that should read less than FEWEST_BYTES are left out beside others, and the title says how many.

    Args:
        data: `counter_table`.
        source: where it was counted, for the title.
    """
    few = data.predicted_dram_read_bytes < FEWEST_BYTES
    few &= not few.all()
    data = data[~few]
    panels = {
        "l1_sectors": "sectors from L2 to the L1s",
        "l2_found_percent": "found in L2 [%]",
        "dram_read_bytes": "bytes read from memory",
    }
    errors = model_errors(data)
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, (quantity, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for (kernel, rows), (colour, _, marker) in zip(data.groupby("kernel", sort=False), STYLES, strict=False):
            style = {"color": colour, "marker": marker, "facecolors": "none" if marker != "x" else None}
            axes.scatter(rows[quantity], rows[f"predicted_{quantity}"], s=28, label=kernel, **style)
        both = data[[quantity, f"predicted_{quantity}"]]
        ends = both.min(axis=None), both.max(axis=None)
        axes.plot(ends, ends, color="black", lw=0.8)
        if not quantity.endswith("percent"):
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=f"{label}, counted", ylabel="predicted")
        axes.grid(color="#DDDDDD")
        axes.set_axisbelow(True)
        shown = errors[errors.quantity == quantity]
        lines = [f"{row.kernel} {row.median:.1f}, {row.worst:.1f}" for row in shown.itertuples()]
        axes.set_title("\n".join(lines), fontsize=9)
    told = "above each panel the median and the largest error, relative in %, for the share found in points"
    if few.any():
        told += f"\n{few.sum()} launches of less than {FEWEST_BYTES // 2**10} KiB are left out: most of that is code"
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Cache model against counters, {source}\n{told}")
    return figure


_LABELS = {"dilation": "dilation rate [tokens]", "length": "tokens"}
_UNITS = {"row_bytes": ("rows of", " B"), "dilation": ("dilation", ""), "length": ("", " tokens")}


def _triton_first(names: pd.Series) -> list[str]:
    """Each name once; triton, which all are held against, in front."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "triton")


def _rate_spread(rows: pd.DataFrame) -> list[pd.Series]:
    """Distance of the quartiles from the median, as rates: the slow quartile is the low one."""
    return [
        rows.tflop_per_s * (1 - rows.median_ms / rows.high_ms),
        rows.tflop_per_s * (rows.median_ms / rows.low_ms - 1),
    ]
