"""A compiled function whose backward runs again, whatever ran and was compiled before it."""

import os
import shutil

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

from hilbert_lib.attention.backends.flex import compiled_flex_attention, run_to_keep

inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


def product(x, y):
    """Its backward, as torch compiles it by default, writes over what the forward kept."""
    return ((x.sin() @ y.exp()).relu().exp() * x.cos()).tanh()


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


@inductor
def test_a_backward_runs_again_after_those_that_ran_once(inputs):
    # It takes buffers over, and stays in torch's cache.
    gradients(torch.compile(tuple_of_a_view, dynamic=False), inputs, 1)
    torch._dynamo.reset()
    compiled = torch.compile(tuple_of_a_view, dynamic=False)
    gradients(lambda *x: run_to_keep(compiled, *x), inputs, 1)
    (expected,) = gradients(tuple_of_a_view, inputs, 1)
    for grads in gradients(lambda *x: run_to_keep(compiled, *x), inputs, 3):
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


@inductor
def test_what_is_kept_enters_no_cache_of_autograds_and_what_came_before_is_left_alone(inputs, monkeypatch):
    asked = []
    monkeypatch.setattr(AOTAutogradCache, "save", lambda *_, **__: asked.append(True))
    compiled = torch.compile(product, dynamic=False)
    run_to_keep(compiled, *inputs)
    assert not asked  # it holds tensors
    torch._dynamo.reset()
    taken = compiled(*inputs)
    (out,) = run_to_keep(lambda x: (x * 2,), taken)
    assert taken.grad_fn._forward_cls.metadata.bw_donated_idxs != []
    assert out.grad_fn.name() == "MulBackward0"
    taken.sum().backward()
    assert asked


def test_what_has_no_gradient_or_is_not_compiled_is_returned_as_it_is():
    x = torch.ones(2, requires_grad=True)
    assert run_to_keep(torch.sin, x.detach()).grad_fn is None
    torch.autograd.grad(run_to_keep(torch.sin, x).sum(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 200])
def test_the_backward_of_compiled_flex_attention_runs_again(length):
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", requires_grad=True) for _ in range(3))
    torch.autograd.grad(compiled_flex_attention(q, k, v).sum(), q)
    out = compiled_flex_attention(q, k, v)
    first, second = (torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)
