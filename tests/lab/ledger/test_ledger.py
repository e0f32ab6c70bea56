"""The ledger: every claim is answered, every answer has its evidence, and a verdict says what its cases do."""

import ast
import itertools
import re
from dataclasses import replace
from math import inf

import numpy as np
import pandas as pd
import pytest
from made_up import answered_by, comparison
from matplotlib.collections import PathCollection

from hilbert_lib.lab.figures import verdict
from hilbert_lib.lab.guarded.cases import attention_points, measure_attention
from hilbert_lib.lab.ledger import answer as answering
from hilbert_lib.lab.ledger import kernels
from hilbert_lib.lab.ledger.answer import (
    FEW,
    OUTCOMES,
    ROOT,
    WAITS,
    answer,
    answers,
    case_summary,
    judge,
    ledger_table,
    ratio_cases,
)
from hilbert_lib.lab.ledger.claim import HOLDS, HOLDS_NOT, UNTESTED, Band, When
from hilbert_lib.lab.ledger.claims import LEDGER, SUBJECTS, WAITING
from hilbert_lib.lab.records import CAME_FROM, committed_records, read_records
from hilbert_lib.lab.sweeps.counters import counter_table
from hilbert_lib.patterns.dilated import DilatedPattern

COUNTS = {
    "K": 12,
    "C": 9,
    "M": 6,
    "R": 8,
    "B": 13,
    "S": 2,
    "G": 3,
    "L": 2,
    "O": 3,
    "P": 6,
}  # by kind: the documents', and ours


@pytest.fixture(scope="module")
def records():
    return committed_records("06b_orders_and_counters")


def test_every_claim_of_the_documents_has_one_entry():
    entries = [claim for subject in SUBJECTS for claim in subject.CLAIMS]
    ids = [f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)]
    assert [claim.id for claim in entries] == ids
    assert sorted([*LEDGER, *WAITING]) == sorted(ids)
    for claim in entries:
        assert all((claim.claim, claim.source, claim.question)), claim.id
        assert claim.quantity or claim.tests, claim.id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tests": ("tests/test_x.py::test_x",)}, "measure or tests of K7 must be given, and not both"),
        ({"measure": None}, "measure or tests of K7 must be given, and not both"),
        ({"claimed": ()}, "claimed of K7 must be given with measure, and only then"),
        ({"verdict": "perhaps"}, "verdict of K7 must start with 'holds', 'does not hold' or .*, got 'perhaps'"),
        ({"basis": "as hoped"}, "basis of K7 must be one of .*, got 'as hoped'"),
        ({"sweeps": ()}, "sweeps of K7 must be given with record, and only then"),
        ({"device": "tpu"}, "device of K7 must be one of .*, got 'tpu'"),
        ({"record": "", "sweeps": (), "pairs": lambda **_: ()}, "record of K7 must name what pairs write"),
    ],
)
def test_an_entry_whose_fields_contradict_each_other_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        replace(LEDGER["K7"], **given)


@pytest.mark.evidence
def test_every_claim_is_answered_by_a_record_a_computation_or_tests():
    for name, each in answers().items():
        claim = each.claim
        assert not each.verdict.startswith((WAITS, UNTESTED)) or claim.tests, name
        assert each.source, name
        for test in claim.tests:
            path, function = test.split("::")
            defined = ast.walk(ast.parse((ROOT / path).read_text()))
            (node,) = (x for x in defined if isinstance(x, ast.FunctionDef) and x.name == function)
            for mark in map(ast.unparse, node.decorator_list):
                assert not re.match(r"pytest\.mark\.(full|gpu|multigpu|skip|xfail)", mark), f"{test} is not always run"
        if claim.record:
            older_name, _ = CAME_FROM.get(claim.record, (claim.record, ""))
            assert each.run.name.startswith((claim.record, older_name)), name
            assert ("NVIDIA H" in each.hardware) == (claim.device == "cuda"), name


@pytest.mark.evidence
def test_verdicts_are_those_that_were_read_and_kept():
    kept = {name: claim.verdict for name, claim in LEDGER.items()}
    assert {name: each.verdict for name, each in answers().items()} == kept


