"""The work of the warp-specialised forward on a block of keys, in two ways.

At head_dim 128 a program has a multiprocessor for itself. The scores of a block are computed beside the product of the
block before with its v (`step`):

    tensor cores   q k0            q k1, p0 v0            q k2, p1 v1            ...
    the group            softmax 0              softmax 1              softmax 2

Up to head_dim 64 a multiprocessor has two programs, with too few registers for that. A block is taken in two halves,
and each product is waited for (`halves`), while the warps of the other program compute.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from hilbert_lib.attention.triton.geometry import LOG2_E
from hilbert_lib.attention.triton.hopper import dropout, order, tiles

# Bits by which scores may pass the maximum that is subtracted. Earlier sums are scaled only where a row grows by more.
# After a few blocks hardly any row does. Half precision holds weights of 2^8 to as many digits as those below 1. The
# largest weight of a row, otherwise exactly 1, is then rounded too.
SLACK = gl.constexpr(8.0)


# States of a stage beside a mask of keys. After the last block the copying warp fills a stage with END alone.
NONE_MASKED, SOME_MASKED, END = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class Ceilings(NamedTuple):
    """A mask of the keys in each stage, as the copying warp writes it."""

    rows: gl.shared_memory_descriptor  # [stages, keys]: the most that scores may be, inf or, of a masked key, -inf
    states: gl.shared_memory_descriptor  # [stages, 1]


@gluon.jit
def ceilings_of(STAGES: gl.constexpr, KEYS: gl.constexpr, dtype: gl.constexpr):
    """Room for the `Ceilings` of a ring. Every dtype of numbers has inf."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Ceilings(
        gl.allocate_shared_memory(dtype, [STAGES, KEYS], FLAT),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
    )


@gluon.jit
def k_free(ring, block):
    """Number of the barrier at which the groups give a tile of k back."""
    return tiles.FIRST_BARRIER + block % ring.k_tiles.shape[0]


@gluon.jit
def v_free(ring, block):
    """Number of the barrier at which the groups give a tile of v back."""
    STAGES: gl.constexpr = ring.v_tiles.shape[0]
    return tiles.FIRST_BARRIER + STAGES + block % STAGES


@gluon.constexpr_function
def in_halves(columns):
    """Whether blocks of keys are taken by `halves`, and not by `step`."""
    return columns <= 64


@gluon.constexpr_function
def keys_at_once(columns, block_n):
    """Number of keys whose scores a group holds at a time."""
    return block_n // 2 if in_halves(columns) else block_n


@gluon.constexpr_function
def whole_first(columns, causal, masked, padding):
    """Whether blocks come as `order` has them: where some are cut off. Not in halves, nor where they are listed."""
    return masked and not in_halves(columns) and not is_listed(causal, padding)


@gluon.constexpr_function
def is_listed(causal, padding):
    """Whether the copying warp alone knows which blocks there are: it leaves those out whose keys are all masked."""
    return padding and not causal


@gluon.jit
def goes_on(ring, ceilings, block):
    """Whether a listed block is there, once that is known."""
    tiles.wait_full(ring.k_full, block)
    return tiles.told(ceilings.states, block) != END


@gluon.jit
def tell_ceilings(ceilings, block, is_kept, kept_count):
    """Write which keys of a block are kept, and how many, for its stage."""
    STAGES: gl.constexpr = ceilings.rows.shape[0]
    row = gl.where(is_kept, float("inf"), float("-inf"))  # [rows]
    ceilings.rows.index(block % STAGES).store(row.to(ceilings.rows.dtype))
    tiles.tell(ceilings.states, block, gl.where(kept_count < is_kept.shape[0], SOME_MASKED, NONE_MASKED))


@gluon.jit
def told_of(ceilings, block, COLUMNS: gl.constexpr):
    """The state and the ceilings of a block of COLUMNS keys, for `without_told`."""
    row = ceilings.rows.index(block % ceilings.rows.shape[0])  # [columns]
    return tiles.told(ceilings.states, block), row.load(gl.SliceLayout(0, tiles.product_layout(COLUMNS)))


