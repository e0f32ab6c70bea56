"""Attention at two resolutions is one softmax over near tokens and means of the other cells, and so is its gradient."""

import itertools
from math import prod

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hilbert_lib import two_resolution_attention
from hilbert_lib.attention import two_resolutions
from hilbert_lib.machine import kernel_mode

# shape, cell, near, heads, kv_heads: sides that the cells divide and others, a near part that is moved inside, cells
# and windows larger than the grid.
CASES = [
    ((12,), (2,), (3,), 2, 1),
    ((8, 8), (4, 2), (1, 3), 4, 2),
    ((7, 9), (2, 3), (3, 1), 2, 2),
    ((5, 6, 4), (2, 2, 3), (1, 1, 1), 2, 1),
    ((6, 6), (2, 2), (9, 1), 1, 1),
    ((3, 3), (5, 5), (1, 1), 1, 1),
]


def drawn(shape, heads=2, kv_heads=2, head_dim=4, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, prod(shape), count, head_dim) for count in (heads, kv_heads, kv_heads))
    return [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def query_by_query(q, k, v, shape, cell, near):
    """The definition: out and lse of each query over a list of its keys, each with the number of its tokens."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    cell_of = [
        tuple(x // size for x, size in zip(place, cell, strict=True)) for place in itertools.product(*map(range, shape))
    ]
    tokens = {name: [n for n, other in enumerate(cell_of) if other == name] for name in cell_of}
    sides = [1 + max(line) for line in zip(*cell_of, strict=True)]
    outs, lses = [], []
    for n, own in enumerate(cell_of):
        starts = [max(0, min(x - w // 2, side - w)) for x, w, side in zip(own, near, sides, strict=True)]
        parts = []
        for name, members in tokens.items():
            is_near = all(a <= x < a + w for a, x, w in zip(starts, name, near, strict=True))
            parts += [[member] for member in members] if is_near else [members]
        keys, values = (torch.stack([x[:, part].mean(1) for part in parts], 1) for x in (k, v))
        keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
        counts = torch.tensor([len(part) for part in parts], dtype=q.dtype)
        scores = torch.einsum("bhd,bnhd->bhn", q[:, n], keys) * scale + counts.log()
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("bhn,bnhd->bhd", scores.softmax(-1), values))
    return torch.stack(outs, 1), torch.stack(lses, 2)


@pytest.mark.parametrize(("shape", "cell", "near", "heads", "kv_heads"), CASES, ids=str)
def test_values_and_gradients_are_those_of_one_softmax_with_counted_means(shape, cell, near, heads, kv_heads):
    inputs = drawn(shape, heads, kv_heads)
    results = two_resolution_attention(*inputs, shape, cell=cell, near=near, return_lse=True)
    expected = query_by_query(*inputs, shape, cell, near)
    torch.testing.assert_close(results, expected, rtol=0, atol=1e-14)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in expected]
    gradients, right = (torch.autograd.grad(found, inputs, weights) for found in (results, expected))
    torch.testing.assert_close(gradients, right, rtol=0, atol=1e-13)


# Rounding of a call (2 units of float32, 1 of others for its output) three times, and that of the means.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_other_dtypes_are_off_by_their_rounding(dtype, tolerance):
    inputs = drawn((6, 7), dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    where = {"shape": (6, 7), "cell": (3, 2), "near": (1, 3)}
    out, (expected, _) = two_resolution_attention(*inputs, **where), query_by_query(*exact, *where.values())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
    gradients, right = (torch.autograd.grad(x.square().sum(), of) for x, of in ((out, inputs), (expected, exact)))
    for gradient, of_exact in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.double(), of_exact, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("backend", ["reference", "eager", *["triton", "lists"] * (kernel_mode() == "interpreted")])
def test_every_backend_of_grids_gives_the_same(backend):
    inputs = drawn((7, 9), 2, 1, head_dim=16, dtype=torch.float32, batch=1)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    where = {"shape": (7, 9), "cell": (4, 4), "near": (1, 1)}
    out, (expected, _) = (
        two_resolution_attention(*inputs, **where, backend=backend),
        query_by_query(*exact, *where.values()),
    )
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    gradients, right = (torch.autograd.grad(x.square().sum(), of) for x, of in ((out, inputs), (expected, exact)))
    for gradient, of_exact in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.double(), of_exact, rtol=0, atol=8e-6)


# bfloat16: three roundings of an output of the order of 1, and of means.
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("shape", [(16, 24), (15, 22)], ids=str)
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(shape, dtype, tolerance):
    rounded = [x.detach().to(dtype) for x in drawn(shape, 4, 2, head_dim=64)]
    inputs, exact = ([x.to(*to).requires_grad_() for x in rounded] for to in (("cuda",), (torch.float64,)))
    out, expected = (two_resolution_attention(*x, shape, cell=4, near=1) for x in (inputs, exact))
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=tolerance)
    gradients, right = (
        torch.autograd.grad(x.double().square().sum(), of) for x, of in ((out, inputs), (expected, exact))
    )
    for gradient, of_exact in zip(gradients, right, strict=True):
        torch.testing.assert_close(gradient.cpu().double(), of_exact, rtol=0, atol=4 * tolerance)


def test_it_is_full_attention_where_nothing_is_averaged_and_where_cells_are_even():
    q, k, v = drawn((4, 6))
    even = [
        x.unflatten(1, (4, 6))[:, ::2, ::3].repeat_interleave(2, 1).repeat_interleave(3, 2).flatten(1, 2)
        for x in (k, v)
    ]
    for keys, values, how in (
        (k, v, {"cell": (2, 3), "near": 3}),  # near covers the grid
        (k, v, {"cell": 1, "near": 1}),  # a mean of one token
        (*even, {"cell": (2, 3), "near": 1}),
    ):
        full = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, keys, values))).transpose(1, 2)
        torch.testing.assert_close(two_resolution_attention(q, keys, values, (4, 6), **how), full, rtol=0, atol=1e-14)


def test_a_large_score_of_a_near_token_leaves_no_trace_of_its_mean():
    q, k, v = (x.detach() for x in drawn((8,), 1, 1, batch=1))
    q[:], k[:, 3] = 10.0, 100.0  # a score of 2,000; of the mean of its cell 500 to 1,000
    out = two_resolution_attention(q, k, v, (8,), cell=4, near=1)
    torch.testing.assert_close(out[:, :4], v[:, 3:4].expand(-1, 4, -1, -1), rtol=0, atol=1e-14)
    assert out.isfinite().all()


def test_a_cell_longer_than_an_axis_adds_no_tokens(monkeypatch):
    called, sizes = two_resolutions.neighbourhood_attention, []

    def watched(q, *rest, **options):
        sizes.append(q.shape[1])
        return called(q, *rest, **options)

    q, k, v = drawn((1, 8))
    expected = query_by_query(q, k, v, (1, 8), (1, 4), (1, 1))
    monkeypatch.setattr(two_resolutions, "neighbourhood_attention", watched)
    for cell in (4, (10**20, 4)):
        results = two_resolution_attention(q, k, v, (1, 8), cell=cell, near=1, return_lse=True)
        torch.testing.assert_close(results, expected, rtol=0, atol=1e-14)
    assert sizes == [8, 2] * 2  # of tokens, then of coarse cells


def test_the_means_in_the_near_part_are_taken_out(monkeypatch):
    q, k, v = drawn((8, 8))
    out = two_resolution_attention(q, k, v, (8, 8), cell=2, near=1)
    monkeypatch.setattr(two_resolutions, "_without", lambda out, lse, *part: (out, lse))
    assert (two_resolution_attention(q, k, v, (8, 8), cell=2, near=1) - out).abs().max() > 1e-2


def test_it_compiles_into_one_graph():
    inputs = drawn((4, 6), dtype=torch.float32)
    how = {"shape": (4, 6), "cell": (2, 3), "near": 1}
    compiled = torch.compile(lambda *x: two_resolution_attention(*x, **how), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), two_resolution_attention(*inputs, **how))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"near": 2}, r"near must be odd along each axis, got \(2, 2\)"),
        ({"cell": 0}, "cell must be an integer of at least 1, got 0"),
        ({"cell": (1, 2, 3)}, "cell must be one value or one for each of 2 axes"),
        ({"shape": (3, 3)}, r"q must be \(batch, 9, heads, head_dim\) for a grid of \(3, 3\)"),
        ({"backend": "sdpa"}, "backend"),
        ({"return_lse": 1}, "return_lse must be True or False, got 1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(changes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        two_resolution_attention(*drawn((4, 6)), **{"shape": (4, 6), "cell": 2, "near": 1} | changes)
