"""Pieces of the ring that need no ranks."""

import pytest
import torch

from hilbert_lib.pattern import DilatedPattern
from hilbert_lib.ring import agreement as header
from hilbert_lib.ring import module
from hilbert_lib.ring.module import RingDilatedAttention
from hilbert_lib.ring.rank import passes


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1.0, 1e22, 1e30])
def test_what_stands_for_out_in_a_backward_is_right_at_every_scale(scale):
    dout = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0)) * scale
    dout[2] = 0.0
    delta = torch.full((7, 3), 0.5 * scale).where(dout.any(-1), 0.0)
    found = (passes._with_product(dout, delta).double() * dout.double()).sum(-1)
    torch.testing.assert_close(found, delta.double(), rtol=1e-5, atol=0.0)


def test_ranks_are_told_by_the_names_that_they_have_in_the_world():
    asked = {2: (None, {"pattern": "a"}), 3: (None, {"pattern": "b"})}
    assert header._difference(asked) == "pattern must be the same on all ranks, got a on rank 2; b on rank 3"


def test_a_module_calls_with_what_it_was_made_with(monkeypatch):
    given = {"transport": "ring", "weights": (2.0, 1.0), "memory_limit": 2**30, "backend": "sdpa", "validate": False}
    monkeypatch.setattr(module, "ring_dilated_attention", lambda *_, **options: options)
    x = torch.ones(1, 4, 1, 4)
    assert RingDilatedAttention(DilatedPattern((4,), (1,)), **given)(x, x, x).items() >= given.items()
