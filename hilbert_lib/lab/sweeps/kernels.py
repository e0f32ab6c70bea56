"""The sweeps of notebooks 06 and 06b.

Pairs of calls that answer how fast the kernels are, and what a layout changes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.pairs import Side, relative_difference
from hilbert_lib.lab.workload import Workload, fused_backend
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

if TYPE_CHECKING:
    import pandas as pd  # here it would be loaded by every process that measures

Pairs = Iterator[tuple[Side, Side]]
Named = Iterable[tuple[str, Workload]]  # of `workload.grid`

NO_TABLE = "no table"


def backends(works: Named, attend: Callable[..., Tensor], opponents: Sequence[str]) -> Pairs:
    """Each opponent beside the fused kernel on each work, forward and backward; one that cannot serve says why.

    The fused kernel is `fused_backend`, whose name its side has.
    attend: the output of (name, q, k, v, work). opponents: names of `BACKENDS` and `BASELINES`.
    """
    printed = set()
    for label, work in works:
        about = {"sweep": "backends", "pattern": label}
        fused = fused_backend(work)
        directions = "forward", "backward"
        base = {direction: work.side(fused, partial(attend, fused), direction, **about) for direction in directions}
        for name, direction in product(opponents, base):
            reason = _refusal(name, work, gradient=direction == "backward")
            if not reason:
                yield work.side(name, partial(attend, name), direction, **about), base[direction]
            elif (name, reason) not in printed:
                printed.add((name, reason))
                print(f"{name} is left out: {reason}")


def _refusal(name: str, work: Workload, *, gradient: bool) -> str:
    if name in BASELINES:
        q, _ = work.stand_ins(gradient=gradient)
        return BASELINES[name].refusal(q, work.call)
    return work.refusal(name, gradient=gradient)


def ceilings(device: torch.device) -> Iterator[tuple[Side]]:
    """Best speeds of a device: a copy, reading alone, a product of two matrices, and exponentials.

    useful_flop of the exponentials is their number. Attention takes one for each pair that attends, in each direction.
    """
    size, n = (2**31, 8192) if device.type == "cuda" else (2**20, 64)
    source = torch.randint(256, (size // 2,), device=device, dtype=torch.uint8)
    target, (a, b) = torch.empty_like(source), torch.randn(2, n, n, device=device, dtype=torch.bfloat16)

    def copy_error(_: object) -> float:  # of what it left: back to back it stands beside the product, another function
        return (source != target).double().mean().item()

    def product_error(results: Sequence[Tensor]) -> float:
        return relative_difference([results[0][:8]], [a[:8].double() @ b.double()])

    copy = {"sweep": "ceilings", "bytes": size}  # read and written
    yield (Side("copy", copy, lambda: (target.copy_(source),)[1:], copy_error, useful_bytes=size),)
    yield (Side("matrix product", {"sweep": "ceilings", "n": n}, lambda: (a @ b,), product_error, 2 * n**3),)
    ones = torch.ones(size // 8, device=device)  # whose sum is exact

    def read_error(results: Sequence[Tensor]) -> float:
        return relative_difference([results[0].double().cpu()], [torch.tensor(float(len(ones))).double()])

    about = {"sweep": "ceilings", "bytes": 4 * len(ones)}
    yield (Side("read", about, lambda: (ones.sum(),), read_error, useful_bytes=4 * len(ones)),)
    from hilbert_lib.lab.exponentials import ROUNDS, exponentials  # Triton is imported only where a kernel is used

    x = torch.rand(2**24 if device.type == "cuda" else 2**10, device=device)

    def exponentials_error(results: Sequence[Tensor]) -> float:
        exact = x.double()
        for _ in range(ROUNDS):
            exact = torch.exp2(-exact)
        return relative_difference(results, [exact])

    about = {"sweep": "ceilings", "elements": len(x), "rounds": ROUNDS}
    yield (Side("exponentials", about, lambda: (exponentials(x),), exponentials_error, len(x) * ROUNDS),)


def roof_of(works: "pd.DataFrame", rates: "pd.DataFrame") -> "pd.Series":
    """The TFLOP/s that no work of a table can pass: by its bytes, its FLOP and its exponentials, the lowest.

    works: with useful_flop, useful_bytes, direction and head_dim. rates: gb_per_s and tflop_per_s of `ceilings`, by
    name; those that a record lacks bind nothing. Bytes bind by the faster of a copy and of reading.
    """
    import pandas as pd

    intensity = works.useful_flop / works.useful_bytes
    # 2 FLOP for each product's element: two products forward, five backward; and one exponential, for each pair.
    flop_of_pair = works.head_dim * works.direction.map({"forward": 4, "backward": 10})
    roofs = {"bytes": intensity * rates.gb_per_s[rates.index.isin(["copy", "read"])].max() / 1e3}
    roofs["products"] = pd.Series(rates.tflop_per_s["matrix product"], works.index)
    if "exponentials" in rates.index:
        roofs["exponentials"] = flop_of_pair * rates.tflop_per_s["exponentials"]
    return pd.DataFrame(roofs).astype(float).min(axis=1)


def single_branches(
    *,
    lengths: Sequence[int],
    dilations: Sequence[int],
    row_bytes: Sequence[int],
    keys: int,
    heads: int,
    device: torch.device,
    queries: int = 0,
) -> Iterator[tuple[Workload, dict]]:
    """Works of one branch, offset 0, whose k and v lie heads first, and what distinguishes their records.

    keys: that a query sees at most. row_bytes: of one head's row, in bfloat16. queries: 0 for all of the sequence;
    otherwise so many, decoding, near its end.
    """
    for length, rate, size in product(lengths, dilations, row_bytes):
        asked = ((length - queries) // rate * rate, queries) if queries else None
        pattern = DilatedPattern((min(length, keys * rate),), (rate,), offsets="zero")
        work = Workload(pattern, length, heads, size // 2, device, queries=asked, heads_first=True)
        yield work, {"queries": queries, "dilation": rate, "row_bytes": size}


def layouts(attend: Callable[..., Tensor], **sizes) -> Pairs:
    """One kernel on k and v stored in every order, beside linear storage read through the same kind of table.

    attend: the output of (q, k, v, work, ordering). The layout "no table" is linear storage read without a table, its
    ordering None.
    """
    for work, about in single_branches(**sizes):
        about["sweep"] = "decoding" if about["queries"] else "layouts"
        (segment,) = work.pattern.segment_lengths
        orders = compared_orderings(work.length, about["dilation"], segment=segment)
        linear = stored_side(work, "linear", orders.pop("linear"), attend, about)
        for name, ordering in ({NO_TABLE: None} | orders).items():
            yield linear, stored_side(work, name, ordering, attend, about)


def stored_side(work: Workload, name: str, ordering: Ordering | None, attend: Callable, about: dict) -> Side:
    """A call that finds k and v stored in an ordering."""
    stored = cache(lambda: work.tensors[1:3] if ordering is None else work.stored(ordering))
    return work.side(name, lambda q, k, v, work: attend(q, *stored(), work, ordering), **about)
