"""The map of where an order pays: cells counted on any machine, with the times of those that a record holds."""

from functools import cache
from io import BytesIO
from pathlib import Path

import matplotlib
import pandas as pd

from hilbert_lib.lab.cache.neighbourhood import BLOCK
from hilbert_lib.lab.cache.order_map import APART, CASE, HILBERT, ROWS, count_order_map, count_point_map
from hilbert_lib.lab.cache.points import HALVED
from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.figures.order_map import draw_order_map
from hilbert_lib.lab.figures.record import STYLE, in_256_colours
from hilbert_lib.lab.ledger.cases import INTERVAL
from hilbert_lib.lab.ledger.kernels import Records, boxes_over_blocks, grid_gains, point_gains, ratios
from hilbert_lib.lab.records import committed_records
from hilbert_lib.lab.sweeps.grids import MAP_SWEEP
from hilbert_lib.lab.tables import sides_of

MAP, GRIDS, POINTS = "08_where_a_curve_pays", "08b_kernels_on_grids", "13_points"
POINT_CASE = ["kernel", "cloud", "points", "window"]


def map_gains(records: Records) -> pd.DataFrame:
    """Times of the map's sweep, of which there may be none: `CASE`, value, low, high.

    Above 1 the order is faster than rows, or boxes are faster than blocks in the better order.
    """
    if not any(sides_of(record)[0]["parameters"]["sweep"] == MAP_SWEEP for record in records if "a" in record):
        return pd.DataFrame(columns=[*CASE, *INTERVAL])
    pairs = ratios([record for record in records if "a" in record], sweep=MAP_SWEEP).dropna(subset=["value"])
    boxes = pairs[pairs.kernel == "boxes"].assign(block_size=BLOCK, order=ROWS)
    fastest = boxes.sort_values("value", kind="stable").drop_duplicates(CASE)  # beside the better order of blocks
    return pd.concat([pairs[pairs.kernel == "blocks"], fastest], ignore_index=True)[[*CASE, *INTERVAL]]


def gains_of_08b(records: Records) -> pd.DataFrame:
    """The works of notebook 08b that are cells of the map, as `map_gains` has them."""
    blocks = grid_gains(records).query("order == 'hilbert'").assign(kernel="blocks")
    boxes = (
        boxes_over_blocks(records).query("direction == 'forward'").assign(kernel="boxes", block_size=BLOCK, order=ROWS)
    )
    both = pd.concat([blocks, boxes], ignore_index=True).assign(dilation=1)
    is_square = both.side.map(lambda side: isinstance(side, int)) & both.window.map(lambda w: isinstance(w, int))
    return both[is_square].astype({"side": int, "window": int, "block_size": int})[[*CASE, *INTERVAL]]


def order_map(counts: pd.DataFrame, gains: pd.DataFrame) -> pd.DataFrame:
    """Counted cells with their times: a cell that was timed more than once has the lowest gain. NaN where none was.

    counts: `count_order_map`. gains: of `map_gains` and `gains_of_08b`.
    """
    lowest = gains.sort_values("value", kind="stable").drop_duplicates(CASE).rename(columns={"value": "timed"})
    lowest = lowest.astype({"block_size": int, "side": int, "dilation": int, "window": int})
    return counts.merge(lowest, on=CASE, how="left").astype({"timed": float, "low": float, "high": float})


def point_map(counts: pd.DataFrame, records: Records) -> pd.DataFrame:
    """Counted cells over points, and those that notebook 13 timed, of as many points as it had.

    counts: `count_point_map`. records: of notebook 13.
    """
    gains = point_gains(records).rename(columns={"value": "timed"})
    own = gains[gains.order == HALVED].assign(kernel="lists")
    lowest = own.sort_values("timed", kind="stable").drop_duplicates(POINT_CASE)
    table = counts.merge(lowest[[*POINT_CASE, "timed", "low", "high"]], on=POINT_CASE, how="outer")
    return table.astype({"timed": float, "low": float, "high": float})


