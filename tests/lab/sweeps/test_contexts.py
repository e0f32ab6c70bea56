"""The sweeps of notebook 10 by length of context: what is compared, and that each way is held against the truth."""

import pytest
import torch

from hilbert_lib import DilatedPattern
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.sweeps.contexts import (
    DECODED,
    DECODING,
    STEP,
    TORCHSCALE,
    context_cases,
    decoding_cases,
)
from hilbert_lib.lab.tables import ratio_table, side_table

CPU = torch.device("cpu")
MODEL = {"window": 8, "heads": 2, "head_dim": 8, "layers": 2, "device": CPU, "dtype": "float32"}
PATTERN = DilatedPattern((8, 32), (1, 4))


def test_every_way_of_a_step_is_right_and_torchscales_learns_as_ours():
    records = run_sides(context_cases([24, 40], PATTERN, **MODEL), device=CPU)
    sides = side_table(records, STEP)
    assert set(sides.name) == {"dilated", TORCHSCALE, "windows", "dense, sdpa"}
    assert sorted(set(sides.length)) == [24, 40]
    assert sides.error.max() < 1e-5
    pairs = ratio_table([record for record in records if "a" in record], STEP)
    assert pairs.output_difference.max() < 1e-5


def test_a_step_that_attends_to_other_keys_has_an_error():
    ((theirs, ours), *_) = context_cases([40], PATTERN, **MODEL)
    ((_, others), *_) = context_cases([40], DilatedPattern((8,), (1,)), **MODEL)
    assert not torch.allclose(ours.run()[1], others.run()[1], rtol=1e-3)
    torch.testing.assert_close(ours.run(), theirs.run())


def test_decoding_gives_the_logits_of_one_call_at_every_repetition():
    records = run_sides(decoding_cases([24, 40], PATTERN, **MODEL), device=CPU)
    table = side_table(records, DECODING)
    assert table.name.tolist() == [*DECODED, *DECODED]
    assert table.error.max() < 1e-5


@pytest.mark.parametrize("place", range(len(DECODED)), ids=DECODED)
def test_another_token_decoded_is_an_error(place):
    (side,) = list(decoding_cases([24], PATTERN, **MODEL))[place]
    (logits,) = side.run()
    torch.testing.assert_close(side.run(), (logits,))
    assert side.error((logits,)) < 1e-5
    assert side.error((logits.roll(1, dims=-1),)) > 0.1
