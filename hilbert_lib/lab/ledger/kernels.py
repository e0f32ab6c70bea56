"""Cases from the records of times on one GPU: layouts, backends, graphs, pools.

Every function takes records and gives a table: value, low and high (its 95 % interval; equal where there is none), and
the columns that distinguish a case.
"""

from collections.abc import Sequence

import pandas as pd

from hilbert_lib.attention.backends import registry as backends
from hilbert_lib.lab.cache.l2 import GPUS
from hilbert_lib.lab.guarded.cases import outcome_table
from hilbert_lib.lab.ledger import models
from hilbert_lib.lab.ledger.claim import counted
from hilbert_lib.lab.ledger.claims import BACKENDS, DENSE, FUNCTIONS, LAYOUTS
from hilbert_lib.lab.sweeps.graphs import pair_table
from hilbert_lib.lab.sweeps.kernels import NO_TABLE
from hilbert_lib.lab.sweeps.memory import pool_table
from hilbert_lib.lab.tables import ratio_table, side_table

Records = list[dict]  # of a results.jsonl
INTERVAL = ["value", "low", "high"]
WORKS = {"layouts": "whole sequence", "decoding": "decoding"}
CASE = ["work", "length", "queries", "row_bytes", "dilation"]


def layout_ratios(records: Records, *, order: str = "hilbert", where: str = "") -> pd.DataFrame:
    """Time of linear storage over that of an order, the same kernel and function.

    Args:
        records: of notebook 06.
        order: kind of the order, or "best" for the fastest of all but "no table", work by work.
        where: a query over the cases.

    Returns:
        work ("whole sequence" or "decoding"), length, queries, row_bytes, dilation and the interval; of "best" also
        order.
    """
    ratios = pd.concat([_layouts(records), _documents_sizes(records)], ignore_index=True)
    if order == "best":
        ratios = ratios[ratios.b != NO_TABLE]
        cases = ratios.loc[ratios.groupby(CASE).value.idxmax(), [*CASE, *INTERVAL, "b"]].rename(columns={"b": "order"})
    else:
        cases = ratios.loc[ratios.b == order, [*CASE, *INTERVAL]]
    return (cases.query(where) if where else cases).reset_index(drop=True)


def over_sequence(records: Records, *, where: str = "") -> pd.DataFrame:
    """Time from storage in sequence order, read as it is, over that from every order, read through a table.

    Both were timed beside linear storage read through a table, so that the interval is that of a quotient of quotients.

    Args:
        records: of notebook 06.
        where: a query over the cases.

    Returns:
        work, length, queries, row_bytes, dilation, order and the interval.
    """
    ratios = _layouts(records)
    plain = ratios[ratios.b == NO_TABLE].set_index(CASE)[INTERVAL]
    orders = ratios[ratios.b != NO_TABLE].rename(columns={"b": "order"})
    both = orders.join(plain.add_suffix("_plain"), on=CASE, how="inner")
    values = {
        "value": both.value / both.value_plain,
        "low": both.low / both.high_plain,
        "high": both.high / both.low_plain,
    }
    cases = both[[*CASE, "order"]].assign(**values)
    return (cases.query(where) if where else cases).reset_index(drop=True)


def places(records: Records) -> pd.DataFrame:
    """Where an order could pay and where one did: every timed work with its intensity, and its fastest order.

    Args:
        records: of notebook 06.

    Returns:
        `layout_ratios` of the "best" order; intensity, useful FLOP for each useful byte; and over_plain and
        over_plain_low, what that order gains over linear storage that is read without a table.
    """
    sides = pd.concat([side_table(records, sweep).assign(work=work) for sweep, work in WORKS.items()])
    linear = sides[sides.name == "linear"].set_index(CASE)
    intensity = (linear.useful_flop / linear.useful_bytes).rename("intensity")
    plain = over_sequence(records).set_index([*CASE, "order"])[["value", "low"]]
    plain = plain.set_axis(["over_plain", "over_plain_low"], axis=1)
    best = layout_ratios(records, order="best").join(intensity, on=CASE, how="inner")
    return best.join(plain, on=[*CASE, "order"])


