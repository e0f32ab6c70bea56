"""A rank's own tensors by rows, and the sums of several computations in them.

A row is one (position, KV head), with that KV head's group of query heads; rows are named by their places in
`Layout.touched`. Sums of several computations are kept in float32 (float64 for float64), the dtype of lse.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hilbert_lib.attention.merge import add_rows, kernel_serves, merge_rows
from hilbert_lib.ordering import Ordering

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
            groups = [x.shape[2] // self._kv_heads for x in tensors]
            gathered = [x.new_empty(*rows.shape, n, len(x), x.shape[3]) for n, x in zip(groups, tensors, strict=True)]
            _gather(gathered, tensors, self._numbers[rows])
            return gathered
        index = self._positions[rows], self._heads[rows]
        return [self._by_row(x)[index] for x in tensors]

    def keys(self, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(*rows, 2, batch, d) of k and v (batch, slots, kv_heads, d)."""
        if kernel_serves(k):
            gathered = k.new_empty(*rows.shape, 2, len(k), k.shape[3])
            _gather(gathered.split(1, rows.dim()), (k, v), self._stored_numbers[rows])
            return gathered
        index = tuple(x[rows] for x in self._stored)
        return torch.stack([x.permute(1, 2, 0, 3)[index] for x in (k, v)], rows.dim())

    def padding(self, mask: Tensor | None) -> Tensor | None:
        """(rows, batch) of a mask (batch, positions), for all rows; None if there is none."""
        return None if mask is None else mask.T[self._positions]

    def merge(self, out: Tensor, lse: Tensor, merged: Merged) -> None:
        """Merges the result for all rows into out and lse (batch, heads, positions), in place."""
        lse_rows = self._by_row(lse.transpose(1, 2)[..., None])[..., 0]
        merge_rows(self._by_row(out), lse_rows, (self._positions, self._heads), *merged)

    def add(self, grads: tuple[Tensor, Tensor, Tensor], more_dq: Tensor, more_dkv: Tensor) -> None:
        """Adds, for all rows, to the gradients of q, k and v, in place."""
        dq, *dkv = map(self._by_row, grads)
        add_rows(dq, (self._positions, self._heads), more_dq)
        for n, x in enumerate(dkv):
            add_rows(x, self._stored, more_dkv[:, n : n + 1])

    def _by_row(self, x: Tensor) -> Tensor:
        batch, positions, heads, d = x.shape
        return x.view(batch, positions, self._kv_heads, heads // self._kv_heads, d).permute(1, 2, 3, 0, 4)


def _gather(targets: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Tensor) -> None:
    # Fills each target (*rows, group, batch, d) from its tensor (batch, positions, heads, d), all in one kernel.
    from hilbert_lib.attention.triton.copies import Copy, gather_rows  # triton is imported only where it is used

    row_numbers, ndim = numbers.flatten(), numbers.dim()
    by_head = [target.flatten(0, ndim - 1).permute(2, 0, 1, 3) for target in targets]
    gather_rows([Copy(target, x, row_numbers) for target, x in zip(by_head, tensors, strict=True)])
