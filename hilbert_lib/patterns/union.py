"""A union of patterns over the same tokens, with one softmax over the keys of all patterns."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from hilbert_lib.patterns.pattern import Pattern, Specification, check_pattern, from_specification
from hilbert_lib.patterns.points import PointNeighbourhood

IN_A_UNION = "a Pattern of sequences or grids, such as a DilatedPattern or a Neighbourhood"


@dataclass(frozen=True)
class Union(Pattern):
    """Each query sees the keys of several patterns in one softmax; a key of two patterns counts twice.

    LongNet's branches (arXiv 2307.02486) are such a union along a sequence. Two neighbourhoods, a near and a dilated
    one, are the same idea on a grid.

    Args:
        patterns: at least one; all for sequences, or all on a grid of one shape. Unions among them are taken apart.

    Raises:
        TypeError: if one is no pattern.
        ValueError: if there is none, or they are of different grids, or one has padding="zeros".

    >>> import torch
    >>> from hilbert_lib import Neighbourhood, attend
    >>> near_and_far = Union((Neighbourhood((8,), 3), Neighbourhood((8,), 3, dilation=2)))
    >>> x = torch.ones(1, 8, 2, 4)
    >>> attend(x, x, x, near_and_far).shape
    torch.Size([1, 8, 2, 4])
    """

    kind: ClassVar[str] = "union"

    patterns: tuple[Pattern, ...]

    def __init__(self, patterns: Iterable[Pattern], *others: object) -> None:
        if others:
            raise TypeError(f"patterns must be one tuple, as in Union((a, b)); got {1 + len(others)} arguments")
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise TypeError(f"patterns must be a tuple of patterns, got {type(patterns).__name__}")
        flat: list[Pattern] = []
        for pattern in patterns:
            flat += pattern.patterns if isinstance(pattern, Union) else [check_pattern(pattern, IN_A_UNION)]
        if not flat:
            raise ValueError("patterns must hold at least one pattern, got none")
        for pattern in flat:
            if isinstance(pattern, PointNeighbourhood):
                raise TypeError(f"patterns must hold no PointNeighbourhood, which has no union yet; got {pattern}")
        shapes = [getattr(pattern, "shape", None) for pattern in flat]
        for pattern, shape in zip(flat, shapes, strict=True):
            if shape != shapes[0]:
                raise ValueError(f"patterns must be for sequences, or on one grid; got {flat[0]} and {pattern}")
            if getattr(pattern, "padding", "none") != "none":
                raise ValueError(f"patterns must have padding='none' in a union, got {pattern}")
        object.__setattr__(self, "patterns", tuple(flat))

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Sides of the grid; None for sequences."""
        return getattr(self.patterns[0], "shape", None)

    @property
    def options(self) -> frozenset[str]:
        """Arguments of `attend` that all parts take. A bias is not among them: each part would need its own."""
        return frozenset.intersection(*(pattern.options for pattern in self.patterns)) - {"bias"}

    def of_heads(self, kv_heads: int) -> Self:
        """The union of the patterns for this number of KV heads."""
        return Union(tuple(pattern.of_heads(kv_heads) for pattern in self.patterns))

    def of_any_heads(self) -> Self:
        """The union of the patterns without their number of KV heads."""
        return Union(tuple(pattern.of_any_heads() for pattern in self.patterns))

    def of_head_range(self, heads: range, kv_heads: int) -> Self:
        """The union of the patterns of some KV heads."""
        return Union(tuple(pattern.of_head_range(heads, kv_heads) for pattern in self.patterns))

    def head_parts(self, kv_head: int, kv_heads: int) -> tuple[int, ...]:
        """The parts of all patterns for a KV head: part i of pattern n of N is i * N + n."""
        count = len(self.patterns)
        return tuple(
            part * count + number
            for number, pattern in enumerate(self.patterns)
            for part in pattern.head_parts(kv_head, kv_heads)
        )

    def branch_of(self, part: int) -> tuple[int, int]:
        """The segment length and rate by which dropout numbers the keys of a part.

        >>> from hilbert_lib import DilatedPattern
        >>> union = Union((DilatedPattern((4, 8), (1, 2)), DilatedPattern((6,), (3,))))
        >>> [union.branch_of(part) for part in range(3)]
        [(4, 1), (6, 3), (8, 2)]
        """
        pattern_part, number = divmod(part, len(self.patterns))
        return self.patterns[number].branch_of(pattern_part)

    def mask(self, part: int, queries: Tensor, keys: Tensor, **options) -> Tensor:
        """Whether each pair of positions attends through one part; options as in `Pattern.mask`."""
        pattern_part, number = divmod(part, len(self.patterns))
        return self.patterns[number].mask(pattern_part, queries, keys, **options)

    def batch_mask(self, part: int, queries: Tensor, keys: Tensor, **options) -> Tensor:
        """`mask` of each sequence of a batch; options as in `Pattern.batch_mask`."""
        pattern_part, number = divmod(part, len(self.patterns))
        return self.patterns[number].batch_mask(pattern_part, queries, keys, **options)

    def part_keys(self, part: int, query: int, length: int, **options) -> Tensor:
        """The keys that a query sees through one part; options as in `Pattern.part_keys`."""
        pattern_part, number = divmod(part, len(self.patterns))
        return self.patterns[number].part_keys(pattern_part, query, length, **options)

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key through any of the patterns."""
        attends = self.patterns[0].attends(query, key)
        for pattern in self.patterns[1:]:
            attends = attends | pattern.attends(query, key)
        return attends

    @property
    def specification(self) -> Specification:
        """The union as words and integers: first the number of integers of each pattern, then all integers."""
        specifications = [pattern.specification for pattern in self.patterns]
        words = "|".join(text for text, _ in specifications)
        numbers = [number for _, text in specifications for number in text]
        return f"union {words}", (*(len(text) for _, text in specifications), *numbers)

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        texts = " ".join(words).split("|")
        counts, rest, patterns = numbers[: len(texts)], numbers[len(texts) :], []
        for text, count in zip(texts, counts, strict=True):
            patterns.append(from_specification(text, tuple(rest[:count])))
            rest = rest[count:]
        return cls(tuple(patterns))