def grid_places(records: Records) -> pd.DataFrame:
    """As `places`, for attention to a window on a grid: the fastest order of the tokens against raster order, forward.

    Args:
        records: of notebook 08; where there are none, the table is empty.
    """
    if not records:
        return pd.DataFrame()
    gains = grid_gains(records)
    best = gains.loc[gains.groupby(["side", "window", "block_size"]).value.idxmax()]
    # q, k, v and the output once, two bytes an element; two products of window**2 keys for each row of q.
    where = {"work": "window on a grid", "queries": 0, "dilation": 1, "intensity": best.window**2 / 2}
    where |= {"over_plain": best.value, "over_plain_low": best.low}  # raster order has no table
    table = best.assign(length=best.side**2, row_bytes=2 * best.head_dim, **where)
    return table[[*CASE, *INTERVAL, "order", "intensity", "over_plain", "over_plain_low"]]


def grid_gains(records: Records) -> pd.DataFrame:
    """Time of raster order over that of every other order of the tokens of a grid, forward.

    Args:
        records: of notebook 08.

    Returns:
        order, side, window, block_size, head_dim and the interval.
    """
    ratios = _ratios(records, "neighbourhood").query("a == 'raster' and direction == 'forward'")
    columns = ["order", "side", "window", "block_size", "head_dim", *INTERVAL]
    return ratios.rename(columns={"b": "order"})[columns]


def fused_speeds(records: Records, *, longest: bool = False) -> pd.DataFrame:
    """Speed of the fused kernel and of the fastest other backend on the reference work, not causal.

    Args:
        records: of notebook 06.
        longest: whether at the greatest length, rather than where most works of any pattern were timed.

    Returns:
        length, heads, branches, direction, head_dim, tflop_per_s, error (relative,
        against float64), other (its name), other_tflop_per_s, times_as_fast (the least paired ratio to any other) with
        its interval low to high, and others (the names of all that were timed), the largest head first.
    """
    reference = "pattern == 'reference' and not is_causal"
    every = side_table(records, "backends")
    sides = every.query(reference)
    lengths = every.length[every.length.isin(sides.length)]
    length = lengths.max() if longest else lengths.mode().max()
    sides = sides[sides.length == length].sort_values("tflop_per_s")
    case = ["direction", "head_dim"]
    pairs = ratio_table(records, "backends").query(reference)
    least = pairs[pairs.length == length].sort_values("ratio").drop_duplicates(case).set_index(case)
    least = least[["ratio", "low", "high"]].rename(columns={"ratio": "times_as_fast"})
    others = sides[sides.name != "triton"]
    names = ", ".join(sorted(others.name.unique()))
    others = others.drop_duplicates(case, keep="last").set_index(case)[["name", "tflop_per_s"]]
    others = others.set_axis(["other", "other_tflop_per_s"], axis=1).join(least).assign(others=names)
    fused = sides[sides.name == "triton"].join(others, on=case).sort_values(case, ascending=False)
    return fused[["length", "heads", "branches", *case, "tflop_per_s", "error", *others.columns]].reset_index(drop=True)


def behind_packages(choices: Records, records: Records) -> pd.DataFrame:
    """Works in which a backend of another package is faster than the fused kernel, by the device's time.

    Args:
        choices: of notebook 05.
        records: of notebook 06; none leaves them out.

    Returns:
        other (its name), pattern, branches, length, head_dim, is_causal, direction and ratio (the fused kernel's time
        over its own), the largest ratio first; empty where there is none.
    """
    held = ((choices, "selection"), (records, "backends"))
    pairs = pd.concat([ratio_table(each, sweep) for each, sweep in held if each])
    first, second = pairs[pairs.b == "triton"], pairs[pairs.a == "triton"]
    both = pd.concat([first.assign(other=first.a, ratio=1 / first.ratio), second.assign(other=second.b)])
    packages = [name for name, backend in backends.BACKENDS.items() if backend.package]
    both = both[both.other.isin(packages) & (both.ratio > 1)]
    work = ["pattern", "branches", "length", "head_dim", "is_causal", "direction"]
    return both.sort_values("ratio", ascending=False)[["other", *work, "ratio"]].reset_index(drop=True)


