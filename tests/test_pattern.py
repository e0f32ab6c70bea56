"""A pattern says which keys a query sees; counts are closed forms of that."""

import pickle
import time
from itertools import chain

import numpy as np
import oracle
import pytest
import torch
from cases import refusals
from counts import lines_run
from hypothesis import example, given
from hypothesis import strategies as st

from hilbert_lib import DilatedPattern
from hilbert_lib.patterns import residues
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES


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
            expected = sorted(chain(*oracle.keys_of(pattern, query, length, g, kv_heads, is_causal)))
            keys = pattern.keys(query, kv_head=g, kv_heads=kv_heads, length=length, is_causal=is_causal)
            assert keys.tolist() == expected


@cases
@example(DilatedPattern((5, 7), (2, 3), offsets="zero"), 41, 3, False)  # rates that do not divide
def test_pairs_and_covered_positions_are_counted_exactly(pattern, length, kv_heads, is_causal):
    heads = range(kv_heads)
    seen = [oracle.times_seen(pattern, range(length), length, g, kv_heads, is_causal).sum(-1) for g in heads]
    assert pattern.pairs(length, heads=2 * kv_heads, kv_heads=kv_heads, is_causal=is_causal) == 2 * sum(map(sum, seen))
    start, end = length // 3, length // 2
    some = sum(head[start:end].sum() for head in seen)
    assert pattern.pairs(length, heads=kv_heads, is_causal=is_causal, at=range(start, end)) == some
    with pytest.MonkeyPatch.context() as patch:
        for at_once in (residues.COUNTED_AT_ONCE, 5):  # in one piece, and in several
            patch.setattr(residues, "COUNTED_AT_ONCE", at_once)
            residues.covered.cache_clear()
            for g in range(kv_heads):
                assert pattern.covered(length, g, kv_heads) == seen[g].count_nonzero()


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
    # lse is float64 where the rest is.
    single, double = (pattern.work(8, heads=2, head_dim=4, element_size=size) for size in (4, 8))
    assert (double.bytes_forward, double.bytes_backward) == (2 * single.bytes_forward, 2 * single.bytes_backward)


def test_counts_of_billions_of_tokens_take_no_memory_and_no_time():
    lengths = tuple(2048 * 4**i for i in range(10))
    pattern = DilatedPattern(lengths, tuple(2**i for i in range(10)))
    assert pattern.work(2**30, heads=1, head_dim=64).pairs > 2**30 * 2048
    assert pattern.covered(2**30, 0, 1) == 2**30


def test_counts_of_what_does_not_divide_take_no_time_either():
    def count():
        assert DilatedPattern((100003,), (3,)).covered(2 * 10**8, 0, 1) == 1999 * 33335 + 31335
        assert DilatedPattern((10**9,), (3,)).covered(10**10, 0, 1) == 10 * 333333334
        work = DilatedPattern((100003,), (3,)).work(2 * 10**8, heads=16, head_dim=64)
        assert work.bytes_forward > 0
        assert DilatedPattern((100003, 7), (3, 1)).covered(10**12, 0, 1) == 10**12

    lines_run(count, 20_000)


residue_sets = st.lists(st.tuples(st.integers(2, 60), st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=4)


@given(residue_sets, st.integers(0, 3000), st.sampled_from([1, 3, 2**16]), st.sampled_from([0, 1, 16]))
@example([(35, 6, 1), (21, 4, 1), (55, 8, 3)], 2999, 1, 0)
def test_positions_are_counted_by_stretches_as_one_by_one(drawn, length, at_once, few):
    branches = frozenset((w, min(w, r), o % min(w, r)) for w, r, o in drawn)
    expected = residues._covered_one_by_one(length, branches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residues, "STRETCHES_AT_ONCE", at_once)
        patch.setattr(residues, "FEW_CLASSES", few)
        residues.covered.cache_clear()
        assert residues._covered_by_stretches(length, branches) == expected
        assert residues.covered(length, branches) == expected
    residues.covered.cache_clear()


SLOW = [  # no branch of rate 1, and a period beyond the length
    ((100003, 200003), (3, 5)),
    ((1009, 2003, 4001), (3, 5, 7)),
    ((5, 100003, 99991), (3, 7, 11)),
    ((10**9, 10**9, 10**9), (1009, 1013, 1019)),
]


@pytest.mark.parametrize(("lengths", "rates"), SLOW)
def test_positions_of_any_length_are_counted_in_seconds(lengths, rates):
    """In processor time: one by one they take 30 seconds and more."""
    pattern, begin = DilatedPattern(lengths, rates, offsets="zero"), time.process_time()
    found = pattern.covered(10**9, 0, 1)
    assert time.process_time() - begin < 10
    assert (
        0 < 10**9 / max(rates) < found < 10**9 * sum(1 / min(r, w) for w, r in zip(lengths, rates, strict=True)) * 1.3
    )


def test_description_counts_keys_segments_and_tail():
    table = DilatedPattern((4, 9), (1, 2)).describe(18 + 4, heads=2)
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["0", "4", "1", "yes", "4", "6", "2", "65.1%"],
        ["1", "9", "2", "no", "5", "3", "4", "34.9%"],
    ]
    assert DilatedPattern((4, 9), (1, 2)).describe().splitlines()[-1].split() == ["1", "9", "2", "no", "5"]
    groups = DilatedPattern((4, 8), (1, 2), mixing="head_groups")  # by default a head for every branch
    assert groups.describe(16) == groups.describe(16, heads=2)
    assert groups.describe(16, kv_heads=3) == groups.describe(16, heads=3)


