"""Edits of the sources of kernels for grids that a test must see: small faults of boxes, residues and barriers."""

from mutations import parsed

# Cases with a name are special grids, and parts of grids.
MUTATIONS = parsed("""\
hopper.places, 14: residue 0 is all there is
-begin + tile % per * SIZE, tile // per
+begin + tile % per * SIZE, 0
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
-allowed = column < extra
+allowed = column <= extra
hopper.masks, 6: every residue has the first one's padding
-boxes.cell_of(ranks, place.residue, axes.d, axes.n)
+boxes.cell_of(ranks, (0, 0, 0), axes.d, axes.n)
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
hopper.masks, 2: keys at the end are seen by whole groups of a stride alone
-groups = gl.where(end >= m, m, groups)
+groups = groups
hopper.boxes, 25: queries more than a round before the keys are looked for there
- + gl.where(start < -m, m, 0)
+
hopper.grid_backward, 14: rows of lse are not waited for
-count=2 if OF_KEYS else 1
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
-tile_free.index((turn - 1) % boxes.BUFFERS)
+tile_free.index(turn % boxes.BUFFERS)
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
""")
