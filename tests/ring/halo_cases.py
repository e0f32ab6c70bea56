"""Cases of attention on a grid that is spread over ranks: what ranks run, as test_ring_attention starts them."""

from math import prod

from allpairspy import AllPairs
from grid_cases import HEADS, MORE, RULES, shape_of

# By the number of ranks and of axes: uneven, empty and thin parts, whose windows reach past their neighbours.
CUT = {
    (2, 1): {"parts": [2], "cuts": [[4]]},
    (2, 2): {"parts": [1, 2], "cuts": [None, [3]]},
    (2, 3): {"parts": [1, 1, 2]},
    (3, 1): {"parts": [3], "cuts": [[9, 9]]},
    (3, 2): {"parts": [3, 1], "cuts": [[1, 2], None]},
    (3, 3): {"parts": [1, 3, 1], "cuts": [None, [1, 1], None]},
    (4, 1): {"parts": [4], "cuts": [[2, 3, 12]]},
    (4, 2): {"parts": [2, 2], "cuts": [[3], [5]]},
    (4, 3): {"parts": [2, 1, 2]},
    (8, 1): {"parts": [8], "cuts": [[1, 2, 3, 3, 9, 12, 14]]},
    (8, 2): {"parts": [2, 4]},
    (8, 3): {"parts": [2, 2, 2]},
}
SPREAD = ("strips", "cut", "hilbert", "random")
# Grids of several tiles of a GPU, as `grid_cases.RULES` has them, and even rectangles of them.
LARGE_RULES = {
    "large plane": ((48, 40), (9, 17), 1, 1, False, "shift"),
    "large plane, wrapped": ((40, 48), (5, 8), (1, 2), (1, 2), False, ("clip", "wrap")),
    "large volume": ((8, 16, 16), (3, 5, 7), 1, 1, (True, False, False), "shift"),
}
EVEN = {2: [1, 2], 4: [2, 2]}


