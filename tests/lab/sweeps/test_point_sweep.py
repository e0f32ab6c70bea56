"""The sweep of notebook 13: every way computes its function, and is stored, masked and named as it says."""

from dataclasses import replace
from pathlib import Path

import nbformat
import oracle
import pandas as pd
import pytest
import torch
from cases import refusals
from matplotlib.patches import Rectangle

from hilbert_lib.lab.cache import points as counting
from hilbert_lib.lab.figures.clouds import draw_clouds, draw_reach, draw_words
from hilbert_lib.lab.figures.plots import bars
from hilbert_lib.lab.figures.record import show
from hilbert_lib.lab.ledger import kernels
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.sweeps import points as sweep
from hilbert_lib.lab.tables import ratio_table, side_table, sides_of

CPU = torch.device("cpu")
TEXTS = ["tissue 200 5 2x16", "room 130 3 1x8"]
SIZE = 90  # of a patch, which divides no cloud


def works():
    return (sweep.PointWork.named(text, device=CPU) for text in TEXTS)


def rivals(work):
    yield sweep.by_patches(work, size=SIZE)
    yield sweep.by_blocks(work, "raster")
    yield sweep.by_blocks(work, "hilbert", 64)
    if sweep.fits_boxes(work):
        yield sweep.by_boxes(work)
    yield sweep.by_gather(work)


@pytest.fixture(scope="module")
def records():
    orders = sweep.compare_orders(works(), orders=("raster", "random"), storages=("hilbert",))
    return run_sides([*sweep.compare_points(works(), rivals), *orders, *sweep.build_sides(works())], device=CPU)


def test_every_kernel_stands_beside_lists(records):
    pairs = ratio_table(records, "points").query("cloud == 'tissue'")
    exact = ["boxes", "gather"]
    forward = ["patches", "blocks of 128, raster", "blocks of 64, hilbert", *exact]
    assert pairs.a.tolist() == [*forward, "patches", *exact]  # FlexAttention has no backward here
    assert set(pairs.b) == {"lists"}
    assert pairs.direction.tolist() == ["forward"] * 5 + ["backward"] * 3
    orders = ratio_table(records, "orders of points").query("cloud == 'room'")
    others = ["raster, stored raster", "random, stored raster", "hilbert, halved, stored hilbert"]
    assert orders.a.tolist() == others * 2


def test_many_points_are_stored_but_not_worked_on_at_random(monkeypatch):
    monkeypatch.setattr(counting, "MOST_RANDOM", 100)
    pairs = sweep.compare_orders(works(), orders=("raster", "random"), storages=("random",))
    names = [other.name for other, _ in pairs if other.parameters["cloud"] == "room"]
    assert names == ["raster, stored raster", "hilbert, halved, stored random"] * 2


def test_a_gather_in_parts_has_no_backward(monkeypatch):
    work = next(works()).work
    assert sweep.by_gather(work).has_backward
    monkeypatch.setattr(sweep, "GATHERED_BYTES", 2**16)
    assert not sweep.by_gather(work).has_backward


def test_every_kernel_computes_its_function(records):
    for name in ("points", "orders of points", "lists of points"):
        assert side_table(records, name).error.max() < 1e-5
    assert len(side_table(records, "lists of points")) == len(TEXTS)


def test_a_side_says_what_it_counts(records):
    work = next(works()).work
    table = side_table(records, "points").query("cloud == 'tissue' and direction == 'forward'").set_index("name")
    orders = counting.point_orders(work.pattern)
    assert table.recall["patches"] == pytest.approx(
        counting.patch_recall(work.pattern, orders["hilbert"], SIZE), abs=1e-4
    )
    lists = work.pattern.lists
    assert table.used["lists"] == pytest.approx(lists.pairs / lists.tiles / 64**2, abs=1e-4)
    in_order = counting.lists_in_order(work.pattern, orders["hilbert"])
    touched = len(counting.pairs_by_block(in_order, orders["hilbert"], 64)[0])
    assert table.used["blocks of 64, hilbert"] == pytest.approx(lists.pairs / touched / 64**2, abs=1e-4)
    assert table.useful_flop["gather"] == 4 * 16 * 2 * oracle.points_seen(work.pattern).sum()
    assert table.useful_flop.isna()["patches"]


@pytest.mark.parametrize("kernel", [*(lambda work, n=n: list(rivals(work))[n] for n in range(5)), sweep.by_lists])
def test_the_error_sees_a_wrong_row(kernel):
    work = next(works()).work
    kernel = kernel(work)
    exact = replace(work, pattern=kernel.pattern) if kernel.pattern else work
    out = kernel.attend(*(kernel.stored(x) for x in work.tensors[:3]))
    assert exact.error((out,), kernel.slots) < 1e-5
    assert exact.error((out.roll(1, 1),), kernel.slots) > 0.1
    if kernel.pattern:
        assert work.error((out,), kernel.slots) > 0.01  # patches are another function than windows


