"""Cases of several ranks: bytes and memory as planned anywhere, times and overlap from the record of several GPUs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from hilbert_lib.environment import environment
from hilbert_lib.ledger.claim import counted
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.balance import shard_lengths_for
from hilbert_lib.ring.plan import plan_ring
from hilbert_lib.ring.tables import scaling_table, spanning_pattern, split_table
from hilbert_lib.ring.workers import run_ranks

SIZES = {"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": torch.bfloat16}
FIRST_SEGMENT = 2048
FILE = "ring.jsonl"


def memory_by_ranks(*, tokens: int, ranks: Sequence[int]) -> pd.DataFrame:
    """Memory of the fullest rank times the number of ranks, over what the fewest ranks hold together: 1 is O(N/p).

    Args:
        tokens: in the sequence. ranks: how many share it.
    """
    table = scaling_table([(tokens, p) for p in ranks], first_segment=FIRST_SEGMENT, **SIZES)
    together = table.memory_forward * table.ranks
    is_fewest = table.ranks == min(ranks)
    fewest = together[is_fewest].set_axis(table.what[is_fewest])
    return counted(table[["what", "ranks"]], together / table.what.map(fewest))[~is_fewest]


def gathered_over_ring(*, tokens: int, ranks: Sequence[int]) -> pd.DataFrame:
    """What gathering all rows at once takes, over passing them round the ring: bytes sent, and memory of a rank.

    Args:
        tokens: in the sequence. ranks: how many share it.
    """
    pattern, cases = spanning_pattern(tokens, FIRST_SEGMENT), []
    for p in ranks:
        lengths = shard_lengths_for(tokens, p)
        plans = [plan_ring(pattern, lengths, transport=name, **SIZES) for name in ("all_gather", "ring")]
        for what, name in (("bytes sent", "sent_forward"), ("memory", "memory_forward")):
            gathered, passed = (max(getattr(cost, name) for cost in plan.ranks) for plan in plans)
            cases.append({"what": what, "ranks": p, "value": gathered / passed})
    return counted(pd.DataFrame(cases))


def split_rows(*, tokens: int, ranks: int, kinds: Sequence[str], segment_length: int = 0) -> pd.DataFrame:
    """(position, KV head) rows that a rank lacks where an order is laid over the sequence, and where over each shard.

    Args:
        tokens: in the sequence. ranks: equal shards. kinds: of orders.
        segment_length: of one dilated branch in place of the spanning pattern, with rate 4.

    Returns:
        kind, before, after.
    """
    pattern = DilatedPattern((segment_length,), (4,)) if segment_length else spanning_pattern(tokens, FIRST_SEGMENT)
    return split_table(pattern, tokens, ranks, kinds, kv_heads=4)


def kept_by_order_of_shards(**sizes) -> pd.DataFrame:
    """Rows that a rank lacks where the sequence was ordered before the split, over those where each shard is.

    Args:
        **sizes: as `split_rows`.
    """
    rows = split_rows(**sizes)
    return counted(rows[["kind"]], rows.before / rows.after)


def saved_by_order(**sizes) -> pd.DataFrame:
    """The share of the rows sent that an order saves, laid over the sequence or over each shard.

    Args:
        **sizes: as `split_rows`.
    """
    rows = split_rows(**sizes)
    linear = rows.after  # an order of a shard moves no row between ranks: they lack what they lack in sequence order
    parts = [rows[["kind"]].assign(laid_over=over, value=1 - rows[column] / linear) for over, column in
             (("the sequence", "before"), ("each shard", "after"))]  # fmt: skip
    return counted(pd.concat(parts, ignore_index=True))


def balance(*, tokens: int, speeds: Sequence[Sequence[float]]) -> pd.DataFrame:
    """Time of the last rank over that of the first to finish, if its speed is all that counts.

    Args:
        tokens: in the sequence. speeds: relative speeds of the ranks, one list a case.
    """
    pattern, cases = spanning_pattern(tokens, FIRST_SEGMENT), []
    for weights in speeds:
        shared = {"pattern": pattern, "kv_heads": SIZES["kv_heads"], "is_causal": True}
        lengths = shard_lengths_for(tokens, len(weights), weights=weights, **shared)
        plan = plan_ring(pattern, lengths, is_causal=True, weights=weights, **SIZES)
        times = [cost.flop_forward / speed for cost, speed in zip(plan.ranks, weights, strict=True)]
        cases.append({"speeds": " : ".join(f"{each:g}" for each in weights), "value": max(times) / min(times)})
    return counted(pd.DataFrame(cases))


def measure_scaling(output_dir: Path, ranks: Sequence[int], *, tokens: int = 2**17) -> None:
    """Time the ring with as many tokens a rank on few and on many ranks, and keep it: a line a rank and side.

    Args:
        output_dir: folder of `FILE`. ranks: numbers of ranks, 1 among them. tokens: of each rank.
    """
    lines, sizes = [], {name: SIZES[name] for name in ("heads", "head_dim")}
    for p in ranks:
        pattern = spanning_pattern(p * tokens, FIRST_SEGMENT)
        sides = ["auto", "ring", "all_gather", "all_to_all"] if p > 1 else ["auto"]
        order = {"tokens": tokens, "sides": sides, **sizes}
        order |= {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
        for rank, found in enumerate(run_ranks("hilbert_lib.ring.benchmarks:measure", p, order)):
            lines += [{"ranks": p, "rank": rank, "tokens": tokens, **side} for side in found]
    facts = {"environment": environment()}
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / FILE).write_text("".join(json.dumps({**line, **facts}) + "\n" for line in lines))


def overlap_and_scaling(records: Sequence[dict]) -> pd.DataFrame:
    """The share of the exchange that is hidden under compute, and tokens per second of a rank over those of one alone.

    Args:
        records: of `measure_scaling`.

    Returns:
        what ("hidden" or "scaling"), side, ranks, rank and the value.
    """
    table = pd.DataFrame(list(records))
    case = ["side", "ranks", "rank"]
    (alone,) = table[table.ranks == 1].tokens_per_s
    several = table[table.ranks > 1]
    hidden = several.dropna(subset=["hidden_forward"])
    parts = [
        hidden[case].assign(what="hidden", value=hidden.hidden_forward.astype(float)),
        several[case].assign(what="scaling", value=several.tokens_per_s / alone),
    ]
    return counted(pd.concat(parts, ignore_index=True))
