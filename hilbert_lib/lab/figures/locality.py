"""Pictures of the cache model: what lies in storage, what a branch reads of it, and what comes along."""

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hilbert_lib.lab.cache.cache import LINE_BYTES, SECTOR_BYTES, Storage, branch_rows, row_units, units_touched
from hilbert_lib.lab.cache.l2 import kernel_trace, lru_hit_rates
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.figures.plots import LOOKS, by_hand
from hilbert_lib.patterns.dilated import DilatedPattern


def draw_storage_map(data: pd.DataFrame, *, row_bytes: int, title: str) -> Figure:
    """The first slots of storage as boxes, filled where the row is read, with a frame a line of 128 bytes.

    data: ordering, slot and read, a row for each of the first slots of each ordering. row_bytes: bytes a row.
    """
    read = {name: rows.slot[rows.read].to_numpy() for name, rows in data.groupby("ordering", sort=False)}
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(read)), layout="constrained")
    _storage(figure.subplots(), read, data.slot.max() + 1, row_bytes)
    figure.suptitle(title)
    return figure


def _storage(axes: Axes, read: dict[str, np.ndarray], slots: int, row_bytes: int) -> None:
    # A strip an ordering: which of its first slots are read, and the lines that hold them.
    end = int(slots * row_bytes)
    for place, (name, rows) in enumerate(read.items()):
        touched = row_units(torch.from_numpy(rows * row_bytes), row_bytes, LINE_BYTES)[0].unique().tolist()
        parts = (range(slots), row_bytes, {"ec": "0.8", "fc": "white"}), (rows, row_bytes, {"fc": LOOKS[name][0]})
        for starts, size, look in (*parts, (touched, LINE_BYTES, {"fc": "none", "ec": "black", "lw": 1.3})):
            axes.broken_barh([(start * size, size) for start in starts], (place - 0.35, 0.7), **look)
        axes.text(end * 1.01, place, f"{len(rows)} rows in {len(touched)} lines", va="center")
    axes.set(xlim=(0, end), ylim=(len(read) - 0.5, -0.5), xlabel="address in the storage of one head [bytes]")
    axes.set_yticks(range(len(read)), read)
    axes.set_xticks(range(0, end + 1, -(-end // (8 * LINE_BYTES)) * LINE_BYTES))  # nine ticks at most, at lines' starts


def draw_reading(
    *, length: int, row_bytes: int, dilation: int, ordering: str, cache_kib: int, capacities_kib: list[int]
) -> Figure:
    """One head's branch read through an ordering and through the linear one: what comes along, and what is reused.

    k and v of one head, one segment of the whole length, a kernel of one program at a time: a model, no measurement.
    ordering: of `compared_orderings`. cache_kib: where the hit rate is read off, capacities_kib: those of the curve.
    """
    orderings, pattern = compared_orderings(length, dilation), DilatedPattern((length,), (dilation,))
    figure = by_hand(10, 6, left=0.09, right=0.84, bottom=0.08, top=0.95, hspace=0.5, wspace=0.25)
    panels = figure.subplot_mosaic([["strips", "strips"], ["units", "hits"]], height_ratios=(1, 2.4))
    names, hit_rates, slots = list(dict.fromkeys(("linear", ordering))), [], max(16, 1024 // row_bytes)
    firsts = {name: pattern.contains(0, orderings[name].perm[:slots], 0, 1).nonzero()[:, 0].numpy() for name in names}
    _storage(panels["strips"], firsts, slots, row_bytes)
    for place, name in enumerate(names):
        storage = Storage(orderings[name], row_bytes, layout="bhsd")
        addresses = storage.addresses(branch_rows(storage, pattern).positions, head=0)
        sizes = (SECTOR_BYTES, LINE_BYTES)
        excess = [units_touched(addresses, row_bytes, u) / -(-len(addresses) * row_bytes // u) for u in sizes]
        bars = panels["units"].bar(np.arange(2) + 0.4 * place - 0.2, excess, 0.36, color=LOOKS[name][0], label=name)
        panels["units"].bar_label(bars, fmt="{:.3g}")
        rates = lru_hit_rates(kernel_trace(storage, pattern), [1024 * kib for kib in (cache_kib, *capacities_kib)])
        hit_rates.append(f"{name} {100 * rates.hit_rate[0]:.1f} %")
        look = {"color": LOOKS[name][0], "marker": LOOKS[name][1], "fillstyle": "none", "linewidth": 4 - 2 * place}
        panels["hits"].plot(capacities_kib, 100 * rates.hit_rate[1:], **look)
    panels["units"].set_xticks(range(2), [f"sectors ({SECTOR_BYTES} B)", f"lines ({LINE_BYTES} B)"])
    panels["units"].set(ylabel="units touched / fewest", title=f"all {length} tokens, dilation {dilation}")
    panels["units"].margins(y=0.3)
    panels["units"].legend(loc="upper left", ncols=2)
    panels["hits"].axvline(cache_kib, color="black", linewidth=0.8, linestyle=":")
    panels["hits"].set_xscale("log", base=2)
    panels["hits"].xaxis.set_major_formatter("{x:g}")
    panels["hits"].set(xlabel="cache [KiB]", ylabel="hit rate [%]", ylim=(-3, 103))
    panels["hits"].set_title(f"LRU model, {cache_kib} KiB: {', '.join(hit_rates)}")
    return figure