def spread(kind: str, shape: tuple[int, ...], ranks: int) -> dict:
    if kind == "strips":
        return {"parts": [ranks, *[1] * (len(shape) - 1)]}
    if kind == "cut":
        return CUT[ranks, len(shape)]
    if kind == "even":
        return {"parts": [*[1] * (len(shape) - 2), *EVEN[ranks]]}
    cells = prod(shape)
    lengths = [cells // ranks + (-1) ** n * (cells // ranks // 2) for n in range(ranks - 1)]
    return {"order": kind, "lengths": [*lengths, cells - sum(lengths)]}


def compared(ranks: int) -> list[dict]:
    """Every two of the options meet for some number of ranks; for 8 ranks each two."""
    dtypes = ("float64", "float32", "bfloat16")
    cases = list(AllPairs([list(RULES), list(SPREAD), list(HEADS), list(MORE), list(dtypes)]))
    own = cases if ranks == 8 else cases[ranks - 2 :: 3]
    return [
        {"rules": rules, "heads": heads, "shards": spread(kind, RULES[rules][0], ranks), "more": more, "dtype": dtype}
        | {"backend": "reference" if dtype == "float64" else "auto"}
        for rules, kind, heads, more, dtype in own
    ]


HALOS = {ranks: compared(ranks) for ranks in (2, 3, 4, 8)}
# An edge that goes round, where two ranks are neighbours on both sides; windows that reach past thin neighbours.
PLAIN = {"heads": "one", "more": "nothing", "dtype": "float32"}
HALOS[2] += [{"rules": "plane, wrapped", "shards": {"parts": [2, 1]}, **PLAIN}]
HALOS[4] += [{"rules": "line", "shards": CUT[4, 1], **PLAIN}]
# Rows copied and summed by kernels, as on a GPU.
HALOS[4] += [{"rules": "plane", "shards": spread("even", RULES["plane"][0], 4), **PLAIN, "heads": "grouped"}]
HALOS[4][-1] |= {"more": "extra and padding", "by_kernel": True}
# Runs whose keys reach past an edge that goes round: a kernel would read a table past its end.
HALOS[3] += [{"rules": "plane, wrapped", "shards": {"order": "hilbert", "lengths": [30, 40, 26]}, **PLAIN}]
HALOS[3][-1] |= {"backend": "triton"}
# Interpreted where there is no GPU, which takes long.
HALOS[8] += [
    {"rules": "line", "heads": "windows", "shards": CUT[8, 1], "more": "extra and padding", "backend": "triton"}
]
# Several neighbourhoods in one softmax, whose halos differ.
JOINED = {
    2: [
        ("near and far", "grouped", "cut", "extra and padding", "float64"),
        ("round and causal", "windows", "cut", "extra", "float32"),
        ("near and far", "one", "strips", "nothing", "bfloat16"),
        ("a line three times", "grouped", "hilbert", "extra and padding", "float32"),
    ],
    4: [
        ("near and far", "windows", "random", "extra and padding", "float64"),
        ("round and causal", "grouped", "cut", "padding", "float32"),
        ("a line three times", "one", "cut", "extra and padding", "float64"),
    ],
}
for ranks, cases in JOINED.items():
    HALOS[ranks] += [
        {"rules": rules, "heads": heads, "shards": spread(kind, shape_of(rules), ranks), "more": more, "dtype": dtype}
        | {"backend": "reference" if dtype == "float64" else "auto"}
        for rules, heads, kind, more, dtype in cases
    ]
# On GPUs alone: there the whole of a rank's work is compiled kernels, beside an exchange on a stream of its own.
_LARGE = AllPairs([list(LARGE_RULES), ["even", "strips", "hilbert"], ["float32", "bfloat16"], ["nothing", MORE[-1]]])
_LARGE = [(rules, kind, {"dtype": dtype, "more": more, "head_dim": 64}) for rules, kind, dtype, more in _LARGE]
_COUNTED = [("plane", "even"), ("volume", "strips"), ("plane", "hilbert")]
_COUNTED = [(rules, kind, {"padded": kind != "even"}) for rules, kind in _COUNTED]


def grouped(some: list[tuple]) -> dict[int, list[dict]]:
    """Cases of so many ranks, with grouped heads; some: their rules, how cells are spread, and what else is asked."""
    rules_of = RULES | LARGE_RULES
    return {
        ranks: [{"rules": rules, "heads": "grouped", "shards": spread(kind, rules_of[rules][0], ranks), **rest}
                for rules, kind, rest in some]
        for ranks in EVEN
    }  # fmt: skip


LARGE_HALOS = grouped(_LARGE)
COUNTED_HALOS = grouped(_COUNTED) | {
    3: [
        {"rules": "plane", "heads": "grouped", "shards": {"parts": [3, 1]}, "padded": True},
        {"rules": "line", "heads": "windows", "shards": {"parts": [3], "cuts": [[0, 10]]}},  # an empty rank
        {"rules": "plane, wrapped", "heads": "one", "shards": {"order": "hilbert", "lengths": [30, 40, 26]}},
        {"rules": "alone", "heads": "one", "shards": {"parts": [3, 1]}},
    ],
}
HELD_HALOS = [{"parts": [4, 1]}, {"parts": [2, 2]}, {"order": "hilbert", "lengths": [1000, 2048, 1096, 4048]}]
# What the last rank asks for, and what all say.
ON_GRIDS = {
    "window": ({"neighbourhood": 5}, ("neighbourhood", "window=(3, 5)", "on rank 0", "window=(5, 5)", "on rank 1")),
    "shards": ({"shards": [1, 2]}, ("shards", "parts=(2, 1)", "on rank 0", "parts=(1, 2)", "on rank 1")),
    "ranks": ({"shards": [3, 1]}, ("shards must be those of 2 ranks, got Rectangles(parts=(3, 1)",)),
    "gradient": ({"requires_grad": True}, ("requires_grad", "False on rank 0", "True on rank 1")),
    "mask": ({"key_padding_mask": True}, ("key_padding_mask", "None on rank 0", "a tensor on rank 1")),
    "scale": ({"scale": 0.25}, ("scale", "0.5 on rank 0", "0.25 on rank 1")),
    "backend": ({"backend": "flex"}, ("backend='flex'", "computes no part of a grid")),
    "validate": ({"validate": "no"}, ("validate must be True or False, got 'no'",)),
}
