"""Cases from the records of times on one GPU: layouts, backends, graphs, pools.

Every function takes records and gives a table: value, low and high (its 95 % interval; equal where there is none), and
the columns that tell cases apart.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from hilbert_lib.lab.cache.l2 import GPUS
from hilbert_lib.lab.cache.neighbourhood import CURVES
from hilbert_lib.lab.cache.points import HALVED
from hilbert_lib.lab.guarded.cases import outcome_table
from hilbert_lib.lab.ledger import models
from hilbert_lib.lab.ledger.cases import INTERVAL, counted
from hilbert_lib.lab.ledger.documents import FUNCTIONS, LAYOUTS
from hilbert_lib.lab.records import MACHINES, REPORTS, committed_records, read_records
from hilbert_lib.lab.sweeps.counters import counter_table
from hilbert_lib.lab.sweeps.kernels import NO_TABLE
from hilbert_lib.lab.sweeps.memory import pair_table, pool_table
from hilbert_lib.lab.sweeps.points import AS_GIVEN, ORDER_SWEEP, POINT_SWEEP
from hilbert_lib.lab.tables import fused_name, ratio_table, side_table, sides_of

Records = list[dict]  # of a results.jsonl
WORKS = {"layouts": "whole sequence", "decoding": "decoding"}
POINTS = "bench_attention_xformers"
BUFFERS = ["strategy", "direction", "tokens"]
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


def layout_ratios(records: Records) -> pd.DataFrame:
    """Time of linear storage, read through a table, over that of every other `order`, and over that without a table."""
    # The documents' sizes hold rows of 64 elements in bfloat16, all heads of a token side by side.
    sizes = ratios(records, sweep="claims")
    sizes = sizes.assign(work="whole sequence", queries=0, row_bytes=2 * sizes.head_dim)
    # Their two kernels compute two functions.
    sizes["rival"] = sizes.rival.where(sizes.pair == LAYOUTS, FUNCTIONS)
    pairs = pd.concat([_layouts(records), sizes], ignore_index=True)
    return pairs[[*CASE, *INTERVAL, "rival"]].rename(columns={"rival": "order"})


def best_layouts(cases: pd.DataFrame) -> pd.DataFrame:
    """Of `layout_ratios`, the order with the largest ratio of each work."""
    orders = cases[~cases.order.isin([NO_TABLE, FUNCTIONS])]
    return orders.loc[orders.groupby(CASE).value.idxmax()]


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
    """Time of raster order over that of every other order of the tokens of a grid, by FlexAttention, forward."""
    where = f"base == 'raster' and direction == 'forward' and rival in {[*CURVES, 'random']}"
    table = ratios(records, sweep="neighbourhood", where=where)
    return table.assign(order=table.rival)[["order", "side", "window", "block_size", "head_dim", *INTERVAL]]


def boxes_over_blocks(records: Records) -> pd.DataFrame:
    """Time of FlexAttention in the fastest order of each work over that of boxes in rows, forward and backward."""
    cases = over_kernels(records).query("kernel == 'FlexAttention' and rival == 'boxes, raster'")
    return cases.drop(columns=["kernel", "rival"]).reset_index(drop=True)


def over_kernels(records: Records) -> pd.DataFrame:
    """Time of every kernel on grids in the fastest `order` of each work, over that of each `rival`.

    An order that was timed beside another order of its kernel alone stands beside the rival through that one.
    """
    table = ratios(records, sweep="neighbourhood")
    work = ["direction", "side", "window", "head_dim"]
    by_way_of = [table[[*work, "base", "rival", *INTERVAL]], _through_another_order(table, work)]
    table = pd.concat(by_way_of).drop_duplicates([*work, "base", "rival"]).sort_values("value", kind="stable")
    table = table.assign(kernel=table.base.map(_kernel_of), order=table.base.str.split(", ").str[-1])
    case = [*work, "kernel", "rival"]
    return table.drop_duplicates(case)[[*case, "order", *INTERVAL]].reset_index(drop=True)


def _through_another_order(table: pd.DataFrame, work: list[str]) -> pd.DataFrame:
    # Of a pair (raster, boxes) and a pair (raster, morton) of one kernel: that of morton and boxes.
    of_orders = table[table.base.map(_kernel_of) == table.rival.map(_kernel_of)]
    both = table.merge(of_orders, on=[*work, "base"], suffixes=("", "_order"))
    both = both[both.rival != both.rival_order].reset_index(drop=True)
    of_order = both[[f"{name}_order" for name in INTERVAL]].set_axis(INTERVAL, axis=1)
    names = both[[*work, "rival_order", "rival"]].rename(columns={"rival_order": "base"})
    return names.join(quotient(both[INTERVAL], of_order))


def _kernel_of(name: str) -> str:
    # A name without a kernel is an order of FlexAttention's.
    kernel, comma, _ = name.partition(", ")
    return kernel if comma else "FlexAttention"


def over_lists(records: Records, kernel: str) -> pd.DataFrame:
    """Time of a rival on points, in its fastest order and block, over that of lists, forward and backward.

    kernel: "blocks", "patches", "boxes" or "gather".
    """
    table = ratios(records, sweep=POINT_SWEEP, where=f"base.str.startswith('{kernel}')")
    case = ["direction", "cloud", "points", "window", "head_dim"]
    best = table.sort_values("value", kind="stable").drop_duplicates(case)
    return best[[*case, "base", *INTERVAL]].reset_index(drop=True)


def point_gains(records: Records) -> pd.DataFrame:
    """Time of lists whose work goes row by row over that of other orders of work, forward. Empty if none was timed.

    An interval is of the two pairs with the library's own order that a value comes from.
    """
    case = ["cloud", "points", "window", "head_dim"]
    columns = ["order", *case, *INTERVAL]
    if not any(sides_of(record)[0]["parameters"]["sweep"] == ORDER_SWEEP for record in records):
        return pd.DataFrame(columns=columns)
    table = ratios(records, sweep=ORDER_SWEEP, where="direction == 'forward'")
    names = table.base.str.removesuffix(AS_GIVEN)
    table = table.assign(order=names)[table.base.str.endswith(AS_GIVEN)]
    rows = table[table.order == "raster"]
    own = rows.assign(order=HALVED)
    others = table[table.order != "raster"].merge(rows[[*case, *INTERVAL]], on=case, suffixes=("_order", ""))
    both = others[[*INTERVAL, *(f"{name}_order" for name in INTERVAL)]]
    of_order = both.filter(like="_order").set_axis(INTERVAL, axis=1)
    others[INTERVAL] = quotient(both[INTERVAL], of_order)
    return pd.concat([own[columns], others[columns]], ignore_index=True)


def fused_speeds(records: Records, *, length: int) -> pd.DataFrame:
    """The fused kernel on the reference work, not causal, and `other`, the backend nearest to it."""
    work, case = f"pattern == 'reference' and not is_causal and length == {length}", ["direction", "head_dim"]
    speeds = side_table(records, "backends").query(work)[[*case, "name", "tflop_per_s", "error"]]
    fused = fused_name(speeds.name)
    pairs = ratios(records, sweep="backends", where=f"rival == '{fused}' and {work}").sort_values("value")
    nearest = pairs.drop_duplicates(case)[[*case, "base", *INTERVAL]].rename(columns={"base": "other"})
    fused_rows = speeds[speeds.name == fused].merge(nearest, on=case)
    return fused_rows.merge(speeds, left_on=[*case, "other"], right_on=[*case, "name"], suffixes=("", "_other"))


def nearest_backends(choices: Records, records: Records) -> pd.DataFrame:
    """Time of the nearest backend, `other`, over the fused kernel's, for each work of notebooks 05 and 06."""
    pairs = pd.concat([ratios(choices, sweep="selection"), ratios(records, sweep="backends")], ignore_index=True)
    fused = fused_name([*pairs.base, *pairs.rival])
    first = pairs[pairs.base == fused]  # where another backend was the choice, the fused kernel stands first
    turned = first.assign(base=first.rival, value=1 / first.value, low=1 / first.high, high=1 / first.low)
    pairs = pd.concat([pairs[pairs.rival == fused], turned], ignore_index=True)
    work = ["pattern", "length", "head_dim", "is_causal", "direction"]
    nearest = pairs.loc[pairs.groupby(work).value.idxmin(), ["base", *work, *INTERVAL]]
    return nearest.rename(columns={"base": "other"}).reset_index(drop=True)


