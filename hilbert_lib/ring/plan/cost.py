"""What a plan costs a rank: bytes on the wire, bytes of memory, FLOP."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product

from hilbert_lib.ring.plan.balance import pairs_before
from hilbert_lib.ring.plan.rows import Message, common_heads
from hilbert_lib.ring.plan.segments import BranchPlan


@dataclass(frozen=True)
class RankCost:
    """Of one rank.

    Attributes:
        sent_forward, received_forward, sent_backward, received_backward: bytes of rows that cross between ranks; what
            ranks agree by (a call's header, the seed of dropout) is not in them.
        memory_forward, memory_backward: bytes of the call's tensors and of the exchange's buffers at the highest point;
            what a backend takes beside them is its own, and so are the copies that a block of rows is computed from.
        flop_forward, flop_backward: useful FLOP, counted as `DilatedPattern.work` does.
    """

    sent_forward: int
    received_forward: int
    sent_backward: int
    received_backward: int
    memory_forward: int
    memory_backward: int
    flop_forward: int
    flop_backward: int


@dataclass(frozen=True)
class Sizes:
    """What the tensors are made of.

    Attributes:
        batch, heads, kv_heads, head_dim: as in the call.
        element, sum: bytes of an element of q, k, v and out; and of lse, delta, merged results and gradients.
        padding: bytes that say of a row whether it is padded; they come with the rows of a forward, and are kept.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    element: int
    sum: int
    padding: int = 0

    def on_wire(self, transport: str, direction: str) -> tuple[int, int]:
        """Bytes for each (position, KV head) of a message: on its way, and of the answer that goes back.

        Gathering: k and v; no answer. In its backward k and v again; the answer is dk and dv, in float32.
        All-to-all: q, k and v; out and lse. In its backward, where the exchanged q, k and v were kept, dout, lse and
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


def traffic(messages: Iterable[Message], transport: str, direction: str, sizes: Sizes, ranks: int) -> list[list[int]]:
    """Bytes that each rank sends, and that each receives."""
    there, back = sizes.on_wire(transport, direction)
    if direction == "forward":
        there += sizes.batch * sizes.padding
    sent, received = [0] * ranks, [0] * ranks
    for message in messages:
        if message.source != message.destination:
            for source, destination, row in (
                (message.source, message.destination, there),
                (message.destination, message.source, back),
            ):
                sent[source] += row * message.size
                received[destination] += row * message.size
    return [sent, received]


def memory(
    rank: int,
    length: int,
    shared: int,
    messages: dict[str, dict[tuple[int, int], Message]],
    sizes: Sizes,
    direction: str,
) -> int:
    """Bytes at the highest point of a forward or backward on a rank.

    Args:
        rank: which. length: tokens of its shard.
        shared: its pairs of a position and a KV head in shared segments, where several results are added up.
        messages: of the plan. sizes: of the tensors. direction: "forward" or "backward".
    """
    queries = sizes.heads // sizes.kv_heads
    rows = sizes.batch * length * sizes.kv_heads
    if direction == "forward":  # q, k, v, out, lse; the sums of out and lse
        one_row = (2 * queries + 2) * sizes.head_dim * sizes.element + queries * sizes.sum
        one_shared = queries * (sizes.head_dim + 1) * sizes.sum
    else:  # q, k, v, out, dout, lse, delta, dq, dk, dv; the sums of dq, dk and dv
        one_row = (4 * queries + 4) * sizes.head_dim * sizes.element + 2 * queries * sizes.sum
        one_shared = (queries + 2) * sizes.head_dim * sizes.sum
    total = rows * one_row + sizes.batch * shared * one_shared
    for transport, between in messages.items():
        there, back = sizes.on_wire(transport, direction)
        out = [message.size for (source, _), message in between.items() if source == rank]
        into = [message.size for (_, destination), message in between.items() if destination == rank]
        if transport == "ring":  # one being filled while the other is read
            total += (there + back) * sum(min(2, len(some)) * max(some, default=0) for some in (out, into))
        else:
            total += (there + back) * (sum(out) + sum(into))
        total += sizes.batch * sizes.padding * (sum(into) + (sum(out) if direction == "forward" else 0))
        if transport == "all_to_all" and direction == "backward":  # the exchanged q, k and v, kept
            total += sizes.on_wire(transport, "forward")[0] * sum(into)
    return total


def pairs(branches: tuple[BranchPlan, ...], shard_lengths: tuple[int, ...], is_causal: bool) -> list[int]:
    """(query, key) pairs that each rank computes, for one sequence and one query head of each KV head."""
    ends = tuple(accumulate(shard_lengths))
    totals = [0] * len(ends)
    for branch, (rank, end) in product(branches, enumerate(ends)):
        for positions, kv_heads in _computed(branch, rank, range(end - shard_lengths[rank], end)):
            for offset, heads in zip(branch.offsets, branch.kv_heads, strict=True):
                before, upto = (
                    pairs_before(stop, ends[-1], branch.dilation_rate, offset, branch.segment_length, is_causal)
                    for stop in (positions.start, positions.stop)
                )
                totals[rank] += len(common_heads(heads, kv_heads)) * (upto - before)
    return totals


def _computed(branch: BranchPlan, rank: int, shard: range) -> Iterator[tuple[range, range]]:
    # The queries that a rank computes, with their KV heads.
    every = range(max(heads.stop for heads in branch.kv_heads))
    if branch.transport != "all_to_all":
        yield shard, every
        return
    yield branch.local[rank], every
    for segment in branch.shared:
        if rank in segment.ranks:
            yield range(segment.start, segment.stop), segment.computed[rank]


def costs(
    branches: tuple[BranchPlan, ...],
    messages: dict[str, dict[tuple[int, int], Message]],
    shard_lengths: tuple[int, ...],
    sizes: Sizes,
    is_causal: bool,
) -> tuple[RankCost, ...]:
    """What a plan costs each rank."""
    ranks = range(len(shard_lengths))
    shared = [min(_shared_rows(branches, rank), shard_lengths[rank] * sizes.kv_heads) for rank in ranks]
    columns = {}
    for direction in ("forward", "backward"):
        wire = [traffic(some.values(), transport, direction, sizes, len(ranks)) for transport, some in messages.items()]
        for way, name in enumerate(("sent", "received")):
            columns[f"{name}_{direction}"] = [sum(one[way][rank] for one in wire) for rank in ranks]
        columns[f"memory_{direction}"] = [
            memory(rank, shard_lengths[rank], shared[rank], messages, sizes, direction) for rank in ranks
        ]
    queries = sizes.batch * sizes.heads // sizes.kv_heads
    products = [2 * queries * sizes.head_dim * each for each in pairs(branches, shard_lengths, is_causal)]
    columns["flop_forward"], columns["flop_backward"] = [2 * each for each in products], [5 * each for each in products]
    return tuple(RankCost(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))


def _shared_rows(branches: tuple[BranchPlan, ...], rank: int) -> int:
    held = (rows for branch in branches for segment in branch.shared for rows in segment.rows.get(rank, ()))
    return sum(rows.size for rows in held)
