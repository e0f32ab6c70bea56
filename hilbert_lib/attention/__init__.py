"""Exact attention: one function, for which a pattern says which keys a query sees.

api            attend, for every pattern, and a door for each kind
validation     the arguments, checked: tensors, and a request of all else
request        one validated request
known_calls    one look-up from a call to the launches of an earlier one of its form
tape           the starts and steps of a call that later calls of its form only repeat
operators      forward and backward as torch operators, one node each to torch.compile
choice         which backend serves a call, and why
rules          what "auto" goes by, as data
measured_rules what was measured on this machine, in the user's cache folder
backends       what computes a call
triton         the fused kernels: all branches in one pass
merge          the one associative merge of partial results; merge_attention
dropout        dropout bits keyed by position
modules        the function as layers
grid_parts     parts of a grid, and which cells lie in which rows
grid_lists     packed lists of grids, for kernels that know no geometry
two_resolutions  near tokens of a grid by themselves, all others as means of coarse cells
joint          queries beside a grid, which see every cell and every extra key
grid_module    attention on grids as a layer
point_module   attention over points as a layer
caches         keys and values of a module's earlier tokens
explain        which backend serves a call
starts         the row of k at which each sequence of a batch begins
aligned        sequences that are padded on the left, moved to row 0
weights        the weights of some queries, and the keys that they belong to
dtensors       DTensors as q, k and v, split by batch or heads
transforms     transforms of torch that have no rule here, refused by name
registration   a function and its gradient as torch operators
autograd       one validated call by one backend, and how autograd runs it
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.attention.api": ("attend", "dilated_attention", "neighbourhood_attention"),
        "hilbert_lib.attention.explain": ("explain_backend",),
        "hilbert_lib.attention.merge": ("merge_attention",),
        "hilbert_lib.attention.modules": (
            "DilatedAttention",
            "MultiheadDilatedAttention",
        ),
        "hilbert_lib.attention.grid_module": ("NeighbourhoodAttention",),
        "hilbert_lib.attention.point_module": ("PointAttention",),
        "hilbert_lib.attention.two_resolutions": ("two_resolution_attention",),
        "hilbert_lib.attention.weights": ("attention_weights",),
    },
)
