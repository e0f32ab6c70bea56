"""The benchmark of attention: a point is a length and a direction, its sides are backends."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from hilbert_lib import checks
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.validation import DTYPES, LARGEST_HEAD_DIM
from hilbert_lib.lab.pairs import time_cases
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.lab.timing import Case
from hilbert_lib.lab.workload import Workload, by_backend
from hilbert_lib.limits.estimate import DIRECTIONS, MemoryEstimate
from hilbert_lib.limits.memory import measure_peak
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.dilated import DilatedPattern, check_dilated

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
POINT_KEYS = ("pattern", "length", "heads", "head_dim", "dtype", "is_causal", "device", "direction", "sides")
OUTCOME = ["length", "direction", "backend", "status", "paired", "median_ms", "iqr_ms", "ratio", "low", "high"]
OUTCOME += ["error", "peak_bytes", "cause"]
SWEEP = "attention"


@dataclass(frozen=True)
class Benchmark:
    """Function that `SafeBenchmarkRunner` runs, and facts that are known of its sides before they are tried.

    target: "module:function", called in a process of its own with a point whose "sides" are measured together; it
    yields a record of `timing` as soon as it has one: of the first side beside each other. refusal: why a side cannot
    serve a point, or ""; ValueError for what is no point. inputs: bytes of what a point's sides are given; where these
    do not fit, no side is estimated. estimate: the memory that a side takes.
    """

    target: str
    refusal: Callable[[dict, str], str] = lambda point, side: ""
    inputs: Callable[[dict], int] = lambda point: 0
    estimate: Callable[[dict, str], MemoryEstimate] = lambda point, side: MemoryEstimate({}, 0, 0, 0)


def attention_points(
    pattern: DilatedPattern,
    *,
    lengths: Sequence[int],
    backends: Sequence[str],
    directions: Sequence[str] = ("forward",),
    heads: int = 8,
    head_dim: int = 64,
    dtype: str = "float32",
    is_causal: bool = False,
    device: torch.device | str = "cpu",
) -> list[dict]:
    """One point for each length and direction, in which the backends are compared with the first. One sequence.

    In the time of direction "backward" there is no forward. TypeError or ValueError: for what is not allowed.
    """
    check_dilated(pattern)
    for argument, names, allowed in (("backends", backends, BACKENDS), ("directions", directions, DIRECTIONS)):
        if not isinstance(names, list | tuple) or not names or any(name not in list(allowed) for name in names):
            raise ValueError(f"{argument} must be a list of {', '.join(allowed)}; got {names!r}")
    checks.one_of("dtype", dtype, DTYPE_NAMES)
    checks.boolean("is_causal", is_causal)
    heads = checks.integer("heads", heads, least=1)
    pattern.check_heads(heads)
    head_dim = checks.integer("head_dim", head_dim, least=1, most=LARGEST_HEAD_DIM)
    lengths = checks.integers("lengths", lengths, least=1)
    if max(lengths) * heads * head_dim * getattr(torch, dtype).itemsize >= 2**63:
        got = f"{max(lengths)} for {heads} heads of size {head_dim}"
        raise ValueError(f"lengths must be such that q has less than 2^63 bytes, got {got}")
    shared = {
        "pattern": asdict(pattern),
        "heads": heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "is_causal": is_causal,
        "device": str(checks.device(device)),
        "sides": list(dict.fromkeys(backends)),
    }
    return [{**shared, "length": length, "direction": direction} for direction, length in product(directions, lengths)]


def attention_cases(point: dict) -> Iterator[tuple[Case, int, float]]:
    """The sides of a point, ready to be timed: each with its error, bytes of a call at its highest point (its inputs
    apart), and about the seconds of a call."""
    work = _work(point)
    for backend in point["sides"]:
        call = work.side(backend, partial(by_backend, backend), point["direction"], sweep=SWEEP)
        error = call.error(call.run())  # this call compiles, and keeps its tables
        began = []  # when the call did: `measure_peak` collects garbage before it
        peak = measure_peak(lambda began=began, call=call: (began.append(time.perf_counter()), call.run()), work.device)
        seconds = time.perf_counter() - began[0]
        yield Case(backend, call.run, call.parameters, error, call.useful_flop, call.useful_bytes), peak, seconds


def measure_attention(point: dict) -> Iterator[dict]:
    """Time the sides of a point in turn, the first beside each other; or the only one alone."""
    device = torch.device(point["device"])
    cases = attention_cases(point)
    first, first_peak, first_seconds = next(cases)
    if len(point["sides"]) == 1:
        alone = time_cases(first, device=device, took=first_seconds)
        yield alone.record() | {"peak_bytes": (first_peak,), "output_difference": None}
    for rival, peak, seconds in cases:
        pair = time_cases(first, rival, device=device, took=first_seconds + seconds)
        yield pair.record() | {"peak_bytes": (first_peak, peak), "output_difference": None}


def attention_refusal(point: dict, side: str) -> str:
    """Reason why a backend cannot serve a point, or why its time would mean nothing; "" where it can."""
    work = _work(point)
    if side == "triton" and work.device.type == "cpu" and kernel_mode() == "interpreted":
        return "its kernels are interpreted here: their times mean nothing"
    return work.refusal(side, gradient=point["direction"] == "backward")


def attention_estimate(point: dict, side: str) -> MemoryEstimate:
    """Estimate of the memory of one side of a point, with what lies beside it in its process."""
    estimate = _work(point).estimate(side, point["direction"])
    items, beside = estimate.items, {}
    if point["direction"] == "forward":
        beside["dout, drawn and not read"] = items["out"]
    elif side != point["sides"][0]:
        beside["out and lse of the first side"] = items["out"] + items["lse"]
    return replace(estimate, items={**beside, **items}, inputs=estimate.inputs + sum(beside.values()))


ATTENTION = Benchmark(
    "hilbert_lib.lab.guarded.cases:measure_attention",
    attention_refusal,
    lambda point: _work(point).input_bytes,
    attention_estimate,
)


def outcome_table(lines: Iterable[dict]) -> "pd.DataFrame":
    """Every side of every point once, the last line of each point: its speed or what became of it; else NaN.

    paired: whether it was timed in turn with the first. ratio: time of the first backend over its own (above 1 it is
    faster), with its interval low to high. peak_bytes: of a call, its inputs apart.
    """
    import pandas as pd

    return pd.DataFrame([row for _, row in _outcomes(lines)], columns=OUTCOME)


def predicted_memory(lines: Iterable[dict]) -> "pd.DataFrame":
    """Predicted memory of a call of every side that can serve, its inputs apart, beside what it took, if measured."""
    import pandas as pd

    rows = [
        {**row, "predicted_bytes": attention_estimate(point, row["backend"]).peak}
        for point, row in _outcomes(lines)
        if row["status"] != "cannot serve"
    ]
    columns = ["length", "direction", "backend", "status", "peak_bytes", "predicted_bytes"]
    return pd.DataFrame(rows, columns=columns).astype({"peak_bytes": float})


def _outcomes(lines: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """Every side of every point once: the point, and what is known of the side."""
    import pandas as pd

    for line in {line["key"]: line for line in lines if "point" in line}.values():
        point, records = line["point"], line["records"]
        speeds = side_table(records, SWEEP) if records else pd.DataFrame({"name": [], "high_ms": [], "low_ms": []})
        speeds["iqr_ms"] = speeds.high_ms - speeds.low_ms
        pairs = [record for record in records if "a" in record]
        ratios = ratio_table(pairs, SWEEP) if pairs else pd.DataFrame({"b": []})
        for backend, outcome in line["outcomes"].items():
            row = {"length": point["length"], "direction": point["direction"], "backend": backend, **outcome}
            for speed in speeds[speeds.name == backend].to_dict("records") + ratios[ratios.b == backend].to_dict(
                "records"
            ):
                row |= {name: value for name, value in speed.items() if name in OUTCOME}
            yield point, row


def _work(point: dict) -> Workload:
    if not point.keys() >= set(POINT_KEYS):
        raise ValueError(f"points must have {', '.join(POINT_KEYS)}, as attention_points gives them; got {point!r}")
    for backend in point["sides"]:
        if backend not in BACKENDS:
            raise ValueError(f"points must have sides of {', '.join(BACKENDS)}; got {backend!r}")
    sizes = {name: point[name] for name in ("length", "heads", "head_dim", "is_causal", "dtype")}
    return Workload(DilatedPattern(**point["pattern"]), device=torch.device(point["device"]), **sizes)
