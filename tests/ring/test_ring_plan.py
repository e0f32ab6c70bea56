"""The planner: what it sends is what brute force finds missing, and costs what the formulas say."""

import re
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from cases import refusals
from counts import lines_run
from hypothesis import example, given
from hypothesis import strategies as st

from hilbert_lib.lab.records import REPORTS, read_records
from hilbert_lib.lab.sweeps import sequences, spanning_pattern
from hilbert_lib.lab.sweeps.over_ranks import OverRanks
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES, DilatedPattern
from hilbert_lib.ring.plan import cost as costing
from hilbert_lib.ring.plan import estimate
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.cost import pairs_of_rank
from hilbert_lib.ring.plan.plan import SAME_TIME, plan_ring
from hilbert_lib.ring.plan.rows import Rows

GATHERING = ("all_gather", "ring")


PATTERN = DilatedPattern((4, 16), (1, 2))
GROUPS = DilatedPattern((4, 16), (1, 2), mixing="head_groups")


def plan_of(pattern=PATTERN, shard_lengths=(4,) * 4, **asked):
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 4, "batch": 1, "dtype": torch.bfloat16}
    return plan_ring(pattern, shard_lengths, **sizes | asked)


@st.composite
def patterns(draw, nested=False):
    branches = draw(st.integers(1, 3))
    if nested:  # every rate divides the next and its own segment length; offsets by head
        rates = [draw(st.sampled_from((1, 2, 3)))]
        while len(rates) < branches:
            rates.append(rates[-1] * draw(st.sampled_from((1, 2, 3))))
        lengths = [rate * draw(st.integers(1, 12)) for rate in rates]
        return DilatedPattern(lengths, rates)
    lengths = [draw(st.integers(1, 30)) for _ in range(branches)]
    rates = [draw(st.integers(1, min(w, 7))) for w in lengths]
    return DilatedPattern(lengths, rates, draw(st.sampled_from(OFFSET_RULES)), draw(st.sampled_from(MIXING_RULES)))


shards = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum)
kv_head_counts = st.integers(3, 6)


def owners(shard_lengths):
    return torch.repeat_interleave(torch.arange(len(shard_lengths)), torch.tensor(shard_lengths))


def missing(pattern, shard_lengths, kv_heads, is_causal):
    """By enumeration: {(source, destination): {(branch, position, head)}} that the destination needs and lacks."""
    owner, positions = owners(shard_lengths), torch.arange(sum(shard_lengths))
    found = {}
    for branch, head in product(range(len(pattern.branches)), range(kv_heads)):
        seen = pattern.mask(branch, positions, positions, kv_head=head, kv_heads=kv_heads, is_causal=is_causal)
        for query, key in (seen & (owner[:, None] != owner)).nonzero().tolist():
            found.setdefault((int(owner[key]), int(owner[query])), set()).add((branch, key, head))
    return found


def cells(rows: Rows):
    """{(position, head)} of every row."""
    return set(product((rows.first + n * rows.step for n in range(rows.count)), rows.kv_heads))


def cells_of(message):
    return set().union(*map(cells, message.pieces))


@given(patterns(), shards, kv_head_counts, st.booleans(), st.sampled_from(GATHERING))
# 3 divides 6, but not its segment length 10: rows 12 and 18 of the second branch are not in the first.
@example(DilatedPattern((10, 20), (3, 6)), [15, 5], 3, False, "ring")
def test_every_rank_receives_exactly_the_rows_that_its_queries_need(pattern, lengths, kv_heads, is_causal, transport):
    plan = plan_of(pattern, lengths, heads=kv_heads, kv_heads=kv_heads, is_causal=is_causal, transport=transport)
    found = {pair: cells_of(message) for pair, message in plan.messages.get(transport, {}).items()}
    needed = missing(pattern, lengths, kv_heads, is_causal)
    assert found == {pair: {cell[1:] for cell in some} for pair, some in needed.items()}


