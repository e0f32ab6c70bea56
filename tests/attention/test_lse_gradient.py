"""lse has a gradient, alone and beside that of out, for every pattern and for merged calls. Other calls pay nothing."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import oracle
import pytest
import torch
from cases import TOLERANCE, assert_close, differentiated, documents_alone, drawn, drawn_dlse, ends_of
from cases import neighbourhoods as of_rules
from torch.utils.checkpoint import checkpoint

from hilbert_lib import DilatedPattern, Neighbourhood, Union, attend, explain_backend, merge_attention
from hilbert_lib.attention.backends import backend as shared
from hilbert_lib.attention.backends import flex, kernel, strided
from hilbert_lib.attention.backends.dense import CpuFlash
from hilbert_lib.attention.backends.registry import BACKENDS, backends_for
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.validation import as_pattern
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.pattern import Pattern


@dataclass(frozen=True)
class Near(Pattern):
    """Every earlier position within a distance along a sequence, but not its own."""

    kind: ClassVar[str] = "near"
    options: ClassVar[frozenset[str]] = DilatedPattern.options

    distance: int

    def attends(self, query, key):
        return (query - key > 0) & (query - key <= self.distance)


SEQUENCE = DilatedPattern((6, 12, 24), (2, 4, 5))  # rows of some heads are in no branch
PATTERNS = {
    "sequence": SEQUENCE,
    "keys of zeros": DilatedPattern((6, 12, 24), (1, 4, 5), padding="zeros"),
    "grid": of_rules("plane, dilated", "one"),
    "windows by head": of_rules("plane", "windows"),
    "union of sequences": Union((DilatedPattern((8,), (2,)), DilatedPattern((24,), (3,)))),
    "union of grids": of_rules("near and far", "one"),
    "own": Near(3),
}
NAMES = ["reference", "eager", "sdpa", "triton"] if kernel_mode() != "absent" else ["reference", "eager", "sdpa"]
# Half a unit of sums in float32, and of one rounding of the gradients.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def given(name: str, dtype: torch.dtype, head_dim: int = 8, device: str = "cpu") -> tuple[list, dict]:
    """q, k, v, extra keys of grids, dout and the options of a call of a pattern."""
    rows = as_pattern(PATTERNS[name]).length or 23
    q, k, v, dout = drawn(rows, 4, 2, head_dim, batch=2, dtype=dtype)
    hidden = torch.zeros(2, rows, dtype=torch.bool)
    hidden[1, ::3] = True
    extra = drawn(3, 4, 2, head_dim, batch=2, dtype=dtype)[1:3] if "grid" in name else []
    options = {} if "sequence" in name else {"key_padding_mask": hidden}
    return [q, k, v, *extra, dout], options


def gradients(attention, tensors, dlse: torch.Tensor, with_dout: bool) -> list[torch.Tensor]:
    """Gradients in q, k, v and extra keys, from those of out and lse or of lse alone."""
    return gradients_of_one_call(attention, tensors, (dlse, with_dout))[0]


def gradients_of_one_call(attention, tensors, *asked: tuple[torch.Tensor, bool]) -> list[list[torch.Tensor]]:
    """The same for each (dlse, with_dout) that is asked."""
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attention(*leaves)

    def gradient(dlse: torch.Tensor, with_dout: bool) -> list[torch.Tensor]:
        if with_dout:
            return list(torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse)), retain_graph=True))
        return list(torch.autograd.grad(lse, leaves, dlse.to(lse), retain_graph=True, materialize_grads=True))

    return [gradient(*each) for each in asked]


def of_backend(pattern, backend: str, **options):
    """A call as a function of q, k, v and extra keys."""

    def attention(q, k, v, *extra):
        extra_keys = dict(zip(("extra_k", "extra_v"), extra, strict=True)) if extra else {}
        return attend(q, k, v, pattern, backend=backend, return_lse=True, **extra_keys, **options)

    return attention


def check(name: str, backend: str, dtype: torch.dtype, head_dim: int = 8, device: str = "cpu") -> None:
    """The gradients of out and lse, and of lse alone, are the oracle's."""
    pattern = PATTERNS[name]
    tensors, options = given(name, dtype, head_dim)
    takes_masks = backend in ("reference", "eager", "triton", "flex") and (name, backend) != ("keys of zeros", "flex")
    if not takes_masks:
        options = {}
    exact, doubles = oracle.attending(pattern, **options), [x.double() for x in tensors]
    dlse = drawn_dlse(exact(*doubles[:-1])[1])
    moved = [x.to(device) for x in tensors]
    options = {key: x.to(device) for key, x in options.items()}
    both = (dlse, False), (dlse, True)
    all_found = gradients_of_one_call(of_backend(pattern, backend, **options), moved, *both)
    close = CLOSE[dtype] if device == "cpu" else TOLERANCE[dtype][2]
    for found, right in zip(all_found, gradients_of_one_call(exact, doubles, *both), strict=True):
        assert_close(found, right, close, rtol=close / 10)


