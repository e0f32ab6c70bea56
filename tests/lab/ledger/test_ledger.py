"""The ledger: every claim is answered, every answer has a record, and a verdict says no more than its cases do."""

import ast
import copy
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from made_up import answered_by, comparison
from matplotlib.collections import PathCollection

from hilbert_lib import dilated_attention
from hilbert_lib.lab import selection
from hilbert_lib.lab.committed import committed_records
from hilbert_lib.lab.figures import verdict
from hilbert_lib.lab.guarded.cases import attention_points, measure_attention
from hilbert_lib.lab.ledger import kernels
from hilbert_lib.lab.ledger.advice import advice, short_answer
from hilbert_lib.lab.ledger.claim import (
    HOLDS,
    HOLDS_NOT,
    ROOT,
    UNTESTED,
    Band,
    answer,
    judge,
    ratio_cases,
    read_ledger,
)
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import REPORTS, read_records
from hilbert_lib.lab.workload import grid
from hilbert_lib.pattern import DilatedPattern

COUNTS = {"K": 11, "C": 9, "M": 4, "R": 7, "B": 10, "S": 2}  # the documents' claims, by kind


@pytest.fixture(scope="module")
def ledger():
    return read_ledger()


@pytest.fixture(scope="module")
def answers(ledger):
    return {name: answer(claim) for name, claim in ledger.items()}


@pytest.fixture(scope="module")
def records():
    return committed_records("06_kernel_benchmarks")


@pytest.fixture(scope="module")
def choices():
    return committed_records("05_backend_selection")


def test_every_claim_of_the_documents_has_an_entry(ledger):
    assert list(ledger) == [f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]


def test_every_claim_is_answered(answers):
    assert not {name: each.verdict for name, each in answers.items() if each.verdict.startswith("waits for")}
    assert all(each.verdict for each in answers.values())


def test_every_answer_has_a_record_that_is_committed_or_tests_that_exist_or_is_computed(answers):
    for name, each in answers.items():
        claim = each.claim
        if each.verdict.startswith("waits for") or (each.verdict.startswith(UNTESTED) and not claim.record):
            continue
        if claim.tests:
            for test in claim.tests:
                path, function = test.split("::")
                defined = ast.walk(ast.parse((ROOT / path).read_text()))
                (node,) = (x for x in defined if isinstance(x, ast.FunctionDef) and x.name == function)
                marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
                assert not re.search(r"mark\.(full|gpu|multigpu|skip|xfail)", marks), f"{test} is not always run"
        elif claim.record:
            assert each.record.is_file(), name
            machine, _, folder, _ = each.record.relative_to(REPORTS).parts
            assert machine.startswith("h200"), name
            assert folder.startswith(claim.record), name
            assert "H200" in each.hardware, name
        else:
            assert len(each.cases), name
        assert each.source, name


@pytest.mark.parametrize("name", ["K3", "K4"])
def test_value_and_spread_are_those_of_the_records_samples(answers, name):
    assert answers[name].record.name == "results.jsonl"
    lines = read_records(answers[name].record)
    rng = np.random.default_rng(1)
    for case in answers[name].cases.itertuples():
        (line,) = [
            each
            for each in lines
            if (given := each.get("b", each)["parameters"])["sweep"] == "claims"
            and (given["pair"], given["length"], given["dilation"]) == (case.pair, case.length, case.dilation)
        ]
        ratios = np.divide(line["a"]["samples_ms"], line["b"]["samples_ms"])
        resampled = np.median(rng.choice(ratios, (4000, len(ratios))), axis=1)
        assert case.value == pytest.approx(np.median(ratios))
        assert (case.low, case.high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), rel=5e-3)


def test_layouts_are_those_of_the_record(records):
    table = kernels.layout_ratios(records, where="work == 'whole sequence' and row_bytes == 32 and dilation == 64")
    found = {
        line["b"]["parameters"]["length"]: line["ratio"]
        for line in records
        if (given := line.get("b", line)["parameters"])["sweep"] == "layouts"
        and line["b"]["name"] == "hilbert"
        and (given["row_bytes"], given["dilation"]) == (32, 64)
    }
    assert dict(zip(table.length, table.value, strict=True)) == found
    best = kernels.layout_ratios(records, order="best")
    assert (best.order != "no table").all()
    assert len(best) == len(best.drop_duplicates(["work", "length", "queries", "row_bytes", "dilation"]))


