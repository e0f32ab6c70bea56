"""What a plan costs a rank: bytes on the wire, bytes of memory, FLOP."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product

from hilbert_lib.ring.plan.balance import pairs_before
from hilbert_lib.ring.plan.rows import Message, common_heads
from hilbert_lib.ring.plan.segments import BranchPlan

Messages = dict[tuple[int, int], Message]  # by (source, destination)


@dataclass(frozen=True)
class RankCost:
    """What a plan costs one rank."""

    # Bytes of rows that cross between ranks, without a call's header and the seed of dropout.
    sent_forward: int
    received_forward: int
    sent_backward: int
    received_backward: int
    # Bytes of the call's tensors and of the exchange's buffers at the highest point, without what a backend takes for
    # itself, and without the copies that a block of rows is computed from.
    memory_forward: int
    memory_backward: int
    # Useful FLOP, counted as in `DilatedPattern.work`.
    flop_forward: int
    flop_backward: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call's tensors."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    element: int  # bytes of an element of q, k, v and out
    sum: int  # bytes of an element of lse, delta, merged results and gradients
    padding: int = 0  # bytes that say whether a row is padded: they come with the rows of a forward, and are kept

    def on_wire(self, transport: str, direction: str) -> tuple[int, int]:
        """Bytes for each (position, KV head) of a message: on its way, and of the answer that goes back.

        Gathering: k and v; no answer. In its backward k and v again; the answer is dk and dv, in float32.
        All-to-all: q, k and v; out and lse. In its backward, for which q, k and v were kept, dout, lse and
        delta = rowsum(dout * out); dq, dk and dv, in float32. A KV head brings its group of query heads.
        """
        queries = self.heads // self.kv_heads
        row, sums = self.head_dim * self.element, self.head_dim * self.sum
        there, back = {
            ("gathering", "forward"): (2 * row, 0),
            ("gathering", "backward"): (2 * row, 2 * sums),
            ("all_to_all", "forward"): ((queries + 2) * row, queries * (row + self.sum)),
            ("all_to_all", "backward"): (queries * (row + 2 * self.sum), (queries + 2) * sums),
        }["all_to_all" if transport == "all_to_all" else "gathering", direction]
        return self.batch * there, self.batch * back

    def kv_bytes(self, length: int) -> int:
        """Bytes of k and v of so many tokens."""
        return 2 * self.batch * length * self.kv_heads * self.head_dim * self.element


def traffic(messages: dict[str, Messages], direction: str, sizes: Sizes, ranks: int) -> list[list[int]]:
    """Bytes that each rank sends, and that each receives, by messages of some transports."""
    sent, received = [0] * ranks, [0] * ranks
    for transport, between in messages.items():
        there, back = sizes.on_wire(transport, direction)
        if direction == "forward":
            there += sizes.batch * sizes.padding
        for (source, destination), message in between.items():
            if source != destination:
                sent[source] += there * message.size
                sent[destination] += back * message.size
                received[destination] += there * message.size
                received[source] += back * message.size
    return [sent, received]


def costs(
    branches: tuple[BranchPlan, ...],
    messages: dict[str, Messages],
    shard_lengths: tuple[int, ...],
    sizes: Sizes,
    is_causal: bool,
) -> tuple[RankCost, ...]:
    """What a plan, with these messages by transport, costs each rank."""
    wire, held = [], []
    shared = [_shared_rows(branches, rank) for rank in range(len(shard_lengths))]
    for direction in ("forward", "backward"):
        wire += traffic(messages, direction, sizes, len(shard_lengths))
        by_rank = enumerate(zip(shard_lengths, shared, strict=True))
        held.append([_memory(rank, *rows, messages, sizes, direction) for rank, rows in by_rank])
    queries = sizes.batch * sizes.heads // sizes.kv_heads
    products = [2 * queries * sizes.head_dim * each for each in _pairs(branches, shard_lengths, is_causal)]
    flop = [[count * each for each in products] for count in (2, 5)]  # products of matrices forward, and backward
    return tuple(map(RankCost, *wire, *held, *flop))


def _memory(rank: int, length: int, shared: int, messages: dict[str, Messages], sizes: Sizes, direction: str) -> int:
    # Bytes at the highest point, of a shard of so many tokens with so many rows in shared segments, where several
    # results are added up.
    queries = sizes.heads // sizes.kv_heads
    rows = length * sizes.kv_heads
    if direction == "forward":  # q, k, v, out, lse; the sums of out and lse
        one_row = (2 * queries + 2) * sizes.head_dim * sizes.element + queries * sizes.sum
        one_shared = queries * (sizes.head_dim + 1) * sizes.sum
    else:  # q, k, v, out, dout, lse, delta, dq, dk, dv; the sums of dq, dk and dv
        one_row = (4 * queries + 4) * sizes.head_dim * sizes.element + 2 * queries * sizes.sum
        one_shared = (queries + 2) * sizes.head_dim * sizes.sum
    total = sizes.batch * (rows * one_row + min(shared, rows) * one_shared)
    for transport, between in messages.items():
        there, back = sizes.on_wire(transport, direction)
        out = [message.size for (source, _), message in between.items() if source == rank]
        into = [message.size for (_, destination), message in between.items() if destination == rank]
        if transport == "ring":  # one buffer is filled while the other is read
            total += (there + back) * sum(min(2, len(some)) * max(some, default=0) for some in (out, into))
        else:
            total += (there + back) * (sum(out) + sum(into))
        total += sizes.batch * sizes.padding * (sum(into) + (sum(out) if direction == "forward" else 0))
        if transport == "all_to_all" and direction == "backward":  # the exchanged q, k and v, kept
            total += sizes.on_wire(transport, "forward")[0] * sum(into)
    return total


def _shared_rows(branches: tuple[BranchPlan, ...], rank: int) -> int:
    held = (rows for branch in branches for segment in branch.shared for rows in segment.rows.get(rank, ()))
    return sum(rows.size for rows in held)


def _pairs(branches: tuple[BranchPlan, ...], shard_lengths: tuple[int, ...], is_causal: bool) -> list[int]:
    # (query, key) pairs that each rank computes, for one sequence and one query head of each KV head.
    ends = tuple(accumulate(shard_lengths))
    totals = [0] * len(ends)
    for branch, (rank, end) in product(branches, enumerate(ends)):
        for positions, kv_heads in _computed(branch, rank, range(end - shard_lengths[rank], end)):
            for offset, heads in branch.groups.items():
                before, upto = (
                    pairs_before(stop, ends[-1], branch.dilation_rate, offset, branch.segment_length, is_causal)
                    for stop in (positions.start, positions.stop)
                )
                totals[rank] += len(common_heads(heads, kv_heads)) * (upto - before)
    return totals


def _computed(branch: BranchPlan, rank: int, shard: range) -> Iterator[tuple[range, range]]:
    # The queries that a rank computes, with their KV heads.
    if branch.transport != "all_to_all":
        yield shard, branch.kv_heads
        return
    yield branch.local[rank], branch.kv_heads
    for segment in branch.shared:
        if rank in segment.ranks:
            yield range(segment.start, segment.stop), segment.computed[rank]
