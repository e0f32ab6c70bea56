"""Positions of the rows of a tile, and of keys, in the segments of a branch: the arithmetic that all kernels share."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hilbert_lib.attention import dropout

NAME = tl.constexpr(dropout.NAME)
BRANCH = tl.constexpr(dropout.BRANCH)
LOG2_E = tl.constexpr(1.4426950408889634)
# Numbers that differ from call to call. Triton would compile most calls anew, for each kind of divisor.
NOT_SPECIALIZED = [
    *("first_query", "queries", "keys", "batch", "heads", "kv_heads", "group"),
    *("chunk", "stride", "chunks", "phases", "count", "n_branches"),
]


def block_d(head_dim: int) -> int:
    """Columns of a tile: a power of two, 16 at least.

    >>> [block_d(head_dim) for head_dim in (1, 16, 17, 256)]
    [16, 16, 32, 256]
    """
    return max(16, power_of_2(head_dim))


def power_of_2(number: int) -> int:
    """The smallest power of two that is at least a positive number. Triton's function is slow on the host."""
    return 1 << (number - 1).bit_length()


def products_of_float32(exact: str = "tf32x3") -> str:
    """The precision of float32 products in kernels: "tf32" where torch's setting allows it, else `exact`.

    "tf32x3" is the sum of three products of TF32: of errors at most 1.4 times those of torch's own float32 on an H200,
    and three to six times as fast as "ieee", which uses no tensor cores (reports/HISTORY.md, "float32").
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else exact


class Tile(NamedTuple):
    """The rows of a program: rows u to u + size - 1 of a list of classes (`schedule.Tables`). size 0 is no tile."""

    chunk_start: tl.tensor
    members: tl.tensor  # pointer to the first class of the list
    n: tl.tensor  # number of classes
    u: tl.tensor
    stride: tl.tensor
    size: tl.tensor
    end: tl.tensor  # position after the last row that exists
    first: tl.tensor  # position of row 0
    lowest: tl.tensor  # position of the first row that exists
    highest: tl.tensor  # position of the last row that exists


@triton.jit
def tile_of(pid, items, classes, first_row, rows, heads, group, chunk, stride, chunks, phases, count):
    """Sequence, head and tile of a program, among `rows` rows from `first_row` on."""
    # Tiles of a chunk share segments. Programs of one chunk run at the same time, and find its keys in the cache.
    number = pid % count
    pid = pid // count
    chunk_number = pid % chunks + first_row // chunk
    pid = pid // chunks
    h = pid % heads
    b = pid // heads
    return b, h, _tile(items, classes, chunk_number, number, first_row, rows, h // group, chunk, stride, phases, count)


@triton.jit
def place_of(pid, documents, items, classes, first_row, rows, keys, heads, group, chunk, stride, chunks, phases, count):
    """`tile_of`, of a packed document if there are any (`packed.places_kernel`).

    Three values more: the sequence as dropout numbers it, the row of its position 0, and its number of keys.
    """
    if documents is None:
        b, h, tile = tile_of(pid, items, classes, first_row, rows, heads, group, chunk, stride, chunks, phases, count)
        return b, h, tile, b, tl.full([], 0, tl.int64), keys
    else:
        place = documents + pid % chunks * 5
        document = tl.load(place)
        origin = tl.load(place + 1).to(tl.int64)
        length = tl.load(place + 2)
        chunk_number = tl.load(place + 3)
        number = tl.load(place + 4)
        h = pid // chunks
        tile = _tile(items, classes, chunk_number, number, 0, length, h // group, chunk, stride, phases, count)
        return pid * 0, h, tile, document, origin, length


class Place(NamedTuple):
    """A tile's sequence, or packed document, among the rows of its tensors."""

    sequence: tl.tensor  # its number, as dropout has it
    origin: tl.tensor  # row of its position 0
    keys: tl.tensor


