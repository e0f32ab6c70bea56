"""Host times of short calls beside torch's scaled_dot_product_attention, in alternating rounds of one process.

    python scripts/compare_host.py

In each round scaled_dot_product_attention and one kind of call are timed in turn, a few calls each. A ratio is the
median over the rounds of the ratio of the medians within a round, and in brackets its first and last quartile: what
slows the host for a while slows both. The first row is scaled_dot_product_attention beside itself. Ratios are to
calls of as many tokens.

The other cells have the median and the least of all calls in microseconds, and in brackets the time of a call back to
back, by events of the stream. The host is timed while the queue is short: it waits for the device after every few
calls. On a GPU processes compile the kernels together first. On a CPU a call's time is that of its kernels.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median, quantiles

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib import (
    DilatedPattern,
    MultiheadDilatedAttention,
    Neighbourhood,
    NeighbourhoodAttention,
    Union,
    attend,
    dilated_attention,
    neighbourhood_attention,
)

QUEUE = 4  # calls between two waits for the device
WARM = 6  # calls before any is timed: the third of a kind is looked up
IN_A_ROW = 200  # calls back to back
THEIRS = "scaled_dot_product_attention"
Work = tuple[Callable, list[Tensor]]  # forward, and the tensors that it is given
Mode = tuple[Callable[[], object], Callable]  # a call, and the mode of gradients that it runs in


def works(device: torch.device, dtype: torch.dtype) -> dict[str, Work]:
    """The calls that are timed: of 256 tokens or cells, and modules."""

    def drawn(*shape: int, number: int = 3) -> list[Tensor]:
        return [torch.randn(1, *shape, device=device, dtype=dtype, requires_grad=True) for _ in range(number)]

    near, far = Neighbourhood((16, 16), 7), Neighbourhood((16, 16), 3, dilation=4)
    one, two = DilatedPattern((256,), (1,)), DilatedPattern((64, 256), (1, 2))
    union, slide = Union((near, far)), DilatedPattern.geometric(offsets="head_block", padding="zeros")
    cells = NeighbourhoodAttention(512, 8, 7, device=device, dtype=dtype)
    layer = MultiheadDilatedAttention(768, 16, slide, device=device, dtype=dtype)
    bias = torch.randn(8, 13, 13, device=device, dtype=dtype, requires_grad=True)

    is_padding = torch.arange(64, device=device)[None] >= 50

    def joint(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        named = dict(zip(("extra_q", "extra_k", "extra_v"), extra, strict=True))
        return neighbourhood_attention(q, k, v, near, **named, extra_padding_mask=mask)

    tensors = drawn(256, 8, 64)
    lists = {"lists on the grid": (lambda q, k, v: neighbourhood_attention(q, k, v, near, backend="lists"), tensors)}
    return {
        THEIRS: (scaled_dot_product_attention, drawn(8, 256, 64)),
        "grid of 16 x 16, window 7": (lambda q, k, v: neighbourhood_attention(q, k, v, near), tensors),
        "sequence, one branch": (lambda q, k, v: dilated_attention(q, k, v, one), tensors),
        "sequence, branches 64 and 256 (rates 1, 2)": (lambda q, k, v: dilated_attention(q, k, v, two), tensors),
        "grid with a bias": (lambda q, k, v, bias: neighbourhood_attention(q, k, v, near, bias=bias), [*tensors, bias]),
        "union of two windows": (lambda q, k, v: attend(q, k, v, union), tensors),
        **(lists if device.type == "cuda" else {}),
        "joint, 64 extra queries and keys": (joint, tensors + drawn(64, 8, 64)),
        "joint, 14 of the 64 extra keys masked": (partial(joint, mask=is_padding), tensors + drawn(64, 8, 64)),
        "NeighbourhoodAttention, 512": (cells, drawn(16, 16, 512, number=1)),
        "Prov-GigaPath's layer, 1,000 tokens": (lambda x: layer(x, x, x)[0], drawn(1000, 768, number=1)),
    }


def both_ways(forward: Callable, tensors: list[Tensor]) -> Callable[[], object]:
    """A call of the forward and the backward."""
    first = forward(*tensors)
    douts = [torch.randn_like(x) for x in (first if isinstance(first, tuple) else (first,))]

    def call() -> object:
        results = forward(*tensors)
        return torch.autograd.grad(results if isinstance(results, tuple) else (results,), tensors, douts)

    return call


def modes(forward: Callable, tensors: list[Tensor]) -> list[Mode]:
    """The calls of a kind: without a gradient, forward, forward and backward. Each ran `WARM` times."""
    plain = [x.detach() for x in tensors]
    found = [
        (lambda: forward(*plain), torch.no_grad),
        (lambda: forward(*tensors), torch.enable_grad),
        (both_ways(forward, tensors), torch.enable_grad),
    ]
    for call, mode in found:
        with mode():
            for _ in range(WARM):
                call()
    return found


def host_us(mode: Mode, calls: int, wait: Callable[[], None]) -> list[float]:
    """The host's times of so many calls."""
    call, gradients = mode
    times = []
    with gradients():
        for number in range(calls):
            if number % QUEUE == 0:
                wait()
            begun = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begun) / 1000)
    return times


