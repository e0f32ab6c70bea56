"""Every backend equals the oracle: every pattern, ordering, dtype, layout; output, lse and gradients."""

import itertools

import pytest
from cases import BRANCHES, LAYOUTS, ORDERINGS, SHAPES, TOLERANCE, check, in_pairs

from hilbert_lib.pattern import MIXING_RULES, OFFSET_RULES

CPU_BACKENDS = ("reference", "eager", "sdpa", "auto")
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, ORDERINGS, CPU_BACKENDS, TOLERANCE, SHAPES, LAYOUTS, [False, True])


@in_pairs(AXES, 6)
def test_output_lse_and_gradients_equal_the_oracle(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("branches", BRANCHES)
def test_the_full_product_equals_the_oracle(branches, ordering, backend):
    rest = itertools.product(OFFSET_RULES, MIXING_RULES, TOLERANCE, SHAPES, [False, True])
    for number, (offsets, mixing, dtype, shape, is_causal) in enumerate(rest):
        layout = LAYOUTS[(number + number // (2 * len(SHAPES))) % 3]
        if mixing == "softmax" or SHAPES[shape][3] >= len(BRANCHES[branches][0]):
            check(branches, offsets, mixing, ordering, backend, dtype, shape, layout, is_causal)
