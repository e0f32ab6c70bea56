"""The inputs of one call of attention and, row by row, what it should give: what every sweep of speed starts from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import torch
from torch import Tensor

from hilbert_lib.attention.api import attend
from hilbert_lib.attention.request import Request
from hilbert_lib.lab.exact_rows import SampledRows, sampled_positions
from hilbert_lib.lab.pairs import Results, Side
from hilbert_lib.limits.estimate import MemoryEstimate, estimate_memory
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import FLOP_BACKWARD, FLOP_FORWARD, DilatedPattern
from hilbert_lib.patterns.neighbourhood import Neighbourhood

SAMPLED_QUERIES, SAMPLED_KEYS = 24, 2  # of each head, held against float64
BOTH = "forward and backward"


@dataclass(frozen=True)
class Workload:
    """The inputs of one call, drawn when first used, and its float64 rows. One sequence, as many KV heads as heads.

    queries: (start, count) of q in the sequence, or None for all positions. heads_first: whether k and v are stored
    (heads, seq, head_dim), where the rows of a head lie side by side.
    """

    pattern: DilatedPattern | Neighbourhood
    length: int
    heads: int
    head_dim: int
    device: torch.device
    is_causal: bool = False
    queries: tuple[int, int] | None = None
    heads_first: bool = False
    dtype: str = "bfloat16"

    @property
    def call(self) -> Request:
        start = None if self.queries is None else self.queries[0]
        return Request(self.pattern.of_heads(self.heads), self.is_causal, self.head_dim**-0.5, query_start=start)

    @property
    def parameters(self) -> dict:
        """What distinguishes it, for a record."""
        names = ("length", "heads", "head_dim", "is_causal", "dtype")
        sizes = {name: getattr(self, name) for name in names}
        if isinstance(self.pattern, Neighbourhood):
            return {"grid": list(self.pattern.shape), "window": list(self.pattern.window), **sizes}
        return {"branches": " ".join(f"{w}:{r}" for w, r in self.pattern.branches), **sizes}

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output, random and normal."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(rows: int, heads_first: bool) -> Tensor:
            shape = (1, self.heads, rows, self.head_dim) if heads_first else (1, rows, self.heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, self.dtype))
            return x.transpose(1, 2) if heads_first else x

        q, dout = draw(self.rows, False), draw(self.rows, False)
        return q, draw(self.length, self.heads_first), draw(self.length, self.heads_first), dout

    @property
    def rows(self) -> int:
        """Of q."""
        return self.length if self.queries is None else self.queries[1]

    @property
    def input_bytes(self) -> int:
        """Of `tensors`, without drawing them."""
        return 2 * (self.rows + self.length) * self.heads * self.head_dim * getattr(torch, self.dtype).itemsize

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
        out = cache(lambda: run_attention(*self.leaves, self))

        def forward() -> Results:
            with torch.no_grad():
                return (run_attention(*self.tensors[:3], self),)

        def backward() -> Results:
            return torch.autograd.grad(out(), self.leaves, self.tensors[3], retain_graph=True)

        def both() -> Results:
            return torch.autograd.grad(run_attention(*self.leaves, self), self.leaves, self.tensors[3])

        of_forward, of_backward = self.flop_and_bytes[:2], self.flop_and_bytes[2:]
        run, (flop, moved) = {
            "forward": (forward, of_forward),
            "backward": (backward, of_backward),
            BOTH: (both, map(sum, zip(of_forward, of_backward, strict=True))),
        }[direction or "forward"]
        parameters |= self.parameters | ({"direction": direction} if direction else {})
        return Side(name, parameters, run, self.error, flop, moved)

    def stand_in(self, *, gradient: bool) -> Tensor:
        """q without its memory, to ask what serves."""
        one = torch.empty(1, device=self.device, dtype=getattr(torch, self.dtype), requires_grad=gradient)
        return one.expand(1, self.length, self.heads, self.head_dim)

    def estimate(self, backend: str, direction: str) -> MemoryEstimate:
        """What memory a call takes by one backend."""
        names = ["heads", "head_dim", "device"]
        if self.pattern.length is None:
            names += ["length", "is_causal"]
        sizes = {name: getattr(self, name) for name in names}
        how = {"dtype": getattr(torch, self.dtype), "backend": backend, "direction": direction}
        return estimate_memory(self.pattern, **sizes, **how)

    @cached_property
    def flop_and_bytes(self) -> tuple[int, int, int, int]:
        """Useful FLOP and bytes of the forward, then of the backward; of the forward alone where q is a few rows."""
        element = getattr(torch, self.dtype).itemsize
        if isinstance(self.pattern, Neighbourhood):
            pairs, rows = self.heads * self.pattern.pairs, self.length * self.heads * self.head_dim * element
            flop = pairs * self.head_dim
            return FLOP_FORWARD * flop, 4 * rows, FLOP_BACKWARD * flop, 8 * rows
        if self.queries is None:
            sizes = {"heads": self.heads, "head_dim": self.head_dim, "element_size": element}
            work = self.pattern.work(self.length, is_causal=self.is_causal, **sizes)
            return work.flop_forward, work.bytes_forward, work.flop_backward, work.bytes_backward
        start, count = self.queries
        seen = {"kv_heads": self.heads, "length": self.length, "is_causal": self.is_causal}
        sets = [[self.pattern.keys(start + t, kv_head=g, **seen) for t in range(count)] for g in range(self.heads)]
        pairs = sum(len(keys) for of_head in sets for keys in of_head)
        rows = sum(len(torch.cat(of_head).unique()) for of_head in sets)
        moved = (2 * rows + 2 * count * self.heads) * self.head_dim * element  # k and v once; q and the output
        return 4 * pairs * self.head_dim, moved, 0, 0

    def error(self, results: Results) -> float:
        """Relative difference of (out,), or the largest of (dq, dk, dv), from float64 on the sampled rows."""
        return self._sampled.error(results)

    @cached_property
    def _sampled(self) -> SampledRows:
        if isinstance(self.pattern, Neighbourhood):
            generator = torch.Generator("cpu").manual_seed(0)
            rows = list(torch.randint(self.length, (self.heads, SAMPLED_QUERIES), generator=generator, device="cpu"))
            return SampledRows(self.tensors, self.pattern, rows, keys=SAMPLED_KEYS)
        if self.queries is not None:
            rows = [torch.arange(self.queries[0], sum(self.queries))] * self.heads
        else:
            drawn, heads = {"count": SAMPLED_QUERIES, "kv_heads": self.heads}, range(self.heads)
            rows = [sampled_positions(self.pattern, self.length, kv_head=g, **drawn) for g in heads]
        return SampledRows(self.tensors, self.call, rows, keys=SAMPLED_KEYS, first=self.call.first_query)


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
