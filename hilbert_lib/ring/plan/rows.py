"""Rows of k and v that travel from one rank to another, as arithmetic progressions: nothing here has the size of N."""

from dataclasses import dataclass

from hilbert_lib.pattern import rows_in_segment


@dataclass(frozen=True)
class Rows:
    """Positions first, first + step, ... of some KV heads.

    Attributes:
        first: the first position in the sequence.
        count: how many positions; may be 0.
        step: distance between two of them.
        kv_heads: the KV heads that use them.

    >>> Rows(first=13, count=3, step=4, kv_heads=range(1, 8, 2)).last
    21
    """

    first: int
    count: int
    step: int
    kv_heads: range

    @property
    def last(self) -> int:
        """The last position, of a count above 0."""
        return self.first + (self.count - 1) * self.step

    @property
    def size(self) -> int:
        """Pairs of a position and a KV head."""
        return self.count * len(self.kv_heads)

    def take(self, skip: int, count: int) -> "Rows":
        """`count` of the rows, without the first `skip`."""
        return Rows(self.first + skip * self.step, count, self.step, self.kv_heads)

    def of_heads(self, kv_heads: range) -> "Rows":
        """The same positions, of those KV heads that are in a contiguous range too."""
        return Rows(self.first, self.count, self.step, common_heads(self.kv_heads, kv_heads))


@dataclass(frozen=True)
class Part:
    """Where a message holds rows of one branch, shared segment and offset.

    Attributes:
        branch: index of the branch.
        segment: index of the segment in the branch.
        group: index into the branch's `offsets`.
        rows: the positions and KV heads.
        piece: index of the message's piece that holds them.
        index: selects them from the piece's tensor, (batch, count, kv_heads, ...).
    """

    branch: int
    segment: int
    group: int
    rows: Rows
    piece: int
    index: tuple[slice, slice, slice]


@dataclass(frozen=True)
class Message:
    """What one rank sends to another.

    Attributes:
        source, destination: ranks. They are equal for what an all-to-all leaves where it is.
        pieces: the rows sent, one after the other.
        parts: where each branch finds its rows, in the order of the branches and of the positions. Two parts may lie
            in one piece: a row that several branches need is sent once.
    """

    source: int
    destination: int
    pieces: tuple[Rows, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Pairs of a position and a KV head."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Wanted:
    """Rows of one branch, shared segment and offset that a rank needs of another."""

    branch: int
    segment: int
    group: int
    rows: Rows


def common_heads(kv_heads: range, contiguous: range) -> range:
    """Those of some evenly spaced heads that are in a contiguous range.

    >>> common_heads(range(1, 16, 4), range(4, 12))
    range(5, 13, 4)
    """
    first, stop = (rows_in_segment(head, kv_heads.step, kv_heads.start) for head in (contiguous.start, contiguous.stop))
    return kv_heads[first:stop]


def rows_between(positions: range, segment_start: int, rate: int, offset: int, kv_heads: range) -> Rows:
    """The dilated rows of one segment at some consecutive positions.

    >>> rows_between(range(6, 15), segment_start=4, rate=3, offset=1, kv_heads=range(2))
    Rows(first=8, count=3, step=3, kv_heads=range(0, 2))
    """
    before = rows_in_segment(positions.start - segment_start, rate, offset)
    count = rows_in_segment(positions.stop - segment_start, rate, offset) - before
    return Rows(segment_start + offset + before * rate, count, rate, kv_heads)


def pack(wanted: list[Wanted], *, once: bool = True) -> tuple[tuple[Rows, ...], tuple[Part, ...]]:
    """The pieces that hold everything wanted, and where in them each is.

    Rows that lie on the progression of a finer branch's piece, for heads of that piece, are found there, unless `once`
    is False, which makes every part a piece of its own. Where r_i divides r_j, both divide their segment lengths and
    offsets are "head", every (position, head) is sent once.

    >>> fine, coarse = Rows(0, 8, 2, range(2)), Rows(0, 8, 4, range(2))  # the coarser reaches further
    >>> pieces, parts = pack([Wanted(0, 0, 0, fine), Wanted(1, 0, 0, coarse)])
    >>> [(piece.first, piece.count, piece.step) for piece in pieces]
    [(0, 8, 2), (16, 4, 4)]
    >>> [(part.branch, part.piece, part.index[1]) for part in parts]
    [(0, 0, slice(0, 8, 1)), (1, 0, slice(0, 8, 2)), (1, 1, slice(0, 4, 1))]
    """
    pieces: list[Rows] = []
    parts: list[Part] = []
    for want in sorted(wanted, key=lambda want: (want.rows.step, -want.rows.count)):
        missing = [want.rows]
        for number in range(len(pieces) if once else 0):
            still_missing = []
            for rows in missing:
                found = _found(rows, pieces[number])
                if not found:
                    still_missing.append(rows)
                    continue
                parts.append(_part(want, rows.take(found.start, len(found)), number, pieces[number]))
                still_missing += [rows.take(0, found.start), rows.take(found.stop, rows.count - found.stop)]
            missing = [rows for rows in still_missing if rows.count]
        for rows in missing:
            parts.append(_part(want, rows, len(pieces), rows))
            pieces.append(rows)
    parts.sort(key=lambda part: (part.branch, part.segment, part.group, part.rows.first))
    return tuple(pieces), tuple(parts)


def _found(rows: Rows, piece: Rows) -> range | None:
    # Which of the rows, by their number, the piece holds.
    heads, held = rows.kv_heads, piece.kv_heads
    on_progression = rows.step % piece.step == 0 and (rows.first - piece.first) % piece.step == 0
    if not on_progression or not all(head in held for head in heads):
        return None
    start = max(0, -(-(piece.first - rows.first) // rows.step))
    stop = min(rows.count, (piece.last - rows.first) // rows.step + 1)
    return range(start, stop) if start < stop else None


def _part(want: Wanted, rows: Rows, number: int, piece: Rows) -> Part:
    heads, held = rows.kv_heads, piece.kv_heads
    distance = heads.step // held.step if len(heads) > 1 else 1
    along = _slice((rows.first - piece.first) // piece.step, rows.count, rows.step // piece.step)
    across = _slice(held.index(heads[0]), len(heads), distance)
    return Part(want.branch, want.segment, want.group, rows, number, (slice(None), along, across))


def _slice(first: int, count: int, step: int) -> slice:
    return slice(first, first + count * step, step)
