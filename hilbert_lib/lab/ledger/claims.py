"""Claims that are timed by themselves: the documents' two functions beside two layouts of one, dense attention, and one
backend beside another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.pairs import Results, Side, relative_difference, run_sides
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

FUNCTIONS, LAYOUTS, DENSE, BACKENDS = "two functions", "two layouts", "dense and dilated", "two backends"
REPETITIONS = 30
REFERENCE = tuple((2048 << i, 1 << i) for i in range(5))  # (w, r) of the reference work of notebook 06
CHECKED_ROWS = 32  # rows of each head of the restated kernels, held against float64


@dataclass(frozen=True)
class Size:
    """One configuration of the documents: tokens, dilation rate, and the speed-up they state, or None."""

    length: int
    dilation: int
    claimed: float | None


@dataclass(frozen=True)
class Claim:
    """A claim that is timed by itself.

    Attributes:
        sizes: of the documents' two kernels and of two layouts.
        dense_lengths: tokens over which dense attention stands beside dilated attention.
        backends: two backends to be compared, the base first; `lengths`: over how many tokens.
    """

    sizes: tuple[Size, ...] = ()
    dense_lengths: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()


EXTREME = Size(4096, 64, 7.95)
MODERATE = (Size(2048, 2, 1.03), Size(1024, 1, 1.03))
CLAIMS = {
    "K3": Claim((EXTREME, *MODERATE, Size(4096, 1, None))),
    "K4": Claim(MODERATE),
    "K10": Claim(dense_lengths=(8192, 32768, 131072)),
    "B4": Claim(backends=("sdpa", "xformers"), lengths=(8192, 65536)),
}


def claim_pairs(
    claims: Iterable[str],
    *,
    device: torch.device | str,
    segment_length: int = 1024,
    heads: int = 12,
    head_dim: int = 64,
) -> Iterator[tuple[Side, Side]]:
    """What is timed for a claim, size by size.

    "two functions": the documents' standard kernel beside their "Hilbert" kernel, restated (`seed_kernel`).
    "two layouts": one function, the fused kernel, on k and v stored linear and along a Hilbert curve, both read
    through a table.
    "dense and dilated": attention to all keys, and to those of the reference work, each by what "auto" takes.
    "two backends": the reference work by the two backends that the claim names.

    Args:
        claims: ids of `CLAIMS`.
        device: where to compute.
        segment_length: w, at most the shortest length; the documents name none.
        heads, head_dim: the documents' D = 768 as 12 heads of 64.

    Yields:
        (standard, its rival), to be given to `paired.run_sides`.

    Raises:
        ValueError: for an unknown claim, or a segment that does not divide a length.
    """
    device, claims = torch.device(device), list(claims)
    for size in claimed_sizes(claims):
        if size.length % segment_length or segment_length < size.dilation:
            raise ValueError(
                f"segment_length must divide {size.length} and be at least {size.dilation}, got {segment_length}"
            )
        pattern = DilatedPattern((segment_length,), (size.dilation,), offsets="zero")
        work = Workload(pattern, size.length, heads, head_dim, device)
        parameters = {"sweep": "claims", "claimed": size.claimed, "dilation": size.dilation, **work.parameters}
        curve = Ordering.from_curve("snake", size.length).to(device).perm.int()  # what the documents call Hilbert
        yield tuple(
            _function_side(work, name, {**parameters, "pair": FUNCTIONS}, order)
            for name, order in (("standard", None), ("hilbert", curve))
        )
        orders = Ordering.linear(size.length), Ordering.from_curve("hilbert", size.length)
        yield tuple(_layout_side(work, {**parameters, "pair": LAYOUTS}, order) for order in orders)
    for length in dict.fromkeys(length for claim in claims for length in CLAIMS[claim].dense_lengths):
        yield dense_pair(length, device=device, heads=heads, head_dim=head_dim)
    for claim in (CLAIMS[name] for name in claims):
        for length in claim.lengths:
            work = Workload(reference_pattern(length), length, heads, head_dim, device)
            yield tuple(_attention_side(name, work, BACKENDS, backend=name) for name in claim.backends)


def reference_pattern(length: int) -> DilatedPattern:
    """The branches of the reference work that are no longer than so many tokens.

    >>> reference_pattern(8192).segment_lengths
    (2048, 4096, 8192)
    """
    return DilatedPattern(*zip(*(branch for branch in REFERENCE if branch[0] <= length), strict=True))


def dense_pair(length: int, *, device: torch.device, heads: int, head_dim: int) -> tuple[Side, Side]:
    """Dense attention beside dilated attention of as many tokens: two functions, as is claimed.

    Args:
        length: tokens.
        device, heads, head_dim: as in `claim_pairs`.
    """
    patterns = {"dense": DilatedPattern((length,), (1,)), "dilated": reference_pattern(length)}
    return tuple(
        _attention_side(name, Workload(pattern, length, heads, head_dim, device), DENSE)
        for name, pattern in patterns.items()
    )


def claimed_sizes(claims: Iterable[str]) -> list[Size]:
    """The sizes of some claims, each once.

    Raises:
        ValueError: for an unknown claim.

    >>> [size.length for size in claimed_sizes(["K4"])]
    [2048, 1024]
    """
    sizes: dict[Size, None] = {}
    for claim in claims:
        if claim not in CLAIMS:
            raise ValueError(f"claims must be of {', '.join(CLAIMS)}; got {claim!r}")
        sizes |= dict.fromkeys(CLAIMS[claim].sizes)
    return list(sizes)


def claim_table(records: Sequence[dict]) -> pd.DataFrame:
    """What is claimed beside what was seen, a row a size.

    Args:
        records: of `paired.run_sides`.

    Returns:
        length, dilation, claimed; functions, functions_low, functions_high, functions_apart and layouts, layouts_low,
        layouts_high, layouts_apart: the ratio of either pair (above 1: the Hilbert side is faster), its interval, and
        the relative difference of the outputs.
    """
    columns = {"ratio": "", "low": "_low", "high": "_high", "output_difference": "_apart"}
    ratios = ratio_table(records, "claims").set_index(["length", "dilation"])
    table = ratios.loc[ratios.pair == FUNCTIONS, ["claimed"]].astype(float)
    for pair, prefix in ((FUNCTIONS, "functions"), (LAYOUTS, "layouts")):
        names = {old: prefix + suffix for old, suffix in columns.items()}
        table = table.join(ratios.loc[ratios.pair == pair, list(columns)].rename(columns=names))
    return table.reset_index()


def time_again(claims: Iterable[str], *, segment_length: int = 1024, output_dir: str = "") -> list[dict]:
    """Time some claims on this machine's GPU.

    Args:
        claims, segment_length: as in `claim_pairs`.
        output_dir: folder of results.jsonl; empty writes nothing.

    Returns:
        Records, as `paired.run_sides` gives them.

    Raises:
        RuntimeError: without a CUDA device: times of Triton's interpreter mean nothing.
        ValueError: as `claim_pairs`.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "a claim is timed on a CUDA device, and torch sees none here; --dry-run shows what would run"
        )
    pairs = claim_pairs(claims, device="cuda", segment_length=segment_length)
    return run_sides(pairs, device="cuda", output_dir=output_dir, repetitions=REPETITIONS)


def _function_side(work: Workload, name: str, parameters: dict, order: Tensor | None) -> Side:
    from hilbert_lib.lab.seed_kernel import seed_attention  # triton is imported only where a kernel is used

    ((segment, rate),) = work.pattern.branches

    def forward() -> Results:
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
    return Side(name, parameters, forward, error, useful_flop=flop)


def _layout_side(work: Workload, parameters: dict, order: Ordering) -> Side:
    stored = cache(lambda: work.stored(order))

    def forward() -> Results:
        return (dilated_attention(work.tensors[0], *stored(), work.pattern, kv_ordering=order, backend="triton"),)

    return Side(order.kind, parameters, forward, work.error, useful_flop=work.flop_and_bytes[0])


def _attention_side(name: str, work: Workload, pair: str, *, backend: str = "auto") -> Side:
    def forward() -> Results:
        with torch.no_grad():
            return (dilated_attention(*work.tensors[:3], work.pattern, backend=backend),)

    parameters = {"sweep": "claims", "pair": pair, "direction": "forward", **work.parameters}
    return Side(name, parameters, forward, work.error, *work.flop_and_bytes[:2])
