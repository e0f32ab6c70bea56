"""What a ring refuses, by the argument's name, before anything is sent: no ranks are needed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention, gather, shard


@pytest.fixture
def four_ranks():
    """This process as the first of four ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


X = torch.ones(1, 4, 1, 4)


def call(**options):
    ring_dilated_attention(X, X, X, DilatedPattern((4,), (1,)), **options)


def on_one(**options):
    call(group=dist.new_group([0]), **options)


def module(**options):
    RingDilatedAttention(DilatedPattern((4,), (1,)), **options)


TYPES = [
    (lambda: call(group=[0, 1]), "group must be a process group, a 1-D DeviceMesh or None, got list"),
    (lambda: on_one(memory_limit=1.5), "memory_limit must be an integer of at least 1, got 1.5"),
    (lambda: on_one(validate="no"), "validate must be True or False, got 'no'"),
    (lambda: module(dropout="0.1"), "dropout must be a number, got '0.1'"),
    (lambda: module(kv_ordering="hilbert"), "kv_ordering must be an OrderingSpec or None, got str"),
    (lambda: module(group="all"), "group must be a process group, a 1-D DeviceMesh or None, got str"),
    (lambda: module(validate="no"), "validate must be True or False, got 'no'"),
    (lambda: shard("x"), "x must be a tensor, got str"),
    (lambda: gather("x"), "x must be a tensor, got str"),
]
VALUES = [
    (lambda: call(group=dist.init_device_mesh("cpu", (2, 2))), "group must be a mesh of 1 dimension, got 2"),
    (lambda: call(group=DeviceMesh("cpu", [1, 2])), "group must hold this rank, got a mesh of other ranks"),
    (lambda: call(group=dist.new_group([2, 3])), "group must hold this rank, got a group of other ranks"),
    (lambda: on_one(transport="rign"), "transport must be one of .*got 'rign'"),
    (lambda: on_one(weights=(2, 1)), r"weights must have one number a rank \(1\), got 2"),
    (lambda: module(transport="rign"), "transport must be one of auto, ring, all_gather, all_to_all; got 'rign'"),
    (lambda: module(backend="fast"), "backend must be .*got 'fast'"),
    (lambda: module(scale=0), "scale must be .*got 0"),
]


@pytest.mark.parametrize(("call", "words"), TYPES + VALUES)
def test_a_wrong_argument_is_refused_by_its_name(call, words, four_ranks):
    with pytest.raises(TypeError if (call, words) in TYPES else ValueError, match=words):
        call()


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        call()


def test_a_rank_outside_a_group_may_hold_its_module(four_ranks):
    others = dist.new_group([2, 3])
    assert RingDilatedAttention(DilatedPattern((4,), (1,)), group=others).group is others
