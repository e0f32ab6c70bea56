"""The kernels for packed lists equal a float64 oracle; without a GPU they run here in Triton's interpreter."""

from functools import partial
from itertools import chain

import pytest
import torch
from cases import POINT_CASES, check_points, points_of
from torch import Tensor

from hilbert_lib import PointNeighbourhood, attend, explain_backend
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.attention.triton import limits
from hilbert_lib.lab.sweeps.memory import captured
from hilbert_lib.patterns import point_lists
from hilbert_lib.patterns.packed_lists import PackedLists
from hilbert_lib.patterns.points import ListedPairs

launch = pytest.importorskip(
    "hilbert_lib.attention.triton.lists_launch", reason="triton has no build for this platform"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpus_or_in_full = pytest.mark.full if DEVICE == "cpu" else pytest.mark.gpu
# Relative to the largest value: sums over few keys in half precision have few digits.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def longer(monkeypatch):
    """As of longer calls, whose gradients are several launches; short ones are tested on grids."""
    monkeypatch.setattr(launch, "MOST_TILES_AT_ONCE", 0)


def drawn(queries: int, keys: int, heads: tuple[int, int], head_dim: int, dtype=torch.float32, extra=0, masks=False):
    """A relation with rows that see nothing and rows that nobody sees, and a call on it."""
    mask = torch.rand(queries, keys) < 0.3
    mask[1 : queries // 2 : 40] = False
    mask[:, 1 : keys // 2 : 40] = False
    counts = {"q": queries, "k": keys, "v": keys, "extra_k": extra, "extra_v": extra}
    given = [torch.randn(2, n, heads[x != "q"], head_dim).to(DEVICE, dtype) for x, n in counts.items()]
    padding = torch.rand(2, keys) < 0.3 if masks else None
    extra_padding = torch.rand(2, extra) < 0.3 if masks and extra else None
    orders = torch.randperm(queries), torch.randperm(keys)
    lists = PackedLists.from_mask(mask, *orders), PackedLists.from_mask(mask.T, *orders[::-1])
    request = Request(
        ListedPairs(),
        scale=head_dim**-0.5,
        key_padding_mask=on_device(padding),
        extra_padding_mask=on_device(extra_padding),
        lists=tuple(x.to(DEVICE) for each in lists for x in each.tensors),
    )
    return Tensors(*given), request, mask


def on_device(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def oracle(inputs: Tensors, mask: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """out and lse in float64: every pair, one softmax."""
    q, k, v, extra_k, extra_v = inputs[:5]
    batch, queries, heads, _ = q.shape
    sees = mask[None].expand(batch, -1, -1)
    if request.key_padding_mask is not None:
        sees = sees & ~request.key_padding_mask.cpu()[:, None]
    sees_extra = torch.ones(batch, queries, extra_k.shape[1], dtype=torch.bool)
    if request.extra_padding_mask is not None:
        sees_extra = sees_extra & ~request.extra_padding_mask.cpu()[:, None]
    sees = torch.cat([sees, sees_extra], 2)[:, None]
    k, v = (torch.cat(x, 1).repeat_interleave(heads // k.shape[2], 2) for x in ((k, extra_k), (v, extra_v)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * request.scale
    scores = scores.masked_fill(~sees, -torch.inf)
    lse = scores.logsumexp(3)
    weights = torch.where(sees, (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def check(inputs: Tensors, request: Request, mask: Tensor, with_dlse=True):
    """Output, lse and all gradients beside the oracle's."""
    tolerance = TOLERANCES[inputs.q.dtype]
    out, lse = launch.forward(inputs, request)
    leaves = Tensors(*(x.double().cpu().requires_grad_() for x in inputs[:5]))
    expected, expected_lse = oracle(leaves, mask, request)
    has_keys = expected_lse.isfinite()
    assert lse.cpu().isfinite().equal(has_keys)
    torch.testing.assert_close(lse.cpu().double(), expected_lse.detach(), rtol=tolerance, atol=tolerance)
    assert_close("out", out, expected, tolerance)
    dout = torch.randn(out.shape).to(DEVICE, out.dtype)
    dlse = torch.randn(lse.shape).to(DEVICE) if with_dlse else None
    value = (expected * dout.double().cpu()).sum()
    if with_dlse:
        value = value + (expected_lse * dlse.double().cpu())[has_keys].sum()
    wanted = torch.autograd.grad(value, leaves[:5])
    grads = launch.backward(dout, inputs, out, lse, request, dlse)
    again = launch.backward(dout, inputs, out, lse, request, dlse)
    for name, grad, other, right, x in zip(Tensors._fields, grads, again, wanted, inputs, strict=False):
        assert grad.dtype == x.dtype
        assert grad.equal(other), f"the bits of {name}'s gradient"
        assert_close(f"gradient of {name}", grad, right, tolerance)


def assert_close(name: str, x: Tensor, expected: Tensor, tolerance: float):
    assert x.shape == expected.shape, name
    torch.testing.assert_close(
        x.double().cpu(), expected.detach(), rtol=0, atol=tolerance * expected.abs().max().item() if x.numel() else 0.0,
        msg=lambda text: f"{name}: {text}",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "heads", "head_dim", "dtype", "extra", "masks"),
    [
        ((70, 130), (2, 1), 16, torch.float32, 0, False),
        ((130, 70), (2, 2), 18, torch.bfloat16, 3, True),
        ((64, 64), (3, 1), 48, torch.float16, 70, True),
        ((1, 65), (1, 1), 64, torch.float32, 0, True),
        ((65, 1), (1, 1), 8, torch.float32, 1, False),
        ((40, 70), (1, 1), 256, torch.float32, 0, False),
    ],
)
def test_output_lse_and_gradients_equal_the_oracle(sizes, heads, head_dim, dtype, extra, masks):
    torch.manual_seed(0)
    check(*drawn(*sizes, heads, head_dim, dtype, extra, masks), with_dlse=head_dim != 16)


def test_what_is_no_number_in_v_reaches_only_those_who_see_it():
    torch.manual_seed(1)
    inputs, request, mask = drawn(70, 80, (2, 2), 16, extra=2)
    for bad in (torch.nan, torch.inf):
        v = inputs.v.clone()
        v[0, [1, 7], 1, 3] = bad  # nobody sees the first
        out, lse = launch.forward(inputs._replace(v=v), request)
        clean, clean_lse = launch.forward(inputs, request)
        sees = torch.zeros(out.shape, dtype=torch.bool)
        sees[0, :, 1, 3] = mask[:, 7]
        assert out.isfinite().logical_not().cpu().equal(sees)
        assert out.cpu()[~sees].equal(clean.cpu()[~sees])
        assert lse.equal(clean_lse)
        dout = torch.randn_like(out)
        dout[0, mask[:, 7], 1] = 0.0  # and delta 0 * NaN of those who see it
        dq, dk, dv, *_ = launch.backward(dout, inputs._replace(v=v), clean, lse, request)
        assert dq[0, ~mask[:, 7]].isfinite().all()
        assert dv.isfinite().all()
        assert not dk[:, 1].any()
        assert dk[:, torch.arange(80) != 7].isfinite().all()


@pytest.mark.parametrize("case", POINT_CASES, ids=str)
def test_points_equal_the_oracle(case):
    kind, dtype, *rest = case
    check_points("triton", kind, torch.float32 if dtype == torch.float64 else dtype, *rest, device=DEVICE)


@pytest.mark.parametrize("kind", ["even", "clouds", "keys", "alone"])
def test_lists_by_kernels_are_those_by_comparison(kind, monkeypatch):
    made, points = [], points_of(kind)
    for has_kernel in (True, False):
        monkeypatch.setattr(point_lists, "_has_kernel", lambda device, has_kernel=has_kernel: has_kernel)
        options = {} if points.key_coordinates is None else {"keys": points.key_coordinates.to(DEVICE)}
        batch = None if points.batch is None else points.batch.to(DEVICE)
        cells = points.coordinates.to(DEVICE)
        made.append(PointNeighbourhood(cells, points.window, batch, dilation=points.dilation, **options))
    assert len(made[0].list_tensors) == len(made[1].list_tensors)
    assert all(map(torch.equal, made[0].list_tensors, made[1].list_tensors))


@on_gpus_or_in_full
@pytest.mark.parametrize("kernel", launch.CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_configurations_of_gpus_equal_the_oracle(kernel, dtype, monkeypatch):
    """Of each kernel, all that a GPU is given; the interpreter has its own."""
    torch.manual_seed(2)
    tables = launch.CONFIGS, launch.ELSEWHERE, launch.ON_B200
    for (size, head_dim), config in chain.from_iterable(table[kernel].items() for table in tables):
        if size == dtype.itemsize:
            others = launch.INTERPRETED if DEVICE == "cpu" else {}
            monkeypatch.setattr(launch, "INTERPRETED", others | {kernel: config})
            check(*drawn(70, 66, (2, 1), head_dim, dtype, extra=3, masks=True))


@pytest.mark.gpu
def test_a_cuda_graph_replays_attention_over_points():
    points = points_of("even").to("cuda")
    tensors = [torch.randn(1, 100, 2, 32, device="cuda", requires_grad=True) for _ in range(3)]
    run = partial(attend, pattern=points, backend="triton")

    def step() -> tuple[Tensor, ...]:
        out = run(*tensors)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))

    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, step()))


@pytest.mark.gpu
def test_a_compiled_call_over_points_runs_the_kernels():
    points = points_of("odd").to("cuda")
    tensors = [torch.randn(2, 90, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    results = []
    for run in (partial(attend, pattern=points), torch.compile(partial(attend, pattern=points), fullgraph=True)):
        out = run(*tensors)
        results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
    assert all(map(torch.equal, *results))
    assert explain_backend(*tensors, points).chosen == "triton"


def test_a_call_known_from_other_points_refuses_too_many_tiles(monkeypatch):
    far, near = (PointNeighbourhood(step * torch.arange(128)[:, None], 65) for step in (64, 1))
    assert far.lists.tiles < near.lists.tiles
    x = torch.randn(1, 128, 1, 16, device=DEVICE)
    monkeypatch.setattr(limits, "TILES", far.lists.tiles)
    for _ in range(2):  # of the second all is known
        attend(x, x, x, far.to(DEVICE), backend="triton")
    with pytest.raises(ValueError, match=r"serves up to [\d,]+ tiles of lists"):
        attend(x, x, x, near.to(DEVICE), backend="triton")