def test_counted_savings_are_those_of_the_recorded_counters(answers):
    rows = pd.read_csv(answers["C4"].record).query("dilation == 64").to_dict("records")
    table = pd.DataFrame(rows).set_index(["layout", "kernel", "length", "row_bytes"])
    keys = ["how", "length", "row_bytes"]
    cases = (answers[name].cases.query("dilation == 64").set_index(keys).value for name in ("C4", "C3"))
    saved, points = (each.rename(lambda how: how.removeprefix("counted in "), level="how") for each in cases)
    counted = (("forward", 65536), ("forward", 1048576), ("decoding", 262144))
    for work in ((*kernel, row_bytes) for kernel, row_bytes in itertools.product(counted, (32, 128))):
        assert saved[work] == 1 - table.dram_read_bytes["hilbert", *work] / table.dram_read_bytes["linear", *work]
        found = table.l2_found_percent["hilbert", *work] - table.l2_found_percent["linear", *work]
        assert points[work] == pytest.approx(found)


def test_the_documents_sizes_are_no_part_of_a_series(records):
    layouts = [each for each in records if each.get("a", each)["parameters"]["sweep"] == "layouts"]
    pd.testing.assert_frame_equal(kernels.growth(records), kernels.growth(layouts))


CASES = pd.DataFrame(
    {
        "what": ["time", "time", "memory", "memory"],
        "ranks": [2, 4, 2, 4],
        "value": [1.0, 2.0, 1.0, 1.0],
        "low": [0.9, 1.9, 1.0, 1.0],
        "high": [1.1, 2.1, 1.0, 1.0],
    }
)


@pytest.mark.parametrize(
    ("bands", "said"),
    [
        ([Band(least=0.5)], HOLDS),
        ([Band(least=3)], HOLDS_NOT),
        ([Band(least=1.5)], "holds when what is time and ranks >= 4 (1 of 1 such cases, 1 of 4 in all)"),
        ([Band(least=1.95)], HOLDS_NOT),  # the value lies in the range and its interval does not
        ([Band(most=2)], "holds but where what is time and ranks >= 4 (3 of 4 cases)"),
        ([Band(least=1, where="what == 'memory'")], HOLDS),
        (
            [Band(1, 1, "what == 'memory'"), Band(5, 6, "what == 'time'")],
            "holds when what is memory (2 of 2 such cases",
        ),
        ([Band(1.5, 3, "ranks == 4"), Band(1, 1, "ranks == 2")], "holds in 2 of 4 cases"),  # of either kind, one each
    ],
)
def test_a_verdict_says_what_the_cases_that_bear_the_claim_out_have_in_common(bands, said):
    assert judge(CASES, bands)[0].startswith(said)


def test_what_only_some_cases_have_is_no_condition():
    modelled = pd.DataFrame({"how": "modelled", "row_bytes": [32, 128], "value": [1.0, 2.0]})
    counted = pd.DataFrame({"how": "counted", "row_bytes": [32, 128], "value": [1.0, 2.0], "length": [1024, 65536]})
    cases = pd.concat([modelled, counted], ignore_index=True)
    cases = cases.assign(low=cases.value, high=cases.value)
    assert judge(cases, [Band(least=1.5)])[0] == "holds when row_bytes >= 128 (2 of 2 such cases, 2 of 4 in all)"


def test_what_too_many_other_cases_have_in_common_too_is_no_condition():
    cases = pd.DataFrame({"backend": ["flash"] * 9 + ["cudnn"], "value": [2.0] * 8 + [1.0, 1.0]})
    cases = cases.assign(low=cases.value, high=cases.value)
    assert judge(cases, [Band(least=1.5)])[0] == "holds when backend is flash (8 of 9 such cases, 8 of 10 in all)"
    cases.loc[:3, "low"] = 1.0
    assert judge(cases, [Band(least=1.5)])[0] == "holds in 4 of 10 cases"


def test_a_range_that_speaks_of_no_case_is_refused():
    with pytest.raises(ValueError, match="claimed must speak of some case"):
        judge(CASES, [Band(least=1, where="ranks == 3")])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "red"}, "X must have fields of .*, got .'colour'."),
        ({"question": ""}, "X must have question"),
        ({"measure": ""}, "X must be answered by measure, by tests, or say why"),
        ({"tests": ["tests/test_x.py::test_y"]}, "one of the three"),
        ({"claimed": []}, "X must say what range is claimed"),
        ({"measure": "", "tests": ["a"], "verdict": "perhaps"}, "X must say whether its tests show that it holds"),
    ],
)
def test_an_entry_that_cannot_be_answered_is_refused(tmp_path, changes, words):
    entry = {"claim": "c", "source": "000", "question": "q", "measure": "models:stride_regularity", "claimed": [{}]}
    path = tmp_path / "claims.yml"
    path.write_text(yaml.safe_dump({"X": {**entry, **changes}}))
    with pytest.raises(ValueError, match=words):
        read_ledger(path)