@given(patterns(nested=True), shards, kv_head_counts, st.booleans(), st.sampled_from((1, 3)), st.sampled_from((1, 2)))
def test_a_row_that_several_branches_need_is_sent_once(pattern, lengths, kv_heads, is_causal, group, batch):
    sizes = {"heads": group * kv_heads, "kv_heads": kv_heads, "batch": batch}
    plan = plan_of(pattern, lengths, is_causal=is_causal, transport="ring", **sizes)
    needed = missing(pattern, lengths, kv_heads, is_causal)
    rows = {pair: len({cell[1:] for cell in some}) for pair, some in needed.items()}
    for rank, cost in enumerate(plan.ranks):
        out = sum(count for (source, _), count in rows.items() if source == rank)
        into = sum(count for (_, destination), count in rows.items() if destination == rank)
        row = 2 * 4 * batch  # k and v, head_dim 4
        assert (cost.sent_forward, cost.received_forward) == (2 * row * out, 2 * row * into)
        # k and v again, one way; dk and dv in float32, the other
        assert cost.sent_backward == 2 * row * out + 4 * row * into
        assert cost.received_backward == 2 * row * into + 4 * row * out


@given(patterns(), shards, st.booleans())
def test_an_all_to_all_brings_all_rows_of_a_head_to_one_rank(pattern, lengths, is_causal):
    plan = plan_of(pattern, lengths, heads=18, kv_heads=18, is_causal=is_causal, transport="all_to_all")
    owner, brought, needed = owners(lengths), {}, {}
    for (source, destination), message in plan.messages.get("all_to_all", {}).items():
        for position, head in cells_of(message):
            assert owner[position] == source
            brought.setdefault((position, head), set()).add(destination)
    for number, branch in enumerate(plan.branches):
        for segment, head in product(branch.shared, pattern.branch_heads(number, 18)):
            (computing,) = [rank for rank, heads in segment.computed.items() if head in heads]
            positions = torch.arange(segment.start, segment.stop)
            for position in positions[pattern.contains(number, positions, head, 18)].tolist():
                needed.setdefault((position, head), set()).add(computing)
    assert brought == needed


@given(patterns(), shards, kv_head_counts)
def test_local_and_shared_segments_together_are_all_segments(pattern, lengths, kv_heads):
    plan = plan_of(pattern, lengths, heads=kv_heads, kv_heads=kv_heads, transport="ring")
    owner = owners(lengths)
    for number, branch in enumerate(plan.branches):
        listed = []
        for rank, positions in enumerate(branch.local):
            assert all(owner[position] == rank for position in positions)
            assert not positions or positions.start % branch.segment_length == 0
            assert not positions or positions.stop % branch.segment_length == 0 or positions.stop == len(owner)
            for head in pattern.branch_heads(number, kv_heads):
                inside = pattern.contains(number, torch.tensor(positions), head, kv_heads)
                listed += [(positions[n], head) for n in inside.nonzero().flatten().tolist()]
        for segment in branch.shared:
            assert len(segment.ranks) > 1
            for rank, groups in segment.rows.items():
                for rows in groups:
                    assert all(owner[position] == rank for position, _ in cells(rows))
                    listed += cells(rows)
        every = []
        for head in pattern.branch_heads(number, kv_heads):
            inside = pattern.contains(number, torch.arange(len(owner)), head, kv_heads)
            every += [(position, head) for position in inside.nonzero().flatten().tolist()]
        assert sorted(listed) == sorted(every)


@given(patterns(), shards, st.booleans(), st.sampled_from((*GATHERING, "all_to_all")))
def test_all_ranks_compute_the_useful_flop_and_receive_what_is_sent(pattern, lengths, is_causal, transport):
    plan = plan_of(pattern, lengths, heads=36, kv_heads=18, batch=2, is_causal=is_causal, transport=transport)
    work = pattern.work(sum(lengths), heads=36, kv_heads=18, head_dim=4, batch=2, is_causal=is_causal)
    for way in ("forward", "backward"):
        flop, sent, received = (
            sum(getattr(cost, f"{name}_{way}") for cost in plan.ranks) for name in ("flop", "sent", "received")
        )
        assert flop == getattr(work, f"flop_{way}")
        assert sent == received