@gluon.jit
def without_told(scores, told):
    """Scores of a block of keys, -inf for masked ones, whatever these hold."""
    state, row = told  # scalar, [GROUP_ROWS]
    if state == SOME_MASKED:
        scores = gl.minimum(scores, row.to(gl.float32)[None, :])  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def without_masked(scores, ceilings, block, FIRST: gl.constexpr):
    """Scores of keys from the FIRST of a block on, -inf for masked ones, whatever these hold."""
    STAGES: gl.constexpr = ceilings.rows.shape[0]
    if tiles.told(ceilings.states, block) == SOME_MASKED:
        row = ceilings.rows.index(block % STAGES).slice(FIRST, scores.shape[1], 0)  # [columns]
        row = row.load(gl.SliceLayout(0, scores.type.layout)).to(gl.float32)  # [rows]
        scores = gl.minimum(scores, row[None, :])  # [GROUP_ROWS, columns]
    return scores


@gluon.jit
def nothing(BLOCK_D: gl.constexpr, KEYS: gl.constexpr):
    """Products with v, sums of weights and maxima before the first keys, for scores of KEYS keys at a time."""
    SCORES: gl.constexpr = tiles.product_layout(KEYS)
    acc = gl.zeros([tiles.GROUP_ROWS, BLOCK_D], gl.float32, tiles.product_layout(BLOCK_D))  # [GROUP_ROWS, columns]
    total = _partial_sums(gl.zeros([tiles.GROUP_ROWS, KEYS], gl.float32, SCORES))  # [GROUP_ROWS, 4]
    return acc, total, gl.full([tiles.GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))


@gluon.jit
def pass_over(ring, block):
    """Give back a block of keys that this group does not see."""
    tiles.wait_full(ring.k_full, block)
    tiles.arrive(k_free(ring, block))
    tiles.wait_full(ring.v_full, block)
    tiles.arrive(v_free(ring, block))


