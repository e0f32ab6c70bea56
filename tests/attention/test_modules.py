"""The modules are what they say: nn.MultiheadAttention's place, one function in train and eval, in any layout.

What one is built from and called with is refused by name, value and what is allowed, not where it is used.
"""

import copy
import io
from functools import partial
from inspect import signature

import pytest
import torch
from cases import refusals
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    NeighbourhoodAttention,
    Ordering,
    attend,
    dilated_attention,
    neighbourhood_attention,
)
from hilbert_lib.attention.modules import DilatedAttention, MultiheadDilatedAttention
from hilbert_lib.internals import WITHOUT_INTERNALS

pytestmark = pytest.mark.usefixtures("compiled_code_is_forgotten")
DENSE = DilatedPattern((64,), (1,))  # one segment for every length here: dense attention
DILATED = DilatedPattern((4, 12), (1, 3))
HILBERT = partial(Ordering.from_curve, "hilbert")
EMBED, HEADS, LENGTH = 16, 4, 12


def tokens(*shape: int, dtype=torch.float32, device="cpu") -> torch.Tensor:
    return torch.randn(*shape, EMBED, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def multihead(pattern=DILATED, embed_dim=EMBED, heads=HEADS, **options) -> MultiheadDilatedAttention:
    torch.manual_seed(0)
    return MultiheadDilatedAttention(embed_dim, heads, pattern, **{"batch_first": True, **options})


def grads_of(module: nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.square().sum(), list(module.parameters())))


@pytest.mark.parametrize("bias", [True, False])
def test_first_values_and_state_dicts_are_torchs(bias):
    ours = multihead(bias=bias)
    torch.manual_seed(0)
    torchs = nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=True)
    renamed = {name.replace("in_proj.", "in_proj_"): x for name, x in ours.state_dict().items()}
    assert list(renamed) == list(torchs.state_dict())
    assert all(map(torch.equal, renamed.values(), torchs.state_dict().values()))
    nn.init.normal_(ours.in_proj.weight)
    torchs.load_state_dict(renamed)
    grid = NeighbourhoodAttention(EMBED, HEADS, window=3, bias=bias)
    for loaded, source in ((ours, torchs), (grid, torchs), (grid, ours), (ours, grid)):
        for parameter in loaded.parameters():
            nn.init.constant_(parameter, torch.nan)
        model = nn.ModuleDict({"layer": loaded})  # names with a prefix
        model.load_state_dict({f"layer.{name}": x for name, x in source.state_dict().items()})
        assert all(map(torch.equal, loaded.parameters(), torchs.parameters()))
    wrong = torchs.state_dict() | {"in_proj.weight": torchs.in_proj_weight, "bias_k": torchs.out_proj.weight}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"in_proj_weight", "bias_k"'):
        ours.load_state_dict(wrong)


class Adapted(nn.Module):
    """A layer of an adapter of weights or of a quantiser: bfloat16 weights that it casts tokens to, and an addition."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.base = copy.deepcopy(layer).bfloat16()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)  # packed, and of no use
        self.addition = nn.Linear(layer.in_features, layer.out_features, bias=False)
        nn.init.normal_(self.addition.weight)

    def forward(self, x):
        return self.base(x.bfloat16()).to(x.dtype) + self.addition(x)


def halved(layer: nn.Linear) -> nn.Linear:
    """The layer with a hook: what it computes is halved."""
    layer.register_forward_hook(lambda layer, args, out: out / 2)
    return layer


def elsewhere(layer: nn.Linear) -> nn.Linear:
    """The layer with its weight on another device, and a `forward` that moves it, as offloading has."""
    weight = layer.weight
    layer.weight = nn.Parameter(weight.to("meta"))
    layer.forward = lambda x: nn.functional.linear(x, weight, layer.bias)
    return layer


class Packed(torch.Tensor):
    """A weight of a quantiser, which has no parts."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.split:
            raise NotImplementedError
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function is nn.functional.linear else result