@pytest.mark.evidence
def test_every_condition_that_the_ledger_states_is_true_of_the_cases():
    stated = {name for name, claim in LEDGER.items() if claim.when}
    holds = {name: each.verdict for name, each in answers().items() if each.verdict.startswith(HOLDS)}
    assert stated == {name for name, said in holds.items() if said not in (HOLDS, f"{HOLDS} as planned")}
    for name in stated:
        basis = f" {LEDGER[name].basis}" * bool(LEDGER[name].basis)
        assert answers()[name].verdict.startswith(f"{HOLDS}{basis} {LEDGER[name].when.says} ("), name
    assert len(stated) > 10


@pytest.mark.parametrize("name", ["K3", "K4"])
@pytest.mark.evidence
def test_value_and_spread_are_those_of_the_records_samples(name):
    lines, rng = read_records(answers()[name].run / "results.jsonl"), np.random.default_rng(1)
    for case in answers()[name].cases.itertuples():
        asked = {"sweep": "claims", "pair": case.pair, "length": case.length, "dilation": case.dilation}
        (line,) = [each for each in lines if "b" in each and asked.items() <= each["b"]["parameters"].items()]
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


# The numbers that the documents print, and what is granted to each side of one: the ends of every range.
QUOTED = {
    "K2": [(0.96, 1.22)], "K3": [(7.95, inf)], "K4": [(1.03 - 0.01, 1.03 + 0.01)], "K5": [(1.01, inf)],
    "K6": [(1.15, inf)], "K7": [(1.10, inf)],
    "K8": [(0.99 - 0.03, 0.99 + 0.03), (0.97 - 0.03, 0.97 + 0.03), (0.60 - 0.03, 0.60 + 0.03), (1.66 - 0.03, inf)],
    "K9": [(1.03, inf), (1.56, inf), (0.97 - 0.03, 0.97 + 0.03)], "K10": [(5, inf)], "K11": [(1, inf)],
    "K12": [(1.56, inf)], "C1": [(0.25, inf)], "C2": [(0.40, inf)], "C3": [(25, inf)], "C4": [(0.20, inf)],
    "C5": [(0.02, inf)], "C6": [(0.01, inf)], "C7": [(1.01, inf)], "C8": [(1.01, inf)], "C9": [(0.01, inf)],
    "M1": [(0.30, inf)], "R1": [(-inf, 1.5)], "R2": [(1.01, inf)], "R3": [(0.10, inf)], "R4": [(0.5, inf), (0.85, inf)],
    "R5": [(1, inf)], "R6": [(1, inf)], "R7": [(-inf, 1.02)], "B1": [(1.20, inf)], "B2": [(5, inf)],
    "B4": [(1.08 - 0.03, inf)], "B5": [(0.98 - 0.05, 0.98 + 0.05), (1.01, inf), (1.01, inf)], "B6": [(1.01, inf)],
    "B7": [(1.01, inf)], "B8": [(1.01, inf)], "B9": [(-inf, 1e-12)], "B10": [(0.001, inf)], "B12": [(0.99, 1.01)],
    "S2": [(-inf, 8e9 / 2**30), (1.01, inf)], "G1": [(1.01, inf)], "G2": [(1.01, inf)], "G3": [(1.01, inf)],
    "L1": [(1, inf)], "L2": [(-inf, 1)], "O1": [(0.85, inf)], "O2": [(1, inf)], "O3": [(0.5, inf)],
    "P3": [(1.01, inf)], "P1": [(4, inf), (18, inf)], "P2": [(2.3, inf), (4.17, inf), (1.01, inf)],
    "P4": [(1.01, inf)], "P5": [(0.5879, inf), (-inf, 0.5879)], "P6": [(486, inf)],
}  # fmt: skip
SPOKEN = {"K9": ["dilation == 1", "dilation > 1 and length <= 16384", "dilation > 1 and length >= 32768"]}
SPOKEN |= {"K8": ["length == 1024", "length == 2048", "length == 4096", "length >= 8192"]}


def test_claimed_ranges_are_of_the_numbers_that_the_documents_print():
    bands = {name: [(band.least, band.most) for band in claim.claimed] for name, claim in LEDGER.items()}
    assert {name for name, found in bands.items() if found} == set(QUOTED)
    for name, quoted in QUOTED.items():
        assert np.allclose(bands[name], quoted, atol=2e-3, rtol=0), name
    assert {name: [band.where for band in LEDGER[name].claimed] for name in SPOKEN} == SPOKEN


