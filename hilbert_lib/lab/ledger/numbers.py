"""The numbers that README, reports/README.md and notebooks tell: each has a name, and comes from the newest records.

`<!--name-->0.98<!--/-->` in a sentence written by hand is the slot of the number of that name.
`python -m hilbert_lib.lab.ledger.numbers` writes them all anew.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path
from statistics import median

import pandas as pd

from hilbert_lib.files import write_whole
from hilbert_lib.lab import resolutions
from hilbert_lib.lab.cache.along_curve import ORDERS as ALONG
from hilbert_lib.lab.cache.along_curve import PATTERN as LONGNET
from hilbert_lib.lab.cache.along_curve import SIDE, count_along_curve, keys_of_a_query, window_of
from hilbert_lib.lab.cache.annealing import annealing_table
from hilbert_lib.lab.cache.bound import BOUND, BRICKS, count_bound
from hilbert_lib.lab.cache.in_print import count_tiles, count_windows
from hilbert_lib.lab.cache.neighbourhood import least_window
from hilbert_lib.lab.cache.order_map import APART, HILBERT
from hilbert_lib.lab.cache.points import HALVED
from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.inside.steps import LIBRARY, STEP_SWEEP, STEPS
from hilbert_lib.lab.ledger import in_print, kernels, learning, models
from hilbert_lib.lab.ledger.answer import ROOT, answer
from hilbert_lib.lab.ledger.artifact import artifact_table, between_runs
from hilbert_lib.lab.ledger.claim import HOLDS, HOLDS_NOT, UNTESTED
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.directions import directions_table
from hilbert_lib.lab.ledger.documents import LAYOUTS, reference_pattern
from hilbert_lib.lab.ledger.order_map import map_gains
from hilbert_lib.lab.ledger.ring import SIZES, overlap_and_scaling
from hilbert_lib.lab.records import (
    MACHINES,
    REPORTS,
    RESULTS,
    committed_records,
    committed_runs,
    newest_run,
    read_records,
    run_environment,
)
from hilbert_lib.lab.resolutions import error_table
from hilbert_lib.lab.suite.manifest import MANIFEST, read_manifest
from hilbert_lib.lab.sweeps.causes import CODE, FAIR, FIRST, cause_table, committed_causes, segment_table
from hilbert_lib.lab.sweeps.clouds import CLOUD_RESULTS, SHARED
from hilbert_lib.lab.sweeps.contexts import DECODING, STEP, TORCHSCALE
from hilbert_lib.lab.sweeps.halos import GRID_RESULTS, RECTANGLES, RUNS
from hilbert_lib.lab.sweeps.in_print import FUSED, OURS
from hilbert_lib.lab.sweeps.kernels import NO_TABLE
from hilbert_lib.lab.sweeps.learning import TEXT
from hilbert_lib.lab.sweeps.points import AS_GIVEN, ORDER_SWEEP, POINT_SWEEP
from hilbert_lib.lab.sweeps.processes import process_table
from hilbert_lib.lab.sweeps.video import step_table
from hilbert_lib.lab.tables import both_ways, fused_name, side_table
from hilbert_lib.lab.training import KIND as TRAINING
from hilbert_lib.lab.training import learning_table
from hilbert_lib.patterns.dilated import DilatedPattern

SLOT = re.compile(r"<!--(\w+)-->(.*?)<!--/-->", re.DOTALL)
TEXTS = ("README.md", "reports/README.md", "docs/artifact.md", "notebooks/*.ipynb")
CHOICE, KERNELS, ORDERS = "05_backend_selection", "06_kernel_benchmarks", "06b_orders_and_counters"
DIRECTIONS = "14_directions"
RING, GRIDS = "07_ring_attention", "08b_kernels_on_grids"
DENSE = "cuDNN, dense"  # a sweep of 08b, and a kernel of it
FASTER = 1.01  # an order counts as faster from one per cent on
WHOLE_LINES = "row_bytes % 128 == 0 and work == 'whole sequence'"
MODEL_HEADS, MODEL_HEAD_DIM = 8, 64  # the least that counts as a model's
LENGTH, LONG = 65536, 2**20  # tokens of the works whose speed is slots


@cache
def numbers() -> dict[str, str]:
    """Every number by its name, as it is printed."""
    runs = {name[:2]: newest_run(name) for name in (CHOICE, KERNELS, RING, GRIDS)}
    choices, fused, ring, grids = (read_records(run / RESULTS) for run in runs.values())
    runs["07_grids"] = newest_run(RING, GRID_RESULTS)
    slots = {**_weak_grids(read_records(runs["07_grids"] / GRID_RESULTS)), **_hidden_on_grids()}
    # Not every run goes to the longest both ways.
    both = {run: _longest(read_records(run / RESULTS), both=True) for run in committed_runs(RING)}
    runs["07_both"] = max(both, key=lambda run: (both[run]["ring_both_tokens"], run_environment(run)["utc"]))
    slots |= {**_orders(committed_records(ORDERS)), **_speeds(fused), **_long(fused)}
    slots |= {**_ring(ring), **both[runs["07_both"]]}
    slots |= {**_grids(grids), **_choice(choices, fused), **_sustained(choices, grids)}
    slots |= {**_saved(), **_claims(), **_causes(), **_learning()}
    slots |= {f"least_window_{side}": least_window((side, side)) for side in (64, 128, 256)}
    slots |= {
        **_points(),
        **_shared_clouds(),
        **_timed_points(),
        **_contexts(),
        **_timed_map(),
        **_video(),
        **_options(),
        **_orders_of_grids(),
        **_searched_and_approximated(),
        **_learnt_orders(committed_records(DIRECTIONS), "learnt"),
        **_learnt_orders(_records_without_gpu(DIRECTIONS), "learnt_small"),
        **_in_print(),
        **_timed_in_print(),
        **_steps(),
    }
    slots["runs"] = _runs()
    for name, run in runs.items():
        file = GRID_RESULTS if name == "07_grids" else RESULTS
        gpu = say_hardware(run_environment(run, file)).replace("NVIDIA ", "").removesuffix(" 80GB HBM3")
        slots[f"{name}_run"] = f"[{gpu}]({run.relative_to(ROOT).as_posix()})"
    texts = {name: value if isinstance(value, str) else f"{value:,}" for name, value in slots.items()}
    texts["between_runs"] = str(between_runs())
    return {**texts, "directions": directions_table(texts), "artifact": artifact_table(texts)}


def fill(text: str, numbers: Mapping[str, str]) -> str:
    """A text with the numbers of its slots. ValueError: for a slot of an unknown name."""
    if unknown := [slot[1] for slot in SLOT.finditer(text) if slot[1] not in numbers]:
        raise ValueError(f"a slot must have the name of a number of ledger/numbers.py, got {unknown[0]!r}")
    return SLOT.sub(lambda slot: f"<!--{slot[1]}-->{numbers[slot[1]]}<!--/-->", text)


def filled_texts(root: Path = ROOT) -> dict[Path, str]:
    """Every text of the checkout that has slots, with the numbers of the newest records. Links lead from the file."""
    texts = {}
    for path in (path for pattern in TEXTS for path in sorted(root.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        if SLOT.search(text):
            below = f"{path.relative_to(root).parent.as_posix()}/"  # of the folder that the links lie in already
            values = {name: value.replace(f"]({below}", "](") for name, value in numbers().items()}
            if path.suffix == ".ipynb":  # the sources of cells are strings of JSON
                values = {name: json.dumps(value, ensure_ascii=False)[1:-1] for name, value in values.items()}
            texts[path] = fill(text, values)
    return texts


def _causes() -> dict[str, str]:
    """Share of each printed ratio that another program alone makes, and what is left of all of them where it is fair.

    Of the record that the figures draw, and of notebook 04's newest, whose host may have had other work.
    """
    table = pd.concat([committed_causes()[0], cause_table(committed_records("04_safe_benchmarking"))])
    slots = _ends("fair", table[table.cause == FAIR].ratio)
    slots |= _times_printed()
    for printed, ratios in table[table.cause == CODE].groupby("printed").ratio:
        ends = dict.fromkeys(f"{end:.1f}" for end in (ratios.min(), ratios.max()))
        slots[f"made_{printed}".replace(".", "_")] = " to ".join(ends)
    return slots


def _by_segment(table: pd.DataFrame) -> str:
    # "11 times as long at 512, 5.4 to 8.1 at 1,024": the ends are of all machines.
    parts = []
    for segment, ratios in table.groupby("segment").ratio:
        ends = dict.fromkeys(f"{end:.2g}" for end in (ratios.min(), ratios.max()))
        parts.append(f"{' to '.join(ends)}{'' if parts else ' times as long'} at {segment:,}")
    return ", ".join(parts)


def _over_segments(table: pd.DataFrame) -> str:
    # "1.6 to 39 times as long at segments of 128 to 4,096", in as few words as README has room for.
    low, high = (f"{end:.2g}" for end in (table.ratio.min(), table.ratio.max()))
    first, last = (f"{segment:,}" for segment in (table.segment.min(), table.segment.max()))
    where = f"a segment of {first}" if first == last else f"segments of {first} to {last}"
    return f"{low} to {high} times as long at {where}"


def _times_printed() -> dict[str, str]:
    """Of 7.95 by another program: its ratio by segment, and how many times as long as ours a printed call is.

    Beside it the first call of a process, which compiles, in ms.
    """
    records = [*committed_records("causes"), *committed_records("04_safe_benchmarking")]
    rebuilt = [record for record in records if record.get("printed") == "7.95"]
    loops = [record for record in rebuilt if record["cause"] == CODE]
    longer = [record["ms"][0] / median(record["standard_ms"]) for record in loops]
    first = [record["standard_ms"][0] for record in rebuilt if record["cause"] == FIRST]
    (segment,) = {record["segment"] for record in loops}  # the one of the figure
    slots = {"made_7_95_segment": f"{segment:,}", **_ends("longer_7_95", pd.Series(longer), ".0f")}
    by_segment = segment_table(records)
    slots |= {"loop_by_segment": _by_segment(by_segment), "loop_range": _over_segments(by_segment)}
    return slots | _ends("first_7_95", pd.Series(first), ".0f")


def _ends(name: str, values: pd.Series, form: str = ".2f") -> dict[str, str]:
    return {f"{name}_low": f"{values.min():{form}}", f"{name}_high": f"{values.max():{form}}"}


def _orders(records: list[dict]) -> dict:
    """Effect of an order of k and v in one function: over whole sequences, at the documents' size, in decoding."""
    whole = kernels.layout_ratios(records).query(WHOLE_LINES)
    hilbert, plain = (whole[whole.order == order] for order in ("hilbert", NO_TABLE))
    best = kernels.best_layouts(whole)
    slots = {**_ends("rows_hilbert", hilbert.value), "rows_works": len(hilbert), "rows_best": f"{best.value.max():.3f}"}
    slots |= _ends("rows_no_table", plain.value)
    # Of whole sequences another kernel reads without a table: beside it an order would be a comparison of kernels.
    decoding = kernels.over_sequence(records).query("work == 'decoding'")
    fastest = decoding.loc[decoding.value.idxmax()]
    rivals = decoding[(decoding[kernels.CASE] == fastest[kernels.CASE]).all(axis=1)].set_index("order").value
    slots |= {"decoding_best": f"{fastest.value:.2f}", "decoding_hilbert": f"{rivals['hilbert']:.2f}"}
    slots |= {
        "decoding_order": fastest.order,
        "decoding_row_bytes": fastest.row_bytes,
        "decoding_dilation": fastest.dilation,
    }
    residue = decoding.query("queries == 1 and dilation > 1 and order == 'residue'").groupby("row_bytes").value.max()
    slots |= {f"decoding_residue_{size}": f"{gain:.2f}" for size, gain in residue.items()}
    pairs = kernels.ratios(records, sweep="claims", where="length == 4096 and dilation == 64").set_index("pair").value
    printed = LEDGER["K3"].claimed[0].least
    return slots | {"printed": f"{printed}", "printed_layouts": f"{pairs[LAYOUTS]:.3f}"}


