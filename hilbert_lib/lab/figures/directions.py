"""Pictures of a dilated pattern along an order of a grid: the cells that heads see, and how many of the neighbours."""

from functools import cache

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hilbert_lib.lab.cache.along_curve import HEADS, cells_seen, keys_of_a_query, shares_of_windows, window_of
from hilbert_lib.lab.cache.neighbourhood import neighbourhood_orderings
from hilbert_lib.lab.figures.plots import by_hand, styles
from hilbert_lib.patterns.dilated import DilatedPattern

WIDGET_SIDE = 64
# By name, on a grid of 64 x 64.
PATTERNS = {
    "five branches": DilatedPattern((128, 256, 512, 1024, 2048), (1, 2, 4, 8, 16)),
    "one segment": DilatedPattern((256,), (1,)),
    "one segment, dilated": DilatedPattern((1024,), (4,)),
}


def draw_neighbours(*, pattern: str, order: str, window: int, row: int, column: int) -> Figure:
    """The cells that heads see from one cell of a grid of 64 x 64, and the share of a window that they see.

    pattern: of `PATTERNS`. order: of `neighbourhood_orderings`. window: odd. Shares are means over cells and heads.
    """
    shape = (WIDGET_SIDE, WIDGET_SIDE)
    chosen, ordering = PATTERNS[pattern], neighbourhood_orderings(shape)[order]
    keys = keys_of_a_query(chosen, WIDGET_SIDE**2)
    figure = by_hand(9.6, 4.6, left=0.06, right=0.98, bottom=0.13, top=0.8, wspace=0.24)
    grid, curve = figure.subplots(1, 2)
    grid.imshow(cells_seen(chosen, ordering, shape, (row, column)), cmap="Oranges", vmin=0, vmax=1)
    corner = (column - window / 2, row - window / 2)
    grid.add_patch(Rectangle(corner, window, window, fill=False, edgecolor="black", lw=1.5))
    grid.plot(column, row, "*", color="white", markeredgecolor="black", markersize=12)
    grid.set(xlabel="column", ylabel="row", title="share of heads that see each cell")
    grid.spines[:].set_visible(True)
    for name, look in styles(["raster", "morton", "hilbert"]).items():
        shares = _shares(pattern, name)
        curve.plot(list(shares), [100 * share for share in shares.values()], color=look["color"], label=name, lw=1.2)
    share = _shares(pattern, order)[window]
    curve.plot(window, 100 * share, "o", color="black", label=f"here: {order}")
    same_work = window_of(keys)
    whole = [100 * min(1.0, same_work / width) ** 2 for width in shares]
    curve.plot(list(shares), whole, color="0.5", ls="--", label=f"window of {same_work} x {same_work}")
    curve.set(xlabel="window (cells along a side)", ylabel="neighbours that a head sees (%)", ylim=(0, 105))
    curve.legend(loc="upper right", fontsize=8)
    found = f"{pattern}, {order.replace('hilbert', 'Hilbert')} order: a head sees {share:.0%} of {window} x {window}"
    figure.suptitle(
        f"{found}\nfor {keys:,.0f} keys a query and head; a window of that work has {same_work} x {same_work}"
    )
    return figure


@cache
def _shares(pattern: str, order: str) -> dict[int, float]:
    # Of every odd window up to half of the grid.
    shape, windows = (WIDGET_SIDE, WIDGET_SIDE), range(3, WIDGET_SIDE // 2 + 2, 2)
    ordering = neighbourhood_orderings(shape)[order]
    return shares_of_windows(PATTERNS[pattern], ordering, shape, windows, heads=HEADS)