@triton.jit
def placed_tile(pid, tables, first_row, rows, keys, heads, group, grid, PACKED: tl.constexpr):
    """`place_of`, with the last three as a `Place`; tables are branches, offsets, items, classes and documents."""
    if PACKED:
        b, h, tile, sequence, origin, length = place_of(
            pid, tables[4], tables[2], tables[3], first_row, rows, keys, heads, group, *grid
        )
        return b, h, tile, Place(sequence, origin.to(tl.int32), length)
    else:
        b, h, tile = tile_of(pid, tables[2], tables[3], first_row, rows, heads, group, *grid)
        return b, h, tile, Place(b, b, keys)


@triton.jit
def _tile(items, classes, chunk_number, number, first_row, rows, g, chunk, stride, phases, count):
    # Tile `number` of chunk `at`, for a head of k and v.
    item = items + ((g * phases + chunk_number % phases) * count + number) * 4
    members = classes + tl.load(item)
    n = tl.load(item + 1)
    u = tl.load(item + 2)
    size = tl.load(item + 3)
    start = chunk_number * chunk
    end = tl.minimum(start + chunk, first_row + rows)
    first = _position(start, members, n, u, stride)
    lowest = tl.maximum(first, first_row)
    highest = tl.minimum(_position(start, members, n, u + tl.maximum(size, 1) - 1, stride), end - 1)
    size = tl.where(lowest > highest, 0, size)
    return Tile(start, members, n, u, stride, size, end, first, lowest, highest)


@triton.jit
def _position(start, members, n, row, stride):
    return start + tl.load(members + row % n) + row // n * stride


@triton.jit
def tile_positions(tile, row):
    """Positions of the rows of a tile with these numbers."""
    return _position(tile.chunk_start, tile.members, tile.n, tile.u + row, tile.stride)


