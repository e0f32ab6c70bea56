"""Models of diffusers, of a few thousand random weights: their own processors with a mask of pairs are the truth."""

import oracle
import pytest
import torch
from torch.nn import functional

from hilbert_lib import Neighbourhood
from hilbert_lib.adapters.diffusers import DecoderAttnProcessor, WindowAttnProcessor, set_windows

pytestmark = pytest.mark.clients

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
BATCH, WORDS = 2, 7


def flux():
    """A picture of 5 x 6 tokens after 7 words, through one double and one single block."""
    import diffusers

    options = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 4, 4)}
    model = diffusers.FluxTransformer2DModel(**HEADS, **options, joint_attention_dim=8, pooled_projection_dim=8)
    places = torch.meshgrid(torch.zeros(1), torch.arange(5.0), torch.arange(6.0), indexing="ij")
    inputs = {"hidden_states": torch.randn(BATCH, 30, 4), "encoder_hidden_states": torch.randn(BATCH, WORDS, 8)}
    inputs |= {"pooled_projections": torch.randn(BATCH, 8), "txt_ids": torch.zeros(WORDS, 3)}
    return model, inputs | {"img_ids": torch.stack(places, -1).view(-1, 3)}


def cogvideox():
    """A video of 3 x 4 x 4 tokens after 7 words."""
    import diffusers

    options = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 8, "num_layers": 2}
    options |= {"sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": WORDS}
    model = diffusers.CogVideoXTransformer3DModel(**HEADS | {"attention_head_dim": 16}, **options)
    return model, {
        "hidden_states": torch.randn(BATCH, 3, 4, 8, 8),
        "encoder_hidden_states": torch.randn(BATCH, WORDS, 8),
    }


def hunyuan():
    """A video of 3 x 4 x 5 tokens before 7 words, of which one text has 4."""
    import diffusers

    options = {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    options |= {"patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16, "pooled_projection_dim": 8}
    model = diffusers.HunyuanVideoTransformer3DModel(**HEADS, **options, rope_axes_dim=(4, 4, 4))
    inputs = {"hidden_states": torch.randn(BATCH, 4, 3, 4, 5), "encoder_hidden_states": torch.randn(BATCH, WORDS, 16)}
    inputs |= {"pooled_projections": torch.randn(BATCH, 8), "guidance": torch.ones(BATCH)}
    return model, inputs | {"encoder_attention_mask": torch.arange(WORDS) < torch.tensor([[7], [4]])}


def wan():
    """A video of 3 x 4 x 4 tokens, with text in a cross-attention of its own."""
    import diffusers

    options = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16}
    model = diffusers.WanTransformer3DModel(**HEADS, **options, ffn_dim=32, num_layers=2, rope_max_seq_len=32)
    inputs = {"hidden_states": torch.randn(BATCH, 4, 3, 8, 8), "encoder_hidden_states": torch.randn(BATCH, WORDS, 16)}
    return model, inputs


# A model, where its words lie, and the windows of its two layers.
NEAR = {
    "flux": (Neighbourhood((5, 6), 3), Neighbourhood((5, 6), (3, 5), dilation=(1, 1), edge="clip")),
    "cogvideox": (Neighbourhood((3, 4, 4), 3), Neighbourhood((3, 4, 4), (1, 3, 3))),
    "hunyuan": (Neighbourhood((3, 4, 5), 3), Neighbourhood((3, 4, 5), (2, 2, 3), is_causal=(True, False, False))),
    "wan": (Neighbourhood((3, 4, 4), 3), Neighbourhood((3, 4, 4), (1, 3, 3))),
}
MODELS = {
    "flux": (flux, "first", ("transformer_blocks.*", "single_transformer_blocks.0.attn")),
    "cogvideox": (cogvideox, "first", ("transformer_blocks.0.attn1", "*")),
    "hunyuan": (hunyuan, "last", ("transformer_blocks.*", "single_transformer_blocks.*")),
    "wan": (wan, "none", ("blocks.0.attn1", "blocks.*.attn1")),
}


def masked_attention(places, nears):
    """`scaled_dot_product_attention` that hides pairs outside of the windows of one layer after the other."""
    dense, waiting = functional.scaled_dot_product_attention, list(nears)

    def attend(query, key, value, attn_mask=None, **options):
        near, tokens = waiting[0] if waiting else None, query.shape[2]
        if near is None or tokens != key.shape[2] or tokens < near.length:
            return dense(query, key, value, attn_mask=attn_mask, **options)
        waiting.pop(0)
        words = tokens - near.length
        first = words if places == "first" else 0
        cells = slice(first, first + near.length)
        sees = torch.ones(tokens, tokens, dtype=torch.bool)
        sees[cells, cells] = oracle.mask_of(near).bool()
        return dense(query, key, value, attn_mask=sees if attn_mask is None else sees & attn_mask, **options)

    return attend


def outputs_and_gradients(model, inputs):
    model.zero_grad()
    out = model(**inputs, timestep=torch.ones(BATCH)).sample
    out.square().mean().backward()
    return out.detach(), [torch.zeros(1) if x.grad is None else x.grad for x in model.parameters()]


def made(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    with torch.no_grad():
        for weight in model.parameters():  # of a size at which attention looks at few tokens
            weight.normal_(std=0.2)
    return model.train(), inputs


@pytest.mark.parametrize("name", MODELS)
def test_a_window_for_each_layer_equals_the_models_own_attention_with_a_mask(name, monkeypatch):
    model, inputs = made(name)
    _, places, layers = MODELS[name]
    dense, _ = outputs_and_gradients(model, inputs)
    with monkeypatch.context() as patched:
        patched.setattr(functional, "scaled_dot_product_attention", masked_attention(places, NEAR[name]))
        expected = outputs_and_gradients(model, inputs)
    assert (expected[0] - dense).abs().max() > 1e-3, "the windows would not be seen"
    assert set_windows(model, dict(zip(layers, NEAR[name], strict=True))) is model
    torch.testing.assert_close(outputs_and_gradients(model, inputs), expected, rtol=1e-4, atol=1e-5)

    whole = dict.fromkeys(layers, Neighbourhood(NEAR[name][0].shape, NEAR[name][0].shape))
    set_windows(model, whole)  # in the place of those before
    torch.testing.assert_close(outputs_and_gradients(model, inputs)[0], dense, rtol=1e-4, atol=1e-5)


def test_layers_that_are_not_named_keep_their_processors_and_compiled_models_their_outputs(compiled_code_is_forgotten):
    model, inputs = made("flux")
    own = model.attn_processors["single_transformer_blocks.0.attn.processor"]
    set_windows(model, {"transformer_blocks.*": Neighbourhood((5, 6), 3)})
    assert model.attn_processors["single_transformer_blocks.0.attn.processor"] is own
    assert isinstance(model.attn_processors["transformer_blocks.0.attn.processor"], WindowAttnProcessor)
    expected = model(**inputs, timestep=torch.ones(BATCH)).sample
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**inputs, timestep=torch.ones(BATCH)).sample, expected)


