"""Attention along a sequence and on a grid as operators: opcheck, compile, checkpointing, autocast, CUDA graphs."""

import os
import shutil
import subprocess
import sys
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from cases import drawn, needs_hopper, norms
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hilbert_lib import (
    DilatedAttention,
    DilatedPattern,
    MultiheadDilatedAttention,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    OrderingSpec,
    Union,
    attend,
    dilated_attention,
    explain_backend,
    neighbourhood_attention,
    ring_dilated_attention,
)
from hilbert_lib.attention import known_calls, operators
from hilbert_lib.attention.autograd import Differentiable
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods
from hilbert_lib.patterns.pattern import Pattern

pytestmark = pytest.mark.usefixtures("compiled_code_is_forgotten")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 12
PATTERN = DilatedPattern((6, 12), (3, 3))  # one pass of the fused kernels, which the interpreter runs slowly
PADDING = torch.zeros(1, LENGTH, dtype=torch.bool, device=DEVICE)
PADDING[:, 8:] = True
HILBERT = Ordering.from_curve("hilbert", LENGTH)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "ordering": {"kv_ordering": HILBERT},
    "padding": {"key_padding_mask": PADDING},
    "dropout": {"dropout_p": 0.3},
    "decoding": {"query_start": 5, "is_causal": True},
    "unequal": {"query_start": torch.tensor([6], device=DEVICE), "key_start": torch.tensor([2], device=DEVICE)},
    "grid": {"ordering": HILBERT, "key_padding_mask": PADDING},
}
NEAR = Neighbourhood((3, 4), (3, 2), edge=("clip", "wrap"))
ROWS = {option: 5 if option in ("decoding", "unequal") else LENGTH for option in OPTIONS}
BACKENDS = ["sdpa", "eager", "reference", "auto"] + ["triton"] * (kernel_mode() != "absent")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)


def qkv(*, rows: int = LENGTH, keys: int = LENGTH, dtype: torch.dtype = torch.float32, head_dim: int = 4):
    tensors = drawn(rows, 2, 1, head_dim, keys=keys, dtype=dtype)
    return [x.to(DEVICE).requires_grad_() for x in tensors[:3]]


def results(attend, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk and dv, with torch's generator at a fixed seed."""
    torch.manual_seed(3)
    out, lse = attend(*tensors)
    return out, lse, *torch.autograd.grad(loss_of(out, lse), tensors)


def loss_of(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).square().sum()


# What each backend is asked for here. The reference and "auto" differ from eager in what they compute, not in how they
# are called.
ASKED = {backend: [option for option in OPTIONS if (backend, option) != ("triton", "unequal")] for backend in BACKENDS}
ASKED |= {"sdpa": ["plain", "causal", "ordering"], "reference": ["causal", "dropout", "unequal", "grid"]}
ASKED |= {"auto": ["ordering", "padding", "grid"]}


def attention(backend: str, option: str):
    function = partial(dilated_attention, pattern=PATTERN)
    if option == "grid":
        function = partial(neighbourhood_attention, neighbourhood=NEAR)
    return partial(function, backend=backend, return_lse=True, **OPTIONS[option])


@pytest.mark.parametrize(("backend", "option"), [(b, o) for b in BACKENDS for o in ASKED[b]])
def test_compiled_calls_are_one_graph_with_the_bits_of_eager_ones(backend, option):
    attend, tensors = attention(backend, option), qkv(rows=ROWS[option])
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, results(compiled, tensors), results(attend, tensors)))


INDUCTOR = [("auto", "causal"), *((b, o) for b in BACKENDS[4:] for o in ("ordering", "dropout"))]


@needs_compiler
@pytest.mark.parametrize(("backend", "option"), INDUCTOR)
def test_inductor_compiles_calls_between_other_operators(backend, option):
    def block(q, k, v):
        out, lse = attention(backend, option)(q.sin(), k * 2, v.transpose(1, 2).contiguous().transpose(1, 2))
        return out.cos(), lse

    # By default inductor draws dropout's seed from a generator of its own.
    compiled = torch.compile(block, fullgraph=True, options={"fallback_random": True})
    tensors = qkv(rows=ROWS[option])
    torch.testing.assert_close(results(compiled, tensors), results(block, tensors))


