"""Figures of plans: bytes and memory of a rank, by ranks and by tokens."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Okabe and Ito's colours, a marker and a line each.
STYLES = (("#D55E00", "o", "-"), ("#0072B2", "s", "--"), ("#009E73", "^", ":"))


def draw_scaling(data: pd.DataFrame) -> Figure:
    """What the costliest rank sends in a forward, by ranks and by tokens, and what it holds, by ranks.

    Args:
        data: `ring.tables.scaling_table` of several numbers of ranks and of tokens. A panel by ranks shows the most
            tokens, the panel by tokens the most ranks.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_ranks, by_tokens, memory = figure.subplots(1, 3)
    tokens, ranks = data.tokens.max(), data.ranks.max()
    longest, widest = data[data.tokens == tokens], data[data.ranks == ranks]
    _curves(by_ranks, longest[longest.ranks > 1], "ranks", "sent_forward", 1e6)
    _curves(by_tokens, widest, "tokens", "sent_forward", 1e6)
    _curves(memory, longest, "ranks", "memory_forward", 1e9)
    by_ranks.set(title=f"{_short(tokens)} tokens", ylabel="a rank sends, forward [MB]")
    by_tokens.set(title=f"{ranks} ranks", ylabel="a rank sends, forward [MB]")
    memory.set(title=f"{_short(tokens)} tokens", ylabel="a rank holds, forward [GB]")
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("A ring, planned: what the costliest rank sends and holds (computed, not measured)")
    return figure


def _curves(axes: Axes, data: pd.DataFrame, x: str, y: str, unit: float) -> None:
    for (what, rows), (colour, marker, line) in zip(data.groupby("what", sort=False), STYLES, strict=True):
        rows = rows.sort_values(x)
        axes.plot(rows[x], rows[y] / unit, color=colour, marker=marker, ls=line, label=what)
    axes.set(xlabel=x, yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(data[x].unique()))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axes.grid(axis="y", color="#DDDDDD")


def _short(number: int) -> str:
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number >> power}{unit}"
    return str(number)