def test_ltxs_video_decoder_has_its_own_outputs():
    from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoDiffusionDecoderModel

    torch.manual_seed(0)
    options = {"latent_channels": 8, "decoder_head_dim": 16, "decoder_stage_channels": (64, 32, 32, 32, 16)}
    options |= {"decoder_stage_depths": (1,) * 5, "decoder_stage_kernels": ((3, 3, 3),) * 4, "decoder_t_emb_dim": 16}
    options |= {"decoder_upsample_channel_reductions": (2, 1, 1, 2), "decoder_stage5_kernel": (3, 5, 5)}
    decoder = LTX2VideoDiffusionDecoderModel(**options, decoder_upsample_strides=((2, 1, 1),) * 3 + ((1, 2, 2),)).eval()
    latents = torch.randn(1, 8, 2, 4, 5)

    @torch.no_grad()
    def decoded():
        return decoder.decoder(latents, generator=torch.Generator().manual_seed(0))

    expected = decoded()
    decoder.set_attn_processor(DecoderAttnProcessor())
    torch.testing.assert_close(decoded(), expected, rtol=1e-4, atol=1e-5)
    wider = (layer for layer in decoder.modules() if getattr(layer, "kernel_size", None) == (3, 3, 3))
    next(wider).kernel_size = (3, 3, 4)
    assert (decoded() - expected).abs().max() > 1e-3


class Other:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rope=None, ip_states=None):
        return hidden_states


def called(name, windows):
    model, inputs = made(name)
    set_windows(model, windows)
    model(**inputs, timestep=torch.ones(BATCH))


PICTURE, VIDEO = Neighbourhood((5, 6), 3), Neighbourhood((3, 4, 4), 3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: set_windows(torch.nn.Linear(2, 2), {}), "model must be a transformer of diffusers"),
        (lambda: set_windows(made("flux")[0], {"blocks": PICTURE}), "no name before it has matched, got .*blocks"),
        (lambda: set_windows(made("flux")[0], {"*": 3}), "must be a Neighbourhood, got 3"),
        (lambda: set_windows(made("flux")[0], {"*": PICTURE}, text="middle"), "text must be one of first, last, none"),
        (lambda: WindowAttnProcessor(Other(), PICTURE, "first", "auto"), "Other takes .*ip_states"),
        (lambda: called("flux", {"*": Neighbourhood((7, 6), 3)}), r"holds the 37 tokens of a layer and the text"),
        (lambda: called("wan", {"blocks.*.attn1": Neighbourhood((3, 4, 3), 3)}), "holds the 48 tokens of a layer, got"),
        (lambda: called("wan", {"blocks.*.attn2": VIDEO}), "got 0 such calls: name self-attention layers alone"),
    ],
)
def test_what_is_not_served_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
