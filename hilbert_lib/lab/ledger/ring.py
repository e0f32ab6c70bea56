"""Cases of several ranks: bytes and memory as planned anywhere, times and overlap from the record of several GPUs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from hilbert_lib.lab.ledger.cases import counted
from hilbert_lib.lab.sweeps.ring_tables import scaling_table, spanning_pattern, split_table
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import plan_ring

SIZES = {"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": torch.bfloat16}
FIRST_SEGMENT = 2048
# What a rank holds in a record, by its side; the others go by their own names.
HELD = dict.fromkeys(("auto", "ring", "all_gather", "all_to_all"), "dilated rows") | {
    "linear order": "dilated rows, in an order",
    "hilbert order": "dilated rows, in an order",
    "gathered": "all k and v, gathered",
}
WHAT = {"sent_forward": "bytes sent", "peak_bytes": "memory"}


def memory_by_ranks(records: Sequence[dict], *, tokens: int, ranks: Sequence[int]) -> pd.DataFrame:
    """Memory of the fullest rank times the number of ranks, over what the fewest ranks hold together: 1 is O(N/p).

    As planned for many ranks, and as measured: of each run of several ranks, in bytes for a token and head, over those
    of the longest run of one rank.
    """
    planned = _planned_memory(tokens, tuple(ranks)).assign(how="planned", sweep="plan")
    longest_alone = max((record for record in records if record["ranks"] == 1), key=lambda record: record["tokens"])
    measured = [
        {
            "what": HELD.get(record["side"], record["side"]),
            "side": record["side"],
            "sweep": record["sweep"],
            "ranks": record["ranks"],
            "heads": record["heads"],
            "tokens": record["tokens"],
            "is_causal": record["is_causal"],
            "value": _bytes_of_a_token(record) / _bytes_of_a_token(longest_alone),
        }
        for record in records
        if record["ranks"] > 1
    ]
    return pd.concat([planned, counted(measured).assign(how="measured")], ignore_index=True)


def _planned_memory(tokens: int, ranks: tuple[int, ...]) -> pd.DataFrame:
    table = scaling_table([(tokens, p) for p in ranks], first_segment=FIRST_SEGMENT, **SIZES)
    together = table.memory_forward * table.ranks
    is_fewest = table.ranks == min(ranks)
    fewest = together[is_fewest].set_axis(table.what[is_fewest])
    return counted(table[["what", "ranks"]], together / table.what.map(fewest))[~is_fewest]


def _bytes_of_a_token(record: dict) -> float:
    return record["peak_bytes"] * record["ranks"] / record["tokens"]


def gathered_over_ring(records: Sequence[dict], *, tokens: int, ranks: Sequence[int]) -> pd.DataFrame:
    """Ratio of other ways to passing the dilated rows round a ring: bytes sent, and memory of the fullest rank.

    gathered: what another way gathers: "the same rows", as planned and as measured, "all k and v", as measured, or
    "nothing".
    """
    planned = _planned_ratios(tokens, tuple(ranks))
    rings = {_run_of(record): record for record in records if record["side"] == "ring"}
    gathers, cases = {"all_gather": "the same rows", "gathered": "all k and v"}, []
    for record in records:
        ring = rings.get(_run_of(record))
        if ring is None or ring is record:
            continue
        case = {name: record[name] for name in ("sweep", "side", "ranks", "is_causal")}
        case["gathered"] = gathers.get(record["side"], "nothing")
        cases += [{**case, "what": WHAT[what], "value": record[what] / ring[what]} for what in WHAT]
    return pd.concat([planned, counted(cases).assign(how="measured")], ignore_index=True)


def _planned_ratios(tokens: int, ranks: tuple[int, ...]) -> pd.DataFrame:
    pattern, cases = spanning_pattern(tokens, FIRST_SEGMENT), []
    for p in ranks:
        lengths = shard_lengths_for(tokens, p)
        plans = [plan_ring(pattern, lengths, transport=name, **SIZES) for name in ("all_gather", "ring")]
        for what, name in (("bytes sent", "sent_forward"), ("memory", "memory_forward")):
            gathered, passed = (max(getattr(cost, name) for cost in plan.ranks) for plan in plans)
            cases.append({"what": what, "ranks": p, "value": gathered / passed})
    return counted(cases).assign(how="planned", gathered="the same rows", side="all_gather")


def _run_of(record: dict) -> tuple:
    return record["sweep"], record["ranks"], record["tokens"], record["is_causal"]


def kept_by_order_of_shards(**sizes) -> pd.DataFrame:
    """Rows that a rank lacks where the sequence was ordered before the split, over those where each shard is."""
    rows = _split_rows(**sizes)
    return counted(rows[["kind"]], rows.before / rows.after)


def saved_by_order(**sizes) -> pd.DataFrame:
    """The share of the rows sent that an order saves, laid over the sequence or over each shard."""
    rows = _split_rows(**sizes)
    # An order of a shard moves no row between ranks: they lack what they lack in sequence order.
    laid_over = {"the sequence": 1 - rows.before / rows.after, "each shard": 0.0}
    parts = [rows[["kind"]].assign(laid_over=over, value=saved) for over, saved in laid_over.items()]
    return counted(pd.concat(parts, ignore_index=True))


def _split_rows(*, tokens: int, ranks: int, kinds: Sequence[str]) -> pd.DataFrame:
    return split_table(spanning_pattern(tokens, FIRST_SEGMENT), tokens, ranks, kinds, kv_heads=4)


def balance(*, tokens: int, speeds: Sequence[Sequence[float]]) -> pd.DataFrame:
    """Time of the last rank over that of the first to finish, as planned for relative speeds, one list a case."""
    pattern, cases = spanning_pattern(tokens, FIRST_SEGMENT), []
    for weights in speeds:
        shared = {"pattern": pattern, "kv_heads": SIZES["kv_heads"], "is_causal": True}
        lengths = shard_lengths_for(tokens, len(weights), weights=weights, **shared)
        plan = plan_ring(pattern, lengths, is_causal=True, weights=weights, **SIZES)
        times = [cost.flop_forward / speed for cost, speed in zip(plan.ranks, weights, strict=True)]
        cases.append({"speeds": " : ".join(f"{weight:g}" for weight in weights), "value": max(times) / min(times)})
    return counted(pd.DataFrame(cases))


def overlap_and_scaling(records: Sequence[dict]) -> pd.DataFrame:
    """The share of an exchange that ran under other kernels, and a rank's speed over that of one rank alone.

    hidden: of every run of several ranks, by its `side`, forward and backward. scaling: of those that one rank ran by
    the same side in the same sweep; the interval is that of the quartiles of both times.
    """
    alone = {(single["side"], single["sweep"], single["tokens"]): single for single in records if single["ranks"] == 1}
    cases = []
    for record in (run for run in records if run["ranks"] > 1):
        case = {name: record[name] for name in ("sweep", "side", "ranks", "tokens", "is_causal")}
        for direction in ("forward", "backward"):
            hidden = record[f"hidden_{direction}"]
            shares = {"value": hidden, "low": hidden, "high": hidden}
            cases.append({"what": "hidden", **case, "direction": direction, **shares})
        is_weak = record["sweep"] == "weak"
        single = alone.get((record["side"], record["sweep"], record["tokens"] // (record["ranks"] if is_weak else 1)))
        if single is not None:
            speed = _over_alone(record, single, share=1 if is_weak else record["ranks"])
            cases.append({"what": "scaling", **case, "direction": "both", **speed})
    return pd.DataFrame(cases)


def _over_alone(record: dict, single: dict, *, share: int) -> dict[str, float]:
    # The time of one rank alone, of whose work each rank has one `share`-th, over that of several.
    ideal, times = _together(single) / share, _together(record)
    return {"value": ideal[1] / times[1], "low": ideal[0] / times[2], "high": ideal[2] / times[0]}


def _together(record: dict) -> np.ndarray:
    # Quartiles of the time of a forward and its backward.
    samples = np.add(record["forward_samples_ms"], record["backward_samples_ms"])
    return np.quantile(samples, [0.25, 0.5, 0.75])


def longest(records: Sequence[dict], *, both: int, forward: int) -> pd.DataFrame:
    """Tokens of the longest sequence that ran and was held against float64 rows, over those asked for."""
    checked = [record for record in records if record["out_error"] is not None]
    reached = {"forward": [r["tokens"] for r in checked]}
    reached["forward and backward"] = [r["tokens"] for r in checked if r["backward"]]
    targets = {"forward and backward": both, "forward": forward}
    cases = [{"what": what, "asked": n, "value": max(reached[what]) / n} for what, n in targets.items()]
    return counted(pd.DataFrame(cases))
