"""Options beside the speed of their base work: a bar for each way of calling, a mark for the best other way."""

import pandas as pd
from matplotlib.figure import Figure

from hilbert_lib.lab.figures.plots import PALETTE, SHAPES

BAR_HEIGHT = 0.8  # of the row of an option


def share_bars(
    data: pd.DataFrame, *, title: str, panel: str, row: str, by: str, share: str, other: str, goal: float = 0.0
) -> Figure:
    """Bars to the right: a panel for each value of `panel`, in it a row for each of `row`, in that a bar by `by`.

    data: the table. panel, row, by: columns of words. share: column of the bars' lengths. other: column of what the
    marks show, NaN for none. goal: where a line is drawn; 0 for none. Each number stands at the end of its bar.
    """
    parts = [(value, data[data[panel] == value]) for value in dict.fromkeys(data[panel])]
    kinds, heights = list(dict.fromkeys(data[by])), [part[row].nunique() for _, part in parts]
    size = 11, 1.6 + 0.34 * max(heights)
    figure = Figure(figsize=size, layout="constrained")
    for axes, (heading, part) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        places = {option: place for place, option in enumerate(dict.fromkeys(part[row]))}
        for number, kind in enumerate(kinds):
            of_kind, height = part[part[by] == kind], BAR_HEIGHT / len(kinds)
            where = of_kind[row].map(places) + (number - (len(kinds) - 1) / 2) * height
            drawn = axes.barh(where, of_kind[share], height, color=PALETTE[number], label=f"ours, {kind}")
            axes.bar_label(drawn, fmt="{:.2f}", padding=2, fontsize=7)
            look = {"marker": SHAPES[number], "color": "black", "ls": "", "fillstyle": "none", "markersize": 4}
            axes.plot(of_kind[other], where, label=f"best other way, {kind}", **look)
        axes.axvline(1, color="black", lw=0.8, ls="--")
        if goal:
            axes.axvline(goal, color="black", lw=0.8, ls=":")
        axes.set(title=heading, xlabel="share of the base's useful TFLOP/s", xlim=(0, None))
        axes.set_yticks(range(len(places)), places)
        axes.invert_yaxis()
        axes.grid(axis="x", color="#DDDDDD")
        axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(title)
    return figure
