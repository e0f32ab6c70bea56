"""What notebook 07 measures: kept as it is found, not measured twice, and drawn from the records alone."""

import json
import time

import pytest
import torch

from hilbert_lib.lab.figures import ring_speed
from hilbert_lib.lab.sustained import WARM_WINDOWS, WINDOWS, back_to_back
from hilbert_lib.lab.sweeps import ring as benchmarks
from hilbert_lib.lab.sweeps import ring_works as sweeps
from hilbert_lib.lab.sweeps.ring import ALONE, DENSE_RING, GATHERED, VALIDATED, Work, run_works
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern

SIZES = {"heads": 2, "head_dim": 8, "first_segment": 16}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Works of one and two ranks over gloo, the folder that keeps them, and their records."""
    folder = tmp_path_factory.mktemp("ring")
    swept = {"weak_tokens": [32], "strong_tokens": 64, "repetitions": 3, "sustained_seconds": 0.01}
    works = sweeps.scaling_works(ranks=[1, 2], **swept, **SIZES)
    longest = {"longest_tokens": 256, "longest_head_dim": 4, "longest_segment": 16, "longest_growth": 4}
    longest |= {"longest_both_tokens": 128, "longest_both_head_dim": 4}
    works += sweeps.long_works(ranks=2, tokens=[128], **SIZES, **longest)
    return works, folder, run_works(works, output_dir=str(folder), backend="gloo")


def test_records_hold_samples_and_small_errors_of_every_side(measured):
    works, _, records = measured
    assert [record["side"] for record in records] == [side for work in works for side in work.sides]
    for record, work in zip(records, [each for each in works for _ in each.sides], strict=True):
        assert len(record["forward_samples_ms"]) == work.repetitions
        assert len(record["backward_samples_ms"]) == work.repetitions * work.backward
        assert (record["out_error"] is None) == (record["side"] == DENSE_RING)
        assert (record["dq_error"] is None) == (record["side"] == DENSE_RING or not work.backward)
        assert (record["out_error"] or 0.0) < 1e-2  # bfloat16
        assert (record["dq_error"] or 0.0) < 1e-2
        assert record["environment"]["code_hash"]
        assert len(record["forward_by_rank_ms"]) == work.ranks
        assert len(record["sustained_samples_ms"]) == WINDOWS * (record["sweep"] == "weak")
    assert [work.sides for work in works if DENSE_RING in work.sides] == [(DENSE_RING,)]  # it heats the GPU


def test_what_the_folder_holds_is_not_measured_again(measured, monkeypatch):
    works, folder, records = measured
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == records
    monkeypatch.setattr(benchmarks, "run_ranks", lambda *_, **__: pytest.fail("measured again"))
    assert run_works(works, output_dir=str(folder), backend="gloo") == records


def test_tables_and_figures_are_of_the_records(measured):
    _, _, records = measured
    table = sweeps.ring_table(records, "weak", "strong", "lengths")
    assert len(table) == len(records)
    strong = table[(table.sweep == "strong") & (table.ranks == 2)]
    assert set(strong.side) == {*benchmarks.TRANSPORTS, GATHERED, DENSE_RING}
    scaled = sweeps.efficiency(table).set_index(["sweep", "ranks"]).efficiency
    assert scaled.weak[1] == scaled.strong[1] == 1
    speed = table.set_index(["sweep", "ranks", "side"]).tokens_per_s
    assert scaled.weak[2] == pytest.approx(speed.weak[2].auto / speed.weak[1].auto)
    panel = ring_speed.draw_sides(strong, source="a test").axes[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == list(strong.side)
    labels = ring_speed.draw_efficiency(sweeps.efficiency(table), source="a test").axes[0].get_legend().get_texts()
    assert [text.get_text() for text in labels] == ["strong: 64 tokens in all", "weak: 32 tokens a GPU"]


def test_weak_scaling_is_held_against_one_rank_and_each_rank_by_itself_single_and_back_to_back(measured):
    works, _, records = measured
    side = {(each["ranks"], each["side"]): each for each in records if each["sweep"] == "weak"}
    assert set(side) == {(1, "auto"), (2, "auto"), (2, ALONE)}
    (work,) = (each for each in works if ALONE in each.sides)
    assert work.pattern_of(ALONE).branches == spanning_pattern(32, SIZES["first_segment"]).branches  # one rank's
    one, ring, alone = side[1, "auto"], side[2, "auto"], side[2, ALONE]
    assert not alone["sent_forward"]
    assert ring["sent_forward"]
    table = sweeps.weak_scaling(records).set_index("timing")
    assert set(table.ranks) == {2}
    together = [sum(each) for each in zip(alone["forward_by_rank_ms"], alone["backward_by_rank_ms"], strict=True)]
    for timing, alone_ms in (("single calls", together), ("back to back", alone["sustained_by_rank_ms"])):
        row = table.loc[timing]
        names = ["sustained_ms"] if timing == "back to back" else ["forward_ms", "backward_ms"]
        assert row.ring_ms == sum(ring[name] for name in names)
        assert row.of_one == pytest.approx(sum(one[name] for name in names) / row.ring_ms)
        assert row.of_first == pytest.approx(alone_ms[0] / row.ring_ms)
        assert row.of_slowest == pytest.approx(alone_ms[row.slowest] / row.ring_ms) == max(alone_ms) / row.ring_ms
        assert row.low <= row.high
    assert table.loc["back to back"].host_ms == max(ring["host_by_rank"]) > 0
    assert sweeps.weak_scaling([each for each in records if each["side"] != ALONE]).empty  # as records of before


def test_windows_of_calls_follow_each_other_and_are_timed_by_the_call():
    calls = []
    found = back_to_back(lambda: calls.append(time.sleep(0.002)), torch.device("cpu"), calls=3)
    assert len(calls) >= 3 * (WARM_WINDOWS + WINDOWS)
    assert all(2 <= each < 20 for each in found["windows_ms"])
    assert 2 <= found["host"] < 20


def test_one_number_of_ranks_has_no_efficiency(measured):
    table = sweeps.ring_table(measured[2], "weak", "strong", "lengths")
    assert tuple(table) == tuple(sweeps.ring_table(measured[2], "of none")) == sweeps.RING_COLUMNS
    assert sweeps.efficiency(table[table.ranks == 2]).empty


def test_the_header_of_every_call_is_in_the_time_of_the_side_that_says_so_alone(monkeypatch):
    (work, _) = sweeps.comparison_works(ranks=1, tokens=[64], repetitions=1, **SIZES)
    asked = {side: [] for side in work.sides if side != GATHERED}
    q, k, v = torch.zeros(3, 1, 64, SIZES["heads"], SIZES["head_dim"])
    for side, validated in asked.items():

        def call(*tensors, validate=True, validated=validated, **options):
            validated.append(validate)

        monkeypatch.setattr(benchmarks, "ring_dilated_attention", call)
        forward, _ = benchmarks._passes(side, work, q, k, v, None)
        for _ in range(3):
            forward()
    assert asked.pop(VALIDATED) == [True, True, True]
    assert set(map(tuple, asked.values())) == {(True, False, False)}


def test_a_record_after_half_a_line_is_a_line_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "results.jsonl").write_text('{"half": ')
    monkeypatch.setattr(benchmarks, "measure", lambda work: [{"side": "auto"}])
    monkeypatch.setattr(benchmarks.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(benchmarks, "Work", dict)
    benchmarks.measure_all({"works": [{}], "output_dir": str(tmp_path), "facts": {}})
    assert (tmp_path / "results.jsonl").read_text().splitlines() == ['{"half": ', '{"side": "auto", "environment": {}}']


def test_the_longest_forward_spans_the_sequence():
    work = sweeps.long_works(
        **{"ranks": 4, "tokens": [], "longest_tokens": 2**30, "longest_head_dim": 32, "longest_segment": 4096},
        **{"longest_growth": 8, **SIZES},
    )[0]
    assert work.pattern.branches[-1] == (2**30, 2**18)
    assert not work.backward


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"sides": ("fast",)}, "sides must be of auto"), ({"tokens": 65}, "tokens must be a multiple of the ranks, 2")],
)
def test_works_that_cannot_be_are_refused(wrong, words):
    given = {"tokens": 64, "heads": 2, "kv_heads": 2, "head_dim": 8, "segment_lengths": (16,), "dilation_rates": (1,)}
    with pytest.raises(ValueError, match=words):
        Work("weak", 2, **{**given, **wrong})


@pytest.mark.parametrize(("first_segment", "growth", "name"), [(0, 2, "first_segment"), (16, 1, "growth")])
def test_a_pattern_that_would_never_span_the_sequence_is_refused(first_segment, growth, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least"):
        spanning_pattern(64, first_segment, growth)
