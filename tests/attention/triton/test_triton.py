"""The fused kernels equal the oracle; without a GPU they run here in Triton's interpreter, at small sizes."""

from dataclasses import replace
from itertools import product

import oracle
import pytest
import torch
from cases import BRANCHES, LAYOUTS, assert_close, attended, check, determinism, drawn, exactly, in_pairs, norms, only

from hilbert_lib import DilatedPattern, Ordering, dilated_attention, explain_backend
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.backends.registry import backends_for
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

launch = pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
from gathered_starts import counted_launches, gathering  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from hilbert_lib.attention.triton import arguments, grid_launch, rows, schedule  # noqa: E402
from hilbert_lib.attention.triton.start import Start, _kind_of_kernels, forget, start  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = ("small", "small_grouped", "shorter")
STORED = ("none", "hilbert", "random", "chunked")
SHORT_ROWS = schedule.SHORT_ROWS
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, STORED, DTYPES, SMALL, LAYOUTS, [False, True])


@pytest.fixture(autouse=True)
def launches_as_of_long_calls(monkeypatch):
    """The calls of these tests are short. What short calls have of their own is asked for."""
    monkeypatch.setattr(schedule, "SHORT_ROWS", 0)
    yield
    forget()  # the launches of a call that is short now, and was not


@in_pairs((*AXES, [False, True], [0, SHORT_ROWS]), 5)
def test_output_lse_and_gradients_equal_the_oracle(case, monkeypatch):
    *first, dtype, shape, layout, is_causal, with_dlse, short_rows = case
    monkeypatch.setattr(schedule, "SHORT_ROWS", short_rows)
    check(*first, "triton", dtype, shape, layout, is_causal, device=DEVICE, with_dlse=with_dlse)


@pytest.mark.parametrize(("block_m", "block_n", "is_causal"), [(32, 16, True), (16, 32, False)])
def test_tiles_that_are_no_squares_and_half_precision_equal_the_oracle(monkeypatch, block_m, block_n, is_causal):
    # As a GPU has them; otherwise the interpreter is given squares, and float32. A branch has several blocks of keys.
    monkeypatch.setitem(BRANCHES, "whole", ((45, 24), (1, 5)))
    monkeypatch.setattr(
        arguments, "INTERPRETED", dict.fromkeys(arguments.INTERPRETED, arguments.Config(block_m, block_n))
    )
    monkeypatch.setattr(launch, "as_computed", lambda *tensors: tensors)
    check("whole", "head", "softmax", "none", "triton", torch.float16, "grouped", "bshd", is_causal, device=DEVICE)


# Patterns whose rates outgrow their segments, so that a call takes several passes, and lengths: the fewer classes and
# segments there are in one, the sooner it is interpreted.
PASSES = {
    "coprime": (((40, 40), (7, 33)), 50),
    "geometric": (((4, 8, 32), (1, 4, 16)), 26),
    "unsorted": (((32, 4, 11), (32, 1, 3)), 27),
    "across": (((24, 16), (1, 1)), 40),  # one pass, whose tiles lie across segments, some with a whole block of keys
}


OPTIONS = {
    "plain": (),
    "causal": ("causal",),
    "padding": ("padding",),
    "dropout": ("dropout", "causal"),
    "decoding": ("part", "causal"),
    "ordering": ("ordering",),
}
COMBINED = {  # of branches and options; `make test-all` runs all
    *(("coprime", "plain"), ("coprime", "ordering"), ("coprime", "dropout"), ("geometric", "decoding")),
    *(("unsorted", "padding"), ("unsorted", "causal"), ("unsorted", "decoding"), ("geometric", "ordering")),
    *(("across", "plain"), ("across", "causal")),
}


