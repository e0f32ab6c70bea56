"""One rank's part of a plan as index tensors: which rows it sends, and which dense attentions it computes.

A row is one (position, KV head), with the query heads of that KV head. Rows of the rank's own shard have the number
position * kv_heads + head, where positions count from the shard's first; received rows are numbered as they arrive.
Where own rows are is kept as (2, *rows), positions and KV heads, so that no pass has to divide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hilbert_lib.pattern import DilatedPattern, rows_in_segment
from hilbert_lib.ring.plan.plan import RingPlan
from hilbert_lib.ring.plan.rows import Message, Rows
from hilbert_lib.ring.plan.segments import BranchPlan

Positions = Callable[[Tensor], Tensor]  # from numbers of rows
# Rows of an answer, and their places in `Layout.touched`: none twice in a layer, so that no sum depends on chance.
Layers = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, eq=False)
class Block:
    """Equal dense attentions of one branch: in each, every query sees every key; with is_causal, in which case queries
    and keys are the same rows, row i sees rows 0 to i."""

    branch: int  # its index
    is_causal: bool
    kv_heads: Tensor  # (heads,)
    queries: Tensor  # (segments, rows, heads), which rows
    keys: Tensor
    own_queries: Tensor | None = None  # (2, segments, rows, heads), where they are in the shard; None if received
    own_keys: Tensor | None = None
    names: Tensor | None = None  # (5, segments, heads), their positions: the last five words of `dropout.named`


@dataclass(frozen=True, eq=False)
class Mail:
    """What one rank exchanges with all by one transport.

    `blocks` are computed from the rows received, and `answers` say how the answers to the rows sent are added up: by
    source and by destination for the ring; for other transports, of all ranks, under None.
    """

    rows: Tensor  # (2, rows), the own rows that it sends, destination after destination
    sent: tuple[int, ...]  # how many rows to each rank
    received: tuple[int, ...]  # how many from each
    blocks: dict[int | None, tuple[Block, ...]]
    answers: dict[int | None, Layers]


@dataclass(frozen=True, eq=False)
class Layout:
    """What one rank does: one fused call on the shard as it lies, and dense blocks.

    The blocks' queries, and the keys of `own`, are places in `touched`; received rows are all other keys, and the
    queries of "all_to_all", which were sent to the rank that computes them.
    """

    start: int  # the shard's first position
    kv_heads: int
    fused: DilatedPattern | None  # the fused call's branches, if there are any
    branches: tuple[int, ...]  # their indices
    touched: Tensor  # (2, rows), the own rows, in ascending order, that take part in more than the fused call
    own: tuple[Block, ...]  # attention inside the shard that the fused call does not compute
    mail: dict[str, Mail]  # by transport

    @property
    def is_fused(self) -> bool:
        """Whether the fused call is all that the rank does."""
        return not self.own and not self.mail


def layout_of(plan: RingPlan, rank: int, device: torch.device) -> Layout:
    """The part of a plan that one rank executes, with its index tensors on a device."""
    here = _RankPlan(plan, rank)
    fused = here.fused()
    own = [block for i in range(len(plan.branches)) if i not in fused for block in here.own_blocks(i)]
    mail = {transport: here.mail(transport) for transport in plan.messages}
    numbers = [block.queries for block in own]
    for transport, one in mail.items():
        numbers.append(one.rows)
        if transport != "all_to_all":
            numbers += [block.queries for blocks in one.blocks.values() for block in blocks]
    touched = _concatenated(numbers).unique()

    def placed(block: Block, *names: str) -> Block:
        places = {name: torch.searchsorted(touched, getattr(block, name)) for name in names}
        places |= {f"own_{name}": here.at(getattr(block, name)) for name in names}
        tensors = {name: x for name, x in (vars(block) | places).items() if isinstance(x, Tensor)}
        return replace(block, **{name: x.to(device) for name, x in tensors.items()})

    for transport, one in mail.items():
        names = () if transport == "all_to_all" else ("queries",)
        places = torch.searchsorted(touched, one.rows)
        answered = enumerate(places.split(one.sent)) if transport == "ring" else [(None, places)]
        mail[transport] = replace(
            one,
            rows=here.at(one.rows).to(device),
            blocks={source: tuple(placed(block, *names) for block in blocks) for source, blocks in one.blocks.items()},
            answers={destination: _layers(some, device) for destination, some in answered},
        )
    return Layout(
        start=here.start,
        kv_heads=plan.sizes.kv_heads,
        fused=_pattern_of(plan.pattern, fused),
        branches=fused,
        touched=here.at(touched).to(device),
        own=tuple(placed(block, "queries", "keys") for block in own),
        mail=mail,
    )


@dataclass(frozen=True, eq=False)
class _RankPlan:
    """A plan as one rank sees it."""

    plan: RingPlan
    rank: int

    @property
    def start(self) -> int:
        return self.plan.starts[self.rank]

    def at(self, numbers: Tensor) -> Tensor:
        """(2, *numbers): positions from the shard's first, and KV heads."""
        kv_heads = self.plan.sizes.kv_heads
        return torch.stack([numbers // kv_heads, numbers % kv_heads])

    def fused(self) -> tuple[int, ...]:
        """The branches whose segments, counted from the shard's first position, are as in the sequence."""
        branches, rules = self.plan.branches, (self.plan.pattern.offsets, self.plan.pattern.mixing)
        aligned = tuple(i for i, branch in enumerate(branches) if self._is_aligned(branch))
        # These rules depend on the number of the branch: a pattern of fewer branches would mean other rows.
        if len(aligned) < len(branches) and ("branch" in rules or "head_groups" in rules):
            return ()
        return aligned

    def _is_aligned(self, branch: BranchPlan) -> bool:
        if branch.transport == "all_to_all" and any(self.rank in segment.ranks for segment in branch.shared):
            return False
        before = self.start % branch.segment_length
        inside_one = before + self.plan.shard_lengths[self.rank] <= branch.segment_length
        return before == 0 or (inside_one and before % branch.dilation_rate == 0)

    def own_blocks(self, number: int) -> Iterator[Block]:
        """Attention of a branch inside the shard."""
        branch = self.plan.branches[number]
        inside, w = branch.local[self.rank], branch.segment_length
        whole = len(inside) // w
        for segments, first, size in ((whole, inside.start, w), (1, inside.start + whole * w, len(inside) % w)):
            steps = torch.arange(segments)[:, None, None] * w * self.plan.sizes.kv_heads
            some = []
            for offset, heads in zip(branch.offsets, branch.kv_heads, strict=True):
                count = rows_in_segment(size, branch.dilation_rate, offset)
                rows = Rows(first + offset, count, branch.dilation_rate, heads)
                some.append(self._square(number, heads, self._numbers(rows) + steps))
            yield from self._joined(some, self._own_positions, self._own_positions)
        if branch.transport != "all_to_all":
            for segment in branch.shared:
                own = segment.rows.get(self.rank, ())
                squares = [self._square(number, x.kv_heads, self._numbers(x)) for x in own]
                yield from self._joined(squares, self._own_positions, self._own_positions)

    def mail(self, transport: str) -> Mail:
        """In numbers of rows, without the answers."""
        messages, ranks = self.plan.messages[transport], range(len(self.plan.starts))
        outgoing = {other: messages[self.rank, other] for other in ranks if (self.rank, other) in messages}
        incoming = {other: messages[other, self.rank] for other in ranks if (other, self.rank) in messages}
        sent, received = (
            tuple(some[other].size if other in some else 0 for other in ranks) for some in (outgoing, incoming)
        )
        rows = _concatenated([self._numbers(piece) for message in outgoing.values() for piece in message.pieces])
        if transport == "ring":
            blocks = {source: self._received_blocks(transport, [message]) for source, message in incoming.items()}
        else:
            blocks = {None: self._received_blocks(transport, list(incoming.values()))}
        return Mail(rows, sent, received, blocks, answers={})

    def _received_blocks(self, transport: str, messages: list[Message]) -> tuple[Block, ...]:
        """What is computed from the rows of some messages, one message after the other."""
        found: dict[tuple[int, int], dict[int, list[tuple[Rows, Tensor]]]] = {}
        positions = _concatenated([_positions(piece) for message in messages for piece in message.pieces])
        queries_at = positions.__getitem__ if transport == "all_to_all" else self._own_positions
        first = 0
        for message in messages:
            tables = []
            for piece in message.pieces:
                tables.append(torch.arange(first, first + piece.size).view(1, piece.count, len(piece.kv_heads)))
                first += piece.size
            for part in message.parts:
                groups = found.setdefault((part.branch, part.segment), {})
                groups.setdefault(part.group, []).append((part.rows, tables[part.piece][part.index]))
        blocks = []
        for (number, index), groups in found.items():
            some = []
            for group, parts in groups.items():
                heads = parts[0][0].kv_heads
                keys = torch.cat([places for _, places in parts], dim=1)
                if transport == "all_to_all":
                    some.append(self._square(number, heads, keys))
                    continue
                (segment,) = (each for each in self.plan.branches[number].shared if each.index == index)
                own = segment.rows[self.rank][group]
                # If causal, later sources send nothing: every key is before every query.
                some.append(Block(number, False, torch.tensor(heads), self._numbers(own), keys))
            blocks += self._joined(some, queries_at, positions.__getitem__)
        return tuple(blocks)

    def _square(self, number: int, kv_heads: range, rows: Tensor) -> Block:
        return Block(number, self.plan.is_causal, torch.tensor(kv_heads), rows, rows)

    def _numbers(self, rows: Rows) -> Tensor:
        """(1, count, heads)."""
        return (_positions(rows) - self.start) * self.plan.sizes.kv_heads + torch.tensor(rows.kv_heads)

    def _own_positions(self, numbers: Tensor) -> Tensor:
        return self.start + numbers // self.plan.sizes.kv_heads

    def _joined(self, blocks: list[Block], queries_at: Positions, keys_at: Positions) -> Iterator[Block]:
        # Blocks with equal numbers of queries and keys as one, with the heads of all; without those that are empty.
        # With a padding mask heads of different offsets stay apart, since it differs between their keys.
        by_offset = self.plan.sizes.padding
        alike: dict[tuple, list[Block]] = {}
        for number, block in enumerate(blocks):
            if block.queries.numel() and block.keys.numel():
                key = block.queries.shape[1], block.keys.shape[1], number if by_offset else 0
                alike.setdefault(key, []).append(block)
        names = ("kv_heads", "queries", "keys")
        for same in alike.values():
            tensors = {name: torch.cat([getattr(one, name) for one in same], dim=-1) for name in names}
            rate = self.plan.pattern.dilation_rates[same[0].branch]
            positions = queries_at(tensors["queries"]), keys_at(tensors["keys"])
            yield replace(same[0], **tensors, names=_names(*positions, rate))


def _names(queries: Tensor, keys: Tensor, rate: int) -> Tensor:
    # `Block.names` of positions (segments, rows, heads). Keys have at most one gap: where they come from ranks before
    # and after, and the own ones are elsewhere.
    first, last, count = keys[:, 0], keys[:, -1], keys.shape[1]
    before = (keys == first[:, None] + rate * torch.arange(count)[:, None]).sum(1)
    missing = (last - first) // rate - (count - 1)
    return torch.stack([torch.full_like(first, rate), queries[:, 0], first, before, missing])


def _positions(rows: Rows) -> Tensor:
    """(1, count, heads)."""
    return (rows.first + torch.arange(rows.count) * rows.step)[None, :, None].expand(-1, -1, len(rows.kv_heads))


def _concatenated(tensors: list[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(x.flatten() for x in tensors)])


def _layers(places: Tensor, device: torch.device) -> Layers:
    # The first of every place, the second of those that come twice, and so on.
    ordered, rows = places.sort(stable=True)
    number = torch.arange(len(places)) - torch.searchsorted(ordered, ordered)
    layers = (rows[number == n] for n in range(int(number.max()) + 1 if len(number) else 0))
    return tuple((layer.to(device), places[layer].to(device)) for layer in layers)


def _pattern_of(pattern: DilatedPattern, branches: tuple[int, ...]) -> DilatedPattern | None:
    if len(branches) == len(pattern.branches):
        return pattern
    if not branches:
        return None
    lengths, rates = zip(*(pattern.branches[i] for i in branches), strict=True)
    return replace(pattern, segment_lengths=lengths, dilation_rates=rates)
