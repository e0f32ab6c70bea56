"""The adapters of dense kernels compute the function, and give each kernel only what it can read."""

import itertools
import sys
import warnings
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import oracle
import pytest
import torch
from cases import LAYOUTS, TOLERANCE, assert_close, attended, differentiated, drawn, drawn_dlse, expected, stored
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_lib import DilatedPattern, attend, explain_backend
from hilbert_lib.attention import known_calls
from hilbert_lib.attention.backends import dense as dense_kernels
from hilbert_lib.attention.backends import packages, strided
from hilbert_lib.attention.backends.backend import serves_all
from hilbert_lib.attention.backends.dense import CuDnn, Efficient, Flash, Within32Bits
from hilbert_lib.attention.backends.kernel import Eager, Problem
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.internals import WITHOUT_INTERNALS


def dense(q, k, v, scale, causal):
    """(batch, rows, heads, head_dim) -> out, lse (batch, heads, rows), by plain products."""
    out, lse = Eager.forward(*(x.transpose(1, 2) for x in (q, k, v)), Problem(scale, causal))
    return out.transpose(1, 2).to(q.dtype), lse


def dense_backward(dout, q, k, v, out, lse, scale, causal):
    problem = Problem(scale, causal)
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    assert lse.is_contiguous()
    return [x.transpose(1, 2).to(q.dtype) for x in Eager.backward(dout, q, k, v, out, lse, problem)]


def fill(targets, grads):
    for target, grad in zip(targets, grads, strict=True):
        target.copy_(grad)


def fake_2():
    """flash_attn.flash_attn_interface, by the signatures of flash-attn 2.8."""

    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                return_softmax):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
        return *dense(q, k, v, softmax_scale, causal), None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                 window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
        fill((dq, dk, dv), dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, causal))

    return {"flash_attn.flash_attn_interface": {"_flash_attn_forward": forward, "_flash_attn_backward": backward}}


def fake_3():
    """flash_attn_interface, by the signatures of FlashAttention-3."""

    def forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, softmax_scale=None, causal=False):
        return *dense(q, k, v, softmax_scale, causal), None, None

    def backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                 max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                 window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):  # fmt: skip
        assert cu_seqlens_q is max_seqlen_k is None
        fill((dq, dk, dv), dense_backward(dout, q, k, v, out, softmax_lse, softmax_scale, is_causal))

    return {"flash_attn_interface": {"_flash_attn_forward": forward, "_flash_attn_backward": backward}}


def fake_4():
    """flash_attn.cute.interface, by the signatures of flash-attn-4 4.0.0b36."""

    def forward(q, k, v, qv=None, softmax_scale=None, causal=False, return_lse=False):
        out, lse = dense(q, k, v, softmax_scale, causal)
        return out, lse if return_lse else None, None, None, None

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, deterministic=False):
        return dense_backward(dout, q, k, v, out, lse, softmax_scale, causal)

    return {"flash_attn.cute.interface": {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}}


def fake_xformers():
    """xformers.ops.fmha of 0.0.35, with an lse padded as its CUTLASS kernel pads it."""

    class LowerTriangularMask:
        pass

    def forward(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        out, lse = dense(query, key, value, scale, isinstance(attn_bias, LowerTriangularMask))
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf)

    def backward(grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
        assert output.is_contiguous()
        assert lse.shape[2] == query.shape[1]
        is_causal = isinstance(attn_bias, LowerTriangularMask)
        return tuple(dense_backward(grad, query, key, value, output, lse, scale, is_causal))

    fmha = SimpleNamespace(
        attn_bias=SimpleNamespace(LowerTriangularMask=LowerTriangularMask),
        memory_efficient_attention_forward_requires_grad=forward,
        memory_efficient_attention_backward=backward,
    )
    return {"xformers.ops": {"fmha": fmha}}


KERNELS = {
    "flash_attn_2": (packages.FLASH_ATTN_2, fake_2),
    "flash_attn_3": (packages.FLASH_ATTN_3, fake_3),
    "flash_attn_4": (packages.FLASH_ATTN_4, fake_4),
    "xformers": (packages.XFORMERS, fake_xformers),
}


@pytest.fixture
def kernel(request, monkeypatch):
    """The adapter of a package, above a module with its signatures."""
    adapter, fake = KERNELS[request.param]
    for name, members in fake().items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return adapter


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("branches", "shape"), [("aligned", "ragged"), ("uneven", "grouped"), ("sparse", "shorter")])
def test_the_adapter_of_a_package_equals_the_oracle(kernel, branches, shape, is_causal):
    pattern, (*tensors, dout), out, lse, grads = expected(branches, "head", "softmax", torch.float64, shape, is_causal)
    q, k, v = (stored(x, "sliced") for x in tensors)
    call = Request(pattern, is_causal=is_causal, scale=q.shape[3] ** -0.5)
    got, got_lse = strided.forward(Tensors(q, k, v), call, kernel)
    assert_close((got, got_lse), (out, lse), 1e-12)
    got_grads = strided.backward(dout, Tensors(q, k, v), got, got_lse, call, kernel)
    assert_close(got_grads, grads, 1e-11)


