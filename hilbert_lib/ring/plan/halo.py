"""The rows of k and v that travel between ranks that share a grid, and their cost: pure, without a process group."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from hilbert_lib.attention.validation import as_pattern
from hilbert_lib.checks import grouped
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.ring.plan.cost import Sizes, amount, by_rank
from hilbert_lib.ring.plan.shards import Box, Rectangles, Runs, hull, interior, line_reached

Shards = Rectangles | Runs


@dataclass(frozen=True)
class HaloCost:
    """The cost of a plan for one rank."""

    cells: int  # that it holds
    # Bytes of rows of k and v that cross between ranks, and of their gradients; without a call's header.
    sent_forward: int
    received_forward: int
    sent_backward: int
    received_backward: int
    interior: int  # queries that are computed while rows travel
    border: int  # the others
    # Bytes at the highest point: the call's tensors, what is sent and received, and what the border is computed from.
    # Index tensors are not counted, but for the lists of points.
    memory_forward: int
    memory_backward: int


@dataclass(frozen=True)
class Slab:
    """A rectangle of queries, and the rectangle of keys that holds all they see."""

    queries: Box
    keys: Box

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return prod(map(len, self.queries)), prod(map(len, self.keys))


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """A plan of rows of k and v that travel, each once to each rank that needs it; `print` shows it as a table."""

    sizes: Sizes
    dtype: torch.dtype

    rank_count: ClassVar[int]  # here and below: a subclass has it
    rows: ClassVar[dict[tuple[int, int], int]]  # (cell, KV head) rows that travel, by (source, destination)
    how: ClassVar[str]  # the way of computing it, in words
    head: ClassVar[str]  # the first lines of the table

    @cached_property
    def rows_into(self) -> list[int]:
        """By rank: the rows that it receives."""
        return self._rows_by(1)

    @cached_property
    def rows_out(self) -> list[int]:
        """By rank: the rows that it sends."""
        return self._rows_by(0)

    def _rows_by(self, end: int) -> list[int]:
        totals = [0] * self.rank_count
        for between, count in self.rows.items():
            totals[between[end]] += count
        return totals

    def cells(self, rank: int) -> int:
        """The number of cells that a rank holds."""
        raise NotImplementedError

    def key_cells(self, rank: int) -> int:
        """The number of cells whose k and v a rank holds."""
        return self.cells(rank)

    def interior_queries(self, rank: int) -> int:
        """The number of a rank's queries that are computed while rows travel."""
        raise NotImplementedError

    def borders(self, rank: int) -> list[tuple[int, int]]:
        """Numbers of queries and of keys of each call that waits for rows of other ranks."""
        raise NotImplementedError

    def tables(self, rank: int) -> int:
        """Bytes of index tensors that are counted."""
        return 0

    @cached_property
    def ranks(self) -> tuple[HaloCost, ...]:
        """The cost of the plan for each rank."""
        return tuple(map(self._cost, range(self.rank_count)))

    def _cost(self, rank: int) -> HaloCost:
        sizes = self.sizes
        into, out = self.rows_into[rank], self.rows_out[rank]
        cells, inner = self.cells(rank), self.interior_queries(rank)
        row_bytes = sizes.batch * (2 * sizes.row + sizes.padding)  # k, v and whether they are padded
        grad_bytes = sizes.batch * 2 * sizes.summed_row  # dk and dv
        traffic = out * row_bytes, into * row_bytes, into * grad_bytes, out * grad_bytes
        return HaloCost(cells, *traffic, inner, cells - inner, *self._memory(rank, cells, out, into))

    # The memory of `ring.rank.halo`; a change of the order there is a change here.
    #
    #                to the end              then the largest of these steps
    #     forward    the call's tensors      packing  2 * sent
    #                                        travel   sent + arrived
    #                                        border   arrived + results and inputs of all borders
    #     backward   the call's tensors,     border   answers + inputs of all borders
    #                arrived rows, the       travel   answers + arriving answers
    #                borders' gradients      adding   arriving answers + sums of the touched rows
    def _memory(self, rank: int, cells: int, out: int, into: int) -> tuple[int, int]:
        sizes, heads, kv_heads = self.sizes, self.sizes.heads, self.sizes.kv_heads
        borders = self.borders(rank)
        q, lse = heads * sizes.row, heads * sizes.sum
        kv, sums = 2 * kv_heads * sizes.row, 2 * kv_heads * sizes.summed_row
        arrived, sent = 2 * sizes.row * into, 2 * sizes.row * out
        # Without an interior the one border takes the tensors of its queries as they lie: no copies.
        copies = 1 if self.interior_queries(rank) else 0
        # q, k, v, out and lse; of a border q, and k and v in a frame; its out and lse are kept to the end
        border_results = copies * sum((q + lse) * queries for queries, _ in borders)
        border_inputs = sum(copies * q * queries + kv * keys for queries, keys in borders)
        key_cells = self.key_cells(rank)
        forward = (
            cells * (2 * q + lse)
            + key_cells * kv
            + max(2 * sent, sent + arrived, arrived + border_results + border_inputs)
        )
        # q, k, v, out, dout, dq, dk, dv, lse and delta; of a border the same, with sums of dk and dv in a frame
        backward = cells * (4 * q + 2 * lse) + key_cells * (1 + copies) * kv + arrived
        answers, arriving = 2 * sizes.summed_row * into, 2 * sizes.summed_row * out
        border_grads = sum(copies * q * queries + sums * keys for queries, keys in borders)
        border_inputs = sum(copies * (3 * q + 2 * lse) * queries + kv * keys for queries, keys in borders)
        # In the end sums of dk and dv, and these rounded, of all rows that do not come from the interior alone.
        touched = min(key_cells, max(0, sum(keys for _, keys in borders) - into // kv_heads))
        backward += border_grads + max(answers + max(border_inputs, arriving), arriving + touched * (kv + sums))
        tables = self.tables(rank)
        return sizes.batch * forward + tables, sizes.batch * backward + tables

    @property
    def sizes_in_words(self) -> str:
        """Sizes of the call, in words."""
        sizes = self.sizes
        return (
            f"batch {sizes.batch}, {sizes.heads} heads, {sizes.kv_heads} KV heads, head_dim {sizes.head_dim}, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )

    def __str__(self) -> str:
        return f"{self.head}: {self.how}\n\n{_rank_table(self)}"


@dataclass(frozen=True, eq=False)
class HaloPlan(ExchangePlan):
    """The plan that `plan_halo` made. Its fields are the arguments."""

    neighbourhoods: tuple[Neighbourhood, ...]  # by KV head; they differ in window alone
    shards: Shards

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        return self.shards.ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """Sides of the grid."""
        return self.neighbourhoods[0].shape

    @cached_property
    def arriving(self) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        """The rows that each rank needs of others, source after source: their cells, KV heads and sources, int64."""
        return tuple(map(self._arriving, range(self.shards.ranks)))

    def _arriving(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        by_window = []
        for heads, cells, source in self._cells_of_others(rank):
            rows = cells[:, None], torch.tensor(heads, device="cpu"), source[:, None]
            by_window.append([x.expand(len(cells), len(heads)).flatten() for x in rows])
        cells, heads, source = map(torch.cat, zip(*by_window, strict=True))
        order = source.argsort(stable=True)
        return cells[order], heads[order], source[order]

    def _cells_of_others(self, rank: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        # For each window its KV heads, and the cells of other ranks that it reaches with the ranks that hold them.
        for near in dict.fromkeys(self.neighbourhoods):
            heads = [head for head, neighbourhood in enumerate(self.neighbourhoods) if neighbourhood == near]
            cells = self.shards.reached(near, rank)
            source = self.shards.owner(self.shape, cells)
            yield heads, cells[source != rank], source[source != rank]

    @cached_property
    def rows(self) -> dict[tuple[int, int], int]:
        """The number of (cell, KV head) rows that travel, by (source, destination); without an entry none do."""
        counts: dict[tuple[int, int], int] = {}
        for rank in range(self.shards.ranks):
            for heads, _, source in self._cells_of_others(rank):
                for sender, cells in zip(*(x.tolist() for x in source.unique(return_counts=True)), strict=True):
                    counts[sender, rank] = counts.get((sender, rank), 0) + cells * len(heads)
        return dict(sorted(counts.items()))

    def cells(self, rank: int) -> int:
        """The number of cells that a rank holds."""
        return self.shards.count(self.shape, rank)

    def interior_queries(self, rank: int) -> int:
        """The number of a rank's queries that are computed while rows travel."""
        inside = self.interior(rank)
        return prod(map(len, inside)) if inside else 0

    def borders(self, rank: int) -> list[tuple[int, int]]:
        """Numbers of queries and of keys of each call that waits for rows of other ranks."""
        if isinstance(self.shards, Rectangles):
            return [slab.sizes for slab in self.border(rank)]
        cells = self.cells(rank)  # one call, whose keys are the own ones and what arrives, by cells
        return [(cells, cells + self.rows_into[rank] // self.sizes.kv_heads)]

    def interior(self, rank: int) -> Box | None:
        """The rank's queries that see only its own keys; None without any, and for `Runs`, whose queries all wait."""
        if isinstance(self.shards, Runs):
            return None
        box = self.shards.box(self.shape, rank)
        lines = []
        for n, cells in enumerate(box):
            inside = [interior(near.axes[n], cells) for near in set(self.neighbourhoods)]
            lines.append(range(max(x.start for x in inside), min(x.stop for x in inside)))
        return tuple(lines) if all(lines) else None

    def border(self, rank: int) -> tuple[Slab, ...]:
        """The rank's other queries, as up to two slabs for each axis; one of all queries where none is interior."""
        box = self.own(rank)
        if not all(box):
            return ()
        inside, slabs = self.interior(rank), []
        if inside is None:
            slabs.append(box)
        else:
            for n, (cells, within) in enumerate(zip(box, inside, strict=True)):
                for outer in (range(cells.start, within.start), range(within.stop, cells.stop)):
                    if outer:
                        slabs.append((*inside[:n], outer, *box[n + 1 :]))
        return tuple(Slab(queries, self._keys(queries)) for queries in slabs)

    def own(self, rank: int) -> Box:
        """The smallest box that holds a rank's cells."""
        if isinstance(self.shards, Rectangles):
            return self.shards.box(self.shape, rank)
        lines = torch.unravel_index(self.shards.cells(self.shape, rank), self.shape)
        return tuple(range(int(x.min()), int(x.max()) + 1) if len(x) else range(0) for x in lines)

    def _keys(self, queries: Box) -> Box:
        box = []
        for n, cells in enumerate(queries):
            reached = [line_reached(near.axes[n], cells) for near in set(self.neighbourhoods)]
            line = hull(self.neighbourhoods[0].axes[n], torch.stack(reached).any(0))
            if isinstance(self.shards, Runs) and line.stop > self.shape[n]:  # a table of the grid's cells ends there
                line = range(self.shape[n])
            box.append(line)
        return tuple(box)

    @property
    def how(self) -> str:
        """The way of computing it, in words."""
        if isinstance(self.shards, Rectangles):
            return "rectangles of queries within rectangles of keys"
        return "a table of cells, when all rows have come"

    @property
    def title(self) -> str:
        """The call, in words."""
        grid = " x ".join(map(str, self.shape))
        along = [str(n) for n, axis in enumerate(self.neighbourhoods[0].axes) if axis.is_causal]
        causal = f"causal along {' and '.join(along)}, " if along else ""
        windows = " and ".join(" x ".join(map(str, near.window)) for near in dict.fromkeys(self.neighbourhoods))
        return f"{grid} cells on {self.shards.ranks} ranks, window {windows}, {causal}{self.sizes_in_words}"

    @property
    def head(self) -> str:
        """The first lines of the table."""
        return f"{self.title}\n{self.shards!r}"


def plan_halo(
    neighbourhood: Neighbourhood | tuple[Neighbourhood, ...],
    shards: Shards,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    padded: bool = False,
) -> HaloPlan:
    """The plan of which rank sends which rows of k and v to whom, so that every query finds its keys.

    A row is a cell's k and v of one KV head. Each that another rank's windows reach travels there once. In the backward
    its gradients come back in float32; k and v are kept from the forward.

    Args:
        neighbourhood: which cells a query sees; or a tuple of one for each KV head, which differ in window alone.
        shards: which cells a rank holds: `Rectangles`, or `Runs` of an ordering.
        batch, heads, kv_heads, head_dim: sizes of q, k and v.
        dtype: of q, k and v.
        padded: whether the call has a key_padding_mask: one byte of it travels with each row.

    Raises:
        TypeError, ValueError: naming the argument and what is allowed.

    >>> plan = plan_halo(
    ...     Neighbourhood((8, 8), 3), Rectangles((2, 1)), batch=1, heads=2, kv_heads=1, head_dim=4, dtype=torch.float16
    ... )
    >>> plan.rows, plan.ranks[0].sent_forward, plan.ranks[0].interior
    ({(0, 1): 8, (1, 0): 8}, 128, 24)
    """
    heads, kv_heads = grouped(heads, kv_heads)
    near = as_pattern(neighbourhood).of_heads(kv_heads).by_head
    check_shards(shards).check(near[0].shape)
    return HaloPlan(Sizes.checked(batch, heads, kv_heads, head_dim, dtype, padded), dtype, near, shards)


def check_shards(shards: object) -> Shards:
    """The argument, if it says how cells are spread."""
    if not isinstance(shards, Rectangles | Runs):
        raise TypeError(f"shards must be Rectangles or Runs of an ordering, got {shards!r}")
    return shards


def _rank_table(plan: ExchangePlan) -> str:
    titles = ("cells", "MB sent", "received", "backward: sent", "received", "interior", "border")
    lines = []
    for cost in plan.ranks:
        cells, *traffic, inner, outer, forward, backward = astuple(cost)
        line = [f"{cells:,}", *(amount(size / 1e6) for size in traffic), f"{inner:,}", f"{outer:,}"]
        lines.append([*line, amount(forward / 1e9), amount(backward / 1e9)])
    return by_rank((*titles, "GB of memory", "backward"), lines)
