"""Points on a CUDA device: lists, backends, and a million points. Run by `make test-gpu`."""

import pytest
import torch
from cases import POINT_CASES, TOLERANCE, assert_close, check_points, differentiated, drawn, points_of

from hilbert_lib import PointAttention, PointNeighbourhood, attend, explain_backend

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("kind", ["odd", "even", "clouds", "keys", "alone"])
def test_lists_that_a_gpu_makes_hold_the_same_pairs(kind):
    points = points_of(kind)
    given = (points.coordinates, points.batch, points.key_coordinates, points.key_batch)
    coordinates, batch, keys, key_batch = (None if x is None else x.to(DEVICE) for x in given)
    made = PointNeighbourhood(
        coordinates, points.window, batch, keys=keys, key_batch=key_batch, dilation=points.dilation
    )
    assert made.device.type == DEVICE
    assert made.lists.mask.cpu().equal(points.lists.mask)
    assert made.turned.mask.cpu().equal(points.turned.mask)
    assert made.order.cpu().equal(points.order)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("case", POINT_CASES, ids=str)
def test_points_equal_the_oracle_on_a_gpu(backend, case):
    check_points(backend, *case, device=DEVICE)


def surface(side: int) -> torch.Tensor:
    """A wavy sheet of side * side cells in three axes, in no order."""
    x, y = torch.meshgrid(*[torch.arange(side, device=DEVICE)] * 2, indexing="ij")
    z = (side / 50 * (torch.sin(12 * x / side) + torch.cos(17 * y / side))).round().long()
    cells = torch.stack([x, y, z], -1).view(-1, 3) - side // 2
    return cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(0)).to(DEVICE)]


def check_rows(points: PointNeighbourhood, tensors: list[torch.Tensor], rows: list[int]) -> None:
    """Output, lse and dq of some queries, and dk and dv of some keys, beside those of these rows alone in float64."""
    q, k, v, dout = tensors
    out, lse, dq, dk, dv = differentiated(lambda *x: attend(*x, points, return_lse=True), tensors)
    close, close_lse, close_grad = TOLERANCE[q.dtype]
    scale = q.shape[3] ** -0.5

    def weights_of(query: int, keys: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bhd,bkhd->bhk", q[:, query].double(), k[:, keys].double()) * scale
        return (scores - lse[:, :, query, None].double()).exp()

    def dscores_of(query: int, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = dout[:, query].double()
        delta = (own * out[:, query].double()).sum(-1, keepdim=True)
        return weights * (torch.einsum("bhd,bkhd->bhk", own, v[:, keys].double()) - delta) * scale

    for row in rows:
        keys = points.keys(row)
        own_k, own_v = k[:, keys].double(), v[:, keys].double()
        scores = torch.einsum("bhd,bkhd->bhk", q[:, row].double(), own_k) * scale
        assert_close([lse[:, :, row]], [scores.logsumexp(-1)], close_lse)
        assert_close([out[:, row]], [torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), own_v)], close)
        dscores = dscores_of(row, keys, weights_of(row, keys))
        assert_close([dq[:, row]], [torch.einsum("bhk,bkhd->bhd", dscores, own_k)], close_grad)
        right_k, right_v = 0.0, 0.0
        key = torch.tensor([row], device=DEVICE)
        for query in points.queries(row).tolist():
            weights = weights_of(query, key)
            right_v = right_v + weights * dout[:, query].double()
            right_k = right_k + dscores_of(query, key, weights) * q[:, query].double()
        assert_close([dk[:, row], dv[:, row]], [right_k, right_v], close_grad)


def spread(count: int, most: int = 12) -> list[int]:
    """Some rows, the first and the last among them."""
    return sorted({0, count - 1, *range(0, count, count // most)})


def test_rows_of_a_million_points_are_exact_and_the_same_every_time():
    points = PointNeighbourhood(surface(1000), 5)
    tensors = drawn(10**6, 2, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    assert explain_backend(*tensors[:3], points).chosen == "triton"
    check_rows(points, tensors, spread(10**6))
    first, again = (differentiated(lambda *x: attend(*x, points, return_lse=True), tensors) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.alone
def test_rows_past_2_to_the_31_elements_are_exact():
    points = PointNeighbourhood(surface(1000), (4, 5, 3))
    tensors = drawn(10**6, 18, 18, 128, dtype=torch.bfloat16, device=DEVICE)
    assert tensors[0].numel() > 2**31
    check_rows(points, tensors, spread(10**6, 6))


def test_a_cuda_graph_replays_a_call_of_points_that_were_made_outside():
    points, (q, k, v, _) = points_of("even").to(DEVICE), drawn(100, 2, 1, 16, device=DEVICE)
    attend(q, k, v, points)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, points)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert out.equal(attend(q, k, v, points))


@pytest.mark.parametrize("kind", ["odd", "keys"])
def test_a_layer_over_points_has_its_outputs_on_a_gpu_too(kind, compiled_code_is_forgotten):
    torch.manual_seed(0)
    layer, points = PointAttention(64, 4, kv_heads=2), points_of(kind)
    x = torch.randn(2, points.lists.queries, 64)
    keys = torch.randn(2, points.lists.keys, 64) if points.has_keys else None
    expected = layer(x, points, keys=keys)
    right = [expected, *torch.autograd.grad(expected.square().sum(), list(layer.parameters()))]
    layer, points, x, keys = layer.cuda(), points.to("cuda"), x.cuda(), None if keys is None else keys.cuda()
    for run in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            out = run(x, points, keys=keys)
        found = [out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))]
        for mine, exact in zip(found, right, strict=True):
            assert (mine.detach().cpu().float() - exact).norm() <= 1e-2 * exact.norm()


def test_points_on_another_device_are_refused_by_name():
    q = torch.randn(1, 90, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match=r"pattern must be on the device of q \(cuda:0\).*pattern.to\(q.device\)"):
        attend(q, q, q, points_of("odd"))
    points = points_of("odd")
    assert points.to(DEVICE) is points.to("cuda:0")
