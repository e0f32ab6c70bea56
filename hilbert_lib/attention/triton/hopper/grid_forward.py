"""Neighbourhood attention's forward for Hopper, warp-specialised: keys are read in boxes, wherever a window begins.

A program stays on its multiprocessor and takes one tile after the other. A tile is two groups of 64 queries that are
neighbours. One warp copies queries and boxes of keys (`boxes`). Each group multiplies the boxes that it sees (`masks`):

    copying warp   q of tile | box 0 | box 1 | box 2 | ...     q of the next tile | box 0 ...
    ring                       stage 0  stage 1  stage 2 ...   a stage is free once both groups gave it back
    group 0                    box 0   (pass)  box 2
    group 1                    (pass)  box 1   box 2
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from hilbert_lib.attention.triton.grid import NOT_SPECIALIZED
from hilbert_lib.attention.triton.hopper import bias as biases
from hilbert_lib.attention.triton.hopper import boxes, masks, places, steps, tiles

# Steps along the axis of heads of a descriptor, from a sequence (b), and a residue of each axis (0, 1, 2), to the next.
MOVES = ("qb", "q0", "q1", "q2", "kb", "k0", "k1", "k2", "vb", "v0", "v1", "v2", "ob", "o0", "o1", "o2", "eb", "fb")


class Shared(NamedTuple):
    """Shared memory of a program besides the ring."""

    out_tiles: gl.shared_memory_descriptor  # [groups, *box, 1, columns]
    q_tiles: gl.shared_memory_descriptor  # [buffers * groups, *box, 1, columns]
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor


class Results(NamedTuple):
    """Tensors that the kernel writes."""

    lse: gl.tensor  # (batch, heads, queries)
    flag: gl.tensor  # 1 where a row is NaN
    out: gl.tensor  # a descriptor


@gluon.constexpr_function
def holds_queries(columns):
    """Whether a group keeps its queries in registers, and computes scores beside the last box's product with v.

    Then a multiprocessor has room for one program. Otherwise it has two, and each hides the waits of the other.
    """
    return columns == 128


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *MOVES, "total", "programs"])
def forward_kernel(
    lse, flag, q, k, v, extra_k, extra_v, out, bias, windows, part, padding, extra_padding, scale,
    qb, q0, q1, q2, kb, k0, k1, k2, vb, v0, v1, v2, ob, o0, o1, o2, eb, fb,
    heads, group, extra, n0, n1, n2, d0, d1, d2, total, programs,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, RULES: gl.constexpr, EXTRA: gl.constexpr, PADDING: gl.constexpr,
    EXTRA_PADDING: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Output and lse of tiles of 128 queries. q, k, v, the extra keys and out are descriptors (`box_descriptors`).
    BIAS: the `bias.Form` of the table of bias, or None.

    flag becomes 1 where a row is NaN. A value that is not attended to and not finite may cause that. So the plain
    kernel then runs again.
    """
    dtype: gl.constexpr = q.dtype
    B0: gl.constexpr = boxes.side(RULES, 0)
    B1: gl.constexpr = boxes.side(RULES, 1)
    B2: gl.constexpr = boxes.side(RULES, 2)
    K0: gl.constexpr = boxes.key_side(RULES, 0)
    K1: gl.constexpr = boxes.key_side(RULES, 1)
    K2: gl.constexpr = boxes.key_side(RULES, 2)
    # Registers of the second group. With two programs, the first group has those that it and the copying warp leave.
    REGISTERS: gl.constexpr = 240 if holds_queries(BLOCK_D) else 104
    out_tiles = gl.allocate_shared_memory(dtype, [2, B0, B1, B2, 1, BLOCK_D], q.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * boxes.BUFFERS, B0, B1, B2, 1, BLOCK_D], q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, K0, K1, K2, 1, BLOCK_D], k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, K0, K1, K2, 1, BLOCK_D], v.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    TOLD: gl.constexpr = PADDING or EXTRA_PADDING
    ceilings = full  # [STAGES, 1]; this stands in for them without padding
    if TOLD:
        # In float32 two programs of 64 columns would not fit in a multiprocessor.
        ceilings = steps.ceilings_of(STAGES, tiles.GROUP_ROWS, gl.bfloat16)
    q_full = gl.allocate_shared_memory(gl.int64, [boxes.BUFFERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [boxes.BUFFERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2 if TOLD else 1)
    for buffer in gl.static_range(boxes.BUFFERS):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_free.index(buffer), count=2)
    # One barrier serves the k and v of a box: once its scores are computed, its v is there too.
    ring, shared = tiles.Ring(k_tiles, v_tiles, full, full), Shared(out_tiles, q_tiles, q_full, q_free)
    axes = boxes.axes_of((n0, n1, n2), (d0, d1, d2), part, RULES)
    moves = (qb, q0, q1, q2), (kb, k0, k1, k2), (vb, v0, v1, v2), (eb, fb)
    out_moves = (ob, o0, o1, o2)
    sizes = (heads, group, extra, total, programs)
    results, key_masks = Results(lse, flag, out), masks.KeyMasks(windows, ceilings)
    paddings = masks.Padding(padding, extra_padding)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_attend, (
            0, results, key_masks, bias, scale, out_moves, shared, ring, axes, sizes,
            BLOCK_D, RULES, EXTRA, TOLD, BIAS,
        )),
        (_attend, (
            1, results, key_masks, bias, scale, out_moves, shared, ring, axes, sizes,
            BLOCK_D, RULES, EXTRA, TOLD, BIAS,
        )),
        (_copy, (
            q, k, v, extra_k, extra_v, key_masks, paddings, moves, shared, ring, axes, sizes, RULES, EXTRA, PADDING,
            EXTRA_PADDING,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def _copy(
    q, k, v, extra_k, extra_v, key_masks, paddings, moves, shared, ring, axes, sizes, RULES: gl.constexpr,
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
        buffer = turn % boxes.BUFFERS
        if turn >= boxes.BUFFERS:
            mbarrier.wait(shared.q_free.index(buffer), (turn // boxes.BUFFERS & 1) ^ 1)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        mbarrier.expect(shared.q_full.index(buffer), 2 * q.block_type.nbytes)
        q_at = boxes.moved(place.h, place, q_moves)
        first = boxes.launch_queries(axes, RULES).first
        boxes.fetch_tile(q, q_at, place, first, shared.q_full.index(buffer), shared.q_tiles, buffer, RULES)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, False)
        k_at, v_at = boxes.moved(place.g, place, k_moves), boxes.moved(place.g, place, v_moves)
        step = (0, 0, 0)
        for _j in range(boxes.count_of(reaches)):
            corner = boxes.box_of(step, reaches, axes, RULES).corner
            rank0, rank1, rank2 = corner
            step = boxes.following(step, reaches, RULES)
            if PADDING or EXTRA_PADDING:
                is_kept = masks.kept_cells(paddings, place, corner, axes, RULES, PADDING)  # [GROUP_ROWS]
            _fetch(k, v, [rank0, rank1, rank2, k_at, 0], [rank0, rank1, rank2, v_at, 0], ring, block)
            if PADDING or EXTRA_PADDING:
                masks.tell(key_masks.ceilings, ring.k_full, block, is_kept)
            block += 1
        if EXTRA:
            k_at, v_at = place.g + place.b * extra_moves[0], place.g + place.b * extra_moves[1]
            for j in range(0, extra, tiles.GROUP_ROWS):
                if PADDING or EXTRA_PADDING:
                    is_kept = masks.kept_extra(paddings, place.b, j, extra, EXTRA_PADDING)  # [GROUP_ROWS]
                _fetch(extra_k, extra_v, [0, 0, j, k_at, 0], [0, 0, j, v_at, 0], ring, block)
                if PADDING or EXTRA_PADDING:
                    masks.tell(key_masks.ceilings, ring.k_full, block, is_kept)
                block += 1


@gluon.jit
def _fetch(k, v, k_at, v_at, ring, block):
    """Copy a box of k and of v to the ring, once both groups have given its stage back."""
    stage = block % ring.k_tiles.shape[0]
    if block >= ring.k_tiles.shape[0]:
        tiles.meet(steps.k_free(ring, block))
    mbarrier.expect(ring.k_full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
    boxes.fetch(k, k_at, ring.k_full.index(stage), ring.k_tiles.index(stage))
    if block >= ring.k_tiles.shape[0]:
        tiles.meet(steps.v_free(ring, block))
    boxes.fetch(v, v_at, ring.v_full.index(stage), ring.v_tiles.index(stage))


@gluon.jit
def _attend(
    NUMBER: gl.constexpr, results, key_masks, bias, scale, moves, shared, ring, axes, sizes, BLOCK_D: gl.constexpr,
    RULES: gl.constexpr, EXTRA: gl.constexpr, PADDING: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of each tile against every box of keys that it sees.

    With LATE the product of a box with v runs beside the scores of the next one:

        box 0       q k0             softmax
        box 1       q k1, p0 v0      softmax, while p0 v0 runs
        box 2       q k2, p1 v1      softmax, while p1 v1 runs
        next tile   q k0, p2 v2      softmax, then the output of the last tile is written
    """
    heads, group, extra, total, programs = sizes
    ROWS: gl.constexpr = tiles.GROUP_ROWS
    SCORES: gl.constexpr = tiles.product_layout(ROWS)
    LATE: gl.constexpr = holds_queries(BLOCK_D)  # products with v, and with them a tile's output
    number = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    stop = boxes.launch_queries(axes, RULES).stop
    acc, sums, largest = steps.nothing(BLOCK_D, ROWS)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    weights = steps.as_operand(
        gl.zeros([ROWS, ROWS], gl.float32, SCORES), shared.q_tiles.dtype, BLOCK_D
    )  # [GROUP_ROWS, GROUP_ROWS]
    block = 0
    turn = 0
    last = -1  # the box whose product with v is still to come
    # Place of the rows of acc, which are written as the next tile begins; at first there is none.
    goal = (-masks.FAR, 0, 0, 0, 0)
    counts = places.counts_of(axes, heads, group, RULES, False)
    first_tile, stop_tile = places.tiles_of(total, programs)
    digits, ahead = places.digits_of(first_tile, counts), places.digits_of(programs, counts)
    for _number in range(first_tile, stop_tile, programs):
        place = places.place_of(digits, axes, group, RULES, False)
        digits = places.added(digits, ahead, counts)
        reaches = boxes.reaches_of(place, key_masks.windows, axes, RULES, False)
        corner = boxes.corner_of(NUMBER, place.first, RULES)
        sights = masks.sights_of(corner, number, reaches, axes, RULES)
        if BIAS is not None:
            table = biases.table_of(bias, place.h, boxes.ranks_of(number, corner, RULES), RULES, BIAS)
        buffer = turn % boxes.BUFFERS
        mbarrier.wait(shared.q_full.index(buffer), turn // boxes.BUFFERS & 1)
        turn += 1  # noqa: SIM113 - a kernel has no enumerate
        q_tile = boxes.rows_of(shared.q_tiles, 2 * buffer + NUMBER)  # [GROUP_ROWS, BLOCK_D]
        if LATE:
            q_tile = q_tile.load(gl.DotOperandLayout(0, SCORES, 2))  # [GROUP_ROWS, BLOCK_D]
            mbarrier.arrive(shared.q_free.index(buffer))
        is_first = True
        grid_boxes = boxes.count_of(reaches)
        box_count = grid_boxes + (gl.cdiv(extra, ROWS) if EXTRA else 0)
        step = (0, 0, 0)
        box = boxes.box_of(step, reaches, axes, RULES)
        is_seen = masks.sees_or_extra(sights, box, corner, stop, 0 - grid_boxes, RULES, EXTRA)
        for j in range(box_count):
            this_box = box
            if is_seen:
                if BIAS is not None:
                    bias_tile = biases.tile_of(
                        table, this_box, reaches, axes, j >= grid_boxes, RULES, BIAS, False, EXTRA
                    )  # [GROUP_ROWS, GROUP_ROWS]
                    score_token = steps.start_scores_on(bias_tile, q_tile, ring, block)  # [GROUP_ROWS, GROUP_ROWS]
                else:
                    score_token = steps.start_scores(q_tile, ring, block)  # [GROUP_ROWS, KEYS]
                token = score_token  # [GROUP_ROWS, KEYS]
                if LATE:
                    token = _values(weights, acc, ring, last)  # [GROUP_ROWS, BLOCK_D]
                # While these products are computed: where the next box is, and whether it is seen.
                told = masks.told_of(key_masks, block, PADDING)
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
                scores = warpgroup_mma_wait(1 if LATE else 0, deps=[score_token])  # [GROUP_ROWS, KEYS]
                scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, KEYS]
                tiles.arrive(steps.k_free(ring, block))
                scores = masks.allowed(
                    scores, sights, this_box, axes, j - grid_boxes, extra, RULES, EXTRA
                )  # [GROUP_ROWS, KEYS]
                before, before_sums = largest, sums  # [GROUP_ROWS], [GROUP_ROWS, 4]
                if LATE:
                    # The last tile's product with v runs beside the first scores of this one.
                    largest = gl.where(is_first, float("-inf"), largest)  # [GROUP_ROWS]
                    sums = gl.where(is_first, 0.0, sums)  # [GROUP_ROWS, 4]
                new_weights, decay, largest, sums = softmax(
                    scores, sights, this_box, axes, j >= grid_boxes, largest, sums, scale, RULES, EXTRA
                )  # [GROUP_ROWS, KEYS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
                if LATE:
                    sums = tiles.held(sums, heads)  # [GROUP_ROWS, 4]
                    acc = warpgroup_mma_wait(0, deps=[token])  # [GROUP_ROWS, BLOCK_D]
                    weights = steps.as_operand(new_weights, shared.q_tiles.dtype, BLOCK_D)  # [GROUP_ROWS, KEYS]
                    if last >= 0:
                        tiles.arrive(steps.v_free(ring, last))
                    if is_first:
                        _write(NUMBER, acc, before_sums, before, goal, results, shared, axes, RULES)
                        acc = gl.zeros_like(acc)  # [GROUP_ROWS, BLOCK_D]
                        goal = _goal_of(place, corner, moves, axes, heads, RULES)
                    else:
                        acc = steps.scaled_if_any(acc, decay)  # [GROUP_ROWS, BLOCK_D]
                    is_first = False
                    last = block
                else:
                    acc = steps.scaled_if_any(acc, decay)  # [GROUP_ROWS, BLOCK_D]
                    weights = steps.as_operand(new_weights, shared.q_tiles.dtype, BLOCK_D)  # [GROUP_ROWS, KEYS]
                    acc = warpgroup_mma_wait(0, deps=[_values(weights, acc, ring, block)])  # [GROUP_ROWS, BLOCK_D]
                    tiles.arrive(steps.v_free(ring, block))
            else:
                if LATE & (last >= 0) & (block - last >= ring.k_tiles.shape[0] - 1):
                    # The copying warp would wait for the stage of `last`. So this box takes its place, with weights 0.
                    acc = warpgroup_mma_wait(0, deps=[_values(weights, acc, ring, last)])  # [GROUP_ROWS, BLOCK_D]
                    tiles.arrive(steps.v_free(ring, last))
                    tiles.wait_full(ring.k_full, block)
                    tiles.arrive(steps.k_free(ring, block))
                    weights = gl.zeros_like(weights)  # [GROUP_ROWS, KEYS]
                    last = block
                else:
                    _pass_over(ring, block)
                step, box, is_seen = masks.following(
                    step, sights, reaches, corner, stop, j + 1 - grid_boxes, axes, RULES, EXTRA
                )
            block = tiles.counted(block + 1)
        if not LATE:
            mbarrier.arrive(shared.q_free.index(buffer))
            goal = _goal_of(place, corner, moves, axes, heads, RULES)
            _write(NUMBER, acc, sums, largest, goal, results, shared, axes, RULES)
            acc, sums, largest = steps.nothing(BLOCK_D, ROWS)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    if LATE:
        if last >= 0:
            acc = warpgroup_mma_wait(0, deps=[_values(weights, acc, ring, last)])  # [GROUP_ROWS, BLOCK_D]
            tiles.arrive(steps.v_free(ring, last))
        _write(NUMBER, acc, sums, largest, goal, results, shared, axes, RULES)
    tma.store_wait(0)


@gluon.jit
def _values(weights, acc, ring, block):
    """The product of a box's weights with its v, started. Before the first box it is zeros times anything."""
    return warpgroup_mma(weights, tiles.tile_of_stage(ring.v_tiles, tiles.counted(block)), acc, is_async=True)


@gluon.jit
def _pass_over(ring, block):
    """Give back a box that this group does not see."""
    tiles.wait_full(ring.k_full, block)
    tiles.arrive(steps.k_free(ring, block))
    tiles.arrive(steps.v_free(ring, block))


@gluon.jit
def softmax(scores, sights, box, axes, is_extra, m, total, scale, RULES: gl.constexpr, EXTRA: gl.constexpr):
    """`steps.softmax`, with the mask of the last axis where `masks.is_apart`."""
    if masks.is_apart(RULES):
        shaped = masks.apart(scores, RULES)  # [GROUP_ROWS, columns, SIDE]
        sees_cell = masks.seen_last(shaped, sights, box, axes, is_extra, RULES, EXTRA)  # [GROUP_ROWS, KEY_SIDE]
        largest = gl.convert_layout(gl.max(shaped, 1), sees_cell.type.layout)  # [GROUP_ROWS, SIDE]
        largest = gl.convert_layout(
            gl.max(gl.where(sees_cell, largest, float("-inf")), 1), m.type.layout
        )  # [GROUP_ROWS]
        largest, finite = steps.subtracted(largest, m, scale)  # [GROUP_ROWS] each
        weights = masks.weights_apart(scores, finite, sees_cell, scale, RULES)  # [GROUP_ROWS, columns]
        decay, total = steps.joined(weights, finite, m, total)  # [GROUP_ROWS], [GROUP_ROWS, 4]
    else:
        weights, decay, largest, total = steps.softmax(
            scores, m, total, scale
        )  # [GROUP_ROWS, columns], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
    return weights, decay, largest, total


@gluon.jit
def _goal_of(place, corner, moves, axes, heads, RULES: gl.constexpr):
    """Place of a group's output: ranks of its corner, coordinate on the axis of heads, and row of lse."""
    row = boxes.row_of(place.b * heads + place.h, corner, place.residue, axes, RULES)
    return corner[0], corner[1], corner[2], boxes.moved(place.h, place, moves), row


@gluon.jit
def _write(NUMBER: gl.constexpr, acc, sums, largest, goal, results, shared, axes, RULES: gl.constexpr):
    """Write output and lse of a group's queries."""
    rank0, rank1, rank2, head_at, row = goal
    corner = (rank0, rank1, rank2)
    result, result_lse = steps.normalized(acc, sums, largest)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
    tma.store_wait(0)  # the tile before has left
    queries = boxes.launch_queries(axes, RULES)
    boxes.send(result, shared.out_tiles, NUMBER, results.out, boxes.within(corner, queries.first), head_at)
    number = gl.arange(0, tiles.GROUP_ROWS, largest.type.layout)  # [GROUP_ROWS]
    exists = (rank0 >= 0) & boxes.is_there(boxes.ranks_of(number, corner, RULES), queries.stop)  # [GROUP_ROWS]
    ranks = boxes.ranks_of(number, (0, 0, 0), RULES)
    row = row + boxes.cell_of(ranks, (0, 0, 0), axes.d, queries.cells)  # [GROUP_ROWS]
    gl.store(results.lse + row, result_lse, mask=exists)
    total = gl.convert_layout(gl.sum(result, 1), largest.type.layout)  # [GROUP_ROWS]; NaN if one of them is
    gl.store(results.flag + gl.zeros_like(number), gl.zeros_like(number) + 1, mask=exists & (total != total))
