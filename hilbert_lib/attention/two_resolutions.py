"""Attention at two resolutions: near tokens of a grid by themselves, all others as means of coarse cells."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import log, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib import checks
from hilbert_lib.attention.api import UNSERVED, neighbourhood_attention
from hilbert_lib.attention.merge import merge_attention
from hilbert_lib.patterns.neighbourhood import Neighbourhood


@checks.unscripted
@partial(checks.suggesting, unserved=UNSERVED)
def two_resolution_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: tuple[int, ...],
    *,
    cell: int | tuple[int, ...],
    near: int | tuple[int, ...],
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Full attention on a grid with far tokens averaged: one softmax over near tokens and means of coarse cells.

    The grid is cut into coarse cells. A query sees each token of the `near` x `near` coarse cells around its own, and
    of each other coarse cell the mean of k and the mean of v, which count as often as the cell has tokens. So every
    token counts once. Where `near` covers the grid, and where k and v are the same all over each coarse cell, it is
    full attention. Coarse cells that would lie outside are moved inside, as by `Neighbourhood` with edge="shift".

    Differentiable once in q, k and v, with the exact gradient of this function. Near cells are taken out of the means
    by a difference of two softmax sums, which triples the rounding errors of `neighbourhood_attention` at most. Means
    are rounded to the dtype of k: in bfloat16 a score of 100 is off by up to 0.4 there.

    Args:
        q: (batch, seq, heads, head_dim), one row for each cell of the grid, row by row.
        k, v: (batch, seq, kv_heads, head_dim); kv_heads divides heads.
        shape: 1 to 3 sides of the grid [tokens].
        cell: side of a coarse cell [tokens], one value or one for each axis. A cell at the border may be smaller.
        near: coarse cells that are seen token by token, odd, one value or one for each axis.
        scale: factor of the scores, finite and above 0; by default head_dim ** -0.5.
        backend: of the calls of `neighbourhood_attention` that it is made of.
        return_lse: whether to return lse too.

    Returns:
        out (batch, seq, heads, head_dim) in q's dtype. With return_lse also lse (batch, heads, seq), float32 (float64
        for float64) and differentiable.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> x = torch.randn(1, 16 * 16, 2, 8)
    >>> two_resolution_attention(x, x, x, (16, 16), cell=4, near=1).shape  # 16 tokens and 15 means a query
    torch.Size([1, 256, 2, 8])
    """
    checks.boolean("return_lse", return_lse)
    grid = _Grid.of(shape, cell, near)
    grid.check(q, k, v)
    options = {"scale": scale, "backend": backend, "return_lse": True}
    q, k, v = (grid.padded(x) for x in (q, k, v))
    own_tokens = neighbourhood_attention(q, k, v, grid.tokens, key_padding_mask=grid.padding(k), **options)
    folded_q, means = grid.folded(q), (grid.means(k), grid.means(v))
    far, inner = [], []  # all means, and those of the near cells: (out, lse) for each count of tokens
    for count, mask in grid.counts(k):
        options |= {"extra_q": folded_q, "key_padding_mask": mask}
        results = neighbourhood_attention(folded_q, *means, grid.cells, **options)
        inner_out, inner_lse, far_out, far_lse = results
        far.append((grid.unfolded(far_out), grid.unfolded_lse(far_lse) + log(count)))
        inner.append((grid.unfolded(inner_out), grid.unfolded_lse(inner_lse) + log(count)))
    out, lse = merge_attention(*zip(own_tokens, *far, strict=True))
    out, lse = _without(out, lse, *merge_attention(*zip(*inner, strict=True)))
    out, lse = grid.cut(out), grid.cut(lse.transpose(1, 2)).transpose(1, 2)
    return (out, lse) if return_lse else out


