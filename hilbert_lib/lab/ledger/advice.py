"""What follows for a reader: plain sentences, each with its numbers from the records, and the premise below it."""

from collections.abc import Mapping
from math import floor

import pandas as pd

from hilbert_lib.lab.cache.cache import LINE_BYTES
from hilbert_lib.lab.ledger.claim import Answer, read_ledger
from hilbert_lib.lab.ledger.claims import LAYOUTS, REFERENCE, reference_pattern
from hilbert_lib.lab.ledger.kernels import (
    Records,
    behind_packages,
    claimed_pairs,
    fused_speeds,
    grid_gains,
    grid_places,
    layout_ratios,
    over_sequence,
)
from hilbert_lib.lab.ledger.ring import SIZES
from hilbert_lib.lab.sweeps.kernels import NO_TABLE
from hilbert_lib.lab.sweeps.ring_tables import spanning_pattern
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import plan_ring

FASTER = 1.01  # an order or a backend counts as faster from one per cent on
CHOICE, KERNELS, GRIDS = "05_backend_selection", "06_kernel_benchmarks", "08_where_a_curve_pays"
WHOLE_LINES = f"row_bytes % {LINE_BYTES} == 0 and work == 'whole sequence'"


def advice(records: Records, grids: Records, choices: Records, answers: Mapping[str, Answer]) -> pd.DataFrame:
    """When to use dilated attention, in which order to store, which backend to take, and how many GPUs.

    Args:
        records: of notebook 06.
        grids: of notebook 08; where there are none, nothing is said of grids.
        choices: of notebook 05.
        answers: of the ledger, by id.

    Returns:
        about, advice, premise (bool: whether the records bear out what the advice supposes) and rests_on.
    """
    rows = [_pattern(answers["K10"]), _order(records), _order_of_small_rows(records)]
    rows += [_order_of_a_grid(grids)] if grids else []
    rows += [_backend(records, choices), _gpus(records, answers["R4"])]
    return pd.DataFrame(rows, columns=["about", "advice", "premise", "rests_on"])


def short_answer(records: Records, grids: Records, choices: Records) -> pd.DataFrame:
    """When a Hilbert order makes attention faster, in three sentences.

    Args:
        records: of notebook 06.
        grids: of notebook 08.
        choices: of notebook 05.

    Returns:
        answer, premise and rests_on (notebooks, with commas between), as in `advice`.
    """
    rows = [_nothing_in_sequences(records), _gain_on_grids(grids), _what_makes_it_fast(records, choices)]
    return pd.DataFrame(rows, columns=["answer", "premise", "rests_on"])


def _nothing_in_sequences(records: Records) -> tuple:
    hilbert, best = _whole_lines(records)
    printed = read_ledger()["K3"]
    left = claimed_pairs(records, **printed.options).set_index("pair").loc[LAYOUTS]
    plain = ratio_table(records, "layouts").query(f"b == '{NO_TABLE}' and row_bytes % {LINE_BYTES} == 0").ratio
    text = (
        f"Not in dilated attention over a sequence: with rows of whole cache lines ({_head_dims(hilbert)}) storage "
        f"along a Hilbert curve gave {hilbert.value.min():.2f} to {hilbert.value.max():.2f} times the speed of "
        "sequence order, where both are read through a table of where each row lies; sequence order needs no table, "
        f"and without one it ran at {plain.min():.2f} to {plain.max():.2f} times its own speed through the table; and "
        f"the {printed.claimed[0].least} times that the documents print are {left.value:.3f} once both sides compute "
        "one function."
    )
    return text, _is_nothing(hilbert, best) and left.low < 1.05, KERNELS


def _gain_on_grids(grids: Records) -> tuple:
    gains = grid_gains(grids)
    most = gains.groupby("order").value.max()
    hilbert = gains[gains.order == "hilbert"].sort_values("value")
    worst, least = "", hilbert.iloc[0]
    if least.value < 0.95:
        window, grid = (f"{n} x {n}" for n in (least.window, least.side))
        worst = f", the worst {least.value:.2f} times (a window of {window} on a grid of {grid})"
    by_work = gains.pivot(index=["window", "side", "block_size"], columns="order", values="value")
    ahead = by_work[["tile", "morton"]].div(by_work.hilbert, axis=0).stack()
    (window, side, _, order), factor = ahead.idxmax(), ahead.max()
    text = (
        "It pays where tokens lie on a grid and attend to a window around them, as compact blocks let a kernel skip "
        f"more: stored along a Hilbert curve, {(hilbert.low > FASTER).sum()} of {len(hilbert)} works were faster "
        f"forward than stored row by row, the best {most.hilbert:.1f} times as fast{worst}; tiles and Morton order do "
        f"as well ({most.tile:.1f} and {most.morton:.1f} times at best), {order.capitalize()} up to {factor:.2f} times "
        f"as fast as Hilbert ({window} x {window} on {side} x {side})."
    )
    return text, most.hilbert > 1.5 and min(most.tile, most.morton) > 0.9 * most.hilbert, GRIDS


