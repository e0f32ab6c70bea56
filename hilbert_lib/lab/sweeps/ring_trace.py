"""What a trace of the kernels of one call tells of the exchange in it."""

from collections.abc import Iterable

Kernel = tuple[str, float, float]  # name, begin and end in microseconds


def exchange_of(kernels: Iterable[Kernel]) -> tuple[float, float, float] | None:
    """How many ms a rank's exchange ran, the share of it under other kernels, and ms from the ranks' meeting to it.

    None where nothing was exchanged: the trace begins with a barrier.

    Args:
        kernels: of one rank; those of the exchange and of the barrier have "nccl" in their names, in any case.

    >>> barrier, own = ("ncclKernel", 0.0, 10.0), ("attention", 20.0, 50.0)
    >>> exchange_of([barrier, own, ("ncclKernel", 40.0, 60.0)])
    (0.02, 0.5, 0.03)
    >>> exchange_of([own]), exchange_of([barrier, own])
    (None, None)
    """
    sent, others = [], []
    for name, begin, end in kernels:
        (sent if "nccl" in name.lower() else others).append((begin, end))
    communicated, others = _joined(sent), _joined(others)
    if len(communicated) < 2:
        return None
    (_, met), *exchange = communicated  # however many events tell of one barrier
    took = sum(end - begin for begin, end in exchange)
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchange for c, d in others)
    return took / 1e3, shared / took, (exchange[0][0] - met) / 1e3


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined
