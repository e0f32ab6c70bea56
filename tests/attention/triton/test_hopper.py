"""The warp-specialised kernels on a Hopper GPU: equal to the float64 reference, and to their plain twins."""

import json
import os
import subprocess
import sys

import pytest
import torch
from cases import HIDDEN, attended, determinism, documents_alone, drawn, ends_of, exactly, hidden_keys, norms, stored

from hilbert_lib import DilatedPattern, dilated_attention

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# Branches, length, heads, kv_heads, head_dim, causal.
CASES = {
    "whole tiles": (((512, 1024, 2048), (1, 2, 4)), 4096, 4, 2, 128, False),
    "causal": (((512, 1024, 2048), (1, 2, 4)), 4096, 4, 2, 64, True),
    "rate does not divide": (((1024, 2048), (1, 6)), 4099, 4, 4, 64, False),
    "rate does not divide, causal": (((1024, 2048), (1, 6)), 4099, 4, 4, 128, True),
    "padded head_dim": (((256,), (3,)), 300, 2, 2, 40, True),
    "narrow heads": (((256, 512), (1, 3)), 700, 4, 2, 32, False),
    "padded narrow heads": (((500,), (2,)), 1100, 2, 1, 24, True),
    "one segment, longer than the sequence": (((1024, 5000), (1, 4)), 2000, 2, 1, 16, True),
    "short": (((256,), (1,)), 70, 2, 2, 72, False),
    "half-empty tiles, nothing masked": (((512, 1536), (1, 3)), 3072, 4, 2, 128, False),
    "rows that the copy engine does not reach": (((1024, 8192), (1, 6)), 2048, 4, 2, 64, False),
    "rows that the copy engine does not reach, causal": (((1024, 1024, 8192), (1, 2, 6)), 2048, 4, 4, 128, True),
    "segments that do not divide each other": (((384, 500, 768), (1, 3, 2)), 1601, 4, 2, 64, False),
    "segments that do not divide each other, causal": (((384, 500, 768), (1, 1, 2)), 1601, 4, 2, 128, True),
    "more branches than descriptors": (([256 << n for n in range(7)], (1, 1, 1, 1, 2, 2, 2)), 2100, 2, 1, 64, True),
    "coarse rates in passes of their own": (((512, 2048, 4096), (1, 16, 64)), 4096, 4, 2, 64, False),
    "coarse rates, causal": (((512, 1024, 4099), (2, 6, 64)), 4099, 4, 4, 128, True),
    # By the kernels for grids.
    "short segments": (((64,), (1,)), 1920, 4, 2, 64, False),
    "short segments, whole boxes": (((256,), (1,)), 2048, 2, 2, 128, False),
    "one segment": (((4096,), (1,)), 1024, 4, 1, 80, False),
    "short segments beside coarser ones": (((256, 1024), (1, 4)), 2048, 4, 2, 128, False),
    "segments of two lengths": (((512, 128), (1, 1)), 1536, 4, 4, 64, False),
}


