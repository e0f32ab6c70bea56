"""Plans of rows that ranks send each other: pure functions of the pattern and the shard lengths, without a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from hilbert_lib.checks import boolean, integer, integers
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated
from hilbert_lib.ring.plan.balance import check_weights
from hilbert_lib.ring.plan.cost import TRANSPORTS, RingPlan, Sizes, amount, traffic
from hilbert_lib.ring.plan.estimate import seconds, share_of
from hilbert_lib.ring.plan.segments import BranchPlan, cut_branch

SAME_TIME = 0.05  # estimates are no better: two GPUs of a kind differ by as much
GATHERING = {"all_gather": "room for all rows at once", "ring": "no room for all rows at once"}


def plan_ring(
    pattern: DilatedPattern,
    shard_lengths: Sequence[int],
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool = False,
    transport: str = "auto",
    memory_limit: int | None = None,
    weights: Sequence[float] | None = None,
    padded: bool = False,
    ordered: bool = False,
) -> RingPlan:
    """The plan of which rank sends which rows to whom, so that every query finds its keys; the same on every rank.

    Only dilated rows travel, only between ranks that share a segment, and, if causal, only to later ranks. "auto"
    gathers k and v: all rows at once if there is room, otherwise round the ring, one rank's rows after another's. It
    exchanges heads of the widest branches where the estimated time is shorter so. A transport that sends fewer bytes
    gains nothing where all of them hide under attention, and more messages take longer to start. Exchanged heads gain
    where gathered rows would not hide, and where causal ranks would have unequal work. They need numbers of ranks in a
    segment that divide the KV heads.

    Args:
        pattern: which keys a query sees.
        shard_lengths: tokens of each rank, in rank order; 0 is allowed.
        batch, heads, kv_heads, head_dim: sizes of q, k and v.
        dtype: of q, k and v.
        is_causal: whether keys after the query are excluded.
        transport: of the shared segments: "ring", "all_gather", "all_to_all"; or "auto", which chooses for each branch.
        memory_limit: bytes that the call and its exchange may take on one rank, counted as in `RankCost`. Forward and
            backward should fit; if no plan achieves that, the forward. By default gathered rows may take as much as the
            longest shard's k and v, so that memory stays O(N/p).
        weights: relative speeds of the ranks. The table then shows which ranks wait; "auto" exchanges heads, which
            divides the work evenly, only if the speeds are equal.
        padded: whether the call has a key_padding_mask: one byte of it travels with each row.
        ordered: whether the call has a kv_ordering, which takes memory alone.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed; also if nothing fits memory_limit, or if by
            "all_to_all" a segment has more ranks than its branch has KV heads.

    >>> plan = plan_ring(
    ...     DilatedPattern((2048,), (4,)), (512,) * 8, batch=1, heads=8, kv_heads=8, head_dim=64, dtype=torch.bfloat16,
    ...     transport="ring",
    ... )
    >>> plan.branches[0].shared[1].ranks, plan.ranks[0].sent_forward, plan.ranks[0].sent_backward
    ((4, 5, 6, 7), 786432, 2359296)
    """
    check_dilated(pattern)
    shard_lengths = integers("shard_lengths", shard_lengths, least=0)
    if not sum(shard_lengths):
        raise ValueError(f"shard_lengths must hold at least one token, got {shard_lengths}")
    heads, kv_heads = integer("heads", heads, least=1), pattern.check_heads(kv_heads)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads ({heads}), got {kv_heads}")
    _, speeds, memory_limit = check_planning(transport, weights, memory_limit, len(shard_lengths)).values()
    sizes = Sizes.checked(batch, heads, kv_heads, head_dim, dtype, padded, ordered)
    branches = tuple(cut_branch(pattern, number, shard_lengths, kv_heads) for number in range(len(pattern.branches)))
    bare = RingPlan(pattern, shard_lengths, sizes, dtype, boolean("is_causal", is_causal), branches, speeds)
    even = speeds is None or len(set(speeds)) == 1
    for plan in _candidates(bare, transport, even, memory_limit):
        if _has_room(plan, memory_limit):
            return plan
    needed = max(cost.memory_forward for cost in plan.ranks)
    if memory_limit is not None and needed > memory_limit:
        raise ValueError(
            f"memory_limit must be at least {needed} bytes ({needed / 1e9:.3g} GB), which a forward takes on one rank "
            f"by transport={transport!r}; got {memory_limit} ({memory_limit / 1e9:.3g} GB)"
        )
    return plan


def check_planning(transport: object, weights: object, memory_limit: object, ranks: int | None = None) -> dict:
    """Arguments of `plan_ring` by name, if they are allowed (for so many ranks, if that is known)."""
    if not isinstance(transport, str):
        raise TypeError(f"transport must be a string, got {transport!r}")
    if transport not in ("auto", *TRANSPORTS):
        raise ValueError(f"transport must be one of auto, {', '.join(TRANSPORTS)}; got {transport!r}")
    memory_limit = None if memory_limit is None else integer("memory_limit", memory_limit, least=1)
    return {"transport": transport, "weights": check_weights(weights, ranks), "memory_limit": memory_limit}


def _candidates(bare: RingPlan, transport: str, even: bool, memory_limit: int | None) -> Iterator[RingPlan]:
    # In the order of preference; the last takes the least memory.
    if transport != "auto":
        if transport == "all_to_all":
            _check_heads_suffice(bare)
        yield _with_transports(bare, [transport] * len(bare.branches), ["as asked for"] * len(bare.branches))
        return
    why_not = _why_heads_stay(bare, even, memory_limit)
    for exchange, (gathering, room) in product((True, False), GATHERING.items()):
        if not exchange:
            why_not = [reason or "exchanged heads do not fit memory_limit" for reason in why_not]
        yield _with_transports(
            bare,
            [gathering if reason else "all_to_all" for reason in why_not],
            [f"{reason}; {room}" if reason else "a shorter time than by gathering k and v" for reason in why_not],
        )


def _check_heads_suffice(bare: RingPlan) -> None:
    for number, branch in enumerate(bare.branches):
        sharers, heads = max((len(s.ranks) for s in branch.shared), default=0), len(branch.kv_heads)
        if sharers > heads:
            raise ValueError(
                f"transport='all_to_all' needs at least one KV head a rank: {sharers} ranks share a segment of branch "
                f"{number} (segment length {branch.segment_length}), which has {heads}; ring and all_gather serve"
            )


def _why_heads_stay(bare: RingPlan, even: bool, memory_limit: int | None) -> list[str]:
    # Why each branch exchanges no heads; empty if it should: so the widest branches do, as few as are fast.
    why_not = [_why_heads_must_stay(branch) if even else "the ranks' speeds differ" for branch in bare.branches]
    able = [number for number, branch in enumerate(bare.branches) if branch.shared and not why_not[number]]
    if not able:
        return why_not
    able.sort(key=lambda number: bare.branches[number].segment_length, reverse=True)
    gathering = next((each for each in GATHERING if _has_room(_all_by(bare, each), memory_limit)), "ring")
    shares = [share_of(bare, branch) for branch in _all_by(bare, gathering).branches]
    times = [seconds(bare.sizes, shares)]
    for number in able:
        shares[number] = share_of(bare, replace(bare.branches[number], transport="all_to_all"))
        times.append(seconds(bare.sizes, shares))
    chosen = next(count for count, each in enumerate(times) if each <= (1 + SAME_TIME) * min(times))
    for count in range(chosen, len(able)):
        exchanged = f"{amount(times[count + 1] * 1e3)} ms where heads are exchanged"
        why_not[able[count]] = f"an estimate of {amount(times[chosen] * 1e3)} ms, {exchanged}"
    return why_not


def _why_heads_must_stay(branch: BranchPlan) -> str:
    # Why the heads of a branch cannot be exchanged evenly; empty if they can.
    heads = len(branch.kv_heads)
    for segment in branch.shared:
        if heads % len(segment.ranks):
            return f"{len(segment.ranks)} ranks do not divide {heads} KV heads"
    return ""


def _all_by(bare: RingPlan, transport: str) -> RingPlan:
    branches = (replace(branch, transport=transport) if branch.shared else branch for branch in bare.branches)
    return replace(bare, branches=tuple(branches))


def _bytes_alone(bare: RingPlan, branch: BranchPlan, transport: str) -> int:
    alone = replace(bare, branches=(replace(branch, transport=transport),))
    return max(map(max, traffic(alone, "forward")))


def _with_transports(bare: RingPlan, transports: list[str], reasons: list[str]) -> RingPlan:
    branches = tuple(
        replace(branch, transport=transport, reason=reason, bytes_forward=_bytes_alone(bare, branch, transport))
        if branch.shared
        else branch
        for branch, transport, reason in zip(bare.branches, transports, reasons, strict=True)
    )
    return replace(bare, branches=branches)


def _has_room(plan: RingPlan, memory_limit: int | None) -> bool:
    if memory_limit is not None:
        return max(max(cost.memory_forward, cost.memory_backward) for cost in plan.ranks) <= memory_limit
    at_once = replace(plan, branches=tuple(branch for branch in plan.branches if branch.transport == "all_gather"))
    _, received = traffic(at_once, "forward")
    kv_row, _ = plan.sizes.on_wire("all_gather", "forward")
    return max(received) <= kv_row * plan.sizes.kv_heads * max(plan.shard_lengths)