def packed(layer: nn.Linear) -> nn.Linear:
    """The layer with such a weight."""
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed))
    return layer


@pytest.mark.parametrize("change", [Adapted, halved, elsewhere, packed])
def test_what_stands_in_the_place_of_a_projection_is_called(change):
    # Expected: the function between the layers, each called once for each tensor.
    ours, grid = multihead(kv_heads=2), NeighbourhoodAttention(EMBED, HEADS, window=3, kv_heads=2)
    x = tokens(2, LENGTH).requires_grad_()
    for module in (ours, grid):
        module.in_proj, module.out_proj = change(module.in_proj), change(module.out_proj)
    near = Neighbourhood((LENGTH,), 3)
    calls = [
        (ours, DILATED, (x, x, x), ours(x)[0]),
        (ours, DILATED, (x, x.sin(), x * 2), ours(x, x.sin(), x * 2)[0]),
        (grid, near, (x, x, x), grid(x)),
    ]
    for module, pattern, given, out in calls:
        projected = {each: module.in_proj(each).unflatten(-1, (-1, 4)).split((4, 2, 2), 2) for each in given}
        heads = [projected[each][n] for n, each in enumerate(given)]
        expected = module.out_proj(attend(*heads, pattern).flatten(2))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)))


PADDED = torch.arange(LENGTH) >= torch.tensor([[9], [LENGTH]])  # the first sequence ends early
MASKS = {"none": None, "bool": PADDED, "float": torch.zeros(PADDED.shape).masked_fill(PADDED, -torch.inf)}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("inputs", ["batch_first", "seq_first", "three tensors", "unbatched"])
def test_one_branch_without_dilation_is_torchs_multihead_attention(inputs, mask, is_causal):
    options = {"batch_first": inputs != "seq_first"}
    ours, torchs = multihead(DENSE, **options), nn.MultiheadAttention(EMBED, HEADS, **options)
    nn.init.normal_(torchs.in_proj_bias)  # zero at first: a wrong split would not show
    nn.init.normal_(torchs.out_proj.bias)
    ours.load_state_dict(torchs.state_dict())
    x, padding = tokens(2, LENGTH), MASKS[mask]
    if inputs == "seq_first":
        x = x.transpose(0, 1)
    elif inputs == "unbatched":
        x, padding = x[0], None if padding is None else padding[0]
    given = (x, x.sin(), x * 2) if inputs == "three tensors" else (x, x, x)
    attn_mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if is_causal else None
    if attn_mask is not None and mask == "bool":
        attn_mask = attn_mask == -torch.inf  # torch wants masks of one dtype
    options = {"key_padding_mask": padding, "need_weights": False, "attn_mask": attn_mask, "is_causal": is_causal}
    out, weights = ours(*given, **options)
    expected, _ = torchs(*given, **options)
    assert weights is None
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads_of(ours, out), grads_of(torchs, expected), atol=1e-4, rtol=1e-4)


def test_arguments_stand_in_torchs_order():
    ours, torchs = (signature(each.forward).parameters for each in (MultiheadDilatedAttention, nn.MultiheadAttention))
    assert [name for name, each in ours.items() if each.kind != each.KEYWORD_ONLY] == list(torchs)


