"""How many positions lie in the branches of a pattern: each is a residue class in every segment."""

from collections.abc import Iterable
from functools import lru_cache, partial
from math import gcd, lcm, prod

import torch

COUNTED_AT_ONCE = 2**22  # positions; 32 MiB for each int64 temporary
STRETCHES_AT_ONCE = 2**16
FEW_CLASSES = 16
LARGEST_MODULUS, LARGEST_RATE = 2**62, 2**31  # whose products are int64


def rows_in_segment(length: int, rate: int, offset: int) -> int:
    """How many positions of a segment of this length have the offset as their residue."""
    return max(0, -(-(length - offset) // rate))


@lru_cache(maxsize=256)  # heads share their branches
def covered(length: int, residues: frozenset[tuple[int, int, int]]) -> int:
    """How many positions below length are in one of these (segment length, dilation rate, offset) at least."""
    w, r, o = min(residues, key=lambda residue: residue[1])
    if len(residues) == 1 or r == 1:  # a branch of rate 1 holds every position
        return length // w * rows_in_segment(w, r, o) + rows_in_segment(length % w, r, o)
    subsets = prod(1 + len(_classes(length, *residue)) for residue in residues)
    residues = [each for residue in residues for each in _classes(length, *residue)]
    # Membership repeats with r where r divides w or one segment holds all, otherwise with w.
    uneven = [w for w, r, _ in residues if w % r and w < length]
    period = lcm(*uneven, *(r for w, r, _ in residues if not (w % r and w < length)))
    stretches = 1 + sum(min(length, period) // w for w in uneven)  # in which every branch is one residue class
    is_short = stretches * subsets < min(length, period)
    rates = [r for _, r, _ in residues]
    is_exact = lcm(*rates) < LARGEST_MODULUS and max(rates) < LARGEST_RATE
    count = partial(_covered_by_stretches if is_short and is_exact else _covered_one_by_one, residues=residues)
    whole = length // period
    return (whole * count(period) if whole else 0) + count(length % period)


def _classes(length: int, w: int, r: int, o: int) -> list[tuple[int, int, int]]:
    # Of a few rows in a segment that r does not divide, each is a class of its own, which repeats with w.
    if w % r == 0 or w >= length or rows_in_segment(w, r, o) > FEW_CLASSES:
        return [(w, r, o)]
    return [(w, w, each) for each in range(o, w, r)]


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
    # Between two ends of segments a branch is one residue class. What several classes hold is a class, too (the Chinese
    # remainder theorem), and their union is a sum over all subsets of classes (inclusion and exclusion).
    uneven = [w for w, r, _ in residues if w % r and w < length]
    most = STRETCHES_AT_ONCE * min(uneven, default=max(length, 1))
    total = 0
    for first in range(0, length, most):
        end = min(first + most, length)
        ends = [w * torch.arange(-(-first // w), -(-end // w), device="cpu") for w in uneven]
        starts = torch.cat([torch.tensor([first], device="cpu"), *ends]).unique()
        ends = torch.cat([starts[1:], torch.tensor([end], device="cpu")])
        subsets = []  # (sign, modulus, class of each stretch, whether there is one)
        for w, r, o in residues:
            own = (starts // w * w + o) % r
            joined = [(1, r, own, torch.ones_like(own, dtype=torch.bool))]
            for sign, modulus, residue, exists in subsets:
                common = gcd(modulus, r)
                apart, step = own - residue, r // common
                times = apart // common % step * pow(modulus // common, -1, step) % step
                exists = exists & (apart % common == 0)
                if exists.any():
                    joined.append((-sign, modulus * step, residue + modulus * times, exists))
            subsets += joined
        for sign, modulus, residue, exists in subsets:
            held = (ends - 1 - residue) // modulus - (starts - 1 - residue) // modulus
            total += sign * int(held[exists].sum())
    return total
