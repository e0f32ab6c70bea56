"""From twenty naive lines to boxes by TMA: kernels as a lesson, on numpy tiles or on a GPU.

kernels      the steps in Gluon
numpy_tiles  Gluon's words on numpy arrays, which count
steps        what each step changes, counted and timed
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.inside.steps": (
        "LIBRARY",
        "STEPS",
        "STEP_SWEEP",
        "computed_share",
        "count_steps",
        "key_rectangles",
        "source_of",
        "step_sides",
    )
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
