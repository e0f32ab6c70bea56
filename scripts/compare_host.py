"""Host times of short calls beside torch's scaled_dot_product_attention, in one process on one GPU.

    python scripts/compare_host.py

Each cell has the median and the least of many calls in microseconds, and in brackets the time of a call back to back,
by events of the stream. The host is timed while the queue is short: it waits for the device after every few calls.
Ratios are to scaled_dot_product_attention of as many tokens. On a CPU a call's time is that of its kernels.
"""

import time
from collections.abc import Callable
from statistics import median

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
Work = tuple[Callable, list[Tensor]]  # forward, and the tensors that it is given


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

    def joint(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        return neighbourhood_attention(
            q, k, v, near, **dict(zip(("extra_q", "extra_k", "extra_v"), extra, strict=True))
        )

    tensors = drawn(256, 8, 64)
    lists = {"lists on the grid": (lambda q, k, v: neighbourhood_attention(q, k, v, near, backend="lists"), tensors)}
    return {
        "scaled_dot_product_attention": (scaled_dot_product_attention, drawn(8, 256, 64)),
        "grid of 16 x 16, window 7": (lambda q, k, v: neighbourhood_attention(q, k, v, near), tensors),
        "sequence, one branch": (lambda q, k, v: dilated_attention(q, k, v, one), tensors),
        "sequence, branches 64 and 256 (rates 1, 2)": (lambda q, k, v: dilated_attention(q, k, v, two), tensors),
        "grid with a bias": (lambda q, k, v, bias: neighbourhood_attention(q, k, v, near, bias=bias), [*tensors, bias]),
        "union of two windows": (lambda q, k, v: attend(q, k, v, union), tensors),
        **(lists if device.type == "cuda" else {}),
        "joint, 64 extra queries and keys": (joint, tensors + drawn(64, 8, 64)),
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


def host_us(call: Callable[[], object], calls: int, wait: Callable[[], None]) -> tuple[float, float]:
    """Median and least of the host's times of a call."""
    for _ in range(WARM):
        call()
    times = []
    for _ in range(calls // QUEUE):
        wait()
        for _ in range(QUEUE):
            begun = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begun) / 1000)
    return median(times), min(times)


def back_to_back_us(call: Callable[[], object], calls: int) -> float:
    """Time of a call among many in a row, by events of the stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop) / calls


@click.command(help=__doc__)
@click.option("--calls", default=800, show_default=True, type=click.IntRange(min=QUEUE), help="Of each kind, timed.")
def main(calls) -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    theirs: list[tuple[float, float]] = []
    click.echo("| us | no gradient | forward | forward and backward | ratios of medians, of minima |")
    click.echo("| --- | --- | --- | --- | --- |")
    for name, (forward, tensors) in works(device, dtype).items():
        plain, found, cells = [x.detach() for x in tensors], [], []
        for call, mode in (
            (lambda run=forward, x=plain: run(*x), torch.no_grad),
            (lambda run=forward, x=tensors: run(*x), torch.enable_grad),
            (both_ways(forward, tensors), torch.enable_grad),
        ):
            with mode():
                found.append(host_us(call, calls, wait))
                in_a_row = f" ({back_to_back_us(call, calls // QUEUE):.0f})" if on_gpu else ""
            cells.append("{:.0f}, {:.0f}".format(*found[-1]) + in_a_row)
        theirs = theirs or found
        ratios = [
            " ".join(f"{own[n] / sdpa[n]:.2f}" for own, sdpa in zip(found, theirs, strict=True)) for n in range(2)
        ]
        click.echo(f"| {name} | {' | '.join(cells)} | {', '.join(ratios)} |")


if __name__ == "__main__":
    main()
