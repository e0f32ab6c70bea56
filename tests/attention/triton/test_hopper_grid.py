"""The warp-specialised kernels for grids on a Hopper GPU: equal to the oracle, on grids of a tile and of thousands."""

from functools import partial

import pytest
import torch
from allpairspy import AllPairs
from cases import (
    GROUPED_WINDOWS,
    HEADS,
    LAYOUTS,
    MORE,
    NORM_TOLERANCE,
    RULES,
    bias_sides,
    box_in,
    boxed,
    check_nan,
    check_on_grid,
    check_part,
    neighbourhoods,
    norms,
    out_and_lse,
    ranges,
    stored,
)
from cases import attended as by_backend
from cases import drawn as tokens
from drawn_grids import (
    BOXED,
    CASES,
    MANY_PROGRAMS,
    QUERY_BOXES,
    UNEVEN,
    WHOLE,
    biased,
    boxed_part,
    drawn,
    expected,
    uneven,
    whole,
    wide,
)
from oracle import attending, bias_of

from hilbert_lib import Neighbourhood, Ordering, explain_backend, neighbourhood_attention
from hilbert_lib.attention.grid_parts import on_its_keys, part_of_box
from hilbert_lib.attention.request import Request
from hilbert_lib.lab.sweeps.memory import captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]
DEVICE = "cuda"
attended = partial(by_backend, backend="hopper")
GRIDS = {  # shape, window, heads, kv_heads, head_dim, and other rules
    "plane": ((256, 256), 17, 4, 2, 128, {}),
    "narrow": ((160, 200), 33, 2, 2, 64, {}),
    "globe": ((90, 180), (13, 25), 2, 1, 128, {"edge": ("clip", "wrap")}),
    "dilated": ((128, 128), 7, 2, 2, 64, {"dilation": (4, 2)}),
    "strided": ((96, 128), (16, 11), 2, 2, 128, {"stride": (8, 3), "edge": "clip"}),
    "whole round": ((64, 48), (64, 40), 2, 2, 64, {"edge": "wrap"}),
    "volume": ((16, 40, 48), (9, 12, 12), 2, 2, 128, {}),
    "flat volume": ((4, 64, 128), (2, 6, 12), 2, 2, 64, {"edge": ("shift", "clip", "wrap")}),
    "film": ((24, 32, 32), (5, 7, 7), 2, 2, 80, {"is_causal": (True, False, False), "edge": "clip"}),
    "line": ((20000,), 500, 2, 1, 40, {"is_causal": True}),
    "a window for a tile": ((96, 128), (48, 32), 2, 1, 128, {"stride": 16}),
    "wide": ((96, 100), 17, 2, 1, 160, {}),
    "wide volume": ((12, 24, 24), (6, 8, 8), 2, 2, 256, {"stride": (1, 4, 8)}),
    "wide globe": ((60, 120), (13, 25), 4, 2, 192, {"edge": ("clip", "wrap")}),
    "whole boxes of a volume": ((16, 32, 40), (6, 8, 24), 2, 1, 128, {"stride": (4, 8, 8)}),
    "whole boxes of a line": ((8000,), 512, 2, 1, 80, {"stride": 128}),
    "uneven plane": ((131, 140), 17, 4, 2, 128, {"dilation": (2, 3)}),
    "uneven volume": ((13, 26, 45), (3, 7, 6), 2, 2, 64, {"dilation": (2, 3, 4), "edge": ("clip", "shift", "shift")}),
    "wide uneven plane": ((65, 70), (9, 12), 2, 1, 192, {"dilation": (2, 3), "stride": (1, 4)}),
    "whole boxes of residues of two sizes": ((129, 98), (32, 16), 2, 1, 128, {"stride": (16, 8), "dilation": (2, 3)}),
    "small windows": ((130, 140), (3, 5), 2, 2, 128, {"edge": ("clip", "shift")}),
}


@pytest.fixture
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def assert_right(found, exact, dtype) -> None:
    """out and gradients by their norms, lse by every one."""
    pairs = zip((found[0], *found[2:]), (exact[0], *exact[2:]), strict=True)
    assert max(norms(*zip(*((a, b) for a, b in pairs if b.norm() > 0), strict=True))) < NORM_TOLERANCE[dtype]
    torch.testing.assert_close(found[1].double(), exact[1], atol=1e-3, rtol=0)


