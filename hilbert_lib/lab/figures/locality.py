"""Figures of the cache model: which bytes are read, how many units that touches, and what a cache can reuse."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from hilbert_lib.lab.cache.cache import LINE_BYTES, SECTOR_BYTES, Storage, branch_rows, units_touched
from hilbert_lib.lab.cache.lru import kernel_trace, lru_hit_rates
from hilbert_lib.lab.cache.sweeps import compared_orderings, storage_map
from hilbert_lib.lab.figures.axes import panel_grid
from hilbert_lib.lab.figures.record import COLOURS, MARKERS
from hilbert_lib.pattern import DilatedPattern

LAYOUT_TITLES = {"bshd": "(batch, seq, heads, dim)", "bhsd": "(batch, heads, seq, dim)"}
UNIT_STYLES = {
    "sector": ("#D55E00", "o"),
    "fetch": ("#009E73", "D"),
    "line": ("#0072B2", "s"),
    "page": ("#000000", "^"),
}
CLAIMED_LINES = {"C1": (25, 40, "#e3edf7"), "C2": (40, 60, "#cfe0f1")}  # claim: least and most % fewer, and a shade
ATTENTION_BYTES = 128  # of the smallest row that attention has: a head of 64 in half precision
GPU_STYLES = [("#009E73", "o", "-"), ("#0072B2", "s", "-"), ("#D55E00", "^", "-"), ("#000000", "x", "--")]
LINE_STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]


def draw_storage_map(data: pd.DataFrame, *, row_bytes: int) -> Figure:
    """The first slots of storage as boxes, filled where the row is read, with a frame a line of 128 bytes.

    Args:
        data: ordering, slot, read, as `storage_map` gives them.
        row_bytes: bytes a row.
    """
    names = list(dict.fromkeys(data.ordering))
    figure = Figure(figsize=(9, 0.5 + 0.42 * len(names)), layout="constrained")
    _storage_strips(figure.subplots(), data, names, row_bytes)
    return figure


def _storage_strips(axes: Axes, data: pd.DataFrame, names: list[str], row_bytes: int) -> None:
    end = (data.slot.max() + 1) * row_bytes
    step = -(-end // (8 * LINE_BYTES)) * LINE_BYTES  # nine ticks at most
    for place, name in enumerate(names):
        rows = data[data.ordering == name]
        read = rows[rows.read]
        spans = ((slot * row_bytes // LINE_BYTES, -(-(slot + 1) * row_bytes // LINE_BYTES)) for slot in read.slot)
        lines = sorted({line for span in spans for line in range(*span)})
        axes.broken_barh(
            [(slot * row_bytes, row_bytes) for slot in rows.slot], (place - 0.3, 0.6), fc="white", ec="0.8"
        )
        axes.broken_barh([(slot * row_bytes, row_bytes) for slot in read.slot], (place - 0.3, 0.6), fc=COLOURS[name])
        axes.broken_barh(
            [(n * LINE_BYTES, LINE_BYTES) for n in lines], (place - 0.38, 0.76), fc="none", ec="black", lw=1.3
        )
        axes.text(end * 1.01, place, f"{len(read)} rows in {len(lines)} lines", va="center")
    axes.set(
        xlim=(0, end), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=_labels(names),
        xticks=range(0, end + 1, step), xlabel="address in the storage of one head [bytes]",
        title=f"Rows of {row_bytes} B that are read (filled), and the {LINE_BYTES}-byte lines they pull in (framed)",
    )  # fmt: skip
    axes.tick_params(left=False)


def draw_reading(
    *, length: int, row_bytes: int, dilation: int, ordering: str, cache_kib: int, capacities_kib: list[int]
) -> Figure:
    """One head's branch read through one ordering beside the linear one: which lines come along, and what is reused.

    k and v of one head, one segment of the whole length, a kernel of one program at a time: the model of
    `hilbert_lib.lab.cache`, not a measurement.

    Args:
        length: tokens.
        row_bytes: bytes a row.
        dilation: rate of the branch, at most the length.
        ordering: a name of `compared_orderings`.
        cache_kib: capacity at which the hit rate is read off [KiB].
        capacities_kib: capacities of the curve [KiB].
    """
    every = compared_orderings(length, dilation)
    chosen = {name: every[name] for name in dict.fromkeys(("linear", ordering))}
    pattern = DilatedPattern((length,), (dilation,))
    figure = Figure(figsize=(10, 6))  # placed by hand: a layout engine would double the time that a slider waits
    figure.subplots_adjust(left=0.09, right=0.84, bottom=0.08, top=0.95, hspace=0.5, wspace=0.25)
    panels = figure.subplot_mosaic([["strips", "strips"], ["units", "hits"]], height_ratios=(1, 2.4))
    slots = storage_map(chosen, pattern, slots=max(16, 1024 // row_bytes))
    _storage_strips(panels["strips"], slots, list(chosen), row_bytes)
    shift = np.linspace(-0.2, 0.2, 2) if len(chosen) == 2 else [0]
    found = []
    for place, (name, order) in enumerate(chosen.items()):
        storage = Storage(order, row_bytes, layout="bhsd")
        addresses = storage.addresses(branch_rows(storage, pattern).positions, head=0)
        fewest = len(addresses) * row_bytes
        excess = [units_touched(addresses, row_bytes, u) / -(-fewest // u) for u in (SECTOR_BYTES, LINE_BYTES)]
        bars = panels["units"].bar(np.arange(2) + shift[place], excess, 0.36, color=COLOURS[name], label=name)
        panels["units"].bar_label(bars, fmt="{:.3g}")
        rates = lru_hit_rates(kernel_trace(storage, pattern), [1024 * kib for kib in (cache_kib, *capacities_kib)])
        percent = 100 * rates.hit_rate
        found.append(f"{name} {percent[0]:.1f} %")
        look = {"color": COLOURS[name], "marker": MARKERS[name], "fillstyle": "none"}
        panels["hits"].plot(capacities_kib, percent[1:], linestyle=LINE_STYLES[place], linewidth=4 - 2 * place, **look)
    panels["units"].axhline(1, color="black", linewidth=0.8, linestyle=":")
    panels["units"].set_xticks(range(2), [f"sectors ({SECTOR_BYTES} B)", f"lines ({LINE_BYTES} B)"])
    panels["units"].set(ylabel="units touched / fewest", title=f"all {length} tokens, dilation {dilation}")
    panels["units"].margins(y=0.3)
    panels["units"].legend(loc="upper left", ncols=2)
    panels["hits"].axvline(cache_kib, color="black", linewidth=0.8, linestyle=":")
    panels["hits"].set_xscale("log", base=2)
    panels["hits"].xaxis.set_major_formatter("{x:g}")
    panels["hits"].set(xlabel="cache [KiB]", ylabel="hit rate [%]", ylim=(-3, 103))
    panels["hits"].set_title(f"LRU model, {cache_kib} KiB: {', '.join(found)}")
    return figure


def draw_unit_counts(data: pd.DataFrame, *, dilation: int) -> Figure:
    """Units touched over the fewest possible, by ordering and row size, a panel a layout and unit.

    Args:
        data: table of `count_units`.
        dilation: the rate to show.

    Raises:
        ValueError: if the rate was not counted.
    """
    if dilation not in set(data.dilation):
        counted = ", ".join(map(str, sorted(data.dilation.unique())))
        raise ValueError(f"dilation must be one that was counted ({counted}), got {dilation}")
    shown = data[data.dilation == dilation].assign(excess=lambda table: table.touched / table.fewest)
    figure = Figure(figsize=(9, 12), layout="constrained")
    panels = figure.subplots(len(UNIT_STYLES), len(LAYOUT_TITLES), sharex=True, sharey=True)
    scale = LogNorm(1, max(2, shown.excess.max()))
    for axes_row, unit in zip(panels, UNIT_STYLES, strict=True):
        for axes, (layout, layout_title) in zip(axes_row, LAYOUT_TITLES.items(), strict=True):
            panel = shown[(shown.layout == layout) & (shown.unit == unit)]
            shades = _heat(axes, panel, "ordering", "row_bytes", "excess", "{:.3g}", scale=scale)
            axes.set_title(f"{_unit_title(panel)}, {layout_title}")
    for axes in panels[-1]:
        axes.set_xlabel("row of one head [bytes]")
    bar = figure.colorbar(shades, ax=panels, location="bottom", shrink=0.6, aspect=40, format="{x:g}")
    bar.set_label("units touched for each unit's worth of bytes that is read (1 is the fewest)")
    bar.ax.xaxis.set_ticks([2**k for k in range(int(np.log2(scale.vmax)) + 1)])
    bar.ax.minorticks_off()
    figure.suptitle(f"Units touched at dilation {dilation}, as multiples of the fewest possible")
    return figure


def draw_savings(data: pd.DataFrame, *, unit: str = "line", layout: str = "bhsd") -> Figure:
    """Units saved against the linear order by row size and dilation, a panel an ordering.

    Args:
        data: table of `saving_against_linear`.
        unit: "sector", "fetch", "line" or "page".
        layout: "bshd" or "bhsd".
    """
    shown = data[(data.unit == unit) & (data.layout == layout)].assign(percent=lambda table: 100 * table.saving)
    names = list(dict.fromkeys(shown.ordering))
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    panels = figure.subplots(2, -(-len(names) // 2), sharex=True, sharey=True)
    for axes, name, label in zip(panels.flat, names, _labels(names), strict=True):
        of_one = shown[shown.ordering == name]
        shades = _heat(axes, of_one, "row_bytes", "dilation", "percent", "{:.0f}", scale=Normalize(0, 100))
        axes.set_title(label.replace("\n", " "))
    for axes in panels[-1]:
        axes.set_xlabel("dilation rate [tokens]")
    for axes in panels[:, 0]:
        axes.set_ylabel("row of one head [bytes]")
    title = f"{_unit_title(shown)} saved against the linear order"
    figure.colorbar(shades, ax=panels, location="bottom", shrink=0.6, aspect=40, label=f"{title} [%]")
    figure.suptitle(f"{title}, layout {LAYOUT_TITLES[layout]}")
    return figure


def draw_hit_rates(data: pd.DataFrame, *, title: str) -> Figure:
    """LRU hit rate by capacity, a line an ordering, a panel a row size.

    Args:
        data: table of `hit_rates`.
        title: what was simulated.
    """
    sizes = sorted(data.row_bytes.unique())
    names = list(dict.fromkeys(data.ordering))
    figure, panels = panel_grid(len(sizes), 2, (9 / min(2, len(sizes)), 3.3), (0, 0.8), sharey=True)
    for axes, size in zip(panels, sizes, strict=True):
        panel = data[data.row_bytes == size].pivot(index="capacity_bytes", columns="ordering", values="hit_rate")
        panel *= 100
        for place, (name, label) in enumerate(zip(names, _labels(names), strict=True)):
            # Later lines are thinner, so that one that is covered still shows at its edges.
            axes.plot(
                panel.index / 1024, panel[name], label=label, color=COLOURS[name], marker=MARKERS[name],
                linestyle=LINE_STYLES[place], linewidth=5 - 0.6 * place, markersize=9 - place, fillstyle="none",
            )  # fmt: skip
        one = ": every ordering on one line" if (panel.max(axis=1) == panel.min(axis=1)).all() else ""
        axes.set(title=f"rows of {size} B{one}", xlabel="cache [KiB]", ylim=(-3, 103))
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("hit rate [%]")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(title)
    return figure


def draw_l2_hit_rates(data: pd.DataFrame, *, title: str) -> Figure:
    """Predicted L2 hit rates by ordering and GPU, a panel a row size.

    Args:
        data: table of `l2_hit_rates`.
        title: what was simulated.
    """
    shown = data.assign(percent=100 * data.hit_rate, gpu=data.gpu.str.replace(", ", "\n"))
    sizes = sorted(shown.row_bytes.unique())
    figure, panels = panel_grid(len(sizes), 2, (9 / min(2, len(sizes)), 3.3), (0, 0.8), sharey=True)
    scale = Normalize(shown.percent.min() - 1, 100)
    for axes, size in zip(panels, sizes, strict=True):
        panel = shown[shown.row_bytes == size]
        shades = _heat(axes, panel, "ordering", "gpu", "percent", "{:.1f}", scale=scale)
        axes.set_title(f"rows of {size} B")
    figure.colorbar(shades, ax=panels, location="bottom", shrink=0.6, aspect=40, label="L2 hit rate [%]")
    figure.suptitle(title)
    return figure


def draw_l2_by_keys(data: pd.DataFrame, *, row_bytes: int) -> Figure:
    """Predicted L2 hit rate and memory traffic by the number of keys, a line a GPU.

    Args:
        data: table of `l2_hit_rates_of_whole_rows`.
        row_bytes: bytes a row.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, rows), (colour, marker, line) in zip(data.groupby("gpu", sort=False), GPU_STYLES, strict=True):
        style = {"label": name, "color": colour, "marker": marker, "linestyle": line, "fillstyle": "none"}
        left.plot(rows["keys"], 100 * rows.hit_rate, **style)
        right.plot(rows["keys"], rows.memory_ratio, **style)
    left.set(title="L2 hit rate", ylabel="hit rate [%]")
    right.set(title="traffic (1 is the fewest)", ylabel="bytes from memory / bytes of k and v", yscale="log")
    right.yaxis.set_major_formatter("{x:g}")
    for axes in (left, right):
        axes.set_xlabel("keys of one head in one segment [rows]")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(f"Model: rows of {row_bytes} B, every ordering alike; programs of a wave in step")
    return figure


