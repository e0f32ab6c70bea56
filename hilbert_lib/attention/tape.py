"""The tape of a call: its recorded starts and its steps. Later calls of its form only repeat them.

    call       q, k, v -> start 1 -> out 1, lse 1 \\
               q, k, v -> start 2 -> out 2, lse 2  > start 3 -> out, lse
    numbers    q 0, k 1, v 2 | out 1 3, lse 1 4 | out 2 5, lse 2 6 | out 7, lse 8

A call may be repeated where its starts are all that it did: each of their tensors is one of the call, one that an
earlier start returned, or a table that calls share, and each result of the call is one that a start returned. What
torch computes beside them gives another tensor, or shows in the version of one. A step is a kernel of torch or of
another package, which is called and not replayed: it counts as a start. A tape holds no tensor.

The starts of a call without steps become one, where that takes hardly more memory: what they make is made at once, and
what every start asks anew (tables, addresses, hooks, the stream) is asked once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import itemgetter, or_
from threading import local
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from hilbert_lib.graph_cache import is_shared

AT_ONCE = 2**18  # bytes by which the highest point of a call may rise where its starts become one
_OTHER = -1  # the place of a result that is no tensor which a start made, but one that was made of it


class _Known(NamedTuple):
    # A tensor of the call, or one that a start returned.
    tensor: ref
    number: int
    version: int | None  # None of an inference tensor, which has none


class _Entry(NamedTuple):
    # A start that was recorded.
    recording: object  # `triton.start.Recording`, or a `Step`
    numbers: list[int | None]  # of its tensors; None for none, for one without elements, and for a shared table
    shared: dict[int, ref]  # these tables, by place
    made: list[ref | None]  # what it made, of which some is returned
    results: range  # numbers of what it returned
    places: list[int | None]  # of these among what it made; None for none, and `_OTHER`
    made_bytes: list[int]  # of each tensor that it made


class Step(NamedTuple):
    """A dense kernel that is not ours, in the place of a `triton.start.Recording`: it starts by being called."""

    function: Callable[..., Sequence[Tensor]]  # of tensors alone, with every decision made, or made by their forms
    descriptors: tuple = ()
    setting: None = None  # torch reads its own

    def is_ready(self, x: Tensor) -> bool:
        """Whether the device of a tensor is the current one: a package may take its stream for that of all tensors."""
        return not x.is_cuda or x.get_device() == torch.cuda.current_device()

    def started(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The results; None where a tensor does not begin at a multiple of 16 bytes, which dense kernels misread."""
        if reduce(or_, [x.data_ptr() for x in tensors]) % 16:
            return None
        device_type = tensors[0].device.type
        if torch.is_autocast_enabled(device_type):  # it had its say about the tensors of the call
            with torch.autocast(device_type, enabled=False):
                return self.function(*tensors)
        return self.function(*tensors)


