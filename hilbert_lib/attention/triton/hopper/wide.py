"""Rows of more than 128 columns as two parts, and the steps of two groups of warps that share a tile of 64 of them.

    columns of a row   | low: 0 to 127 | high: from 128 on, 64 or 128, zero past head_dim |

A tile is of two tensors, x and y, and each box is of two others, a and b, in rings of stages. One group computes
weights from x a, the other slopes from y b and those weights. What either adds to a gradient is the product of its
weights or slopes and a box, which comes one box late:

    weights   x a0 | p0 |       x a1, p0 b0 | p1 |        ...
    slopes    y b0 |    | slopes0 |   y b1, slopes0 a0 |  | slopes1 | ...

All barriers are of `mbarrier`. A group joins its warps before it arrives, so that none of them still reads what it
gives back. `shared` is a kernel's own NamedTuple with these names: x, y, a, b, lse_rows, delta_rows, weights, and the
barriers a_full, a_free, b_full, b_free, weights_full and weights_free.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton.geometry import LOG2_E, kept_factor
from hilbert_lib.attention.triton.hopper import boxes, tiles

LOW = gl.constexpr(128)  # columns of the first part


class Parts(NamedTuple):
    """Tiles in shared memory of both parts of a tensor."""

    low: gl.shared_memory_descriptor  # [tiles, *box, 1, 128]
    high: gl.shared_memory_descriptor  # [tiles, *box, 1, BLOCK_E]


@gluon.jit
def allocated_rows(low, COUNT: gl.constexpr, BLOCK_E: gl.constexpr):
    """Room for tiles of 64 rows of a sequence; low: a descriptor of the low part of one."""
    return Parts(
        gl.allocate_shared_memory(low.dtype, [COUNT, 1, tiles.GROUP_ROWS, 1, 1, LOW], low.layout),
        gl.allocate_shared_memory(low.dtype, [COUNT, 1, tiles.GROUP_ROWS, 1, 1, BLOCK_E], low.layout),
    )


@gluon.jit
def read(head, stride, row, parts, number, HEAD_DIM: gl.constexpr):
    """Read rows of a head into tile `number`, zeros where `row` is -1. Products see them."""
    _read_part(head, stride, row, boxes.rows_of(parts.low, number), 0, HEAD_DIM)
    _read_part(head, stride, row, boxes.rows_of(parts.high, number), LOW, HEAD_DIM)
    fence_async_shared()


@gluon.jit
def _read_part(head, stride, row, tile, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    layout: gl.constexpr = tiles.row_layout(tile.shape[1])
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]  # [GROUP_ROWS, 1]
    dims = FIRST + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]  # [1, columns]
    mask = (row >= 0) & (dims < HEAD_DIM)  # [GROUP_ROWS, columns]
    tile.store(gl.load(head + row.to(gl.int64) * stride + dims, mask=mask, other=0.0))


@gluon.jit
def write(low, high, head, stride, row, HEAD_DIM: gl.constexpr, READ_PARTIAL: gl.constexpr):
    """Write both parts of a result to rows of a head, of which those numbered -1 are none.

    With READ_PARTIAL they are added to those in memory.
    """
    _write_part(low, head, stride, row, 0, HEAD_DIM, READ_PARTIAL)
    _write_part(high, head, stride, row, LOW, HEAD_DIM, READ_PARTIAL)


@gluon.jit
def _write_part(part, head, stride, row, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, READ_PARTIAL: gl.constexpr):
    layout: gl.constexpr = part.type.layout
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))[:, None]  # [GROUP_ROWS, 1]
    dims = FIRST + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))[None, :]  # [1, columns]
    written = (row >= 0) & (dims < HEAD_DIM)  # [GROUP_ROWS, columns]
    at = head + row.to(gl.int64) * stride + dims  # [GROUP_ROWS, columns]
    if READ_PARTIAL:
        part += gl.load(at, mask=written, other=0.0).to(gl.float32)
    gl.store(at, part.to(head.dtype.element_ty), mask=written)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, whose phases end when so many have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(barriers.index(number), count=ARRIVALS)
    return barriers


@gluon.jit
def give_back(free, block):
    """Give the stage of a block back."""
    STAGES: gl.constexpr = free.shape[0]
    mbarrier.arrive(free.index(block % STAGES))


@gluon.jit
def fetched(low, high, corner, head_at, parts, full, stage):
    """Copy both parts of a box to one of the tiles; the barrier expects them."""
    boxes.fetch(low, [corner[0], corner[1], corner[2], head_at, 0], full, parts.low.index(stage))
    boxes.fetch(high, [corner[0], corner[1], corner[2], head_at, LOW], full, parts.high.index(stage))


@gluon.jit
def fetch(low, high, corner, head_at, ring, all_full, free, block):
    """Copy both parts of a box to its stage of a ring, once the stage was given back."""
    STAGES: gl.constexpr = free.shape[0]
    if block >= STAGES:
        tiles.wait_full(free, block - STAGES)
    full = all_full.index(block % STAGES)
    mbarrier.expect(full, low.block_type.nbytes + high.block_type.nbytes)
    fetched(low, high, corner, head_at, ring, full, block % STAGES)


@gluon.jit
def nothing(COLUMNS: gl.constexpr):
    """A product before its first summand."""
    return gl.zeros([tiles.GROUP_ROWS, COLUMNS], gl.float32, tiles.product_layout(COLUMNS))


@gluon.jit
def product(tile, ring, block, NUMBER: gl.constexpr = 0):
    """The product of tile NUMBER and a box, started."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    of_low = warpgroup_mma(
        boxes.rows_of(tile.low, NUMBER), tiles.tile_of_stage(ring.low, block).permute((1, 0)), nothing(ROWS),
        use_acc=False, is_async=True,
    )  # [GROUP_ROWS, GROUP_ROWS]  # fmt: skip
    return warpgroup_mma(
        boxes.rows_of(tile.high, NUMBER), tiles.tile_of_stage(ring.high, block).permute((1, 0)), of_low, is_async=True
    )