def _what_makes_it_fast(records: Records, choices: Records) -> tuple:
    long, speeds = 131072, fused_speeds(records)
    speeds = speeds[speeds.head_dim == speeds.head_dim.max()].set_index("direction")
    gpu = records[-1]["environment"]["gpus"][0]["name"]
    over = speeds.apply(lambda row: f"{row.times_as_fast:.2f} ({row.low:.2f} to {row.high:.2f})", axis=1)
    head_dim, length = speeds.head_dim.iloc[0], speeds.length.iloc[0]
    elsewhere = "".join(f"; elsewhere {behind}" for behind in _behind(choices, records))
    text = (
        f"What makes dilated attention fast is to do less, {_saved(long):.0f} times fewer FLOP than dense attention at "
        f"{long:,} tokens, in one kernel for all branches: {speeds.tflop_per_s.forward:.0f} TFLOP/s forward and "
        f"{speeds.tflop_per_s.backward:.0f} backward on one {gpu} ({length:,} tokens, head_dim {head_dim}, bfloat16), "
        f"{over.forward} and {over.backward} times as fast as the best of {speeds.others.iloc[0]}{elsewhere}."
    )
    return text, speeds.times_as_fast.min() > 1, f"{CHOICE}, {KERNELS}" if elsewhere else KERNELS


def _pattern(timed: Answer) -> tuple:
    short, long = 8192, 131072
    saved = {n: _saved(n) for n in (short, long)}
    text = (
        f"Use dilated attention for long sequences: with branches of {_branches(long)} it needs "
        f"{saved[short]:.1f} times fewer FLOP than dense attention at {short:,} tokens and {saved[long]:.0f} times "
        f"fewer at {long:,}. It is another function: whether a model bears it is for training to show."
    )
    if timed.cases is not None:
        best = timed.cases.sort_values("length")
        ratios = ", ".join(f"{row.value:.1f} times at {row.length:,}" for row in best.itertuples())
        text += f" Its time is shorter by {ratios} tokens ({timed.hardware})."
    return "when", text, 1 < saved[short] < saved[long], f"counts of the pattern; {timed.source or timed.verdict}"


def _order(records: Records) -> tuple:
    hilbert, best = _whole_lines(records)
    text = (
        f"Leave k and v in the order of the sequence. With rows of whole cache lines ({_head_dims(hilbert)}) "
        f"the Hilbert order was faster by a per cent in {(hilbert.low > FASTER).sum()} of {len(hilbert)} works over "
        f"whole sequences, at most {hilbert.value.max():.3f} times; the best of all orders at most "
        f"{best.value.max():.3f} times."
    )
    return "which order", text, _is_nothing(hilbert, best), KERNELS