def claimed_pairs(records: Records, *, where: str) -> pd.DataFrame:
    """The documents' two kernels, and one function on two layouts, at the documents' sizes.

    Args:
        records: of notebook 06, with its `claims`.
        where: a query over pair, length and dilation.
    """
    cases = _ratios(records, "claims")
    return cases[cases.pair.isin([FUNCTIONS, LAYOUTS])].query(where)[["pair", "length", "dilation", *INTERVAL]]


def growth(records: Records) -> pd.DataFrame:
    """How the Hilbert order's ratio changes from the smallest to the largest dilation, and from the shortest
    length to the longest.

    The interval is that of two independent ratios: the widest that theirs allow.

    Args:
        records: of notebook 06.

    Returns:
        grows_with ("dilation" or "length"), row_bytes, at (the other of the two) and the interval.
    """
    # Not `layout_ratios`: at the documents' sizes the heads of a token lie side by side, which is another layout.
    ratios = _ratios(records, "layouts").query("b == 'hilbert'")[["length", "row_bytes", "dilation", *INTERVAL]]
    tables = []
    for along, other in (("dilation", "length"), ("length", "dilation")):
        for (size, fixed), series in ratios.groupby(["row_bytes", other]):
            first, last = series.loc[series[along].idxmin()], series.loc[series[along].idxmax()]
            if first[along] == last[along]:
                continue
            case = {"grows_with": along, "row_bytes": size, "at": fixed}
            interval = (last.value / first.value, last.low / first.high, last.high / first.low)
            tables.append(case | dict(zip(INTERVAL, interval, strict=True)))
    return pd.DataFrame(tables)


def longest(records: Records, *, asked: Sequence[int]) -> pd.DataFrame:
    """Tokens of the longest sequence whose forward and backward were timed and checked, over those asked for.

    Args:
        records: of notebook 06.
        asked: tokens.
    """
    found = _ratios(records, "backends").length.max()
    return pd.DataFrame({"tokens": n, **dict.fromkeys(INTERVAL, found / n)} for n in asked)


def over_dense(records: Records) -> pd.DataFrame:
    """Time of dense attention over that of dilated attention at the same length: two functions, as is claimed."""
    cases = _ratios(records, "claims")
    return cases.loc[cases.pair == DENSE, ["length", "head_dim", "direction", *INTERVAL]]


def over_manual(records: Records, *, backend: str) -> pd.DataFrame:
    """Time of plain matrix products over that of a dense kernel.

    Both were timed beside the first backend of their point; the interval is the widest that the two ratios allow.

    Args:
        records: lines of the points of notebook 04.
        backend: of the dense kernel.
    """
    case = ["length", "direction"]
    table = outcome_table(records).dropna(subset=["ratio"])
    sides = {name: table[table.backend == name].set_index(case) for name in (backend, "eager")}
    both = sides[backend].join(sides["eager"].add_suffix("_manual"), how="inner")
    values = {
        "value": both.ratio / both.ratio_manual,
        "low": both.low / both.high_manual,
        "high": both.high / both.low_manual,
    }
    return pd.DataFrame(values).reset_index()


def over_fixed(records: Records, *, least_length: int) -> pd.DataFrame:
    """Time of each backend over that of the automatic choice, on every work that it serves.

    Args:
        records: of notebook 05.
        least_length: of the works. In those of fewer tokens a user waits for the host's launches, not the GPU.
    """
    ratios = _ratios(records, "selection").rename(columns={"a": "backend"})
    ratios = ratios[ratios.length >= least_length]
    return ratios[["backend", "pattern", "length", "head_dim", "is_causal", "direction", *INTERVAL]]


def base_over_backend(records: Records) -> pd.DataFrame:
    """Time of a base over that of the backend that is claimed to be faster, on the reference work."""
    cases = _ratios(records, "claims")
    return cases.loc[cases.pair == BACKENDS, ["length", "head_dim", "direction", *INTERVAL]]


def graph_gains(records: Records) -> pd.DataFrame:
    """Time of a call over that of its CUDA graph's replay, from an idle device to the result."""
    return _intervals(pair_table(records, "graphs"))[["module", "direction", "length", *INTERVAL]]


def built_over(records: Records, *, opponent: str, what: str = "") -> pd.DataFrame:
    """Time to build what is kept of a pattern or an ordering, over that of a look-up or of a whole call.

    Args:
        records: of notebook 05.
        opponent: "look-up" or "call".
        what: which table; by default all.
    """
    table = _intervals(pair_table(records, "pattern cache"))
    cases = table[(table.b == opponent) & (table.what.eq(what) if what else True)]
    return cases[["what", "length", *INTERVAL]]


