"""DTensors that are split by batch or heads: results equal those of whole tensors, or the call is refused by name."""

import re
from functools import cache

import pytest

from hilbert_lib import run_ranks

SAID = {
    "by rows": "ValueError: q must be a DTensor that is replicated, or split by .* ring_attend splits a sequence",
    "sums": "ValueError: q must be a DTensor that is replicated",
    "another placement": "ValueError: k must be placed by .*, as q is, got",
    "a plain tensor": "TypeError: k must be a DTensor, as q is, got Tensor: distribute_tensor makes one",
    "no k": "TypeError: k must be a DTensor, as q is, got NoneType",
    "a plain q": "TypeError: q must be a DTensor, as another tensor is, got Tensor",
    "a plain mask": "TypeError: key_padding_mask must be a DTensor, as q is",
    "a mask alone": "TypeError: q must be a DTensor, as another tensor is",
    "dropout": "ValueError: dropout_p must be 0.0 where q is a DTensor, .* got 0.1",
    "weights": "TypeError: q must be a tensor of this rank, got a DTensor",
    "few heads": "ValueError: k must have a number of heads that the 2 ranks of Shard.2. divide, got 1",
    "rates that do not divide": "ValueError: heads 2 to 3 of 4 cannot be split off: with offsets='head'",
    "blocks of heads": "ValueError: heads 0 to 1 of 4 cannot be split off: with offsets='head_block'",
    "groups of heads": "ValueError: heads 0 to 1 of 4 cannot be split off: .* mixing='head_groups'",
}


@pytest.fixture(autouse=True)
def _ranks_find_the_tests(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", f"{request.path.parents[2]}:{request.path.parents[1]}")


@cache
def answers() -> list:
    return run_ranks("dtensor_ranks:on_two_ranks", 2, None, backend="gloo", seconds=300)


def test_results_and_gradients_are_those_of_whole_tensors():
    for compared, _ in answers():
        assert len(compared) == 16
        assert {name: error for name, error in compared.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("name", SAID)
def test_a_call_that_ranks_cannot_compute_by_themselves_is_refused_by_all(name):
    for _, refused in answers():
        assert re.match(SAID[name], refused[name]), refused[name]
