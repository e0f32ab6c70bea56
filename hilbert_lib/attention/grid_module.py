"""Neighbourhood attention as a `torch.nn` module with projections, for grids of any size."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hilbert_lib import checks
from hilbert_lib.attention.api import QueryBox, neighbourhood_attention
from hilbert_lib.attention.grid_parts import part_of_box
from hilbert_lib.attention.modules import ProjectedAttention, where_made
from hilbert_lib.attention.transforms import refuse_tracers
from hilbert_lib.patterns.neighbourhood import Neighbourhood


class NeighbourhoodAttention(ProjectedAttention):
    """Self-attention of each cell of a grid over a window around it, with projections.

    One module serves every grid. With edge="wrap" the window must fit into the grid.

    Args:
        embed_dim: size of a token.
        num_heads: query heads, a divisor of embed_dim; embed_dim / num_heads is 1 to 256.
        window, dilation, stride, is_causal, edge: as in `Neighbourhood`; a sequence has one value for each axis.
        kv_heads: heads of k and v, a divisor of num_heads; by default num_heads.
        bias: whether the projections have one. A bias by relative position is an argument of `neighbourhood_attention`
            alone.
        backend: as in `neighbourhood_attention`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> attention = NeighbourhoodAttention(16, 2, window=3)
    >>> attention(torch.ones(1, 4, 5, 16)).shape, attention(torch.ones(1, 3, 4, 5, 16)).shape
    (torch.Size([1, 4, 5, 16]), torch.Size([1, 3, 4, 5, 16]))
    """

    shown = ("embed_dim", "num_heads", "kv_heads")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        window: int | Sequence[int],
        *,
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        edge: str | Sequence[str] = "shift",
        kv_heads: int | None = None,
        bias: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(embed_dim, num_heads, kv_heads)
        rules = {"window": window, "dilation": dilation, "stride": stride, "is_causal": is_causal, "edge": edge}
        self.rules = {name: tuple(x) if checks.is_listed(x) else x for name, x in rules.items()}
        self.backend = backend
        checks.boolean("bias", bias)
        factory = where_made(device, dtype)
        self.in_proj = nn.Linear(self.embed_dim, sum(self.projected_sizes), bias=bias, **factory)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)

    def forward(
        self,
        x: Tensor,
        *,
        query_box: QueryBox | None = None,
        key_padding_mask: Tensor | None = None,
        extra: Tensor | None = None,
        extra_padding_mask: Tensor | None = None,
        return_extra: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Project, attend and project back. Extra tokens share the projections.

        Args:
            x: (batch, *grid, embed_dim), with 1 to 3 axes of the grid.
            query_box: (start, stop) for each axis, the cells to return; by default all. q, k and v of every cell are
                projected.
            key_padding_mask: (batch, *grid) bool, True = no weight.
            extra: (batch, tokens, embed_dim), tokens beside the grid that every cell sees, such as text or registers.
            extra_padding_mask: (batch, tokens) bool, True = no weight.
            return_extra: whether extra tokens also attend, to every cell and every extra token (joint attention).

        Returns:
            The output, shaped like x; with query_box (batch, *box, embed_dim). With return_extra also the output of
            the extra tokens, shaped like extra.

        Raises:
            TypeError, ValueError: as `Neighbourhood` and `neighbourhood_attention`; where x is no such tensor.
        """
        refuse_tracers(x, key_padding_mask, extra, extra_padding_mask)
        size = f"and embed_dim {self.embed_dim}"
        self.check_tokens("x", x, (3, 4, 5), f"(batch, *grid, embed_dim), with 1 to 3 axes {size}")
        if extra is not None:
            self.check_tokens("extra", extra, (3,), f"(batch, tokens, embed_dim) {size}")
        if checks.boolean("return_extra", return_extra) and extra is None:
            raise ValueError("return_extra must be False where extra is None, got True")
        grid = x.shape[1:-1]
        if key_padding_mask is not None:
            checks.dense_tensor("key_padding_mask", key_padding_mask)
            if key_padding_mask.shape != x.shape[:-1]:
                allowed = f"(batch, *grid) = {tuple(x.shape[:-1])}"
                raise ValueError(f"key_padding_mask must be {allowed}, got shape {tuple(key_padding_mask.shape)}")
        q, k, v = self.project(x.flatten(1, -2))
        options = {"backend": self.backend, "extra_padding_mask": extra_padding_mask}
        if key_padding_mask is not None:
            options["key_padding_mask"] = key_padding_mask.flatten(1)
        if extra is not None:
            extra_q, options["extra_k"], options["extra_v"] = self.project(extra)
            options["extra_q"] = extra_q if return_extra else None
        box = grid
        if part := part_of_box(query_box, tuple(grid)):
            options["query_box"] = query_box
            q = q.unflatten(1, grid)[:, *(slice(line.start, line.stop) for line in part.rows)]
            box, q = q.shape[1:-2], q.flatten(1, -3)
        results = neighbourhood_attention(q, k, v, Neighbourhood(tuple(grid), **self.rules), **options)
        out, *extra_out = results if return_extra else (results,)
        out = self.out_proj(out.flatten(2)).unflatten(1, box)
        return (out, self.out_proj(extra_out[0].flatten(2))) if return_extra else out

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in self.rules.items())])