def test_patches_see_their_patch_and_a_gradient_of_a_token_stored_twice_is_a_sum():
    work = next(works()).work
    kernel = sweep.by_patches(work, size=SIZE)
    order = counting.point_orders(work.pattern)["hilbert"].tolist()
    assert kernel.rows.tolist() == order[:180] + order[110:]
    place = {row: at for at, row in enumerate(order)}
    assert kernel.slots.tolist() == [place[row] if place[row] < 180 else place[row] + 70 for row in range(200)]
    gradient = torch.ones(1, 270, 2, 16)
    twice = [1.0 + (110 <= place[row] < 180) for row in range(200)]
    assert kernel.of_tokens(gradient)[0, :, 0, 0].tolist() == twice
    assert kernel.stored_once(gradient[:, :200]).sum() == 200 * 32
    rows = torch.arange(200)
    starts = [min(place[row] // SIZE * SIZE, 110) for row in range(200)]
    sees = [[start <= place[key] < start + SIZE for key in range(200)] for start in starts]
    assert kernel.pattern.attends(rows[:, None], rows).tolist() == sees


@pytest.mark.parametrize(
    ("size", "text"), [(64, "tissue 200 5 1x8"), (128, "room 200 3 1x8"), (64, "tissue 130 33 1x8")]
)
def test_the_mask_of_flex_holds_the_pairs_and_marks_full_blocks(size, text):
    points = sweep.PointWork.named(text, device=CPU).work.pattern
    order = counting.point_orders(points)["morton"]
    mask, touched = sweep.flex_mask(points, counting.lists_in_order(points, order), order, size)
    count, seen = len(order), oracle.points_seen(points)[order][:, order]
    rows = torch.arange(count)
    assert mask.mask_mod(None, None, rows[:, None], rows).equal(seen)
    blocks = -(-count // size)
    padded = torch.zeros(blocks * size, blocks * size, dtype=torch.int64)
    padded[:count, :count] = seen
    pairs = padded.view(blocks, size, blocks, size).sum((1, 3))
    is_full = pairs == size**2
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    for (counts, indices), expected in zip(lists, ((pairs > 0) & ~is_full, is_full), strict=True):
        found = torch.zeros_like(expected)
        for row, (number, columns) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
            found[row, columns[:number]] = True
        assert found.equal(expected)
    assert touched == (pairs > 0).sum()
    assert is_full.any() == text.startswith("tissue 130")


def test_lists_of_partial_and_full_blocks_are_equally_wide():
    # The compiled kernel of torch 2.11 has one stride for both.
    partial, full = torch.tensor([0, 1, 2, 5, 8]), torch.tensor([4])
    lists = sweep.block_lists(partial, full, blocks=3, narrow=True)
    assert [indices.tolist() for _, indices in lists] == [
        [[[[0, 1, 2], [2, 0, 0], [2, 0, 0]]]],
        [[[[0, 0, 0], [1, 0, 0], [0, 0, 0]]]],
    ]
    assert [counts.tolist() for counts, _ in lists] == [[[[3, 1, 1]]], [[[0, 1, 0]]]]
    (_, wide), (_, none) = sweep.block_lists(partial, full[:0], blocks=3, narrow=True)
    assert wide.shape == none.shape


def test_neighbours_of_a_query_are_those_of_its_window():
    points = next(works()).work.pattern
    table = sweep.neighbour_table(points.lists)
    for query, seen in enumerate(oracle.points_seen(points)):
        keys = seen.nonzero()[:, 0].tolist()
        assert table[query].tolist() == keys + [-1] * (table.shape[1] - len(keys))


def test_chunks_of_a_gather_change_nothing(monkeypatch):
    work = next(works()).work
    whole = sweep.by_gather(work).attend(*work.tensors[:3])
    monkeypatch.setattr(sweep, "GATHERED_BYTES", 2**16)
    assert sweep.by_gather(work).attend(*work.tensors[:3]).equal(whole)


def test_boxes_serve_grids_that_are_filled_well_enough(monkeypatch):
    filled, sparse = (named.work for named in works())
    assert sweep.fits_boxes(filled)
    monkeypatch.setattr(sweep, "MOST_EMPTY", 2)
    assert not sweep.fits_boxes(sparse)


def test_lists_that_were_made_wrong_have_an_error():
    (side,) = next(sweep.build_sides(works()))
    lists = side.run()
    assert side.error(lists) == 0
    assert side.error((*lists[:3], torch.zeros_like(lists[3]))) == 1


def comparison(name, ratio, interval, sweep_name, window=5, direction="forward"):
    about = {"sweep": sweep_name, "direction": direction, "cloud": "room", "points": 9, "window": window, "head_dim": 8}
    a, b = ({"name": side, "parameters": about, "error": 0.0} for side in (name, "lists"))
    return {"a": a, "b": b, "ratio": ratio, "interval": interval, "output_difference": None}


def test_a_rival_counts_in_its_fastest_order():
    times = [("blocks of 128, raster", 9.0), ("blocks of 64, hilbert", 7.0), ("patches", 2.0)]
    records = [comparison(name, ratio, (ratio - 1, ratio + 1), "points") for name, ratio in times]
    records.append(comparison("blocks of 128, raster", 5.0, (4, 6), "points", window=7, direction="backward"))
    cases = kernels.over_lists(records, "blocks")
    assert cases.base.tolist() == ["blocks of 128, raster", "blocks of 64, hilbert"]
    assert cases[["value", "low", "high"]].to_numpy().tolist() == [[5, 4, 6], [7, 6, 8]]
    assert kernels.over_lists(records, "patches").value.tolist() == [2]


def test_gains_of_an_order_of_work_are_over_row_by_row():
    times = [("raster, stored raster", 2.0), ("hilbert, stored raster", 1.25), ("hilbert, halved, stored random", 9.0)]
    records = [comparison(name, ratio, (ratio - 0.25, ratio + 0.25), "orders of points") for name, ratio in times]
    gains = kernels.point_gains(records).set_index("order")
    assert gains.value.to_dict() == {"hilbert, halved": 2.0, "hilbert": 2.0 / 1.25}
    assert gains.loc["hilbert", ["low", "high"]].tolist() == [1.75 / 1.5, 2.25 / 1.0]
    assert gains.loc["hilbert, halved", ["low", "high"]].tolist() == [1.75, 2.25]
    assert kernels.point_gains([]).empty
    one = {"name": "lists", "parameters": {"sweep": "points"}}
    assert kernels.point_gains([{"a": one, "b": one}]).empty  # of a run that was cut short


def test_the_pictures_say_what_is_counted():
    points, query = next(works()).work.pattern, 70
    table = counting.point_reach(points, ["raster", "hilbert"], query)
    figure = draw_reach(table, window=5, title="a test")
    for axes, name in zip(figure.axes, ("raster", "hilbert"), strict=False):
        order = counting.point_orders(points)[name]
        place = order.argsort()
        own = order[place[query] // 64 * 64 :][:64]
        keys = int(oracle.points_seen(points)[own].any(0).sum())
        assert axes.get_title().lower() == f"{name}: {keys} keys, {-(-keys // 64)} tiles"
        inner, outer = (patch for patch in axes.patches if isinstance(patch, Rectangle))
        cells = (points.coordinates - points.coordinates.amin(0))[own]
        assert [inner.get_height(), inner.get_width()] == (cells.amax(0) - cells.amin(0) + 1).tolist()
        assert outer.get_width() == inner.get_width() + 4
    words = counting.block_words(points, ["hilbert"], query)
    (axes,) = draw_words(words, title="a test").axes
    assert axes.images[0].get_array().sum() == len(words)
    cloud = table[table.order == "raster"].assign(panel="slide")
    both = pd.concat([cloud, cloud.assign(panel="room", height=1.0)])
    plane, _, _ = draw_clouds(both, title="a test").axes
    assert len(plane.collections[0].get_segments()) == len(cloud) - 1


WRONG = ["slide 64 3 2x16", "room 64 4 2x16", "room 64 3 2", "room 0 3 2x16", "room 64 3", "room 64 3 2x16 1"]
test_other_texts_are_refused = refusals(
    {ValueError: [(lambda text=text: sweep.parse_work(text), f"works must be .*; got {text!r}") for text in WRONG]}
)


def as_timed(records):
    """Records as a GPU's run makes them. A rival takes as many times as long as its name has letters."""
    made = []
    for record in records:
        if "a" in record:
            factor = len(record["a"]["name"])
            sides = {"a": timed_side(record["a"], factor), "b": timed_side(record["b"], 1)}
            sides |= {"kind": "comparison", "ratio": float(factor), "interval": (factor - 0.1, factor + 0.1)}
            made.append(record | sides)
        else:
            made.append(timed_side(record, 3) | {"kind": "measurement"})
    return made


def timed_side(side, ms):
    return side | {"samples_ms": [float(ms)] * 5, "parameters": side["parameters"] | {"points": 10**6, "window": 5}}


def test_the_notebook_draws_and_judges_a_record_of_times(records, capsys, rough_pictures):
    notebook = nbformat.read(Path(__file__).parents[3] / "notebooks/13_points.ipynb", as_version=4)
    cells = {cell.id: cell.source for cell in notebook.cells}
    shown = []
    names = {"pd": pd, "ratio_table": ratio_table, "side_table": side_table, "sides_of": sides_of, "output_dir": ""}
    names |= {"POINT_SWEEP": "points", "ORDER_SWEEP": "orders of points", "LIST_SWEEP": "lists of points"}
    names |= {"records": as_timed(records), "display": shown.append, "show": show, "bars": bars}
    for name in ("record", "speeds", "wins", "goals", "orders"):
        exec(cells[name], names)
    told = capsys.readouterr().out
    assert "lists are ahead of patches in 4 of 4 works, and behind in 0" in told
    assert "patches, forward: wanted 1.67, found 7.00 to 7.00, met in 2 of 2 works" in told
    assert "blocks, forward: wanted 5.00, found 21.00 to 21.00, met in 2 of 2 works" in told
    assert [type(each).__name__ for each in shown] == ["Figure", "Figure", "DataFrame", "DataFrame", "Figure"]