def ratio_in_words(ratios: list[float]) -> str:
    """Median, and the quartiles around it.

    >>> ratio_in_words([1.0, 1.1, 1.2, 1.3, 1.4])
    '1.20 (1.10 to 1.30)'
    """
    first, middle, last = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({first:.2f} to {last:.2f})"


def back_to_back_us(mode: Mode) -> float:
    """Time of a call among many in a row, by events of the stream."""
    call, gradients = mode
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with gradients():
        start.record()
        for _ in range(IN_A_ROW):
            call()
        stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop) / IN_A_ROW


def compile_kind(name: str) -> None:
    """Have Triton keep the kernels of a kind of call on disk."""
    forward, tensors = works(torch.device("cuda"), torch.bfloat16)[name]
    both_ways(forward, tensors)()
    torch.cuda.synchronize()


@click.command(help=__doc__)
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(min=2))
@click.option("--calls", default=8, show_default=True, type=click.IntRange(min=1), help="Of each side, in a round.")
@click.option("--kind", "kinds", multiple=True, help="A row of the table; by default all.")
def main(rounds, calls, kinds) -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    every = works(device, dtype)
    names = [name for name in every if not kinds or name in (THEIRS, *kinds)]
    if unknown := set(kinds) - set(names):
        raise click.UsageError(f"--kind must be a row of the table, got {', '.join(unknown)}")
    if on_gpu:
        with ProcessPoolExecutor(min(len(names), os.cpu_count()), mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_kind, names))
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    ours, theirs = {name: modes(*every[name]) for name in names}, modes(*every[THEIRS])
    times = {name: [[] for _ in theirs] for name in names}
    ratios = {name: [[] for _ in theirs] for name in names}
    for _ in range(rounds):
        for name in names:
            for number, sides in enumerate(zip(theirs, ours[name], strict=True)):
                sdpa, own = (host_us(side, calls, wait) for side in sides)
                times[name][number] += own
                ratios[name][number].append(median(own) / median(sdpa))
    click.echo("| us | no gradient | forward | forward and backward | ratios |")
    click.echo("| --- | --- | --- | --- | --- |")
    for name in names:
        cells = []
        for mode, found in zip(ours[name], times[name], strict=True):
            in_a_row = f" ({back_to_back_us(mode):.0f})" if on_gpu else ""
            cells.append(f"{median(found):.0f}, {min(found):.0f}{in_a_row}")
        click.echo(f"| {name} | {' | '.join(cells)} | {', '.join(map(ratio_in_words, ratios[name]))} |")


if __name__ == "__main__":
    main()
