"""Layers and models of torchscale's LongNet, against its own code in float64."""

from types import SimpleNamespace

import pytest
import torch

from hilbert_lib import DilatedPattern, MultiheadDilatedAttention
from hilbert_lib.adapters.torchscale import LongNetAttention, replace_attention, to_torchscale

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("torchscale")]

THEIRS = {"offsets": "head_block", "padding": "zeros"}
EMBED, HEADS, WORDS = 32, 4, 40


def layer_of(pattern, **changes):
    from torchscale.component.dilated_attention import DilatedAttention

    options = {"segment_length": pattern.segment_lengths, "dilated_ratio": pattern.dilation_rates}
    options |= {"flash_attention": True, "seq_parallel": False, "multiway": False, "layernorm_eps": 1e-5}
    options |= {"xpos_rel_pos": False, "xpos_scale_base": 512}
    args = SimpleNamespace(**(options | changes))
    return DilatedAttention(args, EMBED, HEADS, self_attention=True, subln=True).double().eval()


def encoder(**changes):
    """Prov-GigaPath's twelve layers and five branches, narrow."""
    from torchscale.architecture.config import EncoderConfig
    from torchscale.model.LongNet import LongNetEncoder

    options = {"encoder_embed_dim": EMBED, "encoder_attention_heads": HEADS, "encoder_ffn_embed_dim": 48}
    options |= {"encoder_layers": 12, "vocab_size": -1, "no_output_layer": True, "flash_attention": True}
    options |= {"segment_length": "[8, 16, 32, 185363, 1048576]", "dilated_ratio": "[1, 2, 4, 8, 16]"}
    torch.manual_seed(0)
    return LongNetEncoder(EncoderConfig(**(options | changes))).double().eval()


def decoder(**changes):
    from torchscale.architecture.config import DecoderConfig
    from torchscale.model.LongNet import LongNetDecoder

    options = {"decoder_embed_dim": EMBED, "decoder_attention_heads": HEADS, "decoder_ffn_embed_dim": 48}
    options |= {"decoder_layers": 2, "vocab_size": WORDS, "flash_attention": True}
    options |= {"segment_length": "[8, 32]", "dilated_ratio": "[1, 4]"}
    torch.manual_seed(0)
    words = torch.nn.Embedding(WORDS, EMBED)
    return LongNetDecoder(DecoderConfig(**(options | changes)), embed_tokens=words).double().eval()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("segment_lengths", "dilation_rates", "length", "equal"),
    [
        ((4, 8, 16), (1, 2, 4), 32, True),
        ((4, 8, 16), (1, 2, 4), 27, True),  # tails
        ((4, 10, 30), (1, 2, 7), 25, True),  # a rate that divides neither, in one segment of all
        ((1024, 5792, 32768, 185363, 2**20), (1, 2, 4, 8, 16), 1029, True),  # Prov-GigaPath's
        ((9,), (2,), 24, False),  # their scatter moves the rows after a segment that is not whole
    ],
)
def test_outputs_of_a_layer_are_those_of_the_package(segment_lengths, dilation_rates, length, equal, is_causal):
    pattern = DilatedPattern(segment_lengths, dilation_rates, **THEIRS)
    theirs = layer_of(pattern)
    names = {f"attn.{name}": x for name, x in theirs.state_dict().items()}
    ours = MultiheadDilatedAttention.from_torchscale(names, "attn.", pattern, HEADS)
    x = torch.randn(2, length, EMBED, dtype=torch.float64)
    difference = (ours(x, is_causal=is_causal)[0] - theirs(x, x, x, is_causal=is_causal)[0]).abs().max().item()
    assert (difference < 1e-12) == equal


def test_a_whole_encoder_has_the_packages_outputs_and_gives_its_weights_back():
    model, other = encoder(), encoder()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    tiles = torch.randn(2, 45, EMBED, dtype=torch.float64)
    expected = model(src_tokens=None, token_embeddings=tiles)["encoder_out"]
    assert replace_attention(model) is model
    assert sum(isinstance(layer, LongNetAttention) for layer in model.modules()) == 12
    out = model(src_tokens=None, token_embeddings=tiles)["encoder_out"]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    returned = to_torchscale(model)
    assert returned.keys() == weights.keys()
    assert all(torch.equal(returned[name], x) for name, x in weights.items())
    out.square().sum().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad, alpha=1e-3)
    other.load_state_dict(to_torchscale(model))
    trained, theirs = (each(src_tokens=None, token_embeddings=tiles)["encoder_out"] for each in (model, other))
    assert (trained - out).abs().max() > 1e-3
    torch.testing.assert_close(theirs, trained, rtol=1e-10, atol=1e-10)


