"""The plain kernels for grids equal the oracle; without a GPU they run here in Triton's interpreter."""

from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from cases import (
    BIASED,
    HEADS,
    ORDERS,
    PARTS,
    RULES,
    SMALL,
    check_grouped_windows,
    check_nan,
    check_on_grid,
    check_part,
    every_rule,
    grids_in_pairs,
    pairs_of_options,
    part_of,
)

from hilbert_lib import Neighbourhood, neighbourhood_attention

pytest.importorskip("hilbert_lib.attention.triton.grid_launch", reason="triton has no build for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = torch.float32, torch.bfloat16
WITH_DLSE = False, True


def is_slow(case):
    """A case that takes the interpreter seconds is left to `make test-all`."""
    rows = prod((*RULES[case[0]][0], *HEADS[case[1]][:2]))
    return pytest.mark.full if DEVICE == "cpu" and rows > 700 else ()


@grids_in_pairs(DTYPES, WITH_DLSE, more=BIASED, marks=is_slow)
def test_output_lse_and_gradients_equal_the_oracle(case):
    *rest, with_dlse = case
    check_on_grid(*rest, "triton", device=DEVICE, with_dlse=with_dlse)


@pytest.mark.parametrize("case", pairs_of_options(DTYPES, WITH_DLSE, more=BIASED), ids=str)
def test_options_in_pairs(case):
    *rest, with_dlse = case
    check_on_grid(*rest, "triton", device=DEVICE, with_dlse=with_dlse)


def test_windows_are_those_of_the_kv_head_of_each_group():
    check_grouped_windows("triton", torch.float32, device=DEVICE)


@pytest.mark.full
@pytest.mark.parametrize("rules", every_rule(SMALL), ids=str)
def test_all_options_together(rules):
    """Heads and dtypes in turn."""
    for n, (order, more) in enumerate(product(ORDERS, BIASED)):
        check_on_grid(rules, list(HEADS)[n % 3], order, more, DTYPES[n // 3 % 2], "triton", device=DEVICE)


def test_what_is_no_number_reaches_only_those_who_see_it():
    near = Neighbourhood((4, 6), (3, 2), dilation=(1, 2), edge=("wrap", "clip"))
    for at in range(3):
        given = [torch.randn(1, 24, 1, 4, device=DEVICE) for _ in range(3)]
        check_nan(near, given, at, 13, partial(neighbourhood_attention, neighbourhood=near, backend="triton"))


@pytest.mark.parametrize("rules", PARTS)
def test_a_part_of_a_grid_is_what_it_is_in_the_whole(rules):
    check_part(part_of(rules), "triton", DEVICE, torch.bfloat16)
