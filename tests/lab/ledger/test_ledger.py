"""The ledger: every claim is answered, every answer has its evidence, and a verdict says what its cases do."""

import ast
import itertools
import re
from dataclasses import replace
from math import inf

import numpy as np
import pandas as pd
import pytest
import yaml
from made_up import answered_by, comparison
from matplotlib.collections import PathCollection

from hilbert_lib.lab.figures import verdict
from hilbert_lib.lab.guarded.cases import attention_points, measure_attention
from hilbert_lib.lab.ledger.claim import (
    HOLDS,
    HOLDS_NOT,
    LEDGER,
    ROOT,
    UNTESTED,
    WAITS,
    Band,
    Condition,
    answers,
    judge,
    ratio_cases,
    read_ledger,
)
from hilbert_lib.lab.records import REPORTS, committed_records, read_records
from hilbert_lib.lab.sweeps.counters import counter_table
from hilbert_lib.pattern import DilatedPattern

COUNTS = {"K": 11, "C": 9, "M": 4, "R": 7, "B": 10, "S": 2}  # the documents' claims, by kind


@pytest.fixture(scope="module")
def ledger():
    return read_ledger()


@pytest.fixture(scope="module")
def records():
    return committed_records("06_kernel_benchmarks")


def test_every_claim_of_the_documents_has_an_entry_without_a_measured_number(ledger):
    assert list(ledger) == [f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]
    entries = yaml.safe_load(LEDGER.read_text())
    assert not any({"value", "low", "high", "spread", "median"} & set(entry) for entry in entries.values())
    for name, claim in ledger.items():
        assert all((claim.claim, claim.source, claim.question)), name
        assert bool(claim.measure) == bool(claim.claimed) != bool(claim.tests), name
        assert (claim.verdict in (HOLDS, HOLDS_NOT)) == bool(claim.tests), name


@pytest.mark.evidence
def test_every_claim_is_answered_by_a_record_a_computation_or_tests():
    for name, each in answers().items():
        claim = each.claim
        assert not each.verdict.startswith((WAITS, UNTESTED)), name
        assert each.source, name
        for test in claim.tests:
            path, function = test.split("::")
            defined = ast.walk(ast.parse((ROOT / path).read_text()))
            (node,) = (x for x in defined if isinstance(x, ast.FunctionDef) and x.name == function)
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            assert not re.search(r"mark\.(full|gpu|multigpu|skip|xfail)", marks), f"{test} is not always run"
        if claim.record:
            machine, _, folder = each.run.relative_to(REPORTS).parts
            assert machine.startswith("h200"), name
            assert folder.startswith(claim.record), name
            assert "H200" in each.hardware, name


@pytest.mark.evidence
def test_every_condition_that_the_ledger_states_is_true_of_the_cases(ledger):
    stated = {name for name, claim in ledger.items() if claim.when}
    assert stated == {name for name, each in answers().items() if each.verdict.startswith(f"{HOLDS} ")}
    for name in stated:
        says = ledger[name].when.says
        assert answers()[name].verdict.startswith(f"{HOLDS} {says} ("), name
    assert len(stated) > 10


@pytest.mark.parametrize("name", ["K3", "K4"])
@pytest.mark.evidence
def test_value_and_spread_are_those_of_the_records_samples(name):
    lines, rng = read_records(answers()[name].run / "results.jsonl"), np.random.default_rng(1)
    for case in answers()[name].cases.itertuples():
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


@pytest.mark.evidence
def test_counted_savings_are_those_of_the_recorded_counters(records):
    table = counter_table(records).query("dilation == 64").set_index(["layout", "kernel", "length", "row_bytes"])
    keys = ["how", "length", "row_bytes"]
    cases = (answers()[name].cases.query("dilation == 64").set_index(keys).value for name in ("C4", "C3"))
    saved, points = (each.rename(lambda how: how.removeprefix("counted in "), level="how") for each in cases)
    counted = (("forward", 65536), ("forward", 1048576), ("decoding", 262144))
    for work in ((*kernel, row_bytes) for kernel, row_bytes in itertools.product(counted, (32, 128))):
        hilbert, linear = table.loc[("hilbert", *work)], table.loc[("linear", *work)]
        assert saved[work] == 1 - hilbert.dram_read_bytes / linear.dram_read_bytes
        assert points[work] == pytest.approx(hilbert.l2_found_percent - linear.l2_found_percent)


