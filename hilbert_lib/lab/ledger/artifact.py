"""The artifact page for reviewers: per headline number the command, its minutes, the value to expect, and how near.

Numbers come from the records by the slots of `numbers`, minutes from the runs that made them, and the tolerance of a
ratio of times from two committed runs of one card.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from math import ceil
from pathlib import Path

from hilbert_lib.lab.environment import say_hardware
from hilbert_lib.lab.ledger.kernels import grid_gains
from hilbert_lib.lab.records import (
    MACHINES,
    REPORTS,
    RESULTS,
    TIMED,
    committed_runs,
    has_records,
    newest_run,
    read_records,
    run_environment,
)
from hilbert_lib.lab.suite.manifest import read_manifest
from hilbert_lib.lab.tables import sides_of

COUNTED, RATIO, SPEED, LEARNT, ERROR = "counted", "ratio", "speed", "learnt", "error"
# By judgement. Of a ratio: one that is printed as 1.07 was 1.03 and 1.06 in older records; two runs of one card differ
# by `between_runs`. Of a speed: clocks and limits of power differ between cards of one kind. Of a loss: other
# processors round otherwise.
PERCENT = {RATIO: 5, SPEED: 15, LEARNT: 10}


@dataclass(frozen=True)
class Headline:
    """A number of the README.

    says: what it is. value: with names of `numbers` in braces. kind: how it was found, which sets its tolerance.
    notebook: whose run measures it, or claim: whose command does. Where both are "", `make numbers` counts it.
    """

    says: str
    value: str
    kind: str
    notebook: str = ""
    claim: str = ""

    def __post_init__(self):
        kinds = (COUNTED, RATIO, SPEED, LEARNT, ERROR)
        if self.kind not in kinds:
            raise ValueError(f"kind must be one of {', '.join(kinds)}, got {self.kind!r}")
        if bool(self.notebook) + bool(self.claim) > 1 or not (self.notebook or self.claim or self.kind == COUNTED):
            raise ValueError(
                f"one of notebook and claim must measure {self.says!r}, and neither only where it is counted"
            )


ORDERS, GRIDS, KERNELS, RING = (
    "06b_orders_and_counters",
    "08b_kernels_on_grids",
    "06_kernel_benchmarks",
    "07_ring_attention",
)
CHOICE, CAUSES, DIRECTIONS = "05_backend_selection", "04_safe_benchmarking", "14_directions"
POINTS, MAP = "13_points", "08_where_a_curve_pays"


def _of_kernel(direction: str, size: int) -> tuple[Headline, ...]:
    name, work = f"{direction}_{size}", f"{direction}, head_dim {size}"
    return (
        Headline(f"TFLOP/s, {work}", f"{{{name}}} (best other {{{name}_other_speed}})", SPEED, KERNELS),
        Headline(f"over the best other, {work}", f"{{{name}_ratio}}", RATIO, KERNELS),
        Headline(f"error against float64, {work}", f"{{{name}_error}}", ERROR, KERNELS),
    )


HEADLINES = (
    Headline("Hilbert order over sequence order", "{rows_hilbert_low} to {rows_hilbert_high}", RATIO, ORDERS),
    Headline("sequence order without the table", "{rows_no_table_low} to {rows_no_table_high}", RATIO, ORDERS),
    Headline("boxes over FlexAttention, forward", "{boxes_forward_low} to {boxes_forward_high}", RATIO, GRIDS),
    Headline("boxes over FlexAttention, backward", "{boxes_backward_low} to {boxes_backward_high}", RATIO, GRIDS),
    Headline("boxes over NATTEN, no pauses", "{over_natten_low} to {over_natten_high}", RATIO, GRIDS),
    Headline("boxes over FlashAttention-4, no pauses", "{over_flash_low} to {over_flash_high}", RATIO, GRIDS),
    Headline("useful pairs in tiles over points", "{points_used_low} to {points_used_high}", COUNTED, claim="G3"),
    Headline("neighbours that patches lose (%)", "{points_lost_low} to {points_lost_high}", COUNTED, POINTS),
    Headline("patches over lists", "{points_patches_low} to {points_patches_high}", RATIO, POINTS),
    Headline("FlexAttention over lists", "{points_blocks_low} to {points_blocks_high}", RATIO, POINTS),
    Headline("Hilbert order over rows, points", "{points_storage_low} to {points_storage_high}", RATIO, POINTS),
    Headline("Hilbert order over rows, FlexAttention", "{map_low} to {map_high}", RATIO, MAP),
    Headline(
        "least window that gains, blocks of 128",
        "{map_least_128_256}, {map_least_128_128}, {map_least_128_64} (256, 128, 64 x 64)",
        RATIO,
        MAP,
    ),
    Headline(
        "the same, blocks of 64",
        "{map_least_64_256}, {map_least_64_128}, {map_least_64_64} (256, 128, 64 x 64)",
        RATIO,
        MAP,
    ),
    Headline("speed left by reordering in each call", "{reordered_low} to {reordered_high}", RATIO, GRIDS),
    Headline("FLOPs of dense over dilated attention", "{flop_saved_131072}", COUNTED),
    Headline("time of dense over dilated attention", "{time_saved_131072}", RATIO, claim="K10"),
    Headline("neighbours along a curve, by rows (%)", "{along_hilbert}, {along_raster}", COUNTED, DIRECTIONS),
    Headline("loss along a curve", "{learnt_hilbert_ends}", LEARNT, DIRECTIONS),
    Headline("loss in a window", "{learnt_windows_ends}", LEARNT, DIRECTIONS),
    Headline("the printed 7.95x with the same keys", "{printed_layouts}", RATIO, claim="K3"),
    Headline("a loop over segments beside one kernel", "{loop_by_segment}", RATIO, CAUSES),
    Headline("printed times over those here", "{longer_7_95_low} to {longer_7_95_high}", SPEED, CAUSES),
    *_of_kernel("forward", 128),
    *_of_kernel("forward", 64),
    *_of_kernel("backward", 128),
    *_of_kernel("backward", 64),
    Headline("speed left without pauses (%)", "{kept_low} to {kept_high}", RATIO, CHOICE),
    Headline("the same of boxes (%)", "{boxes_kept_low} to {boxes_kept_high}", RATIO, GRIDS),
    Headline("over torchscale", "{torchscale_forward_128}, {torchscale_backward_128}", RATIO, KERNELS),
    Headline("seconds of {ring_model_tokens} tokens", "{ring_model_seconds}", SPEED, RING),
    Headline("seconds of {ring_forward_tokens} tokens", "{ring_forward_seconds}", SPEED, RING),
    Headline("speed left on four GPUs of a grid (%)", "{grids_on_4_low} to {grids_on_4_high}", RATIO, RING),
    Headline("decoding in another order", "{decoding_best} (Hilbert {decoding_hilbert})", RATIO, ORDERS),
)


def artifact_table(numbers: Mapping[str, str]) -> str:
    """The page's two tables in Markdown, with the numbers of `numbers`: of headline numbers, and of their commands."""
    rows = ["| number | expected | tolerance | run |", "| --- | --- | --- | --- |"]
    commands = ["| run | command | minutes, on |", "| --- | --- | --- |"]
    for headline in HEADLINES:
        what = f"{headline.says.format_map(numbers)} | {headline.value.format_map(numbers)}"
        rows.append(f"| {what} | {tolerance(headline.kind)} | {run_name(headline)} |")
        row = f"| {run_name(headline)} | `{command(headline)}` | {minutes(headline)} |"
        commands += [] if row in commands else [row]
    return "\n".join(["", *rows, "", *commands, ""])