def by_kernels_and_exactly(pattern: DilatedPattern, tensors: list[torch.Tensor], options, part=slice(None)) -> tuple:
    """out, lse, dq, dk and dv of the fused kernels, and those of the reference in float64; part: of the queries."""
    q, k, v, dout = tensors
    length, head_dim = k.shape[1], k.shape[3]
    order = Ordering.from_curve("hilbert", length) if "ordering" in options else Ordering.linear(length)
    call = Request(pattern, scale=head_dim**-0.5, is_causal="causal" in options)
    if "padding" in options:
        padding = torch.rand(k.shape[:2], generator=torch.Generator().manual_seed(1)) < 0.3
        call = replace(call, key_padding_mask=padding.to(DEVICE))
    if "dropout" in options:
        call = replace(call, dropout_p=0.3, seed=torch.tensor([2**40 + 5], device=DEVICE))
    if "part" in options:
        q, dout = q[:, part], dout[:, part]
        call = replace(call, query_start=part.start)
    exact = [x.double() for x in (q, k, v)]
    out, lse = reference.forward(Tensors(*exact), call)
    expected = out, lse, *reference.backward(dout.double(), Tensors(*exact), out, lse, call)[:3]
    if "ordering" in options:
        k, v = order.apply(k, dim=1), order.apply(v, dim=1)
        call = replace(call, inverse=order.inverse.int().to(DEVICE))
    inputs = Tensors(q, k, v)
    out, lse = launch.forward(inputs, call)
    dq, dk, dv = launch.backward(dout, inputs, out, lse, call)
    return (out, lse, dq, order.undo(dk, dim=1), order.undo(dv, dim=1)), expected


@pytest.mark.parametrize(("branches", "options"), only(COMBINED, product(PASSES, OPTIONS)))
def test_several_passes_and_every_option_equal_the_reference(branches, options):
    branches, length = PASSES[branches]
    tensors, part = drawn(length, 2, 1, 4, device=DEVICE), slice(length - 19, length - 10)
    assert_close(*by_kernels_and_exactly(DilatedPattern(*branches), tensors, OPTIONS[options], part), 2e-5)


SHORT_COMBINED = {
    *(("coprime", "plain"), ("coprime", "ordering"), ("geometric", "dropout"), ("unsorted", "padding")),
    *(("unsorted", "causal"), ("across", "causal"), ("across", "dropout")),
}


@pytest.mark.parametrize(
    ("branches", "options"), only(SHORT_COMBINED, product(PASSES, [name for name in OPTIONS if name != "decoding"]))
)
def test_a_short_call_is_one_launch_each_way_and_equals_the_reference(monkeypatch, branches, options):
    monkeypatch.setattr(schedule, "SHORT_ROWS", SHORT_ROWS)
    counts = counted_launches(monkeypatch, launch)
    branches, length = PASSES[branches]
    tensors = drawn(length, 2, 1, 4, batch=2, device=DEVICE)
    assert_close(*by_kernels_and_exactly(DilatedPattern(*branches), tensors, OPTIONS[options]), 2e-5)
    assert counts == [1, 1]


# As a GPU compiles them, over many tiles: most of a tile of the interpreter is masked.
LONG = {"one pass": ((300, 900), (1, 2)), "several passes": ((150, 900, 300), (1, 96, 2))}
FEW_ROWS = [(64, torch.bfloat16), (128, torch.float16), (64, torch.float32)]  # several passes compile several kernels
ROWS = [*FEW_ROWS, (40, torch.float16), (200, torch.float16), (256, torch.bfloat16)]
ROWS += [(128, torch.float32), (256, torch.float32)]
COMPILED = [("one pass", *row) for row in ROWS] + [("several passes", *row) for row in FEW_ROWS]
SEVERAL = [(), ("padding", "dropout"), ("ordering", "causal"), ("part", "padding", "dropout", "ordering", "causal")]
ERRORS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}


