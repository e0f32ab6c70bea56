"""Cases from the records of times on one GPU: layouts, backends, graphs, pools.

Every function takes records and gives a table: value, low and high (its 95 % interval; equal where there is none), and
the columns that tell cases apart.
"""

from collections.abc import Sequence

import pandas as pd

from hilbert_lib.lab.cache.l2 import GPUS
from hilbert_lib.lab.guarded.cases import outcome_table
from hilbert_lib.lab.ledger import models
from hilbert_lib.lab.ledger.claim import INTERVAL, counted
from hilbert_lib.lab.ledger.claims import LAYOUTS
from hilbert_lib.lab.sweeps.counters import counter_table
from hilbert_lib.lab.sweeps.kernels import NO_TABLE
from hilbert_lib.lab.sweeps.memory import pool_table
from hilbert_lib.lab.tables import ratio_table, side_table

Records = list[dict]  # of a results.jsonl
WORKS = {"layouts": "whole sequence", "decoding": "decoding"}
CASE = ["work", "length", "queries", "row_bytes", "dilation"]


def ratios(records: Records, *, sweep: str, columns: Sequence[str] = (), where: str = "") -> pd.DataFrame:
    """The pairs of a sweep that the query `where` picks: time of `base` over that of `rival`; `columns`, or all."""
    table = ratio_table(records, sweep).rename(columns={"ratio": "value", "a": "base", "b": "rival"})
    table = table.query(where) if where else table
    return table[[*columns, *INTERVAL]] if columns else table


