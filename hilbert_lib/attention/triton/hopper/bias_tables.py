"""Kernels around those by boxes, where a call has a bias: they make the tables and the gradient in four launches.

    table_kernel       the bias              -> padded tables (`hopper.bias`), and zeros for sums and bounds
    bound_kernel       out, dout, lse, v     -> delta, and the bounds of each head
    gradient_kernel    sums, bounds          -> the gradient of the bias

A pair's gradient is weight * (dout v - delta). A weight is exp2(score - lse): at most 1, but for the rounding of these
two, which grows with lse. So of a head a pair's gradient is at most

    largest |dout| * excess * largest |v| + largest |delta| * excess        excess = exp2(|lse| * 2^-20), by row

Past an lse of 2^24 a float32 has no fraction, a weight may be anything, and the gradient of the head is NaN.

These three are the head's bounds. They are kept as the bits of their float32: bits of numbers that are not negative are
in the order of the numbers, and NaN comes last. The largest of whole numbers is the same in any order of programs.
"""

import triton
import triton.language as tl

SIZES = ["entries0", "entries1", "entries2", "margin0", "margin1", "margin2", "sides1", "sides2", "places"]
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
# Squares of values below 1e-19 are lost in float32. In a row of up to 128 values they are a norm of less than this.
LOST = tl.constexpr(2.0**-59)
# Of lse and a score, to base 2 and where they are equal. Each is rounded a few times, by 2^-24 of itself at most.
ROUNDING = tl.constexpr(2.0**-20)
LARGEST_LSE = tl.constexpr(2.0**24)


