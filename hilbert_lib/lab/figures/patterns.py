"""Figures of patterns: who sees whom, how branches mix, how exact backends are, how much work is saved."""

from itertools import cycle

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hilbert_lib.lab.figures.record import COLOURS
from hilbert_lib.pattern import DilatedPattern

# Blues from light to dark: the count stays readable in grey print.
_COUNT_COLOURS = ("#FFFFFF", "#9ECAE1", "#4292C6", "#08519C", "#08306B")
_HATCHES = ("", "//", "xx", "..", "\\\\")
_BRANCH_COLOURS = (COLOURS["raster"], COLOURS["hilbert"], COLOURS["snake"], COLOURS["tile"], COLOURS["morton"])
_MARKERS = "os^DPvX*<>"
_LINES = ("-", "--", ":", "-.")


def draw_pattern(data: pd.DataFrame, *, length: int, heads: int | None = None) -> Figure:
    """One grid a head: rows are queries, columns keys; shade says how many branches find the key.

    Args:
        data: columns head, query, key, count, as `multiplicities` gives them.
        length: tokens.
        heads: how many heads to draw, from head 0; by default up to the last one that sees a key.
    """
    heads = max(data["head"], default=0) + 1 if heads is None else heads
    most = max(data["count"], default=1)
    colours = LinearSegmentedColormap.from_list("count", _COUNT_COLOURS, N=most + 1)
    norm = BoundaryNorm(np.arange(-0.5, most + 1.5), most + 1)
    figure = Figure(figsize=(2.6 * heads + 1.3, 3.4), layout="constrained")
    for head, axes in enumerate(figure.subplots(1, heads, sharey=True, squeeze=False)[0]):
        grid = np.zeros((length, length))
        own = data[data["head"] == head]
        grid[own["query"], own["key"]] = own["count"]
        axes.imshow(grid, cmap=colours, norm=norm, interpolation="nearest")
        axes.set(title=f"head {head}", xlabel="key (position)")
        axes.spines[:].set_visible(True)
    figure.axes[0].set_ylabel("query (position)")
    patches = [Patch(facecolor=c, edgecolor="#888888", label=f"{n}") for n, c in enumerate(colours(range(most + 1)))]
    figure.legend(handles=patches, title="branches that\nfind the key", loc="outside right center")
    figure.suptitle("Which keys each query sees")
    return figure


def draw_query(
    pattern: DilatedPattern,
    *,
    length: int,
    kv_heads: int,
    is_causal: bool,
    branch: int,
    head: int,
    position: int,
) -> Figure:
    """What one query of one head sees through one branch, in the grid of all queries and beside the other branches.

    Args:
        pattern: the pattern.
        length: tokens.
        kv_heads: heads of k and v.
        is_causal: whether keys after the query are excluded.
        branch: the branch that is drawn in colour.
        head: the KV head.
        position: of the query.
    """
    every = torch.arange(length)
    heads = {"kv_head": head, "kv_heads": kv_heads, "is_causal": is_causal}
    masks = torch.stack([pattern.mask(i, every, every, **heads) for i in range(len(pattern.branches))]).numpy()
    figure = Figure(figsize=(10, 4.4))  # placed by hand: a layout engine would double the time that a slider waits
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.13, top=0.91, wspace=0.36)
    grid, strips = figure.subplots(1, 2, width_ratios=(1, 1.5))
    shades = ListedColormap(("#FFFFFF", "#DDDDDD", _BRANCH_COLOURS[branch % 5]))
    grid.imshow(np.where(masks[branch], 2, masks.any(0)), cmap=shades, vmin=0, vmax=2, interpolation="nearest")
    grid.axhspan(position - 0.5, position + 0.5, fill=False, edgecolor="black", linewidth=1.2)
    grid.set(title=f"head {head}: through branch {branch}, others grey", xlabel="key", ylabel="query (position)")
    grid.spines[:].set_visible(True)
    for i, (w, _) in enumerate(pattern.branches):
        start = position // w * w
        keys = np.flatnonzero(masks[i, position])
        strips.barh(i, min(w, length - start), left=start - 0.5, height=0.7, color="#F0F0F0", edgecolor="#AAAAAA")
        colour = _BRANCH_COLOURS[i % 5] if i == branch else "#888888"
        strips.plot(keys, np.full(len(keys), i), "s", color=colour, markersize=np.clip(240 / length, 1, 6))
    strips.axvline(position, color="black", linewidth=1.2)
    names = [f"branch {i}\nw = {w}, r = {r}" for i, (w, r) in enumerate(pattern.branches)]
    strips.set_yticks(range(len(names)), names)
    strips.set(xlim=(-1, length), ylim=(len(names) - 0.4, -0.6), xlabel="key (position); a box is the query's segment")
    count = masks[:, position].sum(1)
    found = f"{count[branch]} keys through branch {branch}, {count.sum()} through all"
    strips.set_title(f"position {position} (line): {found}")
    return figure


