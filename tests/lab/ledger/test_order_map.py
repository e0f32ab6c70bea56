"""The map of orders: times take the place of counts, and the title says what the cells do."""

import math

import pandas as pd
import pytest
import torch

from hilbert_lib.lab.cache.order_map import APART, HILBERT, ROWS, count_order_map, count_point_map
from hilbert_lib.lab.figures.order_map import draw_order_map
from hilbert_lib.lab.ledger.order_map import (
    gains_of_08b,
    least_windows,
    map_finding,
    map_gains,
    map_panels,
    newest_map,
    order_map,
    point_map,
    write_map,
)
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import committed_records
from hilbert_lib.lab.sweeps.grids import MAP_SWEEP, attend_by_flex, compare_on_map, parse_map_work
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.lab.workload import Workload

CPU = torch.device("cpu")


def attention(q, k, v, order, work, block_size):
    return attend_by_flex(q, k, v, work.pattern, order, block_size=block_size or 128)


@pytest.fixture(scope="module")
def records():
    works = [parse_map_work(text, device=CPU, dtype="float32") for text in ("8x8 3x3 2x16", "8x8 3x3:2 2x16")]
    return run_sides(compare_on_map(works, attention, block_sizes=[64, 128], boxes=True), device=CPU)


def timed(kernel, order, window, ratio, *, rows="raster", block_size=128):
    """A record of a pair as the sweep makes it, with a ratio."""
    sides = []
    for name, own in ((rows, "blocks"), (order, kernel)):
        parameters = {"sweep": MAP_SWEEP, "side": 64, "window": window, "dilation": 1, "kernel": own}
        parameters |= {"block_size": None if own == "boxes" else block_size, "order": name}
        sides.append({"name": name if own == "blocks" else f"boxes, {name}", "parameters": parameters, "error": 0.0})
    a, b = sides
    return {"kind": "comparison", "a": a, "b": b, "ratio": ratio, "interval": (ratio, ratio), "output_difference": 0.0}


def test_every_order_stands_beside_rows_and_boxes_beside_blocks_of_128(records):
    pairs = ratio_table(records, MAP_SWEEP)
    plain, dilated = pairs[pairs.dilation == 1], pairs[pairs.dilation == 2]
    assert list(zip(plain.a, plain.b, strict=True)) == [
        (ROWS, HILBERT),
        (ROWS, HILBERT),
        (ROWS, "boxes, raster"),
        (HILBERT, "boxes, raster"),
    ]
    assert list(zip(dilated.a, dilated.b, strict=True)) == [(ROWS, HILBERT), (ROWS, APART)] * 2
    assert side_table(records, MAP_SWEEP).error.max() < 1e-5
    assert map_gains(records).empty  # nothing is timed on a CPU


def test_an_order_that_is_not_undone_is_seen():
    def wrong(q, k, v, order, work, block_size):
        return order.undo(attention(q, k, v, order, work, block_size), dim=1)

    works = [Workload.on_grid("8x8 3x3 2x16", device=CPU, dtype="float32")]
    sides = side_table(run_sides(compare_on_map(works, wrong, block_sizes=[64]), device=CPU), MAP_SWEEP)
    assert sides.set_index("name").error[HILBERT] > 0.1


def test_a_time_takes_the_place_of_a_count_and_the_lowest_of_several_counts():
    counts = count_order_map(sides=[64], windows=[5, 7], dilations=[1], block_sizes=[128])
    found = [timed("blocks", HILBERT, 7, 1.5), timed("boxes", ROWS, 7, 3.0), timed("boxes", ROWS, 7, 2.5, rows=HILBERT)]
    again = map_gains([timed("blocks", HILBERT, 7, 1.4)])
    table = order_map(counts, pd.concat([map_gains(found), again]))
    cells = table.set_index(["kernel", "window"])
    assert cells.timed["blocks", 7] == 1.4
    assert cells.timed["boxes", 7] == 2.5
    assert math.isnan(cells.timed["blocks", 5])
    assert least_windows(order_map(counts, map_gains([]))) == {64: None}
    assert least_windows(table) == {64: 7}
    title = map_finding(table, point_map(count_point_map(200), []), "a card")
    assert "pays from window 7 (64²) on" in title
    assert title.endswith("20 cells are counted, 2 are timed (a card)")


def test_a_cell_that_was_timed_is_framed_and_bold():
    data = pd.DataFrame({"panel": "p", "row": "64²", "window": [3, 5], "counted": [0.5, 2.0]})
    axes = draw_order_map(data.assign(timed=[float("nan"), 1.5]), title="a test").axes[0]
    texts = [(text.get_text(), text.get_weight()) for text in axes.texts]
    assert texts == [("0.50", "normal"), ("1.50", "bold"), ("2.00", "normal")]
    assert len(axes.patches) == 1
    assert axes.images[0].get_array().tolist() == [[0.5, 1.5]]


@pytest.mark.evidence
def test_the_committed_map_has_a_panel_a_kernel_and_the_times_of_08b():
    grids, points, source = newest_map()
    assert source
    panels = map_panels(grids, points)
    assert panels.panel.nunique() == 9
    assert len(panels) == len(grids) + len(points)
    of_08b = gains_of_08b(committed_records("08b_kernels_on_grids"))
    assert len(of_08b) >= 8
    on_map = grids.merge(of_08b, on=["kernel", "block_size", "order", "side", "dilation", "window"])
    assert (on_map.timed <= on_map.value + 1e-9).all()


def test_the_readmes_picture_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("hilbert_lib.lab.ledger.order_map.newest_map", lambda: made_map())
    write_map(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def made_map():
    counts = count_order_map(sides=[16], windows=[5], dilations=[1, 2], block_sizes=[16])
    return order_map(counts, map_gains([])), point_map(count_point_map(200), []), ""
