"""A pattern says which keys a query sees; counts are closed forms of that."""

import pickle

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilbert_lib import DilatedPattern
from hilbert_lib.pattern import MIXING_RULES, OFFSET_RULES


@st.composite
def patterns(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    rates = [draw(st.integers(1, w)) for w in lengths]
    return DilatedPattern(
        tuple(lengths),
        tuple(rates),
        offsets=draw(st.sampled_from(OFFSET_RULES)),
        mixing=draw(st.sampled_from(MIXING_RULES)),
    )


cases = given(patterns(), st.integers(0, 41), st.integers(3, 6), st.booleans())


@cases
def test_keys_are_those_of_the_definition(pattern, length, kv_heads, is_causal):
    for g in range(kv_heads):
        for query in range(0, length, 7):
            expected = sorted(j for _, j in oracle.keys_of(pattern, query, length, g, kv_heads, is_causal))
            keys = pattern.keys(query, kv_head=g, kv_heads=kv_heads, length=length, is_causal=is_causal)
            assert keys.tolist() == expected


@cases
def test_pairs_and_covered_positions_are_counted_exactly(pattern, length, kv_heads, is_causal):
    seen = [
        [oracle.keys_of(pattern, query, length, g, kv_heads, is_causal) for query in range(length)]
        for g in range(kv_heads)
    ]
    pairs = sum(len(keys) for head in seen for keys in head)
    assert pattern.pairs(length, heads=2 * kv_heads, kv_heads=kv_heads, is_causal=is_causal) == 2 * pairs
    for g in range(kv_heads):
        assert pattern.covered(length, g, kv_heads) == sum(bool(keys) for keys in seen[g])


@cases
def test_heads_of_one_offset_are_one_slice(pattern, length, kv_heads, is_causal):
    for branch in range(len(pattern.branches)):
        by_slice = {g: o for o, heads in pattern.offset_heads(branch, kv_heads).items() for g in range(kv_heads)[heads]}
        assert by_slice == {g: pattern.offset(branch, g, kv_heads) for g in pattern.branch_heads(branch, kv_heads)}


def test_flop_of_an_aligned_pattern_follow_the_closed_form():
    lengths, rates = tuple(2048 * 2**i for i in range(5)), tuple(2**i for i in range(5))
    work = DilatedPattern(lengths, rates).work(65536, heads=16, head_dim=128)
    assert work.flop_forward == 4 * 16 * 65536 * 128 * sum(w // r**2 for w, r in zip(lengths, rates, strict=True))
    assert work.flop_backward * 2 == work.flop_forward * 5


def test_bytes_count_used_rows_once_and_outputs_whole():
    pattern = DilatedPattern((8,), (2,), offsets="zero")  # half of the rows are in the branch
    work = pattern.work(32, heads=4, kv_heads=2, head_dim=16, batch=3, element_size=2)
    row, queries, keys = 32, 3 * 32 * 4, 3 * 32 * 2
    assert work.bytes_forward == (queries // 2 + 2 * (keys // 2)) * row + queries * row + queries * 4
    read = (3 * (queries // 2) + 2 * (keys // 2)) * row + queries // 2 * 4
    assert work.bytes_backward == read + (queries + 2 * keys) * row


def test_counts_of_a_billion_tokens_take_no_memory():
    lengths = tuple(2048 * 4**i for i in range(10))
    pattern = DilatedPattern(lengths, tuple(2**i for i in range(10)))
    assert pattern.work(2**30, heads=1, head_dim=64).pairs > 2**30 * 2048
    assert pattern.covered(2**30, 0, 1) == 2**30


def test_head_groups_are_those_of_tensor_split():
    pattern = DilatedPattern((4, 8, 16), (1, 2, 4), mixing="head_groups")
    for kv_heads in (3, 4, 5, 8):
        expected = [group.tolist() for group in torch.tensor_split(torch.arange(kv_heads), 3)]
        assert [list(pattern.branch_heads(i, kv_heads)) for i in range(3)] == expected
    with pytest.raises(ValueError, match=r"at least one KV head a branch \(3\), got 2"):
        pattern.branch_heads(0, 2)


def test_patterns_are_values():
    pattern = DilatedPattern([4, 8], [1, 2])
    assert pattern == DilatedPattern((4, 8), (1, 2))
    assert hash(pattern) == hash(DilatedPattern((4, 8), (1, 2)))
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    with pytest.raises(AttributeError):
        pattern.offsets = "zero"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((), ()), ValueError, "segment_lengths must name at least one branch"),
        (((4, 8), (1,)), ValueError, r"dilation_rates must have one rate a segment length \(2\), got 1"),
        (((0,), (1,)), ValueError, "segment_lengths must be at least 1, got 0"),
        (((4,), (5,)), ValueError, "dilation_rates must be from 1 to the segment length 4, got 5"),
        (((4,), (0,)), ValueError, "dilation_rates must be from 1 to the segment length 4, got 0"),
        (((4.0,), (1,)), TypeError, "segment_lengths must hold integers, got 4.0 of type float"),
        (((True,), (1,)), TypeError, "segment_lengths must hold integers, got True"),
        ((4, (1,)), TypeError, "segment_lengths must be a sequence of integers, got 4"),
        (("4", (1,)), TypeError, "segment_lengths must be a sequence of integers, got '4'"),
        (((4,), (1,), "heads"), ValueError, "offsets must be one of head, head_block, branch, zero; got 'heads'"),
        (((4,), (1,), None), TypeError, "offsets must be a string"),
        (((4,), (1,), "head", "mean"), ValueError, "mixing must be one of softmax, head_groups; got 'mean'"),
    ],
)
def test_bad_patterns_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DilatedPattern(*arguments)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"kv_heads must divide heads \(4\), got 3"):
        DilatedPattern((4,), (1,)).pairs(8, heads=4, kv_heads=3)
