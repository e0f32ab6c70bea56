"""The source of the warp-specialised kernels for grids, run on a CPU (`emulator`), equals the oracle.

The library's own launches find boxes, descriptors and arguments, as on a Hopper GPU.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from cases import NORM_TOLERANCE, check_nan, check_part, differentiated, drawn_dlse, norms, stored
from cases import drawn as tokens
from drawn_grids import (
    BOXED,
    CASES,
    EDGES,
    MANY_PROGRAMS,
    ONE_EXTRA_KEY,
    QUERY_BOXES,
    SPECIAL,
    UNEVEN,
    VOLUMES,
    Case,
    biased,
    boxed_part,
    drawn,
    expected,
    special,
    uneven,
    whole,
    wide,
)
from drawn_grids import WHOLE as WHOLE_WINDOWS
from oracle import attending, bias_of, seen_along
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_lib import Neighbourhood
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.machine import kernel_mode
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

emulator = pytest.importorskip("emulator", reason="triton has no build for this platform", exc_type=ImportError)

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

EDGE_RULES = {edge: {"edge": edge} for edge in ("shift", "clip")} | {"causal": {"is_causal": True}}
KERNELS = [f"{emulator.PACKAGE}.hopper.grid_{direction}" for direction in ("forward", "backward", "backward")]
MORE_CASES = [pytest.param(number, marks=pytest.mark.full) for number in range(len(CASES), 8 * len(CASES))]

# Every edge on a line, a plane and a volume; strides, dilations, windows of heads, extra keys and masks.
BIASED = (2, 5, 7, 9, 11, 13, 18)
MORE_BIASED = [pytest.param(x, marks=pytest.mark.full) for x in range(len(CASES)) if x not in BIASED]


WIDE_KERNELS = [f"{emulator.PACKAGE}.hopper.{name}" for name in ("grid_wide", *["grid_wide_backward"] * 2)]
WHOLE_KERNELS = [f"{emulator.PACKAGE}.hopper.grid_whole", *KERNELS[1:]]
# At every wide head_dim; every edge, strides, dilations, windows of heads, grouped heads, extra keys and masks.
WIDE = (2, 5, 9, 11, 13, 18, 21, 24)
MORE_WIDE = [pytest.param(x, marks=pytest.mark.full) for x in range(len(CASES)) if x not in WIDE]


def results_of(sources, case: Case, is_forward_given: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """What the kernels compute, by name: of the forward, and then of the backward.

    is_forward_given: the backward goes on from what is right, and no forward runs.
    """
    given, dout, masks, right = expected(case)
    given = Tensors(*(stored(x, case.layout) for x in given.with_rows), given.bias)
    request = Request(
        HeadNeighbourhoods(case.windows),
        scale=case.head_dim**-0.5,
        key_padding_mask=masks[0],
        extra_padding_mask=masks[1],
        has_bias=case.has_bias,
        bias_gradient=case.has_bias,
    )
    sources.starts.clear()
    if is_forward_given:
        out, lse = right[0].to(given.q.dtype).contiguous(), right[1].float()
    else:
        out, lse = sources.grids.forward(given, request)
    yield from (("out", out), ("lse", lse))
    grads = sources.grids.backward(stored(dout, case.layout), given, out, lse, request)
    count = 6 if case.has_bias else 5
    names = ("dq", "dk", "dv", "dextra_k", "dextra_v", "dbias")
    yield from zip(names[:count], grads[:count], strict=True)


def rules_of(grids, near: Neighbourhood):
    (residues,) = grids._residues_of(near)
    return grids._form(near, None, grids._tiling_of(near), residues).rules


def fault_of(sources, case: Case, is_forward_given: bool = False) -> str | None:
    try:
        for (name, found), right in zip(results_of(sources, case, is_forward_given), expected(case)[3], strict=True):
            if wrong := emulator.wrong({name: found}, [right], NORM_TOLERANCE[case.dtype]):
                return wrong
    except emulator.Fault as fault:
        return str(fault)
    if any(each.named.get("IF_FLAG") and each.named["flag"].item() for each in sources.starts):
        return "the plain kernel ran once more, as for a NaN"
    return None


@pytest.fixture(scope="module")
def sources():
    return emulator.Sources()


@pytest.mark.parametrize("number", [*range(len(CASES)), *MORE_CASES], ids=str)
def test_output_of_the_kernels_source_equals_the_oracle(sources, number):
    assert fault_of(sources, drawn(number)) is None
    modules = [each.kernel.__module__ for each in sources.starts]
    assert [name for name in modules if ".hopper." in name] == KERNELS


@pytest.mark.parametrize("number", [*WIDE, *MORE_WIDE], ids=str)
def test_two_parts_of_columns_equal_the_oracle(sources, number):
    assert fault_of(sources, wide(number)) is None
    modules = [each.kernel.__module__ for each in sources.starts]
    assert [name for name in modules if ".hopper." in name] == WIDE_KERNELS


def check_launches(sources, case: Case, kernels: list[str]) -> None:
    """The kernels equal the oracle, and each has a launch for every size that residues have."""
    assert fault_of(sources, case) is None
    found = [name for name in (each.kernel.__module__ for each in sources.starts) if name in kernels]
    sizes = prod(1 + (axis.cells % axis.dilation > 0) for axis in case.windows[0].axes)
    assert found == [name for name in kernels for _ in range(sizes)]


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        *[pytest.param(KERNELS, uneven(n), id=f"{n}") for n in UNEVEN],
        *[pytest.param(KERNELS, uneven(n)._replace(has_bias=True), id=f"bias, {n}") for n in (6, 19)],
        pytest.param(WIDE_KERNELS, uneven(13)._replace(head_dim=192), id="wide"),
    ],
)
def test_residues_of_each_size_have_a_launch_of_their_own(sources, kernels, case):
    check_launches(sources, case, kernels)


@pytest.mark.parametrize("head_dim", MANY_PROGRAMS)
def test_groups_that_share_a_tile_go_on_in_any_order(monkeypatch, sources, head_dim):
    monkeypatch.setattr(sources.grids, "multiprocessors", lambda device: 12)
    assert fault_of(sources, MANY_PROGRAMS[head_dim]) is None


@pytest.mark.parametrize(
    ("near", "is_found"),
    [
        (Neighbourhood((256, 256), 80, stride=16), True),
        (Neighbourhood((30, 48, 80), (18, 24, 24), stride=(16, 8, 8)), True),
        (Neighbourhood((24, 44, 80), (24, 12, 24), stride=(1, 4, 8)), True),
        (Neighbourhood((8192,), 2048, stride=256), True),
        (Neighbourhood((256, 256), 80, stride=8), False),
        (Neighbourhood((256, 256), 84, stride=16), False),
        (Neighbourhood((256, 256), 80, stride=16, edge="clip"), False),
        (Neighbourhood((256, 256), 80, stride=16, is_causal=(True, False)), False),
        (Neighbourhood((64, 64), (80, 64), stride=16), True),
        (Neighbourhood((33, 32), 16, stride=16, dilation=2), True),
        (Neighbourhood((31, 32), 16, stride=16, dilation=2), False),  # more than the 15 cells of a short residue
    ],
    ids=str,
)
def test_queries_of_a_tile_share_a_window_of_whole_boxes_where_it_is_said(sources, near, is_found):
    tiling = sources.grids._tiling_of_whole_windows((near,))
    assert (tiling is not None) == is_found
    if tiling is not None:
        ndim = len(near.axes)
        for axis, keys, queries in zip(near.axes, tiling.keys[-ndim:], tiling.tile[-ndim:], strict=True):
            cells = torch.arange(axis.cells)
            for residue in range(axis.dilation):
                for tile in cells[residue :: axis.dilation].split(queries):
                    seen = axis.attends(tile[:, None], cells)  # (queries, keys)
                    assert (seen == seen[0]).all()
                    assert seen[0].sum() % keys == 0


@pytest.mark.parametrize("name", WHOLE_WINDOWS)
def test_windows_of_whole_boxes_equal_the_oracle(sources, name):
    check_launches(sources, whole(name), WHOLE_KERNELS)


@pytest.mark.parametrize("edge", EDGE_RULES)
def test_a_tile_of_keys_walks_over_the_groups_of_queries_that_see_it_and_no_others(sources, edge):
    find, grids = sources.module(f"{emulator.PACKAGE}.hopper.boxes").seers_of, sources.grids
    for cells, window, stride in product((24, 48), (3, 8, 17, 24), (1, 2, 3, 8)):
        if stride > window:
            continue
        near = Neighbourhood((cells,), window, stride=stride, **EDGE_RULES[edge])
        (axis,), rules = near.axes, rules_of(grids, near)
        for first in range(0, cells, 8):
            start, end = find(*(emulator.Value(np.int64(x)) for x in (first, cells, window)), 8, 2, rules)
            sees = axis.attends(torch.arange(cells)[:, None], torch.arange(first, min(first + 8, cells))).any(1)
            found = range(max(int(start.array), 0), min(int(end.array), cells))
            assert list(found) == sees.nonzero().squeeze(1).tolist(), near


@pytest.mark.parametrize(
    ("shape", "window", "stride"),
    [((256, 256), (33, 33), (16, 16)), ((30, 48, 80), (18, 24, 24), (16, 8, 8)), ((256, 256), (17, 17), (1, 1))],
    ids=str,
)
def test_no_program_has_much_more_than_its_share_of_the_boxes_that_tiles_of_keys_see(
    monkeypatch, sources, shape, window, stride
):
    """With strides the number of boxes goes up and down from tile to tile, as the programs' turns do."""
    monkeypatch.setattr(sources, "run", lambda each: None)
    monkeypatch.setattr(sources.grids, "multiprocessors", lambda device: 132)
    near, heads = Neighbourhood(shape, window, stride=stride), 8
    x, lse = torch.zeros(1, near.length, heads, 8, dtype=torch.bfloat16), torch.zeros(1, heads, near.length)
    nothing = x[:, :0]
    sources.starts.clear()
    sources.grids.backward(x, Tensors(x, x, x, nothing, nothing), x, lse, Request(near.of_heads(heads)))
    (of_keys,) = [each.named for each in sources.starts if each.named.get("OF_KEYS")]

    sizes = sources.grids._tiling_of(near)
    boxes = np.ones((), dtype=int)
    for axis, tile, box in zip(near.axes, sizes.tile[-len(shape) :], sizes.box[-len(shape) :], strict=True):
        seen = seen_along(axis.cells, axis.window, 1, axis.stride, False, axis.edge)
        along = []
        for first in range(0, axis.cells, tile):
            queries = [i for i, keys in enumerate(seen) if any(first <= key < first + tile for key in keys)]
            along.append(len({(i - queries[0]) // box for i in queries}))
        boxes = np.multiply.outer(boxes, along)
    boxes = np.tile(boxes.reshape(-1), heads)
    assert of_keys["total"] == len(boxes)
    shares = [boxes[number :: of_keys["programs"]].sum() for number in range(of_keys["programs"])]
    assert max(shares) * 132 < 1.1 * boxes.sum()


def test_gradients_of_lse_equal_the_oracles(sources):
    near = Neighbourhood((12, 10), (5, 4), edge=("shift", "clip"))
    q, k, v, dout = tokens(near.length, 2, 1, 64, dtype=torch.bfloat16)
    given = Tensors(q, k, v, k[:, :3], v[:, :3])
    dlse = drawn_dlse(attending(near)(*given[:5])[1])
    right = differentiated(attending(near), [x.double() for x in (*given[:5], dout)], dlse)[2:]
    request = Request(near.of_heads(1), scale=0.125)
    sources.starts.clear()
    out, lse = sources.grids.forward(given, request)
    grads = sources.grids.backward(dout, given, out, lse, request, dlse.float())
    assert [name for name in (each.kernel.__module__ for each in sources.starts) if ".hopper." in name] == KERNELS
    found = dict(zip(("dq", "dk", "dv", "dextra_k", "dextra_v"), grads[:5], strict=True))
    assert emulator.wrong(found, right, NORM_TOLERANCE[torch.bfloat16]) is None


@pytest.mark.parametrize("number", [*BIASED, *MORE_BIASED], ids=str)
def test_a_bias_and_its_gradient_equal_the_oracles(sources, number):
    assert fault_of(sources, biased(number)) is None


def test_the_gradient_of_one_extra_key_beside_a_bias_is_off_by_rounding_alone(sources):
    """It is what the kernels' own out and lse give in float64, with slopes rounded as operands are."""
    case = drawn(ONE_EXTRA_KEY)._replace(has_bias=True)
    given, dout, masks, right = expected(case)
    found = dict(results_of(sources, case))
    scale, row_of = case.head_dim**-0.5, "bihd,bjd->bhij"
    q, k, v = (x.double() for x in (given.q, given.extra_k[:, :, 0], given.extra_v[:, :, 0]))
    weights = (scale * torch.einsum(row_of, q, k) - found["lse"][..., None]).exp()
    weights = weights.masked_fill(masks[1][:, None, None], 0)
    delta = torch.einsum("bihd,bihd->bhi", dout.double(), found["out"].double())
    slopes = weights * (torch.einsum(row_of, dout.double(), v) - delta[..., None])
    dextra_k = scale * torch.einsum("bhij,bihd->bjd", slopes.to(case.dtype).double(), q)
    # The two are equal. Sums in another order may round a result the other way, which is about 5e-4 for one of 256.
    assert norms([found.pop("dextra_k")], [dextra_k[:, :, None].to(case.dtype).double()])[0] < 1e-3
    assert emulator.wrong(found, [*right[:5], *right[6:]], NORM_TOLERANCE[case.dtype]) is None


@pytest.mark.parametrize("number", [9, 18])
def test_a_bias_of_large_windows_equals_the_oracles(monkeypatch, sources, number):
    """Its sums leave room for one buffer of tiles."""
    _, largest = sources.grids.BESIDE_SUMS[128]
    monkeypatch.setitem(sources.grids.BESIDE_SUMS, 128, (largest,))
    assert fault_of(sources, biased(number)) is None
    assert [x.named["BUFFERS"] for x in sources.starts if "BUFFERS" in x.named] == [1, 2]


def fault_of_tables(grids, run) -> str | None:
    """Which table around the kernels by boxes is not what its definition says, if any.

    grids: the module of the launches. run: starts a list of them.
    """
    near, heads, keys = Neighbourhood((9, 8), (5, 3), stride=(1, 2), edge=("shift", "clip")), 4, 150
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    request = Request(near.of_heads(2), scale=2.0**-90, has_bias=True, key_padding_mask=draw(2, keys) > 1)
    bias = draw(heads, 9, 5)
    bias[0, 2], bias[1, 3, 1:4] = 2.0**100, torch.tensor([-torch.inf, torch.nan, -(2.0**100)])
    places = grids.padded_sides(request, heads)
    sums, bounds = torch.full(places, -1), torch.full((heads, 3), -1, dtype=torch.int32)
    margins = [(count - entries) // 2 for count, entries in zip(places[1:], (9, 5), strict=True)]

    def start_of_tables() -> str:
        one, other, flipped = (torch.full(places, torch.nan) for _ in range(3))
        alone = grids._of_tables(bias, request, one)
        run([alone, grids._of_tables(bias, request, other, flipped=flipped, sums=sums, bounds=bounds)])
        most = torch.finfo(torch.float32).max
        scaled = torch.where(bias.isfinite(), (bias.double() / request.scale).clamp(-most, most), bias).float()
        right = torch.nn.functional.pad(scaled, (margins[1], margins[1], margins[0], margins[0]))
        for name, found in (("table", one), ("table", other), ("flipped table", flipped.flip(1, 2))):
            if not torch.allclose(found, right, rtol=1e-6, atol=0.0, equal_nan=True):
                return name
        return "first sums or bounds" if sums.any() or bounds.any() else ""

    def right_bounds() -> tuple[torch.Tensor, str]:
        q, dout = draw(2, 140, heads, 24), draw(2, 143, heads, 40)[:, 3:, :, :24]
        v = draw(2, keys, 2, 40)[..., :24]
        v[request.key_padding_mask] = torch.nan
        v[:, :, 1] *= 1e-25  # whose squares are 0 in float32
        dout[1, -1, 2] *= 20
        dout[0, 0, 3] = torch.nan
        delta, dlse = torch.full((2, heads, 140), torch.nan), 9 * draw(2, heads, 140)
        lse = draw(2, heads, 140)
        lse[0, 1, 5], lse[1, 1, 7], lse[0, 2, 9] = 2.0**22, -(2.0**23), 2.0**25
        lse[0, 0, 2:4] = torch.tensor([-torch.inf, torch.nan])
        dout[0, 9, 2], dlse[0, 2, 9] = 0.0, 0.0  # such a row has no gradient
        given = Tensors(q, v, v, v[:, :0], v[:, :0], bias)
        run([grids._of_bounds(dout, q, lse, dlse, given, request, delta, bounds)])
        of_queries = (q * dout).sum(-1).transpose(1, 2) - dlse
        excess = torch.exp2(lse.double().abs().masked_fill(~lse.isfinite(), 0.0) * 2.0**-20)
        of_v = v.nan_to_num().double().norm(dim=-1).amax((0, 1)).repeat_interleave(2)
        of_dout = (dout.norm(dim=-1) * excess.transpose(1, 2)).amax((0, 1))
        right = torch.stack([of_dout, of_v, (of_queries.abs() * excess).amax((0, 2))], 1)
        if not torch.allclose(delta, of_queries, atol=1e-4, equal_nan=True):
            return right, "delta"
        is_same = torch.allclose(bounds.view(torch.float32).double(), right, rtol=1e-5, atol=1e-18, equal_nan=True)
        return right, "" if is_same else "bounds"

    def gradient(right: torch.Tensor) -> str:
        bounds[2, 2] = 0  # as if products of v cancelled
        sums.copy_(torch.randint(2**40, sums.shape, generator=torch.Generator().manual_seed(0)) - 2**39)
        dbias = torch.empty(bias.shape)
        run([grids._of_gradient(sums, bounds, dbias, request)])
        entries = sums[:, margins[0] :, margins[1] :][:, :9, :5]
        unit = (entries / dbias.double()).mean((1, 2), keepdim=True)[:3]
        if not dbias[3].isnan().all() or not torch.allclose(dbias[:3], (entries[:3] / unit).float(), rtol=1e-6):
            return "gradient"
        largest = right[:, 0] * right[:, 1] + bounds[:, 2].view(torch.float32)
        in_units = largest[:3] * unit.flatten()
        return "" if (in_units < 2**24).all() and (in_units[:2] > 2**22).all() else "unit"

    if wrong := start_of_tables():
        return wrong
    right, wrong = right_bounds()
    return wrong or gradient(right) or None


def test_tables_around_the_kernels_are_those_of_their_definitions(sources):
    assert fault_of_tables(sources.grids, lambda starts: sources._start(lambda: starts)) is None


@pytest.mark.skipif(kernel_mode() != "interpreted", reason="of kernels on a CPU")
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_tables_around_the_kernels_are_those_of_their_definitions_in_tritons_interpreter():
    from hilbert_lib.attention.triton.hopper import grid_launch
    from hilbert_lib.attention.triton.start import start

    assert fault_of_tables(grid_launch, lambda starts: start(lambda: starts, starts[0].arguments[:1])) is None


def test_sums_of_large_scores_stay_in_32_bits(sources):
    """Rounding makes weights of 1.04 of these scores. All queries of a tile add them to the same entry."""
    near, draw = Neighbourhood((128,), 1), partial(torch.randn, generator=torch.Generator().manual_seed(0))
    v = draw(1, 128, 1, 16).to(torch.bfloat16)
    given = Tensors(torch.zeros_like(v), torch.zeros_like(v), v, v[:, :0], v[:, :0], torch.full((1, 1), 6.7e5))
    request = Request(near.of_heads(1), scale=0.3, has_bias=True, bias_gradient=True)
    out, lse = sources.grids.forward(given, request)
    dlse = torch.full_like(lse, 0.98)
    dbias = sources.grids.backward(torch.zeros_like(v), given, out, lse, request, dlse).bias
    assert torch.allclose(dbias, dlse.sum(), rtol=0.05)


class Launches(TorchDispatchMode):
    """Counts operations of torch that start a kernel on a GPU: views and empty tensors start none."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        makes_room = "empty" in function.overloadpacket.__name__
        self.count += not (function.is_view or makes_room) and result.numel() > 0
        return result


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_a_bias_takes_one_launch_more_of_a_forward_and_two_of_a_backward(monkeypatch, sources, dtype):
    """The host starts launches one after the other: it takes longer for many small ones than a GPU for the kernels."""
    monkeypatch.setattr(sources, "run", lambda each: None)
    near, heads = Neighbourhood((24, 24), 7), 4
    x = torch.zeros(1, near.length, heads, 64, dtype=torch.bfloat16)
    bias = None if dtype is None else torch.zeros(heads, 13, 13, dtype=dtype)
    given = Tensors(x, x.clone(), x.clone(), x[:, :0], x[:, :0], bias)
    request = Request(near.of_heads(heads), scale=0.125, has_bias=bias is not None, bias_gradient=bias is not None)
    counts = []
    sources.starts.clear()
    with Launches() as launches:
        out, lse = sources.grids.forward(given, request)
        counts.append(launches.count + len(sources.starts))
        sources.grids.backward(x, given, out, lse, request)
        counts.append(launches.count + len(sources.starts) - counts[0])
    assert counts == ([3, 3] if bias is None else [4, 5])


@pytest.mark.parametrize("box", VOLUMES)
def test_a_bias_of_a_volume_equals_the_oracles_in_boxes_of_every_shape(sources, box):
    case = Case((VOLUMES[box],), 1, 2, 16, 0, False, False, "bshd", torch.bfloat16, has_bias=True)
    assert fault_of(sources, case) is None
    assert sources.grids._box_of(VOLUMES[box]) == box


@pytest.mark.parametrize(
    ("part", "head_dim"),
    [("amid a plane", 64), ("all along what goes round", 16), ("inside", 16), ("round the end", 128)],
)
def test_a_part_of_a_grid_has_the_bias_of_the_whole(sources, part, head_dim):
    functions = sources.grids.forward, sources.grids.backward
    check_part(boxed_part(part), functions, dtype=torch.bfloat16, head_dim=head_dim, has_bias=True)


@pytest.mark.parametrize(
    "near", [Neighbourhood((32, 24), 16, stride=16), Neighbourhood((20, 40), 3), Neighbourhood((9, 20), 5)], ids=str
)
@pytest.mark.parametrize("head_dim", [128, 192])
def test_queries_that_are_the_keys_themselves_change_nothing(sources, near, head_dim):
    x, dout = tokens(near.length, 2, 2, head_dim, dtype=torch.bfloat16)[2:]
    nothing, request = x[:, :0], Request(near.of_heads(2), scale=head_dim**-0.5)
    results = []
    for given in (Tensors(x, x, x, nothing, nothing), Tensors(x, x.clone(), x.clone(), nothing, nothing)):
        out, lse = sources.grids.forward(given, request)
        results.append((out, lse, *sources.grids.backward(dout, given, out, lse, request)[:3]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", SPECIAL)
def test_output_on_special_grids_equals_the_oracle(sources, name):
    assert [fault_of(sources, case) for case in special(name)] == [None, None]


@pytest.mark.parametrize(
    ("side", "window", "stride", "kind"),
    [
        (524_288, 4096, 4096, "shift"), (524_288, 8192, 4096, "wrap"), (100_000, 30_000, 25_000, "clip"),
        (1_048_576, 2048, 2048, "causal"),
    ],
)  # fmt: skip
def test_who_sees_a_key_of_a_long_axis_is_found_in_32_bits(sources, side, window, stride, kind):
    edge = "clip" if kind == "causal" else kind
    near = Neighbourhood((side,), window, stride=stride, is_causal=kind == "causal", edge=edge)
    keys = np.array([0, 1, side // 2, side - 2, side - 1])
    find = sources.module(f"{emulator.PACKAGE}.hopper.boxes").seers_of
    numbers = (emulator.Value(np.array(x, np.int32)) for x in (keys, side, window))
    found = [x.array for x in find(*numbers, 1, 2, rules_of(sources.grids, near))]
    for key, start, end in zip(keys.tolist(), *found, strict=True):
        right = near.axes[0].attends(torch.arange(side), torch.tensor(key)).nonzero().squeeze(1)
        assert torch.equal(right, torch.arange(max(start, -side), min(end, 2 * side)).remainder(side).sort().values)


def run_part(sources, part: str) -> None:
    """Compares a part, of 40 columns or of 128 in turn."""
    functions = sources.grids.forward, sources.grids.backward
    number = [*BOXED, *QUERY_BOXES].index(part)
    check_part(boxed_part(part), functions, dtype=torch.bfloat16, head_dim=(128, 40)[number % 2])


@pytest.mark.parametrize("part", [*BOXED, *QUERY_BOXES])
def test_a_part_of_a_grid_is_what_it_is_in_the_whole(sources, part):
    run_part(sources, part)


@pytest.mark.parametrize("part", ["a border", "round the end", "strided", "amid a plane"])
def test_a_part_of_a_grid_of_wide_heads_is_what_it_is_in_the_whole(sources, part):
    sources.starts.clear()
    functions = sources.grids.forward, sources.grids.backward
    check_part(boxed_part(part), functions, dtype=torch.bfloat16, head_dim=136)
    modules = {each.kernel.__module__ for each in sources.starts}
    assert {name for name in modules if ".hopper." in name} == set(WIDE_KERNELS)


def test_the_cases_take_every_way_through_the_kernels(monkeypatch, sources):
    monkeypatch.setattr(sources, "run", lambda each: None)
    flags, both = ("EXTRA", "PADDING", "EXTRA_PADDING"), (False, True)
    found, edges, boxes = set(), set(), set()
    for number in range(len(CASES)):
        list(results_of(sources, drawn(number)))
        (named,) = [each.named for each in sources.starts if each.kernel.__module__ == KERNELS[0]]
        columns, rules = named["BLOCK_D"], named["RULES"]
        found |= {(columns, rules.axes), (columns, "dilated", rules.is_dilated)}
        found |= {(columns, flag, named[flag]) for flag in flags}
        for n in range(3 - rules.axes, 3):
            kind = "causal" if rules.is_causal[n] else EDGES[rules.edge[n]]
            edges |= {(rules.axes, n, kind), (columns, kind), (rules.stride[n] > 1, kind)}
        boxes.add(rules.box)
    assert found == {*product((64, 128), (1, 2, 3)), *product((64, 128), ("dilated", *flags), both)}
    axes = [(ndim, n) for ndim in (1, 2, 3) for n in range(3 - ndim, 3)]
    assert edges == {(*each, kind) for each in (*axes, (64,), (128,), (False,), (True,)) for kind in EDGES}
    # Of a volume each box has a case of its own.
    assert boxes | VOLUMES.keys() == {side for sides in sources.grids.BOXES.values() for side in sides}


@pytest.mark.parametrize("head_dim", [40, 128, 192])
@pytest.mark.parametrize("at", range(5), ids=Tensors._fields[:5])
def test_a_nan_reaches_only_those_who_see_it(sources, at, head_dim):
    """Here the plain kernel runs once more, as the warp-specialised one asks for."""
    near = Neighbourhood((12, 20), (5, 4), dilation=(1, 2), edge=("clip", "wrap"))
    given = [torch.randn(1, rows, 2, head_dim).bfloat16() for rows in (240, 240, 240, 3, 3)]
    masks = [torch.arange(rows)[None] % 5 == 0 for rows in (240, 3)]
    request = Request(near.of_heads(2), scale=head_dim**-0.5, key_padding_mask=masks[0], extra_padding_mask=masks[1])
    hidden = {"key_padding_mask": masks[0], "extra_padding_mask": masks[1]}
    exact, _ = attending(near, **hidden)(*given)
    out = check_nan(near, given, at, 97 if at < 3 else 1, lambda *x: sources.grids.forward(Tensors(*x), request)[0])
    kept = ~out.isnan()
    assert (out - exact)[kept].norm() <= 4e-3 * exact[kept].norm()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_of_thousands_count_for_those_alone_who_see_the_key(sources, head_dim):
    near = Neighbourhood((16, 24), (5, 9))
    given = Tensors(*(torch.randn(1, rows, 1, head_dim).bfloat16() for rows in (384, 384, 384, 0, 0)))
    given.k[:, 200] *= 1e4
    exact, _ = attending(near, scale=1.0)(*given)
    out, _ = sources.grids.forward(given, Request(near.of_heads(1)))
    assert (out - exact).norm(dim=-1).max() <= 1e-2 * exact.norm(dim=-1).max()


@pytest.mark.parametrize("at", [(-1, 4, 0), (4, -3, 0), (5, 0, 0)])
def test_a_box_is_zero_outside_of_the_tensor(at):
    x, block = torch.randn(5, 6, 64), (2, 4, 64)
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float32)
    host = TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
    around = torch.nn.functional.pad(x, (0, 0, 4, 4, 2, 2))
    a, b, _ = at
    right = around[a + 2 : a + 4, b + 4 : b + 8]
    assert torch.equal(torch.from_numpy(emulator.Descriptor(host).box(list(at))), right)


def test_a_bias_that_is_no_number_reaches_only_those_who_see_it(sources):
    """The plain kernel runs once more, with the bias."""
    near = Neighbourhood((12, 20), (5, 4), edge=("clip", "wrap"))
    extra = tokens(2, 2, 1, 40, dtype=torch.bfloat16)[1:3]
    given = Tensors(*tokens(240, 2, 1, 40, dtype=torch.bfloat16)[:3], *extra, torch.randn(2, 9, 7))
    exact, _ = attending(near)(*(x.double() for x in given))
    given.bias[1, 6, 4] = torch.nan  # the key two rows on, a column to the right
    out, _ = sources.grids.forward(given, Request(near.of_heads(1), scale=40**-0.5, has_bias=True))
    reached = bias_of(near, given.bias, range(240), 2).isnan().any(-1).T[None, :, :, None]
    assert out.isnan().equal(reached.expand_as(out))
    assert (out - exact)[~reached.expand_as(out)].norm() <= 4e-3 * exact.norm()
