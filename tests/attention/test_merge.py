"""The merge is one associative, commutative operation with a neutral element; the fused one does the same at once."""

import pytest
import torch
from cases import BRANCHES, LAYOUTS, SHAPES, attended, check, drawn, in_pairs, refusals

from hilbert_lib import DilatedPattern, merge_attention
from hilbert_lib.attention import merge as merging
from hilbert_lib.attention.backends import strided
from hilbert_lib.attention.merge import merge
from hilbert_lib.attention.request import WORKING_DTYPE, Request
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES


def partial(keys: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of three rows over some of eight keys; no keys give the neutral element."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 8, generator=generator, dtype=torch.float64)[:, keys]
    v = torch.randn(8, 2, generator=generator, dtype=torch.float64)[keys]
    if not keys:
        return torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# The last four: a key in both parts counts twice; no keys are neutral.
MERGED = [([0, 1, 2], [3, 4, 5, 6, 7]), ([0, 1], [1, 2]), ([], [1, 2]), ([1, 2], []), ([], [])]


@pytest.mark.parametrize(("one", "other"), MERGED, ids=str)
def test_merge_is_attention_over_both(one, other):
    torch.testing.assert_close(merge(*partial(one), *partial(other)), partial(one + other))


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_lse_neither_overflow_nor_vanish(shift):
    (out_a, lse_a), (out_b, lse_b) = partial([0, 1]), partial([2, 3])
    out, lse = merge(out_a, lse_a + shift, out_b, lse_b + shift)
    torch.testing.assert_close(out, partial([0, 1, 2, 3])[0])
    torch.testing.assert_close(lse, partial([0, 1, 2, 3])[1] + shift)


@pytest.mark.parametrize(("parts", "centre"), [(2, 0.0), (2, 100.0), (8, 0.0)])
def test_weights_in_float32_lose_no_digits_to_a_large_lse_or_to_many_parts(parts, centre):
    generator = torch.Generator().manual_seed(0)
    lse = torch.randn(parts, 20_000, generator=generator) * 3 + centre
    out = torch.randn(parts, 20_000, 4, generator=generator)
    exact = (lse.double().softmax(0)[..., None] * out.double()).sum(0)
    merged = out[0], lse[0]
    for part in zip(out[1:], lse[1:], strict=True):
        merged = merge(*merged, *part)
    unit = torch.finfo(torch.float32).eps  # outputs are of the order of 1
    assert (merged[0].double() - exact).abs().max() < 10 * unit


def some_results(dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """outs and lses of three calls; each has rows without keys, and a row of no call has any."""
    generator = torch.Generator().manual_seed(0)
    lse = 3 * torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64)
    lse[torch.rand(3, 2, 4, 5, generator=generator) < 0.3] = -torch.inf
    lse[:, 0, 1, 2] = -torch.inf
    out = torch.randn(3, 2, 5, 4, 3, generator=generator, dtype=torch.float64)
    out = out.where(lse.transpose(2, 3)[..., None] != -torch.inf, 0.0)
    return list(out.to(dtype)), list(lse.to(torch.promote_types(dtype, torch.float32)))


def merged_by_definition(outs, lses) -> tuple[torch.Tensor, ...]:
    """out, lse and the weight of each call in every row, in float64."""
    lses = torch.stack(list(lses)).double()
    lse = lses.logsumexp(0)
    weights = (lses - lse.nan_to_num(neginf=0.0)).exp().transpose(2, 3)[..., None]
    return (weights * torch.stack(list(outs)).double()).sum(0), lse, weights


@pytest.mark.parametrize("calls", [3, 1])
def test_merged_calls_and_their_gradients_are_what_the_definition_says(calls):
    outs, lses = ([x.requires_grad_() for x in each[:calls]] for each in some_results())
    out, lse = merge_attention(outs, lses)
    right, right_lse, weights = merged_by_definition(*([x.detach() for x in each] for each in (outs, lses)))
    torch.testing.assert_close((out, lse), (right, right_lse), atol=1e-14, rtol=1e-14)
    assert (lse == -torch.inf).sum() >= 1
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (*outs, *lses), (dout, dlse))
    towards = (dout * (torch.stack(outs) - right)).sum(-1) + dlse.transpose(1, 2)
    wanted = *(weights * dout), *(weights[..., 0] * towards).transpose(2, 3)
    torch.testing.assert_close(grads, wanted, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merged_calls_are_summed_in_float32_and_rounded_once(dtype):
    outs, lses = some_results(dtype)
    out, lse = torch.compile(merge_attention, backend="eager", fullgraph=True)(outs, lses)
    right, right_lse, _ = merged_by_definition(outs, lses)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-6, rtol=0)
    # Half a unit in the last place, and float32's error.
    assert ((out.double() - right).abs() <= torch.finfo(dtype).eps / 2 * right.abs() + 1e-6).all()
    torch.testing.assert_close(merge_attention(outs[:1], lses[:1]), (outs[0], lses[0]))


