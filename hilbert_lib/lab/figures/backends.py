"""Figures of notebook 05: what each backend costs beside the automatic choice, and when an ordering is repaid."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hilbert_lib.lab.figures.kernels import STYLES

SHOWN_SLOWER = 8.0  # the colours end here; the numbers go on


def draw_choice(data: pd.DataFrame, *, source: str, what: str = "Time") -> Figure:
    """Each backend's time over the automatic choice's: a panel a direction, a row a work, a column a backend.

    Args:
        data: `selection.choice_table`.
        source: where it was measured, for the title.
        what: the time that it is, for the title.

    Returns:
        The figure. A cell above 1 is slower than the automatic choice, a framed one is that choice, an empty one cannot
        serve.
    """
    names = [name for name in data.columns[data.columns.get_loc("over_worst") + 1 :] if data[name].notna().any()]
    causal = np.where(data.is_causal, ", causal", "")
    data = data.assign(work=[f"{row.pattern}, {row.length:,}, d={row.head_dim}" for row in data.itertuples()] + causal)
    panels = list(data.groupby("direction", sort=False))
    rows = max(len(group) for _, group in panels)
    size = 2.4 + 0.75 * len(names) * len(panels), 1.8 + 0.28 * rows
    figure = Figure(figsize=size, layout="constrained")
    for axes, (direction, group) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        is_first = direction == panels[0][0]
        axes.set_title(direction)
        axes.set_yticks(range(len(group)), group.work if is_first else [""] * len(group))
        _draw_ratios(axes, group, names)
    figure.suptitle(f"{what} over that of the automatic choice (framed)\n{source}")
    return figure


def _draw_ratios(axes: Axes, group: pd.DataFrame, names: list[str]) -> None:
    ratios = group[names].astype(float).to_numpy()
    norm = TwoSlopeNorm(0.0, -1.0, np.log2(SHOWN_SLOWER))
    axes.imshow(np.log2(ratios), cmap="RdBu_r", norm=norm, aspect="auto")
    for (row, column), ratio in np.ndenumerate(ratios):
        if np.isfinite(ratio):
            pale = -0.6 < np.log2(ratio) < 0.6 * np.log2(SHOWN_SLOWER)
            style = {"ha": "center", "va": "center", "color": "black" if pale else "white"}
            axes.text(column, row, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", **style)
        if names[column] == group.automatic.iloc[row]:
            corner = column - 0.48, row - 0.46
            axes.add_patch(Rectangle(corner, 0.96, 0.92, fill=False, edgecolor="black", linewidth=1.8))
    axes.set_xticks(range(len(names)), names, rotation=45, ha="left")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_ordering(data: pd.DataFrame, *, source: str) -> Figure:
    """What residue-major order is worth to one call that stores k and v itself, and to later calls that find them so.

    Args:
        data: `selection.ordering_table`.
        source: where it was measured, for the title.

    Returns:
        The figure: above 1 the ordering is faster than the order of the sequence.
    """
    kinds = list(data.groupby(["queries", "length"], sort=True))
    figure = Figure(figsize=(1.0 + 5.0 * len(kinds), 4.6), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, ((queries, length), group) in zip(panels, kinds, strict=True):
        labels = []
        for place, row in enumerate(group.itertuples()):
            for offset, column, (colour, hatch, _) in zip((-0.2, 0.2), ("one_call", "later"), STYLES, strict=False):
                label = {"one_call": "stored by the call", "later": "stored before"}[column] if not place else None
                value = getattr(row, column)
                axes.bar(place + offset, value, 0.4, color=colour, hatch=hatch, edgecolor="white", label=label)
            repaid = f"after\n{row.repaid:,.0f} calls" if np.isfinite(row.repaid) else "never"
            labels.append(f"{row.row_bytes} B\nr = {row.dilation}\n{repaid}")
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        who = f"{queries} query" if queries == 1 else f"{queries} queries" if queries else "all queries"
        axes.set(title=f"{who}, {length:,} keys", xlabel="row size, dilation, and when the copy is repaid")
    panels[0].set_ylabel("time in sequence order / in residue-major order")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"What another order of k and v is worth, {source}")
    return figure
