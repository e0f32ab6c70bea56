"""Every formula of the ledger again, in plain Python that shares no code with it, on small records written by hand."""

import statistics
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import oracle
import pandas as pd
import pytest
from lru import Lru
from made_up import answered_by, comparison

from hilbert_lib import PointNeighbourhood
from hilbert_lib.lab.cache.points import point_orders
from hilbert_lib.lab.clouds import CLOUDS
from hilbert_lib.lab.ledger import kernels, models, ring
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.ordering import Ordering

LENGTH, SEGMENT, LINE = 4096, 1024, 128
SLOTS = {"linear": range(LENGTH), "hilbert": Ordering.from_curve("hilbert", LENGTH).inverse.tolist()}
SLOTS["restarting"] = Ordering.from_curve("hilbert", LENGTH, chunk=SEGMENT).inverse.tolist()


def units(kind, positions, *, unit, size, heads=8, head=0, layout="bshd"):
    """The units that the rows of these positions overlap, row by row."""
    firsts = (SLOTS[kind][p] for p in positions)
    places = [(s * heads + head if layout == "bshd" else head * LENGTH + s) * size for s in firsts]
    return [set(range(place // unit, (place + size - 1) // unit + 1)) for place in places]


def saved(case, unit, kind="hilbert", than="linear"):
    positions = [p for p in range(LENGTH) if p % SEGMENT % case.dilation == 0]
    how = {"unit": unit, "size": case.row_bytes, "layout": case.layout}
    one, other = (len(set().union(*units(name, positions, **how))) for name in (kind, than))
    return 1 - one / other


def test_lines_and_fetches_saved_are_those_of_every_row():
    cases = models.units_saved(unit="line")
    assert len(cases) == 70
    assert [saved(case, LINE) for case in cases.itertuples()] == pytest.approx(cases.value.tolist())
    dilated = models.units_saved(unit="fetch", least_dilation=2)
    assert set(dilated.dilation) == {2, 4, 8, 16, 32, 64}
    assert [saved(case, 64) for case in dilated.itertuples()] == pytest.approx(dilated.value.tolist())
    again = models.saved_by_restarting()
    one = [saved(case, LINE, "restarting", "hilbert") for case in again.itertuples()]
    assert one == pytest.approx(again.value.tolist())


def test_requests_are_counted_tile_by_tile_in_the_order_of_positions():
    cases = models.units_saved(unit="sector", counts="requested", key_order="position")
    for case in cases.query("row_bytes == 16").itertuples():
        found = {}
        for kind in ("linear", "hilbert"):
            tiles = Counter()
            for start in range(0, LENGTH, SEGMENT):
                keys = range(start, start + SEGMENT, case.dilation)
                for first in range(0, len(keys), 64):
                    tile = units(kind, keys[first : first + 64], unit=32, size=16, layout=case.layout)
                    tiles[kind] += len(set().union(*tile))
            found |= tiles
        assert case.value == pytest.approx(1 - found["hilbert"] / found["linear"])


def test_hit_rates_gained_are_those_of_a_cache_that_forgets_the_oldest():
    cases = models.hit_rate_gained(dilation=4).query("row_bytes == 32 and cache_kib in [96, 128, 256]")
    for case in cases.itertuples():
        rates = {}
        for kind in ("linear", "hilbert"):
            keys = sorted(range(0, LENGTH, 4), key=lambda p, kind=kind: SLOTS[kind][p])
            cache, reads = Lru(case.cache_kib * 1024 // LINE), []
            for _, first in ((q, k) for q in range(0, len(keys), 128) for k in range(0, len(keys), 64)):
                rows = units(kind, keys[first : first + 64], unit=LINE, size=32, heads=1)
                reads += [(tensor, line) for tensor in "kv" for line in sorted(set().union(*rows))]
            rates[kind] = 100 - 100 * cache.count_misses(reads) / len(reads)
        assert case.value == pytest.approx(rates["hilbert"] - rates["linear"]), case


def test_the_commonest_stride_and_shared_lines_are_counted_row_by_row():
    strides = models.stride_regularity().set_index("dilation").value
    for rate in (1, 16, 64):
        rows = [p for p in range(LENGTH) if p % SEGMENT % rate == 0]
        share = {}
        for kind in ("linear", "hilbert"):
            steps = Counter(SLOTS[kind][b] - SLOTS[kind][a] for a, b in pairwise(rows))
            share[kind] = max(steps.values()) / sum(steps.values())
        assert strides[rate] == pytest.approx(share["hilbert"] / share["linear"])
    for case in models.lines_shared_by_branches().itertuples():
        shares = {}
        for kind in ("hilbert", "linear"):
            how = {"unit": LINE, "size": case.row_bytes, "heads": case.heads, "layout": case.layout}
            branches = enumerate((2, 4))
            touched = [set().union(*units(kind, range(0, LENGTH, r), head=head, **how)) for head, r in branches]
            shares[kind] = len(touched[0] & touched[1]) / len(touched[0])
        assert (case.hilbert, case.linear) == pytest.approx((shares["hilbert"], shares["linear"]))
        assert case.value == pytest.approx(shares["hilbert"] - shares["linear"])
        assert (case.linear > 0) == (case.layout == "bshd")  # heads can share lines there at all


def test_a_plain_kernel_moves_its_output_only_under_a_causal_mask():
    q, k, v = np.random.default_rng(0).normal(size=(3, 64, 8))
    order = Ordering.from_curve("hilbert", 64).perm.tolist()
    moved = {}
    for is_causal in (False, True):
        outs = []
        for keys, values in ((k, v), (k[order], v[order])):
            weights = np.exp(q @ keys.T / 8**0.5) * (np.tri(64) if is_causal else 1)
            outs.append(weights / weights.sum(1, keepdims=True) @ values)
        moved[is_causal] = np.linalg.norm(outs[1] - outs[0]) / np.linalg.norm(outs[0])
    found = models.plain_kernel_on_reordered_keys().set_index("is_causal").value
    for is_causal in moved:
        assert (found[is_causal] > 0.5) == (moved[is_causal] > 0.5)
        assert (found[is_causal] < 1e-12) == (moved[is_causal] < 1e-12)


def test_memory_of_one_segment_is_over_that_of_many(monkeypatch):
    peaks = {64: SimpleNamespace(peak=80, total_gb=9.0), 8: SimpleNamespace(peak=20, total_gb=3.0)}
    monkeypatch.setattr(models, "estimate_memory", lambda pattern, **_: peaks[pattern.segment_lengths[0]])
    cases = models.memory_of_segments(length=64, segment_length=8, backends=["eager"]).set_index("what").value
    assert cases.to_dict() == {"GiB": 3.0, "one segment over many": 4.0}


def run(side, ranks, peak, sent=0, sweep="strong", tokens=64):
    about = {"sweep": sweep, "side": side, "ranks": ranks, "tokens": tokens, "heads": 16, "is_causal": False}
    return {**about, "peak_bytes": peak, "sent_forward": sent}


def test_memory_and_bytes_of_ranks_are_those_of_plan_and_record(monkeypatch):
    table = {"what": ["a", "a", "b", "b"], "ranks": [2, 8, 2, 8], "memory_forward": [40, 10, 40, 30]}
    monkeypatch.setattr(ring, "scaling_table", lambda *_, **__: pd.DataFrame(table))
    weak = [run("auto", 1, 60, sweep="weak", tokens=32), run("auto", 4, 30, sweep="weak", tokens=128)]
    records = [*weak, run("auto", 1, 100), run("auto", 4, 26), run("gathered", 4, 90), run("dense ring", 4, 5)]
    cases = ring.memory_by_ranks(records, tokens=1, ranks=[2, 8])
    assert cases.value.tolist() == pytest.approx([80 / 80, 240 / 80, 60 / 100, 104 / 100, 360 / 100, 20 / 100])
    assert cases.how.tolist() == ["planned"] * 2 + ["measured"] * 4
    assert cases.what.tolist()[2:] == ["dilated rows", "dilated rows", "all k and v, gathered", "dense ring"]
    costs = {"all_gather": (60, 9), "ring": (20, 6)}

    def plan_ring(*_, transport, **__):
        sent, memory = costs[transport]
        return SimpleNamespace(ranks=[SimpleNamespace(sent_forward=each, memory_forward=memory) for each in (1, sent)])

    monkeypatch.setattr(ring, "plan_ring", plan_ring)
    records = [run("ring", 4, 10, 2), run("all_gather", 4, 11, 2), run("gathered", 4, 40, 80), run("auto", 4, 1, 1)]
    cases = ring.gathered_over_ring(records, tokens=4096, ranks=[2])
    assert cases.value.tolist() == pytest.approx([60 / 20, 9 / 6, 2 / 2, 11 / 10, 80 / 2, 40 / 10, 1 / 2, 1 / 10])
    assert cases.gathered.tolist() == ["the same rows"] * 4 + ["all k and v"] * 2 + ["nothing"] * 2


def test_rows_before_and_after_the_split_and_the_last_rank(monkeypatch):
    rows = pd.DataFrame({"kind": ["hilbert"], "before": [30], "after": [10]})
    monkeypatch.setattr(ring, "split_table", lambda *_, **__: rows)
    sizes = {"tokens": 4096, "ranks": 2, "kinds": ["hilbert"]}
    assert ring.kept_by_order_of_shards(**sizes).value.tolist() == [3.0]
    assert ring.saved_by_order(**sizes).set_index("laid_over").value.to_dict() == {"the sequence": -2, "each shard": 0}
    plan = SimpleNamespace(ranks=[SimpleNamespace(flop_forward=flop) for flop in (60, 20)])
    monkeypatch.setattr(ring, "plan_ring", lambda *_, **__: plan)
    assert ring.balance(tokens=4096, speeds=[[2, 1]]).value.tolist() == [30 / 20]


def test_the_longest_sequences_are_those_that_were_checked(tmp_path):
    lines = [(16, False, 0.1), (4, True, 0.1), (99, True, None)]
    records = [{"tokens": n, "backward": backward, "out_error": error} for n, backward, error in lines]
    cases = ring.longest(records, both=8, forward=4).set_index("what").value
    assert cases.to_dict() == {"forward and backward": 0.5, "forward": 4.0}
    made = [comparison("sdpa", "triton", 2.0, sweep="backends", length=n) for n in (131072, 524288)]
    assert answered_by(LEDGER["R6"], made, tmp_path).cases.value.tolist() == [2.0]


def test_layouts_are_the_ratios_of_hilbert_order_alone(tmp_path):
    sizes = {"length": 65536, "queries": 0, "row_bytes": 128, "dilation": 16, "head_dim": 64}
    made = [comparison("linear", name, r, sweep="layouts", **sizes) for name, r in (("hilbert", 1.2), ("tile", 3.0))]
    made.append(comparison("linear", "hilbert", 1.4, sweep="decoding", **{**sizes, "queries": 1}))
    made.append(comparison("linear", "hilbert", 1.1, sweep="claims", pair="two layouts", **sizes))
    made.append(comparison("standard", "hilbert", 9.0, sweep="claims", pair="two functions", **sizes))
    found = answered_by(LEDGER["K6"], made, tmp_path)
    assert sorted(found.cases.value) == [1.1, 1.2, 1.4]
    assert found.verdict == "does not hold (2 of 3 cases)"


def test_a_loop_is_timed_over_the_median_call_of_its_length(tmp_path, monkeypatch):
    sizes = {"sweep": "pattern cache", "what": "Hilbert ordering"}
    calls = [comparison("build", "call", 0.5, ms=n / 32, length=n, **sizes) for n in (64, 128)]
    calls.append(comparison("build", "look-up", 0.5, ms=1e-3, length=64, **sizes))
    monkeypatch.setattr(kernels, "committed_records", lambda name: calls)
    loop = {"name": "loop", "parameters": {"sweep": "claims", "length": 64}, "samples_ms": [4.0, 10.0, 6.0]}
    (case,) = answered_by(LEDGER["K11"], [loop], tmp_path).cases.itertuples()
    assert (case.low, case.value, case.high) == pytest.approx((2.0, statistics.median([2, 3, 5]), 5.0))


def test_boxes_stand_beside_the_fastest_order_of_blocks_and_orders_beside_raster():
    at = {"sweep": "neighbourhood", "side": 8, "window": 3, "head_dim": 16, "direction": "forward", "order": "any"}
    times = {"raster": 3.0, "hilbert": 1.5, "tile": 2.0, "rectangles, raster": 1.1, "NATTEN, raster": 1.2}
    made = [comparison(name, "boxes, raster", ratio, **at) for name, ratio in times.items()]
    made += [comparison("raster", "hilbert", 1.9, block_size=128, **at)]
    made += [comparison("raster", "boxes, raster", 1.4, **{**at, "direction": "backward"})]
    boxes = kernels.boxes_over_blocks(made).set_index("direction")
    assert boxes.value.to_dict() == {"forward": 1.5, "backward": 1.4}
    assert boxes.order.to_dict() == {"forward": "hilbert", "backward": "raster"}
    assert kernels.grid_gains(made)[["order", "value"]].values.tolist() == [["hilbert", 1.9]]


def test_shares_of_boxes_are_over_those_of_the_best_order(monkeypatch):
    used = {"boxes": 0.6, "raster": 0.1, "tile": 0.4, "hilbert": 0.3}
    table = pd.DataFrame({"side": 8, "window": 3, "order": list(used), "used": list(used.values())})
    monkeypatch.setattr(models, "count_used", lambda: table)
    assert models.boxes_over_orders().value.tolist() == [pytest.approx(1.5)]


def test_tiles_along_curves_and_losses_of_patches_are_those_of_loops(monkeypatch):
    monkeypatch.setattr(models, "POINTS", 150)
    monkeypatch.setattr(models, "_points_by_order", models._points_by_order.__wrapped__)
    cases = models.tiles_along_curves()
    assert len(cases) == 2 * 4 * 3
    for (cloud, window), gains in cases.groupby(["cloud", "window"]):
        points = PointNeighbourhood(CLOUDS[cloud](150), window)
        seen = oracle.points_seen(points)
        tiles = {}
        for name, order in point_orders(points).items():
            keys = [int(seen[block].any(0).sum()) for block in order.split(64)]
            tiles[name] = sum(-(-count // 64) for count in keys)
        assert {case.order: case.value for case in gains.itertuples()} == pytest.approx(
            {name: tiles["raster"] / tiles[name] for name in ("morton", "hilbert", "hilbert, halved")}
        )
    assert models.lost_by_patches().value.tolist() == [0] * 8  # one patch holds all