def draw_reach(data: pd.DataFrame, *, heads: int, dilations: str) -> Figure:
    """The most that any ordering, and the Hilbert order, can save against linear, by row size.

    Shaded are the shares of lines that the documents claim, and the rows that attention has.

    Args:
        data: table of `ordering_reach`.
        heads: KV heads that were stored, for the title.
        dilations: which rates the best was taken over, for the title.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    panels = figure.subplots(1, len(LAYOUT_TITLES), sharey=True)
    sizes = sorted(data.row_bytes.unique())  # side by side, as between 128 and 256 some are too near for their names
    narrower = sum(size < ATTENTION_BYTES for size in sizes)
    for axes, (layout, layout_title) in zip(panels, LAYOUT_TITLES.items(), strict=True):
        for least, most, shade in CLAIMED_LINES.values():
            axes.axhspan(least, most, color=shade, lw=0)
        if narrower < len(sizes):
            axes.axvspan(narrower - 0.5, len(sizes) - 0.5, hatch="//", fc="none", ec="0.75", lw=0, zorder=1)
        for unit, (colour, marker) in UNIT_STYLES.items():
            rows = data[(data.layout == layout) & (data.unit == unit)]
            place = [sizes.index(size) for size in rows.row_bytes]
            style = {"color": colour, "marker": marker}
            axes.plot(place, 100 * rows.best, label=f"{_unit_title(rows)}, best ordering", **style)
            axes.plot(
                place,
                100 * rows.hilbert,
                label=f"{_unit_title(rows)}, Hilbert",
                fillstyle="none",
                ls=":",
                **style,
            )
        axes.set(title=layout_title, xlabel="row of one head [bytes]", xlim=(-0.5, len(sizes) - 0.5), ylim=(-4, 104))
        axes.set_xticks(range(len(sizes)), sizes)
        top = axes.secondary_xaxis("top")
        top.set_xticks(range(len(sizes)), [f"{size / 2:g}" for size in sizes])
        top.set_xlabel("head_dim in bf16")
        top.minorticks_off()
        axes.grid(alpha=0.3)
    for claim, (least, most, _) in CLAIMED_LINES.items():
        panels[0].text(1.7, least + 4, f"{claim}: {least} to {most} % fewer lines", va="center", fontsize=8)
    if narrower < len(sizes):
        told = {"fontsize": 8, "bbox": {"fc": "white", "ec": "none", "pad": 1.5}}
        panels[0].text(narrower - 0.4, 10, "rows that attention has", **told)
    panels[0].set_ylabel("largest saving against the linear order [%]")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(
        f"Where an ordering can change the number of units at all ({heads} heads, best of dilations {dilations})"
    )
    return figure


def _unit_title(rows: pd.DataFrame) -> str:
    unit = rows.unit.iloc[0]
    return f"{'fetches' if unit == 'fetch' else f'{unit}s'} ({rows.unit_bytes.iloc[0]} B)"


def _labels(names: list[str]) -> list[str]:
    """Names as a reader should see them: residue-major is another storage at every rate, the others are one for all."""
    return [f"{name}\n(of this rate)" if name == "residue" else name for name in names]


def _heat(
    axes: Axes, data: pd.DataFrame, rows: str, columns: str, values: str, text: str, *, scale: Normalize
) -> AxesImage:
    """A table as shaded cells with their numbers; rows and columns keep the order of the data."""
    table = data.pivot(index=rows, columns=columns, values=values)
    table = table.loc[list(dict.fromkeys(data[rows])), list(dict.fromkeys(data[columns]))]
    shades = axes.imshow(table.to_numpy(), cmap="Blues", norm=scale, aspect="auto")
    for i, line in enumerate(table.to_numpy()):
        for j, value in enumerate(line):
            colour = "white" if scale(value) > 0.6 else "black"
            axes.text(j, i, text.format(value), ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(table.shape[1]), table.columns)
    axes.set_yticks(range(table.shape[0]), _labels(list(table.index)))
    axes.tick_params(length=0)
    return shades
