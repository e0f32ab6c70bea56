"""When does a Hilbert order make attention faster? Curves, orderings and exact dilated attention.

The rooms, from the ground up (imports go downward only):

checks, files, environment, machine, graph_cache
curves      coordinates along space-filling curves
ordering    a permutation of positions
pattern     which keys a query sees, and how much work that is
grid        neighbourhoods of cells on grids
attention   exact dilated attention, its oracle and its backends
limits      limits of memory and time, predictions, a watch
launch      ranks as processes, and one call apart
ring        exact dilated attention over several ranks
lab         what measures, draws and reports
cli         the `hilbert` command
"""

from hilbert_lib.attention.api import dilated_attention, explain_backend
from hilbert_lib.attention.grid import neighbourhood_attention
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.grid import Neighbourhood
from hilbert_lib.lab.guarded.runner import SafeBenchmarkRunner
from hilbert_lib.lab.selection import select_attention_backend
from hilbert_lib.launch.progressive import ProgressiveTester
from hilbert_lib.limits.config import SafetyConfig
from hilbert_lib.limits.estimate import estimate_memory
from hilbert_lib.limits.memory import MemorySafetyChecker
from hilbert_lib.limits.watch import Watcher
from hilbert_lib.machine import GpuInfo, get_gpu_info
from hilbert_lib.ordering import Ordering, OrderingSpec
from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring.attention import ring_dilated_attention
from hilbert_lib.ring.module import RingDilatedAttention
from hilbert_lib.ring.plan.plan import plan_ring

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
