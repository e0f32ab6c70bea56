"""Models and DTensors on several ranks: split by batch, by weights, by tokens or by heads, they equal one process.

All of it runs in one start of four ranks, of which the first two begin.
"""

import re
from functools import cache

import model_ranks
import pytest
from copied_calls import copy_calls
from forked_ranks import fork_ranks

from hilbert_lib.launch import REFUSED
from hilbert_lib.launch.workers import RankError, run_ranks

MESHES = {2: [(1, 2), (2, 1)], 4: [(2, 2)]}  # by the number of ranks, how many share the sequence and the heads
CALLS = {2: [["model_ranks:by_batch", {}], ["model_ranks:over_tokens", {}]], 4: []}
CALLS[2] += [["model_ranks:over_points", {"has_keys": has_keys}] for has_keys in (False, True)]
CALLS[2] += [["dtensor_ranks:compared", {}], ["dtensor_ranks:refused", {}]]
CALLS[2] += [["dtensor_ranks:compared_with_options", {}]]
CALLS[4] += [["dtensor_ranks:in_rings", {}], ["dtensor_ranks:refused_in_rings", {}]]
for ranks, meshes in MESHES.items():
    CALLS[ranks] += [["model_ranks:in_parallel", {"sequence": sequence, "heads": heads}] for sequence, heads in meshes]

SAID = {
    "by rows": "ValueError: q must be a DTensor that is replicated, or split by .* ring_attend splits a sequence",
    "sums": "ValueError: q must be a DTensor that is replicated",
    "another placement": "ValueError: k must be placed by .*, as q is, got",
    "a plain tensor": "TypeError: k must be a DTensor, as q is, got Tensor: distribute_tensor makes one",
    "no k": "TypeError: k must be a DTensor, as q is, got NoneType",
    "a plain q": "TypeError: q must be a DTensor, as another tensor is, got Tensor",
    "a plain mask": "TypeError: key_padding_mask must be a DTensor, as q is",
    "a plain bias": "TypeError: bias must be a DTensor, as q is, got Tensor",
    "a bias by batch": r"ValueError: bias must be placed by \(Shard\(dim=0\),\), as q is, got \(Replicate\(\),\)",
    "a mask alone": "TypeError: q must be a DTensor, as another tensor is",
    "dropout": "ValueError: dropout_p must be 0.0 where q is a DTensor, .* got 0.1",
    "weights": "TypeError: q must be a tensor of this rank, got a DTensor",
    "few heads": "ValueError: k must have a number of heads that the 2 ranks of Shard.2. divide, got 1",
    "rates that do not divide": "ValueError: heads 2 to 3 of 4 cannot be split off: with offsets='head'",
    "blocks of heads": "ValueError: heads 0 to 1 of 4 cannot be split off: with offsets='head_block'",
    "groups of heads": "ValueError: heads 0 to 1 of 4 cannot be split off: .* mixing='head_groups'",
}


@cache
def _found() -> list[dict] | RankError:
    with pytest.MonkeyPatch.context() as patch:
        copy_calls(patch)
        fork_ranks(patch, ["torch.distributed.fsdp", "torch._dynamo"])
        calls = {str(ranks): calls for ranks, calls in CALLS.items()}
        try:
            return run_ranks("ring_ranks:run_on_fewer", max(CALLS), {"calls": calls}, backend="gloo")
        except RankError as error:  # of every test that asks, without another start
            return error


def answers(ranks: int, call: list) -> list:
    """What each rank gave back for one call."""
    found, number = _found(), CALLS[ranks].index(call)
    if isinstance(found, RankError):
        raise found
    return [answer[str(ranks)][number] for answer in found[:ranks]]


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_a_model_is_trained_as_on_one_process_where_ranks_share_the_batch(how):
    for errors in answers(2, ["model_ranks:by_batch", {}]):
        assert errors[how] <= 1e-12


def test_a_model_whose_tokens_are_spread_has_the_scores_loss_and_gradients_of_one_process():
    for errors in answers(2, ["model_ranks:over_tokens", {}]):
        assert len(errors) == 2 + len(list(model_ranks.made().parameters()))
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_layer_over_points_that_ranks_share_equals_one_process(has_keys):
    for errors in answers(2, ["model_ranks:over_points", {"has_keys": has_keys}]):
        assert len(errors) == 6
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def test_ranks_that_share_the_sequence_and_the_heads_learn_as_one_process():
    expected = model_ranks.by_one()
    assert expected[-1] < expected[0] - 0.01
    for ranks, meshes in MESHES.items():
        for sequence, heads in meshes:
            for losses in answers(ranks, ["model_ranks:in_parallel", {"sequence": sequence, "heads": heads}]):
                assert losses == pytest.approx(expected, rel=0, abs=1e-12)


def test_results_and_gradients_of_dtensors_are_those_of_whole_tensors():
    for errors in answers(2, ["dtensor_ranks:compared", {}]):
        assert len(errors) == 16
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def test_options_of_dtensors_are_those_of_whole_tensors():
    for errors in answers(2, ["dtensor_ranks:compared_with_options", {}]):
        assert len(errors) == 16
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("name", SAID)
def test_a_call_that_ranks_cannot_compute_by_themselves_is_refused_by_all(name):
    for refused in answers(2, ["dtensor_ranks:refused", {}]):
        assert re.match(SAID[name], refused[name]), refused[name]


def test_a_ring_of_dtensors_equals_one_process():
    for errors in answers(4, ["dtensor_ranks:in_rings", {}]):
        assert len(errors) == 12
        assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def test_dtensors_that_no_ring_takes_are_refused_on_all_its_ranks():
    answers_of_ranks = answers(4, ["dtensor_ranks:refused_in_rings", {}])
    for of_one_mesh, _ in answers_of_ranks:
        assert re.match(r"group must share one rank with the mesh of q, got \[[01], [23]\]", of_one_mesh)
    said = "q must be a DTensor that is replicated, or split by batch"
    # Ranks 0 and 2 are a ring, 1 and 3 another, in which nothing is wrong.
    first, second, third, fourth = (of_one_rank for _, of_one_rank in answers_of_ranks)
    assert first.startswith(said)
    assert third.startswith(f"rank 0 {REFUSED} ValueError: {said}")
    assert second == fourth == "nothing"
