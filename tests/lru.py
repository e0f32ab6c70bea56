"""A cache that forgets the least recently used, for the tests of models of caches."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class Lru:
    """Units that are kept, of which there are at most so many."""

    def __init__(self, capacity: int):
        self.capacity, self.kept = capacity, OrderedDict()

    def misses(self, unit: Hashable) -> bool:
        """Whether a unit has to be read; from here on it is the newest."""
        is_missing = unit not in self.kept
        self.kept[unit] = None
        self.kept.move_to_end(unit)
        if len(self.kept) > self.capacity:
            self.kept.popitem(last=False)
        return is_missing

    def count_misses(self, units: Iterable[Hashable]) -> int:
        return sum(map(self.misses, units))
