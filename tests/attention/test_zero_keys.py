"""Keys of zeros that fill segments: output, lse and gradients by every backend, and what else keeps its meaning."""

from dataclasses import replace
from functools import partial
from itertools import chain

import oracle
import pytest
import torch
from cases import BRANCHES, SHAPES, assert_close, attended, check, differentiated, drawn, in_pairs

from hilbert_lib import DilatedPattern, dilated_attention, estimate_memory
from hilbert_lib.attention import operators, zero_keys
from hilbert_lib.attention.backends import flex
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

CPU_BACKENDS = ("reference", "eager", "sdpa", "auto")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
BOTH = [False, True], [False, True]
PADDED = DilatedPattern((6, 12, 24), (1, 4, 5), padding="zeros")  # rates that do not divide, and tails of 31


@in_pairs((BRANCHES, OFFSET_RULES, MIXING_RULES, ["none", "random"], CPU_BACKENDS, DTYPES, SHAPES, *BOTH), 6)
def test_output_lse_and_gradients_equal_the_oracle_with_keys_of_zeros(case):
    *rest, is_causal, with_dlse = case
    check(*rest, "bshd", is_causal, padding="zeros", with_dlse=with_dlse)


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
def test_the_fused_kernels_are_followed_by_the_same_keys():
    check("uneven", "head", "softmax", "none", "triton", torch.float32, "small_grouped", "bshd", False, padding="zeros")


def test_flex_differentiates_its_results_as_a_part(monkeypatch):
    def attend(given, call):  # the oracle stands in for FlexAttention, which has no backward on the CPU
        return oracle.attention(*given[:3], replace(call.pattern, padding="none"), scale=call.scale)

    monkeypatch.setattr(flex, "attend", attend)
    *tensors, dout = drawn(31, 2, 1, 4, dtype=torch.float64)
    out, lse, *grads = differentiated(partial(oracle.attention, pattern=PADDED), [*tensors, dout])
    got = operators.attention_backward(dout, Tensors(*tensors), out, lse, Request(PADDED, scale=0.5), "flex")[:3]
    torch.testing.assert_close(got, tuple(grads))


def test_whole_segments_that_a_rate_does_not_divide_are_filled():
    q, k, v, _ = drawn(18, 2, 2, 4, dtype=torch.float64)
    pattern = DilatedPattern((9,), (4,), padding="zeros")
    assert_close(dilated_attention(q, k, v, pattern, return_lse=True), oracle.attention(q, k, v, pattern), 1e-12)


@pytest.mark.parametrize(("length", "pattern"), [
    (5, DilatedPattern((8,), (4,), padding="zeros")),  # shorter than its segment, which the rate divides
    (5, DilatedPattern((8, 16), (4, 2), padding="zeros")),
    (6, DilatedPattern((6,), (4,), padding="zeros")),  # one whole segment, which the rate does not divide
    (7, DilatedPattern((3,), (1,), padding="zeros")),  # a tail alone
    (6, DilatedPattern((3, 8), (3, 2), padding="zeros")),  # nothing to fill
])  # fmt: skip
def test_a_sequence_of_any_length_beside_its_segments_has_its_keys_of_zeros(length, pattern):
    q, k, v, _ = drawn(length, 2, 2, 4, dtype=torch.float64)
    assert_close(dilated_attention(q, k, v, pattern, return_lse=True), oracle.attention(q, k, v, pattern), 1e-12)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_with_dropout_the_gradient_is_exact(backend):
    tensors = [x.requires_grad_() for x in drawn(5, 2, 1, 2, dtype=torch.float64)[:3]]
    pattern = DilatedPattern((2, 4), (1, 3), padding="zeros")

    def attend(q, k, v):
        torch.manual_seed(1)
        return dilated_attention(q, k, v, pattern, dropout_p=0.3, backend=backend)

    assert torch.autograd.gradcheck(attend, tensors)
    torch.manual_seed(1)
    bare = dilated_attention(*tensors, replace(pattern, padding="none"), dropout_p=0.3, backend=backend)
    lses = [oracle.attention(*tensors, replace(pattern, padding=p))[1] for p in ("none", "zeros")]
    share = (lses[0] - lses[1]).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(attend(*tensors), bare * share)


