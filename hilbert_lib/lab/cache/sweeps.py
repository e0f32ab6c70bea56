"""Tables over row sizes, dilations, layouts and orderings: what the cache model says of each."""

from collections.abc import Sequence
from itertools import product

import pandas as pd

from hilbert_lib.lab.cache import cache
from hilbert_lib.lab.cache.cache import Storage, branch_rows, tile_requests
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

UNITS = {"sector": cache.SECTOR_BYTES, "fetch": cache.FETCH_BYTES, "line": cache.LINE_BYTES, "page": 4096}  # bytes


def compared_orderings(
    length: int, rate: int, *, chunk: int | None = None, segment: int | None = None
) -> dict[str, Ordering]:
    """Every ordering that is compared; residue-major for the given rate; it and curves restart every `chunk`.

    A segment shorter than length gets a Hilbert curve of its own.

    >>> list(compared_orderings(16, rate=2, segment=8))
    ['linear', 'residue', 'tile', 'snake', 'morton', 'hilbert', 'hilbert per segment', 'random']
    """
    curves = {kind: Ordering.from_curve(kind, length, chunk=chunk) for kind in ("tile", "snake", "morton", "hilbert")}
    if segment is not None and segment < length:
        curves["hilbert per segment"] = Ordering.from_curve("hilbert", length, chunk=segment)
    return {
        "linear": Ordering.linear(length),
        "residue": Ordering.residue(length, rate, chunk=chunk),
        **curves,
        "random": Ordering.random(length, 0),
    }


def count_units(
    *,
    length: int,
    segment_length: int,
    dilation_rates: Sequence[int],
    row_bytes: Sequence[int],
    heads: int = 8,
    tile_keys: int = 64,
    key_order: str = "storage",
    residue_rate: int | None = None,
    chunk: int | None = None,
    names: Sequence[str] = (),
) -> pd.DataFrame:
    """Sectors, fetches, lines and pages that head 0 touches in k, for every ordering, layout, row size and dilation.

    residue_rate: the rate of one residue-major order for all dilations; by default each has its own, its best case.
    names: of the orderings; by default all are counted. Counts: rows, fewest (units that they would fill if packed),
    touched (different units), requested (summed over tiles).
    """
    cases = []
    for rate in dilation_rates:
        pattern = DilatedPattern((segment_length,), (rate,))
        orderings = compared_orderings(length, rate if residue_rate is None else residue_rate, chunk=chunk)
        for name, ordering in ((name, orderings[name]) for name in names or orderings):
            # Which rows, and by which tile, is the same in every layout.
            stored = Storage(ordering, row_bytes[0], heads)
            rows = branch_rows(stored, pattern, tile_keys=tile_keys, key_order=key_order)
            tiles = rows.segments * -(-segment_length // tile_keys) + rows.tiles
            for layout, size in product(cache.LAYOUTS, row_bytes):
                addresses = Storage(ordering, size, heads, layout).addresses(rows.positions, head=0)
                case = {"layout": layout, "row_bytes": size, "dilation": rate, "ordering": name}
                for unit, unit_bytes in UNITS.items():
                    _, requested = tile_requests(addresses, tiles, size, unit_bytes)
                    counts = {"rows": len(addresses), "fewest": -(-len(addresses) * size // unit_bytes)}
                    counts |= {"touched": requested.unique().numel(), "requested": requested.numel()}
                    cases.append({**case, "unit": unit, "unit_bytes": unit_bytes, **counts})
    return pd.DataFrame(cases)


def saving_against_linear(counts: pd.DataFrame, column: str = "touched") -> pd.DataFrame:
    """Of `count_units` all orderings but linear, with `saving`: the share of linear's count that is avoided."""
    case = ["layout", "row_bytes", "dilation", "unit"]
    linear = counts[counts.ordering == "linear"].set_index(case)[column].rename("linear")
    others = counts[counts.ordering != "linear"].join(linear, on=case)
    return others.assign(saving=1 - others[column] / others.linear).drop(columns="linear")
