"""Neighbourhood attention's forward by boxes at a head_dim above 128: each tile is two parts of columns, as in `wide`.

A score is the sum of both parts' products. The output of a group takes up to 128 registers a thread, so its queries
stay in shared memory and each product is waited for, while the other group has the tensor cores. Tiles and boxes are
as in `grid_forward`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hilbert_lib.attention.triton.grid import NOT_SPECIALIZED
from hilbert_lib.attention.triton.hopper import boxes, grid_backward, grid_forward, masks, places, steps, tiles
from hilbert_lib.attention.triton.hopper.wide import LOW, Parts, fetched

# Steps as in `grid_forward`.
MOVES = ("qb", "q0", "q1", "q2", "kb", "k0", "k1", "k2", "vb", "v0", "v1", "v2", "ob", "o0", "o1", "o2", "eb", "fb")


class Shared(NamedTuple):
    """Shared memory of a program: queries, whose rows its output leaves through, and rings of boxes of k and v."""

    q: Parts  # [buffers * groups, ...]
    k: Parts  # [stages of k, ...]
    v: Parts  # [stages of v, ...]
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *MOVES, "total", "programs"])
def wide_kernel(
    lse, flag, q_low, q_high, k_low, k_high, v_low, v_high, extra_k_low, extra_k_high, extra_v_low, extra_v_high,
    out_low, out_high, windows, part, padding, extra_padding, scale,
    qb, q0, q1, q2, kb, k0, k1, k2, vb, v0, v1, v2, ob, o0, o1, o2, eb, fb,
    heads, group, extra, n0, n1, n2, d0, d1, d2, total, programs,
    BLOCK_E: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, BUFFERS: gl.constexpr, RULES: gl.constexpr,
    EXTRA: gl.constexpr, PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr,
):  # fmt: skip
    """Output, lse and flag of tiles of 128 queries, as of `grid_forward`. Its tensors are descriptors of a part."""
    q_tiles = allocated(q_low, q_high, 2 * BUFFERS, BLOCK_E, RULES)
    k_tiles = allocated(k_low, k_high, STAGES, BLOCK_E, RULES)
    v_tiles = allocated(v_low, v_high, V_STAGES, BLOCK_E, RULES)
    tile_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(tile_full.index(buffer), count=1)
        mbarrier.init(tile_free.index(buffer), count=2)
    TOLD: gl.constexpr = PADDING or EXTRA_PADDING
    ceilings = k_full  # [STAGES, 1]; this stands in for them without padding
    if TOLD:
        ceilings = steps.ceilings_of(STAGES, tiles.GROUP_ROWS, gl.float32)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=2 if TOLD else 1)
    for stage in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(stage), count=1)
    shared = Shared(q_tiles, k_tiles, v_tiles, tile_full, tile_free, k_full, v_full)
    axes = boxes.axes_of((n0, n1, n2), (d0, d1, d2), part, RULES)
    moves = (qb, q0, q1, q2), (kb, k0, k1, k2), (vb, v0, v1, v2), (eb, fb)
    out_moves = (ob, o0, o1, o2)
    sizes = (heads, group, extra, total, programs)
    key_masks, paddings = masks.KeyMasks(windows, ceilings), masks.Padding(padding, extra_padding)
    # The arguments are written out: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_attend, (
            0, lse, flag, (out_low, out_high), key_masks, scale, out_moves, shared, axes, sizes, BLOCK_E, RULES, EXTRA,
            TOLD,
        )),
        (_attend, (
            1, lse, flag, (out_low, out_high), key_masks, scale, out_moves, shared, axes, sizes, BLOCK_E, RULES, EXTRA,
            TOLD,
        )),
        (_copy, (
            (q_low, q_high), (k_low, k_high), (v_low, v_high), (extra_k_low, extra_k_high),
            (extra_v_low, extra_v_high), key_masks, paddings, moves, shared, axes, sizes, RULES, EXTRA, PADDING,
            EXTRA_PADDING,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def allocated(low, high, COUNT: gl.constexpr, BLOCK_E: gl.constexpr, RULES: gl.constexpr):
    """Room for tiles of both parts of a tensor."""
    B0: gl.constexpr = boxes.side(RULES, 0)
    B1: gl.constexpr = boxes.side(RULES, 1)
    B2: gl.constexpr = boxes.side(RULES, 2)
    return Parts(
        gl.allocate_shared_memory(low.dtype, [COUNT, B0, B1, B2, 1, LOW], low.layout),
        gl.allocate_shared_memory(high.dtype, [COUNT, B0, B1, B2, 1, BLOCK_E], high.layout),
    )


@gluon.jit
def _k_free(shared, block):
    """Number of the barrier at which the groups give a box of k back."""
    return tiles.FIRST_BARRIER + block % shared.k.low.shape[0]


@gluon.jit
def _v_free(shared, block):
    """Number of the barrier at which the groups give a box of v back."""
    return tiles.FIRST_BARRIER + shared.k.low.shape[0] + block % shared.v.low.shape[0]


@gluon.jit
def _copy(
    q, k, v, extra_k, extra_v, key_masks, paddings, moves, shared, axes, sizes, RULES: gl.constexpr,
    EXTRA: gl.constexpr, PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr,
):  # fmt: skip
    """Copy tiles of queries and boxes of keys, in the order in which the groups take them, and tell of padding."""
    heads, group, extra, total, programs = sizes
    q_moves, k_moves, v_moves, extra_moves = moves
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, False)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, False)
        digits = places.added(digits, ahead, counts)
        buffer = turn % shared.tile_full.shape[0]
        if turn >= shared.tile_full.shape[0]:
            mbarrier.wait(shared.tile_free.index(buffer), (turn // shared.tile_full.shape[0] & 1) ^ 1)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        full = shared.tile_full.index(buffer)
        mbarrier.expect(full, 2 * (q[0].block_type.nbytes + q[1].block_type.nbytes))
        q_at, first = boxes.moved(place.h, place, q_moves), boxes.launch_queries(axes, RULES).first
        boxes.fetch_tile(q[0], q_at, place, first, full, shared.q.low, buffer, RULES)
        boxes.fetch_tile(q[1], q_at, place, first, full, shared.q.high, buffer, RULES, LOW)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, False)
        k_at, v_at = boxes.moved(place.g, place, k_moves), boxes.moved(place.g, place, v_moves)
        step = (0, 0, 0)
        for _j in range(boxes.count_of(reaches)):
            corner = boxes.box_of(step, reaches, axes, RULES).corner
            step = boxes.following(step, reaches, RULES)
            if PADDING or EXTRA_PADDING:
                is_kept = masks.kept_cells(paddings, place, corner, axes, RULES, PADDING)  # [GROUP_ROWS]
            _fetch_k(k[0], k[1], corner, k_at, shared, block)
            if PADDING or EXTRA_PADDING:
                masks.tell(key_masks.ceilings, shared.k_full, block, is_kept)
            _fetch_v(v[0], v[1], corner, v_at, shared, block)
            block = tiles.counted(block + 1)
        if EXTRA:
            k_at, v_at = place.g + place.b * extra_moves[0], place.g + place.b * extra_moves[1]
            for j in range(0, extra, tiles.GROUP_ROWS):
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_extra(paddings, place.b, j, extra, EXTRA_PADDING)  # [GROUP_ROWS]
                _fetch_k(extra_k[0], extra_k[1], (0, 0, j), k_at, shared, block)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, shared.k_full, block, is_kept)
                _fetch_v(extra_v[0], extra_v[1], (0, 0, j), v_at, shared, block)
                block = tiles.counted(block + 1)


@gluon.jit
def _fetch_k(low, high, corner, head_at, shared, block):
    """Copy a box of k to its ring, once both groups have given the stage back."""
    STAGES: gl.constexpr = shared.k.low.shape[0]
    if block >= STAGES:
        tiles.meet(_k_free(shared, block))
    _fetch(low, high, corner, head_at, shared.k, shared.k_full, block % STAGES)


@gluon.jit
def _fetch_v(low, high, corner, head_at, shared, block):
    """The same of v."""
    STAGES: gl.constexpr = shared.v.low.shape[0]
    if block >= STAGES:
        tiles.meet(_v_free(shared, block))
    _fetch(low, high, corner, head_at, shared.v, shared.v_full, block % STAGES)


@gluon.jit
def _fetch(low, high, corner, head_at, parts, full, stage):
    """Copy both parts of a box to a stage."""
    mbarrier.expect(full.index(stage), low.block_type.nbytes + high.block_type.nbytes)
    fetched(low, high, corner, head_at, parts, full.index(stage), stage)


@gluon.jit
def _attend(
    NUMBER: gl.constexpr, lse, flag, out, key_masks, scale, moves, shared, axes, sizes, BLOCK_E: gl.constexpr,
    RULES: gl.constexpr, EXTRA: gl.constexpr, PADDING: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of each tile against every box of keys that it sees."""
    heads, group, extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    number = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    queries = boxes.launch_queries(axes, RULES)
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, False)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, False)
        digits = places.added(digits, ahead, counts)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, False)
        corner = boxes.corner_of(NUMBER, place.first, RULES)
        sights = masks.sights_of(corner, number, reaches, axes, RULES)
        ranks = boxes.ranks_of(number, corner, RULES)
        is_query = boxes.is_there(ranks, queries.stop)  # [GROUP_ROWS]
        row = boxes.row_of(place.b * heads + place.h, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
        buffer = turn % shared.tile_full.shape[0]
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        own_tile = 2 * buffer + NUMBER
        low, high = _nothing(LOW), _nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        _, sums, largest = steps.nothing(ROWS, ROWS)  # [GROUP_ROWS, GROUP_ROWS], [GROUP_ROWS, 4], [GROUP_ROWS]
        grid_boxes = boxes.count_of(reaches)
        box_count = grid_boxes + (gl.cdiv(extra, ROWS) if EXTRA else 0)
        step = (0, 0, 0)
        box = boxes.box_of(step, reaches, axes, RULES)
        is_seen = masks.sees_or_extra(sights, box, corner, queries.stop, 0 - grid_boxes, RULES, EXTRA)
        for j in range(box_count):
            this_box = box
            if is_seen:
                score_token = _scores(shared, own_tile, block)  # [GROUP_ROWS, GROUP_ROWS]
                told = masks.told_of(key_masks, block, PADDING)
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, queries.stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
                scores = warpgroup_mma_wait(0, deps=[score_token])  # [GROUP_ROWS, GROUP_ROWS]
                scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, GROUP_ROWS]
                tiles.arrive(_k_free(shared, block))
                scores = masks.allowed(
                    scores, sights, this_box, axes, j - grid_boxes, extra, RULES, EXTRA
                )  # [GROUP_ROWS, GROUP_ROWS]
                weights, decay, largest, sums = grid_forward.softmax(
                    scores, sights, this_box, axes, j >= grid_boxes, largest, sums, scale, RULES, EXTRA
                )  # [GROUP_ROWS, GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
                low, high = (
                    steps.scaled_if_any(low, decay),
                    steps.scaled_if_any(high, decay),
                )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
                low, high = _added(
                    weights, low, high, shared, block, BLOCK_E
                )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
                tiles.arrive(_v_free(shared, block))
            else:
                tiles.wait_full(shared.k_full, block)
                tiles.arrive(_k_free(shared, block))
                tiles.wait_full(shared.v_full, block)
                tiles.arrive(_v_free(shared, block))
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, queries.stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
            block = tiles.counted(block + 1)
        low, row_lse = steps.normalized(low, sums, largest)  # [GROUP_ROWS, LOW], [GROUP_ROWS]
        high, _ = steps.normalized(high, sums, largest)  # [GROUP_ROWS, BLOCK_E], [GROUP_ROWS]
        gl.store(lse + row, row_lse, mask=is_query)
        total_of_row = gl.convert_layout(gl.sum(low, 1), largest.type.layout)  # [GROUP_ROWS]; NaN if one of them is
        total_of_row += gl.convert_layout(gl.sum(high, 1), largest.type.layout)
        is_bad = is_query & (total_of_row != total_of_row)  # [GROUP_ROWS]
        gl.store(flag + gl.zeros_like(number), gl.zeros_like(number) + 1, mask=is_bad)
        at, head_at = boxes.within(corner, queries.first), boxes.moved(place.h, place, moves)
        boxes.send(low, shared.q.low, own_tile, out[0], at, head_at)
        boxes.send(high, shared.q.high, own_tile, out[1], at, head_at, LOW)
    tma.store_wait(0)