@needs_compiler
def test_dropout_under_inductor_repeats_with_manual_seed():
    compiled = torch.compile(attention("auto", "dropout"), fullgraph=True)
    tensors = qkv()
    first = results(compiled, tensors)
    assert not torch.equal(compiled(*tensors)[0], first[0])
    assert all(map(torch.equal, results(compiled, tensors), first))


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_length_is_not_compiled_again(backend):
    attend = partial(dilated_attention, pattern=PATTERN, backend=backend, is_causal=True, return_lse=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for length, stance in ((12, "default"), (9, "fail_on_recompile"), (7, "fail_on_recompile")):
        tensors = qkv(rows=length, keys=length)
        for x in tensors:
            torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance(stance):
            got = results(compiled, tensors)
        assert all(map(torch.equal, got, results(attend, tensors)))


@dataclass(frozen=True)
class Rows(Pattern):
    """Every cell of the same row of a grid of two axes."""

    kind: ClassVar[str] = "rows"

    shape: tuple[int, int]
    is_shown: bool = True

    def attends(self, query, key):
        return query // self.shape[1] == key // self.shape[1]


ON_ANY_GRID = {
    "near": lambda *grid: Neighbourhood(grid, (3, 9), dilation=(2, 1), edge=("clip", "shift")),
    "union": lambda *grid: Union(
        (
            HeadNeighbourhoods((Neighbourhood(grid, 1), Neighbourhood(grid, 3))),
            Neighbourhood(grid, 3, is_causal=True),
            Neighbourhood(grid, 2, edge="wrap"),
        )
    ),
    "of one's own": lambda *grid: Rows(grid),
}


@pytest.mark.parametrize("name", ON_ANY_GRID)
def test_another_grid_is_not_compiled_again(name):
    def block(x):
        q = x.flatten(1, 2)
        return attend(q, q, q, ON_ANY_GRID[name](*x.shape[1:3]), return_lse=True)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for grid, stance in (((5, 6), "default"), ((9, 5), "fail_on_recompile"), ((3, 17), "fail_on_recompile")):
        x = torch.randn(2, *grid, 2, 4, device=DEVICE, requires_grad=True)
        expected = results(block, [x])  # first: who meets a kind of pattern first keeps the backends that serve it
        with torch.compiler.set_stance(stance):
            got = results(compiled, [x])
        assert all(map(torch.equal, got, expected))


def test_a_layer_that_is_exported_once_serves_every_grid():
    layer = NeighbourhoodAttention(8, 2, window=3, dilation=2).eval()
    mask, extra = torch.zeros(2, 4, 6, dtype=torch.bool), torch.randn(2, 3, 8)
    batch, rows, columns, tokens = (torch.export.Dim(name) for name in ("batch", "rows", "columns", "tokens"))
    grid = {0: batch, 1: rows, 2: columns}
    exported = torch.export.export(
        layer,
        (torch.randn(2, 4, 6, 8),),
        {"key_padding_mask": mask, "extra": extra},
        dynamic_shapes={"x": grid, "key_padding_mask": grid, "extra": {0: batch, 1: tokens}},
    )
    for sizes in ((3, 7, 5), (1, 2, 2)):  # the second is smaller than the window
        options = {"key_padding_mask": torch.rand(sizes) < 0.2, "extra": torch.randn(sizes[0], 7, 8)}
        x = torch.randn(*sizes, 8)
        assert torch.equal(exported.module()(x, **options), layer(x, **options))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
def test_joint_attention_that_is_exported_once_serves_every_number_of_tokens(axes, strict):
    layer = NeighbourhoodAttention(8, 2, window=(3,) * axes, relative_bias=True).eval()
    batch, tokens = (torch.export.Dim(name) for name in ("batch", "tokens"))
    grid = {0: batch} | {1 + axis: torch.export.Dim(f"side{axis}") for axis in range(axes)}
    exported = torch.export.export(
        layer,
        (torch.randn(2, *(4, 6)[:axes], 8),),
        {"extra": torch.randn(2, 3, 8), "return_extra": True},
        dynamic_shapes={"x": grid, "extra": {0: batch, 1: tokens}, "return_extra": None},
        strict=strict,
    )
    # More cells than extra tokens, fewer, and one of each.
    for count, sides, extra in ((3, (7, 5), 2), (2, (2, 2), 9), (1, (1, 1), 1)):
        x, options = torch.randn(count, *sides[:axes], 8), {"extra": torch.randn(count, extra, 8), "return_extra": True}
        assert all(map(torch.equal, exported.module()(x, **options), layer(x, **options)))


def test_another_step_of_decoding_is_not_compiled_again():
    def step(q, k, v, position):
        return dilated_attention(q, k, v, PATTERN, query_start=position)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for keys, stance in ((7, "default"), (9, "fail_on_recompile"), (12, "fail_on_recompile")):
        tensors = [x.detach() for x in qkv(rows=1, keys=keys)]
        with torch.compiler.set_stance(stance):
            got = compiled(*tensors, keys - 1)
        assert torch.equal(got, step(*tensors, keys - 1))


CALLS = {  # backend: what the operators are given beside q, k and v
    "triton": (True, 0.5, 0.3, torch.tensor([5]), PADDING, None, HILBERT.slots(PADDING.device)),
    "eager": (True, 0.5, 0.3, torch.tensor([5]), PADDING, 5, None),
    "reference": (False, 0.5, 0.0, None, PADDING, None, None),
    "sdpa": (True, 0.5, 0.0, None, None, None, None),
}


@pytest.mark.parametrize(("backend", "extra"), [("eager", 0), ("reference", 3), *((b, 3) for b in BACKENDS[4:])])
def test_the_operators_on_grids_pass_opcheck(backend, extra):
    leaves = [*qkv(), *(x[:, :extra].detach().requires_grad_() for x in qkv()[1:])]
    request = Request(NEAR.of_heads(leaves[1].shape[2]), scale=0.5, ordering=HILBERT, key_padding_mask=PADDING)
    check_operators(leaves, request, backend)


CHECKED = [("eager", True), *((b, False) for b in BACKENDS if b != "auto")]  # what is empty reaches no backend


def test_the_operators_pass_opcheck_with_starts():
    leaves = qkv(rows=5)
    check_operators(leaves, Request(PATTERN, scale=0.5, **OPTIONS["unequal"] | {"query_start": 6}), "eager")
    starts = {"query_starts": OPTIONS["unequal"]["query_start"], "key_start": OPTIONS["unequal"]["key_start"]}
    check_operators(leaves, Request(PATTERN, scale=0.5, **starts), "eager")


@pytest.mark.parametrize(("backend", "is_empty"), CHECKED)
def test_the_operators_pass_opcheck(backend, is_empty):
    *options, seed, padding, query_start, inverse = CALLS[backend]
    seed = None if seed is None else seed.to(DEVICE)
    q, k, v = qkv(rows=LENGTH if query_start is None else 5)
    if is_empty:
        q, k, v, padding = q[:0], k[:0], v[:0], None if padding is None else padding[:0]
    request = Request(PATTERN, *options, seed, padding, query_start, inverse)
    check_operators([x.detach().requires_grad_() for x in (q, k, v)], request, backend)


def check_operators(leaves, request, backend):
    arguments = *leaves, *[None] * (6 - len(leaves)), *operators._arguments(request), backend
    torch.library.opcheck(torch.ops.hilbert_lib.attention, arguments)
    with torch.no_grad():
        out, lse = torch.ops.hilbert_lib.attention(*arguments)
    saved = [x if x is None else x.detach() for x in (torch.randn_like(out), *arguments[:6], out)]
    saved += [lse, torch.randn_like(lse)]
    torch.library.opcheck(torch.ops.hilbert_lib.attention_backward, (*saved, *arguments[6:]))


@pytest.mark.parametrize("option", ["dropout", "grid"])
@pytest.mark.parametrize(("backend", "is_compiled"), [("auto", True), *((b, False) for b in BACKENDS[4:])])
def test_activation_checkpointing_recomputes_the_same_bits(backend, is_compiled, option):
    if is_compiled and WITHOUT_INTERNALS:
        pytest.skip("what runs below autograd is in inference mode, which torch refuses in a compiled checkpoint")
    attend, tensors = attention(backend, option), qkv()

    def block(q, k, v):
        return checkpoint(attend, q, k, v, use_reentrant=False)

    if not is_compiled:
        assert all(map(torch.equal, results(block, tensors), results(attend, tensors)))
    # On CUDA torch gives a compiled graph that recomputes generators of its own: other bits than an eager call's. But
    # they are those of the forward: what is linear in v is its product with the gradient that belongs to it.
    recomputed = torch.compile(block, fullgraph=True, backend="aot_eager") if is_compiled else block
    for _ in range(3):
        total = recomputed(*tensors)[0].tril().sum()
        (dv,) = torch.autograd.grad(total, tensors[2])
        torch.testing.assert_close((dv * tensors[2]).sum(), total)


CASTS = [*((b, "causal", b in ("sdpa", "triton")) for b in BACKENDS)]
CASTS += [("auto", "grid", True), *((b, "grid", False) for b in BACKENDS[4:])]


@pytest.mark.parametrize(("backend", "option", "is_compiled"), CASTS)
def test_autocast_casts_before_the_operator_and_nothing_inside(backend, option, is_compiled):
    attend, tensors = attention(backend, option), qkv(head_dim=8)  # rows of 16 bytes, as torch's kernels ask for

    def block(q, k, v):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return attend(q, k.to(torch.bfloat16), v)  # what has the dtype already stays

    def cast(q, k, v):
        return attend(*(x.to(torch.bfloat16) for x in (q, k, v)))

    under_autocast = torch.compile(block, fullgraph=True, backend="aot_eager") if is_compiled else block
    got = results(under_autocast, tensors)
    assert got[0].dtype == torch.bfloat16
    assert all(map(torch.equal, got, results(cast, tensors)))


@pytest.mark.parametrize(
    ("backend", "option"), [*((b, "plain") for b in BACKENDS), *((b, "grid") for b in BACKENDS[4:])]
)
def test_tensors_that_kernels_cannot_load_are_copied_inside(backend, option):
    def strided(q, k, v):  # the last stride of all three, and of dout, is not 1
        out, lse = attention(backend, option)(*(x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)))
        return out.transpose(1, 3).contiguous().transpose(1, 3), lse

    tensors = qkv()
    compiled = torch.compile(strided, fullgraph=True, backend="aot_eager")
    expected = results(attention(backend, option), tensors)
    for call in (strided, compiled):
        torch.testing.assert_close(results(call, tensors), expected)


