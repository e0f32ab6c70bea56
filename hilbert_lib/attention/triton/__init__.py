"""The fused kernels: every branch of a pattern in one softmax, one pass over the keys.

limits     their needs of a call and of a GPU; imports no triton
schedule   rows of each program, and passes of a call: pure, on the host
geometry   positions of a tile's rows in the segments of a branch
forward    output and lse
backward   dq; dk and dv
grid       windows on a grid, for tokens in any order; `grid_launch` starts them
lists      rows that see listed rows, whatever the geometry; `lists_launch` starts them
grid_bias  the gradient of a bias by relative position on a grid
shifts     the blocks of keys and the scratch of that gradient; imports no triton
hopper     forward and backward on a Hopper GPU, warp-specialised
decode     a few queries against many keys; `decode_line` on grids of one axis, with tensors of starts
merge      all partial results of dense kernels at once
rows       rows by index: merged, or added to, in place
copies     rows by index of several tensors: copied, or summed
arguments  configurations, grids and the arguments that kernels share
launch     the entry points: of the plain kernels, and of the warp-specialised ones
start      starts of the kernels of a call: compiled at once, recorded, replayed
"""