def estimated(plan):
    """The seconds that a plan is thought to take."""
    return estimate.seconds(plan.sizes, [estimate.share_of(plan, branch) for branch in plan.branches])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_auto_takes_one_collective_where_the_exchange_hides_anyway(ranks, is_causal):
    """By heads a branch would send fewer bytes, and would take two collectives more."""
    pattern, sizes = spanning_pattern(ranks * 2**17, 2048), {"heads": 16, "kv_heads": 16, "head_dim": 64}
    plans = {
        transport: plan_of(pattern, (2**17,) * ranks, is_causal=is_causal, transport=transport, **sizes)
        for transport in ("auto", "all_to_all")
    }
    sent = {transport: sum(cost.sent_forward for cost in plan.ranks) for transport, plan in plans.items()}
    calls = {
        transport: estimate.collectives(plan.sizes, plan.messages, ranks, "forward")
        for transport, plan in plans.items()
    }
    assert calls == {"auto": 1, "all_to_all": 2}
    assert ranks == 2 or is_causal or sent["all_to_all"] < sent["auto"]


@pytest.mark.parametrize(
    ("branch", "length", "batch", "is_causal", "is_exchanged"),
    [
        ((2**20, 1), 2**17, 1, True, True),  # later ranks would have more work
        ((2**20, 1), 2**17, 1, False, False),  # all have as much, and rows hide
        ((2**18, 8), 2**15, 64, False, True),  # a rank's own keys are too few to hide rows of seven others
        ((2**18, 8), 2**15, 1, False, False),  # the same, but the host takes longer to start collectives
    ],
)
def test_auto_exchanges_heads_where_that_is_faster(branch, length, batch, is_causal, is_exchanged):
    pattern, sizes = DilatedPattern(*zip(branch, strict=True)), {"heads": 16, "kv_heads": 16, "head_dim": 64}
    plan = plan_of(pattern, (length,) * 8, batch=batch, is_causal=is_causal, **sizes)
    assert (plan.branches[0].transport == "all_to_all") == is_exchanged, plan.branches[0].reason


@given(patterns(), shards, st.booleans(), st.integers(0, 2))
def test_auto_takes_no_longer_than_exchanged_heads_by_its_estimate(pattern, lengths, is_causal, magnitude):
    scale = 256**magnitude  # from where the host binds to where attention does
    pattern = replace(pattern, segment_lengths=[w * scale for w in pattern.segment_lengths])
    lengths, sizes = [length * scale for length in lengths], {"heads": 60, "kv_heads": 60, "is_causal": is_causal}
    heads = [len(branch.kv_heads) for branch in plan_of(pattern, lengths, **sizes).branches]
    if any(count % ranks for count in heads for ranks in range(1, len(lengths) + 1)):
        return  # then "auto" may not exchange all that "all_to_all" does
    auto, exchanged = (plan_of(pattern, lengths, transport=each, **sizes) for each in ("auto", "all_to_all"))
    assert estimated(auto) <= (1 + SAME_TIME) * estimated(exchanged)


@given(patterns(), shards, st.booleans())
def test_pairs_that_wait_for_no_other_rank_are_those_of_own_keys(pattern, lengths, is_causal):
    plan = plan_of(pattern, lengths, heads=3, kv_heads=3, is_causal=is_causal, transport="all_gather")
    owner, positions, found = owners(lengths), torch.arange(sum(lengths)), [0] * len(lengths)
    for branch, head in product(range(len(pattern.branches)), range(3)):
        seen = pattern.mask(branch, positions, positions, kv_head=head, kv_heads=3, is_causal=is_causal)
        own = seen & (owner[:, None] == owner)
        for rank in range(len(lengths)):
            found[rank] += int(own[owner == rank].sum())
    assert [pairs_of_rank(plan, rank, only_own_keys=True) for rank in range(len(lengths))] == found


