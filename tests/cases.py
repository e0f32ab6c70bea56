"""Cases of dilated attention, and the check of one of them against the oracle: output, lse and gradients."""

from collections.abc import Callable
from functools import cache

import oracle
import pytest
import torch
from allpairspy import AllPairs

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

# name: segment lengths, rates
BRANCHES = {
    "one": ((16,), (1,)),
    "aligned": ((8, 16, 32), (1, 2, 4)),
    "uneven": ((6, 12, 24), (1, 4, 5)),
    "sparse": ((8, 16), (2, 4)),
    "longer": ((16, 1000), (4, 3)),
}
ORDERINGS = {
    "none": lambda n: None,
    "linear": Ordering.linear,
    "residue": lambda n: Ordering.residue(n, 3),
    "random": lambda n: Ordering.random(n, seed=1),
    **{kind: lambda n, kind=kind: Ordering.from_curve(kind, n) for kind in ("hilbert", "morton", "snake", "tile")},
    "chunked": lambda n: Ordering.from_curve("hilbert", n, chunk=8),
}
# out, lse, gradient; float64 inputs are exact, and halves are rounded once on the way in and once on the way out.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12, 1e-11),
    torch.float32: (2e-4, 2e-4, 2e-4),
    torch.float16: (4e-3, 2e-4, 2e-2),
    torch.bfloat16: (3e-2, 2e-4, 1.5e-1),
}
SHAPES = {  # batch, length, heads, kv_heads, head_dim
    "plain": (2, 32, 4, 4, 8),
    "ragged": (2, 37, 4, 4, 8),
    "grouped": (1, 45, 6, 3, 5),
    "one_kv_head": (2, 32, 4, 1, 16),
    "shorter": (2, 5, 3, 3, 3),
    "wide": (2, 70, 4, 2, 64),
    "small": (1, 21, 2, 2, 5),
    "small_grouped": (2, 18, 2, 1, 3),
}
LAYOUTS = ("bshd", "bhsd", "sliced")


def in_pairs(axes: tuple, at: int, kv_heads: Callable = lambda shape: SHAPES[shape][3]) -> pytest.MarkDecorator:
    """Cases in which every two values of the axes meet, without those that have fewer KV heads than head groups.

    axes: branches, offsets, mixing, and others; axis `at` says how many KV heads there are.
    """

    def is_possible(case: list) -> bool:
        return len(case) <= at or case[2] == "softmax" or kv_heads(case[at]) >= len(BRANCHES[case[0]][0])

    cases = list(AllPairs(list(map(list, axes)), filter_func=is_possible))
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


def stored(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = x.new_full((x.shape[0], x.shape[1] + 3, x.shape[2], x.shape[3] + 8), torch.nan)
        wide[:, 1:-2, :, : x.shape[3]] = x
        return wide[:, 1:-2, :, : x.shape[3]]
    return x


@cache
def expected(branches: str, offsets: str, mixing: str, dtype: torch.dtype, shape: str, is_causal: bool):
    """Inputs of the dtype, and what the oracle makes of them in float64."""
    batch, length, heads, kv_heads, head_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, dout = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing)
    out, lse = oracle.attention(*leaves, pattern, is_causal=is_causal)
    grads = torch.autograd.grad(out, leaves, dout.double())
    return pattern, (q, k, v, dout), out.detach(), lse.detach(), grads


def check(branches, offsets, mixing, ordering, backend, dtype, shape, layout, is_causal, device="cpu") -> None:
    """Run one case and compare it with the oracle."""
    pattern, (q, k, v, dout), out, lse, grads = expected(branches, offsets, mixing, dtype, shape, is_causal)
    order = ORDERINGS[ordering](k.shape[1])
    kept = [q, k, v] if order is None else [q, order.apply(k, dim=1), order.apply(v, dim=1)]
    leaves = [stored(x.to(device), layout).requires_grad_() for x in kept]
    got, got_lse = dilated_attention(
        *leaves, pattern, is_causal=is_causal, kv_ordering=order, backend=backend, return_lse=True
    )
    got_grads = list(torch.autograd.grad(got, leaves, dout.to(device)))
    if order is not None:
        got_grads[1:] = [order.undo(x, dim=1) for x in got_grads[1:]]
    assert got.dtype == dtype
    assert got_lse.shape == lse.shape
    assert not got_lse.requires_grad
    tolerances = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu().double(), out, atol=tolerances[0], rtol=0)
    torch.testing.assert_close(got_lse.cpu().double(), lse, atol=tolerances[1], rtol=0)
    for mine, theirs in zip(got_grads, grads, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, atol=tolerances[2], rtol=0)


def tiles_of(tables, one, g, length):
    """Positions of the rows of each tile of a head that the tables of a pass hold."""
    for at in range(-(-length // tables.chunk)):
        for start, members, u, size in tables.items[g, at % tables.items.shape[1]].tolist():
            row = u + torch.arange(size)
            tile = at * tables.chunk + tables.classes[start + row % members] + row // members * one.stride
            tile = tile[tile < min((at + 1) * tables.chunk, length)]
            if len(tile):
                yield tile
