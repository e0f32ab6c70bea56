"""`hilbert plan`: what a ring of ranks would send, hold and compute, without a GPU or a process group."""

import click

from hilbert_lib.cli.options import DTYPES, number, option, usage_errors, work_options


def speeds(text: str) -> list[float]:
    """Numbers that commas separate."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 2,1,1") from None


@click.command()
@click.option("--tokens", type=number, required=True, help="In the whole sequence: 3000, 64k, 16m, 1g.")
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="That share the sequence.")
@work_options(segments="2k:32k", rates="1:16", heads=16)
@option("--batch", type=click.IntRange(min=1), default=1)
@click.option("--kv-heads", type=click.IntRange(min=1), help="Of k and v.  [default: as q]")
@option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Of q, k and v.")
@option("--transport", default="auto", help="auto, ring, all_gather or all_to_all.")
@click.option("--memory-gb", type=click.FloatRange(0, 1e9, min_open=True), help="What the call may take on one rank.")
@click.option("--weights", type=speeds, help="Relative speeds of the ranks, as 2,1,1.  [default: equal]")
def plan(tokens, ranks, segment_lengths, dilation_rates, kv_heads, dtype, causal, weights, memory_gb, **how) -> None:
    """Show what dilated attention over several ranks will send, hold and compute, before anything runs.

    A line a branch: how many ranks share one of its segments, the most that one rank sends or receives for it in a
    forward, the transport and why. Then a line a rank: bytes on the wire, forward and backward; memory at the
    highest point; useful TFLOP. 1 MB is 10^6 bytes. A row that several branches need travels once.

    Suffixes: k, m and g are 2^10, 2^20 and 2^30; 2k:1g doubles from one to the other. With --weights the shards are of
    such lengths that no rank waits for another. ring_dilated_attention runs this plan where its shards have these
    lengths and it is given the same transport, weights and memory_limit (in bytes).

    \b
    Example: hilbert plan --tokens 1g --ranks 8 --heads 1 --segment-lengths 2k:1g --dilation-rates 1:512k
    A slow rank:      hilbert plan --tokens 1m --ranks 3 --weights 2,2,1 --causal
    Least memory:     hilbert plan --tokens 1m --ranks 4 --segment-lengths 1m --dilation-rates 4 --transport ring
    """
    import torch

    from hilbert_lib.pattern import DilatedPattern
    from hilbert_lib.ring.plan.balance import shard_lengths_for
    from hilbert_lib.ring.plan.plan import plan_ring

    with usage_errors():
        pattern = DilatedPattern(segment_lengths, dilation_rates)
        how |= {"kv_heads": kv_heads or how["heads"], "is_causal": causal}
        work = {"pattern": pattern, "kv_heads": how["kv_heads"], "is_causal": causal} if weights else {}
        shards = shard_lengths_for(tokens, ranks, weights=weights, **work)
        memory = None if memory_gb is None else int(memory_gb * 1e9)
        how |= {"dtype": getattr(torch, dtype), "weights": weights, "memory_limit": memory}
        click.echo(str(plan_ring(pattern, shards, **how)))