def pool(strategy, ratio, lengths, reserved, curve=""):
    record = comparison("caching", strategy, ratio, peak=(2**30, 2**30), sweep="pools", lengths=lengths,
                        direction="forward", curve=curve)  # fmt: skip
    return {**record, "reserved_bytes": reserved}


WORK = {
    "pattern": "p",
    "branches": "4:1",
    "length": 64,
    "heads": 2,
    "head_dim": 16,
    "is_causal": False,
    "dtype": "float32",
}
CHOSEN = {"sweep": "selection", "direction": "forward", **WORK, "length": 2**18}
TABLES = {"sweep": "pattern cache", "length": 64}
RING = {"side": "auto", "sweep": "weak"}
TO_COME = [
    ("B1", [comparison("sdpa", "triton", 1.5, **CHOSEN), comparison("eager", "triton", 1.1, **CHOSEN)],
     "holds when backend is sdpa", [1.5, 1.1]),
    ("B4", [comparison("sdpa", "xformers", 2.0, sweep="claims", pair="two backends", length=64, head_dim=64,
                       direction="forward")], HOLDS, [2.0]),
    ("B5", [pool("pool", 0.98, "8192", (0, 0)), pool("pool", 0.99, "131072", (0, 0)), pool("pool", 3.0, "1 2", (0, 0))],
     "holds when tokens <= 8192", [0.98, 0.99]),
    ("B6", [comparison("build", "look-up", 90.0, what="Hilbert ordering", **TABLES)], HOLDS, [90.0]),
    ("B7", [comparison("eager", "replay", 4.0, sweep="graphs", module="attention", direction="forward", length=128),
            comparison("eager", "replay", 1.0, sweep="graphs", module="attention", direction="forward", length=8192)],
     "holds when length <= 128", [4.0, 1.0]),
    ("B10", [pool("pool", 1.0, "1 2", (2**31, 2**30)), pool("kept", 1.0, "1 2", (2**31, 2**31))],
     "holds when strategy is pool", [1.0, 0.0]),
    ("K10", [comparison("dense", "dilated", 6.0, sweep="claims", pair="dense and dilated", length=64, head_dim=64,
                        direction="forward")], HOLDS, [6.0]),
    ("K11", [comparison("build", "call", 3.0, what="Hilbert ordering", **TABLES),
             comparison("build", "call", 0.1, what="schedule tables", **TABLES)], HOLDS, [3.0]),
    ("M1", [comparison("build", "call", 1.0, what="Hilbert ordering", **TABLES)], HOLDS, [0.5]),
    ("R4", [{**RING, "ranks": 1, "tokens": 64, "forward_samples_ms": [3.0], "backward_samples_ms": [6.0]},
            {**RING, "ranks": 4, "tokens": 256, "forward_samples_ms": [4.0], "backward_samples_ms": [6.0],
             "hidden_forward": 0.2}],
     "holds when what is scaling", [0.2, 0.9]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "made_up", "said", "values"), TO_COME, ids=[case[0] for case in TO_COME])
def test_records_that_are_still_to_be_made_will_answer(ledger, tmp_path, name, made_up, said, values):
    found = answered_by(ledger[name], made_up, tmp_path)
    assert found.verdict.startswith(said)
    assert values is None or found.cases.value.tolist() == pytest.approx(values)


def test_the_fields_of_the_choice_of_backends_are_as_the_ledger_reads_them(ledger, tmp_path):
    sizes = {"lengths": [32], "heads": 1, "head_dims": [8], "dtype": "float32", "device": torch.device("cpu")}
    works = grid({"p": DilatedPattern((16,), (2,))}, **sizes)

    def attend(backend, q, k, v, work):
        return dilated_attention(q, k, v, work.pattern, is_causal=work.is_causal, backend=backend)

    made = run_sides(selection.pairs(works, attend, ["eager"]), device="cpu", repetitions=3, seconds=0.01, on_cpu=True)
    claim = replace(ledger["B1"], options={"least_length": 0})
    assert set(answered_by(claim, made, tmp_path).cases.backend) == {"eager"}


