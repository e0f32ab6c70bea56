"""Cases of the options of a call, and of the layers of a video model: notebook 06c."""

import numpy as np
import pandas as pd

from hilbert_lib.lab.ledger.cases import INTERVAL
from hilbert_lib.lab.sweeps.options import BASE, option_table
from hilbert_lib.lab.sweeps.video import FULL, VIDEO_SWEEP
from hilbert_lib.lab.tables import of_sweep
from hilbert_lib.lab.timing import SEED, interval_of, resampled_medians

CASE = ["base", "option", "direction"]


def shares(records: list[dict]) -> pd.DataFrame:
    """The rate of every option over that of its base."""
    table = option_table(records)
    table = table[table.option != BASE]
    names = {"share": "value", "share_low": "low", "share_high": "high"}
    return table.rename(columns=names | {"low": "ratio_low", "high": "ratio_high"})[[*CASE, "dtype", *INTERVAL]]


def over_others(records: list[dict]) -> pd.DataFrame:
    """The time of the fastest other way over ours, of every option that another way serves."""
    table = option_table(records).rename(columns={"ratio": "value"})
    return table[[*CASE, "other", *INTERVAL]].dropna(subset="value").reset_index(drop=True)


def of_promised(records: list[dict]) -> pd.DataFrame:
    """The time of full attention over that of each layer with a window, times the share of the pairs of the layer."""
    alone = {r["parameters"]["option"]: r for r in of_sweep(records, VIDEO_SWEEP) if "samples_ms" in r}
    full, cases = alone.pop(FULL), []
    for option, record in alone.items():
        share, rng = record["useful_flop"] / full["useful_flop"], np.random.default_rng(SEED)
        medians = [resampled_medians(each["samples_ms"], rng) for each in (full, record)]
        low, high = interval_of(share * medians[0] / medians[1])
        value = share * float(np.median(full["samples_ms"]) / np.median(record["samples_ms"]))
        cases.append({"option": option, "share": share, "value": value, "low": low, "high": high})
    return pd.DataFrame(cases)
