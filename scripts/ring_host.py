"""Host times of `ring_dilated_attention`, a rank for each GPU of this machine.

    python scripts/ring_host.py

A table's row is a number of tokens a rank and a transport; the pattern reaches over the whole sequence. Ranks begin six
calls in a row together, on idle devices. A call's host time is a sixth of theirs: the median of seven such loops, on
the slowest rank. The last columns have the time until the device is done, likewise. Where the host takes as long as the
device, calls wait for it. Without a GPU two ranks run on the CPU, whose time is that of their kernels too.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import click
import torch
import torch.distributed as dist

from hilbert_lib import ring_dilated_attention, run_ranks
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern

WARM = 4  # calls before any is timed: lengths are agreed and kernels compiled
LOOPS, IN_A_ROW = 7, 6
FIRST_SEGMENT = 2048
STALL_SECONDS = 180.0  # a rank compiles while others wait
Times = tuple[float, float]  # milliseconds of a call: of the host, and until the device is done


def times_of(order: dict) -> list[list[Times]]:
    """A target of `run_ranks`: of each row the times of a forward, and of a forward and backward."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for tokens, transport in order["rows"]:
        shape = 1, tokens, order["heads"], order["head_dim"]
        leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        dout = torch.randn(shape, device=device, dtype=dtype)
        pattern = spanning_pattern(tokens * dist.get_world_size(), min(FIRST_SEGMENT, tokens))
        forward = partial(ring_dilated_attention, *leaves, pattern, transport=transport)
        found.append([call_ms(run, device) for run in (forward, partial(both_ways, forward, leaves, dout))])
    return found


def both_ways(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> None:
    """A forward and a backward."""
    torch.autograd.grad(forward(), leaves, dout)


def call_ms(run: Callable[[], object], device: torch.device) -> Times:
    """The times of a call of this rank."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    for _ in range(WARM):
        run()
    loops = []
    for _ in range(LOOPS):
        wait()
        dist.barrier()
        wait()
        begun = time.perf_counter()
        for _ in range(IN_A_ROW):
            run()
        queued = time.perf_counter()
        wait()
        loops.append((queued - begun, time.perf_counter() - begun))
    return tuple(1000 * median(times) / IN_A_ROW for times in zip(*loops, strict=True))


@click.command(help=__doc__)
@click.option("--ranks", type=click.IntRange(min=2), help="By default as many as there are GPUs.")
@click.option("--tokens", multiple=True, default=(131072, 4096), show_default=True, type=click.IntRange(min=1))
@click.option("--transport", "transports", multiple=True, default=("auto", "all_gather", "ring"), show_default=True)
@click.option("--heads", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--head-dim", default=64, show_default=True, type=click.IntRange(min=1))
def main(ranks, tokens, transports, heads, head_dim) -> None:
    rows = [(count, transport) for count in tokens for transport in transports]
    # Ranks import this file, which lies in no package.
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    order = {"rows": rows, "heads": heads, "head_dim": head_dim}
    ranks = ranks or max(2, torch.cuda.device_count())
    by_rank = run_ranks("ring_host:times_of", ranks, order, stall_seconds=STALL_SECONDS)
    click.echo("| tokens a rank, transport | host, ms: forward | both ways | device, ms: forward | both ways |")
    click.echo("| --- | --- | --- | --- | --- |")
    for (count, transport), *of_ranks in zip(rows, *by_rank, strict=True):
        slowest = [[max(times) for times in zip(*of_call, strict=True)] for of_call in zip(*of_ranks, strict=True)]
        cells = [f"{call[column]:.2f}" for column in (0, 1) for call in slowest]
        click.echo(f"| {count:,}, {transport} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
