"""Transforms of torch that have no rule here are refused by a name of ours: of functions, and of modules inside models.

Tensors that are more, or less, than their elements are served or refused likewise.
"""

import io
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from hilbert_lib import (
    DilatedAttention,
    DilatedPattern,
    MultiheadDilatedAttention,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    OrderingSpec,
    PointAttention,
    PointNeighbourhood,
    RingDilatedAttention,
    RingNeighbourhoodAttention,
    curve_index,
    dilated_attention,
    explain_backend,
    gather,
    neighbourhood_attention,
    ring_attend,
    ring_dilated_attention,
    ring_neighbourhood_attention,
    shard,
)
from hilbert_lib.internals import WITHOUT_INTERNALS

PATTERN, NEAR = DilatedPattern((4, 8), (1, 2)), Neighbourhood((2, 4), 2)
HILBERT = Ordering.from_curve("hilbert", 8)
X = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(0))
TOKENS, CELLS = X.flatten(2), X.view(1, 2, 4, 8)
FUNCTIONS = {  # name in errors, the function of one tensor
    "dilated": ("dilated_attention", lambda x: dilated_attention(x, x, x, PATTERN)),
    "stored in an ordering": ("dilated_attention", lambda x: dilated_attention(X, x, x, PATTERN, kv_ordering=HILBERT)),
    "neighbourhood": ("neighbourhood_attention", lambda x: neighbourhood_attention(x, x, x, NEAR)),
    "extra keys": ("neighbourhood_attention", lambda x: neighbourhood_attention(X, X, X, NEAR, extra_k=X, extra_v=x)),
    "extra queries": (
        "neighbourhood_attention( with extra_q)?",
        lambda x: neighbourhood_attention(X, X, X, NEAR, extra_q=x)[1],
    ),
}


class OfOneCloud(PointAttention):
    """A layer whose arguments are tensors, as tracers want them."""

    def forward(self, x):
        return super().forward(x, PointNeighbourhood(torch.arange(8)[:, None], 3))


MODULES = {
    "DilatedAttention": (DilatedAttention(PATTERN), [X, X, X]),
    "MultiheadDilatedAttention": (MultiheadDilatedAttention(8, 2, PATTERN, batch_first=True), [TOKENS]),
    "NeighbourhoodAttention": (NeighbourhoodAttention(8, 2, 2), [CELLS]),
    "OfOneCloud": (OfOneCloud(8, 2), [TOKENS]),
    "RingDilatedAttention": (RingDilatedAttention(PATTERN), [X, X, X]),
    "RingNeighbourhoodAttention": (RingNeighbourhoodAttention(NEAR), [X, X, X]),
}
# Of torch's own: what it traces, scripts, exports, nests and quantises by is deprecated or a prototype.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def with_tangent(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD = {
    "dual numbers": with_tangent,
    "dual numbers without a gradient": torch.no_grad()(with_tangent),
    "gradcheck": lambda f, x: torch.autograd.gradcheck(f, [x.double().requires_grad_()], check_forward_ad=True),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "linearize": torch.func.linearize,
}


MAPPED = [(f, t) for f in FUNCTIONS for t in FORWARD if t != "gradcheck" or f in ("dilated", "neighbourhood")]


@pytest.mark.parametrize(("function", "transform"), MAPPED)
def test_what_differentiates_forward_or_maps_is_refused_by_the_functions_name(function, transform):
    name, attend = FUNCTIONS[function]
    words = f"^{name} has no rule for (torch.func|forward-mode differentiation)"
    if WITHOUT_INTERNALS and (function, transform) == ("extra queries", "jvp"):
        words = "In order to use an autograd.Function with functorch transforms"  # torch's own, of the cells' tensors
    with pytest.raises(RuntimeError, match=words):
        FORWARD[transform](attend, X)


@pytest.mark.parametrize("name", ["DilatedAttention", "MultiheadDilatedAttention", "NeighbourhoodAttention"])
def test_a_tangent_of_a_modules_tokens_or_parameters_is_refused(name):
    module, inputs = MODULES[name]
    with pytest.raises(RuntimeError, match="_attention has no rule for forward-mode"):
        with_tangent(lambda x: module(x, *inputs[1:]), inputs[0])
    if names := dict(module.named_parameters()):
        first = next(iter(names))
        with pytest.raises(RuntimeError, match="_attention has no rule for forward-mode"):
            with_tangent(lambda x: torch.func.functional_call(module, {first: x}, tuple(inputs)), names[first].detach())