def _grids(records: list[dict]) -> dict:
    """Gain of an order on grids over row by row, gain that is left where q, k and v are stored anew in each call, and
    gain of boxes over the best order.
    """
    gains, work = kernels.grid_gains(records), ["side", "window", "block_size", "head_dim"]
    hilbert = gains[gains.order == "hilbert"].set_index(work)
    slots = {"grid_works": len(hilbert), "grid_faster": int((hilbert.low > FASTER).sum())}
    # Of a video the first side is of frames.
    slots["timed_window"] = min(int(str(window).split(" x ")[-1]) for _, window, *_ in hilbert.index)
    slots |= {"grid_best": f"{hilbert.value.max():.2f}", "grid_worst": f"{hilbert.value.min():.2f}"}
    best = gains.groupby("order").value.max()
    slots |= {f"grid_best_{order}": f"{best[order]:.2f}" for order in ("tile", "morton")}
    anew = "rival == 'hilbert, reordered' and direction == 'forward'"
    reordered = kernels.ratios(records, sweep="neighbourhood", where=anew).set_index(work).value
    slots |= _ends("reordered", reordered)
    slowest = reordered[hilbert.low > FASTER].idxmin()  # where reordering takes most of the speed
    grid, window = (axes if isinstance(axes, str) else f"{axes} x {axes}" for axes in slowest[:2])
    slots |= {"small_grid": grid, "small_window": window, "small_once": f"{hilbert.value[slowest]:.2f}"}
    slots["small_each"] = f"{hilbert.value[slowest] * reordered[slowest]:.2f}"
    boxes = kernels.boxes_over_blocks(records)
    for direction in ("forward", "backward"):
        slots |= _ends(f"boxes_{direction}", boxes[boxes.direction == direction].value)
    return slots | {"boxes_works": len(boxes), "boxes_faster": int((boxes.low > FASTER).sum())}