# What is computed depends on no record: the ends of the values, as they were when the formulas were checked by hand.
COMPUTED = {
    "C1": "0 to 0.6719",
    "C6": "-1 to 0.06667",
    "C7": "1 to 11.35",
    "C8": "0.06299 to 0.6667",
    "R1": "1 to 12.93",
}
COMPUTED |= {"R2": "1 to 1.03", "R3": "-10.35 to 0", "R7": "1,", "S2": "0.1263 to 7.864"}
# The lower ends of ranges, as the documents print them; a per cent or three are granted where they print one number.
PRINTED = {"K3": [7.95], "K4": [1.02], "K6": [1.15], "K7": [1.1], "K8": [0.96, 0.94, 0.57, 1.63], "K9": [1.03, 1.56]}
PRINTED |= {"K10": [5], "C1": [0.25], "C2": [0.4], "C3": [25], "C4": [0.2], "M1": [0.3], "R3": [0.1], "B1": [1.2]}


def test_computed_values_and_claimed_ranges_are_as_they_were_checked(ledger):
    assert {name: answers()[name].value[: len(ends)] for name, ends in COMPUTED.items()} == COMPUTED
    assert {name: [band.least for band in ledger[name].claimed] for name in PRINTED} == PRINTED


CASES = pd.DataFrame({"what": ["time", "time", "memory", "memory"], "ranks": [2, 4, 2, 4], "value": [1.0, 2, 1, 1]})
CASES = CASES.assign(low=[0.9, 1.9, 1, 1], high=[1.1, 2.1, 1, 1])
ROWS = pd.DataFrame({"rows": [32] * 9 + [64] * 2, "value": 1.0, "low": [1.0] * 8 + [0.0] * 3, "high": 1.0})


@pytest.mark.parametrize(
    ("band", "when", "said"),
    [
        ((0.5, inf), "", HOLDS),
        ((3, inf), "", HOLDS_NOT),
        ((1.95, inf), "", HOLDS_NOT),  # the value lies in the range and its interval does not
        ((0, 2.05), "", "does not hold (3 of 4 cases)"),
        ((1.5, inf), "", "does not hold (1 of 4 cases)"),
        ((1.5, inf), "what == 'time' and ranks == 4", "holds so (1 of 4 cases)"),
        ((1.5, inf), "what == 'time'", "does not hold (1 of 4 cases)"),  # one of two under the condition
        ((1, 1.9), "ranks == 4 and what == 'memory'", "does not hold (2 of 4 cases)"),  # others hold too
        ((1, inf, "what == 'memory'"), "", HOLDS),
        ((1, 1), "rows == 32", "holds so (8 of 9 such cases, 8 of 11 in all)"),
    ],
)
def test_a_verdict_counts_and_takes_a_condition_that_is_true(band, when, said):
    cases = ROWS if "rows" in when else CASES
    assert judge(cases, [Band(*band)], Condition("so", when) if when else None)[0] == said


def test_each_case_is_judged_by_the_range_that_speaks_of_it():
    bands = [Band(1, 1, "what == 'memory'"), Band(1.5, 3, "what == 'time'")]
    judged = judge(CASES, bands)[1].sort_values(["what", "ranks"])
    assert judged.as_claimed.tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match="claimed must speak of some case"):
        judge(CASES, [Band(least=1, where="ranks == 3")])


def pool(strategy, ratio, lengths, reserved):
    sizes = {"peak": (2**30, 2**30), "sweep": "pools", "lengths": lengths, "direction": "forward", "curve": ""}
    return {**comparison("caching", strategy, ratio, **sizes), "reserved_bytes": reserved}


