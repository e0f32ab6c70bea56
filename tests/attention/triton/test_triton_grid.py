"""The plain kernels for grids equal the oracle; without a GPU they run here in Triton's interpreter."""

from math import prod

import pytest
import torch
from allpairspy import AllPairs
from grid_cases import HEADS, MORE, ORDERS, RULES, check, mask_of

from hilbert_lib import Neighbourhood, neighbourhood_attention

pytest.importorskip("hilbert_lib.attention.triton.grid_launch", reason="triton has no build for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = list(AllPairs([*map(list, (RULES, HEADS, ORDERS, MORE)), [torch.float32, torch.bfloat16]]))


def marked(case):
    """A case that takes the interpreter seconds is left to `make test-all`."""
    rows = prod((*RULES[case[0]][0], *HEADS[case[1]][:2]))
    return pytest.param(case, marks=pytest.mark.full if DEVICE == "cpu" and rows > 800 else ())


@pytest.mark.parametrize("case", [marked(case) for case in CASES], ids=lambda case: "-".join(map(str, case)))
def test_output_lse_and_gradients_equal_the_oracle(case):
    check(*case, "triton", device=DEVICE)


def test_what_is_no_number_reaches_only_those_who_see_it():
    near = Neighbourhood((4, 6), (3, 2), dilation=(1, 2), edge=("wrap", "clip"))
    for at in range(3):
        given = [torch.randn(1, 24, 1, 4, device=DEVICE) for _ in range(3)]
        given[at][:, 13] = torch.nan
        out = neighbourhood_attention(*given, near, backend="triton")
        seen = mask_of(near)[:, 13] if at else torch.arange(24) == 13
        assert out.isnan().any(-1).flatten().cpu().equal(seen)