@pytest.mark.parametrize("head_dim", [1, 16, 64, 65, 128, 192, 256])
def test_an_estimate_grows_with_the_work(head_dim):
    """A host that waits for its GPU adds nothing."""
    times = [estimated(plan_of(PATTERN, (4,), batch=2**n, head_dim=head_dim)) for n in (0, 40, 41)]
    assert times[0] == pytest.approx(estimate.HOST_OF_CALL)
    assert times[2] == pytest.approx(2 * times[1])


def test_auto_gathers_at_once_where_there_is_room():
    lengths = (1024, 1024)
    dense, dilated = DilatedPattern((2048,), (1,)), DilatedPattern((2048,), (2,))
    assert plan_of(dilated, lengths).branches[0].transport == "all_gather"
    assert plan_of(dense, lengths).branches[0].transport == "all_gather"  # as much as a shard's own k and v
    assert plan_of(dense, (1023, 1024, 1)).branches[0].transport == "ring"


def test_a_memory_limit_decides_between_the_transports():
    asked = {"pattern": DilatedPattern((4096,), (1,)), "shard_lengths": (1024,) * 4, "heads": 7, "kv_heads": 7}
    gathered, ring = (plan_of(**asked, transport=transport) for transport in GATHERING)
    most = [max(cost.memory_backward for cost in plan.ranks) for plan in (gathered, ring)]
    assert most[0] > most[1]
    for limit, transport in ((most[0], "all_gather"), (most[0] - 1, "ring"), (most[1], "ring")):
        assert plan_of(**asked, memory_limit=limit).branches[0].transport == transport
    least = max(cost.memory_forward for cost in ring.ranks)
    assert plan_of(**asked, memory_limit=least).branches[0].transport == "ring"  # a forward fits
    with pytest.raises(ValueError, match=f"memory_limit must be at least {least} bytes.*got {least - 1}"):
        plan_of(**asked, memory_limit=least - 1)
    with pytest.raises(ValueError, match="memory_limit must be at least"):
        plan_of(**asked, memory_limit=least, transport="all_gather")


