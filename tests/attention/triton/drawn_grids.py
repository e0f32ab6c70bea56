"""Random calls of neighbourhood attention that the warp-specialised kernels serve, and what is right, in float64."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import NamedTuple

import torch
from allpairspy import AllPairs
from cases import LAYOUTS, MORE, bias_sides, boxed, differentiated, query_boxed, ranges
from oracle import attending

from hilbert_lib import Neighbourhood
from hilbert_lib.attention.request import Tensors

EDGES = ("shift", "clip", "wrap", "causal")
RANKS = {1: (40, 400), 2: (4, 40), 3: (2, 14)}  # along each axis of a grid, by how many there are
STEPS = ((), ("stride",), ("dilation",), ("stride", "dilation"))
HEADS = {"one": (1, 1, 1), "grouped": (1, 4, 2), "windows": (1, 2, 2), "shared": (2, 2, 1)}  # batch, heads, kv_heads
# What a case is of; the rest is drawn.
CASES = list(AllPairs([(128, 64, 40, 80, 16), EDGES, (2, 3, 1), STEPS, MORE, list(HEADS), LAYOUTS]))
ONE_EXTRA_KEY = 10  # the number of a case


# Parts of grids that boxes serve: the grid, the rows that are held, and those of them that are computed.
BOXED = {
    "inside": (Neighbourhood((22, 30), (5, 7)), ranges(3, 20, 0, 25), ranges(5, 18, 0, 22)),
    "a border": (Neighbourhood((22, 30), (5, 7)), ranges(0, 3, 4, 30), ranges(0, 3, 4, 30)),
    "round the end": (Neighbourhood((20, 24), (5, 6), edge="wrap"), ranges(17, 20, 3, 20), ranges(17, 20, 3, 20)),
    "strip of a globe": (Neighbourhood((30, 12), 5, edge=("clip", "wrap")), ranges(8, 20, 0, 12), ranges(8, 20, 0, 12)),
    "dilated along the whole": (
        Neighbourhood((20, 24), (4, 5), dilation=(1, 2)), ranges(4, 12, 0, 24), ranges(6, 12, 0, 24)
    ),
    "strided": (Neighbourhood((24, 20), 6, stride=(4, 1), edge="clip"), ranges(0, 20, 0, 20), ranges(0, 16, 2, 15)),
    "causal line": (Neighbourhood((150,), 20, is_causal=True), ranges(30, 140), ranges(50, 135)),
    "volume": (Neighbourhood((6, 10, 12), (3, 4, 5)), ranges(1, 5, 0, 8, 4, 12), ranges(1, 5, 2, 8, 4, 12)),
    "rows before the keys": (
        Neighbourhood((12, 12, 12), (3, 4, 5)), ranges(0, 12, 0, 12, 0, 12), ranges(6, 12, 6, 12, 6, 12)
    ),
    "one cell": (Neighbourhood((9, 9), 3), ranges(4, 5, 8, 9), ranges(4, 5, 8, 9)),
}  # fmt: skip


# Boxes of queries, with all cells as keys.
QUERY_BOXES = {
    "frames of a film": (
        Neighbourhood((6, 10, 12), (3, 4, 5), is_causal=(True, False, False)),
        ranges(4, 6, 0, 10, 0, 12),
    ),
    "the last cell of a line": (Neighbourhood((150,), 20, is_causal=True), ranges(149, 150)),
    "amid a plane": (Neighbourhood((22, 30), (9, 7), stride=(3, 1), edge=("clip", "shift")), ranges(7, 20, 4, 23)),
    "all along what goes round": (
        Neighbourhood((20, 12), (5, 6), dilation=(1, 2), edge=("clip", "wrap")),
        ranges(3, 9, 0, 12),
    ),
    "windows larger than the grid": (Neighbourhood((18, 20), (30, 60), edge=("clip", "shift")), ranges(1, 9, 11, 20)),
}


# Grids that show what none of the drawn ones does.
SPECIAL = {
    "small windows": Neighbourhood((20, 40), (3, 5), edge=("clip", "shift")),
    "small windows round the end": Neighbourhood((24, 32), (5, 3), dilation=(1, 2), edge="wrap"),
    "narrow windows": Neighbourhood((40, 20), (17, 3), is_causal=(True, False), edge=("clip", "shift")),
    "four boxes passed over": Neighbourhood((48, 16), (24, 16), stride=(24, 1)),
    "windows larger than the grid": Neighbourhood(
        (18, 20), (28, 60), dilation=(1, 2), stride=(5, 40), edge=("clip", "shift")
    ),
}

# Grids whose windows are whole boxes of 128 keys, a window for each KV head, and a number of extra keys.
WHOLE = {
    "line": ((Neighbourhood((600,), 256, stride=128),), 70),
    "plane": ((Neighbourhood((40, 36), 32, stride=16),), 0),
    "wide plane": ((Neighbourhood((16, 48), (16, 16), stride=(1, 8)),), 128),
    "dilated": ((Neighbourhood((64, 48), 16, stride=(16, 8), dilation=2),), 200),
    "windows of heads": (
        (Neighbourhood((32, 24), 16, stride=16), Neighbourhood((32, 24), (32, 16), stride=16)), 0,
    ),
    "volume": ((Neighbourhood((4, 16, 24), (2, 16, 8), stride=(2, 8, 8)),), 1),
    "frames by columns": ((Neighbourhood((4, 12, 16), (4, 8, 8), stride=(1, 4, 8)),), 0),
    "all frames": ((Neighbourhood((6, 16, 16), (6, 8, 16), stride=(1, 8, 16)),), 0),
    "residues of two sizes": ((Neighbourhood((65, 49), 16, stride=(16, 8), dilation=2),), 70),
    "all of the short residues": ((Neighbourhood((33, 32), 16, stride=16, dilation=2),), 0),
}  # fmt: skip

# A volume for each shape of a box.
VOLUMES = {
    (4, 4, 4): Neighbourhood((4, 10, 10), (3, 5, 5), edge=("shift", "clip", "shift")),
    (2, 8, 4): Neighbourhood((6, 16, 4), (2, 5, 3), stride=(1, 2, 1)),
    (2, 4, 8): Neighbourhood((6, 5, 16), (2, 3, 7), is_causal=(True, False, False), edge=("clip", "shift", "clip")),
}


class Case(NamedTuple):
    windows: tuple[Neighbourhood, ...]  # one a KV head
    batch: int
    heads: int
    head_dim: int
    extra: int
    is_padded: bool
    is_extra_padded: bool
    layout: str
    dtype: torch.dtype
    has_bias: bool = False


def drawn_axis(random: Random, ranks: tuple[int, int], edge: str, steps: tuple[str, ...]) -> tuple:
    """A side, window, dilation, stride, is_causal and edge."""
    dilation = random.choice((1, 2, 3)) if "dilation" in steps else 1
    m = max(ranks[0], random.randint(*ranks) // dilation)
    stride = min(m, random.choice((2, 3, 4, m))) if "stride" in steps else 1
    m = -(-m // stride) * stride if edge == "wrap" else m
    window = random.choice((m, random.randint(stride, m), min(m, stride + 4)))
    return m * dilation, window, dilation, stride, edge == "causal", "clip" if edge == "causal" else edge


@cache
def drawn(number: int) -> Case:
    """A random case of what a number says; its edge is that of the first axis, and other axes have others."""
    head_dim, edge, ndim, steps, more, heads, layout = CASES[number % len(CASES)]
    random = Random(number)
    batch, count, kv_heads = HEADS[heads]
    turns = number // len(CASES) + 1
    edges = [EDGES[(EDGES.index(edge) + n * turns) % len(EDGES)] for n in range(ndim)]
    cells, near = range(400, 700) if heads == "one" else range(140, 340), None
    while near is None or near.length not in cells:
        fields = [*zip(*(drawn_axis(random, RANKS[ndim], each, steps) for each in edges), strict=True)]
        near = Neighbourhood(*fields)
    ranks = [side // dilation for side, dilation in zip(near.shape, near.dilation, strict=True)]
    another = tuple(random.randint(*least_and_most) for least_and_most in zip(near.stride, ranks, strict=True))
    windows = (near, Neighbourhood(near.shape, another, *fields[2:]))[:kv_heads]  # grouped heads have them too
    return Case(
        windows, batch, count, head_dim, random.choice((1, 64, 70, 130)) if "extra" in more else 0,
        "padding" in more, more == "extra and padding", layout, random.choice((torch.bfloat16, torch.float16)),
    )  # fmt: skip


@cache
def biased(number: int) -> Case:
    """The same with a bias."""
    case = drawn(number)._replace(has_bias=True)
    # Of its one extra key p dp (norm 113) and p delta (82) are more than their difference (63). So the rounding of
    # weights and out to bfloat16 is 3.6e-3 of the gradient, and all rounding 4.2e-3. Of 70 keys it is 2.5e-3 in all.
    return case._replace(extra=70) if number == ONE_EXTRA_KEY else case


# The numbers of cases with an axis that `uneven` lengthens.
UNEVEN = (3, 6, 7, 10, 13, 14, 19)


def uneven(number: int) -> Case:
    """The call `drawn(number)` on a grid whose sides are no multiples of its dilations, where its axes allow that."""
    case = drawn(number)
    sides = [axis.cells + (0 if axis.edge == "wrap" else axis.dilation - 1) for axis in case.windows[0].axes]
    return case._replace(windows=tuple(replace(near, shape=sides) for near in case.windows))


@cache
def wide(number: int) -> Case:
    """The same at a head_dim of two parts of columns."""
    return drawn(number)._replace(head_dim=(256, 136, 192, 160, 232)[number % 5])


def whole(name: str) -> Case:
    """The call of one of `WHOLE`; two query heads share each KV head of one window."""
    windows, extra = WHOLE[name]
    return Case(windows, 1, 2, 128, extra, False, False, "bshd", torch.bfloat16)


def special(name: str) -> list[Case]:
    """The calls of one of `SPECIAL`."""
    return [Case((SPECIAL[name],), 1, 1, head_dim, 0, False, False, "bshd", torch.bfloat16) for head_dim in (64, 128)]


# Grids of a tile for each of many programs, in which groups and engines go on in other orders.
MANY_PROGRAMS = {
    head_dim: Case((Neighbourhood((24, 32), (9, 12)),), 1, 2, head_dim, 70, False, False, "bshd", torch.bfloat16)
    for head_dim in (192, 256)
}


@cache
def expected(case: Case) -> tuple:
    """Inputs, and what is right: out and lse, and the gradients of q, k, v, the extra keys and the bias, if any."""
    generator = torch.Generator().manual_seed(0)
    seq, kv_heads = case.windows[0].length, len(case.windows)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(case.batch, rows, heads, case.head_dim, generator=generator).to(case.dtype)

    own = (seq, case.heads), *[(seq, kv_heads)] * 2, *[(case.extra, kv_heads)] * 2
    *given, dout = *(draw(*each) for each in own), draw(seq, case.heads)
    masks = [torch.rand(case.batch, n, generator=generator) < 0.4 for n in (seq, case.extra)]
    masks = [mask if used else None for mask, used in zip(masks, (case.is_padded, case.is_extra_padded), strict=True)]
    hidden = {"key_padding_mask": masks[0], "extra_padding_mask": masks[1]}
    if case.has_bias:
        given.append(torch.randn(case.heads, *bias_sides(case.windows), generator=generator))
        dout[:, :, 1::2] *= 2  # heads have units of their own
    exact = attending(case.windows, scale=case.head_dim**-0.5, **hidden)
    return Tensors(*given), dout, masks, differentiated(exact, [x.double() for x in (*given, dout)])


def boxed_part(name: str) -> tuple:
    """A case of `BOXED` or `QUERY_BOXES`, as `check_part` takes it."""
    return boxed(*BOXED[name]) if name in BOXED else query_boxed(*QUERY_BOXES[name])
