"""The pairs that claims time by themselves, and the table of those at the documents' sizes.

They are the documents' two functions beside two layouts of one, dense attention, one backend beside another, and a
curve computed by a loop.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.pairs import Results, Side, relative_difference
from hilbert_lib.lab.seeds import seed_hilbert_d2xy
from hilbert_lib.lab.sweeps.kernels import stored_side
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload, by_backend
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

FUNCTIONS, LAYOUTS, DENSE, BACKENDS = "two functions", "two layouts", "dense and dilated", "two backends"
REFERENCE = tuple((2048 << i, 1 << i) for i in range(5))  # (w, r) of the reference work of notebook 06
CHECKED_ROWS = 32  # rows of each head of the restated kernels, held against float64
MODERATE = {(2048, 2): 1.03, (1024, 1): 1.03}  # (tokens, dilation) of the documents: the speed-up that they print

Pairs = Iterator[tuple[Side, ...]]


def reference_pattern(length: int) -> DilatedPattern:
    """The branches of the reference work that are no longer than so many tokens."""
    return DilatedPattern(*zip(*(branch for branch in REFERENCE if branch[0] <= length), strict=True))


def documents_pairs(sizes: dict[tuple[int, int], float | None], *, segment_length: int, **shape) -> Pairs:
    """At each size the documents' two kernels, restated, and one function on two layouts.

    The two layouts are the fused kernel's, on k and v stored linear and along a Hilbert curve, both read through a
    table.
    """

    def read(q: Tensor, k: Tensor, v: Tensor, work: Workload, order: Ordering) -> Tensor:
        return dilated_attention(q, k, v, work.pattern, kv_ordering=order, backend="triton")

    for (length, dilation), claimed in sizes.items():
        if length % segment_length or segment_length < dilation:
            raise ValueError(f"segment_length must divide {length} and be at least {dilation}, got {segment_length}")
        work = Workload(DilatedPattern((segment_length,), (dilation,), offsets="zero"), length, **shape)
        parameters = {"sweep": "claims", "claimed": claimed, "dilation": dilation, **work.parameters}
        curve = Ordering.from_curve("snake", length).to(work.device).perm.int()  # what the documents call Hilbert
        functions, layouts = {**parameters, "pair": FUNCTIONS}, {**parameters, "pair": LAYOUTS}
        yield _function_side(work, "standard", functions, None), _function_side(work, "hilbert", functions, curve)
        orders = Ordering.linear(length), Ordering.from_curve("hilbert", length)
        yield tuple(stored_side(work, order.kind, order, read, layouts) for order in orders)


def dense_pairs(lengths: Sequence[int], *, segment_length: int, **shape) -> Pairs:
    """Attention to all keys, and to those of the reference work, each by what "auto" takes: two functions."""
    for length in lengths:
        patterns = {"dense": DilatedPattern((length,), (1,)), "dilated": reference_pattern(length)}
        works = {name: Workload(pattern, length, **shape) for name, pattern in patterns.items()}
        attend = partial(by_backend, "auto")
        yield tuple(work.side(name, attend, "forward", sweep="claims", pair=DENSE) for name, work in works.items())


def backend_pairs(bases: Sequence[str], rival: str, lengths: Sequence[int], *, segment_length: int, **shape) -> Pairs:
    """The forward of the reference work by a rival, beside each backend that may be the base."""
    for length, base in product(lengths, bases):
        work = Workload(reference_pattern(length), length, **shape)
        about = {"sweep": "claims", "pair": BACKENDS}
        yield tuple(work.side(name, partial(by_backend, name), "forward", **about) for name in (base, rival))


def loop_sides(sides: Sequence[int]) -> Pairs:
    """The documents' curve of square grids, cell by cell in Python as they print it."""
    for side in sides:
        parameters = {"sweep": "claims", "length": side * side}

        def loop(side: int = side) -> Results:
            return (torch.tensor([seed_hilbert_d2xy(side, place) for place in range(side * side)]),)

        yield (Side("loop", parameters, loop, lambda results: float(results[0][0].any())),)


def claim_table(records: Sequence[dict]) -> pd.DataFrame:
    """Table of the documents' claims on sizes, beside what was seen.

    Of the two pairs, "functions" and "layouts": the ratio (above 1: the Hilbert side is faster), _low and _high, and
    _apart, the relative difference of the outputs.
    """
    columns = {"ratio": "", "low": "_low", "high": "_high", "output_difference": "_apart"}
    ratios = ratio_table(records, "claims").set_index(["length", "dilation"])
    table = ratios.loc[ratios.pair == FUNCTIONS, ["claimed"]].astype(float)
    for pair, prefix in ((FUNCTIONS, "functions"), (LAYOUTS, "layouts")):
        names = {old: prefix + suffix for old, suffix in columns.items()}
        table = table.join(ratios.loc[ratios.pair == pair, list(columns)].rename(columns=names))
    return table.reset_index()


def _function_side(work: Workload, name: str, parameters: dict, order: Tensor | None) -> Side:
    from hilbert_lib.lab.seed_kernel import seed_attention  # triton is imported only where a kernel is used

    ((segment, rate),) = work.pattern.branches

    def output() -> Results:
        return (seed_attention(*work.tensors[:3], segment_length=segment, dilation_rate=rate, order=order),)

    def error(results: Results) -> float:
        place = torch.arange(work.length, device=work.device) if order is None else order.long()
        query = place[:: -(-work.length // CHECKED_ROWS)]
        steps = torch.arange(segment // rate, device=work.device) * rate
        key = place[query[:, None] // segment * segment + steps]
        q, k, v = (x[0].double() for x in work.tensors[:3])
        weights = torch.einsum("mhd,mkhd->mhk", q[query], k[key]).mul(work.call.scale).softmax(-1)
        return relative_difference([results[0][0, query]], [torch.einsum("mhk,mkhd->mhd", weights, v[key])])

    flop = 4 * work.length * (segment // rate) * work.heads * work.head_dim
    return Side(name, parameters, output, error, useful_flop=flop)