@pytest.fixture
def taken(kernel, request, monkeypatch):
    """The name of a package whose backend is taken on this machine. Its limits stay, unless a test lifts them."""
    name = request.node.callspec.params["kernel"]
    here = replace(BACKENDS[name], here=serves_all, package="")
    monkeypatch.setitem(BACKENDS, name, here)
    yield name
    known_calls.forget()  # what this machine refuses again


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
@pytest.mark.parametrize(
    ("branches", "shape", "is_causal"),
    [("aligned", "ragged", False), ("uneven", "grouped", True), ("sparse", "shorter", True)],
)
def test_a_package_has_the_gradient_of_lse(taken, branches, shape, is_causal, monkeypatch):
    # Its kernel computes rowsum(dout * out) itself, of the columns too. dlse is NaN in rows without keys.
    monkeypatch.setitem(BACKENDS, taken, replace(BACKENDS[taken], limits=serves_all))  # float64
    rules = branches, "head", "softmax", torch.float64, shape, is_causal
    pattern, tensors, _, lse, grads = expected(*rules, with_dlse=True)
    dlse = drawn_dlse(lse)
    found = attended(tensors, pattern, taken, dlse, is_causal=is_causal)
    assert_close(found[2:], grads, 1e-11)
    of_out = attended(tensors, pattern, taken, is_causal=is_causal)[2:]
    alone = attended([*tensors[:3], torch.zeros_like(tensors[3])], pattern, taken, dlse, is_causal=is_causal)[2:]
    assert_close([x + y for x, y in zip(of_out, alone, strict=True)], grads, 1e-11)


# The largest head_dim that the packages' kernels take; xformers' have none up to 256.
LARGEST = {"flash_attn_2": 256, "flash_attn_3": 256, "flash_attn_4": 128, "xformers": None}


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_a_package_is_given_no_head_dim_that_it_does_not_take_for_the_gradient_of_lse(taken, monkeypatch):
    given, products, largest = [], dense_backward, LARGEST[taken]

    def counted(dout, q, *others):
        given.append(q.shape[-1])
        return products(dout, q, *others)

    monkeypatch.setattr(sys.modules[__name__], "dense_backward", counted)
    pattern = DilatedPattern((8, 16), (1, 2))
    for head_dim in (16, (largest or 256) - 8):
        tensors = drawn(16, 2, 1, head_dim, dtype=torch.bfloat16)
        exact = partial(oracle.attention, pattern=pattern)
        doubles = [x.double() for x in tensors]
        dlse = drawn_dlse(exact(*doubles[:3])[1])
        right = differentiated(exact, doubles, dlse)[2:]
        assert_close(attended(tensors, pattern, taken, dlse)[2:], right, TOLERANCE[torch.bfloat16][2])
    assert set(given) == {24, largest or 256}
    if largest is None:
        return
    leaves = [x.requires_grad_() for x in drawn(16, 2, 1, largest, dtype=torch.bfloat16)[:3]]
    _, lse = attend(*leaves, pattern, backend=taken, return_lse=True)
    told = f"backend='{taken}' has no gradient of lse: with the 8 columns .* up to {largest}, got {largest + 8}"
    with pytest.raises(ValueError, match=told):
        lse.sum().backward()
    explained = explain_backend(*leaves, pattern, return_lse=True).reasons[taken]
    assert explained.startswith("passed over: has no gradient of lse: with the 8 columns that it takes")


