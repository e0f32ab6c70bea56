"""Publications about orders and windows: what each claims, what both sides compute, and the cases of the records."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from hilbert_lib.lab.ledger.cases import INTERVAL
from hilbert_lib.lab.ledger.kernels import ratios
from hilbert_lib.lab.sweeps.in_print import CONVOLUTIONS, EAGER, FLEX, PRINTED, sweep_of_claim
from hilbert_lib.lab.sweeps.points import POINT_SWEEP
from hilbert_lib.lab.tables import of_sweep, sides_of
from hilbert_lib.lab.timing import SEED, interval_of, resampled_medians

PEAK = 989e12  # FLOP/s of an H100 or H200 SXM in half precision with dense operands, as NVIDIA's data sheets give it
UNFUSED = (EAGER, CONVOLUTIONS)
REORDERED = ", reordered"  # ends the name of a side that makes its layout in the call


@dataclass(frozen=True)
class Publication:
    """A published claim about a layout.

    claims: what it says, and where. sides: what both sides of its comparison compute. rebuilt: what is measured here,
    and what is not. cause: why the sides differ.
    """

    id: str
    source: str
    claims: str
    sides: str
    rebuilt: str
    cause: str


PUBLICATIONS = (
    Publication(
        "P1",
        "Hilbert-guided local attention, arXiv 2511.05832, ICLR 2026",
        "window attention about 4 times, slide attention about 18 times as fast in FlexAttention with tokens along the "
        "Hilbert curve (abstract)",
        "as its notebook is committed (attn_reshape.ipynb at a1d8b7f), others: eager windows of 256 keys on 128 x 128 "
        "beside compiled chunks of 64 keys on 64 x 64; shifted copies by convolutions for 49 keys on 56 x 56 beside "
        "121 compiled places on 96 x 96. Its cells with FlexAttention on rows have other sizes again. The sizes of the "
        "paper's tables were not found",
        "the notebook's comparison, and one function at its sizes",
        "other sizes, and an unfused side beside a fused one. On sides of 2^k chunks are the squares themselves: there "
        "both compute one function, and the curve does leave FlexAttention an eighth of the blocks of rows",
    ),
    Publication(
        "P2",
        "HilbertA, arXiv 2509.26538",
        "attention of FLUX.1 2.3 times as fast for pictures of 1024 x 1024, 4.17 times at 2048 x 2048 (abstract)",
        "others: dense attention over all tokens beside tiles along the curve with text and centre (sizes of its "
        "repository: 64 x 64 and 128 x 128 tokens, 512 of text, 4 or 16 tiles, 24 heads of 128)",
        "its function, by FlexAttention and by batches; its Triton kernel and its pictures are not",
        "fewer pairs: with 16 tiles they promise 2.87 and 4.44 times, in any order that keeps a tile together",
    ),
    Publication(
        "P3",
        "Point Transformer V3, arXiv 2312.10035; GAPS, Mech. Sci. 17, 221",
        "dense patches of 1,024 points along a curve replace the search for neighbours: 3.3 times as fast as the "
        "model before it (figure 1)",
        "others: a patch holds its points, near or far, and not the neighbours behind its edge",
        "patches beside lists of every neighbour, by notebook 13. Whole models are not, and nothing of GAPS was found",
        "patches need no lists, and multiply 1,024 pairs for a point whose window holds some tens",
    ),
    Publication(
        "P4",
        "Log-linear sparse attention, arXiv 2512.16615",
        "attention 28.27 times as fast on 256 x 256 tokens, which lie in 2-D Morton order (abstract; its README on the "
        "order)",
        "others: dense attention beside 8 chosen blocks of 16 tokens and means of coarser ones",
        "the order alone: exact windows in FlexAttention, row by row beside Morton. The 28.27 times are not: chosen "
        "blocks are as many in every order",
        "fewer pairs. The order decides which tokens share a block, and the blocks that a window touches",
    ),
    Publication(
        "P5",
        "Sliding tile attention, arXiv 2502.04507; Sol-Attn, arXiv 2607.24027",
        "windows that slide by tiles reach 58.79 % of the GPU's peak, 1.6 to 10 times the speed of FlashAttention-3; "
        "windows that slide by cells are slow (abstract)",
        "nearly one: a window around a tile keeps 87 % of the pairs around each cell",
        "its windows, by this library and by FlexAttention with tokens stored in tiles. Its kernel is not, and "
        "Sol-Attn's choice of blocks by their means is not",
        "blocks that hold only pairs that attend need no mask; which kernel reads them decides the rest",
    ),
    Publication(
        "P6",
        "Generalized neighbourhood attention (NATTEN), arXiv 2504.16922, and its profiler's pages",
        "windows of 80 x 80 with a stride of 16 x 16 on 256 x 256 tokens take 7.914 ms on an H100, 10.601 with "
        "permutes of the tokens: 651 and 486 useful TFLOP/s; without stride 16.201 and 18.603 ms",
        "nearly one: windows with the stride keep 93 % of the pairs around each cell",
        "both by this library, which reads plain rows, in one run; NATTEN only where it is installed",
        "a stride of a tile leaves no block that is used in part",
    ),
)


def publication_table(publications: Sequence[Publication] = PUBLICATIONS) -> pd.DataFrame:
    """Publications as a table: the claims, what both sides compute, what is measured here, and why the sides differ."""
    names = {"id": "", "source": "publication", "claims": "claims", "sides": "one function on both sides?"}
    names |= {"rebuilt": "measured here", "cause": "why the sides differ"}
    return pd.DataFrame([vars(each) for each in publications]).rename(columns=names)


def timed_pairs(records: list[dict], *claims: str) -> pd.DataFrame:
    """The timed pairs of some claims: claim, the names a and b, the parameters of a (of b where a has none), value
    (a's time over b's) with its interval, and the medians ms_a and ms_b. Claims without a record have no row.
    """
    rows = []
    sweeps = {sides_of(record)[0]["parameters"]["sweep"] for record in records}
    for claim in (claim for claim in claims if sweep_of_claim(claim) in sweeps):
        for record in of_sweep(records, sweep_of_claim(claim)):
            if "ratio" not in record:
                continue
            a, b = record["a"], record["b"]
            low, high = record["interval"]
            about = {**b["parameters"], **{name: value for name, value in a["parameters"].items() if value != ""}}
            row = {"a": a["name"], "b": b["name"], **about, "kind": a["parameters"].get("kind", "")}
            row |= {"ms_a": np.median(a["samples_ms"]), "ms_b": np.median(b["samples_ms"])}
            rows.append(row | {"value": record["ratio"], "low": low, "high": high})
    if not rows:
        return pd.DataFrame(columns=["claim", "a", "b", "kind", *INTERVAL])
    table = pd.DataFrame(rows)
    return table.assign(reordered=table.a.str.endswith(REORDERED))


def curve_windows(records: list[dict]) -> pd.DataFrame:
    """P1: the time of each other way over that of FlexAttention along the curve, as printed and in one function.

    unfused: whether the other way runs in eager steps or by convolutions. reordered: whether it makes its layout.
    """
    table = timed_pairs(records, "P1")
    if table.empty:
        return table
    table = table.assign(unfused=table.a.isin(UNFUSED), printed=table.kind == PRINTED)
    return table[["attention", "grid", "window", "a", "printed", "unfused", "reordered", *INTERVAL]]


def curve_tiles(records: list[dict]) -> pd.DataFrame:
    """P2: the time of dense attention, and of windows of as many pairs, over that of tiles in their faster way.

    beside: DENSE, WINDOWS, or tiles that make their layout. side: cells along a side of the picture.
    """
    table = timed_pairs(records, "P2")
    if table.empty:
        return table
    table = table.sort_values("value", ascending=False, kind="stable").drop_duplicates(["a", "grid", "tiles"])
    side = table.grid.str.split("x").str[0].astype(int)
    cases = table.sort_index().assign(beside=table.a, side=side)
    return cases[["grid", "tiles", "side", "beside", "b", "reordered", *INTERVAL]]


def patches_over_lists(records: list[dict]) -> pd.DataFrame:
    """P3: the time of lists of every neighbour over that of each other kernel on points, from notebook 13."""
    table = ratios(records, sweep=POINT_SWEEP)
    turned = 1 / table[["value", "high", "low"]]
    cases = table.assign(**dict(zip(INTERVAL, turned.to_numpy().T, strict=True)))
    return cases[["base", "direction", "cloud", "points", "window", "head_dim", *INTERVAL]]


def orders_beside_morton(records: list[dict]) -> pd.DataFrame:
    """P4: the time of cells in each other order, and of this library, over that of cells in Morton order."""
    table = timed_pairs(records, "P4")
    if table.empty:
        return table
    return table.assign(beside=table.a.str.removeprefix(f"{FLEX}, "))[["beside", "grid", "window", *INTERVAL]]


def strided_rates(records: list[dict], claim: str) -> pd.DataFrame:
    """P5, P6: useful TFLOP/s of each way: way, grid, window, stride, and moves, by cells or by tiles.

    Dense attention has no window: moves is "nowhere".
    """
    found: dict[tuple, dict] = {}
    timed = [record for record in records if sides_of(record)[0]["parameters"]["sweep"] == sweep_of_claim(claim)]
    for record in of_sweep(timed, sweep_of_claim(claim)) if timed else ():
        for side in (record["a"], record["b"]):
            if "samples_ms" in side:
                case = tuple(side["parameters"][name] for name in ("way", "grid", "window", "stride"))
                row = found.setdefault(case, {"flop": side["useful_flop"], "samples": []})
                row["samples"] += side["samples_ms"]
    cases = []
    for (way, grid, window, stride), row in found.items():
        rng = np.random.default_rng(SEED)
        low, high = interval_of(row["flop"] / resampled_medians(row["samples"], rng) / 1e9)
        value = row["flop"] / float(np.median(row["samples"])) / 1e9
        about = {"way": way, "grid": grid, "window": window, "stride": stride}
        about["moves"] = {"": "nowhere", "1": "by cells"}.get(stride, "by tiles")
        cases.append({**about, "value": value, "low": low, "high": high})
    return pd.DataFrame(cases, columns=["way", "grid", "window", "stride", "moves", *INTERVAL])


def shares_of_peak(records: list[dict]) -> pd.DataFrame:
    """P5: the rates as shares of the GPU's peak."""
    table = strided_rates(records, "P5")
    return table.assign(**{name: table[name] * 1e12 / PEAK for name in INTERVAL})


def rates_of_strides(records: list[dict]) -> pd.DataFrame:
    """P6: the rates."""
    return strided_rates(records, "P6")
