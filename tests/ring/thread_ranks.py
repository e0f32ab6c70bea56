"""Ranks as threads of one process: what the ring asks of `torch.distributed` while rows travel, and nothing else."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from unittest.mock import patch

import torch

from hilbert_lib.ring.rank import exchange

PATIENCE = 20  # seconds that a rank waits for another one's rows, on a busy machine


@dataclass(frozen=True)
class Group:
    """The process group as one of the ranks sees it."""

    own: int
    ranks: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.ranks


class _Box:
    """Rows from one rank to another: what is sent as the n-th is what was asked for as the n-th."""

    def __init__(self):
        self._sent, self._asked, self._rows = count(), count(), defaultdict(Future)

    def send(self, rows: torch.Tensor) -> None:
        self._rows[next(self._sent)].set_result(rows.clone())

    def receive(self, into: torch.Tensor) -> SimpleNamespace:
        rows = self._rows[next(self._asked)]
        return SimpleNamespace(wait=lambda: into.copy_(rows.result(PATIENCE)))


class _Post:
    """What of `torch.distributed` the exchange calls."""

    isend, irecv = staticmethod(_Box.send), staticmethod(_Box.receive)

    def __init__(self, ranks: int):
        pairs = list(product(range(ranks), repeat=2))
        self._collective, self._single = ({pair: _Box() for pair in pairs} for _ in range(2))

    def all_to_all_single(self, arrived, rows, received, sent, *, group, async_op):
        for rank, some in enumerate(rows.split(sent)):
            self._collective[group.own, rank].send(some)
        works = [self._collective[rank, group.own].receive(x) for rank, x in enumerate(arrived.split(received))]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    def P2POp(self, operation, tensor, *, group, group_peer):  # as torch names it
        between = (group.own, group_peer) if operation is _Box.send else (group_peer, group.own)
        return partial(operation, self._single[between], tensor)

    def batch_isend_irecv(self, operations):
        return [work for operation in operations if (work := operation())]


def run_threads(attend: Callable[[Group], object], ranks: int) -> list:
    """What a function returns on each rank; of a group it may ask what `Group` knows."""
    with patch.object(exchange, "dist", _Post(ranks)), ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(attend, (Group(rank, ranks) for rank in range(ranks))))
