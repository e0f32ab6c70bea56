"""The source of the warp-specialised kernels, run on a CPU (`emulator`), equals the oracle. Edited, it fails.

The library's own launches find branches, grids and arguments, as on a Hopper GPU.
"""

from functools import cache
from random import Random
from typing import NamedTuple

import oracle
import pytest
import torch
from cases import stored

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.call import Call
from hilbert_lib.attention.triton.hopper import division

emulator = pytest.importorskip("emulator", reason="needs triton", exc_type=ImportError)

CASES = 32
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of the norms of errors, as on a GPU
HEAD_DIMS = (40, 48, 64, 80, 128)
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2), (3, 3))  # of q, and of k and v
LAYOUTS = ("bshd", "bhsd", "sliced")


class Case(NamedTuple):
    """A call."""

    pattern: DilatedPattern
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    batch: int = 1
    layout: str = "bshd"
    dtype: torch.dtype = torch.bfloat16


@cache
def drawn(seed: int) -> Case:
    """A random case that the kernels serve. Of every third all tiles are whole, but for a causal mask."""
    random = Random(seed)
    lengths, rates, length = (100, 128, 200, 256, 300, 512, 900), (1, 2, 3, 4, 6), random.randint(70, 600)
    if seed % 3 == 0:
        lengths, rates, length = (128, 256, 384), (1, 1, 2), 768
    heads, kv_heads = random.choice(HEADS)
    pattern = None
    while pattern is None or not any(division.is_reached(*branch, length) for branch in pattern.branches):
        branches = random.randint(1, 3)
        pattern = DilatedPattern(
            random.choices(lengths, k=branches),
            random.choices(rates, k=branches),
            offsets=random.choice(("head", "head_block", "branch", "zero")),
            mixing="head_groups" if kv_heads >= branches and random.random() < 0.2 else "softmax",
        )
    return Case(
        pattern, length, heads, kv_heads, HEAD_DIMS[seed % 5], seed % 2 == 1, random.choice((1, 1, 2)),
        random.choice(LAYOUTS), random.choice((torch.bfloat16, torch.float16)),
    )  # fmt: skip


def times_seen(pattern: DilatedPattern, length: int, g: int, kv_heads: int, is_causal: bool) -> torch.Tensor:
    """How many times a query sees a key: (queries, keys), float64."""
    position = torch.arange(length)
    seen = torch.zeros(length, length, dtype=torch.float64)
    for i, (w, r) in enumerate(zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)):
        if oracle.uses(pattern.mixing, i, len(pattern.segment_lengths), g, kv_heads):
            inside = position % w % r == oracle.offset_of(pattern.offsets, i, r, g, kv_heads)
            together = position[:, None] // w == position // w
            seen += inside[:, None] & inside & together & ((position[:, None] >= position) | (not is_causal))
    return seen


def attention(q, k, v, pattern, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What `oracle.attention` computes query by query, at once."""
    length, kv_heads = k.shape[1:3]
    group = q.shape[2] // kv_heads
    seen = torch.stack([times_seen(pattern, length, g, kv_heads, is_causal) for g in range(kv_heads)])
    seen = seen.repeat_interleave(group, 0)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    is_empty = seen.sum(-1) == 0
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + (seen + is_empty[..., None]).log()
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v) * ~is_empty.T[..., None]
    return out, scores.logsumexp(-1).masked_fill(is_empty, -torch.inf)


@cache
def expected(case: Case) -> tuple:
    """Inputs, and what is right: out, lse and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.length, count, case.head_dim) for count in counts]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(case.dtype) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, case.pattern, case.is_causal)
    grads = torch.autograd.grad(out, leaves, dout.double())
    return (q, k, v, dout), (out.detach(), lse.detach(), *grads)


def results_of(sources, case: Case) -> dict[str, torch.Tensor]:
    """What the kernels compute."""
    q, k, v, dout = (stored(x, case.layout) for x in expected(case)[0])
    call = Call(case.pattern, is_causal=case.is_causal, scale=case.head_dim**-0.5)
    out, lse = sources.launch.forward(q, k, v, call)
    grads = sources.launch.backward(dout, q, k, v, out, lse, call)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))


def fault_of(sources, case: Case, is_deterministic: bool = False) -> str | None:
    """What is wrong about the results of a case, if anything."""
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        results = results_of(sources, case)
    except emulator.Fault as fault:
        return str(fault)
    finally:
        torch.use_deterministic_algorithms(False)
    launches = len({each.named["branches"] for each in sources.starts if "branches" in each.named})
    # Each launch rounds what it adds to.
    bound = (TOLERANCE[case.dtype] ** 2 + launches * (torch.finfo(case.dtype).eps / 4) ** 2) ** 0.5
    for (name, found), right in zip(results.items(), expected(case)[1], strict=True):
        found = found.double()
        if name == "lse":
            same = torch.where(found == right, 0, found - right).abs()
            if not same.max() < 2e-6:
                return f"lse: {same.max():.1e}"
        else:
            error = (found - right).norm(dim=-1)
            size = right.norm() / right.shape[:-1].numel() ** 0.5  # of a row
            if not (error.norm() < bound * right.norm() and error.max() < 10 * bound * size):
                return f"{name}: {error.norm() / right.norm():.1e}, in a row {error.max() / size:.1e}"
    return None


@pytest.mark.parametrize("seed", range(CASES))
def test_output_and_gradients_of_the_kernels_source_equal_the_oracle(seed):
    sources = emulator.Sources()
    assert fault_of(sources, drawn(seed)) is None
    assert {f"{emulator.PACKAGE}.hopper.{name}" for name in ("forward", "backward")} <= {
        each.kernel.__module__ for each in sources.starts
    }