@pytest.fixture
def served(monkeypatch):
    """`cases.attended` by the warp-specialised kernels, also with a launch for each branch, or by plain ones."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    from hilbert_lib.attention.triton import schedule
    from hilbert_lib.attention.triton.hopper import division, segments
    from hilbert_lib.attention.triton.start import forget

    monkeypatch.setattr(segments, "FEWEST_TILES", 0)
    launches = division.launches

    def each_alone(pattern, length, *more, **options):
        ours, theirs = launches(pattern, length, *more, **options)
        return tuple(schedule.pass_of(pattern, (i,), length) for one in ours for i in one.branches), theirs

    def run(tensors, pattern, *, plain=False, divided=False, **options):
        forget()
        monkeypatch.setattr(division, "launches", each_alone if divided else launches)
        return attended(tensors, pattern, "triton" if plain else "hopper", **options)

    return run


def tokens(length, heads, kv_heads, head_dim, dtype=torch.bfloat16):
    return drawn(length, heads, kv_heads, head_dim, batch=2, dtype=dtype, device=DEVICE)


def off(found, expected) -> float:
    """The largest relative error of out and the gradients."""
    return max(norms((found[0], *found[2:]), (expected[0], *expected[2:])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_the_reference(served, case, heads_first, dtype):
    branches, length, heads, kv_heads, head_dim, is_causal = CASES[case]
    pattern = DilatedPattern(*branches)
    layout = "bhsd" if heads_first else "bshd"
    tensors = [stored(x, layout) for x in tokens(length, heads, kv_heads, head_dim, dtype)]
    expected = exactly(tensors, pattern, is_causal=is_causal)
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
    for how in ({}, {"plain": True}, {"divided": True}):
        error = off(served(tensors, pattern, is_causal=is_causal, **how), expected)
        roundings = len(pattern.branches) if "divided" in how else 0  # beside the one that every result has
        most = (tolerance**2 + roundings * (torch.finfo(dtype).eps / 4) ** 2) ** 0.5
        assert error < most, f"{how}: {error}"


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("case", CASES)
def test_beside_a_mask_of_keys_they_equal_the_reference_whatever_these_hold(served, case, kind):
    branches, length, heads, kv_heads, head_dim, is_causal = CASES[case]
    pattern, hidden = DilatedPattern(*branches), hidden_keys(kind, 2, length).to(DEVICE)
    tensors, options = tokens(length, heads, kv_heads, head_dim), {"is_causal": is_causal, "key_padding_mask": hidden}
    expected = exactly(tensors, pattern, **options)
    q, k, v, dout = tensors
    k, v = k.clone(), v.clone()
    k[hidden] = torch.nan
    for value in (100.0, torch.inf):
        v[hidden] = value
        for deterministic in (False, True):
            with determinism(deterministic):
                found = served((q, k, v, dout), pattern, **options)
            assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
            assert off(found, expected) < 6e-3


@pytest.mark.parametrize("kind", ["none", "some"])
@pytest.mark.parametrize("case", CASES)
def test_they_drop_what_the_reference_drops(served, case, kind):
    branches, length, heads, kv_heads, head_dim, is_causal = CASES[case]
    pattern, options = DilatedPattern(*branches), {"is_causal": is_causal, "dropout_p": 0.1}
    if kind != "none":
        options["key_padding_mask"] = hidden_keys(kind, 2, length).to(DEVICE)
    tensors = tokens(length, heads, kv_heads, head_dim)
    torch.manual_seed(5)
    expected = exactly(tensors, pattern, **options)
    for deterministic in (False, True):
        torch.manual_seed(5)
        with determinism(deterministic):
            assert off(served(tensors, pattern, **options), expected) < 8e-3  # each branch rounds dk and dv once more


# Lengths of packed documents: of less than a tile, of whole ones, none, and of several segments.
DOCUMENTS = {
    "uneven": (1, 127, 2000, 0, 640, 64, 1265),
    "even": (1024, 1024, 2048),
    "one": (3001,),
    "many": (17,) * 100 + (300, 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize("case", CASES)
def test_each_of_several_packed_documents_is_as_the_oracle_has_it_alone(served, case, lengths, dtype):
    branches, _, heads, kv_heads, head_dim, is_causal = CASES[case]
    pattern, lengths = DilatedPattern(*branches), DOCUMENTS[lengths]
    tensors = drawn(sum(lengths), heads, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    expected = documents_alone([x.cpu() for x in tensors], lengths, pattern, is_causal=is_causal)
    for max_seqlen, deterministic in ((None, False), (max(lengths), True)):
        options = {"cu_seqlens": ends_of(lengths, DEVICE), "max_seqlen": max_seqlen, "is_causal": is_causal}
        with determinism(deterministic):
            found = served(tensors, pattern, **options)
        assert off([x.cpu() for x in found], expected) < {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_drop_what_the_plain_kernels_drop(served, is_causal):
    pattern, lengths = DilatedPattern((512, 1024, 2048), (1, 2, 4)), DOCUMENTS["uneven"]
    tensors = drawn(sum(lengths), 4, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    options = {"cu_seqlens": ends_of(lengths, DEVICE), "is_causal": is_causal, "dropout_p": 0.1}
    results = []
    for plain in (False, True):
        torch.manual_seed(5)
        results.append(served(tensors, pattern, plain=plain, **options))
    assert off(*results) < 8e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", [136, 160, 192, 256])
def test_heads_above_128_equal_the_reference(served, head_dim, dropout_p, is_causal):
    pattern, tensors = DilatedPattern((512, 1024), (1, 2)), tokens(2049, 4, 2, head_dim)
    options = {"is_causal": is_causal, "dropout_p": dropout_p}
    torch.manual_seed(5)
    expected = exactly(tensors, pattern, **options)
    torch.manual_seed(5)
    assert off(served(tensors, pattern, **options), expected) < 4e-3


# The second pattern has launches of its own and a branch of the plain kernels, the third six branches in one launch,
# whose descriptors take more than 4,096 bytes of arguments.
@pytest.mark.parametrize("kind", ["none", "some", "ends"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize(
    ("branches", "length"),
    [
        (((512, 1024), (1, 2)), 2049),
        (((256, 500, 2048), (1, 2, 6)), 1000),
        (((256, 512, 1024, 2048, 2048, 2048), (1,) * 6), 2048),
    ],
)
def test_heads_above_128_equal_it_beside_a_mask_of_keys(served, branches, length, head_dim, is_causal, kind):
    pattern, tensors, options = DilatedPattern(*branches), tokens(length, 4, 2, head_dim), {"is_causal": is_causal}
    if kind != "none":
        options["key_padding_mask"] = hidden_keys(kind, 2, length).to(DEVICE)
    assert off(served(tensors, pattern, **options), exactly(tensors, pattern, **options)) < 6e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [160, 256])
def test_gradients_of_heads_above_128_repeat_their_bits(served, head_dim, is_causal):
    pattern, tensors = DilatedPattern((512, 1024, 2048), (1, 2, 4)), tokens(4096, 4, 2, head_dim)
    first, *others = (served(tensors, pattern, is_causal=is_causal) for _ in range(5))
    assert all(all(map(torch.equal, first, each)) for each in others)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("length", [2049, 4095, 4097])
def test_lengths_of_which_few_tiles_are_cut_equal_the_reference(served, length, dropout_p):
    pattern, tensors = DilatedPattern((512, 1024, 2048), (1, 2, 4)), tokens(length, 4, 2, 128)
    torch.manual_seed(5)
    expected = exactly(tensors, pattern, dropout_p=dropout_p)
    torch.manual_seed(5)
    assert off(served(tensors, pattern, dropout_p=dropout_p), expected) < 6e-3


@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branches", [((2048, 16384), (1, 6)), ((2048, 4096, 8192, 16384), (1, 2, 4, 6))])
def test_many_tiles_that_are_cut_or_half_empty_equal_the_plain_kernels(served, branches, is_causal, head_dim):
    # As long as this, since a group that loses count of the blocks of keys may agree with the others by chance.
    tensors = tokens(32768, 12, 12, head_dim)
    pattern = DilatedPattern(*branches)
    plain = served(tensors, pattern, is_causal=is_causal, plain=True)
    for deterministic, divided in ((False, False), (True, False), (False, True), (True, True)):
        with determinism(deterministic):
            results = served(tensors, pattern, is_causal=is_causal, divided=divided)
        assert off(results, [x.double() for x in plain]) < 4e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tiles_whose_branches_no_table_tells_may_be_in_none(served, monkeypatch, head_dim, is_causal):
    """Their programs have keys and no query. Tables are that short for rates past 262,144 alone."""
    from hilbert_lib.attention.triton import schedule

    monkeypatch.setattr(schedule, "LARGEST_TABLE", 2)
    pattern, tensors = DilatedPattern((400, 1000), (5, 7)), tokens(1999, 4, 2, head_dim)
    expected = exactly(tensors, pattern, is_causal=is_causal)
    assert off(served(tensors, pattern, is_causal=is_causal), expected) < 4e-3


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
# The second in one half of some tiles, the third from the last row of a tile on.
@pytest.mark.parametrize("part", [slice(700, 3100), slice(1000, 1130), slice(1151, 3100)])
def test_a_part_of_the_queries_has_the_rows_of_all(served, part, head_dim, is_causal, divided):
    q, k, v, dout = tokens(4096, 4, 2, head_dim)
    pattern = DilatedPattern((512, 1024, 2048), (1, 2, 4))
    every = served((q, k, v, dout), pattern, is_causal=is_causal, divided=divided)[0]
    with torch.no_grad():
        options = {"is_causal": is_causal, "query_start": part.start, "backend": "hopper"}
        some = dilated_attention(q[:, part], k, v, pattern, **options)
    assert (some - every[:, part]).norm() < 4e-3 * every[:, part].norm()


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_forward_and_where_asked_backward_repeat_their_bits(served, head_dim, is_causal, divided):
    tensors = tokens(4096, 4, 2, head_dim)
    pattern = DilatedPattern((512, 1024, 2048), (1, 2, 4))
    assert torch.equal(*(served(tensors, pattern, divided=divided)[0] for _ in range(2)))
    with determinism(True):
        first, second = (served(tensors, pattern, is_causal=is_causal, divided=divided) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("branches", "length", "divided"),
    [
        (((512, 1024), (1, 2)), 1000, False),
        (((512, 1024), (1, 2)), 1000, True),
        (((768, 1536), (2, 3)), 1536, True),  # rows of the second launch alone, and of none
    ],
)
def test_a_nan_reaches_only_the_rows_that_attend_to_it(served, branches, length, divided, is_causal, which):
    tensors = tokens(length, 2, 2, 64)
    pattern = DilatedPattern(*branches)
    tensors[which][1, 450, 0] = torch.nan
    out = served(tensors, pattern, is_causal=is_causal, divided=divided)[0]
    exact = dilated_attention(*(x.double() for x in tensors[:3]), pattern, is_causal=is_causal, backend="reference")
    assert exact.isnan().any()
    assert torch.equal(out.isnan(), exact.isnan())
    assert (out - exact)[~exact.isnan()].norm() < 4e-3 * exact[~exact.isnan()].norm()


def test_keys_that_are_not_there_have_no_gradient_however_small_the_scores(served):
    q = torch.ones(1, 64, 1, 64, device=DEVICE, dtype=torch.float16)
    k = (torch.randn_like(q) * 0.1 - 18 / 64).half()
    tensors = [q, k, torch.randn_like(q), torch.randn_like(q)]
    results, plain = (served(tensors, DilatedPattern((64,), (1,)), scale=1.0, plain=each) for each in (False, True))
    assert all(x.isfinite().all() for x in results)
    torch.testing.assert_close(results, plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_early_keys_of_a_long_segment_weigh_as_much_as_late_ones(served, head_dim):
    # Scores near 100, one block of 128 keys after the other, 2,048 of them: v is 1 in the first half, -1 in the other,
    # and what a block takes from those before it shows in out as in lse.
    length, level = 2**18, 100.0
    q, k, v, dout = (x[:1] for x in tokens(length, 1, 1, head_dim))
    q, k, v = 1 + 0 * q, level / head_dim**0.5 + 0.1 * k, torch.ones_like(v)
    v[:, length // 2 :] = -1
    out, lse, *_ = served((q, k, v, dout), DilatedPattern((length,), (1,)))
    scores = k[0, :, 0].double().sum(-1) * head_dim**-0.5
    weights = scores.softmax(0)
    assert (lse.double() - scores.logsumexp(0)).abs().max() < 2e-4
    assert (out.double() - (weights[: length // 2].sum() - weights[length // 2 :].sum())).abs().max() < 2e-4


@pytest.mark.parametrize("bits", [0.01, 0.05, 0.5, -0.05])  # of a weight, from each key to the next
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(32, torch.bfloat16), (64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16)]
)
def test_a_maximum_that_grows_a_little_with_every_block_is_followed(served, head_dim, dtype, is_causal, bits):
    # A row's maximum is left where it is until it has grown by some bits: weights before and after must fit each other.
    tensors = tokens(2048, 2, 2, head_dim, dtype)
    q, k, v, dout = (x * 0 if number < 2 else x for number, x in enumerate(tensors))
    q[..., 0] = 1
    k[..., 0] = (torch.arange(2048, device=DEVICE) * bits * 0.6931)[:, None]
    pattern = DilatedPattern((1024, 2048), (1, 2))
    exact = (x.double() for x in (q, k, v))
    options = {"is_causal": is_causal, "scale": 1.0}
    expected, lse = dilated_attention(*exact, pattern, backend="reference", return_lse=True, **options)
    out, found, *_ = served((q, k, v, dout), pattern, **options)
    assert norms([out], [expected])[0] < 4e-3
    assert (found - lse).abs().max() < 1e-3


# Prints the seconds of both calls and, of each kernel that is compiled, those of Triton's stages. The gradient comes
# from a loss: to look at the shape of one that is given torch imports sympy first.
FIRST_CALL = """
import json
import time
import torch
import triton
from hilbert_lib import DilatedPattern, dilated_attention

