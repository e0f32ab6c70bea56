"""Cases of a claim: a table with value, low and high (its 95 % interval), and the columns that tell cases apart."""

import pandas as pd

INTERVAL = ["value", "low", "high"]


def counted(cases: pd.DataFrame | list[dict], value: pd.Series | None = None) -> pd.DataFrame:
    """Cases whose value, by default the column of that name, has no spread because it is counted."""
    cases = pd.DataFrame(cases)
    value = cases.value if value is None else value
    return cases.assign(value=value, low=value, high=value).reset_index(drop=True)