def map_panels(grids: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """The table of the figure: panel, row, window, counted, timed."""
    tables = []
    for size in grids[grids.kernel == "blocks"].block_size.unique():
        of_size = grids[(grids.kernel == "blocks") & (grids.block_size == size)]
        plain, dilated = of_size.dilation == 1, of_size.dilation > 1
        name = f"FlexAttention, blocks of {size}"
        panels = {
            f"{name}:\nHilbert order": plain,
            f"{name}, dilated:\nHilbert order": dilated & (of_size.order == HILBERT),
        }
        panels[f"{name}, dilated:\nresidues apart, Hilbert order"] = of_size.order == APART
        for panel, is_shown in panels.items():
            tables.append(of_size[is_shown].assign(panel=panel))
    boxes = "boxes in plain rows over\nblocks of 128 in the better order"
    tables.append(grids[grids.kernel == "boxes"].assign(panel=boxes))
    table = pd.concat(tables, ignore_index=True)
    dilation = table.dilation.map(lambda d: f", dilation {d}" if d > 1 else "")
    table["row"] = table.side.map("{}²".format) + dilation
    over_points = points.assign(panel=points.cloud.map("points of a made {}:\norder of work, or of blocks".format))
    over_points["row"] = over_points.kernel.map({"lists": "lists", "blocks": "blocks of 64"})
    over_points["row"] += over_points.points.map(", {:,} points".format)
    columns = ["panel", "row", "window", "counted", "timed"]
    return pd.concat([table[columns], over_points[columns]], ignore_index=True)


def least_windows(grids: pd.DataFrame, *, block_size: int = BLOCK) -> dict[int, int | None]:
    """Of each grid's side the least window of the map from which on Hilbert order gains, by time where there is one.

    None where the widest window does not gain.
    """
    of_size = grids[(grids.kernel == "blocks") & (grids.block_size == block_size) & (grids.dilation == 1)]
    least = {}
    for side, cells in of_size.groupby("side"):
        least[side] = _least(cells)
    return least


def map_finding(grids: pd.DataFrame, points: pd.DataFrame, source: str) -> str:
    """The map's title: from which window on an order pays, and what was counted and what timed.

    source: of the times.
    """
    sizes = [f"{window} ({side}²)" for side, window in least_windows(grids).items() if window]
    first = f"In FlexAttention's blocks of {BLOCK} Hilbert order pays from window {', '.join(sizes)} on"
    apart = grids[(grids.order == APART) & (grids.block_size == BLOCK)]
    boxes, lists = grids[grids.kernel == "boxes"], points[points.kernel == "lists"]
    parts = [f"with a dilation from {_least(apart)} on, if residues lie apart"] if _least(apart) else []
    parts += [f"boxes in plain rows over the better order: {_ends(boxes)}"] if len(boxes) else []
    parts += [f"order of work over points: {_ends(lists)}"] if len(lists) else []
    cells = pd.concat([grids, points], ignore_index=True)
    timed = int(cells.timed.notna().sum())
    last = f"{int(cells.counted.notna().sum())} cells are counted, {timed} are timed"
    return "\n".join([first, "; ".join(parts).capitalize(), last + (f" ({source})" if timed else "")])


def _gains(cells: pd.DataFrame) -> pd.Series:
    # By time where there is one.
    return cells.timed.fillna(cells.counted)


def _least(cells: pd.DataFrame) -> int | None:
    # The least window from which on every cell gains.
    worst = _gains(cells).groupby(cells.window).min().sort_index()
    wide = worst[(worst > 1)[::-1].cummin()[::-1].astype(bool)]
    return int(wide.index[0]) if len(wide) else None


def _ends(cells: pd.DataFrame) -> str:
    return f"{_gains(cells).min():.2f} to {_gains(cells).max():.2f}"


def newest_map(records: Records = ()) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """The map with the times of these records, or of the committed ones where these hold none.

    records: of notebook 08. Beside them stand the cells that notebook 08b timed on the same hardware.

    Returns:
        `order_map`, `point_map`, and the hardware of the times.
    """
    own = list(records) if len(map_gains(records)) else committed_records(MAP)
    gains, on_grids, over_points = map_gains(own), committed_records(GRIDS), committed_records(POINTS)
    used = [own] if len(gains) else []
    if on_grids and (not used or _hardware(on_grids) == _hardware(own)):
        gains = pd.concat([gains, gains_of_08b(on_grids)], ignore_index=True)
        used.append(on_grids)
    used += [over_points] if over_points else []
    source = " and ".join(dict.fromkeys(map(_hardware, used)))
    return order_map(_counted_grids(), gains), point_map(_counted_points(), over_points), source


def _hardware(records: Records) -> str:
    return say_hardware(records[0]["environment"])


@cache
def _counted_grids() -> pd.DataFrame:
    return count_order_map()


@cache
def _counted_points() -> pd.DataFrame:
    return count_point_map()


def write_map(path: str | Path) -> None:
    """Write the README's picture of the suite to a PNG file: what `make picture` calls."""
    grids, points, source = newest_map()
    with matplotlib.rc_context(STYLE), BytesIO() as png:
        draw_order_map(map_panels(grids, points), title=map_finding(grids, points, source)).savefig(png, format="png")
        Path(path).write_bytes(in_256_colours(png.getvalue()))
