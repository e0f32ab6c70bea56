"""`hilbert bench`: measure attention and its backends on this machine."""

# Each command imports what it needs, so that --help does not wait for torch.
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hilbert_lib.cli.options import DTYPES, LOCAL, numbers, option, usage_errors, words, work_options

if TYPE_CHECKING:
    from hilbert_lib.lab.workload import Workload

LENGTHS = "Tokens: 1k:1m doubles, 1k,4k,3000."
FILE = click.Path(dir_okay=False, path_type=Path)
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Of q, k and v; by default bfloat16 on a GPU and float32 on the CPU."
)


@click.group()
def bench() -> None:
    """Measure on this machine without taking it down.

    `attention` runs each point in a process of its own, under limits of memory and time; one that fails is recorded
    with its cause, and costs no other. `backends` and `grids` leave out what would not fit into memory. The limits are
    those of SafetyConfig, which variables set: HILBERT_SAFETY_MAX_MEMORY_SHARE, HILBERT_SAFETY_MAX_SECONDS and others.

    \b
    Example: hilbert bench attention --lengths 1k:64k --backends all
    """


@bench.command()
@option("--lengths", type=numbers, default="1k:16k", help=LENGTHS)
@option("--backends", type=words, default="all", help="As hopper,cudnn,sdpa; the first is compared with.")
@work_options(segments="2k:32k", rates="1:16", heads=8)
@dtype_option
@click.option("--direction", "directions", type=words, default="forward", help="forward,backward")
@option("--json", "path", type=FILE, default=LOCAL / "bench_attention.jsonl", help="Keeps the points; is read again.")
@click.option("--retry-failed", is_flag=True, help="Try again what failed in an earlier run.")
@click.option("--dry-run", is_flag=True, help="Only show what would be tried, and what not and why.")
def attention(path, retry_failed, dry_run, backends, **sizes) -> None:
    """Time dilated attention by length, every backend in turn with the first.

    A side that would not fit into memory is not tried; out of memory, a hang or a crash ends one process and is
    recorded. A second run measures what is missing, and what met a limit of the machine. The table shows the median
    time and the interquartile range in ms, the ratio (time of the first backend over this one's) with its 95 %
    interval, and the relative error against float64. If a backend fails while timed with the others, it is timed alone
    and shown without a ratio; --retry-failed tries again. The exit status is 1 if anything failed.

    \b
    Example: hilbert bench attention --lengths 1k:1m --backends all --json out.jsonl
    Two backends, both ways:  hilbert bench attention --backends hopper,cudnn --direction forward,backward
    One branch, no dilation:  hilbert bench attention --segment-lengths 4k --dilation-rates 1 --lengths 4k
    """
    from hilbert_lib.attention.backends.registry import BACKENDS
    from hilbert_lib.lab.guarded.cases import attention_points, outcome_table
    from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner, is_failure

    with usage_errors():
        work = _work(**sizes)
        points = attention_points(backends=list(BACKENDS) if backends == ["all"] else backends, **work)
        runner = SafeBenchmarkRunner(path, device=work["device"])
    if dry_run:
        for point in points:
            refused, tried = runner.why_not(point), runner.would_try(point, retry_failed=retry_failed)
            for backend in point["sides"]:
                reason = "would be tried" if backend in tried else f"stands in {path}"
                reason = "{status}: {cause}".format(**refused[backend]) if backend in refused else reason
                click.echo(f"{point['direction']} {point['length']}  {backend}  {reason}")
        return
    lines = []

    def show(line: dict, reused: bool) -> None:
        lines.append(line)
        outcomes = ", ".join(f"{backend} {outcome['status']}" for backend, outcome in line["outcomes"].items())
        again = "  (reused)" if reused else ""
        click.echo(f"{line['point']['direction']} {line['point']['length']}  {outcomes}{again}")

    try:
        runner.run(points, retry_failed=retry_failed, on_point=show)
    finally:  # also where the results cannot be written, or it is stopped
        table = outcome_table(lines).drop(columns=["peak_bytes", "paired"])
        click.echo(table.to_string(index=False, na_rep="", float_format="{:.3g}".format) if len(table) else "")
    click.echo(f"the records: {path}")
    sys.exit(any(is_failure(outcome) for line in lines for outcome in line["outcomes"].values()))


