"""The answers of every pattern: the keys of each query, the parts that hold them, and the pattern as plain numbers."""

import operator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

COUNTED_AT_ONCE = 2**24  # pairs of one mask
KEYS_AT_ONCE = 2**20  # of one query, in one mask
POSITIONS = 2**31 - 1  # no sequence is longer
SEPARATORS = frozenset(" ,|")  # characters between the words of a specification
KINDS: dict[str, type["Pattern"]] = {}  # kind, the first word of a specification -> class of the pattern
Specification = tuple[str, tuple[int, ...]]  # a pattern as the operators take it: words, and integers


class Pattern:
    """The keys that each query sees. A pattern is a frozen dataclass, the key of caches.

    A subclass has a `kind` and a method `attends`, or `mask` where a query sees keys through several parts. Keys of all
    parts of a head share one softmax. A key that two parts hold counts twice.
    """

    kind: ClassVar[str]  # the first word of its specification
    # Arguments of `attend` that this kind takes besides those of every kind.
    options: ClassVar[frozenset[str]] = frozenset()
    function: ClassVar[str] = "attend"  # the function that users call with it, for errors
    noun: ClassVar[str]  # its name in errors, by default that of the class

    def __init_subclass__(cls, **rest) -> None:
        super().__init_subclass__(**rest)
        kind = vars(cls).get("kind")
        if not isinstance(kind, str) or not kind.isidentifier():
            raise TypeError(f"{cls.__name__} must have a kind of its own, a word of letters and digits; got {kind!r}")
        registered = KINDS.get(kind, cls)
        if (registered.__module__, registered.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"kind of {cls.__name__} must be a word that no other pattern has; {registered.__name__} has {kind!r}"
            )
        KINDS[kind] = cls
        from_specification.cache_clear()  # a notebook's cell may define its class again
        cls.noun = vars(cls).get("noun", cls.__name__)

    @property
    def length(self) -> int | None:
        """Cells of the grid of a pattern that has a `shape`; None where sequences of any length are served."""
        shape = getattr(self, "shape", None)
        return None if shape is None else prod(shape)

    def of_heads(self, kv_heads: int) -> "Pattern":
        """The pattern for this number of KV heads; ValueError where there is none."""
        return self

    def of_any_heads(self) -> "Pattern":
        """The pattern without its number of KV heads, where all heads see the same keys."""
        return self

    def of_head_range(self, heads: range, kv_heads: int) -> "Pattern":
        """The pattern of some KV heads, one after the other, counted from 0; ValueError where there is none."""
        if type(self).mask is Pattern.mask and type(self).head_parts is Pattern.head_parts:  # all heads are alike
            return self
        raise ValueError(f"pattern must be of one kind that can be split by heads, got a {self.noun}")

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: bool, of positions (...) int64 that broadcast."""
        raise NotImplementedError(f"{type(self).__name__} has no attends")

    def head_parts(self, kv_head: int, kv_heads: int) -> tuple[int, ...]:
        """Numbers of the parts through which a KV head sees keys."""
        return (0,)

    def branch_of(self, part: int) -> tuple[int, int]:
        """The segment length and rate by which dropout numbers the keys of a part: by default one segment of all."""
        return POSITIONS, 1

    def mask(
        self, part: int, queries: Tensor, keys: Tensor, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """Whether each pair of positions attends through one part: (nq, nk) bool of queries (nq,), keys (nk,) int64."""
        attends, shape = self.attends(queries[:, None], keys), (len(queries), len(keys))
        fits = all(
            size in (1, full_size) for size, full_size in zip(reversed(attends.shape), reversed(shape), strict=False)
        )
        if attends.dtype != torch.bool or attends.dim() > 2 or not fits:
            got = f"{attends.dtype} of shape {tuple(attends.shape)}"
            raise TypeError(f"attends of a {self.noun} must be bool of positions that broadcast, {shape}; got {got}")
        attends = attends.expand(shape)
        return attends & (keys <= queries[:, None]) if is_causal else attends

    def batch_mask(
        self, part: int, queries: Tensor, keys: Tensor, *, lengths: Tensor | None = None, **options
    ) -> Tensor:
        """`mask` of each sequence of a batch: (batch, nq, nk) bool of queries (batch, nq) and keys (batch, nk) int64.

        queries and keys may also have a batch of 1, which stands for all sequences.
        lengths: (batch,) int64, tokens of each, where they are fewer than the cells of the grid. options: of `mask`.
        """
        batch = max(len(queries), len(keys))
        rows = zip(queries.expand(batch, -1), keys.expand(batch, -1), strict=True)
        return torch.stack([self.mask(part, *pair, **options) for pair in rows])

    def part_keys(
        self, part: int, query: int, length: int, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """The keys below length that one query sees through one part: (n,) int64 on the CPU, ascending.

        Here masks of some keys at a time find them; a pattern that knows its keys returns them at once.
        """
        row, found = torch.tensor([query], device="cpu"), [torch.empty(0, dtype=torch.int64, device="cpu")]
        for first in range(0, length, KEYS_AT_ONCE):
            keys = torch.arange(first, min(first + KEYS_AT_ONCE, length), device="cpu")
            mask = self.mask(part, row, keys, kv_head=kv_head, kv_heads=kv_heads, is_causal=is_causal)
            found.append(keys[mask[0]])
        return torch.cat(found)

    def pairs_of(self, queries: range, keys: int, *, heads: int, kv_heads: int, is_causal: bool = False) -> int:
        """Pairs of a query and a key that attend in one sequence, over all query heads, counted by masks.

        queries: their positions, one after the other.
        """
        query = torch.arange(queries.start, queries.stop, device="cpu")
        key, total = torch.arange(keys, device="cpu"), 0
        options = {"kv_heads": kv_heads, "is_causal": is_causal}
        for kv_head in range(kv_heads):
            for part in self.head_parts(kv_head, kv_heads):
                for rows in query.split(max(1, COUNTED_AT_ONCE // max(1, keys))):
                    total += int(self.mask(part, rows, key, kv_head=kv_head, **options).sum())
        return heads // kv_heads * total

    def part_count(self, kv_heads: int) -> int:
        """The largest number that `head_parts` returns for any KV head, plus 1."""
        return 1 + max(part for head in range(kv_heads) for part in self.head_parts(head, kv_heads))

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers; `from_specification` makes the pattern of them.

        Fields of the dataclass must be integers, truth values, words, or tuples of one of these, else TypeError.
        """
        words, numbers = [self.kind], []
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value,)
            form = "*" if isinstance(value, tuple) else ""
            if values and all(isinstance(text, str) and not SEPARATORS & set(text) for text in values):
                words.append(form + "=" + ",".join(values))
                continue
            try:
                numbers += [_as_number(value) for value in values]
            except TypeError:
                allowed = (
                    "an integer, a truth value, a word without spaces, commas and bars, or a tuple of one of these"
                )
                raise TypeError(f"{field.name} of a {self.noun} must be {allowed}; got {value!r}") from None
            words.append(f"{form}{len(values)}")
        return " ".join(words), tuple(numbers)

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        # The inverse of `specification`. A dataclass with truth values makes them of 0 and 1 itself.
        values = []
        for word in words:
            form, _, text = word.partition("=")
            if "=" in word:
                value = tuple(text.split(","))
            else:
                count = int(form.strip("*"))
                value, numbers = tuple(numbers[:count]), numbers[count:]
            values.append(value if word.startswith("*") else value[0])
        return cls(*values)


