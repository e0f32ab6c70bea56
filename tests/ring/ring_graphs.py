"""What ranks replay of CUDA graphs, in the tests of the ring."""

import gc
from functools import partial

import torch
import torch.distributed as dist
from ring_ranks import NAMES, SPECS, device

from hilbert_lib import DilatedPattern, Neighbourhood
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.ring import (
    PointShard,
    RingDilatedAttention,
    ring_attend,
    ring_dilated_attention,
    ring_neighbourhood_attention,
)

PATTERN = DilatedPattern((64, 256, 512), (1, 2, 4))
ROWS = 256  # of a rank


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = (torch.randn(1, ROWS, 4, 64, generator=generator).to(device(), torch.bfloat16) for _ in range(4))
    return [x.requires_grad_(n < 3) for n, x in enumerate(drawn)]


def replays(what: str, *, padded: bool = False, ordering: str = "none", **options) -> list[str]:
    """What of a forward and backward differs in a CUDA graph that is replayed with other values, and which ones."""
    *leaves, dout = tensors()
    if padded:
        options["key_padding_mask"] = torch.arange(ROWS, device=device())[None] % 3 == 0
    if what == "grid":
        options["ordering"] = SPECS[ordering] and SPECS[ordering].ordering(dist.get_world_size() * ROWS)
        call = partial(ring_neighbourhood_attention, neighbourhood=Neighbourhood((32, 16), (5, 7)), **options)
    elif what == "points":
        cells = torch.cartesian_prod(torch.arange(32), torch.arange(16)).split(ROWS)[dist.get_rank()]
        call = partial(ring_attend, pattern=PointShard(cells.to(device()), (5, 7)), **options)
    else:
        options |= {"transport": what, "kv_ordering": SPECS[ordering]}
        call = partial(ring_dilated_attention, pattern=PATTERN, **options)

    def run() -> list[torch.Tensor]:
        out, lse = call(*leaves, return_lse=True)
        loss = (out * dout).sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    run()  # with what is left out without validation
    graph, replayed = captured(run)
    return _differing(graph.replay, replayed, run, [*leaves, dout])


def graphed_module() -> list[str]:
    """Likewise of a module that torch captures, whose backward is another graph.

    Its graphs are in a circle of references: torch makes a class for them. The rank ends with them all the same.
    """
    gc.disable()  # as where it does not run before the end by chance
    *leaves, dout = tensors()
    module = RingDilatedAttention(PATTERN)
    like = tuple(torch.zeros_like(x).requires_grad_() for x in leaves)
    graphed = torch.cuda.make_graphed_callables(RingDilatedAttention(PATTERN), like)
    found = [torch.empty_like(x) for x in (dout, *leaves)]

    def run(attention) -> list[torch.Tensor]:
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad((out * dout).sum(), leaves)]

    def replay() -> None:
        for into, x in zip(found, run(graphed), strict=True):
            into.copy_(x)

    return _differing(replay, found, partial(run, module), [*leaves, dout])


def _differing(replay, replayed: list[torch.Tensor], run, given: list[torch.Tensor]) -> list[str]:
    names = NAMES if len(replayed) == len(NAMES) else ("out", *NAMES[2:])
    differing = []
    for factor in (1.0, 0.5, -1.5):
        with torch.no_grad():
            for x in given:
                x.mul_(factor)
        torch.manual_seed(3)
        replay()
        torch.manual_seed(3)
        for name, mine, right in zip(names, replayed, run(), strict=True):
            # Sums by atomics differ in the last bits.
            if not torch.allclose(mine.float(), right.float(), rtol=0.02, atol=1e-3) or not mine.isfinite().any():
                differing.append(f"{name} at {factor}: {(mine.float() - right.float()).abs().max()}")
    return differing