@bench.command("backends")
@option("--lengths", type=numbers, default="4k", help=LENGTHS)
@work_options(segments="1k:4k", rates="1:4", heads=8)
@dtype_option
@click.option("--gradient", is_flag=True, help="Time forward and backward together.")
def backends(lengths, gradient, **sizes) -> None:
    """Time the backends that can serve, and remember their order: "auto" goes by it from then on.

    One measurement speaks for one shape class: lengths and heads up to the next power of two; pattern, head size,
    dtype, causality and direction as given. It is kept in the user's cache folder for this machine and these versions.

    \b
    Example: hilbert bench backends --lengths 1k:64k --head-dim 128 --causal
    """
    from hilbert_lib.lab.workload import Workload

    with usage_errors():
        shared = _work(**sizes)
    _measure({str(length): Workload(length=length, **shared) for length in lengths}, gradient)


@bench.command()
@click.argument("works", nargs=-1, required=True, metavar="WORK...")
@click.option("--stride", default="1", show_default=True, metavar="CELLS", help="Of all axes, or of each, as 16x8x8.")
@click.option("--causal", is_flag=True, help="No cell sees one after it, along any axis.")
@dtype_option
@click.option("--gradient", is_flag=True, help="Time forward and backward together.")
def grids(works, stride, causal, dtype, gradient) -> None:
    """Time the backends that can serve a window on a grid, and remember their order, as `backends` does.

    A WORK names grid, window, heads and head_dim. Cells are stored row by row. Groups of as many cells as the stride
    share a window. A dilation of all axes follows the window after a colon. The number of KV heads, if there are fewer,
    follows the heads after a slash.

    \b
    Example: hilbert bench grids "256x256 33x33 8x128" "257x257 33x33:2 8x128" --gradient
    Example: hilbert bench grids "30x48x80 18x24x24 24x128" --stride 16x8x8
    Example: hilbert bench grids "32768 1024 64/8x128" --causal
    """
    from hilbert_lib.lab.workload import Workload

    with usage_errors():
        where = _where(dtype)
        named = {text: Workload.on_grid(text, **where) for text in works}
        named = {text: _with_steps(text, work, stride, causal) for text, work in named.items()}
    _measure(named, gradient)


def _with_steps(text: str, work: "Workload", stride: str, causal: bool) -> "Workload":
    """The work that a text names, with a stride, in words, and causal or not."""
    try:
        first, *others = (int(cells) for cells in stride.split("x"))
    except ValueError:
        raise ValueError(f"stride must be a number, or one for each axis, as 16x8x8; got {stride!r}") from None
    try:
        near = replace(work.pattern, stride=(first, *others) if others else first, is_causal=causal)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return replace(work, pattern=near)


def _measure(works: "dict[str, Workload]", gradient: bool) -> None:
    """Print and keep the times of backends over the fastest one's, work by work; beside them useful TFLOP/s."""
    from hilbert_lib.attention.measured_rules import folder
    from hilbert_lib.lab.selection import measured_times, remember_times
    from hilbert_lib.limits.config import SafetyConfig

    with usage_errors():
        SafetyConfig.load()  # a variable that sets no limit is told before anything is measured
    for name, work in works.items():
        with usage_errors():
            times, medians = measured_times(work, gradient=gradient)
        fastest = min(times.values())
        useful = work.useful
        flop = useful.flop_forward + (useful.flop_backward if gradient else 0)
        rates = {name: f"{medians[name]:.3g} ms, {flop / medians[name] / 1e9:.3g} TFLOP/s" for name in times}
        told = ", ".join(f"{name} {time / fastest:.2f} ({rates[name]})" for name, time in times.items())
        click.echo(f"{name}  {told}")
        try:
            click.echo(f"kept in {remember_times(work, times, medians, gradient=gradient)}")
        except OSError as error:
            message = f"measured, but not kept: {folder()}: {error.strerror or error}"
            raise click.ClickException(message) from error


def _where(dtype: str | None) -> dict:
    """The device, and the dtype that the user gave or its default."""
    from hilbert_lib.limits.memory import device_or_default
    from hilbert_lib.machine import check_gpu

    check_gpu()
    device = device_or_default(None)
    return {"device": device, "dtype": dtype or ("bfloat16" if device.type == "cuda" else "float32")}


def _work(segment_lengths, dilation_rates, dtype, causal, **sizes) -> dict:
    """The work of a command, by name: the pattern, the device, the dtype, and the sizes as the user gave them."""
    from hilbert_lib.patterns.dilated import DilatedPattern

    where = _where(dtype)
    return {"pattern": DilatedPattern(segment_lengths, dilation_rates), "is_causal": causal, **where, **sizes}
