"""Models of what caches and memory see when rows are read in some order.

cache          sectors, lines and pages that a branch touches
sweeps         tables of these, over row sizes, dilations, layouts and orders
l2             what a cache of a given size can reuse
predicted      what the hardware should count in one launch
grid           how compact blocks of slots are on a grid
neighbourhood  blocks touched, and rows exchanged, by a window on a grid
bound          keys that a block of cells sees at least, orders that reach it, and bricks
annealing      orders of work over points that are searched
along_curve    the neighbours that a head of a dilated pattern sees along an order
order_map      tiles touched row by row over those in an order, by window, dilation, grid and kernel
in_print       what published windows along a curve see of the windows that they stand for
points         tiles and blocks over points by order of work, and the neighbours that patches keep
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.cache.along_curve": ("cells_seen", "count_along_curve", "keys_of_a_query", "window_of"),
    "hilbert_lib.lab.cache.annealing": ("annealing_table", "run_annealing"),
    "hilbert_lib.lab.cache.bound": ("block_panels", "count_bound", "every_set"),
    "hilbert_lib.lab.cache.cache": ("FETCH_BYTES", "KEY_ORDERS", "LINE_BYTES"),
    "hilbert_lib.lab.cache.grid": ("block_compactness", "grid_orderings"),
    "hilbert_lib.lab.cache.in_print": (
        "cells_kept",
        "count_orders",
        "count_strides",
        "count_tiles",
        "count_windows",
        "neighbours_found",
        "pictured",
    ),
    "hilbert_lib.lab.cache.l2": ("GPUS", "hit_rates"),
    "hilbert_lib.lab.cache.neighbourhood": (
        "COMPACT",
        "CURVES",
        "block_reach",
        "block_shares",
        "count_blocks",
        "count_exchange",
        "count_grid_lists",
        "count_used",
        "neighbourhood_orderings",
    ),
    "hilbert_lib.lab.cache.order_map": ("count_order_map", "count_point_map", "map_orders"),
    "hilbert_lib.lab.cache.points": (
        "WORK_ORDERS",
        "block_words",
        "count_kernels",
        "count_lists",
        "count_recall",
        "point_orders",
        "point_reach",
    ),
    "hilbert_lib.lab.cache.predicted": ("model_errors",),
    "hilbert_lib.lab.cache.sweeps": ("compared_orderings", "count_units", "saving_against_linear"),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
