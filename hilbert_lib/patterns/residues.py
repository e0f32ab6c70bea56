"""Number of positions in the branches of a pattern: a branch is a residue class in every segment."""

from collections.abc import Iterable
from functools import lru_cache, partial
from math import gcd, lcm, prod

import torch

COUNTED_AT_ONCE = 2**22  # positions; 32 MiB for each int64 temporary
STRETCHES_AT_ONCE = 2**16
FEW_CLASSES = 16
LARGEST_MODULUS, LARGEST_RATE = 2**62, 2**31  # whose products are int64


def rows_in_segment(length: int, rate: int, offset: int) -> int:
    """Number of positions of a segment of this length whose residue is the offset."""
    return max(0, -(-(length - offset) // rate))


@lru_cache(maxsize=256)  # heads share their branches
def covered(length: int, residues: frozenset[tuple[int, int, int]]) -> int:
    """Number of positions below length that are in at least one of these (segment length, dilation rate, offset)."""
    w, r, o = min(residues, key=lambda residue: residue[1])
    if len(residues) == 1 or r == 1:  # a branch of rate 1 holds every position
        return length // w * rows_in_segment(w, r, o) + rows_in_segment(length % w, r, o)
    subsets = prod(1 + len(_classes(length, *residue)) for residue in residues)
    residues = [residue_class for residue in residues for residue_class in _classes(length, *residue)]
    # Membership repeats with r where r divides w or one segment holds all, otherwise with w.
    uneven = [w for w, r, _ in residues if w % r and w < length]
    period = lcm(*uneven, *(r for w, r, _ in residues if not (w % r and w < length)))
    stretches = 1 + sum(min(length, period) // w for w in uneven)  # in which every branch is one residue class
    is_short = stretches * subsets < min(length, period)
    rates = [r for _, r, _ in residues]
    is_exact = lcm(*rates) < LARGEST_MODULUS and max(rates) < LARGEST_RATE
    count = partial(_covered_by_stretches if is_short and is_exact else _covered_one_by_one, residues=residues)
    periods = length // period
    return (periods * count(period) if periods else 0) + count(length % period)


def _classes(length: int, w: int, r: int, o: int) -> list[tuple[int, int, int]]:
    # A branch as residue classes. Where r does not divide the segment and its rows are few, each row is a class with
    # modulus w.
    if w % r == 0 or w >= length or rows_in_segment(w, r, o) > FEW_CLASSES:
        return [(w, r, o)]
    return [(w, w, offset) for offset in range(o, w, r)]


def _covered_one_by_one(length: int, residues: Iterable[tuple[int, int, int]]) -> int:
    total = 0
    for start in range(0, length, COUNTED_AT_ONCE):
        positions = torch.arange(start, min(start + COUNTED_AT_ONCE, length), device="cpu")
        inside = torch.zeros(len(positions), dtype=torch.bool, device="cpu")
        for w, r, o in residues:
            inside |= positions % w % r == o
        total += int(inside.sum())
    return total


def _covered_by_stretches(length: int, residues: Iterable[tuple[int, int, int]]) -> int:
    # A stretch lies between two ends of segments, where a branch is one residue class. The intersection of several
    # classes is a class too (Chinese remainder theorem). Their union is a sum over all subsets of classes (inclusion
    # and exclusion).
    uneven = [w for w, r, _ in residues if w % r and w < length]
    at_once = STRETCHES_AT_ONCE * min(uneven, default=max(length, 1))
    total = 0
    for first in range(0, length, at_once):
        end = min(first + at_once, length)
        ends = [w * torch.arange(-(-first // w), -(-end // w), device="cpu") for w in uneven]
        starts = torch.cat([torch.tensor([first], device="cpu"), *ends]).unique()
        ends = torch.cat([starts[1:], torch.tensor([end], device="cpu")])
        subsets = []  # (sign, modulus, class of each stretch, whether there is one)
        for w, r, o in residues:
            residue_of_branch = (starts // w * w + o) % r
            joined = [(1, r, residue_of_branch, torch.ones_like(residue_of_branch, dtype=torch.bool))]
            for sign, modulus, residue, exists in subsets:
                common = gcd(modulus, r)
                apart, step = residue_of_branch - residue, r // common
                times = apart // common % step * pow(modulus // common, -1, step) % step
                exists = exists & (apart % common == 0)
                if exists.any():
                    joined.append((-sign, modulus * step, residue + modulus * times, exists))
            subsets += joined
        for sign, modulus, residue, exists in subsets:
            members = (ends - 1 - residue) // modulus - (starts - 1 - residue) // modulus
            total += sign * int(members[exists].sum())
    return total
