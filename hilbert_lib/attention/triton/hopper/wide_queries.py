"""The backward's dq for Hopper at a head_dim of 129 to 192, with the same bits every time: one program for 128 queries.

It is the kernel of `queries`, with rows in two parts of columns as in `wide`: 192 columns are not padded to 256. So a
group has registers left, and a block has 64 keys. A product of 64 keys takes as many cycles as its reads of shared
memory. With 32 keys it would wait for these reads.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import dropout, forward, order, steps, tiles, wide
from hilbert_lib.attention.triton.hopper.wide import LOW


class Shared(NamedTuple):
    """Shared memory of a program: queries and dout of both groups, and rings of blocks of k and v."""

    q: wide.Parts  # [groups, ...]
    d: wide.Parts
    k: wide.Parts  # [stages, ...]
    v: wide.Parts  # [V_STAGES, ...]
    k_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor


@gluon.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def wide_dq_kernel(
    q, dout, lse, delta, dq,
    k0, v0, k1, v1, k2, v2, k3, v3, k4, v4, k5, v5,
    k0_high, v0_high, k1_high, v1_high, k2_high, v2_high, k3_high, v3_high, k4_high, v4_high, k5_high, v5_high,
    branches, offsets, branch_ids, items, classes, seed,
    scale, drop_below, stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh,
    first_query, queries, keys, heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, READ_PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dq of one tile of 128 queries, as of `queries.dq_kernel`. Descriptors are those of `wide_keys`, of k and v."""
    shared = Shared(
        wide.allocated_rows(k0, 2, BLOCK_E),
        wide.allocated_rows(k0, 2, BLOCK_E),
        wide.allocated_rows(k0, STAGES, BLOCK_E),
        wide.allocated_rows(k0, V_STAGES, BLOCK_E),
        wide.barriers(STAGES, 2 if DROPOUT else 1),
        wide.barriers(STAGES, 2),
        wide.barriers(V_STAGES, 1),
        wide.barriers(V_STAGES, 2),
    )
    numbers = shared.k_full  # [STAGES, 1]; this stands in for them without dropout
    if DROPOUT:
        ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        fours = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers_of_branches = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers = dropout.Numbers(fours, numbers_of_branches)
    tables = (branches, offsets, items, classes)
    sizes, grid = (first_query, queries, keys, heads, group), (chunk, stride, chunks, phases, count)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_differentiate, (
            0, q, dout, lse, delta, dq, tables, shared, numbers, seed, scale, drop_below,
            stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid,
            HEAD_DIM, BLOCK_E, N_BRANCHES, CAUSAL, READ_PARTIAL, DROPOUT,
        )),
        (_differentiate, (
            1, q, dout, lse, delta, dq, tables, shared, numbers, seed, scale, drop_below,
            stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid,
            HEAD_DIM, BLOCK_E, N_BRANCHES, CAUSAL, READ_PARTIAL, DROPOUT,
        )),
        (_copy, (
            (k0, k1, k2, k3, k4, k5), (v0, v1, v2, v3, v4, v5),
            (k0_high, k1_high, k2_high, k3_high, k4_high, k5_high),
            (v0_high, v1_high, v2_high, v3_high, v4_high, v5_high),
            tables, branch_ids, shared, numbers, sizes, grid, BLOCK_E, N_BRANCHES, CAUSAL, DROPOUT,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _copy(
    k_low, v_low, k_high, v_high, tables, branch_ids, shared, numbers, sizes, grid, BLOCK_E: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Copy blocks of k and v into the rings, in the order in which the groups take them."""
    b, _, tile, branches, _place = forward.tile_of(tables, sizes, grid, False, False)
    keys, g = sizes[2], branches[3]
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
        if (tile.size > 0) & inside:
            n, _, end = geometry.key_range(
                start, w, r, o, keys, tile.lowest, tile.highest, tiles.GROUP_ROWS, CAUSAL, False
            )
            row, residue = tiles.segment_coordinates(start + o, r, n, keys)
            branch = i
            if DROPOUT:
                branch = gl.load(branch_ids + i)
            if BLOCK_E == LOW:
                block = _copy_segment(
                    k_low[i], k_low[i], v_low[i], v_low[i], shared, numbers, block, b, row, end, residue, g, branch,
                    DROPOUT,
                )  # fmt: skip
            else:
                block = _copy_segment(
                    k_low[i], k_high[i], v_low[i], v_high[i], shared, numbers, block, b, row, end, residue, g, branch,
                    DROPOUT,
                )  # fmt: skip


@gluon.jit
def _copy_segment(
    k_low, k_high, v_low, v_high, shared, numbers, block, b, row, end, residue, g, branch, DROPOUT: gl.constexpr
):
    """Copy the first `end` keys of a segment."""
    for j in range(0, end, tiles.GROUP_ROWS):
        corner = (b, row + j, residue)
        wide.fetch(k_low, k_high, corner, g, shared.k, shared.k_full, shared.k_free, block)
        if DROPOUT:
            tiles.tell(numbers.fours, block, j // 4)
            tiles.tell(numbers.branches, block, branch)
            mbarrier.arrive(shared.k_full.index(block % shared.k_full.shape[0]))
        wide.fetch(v_low, v_high, corner, g, shared.v, shared.v_full, shared.v_free, block)
        block = tiles.counted(block + 1)
    return block


@gluon.jit
def _differentiate(
    NUMBER: gl.constexpr, q, dout, lse, delta, dq, tables, shared, numbers, seed, scale, drop_below, stride_qb,
    stride_qn, stride_qh, stride_db, stride_dn, stride_dh, sizes, grid, HEAD_DIM: gl.constexpr, BLOCK_E: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, READ_PARTIAL: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of the tile against every block of keys."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    b, h, tile, branches, _place = forward.tile_of(tables, sizes, grid, False, False)
    first_query, queries, keys, heads, _group = sizes
    if tile.size > NUMBER * ROWS:
        position = _positions_of(tile, NUMBER)  # [GROUP_ROWS]
        row = gl.where(position >= 0, position - first_query, -1)  # [GROUP_ROWS]
        q_head = q + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
        d_head = dout + b.to(gl.int64) * stride_db + h.to(gl.int64) * stride_dh
        wide.read(q_head, stride_qn, row, shared.q, NUMBER, HEAD_DIM)
        wide.read(d_head, stride_dn, row, shared.d, NUMBER, HEAD_DIM)
        query = gl.convert_layout(position, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
        lse_rows = (b.to(gl.int64) * heads + h) * queries + query - first_query  # [GROUP_ROWS]
        # Weight 0 where a query is not there or saw no key.
        lse_row = gl.load(lse + lse_rows, mask=query >= 0, other=float("inf"))  # [GROUP_ROWS]
        lse_row = gl.where(lse_row == float("-inf"), float("inf"), lse_row) * geometry.LOG2_E  # [GROUP_ROWS]
        delta_row = gl.load(delta + lse_rows, mask=query >= 0, other=0.0)  # [GROUP_ROWS]
        last = gl.minimum(tile.size, (NUMBER + 1) * ROWS) - 1
        own_lowest = gl.maximum(tile.lowest, geometry.tile_positions(tile, NUMBER * ROWS))
        own_highest = gl.minimum(tile.highest, geometry.tile_positions(tile, last))
        drops = scale
        if DROPOUT:
            _acc, no_total, _m = steps.nothing(ROWS, ROWS)  # [GROUP_ROWS, GROUP_ROWS], [GROUP_ROWS, 4], [GROUP_ROWS]
            drops = forward.drops_of(query, no_total, seed, drop_below, b, h)
        low, high = wide.nothing(LOW), wide.nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if inside:
                n, full, end = geometry.key_range(start, w, r, o, keys, own_lowest, own_highest, ROWS, CAUSAL, False)
                full = gl.maximum(0, gl.minimum(full, end))
                seen_count = order.seen_keys(n, start + o, r, query, CAUSAL)  # [GROUP_ROWS]
                low, high, block = _walk(
                    NUMBER, low, high, lse_row, delta_row, shared, numbers, drops, block, full, end, seen_count, scale,
                    drop_below, BLOCK_E, DROPOUT,
                )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], scalar  # fmt: skip
                if CAUSAL:
                    _n, _full, tile_end = geometry.key_range(
                        start, w, r, o, keys, tile.lowest, tile.highest, ROWS, CAUSAL, False
                    )
                    block = _pass_over(shared, block, gl.cdiv(tile_end, ROWS) - gl.cdiv(end, ROWS))
        row = gl.where(_positions_of(tile, NUMBER) >= 0, _positions_of(tile, NUMBER) - first_query, -1)  # [GROUP_ROWS]
        head = dq + b.to(gl.int64) * queries * heads * HEAD_DIM + h.to(gl.int64) * HEAD_DIM
        wide.write(low * scale, high * scale, head, heads * HEAD_DIM, row, HEAD_DIM, READ_PARTIAL)
    elif tile.size > 0:  # this group's half of the tile is empty
        block = 0
        for i in range(N_BRANCHES):
            inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
            if inside:
                _, _, end = geometry.key_range(start, w, r, o, keys, tile.lowest, tile.highest, ROWS, CAUSAL, False)
                block = _pass_over(shared, block, gl.cdiv(end, ROWS))


@gluon.jit
def _positions_of(tile, NUMBER: gl.constexpr):
    """Positions of a group's queries, -1 for those that are not there."""
    number = NUMBER * tiles.GROUP_ROWS + gl.arange(
        0, tiles.GROUP_ROWS, gl.BlockedLayout([1], [32], [4], [0])
    )  # [GROUP_ROWS]
    position = geometry.tile_positions(tile, number)  # [GROUP_ROWS]
    exists = (number < tile.size) & (position >= tile.lowest) & (position < tile.end)  # [GROUP_ROWS]
    return gl.where(exists, position, -1)


@gluon.jit
def _pass_over(shared, block, count):
    """Give back blocks of keys that this group does not see."""
    for _j in range(count):
        tiles.wait_full(shared.k_full, block)
        wide.give_back(shared.k_free, block)
        tiles.wait_full(shared.v_full, block)
        wide.give_back(shared.v_free, block)
        block = tiles.counted(block + 1)
    return block


@gluon.jit
def _walk(
    NUMBER: gl.constexpr, low, high, lse_row, delta_row, shared, numbers, drops, block, full, end, seen_count, scale,
    drop_below, BLOCK_E: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """dq after the first `end` keys of a segment, of which all queries see the first `full`."""
    for j in range(0, end, tiles.GROUP_ROWS):
        tiles.wait_full(shared.k_full, block)
        score_token = wide.product(shared.q, shared.k, block, NUMBER)  # [GROUP_ROWS, GROUP_ROWS]
        tiles.wait_full(shared.v_full, block)
        weight_token = wide.product(shared.d, shared.v, block, NUMBER)  # [GROUP_ROWS, GROUP_ROWS]
        if DROPOUT:
            kept = dropout.kept_columns(drops, numbers, block, 0, tiles.GROUP_ROWS)  # [GROUP_ROWS, 4]
        scores = warpgroup_mma_wait(2, deps=[score_token])  # [GROUP_ROWS, GROUP_ROWS]
        weights = gl.exp2(scores * (scale * geometry.LOG2_E) - lse_row[:, None])  # [GROUP_ROWS, GROUP_ROWS]
        weights = _seen(weights, j, full, seen_count)  # [GROUP_ROWS, GROUP_ROWS]
        dweights = warpgroup_mma_wait(0, deps=[weight_token])  # [GROUP_ROWS, GROUP_ROWS]
        wide.give_back(shared.v_free, block)
        if DROPOUT:
            dweights = dropout.without_dropped(dweights, kept, False)  # [GROUP_ROWS, GROUP_ROWS]
            dweights = dweights * geometry.kept_factor(drop_below)  # [GROUP_ROWS, GROUP_ROWS]
        slopes = weights * (dweights - delta_row[:, None])  # [GROUP_ROWS, GROUP_ROWS]
        operand = steps.as_operand(slopes, shared.q.low.dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        low_token, high_token = wide.started(
            operand, low, high, shared.k, block, BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        low, high = warpgroup_mma_wait(0, deps=[low_token, high_token])  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        wide.give_back(shared.k_free, block)
        block = tiles.counted(block + 1)
    return low, high, block


@gluon.jit
def _seen(weights, j, full, seen_count):
    """Weights of a block of keys from number j on, 0 where a query does not see a key."""
    if j >= full:
        column = gl.arange(0, weights.shape[1], gl.SliceLayout(0, weights.type.layout))  # [GROUP_ROWS]
        weights = gl.where(column[None, :] < (seen_count - j)[:, None], weights, 0.0)  # [GROUP_ROWS, GROUP_ROWS]
    return weights