@pytest.mark.parametrize("kernel", ["flash_attn_4"], indirect=True)
def test_a_warning_of_its_own_argument_is_not_shown_and_others_are(kernel, monkeypatch):
    products, said = dense, ["Argument aux_data (position 17) cannot be converted to a JitArgument for function 'f'."]

    def warned(*inputs):
        for message in said:
            warnings.warn(message, UserWarning, stacklevel=1)
        return products(*inputs)

    monkeypatch.setattr(sys.modules[__name__], "dense", warned)
    q, k, v = torch.randn(3, 1, 32, 4, 8).unbind()
    packages._without_its_warning.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strided.forward(Tensors(q, k, v), Request(DilatedPattern((8, 16), (1, 2))), kernel)
        said.append("another")
        with pytest.raises(UserWarning, match="another"):
            strided.forward(Tensors(q, k, v), Request(DilatedPattern((8, 16), (1, 2))), kernel)
    packages._without_its_warning.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_the_adapter_of_a_package_hands_on_views_without_a_copy(kernel, monkeypatch):
    q, k, v = torch.randn(3, 1, 32, 4, 8).unbind()
    storages = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    seen = []
    products = dense
    monkeypatch.setattr(sys.modules[__name__], "dense", lambda *x: seen.append(x[:3]) or products(*x))
    strided.forward(Tensors(q, k, v), Request(DilatedPattern((8, 16), (1, 2))), kernel)
    assert seen
    assert all(x.untyped_storage().data_ptr() in storages for views in seen for x in views)


def cudnn_with_plans():
    """torch's operators over cuDNN. A backward's plan is found as torch 2.11 finds it, and reads as it did at first."""
    plans = {}

    def forward(q, k, v, bias, compute_lse, dropout_p, is_causal, return_debug_mask, *, scale):
        return *Eager.forward(q, k, v, Problem(scale, is_causal)), None

    def backward(
        dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale
    ):
        found_by = is_causal, *((x.shape, x.stride()) for x in (q, k, v))
        strides = plans.setdefault(found_by, (out.stride(), dout.stride()))
        out, dout = (x.as_strided(x.shape, stride) for x, stride in zip((out, dout), strides, strict=True))
        return Eager.backward(dout, q, k, v, out, lse[..., 0], Problem(scale, is_causal))

    operators = {
        "cudnn_attention": forward,
        "cudnn_attention_backward": backward,
    }
    return SimpleNamespace(**operators)


def test_cudnn_reads_gradients_of_every_layout_by_plans_made_for_another(monkeypatch):
    monkeypatch.setattr(dense_kernels, "dense_operators", cudnn_with_plans())
    pattern, (*tensors, dout), _, _, grads = expected("aligned", "head", "softmax", torch.float64, "grouped", True)
    call = Request(pattern, is_causal=True, scale=tensors[0].shape[3] ** -0.5)
    for of_inputs, of_dout in itertools.product(LAYOUTS, LAYOUTS):
        q, k, v = (stored(x, of_inputs) for x in tensors)
        out, lse = strided.forward(Tensors(q, k, v), call, CuDnn)
        got = strided.backward(stored(dout, of_dout), Tensors(q, k, v), out, lse, call, CuDnn)
        assert_close(got, grads, 1e-11)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (5, 1)])
