"""Neighbourhood attention as a `torch.nn` module with projections, for grids of any size."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from hilbert_lib import checks
from hilbert_lib.attention.api import QueryBox, check_neighbourhood, computed
from hilbert_lib.attention.caches import KeyValueCache, check_cache
from hilbert_lib.attention.grid_parts import part_of_box
from hilbert_lib.attention.modules import Prepare, ProjectedAttention, check_prepare, positions, prepared, where_made
from hilbert_lib.attention.transforms import refuse_tracers
from hilbert_lib.attention.validation import check_backend
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods, Neighbourhood


class NeighbourhoodAttention(ProjectedAttention):
    """Self-attention of each cell of a grid over a window around it, with projections.

    One module serves every grid. With edge="wrap" the window must fit into the grid.

    Its part `attention` is None. It may be a `RingNeighbourhoodAttention` of `neighbourhoods(grid)`: x is then this
    rank's cells of that one grid, which is spread over ranks. It takes no query_box, key_start or cache.

    Args:
        embed_dim: size of a token.
        num_heads: query heads, a divisor of embed_dim; embed_dim / num_heads is 1 to 256.
        window, dilation, stride, is_causal, edge: as in `Neighbourhood`; a sequence has one value for each axis. A
            window may also be a sequence with one window for each KV head, of which at least one is itself a sequence.
        kv_heads: heads of k and v, a divisor of num_heads; by default num_heads.
        bias: whether the projections have one.
        relative_bias: whether scores have a learned bias by relative position: the parameter `relative_bias`, (heads,
            2 * w_1 - 1, ..., 2 * w_n - 1), as `bias` of `neighbourhood_attention`. The number of axes is then fixed:
            window, or another rule, has one value for each. False by default.
        prepare: function or module (q, k, grid) -> (q, k) between in_proj and attention, such as rotary embedding or
            norms. q is (batch, cells, heads, head_dim), k (batch, cells, kv_heads, head_dim), row by row; grid is the
            tuple of sides. With key_start or a cache it is the positions instead, (batch, cells) int64; over ranks the
            numbers of this rank's cells in the whole grid, (cells,) int64, row by row. Extra tokens do not pass through
            it.
        prepare_extra: function or module (q, k) -> (q, k) of the extra tokens.
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
        window: int | Sequence[int | Sequence[int]],
        *,
        dilation: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        edge: str | Sequence[str] = "shift",
        kv_heads: int | None = None,
        bias: bool = True,
        relative_bias: bool = False,
        prepare: Prepare = None,
        prepare_extra: Prepare = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(embed_dim, num_heads, kv_heads, prepare)
        self.prepare_extra = check_prepare("prepare_extra", prepare_extra)
        rules = {"window": window, "dilation": dilation, "stride": stride, "is_causal": is_causal, "edge": edge}
        self.rules = {name: _fixed(x) for name, x in rules.items()}
        windows = self.rules["window"]
        self.has_head_windows = isinstance(windows, tuple) and any(isinstance(each, tuple) for each in windows)
        if self.has_head_windows and len(windows) != self.kv_heads:
            raise ValueError(f"window must be one for each of the {self.kv_heads} KV heads, got {windows}")
        self.backend = check_backend(backend, HeadNeighbourhoods)
        checks.boolean("bias", bias)
        factory = where_made(device, dtype)
        self.in_proj = nn.Linear(self.embed_dim, sum(self.projected_sizes), bias=bias, **factory)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)
        sides = self._bias_sides() if checks.boolean("relative_bias", relative_bias) else None
        self._check_rules()
        table = nn.Parameter(torch.empty(self.num_heads, *sides, **factory)) if sides else None
        self.register_parameter("relative_bias", table)
        self.register_module("attention", None)
        self._draw_bias()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after `to_empty` of a module made on the meta device."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        self._draw_bias()

    def _draw_bias(self) -> None:
        if self.relative_bias is not None:
            nn.init.trunc_normal_(self.relative_bias, std=0.02)  # as Swin and DiNAT draw theirs

    def _bias_sides(self) -> list[int]:
        # 2 * w - 1 for each axis, of the largest window w.
        window, windows, axes = self.rules["window"], self._windows(), self._axes()
        if not axes:
            raise ValueError(f"window must have one value for each axis where relative_bias is True, got {window!r}")
        by_head = [checks.integers("window", x if isinstance(x, tuple) else (x,) * axes, least=1) for x in windows]
        if any(len(sizes) != axes for sizes in by_head):
            raise ValueError(f"window must have one value for each of the {axes} axes, got {window!r}")
        return [2 * max(sizes) - 1 for sizes in zip(*by_head, strict=True)]

    def _windows(self) -> tuple:
        # The window of all heads, or that of each KV head.
        return self.rules["window"] if self.has_head_windows else (self.rules["window"],)

    def _axes(self) -> int:
        # Number of axes, where a rule has one value for each; 0 where none has.
        rules = [*self._windows(), *(rule for name, rule in self.rules.items() if name != "window")]
        return next((len(rule) for rule in rules if isinstance(rule, tuple)), 0)

    def _check_grid(self, x: Tensor) -> None:
        # Raises ValueError unless the grid of x has as many axes as the rules that have one value for each.
        axes = self._axes()
        if axes and x.dim() - 2 != axes:
            by_axis = {name: rule for name, rule in self.rules.items() if isinstance(rule, tuple)}
            words = ", ".join(f"{name}={rule!r}" for name, rule in by_axis.items())
            allowed = f"(batch, *grid, embed_dim), with a grid of {axes} {'axis' if axes == 1 else 'axes'} for {words}"
            raise ValueError(f"x must be {allowed}; got shape {tuple(x.shape)}")

    def _check_rules(self) -> None:
        # What holds of every grid is checked on one of a single cell. Into that edge="wrap" would not fit.
        edge = self.rules["edge"]
        edges = tuple("clip" if x == "wrap" else x for x in (edge if isinstance(edge, tuple) else (edge,)))
        rules = self.rules | {"edge": edges if isinstance(edge, tuple) else edges[0]}
        for window in self._windows():
            Neighbourhood((1,) * (self._axes() or 1), **rules | {"window": window})

    def neighbourhoods(self, grid: tuple[int, ...]) -> Neighbourhood | tuple[Neighbourhood, ...]:
        """The neighbourhood of all heads on a grid, or one for each KV head."""
        # torch.compile traces no functools' caches, and its sizes have no hash.
        is_kept = not torch.compiler.is_compiling() and all(type(side) is int for side in grid)
        make = _kept_neighbourhood if is_kept else _neighbourhood
        if not self.has_head_windows:
            return make(grid, *self.rules.items())
        return tuple(make(grid, *(self.rules | {"window": window}).items()) for window in self.rules["window"])

    def forward(
        self,
        x: Tensor,
        *,
        query_box: QueryBox | None = None,
        key_padding_mask: Tensor | None = None,
        extra: Tensor | None = None,
        extra_padding_mask: Tensor | None = None,
        return_extra: bool = False,
        key_start: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Project, attend and project back. Extra tokens share the projections.

        Args:
            x: (batch, *grid, embed_dim), with 1 to 3 axes of the grid; over ranks this rank's cells, as they are
                stored, of any such shape.
            query_box: (start, stop) for each axis, the cells to return; by default all. q, k and v of every cell are
                projected.
            key_padding_mask: (batch, *grid) bool, True = no weight.
            extra: (batch, tokens, embed_dim), tokens beside the grid that every cell sees, such as text or registers.
            extra_padding_mask: (batch, tokens) bool, True = no weight.
            return_extra: whether extra tokens also attend, to every cell and every extra token (joint attention).
            key_start: (batch,) int32 or int64, for grids of one axis: the cell at which each sequence begins, as in
                `neighbourhood_attention`. With a cache it is the same in every call.
            cache: of `make_cache`, for grids of one causal axis. The cells of x follow those of earlier calls, see
                them, and are added. A stride's groups are those of a grid of max_length cells. It needs a call without
                gradients; not with query_box, key_padding_mask or return_extra. Extra tokens are given in every call.

        Returns:
            The output, shaped like x; with query_box (batch, *box, embed_dim). With return_extra also the output of
            the extra tokens, shaped like extra.

        Raises:
            TypeError, ValueError: as `Neighbourhood` and `neighbourhood_attention`; where x is no such tensor.
        """
        refuse_tracers(x, key_padding_mask, extra, extra_padding_mask)
        self.check_tokens("x", x, (3, 4, 5), "(batch, *grid, embed_dim), with 1 to 3 axes and embed_dim {size}")
        if extra is not None:
            self.check_tokens("extra", extra, (3,), "(batch, tokens, embed_dim) and embed_dim {size}")
            if extra.shape[0] != x.shape[0]:
                raise ValueError(f"extra must have the batch of x ({x.shape[0]}), got shape {tuple(extra.shape)}")
        elif extra_padding_mask is not None:
            raise ValueError("extra_padding_mask must be None where extra is None, got a mask")
        if checks.boolean("return_extra", return_extra) and extra is None:
            raise ValueError("return_extra must be False where extra is None, got True")
        grid = x.shape[1:-1]
        if cache is not None:
            extra_out = True if return_extra else None
            check_cache(cache, query_box=query_box, key_padding_mask=key_padding_mask, return_extra=extra_out)
        is_spread = self.is_spread
        if is_spread:
            self.refuse_over_ranks(query_box=query_box, key_start=key_start, cache=cache)
            self._check_windows()
        else:
            self._check_grid(x)
        if (cache is not None or key_start is not None) and len(grid) > 1:
            name = "key_start" if cache is None else "cache"
            raise ValueError(f"{name} must be None on grids of more than one axis, got x of shape {tuple(x.shape)}")
        if key_padding_mask is not None:
            checks.dense_tensor("key_padding_mask", key_padding_mask)
            if key_padding_mask.shape != x.shape[:-1]:
                allowed = f"(batch, *grid) = {tuple(x.shape[:-1])}"
                raise ValueError(f"key_padding_mask must be {allowed}, got shape {tuple(key_padding_mask.shape)}")
        q, k, v = self.project(x.flatten(1, -2))
        if cache is not None:
            cache.check_room(k)
        if self.prepare is not None:
            is_line = cache is not None or key_start is not None
            place = positions(q, cache, key_start) if is_line else tuple(grid)
            if is_spread:
                place = self.attention.own_cells(q)
            q, k = prepared("prepare", self.prepare, q, k, place)
        options = {"extra_padding_mask": extra_padding_mask, "bias": self.relative_bias}
        if key_padding_mask is not None:
            options["key_padding_mask"] = key_padding_mask.flatten(1)
        if extra is not None:
            extra_q, extra_k, extra_v = self.project(extra)
            if self.prepare_extra is not None:
                extra_q, extra_k = prepared("prepare_extra", self.prepare_extra, extra_q, extra_k)
            options |= {"extra_q": extra_q if return_extra else None, "extra_k": extra_k, "extra_v": extra_v}
        box = grid
        if part := part_of_box(query_box, tuple(grid)):
            options["query_box"] = query_box
            q = q.unflatten(1, grid)[:, *(slice(line.start, line.stop) for line in part.rows)]
            box, q = q.shape[1:-2], q.flatten(1, -3)
        if key_start is not None:
            options["key_start"] = key_start
        if is_spread:
            results = self.attention(q, k, v, **options)
        else:
            results = self._attend(q, k, v, tuple(grid), cache, options)
        out, *extra_out = results if return_extra else (results,)
        out = self.out_proj(out.flatten(2)).unflatten(1, box)
        if cache is not None:
            cache.advance(q.shape[1])  # last: a call that fails counts no tokens
        return (out, self.out_proj(extra_out[0].flatten(2))) if return_extra else out

    def _attend(self, q, k, v, grid: tuple[int, ...], cache: KeyValueCache | None, options: dict) -> object:
        # The results of `attend`. With a cache the cells of q follow those that it holds.
        if cache is not None:
            cache.write(k, v)
            is_shared = self.rules["stride"] not in (1, (1,))  # windows end where the whole grid tells
            if is_shared or not (cache.is_empty and q.shape[1]):  # a call without cells has no grid of its own
                k, v, grid = cache.k, cache.v, (cache.max_length,)
                options = options | {"query_start": 0 if cache.is_empty else cache.lengths}
        return computed(q, k, v, self.neighbourhoods(grid), backend=self.backend, **options)

    def _check_windows(self) -> None:
        # The ring computes the windows of this module.
        expected = self.neighbourhoods(self.attention.shape)
        if check_neighbourhood(self.attention.neighbourhood) != check_neighbourhood(expected):
            raise ValueError(f"attention must be over {expected}, as the module is; got {self.attention.neighbourhood}")

    def check_decoding(self) -> None:
        """Raise ValueError unless calls of some cells after others can equal one call of all."""
        if self.is_spread:
            raise ValueError(f"attention must be None for a cache, got {self.attention!r}")
        for name, rule in self.rules.items():
            is_by_axis = isinstance(rule, tuple) and not (name == "window" and self.has_head_windows)
            if is_by_axis and len(rule) > 1:
                raise ValueError(f"{name} must be of one axis for a cache, got {rule}")
        if self.rules["is_causal"] not in (True, (True,)):
            raise ValueError(f"is_causal must be True for a cache, got {self.rules['is_causal']!r}")

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in self.rules.items())])


def _neighbourhood(grid: tuple[int, ...], *rules: tuple[str, object]) -> Neighbourhood:
    return Neighbourhood(grid, **dict(rules))


# To make one takes the host longer than a short call.
_kept_neighbourhood = lru_cache(maxsize=256)(_neighbourhood)


def _fixed(rule: object) -> object:
    # Sequences as tuples.
    return tuple(map(_fixed, rule)) if checks.is_listed(rule) else rule
