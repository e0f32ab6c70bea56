"""A rank's own tensors by rows, and what several computations add up in them.

A row is one (position, KV head), with that KV head's group of query heads. What more than one computation adds to is
held in float32 (float64 for float64), which is the dtype of lse.
"""

import torch
from torch import Tensor

from hilbert_lib.attention.merge import add_rows, merge_rows
from hilbert_lib.ordering import Ordering
from hilbert_lib.ring.rank.layout import Layers


class Merged:
    """Attention of some queries over ever more keys, at first over none."""

    def __init__(self, shape: tuple[int, ...], lse: Tensor):
        self.out = lse.new_zeros(shape)  # (rows, group, batch, head_dim)
        self.lse = lse.new_full(shape[:-1], -torch.inf)

    def add(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merges what some of the rows, each once, found elsewhere."""
        merge_rows(self.out, self.lse, (rows,), out, lse)


class Sums:
    """Gradients of some rows, each from several places."""

    def __init__(self, shape: tuple[int, ...], lse: Tensor):
        self.dq = lse.new_zeros(shape)  # (rows, group, batch, head_dim)
        # (rows, 2, batch, head_dim), dk and dv each dense, as `Shard.add` reads them
        self.dkv = lse.new_zeros(2, shape[0], *shape[2:]).transpose(0, 1)

    def add_queries(self, rows: Tensor, dq: Tensor) -> None:
        """Adds to some of the rows, each once, of q."""
        add_rows(self.dq, (rows,), dq)

    def add_keys(self, rows: Tensor, dkv: Tensor) -> None:
        """Adds to some of the rows, each once, of k and v."""
        add_rows(self.dkv, (rows,), dkv)

    def add_answer(self, layers: Layers, dkv: Tensor) -> None:
        """Adds the answer to the rows of k and v that were sent."""
        for rows, places in layers:
            self.add_keys(places, dkv[rows])


class Shard:
    """Reads and writes rows of a rank's tensors, whose k and v are stored in an ordering, or in sequence order (None).

    >>> x = torch.arange(8).view(1, 2, 4, 1)  # 2 positions, 4 heads
    >>> Shard(2, None, x.device).queries(x, torch.tensor([[1], [1]])).flatten().tolist()
    [6, 7]
    """

    def __init__(self, kv_heads: int, ordering: Ordering | None, device: torch.device):
        self._kv_heads = kv_heads
        self._slots = None if ordering is None else ordering.to(device).inverse

    def queries(self, x: Tensor, at: Tensor) -> Tensor:
        """(*rows, group, batch, d) of x (batch, positions, heads, d)."""
        return self._by_row(x)[at.unbind()]

    def keys(self, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """(*rows, 2, batch, d) of k and v (batch, slots, kv_heads, d)."""
        stored = self._stored(at)
        return torch.stack([x.permute(1, 2, 0, 3)[stored] for x in (k, v)], at.dim() - 1)

    def padding(self, mask: Tensor, at: Tensor) -> Tensor:
        """(*rows, batch) of a mask (batch, positions)."""
        return mask.T[at[0]]

    def merge(self, out: Tensor, lse: Tensor, at: Tensor, merged: Merged) -> None:
        """Merges into out (batch, positions, heads, head_dim) and lse (batch, heads, positions), in place."""
        lse_rows = self._by_row(lse.transpose(1, 2)[..., None])[..., 0]
        merge_rows(self._by_row(out), lse_rows, at.unbind(), merged.out, merged.lse)

    def add(self, dq: Tensor, dk: Tensor, dv: Tensor, at: Tensor, sums: Sums) -> None:
        """Adds to the gradients of q, k and v, in place."""
        add_rows(self._by_row(dq), at.unbind(), sums.dq)
        stored = self._stored(at)
        for n, x in enumerate((dk, dv)):
            add_rows(self._by_row(x), stored, sums.dkv[:, n : n + 1])

    def _by_row(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self._kv_heads, -1)).permute(1, 2, 3, 0, 4)

    def _stored(self, at: Tensor) -> tuple[Tensor, Tensor]:
        positions, heads = at.unbind()
        return (positions if self._slots is None else self._slots[positions]), heads
