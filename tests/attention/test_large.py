"""Tensors past 2^31 elements: the kernels, those for grids too, address both ends of them. Run by `make test-gpu`."""

from dataclasses import replace

import pytest
import torch
from cases import TOLERANCE, assert_close, attended

from hilbert_lib import DilatedPattern, Neighbourhood, Ordering, PointNeighbourhood
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.request import Request, Tensors

pytest.importorskip("hilbert_lib.attention.triton.launch", reason="triton has no build for this platform")
from hilbert_lib.attention.triton import decode

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PATTERN = DilatedPattern((1024, 8192), (1, 8))
LENGTH, HEADS, HEAD_DIM = 2**20 + 2085, 16, 128
# A segment of the longest branch can be checked alone: the first, and the short last one, which lies past 2^31.
SEGMENTS = slice(0, 8192), slice(2**20, LENGTH)
ROWS, COLUMNS = 3793, 277  # of a grid of that length


def dense() -> list[torch.Tensor]:
    return [torch.randn(1, LENGTH, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def packed() -> list[torch.Tensor]:
    # A head's stride times its number passes 2^31 as well.
    heads_first = torch.randn(1, HEADS, 3, LENGTH, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    assert heads_first.stride(1) * (HEADS - 1) > 2**31
    return [heads_first[:, :, n].transpose(1, 2) for n in range(3)]


@pytest.fixture(params=[dense, packed], ids=["dense", "packed"])
def qkv(request):
    torch.manual_seed(0)
    return request.param()


@pytest.mark.parametrize("kernels", ["hopper", "plain", "plain, of rows in an order"])
def test_forward_and_backward_are_exact_at_both_ends(qkv, kernels):
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    q, k, v = qkv
    assert min(x.numel() for x in qkv) > 2**31
    order = Ordering.linear(LENGTH)
    if kernels == "plain, of rows in an order":
        order = Ordering.from_curve("hilbert", LENGTH)
        k, v = order.apply(k, dim=1), order.apply(v, dim=1)
    dout = torch.randn(q.shape, device=q.device, dtype=q.dtype)
    options = {"is_causal": True, "kv_ordering": None if order.kind == "linear" else order}
    out, lse, *gradients = attended((q, k, v, dout), PATTERN, "hopper" if kernels == "hopper" else "triton", **options)
    call = Request(PATTERN, is_causal=True, scale=HEAD_DIM**-0.5)
    for segment in SEGMENTS:
        *exact, exact_dout = (x[:, segment].double() for x in (*qkv, dout))
        expected = reference.forward(Tensors(*exact), call)
        assert_close((out[:, segment], lse[:, :, segment]), expected, TOLERANCE[out.dtype][:2])
        expected_gradients = reference.backward(exact_dout, Tensors(*exact), *expected, call)[:3]
        rows = order.inverse[segment].to(out.device)  # where in storage the positions of the segment lie
        mine = gradients[0][:, segment], *(x[:, rows] for x in gradients[1:])
        assert_close(mine, expected_gradients, TOLERANCE[out.dtype][2:] * 3)


def points_of_grid(rows: int) -> PointNeighbourhood:
    """The cells of some rows of the grid."""
    lines = torch.arange(rows, device="cuda"), torch.arange(COLUMNS, device="cuda")
    return PointNeighbourhood(torch.cartesian_prod(*lines), 5)


@pytest.mark.parametrize("kernels", ["boxes", "plain", "lists", "plain, of rows in an order"])
def test_a_grid_is_exact_at_both_ends(qkv, kernels):
    if kernels == "boxes" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    # Of 12 rows of the grid alone, the 6 at its edge are as in the whole: windows reach 2 rows beyond, gradients 4.
    near, part = (Neighbourhood((rows, COLUMNS), 5) for rows in (ROWS, 12))
    if kernels == "lists":
        near, part = points_of_grid(ROWS), points_of_grid(12)
    is_stored, backend = kernels.endswith("order"), "hopper" if kernels == "boxes" else "triton"
    order = Ordering.from_curve("hilbert", LENGTH, grid=near.shape) if is_stored else Ordering.linear(LENGTH)
    dout = torch.randn(qkv[0].shape, device=qkv[0].device, dtype=qkv[0].dtype)
    options = {} if kernels == "lists" else {"ordering": order}
    out, lse, *gradients = attended((*qkv, dout), near, backend, **options)
    cells = 12 * COLUMNS
    for first, own in ((0, slice(0, cells // 2)), (LENGTH - cells, slice(cells // 2, cells))):
        slots = order.inverse[first : first + cells].to(out.device)
        exact = [x[:, slots].double() for x in (*qkv, dout)]
        expected, expected_lse, *expected_gradients = attended(exact, part, "eager")
        mine = [x[:, slots[own]] for x in (out, *gradients)]
        theirs = [x[:, own] for x in (expected, *expected_gradients)]
        assert_close(mine, theirs, (TOLERANCE[out.dtype][0], *[TOLERANCE[out.dtype][2]] * 3))
        assert_close([lse[:, :, slots[own]]], [expected_lse[:, :, own]], TOLERANCE[out.dtype][1])


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_is_exact_at_both_ends(qkv, queries):
    q, k, v = qkv
    for segment in SEGMENTS:
        start = segment.stop - queries
        asked = q[:, start : segment.stop]
        call = Request(PATTERN, scale=HEAD_DIM**-0.5, query_start=start)
        exact = (x.double() for x in (asked, k[:, segment], v[:, segment]))
        expected = reference.forward(Tensors(*exact), replace(call, query_start=start - segment.start))
        assert_close(decode.attend_in_parts(asked, k, v, call), expected, TOLERANCE[q.dtype][:2])