def serves(name: str, backend: str, dtype: torch.dtype, head_dim: int = 8, device: str = "cpu") -> bool:
    q = torch.empty(2, 23, 4, head_dim, dtype=dtype, device=device)
    call = Request(as_pattern(PATTERNS[name]).of_heads(2))
    backends = backends_for(call.pattern)
    return backend in backends and not backends[backend].refusal(q, call)


def exactest(backend: str) -> torch.dtype:
    return torch.float32 if backend == "triton" else torch.float64


SERVED = [(name, backend) for name in PATTERNS for backend in NAMES if serves(name, backend, exactest(backend))]


@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_the_gradient_of_lse_is_the_oracles(name, backend):
    check(name, backend, exactest(backend))


ON_GPU = ("triton", "hopper", "flex", "cudnn", "flash", "sdpa", "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ON_GPU)
@pytest.mark.parametrize("name", PATTERNS)
def test_on_a_gpu_the_gradient_of_lse_is_the_oracles(name, backend, dtype):
    if not serves(name, backend, dtype, 64, "cuda"):
        pytest.skip(f"{backend} does not serve it")
    check(name, backend, dtype, 64, "cuda")


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_bias_has_a_gradient_of_lse(backend):
    near = of_rules("plane", "one")
    q, k, v, dout = drawn(near.length, 2, 2, 4, dtype=torch.float64)
    bias = torch.randn(2, *(2 * side - 1 for side in near.window), dtype=torch.float64)
    exact = partial(oracle.attention, pattern=near)
    dlse = drawn_dlse(exact(q, k, v)[1])

    def biased(call):
        return gradients(lambda q, k, v, bias: call(q, k, v, bias=bias), [q, k, v, bias, dout], dlse, True)

    assert_close(biased(partial(attend, pattern=near, backend=backend, return_lse=True)), biased(exact), 1e-12)


@pytest.mark.parametrize("backend", NAMES)
def test_documents_have_their_gradients_of_lse(backend):
    lengths, dtype = [7, 0, 13, 3], exactest(backend)
    tensors = drawn(23, 4, 2, 8, dtype=dtype)
    _, lse, *_ = documents_alone(tensors, lengths, SEQUENCE, is_causal=True)
    dlse = drawn_dlse(lse)
    right = documents_alone(tensors, lengths, SEQUENCE, dlse=dlse, is_causal=True)[2:]
    call = of_backend(SEQUENCE, backend, cu_seqlens=ends_of(lengths), is_causal=True)
    assert_close(gradients(call, tensors, dlse, True), right, CLOSE[dtype])


@pytest.mark.parametrize("name", ["sequence", "union of sequences"])
@pytest.mark.parametrize("backend", [x for x in NAMES if x != "sdpa"])
def test_lse_is_undropped_and_so_is_its_gradient(backend, name):
    dtype = exactest(backend)
    tensors, _ = given(name, dtype)
    exact = oracle.attending(PATTERNS[name])
    dlse = drawn_dlse(exact(*tensors[:3])[1])
    dropped = of_backend(PATTERNS[name], backend, dropout_p=0.5)

    asked = (dlse, False), (torch.zeros_like(dlse), True), (dlse, True)
    alone, of_out, of_both = gradients_of_one_call(dropped, tensors, *asked)
    assert_close(alone, gradients(exact, [x.double() for x in tensors], dlse, False), CLOSE[dtype])
    assert_close(of_both, [x + y for x, y in zip(alone, of_out, strict=True)], CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sequence", "own"])
def test_halves_of_the_keys_merged_are_the_whole_with_its_gradients(name, dtype):
    """Some rows see keys of one half alone, and some of none."""
    tensors, _ = given(name, dtype)
    pattern, rows = PATTERNS[name], tensors[0].shape[1]
    second = torch.arange(rows).expand(2, -1) > rows // 2
    dlse = drawn_dlse(oracle.attention(*tensors[:3], pattern)[1])

    def merged(*leaves):
        halves = [of_backend(pattern, "auto", key_padding_mask=mask)(*leaves) for mask in (second, ~second)]
        assert all(lse.isinf().any() for _, lse in halves)
        return merge_attention(*zip(*halves, strict=True))

    right = differentiated(oracle.attending(pattern), [x.double() for x in tensors], dlse)
    assert right[1].isinf().any()
    assert_close(differentiated(merged, tensors, dlse), right, CLOSE[dtype], rtol=CLOSE[dtype])


RECIPES = (Path(__file__).parents[2] / "docs/recipes.md").read_text()


@pytest.mark.parametrize("name", ["sequence", "own"])
def test_the_recipe_of_a_learned_sink_is_one_more_score_with_its_gradients(name):
    """In a row without keys the sink takes all weight."""
    (code,) = re.findall(r"## A learned sink.*?```python\n(.*?)```", RECIPES, re.S)
    recipe: dict = {}
    exec(code, recipe)
    (*tensors, dout), _ = given(name, torch.float64)
    sink = torch.linspace(-1, 2, 4, dtype=torch.float64)
    rows = range(tensors[0].shape[1])
    times = [oracle.times_seen(PATTERNS[name], rows, len(rows), head // 2, 2) for head in range(4)]

    def by_definition(q, k, v, sink):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + torch.stack(times).log()
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v), scores.logsumexp(-1)

    def by_recipe(q, k, v, sink):
        return recipe["with_sink"](*of_backend(PATTERNS[name], "auto")(q, k, v), sink)

    given_tensors = [*tensors, sink, dout]
    dlse = torch.randn(2, 4, len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, right = (differentiated(attention, given_tensors, dlse) for attention in (by_recipe, by_definition))
    assert_close(found, right, 1e-12)
    assert attend(*tensors, PATTERNS[name], return_lse=True)[1].isinf().any()


@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
def test_a_sliding_window_with_a_learned_sink_is_the_attention_of_gpt_oss(backend):
    # Each head has a sink, a logit that joins the softmax of its window and has no value.
    if backend not in NAMES:
        pytest.skip("triton's kernels do not run here")
    dtype, rows, window = exactest(backend), 23, 5
    q, k, v, dout = drawn(rows, 4, 2, 8, batch=2, dtype=dtype)
    sink, position = torch.linspace(-1, 2, 4, dtype=dtype), torch.arange(rows)
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= window)

    def of_gpt_oss(q, k, v, sink):
        k, v = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], v)

    near = Neighbourhood((rows,), window, is_causal=True)

    def by_lse(q, k, v, sink, detached=False):
        out, lse = attend(q, k, v, near, backend=backend, return_lse=True)
        lse = lse.detach() if detached else lse
        return out * (lse - sink[:, None].to(lse)).sigmoid().transpose(1, 2)[..., None]

    def differentiated_by(call):
        leaves = [x.double() if call is of_gpt_oss else x.clone() for x in (q, k, v, sink)]
        leaves = [x.requires_grad_() for x in leaves]
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out))]

    right = differentiated_by(of_gpt_oss)
    assert_close(differentiated_by(by_lse), right, CLOSE[dtype])
    without = differentiated_by(partial(by_lse, detached=True))[1]
    assert (without - right[1]).norm() > 0.1 * right[1].norm(), "the gradient of lse matters"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_columns_of_dense_kernels_hold_every_size_of_a_gradient_of_lse(dtype):
    sizes = torch.tensor([0.0, 1e-9, -3e-6, 0.1, -1.0, 3.3, 1e4, -1e6], dtype=torch.promote_types(dtype, torch.float32))
    dout, out = kernel._columns(sizes[:, None], dtype)
    assert dout.dtype == out.dtype == dtype
    assert dout.shape == out.shape == (8, kernel.LSE_COLUMNS)
    least = 2.0**-24 * 2.0**-13  # float16's least step times the least power
    assert_close([(dout.double() * out.double()).sum(-1)], [-sizes.double()], least, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3e-6, 1.0, 3e4])
