"""Edits of the kernels' sources that a test must see: small faults of masks, offsets, counts and barriers."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """An edit of a module below `attention.triton`: a text that stands there once, and what replaces it."""

    module: str
    before: str
    after: str
    why: str  # it is wrong, or, of `EQUAL`, it is not
    seed: int | str = 0  # of a case that shows it


MUTATIONS = [
    Mutation(
        "geometry",
        "(lowest - start - o + r) // r)\n    whole",
        "(highest - start - o + r) // r)\n    whole",
        "blocks of keys that need a mask go without one",
        19,
    ),
    Mutation("geometry", "w - 1) - o + r) // r)", "w - 1) - o) // r)", "the causal range ends a key early", 1),
    Mutation("geometry", "(size - o + r - 1) // r", "(size - o) // r", "a segment loses its last row", 19),
    Mutation(
        "geometry",
        "(position % r + r - start % r) % r == o",
        "position % r == o",
        "residues are counted from the sequence's start",
        5,
    ),
    Mutation(
        "geometry",
        "tl.maximum(size, 1) - 1, stride)",
        "tl.maximum(size, 1) - 2, stride)",
        "the last row of a tile does not count",
        17,
    ),
    Mutation(
        "hopper.tiles",
        "late = row + n > length // r",
        "late = row + n > length",
        "rows past the last multiple of the rate are not reached",
        5,
    ),
    Mutation(
        "hopper.tiles",
        "late = row + n > length // r",
        "late = row + n >= length // r",
        "a whole sequence begins in row -1",
        19,
    ),
    Mutation(
        "hopper.tiles",
        "block // STAGES & 1)",
        "(block // STAGES & 1) ^ 1)",
        "a stage is waited for in the other phase",
        19,
    ),
    Mutation("hopper.tiles", "tiles.index(block % STAGES)", "tiles.index(0)", "there is one stage only", 19),
    Mutation(
        "hopper.tiles",
        "def arrive(barrier, THREADS: gl.constexpr = 288)",
        "def arrive(barrier, THREADS: gl.constexpr = 256)",
        "the copying warp does not count",
        19,
    ),
    Mutation("hopper.steps", "(query - key + r) // r", "(query - key) // r", "causal: a query misses its own key", 19),
    Mutation(
        "hopper.steps", "(query - key + r) // r", "(query - key + 2 * r) // r", "causal: it sees the next key", 19
    ),
    Mutation(
        "hopper.steps",
        "tiles.FIRST_BARRIER + STAGES + block",
        "tiles.FIRST_BARRIER + block",
        "tiles of k and v share barriers",
        19,
    ),
    Mutation(
        "hopper.steps",
        "ring.v_tiles, block).slice(NUMBER * HALF",
        "ring.v_tiles, block).slice(0",
        "the second half of the weights meets the first half of v",
        1,
    ),
    Mutation(
        "hopper.steps",
        "if left > tiles.rows_of(ring.k_tiles.shape) // 2:",
        "if left > tiles.rows_of(ring.k_tiles.shape) // 2 + 1:",
        "a second half of one key is left out",
        11,
    ),
    Mutation(
        "hopper.steps",
        "    tiles.arrive(k_free(ring, block))\n    tiles.arrive(v_free(ring, block))\n    return acc, total, m",
        "    tiles.arrive(v_free(ring, block))\n    return acc, total, m",
        "a tile of k is not given back",
        16,
    ),
    Mutation(
        "hopper.steps",
        """    acc = warpgroup_mma_wait(0, deps=[value_token])
    tiles.arrive(v_free(ring, block - 1))
""",
        """    tiles.arrive(v_free(ring, block - 1))
    acc = warpgroup_mma_wait(0, deps=[value_token])