@gluon.jit
def halves(
    acc, total, m, q_tile, ring, ceilings, numbers, drops, block, scale, seen_count, left, MASKED: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """A block of keys by halves. The group sees the first `left` keys; with MASKED a row the first `seen_count`."""
    acc, total, m = _half(
        0, acc, total, m, q_tile, ring, ceilings, numbers, drops, block, scale, seen_count, MASKED, PADDING, DROPOUT
    )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    if left > tiles.rows_of(ring.k_tiles.shape) // 2:
        acc, total, m = _half(
            1, acc, total, m, q_tile, ring, ceilings, numbers, drops, block, scale, seen_count, MASKED, PADDING, DROPOUT
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    tiles.arrive(k_free(ring, block))
    tiles.arrive(v_free(ring, block))
    return acc, total, m


@gluon.jit
def _half(
    NUMBER: gl.constexpr, acc, total, m, q_tile, ring, ceilings, numbers, drops, block, scale, seen_count,
    MASKED: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and product with v of half a block, each waited for."""
    HALF: gl.constexpr = tiles.rows_of(ring.k_tiles.shape) // 2
    if NUMBER == 0:
        tiles.wait_full(ring.k_full, block)
    k_rows = tiles.tile_of_stage(ring.k_tiles, block).slice(NUMBER * HALF, HALF, 0)  # [HALF, BLOCK_D]
    zeros = gl.zeros([tiles.GROUP_ROWS, HALF], gl.float32, tiles.product_layout(HALF))  # [GROUP_ROWS, HALF]
    score_token = warpgroup_mma(
        q_tile, k_rows.permute((1, 0)), zeros, use_acc=False, is_async=True
    )  # [GROUP_ROWS, HALF]
    if DROPOUT:
        kept = dropout.kept_columns(drops, numbers, block, NUMBER * HALF, HALF)  # [GROUP_ROWS, 4]
    scores = warpgroup_mma_wait(0, deps=[score_token])  # [GROUP_ROWS, HALF]
    if PADDING:
        scores = without_masked(scores, ceilings, block, NUMBER * HALF)  # [GROUP_ROWS, HALF]
    if MASKED:
        scores = order.masked(scores, seen_count - NUMBER * HALF)  # [GROUP_ROWS, HALF]
    weights, decay, m, total = softmax(
        scores, m, total, scale
    )  # [GROUP_ROWS, HALF], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
    if DROPOUT:
        weights = dropout.without_dropped(weights, kept, False)  # [GROUP_ROWS, HALF]
    acc = scaled_if_any(acc, decay)  # [GROUP_ROWS, BLOCK_D]
    if NUMBER == 0:
        tiles.wait_full(ring.v_full, block)
    v_rows = tiles.tile_of_stage(ring.v_tiles, block).slice(NUMBER * HALF, HALF, 0)  # [HALF, BLOCK_D]
    value_token = warpgroup_mma(
        as_operand(weights, q_tile.dtype, acc.shape[1]), v_rows, acc, is_async=True
    )  # [GROUP_ROWS, BLOCK_D]
    return warpgroup_mma_wait(0, deps=[value_token]), total, m


@gluon.jit
def step(
    acc, total, m, weights, q_tile, ring, ceilings, numbers, drops, sight, block, scale, queries,
    COUNTED: gl.constexpr, CUT: gl.constexpr, CAUSAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of a block of keys, while the block before is multiplied with its v.

    The wait for that product stays behind the softmax: 8 % less time than where the compiler puts it. Earlier sums are
    scaled only where a row needs it: 2 to 3 % less (reports/HISTORY.md).

    sight: with CUT the group's `order.Sight`, with COUNTED the number of keys that each row sees.
    """
    score_token = start_scores(q_tile, ring, block)  # [GROUP_ROWS, KEYS]
    value_token = values(weights, acc, ring, block - 1)  # [GROUP_ROWS, BLOCK_D]
    if DROPOUT:
        kept = kept_of_block(drops, numbers, block, ring)  # [rows, columns]
    scores = warpgroup_mma_wait(1, deps=[score_token])  # [GROUP_ROWS, KEYS]
    if PADDING:
        scores = without_masked(scores, ceilings, block, 0)  # [GROUP_ROWS, KEYS]
    if CUT:
        scores = order.as_seen(scores, sight, block, CAUSAL)  # [GROUP_ROWS, KEYS]
    if COUNTED:
        scores = order.masked(scores, sight)  # [GROUP_ROWS, KEYS]
    new_weights, decay, m, total = softmax(
        scores, m, total, scale
    )  # [GROUP_ROWS, KEYS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
    if DROPOUT:
        new_weights = dropout.without_dropped(new_weights, kept, False)  # [GROUP_ROWS, KEYS]
    tiles.arrive_behind(k_free(ring, block), total, queries)
    acc = warpgroup_mma_wait(0, deps=[value_token])  # [GROUP_ROWS, BLOCK_D]
    tiles.arrive(v_free(ring, block - 1))
    acc = scaled_if_any(acc, decay)  # [GROUP_ROWS, BLOCK_D]
    return acc, total, m, as_operand(new_weights, q_tile.dtype, acc.shape[1])


@gluon.jit
def start_scores(q_tile, ring, block):
    """The product of queries and a block of keys, started once the keys are there."""
    KEYS: gl.constexpr = tiles.rows_of(ring.k_tiles.shape)
    tiles.wait_full(ring.k_full, block)
    zeros = gl.zeros([tiles.GROUP_ROWS, KEYS], gl.float32, tiles.product_layout(KEYS))  # [GROUP_ROWS, KEYS]
    return warpgroup_mma(
        q_tile, tiles.tile_of_stage(ring.k_tiles, block).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def kept_of_block(drops, numbers, block, ring):
    """The bits of what dropout keeps of a block of keys, whose stage is full and not given back."""
    return dropout.kept_columns(drops, numbers, block, 0, tiles.rows_of(ring.k_tiles.shape))


@gluon.jit
def start_scores_on(bias_tile, q_tile, ring, block):
    """The same, added to a tile of bias."""
    tiles.wait_full(ring.k_full, block)
    return warpgroup_mma(q_tile, tiles.tile_of_stage(ring.k_tiles, block).permute((1, 0)), bias_tile, is_async=True)


@gluon.jit
def scores_alone(
    q_tile, ring, ceilings, numbers, drops, sight, block, CUT: gl.constexpr, CAUSAL: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a block of keys, with no other product beside them, and what dropout keeps of them."""
    score_token = start_scores(q_tile, ring, block)  # [GROUP_ROWS, KEYS]
    kept = block
    if DROPOUT:
        kept = kept_of_block(drops, numbers, block, ring)  # [rows, columns]
    scores = warpgroup_mma_wait(0, deps=[score_token])  # [GROUP_ROWS, KEYS]
    if PADDING:
        scores = without_masked(scores, ceilings, block, 0)  # [GROUP_ROWS, KEYS]
    if CUT:
        scores = order.as_seen(scores, sight, block, CAUSAL)  # [GROUP_ROWS, KEYS]
    tiles.arrive(k_free(ring, block))
    return scores, kept


@gluon.jit
def values(weights, acc, ring, block):
    """The product of a block's weights with its v, added to acc and started."""
    tiles.wait_full(ring.v_full, block)
    return warpgroup_mma(weights, tiles.tile_of_stage(ring.v_tiles, block), acc, is_async=True)


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, BLOCK_D: gl.constexpr):
    """Weights rounded and in the layout of an operand of the product with v."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, tiles.product_layout(BLOCK_D), 2))


@gluon.jit
def softmax(scores, m, total, scale):
    """Weights, decay of earlier sums, the new maximum (scaled, to base 2) and the partial sums."""
    largest, finite = subtracted(gl.max(scores, 1), m, scale)  # [GROUP_ROWS] each
    weights = gl.exp2(scores * (scale * LOG2_E) - finite[:, None])  # [GROUP_ROWS, columns]
    decay, total = joined(weights, finite, m, total)  # [GROUP_ROWS], [GROUP_ROWS, 4]
    return weights, decay, largest, total


@gluon.jit
def subtracted(largest, m, scale):
    """The new maximum and the number subtracted from scores, which is 0 while a row has no key.

    A row whose maximum grows by at most SLACK keeps it: its earlier sums then stay as they are.
    """
    largest = gl.maximum(m, largest * (scale * LOG2_E))  # [GROUP_ROWS]
    largest = gl.where(largest - m > SLACK, largest, m)  # [GROUP_ROWS]; m + SLACK would round where m is large
    return largest, gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def joined(weights, finite, m, total):
    """Decay of earlier sums, and the partial sums with it."""
    # Both are rounded already: exactly 1 where they are equal. Rounding here would add up over the blocks.
    decay = gl.exp2(m - finite)  # [GROUP_ROWS]
    row_decay = gl.convert_layout(decay, gl.SliceLayout(1, total.type.layout))  # [GROUP_ROWS]
    return decay, total * row_decay[:, None] + _partial_sums(weights)


@gluon.jit
def normalized(acc, total, m):
    """Output and lse; 0 and -inf for a row without keys."""
    total = gl.convert_layout(gl.sum(total, 1), m.type.layout)  # [GROUP_ROWS]
    denominator = gl.where(total == 0.0, 1.0, total)  # [GROUP_ROWS]; NaN stays NaN
    lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(denominator)) * tiles.LN_2)  # [GROUP_ROWS]
    inverse = gl.convert_layout(1.0 / denominator, gl.SliceLayout(1, acc.type.layout))  # [GROUP_ROWS]
    return acc * inverse[:, None], lse


@gluon.jit
def _partial_sums(weights):
    """[rows, 4]: the sum in each of the four threads of a row, without communication."""
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([rows, columns // 8, 4, 2]), 3), 1)


@gluon.jit
def scaled_if_any(acc, decay):
    """acc times the decay of its rows. A warp whose decays are all 1 skips it; Gluon's `if` is for a whole group.

    A thread holds two rows, two elements of each in turn.
    """
    ELEMENTS: gl.constexpr = acc.shape[1] // 2  # of a thread
    factor = gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]  # [GROUP_ROWS, 1]
    return gl.inline_asm_elementwise(
        _scaled_if_any_asm(ELEMENTS), _constraints(ELEMENTS), [acc, factor],
        dtype=gl.float32, is_pure=True, pack=ELEMENTS,
    )  # fmt: skip


@gluon.constexpr_function
def _constraints(n):
    # Results take the registers of acc, since they are written before the last factor is read.
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.constexpr_function
def _scaled_if_any_asm(n):
    # Results and acc are $0 to $n-1; acc's own numbers follow, and then the factors.
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
        .reg .pred one, other;
        setp.neu.f32 one, ${2 * n}, 0f3F800000; setp.neu.f32 other, ${2 * n + 2}, 0f3F800000;
        or.pred one, one, other; vote.sync.any.pred one, one, 0xffffffff;
        @!one bra same;
        {products}
        same:
    }}"""