def test_the_fields_of_the_points_of_backends_are_as_the_ledger_reads_them(ledger, tmp_path):
    how = {"lengths": [32], "backends": ["sdpa", "eager", "reference"], "heads": 1, "head_dim": 8}
    (point,) = attention_points(DilatedPattern((16,), (2,)), **how)
    outcomes = {name: {"status": "ok", "paired": True, "cause": ""} for name in how["backends"]}
    line = {"key": "0", "point": point, "records": list(measure_attention(point)), "outcomes": outcomes}
    found = answered_by(replace(ledger["B2"], options={"backend": "reference"}), [line], tmp_path).cases
    eager, reference = (record["ratio"] for record in line["records"])
    assert found.value.tolist() == pytest.approx([reference / eager])
    assert (found.low < found.value).all()


def test_the_ring_scales_by_the_same_tokens_a_rank_or_in_all(ledger, tmp_path):
    timed = {
        **RING,
        "forward_samples_ms": [3.0, 4.0, 5.0],
        "backward_samples_ms": [6.0, 6.0, 6.0],
        "hidden_forward": 1.0,
    }
    strong = {**timed, "sweep": "strong", "tokens": 64}
    half = {"forward_samples_ms": [2.0, 2.0, 2.0], "backward_samples_ms": [4.0, 4.0, 4.0]}
    found = answered_by(ledger["R4"], [{**strong, "ranks": 1}, {**strong, **half, "ranks": 2}], tmp_path).cases
    scaling = found[found.what == "scaling"].iloc[0]
    assert (scaling.low, scaling.value, scaling.high) == pytest.approx((9.5 / 12, 10 / 12, 10.5 / 12))


def test_what_a_newer_record_lacks_or_did_not_time_is_no_answer(ledger, tmp_path):
    layouts = {"pair": "two layouts", "sweep": "claims", "length": 4096, "dilation": 64, "row_bytes": 128, "heads": 12}
    checked = comparison("standard", "hilbert", float("nan"), head_dim=64, **layouts)
    for records in ([checked], [comparison("a", "b", 1.0, sweep="another")]):
        assert answered_by(ledger["K3"], records, tmp_path).verdict.startswith(UNTESTED)


def test_advice_is_borne_out_and_says_when_it_no_longer_is(records, choices, answers):
    advised = advice(records, [], choices, answers)
    assert advised.premise.all()
    other = copy.deepcopy(records)
    for line in other:
        if line.get("b", line)["name"] == "hilbert":
            line["ratio"], line["interval"] = 2.0, (1.9, 2.1)
    changed = advice(other, [], choices, answers)
    assert not changed.premise[changed.about == "which order"].any()
    assert changed.premise[changed.about == "which backend"].all()
    grids = committed_records("08_where_a_curve_pays")
    assert short_answer(records, grids, choices).premise.all()
    assert short_answer(other, grids, choices).premise.tolist() == [False, True, True]
    package = "flash_attn_4"
    held = records, choices
    without = [
        [line for line in each if package not in {line.get(side, line).get("name") for side in "ab"}] for each in held
    ]
    both = "05_backend_selection, 06_kernel_benchmarks"
    for (timed, chosen), notebooks in ((held, both), (without, "06_kernel_benchmarks")):
        assert short_answer(timed, grids, chosen).rests_on.iloc[2] == notebooks


def test_the_speeds_to_read_first_are_those_of_the_length_with_most_works():
    work = {"sweep": "backends", "branches": "8:1", "heads": 1, "head_dim": 64, "is_causal": False}
    records = [
        comparison(name, "triton", ratio, **work, pattern=pattern, length=length, direction=direction)
        for name, ratio in (("flash", 2.0), ("eager", 3.0))
        for pattern, length in (("reference", 64), ("paper", 64), ("reference", 128), ("reference", 32))
        for direction in ("forward", "backward")
    ]
    without_reference = [comparison("flash", "triton", 2.0, **work, pattern="paper", length=256, direction="forward")]
    for longest, length in ((False, 64), (True, 128)):
        speeds = kernels.fused_speeds(records + 9 * without_reference, longest=longest)
        assert set(speeds.length) == {length}
        assert list(speeds.direction) == ["forward", "backward"]
        assert set(speeds.others) == {"eager, flash"}
        assert set(speeds.times_as_fast) == {2.0}