def growth(records: Records) -> pd.DataFrame:
    """An order's ratio at a larger dilation over that at the smallest, and likewise by length.

    grows_with: "dilation" or "length", from `smallest` to `larger`; at: the other of the two. is_largest: whether
    `larger` is the last of its series.
    """
    # Not `layout_ratios`: at the documents' sizes the heads of a token lie side by side, which is another layout.
    table, cases = ratios(records, sweep="layouts").rename(columns={"rival": "order"}), []
    for along, fixed in (("dilation", "length"), ("length", "dilation")):
        about = ["order", "row_bytes", fixed]
        series = table.groupby(about)[along]
        table["smallest"], table["largest"] = series.transform("min"), series.transform("max")
        first = table[table[along] == table.smallest][[*about, *INTERVAL]]
        larger = table[table[along] > table.smallest].reset_index(drop=True)
        base = larger[about].merge(first, on=about, how="left")
        case = larger[about].rename(columns={fixed: "at"}).assign(grows_with=along)
        ends = {"smallest": larger.smallest, "larger": larger[along], "is_largest": larger[along] == larger.largest}
        cases.append(quotient(larger, base).assign(**case, **ends))
    return pd.concat(cases, ignore_index=True)


def longest(records: Records, *, asked: int) -> pd.DataFrame:
    """Tokens of the longest sequence of notebook 06 whose forward and backward were checked, over those asked for."""
    longest_length = ratios(records, sweep="backends").length.max()
    return counted(pd.DataFrame({"tokens": [asked], "value": [longest_length / asked]}))