def _speeds(records: list[dict], length: int = LENGTH, prefix: str = "") -> dict:
    """TFLOP/s and error of the fused kernel, and the backend nearest to it, on the reference work.

    Of a ratio that fresh processes timed again, their median stands; its ends are the least and the largest of them.
    """
    slots, again = {}, process_table(records)
    for row in kernels.fused_speeds(records, length=length).itertuples():
        name = f"{prefix}{row.direction}_{row.head_dim}"
        slots |= {name: f"{row.tflop_per_s:.0f}", f"{name}_error": f"{row.error:.2g}", f"{name}_other": row.other}
        slots |= {f"{name}_other_speed": f"{row.tflop_per_s_other:.0f}", f"{name}_ratio": f"{row.value:.2f}"}
        slots |= {f"{name}_ratio_low": f"{row.low:.2f}", f"{name}_ratio_high": f"{row.high:.2f}"}
        case = f"a == {row.other!r} and direction == {row.direction!r} and head_dim == {row.head_dim}"
        for repeated in again.query(f"{case} and length == {length}").itertuples():
            ratios = {"": repeated.ratio, "_low": repeated.low, "_high": repeated.high}
            slots |= {f"{name}_ratio{end}": f"{ratio:.2f}" for end, ratio in ratios.items()}
    counts = again.processes[again.length == length]
    within = "its 95 % interval within one process"
    slots[f"{prefix}ratio_ends"] = f"least and largest of {counts.min()} processes" if len(counts) else within
    return slots


