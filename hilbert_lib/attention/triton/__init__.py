"""The fused kernels: every branch of a pattern in one softmax, one pass over the keys.

schedule         which rows a program takes, and in how many passes: pure, on the host
geometry         where a tile of rows stands in the segments of a branch
forward          output and lse
backward         dq; dk and dv
division         which branches share a launch of the kernels for Hopper: pure, on the host
hopper           the forward on a Hopper GPU, warp-specialised
hopper_backward  likewise the backward
hopper_steps     what the forward does with a block of keys
hopper_tiles     what the two share
decode           a few queries against many keys
merge            all partial results of dense kernels at once
rows             rows of a whole by index: merged, or added to, in place
launch           tables, grids and the two entry points
start            starts the kernels of a call, which a first one compiles beside each other
"""