def test_beside_large_scores_keys_of_zeros_weigh_nothing():
    q = k = torch.full((1, 3, 1, 1), 1e100, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(1, 3, 1, 1)
    out = dilated_attention(q, k, v, DilatedPattern((2,), (1,), padding="zeros"))
    assert out.flatten().tolist() == [1.5, 1.5, 3.0]
    assert not dilated_attention(-q, k, v, DilatedPattern((2,), (1,), padding="zeros"))[0, 2].any()


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_one_kernel_adds_them_as_torch_does(dtype, monkeypatch):
    out, *_ = drawn(31, 6, 3, 5, batch=2, dtype=dtype)
    lse = torch.randn(2, 6, 31, dtype=torch.promote_types(dtype, torch.float32))
    for row, value in ((3, -torch.inf), (4, torch.nan), (5, 90.0)):
        out[:, row], lse[:, :, row] = 0.0 if value == -torch.inf else out[:, row], value
    found = []
    for is_kernel in (False, True):
        monkeypatch.setattr(zero_keys, "kernel_serves", lambda x, answer=is_kernel: answer)
        found.append((out.transpose(1, 2).contiguous().transpose(1, 2), lse.clone()))
        zero_keys.add_zero_keys(*found[-1], Request(PADDED), 0, 31, 3)
    torch.testing.assert_close(*found, equal_nan=True)
    assert (found[0][1] != lse).any()


def test_their_memory_is_estimated():
    sizes = {"length": 1000, "heads": 4, "kv_heads": 2, "head_dim": 16, "device": "cpu", "dtype": torch.float32}
    bare, padded = (estimate_memory(replace(PADDED, padding=p), backend="eager", **sizes) for p in ("none", "zeros"))
    assert padded.workspace - bare.workspace == 2 * 1000 * 4  # the table, of KV heads
    causal = estimate_memory(PADDED, backend="eager", is_causal=True, **sizes)
    assert "workspace: zero keys" not in causal.items


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "zeros"])
@pytest.mark.parametrize("length", [1000, 10_000, 70_001, 200_000])
def test_on_a_gpu_a_slide_of_any_length_is_exact(length, padding):
    # Prov-GigaPath's shape. Of 256 queries, out and dq by their definition, branch by branch.
    pattern = DilatedPattern.geometric(offsets="head_block", padding=padding)
    tensors = drawn(length, 16, 16, 48, dtype=torch.bfloat16, device="cuda")
    out, _, dq, _, _ = attended(tensors, pattern, "auto")
    found, expected = [], []
    for n, t in enumerate(torch.linspace(0, length - 1, 256, dtype=torch.int64).tolist()):
        h = n % 16
        rows = torch.tensor(list(chain(*oracle.keys_of(pattern, t, length, h, 16, False))), device="cuda")
        zeros = (padding == "zeros") * oracle.zero_keys_of(pattern, t, length, h, 16, False)
        own_q, own_dout = (x[0, t, h].double() for x in (tensors[0], tensors[3]))
        own_k, own_v = (torch.cat([x[0, rows, h].double(), own_q.new_zeros(zeros, 48)]) for x in tensors[1:3])
        weights = (own_k @ own_q * 48**-0.5).softmax(0)
        exact = weights @ own_v
        expected.append((exact, (weights * ((own_v - exact) @ own_dout)) @ own_k * 48**-0.5))
        found.append((out[0, t, h], dq[0, t, h]))
    for mine, theirs in zip(*(map(torch.stack, zip(*each, strict=True)) for each in (found, expected)), strict=True):
        assert (mine - theirs).norm() < 4e-3 * theirs.norm()
