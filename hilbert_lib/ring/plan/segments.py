"""Which segments straddle ranks, which rows of them each rank holds, and what must cross for them."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.rows import Message, Place, Rows, common_heads, pack, rows_between


@dataclass(frozen=True)
class SharedSegment:
    """A segment that lies in several ranks, `index` of its branch: positions start to stop - 1."""

    index: int
    start: int
    stop: int
    ranks: tuple[int, ...]  # those that hold tokens of it, in order
    rows: dict[int, tuple[Rows, ...]]  # by rank: one for each offset group of the branch; some may be empty
    computed: dict[int, range]  # by rank: the KV heads that it computes by "all_to_all"; otherwise it computes all


@dataclass(frozen=True)
class BranchPlan:
    """How one branch is computed."""

    segment_length: int
    dilation_rate: int
    offsets: tuple[int, ...]
    kv_heads: tuple[range, ...]  # those that take each offset
    local: tuple[range, ...]  # by rank: positions of the segments that lie wholly inside it
    shared: tuple[SharedSegment, ...]
    transport: str = "local"  # or, where segments are shared, one of `plan.TRANSPORTS`
    reason: str = "every segment lies inside one rank"
    bytes_forward: int = 0  # the most that one rank sends or receives, if this were the only branch


def cut_branch(pattern: DilatedPattern, branch: int, shard_lengths: tuple[int, ...], kv_heads: int) -> BranchPlan:
    """A branch cut by the shards, before a transport is chosen."""
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
        start, stop = index * w, min((index + 1) * w, length)
        held = {rank: range(max(shard.start, start), min(shard.stop, stop)) for rank, shard in enumerate(shards)}
        ranks = tuple(rank for rank, positions in held.items() if positions)
        rows = {rank: tuple(rows_between(held[rank], start, r, *group) for group in heads_of.items()) for rank in ranks}
        computed = _split(pattern.branch_heads(branch, kv_heads), ranks)
        shared.append(SharedSegment(index, start, stop, ranks, rows, computed))
    return BranchPlan(w, r, tuple(heads_of), tuple(heads_of.values()), tuple(local), tuple(shared))


def _split(heads: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, range]:
    # The heads of a branch are contiguous, and so is each rank's share of them.
    ends = [heads[0] + len(heads) * n // len(ranks) for n in range(len(ranks) + 1)]
    return {rank: range(*between) for rank, between in zip(ranks, pairwise(ends), strict=True)}


def messages_for(branches: dict[int, BranchPlan], transport: str, is_causal: bool) -> dict[tuple[int, int], Message]:
    """What crosses between two ranks for branches, by index, of one transport; by (source, destination).

    Gathering moves rows to the ranks whose queries need them, where causal only to later ranks; "all_to_all" moves the
    heads that a rank computes to it.
    """
    wanted: dict[tuple[int, int], list[tuple[Place, Rows]]] = {}
    for number, branch in branches.items():
        for segment in branch.shared:
            for source, destination in product(segment.ranks, repeat=2):
                for group, rows in enumerate(segment.rows[source]):
                    if transport == "all_to_all":
                        rows = replace(rows, kv_heads=common_heads(rows.kv_heads, segment.computed[destination]))
                        needed = rows.size
                    else:
                        earlier = source < destination or not is_causal
                        has_queries = segment.rows[destination][group].count
                        needed = rows.size and has_queries and earlier and source != destination
                    if needed:
                        wanted.setdefault((source, destination), []).append(((number, segment.index, group), rows))
    packed: dict[tuple, tuple] = {}  # several ranks often want the same from one
    messages = {}
    for (source, destination), some in wanted.items():
        key = tuple(some)
        packed[key] = packed.get(key) or pack(some, once=transport != "all_to_all")
        messages[source, destination] = Message(source, destination, *packed[key])
    return messages