def _whole_lines(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    # What the Hilbert order gains, and the best of all orders, where an order can save neither sectors nor lines.
    return layout_ratios(records, where=WHOLE_LINES), layout_ratios(records, order="best", where=WHOLE_LINES)


def _head_dims(cases: pd.DataFrame) -> str:
    sizes = [str(size // 2) for size in sorted(cases.row_bytes.unique())]
    return f"head_dim {' and '.join([', '.join(sizes[:-1]), sizes[-1]] if sizes[1:] else sizes)} in bfloat16"


def _is_nothing(hilbert: pd.DataFrame, best: pd.DataFrame) -> bool:
    return not (hilbert.low > FASTER).any() and best.value.max() < 1.05


def _order_of_small_rows(records: Records) -> tuple:
    one = over_sequence(records, where="work == 'decoding' and dilation > 1")
    one = one[one.queries == one.queries.min()]
    residue = one[one.order == "residue"]
    of = one.groupby(["row_bytes", "order"]).value.max()
    gains, others = [], []
    for size, rows in residue.groupby("row_bytes"):
        if (rows.low > FASTER).all():
            gains.append(f"{of[size, 'residue']:.2f} (Hilbert {of[size, 'hilbert']:.2f}) at rows of {size} B")
        else:
            others.append(f"{of[size, 'residue']:.2f} at {size} B")
    text = (
        "Store a cache that many single queries read at one dilation rate residue-major for that rate only where rows "
        f"are small: decoding is faster than from the order of the sequence by a factor of {', '.join(gains)}"
    )
    text += f", and not with larger rows ({', '.join(others)})." if others else "."
    ahead = all(of[size, "residue"] > of[size, "hilbert"] for size in residue.row_bytes.unique())
    return "which order", text, bool(gains) and ahead, KERNELS


def _order_of_a_grid(grids: Records) -> tuple:
    best = grid_places(grids)
    widest = best.loc[best.value.idxmax()]
    orders = best.order.value_counts()
    text = (
        "Where tokens lie on a grid and attend to a window around them, store q, k and v in an order that keeps "
        f"neighbours together: the best was faster than raster in {(best.low > FASTER).sum()} of {len(best)} works, at "
        f"most by a factor of {widest.value:.1f} ({widest.order}, {widest.length:,} tokens); it was "
        f"{', '.join(f'{name} in {count}' for name, count in orders.items())}."
    )
    return "which order", text, (best.low > FASTER).mean() > 0.5, GRIDS


def _behind(choices: Records, records: Records) -> list[str]:
    # Where each package that is ahead of the fused kernel somewhere is so the most.
    most = behind_packages(choices, records).drop_duplicates("other")
    return [
        f"{each.other} is ahead, by up to {100 * (each.ratio - 1):.1f} % on the device ({_work_of(each)})"
        for each in most.itertuples()
    ]


def _work_of(work) -> str:
    # A work of notebook 05 in short.
    divide = all(w % r == 0 for w, r in (map(int, branch.split(":")) for branch in work.branches.split()))
    causal = ", causal" if work.is_causal else ""
    rates = "" if divide else ", rates that do not divide their segments"
    return f"{work.direction} at {work.length:,} tokens, head_dim {work.head_dim}{causal}{rates}"


def _backend(records: Records, choices: Records) -> tuple:
    pairs = ratio_table(records, "backends")
    work = ["length", "pattern", "head_dim", "is_causal", "direction"]
    closest = pairs.loc[pairs.groupby(work).ratio.idxmin()]
    ahead, behind = closest[closest.low > 1], closest[closest.high < 1]
    names = " or ".join(sorted(behind.a.unique()))
    others = ", ".join(sorted(pairs.a.unique()))
    text = f'Take backend="auto". The fused kernel, "triton", was faster than every other ({others}) in '
    text += f"{len(ahead)} of {len(closest)} works"
    if len(behind):
        most = 100 / behind.ratio.min() - 100
        text += f"; {names} was ahead in {len(behind)}, by at most {most:.1f} %: {_where(behind)}"
    packages = [f"Elsewhere {each}." for each in _behind(choices, [])]  # what 06 has is told above
    return "which backend", " ".join([f"{text}.", *packages]), len(ahead) > len(closest) / 2, f"{CHOICE}, {KERNELS}"


def _gpus(records: Records, timed: Answer) -> tuple:
    gpu = records[-1]["environment"]["gpus"][0]
    tokens, ranks = 2**20, 8
    pattern = spanning_pattern(tokens, REFERENCE[0][0])
    (alone,) = plan_ring(pattern, (tokens,), **SIZES).ranks
    several = plan_ring(pattern, shard_lengths_for(tokens, ranks), **SIZES).ranks
    together = ranks * max(each.memory_backward for each in several) / alone.memory_backward
    per_token = alone.memory_backward / tokens
    text = (
        f"As few as hold the sequence. {SIZES['heads']} heads of {SIZES['head_dim']} in bfloat16 take "
        f"{per_token / 1024:.0f} KiB a token at the highest point of a backward, as planned, and what the kernels need "
        f"beside: one {gpu['name']} holds at most "
        f"{floor(gpu['memory_gib'] * 2**30 / per_token / 1e6)} million tokens, and p of them p times as many: "
        f"the memory of {ranks} ranks together is {together:.2f} times that of one."
    )
    if timed.cases is not None:
        scaling = timed.cases.query("what == 'scaling'")
        text += f" Each of {scaling.ranks.max()} then works at {scaling.value.min():.0%} of its speed alone at least."
    return "how many GPUs", text, together < 1.1, f"the ring's plan; {KERNELS}; {timed.source or timed.verdict}"


def _saved(length: int) -> float:
    return _work(DilatedPattern((length,), (1,)), length) / _work(reference_pattern(length), length)


def _branches(length: int) -> str:
    return ", ".join(f"{w}:{r}" for w, r in reference_pattern(length).branches)


def _work(pattern: DilatedPattern, length: int) -> int:
    return pattern.work(length, heads=SIZES["heads"], head_dim=SIZES["head_dim"]).flop_forward


def _where(works: pd.DataFrame) -> str:
    return ", ".join(
        f"{row.pattern} {row.direction} at {row.length:,} tokens, head_dim {row.head_dim}"
        + (", causal" if row.is_causal else "")
        for row in works.itertuples()
    )
