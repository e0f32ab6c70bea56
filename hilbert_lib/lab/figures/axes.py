"""What figures share: panels in a grid, and axes that write out the values that were measured."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def panel_grid(
    count: int, columns: int, size: tuple[float, float], margins: tuple[float, float], **subplots
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, row by row, the last row as long as they reach.

    Args:
        count: panels. columns: panels in a row, at most.
        size: width and height that each panel adds to the figure [inches].
        margins: width and height of the figure beside its panels [inches].
        **subplots: as `Figure.subplots`.

    >>> figure, panels = panel_grid(5, 3, (2, 3), (1, 0))
    >>> figure.get_size_inches().tolist(), len(figure.axes), len(panels)
    ([7.0, 6.0], 5, 5)
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figsize = columns * size[0] + margins[0], rows * size[1] + margins[1]
    figure = Figure(figsize=figsize, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def plain_ticks(axes: Axes, values: pd.Series) -> None:
    """Few ticks of a logarithmic y axis, written out."""
    values = values[values > 0]  # where a limit is passed already, less than nothing is allowed
    low, high = np.log10(values.min()), np.log10(values.max())
    steps = (1, 1.5, 2, 3, 4, 6, 8) if high - low < 0.8 else (1, 2, 5) if high - low < 2 else (1,)
    powers = range(int(np.floor(low)) - 1, int(np.ceil(high)) + 1)
    ticks = [step * 10.0**power for power in powers for step in steps]
    if high - low < 0.2:  # none of these may lie between
        ticks = [tick for tick in MaxNLocator(5).tick_values(values.min(), values.max()) if tick > 0]
    margin = max(0.002, 0.05 * (high - low + min(1, 5 * (high - low))))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(10 ** (low - margin), 10 ** (high + margin))


def short(number: int) -> str:
    """A number of tokens as K, M and G of 2^10, 2^20 and 2^30, where it is whole.

    >>> short(3 * 2**20)
    '3M'
    """
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number >> power}{unit}"
    return str(number)
