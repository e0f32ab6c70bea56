"""Other people's ways, restated, compute the same function: output and gradients equal the oracle's."""

import pytest
import torch
from cases import BRANCHES, LAYOUTS, TOLERANCE, expected, in_pairs, stored

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.request import Request
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

SOME_SHAPES = ("ragged", "grouped", "one_kv_head", "shorter", "wide")


@in_pairs((BRANCHES, OFFSET_RULES, MIXING_RULES, BASELINES, SOME_SHAPES, LAYOUTS, [False, True]), 4)
def test_output_and_gradients_equal_the_oracle(case):
    branches, offsets, mixing, name, shape, layout, is_causal = case
    pattern, (*tensors, dout), out, _, grads = expected(branches, offsets, mixing, torch.float64, shape, is_causal)
    leaves = [stored(x.detach(), layout).requires_grad_(name != "flex") for x in tensors]
    call = Request(pattern, is_causal=is_causal, scale=leaves[0].shape[3] ** -0.5)
    baseline = BASELINES[name]
    assert not baseline.refusal(leaves[0], call)
    got = baseline.run(*leaves, call)
    torch.testing.assert_close(got.detach(), out, atol=1e-5 if name == "flex" else 1e-12, rtol=0)
    if name != "flex":  # it has no backward on the CPU
        torch.testing.assert_close(torch.autograd.grad(got, leaves, dout), grads, atol=1e-11, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("mixing", MIXING_RULES)
@pytest.mark.parametrize("name", BASELINES)
def test_output_and_gradients_equal_the_oracle_on_cuda(name, mixing):
    case = "sparse", "branch", mixing, torch.bfloat16, "wide", True
    pattern, (*tensors, dout), out, _, grads = expected(*case)
    leaves = [x.cuda().requires_grad_() for x in tensors]
    got = BASELINES[name].run(*leaves, Request(pattern, is_causal=True, scale=leaves[0].shape[3] ** -0.5))
    torch.testing.assert_close(got.detach().cpu().double(), out, atol=TOLERANCE[torch.bfloat16][0], rtol=0)
    for mine, theirs in zip(torch.autograd.grad(got, leaves, dout.cuda()), grads, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, atol=TOLERANCE[torch.bfloat16][2], rtol=0)


def test_refusals_say_what_is_served():
    q = torch.zeros(1, 8, 2, 16)
    pattern = DilatedPattern((4, 8), (1, 2))
    assert "dropout" in BASELINES["torchscale"].refusal(q, Request(pattern, dropout_p=0.1))
    assert "kv_ordering" in BASELINES["flex"].refusal(q, Request(pattern, inverse=torch.arange(8)))
    assert "backward" in BASELINES["flex"].refusal(q.requires_grad_(), Request(pattern))