def quotient(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """One interval over another, of two tables that are side by side: the widest that the two allow."""
    value, low, high = first.value / second.value, first.low / second.high, first.high / second.low
    return pd.DataFrame({"value": value, "low": low, "high": high})


def layout_ratios(records: Records, *, order: str = "hilbert", where: str = "") -> pd.DataFrame:
    """Time of linear storage, read through a table, over that of an order, or of the "best" one of each work."""
    # The documents' sizes hold rows of 64 elements in bfloat16, all heads of a token side by side.
    sizes = ratios(records, sweep="claims", where=f"pair == '{LAYOUTS}'")
    sizes = sizes.assign(work="whole sequence", queries=0, row_bytes=2 * sizes.head_dim)
    every = pd.concat([_layouts(records), sizes], ignore_index=True)
    if order == "best":
        every = every[every.rival != NO_TABLE]
        cases = every.loc[every.groupby(CASE).value.idxmax()]
    else:
        cases = every[every.rival == order]
    cases = cases[[*CASE, *INTERVAL, "rival"]]
    return (cases.query(where) if where else cases).reset_index(drop=True)


def over_sequence(records: Records) -> pd.DataFrame:
    """Time from storage in sequence order, read as it is, over that from every order, read through a table.

    Both were timed beside linear storage read through a table, of which `through_table` is the order's ratio.
    """
    table = _layouts(records)
    plain = table[table.rival == NO_TABLE][[*CASE, *INTERVAL]]
    orders = table[table.rival != NO_TABLE].rename(columns={"rival": "order"}).reset_index(drop=True)
    plain = orders[CASE].merge(plain, on=CASE, how="left")
    return orders[[*CASE, "order"]].join(quotient(orders, plain)).assign(through_table=orders.value)


def _layouts(records: Records) -> pd.DataFrame:
    tables = [ratios(records, sweep=sweep).assign(work=work) for sweep, work in WORKS.items()]
    return pd.concat([table for table in tables if not table.empty], ignore_index=True)


def grid_gains(records: Records) -> pd.DataFrame:
    """Time of raster order over that of every other order of the tokens of a grid, forward."""
    table = ratios(records, sweep="neighbourhood", where="base == 'raster' and direction == 'forward'")
    return table.rename(columns={"rival": "order"})[["order", "side", "window", "block_size", "head_dim", *INTERVAL]]


def fused_speeds(records: Records, *, length: int) -> pd.DataFrame:
    """The fused kernel on the reference work, not causal, and `other`, the backend nearest to it."""
    work, case = f"pattern == 'reference' and not is_causal and length == {length}", ["direction", "head_dim"]
    speeds = side_table(records, "backends").query(work)[[*case, "name", "tflop_per_s", "error"]]
    pairs = ratios(records, sweep="backends", where=f"rival == 'triton' and {work}").sort_values("value")
    nearest = pairs.drop_duplicates(case)[[*case, "base", *INTERVAL]].rename(columns={"base": "other"})
    own = speeds[speeds.name == "triton"].merge(nearest, on=case)
    return own.merge(speeds, left_on=[*case, "other"], right_on=[*case, "name"], suffixes=("", "_other"))


def nearest_backends(choices: Records, records: Records) -> pd.DataFrame:
    """Time of the nearest backend, `other`, over the fused kernel's, for each work of notebooks 05 and 06."""
    pairs = pd.concat([ratios(choices, sweep="selection"), ratios(records, sweep="backends")], ignore_index=True)
    first = pairs[pairs.base == "triton"]  # where another backend was the choice, the fused kernel stands first
    turned = first.assign(base=first.rival, value=1 / first.value, low=1 / first.high, high=1 / first.low)
    pairs = pd.concat([pairs[pairs.rival == "triton"], turned], ignore_index=True)
    work = ["pattern", "length", "head_dim", "is_causal", "direction"]
    nearest = pairs.loc[pairs.groupby(work).value.idxmin(), ["base", *work, *INTERVAL]]
    return nearest.rename(columns={"base": "other"}).reset_index(drop=True)


def growth(records: Records) -> pd.DataFrame:
    """The Hilbert order's ratio at the largest dilation over that at the smallest, and likewise by length.

    grows_with: "dilation" or "length"; at: the other of the two.
    """
    # Not `layout_ratios`: at the documents' sizes the heads of a token lie side by side, which is another layout.
    table, cases = ratios(records, sweep="layouts", where="rival == 'hilbert'"), []
    for along, other in (("dilation", "length"), ("length", "dilation")):
        ends = table.sort_values(along).groupby(["row_bytes", other])[[along, *INTERVAL]]
        first, last = ends.first(), ends.last()
        grown = quotient(last, first)[first[along] < last[along]].rename_axis(["row_bytes", "at"]).reset_index()
        cases.append(grown.assign(grows_with=along))
    return pd.concat(cases, ignore_index=True)


def longest(records: Records, *, asked: int) -> pd.DataFrame:
    """Tokens of the longest sequence of notebook 06 whose forward and backward were checked, over those asked for."""
    found = ratios(records, sweep="backends").length.max()
    return counted(pd.DataFrame({"tokens": [asked], "value": [found / asked]}))


def over_manual(records: Records, *, backend: str) -> pd.DataFrame:
    """Time of plain matrix products over that of a dense kernel, both timed beside the first backend of their point."""
    table = outcome_table(records).dropna(subset=["ratio"]).rename(columns={"ratio": "value"})
    dense, eager = (table[table.backend == name].set_index(["length", "direction"]) for name in (backend, "eager"))
    return quotient(dense, eager).dropna().reset_index()


def saved_by_cache(records: Records) -> pd.DataFrame:
    """The share of a call's time that is saved where its tables are found and not built; records of notebook 05."""
    cases = ratios(records, sweep="pattern cache", columns=["what", "length"], where="rival == 'call'")
    return cases.assign(**{name: cases[name] / (1 + cases[name]) for name in INTERVAL})


def pool_fragmentation(records: Records) -> pd.DataFrame:
    """GiB reserved and not allocated under torch's caching allocator, less those under another way to hold buffers."""
    pools = pool_table(records)
    mixed = pools[pools.lengths.str.contains(" ")]
    base = mixed[mixed.strategy == "caching"].set_index("direction").fragmented_bytes
    others = mixed[mixed.strategy != "caching"]
    spared = (others.direction.map(base) - others.fragmented_bytes) / 2**30
    return counted(others[["strategy", "direction"]], spared)


def saved_and_counted(records: Records, *, column: str, **model) -> pd.DataFrame:
    """The share that the Hilbert order saves against linear storage: modelled, and as an H200 counted it."""
    hilbert, linear = _counters(records)
    saved = _counted_in(1 - hilbert[column] / linear[column]).assign(layout="bhsd")  # the layout of those sweeps
    return pd.concat([models.units_saved(**model).assign(how="modelled"), saved], ignore_index=True)


def gained_and_counted(records: Records, *, dilation: int) -> pd.DataFrame:
    """Points of hit rate that the Hilbert order gains over linear: in a modelled cache, and in an H200's L2."""
    hilbert, linear = _counters(records)
    l2 = next(gpu for gpu in GPUS if gpu.name.startswith("H200"))
    gained = _counted_in(hilbert.l2_found_percent - linear.l2_found_percent).assign(cache_kib=l2.l2_bytes // 1024)
    modelled = models.hit_rate_gained(dilation=dilation).assign(how="modelled", dilation=dilation)
    return pd.concat([modelled, gained], ignore_index=True)


def _counters(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    # Of attention, which the claims are about: the fused forward, and decoding. A gather is none.
    table = counter_table(records)
    if table.empty:
        raise ValueError("nothing was counted")
    table = table[table.kernel != "gather"].set_index(["kernel", "length", "row_bytes", "dilation"])
    return table[table.layout == "hilbert"], table[table.layout == "linear"]


def _counted_in(values: pd.Series) -> pd.DataFrame:
    # The kernel goes into `how`: a case that is modelled has none.
    cases = values.rename("value").reset_index()
    return counted(cases.assign(how="counted in " + cases.pop("kernel")))
