"""What figures share: panels in a grid, and numbers of tokens in few letters."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panel_grid(
    count: int, columns: int, size: Sequence[float], margins: tuple[float, float], **subplots
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
    figsize = max(6, columns * size[0] + margins[0]), rows * size[1] + margins[1]  # wide enough for a title
    figure = Figure(figsize=figsize, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def short(number: float) -> str:
    """A number of tokens as K, M and G of 2^10, 2^20 and 2^30, where it is whole.

    >>> short(3 * 2**20)
    '3M'
    """
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number / 2**power:.0f}{unit}"
    return f"{number:.9g}" if isinstance(number, float) else str(number)