shape = 1, 65536, 16, {head_dim}
leaves = [torch.randn(shape, device="cuda", dtype=torch.{dtype}, requires_grad=True) for _ in range(3)]
pattern = DilatedPattern((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
kernels = []

def note(*, src, times, cache_hit, **_):
    stages = [("ir", times.ir_initialization), *times.lowering_stages]
    if not cache_hit:
        kernels.append([src.fn.__name__, {{name: round(took / 1e6, 1) for name, took in stages}}])

triton.knobs.compilation.listener = note
torch.cuda.synchronize()
start = time.perf_counter()
out = dilated_attention(*leaves, pattern, is_causal=True, backend="{backend}")
torch.cuda.synchronize()
middle = time.perf_counter()
(out * out.detach()).sum().backward()
torch.cuda.synchronize()
print(json.dumps([middle - start, time.perf_counter() - middle, kernels]))
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("backend", "head_dim", "dtype"),
    [
        *(("hopper", 64, "bfloat16"), ("hopper", 128, "bfloat16")),
        *(("triton", 128, "bfloat16"), ("triton", 256, "bfloat16"), ("triton", 128, "float32")),
    ],
)
def test_a_first_forward_and_backward_take_less_than_ten_seconds_each(tmp_path, capsys, backend, head_dim, dtype):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_CALL.format(backend=backend, head_dim=head_dim, dtype=dtype)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    forward, backward, kernels = json.loads(done.stdout)
    with capsys.disabled():  # figures to report, not only to pass
        print(
            f"\nfirst call, {backend}, {dtype}, head_dim {head_dim}: forward {forward:.1f} s, backward {backward:.1f} s"
        )
        for name, stages in kernels:
            print(f"  {name}:", ", ".join(f"{stage} {took}" for stage, took in stages.items()))
    assert max(forward, backward) < 10, (forward, backward)
    assert kernels, "nothing was compiled"
