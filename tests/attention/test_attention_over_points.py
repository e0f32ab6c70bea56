"""Attention over points: every backend against the oracle, and each rule of its semantics."""

from functools import partial

import oracle
import pytest
import torch
from cases import (
    POINT_CASES,
    assert_close,
    cells,
    check_points,
    determinism,
    differentiated,
    drawn,
    drawn_dlse,
    extra_of,
    masks_of,
    points_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_operators import check_operators
from test_points import clouds
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    PointNeighbourhood,
    RingNeighbourhoodAttention,
    Union,
    attend,
    attention_weights,
    dilated_attention,
    estimate_memory,
    explain_backend,
    neighbourhood_attention,
    select_attention_backend,
)
from hilbert_lib.attention.request import Request
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.points import ListedPairs
from hilbert_lib.ring.spread import check_served

BACKENDS = ("reference", "eager")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "dtype", "heads", "kv_heads", "head_dim", "extra", "has_masks"), POINT_CASES)
def test_points_equal_the_oracle(backend, kind, dtype, heads, kv_heads, head_dim, extra, has_masks):
    check_points(backend, kind, dtype, heads, kv_heads, head_dim, extra, has_masks)


RANDOM = clouds(), st.sampled_from(((1, 1), (4, 2), (3, 1))), st.integers(0, 3), st.booleans(), st.booleans()


@settings(max_examples=25)
@given(*RANDOM)
def test_random_calls_equal_the_oracle(points, heads, extra, is_masked, has_dlse):
    check_random(BACKENDS, torch.float64, 1e-11, points, heads, extra, is_masked, has_dlse)


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="fixed cases show compiled kernels")
@settings(max_examples=10)
@given(*RANDOM)
def test_random_calls_of_kernels_equal_the_oracle(points, heads, extra, is_masked, has_dlse):
    check_random(["triton"], torch.float32, 2e-4, points, heads, extra, is_masked, has_dlse)


