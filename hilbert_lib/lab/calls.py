"""One call of `attend` with options: its inputs, what of it is useful, and a few of its rows in float64.

A `Workload` has no options. Of a `Call` every gradient is checked, those of extra keys and of a bias too: the gradient
of the output is 0 but in the rows that are computed in float64, so that all other gradients come from these rows alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention.api import attend
from hilbert_lib.lab.pairs import Results, relative_difference
from hilbert_lib.lab.workload import fields_of
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import FLOP_BACKWARD, FLOP_FORWARD
from hilbert_lib.patterns.pattern import Pattern

SAMPLED_ROWS, SAMPLED_CELLS = 16, 4  # rows of a sequence, and cells along each axis of a grid
SAMPLED_EXTRA = 4  # extra queries
SEED = 0  # of the inputs, and of dropout where a call is checked


class Inputs(NamedTuple):
    """The tensors of a call."""

    q: Tensor  # (batch, queries, heads, head_dim)
    k: Tensor  # (batch, keys, heads, head_dim)
    v: Tensor
    extra_q: Tensor | None = None  # (batch, extra, heads, head_dim)
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    bias: Tensor | None = None  # (heads, entries along each axis)

    @property
    def present(self) -> list[Tensor]:
        """The tensors that there are."""
        return [x for x in self if x is not None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The inputs with `change` of each tensor that there is."""
        return Inputs(*(None if x is None else change(x) for x in self))

    def stored(self, ordering: Ordering | None) -> "Inputs":
        """The inputs with the tokens of q, k and v in an ordering."""
        if ordering is None:
            return self
        return self._replace(**{name: ordering.apply(getattr(self, name), dim=1) for name in "qkv"})


class Way(NamedTuple):
    """One way to compute a call."""

    name: str
    attend: Callable[[Inputs], tuple[Tensor, ...]]  # out, and extra_out where there are extra queries
    ordering: Ordering | None = None  # in which it takes q, k and v, and gives out


