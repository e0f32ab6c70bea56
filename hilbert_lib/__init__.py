"""When does a Hilbert order make attention faster? Curves, orderings and exact dilated attention.

The rooms, from the ground up (imports go downward only):

checks      what counts as an integer, a device
environment what machine and which code this is
hardware    what GPU this is
curves      coordinates along space-filling curves; on a GPU by the kernels of curves_triton
ordering    a permutation of positions; ordering_tables its tables and their cache
pattern     which keys a query sees, and how much work that is
attention   exact dilated attention, its oracle and its backends
locality    models of what a cache sees
samples     the text and the image that the notebooks use
seeds       what the documents under examination published
timers      the clocks of CPU and GPU
bench       timing and statistics
files       text files that are whole or not there
records     what was measured, kept and compared
committed   which run speaks for a notebook
paired      sides that run in turns, recorded as they go
baselines   other people's ways, restated: what the kernels are measured against
exact_rows  float64 results of some rows, at any length
workload    the inputs of a benchmark, what they cost and how wrong a result is
safety      limits, memory predicted, a watch, isolated benchmarks
selection   a backend by measurement, and what the choice is worth
seed_kernel the documents' pair of kernels, restated
kernel_benchmarks the sweeps of notebook 06
graph_benchmarks modules called and replayed as CUDA graphs
memory_benchmarks memory pools and caches of patterns, measured
neighbourhood windows on grids: which blocks of which order they touch; attention/neighbourhood.py computes them
counter_benchmarks hardware counters beside the model of caches
claims      the documents' claims, and what measures them again
ring        exact dilated attention over several ranks
ledger      every claim, its evidence and verdict; the answer in three sentences
figures     every plot
suite       papermill runs, manifests and reports
cli         the `hilbert` command; cli_bench, cli_plan and cli_claims its subcommands, cli_options what they share
"""

from hilbert_lib.attention.api import dilated_attention, explain_backend
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.attention.neighbourhood import neighbourhood_attention
from hilbert_lib.hardware import GpuInfo, get_gpu_info
from hilbert_lib.neighbourhood import Neighbourhood
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention
from hilbert_lib.ring.plan import plan_ring
from hilbert_lib.safety.config import SafetyConfig
from hilbert_lib.safety.estimate import estimate_memory
from hilbert_lib.safety.memory import MemorySafetyChecker
from hilbert_lib.safety.progressive import ProgressiveTester
from hilbert_lib.safety.runner import SafeBenchmarkRunner
from hilbert_lib.safety.watch import Watcher
from hilbert_lib.selection import select_attention_backend

__all__ = [
    "DilatedAttention",
    "DilatedPattern",
    "GpuInfo",
    "MemorySafetyChecker",
    "MultiheadDilatedAttention",
    "Neighbourhood",
    "Ordering",
    "OrderingSpec",
    "ProgressiveTester",
    "RingDilatedAttention",
    "SafeBenchmarkRunner",
    "SafetyConfig",
    "Watcher",
    "dilated_attention",
    "estimate_memory",
    "explain_backend",
    "get_gpu_info",
    "neighbourhood_attention",
    "plan_ring",
    "ring_dilated_attention",
    "select_attention_backend",
]
