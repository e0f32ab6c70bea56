"""Claims of the documents, and their answers: claims ask the questions, records hold the answers.

claims      the entries, a file a subject, each with the computation that answers it
claim       what an entry says
answer      what was found of a claim, and the verdict that its cases give
cases       the table of a claim's cases
kernels     cases from the records of times on one GPU: layouts, backends, graphs, pools
models      cases that are computed anywhere: cache lines, memory, kernels on reordered keys
learning    cases of models that learn
order_map   the cells of the map of orders, counted, with their times
in_print    publications about orders and windows, and cases of what they claim
options     cases of the options of a call, and of the layers of a video model
directions  where the documents want to go on, and what became of it
ring        cases of several ranks, planned and measured
artifact    headline numbers for reviewers: command, minutes, expected value, tolerance
documents   the pairs that some claims time by themselves
rerun       measuring a claim again
numbers     the numbers that README and notebooks tell, by name, in sentences written by hand
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.ledger.answer": ("answers", "case_summary", "judged", "ledger_table", "ratio_cases", "standing"),
    "hilbert_lib.lab.ledger.claims": ("LEDGER",),
    "hilbert_lib.lab.ledger.documents": ("claim_table",),
    "hilbert_lib.lab.ledger.in_print": ("publication_table", "strided_rates", "timed_pairs"),
    "hilbert_lib.lab.ledger.kernels": (
        "CASE",
        "boxes_over_blocks",
        "grid_gains",
        "over_lists",
        "over_sequence",
        "point_gains",
    ),
    "hilbert_lib.lab.ledger.learning": ("orders_over_rows",),
    "hilbert_lib.lab.ledger.order_map": ("least_windows", "map_finding", "map_panels", "newest_map"),
    "hilbert_lib.lab.ledger.rerun": ("claim_pairs",),
    "hilbert_lib.lab.ledger.ring": ("overlap_and_scaling",),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