class Tape:
    """The starts of a call of one thread, in order.

    Args:
        given: the tensors of the call.
    """

    def __init__(self, given: Sequence[Tensor]):
        self._known: dict[int, _Known] = {}
        self._count = self._given = 0
        self._entries: list[_Entry] = []
        self.has_starts = False  # of compiled kernels, or steps
        self._add(given)
        self._given = self._count
        self._is_whole = len(self._known) == len(given)  # of one tensor there may be two later

    def _add(self, tensors: Sequence[Tensor | None]) -> range:
        # The numbers of tensors, from now on.
        first = self._count
        for x in tensors:
            if x is not None:
                version = None if x.is_inference() else x._version
                self._known[id(x)] = _Known(ref(x), self._count, version)
            self._count += 1
        return range(first, self._count)

    def _number_of(self, x: Tensor) -> int | None:
        # None for a tensor that is unknown, and for one that torch changed.
        known = self._known.get(id(x))
        if known is None or known.tensor() is not x:
            return None
        if known.version is None:  # of an earlier start nobody knows whether it was changed since
            return known.number if known.number < self._given or len(self._entries) == 1 else None
        return known.number if known.version == x._version else None

    def note(self, recording: object, tensors: Sequence, made: Sequence, results: Sequence) -> None:
        """Note a start: its recording, None where it has none, and the tensors that it was given, made and returned."""
        self.has_starts, self._is_whole = True, self._is_whole and recording is not None
        if not self._is_whole:
            return
        numbers, shared = [], {}
        for place, x in enumerate(tensors):
            number = None
            if x is not None and x.numel():
                number = self._number_of(x)
                if number is None and is_shared(x):
                    shared[place] = ref(x)
                elif number is None:
                    self._is_whole = False
            numbers.append(number)
        described = [number for number, _ in recording.descriptors if number < len(numbers)]
        if any(numbers[number] is None for number in described):
            self._is_whole = False
        place_of = {id(x): place for place, x in enumerate(made) if x is not None}
        places = [None if x is None else place_of.get(id(x), _OTHER) for x in results]
        made_bytes = [0 if x is None else x.nbytes for x in made]
        made = [x if x is None else ref(x) for x in made]
        self._entries.append(_Entry(recording, numbers, shared, made, self._add(results), places, made_bytes))

    def recording(self, results: Sequence[Tensor | None]) -> object:
        """A recording of the call for tensors like those of this one; None where more was done than its starts.

        results: those that it is to return.
        """
        if not (self._is_whole and self._entries):
            return None
        numbers = [None if x is None else self._number_of(x) for x in results]
        if any(number is None and x is not None for number, x in zip(numbers, results, strict=True)):
            return None
        if any(number is not None and number < self._given for number in numbers):
            return None
        if len(self._entries) == 1 and not isinstance(self._entries[0].recording, Step):
            return _moved(self._entries[0], self._given, numbers, results)
        repeated = _repeated(self._entries, numbers)
        if _may_be_joined(self._entries, repeated):
            return _joined(self._entries, self._given, numbers)
        return repeated


class _Running(local):
    tape: Tape | None = None


_running = _Running()


@contextmanager
def taped(given: Sequence[Tensor]) -> Iterator[Tape]:
    """A context, and the tape of the starts in it, for a call of these tensors."""
    before, _running.tape = _running.tape, Tape(given)
    try:
        yield _running.tape
    finally:
        _running.tape = before


def note(recording: object, tensors: Sequence, made: Sequence, results: Sequence) -> None:
    """`Tape.note` of the tape that runs, if one does."""
    if _running.tape is not None:
        _running.tape.note(recording, tensors, made, results)


