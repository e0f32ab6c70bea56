"""Cases that are computed anywhere: cache lines, hit rates, memory, dense kernels on reordered keys."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import pandas as pd
import torch

from hilbert_lib.lab.cache import sweeps
from hilbert_lib.lab.cache.cache import LAYOUTS, LINE_BYTES, Storage, branch_rows, row_units
from hilbert_lib.lab.cache.l2 import hit_rates
from hilbert_lib.lab.cache.neighbourhood import count_used
from hilbert_lib.lab.cache.points import WORK_ORDERS, count_lists, count_recall
from hilbert_lib.lab.ledger.cases import counted
from hilbert_lib.lab.pairs import relative_difference
from hilbert_lib.limits.estimate import estimate_memory
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

LENGTH, SEGMENT, HEADS = 4096, 1024, 8
DILATIONS, ROW_BYTES = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64, 128, 256)
ORDERS = ("linear", "hilbert")
POINTS = 4096  # of each made cloud
CACHE_KIB = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def units_saved(
    *, unit: str, counts: str = "touched", key_order: str = "storage", least_dilation: int = 1
) -> pd.DataFrame:
    """The share of units, touched or requested by a kernel's tiles, that the Hilbert curve saves against linear."""
    shown = sweeps.saving_against_linear(_counts(key_order, None), counts)
    shown = shown[(shown.unit == unit) & (shown.dilation >= least_dilation)]
    return counted(shown[["layout", "row_bytes", "dilation"]], shown.saving)


def boxes_over_orders() -> pd.DataFrame:
    """The share of computed pairs that attend, boxes over FlexAttention's blocks in the best order, of users' grids."""
    used = count_used().pivot(index=["side", "window"], columns="order", values="used")
    return counted((used.boxes / used.drop(columns="boxes").max(axis=1)).rename("value").reset_index())


def tiles_along_curves() -> pd.DataFrame:
    """The share of the tiles' pairs that attend, by an order of work along a curve over row by row, of made clouds."""
    case = ["cloud", "window"]
    used = _points_by_order().pivot(index=case, columns="order", values="used")
    gains = used.drop(columns="raster").div(used.raster, axis=0).stack().rename("value")
    return counted(gains.reset_index())


def lost_by_patches() -> pd.DataFrame:
    """The share of the neighbours that patches of the Hilbert curve lose, of the same clouds and windows."""
    recall = count_recall(POINTS, orders=["hilbert"])
    return counted(recall[["cloud", "window"]], 1 - recall.recall)


@cache
def _points_by_order() -> pd.DataFrame:
    return count_lists(POINTS, orders=[name for name in WORK_ORDERS if name != "random"])


def hit_rate_gained(*, dilation: int) -> pd.DataFrame:
    """Percentage points of hit rate that the Hilbert order gains over linear, in an exact LRU cache of each size."""
    rates = _hit_rates(dilation).pivot(index=["row_bytes", "capacity_bytes"], columns="ordering", values="hit_rate")
    gain = (100 * (rates.hilbert - rates.linear)).rename("value").reset_index()
    return counted(gain.assign(cache_kib=gain.pop("capacity_bytes") // 1024))


@cache
def _hit_rates(dilation: int) -> pd.DataFrame:
    capacities = [1024 * kib for kib in CACHE_KIB]
    pattern = DilatedPattern((LENGTH,), (dilation,))
    return hit_rates(pattern, length=LENGTH, row_bytes=ROW_BYTES, capacities=capacities, names=ORDERS)


def saved_by_restarting() -> pd.DataFrame:
    """The share of lines that a Hilbert curve which restarts in every segment saves against one over the sequence."""
    case = ["layout", "row_bytes", "dilation"]
    once, restarted = (
        counts[(counts.ordering == "hilbert") & (counts.unit == "line")].set_index(case).touched
        for counts in (_counts("storage", None), _counts("storage", SEGMENT))
    )
    return counted((1 - restarted / once).rename("value").reset_index())


def stride_regularity() -> pd.DataFrame:
    """The share of the commonest distance from a row to the next, Hilbert over linear, keys read in sequence order."""
    cases = []
    for rate in DILATIONS:
        pattern, shares = DilatedPattern((SEGMENT,), (rate,)), {}
        for kind in ORDERS:
            storage = Storage(Ordering(kind, LENGTH), LINE_BYTES)
            rows = branch_rows(storage, pattern, key_order="position")
            steps = storage.addresses(rows.positions, head=0).diff().unique(return_counts=True)[1]
            shares[kind] = float(steps.max() / steps.sum())
        cases.append({"dilation": rate, "value": shares["hilbert"] / shares["linear"]})
    return counted(cases)


def lines_shared_by_branches() -> pd.DataFrame:
    """The share of head 0's lines that head 1 touches too, through another branch; Hilbert less linear storage.

    Of heads that fill no whole line: else a line holds one token in any order, and no order moves a share.
    """
    cases = []
    for layout, (heads, size) in product(LAYOUTS, ((2, 16), (2, 32), (4, 16))):
        shares = {kind: _shared(Storage(Ordering(kind, LENGTH), size, heads, layout)) for kind in ORDERS}
        case = {"layout": layout, "heads": heads, "row_bytes": size, **shares}
        cases.append({**case, "value": shares["hilbert"] - shares["linear"]})
    return counted(cases)


def plain_kernel_on_reordered_keys() -> pd.DataFrame:
    """Error of a dense kernel's output where k and v are reordered along the Hilbert curve and it is not told."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 32, generator=generator, dtype=torch.float64) for _ in range(3))
    order, attend = Ordering.from_curve("hilbert", 256), torch.nn.functional.scaled_dot_product_attention
    cases = []
    for is_causal in (False, True):
        moved, exact = (
            attend(q, *both, is_causal=is_causal) for both in ((order.apply(k, 2), order.apply(v, 2)), (k, v))
        )
        cases.append({"is_causal": is_causal, "value": relative_difference([moved], [exact])})
    return counted(cases)


def memory_of_segments(*, length: int, segment_length: int, backends: Sequence[str]) -> pd.DataFrame:
    """GiB at the peak of a forward in float32, inputs included; and one segment's peak over that of many."""
    how = {"length": length, "heads": 8, "head_dim": 64, "dtype": torch.float32, "device": "cpu"}
    cases = []
    for backend in backends:
        one, many = (
            estimate_memory(DilatedPattern((w,), (1,)), backend=backend, **how) for w in (length, segment_length)
        )
        cases.append({"what": "GiB", "backend": backend, "value": many.total_gb})
        cases.append({"what": "one segment over many", "backend": backend, "value": one.peak / many.peak})
    return counted(cases)


@cache
def _counts(key_order: str, chunk: int | None) -> pd.DataFrame:
    sizes = {"length": LENGTH, "segment_length": SEGMENT, "heads": HEADS}
    cases = {"dilation_rates": DILATIONS, "row_bytes": ROW_BYTES}
    return sweeps.count_units(**sizes, **cases, key_order=key_order, chunk=chunk, names=ORDERS)


def _shared(storage: Storage) -> float:
    pattern = DilatedPattern((SEGMENT, 2 * SEGMENT), (2, 4), offsets="zero")
    touched = []
    for head in (0, 1):
        rows = branch_rows(storage, pattern, branch=head)
        touched.append(row_units(storage.addresses(rows.positions, head), storage.row_bytes, LINE_BYTES)[0].unique())
    return torch.isin(touched[0], touched[1]).double().mean().item()
