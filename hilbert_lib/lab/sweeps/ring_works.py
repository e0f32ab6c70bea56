"""The works that notebook 07 measures, and its tables of what was found."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from hilbert_lib.lab.sweeps.ring import ALONE, DENSE_RING, GATHERED, ORDERS, TRANSPORTS, VALIDATED, Work
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern


def scaling_works(
    *,
    ranks: Sequence[int],
    weak_tokens: Sequence[int],
    strong_tokens: int,
    heads: int,
    head_dim: int,
    first_segment: int,
    repetitions: int,
    sustained_seconds: float = 0.0,
) -> list[Work]:
    """The same tokens a rank, and the same tokens in all, on few ranks and on many.

    Args:
        ranks: numbers of ranks. weak_tokens: of each rank. strong_tokens: in all, 0 for none.
        heads, head_dim: sizes. first_segment: w of the spanning pattern's first branch.
        repetitions: samples a side; at most 3 of dense attention, which takes long.
        sustained_seconds: as in `Work`, of weak scaling.

    Returns:
        The works; weak scaling on several ranks beside what each does by itself, where the branches of one rank's
        sequence end with it. On the most ranks strong scaling has every side, and dense attention by itself: what
        follows its seconds finds the GPU's clock lowered.

    >>> works = scaling_works(ranks=[1, 2], weak_tokens=[64], strong_tokens=0, heads=2, head_dim=8, first_segment=16,
    ...                       repetitions=3)
    >>> [(work.ranks, work.tokens) for work in works]
    [(1, 64), (2, 128)]
    """
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "repetitions": repetitions}
    works = []
    for p in ranks:
        for sweep, tokens in [("weak", each * p) for each in weak_tokens] + [("strong", strong_tokens)]:
            every = sweep == "strong" and p == max(ranks) > 1
            if tokens:
                work = _work(sweep, p, tokens, first_segment, sides=("auto",), **sizes)
                if sweep == "weak":
                    is_whole = tokens // p in work.segment_lengths
                    sides = ("auto", ALONE) if p > 1 and is_whole else work.sides
                    work = replace(work, sides=sides, sustained_seconds=sustained_seconds)
                works.append(replace(work, sides=(*TRANSPORTS, GATHERED)) if every else work)
                if every:
                    works.append(replace(work, sides=(DENSE_RING,), repetitions=min(repetitions, 3)))
    return works


def comparison_works(
    *,
    ranks: int,
    tokens: Sequence[int],
    heads: int,
    head_dim: int,
    first_segment: int,
    repetitions: int,
) -> list[Work]:
    """Every transport, "auto" with the header of each call, gathering at once, and k and v stored in an order, causal
    and not.

    Args:
        ranks: how many. tokens: of each rank.
        heads, head_dim, first_segment, repetitions: as in `scaling_works`.
    """
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "repetitions": repetitions}
    sides = (*TRANSPORTS, VALIDATED, GATHERED, *ORDERS)
    return [
        _work("transports", ranks, each * ranks, first_segment, sides=sides, is_causal=is_causal, **sizes)
        for each in tokens
        for is_causal in (False, True)
    ]


def long_works(
    *,
    ranks: int,
    tokens: Sequence[int],
    heads: int,
    head_dim: int,
    first_segment: int,
    longest_tokens: int,
    longest_head_dim: int,
    longest_segment: int,
    longest_growth: int,
    longest_both_tokens: int = 0,
    longest_both_head_dim: int = 16,
) -> list[Work]:
    """Long sequences forward and backward, and the longest ones of one head, each once or twice.

    Args:
        ranks: how many. tokens: in all. heads, head_dim, first_segment: as in `scaling_works`.
        longest_tokens: in all, 0 for none, with one head of longest_head_dim, whose branches grow from
            w = longest_segment and r = 1 by longest_growth until a segment spans all.
        longest_both_tokens, longest_both_head_dim: likewise, forward and backward.
    """
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "repetitions": 2}
    works = [_work("lengths", ranks, each, first_segment, **sizes) for each in tokens]
    one = (longest_tokens, longest_head_dim, False), (longest_both_tokens, longest_both_head_dim, True)
    for each, size, backward in one:
        if each:
            sizes |= {"heads": 1, "kv_heads": 1, "head_dim": size, "backward": backward}
            works.append(_work("lengths", ranks, each, longest_segment, longest_growth, **sizes))
    return works


def _work(sweep: str, ranks: int, tokens: int, first_segment: int, growth: int = 2, **rest) -> Work:
    pattern = spanning_pattern(tokens, first_segment, growth)
    branches = {"segment_lengths": pattern.segment_lengths, "dilation_rates": pattern.dilation_rates}
    return Work(sweep, ranks, tokens, **branches, **rest)


RING_COLUMNS = (
    *("sweep", "side", "ranks", "tokens", "is_causal", "forward_ms", "forward_low", "forward_high", "backward_ms"),
    *("backward_low", "backward_high", "tokens_per_s", "tflop_per_s", "sent_mb", "exchange_ms", "hidden_forward"),
    *("hidden_backward", "peak_gb", "planned_gb", "out_error", "dq_error"),
)


def ring_table(records: Sequence[dict], *sweeps: str) -> pd.DataFrame:
    """What was measured, a row a side.

    Args:
        records: of `benchmarks.run_works`.
        sweeps: which.

    Returns:
        sweep, side, ranks, tokens, is_causal, forward_ms and backward_ms with quartiles (_low, _high), tokens_per_s
        (of a rank, forward and backward where both ran), tflop_per_s (of a rank's forward), sent_mb (forward),
        exchange_ms (forward), hidden_forward, hidden_backward, peak_gb, planned_gb, out_error and dq_error.
    """
    rows = []
    for record in records:
        if record["sweep"] not in sweeps:
            continue
        row = {name: record[name] for name in ("sweep", "side", "ranks", "tokens", "is_causal")}
        for name in ("forward", "backward"):
            samples = pd.Series(record[f"{name}_samples_ms"], dtype=float)
            row |= {f"{name}_ms": samples.median(), f"{name}_low": samples.quantile(0.25)}
            row[f"{name}_high"] = samples.quantile(0.75)
        together = record["forward_ms"] + (record["backward_ms"] or 0.0)
        rows.append(
            row
            | {
                "tokens_per_s": record["tokens"] / record["ranks"] / together * 1e3,
                "tflop_per_s": record["flop_forward"] / record["forward_ms"] / 1e9,
                "sent_mb": record["sent_forward"] / 1e6,
                "exchange_ms": record["exchange_ms_forward"],
                "hidden_forward": record["hidden_forward"],
                "hidden_backward": record["hidden_backward"],
                "peak_gb": record["peak_bytes"] and record["peak_bytes"] / 1e9,
                "planned_gb": record["planned_bytes"] and record["planned_bytes"] / 1e9,
                "out_error": record["out_error"],
                "dq_error": record["dq_error"],
            }
        )
    return pd.DataFrame(rows, columns=None if rows else RING_COLUMNS)


def efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Scaling of the side "auto": what a rank does in a second, over what the fewest ranks' ranks do.

    Args:
        table: `ring_table` of the sweeps "weak" and "strong".

    Returns:
        sweep, tokens (of a rank where weak, in all where strong), ranks, efficiency, and the peak memory of a rank as
        measured and as planned, where there are two numbers of ranks and more.
    """
    auto = table[(table.side == "auto") & table.sweep.isin(["weak", "strong"])].copy()
    auto["tokens"] = auto.tokens.where(auto.sweep == "strong", auto.tokens // auto.ranks)
    auto = auto[auto.groupby(["sweep", "tokens"]).ranks.transform("nunique") > 1]
    fewest = auto.sort_values("ranks").groupby(["sweep", "tokens"]).tokens_per_s.transform("first")
    columns = ["sweep", "tokens", "ranks", "efficiency", "peak_gb", "planned_gb"]
    return auto.assign(efficiency=auto.tokens_per_s / fewest)[columns]


def weak_scaling(records: Sequence[dict]) -> pd.DataFrame:
    """Weak scaling by single calls and back to back, against one GPU and against each of the same GPUs by itself.

    Args:
        records: of `benchmarks.run_works`.

    Returns:
        tokens (of a rank), ranks, timing, ring_ms (forward and backward) with the least and the most (low, high); the
        speed that the ring keeps of one GPU's while the others rest (of_one), and of the first's and the slowest's
        while each works by itself (of_first, of_slowest); alone_ms of each, and which is the slowest. Back to back also
        host_ms (the most of any rank), mhz and watts. Empty where no rank was timed by itself.
    """
    weak = {(r["ranks"], r["tokens"] // r["ranks"], r["side"]): r for r in records if r["sweep"] == "weak"}
    rows = []
    for (ranks, tokens, side), alone in weak.items():
        for timing, names in (("single calls", ("forward", "backward")), ("back to back", ("sustained",))):
            one, ring = weak.get((1, tokens, "auto")), weak.get((ranks, tokens, "auto"))
            if side != ALONE or not one or not ring[f"{names[0]}_samples_ms"]:
                continue
            took, one_took = (sum(each[f"{name}_ms"] for name in names) for each in (ring, one))
            samples = sum(np.array(ring[f"{name}_samples_ms"]) for name in names)
            alone_ms = sum(np.array(alone[f"{name}_by_rank_ms"]) for name in names)
            row = {"tokens": tokens, "ranks": ranks, "timing": timing, "ring_ms": took, "low": samples.min()}
            row |= {"high": samples.max(), "of_one": one_took / took, "of_first": alone_ms[0] / took}
            row |= {"of_slowest": alone_ms.max() / took, "slowest": alone_ms.argmax(), "alone_ms": alone_ms.round(2)}
            if timing == "back to back":
                row["host_ms"], row["mhz"] = max(ring["host_by_rank"]), ring["mhz_by_rank"]
                row["watts"] = ring["watts_by_rank"]
            rows.append(row)
    return pd.DataFrame(rows)
