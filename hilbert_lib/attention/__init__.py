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
grids          attention to neighbourhoods of cells on a grid
explain        which backend serves a call, along a sequence and on a grid
transforms     transforms of torch that have no rule here, refused by name
registration   a function and its gradient as torch operators
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.attention.api": ("dilated_attention",),
        "hilbert_lib.attention.explain": ("explain_backend",),
        "hilbert_lib.attention.modules": (
            "DilatedAttention",
            "MultiheadDilatedAttention",
        ),
        "hilbert_lib.attention.grids.api": ("neighbourhood_attention",),
        "hilbert_lib.attention.grids.module": ("NeighbourhoodAttention",),
    },
)
