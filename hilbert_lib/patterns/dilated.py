"""Dilated attention: the keys that a query sees, and the work of a call. No tensors of data here."""

from bisect import bisect
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hilbert_lib.checks import grouped, integer, integers, is_symbol, one_of, positive
from hilbert_lib.patterns.pattern import Pattern, Specification
from hilbert_lib.patterns.residues import covered, rows_in_segment

OFFSET_RULES = ("head", "head_block", "branch", "zero")
MIXING_RULES = ("softmax", "head_groups")
PADDING_RULES = ("none", "zeros")
LARGEST = 2**63 - 1  # torch's operators take no larger integer
MOST_BRANCHES = 1024  # branches of a row that a rule makes
FLOP_FORWARD, FLOP_BACKWARD = 4, 10  # FLOP of a pair and an element of head_dim: two and five matrix products


@dataclass(frozen=True)
class Work:
    """Useful work of one call, exactly: a row that a branch uses is read once, and a result is written once."""

    pairs: int  # (query, key), over all batches and query heads; a key seen through two branches counts twice
    flop_forward: int  # FLOP_FORWARD * pairs * head_dim
    flop_backward: int  # FLOP_BACKWARD * pairs * head_dim
    bytes_forward: int  # used rows of q, k and v; all of out and lse
    bytes_backward: int  # used rows of q, k, v, out, dout and lse; all of dq, dk and dv


