"""The fused kernels equal the oracle; without a GPU they run here in Triton's interpreter, at small sizes."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from cases import BRANCHES, LAYOUTS, check, in_pairs, tiles_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hilbert_lib import DilatedPattern, Ordering, dilated_attention, explain_backend
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.call import Call
from hilbert_lib.pattern import MIXING_RULES, OFFSET_RULES

launch = pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
from hilbert_lib.attention.triton import arguments, schedule  # noqa: E402
from hilbert_lib.attention.triton.arguments import launch_arguments  # noqa: E402
from hilbert_lib.attention.triton.hopper import division  # noqa: E402
from hilbert_lib.attention.triton.start import Start, start  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = ("small", "small_grouped", "shorter")
STORED = ("none", "hilbert", "random", "chunked")
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, STORED, DTYPES, SMALL, LAYOUTS, [False, True])


@in_pairs(AXES, 5)
def test_output_lse_and_gradients_equal_the_oracle(case):
    branches, offsets, mixing, ordering, dtype, shape, layout, is_causal = case
    check(branches, offsets, mixing, ordering, "triton", dtype, shape, layout, is_causal, device=DEVICE)


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


OPTIONS = ["plain", "causal", "padding", "dropout", "decoding", "ordering"]
COMBINED = {  # of branches and options; `make test-all` runs all
    *(("coprime", "plain"), ("coprime", "ordering"), ("coprime", "dropout"), ("geometric", "decoding")),
    *(("unsorted", "padding"), ("unsorted", "causal"), ("unsorted", "decoding"), ("geometric", "ordering")),
    *(("across", "plain"), ("across", "causal")),
}


def only(some: set[tuple], every) -> list:
    """Cases of which every run has some, and the full one all."""
    return [pytest.param(*case, marks=[] if case in some else pytest.mark.full) for case in every]


@pytest.mark.parametrize(("branches", "options"), only(COMBINED, product(PASSES, OPTIONS)))
def test_several_passes_and_every_option_equal_the_reference(branches, options):
    branches, length = PASSES[branches]
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, length, heads, 4, generator=generator) for heads in (2, 1, 1, 2))
    call = Call(DilatedPattern(*branches), scale=0.5, is_causal=options in ("causal", "decoding", "dropout"))
    stored, order, theirs = (k, v), Ordering.linear(length), call
    if options == "padding":
        call = theirs = replace(call, key_padding_mask=torch.rand(1, length, generator=generator) < 0.3)
    elif options == "dropout":
        call = theirs = replace(call, dropout_p=0.3, seed=torch.tensor([2**40 + 5]))
    elif options == "decoding":
        start = length - 19
        q, dout = q[:, start : start + 9], dout[:, start : start + 9]
        call = theirs = replace(call, query_start=start)
    elif options == "ordering":
        order = Ordering.from_curve("hilbert", length)
        stored = order.apply(k, dim=1), order.apply(v, dim=1)
        call = replace(call, inverse=order.inverse.int())
    expected, expected_lse = reference.forward(q, k, v, theirs)
    expected_grads = reference.backward(dout, q, k, v, expected, expected_lse, theirs)
    on_device = [x.to(DEVICE) for x in (q, *stored, dout)]
    call = replace(call, **{f: x.to(DEVICE) for f, x in vars(call).items() if isinstance(x, torch.Tensor)})
    out, lse = launch.forward(*on_device[:3], call)
    dq, dk, dv = (x.cpu() for x in launch.backward(on_device[3], *on_device[:3], out, lse, call))
    torch.testing.assert_close(out.cpu(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=2e-5, rtol=0)
    grads = dq, order.undo(dk, dim=1), order.undo(dv, dim=1)
    torch.testing.assert_close(grads, expected_grads, atol=2e-5, rtol=0)


def test_bits_near_the_bound_are_dropped_as_elsewhere():
    # By the 32-bit number nearest to 0.9 as the bound, query 1 would keep key 1.
    length, seed = 16, torch.tensor([288271], device=DEVICE)
    call = Call(DilatedPattern((length,), (1,)), scale=1.0, dropout_p=0.9, seed=seed)
    q, v = torch.zeros(1, length, 1, 16, device=DEVICE), torch.eye(length, device=DEVICE)[None, :, None]
    out, _ = launch.forward(q, q, v, call)
    assert out[0, 1, 0, 1] == 0
    expected, _ = reference.forward(q, q, v, call)
    torch.testing.assert_close(out, expected)


ONE_PASS, TWO_PASSES = (1, 2), (3, 4)  # rates
SPOILT = {*((ONE_PASS, torch.nan, n) for n in range(3)), (ONE_PASS, torch.inf, 2), (TWO_PASSES, torch.nan, 2)}
SPOILT |= {(TWO_PASSES, torch.inf, 1)}


@pytest.mark.parametrize(
    ("rates", "bad", "which"), only(SPOILT, product((ONE_PASS, TWO_PASSES), (torch.nan, torch.inf), range(3)))
)
def test_a_token_that_is_not_finite_stays_in_its_rows(rates, bad, which):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 24, 1, 4, generator=generator, device="cpu").to(DEVICE) for _ in range(3)]
    pattern = DilatedPattern((8, 16), rates)
    clean = dilated_attention(*tensors, pattern, is_causal=True, backend="triton")
    tensors[which][0, 12] = bad
    out = dilated_attention(*tensors, pattern, is_causal=True, backend="triton")
    for query in range(24):
        keys = pattern.keys(query, kv_head=0, kv_heads=1, length=24, is_causal=True)
        if query == 12 and len(keys) if which == 0 else 12 in keys:
            # An infinite key may have weight 0.
            assert (which == 1 and bad == torch.inf) or not out[0, query].isfinite().any()
        else:
            assert torch.equal(out[0, query], clean[0, query])


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    q, k, v = (torch.randn(1, 40, 2, 8, device=DEVICE).requires_grad_() for _ in range(3))

    def run():
        out = dilated_attention(q, k, v, DilatedPattern((8, 40), (1, 3)), is_causal=True, backend="triton")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_large_scores_and_rows_with_one_key_are_exact(magnitude):
    q = torch.full((1, 16, 1, 1), magnitude, device=DEVICE)
    k = torch.arange(16.0, device=DEVICE).view(1, 16, 1, 1) % 3
    v = torch.randn(1, 16, 1, 1, device=DEVICE)
    arguments = (q, k, v, DilatedPattern((16,), (1,)))
    out = dilated_attention(*arguments, scale=1.0, backend="triton")
    expected = dilated_attention(*(x.double() for x in arguments[:3]), arguments[3], scale=1.0, backend="reference")
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(dilated_attention(q, k, v, DilatedPattern((1,), (1,)), backend="triton"), v)


@pytest.mark.parametrize("head_dim", [129, pytest.param(256, marks=pytest.mark.full)])
def test_the_widest_heads_equal_the_reference(head_dim):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 20, heads, head_dim, generator=generator) for heads in (2, 1, 1, 2))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    leaves = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    found = []
    for inputs, backend in ((exact, "reference"), (leaves, "triton")):
        out = dilated_attention(*inputs, DilatedPattern((8, 20), (1, 3)), is_causal=True, backend=backend)
        found.append([out, *torch.autograd.grad(out, inputs, dout.to(out))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_float32_is_multiplied_as_torchs_own_setting_says(monkeypatch, allowed):
    seen = []

    def watched(starts):
        seen.extend(each.named["PRECISION"] for each in starts if "PRECISION" in each.named)
        start(starts)

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
    assert seen == [allowed] * 4


def test_float64_is_refused_and_the_interpreter_is_never_chosen_by_itself():
    q = torch.zeros(1, 4, 1, 8, device=DEVICE, dtype=torch.bfloat16)
    pattern = DilatedPattern((4,), (1,))
    assert "got float64" in explain_backend(*[q.double()] * 3, pattern).reasons["triton"]
    assert explain_backend(q, q, q, pattern).chosen == ("triton" if DEVICE == "cuda" else "sdpa")
    assert explain_backend(*[q.float()] * 3, pattern).chosen == "sdpa"


branches = st.lists(
    st.integers(1, 60).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w))), min_size=1, max_size=4
)


@settings(max_examples=100)
@given(
    branches,
    st.integers(1, 150),
    st.sampled_from(OFFSET_RULES),
    st.integers(1, 3),
    st.sampled_from([4, 16]),
    st.sampled_from([0, 4, 16, 256]),
)
@example([(50, 1), (100, 3)], 700, "zero", 1, 16, 40)  # several tables of several chunks, of two kinds
def test_tiles_hold_the_rows_of_their_branches_once(pairs, length, rule, kv_heads, block, together):
    pattern = DilatedPattern(*map(tuple, zip(*pairs, strict=True)), offsets=rule)
    todo = schedule.passes(pattern, length, block)
    assert sorted(i for one in todo for i in one.branches) == list(range(len(pairs)))
    assert [one.covers_all for one in todo] == [False] * (len(todo) - 1) + [len(todo) > 1]
    position = torch.arange(length)
    for one in todo:
        # With few together, several tables of several chunks.
        tables = schedule.tables(pattern, one, length, kv_heads, block, together, torch.device("cpu"))
        assert together or tables.chunk == one.chunk
        assert tables.chunk == one.chunk or tables.items.shape[2] <= together
        for g in range(kv_heads):
            tiles = list(tiles_of(tables, one, g, length))
            visited = torch.cat([torch.empty(0, dtype=torch.int64), *tiles]).sort().values
            needed = torch.full((length,), one.covers_all)
            for i in one.branches:
                inside = pattern.contains(i, position, g, kv_heads)
                needed |= inside
                if one.is_aligned:
                    assert all(len(inside[tile].unique()) == 1 for tile in tiles)
                    assert all(len((tile // pattern.segment_lengths[i]).unique()) == 1 for tile in tiles)
            assert len(visited.unique()) == len(visited)
            assert tables.cut or all(len(tile) == block for tile in tiles)
            assert torch.isin(position[needed], visited).all()
            assert all((tile.diff() > 0).all() for tile in tiles)


@pytest.mark.parametrize("dilation_rates", [(1, 2, 4), (1, 2, 6)])
def test_the_tiles_of_several_chunks_stand_together_the_longest_first(dilation_rates):
    pattern, length, heads = DilatedPattern((64, 128, 256), dilation_rates), 4096, 2
    (one,) = schedule.passes(pattern, length, 8)
    tables = schedule.tables(pattern, one, length, heads, 8, 256, torch.device("cpu"))
    assert tables.chunk % one.chunk == 0
    assert one.chunk < tables.chunk <= length
    assert tables.items.shape[1] == 1
    for g in range(heads):
        counts = [
            sum(bool(pattern.contains(i, tile[:1], g, heads)) for i in one.branches)
            for tile in tiles_of(tables, one, g, length)
        ]
        of_one = tables.items.shape[2]
        assert all(
            counts[at : at + of_one] == sorted(counts[at : at + of_one], reverse=True)
            for at in range(0, len(counts), of_one)
        )


@pytest.mark.parametrize("segment_lengths", [(64,), (64, 64)])
def test_chunks_stand_apart_where_all_tiles_are_equally_long(segment_lengths):
    pattern = DilatedPattern(segment_lengths, (1,) * len(segment_lengths))
    (one,) = schedule.passes(pattern, 4096, 8)
    tables = schedule.tables(pattern, one, 4096, 1, 8, 256, torch.device("cpu"))
    assert tables.chunk == one.chunk


@pytest.mark.parametrize(
    ("branches", "length"),
    [
        *((tuple((2048 << n, 1 << n) for n in range(5)), length) for length in (36864, 67584, 50000, 65537)),
        (((2048, 1), (2**20, 3)), 8192),
        (((2048, 1), (2**20, 5)), 12288),
    ],
)
def test_few_programs_are_started_for_tiles_past_the_end(branches, length):
    pattern = DilatedPattern(*zip(*branches, strict=True))
    (one,) = schedule.passes(pattern, length, 128)
    programs = [
        tables.items.shape[2] * -(-length // tables.chunk)
        for tables in (schedule.tables(pattern, one, length, 1, 128, each, torch.device("cpu")) for each in (0, 512))
    ]
    assert programs[0] <= programs[1] <= 1.05 * programs[0]


PARTS = ["one part", "two parts", "two parts, with NaN"]
GOING_ON = {
    *(("head", False, False, "one part", 2), ("head", True, False, "two parts", 1)),
    *(("head", True, True, "two parts", 2), ("head", True, True, "two parts, with NaN", 1)),
    *(("zero", False, True, "two parts, with NaN", 2), ("zero", False, True, "one part", 1)),
}
LAID_OUT = [("head", True), ("head", False), ("zero", False)]  # offsets, whether heads are stored first
EVERY = [(*how, *rest) for how, *rest in product(LAID_OUT, [False, True], PARTS, [1, 2])]


# finest: the first rates; of rate 2 some rows are in no branch.
@pytest.mark.parametrize(("offsets", "heads_first", "is_causal", "parts", "finest"), only(GOING_ON, EVERY))
def test_passes_that_go_on_from_the_results_themselves_equal_the_oracle(
    monkeypatch, offsets, heads_first, is_causal, parts, finest
):
    # As where the warp-specialised kernels compute the finest rates, in one launch or two; plain ones stand in. The
    # NaN are what tiles that are cut off may give: they are computed once more.
    served = []

    def forward_of_one(q, k, v, call, one, out, lse, flag, *, first):
        served.append(one.branches)
        config = launch.config_of("forward", q)
        grid, shared = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=True)

        def run(*arguments, **named):
            launch.forward_kernel[grid](*arguments, **named)
            if parts.endswith("NaN"):
                out.fill_(torch.nan)
                flag.fill_(1)

        return Start({grid: run}, grid, (q, k, v, out, lse, out, lse, q), shared | {"IF_FLAG": False})

    def backward_of_one(dout, q, k, v, lse, delta, dk, dv, call, one, sums, *, first):
        strides = dict(zip(("stride_db", "stride_dn", "stride_dh"), dout.stride()[:3], strict=True))
        grid, shared = launch_arguments(
            q, k, v, call, one, launch.config_of("dkv", q), rows="keys", first=first, last=True
        )

        def run(*arguments, **named):
            launch.dkv_kernel[grid](*arguments, **named)
            if sums is not None:
                config = launch.config_of("dq", q)
                dq_grid, more = launch_arguments(q, k, v, call, one, config, rows="queries", first=first, last=False)
                launch.dq_kernel[dq_grid](q, k, v, dout, lse, delta, sums, sums, **more, **strides)

        return Start({grid: run}, grid, (q, k, v, dout, lse, delta, dk, dv, dk, dv), shared | strides)

    def start(starts):  # what stands in is compiled when it is started
        for each in starts:
            each.kernel[each.grid](*each.arguments, **each.named)

    def launches(*asked):
        assert asked == (pattern, 90, 2, is_causal)
        length = 90
        cuts = (0, 2) if parts == "one part" else (0, 1, 2)
        some = *pairwise(cuts), (2, 3), (3, 4)
        every = tuple(schedule.pass_of(pattern, tuple(range(a, b)), length) for a, b in some)
        return every[:-2], every[-2:]

    monkeypatch.setattr(division, "launches", launches)
    monkeypatch.setattr(launch.hopper, "runs", lambda *_: True)
    monkeypatch.setattr(launch.hopper, "forward", forward_of_one)
    monkeypatch.setattr(launch.hopper, "backward", backward_of_one)
    monkeypatch.setattr(launch, "start", start)
    # What nobody has written yet may be anything.
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(*shape, torch.nan, **options))
    pattern = DilatedPattern((48, 96, 96, 96), (finest, finest, 24, 48), offsets=offsets)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 90, heads, 16, device=DEVICE) for heads in (4, 2, 2, 4))
    if heads_first:
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = dilated_attention(*exact, pattern, is_causal=is_causal, backend="reference")
    expected = out, *torch.autograd.grad(out, exact, dout.double())
    call = Call(pattern, is_causal=is_causal, scale=0.25)
    found, lse = launch.forward(q, k, v, call)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            grads = launch.backward(dout, q, k, v, found, lse, call)
        finally:
            torch.use_deterministic_algorithms(False)
        for a, b in zip((found, *grads), expected, strict=True):
            assert a.is_contiguous()  # as the operators promise, whatever the strides of q, k and v
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)
    assert set(served) == ({(0, 1)} if parts == "one part" else {(0,), (1,)})


def test_causality_its_segment_or_the_last_one_may_cut_off_a_tile_of_keys():
    cases = [(256, 2, False, False), (256, 2, True, True), (192, 1, False, True), (256, 4, False, True)]
    for segment_length, rate, is_causal, is_masked in [*cases, (384, 1, False, True)]:
        pattern = DilatedPattern((segment_length,), (rate,))
        call, one = Call(pattern, is_causal=is_causal), schedule.pass_of(pattern, (0,), 1024)
        assert launch.hopper.is_masked(call, one, 1024, 128) == is_masked


def test_a_call_is_served_where_the_copy_engine_reaches_some_branch():
    for branches, length, serves in ((((8, 9), (1, 4)), 10, True), (((9,), (4,)), 10, False), (((8,), (4,)), 8, True)):
        q = torch.zeros(1, length, 1, 64, dtype=torch.bfloat16)
        assert launch.hopper.serves(q, length, Call(DilatedPattern(*branches))) == serves


def test_a_backward_of_a_few_queries_is_left_to_the_plain_kernels(monkeypatch):
    monkeypatch.setattr(launch.hopper, "runs", lambda *_: True)
    monkeypatch.delattr(launch.hopper, "backward")
    torch.manual_seed(0)
    q, dout, out = torch.randn(3, 1, 5, 1, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 48, 1, 16, device=DEVICE)
    call = Call(DilatedPattern((24,), (1,)), scale=0.25, query_start=20)
    grads = launch.backward(dout, q, k, v, out, torch.zeros(1, 1, 5, device=DEVICE), call)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("queries", [1, 4])  # decoding, and tiles of queries
def test_a_row_whose_scores_are_all_minus_infinity_has_no_weight(queries):
    q, k, v = (torch.ones(1, n, 1, 2, device=DEVICE) for n in (queries, 4, 4))
    k[:, :2] = -torch.inf
    out, lse = dilated_attention(q, k, v, DilatedPattern((2,), (1,)), query_start=0, backend="triton", return_lse=True)
    expected = torch.tensor([[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2, device=DEVICE)
    torch.testing.assert_close(out[0, :, 0], expected[:queries])
    assert lse[0, 0, :2].eq(-torch.inf).all()


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
