"""The tape of a call: the recorded starts that it made, which later calls of its form only repeat.

    call       q, k, v -> start 1 -> out 1, lse 1 \\
               q, k, v -> start 2 -> out 2, lse 2  > start 3 -> out, lse
    numbers    q 0, k 1, v 2 | out 1 3, lse 1 4 | out 2 5, lse 2 6 | out 7, lse 8

A call may be repeated where its starts are all that it did: each of their tensors is one of the call, one that an
earlier start returned, or a table that calls share, and each result of the call is one that a start returned. What
torch computes beside them gives another tensor, or shows in the version of one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from threading import local
from typing import NamedTuple
from weakref import ref

from torch import Tensor

from hilbert_lib.graph_cache import is_shared


class Entry(NamedTuple):
    """A start that was recorded, and the tensors that it was given, made and returned."""

    recording: object  # `triton.start.Recording`
    tensors: Sequence[Tensor | None]
    made: Sequence[Tensor | None]
    results: Sequence[Tensor | None]


class Tape:
    """The starts of a call of one thread, in order."""

    def __init__(self):
        self.entries: list[Entry] = []
        self.versions: list[tuple[Tensor, int]] = []
        self.is_whole = True  # whether every start was recorded

    @property
    def has_starts(self) -> bool:
        """Whether compiled kernels were started."""
        return bool(self.entries) or not self.is_whole

    def note(self, entry: Entry | None) -> None:
        """Note a start: None for one that was not recorded."""
        self.is_whole = self.is_whole and entry is not None
        if self.is_whole:
            self.entries.append(entry)
            self.versions += [(x, x._version) for x in entry.results if x is not None and not x.is_inference()]

    def recording(self, given: Sequence[Tensor], results: Sequence[Tensor | None]) -> object:
        """A recording of the call for tensors like `given`; None where more was done than its starts.

        results: those that it is to return.
        """
        numbers = {id(x): number for number, x in enumerate(given)}
        if not (self.is_whole and self.entries) or len(numbers) < len(given):  # of one tensor there may be two later
            return None
        if any(x._version != version for x, version in self.versions):
            return None
        if len(self.entries) > 1 and any(x.is_inference() for x in self.entries[0].results if x is not None):
            return None  # they have no version
        if len(self.entries) == 1:
            return _moved(self.entries[0], numbers, results)
        return _repeated(self.entries, numbers, results)


class _Running(local):
    tape: Tape | None = None


_running = _Running()


@contextmanager
def taped() -> Iterator[Tape]:
    """A context, and the tape of the starts in it."""
    before, _running.tape = _running.tape, Tape()
    try:
        yield _running.tape
    finally:
        _running.tape = before


def note(recording: object, tensors: Sequence, made: Sequence, results: Sequence) -> None:
    """Note a start on the tape that runs, if one does: recording is None for one that was not recorded."""
    if _running.tape is not None:
        _running.tape.note(None if recording is None else Entry(recording, tensors, made, results))


class Repeated(NamedTuple):
    """The starts of a call, in order. It holds no tensor but shared tables, by weak references."""

    starts: list[tuple]  # recording, numbers of its tensors (None for none), shared tables by place, numbers let go
    numbers: list[int | None]  # of the results

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Start all: the results. None where one start cannot be repeated: what was made by others is let go."""
        values = [*tensors]
        for recording, numbers, shared, let_go in self.starts:
            given = [None if number is None else values[number] for number in numbers]
            for place, table in shared:
                if (x := table()) is None:
                    return None
                given[place] = x
            if (results := recording.run(given)) is None:
                return None
            values += results
            for number in let_go:
                values[number] = None
        return [None if number is None else values[number] for number in self.numbers]


def _repeated(entries: list[Entry], numbers: dict[int, int], results: Sequence[Tensor | None]) -> Repeated | None:
    # numbers: of the call's tensors, by id; those that starts return join them.
    count, starts, last_use = len(numbers), [], {}
    for entry in entries:
        if (places := _places(entry, numbers)) is None:
            return None
        given, shared = places
        last_use |= {number: len(starts) for number in given if number is not None}
        starts.append((entry.recording, given, [(place, ref(x)) for place, x in shared.items()], []))
        for x in entry.results:
            if x is not None:
                numbers[id(x)] = count
            last_use[count] = len(starts) - 1
            count += 1
    wanted = [None if x is None else numbers.get(id(x), -1) for x in results]
    if -1 in wanted:
        return None
    for number, place in last_use.items():
        if number not in wanted:
            starts[place][3].append(number)
    return Repeated(starts, wanted)


def _moved(entry: Entry, numbers: dict[int, int], results: Sequence[Tensor | None]) -> object | None:
    # The recording of the one start of a call, for the tensors of the call in their order.
    if (places := _places(entry, numbers)) is None or (finish := _finish_of(entry, results)) is None:
        return None
    (given, shared), recording = places, entry.recording
    made = range(len(numbers), len(numbers) + len(recording.made) + len(recording.descriptors))
    moved, launches = [*given, *made], []
    for launch in recording.launches:
        arguments = launch.arguments.copy()
        for place, number in launch.own:
            if number in shared:
                arguments[place] = shared[number].data_ptr()
        own = [(place, moved[number]) for place, number in launch.own if moved[number] is not None]
        launches.append(launch._replace(arguments=arguments, own=own))
    descriptors = [(moved[number], descriptor) for number, descriptor in recording.descriptors]
    tables = [*recording.tables, *map(ref, shared.values())]
    return recording._replace(launches=launches, descriptors=descriptors, tables=tables, finish=finish)


def _places(entry: Entry, numbers: dict[int, int]) -> tuple[list[int | None], dict[int, Tensor]] | None:
    # The number of each tensor of a start, None for one without elements; and the shared tables among them, by place.
    given, shared = [], {}
    for place, x in enumerate(entry.tensors):
        number = None if x is None or not x.numel() else numbers.get(id(x))
        if number is None and x is not None and x.numel():
            if not is_shared(x):
                return None
            shared[place] = x
        given.append(number)
    described = [number for number, _ in entry.recording.descriptors if number < len(given)]
    return None if any(given[number] is None for number in described) else (given, shared)


def _finish_of(entry: Entry, results: Sequence[Tensor | None]) -> Callable | None:
    # What makes these of the tensors that a start makes: they are some of them, or of what the start returned.
    made = {id(x): place for place, x in enumerate(entry.made) if x is not None}
    if len(results) > 1 and all(id(x) in made for x in results):
        return itemgetter(*(made[id(x)] for x in results))
    returned = {id(x): place for place, x in enumerate(entry.results) if x is not None}
    if any(x is not None and id(x) not in returned for x in results):
        return None
    return partial(_picked, entry.recording.finish, [returned.get(id(x)) for x in results])


def _picked(finish: Callable, places: list[int | None], made: list[Tensor | None]) -> list[Tensor | None]:
    returned = finish(made)
    return [None if place is None else returned[place] for place in places]
