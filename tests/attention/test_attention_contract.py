"""What dilated_attention promises beyond its numbers: no copies, masks, decoding, odd input, autograd, choice."""

import tracemalloc
from contextlib import nullcontext
from functools import partial

import oracle
import pytest
import torch
from allpairspy import AllPairs
from cases import (
    LAYOUTS,
    assert_close,
    attended,
    differentiated,
    drawn,
    lse_error,
    needs_hopper,
    norms,
    refused,
    stored,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_lib import (
    DilatedPattern,
    Neighbourhood,
    Ordering,
    PointNeighbourhood,
    attend,
    attention_weights,
    dilated_attention,
    explain_backend,
    neighbourhood_attention,
    ring_attend,
    ring_dilated_attention,
    ring_neighbourhood_attention,
    two_resolution_attention,
)
from hilbert_lib.attention import api
from hilbert_lib.attention.backends import strided
from hilbert_lib.attention.backends.dense import Eager
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request
from hilbert_lib.internals import WITHOUT_INTERNALS
from hilbert_lib.patterns.dilated import OFFSET_RULES

ALIGNED = DilatedPattern((8, 16, 32), (1, 2, 4))
FILLED = DilatedPattern((6, 12, 24), (1, 4, 5), padding="zeros")


def qkv(batch=2, length=32, heads=4, kv_heads=4, head_dim=8, dtype=torch.float64):
    tensors = drawn(length, heads, kv_heads, head_dim, batch=batch, dtype=dtype)
    return [x.requires_grad_() for x in tensors[:3]]


class DenseArguments(TorchDispatchMode):
    """Records the storages of the tensors that reach torch's attention operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            self.calls.append((str(func), [x.untyped_storage().data_ptr() for x in tensors]))
        if func.namespace == "hilbert_lib":  # one operator from outside: look inside
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="what is watched is torch's operators beneath its public function")
@pytest.mark.parametrize("case", list(AllPairs([OFFSET_RULES, LAYOUTS, [4, 2]])), ids=str)
def test_aligned_patterns_reach_the_kernels_without_a_copy(case):
    offsets, layout, kv_heads = case
    pattern = DilatedPattern(ALIGNED.segment_lengths, ALIGNED.dilation_rates, offsets=offsets)
    q, k, v = (stored(x.detach(), layout).requires_grad_() for x in qkv(kv_heads=kv_heads))
    storages = [x.untyped_storage().data_ptr() for x in (q, k, v)]
    with DenseArguments() as seen:
        out = dilated_attention(q, k, v, pattern, backend="sdpa")
        dout = torch.ones_like(out)
        torch.autograd.grad(out, (q, k, v), dout)
    forward = [pointers for name, pointers in seen.calls if "backward" not in name]
    backward = [pointers for name, pointers in seen.calls if "backward" in name]
    assert forward
    assert len(backward) == len(forward)
    assert all(pointers == storages for pointers in forward)
    assert all(pointers[:4] == [dout.untyped_storage().data_ptr(), *storages] for pointers in backward)
    # A call for each offset of a branch, or for each head of one: the fewer of both, times the members of a group; more
    # only where four dimensions cannot hold it.
    if layout == "bshd":
        by_offset = [pattern.offset_heads(i, kv_heads).values() for i in range(3)]
        fewest = sum(min(len(heads), max(len(range(kv_heads)[h]) for h in heads)) for heads in by_offset)
        assert len(forward) == fewest * (4 // kv_heads)


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize(("pattern", "is_causal"), [(ALIGNED, False), (ALIGNED, True), (FILLED, False)], ids=str)
def test_padded_keys_have_no_weight_and_take_no_keys_of_zeros_with_them(backend, pattern, is_causal):
    tensors = drawn(37, 4, 2, 8, batch=2, dtype=torch.float64)
    mask = torch.zeros(2, 37, dtype=torch.bool)
    mask[0, 30:] = mask[0, :9] = mask[1] = True  # of the second sequence all
    options = {"is_causal": is_causal, "key_padding_mask": mask}
    exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
    out, lse, *grads = attended(tensors, pattern, backend, **options)
    assert_close((out, lse, *grads), exact, 1e-12)
    assert lse.isinf().any()  # rows that see only padding
    assert not out[1].any()
    assert grads[1][mask].eq(0).all()


# Not "sdpa" and "flash", whose kernels say lse 0 and NaN of such rows there.
ON_GPU = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("eager", "cudnn", "flex", "triton")]
ON_GPU += [pytest.param("hopper", "cuda", marks=[pytest.mark.gpu, needs_hopper])]


@pytest.mark.parametrize(("backend", "device"), [*((name, "cpu") for name in ("eager", "sdpa", "auto")), *ON_GPU])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [DilatedPattern((2, 8), (1, 1)), DilatedPattern((2,), (1,))], ids=str)
def test_scores_of_minus_infinity_weigh_nothing_in_any_branch(backend, device, is_causal, pattern):
    for dtype in (torch.bfloat16, torch.float32)[: 1 + (device == "cpu")]:
        q, k, v = (torch.ones(1, 8, 1, 16, dtype=dtype, device=device) for _ in range(3))
        v += torch.arange(8, device=device)[:, None, None]
        k[:, [0, 1, 5]] = -torch.inf  # all keys of a segment, and one of two
        k[:, 6] = v[:, 6] = 0.0  # causal, lse 0 and out 0 of a single key, which does weigh
        call = partial(attended, (q, k, v, torch.ones_like(v)), pattern, is_causal=is_causal)
        found, exact = call(backend), call("reference")
        # torch's own tolerances, for lse in half precision more where `lse_error` says so.
        torch.testing.assert_close(found[0], exact[0])
        torch.testing.assert_close(found[1], exact[1], atol=max(1e-5, lse_error(backend, dtype, device)), rtol=1.3e-6)
        # dq and dk are no numbers, nor is dv of such keys by the fused kernels of a GPU.
        if backend not in ("hopper", "triton"):
            torch.testing.assert_close(found[-1], exact[-1])


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("query_start", "queries", "padding"),
    [*((*rows, "none") for rows in ((0, 1), (17, 1), (36, 1), (5, 14), (0, 37), (20, 0))), (20, 17, "zeros")],
)
def test_decoding_equals_the_oracle(backend, is_causal, query_start, queries, padding):
    pattern = DilatedPattern((6, 12, 100), (1, 4, 5), padding=padding)
    tensors = drawn(queries, 4, 2, 8, batch=2, keys=37, dtype=torch.float64)
    options = {"is_causal": is_causal, "query_start": query_start}
    exact = differentiated(partial(oracle.attention, pattern=pattern, **options), tensors)
    assert_close(attended(tensors, pattern, backend, **options), exact, 1e-12)


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_an_ordering_goes_with_padding_and_decoding(backend):
    q, k, v = qkv(length=37, kv_heads=2)
    order = Ordering.from_curve("hilbert", 37)
    stored = order.apply(k, dim=1), order.apply(v, dim=1)
    mask = torch.zeros(2, 37, dtype=torch.bool)
    mask[0, 30:] = mask[1, 3:9] = True  # of positions, not of slots
    options = {"key_padding_mask": mask, "query_start": 20, "is_causal": True}
    expected, _ = oracle.attention(q[:, 20:30], k, v, ALIGNED, **options)
    out = dilated_attention(q[:, 20:30], *stored, ALIGNED, kv_ordering=order, backend=backend, **options)
    torch.testing.assert_close(out, expected)


def test_decoding_over_whole_segments_is_one_call_a_branch_and_offset(monkeypatch):
    calls = []
    forward = Eager.forward
    monkeypatch.setattr(Eager, "forward", lambda *a: calls.append(a[0].shape) or forward(*a))
    q, k, v = qkv(batch=1, length=64, heads=1, kv_heads=1)
    dilated_attention(q[:, 3:60], k, v, DilatedPattern((4,), (1,)), query_start=3, backend="eager")
    assert [(shape[0], shape[2]) for shape in calls] == [(14, 4), (1, 1)]


@pytest.mark.parametrize(("batch", "length"), [(1, 72), (2, 72), (3, 70), (4, 24)])  # of the last, all would fold
def test_no_dense_kernel_is_given_more_sequences_or_heads_than_it_takes(monkeypatch, batch, length):
    monkeypatch.setattr(strided, "MOST_SEQUENCES", 7)
    shapes = []
    for name in ("forward", "backward"):
        run = getattr(Eager, name)
        monkeypatch.setattr(Eager, name, lambda *a, run=run: shapes.extend(x.shape[:2] for x in a[:3]) or run(*a))
    tensors = drawn(length, 2, 1, 8, batch=batch, dtype=torch.float64)
    pattern = DilatedPattern((4, 16), (1, 2))
    assert_close(*(attended(tensors, pattern, name) for name in ("eager", "reference")), 1e-12)
    assert 5 < max(map(max, shapes)) <= 7


def test_the_steps_of_many_short_segments_take_no_memory_for_each_segment():
    q = torch.empty(1, 2**22, 1, 8, device="meta")
    tracemalloc.start()
    try:
        steps = sum(1 for _ in strided.steps(Request(DilatedPattern((2,), (1,))), [q], [q, q]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert steps == 2**21 // strided.MOST_SEQUENCES + 1
    assert peak < 2**20


def test_more_sequences_than_dense_kernels_on_cuda_take_are_refused_there():
    q = torch.empty(2**16, 4, 1, 64, dtype=torch.bfloat16, device="meta")
    for name in ("cudnn", "flash", "sdpa", "flash_attn_4"):
        refusal = BACKENDS[name].limits(q, Request(ALIGNED))
        assert refusal == "serves up to 65,535 sequences and heads, got 65,536"
        assert not BACKENDS[name].limits(q[:-1], Request(ALIGNED))


def test_autocast_leaves_float64_alone():
    leaves = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = dilated_attention(*leaves, ALIGNED)
    torch.testing.assert_close(out, dilated_attention(*leaves, ALIGNED), atol=1e-14, rtol=0)


def test_a_padding_mask_that_changes_before_the_backward_is_an_error():
    leaves, mask = qkv(), torch.zeros(2, 32, dtype=torch.bool)
    out = dilated_attention(*leaves, ALIGNED, key_padding_mask=mask)
    mask[:, 20:] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_many_branches_are_summed_in_float32():
    tensors = drawn(32, 1, 1, 8, dtype=torch.float16)
    # 32 times the same branch: the same function as one of them, but for lse.
    many, once = (DilatedPattern((32,) * n, (1,) * n) for n in (32, 1))
    found, expected = (attended(tensors, pattern, "sdpa") for pattern in (many, once))
    assert max(norms(found[2:], [x.double() for x in expected[2:]])) < 1e-3


LARGEST = [(torch.bfloat16, 2.358e38), (torch.float16, 2.358e38), (torch.float32, 2.358e38), (torch.float64, 1.246e308)]


@pytest.mark.parametrize("backend", ["reference", "eager", "sdpa"])
@pytest.mark.parametrize(("dtype", "scale"), LARGEST)
def test_the_largest_scales_are_exact(backend, dtype, scale):
    q, k, v = (x.detach().to(dtype) for x in qkv())
    # Matrix products of half precision may take what is so small for 0: an overflow would make NaN of it.
    q, k = (x * (dtype.itemsize > 2) / scale**0.5 for x in (q, k))
    out = dilated_attention(q, k, v, ALIGNED, scale=scale, backend=backend)
    expected, _ = oracle.attention(q, k, v, ALIGNED, scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=20 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize(("dtype", "is_refused"), [(torch.float32, True), (torch.float64, False)])
def test_a_scale_is_judged_in_the_dtype_that_autocast_gives(dtype, is_refused):
    tensors = [x.detach().to(dtype) for x in qkv()]
    refusal = pytest.raises(ValueError, match="scale must be at most 2")
    with torch.autocast("cpu", dtype=torch.bfloat16), refusal if is_refused else nullcontext():
        dilated_attention(*tensors, ALIGNED, scale=3e38)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"length": 0}])
def test_empty_inputs_give_empty_outputs_and_gradients(shape):
    leaves = qkv(**shape)
    out, lse = dilated_attention(*leaves, ALIGNED, return_lse=True)
    assert out.shape == leaves[0].shape
    assert lse.shape == (out.shape[0], 4, out.shape[1])
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in leaves)


X = torch.zeros(2, 32, 4, 8)
PADDING = torch.zeros(2, 32, dtype=torch.bool)
NESTED = torch.nested.nested_tensor([X[0, :9], X[1]], layout=torch.jagged)
FIVE = DilatedPattern((8,) * 5, (1,) * 5, mixing="head_groups")


def given(q=X, k=X, v=None, pattern=ALIGNED, **options):
    """Arguments; v is k by default."""
    return {"q": q, "k": k, "v": k if v is None else v, "pattern": pattern, **options}


WRONG = {
    TypeError: [
        (given(q=[1.0]), r"q must be a tensor, got list"),
        (given(X.int(), X.int()), r"q must be float16, .* got torch.int32"),
        (given(k=NESTED, v=X), r"k must be a dense \(strided\) tensor, got a nested one"),
        (given(q=X.to_sparse()), r"q must be a dense \(strided\) tensor, got layout torch.sparse"),
        (given(k=X.double(), v=X), r"k must have the dtype of q .* got torch.float64"),
        (given(is_causal=1), r"is_causal must be True or False, got 1"),
        (given(return_lse=None), r"return_lse must be True or False"),
        (given(scale="1"), r"scale must be a number, got '1'"),
        (given(key_padding_mask=X[:, :, 0, 0]), r"bool tensor, True = no weight, or None; got torch.float"),
        (given(key_padding_mask=True), r"bool tensor, True = no weight, or None; got bool"),
        (given(key_padding_mask=[[False] * 32] * 2), r"key_padding_mask must be a bool tensor, .* or None; got list"),
        (given(key_padding_mask=PADDING.long()), r"bool tensor, True = no weight, or None; got torch.int64"),
        (given(kv_ordering="hilbert"), r"kv_ordering must be an Ordering such as .*\(.*\), or None; got 'hilbert'"),
        (given(backend=None), r"backend must be a string, got NoneType"),
        (given(pattern=((8,), (1,))), r"pattern must be a (DilatedPattern,|Pattern, .* Union;) got tuple$"),
    ],
    ValueError: [
        (given(q=X[0]), r"q must have 4 dimensions .* got shape \(32, 4, 8\)"),
        (given(q=X[:, :, :0]), r"q must have at least one head, got shape \(2, 32, 0, 8\)"),
        (given(k=X.to("meta"), v=X), r"k must be on the device of q \(cpu\), got meta"),
        (given(X[..., :0], X[..., :0]), r"head_dim from 1 to 256, got 0"),
        (given(*[torch.zeros(1, 2, 1, 257)] * 2), r"head_dim from 1 to 256, got 257"),
        (given(v=X[:, :, :2]), r"v must have the shape of k .* got \(2, 32, 2, 8\)$"),
        (given(v=X[..., :4]), r"v must have .* got \(2, 32, 4, 4\): another head_dim is not served; pad the narrower"),
        (given(k=X[:1]), r"k must have q's batch 2"),
        (given(k=X[..., :4]), r"head_dim 8, got shape"),
        (given(k=X[:, :, :3]), r"divides q's 4, got 3"),
        (given(k=X[:, :, :0]), r"divides q's 4, got 0"),
        (given(k=X[:, :9]), r"k must have the length of q \(32\) unless query_start"),
        (given(X[:, :4], query_start=29), r"query_start must be an integer from 0 to 28, got 29"),
        (given(X[:, :4], query_start=-1), r"query_start must be .* got -1"),
        (given(k=X[:, :9], query_start=0), r"no more rows than k \(9\) .* got 32"),
        (given(scale=10**400), r"scale must be finite and above 0, got inf"),
        (given(scale=2.4e38), r"scale must be at most 2.35866e\+38, got 2.4e\+38"),
        (given(scale=float("nan")), r"scale must be finite and above 0, got nan"),
        (given(dropout_p=1.0), r"dropout_p must be in \[0, 1\), got 1.0"),
        (given(dropout_p=float("nan")), r"dropout_p must be in"),
        (given(key_padding_mask=PADDING[:, :31]), r"\(2, 32\), got shape \(2, 31\)"),
        (given(key_padding_mask=PADDING.to("meta")), r"key_padding_mask must be on the device of k \(cpu\), got meta"),
        (given(kv_ordering=Ordering.linear(31)), r"length of k \(32\), got 31"),
        (given(backend="fast"), r"backend must be one of auto, .*; got 'fast'"),
        (given(pattern=FIVE), r"at least one KV head a branch \(5\), got 4"),
    ],
}


@refused(WRONG)
def test_bad_input_names_argument_value_and_what_is_allowed(error, call, words):
    for function in (dilated_attention, explain_backend):
        with pytest.raises(error, match=words):
            function(**call)


HEADS_FIRST = [((2, 8, 1024, 8), True), ((2, 8, 65, 8), True), ((2, 16, 128, 8), True)]
HEADS_FIRST += [((1, 1, 8, 8), False), ((1, 1, 128, 8), False)]  # prompts of one token
HEADS_FIRST += [((1, 2, 32, 8), False), ((1, 2, 64, 8), False)]  # of two
HEADS_FIRST += [((1, 63, 64, 8), False), ((1, 20, 96, 8), False), ((1, 0, 96, 8), False)]


@pytest.mark.parametrize(("shape", "is_likely"), HEADS_FIRST, ids=str)
@pytest.mark.parametrize("door", [attend, dilated_attention], ids=lambda each: each.__name__)
def test_heads_that_likely_come_first_are_warned_of_and_short_prompts_are_not(
    monkeypatch, recwarn, door, shape, is_likely
):
    monkeypatch.setattr(api, "_warned", False)
    x = torch.ones(shape)
    for _ in range(2):  # said once
        door(x, x, x, ALIGNED)
    said = [str(each.message) for each in recwarn if "heads and" in str(each.message)]
    assert len(said) == is_likely
    assert all(f"{door.__name__} takes (batch, seq, heads, head_dim). If heads come first" in text for text in said)


CAPPED = [attend, dilated_attention, neighbourhood_attention, attention_weights, two_resolution_attention]
CAPPED += [ring_attend, ring_dilated_attention, ring_neighbourhood_attention]


@pytest.mark.parametrize("name", ["softcap", "logits_soft_cap"])
@pytest.mark.parametrize("function", CAPPED, ids=lambda each: each.__name__)
def test_a_cap_of_scores_is_refused_with_the_reason(function, name):
    with pytest.raises(TypeError, match=f"{function.__name__} serves no {name}: no backend bounds scores by a tanh"):
        function(X, X, X, ALIGNED, **{name: 30.0})


@pytest.mark.parametrize(("of_keys", "of_values"), [(8, 4), (4, 8)])
def test_a_v_of_another_width_is_served_as_its_refusal_says(of_keys, of_values):
    tensors = drawn(32, 4, 2, of_keys, dtype=torch.float64)[:2]
    tensors.append(drawn(32, 4, 2, of_values, dtype=torch.float64)[2])
    expected = oracle.attention(*tensors, ALIGNED)
    with pytest.raises(ValueError, match="another head_dim is not served"):
        dilated_attention(*tensors, ALIGNED)
    wide = [torch.nn.functional.pad(x, (0, max(of_keys, of_values) - x.shape[3])) for x in tensors]
    out, lse = dilated_attention(*wide, ALIGNED, scale=of_keys**-0.5, return_lse=True)
    assert_close((out[..., :of_values], lse), expected, 1e-12)


def test_a_device_without_an_lse_is_refused_by_name():
    meta = X.to("meta")
    assert "no lse on device meta" in explain_backend(meta, meta, meta, ALIGNED).reasons["sdpa"]


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize(
    "pattern",
    [ALIGNED, Neighbourhood((32,), 5), PointNeighbourhood(torch.arange(32)[:, None], 5)],
    ids=["dilated", "window", "points"],
)
def test_weights_of_large_scores_sum_to_1(backend, pattern):
    q = k = torch.full((1, 32, 2, 8), 1000.0)
    out = attend(q, k, torch.ones_like(q), pattern, scale=1.0, backend=backend)
    assert_close([out], [torch.ones_like(out)], 1e-5)
