"""Other people's ways, restated, compute the same function: output and gradients equal the oracle's."""

import pytest
import torch
from allpairspy import AllPairs
from cases import BRANCHES, LAYOUTS, SHAPES, TOLERANCE, expected, stored

from hilbert_lib import DilatedPattern
from hilbert_lib.attention.backends.flex import FLEX_BLOCK, _masks, residue_order
from hilbert_lib.attention.call import Call
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.pattern import MIXING_RULES, OFFSET_RULES

AXES = [
    list(BASELINES),
    list(BRANCHES),
    list(OFFSET_RULES),
    list(MIXING_RULES),
    ["ragged", "grouped", "one_kv_head", "shorter", "wide"],
    list(LAYOUTS),
    [False, True],
]


def is_possible(case: list) -> bool:
    return len(case) < 5 or case[3] == "softmax" or SHAPES[case[4]][3] >= len(BRANCHES[case[1]][0])


@pytest.mark.parametrize(
    "case", list(AllPairs(AXES, filter_func=is_possible)), ids=lambda case: "-".join(map(str, case))
)
def test_output_and_gradients_equal_the_oracle(case):
    name, branches, offsets, mixing, shape, layout, is_causal = case
    pattern, (*tensors, dout), out, _, grads = expected(branches, offsets, mixing, torch.float64, shape, is_causal)
    leaves = [stored(x.detach(), layout).requires_grad_(name != "flex") for x in tensors]
    call = Call(pattern, is_causal=is_causal, scale=leaves[0].shape[3] ** -0.5)
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
    got = BASELINES[name].run(*leaves, Call(pattern, is_causal=True, scale=leaves[0].shape[3] ** -0.5))
    torch.testing.assert_close(got.detach().cpu().double(), out, atol=TOLERANCE[torch.bfloat16][0], rtol=0)
    for mine, theirs in zip(torch.autograd.grad(got, leaves, dout.cuda()), grads, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, atol=TOLERANCE[torch.bfloat16][2], rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branches", [((256, 1024), (1, 4)), ((200, 400, 900), (1, 4, 6)), ((300,), (2,))], ids=str)
def test_blocks_of_the_flex_mask_hold_the_pattern(branches, is_causal):
    length, kv_heads = 1100, 3
    pattern = DilatedPattern(*branches)
    _, mask = _masks(pattern, is_causal, length, 6, kv_heads, torch.device("cpu"))
    position = residue_order(pattern, length).perm
    blocks = mask.kv_indices.shape[-1]
    listed, full = (torch.zeros(6, blocks, blocks, dtype=torch.bool) for _ in range(2))
    for table, counts, indices in (
        (listed, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for h in range(6):
            for row in range(blocks):
                table[h, row, indices[0, h, row, : counts[0, h, row]].long()] = True
    assert not (listed & full).any()
    for h in range(6):
        options = {"kv_head": h // 2, "kv_heads": kv_heads, "is_causal": is_causal}
        attends = sum(pattern.mask(i, position, position, **options) for i in range(len(branches[0]))) > 0
        wide = torch.nn.functional.pad(attends, (0, blocks * FLEX_BLOCK - length) * 2)
        any_pair = wide.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1)).any(3).any(1)
        padded = torch.nn.functional.pad(~attends, (0, blocks * FLEX_BLOCK - length) * 2)
        every_pair = ~padded.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1)).any(3).any(1)
        seen = listed[h] | full[h]
        assert (seen >= any_pair).all()
        assert (full[h] <= every_pair).all()
        if not is_causal:  # below the diagonal a block whose rows wrap around is listed if only its ends might meet
            assert (seen == any_pair).all()
    if branches[0] == (256, 1024):
        assert full.any()


def test_refusals_say_what_is_served():
    q = torch.zeros(1, 8, 2, 16)
    pattern = DilatedPattern((4, 8), (1, 2))
    assert "dropout" in BASELINES["torchscale"].refusal(q, Call(pattern, dropout_p=0.1))
    assert "kv_ordering" in BASELINES["flex"].refusal(q, Call(pattern, inverse=torch.arange(8)))
    assert "backward" in BASELINES["flex"].refusal(q.requires_grad_(), Call(pattern))
