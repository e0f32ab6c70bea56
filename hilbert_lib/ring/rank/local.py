"""A rank's own tensors by rows, and the sums of several computations in them.

A row is one (position, KV head), with that KV head's group of query heads; rows are named by their places in
`Layout.touched`. Sums of several computations are kept in float32 (float64 for float64), the dtype of lse.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.attention.merge import add_rows, kernel_serves, merge_rows
from hilbert_lib.ordering import Ordering
from hilbert_lib.ring.rank.layout import Block

if TYPE_CHECKING:
    from hilbert_lib.attention.triton.copies import Copy

Merged = tuple[Tensor, Tensor]  # out (rows, group, batch, head_dim) and lse of attention over the keys seen so far


def none_merged(shape: tuple[int, ...], lse: Tensor) -> Merged:
    """Attention over no keys: out of this shape, in the dtype of lse."""
    return lse.new_zeros(shape), lse.new_full(shape[:-1], -torch.inf)


class Shard:
    """Reads and writes rows of a rank's tensors, whose k and v are stored in an ordering, or in sequence order (None).

    >>> touched = torch.tensor([[0, 1], [3, 2]])  # position 0 of head 3, and 1 of 2
    >>> [found] = Shard(touched, 4, None).queries(torch.tensor([1]), torch.arange(8).view(1, 2, 4, 1))
    >>> found.flatten().tolist()
    [6]
    """

    def __init__(self, touched: Tensor, kv_heads: int, ordering: Ordering | None):
        self._kv_heads = kv_heads
        self._positions, self._heads = touched
        slots = self._positions if ordering is None else ordering.to(touched.device).inverse[self._positions]
        self._stored = slots, self._heads
        # Row numbers as a kernel looks them up: position * kv_heads + KV head.
        self._numbers = self._positions * kv_heads + self._heads
        self._stored_numbers = slots * kv_heads + self._heads

    def queries(self, rows: Tensor, *tensors: Tensor) -> list[Tensor]:
        """(*rows, group, batch, d) of each tensor (batch, positions, heads, d)."""
        if kernel_serves(tensors[0]):
            targets = self._room_for_queries(rows, tensors)
            _gather_rows(_copies(targets, tensors, rows, self._numbers))
            return targets
        index = self._positions[rows], self._heads[rows]
        return [self._by_row(x)[index] for x in tensors]

    def keys(self, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(*rows, 2, batch, d) of k and v (batch, slots, kv_heads, d)."""
        if kernel_serves(k):
            target = _room_for_keys(rows, k, len(k))
            _gather_rows(_copies(target.split(1, rows.dim()), (k, v), rows, self._stored_numbers))
            return target
        index = tuple(x[rows] for x in self._stored)
        return torch.stack([x.permute(1, 2, 0, 3)[index] for x in (k, v)], rows.dim())

    def together(self, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(rows, group + 2, batch, d) of q, k and v at some rows, in one kernel on CUDA."""
        if not kernel_serves(q):
            return torch.cat([*self.queries(rows, q), self.keys(rows, k, v)], 1)
        group = q.shape[2] // self._kv_heads
        target = q.new_empty(len(rows), group + 2, len(q), q.shape[3])
        queries, *keys = target.split([group, 1, 1], 1)
        _gather_rows(_copies([queries], [q], rows, self._numbers) + _copies(keys, (k, v), rows, self._stored_numbers))
        return target

    def block(self, block: Block, by_query: Sequence[Tensor], k: Tensor, v: Tensor) -> list[Tensor]:
        """The queries of a block inside the shard, of each tensor, and its keys: in one kernel on CUDA."""
        if not kernel_serves(k):
            return [*self.queries(block.queries, *by_query), self.keys(block.keys, k, v)]
        targets, target = self._room_for_queries(block.queries, by_query), _room_for_keys(block.keys, k, len(k))
        copies = _copies(targets, by_query, block.queries, self._numbers)
        copies += _copies(target.split(1, block.keys.dim()), (k, v), block.keys, self._stored_numbers)
        _gather_rows(copies)
        return [*targets, target]

    def received_block(self, block: Block, by_query: Sequence[Tensor], received: Tensor) -> list[Tensor]:
        """The same of a block whose keys are among received rows (rows, 2, batch, d)."""
        if not kernel_serves(received):
            return [*self.queries(block.queries, *by_query), received[block.keys]]
        targets, target = (
            self._room_for_queries(block.queries, by_query),
            _room_for_keys(block.keys, received, received.shape[2]),
        )
        copies = _copies(targets, by_query, block.queries, self._numbers)
        their_kv = [received[:, n].transpose(0, 1)[:, :, None] for n in (0, 1)]
        copies += _copies(target.split(1, block.keys.dim()), their_kv, block.keys, None)
        _gather_rows(copies)
        return [*targets, target]

    def _room_for_queries(self, rows: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        groups = [x.shape[2] // self._kv_heads for x in tensors]
        return [x.new_empty(*rows.shape, n, len(x), x.shape[3]) for n, x in zip(groups, tensors, strict=True)]

    def padding(self, mask: Tensor | None) -> Tensor | None:
        """(rows, batch) of a mask (batch, positions), for all rows; None if there is none."""
        return None if mask is None else mask.T[self._positions]

    def merge(self, out: Tensor, lse: Tensor, merged: Merged) -> None:
        """Merges the result for all rows into out and lse (batch, heads, positions), in place."""
        lse_rows = self._by_row(lse.transpose(1, 2)[..., None])[..., 0]
        merge_rows(self._by_row(out), lse_rows, (self._positions, self._heads), *merged)

    def add(self, grads: tuple[Tensor, Tensor, Tensor], more_dq: Tensor, more_dkv: Tensor) -> None:
        """Adds, for all rows, to the gradients of q, k and v, in place; in one kernel on CUDA."""
        more = more_dq, more_dkv[:, :1], more_dkv[:, 1:]
        if kernel_serves(more_dq):
            numbers = self._numbers, self._stored_numbers, self._stored_numbers
            _add_rows([_copy(rows, total, at) for rows, total, at in zip(more, grads, numbers, strict=True)])
            return
        indices = (self._positions, self._heads), self._stored, self._stored
        for total, index, rows in zip(map(self._by_row, grads), indices, more, strict=True):
            add_rows(total, index, rows)

    def _by_row(self, x: Tensor) -> Tensor:
        batch, positions, heads, d = x.shape
        return x.view(batch, positions, self._kv_heads, heads // self._kv_heads, d).permute(1, 2, 3, 0, 4)


def exchanged_block(block: Block, by_query: Sequence[Tensor], kv: Tensor) -> list[Tensor]:
    """The queries of a block, of each tensor, and its keys, all among rows that came: in one kernel on CUDA.

    by_query: (rows, group, batch, d) each. kv: (rows, 2, batch, d).
    """
    parts = [(x, block.queries) for x in by_query] + [(kv, block.keys)]
    if not kernel_serves(kv):
        return [x[places] for x, places in parts]
    targets = [x.new_empty(*places.shape, *x.shape[1:]) for x, places in parts]
    copies = []
    for target, (x, places) in zip(targets, parts, strict=True):
        copies += _copies([target], [x.permute(2, 0, 1, 3)], places, None)
    _gather_rows(copies)
    return targets


def add_block(all_dq: Tensor, all_dkv: Tensor, block: Block, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients of a block to those of all rows, in place; in one kernel on CUDA.

    all_dq: (rows, group, batch, d). all_dkv: (rows, 2, batch, d). dq: (segments, queries, kv_heads, group, batch, d).
    dk, dv: (segments, keys, kv_heads, 1, batch, d).
    """
    sums = (all_dq, block.queries, dq), (all_dkv[:, :1], block.keys, dk), (all_dkv[:, 1:], block.keys, dv)
    if kernel_serves(all_dq):
        copies = []
        for total, rows, addend in sums:
            copies.append(_copy(addend.flatten(0, rows.dim() - 1), total.permute(2, 0, 1, 3), rows.flatten()))
        _add_rows(copies)
        return
    for total, rows, addend in sums:
        add_rows(total, (rows,), addend)


def _room_for_keys(rows: Tensor, like: Tensor, batch: int) -> Tensor:
    return like.new_empty(*rows.shape, 2, batch, like.shape[-1])


def _copies(targets: Sequence[Tensor], tensors: Sequence[Tensor], rows: Tensor, numbers: Tensor | None) -> list["Copy"]:
    # What fills each target (*rows, group, batch, d) from its tensor (batch, positions, heads, d). numbers: of all rows
    # among which `rows` are places.
    places, ndim = rows.flatten(), rows.dim()
    return [_copy(target.flatten(0, ndim - 1), x, places, numbers) for target, x in zip(targets, tensors, strict=True)]


def _copy(dense: Tensor, indexed: Tensor, at: Tensor, through: Tensor | None = None) -> "Copy":
    # dense: (rows, group, batch, d).
    from hilbert_lib.attention.triton.copies import Copy  # triton is imported only where it is used

    return Copy(dense.permute(2, 0, 1, 3), indexed, at, through=through)


def _gather_rows(copies: list["Copy"]) -> None:
    from hilbert_lib.attention.triton.copies import gather_rows

    gather_rows(copies)


def _add_rows(copies: list["Copy"]) -> None:
    from hilbert_lib.attention.triton.copies import add_rows as add_rows_of_copies

    add_rows_of_copies(copies)
