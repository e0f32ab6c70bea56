"""Neighbourhood attention's backward by boxes at a head_dim above 128: two groups of warps share one tile of 64 rows.

Tiles, boxes and steps are those of `wide`, with x, y, a, b as in `grid_backward`. Each box passes both groups:

    group     product of the tile and a box    makes                        adds to              reads besides
    weights   x a (scores)                     p = exp(scores - lse)        dq: dq, columns low  p: writes; slopes
                                                                            keys: dv             p: writes
    slopes    y b                              slopes = p (y b - delta)     dq: dq, columns high p; writes slopes
                                                                            keys: dk             p

That is three products for dq and four for dk and dv. Nothing is added in global memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hilbert_lib.attention.triton.grid import NOT_SPECIALIZED
from hilbert_lib.attention.triton.hopper import boxes, grid_backward, grid_wide, masks, places, steps, tiles, wide
from hilbert_lib.attention.triton.hopper.wide import LOW

MOVES = grid_backward.MOVES


class Shared(NamedTuple):
    """Shared memory of a program: its tile of two tensors, rings of boxes of two others, and what the groups exchange.

    A tile has one buffer. Results leave through it: those of the weights' group through x, of the slopes' through y.
    """

    x: wide.Parts  # [1, ...]
    y: wide.Parts
    a: wide.Parts  # [stages, ...]
    b: wide.Parts  # [B_STAGES, ...]
    lse_rows: gl.shared_memory_descriptor  # [stages, 64], where boxes are of queries; of keys, rows of `Ceilings`
    delta_rows: gl.shared_memory_descriptor  # [B_STAGES, 64]
    weights: gl.shared_memory_descriptor  # [64, 64], float32
    slopes: gl.shared_memory_descriptor  # [2, 64, 64], for dq
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor
    a_full: gl.shared_memory_descriptor
    a_free: gl.shared_memory_descriptor
    b_full: gl.shared_memory_descriptor
    b_free: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor
    weights_free: gl.shared_memory_descriptor  # where boxes are of queries
    slopes_full: gl.shared_memory_descriptor  # for dq


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *MOVES, "total", "programs"])
def wide_backward_kernel(
    lse, delta, x_low, x_high, y_low, y_high, a_low, a_high, b_low, b_high, extra_a_low, extra_a_high, extra_b_low,
    extra_b_high, u_low, u_high, w_low, w_high, windows, part, padding, extra_padding, scale,
    xb, x0, x1, x2, yb, y0, y1, y2, ab, a0, a1, a2, bb, b0, b1, b2, ub, u0, u1, u2, wb, w0, w1, w2, eb, fb,
    heads, group, extra, n0, n1, n2, d0, d1, d2, total, programs,
    BLOCK_E: gl.constexpr, STAGES: gl.constexpr, B_STAGES: gl.constexpr, OF_KEYS: gl.constexpr, RULES: gl.constexpr,
    EXTRA: gl.constexpr, PADDING: gl.constexpr, EXTRA_PADDING: gl.constexpr, IN_FLOAT: gl.constexpr,
):  # fmt: skip
    """dq (u), or with OF_KEYS dk (u) and dv (w), of tiles of 64 rows, as of `grid_backward`.

    Its tensors are descriptors of a part. With IN_FLOAT, the head_dim, dk and dv are dense and float32.
    """
    x_tiles = grid_wide.allocated(x_low, x_high, 1, BLOCK_E, RULES)
    y_tiles = grid_wide.allocated(y_low, y_high, 1, BLOCK_E, RULES)
    a_tiles = grid_wide.allocated(a_low, a_high, STAGES, BLOCK_E, RULES)
    b_tiles = grid_wide.allocated(b_low, b_high, B_STAGES, BLOCK_E, RULES)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, tiles.GROUP_ROWS], row_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [B_STAGES, tiles.GROUP_ROWS], row_layout)
    # Eight rows of a quarter of a product, which a warp writes at once, lie in all banks.
    exchanged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    weights = gl.allocate_shared_memory(gl.float32, [tiles.GROUP_ROWS, tiles.GROUP_ROWS], exchanged)
    if OF_KEYS:
        slopes = ()
    else:
        slopes = gl.allocate_shared_memory(
            x_low.dtype, [2, tiles.GROUP_ROWS, tiles.GROUP_ROWS], tiles.shared_layout(tiles.GROUP_ROWS)
        )
    tile_full = wide.barriers(1, 1)  # [COUNT, 1]
    tile_free = wide.barriers(1, 2)  # [COUNT, 1]
    # Rows of lse come with a, rows of delta with b: the copying warp arrives once more.
    TOLD: gl.constexpr = (PADDING or EXTRA_PADDING) and not OF_KEYS
    a_full = wide.barriers(STAGES, 2 if OF_KEYS or TOLD else 1)  # [STAGES, 1]
    ceilings = a_full  # [STAGES, 1]; this stands in for them without padding
    if TOLD:
        states = gl.allocate_shared_memory(gl.int32, [STAGES, 1], row_layout)
        ceilings = steps.Ceilings(lse_rows, states)
    a_free = wide.barriers(STAGES, 2)  # [STAGES, 1]
    b_full = wide.barriers(B_STAGES, 2 if OF_KEYS else 1)  # [B_STAGES, 1]
    b_free = wide.barriers(B_STAGES, 2 if OF_KEYS else 1)  # [B_STAGES, 1]
    weights_full = wide.barriers(1, 1)  # [COUNT, 1]
    weights_free = wide.barriers(1, 1)  # [COUNT, 1]
    slopes_full = wide.barriers(2, 1)  # [COUNT, 1]
    shared = Shared(
        x_tiles, y_tiles, a_tiles, b_tiles, lse_rows, delta_rows, weights, slopes, tile_full, tile_free, a_full, a_free,
        b_full, b_free, weights_full, weights_free, slopes_full,
    )  # fmt: skip
    axes = boxes.axes_of((n0, n1, n2), (d0, d1, d2), part, RULES)
    moves = (xb, x0, x1, x2), (yb, y0, y1, y2), (ab, a0, a1, a2), (bb, b0, b1, b2), (eb, fb)
    u_moves, w_moves = (ub, u0, u1, u2), (wb, w0, w1, w2)
    sizes = (heads, group, extra, total, programs)
    key_masks, paddings = masks.KeyMasks(windows, ceilings), masks.Padding(padding, extra_padding)
    # The arguments are written out: a tuple that is assigned to a name loses its constants.
    if OF_KEYS:
        gl.warp_specialize([
            (_weigh_keys, (
                (w_low, w_high), windows, padding, scale, w_moves, shared, axes, sizes, BLOCK_E, RULES, PADDING,
                IN_FLOAT,
            )),
            (_slope_keys, (
                (u_low, u_high), windows, padding, scale, u_moves, shared, axes, sizes, BLOCK_E, RULES, PADDING,
                IN_FLOAT,
            )),
            (_copy, (
                lse, delta, (x_low, x_high), (y_low, y_high), (a_low, a_high), (b_low, b_high),
                (extra_a_low, extra_a_high), (extra_b_low, extra_b_high), key_masks, paddings, moves, shared, axes,
                sizes, RULES, False, True, False, False,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_weigh_queries, (
                lse, u_low, key_masks, scale, u_moves, shared, axes, sizes, RULES, EXTRA, TOLD,
            )),
            (_slope_queries, (delta, u_high, windows, scale, u_moves, shared, axes, sizes, BLOCK_E, RULES, EXTRA)),
            (_copy, (
                lse, delta, (x_low, x_high), (y_low, y_high), (a_low, a_high), (b_low, b_high),
                (extra_a_low, extra_a_high), (extra_b_low, extra_b_high), key_masks, paddings, moves, shared, axes,
                sizes, RULES, EXTRA, False, PADDING, EXTRA_PADDING,
            )),
        ], [4, 1], [240, 24])  # fmt: skip


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
        if turn > 0:
            tiles.wait_full(shared.tile_free, turn - 1)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        head = place.g if OF_KEYS else place.h
        full, corner = shared.tile_full.index(0), boxes.within(place.first, x_first)
        mbarrier.expect(
            full, x[0].block_type.nbytes + x[1].block_type.nbytes + y[0].block_type.nbytes + y[1].block_type.nbytes
        )
        wide.fetched(x[0], x[1], corner, boxes.moved(head, place, x_moves), shared.x, full, 0)
        wide.fetched(y[0], y[1], corner, boxes.moved(head, place, y_moves), shared.y, full, 0)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, OF_KEYS)
        for member in range(members):
            head = place.h + member if OF_KEYS else place.g
            a_at, b_at = boxes.moved(head, place, a_moves), boxes.moved(head, place, b_moves)
            step = (0, 0, 0)
            for _j in range(boxes.count_of(reaches)):
                box = boxes.box_of(step, reaches, axes, RULES)
                step = boxes.following(step, reaches, RULES)
                corner = boxes.within(box.corner, a_first)
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_cells(paddings, place, box.corner, axes, RULES, PADDING)  # [GROUP_ROWS]
                wide.fetch(a[0], a[1], corner, a_at, shared.a, shared.a_full, shared.a_free, block)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, shared.a_full, block, is_kept)
                wide.fetch(b[0], b[1], corner, b_at, shared.b, shared.b_full, shared.b_free, block)
                if OF_KEYS:
                    _store_rows(lse, delta, place.b * heads + head, box, place, axes, shared, block, RULES)
                block = tiles.counted(block + 1)
        if EXTRA:
            a_at, b_at = place.g + place.b * extra_moves[0], place.g + place.b * extra_moves[1]
            for j in range(0, extra, tiles.GROUP_ROWS):
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_extra(paddings, place.b, j, extra, EXTRA_PADDING)  # [GROUP_ROWS]
                wide.fetch(extra_a[0], extra_a[1], (0, 0, j), a_at, shared.a, shared.a_full, shared.a_free, block)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, shared.a_full, block, is_kept)
                wide.fetch(extra_b[0], extra_b[1], (0, 0, j), b_at, shared.b, shared.b_full, shared.b_free, block)
                block = tiles.counted(block + 1)


@gluon.jit
def _store_rows(lse, delta, sequence, box, place, axes, shared, block, RULES: gl.constexpr):
    """Store lse (to base 2) and delta of a box of queries; queries that are not computed get weight 0."""
    number = gl.arange(0, tiles.GROUP_ROWS, gl.BlockedLayout([tiles.GROUP_ROWS // 32], [32], [1], [0]))  # [GROUP_ROWS]
    ranks = boxes.ranks_of(number, box.corner, RULES)
    is_query = boxes.is_there(ranks, boxes.launch_queries(axes, RULES).stop)  # [GROUP_ROWS]
    row = boxes.row_of(sequence, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
    lse_row = grid_backward.as_exponent(gl.load(lse + row, mask=is_query, other=float("inf")))  # [GROUP_ROWS]
    delta_row = gl.load(delta + row, mask=is_query, other=0.0)  # [GROUP_ROWS]
    wide.hand_rows_over(lse_row, delta_row, shared, block)


@gluon.jit
def _weigh_queries(
    lse, dq, key_masks, scale, moves, shared, axes, sizes, RULES: gl.constexpr, EXTRA: gl.constexpr,
    PADDING: gl.constexpr,
):  # fmt: skip
    """The weights of 64 queries of each tile and every box of keys, and the low columns of dq."""
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
        corner = place.first
        sights = masks.sights_of(corner, number, reaches, axes, RULES)
        ranks = boxes.ranks_of(number, corner, RULES)
        is_query = boxes.is_there(ranks, queries.stop)  # [GROUP_ROWS]
        row = boxes.row_of(place.b * heads + place.h, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
        lse_row = grid_backward.as_exponent(gl.load(lse + row, mask=is_query, other=float("inf")))  # [GROUP_ROWS]
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        acc = wide.nothing(LOW)  # [GROUP_ROWS, LOW]
        step = (0, 0, 0)
        grid_boxes = boxes.count_of(reaches)
        box_count = grid_boxes + (gl.cdiv(extra, ROWS) if EXTRA else 0)
        for j in range(box_count):
            box = boxes.box_of(step, reaches, axes, RULES)
            tiles.wait_full(shared.a_full, block)
            score_token = wide.product(shared.x, shared.a, block)  # [GROUP_ROWS, GROUP_ROWS]
            if j > 0:
                tiles.wait_full(shared.slopes_full, block - 1)
            # The first box has none before it: what is multiplied then is thrown away.
            token = _by_slopes(shared, block + 1, gl.where(j > 0, block - 1, block), acc)  # [GROUP_ROWS, LOW]
            told = masks.told_of(key_masks, block, PADDING)
            step = boxes.following(step, reaches, RULES)
            scores = warpgroup_mma_wait(1, deps=[score_token])  # [GROUP_ROWS, GROUP_ROWS]
            scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, GROUP_ROWS]
            scores = masks.allowed(
                scores, sights, box, axes, j - grid_boxes, extra, RULES, EXTRA
            )  # [GROUP_ROWS, GROUP_ROWS]
            weights = masks.weights_of(
                scores, lse_row, sights, box, axes, j >= grid_boxes, scale, RULES, EXTRA
            )  # [GROUP_ROWS, GROUP_ROWS]
            # Those of the box before were read before its slopes came.
            shared.weights.store(weights)
            mbarrier.arrive(shared.weights_full.index(0))
            acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, LOW]
            if j > 0:
                wide.give_back(shared.a_free, block - 1)
            else:
                acc = gl.zeros_like(acc)  # [GROUP_ROWS, LOW]
            block = tiles.counted(block + 1)
        tiles.wait_full(shared.slopes_full, block - 1)
        acc = warpgroup_mma_wait(0, deps=[_by_slopes(shared, block + 1, block - 1, acc)])  # [GROUP_ROWS, LOW]
        wide.give_back(shared.a_free, block - 1)
        to = boxes.within(corner, queries.first)
        boxes.send(acc * scale, shared.x.low, 0, dq, to, boxes.moved(place.h, place, moves))
    tma.store_wait(0)


@gluon.jit
def _by_slopes(shared, buffer, block, acc):
    """The product of a box's slopes and the low columns of its keys, added to acc and started."""
    slopes = shared.slopes.index(buffer % 2)  # [GROUP_ROWS, GROUP_ROWS]
    return warpgroup_mma(slopes, tiles.tile_of_stage(shared.a.low, tiles.counted(block)), acc, is_async=True)