@pytest.mark.parametrize("transport", [*GATHERING, "all_to_all"])
def test_memory_a_rank_falls_with_the_ranks(transport):
    # w = 2048 r: with the length fixed, what is exchanged does not grow.
    pattern = DilatedPattern((2048, 2**16, 2**20), (1, 32, 512))
    most = {}
    for ranks in (1, 2, 4, 8):
        plan = plan_of(pattern, (2**20 // ranks,) * ranks, heads=8, kv_heads=8, head_dim=64, transport=transport)
        most[ranks] = max(max(cost.memory_forward, cost.memory_backward) for cost in plan.ranks)
    assert most[4] < 0.6 * most[2]
    assert most[8] < 0.6 * most[4]


def kept_before(records):
    """Bytes that works before kept (tables of their layouts), by ranks: of one work, measured before them and after."""
    alike = [record for record in records if record["side"] == "auto" and not record["is_causal"]]
    peaks = {(each["sweep"], each["ranks"], each["tokens"]): each["peak_bytes"] for each in alike}
    after = {key: peak for key, peak in peaks.items() if key[0] == "transports"}
    return {ranks: peak - peaks["weak", ranks, tokens] for (_, ranks, tokens), peak in after.items()}


@pytest.mark.evidence
def test_memory_planned_is_what_committed_rings_allocated():
    found = 0
    for path in sorted(REPORTS.glob("h*x*/*/07_ring_attention-*/results.jsonl.gz")):
        records = read_records(path)
        kept = kept_before(records)
        for record in (each for each in records if each["peak_bytes"] and each["side"] != sequences.GATHERED):
            work = OverRanks.of(record)
            planned = work.planned(record["side"])["planned_bytes"]
            if record["sweep"] in ("transports", "lengths"):
                planned += kept[work.ranks]
            if record["side"] in sequences.ORDERS:  # beside the ordered k and v the benchmark holds the others
                planned += 2 * 2 * work.rows * work.workload.kv_heads * work.workload.head_dim
            assert planned == pytest.approx(record["peak_bytes"], rel=0.06), (record["side"], work)
            found += 1
    assert found > 50


@given(patterns(), shards, kv_head_counts, st.booleans(), st.booleans())
def test_blocks_round_a_ring_are_counted_alike_one_by_one_and_as_arrays(pattern, lengths, kv_heads, is_causal, padded):
    options = {"heads": kv_heads, "kv_heads": kv_heads, "is_causal": is_causal, "padded": padded, "transport": "ring"}
    ways = []
    for few in (0, 100):
        with patch.object(costing, "FEW_RANKS", few):
            ways.append(plan_of(pattern, lengths, **options).ranks)
    assert ways[0] == ways[1]


@pytest.mark.parametrize("transport", ["auto", *GATHERING])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("widest", ["of two ranks", "of all"])
def test_planning_costs_by_the_ranks_and_not_by_their_pairs(widest, is_causal, transport):
    def lines(ranks):
        segments = (2**10, 2**12, 2**13 if widest == "of two ranks" else ranks * 2**12)
        shards = shard_lengths_for(ranks * 2**12 - 5, ranks)  # no segment ends where a shard does
        options = {"heads": 4, "kv_heads": 4, "is_causal": is_causal, "transport": transport}
        pattern = DilatedPattern(segments, (1, 4, 8))
        return lines_run(lambda: str(plan_of(pattern, shards, **options)), most=10**7)

    lines(2)  # imports
    assert lines(128) < 2.3 * lines(64)


@pytest.mark.parametrize("is_causal", [False, True])
def test_uneven_shards_balance_the_flop(is_causal):
    pattern, speeds = DilatedPattern((2048, 8192, 2**16), (1, 4, 32)), (3.0, 1.0, 2.0, 2.0)
    lengths = shard_lengths_for(2**16, 4, weights=speeds, pattern=pattern, kv_heads=8, is_causal=is_causal)
    plan = plan_of(pattern, lengths, heads=8, kv_heads=8, weights=speeds, is_causal=is_causal)
    assert "all_to_all" not in plan.messages  # it would share the work out evenly
    times = [cost.flop_forward / speed for cost, speed in zip(plan.ranks, speeds, strict=True)]
    assert max(times) < 1.01 * min(times)
    assert "time to the mean" in str(plan)


@given(st.integers(1, 10**12), st.integers(1, 9), st.integers(1, 5000), st.data())
def test_shard_lengths_add_up_and_begin_at_multiples(length, ranks, multiple, data):
    weights = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks))
    lengths = shard_lengths_for(length, ranks, weights=weights, multiple=multiple)
    assert sum(lengths) == length
    assert len(lengths) == ranks
    starts = [sum(lengths[:n]) for n in range(ranks)]
    assert all(start % multiple == 0 or start == length for start in starts)
    share = [weight / sum(weights) for weight in weights] if weights else [1 / ranks] * ranks
    assert all(abs(a - b * length) < multiple + 1e-6 * length for a, b in zip(lengths, share, strict=True))


def test_weights_may_be_an_array_of_any_number_type():
    for dtype in (np.float32, np.float64, np.int64):
        weights = np.array([2, 1, 1], dtype=dtype)
        assert shard_lengths_for(2**62, 3, weights=weights) == (2**61, 2**60, 2**60)
        assert plan_of(DilatedPattern((4,), (1,)), (4,) * 3, weights=weights).speeds == (2.0, 1.0, 1.0)


def test_tokens_without_work_have_a_rank_too():
    in_no_branch_at_the_end = DilatedPattern((4,), (4,))
    assert shard_lengths_for(7, 2, pattern=in_no_branch_at_the_end) == (1, 6)