OUT, LSE = torch.ones(2, 3, 4, 5), torch.ones(2, 4, 3)
test_wrong_results_to_merge_are_named = refusals(
    {
        TypeError: [
            (lambda: merge_attention(OUT, [LSE]), "outs must be a list of tensors, got Tensor"),
            (lambda: merge_attention([OUT], None), "lses must be a list of tensors, got NoneType"),
            (lambda: merge_attention([None], [LSE]), r"outs\[0\] must be a tensor, got NoneType"),
            (lambda: merge_attention([OUT.int()], [LSE]), r"outs\[0\] must be float16, .* got torch.int32"),
            (lambda: merge_attention([OUT, OUT.half()], [LSE] * 2), r"outs\[1\] must be torch.float32 .*float16"),
            (
                lambda: merge_attention([OUT.half()] * 2, [LSE, LSE.half()]),
                r"lses\[1\] must be torch.float32 .*float16",
            ),
            (lambda: merge_attention([OUT], [LSE.double()]), r"lses\[0\] must be torch.float32 .*float64"),
            (lambda: merge_attention(outs=[OUT], lse=[LSE]), "no argument 'lse'; did you mean 'lses'"),
        ],
        ValueError: [
            (lambda: merge_attention([], []), "outs must hold at least one tensor, got none"),
            (lambda: merge_attention([OUT] * 2, [LSE]), r"lses must hold as many tensors as outs \(2\), got 1"),
            (lambda: merge_attention([OUT[0]], [LSE]), r"outs\[0\] must be \(batch, seq, heads, head_dim\), got"),
            (lambda: merge_attention([OUT, OUT[:1]], [LSE] * 2), r"outs\[1\] must have shape \(2, 3, 4, 5\) .* \(1, 3"),
            (lambda: merge_attention([OUT], [LSE.mT]), r"lses\[0\] must have shape \(2, 4, 3\) .* got \(2, 3, 4\)"),
            (lambda: merge_attention([OUT, OUT.to("meta")], [LSE] * 2), r"outs\[1\] must be on the device .* got meta"),
        ],
    }
)


