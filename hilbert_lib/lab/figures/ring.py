"""Figures of plans: bytes and memory of a rank, by ranks and by tokens, and who sends to whom."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.axes import short
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import RingPlan, plan_ring

# Okabe and Ito's colours, a marker and a line each.
STYLES = (("#D55E00", "o", "-"), ("#0072B2", "s", "--"), ("#009E73", "^", ":"))

TRANSPORT_STYLES = {
    "local": ("#DDDDDD", ""),
    "ring": ("#D55E00", "//"),
    "all_gather": ("#0072B2", ".."),
    "all_to_all": ("#009E73", "xx"),
}


def draw_scaling(data: pd.DataFrame) -> Figure:
    """What the costliest rank sends in a forward, by ranks and by tokens, and what it holds, by ranks.

    Args:
        data: `ring.tables.scaling_table` of several numbers of ranks and of tokens. A panel by ranks shows the most
            tokens, the panel by tokens the most ranks.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    by_ranks, by_tokens, memory = figure.subplots(1, 3)
    tokens, ranks = data.tokens.max(), data.ranks.max()
    longest, widest = data[data.tokens == tokens], data[data.ranks == ranks]
    _curves(by_ranks, longest[longest.ranks > 1], "ranks", "sent_forward", 1e6)
    _curves(by_tokens, widest, "tokens", "sent_forward", 1e6)
    _curves(memory, longest, "ranks", "memory_forward", 1e9)
    by_ranks.set(title=f"{short(tokens)} tokens", ylabel="a rank sends, forward [MB]")
    by_tokens.set(title=f"{ranks} ranks", ylabel="a rank sends, forward [MB]")
    memory.set(title=f"{short(tokens)} tokens", ylabel="a rank holds, forward [GB]")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("A ring, planned: what the costliest rank sends and holds (computed, not measured)")
    return figure


def draw_plan(pattern: DilatedPattern, *, tokens: int, ranks: int, transport: str, **options) -> Figure:
    """A plan of equal shards: what each branch sends and how, who sends to whom, and what each rank holds.

    Args:
        pattern: which keys a query sees.
        tokens: in the sequence.
        ranks: how many.
        transport: "auto", "ring", "all_gather" or "all_to_all".
        **options: the other arguments of `plan_ring`.

    Raises:
        ValueError: where `plan_ring` finds no such plan.
    """
    plan = plan_ring(pattern, shard_lengths_for(tokens, ranks), transport=transport, **options)
    figure = Figure(figsize=(10.5, 4.2))  # placed by hand: a layout engine would double the time that a slider waits
    figure.subplots_adjust(left=0.14, right=0.99, bottom=0.13, top=0.84, wspace=0.4)
    branches, pairs, memory = figure.subplots(1, 3, width_ratios=(1.4, 1.2, 1.1))
    _branch_bars(branches, plan)
    sent = _sent_between(plan) / 1e6
    image = pairs.imshow(np.where(sent > 0, sent, np.nan), cmap="Blues", vmin=0, vmax=sent.max() or 1)
    pairs.set(xlabel="to rank", ylabel="from rank", title=f"{sent.sum():,.4g} MB in all, forward")
    pairs.spines[:].set_visible(True)
    figure.colorbar(image, ax=pairs, label="from rank to rank [MB]", shrink=0.7)
    for cost, name, left in (("memory_forward", "forward", -0.2), ("memory_backward", "backward", 0.2)):
        held = [getattr(one, cost) / 1e9 for one in plan.ranks]
        memory.bar(np.arange(ranks) + left, held, 0.4, label=name, color="0.75" if left < 0 else "0.35")
    memory.set(xlabel="rank", ylabel="a rank holds [GB]", title="memory")
    memory.margins(y=0.2)
    memory.legend(loc="upper center", ncols=2, fontsize=8, handlelength=1, columnspacing=1)
    for axis in (pairs.xaxis, pairs.yaxis, memory.xaxis):
        axis.set_ticks(range(0, ranks, -(-ranks // 8)))
    figure.suptitle(f"{short(tokens)} tokens, ranks: {ranks}, transport: {transport} (computed, not measured)")
    return figure


def _branch_bars(axes: Axes, plan: RingPlan) -> None:
    for place, branch in enumerate(plan.branches):
        colour, hatch = TRANSPORT_STYLES[branch.transport]
        sent = branch.bytes_forward / 1e6
        axes.barh(place, sent, color=colour, hatch=hatch, edgecolor="white")
        most = max((len(segment.ranks) for segment in branch.shared), default=1)
        how = f"{branch.transport}, {most} ranks" if branch.shared else "inside a rank"
        axes.annotate(how, (sent, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"w = {short(branch.segment_length)}, r = {short(branch.dilation_rate)}" for branch in plan.branches]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 6) - 0.5, -0.5)
    most = max(branch.bytes_forward for branch in plan.branches) / 1e6
    axes.set(xlim=(0, 1.5 * most or 1), xlabel="the costliest rank, forward [MB]", title="what a branch sends")


def _sent_between(plan: RingPlan) -> np.ndarray:
    """(ranks, ranks) bytes of a forward, from the row's rank to the column's."""
    sent = np.zeros((len(plan.ranks),) * 2)
    for transport, messages in plan.messages.items():
        there, back = plan.sizes.on_wire(transport, "forward")
        for (source, destination), message in messages.items():
            if source != destination:
                sent[source, destination] += there * message.size
                sent[destination, source] += back * message.size
    return sent


def _curves(axes: Axes, data: pd.DataFrame, x: str, y: str, unit: float) -> None:
    if not data[y].any():
        axes.text(0.5, 0.5, "nothing is sent", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for (what, rows), (colour, marker, line) in zip(data.groupby("what", sort=False), STYLES, strict=True):
        rows = rows.sort_values(x)
        axes.plot(rows[x], rows[y] / unit, color=colour, marker=marker, ls=line, label=what)
    axes.set(xlabel=x, yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(data[x].unique()))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: short(round(value)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.grid(axis="y", color="#DDDDDD")
