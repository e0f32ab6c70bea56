"""The picture of a ring's plan: what each branch sends and how, and who sends to whom."""

import numpy as np
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.axes import short
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import RingPlan, plan_ring

TRANSPORT_COLOURS = {"local": "#DDDDDD", "ring": "#D55E00", "all_gather": "#0072B2", "all_to_all": "#009E73"}


def draw_plan(pattern: DilatedPattern, *, tokens: int, ranks: int, transport: str, **options) -> Figure:
    """A plan of equal shards, as `plan_ring` makes it of these arguments."""
    plan = plan_ring(pattern, shard_lengths_for(tokens, ranks), transport=transport, **options)
    figure = Figure(figsize=(9, 4.2))  # placed by hand: a layout engine would double the time that a slider waits
    figure.subplots_adjust(left=0.16, right=0.97, bottom=0.13, top=0.8, wspace=0.3)
    branches, pairs = figure.subplots(1, 2, width_ratios=(1.3, 1))
    sent = np.array([branch.bytes_forward for branch in plan.branches]) / 1e6
    branches.barh(range(len(sent)), sent, color=[TRANSPORT_COLOURS[branch.transport] for branch in plan.branches])
    for place, branch in enumerate(plan.branches):
        how = (
            f"{branch.transport}, {max(len(one.ranks) for one in branch.shared)} ranks"
            if branch.shared
            else "inside a rank"
        )
        branches.annotate(how, (sent[place], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"w = {short(branch.segment_length)}, r = {short(branch.dilation_rate)}" for branch in plan.branches]
    branches.set_yticks(range(len(names)), names, fontsize=8)
    branches.set(xlim=(0, 1.5 * sent.max() or 1), ylim=(max(len(names), 6) - 0.5, -0.5), title="what a branch sends")
    branches.set_xlabel("the costliest rank, forward [MB]")
    between = _sent_between(plan) / 1e6
    image = pairs.imshow(np.where(between > 0, between, np.nan), cmap="Blues", vmin=0, vmax=between.max() or 1)
    pairs.set(xlabel="to rank", ylabel="from rank", title=f"{between.sum():,.4g} MB in all, forward")
    figure.colorbar(image, ax=pairs, label="from rank to rank [MB]", shrink=0.8)
    for axis in (pairs.xaxis, pairs.yaxis):
        axis.set_ticks(range(0, ranks, -(-ranks // 8)))
    held = max(cost.memory_backward for cost in plan.ranks) / 1e9
    said = f"{short(tokens)} tokens, {ranks} ranks, {transport}: a rank holds at most {held:.3g} GB, backward"
    figure.suptitle(f"{said}\n(computed, not measured)")
    return figure


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