def over_rival(records: Records, rival: str) -> pd.DataFrame:
    """Time of every `base` over that of a rival, both timed beside the first backend of their point."""
    table = outcome_table(records).dropna(subset=["ratio"]).rename(columns={"ratio": "value", "backend": "base"})
    case = ["length", "direction"]
    both = table.merge(table[table.base == rival], on=case, suffixes=("", "_rival"))
    of_rival = both[[f"{name}_rival" for name in INTERVAL]].set_axis(INTERVAL, axis=1)
    cases = both[[*case, "base"]].join(quotient(of_rival, both[INTERVAL]))
    return cases[cases.base != rival].reset_index(drop=True)


def over_xformers(records: Records) -> pd.DataFrame:
    """Time of other backends over xFormers': of torch's memory-efficient kernel in pairs, of others in points."""
    pairs = ratios(records, sweep="claims")
    pairs = pairs[pairs.rival == "xformers"][["base", "length", "direction", *INTERVAL]].assign(timed="in pairs")
    if "flash" in set(pairs.base):
        return pairs
    (run,) = REPORTS.glob(f"{MACHINES}/*/{POINTS}")
    others = over_rival(read_records(run / "points.jsonl"), "xformers").assign(timed="in points")
    return pd.concat([pairs, others], ignore_index=True)


def loop_over_call(records: Records) -> pd.DataFrame:
    """Time of a curve by a loop in Python, from its fastest sample to its slowest, over a GPU's median call."""
    calls = pair_table(committed_records("05_backend_selection"), "pattern cache")
    call_ms = calls[(calls.b == "call") & (calls.what == "Hilbert ordering")].set_index("length").b_ms
    cases = []
    for record in records:
        length = record["parameters"]["length"]
        value, low, high = np.quantile(record["samples_ms"] / call_ms[length], [0.5, 0, 1])
        cases.append({"length": length, "value": value, "low": low, "high": high})
    return pd.DataFrame(cases)


