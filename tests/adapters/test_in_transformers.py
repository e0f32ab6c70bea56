"""Models of transformers, of a few thousand random weights: their own attention in float64 is the truth."""

import oracle
import pytest
import torch

from hilbert_lib import DilatedPattern
from hilbert_lib.adapters.transformers import register

pytestmark = pytest.mark.clients

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
BOTH = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Qwen3": {**GROUPED, **BOTH, "use_sliding_window": True},
    "Gemma3": {**GROUPED, **BOTH},
    "Cohere2": {"num_key_value_heads": 2, **BOTH},
    "Olmo3": {"num_key_value_heads": 2, **BOTH},
    "GptOss": {**GROUPED, **BOTH, "num_local_experts": 2, "num_experts_per_tok": 1},
    "ModernBert": {"layer_types": BOTH["layer_types"], "local_attention": 6},
    "Llama": {},
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
# Models that are refused: scores under a tanh, and values narrower than keys.
REFUSED = {
    "Gemma2": {**GROUPED, "sliding_window": 6},
    "DeepseekV3": {**LATENT, "first_k_dense_replace": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1},
}
PATTERN = {"segment_lengths": [4, 16], "dilation_rates": [1, 3]}
PROMPT, LENGTHS = 20, (13, 20)
STEPS = 4


def truth_of(name):
    """The implementation that computes in float64: sdpa, which has no sinks, or gpt-oss's own."""
    return "eager" if name == "GptOss" else "sdpa"


def model_of(name, **options):
    import transformers

    config = {"Gemma3": "Gemma3Text"}.get(name, name) + "Config"
    head = "ForMaskedLM" if name == "ModernBert" else "ForCausalLM"
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**(SIZES | (MODELS | REFUSED)[name] | options))
    settings._experts_implementation = "eager"
    model = getattr(transformers, name + head)(settings).double().eval()
    with torch.no_grad():
        for weight in model.parameters():  # of a size at which attention looks at few tokens
            weight.normal_(std=0.5)
    return model