def _long(records: list[dict]) -> dict:
    """The same over `LONG` tokens, and beside torchscale, the implementation that LongNet's authors published."""
    where = f"base == 'torchscale' and pattern == 'reference' and not is_causal and length == {LENGTH}"
    public = kernels.ratios(records, sweep="backends", where=where)
    slots = {f"torchscale_{row.direction}_{row.head_dim}": f"{row.value:.1f}" for row in public.itertuples()}
    return slots | _speeds(records, LONG, "long_")


def _choice(choices: list[dict], records: list[dict]) -> dict:
    """In how many works the fused kernel is ahead of every other backend, or behind one."""
    nearest = kernels.nearest_backends(choices, records)
    ahead, behind = int((nearest.low > 1).sum()), int((nearest.high < 1).sum())
    return {"works": len(nearest), "works_ahead": ahead, "works_behind": behind}


def _sustained(choices: list[dict], grids: list[dict]) -> dict:
    """Share of the fused kernels' speed that is left back to back, in percent; and boxes over others so."""
    calls, works = both_ways(choices, "selection"), both_ways(grids, "neighbourhood")
    slots = {}
    for name, table, kernel in (("kept", calls, fused_name(calls.name)), ("boxes_kept", works, "boxes, raster")):
        fused = table[table.name == kernel]
        slots |= _ends(name, 100 * fused.tflop_per_s / fused.singly, ".0f")
    work = ["direction", "side", "window", "head_dim"]
    took = works.pivot(index=work, columns="name", values="median_ms")
    for name, rival in (("natten", "NATTEN, raster"), ("flash", "FlashAttention-4, morton")):
        slots |= _ends(f"over_{name}", took[rival] / took["boxes, raster"], ".1f")
    dense = both_ways(grids, DENSE).pivot(index=["direction", "head_dim"], columns="kernel", values="tflop_per_s")
    for direction, shares in (dense.boxes / dense[DENSE]).groupby("direction"):
        slots[f"of_dense_{direction}"] = " and ".join(map("{:.2f}".format, shares))
    return slots


def _saved() -> dict:
    """Ratio of FLOP and of time of dense attention to those of the reference work."""
    slots, timed = {}, answer(LEDGER["K10"]).cases.set_index("length").value
    for length in (8192, 131072):
        dense, dilated = (
            pattern.work(length, heads=SIZES["heads"], head_dim=SIZES["head_dim"]).flop_forward
            for pattern in (DilatedPattern((length,), (1,)), reference_pattern(length))
        )
        slots |= {f"flop_saved_{length}": f"{dense / dilated:.2g}", f"time_saved_{length}": f"{timed[length]:.1f}"}
    return slots


