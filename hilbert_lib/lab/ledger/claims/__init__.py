"""The entries of the ledger, in plain Python: what is claimed, the computation that answers it, and the verdict.

speed        K: an order of storage beside plain storage, dilation beside dense attention
cache_lines  C: cache lines, hit rates, bandwidth
mappings     M: the tables of an order
ring         R: several GPUs
backends     B: backends, dtypes, buffers, CUDA graphs
safety       S: limits of memory
grids        G: three claims of our own, of windows on grids and points
learning     L: two of our own, of models that learn
options      O: three of our own, of the options of a call and of a video model
in_print     P: six of publications about orders and windows
only         parameters that measure one sweep of a notebook alone

A claim "holds" if all its cases do. If some do, `when` may state the condition; it counts only where most cases under
it hold and most others do not. Else the claim "does not hold", and the verdict counts the cases that do.

`hilbert claims` prints the table, `hilbert claims ID` an entry with its cases, `hilbert claims --rerun ID` measures it
again. A claim whose record is not committed yet waits outside the ledger; its notebook judges what it measures by it.
"""

from hilbert_lib.lab.ledger.claims import (
    backends,
    cache_lines,
    grids,
    in_print,
    learning,
    mappings,
    options,
    ring,
    safety,
    speed,
)

SUBJECTS = (speed, cache_lines, mappings, ring, backends, safety, grids, learning, options, in_print)
LEDGER = {claim.id: claim for subject in SUBJECTS for claim in subject.CLAIMS if not claim.waits}
WAITING = {claim.id: claim for subject in SUBJECTS for claim in subject.CLAIMS if claim.waits}
