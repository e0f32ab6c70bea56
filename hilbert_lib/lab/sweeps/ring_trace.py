"""The exchange in one call: what a trace of its kernels tells, and the bytes that torch is given to carry."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist

Kernel = tuple[str, float, float]  # name, begin and end in microseconds


def exchange_of(kernels: Iterable[Kernel]) -> tuple[float, float, float] | None:
    """Milliseconds of a rank's exchange, the share of it under other kernels, and ms from the ranks' meeting to it.

    None where nothing was exchanged: the trace begins with a barrier, whose kernels have "nccl" in their names too.

    >>> barrier, own = ("ncclKernel", 0.0, 10.0), ("attention", 20.0, 50.0)
    >>> exchange_of([barrier, own, ("ncclKernel", 40.0, 60.0)])
    (0.02, 0.5, 0.03)
    >>> exchange_of([own]), exchange_of([barrier, own])
    (None, None)
    """
    sent, computed = [], []
    for name, begin, end in kernels:
        (sent if "nccl" in name.lower() else computed).append((begin, end))
    communicated, computed = _joined(sent), _joined(computed)
    if len(communicated) < 2:
        return None
    (_, met), *exchange = communicated  # however many events tell of one barrier
    took = sum(end - begin for begin, end in exchange)
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in exchange for c, d in computed)
    return took / 1e3, shared / took, (exchange[0][0] - met) / 1e3


def _joined(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts what is "sent" and "received" inside: bytes between ranks, but for a call's header, and "calls"."""
    total = {"sent": 0, "received": 0, "calls": 0}
    all_to_all, batched = dist.all_to_all_single, dist.batch_isend_irecv

    def counting_all_to_all(output, input, output_split_sizes, input_split_sizes, **options):
        total["calls"] += 1
        for name, x, sizes in (("sent", input, input_split_sizes), ("received", output, output_split_sizes)):
            row = math.prod(x.shape[1:]) * x.element_size()
            total[name] += row * (sum(sizes) - sizes[dist.get_rank()])
        return all_to_all(output, input, output_split_sizes, input_split_sizes, **options)

    def counting_batched(operations):
        for operation in operations:
            name = "sent" if operation.op is dist.isend else "received"
            total[name] += operation.tensor.numel() * operation.tensor.element_size()
        return batched(operations)

    with patch.multiple(dist, all_to_all_single=counting_all_to_all, batch_isend_irecv=counting_batched):
        yield total