def saved_by_cache(records: Records) -> pd.DataFrame:
    """The share of a call's time that is saved where its tables are found and not built."""
    cases = built_over(records, opponent="call")
    return cases.assign(**{name: cases[name] / (1 + cases[name]) for name in INTERVAL})


def pool_gains(records: Records) -> pd.DataFrame:
    """Time with torch's caching allocator over that with buffers held another way, on calls of one length."""
    pools = pool_table(records, "pools").query("strategy != 'caching'")
    pools = pools[~pools.lengths.str.contains(" ")]
    return _intervals(pools.assign(tokens=pools.lengths.astype(int)))[["strategy", "direction", "tokens", *INTERVAL]]


def pool_fragmentation(records: Records) -> pd.DataFrame:
    """GiB reserved and not allocated under torch's caching allocator, less those under another way to hold buffers."""
    pools = pool_table(records, "pools")
    mixed = pools[pools.lengths.str.contains(" ")]
    base = mixed[mixed.strategy == "caching"].set_index("direction").fragmented_bytes
    others = mixed[mixed.strategy != "caching"]
    spared = (others.direction.map(base) - others.fragmented_bytes) / 2**30
    return others[["strategy", "direction"]].assign(value=spared, low=spared, high=spared)


def saved_and_counted(records: Records, *, column: str, **model) -> pd.DataFrame:
    """The share that the Hilbert order saves against linear storage: modelled, and as an H200 counted it.

    Args:
        records: rows of notebook 06's counters.csv.
        column: of the counters.
        **model: as `models.units_saved`.
    """
    hilbert, linear = _counters(records)
    saved = _counted_in(1 - hilbert[column] / linear[column])
    counted_cases = counted(saved.assign(layout="bhsd"))  # the layout of those sweeps
    return pd.concat([models.units_saved(**model).assign(how="modelled"), counted_cases], ignore_index=True)


def gained_and_counted(records: Records, *, dilation: int) -> pd.DataFrame:
    """Points of hit rate that the Hilbert order gains over linear: in a modelled cache, and in an H200's L2.

    Args:
        records: rows of notebook 06's counters.csv.
        dilation: as `models.hit_rate_gained`.
    """
    hilbert, linear = _counters(records)
    gain = _counted_in(hilbert.l2_found_percent - linear.l2_found_percent)
    l2 = next(gpu for gpu in GPUS if gpu.name.startswith("H200"))
    counted_cases = counted(gain.assign(cache_kib=l2.l2_bytes // 1024))
    modelled = models.hit_rate_gained(dilation=dilation).assign(how="modelled", dilation=dilation)
    return pd.concat([modelled, counted_cases], ignore_index=True)


def _counters(records: Records) -> tuple[pd.DataFrame, pd.DataFrame]:
    # Of attention, which the claims are about: the fused forward, and decoding. A gather is none.
    table = pd.DataFrame([record for record in records if record["kernel"] != "gather"])
    table = table.set_index(["kernel", "length", "row_bytes", "dilation"])
    return table[table.layout == "hilbert"], table[table.layout == "linear"]


def _counted_in(values: pd.Series) -> pd.DataFrame:
    # The kernel goes into `how`: a case that is modelled has none.
    cases = values.rename("value").reset_index()
    return cases.assign(how="counted in " + cases.pop("kernel"))


def _ratios(records: Records, sweep: str) -> pd.DataFrame:
    return _intervals(ratio_table(records, sweep))


def _intervals(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={"ratio": "value"})


def _layouts(records: Records) -> pd.DataFrame:
    tables = [_ratios(records, sweep).assign(work=work) for sweep, work in WORKS.items()]
    return pd.concat([table for table in tables if not table.empty], ignore_index=True)


def _documents_sizes(records: Records) -> pd.DataFrame:
    # The documents' sizes in sequence-first layout: rows of 64 elements in bfloat16, all heads of a token side by side.
    sizes = _ratios(records, "claims")
    sizes = sizes[sizes.pair == LAYOUTS]
    return sizes.assign(work="whole sequence", queries=0, row_bytes=2 * sizes.head_dim)
