"""Notebooks hold at other legal parameters than their defaults, too: whoever turns one must not meet an error."""

import re
from functools import cache
from pathlib import Path

import nbformat
import papermill
import pytest

from hilbert_lib.lab.suite.points import check_value, make_points, read_notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

CASES = {
    "narrow grids": (
        "01_hilbert_curves",
        {"timing_order": 3, "repetitions": 3, "grid": [16, 256], "other_grid": [7, 90], "rectangle": [1, 9]},
    ),
    "small grids": (
        "01_hilbert_curves",
        {"timing_order": 1, "repetitions": 3, "grid": [4, 4], "other_grid": [3, 5], "box": [1, 1, 7]}
        | {"seed_side": 2, "block_sizes": [4], "dilation_rate": 3},
    ),
    "wide grids": (
        "01_hilbert_curves",
        {"timing_order": 3, "repetitions": 3, "grid": [48, 48], "other_grid": [64, 80], "block_sizes": [100, 64]}
        | {"seed_side": 16, "dilation_rate": 5},
    ),
    "another pattern": (
        "02_dilated_attention",
        {"seq_len": 40, "segment_lengths": [10, 40], "dilation_rates": [3, 4], "offsets": "branch"}
        | {"heads": 6, "kv_heads": 3, "head_dim": 8, "is_causal": True, "query": 39},
    ),
    "a query without keys": (
        "02_dilated_attention",
        {"seq_len": 8, "segment_lengths": [8], "dilation_rates": [4], "offsets": "zero", "query": 3},
    ),
    "rates that divide nothing": (
        "03_cache_lines",
        {"l2_seq_len": 2048, "seq_len": 1500, "segment_length": 400, "heads": 1, "key_order": "position"}
        | {"dilation_rates": [1, 3, 9], "row_sizes": [48, 20], "cache_dilation": 3, "cache_row_sizes": [48]}
        | {"cache_kib": [16, 4]},
    ),
    "rows of whole lines, one rate": (
        "03_cache_lines",
        {"l2_seq_len": 2048, "row_sizes": [128, 256], "dilation_rates": [4], "shown_dilation": 4, "seq_len": 1024}
        | {"heads": 2, "cache_row_sizes": [128, 256, 384]},
    ),
    "an even window, options in half precision": (
        "06c_options",
        {"side": 9, "window": 4, "grid_heads": 1, "extra_keys": [2], "tokens": 96, "sequences": 3, "dtype": "bfloat16"}
        | {"rivals": ["cudnn"], "video": [2, 5, 7]},
    ),
    "a small picture, an even window": (
        "08_where_a_curve_pays",
        {"map_side": 20, "map_window": 6, "block_sizes": [7], "timed": ["20x20 6x6:3 1x8"], "dtype": "bfloat16"},
    ),
    "a narrow grid, two kinds of axes": (
        "08b_kernels_on_grids",
        {"works": ["6x10 5x3 1x8"], "repetitions": 3, "seconds": 0.05},
    ),
    "all ways to attend to text, an odd slide": (
        "10_in_a_model",
        {"text_attentions": ["dilated", "dense", "windows", "itself alone"], "context_lengths": [100], "layers": 2}
        | {"first_segment": 30, "heads": 3, "slide": [9, 64, 1]},
    ),
    "a small grid, an even window": (
        "11_inside_a_kernel",
        {"side": 64, "window": 12, "heads": 2, "head_dim": 128, "shown_windows": [4, 64], "repetitions": 5},
    ),
    "long grids, a window of the whole grid": (
        "12_in_print",
        {
            "windows": ["4x8 4 2x1x16"],
            "slides": ["9x3 3 1x1x16"],
            "tiles": ["8x16 3 8 1x16"],
            "orders": ["8x4 8x4 1x16"],
        }
        | {"volumes": ["40 7 7 1x16"], "strides": ["5x7 5x7 1x7 1x16"], "dtype": "bfloat16", "repetitions": 3},
    ),
    "few points, patches that do not divide them": (
        "13_points",
        {"drawn": 256, "query": 0, "tissue_window": 3, "room_window": 7, "counted": 1024, "patch_size": 300}
        | {"works": ["room 100 3 1x8"], "repetitions": 3, "seconds": 0.05},
    ),
    "a small grid, one seed": (
        "14_directions",
        {"grid_side": 64, "first_segment": 100, "seen_windows": [3, 9], "searched_points": 200, "swaps": 100}
        | {"picture_steps": 20, "picture_side": 16, "order_side": 8, "order_layers": 2, "order_steps_seeds": [12, 1]},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("notebook", "changes"), CASES.values(), ids=CASES)
def test_a_notebook_holds_at_other_parameters(tmp_path, notebook, changes):
    path = NOTEBOOKS / f"{notebook}.ipynb"
    known = read_notebook(path).parameters
    for name, value in changes.items():  # papermill would pass over a name that is gone
        check_value(name, value, known[name].annotation)
    changes = changes | {"output_dir": str(tmp_path)}
    papermill.execute_notebook(path, tmp_path / "out.ipynb", changes, cwd=tmp_path, progress_bar=False)
    assert list(tmp_path.glob("*.png")), "no figure was drawn"


WRONG = {
    "00_question": {"seq_len": 0, "segment_length": 512, "drawn_rate": 65, "dilation_rates": []} | {"head_dim": 0},
    "01_hilbert_curves": {"rectangle": [1, 1], "box": [5, 4], "grid": [-1, 4], "other_grid": [60], "block_sizes": []}
    | {"dilation_rate": 0, "seed_side": 6, "timing_order": 0, "repetitions": 0},
    "02_dilated_attention": {"seq_len": 0, "query": 48, "mixing_rule": "hard", "heads": 24, "kv_heads": 3}
    | {"head_dim": 0, "segment_lengths": [], "dilation_rates": [9, 1, 1], "offsets": "last"},
    "03_cache_lines": {"seq_len": 0, "cache_kib": [0], "key_order": "any", "dilation_rates": [2048], "row_sizes": []}
    | {"shown_dilation": 0, "cache_dilation": -4, "l2_seq_len": 0, "segment_length": 0, "heads": 0}
    | {"cache_row_sizes": []},
    "04_safe_benchmarking": {"lengths": [], "timed_length": 0, "calls": 19, "pairs": 9, "progressive_gb": 0.0}
    | {"hang_seconds": -1.0, "heads": 0, "head_dim": 0, "dilation_rates": [1], "printed": ["8"]}
    | {"backends": ["spda"], "segment_lengths": []},
    "05_backend_selection": {"lengths": [], "heads": 0, "head_dims": [], "dtype": "int8", "backends": ["spda"]}
    | {"segment_lengths": [0, 8], "dilation_rates": [1], "ordering_length": 0, "pool_lengths": [0], "seconds": 0.0}
    | {"sustained": ["spda"]},
    "06_kernel_benchmarks": {"lengths": [], "heads": 1, "head_dims": [0], "segment_lengths": [0], "dilation_rates": []}
    | {"opponents": ["falsh"], "processes": -1},
    "06b_orders_and_counters": {"heads": 0, "layout_length": 0, "layout_dilations": [1, 1], "layout_row_bytes": [48]},
    "06c_options": {"side": 7, "window": 12, "grid_heads": 0, "extra_keys": [0], "tokens": 48, "sequence_heads": 0}
    | {"sequences": 3, "head_dim": 24, "dtype": "float64", "rivals": ["falsh"], "video": [24, 44], "repetitions": 0},
    "07_ring_attention": {"tokens": 0, "ranks": 0, "heads": 0, "head_dim": 0, "first_segment": 0, "timed_ranks": [0]}
    | {"weak_tokens": [-1], "strong_tokens": 0, "longest_tokens": -1, "longest_both_tokens": -1, "repetitions": 0}
    | {"grids": ["room 500 5 2x16"]},
    "08_where_a_curve_pays": {"map_side": 0, "map_window": 65, "block_sizes": [-1], "timed": ["8x8 3x3: 2x16"]}
    | {"dtype": "half", "repetitions": 0, "seconds": 0.0},
    "08b_kernels_on_grids": {"works": ["8x8 0x9 2x16"], "dtype": "half", "repetitions": 0, "seconds": 0.0}
    | {"sustained": ["8x8 3x3 2x16"]},
    "09_verdict": {"details": ["K99"]},
    "10_in_a_model": {"text_attentions": ["dilated"], "steps": 0, "text_length": 4, "text_width": 24, "layers": 0}
    | {"picture_side": 4, "context_lengths": [8], "first_segment": 0, "heads": 0, "head_dim": 7, "dtype": "half"}
    | {"slide": [16, 60, 2]},
    "11_inside_a_kernel": {
        "side": 96,
        "window": 129,
        "heads": 0,
        "head_dim": 32,
        "shown_windows": [200],
        "repetitions": 0,
    },
    "12_in_print": {"windows": ["16x16 5 1x2x16"], "slides": ["14x14 4 1x2x16"], "tiles": ["16x16 32 7 2x16"]}
    | {"orders": ["32x32 9 2x16"], "volumes": [], "strides": ["32x32 8x8 9x9 2x16"], "dtype": "float64"}
    | {"repetitions": 0, "seconds": 0.0},
    "14_directions": {"grid_side": 8, "first_segment": 0, "seen_windows": [4], "searched_points": 100, "swaps": 1}
    | {"picture_steps": 0, "picture_side": 18, "order_side": 24, "order_width": 24, "order_layers": 0}
    | {"order_batch": 0, "order_steps_seeds": [3, 2]},
    "13_points": {"drawn": 100, "query": 4096, "tissue_window": 4, "room_window": 0, "counted": 1, "patch_size": 1}
    | {"works": ["room 64 4 2x16"], "dtype": "half", "repetitions": 0, "seconds": 0.0},
}


# A record of the map holds one number for the side of a grid and one for that of a window.
NO_SQUARES = (
    ["40 7 1x16"],
    ["8x16 3x3 2x16"],
    ["16x16 5x3 2x16"],
    ["4x4x4 3x3x3 1x16"],
    ["16x16 5x5 2x16", "9x8 3x3 2x16"],
)


CHECKS = r"^from hilbert_lib\.lab import .*\binteger\b|^assert not unknown"  # in the cell with which checks begin


@cache
def opened(notebook):
    """The parameters of a notebook, what its cells before the checks define, and its checks up to the next text."""
    known, values, checks = read_notebook(NOTEBOOKS / f"{notebook}.ipynb").parameters, {}, []
    for cell in nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells:
        if checks and cell.cell_type == "markdown":
            break
        if checks or re.search(CHECKS, cell.source, re.M):
            checks.append(cell.source)
        elif cell.cell_type == "code":
            exec(cell.source, values)
    return known, values, checks


def run_checks(notebook, changes):
    known, values, checks = opened(notebook)
    values = values | {name: check_value(name, value, known[name].annotation) for name, value in changes.items()}
    assert checks
    for source in checks:
        exec(source, values)


@pytest.mark.parametrize(
    ("notebook", "name", "value"),
    [(notebook, name, value) for notebook, values in WRONG.items() for name, value in values.items()]
    + [("08_where_a_curve_pays", "timed", value) for value in NO_SQUARES],
)
def test_a_wrong_value_is_refused_by_its_name_before_any_work(notebook, name, value):
    with pytest.raises((ValueError, AssertionError), match=rf"^{name}(\[\d\])? must "):
        run_checks(notebook, {name: value})


def test_each_parameter_that_can_be_wrong_is_tried():
    untried = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        known = read_notebook(path).parameters
        names = {name for name, parameter in known.items() if parameter.annotation != "bool"}
        untried[path.stem] = names - {"output_dir", *WRONG.get(path.stem, ())}
    assert {name: left for name, left in untried.items() if left} == {}


@pytest.mark.parametrize(
    "file", sorted(NOTEBOOKS.glob("configs/*/*.yaml")), ids=lambda file: f"{file.parent.name}-{file.stem}"
)
def test_the_checks_take_what_the_files_of_parameters_hold(file):
    if file.stem in WRONG:
        (point,) = make_points(read_notebook(NOTEBOOKS / f"{file.stem}.ipynb"), {}, file)
        run_checks(file.stem, point.changes)
