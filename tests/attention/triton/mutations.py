"""Edits of the kernels' sources that a test must see: small faults of masks, offsets, boxes, counts and barriers."""

import re
from typing import NamedTuple

GRID_MODULES = {
    "hopper.places",
    "hopper.boxes",
    "hopper.masks",
    "hopper.box_descriptors",
    "hopper.bias",
    "hopper.bias_tables",
    "hopper.wide",
}
# Which no forward runs.
OF_BACKWARD = {f"hopper.{name}" for name in ("backward", "queries", "wide_keys", "wide_queries")}
OF_BACKWARD |= {"hopper.grid_backward", "hopper.grid_wide_backward"}


class Mutation(NamedTuple):
    """An edit of a module below `attention.triton`: a text that stands there once, and what replaces it."""

    module: str
    before: str
    after: str
    why: str  # it is wrong
    seed: int | str = (
        0  # of a case that shows it; special grids, parts of grids, calls with a bias or a mask and tables have names
    )

    @property
    def is_on_grid(self) -> bool:
        """Whether neighbourhoods run the module; dilated attention runs the others."""
        return self.module.startswith("hopper.grid_") or self.module in GRID_MODULES

    @property
    def is_of_backward(self) -> bool:
        """Whether no forward runs the module."""
        return self.module in OF_BACKWARD


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
hopper.tiles, documents 0: rows of a document are copied from the first row of all
-        position += place.origin
+        position += 0
hopper.forward, documents 0: lse of a document is written from the first row of all
-            lse += place.origin
-        q_tile
+            lse += 0
+        q_tile
hopper.forward, documents 1: a document drops what the first one drops
-no_total, seed, drop_below, place.sequence, h)
+no_total, seed, drop_below, b, h)
hopper.backward, documents 0: lse of a document is read from the first row of all
-        lse += place.origin
-        delta
+        lse += 0
+        delta
hopper.backward, documents 0: gradients of v are written from the first row of all
-        dv += place.origin.to(gl.int64) * kv_heads * HEAD_DIM
+        dv += 0
hopper.backward, documents 3: a document ends where the last one does
-                begin, n = range_of(start, w, r, o, tile.lowest, place.keys, CAUSAL)
-                origin = start + o
+                begin, n = range_of(start, w, r, o, tile.lowest, keys, CAUSAL)
+                origin = start + o
hopper.queries, documents 21: dq of a document is written from the first row of all
-            dq += place.origin.to(gl.int64) * heads * HEAD_DIM
+            dq += 0
geometry, 19: blocks of keys that need a mask go without one
-(lowest - start - o + r) // r)
+(highest - start - o + r) // r)
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
hopper.dropout, dropout 3: threads of a row exchange the wrong halves
-kept, quad & 1, 1, 0x5410, 0x3276)
+kept, quad & 1, 1, 0x3276, 0x5410)
hopper.dropout, dropout 0: threads of four keys take the same column
-16 * pair + 8 * ((row >> 1) & 1) + (row & 1)
+16 * pair
hopper.dropout, dropout 3: the bit of a pair of columns is its neighbour's
-else 2 * (eight // 2) + column
+else 2 * (eight // 2) + 1 - column
hopper.dropout, dropout 3: every round has the key of the first
-{low_step * number & 0xFFFFFFFF:#010x}
+{low_step & 0xFFFFFFFF:#010x}
hopper.forward, dropout 0: the copying warp counts keys one by one
-numbers.fours, block, j // 4)
+numbers.fours, block, j)
hopper.forward, dropout 1: branches are numbered as the launch has them
-branch = gl.load(branch_ids + i)
+branch = gl.load(branch_ids)
hopper.backward, dropout 3: gradients of dropped weights count
-dweights = dropout.without_dropped(dweights, kept, True)
+dweights = dweights * 1.0
hopper.backward, dropout 0: every head of a group drops alike
-place.sequence, g * group + member, SCORES)
+place.sequence, g * group, SCORES)
hopper.queries, dropout 10: gradients of dropped weights reach dq
-dweights = dropout.without_dropped(dweights, kept, False)
+dweights = dweights * 1.0
hopper.queries, dropout 13: a row sees a key more than its own
-column[None, :] < seen_count[:, None]
+column[None, :] <= seen_count[:, None]
hopper.queries, dropout 13: a tile of k is given back before it was multiplied
-    acc = warpgroup_mma_wait(0, deps=[dq_token])  # [GROUP_ROWS, BLOCK_D]
-    tiles.arrive(k_free(ring, block))
+    tiles.arrive(k_free(ring, block))
+    acc = warpgroup_mma_wait(0, deps=[dq_token])  # [GROUP_ROWS, BLOCK_D]
hopper.queries, dropout 10: both groups take the first one's queries
-score_rows = NUMBER * tiles.GROUP_ROWS + gl.arange(
+score_rows = 0 * tiles.GROUP_ROWS + gl.arange(
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
hopper.order, 19: causal: a query misses its own key
-(query - key + r) // r
+(query - key) // r
hopper.order, 19: causal: it sees the next key
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
-    if PADDING
+scores = warpgroup_mma_wait(2, deps=[score_token])  # [GROUP_ROWS, KEYS]
+    if PADDING
hopper.steps, 14: earlier sums keep their scale
-    acc = scaled_if_any(acc, decay)  # [GROUP_ROWS, BLOCK_D]
-    return acc, total, m, as_operand
+    acc = acc
+    return acc, total, m, as_operand
hopper.forward, 14: a tile of k is overwritten
-    if block >= STAGES:
-        tiles.meet(k_free(ring, block))
-    mbarrier
+    mbarrier
hopper.forward, 19: a tile without whole blocks takes its first one twice
-range(gl.maximum(whole, 1), blocks)
+range(whole, blocks)
hopper.forward, far: blocks that the other group alone sees are not passed over
-for block in range(blocks, every):
+for block in range(blocks, blocks):
hopper.forward, far: the first group keeps its last tile of v
-        if SORTED and NUMBER == 0:
-            tiles.arrive(v_free(ring, blocks - 1))
hopper.forward, 19: a block is said to begin where its segment does
-n - j, key + j * r, r
+n - j, key, r
hopper.order, 19: the second group ends with the first
-own = first if NUMBER == 0 else every
+own = first
hopper.order, 19: blocks that some rows see in part go without a mask
-if fewest < scores.shape[1]:
+if fewest < 0:
hopper.order, 19: the lowest query of a group decides for all its rows
-seen_keys(left, key, rate, sight.query, CAUSAL)
+seen_keys(left, key, rate, sight.query * 0 + sight.lowest, CAUSAL)
hopper.order, 19: blocks that one group sees come with the whole ones
-    whole = gl.minimum(full, end) // BLOCK_N
+    whole = gl.cdiv(first_end, BLOCK_N)
hopper.order, 19: a part begins with the last block of the one before
-begin, end = first, tiles.told
+begin, end = first - 1, tiles.told
hopper.order, 19: a branch without the tile is given a block
-    tiles.tell(spans.first, i, 0)
+    tiles.tell(spans.first, i, 1)
hopper.order, 19: the copying warp forgets where a branch's keys are
-    tiles.tell(spans.residue, i, residue)
+    tiles.tell(spans.residue, i, 0)
hopper.forward, one branch: tiles are taken twice, and others not at all
-number += count - 1 - 2 * (number % count)
+number += count - 1 - number % count
hopper.order, late: the first group is taken to have queries before the first one
-gl.maximum(tile.lowest, gl.minimum(tile.highest, geometry.tile_positions(tile, last)))
+gl.minimum(tile.highest, geometry.tile_positions(tile, last))
hopper.order, 8: a block is said to have 128 keys more of its segment
-    tiles.tell(cuts.left, block, left)
+    tiles.tell(cuts.left, block, left + 128)
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
-any(min(w, keys) % (r * block_n) or keys % min(w, keys) for w, r in some)
+False
hopper.forward, 24: row 0 forgets what earlier launches found
-out_rows + dims, row_mask, lse + lse_rows, query >= 0
-        )
+out_rows + dims, row_mask, lse + lse_rows, query > 0
+        )
hopper.backward, 31: a block that sees some keys of a group is passed over
-first_masked = (first_query_of(own_lowest, origin, r) - begin) // BLOCK_M
+first_masked = gl.cdiv(first_query_of(own_lowest, origin, r) - begin, BLOCK_M)
hopper.steps, mask 0: masked keys have weight
-if tiles.told(ceilings.states, block) == SOME_MASKED
+if tiles.told(ceilings.states, block) == END
hopper.steps, mask 0: the second half of a block has the masks of the first
-.slice(FIRST, scores
+.slice(0, scores
hopper.forward, mask 8: every sequence has the masks of the first
-padding + b.to(gl.int64) * keys + key
+padding + key
hopper.forward, mask 6: every residue has the masks of the first
-* keys + key
+* keys + key // r * r
hopper.forward, mask 0: a block has the masks of the one before
-following = _masks_of(masks, j + BLOCK_N, n, r, BLOCK_N)
+following = _masks_of(masks, j, n, r, BLOCK_N)
hopper.steps, mask 0: a block is said to have no masked key
-kept_count < is_kept.shape[0]
+kept_count < 0
hopper.forward, mask 0: the end is told in a stage that is still read
-        if block >= STAGES:
-            tiles.meet(k_free(ring, block))
hopper.forward, mask 0: a tile of k is used before its masks are there
-count=2 if PADDING or DROPOUT or SORTED else 1
+count=2 if DROPOUT or SORTED else 1
hopper.backward, mask 0: masked keys have a gradient
-gl.where(is_there[:, None], weights, 0.0)
+gl.where(is_there[:, None], weights, weights)
hopper.backward, mask 10: a tile is left out whose first half alone is masked
-rows = gl.arange(0, KEYS, gl.BlockedLayout
+rows = gl.arange(0, KEYS // 2, gl.BlockedLayout
hopper.places, 14: residue 0 is all there is
-lowest + tile // per
+lowest
hopper.boxes, uneven 14: each launch has all residues from the first one on
-gl.maximum(0 - excess, 0)
+0
hopper.boxes, uneven 14: a launch has as many residues as the dilation
-gl.where(excess > 0, d - excess, d + excess)
+d
hopper.box_descriptors, uneven 14: long residues end a cell early
-            [*extent.ranks, far
+            [*(n // d for n, d in zip(extent.shape, extent.dilation)), far
hopper.boxes, 2: what a window sees across the start is looked for before it
-turn = gl.where(start < 0, m, 0)
+turn = 0
hopper.boxes, 2: windows that overlap themselves see keys twice
-count = gl.minimum(end - start, m)
+count = end - start
hopper.masks, 11: a group passes over what it sees beyond a round axis' end
-begin, end = gl.where(everywhere, -FAR, begin), gl.where(everywhere, FAR, end)
+begin, end = begin, end
hopper.masks, 14: a box that is seen in part alone is passed over
-return (rank < sight.end)
+return (rank + SIDE < sight.end)
hopper.masks, 14: a box whose first cells are cut goes without a mask
-is_cut = (rank < sight.full_begin) | (rank + SIDE > sight.full_end)
+is_cut = rank + SIDE > sight.full_end
hopper.masks, 43: a box that goes past the end of a round axis counts whole
-is_cut = is_cut | (left < SIDE)
+is_cut = is_cut
hopper.masks, 2: cells that two boxes of a round axis hold count twice
-sees_cell = sees_cell & (cell < left)
+sees_cell = sees_cell
hopper.masks, 2: a window does not go round
-ahead = gl.where(ahead < 0, ahead + m, ahead)
+ahead = ahead
hopper.masks, 14: windows are a key too long
-bitcast=True) < length.to
+bitcast=True) <= length.to
hopper.boxes, 8: every other column of boxes is left out
-b = b + gl.where(s == stacked, 1, 0)
+b = b + gl.where(s == stacked, 2, 0)
hopper.box_descriptors, 14: every residue reads the first one's keys
-*(step // unit if d > 1 else 0 for
+*(0 for
hopper.boxes, 26: the second group has the first one's windows
-return first[0], first[1] + NUMBER * side(RULES, 1), first[2]
+return first[0], first[1], first[2]
hopper.grid_forward, 22: queries are copied over those at work
-(turn // boxes.BUFFERS & 1) ^ 1)
+turn // boxes.BUFFERS & 1)
hopper.grid_forward, 28: a stage is held while all others are passed over
-block - last >= ring.k_tiles.shape[0] - 1
+block - last > ring.k_tiles.shape[0]
hopper.masks, 26: an extra key that is not there
-(column < extra)[None, :]
+(column <= extra)[None, :]
hopper.masks, 6: every residue has the first one's padding
-boxes.cell_of(ranks, place.residue, axes.d, axes.n)
+boxes.cell_of(ranks, (0, 0, 0), axes.d, axes.n)
hopper.masks, 24: every sequence has the first one's padding of extra keys
-padding.extra + b.to(gl.int64) * extra + column
+padding.extra + column
hopper.grid_forward, 24: boxes of extra keys have the first one's padding
-masks.kept_extra(paddings, place.b, j, extra
+masks.kept_extra(paddings, place.b, 0, extra
hopper.grid_backward, 24: for dq boxes of extra keys have the first one's padding
-masks.kept_extra(paddings, place.b, j, extra
+masks.kept_extra(paddings, place.b, 0, extra
hopper.masks, 24: the padding of another box is read
-told = steps.told_of(key_masks.ceilings, block, tiles.GROUP_ROWS)
+told = steps.told_of(key_masks.ceilings, block + 1, tiles.GROUP_ROWS)
hopper.grid_wide, wide 21: padding is read once a stage is given back
-                scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, GROUP_ROWS]
-                tiles.arrive(_k_free(shared, block))
+                tiles.arrive(_k_free(shared, block))
+                told = masks.told_of(key_masks, block, PADDING)
+                scores = masks.with_weight(scores, told, PADDING)  # [GROUP_ROWS, GROUP_ROWS]
hopper.grid_wide_backward, wide 24: for dq of wide heads boxes of extra keys have the first one's padding
-masks.kept_extra(paddings, place.b, j, extra
+masks.kept_extra(paddings, place.b, 0, extra
hopper.grid_forward, 0: a tile goes on from the products of the one before
-acc = gl.zeros_like(acc)
+acc = acc
hopper.grid_forward, 14: lse of rows past the end of an axis is written
-exists = (rank0 >= 0) & boxes.is_there(boxes.ranks_of(number, corner, RULES), queries.stop)
+exists = rank0 >= 0
hopper.grid_forward, 22: tiles of queries are not given back
-        if not LATE:
-            mbarrier.arrive(shared.q_free.index(buffer))
+        if not LATE:
hopper.grid_forward, 17: output is written over while the tile before leaves
-    tma.store_wait(0)  # the tile before has left
hopper.boxes, 14: the copy engine does not see the output
-    fence_async_shared()
hopper.boxes, 14: every residue's output is that of the first one
- + residue[2] * moves[3]
+
hopper.places, 17: a digit is not carried
-gl.where(total >= count, total - count, total), gl.where(total >= count, 1, 0)
+gl.where(total >= count, total - count, total), 0
hopper.masks, 14: the last axis goes without a mask
-gl.where(sees_cell, away, float("inf"))
+gl.where(sees_cell, away, away)
hopper.masks, 1: a group of a stride in the round before sees nothing
-low = gl.where(low - reach.begin >= m, low - m, low)
+low = low
hopper.masks, 14: queries that see a group's last keys alone are passed over
-last = gl.minimum(first_rank + boxes.side(RULES, AXIS), m) - 1
+last = first_rank
hopper.boxes, 2: keys at the end are seen by whole groups of a stride alone
-groups = gl.where(end >= m, m, groups)
+groups = groups
hopper.boxes, 25: queries more than a round before the keys are looked for there
- + gl.where(start < -m, m, 0)
+
hopper.grid_backward, 14: rows of lse are not waited for
-count=2 if OF_KEYS or TOLD else 1
+count=1
hopper.grid_backward, 17: of the query heads of a KV head one counts
-members = group if OF_KEYS else 1
+members = 1
hopper.grid_backward, 17: sequences share their lse
-_store_rows(lse, delta, place.b * heads + head, box,
+_store_rows(lse, delta, head, box,
hopper.grid_backward, 2: a key without weight has a gradient
-gl.where(weighs, dk_acc, 0.0)
+dk_acc
hopper.grid_backward, 14: slopes are multiplied with the k of the next box
-before = tiles.counted(gl.where(last < 0, block, last))
-                token
+before = block
+                token
hopper.grid_backward, 2: dk and dv are made of the queries of the next box
-before = tiles.counted(gl.where(last < 0, block, last))
-                        dv_token
+before = block
+                        dv_token
hopper.grid_backward, 2: the last box of queries is left out
-if LATE & (last >= 0):
+if LATE & (last < 0):
hopper.grid_backward, 14: a box of v is copied over before its product
-if (not TOGETHER) & (block >= B_STAGES):
+if False:
hopper.grid_backward, four boxes passed over: a box waits for slopes that wait for it, for dq
-if (last >= 0) & (block - last >= STAGES - 1):
+if False:
hopper.grid_backward, four boxes passed over: a box waits for slopes that wait for it, for dk and dv
-if LATE & (last >= 0) & (block - last >= STAGES - 1):
+if False:
hopper.grid_backward, 14: a tile at work is copied over
-tile_free.index((turn - 1) % shared.tile_full.shape[0])
+tile_free.index(turn % shared.tile_full.shape[0])
hopper.grid_backward, 14: dq lacks its scale
-boxes.send(acc * scale
+boxes.send(acc
hopper.grid_backward, 46: a query without keys has a slope
-return gl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E
+return lse * LOG2_E
hopper.boxes, a border: queries lie where their keys do
-return ranks[0] - first[0], ranks[1] - first[1], ranks[2] - first[2]
+return ranks
hopper.boxes, inside: queries before the first that is computed have gradients
-begin = gl.maximum(start, queries.begin[AXIS])
+begin = gl.maximum(start, 0)
hopper.grid_backward, a border: dk and dv are made of other queries
-a_first = queries.first if OF_KEYS else (0, 0, 0)
+a_first = (0, 0, 0)
hopper.grid_backward, a border: a narrow row is written over the next
-& (column < HEAD_DIM)
+
hopper.grid_forward, rows before the keys: the rows of no tile are written where q begins before the keys
-goal = (-masks.FAR, 0, 0, 0, 0)
+goal = (-1, 0, 0, 0, 0)
hopper.places, inside: every round of programs takes the tiles of the first
-begin = gl.program_id(0) // programs * length
+begin = 0
hopper.bias, bias 5: a key before the start of a window that goes round is not counted on
-gl.where(ahead < 0, ahead + m, ahead)
+ahead
hopper.bias, bias 9: extra keys have a bias
-if not is_extra:
+if True:
hopper.bias, bias 18: all heads have the table of the first
-bias + h.to(gl.int64) * _size(FORM)
+bias + h.to(gl.int64) * 0
hopper.bias, bias 18: the sums of a tile move before both groups added theirs
-    mbarrier.wait(sums.full.index(0), turn & 1)
+
hopper.bias, bias 7: the sums of a tile are added to before those of the one before have moved
-    mbarrier.wait(sums.free.index(0), turn & 1)
+
hopper.bias, bias 7: sums begin as anything
-        _taken(sums.address + 4 * (first + number))
+        _taken(sums.address + 4 * number)
hopper.bias, bias 9: entries of a thread's second row are those of its first
-place(8 * (n // 2 % 2))
+0
hopper.grid_backward, bias 9: extra keys add to the gradient of bias
-                    if j < grid_boxes:
+                    if j >= 0:
hopper.bias, bias 18: all heads count in the units of the first
-sums.bounds + 3 * h
+sums.bounds + 0 * h
hopper.bias_tables, bias 13: dk and dv have the bias of the queries on the other side
-(places - 1 - place)
+place
hopper.bias_tables, tables: entries begin in the margin
-place % sides2 - margin2
+place % sides2
hopper.bias_tables, tables: a bias of infinity is a number
-tl.where(tl.abs(given) <= LARGEST, scaled, given)
+scaled
hopper.bias_tables, tables: sums of a launch begin as anything
-        tl.store(sums + h * places + place, tl.zeros([BLOCK], tl.int64), mask=exists)
+
hopper.bias_tables, tables: bounds of all heads but the first begin as anything
-tl.store(bounds + h * 3 + number
+tl.store(bounds + number
hopper.bias_tables, tables: bounds hold values that are padding
-is_key &= tl.load
+is_key | tl.load
hopper.bias_tables, tables: all heads have the values of the first
-h // group * stride_vh
+0 * stride_vh
hopper.bias_tables, tables: delta lacks the gradient of lse
-products -= tl.load
+products - tl.load
hopper.bias_tables, tables: bounds hold positive deltas alone
- & 0x7FFFFFFF
+
hopper.bias_tables, tables: no weight passes 1
-tl.exp2(size * ROUNDING)
+1.0
hopper.bias_tables, tables: rows without keys have no bounds
-tl.where(size < float("inf"), size, 0.0)
+size
hopper.bias_tables, tables: norms whose squares float32 does not know are 0
-(of_v.to(tl.float32, bitcast=True) + LOST)
+of_v.to(tl.float32, bitcast=True)
hopper.bias_tables, tables: sums of a tile may leave 32 bits
-tl.minimum(24 + 126 - exponent, 127)
+tl.minimum(25 + 126 - exponent, 127)
hopper.bias_tables, tables: a head whose bound is no number has a gradient
-exponent < 255
+exponent < 256
hopper.bias_tables, tables: the gradient is read from the margin
-entry % entries2 + margin2
+entry % entries2
hopper.grid_launch, bias 7: pairs that do not attend are looked for outside of the table
-2 * (side - 1) + 2 * (axis.stride - 1)
+0
hopper.boxes, 9: queries that see other keys of a tile than the first are left out
-seers_of(first, m, w, SIZE, AXIS, RULES)
+seers_of(first, m, w, 1, AXIS, RULES)
hopper.grid_wide, wide 5: the second part of a row is its first columns
-full, shared.q.high, buffer, RULES, LOW)
+full, shared.q.high, buffer, RULES)
hopper.wide, wide 5: the second part of a box is its first columns
-head_at, LOW], full, parts
+head_at, 0], full, parts
hopper.grid_wide, wide 5: the second part of the output is written over the first
-out[1], at, head_at, LOW)
+out[1], at, head_at)
hopper.grid_wide, wide 5: scores are those of the first part
-.permute((1, 0)), of_low,
-        is_async=True,
+.permute((1, 0)), of_low,
+        use_acc=False, is_async=True,
hopper.grid_wide, wide 5: a box of v is multiplied before it is there
-    tiles.wait_full(shared.v_full, block)
-    of_low
+    of_low
hopper.wide, many programs: the last box is multiplied before it is there
-        tiles.wait_full(full, block - 1)
-        low_token
+        low_token
hopper.wide, many programs: weights are written over before the slopes are made of them
-    if block > 0:
+    if block < 0:
hopper.grid_wide_backward, wide 5: slopes are those of the box before
-shared.slopes.index(buffer % 2)
+shared.slopes.index((buffer + 1) % 2)
hopper.grid_wide_backward, wide 5: products may not see the slopes that were stored
-            fence_async_shared()
-            mbarrier
+            mbarrier
hopper.grid_wide_backward, wide 5: the high columns of dq are written over the low ones
-boxes.moved(place.h, place, moves), LOW)
+boxes.moved(place.h, place, moves))
hopper.grid_wide_backward, wide 5: what is multiplied beside the first box stays in dq
-                acc = gl.zeros_like(acc)
+                acc = acc
hopper.grid_wide_backward, wide 5: keys are given back before dq is made of them
-            wide.give_back(shared.b_free, block)
+            wide.give_back(shared.b_free, block)
+            wide.give_back(shared.a_free, block)
hopper.grid_wide_backward, wide 2: the high columns of dk have no mask
-gl.where(high_weighs, high, 0.0)
+high
hopper.wide, heads 1: slopes of dropped weights count
-gl.where(weights < 0.0, 0.0, products)
+products
hopper.wide, heads 4: the high columns of keys are their low ones
-boxes.rows_of(parts.high, number), LOW, HEAD_DIM)
+boxes.rows_of(parts.high, number), 0, HEAD_DIM)
hopper.wide_keys, heads 4: causal: a key of a wide head is not seen by its own query
-sees = (sees - origin + r - 1) // r
+sees = (sees - origin + 2 * r - 1) // r
hopper.wide_keys, heads 4: causal: blocks that see some keys of a tile go without a mask
-first_query_of(tile.highest, origin, r)
+first_query_of(tile.lowest, origin, r)
hopper.wide_keys, heads 19: a query past the segment's end has weight
-mask=number < n, other=float("inf")
+mask=number <= n, other=float("inf")
hopper.wide_keys, heads 0: query heads of a KV head share their lse
-lse_head = lse + (b.to(gl.int64) * kv_heads * group + h)
+lse_head = lse + (b.to(gl.int64) * kv_heads * group + g * group)
hopper.wide_keys, heads 4: masked keys of a wide head have a gradient
-gl.where(is_masked == 0, part, 0.0)
+part
hopper.wide_keys, heads 1: the other group is not told which weights are dropped
-wide.hand_over(2.0 * kept_weights - weights, shared, block)
+wide.hand_over(weights, shared, block)
hopper.wide_keys, heads 1: dropped weights count in dv
-            weights = kept_weights
+            weights = weights
hopper.wide, heads 18: earlier launches' dk of a wide head is lost
-part += gl.load(at
+part + gl.load(at
hopper.wide_keys, heads 0: slopes are made of one head of a group
-blocks += group * gl.cdiv(n - begin, ROWS)
+blocks += gl.cdiv(n - begin, ROWS)
hopper.wide, heads 4: products do not see the tile of keys
-LOW, HEAD_DIM)
-    fence_async_shared()
+LOW, HEAD_DIM)
hopper.wide_queries, heads 2: a query of a wide head sees a key more than its own
-column[None, :] < (seen_count - j)
+column[None, :] <= (seen_count - j)
hopper.wide_queries, heads 14: both groups take the first one's queries of a wide head
-number = NUMBER * tiles.GROUP_ROWS + gl.arange(
+number = 0 * tiles.GROUP_ROWS + gl.arange(
hopper.wide_queries, heads 2: blocks that the other group alone sees are kept
-gl.cdiv(tile_end, ROWS) - gl.cdiv(end, ROWS))
+0)
hopper.wide_queries, heads 14: a block of v is given back before it was multiplied
-        dweights = warpgroup_mma_wait(0, deps=[weight_token])  # [GROUP_ROWS, GROUP_ROWS]
-        wide.give_back(shared.v_free, block)
+        wide.give_back(shared.v_free, block)
+        dweights = warpgroup_mma_wait(0, deps=[weight_token])  # [GROUP_ROWS, GROUP_ROWS]
hopper.wide_queries, heads 1: gradients of dropped weights reach dq of a wide head
-dweights = dropout.without_dropped(dweights, kept, False)
+dweights = dweights * 1.0
hopper.wide_keys, heads 4: rows of lse of a wide head are not waited for
-a_full = wide.barriers(STAGES, 2)
+a_full = wide.barriers(STAGES, 1)
hopper.wide_keys, heads 6: a tile is left out whose first 32 keys alone are masked
-tiles.GROUP_ROWS, WARPS, PADDING)
+tiles.GROUP_ROWS // 2, WARPS, PADDING)
hopper.grid_whole, whole line: the last extra keys count to the end of their box
-extra % KEYS  # [GROUP_ROWS]
+KEYS  # [GROUP_ROWS]
hopper.grid_whole, whole plane: a box of v is given back twice
-        tiles.arrive(steps.v_free(ring, last))
+        tiles.arrive(steps.v_free(ring, last))
+        tiles.arrive(steps.v_free(ring, last))
hopper.masks, small windows: cells of a box of keys are those of a box of queries
-        SIDE: gl.constexpr = boxes.key_side(RULES, AXIS)
-        WRAPS
+        SIDE: gl.constexpr = boxes.side(RULES, AXIS)
+        WRAPS
hopper.boxes, small windows: boxes of keys follow each other as those of queries would
-    SIDE: gl.constexpr = key_side(RULES, AXIS)
+    SIDE: gl.constexpr = side(RULES, AXIS)
""")
