"""The sweep of notebook 08 checks every order against float64, and its tables say which order is ahead."""

import oracle
import pandas as pd
import pytest
import torch

from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.cache import neighbourhood as predictions
from hilbert_lib.lab.figures import neighbourhood as figures
from hilbert_lib.lab.figures import show
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.sweeps import grids as benchmarks
from hilbert_lib.lab.sweeps.grids import GridWorkload
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.ordering import Ordering

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    sizes = {"sides": [16, 6], "windows": [3, 7, 99], "block_sizes": [16, 32], "heads": 2, "head_dim": 8}
    return run_sides(benchmarks.orders(**sizes, device=CPU, dtype="float32"), device=CPU)


def test_every_order_is_paired_with_raster_and_dense_with_hilbert_once(records):
    pairs = ratio_table(records, "neighbourhood")
    against = pairs[pairs.a == "raster"].groupby(["side", "window", "block_size"]).b.apply(set)
    curves = {"snake", "tile", "morton", "hilbert"}
    assert against.to_dict() == {
        (side, window, size): curves | extra
        for side, window, extra in ((16, 3, {"random"}), (16, 7, {"random"}), (6, 3, set()))
        for size in (16, 32)
    }
    dense = pairs[pairs.a == "dense"]
    assert dense[["b", "side", "window", "block_size"]].to_numpy().tolist() == [
        ["hilbert", 16, 7, 32],
        ["hilbert", 6, 3, 32],
    ]
    assert (pairs[pairs.a == "hilbert"].b == "hilbert, reordered").all()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"windows": [33]}, r"windows must hold one of at most 20, the side of a grid, got \[33\]"),
        ({"windows": []}, "windows must hold at least one"),
        ({"sides": [16, 16]}, r"sides must hold each integer once, got \[16, 16\]"),
        ({"block_sizes": [0]}, r"block_sizes\[0\] must be an integer of at least 1"),
    ],
)
def test_a_sweep_without_a_work_is_refused(wrong, named):
    sizes = {"sides": [16, 20], "windows": [7], "block_sizes": [16], "heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=named):
        next(benchmarks.orders(**{**sizes, **wrong}, device=CPU))


def test_every_side_computes_its_function(records):
    sides = side_table(records, "neighbourhood")
    assert sides.error.max() < 1e-5
    assert set(sides.name) >= {"dense", "hilbert, reordered", "random"}


def test_records_hold_the_predicted_blocks(records):
    sides = side_table(records, "neighbourhood")
    counts = predictions.count_blocks([(16, 16)], windows=[3, 7], block_sizes=[16, 32])
    sides = sides[sides.side == 16]
    merged = sides.merge(counts, left_on=["name", "window", "block_size"], right_on=["order", "window", "block_size"])
    assert len(merged) == len(counts)
    assert (merged.touched_x == merged.touched_y).all()
    assert (merged.full_x == merged.full_y).all()


@pytest.mark.parametrize("window", [5, 12])
def test_the_error_sees_a_wrong_row_and_the_order_of_storage(window):
    near = Neighbourhood((12, 12), window)
    work = GridWorkload(near, heads=2, head_dim=4, device=CPU, dtype="float64")
    q, k, v, dout = work.tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = oracle.neighbourhood_attention(*leaves, near)
    gradients = torch.autograd.grad(out, leaves, dout)
    ordering = Ordering.from_curve("hilbert", 144, grid=(12, 12))
    stored = [[ordering.apply(x, dim=1) for x in results] for results in ((out.detach(),), gradients)]
    for results in stored:
        assert work.error(results, ordering) < 1e-12
        assert work.error(results, Ordering.linear(144)) > 0.1
    for wrong in range(3 if window < 12 else 1):
        changed = [x.clone() for x in stored[1]]
        changed[wrong] *= 1.5
        assert work.error(changed, ordering) == pytest.approx(0.5)


def timed(order, ratio, low, high):
    work = {"side": 8, "window": 3, "block_size": 16, "direction": "forward"}
    return {"a": "raster", "b": order, **work, "ratio": ratio, "low": low, "high": high}


def blocks(**touched):
    work = {"side": 8, "window": 3, "block_size": 16.0, "direction": "forward"}
    return pd.DataFrame([{"name": name, **work, "touched": count} for name, count in touched.items()])


def test_the_table_of_orders_names_the_fastest_those_level_with_it_and_those_with_the_fewest_blocks():
    rows = [timed("tile", 3.0, 2.8, 3.1), timed("hilbert", 2.9, 2.7, 3.0), timed("snake", 1.1, 1.0, 1.2)]
    sides = blocks(raster=30, tile=10, hilbert=10, snake=30, dense=None)
    (row,) = benchmarks.order_table(pd.DataFrame(rows), sides).itertuples()
    assert (row.fastest, row.ratio, row.hilbert) == ("tile", 3.0, 2.9)
    assert (row.level, row.fewest) == ("hilbert", "tile, hilbert")


def test_the_table_of_orders_can_name_raster():
    rows = [timed("tile", 0.5, 0.4, 0.6), timed("hilbert", 0.9, 0.8, 1.1)]
    (row,) = benchmarks.order_table(pd.DataFrame(rows), blocks(raster=1, tile=2, hilbert=3)).itertuples()
    assert (row.fastest, row.ratio, row.level, row.fewest) == ("raster", 1.0, "hilbert", "raster")


@pytest.mark.usefixtures("rough_pictures")
def test_every_figure_is_drawn_from_its_table(tmp_path):
    near = Neighbourhood((16, 16), 5)
    counts = predictions.count_blocks([(16, 16)], windows=[3, 5], block_sizes=[16, 32])
    show(figures.draw_blocks, counts, output_dir=str(tmp_path), grid="16 x 16")
    shares = predictions.block_shares(near, block_size=32)
    show(figures.draw_block_maps, shares, output_dir=str(tmp_path), title="here")
    exchange = predictions.count_exchange(near, ranks=[2, 4], row_bytes=8)
    show(figures.draw_exchange, exchange, output_dir=str(tmp_path), title="here")
    rows = [timed(order, 2.0, 1.9, 2.2) for order in ("snake", "hilbert")]
    show(figures.draw_speedups, pd.DataFrame(rows), output_dir=str(tmp_path), block_size=16, source="here")
    sides = [{"name": row["b"], **row, "touched": 10, "median_ms": 1.0} for row in rows]
    show(figures.draw_time_by_blocks, pd.DataFrame(sides), output_dir=str(tmp_path), source="here")
    assert len(list(tmp_path.glob("*.png"))) == 5
