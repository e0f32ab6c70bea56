"""Rows of k and v that travel from one rank to another, as arithmetic progressions: nothing here has the size of N."""

from dataclasses import dataclass

from hilbert_lib.pattern import rows_in_segment

Place = tuple[int, int, int]  # indices of a branch, of one of its shared segments, of one of its `offsets`


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
class Part:
    """Where a message holds rows of one `Place`."""

    branch: int
    segment: int
    group: int
    rows: Rows
    piece: int  # index of the message's piece that holds them
    index: tuple[slice, slice, slice]  # selects them from the piece's tensor, (batch, count, kv_heads, ...)


@dataclass(frozen=True)
class Message:
    """What one rank sends to another; or to itself, which is what an all-to-all leaves where it is.

    Parts are in the order of branches and positions. Two may lie in one piece: a row that several branches need is sent
    once.
    """

    source: int
    destination: int
    pieces: tuple[Rows, ...]  # sent one after the other
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Pairs of a position and a KV head."""
        return sum(piece.size for piece in self.pieces)


def common_heads(kv_heads: range, contiguous: range) -> range:
    """Those of some evenly spaced heads that are in a contiguous range."""
    first, stop = (rows_in_segment(head, kv_heads.step, kv_heads.start) for head in (contiguous.start, contiguous.stop))
    return kv_heads[first:stop]


def rows_between(positions: range, segment_start: int, rate: int, offset: int, kv_heads: range) -> Rows:
    """The dilated rows of one segment at some consecutive positions."""
    before = rows_in_segment(positions.start - segment_start, rate, offset)
    count = rows_in_segment(positions.stop - segment_start, rate, offset) - before
    return Rows(segment_start + offset + before * rate, count, rate, kv_heads)


def pack(wanted: list[tuple[Place, Rows]], *, once: bool) -> tuple[tuple[Rows, ...], tuple[Part, ...]]:
    """The pieces that hold all wanted rows, and the parts that say where.

    With `once`, a part lies in a finer branch's piece where that has its positions and heads; without, every part is a
    piece of its own. Every (position, head) is sent once where r_i divides r_j, both divide their segment lengths, and
    offsets are "head".

    >>> fine, coarse = Rows(0, 8, 2, range(2)), Rows(0, 8, 4, range(2))  # the coarser reaches further
    >>> [(piece.first, piece.count) for piece in pack([((0, 0, 0), fine), ((1, 0, 0), coarse)], once=True)[0]]
    [(0, 8), (16, 4)]
    """
    pieces: list[Rows] = []
    parts: list[Part] = []
    for place, needed in sorted(wanted, key=lambda want: (want[1].step, -want[1].count)):
        missing = [needed]
        for number in range(len(pieces) if once else 0):
            still_missing = []
            for rows in missing:
                found = _found(rows, pieces[number])
                if not found:
                    still_missing.append(rows)
                    continue
                parts.append(_part(place, rows.take(found.start, len(found)), number, pieces[number]))
                still_missing += [rows.take(0, found.start), rows.take(found.stop, rows.count - found.stop)]
            missing = [rows for rows in still_missing if rows.count]
        for rows in missing:
            parts.append(_part(place, rows, len(pieces), rows))
            pieces.append(rows)
    parts.sort(key=lambda part: (part.branch, part.segment, part.group, part.rows.first))
    return tuple(pieces), tuple(parts)


def _found(rows: Rows, piece: Rows) -> range | None:
    # The numbers of the rows that the piece holds.
    on_progression = rows.step % piece.step == 0 and (rows.first - piece.first) % piece.step == 0
    if not on_progression or not all(head in piece.kv_heads for head in rows.kv_heads):
        return None
    start = max(0, -(-(piece.first - rows.first) // rows.step))
    stop = min(rows.count, (piece.last - rows.first) // rows.step + 1)
    return range(start, stop) if start < stop else None


def _part(place: Place, rows: Rows, number: int, piece: Rows) -> Part:
    heads, held = rows.kv_heads, piece.kv_heads
    distance = heads.step // held.step if len(heads) > 1 else 1
    along = _slice((rows.first - piece.first) // piece.step, rows.count, rows.step // piece.step)
    across = _slice(held.index(heads[0]), len(heads), distance)
    return Part(*place, rows, number, (slice(None), along, across))


def _slice(first: int, count: int, step: int) -> slice:
    return slice(first, first + count * step, step)