def test_half_precision_has_the_gradient_of_lse_to_its_rounding(size, dtype):
    q, k, v, _ = drawn(32, 2, 2, 16, dtype=dtype)
    exact = oracle.attending(DilatedPattern((32,), (1,)))
    dlse = size * drawn_dlse(exact(q, k, v)[1])
    right = gradients(exact, [x.double() for x in (q, k, v, q)], dlse, False)[:2]
    found = gradients(of_backend(DilatedPattern((32,), (1,)), "sdpa"), [q, k, v, q], dlse, False)[:2]
    for x, y in zip(found, right, strict=True):
        # Gradients smaller than float16's smallest step become 0.
        assert (x.double() - y).norm() <= 8e-3 * y.norm() + torch.finfo(dtype).smallest_normal


def test_a_part_of_flex_has_the_gradients_of_its_own_out_and_lse():
    """They equal what autograd computes for the merge of two parts."""
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(2, 5, 3, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    lses = [torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    out, lse = merge_attention(outs, lses)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    for with_dlse in (False, True):
        results, wanted = ((out, lse), (dout, dlse)) if with_dlse else ((out,), (dout,))
        right = torch.autograd.grad(results, (outs[0], lses[0]), wanted, retain_graph=True)
        with torch.no_grad():
            found = flex.gradients_of_part(dout, out, lse, outs[0], lses[0], dlse if with_dlse else None)
        torch.testing.assert_close(found, right, atol=1e-14, rtol=1e-12)


def test_a_compiled_call_of_which_lse_is_not_used_has_no_gradient_of_it(monkeypatch):
    backend, seen = backends_for(SEQUENCE)["reference"], []
    forward, backward = backend.functions(torch.device("cpu"))

    def watching(*args, dlse=None):
        seen.append(dlse)
        return backward(*args, dlse=dlse)

    monkeypatch.setitem(BACKENDS, "reference", replace(backend, functions=lambda device: (forward, watching)))
    call = of_backend(SEQUENCE, "reference")
    leaves = [x.requires_grad_() for x in given("sequence", torch.float64)[0][:3]]
    torch.compile(lambda *x: call(*x)[0], backend="aot_eager", fullgraph=True)(*leaves).sum().backward()
    assert seen == [None]
    torch.compiler.reset()


def test_a_compiled_or_checkpointed_call_has_the_gradients_of_a_plain_one():
    tensors, options = given("union of grids", torch.float64)
    call = of_backend(PATTERNS["union of grids"], "auto", **options)
    dlse = drawn_dlse(call(*tensors[:-1])[1])
    right = gradients(call, tensors, dlse, True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_close(gradients(compiled, tensors, dlse, True), right, 1e-13)
    assert_close(gradients(compiled, tensors, dlse, False), gradients(call, tensors, dlse, False), 1e-13)
    again = partial(checkpoint, call, use_reentrant=False)
    assert all(map(torch.equal, gradients(again, tensors, dlse, True), right))
    torch.compiler.reset()


def test_autocast_leaves_lse_and_its_gradient_in_float32():
    tensors, _ = given("sequence", torch.float32)
    leaves = [x.requires_grad_() for x in tensors[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(*leaves, SEQUENCE, return_lse=True)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        loss = torch.where(lse == -torch.inf, 0.0, lse).sum()
    found = torch.autograd.grad(loss, leaves[:2])
    exact = oracle.attending(SEQUENCE)
    right = gradients(exact, [x.detach().double() for x in tensors], torch.ones_like(lse), False)
    assert_close(found, right[:2], CLOSE[torch.bfloat16])


def test_a_gradient_of_lse_has_no_second_derivative():
    leaves = [x.requires_grad_() for x in drawn(23, 2, 2, 4, dtype=torch.float64)[:3]]
    _, lse = attend(*leaves, DilatedPattern((23,), (1,)), return_lse=True)
    (dq,) = torch.autograd.grad(lse.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="dilated_attention can be differentiated once"):
        dq.sum().backward()


# As cuDNN and FlashAttention, which take no more head_dims.
NARROW = shared.Backend(
    name="sdpa", note="", colour="", **strided.over_views(CpuFlash),
    limits=lambda q, call: f"head_dim must be up to 8, got {q.shape[-1]}" if q.shape[-1] > 8 else "",
)  # fmt: skip


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="torch's kernel for the CPU, which stands for them, has a private name")
@pytest.mark.parametrize("name", ["sequence", "union of sequences"])
def test_a_kernel_without_room_for_the_columns_refuses_and_auto_passes_over_it(name, monkeypatch):
    monkeypatch.setitem(BACKENDS, "sdpa", NARROW)
    tensors, _ = given(name, torch.float64)
    leaves, pattern = [x.requires_grad_() for x in tensors[:3]], PATTERNS[name]
    out, lse = attend(*leaves, pattern, backend="sdpa", return_lse=True)
    out.sum().backward(retain_graph=True)
    told = r"backend='sdpa' has no gradient of lse: with the 8 columns that it takes, head_dim must be up to 8, got 16"
    with pytest.raises(ValueError, match=told):
        lse.sum().backward()
    assert explain_backend(*leaves, pattern).chosen == "sdpa"
    explained = explain_backend(*leaves, pattern, return_lse=True)
    assert explained.chosen != "sdpa"
    assert "passed over: has no gradient of lse" in explained.reasons["sdpa"]
    with torch.no_grad():
        assert explain_backend(*leaves, pattern, return_lse=True).chosen == "sdpa"
    dlse = drawn_dlse(lse.detach())
    found = gradients(of_backend(pattern, "auto"), tensors, dlse, True)
    assert_close(found, gradients(oracle.attending(pattern), tensors, dlse, True), 1e-12)


@pytest.mark.parametrize("pattern", [DilatedPattern((6,), (1,)), Neighbourhood((6,), 6)], ids=str)
def test_a_single_column_may_have_any_stride(pattern):
    tensors = drawn(6, 3, 3, 1, batch=2, dtype=torch.float64)
    dlse = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    *_, dq, dk, dv = differentiated(oracle.attending(pattern), tensors, dlse)
    # torch takes these to be contiguous, with a last stride of 3.
    q, k, v, dout = (x.as_strided(x.shape, (18, 3, 1, 3)).requires_grad_() for x in tensors)
    found = torch.autograd.grad(attend(q, k, v, pattern, return_lse=True), (q, k, v), (dout, dlse))
    assert_close(found, [dq, dk, dv], 1e-12)
