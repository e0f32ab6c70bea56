"""The cost of rows of k and v that travel between ranks that share points."""

from dataclasses import dataclass

from hilbert_lib.ring.plan.halo import ExchangePlan


@dataclass(frozen=True, eq=False)
class PointPlan(ExchangePlan):
    """The plan that `PointShard.plan` made, of all ranks. Its table has a line for each."""

    lengths: tuple[int, ...]  # points of each rank
    points_that_travel: dict[tuple[int, int], int]  # by (source, destination)
    list_bytes: tuple[int, ...]  # of each rank's lists
    window: tuple[int, ...]

    how = "all queries, when the rows have come"

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        return len(self.lengths)

    @property
    def rows(self) -> dict[tuple[int, int], int]:
        """The number of (point, KV head) rows that travel, by (source, destination); without an entry none do."""
        return {pair: count * self.sizes.kv_heads for pair, count in self.points_that_travel.items()}

    def cells(self, rank: int) -> int:
        """The number of points that a rank holds."""
        return self.lengths[rank]

    def interior_queries(self, rank: int) -> int:
        """None: all queries wait for the rows of other ranks."""
        return 0

    def borders(self, rank: int) -> list[tuple[int, int]]:
        """Numbers of queries and of keys of the one call."""
        into = sum(count for (_, to), count in self.points_that_travel.items() if to == rank)
        return [(self.lengths[rank], self.lengths[rank] + into)] if self.lengths[rank] else []

    def tables(self, rank: int) -> int:
        """Bytes of a rank's lists."""
        return self.list_bytes[rank]

    @property
    def head(self) -> str:
        """The first line of the table."""
        window = " x ".join(map(str, self.window))
        return f"{sum(self.lengths):,} points on {self.rank_count} ranks, window {window}, {self.sizes_in_words}"
