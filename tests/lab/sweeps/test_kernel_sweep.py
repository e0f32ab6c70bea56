"""The sweeps behind notebooks 06 and 06b: what is compared, and that both sides compute one function."""

import pandas as pd
import pytest
import torch

from hilbert_lib import DilatedPattern, dilated_attention
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.lab import records as committed
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.figures.plots import styles
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import read_records
from hilbert_lib.lab.sweeps import kernels as sweeps
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.lab.workload import grid

CPU = torch.device("cpu")


def attend(name, q, k, v, work):
    return dilated_attention(q, k, v, work.pattern, is_causal=work.is_causal, backend=name)


def read(q, k, v, work, ordering):
    options = {"query_start": work.call.query_start, "kv_ordering": ordering, "backend": "triton"}
    return dilated_attention(q, k, v, work.pattern, **options)


def small(patterns, length=50):
    return grid(patterns, lengths=[length], heads=2, head_dims=[16], device=CPU)


def test_backends_that_serve_are_close_to_float64_and_the_others_say_why(capsys):
    works = small({"paper": DilatedPattern((24, 48), (1, 5))})
    table = ratio_table(run_sides(sweeps.backends(works, attend, ["cudnn", "eager"]), device="cpu"), "backends")
    assert table.direction.tolist() == ["forward", "backward"] * 2
    assert table.is_causal.tolist() == [False, False, True, True]
    assert table[["error_a", "error_b", "output_difference"]].max(axis=None) < 0.01
    assert capsys.readouterr().out.count("cudnn is left out: needs a CUDA device") == 1


LAYOUTS = {"lengths": [36], "dilations": [3], "row_bytes": [16], "keys": 6, "heads": 2, "device": CPU}


@pytest.mark.parametrize("queries", [0, 2])
def test_every_layout_gives_the_same_bits(queries):
    records = run_sides(sweeps.layouts(read, queries=queries, **LAYOUTS), device="cpu")
    table = ratio_table(records, "decoding" if queries else "layouts")
    assert set(table.b) >= {"no table", "residue", "snake", "morton", "hilbert", "hilbert per segment", "random"}
    assert (table.output_difference == 0).all()
    assert 0 < table.error_b.max() < 0.01
    assert table[["queries", "dilation", "row_bytes"]].drop_duplicates().to_numpy().tolist() == [[queries, 3, 16]]


def test_a_copy_and_a_product_are_held_against_what_they_should_leave():
    sides = [side for (side,) in sweeps.ceilings(CPU)]
    errors = {side.name: side.error(side.run()) for side in sides}
    assert errors["copy"] == 0
    assert 0 < errors["matrix product"] < 0.01
    assert errors["read"] == 0
    assert 0 < errors["exponentials"] < 1e-4
    copy, *others = sides
    assert copy.error(()) == 0
    for side in others:
        assert side.error((2 * side.run()[0],)) > 0.5
    _, _, read, exponentials = sides
    assert read.useful_bytes == 2**20 // 8 * 4
    assert exponentials.useful_flop == 2**10 * exponentials.parameters["rounds"]


def test_work_beside_the_roofs_is_bound_by_the_lowest_of_them():
    rates = pd.DataFrame({"name": ["copy", "read", "matrix product", "exponentials"]}).set_index("name")
    rates["gb_per_s"], rates["tflop_per_s"] = [3000, 4000, None, None], [None, None, 800, 2]
    # One forward of 1,000 pairs at head_dim 64, and one at 256, with many and with few bytes.
    work = {"direction": ["forward"] * 3 + ["backward"], "head_dim": [64, 256, 256, 256]}
    work |= {"useful_flop": [256e3, 1024e3, 1024e3, 2560e3], "useful_bytes": [1, 1, 1024e3, 1]}
    # 2e12 exponentials a second leave 2e12 x 256 FLOP; 800e12 of products; 4e12 bytes at 1 FLOP each
    assert sweeps.roof_of(pd.DataFrame(work), rates).tolist() == [512, 800, 4, 800]
    # A record that knows of fewer roofs has these alone.
    assert sweeps.roof_of(pd.DataFrame(work), rates.drop(["read", "exponentials"])).tolist() == [800, 800, 3, 800]


@pytest.mark.evidence
def test_kernels_took_their_results_delta_and_a_sum_of_dq_and_no_more():
    """In the newest record: out and lse, or the gradients and delta; dq in float32 unless determinism is asked for.

    All have as many heads of k as of q, and one sequence. The table of a pattern is there before.
    """
    seen = set()
    for record in (each for each in committed.committed_records() if each["kind"] == "comparison"):
        for side, peak in zip((record["a"], record["b"]), record["peak_bytes"], strict=True):
            at = side["parameters"]
            if side["name"] in ("hopper", "hopper, deterministic"):
                seen.add((side["name"], at["direction"]))
                rows, size = at["length"] * at["heads"], getattr(torch, at["dtype"]).itemsize
                forward, sums = size * rows * at["head_dim"] + 4 * rows, 4 * rows * at["head_dim"]
                backward = 3 * size * rows * at["head_dim"] + 4 * rows + sums * (side["name"] == "hopper")
                # Some forwards have a flag of 4 bytes, for NaN.
                assert peak in ((forward, forward + 4) if at["direction"] == "forward" else (backward,)), side
    assert seen == {("hopper", "forward"), ("hopper", "backward"), ("hopper, deterministic", "backward")}


@pytest.mark.parametrize(("sweep", "most", "at_random"), [("layouts", 1.05, 1.2), ("decoding", 1.07, 1.5)])
@pytest.mark.evidence
def test_an_order_costs_little_more_than_linear_by_a_table(sweep, most, at_random):
    """In the newest record, by the interval's nearer end; more at random, which is no order to choose."""
    pairs = ratio_table(committed.committed_records("06b_orders_and_counters"), sweep)
    ordered = pairs[~pairs.b.isin([sweeps.NO_TABLE, "random"])]
    assert len(ordered) > 50
    assert (1 / ordered.high).max() <= most
    assert 1 < (1 / pairs[pairs.b == "random"].high).max() <= at_random


def test_every_opponent_and_order_has_a_look_of_its_own_in_all_figures():
    names = [*BACKENDS, *(name for name in BASELINES if name not in BACKENDS)]
    looks = styles(names)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(names)
    shown = ["triton", "torchscale"]  # as a figure that shows few of them
    assert [styles(shown)[name]["color"] for name in shown] == [looks[name]["color"] for name in shown]


@pytest.mark.gpu
def test_on_a_gpu_pairs_are_timed_and_recorded_with_their_peak_memory(tmp_path):
    works = grid({"reference": DilatedPattern((512, 1024), (1, 2))}, lengths=[4096], heads=4, head_dims=[64],
                 device=torch.device("cuda"))  # fmt: skip
    pairs = sweeps.backends(works, attend, ["flash"])
    records = run_sides(pairs, device="cuda", output_dir=str(tmp_path), repetitions=5)
    assert len(read_records(tmp_path / "results.jsonl")) == len(records) == 4
    table = ratio_table(records, "backends")
    assert (table.low <= table.ratio).all()
    assert table[["error_a", "error_b"]].max(axis=None) < 0.02
    assert (side_table(records, "backends").peak_bytes >= 4096 * 4 * 64 * 2).all()
