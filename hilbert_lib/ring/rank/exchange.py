"""Rows on their way between ranks, all at once or step by step round the ring; and answers to them, the way back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from hilbert_lib.ring.rank.layout import Mail

Packing = Callable[[Tensor], Tensor]  # from places of rows to the rows, as they are sent
Saved = dict[str, Tensor]  # tensors of other ranks' rows, by name, which a forward saves for its backward


def alive(group_ref: "ref[ProcessGroup]") -> ProcessGroup:
    """The group that a backward knows from its forward; RuntimeError if it was destroyed since.

    A result that outlives its group does not keep it: the group's threads would end with the interpreter, and abort.
    """
    group = group_ref()
    if group is None:
        raise RuntimeError("group was destroyed between the forward and the backward")
    return group


class Beside:
    """Work launched inside runs beside what was launched since this was made, on a stream of its own; on the CPU after.

    So the long work is launched first, with the many small kernels of an exchange under it; the current stream then
    waits for both. What is allocated inside stays whole until that has read it: the next `Beside` waits for it.
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
    # Ahead of the attention that is under way: its blocks would otherwise hold up rows that others wait for.
    return torch.cuda.Stream(stream.device, priority=-1)


@dataclass(frozen=True)
class Arriving:
    """Rows that are being received, and the rows sent, which must not be freed before.

    As a step of a gather it may have no rows, yet an answer to wait for. The second step after it overwrites its rows.
    """

    rows: Tensor  # (rows, ...)
    works: tuple[Work, ...]
    sent: Tensor
    source: int | None = None  # the rank that the rows come from, or None for all, one after the other
    destination: int | None = None  # the rank that rows are sent to, or None for all

    def wait(self) -> Tensor:
        """The rows, once they are there; on a GPU its stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.rows


def exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Arriving:
    """Starts the one collective in which every rank sends rows to every other, in the order of the ranks.

    `sent` and `received` count the rows to and from each rank. The adjoint is itself with these two swapped.
    """
    rows = rows.contiguous()
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows, list(received), list(sent), group=group, async_op=True)
    return Arriving(arrived, (work,), rows)


class AllGather:
    """Rows that come all at once, in one step, which starts now."""

    def __init__(self, packed: Packing, mail: Mail, group: ProcessGroup):
        self._mail, self._group = mail, group
        self._arriving = exchange(packed(mail.rows), mail.sent, mail.received, group)

    def __iter__(self) -> Iterator[Arriving]:
        self._arriving.wait()
        yield self._arriving

    def answer(self, rows: Tensor, arrived: Arriving) -> Arriving:
        """Sends an answer to each row back to where it came from, and receives those to the rows sent."""
        return exchange(rows, self._mail.received, self._mail.sent, self._group)


class Ring:
    """Rows that come step by step: in step t rank a sends to a + t and receives from a - t, modulo the ranks.

    The first step starts now, and step t + 1 is under way while step t is computed. All ranks start sends and receives
    in the order of the steps, so that no two wait for each other.
    """

    def __init__(self, packed: Packing, mail: Mail, group: ProcessGroup):
        self._packed, self._mail, self._group = packed, mail, group
        self._rows_for = mail.rows.split(mail.sent)
        self._buffers: list[Tensor] = []
        self._answers: list[Tensor] = []
        self._first = self._step(1)

    def __iter__(self) -> Iterator[Arriving]:
        step = self._first
        del self._first  # with what it sent
        for number in range(2, self._group.size() + 1):
            following = self._step(number) if number < self._group.size() else None
            step.wait()
            yield step
            step = following

    def answer(self, rows: Tensor, arrived: Arriving) -> Arriving:
        """Sends an answer like `AllGather.answer`. The second answer after this one overwrites its rows."""
        self._answers = self._answers[::-1] or _receivers(rows, self._mail.sent)
        into = self._answers[0][: self._mail.sent[arrived.destination]]
        return self._start(rows, arrived.source, into, arrived.destination)

    def _step(self, number: int) -> Arriving:
        rank, ranks = self._group.rank(), self._group.size()
        source, destination = (rank - number) % ranks, (rank + number) % ranks
        rows = self._packed(self._rows_for[destination])
        self._buffers = self._buffers[::-1] or _receivers(rows, self._mail.received)
        into = self._buffers[0][: self._mail.received[source]]
        return self._start(rows, destination, into, source)

    def _start(self, rows: Tensor, destination: int, into: Tensor, source: int) -> Arriving:
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
            for operation, tensor, peer in ((dist.isend, rows, destination), (dist.irecv, into, source))
            if len(tensor)
        ]
        works = tuple(dist.batch_isend_irecv(operations)) if operations else ()
        return Arriving(into, works, rows, source, destination)


def _receivers(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    several = sum(count > 0 for count in counts) > 1  # then one is filled while the other is read
    return [rows.new_empty(max(counts), *rows.shape[1:]) for _ in range(1 + several)]


GATHERING = {"all_gather": AllGather, "ring": Ring}
