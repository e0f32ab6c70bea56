"""Exact dilated attention.

api            checks the arguments, chooses a backend, runs it
operators      forward and backward as torch operators, one node each to torch.compile
choice         which backend serves a call, and why
rules          what "auto" goes by, as data
measured_rules what was measured on this machine, in the user's cache folder
backends       what computes a call
triton         the fused kernels: all branches in one pass
merge          the one associative merge of partial results
dropout        dropout bits keyed by position
call           one validated request
modules        the function as layers
grid           attention to neighbourhoods of cells on a grid
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.attention.api": (
            "dilated_attention",
            "explain_backend",
        ),
        "hilbert_lib.attention.modules": (
            "DilatedAttention",
            "MultiheadDilatedAttention",
        ),
        "hilbert_lib.attention.grid": ("neighbourhood_attention",),
    },
)