@gluon.jit
def _nothing(COLUMNS: gl.constexpr):
    return gl.zeros([tiles.GROUP_ROWS, COLUMNS], gl.float32, tiles.product_layout(COLUMNS))


@gluon.jit
def _scores(shared, own_tile, block):
    """The product of a group's queries and a box of keys, started once the keys are there."""
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    tiles.wait_full(shared.k_full, block)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, tiles.product_layout(ROWS))  # [GROUP_ROWS, GROUP_ROWS]
    of_low = warpgroup_mma(
        boxes.rows_of(shared.q.low, own_tile), tiles.tile_of_stage(shared.k.low, block).permute((1, 0)), zeros,
        use_acc=False, is_async=True,
    )  # [GROUP_ROWS, GROUP_ROWS]  # fmt: skip
    return warpgroup_mma(
        boxes.rows_of(shared.q.high, own_tile), tiles.tile_of_stage(shared.k.high, block).permute((1, 0)), of_low,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def _added(weights, low, high, shared, block, BLOCK_E: gl.constexpr):
    """Both parts of the output and of the product of weights with a box of v."""
    tiles.wait_full(shared.v_full, block)
    of_low = warpgroup_mma(
        steps.as_operand(weights, shared.q.low.dtype, LOW), tiles.tile_of_stage(shared.v.low, block), low, is_async=True
    )  # [GROUP_ROWS, LOW]
    of_high = warpgroup_mma(
        steps.as_operand(weights, shared.q.low.dtype, BLOCK_E), tiles.tile_of_stage(shared.v.high, block), high,
        is_async=True,
    )  # [GROUP_ROWS, BLOCK_E]  # fmt: skip
    return warpgroup_mma_wait(0, deps=[of_low, of_high])
