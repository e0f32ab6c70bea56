"""Longformer, Swin, DiNAT and vision transformers, of a few thousand random weights: their own code is the truth."""

import copy
import pickle
import sys
from types import SimpleNamespace

import oracle
import pytest
import torch

from hilbert_lib import Neighbourhood
from hilbert_lib.adapters import transformers as ours

pytestmark = pytest.mark.clients

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
NO_DROPPED_PATH = NO_DROPOUT | {"drop_path_rate": 0.0}


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():  # of a size at which attention looks at few tokens
            weight.normal_(std=0.3)
    return model.train()


def longformer(**options):
    """In float32: its own code takes a softmax of masked rows in that type, and has NaN there in float64."""
    import transformers

    sizes = SIZES | {"vocab_size": 50, "max_position_embeddings": 40, "pad_token_id": 1} | NO_DROPOUT
    model = made(
        transformers.LongformerModel, transformers.LongformerConfig(**sizes | options, attention_window=[4, 6])
    )
    tokens = torch.randint(3, 50, (2, 22), generator=torch.Generator().manual_seed(1))  # which it pads to 24
    mask, is_global = torch.ones_like(tokens), torch.zeros_like(tokens)
    mask[0, 17:] = 0
    is_global[0, 0] = is_global[1, 0] = is_global[1, 9] = 1
    return model, {"input_ids": tokens, "attention_mask": mask, "global_attention_mask": is_global}


def longformer_without_global_tokens():
    model, inputs = longformer()
    return model, {name: x for name, x in inputs.items() if name != "global_attention_mask"}


