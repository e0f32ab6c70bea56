"""One rank's part of a plan as index tensors: which rows it sends, and which dense attentions it computes.

A row is one (position, KV head), with the query heads of that KV head; its number is position * kv_heads + head. Index
tensors hold places of rows: in the own rows that the layout touches, or among those received, in the order of arrival.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hilbert_lib.attention.dropout import Branch
from hilbert_lib.patterns.all_pairs import one_segment
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.plan.plan import RingPlan
from hilbert_lib.ring.plan.rows import Message, Rows, rows_between
from hilbert_lib.ring.plan.segments import BranchPlan

Find = Callable[[Tensor], Tensor]  # the places of rows, from their numbers
# Rows of an answer, and their places in `Layout.touched`: none twice in a layer, so that no sum depends on chance. One
# layer has all rows, as a slice, which costs no copy.
Layers = tuple[tuple[Tensor | slice, Tensor], ...]


@dataclass(frozen=True, eq=False)
class Block:
    """Equal dense attentions of one branch: in each, every query sees every key; with is_causal, in which case queries
    and keys are the same rows, row i sees rows 0 to i."""

    branch: Branch  # its name in dropout
    is_causal: bool
    queries: Tensor  # (segments, rows, heads), their places
    keys: Tensor
    names: Tensor  # (6, segments, heads), KV heads and positions: the last six words of `dropout.name_table`

    @cached_property
    def pattern(self) -> DilatedPattern:
        """One segment that holds all."""
        return one_segment(self.queries.shape[1], self.keys.shape[1])


@dataclass(frozen=True, eq=False)
class Mail:
    """The exchange of one rank by one transport: by source and destination round the ring, else under None."""

    rows: Tensor  # places of the own rows that it sends, destination after destination
    sent: tuple[int, ...]  # how many rows to each rank
    received: tuple[int, ...]  # how many from each
    blocks: dict[int | None, tuple[Block, ...]]  # by source, what is computed from the rows received
    answers: dict[int | None, Layers]  # by destination, how the answers to the rows sent are added up


@dataclass(frozen=True, eq=False)
class Layout:
    """The work of one rank: one fused call on the shard as it lies, and dense blocks.

    Of received rows are the keys of blocks in `mail` and, by "all_to_all", their queries; all else is in `touched`.
    """

    start: int  # the shard's first position
    length: int  # of the whole sequence
    kv_heads: int
    fused: DilatedPattern | None  # the fused call's branches, if there are any
    branches: tuple[int, ...]  # their names in dropout
    # (2, rows), positions in the shard and KV heads of the own rows that may take part in more than the fused call
    touched: Tensor
    own_blocks: tuple[Block, ...]  # attention inside the shard that the fused call does not compute
    mail: dict[str, Mail]  # by transport

    @property
    def is_fused(self) -> bool:
        """Whether the fused call is all that the rank does."""
        return not self.own_blocks and not self.mail


def layout_of(plan: RingPlan, rank: int, device: torch.device, names: Sequence[int] | None = None) -> Layout:
    """The part of a plan that one rank executes, with its index tensors on a device.

    names: of the branches, in the dropout of a larger call; by default their indices.
    """
    names = range(len(plan.branches)) if names is None else names
    rank_plan = _RankPlan(plan, rank, device, names)
    fused, kv_heads = plan.fused(rank), plan.sizes.kv_heads
    inside, touched = [], []
    for number, branch in enumerate(plan.branches):
        local = [] if number in fused else rank_plan.local_rows(branch)
        shared = [list(map(rank_plan.numbers, segment.rows.get(rank, ()))) for segment in branch.shared]
        touched += [rows for groups in (*local, *shared) for rows in groups]
        if number in fused or branch.transport == "all_to_all":
            shared = []
        inside += [(number, [(rows, rows) for rows in groups]) for groups in (*local, *shared)]
    touched = _concatenated(touched).unique()
    find = _finder(touched)
    return Layout(
        start=rank_plan.start,
        length=sum(plan.shard_lengths),
        kv_heads=kv_heads,
        fused=_pattern_of(plan.pattern, fused),
        branches=tuple(names[number] for number in fused),
        touched=torch.stack([touched // kv_heads - rank_plan.start, touched % kv_heads]).to(device),
        own_blocks=tuple(block for number, pairs in inside for block in rank_plan.blocks(number, pairs, find, find)),
        mail={transport: rank_plan.mail(transport, find) for transport in plan.messages},
    )


def parts_of(layout: Layout, rows: int, batch: int, heads: int) -> Iterator[tuple[tuple, tuple, dict]]:
    """The calls of a rank of so many rows: the shapes of q and of k without head_dim, and the options."""
    group = heads // layout.kv_heads
    if layout.fused is not None and rows:
        yield (batch, rows, heads), (batch, rows, layout.kv_heads), {"pattern": layout.fused}
    received = (block for mail in layout.mail.values() for blocks in mail.blocks.values() for block in blocks)
    for block in (*layout.own_blocks, *received):
        shapes = []
        for rows_of, per_row in ((block.queries, group), (block.keys, 1)):
            segments, count, kv_heads = rows_of.shape
            shapes.append((segments * batch, count, kv_heads * per_row))
        yield *shapes, {"pattern": block.pattern, "is_causal": block.is_causal}


@dataclass(frozen=True, eq=False)
class _RankPlan:
    """A plan as one rank sees it."""

    plan: RingPlan
    rank: int
    device: torch.device
    branch_names: Sequence[int]

    @property
    def start(self) -> int:
        return self.plan.starts[self.rank]

    def numbers(self, rows: Rows) -> Tensor:
        """(1, count, heads)."""
        positions = rows.first + torch.arange(rows.count) * rows.step
        return positions[None, :, None] * self.plan.sizes.kv_heads + torch.tensor(rows.kv_heads, dtype=torch.int64)

    def local_rows(self, branch: BranchPlan) -> list[list[Tensor]]:
        """Numbers of rows in segments inside the shard, by offset: of the full segments, then of a short last one."""
        inside, w = branch.local[self.rank], branch.segment_length
        full_segments, by_length = len(inside) // w, []
        for segments, first in ((full_segments, inside[:w]), (1, inside[full_segments * w :])):
            steps = torch.arange(segments)[:, None, None] * w * self.plan.sizes.kv_heads
            groups = (
                rows_between(first, first.start, branch.dilation_rate, *offset_heads)
                for offset_heads in branch.groups.items()
            )
            by_length.append([self.numbers(rows) + steps for rows in groups])
        return by_length

    def mail(self, transport: str, find_own: Find) -> Mail:
        """The exchange of the rank by one transport."""
        messages, ranks = self.plan.messages[transport], range(len(self.plan.starts))
        outgoing = [messages.get((self.rank, peer), Message()) for peer in ranks]
        incoming = [messages.get((peer, self.rank), Message()) for peer in ranks]
        places, sent = find_own(self._numbers_in(outgoing)), tuple(message.size for message in outgoing)
        by_source, by_destination = {None: ranks}, {None: places}
        if transport == "ring":
            by_source, by_destination = {source: [source] for source in ranks}, dict(enumerate(places.split(sent)))
        blocks = {}
        for source, peers in by_source.items():
            find = _finder(self._numbers_in([incoming[peer] for peer in peers]))
            blocks[source] = tuple(self._received_blocks(transport, peers, find, find_own))
        return Mail(
            rows=places.to(self.device),
            sent=sent,
            received=tuple(message.size for message in incoming),
            blocks=blocks,
            answers={destination: _layers(rows, self.device) for destination, rows in by_destination.items()},
        )

    def _numbers_in(self, messages: list[Message]) -> Tensor:
        return _concatenated([self.numbers(piece) for message in messages for piece in message.pieces])

    def _received_blocks(self, transport: str, sources: Iterable[int], find: Find, find_own: Find) -> Iterator[Block]:
        # The blocks computed from the rows of `sources`, which lie one after the other.
        exchanged = transport == "all_to_all"
        for number, branch in enumerate(self.plan.branches):
            for segment in branch.shared if branch.transport == transport else ():
                keys: dict[int, list[Tensor]] = {}
                for source in sources:
                    crossing = segment.crossing(source, self.rank, transport, self.plan.is_causal)
                    for group, rows in crossing.items():
                        keys.setdefault(group, []).append(self.numbers(rows))
                pairs = []
                for group, pieces in keys.items():
                    joined = torch.cat(pieces, dim=1)
                    pairs.append((joined if exchanged else self.numbers(segment.rows[self.rank][group]), joined))
                yield from self.blocks(number, pairs, find if exchanged else find_own, find)

    def blocks(
        self, number: int, pairs: list[tuple[Tensor, Tensor]], find_queries: Find, find_keys: Find
    ) -> Iterator[Block]:
        """Attention of a branch, from the numbers of its queries and keys, (segments, rows, heads), by offset: as one
        block those of equal sizes, unless a padding mask differs between them."""
        # Keys in another table than the queries all lie before them where it is causal: no mask is needed.
        is_causal = self.plan.is_causal and find_queries is find_keys
        alike: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        for group, (queries, keys) in enumerate(pairs):
            if queries.numel() and keys.numel():
                key = queries.shape[1], keys.shape[1], group if self.plan.sizes.padding else 0
                alike.setdefault(key, []).append((queries, keys))
        for same in alike.values():
            queries, keys = (torch.cat(numbers, -1) for numbers in zip(*same, strict=True))
            tensors = find_queries(queries), find_keys(keys), self._names(number, queries, keys)
            branch = self.plan.branches[number]
            name = Branch(self.branch_names[number], branch.segment_length, branch.dilation_rate)
            yield Block(name, is_causal, *(x.to(self.device) for x in tensors))

    def _names(self, number: int, queries: Tensor, keys: Tensor) -> Tensor:
        # `Block.names` of rows' numbers (segments, rows, heads). Keys have at most one gap: where they come from ranks
        # before and after, and the own ones are elsewhere.
        kv_heads, rate, count = self.plan.sizes.kv_heads, self.plan.branches[number].dilation_rate, keys.shape[1]
        heads, first_query, keys = queries[:, 0] % kv_heads, queries[:, 0] // kv_heads, keys // kv_heads
        first, last = keys[:, 0], keys[:, -1]
        before = (keys == first[:, None] + rate * torch.arange(count)[:, None]).sum(1)
        missing = (last - first) // rate - (count - 1)
        return torch.stack([heads, torch.full_like(first, rate), first_query, first, before, missing])


def _concatenated(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(x.flatten() for x in tensors)])


def _finder(table: Tensor) -> Find:
    # A function from numbers that the table holds to their places in it.
    ordered, places = table.sort(stable=True)
    return lambda numbers: places[torch.searchsorted(ordered, numbers)]


def _layers(places: Tensor, device: torch.device) -> Layers:
    # The first of every place, the second of those that come twice, and so on.
    if len(places) and len(places.unique()) == len(places):
        return ((slice(None), places.to(device)),)
    ordered, rows = places.sort(stable=True)
    number = torch.arange(len(places)) - torch.searchsorted(ordered, ordered)
    layers = (rows[number == n] for n in range(int(number.max()) + 1 if len(number) else 0))
    return tuple((layer.to(device), places[layer].to(device)) for layer in layers)


def _pattern_of(pattern: DilatedPattern, branches: tuple[int, ...]) -> DilatedPattern | None:
    if not branches:
        return None
    lengths, rates = zip(*(pattern.branches[i] for i in branches), strict=True)
    # Zero keys are known from the whole sequence: `passes` adds them in the end.
    return replace(pattern, segment_lengths=lengths, dilation_rates=rates, padding="none")
