"""How much attention falls to each shard, in closed form, and shard lengths that balance it."""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from hilbert_lib.checks import boolean, integer, is_listed, positive
from hilbert_lib.pattern import DilatedPattern, check_pattern, rows_in_segment


def pairs_before(stop: int, length: int, rate: int, offset: int, segment_length: int, is_causal: bool = False) -> int:
    """(query, key) pairs of one head in one branch whose query is before position `stop`.

    >>> [pairs_before(stop, 10, rate=1, offset=0, segment_length=4) for stop in (0, 3, 4, 10)]
    [0, 12, 16, 36]
    """
    segment, inside = divmod(stop, segment_length)
    whole = rows_in_segment(segment_length, rate, offset)
    queries = rows_in_segment(inside, rate, offset)
    if is_causal:
        return segment * (whole * (whole + 1) // 2) + queries * (queries + 1) // 2
    keys = rows_in_segment(min(segment_length, length - segment * segment_length), rate, offset)
    return segment * whole * whole + queries * keys


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
    """Shard lengths in proportion to the ranks' speeds.

    Args:
        length: tokens in the sequence. ranks: how many share it.
        weights: relative speed of each rank, above 0; by default all are equal.
        multiple: shards begin at multiples of this. Where a segment length divides it, that branch sends nothing.
        pattern: by default every token counts the same. With a pattern, a rank gets work in proportion to its speed:
            (query, key) pairs of its queries. Causal attention over segments longer than a shard needs it, as there a
            later query has more keys.
        kv_heads: KV heads of the pattern. is_causal: as `dilated_attention` takes it.

    Returns:
        One length a rank, in sum `length`; some may be 0.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed.

    >>> shard_lengths_for(100, 3), shard_lengths_for(100, 3, weights=(2, 1, 1), multiple=10)
    ((34, 33, 33), (50, 30, 20))
    >>> shard_lengths_for(100, 2, pattern=DilatedPattern((100,), (1,)), is_causal=True)
    (71, 29)
    """
    length, ranks = integer("length", length, least=1), integer("ranks", ranks, least=1)
    multiple = integer("multiple", multiple, least=1)
    speeds = [Fraction(each) for each in check_weights(weights, ranks) or (1,) * ranks]  # exact: alike on every rank
    if pattern is not None:
        check_pattern(pattern)
    boolean("is_causal", is_causal)
    units = -(-length // multiple)

    def work_before(unit: int) -> int:
        stop = min(unit * multiple, length)
        return stop if pattern is None else pattern_pairs_before(pattern, stop, length, kv_heads, is_causal)

    total, speed = work_before(units), sum(speeds)
    shares = (total * each / speed for each in accumulate(speeds))
    ends = [min(bisect_left(range(units + 1), share, key=work_before) * multiple, length) for share in shares]
    ends[-1] = length  # tokens in no branch are no work; they end up with the last rank
    return tuple(stop - start for start, stop in pairwise([0, *ends]))


def pattern_pairs_before(pattern: DilatedPattern, stop: int, length: int, kv_heads: int, is_causal: bool) -> int:
    """(query, key) pairs over all branches and KV heads whose query is before position `stop`."""
    total = 0
    for branch, (w, r) in enumerate(pattern.branches):
        for offset, heads in pattern.offset_heads(branch, kv_heads).items():
            total += len(range(kv_heads)[heads]) * pairs_before(stop, length, r, offset, w, is_causal)
    return total


def check_weights(weights: object, ranks: int | None = None) -> tuple[float, ...] | None:
    """The relative speeds of the ranks, if they are a sequence of numbers above 0; None, that all are equal.

    Args:
        weights: as `shard_lengths_for` takes them.
        ranks: how many there are; None where that is not known yet.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed.

    >>> check_weights([2, 1], ranks=2)
    (2.0, 1.0)
    """
    if weights is None:
        return None
    if not is_listed(weights):
        raise TypeError(f"weights must be a sequence of numbers or None, got {weights!r}")
    if ranks is not None and len(weights) != ranks:
        raise ValueError(f"weights must have one number a rank ({ranks}), got {len(weights)}: {weights!r}")
    return tuple(positive(f"weights[{rank}]", weight) for rank, weight in enumerate(weights))
