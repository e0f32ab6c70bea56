"""Which segments straddle ranks, which rows of them each rank holds, and what must cross for them."""

from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.rows import Message, Rows, Wanted, pack, rows_between


@dataclass(frozen=True)
class SharedSegment:
    """A segment that lies in several ranks.

    Attributes:
        index: of the segment in its branch.
        start, stop: its first position, and the one after its last.
        ranks: those that hold tokens of it, in order; g of them.
        rows: for each of these ranks, its rows of every offset group of the branch (some may be empty).
        computed: for each of these ranks, the KV heads that it computes where heads are exchanged (all_to_all). With
            the other transports every rank computes all heads for its own queries.
    """

    index: int
    start: int
    stop: int
    ranks: tuple[int, ...]
    rows: dict[int, tuple[Rows, ...]]
    computed: dict[int, range]


@dataclass(frozen=True)
class BranchPlan:
    """How one branch is computed.

    Attributes:
        segment_length, dilation_rate: of the branch.
        offsets, kv_heads: offset groups: the offsets, and the KV heads that take each.
        local: for each rank, the positions of the segments that lie wholly inside it; an empty range where none do.
        shared: the segments that straddle ranks.
        transport: "local" where nothing is shared, otherwise "ring", "all_gather" or "all_to_all".
        reason: why this transport, in words.
        bytes_forward: the most that one rank sends or receives for this branch, were it the only one.
    """

    segment_length: int
    dilation_rate: int
    offsets: tuple[int, ...]
    kv_heads: tuple[range, ...]
    local: tuple[range, ...]
    shared: tuple[SharedSegment, ...]
    transport: str = "local"
    reason: str = "every segment lies inside one rank"
    bytes_forward: int = 0


def layout(pattern: DilatedPattern, shard_lengths: tuple[int, ...], kv_heads: int) -> tuple[BranchPlan, ...]:
    """Each branch cut by the shards, before a transport is chosen."""
    return tuple(_branch(pattern, branch, shard_lengths, kv_heads) for branch in range(len(pattern.branches)))


def _branch(pattern: DilatedPattern, branch: int, shard_lengths: tuple[int, ...], kv_heads: int) -> BranchPlan:
    w, r = pattern.branches[branch]
    ends = tuple(accumulate(shard_lengths))
    shards = tuple(range(end - length, end) for end, length in zip(ends, shard_lengths, strict=True))
    length = ends[-1]
    heads_of = {offset: range(kv_heads)[heads] for offset, heads in pattern.offset_heads(branch, kv_heads).items()}
    local = []
    for shard in shards:
        first, stop = -(-shard.start // w) * w, shard.stop if shard.stop == length else shard.stop // w * w
        local.append(range(first, stop) if first < stop else range(0))
    shared = []
    for index in sorted({end // w for end in ends if end % w and end < length}):
        segment = range(index * w, min((index + 1) * w, length))
        held = {rank: _overlap(shard, segment) for rank, shard in enumerate(shards)}
        ranks = tuple(rank for rank, positions in held.items() if positions)
        rows = {
            rank: tuple(rows_between(held[rank], segment.start, r, *group) for group in heads_of.items())
            for rank in ranks
        }
        computed = _split(pattern.branch_heads(branch, kv_heads), ranks)
        shared.append(SharedSegment(index, segment.start, segment.stop, ranks, rows, computed))
    return BranchPlan(w, r, tuple(heads_of), tuple(heads_of.values()), tuple(local), tuple(shared))


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _split(heads: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, range]:
    # The heads of a branch are contiguous, and so is each rank's share of them.
    ends = [heads[0] + len(heads) * n // len(ranks) for n in range(len(ranks) + 1)]
    return {rank: range(*between) for rank, between in zip(ranks, pairwise(ends), strict=True)}


def messages_for(branches: dict[int, BranchPlan], transport: str, is_causal: bool) -> dict[tuple[int, int], Message]:
    """What crosses between two ranks for branches of one transport, by (source, destination).

    Args:
        branches: by their index in the pattern.
        transport: gathering moves rows to the ranks whose queries need them; "all_to_all" moves the heads that a rank
            computes to it.
        is_causal: whether only later ranks need a row.
    """
    wanted: dict[tuple[int, int], list[Wanted]] = {}
    for number, branch in branches.items():
        for segment in branch.shared:
            for source, destination in product(segment.ranks, repeat=2):
                for group, rows in enumerate(segment.rows[source]):
                    if transport == "all_to_all":
                        rows = rows.of_heads(segment.computed[destination])
                        needed = rows.size
                    else:
                        earlier = source < destination or not is_causal
                        has_queries = segment.rows[destination][group].count
                        needed = rows.size and has_queries and earlier and source != destination
                    if needed:
                        wanted.setdefault((source, destination), []).append(Wanted(number, segment.index, group, rows))
    packed: dict[tuple[Wanted, ...], tuple] = {}  # what several ranks want of one is often the same
    messages = {}
    for (source, destination), some in wanted.items():
        key = tuple(some)
        packed[key] = packed.get(key) or pack(some, once=transport != "all_to_all")
        messages[source, destination] = Message(source, destination, *packed[key])
    return messages
