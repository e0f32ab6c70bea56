"""A bias by relative position equals the oracle's for every rule, and that of DiNAT and Swin."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from cases import (
    GROUPED_WINDOWS,
    RULES,
    SMALL,
    TOLERANCE,
    assert_close,
    attended,
    bias_sides,
    check_on_grid,
    determinism,
    differentiated,
    every_rule,
    grids,
    refusals,
)
from hypothesis import given, settings
from oracle import attending, bias_of, cells_of_box, mask_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    Union,
    attend,
    attention_weights,
    dilated_attention,
    explain_backend,
    merge_attention,
    neighbourhood_attention,
)
from hilbert_lib.attention import operators
from hilbert_lib.attention.backends import flex, tiles
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request
from hilbert_lib.attention.triton import shifts
from hilbert_lib.attention.validation import validated
from hilbert_lib.machine import kernel_mode

NEAR = Neighbourhood((4, 6), (3, 2), dilation=(1, 2), edge=("wrap", "clip"))
BACKENDS = ("reference", "eager")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = pytest.mark.skipif(kernel_mode() != "interpreted", reason="of kernels on a CPU")


def drawn(near=NEAR, heads=4, kv_heads=2, extra=3, dtype=torch.float64, **options):
    """q, k, v, extra keys and a bias."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype, **options)
    cells = near.length
    sizes = [(cells, heads), (cells, kv_heads), (cells, kv_heads), (extra, kv_heads), (extra, kv_heads)]
    return [*(draw(2, rows, count, 4) for rows, count in sizes), draw(heads, *bias_sides(near))]


def call(*leaves, **options):
    q, k, v, extra_k, extra_v, bias = leaves
    return neighbourhood_attention(q, k, v, extra_k=extra_k, extra_v=extra_v, bias=bias, **options)


@pytest.mark.parametrize("rules", [*RULES, *every_rule(SMALL)], ids=str)
def test_values_and_gradients_are_the_oracles_by_every_rule(rules, monkeypatch):
    monkeypatch.setattr(tiles, "CHUNK", 2**10)  # several chunks
    heads = GROUPED_WINDOWS if rules in RULES else "grouped"
    for backend in BACKENDS:
        check_on_grid(rules, heads, "none", "bias, extra and padding", torch.float64, backend, head_dim=3)


# Rules that the kernels tell apart, of grids and windows of several tiles: every edge, dilation, stride, causal.
KERNEL_RULES = {
    "line, shifted": ((23,), 7, 2, 1, False, "shift"),
    "line, causal": ((21,), 6, 1, 2, True, "clip"),
    "plane": ((6, 8), (3, 4), (1, 2), (1, 2), False, ("clip", "wrap")),
    "volume": ((3, 4, 5), (2, 3, 9), 1, 1, (True, False, False), ("clip", "wrap", "shift")),
}


@pytest.mark.skipif(kernel_mode() == "absent", reason="needs triton")
@pytest.mark.parametrize(
    ("rules", "order", "dtype", "programs"),
    [
        ("line, shifted", "random", torch.float32, 40),
        ("line, causal", "box", torch.bfloat16, 1024),
        ("plane", "none", torch.float16, 1),
        ("volume", "hilbert", torch.float32, 1),
    ],
)
def test_kernels_add_it_and_have_its_gradient(rules, order, dtype, programs, monkeypatch):
    """programs: with few of them each adds up many tiles."""
    monkeypatch.setattr(shifts, "PROGRAMS", programs)
    case = KERNEL_RULES[rules], GROUPED_WINDOWS, order, "bias, extra and padding", dtype
    check_on_grid(*case, "triton", 5, DEVICE, with_dlse=rules == "plane")


@INTERPRETED
def test_kernels_read_a_bias_of_any_strides():
    *tensors, bias = drawn(dtype=torch.float32)
    run = partial(call, *tensors, neighbourhood=NEAR, backend="triton")
    assert run(bias).equal(run(torch.nn.functional.pad(bias, (0, 2))[..., :-2]))


def test_a_table_with_more_entries_than_kernels_number_is_refused_by_name():
    q = torch.empty(1, 8, 1, 8, device="meta")
    for side, refused in ((512, False), (513, True)):  # 1,023 x 1,023 x 2,047 entries are just below 2^31
        near = Neighbourhood((2, 2, 2), (side, side, 1024)).of_heads(1)
        told = backends_for(near)["triton"].limits(q, Request(near, has_bias=True))
        assert told.startswith("serves a bias of up to 2,147,483,647 entries a head") == refused


