"""NATTEN's functions and modules, against its own: without CUDA it computes them by FlexAttention, in float32.

FlexAttention has no gradient on a CPU: there the oracle's, in float64, is the truth.
"""

import inspect
import random

import oracle
import pytest
import torch

from hilbert_lib import Neighbourhood
from hilbert_lib.adapters import natten as ours

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def drawn(seed):
    """A grid and rules of one to three axes, with all that a call takes, drawn by a seed."""
    draw = random.Random(seed)
    axes = 1 + seed % 3
    rules = {"kernel_size": [], "stride": [], "dilation": [], "is_causal": []}
    grid = []
    for _ in range(axes):
        size, rate = draw.randint(2, 5 if axes < 3 else 3), draw.randint(1, 3 if axes < 3 else 2)
        rules["kernel_size"].append(size)
        rules["dilation"].append(rate)
        rules["stride"].append(draw.randint(1, size))
        rules["is_causal"].append(draw.random() < 0.3)
        grid.append(size * rate + draw.randint(0, 4))
    rules = {name: tuple(values) for name, values in rules.items()} | {"scale": draw.choice([None, 0.4])}
    heads, kv_heads = draw.choice([(2, 2), (4, 2)])
    sides = {"query": (2, *grid, heads, 8), "key": (2, *grid, kv_heads, 8), "value": (2, *grid, kv_heads, 8)}
    if draw.random() < 0.4:
        sides |= dict.fromkeys(("additional_keys", "additional_values"), (2, 3, kv_heads, 8))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sides.items()}
    return axes, tensors, rules


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_equal_nattens_and_have_the_oracles_gradients(seed):
    import natten

    axes, tensors, rules = drawn(seed)
    function = getattr(ours, f"na{axes}d")
    single = {name: x.float() for name, x in tensors.items()}
    expected = getattr(natten, f"na{axes}d")(**single, **rules, return_lse=True)
    torch.testing.assert_close(function(**single, **rules, return_lse=True), expected, rtol=1e-5, atol=1e-5)

    grid = tensors["query"].shape[1:-2]
    near = Neighbourhood(grid, *(rules[name] for name in ("kernel_size", "dilation", "stride", "is_causal")))
    needing = [x.requires_grad_() for x in tensors.values()]
    rows = [x.flatten(1, axes) for x in needing[:3]]
    extra = dict(zip(("extra_k", "extra_v"), needing[3:], strict=False))
    truth, _ = oracle.attention(*rows, near, scale=rules["scale"], **extra)
    gradients = torch.autograd.grad(truth.square().sum(), needing)
    out = function(**tensors, **rules)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), needing), gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_modules_load_each_others_weights_and_have_equal_outputs(axes):
    import natten

    name, grid = f"NeighborhoodAttention{axes}D", (6, 7, 5)[:axes]
    rules = {"kernel_size": 3, "dilation": 1, "stride": 2, "is_causal": (True, False, False)[:axes], "qk_scale": 0.3}
    theirs, module = (getattr(home, name)(16, 2, **rules) for home in (natten, ours))
    module.load_state_dict(theirs.state_dict())
    x = torch.randn(2, *grid, 16)
    with torch.no_grad():
        torch.testing.assert_close(module(x), theirs(x))
    assert repr(module).startswith(f"{name}(\n  num_heads=2, kernel_size={module.kernel_size}, stride=")
    other = getattr(natten, name)(16, 2, 3)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other.proj.bias, theirs.proj.bias)


def test_every_argument_of_nattens_functions_is_served_or_refused_by_name():
    import natten

    theirs = inspect.signature(natten.na2d).parameters
    served = set(inspect.signature(ours._attention).parameters) - {"axes", "tuning"}
    assert served | set(ours.TUNING) == set(theirs)
    assert {name: theirs[name].default for name in ours.TUNING} == ours.TUNING
    x = torch.ones(1, 6, 6, 2, 8)
    for name in ours.TUNING:
        with pytest.raises(ValueError, match=f"{name} is NATTEN's own and must be left out, got 'no'"):
            ours.na2d(x, x, x, 3, **{name: "no"})
    assert list(inspect.signature(natten.NeighborhoodAttention2D).parameters) == list(
        inspect.signature(ours.NeighborhoodAttention2D).parameters
    )


X = torch.ones(1, 6, 6, 2, 8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ours.na2d(X, X, X, (3, 3, 3)), "kernel_size must be one number or one for each of the 2 axes"),
        (lambda: ours.na2d(X, X, X, 7), r"kernel_size \* dilation must be at most the 6 cells of axis 0, got 7 \* 1"),
        (lambda: ours.na2d(X, X, X, 3, dilation=3), r"at most the 6 cells of axis 0, got 3 \* 3"),
        (lambda: ours.na2d(X, X, X, 3, 4), "stride must be at most the window of axis 0, 3; got 4"),
        (lambda: ours.na3d(X, X, X, 3), r"query must have 6 axes"),
        (lambda: ours.na2d(X, X[:, :5], X, 3), r"key must hold the grid of query \(6, 6\), got \(5, 6\)"),
        (lambda: ours.na2d(X, X, X[..., :4], 3), "v must have"),
        (lambda: ours.na2d(X, X, X, 3, rpb=X), "na2d has no argument 'rpb'"),
        (lambda: ours.NeighborhoodAttention2D(16, 3, 3), "num_heads must divide embed_dim 16, got 3"),
        (lambda: ours.NeighborhoodAttention2D(16, 2, 3, 4), "stride must be at most the window"),
        (lambda: ours.NeighborhoodAttention2D(16, 2, 3)(X), "x must be"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
