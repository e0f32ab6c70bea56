"""Needs of the fused kernels, of a call and of a GPU. Imports no triton: the choice of a backend reads them."""

from collections.abc import Sequence

SHARED_BYTES = 99 * 1024  # shared memory of a block on an RTX 3090, 4090 or 5090; no GPU since Ampere gives less
POSITIONS = 2**30  # kernels hold positions, and sums of two, in int32
MOST_SEQUENCES = 2**16 - 1  # and heads: a grid of CUDA has no more blocks along its second and third dimension
SMALLEST_SCALE = 2.0**-100  # kernels divide by the scale in float32, whose largest number is 2^128
TILES = 2**24  # of lists: a word of the last one is found by a number of 32 bits
EXTRA_PROGRAMS = 512  # of a launch for gradients of extra keys, about: with fewer of these the queries are parted
WHOLE_TILES = 4  # of queries on a grid: so few are one part, since to sum parts up takes two launches


def query_tiles(queries: int) -> int:
    """Number of tiles of 64 queries."""
    return -(-queries // 64)


def parts_of_queries(queries: int, programs: int) -> int:
    """Number of parts of the queries of which gradients of extra keys are sums; 0 without programs for extra keys."""
    return min(query_tiles(queries), max(1, EXTRA_PROGRAMS // programs)) if programs else 0


def parts_of_extra_keys(queries: int, shape: Sequence[int]) -> int:
    """The same on grids, of extra keys (batch, extra, kv_heads, head_dim): a program has 64 of them."""
    batch, extra, kv_heads, _ = shape
    parts = parts_of_queries(queries, batch * kv_heads * -(-extra // 64))
    return min(parts, 1) if query_tiles(queries) <= WHOLE_TILES else parts
