"""A plan as data, and what it costs a rank: bytes on the wire, bytes of memory, FLOP."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np
import torch

from hilbert_lib.checks import boolean, integer
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.plan.balance import pairs_before
from hilbert_lib.ring.plan.rows import common_heads, rows_between
from hilbert_lib.ring.plan.segments import BranchPlan, Messages, SharedSegment

TRANSPORTS = ("ring", "all_gather", "all_to_all")
FEW_RANKS = 8  # that share a segment: below, arrays take longer than numbers one by one
PRODUCTS = 2, 5  # of matrices, in a forward and in a backward
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class RankCost:
    """The cost of a plan for one rank."""

    # Bytes of rows that cross between ranks, without a call's header and the seed of dropout.
    sent_forward: int
    received_forward: int
    sent_backward: int
    received_backward: int
    # Bytes at the highest point, as the fused kernels run it on Hopper without dropout: the call's tensors, the
    # exchange's buffers, the layout's index tensors, the rows that a block is computed from, and the kernels' sums in
    # float32. Layouts of earlier calls are kept too (`ring.attention`) and are not counted.
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
    ordered: bool = False  # whether k and v are read through an ordering, by kernels that sum more in float32

    @classmethod
    def checked(cls, batch, heads: int, kv_heads: int, head_dim, dtype, padded, ordered=False) -> "Sizes":
        """The sizes of a call that is planned; heads are checked already."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype!r}")
        return cls(
            batch=integer("batch", batch, least=1),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=integer("head_dim", head_dim, least=1, most=256),
            element=dtype.itemsize,
            sum=max(4, dtype.itemsize),
            padding=int(boolean("padded", padded)),
            ordered=boolean("ordered", ordered),
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def row(self) -> int:
        """Bytes of one head's row of q, k, v or out."""
        return self.head_dim * self.element

    @property
    def summed_row(self) -> int:
        """Bytes of one head's row of a sum."""
        return self.head_dim * self.sum

    def on_wire(self, transport: str, direction: str) -> tuple[int, int]:
        """Bytes for each (position, KV head) of a message: on its way, and of the answer that goes back.

        Gathering: k and v; no answer. In its backward k and v again; the answer is dk and dv, in float32.
        All-to-all: q, k and v; out and lse. In its backward, for which q, k and v were kept, dout, lse and
        delta = rowsum(dout * out); dq, dk and dv, in float32. A KV head brings its group of query heads.
        """
        queries, row, sums = self.group, self.row, self.summed_row
        row_bytes, answer_bytes = {
            ("gathering", "forward"): (2 * row, 0),
            ("gathering", "backward"): (2 * row, 2 * sums),
            ("all_to_all", "forward"): ((queries + 2) * row, queries * (row + self.sum)),
            ("all_to_all", "backward"): (queries * (row + 2 * self.sum), (queries + 2) * sums),
        }["all_to_all" if transport == "all_to_all" else "gathering", direction]
        return self.batch * row_bytes, self.batch * answer_bytes


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The plan that `plan_ring` made; `print` shows it as a table. Its first fields are the arguments."""

    pattern: DilatedPattern
    shard_lengths: tuple[int, ...]
    sizes: Sizes
    dtype: torch.dtype
    is_causal: bool
    branches: tuple[BranchPlan, ...]
    speeds: tuple[float, ...] | None = None  # relative speeds of the ranks, where weights were given
    # Sums of messages that were asked for. Plans that `replace` makes of this one share them: only transports differ.
    known_loads: dict[tuple, "Load"] = field(default_factory=dict, repr=False)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each rank."""
        return (0, *accumulate(self.shard_lengths[:-1]))

    @cached_property
    def length(self) -> int:
        """Tokens of all ranks."""
        return sum(self.shard_lengths)

    @cached_property
    def messages(self) -> dict[str, Messages]:
        """Messages by transport in use, then by (source, destination): each holds the rows of all its branches.

        In step t of the ring, rank a sends to (a + t) mod p and receives from (a - t) mod p, where there is a message.
        By "all_to_all" a rank also has a message to itself: its own rows of the heads that it computes.
        """
        used = {branch.transport for branch in self.branches}
        return {
            transport: Messages([b for b in self.branches if b.transport == transport], transport, self.is_causal)
            for transport in TRANSPORTS
            if transport in used
        }

    @cached_property
    def loads(self) -> dict[str, "Load"]:
        """By transport in use: how much each rank sends and receives."""
        return {transport: self._load(messages) for transport, messages in self.messages.items()}

    def _load(self, messages: Messages) -> "Load":
        # The rows are the same whether they are gathered at once or round the ring.
        rows = (messages.transport == "all_to_all", *(branch.rows_key for branch in messages.branches))
        if rows not in self.known_loads:
            self.known_loads[rows] = load_of(messages, len(self.shard_lengths))
        return self.known_loads[rows]

    @cached_property
    def ranks(self) -> tuple[RankCost, ...]:
        """The cost of the plan for each rank."""
        ranks = range(len(self.shard_lengths))
        wire, memory = [], []
        blocks = [_blocks_of_rank(self, rank) for rank in ranks]
        for direction in ("forward", "backward"):
            wire += traffic(self, direction)
            memory.append([_memory(self, rank, direction, blocks[rank]) for rank in ranks])
        queries = self.sizes.batch * self.sizes.group
        products = [2 * queries * self.sizes.head_dim * pairs_of_rank(self, rank) for rank in ranks]
        flop = [[count * flop_of_one for flop_of_one in products] for count in PRODUCTS]
        return tuple(map(RankCost, *wire, *memory, *flop))

    def fused(self, rank: int) -> tuple[int, ...]:
        """The branches whose segments, counted from a rank's first position, are as in the sequence: one call."""
        aligned = tuple(number for number in range(len(self.branches)) if self._is_aligned(number, rank))
        rules = self.pattern.offsets, self.pattern.mixing
        # These rules depend on the number of the branch: a pattern of fewer branches would mean other rows.
        if len(aligned) < len(self.branches) and ("branch" in rules or "head_groups" in rules):
            return ()
        return aligned

    def _is_aligned(self, number: int, rank: int) -> bool:
        branch = self.branches[number]
        if branch.transport == "all_to_all" and branch.shared_by(rank):
            return False
        before = self.starts[rank] % branch.segment_length
        inside_one = before + self.shard_lengths[rank] <= branch.segment_length
        return before == 0 or (inside_one and before % branch.dilation_rate == 0)

    def __str__(self) -> str:
        sizes = self.sizes
        title = (
            f"{sum(self.shard_lengths):,} tokens on {len(self.shard_lengths)} ranks, batch {sizes.batch}, "
            f"{sizes.heads} heads, {sizes.kv_heads} KV heads, head_dim {sizes.head_dim}, "
            f"{str(self.dtype).removeprefix('torch.')}, {'causal' if self.is_causal else 'not causal'}"
        )
        return "\n\n".join([title, _branch_table(self), _rank_table(self)])


@dataclass(frozen=True, eq=False)
class Load:
    """The messages of one transport, summed up for each rank: (position, KV head) pairs and messages, int64 [ranks]."""

    sent: np.ndarray
    received: np.ndarray
    to_itself: np.ndarray  # neither sent nor received
    largest_sent: np.ndarray
    largest_received: np.ndarray
    messages_sent: np.ndarray
    messages_received: np.ndarray
    is_far: np.ndarray  # bool: whether a message comes from another rank than the one before


def load_of(messages: Messages, ranks: int) -> Load:
    """The messages of a transport, summed up for each rank. ranks: how many there are."""
    sent, received, to_itself, largest_sent, largest_received, messages_sent, messages_received = np.zeros(
        (7, ranks), dtype=np.int64
    )
    is_far = np.zeros(ranks, dtype=bool)
    for source in messages.sources:
        for destinations, message in messages.from_rank(source):
            size = message.size
            if destinations[0] == source:  # by all-to-all, where each destination has a message of its own
                to_itself[source] += size
                continue
            received[destinations] += size
            largest_received[destinations] = np.maximum(largest_received[destinations], size)
            messages_received[destinations] += 1
            is_far[destinations] |= (destinations - source) % ranks > 1
            sent[source] += size * len(destinations)
            largest_sent[source] = max(largest_sent[source], size)
            messages_sent[source] += len(destinations)
    return Load(sent, received, to_itself, largest_sent, largest_received, messages_sent, messages_received, is_far)


def traffic(plan: RingPlan, direction: str) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends, and that each receives."""
    sent, received = np.zeros((2, len(plan.shard_lengths)), dtype=np.int64)
    for transport, load in plan.loads.items():
        row_bytes, answer_bytes = plan.sizes.on_wire(transport, direction)
        if direction == "forward":
            row_bytes += plan.sizes.batch * plan.sizes.padding
        sent += row_bytes * load.sent + answer_bytes * load.received
        received += row_bytes * load.received + answer_bytes * load.sent
    return sent.tolist(), received.tolist()


# The memory of `ring.rank.passes` in the course of a forward or backward. A change of its order is a change here:
#
#     step of passes             held beside the call's tensors             counted by
#     _fused_forward/_backward   sums of the kernels' passes                one_fused
#     _beside_forward/_backward  sums of the touched rows, to the end:      one_touched
#       _start_gathers, exchange   rows being packed for other ranks        _exchange_bytes()[0]
#       blocks.merge_block, ...    rows on their way, one block's copies    _exchange_bytes()[1], _Block.memory
#       answer.wait, merge, add    answers, and the rows that add them up   _exchange_bytes()[2], _Block.copies
#
# The peak of a rank is its call's tensors and index tables, and the larger of the fused call and the steps beside it.


def _memory(plan: RingPlan, rank: int, direction: str, blocks: list["_Block"]) -> int:
    # Bytes at the highest point of the table above.
    sizes, group, fused = plan.sizes, plan.sizes.group, plan.fused(rank)
    rows = plan.shard_lengths[rank] * sizes.kv_heads
    # Plain kernels serve what the warp-specialised ones do not. Where they take several passes, these keep sums.
    is_plain = len(fused) > 1 and (sizes.ordered or sizes.element > 2)
    if direction == "forward":  # q, k, v, out, lse; the sums of out and lse
        one_row = (2 * group + 2) * sizes.row + group * sizes.sum
        one_touched = group * (sizes.summed_row + sizes.sum)
        one_fused = one_touched if is_plain else 0
    else:  # q, k, v, out, dout, lse, delta, dq, dk, dv; the sums of dq, dk and dv
        one_row = (4 * group + 4) * sizes.row + 2 * group * sizes.sum
        one_touched = (group + 2) * sizes.summed_row
        one_fused = one_touched if is_plain else group * sizes.summed_row
    shared = (segment for branch in plan.branches for segment in branch.shared_by(rank))
    touched = sum(rows.size for segment in shared for rows in segment.rows[rank])
    touched += sum(block.queries for block in blocks if block.is_local)
    touched = min(touched, rows)
    exchanges = [_exchange_bytes(plan, rank, direction, transport) for transport in plan.messages]
    at_packing, at_work, at_answers = map(sum, zip((0, 0, 0), *exchanges, strict=True))
    at_work += max((_most(block.memory(sizes, direction)) for block in blocks), default=0)
    if direction == "backward":  # the queries of the last block
        at_answers += max((_most(block.copies(sizes)) for block in blocks), default=0)
    beside = max(at_packing, sizes.batch * touched * one_touched + max(at_work, at_answers))
    at_once = max(sizes.batch * rows * one_fused if fused else 0, beside)
    return sizes.batch * rows * one_row + at_once + _tables(plan, rank, blocks, touched)


@dataclass(frozen=True)
class _Block:
    # Rows of a `rank.layout.Block`: (position, KV head) pairs. Round a ring: of several blocks, int64 [blocks].
    queries: int | np.ndarray
    keys: int | np.ndarray
    is_local: bool = False  # of segments inside the shard

    @property
    def rows(self) -> int:
        """Rows of queries and of keys."""
        rows = self.queries + self.keys
        return rows if isinstance(rows, int) else int(rows.sum())

    def copies(self, sizes: Sizes) -> int:
        """Bytes of dout, q, out and lse of its queries."""
        return sizes.batch * self.queries * sizes.group * (3 * sizes.row + sizes.sum)

    def memory(self, sizes: Sizes, direction: str) -> int:
        """Bytes of the copies that it is computed from, of its results, and of what adds these up."""
        queries, keys = sizes.batch * self.queries * sizes.group, sizes.batch * self.keys * 2 * sizes.row
        if direction == "forward":  # q, out and lse; k and v
            return queries * (2 * sizes.row + sizes.sum) + keys
        # dq and delta; k, v, dk and dv; the sums of dq
        results = queries * (sizes.row + sizes.sum) + 2 * keys
        return self.copies(sizes) + results + queries * sizes.summed_row


def _most(numbers: int | np.ndarray) -> int:
    return numbers if isinstance(numbers, int) else int(numbers.max())


def _blocks_of_rank(plan: RingPlan, rank: int) -> list[_Block]:
    fused = plan.fused(rank)
    return [block for number in range(len(plan.branches)) for block in _blocks(plan, rank, number, number in fused)]


def _blocks(plan: RingPlan, rank: int, number: int, is_fused: bool) -> Iterator[_Block]:
    # The blocks of a branch that a rank computes beside its fused call, as `rank.layout` cuts them.
    branch, padding = plan.branches[number], plan.sizes.padding
    inside, w = branch.local[rank], branch.segment_length
    full_segments = len(inside) // w
    for segments, first in () if is_fused else ((full_segments, inside[:w]), (1, inside[full_segments * w :])):
        groups = (
            rows_between(first, first.start, branch.dilation_rate, *offset_heads)
            for offset_heads in branch.groups.items()
        )
        alike = [(segments * rows.size, segments * rows.size, rows.count) for rows in groups]
        yield from (replace(block, is_local=True) for block in _together(alike, padding))
    for segment in branch.shared_by(rank):
        own_rows = segment.rows[rank]
        if branch.transport == "all_to_all":
            heads = [len(common_heads(rows.kv_heads, segment.computed[rank])) for rows in own_rows]
            counts = segment.counts_before[-1].tolist()
            pairs = [(count * n, count * n, count) for count, n in zip(counts, heads, strict=True)]
            yield from _together(pairs, padding)
            continue
        if not is_fused:
            yield from _together([(rows.size, rows.size, rows.count) for rows in own_rows], padding)
        if branch.transport == "ring" and len(segment.ranks) > FEW_RANKS:
            yield from _ring_blocks(segment, rank, padding, plan.is_causal)
            continue
        if branch.transport == "ring":
            for source in segment.ranks:
                if source < rank if plan.is_causal else source != rank:
                    their_rows = segment.rows[source]
                    pairs = [
                        (mine.size, rows.size, (mine.count, rows.count))
                        for mine, rows in zip(own_rows, their_rows, strict=True)
                    ]
                    yield from _together(pairs, padding)
            continue
        place = segment.place[rank]
        before, own, every = segment.counts_before[place], segment.counts[place], segment.counts_before[-1]
        arriving = (before if plan.is_causal else every - own).tolist()
        pairs = [
            (rows.size, count * len(rows.kv_heads), (rows.count, count))
            for rows, count in zip(own_rows, arriving, strict=True)
        ]
        yield from _together(pairs, padding)


def _ring_blocks(segment: SharedSegment, rank: int, padding: int, is_causal: bool) -> Iterator[_Block]:
    # The blocks of a rank's queries and the rows of each other rank, joined as by `_together`, for all ranks at once.
    place, heads = segment.place[rank], np.array([len(rows.kv_heads) for rows in segment.rows[rank]])
    queries = segment.counts[place]  # [groups]
    keys = segment.counts[:place] if is_causal else np.delete(segment.counts, place, axis=0)  # [sources, groups]
    if padding:
        has_pairs = (queries > 0) & (keys > 0)
        if has_pairs.any():
            yield _Block(np.broadcast_to(queries * heads, keys.shape)[has_pairs], (keys * heads)[has_pairs])
        return
    if not len(keys):
        return
    # Numbers of positions of one dilation rate at consecutive positions differ by one at most.
    fewest_keys = keys.min(axis=1)
    for count in {*queries.tolist()} - {0}:
        heads_of_count = heads * (queries == count)
        for key_count in (fewest_keys, fewest_keys + 1):
            joined = (keys == key_count[:, None]) @ heads_of_count  # KV heads [sources]
            has_pairs = joined * key_count > 0
            if has_pairs.any():
                yield _Block((joined * count)[has_pairs], (joined * key_count)[has_pairs])


def _together(pairs: list[tuple], padding: int) -> Iterator[_Block]:
    # One block of all groups of equal sizes, unless a padding mask differs between them.
    alike: dict[tuple, tuple[int, int]] = {}
    for group, (queries, keys, size) in enumerate(pairs):
        if queries and keys:
            key = size, group if padding else 0
            before = alike.get(key, (0, 0))
            alike[key] = before[0] + queries, before[1] + keys
    return (_Block(*sizes) for sizes in alike.values())


def _exchange_bytes(plan: RingPlan, rank: int, direction: str, transport: str) -> tuple[int, int, int]:
    # Bytes of an exchange: while its rows are packed, while a block is computed, and while answers are added up.
    sizes, load = plan.sizes, plan.loads[transport]
    row_bytes, answer_bytes = sizes.on_wire(transport, direction)
    if transport == "ring":
        return _ring_bytes(plan, rank, direction)
    to_itself = int(load.to_itself[rank])
    out, into = to_itself + int(load.sent[rank]), to_itself + int(load.received[rank])
    buffers = row_bytes * (out + into) + _padding(sizes, direction, out, into)
    if transport == "all_gather":  # answers, and a copy of those that are added up at once: no row comes twice
        copy = min(out, plan.shard_lengths[rank] * sizes.kv_heads)
        return 2 * row_bytes * out, buffers + answer_bytes * into, buffers + answer_bytes * (into + out + copy)
    row, queries = sizes.batch * sizes.row, sizes.group
    if direction == "forward":  # the sums of out and lse, which are rounded into the answer
        sums = sizes.batch * queries * (sizes.summed_row + sizes.sum) * into
        answers = answer_bytes * (into + out) + max(sums, answer_bytes * out)
        return 2 * row_bytes * out, buffers + sums, buffers + answers
    # The exchanged q, k and v are kept; so is the own out that delta is of. `product` stands for the others'.
    buffers += sizes.on_wire(transport, "forward")[0] * into + queries * row * out + answer_bytes * into
    product, copy = queries * row * into, sizes.batch * max(queries, 2) * sizes.summed_row * out
    return 2 * row_bytes * out, buffers + product, buffers + answer_bytes * out + max(product, copy)


def _ring_bytes(plan: RingPlan, rank: int, direction: str) -> tuple[int, int, int]:
    # One buffer is filled while the other is read.
    sizes, load = plan.sizes, plan.loads["ring"]
    row_bytes, answer_bytes = sizes.on_wire("ring", direction)
    most_out, most_into = int(load.largest_sent[rank]), int(load.largest_received[rank])
    sent = int(load.messages_sent[rank])
    both_out, both_into = most_out * min(2, sent), most_into * min(2, int(load.messages_received[rank]))
    buffers = (row_bytes + answer_bytes) * both_into + _padding(sizes, direction, both_out, both_into)
    # Answers to the rows of one step travel while the next is computed.
    travelling = answer_bytes * both_out if load.is_far[rank] else 0
    packing = row_bytes * most_out * (min(3, sent) + 1)  # k, v and both, while the two steps before are held
    answers = row_bytes * both_out + answer_bytes * (both_out + most_out)
    return 0, buffers + row_bytes * both_out + travelling, buffers + max(packing, answers)


def _padding(sizes: Sizes, direction: str, out: int, into: int) -> int:
    # Bytes that say which rows are padded: those received are kept.
    return sizes.batch * sizes.padding * (into + (out if direction == "forward" else 0))


def _tables(plan: RingPlan, rank: int, blocks: list[_Block], touched: int) -> int:
    # Bytes of index tensors on the device: int64 but for the slots that kernels read, int32.
    sent = sum(int(load.sent[rank] + load.to_itself[rank]) for load in plan.loads.values())
    ordering = plan.shard_lengths[rank] * (8 + 8 + 4) if plan.sizes.ordered else 0
    return 8 * ((2 + plan.sizes.ordered) * touched + 3 * sent + sum(block.rows for block in blocks)) + ordering


def pairs_of_rank(plan: RingPlan, rank: int, *, only_own_keys: bool = False) -> int:
    """(query, key) pairs that a rank computes, for one sequence and one query head of each KV head.

    only_own_keys: without those for which rows of other ranks must come first.
    """
    total = 0
    for branch in plan.branches:
        computed = [(branch.local[rank], branch.kv_heads)]
        shared = branch.shared_by(rank)
        if branch.transport == "all_to_all":
            if not only_own_keys:
                computed += [(range(segment.start, segment.stop), segment.computed[rank]) for segment in shared]
        elif only_own_keys:
            for rows in (rows for segment in shared for rows in segment.rows[rank]):
                keys_seen = rows.count * (rows.count + 1) // 2 if plan.is_causal else rows.count**2
                total += len(rows.kv_heads) * keys_seen
        else:
            start = plan.starts[rank]
            computed = [(range(start, start + plan.shard_lengths[rank]), branch.kv_heads)]
        total += sum(_pairs_of_queries(plan, branch, *queries) for queries in computed)
    return total


def _pairs_of_queries(plan: RingPlan, branch: BranchPlan, queries: range, kv_heads: range) -> int:
    # The pairs of the queries at some positions, of some KV heads.
    total = 0
    for offset, heads in branch.groups.items():
        before, upto = (
            pairs_before(stop, plan.length, branch.dilation_rate, offset, branch.segment_length, plan.is_causal)
            for stop in (queries.start, queries.stop)
        )
        total += len(common_heads(heads, kv_heads)) * (upto - before)
    return total


def _branch_table(plan: RingPlan) -> str:
    titles = ("branch", "segment_length", "dilation_rate", "ranks a segment", "MB a rank", "transport", "why")
    rows = []
    for number, branch in enumerate(plan.branches):
        most_ranks = max((len(segment.ranks) for segment in branch.shared), default=1)
        megabytes = amount(branch.bytes_forward / 1e6)
        shape = f"{branch.segment_length:,}", f"{branch.dilation_rate:,}"
        rows.append((str(number), *shape, str(most_ranks), megabytes, branch.transport, branch.reason))
    return aligned(titles, rows, words=2)


def _rank_table(plan: RingPlan) -> str:
    titles = ("tokens", "MB sent", "received", "backward: sent", "received")
    titles += ("GB of memory", "backward", "TFLOP", "backward")
    units = (1e6,) * 4 + (1e9,) * 2 + (1e12,) * 2  # of the fields of a `RankCost`
    if plan.speeds:
        titles += ("time to the mean",)
        flop_at_speed_1 = sum(cost.flop_forward for cost in plan.ranks) / sum(plan.speeds) or 1
    lines = []
    for rank, (length, cost) in enumerate(zip(plan.shard_lengths, plan.ranks, strict=True)):
        line = [f"{length:,}", *(amount(quantity / unit) for quantity, unit in zip(astuple(cost), units, strict=True))]
        if plan.speeds:
            line.append(f"{cost.flop_forward / plan.speeds[rank] / flop_at_speed_1:.0%}")
        lines.append(line)
    return by_rank(titles, lines)


def by_rank(titles: tuple[str, ...], lines: list[list[str]]) -> str:
    """A table with a line for each rank, or for several whose lines are alike."""
    rows = []
    for line, alike in groupby(range(len(lines)), key=lines.__getitem__):
        first, *later = alike
        rows.append((f"{first}-{later[-1]}" if later else str(first), *line))
    return aligned(("rank", *titles), rows)


def amount(value: float) -> str:
    """A number in three digits, for people."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def aligned(titles: tuple[str, ...], rows: list[tuple[str, ...]], words: int = 0) -> str:
    """A table, numbers to the right; so many of the last columns are words."""
    alignments = ">" * (len(titles) - words) + "<" * words
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        cells = (f"{cell:{alignment}{width}}" for cell, alignment, width in zip(row, alignments, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