def test_tensors_without_a_tangent_are_served_beside_others_that_have_one():
    with forward_ad.dual_level():
        other = forward_ad.make_dual(X, X)
        assert torch.equal(dilated_attention(X, X, X, PATTERN), dilated_attention(X, X, X, PATTERN))
        assert forward_ad.unpack_dual(other * 2).tangent is not None
    assert torch.func.functionalize(FUNCTIONS["stored in an ordering"][1])(X).shape == X.shape


def test_a_floating_mask_that_is_mapped_over_is_refused():
    module, (tokens,) = MODULES["MultiheadDilatedAttention"]
    masked = torch.func.vmap(lambda mask: module(tokens, key_padding_mask=mask)[0])
    by_torch, by_us = (
        r"vmap: .* data-dependent control flow",
        r"MultiheadDilatedAttention has no rule for torch\.func\.vmap",
    )
    with pytest.raises(RuntimeError, match=by_torch if WITHOUT_INTERNALS else by_us):
        masked(torch.zeros(3, 1, 8))


def exported_by_trace(module, inputs):
    torch.onnx.export(module, tuple(inputs), io.BytesIO(), dynamo=False)


TRACERS = {
    "trace": lambda module, inputs: torch.jit.trace(module, tuple(inputs)),
    "ONNX": exported_by_trace,
    "script": lambda module, _: torch.jit.script(module),
    "fx": lambda module, _: torch.fx.symbolic_trace(module),
}


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_to_onnx_by_torch_export_is_refused_by_name(strict, monkeypatch):
    # torch.onnx.export, which needs a package of its own, calls torch.export so, and shows the error's last line.
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    layer, inputs = MODULES["DilatedAttention"]
    with pytest.raises(Exception, match="attention is not exported to ONNX, which has no operator for it"):
        torch.export.export(Model(layer), tuple(inputs), strict=strict)


