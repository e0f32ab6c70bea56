"""Exact attention over several ranks: dilated, each with a contiguous shard, on a grid, each with a part
of it, and of points.

attention  the one call, and its doors for sequences and grids
module     both doors as modules; a sequence split over ranks, and put together
spread     how tokens are spread along a sequence, on a grid and of points, and what differs with it
points     the points of a rank: which rows of others their windows reach
agreement  what ranks must agree on, compared before anything is sent
plan       what each rank sends to whom, by which transport and why
rank       one rank's work

A public name is imported when it is asked for: this package alone loads neither torch nor torch.distributed.
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.launch.workers": ("run_ranks",),
    "hilbert_lib.ring.attention": ("ring_attend", "ring_dilated_attention", "ring_neighbourhood_attention"),
    "hilbert_lib.ring.module": ("RingDilatedAttention", "RingNeighbourhoodAttention", "gather", "shard"),
    "hilbert_lib.ring.plan.halo": ("plan_halo",),
    "hilbert_lib.ring.plan.plan": ("plan_ring",),
    "hilbert_lib.ring.plan.shards": ("Rectangles", "Runs"),
    "hilbert_lib.ring.points": ("PointShard",),
}
__getattr__, __dir__ = lazily(__name__, PUBLIC)
