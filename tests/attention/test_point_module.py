"""`PointAttention` is `attend` over points between projections, for every cloud, with and without keys of their own."""

from functools import partial

import oracle
import pytest
import torch
from cases import cells, points_of
from test_modules import whole_ways
from torch import nn

from hilbert_lib import NeighbourhoodAttention, PointAttention, PointNeighbourhood, attend

EMBED, HEADS = 16, 4


def layer(**options) -> PointAttention:
    torch.manual_seed(0)
    return PointAttention(EMBED, HEADS, **{"kv_heads": 2, "dtype": torch.float64, **options})


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, EMBED, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projected(module: PointAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return module.in_proj(x).unflatten(-1, (-1, EMBED // HEADS)).split((4, 2, 2), -2)


def grads_of(module: nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out.square().sum(), list(module.parameters())))


@pytest.mark.parametrize("kind", ["odd", "even", "clouds", "keys", "unseen", "alone"])
def test_one_module_serves_clouds_of_every_kind(kind):
    points, module = points_of(kind), layer()
    x, others = tokens(2, points.lists.queries), tokens(2, points.lists.keys, seed=2)
    own = {"keys": others} if points.has_keys else {}
    hidden = torch.rand(2, points.lists.keys, generator=torch.Generator().manual_seed(0)) < 0.3
    q = projected(module, x)[0]
    k, v = projected(module, others if own else x)[1:]
    right, _ = oracle.attention(q, k, v, points, key_padding_mask=hidden)
    expected = module.out_proj(right.flatten(2))
    out = module(x, points, **own, key_padding_mask=hidden)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads_of(module, out), grads_of(module, expected), rtol=1e-10, atol=1e-10)
    alone = module(x[1], points, key_padding_mask=hidden[1], **{name: each[1] for name, each in own.items()})
    torch.testing.assert_close(alone, out[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["even", "keys"])
def test_extra_tokens_attend_by_its_projections(kind):
    points, module = points_of(kind), layer(prepare_extra=lambda q, k: (q * 1.5, k.sin()))
    x, others, extra = tokens(2, points.lists.queries), tokens(2, points.lists.keys, seed=2), tokens(2, 3, seed=3)
    own = {"keys": others} if points.has_keys else {}
    q = projected(module, x)[0]
    k, v = projected(module, others if own else x)[1:]
    extra_q, extra_k, extra_v = projected(module, extra)
    named = {"extra_q": extra_q * 1.5, "extra_k": extra_k.sin(), "extra_v": extra_v}
    padding = torch.tensor([[False, True, False], [False, False, False]])
    right = oracle.joint_attention(q, k, v, pattern=points, **named, extra_padding_mask=padding)
    options = {**own, "extra": extra, "extra_padding_mask": padding}
    out, extra_out = module(x, points, **options, return_extra=True)
    torch.testing.assert_close(out, module.out_proj(right[0].flatten(2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(extra_out, module.out_proj(right[2].flatten(2)), rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x, points, **options), out, rtol=0, atol=1e-14)
    alone = module(x[0], points, return_extra=True, **{name: each[0] for name, each in options.items()})
    torch.testing.assert_close(alone, (out[0], extra_out[0]), rtol=0, atol=1e-14)


class Rotary(nn.Module):
    """Rotary embedding of the first axis of the cells; q has a learned factor."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q, k, points):
        return self.turned(q, points.coordinates) * self.factor, self.turned(k, points.key_cells)

    def turned(self, x, cells):
        angle = (cells[:, :1] * torch.tensor([0.7, 0.2], dtype=torch.float64))[None, :, None]
        re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([re * angle.cos() - im * angle.sin(), re * angle.sin() + im * angle.cos()], -1).flatten(-2)


def moved(kind: str, by: int) -> PointNeighbourhood:
    """The same points elsewhere."""
    points = points_of(kind)
    keys = {"keys": points.key_coordinates + by} if points.has_keys else {}
    return PointNeighbourhood(points.coordinates + by, points.window, **keys)


@pytest.mark.parametrize("kind", ["even", "keys"])
def test_q_and_k_are_prepared_by_their_cells(kind, tmp_path, compiled_code_is_forgotten):
    module, points = layer(prepare=Rotary()), points_of(kind)
    x, others = tokens(2, points.lists.queries), tokens(2, points.lists.keys, seed=2)
    own = {"keys": others} if points.has_keys else {}
    q = projected(module, x)[0]
    k, v = projected(module, others if own else x)[1:]
    q, k = module.prepare(q, k, points)
    expected = module.out_proj(oracle.attention(q, k, v, points)[0].flatten(2))
    exact = [expected, *grads_of(module, expected)]
    for found in whole_ways(module, x, tmp_path, points=points, **own):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    # Rotary embedding is relative: clouds may lie anywhere.
    torch.testing.assert_close(module(x, moved(kind, -1000), **own), expected, rtol=1e-9, atol=1e-9)
    assert (layer()(x, points, **own) - expected).abs().max() > 1e-2


def test_it_has_the_projections_of_other_modules():
    ours, grid = layer(), NeighbourhoodAttention(EMBED, HEADS, 3, kv_heads=2, dtype=torch.float64)
    ours.load_state_dict(grid.state_dict())
    grid.load_state_dict(ours.state_dict())
    torchs = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64)
    nn.init.normal_(torchs.in_proj_bias)
    dense = layer(kv_heads=None)
    dense.load_state_dict(torchs.state_dict())
    x = tokens(1, 50)
    near = PointNeighbourhood(cells(50), 10**6)  # all see all
    expected, _ = torchs(*[x.transpose(0, 1)] * 3)
    torch.testing.assert_close(dense(x, near), expected.transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["odd", "keys"])
def test_what_stands_in_the_place_of_a_projection_is_called(kind):
    class Halved(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) / 2

    module, points = layer(), points_of(kind)
    x, own = tokens(1, points.lists.queries), {}
    if points.has_keys:
        own = {"keys": tokens(1, points.lists.keys, seed=2)}
    q = projected(module, x)[0] / 2
    k, v = (each / 2 for each in projected(module, own.get("keys", x))[1:])
    expected = module.out_proj(attend(q, k, v, points).flatten(2)) / 2
    module.in_proj, module.out_proj = Halved(module.in_proj), Halved(module.out_proj)
    torch.testing.assert_close(module(x, points, **own), expected, rtol=0, atol=1e-12)


def test_clouds_of_many_sizes_and_none():
    module = layer()
    for count in (0, 1, 2, 70):
        x = tokens(count)
        out = module(x, PointNeighbourhood(cells(count), 3))
        assert out.shape == (count, EMBED)
        out.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        half = layer().float()(tokens(70).float(), PointNeighbourhood(cells(70), 3))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), out, rtol=0, atol=2e-2)


def test_parameters_made_on_the_meta_device_are_drawn_as_others_are():
    module = layer(device="meta").to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    module.reset_parameters()
    assert all(map(torch.equal, module.parameters(), layer().parameters()))
    assert "embed_dim=16, num_heads=4, kv_heads=2" in repr(module)


POINTS, WITH_KEYS, X = points_of("odd"), points_of("keys"), tokens(2, 90)
WRONG = [
    (TypeError, "points must be a PointNeighbourhood, got Tensor", partial(layer(), X, X)),
    (ValueError, r"x must be \(batch, points, embed_dim\) or \(points, emb", partial(layer(), X[..., :4], POINTS)),
    (
        ValueError,
        r"x must .* each of the 90 points, got .* \(2, 80, 16\)",
        partial(layer(), X[:, :80], POINTS),
    ),
    (ValueError, r"x must have a row for each of the 90 points, got .*\(80, 16\)", partial(layer(), X[0, :80], POINTS)),
    (
        ValueError,
        r"keys must have a row for each of the 36 keys of the points, got shape \(2, 90, 16\)",
        partial(layer(), tokens(2, 130), WITH_KEYS, keys=X),
    ),
    (ValueError, "keys must be None where points have no keys, got Tensor", partial(layer(), X, POINTS, keys=X)),
    (ValueError, "keys must be the tokens of the points' keys, got None", partial(layer(), tokens(2, 130), WITH_KEYS)),
    (TypeError, "keys must be a tensor, got list", partial(layer(), tokens(2, 130), WITH_KEYS, keys=[1])),
    (TypeError, "key_padding_mask must be a tensor, got list", partial(layer(), X[0], POINTS, key_padding_mask=[True])),
    (ValueError, "key_padding_mask must be", partial(layer(), X[0], POINTS, key_padding_mask=torch.zeros(2, 90) > 0)),
    (ValueError, "extra must be of 3 axes as x is, with embed_dim 16", partial(layer(), X, POINTS, extra=X[0])),
    (ValueError, "return_extra must be False where extra is None", partial(layer(), X, POINTS, return_extra=True)),
    (ValueError, "kv_heads must divide num_heads 4, got 3", partial(layer, kv_heads=3)),
    (ValueError, "backend must be one of auto, .*eager", partial(layer, backend="sdpa")),
    (TypeError, "attention must be attend, ring_attend or a function", partial(layer, attention="ring")),
    (TypeError, "prepare must be None, or a function or module", partial(layer, prepare=3)),
    (TypeError, "x must have the dtype of the parameters", partial(layer(), X.float(), POINTS)),
    (ValueError, "points have no cache", partial(layer().make_cache, 2, 8)),
]


@pytest.mark.parametrize(("error", "words", "call"), WRONG)
def test_what_is_wrong_is_refused_by_the_arguments_name(error, words, call):
    with pytest.raises(error, match=words):
        call()