@pytest.mark.gpu
@pytest.mark.parametrize("options", SEVERAL, ids="-".join)
@pytest.mark.parametrize("short_rows", [0, SHORT_ROWS])
@pytest.mark.parametrize(("branches", "head_dim", "dtype"), COMPILED)
def test_compiled_kernels_with_every_option_equal_the_reference(
    monkeypatch, branches, head_dim, dtype, options, short_rows
):
    monkeypatch.setattr(schedule, "SHORT_ROWS", short_rows)
    monkeypatch.setattr(schedule, "SHORT_TILES", 2**12)
    monkeypatch.setattr(schedule, "SHORT_PAIRS", 2**30)
    schedule.is_short.cache_clear()
    tensors = drawn(900, 4, 2, head_dim, batch=2, dtype=dtype, device=DEVICE)
    pattern = DilatedPattern(*LONG[branches])
    found, expected = by_kernels_and_exactly(pattern, tensors, options, slice(300, 700))
    (out, lse, *grads), (exact, exact_lse, *exact_grads) = found, expected
    errors = norms((out, *grads), (exact, *exact_grads))
    assert max(errors) < ERRORS[dtype], errors
    assert_close([lse], [exact_lse], 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", LONG)
@pytest.mark.parametrize(("head_dim", "dtype"), FEW_ROWS)
@pytest.mark.parametrize("kernels", ["warp-specialised", "plain", "decoding"])
def test_scores_of_ten_thousand_are_exact_to_the_rounding_of_lse(kernels, head_dim, dtype, branches):
    # Every score is 0, 8,192 or 16,384 or less by as much, which all dtypes hold, and the weights that are not 0 are
    # equal. Gradients, passes and parts of the keys go by lse, which float32 rounds as it does scores of that size.
    forward, backward = launch.forward, launch.backward
    if kernels == "warp-specialised":
        if dtype == torch.float32 or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs 16 bits and compute capability 9.0")
        forward, backward = launch.forward_on_hopper, launch.backward_on_hopper
    q, k, v, dout = drawn(900, 4, 2, head_dim, dtype=dtype, device=DEVICE)
    q, k = q * 0, k * 0
    k[..., 0] = torch.randint(0, 3, k.shape[:3], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q, dout = (x[:, -1:] if kernels == "decoding" else x for x in (q, dout))
    start = 899 if kernels == "decoding" else None
    call = Request(DilatedPattern(*LONG[branches]), scale=1.0, is_causal=True, query_start=start)
    rounding = 4e4 * 2**-24
    for level in (8192, -8192):
        q[..., 0] = level
        exact = [x.double() for x in (q, k, v)]
        expected, expected_lse = reference.forward(Tensors(*exact), call)
        out, lse = forward(Tensors(q, k, v), call)
        assert norms([out], [expected])[0] < ERRORS[dtype] + rounding
        assert (lse - expected_lse).abs().max() < rounding
        if kernels != "decoding":
            # Of dq and dk nothing is asked: equal weights cancel in them but for rounding.
            expected_dv = reference.backward(dout.double(), Tensors(*exact), expected, expected_lse, call)[2]
            dv = backward(dout, Tensors(q, k, v), out, lse, call)[2]
            assert norms([dv], [expected_dv])[0] < ERRORS[dtype] + rounding


def test_bits_near_the_bound_are_dropped_as_elsewhere():
    # By the 32-bit number nearest to 0.9 as the bound, query 1 would keep key 1.
    length, seed = 16, torch.tensor([288271], device=DEVICE)
    call = Request(DilatedPattern((length,), (1,)), scale=1.0, dropout_p=0.9, seed=seed)
    q, v = torch.zeros(1, length, 1, 16, device=DEVICE), torch.eye(length, device=DEVICE)[None, :, None]
    out, _ = launch.forward(Tensors(q, q, v), call)
    assert out[0, 1, 0, 1] == 0
    expected, _ = reference.forward(Tensors(q, q, v), call)
    torch.testing.assert_close(out, expected)


ONE_PASS, TWO_PASSES = (1, 2), (3, 4)  # rates
SPOILT = {*((ONE_PASS, torch.nan, n) for n in range(3)), (ONE_PASS, torch.inf, 2), (TWO_PASSES, torch.nan, 2)}
SPOILT |= {(TWO_PASSES, torch.inf, 1)}
EVERY = list(product((ONE_PASS, TWO_PASSES), (torch.nan, torch.inf), range(3)))


@pytest.mark.parametrize(
    ("backend", "is_causal", "rates", "bad", "which"),
    [(name, causal, *case) for name, causal in (("reference", True), ("reference", False)) for case in EVERY]
    + [pytest.param("triton", True, *case.values, marks=case.marks) for case in only(SPOILT, EVERY)],
)
def test_a_token_that_is_not_finite_stays_in_its_rows(backend, is_causal, rates, bad, which):
    *tensors, _ = drawn(24, 2, 1, 4, device=DEVICE)
    pattern, options = DilatedPattern((8, 16), rates), {"is_causal": is_causal, "backend": backend}
    clean = dilated_attention(*tensors, pattern, **options)
    tensors[which][0, 12] = bad
    out = dilated_attention(*tensors, pattern, **options)
    for query in range(24):
        keys = pattern.keys(query, kv_head=0, kv_heads=1, length=24, is_causal=is_causal)
        if query == 12 and len(keys) if which == 0 else 12 in keys:
            # An infinite query or key may have weight 0.
            assert (which < 2 and bad == torch.inf) or not out[0, query].isfinite().any()
        else:
            assert torch.equal(out[0, query], clean[0, query])


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    tensors = drawn(40, 2, 2, 8, device=DEVICE)
    runs = (attended(tensors, DilatedPattern((8, 40), (1, 3)), "triton", is_causal=True) for _ in range(2))
    assert all(map(torch.equal, *runs))


BACKENDS = ("triton", "reference", "eager", "sdpa")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_large_scores_and_rows_with_one_key_are_exact(backend, magnitude):
    # On a GPU sdpa serves no head_dim of 1, which makes scores that float32 holds exactly.
    q, k, v, _ = drawn(32, 1, 1, 1, device=DEVICE if backend == "triton" else "cpu")
    q, k = torch.full_like(q, magnitude), k.round()
    options = {"scale": 1.0, "is_causal": True}
    for pattern in (DilatedPattern((16,), (1,)), DilatedPattern((8, 16, 32), (1, 2, 4))):
        out = dilated_attention(q, k, v, pattern, backend=backend, **options)
        expected, _ = oracle.attention(*(x.cpu() for x in (q, k, v)), pattern, **options)
        # Merging branches rounds weights as float32 rounds an lse of this size; one softmax does not.
        is_one = backend == "reference" or (backend, len(pattern.branches)) == ("triton", 1)
        assert_close([out], [expected], 1e-6 if is_one else 4e4 * 2**-24)
    out = dilated_attention(q, k, v, DilatedPattern((1,), (1,)), backend=backend)
    # Three products of TF32 hold 22 bits of v, one for float32's 24.
    error = 2.0**-22 if (backend, DEVICE) == ("triton", "cuda") else 0.0
    torch.testing.assert_close(out, v, rtol=error, atol=0.0)


@pytest.mark.parametrize(
    ("backend", "head_dim", "size"), [("triton", 16, 1000), ("triton", 256, 100), ("eager", 16, 1000)]
)
def test_gradients_of_large_scores_are_off_by_no_more_than_the_docs_say(backend, head_dim, size):
    """docs/kernels.md, "Large scores": scores to 4e6 and to 4e4."""
    q, k, v, dout = drawn(64, 2, 2, head_dim, device=DEVICE if backend == "triton" else "cpu")
    q, k, v = (x.requires_grad_() for x in (size * q, size * k, v))
    doubled = [x.double() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *doubled[:2]) * head_dim**-0.5
    exact = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), doubled[2]), v, dout.double())
    found = torch.autograd.grad(dilated_attention(q, k, v, DilatedPattern((64,), (1,)), backend=backend), v, dout)
    bits = 22 if DEVICE == "cuda" else 24  # three products of TF32, and float32
    bound = 1e-5 if backend == "eager" else scores.abs().max().item() * 2.0**-bits * head_dim**0.5 / 4
    assert norms(found, exact)[0] < bound


