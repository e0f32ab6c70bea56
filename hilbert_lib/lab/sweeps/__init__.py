"""Measurements of each notebook.

causes       04, 09: the documents' comparisons rebuilt, with one cause of a ratio at a time
memory       05: CUDA graphs, memory pools and caches of patterns
kernels      06: backends side by side, and what an order of k and v changes
processes    06: the headline pairs again, in fresh processes
counters     06: what the hardware counts
options      06c: what an option of a call costs, and what others take for it
video        06c: the attention of a published video model
over_ranks   07: a workload over ranks, and the ways that compute it
sequences    07: those ways along a sequence
halos        07: those ways on a grid
clouds       07: those ways over points
spread       07: rows that lie on several ranks, held against float64
ring         07: what ranks measure
ring_tables  07: what is planned
ring_trace   07: the exchange in one call
grids        08, 08b: kernels on a grid, with the tokens in every order
learning     10, 14: small models that learn from text, pictures and slides, and along orders of a picture
contexts     10: a model's step and decoding by length of context
in_print     12: published comparisons of layouts, rebuilt
points       13: attention over points by lists and by their rivals
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.sweeps.causes": (
        "PRINTED",
        "at_once",
        "by_loop",
        "cause_table",
        "committed_causes",
        "finding",
        "rebuild_printed",
        "segment_table",
    ),
    "hilbert_lib.lab.sweeps.contexts": (
        "DECODING",
        "STEP",
        "TORCHSCALE",
        "context_cases",
        "counted_steps",
        "decoding_cases",
    ),
    "hilbert_lib.lab.sweeps.counters": ("COUNTED_KERNELS", "count", "counter_table"),
    "hilbert_lib.lab.sweeps.grids": (
        "GRID_SWEEP",
        "MAP_SWEEP",
        "attend_by_flex",
        "compare_kernels",
        "compare_on_map",
        "orders_of",
        "parse_map_work",
        "sustained_sides",
    ),
    "hilbert_lib.lab.sweeps.halos": ("GRID_RESULTS", "RECTANGLES", "RUNS", "SHARDINGS", "STRIPS", "halo_table"),
    "hilbert_lib.lab.sweeps.in_print": (
        "check_works",
        "order_pairs",
        "run_in_print",
        "slide_pairs",
        "stride_pairs",
        "tile_pairs",
        "window_pairs",
    ),
    "hilbert_lib.lab.sweeps.kernels": ("backends", "ceilings", "layouts", "roof_of", "single_branches"),
    "hilbert_lib.lab.sweeps.learning": (
        "LEARNT_ORDERS",
        "PICTURES",
        "TEXT",
        "TEXT_ATTENTIONS",
        "drawn_slides",
        "noisy_crops",
        "order_trainings",
        "picture_trainings",
        "slide_training",
        "text_trainings",
    ),
    "hilbert_lib.lab.sweeps.memory": ("graph_gains", "pair_table", "pool_comparison", "pool_table", "table_pairs"),
    "hilbert_lib.lab.sweeps.options": (
        "BASE",
        "NOT_TRIED",
        "OPTION_SWEEP",
        "grid_rivals",
        "option_table",
        "run_options",
        "sequence_rivals",
    ),
    "hilbert_lib.lab.sweeps.over_ranks": ("OverRanks",),
    "hilbert_lib.lab.sweeps.processes": ("process_table", "repeat_in_processes"),
    "hilbert_lib.lab.sweeps.points": (
        "LIST_SWEEP",
        "ORDER_SWEEP",
        "POINT_SWEEP",
        "PointWork",
        "build_sides",
        "by_blocks",
        "by_boxes",
        "by_gather",
        "by_patches",
        "compare_orders",
        "compare_points",
        "fits_boxes",
        "parse_work",
    ),
    "hilbert_lib.lab.sweeps.ring": ("run_works",),
    "hilbert_lib.lab.sweeps.ring_tables": ("PLANNED", "scaling_table", "spanning_pattern", "split_table"),
    "hilbert_lib.lab.sweeps.sequences": ("DENSE_RING", "GATHERED", "ORDERS", "SIDES"),
    "hilbert_lib.lab.sweeps.clouds": ("CLOUD_RESULTS", "SHARED"),
    "hilbert_lib.lab.sweeps.spread": ("ALONE",),
    "hilbert_lib.lab.sweeps.video": (
        "COSMOS_GRID",
        "COSMOS_LAYERS",
        "FULL",
        "VIDEO_SWEEP",
        "step_table",
        "video_calls",
        "video_rivals",
    ),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
