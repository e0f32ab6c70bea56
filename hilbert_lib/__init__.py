"""Exact, fast dilated attention, and attention on grids; orders of storage, and what they are worth.

    out = dilated_attention(q, k, v, DilatedPattern((512, 4096), (1, 8)), is_causal=True)

q, k, v are (batch, seq, heads, head_dim). A name is loaded when it is first used; `from hilbert_lib import *` loads all
but those of [suite].

attention   attend, dilated_attention, explain_backend, DilatedAttention, MultiheadDilatedAttention, DilatedPattern
            attention_weights, merge_attention
grids       neighbourhood_attention, NeighbourhoodAttention, Neighbourhood, Union, two_resolution_attention
points      PointNeighbourhood, for `attend`; PointAttention, point_order
orders      Ordering, OrderingSpec, curve_coordinates, curve_index
many GPUs   ring_attend, ring_dilated_attention, RingDilatedAttention, plan_ring, run_ranks, shard, gather
            ring_neighbourhood_attention, RingNeighbourhoodAttention, plan_halo, Rectangles, Runs, PointShard
limits      estimate_memory, SafetyConfig, MemorySafetyChecker, ProgressiveTester, Watcher, GpuInfo, get_gpu_info
in models   hilbert_lib.adapters.transformers, .diffusers, .natten and .torchscale
with [suite] select_attention_backend, SafeBenchmarkRunner; the command `hilbert`

`help(hilbert_lib.dilated_attention)` has its arguments; folders of the library have the same names by subject, as in
`from hilbert_lib.ring import run_ranks`. Imports go downward only: what a user calls never imports `hilbert_lib.lab`.
"""

from typing import TYPE_CHECKING

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.attention.api": ("attend", "dilated_attention", "neighbourhood_attention"),
    "hilbert_lib.attention.explain": ("explain_backend",),
    "hilbert_lib.attention.grid_module": ("NeighbourhoodAttention",),
    "hilbert_lib.attention.merge": ("merge_attention",),
    "hilbert_lib.attention.modules": ("DilatedAttention", "MultiheadDilatedAttention"),
    "hilbert_lib.attention.point_module": ("PointAttention",),
    "hilbert_lib.attention.two_resolutions": ("two_resolution_attention",),
    "hilbert_lib.attention.weights": ("attention_weights",),
    "hilbert_lib.curves.coordinates": ("curve_coordinates", "curve_index"),
    "hilbert_lib.patterns.neighbourhood": ("Neighbourhood",),
    "hilbert_lib.lab.guarded.runner": ("SafeBenchmarkRunner",),
    "hilbert_lib.lab.selection": ("select_attention_backend",),
    "hilbert_lib.launch.progressive": ("ProgressiveTester",),
    "hilbert_lib.launch.workers": ("run_ranks",),
    "hilbert_lib.limits.config": ("SafetyConfig",),
    "hilbert_lib.limits.estimate": ("estimate_memory",),
    "hilbert_lib.limits.memory": ("MemorySafetyChecker",),
    "hilbert_lib.limits.watch": ("Watcher",),
    "hilbert_lib.machine": ("GpuInfo", "get_gpu_info"),
    "hilbert_lib.ordering": ("Ordering", "OrderingSpec"),
    "hilbert_lib.patterns.dilated": ("DilatedPattern",),
    "hilbert_lib.patterns.points": ("PointNeighbourhood", "point_order"),
    "hilbert_lib.patterns.union": ("Union",),
    "hilbert_lib.ring.attention": ("ring_attend", "ring_dilated_attention", "ring_neighbourhood_attention"),
    "hilbert_lib.ring.module": ("RingDilatedAttention", "RingNeighbourhoodAttention", "gather", "shard"),
    "hilbert_lib.ring.plan.halo": ("plan_halo",),
    "hilbert_lib.ring.plan.plan": ("plan_ring",),
    "hilbert_lib.ring.plan.shards": ("Rectangles", "Runs"),
    "hilbert_lib.ring.points": ("PointShard",),
}
_get, __dir__ = lazily(__name__, PUBLIC)


def __getattr__(name: str) -> object:
    return _version() if name == "__version__" else _get(name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 25 ms

    try:
        return version("hilbert-lib")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


if TYPE_CHECKING:  # what type checkers read: `as` exports a name
    from hilbert_lib.attention.api import attend as attend
    from hilbert_lib.attention.api import dilated_attention as dilated_attention
    from hilbert_lib.attention.api import neighbourhood_attention as neighbourhood_attention
    from hilbert_lib.attention.explain import explain_backend as explain_backend
    from hilbert_lib.attention.grid_module import NeighbourhoodAttention as NeighbourhoodAttention
    from hilbert_lib.attention.merge import merge_attention as merge_attention
    from hilbert_lib.attention.modules import (
        DilatedAttention as DilatedAttention,
    )
    from hilbert_lib.attention.modules import (
        MultiheadDilatedAttention as MultiheadDilatedAttention,
    )
    from hilbert_lib.attention.point_module import PointAttention as PointAttention
    from hilbert_lib.attention.two_resolutions import two_resolution_attention as two_resolution_attention
    from hilbert_lib.attention.weights import attention_weights as attention_weights
    from hilbert_lib.curves.coordinates import curve_coordinates as curve_coordinates
    from hilbert_lib.curves.coordinates import curve_index as curve_index
    from hilbert_lib.launch.progressive import ProgressiveTester as ProgressiveTester
    from hilbert_lib.launch.workers import run_ranks as run_ranks
    from hilbert_lib.limits.config import SafetyConfig as SafetyConfig
    from hilbert_lib.limits.estimate import estimate_memory as estimate_memory
    from hilbert_lib.limits.memory import MemorySafetyChecker as MemorySafetyChecker
    from hilbert_lib.limits.watch import Watcher as Watcher
    from hilbert_lib.machine import GpuInfo as GpuInfo
    from hilbert_lib.machine import get_gpu_info as get_gpu_info
    from hilbert_lib.ordering import Ordering as Ordering
    from hilbert_lib.ordering import OrderingSpec as OrderingSpec
    from hilbert_lib.patterns.dilated import DilatedPattern as DilatedPattern
    from hilbert_lib.patterns.neighbourhood import Neighbourhood as Neighbourhood
    from hilbert_lib.patterns.points import PointNeighbourhood as PointNeighbourhood
    from hilbert_lib.patterns.points import point_order as point_order
    from hilbert_lib.patterns.union import Union as Union
    from hilbert_lib.ring.attention import ring_attend as ring_attend
    from hilbert_lib.ring.attention import ring_dilated_attention as ring_dilated_attention
    from hilbert_lib.ring.attention import ring_neighbourhood_attention as ring_neighbourhood_attention
    from hilbert_lib.ring.module import RingDilatedAttention as RingDilatedAttention
    from hilbert_lib.ring.module import RingNeighbourhoodAttention as RingNeighbourhoodAttention
    from hilbert_lib.ring.module import gather as gather
    from hilbert_lib.ring.module import shard as shard
    from hilbert_lib.ring.plan.halo import plan_halo as plan_halo
    from hilbert_lib.ring.plan.plan import plan_ring as plan_ring
    from hilbert_lib.ring.plan.shards import Rectangles as Rectangles
    from hilbert_lib.ring.plan.shards import Runs as Runs
    from hilbert_lib.ring.points import PointShard as PointShard
