"""Shares of time in which a GPU's units are busy, kernel by kernel, in works that miss their speed, by Nsight Compute.

    python scripts/busy_units.py
    python scripts/busy_units.py --work "window 3" --work "head_dim 32"

Each work is called once to compile and once under `ncu`, in a process of its own. A row is a launch: its time; the
share of cycles in which the tensor cores and the issue of instructions are busy while the multiprocessors are; the
shares of the peak rates of exponentials and of the memory; and the share of the time in which the multiprocessors have
work. Where no share is near 100, something else binds, often a chain of steps. bfloat16, "hopper". Needs a Hopper GPU
and `ncu`.
"""

import sys
from collections.abc import Callable, Iterator

import click
import torch

from hilbert_lib import DilatedPattern, Neighbourhood, dilated_attention, neighbourhood_attention
from hilbert_lib.lab.sweeps.counters import run_ncu
from hilbert_lib.patterns.pattern import Pattern

REFERENCE = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
TOKENS, SIDE, WINDOW = 65536, (256, 256), 33
SHORT = DilatedPattern((256, 1024), (1, 4)), {"tokens": 1024, "batch": 64}  # as many tokens
# Name: pattern, and what differs from 16 heads of 128 along a sequence, and 8 on a grid.
WORKS: dict[str, tuple[Pattern, dict]] = {
    "sequence": (REFERENCE, {}),
    "head_dim 64": (REFERENCE, {"head_dim": 64}),
    "head_dim 32": (REFERENCE, {"head_dim": 32}),
    "causal": (REFERENCE, {"is_causal": True}),
    "dropout": (REFERENCE, {"dropout_p": 0.1}),
    "64 sequences": SHORT,
    "segments of 64": (DilatedPattern((64,), (1,)), {}),
    "grid": (Neighbourhood(SIDE, WINDOW), {}),
    "stride 16": (Neighbourhood(SIDE, WINDOW, stride=16), {}),
    "mask": (Neighbourhood(SIDE, WINDOW), {"masked": 8192}),
    "window 1": (Neighbourhood(SIDE, 1), {}),
    "window 3": (Neighbourhood(SIDE, 3), {}),
    "window 5": (Neighbourhood(SIDE, 5), {}),
    "dilation that does not divide": (Neighbourhood((257, 257), WINDOW, dilation=2), {}),
}
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "tensor cores": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "active": "sm__cycles_active.avg",
    "elapsed": "sm__cycles_elapsed.avg",
}
KERNELS = "regex:_kernel$"  # ours, and none of torch's
SECONDS = 300.0  # of one work
ONE_WORK = "--call"  # how this file tells itself to make one work's calls


def call_of(name: str, *, device: torch.device | str = "cuda", shrink: int = 1) -> Callable[[], None]:
    """A forward and a backward of a work; `shrink` divides its heads and leaves one head at least."""
    pattern, options = WORKS[name]
    options = {"backend": "hopper"} | options
    is_sequence = isinstance(pattern, DilatedPattern)
    tokens = options.pop("tokens", TOKENS) if is_sequence else pattern.length
    heads = max(1, (16 if is_sequence else 8) // shrink)
    shape = options.pop("batch", 1), tokens, heads, options.pop("head_dim", 128)
    if masked := options.pop("masked", 0):
        options["key_padding_mask"] = torch.arange(tokens, device=device)[None] >= tokens - masked
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    attend = dilated_attention if is_sequence else neighbourhood_attention

    def call() -> None:
        torch.autograd.grad(attend(*tensors, pattern, **options), tensors, dout)

    return call


def watch_calls(name: str) -> None:
    """The calls of a work that `ncu` watches: one to compile, and one that counts."""
    call = call_of(name)
    call()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        call()
        torch.cuda.synchronize()


def rows_of(name: str) -> Iterator[list[str]]:
    """The cells of a work's launches; time in milliseconds, all else in %."""
    program = [sys.executable, __file__, ONE_WORK, name]
    for launch in run_ncu(program, METRICS, kernel=KERNELS, about=name, timeout=SECONDS).itertuples(index=False):
        kernel, nanoseconds, *shares, active, elapsed = launch
        yield [
            name,
            kernel,
            f"{nanoseconds / 1e6:.3f}",
            *(f"{share:.0f}" for share in (*shares, 100 * active / elapsed)),
        ]


@click.command(help=__doc__)
@click.option("--work", "works", multiple=True, type=click.Choice(list(WORKS)), help="Of all works these alone.")
@click.option(ONE_WORK, "called", hidden=True, type=click.Choice(list(WORKS)))
def main(works, called) -> None:
    if called:
        watch_calls(called)
        return
    if not torch.cuda.is_available():
        raise click.ClickException("it needs a GPU, and torch sees none")
    click.echo("| work | kernel | ms | tensor cores | exponentials | issue | memory | multiprocessors |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in works or WORKS:
        try:
            for cells in rows_of(name):
                click.echo(f"| {' | '.join(cells)} |")
        except RuntimeError as error:
            raise click.ClickException(f"{name}: {error}") from error


if __name__ == "__main__":
    main()