def test_lengths_are_over_those_that_the_documents_print(tmp_path):
    checked = [{"tokens": 10**9, "backward": False}, {"tokens": 2**20, "backward": True}]
    records = [{**each, "sweep": "lengths", "out_error": 0.1} for each in checked]
    assert answered_by(LEDGER["R5"], records, tmp_path).cases.value.tolist() == [1, 1]
    timed = [comparison("sdpa", "triton", 2.0, sweep="backends", length=2**18)]
    assert answered_by(LEDGER["R6"], timed, tmp_path).cases.value.tolist() == [1]


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
        ((1, 1), "rows == 32", "holds so (8 of 9 such cases, 8 of 11 in all)"),
    ],
)
def test_a_verdict_counts_and_takes_a_condition_that_is_true(band, when, said):
    cases = ROWS if "rows" in when else CASES
    assert judge(cases, [Band(*band)], When("so", when) if when else None)[0] == said


def test_each_case_is_judged_by_the_range_that_speaks_of_it():
    bands = [Band(1, 1, "what == 'memory'"), Band(1.5, 3, "what == 'time'")]
    judged = judge(CASES, bands)[1].sort_values(["what", "ranks"])
    assert judged.as_claimed.tolist() == [True, True, False, True]
    for wheres in (["ranks == 3"], ["what == 'memory'"], ["what == 'time'", "what == 'memory'", "ranks == 4"]):
        with pytest.raises(ValueError, match="claimed must speak of each of 4 cases once"):
            judge(CASES, [Band(least=0, where=where) for where in wheres])


def learnt(sweep, name, losses):
    sides = [{"name": name, "parameters": {"sweep": sweep, "seed": seed}} for seed in range(len(losses))]
    return [
        {"kind": "training", **side, "loss": loss, "losses": [loss, loss], "weights": 1, "seconds": 1.0}
        for side, loss in zip(sides, losses, strict=True)
    ]


def pool(strategy, ratio, lengths, reserved):
    sizes = {"peak": (2**30, 2**30), "sweep": "pools", "lengths": lengths, "direction": "forward"}
    return {**comparison("caching", strategy, ratio, **sizes), "reserved_bytes": reserved}