def _longest(records: list[dict], *, both: bool) -> dict:
    """The longest sequence that ran on all GPUs of a record and was checked, forward or both ways."""
    checked = pd.DataFrame(
        [record for record in records if record["side"] == "auto" and record["out_error"] is not None]
    )
    works = checked[checked.backward] if both else checked
    longest = works.loc[works.tokens.idxmax()]
    slots = {"tokens": int(longest.tokens), "gb": f"{longest.peak_bytes / 1e9:.0f}", "heads": int(longest.heads)}
    slots["seconds"] = f"{(longest.forward_ms + (longest.backward_ms if both else 0)) / 1e3:.2f}"
    slots["head_dim"] = int(longest.head_dim)
    return {f"ring_{'both' if both else 'forward'}_{name}": value for name, value in slots.items()}


def _ring(records: list[dict]) -> dict:
    """The longest sequence forward, that of heads as models have them, and how the ring scales."""
    slots = _longest(records, both=False)
    of_models = [
        record for record in records if record["heads"] >= MODEL_HEADS and record["head_dim"] >= MODEL_HEAD_DIM
    ]
    longest = _longest(of_models, both=True)
    slots |= {name.replace("ring_both", "ring_model"): value for name, value in longest.items()}
    cases = overlap_and_scaling(records)
    causal = cases[(cases.what == "hidden") & (cases.side == "auto") & cases.is_causal]
    slots |= {f"ring_causal_hidden_{case.direction}": f"{case.value:.2f}" for case in causal.itertuples()}
    for sweep, rows in cases[cases.what == "scaling"].groupby("sweep"):
        slots[f"ring_{sweep}_percent"] = f"{100 * rows[rows.ranks == rows.ranks.max()].value.min():.0f}"
    return slots | _ways_to_exchange(pd.DataFrame(records))


def _ways_to_exchange(table: pd.DataFrame) -> dict[str, str]:
    """Time over that of "auto" on all GPUs: of gathering all k and v, and of k and v read through a table.

    And that of "auto" over all_gather's with a causal mask, forward and backward.
    """
    table = table[table.sweep.isin(["strong", "transports"]) & (table.ranks == table.ranks.max())]
    table = table.assign(both_ms=table.forward_ms + table.backward_ms)
    slots = {}
    for passes in ("both", "forward"):
        took = table.pivot(index=["sweep", "is_causal"], columns="side", values=f"{passes}_ms")
        slots |= _ends(f"ring_gathered_{passes}", took.gathered / took.auto, ".1f")
        slots |= _ends(f"ring_table_{passes}", (took["linear order"] / took.auto).dropna(), ".2f")
        slots[f"ring_causal_behind_{passes}"] = f"{100 * (took.auto / took.all_gather - 1)['transports', True]:.0f}"
    return slots


def _weak_grids(records: list[dict]) -> dict:
    """Share of one GPU's speed that each of several keeps on as many cells each, back to back, in percent."""
    weak = pd.DataFrame([record for record in records if (record["sweep"], record["side"]) == ("weak", RECTANGLES)])
    took = weak.assign(window=weak.window.map(str)).pivot(index="window", columns="ranks", values="sustained_ms")
    slots = {}
    for ranks in took.columns[1:]:
        slots |= _ends(f"grids_on_{ranks}", 100 * took[1] / took[ranks], ".0f")
    return slots


def _hidden_on_grids() -> dict[str, str]:
    """The share of a forward's exchange that ran under other kernels in weak scaling, on four GPUs of each card; and
    what two GPUs take to exchange, of a forward of Hilbert runs in strong scaling.
    """
    slots = {}
    for card in ("h200", "h100"):
        records = read_records(newest_run(RING, GRID_RESULTS, [REPORTS / f"{card}x4"]) / GRID_RESULTS)
        weak = [record for record in records if (record["sweep"], record["side"]) == ("weak", RECTANGLES)]
        hidden = [record["hidden_forward"] for record in weak if record["ranks"] > 1]
        slots |= _ends(f"grids_hidden_{card}", pd.Series(hidden))
    (runs,) = (
        record for record in committed_records(RING, GRID_RESULTS) if (record["side"], record["ranks"]) == (RUNS, 2)
    )
    return slots | {
        "runs_forward_ms": f"{runs['forward_ms']:.2f}",
        "runs_exchange_ms": f"{runs['exchange_ms_forward']:.2f}",
    }


