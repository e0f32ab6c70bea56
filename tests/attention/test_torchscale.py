"""Layers of torchscale's LongNet as modules here; `tests/adapters/test_in_torchscale.py` runs their own code."""

import oracle
import pytest
import torch
from cases import refusals
from torch.nn.functional import layer_norm, linear

from hilbert_lib import DilatedPattern, MultiheadDilatedAttention
from hilbert_lib.attention.torchscale import layer_to_torchscale

EMBED, HEADS = 12, 3
THEIRS = {"offsets": "head_block", "padding": "zeros"}
PREFIX = "encoder.layers.1.self_attn."


def weights(*, norm: bool = True, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """A model's, with the names that torchscale gives them."""
    shapes = {f"{name}_proj.{kind}": shape for name in ("q", "k", "v", "out") for kind, shape in KINDS.items()}
    shapes |= {f"inner_attn_ln.{kind}": (EMBED,) for kind in KINDS} if norm else {}
    torch.manual_seed(0)
    layer = {PREFIX + name: torch.randn(shape, dtype=dtype) * 0.5 for name, shape in shapes.items()}
    return {"encoder.layers.11.self_attn.q_proj.weight": torch.zeros(1), "embed.weight": torch.zeros(1)} | layer


KINDS = {"weight": (EMBED, EMBED), "bias": (EMBED,)}


@pytest.mark.parametrize(("norm", "is_causal"), [(True, False), (False, False), (True, True)])
def test_the_module_projects_attends_and_norms_as_the_names_say(norm, is_causal):
    given = weights(norm=norm)
    pattern = DilatedPattern((4, 9), (1, 2), **THEIRS)
    module = MultiheadDilatedAttention.from_torchscale(given, PREFIX, pattern, HEADS, norm_eps=1e-3)
    x = torch.randn(2, 11, EMBED, dtype=torch.float64)

    def projected(name, x):
        return linear(x, given[f"{PREFIX}{name}_proj.weight"], given[f"{PREFIX}{name}_proj.bias"])

    q, k, v = (projected(name, x).unflatten(2, (HEADS, -1)) for name in "qkv")
    attended = oracle.attention(q, k, v, pattern, is_causal=is_causal)[0].flatten(2)
    if norm:
        attended = layer_norm(attended, (EMBED,), *(given[f"{PREFIX}inner_attn_ln.{kind}"] for kind in KINDS), 1e-3)
    torch.testing.assert_close(module(x, is_causal=is_causal)[0], projected("out", attended))


def test_a_layer_trains_is_reset_and_keeps_dtype_and_options():
    pattern = DilatedPattern((4, 9), (1, 2), **THEIRS)
    given = weights(dtype=torch.float32)
    module = MultiheadDilatedAttention.from_torchscale(given, PREFIX, pattern, HEADS, dropout=0.2, backend="eager")
    assert (module.inner_norm.eps, module.attention.dropout, module.attention.backend) == (1e-5, 0.2, "eager")
    module(torch.randn(1, 11, EMBED))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    other = MultiheadDilatedAttention(EMBED, HEADS, pattern, norm_eps=1e-5)
    other.load_state_dict(module.state_dict())
    module.reset_parameters()
    assert torch.equal(module.inner_norm.weight, torch.ones(EMBED))
    assert torch.equal(other.inner_norm.weight, given[f"{PREFIX}inner_attn_ln.weight"])


def taken(changes: dict, prefix: object = PREFIX):
    given = {name: x for name, x in (weights() | changes).items() if x is not None}
    return MultiheadDilatedAttention.from_torchscale(given, prefix, ONE, HEADS)


ONE = DilatedPattern((4,), (1,))
WRONG = {
    ValueError: [
        (lambda: taken({PREFIX + "xpos.scale": torch.ones(2)}), r"self_attn\.xpos\.scale', of XPOS"),
        (lambda: taken({PREFIX + "q_proj.A.weight": torch.ones(2)}), r"q_proj\.A\.weight', of a multiway layer"),
        (lambda: taken({PREFIX + "rel_pos": torch.ones(2)}), "rel_pos', which is not known; served are q_proj.weight"),
        (lambda: taken({PREFIX + "k_proj.bias": None}), r"must have encoder\.layers\.1\.self_attn\.k_proj\.bias"),
        (lambda: taken({PREFIX + "inner_attn_ln.bias": None}), r"must have .*inner_attn_ln\.bias"),
        (lambda: taken({}, "no such layer."), r"must have no such layer\.q_proj\.weight"),
        (lambda: taken({PREFIX + "k_proj.weight": torch.ones(2, 3)}), r"k_proj\.weight'\] must have shape \(12, 12\)"),
        (lambda: MultiheadDilatedAttention(8, 2, ONE, norm_eps=0.0), "norm_eps must be finite and above 0, got 0"),
    ],
    TypeError: [
        (lambda: taken({}, 1), "prefix must be a string such as .*, got 1"),
        (lambda: MultiheadDilatedAttention.from_torchscale([], "", ONE, 2), "state_dict must map names .*, got list"),
    ],
}
test_what_is_not_such_a_layer_is_refused_by_name = refusals(WRONG)


def test_the_names_of_torchscale_are_given_back():
    for norm in (True, False):
        given = {name: x for name, x in weights(norm=norm).items() if name.startswith(PREFIX)}
        module = MultiheadDilatedAttention.from_torchscale(given, PREFIX, ONE, HEADS)
        returned = layer_to_torchscale(module.state_dict(), PREFIX)
        assert returned.keys() == given.keys()
        assert all(torch.equal(returned[name], x) for name, x in given.items())
    for options, says in (({"bias": False}, "bias must be True"), ({"kv_heads": 1}, "kv_heads must be num_heads")):
        with pytest.raises(ValueError, match=says):
            layer_to_torchscale(MultiheadDilatedAttention(EMBED, HEADS, ONE, **options).state_dict(), "")
