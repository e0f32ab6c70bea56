"""Causes of 7.95x: the documents' comparisons rebuilt from what they print, with one cause turned on at a time.

The Hilbert side has k and v along a curve. The standard side runs first, by the host's clock, in a process with an
empty cache of compiled kernels, as for the documents. A cause changes one thing of a fair comparison.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib.checks import one_of
from hilbert_lib.lab.pairs import relative_difference
from hilbert_lib.lab.records import Kept, records_to_draw
from hilbert_lib.lab.timing import SEED, interval_of, resampled_medians
from hilbert_lib.launch.isolated import run_isolated
from hilbert_lib.ordering import Ordering

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

# ms: of a call, standard and Hilbert (004 prints tokens per s). No segment is printed, and 001 no rate.
PRINTED = {
    "7.95": {"document": "000", "length": 4096, "segment": 1024, "rate": 64, "heads": 12, "ms": (138.66, 17.44)},
    "2.66": {"document": "004", "length": 16384, "segment": 2048, "rate": 2, "heads": 8, "ms": (91.64, 34.46)},
    "1.66": {"document": "001", "length": 8192, "segment": 2048, "rate": 2, "heads": 8, "ms": (685.56, 413.48)},
}
CAUSES = FAIR, CODE, KEYS, QUERIES, CLOCK, FIRST, COLD, KERNELS, ALL = (
    *("fair", "two programs", "fewer keys", "fewer queries", "no wait"),  # the clock is read before the GPU is done
    *("first call", "no warm-up", "two kernels", "all"),  # of a fresh process, where nothing is compiled
)
SEGMENT = "two programs, another segment"
SEGMENTS = (
    128,
    256,
    512,
    1024,
    2048,
    4096,
)  # that 7.95 may be of, by tokens: the loop makes its calls for each segment
CALLS, PAIRS = 10, 25  # calls without warm-up, pairs after it


def rebuild_printed(
    printed: Sequence[str], *, device: torch.device | str, output_dir: str = "", shorter: int = 1
) -> list[dict]:
    """A record of kind "cause" for each cause of ratios of `PRINTED`. The folder keeps it: it is not measured again.

    device: without a GPU torch's CPU kernels stand for the method. shorter: divides lengths and segments. RuntimeError:
    why a process failed.
    """
    store, records = Kept(output_dir, _key), []
    for name in printed:
        work = {"printed": one_of("printed", name, tuple(PRINTED)), **PRINTED[name], "device": str(device)}
        work["segment"] = max(work["rate"], work["segment"] // shorter)
        work["length"] = work["segment"] * (PRINTED[name]["length"] // PRINTED[name]["segment"])
        # Only the loop beside a kernel comes near its ratio, and so only there the segment decides.
        segments = {max(work["rate"], segment // shorter) for segment in SEGMENTS if name == "7.95"}
        work["other_segments"] = sorted(segments - {work["segment"]})
        work["has_kernel"] = name == "7.95" and torch.device(device).type == "cuda"  # 001 and 004 are made of torch's
        for last in (COLD, KERNELS, ALL) if work["has_kernel"] else (COLD, ALL):
            if _key(work | {"cause": last}) not in store.known:
                ending = run_isolated(f"{__name__}:in_process", [work, last], seconds=120, on_record=store.add)
                if ending.status != "ok":
                    raise RuntimeError(f"{name}x, {last}: {ending.status}, {ending.cause}")
        keys = [_key(work | {"cause": cause}) for cause in CAUSES]
        keys += [_key(work | {"cause": SEGMENT, "segment": segment}) for segment in work["other_segments"]]
        records += [store.known[key] for key in keys if key in store.known]
    return records


def cause_table(records: Sequence[dict]) -> "pd.DataFrame":
    """The ratio of each cause (above 1: the Hilbert side seems faster), its interval, and how the two outputs differ.

    segment: tokens that a document left open. standard_ms, hilbert_ms: medians. printed_ms: the printed standard side.
    calls: over how many the first call's excess is to be spread to make the printed difference of times.
    """
    import pandas as pd

    rows = [record for record in records if record.get("kind") == "cause" and record["cause"] != SEGMENT]
    table = pd.DataFrame(rows, columns=["document", "printed", "segment", "cause", "ratio", "output_difference"])
    for side in ("standard_ms", "hilbert_ms"):
        table[side] = [float(np.median(record[side])) for record in rows]
    table["printed_ms"] = [record["ms"][0] for record in rows]
    table["claim"] = table.printed.astype(str) + "x, document " + table.document.astype(str)
    intervals = [record["interval"] or [record["ratio"]] * 2 for record in rows]
    table["low"], table["high"] = np.array(intervals).reshape(-1, 2).T
    calls = [
        (record["standard_ms"][0] - record["hilbert_ms"][0]) / (record["ms"][0] - record["ms"][1]) for record in rows
    ]
    return table.assign(printed=table.printed.astype(float), calls=np.where(table.cause == FIRST, calls, np.nan))


def segment_table(records: Sequence[dict]) -> "pd.DataFrame":
    """The times of a loop over segments and of one call, at the size of 7.95: a row for each segment and machine.

    loop_ms, call_ms: medians. ratio, low, high: loop / call, and its interval. printed_ms, printed: the printed ones.
    """
    import pandas as pd

    rows = []
    for record in records:
        if record.get("printed") == "7.95" and record["cause"] in (CODE, SEGMENT):
            low, high = record["interval"]
            medians = {"loop_ms": np.median(record["standard_ms"]), "call_ms": np.median(record["hilbert_ms"])}
            ratio = {"ratio": record["ratio"], "low": low, "high": high}
            printed = {"printed_ms": record["ms"][0], "printed": float(record["printed"])}
            hardware = record["environment"]["hardware"]
            rows.append({"segment": record["segment"], **medians, **ratio, **printed, "hardware": hardware})
    columns = ["segment", "loop_ms", "call_ms", "ratio", "low", "high", "printed_ms", "printed", "hardware"]
    return pd.DataFrame(rows, columns=columns).sort_values(["hardware", "segment"], ignore_index=True)


def committed_causes() -> "tuple[pd.DataFrame, str]":
    """The `cause_table` of the newest folder "causes" that is committed of a GPU, and its source; none without any."""
    records, source = records_to_draw([], "causes")
    return cause_table(records), source


def finding(table: "pd.DataFrame", source: str) -> str:
    """A title of two lines: the fair ratios, with their source, and for each printed one the nearest cause alone."""
    fair, alone = table[table.cause == FAIR].ratio, table[~table.cause.isin([FAIR, ALL])]
    near = alone.assign(off=np.log(alone.ratio / alone.printed).abs()).sort_values("off").drop_duplicates("claim")
    nearest = (f"{row.printed}x: {row.cause} {row.ratio:.3g}" for row in near.sort_index().itertuples())
    fair_range = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (fair.min(), fair.max())))
    return f"A fair ratio is {fair_range} ({source})\nAlone nearest to {', '.join(nearest)}"


def in_process(work: dict, last: str) -> Iterator[dict]:
    """The records of a fresh process: its first calls are those of `last`, whose record comes after the warm ones."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, torch.no_grad():
        os.environ["TRITON_CACHE_DIR"] = folder
        torch.set_num_threads(1)  # two would wait for each other whenever another process has a core
        if work["has_kernel"]:
            import hilbert_lib.lab.seed_kernel  # noqa: F401  a script imports before it times
        sides, clock = sides_of_cause(work, last), partial(_ms, work["device"])
        cold = [[clock(call, waits=last != ALL) for _ in range(CALLS)] for call in sides]
        for cause in (FAIR, CODE, KEYS, QUERIES, CLOCK) if last == COLD else ():
            if (cause == QUERIES and work["has_kernel"]) or (cause == CLOCK and work["device"] == "cpu"):
                continue  # the kernel leaves no query out, and a CPU has nothing to wait for
            yield _paired(work, cause, sides_of_cause(work, cause), partial(clock, waits=cause != CLOCK))
        for segment in work["other_segments"] if last == COLD else ():
            other = {**work, "segment": segment}
            yield _paired(other, SEGMENT, sides_of_cause(other, CODE), clock)
        if last == COLD:
            yield _record(work, FIRST, sides, cold, cold[0][0] / cold[1][0])
        yield _record(work, last, sides, cold, sum(cold[0]) / sum(cold[1]))


