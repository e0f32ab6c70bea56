"""The backends, which compute calls. Each file has its backends: refusal, functions, workspace and colour of each.

kernel     a dense kernel under one signature, and the plainest one
presence   whether other packages can be used here
backend    what a backend is, and what the dense ones refuse in common
strided    dense kernels over zero-copy views, and their merge
dense      the dense kernels that torch has
packages   those of other packages
flex_masks masks of FlexAttention, by pattern
flex       compiled FlexAttention, for patterns of any kind
fused      the fused kernels of `attention/triton`, for sequences: "hopper" warp-specialised, "triton" plain
fused_grid the same for grids
listed     packed lists of points, by kernels and by matrix products
listed_grid the kernels for lists on grids: "lists"
tile_groups tiles of a grid: their rows, what is added to their scores, and how large they are on a CPU
tiles      a dense kernel over tiles of a grid: torch's fused one on a CPU, matrix products elsewhere
reference  the oracle: dense masks, any pattern, any dtype
registry   all of them by name
"""
