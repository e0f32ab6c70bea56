"""What a trace of the kernels of one call tells of the exchange in it."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

Kernel = tuple[str, float, float]  # name, begin and end in microseconds


class Exchange(NamedTuple):
    """The exchange of one call on one rank.

    Attributes:
        took_ms: how long its kernels ran.
        hidden: the share of that time in which others ran too.
        begins_ms: when the first of them began, after the ranks had met.
    """

    took_ms: float
    hidden: float
    begins_ms: float


def exchange_of(kernels: Iterable[Kernel]) -> Exchange | None:
    """The exchange in a trace that begins with a barrier; None where nothing was exchanged.

    Args:
        kernels: of one rank; those of the exchange and of the barrier have "nccl" in their names, in any case.

    >>> barrier, own = ("ncclKernel", 0.0, 10.0), ("attention", 20.0, 50.0)
    >>> exchange_of([barrier, own, ("ncclKernel", 40.0, 60.0)])
    Exchange(took_ms=0.02, hidden=0.5, begins_ms=0.03)
    >>> exchange_of([own]), exchange_of([barrier, own])
    (None, None)
    """
    sent: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for name, begin, end in kernels:
        (sent if "nccl" in name.lower() else others).append((begin, end))
    communicated = list(_joined(sent))
    if len(communicated) < 2:
        return None
    (_, met), *exchange = communicated  # however many events tell of one barrier
    took = sum(end - begin for begin, end in exchange)
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchange for c, d in _joined(others))
    return Exchange(took / 1e3, shared / took, (exchange[0][0] - met) / 1e3)


def _joined(intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    begin = end = None
    for a, b in sorted(intervals):
        if end is not None and a <= end:
            end = max(end, b)
            continue
        if end is not None:
            yield begin, end
        begin, end = a, b
    if end is not None:
        yield begin, end