@gluon.jit
def _slope_queries(
    delta, dq, windows, scale, moves, shared, axes, sizes, BLOCK_E: gl.constexpr, RULES: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """The slopes of the same weights, and the high columns of dq."""
    heads, group, extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    dtype: gl.constexpr = shared.x.low.dtype
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
        reaches = boxes.reaches_of(place, windows, axes, RULES, False)
        ranks = boxes.ranks_of(number, place.first, RULES)
        is_query = boxes.is_there(ranks, queries.stop)  # [GROUP_ROWS]
        row = boxes.row_of(place.b * heads + place.h, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
        delta_row = gl.load(delta + row, mask=is_query, other=0.0)  # [GROUP_ROWS]
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        acc = wide.nothing(BLOCK_E)  # [GROUP_ROWS, BLOCK_E]
        slopes = steps.as_operand(wide.nothing(ROWS), dtype, BLOCK_E)  # [GROUP_ROWS, GROUP_ROWS]
        box_count = boxes.count_of(reaches) + (gl.cdiv(extra, ROWS) if EXTRA else 0)
        for j in range(box_count):
            tiles.wait_full(shared.b_full, block)
            product_token = wide.product(shared.y, shared.b, block)  # [GROUP_ROWS, GROUP_ROWS]
            before = tiles.counted(gl.where(j > 0, block - 1, block))
            tiles.wait_full(shared.a_full, before)
            token = warpgroup_mma(
                slopes, tiles.tile_of_stage(shared.a.high, before), acc, is_async=True
            )  # [GROUP_ROWS, BLOCK_E]
            products = warpgroup_mma_wait(1, deps=[product_token])  # [GROUP_ROWS, GROUP_ROWS]
            wide.give_back(shared.b_free, block)
            tiles.wait_full(shared.weights_full, block)
            new_slopes = shared.weights.load(SCORES) * (products - delta_row[:, None])  # [GROUP_ROWS, GROUP_ROWS]
            # The product of the last but one was waited for before these weights came.
            shared.slopes.index(block % 2).store(new_slopes.to(dtype))
            fence_async_shared()
            mbarrier.arrive(shared.slopes_full.index(block % 2))
            acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, BLOCK_E]
            if j > 0:
                wide.give_back(shared.a_free, block - 1)
            # Not before the wait: ptxas would make the products wait for one another.
            slopes = steps.as_operand(new_slopes, dtype, BLOCK_E)  # [GROUP_ROWS, GROUP_ROWS]
            block = tiles.counted(block + 1)
        tiles.wait_full(shared.a_full, block - 1)
        token = warpgroup_mma(
            slopes, tiles.tile_of_stage(shared.a.high, tiles.counted(block - 1)), acc, is_async=True
        )  # [GROUP_ROWS, BLOCK_E]
        acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, BLOCK_E]
        wide.give_back(shared.a_free, block - 1)
        to = boxes.within(place.first, queries.first)
        boxes.send(acc * scale, shared.y.high, 0, dq, to, boxes.moved(place.h, place, moves), LOW)
    tma.store_wait(0)


