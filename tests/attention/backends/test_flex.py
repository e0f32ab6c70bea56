"""FlexAttention: output, lse and gradients, of the whole and of parts, compiled and run again."""

import os
import shutil
from functools import partial

import oracle
import pytest
import torch
from cases import assert_close, differentiated, drawn, expected, norms
from torch.nn.attention.flex_attention import create_block_mask

from hilbert_lib import DilatedPattern, dilated_attention
from hilbert_lib.attention.backends import flex, flex_masks
from hilbert_lib.attention.request import WORKING_DTYPE, Request, Tensors
from hilbert_lib.internals import WITHOUT_INTERNALS


@pytest.mark.parametrize("mixing", ["softmax", "head_groups"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_gives_the_output_and_lse_of_the_oracle(mixing, is_causal):
    pattern, (q, k, v, _), out, lse, _ = expected("sparse", "head", mixing, torch.float32, "wide", is_causal)
    got, got_lse = flex.attend(Tensors(q, k, v), Request(pattern, is_causal=is_causal, scale=q.shape[3] ** -0.5))
    assert_close((got, got_lse), (out, lse), 2e-4)
    assert lse.isinf().any()  # rows that no branch has


def _dense(counts: torch.Tensor, lists: torch.Tensor, columns: int) -> torch.Tensor:
    """Which blocks each row of blocks lists: (..., rows, columns) bool."""
    is_listed = torch.arange(lists.shape[-1]) < counts[..., None]
    found = torch.zeros(*lists.shape[:-1], columns + 1, dtype=torch.bool)  # what is not listed goes past the end
    return found.scatter(-1, lists.long().where(is_listed, columns), True)[..., :columns]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rates", [(1, 1), (1, 2)])
@pytest.mark.parametrize("size", [64, 128])
def test_blocks_hold_every_pair_and_full_ones_no_other(size, rates, is_causal):
    pattern = DilatedPattern((320, 640), rates)
    mask, _ = flex_masks.dilated_mask(pattern, is_causal, 640, 2, 2, size, torch.device("cpu"))
    true = create_block_mask(mask.mask_mod, None, 2, 640, 640, device="cpu", BLOCK_SIZE=size)
    some, full, true_some, true_full = (
        _dense(counts, lists, 640 // size)[0]
        for each in (mask, true)
        for counts, lists in ((each.kv_num_blocks, each.kv_indices), (each.full_kv_num_blocks, each.full_kv_indices))
    )
    assert full.any()
    assert (full <= true_full).all()
    assert torch.equal(some | full, (true_some | true_full).expand_as(some))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_backward_below_autograd_takes_masks_first_made_in_inference_mode(monkeypatch, is_causal):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no gradient on the CPU
    *tensors, dout = drawn(50, 2, 2, 16, dtype=torch.float64)
    call = Request(DilatedPattern((25, 50), (1, 2)), is_causal, scale=0.3)  # of no other test: masks are cached
    with torch.inference_mode():
        out, lse = flex.attend(Tensors(*tensors), call)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():  # as the operator calls it
        got = flex.backward(dout, Tensors(*tensors), out.clone(), lse.clone(), call)[:3]
    attend = partial(oracle.attention, pattern=call.pattern, is_causal=is_causal, scale=0.3)
    assert_close(got, differentiated(attend, [*tensors, dout])[2:], 1e-7)


def parts_by_flex(dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of causal attention whose keys come in two parts, summed over the parts, and those of the whole.

    The second part is a square of its own: rows 150 to 219 see keys 150 to 219, beside the 150 that all of them see.
    """
    q, k, v, dout = drawn(220, 4, 2, 16, batch=2, dtype=dtype, device=device)
    whole = partial(oracle.attention, pattern=DilatedPattern((220,), (1,)), is_causal=True)
    out, lse, *wanted = differentiated(whole, [x.double() for x in (q, k, v, dout)])
    got = [torch.zeros_like(x) for x in wanted]
    first, second = slice(0, 150), slice(150, 220)
    for queries, keys, is_causal in ((first, first, True), (second, first, False), (second, second, True)):
        call = Request(DilatedPattern((150,), (1,)), is_causal, scale=16**-0.5, is_part=True)
        own_dout, *own = (
            x[:, at].contiguous() for x, at in zip((dout, q, k, v), (queries, queries, keys, keys), strict=True)
        )
        merged = out[:, queries].to(dtype), lse[:, :, queries].to(WORKING_DTYPE[dtype]).contiguous()
        some = flex.backward(own_dout, Tensors(*own), *merged, call)[:3]
        for total, part, at in zip(got, some, (queries, keys, keys), strict=True):
            total[:, at] += part
    return got, wanted


def test_parts_of_flex_have_the_gradient_of_the_whole(monkeypatch):
    # The oracle stands in for FlexAttention, which has no backward on the CPU.
    def attend(given, call):
        return oracle.attention(*given[:3], call.pattern, is_causal=call.is_causal, scale=call.scale)

    monkeypatch.setattr(flex, "attend", attend)
    torch.testing.assert_close(*parts_by_flex(torch.float64, "cpu"))


def test_rows_without_keys_have_no_gradient_in_a_part_of_flex():
    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf)
    assert not any(x.count_nonzero() for x in flex.gradients_of_part(torch.ones_like(out), out, lse, out, lse))


@pytest.mark.gpu
def test_parts_of_compiled_flex_have_the_gradient_of_the_whole():
    got, wanted = parts_by_flex(torch.bfloat16, "cuda")
    assert max(norms(got, wanted)) < 1e-2


def test_flex_takes_fewer_queries_than_keys_in_one_segment():
    *tensors, _ = drawn(20, 2, 2, 16, keys=45)
    pattern = DilatedPattern((45,), (1,))
    got = flex.attend(Tensors(*tensors), Request(pattern, scale=0.3))
    assert_close(got, oracle.attention(*tensors, pattern, scale=0.3), 1e-5)


@pytest.mark.parametrize("rate", [2**31, 2**32, 2**32 + 1, 2**41])
def test_rates_beyond_32_bits_leave_one_row_of_a_residue_in_flex(rate):
    pattern = DilatedPattern((2**41,), (rate,), offsets="zero")
    tensors = torch.randn(3, 1, 8, 1, 16).unbind()
    exact = dilated_attention(*tensors, pattern, scale=0.25, return_lse=True, backend="reference")
    torch.testing.assert_close(flex.attend(Tensors(*tensors), Request(pattern, scale=0.25)), exact)


# A compiled function whose backward runs again, whatever ran and was compiled before it.
inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


def product(x, y):
    """Its backward, as torch compiles it by default, writes over what the forward kept."""
    return ((x @ y).relu().exp() * x.cos()).tanh()


def tuple_of_a_view(x, y):
    return product(x, y)[:5], x.sum()


def gradients(run, inputs, times):
    results = run(*inputs)
    out = (results if isinstance(results, torch.Tensor) else results[0]).sum()
    return [torch.autograd.grad(out, inputs, retain_graph=n + 1 < times) for n in range(times)]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else it keeps what an earlier process compiled
    torch._dynamo.reset()
    torch.manual_seed(0)
    return [torch.randn(8, 8, requires_grad=True) for _ in range(2)]


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="that a backward takes over no buffers is said by private names")
@inductor
def test_a_backward_runs_again_after_those_that_ran_once(inputs):
    # It takes buffers over, and stays in torch's cache.
    gradients(torch.compile(tuple_of_a_view, dynamic=False), inputs, 1)
    torch._dynamo.reset()
    compiled = torch.compile(tuple_of_a_view, dynamic=False)
    gradients(lambda *x: flex.run_to_keep(compiled, *x), inputs, 1)
    (expected,) = gradients(tuple_of_a_view, inputs, 1)
    for grads in gradients(lambda *x: flex.run_to_keep(compiled, *x), inputs, 3):
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


@inductor
def test_what_is_kept_enters_no_cache_of_autograds_and_what_came_before_is_left_alone(inputs, monkeypatch):
    asked = []
    kept = "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save"  # loads torch's compiler
    monkeypatch.setattr(kept, lambda *_, **__: asked.append(True))
    compiled = torch.compile(product, dynamic=False)
    flex.run_to_keep(compiled, *inputs)
    assert not asked  # it holds tensors
    torch._dynamo.reset()
    taken = compiled(*inputs)
    (out,) = flex.run_to_keep(lambda x: (x * 2,), taken)
    assert taken.grad_fn._forward_cls.metadata.bw_donated_idxs != []
    assert out.grad_fn.name() == "MulBackward0"
    taken.sum().backward()
    assert asked


def test_what_has_no_gradient_or_is_not_compiled_is_returned_as_it_is():
    x = torch.ones(2, requires_grad=True)
    assert flex.run_to_keep(torch.sin, x.detach()).grad_fn is None
    torch.autograd.grad(flex.run_to_keep(torch.sin, x).sum(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 200])
def test_the_backward_of_compiled_flex_attention_runs_again(length):
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", requires_grad=True) for _ in range(3))
    torch.autograd.grad(flex.compiled_flex_attention(q, k, v).sum(), q)
    out = flex.compiled_flex_attention(q, k, v)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)