def tokens_and_mask(side="left"):
    tokens = torch.randint(3, 50, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    hidden = slice(PROMPT - LENGTHS[0]) if side == "left" else slice(LENGTHS[0], None)
    mask[0, hidden] = 0
    return tokens, mask


def step(model, implementation, tokens, mask):
    """Logits of tokens that are no padding, and the gradients of all parameters of one training step."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model.train()(tokens, attention_mask=mask).logits
    shown = logits[mask.bool()] if mask is not None and mask.dim() == 2 else logits
    shown.square().mean().backward()
    model.eval()
    return shown.detach(), [weight.grad for weight in model.parameters()]


def generated(model, implementation, tokens, mask, **options):
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False} | options
    options |= {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(tokens, attention_mask=mask, **options)
    return made.sequences[:, tokens.shape[1] :], torch.stack(made.logits, 1)


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama"])
def test_a_step_with_windows_equals_the_models_own_attention(name, padding):
    model, (tokens, mask) = model_of(name), tokens_and_mask(padding)
    mask = mask if padding else None
    expected, gradients = step(model, truth_of(name), tokens, mask)
    logits, ours = step(model, "hilbert_window", tokens, mask)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours, gradients, rtol=1e-8, atol=1e-9)


def test_another_window_is_another_function():
    """The tests above would see a window that is one token too wide, and sinks that are left out."""
    tokens, _ = tokens_and_mask()
    for name in ("Mistral", "GptOss"):
        model = model_of(name)
        expected, _ = step(model, truth_of(name), tokens, None)
        wider = model_of(name, **({"sliding_window": 7} if name == "Mistral" else {}))
        if name == "GptOss":
            for layer in wider.model.layers:
                layer.self_attn.sinks.data.fill_(-1e9)
        logits, _ = step(wider, "hilbert_window", tokens, None)
        assert (logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["Mistral", "Qwen3", "Gemma3", "GptOss"])
def test_generation_with_windows_equals_the_models_own(name, cache):
    model, (tokens, mask) = model_of(name), tokens_and_mask()
    expected, logits = generated(model, truth_of(name), tokens, mask, use_cache=False)
    words, ours = generated(model, "hilbert_window", tokens, mask, cache_implementation=cache)
    assert words.tolist() == expected.tolist()
    torch.testing.assert_close(ours, logits, rtol=1e-8, atol=1e-8)


def dilated_llama(**options):
    model = model_of("Llama", **options)
    model.config.hilbert_pattern = PATTERN
    return model


def test_a_dilated_step_equals_the_models_own_attention_with_a_mask_of_its_pairs():
    model, (tokens, _) = dilated_llama(), tokens_and_mask()
    pattern = DilatedPattern(**PATTERN)
    times = torch.stack(
        [oracle.times_seen(pattern, range(PROMPT), PROMPT, head, 4, is_causal=True) for head in range(4)]
    )
    assert (times == 2).any(), "a key that two branches give counts twice"
    assert (times.sum(-1) > 0).all(), "their softmax of a row without keys is no number"
    expected, gradients = step(model, "sdpa", tokens, times.log()[None].clamp(min=-1e300))
    logits, ours = step(model, "hilbert_dilated", tokens, None)
    torch.testing.assert_close(logits.flatten(), expected.flatten(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[0], gradients[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {}, {"cache_implementation": "static"}, {"num_beams": 3}], ids=str
)
def test_a_padded_batch_with_a_dilated_pattern_is_generated_as_each_sequence_alone(options):
    model, (tokens, mask) = dilated_llama(), tokens_and_mask()
    words, logits = generated(model, "hilbert_dilated", tokens, mask, **options)
    without_cache = {name: value for name, value in options.items() if name == "num_beams"} | {"use_cache": False}
    for b, length in enumerate(LENGTHS):
        alone, expected = generated(model, "hilbert_dilated", tokens[b : b + 1, -length:], None, **without_cache)
        assert words[b].tolist() == alone[0].tolist()
        if "num_beams" not in options:
            torch.testing.assert_close(logits[b], expected[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize(("name", "implementation"), [("Gemma3", "hilbert_window"), ("Llama", "hilbert_dilated")])
def test_chunks_of_a_prompt_and_a_cache_give_the_rows_of_one_call(name, implementation, is_static):
    import transformers

    model, (tokens, mask) = dilated_llama() if name == "Llama" else model_of(name), tokens_and_mask()
    model.set_attn_implementation(implementation)
    cached = {"config": model.config} | ({"max_cache_len": 32} if is_static else {})
    cache = (transformers.StaticCache if is_static else transformers.DynamicCache)(**cached)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        chunks = []
        for rows in (slice(0, 9), slice(9, 12), slice(12, 13), slice(13, 20)):
            options = {"attention_mask": mask[:, : rows.stop], "position_ids": positions[:, rows]}
            chunks.append(model(tokens[:, rows], **options, cache=cache).logits)
    shown = mask.bool()
    torch.testing.assert_close(torch.cat(chunks, 1)[shown], whole[shown], rtol=1e-9, atol=1e-9)


def test_an_exported_model_with_a_dilated_pattern_has_its_outputs():
    model, (tokens, mask) = dilated_llama(), tokens_and_mask()
    model.set_attn_implementation("hilbert_dilated")
    options = {"attention_mask": mask, "use_cache": False}
    program = torch.export.export(model, (tokens,), options, strict=False).module()
    expected = model(tokens, **options).logits
    torch.testing.assert_close(program(tokens, **options).logits, expected, rtol=1e-12, atol=1e-12)


def texts():
    """Eight texts of unequal lengths, padded on the left."""
    generator = torch.Generator().manual_seed(2)
    for length in range(13, 21):
        tokens = torch.randint(3, 50, (20,), generator=generator)
        mask = (torch.arange(20) >= 20 - length).long()
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask.bool(), -100)}


def trained(implementation, folder, **options):
    """Losses of transformers' Trainer, the weights then, and those of the model that it saved."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    model = model_of("Qwen3")
    model.set_attn_implementation(implementation)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=list(texts()))
    trainer.train()
    trainer.save_model(str(folder))
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, list(model.parameters()), list(saved.parameters())


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True, "gradient_accumulation_steps": 2}], ids=str)
def test_the_trainers_losses_and_weights_are_those_of_the_models_own_attention(options, tmp_path):
    losses, weights, _ = trained("sdpa", tmp_path / "theirs", **options)
    own_losses, own_weights, own_saved = trained("hilbert_window", tmp_path / "ours", **options)
    assert len(losses) == STEPS
    assert losses[0] != losses[-1]
    assert own_losses == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(own_weights, weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own_saved, own_weights, rtol=0, atol=0)


