"""When does a Hilbert order make attention faster? Curves, orderings and exact dilated attention.

The rooms, from the ground up (imports go downward only):

checks      what counts as an integer, a device
curves      coordinates along space-filling curves; on a GPU by the kernels of curves_triton
ordering    a permutation of positions, and its cache
pattern     which keys a query sees, and how much work that is
attention   exact dilated attention, its oracle and its backends
locality    models of what a cache sees
samples     the text and the image that the notebooks use
environment what machine and which code this is
seeds       what the documents under examination published
timers      the clocks of CPU and GPU
bench       timing, statistics and records
baselines   other people's ways, restated: what the kernels are measured against
exact_rows  float64 results of some rows, at any length
workload    the inputs of a benchmark, what they cost and how wrong a result is
paired      sides that run in turns, recorded as they go
seed_kernel the documents' pair of kernels, restated
kernel_benchmarks the sweeps of notebook 06
claims      the documents' claims, and what measures them again
figures     every plot
suite       papermill runs, manifests and reports
cli         the `hilbert` command
"""

from hilbert_lib.attention.api import dilated_attention, explain_backend
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

__all__ = ["DilatedPattern", "Ordering", "dilated_attention", "explain_backend"]