def _without(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    # Attention over keys without those of a part. Means weigh at most what their tokens do (Jensen), so the part holds
    # at most half of the sum, and its difference loses no digits.
    share = (part_lse - lse).exp()
    weight, part_weight = (x.transpose(1, 2)[..., None] for x in (1 / (1 - share), share / (1 - share)))
    return (weight * out - part_weight * part_out).to(out.dtype), lse + (-share).log1p()


@dataclass(frozen=True)
class _Grid:
    # The grid in coarse cells. sides: of the grid as given. shape: of the grid of coarse cells.
    sides: tuple[int, ...]
    cell: tuple[int, ...]
    shape: tuple[int, ...]
    tokens: Neighbourhood  # of tokens: windows of whole coarse cells
    cells: Neighbourhood  # of coarse cells: the same windows

    @classmethod
    def of(cls, shape: object, cell: object, near: object) -> "_Grid":
        sides = Neighbourhood(shape, 1).shape  # refuses what is no grid
        cell, near = (_by_axis(name, value, len(sides)) for name, value in (("cell", cell), ("near", near)))
        if any(width % 2 == 0 for width in near):
            raise ValueError(f"near must be odd along each axis, got {near}")
        # A cell that is longer than an axis is that axis, which needs no margin.
        cell = tuple(size if size <= side else side for side, size in zip(sides, cell, strict=True))
        coarse = tuple(-(-side // size) for side, size in zip(sides, cell, strict=True))
        padded = tuple(count * size for count, size in zip(coarse, cell, strict=True))
        window = tuple(width * size for width, size in zip(near, cell, strict=True))
        return cls(sides, cell, coarse, Neighbourhood(padded, window, stride=cell), Neighbourhood(coarse, near))

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            checks.dense_tensor(name, x)
            if x.dim() != 4 or x.shape[1] != prod(self.sides):
                expected = f"(batch, {prod(self.sides)}, heads, head_dim) for a grid of {self.sides}"
                raise ValueError(f"{name} must be {expected}, got shape {tuple(x.shape)}")

    @property
    def is_padded(self) -> bool:
        return self.tokens.shape != self.sides

    def padded(self, x: Tensor) -> Tensor:
        # (batch, seq, ...) with zeros after each side, up to whole coarse cells.
        if not self.is_padded:
            return x
        x = x.unflatten(1, self.sides)
        after = [[0, whole - side] for side, whole in zip(self.sides, self.tokens.shape, strict=True)]
        margins = [margin for pair in reversed(after) for margin in pair]
        return pad(x, [0] * 2 * (x.dim() - 1 - len(self.sides)) + margins).flatten(1, len(self.sides))

    def cut(self, x: Tensor) -> Tensor:
        # `padded` taken back.
        if not self.is_padded:
            return x
        x = x.unflatten(1, self.tokens.shape)
        for axis, side in enumerate(self.sides):
            x = x.narrow(1 + axis, 0, side)
        return x.flatten(1, len(self.sides))

    def padding(self, k: Tensor) -> Tensor | None:
        # (batch, seq) bool of the padded grid: True where no token is.
        if not self.is_padded:
            return None
        is_token = torch.ones(1, prod(self.sides), 1, dtype=torch.int8, device=k.device)
        return (self.padded(is_token)[..., 0] == 0).expand(k.shape[0], -1)

    def counts(self, k: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        # Each number of tokens that a coarse cell has, with the mask of the cells that have another.
        ends = [side - (count - 1) * size for side, count, size in zip(self.sides, self.shape, self.cell, strict=True)]
        lines = [[size] * (count - 1) + [end] for size, count, end in zip(self.cell, self.shape, ends, strict=True)]
        tokens = [prod(sizes) for sizes in product(*lines)]
        if not self.is_padded:
            yield tokens[0], None
            return
        of_cells = torch.tensor(tokens, device=k.device)
        for count in sorted(set(tokens)):
            yield count, (of_cells != count).expand(k.shape[0], -1)

    def means(self, x: Tensor) -> Tensor:
        # (batch, coarse cells, heads, head_dim): the sums are in float32 at least, and rounded once.
        tokens = self._by_cell(x).to(torch.promote_types(x.dtype, torch.float32))
        sums = tokens.sum(2)
        if not self.is_padded:
            return (sums / tokens.shape[2]).to(x.dtype)
        is_token = ~self.padding(x)[:, :, None, None]
        return (sums / self._by_cell(is_token).sum(2)).to(x.dtype)

    def folded(self, x: Tensor) -> Tensor:
        # (batch, seq, heads, head_dim) to (batch, coarse cells, heads * tokens of a cell, head_dim), heads outside.
        return self._by_cell(x).transpose(2, 3).flatten(2, 3)

    def unfolded(self, x: Tensor) -> Tensor:
        # `folded` taken back, of (batch, coarse cells, heads * tokens of a cell, ...).
        axes = len(self.shape)
        x = x.unflatten(2, (-1, prod(self.cell))).transpose(2, 3)  # (batch, coarse cells, tokens of a cell, heads, ...)
        x = x.unflatten(2, self.cell).unflatten(1, self.shape)
        pairs = [1 + axis + half * axes for axis in range(axes) for half in (0, 1)]
        return x.permute(0, *pairs, *range(1 + 2 * axes, x.dim())).flatten(1, 2 * axes)

    def unfolded_lse(self, lse: Tensor) -> Tensor:
        # (batch, heads * tokens of a cell, coarse cells) to (batch, heads, seq).
        return self.unfolded(lse.transpose(1, 2)).transpose(1, 2)

    def _by_cell(self, x: Tensor) -> Tensor:
        # (batch, seq, ...) of the padded grid to (batch, coarse cells, tokens of a cell, ...).
        axes = len(self.shape)
        x = x.unflatten(1, [side for pair in zip(self.shape, self.cell, strict=True) for side in pair])
        order = [1 + 2 * axis + half for half in (0, 1) for axis in range(axes)]
        x = x.permute(0, *order, *range(1 + 2 * axes, x.dim()))
        return x.flatten(1, axes).flatten(2, 1 + axes)


def _by_axis(name: str, value: object, axes: int) -> tuple[int, ...]:
    if not checks.is_listed(value):
        return tuple(checks.integer(name, value, least=1) for _ in range(axes))
    values = checks.integers(name, value, least=1)
    if len(values) != axes:
        raise ValueError(f"{name} must be one value or one for each of {axes} axes, got {values}")
    return values
