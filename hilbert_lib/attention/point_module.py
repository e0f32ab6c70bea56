"""Attention over points as a `torch.nn` module with projections, for clouds of any size."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hilbert_lib import checks
from hilbert_lib.attention.api import attend
from hilbert_lib.attention.modules import Prepare, ProjectedAttention, check_prepare, prepared, where_made
from hilbert_lib.attention.transforms import refuse_tracers
from hilbert_lib.attention.validation import check_backend
from hilbert_lib.patterns.points import PointNeighbourhood

TOKENS = "(batch, points, embed_dim) or (points, embed_dim), and embed_dim {size}"


class PointAttention(ProjectedAttention):
    """Attention of each point over a window of the occupied cells around it, with projections.

    One module serves every cloud. Make a `PointNeighbourhood` of each cloud, and give it to every layer.

    Args:
        embed_dim: size of a token.
        num_heads: query heads, a divisor of embed_dim; embed_dim / num_heads is 1 to 256.
        kv_heads: heads of k and v, a divisor of num_heads; by default num_heads.
        bias: whether the projections have one.
        prepare: function or module (q, k, points) -> (q, k) between in_proj and attention, such as norms, or rotary
            embedding: q (batch, points, heads, head_dim) lies at `points.coordinates`, k (batch, keys, kv_heads,
            head_dim) at `points.key_cells`. Extra tokens do not pass through it.
        prepare_extra: function or module (q, k) -> (q, k) of the extra tokens.
        attention: function of q, k, v and points that computes: `attend`, the default, or `ring_attend` where points
            are a `PointShard` of each rank.
        backend: as in `attend`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.

    >>> points = PointNeighbourhood(torch.tensor([[0, 0], [5, 7], [1, 1]]), 3)
    >>> PointAttention(16, 2)(torch.ones(3, 16), points).shape
    torch.Size([3, 16])
    """

    shown = ("embed_dim", "num_heads", "kv_heads")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        bias: bool = True,
        prepare: Prepare = None,
        prepare_extra: Prepare = None,
        attention: Callable = attend,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(embed_dim, num_heads, kv_heads, prepare)
        self.prepare_extra = check_prepare("prepare_extra", prepare_extra)
        if not callable(attention):
            raise TypeError(f"attention must be attend, ring_attend or a function like them, got {attention!r}")
        self.attention = attention
        self.backend = check_backend(backend, PointNeighbourhood)
        checks.boolean("bias", bias)
        factory = where_made(device, dtype)
        self.in_proj = nn.Linear(self.embed_dim, sum(self.projected_sizes), bias=bias, **factory)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **factory)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after `to_empty` of a module made on the meta device."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()

    def check_decoding(self) -> None:
        """Raise ValueError: points have no order in which they could follow each other."""
        raise ValueError("points have no cache, since none comes after another: a PointAttention makes none")

    def forward(
        self,
        x: Tensor,
        points: PointNeighbourhood,
        *,
        keys: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        extra: Tensor | None = None,
        extra_padding_mask: Tensor | None = None,
        return_extra: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Project, attend and project back. Keys and extra tokens share the projections.

        Args:
            x: (batch, points, embed_dim), stored as `points.coordinates` are. Without the first axis, (points,
                embed_dim), no other argument has it either.
            points: who sees whom.
            keys: (batch, keys, embed_dim), the tokens of k and v where points have `keys`, stored as these are;
                elsewhere they are x.
            key_padding_mask: (batch, keys) bool, True = no weight.
            extra: (batch, tokens, embed_dim), tokens beside the points that every point sees, such as a class token.
            extra_padding_mask: (batch, tokens) bool, True = no weight.
            return_extra: whether extra tokens also attend, to every key and every extra token.

        Returns:
            The output, shaped like x; with return_extra also that of the extra tokens, shaped like extra.

        Raises:
            TypeError, ValueError: as `attend`; where x is no such tensor.
        """
        refuse_tracers(x, keys, key_padding_mask, extra, extra_padding_mask)
        if not isinstance(points, PointNeighbourhood):
            raise TypeError(f"points must be a PointNeighbourhood, got {type(points).__name__}")
        self.check_tokens("x", x, (2, 3), TOKENS)
        if points.has_keys != (keys is not None):
            allowed = "the tokens of the points' keys" if points.has_keys else "None where points have no keys"
            raise ValueError(f"keys must be {allowed}, got {type(keys).__name__}")
        for name, tokens in (("keys", keys), ("extra", extra)):
            if tokens is not None:
                self.check_tokens(name, tokens, (x.dim(),), f"of {x.dim()} axes as x is, with embed_dim {{size}}")
        if self.attention is attend:  # over ranks one's own refusal would leave the others waiting: `ring_attend` asks
            _check_rows("x", x, points.lists.queries, "points")
            if keys is not None:
                _check_rows("keys", keys, points.lists.keys, "keys of the points")
        for name, mask in (("key_padding_mask", key_padding_mask), ("extra_padding_mask", extra_padding_mask)):
            if mask is not None:
                checks.dense_tensor(name, mask)
        if checks.boolean("return_extra", return_extra) and extra is None:
            raise ValueError("return_extra must be False where extra is None, got True")
        if x.dim() == 2:
            given = (x, keys, key_padding_mask, extra, extra_padding_mask)
            results = self._attend(points, *(None if each is None else each[None] for each in given), return_extra)
            return tuple(out[0] for out in results) if return_extra else results[0]
        return self._attend(points, x, keys, key_padding_mask, extra, extra_padding_mask, return_extra)

    def _attend(
        self,
        points: PointNeighbourhood,
        x: Tensor,
        keys: Tensor | None,
        key_padding_mask: Tensor | None,
        extra: Tensor | None,
        extra_padding_mask: Tensor | None,
        return_extra: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        # `forward` of tokens with a batch.
        q, k, v = self.project(x) if keys is None else self.project_each(x, keys, keys)
        if self.prepare is not None:
            q, k = prepared("prepare", self.prepare, q, k, points)
        options = {"key_padding_mask": key_padding_mask, "extra_padding_mask": extra_padding_mask}
        if extra is not None:
            extra_q, extra_k, extra_v = self.project(extra)
            if self.prepare_extra is not None:
                extra_q, extra_k = prepared("prepare_extra", self.prepare_extra, extra_q, extra_k)
            options |= {"extra_q": extra_q if return_extra else None, "extra_k": extra_k, "extra_v": extra_v}
        results = self.attention(q, k, v, points, backend=self.backend, **options)
        if not return_extra:
            return self.out_proj(results.flatten(2))
        return tuple(self.out_proj(out.flatten(2)) for out in results)


def _check_rows(name: str, tokens: Tensor, rows: int, whose: str) -> None:
    if tokens.shape[-2] != rows:
        raise ValueError(f"{name} must have a row for each of the {rows} {whose}, got shape {tuple(tokens.shape)}")