CHOSEN = {"sweep": "selection", "pattern": "p", "length": 2**18, "head_dim": 16, "is_causal": False}
CHOSEN |= {"direction": "forward", "branches": "4:1", "heads": 2, "dtype": "float32"}
SIZED = {"sweep": "claims", "length": 64, "head_dim": 64, "direction": "forward"}
TABLES = {"sweep": "pattern cache", "length": 64}
RING = {"side": "auto", "sweep": "weak", "tokens": 64, "hidden_forward": 0.2}
RING |= {"forward_samples_ms": [3.0, 4.0, 5.0], "backward_samples_ms": [6.0, 6.0, 6.0]}
MADE_UP = {
    "B1": ([comparison(name, "triton", 1.1 + 0.4 * (name == "sdpa"), **CHOSEN) for name in ("sdpa", "cudnn")],
           "holds over a fixed sdpa", [1.5, 1.1]),
    "B4": ([comparison("sdpa", "xformers", 2.0, pair="two backends", **SIZED)], HOLDS, [2.0]),
    "B5": ([pool("pool", 0.98, "8192", (0, 0)), pool("pool", 0.99, "131072", (0, 0)), pool("pool", 3, "1 2", (0, 0))],
           "does not hold (1 of 2 cases)", [0.98, 0.99]),
    "B10": ([pool("pool", 1.0, "1 2", (2**31, 2**30)), pool("kept", 1.0, "1 2", (2**31, 2**31))],
            "does not hold (1 of 2 cases)", [1.0, 0.0]),
    "K10": ([comparison("dense", "dilated", 6.0, pair="dense and dilated", **SIZED),
             comparison("sdpa", "xformers", 2.0, pair="two backends", **SIZED)], HOLDS, [6.0]),
    "M1": ([comparison("build", "call", 1.0, what="Hilbert ordering", **TABLES)], HOLDS, [0.5]),
    "R4": ([{**RING, "ranks": 1}, {**RING, "ranks": 4, "tokens": 256, "forward_samples_ms": [4.0, 4.0, 4.0]}],
           "does not hold (1 of 2 cases)", [0.2, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_UP)
def test_records_of_other_times_give_other_answers(ledger, tmp_path, name):
    made_up, said, values = MADE_UP[name]
    found = answered_by(ledger[name], made_up, tmp_path)
    assert found.verdict.startswith(said)
    assert found.cases.value.tolist() == pytest.approx(values)


def test_growth_is_from_the_smallest_to_the_largest_of_a_series(ledger, tmp_path):
    sizes = {"sweep": "layouts", "row_bytes": 32, "queries": 0}
    series = {(4, 1): 1.0, (4, 16): 3.0, (4, 8): 9.0, (64, 1): 0.5}  # (length, dilation)
    made = [comparison("linear", "hilbert", r, length=n, dilation=d, **sizes) for (n, d), r in series.items()]
    claimed = {**sizes, "sweep": "claims", "pair": "two layouts"}  # another layout, and no part of a series
    made.append(comparison("linear", "hilbert", 7.0, length=1, dilation=1, **claimed))
    cases = answered_by(ledger["K5"], made, tmp_path).cases.set_index("grows_with")
    assert cases.value.to_dict() == {"dilation": 3.0, "length": 0.5}
    assert cases.low["dilation"] == pytest.approx(2.99 / 1.01)


def test_strong_scaling_is_of_the_same_tokens_in_all(ledger, tmp_path):
    timed, half = {**RING, "sweep": "strong"}, {"forward_samples_ms": [2.0] * 3, "backward_samples_ms": [4.0] * 3}
    found = answered_by(ledger["R4"], [{**timed, "ranks": 1}, {**timed, **half, "ranks": 2}], tmp_path).cases
    scaling = found[found.what == "scaling"].iloc[0]
    assert (scaling.low, scaling.value, scaling.high) == pytest.approx((9.5 / 12, 10 / 12, 10.5 / 12))


def test_the_ledger_reads_the_fields_of_the_points_of_backends(ledger, tmp_path):
    how = {"lengths": [32], "backends": ["sdpa", "eager", "reference"], "heads": 1, "head_dim": 8}
    (point,) = attention_points(DilatedPattern((16,), (2,)), **how)
    outcomes = {name: {"status": "ok", "paired": True, "cause": ""} for name in how["backends"]}
    line = {"key": "0", "point": point, "records": list(measure_attention(point)), "outcomes": outcomes}
    found = answered_by(replace(ledger["B2"], options={"backend": "reference"}), [line], tmp_path).cases
    eager, reference = (record["ratio"] for record in line["records"])
    assert found.value.tolist() == pytest.approx([reference / eager])
    assert (found.low < found.value).all()


def test_what_a_newer_record_lacks_or_did_not_time_is_no_answer(ledger, tmp_path):
    layouts = {"pair": "two layouts", "sweep": "claims", "length": 4096, "dilation": 64, "head_dim": 64}
    checked = comparison("standard", "hilbert", float("nan"), **layouts)
    for records in ([checked], [comparison("a", "b", 1.0, sweep="another")]):
        assert answered_by(ledger["K3"], records, tmp_path).verdict.startswith(UNTESTED)


@pytest.mark.evidence
def test_the_figure_shows_every_case():
    cases = ratio_cases(answers().values())
    (axes,) = verdict.draw_claimed_and_measured(cases, title="test").axes
    points = [each for each in axes.collections if isinstance(each, PathCollection) and each.get_label()[0] == "_"]
    assert sum(len(each.get_offsets()) for each in points) == len(cases)
    assert [label.get_text().split()[0] for label in axes.get_yticklabels()] == list(dict.fromkeys(cases.id))
