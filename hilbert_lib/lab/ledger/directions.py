"""Directions in which the documents want to go on, and what became of each: a table with the numbers of the records."""

from collections.abc import Mapping
from dataclasses import dataclass

BUILT, MEASURED, ANSWERED, NOT_BUILT = "built", "measured", "answered", "not built"
OUTCOMES = (BUILT, MEASURED, ANSWERED, NOT_BUILT)


@dataclass(frozen=True)
class Direction:
    """One direction of the documents' lists of future work.

    documents: their numbers, as the project was given them. direction: in our words. outcome: of `OUTCOMES`. answer: a
    sentence, with names of `numbers` in braces. notebooks: those that show it, as "14_directions". claims: of the
    ledger that judge it. calls: public names that do it.
    """

    documents: str
    direction: str
    outcome: str
    answer: str
    notebooks: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}; got {self.outcome!r}")
        if not (self.notebooks or self.claims or self.calls):
            raise ValueError(f"notebooks, claims or calls must answer {self.direction!r}, got none")


DIRECTIONS = (
    Direction(
        "001",
        "Hilbert order with block-sparse patterns",
        BUILT,
        "on grids up to {grid_best} times as fast with FlexAttention at wide windows; over points "
        "{points_order_low} to {points_order_high} times as fast as work row by row",
        ("08b_kernels_on_grids", "13_points"),
        ("G2", "G3"),
        ("PointNeighbourhood",),
    ),
    Direction(
        "002",
        "several resolutions",
        BUILT,
        "far tokens as means: {means_near} % off full attention with {means_keys} of {means_tokens} keys, a window of "
        "as many {means_alone} %",
        ("14_directions",),
        calls=("two_resolution_attention", "Union"),
    ),
    Direction(
        "002",
        "pattern and curve designed together",
        ANSWERED,
        "a head sees {along_hilbert} % of 17 x 17 neighbours along the curve, {along_raster} % row by row, all in a "
        "window of that work; the loss of a model of {learnt_layers} layers is {learnt_hilbert} times that row by row, "
        "with a window {learnt_windows}",
        ("14_directions",),
        ("L2",),
        calls=("Neighbourhood",),
    ),
    Direction(
        "002",
        "patterns that follow the content",
        ANSWERED,
        "blocks chosen by their means are {means_chosen} % off full attention, near ones {means_near} %; both with "
        "means of the rest",
        ("14_directions",),
    ),
    Direction(
        "000, 002",
        "adaptive order",
        ANSWERED,
        "who stores tokens chooses, once: for blocks of 128 row by row below window {map_least_128_64} on 64 x 64 and "
        "{map_least_128_128} on 128 x 128, a curve from there on; lists over points choose inside",
        ("08_where_a_curve_pays", "14_directions"),
        ("B8",),
    ),
    Direction(
        "002",
        "other curves",
        ANSWERED,
        "on a full grid squares, Morton and Hilbert order reach the bound of {bound_keys} keys for 64 queries; row by "
        "row it is {bound_row}; over points a search finds at most {searched} % fewer",
        ("01_hilbert_curves", "14_directions"),
        calls=("curve_coordinates",),
    ),
    Direction(
        "001, 002, 003",
        "kernels that make the curve",
        BUILT,
        "curves of any rectangle or box are made on the GPU, and orders are kept",
        ("01_hilbert_curves",),
        ("M5",),
        ("curve_coordinates", "Ordering"),
    ),
    Direction(
        "002, 004",
        "chunks of a curve, lengths that are no power of 2",
        BUILT,
        "any length and grid; a curve that restarts every chunk survives a split",
        ("01_hilbert_curves", "03_cache_lines"),
        calls=("Ordering", "OrderingSpec"),
    ),
    Direction(
        "002",
        "gradients through the order",
        BUILT,
        "exact, in every order and backend",
        ("02_dilated_attention",),
        calls=("dilated_attention",),
    ),
    Direction(
        "001",
        "segments that follow the length of the sequence",
        BUILT,
        "a geometric row for a length, or for a number of FLOP",
        ("02_dilated_attention", "07_ring_attention"),
        calls=("DilatedPattern",),
    ),
    Direction(
        "000, 002, 003",
        "tests on several GPUs, a million tokens and more",
        MEASURED,
        "{ring_forward_tokens} tokens of one narrow head on four GPUs, {ring_model_tokens} of {ring_model_heads} heads",
        ("07_ring_attention",),
        ("R1", "R4"),
        ("ring_dilated_attention", "run_ranks"),
    ),
    Direction(
        "001",
        "balance over unequal GPUs",
        BUILT,
        "shares by work and by the speeds of the ranks",
        ("07_ring_attention",),
        calls=("plan_ring",),
    ),
    Direction(
        "000, 002",
        "FlashAttention-3",
        NOT_BUILT,
        "a backend that was tested by stand-ins alone; FlashAttention-4 was timed beside ours",
        ("06_kernel_benchmarks",),
        calls=("explain_backend",),
    ),
    Direction(
        "000, 004",
        "tuning for each GPU, a backend for each pattern",
        BUILT,
        '"auto" takes a kernel that is behind another in {works_behind} of {works} works on Hopper; others it measures',
        ("05_backend_selection",),
        ("B1", "B3"),
        ("select_attention_backend",),
    ),
    Direction(
        "003",
        "benchmarks on modern GPUs, tuning for Pascal",
        MEASURED,
        "H100 and H200; no Pascal was at hand",
        ("06_kernel_benchmarks",),
        ("B11",),
    ),
    Direction(
        "003",
        "one softmax over head groups and ranks",
        BUILT,
        "results are merged by lse, and lse has a gradient",
        ("02_dilated_attention",),
        calls=("merge_attention",),
    ),
    Direction(
        "004",
        "memory pools, CUDA graphs, patterns made beforehand",
        MEASURED,
        "pools pay in few cases, graphs for short sequences; what is made once is kept",
        ("05_backend_selection",),
        ("B5", "B6", "B7"),
    ),
    Direction(
        "002",
        "profiles of caches",
        MEASURED,
        "counted on an H100 and an H200; in time an order gains where rows are small, at most {decoding_best} times",
        ("06b_orders_and_counters",),
        ("C3", "C4"),
    ),
)


def directions_table(numbers: Mapping[str, str]) -> str:
    """The table of notebook 09 in Markdown, with numbers by name in the answers. KeyError: for an unknown name."""
    rows = ["| direction | document | what became of it | see |", "| --- | --- | --- | --- |"]
    for each in DIRECTIONS:
        links = [f"[{name.split('_')[0]}]({name}.ipynb)" for name in each.notebooks]
        places = ", ".join([*links, *(f"`{call}`" for call in each.calls), *each.claims])
        answer = each.answer.format_map(numbers)
        rows.append(f"| {each.direction} | {each.documents} | **{each.outcome}**: {answer} | {places} |")
    return "\n".join(["", *rows, ""])