@gluon.jit
def _before(block, first_block):
    """The box before. The first one of a tile stands in for it, and is multiplied by zeros."""
    return tiles.counted(gl.where(block > first_block, block - 1, block))


@gluon.jit
def started(operand, low, high, ring, block, BLOCK_E: gl.constexpr):
    """The products of weights or slopes and a box, added to both parts of a gradient and started."""
    # The operand's layout is the same for products of any number of columns.
    of_high = gl.convert_layout(
        operand, gl.DotOperandLayout(0, tiles.product_layout(BLOCK_E), 2)
    )  # [GROUP_ROWS, GROUP_ROWS]
    low = warpgroup_mma(operand, tiles.tile_of_stage(ring.low, block), low, is_async=True)  # [GROUP_ROWS, LOW]
    high = warpgroup_mma(of_high, tiles.tile_of_stage(ring.high, block), high, is_async=True)  # [GROUP_ROWS, BLOCK_E]
    return low, high


@gluon.jit
def give_both_back(shared, block, first_block):
    """Give both stages of the box before back: what this group reads of them it has read."""
    if block > first_block:
        give_back(shared.a_free, block - 1)
        give_back(shared.b_free, block - 1)


@gluon.jit
def last(operand, low, high, ring, full, shared, block, first_block, BLOCK_E: gl.constexpr):
    """Both parts of a gradient after the last box, where there is one."""
    if block > first_block:
        tiles.wait_full(full, block - 1)
        low_token, high_token = started(
            operand, low, high, ring, tiles.counted(block - 1), BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        low, high = warpgroup_mma_wait(0, deps=[low_token, high_token])  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        give_both_back(shared, block, first_block)
    return low, high


@gluon.jit
def begun(operand, low, high, ring, full, tile, other_ring, other_full, block, first_block, BLOCK_E: gl.constexpr):
    """The products of a step, started: of the box before, added to a gradient, and of the tile and this box."""
    before = _before(block, first_block)
    tiles.wait_full(full, before)
    low, high = started(operand, low, high, ring, before, BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
    tiles.wait_full(other_full, block)
    return low, high, product(tile, other_ring, block)


@gluon.jit
def ended(low, high, product_token, shared, block, first_block):
    """Their results: both parts of the gradient, and the product of the tile and this box."""
    low, high = warpgroup_mma_wait(2, deps=[low, high])  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
    give_both_back(shared, block, first_block)
    return low, high, warpgroup_mma_wait(0, deps=[product_token])


@gluon.jit
def weights_of(scores, scale, shared, block):
    """Weights of scores of keys (rows) and a box of queries (columns)."""
    stage = block % shared.lse_rows.shape[0]
    lse_row = shared.lse_rows.index(stage).load(gl.SliceLayout(0, scores.type.layout))  # [GROUP_ROWS]
    return gl.exp2(scores * (scale * LOG2_E) - lse_row[None, :])


@gluon.jit
def hand_over(weights, shared, block):
    """Hand weights to the other group, once it has taken those of the box before."""
    if block > 0:
        tiles.wait_full(shared.weights_free, block - 1)
    shared.weights.store(weights)
    mbarrier.arrive(shared.weights_full.index(0))


@gluon.jit
def slopes_of(products, shared, block, drop_below, DROPOUT: gl.constexpr):
    """Slopes of the weights that the other group hands over, from products of y and a box of queries (columns).

    With DROPOUT weights with a minus were dropped.
    """
    stage = block % shared.delta_rows.shape[0]
    delta_row = shared.delta_rows.index(stage).load(gl.SliceLayout(0, products.type.layout))  # [GROUP_ROWS]
    if DROPOUT:
        products = products * kept_factor(drop_below)  # [GROUP_ROWS, GROUP_ROWS]
        tiles.wait_full(shared.weights_full, block)
        weights = shared.weights.load(products.type.layout)  # [GROUP_ROWS, GROUP_ROWS]
        products = gl.where(weights < 0.0, 0.0, products) - delta_row[None, :]  # [GROUP_ROWS, GROUP_ROWS]
        slopes = gl.abs(weights) * products  # [GROUP_ROWS, GROUP_ROWS]
    else:
        products = products - delta_row[None, :]  # [GROUP_ROWS, GROUP_ROWS]
        tiles.wait_full(shared.weights_full, block)
        slopes = shared.weights.load(products.type.layout) * products  # [GROUP_ROWS, GROUP_ROWS]
    mbarrier.arrive(shared.weights_free.index(0))
    return slopes


@gluon.jit
def hand_rows_over(lse_row, delta_row, shared, block):
    """Hand lse (to base 2) and delta of a box of queries to both groups."""
    STAGES: gl.constexpr = shared.a_full.shape[0]
    B_STAGES: gl.constexpr = shared.b_full.shape[0]
    stage = block % STAGES
    shared.lse_rows.index(stage).store(lse_row)
    mbarrier.arrive(shared.a_full.index(stage))
    stage = block % B_STAGES
    shared.delta_rows.index(stage).store(delta_row)
    mbarrier.arrive(shared.b_full.index(stage))
