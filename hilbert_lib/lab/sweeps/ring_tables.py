"""Tables of what is planned for rings, by ranks and tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.checks import integer
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.ring.plan.balance import shard_lengths_for
from hilbert_lib.ring.plan.plan import plan_ring

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

PLANNED, DENSE_RING, DENSE_GATHER = "dilated rows, as planned", "all k and v, round a ring", "all k and v, gathered"
COSTS = ("sent_forward", "sent_backward", "memory_forward", "memory_backward")


def spanning_pattern(tokens: int, first_segment: int, growth: int = 2) -> DilatedPattern:
    """Branches w = first_segment * growth^i, r = growth^i, up to the first whose segment holds the sequence.

    >>> spanning_pattern(8192, 2048).branches
    ((2048, 1), (4096, 2), (8192, 4))
    """
    integer("first_segment", first_segment, least=1)
    integer("growth", growth, least=2)
    rates = [1]
    while first_segment * rates[-1] < tokens:
        rates.append(growth * rates[-1])
    return DilatedPattern([first_segment * rate for rate in rates], rates)


def scaling_table(points: Iterable[tuple[int, int]], *, first_segment: int, **sizes) -> "pd.DataFrame":
    """`COSTS` of the costliest rank in bytes, of a spanning pattern and of dense attention over as many tokens.

    points: (tokens, ranks) of each plan. **sizes: as `plan_ring` takes them.
    """
    import pandas as pd

    rows = []
    for tokens, ranks in dict.fromkeys(points):
        dense = DilatedPattern((tokens,), (1,))
        for what, pattern, transport in (
            (PLANNED, spanning_pattern(tokens, first_segment), "auto"),
            (DENSE_RING, dense, "ring"),
            (DENSE_GATHER, dense, "all_gather"),
        ):
            plan = plan_ring(pattern, shard_lengths_for(tokens, ranks), transport=transport, **sizes)
            costliest = {name: max(getattr(cost, name) for cost in plan.ranks) for name in COSTS}
            rows.append({"tokens": tokens, "ranks": ranks, "what": what} | costliest)
    return pd.DataFrame(rows)


def split_table(
    pattern: DilatedPattern, tokens: int, ranks: int, kinds: Iterable[str], *, kv_heads: int = 1
) -> "pd.DataFrame":
    """(position, KV head) rows that the costliest rank receives, the sequence ordered before it is split and after.

    Before, a rank holds consecutive slots of one curve through the whole sequence; after, consecutive positions, in
    whatever order it likes. Rows are counted branch by branch, by enumeration.
    """
    import pandas as pd

    after = _most_received(pattern, torch.arange(tokens, device="cpu") * ranks // tokens, ranks, kv_heads)
    rows = []
    for kind in kinds:
        owner = Ordering(kind, tokens).inverse * ranks // tokens
        rows.append({"kind": kind, "before": _most_received(pattern, owner, ranks, kv_heads), "after": after})
    return pd.DataFrame(rows)


def _most_received(pattern: DilatedPattern, owner: Tensor, ranks: int, kv_heads: int) -> int:
    positions = torch.arange(len(owner), device="cpu")
    received = torch.zeros(ranks, dtype=torch.int64, device="cpu")
    for head in range(kv_heads):
        for branch in pattern.head_branches(head, kv_heads):
            inside = positions[pattern.contains(branch, positions, head, kv_heads)]
            segment = inside // pattern.segment_lengths[branch]
            rows_held = torch.bincount(segment * ranks + owner[inside], minlength=int(segment.max() + 1) * ranks)
            rows_held = rows_held.view(-1, ranks)
            received += ((rows_held.sum(1, keepdim=True) - rows_held) * (rows_held > 0)).sum(0)
    return int(received.max())
