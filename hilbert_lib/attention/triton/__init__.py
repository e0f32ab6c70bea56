"""The fused kernels: every branch of a pattern in one softmax, one pass over the keys.

schedule   which query rows a program takes, and in how many passes: pure, on the host
geometry   where a tile of rows stands in the segments of a branch
forward    output and lse
backward   dq; dk and dv
launch     tables, grids and the two entry points
"""