@pytest.mark.parametrize("pattern", [DILATED, DilatedPattern((4, 12), (1, 2), mixing="head_groups")], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_output_is_the_functions_between_projections(kv_heads, pattern):
    ours, x = multihead(pattern, kv_heads=kv_heads), tokens(2, LENGTH)
    assert ours.in_proj_weight.shape == (EMBED + 2 * EMBED * kv_heads // HEADS, EMBED)
    projected = nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).unflatten(2, (-1, EMBED // HEADS))
    q, k, v = projected.split((HEADS, kv_heads, kv_heads), dim=2)
    expected = ours.out_proj(dilated_attention(q, k, v, pattern, is_causal=True).flatten(2))
    torch.testing.assert_close(ours(x, is_causal=True)[0], expected)


ORDERINGS = {"function": HILBERT, "fixed": Ordering.residue(LENGTH, 3)}


@pytest.mark.parametrize(("backend", "ordering"), [("auto", "function"), ("eager", "fixed"), ("reference", "function")])
def test_output_and_gradients_do_not_depend_on_how_k_and_v_are_stored(backend, ordering):
    x = tokens(2, LENGTH)
    plain, stored = (multihead(backend=backend, kv_ordering=order) for order in (None, ORDERINGS[ordering]))
    out, expected = (module(x, key_padding_mask=PADDED, is_causal=True)[0] for module in (stored, plain))
    assert torch.equal(out, expected)
    assert all(map(torch.equal, grads_of(stored, out), grads_of(plain, expected)))


def test_scale_and_decoding_are_those_of_the_function():
    module = DilatedAttention(DILATED, scale=0.9, kv_ordering=HILBERT)
    q, k, v = tokens(3, 1, LENGTH, 2)
    whole = dilated_attention(q, k, v, DILATED, scale=0.9, is_causal=True)
    assert torch.equal(module(q, k, v, is_causal=True), whole)
    torch.testing.assert_close(module(q[:, 7:8], k, v, is_causal=True, query_start=7), whole[:, 7:8])


@pytest.mark.parametrize("ordering", [None, "function"])
def test_a_sequence_without_tokens_has_an_output_without_rows(ordering):
    order = ORDERINGS.get(ordering)
    q, k, v = tokens(3, 2, 0, HEADS)
    assert DilatedAttention(DILATED, kv_ordering=order)(q, k, v).shape == (2, 0, HEADS, EMBED)
    assert multihead(kv_ordering=order)(tokens(2, 0))[0].shape == (2, 0, EMBED)


def test_train_and_eval_differ_by_dropout_alone():
    x = tokens(2, LENGTH)
    plain, dropped = multihead(), multihead(dropout=0.5)
    assert torch.equal(plain.train()(x)[0], plain.eval()(x)[0])
    assert torch.equal(dropped.eval()(x)[0], plain(x)[0])
    dropped.train()
    torch.manual_seed(5)
    first, second = dropped(x)[0], dropped(x)[0]
    torch.manual_seed(5)
    assert torch.equal(dropped(x)[0], first)
    assert not torch.equal(first, second)


def test_a_saved_and_a_copied_module_give_the_same_output(tmp_path):
    ours, x = multihead(kv_ordering=HILBERT, kv_heads=2).eval(), tokens(2, LENGTH)
    expected = ours(x)[0]
    torch.save(ours, tmp_path / "whole.pt")
    other = multihead(kv_ordering=HILBERT, kv_heads=2)
    nn.init.normal_(other.in_proj_weight)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    for each in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(ours), other):
        assert torch.equal(each(x)[0], expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float64, 1e-5)])
