"""The segments that straddle ranks, the rows of them that each rank holds, and those that must cross."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product

from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.plan.rows import Message, Rows, common_heads, pack, rows_between


@dataclass(frozen=True)
class SharedSegment:
    """A segment that lies in several ranks: positions start to stop - 1."""

    start: int
    stop: int
    ranks: tuple[int, ...]  # those that hold tokens of it, in order
    rows: dict[int, tuple[Rows, ...]]  # by rank: one for each offset group of the branch; some may be empty
    computed: dict[int, range]  # by rank: the KV heads that it computes by "all_to_all"; otherwise it computes all

    def crossing(self, source: int, destination: int, transport: str, is_causal: bool) -> dict[int, Rows]:
        """The rows of one rank that another one computes with, by offset group.

        "all_to_all" brings all rows of the heads that a rank computes, its own too. Gathering brings rows to the ranks
        whose queries need them: where causal only to later ranks.
        """
        if source not in self.ranks or destination not in self.ranks:
            return {}
        by_group = dict(enumerate(self.rows[source]))
        if transport == "all_to_all":
            heads = self.computed[destination]
            by_group = {n: replace(rows, kv_heads=common_heads(rows.kv_heads, heads)) for n, rows in by_group.items()}
        elif source == destination or (is_causal and source > destination):
            return {}
        else:
            by_group = {n: rows for n, rows in by_group.items() if self.rows[destination][n].count}
        return {n: rows for n, rows in by_group.items() if rows.size}


@dataclass(frozen=True)
class BranchPlan:
    """The way to compute one branch."""

    segment_length: int
    dilation_rate: int
    groups: dict[int, range]  # the KV heads that take each offset
    local: tuple[range, ...]  # by rank: positions of the segments that lie wholly inside it
    shared: tuple[SharedSegment, ...]
    transport: str = "local"  # or, where segments are shared, one of `plan.TRANSPORTS`
    reason: str = "every segment lies inside one rank"
    bytes_forward: int = 0  # the most that one rank sends or receives, if this were the only branch

    @property
    def kv_heads(self) -> range:
        """The KV heads that use the branch."""
        return range(min(map(min, self.groups.values())), max(map(max, self.groups.values())) + 1)


def cut_branch(pattern: DilatedPattern, branch: int, shard_lengths: tuple[int, ...], kv_heads: int) -> BranchPlan:
    """A branch cut by the shards, before a transport is chosen."""
    w, r = pattern.branches[branch]
    ends = tuple(accumulate(shard_lengths))
    shards = tuple(range(end - length, end) for end, length in zip(ends, shard_lengths, strict=True))
    length = ends[-1]
    groups = {offset: range(kv_heads)[heads] for offset, heads in pattern.offset_heads(branch, kv_heads).items()}
    local = []
    for shard in shards:
        first, stop = -(-shard.start // w) * w, shard.stop if shard.stop == length else shard.stop // w * w
        local.append(range(first, stop) if first < stop else range(0))
    shared = []
    for index in sorted({end // w for end in ends if end % w and end < length}):
        start, stop = index * w, min((index + 1) * w, length)
        inside = {rank: range(max(shard.start, start), min(shard.stop, stop)) for rank, shard in enumerate(shards)}
        ranks = tuple(rank for rank, positions in inside.items() if positions)
        rows = {rank: tuple(rows_between(inside[rank], start, r, *group) for group in groups.items()) for rank in ranks}
        computed = _split(pattern.branch_heads(branch, kv_heads), ranks)
        shared.append(SharedSegment(start, stop, ranks, rows, computed))
    return BranchPlan(w, r, groups, tuple(local), tuple(shared))


def _split(heads: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, range]:
    # The heads of a branch are contiguous, and so is each rank's share of them.
    ends = [heads[0] + len(heads) * n // len(ranks) for n in range(len(ranks) + 1)]
    return {rank: range(*between) for rank, between in zip(ranks, pairwise(ends), strict=True)}


def messages_for(branches: Iterable[BranchPlan], transport: str, is_causal: bool) -> dict[tuple[int, int], Message]:
    """The messages for all branches of one transport, by (source, destination)."""
    crossing_rows: dict[tuple[int, int], tuple[Rows, ...]] = {}
    for segment in (segment for branch in branches for segment in branch.shared):
        for between in product(segment.ranks, repeat=2):
            crossing = segment.crossing(*between, transport, is_causal)
            crossing_rows[between] = crossing_rows.get(between, ()) + tuple(crossing.values())
    packed = cache(pack)  # several ranks often want the same from one
    return {between: packed(rows) for between, rows in crossing_rows.items() if rows}
