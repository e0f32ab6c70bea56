"""The estimated time of a plan: attention, the part of the exchange that does not hide under it, and the host's part.

All ranks must choose alike, so the rates are those of one machine, whatever machine a rank runs on. They were measured
on H200s, over NVLink by NCCL, in bfloat16, back to back (reports/HISTORY.md, "The ring").
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hilbert_lib.ring.plan.cost import PRODUCTS, RingPlan, Sizes, pairs_of_rank, traffic
from hilbert_lib.ring.plan.segments import BranchPlan

DIRECTIONS = "forward", "backward"

# Useful FLOP/s of the fused kernels by head_dim: forward, backward. Other dtypes are slower, and hide more.
KERNEL_RATES = {64: (434e12, 433e12), 128: (600e12, 481e12), 256: (213e12, 166e12)}
# Seconds of messages by bytes: a hop of 1 MB, send and receive of 16 and of 64 MB, an all-to-all of 1 GB.
MESSAGES = ((1e6, 140e-6), (16e6, 225e-6), (64e6, 800e-6), (1e9, 3.06e-3))
# Seconds of the host: a forward and backward without an exchange, and each collective of one, with its merges and small
# kernels. By the record of four H200s 2.1 ms, and 10.7 ms with seven collectives.
HOST_OF_CALL = 2.1e-3
HOST_OF_COLLECTIVE = 1.2e-3


class Share(NamedTuple):
    """The work that a branch adds to each rank."""

    transport: str  # or "local"
    pairs: tuple[int, ...]  # of queries and keys
    own_pairs: tuple[int, ...]  # those for which no row of another rank must come first
    carried: tuple[tuple[int, ...], ...]  # bytes, forward and backward: those sent or those received, whichever is more


def share_of(plan: RingPlan, branch: BranchPlan) -> Share:
    """The share of one branch. Rows that other branches send too are counted."""
    alone = replace(plan, branches=(branch,))
    pairs, own_pairs = (
        tuple(pairs_of_rank(alone, rank, only_own_keys=only_own_keys) for rank in range(len(plan.shard_lengths)))
        for only_own_keys in (False, True)
    )
    carried = tuple(tuple(map(max, *traffic(alone, direction))) for direction in DIRECTIONS)
    return Share(branch.transport, pairs, own_pairs, carried)


def seconds(sizes: Sizes, shares: Sequence[Share]) -> float:
    """The time of a forward and backward on the slowest rank.

    An exchange costs nothing while a rank attends to keys of its own, and a host costs nothing while its GPU works.
    """
    ranks, total = len(shares[0].pairs), 0.0
    for number, rate in enumerate(_rates(sizes.head_dim)):
        seconds_of_pair = 2 * PRODUCTS[number] * sizes.batch * sizes.group * sizes.head_dim / rate
        on_gpu = []
        for rank in range(ranks):
            pairs = sum(share.pairs[rank] for share in shares)
            own_pairs = sum(share.own_pairs[rank] for share in shares)
            carried = sum(share.carried[number][rank] for share in shares)
            exposed = max(0.0, message_seconds(carried) - own_pairs * seconds_of_pair)
            on_gpu.append(pairs * seconds_of_pair + exposed)
        called = collectives(sizes, {share.transport for share in shares}, ranks, DIRECTIONS[number])
        total += max(*on_gpu, HOST_OF_CALL / len(DIRECTIONS) + HOST_OF_COLLECTIVE * called)
    return total


def message_seconds(count: int) -> float:
    """The time in which so many bytes travel, by straight lines between `MESSAGES`.

    >>> message_seconds(0), message_seconds(1_000_000), message_seconds(16_000_000)
    (0.0, 0.00014, 0.000225)
    """
    least, shortest = MESSAGES[0]
    if count <= least:
        return shortest if count else 0.0
    for (start, before), (end, after) in pairwise(MESSAGES):
        if count <= end:
            return before + (count - start) / (end - start) * (after - before)
    return count / end * after


def collectives(sizes: Sizes, transports: Collection[str], ranks: int, direction: str) -> int:
    """The number of collective calls, or of steps round the ring, of some transports; an answer is one of its own."""
    count = 0
    for transport in transports:
        if transport != "local":
            has_answer = sizes.on_wire(transport, direction)[1] > 0
            count += (ranks - 1 if transport == "ring" else 1) * (1 + has_answer)
    return count


def _rates(head_dim: int) -> tuple[float, float]:
    # Kernels pad a head to the next of these sizes.
    padded = min(size for size in KERNEL_RATES if size >= head_dim)
    forward, backward = KERNEL_RATES[padded]
    return forward * head_dim / padded, backward * head_dim / padded
