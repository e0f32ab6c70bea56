"""A rank's own tensors by rows, and what several computations add up in them."""

import torch
from torch import Tensor

from hilbert_lib.attention.merge import merge
from hilbert_lib.ordering import Ordering

Layers = tuple[tuple[Tensor, Tensor], ...]  # as `layout.Mail.answers` has them


class Shard:
    """Reads and writes rows of a rank's tensors: a row is one (position, KV head), with that KV head's query heads.

    Args:
        kv_heads: KV heads.
        ordering: in which k and v are stored, or None.

    >>> x = torch.arange(8).view(1, 2, 4, 1)  # 2 positions, 4 heads
    >>> Shard(2, None).queries(x, torch.tensor([3])).flatten().tolist()
    [6, 7]
    """

    def __init__(self, kv_heads: int, ordering: Ordering | None):
        self._kv_heads, self._ordering = kv_heads, ordering

    def queries(self, x: Tensor, rows: Tensor) -> Tensor:
        """(*rows, group, batch, d) of x (batch, positions, heads, d)."""
        return self._by_row(x)[self._at(rows)]

    def set_queries(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        """Writes what `queries` reads."""
        self._by_row(x)[self._at(rows)] = values.to(x.dtype)

    def keys(self, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """(*rows, 2, batch, d) of k and v (batch, slots, kv_heads, d)."""
        at = self._stored_at(rows)
        return torch.stack([x.permute(1, 2, 0, 3)[at] for x in (k, v)], rows.dim())

    def set_keys(self, k: Tensor, v: Tensor, rows: Tensor, values: Tensor) -> None:
        """Writes what `keys` reads."""
        at = self._stored_at(rows)
        for x, some in zip((k, v), values.unbind(rows.dim()), strict=True):
            x.permute(1, 2, 0, 3)[at] = some.to(x.dtype)

    def padding(self, mask: Tensor, rows: Tensor) -> Tensor:
        """(*rows, batch) of a mask (batch, positions)."""
        return mask.T[self._at(rows)[0]]

    def _by_row(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self._kv_heads, -1)).permute(1, 2, 3, 0, 4)

    def _at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows // self._kv_heads, rows % self._kv_heads

    def _stored_at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        positions, heads = self._at(rows)
        return (positions if self._ordering is None else self._ordering.to(rows.device).inverse[positions]), heads


class Merged:
    """Attention of some queries over ever more keys.

    Attributes:
        out: (rows, group, batch, head_dim), in the dtype of lse.
        lse: (rows, group, batch).
    """

    def __init__(self, out: Tensor, lse: Tensor):
        self.out, self.lse = out.to(lse.dtype), lse

    def add(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merges what `rows` of the queries, each once, found elsewhere."""
        self.out[rows], self.lse[rows] = merge(self.out[rows], self.lse[rows], out.to(self.lse.dtype), lse)


class Sums:
    """Gradients that come from several places.

    Attributes:
        dq: (rows, group, batch, head_dim).
        dkv: (rows, 2, batch, head_dim).
    """

    def __init__(self, dq: Tensor, dkv: Tensor, dtype: torch.dtype):
        self.dq, self.dkv = dq.to(dtype), dkv.to(dtype)

    def add_keys(self, layers: Layers, dkv: Tensor) -> None:
        """Adds the answer to rows of k and v."""
        for rows, places in layers:
            self.dkv[places] += dkv[rows]

    def add(self, layers: Layers, gradients: Tensor) -> None:
        """Adds the answer to rows of q, k and v: (rows, group + 2, batch, head_dim)."""
        for rows, places in layers:
            self.dq[places] += gradients[rows, :-2]
            self.dkv[places] += gradients[rows, -2:]
