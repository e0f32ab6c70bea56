"""Why the documents' ratios came out: each cause changes what it says, and nothing else."""

import os
import statistics

import pandas as pd
import pytest
import torch

from hilbert_lib.lab.seeds import seed_key_sets
from hilbert_lib.lab.sweeps import causes
from hilbert_lib.lab.sweeps.causes import ALL, CODE, COLD, FAIR, FIRST, KERNELS, KEYS, QUERIES

pytest.importorskip("triton", reason="triton has no build for this platform")
WORK = {"printed": "7.95", "document": "000", "length": 64, "segment": 32, "rate": 4, "heads": 1, "ms": (9.0, 1.0)}
WORK |= {"other_segments": []}
WORK |= {"device": "cuda" if torch.cuda.is_available() else "cpu"}


def by_definition(side, rate):
    """What a side's q, k and v give where every query sees each rate-th key of its segment, in float64."""
    q, k, v, slots = (x.cpu() for x in side.args[:4])
    mask = seed_key_sets(WORK["length"], WORK["segment"], rate)[0]
    rows = (x.double().transpose(1, 2) for x in (q, k[:, slots.long()], v[:, slots.long()]))
    return torch.nn.functional.scaled_dot_product_attention(*rows, mask).transpose(1, 2)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("cause", [FAIR, CODE, COLD, KERNELS, KEYS])
def test_a_cause_changes_no_output_but_where_keys_are_lost(cause, has_kernel):
    sides = standard, hilbert = causes.sides_of_cause({**WORK, "has_kernel": has_kernel}, cause)
    assert (standard.args[1] != hilbert.args[1]).any(), "both have k in one order"
    one_program = (standard.func, standard.keywords) == (hilbert.func, hilbert.keywords)
    assert one_program == (cause not in (CODE, KERNELS))
    for side, rate in zip(sides, (4, 16 if cause == KEYS else 4), strict=True):
        torch.testing.assert_close(side().cpu().double(), by_definition(side, rate), atol=1e-5, rtol=0)


def test_fewer_queries_leave_the_other_rows_empty():
    standard, hilbert = causes.sides_of_cause({**WORK, "has_kernel": False}, QUERIES)
    assert torch.allclose(hilbert()[:, ::4], standard()[:, ::4], atol=1e-5)
    assert hilbert().abs().sum((0, 2, 3)).nonzero().flatten().tolist() == list(range(0, 64, 4))


@pytest.mark.parametrize(("last", "more"), [(COLD, [FAIR, CODE, KEYS, QUERIES, FIRST]), (ALL, [])])
def test_first_calls_find_nothing_compiled_and_the_standard_side_is_first(monkeypatch, last, more):
    def call(name):
        seen.append((name, os.listdir(os.environ["TRITON_CACHE_DIR"])))
        return torch.ones(1)

    seen, sides = [], (lambda: call("standard"), lambda: call("hilbert"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(causes, "sides_of_cause", lambda work, cause: sides)
    records = causes.in_process({**WORK, "device": "cpu", "has_kernel": False}, last)
    assert [record["cause"] for record in records] == [*more, last]
    assert seen[:20] == [("standard", [])] * 10 + [("hilbert", [])] * 10


def test_each_cause_is_measured_once_in_processes_of_its_own(tmp_path, monkeypatch, calls_are_copied):
    run = {"device": "cpu", "output_dir": str(tmp_path), "shorter": 128}
    records = causes.rebuild_printed(["2.66"], **run)
    table = causes.cause_table(records).set_index("cause")
    assert list(table.index) == [FAIR, CODE, KEYS, QUERIES, FIRST, COLD, ALL]
    assert table.output_difference[[FAIR, FIRST, COLD]].eq(0).all()
    assert table.output_difference[[KEYS, QUERIES, ALL]].gt(0.1).all()
    excess = records[4]["standard_ms"][0] - records[4]["hilbert_ms"][0]
    assert table.calls[FIRST] == pytest.approx(excess / (91.64 - 34.46))
    monkeypatch.setattr(causes, "run_isolated", None)
    assert causes.rebuild_printed(["2.66"], **run) == records


def test_of_7_95_the_loop_has_a_row_for_each_segment(calls_are_copied):
    records = causes.rebuild_printed(["7.95"], device="cpu", shorter=16)
    assert [record["cause"] for record in records].count(causes.SEGMENT) == 2
    rows = causes.segment_table(records)
    assert rows.segment.tolist() == [64, 128, 256]  # none is shorter than the dilation rate
    assert rows.ratio.between(rows.low, rows.high).all()
    assert (rows.printed_ms == 138.66).all()
    other = next(record for record in records if record["cause"] == causes.SEGMENT)
    assert other["output_difference"] < 1e-5  # both sides have one function
    by_hand = [a / b for a, b in zip(other["standard_ms"], other["hilbert_ms"], strict=True)]
    assert other["ratio"] == pytest.approx(statistics.median(by_hand))
    figure = causes.cause_table(records)
    assert causes.SEGMENT not in set(figure.cause)  # whose bars are of one segment


def test_each_segment_is_of_its_own_sides(monkeypatch):
    def sides_of(work, cause):
        seen.append((work["segment"], cause))
        return (lambda: torch.ones(1),) * 2

    seen = []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(causes, "sides_of_cause", sides_of)
    work = {**WORK, "device": "cpu", "has_kernel": False, "other_segments": [8, 16]}
    records = [record for record in causes.in_process(work, COLD) if record["cause"] == causes.SEGMENT]
    assert [record["segment"] for record in records] == [8, 16]
    assert seen[-2:] == [(8, CODE), (16, CODE)]


def test_the_finding_is_the_cause_that_alone_comes_nearest():
    ratios = {FAIR: 1.01, CODE: 0.9, KEYS: 2.0, QUERIES: 3.0, ALL: 2.66}
    table = pd.DataFrame({"cause": list(ratios), "ratio": list(ratios.values()), "printed": 2.66, "claim": "2.66x"})
    said = "A fair ratio is 1.01 (a GPU)\nAlone nearest to 2.66x: fewer queries 3"
    assert causes.finding(table, "a GPU") == said


@pytest.mark.usefixtures("calls_are_copied")
def test_what_is_not_printed_and_what_fails_is_said():
    with pytest.raises(ValueError, match=r"printed must be one of 7\.95, 2\.66, 1\.66; got '3'"):
        causes.rebuild_printed(["3"], device="cpu")
    with pytest.raises(RuntimeError, match=r"2\.66x, no warm-up: failed, "):
        causes.rebuild_printed(["2.66"], device="none")


@pytest.mark.gpu
def test_the_kernel_is_compiled_in_its_first_call():
    (first,) = (each for each in causes.rebuild_printed(["7.95"], device="cuda") if each["cause"] == FIRST)
    assert first["standard_ms"][0] > 20 * first["standard_ms"][-1]