def inputs_of(name: str, dtype=torch.bfloat16, extra=0) -> tuple[Neighbourhood, list[torch.Tensor]]:
    """The rules of a grid, and what `attended` takes."""
    shape, window, heads, kv_heads, head_dim, rules = GRIDS[name]
    near = Neighbourhood(shape, window, **rules)
    sizes = {"keys": near.length + extra, "batch": 2, "dtype": dtype, "device": DEVICE}
    q, k, v, dout = tokens(near.length, heads, kv_heads, head_dim, **sizes)
    # Not drawn by themselves: the same seed gave extra keys that were queries' own, and gradients that cancel.
    own, more = zip(*(x.split((near.length, extra), 1) for x in (k, v)), strict=True)
    return near, [q, *own, *(more if extra else ()), dout]


@pytest.mark.parametrize(
    "case",
    list(
        AllPairs(
            [
                list(RULES),
                list(HEADS),
                list(MORE),
                list(NORM_TOLERANCE),
                [16, 40, 64, 80, 128, 160, 256],
            ]
        )
    ),
    ids=lambda case: "-".join(map(str, case)),
)
def test_small_grids_are_the_oracles(case):
    rules, heads, more, dtype, head_dim = case
    check_on_grid(rules, heads, "none", more, dtype, "hopper", head_dim, DEVICE)


def is_box_served(rules: str) -> bool:
    near = neighbourhoods(rules, "one")
    try:
        on_its_keys(Request(near.of_heads(1), part=part_of_box(box_in(near.shape), near.shape)))
    except ValueError:
        return False
    return not any(side % dilation for side, dilation in zip(near.shape, near.dilation, strict=True))


@pytest.mark.parametrize("dtype", NORM_TOLERANCE)
@pytest.mark.parametrize("rules", list(filter(is_box_served, RULES)))
def test_a_box_of_queries_is_the_oracles(rules, dtype):
    check_on_grid(rules, "grouped", "box", "extra and padding", dtype, "hopper", 64, DEVICE)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(each(n), id=f"{each.__name__} {n}") for each in (drawn, wide) for n in range(len(CASES))),
        *(pytest.param(uneven(n), id=f"uneven {n}") for n in UNEVEN),
        *(pytest.param(whole(name), id=f"whole {name}") for name in WHOLE),
        *(pytest.param(case, id=f"many programs {head_dim}") for head_dim, case in MANY_PROGRAMS.items()),
    ],
)
def test_what_the_emulator_runs_is_right_here_too(case):
    given, dout, masks, (out, lse, *grads) = expected(case)
    count = 5 if case.extra else 3
    tensors = [stored(x.to(DEVICE), case.layout) for x in (*given[:count], dout)]
    names = ("key_padding_mask", "extra_padding_mask")
    options = {name: mask.to(DEVICE) for name, mask in zip(names, masks, strict=True) if mask is not None}
    found = attended(tensors, case.windows, **options)
    assert_right([x.cpu() for x in found], (out, lse, *grads[:count]), case.dtype)


@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
@pytest.mark.parametrize("part", [*BOXED, *QUERY_BOXES, "large"])
def test_a_part_of_a_grid_is_what_it_is_in_the_whole(part, head_dim):
    large = boxed(Neighbourhood((90, 100), (17, 9)), ranges(10, 70, 20, 100), ranges(20, 70, 20, 90))
    check_part(large if part == "large" else boxed_part(part), "hopper", DEVICE, torch.bfloat16, head_dim)


@pytest.mark.parametrize("dtype", NORM_TOLERANCE)
@pytest.mark.parametrize("name", GRIDS)
def test_grids_of_many_tiles_are_right(name, dtype):
    near, given = inputs_of(name, dtype, extra=100 if name in ("narrow", "volume") else 0)
    assert_right(attended(given, near), attended([x.double() for x in given], near, backend="eager"), dtype)


@pytest.mark.parametrize("name", GRIDS)
def test_bits_repeat(name):
    near, given = inputs_of(name)
    first = attended(given, near)
    for _ in range(20 if "wide" in name else 1):
        assert all(map(torch.equal, first, attended(given, near)))


@pytest.mark.parametrize("layout", [*LAYOUTS, "odd stride", "odd start", "expanded"])
@pytest.mark.parametrize("name", ["globe", "dilated", "uneven plane"])
def test_layouts_change_nothing(name, layout):
    near, given = inputs_of(name, extra=70)
    views = [stored(x, layout) for x in given]
    if layout == "expanded":
        views = [x[:, :, :1].expand_as(x) for x in given]
    found, same = (attended(x, near) for x in (views, [x.clone(memory_format=torch.contiguous_format) for x in views]))
    assert all(map(torch.equal, found[:2], same[:2]))
    assert max(norms(found[2:], [x.double() for x in same[2:]])) < 1e-3