def test_padded_tiles_have_no_weight_unless_as_in_the_package():
    tiles = torch.randn(2, 40, EMBED, dtype=torch.float64)
    padding = torch.arange(40) >= torch.tensor([30, 40])[:, None]
    theirs, ours, as_theirs = encoder(), replace_attention(encoder()), replace_attention(encoder(), key_padding=False)

    def outputs(model, tiles, padding=None):
        return model(src_tokens=None, token_embeddings=tiles, encoder_padding_mask=padding)["encoder_out"]

    expected = outputs(theirs, tiles, padding)
    torch.testing.assert_close(outputs(as_theirs, tiles, padding), expected, rtol=1e-10, atol=1e-10)
    assert (outputs(ours, tiles, padding)[0, :30] - expected[0, :30]).abs().max() > 1e-3
    changed = tiles.masked_fill(padding[..., None], 7.0)
    torch.testing.assert_close(outputs(ours, changed, padding)[0, :30], outputs(ours, tiles, padding)[0, :30])


def test_a_decoder_has_the_packages_outputs_and_decodes_them_token_by_token():
    model, tokens = decoder(), torch.randint(WORDS, (2, 40), generator=torch.Generator().manual_seed(0))
    expected, _ = model(tokens)
    replace_attention(model)
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-10, atol=1e-10)
    state = {"is_first_step": True}
    rows = [model(tokens[:, :20], incremental_state=state)[0]]
    state["is_first_step"] = False
    rows += [model(tokens[:, :end], incremental_state=state)[0] for end in range(21, 41)]
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=1e-10, atol=1e-10)


def test_a_step_that_fails_leaves_the_state_as_it_was(monkeypatch):
    layer = replace_attention(layer_of(DilatedPattern((16,), (1,))))
    x = torch.randn(1, 6, EMBED, dtype=torch.float64)
    expected, _ = layer(x, x, x, is_causal=True)
    state = {}
    arguments = {"incremental_state": state, "is_causal": True}
    prompt, *steps = x.split([4, 1, 1], 1)
    rows = [layer(prompt, prompt, prompt, **arguments)[0]]
    for step in steps:
        with monkeypatch.context() as patched:
            patched.setattr(layer.attention.out_proj, "forward", None)
            with pytest.raises(TypeError):
                layer(step, step, step, **arguments)
        rows.append(layer(step, step, step, **arguments)[0])
    torch.testing.assert_close(torch.cat(rows, 1), expected, rtol=1e-12, atol=1e-12)


def test_a_layer_keeps_what_it_was():
    layer = layer_of(ONE, layernorm_eps=1e-3).float().requires_grad_(False).train()
    layer.dropout = 0.25
    replaced = replace_attention(layer, backend="eager")
    attention = replaced.attention
    assert attention.inner_norm.eps == 1e-3
    assert (attention.attention.dropout, attention.attention.backend) == (0.25, "eager")
    assert attention.attention.pattern == DilatedPattern((4,), (1,), **THEIRS)
    assert attention.training
    assert {(weight.dtype, weight.requires_grad) for weight in replaced.parameters()} == {(torch.float32, False)}
    assert to_torchscale(replaced).keys() == to_torchscale(attention).keys() == layer.state_dict().keys()


ONE = DilatedPattern((4,), (1,))
X = torch.zeros(1, 8, EMBED, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: replace_attention(torch.nn.Linear(2, 2)), "model must have layers of torchscale's DilatedAttention"),
        (lambda: replace_attention(1), "model must be a torch.nn.Module, got int"),
        (lambda: replace_attention(encoder(), key_padding=1), "key_padding must be True or False"),
        (lambda: replace_attention(encoder(xpos_rel_pos=True)), r"layers\.0\.self_attn\.xpos\.scale', of XPOS"),
        (lambda: replace_attention(encoder(multiway=True)), "of a multiway layer"),
        (lambda: replace_attention(layer_of(ONE, seq_parallel=True)), r"args\.seq_parallel of the layer must be False"),
        (lambda: replace_attention(layer_of(ONE))(X, X, X, rel_pos=X), "rel_pos must be None"),
        (lambda: replace_attention(layer_of(ONE))(X, X, X, incremental_state={}), "incremental_state must be None"),
        (lambda: replace_attention(layer_of(ONE))(X, X, X, attn_mask=X), "attn_mask must be None unless"),
    ],
)
def test_what_is_not_served_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
