"""Pictures of plans: what each branch of a ring sends and how; the shards of a grid, and which cells travel."""

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hilbert_lib.lab.figures.plots import by_hand, short
from hilbert_lib.lab.sweeps.halos import sharding
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.halo import plan_halo
from hilbert_lib.ring.plan.plan import plan_ring

TRANSPORT_COLOURS = {"local": "#DDDDDD", "ring": "#D55E00", "all_gather": "#0072B2", "all_to_all": "#009E73"}
SHADES = (0.45, 1.0, 0.6)  # of a cell that stays, of one that goes to one rank and of one that goes to more


def draw_plan(pattern: DilatedPattern, *, tokens: int, ranks: int, transport: str, **options) -> Figure:
    """A plan of equal shards, as `plan_ring` makes it of these arguments."""
    plan = plan_ring(pattern, shard_lengths_for(tokens, ranks), transport=transport, **options)
    figure = by_hand(9, 4.2, left=0.16, right=0.97, bottom=0.13, top=0.8, wspace=0.3)
    branches, each_rank = figure.subplots(1, 2, width_ratios=(1.3, 1))
    sent = np.array([branch.bytes_forward for branch in plan.branches]) / 1e6
    hues = [TRANSPORT_COLOURS[branch.transport] for branch in plan.branches]
    shared = [max((len(exchange.ranks) for exchange in branch.shared), default=0) for branch in plan.branches]
    how = [f"{b.transport}, {n} ranks" if n else "inside a rank" for b, n in zip(plan.branches, shared, strict=True)]
    branches.bar_label(branches.barh(range(len(sent)), sent, color=hues), how, padding=4, fontsize=8)
    names = [f"w = {short(branch.segment_length)}, r = {short(branch.dilation_rate)}" for branch in plan.branches]
    branches.set_yticks(range(len(names)), names, fontsize=8)
    branches.set(xlim=(0, 1.5 * sent.max() or 1), ylim=(max(len(names), 6) - 0.5, -0.5), title="what a branch sends")
    branches.set_xlabel("the costliest rank, forward [MB]")
    out, back = ([getattr(rank, name) / 1e6 for rank in plan.ranks] for name in ("sent_forward", "received_forward"))
    each_rank.bar(np.arange(ranks) - 0.2, out, 0.4, color="#0072B2", label="sends")
    each_rank.bar(np.arange(ranks) + 0.2, back, 0.4, color="#56B4E9", label="receives")
    each_rank.margins(y=0.2)
    each_rank.set(xlabel="rank", ylabel="forward [MB]", title="what a rank sends and receives")
    each_rank.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    each_rank.legend(loc="upper center", ncols=2)
    most_gb = max(cost.memory_backward for cost in plan.ranks) / 1e9
    summary = f"{short(tokens)} tokens, {ranks} ranks, {transport}: a rank holds at most {most_gb:.3g} GB, backward"
    figure.suptitle(f"{summary}\n(computed, not measured)")
    return figure


def draw_halos(*, side: int, window: int, shards: str, ranks: int, **sizes) -> Figure:
    """The cells of a square grid in the colours of their ranks, those that travel shaded, and bytes a rank.

    shards: a kind of `sharding`. sizes: batch, heads, kv_heads, head_dim and dtype, as of `plan_halo`.
    """
    near = Neighbourhood((side, side), window)
    plan = plan_halo(near, sharding(shards, near.shape, ranks), **sizes)
    owner = plan.shards.owner(near.shape, torch.arange(near.length, device="cpu")).numpy()
    goes = torch.cat([cells[heads == 0] for cells, heads, _ in plan.arriving]).bincount(minlength=near.length)
    colours = colormaps["tab10"](owner % 10)[:, :3]
    shade = np.array(SHADES)[goes.clamp(max=2).numpy(), None]
    shaded = np.where(goes.numpy()[:, None] > 0, shade * colours, 1 - shade * (1 - colours))
    figure = by_hand(9, 4.6, left=0.05, right=0.97, bottom=0.12, top=0.82, wspace=0.2)
    grid, each_rank = figure.subplots(1, 2)
    grid.imshow(shaded.reshape(side, side, 3))
    travel = int((goes > 0).sum())
    grid.set(title=f"{travel:,} of {near.length:,} cells travel (shaded)", xlabel="column", ylabel="row")
    received = np.array([cost.received_forward for cost in plan.ranks]) / 1e6
    each_rank.bar(range(ranks), received, color=colormaps["tab10"](np.arange(ranks) % 10))
    each_rank.set(xlabel="rank", ylabel="forward [MB]", title="what a rank receives")
    each_rank.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    border = max(cost.border / max(cost.cells, 1) for cost in plan.ranks)
    summary = f"{shards} on {ranks} ranks, window {window}: at most {received.max():.3g} MB a rank"
    figure.suptitle(f"{summary}, up to {border:.0%} of its queries wait\n(computed, not measured)")
    return figure