def test_the_pattern_is_kept_with_the_model(tmp_path):
    import transformers

    tokens, _ = tokens_and_mask()
    model = dilated_llama()
    model.set_attn_implementation("hilbert_dilated")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="hilbert_dilated")
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_a_bidirectional_model_with_a_dilated_pattern_sees_no_padding():
    model, (tokens, mask) = model_of("ModernBert", layer_types=["full_attention"] * 2), tokens_and_mask("right")
    model.config.hilbert_pattern = PATTERN
    model.set_attn_implementation("hilbert_dilated")
    together = model(tokens, attention_mask=mask).logits
    alone = model(tokens[:1, : LENGTHS[0]]).logits
    torch.testing.assert_close(together[0, : LENGTHS[0]], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "implementation"), [("Qwen3", "hilbert_window"), ("Llama", "hilbert_dilated")])
def test_a_model_is_one_graph(name, implementation, compiled_code_is_forgotten):
    model = dilated_llama() if name == "Llama" else model_of(name)
    model.set_attn_implementation(implementation)
    tokens, mask = tokens_and_mask()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(compiled(tokens, attention_mask=mask, use_cache=False).logits, expected)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"needs an attention_mask \(batch, tokens\) under torch\.compile"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens, use_cache=False)


HOLE = torch.tensor([[1, 0, 1] + [1] * 17] * 2)
PACKED = {"position_ids": torch.arange(10).repeat(2)[None].expand(2, -1)}


@pytest.mark.parametrize(
    ("name", "implementation", "call", "says"),
    [
        ("Mistral", "hilbert_window", {"attention_mask": torch.zeros(2, 1, 20, 20)}, "attention_mask must be left out"),
        ("Mistral", "hilbert_window", PACKED, "makes another: of packed documents"),
        ("Llama", "hilbert_dilated", PACKED, "makes another: of packed documents"),
        ("Mistral", "hilbert_dilated", {}, "got one with a sliding window .of 6."),
        ("Llama", "hilbert_dilated", {"attention_mask": HOLE}, "got a hidden token between two others"),
        ("Gemma2", "hilbert_window", {}, "does not serve softcap, got 50.0"),
        ("DeepseekV3", "hilbert_window", {}, "v must have the shape of k"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name, implementation, call, says):
    model, (tokens, _) = dilated_llama() if name == "Llama" else model_of(name), tokens_and_mask()
    model.set_attn_implementation(implementation)
    with pytest.raises((TypeError, ValueError), match=says):
        model(tokens, use_cache=False, **call)


def test_a_cache_that_drops_tokens_is_refused_beside_a_dilated_pattern():
    import transformers

    model, (tokens, _) = dilated_llama(), tokens_and_mask()
    model.set_attn_implementation("hilbert_dilated")
    cache = transformers.DynamicCache(config=model_of("Mistral").config)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="a cache that drops tokens"):
        model(tokens[:, :1], cache=cache)


def test_a_pattern_that_is_missing_and_a_dropout_beside_a_window_are_refused():
    tokens, _ = tokens_and_mask()
    model = model_of("Llama")
    model.set_attn_implementation("hilbert_dilated")
    with pytest.raises(TypeError, match=r"config\.hilbert_pattern must be a dictionary"):
        model(tokens)
    model = model_of("Mistral", attention_dropout=0.1)
    model.set_attn_implementation("hilbert_window")
    with pytest.raises(ValueError, match="attention_dropout must be 0 beside a window"):
        model.train()(tokens)
