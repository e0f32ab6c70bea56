"""Every backend equals the oracle: every pattern, ordering, dtype, layout; output, lse and gradients."""

import itertools

import pytest
from allpairspy import AllPairs
from cases import BRANCHES, LAYOUTS, ORDERINGS, SHAPES, TOLERANCE, check

from hilbert_lib.pattern import MIXING_RULES, OFFSET_RULES

CPU_BACKENDS = ("reference", "eager", "sdpa", "auto")
AXES = [
    list(BRANCHES),
    list(OFFSET_RULES),
    list(MIXING_RULES),
    list(ORDERINGS),
    list(CPU_BACKENDS),
    list(TOLERANCE),
    list(SHAPES),
    list(LAYOUTS),
    [False, True],
]


def is_possible(case: list) -> bool:
    if len(case) < 7 or case[2] == "softmax":
        return True
    return SHAPES[case[6]][3] >= len(BRANCHES[case[0]][0])


@pytest.mark.parametrize(
    "case", list(AllPairs(AXES, filter_func=is_possible)), ids=lambda case: "-".join(map(str, case))
)
def test_output_lse_and_gradients_equal_the_oracle(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("branches", BRANCHES)
def test_the_full_product_equals_the_oracle(branches, ordering, backend):
    rest = itertools.product(OFFSET_RULES, MIXING_RULES, TOLERANCE, SHAPES, [False, True])
    for number, (offsets, mixing, dtype, shape, is_causal) in enumerate(rest):
        case = [
            branches,
            offsets,
            mixing,
            ordering,
            backend,
            dtype,
            shape,
            LAYOUTS[(number + number // (2 * len(SHAPES))) % 3],
            is_causal,
        ]
        if is_possible(case):
            check(*case)
