"""The plain kernels as a GPU compiles them, with every option and over many tiles: equal to the float64 reference.

The interpreter runs them at small sizes in tests/attention/triton/test_triton.py, where most of a tile is masked.
"""

from dataclasses import replace

import pytest
import torch

from hilbert_lib import DilatedPattern, Ordering
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.call import Call

launch = pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
pytestmark = pytest.mark.gpu

DEVICE, LENGTH, PART = "cuda", 900, slice(300, 700)
BRANCHES = {"one pass": ((300, 900), (1, 2)), "several passes": ((150, 900, 300), (1, 96, 2))}
FEW_ROWS = [(64, "bfloat16"), (128, "float16"), (64, "float32")]  # several passes compile several kernels each
ROWS = [*FEW_ROWS, (40, "float16"), (200, "float16"), (256, "bfloat16"), (128, "float32"), (256, "float32")]
CASES = [("one pass", *row) for row in ROWS] + [("several passes", *row) for row in FEW_ROWS]
OPTIONS = {
    "nothing": ("nothing",),
    "padding and dropout": ("padding", "dropout"),
    "an order and causality": ("an order", "causality"),
    "a part of the queries, of everything": ("part", "padding", "dropout", "an order", "causality"),
}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}


def norms(found, expected):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.fixture(autouse=True)
def never_the_warp_specialised(monkeypatch):
    monkeypatch.setattr(launch.hopper, "runs", lambda *_: False)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("branches", "head_dim", "dtype"), CASES)
def test_output_lse_and_gradients_equal_the_reference(branches, head_dim, dtype, options):
    options, dtype = OPTIONS[options], getattr(torch, dtype)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(2, LENGTH, heads, head_dim) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)
    call = Call(DilatedPattern(*BRANCHES[branches]), scale=head_dim**-0.5, is_causal="causality" in options)
    if "padding" in options:
        padding = torch.rand(2, LENGTH, generator=generator, device=DEVICE) < 0.3
        call = replace(call, key_padding_mask=padding)
    if "dropout" in options:
        call = replace(call, dropout_p=0.3, seed=torch.tensor([2**40 + 5], device=DEVICE))
    if "part" in options:
        q, dout = q[:, PART], dout[:, PART]
        call = replace(call, query_start=PART.start)
    exact = [x.double() for x in (q, k, v)]
    expected, expected_lse = reference.forward(*exact, call)
    expected_grads = reference.backward(dout.double(), *exact, expected, expected_lse, call)
    order = Ordering.from_curve("hilbert", LENGTH) if "an order" in options else Ordering.linear(LENGTH)
    if "an order" in options:
        k, v = order.apply(k, dim=1), order.apply(v, dim=1)
        call = replace(call, inverse=order.inverse.int().to(DEVICE))
    out, lse = launch.forward(q, k, v, call)
    dq, dk, dv = launch.backward(dout, q, k, v, out, lse, call)
    reached = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), reached)
    errors = norms((out, dq, order.undo(dk, dim=1), order.undo(dv, dim=1)), (expected, *expected_grads))
    assert max(errors) < TOLERANCE[dtype], errors
    assert (lse - expected_lse)[reached].abs().max() < 2e-5


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize(("head_dim", "dtype"), FEW_ROWS)
@pytest.mark.parametrize("kernels", ["warp-specialised", "plain", "decoding"])
def test_scores_of_ten_thousand_are_exact_to_the_rounding_of_lse(monkeypatch, kernels, head_dim, dtype, branches):
    # Every score is 0, 8,192 or 16,384 or less by as much, which all dtypes hold, and the weights that are not 0 are
    # equal. Gradients, passes and parts of the keys go by lse, which float32 rounds as it does scores of that size.
    if kernels == "warp-specialised":
        monkeypatch.undo()
        if dtype == "float32" or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs 16 bits and compute capability 9.0")
    dtype = getattr(torch, dtype)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(1, LENGTH, heads, head_dim) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in shapes)
    q, k = q * 0, k * 0
    k[..., 0] = torch.randint(0, 3, k.shape[:3], generator=generator, device=DEVICE)
    q, dout = (x[:, -1:] if kernels == "decoding" else x for x in (q, dout))
    start = LENGTH - 1 if kernels == "decoding" else None
    call = Call(DilatedPattern(*BRANCHES[branches]), scale=1.0, is_causal=True, query_start=start)
    rounding = 4e4 * 2**-24
    for level in (8192, -8192):
        q[..., 0] = level
        exact = [x.double() for x in (q, k, v)]
        expected, expected_lse = reference.forward(*exact, call)
        out, lse = launch.forward(q, k, v, call)
        assert norms([out], [expected])[0] < TOLERANCE[dtype] + rounding
        assert (lse - expected_lse).abs().max() < rounding
        if kernels != "decoding":
            # Of dq and dk nothing is asked: equal weights cancel in them but for rounding.
            expected_dv = reference.backward(dout.double(), *exact, expected, expected_lse, call)[2]
            dv = launch.backward(dout, q, k, v, out, lse, call)[2]
            assert norms([dv], [expected_dv])[0] < TOLERANCE[dtype] + rounding