def test_a_module_of_any_precision_returns_it(dtype, tolerance):
    x = tokens(2, LENGTH)
    assert multihead(dtype=dtype)(x.to(dtype))[0].dtype == dtype
    out = multihead().to(dtype)(x.to(dtype))[0]
    torch.testing.assert_close(out, multihead()(x)[0].to(dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # of the tokens: it may differ from the parameters'
def test_autocast_runs_projections_and_attention_in_half_precision(dtype):
    ours, x = multihead(), tokens(2, LENGTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(x.to(dtype))[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), ours(x)[0], atol=2e-2, rtol=0)


def test_the_representation_names_what_was_chosen():
    text = repr(multihead(kv_heads=2, dropout=0.1, backend="eager"))
    for part in ("embed_dim=16", "kv_heads=2", "segment_lengths=(4, 12)", "dropout=0.1", "backend='eager'"):
        assert part in text


COMPILED = [(None, {"is_causal": True}), ("function", {"key_padding_mask": PADDED}), ("fixed", {})]


@pytest.mark.parametrize(("ordering", "options"), COMPILED)
def test_a_compiled_module_is_one_graph_with_the_bits_of_the_eager_one(ordering, options):
    ours = multihead(dropout=0.3, kv_ordering=ORDERINGS.get(ordering))
    compiled, x = torch.compile(ours, fullgraph=True, backend="aot_eager"), tokens(2, LENGTH)
    results = []
    for module in (ours, compiled):
        torch.manual_seed(2)
        out = module(x, **options)[0]
        results.append([out, *grads_of(ours, out)])
    assert all(map(torch.equal, *results))


def test_with_an_ordering_each_length_is_compiled_once():
    programs = CompileCounter()
    ours = DilatedAttention(DILATED, kv_ordering=HILBERT)
    compiled = torch.compile(ours, backend=programs)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length, expected in ((12, 1), (9, 2), (12, 2), (10, 2)):
            q, k, v = tokens(3, 1, length, 2)
            assert torch.equal(compiled(q, k, v), ours(q, k, v))
            assert programs.frame_count == expected
        torch.compiler.reset()
        strict = torch.compile(ours, backend=programs, fullgraph=True)
        for length in (12, 9):
            strict(*tokens(3, 1, length, 2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            strict(*tokens(3, 1, 10, 2))


def encoder_layer(pattern=DILATED, **options) -> nn.TransformerEncoderLayer:
    """torch's own layer with our attention in it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    attention = MultiheadDilatedAttention(EMBED, HEADS, pattern, batch_first=True, **options)
    attention.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = attention
    return layer


def test_torchs_encoder_layer_calls_the_module_in_inference_too():
    # Where it may, torch's layer reads the weights and computes dense attention itself.
    layer, x = encoder_layer(), tokens(2, LENGTH)
    expected = layer(x, src_key_padding_mask=PADDED)
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x, src_key_padding_mask=PADDED), expected)


def test_torchs_encoder_of_dense_layers_gives_the_same_with_ours():
    torch.manual_seed(0)
    dense = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True), 2)
    with pytest.warns(UserWarning, match="enable_nested_tensor is True"):
        ours = nn.TransformerEncoder(encoder_layer(DENSE), 2)
    ours.load_state_dict(dense.state_dict())
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    x = tokens(2, LENGTH)
    out, expected = (encoder(x, mask=causal, src_key_padding_mask=MASKS["float"]) for encoder in (ours, dense))
    torch.testing.assert_close(out[~PADDED], expected[~PADDED])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torchs_leaves_padding_out_in_evaluation():
    # Built of dense layers, it then makes lists of padded sequences, and gives its layers no mask.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True), 2).eval()
    for layer in encoder.layers:
        layer.self_attn = multihead()
    x = tokens(2, LENGTH)
    expected = encoder(x, src_key_padding_mask=PADDED)
    with torch.no_grad():
        out = encoder(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(out[~PADDED], expected[~PADDED])
    assert not out[PADDED].any(), "it was no list"


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="torch's assertion in a program is private")
@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_program_asserts_the_values_of_a_floating_mask(how):
    ours, x, mask = multihead(), tokens(2, LENGTH), MASKS["float"]
    if how == "compile":
        program = torch.compile(ours, backend="aot_eager", fullgraph=True)
    else:
        program = torch.export.export(ours, (x,), {"key_padding_mask": mask}).module()
    torch.testing.assert_close(program(x, key_padding_mask=mask)[0], ours(x, key_padding_mask=mask)[0])
    with pytest.raises(RuntimeError, match="key_padding_mask must be bool, True = no weight, or hold 0 and -inf alone"):
        program(x, key_padding_mask=mask - 1)


def test_parameters_made_on_the_meta_device_are_drawn_as_others_are():
    ours = multihead(device="meta").to_empty(device="cpu")
    for parameter in ours.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    ours.reset_parameters()
    for name, parameter in multihead().named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)


class Turning(nn.Module):
    """Rotary embedding by position, or by row and column; q has a learned factor, and is larger further on."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, q, k, places):
        if isinstance(places, tuple):  # the sides of a grid
            rows, columns = torch.unravel_index(torch.arange(q.shape[1]), places)
            angle = torch.stack([rows, columns], -1)[None, :, None] * 0.7
        else:
            angle = places[..., None, None] * torch.tensor([0.7, 0.2])
        q = q * self.factor * (1 + 0.1 * angle[..., :1]).to(q.dtype)
        q, k = (torch.view_as_complex(x.double().unflatten(-1, (2, 2))) for x in (q, k))
        return tuple(torch.view_as_real(x * (1j * angle).exp()).flatten(-2).to(self.factor.dtype) for x in (q, k))


def whole_ways(module, x, tmp_path, is_compiled=True, **options):
    """What a module gives compiled (where it is), checkpointed, copied, pickled and loaded, each with its gradients."""
    torch.save(module, tmp_path / "whole.pt")
    loaded = copy.deepcopy(module)
    for parameter in loaded.parameters():
        nn.init.constant_(parameter, torch.nan)
    loaded.load_state_dict(module.state_dict(), strict=True)
    copies = [module, copy.deepcopy(module), torch.load(tmp_path / "whole.pt", weights_only=False), loaded]
    calls = [(each, partial(each, **options)) for each in copies]
    if is_compiled:
        calls.append((module, torch.compile(partial(module, **options), fullgraph=True, backend="eager")))
    calls.append((module, lambda x: checkpoint(partial(module, **options), x, use_reentrant=False)))
    for each, call in calls:
        out = call(x)
        yield [out, *grads_of(each, out)]


def test_q_and_k_are_prepared_by_position(tmp_path):
    prepare = Turning().double()
    ours = multihead(prepare=prepare, kv_heads=2, dtype=torch.float64)
    x = tokens(2, LENGTH, dtype=torch.float64)
    q, k, v = ours.in_proj(x).unflatten(-1, (-1, 4)).split((4, 2, 2), 2)
    q, k = prepare(q, k, torch.arange(LENGTH)[None])
    expected = ours.out_proj(dilated_attention(q, k, v, DILATED, is_causal=True).flatten(2))
    exact = [expected, *grads_of(ours, expected)]
    for found in whole_ways(FirstOf(ours), x, tmp_path, is_causal=True):
        torch.testing.assert_close(found, exact)
    swapped = multihead(prepare=prepare, kv_heads=2, dtype=torch.float64, batch_first=False)
    torch.testing.assert_close(swapped(x.transpose(0, 1), is_causal=True)[0].transpose(0, 1), expected)
    torch.testing.assert_close(ours(x[1], is_causal=True)[0], expected[1])
    documents = (x[0, :5], x[0, :0], x[1, :9])
    packed, cu_seqlens = torch.cat(documents)[None], torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    alone = torch.cat([ours(each)[0] for each in documents])
    torch.testing.assert_close(ours(packed, cu_seqlens=cu_seqlens)[0][0], alone)
    with torch.autocast("cpu", torch.bfloat16):
        half = copy.deepcopy(ours).float()(x.float(), is_causal=True)[0]
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, atol=2e-2, rtol=0)


class FirstOf(nn.Module):
    """The first result of a module."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **options):
        return self.module(*args, **options)[0]


@pytest.mark.parametrize("windows", [(3, 2), ((3, 2), 4)], ids=["of all heads", "of each head"])
def test_a_grid_module_has_a_learned_bias_windows_by_head_and_prepared_q_and_k(windows, tmp_path):
    torch.manual_seed(0)
    prepare, prepare_extra = Turning().double(), lambda q, k: (q.sin(), k.cos())
    grid, dilation = (4, 6), (2, 1)
    module = NeighbourhoodAttention(
        EMBED, HEADS, windows, dilation=dilation, kv_heads=2, relative_bias=True, prepare=prepare,
        edge=("shift", "clip"), dtype=torch.float64,
    )  # fmt: skip
    by_head = [Neighbourhood(grid, window, dilation, edge=("shift", "clip")) for window in ((3, 2), (3, 2), 4)]
    near = tuple(by_head[1:]) if windows == ((3, 2), 4) else by_head[0]
    assert module.relative_bias.shape == ((HEADS, 5, 3) if near is by_head[0] else (HEADS, 7, 7))
    assert 0 < module.relative_bias.std() < 0.03
    nn.init.normal_(module.relative_bias)
    x, extra = tokens(2, *grid, dtype=torch.float64), tokens(2, 3, dtype=torch.float64).sin()
    projected = (module.in_proj(rows).unflatten(-1, (-1, 4)).split((4, 2, 2), 2) for rows in (x.flatten(1, 2), extra))
    (q, k, v), (extra_q, extra_k, extra_v) = projected
    q, k = prepare(q, k, grid)
    options = {"bias": module.relative_bias, "backend": "reference"}
    out = module.out_proj(neighbourhood_attention(q, k, v, near, **options).flatten(2)).view_as(x)
    exact = [out, *grads_of(module, out)]
    for found in whole_ways(module, x, tmp_path, is_compiled=windows == (3, 2)):
        torch.testing.assert_close(found, exact)
    box = ((1, 3), (0, 5))
    torch.testing.assert_close(module(x, query_box=box), out[:, 1:3, :5])
    module.prepare_extra = prepare_extra
    extra_q, extra_k = prepare_extra(extra_q, extra_k)
    options |= {"extra_q": extra_q, "extra_k": extra_k, "extra_v": extra_v}
    found = module(x, extra=extra, return_extra=True)
    for one, other in zip(found, neighbourhood_attention(q, k, v, near, **options), strict=True):
        torch.testing.assert_close(one.flatten(1, -2), module.out_proj(other.flatten(2)))
    single = copy.deepcopy(module).float()
    single.prepare_extra = None
    with torch.autocast("cpu", torch.bfloat16):
        half = single(x.float())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), out, atol=5e-2, rtol=0)
    assert single.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r'Missing key.*"relative_bias"'):
        module.load_state_dict(multihead(kv_heads=2).state_dict())


def test_who_makes_all_parameters_elsewhere_is_heeded(monkeypatch):
    # As accelerate's init_empty_weights, and torch's default device.
    with torch.device("meta"):
        assert {parameter.device.type for parameter in multihead().parameters()} == {"meta"}
    register = nn.Module.register_parameter

    def registered(module, name, parameter):
        register(module, name, None if parameter is None else nn.Parameter(parameter.detach().to("meta")))

    monkeypatch.setattr(nn.Module, "register_parameter", registered)
    assert {parameter.device.type for parameter in multihead(norm_eps=1e-5).parameters()} == {"meta"}


def test_parameters_of_a_grid_module_are_drawn_anew():
    module = NeighbourhoodAttention(EMBED, HEADS, (3, 2), relative_bias=True, device="meta").to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    made = NeighbourhoodAttention(EMBED, HEADS, (3, 2), relative_bias=True)
    assert all(map(torch.equal, module.parameters(), made.parameters()))


GROUPS = DilatedPattern((4, 8), (1, 2), mixing="head_groups")
ORDERED = partial(DilatedAttention, DILATED, kv_ordering=HILBERT)


def nested(*rest: int) -> torch.Tensor:
    return torch.nested.nested_tensor([tokens(3, *rest), tokens(4, *rest)])


def called(*tensors, **options):
    return multihead()(*(tensors or (tokens(2, 9),)), **options)


def on_grid(window=3, **options):
    return NeighbourhoodAttention(EMBED, HEADS, window, **options)


WRONG = {
    TypeError: [
        (lambda: multihead(prepare=3), "prepare must be None, or a function or module that returns q and k; got 3"),
        (lambda: multihead(prepare=lambda q, k, at: q)(tokens(2, 9)), "prepare must return q and k, got Tensor"),
        (lambda: multihead(prepare=lambda q, k, at: (q,))(tokens(2, 9)), "prepare must return q and k, got 1 values"),
        (lambda: multihead(prepare=lambda q, k, at: (q, 3))(tokens(2, 9)), "k of prepare must be a tensor, got int"),
        (
            lambda: multihead(prepare=lambda q, k, at: (q, k.half()))(tokens(2, 9)),
            "return k as torch.float32, got .*16",
        ),
        (lambda: on_grid(prepare_extra=3), "prepare_extra must be None, or a function or module .*; got 3"),
        (lambda: on_grid(relative_bias=1), "relative_bias must be True or False, got 1"),
        (lambda: on_grid((3.5, 3), relative_bias=True), r"window\[0\] must be an integer of at least 1, got 3.5"),
        (lambda: multihead(dropout="0.1"), "dropout must be a number, got '0.1'"),
        (lambda: multihead(kv_ordering="hilbert"), "kv_ordering must be None, an Ordering, .* got 'hilbert'"),
        (lambda: multihead(None), "pattern must be a DilatedPattern, got NoneType"),
        (lambda: multihead(batch_first="yes"), "batch_first must be True or False, got 'yes'"),
        (lambda: called(tokens(2, 9).half()), r"query must have the dtype of .* \(torch.float32\), got torch.float16"),
        (lambda: called(value=tokens(2, 9).half()), "value must have the dtype of"),
        (lambda: torch.autocast("cpu", torch.bfloat16)(called)(tokens(2, 9).double()), "query must have the dtype of"),
        (lambda: called(tokens(2, 9), 3), "key must be a tensor, got int"),
        (lambda: multihead(batch_first=False)(nested()), r"query must be a dense \(strided\) tensor, got a nested one"),
        (lambda: called(tokens(2, 4), *[nested()] * 2), r"key must be a dense \(strided\) tensor, got a nested one"),
        (lambda: ORDERED()(*[nested(4)] * 3), r"q must be a dense \(strided\) tensor, got a nested one"),
        (lambda: called(attn_mask="causal", is_causal=True), "attn_mask must be .* got str"),
        (lambda: called(tokens(9), key_padding_mask=[True] * 9), "key_padding_mask must be a tensor or None, got list"),
        (
            lambda: called(key_padding_mask=tokens(2).long()),
            "must be a bool tensor, True = no weight, .* torch.int64",
        ),
        (lambda: ORDERED()(tokens(1, 9, 2), 3, 3), "k must be a tensor"),
        (lambda: DilatedAttention(DILATED, kv_ordering=str)(*tokens(3, 1, 9, 2)), "kv_ordering must be an Ordering"),
    ],
    ValueError: [
        (
            lambda: multihead(prepare=lambda q, k, at: (q[:, 1:], k))(tokens(2, 9)),
            r"return q with shape \(2, 9, 4, 4\)",
        ),
        (lambda: on_grid(relative_bias=True), "window must have one value for each axis where relative_bias .*, got 3"),
        (
            lambda: on_grid(((3, 3), (5,), 7, 1), relative_bias=True),
            r"window must have one value for each of the 2 axes",
        ),
        (lambda: on_grid(((3, 3), 5, 7)), r"window must be one for each of the 4 KV heads, got \(\(3, 3\), 5, 7\)"),
        (
            lambda: on_grid((3, 3))(tokens(2, 64)),
            r"x must be .*, with a grid of 2 axes for window=\(3, 3\); got shape \(2, 64, 16\)",
        ),
        (
            lambda: on_grid(((3, 3), 5, 7, 1))(tokens(2, 4, 4, 4)),
            r"x must be .*, with a grid of 2 axes for window=\(\(3, 3\), 5, 7, 1\); got shape \(2, 4, 4, 4, 16\)",
        ),
        (
            lambda: on_grid(edge=("clip",), stride=(1,), prepare=lambda q, k, at: None)(tokens(2, 4, 4)),
            r"x must be .*, with a grid of 1 axis for stride=\(1,\), edge=\('clip',\); got shape \(2, 4, 4, 16\)",
        ),
        (lambda: on_grid(0), "window must be an integer from 1 to .*, got 0"),
        (
            lambda: on_grid()(tokens(2, 3, 4), extra=tokens(1, 5)),
            r"extra must have the batch of x \(2\), got shape \(1, 5, 16\)",
        ),
        (lambda: on_grid(5, edge=("wrap", "torn")), r"edge\[1\] must be one of shift, clip, wrap; got 'torn'"),
        (lambda: on_grid(3, stride=4), "stride must be at most the window of axis 0, 3; got 4"),
        (lambda: on_grid(backend="flash"), "backend must be one of auto, .* for a Neighbourhood; got 'flash'"),
        (lambda: multihead(dropout=1), r"dropout must be in \[0, 1\), got 1"),
        (lambda: DilatedAttention(DILATED, scale=0), "scale must be finite and above 0, got 0"),
        (lambda: multihead(backend="fast"), "backend must be one of auto, .* got 'fast'"),
        (lambda: multihead(backend="flash")(tokens(1, 9)), "backend='flash' .*needs a CUDA device"),
        (lambda: multihead(embed_dim=0), "embed_dim must be an integer from 1 to 16777216, got 0"),
        (lambda: multihead(heads=3), "num_heads must divide embed_dim 16, got 3"),
        (lambda: multihead(embed_dim=514, heads=2), "embed_dim / num_heads must be at most 256, got 514 / 2 = 257"),
        (lambda: multihead(kv_heads=3), "kv_heads must divide num_heads 4, got 3"),
        (lambda: multihead(GROUPS, kv_heads=1), r"needs at least one KV head a branch \(2\), got 1"),
        (lambda: multihead(device="gpu"), "device must be a device that torch knows, .* got 'gpu'"),
        (lambda: multihead(dtype=torch.int8), "dtype must be one of torch.float16, .* got torch.int8"),
        (lambda: called(tokens(2, 9).to("meta")), r"query must be on the device of the parameters \(cpu\), got meta"),
        (lambda: called(torch.ones(1, 9, 8)), "query must be tokens of size 16 in 2 or 3 dimensions"),
        (lambda: called(tokens(1, 12), *[tokens(1, 9)] * 2), r"key must be .* like query \(1, 12, 16\), got .*9, 16\)"),
        (lambda: called(need_weights=True), "need_weights must be False"),
        (lambda: called(attn_mask=torch.ones(9, 9)), r"attn_mask must be None unless is_causal=True: .* \(9, 9\)"),
        (
            lambda: called(key_padding_mask=-torch.ones(2, 9)),
            "must be bool, True = no weight, or hold .*; got -1.0",
        ),
        (lambda: ORDERED()(*tokens(2, 1, 9, 2), tokens(1, 3, 2)), r"v must have the shape of k \(1, 9, .*\(1, 3, "),
        (lambda: multihead(kv_ordering=HILBERT(12))(tokens(1, 9)), r"must have the length of k \(9\), got 12"),
    ],
}
of_nested_tensors = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
test_a_wrong_argument_is_refused_by_name_and_value = of_nested_tensors(refusals(WRONG))


def test_the_largest_head_dim_is_served():
    assert multihead(embed_dim=256, heads=1)(torch.ones(1, 9, 256))[0].shape == (1, 9, 256)
