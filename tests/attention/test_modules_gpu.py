"""The modules on a GPU: CUDA graphs of their calls give the bits of the calls, and decode."""

import copy
from functools import partial

import pytest
import torch
from cases import determinism, needs_hopper
from torch import nn

from hilbert_lib import DilatedPattern, NeighbourhoodAttention, Ordering, dilated_attention
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.lab.sweeps.memory import captured

pytestmark = pytest.mark.gpu
WIDE = {"embed_dim": 128, "num_heads": 2, "pattern": DilatedPattern((256, 512), (1, 2))}
GRAPHED = {  # module: its options, those of its call
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "padded": ({}, {"key_padding_mask": torch.arange(512) >= torch.tensor([[300], [512]])}),
    "dropout": ({"dropout": 0.3}, {}),
    "ordering": ({"kv_ordering": partial(Ordering.from_curve, "hilbert")}, {}),
    "grouped": ({"kv_heads": 1}, {}),
}


@pytest.fixture
def repeatable():
    """Gradients summed in one order, without which two eager calls differ by rounding."""
    with determinism(warn_only=True):
        yield


@pytest.mark.filterwarnings("ignore::UserWarning")  # of operators without a deterministic kernel
@pytest.mark.parametrize("option", GRAPHED)
def test_a_replayed_graph_has_the_bits_of_eager_calls_forward_and_backward(option, repeatable):
    torch.manual_seed(0)
    options, called = GRAPHED[option]
    module = MultiheadDilatedAttention(**WIDE, batch_first=True, device="cuda", dtype=torch.bfloat16, **options)
    called = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in called.items()}
    x = torch.randn(2, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call():
        out = module(x, **called)[0]
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])

    graph, results = captured(call)
    for seed in (3, 4):
        with torch.no_grad():
            x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        torch.manual_seed(seed)
        graph.replay()
        replayed = [each.clone() for each in results]
        torch.manual_seed(seed)
        assert all(map(torch.equal, replayed, call()))
    graph.replay()
    assert torch.equal(replayed[0], results[0]) == (option != "dropout"), "every replay draws new dropout"


def test_attention_without_projections_is_captured():
    module = DilatedAttention(WIDE["pattern"])
    q, k, v = torch.randn(3, 1, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    graph, (out,) = captured(lambda: (module(q, k, v, is_causal=True),))
    q.normal_()
    graph.replay()
    assert torch.equal(out, module(q, k, v, is_causal=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_first_used_in_a_capture_are_refused_by_a_clear_error():
    q = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16)
    with (
        pytest.raises(RuntimeError, match="run it once, just before the CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        dilated_attention(q, q, q, DilatedPattern((224, 448), (1, 7)), backend="triton")


FRESH = {  # backend: a pattern and an ordering that no other test in the process has made tables for
    "triton": (DilatedPattern((256, 448), (1, 2)), lambda length: Ordering.random(length, 1234)),
    "cudnn": (DilatedPattern((192, 448), (1, 2)), None),
    "hopper": (DilatedPattern((320, 448), (1, 2)), None),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["triton", "cudnn", pytest.param("hopper", marks=needs_hopper)])
def test_reduce_overhead_serves_a_module_that_nobody_called_before(backend):
    pattern, ordering = FRESH[backend]
    torch.manual_seed(0)
    options = {"backend": backend, "kv_ordering": ordering}
    module = MultiheadDilatedAttention(
        128, 2, pattern, batch_first=True, device="cuda", dtype=torch.bfloat16, **options
    )
    compiled = torch.compile(module, mode="reduce-overhead")
    counted = torch._dynamo.utils.counters["inductor"]
    counted.clear()
    for seed in range(4):  # torch runs the first ones, records one and replays the rest
        torch.manual_seed(seed)
        x = torch.randn(2, 448, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for call in (compiled, module):
            out = call(x)[0]
            grads = torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])
            results.append([out.detach().clone(), *(grad.clone() for grad in grads)])
        for got, expected in zip(*results, strict=True):
            assert (got - expected).norm() <= 0.02 * expected.norm()
    assert counted["cudagraph_skips"] == 0


def test_an_encoder_layer_is_graphed_by_torch(repeatable):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 2, 256, dropout=0.0, batch_first=True, device="cuda", dtype=torch.bfloat16)
    layer.self_attn = MultiheadDilatedAttention(**WIDE, batch_first=True, device="cuda", dtype=torch.bfloat16)
    eager = copy.deepcopy(layer)
    x = torch.randn(2, 512, 128, device="cuda", dtype=torch.bfloat16)
    graphed = torch.cuda.make_graphed_callables(layer, (torch.zeros_like(x),))
    out, expected = graphed(x), eager(x)
    assert torch.equal(out, expected)
    grads = [torch.autograd.grad(y.sum(), list(m.parameters())) for y, m in ((out, layer), (expected, eager))]
    assert all(map(torch.equal, *grads))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dilated", "window"])
def test_one_graph_of_a_step_serves_all_steps_of_unequal_lengths(kind):
    # Expected: the call of all tokens of each sequence.
    torch.manual_seed(0)
    options = {"kv_heads": 1, "device": "cuda", "dtype": torch.bfloat16}
    if kind == "dilated":
        module = MultiheadDilatedAttention(**WIDE, batch_first=True, **options)
        decode = lambda x, **cached: module(x, is_causal=True, **cached)[0]  # noqa: E731
    else:
        module = decode = NeighbourhoodAttention(128, 2, 96, is_causal=True, **options)
    prompts, steps = (200, 317), 20
    x = torch.randn(2, 400, 128, device="cuda", dtype=torch.bfloat16)
    whole = torch.cat([decode(x[b : b + 1]) for b in range(2)])
    cache, lengths = module.make_cache(2, 400), torch.tensor(prompts, dtype=torch.int32, device="cuda")
    found = decode(x[:, : max(prompts)], cache=cache)
    for b, length in enumerate(prompts):
        assert (found[b, :length] - whole[b, :length]).norm() <= 0.02 * whole[b, :length].norm()
    cache.lengths.copy_(lengths)
    token = torch.empty(2, 1, 128, device="cuda", dtype=torch.bfloat16)
    graph, (out,) = captured(lambda: (decode(token, cache=cache),))
    cache.lengths.copy_(lengths)  # a call before the capture has added one
    for step in range(steps):
        rows = [length + step for length in prompts]
        token.copy_(torch.stack([x[b, row : row + 1] for b, row in enumerate(rows)]))
        graph.replay()
        expected = torch.stack([whole[b, row : row + 1] for b, row in enumerate(rows)])
        assert (out - expected).norm() <= 0.02 * expected.norm()
    assert cache.lengths.tolist() == [length + steps for length in prompts]
