"""Needs of the fused kernels, of a call and of a GPU. Imports no triton: the choice of a backend reads them."""

SHARED_BYTES = 163 * 1024  # shared memory of a block on an A100: tile shapes are compiled for that and for more
POSITIONS = 2**30  # kernels hold positions, and sums of two, in int32
SMALLEST_SCALE = 2.0**-100  # kernels divide by the scale in float32, whose largest number is 2^128