def sides_of_cause(work: dict, cause: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The standard and the Hilbert call, without arguments: one function but for what the cause changes."""
    length, segment, rate, device = (work[name] for name in ("length", "segment", "rate", "device"))
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, length, work["heads"], 64, generator=generator, device=device) for _ in range(3))
    orders = (order.to(device) for order in (Ordering.linear(length), Ordering.from_curve("hilbert", length)))
    linear, curve = ([order.apply(k, dim=1), order.apply(v, dim=1), order.inverse.int()] for order in orders)
    attend = by_kernel if work["has_kernel"] else at_once
    # Rows that are dilated go to a core that dilates again, and q with k and v: so documents 002 to 004 have it.
    step = min(rate * rate, segment) if cause in (KEYS, ALL) else rate
    query_step = rate if cause in (QUERIES, ALL) and not work["has_kernel"] else 1
    first = {CODE: by_loop, ALL: by_loop, KERNELS: partial(by_kernel, has_table=False)}.get(cause, attend)
    return partial(first, q, *linear, segment, rate, 1), partial(attend, q, *curve, segment, step, query_step)


def by_loop(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, segment: int, step: int, every: int) -> Tensor:
    """As a first version is written: segment by segment, each with its own indices, products and softmax."""
    out = torch.zeros_like(q)
    for start in range(0, q.shape[1], segment):
        rows, keys = slice(start, start + segment, every), torch.arange(start, start + segment, step, device=q.device)
        scores = torch.einsum("qhd,khd->hqk", q[0, rows], k[0, slots[keys]]) * q.shape[-1] ** -0.5
        out[0, rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[0, slots[keys]])
    return out


def at_once(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, segment: int, step: int, every: int) -> Tensor:
    """As a later version is: all segments in one call of torch's fused attention."""
    out, keys = torch.zeros_like(q), slots.view(-1, segment)[:, ::step]
    rows = q.view(-1, segment, *q.shape[2:])[:, ::every]
    part = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (rows, k[0, keys], v[0, keys])))
    out.view(-1, segment, *q.shape[2:])[:, ::every] = part.transpose(1, 2)
    return out