@triton.jit
def segment_rows(start, w, r, o, keys):
    """Number of rows of a branch in the segment that begins at `start`."""
    size = tl.minimum(w, keys - start)  # [8]
    return tl.where(size > o, (size - o + r - 1) // r, 0)


@triton.jit
def is_in(position, start, r, o):
    """Whether a position has residue o, counted from `start`; it may lie before `start`."""
    return (position % r + r - start % r) % r == o


@triton.jit
def key_range(
    start, w, r, o, keys, lowest, highest, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr
):
    """n, full and end: keys of a segment for a tile of queries at positions lowest to highest.

        keys  0 ......... full .......... end ....... n
              no mask     masked          not read

    The segment holds n keys. All queries see the first `full`, which are whole blocks. Some see the first `end`. Of one
    branch these are numbers, of all branches at once tensors of 8.
    """
    n = segment_rows(start, w, r, o, keys)  # [8]
    end = n  # [8]
    full = n  # [8]
    if CAUSAL:
        end = tl.minimum(n, (tl.minimum(highest - start, w - 1) - o + r) // r)  # [8]
        full = tl.minimum(n, (lowest - start - o + r) // r)  # [8]
    is_one_segment = (start <= lowest) & (highest - start < w)  # [8]
    full = tl.where(is_one_segment, full // BLOCK_N * BLOCK_N, 0)  # [8]
    if PADDING:
        full = full * 0  # [8]
    return n, full, end


@triton.jit
def key_rows(first, rate, number, valid, in_dim, inverse, MASKED: tl.constexpr, GATHER: tl.constexpr):
    """Positions of rows of a branch, their slots in storage (int64), and the mask to load them by."""
    key = first + number * rate  # [BLOCK_N]
    slot = key.to(tl.int64)  # [BLOCK_N]
    if GATHER:
        slot = tl.load(inverse + key, mask=valid, other=0).to(tl.int64)  # [BLOCK_N]
    load = in_dim  # [1, BLOCK_D]
    if MASKED:
        load = valid[:, None] & in_dim  # [BLOCK_N, BLOCK_D]
    return key, slot, load


@triton.jit
def block_dropout_factor(seed, drop_below, b, h, branch, segment_length, rate, query, key, j, BLOCK_N: tl.constexpr):
    """`dropout_factor` of a block of keys from number j of a segment on, a multiple of 4: one Philox for four keys."""
    # Keys of a part may begin anywhere among the four. Of 16 keys Triton (3.6 to 3.9) makes a wrong product: it takes
    # the width of the next product's operands from the bytes of the mask and from `join`, 8 numbers of 4 threads.
    if seed.dtype.element_ty == tl.int32 or BLOCK_N < 32:
        return dropout_factor(seed, drop_below, b, h, branch, segment_length, rate, query[:, None], key[None, :])
    else:
        four = (j // 4 + tl.arange(0, BLOCK_N // 4))[None, :]  # [1, BLOCK_N // 4]
        zero = tl.zeros_like(query[:, None] + four)  # [BLOCK_M, BLOCK_N // 4]
        first, second, third, fourth = tl.philox(  # [BLOCK_M, BLOCK_N // 4] each
            tl.load(seed),
            (four + zero).to(tl.uint32),
            (query[:, None] + zero).to(tl.uint32),
            (zero + (h | branch << 16)).to(tl.uint32),
            (zero + b).to(tl.uint32),
        )
        even = tl.join(_is_kept(first, drop_below), _is_kept(third, drop_below))  # [BLOCK_M, BLOCK_N // 4, 2]
        odd = tl.join(_is_kept(second, drop_below), _is_kept(fourth, drop_below))  # [BLOCK_M, BLOCK_N // 4, 2]
        is_kept = tl.join(even, odd).reshape(query.shape[0], BLOCK_N)  # [BLOCK_M, BLOCK_N]
        return tl.where(is_kept != 0, kept_factor(drop_below), 0.0).to(tl.float32)


@triton.jit
def _is_kept(bits, drop_below):
    return (bits.to(tl.int64) >= drop_below).to(tl.int8)


@triton.jit
def kept_factor(drop_below):
    """The factor of weights that dropout keeps."""
    return 1.0 / (1.0 - drop_below * (1.0 / 4294967296.0))


@triton.jit
def dropout_factor(seed, drop_below, b, h, branch, segment_length, rate, query, key):
    """0 for a dropped pair, else 1 / (1 - dropout_p), with the bits of `attention.dropout.keep_mask`."""
    words = tl.load(seed)
    if seed.dtype.element_ty == tl.int32:  # a table that `attention.dropout.named` made
        words = (tl.load(seed + 1).to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
        named_branch = seed + 4 + BRANCH * branch
        branch = tl.load(named_branch)
        segment_length = tl.load(named_branch + 1)
        rate = tl.load(named_branch + 2)
        name = seed + 4 + BRANCH * tl.load(seed + 3) + (b * tl.load(seed + 2) + h) * NAME  # [BLOCK_M, 1]
        b = tl.load(name)  # [BLOCK_M, 1]
        h = tl.load(name + 1)  # [BLOCK_M, 1]
        step = tl.load(name + 2)  # [BLOCK_M, 1]
        query = tl.load(name + 3) + step * query  # [rows, columns]
        key = tl.load(name + 4) + step * (
            key + tl.where(key >= tl.load(name + 5), tl.load(name + 6), 0)
        )  # [rows, columns]
    zero = tl.zeros_like(query + key)  # [rows, columns]
    number = key % segment_length // rate + zero  # [rows, columns]
    first, second, third, fourth = tl.philox(  # [rows, columns] each
        words,
        (number // 4).to(tl.uint32),
        (query + zero).to(tl.uint32),
        (zero + (h | branch << 16)).to(tl.uint32),
        (zero + b).to(tl.uint32),
    )
    which = number % 4  # [rows, columns]
    bits = tl.where(
        which < 2, tl.where(which == 0, first, second), tl.where(which == 2, third, fourth)
    )  # [rows, columns]
    is_kept = bits.to(tl.int64) >= drop_below  # [rows, columns]
    return tl.where(is_kept, kept_factor(drop_below), 0.0).to(tl.float32)
