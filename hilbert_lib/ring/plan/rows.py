"""Rows of k and v that travel from one rank to another, as arithmetic progressions: nothing here has the size of N."""

from collections.abc import Iterable
from dataclasses import dataclass

from hilbert_lib.patterns.dilated import rows_in_segment


@dataclass(frozen=True)
class Rows:
    """Positions first, first + step, ...: `count` of them, maybe 0; and the KV heads that use them."""

    first: int
    count: int
    step: int
    kv_heads: range

    @property
    def last(self) -> int:
        """The last position, if there is one."""
        return self.first + (self.count - 1) * self.step

    @property
    def size(self) -> int:
        """Pairs of a position and a KV head."""
        return self.count * len(self.kv_heads)

    def take(self, skip: int, count: int) -> "Rows":
        """`count` of the rows, without the first `skip`."""
        return Rows(self.first + skip * self.step, count, self.step, self.kv_heads)


@dataclass(frozen=True)
class Message:
    """The rows that one rank sends to another; or to itself: those that an all-to-all leaves where they are."""

    pieces: tuple[Rows, ...] = ()  # sent one after the other

    @property
    def size(self) -> int:
        """Pairs of a position and a KV head."""
        return sum(piece.size for piece in self.pieces)


def common_heads(kv_heads: range, contiguous: range) -> range:
    """Evenly spaced heads that are in a contiguous range."""
    first, stop = (rows_in_segment(head, kv_heads.step, kv_heads.start) for head in (contiguous.start, contiguous.stop))
    return kv_heads[first:stop]


def rows_between(positions: range, segment_start: int, rate: int, offset: int, kv_heads: range) -> Rows:
    """The dilated rows of one segment at some consecutive positions."""
    before = rows_in_segment(positions.start - segment_start, rate, offset)
    count = rows_in_segment(positions.stop - segment_start, rate, offset) - before
    return Rows(segment_start + offset + before * rate, count, rate, kv_heads)


def pack(needed_rows: Iterable[Rows]) -> Message:
    """The message that holds all needed rows; a coarser branch adds those rows that no finer branch's piece holds.

    No (position, head) is in it twice where r_i divides r_j, both divide their segment lengths, and offsets are "head".

    >>> fine, coarse = Rows(0, 8, 2, range(2)), Rows(0, 8, 4, range(2))  # the coarser reaches further
    >>> [(piece.first, piece.count) for piece in pack([fine, coarse]).pieces]
    [(0, 8), (16, 4)]
    """
    pieces: list[Rows] = []
    by_residue: dict[int, dict[int, list[Rows]]] = {}  # pieces by step, then by the residue of their positions
    for needed in sorted(needed_rows, key=lambda rows: (rows.step, -rows.count)):
        missing = [needed]
        for step, pieces_of_step in by_residue.items():
            # Only these can hold some of the rows.
            on_progression = pieces_of_step.get(needed.first % step, ()) if needed.step % step == 0 else ()
            for piece in on_progression if missing else ():
                missing = [rest for rows in missing for rest in _outside(rows, piece)]
        pieces += missing
        by_residue.setdefault(needed.step, {}).setdefault(needed.first % needed.step, []).extend(missing)
    return Message(tuple(pieces))


def _outside(rows: Rows, piece: Rows) -> list[Rows]:
    # The rows that the piece does not hold, whose progression all of them are on.
    start = max(0, -(-(piece.first - rows.first) // rows.step))
    stop = min(rows.count, (piece.last - rows.first) // rows.step + 1)
    if start >= stop or not all(head in piece.kv_heads for head in rows.kv_heads):
        return [rows]
    rests = rows.take(0, start), rows.take(stop, rows.count - stop)
    return [rest for rest in rests if rest.count]
