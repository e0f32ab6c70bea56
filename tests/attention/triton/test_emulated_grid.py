"""The source of the warp-specialised kernels for grids, run on a CPU (`emulator`), equals the oracle.

The library's own launches find boxes, descriptors and arguments, as on a Hopper GPU.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from cases import NORM_TOLERANCE, check_nan, check_part, differentiated, drawn_dlse, norms, stored
from cases import drawn as tokens
from drawn_grids import (
    BOXED,
    CASES,
    EDGES,
    ONE_EXTRA_KEY,
    QUERY_BOXES,
    SPECIAL,
    VOLUMES,
    Case,
    biased,
    boxed_part,
    drawn,
    expected,
    special,
)
from oracle import attending, bias_of

from hilbert_lib import Neighbourhood
from hilbert_lib.attention.request import Request, Tensors
from hilbert_lib.patterns.neighbourhood import HeadNeighbourhoods

emulator = pytest.importorskip("emulator", reason="triton has no build for this platform", exc_type=ImportError)

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

KERNELS = [f"{emulator.PACKAGE}.hopper.grid_{direction}" for direction in ("forward", "backward", "backward")]
MORE_CASES = [pytest.param(number, marks=pytest.mark.full) for number in range(len(CASES), 8 * len(CASES))]

# Every edge on a line, a plane and a volume; strides, dilations, windows of heads, extra keys and masks.
BIASED = (2, 5, 7, 9, 11, 13, 18)
MORE_BIASED = [pytest.param(x, marks=pytest.mark.full) for x in range(len(CASES)) if x not in BIASED]


def results_of(sources, case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """What the kernels compute, by name: of the forward, and then of the backward."""
    given, dout, masks, _ = expected(case)
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
    out, lse = sources.grids.forward(given, request)
    yield from (("out", out), ("lse", lse))
    grads = sources.grids.backward(stored(dout, case.layout), given, out, lse, request)
    count = 6 if case.has_bias else 5
    names = ("dq", "dk", "dv", "dextra_k", "dextra_v", "dbias")
    yield from zip(names[:count], grads[:count], strict=True)


def fault_of(sources, case: Case) -> str | None:
    try:
        for (name, found), right in zip(results_of(sources, case), expected(case)[3], strict=True):
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
    find = sources.module(f"{emulator.PACKAGE}.hopper.masks")._queries_of
    numbers = (emulator.Value(np.array(x, np.int32)) for x in (keys, side, window))
    found = [x.array for x in find(*numbers, 2, sources.grids._form(near, None).rules)]
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
    assert boxes == {side for sides in sources.grids.BOXES.values() for side in sides}


@pytest.mark.parametrize("head_dim", [40, 128])
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
