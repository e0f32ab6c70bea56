"""Neighbourhood attention's backward for Hopper, warp-specialised: boxes as in the forward, the same bits every time.

dq comes from tiles of queries, which walk over boxes of keys as the forward does. dk and dv come from tiles of keys,
which walk over the boxes of queries that see them:

    OF_KEYS    tile (x, y)     boxes (a, b)    results (u, w)    products
    False      q, dout         k, v            dq                q k, dout v, slopes k
    True       k, v            q, dout         dk, dv            k q, v dout, weights dout, slopes q

That is seven products in place of five, and nothing is added in global memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hilbert_lib.attention.triton.geometry import LOG2_E
from hilbert_lib.attention.triton.grid import NOT_SPECIALIZED
from hilbert_lib.attention.triton.hopper import bias as biases
from hilbert_lib.attention.triton.hopper import boxes, masks, places, steps, tiles

# Steps as in `grid_forward`, for the two tensors of a tile (x, y), of its boxes (a, b), and of the results (u, w).
MOVES = (*(name + axis for name in "xyabuw" for axis in "b012"), "eb", "fb")


class Shared(NamedTuple):
    """Shared memory of a program: rows of its tile, of two tensors, and a ring of boxes of two others."""

    x_tiles: gl.shared_memory_descriptor  # [buffers * groups, *box, 1, columns]
    y_tiles: gl.shared_memory_descriptor
    a_tiles: gl.shared_memory_descriptor  # [stages, *box, 1, columns]
    b_tiles: gl.shared_memory_descriptor  # [B_STAGES, *box, 1, columns]
    lse_rows: gl.shared_memory_descriptor  # [stages, 64], where boxes are of queries; of keys, rows of `Ceilings`
    delta_rows: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *MOVES, "total", "programs"])
def backward_kernel(
    lse, delta, x, y, a, b, extra_a, extra_b, u, w, bias, dbias, bounds, windows, part, padding,
    extra_padding, scale,
    xb, x0, x1, x2, yb, y0, y1, y2, ab, a0, a1, a2, bb, b0, b1, b2, ub, u0, u1, u2, wb, w0, w1, w2, eb, fb,
    heads, group, extra, n0, n1, n2, d0, d1, d2, total, programs,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, B_STAGES: gl.constexpr, OF_KEYS: gl.constexpr, RULES: gl.constexpr,
    EXTRA: gl.constexpr, PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr, IN_FLOAT: gl.constexpr,
    BIAS: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """dq (u) of tiles of queries (x) and dout (y), from boxes of k (a) and v (b).

    With OF_KEYS dk (u) and dv (w) of tiles of k (x) and v (y), from boxes of queries (a) and dout (b). All tensors but
    lse, delta and masks are descriptors. With IN_FLOAT, which is then the head_dim, dk and dv are dense and float32. A
    value or score that is not finite may reach the gradients of rows near it. BIAS is as in the forward;
    with dq comes the gradient of bias (`bias.Sums`).
    """
    dtype: gl.constexpr = x.dtype
    B0: gl.constexpr = boxes.side(RULES, 0)
    B1: gl.constexpr = boxes.side(RULES, 1)
    B2: gl.constexpr = boxes.side(RULES, 2)
    x_tiles = gl.allocate_shared_memory(dtype, [2 * BUFFERS, B0, B1, B2, 1, BLOCK_D], x.layout)
    y_tiles = gl.allocate_shared_memory(dtype, [2 * BUFFERS, B0, B1, B2, 1, BLOCK_D], y.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, B0, B1, B2, 1, BLOCK_D], a.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [B_STAGES, B0, B1, B2, 1, BLOCK_D], b.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, tiles.GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_rows = gl.allocate_shared_memory(
        gl.float32, [STAGES, tiles.GROUP_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    tile_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    TOLD: gl.constexpr = (PADDING or EXTRA_PADDING) and not OF_KEYS
    ceilings = full  # [STAGES, 1]; this stands in for them without padding
    if TOLD:
        states = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ceilings = steps.Ceilings(lse_rows, states)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(tile_full.index(buffer), count=1)
        mbarrier.init(tile_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2 if OF_KEYS or TOLD else 1)
    if BIAS is None or OF_KEYS:
        sums = ()
    else:
        sums_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        sums_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(sums_full.index(0), count=2)
        mbarrier.init(sums_free.index(0), count=2)
        sums = biases.Sums(dbias, bounds, biases.shared_sums(total, BIAS), sums_full, sums_free)
    shared = Shared(x_tiles, y_tiles, a_tiles, b_tiles, lse_rows, delta_rows, tile_full, tile_free, full)
    axes = boxes.axes_of((n0, n1, n2), (d0, d1, d2), part, RULES)
    moves = (xb, x0, x1, x2), (yb, y0, y1, y2), (ab, a0, a1, a2), (bb, b0, b1, b2), (eb, fb)
    u_moves, w_moves = (ub, u0, u1, u2), (wb, w0, w1, w2)
    sizes = (heads, group, extra, total, programs)
    key_masks, paddings = masks.KeyMasks(windows, ceilings), masks.Padding(padding, extra_padding)
    # The arguments are written out: a tuple that is assigned to a name loses its constants.
    if OF_KEYS:
        gl.warp_specialize([
            (_differentiate_keys, (
                0, u, w, bias, windows, padding, scale, u_moves, w_moves, shared, axes, sizes, BLOCK_D, RULES, PADDING,
                IN_FLOAT, BIAS,
            )),
            (_differentiate_keys, (
                1, u, w, bias, windows, padding, scale, u_moves, w_moves, shared, axes, sizes, BLOCK_D, RULES, PADDING,
                IN_FLOAT, BIAS,
            )),
            (_copy, (
                lse, delta, x, y, a, b, extra_a, extra_b, key_masks, paddings, moves, shared, axes, sizes, RULES,
                False, True, False, False,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_differentiate_queries, (
                0, lse, delta, u, bias, sums, key_masks, scale, u_moves, shared, axes, sizes,
                BLOCK_D, RULES, EXTRA, TOLD, BIAS,
            )),
            (_differentiate_queries, (
                1, lse, delta, u, bias, sums, key_masks, scale, u_moves, shared, axes, sizes,
                BLOCK_D, RULES, EXTRA, TOLD, BIAS,
            )),
            (_copy, (
                lse, delta, x, y, a, b, extra_a, extra_b, key_masks, paddings, moves, shared, axes, sizes, RULES,
                EXTRA, False, PADDING, EXTRA_PADDING,
            )),
        ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _free(shared, block):
    """Number of the barrier at which the groups give a box back; for dq, all of it but b."""
    return tiles.FIRST_BARRIER + block % shared.a_tiles.shape[0]


@gluon.jit
def _b_free(shared, block):
    """Number of the barrier at which the groups give a box of b back, where they need it for less time: v for dq."""
    return tiles.FIRST_BARRIER + shared.a_tiles.shape[0] + block % shared.b_tiles.shape[0]


@gluon.jit
def _copy(
    lse, delta, x, y, a, b, extra_a, extra_b, key_masks, paddings, moves, shared, axes, sizes, RULES: gl.constexpr,
    EXTRA: gl.constexpr, OF_KEYS: gl.constexpr, PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr,
):  # fmt: skip
    """Copy tiles and boxes in the order in which the groups take them; with OF_KEYS rows of lse and delta too.

    Of boxes of keys the groups are told which are padding.
    """
    heads, group, extra, total, programs = sizes
    x_moves, y_moves, a_moves, b_moves, extra_moves = moves
    members = group if OF_KEYS else 1  # heads of queries whose boxes are walked over
    queries = boxes.launch_queries(axes, RULES)
    x_first = (0, 0, 0) if OF_KEYS else queries.first
    a_first = queries.first if OF_KEYS else (0, 0, 0)
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, OF_KEYS)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, OF_KEYS)
        digits = places.added(digits, ahead, counts)
        buffer = turn % shared.tile_full.shape[0]
        if turn >= shared.tile_full.shape[0]:
            mbarrier.wait(shared.tile_free.index(buffer), (turn // shared.tile_full.shape[0] & 1) ^ 1)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        full = shared.tile_full.index(buffer)
        mbarrier.expect(full, 2 * (x.block_type.nbytes + y.block_type.nbytes))
        head = place.g if OF_KEYS else place.h
        x_at, y_at = boxes.moved(head, place, x_moves), boxes.moved(head, place, y_moves)
        boxes.fetch_tile(x, x_at, place, x_first, full, shared.x_tiles, buffer, RULES)
        boxes.fetch_tile(y, y_at, place, x_first, full, shared.y_tiles, buffer, RULES)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, OF_KEYS)
        for member in range(members):
            head = place.h + member if OF_KEYS else place.g
            a_at, b_at = boxes.moved(head, place, a_moves), boxes.moved(head, place, b_moves)
            step = (0, 0, 0)
            for _j in range(boxes.count_of(reaches)):
                box = boxes.box_of(step, reaches, axes, RULES)
                step = boxes.following(step, reaches, RULES)
                rank0, rank1, rank2 = boxes.within(box.corner, a_first)
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_cells(paddings, place, box.corner, axes, RULES, PADDING)  # [GROUP_ROWS]
                _fetch(a, b, [rank0, rank1, rank2, a_at, 0], [rank0, rank1, rank2, b_at, 0], shared, block, OF_KEYS)
                if OF_KEYS:
                    _store_rows(lse, delta, place.b * heads + head, box, place, axes, shared, block, RULES)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, shared.full, block, is_kept)
                block = tiles.counted(block + 1)
        if EXTRA:
            a_at, b_at = place.g + place.b * extra_moves[0], place.g + place.b * extra_moves[1]
            for j in range(0, extra, tiles.GROUP_ROWS):
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_extra(paddings, place.b, j, extra, EXTRA_PADDING)  # [GROUP_ROWS]
                _fetch(extra_a, extra_b, [0, 0, j, a_at, 0], [0, 0, j, b_at, 0], shared, block, OF_KEYS)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, shared.full, block, is_kept)
                block = tiles.counted(block + 1)


@gluon.jit
def _fetch(a, b, a_at, b_at, shared, block, TOGETHER: gl.constexpr):
    """Copy a box of each tensor to its ring, once both groups have given the stage back; TOGETHER for both tensors."""
    STAGES: gl.constexpr = shared.a_tiles.shape[0]
    B_STAGES: gl.constexpr = shared.b_tiles.shape[0]
    full = shared.full.index(block % STAGES)
    if block >= STAGES:
        tiles.meet(_free(shared, block))
    mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
    boxes.fetch(a, a_at, full, shared.a_tiles.index(block % STAGES))
    if (not TOGETHER) & (block >= B_STAGES):
        tiles.meet(_b_free(shared, block))
    boxes.fetch(b, b_at, full, shared.b_tiles.index(block % B_STAGES))


@gluon.jit
def _store_rows(lse, delta, sequence, box, place, axes, shared, block, RULES: gl.constexpr):
    """Store lse (to base 2) and delta of a box of queries; queries that are not computed get weight 0."""
    stage = block % shared.a_tiles.shape[0]
    number = gl.arange(0, tiles.GROUP_ROWS, gl.BlockedLayout([tiles.GROUP_ROWS // 32], [32], [1], [0]))  # [GROUP_ROWS]
    ranks = boxes.ranks_of(number, box.corner, RULES)
    is_query = boxes.is_there(ranks, boxes.launch_queries(axes, RULES).stop)  # [GROUP_ROWS]
    row = boxes.row_of(sequence, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
    shared.lse_rows.index(stage).store(as_exponent(gl.load(lse + row, mask=is_query, other=float("inf"))))
    shared.delta_rows.index(stage).store(gl.load(delta + row, mask=is_query, other=0.0))
    mbarrier.arrive(shared.full.index(stage))


@gluon.jit
def as_exponent(lse):
    """lse to base 2, and inf for a query without keys: its weights are then 0."""
    return gl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E


@gluon.jit
def _differentiate_queries(
    NUMBER: gl.constexpr, lse, delta, dq, bias, sums, key_masks, scale, moves, shared, axes, sizes,
    BLOCK_D: gl.constexpr, RULES: gl.constexpr, EXTRA: gl.constexpr, PADDING: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group of warps: dq of 64 queries of each tile. The product for dq comes one box late."""
    heads, group, extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    STAGES: gl.constexpr = shared.a_tiles.shape[0]
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    number = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)  # [GROUP_ROWS, GROUP_ROWS]
    queries = boxes.launch_queries(axes, RULES)
    if BIAS is not None:
        biases.clear(NUMBER, sums, BIAS)
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
        if BIAS is not None:
            table = biases.table_of(bias, place.h, ranks, RULES, BIAS)
            bias_unit = biases.begin(sums, place.h, turn)
        is_query = boxes.is_there(ranks, queries.stop)  # [GROUP_ROWS]
        row = boxes.row_of(place.b * heads + place.h, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
        lse_row = as_exponent(gl.load(lse + row, mask=is_query, other=float("inf")))  # [GROUP_ROWS]
        delta_row = gl.load(delta + row, mask=is_query, other=0.0)  # [GROUP_ROWS]
        buffer = turn % shared.tile_full.shape[0]
        await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        q_tile = boxes.rows_of(shared.x_tiles, 2 * buffer + NUMBER)  # [GROUP_ROWS, BLOCK_D]
        d_tile = boxes.rows_of(shared.y_tiles, 2 * buffer + NUMBER)  # [GROUP_ROWS, BLOCK_D]
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, tiles.product_layout(BLOCK_D))  # [GROUP_ROWS, BLOCK_D]
        slopes = steps.as_operand(zeros, q_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
        last = -1  # the box whose product for dq is still to come
        step = (0, 0, 0)
        grid_boxes = boxes.count_of(reaches)
        box_count = grid_boxes + (gl.cdiv(extra, ROWS) if EXTRA else 0)
        box = boxes.box_of(step, reaches, axes, RULES)
        is_seen = masks.sees_or_extra(sights, box, corner, queries.stop, 0 - grid_boxes, RULES, EXTRA)
        for j in range(box_count):
            this_box = box
            if is_seen:
                tiles.wait_full(shared.full, block)
                k_tile = tiles.tile_of_stage(shared.a_tiles, block)  # [GROUP_ROWS, BLOCK_D]
                v_tile = tiles.tile_of_stage(shared.b_tiles, block)  # [GROUP_ROWS, BLOCK_D]
                if BIAS is None:
                    score_token = warpgroup_mma(
                        q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
                    )  # [GROUP_ROWS, GROUP_ROWS]
                else:
                    bias_tile = biases.tile_of(
                        table, this_box, reaches, axes, j >= grid_boxes, RULES, BIAS, False, EXTRA
                    )  # [GROUP_ROWS, GROUP_ROWS]
                    score_token = warpgroup_mma(
                        q_tile, k_tile.permute((1, 0)), bias_tile, is_async=True
                    )  # [GROUP_ROWS, GROUP_ROWS]
                weight_token = warpgroup_mma(
                    d_tile, v_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
                )  # [GROUP_ROWS, GROUP_ROWS]
                before = tiles.counted(gl.where(last < 0, block, last))
                token = warpgroup_mma(
                    slopes, tiles.tile_of_stage(shared.a_tiles, before), acc, is_async=True
                )  # [GROUP_ROWS, BLOCK_D]
                # Beside these products: the place of the next box, and whether it is seen.
                told = masks.told_of(key_masks, block, PADDING)
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, queries.stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
                scores, dweights = warpgroup_mma_wait(
                    1, deps=[score_token, weight_token]
                )  # [GROUP_ROWS, GROUP_ROWS] each
                tiles.arrive(_b_free(shared, block))
                scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, GROUP_ROWS]
                scores = masks.allowed(
                    scores, sights, this_box, axes, j - grid_boxes, extra, RULES, EXTRA
                )  # [GROUP_ROWS, GROUP_ROWS]
                weights = masks.weights_of(
                    scores, lse_row, sights, this_box, axes, j >= grid_boxes, scale, RULES, EXTRA
                )  # [GROUP_ROWS, GROUP_ROWS]
                new_slopes = tiles.held(weights * (dweights - delta_row[:, None]), heads)  # [GROUP_ROWS, GROUP_ROWS]
                if BIAS is not None:  # noqa: SIM102 - a constant is not joined with a tensor
                    if j < grid_boxes:
                        new_slopes = biases.added(
                            new_slopes, sums, bias_unit, table, this_box, reaches, axes, RULES, BIAS
                        )  # [GROUP_ROWS, GROUP_ROWS]
                acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, BLOCK_D]
                # Not before the wait: ptxas would make the products wait for one another.
                slopes = steps.as_operand(new_slopes, q_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
                if last >= 0:
                    tiles.arrive(_free(shared, last))
                last = block
            else:
                if (last >= 0) & (block - last >= STAGES - 1):
                    # The copying warp would wait for the stage of `last`. So this box takes its place, with weights 0.
                    acc = _late(slopes, acc, shared, last)  # [GROUP_ROWS, BLOCK_D]
                    tiles.wait_full(shared.full, block)
                    slopes = gl.zeros_like(slopes)  # [GROUP_ROWS, GROUP_ROWS]
                    last = block
                else:
                    tiles.wait_full(shared.full, block)
                    tiles.arrive(_free(shared, block))
                tiles.arrive(_b_free(shared, block))
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, queries.stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
            block = tiles.counted(block + 1)
        if last >= 0:
            acc = _late(slopes, acc, shared, last)  # [GROUP_ROWS, BLOCK_D]
        if BIAS is not None:
            biases.flush(NUMBER, sums, place.h, turn - 1, BIAS)
        to = boxes.within(corner, queries.first)
        boxes.send(acc * scale, shared.x_tiles, 2 * buffer + NUMBER, dq, to, boxes.moved(place.h, place, moves))
    tma.store_wait(0)


@gluon.jit
def await_tile(shared, turn):
    """Wait for a tile, and let the last one go. One buffer alone has to be free before the tile is copied to it."""
    BUFFERS: gl.constexpr = shared.tile_full.shape[0]
    if BUFFERS == 1:
        _let_go(shared, turn)
    mbarrier.wait(shared.tile_full.index(turn % BUFFERS), turn // BUFFERS & 1)
    if BUFFERS > 1:
        _let_go(shared, turn)


@gluon.jit
def _let_go(shared, turn):
    """Give the buffer of the last tile back, once its results have left it."""
    if turn > 0:
        tma.store_wait(0)
        mbarrier.arrive(shared.tile_free.index((turn - 1) % shared.tile_full.shape[0]))


@gluon.jit
def _late(slopes, acc, shared, last):
    """acc after the product for dq of a box, waited for."""
    token = warpgroup_mma(
        slopes, tiles.tile_of_stage(shared.a_tiles, tiles.counted(last)), acc, is_async=True
    )  # [GROUP_ROWS, BLOCK_D]
    acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, BLOCK_D]
    tiles.arrive(_free(shared, last))
    return acc


@gluon.jit
def _differentiate_keys(
    NUMBER: gl.constexpr, dk, dv, bias, windows, padding, scale, k_moves, v_moves, shared, axes, sizes,
    BLOCK_D: gl.constexpr, RULES: gl.constexpr, PADDING: gl.constexpr, IN_FLOAT: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group of warps: dk and dv of 64 keys of each tile. Scores are computed transposed, keys by queries.

    At 64 columns registers suffice for the products for dk and dv to come one box late, beside the next softmax.
    """
    heads, group, _extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    GRADIENTS: gl.constexpr = tiles.product_layout(BLOCK_D)
    STAGES: gl.constexpr = shared.a_tiles.shape[0]
    LATE: gl.constexpr = BLOCK_D == 64
    number = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)  # [GROUP_ROWS, GROUP_ROWS]
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, True)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, True)
        digits = places.added(digits, ahead, counts)
        reaches = boxes.reaches_of(place, windows, axes, RULES, True)
        corner = boxes.corner_of(NUMBER, place.first, RULES)
        seers = masks.seers_of(corner, number, reaches, axes, RULES)
        buffer = turn % shared.tile_full.shape[0]
        await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        k_tile = boxes.rows_of(shared.x_tiles, 2 * buffer + NUMBER)  # [GROUP_ROWS, BLOCK_D]
        v_tile = boxes.rows_of(shared.y_tiles, 2 * buffer + NUMBER)  # [GROUP_ROWS, BLOCK_D]
        dk_acc = gl.zeros([ROWS, BLOCK_D], gl.float32, GRADIENTS)  # [GROUP_ROWS, BLOCK_D]
        dv_acc = gl.zeros([ROWS, BLOCK_D], gl.float32, GRADIENTS)  # [GROUP_ROWS, BLOCK_D]
        late_weights = steps.as_operand(zeros, k_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
        late_slopes = late_weights  # [GROUP_ROWS, GROUP_ROWS]
        last = -1  # the box whose products for dk and dv are still to come
        for member in range(group):
            if BIAS is not None:
                table = biases.table_of(bias, place.h + member, boxes.ranks_of(number, corner, RULES), RULES, BIAS)
            step = (0, 0, 0)
            box = boxes.box_of(step, reaches, axes, RULES)
            is_seen = masks.sees(seers, box, RULES)
            for _j in range(boxes.count_of(reaches)):
                this_box = box
                if is_seen:
                    tiles.wait_full(shared.full, block)
                    q_tile = tiles.tile_of_stage(shared.a_tiles, block)  # [GROUP_ROWS, BLOCK_D]
                    d_tile = tiles.tile_of_stage(shared.b_tiles, block)  # [GROUP_ROWS, BLOCK_D]
                    if BIAS is None:
                        score_token = warpgroup_mma(
                            k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
                        )  # [GROUP_ROWS, GROUP_ROWS]
                    else:
                        bias_tile = biases.tile_of(
                            table, this_box, reaches, axes, False, RULES, BIAS, True, False
                        )  # [GROUP_ROWS, GROUP_ROWS]
                        score_token = warpgroup_mma(
                            k_tile, q_tile.permute((1, 0)), bias_tile, is_async=True
                        )  # [GROUP_ROWS, GROUP_ROWS]
                    weight_token = warpgroup_mma(
                        v_tile, d_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
                    )  # [GROUP_ROWS, GROUP_ROWS]
                    if LATE:
                        before = tiles.counted(gl.where(last < 0, block, last))
                        dv_token, dk_token = _start_keys(
                            late_weights, late_slopes, dv_acc, dk_acc, shared, before
                        )  # [GROUP_ROWS, BLOCK_D] each
                    step, box, is_seen = masks.following(step, seers, reaches, corner, corner, 0, axes, RULES, False)
                    stage = block % STAGES
                    scores = warpgroup_mma_wait(3 if LATE else 1, deps=[score_token])  # [GROUP_ROWS, GROUP_ROWS]
                    scores = masks.hidden(scores, seers, this_box, axes, RULES)  # [GROUP_ROWS, GROUP_ROWS]
                    lse_row = shared.lse_rows.index(stage).load(gl.SliceLayout(0, SCORES))  # [GROUP_ROWS]
                    weights = gl.exp2(scores * (scale * LOG2_E) - lse_row[None, :])  # [GROUP_ROWS, GROUP_ROWS]
                    if not LATE:
                        dv_weights = steps.as_operand(weights, k_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
                        dv_token = warpgroup_mma(dv_weights, d_tile, dv_acc, is_async=True)  # [GROUP_ROWS, BLOCK_D]
                    dweights = warpgroup_mma_wait(2 if LATE else 1, deps=[weight_token])  # [GROUP_ROWS, GROUP_ROWS]
                    delta_row = shared.delta_rows.index(stage).load(gl.SliceLayout(0, SCORES))  # [GROUP_ROWS]
                    new_slopes = weights * (dweights - delta_row[None, :])  # [GROUP_ROWS, GROUP_ROWS]
                    if LATE:
                        new_slopes = tiles.held(new_slopes, heads)  # [GROUP_ROWS, GROUP_ROWS]
                        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])  # [GROUP_ROWS, BLOCK_D] each
                        late_weights = steps.as_operand(weights, k_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
                        late_slopes = steps.as_operand(new_slopes, k_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
                        if last >= 0:
                            tiles.arrive(_free(shared, last))
                        last = block
                    else:
                        slopes = steps.as_operand(new_slopes, k_tile.dtype, BLOCK_D)  # [GROUP_ROWS, GROUP_ROWS]
                        dk_token = warpgroup_mma(slopes, q_tile, dk_acc, is_async=True)  # [GROUP_ROWS, BLOCK_D]
                        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])  # [GROUP_ROWS, BLOCK_D] each
                        tiles.arrive(_free(shared, block))
                else:
                    if LATE & (last >= 0) & (block - last >= STAGES - 1):
                        # As in `_differentiate_queries`.
                        dv_acc, dk_acc = _late_keys(
                            late_weights, late_slopes, dv_acc, dk_acc, shared, last
                        )  # [GROUP_ROWS, BLOCK_D] each
                        tiles.wait_full(shared.full, block)
                        late_weights = gl.zeros_like(late_weights)  # [GROUP_ROWS, GROUP_ROWS]
                        late_slopes = gl.zeros_like(late_slopes)  # [GROUP_ROWS, GROUP_ROWS]
                        last = block
                    else:
                        tiles.wait_full(shared.full, block)
                        tiles.arrive(_free(shared, block))
                    step, box, is_seen = masks.following(step, seers, reaches, corner, corner, 0, axes, RULES, False)
                block = tiles.counted(block + 1)
        if LATE & (last >= 0):
            dv_acc, dk_acc = _late_keys(
                late_weights, late_slopes, dv_acc, dk_acc, shared, last
            )  # [GROUP_ROWS, BLOCK_D] each
        if PADDING:
            weighs = weighing(BLOCK_D, padding, corner, place, axes, RULES)  # [GROUP_ROWS, 1]
            dk_acc, dv_acc = gl.where(weighs, dk_acc, 0.0), gl.where(weighs, dv_acc, 0.0)  # [GROUP_ROWS, BLOCK_D] each
        if IN_FLOAT:
            store(dk_acc * scale, dk, corner, place, axes, heads // group, RULES, IN_FLOAT)
            store(dv_acc, dv, corner, place, axes, heads // group, RULES, IN_FLOAT)
        else:
            own_tile = 2 * buffer + NUMBER
            boxes.send(dk_acc * scale, shared.x_tiles, own_tile, dk, corner, boxes.moved(place.g, place, k_moves))
            boxes.send(dv_acc, shared.y_tiles, own_tile, dv, corner, boxes.moved(place.g, place, v_moves))
    tma.store_wait(0)


@gluon.jit
def _start_keys(dv_weights, slopes, dv_acc, dk_acc, shared, block):
    """The products of a box for dv and dk, started."""
    dv_token = warpgroup_mma(
        dv_weights, tiles.tile_of_stage(shared.b_tiles, block), dv_acc, is_async=True
    )  # [GROUP_ROWS, BLOCK_D]
    return dv_token, warpgroup_mma(slopes, tiles.tile_of_stage(shared.a_tiles, block), dk_acc, is_async=True)


@gluon.jit
def _late_keys(dv_weights, slopes, dv_acc, dk_acc, shared, last):
    """dv and dk after the products of a box, waited for."""
    dv_token, dk_token = _start_keys(
        dv_weights, slopes, dv_acc, dk_acc, shared, tiles.counted(last)
    )  # [GROUP_ROWS, BLOCK_D] each
    dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_token, dk_token])  # [GROUP_ROWS, BLOCK_D] each
    tiles.arrive(_free(shared, last))
    return dv_acc, dk_acc


@gluon.jit
def weighing(COLUMNS: gl.constexpr, padding, corner, place, axes, RULES: gl.constexpr):
    """Whether the keys of a group have weight, for gradients of so many columns."""
    number = gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, tiles.product_layout(COLUMNS)))  # [GROUP_ROWS]
    ranks = boxes.ranks_of(number, corner, RULES)
    cell = place.b.to(gl.int64) * (axes.n[0] * axes.n[1] * axes.n[2])
    padding_ptrs = padding + cell + boxes.cell_of(ranks, place.residue, axes.d, axes.n)  # [GROUP_ROWS]
    return (gl.load(padding_ptrs, mask=boxes.is_there(ranks, axes.m), other=1) == 0)[:, None]


@gluon.jit
def store(
    values, to, corner, place, axes, kv_heads, RULES: gl.constexpr, HEAD_DIM: gl.constexpr, COLUMN: gl.constexpr = 0
):  # fmt: skip
    """Write a group's rows to the columns from one on of a dense tensor, in their dtype."""
    ranks = boxes.ranks_of(gl.arange(0, values.shape[0], gl.SliceLayout(1, values.type.layout)), corner, RULES)
    column = COLUMN + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))[None, :]  # [1, columns]
    row = place.b.to(gl.int64) * (axes.n[0] * axes.n[1] * axes.n[2])
    row = row + boxes.cell_of(ranks, place.residue, axes.d, axes.n)  # [GROUP_ROWS]
    ptrs = to + ((row * kv_heads + place.g) * HEAD_DIM)[:, None] + column  # [GROUP_ROWS, columns]
    gl.store(ptrs, values, mask=boxes.is_there(ranks, axes.m)[:, None] & (column < HEAD_DIM))
