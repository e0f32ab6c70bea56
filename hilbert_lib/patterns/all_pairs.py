"""The pattern of joint attention, in which every query sees every key."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.pattern import Pattern


def one_segment(queries: int, keys: int) -> DilatedPattern:
    """The dilated pattern in which all these queries see all these keys: one branch of rate 1, one segment."""
    return DilatedPattern((max(queries, keys, 1),), (1,))


@dataclass(frozen=True)
class AllPairs(Pattern):
    """Every query sees every key and every extra key. The number of queries may differ from that of keys.

    >>> AllPairs().mask(0, torch.arange(2), torch.arange(3), kv_head=0, kv_heads=1).int().tolist()
    [[1, 1, 1], [1, 1, 1]]
    """

    kind: ClassVar[str] = "all_pairs"
    options: ClassVar[frozenset[str]] = frozenset(("extra_k", "extra_v", "extra_padding_mask"))
    function: ClassVar[str] = "neighbourhood_attention with extra_q"

    def attends(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether each query attends to each key: all do."""
        return torch.ones((), dtype=torch.bool, device=query.device)

    def pairs_of(self, queries: range, keys: int, *, heads: int, kv_heads: int, is_causal: bool = False) -> int:
        """Pairs of a query and a key of one sequence, over all query heads."""
        return heads * len(queries) * keys