@pytest.mark.parametrize("option", ["plain", "grid"])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS[4:]])
def test_what_is_not_implemented_raises(backend, option):
    tensors = qkv()
    attend = partial(attention(backend, option), return_lse=False)
    (dq,) = torch.autograd.grad(attend(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dq.sum().backward()
    with pytest.raises(RuntimeError, match="has no rule for torch"):
        torch.func.vmap(attend)(*(x.detach()[None] for x in tensors))
    # Without its private names torch is not asked whether torch.func runs: then it refuses in words of its own.
    by_us, by_torch = r"no rule for torch\.func's grad", "no rule for forward-mode|must override the setup_context"
    refusal = by_torch if WITHOUT_INTERNALS else by_us
    with pytest.raises(RuntimeError, match=refusal):
        torch.func.jvp(attend, tuple(tensors), tuple(tensors))
    with pytest.raises(RuntimeError, match=refusal):
        torch.func.grad(lambda *x: attend(*x).sum())(*tensors)
    q, *others = (x.detach() for x in tensors)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="_attention has no rule for forward-mode"),
    ):
        attend(torch.autograd.forward_ad.make_dual(q, q), *others)


class Labelled(torch.Tensor):
    """A subclass that changes nothing."""


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


PROFILE = partial(torch.autograd.profiler.profile, use_device=None)
ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
UNWATCHED = {
    "nothing": nullcontext,
    "no gradient": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": partial(torch.autocast, DEVICE, torch.bfloat16),
    "below autograd": torch._C._AutoDispatchBelowAutograd,
}
WATCHED = {
    "a dispatch mode": Dispatch,
    "a function mode": Function,
    "a profiler": PROFILE,
    "a profiler of all threads": partial(PROFILE, experimental_config=ALL_THREADS),
    "dual numbers": torch.autograd.forward_ad.dual_level,
    "a subclass": nullcontext,
    "fake tensors": partial(FakeTensorMode, allow_non_fake_inputs=True),
    "meta tensors": nullcontext,
}


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="without private names every call goes through torch's dispatcher")
@pytest.mark.parametrize("is_grid", [False, True])
@pytest.mark.parametrize("name", [*UNWATCHED, *WATCHED])
def test_torchs_dispatcher_is_left_out_where_nobody_watches(monkeypatch, name, is_grid):
    backends, ways = backends_for(HeadNeighbourhoods if is_grid else PATTERN), []

    def noting(run):
        def noted(*args, **options):
            ways.append(any(frame.filename.endswith("_ops.py") for frame in traceback.extract_stack()))
            return run(*args, **options)

        return noted

    def functions(device, original=backends["eager"].functions):
        return [noting(run) for run in original(device)]

    attend, tensors = attention("eager", "grid" if is_grid else "causal"), qkv()
    expected = results(attend, tensors)
    monkeypatch.setitem(backends, "eager", replace(backends["eager"], functions=functions))
    known_calls.forget()
    with (UNWATCHED | WATCHED)[name]():
        if name in ("fake tensors", "meta tensors"):
            device = "meta" if name == "meta tensors" else DEVICE
            options = {"key_padding_mask": None, "ordering": None} if is_grid else {}
            attend(*(torch.empty(x.shape, device=device) for x in tensors), **options)
            assert not ways, "what has no data has nothing to run"
            return
        own = [x.as_subclass(Labelled) for x in tensors] if name == "a subclass" else tensors
        out, lse = attend(*own)
        assert out.requires_grad == (name not in ("no gradient", "inference", "below autograd"))
        found = [out, lse]
        if out.requires_grad:
            found += torch.autograd.grad(loss_of(out, lse), tensors)
    backward = [name in WATCHED] * out.requires_grad
    assert ways == [name in WATCHED, *backward]
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if name == "autocast" else {"rtol": 0, "atol": 0}
    for x, y in zip(found, expected, strict=False):
        torch.testing.assert_close(torch.Tensor(x.detach()).to(y.dtype), y.detach(), **tolerance)


