"""Notebooks hold at other legal parameters than their defaults, too: whoever turns one must not meet an error."""

from pathlib import Path

import papermill
import pytest

from hilbert_lib.suite.parameters import check_value, read_parameters

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

SMALL_CURVES = {"max_order": 2, "timing_order": 3, "repetitions": 3}
LESS_L2 = {"l2_seq_len": 2048, "l2_key_counts": [1024]}
CASES = {
    "narrow grids": (
        "01_hilbert_curves",
        SMALL_CURVES | {"grid": [16, 256], "other_grid": [7, 90], "image": [10, 200], "rectangle": [1, 9], "seed": 3},
    ),
    "small grids": (
        "01_hilbert_curves",
        SMALL_CURVES
        | {"max_order": 1, "grid": [4, 4], "other_grid": [3, 5], "image": [6, 5], "box": [1, 1, 7], "seed_side": 2}
        | {"block_sizes": [4], "dilation_rate": 3, "timing_order": 1},
    ),
    "wide grids": (
        "01_hilbert_curves",
        SMALL_CURVES
        | {"grid": [48, 48], "other_grid": [64, 80], "image": [64, 48], "block_sizes": [100, 64], "seed_side": 16}
        | {"dilation_rate": 5},
    ),
    "another pattern": (
        "02_dilated_attention",
        {"seq_len": 40, "segment_lengths": [10, 40], "dilation_rates": [3, 4], "offsets": "branch"}
        | {"heads": 6, "kv_heads": 3, "head_dim": 8, "is_causal": True, "query": 39},
    ),
    "rates that divide nothing": (
        "03_cache_lines",
        LESS_L2
        | {"dilation_rates": [1, 3, 9], "seq_len": 1500, "segment_length": 400, "heads": 1, "key_order": "position"}
        | {
            "row_sizes": [48, 20],
            "cache_dilation": 3,
            "cache_row_sizes": [48],
            "other_dilations": [],
            "cache_kib": [16, 4],
            "seed": 1,
        },
    ),
    "rows of whole lines, one rate": (
        "03_cache_lines",
        LESS_L2
        | {"row_sizes": [128, 256], "dilation_rates": [4], "shown_dilation": 4, "seq_len": 1024, "heads": 2}
        | {"cache_row_sizes": [128, 256, 384], "l2_row_bytes": 128, "shown_layout": "bshd"},
    ),
    "chunks, large pages, programs in step": (
        "03_cache_lines",
        LESS_L2
        | {"chunk": 300, "page_bytes": 2**21, "tile_keys": 32, "concurrent": 5, "shown_dilation": 5, "seq_len": 1024}
        | {"segment_length": 1000, "dilation_rates": [2, 1], "cache_dilation": 1, "l2_dilation": 3},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("notebook", "changes"), CASES.values(), ids=CASES)
def test_a_notebook_holds_at_other_parameters(tmp_path, notebook, changes):
    path = NOTEBOOKS / f"{notebook}.ipynb"
    known = read_parameters(path)
    for name, value in changes.items():  # papermill would pass over a name that is gone
        check_value(name, value, known[name].annotation)
    changes = changes | {"output_dir": str(tmp_path)}
    papermill.execute_notebook(path, tmp_path / "out.ipynb", changes, cwd=tmp_path, progress_bar=False)
    assert list(tmp_path.glob("*.png")), "no figure was drawn"