def over_fixed(records: Records, *, least: int) -> pd.DataFrame:
    """Time of each fixed backend over that of the automatic choice: the geometric mean of all works, least and most.

    is_long: of works of at least so many tokens, or of the shorter ones.
    """
    table = ratios(records, sweep="selection")
    gains = np.log(table.assign(is_long=table.length >= least).set_index(["base", "is_long"]).value)
    of_works = gains.groupby(["base", "is_long"])
    return np.exp(pd.DataFrame({"value": of_works.mean(), "low": of_works.min(), "high": of_works.max()})).reset_index()


def pools(records: Records) -> pd.DataFrame:
    """Time under torch's caching allocator over that of another way to hold buffers, and the memory of that way over
    its.

    tokens: of a call, 0 where calls have several lengths in turn.
    """
    table = _beside_caching(records)
    memory = counted(table[BUFFERS], table.reserved_bytes / table.reserved_bytes_caching)
    times = table.rename(columns={"ratio": "value"})
    cases = pd.concat([times.assign(what="time"), memory.assign(what="memory")], ignore_index=True)
    return cases[["what", *BUFFERS, *INTERVAL]]


def saved_by_cache(records: Records) -> pd.DataFrame:
    """The share of the time of a call, or of a look-up, that is saved where its tables are found and not built."""
    cases = ratios(records, sweep="pattern cache", columns=["what", "length", "rival"])
    return cases.assign(**{name: cases[name] / (1 + cases[name]) for name in INTERVAL})


def pool_fragmentation(records: Records) -> pd.DataFrame:
    """GiB reserved and not allocated under torch's caching allocator, less those under another way to hold buffers."""
    table = _beside_caching(records)
    return counted(table[BUFFERS], (table.fragmented_bytes_caching - table.fragmented_bytes) / 2**30)


def _beside_caching(records: Records) -> pd.DataFrame:
    # The ways to hold buffers, with columns _caching of torch's allocator.
    table = pool_table(records)
    is_mixed = table.lengths.str.contains(" ")
    table["tokens"] = table.lengths.where(~is_mixed, "0").astype(int)
    caching = table[table.strategy == "caching"]
    return table[table.strategy != "caching"].merge(caching, on=["tokens", "direction"], suffixes=("", "_caching"))


def saved_and_counted(records: Records, *, column: str, **model) -> pd.DataFrame:
    """The share that an order saves against linear storage: Hilbert's modelled, and every order's as a GPU counted."""
    orders, linear = _counters(records)
    saved = _counted_in(1 - orders[column] / linear[column]).assign(layout="bhsd")  # the layout of those sweeps
    modelled = models.units_saved(**model).assign(how="modelled", order="hilbert")
    return pd.concat([modelled, saved], ignore_index=True)


def gained_and_counted(records: Records, *, dilation: int) -> pd.DataFrame:
    """Points of hit rate that an order gains over linear: Hilbert's in a modelled cache, all orders' in a GPU's L2."""
    orders, linear = _counters(records)
    l2 = next(gpu for gpu in GPUS if gpu.name.startswith("H200"))  # an H100's is specified with as much
    gained = _counted_in(orders.l2_found_percent - linear.l2_found_percent).assign(cache_kib=l2.l2_bytes // 1024)
    modelled = models.hit_rate_gained(dilation=dilation).assign(how="modelled", dilation=dilation, order="hilbert")
    return pd.concat([modelled, gained], ignore_index=True)


def _counters(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    # Of the fused forward, decoding and a gather: every order, and beside each row linear storage of the same work.
    table = counter_table(records)
    if table.empty:
        raise ValueError("nothing was counted")
    work = ["kernel", "length", "row_bytes", "dilation"]
    linear = table[table.layout == "linear"].set_index(work)
    orders = table[table.layout != "linear"].rename(columns={"layout": "order"}).set_index([*work, "order"])
    of_works = orders.reset_index("order").index
    return orders, linear.reindex(of_works).set_index(orders.index)


def _counted_in(values: pd.Series) -> pd.DataFrame:
    # The kernel goes into `how`: a case that is modelled has none.
    cases = values.rename("value").reset_index()
    return counted(cases.assign(how="counted in " + cases.pop("kernel")))