def test_a_backward_gets_no_gradient_of_lse_to_be_filled_with_zeros(monkeypatch):
    original, given = Differentiable.backward, []
    spied = staticmethod(lambda ctx, dout, dlse: given.append(dlse) or original(ctx, dout, dlse))
    monkeypatch.setattr(Differentiable, "backward", spied)
    tensors = qkv()
    dilated_attention(*tensors, PATTERN, backend="eager", return_lse=True)[0].sum().backward()
    assert given == [None]


def test_an_exported_call_serves_other_lengths():
    module, tensors = DilatedAttention(PATTERN), [x.detach() for x in qkv()]
    length = {1: torch.export.Dim("length", min=2)}
    exported = torch.export.export(module, tuple(tensors), dynamic_shapes={"q": length, "k": length, "v": length})
    shorter = [x[:, :7] for x in tensors]
    assert torch.equal(exported.module()(*shorter), module(*shorter))


class AsAotinductorCalls(TorchDispatchMode):
    """Operators get None for an empty list, as a program of AOTInductor calls them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hilbert_lib":
            args = [None if isinstance(x, list | tuple) and not x else x for x in args]
        return func(*args, **(kwargs or {}))


def test_a_list_of_an_operator_may_be_missing():
    image, text = torch.randn(1, 16, 2, 4), torch.randn(1, 3, 2, 4)  # all pairs, with the text, have no numbers
    attend = partial(neighbourhood_attention, neighbourhood=Neighbourhood((4, 4), 3), extra_k=text, extra_v=text)
    expected = attend(image, image, image, extra_q=text)
    with torch.no_grad(), AsAotinductorCalls():
        torch.testing.assert_close(attend(image, image, image, extra_q=text), expected, rtol=0, atol=0)


TRACED = [(mode, "plain", 7) for mode in ("real", "fake", "symbolic")]
TRACED += [(mode, "ordering", LENGTH) for mode in ("real", "symbolic")]


@pytest.mark.parametrize(("mode", "option", "length"), TRACED)
def test_make_fx_traces_a_call_as_one_operator(mode, option, length):
    call = partial(dilated_attention, pattern=PATTERN, backend="eager", **OPTIONS[option])
    traced = make_fx(call, tracing_mode=mode)(*(x.detach() for x in qkv()))
    assert [node.target for node in traced.graph.nodes].count(torch.ops.hilbert_lib.attention.default) == 1
    if (mode, option) != ("symbolic", "ordering"):  # then an ordering's table has no values
        others = [x.detach() for x in qkv(rows=length, keys=length)]
        assert torch.equal(traced(*others), call(*others))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("kind", ["function", "ordering", "module", "multihead", "explain", "ring", "grid"])
def test_torch_jit_trace_is_refused_by_its_name(kind, tmp_path):
    x = torch.randn(1, LENGTH, 2, 4)
    by_length = partial(Ordering.from_curve, "hilbert")
    grid = {"neighbourhood": Neighbourhood((3, 4), 3), "ordering": Ordering.linear(LENGTH)}
    calls = {
        "function": lambda a: dilated_attention(a, a, a, PATTERN),
        "ordering": lambda a: dilated_attention(a, a, a, PATTERN, kv_ordering=HILBERT),
        "module": lambda a: DilatedAttention(PATTERN, kv_ordering=by_length)(a, a, a),
        "multihead": lambda a: MultiheadDilatedAttention(8, 2, PATTERN, batch_first=True)(a.flatten(2))[0],
        "explain": lambda a: explain_backend(a, a, a, PATTERN),
        "ring": lambda a: ring_dilated_attention(a, a, a, PATTERN, kv_ordering=OrderingSpec("hilbert")),
        "grid": lambda a: neighbourhood_attention(a, a, a, **grid),
    }
    if kind == "ring":
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with torch.no_grad(), pytest.raises(TypeError, match=r"not traced by torch\.jit\.trace"):
            torch.jit.trace(calls[kind], (x,), check_trace=False)
    finally:
        if kind == "ring":
            torch.distributed.destroy_process_group()


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="what tells torch.compile of constants without loading it is private")
def test_a_call_imports_neither_torchs_compiler_nor_triton():
    script = """
