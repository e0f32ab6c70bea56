"""Edits of the kernels' sources that a test must see: small faults of masks, offsets, counts and barriers."""

import re
from typing import NamedTuple


class Mutation(NamedTuple):
    """An edit of a module below `attention.triton`: a text that stands there once, and what replaces it."""

    module: str
    before: str
    after: str
    why: str  # it is wrong
    seed: int | str = 0  # of a case that shows it


def parsed(text: str) -> list[Mutation]:
    """Edits as a diff shows them, below a line with their module, the seed of a case that shows them, and why."""
    found = []
    for edit in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        told, *lines = edit.splitlines()
        module, seed, why = re.fullmatch(r"([\w.]+), (.+?): (.*)", told).groups()
        before, after = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Mutation(module, before, after, why, int(seed) if seed.isdecimal() else seed))
    return found


MUTATIONS = parsed("""\
geometry, 19: blocks of keys that need a mask go without one
-(lowest - start - o + r) // r)
-    is_one_segment
+(highest - start - o + r) // r)
+    is_one_segment
geometry, 1: the causal range ends a key early
-w - 1) - o + r) // r)
+w - 1) - o) // r)
geometry, 19: a segment loses its last row
-(size - o + r - 1) // r
+(size - o) // r
geometry, 5: residues are counted from the sequence's start
-(position % r + r - start % r) % r == o
+position % r == o
geometry, 17: the last row of a tile does not count
-tl.maximum(size, 1) - 1, stride)
+tl.maximum(size, 1) - 2, stride)
hopper.tiles, 5: rows past the last multiple of the rate are not reached
-late = row + n > length // r
+late = row + n > length
hopper.tiles, 19: a whole sequence begins in row -1
-late = row + n > length // r
+late = row + n >= length // r
hopper.tiles, 19: a stage is waited for in the other phase
-block // STAGES & 1)
+(block // STAGES & 1) ^ 1)
hopper.tiles, 19: there is one stage only
-tiles.index(block % STAGES)
+tiles.index(0)
hopper.tiles, 19: the copying warp does not count
-def arrive(barrier, THREADS: gl.constexpr = 288)
+def arrive(barrier, THREADS: gl.constexpr = 256)
hopper.steps, 19: causal: a query misses its own key
-(query - key + r) // r
+(query - key) // r
hopper.steps, 19: causal: it sees the next key
-(query - key + r) // r
+(query - key + 2 * r) // r
hopper.steps, 19: tiles of k and v share barriers
-tiles.FIRST_BARRIER + STAGES + block
+tiles.FIRST_BARRIER + block
hopper.steps, 1: the second half of the weights meets the first half of v
-ring.v_tiles, block).slice(NUMBER * HALF
+ring.v_tiles, block).slice(0
hopper.steps, 11: a second half of one key is left out
-if left > tiles.rows_of(ring.k_tiles.shape) // 2:
+if left > tiles.rows_of(ring.k_tiles.shape) // 2 + 1:
hopper.steps, 16: a tile of k is not given back
-    tiles.arrive(k_free(ring, block))
-    tiles.arrive(v_free(ring, block))
-    return acc, total, m
+    tiles.arrive(v_free(ring, block))
+    return acc, total, m
hopper.steps, 14: a tile of v is given back while it is multiplied
-    acc = warpgroup_mma_wait(0, deps=[value_token])  # [GROUP_ROWS, BLOCK_D]
-    tiles.arrive(v_free(ring, block - 1))
+    tiles.arrive(v_free(ring, block - 1))
+    acc = warpgroup_mma_wait(0, deps=[value_token])  # [GROUP_ROWS, BLOCK_D]
hopper.steps, 14: a tile of v is not waited for
-    tiles.wait_full(ring.v_full, block)
-    return warpgroup_mma(weights
+    return warpgroup_mma(weights
hopper.steps, 14: scores are used before they are computed
-scores = warpgroup_mma_wait(1, deps=[score_token])  # [GROUP_ROWS, KEYS]
-    if not WHOLE
+scores = warpgroup_mma_wait(2, deps=[score_token])  # [GROUP_ROWS, KEYS]
+    if not WHOLE
hopper.steps, 14: earlier sums keep their scale
-    if WHOLE:
-        acc = scaled_if_any(acc, decay)
+    if WHOLE:
+        acc = acc
hopper.forward, 14: a tile of k is overwritten
-                if block >= STAGES:
-                    tiles.meet(k_free(ring, block))
hopper.forward, 19: further branches lose their first block
-begin = gl.where(i == first_branch, BLOCK_N, 0)
+begin = BLOCK_N
hopper.forward, 19: the last branch is dropped
-for i in range(first_branch, N_BRANCHES):
+for i in range(first_branch, N_BRANCHES - 1):
hopper.forward, 19: blocks that the other group alone sees are not passed over
-unseen = gl.cdiv(tile_end, BLOCK_N) - gl.cdiv(end, BLOCK_N)
+unseen = 0
hopper.forward, 18: every branch is a block short
-gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N), 0), 0)
+gl.sum(gl.where(inside, gl.cdiv(n, BLOCK_N) - 1, 0), 0)
hopper.forward, 19: products do not see the tile of q
-mask=row_mask, other=0.0))
-    fence_async_shared()
+mask=row_mask, other=0.0))
hopper.backward, 19: causal: the first query is left out
-gl.maximum(0, position - origin + r - 1) // r
+gl.maximum(0, position - origin + r) // r
hopper.backward, 19: causal: a key is not seen by its own query
-sees = (key_position - origin + r - 1) // r
+sees = (key_position - origin + 2 * r - 1) // r
hopper.backward, 31: a query past the segment's end has weight
-mask=number < n, other=float("inf")
+mask=number <= n, other=float("inf")
hopper.backward, 19: the first tiles are waited for before they are used
-(block // STAGES & 1) ^ 1)
+block // STAGES & 1)
hopper.backward, 19: sums of dq are not waited for
-                        tma.store_wait(0)
hopper.backward, 19: both halves of dq are added to the first columns
-half * shared.dq_tiles.shape[5]
+0 * shared.dq_tiles.shape[5]
hopper.backward, 19: a group arrives twice at a barrier
-SCORES_THERE + 2 * NUMBER + (block & 1)
+SCORES_THERE + 2 * NUMBER
hopper.backward, 19: gradients of scores are overwritten
-SCORE_BUFFERS = gl.constexpr(3)
+SCORE_BUFFERS = gl.constexpr(2)
hopper.backward, 19: the product for dq does not see gradients of scores
-.store(dscores)
-    fence_async_shared()
+.store(dscores)
hopper.backward, 2: a tile that is cut off goes without a mask
-first_free = gl.where(is_full, first_free, blocks)
+first_free = first_free
hopper.backward, 18: earlier launches' dk is lost
-dk_acc += gl.load(dk
+dk_acc + gl.load(dk
hopper.launch, 28: launches do not see that tiles are cut off
-is_causal or any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in some)
+is_causal
hopper.forward, 24: row 0 forgets what earlier launches found
-out_rows + dims, row_mask, lse + lse_rows, query >= 0
-        )
+out_rows + dims, row_mask, lse + lse_rows, query > 0
+        )
hopper.backward, 31: a block that sees some keys of a group is passed over
-first_masked = (_first_query(own_lowest, origin, r) - begin) // BLOCK_M
+first_masked = gl.cdiv(_first_query(own_lowest, origin, r) - begin, BLOCK_M)
""")