@dataclass(frozen=True)
class Call:
    """The inputs of one call with options, drawn when first used, and its float64 rows.

    length: rows of k: tokens, or the cells of the grid.
    queries: rows of q, the last ones of the sequence, as in decoding; 0 for all.
    padded: keys without weight, the last ones; on a grid whole rows of its first axis.
    left_padded: rows before every sequence, which `key_start` tells.
    extra_keys, extra_queries: on a grid: keys that all queries see, and queries that see all keys.
    documents: how many of equal length lie one after the other, without knowing each other; 0 for one sequence.
    order: the curve along which a grid is stored.
    backend: the name that `attend` is given.
    allows_tf32: whether torch's setting lets float32 products round to TF32.

    >>> from hilbert_lib.patterns.neighbourhood import Neighbourhood
    >>> call = Call(Neighbourhood((4, 4), 3), 16, 2, 8, torch.device("cpu"), dtype="float32", extra_keys=1)
    >>> call.flop("forward")  # 4 * heads * head_dim, for each of 16 * 10 pairs
    10240
    >>> call.error(call.by(), gradient=True) < 1e-5
    True
    """

    pattern: Pattern
    length: int
    heads: int
    head_dim: int
    device: torch.device
    dtype: str = "bfloat16"
    batch: int = 1
    queries: int = 0
    is_causal: bool = False
    dropout_p: float = 0.0
    padded: int = 0
    left_padded: int = 0
    extra_keys: int = 0
    extra_queries: int = 0
    has_bias: bool = False
    documents: int = 0
    order: str = "raster"
    backend: str = "auto"
    allows_tf32: bool = False

    def __post_init__(self) -> None:
        row = 1 if self.pattern.length is None else self.length // self.pattern.shape[0]
        if self.padded % row:
            raise ValueError(f"padded must be whole rows of {row} cells, got {self.padded}")
        if self.padded and self.is_causal:
            raise ValueError("padded must be 0 for a causal call: its useful pairs are not counted")
        if self.left_padded and (self.padded or self.queries or self.documents or self.pattern.length is not None):
            raise ValueError("left_padded must be 0 on grids, and beside padded, queries and documents")
        if self.documents and self.length % self.documents:
            raise ValueError(f"documents must divide length, {self.length}, got {self.documents}")

    @property
    def parameters(self) -> dict:
        """Fields that distinguish it, for a record: its pattern and sizes, and the options that it has."""
        sizes = ("length", "heads", "head_dim", "dtype")
        others = [field for field in fields(self) if field.name not in ("pattern", "device", *sizes)]
        options = {field.name: getattr(self, field.name) for field in others}
        given_options = {field.name: options[field.name] for field in others if options[field.name] != field.default}
        return fields_of(self.pattern) | {name: getattr(self, name) for name in sizes} | given_options

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors, random and normal, row by row."""
        generator = torch.Generator(self.device).manual_seed(SEED)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))

        width = self.heads, self.head_dim
        q = draw(self.batch, self.queries or self.length, *width)
        k, v = (draw(self.batch, self.length, *width) for _ in range(2))
        extra_q = draw(self.batch, self.extra_queries, *width) if self.extra_queries else None
        extra_k, extra_v = (draw(self.batch, self.extra_keys, *width) if self.extra_keys else None for _ in range(2))
        sides = self.pattern.of_heads(self.heads).bias_sides if self.has_bias else ()
        return Inputs(q, k, v, extra_q, extra_k, extra_v, draw(self.heads, *sides) if sides else None)

    @cached_property
    def douts(self) -> tuple[Tensor, ...]:
        """Gradients of what the call returns."""
        generator = torch.Generator(self.device).manual_seed(SEED + 1)
        like = [x for x in (self.inputs.q, self.inputs.extra_q) if x is not None]
        return tuple(torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) for x in like)

    def ordering(self, name: str) -> Ordering | None:
        """An order of the grid by its name; None for row by row."""
        if name == "raster":
            return None
        return Ordering.from_curve(name, self.length, grid=self.pattern.shape).to(self.device)

    def options(self, ordering: Ordering | None = None) -> dict:
        """Arguments of `attend` besides the tensors of `inputs`, for tokens that lie in an ordering."""
        options = {"is_causal": True} if self.is_causal else {}
        if self.dropout_p:
            options["dropout_p"] = self.dropout_p
        if self.padded:
            is_padded = (
                torch.arange(self.length, device=self.device).expand(self.batch, -1) >= self.length - self.padded
            )
            options["key_padding_mask"] = is_padded if ordering is None else ordering.apply(is_padded, dim=1)
        if self.left_padded:
            options["key_start"] = torch.full((self.batch,), self.left_padded, device=self.device)
        if self.queries:
            options["query_start"] = self.length - self.queries
        if self.documents:
            size = self.length // self.documents
            starts = torch.arange(0, self.length + 1, size, dtype=torch.int32, device=self.device)
            options |= {"cu_seqlens": starts, "max_seqlen": size}
        return options | ({} if ordering is None else {"ordering": ordering})

    def by(self, backend: str = "", name: str = "ours") -> Way:
        """The way of `attend` by a backend, by default the call's own, in the call's order."""
        ordering = self.ordering(self.order)
        options = self.options(ordering) | {"backend": backend or self.backend}

        def run(inputs: Inputs) -> tuple[Tensor, ...]:
            q, k, v, *rest = inputs
            more = {name: x for name, x in zip(Inputs._fields[3:], rest, strict=True) if x is not None}
            results = attend(q, k, v, self.pattern, **more, **options)
            return results if isinstance(results, tuple) else (results,)

        return Way(name, run, ordering)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attend and are not padded, over all heads."""
        if self.pattern.length is None:
            return self.batch * self._sequence_pairs
        return self.batch * self.heads * self._grid_pairs

    def flop(self, direction: str) -> int:
        """Useful FLOP: of the forward, and of the backward too where the direction says so."""
        return (FLOP_FORWARD + FLOP_BACKWARD * (direction != "forward")) * self.pairs * self.head_dim

    def error(self, way: Way, *, gradient: bool) -> float:
        """The largest relative difference from float64: of the output in some rows, and of all gradients from these."""
        x = self.inputs.stored(way.ordering).mapped(lambda x: x.detach().requires_grad_(gradient))
        torch.manual_seed(SEED)  # of dropout
        outs = way.attend(x)
        exact_outs, exact_gradients = self._exact

        def in_rows(rows: Tensor) -> Tensor:
            return rows if way.ordering is None else way.ordering.undo(rows, dim=1)

        sampled = [in_rows(outs[0])[:, self._sampled], *(out[:, :SAMPLED_EXTRA] for out in outs[1:])]
        error = relative_difference(sampled, exact_outs)
        if not gradient:
            return error
        dout, *extra_douts = self._sampled_douts
        dout = dout if way.ordering is None else way.ordering.apply(dout, dim=1)
        gradients = torch.autograd.grad(outs, x.present, [dout, *extra_douts])
        gradients = [*map(in_rows, gradients[:3]), *gradients[3:]]
        return max(
            error, *(relative_difference([one], [exact]) for one, exact in zip(gradients, exact_gradients, strict=True))
        )

    @property
    def _sequence_pairs(self) -> int:
        size = (self.length - self.left_padded) // max(1, self.documents)
        count = {"heads": self.heads, "is_causal": self.is_causal}
        if self.queries:
            return self.pattern.pairs(size, at=range(size - self.queries, size), **count)
        # A key is seen by as many queries as it would see keys as a query, without causality.
        hidden = self.pattern.pairs(size, at=range(size - self.padded, size), **count)
        return max(1, self.documents) * self.pattern.pairs(size, **count) - hidden

    @property
    def _grid_pairs(self) -> int:
        first, kept_rows = True, self.pattern.shape[0] - self.padded // prod(self.pattern.shape[1:])
        seen = 1
        for axis in self.pattern.axes:
            line = torch.arange(axis.cells, device="cpu")
            attends = axis.attends(line[:, None], line)
            seen *= int((attends[:, :kept_rows] if first else attends).sum())
            first = False
        keys = self.length - self.padded + self.extra_keys
        return seen + self.length * self.extra_keys + self.extra_queries * keys

    @cached_property
    def _sampled(self) -> Tensor:
        # Rows of q: a box of a grid at one of its borders, the middle of a sequence, or all of a few.
        if self.pattern.length is not None:
            rows = torch.zeros((), dtype=torch.int64, device=self.device)
            for line, side in zip(self._box, self.pattern.shape, strict=True):
                rows = rows[..., None] * side + torch.arange(*line, device=self.device)
            return rows.flatten()
        middle = (self.length + self.left_padded) // 2
        first, count = max(0, middle - SAMPLED_ROWS // 2), min(SAMPLED_ROWS, self.length)
        whole = self.queries or (self.length if self.documents else 0)
        return (
            torch.arange(whole, device=self.device) if whole else torch.arange(first, first + count, device=self.device)
        )

    @property
    def _box(self) -> list[tuple[int, int]]:
        first, *others = self.pattern.shape
        middles = [max(0, side // 2 - SAMPLED_CELLS // 2) for side in others]
        starts = [max(0, first - self.padded // prod(others) - SAMPLED_CELLS), *middles]
        return [
            (start, min(start + SAMPLED_CELLS, side)) for start, side in zip(starts, self.pattern.shape, strict=True)
        ]

    @property
    def _sampled_douts(self) -> list[Tensor]:
        masked = [torch.zeros_like(dout) for dout in self.douts]
        masked[0][:, self._sampled] = self.douts[0][:, self._sampled]
        for zeros, dout in zip(masked[1:], self.douts[1:], strict=True):
            zeros[:, :SAMPLED_EXTRA] = dout[:, :SAMPLED_EXTRA]
        return masked

    @cached_property
    def _exact(self) -> tuple[Results, Results]:
        # The outputs of the sampled rows, and the gradients of all inputs from them.
        x = self.inputs.mapped(lambda x: x.detach().double().requires_grad_())
        options = self.options()
        if self.pattern.length is not None:
            options["query_box"] = self._box
        elif not self.documents and not self.queries:
            options["query_start"] = int(self._sampled[0])
        names = ("extra_k", "extra_v", "bias")
        options |= {name: getattr(x, name) for name in names if getattr(x, name) is not None}
        if x.extra_q is not None:
            options["extra_q"] = x.extra_q[:, :SAMPLED_EXTRA]
        torch.manual_seed(SEED)
        outs = attend(x.q[:, self._sampled], x.k, x.v, self.pattern, backend="reference", **options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        douts = [self.douts[0][:, self._sampled], *(dout[:, :SAMPLED_EXTRA] for dout in self.douts[1:])]
        gradients = torch.autograd.grad(outs, x.present, [dout.double() for dout in douts])
        return tuple(out.detach() for out in outs), gradients
