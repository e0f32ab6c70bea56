"""A compiled function whose backward runs again, whatever ran and was compiled before it."""

import os
import shutil

import pytest
import torch
from torch._functorch import config

from hilbert_lib.attention.flex_compiled import compiled_flex_attention, run_to_keep

inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
GRAPHS = {
    "a tensor": lambda x, y: (x.sin() * y.exp()).cos(),
    "a tuple": lambda x, y: ((x.sin() * y.exp()).cos(), x.sum()),
    "a view": lambda x, y: (x.sin() * y.exp()).cos()[:40],
}


@inductor
@pytest.mark.parametrize(
    ("graph", "eagerly"),  # whether the backward is compiled with the forward, not when it first runs
    [("a tensor", True), ("a tuple", False), ("a view", False)],
)
def test_a_backward_runs_again_after_one_that_ran_once(graph, eagerly, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which keeps what an earlier process said of a graph
    torch._dynamo.reset()
    compiled = torch.compile(GRAPHS[graph], dynamic=False, fullgraph=True)
    x, y = (torch.randn(64, requires_grad=True) for _ in range(2))

    def gradients(run, times):
        results = run(x, y)
        out = (results if isinstance(results, torch.Tensor) else results[0]).sum()
        return [torch.autograd.grad(out, (x, y), retain_graph=n + 1 < times) for n in range(times)]

    with config.patch(force_non_lazy_backward_lowering=eagerly):
        gradients(lambda *args: run_to_keep(compiled, *args), 1)  # is compiled, and kept, for a backward that runs once
        for grads in gradients(lambda *args: run_to_keep(compiled, *args), 3):
            torch.testing.assert_close(grads, gradients(GRAPHS[graph], 1)[0])


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
    assert all(map(torch.equal, first[1:], second[1:]))