def _shared_clouds() -> dict[str, str]:
    """Points of each GPU in weak scaling of the largest cloud, on the most GPUs; the share of one GPU's speed that each
    keeps, back to back, and of queries that see others' points, in percent.
    """
    found = [record for record in committed_records(RING, CLOUD_RESULTS) if record["side"] == SHARED]
    each = [record["points"] // record["ranks"] for record in found]
    largest = [record for record, points in zip(found, each, strict=True) if points == max(each)]
    one, *_, most = sorted(largest, key=itemgetter("ranks"))
    return {
        "clouds_points": f"{max(each):,}",
        "clouds_kept": f"{100 * one['sustained_ms'] / most['sustained_ms']:.0f}",
        "clouds_border": f"{100 * most['border']:.1f}",
    }


def _points() -> dict:
    """Points of each counted cloud; useful pairs in tiles along a curve over row by row; and neighbours that patches of
    the Hilbert curve lose, in percent.
    """
    slots = {"points_counted": models.POINTS, **_ends("points_used", models.tiles_along_curves().value)}
    return slots | _ends("points_lost", 100 * models.lost_by_patches().value, ".0f")


def _timed_points() -> dict[str, str]:
    """Time of patches, of boxes, and of FlexAttention in its fastest order and block, over that of lists; and of its
    blocks of 128 over cells stored row by row over that in Hilbert order; of lists whose work goes row by row over that
    in our own order. Of the record of notebook 13.
    """
    found, slots = committed_records("13_points"), {}
    for kernel in ("patches", "blocks", "boxes"):
        slots |= _ends(f"points_{kernel}", kernels.over_lists(found, kernel).value)
    case = ["direction", "cloud", "points", "window", "head_dim"]
    by_order = kernels.ratios(found, sweep=POINT_SWEEP).pivot(index=case, columns="base", values="value")
    stored = by_order["blocks of 128, raster"] / by_order["blocks of 128, hilbert"]
    orders = kernels.ratios(found, sweep=ORDER_SWEEP)
    slots |= _ends("points_order", orders[orders.base == f"raster{AS_GIVEN}"].value)
    return slots | _ends("points_storage", stored) | {"points_works": str(len(stored))}


def _contexts() -> dict[str, str]:
    """Tokens of the longest timed step of notebook 10, ms of a dilated one, and the others' times over it; ms of a
    token that is decoded after as many.
    """
    found = committed_records("10_in_a_model")
    step = side_table(found, STEP)
    longest = step[step.length == step.length.max()].groupby("name").median_ms.first()
    dilated = longest["dilated"]
    slots = {"context_tokens": f"{step.length.max():,}", "context_ms": f"{dilated:.0f}"}
    slots["context_dense"] = f"{longest['dense, cudnn'] / dilated:.0f}"
    slots["context_windows"] = f"{longest['windows'] / dilated:.2f}"
    slots["context_torchscale"] = f"{longest[TORCHSCALE] / dilated:.1f}"
    decoded = side_table(found, DECODING).query("length == length.max()").set_index("name").median_ms
    return slots | {f"decoding_{name}_ms": f"{decoded[name]:.2f}" for name in ("dilated", "dense", "windows")}


def _timed_map() -> dict[str, str]:
    """Gain of Hilbert order over rows in FlexAttention's blocks, without a dilation and with one, there with residues
    apart too; and by block and side of the grid the least window from which on it gains. Of the record of notebook 08.
    """
    gains = map_gains(committed_records("08_where_a_curve_pays")).query("kernel == 'blocks'")
    is_dilated, is_along = gains.dilation > 1, gains.order == HILBERT
    slots = _ends("map_dilated", gains[is_dilated & is_along].value)
    slots |= _ends("map_apart", gains[is_dilated & (gains.order == APART)].value)
    gains = gains[is_along & ~is_dilated]
    slots |= {"map_works": str(len(gains)), **_ends("map", gains.value)}
    for (block, side), cells in gains.groupby(["block_size", "side"]):
        behind = cells.window[cells.low <= 1].max()
        slots[f"map_least_{int(block)}_{side}"] = f"{cells.window[~(cells.window <= behind)].min():.0f}"
    return slots


def _steps() -> dict[str, str]:
    """ms of a call by each step of notebook 11 and by the library's kernel; each step's time over the next one's."""
    took = side_table(committed_records("11_inside_a_kernel"), STEP_SWEEP).set_index("name").median_ms
    slots = {"step_library_ms": f"{took[LIBRARY]:.3g}"}
    for step, after in zip(STEPS, [*STEPS[1:], None], strict=True):
        number = step.name.split()[0]
        slots[f"step_{number}_ms"] = f"{took[step.name]:.3g}"
        if after:
            slots[f"step_{number}_over_next"] = f"{took[step.name] / took[after.name]:.3g}"
    return slots


def _video() -> dict[str, str]:
    """Share of all pairs that a denoising step of a video model computes, in percent; its inverse; and the gain."""
    step = step_table(committed_records("06c_options")).iloc[-1]
    slots = {"video_share": f"{100 * step.share:.1f}", "video_promised": f"{step.promised:.1f}"}
    return slots | {"video_gain": f"{step.times:.1f}"}


def _options() -> dict[str, str]:
    """Of the claims on options the cases, those that hold, and the least and largest value."""
    slots = {}
    for name, claim in {"kept": "O1", "ahead": "O2"}.items():
        cases = answer(LEDGER[claim]).cases
        slots |= {f"options_{name}": str(int(cases.as_claimed.sum())), f"options_{name}_of": str(len(cases))}
        slots |= _ends(f"options_{name}", cases.value, ".3g")
    return slots


def _orders_of_grids() -> dict:
    """Keys of 64 queries and blocks that hold them, by order, at a window of 5 x 5; and what heads of a dilated pattern
    along an order see of a window of 17 x 17, in percent.
    """
    counts = count_bound([((128, 128), (5, 7, 9, 11))], orders=["raster", "hilbert", BRICKS])
    keys, blocks = (counts.pivot(index="window", columns="order", values=column) for column in ("keys", "blocks"))
    slots = {"bound_keys": f"{keys[BOUND][5]:.0f}", "bound_row": f"{keys.raster[5]:.0f}"}
    slots |= {"bricks_blocks": f"{blocks[BRICKS][5]:.0f}", "squares_blocks": f"{blocks.hilbert[5]:.0f}"}
    slots["bricks_window"] = int(blocks.index[blocks[BRICKS] < blocks.hilbert].max())
    seen = count_along_curve(windows=[17]).set_index("order").share
    slots |= {f"along_{order}": f"{100 * seen[order]:.0f}" for order in ALONG}
    dilated = keys_of_a_query(LONGNET, SIDE**2)
    return slots | {"along_keys": f"{dilated:,.0f}", "along_window": window_of(dilated)}


def _searched_and_approximated() -> dict:
    """Fewer keys that a search over points finds at most, in percent; and how far two resolutions, a window and chosen
    blocks are off full attention, in percent, at as many keys.
    """
    records = committed_records(DIRECTIONS, with_gpu=False)
    search = annealing_table(records)
    ends = search.groupby(["cloud", "start"])["keys"].agg(["first", "last"])
    fewer = 1 - ends["last"].groupby("cloud").min() / ends["first"].xs(HALVED, level="start")
    slots = {"searched": f"{100 * max(0.0, fewer.max()):.1f}", "searched_swaps": f"{search.tried.max():,}"}
    slots["searched_points"] = f"{search.points.max():,}"
    errors = error_table(records)
    errors = errors[errors.near == 3].set_index("way")
    ways = {"near": resolutions.NEAR, "alone": resolutions.NEAR_ALONE, "chosen": resolutions.CHOSEN}
    slots |= {f"means_{name}": f"{100 * errors.error[way]:.1f}" for name, way in ways.items()}
    slots["means_gain"] = f"{errors.error[resolutions.NEAR_ALONE] / errors.error[resolutions.NEAR]:.1f}"
    (side,) = {record["parameters"]["side"] for record in records if record.get("kind") == resolutions.KIND}
    return slots | {"means_keys": int(errors["keys"].iloc[0]), "means_tokens": f"{side**2:,}"}


def _records_without_gpu(notebook: str) -> list[dict]:
    # Of the newest run of a machine without a GPU.
    facts = {run: run_environment(run) for run in committed_runs(notebook)}
    newest = max((run for run in facts if not facts[run]["gpus"]), key=lambda run: facts[run]["utc"])
    return read_records(newest / RESULTS)


def _learnt_orders(records: list[dict], prefix: str) -> dict[str, str]:
    """Held-out loss along each curve, and in a window, over that row by row; seeds, pictures, steps, layers and width.

    records: of a run of notebook 14. prefix: of the slots.
    """
    cases = learning.orders_over_rows(records).set_index("name")
    slots = {}
    for name, case in cases.drop(index=learning.ROWS).iterrows():
        slots[f"{prefix}_{name}"] = f"{case.value:.2f}"
        slots[f"{prefix}_{name}_ends"] = f"{case.low:.2f} to {case.high:.2f}"
    model = next(record["parameters"] for record in records if record.get("kind") == TRAINING)
    counts = {"seeds": cases.seeds.iloc[0], "pictures": cases.pictures.iloc[0]}
    counts |= {name: model[name] for name in ("steps", "layers", "width")}
    return slots | {f"{prefix}_{what}": f"{count:,}" for what, count in counts.items()}


def _in_print() -> dict[str, str]:
    """Neighbours that published windows and tiles keep, useful pairs in blocks, and what tiles promise: notebook 12."""
    windows, tiles = count_windows(), count_tiles([((side, side), 512, 16) for side in (64, 128)]).set_index("grid")
    others = windows[windows.found < 1]
    small = windows[windows.grid == "56x56"][["raster", "hilbert"]].to_numpy()
    largest = windows[windows.grid == "128x128"].iloc[0]
    slots = _ends("print_windows", 100 * others.found, ".0f") | _ends("print_blocks", 100 * small, ".0f")
    slots["print_blocks_fewer"] = f"{largest.hilbert / largest.raster:.0f}"
    for grid, row in tiles.iterrows():
        side = grid.split("x")[0]
        slots |= {f"print_tiles_found_{side}": f"{100 * row.found:.0f}"}
        slots |= {f"print_tiles_promised_{side}": f"{row.promised:.2f}"}
    return slots


def _timed_in_print() -> dict[str, str]:
    """Ratios of times as printed and on one function, and shares of the peak, of the record of notebook 12."""
    found = committed_records("12_in_print")
    windows, tiles, orders = (
        measure(found) for measure in (in_print.curve_windows, in_print.curve_tiles, in_print.orders_beside_morton)
    )
    printed = windows[windows.printed].set_index("attention").value
    slots = {f"print_printed_{attention}": f"{value:.3g}" for attention, value in printed.items()}
    one = windows[~windows.printed & ~windows.reordered]
    rows = one[one.a.str.endswith(", raster")]
    slots |= _ends("print_fused", one[one.a == FUSED].value) | _ends("print_rows", rows.value)
    slots |= _ends("print_ours", one[one.a == OURS].value) | _ends("print_order", windows[windows.reordered].value)
    for beside in ("dense", "windows"):
        slots |= _ends(f"print_tiles_{beside}", tiles[tiles.beside == beside].value)
    by_window = orders[orders.beside == "raster"].set_index("window").value
    slots |= {f"print_morton_{window.split('x')[0]}": f"{value:.2f}" for window, value in by_window.items()}
    shares = in_print.shares_of_peak(found)
    moving = shares[shares.way == OURS].set_index("moves").value
    slots |= {f"print_peak_{moves.split()[-1]}": f"{100 * share:.0f}" for moves, share in moving.items()}
    rates = in_print.strided_rates(found, "P6")
    return slots | _ends("print_strided", rates[(rates.way == OURS) & (rates.moves == "by tiles")].value, ".0f")


def _learning() -> dict[str, str]:
    """Held-out losses of models that learn and of their twins, and the smallest difference over the spread of seeds; of
    text those of dense attention and of windows, too.
    """
    found = answer(LEDGER["L1"])
    slots = {"learning_verdict": found.verdict}
    for case in found.cases.to_dict("records"):
        name = f"learning_{case['learns from']}"
        slots |= {
            name: f"{case['model']:.3g}",
            f"{name}_twin": f"{case['twin']:.3g}",
            f"{name}_low": f"{case['low']:.1f}",
        }
        slots[f"learning_weights_{case['learns from']}"] = f"{case['weights']:,}"
    of_text = learning_table(committed_records("10_in_a_model"), TEXT).groupby("name").loss.mean()
    return slots | {f"learning_text_{name}": f"{of_text[name]:.3g}" for name in ("dense", "windows")}


def _claims() -> dict:
    """Number of claims, and of those that hold, hold under a condition, do not hold, and cannot be tested."""
    verdicts = pd.Series([claim.verdict for claim in LEDGER.values()])
    slots = {"claims": len(verdicts), "claims_hold": int(verdicts.str.fullmatch(f"{HOLDS}( as planned)?").sum())}
    slots["claims_hold_when"] = int(verdicts.str.startswith(HOLDS).sum()) - slots["claims_hold"]
    kinds = {"claims_hold_not": HOLDS_NOT, "claims_untested": UNTESTED}
    return slots | {name: int(verdicts.str.startswith(words).sum()) for name, words in kinds.items()}


def _runs() -> str:
    """A table of the notebooks' newest finished runs on each kind of machine."""
    rows = ["| notebook | ran on | when | |", "| --- | --- | --- | --- |"]
    runs = [(read_manifest(path.parent), path.parent) for path in REPORTS.glob(f"{MACHINES}/*/*/{MANIFEST}")]
    finished = [run for run in runs if run[0] and run[0]["status"] == "ok"]
    newest = {(run[0]["notebook"], run[1].parents[1].name): run for run in sorted(finished, key=lambda r: r[0]["end"])}
    for (name, _), (manifest, folder) in sorted(newest.items()):
        place = folder.relative_to(ROOT).as_posix()
        where = f"{say_hardware(manifest['environment'])} | {manifest['end'][:10]}"
        rows.append(f"| [{name}]({place}/{name}.ipynb) | {where} | [its records]({place}) |")
    return "\n".join(["", *rows, ""])


if __name__ == "__main__":
    for path, text in filled_texts().items():
        print(write_whole(path, text))
