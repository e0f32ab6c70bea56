"""Exact dilated attention over several ranks, each of which holds a contiguous shard of the sequence.

attention  the function
module     the module; a sequence split over ranks, and put together
agreement  what ranks must agree on, compared before anything is sent
plan       what each rank sends to whom, by which transport and why
rank       one rank's work

A public name is imported when it is asked for: this package alone loads neither torch nor torch.distributed.
"""

from hilbert_lib.lazy import lazily

PUBLIC = {
    "hilbert_lib.launch.workers": ("run_ranks",),
    "hilbert_lib.ring.attention": ("ring_dilated_attention",),
    "hilbert_lib.ring.module": ("RingDilatedAttention", "gather", "shard"),
    "hilbert_lib.ring.plan.plan": ("plan_ring",),
}
__all__ = [name for names in PUBLIC.values() for name in names]
__getattr__, __dir__ = lazily(__name__, PUBLIC)