def test_what_other_packages_are_ahead_in_is_told_with_its_work():
    work = {"sweep": "selection", "direction": "forward", "head_dim": 64, "is_causal": False}
    paper, reference = ({"pattern": name, "branches": "8:1 16:3"} for name in ("paper", "reference"))
    choices = [
        comparison("flash_attn_4", "triton", 0.8, length=8, **work, **paper),
        comparison("triton", "flash_attn_4", 1.5, length=16, **work, **reference),
        comparison("flash_attn_4", "triton", 1.5, length=32, **work, **paper),
        comparison("cudnn", "triton", 0.5, length=32, **work, **paper),  # of torch itself
    ]
    behind = kernels.behind_packages(choices, [])
    assert behind.other.unique().tolist() == ["flash_attn_4"]
    assert behind[["length", "ratio"]].to_numpy().tolist() == [[16, 1.5], [8, 1.25]]
    kernel = work | {"sweep": "backends"} | paper
    records = [comparison(name, "triton", 0.5, length=64, **kernel) for name in ("flash_attn_4", "torchscale")]
    behind = kernels.behind_packages(choices, records)
    assert behind[["length", "ratio"]].to_numpy().tolist() == [[64, 2.0], [16, 1.5], [8, 1.25]]


def test_orders_are_held_against_storage_in_sequence_order_without_a_table():
    work = {"sweep": "decoding", "length": 64, "queries": 1, "row_bytes": 32, "dilation": 4}
    ratios = {"no table": 1.25, "residue": 1.5, "hilbert": 1.0}
    records = [comparison("linear", name, ratio, **work) for name, ratio in ratios.items()]
    cases = kernels.over_sequence([*records, comparison("linear", "hilbert", 2.0, **{**work, "sweep": "layouts"})])
    assert dict(zip(cases.order, cases.value, strict=True)) == {"residue": 1.2, "hilbert": 0.8}
    assert ((cases.low < cases.value) & (cases.value < cases.high)).all()


def test_advice_on_grids_is_that_of_its_record(records, choices, answers):
    grid = {"sweep": "neighbourhood", "direction": "forward", "side": 64, "block_size": 128, "head_dim": 64}
    grids = [comparison("raster", name, ratio, window=9, **grid) for name, ratio in (("hilbert", 2.0), ("morton", 3.0))]
    (sentence,) = [text for text in advice(records, grids, choices, answers).advice if "grid" in text]
    assert "in 1 of 1 works, at most by a factor of 3.0 (morton, 4,096 tokens)" in sentence
    place = kernels.grid_places(grids).iloc[0]
    assert (place.order, place.value, place.row_bytes, place.intensity) == ("morton", 3.0, 128, 40.5)


def test_the_figures_show_every_case_and_every_claim_that_waits(records, answers):
    cases = ratio_cases(answers.values())
    figure = verdict.draw_claimed_and_measured(cases, source="test")
    (axes,) = figure.axes
    points = [each for each in axes.collections if isinstance(each, PathCollection) and each.get_label()[0] == "_"]
    assert sum(len(each.get_offsets()) for each in points) == cases.value.notna().sum()
    assert [text.get_text() for text in axes.texts] == cases.verdict[cases.value.isna()].tolist()
    places = [kernels.places(records), kernels.grid_places(committed_records("08_where_a_curve_pays"))]
    drawn = verdict.draw_map(pd.concat(places, ignore_index=True), bound=200.0, line_bytes=128, source="test")
    for axes, table in zip(drawn.axes, places, strict=False):
        assert sum(len(each.get_offsets()) for each in axes.collections) == len(table)
        labelled = [text.get_text() for text in axes.texts if text.get_text()[0].isdigit()]
        framed = table[(table.low > 1.01) & (table.over_plain_low > 1.01)]
        assert sorted(labelled) == sorted(f"{value:.2f}" for value in framed.value)
    over_plain = kernels.over_sequence(records).groupby(kernels.CASE).value.max()
    assert places[0].set_index(kernels.CASE).over_plain.to_dict() == pytest.approx(over_plain.to_dict())


def test_no_measured_number_is_typed_into_the_ledger():
    names = {"value", "low", "high", "spread", "median"}
    entries = yaml.safe_load(Path(REPORTS / "claims.yml").read_text())
    assert not any(names & set(entry) for entry in entries.values())