def test_boxes_of_wide_heads_refuse_a_bias_by_name():
    pytest.importorskip("triton", reason="triton has no build for this platform")
    near = Neighbourhood((8, 8), 3).of_heads(1)
    for head_dim, words in ((128, ""), (160, "serves a bias at a head_dim up to 128, got 160")):
        q = torch.empty(1, 64, 1, head_dim, dtype=torch.bfloat16, device="meta")
        assert backends_for(near)["hopper"].limits(q, Request(near, has_bias=True)) == words


@settings(max_examples=40)
@given(grids())
def test_the_entry_of_every_pair_is_that_of_the_definition(near):
    sides, cells = bias_sides(near), torch.arange(near.length)
    table = torch.arange(1.0, 1 + torch.Size(sides).numel(), dtype=torch.float64).view(1, *sides)
    right = bias_of(near, table, range(near.length), 1)[0]
    entries = near.of_heads(1).bias_entries(cells[:, None], cells, kv_head=0)
    assert torch.where(right > 0, entries + 1, 0).equal(right.long())


# The bias of models, written from their formulas.


def test_it_is_the_bias_of_dinat():
    """DiNAT (arXiv 2209.15001): the attention of a query i to a neighbour j is q_i k_j + B(i, j) over sqrt(d).

    B is a table (heads, 2 * window - 1, 2 * window - 1) by how many steps of dilation the neighbour is away.
    """
    shape, window, dilation, heads, head_dim = (9, 11), 3, 2, 2, 4
    q, k, v = torch.randn(3, 1, 99, heads, head_dim, dtype=torch.float64).unbind()
    table = torch.randn(heads, 2 * window - 1, 2 * window - 1, dtype=torch.float64)
    right = torch.zeros_like(q)

    def neighbours(x: int, side: int) -> list[int]:
        line = [y for y in range(side) if y % dilation == x % dilation]
        at = line.index(x)
        first = min(max(at - window // 2, 0), len(line) - window)
        return line[first : first + window]

    for y in range(shape[0]):
        for x in range(shape[1]):
            keys = [(j, i) for j in neighbours(y, shape[0]) for i in neighbours(x, shape[1])]
            rows = torch.tensor([j * shape[1] + i for j, i in keys])
            away = torch.tensor([((j - y) // dilation, (i - x) // dilation) for j, i in keys]) + window - 1
            scores = torch.einsum("bhd,bkhd->bhk", q[:, y * shape[1] + x], k[:, rows]) * head_dim**-0.5
            weights = (scores + table[:, away[:, 0], away[:, 1]]).softmax(-1)
            right[:, y * shape[1] + x] = torch.einsum("bhk,bkhd->bhd", weights, v[:, rows])
    near = Neighbourhood(shape, window, dilation=dilation)
    for backend in BACKENDS:
        out = neighbourhood_attention(q, k, v, near, bias=table, backend=backend)
        torch.testing.assert_close(out, right, atol=1e-13, rtol=0)


@pytest.mark.parametrize("shift", [0, 2])
def test_it_is_the_bias_of_swin(shift):
    """Swin (arXiv 2103.14030): windows side by side, moved by a shift; B(i, j) from a table ((2 M - 1)**2, heads).

    Its row is (y_i - y_j + M - 1) * (2 M - 1) + x_i - x_j + M - 1: it counts from the key, and heads come last.
    Tokens that came into one window from both ends of the image do not see each other.
    """
    side, window, heads, head_dim = 8, 4, 2, 4
    x = torch.randn(3, 1, side, side, heads, head_dim, dtype=torch.float64)
    table = torch.randn((2 * window - 1) ** 2, heads, dtype=torch.float64)
    place = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
    away = place[:, :, None] - place[:, None] + window - 1
    added = table[away[0] * (2 * window - 1) + away[1]].permute(2, 0, 1)  # (heads, queries, keys) of a window

    def windows(image):
        return image.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    rolled = x.roll((-shift, -shift), (2, 3))
    q, k, v = (windows(each) for each in rolled)  # (1, windows, tokens, heads, head_dim)
    line = torch.arange(side)
    region = ((line >= side - window).int() + (line >= side - shift).int()) if shift else torch.zeros(side)
    regions = windows((region[:, None] * 3 + region).view(1, side, side, 1, 1))[..., 0, 0]
    scores = torch.einsum("bwqhd,bwkhd->bwhqk", q, k) * head_dim**-0.5 + added
    scores = scores.masked_fill((regions[..., :, None] != regions[..., None, :])[:, :, None], -torch.inf)
    right = torch.einsum("bwhqk,bwkhd->bwqhd", scores.softmax(-1), v)
    right = right.view(1, side // window, side // window, window, window, heads, head_dim).transpose(2, 3)
    right = right.reshape(1, side, side, heads, head_dim).roll((shift, shift), (1, 2)).flatten(1, 2)

    bias = table.view(2 * window - 1, 2 * window - 1, heads).permute(2, 0, 1).flip(1, 2)
    for backend in BACKENDS:
        out = swin_attention(*x, bias, window, shift, backend)
        torch.testing.assert_close(out, right, atol=1e-13, rtol=0)


def swin_attention(q, k, v, bias, window, shift, backend):
    """Swin's windows of an image (batch, side, side, heads, head_dim): those that are moved begin before the image."""
    side, before, after = q.shape[1], window - shift if shift else 0, shift
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, before, after, before, after)) for x in (k, v))
    hidden = torch.ones(k.shape[:3], dtype=torch.bool)
    hidden[:, before : before + side, before : before + side] = False
    near = Neighbourhood(k.shape[1:3], window, stride=window)
    return neighbourhood_attention(
        *(x.flatten(1, 2) for x in (q, k, v)), near, query_box=((before, before + side),) * 2, bias=bias,
        key_padding_mask=hidden.flatten(1), backend=backend,
    )  # fmt: skip


# Forms of call.

BOX = ((1, 3), (2, 6))  # of the grid of NEAR: 8 cells
IN_BOX = cells_of_box(BOX, NEAR.shape)
HILBERT = Ordering.from_curve("hilbert", 24, grid=(4, 6))


def test_it_is_compiled_checkpointed_and_known():
    leaves = [x.requires_grad_() for x in drawn()]
    run = partial(call, neighbourhood=NEAR, ordering=HILBERT)
    out = run(*leaves)
    ways = {
        "again": run,
        "compiled": torch.compile(run, fullgraph=True, backend="aot_eager"),
        "checkpointed": partial(checkpoint, run, use_reentrant=False),
        "through the dispatcher": lambda *leaves: watched(run, leaves),
    }
    right = out, *torch.autograd.grad(out.square().sum(), leaves)
    for name, way in ways.items():
        found = way(*leaves)
        found = found, *torch.autograd.grad(found.square().sum(), leaves)
        assert all(map(torch.equal, found, right)), name
    moved = [*leaves[:5], leaves[5].detach() + torch.arange(5.0)[:, None]]
    values = run(*moved)  # another bias with the same form of call: no value is kept
    assert not torch.allclose(values, out)
    right, _ = attending(NEAR)(*(HILBERT.undo(x, 1) for x in moved[:3]), *moved[3:])
    torch.testing.assert_close(values, HILBERT.apply(right, 1))


def watched(run, leaves):
    with FlopCounterMode(display=False):
        return run(*leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operators_pass_opcheck(backend):
    leaves = [x.requires_grad_() for x in drawn()]
    leaves[5] = leaves[5].detach().float().requires_grad_() if backend == "eager" else leaves[5]
    if backend == "eager":
        leaves[:5] = [x.detach().bfloat16().requires_grad_() for x in leaves[:5]]
    request = Request(NEAR.of_heads(2), scale=0.5, has_bias=True, bias_gradient=True)
    arguments = *leaves, *operators._arguments(request), backend
    torch.library.opcheck(torch.ops.hilbert_lib.attention, arguments)
    with torch.no_grad():
        out, lse = torch.ops.hilbert_lib.attention(*arguments)
    saved = [x.detach() for x in (torch.randn_like(out), *leaves, out, lse, torch.randn_like(lse))]
    torch.library.opcheck(torch.ops.hilbert_lib.attention_backward, (*saved, *arguments[6:]))


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("triton", marks=INTERPRETED)])
def test_a_bias_in_float32_serves_halves_and_autocast(backend):
    *inputs, bias = drawn(dtype=torch.float32)
    dout = torch.randn_like(inputs[0])
    parameter = torch.nn.Parameter(bias)
    run = partial(call, neighbourhood=NEAR, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(*inputs, parameter)
    assert out.dtype == torch.bfloat16
    out.backward(dout.bfloat16())
    assert parameter.grad.dtype == torch.float32
    halves = [x.bfloat16() for x in inputs]
    exact = [*(x.double() for x in halves), bias.double(), dout.bfloat16().double()]
    *_, right = differentiated(attending(NEAR), exact)
    close = TOLERANCE[torch.bfloat16][2]
    assert_close([parameter.grad], [right], close)
    # A bias rounded to bfloat16 would be off by far more.
    fine = run(*halves, bias).float() - run(*halves, bias.bfloat16()).float()
    assert fine.abs().max() > 0
    *_, rounded = differentiated(lambda *x: (run(*x), torch.zeros(())), [*halves, bias.bfloat16(), dout.bfloat16()])
    assert rounded.dtype == torch.bfloat16


def test_its_gradient_is_the_same_bits_however_often():
    tensors = [*drawn(dtype=torch.float32), torch.randn(2, 24, 4, 4)]
    for backend in BACKENDS:
        with determinism():
            first, second = (attended(tensors, NEAR, backend)[-1] for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(first, attended(tensors, NEAR, backend)[-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_joins_boxes_extra_queries_and_orders(backend):
    q, k, v, extra_k, extra_v, bias = drawn()
    run = partial(neighbourhood_attention, k=k, v=v, neighbourhood=NEAR, bias=bias, backend=backend)
    whole = run(q)
    torch.testing.assert_close(run(q[:, IN_BOX], query_box=BOX), whole[:, IN_BOX], atol=1e-14, rtol=0)
    stored = [HILBERT.apply(x, dim=1) for x in (q, k, v)]
    ordered = neighbourhood_attention(*stored, NEAR, ordering=HILBERT, bias=bias, backend=backend)
    torch.testing.assert_close(HILBERT.undo(ordered, dim=1), whole, atol=1e-14, rtol=0)
    # Extra queries have no bias.
    leaf = bias.clone().requires_grad_()
    out, extra_out = run(q, extra_q=q[:, :5], extra_k=extra_k, extra_v=extra_v, bias=leaf)
    joined = [torch.cat(parts, 1) for parts in ((k, extra_k), (v, extra_v))]
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in joined)
    dense = torch.nn.functional.scaled_dot_product_attention(q[:, :5].transpose(1, 2), keys, values)
    torch.testing.assert_close(extra_out, dense.transpose(1, 2), atol=1e-13, rtol=0)
    assert not extra_out.requires_grad
    assert torch.autograd.grad(out.square().sum(), leaf)[0].abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edge", ["clip", "shift"])
def test_it_joins_sequences_that_begin_at_unequal_rows(edge, backend):
    near = Neighbourhood((9,), 4, dilation=2, edge=edge)
    *tensors, bias = drawn(near)
    q, k, v, dout = *tensors[:3], torch.randn(2, 9, 4, 4, dtype=torch.float64)
    for rows, starts in ((9, {"key_start": torch.tensor([3, 0])}), (2, {"query_start": torch.tensor([1, 6])})):
        given_ = q[:, :rows], k, v, bias, dout[:, :rows]
        right = differentiated(attending(near, **starts), given_)
        assert_close(attended(given_, near, backend, **starts), right, 1e-12)


def test_weights_have_it():
    q, k, v, extra_k, extra_v, bias = [x.requires_grad_() for x in drawn()]
    windows = NEAR, replace(NEAR, window=(2, 2))
    line = Neighbourhood((24,), 4)
    tables = drawn(line)[5].requires_grad_()
    starts = {"key_start": torch.tensor([5, 0])}
    for pattern, table, options in ((windows, bias, {"ordering": HILBERT}), (NEAR, bias, {}), (line, tables, starts)):
        rows = [7, 3, 23]
        shared = {"extra_k": extra_k, "bias": table, **options}
        keys, weights = attention_weights(q, k, pattern, rows, **shared)
        values = torch.cat([v, extra_v], 1).repeat_interleave(2, 2).transpose(1, 2)
        at = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], keys
        found = torch.einsum("bhqn,bhqnd->bqhd", weights, values[at])
        right = attend(q, k, v, pattern, extra_v=extra_v, **shared)[:, rows]
        torch.testing.assert_close(found, right, atol=1e-13, rtol=0)
        grads = [torch.autograd.grad(x.square().sum(), [q, k, table]) for x in (found, right)]
        torch.testing.assert_close(*grads, atol=1e-12, rtol=0)


def test_what_is_no_number_in_it_reaches_only_those_who_see_it():
    q, k, v, _, _, bias = drawn()
    bias[1, 4, 1] = torch.nan  # the key two rows on, in the same column
    right = bias_of(NEAR, bias, range(24), 2).isnan().any(-1)
    for backend, dtype in [
        ("reference", torch.float64),
        *[("triton", torch.float32)] * (kernel_mode() == "interpreted"),
    ]:
        out = neighbourhood_attention(*(x.to(dtype) for x in (q, k, v)), NEAR, bias=bias.to(dtype), backend=backend)
        assert out.isnan().any(-1).equal(right.T.expand(2, -1, -1))


def test_grids_of_any_size_are_one_graph():
    bias = torch.randn(2, 5, 3, dtype=torch.float64)

    def run(x):
        near = Neighbourhood(x.shape[1:3], (3, 2))
        return neighbourhood_attention(*[x.flatten(1, 2)] * 3, near, bias=bias)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for grid, stance in (((6, 7), "default"), ((9, 4), "fail_on_recompile"), ((2, 17), "fail_on_recompile")):
        x = torch.randn(2, *grid, 2, 4, dtype=torch.float64)
        right, _ = attending(Neighbourhood(grid, (3, 2)))(*[x.flatten(1, 2)] * 3, bias)
        with torch.compiler.set_stance(stance):
            torch.testing.assert_close(compiled(x), right, atol=1e-13, rtol=0)


def test_flex_reads_the_table_when_traced_and_has_no_gradient_beside_one():
    *tensors, bias = drawn(extra=2)
    for near, order in ((NEAR, HILBERT), ((NEAR, replace(NEAR, window=(2, 2))), None)):
        right = attending(near)(*(x if order is None else order.undo(x, 1) for x in tensors[:3]), *tensors[3:], bias)
        if order is not None:
            right = order.apply(right[0], 1), order.apply(right[1], 2)
        options = dict(zip(("extra_k", "extra_v"), tensors[3:], strict=True))
        given_ = validated(*tensors[:3], near, bias=bias, ordering=order, **options)
        assert_close(flex.attend(*given_, block_size=16), right, 1e-12)
    for leaf in (0, 5):
        leaves = [x.float().requires_grad_(n == leaf) for n, x in enumerate((*tensors, bias))]
        with pytest.raises(ValueError, match="backend='flex' cannot serve: has no gradient beside a bias"):
            call(*leaves, neighbourhood=NEAR, backend="flex")


@pytest.mark.gpu
@pytest.mark.parametrize("rules", RULES)
def test_on_a_gpu_it_is_the_oracles(rules):
    for n, (heads, dtype) in enumerate(product(("grouped", GROUPED_WINDOWS), (torch.float32, torch.bfloat16))):
        case = rules, heads, ("none", "random", "box", "none")[n], "bias, extra and padding", dtype
        check_on_grid(*case, "flex", 16, "cuda", gradients=False)
        for backend in (*BACKENDS, "triton"):
            check_on_grid(*case, backend, 16, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_its_gradient_is_the_same_bits_however_often():
    near = Neighbourhood((40, 48), (9, 17), edge=("shift", "wrap"))
    tensors = [x.cuda() for x in (*drawn(near, dtype=torch.float32), torch.randn(2, near.length, 4, 4))]
    for backend in (*BACKENDS, "triton"):
        first, *others = (attended(tensors, near, backend)[-1] for _ in range(5))
        assert all(first.equal(other) for other in others)


@pytest.mark.gpu
def test_on_a_gpu_programs_add_up_many_tiles():
    near = Neighbourhood((256, 256), 9)  # 71 tiles for each of 29 runs
    tensors = [x.cuda() for x in (*drawn(near, dtype=torch.float32), torch.randn(2, near.length, 4, 4))]
    found, right = (attended(tensors, near, backend)[-1] for backend in ("triton", "eager"))
    torch.testing.assert_close(found, right, atol=1e-5 * right.abs().max().item(), rtol=0)


def test_auto_passes_over_what_does_not_serve_it():
    q, k, v, _, _, bias = drawn(dtype=torch.float32)
    explained = explain_backend(q, k, v, NEAR, bias=bias.requires_grad_())
    assert explained.chosen == "eager"
    assert "cannot serve: has no gradient beside a bias" in explained.reasons["flex"]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_boxes_refuse_the_gradient_of_large_windows_by_name(head_dim):
    box_launch = pytest.importorskip(
        "hilbert_lib.attention.triton.hopper.grid_launch", reason="triton has no build for this platform"
    )
    window = 43
    q = torch.empty(1, 64 * 64, 1, head_dim, dtype=torch.bfloat16, device="meta")
    for side, refused in ((window - 2, False), (window, True)):
        request = Request(Neighbourhood((64, 64), side).of_heads(1), has_bias=True, bias_gradient=True)
        told = box_launch.refusal(q, request)
        assert bool(told) == refused
        assert box_launch.refusal(q, replace(request, bias_gradient=False)) == ""
    assert "in 49,152 bytes of shared memory: windows (43, 43) need 51,200" in told


def test_the_parts_of_a_union_take_biases_of_their_own_as_its_refusal_says():
    far = replace(NEAR, window=(1, 3), dilation=(2, 2))
    q, k, v, _, _, near_bias = drawn()
    far_bias = drawn(far)[5]
    parts = ((NEAR, near_bias), (far, far_bias))
    calls = [attend(q, k, v, pattern, bias=bias, return_lse=True) for pattern, bias in parts]
    found, _ = merge_attention(*zip(*calls, strict=True))
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
    masked = [
        (scores + bias_of(pattern, bias, range(24), 4)).where(mask_of(pattern), -torch.inf) for pattern, bias in parts
    ]
    weights = torch.cat(masked, 3).softmax(3)
    torch.testing.assert_close(found, torch.einsum("bhqk,bkhd->bqhd", weights, torch.cat((v, v), 1)))


TENSORS = dict(zip(("q", "k", "v"), drawn()[:3], strict=True))
asked = partial(neighbourhood_attention, **TENSORS, neighbourhood=NEAR)
TABLE = drawn()[5]
LINE = torch.ones(1, 8, 2, 4)
test_a_wrong_bias_is_refused_by_name = refusals(
    {
        ValueError: [
            (
                lambda: asked(bias=TABLE[:1]),
                r"bias must be \(heads, 2 \* window - 1 along each axis\) = \(4, 5, 3\)",
            ),
            (lambda: asked(bias=TABLE[..., :2]), r"\(4, 5, 3\), got shape \(4, 5, 2\)"),
            (lambda: asked(bias=TABLE.to("meta")), r"bias must be on the device of q \(cpu\), got meta"),
            (lambda: asked(bias=TABLE, neighbourhood=(NEAR, replace(NEAR, window=(3, 3)))), r"\(4, 5, 5\), got"),
            (
                lambda: attend(LINE, LINE, LINE, DilatedPattern((4,), (1,)), bias=torch.ones(2, 7)),
                r"bias must be left out for a DilatedPattern, got a tensor of shape \(2, 7\)",
            ),
            (
                lambda: attend(**TENSORS, pattern=Union((NEAR, NEAR)), bias=TABLE),
                "bias must be left out for a Union, got a tensor.*; merge_attention joins calls of its parts",
            ),
            (
                lambda: attend(LINE, LINE, LINE, Union((DilatedPattern((4,), (1,)),)), bias=TABLE),
                r"bias must be left out for a Union, got a tensor of shape \(4, 5, 3\)$",
            ),
        ],
        TypeError: [
            (
                lambda: asked(bias=TABLE.float()),
                r"bias must have the dtype of q \(torch.float64\), got",
            ),
            (lambda: asked(bias=[[1.0]]), "bias must be a"),
            (lambda: dilated_attention(LINE, LINE, LINE, DilatedPattern((4,), (1,)), bias=TABLE), "bias"),
        ],
    }
)
