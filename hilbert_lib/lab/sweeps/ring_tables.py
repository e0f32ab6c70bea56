"""Tables of rings: what is planned, by ranks and tokens, and what was measured."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.checks import integer
from hilbert_lib.lab.figures.axes import short
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import plan_ring

PLANNED, DENSE_RING, DENSE_GATHER = "dilated rows, as planned", "all k and v, round a ring", "all k and v, gathered"
COSTS = ("sent_forward", "sent_backward", "memory_forward", "memory_backward")
TOLD = ("hidden_forward", "hidden_backward", "out_error", "dq_error")


def spanning_pattern(tokens: int, first_segment: int, growth: int = 2) -> DilatedPattern:
    """Branches w = first_segment * growth^i, r = growth^i, up to the first whose segment holds the sequence.

    >>> spanning_pattern(8192, 2048).branches
    ((2048, 1), (4096, 2), (8192, 4))
    """
    integer("first_segment", first_segment, least=1)
    integer("growth", growth, least=2)
    rates = [1]
    while first_segment * rates[-1] < tokens:
        rates.append(growth * rates[-1])
    return DilatedPattern([first_segment * rate for rate in rates], rates)


def scaling_table(points: Iterable[tuple[int, int]], *, first_segment: int, **sizes) -> pd.DataFrame:
    """The costliest rank of a spanning pattern, beside that of dense attention over as many tokens.

    Args:
        points: (tokens, ranks) of each plan. first_segment: of the pattern. **sizes: as `plan_ring` takes them.

    Returns:
        tokens, ranks, what, and `COSTS`, the most of any rank, in bytes.
    """
    rows = []
    for tokens, ranks in dict.fromkeys(points):
        dense = DilatedPattern((tokens,), (1,))
        for what, pattern, transport in (
            (PLANNED, spanning_pattern(tokens, first_segment), "auto"),
            (DENSE_RING, dense, "ring"),
            (DENSE_GATHER, dense, "all_gather"),
        ):
            plan = plan_ring(pattern, shard_lengths_for(tokens, ranks), transport=transport, **sizes)
            most = {name: max(getattr(cost, name) for cost in plan.ranks) for name in COSTS}
            rows.append({"tokens": tokens, "ranks": ranks, "what": what} | most)
    return pd.DataFrame(rows)


def split_table(
    pattern: DilatedPattern, tokens: int, ranks: int, kinds: Iterable[str], *, kv_heads: int = 1
) -> pd.DataFrame:
    """Rows that ranks need and lack where the sequence is ordered before it is split, and where after.

    Ordered before, a rank holds consecutive slots of one curve through the whole sequence; ordered after, consecutive
    positions, in whatever order it likes. Rows are counted branch by branch, by enumeration.

    Returns:
        kind, before and after: (position, KV head) rows that the costliest rank receives.

    >>> split_table(DilatedPattern((64,), (1,)), 256, 4, ["linear", "hilbert"]).values.tolist()
    [['linear', 0, 0], ['hilbert', 64, 0]]
    """
    after = _most_received(pattern, torch.arange(tokens, device="cpu") * ranks // tokens, ranks, kv_heads)
    rows = []
    for kind in kinds:
        owner = Ordering(kind, tokens).inverse * ranks // tokens
        rows.append({"kind": kind, "before": _most_received(pattern, owner, ranks, kv_heads), "after": after})
    return pd.DataFrame(rows)


def _most_received(pattern: DilatedPattern, owner: Tensor, ranks: int, kv_heads: int) -> int:
    positions = torch.arange(len(owner), device="cpu")
    received = torch.zeros(ranks, dtype=torch.int64, device="cpu")
    for head in range(kv_heads):
        for branch in pattern.head_branches(head, kv_heads):
            inside = positions[pattern.contains(branch, positions, head, kv_heads)]
            segment = inside // pattern.segment_lengths[branch]
            held = torch.bincount(segment * ranks + owner[inside], minlength=int(segment.max() + 1) * ranks)
            held = held.view(-1, ranks)
            received += ((held.sum(1, keepdim=True) - held) * (held > 0)).sum(0)
    return int(received.max())


def ring_table(records: Sequence[dict], *sweeps: str) -> pd.DataFrame:
    """What was measured, a row a side: the records of `run_works` that belong to these sweeps.

    Returns:
        sweep, work (tokens, ranks, causal or not), side, ranks, tokens, is_causal, forward_ms and backward_ms with
        quartiles (_low, _high), tokens_per_s (of a rank, forward and backward where both ran), tflop_per_s (of a rank's
        forward), sent_mb (forward), hidden_forward, hidden_backward, peak_gb, planned_gb, out_error and dq_error.
    """
    rows = []
    for record in (each for each in records if each["sweep"] in sweeps):
        causal = ", causal" if record["is_causal"] else ""
        row = {"work": f"{short(record['tokens'])} tokens, {record['ranks']} GPUs{causal}"}
        row |= {name: record[name] for name in ("sweep", "side", "ranks", "tokens", "is_causal")}
        for name in ("forward", "backward"):
            quartiles = np.quantile(record[f"{name}_samples_ms"] or [np.nan], [0.25, 0.5, 0.75])
            row |= dict(zip((f"{name}_low", f"{name}_ms", f"{name}_high"), quartiles, strict=True))
        together = record["forward_ms"] + (record["backward_ms"] or 0.0)
        row["tokens_per_s"] = record["tokens"] / record["ranks"] / together * 1e3
        row["tflop_per_s"] = record["flop_forward"] / record["forward_ms"] / 1e9
        row["sent_mb"] = record["sent_forward"] / 1e6
        row |= {f"{name}_gb": (record[f"{name}_bytes"] or np.nan) / 1e9 for name in ("peak", "planned")}
        rows.append(row | {name: record[name] for name in TOLD})
    return pd.DataFrame(rows)


def by_pass(table: pd.DataFrame) -> pd.DataFrame:
    """`ring_table` with a row a pass: "forward" and "backward" each with ms, low and high, for a figure's bars."""
    kept = ["work", "side", "sent_mb", "hidden_forward"]
    rows = [
        table[[*kept, f"{name}_ms", f"{name}_low", f"{name}_high"]]
        .set_axis([*kept, "ms", "low", "high"], axis=1)
        .assign(**{"pass": name})
        for name in ("forward", "backward")
    ]
    return pd.concat(rows).sort_index(kind="stable").dropna(subset="ms")


def efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Scaling of the side "auto": what a rank does in a second, over what a rank of the fewest does.

    Args:
        table: `ring_table` of the sweeps "weak" and "strong".

    Returns:
        case, sweep, tokens (of a rank where weak, in all where strong), ranks, efficiency, and peak_gb and planned_gb
        of a rank, where there are two numbers of ranks and more.
    """
    auto = table[(table.side == "auto") & table.sweep.isin(["weak", "strong"])].copy()
    auto["tokens"] = auto.tokens.where(auto.sweep == "strong", auto.tokens // auto.ranks)
    auto = auto[auto.groupby(["sweep", "tokens"]).ranks.transform("nunique") > 1]
    fewest = auto.sort_values("ranks").groupby(["sweep", "tokens"]).tokens_per_s.transform("first")
    of = auto.sweep.map({"weak": "a GPU", "strong": "in all"})
    auto["case"] = auto.sweep + ": " + auto.tokens.map(short) + " tokens " + of
    columns = ["case", "sweep", "tokens", "ranks", "efficiency", "peak_gb", "planned_gb"]
    return auto.assign(efficiency=auto.tokens_per_s / fewest)[columns]


def weak_scaling(records: Sequence[dict]) -> pd.DataFrame:
    """Weak scaling by single calls and back to back, over one GPU and over each of the same GPUs by itself.

    Returns:
        tokens (of a rank), ranks, timing, ring_ms (forward and backward) with the least and the most (low, high); the
        speed that the ring keeps of one GPU's while the others rest (of_one), and of the slowest's while each works by
        itself (of_slowest); slowest, its rank; back to back also host_ms, the most that a rank's host takes to queue a
        call. Empty where no rank was timed by itself.
    """
    weak = {(r["ranks"], r["tokens"] // r["ranks"], r["side"]): r for r in records if r["sweep"] == "weak"}
    rows = []
    for (ranks, tokens, side), alone in weak.items():
        one, ring = weak.get((1, tokens, "auto")), weak.get((ranks, tokens, "auto"))
        for timing, names in (("single calls", ("forward", "backward")), ("back to back", ("sustained",))):
            if side == "auto" or not one or not ring or not ring[f"{names[0]}_samples_ms"]:
                continue
            took, one_took = (sum(each[f"{name}_ms"] for name in names) for each in (ring, one))
            samples = sum(np.array(ring[f"{name}_samples_ms"]) for name in names)
            alone_ms = sum(np.array(alone[f"{name}_by_rank_ms"]) for name in names)
            row = {"tokens": tokens, "ranks": ranks, "timing": timing, "ring_ms": took, "low": samples.min()}
            row |= {"high": samples.max(), "of_one": one_took / took, "of_slowest": alone_ms.max() / took}
            row["slowest"] = alone_ms.argmax()
            rows.append(row | ({"host_ms": max(ring["host_by_rank"])} if timing == "back to back" else {}))
    return pd.DataFrame(rows)
