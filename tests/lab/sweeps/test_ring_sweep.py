"""What notebook 07 measures: kept as it is found, not measured twice, and told in tables."""

import json
import time

import pytest
import torch

from hilbert_lib.lab.sustained import WARM_WINDOWS, WINDOWS, back_to_back
from hilbert_lib.lab.sweeps import ring
from hilbert_lib.lab.sweeps.ring import ALONE, DENSE_RING, GATHERED, ORDERS, TRANSPORTS, Work, run_works

SIZES = {"heads": 2, "head_dim": 8, "first_segment": 16}
EVERY = (*TRANSPORTS, GATHERED, *ORDERS, DENSE_RING)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Works of one and two ranks over gloo, the folder that keeps them, and their records."""
    folder, timed = tmp_path_factory.mktemp("ring"), {"repetitions": 3, **SIZES}
    works = [
        Work.spanning("weak", 1, 32, sustained_seconds=0.01, **timed),
        Work.spanning("strong", 1, 64, **timed),
        Work.spanning("weak", 2, 64, sides=("auto", ALONE), sustained_seconds=0.01, **timed),
        Work.spanning("strong", 2, 64, sides=EVERY, **timed),
        Work.spanning("lengths", 2, 256, growth=4, backward=False, **timed),
    ]
    return works, folder, run_works(works, output_dir=str(folder), backend="gloo")


def test_records_hold_samples_and_small_errors_of_every_side(measured):
    works, _, records = measured
    assert [record["side"] for record in records] == [side for work in works for side in work.sides]
    for record, work in zip(records, [each for each in works for _ in each.sides], strict=True):
        assert len(record["forward_samples_ms"]) == 3
        assert len(record["backward_samples_ms"]) == 3 * work.backward
        assert (record["out_error"] is None) == (record["side"] == DENSE_RING)
        assert (record["dq_error"] is None) == (record["side"] == DENSE_RING or not work.backward)
        assert max(record["out_error"] or 0.0, record["dq_error"] or 0.0) < 1e-2  # bfloat16
        assert len(record["forward_by_rank_ms"]) == work.ranks
        assert len(record["sustained_samples_ms"]) == WINDOWS * (record["sweep"] == "weak")
    sent = {record["side"]: record["sent_forward"] for record in records if record["ranks"] == 2}
    assert sent[ALONE] == 0 < sent["auto"] < sent[GATHERED]


def test_what_the_folder_holds_is_not_measured_again(measured, monkeypatch):
    works, folder, records = measured
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == records
    monkeypatch.setattr(ring, "run_ranks", lambda *_, **__: pytest.fail("measured again"))
    assert run_works(works, output_dir=str(folder), backend="gloo") == records


def test_windows_of_calls_are_timed_by_the_call():
    calls = []
    found = back_to_back(lambda: calls.append(time.sleep(0.002)), torch.device("cpu"), calls=3)
    assert len(calls) >= 3 * (WARM_WINDOWS + WINDOWS)
    assert all(2 <= each < 20 for each in [*found["windows_ms"], found["host"]])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sides": ("fast",)}, "sides must be of auto"),
        ({"tokens": 65}, "tokens must be a multiple of the ranks, 2"),
        ({"first_segment": 0}, "first_segment must be an integer"),
        ({"growth": 1}, "growth must be an integer"),
    ],
)
def test_works_that_cannot_be_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Work.spanning("weak", 2, **{"tokens": 64, **SIZES, **wrong})