""",
        "a tile of v is given back while it is multiplied",
        14,
    ),
    Mutation(
        "hopper.steps",
        "    tiles.wait_full(ring.v_full, block)\n    return warpgroup_mma(weights",
        "    return warpgroup_mma(weights",
        "a tile of v is not waited for",
        14,
    ),
    Mutation(
        "hopper.steps",
        "scores = warpgroup_mma_wait(1, deps=[score_token])\n    if not WHOLE",
        "scores = warpgroup_mma_wait(2, deps=[score_token])\n    if not WHOLE",
        "scores are used before they are computed",
        14,
    ),
    Mutation(
        "hopper.steps",
        "    if WHOLE:\n        acc = scaled_if_any(acc, decay)",
        "    if WHOLE:\n        acc = acc",
        "earlier sums keep their scale",
        14,
    ),
    Mutation(
        "hopper.forward",
        "                if block >= STAGES:\n                    tiles.meet(k_free(ring, block))\n",
        "",
        "a tile of k is overwritten",
        14,
    ),
    Mutation(
        "hopper.forward",
        "begin = gl.where(i == first_branch, BLOCK_N, 0)",
        "begin = BLOCK_N",
        "further branches lose their first block",
        19,
    ),
    Mutation(
        "hopper.forward",
        "for i in range(first_branch, N_BRANCHES):",
        "for i in range(first_branch, N_BRANCHES - 1):",
        "the last branch is dropped",
        19,
    ),
    Mutation(
        "hopper.forward",
        "unseen = gl.cdiv(tile_end, BLOCK_N) - gl.cdiv(end, BLOCK_N)",
        "unseen = 0",
        "blocks that the other group alone sees are not passed over",
        19,
    ),
    Mutation(
        "hopper.forward",
        "gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N), 0), 0)",
        "gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N) - 1, 0), 0)",
        "every branch is a block short",
        18,
    ),
    Mutation(
        "hopper.forward",
        "mask=here, other=0.0))\n    fence_async_shared()",
        "mask=here, other=0.0))",
        "products do not see the tile of q",
        19,
    ),
    Mutation(
        "hopper.backward",
        "gl.maximum(0, position - origin + r - 1) // r",
        "gl.maximum(0, position - origin + r) // r",
        "causal: the first query is left out",
        19,
    ),
    Mutation(
        "hopper.backward",
        "sees = (key_position - origin + r - 1) // r",
        "sees = (key_position - origin + 2 * r - 1) // r",
        "causal: a key is not seen by its own query",
        19,
    ),
    Mutation(
        "hopper.backward",
        'mask=number < n, other=float("inf")',
        'mask=number <= n, other=float("inf")',
        "a query past the segment's end has weight",
        31,
    ),
    Mutation(
        "hopper.backward",
        "(block // STAGES & 1) ^ 1)",
        "block // STAGES & 1)",
        "the first tiles are waited for before they are used",
        19,
    ),
    Mutation("hopper.backward", "                        tma.store_wait(0)\n", "", "sums of dq are not waited for", 19),
    Mutation(
        "hopper.backward",
        "half * shared.dq_tiles.shape[5]",
        "0 * shared.dq_tiles.shape[5]",
        "both halves of dq are added to the first columns",
        19,
    ),
    Mutation(
        "hopper.backward",
        "SCORES_THERE + 2 * NUMBER + (block & 1)",
        "SCORES_THERE + 2 * NUMBER",
        "a group arrives twice at a barrier",
        19,
    ),
    Mutation(
        "hopper.backward",
        "SCORE_BUFFERS = gl.constexpr(3)",
        "SCORE_BUFFERS = gl.constexpr(2)",
        "gradients of scores are overwritten",
        19,
    ),
    Mutation(
        "hopper.backward",
        ".store(dscores)\n    fence_async_shared()",
        ".store(dscores)",
        "the product for dq does not see gradients of scores",
        19,
    ),
    Mutation(
        "hopper.backward",
        "first_free = gl.where(is_full, first_free, blocks)",
        "first_free = first_free",
        "a tile that is cut off goes without a mask",
        2,
    ),
    Mutation("hopper.backward", "dk_acc += gl.load(dk", "dk_acc + gl.load(dk", "earlier launches' dk is lost", 18),
    Mutation(
        "hopper.launch",
        "is_causal or any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in some)",
        "is_causal",
        "launches do not see that tiles are cut off",
        28,
    ),
    Mutation(
        "hopper.forward",
        "out_rows + dims, here, lse + lse_rows, query >= 0)",
        "out_rows + dims, here, lse + lse_rows, query > 0)",
        "row 0 forgets what earlier launches found",
        24,
    ),
    Mutation(
        "hopper.backward",
        "first_masked = (_first_query(own_lowest, origin, r) - begin) // BLOCK_M",
        "first_masked = gl.cdiv(_first_query(own_lowest, origin, r) - begin, BLOCK_M)",
        "a block that sees some keys of a group is passed over",
        31,
    ),
]
EQUAL = [
    Mutation(
        "hopper.backward",
        "sees = (key_position - origin + r - 1) // r",
        "sees = (key_position - origin) // r",
        "keys of a branch lie whole rates from its origin: nothing is rounded",
    ),
    Mutation(
        "hopper.forward",
        "gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N), 0), 0)",
        "gl.sum(gl.where(inside, n // BLOCK_N, 0), 0)",
        "it is read where no tile of keys is cut off: whole blocks alone",
    ),
    Mutation(
        "hopper.steps",
        "largest = gl.where(largest - m > SLACK, largest, m)",
        "largest = largest",
        "the maximum that is subtracted cancels, as long as nothing overflows",
    ),
    Mutation(
        "hopper.steps",
        """    scores = warpgroup_mma_wait(1, deps=[score_token])
    if not WHOLE:
        tiles.arrive(k_free(ring, block))
""",
        """    if not WHOLE:
        tiles.arrive(k_free(ring, block))
    scores = warpgroup_mma_wait(1, deps=[score_token])
""",
        "the stage of k is filled again only after v of the block before is given back, later in the step",
    ),
]
