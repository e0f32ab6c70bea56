"""Neighbourhood attention's forward where each window is whole boxes of 128 keys: nothing is masked or passed over.

Queries of a group of a stride share a window. Where a tile lies in one group, all its queries see the same keys, and
where the window's sides are multiples of a box's, all of each box:

    +-------+-------+-------+
    |       |       |       |     each square is a box of 128 keys
    +-------+-------+-------+     the window of all 128 queries of the tile
    |       | tile  |       |
    +-------+-------+-------+

So the work on a box is that of a sequence (`steps.step`), with boxes that `boxes` finds.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from hilbert_lib.attention.triton.grid import NOT_SPECIALIZED
from hilbert_lib.attention.triton.hopper import boxes, grid_backward, grid_forward, places, steps, tiles

MOVES = grid_forward.MOVES


class Shared(NamedTuple):
    """Shared memory of a program besides the ring: queries, whose rows its output leaves through."""

    q_tiles: gl.shared_memory_descriptor  # [buffers * groups, *box, 1, columns]
    tile_full: gl.shared_memory_descriptor
    tile_free: gl.shared_memory_descriptor


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *MOVES, "total", "programs"])
def whole_kernel(
    lse, q, k, v, extra_k, extra_v, out, windows, part, scale,
    qb, q0, q1, q2, kb, k0, k1, k2, vb, v0, v1, v2, ob, o0, o1, o2, eb, fb,
    heads, group, extra, n0, n1, n2, d0, d1, d2, total, programs,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, RULES: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """Output and lse of tiles of 128 queries, as of `grid_forward`; k, v and the extra keys come in boxes of 128."""
    dtype: gl.constexpr = q.dtype
    B0: gl.constexpr = boxes.side(RULES, 0)
    B1: gl.constexpr = boxes.side(RULES, 1)
    B2: gl.constexpr = boxes.side(RULES, 2)
    K0: gl.constexpr = boxes.key_side(RULES, 0)
    K1: gl.constexpr = boxes.key_side(RULES, 1)
    K2: gl.constexpr = boxes.key_side(RULES, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * boxes.BUFFERS, B0, B1, B2, 1, BLOCK_D], q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, K0, K1, K2, 1, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, K0, K1, K2, 1, BLOCK_D], v.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [boxes.BUFFERS, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [boxes.BUFFERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
    for buffer in gl.static_range(boxes.BUFFERS):
        mbarrier.init(tile_full.index(buffer), count=1)
        mbarrier.init(tile_free.index(buffer), count=2)
    ring, shared = tiles.Ring(k_tiles, v_tiles, k_full, v_full), Shared(q_tiles, tile_full, tile_free)
    axes = boxes.axes_of((n0, n1, n2), (d0, d1, d2), part, RULES)
    moves = (qb, q0, q1, q2), (kb, k0, k1, k2), (vb, v0, v1, v2), (eb, fb)
    out_moves = (ob, o0, o1, o2)
    sizes = (heads, group, extra, total, programs)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_attend, (0, lse, out, windows, scale, out_moves, shared, ring, axes, sizes, BLOCK_D, RULES, EXTRA)),
        (_attend, (1, lse, out, windows, scale, out_moves, shared, ring, axes, sizes, BLOCK_D, RULES, EXTRA)),
        (_copy, (q, k, v, extra_k, extra_v, windows, moves, shared, ring, axes, sizes, RULES, EXTRA)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _copy(
    q, k, v, extra_k, extra_v, windows, moves, shared, ring, axes, sizes, RULES: gl.constexpr, EXTRA: gl.constexpr
):
    """Copy tiles of queries and boxes of keys, in the order in which the groups take them."""
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
        buffer = turn % boxes.BUFFERS
        if turn >= boxes.BUFFERS:
            tiles.wait_full(shared.tile_free, turn - boxes.BUFFERS)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        full = shared.tile_full.index(buffer)
        mbarrier.expect(full, 2 * q.block_type.nbytes)
        first = boxes.launch_queries(axes, RULES).first
        boxes.fetch_tile(q, boxes.moved(place.h, place, q_moves), place, first, full, shared.q_tiles, buffer, RULES)
        reaches = boxes.reaches_of(place, windows, axes, RULES, False)
        k_at, v_at = boxes.moved(place.g, place, k_moves), boxes.moved(place.g, place, v_moves)
        step = (0, 0, 0)
        for _j in range(boxes.count_of(reaches)):
            corner = boxes.box_of(step, reaches, axes, RULES).corner
            step = boxes.following(step, reaches, RULES)
            _fetch(k, v, corner, k_at, v_at, ring, block)
            block = tiles.counted(block + 1)
        if EXTRA:
            k_at, v_at = place.g + place.b * extra_moves[0], place.g + place.b * extra_moves[1]
            for j in range(0, extra, tiles.rows_of(ring.k_tiles.shape)):
                _fetch(extra_k, extra_v, (0, 0, j), k_at, v_at, ring, block)
                block = tiles.counted(block + 1)


@gluon.jit
def _fetch(k, v, corner, k_at, v_at, ring, block):
    """Copy a box of k and of v to the ring, each once both groups have given its stage back."""
    STAGES: gl.constexpr = ring.k_tiles.shape[0]
    stage = block % STAGES
    if block >= STAGES:
        tiles.meet(steps.k_free(ring, block))
    mbarrier.expect(ring.k_full.index(stage), k.block_type.nbytes)
    boxes.fetch(k, [corner[0], corner[1], corner[2], k_at, 0], ring.k_full.index(stage), ring.k_tiles.index(stage))
    if block >= STAGES:
        tiles.meet(steps.v_free(ring, block))
    mbarrier.expect(ring.v_full.index(stage), v.block_type.nbytes)
    boxes.fetch(v, [corner[0], corner[1], corner[2], v_at, 0], ring.v_full.index(stage), ring.v_tiles.index(stage))


@gluon.jit
def _attend(
    NUMBER: gl.constexpr, lse, out, windows, scale, moves, shared, ring, axes, sizes, BLOCK_D: gl.constexpr,
    RULES: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of each tile against every box of keys."""
    heads, group, extra, total, programs = sizes
    KEYS: gl.constexpr = tiles.rows_of(ring.k_tiles.shape)
    SCORES: gl.constexpr = tiles.product_layout(KEYS)
    number = gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    queries = boxes.launch_queries(axes, RULES)
    block = 0
    turn = 0
    counts = places.counts_of(axes, heads, group, RULES, False)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, False)
        digits = places.added(digits, ahead, counts)
        box_count = boxes.count_of(boxes.reaches_of(place, windows, axes, RULES, False))
        if EXTRA:
            box_count += extra // KEYS
        own_tile = 2 * (turn % boxes.BUFFERS) + NUMBER
        grid_backward.await_tile(shared, turn)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        q_tile = boxes.rows_of(shared.q_tiles, own_tile)  # [GROUP_ROWS, BLOCK_D]
        acc, sums, largest = steps.nothing(BLOCK_D, KEYS)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
        scores, _ = steps.scores_alone(
            q_tile, ring, ring.k_full, ring.k_full, ring.k_full, ring.k_full, block, False, False, False, False
        )  # [GROUP_ROWS, KEYS], [1, QUADS]
        weights, _, largest, sums = steps.softmax(
            scores, largest, sums, scale
        )  # [GROUP_ROWS, KEYS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
        weights = steps.as_operand(weights, q_tile.dtype, BLOCK_D)  # [GROUP_ROWS, KEYS]
        block = tiles.counted(block + 1)
        for _j in range(1, box_count):
            acc, sums, largest, weights = steps.step(
                acc, sums, largest, weights, q_tile, ring, ring.k_full, ring.k_full, ring.k_full, block, block, scale,
                heads, False, False, False, False, False,
            )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS], [GROUP_ROWS, KEYS]  # fmt: skip
            block = tiles.counted(block + 1)
        if EXTRA:  # noqa: SIM102 - a constant is not joined with a tensor
            if extra % KEYS > 0:
                seen_count = gl.zeros_like(number) + extra % KEYS  # [GROUP_ROWS]
                acc, sums, largest, weights = steps.step(
                    acc, sums, largest, weights, q_tile, ring, ring.k_full, ring.k_full, ring.k_full, seen_count,
                    block, scale, heads, True, False, False, False, False,
                )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS], [GROUP_ROWS, KEYS]  # fmt: skip
                block = tiles.counted(block + 1)
        last = tiles.counted(block - 1)
        acc = warpgroup_mma_wait(0, deps=[steps.values(weights, acc, ring, last)])  # [GROUP_ROWS, BLOCK_D]
        tiles.arrive(steps.v_free(ring, last))
        result, row_lse = steps.normalized(acc, sums, largest)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
        corner = boxes.corner_of(NUMBER, place.first, RULES)
        ranks = boxes.ranks_of(number, corner, RULES)
        row = boxes.row_of(place.b * heads + place.h, ranks, place.residue, axes, RULES)  # [GROUP_ROWS]
        gl.store(lse + row, row_lse, mask=boxes.is_there(ranks, queries.stop))
        at = boxes.within(corner, queries.first)
        boxes.send(result, shared.q_tiles, own_tile, out, at, boxes.moved(place.h, place, moves))
    tma.store_wait(0)
