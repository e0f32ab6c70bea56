"""One call of attention, of any pattern: its inputs, what of it is useful, and row by row what it should give.

Every sweep of speed starts from a `Workload`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import torch
from torch import Tensor

from hilbert_lib import checks
from hilbert_lib.attention.api import attend
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.operators import pair_count
from hilbert_lib.attention.request import Request
from hilbert_lib.lab.exact_rows import SampledRows, sampled_positions
from hilbert_lib.lab.pairs import Results, Side
from hilbert_lib.limits.estimate import MemoryEstimate, estimate_memory
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import FLOP_BACKWARD, FLOP_FORWARD, DilatedPattern, Work
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import ListedPairs, PointNeighbourhood
from hilbert_lib.patterns.union import Union

# Rows of each head that are held against float64. A key of a grid costs window**4 weights.
SAMPLED_QUERIES, SAMPLED_KEYS = 24, 2
SAMPLED_CELLS, SAMPLED_CELL_KEYS = 8, 1
BOTH = "forward and backward"


@dataclass(frozen=True)
class Workload:
    """The inputs of one call on one sequence or grid, drawn when first used, and its float64 rows.

    pattern: of sequences, of a grid, or a union of either.
    length: tokens, or the cells of the grid.
    kv_heads: heads of k and v; by default as many as heads.
    is_causal: of patterns along a sequence; one of a grid says so itself.
    queries: (start, count) of q in the sequence, or None for all positions. Of a `DilatedPattern` alone.
    heads_first: whether k and v are stored (heads, seq, head_dim), where the rows of a head lie side by side.

    Raises ValueError for a length that is not the pattern's, and for what a pattern does not take.

    >>> work = Workload(Neighbourhood((4, 4), 3), 16, heads=2, head_dim=8, device=torch.device("cpu"))
    >>> work.useful.flop_forward  # 4 * heads * head_dim, for each of 16 * 9 pairs
    9216
    """

    pattern: Pattern
    length: int
    heads: int
    head_dim: int
    device: torch.device
    is_causal: bool = False
    queries: tuple[int, int] | None = None
    heads_first: bool = False
    dtype: str = "bfloat16"
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", checks.grouped(self.heads, self.kv_heads)[1])
        if self.pattern.length not in (None, self.length):
            raise ValueError(f"length must be that of the grid, {self.pattern.length}, got {self.length}")
        if self.queries is not None and not isinstance(self.pattern, DilatedPattern):
            raise ValueError(f"queries must be None for a {self.pattern.noun}, got {self.queries}")
        if self.is_causal and "is_causal" not in self.pattern.options:
            raise ValueError(f"is_causal must be False for a {self.pattern.noun}, got True")

    @classmethod
    def on_grid(cls, text: str, *, argument: str = "works", **where) -> "Workload":
        """A neighbourhood that a text names: grid, window, heads and head_dim. ValueError for any other text.

        A dilation of all axes follows the window after a colon, and a number of KV heads follows the heads after a
        slash. argument: the name that the error has for the text.

        >>> Workload.on_grid("4x6x8 3x3x5 2x16", device=torch.device("cpu")).head_dim
        16
        >>> Workload.on_grid("8x8 3x3:2 2x16", device=torch.device("cpu")).pattern.dilation
        (2, 2)
        >>> Workload.on_grid("64 9 8/2x16", device=torch.device("cpu")).kv_heads
        2
        """
        try:
            shape, window, size = text.split()
            window, colon, dilation = window.partition(":")
            shape, window = (tuple(map(int, part.split("x"))) for part in (shape, window))
            heads, head_dim = size.split("x")
            heads, slash, kv_heads = heads.partition("/")
            heads, kv_heads, head_dim = (
                checks.integer("heads, KV heads and head_dim", int(n), least=1)
                for n in (heads, kv_heads if slash else heads, head_dim)
            )
            near = Neighbourhood(shape, window, dilation=int(dilation) if colon else 1)
        except ValueError as error:
            allowed = (
                "grids, windows (with their dilation), heads (with KV heads) and head_dim, such as 64x64 7x7 2x16 or "
                "64x64 7x7:2 4/2x16"
            )
            raise ValueError(f"{argument} must be {allowed}; got {text!r}: {error}") from None
        return cls(near, near.length, heads, head_dim, kv_heads=kv_heads, **where)

    @property
    def call(self) -> Request:
        """The request that the call makes of a backend."""
        if isinstance(self.pattern, PointNeighbourhood):
            return Request(ListedPairs(), scale=self.head_dim**-0.5, lists=self.pattern.list_tensors)
        start = None if self.queries is None else self.queries[0]
        return Request(self.pattern.of_heads(self.kv_heads), self.is_causal, self.head_dim**-0.5, query_start=start)

    @property
    def parameters(self) -> dict:
        """Fields that distinguish it, for a record."""
        names = ("length", "heads", "head_dim", "is_causal", "dtype")
        groups = {} if self.kv_heads == self.heads else {"kv_heads": self.kv_heads}
        of_pattern = fields_of(self.pattern)
        return of_pattern | {name: getattr(self, name) for name in names if name not in of_pattern} | groups

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, random and normal."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(rows: int, heads: int, heads_first: bool = False) -> Tensor:
            shape = (1, heads, rows, self.head_dim) if heads_first else (1, rows, heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))
            return x.transpose(1, 2) if heads_first else x

        q, dout = (draw(self.rows, self.heads) for _ in range(2))
        k, v = (draw(self.length, self.kv_heads, self.heads_first) for _ in range(2))
        return q, k, v, dout

    @property
    def rows(self) -> int:
        """Of q."""
        return self.length if self.queries is None else self.queries[1]

    @property
    def input_bytes(self) -> int:
        """Of `tensors`, without drawing them."""
        rows = 2 * (self.rows * self.heads + self.length * self.kv_heads)
        return rows * self.head_dim * getattr(torch, self.dtype).itemsize

    @cached_property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as autograd's leaves."""
        return tuple(x.detach().requires_grad_() for x in self.tensors[:3])

    def stored(self, ordering: Ordering) -> tuple[Tensor, Tensor]:
        """k and v stored in an ordering, heads first where they were."""
        k, v = (x.transpose(1, 2) if self.heads_first else x for x in self.tensors[1:3])
        k, v = (ordering.apply(x, dim=2 if self.heads_first else 1) for x in (k, v))
        return (k.transpose(1, 2), v.transpose(1, 2)) if self.heads_first else (k, v)

    def side(self, name: str, run_attention: Callable[..., Tensor], direction: str = "", **parameters) -> Side:
        """A call on these inputs, to be timed by `run_sides`: the output, or its gradients, or both as one.

        run_attention: the output of (q, k, v, work). direction: "forward", "backward" alone, or `BOTH`; "" is the
        forward of a sweep that has no other. parameters: what else distinguishes the record, as sweep="backends".
        """
        recorded = cache(lambda: run_attention(*self.leaves, self))

        def output() -> Results:
            with torch.no_grad():
                return (run_attention(*self.tensors[:3], self),)

        def gradients() -> Results:
            return torch.autograd.grad(recorded(), self.leaves, self.tensors[3], retain_graph=True)

        def both() -> Results:
            return torch.autograd.grad(run_attention(*self.leaves, self), self.leaves, self.tensors[3])

        useful = self.useful
        of_forward = useful.flop_forward, useful.bytes_forward
        of_backward = useful.flop_backward, useful.bytes_backward
        run, (flop, moved) = {
            "forward": (output, of_forward),
            "backward": (gradients, of_backward),
            BOTH: (both, map(sum, zip(of_forward, of_backward, strict=True))),
        }[direction or "forward"]
        parameters |= self.parameters | ({"direction": direction} if direction else {})
        return Side(name, parameters, run, self.error, flop, moved)

    def stand_ins(self, *, gradient: bool) -> tuple[Tensor, Tensor]:
        """q and k without their memory, to ask what serves."""
        element = torch.empty(1, device=self.device, dtype=getattr(torch, self.dtype), requires_grad=gradient)
        q = element.expand(1, self.rows, self.heads, self.head_dim)
        return q, element.expand(1, self.length, self.kv_heads, self.head_dim)

    def refusal(self, backend: str, *, gradient: bool) -> str:
        """Reason why a backend cannot serve the call; "" where it can."""
        q, k = self.stand_ins(gradient=gradient)
        return backends_for(self.call.pattern)[backend].refusal(q, self.call, k)

    def estimate(self, backend: str, direction: str) -> MemoryEstimate:
        """Estimate of a call's memory by one backend."""
        names = ["heads", "kv_heads", "head_dim", "device"]
        if self.pattern.length is None:
            names += ["length", "is_causal"]
        sizes = {name: getattr(self, name) for name in names}
        how = {"dtype": getattr(torch, self.dtype), "backend": backend, "direction": direction}
        return estimate_memory(self.pattern, **sizes, **how)

    @cached_property
    def useful(self) -> Work:
        """FLOP and bytes that the call cannot do without; of the forward alone where q is a few rows.

        Along a dilated sequence a row that no branch uses is not read. On a grid and in a union all rows are.
        """
        element = getattr(torch, self.dtype).itemsize
        if isinstance(self.pattern, DilatedPattern) and self.queries is None:
            sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "element_size": element}
            return self.pattern.work(self.length, is_causal=self.is_causal, **sizes)
        q, k = (1, self.rows, self.heads, self.head_dim), (1, self.length, self.kv_heads, self.head_dim)
        pairs = pair_count(self.call, (q, k, k, None, None))
        flop = {"flop_forward": FLOP_FORWARD * pairs * self.head_dim}
        if self.queries is not None:
            moved = (2 * self._keys_read + 2 * self.rows * self.heads) * self.head_dim * element
            return Work(pairs, **flop, bytes_forward=moved, flop_backward=0, bytes_backward=0)
        flop["flop_backward"] = FLOP_BACKWARD * pairs * self.head_dim
        # q and out, k and v; in the backward these, dout, and the gradients of q, k and v.
        moved = 2 * self.length * (self.heads + self.kv_heads) * self.head_dim * element
        return Work(pairs, **flop, bytes_forward=moved, bytes_backward=2 * moved)

    @property
    def _keys_read(self) -> int:
        # Rows of k that any of the queries sees, over all KV heads, each once.
        start, count = self.queries
        seen = {"kv_heads": self.kv_heads, "length": self.length, "is_causal": self.is_causal}
        total = 0
        for head in range(self.kv_heads):
            keys = [self.pattern.keys(start + row, kv_head=head, **seen) for row in range(count)]
            total += len(torch.cat(keys).unique())
        return total

    def error(self, results: Results, slots: Tensor | None = None) -> float:
        """Relative difference of (out,), or the largest of (dq, dk, dv), from float64 on the sampled rows.

        slots: the row of each position, where the results are stored in an ordering.
        """
        return self._sampled.error(results, slots)

    @cached_property
    def _sampled(self) -> SampledRows:
        return SampledRows(
            self.tensors,
            self.pattern,
            self._sampled_queries(),
            keys=self._sampled_keys,
            first=self.call.first_query,
            is_causal=self.is_causal,
        )

    def _sampled_queries(self) -> list[Tensor]:
        # Positions in each head: on a grid at random, and the corners in the first head.
        if self.queries is not None:
            return [torch.arange(self.queries[0], sum(self.queries))] * self.heads
        if isinstance(self.pattern, DilatedPattern):
            drawn, group = {"count": SAMPLED_QUERIES, "kv_heads": self.kv_heads}, self.heads // self.kv_heads
            heads = range(self.heads)
            return [sampled_positions(self.pattern, self.length, kv_head=h // group, **drawn) for h in heads]
        generator = torch.Generator("cpu").manual_seed(0)
        count = SAMPLED_CELLS if self.pattern.length else SAMPLED_QUERIES
        drawn = torch.randint(self.length, (self.heads, count), generator=generator, device="cpu")
        if self.pattern.length:
            drawn[0, 0], drawn[0, 1] = 0, self.length - 1
        return list(drawn)

    @property
    def _sampled_keys(self) -> int:
        # Where every query attends to every key, a row of dk or dv would cost the whole work: then none.
        if not self.pattern.length:
            return SAMPLED_KEYS
        return SAMPLED_CELL_KEYS if self.useful.pairs < self.heads * self.length**2 else 0


def fields_of(pattern: Pattern) -> dict:
    """A pattern in a record: dilations, strides and causal axes where there are any.

    >>> fields_of(Neighbourhood((8, 8), 3, is_causal=(True, False)))
    {'grid': [8, 8], 'window': [3, 3], 'is_causal': [True, False]}
    """
    if isinstance(pattern, DilatedPattern):
        return {"branches": " ".join(f"{w}:{r}" for w, r in pattern.branches)}
    if isinstance(pattern, Neighbourhood):
        steps = {name: list(getattr(pattern, name)) for name in ("dilation", "stride")}
        steps = {name: values for name, values in steps.items() if set(values) != {1}}
        causal = {"is_causal": list(pattern.is_causal)} if any(pattern.is_causal) else {}
        return {"grid": list(pattern.shape), "window": list(pattern.window), **steps, **causal}
    if isinstance(pattern, PointNeighbourhood):
        return {"points": pattern.lists.queries, "window": list(pattern.window)}
    if isinstance(pattern, Union):
        return {"union": [fields_of(part) for part in pattern.patterns]}
    return {"attends": str(pattern)}


def fused_backend(work: Workload, *, gradient: bool = False) -> str:
    """The name of this library's fused kernels that serve a work: "hopper" where these do, otherwise "triton"."""
    return "triton" if work.refusal("hopper", gradient=gradient) else "hopper"


def by_backend(backend: str, q: Tensor, k: Tensor, v: Tensor, work: Workload) -> Tensor:
    """The output of `attend` by a backend of this name, or by "auto"."""
    return attend(q, k, v, work.pattern, is_causal=work.is_causal, backend=backend)


def grid(
    patterns: Mapping[str, DilatedPattern],
    *,
    lengths: Sequence[int],
    heads: int,
    head_dims: Sequence[int],
    device: torch.device,
    dtype: str = "bfloat16",
    rows: int = 2**22,
) -> Iterator[tuple[str, Workload]]:
    """Workloads of every length, pattern and head size, causal and not; fewer heads where length * heads would pass
    `rows`.
    """
    for length, (name, pattern), head_dim, is_causal in product(lengths, patterns.items(), head_dims, (False, True)):
        fitting = max(1, min(heads, rows // length))
        yield name, Workload(pattern, length, fitting, head_dim, device, is_causal, dtype=dtype)
