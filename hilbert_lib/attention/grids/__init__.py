"""Neighbourhood attention: each cell of a grid of 1 to 3 axes attends to a window around it, tokens in any order.

request    what one call asks for, validated
api        checks the arguments, chooses a backend, runs it
operators  forward and backward as torch operators
reference  the oracle: dense masks, any dtype
eager      matrix products of tiles, in chunks, on any device
flex       compiled FlexAttention, with a mask of blocks made from geometry
fused      the kernels of `attention/triton` as backends
registry   all of them by name
module     the function as a layer
"""

from hilbert_lib.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "hilbert_lib.attention.grids.api": ("neighbourhood_attention",),
        "hilbert_lib.attention.grids.module": ("NeighbourhoodAttention",),
    },
)
