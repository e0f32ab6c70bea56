"""Tables over row sizes, dilations, layouts and orderings: what the cache model says of each."""

from collections.abc import Sequence
from itertools import product

import pandas as pd

from hilbert_lib.lab.cache.cache import (
    FETCH_BYTES,
    LAYOUTS,
    LINE_BYTES,
    SECTOR_BYTES,
    Storage,
    branch_rows,
    tile_requests,
)
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern


def compared_orderings(
    length: int, rate: int, *, chunk: int | None = None, segment: int | None = None, seed: int = 0
) -> dict[str, Ordering]:
    """Every ordering that is compared: linear, residue-major for the given rate, four curves, and random.

    Args:
        length: positions.
        rate: dilation rate that the residue-major order is made for.
        chunk: tokens after which residue-major and the curves restart; by default never.
        segment: tokens of a segment; where they are fewer than length, a Hilbert curve a segment is compared too.
        seed: of the random order.

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
        "random": Ordering.random(length, seed),
    }


def count_units(
    *,
    length: int,
    segment_length: int,
    dilation_rates: Sequence[int],
    row_bytes: Sequence[int],
    page_bytes: int,
    heads: int = 8,
    head: int = 0,
    tile_keys: int = 64,
    key_order: str = "storage",
    residue_rate: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Sectors, fetches, lines and pages that one head touches in k, for every ordering, layout, row size and dilation.

    Args:
        length: tokens.
        segment_length: w of the one branch.
        dilation_rates: the values of r.
        row_bytes: the sizes of one head's row.
        page_bytes: bytes a page.
        heads: KV heads.
        head: the head that is counted; its offset is head mod r.
        tile_keys, key_order: as in `branch_rows`.
        residue_rate: the rate that one residue-major order is made for and read at every dilation; by default
            residue-major is made anew for each dilation, which is its best case.
        chunk, seed: as in `compared_orderings`.

    Returns:
        One row a case: layout, row_bytes, dilation, ordering, unit (sector, fetch, line or page), unit_bytes, rows (how
        many are read), fewest (units that they would fill if packed), touched (different units) and requested (the sum
        over tiles of different units).

    >>> counts = count_units(length=64, segment_length=64, dilation_rates=[4], row_bytes=[16], page_bytes=4096)
    >>> case = counts.query("layout == 'bhsd' and unit == 'line'").set_index("ordering")
    >>> case.touched[["linear", "residue"]].to_dict()
    {'linear': 8, 'residue': 2}
    """
    unit_sizes = {"sector": SECTOR_BYTES, "fetch": FETCH_BYTES, "line": LINE_BYTES, "page": page_bytes}
    cases = []
    for rate in dilation_rates:
        pattern = DilatedPattern((segment_length,), (rate,))
        orderings = compared_orderings(length, rate if residue_rate is None else residue_rate, chunk=chunk, seed=seed)
        read = {  # which rows, and by which tile, is the same in every layout
            name: branch_rows(
                Storage(ordering, row_bytes[0], heads), pattern, head=head, tile_keys=tile_keys, key_order=key_order
            )
            for name, ordering in orderings.items()
        }
        for (name, rows), layout, size in product(read.items(), LAYOUTS, row_bytes):
            addresses = Storage(orderings[name], size, heads, layout).addresses(rows.positions, head)
            tiles = rows.segments * -(-segment_length // tile_keys) + rows.tiles
            for unit, unit_bytes in unit_sizes.items():
                _, requested = tile_requests(addresses, tiles, size, unit_bytes)
                cases.append(
                    {
                        "layout": layout,
                        "row_bytes": size,
                        "dilation": rate,
                        "ordering": name,
                        "unit": unit,
                        "unit_bytes": unit_bytes,
                        "rows": len(addresses),
                        "fewest": -(-len(addresses) * size // unit_bytes),
                        "touched": requested.unique().numel(),
                        "requested": requested.numel(),
                    }
                )
    return pd.DataFrame(cases)


def saving_against_linear(counts: pd.DataFrame, column: str = "touched") -> pd.DataFrame:
    """The counts with a column `saving`: the share of the linear order's count that an ordering avoids.

    Args:
        counts: table of `count_units`.
        column: "touched" or "requested".

    Returns:
        The table without its linear rows; saving is 0.25 for a quarter fewer, negative for more.

    >>> counts = count_units(length=64, segment_length=64, dilation_rates=[4], row_bytes=[16], page_bytes=4096)
    >>> case = saving_against_linear(counts).query("layout == 'bhsd' and unit == 'line'").set_index("ordering")
    >>> float(case.saving["residue"])
    0.75
    """
    case = ["layout", "row_bytes", "dilation", "unit"]
    linear = counts[counts.ordering == "linear"].set_index(case)[column].rename("linear")
    others = counts[counts.ordering != "linear"].join(linear, on=case)
    return others.assign(saving=1 - others[column] / others.linear).drop(columns="linear")


def ordering_reach(counts: pd.DataFrame, column: str = "touched") -> pd.DataFrame:
    """How far any ordering can move a count away from the linear order's, over all dilations counted.

    Args:
        counts: table of `count_units`.
        column: "touched" or "requested".

    Returns:
        One row a layout, unit and row size: `best` and `worst`, the largest and the smallest saving of any ordering at
        any dilation, and `hilbert`, the largest saving of the Hilbert order.
    """
    savings = saving_against_linear(counts, column)
    case = ["layout", "unit", "unit_bytes", "row_bytes"]
    reach = savings.groupby(case).saving.agg(best="max", worst="min")
    reach["hilbert"] = savings[savings.ordering == "hilbert"].groupby(case).saving.max()
    return reach.reset_index()


def savings_between(counts: pd.DataFrame, *, ordering: str, unit: str, least: float, most: float) -> pd.DataFrame:
    """Where an ordering touches fewer units than the linear order by a claimed share.

    Args:
        counts: table of `count_units`.
        ordering, unit: which ordering and which unit the claim is about.
        least, most: the claimed range of the saving, ends included.

    Returns:
        One row a layout and row size in which some dilation gives such a saving: layout, row_bytes, dilations.
        Empty where the model finds the saving nowhere.
    """
    savings = saving_against_linear(counts)
    found = savings[(savings.ordering == ordering) & (savings.unit == unit) & savings.saving.between(least, most)]
    return found.groupby(["layout", "row_bytes"], as_index=False).agg(dilations=("dilation", list))


def storage_map(orderings: dict[str, Ordering], pattern: DilatedPattern, slots: int) -> pd.DataFrame:
    """Which of the first slots of storage hold a row that the first head reads through the first branch.

    Args:
        orderings: by name.
        pattern: the branch.
        slots: how many slots to show.

    Returns:
        One row an ordering and slot: ordering, slot, position, read (bool).

    >>> table = storage_map({"residue": Ordering.residue(8, 2)}, DilatedPattern((8,), (2,)), slots=8)
    >>> table.read.astype(int).tolist()
    [1, 1, 1, 1, 0, 0, 0, 0]
    """
    tables = []
    for name, ordering in orderings.items():
        positions = ordering.perm[:slots]
        read = pattern.contains(0, positions, 0, 1)
        table = pd.DataFrame({"position": positions.tolist(), "read": read.tolist()})
        tables.append(table.rename_axis("slot").reset_index().assign(ordering=name))
    return pd.concat(tables, ignore_index=True)


def walk_regularity(orderings: dict[str, Ordering], pattern: DilatedPattern, row_bytes: int) -> pd.DataFrame:
    """How predictable the walk over a branch's rows is, when the keys are read in the sequence's order.

    Args:
        orderings: by name, all of one length.
        pattern: the branch.
        row_bytes: bytes a row.

    Returns:
        One row an ordering: ordering, different_steps (distances in bytes from a row to the next that occur) and
        commonest_share (the share of the commonest).

    >>> orderings = {"linear": Ordering.linear(9), "hilbert": Ordering.from_curve("hilbert", 9)}
    >>> walk_regularity(orderings, DilatedPattern((9,), (2,)), row_bytes=16).different_steps.tolist()
    [1, 3]
    """
    cases = []
    for name, ordering in orderings.items():
        storage = Storage(ordering, row_bytes)
        rows = branch_rows(storage, pattern, key_order="position")
        counts = storage.addresses(rows.positions, head=0).diff().unique(return_counts=True)[1]
        cases.append((name, len(counts), float(counts.max() / counts.sum())))
    return pd.DataFrame(cases, columns=["ordering", "different_steps", "commonest_share"])
