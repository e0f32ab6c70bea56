"""The sweeps of notebooks 06 and 06b.

Pairs of calls that answer how fast the kernels are, and what a layout changes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.pairs import Side, relative_difference
from hilbert_lib.lab.workload import Workload, fused_backend
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

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
    """Best speeds of a device: a copy, and a product of two matrices."""
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
