"""Every plot of the notebooks: functions from a table to a figure, and the means to save and redraw them.

record    figures saved with their data, and drawn again from it
plots     lines, bars, points and heat maps of one table
widgets   controls above a figure
curves    paths through grids
patterns  who sees whom
locality  what a branch reads of what is stored
grids     what a block of queries reads on a grid
clouds    points along an order, and what a block of them sees
in_print  what a query sees along a curve, beside the window that stands for it
options   what each option keeps of its base work's speed
directions  a dilated pattern along an order of a grid
order_map  where an order pays, by counting and by time
ring      what ranks send
tables    a table as HTML, with units
verdict   what is claimed beside what was measured
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.figures.clouds": ("draw_clouds", "draw_reach", "draw_words"),
    "hilbert_lib.lab.figures.curves": ("draw_paths", "draw_volumes", "path_table"),
    "hilbert_lib.lab.figures.directions": ("PATTERNS", "draw_neighbours"),
    "hilbert_lib.lab.figures.grids": ("draw_block_maps", "draw_idea", "draw_reads"),
    "hilbert_lib.lab.figures.in_print": ("draw_kept",),
    "hilbert_lib.lab.figures.locality": ("draw_reading", "draw_storage_map"),
    "hilbert_lib.lab.figures.options": ("share_bars",),
    "hilbert_lib.lab.figures.order_map": ("draw_order_map",),
    "hilbert_lib.lab.figures.patterns": ("cell_table", "draw_cells", "draw_query"),
    "hilbert_lib.lab.figures.plots": ("bars", "heat", "lines", "points", "short"),
    "hilbert_lib.lab.figures.record": ("redraw", "show"),
    "hilbert_lib.lab.figures.ring": ("draw_halos", "draw_plan"),
    "hilbert_lib.lab.figures.tables": ("show_table",),
    "hilbert_lib.lab.figures.verdict": ("draw_claimed_and_measured",),
    "hilbert_lib.lab.figures.widgets": ("explore",),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