def _as_number(value: object) -> int:
    # A truth value as 0 or 1. Symbols of torch.compile and torch.export stay what they are, as in `checks.integer`.
    if isinstance(value, bool):
        return int(value)
    return value if type(value) in (int, torch.SymInt) else operator.index(value)


@lru_cache(maxsize=256)
def from_specification(words: str, numbers: tuple[int, ...]) -> Pattern:
    """The pattern with this `Pattern.specification`."""
    kind, *rest = words.split(" ")
    return KINDS[kind]._of_words(rest, list(numbers))


# What a `pattern` may be, for errors.
ANY_PATTERN = "a Pattern, such as a DilatedPattern, a Neighbourhood, a PointNeighbourhood or a Union"


def check_pattern(pattern: object, allowed: str = ANY_PATTERN) -> Pattern:
    """The argument; TypeError unless it is a pattern.

    allowed: in words, for callers that do not take every pattern.
    """
    if not isinstance(pattern, Pattern):
        is_several = isinstance(pattern, list | tuple) and any(isinstance(item, Pattern) for item in pattern)
        hint = ": several patterns in one softmax are a Union" if is_several else ""
        raise TypeError(f"pattern must be {allowed}; got {type(pattern).__name__}{hint}")
    if not is_dataclass(pattern):
        raise TypeError(f"{pattern.noun} must be a frozen dataclass, as every pattern is")
    if not isinstance(getattr(pattern, "shape", ()), tuple | None):
        raise TypeError(f"shape of a {pattern.noun} must be a tuple of sides, got {pattern.shape!r}")
    return pattern