def test_a_billion_tokens_are_planned_in_no_more_time_than_few():
    pattern = DilatedPattern([2048 * 2**n for n in range(20)], [2**n for n in range(20)])
    sizes = {"heads": 16, "kv_heads": 16, "head_dim": 64, "is_causal": True}
    for ragged in (0, 12345):
        lengths = (2**27 + ragged, 2**27 - ragged) + (2**27,) * 6

        def say(lengths=lengths):
            assert "1,073,741,824 tokens on 8 ranks" in str(plan_of(pattern, lengths, **sizes))

        lines_run(say, 2_000_000)


def test_the_table_says_who_sends_what_and_why():
    plan = plan_of(DilatedPattern((512, 2048), (1, 4)), (1024,) * 2, heads=4, kv_heads=4, head_dim=64)
    asked, _, _, local, shared, _, _, ranks = [re.split("  +", line.strip()) for line in str(plan).splitlines()]
    assert asked[0].startswith("2,048 tokens on 2 ranks, batch 1, 4 heads, 4 KV heads, head_dim 64, bfloat16")
    assert local[:6] == ["0", "512", "1", "1", "0", "local"]
    assert shared[:6] == ["1", "2,048", "4", "2", "0.262", "all_gather"]
    assert shared[6] == "an estimate of 5.7 ms, 6.9 ms where heads are exchanged; room for all rows at once"
    assert " ".join(ranks) == "0-1 1,024 0.262 0.262 0.786 0.786 0.00349 0.00757 0.000671 0.00168"


TYPES = [
    (lambda: plan_of("x"), "pattern must be a DilatedPattern, got str"),
    (lambda: plan_of(shard_lengths=8), "shard_lengths must be a sequence"),
    (lambda: plan_of(transport=["ring"]), r"transport must be a string, got \['ring'\]"),
    (lambda: plan_of(weights=(1, 1, "1", 1)), r"weights\[2\] must be a number, got '1'"),
    (lambda: plan_of(weights=3), "weights must be a sequence of numbers or None, got 3"),
    (lambda: plan_of(is_causal="no"), "is_causal must be True or False, got 'no'"),
    (lambda: shard_lengths_for(100, 3, pattern="x"), "pattern must be a DilatedPattern, got str"),
    (lambda: shard_lengths_for(100, 3, is_causal="no"), "is_causal must be True or False, got 'no'"),
    (lambda: shard_lengths_for(100, 3, weights=3), "weights must be a sequence of numbers or None, got 3"),
]
VALUES = [
    (lambda: plan_of(shard_lengths=(0, 0)), "shard_lengths must hold at least one token"),
    (lambda: plan_of(shard_lengths=(4, -1)), r"shard_lengths\[1\] must be an integer of at least 0, got -1"),
    (lambda: plan_of(heads=3), r"kv_heads must divide heads \(3\), got 2"),
    (lambda: plan_of(head_dim=257), "head_dim must be an integer from 1 to 256"),
    (lambda: plan_of(batch=0), "batch must be an integer of at least 1"),
    (lambda: plan_of(dtype=torch.int32), "dtype must be one of"),
    (lambda: plan_of(transport="nvlink"), "transport must be one of auto, ring, all_gather, all_to_all"),
    (lambda: plan_of(transport="all_to_all"), "needs at least one KV head a rank: 4 ranks.*branch 1.*has 2"),
    (lambda: plan_of(memory_limit=0), "memory_limit must be an integer of at least 1"),
    (lambda: plan_of(weights=(1.0,)), r"weights must have one number a rank \(4\), got 1"),
    (lambda: plan_of(weights=(1, 1, 0, 1)), r"weights\[2\] must be finite and above 0, got 0"),
    (lambda: plan_of(GROUPS, kv_heads=1), "at least one KV head a branch"),
]
test_what_cannot_be_planned_names_the_argument = refusals({TypeError: TYPES, ValueError: VALUES})