def test_cudnn_is_given_no_segment_of_one_query_or_one_key(monkeypatch, queries, keys):
    # A ring asks for blocks of as many queries and keys as two ranks have of a segment.
    monkeypatch.setattr(dense_kernels, "dense_operators", SimpleNamespace())
    dout, q = torch.randn(2, 2, 3, queries, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 2, 3, keys, 8, dtype=torch.float64).unbind()
    problem = Problem(0.3, False)
    out, lse = CuDnn.forward(q, k, v, problem)
    torch.testing.assert_close(lse, (0.3 * q @ k.transpose(2, 3)).logsumexp(-1))
    assert [x.shape for x in CuDnn.backward(dout, q, k, v, out, lse, problem)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_of_32_bits_is_given_no_row_and_no_head_that_lies_further(monkeypatch, layout):
    pattern, (*tensors, dout), out, lse, grads = expected("aligned", "head", "softmax", torch.float64, "ragged", True)
    reach = 37 * 8 + 1  # of one head's rows, and of no two
    monkeypatch.setattr(dense_kernels, "REACH", reach)

    def finds(*tensors):
        for x in tensors:
            assert all((x.shape[n] - 1) * x.stride(n) < reach for n in (1, 2))
            assert (x.shape[2] - 1) * x.shape[1] * x.shape[3] < reach  # of what is dense

    class Short:
        def forward(q, k, v, problem):
            finds(q, k, v)
            return Eager.forward(q, k, v, problem)

        def backward(dout, q, k, v, out, lse, problem):
            finds(dout, q, k, v)
            return Eager.backward(dout, q, k, v, out, lse, problem)

    q, k, v = (stored(x, layout) for x in tensors)
    call, kernel = Request(pattern, is_causal=True, scale=q.shape[3] ** -0.5), Within32Bits(Short)
    got, got_lse = strided.forward(Tensors(q, k, v), call, kernel)
    assert_close((got, got_lse), (out, lse), 1e-12)
    for of_dout in LAYOUTS:
        got_grads = strided.backward(stored(dout, of_dout), Tensors(q, k, v), got, got_lse, call, kernel)
        assert_close(got_grads, grads, 1e-11)


@pytest.mark.skipif(WITHOUT_INTERNALS, reason="then torch's public function stands for its kernel")
@pytest.mark.parametrize(("name", "kernel"), [("sdpa", Efficient), ("xformers", packages.XFORMERS)])
def test_what_may_run_the_memory_efficient_kernel_is_kept_within_32_bits(name, kernel):
    for function in BACKENDS[name].functions(torch.device("cuda")):
        assert function.keywords["kernel"] == Within32Bits(kernel)


@pytest.mark.parametrize(("rows", "head_dim", "at_once"), [(257, 65, False), (256, 64, True)])
def test_flash_attention_2_is_given_no_more_sums_of_dq_than_32_bits_number(monkeypatch, rows, head_dim, at_once):
    # They are of whole tiles of rows, and head_dims are rounded up.
    monkeypatch.setattr(dense_kernels, "REACH", 2 * 384 * 128)
    given = []

    def backward(dout, q, *others, **options):
        given.append(q.shape[1])
        return tuple(torch.full_like(q, len(given)) for _ in "qkv")

    stand_in = SimpleNamespace(flash_attention_backward=backward)
    monkeypatch.setattr(dense_kernels, "dense_operators", stand_in)
    dout, q, k, v, out = torch.randn(5, 1, 2, rows, head_dim).unbind()
    for x in Flash.backward(dout, q, k, v, out, torch.randn(1, 2, rows), Problem(0.1, False)):
        assert x[0, :, 0, 0].tolist() == ([1, 1] if at_once else [1, 2])
    assert given == ([2] if at_once else [1, 1])


@pytest.mark.parametrize("kernel", ["flash_attn_2"], indirect=True)
def test_so_is_the_package_and_the_gradients_are_the_same(kernel, monkeypatch):
    monkeypatch.setattr(dense_kernels, "REACH", 2 * 128 * 64)
    given, products = [], dense_backward

    def counted(dout, q, *others):
        given.append(q.shape[2])
        return products(dout, q, *others)

    monkeypatch.setattr(sys.modules[__name__], "dense_backward", counted)
    dout, q, k, v = torch.randn(4, 1, 2, 37, 8, dtype=torch.float64).unbind()
    problem = Problem(0.3, True)
    inputs = dout, q, k, v, *Eager.forward(q, k, v, problem), problem
    torch.testing.assert_close(kernel.backward(*inputs), Eager.backward(*inputs))
    assert given == [1, 1]


class Masks(TorchDispatchMode):
    """The bytes of the bool tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            self.bytes += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(("batch", "heads", "segment_length"), [(2, 4, 32), (2, 4, 24), (5, 2, 24)])
def test_padding_is_never_written_out_for_every_query(batch, heads, segment_length):
    # Batch and segments fold into one dimension, and then sequences and heads go one by one.
    q, k, v, dout = torch.randn(4, batch, 64, heads, 8).unbind()
    padding = torch.zeros(batch, 64, dtype=torch.bool)
    masks = []
    for mask in (None, padding):
        call = Request(DilatedPattern((segment_length,), (1,)), scale=0.3, key_padding_mask=mask)
        with Masks() as counted:
            out, lse = strided.forward(Tensors(q, k, v), call, Eager)
            strided.backward(dout, Tensors(q, k, v), out, lse, call, Eager)
        masks.append(counted.bytes)
    assert masks[1] - masks[0] < batch * heads * 64 * segment_length / 2, "a mask of every pair"
