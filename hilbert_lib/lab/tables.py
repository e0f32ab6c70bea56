"""Records of sides and pairs as tables: every side of a sweep once, every pair of a sweep once."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

BACK_TO_BACK = ", back to back"  # ends the name of a sweep whose samples are windows of calls
TOLD = ("host_ms", "watts", "joules", "celsius", "held_by")  # of such a side; and its clock


def side_table(records: list[dict], sweep: str) -> "pd.DataFrame":
    """Every side of a sweep once, with the samples of all its pairs.

    Columns: name, the parameters, useful_flop, useful_bytes, error (the largest), peak_bytes, low_ms, median_ms and
    high_ms (quartiles; NaN where nothing was timed), tflop_per_s, gb_per_s. Back to back also `TOLD` and mhz,
    medians over the records; held_by is the most frequent. A ValueError says that there are no records of the sweep.

    >>> side = {"name": "a", "parameters": {"sweep": "s"}, "useful_flop": 1e9, "useful_bytes": 1e6, "error": 0.0}
    >>> side_table([{**side, "samples_ms": [1.0, 2.0, 3.0], "peak_bytes": [8]}], "s").median_ms.tolist()
    [2.0]
    """
    import pandas as pd

    pooled: dict[str, dict] = {}
    for record in of_sweep(records, sweep):
        for timing, peak in zip(sides_of(record), record["peak_bytes"], strict=True):
            counts = {"useful_flop": timing["useful_flop"], "useful_bytes": timing["useful_bytes"]}
            totals = {"error": 0.0, "peak_bytes": 0, "samples": []}
            row = {"name": timing["name"], **timing["parameters"], **counts, **totals}
            row = pooled.setdefault(identity_of([timing]), row)
            if "joules" in timing:
                readings = {name: timing[name] for name in TOLD} | {"mhz": timing["sm_clock_mhz"][0]}
                row.setdefault("told", []).append(readings)
            row["error"] = max(row["error"], timing["error"])
            row["peak_bytes"] = max(row["peak_bytes"], peak)
            row["samples"] += timing.get("samples_ms", [])
    for row in pooled.values():
        for name, values in pd.DataFrame(row.pop("told", [])).items():
            row[name] = values.median() if pd.api.types.is_numeric_dtype(values) else values.mode().get(0)
    table = pd.DataFrame(list(pooled.values()))
    quartiles = [np.quantile(samples or [np.nan], [0.25, 0.5, 0.75]) for samples in table.pop("samples")]
    table[["low_ms", "median_ms", "high_ms"]] = np.array(quartiles)
    table["tflop_per_s"] = table.useful_flop.astype(float) / table.median_ms / 1e9
    table["gb_per_s"] = table.useful_bytes.astype(float) / table.median_ms / 1e6
    return table


def ratio_table(records: list[dict], sweep: str) -> "pd.DataFrame":
    """Every pair of a sweep once.

    Columns: a and b (names), the parameters of b, ratio (time of a over b's: above 1, b is faster) with its interval
    low to high (NaN where nothing was timed), output_difference, error_a, error_b.

    >>> a, b = ({"name": name, "parameters": {"sweep": "s"}, "error": 0.0} for name in "ab")
    >>> pair = {"a": a, "b": b, "ratio": 2.0, "interval": (1.9, 2.1), "output_difference": 0.0}
    >>> ratio_table([pair], "s").high.tolist()
    [2.1]
    """
    import pandas as pd

    rows = []
    for record in of_sweep(records, sweep):
        a, b = record["a"], record["b"]
        low, high = record.get("interval", (np.nan, np.nan))
        row = {"a": a["name"], "b": b["name"], **b["parameters"], "ratio": record.get("ratio", np.nan)}
        row |= {"low": low, "high": high, "output_difference": record["output_difference"]}
        rows.append({**row, "error_a": a["error"], "error_b": b["error"]})
    return pd.DataFrame(rows)


def both_ways(records: list[dict], sweep: str) -> "pd.DataFrame":
    """Every side of a sweep that was timed back to back as well: `side_table` of that, and `singly`, its TFLOP/s in
    single calls (NaN where it has none). Empty where nothing was timed back to back.

    >>> both_ways([], "backends").empty
    True
    """
    import pandas as pd

    ways = {sides_of(record)[0]["parameters"]["sweep"] for record in records}
    if sweep + BACK_TO_BACK not in ways:
        return pd.DataFrame()
    long, single = side_table(records, sweep + BACK_TO_BACK), side_table(records, sweep)
    same = ["name", *(name for record in records for timing in sides_of(record) for name in timing["parameters"])]
    same = [name for name in dict.fromkeys(same) if name in long and name in single and name != "sweep"]
    single = single[[*same, "tflop_per_s"]].rename(columns={"tflop_per_s": "singly"})
    return long.merge(single, on=same, how="left")


def of_sweep(records: list[dict], sweep: str) -> list[dict]:
    """The records of one sweep, once each, the newest: two lists of parameters may overlap. ValueError for none."""
    sweeps = [sides_of(record)[0]["parameters"]["sweep"] for record in records]
    if sweep not in sweeps:
        raise ValueError(f"sweep must be one of the records' ({', '.join(sorted(set(sweeps)))}), got {sweep!r}")
    newest = {
        identity_of(sides_of(record)): record for record, name in zip(records, sweeps, strict=True) if name == sweep
    }
    return list(newest.values())


def fused_name(names: Iterable[str]) -> str:
    """The fused kernel of some records, by the names of their sides.

    On a Hopper card it is the warp-specialised kernels, beside which the plain ones may have been timed.

    >>> fused_name(["flash", "triton"]), fused_name(["triton", "hopper"])
    ('triton', 'hopper')
    """
    return "hopper" if "hopper" in set(names) else "triton"


def sides_of(record: dict) -> list[dict]:
    """The two sides of a pair's record, those of one that was timed back to back, or the one of another."""
    if "sides" in record:
        return record["sides"]
    return [record["a"], record["b"]] if "a" in record else [record]


def identity_of(sides: list[dict]) -> str:
    """Fields that make sides the same in another run: their names and parameters."""
    return json.dumps([[side["name"], side["parameters"]] for side in sides], sort_keys=True)