CHOSEN = {"sweep": "selection", "pattern": "p", "length": 2**18, "head_dim": 16, "is_causal": False}
CHOSEN |= {"direction": "forward", "branches": "4:1", "heads": 2, "dtype": "float32"}
SIZED = {"sweep": "claims", "length": 64, "head_dim": 64, "direction": "forward"}
TABLES = {"sweep": "pattern cache", "length": 64}
RING = {"side": "auto", "sweep": "weak", "tokens": 64, "is_causal": False}
RING |= {"hidden_forward": None, "hidden_backward": None}
RING |= {"forward_samples_ms": [3.0, 4.0, 5.0], "backward_samples_ms": [6.0, 6.0, 6.0]}
MADE_UP = {
    "B1": ([comparison(name, "triton", r, **{**CHOSEN, "head_dim": n})
            for name, r, n in (("sdpa", 1.6, 16), ("sdpa", 2.5, 32), ("cudnn", 1.1, 16))],
           "holds over a fixed sdpa", [1.1, 2.0]),
    "B4": ([comparison(base, "xformers", ratio, pair="two backends", **SIZED)
            for base, ratio in (("sdpa", 2.0), ("flash", 1.0))],
           "holds over torch's memory-efficient kernel", [2.0, 1.0]),
    "B5": ([pool("pool", 0.98, "8192", (100, 150)), pool("pool", 0.99, "131072", (1, 1)),
            pool("pool", 3, "1 2", (1, 1)), pool("graph", 5.0, "8192", (100, 100))],
           "does not hold (2 of 3 cases)", [0.98, 0.99, 1.5]),
    "B12": ([pool(name, 1.0, "16384", (10, size)) for name, size in (("kept", 20), ("pool", 30))],
            HOLDS_NOT, [2.0, 3.0]),
    "B10": ([pool("pool", 1.0, "1 2", (2**31, 2**30)), pool("kept", 1.0, "1 2", (2**31, 2**31))],
            "does not hold (1 of 2 cases)", [1.0, 0.0]),
    "K10": ([comparison("dense", "dilated", 6.0, pair="dense and dilated", **SIZED)], HOLDS, [6.0]),
    "L1": ([*learnt("text", "dilated", (2.0, 2.1, 2.2)), *learnt("text", "itself alone", (2.5, 2.5, 2.6)),
            *learnt("pictures", "windows", (0.01, 0.02, 0.03)),
            *learnt("pictures", "itself alone", (0.04, 0.04, 0.05))],
           "does not hold (1 of 2 cases)", [(7.6 - 6.3) / 3 / 0.2, (0.13 - 0.06) / 3 / 0.02]),
    "L2": ([*learnt("orders", "raster", (2.0, 2.0)), *learnt("orders", "morton", (1.0, 1.0)),
            *learnt("orders", "hilbert", (1.0, 4.0)), *learnt("orders", "windows", (4.0, 4.0))],
           "does not hold (1 of 2 cases)", [0.5, 1.0]),
    "M1": ([comparison("build", "call", 1.0, what="Hilbert ordering", **TABLES)], HOLDS, [0.5]),
    "R4": ([{**RING, "ranks": 1},
            {**RING, "ranks": 4, "tokens": 256, "forward_samples_ms": [4.0] * 3, "hidden_forward": 0.2}],
           "does not hold (1 of 2 cases)", [0.2, 1.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_UP)
def test_records_of_other_times_give_other_answers(tmp_path, name):
    made_up, said, values = MADE_UP[name]
    found = answered_by(LEDGER[name], made_up, tmp_path)
    assert found.verdict.startswith(said)
    assert found.cases.value.tolist() == pytest.approx(values)


def test_growth_is_from_the_smallest_to_the_largest_of_a_series(tmp_path):
    sizes = {"sweep": "layouts", "row_bytes": 32, "queries": 0}
    series = {(4, 1): 1.0, (4, 16): 3.0, (4, 8): 9.0, (64, 1): 0.5}  # (length, dilation)
    made = [comparison("linear", "hilbert", r, length=n, dilation=d, **sizes) for (n, d), r in series.items()]
    claimed = {**sizes, "sweep": "claims", "pair": "two layouts"}  # another layout, and no part of a series
    made.append(comparison("linear", "hilbert", 7.0, length=1, dilation=1, **claimed))
    cases = answered_by(LEDGER["K5"], made, tmp_path).cases.set_index("grows_with")
    assert cases.value.to_dict() == {"dilation": 3.0, "length": 0.5}
    assert cases.low["dilation"] == pytest.approx(2.99 / 1.01)


def test_strong_scaling_is_of_the_same_tokens_in_all(tmp_path):
    timed, half = {**RING, "sweep": "strong"}, {"forward_samples_ms": [2.0] * 3, "backward_samples_ms": [4.0] * 3}
    found = answered_by(LEDGER["R4"], [{**timed, "ranks": 1}, {**timed, **half, "ranks": 2}], tmp_path).cases
    scaling = found[found.what == "scaling"].iloc[0]
    assert (scaling.low, scaling.value, scaling.high) == pytest.approx((9.5 / 12, 10 / 12, 10.5 / 12))


def ring_of(hidden, **differing):
    """Records of one rank and of four, whose exchange is hidden so far."""
    four = {**RING, "ranks": 4, "tokens": 256, "hidden_forward": 1.0, "hidden_backward": 1.0}
    return [{**RING, "ranks": 1}, four, {**four, "hidden_forward": hidden, **differing}]


@pytest.mark.parametrize("side", ["auto", "all_to_all", "hilbert order"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_case_that_fails_in_any_sweep_and_by_any_side_changes_the_verdict(tmp_path, side, direction):
    case = {"sweep": "transports", "side": side, "is_causal": True}
    assert answered_by(LEDGER["R4"], ring_of(0.9, **case), tmp_path).verdict == HOLDS
    fails = {"hidden_forward": 1.0, f"hidden_{direction}": 0.38}
    found = answered_by(LEDGER["R4"], ring_of(1.0, **case, **fails), tmp_path)
    assert found.verdict == "does not hold (4 of 5 cases)"


def test_what_is_left_out_is_listed_with_its_reason(tmp_path):
    found = answered_by(LEDGER["R4"], ring_of(0.0, side="gathered", hidden_backward=0.0), tmp_path)
    assert found.verdict == HOLDS
    assert found.left_out == {"side == 'gathered'": 2, "side == 'dense ring'": 0}
    said = "not judged: 2 with side == 'gathered' (all k and v are gathered before"
    assert said in ledger_table([found]).note[0]
    only = [{**each, "side": "gathered"} for each in ring_of(0.0)]
    assert answered_by(LEDGER["R4"], only, tmp_path).verdict.startswith(UNTESTED)


@pytest.mark.evidence
def test_what_the_ledger_leaves_out_is_in_the_records():
    for name, claim in LEDGER.items():
        assert answers()[name].left_out.keys() == claim.leaves_out.keys(), name
        assert all(answers()[name].left_out.values()), name


def test_the_ledger_reads_the_fields_of_the_points_of_backends(tmp_path):
    how = {"lengths": [32], "backends": ["sdpa", "eager", "reference"], "heads": 1, "head_dim": 8}
    (point,) = attention_points(DilatedPattern((16,), (2,)), **how)
    outcomes = {name: {"status": "ok", "paired": True, "cause": ""} for name in how["backends"]}
    line = {"key": "0", "point": point, "records": list(measure_attention(point)), "outcomes": outcomes}
    claim = replace(LEDGER["B2"], measure=lambda records: kernels.over_rival(records, "reference"))
    found = answered_by(claim, [line], tmp_path).cases
    eager, reference = (record["ratio"] for record in line["records"])
    assert found.value.tolist() == pytest.approx([reference / eager])
    assert (found.low < found.value).all()


def test_what_a_newer_record_lacks_or_did_not_time_is_no_answer(tmp_path):
    layouts = {"pair": "two layouts", "sweep": "claims", "length": 4096, "dilation": 64, "head_dim": 64}
    checked = comparison("standard", "hilbert", float("nan"), **layouts)
    for records in ([checked], [comparison("a", "b", 1.0, sweep="another")]):
        assert answered_by(LEDGER["K3"], records, tmp_path).verdict.startswith(UNTESTED)


def test_a_claim_waits_for_its_record_and_without_a_checkout_is_refused(tmp_path, monkeypatch):
    assert answer(replace(LEDGER["K7"], record="99_not_yet")).verdict == f"{WAITS}: 99_not_yet"
    monkeypatch.setattr(answering, "REPORTS", tmp_path / "reports")
    with pytest.raises(ValueError, match=r"no records at .*reports, which K7 is answered by"):
        answer(LEDGER["K7"])


@pytest.mark.evidence
def test_the_figure_shows_every_case():
    cases = ratio_cases(answers().values())
    (axes,) = verdict.draw_claimed_and_measured(cases, title="test").axes
    points = [each for each in axes.collections if isinstance(each, PathCollection) and each.get_label()[0] == "_"]
    assert sum(len(each.get_offsets()) for each in points) == len(cases)
    assert [label.get_text().split()[0] for label in axes.get_yticklabels()] == list(dict.fromkeys(cases.id))


def test_every_case_of_every_claim_is_in_one_line_of_its_summary():
    for name, found in answers().items():
        if found.cases is None:
            continue
        summary = case_summary(found.cases)
        assert len(summary) <= FEW, name
        assert summary.cases.sum() == len(found.cases), name
        as_claimed = summary.cases[summary.outcome == OUTCOMES[0]].sum()
        assert as_claimed == found.cases.as_claimed.sum(), name
        assert (summary.lowest.min(), summary.highest.max()) == (found.cases.value.min(), found.cases.value.max())


def test_a_summary_says_on_which_side_of_the_claimed_range_a_case_lies():
    rows = [(1.3, 1.2, 1.4), (1.0, 0.9, 1.05), (2.5, 2.1, 2.6), (1.1, 1.0, 1.2), (1.9, 1.5, 2.2)]
    cases = pd.DataFrame(rows, columns=["value", "low", "high"])
    summary = case_summary(judge(cases, [Band(least=1.1, most=2.0)])[1])
    assert dict(zip(summary.outcome, summary.cases, strict=True)) == dict(zip(OUTCOMES, (1, 1, 1, 2), strict=True))
