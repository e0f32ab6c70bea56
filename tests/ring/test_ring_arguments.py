"""What a ring refuses, by the argument's name, before anything is sent: no ranks are needed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention


@pytest.fixture
def four_ranks():
    """This process as the first of four ranks that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_what_is_no_group_with_this_rank_is_refused(four_ranks):
    x = torch.ones(1, 4, 1, 4)
    for group, error, said in (
        (dist.init_device_mesh("cpu", (2, 2)), ValueError, "group must be a mesh of 1 dimension, got 2"),
        (DeviceMesh("cpu", [1, 2]), ValueError, "group must hold this rank, got a mesh of other ranks"),
        (dist.new_group([2, 3]), ValueError, "group must hold this rank, got a group of other ranks"),
        ([0, 1], TypeError, "group must be a process group, a 1-D DeviceMesh or None, got list"),
    ):
        with pytest.raises(error, match=said):
            ring_dilated_attention(x, x, x, DilatedPattern((4,), (1,)), group=group)


def test_without_a_process_group_it_says_what_to_call():
    x = torch.ones(1, 4, 1, 4)
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group first"):
        ring_dilated_attention(x, x, x, DilatedPattern((4,), (1,)))


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        ({"transport": "rign"}, ValueError, "transport must be one of auto, ring, all_gather, all_to_all; got 'rign'"),
        ({"backend": "fast"}, ValueError, "backend must be .*got 'fast'"),
        ({"scale": 0}, ValueError, "scale must be .*got 0"),
        ({"dropout": "0.1"}, TypeError, "dropout must be a number, got '0.1'"),
        ({"kv_ordering": "hilbert"}, TypeError, "kv_ordering must be an OrderingSpec or None, got str"),
        ({"group": "all"}, TypeError, "group must be a process group, a 1-D DeviceMesh or None, got str"),
        ({"weights": (1, 0)}, ValueError, r"weights\[1\] must be finite and above 0, got 0"),
        ({"memory_limit": 0}, ValueError, "memory_limit must be an integer of at least 1, got 0"),
        ({"validate": "no"}, TypeError, "validate must be True or False, got 'no'"),
    ],
)
def test_a_module_refuses_what_its_call_would(option, error, said):
    with pytest.raises(error, match=said):
        RingDilatedAttention(DilatedPattern((4,), (1,)), **option)


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        ({"transport": "rign"}, ValueError, "got 'rign'"),
        ({"transport": ["ring"]}, TypeError, r"transport must be a string, got \['ring'\]"),
        ({"weights": (2, 1)}, ValueError, r"weights must have one number a rank \(1\), got 2"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit must be an integer of at least 1, got 1.5"),
        ({"validate": "no"}, TypeError, "validate must be True or False, got 'no'"),
    ],
)
def test_one_rank_refuses_what_several_would(option, error, said, four_ranks):
    x = torch.ones(1, 4, 1, 4)
    with pytest.raises(error, match=said):
        ring_dilated_attention(x, x, x, DilatedPattern((4,), (1,)), group=dist.new_group([0]), **option)


def test_a_rank_outside_a_group_may_hold_its_module(four_ranks):
    others = dist.new_group([2, 3])
    assert RingDilatedAttention(DilatedPattern((4,), (1,)), group=others).group is others
