"""Cases of attention along sequences, on grids and over points, and the check of one of them against the oracle."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, product
from math import prod

import oracle
import pytest
import torch
from allpairspy import AllPairs
from hypothesis import strategies as st
from oracle import attending, mask_of, seen_along
from torch import Tensor

from hilbert_lib import Neighbourhood, PointNeighbourhood, Union, attend, neighbourhood_attention
from hilbert_lib.attention import operators
from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.attention.request import GridPart, Request, Tensors
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern
from hilbert_lib.patterns.neighbourhood import EDGES, HeadNeighbourhoods

# name: segment lengths, rates
BRANCHES = {
    "one": ((16,), (1,)),
    "aligned": ((8, 16, 32), (1, 2, 4)),
    "uneven": ((6, 12, 24), (1, 4, 5)),
    "sparse": ((8, 16), (2, 4)),
    "longer": ((16, 1000), (4, 3)),
}
ORDERINGS = {
    "none": lambda n: None,
    "linear": Ordering.linear,
    "residue": lambda n: Ordering.residue(n, 3),
    "random": lambda n: Ordering.random(n, seed=1),
    **{kind: lambda n, kind=kind: Ordering.from_curve(kind, n) for kind in ("hilbert", "morton", "snake", "tile")},
    "chunked": lambda n: Ordering.from_curve("hilbert", n, chunk=8),
}
# Of what the warp-specialised kernels run on.
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
# out, lse, gradient; float64 inputs are exact, and halves are rounded once on the way in and once on the way out. Their
# lse has an error of its own on the CPU: `lse_error`.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12, 1e-11),
    torch.float32: (1e-4, 1e-4, 2e-4),
    torch.float16: (4e-3, 2e-4, 2e-2),
    torch.bfloat16: (3e-2, 2e-4, 1.5e-1),
}
# Of the norms of errors relative to what is right, of the warp-specialised kernels, also where they are emulated.
NORM_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = {  # batch, length, heads, kv_heads, head_dim
    "plain": (2, 32, 4, 4, 8),
    "ragged": (2, 37, 4, 4, 8),
    "grouped": (1, 45, 6, 3, 5),
    "one_kv_head": (2, 32, 4, 1, 16),
    "shorter": (2, 5, 3, 3, 3),
    "wide": (2, 70, 4, 2, 64),
    "small": (1, 21, 2, 2, 5),
    "small_grouped": (2, 18, 2, 1, 3),
}
LAYOUTS = ("bshd", "bhsd", "sliced")


def in_pairs(axes: tuple, at: int, kv_heads: Callable = lambda shape: SHAPES[shape][3]) -> pytest.MarkDecorator:
    """Cases in which every two values of the axes meet, without those that have fewer KV heads than head groups.

    axes: branches, offsets, mixing, and others; axis `at` says how many KV heads there are.
    """

    def is_possible(case: list) -> bool:
        return len(case) <= at or case[2] == "softmax" or kv_heads(case[at]) >= len(BRANCHES[case[0]][0])

    cases = list(AllPairs(list(map(list, axes)), filter_func=is_possible))
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


def stored(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = x.new_full((x.shape[0], x.shape[1] + 3, x.shape[2], x.shape[3] + 8), torch.nan)
        wide[:, 1:-2, :, : x.shape[3]] = x
        return wide[:, 1:-2, :, : x.shape[3]]
    if layout == "odd stride":  # rows that begin at no multiple of 16 bytes
        return torch.nn.functional.pad(x, (0, 1))[..., : x.shape[-1]]
    if layout == "odd start":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


@cache
def expected(
    branches: str, offsets: str, mixing: str, dtype: torch.dtype, shape: str, is_causal: bool, padding: str = "none",
    with_dlse: bool = False,
):  # fmt: skip
    """Inputs of the dtype, and what the oracle makes of them in float64.

    with_dlse: the gradients are of `drawn_dlse` too.
    """
    batch, length, heads, kv_heads, head_dim = SHAPES[shape]
    tensors = drawn(length, heads, kv_heads, head_dim, batch=batch, dtype=dtype)
    pattern = DilatedPattern(*BRANCHES[branches], offsets=offsets, mixing=mixing, padding=padding)
    attend = partial(oracle.attention, pattern=pattern, is_causal=is_causal)
    exact = [x.double() for x in tensors]
    dlse = drawn_dlse(attend(*exact[:3])[1]) if with_dlse else None
    out, lse, *grads = differentiated(attend, exact, dlse)
    return pattern, tensors, out, lse, grads


def drawn(
    queries: int, heads: int, kv_heads: int, head_dim: int, *, batch=1, keys=None, dtype=torch.float32, device="cpu"
) -> list[Tensor]:
    """q, k, v and the gradient of the output; as many keys as queries unless told."""
    generator = torch.Generator(device).manual_seed(0)
    keys = queries if keys is None else keys
    rows = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    drawing = {"generator": generator, "device": device, "dtype": torch.promote_types(dtype, torch.float32)}
    return [torch.randn(batch, *each, head_dim, **drawing).to(dtype) for each in rows]


def differentiated(attend: Callable, tensors: Iterable[Tensor], dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """out and lse of an attention, and the gradients of what it takes; tensors: this and the gradient of out.

    dlse: the gradient of lse, in any dtype and on any device; None for one of out alone.
    """
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    results, gradients = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse)])
    return out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, gradients)


def drawn_dlse(lse: Tensor) -> Tensor:
    """A gradient of lse. It is NaN in rows without keys, where it is ignored."""
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dlse.masked_fill(lse.cpu() == -torch.inf, torch.nan)


def _call(pattern, backend: str, **options) -> Callable:
    # A pattern's attention as a function of q, k, v, extra keys and a bias; it gives out and lse.
    door = dilated_attention if isinstance(pattern, DilatedPattern) else neighbourhood_attention
    door = attend if isinstance(pattern, Union) else door

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return door(q, k, v, pattern, backend=backend, return_lse=True, **oracle.named(rest), **options)

    return call


def attended(
    tensors: Sequence[Tensor], pattern, backend: str, dlse: Tensor | None = None, **options
) -> tuple[Tensor, ...]:
    """out, lse and the gradients of q, k, v, of extra keys and of a bias; tensors: these and the gradient of out."""
    return differentiated(_call(pattern, backend, **options), tensors, dlse)


def out_and_lse(tensors: Sequence[Tensor], pattern, backend: str, **options) -> tuple[Tensor, Tensor]:
    """The same without gradients, of a backend that has none here."""
    return _call(pattern, backend, **options)(*tensors[:-1])


HIDDEN = ("some", "ends", "stretches", "all")


def hidden_keys(kind: str, batch: int, length: int) -> Tensor:
    """A mask of some keys, of those from a row on, of long stretches, or of all keys of the first sequence."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.1
    row = torch.arange(length)
    if kind == "ends":
        mask = row >= torch.tensor([3 * length // 4, length // 3])[:batch, None]
    if kind == "stretches":
        mask |= (row < length // 4) | (row % 400 > 130)
    if kind == "all":
        mask[0] = True
    return mask


def exactly(tensors: Sequence[Tensor], pattern, **options) -> tuple[Tensor, ...]:
    """The same of the reference in float64."""
    return attended([x.double() for x in tensors], pattern, "reference", **options)


@contextmanager
def determinism(wanted: bool = True, **options):
    """What torch is asked for inside."""
    torch.use_deterministic_algorithms(wanted, **options)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def ends_of(lengths: Sequence[int], device: object = "cpu") -> Tensor:
    """`cu_seqlens` of documents."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def documents_alone(
    tensors: Sequence[Tensor], lengths: Sequence[int], pattern, dlse: Tensor | None = None, **options
) -> tuple:
    """out, lse and gradients of packed documents, each by the oracle alone; tensors as `attended` takes them."""

    def attend(*leaves: Tensor) -> list[Tensor]:
        documents = [each for each in zip(*(x.split(lengths, 1) for x in leaves), strict=True) if each[0].numel()]
        found = zip(*(oracle.attention(*each, pattern, **options) for each in documents), strict=True)
        return [torch.cat(parts, dim) for parts, dim in zip(found, (1, 2), strict=True)]

    return differentiated(attend, [x.double() for x in tensors], dlse)


def norms(found: Iterable[Tensor], expected: Iterable[Tensor]) -> list[float]:
    """How far each tensor is off, relative to what is expected."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor], tolerances, rtol: float = 0.0) -> None:
    """Every tensor in float64 on the CPU, within its tolerance, or one of all."""
    pairs = list(zip(found, expected, strict=True))
    tolerances = [tolerances] * len(pairs) if isinstance(tolerances, float) else tolerances
    for (mine, theirs), tolerance in zip(pairs, tolerances, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs.cpu().double(), atol=tolerance, rtol=rtol)


def lse_error(backend: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """How far lse may be off, as the docstring of `dilated_attention` says."""
    if dtype == torch.float64:
        return 4e-15
    # torch's flash kernel for the CPU has an exponential for half precision that is off by up to 1.1e-4 of itself, on
    # processors with AVX2 or AVX-512. Which keys meet it depends on how many a vector holds.
    is_fast = backend in ("sdpa", "auto") and device == "cpu" and dtype.itemsize == 2
    return 1.2e-4 if is_fast else 2e-6


def _assert_right(found: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype, rtol: float = 0.0) -> None:
    # rtol is that of gradients: those of extra keys are sums over all queries.
    close, close_lse, close_grad = TOLERANCE[dtype]
    assert_close(found[:2], right[:2], (close, close_lse))
    assert_close(found[2:], right[2:], close_grad, rtol)


def check(
    branches, offsets, mixing, ordering, backend, dtype, shape, layout, is_causal, device="cpu", padding="none",
    with_dlse=False,
) -> None:  # fmt: skip
    case = branches, offsets, mixing, dtype, shape, is_causal, padding, with_dlse
    pattern, (q, k, v, dout), out, lse, grads = expected(*case)
    order = ORDERINGS[ordering](k.shape[1])
    kept = [q, k, v] if order is None else [q, order.apply(k, dim=1), order.apply(v, dim=1)]
    tensors = [stored(x.to(device), layout) for x in (*kept, dout)]
    dlse = drawn_dlse(lse) if with_dlse else None
    results = list(attended(tensors, pattern, backend, dlse, is_causal=is_causal, kv_ordering=order))
    if order is not None:
        results[3:] = [order.undo(x, dim=1) for x in results[3:]]
    assert results[0].dtype == dtype
    _assert_right(results, (out, lse, *grads), dtype)


def refused(wrong: dict[type, list]) -> pytest.MarkDecorator:
    """Cases of (error, what raises it, words of the message), from lists of these by the error."""
    cases = [(error, *case) for error, listed in wrong.items() for case in listed]
    return pytest.mark.parametrize(("error", "call", "words"), cases, ids=range(len(cases)))


def refusals(wrong: dict[type, list]) -> Callable:
    """A test that each call of such a table raises its error with its words."""

    @refused(wrong)
    def test(error, call, words):
        with pytest.raises(error, match=words):
            call()

    return test


def only(some: set[tuple], every: Iterable[tuple]) -> list:
    """Cases of which every run has some, and the full one all."""
    return [pytest.param(*case, marks=[] if case in some else pytest.mark.full) for case in every]


# Cases on grids.

# shape, window, dilation, stride, is_causal, edge
RULES = {
    "line": ((23,), 5, 1, 1, False, "shift"),
    "line, causal": ((19,), 6, 2, 3, True, "clip"),
    "plane": ((9, 12), (4, 5), 1, 1, False, "shift"),
    "plane, dilated": ((11, 13), (3, 4), (3, 2), (1, 2), False, ("clip", "shift")),
    "plane, wrapped": ((8, 12), (3, 6), (2, 1), (2, 3), False, ("wrap", "wrap")),
    "plane, causal": ((10, 7), (5, 3), 1, (2, 1), (True, False), ("shift", "clip")),
    "whole": ((5, 6), (5, 6), 1, 1, False, "wrap"),
    "volume": ((4, 5, 6), (2, 3, 5), (1, 1, 1), (1, 2, 1), False, ("shift", "clip", "wrap")),
    "volume, dilated": ((6, 5, 7), (3, 1, 3), (2, 1, 2), 1, (True, False, False), "clip"),
    "alone": ((6, 4), (1, 4), 1, 1, False, "shift"),
    "volume, small": ((1, 1, 3), (1, 1, 2), 1, 1, False, "shift"),
    # Windows, strides and a dilation that are larger than the grid.
    "plane, outgrown": ((9, 6), (14, 8), (1, 2), (3, 2), False, ("clip", "shift")),
    "volume, outgrown": ((2, 5, 4), (9, 7, 9), (5, 1, 3), (2, 6, 1), (False, True, False), ("clip", "clip", "shift")),
}
# Several neighbourhoods in one softmax.
UNIONS = {
    "near and far": (RULES["plane"], ((9, 12), (3, 4), (3, 2), 1, False, ("clip", "shift"))),
    "round and causal": (RULES["plane, wrapped"], ((8, 12), (5, 3), 1, (2, 1), (True, False), "clip")),
    "near and wide": (RULES["plane"], ((9, 12), (7, 3), 1, 1, False, "clip")),
    "a line three times": (RULES["line"], ((23,), 3, 2, 1, True, "clip"), RULES["line"]),
}
# The options of a neighbourhood by themselves: axes, edge, is_causal, stride, dilation.
OPTIONS = ((1, 2, 3), EDGES, (False, True), (1, 2), (1, 2))
SMALL = {1: ((12,), (5,)), 2: ((4, 8), (2, 3)), 3: ((4, 4, 4), (2, 2, 2))}  # sides and windows of so many axes
LARGE = {1: ((96,), (33,)), 2: ((12, 20), (5, 9)), 3: ((4, 8, 12), (2, 3, 5))}  # of several tiles of a GPU
HEADS = {"one": (1, 1, 1), "grouped": (2, 4, 2), "windows": (1, 2, 2)}  # batch, heads, kv_heads
GROUPED_WINDOWS = "grouped windows"  # a window for each KV head, which has several query heads
ORDERS = {
    "none": lambda shape: None,
    "random": lambda shape: Ordering.random(_cells(shape), seed=1),
    "hilbert": lambda shape: Ordering.from_curve("hilbert", _cells(shape), grid=shape if len(shape) > 1 else None),
}
STORED = (*ORDERS, "box")  # or row by row, q some of the cells alone
MORE = ("nothing", "extra", "padding", "extra and padding")
BIASED = (*MORE, "bias", "bias, extra and padding")
JOINT = "extra queries, keys and padding"
# Grids of several tiles of a GPU, as `RULES` has them.
LARGE_RULES = {
    "large plane": ((48, 40), (9, 17), 1, 1, False, "shift"),
    "large plane, wrapped": ((40, 48), (5, 8), (1, 2), (1, 2), False, ("clip", "wrap")),
    "large volume": ((8, 16, 16), (3, 5, 7), 1, 1, (True, False, False), "shift"),
}
EXTRA = 3
SCALE = 0.8  # times head_dim ** -0.5


def _cells(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _is_possible(axes: int = 1, edge: str = "clip", is_causal: bool = False, *_) -> bool:
    return not (is_causal and edge == "wrap")


def rules_of(sizes: dict, axes: int, edge: str, is_causal: bool, stride: int, dilation: int) -> tuple:
    """A neighbourhood by its options, as `RULES` has them; the last axis is odd unless it goes round."""
    shape, window = sizes[axes]
    return (*shape[:-1], shape[-1] + (edge != "wrap")), window, dilation, stride, is_causal, edge


def every_rule(sizes: dict) -> list[tuple]:
    return [rules_of(sizes, *options) for options in product(*OPTIONS) if _is_possible(*options)]


def pairs_of_options(*axes, more: tuple = MORE) -> list[tuple]:
    """Small cases, as `check_on_grid` takes them, in which every two values of the options and of other axes meet."""
    cases = AllPairs(
        [*map(list, (*OPTIONS, HEADS, STORED, (*more, JOINT), *axes))], filter_func=lambda case: _is_possible(*case)
    )
    return [(rules_of(SMALL, *case[:5]), *case[5:]) for case in cases]


def grids_in_pairs(*axes, more: tuple = MORE, marks: Callable = lambda case: ()) -> pytest.MarkDecorator:
    """Cases, as `check_on_grid` takes them, in which every two values of the rules and of other axes meet."""
    cases = AllPairs([list(axis) for axis in (RULES, HEADS, STORED, more, *axes)])
    marked = [pytest.param(case, marks=marks(case)) for case in cases]
    return pytest.mark.parametrize("case", marked, ids=lambda case: "-".join(map(str, case)))


def shape_of(rules: str | tuple) -> tuple[int, ...]:
    return UNIONS[rules][0][0] if rules in UNIONS else RULES.get(rules, rules)[0]


def neighbourhoods(rules: str | tuple, heads: str) -> Neighbourhood | tuple[Neighbourhood, ...] | Union:
    """One for all heads or, where heads are "windows" or `GROUPED_WINDOWS`, one for each; or a union of such."""
    if rules in UNIONS:
        each = (neighbourhoods(own, heads) for own in UNIONS[rules])
        return Union(tuple(HeadNeighbourhoods(own) if isinstance(own, tuple) else own for own in each))
    near = Neighbourhood(*RULES.get(rules, rules))
    if heads not in ("windows", GROUPED_WINDOWS):
        return near
    sides = zip(near.window, near.stride, strict=True)
    return near, replace(near, window=tuple(max(1, side - 1) if side > step else side for side, step in sides))


@st.composite
def grids(draw):
    """Random neighbourhoods of up to 300 cells."""
    axes = draw(st.integers(1, 3))
    most = (40, 14, 6)[axes - 1]
    fields = []
    for _ in range(axes):
        dilation, is_causal = draw(st.integers(1, 3)), draw(st.booleans())
        edge = draw(st.sampled_from(EDGES[:2] if is_causal else EDGES))
        window = draw(st.integers(1, max(1, most // dilation)))
        if edge != "wrap" and draw(st.booleans()):
            window = draw(st.integers(window, 2 * most))  # it may outgrow the axis
        stride = draw(st.integers(1, min(window, 4)))
        least = window * dilation if edge == "wrap" else 1
        step = stride * dilation if edge == "wrap" else 1
        cells = -(-draw(st.integers(least, max(least, most))) // step) * step
        fields.append((cells, window, dilation, stride, is_causal, edge))
    return Neighbourhood(*map(tuple, zip(*fields, strict=True)))


@lru_cache(maxsize=32)
def expected_on_grid(
    rules: str | tuple, heads: str, more: str, dtype: torch.dtype, head_dim: int, query_box: tuple | None = None,
    with_dlse: bool = False,
) -> tuple:  # fmt: skip
    """Inputs of a dtype, row by row, masks, and what the oracle makes of them in float64. with_dlse: as `expected`.

    A bias is float32, as a parameter is beside q in half precision, or with extra keys of the dtype.
    """
    near = neighbourhoods(rules, heads)
    shape = shape_of(rules)
    batch, count, kv_heads = (2, 4, 2) if heads == GROUPED_WINDOWS else HEADS[heads]
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, own: int) -> Tensor:
        return torch.randn(batch, rows, own, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    seq, extra = _cells(shape), EXTRA if "extra" in more else 0
    queries = seq if query_box is None else prod(stop - start for start, stop in query_box)
    given = [draw(queries, count), *(draw(rows, kv_heads) for rows in (seq, seq, extra, extra))]
    if "bias" in more:
        bias = torch.randn(count, *bias_sides(near), generator=generator, dtype=torch.float64)
        given.append(bias.to(dtype if "extra" in more else torch.promote_types(dtype, torch.float32)))
    dout = draw(queries, count)
    padding = torch.rand(batch, seq, generator=generator) < 0.4 if "padding" in more else None
    extra_padding = torch.rand(batch, extra, generator=generator) < 0.4 if "extra and padding" in more else None
    hidden = {"key_padding_mask": padding, "extra_padding_mask": extra_padding}
    exact = attending(near, scale=SCALE * head_dim**-0.5, query_box=query_box, **hidden)
    tensors = [x.double() for x in (*given, dout)]
    dlse = drawn_dlse(exact(*tensors[:-1])[1]) if with_dlse else None
    out, lse, *grads = differentiated(exact, tensors, dlse)
    return near, given, dout, (padding, extra_padding), out, lse, grads


def bias_sides(near: Neighbourhood | tuple[Neighbourhood, ...]) -> tuple[int, ...]:
    """Entries of a table of bias along each axis."""
    by_head = near if isinstance(near, tuple) else (near,)
    return tuple(2 * max(windows) - 1 for windows in zip(*(each.window for each in by_head), strict=True))


def box_in(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Some cells of a grid: the middle of its first axis, all but the end of the second, the end of the third."""
    boxes = []
    for n, side in enumerate(shape):
        start = (side // 3, 0, side // 2)[n]
        stop = (side - side // 4, side - 1, side)[n]
        boxes.append((start, max(stop, start + 1)))
    return tuple(boxes)


def check_on_grid(
    rules, heads, order, more, dtype, backend, head_dim=8, device="cpu", gradients=True, with_dlse=False
) -> None:
    """Run one case and compare it with the oracle: output, lse and gradients."""
    shape = shape_of(rules)
    query_box = box_in(shape) if order == "box" else None
    if more == JOINT:
        sizes = {"heads": HEADS[heads], "head_dim": head_dim, "query_box": query_box, "with_dlse": with_dlse}
        ordering = None if order == "box" else ORDERS[order](shape)
        return check_joint(neighbourhoods(rules, heads), shape, ordering, dtype, backend, device=device, **sizes)
    case = rules, heads, more, dtype, head_dim, query_box, with_dlse
    near, given, dout, masks, out, lse, grads = expected_on_grid(*case)
    ordering = None if order == "box" else ORDERS[order](shape)

    def ordered(x: Tensor, dim: int = 1) -> Tensor:
        return x if ordering is None else ordering.apply(x, dim=dim)

    padding = None if masks[0] is None else ordered(masks[0]).to(device)
    options = {
        "ordering": ordering,
        "query_box": query_box,
        "scale": SCALE * head_dim**-0.5,
        "key_padding_mask": padding,
    }
    rest = slice(3 if "extra" in more else 5, None)  # of extra keys and a bias
    tensors = [*(ordered(x) for x in given[:3]), *given[rest]]
    if "extra" in more:
        options["extra_padding_mask"] = None if masks[1] is None else masks[1].to(device)
    run = attended if gradients else out_and_lse
    if with_dlse:
        options["dlse"] = ordered(drawn_dlse(lse), dim=2)
    found = run([x.to(device) for x in (*tensors, ordered(dout))], near, backend, **options)
    assert found[0].dtype == dtype
    right = [ordered(out), ordered(lse, dim=2), *(ordered(x) for x in grads[:3]), *grads[rest]]
    _assert_right(found, right[: len(found)], dtype, rtol=TOLERANCE[dtype][2] / 10)


JOINT_NAMES = ("q", "k", "v", "extra_q", "extra_k", "extra_v")


def drawn_joint(
    cells, heads=(2, 4, 2), queries=None, extra_queries=5, extra=EXTRA, head_dim=8, dtype=torch.float64, seed=0
) -> dict[str, Tensor]:
    """Tensors of joint attention by their names. heads: batch, heads, kv_heads. Without extra keys there are four."""
    batch, count, kv_heads = heads
    rows = [(cells if queries is None else queries, count), *[(cells, kv_heads)] * 2, (extra_queries, count)]
    rows += [(extra, kv_heads)] * 2 * bool(extra)
    drawing = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    tensors = [torch.randn(batch, *each, head_dim, **drawing).to(dtype) for each in rows]
    return dict(zip(JOINT_NAMES, tensors, strict=False))


def check_joint(
    near, shape, ordering, dtype, backend, *, device="cpu", heads=(2, 4, 2), head_dim=8, query_box=None,
    with_dlse=False, extra=EXTRA, extra_queries=5, hidden=0.4, extra_hidden=0.4, seed=0, has_bias=False,
    starts=None, queries=None,
) -> None:  # fmt: skip
    """Run joint attention and compare it with the oracle: outputs, lse and the gradients of all tensors.

    hidden, extra_hidden: the share of cells and of extra keys that have no weight. starts: query_start and key_start of
    a line, tensors. queries: rows of q there.
    """
    cells, starts = _cells(shape), starts or {}
    if query_box is not None:
        queries = prod(stop - start for start, stop in query_box)
    sizes = {"queries": queries, "extra_queries": extra_queries, "extra": extra, "head_dim": head_dim, "dtype": dtype}
    tensors, other = (drawn_joint(cells, heads, **sizes, seed=n) for n in (seed, seed + 1))
    options = {"scale": SCALE * head_dim**-0.5, "query_box": query_box}
    masks, generator = {}, torch.Generator().manual_seed(seed)
    if has_bias:
        table = torch.randn(heads[1], *bias_sides(near), generator=generator, dtype=torch.float64)
        tensors["bias"] = table.to(dtype)
    for name, count, share in (("key_padding_mask", cells, hidden), ("extra_padding_mask", extra, extra_hidden)):
        if share and count:
            masks[name] = torch.rand(heads[0], count, generator=generator) < share

    def ordered(x: Tensor, dim: int = 1) -> Tensor:
        return x if ordering is None else ordering.apply(x, dim=dim)

    def run(call: Callable, given: dict[str, Tensor], gradients: list[Tensor]) -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        out, lse, extra_out, extra_lse = call(**leaves)
        results = [out, extra_out, lse, extra_lse]
        grads = torch.autograd.grad(results[: len(gradients)], list(leaves.values()), gradients)
        return [out, lse, extra_out, extra_lse, *grads]

    exact = partial(oracle.joint_attention, pattern=near, **masks, **starts, **options)
    exact_tensors = {name: x.double() for name, x in tensors.items()}
    douts = [other["q"].double(), other["extra_q"].double()]
    if with_dlse:
        _, lse, _, extra_lse = exact(**exact_tensors)
        douts += drawn_dlse(lse), drawn_dlse(extra_lse)
    right = run(exact, exact_tensors, douts)
    right = [ordered(right[0]), ordered(right[1], 2), *right[2:4], *map(ordered, right[4:7]), *right[7:]]

    stored, stored_masks = (
        {name: (x if name.startswith(("extra", "bias")) else ordered(x)).to(device) for name, x in given.items()}
        for given in (tensors, masks)
    )
    stored_douts = [ordered(douts[0]).to(device, dtype), douts[1].to(device, dtype)]
    if with_dlse:
        lse_dtype = torch.promote_types(dtype, torch.float32)
        stored_douts += ordered(douts[2], 2).to(device, lse_dtype), douts[3].to(device, lse_dtype)
    stored_masks |= {name: start.to(device) for name, start in starts.items()}
    call = partial(attend, pattern=near, ordering=ordering, backend=backend, return_lse=True, **stored_masks, **options)
    found = run(call, stored, stored_douts)
    assert found[0].dtype == found[2].dtype == dtype
    for n in (0, 2):
        _assert_right(found[n : n + 2], right[n : n + 2], dtype)
    _assert_right([*found[:2], *found[4:]], [*right[:2], *right[4:]], dtype, rtol=TOLERANCE[dtype][2] / 10)


def check_grouped_windows(backend: str, dtype: torch.dtype = torch.float64, **options) -> None:
    """Run a small case in which everything meets that is counted by heads: windows, groups, extra keys and padding."""
    check_on_grid(
        ((4, 6), (3, 2), 1, 1, False, "clip"), GROUPED_WINDOWS, "random", "extra and padding", dtype, backend, **options
    )


def check_nan(near: Neighbourhood | tuple, given: list[Tensor], at: int, token: int, attend: Callable) -> Tensor:
    """Spoil a token of the last KV head of one of the tensors; the output, in which those who see it alone have NaN."""
    given[at][:, token, -1] = torch.nan
    out, cells = attend(*given).cpu(), torch.arange(given[0].shape[1])
    # Extra keys are seen by all.
    seen = cells == token if at == 0 else mask_of(near)[:, token] if at < 3 else cells >= 0
    assert out[:, :, :-1].isfinite().all()
    assert out[:, :, -1].isnan().any(-1).equal(seen.expand(len(out), -1))
    return out


def boxed(near: Neighbourhood, rows: tuple, queries: tuple) -> tuple:
    """A part of a grid as `check_part` takes it: the shortest boxes of keys that hold what the queries see."""
    keys = []
    for n, (side, own) in enumerate(zip(near.shape, queries, strict=True)):
        rules = (near.window, near.dilation, near.stride, near.is_causal, near.edge)
        seen = set().union(*seen_along(side, *(rule[n] for rule in rules))[own.start : own.stop])
        keys.append(shortest(side, seen, near.edge[n] == "wrap"))
    part = GridPart(rows, queries, tuple(keys), in_float=rows == queries)
    at_rows, at_queries, at_keys = (positions(box, near.shape) for box in part[:3])
    return near, part, at_rows, torch.isin(at_rows, at_queries), at_keys, False


def query_boxed(near: Neighbourhood, box: tuple[range, ...]) -> tuple:
    """The same of a box of queries, with all cells as keys."""
    at_rows = positions(box, near.shape)
    part = GridPart(box, box, tuple(map(range, near.shape)))
    return near, part, at_rows, torch.ones(len(at_rows), dtype=torch.bool), torch.arange(near.length), False


def shortest(side: int, cells: set[int], goes_round: bool) -> range:
    """The shortest run of cells of an axis that holds some."""
    firsts = ((x, size) for size in range(1, side + 1) for x in range(side if goes_round else side - size + 1))
    lines = (range(x, x + size) for x, size in firsts)
    return next(line for line in lines if cells <= {x % side for x in line})


def listed(near: Neighbourhood, count: int, seed: int) -> tuple:
    """A part of any cells, which are found through a table, and of all that they see."""
    own, rest = torch.randperm(near.length, generator=torch.Generator().manual_seed(seed)).tensor_split([count])
    keys = torch.cat([own, rest[mask_of(near)[own][:, rest].any(0)]])
    whole = tuple(map(range, near.shape))
    return near, GridPart(whole, whole, whole, True), own, torch.ones(count, dtype=torch.bool), keys, True


@st.composite
def parts(draw):
    """A neighbourhood, a part of its grid, the cells in its rows of q, which of these are computed, and those of k; and
    whether they are found through a table."""
    near = draw(grids())
    if draw(st.booleans()):
        return listed(near, draw(st.integers(1, near.length)), draw(st.integers(0, 9)))
    rows, queries = [], []
    for side in near.shape:
        first = draw(st.integers(0, side - 1))
        last = draw(st.integers(first + 1, side))
        queries.append(range(first, last))
        rows.append(range(draw(st.integers(0, first)), draw(st.integers(last, side))))
    if draw(st.booleans()):
        return query_boxed(near, tuple(queries))
    return boxed(near, tuple(rows), tuple(queries))


def ranges(*ends: int) -> tuple[range, ...]:
    return tuple(range(*ends[n : n + 2]) for n in range(0, len(ends), 2))


# Of some rules the rows that are held, and those of them that are computed; or how many cells are listed.
PARTS = {
    "plane, wrapped": (ranges(0, 4, 8, 12), ranges(0, 3, 9, 12)),
    "plane, dilated": (ranges(4, 9, 3, 13), ranges(5, 8, 3, 11)),
    "line, causal": (ranges(4, 19), ranges(5, 15)),
    "volume": (ranges(1, 3, 0, 5, 4, 6), ranges(1, 3, 1, 4, 4, 6)),
    "plane, causal": 20,
}


def part_of(rules: str) -> tuple:
    """One of these parts, as `check_part` takes it."""
    near, cells = neighbourhoods(rules, "one"), PARTS[rules]
    return listed(near, cells, 0) if isinstance(cells, int) else boxed(near, *cells)


def positions(box, shape: tuple[int, ...]) -> Tensor:
    """The cells of a box, row by row; what is past a side goes on from 0."""
    cells = product(*([cell % side for cell in line] for line, side in zip(box, shape, strict=True)))
    return torch.tensor([sum(x * prod(shape[n + 1 :]) for n, x in enumerate(cell)) for cell in cells]).long()


def check_part(case, backend, device="cpu", dtype=torch.float64, head_dim=4, has_bias=False) -> None:
    """Run attention of a part of a grid and compare it with that of the whole: output, lse and gradients.

    backend: a name, or its forward and backward.
    """
    forward, backward = backend if isinstance(backend, tuple) else (operators.attention, operators.attention_backward)
    named = () if isinstance(backend, tuple) else (backend,)
    near, part, rows, computed, keys, gathered = case
    generator, scale = torch.Generator().manual_seed(0), 1.4 * head_dim**-0.5
    sizes = [(near.length, 2), (near.length, 1), (near.length, 1), (2, 1), (2, 1), (near.length, 2)]
    *whole, dout = (torch.randn(1, n, h, head_dim, generator=generator).to(dtype) for n, h in sizes)
    hidden = torch.rand(1, near.length, generator=generator) < 0.2
    queries = rows[computed]
    dout[:, [n for n in range(near.length) if n not in set(queries.tolist())]] = 0
    bias = [torch.randn(2, *bias_sides(near), generator=generator)] * has_bias
    exact = attending(near, scale=scale, key_padding_mask=hidden)
    out, lse, *expected = differentiated(exact, [x.double() for x in (*whole, *bias, dout)])
    slots = None
    if gathered:
        slots = torch.full((near.length,), -1, dtype=torch.int32)
        slots[keys] = torch.arange(len(keys), dtype=torch.int32)
        slots = slots.to(device)
    mine = [x[:, at].to(device) for x, at in zip(whole, (rows, keys, keys, slice(None), slice(None)), strict=True)]
    mine += [x.to(device) for x in bias]
    request = Request(
        near.of_heads(1), scale=scale, key_padding_mask=hidden[:, keys].to(device), part=part, slots=slots,
        has_bias=has_bias, bias_gradient=has_bias,
    )  # fmt: skip
    got, got_lse = forward(Tensors(*mine), request, *named)
    close, close_lse, close_grad = TOLERANCE[dtype]
    assert_close([got[:, computed], got_lse[:, :, computed]], [out[:, queries], lse[:, :, queries]], (close, close_lse))
    # What lies in rows that are not computed changes nothing.
    given_in, lse_in = computed.to(device)[:, None, None], torch.where(computed.to(device), got_lse, torch.nan)
    got, douts = torch.where(given_in, got, 7.0), torch.where(given_in, dout[:, rows].to(device), 7.0)
    grads = backward(douts, Tensors(*mine), got, lse_in, request, *named)
    assert grads.k.dtype == grads.v.dtype == (got_lse.dtype if part.in_float else dtype)
    if has_bias:
        torch.testing.assert_close(grads.bias.cpu().double(), expected.pop(), atol=close_grad, rtol=close_grad / 10)
    for n, (found, right) in enumerate(zip(grads.with_rows, expected, strict=True)):
        found, right = found.cpu().double(), right[:, rows if n == 0 else keys if n < 3 else slice(None)]
        found, right = (x[:, computed] if n == 0 else x for x in (found, right))
        torch.testing.assert_close(found, right, atol=close_grad, rtol=close_grad / 10)


def cells(count: int, axes: int = 2, side: int = 12, seed: int = 0) -> Tensor:
    """Distinct cells in no order, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.cartesian_prod(*[torch.arange(side)] * axes).view(-1, axes) - side // 3
    return found[torch.randperm(len(found), generator=generator)[:count]]


def points_of(kind: str) -> PointNeighbourhood:
    """Points of a kind."""
    if kind == "odd":
        return PointNeighbourhood(cells(90), 5)
    if kind == "even":
        return PointNeighbourhood(cells(100, 3, 6), (4, 3, 2))
    if kind == "clouds":
        return PointNeighbourhood(cells(90), 3, torch.arange(90) % 7 * 11 - 30, dilation=(2, 1))
    if kind == "unseen":  # some keys, and some queries
        return PointNeighbourhood(cells(60), 2, keys=cells(50, seed=1))
    if kind == "alone":  # most queries see nobody
        return PointNeighbourhood(cells(20) * 3, 2, keys=cells(9, seed=1))
    fine = cells(130)
    return PointNeighbourhood(fine // 2, (3, 4), keys=(fine // 2).unique(dim=0))  # queries coincide


# kind, backend, dtype, heads, kv_heads, head_dim, extra keys, masks
POINT_CASES = [
    ("odd", torch.float64, 2, 2, 8, 0, False),
    ("even", torch.float64, 4, 2, 5, 0, False),
    ("even", torch.float64, 3, 1, 18, 4, True),
    ("clouds", torch.float64, 4, 2, 16, 3, True),
    ("keys", torch.float64, 2, 1, 16, 0, True),
    ("keys", torch.float64, 2, 2, 1, 2, False),
    ("alone", torch.float64, 2, 1, 4, 0, False),
    ("alone", torch.float64, 2, 2, 4, 2, True),
    ("even", torch.float32, 2, 1, 48, 1, False),
    ("odd", torch.bfloat16, 4, 2, 64, 2, True),
    ("keys", torch.float16, 2, 1, 128, 0, False),
]


def extra_of(count: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Extra keys and values."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, count, kv_heads, head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "kv"] if count else []


def masks_of(points: PointNeighbourhood, extra: int) -> dict[str, Tensor]:
    """Masks that hide a third of the keys, and one of the extra keys."""
    masks = {"key_padding_mask": torch.rand(2, points.lists.keys, generator=torch.Generator().manual_seed(3)) < 0.3}
    if extra:
        masks["extra_padding_mask"] = torch.arange(extra) == torch.tensor([[0], [extra - 1]])
    return masks


def check_points(backend, kind, dtype, heads, kv_heads, head_dim, extra, has_masks, device="cpu"):
    """Output, lse and all gradients of a call over points beside the oracle's."""
    points = points_of(kind)
    sizes = {"batch": 2, "keys": points.lists.keys, "dtype": dtype}
    *qkv, dout = drawn(points.lists.queries, heads, kv_heads, head_dim, **sizes)
    tensors = [*qkv, *extra_of(extra, kv_heads, head_dim, dtype), dout]
    masks = masks_of(points, extra) if has_masks else {}

    def call(run, *leaves, **options):
        return run(*leaves[:3], points, scale=0.4, **oracle.named(leaves[3:]), **masks, **options)

    exact = partial(call, oracle.attention)
    dlse = drawn_dlse(exact(*(x.double() for x in tensors[:-1]))[1])
    right = differentiated(exact, [x.double() for x in tensors], dlse)
    masks = {name: mask.to(device) for name, mask in masks.items()}
    points, tensors = points.to(device), [x.to(device) for x in tensors]
    found = differentiated(partial(call, attend, backend=backend, return_lse=True), tensors, dlse)
    assert found[0].dtype == dtype
    close, close_lse, close_grad = TOLERANCE[dtype]
    assert_close(found[:2], right[:2], (close, close_lse))
    assert_close(found[2:], right[2:], close_grad, rtol=1e-2 if dtype.itemsize == 2 else 0.0)
