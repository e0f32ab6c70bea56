"""scripts/compare_on_cpu.py puts grids on a CPU beside torch's attention over tiles by hand: both are exact."""

import pytest
import torch
from own_scripts import load_script

from hilbert_lib import Neighbourhood

script = load_script("compare_on_cpu")


@pytest.mark.parametrize(
    ("near", "tiles"),
    [
        (Neighbourhood((7, 9), (3, 4)), [(7, 9), (4, 2)]),
        (Neighbourhood(30, 8, is_causal=True), [(7,), (30,)]),
    ],
)
def test_the_ways_by_hand_compute_the_same(near, tiles):
    leaves = [torch.randn(2, near.length, 2, 8).requires_grad_() for _ in "qkv"]
    runs = script.ways(near, tiles)
    errors = script.differences(runs, leaves, torch.randn(leaves[0].shape))
    assert len(errors) == 3
    assert max(errors.values()) < 1e-5
    runs["ours"] = lambda q, k, v: 1.001 * script.by_hand(near, tiles[0], q, k, v)
    runs = dict(reversed(runs.items()))  # the first is taken as exact
    with pytest.raises(RuntimeError, match="ours is off by"):
        script.differences(runs, leaves, torch.randn(leaves[0].shape))


def test_records_are_medians_in_words_and_lines_of_json(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "WORKS", {"4 x 4, window 3": (Neighbourhood((4, 4), 3), (1, 1, 4), [(2, 2)])})
    monkeypatch.setattr(script, "measured", lambda calls, *_: {name: [0.02, 0.05, 0.04] for name in calls})
    records = list(script.works(3))
    assert [record["direction"] for record in records] == ["forward", "both"]
    assert script.line_of(records[0]) == (
        "4 x 4, window 3, forward: ours 40 ms, by hand, 2 x 2 40 ms; ours takes 1.00 of the fastest"
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    script.main(["--repetitions", "1", "--out", str(tmp_path)], standalone_mode=False)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 3