def run_name(headline: Headline) -> str:
    """The name that the tables have for its command."""
    if headline.claim or not headline.notebook:
        return headline.claim or "numbers"
    return headline.notebook.partition("_")[0] + (", counted" if headline.kind == COUNTED else "")


def tolerance(kind: str) -> str:
    """The distance that another run on the same kind of machine may have from the number."""
    if kind in PERCENT:
        return f"± {PERCENT[kind]} %"
    return "exact" if kind == COUNTED else "at most twice"


@cache
def between_runs() -> int:
    """Percent by which a ratio of times differs between two committed runs of one card, at most, rounded up.

    Of FlexAttention in every order on a grid, whose code did not change in between. ValueError without two such runs.
    """
    by_card: dict[str, list[Path]] = {}
    for run in committed_runs(GRIDS):
        facts = run_environment(run)
        if len(facts["gpus"]) == 1:
            by_card.setdefault(facts["hardware"], []).append(run)
    spreads = [_spread(runs) for runs in by_card.values() if len(runs) > 1]
    if not spreads:
        raise ValueError(f"two committed runs of {GRIDS} must be of one card, got {len(by_card)} cards with one each")
    return ceil(100 * max(spreads))


def _spread(runs: Iterable[Path]) -> float:
    case = ["order", "side", "window", "block_size", "head_dim"]
    first, *others = (grid_gains(read_records(run / RESULTS)).astype(dict.fromkeys(case, str)) for run in runs)
    spread = 0.0
    for other in others:
        both = first.merge(other, on=case)
        spread = max(spread, float((both.value_x / both.value_y - 1).abs().max()))
    return spread


def command(headline: Headline) -> str:
    """The command that measures it again, from the root of the checkout."""
    if headline.claim:
        return f"hilbert claims {'' if headline.kind == COUNTED else '--rerun '}{headline.claim}"
    if not headline.notebook:
        return "make numbers"
    if headline.kind == COUNTED:
        return f"hilbert run {headline.notebook}"  # with its defaults, on any machine
    machine = "h200x4" if headline.notebook == RING else "h200"
    config = f"notebooks/configs/{machine}/{headline.notebook}.yaml"
    return f"hilbert run {headline.notebook} -f {config} --out reports/{machine}"


def minutes(headline: Headline) -> str:
    """Minutes and hardware of the run of its newest record: by its manifest, or from its first to its last record."""
    if headline.kind == COUNTED:
        return "about 1, a CPU"
    if headline.claim:
        return "about 1, a GPU"
    run = newest_run(headline.notebook) or newest_run(headline.notebook, machines=REPORTS.glob(MACHINES))
    took = [_span(run)]
    if manifest := read_manifest(run):
        took.append(_minutes_between(manifest["start"], manifest["end"]))
    return f"{max(1, round(max(took)))}, {say_hardware(run_environment(run)).replace('NVIDIA ', '')}"


@cache  # several headlines are of one run
def _span(run: Path) -> float:
    # From the first record's time to the last one's.
    if not has_records(run / RESULTS):
        return 0.0
    records = [record for record in read_records(run / RESULTS) if record.get("kind") in TIMED]
    times = sorted(side["utc"] for record in records for side in sides_of(record) if side.get("utc"))
    return _minutes_between(times[0], times[-1]) if times else 0.0


def _minutes_between(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds() / 60
