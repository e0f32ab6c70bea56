"""Every backend equals the oracle: every pattern, ordering, dtype, layout; output, lse and gradients."""

import itertools

import oracle
import pytest
import torch
from cases import (
    BRANCHES,
    LAYOUTS,
    ORDERINGS,
    SHAPES,
    TOLERANCE,
    assert_close,
    attended,
    check,
    differentiated,
    drawn,
    in_pairs,
    lse_error,
    norms,
)

from hilbert_lib import DilatedPattern, Neighbourhood, attend, dilated_attention
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

CPU_BACKENDS = ("reference", "eager", "sdpa", "auto")
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, ORDERINGS, CPU_BACKENDS, TOLERANCE, SHAPES, LAYOUTS, [False, True])
WITH_DLSE = [False, True]


@in_pairs((*AXES, WITH_DLSE), 6)
def test_output_lse_and_gradients_equal_the_oracle(case):
    *rest, with_dlse = case
    check(*rest, with_dlse=with_dlse)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_lse_is_off_by_no_more_than_its_docstring_says(dtype, backend):
    q, k, v, _ = drawn(256, 2, 1, 64, dtype=dtype)
    # One score of 0 and many of -2.08, where the exponential of torch's flash kernel for the CPU is worst.
    steep_q, steep_k = torch.zeros_like(q), torch.zeros_like(k)
    steep_q[..., 0] = 1.0
    steep_k[:, 1:, :, 0] = -2.08
    for pattern in (DilatedPattern((256,), (1,)), DilatedPattern((32, 64, 256), (1, 2, 4))):
        for queries, keys, scale in ((q, k, 0.125), (steep_q, steep_k, 1.0)):
            _, lse = dilated_attention(queries, keys, v, pattern, scale=scale, backend=backend, return_lse=True)
            _, expected = oracle.attention(queries, keys, v, pattern, scale=scale)
            assert_close([lse], [expected], lse_error(backend, dtype))


def test_branches_of_half_precision_are_merged_to_rounding():
    q, k, v, _ = drawn(128, 4, 4, 32, batch=2, dtype=torch.float16)
    pattern = DilatedPattern((8, 32, 128), (1, 1, 1))
    out = dilated_attention(q, k, v, pattern, backend="sdpa")
    expected, _ = oracle.attention(q, k, v, pattern)
    # The outputs' rounding is 0.308 of eps, and 0.310 with the lse of the CPU's fast exponential. An lse that is off by
    # 5e-4 in one branch and by -5e-4 in the others makes it 0.34.
    assert norms([out], [expected])[0] < 0.325 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_heads_of_a_group_whose_branch_has_no_row_have_no_keys(backend, tokens):
    # Head 0 has one dense segment. With offsets past the last token the others have nothing, which is not the same.
    pattern = DilatedPattern((8, 40, 8), (1, 6, 6), mixing="head_groups")
    tensors = drawn(tokens, 3, 3, 4, batch=2, dtype=torch.float64)
    exact = differentiated(oracle.attending(pattern), tensors)
    assert exact[1].isinf().any()
    assert_close(attended(tensors, pattern, backend), exact, 1e-12)


@pytest.mark.parametrize(
    ("pattern", "backend"),
    [(DilatedPattern((5,), (1,)), name) for name in CPU_BACKENDS]
    + [(Neighbourhood((5,), 9, edge="clip"), name) for name in ("reference", "eager", "auto")],
    ids=str,
)
def test_rows_of_q_may_overlap_in_memory(pattern, backend):
    *tensors, dout = drawn(5, 3, 3, 8, batch=2, dtype=torch.float64)
    line = drawn(12, 3, 3, 1, batch=2, dtype=torch.float64)[0][..., 0]
    q = line.transpose(1, 2).contiguous().unfold(2, 8, 1).transpose(1, 2)  # row t is numbers t to t + 7
    exact = differentiated(oracle.attending(pattern), [q.clone(), *tensors[1:], dout])
    q, k, v = (x.requires_grad_() for x in (q, *tensors[1:]))
    out = attend(q, k, v, pattern, backend=backend)
    assert_close([out], exact[:1], 1e-12)
    assert_close(torch.autograd.grad(out, (q, k, v), dout), exact[2:], 1e-12)


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
