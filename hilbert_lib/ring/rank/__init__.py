"""One rank's work on a plan.

layout     its part of a plan as index tensors
exchange   rows on their way between ranks, and the answers to them
blocks     the dense attentions of shared segments
local      the rank's own tensors by rows, and sums over them
passes     its forward and backward
halo       the same on a grid, and of points; `halo_layout` its part of that plan
copies     rows of a grid and of points by index: copied and summed
joint      extra queries over the cells of all ranks
call       the patterns of a union one after the other
"""
