"""NATTEN's functions and modules under NATTEN's names, on any device: change one import.

    from hilbert_lib.adapters.natten import NeighborhoodAttention2D, na2d

Names and arguments are those of NATTEN 0.21.7. Tensors are (batch, *grid, heads, head_dim).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from hilbert_lib import checks
from hilbert_lib.attention.api import neighbourhood_attention
from hilbert_lib.patterns.neighbourhood import Neighbourhood

Sizes = int | Sequence[int]
# Arguments that choose and tune NATTEN's kernels, with the values at which they ask for nothing.
TUNING = {
    "attention_kwargs": None,
    "backend": None,
    "q_tile_shape": None,
    "kv_tile_shape": None,
    "backward_q_tile_shape": None,
    "backward_kv_tile_shape": None,
    "backward_kv_splits": None,
    "backward_use_pt_reduction": False,
    "run_persistent_kernel": True,
    "kernel_schedule": None,
    "torch_compile": False,
}


def na1d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *args, **options) -> Tensor | tuple:
    """Attention over a window around each token of a sequence: `na2d`, with one axis.

    >>> import torch
    >>> x = torch.ones(1, 6, 2, 4)
    >>> na1d(x, x, x, kernel_size=3, is_causal=True).shape
    torch.Size([1, 6, 2, 4])
    """
    return _attention(1, query, key, value, kernel_size, *args, **options)


def na2d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *args, **options) -> Tensor | tuple:
    """Attention over a window around each cell of a grid of two axes.

    Args:
        query: (batch, rows, columns, heads, head_dim).
        key, value: (batch, rows, columns, kv_heads, head_dim); kv_heads divides heads.
        kernel_size: side of the window, one number or one for each axis.
        args, options: in this order stride, dilation (numbers as kernel_size; 1 by default), is_causal (one or one for
            each axis), scale, additional_keys and additional_values (batch, n, kv_heads, head_dim), which every query
            sees; then by name return_lse.

    Returns:
        out, shaped like query; with return_lse also lse (batch, rows, columns, heads).

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed. The arguments that choose and tune
            NATTEN's kernels (`backend`, `q_tile_shape` and the like) are refused by name, as is a value of another
            head_dim than key's.

    >>> import torch
    >>> x = torch.ones(1, 4, 6, 2, 8)
    >>> na2d(x, x, x, kernel_size=(3, 5), dilation=(1, 1)).shape
    torch.Size([1, 4, 6, 2, 8])
    """
    return _attention(2, query, key, value, kernel_size, *args, **options)


def na3d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Sizes, *args, **options) -> Tensor | tuple:
    """Attention over a window around each cell of a grid of three axes, such as a video: `na2d`, with three axes.

    >>> import torch
    >>> x = torch.ones(1, 3, 4, 4, 2, 8)
    >>> na3d(x, x, x, kernel_size=3, is_causal=(True, False, False)).shape
    torch.Size([1, 3, 4, 4, 2, 8])
    """
    return _attention(3, query, key, value, kernel_size, *args, **options)


def _attention(
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = 1,
    dilation: Sizes | None = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    return_lse: bool = False,
    **tuning,
) -> Tensor | tuple[Tensor, Tensor]:
    for name, argument in tuning.items():
        if name not in TUNING:
            raise TypeError(f"na{axes}d has no argument {name!r}")
        if argument != TUNING[name]:
            raise ValueError(f"{name} is NATTEN's own and must be left out, got {argument!r}")
    grid = _grid_of(axes, query, key, value)
    near = _neighbourhood(grid, kernel_size, stride, dilation, is_causal)
    q, k, v = (x.flatten(1, axes) for x in (query, key, value))
    options = {"scale": scale, "extra_k": additional_keys, "extra_v": additional_values}
    if not return_lse:
        return neighbourhood_attention(q, k, v, near, **options).unflatten(1, grid)
    out, lse = neighbourhood_attention(q, k, v, near, return_lse=True, **options)
    return out.unflatten(1, grid), lse.transpose(1, 2).unflatten(1, grid)


def _grid_of(axes: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    # The grid that the three tensors hold.
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.dense_tensor(name, x)
        if x.dim() != axes + 3:
            raise ValueError(f"{name} must have {axes + 3} axes (batch, grid, heads, head_dim), got {tuple(x.shape)}")
    grid = tuple(query.shape[1:-2])
    for name, x in (("key", key), ("value", value)):
        if tuple(x.shape[1:-2]) != grid:
            raise ValueError(f"{name} must hold the grid of query {grid}, got {tuple(x.shape[1:-2])}")
    return grid


def _neighbourhood(
    grid: Sequence[int], kernel_size: Sizes, stride: Sizes | None, dilation: Sizes | None, is_causal: object
) -> Neighbourhood:
    axes = len(grid)
    sizes = {"kernel_size": kernel_size, "stride": 1 if stride is None else stride}
    sizes["dilation"] = 1 if dilation is None else dilation
    window, stride, dilation = (_by_axis(name, values, axes) for name, values in sizes.items())
    for axis, (cells, size, rate) in enumerate(zip(grid, window, dilation, strict=True)):
        if size * rate > cells:
            raise ValueError(
                f"kernel_size * dilation must be at most the {cells} cells of axis {axis}, got {size} * {rate}"
            )
    return Neighbourhood(tuple(grid), window, dilation, stride, False if is_causal is None else is_causal)


def _by_axis(name: str, values: Sizes, axes: int) -> tuple[int, ...]:
    values = tuple(values) if checks.is_listed(values) else (values,) * axes
    if len(values) != axes:
        raise ValueError(f"{name} must be one number or one for each of the {axes} axes, got {values}")
    return tuple(checks.integer(name, size, least=1) for size in values)


class _NeighborhoodAttention(nn.Module):
    """Projections of tokens around `na1d`, `na2d` or `na3d`, under NATTEN's names: `qkv` and `proj`.

    Args:
        embed_dim: size of a token.
        num_heads: heads, a divisor of embed_dim.
        kernel_size, stride, dilation, is_causal: as in `na2d`.
        qkv_bias: whether `qkv` has a bias.
        qk_scale: factor of the scores; by default head_dim ** -0.5.
        proj_drop: share of output values that are dropped while training.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """

    axes: int

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        dilation: Sizes = 1,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        self.embed_dim = checks.integer("embed_dim", embed_dim, least=1, most=checks.LARGEST_EMBED_DIM)
        self.num_heads = checks.integer("num_heads", num_heads, least=1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads must divide embed_dim {self.embed_dim}, got {self.num_heads}")
        self.kernel_size = _by_axis("kernel_size", kernel_size, self.axes)
        self.stride = _by_axis("stride", stride, self.axes)
        self.dilation = _by_axis("dilation", dilation, self.axes)
        # The rules that hold of every grid are checked on the smallest that has room for the window.
        smallest = [size * rate for size, rate in zip(self.kernel_size, self.dilation, strict=True)]
        self.is_causal = _neighbourhood(smallest, self.kernel_size, self.stride, self.dilation, is_causal).is_causal
        head_dim = self.embed_dim // self.num_heads
        self.scale = head_dim**-0.5 if qk_scale is None else checks.positive("qk_scale", qk_scale)
        self.qkv = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias=checks.boolean("qkv_bias", qkv_bias))
        self.proj = nn.Linear(self.embed_dim, self.embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, *grid, embed_dim) to tokens of the same shape."""
        checks.dense_tensor("x", x)
        if x.dim() != self.axes + 2 or x.shape[-1] != self.embed_dim:
            raise ValueError(f"x must be (batch, {self.axes} sides of a grid, {self.embed_dim}), got {tuple(x.shape)}")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        rules = {"stride": self.stride, "dilation": self.dilation, "is_causal": self.is_causal, "scale": self.scale}
        return self.proj_drop(self.proj(_attention(self.axes, q, k, v, self.kernel_size, **rules).flatten(-2)))

    def extra_repr(self) -> str:
        """The window, as the module is printed."""
        names = ("num_heads", "kernel_size", "stride", "dilation", "is_causal")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class NeighborhoodAttention1D(_NeighborhoodAttention):
    __doc__ = _NeighborhoodAttention.__doc__
    axes = 1


class NeighborhoodAttention2D(_NeighborhoodAttention):
    __doc__ = _NeighborhoodAttention.__doc__
    axes = 2


class NeighborhoodAttention3D(_NeighborhoodAttention):
    __doc__ = _NeighborhoodAttention.__doc__
    axes = 3