def swin():
    """Windows of 4 x 4 on 10 x 7 cells, padded to 12 x 8, with a shift in every other layer; then on 5 x 4 cells."""
    import transformers

    sizes = {"image_size": (20, 14), "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
    config = transformers.SwinConfig(**sizes, window_size=4, **NO_DROPPED_PATH)
    model = made(transformers.SwinModel, config).double()
    model.set_attn_implementation("sdpa")  # its own eager attention rounds to float32
    return model, {"pixel_values": torch.randn(2, 3, 20, 14, dtype=torch.float64)}


def dinat_module():
    """transformers' module: it imports functions that NATTEN has dropped, unless it finds no NATTEN."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("transformers.utils.is_natten_available", lambda: False)
        from transformers.models.dinat import modeling_dinat
    return modeling_dinat


def dinat():
    """Windows of 3 x 3 on 8 x 6 cells, then on 4 x 3, which it pads to 6 x 6 where the dilation is 2."""
    import transformers

    sizes = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "dilations": [[1, 2], [1, 2]]}
    config = transformers.DinatConfig(**sizes, kernel_size=3, **NO_DROPPED_PATH)
    model = made(dinat_module().DinatModel, config).double()
    return model, {"pixel_values": torch.randn(2, 3, 32, 24, dtype=torch.float64)}


def windows_of(x, kernel_size, dilation):
    """The cells of each window along both axes: (rows, 1, kernel_size, 1) and (1, columns, 1, kernel_size)."""
    # transformers 5.24 takes (batch, rows, columns, heads, head_dim) and swaps rows and columns, where it was heads.
    axes = []
    for cells in x.shape[1:3]:
        seen = oracle.seen_along(cells, kernel_size, dilation, 1, False, "shift")
        axes.append(torch.tensor([sorted(keys) for keys in seen]))
    return axes[0][:, None, :, None], axes[1][None, :, None, :]


def natten2dqkrpb(query, key, rpb, kernel_size, dilation):
    """NATTEN's former function by its definition: scores (batch, heads, rows, columns, kernel_size ** 2)."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    rows, columns = windows_of(query, kernel_size, dilation)
    scores = torch.einsum("bijhd,bijxyhd->bhijxy", query, key[:, rows, columns])
    own_rows, own_columns = (torch.arange(cells) for cells in query.shape[1:3])
    down = (rows - own_rows[:, None, None, None]) // dilation + kernel_size - 1
    right = (columns - own_columns[None, :, None, None]) // dilation + kernel_size - 1
    return (scores + rpb[:, down, right]).flatten(-2)


def natten2dav(weights, value, kernel_size, dilation):
    """NATTEN's former function by its definition: (batch, heads, rows, columns, head_dim)."""
    value = value.transpose(1, 2)
    rows, columns = windows_of(value, kernel_size, dilation)
    weights = weights.unflatten(-1, (kernel_size, kernel_size))
    return torch.einsum("bhijxy,bijxyhd->bhijd", weights, value[:, rows, columns])


@pytest.fixture
def nattens_former_functions(monkeypatch):
    module = dinat_module()
    monkeypatch.setattr(module, "natten2dqkrpb", natten2dqkrpb)
    monkeypatch.setattr(module, "natten2dav", natten2dav)


def step(model, inputs):
    """Outputs, and the gradients of all parameters of one training step."""
    model.zero_grad()
    out = model(**inputs).last_hidden_state
    out.square().mean().backward()
    return out.detach(), [torch.zeros(1) if x.grad is None else x.grad for x in model.parameters()]


MODELS = {
    "Longformer": (longformer, "one_sided_attn_window_size", 1),
    "Longformer, windows alone": (longformer_without_global_tokens, "one_sided_attn_window_size", 1),
    "Swin": (swin, "shift_size", 1),
    "DiNAT": (dinat, "dilation", 2),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("nattens_former_functions")
def test_a_step_equals_the_models_own_attention(name):
    make, rule, other_value = MODELS[name]
    model, inputs = make()
    names, weights = list(model.state_dict()), list(model.parameters())
    expected, gradients = step(model, inputs)
    assert ours.replace_attention(model) is model
    assert list(model.state_dict()) == names
    assert all(x is y for x, y in zip(model.parameters(), weights, strict=True))
    out, own = step(model, inputs)
    precise = {"rtol": 1e-9, "atol": 1e-9} if out.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(out, expected, **precise)
    torch.testing.assert_close(own, gradients, **precise)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(**inputs).last_hidden_state, out, **precise)
        assert [type(layer) for layer in copied.modules()] == [type(layer) for layer in model.modules()]

    next(layer for layer in model.modules() if hasattr(layer, rule)).__dict__[rule] = other_value
    assert (step(model, inputs)[0] - expected).abs().max() > 1e-3, "another window is another function"


def test_dinat_needs_no_natten(monkeypatch):
    module = dinat_module()
    monkeypatch.setitem(sys.modules, "natten", None)
    monkeypatch.setattr(module, "requires_backends", lambda *_: None)
    model, inputs = dinat()
    assert ours.replace_attention(model)(**inputs).last_hidden_state.shape == (2, 4, 3, 32)


def test_layers_that_are_checkpointed_are_computed_again_as_often_as_the_models_own():
    model, inputs = swin()
    expected = step(model, inputs)
    model.activation_checkpointing_enable()
    calls = []
    for name, layer in model.named_modules():
        if name.endswith("layernorm_before"):
            layer.register_forward_hook(lambda *_: calls.append("layer"))
    step(model, inputs)
    own_calls = len(calls)
    assert own_calls > 2 * 3, "checkpoints of stages alone compute each of three layers twice"
    calls.clear()
    out_and_gradients = step(ours.replace_attention(model), inputs)
    assert len(calls) == own_calls
    torch.testing.assert_close(out_and_gradients, expected, rtol=1e-9, atol=1e-9)


def test_a_loop_with_accelerate_has_the_losses_of_the_models_own_attention():
    from accelerate import Accelerator

    def losses(replace):
        model, inputs = longformer()
        if replace:
            ours.replace_attention(model)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(**inputs).last_hidden_state.square().mean()
            accelerator.backward(loss)
            optimizer.step()
            yield loss.item()

    expected, own = list(losses(False)), list(losses(True))
    assert expected[0] - expected[-1] > 1e-2
    assert own == pytest.approx(expected, rel=1e-5)


def test_weights_go_to_the_disk_and_back(tmp_path):
    import transformers

    model, inputs = longformer()
    ours.replace_attention(model).save_pretrained(tmp_path)
    loaded = transformers.LongformerModel.from_pretrained(tmp_path).train()
    expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(loaded(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-6)


VISION = {
    "ViT": (1, {}),
    "Dinov2WithRegisters": (4, {"num_register_tokens": 3, "image_size": 16}),  # square, then interpolated
    "DINOv3ViT": (4, {"num_register_tokens": 3, "pos_embed_rescale": None}),  # which draws while training
}
PATCHES = (4, 6)


def vision(name, window=3):
    """Class and register tokens before 4 x 6 patches."""
    import transformers

    _, options = VISION[name]
    sizes = SIZES | {"image_size": (16, 24), "patch_size": 4} | NO_DROPPED_PATH
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    config.hilbert_neighbourhood = {"shape": list(PATCHES), "window": window}
    ours.register()
    model = made(getattr(transformers, f"{name}Model"), config).double()
    return model, {"pixel_values": torch.randn(2, 3, 16, 24, dtype=torch.float64)}


@pytest.mark.parametrize("name", VISION)
def test_patches_see_a_window_and_all_class_and_register_tokens(name):
    model, inputs = vision(name)
    classes, _ = VISION[name]
    model.set_attn_implementation("sdpa")
    dense, gradients = step(model, inputs)
    model.set_attn_implementation("hilbert_grid")
    windowed, own = step(model, inputs)
    assert (windowed - dense).abs().max() > 1e-3
    if name != "DINOv3ViT":  # which takes no mask
        sees = torch.ones(classes + 24, classes + 24, dtype=torch.bool)
        sees[classes:, classes:] = oracle.mask_of(Neighbourhood(PATCHES, 3)).bool()
        model.set_attn_implementation("sdpa")
        masked, of_masked = step(model, inputs | {"attention_mask": sees[None, None].expand(2, 1, -1, -1)})
        torch.testing.assert_close(windowed, masked, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own, of_masked, rtol=1e-9, atol=1e-9)
    whole, _ = vision(name, window=list(PATCHES))
    whole.set_attn_implementation("hilbert_grid")
    out, own = step(whole, inputs)
    torch.testing.assert_close(out, dense, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own, gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sides", [(4, 6), (5, 5)])  # beside the class token, or with it among the cells
def test_tokens_that_are_padding_are_not_seen(sides):
    model, inputs = vision("ViT")
    model.config.hilbert_neighbourhood = {"shape": sides, "window": sides}
    inputs["attention_mask"] = torch.arange(25) < torch.tensor([[20], [25]])
    inputs["attention_mask"][1, 0] = False
    model.set_attn_implementation("sdpa")
    expected, gradients = step(model, inputs)
    model.set_attn_implementation("hilbert_grid")
    out, own = step(model, inputs)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own, gradients, rtol=1e-9, atol=1e-9)


def test_a_model_with_windows_is_one_graph(compiled_code_is_forgotten):
    model, inputs = swin()
    compiled = torch.compile(ours.replace_attention(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def called(make, config=None, options=None, **changes):
    """Calls a model whose layers are replaced, or that has the implementation for grids, after changes to it."""
    model, inputs = make()
    for name, value in (config or {}).items():
        setattr(model.config, name, value)
    if make in (longformer, swin, dinat):
        ours.replace_attention(model)
    else:
        model.set_attn_implementation("hilbert_grid")
    for layer in model.modules():
        vars(layer).update(
            {name: value for name, value in changes.items() if isinstance(getattr(layer, name, None), float)}
        )
    model(**inputs | (options or {}))


def vit():
    return vision("ViT")


def test_an_image_that_is_refused_leaves_swins_window_as_it_is():
    table, config = SimpleNamespace(window_size=(4, 4)), SimpleNamespace(output_attentions=False)
    attention = SimpleNamespace(attention_dropout=0.0, config=config, relative_position_bias=table)
    layer = SimpleNamespace(training=True, attention=attention, window_size=4)
    layer.set_shift_and_window_size = lambda sides: vars(layer).update(window_size=min(sides))  # as transformers' own
    with pytest.raises(ValueError, match=r"at least the window 4 of the layer, got \(3, 3\)"):
        ours.swin_layer(layer, torch.ones(1, 9, 8), (3, 3))
    assert layer.window_size == 4


def attended_on_grid(queries, keys, registers=0):
    """The output for so many queries and keys, of patches on a grid of 2 x 3."""
    config = SimpleNamespace(hilbert_neighbourhood={"shape": [2, 3], "window": 1}, num_register_tokens=registers)
    q, k = (torch.ones(1, 1, count, 4) for count in (queries, keys))
    return ours.grid_attention(SimpleNamespace(config=config), q, k, k, None)[0]


def test_as_many_tokens_as_class_and_registers_may_be_stand_before_patches():
    for tokens, registers in ((6, 0), (7, 0), (8, 0), (12, 4)):
        assert attended_on_grid(tokens, tokens, registers).shape == (1, tokens, 1, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ours.replace_attention(1), "model must be a torch.nn.Module, got int"),
        (lambda: ours.replace_attention(torch.nn.Linear(2, 2)), "layers of Longformer, Swin or DiNAT .* got Linear"),
        (lambda: called(longformer, options={"output_attentions": True}), "output_attentions must be False, got True"),
        (lambda: called(dinat, options={"output_attentions": True}), "output_attentions must be False, got True"),
        (
            lambda: called(swin, {"_attn_implementation": "eager", "output_attentions": True}),
            "output_attentions must be False, got True",
        ),
        (
            lambda: called(swin, options={"pixel_values": torch.ones(1, 3, 6, 6).double()}),
            r"at least the window 4 of the layer, got \(3, 3\)",
        ),
        (lambda: called(swin, attention_dropout=0.1), "attention_probs_dropout_prob must be 0 while training, got 0.1"),
        (lambda: called(longformer, dropout=0.1), "attention_probs_dropout_prob must be 0 while training, got 0.1"),
        (lambda: called(vit, attention_dropout=0.1), "attention_dropout must be 0 beside a window for 'hilbert_grid'"),
        (
            lambda: called(vit, {"hilbert_neighbourhood": 7}),
            r"config\.hilbert_neighbourhood must be a dictionary .*got 7",
        ),
        (lambda: called(vit, {"hilbert_neighbourhood": {"shape": [6, 6], "window": 3}}), r"got shape \(6, 6\) for 25"),
        (
            lambda: attended_on_grid(9, 9),
            r"shape of the image in patches .* got shape \(2, 3\) for 9 tokens, of which .* 2",
        ),
        (lambda: attended_on_grid(13, 13, registers=4), r"got shape \(2, 3\) for 13 tokens, of which up to 6 may be"),
        (lambda: attended_on_grid(1, 7), "query must have the 7 rows of key for 'hilbert_grid', got 1"),
        (lambda: called(vit, options={"attention_mask": torch.zeros(2, 1, 25, 25)}), "attention_mask must be left out"),
        (lambda: called(vit, options={"output_attentions": True}), "'hilbert_grid' does not serve output_attentions"),
    ],
)
def test_what_is_not_served_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
