"""Integers beyond what 64 bits hold are refused by the name of the argument, or served; none reaches torch."""

import pytest
import torch

from hilbert_lib import (
    DilatedPattern,
    MultiheadDilatedAttention,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    PointAttention,
    Rectangles,
    curve_coordinates,
    dilated_attention,
    estimate_memory,
    neighbourhood_attention,
    run_ranks,
)

X, PATTERN = torch.ones(1, 8, 2, 4), DilatedPattern((4,), (1,))
LARGE = [2**62, 2**63 - 1, 2**63, 2**64, 10**30]
REFUSED = {  # argument in the error: what takes it
    "length": lambda n: Ordering.linear(n).perm,
    "length that is estimated": lambda n: estimate_memory(PATTERN, length=n, heads=2, head_dim=4, device="cpu"),
    "shape": lambda n: Neighbourhood((n, 4), 2).pairs,
    "shape of a cube": lambda n: Neighbourhood((n, n, n), 2).pairs,
    "shape under a curve": lambda n: curve_coordinates("raster", (n, 2)),
    "shape under tiles": lambda n: curve_coordinates("tile", (2, n)),
    "branches": lambda n: DilatedPattern.geometric(4, 64, n, 2),
    "embed_dim": lambda n: MultiheadDilatedAttention(n, n, PATTERN, device="meta"),
    "embed_dim on a grid": lambda n: NeighbourhoodAttention(n, n, 3, device="meta"),
    "embed_dim over points": lambda n: PointAttention(n, n, device="meta"),
    "ranks": lambda n: run_ranks("builtins:dict", n, backend="gloo"),
    "ranks of a grid": lambda n: Rectangles.compact((8, 2), n),
    "seed": lambda n: Ordering.random(8, max(n, 2**63)).perm,
    "window": lambda n: neighbourhood_attention(X, X, X, Neighbourhood((2, 4), n, edge="clip")),
    "query_start": lambda n: dilated_attention(X[:, :1], X, X, PATTERN, query_start=n),
}
SERVED = {
    "segments": lambda n: dilated_attention(X, X, X, DilatedPattern((min(n, 2**63 - 1),), (1,))),
    "a rate of an ordering": lambda n: Ordering.residue(8, n).perm,
    "a chunk": lambda n: Ordering.from_curve("hilbert", 8, chunk=n).perm,
    "pairs": lambda n: PATTERN.pairs(n, heads=2),
    "covered": lambda n: DilatedPattern((100003, 7), (3, 2)).covered(n, 0, 1),
    "max_seqlen": lambda n: dilated_attention(
        X, X, X, PATTERN, cu_seqlens=torch.tensor([0, 8], dtype=torch.int32), max_seqlen=min(n, 2**63 - 1)
    ),
}


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("what", REFUSED)
def test_an_integer_that_64_bits_do_not_hold_is_refused_by_its_name(what, number):
    with pytest.raises(ValueError, match=f"^{what.split()[0]}( .*)? must "):
        REFUSED[what](number)


@pytest.mark.parametrize("number", LARGE)
def test_a_position_beyond_64_bits_is_refused_and_one_within_is_served(number):
    if number < 2**63:
        assert PATTERN.keys(number - 1, kv_head=0, kv_heads=1, length=number).numel() in (3, 4)
        return
    with pytest.raises(ValueError, match=r"^length must be an integer from 1 to 9223372036854775807"):
        PATTERN.keys(number - 1, kv_head=0, kv_heads=1, length=number)


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("what", SERVED)
def test_what_no_tensor_is_made_of_may_be_as_large(what, number):
    SERVED[what](number)
