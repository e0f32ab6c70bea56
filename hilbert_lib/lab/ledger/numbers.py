"""The numbers that a stranger reads first, a line each, from the newest records."""

import pandas as pd

from hilbert_lib.lab.ledger.advice import GRIDS, KERNELS, WHOLE_LINES
from hilbert_lib.lab.ledger.kernels import CASE, Records, fused_speeds, grid_gains, layout_ratios, over_sequence
from hilbert_lib.lab.tables import ratio_table

RING = "07_ring_attention"
ORDERS = ("hilbert", "morton", "tile")  # the compact ones


def key_numbers(records: Records, grids: Records, rings: Records) -> pd.DataFrame:
    """What the kernels reach, what an order changes, and the longest sequences.

    Args:
        records: of notebook 06.
        grids: of notebook 08.
        rings: of notebook 07.

    Returns:
        what, measured and record (the notebook whose record holds it).
    """
    rows = [
        (*row, KERNELS)
        for row in (*_speeds(records), *_public(records), *_speeds(records, longest=True), *_orders(records))
    ]
    rows += [(*_grid(grids), GRIDS), *((*row, RING) for row in _longest(rings))]
    return pd.DataFrame(rows, columns=["what", "measured", "record"])


def kernel_numbers(records: Records) -> pd.DataFrame:
    """What of the kernels is told of a further GPU: what they reach at one length, and what an order changes.

    Args:
        records: of notebook 06, made there.

    Returns:
        As `key_numbers`.
    """
    rows = [(*row, KERNELS) for row in (*_speeds(records), *_orders(records))]
    return pd.DataFrame(rows, columns=["what", "measured", "record"])


def _speeds(records: Records, *, longest: bool = False) -> list[tuple[str, str]]:
    # Nothing of the longest where there is one length.
    speeds, rows = fused_speeds(records, longest=longest), []
    if longest and speeds.length.iloc[0] == fused_speeds(records).length.iloc[0]:
        return rows
    work = speeds.iloc[0]
    branches = "the same branches" if longest else f"branches {', '.join(work.branches.split())} (segment:rate)"
    of = f"of {work.length:,} tokens, {work.heads} heads, {branches}, in bfloat16"
    for direction, table in speeds.groupby("direction", sort=False):
        own = " / ".join(f"{speed:.0f}" for speed in table.tflop_per_s)
        others = " / ".join(f"{row.other_tflop_per_s:.0f} ({row.other})" for row in table.itertuples())
        best = f"the best of the others ({table.others.iloc[0]}) {others}"
        measured = f"{own} TFLOP/s, relative error {table.error.max():.2g}; {best}"
        what = f"{direction.capitalize()} {of} at head_dim {_dims(table)}"
        rows.append((what, measured))
        of = "of the same"
    return rows


def _public(records: Records) -> list[tuple[str, str]]:
    # torchscale is the implementation that LongNet's authors published.
    pairs = ratio_table(records, "backends")
    here = pairs.length == fused_speeds(records).length.iloc[0]
    pairs = pairs[here & (pairs.a == "torchscale") & (pairs.pattern == "reference") & ~pairs.is_causal]
    pairs = pairs.sort_values(["direction", "head_dim"], ascending=False)
    return _beside("torchscale's dilated attention", pairs, ".1f")


def _beside(other: str, pairs: pd.DataFrame, form: str) -> list[tuple[str, str]]:
    # Nothing where the other was not timed.
    if pairs.empty:
        return []
    times = ", ".join(
        f"{direction} {' / '.join(f'{ratio:{form}}' for ratio in table.ratio)}"
        for direction, table in pairs.groupby("direction", sort=False)
    )
    return [(f"The same beside {other}, head_dim {_dims(pairs)}", f"{times} times as fast")]


def _orders(records: Records) -> list[tuple[str, str]]:
    hilbert, best = (layout_ratios(records, order=order, where=WHOLE_LINES).value for order in ("hilbert", "best"))
    # Of whole sequences another kernel reads without a table: beside it an order would be a comparison of kernels.
    decoding = over_sequence(records, where="work == 'decoding'")
    most = decoding.loc[decoding.value.idxmax()]
    there = decoding[decoding.order == "hilbert"].set_index(CASE).value[tuple(most[CASE])]
    return [
        (
            "k and v stored along a Hilbert curve, same function, whole sequences, rows of whole cache lines "
            f"({len(hilbert)} works)",
            f"{hilbert.min():.3f} to {hilbert.max():.3f} times as fast as sequence order read through the same table; "
            f"the best of all orders at most {best.max():.3f}",
        ),
        (
            f"Where an order gains most in decoding: rows of {most.row_bytes} B, dilation {most.dilation}",
            f"{most.order} {most.value:.2f}, Hilbert {there:.2f} times as fast as sequence order, which needs no table",
        ),
    ]


def _grid(grids: Records) -> tuple[str, str]:
    gains = grid_gains(grids)
    best = gains[gains.order == "hilbert"].sort_values("value").iloc[-1]
    work = ["side", "window", "block_size"]
    there = gains[(gains[work] == best[work]).all(axis=1)].set_index("order").value
    values = ", ".join(f"{order} {there[order]:.2f}" for order in ORDERS)
    window, grid = (f"{n} x {n}" for n in (best.window, best.side))
    what = f"Attention to a window of {window} on a grid of {grid} tokens, in blocks of {best.block_size}"
    return what, f"{values} times as fast as row by row"


def _longest(rings: Records) -> list[tuple[str, str]]:
    checked = pd.DataFrame([each for each in rings if each["side"] == "auto" and each["out_error"] is not None])
    rows = []
    for name, works in (("forward", checked), ("forward and backward", checked[checked.backward])):
        longest = works.loc[works.tokens.idxmax()]
        took = longest.forward_ms + (longest.backward_ms if name != "forward" else 0)
        branches = list(zip(longest.segment_lengths, longest.dilation_rates, strict=True))
        ends = " to ".join(f"{w}:{r}" for w, r in (branches[0], branches[-1]))
        heads = f"{longest.heads} head{'s' if longest.heads > 1 else ''} of {longest.head_dim}"
        what = f"The longest {name} that was tried on {longest.ranks} GPUs: {heads}, {len(branches)} branches, {ends}"
        tokens, peak = f"{longest.tokens:,} tokens", f"{longest.peak_bytes / 1e9:.0f} GB"
        rows.append((what, f"{tokens} in {took / 1e3:.2f} s, with {peak} of each GPU at the most"))
    return rows


def _dims(table: pd.DataFrame) -> str:
    return " / ".join(map(str, table.head_dim.unique()))
