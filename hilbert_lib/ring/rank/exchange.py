"""Rows on their way between ranks, all at once or step by step round the ring; and answers to them, the way back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Packed = Callable[[int | None], Tensor]


class Beside:
    """What is launched in it runs beside what was launched since it was made, on a stream of its own; on the CPU after.

    What is launched later on the current stream waits for both. A GPU that is given its long work first has the many
    small kernels of an exchange under it. What is allocated here is freed after the current stream has read it, and not
    given away before the next `Beside` of that stream, which waits for it: that keeps it whole.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device):
        self._current = None
        if device.type == "cuda":
            self._current = torch.cuda.current_stream(device)
            self._made = self._current.record_event()

    def __enter__(self) -> None:
        if self._current is not None:
            self._side = _beside(self._current)
            self._side.wait_event(self._made)
            self._stream = torch.cuda.stream(self._side)
            self._stream.__enter__()

    def __exit__(self, *error) -> None:
        if self._current is not None:
            self._stream.__exit__(*error)
            self._current.wait_stream(self._side)


@cache
def _beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    # Before the attention that is under way: its blocks would otherwise keep rows waiting that others wait for.
    return torch.cuda.Stream(stream.device, priority=-1)


@dataclass(frozen=True)
class Arriving:
    """Rows that are being received, and the rows sent, which are not freed before."""

    rows: Tensor
    works: tuple[Work, ...]
    sent: Tensor

    def wait(self) -> Tensor:
        """The rows, once they are there; on a GPU its stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.rows


@dataclass(frozen=True)
class Arrived:
    """Rows of one step.

    Attributes:
        rows: (rows, ...); the second step after this one overwrites them. There may be none, yet an answer to wait for.
        source: the rank that they came from, or None for all, one after the other.
        destination: the rank to which this one has sent rows in this step, or None for all.
    """

    rows: Tensor
    source: int | None = None
    destination: int | None = None


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Arriving:
    """Starts one collective in which every rank sends rows to every other; all ranks call it.

    Its adjoint is itself with `sent` and `received` swapped.

    Args:
        rows: (rows, ...), destination after destination.
        sent, received: how many rows to and from each rank.
        group: the ranks.

    Returns:
        The rows received, (rows, ...), source after source.
    """
    rows = rows.contiguous()
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows, list(received), list(sent), group=group, async_op=True)
    return Arriving(arrived, (work,), rows)


class AllGather:
    """Rows that come all at once, in one step.

    Args:
        packed: gives the rows (rows, ...) for a destination, or for None all of them.
        sent, received: how many rows to and from each rank.
        group: the ranks. The exchange starts at once.
    """

    def __init__(self, packed: Packed, sent: Sequence[int], received: Sequence[int], group: ProcessGroup):
        self._sent, self._received, self._group = sent, received, group
        self._arriving = exchange(packed(None), sent, received, group)

    def __iter__(self) -> Iterator[Arrived]:
        yield Arrived(self._arriving.wait())

    def answer(self, rows: Tensor, arrived: Arrived) -> Arriving:
        """Sends an answer to each row back to where it came from, and receives those to the rows sent."""
        return exchange(rows, self._received, self._sent, self._group)


class Ring:
    """Rows that come step by step: in step t rank a sends to a + t and receives from a - t, modulo the ranks.

    Step t + 1 is under way while step t is computed. Every rank starts its sends and receives in the order of the
    steps, so that none waits for one that waits for it. Two buffers, or one where one rank sends,
    receive the rows, and as many the answers.

    Args:
        packed, sent, received, group: as for `AllGather`. The first step starts at once.
    """

    def __init__(self, packed: Packed, sent: Sequence[int], received: Sequence[int], group: ProcessGroup):
        self._packed, self._sent, self._received, self._group = packed, sent, received, group
        self._buffers: list[Tensor] = []
        self._answers: list[Tensor] = []
        self._first = self._step(1)

    def __iter__(self) -> Iterator[Arrived]:
        step = self._first
        for number in range(2, self._group.size() + 1):
            following = self._step(number) if number < self._group.size() else None
            arriving, source, destination = step
            yield Arrived(arriving.wait(), source, destination)
            step = following

    def answer(self, rows: Tensor, arrived: Arrived) -> Arriving:
        """As `AllGather.answer`; the second answer after this one overwrites its rows."""
        self._answers = self._answers[::-1] or _receivers(rows, self._sent)
        into = self._answers[0][: self._sent[arrived.destination]]
        return self._start(rows, arrived.source, into, arrived.destination)

    def _step(self, number: int) -> tuple[Arriving, int, int]:
        rank, ranks = self._group.rank(), self._group.size()
        source, destination = (rank - number) % ranks, (rank + number) % ranks
        rows = self._packed(destination)
        self._buffers = self._buffers[::-1] or _receivers(rows, self._received)
        into = self._buffers[0][: self._received[source]]
        return self._start(rows, destination, into, source), source, destination

    def _start(self, rows: Tensor, to: int, into: Tensor, source: int) -> Arriving:
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, tensor, peer in ((dist.isend, rows, to), (dist.irecv, into, source))
            if len(tensor)
        ]
        return Arriving(into, tuple(dist.batch_isend_irecv(operations)) if operations else (), rows)


def _receivers(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    several = sum(count > 0 for count in counts) > 1  # then one is filled while the other is read
    return [rows.new_empty(max(counts), *rows.shape[1:]) for _ in range(1 + several)]


GATHERING = {"all_gather": AllGather, "ring": Ring}
