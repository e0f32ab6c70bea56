"""The work of each shard, in closed form, and shard lengths that balance it."""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from hilbert_lib.checks import boolean, integer, is_listed, positive
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated, rows_in_segment


def pairs_before(stop: int, length: int, rate: int, offset: int, segment_length: int, is_causal: bool = False) -> int:
    """(query, key) pairs of one head in one branch whose query is before position `stop`."""
    segment, inside = divmod(stop, segment_length)
    segment_rows = rows_in_segment(segment_length, rate, offset)
    queries = rows_in_segment(inside, rate, offset)
    if is_causal:
        return segment * (segment_rows * (segment_rows + 1) // 2) + queries * (queries + 1) // 2
    keys = rows_in_segment(min(segment_length, length - segment * segment_length), rate, offset)
    return segment * segment_rows * segment_rows + queries * keys


def shard_lengths_for(
    length: int,
    ranks: int,
    *,
    weights: Sequence[float] | None = None,
    multiple: int = 1,
    pattern: DilatedPattern | None = None,
    kv_heads: int = 1,
    is_causal: bool = False,
) -> tuple[int, ...]:
    """One shard length a rank, in sum `length`, in proportion to the ranks' speeds (`weights`); some may be 0.

    Shards begin at multiples of `multiple`: a branch whose segment length divides it sends nothing. By default every
    token counts the same. With a pattern, a rank gets (query, key) pairs in proportion to its speed: causal attention
    over segments longer than a shard needs that, since later queries have more keys.

    >>> shard_lengths_for(100, 3), shard_lengths_for(100, 3, weights=(2, 1, 1), multiple=10)
    ((34, 33, 33), (50, 30, 20))
    >>> shard_lengths_for(100, 2, pattern=DilatedPattern((100,), (1,)), is_causal=True)
    (71, 29)
    """
    length, ranks = integer("length", length, least=1), integer("ranks", ranks, least=1)
    multiple = integer("multiple", multiple, least=1)
    # Fractions are exact: all ranks get the same lengths.
    speeds = [Fraction(weight) for weight in check_weights(weights, ranks) or (1,) * ranks]
    if pattern is not None:
        check_dilated(pattern)
    boolean("is_causal", is_causal)
    units = -(-length // multiple)

    def work_before(unit: int) -> int:
        stop = min(unit * multiple, length)
        if pattern is None:
            return stop
        return sum(
            len(range(kv_heads)[heads]) * pairs_before(stop, length, r, offset, w, is_causal)
            for branch, (w, r) in enumerate(pattern.branches)
            for offset, heads in pattern.offset_heads(branch, kv_heads).items()
        )

    total, speed = work_before(units), sum(speeds)
    shares = (total * cumulative / speed for cumulative in accumulate(speeds))
    ends = [min(bisect_left(range(units + 1), share, key=work_before) * multiple, length) for share in shares]
    ends[-1] = length  # tokens in no branch are no work: the last rank gets them
    return tuple(stop - start for start, stop in pairwise([0, *ends]))


def check_weights(weights: object, ranks: int | None = None) -> tuple[float, ...] | None:
    """The relative speeds of the ranks, if they are numbers above 0, as many as `ranks` if that is known; or None."""
    if weights is None:
        return None
    if not is_listed(weights):
        raise TypeError(f"weights must be a sequence of numbers or None, got {weights!r}")
    if ranks is not None and len(weights) != ranks:
        raise ValueError(f"weights must have one number a rank ({ranks}), got {len(weights)}: {weights!r}")
    return tuple(positive(f"weights[{rank}]", weight) for rank, weight in enumerate(weights))
