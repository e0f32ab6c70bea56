"""What figures share: panels in a grid, figures under widgets, legends, and numbers of tokens in few letters."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch


def panel_grid(
    count: int, columns: int, size: Sequence[float], margins: tuple[float, float], **subplots
) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels, at most so many in a row, the last row as long as they reach.

    size: width and height that each panel adds to the figure, margins: those beside the panels [inches]. subplots: as
    of `Figure.subplots`.

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


def by_hand(width: float, height: float, **margins: float) -> Figure:
    """A figure under widgets, placed by hand: a layout engine would double the time that a slider waits."""
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(**margins)
    return figure


def key_of(parts: Iterable[tuple[str, str]]) -> list[Patch]:
    """What a legend shows of (colour, label), but of those without a label."""
    return [Patch(fc=colour, ec="0.5", label=label) for colour, label in parts if label]


def short(number: float) -> str:
    """A number of tokens as K, M and G of 2^10, 2^20 and 2^30, where it is whole.

    >>> short(3 * 2**20)
    '3M'
    """
    for power, unit in ((30, "G"), (20, "M"), (10, "K")):
        if number >= 2**power and number % 2**power == 0:
            return f"{number / 2**power:.0f}{unit}"
    return f"{number:.9g}" if isinstance(number, float) else str(number)