class Model(torch.nn.Module):
    """A model that has a layer of ours inside."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor):
        return self.layer(*(x * 2 for x in inputs))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_traced_or_scripted_is_refused_with_what_serves(name, tracer, is_inside):
    if WITHOUT_INTERNALS and tracer == "ONNX" and not is_inside:
        pytest.skip("an export to ONNX by torch.jit.trace reaches words of ours before `forward` by a private method")
    module, inputs = MODULES[name]
    is_ours = f"{name} is not|attention is not"
    with pytest.raises(TypeError, match=rf"({is_ours}) (traced|scripted) by torch\.(jit|fx).*use torch\.export"):
        TRACERS[tracer](Model(module) if is_inside and tracer != "fx" else module, inputs)


def test_a_leaf_of_a_tracer_is_one_node():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, NeighbourhoodAttention)

    module, inputs = MODULES["NeighbourhoodAttention"]
    model = torch.nn.Sequential(module)
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(traced(*inputs), module(*inputs))


SCRIPTED = [dilated_attention, neighbourhood_attention, explain_backend, ring_dilated_attention, curve_index]
SCRIPTED += [ring_attend, ring_neighbourhood_attention, shard, gather]


@pytest.mark.parametrize("function", SCRIPTED, ids=lambda each: each.__name__)
def test_a_function_that_is_scripted_is_refused_by_its_name_inside_others_too(function):
    def calling(x):
        return function(x, x, x)

    for scripted in (function, calling):
        with pytest.raises(TypeError, match=rf"{function.__name__} is not scripted by torch\.jit\.script: use torch"):
            torch.jit.script(scripted)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("function", [shard, gather], ids=lambda each: each.__name__)
def test_shards_are_not_traced(function):
    with pytest.raises(TypeError, match=rf"{function.__name__} is not traced by torch\.jit\.trace"):
        torch.jit.trace(function, (X,), check_trace=False)


UNSERVED = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.flatten(0, -2).to_sparse_csr() if x.dim() > 1 else x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "ragged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "oneDNN's": lambda x: x.float().to_mkldnn(),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
}
PADDING, ENDS = torch.zeros(1, 8, dtype=torch.bool), torch.tensor([0, 8], dtype=torch.int32)
LAYER, GRID = (MODULES[name][0] for name in ("MultiheadDilatedAttention", "NeighbourhoodAttention"))
ORDERED = DilatedAttention(PATTERN, kv_ordering=HILBERT)
ARGUMENTS = {  # name in errors, what is given by it
    "q": (lambda x: dilated_attention(x, X, X, PATTERN), X),
    "v": (lambda x: neighbourhood_attention(X, X, x, NEAR), X),
    "k": (lambda x: ORDERED(X, x, x), X),
    "key_padding_mask": (lambda x: dilated_attention(X, X, X, PATTERN, key_padding_mask=x), PADDING),
    "cu_seqlens": (lambda x: dilated_attention(X, X, X, PATTERN, cu_seqlens=x), ENDS),
    "extra_k": (lambda x: neighbourhood_attention(X, X, X, NEAR, extra_k=x, extra_v=X), X),
    "query": (lambda x: LAYER(x), TOKENS.expand(2, 8, 8)),
    "key": (lambda x: LAYER(TOKENS, x, TOKENS), TOKENS),
    "key_padding_mask of a layer": (lambda x: LAYER(TOKENS, key_padding_mask=x), PADDING.float()),
    "x": (lambda x: GRID(x), CELLS),
    "extra": (lambda x: GRID(CELLS, extra=x), TOKENS),
    "key_padding_mask of a grid": (lambda x: GRID(CELLS, key_padding_mask=x), PADDING.view(1, 2, 4)),
    "q of a ring": (lambda x: ring_dilated_attention(x, x, x, PATTERN, kv_ordering=OrderingSpec("hilbert")), X),
    "q of a ring on a grid": (lambda x: ring_neighbourhood_attention(x, x, x, NEAR), X),
    "x of a shard": (shard, X),
    "x that is gathered": (gather, X),
    "x in an ordering": (partial(HILBERT.apply, dim=1), X),
    "coordinates": (lambda x: curve_index("hilbert", x, (2, 4)), torch.tensor([[0, 1], [1, 0]])),
}
SERVED = {("query", "nested"), ("x in an ordering", "sparse"), ("x in an ordering", "quantised")}
OTHERS = {(a, k) for a in ARGUMENTS for k in UNSERVED} - SERVED - {("cu_seqlens", "ragged")}  # of one axis none is made


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("argument", "kind"), sorted(OTHERS))
def test_tensors_of_other_kinds_are_refused_by_the_arguments_name(argument, kind):
    call, value = ARGUMENTS[argument]
    allowed = "must be (a dense|a bool|an int32|float16|an? integer|integers|have)"
    with pytest.raises((TypeError, ValueError), match=f"^{argument.split()[0]} {allowed}"):
        call(UNSERVED[kind](value))


def test_what_has_no_values_gives_what_has_none():
    meta = X.to("meta")
    grid = NeighbourhoodAttention(8, 2, 2, device="meta")
    layer = MultiheadDilatedAttention(8, 2, PATTERN, batch_first=True, device="meta")
    for out in (
        dilated_attention(meta, meta, meta, PATTERN, kv_ordering=HILBERT),
        neighbourhood_attention(meta, meta, meta, NEAR, extra_k=meta, extra_v=meta),
        grid(CELLS.to("meta")),
        layer(TOKENS.to("meta"), key_padding_mask=PADDING.float().to("meta"))[0],
        curve_index("hilbert", torch.zeros(3, 2, dtype=torch.int64, device="meta"), (2, 4)),
    ):
        assert out.is_meta
    with pytest.raises(ValueError, match=r"x must be on the device of the parameters \(cpu\), got meta"):
        GRID(CELLS.to("meta"))
    with pytest.raises(TypeError, match="x must be a tensor with values, got one on the meta device"):
        gather(meta)


@pytest.mark.parametrize("is_extra", [False, True])
def test_under_autocast_a_refusal_names_the_dtypes_that_were_given(is_extra):
    half, double = X.half(), X.double()
    call = partial(dilated_attention, half, double, half, PATTERN)
    if is_extra:
        call = partial(neighbourhood_attention, half, half, half, NEAR, extra_k=half, extra_v=double)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError) as refusal:
        call()
    given = "torch.float16, which autocast makes torch.bfloat16"
    assert str(refusal.value).endswith(
        f"must have the dtype of {'k' if is_extra else 'q'} ({given}), got torch.float64"
    )