def check_random(backends, dtype, tolerance, points, heads, extra, is_masked, has_dlse):
    """Output, lse and gradients by some backends beside the oracle's in float64."""
    *qkv, dout = drawn(points.lists.queries, *heads, 3, batch=2, keys=points.lists.keys, dtype=dtype)
    tensors = [*qkv, *extra_of(extra, heads[1], 3, dtype), dout]
    masks = masks_of(points, extra) if is_masked else {}

    def call(run, *leaves, **options):
        return run(*leaves[:3], points, **oracle.named(leaves[3:]), **masks, **options)

    exact = partial(call, oracle.attention)
    in_double = [x.double() for x in tensors]
    dlse = drawn_dlse(exact(*in_double[:-1])[1]) if has_dlse else None
    right = differentiated(exact, in_double, dlse)
    for backend in backends:
        found = differentiated(partial(call, attend, backend=backend, return_lse=True), tensors, dlse)
        assert_close(found, right, tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_queries_see_all_points_and_all_extra_keys(backend):
    points = points_of("clouds")
    q, k, v, _ = drawn(90, 4, 2, 8, batch=2, dtype=torch.float64)
    extra_q = drawn(5, 4, 2, 8, batch=2, dtype=torch.float64)[0] + 1
    tensors = [q, k, v, extra_q, *extra_of(3, 2, 8, torch.float64)]
    masks = masks_of(points, 3)

    def results(run, **options) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        named = dict(zip(("extra_q", "extra_k", "extra_v"), leaves[3:], strict=True))
        found = run(*leaves[:3], pattern=points, **named, **masks, **options)
        douts = [drawn_dlse(x) if x.dim() == 3 else torch.randn(x.shape, dtype=x.dtype) for x in found]
        return [*found, *torch.autograd.grad(found, leaves, douts)]

    torch.manual_seed(0)
    found = results(attend, backend=backend, return_lse=True)
    torch.manual_seed(0)
    right = results(oracle.joint_attention)
    assert_close(found, right, 1e-11)


def test_one_gradient_alone_is_that_of_both():
    points = points_of("even")
    *qkv, dout = drawn(100, 2, 2, 4, dtype=torch.float64)
    grads = differentiated(partial(attend, pattern=points, return_lse=True), [*qkv, dout])[2:]
    right = differentiated(partial(oracle.attention, pattern=points), [*qkv, dout])[2:]
    assert_close(grads, right, 1e-11)


def test_a_full_grid_of_points_is_the_grid():
    shape = (5, 6, 4)
    *qkv, dout = drawn(120, 4, 2, 8, batch=2, dtype=torch.float64)
    grid = torch.stack(torch.unravel_index(torch.arange(120), shape), 1) - 7
    for window, dilation in (((3, 5, 2), 1), ((2, 3, 3), (1, 2, 1))):
        near = Neighbourhood(shape, window, dilation=dilation, edge="clip")
        points = PointNeighbourhood(grid, window, dilation=dilation)
        assert points.pairs == near.pairs
        found, right = (
            differentiated(partial(neighbourhood_attention, neighbourhood=x, return_lse=True), [*qkv, dout])
            for x in (points, near)
        )
        assert_close(found, right, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_tokens_changes_nothing(backend):
    coordinates, batch = cells(140), torch.arange(140) % 2
    tensors = drawn(140, 2, 1, 4, dtype=torch.float64)
    order = torch.randperm(140, generator=torch.Generator().manual_seed(4))

    def results(order: torch.Tensor) -> list[torch.Tensor]:
        points = PointNeighbourhood(coordinates[order], 4, batch[order])
        run = partial(attend, pattern=points, backend=backend, return_lse=True)
        out, lse, *grads = differentiated(run, [x[:, order] for x in tensors])
        return [out, lse.transpose(1, 2), *grads]

    assert_close(results(order), [x[:, order] for x in results(torch.arange(140))], 1e-13)


def test_clouds_are_attended_to_one_by_one():
    coordinates, batch = cells(140), torch.randint(-2, 2, (140,), generator=torch.Generator().manual_seed(0))
    q, k, v, _ = drawn(140, 2, 1, 4, batch=2, dtype=torch.float64)
    together = attend(q, k, v, PointNeighbourhood(coordinates, 6, batch))
    for cloud in batch.unique():
        own = batch == cloud
        alone = attend(*(x[:, own] for x in (q, k, v)), PointNeighbourhood(coordinates[own], 6))
        assert_close([together[:, own]], [alone], 1e-14)


def test_the_bits_are_the_same_every_time():
    points = points_of("keys")
    tensors = drawn(130, 4, 2, 8, batch=2, keys=points.lists.keys)
    with determinism():
        first, again = (differentiated(partial(attend, pattern=points, return_lse=True), tensors) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_reaches_who_sees_it(backend, value):
    points = points_of("even")
    q, k, v, _ = drawn(100, 2, 1, 4, batch=2, dtype=torch.float64)
    right = attend(q, k, v, points, backend=backend)
    v[1, 7, 0, 2] = value
    out = attend(q, k, v, points, backend=backend)
    sees = points.queries(7)
    hit = torch.zeros(out.shape, dtype=torch.bool)
    hit[1, sees, :, 2] = True
    assert not out[hit].isfinite().any()
    assert_close([out[~hit]], [right[~hit]], 1e-14)


def test_a_key_that_no_query_sees_may_hold_anything():
    points = points_of("alone")
    *qkv, dout = drawn(20, 2, 1, 4, keys=9, dtype=torch.float64)
    unseen = ~oracle.points_seen(points).any(0)
    assert unseen.any()
    run = partial(attend, pattern=points, return_lse=True)
    right = differentiated(run, [*qkv, dout])
    qkv[1][:, unseen] = torch.nan
    qkv[2][:, unseen] = torch.inf
    assert_close(differentiated(run, [*qkv, dout]), right, 1e-14)


def test_keys_may_be_none_and_points_too():
    points = PointNeighbourhood(cells(5), 3, keys=cells(0))
    q, k, v, _ = drawn(5, 2, 1, 4, keys=0)
    out, lse = attend(q, k, v, points, return_lse=True)
    assert not out.any()
    assert lse.eq(-torch.inf).all()
    extra = drawn(1, 2, 1, 4)[1:3]
    for backend in BACKENDS:
        out = attend(q, k, v, points, extra_k=extra[0], extra_v=extra[1], backend=backend)
        assert_close([out], [extra[1].expand(-1, 5, 2, -1)], 1e-6)
    assert attend(q[:, :0], k, v, PointNeighbourhood(cells(0), 3)).shape == (1, 0, 2, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_queries_see_extra_keys_where_points_have_none(backend):
    points = PointNeighbourhood(cells(5), 3, keys=cells(0))
    q, k, v, _ = drawn(5, 2, 1, 4, keys=0, batch=2, dtype=torch.float64)
    extra_q = drawn(2, 2, 1, 4, batch=2, dtype=torch.float64)[0] + 1
    tensors = [q, k, v, extra_q, *extra_of(3, 1, 4, torch.float64)]
    padding = torch.tensor([[False, True, False], [False, False, False]])

    def results(run, **options) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        named = dict(zip(("extra_q", "extra_k", "extra_v"), leaves[3:], strict=True))
        found = run(*leaves[:3], pattern=points, **named, extra_padding_mask=padding, **options)
        return [*found, *torch.autograd.grad(found, leaves, [x.detach().cos() for x in found])]

    assert_close(results(attend, backend=backend, return_lse=True), results(oracle.joint_attention), 1e-12)


def test_autocast_casts_as_it_does_elsewhere():
    points, (q, k, v, _) = points_of("odd"), drawn(90, 2, 1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, points)
    assert out.equal(attend(*(x.bfloat16() for x in (q, k, v)), points))


def test_auto_takes_what_reads_lists_and_says_why_not_the_others():
    points, (q, k, v, _) = points_of("odd"), drawn(90, 2, 1, 8)
    explained = explain_backend(q, k, v, points)
    assert explained.chosen == "eager"
    assert explained.reasons["flex"] == "cannot serve: reads no lists of points"
    assert set(explained.reasons) >= {"eager", "reference", "flex"}
    assert "sdpa" not in explained.reasons
    with pytest.raises(ValueError, match="backend='flex' cannot serve: reads no lists of points"):
        attend(q, k, v, points, backend="flex")


POINTS, (Q, K, V, _) = points_of("odd"), drawn(90, 2, 1, 4)
WRONG = [
    (ValueError, "ordering must be left out.*tokens lie as the coordinates do", {"ordering": 1}),
    (ValueError, "kv_ordering must be left out.*tokens lie as the coordinates do", {"kv_ordering": 1}),
    (ValueError, "cu_seqlens must be left out.*give batch= to the points", {"cu_seqlens": torch.tensor([0, 90])}),
    (ValueError, "query_box must be left out.*give keys= to the points", {"query_box": ((0, 1), (0, 1))}),
    (ValueError, "bias must be left out for a PointNeighbourhood", {"bias": torch.zeros(2, 9, 9)}),
    (ValueError, "dropout_p must be left out for a PointNeighbourhood", {"dropout_p": 0.5}),
    (ValueError, "is_causal must be left out for a PointNeighbourhood", {"is_causal": True}),
    (ValueError, "query_start must be left out for a PointNeighbourhood", {"query_start": 3}),
    (ValueError, r"extra_q must be \(batch, extra, heads", {"extra_q": Q[..., :2]}),
    (TypeError, "pattern must be one PointNeighbourhood for all heads", {"pattern": (POINTS, POINTS)}),
    (ValueError, "q must have the 90 cells of its points", {"q": Q[:, 1:]}),
    (ValueError, "k must have the 90 cells of its points", {"k": K[:, 1:], "v": V[:, 1:]}),
    (
        ValueError,
        "heads come first",
        {"q": Q.transpose(1, 2), "k": K.expand(1, 90, 90, 4), "v": K.expand(1, 90, 90, 4)},
    ),
    (ValueError, "backend must be one of auto, .*eager", {"backend": "sdpa"}),
]


@pytest.mark.parametrize(("error", "words", "given"), WRONG)
def test_what_points_do_not_take_is_refused_by_its_name(error, words, given):
    with pytest.raises(error, match=words):
        attend(**{"q": Q, "k": K, "v": V, "pattern": POINTS} | given)


def test_other_doors_refuse_points_by_name():
    with pytest.raises(TypeError, match="must be one PointNeighbourhood for all heads"):
        neighbourhood_attention(Q, K, V, (POINTS, POINTS))
    with pytest.raises(TypeError, match="attend"):
        dilated_attention(Q, K, V, POINTS)
    with pytest.raises(TypeError, match="patterns must hold no PointNeighbourhood"):
        Union((POINTS, DilatedPattern((4,), (1,))))


@pytest.mark.parametrize("kind", ["keys", "clouds"])
def test_weights_are_those_of_the_keys_that_a_query_sees(kind):
    points = points_of(kind)
    q, k, _, _ = drawn(points.lists.queries, 2, 1, 4, batch=2, keys=points.lists.keys, dtype=torch.float64)
    keys, weights = attention_weights(q, k, points, [3, 65])
    right = oracle.weights(q, k, points)[:, :, [3, 65]]
    found = torch.zeros_like(right).scatter_add(3, keys.clamp(min=0), weights)
    assert_close([found], [right], 1e-14)


def test_few_points_of_many_heads_are_no_mistake(recwarn):
    x = torch.ones(1, 5, 8, 4)
    attend(x, x, x, PointNeighbourhood(cells(5), 3))
    neighbourhood_attention(x, x, x, PointNeighbourhood(cells(5), 3))
    assert not recwarn.list


@pytest.mark.parametrize(
    "call",
    [
        lambda: estimate_memory((POINTS, POINTS), heads=2, head_dim=4, device="cpu"),
        lambda: RingNeighbourhoodAttention(POINTS),
        lambda: check_served(POINTS),
        lambda: select_attention_backend(Q, K, V, POINTS, benchmark_backends=True),
    ],
)
def test_what_serves_no_points_says_so(call):
    with pytest.raises((TypeError, ValueError), match="Neighbourhood"):
        call()


def test_an_estimate_counts_lists_and_refuses_what_points_do_not_take():
    sizes = {"heads": 2, "head_dim": 4, "device": "cpu", "dtype": torch.float32}
    found = estimate_memory(POINTS, **sizes, extra=3)
    assert found.items["lists"] == sum(x.nbytes for x in POINTS.list_tensors)
    assert (found.items["q, k, v"], found.items["extra k, v"]) == (3 * 90 * 32, 2 * 3 * 32)
    assert found.workspace > 0
    for name in ("length", "queries", "is_causal", "has_kv_ordering"):
        with pytest.raises(ValueError, match=f"{name} must be left out for a call over points"):
            estimate_memory(POINTS, **sizes, **{name: 1 if "_" not in name else True})


def test_a_second_derivative_is_refused_by_name():
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(attend(q, K, V, POINTS).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attend with a PointNeighbourhood can be differentiated once"):
        grad.sum().backward()


def request_of(points: PointNeighbourhood, **options) -> Request:
    return Request(ListedPairs(), scale=0.5, lists=points.list_tensors, **options)


@pytest.mark.parametrize(("backend", "kind"), [("eager", "keys"), ("reference", "odd")])
def test_the_operators_pass_opcheck_over_points(backend, kind):
    points = points_of(kind)
    tensors = drawn(points.lists.queries, 2, 1, 4, batch=2, keys=points.lists.keys)[:3] + extra_of(
        2, 1, 4, torch.float32
    )
    masks = masks_of(points, 2)
    check_operators([x.requires_grad_() for x in tensors], request_of(points, **masks), backend)


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="a number of tiles that two clouds share is a constant to torch.compile")
@pytest.mark.parametrize("counts", [range(70, 190, 10), (40, 70, 0, 1, 130, 2, 63, 90, 1, 0, 64, 200)], ids=str)
@pytest.mark.parametrize("window", [3, 2])
def test_clouds_of_all_sizes_make_two_graphs(window, counts, compiled_code_is_forgotten):
    frames = []

    def counted(graph, inputs):
        frames.append(graph)
        return graph

    @partial(torch.compile, fullgraph=True, backend=counted)
    def run(q, k, v, points):
        return attend(q, k, v, points, return_lse=True)

    for count in counts:
        points, tensors = PointNeighbourhood(cells(count, 3, 9), window), drawn(count, 2, 1, 4)
        found, right = (differentiated(partial(each, points=points), tensors) for each in (run, _attend_points))
        assert all(map(torch.equal, found, right))
    # A size of 0 or 1, of points or of tiles, is a constant to torch.compile.
    assert len(frames) <= 2 + len({0, 1} & set(counts)) + any(count <= 64 for count in counts)


def _attend_points(q, k, v, points):
    return attend(q, k, v, points, return_lse=True)


def test_a_compiled_backward_equals_an_eager_one():
    points, tensors = points_of("even"), drawn(100, 2, 1, 4)
    run = torch.compile(partial(_attend_points, points=points), fullgraph=True, backend="aot_eager")
    found, right = (differentiated(each, tensors) for each in (run, partial(_attend_points, points=points)))
    assert all(map(torch.equal, found, right))


def test_checkpointing_recomputes_the_same_bits():
    points, tensors = points_of("even"), drawn(100, 2, 1, 4)
    run = partial(_attend_points, points=points)
    kept = partial(checkpoint, run, use_reentrant=False)
    assert all(map(torch.equal, differentiated(run, tensors), differentiated(kept, tensors)))


def test_flop_are_those_of_the_pairs():
    points, (q, k, v, _) = points_of("even"), drawn(100, 4, 2, 8, batch=2)
    extra = extra_of(3, 2, 8, torch.float32)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, points, **oracle.named(extra))
    assert counter.get_total_flops() == 4 * 8 * 2 * 4 * (points.pairs + 3 * 100)


def test_a_later_call_of_the_same_form_has_lists_of_its_own():
    q, k, v, _ = drawn(90, 2, 1, 4)
    for points in (points_of("odd"), PointNeighbourhood(cells(90, seed=3), (5, 2)), points_of("odd")):
        for _ in range(2):
            assert_close([attend(q, k, v, points)], [attend(q, k, v, points, backend="reference")], 1e-5)


def test_a_call_keeps_no_points_alive():
    import gc
    import weakref

    points = points_of("odd")
    gone = [weakref.ref(points), *map(weakref.ref, points.list_tensors)]
    for _ in range(2):
        attend(Q, K, V, points)
    del points
    gc.collect()
    assert not any(each() is not None for each in gone)