@given(st.integers(1, 5000), st.integers(0, 10**7), st.integers(2, 6))
@example(1024, 2**20 - 1024, 5)
@example(1, 2**62 - 1, 4)
def test_a_geometric_row_is_rounded_down_exactly(first, more, branches):
    last, steps = first + more, branches - 1
    pattern = DilatedPattern.geometric(first, last, branches, 1, offsets="zero", padding="zeros")
    assert (pattern.offsets, pattern.padding, pattern.dilation_rates) == ("zero", "zeros", (1,) * branches)
    assert (pattern.segment_lengths[0], pattern.segment_lengths[-1]) == (first, last)
    for i, w in enumerate(pattern.segment_lengths):
        assert w**steps <= first ** (steps - i) * last**i < (w + 1) ** steps


@given(st.integers(50, 3000), st.floats(1e6, 1e9), st.integers(2, 4), st.booleans())
def test_a_row_within_a_budget_uses_it(length, flop, branches, is_causal):
    sizes = {"heads": 6, "head_dim": 8, "kv_heads": 3, "is_causal": is_causal}
    try:
        pattern, work = DilatedPattern.within(length, flop=flop, branches=branches, **sizes, offsets="head_block")
    except ValueError:
        assert flop < 4 * 6 * 8 * branches * 16 * length
        return
    assert work == pattern.work(length, **sizes)
    assert work.flop_forward <= flop
    first, ratio = pattern.segment_lengths[0], pattern.dilation_rates[1]
    if first < length:
        longer = DilatedPattern.geometric(first + 1, length, branches, ratio, offsets="head_block")
        assert longer.work(length, **sizes).flop_forward > flop
    if ratio > 2:  # with denser rates the first branch does not get its share
        share = int(flop / (4 * 6 * 8 * length * branches))
        denser = DilatedPattern.geometric(share, length, branches, ratio // 2, offsets="head_block")
        assert denser.work(length, **sizes).flop_forward > flop


def test_a_default_device_elsewhere_changes_no_keys():
    pattern = DilatedPattern((4, 8), (2, 4))
    with torch.device("meta"):
        assert pattern.keys(0, kv_head=0, kv_heads=1, length=8).tolist() == [0, 0, 2, 4]
        assert pattern.covered(8, 0, 1) == 4


def test_the_mask_of_a_branch_that_a_head_does_not_use_is_empty():
    pattern = DilatedPattern((4, 4), (1, 1), mixing="head_groups")
    used, unused = (pattern.mask(i, TOKENS, TOKENS[:3], kv_head=0, kv_heads=2) for i in range(2))
    assert used.any()
    assert unused.equal(torch.zeros(4, 3, dtype=torch.bool))


def test_patterns_are_values():
    pattern = DilatedPattern([4, np.int64(8)], np.array([1, 2]))
    assert pattern.segment_lengths + pattern.dilation_rates == (4, 8, 1, 2)
    assert {type(n) for n in pattern.segment_lengths + pattern.dilation_rates} == {int}
    assert pattern == DilatedPattern((4, 8), (1, 2))
    assert hash(pattern) == hash(DilatedPattern((4, 8), (1, 2)))
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    with pytest.raises(AttributeError):
        pattern.offsets = "zero"


PATTERN = DilatedPattern((4, 8), (1, 2))
TOKENS = torch.arange(4)
AT, SIZES = {"kv_head": 0, "kv_heads": 1}, {"heads": 2, "head_dim": 8}
WRONG = {
    TypeError: [
        (lambda: DilatedPattern("4", (1,)), "segment_lengths must be a sequence of integers, got '4'"),
        (lambda: DilatedPattern(np.array([[4]]), (1,)), "segment_lengths must be a sequence of integers"),
        (lambda: DilatedPattern((4,), (1,), None), "offsets must be a string"),
        (lambda: PATTERN.keys(0, **AT, length=8.0), "length must be an integer"),
        (lambda: PATTERN.describe(4, heads=1.5), "heads must be an integer"),
    ],
    ValueError: [
        (lambda: DilatedPattern((), ()), "segment_lengths must hold at least one integer"),
        (lambda: DilatedPattern((4, 8), (1,)), r"dilation_rates must have one rate a segment length \(2\), got 1"),
        (lambda: DilatedPattern((0,), (1,)), r"segment_lengths\[0\] must be an integer of at least 1, got 0"),
        (lambda: DilatedPattern((4,), (5,)), "dilation_rates must be from 1 to the segment length 4, got 5"),
        (lambda: DilatedPattern((2**63,), (1,)), r"segment_lengths must be at most 2\^63 - 1, got 9223372036854775808"),
        (lambda: DilatedPattern((4,), (1,), "heads"), "offsets must be one of head, head_block, .*; got 'heads'"),
        (lambda: DilatedPattern((4,), (1,), "head", "mean"), "mixing must be one of softmax, head_groups; got 'mean'"),
        (lambda: DilatedPattern.geometric(8, 4), "last must be an integer from 8 to .*, got 4"),
        (lambda: DilatedPattern.geometric(8, 64, 1), "branches must be an integer from 2 to 1024, got 1"),
        (lambda: DilatedPattern.geometric(8, 64, 3, 9), "dilation_rates must be from 1 to .* 64, got 81"),
        (lambda: DilatedPattern.within(64, flop=1e3, branches=3, **SIZES), "flop must be at least 12288 for 3"),
        (lambda: DilatedPattern.within(64, flop=0, branches=3, **SIZES), "flop must be finite and above 0"),
        (lambda: DilatedPattern((4,), (1,), padding="ones"), "padding must be one of none, zeros; got 'ones'"),
        (lambda: PATTERN.pairs(-1, heads=1), "length must be an integer of at least 0, got -1"),
        (lambda: PATTERN.pairs(8, heads=1, at=range(6, 9)), r"at must be positions from 0 to 7, .* got range\(6, 9\)"),
        (lambda: PATTERN.pairs(8, heads=1, at=range(-1, 9)), r"at must be positions from 0 to 7, .* got range\(-1"),
        (lambda: PATTERN.pairs(8, heads=1, at=range(0, 8, 2)), "at must be positions .* one after the other"),
        (lambda: PATTERN.pairs(8, heads=0), "heads must be an integer of at least 1, got 0"),
        (lambda: PATTERN.pairs(8, heads=2, kv_heads=0), "kv_heads must be an integer of at least 1, got 0"),
        (lambda: PATTERN.pairs(8, heads=4, kv_heads=3), r"kv_heads must divide heads \(4\), got 3"),
        (lambda: PATTERN.work(8, heads=1, head_dim=-4), "head_dim must be .* at least 1, got -4"),
        (lambda: PATTERN.work(8, heads=1, head_dim=4, batch=-1), "batch must be .* at least 0, got -1"),
        (lambda: PATTERN.work(8, heads=1, head_dim=4, element_size=0), "element_size must be .* got 0"),
        (lambda: PATTERN.covered(-1, 0, 1), "length must be an integer of at least 0, got -1"),
        (lambda: PATTERN.keys(8, **AT, length=8), "position must be .* 0 to 7, got 8"),
        (lambda: PATTERN.keys(0, kv_head=-1, kv_heads=1, length=8), "kv_head must be .* from 0 to 0"),
        (lambda: PATTERN.offset(2, 0, 1), "branch must be an integer from 0 to 1, got 2"),
        (lambda: PATTERN.offset(0, 1, 1), "kv_head must be an integer from 0 to 0, got 1"),
        (lambda: PATTERN.offset(0, 0, 0), "kv_heads must be an integer of at least 1, got 0"),
        (lambda: PATTERN.branch_heads(2, 4), "branch must be an integer from 0 to 1, got 2"),
        (lambda: PATTERN.head_branches(4, 4), "kv_head must be an integer from 0 to 3, got 4"),
        (lambda: PATTERN.mask(2, TOKENS, TOKENS, **AT), "branch must be .* 0 to 1, got 2"),
        (lambda: PATTERN.describe(-4), "length must be an integer of at least 1, got -4"),
    ],
}
test_a_wrong_argument_is_refused_by_name_and_value = refusals(WRONG)
