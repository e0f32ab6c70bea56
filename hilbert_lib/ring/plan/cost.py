"""A plan as data, and what it costs a rank: bytes on the wire, bytes of memory, FLOP."""

from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import accumulate, groupby, product

import torch

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.balance import pairs_before
from hilbert_lib.ring.plan.rows import Message, common_heads
from hilbert_lib.ring.plan.segments import BranchPlan, messages_for

TRANSPORTS = ("ring", "all_gather", "all_to_all")


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


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What `plan_ring` found; `print` shows it as a table. The first fields are what it was asked."""

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]
    sizes: Sizes
    dtype: torch.dtype
    is_causal: bool
    branches: tuple[BranchPlan, ...]
    speeds: tuple[float, ...] | None = None  # relative speeds of the ranks, where weights were given

    @property
    def starts(self) -> tuple[int, ...]:
        """The first position of each rank."""
        return (0, *accumulate(self.shard_lengths[:-1]))

    @cached_property
    def messages(self) -> dict[str, dict[tuple[int, int], Message]]:
        """For each transport in use, by (source, destination): one message with the rows of all its branches.

        In step t of the ring, rank a sends to (a + t) mod p and receives from (a - t) mod p, where there is a message.
        By "all_to_all" a rank also has a message to itself: its own rows of the heads that it computes.
        """
        used = {branch.transport for branch in self.branches}
        return {
            transport: messages_for([b for b in self.branches if b.transport == transport], transport, self.is_causal)
            for transport in TRANSPORTS
            if transport in used
        }

    @cached_property
    def ranks(self) -> tuple[RankCost, ...]:
        """What the plan costs each rank."""
        ranks = range(len(self.shard_lengths))
        wire, held = [], []
        for direction in ("forward", "backward"):
            wire += traffic(self, direction)
            held.append([_memory(self, rank, direction) for rank in ranks])
        queries = self.sizes.batch * self.sizes.heads // self.sizes.kv_heads
        products = [2 * queries * self.sizes.head_dim * _pairs(self, rank) for rank in ranks]
        flop = [[count * each for each in products] for count in (2, 5)]  # products of matrices forward, and backward
        return tuple(map(RankCost, *wire, *held, *flop))

    def __str__(self) -> str:
        sizes = self.sizes
        title = (
            f"{sum(self.shard_lengths):,} tokens on {len(self.shard_lengths)} ranks, batch {sizes.batch}, "
            f"{sizes.heads} heads, {sizes.kv_heads} KV heads, head_dim {sizes.head_dim}, "
            f"{str(self.dtype).removeprefix('torch.')}, {'causal' if self.is_causal else 'not causal'}"
        )
        return "\n\n".join([title, _branch_table(self), _rank_table(self)])


def traffic(plan: RingPlan, direction: str) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends, and that each receives."""
    sent, received = ([0] * len(plan.shard_lengths) for _ in range(2))
    for transport, between in plan.messages.items():
        there, back = plan.sizes.on_wire(transport, direction)
        if direction == "forward":
            there += plan.sizes.batch * plan.sizes.padding
        for (source, destination), message in between.items():
            if source != destination:
                sent[source] += there * message.size
                sent[destination] += back * message.size
                received[destination] += there * message.size
                received[source] += back * message.size
    return sent, received


def _memory(plan: RingPlan, rank: int, direction: str) -> int:
    # Bytes at the highest point. Several results are added up for the rows of shared segments.
    sizes, segments = plan.sizes, [segment for branch in plan.branches for segment in branch.shared]
    shared = sum(rows.size for segment in segments for rows in segment.rows.get(rank, ()))
    queries = sizes.heads // sizes.kv_heads
    rows = plan.shard_lengths[rank] * sizes.kv_heads
    if direction == "forward":  # q, k, v, out, lse; the sums of out and lse
        one_row = (2 * queries + 2) * sizes.head_dim * sizes.element + queries * sizes.sum
        one_shared = queries * (sizes.head_dim + 1) * sizes.sum
    else:  # q, k, v, out, dout, lse, delta, dq, dk, dv; the sums of dq, dk and dv
        one_row = (4 * queries + 4) * sizes.head_dim * sizes.element + 2 * queries * sizes.sum
        one_shared = (queries + 2) * sizes.head_dim * sizes.sum
    total = sizes.batch * (rows * one_row + min(shared, rows) * one_shared)
    for transport, between in plan.messages.items():
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


def _pairs(plan: RingPlan, rank: int) -> int:
    # (query, key) pairs that a rank computes, for one sequence and one query head of each KV head.
    start, length, total = plan.starts[rank], sum(plan.shard_lengths), 0
    for branch in plan.branches:
        computed = [(range(start, start + plan.shard_lengths[rank]), branch.kv_heads)]
        if branch.transport == "all_to_all":
            computed = [(branch.local[rank], branch.kv_heads)]
            some = [segment for segment in branch.shared if rank in segment.ranks]
            computed += [(range(segment.start, segment.stop), segment.computed[rank]) for segment in some]
        for (queries, kv_heads), (offset, heads) in product(computed, branch.groups.items()):
            before, upto = (
                pairs_before(stop, length, branch.dilation_rate, offset, branch.segment_length, plan.is_causal)
                for stop in (queries.start, queries.stop)
            )
            total += len(common_heads(heads, kv_heads)) * (upto - before)
    return total


def _branch_table(plan: RingPlan) -> str:
    titles = ("branch", "segment_length", "dilation_rate", "ranks a segment", "MB a rank", "transport", "why")
    rows = []
    for number, branch in enumerate(plan.branches):
        most = max((len(segment.ranks) for segment in branch.shared), default=1)
        megabytes = amount(branch.bytes_forward / 1e6)
        shape = f"{branch.segment_length:,}", f"{branch.dilation_rate:,}"
        rows.append((str(number), *shape, str(most), megabytes, branch.transport, branch.reason))
    return _aligned(titles, rows, words=2)


def _rank_table(plan: RingPlan) -> str:
    titles = ("rank", "tokens", "MB sent", "received", "backward: sent", "received")
    titles += ("GB of memory", "backward", "TFLOP", "backward")
    units = (1e6,) * 4 + (1e9,) * 2 + (1e12,) * 2  # of the fields of a `RankCost`
    if plan.speeds:
        titles += ("time to the mean",)
        flop_at_speed_1 = sum(cost.flop_forward for cost in plan.ranks) / sum(plan.speeds) or 1
    lines = []
    for rank, (length, cost) in enumerate(zip(plan.shard_lengths, plan.ranks, strict=True)):
        line = [f"{length:,}", *(amount(each / unit) for each, unit in zip(astuple(cost), units, strict=True))]
        if plan.speeds:
            line.append(f"{cost.flop_forward / plan.speeds[rank] / flop_at_speed_1:.0%}")
        lines.append(line)
    rows = []
    for line, alike in groupby(range(len(lines)), key=lines.__getitem__):
        first, *others = alike
        rows.append((f"{first}-{others[-1]}" if others else str(first), *line))
    return _aligned(titles, rows)


def amount(value: float) -> str:
    """A number in three digits, for people."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _aligned(titles: tuple[str, ...], rows: list[tuple[str, ...]], words: int = 0) -> str:
    # Numbers to the right; the last columns are words.
    sides = ">" * (len(titles) - words) + "<" * words
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