@pytest.mark.parametrize("head_dim", [40, 128, 192])
@pytest.mark.parametrize("at", range(5))
def test_a_nan_reaches_only_those_who_see_it(at, head_dim):
    near = Neighbourhood((12, 20), (5, 4), dilation=(1, 2), edge=("clip", "wrap"))
    given = [torch.randn(1, rows, 2, head_dim).bfloat16() for rows in (240, 240, 240, 3, 3)]
    exact, _ = attending(near)(*given)

    def attend(*tensors):
        q, k, v, extra_k, extra_v = (x.to(DEVICE) for x in tensors)
        return neighbourhood_attention(q, k, v, near, extra_k=extra_k, extra_v=extra_v, backend="hopper")

    out = check_nan(near, given, at, 97 if at < 3 else 1, attend)
    kept = ~out.isnan()
    assert (out - exact)[kept].norm() < 4e-3 * exact[kept].norm()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_query_without_keys_gives_nothing(head_dim):
    near = Neighbourhood((20, 30), 5)
    given = tokens(600, 2, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    hidden = torch.zeros(1, 600, dtype=torch.bool, device=DEVICE)
    hidden[:, :300] = True  # ten rows of the grid: the first eight see nothing else
    out, lse, *_ = attended(given, near, key_padding_mask=hidden)
    assert (out[:, :240] == 0).all()
    assert (lse[..., :240] == -torch.inf).all()
    assert lse[..., 240:].isfinite().all()


@pytest.mark.parametrize("name", ["globe", "film", "uneven volume"])
def test_a_cuda_graph_replays_forward_and_backward(name):
    near, given = inputs_of(name, extra=70)
    graph, replayed = captured(lambda: attended(given, near))
    for value in (2.0, -1.0):
        given[2].fill_(value)
        graph.replay()
        assert all(map(torch.equal, replayed, attended(given, near)))


def test_auto_takes_them_for_tokens_that_are_stored_row_by_row():
    near, (q, k, v, _) = inputs_of("plane")

    def chosen(*tensors, **options):
        return explain_backend(*tensors, near, **options).chosen

    assert chosen(q, k, v) == "hopper"
    assert chosen(q, k, v, ordering=Ordering.linear(near.length)) == "hopper"
    assert chosen(q, k, v, ordering=Ordering.random(near.length, seed=0)) == "lists"
    assert chosen(q.float(), k.float(), v.float()) == "lists"
    box = ((0, 1), *((0, side) for side in near.shape[1:]))
    assert chosen(q[:, : near.length // near.shape[0]], k, v, query_box=box) == "hopper"
    compiled = torch.compile(neighbourhood_attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, near), neighbourhood_attention(q, k, v, near, backend="hopper"))


# A bias by relative position.

# All but the one whose gradient of a bias has no room.
BIASED_RULES = [rules for rules in RULES if rules != "volume, outgrown"]
BIASED = AllPairs([BIASED_RULES, ["grouped", GROUPED_WINDOWS], list(NORM_TOLERANCE), [16, 64, 128]])
REFUSED = "sums the gradient of a bias in 49,152 bytes"  # of larger windows
LARGE_TABLES = ("volume", "film", "a window for a tile", "whole boxes of a volume")
LARGE_TABLES += ("whole boxes of residues of two sizes",)


def with_bias(near, given: list[torch.Tensor], dtype=torch.float32) -> list[torch.Tensor]:
    """Tensors of `attended` with a bias before dout."""
    *inputs, dout = given
    bias = torch.randn(dout.shape[2], *bias_sides(near), generator=torch.Generator().manual_seed(1))
    return [*inputs, bias.to(DEVICE, dtype), dout]


@pytest.mark.parametrize("case", list(BIASED), ids=lambda case: "-".join(map(str, case)))
def test_a_bias_on_small_grids_is_the_oracles(case):
    rules, heads, dtype, head_dim = case
    check_on_grid(rules, heads, "none", "bias, extra and padding", dtype, "hopper", head_dim, DEVICE)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_bias_that_the_emulator_adds_is_right_here_too(number):
    case = biased(number)
    given, dout, masks, (out, lse, *grads) = expected(case)
    rows = given.with_rows if case.extra else given[:3]
    tensors = [stored(x.to(DEVICE), case.layout) for x in rows]
    names = ("key_padding_mask", "extra_padding_mask")
    options = {name: mask.to(DEVICE) for name, mask in zip(names, masks, strict=True) if mask is not None}
    found = attended([*tensors, given.bias.to(DEVICE), stored(dout.to(DEVICE), case.layout)], case.windows, **options)
    right = (out, lse, *grads[: len(rows)], grads[-1])
    assert_right([x.cpu() for x in found], right, case.dtype)


@pytest.mark.parametrize("dtype", NORM_TOLERANCE)
@pytest.mark.parametrize("name", [name for name, (*_, head_dim, _rules) in GRIDS.items() if head_dim <= 128])
def test_a_bias_on_grids_of_many_tiles_is_right(name, dtype):
    near, given = inputs_of(name, dtype, extra=100 if name in ("narrow", "volume") else 0)
    given = with_bias(near, given)
    exact = attended([x.double() for x in given], near, backend="eager")
    with torch.no_grad():
        assert_right(out_and_lse(given, near, "hopper"), exact[:2], dtype)
    if name in LARGE_TABLES:
        with pytest.raises(ValueError, match=REFUSED):
            attended(given, near)
    else:
        assert_right(attended(given, near), exact, dtype)


@pytest.mark.parametrize(
    ("shape", "window", "head_dim"), [((256, 256), 41, 64), ((256, 256), 33, 128), ((16, 32, 32), 5, 64)]
)
def test_the_largest_windows_whose_bias_has_a_gradient_are_right(shape, window, head_dim):
    near = Neighbourhood(shape, window)
    given = with_bias(near, tokens(near.length, 2, 1, head_dim, dtype=torch.bfloat16, device=DEVICE))
    found, exact = attended(given, near), attended([x.double() for x in given], near, backend="eager")
    assert_right(found, exact, torch.bfloat16)
    assert norms([found[-1]], [exact[-1]])[0] < 1e-3


@pytest.mark.parametrize("name", ["plane", "narrow", "globe", "line"])
def test_bits_repeat_beside_a_bias(name):
    near, given = inputs_of(name)
    given = with_bias(near, given)
    first, *others = (attended(given, near) for _ in range(4))
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_a_bias_of_any_size_and_form_is_right():
    near, given = inputs_of("globe", extra=70)
    *inputs, bias, dout = with_bias(near, given)
    hidden = bias.clone()
    hidden[:, ::3] = -torch.inf
    for table in (bias.bfloat16(), bias.transpose(1, 2).contiguous().transpose(1, 2), hidden):
        found = attended([*inputs, table, dout], near)
        exact = attended([x.double() for x in (*inputs, table, dout)], near, backend="eager")
        assert found[-1].dtype == table.dtype
        assert_right(found, exact, torch.bfloat16)
    out, lse = out_and_lse([*inputs, 30 * bias, dout], near, "hopper")
    right, right_lse = out_and_lse([x.double() for x in (*inputs, 30 * bias, dout)], near, "eager")
    assert norms([out], [right])[0] < NORM_TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-3, rtol=1e-6)


def test_a_bias_that_is_no_number_reaches_only_those_who_see_it():
    near = Neighbourhood((12, 20), (5, 4), edge=("clip", "wrap"))
    q, k, v, _ = tokens(240, 2, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    bias = torch.randn(2, 9, 7, device=DEVICE)
    exact, _ = attending(near)(*(x.double().cpu() for x in (q, k, v, bias)))
    bias[1, 6, 4] = torch.nan
    out = neighbourhood_attention(q, k, v, near, bias=bias, backend="hopper").cpu()
    reached = bias_of(near, bias.cpu(), range(240), 2).isnan().any(-1).T[None, :, :, None].expand_as(out)
    assert out.isnan().equal(reached)
    assert (out - exact)[~reached].norm() < 4e-3 * exact.norm()


def test_a_part_of_a_grid_has_the_bias_of_the_whole():
    parts = ("amid a plane", 64), ("all along what goes round", 128), ("inside", 128), ("round the end", 64)
    for part, head_dim in parts:
        check_part(boxed_part(part), "hopper", DEVICE, torch.bfloat16, head_dim, has_bias=True)


def test_a_cuda_graph_replays_a_bias_and_its_gradient():
    near, given = inputs_of("globe", extra=70)
    given = with_bias(near, given)
    graph, replayed = captured(lambda: attended(given, near))
    for value in (2.0, -1.0):
        given[-2].mul_(value)
        graph.replay()
        assert all(map(torch.equal, replayed, attended(given, near)))


def test_auto_takes_boxes_beside_a_bias_where_its_gradient_has_room():
    for window, has_room in ((41, True), (43, False)):
        near = Neighbourhood((64, 64), window)
        q, k, v, bias, _ = with_bias(near, tokens(near.length, 2, 1, 128, dtype=torch.bfloat16, device=DEVICE))
        assert explain_backend(q, k, v, near, bias=bias).chosen == "hopper"
        explained = explain_backend(q, k, v, near, bias=bias.requires_grad_())
        assert (explained.chosen == "hopper") == has_room
        assert has_room or REFUSED in explained.reasons["hopper"]