def draw_mixing(data: pd.DataFrame, *, query: int, head: int = 0) -> Figure:
    """Weights of one query: bars stack the branches' shares of every key, dots are one softmax over the multiset.

    Args:
        data: columns branch, key, mixed, one_softmax, as `mixing` gives them.
        query, head: the query's position and its head, for the title.
    """
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    axes = figure.subplots()
    keys = sorted(data["key"].unique())
    place = {key: n for n, key in enumerate(keys)}
    bottom = np.zeros(len(keys))
    for branch, own in data.groupby("branch"):
        height = np.zeros(len(keys))
        height[[place[key] for key in own["key"]]] = own["mixed"]
        axes.bar(
            range(len(keys)),
            height,
            bottom=bottom,
            color=_BRANCH_COLOURS[branch % 5],
            hatch=_HATCHES[branch % 5],
            edgecolor="white",
            label=f"branch {branch}, weighted by its denominator",
        )
        bottom += height
    total = data.groupby("key")["one_softmax"].sum()
    axes.plot(range(len(keys)), total[keys], "ko", markersize=4, label="one softmax over the multiset")
    step = max(1, len(keys) // 20)
    axes.set_xticks(range(0, len(keys), step), keys[::step])
    told = "two ways, the same weights" if keys else "in no branch, it sees no key"
    axes.set(xlabel="key (position)", ylabel="attention weight (1)", title=f"Query {query} of head {head}: {told}")
    figure.legend(loc="outside right center")
    return figure


def draw_errors(data: pd.DataFrame) -> Figure:
    """Largest error of every backend against the float64 reference, by dtype, for output, lse and gradients.

    Args:
        data: columns backend, dtype, out, lse, dq, dk, dv, as `errors` gives them.
    """
    parts = ["out", "lse", "dq", "dk", "dv"]
    served = data.dropna(subset=parts).groupby(["dtype", "backend"], sort=False)[parts].max().reset_index()
    dtypes, backends = list(served["dtype"].unique()), list(served["backend"].unique())
    step = min(0.18, 0.9 / max(1, len(backends)))  # backends of one dtype stand side by side
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), sharey=True), parts, strict=True):
        for n, (backend, marker) in enumerate(zip(backends, cycle(_MARKERS), strict=False)):
            own = served[served["backend"] == backend]
            x = [dtypes.index(dtype) + (n - (len(backends) - 1) / 2) * step for dtype in own["dtype"]]
            shown = own[part].clip(lower=1e-17)  # an error of 0 still has a place on a logarithmic axis
            axes.plot(x, shown, marker, linestyle="none", label=backend, color="black", fillstyle="none", markersize=6)
        axes.set_yscale("log")
        axes.set_xticks(range(len(dtypes)), dtypes, rotation=60, ha="right")
        axes.set_title(part)
        axes.grid(axis="y", color="#DDDDDD")
    figure.axes[0].set_ylabel("largest absolute error (1)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), title="backend", loc="outside right center")
    figure.suptitle("Every backend that serves equals the oracle to rounding")
    return figure


def draw_work(data: pd.DataFrame) -> Figure:
    """Useful FLOP against sequence length: dilated grows linearly where dense grows with the square.

    Args:
        data: columns length, what, flop.
    """
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    styles = zip(cycle(_MARKERS), cycle(_LINES), strict=False)
    for (marker, line), (what, own) in zip(styles, data.groupby("what", sort=False), strict=False):
        axes.loglog(own["length"], own["flop"], label=what, color="black", marker=marker, linestyle=line)
    axes.set(xlabel="sequence length (tokens)", ylabel="useful FLOP, forward", title="Work against length")
    axes.grid(color="#DDDDDD")
    axes.legend()
    return figure
