"""Benchmarks within limits of memory and time, each point in a process of its own.

cases     the benchmark of attention: its points, and what their sides run
programs  points whose sides are programs that break
runner    points measured one after another, resumable
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.lab.guarded.cases": (
        "DTYPE_NAMES",
        "Benchmark",
        "attention_points",
        "outcome_table",
        "predicted_memory",
    ),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
