"""Rows of k and v that travel between ranks that share points: what a rank computes with them, and what they cost."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hilbert_lib.ring.plan.halo import ExchangePlan


class Travelling(NamedTuple):
    """The points whose k and v travel, as a rank has them."""

    rows: Tensor  # (points,) int64, rows of this rank for the others, destination by destination
    sent: tuple[int, ...]  # how many to each rank
    received: tuple[int, ...]  # how many from each rank
    by_ranks: dict[tuple[int, int], int]  # how many travel, by (source, destination)


class PointParts(NamedTuple):
    """The queries of a rank: those that see own keys alone, and the border. Lists are those of a `Request`."""

    queries: int  # of both
    keys: int  # of this rank
    interior: tuple[Tensor, ...]  # lists over own keys. Turned round they hold the border's queries, too
    border: tuple[Tensor, ...]  # lists of queries by place in the border, over its own keys and then those received
    border_queries: Tensor  # (n,) int64, ascending: their rows
    border_keys: Tensor  # (m,) int64, ascending: rows of own keys that they see


class PointCounts(NamedTuple):
    """The numbers of a rank."""

    points: int
    keys: int  # as many, unless k and v live on other cells
    border_queries: int
    border_keys: int  # own ones
    list_bytes: int


@dataclass(frozen=True, eq=False)
class PointPlan(ExchangePlan):
    """The plan that `PointShard.plan` made, of all ranks. Its table has a line for each."""

    counts: tuple[PointCounts, ...]  # of each rank
    points_that_travel: dict[tuple[int, int], int]  # by (source, destination)
    window: tuple[int, ...]

    how = "queries that see keys of other ranks when these have come"

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        return len(self.counts)

    @property
    def rows(self) -> dict[tuple[int, int], int]:
        """The number of (point, KV head) rows that travel, by (source, destination); without an entry none do."""
        return {pair: count * self.sizes.kv_heads for pair, count in self.points_that_travel.items()}

    def cells(self, rank: int) -> int:
        """The number of points that a rank holds."""
        return self.counts[rank].points

    def key_cells(self, rank: int) -> int:
        """The number of cells whose k and v a rank holds."""
        return self.counts[rank].keys

    def interior_queries(self, rank: int) -> int:
        """The number of a rank's queries that are computed while rows travel."""
        return self.counts[rank].points - self.counts[rank].border_queries

    def borders(self, rank: int) -> list[tuple[int, int]]:
        """Numbers of queries and of keys of the call that waits for rows of other ranks, if there is one."""
        _, _, queries, keys, _ = self.counts[rank]
        return [(queries, keys + self.rows_into[rank] // self.sizes.kv_heads)] if queries else []

    def tables(self, rank: int) -> int:
        """Bytes of a rank's lists."""
        return self.counts[rank].list_bytes

    @property
    def head(self) -> str:
        """The first line of the table."""
        window, points = " x ".join(map(str, self.window)), sum(count.points for count in self.counts)
        keys = sum(count.keys for count in self.counts)
        of_keys = "" if keys == points else f" and {keys:,} keys"
        return f"{points:,} points{of_keys} on {self.rank_count} ranks, window {window}, {self.sizes_in_words}"