def stepped(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
    """The results of a function of a dense kernel, noted as a `Step`. They are new tensors."""
    results = function(*tensors)
    note(Step(function), tensors, (), results)
    return results


class Repeated(NamedTuple):
    """The starts of a call, in order. It holds no tensor but shared tables, by weak references."""

    starts: list[tuple]  # recording, numbers of its tensors (None for none), shared tables by place, numbers let go
    numbers: list[int | None]  # of the results
    asked: list[object]  # recordings, of which each has a setting of its own: ready if these are

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Start all: the results. None where one start cannot be repeated: what others made is let go."""
        for recording in self.asked:
            if not recording.is_ready(tensors[0]):
                return None
        values = [*tensors]
        for recording, numbers, shared, let_go in self.starts:
            given = [None if number is None else values[number] for number in numbers]
            for place, table in shared.items():
                if (x := table()) is None:
                    return None
                given[place] = x
            if (results := recording.started(given)) is None:
                return None
            values += results
            for number in let_go:
                values[number] = None
        return [None if number is None else values[number] for number in self.numbers]


def _repeated(entries: list[_Entry], wanted: list[int | None]) -> Repeated:
    # wanted: numbers of the results.
    last_use = {}
    for place, entry in enumerate(entries):
        last_use |= dict.fromkeys([*entry.numbers, *entry.results], place)
    starts = [(entry.recording, entry.numbers, entry.shared, []) for entry in entries]
    for number, place in last_use.items():
        if number is not None and number not in wanted:
            starts[place][3].append(number)
    asked = {entry.recording.setting: entry.recording for entry in entries}
    return Repeated(starts, wanted, [*asked.values()])


def _moved(entry: _Entry, count: int, wanted: list[int | None], results: Sequence[Tensor | None]) -> object:
    # The recording of the one start of a call, for the `count` tensors of the call in their order.
    recording = entry.recording
    numbers = [*entry.numbers, *range(count, count + len(recording.made) + len(recording.descriptors))]
    launches, descriptors, tables = _renumbered(entry, numbers)
    finish = _finish_of(entry, wanted, results)
    return recording._replace(launches=launches, descriptors=descriptors, tables=tables, finish=finish)


def _may_be_joined(entries: list[_Entry], repeated: Repeated) -> bool:
    # Whether several starts can become one, and take hardly more memory. repeated: the same starts one by one.
    if any(isinstance(entry.recording, Step) or _OTHER in entry.places for entry in entries):
        return False
    return len(repeated.asked) == 1 and _bytes_more(entries, repeated) <= AT_ONCE


def _bytes_more(entries: list[_Entry], repeated: Repeated) -> int:
    # Bytes of all that the starts make, less those that are there at once where they are repeated one by one.
    total = held = most = 0
    bytes_of = {}
    for entry, (*_, let_go) in zip(entries, repeated.starts, strict=True):
        made_bytes = sum(entry.made_bytes)
        total, held = total + made_bytes, held + made_bytes
        most = max(most, held)
        returned = {place for place in entry.places if place is not None}
        held -= made_bytes - sum(entry.made_bytes[place] for place in returned)
        for number, place in zip(entry.results, entry.places, strict=True):
            bytes_of[number] = 0 if place is None else entry.made_bytes[place]
        held -= sum(bytes_of.get(number, 0) for number in let_go)
    return total - most


def _joined(entries: list[_Entry], count: int, wanted: list[int | None]) -> object:
    # One recording of several starts:
    #
    #     values   [the `count` tensors of the call | made by start 1 | made by start 2 | descriptors of 1 | of 2]
    #
    # values_of: the number among values of each tensor that has a number on the tape.
    values_of = {number: number for number in range(count)}
    first_made, end = [], count
    for entry in entries:
        first_made.append(end)
        for number, place in zip(entry.results, entry.places, strict=True):
            if place is not None:
                values_of[number] = end + place
        end += len(entry.recording.made)
    launches, made, flags, descriptors, tables = [], [], [], [], []
    for entry, first in zip(entries, first_made, strict=True):
        recording, own_end = entry.recording, end + len(descriptors)
        numbers = [None if number is None else values_of[number] for number in entry.numbers]
        numbers += range(first, first + len(recording.made))
        numbers += range(own_end, own_end + len(recording.descriptors))
        own_launches, own_descriptors, own_tables = _renumbered(entry, numbers)
        flags += [len(made) + flag for flag in recording.flags]
        made += recording.made
        launches += own_launches
        descriptors += own_descriptors
        tables += own_tables
    finish = partial(_at, [None if number is None else values_of[number] - count for number in wanted])
    return entries[0].recording._replace(
        launches=launches, made=made, flags=flags, finish=finish, descriptors=descriptors, tables=tables
    )


def _renumbered(entry: _Entry, numbers: list[int | None]) -> tuple[list, list, list]:
    # The launches, descriptors and tables of a start, in which each value has another number; None for none.
    recording, launches = entry.recording, []
    for launch in recording.launches:
        arguments, own = launch.arguments.copy(), []
        for place, number in launch.own:
            if number in entry.shared:
                arguments[place] = entry.shared[number]().data_ptr()
            elif numbers[number] is not None:
                own.append((place, numbers[number]))
        launches.append(launch._replace(arguments=arguments, own=own))
    descriptors = [(numbers[number], descriptor) for number, descriptor in recording.descriptors]
    return launches, descriptors, [*recording.tables, *entry.shared.values()]


def _finish_of(entry: _Entry, wanted: list[int | None], results: Sequence[Tensor | None]) -> Callable:
    # What makes these results of the tensors that a start makes: they are some of them, or of what the start returned.
    made = {id(x()): place for place, x in enumerate(entry.made) if x is not None and x() is not None}
    if len(results) > 1 and all(id(x) in made for x in results):
        return itemgetter(*(made[id(x)] for x in results))
    places = [None if number is None else number - entry.results.start for number in wanted]
    return partial(_picked, entry.recording.finish, places)


def _at(places: list[int | None], made: list[Tensor | None]) -> list[Tensor | None]:
    return [None if place is None else made[place] for place in places]


def _picked(finish: Callable, places: list[int | None], made: list[Tensor | None]) -> list[Tensor | None]:
    returned = finish(made)
    return [None if place is None else returned[place] for place in places]
