"""Needs of the fused kernels, of a call and of a GPU. Imports no triton: the choice of a backend reads them."""

SHARED_BYTES = 163 * 1024  # shared memory of a block on an A100: tile shapes are compiled for that and for more
LISTS_SHARED_BYTES = 99 * 1024  # of those for lists: any GPU of today gives a block as much
POSITIONS = 2**30  # kernels hold positions, and sums of two, in int32
SMALLEST_SCALE = 2.0**-100  # kernels divide by the scale in float32, whose largest number is 2^128
TILES = 2**24  # of lists: a word of the last one is found by a number of 32 bits