def some_rows(dtype: torch.dtype, batch: int) -> tuple[torch.Tensor, ...]:
    """out and lse of a whole by (position, KV head), places in it, and out and lse for these; some saw no keys."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.promote_types(dtype, torch.float32)
    positions, kv_heads, group, head_dim = 300, 3, 2, 5

    def drawn(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        lse = 3 * torch.randn(shape, generator=generator, dtype=sums)
        lse.flatten()[torch.randperm(lse.numel(), generator=generator)[::3]] = -torch.inf
        out = torch.randn(*shape, head_dim, generator=generator, dtype=sums)
        return torch.where(lse[..., None] == -torch.inf, 0.0, out).to(dtype), lse

    def by_row(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (kv_heads, group)).movedim(0, 3)

    rows = torch.randperm(positions * kv_heads, generator=generator)[:290].view(2, 29, 5)
    whole = map(by_row, drawn(batch, positions, kv_heads * group))
    return *whole, (rows // kv_heads, rows % kv_heads), *drawn(*rows.shape, group, batch)


@pytest.mark.parametrize(("dtype", "batch"), [(torch.float16, 2), (torch.float32, 1), (torch.float64, 2)])
def test_rows_are_merged_and_added_in_place_and_the_others_left_alone(dtype, batch, monkeypatch):
    pytest.importorskip("hilbert_lib.attention.triton.rows", reason="triton has no build for this platform")
    out, lse, at, other_out, other_lse = some_rows(dtype, batch)
    whole = torch.zeros(1000, *other_out.shape[3:], dtype=lse.dtype)
    merged, merged_lse = merge(out[at].to(lse.dtype), lse[at], other_out.to(lse.dtype), other_lse)
    wanted = [x.clone() for x in (out, lse, out, whole)]
    wanted[0][at], wanted[1][at] = merged.to(dtype), merged_lse
    wanted[2][at] += other_out
    at_first = at[0].flatten().unique()  # of one index
    wanted[3][at_first] = other_out.flatten(0, 2)[: len(at_first)].to(lse.dtype)
    for by_kernel in (False, True):
        monkeypatch.setattr(merging, "kernel_serves", lambda x, answer=by_kernel: answer)
        got = [x.clone() for x in (out, lse, out, whole)]
        merging.merge_rows(*got[:2], at, other_out, other_lse)
        merging.add_rows(got[2], at, other_out)
        merging.add_rows(got[3], (at_first,), other_out.flatten(0, 2)[: len(at_first)])
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_two_results_are_merged_and_rounded_once(dtype, monkeypatch):
    pytest.importorskip("hilbert_lib.attention.triton.rows", reason="triton has no build for this platform")
    generator = torch.Generator().manual_seed(3)
    outs = [torch.randn(2, 77, 3, 24, generator=generator, dtype=torch.float64).to(dtype) for _ in "ab"]
    lses = [torch.randn(2, 3, 77, generator=generator, dtype=WORKING_DTYPE[dtype]) for _ in "ab"]
    lses[0][0, :, :5], lses[1][1, 1] = -torch.inf, -torch.inf
    lses[0][1, 1, 70:] = -torch.inf  # rows that saw no key at all
    rows = [x.to(WORKING_DTYPE[dtype]).transpose(1, 2) for x in outs]
    merged, lse = merge(rows[0], lses[0], rows[1], lses[1])
    for by_kernel in (False, True):
        monkeypatch.setattr(merging, "kernel_serves", lambda x, answer=by_kernel: answer)
        for to in (dtype, WORKING_DTYPE[dtype]):
            wanted = merged.transpose(1, 2).to(to), lse
            found = merging.merge_results(outs[0], lses[0], outs[1], lses[1], to)
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_pairs_of_tensors_are_added_and_rounded_once(dtype, monkeypatch):
    pytest.importorskip("hilbert_lib.attention.triton.rows", reason="triton has no build for this platform")
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(2, 77, 3, 24, generator=generator, dtype=torch.float64).to(dtype) for _ in "xy")
    working = WORKING_DTYPE[dtype]
    for by_kernel in (False, True):
        monkeypatch.setattr(merging, "kernel_serves", lambda x, answer=by_kernel: answer)
        for first in (x, x.to(working)):
            for to in (dtype, working):
                wanted = (first.to(working) + y.to(working)).to(to)
                nothing = first[:0]
                found = merging.add_tensors([first, nothing, y], [y, nothing, first], [to, working, to])
                assert torch.equal(found[0], wanted)
                assert torch.equal(found[2], wanted)
                assert found[1].shape == nothing.shape
                assert found[1].dtype == working


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 4])
def test_parts_are_added_up_and_rounded_once(count, dtype):
    rows = pytest.importorskip("hilbert_lib.attention.triton.rows", reason="triton has no build for this platform")
    parts = torch.randn(count, 2, 77, 3, 24, generator=torch.Generator().manual_seed(5))  # more than one tile
    total = torch.empty(parts.shape[1:], dtype=dtype)
    rows.start(lambda: [rows.sum_of_parts(parts, total)], (parts, total))
    wanted = sum(parts[1:], start=parts[0])  # in this order
    assert torch.equal(total, wanted.to(dtype))


@pytest.mark.gpu
def test_on_a_gpu_rows_are_merged_to_the_last_digits():
    out, lse, at, other_out, other_lse = (
        tuple(i.cuda() for i in x) if isinstance(x, tuple) else x.cuda() for x in some_rows(torch.float32, 2)
    )
    exact, exact_lse = merge(out[at].double(), lse[at].double(), other_out.double(), other_lse.double())
    merging.merge_rows(out, lse, at, other_out, other_lse)
    torch.testing.assert_close(out[at].double(), exact, atol=2e-7, rtol=1e-7)
    torch.testing.assert_close(lse[at].double(), exact_lse, atol=0, rtol=1e-7)


@pytest.fixture
def at_once(monkeypatch):
    """Strided attention merges at once also where no GPU is: the kernels are interpreted."""
    pytest.importorskip("hilbert_lib.attention.triton.merge", reason="triton has no build for this platform")
    monkeypatch.setattr(strided, "_merges_at_once", lambda q, kernel: True)


DTYPES = (torch.float32, torch.float16)
AXES = (BRANCHES, OFFSET_RULES, MIXING_RULES, DTYPES, SHAPES, LAYOUTS, [False, True])


@in_pairs(AXES, 4)
def test_parts_merged_and_summed_at_once_equal_the_oracle(at_once, case):
    branches, offsets, mixing, dtype, shape, layout, is_causal = case
    check(branches, offsets, mixing, "none", "sdpa", dtype, shape, layout, is_causal)


def check_strided(tensors, pattern, **options) -> None:
    """Strided attention equals the reference: out, lse and gradients."""
    found, expected = (attended(tensors, pattern, name, **options) for name in ("eager", "reference"))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("query_start", [0, 7, 19])
def test_queries_that_begin_inside_segments_find_their_parts(at_once, query_start):
    pattern = DilatedPattern((6, 16, 100), (1, 3, 5))
    check_strided(drawn(21, 2, 2, 4, batch=3, keys=40), pattern, is_causal=True, query_start=query_start)


VIEWS = {  # branches, offsets, mixing, (batch, length, heads, kv_heads), how many calls
    "heads side by side": (((8, 32), (1, 8)), "head_block", "softmax", (2, 32, 4, 4), 2),
    "heads two apart": (((8, 32), (1, 4)), "head_block", "softmax", (1, 32, 8, 8), 3),
    "offsets that begin again": (((8, 32), (1, 4)), "head", "softmax", (1, 32, 8, 4), 4),
    "offsets that begin inside": (((8, 32), (1, 4)), "head", "head_groups", (1, 62, 6, 6), 6),
    "a group that begins inside a block": (((10, 10), (5, 5)), "head_block", "head_groups", (1, 20, 9, 9), 4),
    "distances that grow": (((20,) * 3, (10,) * 3), "head_block", "head_groups", (1, 40, 20, 20), 6),
    "offsets of unequal rows": (((40,), (10,)), "head", "softmax", (1, 35, 10, 10), 2),
    "one head at a time": (((8,), (2,)), "head", "softmax", (3, 21, 2, 2), 4),
}


@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_heads_whose_offsets_follow_each_other_are_one_call(case, by_kernel, request):
    branches, offsets, mixing, (batch, length, heads, kv_heads), calls = VIEWS[case]
    if by_kernel:
        request.getfixturevalue("at_once")
    q, k, v, dout = drawn(length, heads, kv_heads, 4, batch=batch)
    pattern = DilatedPattern(*branches, offsets=offsets, mixing=mixing)
    assert sum(1 for _ in strided.steps(Request(pattern), [q], [k, v])) == calls
    check_strided((q, k, v, dout), pattern, is_causal=True)


@pytest.mark.parametrize("offsets", OFFSET_RULES)
@pytest.mark.parametrize("mixing", MIXING_RULES)
def test_every_head_is_in_one_call_of_a_branch_and_begins_at_its_offset(offsets, mixing):
    for heads in range(3, 33):
        q = torch.empty(1, 48, heads, 1, device="meta")
        for rate in (2, 3, 5, 8, 12):
            pattern = DilatedPattern((24, 48, 48), (1, rate, 2 * rate), offsets=offsets, mixing=mixing)
            seen = []
            for step in strided.steps(Request(pattern), [q], [q, q]):
                part = step.key_part(step.keys[0])
                branch = pattern.dilation_rates.index(part.rate)
                for number, head in enumerate(range(heads)[part.heads]):
                    seen.append((branch, head))
                    assert part.start + number * part.shift == pattern.offset(branch, head, heads)
            assert sorted(seen) == [(i, head) for i in range(3) for head in pattern.branch_heads(i, heads)]


@pytest.mark.parametrize("query_start", [0, 4, 8])
def test_heads_with_other_numbers_of_keys_are_calls_of_their_own(query_start):
    check_strided(drawn(4, 4, 4, 4, keys=13), DilatedPattern((16,), (4,)), query_start=query_start)


def test_heads_without_queries_make_no_calls():
    q, k = (torch.empty(1, n, 64, 8, device="meta") for n in (1, 4096))
    assert sum(1 for _ in strided.steps(Request(DilatedPattern((1024,), (16,)), query_start=2049), [q], [k, k])) == 1
