"""The segments that straddle ranks, the rows of them that each rank holds, and those that must cross."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

import numpy as np

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
        if source not in self.rows or destination not in self.rows:
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

    @cached_property
    def place(self) -> dict[int, int]:
        """By rank: its place in `ranks`."""
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each rank in each offset group, int64. [ranks, groups]"""
        return np.array([[rows.count for rows in self.rows[rank]] for rank in self.ranks], dtype=np.int64)

    @cached_property
    def counts_before(self) -> np.ndarray:
        """Rows of all ranks before each place, and in the last line of all. [ranks + 1, groups]"""
        return np.concatenate([np.zeros_like(self.counts[:1]), self.counts.cumsum(axis=0)])

    @cached_property
    def ranks_with_rows(self) -> tuple[int, ...]:
        """For each offset group the ranks that have rows of it, as the bits of a number."""
        groups = range(len(self.rows[self.ranks[0]]))
        return tuple(sum(1 << rank for rank in self.ranks if self.rows[rank][group].count) for group in groups)


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

    @property
    def rows_key(self) -> tuple:
        """A key that two branches of one plan share if they hold the same rows."""
        return self.segment_length, self.dilation_rate, *self.groups.items()

    def shared_by(self, rank: int) -> tuple[SharedSegment, ...]:
        """The shared segments that lie in a rank: two at most, its first and its last."""
        return self._shared_by_rank.get(rank, ())

    @cached_property
    def _shared_by_rank(self) -> dict[int, tuple[SharedSegment, ...]]:
        by_rank: dict[int, tuple[SharedSegment, ...]] = {}
        for segment in self.shared:
            for rank in segment.ranks:
                by_rank[rank] = (*by_rank.get(rank, ()), segment)
        return by_rank


def cut_branch(pattern: DilatedPattern, branch: int, shard_lengths: tuple[int, ...], kv_heads: int) -> BranchPlan:
    """A branch cut by the shards, before a transport is chosen."""
    w, r = pattern.branches[branch]
    ends = tuple(accumulate(shard_lengths))
    shards = tuple(range(end - length, end) for end, length in zip(ends, shard_lengths, strict=True))
    starts, length = [shard.start for shard in shards], ends[-1]
    groups = {offset: range(kv_heads)[heads] for offset, heads in pattern.offset_heads(branch, kv_heads).items()}
    local = []
    for shard in shards:
        first, stop = -(-shard.start // w) * w, shard.stop if shard.stop == length else shard.stop // w * w
        local.append(range(first, stop) if first < stop else range(0))
    shared = []
    for index in sorted({end // w for end in ends if end % w and end < length}):
        start, stop = index * w, min((index + 1) * w, length)
        touching = range(bisect_right(ends, start), bisect_left(starts, stop))  # ranks
        inside = {rank: range(max(shards[rank].start, start), min(shards[rank].stop, stop)) for rank in touching}
        ranks = tuple(rank for rank, positions in inside.items() if positions)
        rows = {rank: tuple(rows_between(inside[rank], start, r, *group) for group in groups.items()) for rank in ranks}
        computed = _split(pattern.branch_heads(branch, kv_heads), ranks)
        shared.append(SharedSegment(start, stop, ranks, rows, computed))
    return BranchPlan(w, r, groups, tuple(local), tuple(shared))


def _split(heads: tuple[int, ...], ranks: tuple[int, ...]) -> dict[int, range]:
    # The heads of a branch are contiguous, and so is each rank's share of them.
    ends = [heads[0] + len(heads) * n // len(ranks) for n in range(len(ranks) + 1)]
    return {rank: range(*between) for rank, between in zip(ranks, pairwise(ends), strict=True)}


class Messages(Mapping):
    """The messages for all branches of one transport, by (source, destination), each made when it is looked up.

    Ranks can have as many messages as there are pairs of them. Those of one rank differ in few ways: `from_rank` makes
    each kind once.
    """

    def __init__(self, branches: Iterable[BranchPlan], transport: str, is_causal: bool) -> None:
        self.branches, self.transport, self.is_causal = tuple(branches), transport, is_causal
        self._packed = cache(pack)  # several ranks often want the same from one
        self._members = cache(_members)

    def __getitem__(self, between: tuple[int, int]) -> Message:
        rows: list[Rows] = []
        for branch in self.branches:
            for segment in branch.shared_by(between[0]):
                rows += segment.crossing(*between, self.transport, self.is_causal).values()
        if not rows:
            raise KeyError(between)
        return self._packed(tuple(rows))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for source in self.sources:
            for destinations, _ in self.from_rank(source):
                yield from ((source, int(destination)) for destination in destinations)

    def __len__(self) -> int:
        return sum(len(destinations) for source in self.sources for destinations, _ in self.from_rank(source))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The ranks that share a segment."""
        shared = (segment for branch in self.branches for segment in branch.shared)
        return tuple(sorted({rank for segment in shared for rank in segment.ranks}))

    def from_rank(self, source: int) -> Iterator[tuple[np.ndarray, Message]]:
        """The messages of a rank: the destinations of each, ascending, and what all of these receive."""
        for ranks, rows in self._wanted_all_to_all(source) if self.transport == "all_to_all" else self._wanted(source):
            destinations = self._members(ranks)
            if self.transport != "all_to_all":
                own, after = destinations.searchsorted(source), destinations.searchsorted(source, side="right")
                later = destinations[after:]
                destinations = later if self.is_causal or own == 0 else np.concatenate([destinations[:own], later])
            if len(destinations):
                yield destinations, self._packed(tuple(rows))

    def _wanted(self, source: int) -> Iterator[tuple[int, list[Rows]]]:
        # Sets of ranks, each as the bits of a number, and the rows that all ranks of the set want.
        rows_by_ranks: dict[int, list[tuple[int, Rows]]] = {}
        number = 0
        for branch in self.branches:
            for segment in branch.shared_by(source):
                for ranks, rows in zip(segment.ranks_with_rows, segment.rows[source], strict=True):
                    number += 1
                    if rows.size:
                        rows_by_ranks.setdefault(ranks, []).append((number, rows))
        kinds: list[tuple[int, list[tuple[int, Rows]]]] = []
        seen = 0
        for ranks, rows in rows_by_ranks.items():
            inside = [(members & ranks, wanted + rows) for members, wanted in kinds]
            outside = [(members & ~ranks, wanted) for members, wanted in kinds]
            kinds = [kind for kind in (*inside, *outside, (ranks & ~seen, rows)) if kind[0]]
            seen |= ranks
        for members, wanted in kinds:
            yield members, [rows for _, rows in sorted(wanted, key=lambda numbered: numbered[0])]

    def _wanted_all_to_all(self, source: int) -> Iterator[tuple[int, list[Rows]]]:
        # Every destination computes other heads. A segment has at most as many ranks as KV heads.
        by_destination: dict[int, list[Rows]] = {}
        for branch in self.branches:
            for segment in branch.shared_by(source):
                for destination in segment.ranks:
                    crossing = segment.crossing(source, destination, self.transport, self.is_causal)
                    by_destination.setdefault(destination, []).extend(crossing.values())
        return ((1 << destination, rows) for destination, rows in by_destination.items() if rows)


def _members(bits: int) -> np.ndarray:
    # The places of the ones in a number, ascending.
    as_bytes = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), dtype=np.uint8)
    return np.unpackbits(as_bytes, bitorder="little").nonzero()[0]