def by_kernel(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, segment: int, step: int, _, has_table=True) -> Tensor:
    """The documents' kernel on one function: a program serves query slots[m], from the slots of its keys."""
    from hilbert_lib.lab.seed_kernel import seed_attention  # triton is imported only where a kernel is used

    return seed_attention(q, k, v, segment_length=segment, dilation_rate=step, order=slots if has_table else None)


def _key(record: dict) -> tuple | None:
    names = ("printed", "length", "segment", "device", "cause")
    return tuple(record[name] for name in names) if "printed" in record else None


def _ms(device: str, call: Callable[[], Tensor], *, waits: bool = True) -> float:
    start = time.perf_counter()
    call()
    took = 1e3 * (time.perf_counter() - start)
    if device != "cpu":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start) if waits else took


def _paired(work: dict, cause: str, pair: tuple, clock: Callable[..., float]) -> dict:
    # The record of two calls in turn, after a warm-up.
    [clock(call) for call in pair * 2]
    times = np.array([[clock(call) for call in pair] for _ in range(PAIRS)])
    ratios = times[:, 0] / times[:, 1]
    interval = interval_of(resampled_medians(ratios, np.random.default_rng(SEED)))
    return _record(work, cause, pair, times.T.tolist(), float(np.median(ratios)), interval)


def _record(work: dict, cause: str, sides: tuple, samples: list, ratio: float, interval: tuple | None = None) -> dict:
    timings = {"standard_ms": samples[0], "hilbert_ms": samples[1], "ratio": ratio, "interval": interval}
    apart = relative_difference([sides[1]()], [sides[0]()])
    return {**work, "kind": "cause", "cause": cause, **timings, "output_difference": apart}
