"""`hilbert plan`: what ranks would send, hold and compute, without a GPU or a process group."""

from itertools import product
from math import isnan, prod

import click
from click.core import ParameterSource

from hilbert_lib.cli.options import DTYPES, number, option, usage_errors, work_options

# The options that say something of a grid.
OF_GRIDS = {"grid", "window", "ranks", "heads", "head_dim", "causal", "batch", "kv_heads", "dtype"}


def speeds(text: str) -> list[float]:
    """Numbers that commas separate."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 2,1,1") from None


def sides(text: str) -> tuple[int, ...]:
    """Numbers with an x between them."""
    try:
        return tuple(map(number, text.lower().split("x")))
    except click.BadParameter:
        raise click.BadParameter(f"{text!r} is no number, or several with an x between them, such as 17x9") from None


@click.command()
@click.option("--tokens", type=number, help="In the whole sequence: 3000, 64k, 16m, 1g.")
@click.option("--grid", type=sides, help="Instead of --tokens: sides of a grid, as 512x512.")
@click.option("--window", type=sides, help="Of the grid: 17, or one for each axis as 17x9.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="That share the tokens.")
@work_options(segments="2k:32k", rates="1:16", heads=16)
@option("--batch", type=click.IntRange(min=1), default=1)
@click.option("--kv-heads", type=click.IntRange(min=1), help="Of k and v.  [default: as q]")
@option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of q, k and v.")
@option("--transport", default="auto", help="auto, ring, all_gather or all_to_all.")
@click.option("--memory-gb", type=click.FloatRange(0, 1e9, min_open=True), help="What the call may take on one rank.")
@click.option("--weights", type=speeds, help="Relative speeds of the ranks, as 2,1,1.  [default: equal]")
@click.pass_context
def plan(
    context, tokens, grid, window, ranks, segment_lengths, dilation_rates, kv_heads, dtype, causal, weights, memory_gb,
    **how,
) -> None:  # fmt: skip
    """Show what attention over several ranks will send, hold and compute, before anything runs.

    A line a branch: how many ranks share one of its segments, the most that one rank sends or receives for it in a
    forward, the transport and why. Then a line a rank: bytes on the wire, forward and backward; memory at the
    highest point; useful TFLOP. 1 MB is 10^6 bytes. A row that several branches need travels once.

    Suffixes: k, m and g are 2^10, 2^20 and 2^30; 2k:1g doubles from one to the other. With --weights the shards are of
    such lengths that no rank waits for another. ring_dilated_attention runs this plan where its shards have these
    lengths and it is given the same transport, weights and memory_limit (in bytes).

    With --grid and --window: neighbourhood attention. A line each for strips, for the best rectangles and for runs of a
    Hilbert curve: the most that one rank receives, computes at its border and holds.

    \b
    Example: hilbert plan --tokens 1g --ranks 8 --heads 1 --segment-lengths 2k:1g --dilation-rates 1:512k
    A slow rank:      hilbert plan --tokens 1m --ranks 3 --weights 2,2,1 --causal
    Least memory:     hilbert plan --tokens 1m --ranks 4 --segment-lengths 1m --dilation-rates 4 --transport ring
    A grid:           hilbert plan --grid 512x512 --window 17 --ranks 8
    """
    import torch

    from hilbert_lib.patterns.dilated import DilatedPattern
    from hilbert_lib.ring.plan.balance import shard_lengths_for
    from hilbert_lib.ring.plan.plan import plan_ring

    if (tokens is None) == (grid is None) or (grid is None) != (window is None):
        options = [f"--{name}" for name in ("tokens", "grid", "window") if context.params[name] is not None]
        raise click.UsageError(f"give --tokens, or --grid and --window; got {', '.join(options) or 'none of them'}")
    how |= {"kv_heads": kv_heads or how["heads"], "dtype": getattr(torch, dtype)}
    if grid:
        options = [name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
        if foreign := [f"--{name.replace('_', '-')}" for name in options if name not in OF_GRIDS]:
            serving = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(OF_GRIDS - {"grid"}))
            raise click.UsageError(f"{', '.join(foreign)}: not of a grid, which takes {serving}")
        how.pop("transport")
        with usage_errors():
            click.echo(_compared(grid, window, causal, ranks, how))
        return
    if memory_gb is not None and isnan(memory_gb):
        raise click.BadParameter("nan is not above 0", param_hint="--memory-gb")
    with usage_errors():
        pattern = DilatedPattern(segment_lengths, dilation_rates)
        how["is_causal"] = causal
        work = {"pattern": pattern, "kv_heads": how["kv_heads"], "is_causal": causal} if weights else {}
        shards = shard_lengths_for(tokens, ranks, weights=weights, **work)
        memory = None if memory_gb is None else int(memory_gb * 1e9)
        how |= {"weights": weights, "memory_limit": memory}
        click.echo(str(plan_ring(pattern, shards, **how)))


def _compared(grid: tuple[int, ...], window: tuple[int, ...], causal: bool, ranks: int, how: dict) -> str:
    # A table of three plans: strips, the rectangles that receive least, and runs of a curve.
    from hilbert_lib.ordering import Ordering
    from hilbert_lib.patterns.neighbourhood import Neighbourhood
    from hilbert_lib.ring.plan.balance import shard_lengths_for
    from hilbert_lib.ring.plan.cost import aligned, amount
    from hilbert_lib.ring.plan.halo import HaloPlan, plan_halo
    from hilbert_lib.ring.plan.shards import Rectangles, Runs

    near = Neighbourhood(grid, window if len(window) > 1 else window[0], is_causal=causal)

    def most(plan: HaloPlan, field: str) -> int:
        return max(getattr(cost, field) for cost in plan.ranks)

    counts = [n for n in range(1, ranks + 1) if ranks % n == 0]
    splits = (split for split in product(counts, repeat=len(grid)) if prod(split) == ranks)
    named = {"strips": (ranks, *(1,) * (len(grid) - 1))}
    named["rectangles"] = min(splits, key=lambda split: max(Rectangles(split).arriving_cells(near)))
    plans = {
        f"{kind} {' x '.join(map(str, split))}": plan_halo(near, Rectangles(split), **how)
        for kind, split in named.items()
    }
    curve = Ordering.from_curve("hilbert", near.length, grid=grid if len(grid) > 1 else None)
    plans["Hilbert runs"] = plan_halo(near, Runs(curve, shard_lengths_for(near.length, ranks)), **how)
    titles = ("shards", "MB received", "backward", "border", "GB of memory", "backward", "how")
    rows = []
    for name, plan in plans.items():
        received = [amount(most(plan, f"received_{way}") / 1e6) for way in ("forward", "backward")]
        memory = [amount(most(plan, f"memory_{way}") / 1e9) for way in ("forward", "backward")]
        border = max(cost.border / max(1, cost.cells) for cost in plan.ranks)
        if idle := sum(not cost.cells for cost in plan.ranks):
            name += f" (empty ranks: {idle})"
        rows.append((name, *received, f"{border:.0%}", *memory, plan.how))
    return f"{plans['Hilbert runs'].title}\n\n{aligned(titles, rows, words=1)}"