@triton.jit(do_not_specialize=SIZES)
def table_kernel(
    bias, table, flipped, sums, bounds, scale,
    entries0, entries1, entries2, margin0, margin1, margin2, sides1, sides2, places,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of places of a head's padded table: bias over the scale, and 0 in the margins.

    What would leave float32 becomes its largest number. For the backward there are more: the table flipped on every
    axis, and zeros.
    """
    h = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = place < places  # [BLOCK]
    e0 = place // (sides1 * sides2) - margin0  # [BLOCK]
    e1 = place // sides2 % sides1 - margin1  # [BLOCK]
    e2 = place % sides2 - margin2  # [BLOCK]
    is_entry = exists & (e0 >= 0) & (e0 < entries0)  # [BLOCK]
    is_entry &= (e1 >= 0) & (e1 < entries1) & (e2 >= 0) & (e2 < entries2)
    entry = h * (entries0 * entries1 * entries2) + (e0 * entries1 + e1) * entries2 + e2  # [BLOCK]
    given = tl.load(bias + entry, mask=is_entry, other=0.0).to(tl.float32)  # [BLOCK]
    scaled = tl.minimum(tl.maximum(given / scale, -LARGEST), LARGEST)  # [BLOCK]
    scaled = tl.where(tl.abs(given) <= LARGEST, scaled, given)  # [BLOCK]; infinity and NaN stay
    tl.store(table + h * places + place, scaled, mask=exists)
    if flipped is not None:
        tl.store(flipped + h * places + (places - 1 - place), scaled, mask=exists)
        tl.store(sums + h * places + place, tl.zeros([BLOCK], tl.int64), mask=exists)
        number = tl.arange(0, 4)  # [4]
        is_bound = (number < 3) & (tl.program_id(0) == 0)  # [4]
        tl.store(bounds + h * 3 + number, tl.zeros([4], tl.int32), mask=is_bound)


@triton.jit(do_not_specialize=["queries", "keys", "heads", "group"])
def bound_kernel(
    out, dout, lse, dlse, v, padding, delta, bounds,
    stride_db, stride_dn, stride_dh, stride_vb, stride_vn, stride_vh, queries, keys, heads, group,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """delta of a run of queries of a head, as `delta_kernel` has it, and bounds of these and of as many rows of v.

    Rows of v that are padding may hold anything. dlse is 0 in rows without keys.
    """
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    exists = row < queries  # [BLOCK_M]
    mask = exists[:, None] & in_dim  # [BLOCK_M, BLOCK_D]
    out_rows = ((b * queries + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    o = tl.load(out + out_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    d_rows = b * stride_db + row * stride_dn + h * stride_dh  # [BLOCK_M]
    do = tl.load(dout + d_rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    products = tl.sum(o * do, 1)  # [BLOCK_M]
    scalars = (b * heads + h) * queries + row  # [BLOCK_M]
    if dlse is not None:
        products -= tl.load(dlse + scalars, mask=exists, other=0.0)
    tl.store(delta + scalars, products, mask=exists)
    size = tl.abs(tl.load(lse + scalars, mask=exists, other=0.0))  # [BLOCK_M]
    # Rows without keys have infinity, and those that a part of a grid does not compute may have NaN.
    size = tl.where(size < float("inf"), size, 0.0)  # [BLOCK_M]
    excess = tl.where(size <= LARGEST_LSE, tl.exp2(size * ROUNDING), float("inf"))  # [BLOCK_M]
    is_key = row < keys  # [BLOCK_M]
    if PADDING:
        is_key &= tl.load(padding + b * keys + row, mask=is_key, other=1) == 0
    v_rows = b * stride_vb + row * stride_vn + h // group * stride_vh  # [BLOCK_M]
    values = tl.load(
        v + v_rows[:, None] + dims[None, :], mask=is_key[:, None] & in_dim, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    values = values.to(tl.float32)  # [BLOCK_M, BLOCK_D]
    of_head = bounds + h * 3
    tl.atomic_max(of_head, _largest(tl.sqrt(tl.sum(do * do, 1)), excess), sem="relaxed")
    tl.atomic_max(of_head + 1, _largest(tl.sqrt(tl.sum(values * values, 1)), 1.0), sem="relaxed")
    tl.atomic_max(of_head + 2, _largest(products, excess), sem="relaxed")


@triton.jit
def _largest(values, factors):
    """Bits of the largest product of float32, without signs. A value of 0 stays 0, though its factor is infinite."""
    products = tl.where(values == 0.0, 0.0, values * factors)  # [BLOCK_M]
    return tl.max(products.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def unit_of(of_dout, of_v, of_delta):
    """Units in which the gradient of a head is summed: a power of two, from the head's bounds.

    A pair's gradient is below 2^24 units. A tile has 128 queries, each of which has an entry once at most: so their sum
    stays in 32 bits. Weights and products are rounded, for which 2 % are added.
    """
    norms = (of_dout.to(tl.float32, bitcast=True) + LOST) * (of_v.to(tl.float32, bitcast=True) + LOST)
    bound = 1.02 * (norms + of_delta.to(tl.float32, bitcast=True))
    exponent = bound.to(tl.int32, bitcast=True) >> 23  # the bound is below 2^(exponent - 126)
    unit = (tl.minimum(24 + 126 - exponent, 127) + 127) << 23  # bits of 2^(24 + 126 - exponent)
    return tl.where(exponent < 255, unit.to(tl.float32, bitcast=True), float("nan"))


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    sums, bounds, dbias,
    entries0, entries1, entries2, margin0, margin1, margin2, sides1, sides2, places,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A run of entries of the gradient of a head's bias."""
    h = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = entry < entries0 * entries1 * entries2  # [BLOCK]
    p0 = entry // (entries1 * entries2) + margin0  # [BLOCK]
    p1 = entry // entries2 % entries1 + margin1  # [BLOCK]
    p2 = entry % entries2 + margin2  # [BLOCK]
    total = tl.load(sums + h * places + (p0 * sides1 + p1) * sides2 + p2, mask=exists, other=0)  # [BLOCK]
    of_head = bounds + h * 3
    unit = unit_of(tl.load(of_head), tl.load(of_head + 1), tl.load(of_head + 2))
    gradient = (total.to(tl.float64) / unit.to(tl.float64)).to(tl.float32)  # [BLOCK]
    to = dbias + h * (entries0 * entries1 * entries2) + entry  # [BLOCK]
    tl.store(to, gradient.to(dbias.dtype.element_ty), mask=exists)