@pytest.mark.parametrize("queries", [1, 4])  # decoding, and tiles of queries
@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_a_row_whose_scores_are_all_minus_infinity_has_no_weight(backend, queries):
    q, k, v = (torch.ones(1, n, 1, 2, device=DEVICE) for n in (queries, 4, 4))
    k[:, :2] = -torch.inf
    out, lse = dilated_attention(q, k, v, DilatedPattern((2,), (1,)), query_start=0, backend=backend, return_lse=True)
    expected = torch.tensor([[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2, device=DEVICE)
    torch.testing.assert_close(out[0, :, 0], expected[:queries])
    assert lse[0, 0, :2].eq(-torch.inf).all()


@pytest.mark.parametrize("head_dim", [129, pytest.param(256, marks=pytest.mark.full)])
def test_the_widest_heads_equal_the_reference(head_dim):
    tensors, pattern = drawn(20, 2, 1, head_dim, device=DEVICE), DilatedPattern((8, 20), (1, 3))
    found, expected = attended(tensors, pattern, "triton", is_causal=True), exactly(tensors, pattern, is_causal=True)
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize(
    ("allowed", "tiles", "few_rows"), [("ieee", "tf32x3", "ieee"), ("tf32", "tf32", "tf32")], ids=["ieee", "tf32"]
)
def test_float32_is_multiplied_as_torchs_own_setting_says(monkeypatch, allowed, tiles, few_rows):
    seen = []

    def watched(make, *more, **options):
        def noted(*made):
            starts = make(*made)
            seen.extend(each.named["PRECISION"] for each in starts if "PRECISION" in each.named)
            return starts

        return start(noted, *more, **options)

    for module in (launch, launch.decode):
        monkeypatch.setattr(module, "start", watched)
    q, k, v = (torch.randn(1, 16, 1, 16, device=DEVICE).requires_grad_() for _ in range(3))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = allowed
    try:
        dilated_attention(q, k, v, DilatedPattern((16,), (1,)), backend="triton").sum().backward()
        with torch.no_grad():
            dilated_attention(q[:, -1:], k, v, DilatedPattern((16,), (1,)), query_start=15, backend="triton")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == [tiles] * 3 + [few_rows]


def test_float64_is_refused_and_the_interpreter_is_never_chosen_by_itself():
    q = torch.zeros(1, 4, 1, 8, device=DEVICE, dtype=torch.bfloat16)
    pattern = DilatedPattern((4,), (1,))
    assert "got float64" in explain_backend(*[q.double()] * 3, pattern).reasons["triton"]
    fused = "sdpa"
    if DEVICE == "cuda":
        fused = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    assert explain_backend(q, q, q, pattern).chosen == fused
    assert explain_backend(*[q.float()] * 3, pattern).chosen == "sdpa"


def test_causality_a_mask_its_segment_or_the_last_one_may_cut_off_a_tile_of_keys():
    cases = [(256, 2, False, False), (256, 2, True, True), (192, 1, False, True), (256, 4, False, True)]
    for segment_length, rate, is_causal, is_masked in [*cases, (384, 1, False, True)]:
        pattern = DilatedPattern((segment_length,), (rate,))
        one = schedule.pass_of(pattern, (0,), 1024)
        q = torch.empty(1, 1024, 1, 128)
        for more, expected in (
            ({}, is_masked),
            ({"key_padding_mask": torch.zeros(1, 1024, dtype=torch.bool)}, True),
            ({"cu_seqlens": torch.tensor([0, 1024], dtype=torch.int32)}, True),
        ):
            call = Request(pattern, is_causal=is_causal, **more)
            assert launch.hopper.masked(q, q, call, (one,)) == (expected,)


def test_a_call_is_served_where_tma_can_load_all_rows_of_a_branch():
    for branches, length, serves in ((((8, 9), (1, 4)), 10, True), (((9,), (4,)), 10, False), (((8,), (4,)), 8, True)):
        q = torch.zeros(1, length, 1, 64, dtype=torch.bfloat16)
        call = Request(DilatedPattern(*branches))
        assert not launch.hopper.refusal(q, call)
        assert ("TMA" in launch.hopper.refusal_of_keys(q, q, call)) == (not serves)


NAMED = {  # branches, length, options, an expanded tensor, and whether "hopper" runs its kernels forward and backward
    "plain": (((16, 48), (1, 2)), 48, {}, None, True, True),
    "causal": (((16, 48), (1, 2)), 48, {"is_causal": True}, None, True, True),
    "k is expanded": (((16,), (1,)), 48, {}, "k", True, True),
    "dout is expanded": (((16,), (1,)), 48, {}, "dout", True, True),
    "a branch out of reach": (((16, 64), (1, 7)), 48, {}, None, True, True),
    "queries that start later": (((16, 48), (1, 2)), 48, {"query_start": 8}, None, True, False),
    "exported: no branch in reach": (((64,), (7,)), 48, {}, None, False, False),
    "exported: decoding": (((48,), (1,)), 48, {"query_start": 47}, None, False, False),
}


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", NAMED)
def test_triton_starts_no_warp_specialised_kernel_and_hopper_its_own(monkeypatch, case, is_deterministic):
    """By what the backends of these names start; nothing runs, so that no GPU is needed."""
    branches, length, options, expanded, *on_hopper = NAMED[case]
    begun, read = [], []

    def of_hopper(*tensors, **_):
        read.extend(x for x in tensors if isinstance(x, torch.Tensor))
        return Start("warp-specialised", (1,), (), {})

    monkeypatch.setattr(launch.hopper, "forward_start", of_hopper)
    monkeypatch.setattr(launch.hopper, "backward_start", of_hopper)
    for module in (launch, launch.decode):
        monkeypatch.setattr(module, "start", gathering(begun))
    call = Request(DilatedPattern(*branches), scale=1.0, **options)
    tensors = drawn(length - call.first_query, 2, 1, 16, keys=length, dtype=torch.bfloat16, device=DEVICE)
    named = dict(zip(("q", "k", "v", "dout"), tensors, strict=True))
    if expanded:
        named[expanded] = named[expanded][:, :1].expand(named[expanded].shape)
    given = Tensors(named["q"], named["k"], named["v"])
    for name in ("hopper", "triton"):
        forward, backward = backends_for(call.pattern)[name].functions(given.q.device)
        with determinism(is_deterministic):
            out, lse = forward(given, call)
            ran = [any(each.kernel == "warp-specialised" for each in begun)]
            begun.clear()
            backward(named["dout"], given, out, lse, call)
        ran.append(any(each.kernel == "warp-specialised" for each in begun))
        assert len(begun) > 1  # the sums over dout * out at least
        begun.clear()
        assert ran == (on_hopper if name == "hopper" else [False, False])
    assert not any(0 in x.stride() for x in read), "the copy engine takes no tensor that is expanded"


def test_a_backward_of_a_few_queries_is_left_to_the_plain_kernels(monkeypatch):
    monkeypatch.delattr(launch.hopper, "backward_start")
    torch.manual_seed(0)
    q, dout, out = torch.randn(3, 1, 5, 1, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 48, 1, 16, device=DEVICE)
    call = Request(DilatedPattern((24,), (1,)), scale=0.25, query_start=20)
    grads = launch.backward_on_hopper(dout, Tensors(q, k, v), out, torch.zeros(1, 1, 5, device=DEVICE), call)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_a_scale_by_which_float32_cannot_be_divided_is_refused():
    q, k, v = torch.randn(3, 1, 8, 1, 4, device=DEVICE)
    pattern = DilatedPattern((4, 8), (1, 2))
    with pytest.raises(ValueError, match=r"serves a scale of at least 7\.9e-31, got 1e-39"):
        dilated_attention(q, k, v, pattern, scale=1e-39, backend="triton")
    out = dilated_attention(q, k, v, pattern, scale=1e-30, backend="triton")
    torch.testing.assert_close(out, dilated_attention(q, k, v, pattern, scale=1e-30, backend="reference"))


def test_more_positions_than_the_kernels_count_are_refused():
    k, pattern = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, 2**30 + 1, 1, 1), DilatedPattern((2**32,), (2**28,))
    most = "1,073,741,824"
    with pytest.raises(ValueError, match=f"serves up to {most} positions, got 1,073,741,825"):
        dilated_attention(k, k, k, pattern, backend="triton")
    with pytest.raises(ValueError, match=f"k must have up to {most} rows with backend='triton', got 1,073,741,825"):
        dilated_attention(k[:, :1], k, k, pattern, query_start=0, backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests' interpreter is not used where kernels are compiled")
@pytest.mark.parametrize("place", [6, -1])
def test_a_kernel_that_leaves_its_tensors_is_refused(place):
    total, more = torch.zeros(8, 1, 1, 4)[:6], torch.ones(2, 1, 1, 4)
    rows.add_rows(total, (torch.tensor([0, 5]),), more)
    assert total.sum() == more.sum()
    with pytest.raises(InterpreterError, match="add_kernel reads outside of its tensors"):
        rows.add_rows(total, (torch.tensor([0, place]),), more)
    out, delta = torch.zeros(1, 8, 2, 32), torch.zeros(1, 2, 8).flatten()[:15]
    with pytest.raises(InterpreterError, match="delta_kernel writes outside of its tensors"):
        start(lambda: [grid_launch.delta_of(out, out, delta)], (out,))


def test_kernels_of_another_dtype_are_of_another_kind_whichever_start_has_it():
    """A kernel that does not compile for one dtype is not refused for another."""

    class Kernel:
        params = ()

    pairs = product((torch.float16, torch.bfloat16), repeat=2)
    kinds = {
        _kind_of_kernels([Start(Kernel, (1,), (torch.zeros(1, dtype=dtype),), {}) for dtype in pair]) for pair in pairs
    }
    assert len(kinds) == 4
