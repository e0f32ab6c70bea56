"""Figures of CUDA graphs, memory pools and caches of patterns."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.axes import plain_ticks, powers_of_two, short

# Okabe and Ito's colours and a marker each.
STRATEGIES = {
    "caching": ("#000000", "o", "torch's caching allocator"),
    "kept": ("#E69F00", "s", "results copied into kept buffers"),
    "pool": ("#0072B2", "^", "torch.cuda.MemPool"),
    "graph": ("#D55E00", "D", "CUDA graph a length"),
}
DIRECTIONS = {"forward": ("#0072B2", "o"), "training": ("#D55E00", "s")}
BESIDE_BUILDS = {
    "look-up": ("#0072B2", "s", "look-up in the cache"),
    "call": ("#000000", "x", "one forward of attention"),
}


def draw_graph_gains(data: pd.DataFrame, *, source: str) -> Figure:
    """Time of a module called and replayed, and how many times faster the replay is, by length; a column a module.

    Args:
        data: `graph_benchmarks.pair_table` of the sweep "graphs".
        source: where it was measured, for the title.
    """
    modules = list(dict.fromkeys(data.module))
    figure = Figure(figsize=(5 * len(modules), 6.5), layout="constrained")
    panels = figure.subplots(2, len(modules), squeeze=False, sharex=True, sharey="row")
    for (times, ratios), module in zip(panels.T, modules, strict=True):
        for direction, (colour, marker) in DIRECTIONS.items():
            rows = data[(data.module == module) & (data.direction == direction)].sort_values("length")
            style = {"color": colour, "marker": marker}
            times.plot(rows.length, rows.a_ms, label=f"{direction}, called", **style)
            times.plot(rows.length, rows.b_ms, label=f"{direction}, replayed", ls="--", fillstyle="none", **style)
            spread = [rows.ratio - rows.low, rows.high - rows.ratio]
            ratios.errorbar(rows.length, rows.ratio, spread, label=direction, capsize=3, **style)
        times.set(title=module, yscale="log")
        plain_ticks(times, pd.concat([data.a_ms, data.b_ms]))
        ratios.axhline(1, color="black", lw=0.8)
        ratios.set_xlabel("tokens")
        for axes in (times, ratios):
            powers_of_two(axes, data.length)
    panels[0, 0].set_ylabel("from call to result [ms]")
    panels[1, 0].set_ylim(bottom=0)  # of all panels, once all is drawn: it ends the search for the top
    panels[1, 0].set_ylabel("time, called over replayed")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(f"CUDA graphs: above 1 in the lower row a replay is faster, {source}")
    return figure


def draw_pools(data: pd.DataFrame, *, source: str) -> Figure:
    """Time, peak memory and fragmentation of every strategy, a place on the axis a workload.

    Args:
        data: `memory_benchmarks.pool_table` of one direction.
        source: where it was measured, for the title.
    """
    workloads = list(dict.fromkeys(map(str, data.lengths)))
    figure = Figure(figsize=(max(9, 2.6 * len(workloads)), 8), layout="constrained")
    time, reserved, wasted = figure.subplots(3, 1, sharex=True)
    names = [name for name in STRATEGIES if name in set(data.strategy)]
    for place, name in enumerate(names):
        colour, marker, label = STRATEGIES[name]
        rows = data[data.strategy == name].assign(lengths=data.lengths.map(str)).set_index("lengths").reindex(workloads)
        at = np.arange(len(workloads)) + 0.16 * (place - (len(names) - 1) / 2)
        style = {"color": colour, "marker": marker, "ls": "", "label": label}
        time.errorbar(at, rows.ratio, [rows.ratio - rows.low, rows.high - rows.ratio], capsize=3, **style)
        reserved.plot(at, rows.reserved_bytes / 2**20, **style)
        reserved.plot(at, rows.allocated_bytes / 2**20, **style | {"fillstyle": "none", "label": None})
        wasted.plot(at, rows.fragmented_bytes / 2**20, **style)
    time.axhline(1, color="black", lw=0.8)
    time.set_ylabel("time, caching\nover strategy")
    reserved.set(yscale="log", ylabel="peak beyond the inputs [MiB]\n(full: reserved, hollow: allocated)")
    wasted.set(ylim=(0, None), ylabel="reserved but not\nallocated [MiB]", xlabel="tokens, call after call")
    wasted.set_xticks(range(len(workloads)), [_sequence(each) for each in workloads])
    for axes in (time, reserved, wasted):
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        for border in np.arange(len(workloads) - 1) + 0.5:
            axes.axvline(border, color="#DDDDDD", lw=0.8)
    figure.legend(*time.get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(f"Ways to hold buffers, {data.direction.iloc[0]}: above 1 faster than torch's allocator, {source}")
    return figure


def draw_memory_table(data: pd.DataFrame, *, source: str) -> Figure:
    """Peak memory as the documents print it and as it is here, by tokens.

    Args:
        data: `memory_benchmarks.memory_table`.
        source: where ours was measured, for the title.
    """
    tokens, names = sorted(data.tokens.unique()), list(dict.fromkeys(data.configuration))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(names)
    colours = [STRATEGIES[name.split(",")[0]][0] for name in names]
    for place, (name, colour) in enumerate(zip(names, colours, strict=True)):
        rows = data[data.configuration == name].set_index("tokens").reindex(tokens)
        at = np.arange(len(tokens)) + width * (place - (len(names) - 1) / 2)
        linear = name.endswith("linear")
        axes.bar(at, rows.reserved_gib, width, color=colour, alpha=0.35, hatch="" if linear else "//", ec="white")
        axes.bar(at, rows.allocated_gib, width, color=colour, label=name, hatch="" if linear else "//", ec="white")
        label = "the documents' [GB], sizes not told" if rows.claimed_gb.notna().any() else None
        axes.plot(at, rows.claimed_gb, color="black", marker="_", ms=18, mew=2.5, ls="", label=label)
    axes.set_xticks(range(len(tokens)), [f"{n:,} tokens" for n in tokens])
    axes.set(ylabel="peak, inputs included [GiB]\n(dark: allocated, light: reserved)")
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one entry a label
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    figure.suptitle(f"The documents' table of memory, rerun, {source}")
    return figure


def draw_pattern_cache(data: pd.DataFrame, *, source: str) -> Figure:
    """Time to build what is kept of a pattern, to look it up and, where measured, of a whole call; a panel a table.

    Args:
        data: `graph_benchmarks.pair_table` of the sweep "pattern cache".
        source: where it was measured, for the title.
    """
    tables = list(dict.fromkeys(data.what))
    figure = Figure(figsize=(5 * len(tables), 4.2), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    for axes, what in zip(panels, tables, strict=True):
        rows = data[data.what == what].sort_values("length")
        built = rows[rows.b == "look-up"]
        axes.plot(built.length, built.a_ms, color="#D55E00", marker="o", label="build")
        for name, (colour, marker, label) in BESIDE_BUILDS.items():
            beside = rows[rows.b == name]
            if len(beside):
                axes.plot(beside.length, beside.b_ms, color=colour, marker=marker, ls="--", label=label)
        axes.set(title=what, xlabel="tokens", yscale="log")
        plain_ticks(axes, pd.concat([data.a_ms, data.b_ms]))
        powers_of_two(axes, rows.length)
    panels[0].set_ylabel("time on the host [ms]")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"What a cache saves: the time to build, {source}")
    return figure


def _sequence(lengths: str) -> str:
    numbers = [short(int(n)) for n in lengths.split()]
    return "\n".join(" ".join(numbers[n : n + 4]) for n in range(0, len(numbers), 4))
