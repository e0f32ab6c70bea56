"""The same promises on a CUDA device, for its own dense kernels. Run by `make test-gpu`."""

import itertools

import pytest
import torch
from cases import BRANCHES, LAYOUTS, SHAPES, TOLERANCE, attended, check, drawn, expected, norms

from hilbert_lib import DilatedPattern, explain_backend
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.patterns.dilated import MIXING_RULES, OFFSET_RULES

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)


def must_serve(backend: str, dtype: torch.dtype, head_dim: int) -> bool:
    if backend in ("cudnn", "flash"):
        return dtype in HALVES and head_dim % 8 == 0
    if backend == "sdpa":
        return dtype != torch.float64 and head_dim * dtype.itemsize % 16 == 0
    return True


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "sdpa", "eager", "reference", "auto"])
def test_every_cuda_backend_equals_the_oracle_or_says_why_it_cannot_serve(backend, dtype, shape, is_causal):
    kv_heads, head_dim = SHAPES[shape][3:]
    # Every third combination, another third for every shape: cuDNN builds a plan for every new size.
    combinations = list(itertools.product(BRANCHES, OFFSET_RULES, MIXING_RULES))[list(SHAPES).index(shape) % 3 :: 3]
    for number, (branches, offsets, mixing) in enumerate(combinations):
        if mixing == "head_groups" and kv_heads < len(BRANCHES[branches][0]):
            continue
        pattern, tensors, *_ = expected(branches, offsets, mixing, dtype, shape, is_causal)
        q, k, v = (x.cuda() for x in tensors[:3])
        choice = explain_backend(q, k, v, pattern, is_causal=is_causal, backend=backend)
        assert bool(choice.chosen) == must_serve(backend, dtype, head_dim), str(choice)
        if choice.chosen:
            layout = LAYOUTS[number % len(LAYOUTS)]
            check(branches, offsets, mixing, "hilbert", backend, dtype, shape, layout, is_causal, device="cuda")


KERNELS = [name for name in BACKENDS if name != "reference"]
STORED = {
    "one sequence": lambda x: x[:1].expand(x.shape),
    "one head": lambda x: x[:, :, :1].expand(x.shape),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


def results(tensors, pattern, backend):
    """`attended`, causal, by a backend that serves; the others' reasons are to be their packages, or the card."""
    explanation = explain_backend(*tensors[:3], pattern, is_causal=True, backend=backend)
    if not explanation.chosen:
        assert BACKENDS[backend].package or backend == "hopper", explanation.reasons[backend]
        pytest.skip(explanation.reasons[backend])
    out, _, *grads = attended(tensors, pattern, backend, is_causal=True)
    return out, *grads


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("layout", STORED)
def test_every_layout_of_inputs_and_gradient_gives_the_same_result(backend, layout):
    pattern, tensors, *_ = expected("aligned", "head", "softmax", torch.bfloat16, "wide", True)
    tensors = [STORED[layout](x.cuda()) for x in tensors]
    exact = results([x.double() for x in tensors], pattern, "reference")
    # All in rows of their own first: cuDNN's plans are kept, and must not be used for what is stored otherwise.
    for copied in ((True, True), (True, False), (False, True), (False, False)):
        given = [x.contiguous() if copied[n == 3] else x for n, x in enumerate(tensors)]
        assert max(norms(results(given, pattern, backend), exact)) < 1e-2


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("length", [97, 192, 1025])
def test_scores_far_below_zero_and_lengths_that_fill_no_block_are_served(backend, length):
    # torch and cuDNN have had NaN in gradients of either, in other calls than these.
    pattern = DilatedPattern((64, 1024), (1, 2))
    tensors = drawn(length, 2, 2, 64, dtype=torch.bfloat16, device="cuda")
    tensors[0][..., 0], tensors[1][..., 0] = 1, -1000  # scores of -125
    got, exact = results(tensors, pattern, backend), results([x.double() for x in tensors], pattern, "reference")
    assert all(x.isfinite().all() for x in got)
    # The first element is rounded a thousandfold in dq.
    assert max(norms(*([x[..., 1:] for x in each] for each in (got, exact)))) < 1e-2


@pytest.mark.parametrize("backend", ["cudnn", "flash", "sdpa", "eager", "auto"])
@pytest.mark.parametrize("layout", ["odd stride", "odd start"])
def test_rows_off_a_16_byte_address_give_the_same_result(backend, layout):
    check("aligned", "head", "softmax", "none", backend, torch.bfloat16, "wide", layout, True, device="cuda")


@pytest.mark.parametrize("backend", ["cudnn", "flash", "sdpa"])
def test_more_segments_than_a_grid_has_blocks_are_served(backend):
    # 2^17 segments in one sequence, and 2^16 in each of two.
    pattern = DilatedPattern((16,), (1,))
    for batch, length in ((1, 2**21), (2, 2**20)):
        tensors = drawn(length, 1, 1, 64, batch=batch, dtype=torch.bfloat16, device="cuda")
        found, expected = (attended(tensors, pattern, name) for name in (backend, "triton"))
        assert max(norms(found, [x.double() for x in expected])) < 1e-2