@dataclass(frozen=True)
class DilatedPattern(Pattern):
    """Dilated attention of LongNet (arXiv 2307.02486): branches of segments w with dilation rates r.

    A position p is in branch i for KV head g when (p mod w_i) mod r_i equals the offset o_i(g). A query attends,
    through each branch that it is in, to all positions of that branch in its own segment.

    Args:
        segment_lengths, dilation_rates: w of each branch in tokens, at least 1, and r, 1 to w; r need not divide w.
        offsets: the residue that KV head g of G takes in branch i: "head" g mod r (the paper), "head_block"
            g div ceil(G / r) (torchscale), "branch" i mod r (fkodom's package), "zero" 0.
        mixing: "softmax": one softmax over the multiset union of the branches' keys, which is the paper's
            weighting by denominators (eqs. 9-10); "head_groups": the KV heads are split into contiguous groups,
            one a branch, and each head uses only its group's branch.
        padding: "none", or "zeros": keys and values of zeros fill every segment up to min(w, length) positions, and
            these up to a multiple of r, as in torchscale. They take part in the softmax of the queries that would see
            them, with score 0; causal queries see none. No other method here counts them.

    Raises:
        TypeError: if lengths or rates are no sequence of integers, or a rule is no string.
        ValueError: if the two tuples differ in length or are empty, a value is out of range, or a rule is unknown.

    >>> pattern = DilatedPattern((4, 8), (1, 2))
    >>> pattern.keys(3, kv_head=1, kv_heads=2, length=8).tolist()
    [0, 1, 1, 2, 3, 3, 5, 7]
    """

    kind: ClassVar[str] = "dilated"
    function: ClassVar[str] = "dilated_attention"
    options: ClassVar[frozenset[str]] = frozenset(
        ("is_causal", "dropout_p", "query_start", "key_start", "kv_ordering", "cu_seqlens", "max_seqlen")
    )

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    offsets: str = "head"
    mixing: str = "softmax"
    padding: str = "none"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, integers(name, getattr(self, name), least=1))
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"dilation_rates must have one rate a segment length ({len(self.segment_lengths)}), "
                f"got {len(self.dilation_rates)}: {self.dilation_rates}"
            )
        for w, r in self.branches:
            if not is_symbol(w) and w > LARGEST:
                raise ValueError(f"segment_lengths must be at most 2^63 - 1, got {w}")
            if r > w:
                raise ValueError(f"dilation_rates must be from 1 to the segment length {w}, got {r}")
        one_of("offsets", self.offsets, OFFSET_RULES)
        one_of("mixing", self.mixing, MIXING_RULES)
        one_of("padding", self.padding, PADDING_RULES)

    @classmethod
    def geometric(
        cls, first: int = 1024, last: int = 2**20, branches: int = 5, rate_ratio: int = 2, **rules: str
    ) -> Self:
        """Segment lengths in a geometric row, rounded down, and rates 1, rate_ratio, rate_ratio^2, ...

        The default is the row of Prov-GigaPath's slide encoder; its rules are offsets="head_block" and padding="zeros".
        There are at least two branches. first, last: the smallest and the largest length. rules: offsets and so on.

        >>> DilatedPattern.geometric().branches
        ((1024, 1), (5792, 2), (32768, 4), (185363, 8), (1048576, 16))
        """
        first, steps = integer("first", first, least=1), integer("branches", branches, least=2, most=MOST_BRANCHES) - 1
        last, ratio = integer("last", last, least=first, most=LARGEST - 1), integer("rate_ratio", rate_ratio, least=1)
        products = (first ** (steps - i) * last**i for i in range(steps + 1))  # of which a length is the root
        lengths = (bisect(range(last + 1), product, key=lambda w: w**steps) - 1 for product in products)
        return cls(tuple(lengths), tuple(ratio**i for i in range(steps + 1)), **rules)

    @classmethod
    def within(
        cls, length: int, *, flop: float, branches: int, heads: int, head_dim: int, kv_heads: int | None = None,
        is_causal: bool = False, **rules: str,
    ) -> tuple[Self, Work]:  # fmt: skip
        """A geometric row up to the whole length whose forward takes at most `flop`, and its `work` on one sequence.

        The rate ratio is the smallest of 2, 4, 8, ... that leaves the first branch an even share of the FLOP. Then the
        first segment is as long as all FLOP allow. ValueError where no row is cheap enough.

        flop: most of `Work.flop_forward`, above 0. branches: at least 2. rules: offsets and so on. The rest: as `work`.

        >>> pattern, work = DilatedPattern.within(65536, flop=1e11, branches=3, heads=8, head_dim=64)
        >>> pattern.branches, f"{work.flop_forward:.3g}"
        (((630, 1), (6425, 8), (65536, 64)), '9.99e+10')
        """
        length = integer("length", length, least=1)
        branches = integer("branches", branches, least=2, most=MOST_BRANCHES)
        head_dim, (heads, kv_heads) = integer("head_dim", head_dim, least=1), grouped(heads, kv_heads)
        sizes = {"heads": heads, "kv_heads": kv_heads, "is_causal": is_causal}
        fits = min(int(positive("flop", flop) / (FLOP_FORWARD * head_dim * heads * length * branches)), length)
        ratio = 2

        def cost(first: int) -> int:
            row = cls.geometric(first, length, branches, ratio, **rules)
            return FLOP_FORWARD * head_dim * row.pairs(length, **sizes)

        while fits and ratio ** (branches - 1) <= length and cost(fits) > flop:
            ratio *= 2
        if not fits or ratio ** (branches - 1) > length:
            of = f"{branches} branches over {length} tokens"
            least = "more" if fits else f"at least {FLOP_FORWARD * head_dim * heads * length * branches}"
            raise ValueError(f"flop must be {least} for {of}, got {flop:g}")
        longest = bisect(range(length + 1), flop, lo=fits + 1, key=cost) - 1
        pattern = cls.geometric(longest, length, branches, ratio, **rules)
        return pattern, pattern.work(length, head_dim=head_dim, **sizes)

    @property
    def specification(self) -> Specification:
        """The pattern as words and integers."""
        words = f"dilated {self.offsets} {self.mixing} {self.padding}"
        return words, (*self.segment_lengths, *self.dilation_rates)

    @classmethod
    def _of_words(cls, words: list[str], numbers: list[int]) -> Self:
        count = len(numbers) // 2
        return cls(tuple(numbers[:count]), tuple(numbers[count:]), *words)

    def of_heads(self, kv_heads: int) -> Self:
        """The pattern itself; ValueError where "head_groups" has fewer KV heads than branches."""
        self.check_heads(kv_heads)
        return self

    def of_head_range(self, heads: range, kv_heads: int) -> Self:
        """The pattern itself, where head n of these has the branches and offsets of head n of so many heads.

        >>> DilatedPattern((4, 8), (1, 2)).of_head_range(range(2, 4), kv_heads=4).offsets
        'head'
        """
        if self.mixing == "softmax" or len(heads) == kv_heads:
            numbers, count = range(len(self.branches)), len(heads)
            own = [[self.offset(n, head, kv_heads) for n in numbers] for head in heads]
            if own == [[self.offset(n, head, count) for n in numbers] for head in range(count)]:
                return self
        raise ValueError(
            f"heads {heads.start} to {heads.stop - 1} of {kv_heads} cannot be split off: with offsets={self.offsets!r} "
            f"and mixing={self.mixing!r} they have other offsets or branches than {len(heads)} heads alone; "
            "offsets='zero' and 'branch' with mixing='softmax' serve"
        )

    def head_parts(self, kv_head: int, kv_heads: int) -> tuple[int, ...]:
        """The branches of a KV head."""
        return self.head_branches(kv_head, kv_heads)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The (segment length, dilation rate) of each branch."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def branch_of(self, part: int) -> tuple[int, int]:
        """The (segment length, dilation rate) of a branch; for a number without one, those of any pattern."""
        return self.branches[part] if part < len(self.branches) else super().branch_of(part)

    def offset(self, branch: int, kv_head: int, kv_heads: int) -> int:
        """The residue that a KV head takes inside the segments of a branch.

        TypeError or ValueError if a branch, head, position or size is no integer or out of range, as in every method
        here. Positions in a tensor are not checked.

        >>> [DilatedPattern((8,), (4,), offsets="head_block").offset(0, g, 6) for g in range(6)]
        [0, 0, 1, 1, 2, 2]
        """
        rate = self.dilation_rates[self._branch(branch)]
        kv_heads = self.check_heads(kv_heads)
        kv_head = integer("kv_head", kv_head, least=0, most=kv_heads - 1)
        if self.offsets == "head":
            return kv_head % rate
        if self.offsets == "head_block":
            return kv_head // -(-kv_heads // rate)
        return branch % rate if self.offsets == "branch" else 0

    def head_branches(self, kv_head: int, kv_heads: int) -> tuple[int, ...]:
        """The branches that a KV head uses: all branches, or that of its group.

        >>> [DilatedPattern((4, 8), (1, 2), mixing="head_groups").head_branches(g, 3) for g in range(3)]
        [(0,), (0,), (1,)]
        """
        kv_heads = self.check_heads(kv_heads)
        kv_head = integer("kv_head", kv_head, least=0, most=kv_heads - 1)
        if self.mixing == "softmax":
            return tuple(range(len(self.branches)))
        # As torch.tensor_split sizes them: the first `larger` groups have one head more.
        size, larger = divmod(kv_heads, len(self.branches))
        return (max(kv_head // (size + 1), (kv_head - larger) // size),)

    def branch_heads(self, branch: int, kv_heads: int) -> tuple[int, ...]:
        """The KV heads that use a branch: all heads, or the branch's group."""
        branch = self._branch(branch)
        return tuple(g for g in range(self.check_heads(kv_heads)) if branch in self.head_branches(g, kv_heads))

    def check_heads(self, kv_heads: int) -> int:
        """kv_heads as an int; raises ValueError where "head_groups" has fewer KV heads than branches."""
        kv_heads = integer("kv_heads", kv_heads, least=1)
        if self.mixing == "head_groups" and kv_heads < len(self.branches):
            raise ValueError(
                f"mixing='head_groups' needs at least one KV head a branch ({len(self.branches)}), got {kv_heads}"
            )
        return kv_heads

    def _branch(self, branch: int) -> int:
        return integer("branch", branch, least=0, most=len(self.branches) - 1)

    def offset_heads(self, branch: int, kv_heads: int) -> dict[int, slice]:
        """offset -> KV heads of a branch with it, as a slice, which one strided view can hold.

        >>> DilatedPattern((8,), (2,)).offset_heads(0, kv_heads=5)
        {0: slice(0, 5, 2), 1: slice(1, 4, 2)}
        """
        heads: dict[int, list[int]] = {}
        for g in self.branch_heads(branch, kv_heads):
            heads.setdefault(self.offset(branch, g, kv_heads), []).append(g)
        # Every rule puts heads of one offset at a constant distance.
        return {o: slice(g[0], g[-1] + 1, g[1] - g[0] if len(g) > 1 else 1) for o, g in heads.items()}

    def contains(self, branch: int, positions: Tensor, kv_head: int, kv_heads: int) -> Tensor:
        """Whether positions are in a branch for a KV head: bool, shaped like positions."""
        offset = self.offset(branch, kv_head, kv_heads)
        w, r = self.branches[branch]
        return positions % w % r == offset

    def mask(
        self, branch: int, queries: Tensor, keys: Tensor, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """Whether each pair of positions attends through a branch: (nq, nk) bool of queries (nq,) and keys (nk,) int64.

        All are False if the head does not use the branch. With is_causal no query attends to a later key.

        >>> p = torch.arange(4)
        >>> DilatedPattern((4,), (2,)).mask(0, p, p, kv_head=0, kv_heads=1).int().tolist()
        [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
        """
        options = {"kv_head": kv_head, "kv_heads": kv_heads, "is_causal": is_causal}
        return self.batch_mask(branch, queries[None], keys[None], **options)[0]

    def batch_mask(
        self, branch: int, queries: Tensor, keys: Tensor, *, kv_head: int, kv_heads: int, is_causal: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`mask` of each sequence of a batch: (batch, nq, nk) bool of queries (batch, nq) and keys (batch, nk)."""
        w = self.segment_lengths[self._branch(branch)]
        if branch not in self.head_branches(kv_head, kv_heads):
            return torch.zeros(*queries.shape, keys.shape[1], dtype=torch.bool, device=queries.device)
        queries, keys = queries[:, :, None], keys[:, None]
        inside = self.contains(branch, queries, kv_head, kv_heads) & self.contains(branch, keys, kv_head, kv_heads)
        inside &= queries // w == keys // w
        if is_causal:
            inside &= keys <= queries
        return inside

    def masks(self, queries: Tensor, keys: Tensor, **options) -> Tensor:
        """`mask` of every branch: (branches, nq, nk) bool. Options are those of `mask`."""
        return torch.stack([self.mask(i, queries, keys, **options) for i in range(len(self.branches))])

    def keys(self, position: int, *, kv_head: int, kv_heads: int, length: int, is_causal: bool = False) -> Tensor:
        """The keys that the query at a position below length sees: (keys,) int64, sorted, empty if it is in no branch.

        A key of two branches stands twice. With is_causal keys after the query are left out.
        """
        length = integer("length", length, least=1, most=LARGEST)
        position = integer("position", position, least=0, most=length - 1)
        options = {"kv_head": kv_head, "kv_heads": kv_heads, "is_causal": is_causal}
        branches = self.head_branches(kv_head, kv_heads)
        return torch.cat([self.part_keys(branch, position, length, **options) for branch in branches]).sort().values

    def part_keys(
        self, branch: int, query: int, length: int, *, kv_head: int, kv_heads: int, is_causal: bool = False
    ) -> Tensor:
        """The keys below length that a query sees through a branch that the head uses: (n,) int64, ascending."""
        w, r = self.branches[branch]
        offset, first = self.offset(branch, kv_head, kv_heads), query // w * w
        if (query - first) % r != offset:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        end = min(first + w, query + 1 if is_causal else length, length)
        return torch.arange(first + offset, end, r, device="cpu")

    def covered(self, length: int, kv_head: int, kv_heads: int) -> int:
        """Number of positions in at least one branch of a KV head.

        >>> DilatedPattern((4, 8), (2, 4)).covered(10**9, kv_head=0, kv_heads=1)
        500000000
        """
        return covered(integer("length", length, least=0), frozenset(self._used_branches(kv_head, kv_heads)))

    def most_keys(self, length: int, kv_head: int, kv_heads: int) -> int:
        """The most keys that a query of a KV head sees in sequences up to a length.

        >>> DilatedPattern((4, 8), (1, 3)).most_keys(16, kv_head=0, kv_heads=1)
        7
        """
        length, used = integer("length", length, least=0), self._used_branches(kv_head, kv_heads)
        return sum(rows_in_segment(min(w, length), r, offset) for w, r, offset in used)

    def _used_branches(self, kv_head: int, kv_heads: int) -> list[tuple[int, int, int]]:
        """(segment length, dilation rate, offset) of the branches that a KV head uses."""
        used = self.head_branches(kv_head, kv_heads)
        return [(*self.branches[i], self.offset(i, kv_head, kv_heads)) for i in used]

    def pairs(
        self, length: int, *, heads: int, kv_heads: int | None = None, is_causal: bool = False, at: range | None = None
    ) -> int:
        """(query, key) pairs of one sequence over all query heads, in closed form: any length, at once.

        at: positions of the queries, by default all.

        >>> DilatedPattern((4, 8), (1, 2)).pairs(16, heads=2)
        192
        """
        length, (heads, kv_heads) = integer("length", length, least=0), grouped(heads, kv_heads)
        at = range(length) if at is None else at
        if at and not (at[0] >= 0 and at[-1] < length and at.step == 1):
            raise ValueError(f"at must be positions from 0 to {length - 1}, one after the other, got {at}")
        total = 0
        for branch in range(len(self.branches)) if at else ():
            total += self._branch_pairs(branch, length, kv_heads, is_causal, at.stop)
            total -= self._branch_pairs(branch, length, kv_heads, is_causal, at.start)
        return heads // kv_heads * total

    def _branch_pairs(self, branch: int, length: int, kv_heads: int, is_causal: bool, end: int) -> int:
        # Pairs of the queries before position `end`.
        w, r = self.branches[branch]
        total = 0
        for o, group in self.offset_heads(branch, kv_heads).items():
            for segments, size, keys in ((end // w, w, w), (1, end % w, min(w, length - end // w * w))):
                n = rows_in_segment(size, r, o)
                pairs = n * (n + 1) // 2 if is_causal else n * rows_in_segment(keys, r, o)
                total += len(range(kv_heads)[group]) * segments * pairs
        return total

    def work(
        self,
        length: int,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        batch: int = 1,
        element_size: int = 2,
        is_causal: bool = False,
    ) -> Work:
        """Useful FLOP and bytes of a call on `batch` sequences of `length` tokens, exactly: with tails and offsets.

        Where all is aligned and not causal, flop_forward is 4 * batch * heads * N * d * sum_i(w_i / r_i^2). By default
        there are as many KV heads as query heads. An element of q, k, v and out has element_size bytes, one of lse 4,
        or 8 if these have.

        >>> DilatedPattern((4,), (2,)).work(8, heads=2, head_dim=16).flop_forward
        1024
        """
        length, (heads, kv_heads) = integer("length", length, least=0), grouped(heads, kv_heads)
        head_dim, batch = integer("head_dim", head_dim, least=1), integer("batch", batch, least=0)
        element_size = integer("element_size", element_size, least=1)
        pairs = batch * self.pairs(length, heads=heads, kv_heads=kv_heads, is_causal=is_causal)
        kv_rows = batch * sum(self.covered(length, g, kv_heads) for g in range(kv_heads))
        q_rows = kv_rows * (heads // kv_heads)
        row, lse = head_dim * element_size, max(4, element_size)
        all_q, all_kv = batch * length * heads, batch * length * kv_heads
        return Work(
            pairs=pairs,
            flop_forward=FLOP_FORWARD * pairs * head_dim,
            flop_backward=FLOP_BACKWARD * pairs * head_dim,
            bytes_forward=(q_rows + 2 * kv_rows + all_q) * row + all_q * lse,
            bytes_backward=(3 * q_rows + 2 * kv_rows + all_q + 2 * all_kv) * row + q_rows * lse,
        )

    def describe(self, length: int | None = None, *, heads: int | None = None, kv_heads: int | None = None) -> str:
        """The branches as a table: keys that a query sees, and, for a length, segments, tail and share of the pairs.

        Keys are those of a whole segment, or of a shorter sequence, for a head with the branch's smallest offset. The
        tail is the length of a last segment that is shorter than the others. By default there are as many KV heads as
        heads, and 1 head, or one a branch for "head_groups".

        >>> print(DilatedPattern((4, 8), (1, 2)).describe(16, heads=2))
        offsets='head', mixing='softmax'
        branch  segment_length  dilation_rate  r divides w  keys  segments  tail  share of pairs
             0               4              1          yes     4         4     0            66.7%
             1               8              2          yes     4         2     0            33.3%
        """
        if heads is None and kv_heads is None:
            heads = len(self.branches) if self.mixing == "head_groups" else 1
        _, kv_heads = grouped(kv_heads if heads is None else heads, kv_heads)
        length = None if length is None else integer("length", length, least=1)
        titles = ["branch", "segment_length", "dilation_rate", "r divides w", "keys"]
        titles += ["segments", "tail", "share of pairs"] if length is not None else []
        rows = []
        total = self.pairs(length, heads=kv_heads) if length else 0
        for branch, (w, r) in enumerate(self.branches):
            o = min(self.offset_heads(branch, kv_heads))
            row = [branch, w, r, "yes" if w % r == 0 else "no", rows_in_segment(min(w, length or w), r, o)]
            if length is not None:
                share = self._branch_pairs(branch, length, kv_heads, False, length) / total if total else 0.0
                row += [-(-length // w), length % w, f"{share:.1%}"]
            rows.append([str(cell) for cell in row])
        width = [max(len(line[c]) for line in [titles, *rows]) for c in range(len(titles))]
        lines = ["  ".join(cell.rjust(n) for cell, n in zip(line, width, strict=True)) for line in [titles, *rows]]
        rules = f"offsets={self.offsets!r}, mixing={self.mixing!r}"
        rules += f", padding={self.padding!r}" if self.padding != "none" else ""
        return "\n".join([rules, *lines])


def check_dilated(pattern: object, prefix: str = "") -> DilatedPattern:
    """The argument; TypeError unless it is a DilatedPattern.

    prefix: of the names of other functions, as "ring_".
    """
    if not isinstance(pattern, DilatedPattern):
        hint = f": call {prefix}attend" if isinstance(pattern, Pattern) else ""
        if hint and pattern.noun == "Neighbourhood":
            hint = f": call {prefix}neighbourhood_attention, or {prefix}attend"
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}{hint}")
    return pattern