import sys, torch
from hilbert_lib import DilatedPattern, dilated_attention
q = torch.ones(1, 4, 1, 2, requires_grad=True)
dilated_attention(q, q, q, DilatedPattern((4,), (1,))).sum().backward()
print([name for name in ("torch._dynamo", "triton") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["causal", "dropout", "ordering", "grid"])
def test_a_cuda_graph_replays_forward_and_backward(option):
    attend, tensors = attention("triton", option), qkv(dtype=torch.bfloat16, head_dim=64)

    def call():
        out, lse = attend(*tensors)
        return out, lse, *torch.autograd.grad(loss_of(out, lse), tensors)

    graph, replayed = captured(call)
    for value in (2.0, -1.0):
        with torch.no_grad():
            tensors[2].fill_(value)
        torch.manual_seed(3)
        graph.replay()
        assert all(map(torch.equal, replayed, results(attend, tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend", [pytest.param("hopper", marks=needs_hopper), "triton", "cudnn", "flash", "sdpa", "auto"]
)
def test_inductor_serves_the_kernels_of_cuda(backend):
    attend, tensors = attention(backend, "causal"), qkv(dtype=torch.bfloat16, head_dim=64)
    compiled = torch.compile(attend, fullgraph=True)
    found, wanted = results(compiled, tensors), results(attend, tensors)
    if backend == "auto":  # which takes another backend for a short call that is not compiled
        # Rows without keys have lse -inf.
        finite = ([x.nan_to_num(neginf=-99.0) for x in some] for some in (found, wanted))
        assert max(norms(*finite)) < 2e-2
    else:
        torch.testing.assert_close(found, wanted)
