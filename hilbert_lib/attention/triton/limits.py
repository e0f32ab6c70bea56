"""What the fused kernels need of a call and of a GPU. Imports no triton: whoever chooses a backend asks here."""

SHARED_BYTES = 163 * 1024  # what an A100 gives a block: the tile shapes are compiled for that and for more
POSITIONS = 2**30  # the kernels hold positions, and sums of two, in int32
SMALLEST_SCALE = 2.0**-100  # they divide by it in float32, whose largest is 2^128