@gluon.jit
def _weigh_keys(
    dv, windows, padding, scale, moves, shared, axes, sizes, BLOCK_E: gl.constexpr, RULES: gl.constexpr,
    PADDING: gl.constexpr, IN_FLOAT: gl.constexpr,
):  # fmt: skip
    """The weights of 64 keys of each tile and every box of queries, transposed, and dv."""
    heads, group, _extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    dtype: gl.constexpr = shared.x.low.dtype
    number = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, True)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, True)
        digits = places.added(digits, ahead, counts)
        reaches = boxes.reaches_of(place, windows, axes, RULES, True)
        corner = place.first
        seers = masks.seers_of(corner, number, reaches, axes, RULES)
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        low, high = wide.nothing(LOW), wide.nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        operand = steps.as_operand(wide.nothing(ROWS), dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        first_block = block
        for _member in range(group):
            step = (0, 0, 0)
            for _j in range(boxes.count_of(reaches)):
                low, high, token = wide.begun(  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
                    operand, low, high, shared.b, shared.b_full, shared.x, shared.a, shared.a_full, block, first_block,
                    BLOCK_E,
                )  # fmt: skip
                box = boxes.box_of(step, reaches, axes, RULES)
                step = boxes.following(step, reaches, RULES)
                low, high, scores = wide.ended(
                    low, high, token, shared, block, first_block
                )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
                scores = masks.hidden(scores, seers, box, axes, RULES)  # [GROUP_ROWS, GROUP_ROWS]
                weights = wide.weights_of(scores, scale, shared, block)  # [GROUP_ROWS, GROUP_ROWS]
                wide.hand_over(weights, shared, block)
                operand = steps.as_operand(weights, dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
                block = tiles.counted(block + 1)
        low, high = wide.last(
            operand, low, high, shared.b, shared.b_full, shared, block, first_block, BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        _write(low, high, dv, padding, moves, shared.x, place, axes, sizes, BLOCK_E, RULES, PADDING, IN_FLOAT)
    tma.store_wait(0)


@gluon.jit
def _slope_keys(
    dk, windows, padding, scale, moves, shared, axes, sizes, BLOCK_E: gl.constexpr, RULES: gl.constexpr,
    PADDING: gl.constexpr, IN_FLOAT: gl.constexpr,
):  # fmt: skip
    """The slopes of the same weights, and dk."""
    heads, group, _extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    dtype: gl.constexpr = shared.x.low.dtype
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, True)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, True)
        digits = places.added(digits, ahead, counts)
        reaches = boxes.reaches_of(place, windows, axes, RULES, True)
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        low, high = wide.nothing(LOW), wide.nothing(BLOCK_E)  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        operand = steps.as_operand(wide.nothing(ROWS), dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
        first_block = block
        for _j in range(group * boxes.count_of(reaches)):
            low, high, token = wide.begun(  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
                operand, low, high, shared.a, shared.a_full, shared.y, shared.b, shared.b_full, block, first_block,
                BLOCK_E,
            )  # fmt: skip
            low, high, products = wide.ended(
                low, high, token, shared, block, first_block
            )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E], [GROUP_ROWS, GROUP_ROWS]
            slopes = wide.slopes_of(products, shared, block, 0, False)  # [GROUP_ROWS, GROUP_ROWS]
            operand = steps.as_operand(slopes, dtype, LOW)  # [GROUP_ROWS, GROUP_ROWS]
            block = tiles.counted(block + 1)
        low, high = wide.last(
            operand, low, high, shared.a, shared.a_full, shared, block, first_block, BLOCK_E
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
        _write(
            low * scale,
            high * scale,
            dk,
            padding,
            moves,
            shared.y,
            place,
            axes,
            sizes,
            BLOCK_E,
            RULES,
            PADDING,
            IN_FLOAT,
        )
    tma.store_wait(0)


@gluon.jit
def _write(
    low, high, to, padding, moves, parts, place, axes, sizes, BLOCK_E: gl.constexpr, RULES: gl.constexpr,
    PADDING: gl.constexpr, IN_FLOAT: gl.constexpr,
):  # fmt: skip
    """Write both parts of a gradient of keys, 0 for keys without weight."""
    heads, group, _extra, _total, _programs = sizes
    if PADDING:
        low_weighs = grid_backward.weighing(LOW, padding, place.first, place, axes, RULES)  # [GROUP_ROWS, 1]
        high_weighs = grid_backward.weighing(BLOCK_E, padding, place.first, place, axes, RULES)  # [GROUP_ROWS, 1]
        low, high = (
            gl.where(low_weighs, low, 0.0),
            gl.where(high_weighs, high, 0.0),
        )  # [GROUP_ROWS, LOW], [GROUP_ROWS, BLOCK_E]
    if IN_FLOAT:
        grid_backward.store(low, to[0], place.first, place, axes, heads // group, RULES, IN_FLOAT)
        grid_backward.store(high, to[1], place.first, place, axes, heads // group, RULES, IN_FLOAT, LOW)
    else:
        head_at = boxes.moved(place.g, place, moves)
        boxes.send(low, parts.low, 0, to[0], place.first, head_at)
        boxes.send(high, parts.high, 0, to[1], place.first, head_at, LOW)
