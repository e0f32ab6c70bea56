"""The forward for Hopper, warp-specialised: one warp copies tiles of k and v, two groups of warps compute.

Gluon, Triton's lower dialect, is its language; its plain twin in `triton.forward` serves all other calls. The copy
engine reads a dilated tile as the rows of one residue, without an instruction of the computing warps. Each group
multiplies 64 queries (`steps` has the work on one block of keys):

    copying warp   k0 v0 | k1 v1 | k2 v2 | ...            a ring of stages in shared memory
    group 0        products | softmax  | products | ...    one group has the tensor cores
    group 1                 | products | softmax  | ...    while the other is at its softmax

Above head_dim 64 `order` says which block comes when, where some are cut off.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from hilbert_lib.attention.triton import geometry
from hilbert_lib.attention.triton.hopper import dropout, order, tiles
from hilbert_lib.attention.triton.hopper.steps import (
    END,
    as_operand,
    ceilings_of,
    goes_on,
    halves,
    in_halves,
    is_listed,
    k_free,
    keys_at_once,
    normalized,
    nothing,
    pass_over,
    scores_alone,
    softmax,
    step,
    tell_ceilings,
    v_free,
    values,
    whole_first,
)


@gluon.jit(do_not_specialize=geometry.NOT_SPECIALIZED)
def forward_kernel(
    q, out, lse, flag,
    k0, v0, k1, v1, k2, v2, k3, v3, k4, v4, k5, v5,
    branches, offsets, branch_ids, items, classes, documents, padding, seed,
    scale, drop_below, stride_qb, stride_qn, stride_qh,
    first_query, queries, keys, heads, group,
    chunk, stride, chunks, phases, count,
    HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, READ_PARTIAL: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Output and lse of one tile of 128 queries through all branches; with READ_PARTIAL merged with those in memory.

    documents: of packed documents the places that `packed.places_kernel` finds, which need MASKED; otherwise None.

    With MASKED some tile of keys is cut off, by causality, by the end of a segment or, with PADDING, by a mask of keys.
    flag becomes 1 where such a tile is NaN. A value that is not attended to and not finite may cause that. So the plain
    kernel then runs again.
    """
    # k0 to v5: descriptors of k and v as [batch, row, residue, head, dim], a pair for each branch.
    dtype: gl.constexpr = q.dtype.element_ty
    # Registers of the second group, where a multiprocessor runs two programs, and one. The first group has those that
    # it and the copying warps leave: 112 of three times 80 (maxnreg of its configuration). These need at least 24.
    REGISTERS: gl.constexpr = 104 if in_halves(BLOCK_D) else 240
    q_tiles = gl.allocate_shared_memory(dtype, [2, tiles.GROUP_ROWS, BLOCK_D], tiles.shared_layout(BLOCK_D))
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, 1, BLOCK_D], k0.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, 1, BLOCK_D], v0.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = tiles.Ring(k_tiles, v_tiles, k_full, v_full)
    ceilings = k_full  # [STAGES, 1]; this stands in for them without padding
    if PADDING:
        ceilings = ceilings_of(STAGES, BLOCK_N, gl.float32)
    numbers = k_full  # [STAGES, 1]; this stands in for them without dropout
    if DROPOUT:
        ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        fours = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers_of_branches = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)  # [STAGES, 1]
        numbers = dropout.Numbers(fours, numbers_of_branches)
    SORTED: gl.constexpr = whole_first(BLOCK_D, CAUSAL, MASKED, PADDING)
    cuts = k_full  # [STAGES, 1]; this stands in for them, and for spans, where blocks come branch after branch
    spans = k_full  # [STAGES, 1]
    if SORTED:
        cuts = order.cuts_of(STAGES)
        spans = order.spans_of(N_BRANCHES)
    PACKED: gl.constexpr = documents is not None
    tables = (branches, offsets, items, classes)
    if PACKED:
        tables = (branches, offsets, items, classes, documents)
    sizes, grid = (first_query, queries, keys, heads, group), (chunk, stride, chunks, phases, count)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=2 if PADDING or DROPOUT or SORTED else 1)
        mbarrier.init(v_full.index(stage), count=1)
    # The arguments are written out twice: a tuple that is assigned to a name loses its constants.
    gl.warp_specialize([
        (_attend, (
            0, q, out, lse, flag, tables, q_tiles, ring, ceilings, numbers, cuts, seed, scale,
            drop_below, stride_qb, stride_qn, stride_qh, sizes, grid,
            HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, MASKED, READ_PARTIAL, PADDING, DROPOUT, PACKED,
        )),
        (_attend, (
            1, q, out, lse, flag, tables, q_tiles, ring, ceilings, numbers, cuts, seed, scale,
            drop_below, stride_qb, stride_qn, stride_qh, sizes, grid,
            HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, MASKED, READ_PARTIAL, PADDING, DROPOUT, PACKED,
        )),
        (copy_keys, (
            (k0, k1, k2, k3, k4, k5), (v0, v1, v2, v3, v4, v5), tables, branch_ids, padding, ring, ceilings,
            numbers, cuts, spans, sizes, grid, BLOCK_N, N_BRANCHES, CAUSAL, SORTED, PADDING, DROPOUT, PACKED,
        )),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit
def tile_of(tables, sizes, grid, LAST_FIRST: gl.constexpr, PACKED: gl.constexpr):
    """Sequence, head and tile of the program, its branches as `segment_of` takes them, and its `geometry.Place`.

    With LAST_FIRST programs take the tiles of each chunk from the last one on.
    """
    first_query, queries, keys, heads, group = sizes
    number = gl.program_id(0)
    if LAST_FIRST:
        _chunk, _stride, _chunks, _phases, count = grid
        number += count - 1 - 2 * (number % count)
    b, h, tile, place = geometry.placed_tile(number, tables, first_query, queries, keys, heads, group, grid, PACKED)
    return b, h, tile, (tables[0], tables[1], heads // group, h // group), place


@gluon.constexpr_function
def is_last_first(whole_first, causal, branches, packed):
    """Whether the tiles of a chunk come in reverse, those that see most keys first: of one causal branch.

    Otherwise a dense sequence ends with its longest tiles. Several branches took 1 to 3 % longer so
    (reports/HISTORY.md). Up to head_dim 64, and in gradients of q, it was not timed.
    """
    return whole_first and causal and branches == 1 and not packed


@gluon.jit
def copy_keys(
    k_descriptors, v_descriptors, tables, branch_ids, padding, ring, ceilings, numbers, cuts, spans, sizes, grid,
    BLOCK_N: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, SORTED: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Copy tiles of k and v into the ring of stages, in the order in which the groups take them.

    With SORTED that is the order of `order`, and `Cuts` come with them; else branch after branch.
    With PADDING they come with the ceilings of their scores, and unless CAUSAL no tile comes whose keys are all masked.
    """
    LAST_FIRST: gl.constexpr = is_last_first(SORTED, CAUSAL, N_BRANCHES, PACKED)
    b, _, tile, branches, place = tile_of(tables, sizes, grid, LAST_FIRST, PACKED)
    keys, g = sizes[2], branches[3]
    block = 0
    for i in gl.static_range(N_BRANCHES):
        inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
        if (tile.size > 0) & inside:
            if SORTED:
                n = geometry.segment_rows(start, w, r, o, place.keys)
                ends = order.ends_of(start, w, r, o, place.keys, tile, BLOCK_N, CAUSAL)
                end = ends[0] * BLOCK_N
            else:
                n, _full, end = geometry.key_range(
                    start, w, r, o, place.keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
                )
            row, residue = tiles.placed_coordinates(start + o, place, r, n, keys, PACKED)
            if SORTED:
                order.keep(spans, i, ends, start + o, r, n, row, residue)
            block = _copy_blocks(
                k_descriptors[i], v_descriptors[i], i, branch_ids, padding, ring, ceilings, numbers, cuts, block, keys,
                b, g, 0, end, start + o, r, n, row, residue, BLOCK_N, CAUSAL, SORTED, PADDING, DROPOUT,
            )  # fmt: skip
        else:
            if SORTED:
                order.keep_none(spans, i)
    if SORTED:
        for part in range(1, order.PARTS):
            for i in gl.static_range(N_BRANCHES):
                begin, end = order.kept_blocks(spans, i, part)
                if begin < end:
                    key, rate, n, row, residue = order.kept_keys(spans, i)
                    block = _copy_blocks(
                        k_descriptors[i], v_descriptors[i], i, branch_ids, padding, ring, ceilings, numbers, cuts,
                        block, keys, b, g, begin * BLOCK_N, end * BLOCK_N, key, rate, n, row, residue, BLOCK_N, CAUSAL,
                        SORTED, PADDING, DROPOUT,
                    )  # fmt: skip
    if is_listed(CAUSAL, PADDING):
        _end(ring, ceilings, block, tile.size)


@gluon.jit
def _copy_blocks(
    k_descriptor, v_descriptor, i, branch_ids, padding, ring, ceilings, numbers, cuts, block, keys, b, g, begin, end,
    key, r, n, row, residue, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, SORTED: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Copy the blocks of branch i from key `begin` to key `end` of its n, and return the number of the next block.

    key: position of the segment's first key, in row `row` of residue `residue` of the descriptors.
    """
    branch = i
    if DROPOUT:
        branch = gl.load(branch_ids + i)
    if PADDING:
        masks = padding + b.to(gl.int64) * keys + key
        following = _masks_of(masks, begin, n, r, BLOCK_N)  # [BLOCK_N]
    for j in range(begin, end, BLOCK_N):
        cut = n - j, key + j * r, r
        if PADDING:
            is_kept = following == 0  # [BLOCK_N]
            following = _masks_of(masks, j + BLOCK_N, n, r, BLOCK_N)  # [BLOCK_N]
            kept_count = gl.sum(is_kept.to(gl.int32), 0)
            if CAUSAL | (kept_count > 0):
                block = _copy_block(
                    k_descriptor, v_descriptor, ring, ceilings, numbers, cuts, block, b, row, j, residue, g, branch,
                    is_kept, kept_count, cut, SORTED, PADDING, DROPOUT,
                )  # fmt: skip
        else:
            block = _copy_block(
                k_descriptor, v_descriptor, ring, ceilings, numbers, cuts, block, b, row, j, residue, g, branch,
                g, g, cut, SORTED, PADDING, DROPOUT,
            )  # fmt: skip
    return block


@gluon.jit
def _masks_of(masks, j, n, r, BLOCK_N: gl.constexpr):
    """The masks of a block of keys from number j of a segment's n on, at every r-th place; 1 past the segment's end."""
    number = j + gl.arange(0, BLOCK_N, gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0]))  # [BLOCK_N]
    return gl.load(masks + number * r, mask=number < n, other=1)


@gluon.jit
def _copy_block(
    k_descriptor, v_descriptor, ring, ceilings, numbers, cuts, block, b, row, j, residue, g, branch, is_kept,
    kept_count, cut, SORTED: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Copy a tile of k and one of v, from row + j on."""
    STAGES: gl.constexpr = ring.k_tiles.shape[0]
    stage = block % STAGES
    if block >= STAGES:
        tiles.meet(k_free(ring, block))
    mbarrier.expect(ring.k_full.index(stage), k_descriptor.block_type.nbytes)
    tiles.async_load(k_descriptor, [b, row + j, residue, g, 0], ring.k_full.index(stage), ring.k_tiles.index(stage))
    if PADDING:
        tell_ceilings(ceilings, block, is_kept, kept_count)
    if DROPOUT:
        tiles.tell(numbers.fours, block, j // 4)
        tiles.tell(numbers.branches, block, branch)
    if SORTED:
        order.tell(cuts, block, cut[0], cut[1], cut[2])
    if PADDING or DROPOUT or SORTED:
        mbarrier.arrive(ring.k_full.index(stage))
    if block >= STAGES:
        tiles.meet(v_free(ring, block))
    mbarrier.expect(ring.v_full.index(stage), v_descriptor.block_type.nbytes)
    tiles.async_load(v_descriptor, [b, row + j, residue, g, 0], ring.v_full.index(stage), ring.v_tiles.index(stage))
    return block + 1


@gluon.jit
def _end(ring, ceilings, block, tile_size):
    """Say that no more blocks come."""
    STAGES: gl.constexpr = ring.k_tiles.shape[0]
    if tile_size > 0:
        if block >= STAGES:
            tiles.meet(k_free(ring, block))
        tiles.tell(ceilings.states, block, END)
        mbarrier.arrive(ring.k_full.index(block % STAGES), count=2)


@gluon.jit
def _attend(
    NUMBER: gl.constexpr, q, out, lse, flag, tables, q_tiles, ring, ceilings, numbers, cuts, seed, scale, drop_below,
    stride_qb, stride_qn, stride_qh, sizes, grid, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, READ_PARTIAL: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 queries of the tile against every block of keys."""
    SORTED: gl.constexpr = whole_first(BLOCK_D, CAUSAL, MASKED, PADDING)
    LAST_FIRST: gl.constexpr = is_last_first(SORTED, CAUSAL, N_BRANCHES, PACKED)
    b, h, tile, branches, place = tile_of(tables, sizes, grid, LAST_FIRST, PACKED)
    if tile.size > NUMBER * tiles.GROUP_ROWS:
        q_head = q + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
        if PACKED:  # position 0 of the document
            q_head += place.origin.to(gl.int64) * stride_qn
            out += place.origin.to(gl.int64) * sizes[3] * HEAD_DIM
            lse += place.origin
        q_tile = q_tiles.index(NUMBER)  # [GROUP_ROWS, BLOCK_D]
        if in_halves(BLOCK_D):
            _attend_in_halves(
                NUMBER, q_head, out, lse, flag, branches, q_tile, ring, ceilings, numbers, seed, scale, drop_below,
                stride_qn, sizes, place, b, h, tile,
                HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, MASKED, READ_PARTIAL, PADDING, DROPOUT,
            )  # fmt: skip
        else:
            _attend_in_steps(
                NUMBER, q_head, out, lse, flag, branches, q_tile, ring, ceilings, numbers, cuts, seed, scale,
                drop_below, stride_qn, sizes, place, b, h, tile,
                HEAD_DIM, BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, MASKED, READ_PARTIAL, PADDING, DROPOUT,
            )  # fmt: skip
    elif tile.size > 0:  # this group's half of the tile is empty
        block = 0
        if is_listed(CAUSAL, PADDING):
            while goes_on(ring, ceilings, block):
                pass_over(ring, block)
                block += 1
        else:
            for i in range(N_BRANCHES):
                inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
                if inside:
                    _, _, end = geometry.key_range(
                        start, w, r, o, place.keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
                    )
                    for _j in range(0, end, BLOCK_N):
                        pass_over(ring, block)
                        block += 1


@gluon.jit
def _attend_in_steps(
    NUMBER: gl.constexpr, q_head, out, lse, flag, branches, q_tile, ring, ceilings, numbers, cuts, seed, scale,
    drop_below, stride_qn, sizes, place, b, h, tile, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    READ_PARTIAL: gl.constexpr, PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """`_attend` by `step`: the group knows how many blocks are whole and how many it sees, and not whose they are."""
    first_query, queries, _keys, heads, _group = sizes
    SCORES: gl.constexpr = tiles.product_layout(BLOCK_N)
    ROWS: gl.constexpr = tiles.row_layout(BLOCK_D)
    # A thread computes one position and hands it on. Divisions for every row that it loads would outlast the loads.
    number = NUMBER * tiles.GROUP_ROWS + gl.arange(
        0, tiles.GROUP_ROWS, gl.BlockedLayout([1], [32], [4], [0])
    )  # [GROUP_ROWS]
    position = geometry.tile_positions(tile, number)  # [GROUP_ROWS]
    exists = (number < tile.size) & (position >= tile.lowest) & (position < tile.end)  # [GROUP_ROWS]
    row = gl.convert_layout(gl.where(exists, position - first_query, -1), gl.SliceLayout(1, ROWS))[
        :, None
    ]  # [GROUP_ROWS, 1]
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS))[None, :]  # [1, BLOCK_D]
    row_mask = (row >= 0) & (dims < HEAD_DIM)  # [GROUP_ROWS, BLOCK_D]
    q_rows = gl.load(q_head + row.to(gl.int64) * stride_qn + dims, mask=row_mask, other=0.0)  # [GROUP_ROWS, BLOCK_D]
    LISTED: gl.constexpr = is_listed(CAUSAL, PADDING)
    SORTED: gl.constexpr = whole_first(BLOCK_D, CAUSAL, MASKED, PADDING)
    whole, blocks, every = 0, 0, 0
    if not LISTED:
        segments = _segments_of(branches, tile.first, N_BRANCHES)  # [8] each
        if SORTED:
            whole, blocks, every = order.counts_of(segments, place.keys, tile, NUMBER, BLOCK_N, CAUSAL)
        else:
            inside, start, w, r, o = segments  # [8] each
            n = geometry.segment_rows(start, w, r, o, place.keys)  # [8]
            blocks = gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N), 0), 0)
            whole = blocks
    q_tile.store(q_rows)  # loaded until here
    fence_async_shared()

    acc, total, m = nothing(
        BLOCK_D, keys_at_once(BLOCK_D, BLOCK_N)
    )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    drops = scale
    if DROPOUT:
        own_position = gl.where(exists, position, 0)  # [GROUP_ROWS]
        drops = drops_of(own_position, total, seed, drop_below, place.sequence, h)
    sight = scale
    if SORTED:
        own_query = gl.convert_layout(gl.where(exists, position, -1), gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
        own_lowest = gl.maximum(tile.lowest, geometry.tile_positions(tile, NUMBER * tiles.GROUP_ROWS))
        sight = order.Sight(cuts, own_query, own_lowest)
    if LISTED:
        acc, total, m = _walk_listed(
            acc, total, m, q_tile, ring, ceilings, numbers, drops, scale, queries, DROPOUT
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    elif blocks > 0:
        scores, kept = scores_alone(
            q_tile, ring, ceilings, numbers, drops, sight, 0, SORTED, CAUSAL, PADDING, DROPOUT
        )  # [GROUP_ROWS, KEYS], [GROUP_ROWS, 4]
        weights, _, m, total = softmax(
            scores, m, total, scale
        )  # [GROUP_ROWS, KEYS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
        if DROPOUT:
            weights = dropout.without_dropped(weights, kept, False)  # [GROUP_ROWS, KEYS]
        weights = as_operand(weights, q_tile.dtype, BLOCK_D)  # [GROUP_ROWS, KEYS]
        for block in range(1, whole):
            acc, total, m, weights = step(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS], [GROUP_ROWS, KEYS]
                acc, total, m, weights, q_tile, ring, ceilings, numbers, drops, sight, block, scale, queries,
                False, False, CAUSAL, PADDING, DROPOUT,
            )  # fmt: skip
        if SORTED:
            for block in range(gl.maximum(whole, 1), blocks):
                acc, total, m, weights = step(
                    acc, total, m, weights, q_tile, ring, ceilings, numbers, drops, sight, block, scale, queries,
                    False, True, CAUSAL, PADDING, DROPOUT,
                )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS], [GROUP_ROWS, KEYS]  # fmt: skip
        value_token = values(weights, acc, ring, blocks - 1)  # [GROUP_ROWS, BLOCK_D]
        acc = warpgroup_mma_wait(0, deps=[value_token])  # [GROUP_ROWS, BLOCK_D]
        if SORTED and NUMBER == 0:
            tiles.arrive(v_free(ring, blocks - 1))
    result, result_lse = normalized(acc, total, m)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
    if DROPOUT:
        result = result * geometry.kept_factor(drop_below)  # [GROUP_ROWS, BLOCK_D]
    # Positions are handed on once more: those of the loads would take registers all through the steps.
    written = gl.where(exists, position, -1)  # [GROUP_ROWS]
    query = gl.convert_layout(written, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    if MASKED:
        _raise_flag(flag, result, query >= 0)
    lse_rows = (b.to(gl.int64) * heads + h) * queries + query - first_query  # [GROUP_ROWS]
    if READ_PARTIAL:
        row = gl.convert_layout(written, gl.SliceLayout(1, ROWS))[:, None]  # [GROUP_ROWS, 1]
        out_rows = ((b.to(gl.int64) * queries + row - first_query) * heads + h) * HEAD_DIM  # [GROUP_ROWS, 1]
        row_mask = (row >= 0) & (dims < HEAD_DIM)  # [GROUP_ROWS, BLOCK_D]
        result, result_lse = _merged(
            result, result_lse, out + out_rows + dims, row_mask, lse + lse_rows, query >= 0
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
    gl.store(lse + lse_rows, result_lse, mask=query >= 0)
    query = gl.convert_layout(written, gl.SliceLayout(1, ROWS))[:, None]  # [GROUP_ROWS, 1]
    out_rows = ((b.to(gl.int64) * queries + query - first_query) * heads + h) * HEAD_DIM  # [GROUP_ROWS, 1]
    result = gl.convert_layout(result.to(q_tile.dtype), ROWS)  # [GROUP_ROWS, BLOCK_D]
    gl.store(out + out_rows + dims, result, mask=(query >= 0) & (dims < HEAD_DIM))
    if SORTED and NUMBER == 0:  # blocks that the second group sees alone
        for block in range(blocks, every):
            pass_over(ring, block)


@gluon.jit
def _attend_in_halves(
    NUMBER: gl.constexpr, q_head, out, lse, flag, branches, q_tile, ring, ceilings, numbers, seed, scale, drop_below,
    stride_qn, sizes, place, b, h, tile, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, READ_PARTIAL: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """`_attend` by `halves`: another program hides the waits of this one.

    Positions are computed where they are needed. An edit may change how the loop is compiled: compare_kernels.py
    measures it.
    """
    first_query, queries, _keys, heads, _group = sizes
    keys = place.keys
    SCORES: gl.constexpr = tiles.product_layout(keys_at_once(BLOCK_D, BLOCK_N))
    ROWS: gl.constexpr = tiles.row_layout(BLOCK_D)
    rows = NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, ROWS))  # [GROUP_ROWS]
    position = geometry.tile_positions(tile, rows)  # [GROUP_ROWS]
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, ROWS))[None, :]  # [1, BLOCK_D]
    row_mask = ((rows < tile.size) & (position >= tile.lowest) & (position < tile.end))[:, None] & (
        dims < HEAD_DIM
    )  # [GROUP_ROWS, BLOCK_D]
    row = (position - first_query).to(gl.int64)[:, None]  # [GROUP_ROWS, 1]
    q_tile.store(gl.load(q_head + row * stride_qn + dims, mask=row_mask, other=0.0))
    fence_async_shared()
    score_rows = NUMBER * tiles.GROUP_ROWS + gl.arange(0, tiles.GROUP_ROWS, gl.SliceLayout(1, SCORES))  # [GROUP_ROWS]
    query = geometry.tile_positions(tile, score_rows)  # [GROUP_ROWS]
    # A causal group sees fewer keys than its tile, and more of them without a mask.
    last = gl.minimum(tile.size, (NUMBER + 1) * tiles.GROUP_ROWS) - 1
    own_lowest = gl.maximum(tile.lowest, geometry.tile_positions(tile, NUMBER * tiles.GROUP_ROWS))
    own_highest = gl.minimum(tile.highest, geometry.tile_positions(tile, last))
    drops = scale
    if DROPOUT:
        _acc, no_total, _m = nothing(
            BLOCK_D, keys_at_once(BLOCK_D, BLOCK_N)
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
        drops = drops_of(query, no_total, seed, drop_below, place.sequence, h)
    if is_listed(CAUSAL, PADDING):
        acc, total, m = _walk_listed_in_halves(
            q_tile, ring, ceilings, numbers, drops, scale, query, BLOCK_D, BLOCK_N, DROPOUT
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    else:
        acc, total, m = _walk_in_halves(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
            q_tile, ring, ceilings, numbers, drops, branches, scale, keys, tile, query, own_lowest, own_highest,
            BLOCK_D, BLOCK_N, N_BRANCHES, CAUSAL, MASKED, PADDING, DROPOUT,
        )  # fmt: skip
    result, result_lse = normalized(acc, total, m)  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
    if DROPOUT:
        result = result * geometry.kept_factor(drop_below)  # [GROUP_ROWS, BLOCK_D]
    exists = (score_rows < tile.size) & (query >= tile.lowest) & (query < tile.end)  # [GROUP_ROWS]
    if MASKED:
        _raise_flag(flag, result, exists)
    lse_rows = (b.to(gl.int64) * heads + h) * queries + query - first_query  # [GROUP_ROWS]
    if READ_PARTIAL:
        out_rows = ((b.to(gl.int64) * queries + row) * heads + h) * HEAD_DIM  # [GROUP_ROWS, 1]
        result, result_lse = _merged(
            result, result_lse, out + out_rows + dims, row_mask, lse + lse_rows, exists
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS]
    gl.store(lse + lse_rows, result_lse, mask=exists)
    out_rows = ((b.to(gl.int64) * queries + row) * heads + h) * HEAD_DIM  # [GROUP_ROWS, 1]
    gl.store(out + out_rows + dims, gl.convert_layout(result.to(q_tile.dtype), ROWS), mask=row_mask)


@gluon.jit
def _walk_in_halves(
    q_tile, ring, ceilings, numbers, drops, branches, scale, keys, tile, query, own_lowest, own_highest,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, N_BRANCHES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
    PADDING: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """Products with v, sums of weights and maxima over all branches, by `halves`."""
    acc, total, m = nothing(
        BLOCK_D, keys_at_once(BLOCK_D, BLOCK_N)
    )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    block = 0
    for i in range(N_BRANCHES):
        inside, start, w, r, o = tiles.segment_of(branches, i, tile.first)
        if inside:
            n, full, end = geometry.key_range(start, w, r, o, keys, own_lowest, own_highest, BLOCK_N, CAUSAL, False)
            full = gl.maximum(0, gl.minimum(full, end))
            for _j in range(0, full, BLOCK_N):
                acc, total, m = halves(
                    acc,
                    total,
                    m,
                    q_tile,
                    ring,
                    ceilings,
                    numbers,
                    drops,
                    block,
                    scale,
                    query,
                    BLOCK_N,
                    False,
                    PADDING,
                    DROPOUT,
                )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
                block += 1
            if MASKED:
                seen_count = order.seen_keys(n, start + o, r, query, CAUSAL)  # [GROUP_ROWS]
                for j in range(full, end, BLOCK_N):
                    acc, total, m = halves(
                        acc,
                        total,
                        m,
                        q_tile,
                        ring,
                        ceilings,
                        numbers,
                        drops,
                        block,
                        scale,
                        seen_count - j,
                        end - j,
                        True,
                        PADDING,
                        DROPOUT,
                    )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
                    block += 1
            if CAUSAL:
                _n, _full, tile_end = geometry.key_range(
                    start, w, r, o, keys, tile.lowest, tile.highest, BLOCK_N, CAUSAL, False
                )
                for _j in range(gl.cdiv(tile_end, BLOCK_N) - gl.cdiv(end, BLOCK_N)):
                    pass_over(ring, block)
                    block += 1
    return acc, total, m


@gluon.jit
def _walk_listed(acc, total, m, q_tile, ring, ceilings, numbers, drops, scale, queries, DROPOUT: gl.constexpr):
    """The same over the blocks that the copying warp lists, by `step`."""
    if goes_on(ring, ceilings, 0):
        scores, kept = scores_alone(
            q_tile, ring, ceilings, numbers, drops, queries, 0, False, False, True, DROPOUT
        )  # [GROUP_ROWS, KEYS], [GROUP_ROWS, 4]
        weights, _, m, total = softmax(
            scores, m, total, scale
        )  # [GROUP_ROWS, KEYS], [GROUP_ROWS], [GROUP_ROWS], [GROUP_ROWS, 4]
        if DROPOUT:
            weights = dropout.without_dropped(weights, kept, False)  # [GROUP_ROWS, KEYS]
        weights = as_operand(weights, q_tile.dtype, acc.shape[1])  # [GROUP_ROWS, KEYS]
        block = 1
        while goes_on(ring, ceilings, block):
            acc, total, m, weights = step(  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS], [GROUP_ROWS, KEYS]
                acc, total, m, weights, q_tile, ring, ceilings, numbers, drops, queries, block, scale, queries,
                False, False, False, True, DROPOUT,
            )  # fmt: skip
            block += 1
        value_token = values(weights, acc, ring, block - 1)  # [GROUP_ROWS, BLOCK_D]
        acc = warpgroup_mma_wait(0, deps=[value_token])  # [GROUP_ROWS, BLOCK_D]
    return acc, total, m


@gluon.jit
def _walk_listed_in_halves(
    q_tile, ring, ceilings, numbers, drops, scale, query, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """The same by `halves`."""
    acc, total, m = nothing(
        BLOCK_D, keys_at_once(BLOCK_D, BLOCK_N)
    )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
    block = 0
    while goes_on(ring, ceilings, block):
        acc, total, m = halves(
            acc, total, m, q_tile, ring, ceilings, numbers, drops, block, scale, query, BLOCK_N, False, True, DROPOUT
        )  # [GROUP_ROWS, BLOCK_D], [GROUP_ROWS, 4], [GROUP_ROWS]
        block += 1
    return acc, total, m


@gluon.jit
def _segments_of(branches, first, N_BRANCHES: gl.constexpr):
    """`tiles.segment_of` of every branch, one a thread: a loop over all branches would take as long as a block."""
    gl.static_assert(N_BRANCHES <= 8)
    i = gl.arange(0, 8, gl.BlockedLayout([1], [32], [4], [0]))  # [8]
    exists = i < N_BRANCHES  # [8]
    pairs, offsets, kv_heads, g = branches
    w = gl.load(pairs + 2 * i, mask=exists, other=1)  # [8]
    r = gl.load(pairs + 2 * i + 1, mask=exists, other=1)  # [8]
    o = gl.load(offsets + i * kv_heads + g, mask=exists, other=-1)  # [8]
    inside, start = tiles.is_inside(w, r, o, first)  # [8] each
    return inside, start, w, r, o


@gluon.jit
def drops_of(position, total, seed, drop_below, b, h):
    """`dropout.Drops` of a group's queries at these positions, in the layout of partial sums."""
    ROWS: gl.constexpr = total.type.layout
    query = gl.convert_layout(position, gl.SliceLayout(1, ROWS))  # [GROUP_ROWS]
    rows = query[:, None] + gl.zeros(total.shape, gl.int32, ROWS)  # [GROUP_ROWS, 4]
    return dropout.drops_of(seed, drop_below, b, h, rows)


@gluon.jit
def _raise_flag(flag, result, exists):
    """Set the flag where a row that exists is NaN."""
    bad = gl.convert_layout(gl.max((result != result).to(gl.int32), 1), exists.type.layout)  # [GROUP_ROWS]
    gl.store(flag + gl.zeros_like(bad), bad, mask=exists & (bad > 0))


@gluon.jit
def _merged(result, lse, out_ptrs, row_mask, lse_ptrs, exists):
    """Output and lse merged with those in memory."""
    before = gl.load(lse_ptrs, mask=exists, other=float("-inf"))  # [GROUP_ROWS]
    largest = gl.maximum(lse, before)  # [GROUP_ROWS]
    finite = gl.where(largest == float("-inf"), 0.0, largest)  # [GROUP_ROWS]
    weight = gl.exp2((lse - finite) * geometry.LOG2_E)  # [GROUP_ROWS]
    weight_before = gl.exp2((before - finite) * geometry.LOG2_E)  # [GROUP_ROWS]
    total = weight + weight_before  # [GROUP_ROWS]
    denominator = gl.where(total == 0.0, 1.0, total)  # [GROUP_ROWS]; NaN stays NaN
    COLUMNS: gl.constexpr = gl.SliceLayout(1, result.type.layout)
    share = gl.convert_layout(weight / denominator, COLUMNS)[:, None]  # [GROUP_ROWS, 1]
    share_before = gl.convert_layout(weight_before / denominator, COLUMNS)[:, None]  # [GROUP_ROWS, 1]
    out_before = gl.load(out_ptrs, mask=row_mask, other=0.0)  # [GROUP_ROWS, BLOCK_D]
    out_before = gl.convert_layout(out_before, result.type.layout).to(gl.float32)  # [GROUP_ROWS, BLOCK_D]
    result = result * share + out_before * share_before  # [GROUP_ROWS, BLOCK_D]
    return result, gl.where(total == 0.0, float("-inf"), finite + gl.log2(denominator) * tiles.LN_2)
