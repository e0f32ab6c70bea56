"""Starts of the kernels of a call: compiled all at once, recorded, and replayed.

Triton binds the arguments of every start anew. That takes the host longer than a short call takes a GPU. So the second
call of a kind is recorded, and later calls of that kind replay its launches:

    call of a kind    make()   compile   Triton binds arguments    afterwards _recordings[kind]
    first             yes      yes       yes                       None
    second            yes      no        yes                       a Recording
    third and later   no       no        no: the recording's launches are called with the new addresses

The kind of a call is all that its starts depend on, except the addresses of its tensors: device, shapes, strides,
dtypes and options. A recording makes the tensors of a call that are not given, and holds the arguments of each start:

    values of a call        [address of q, of k, of v, | of out, of lse, | descriptor of k, of v]
                              <- given              ->   <- made here ->
    arguments of a start    [0, 0, 0, 0.125, address of a table, None, 0, ...]: those that are 0 are put in from values
    own of a start          [(0, number 0), (1, number 5), (2, number 3), (6, number 4)]
"""

import gc
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import cache, partial, reduce
from math import prod
from operator import call, or_
from threading import Lock, local
from types import NoneType
from typing import NamedTuple
from weakref import ref

import torch
import triton
from torch import Tensor

from hilbert_lib import internals
from hilbert_lib.attention.failures import KernelError, not_compiled
from hilbert_lib.attention.starts import STARTS
from hilbert_lib.attention.tape import note
from hilbert_lib.attention.triton.geometry import products_of_float32
from hilbert_lib.graph_cache import made_to_share

KINDS = 4096  # kinds of starts in `_compiled`; past it the set is emptied, and Triton finds its kernels compiled
RECORDINGS = 512  # kinds of calls in `_recordings`
OPTIONAL = ("documents", "bias", *STARTS)  # tensors of some calls; elsewhere None, which is a constant too
PLACES = 256  # addresses in a cache of descriptors: of the tensors of all layers of a model
FLAGS = 256  # of a stream
STREAMS = 16  # of a thread that have flags
PRECISION = 3  # place in a setting of the precision of float32 products; None there without such products
# Arguments that are tables of `graph_cache`: the only tensors in a recording besides those of the call.
TABLES = frozenset(
    ("branches", "offsets", "branch_ids", "items", "classes", "first_rows", "table", "windows", "boxes", "part")
)
_compiled: set[tuple] = set()
_loading, _interpreting = Lock(), Lock()
_failed: dict[tuple, str] = {}  # the message for kernels that did not compile
_recordings: dict[tuple, "Recording | None"] = {}  # None for a kind that came once
_generation = 0  # of recordings: those of an earlier one are not run, whoever holds them


class Start(NamedTuple):
    """A kernel, of `triton.jit` or of Gluon's, and the grid and arguments of one start."""

    kernel: triton.runtime.KernelInterface
    grid: tuple[int, ...]
    arguments: tuple  # arguments by position; the first is a tensor
    named: dict  # arguments by name, with constants and Triton's own options


class _Descriptor(NamedTuple):
    # A tensor descriptor without its tensor.
    kind: type
    attributes: dict  # all but `base`
    encode: Callable | None  # descriptor -> arguments of the launcher; None where the launcher encodes it itself
    maps: dict  # address -> encoded descriptor, which is the same at every start

    def of(self, x: Tensor, address: int) -> object:
        descriptor = object.__new__(self.kind)
        descriptor.__dict__ = self.attributes | {"base": x}
        if self.encode is not None:
            descriptor, *_ = self.encode(descriptor)
            _put(self.maps, address, descriptor)
        return descriptor


class Made(NamedTuple):
    """A tensor that a launch makes, contiguous: an output, or scratch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float | None = None  # of all its elements; None for any values

    def creator(self, device: torch.device) -> Callable[[], Tensor]:
        """A function that makes it."""
        like = {"dtype": self.dtype, "device": device}
        if self.value is not None:
            return partial(torch.full, self.shape, self.value, **like)
        strides = [prod(self.shape[n + 1 :]) for n in range(len(self.shape))]
        return partial(torch.empty_strided, self.shape, strides, **like)  # faster than torch.empty


FLAG = Made((1,), torch.int32, 0)  # what a kernel sets for the next one of the same call


class _Flags:
    # Flags of 16 bytes for the calls on one stream, of one thread. They are set to 0 all at once, when each was used:
    # to fill a tensor for every call would take the host as long as a kernel.
    def __init__(self, device: torch.device):
        with torch.inference_mode(False):
            self.words = made_to_share(lambda: torch.zeros(FLAGS, 4, dtype=torch.int32, device=device), device)
        self.number, self.address = -1, self.words.data_ptr()

    def next_address(self) -> int:
        self.number += 1
        if self.number == FLAGS:
            self.words.zero_()  # after all kernels that read them: these are on the same stream
            self.number = 0
        return self.address + 16 * self.number


class _FlagsOfThread(local):
    def __init__(self):
        self.by_stream: dict[tuple[int, int], _Flags] = {}

    def next_address(self, device: torch.device, number: int, stream: int) -> int:
        flags = self.by_stream.get((number, stream))
        if flags is None:
            if len(self.by_stream) >= STREAMS:
                self.by_stream.clear()
            flags = self.by_stream[number, stream] = _Flags(device)
        return flags.next_address()


_flags = _FlagsOfThread()


class _Launch(NamedTuple):
    # One start.
    kernel: triton.runtime.KernelInterface
    launcher: Callable
    fixed: tuple[tuple, tuple, bool]  # arguments around the stream, and whether the kernel's own are one: `launch_of`
    arguments: list  # of the kernel, 0 for those that are another's in each call
    own: list[tuple[int, int]]  # these: place among the arguments, and number among a call's addresses and descriptors


class Recording(NamedTuple):
    """The starts of a call. It holds no tensor: a caller may free them."""

    launches: list[_Launch]
    made: list[Callable | None]  # creators of tensors
    flags: list[int]  # which of these are `FLAG`: they have no creators
    finish: Callable[[list], Sequence]
    descriptors: list[tuple[int, _Descriptor]]  # with the numbers of their tensors
    tables: list[ref]  # tables whose addresses are among the arguments
    setting: tuple  # what the kernels hang on besides, as `_setting` gives it

    def run(self, tensors: Sequence[Tensor | None]) -> Sequence | None:
        """Start all on the current stream of the current device: what `finish` gives, or None as `made_by`."""
        made = self.made_by(tensors)
        return None if made is None else self.finish(made)

    def made_by(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Start all: the tensors that are made. Nothing starts, and None is given, if not ready or as `_made` says."""
        return self._made(tensors) if self.is_ready(tensors[0]) else None

    def is_ready(self, x: Tensor) -> bool:
        """Whether the setting of the kernels is as it was, and Triton need not start them itself.

        x: a tensor on the device.
        """
        return not _is_watched(x) and _setting(self.setting[PRECISION] is not None) == self.setting

    def started(self, tensors: Sequence[Tensor | None]) -> Sequence | None:
        """`run`, where it is known to be ready: a call of several starts asks once."""
        made = self._made(tensors)
        return None if made is None else self.finish(made)

    def _made(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        # None, and nothing is started, where a kernel has hooks, a table is gone, or a tensor does not begin at a
        # multiple of 16 bytes.
        tables = [*map(call, self.tables)]  # alive until all are started
        if NoneType in map(type, tables):
            return None
        for launch in self.launches:
            if launch.kernel.pre_run_hooks:
                return None
        values = [0 if x is None else x.data_ptr() for x in tensors]
        if reduce(or_, values) % 16:
            return None
        made = [create and create() for create in self.made]
        all_tensors = [*tensors, *made]
        values += [0 if x is None else x.data_ptr() for x in made]
        stream = triton.runtime.driver.active.get_current_stream(self.setting[0])
        for flag in self.flags:
            values[len(tensors) + flag] = _flags.next_address(tensors[0].device, self.setting[0], stream)
        for number, descriptor in self.descriptors:
            address = values[number]
            values.append(descriptor.maps.get(address) or descriptor.of(all_tensors[number], address))
        for _, launcher, (before, after, is_one), arguments, own in self.launches:
            arguments = arguments.copy()
            for place, number in own:
                arguments[place] = values[number]
            if is_one:
                launcher(*before, stream, *after, tuple(arguments))
            else:
                launcher(*before, stream, *after, *arguments)
        return made


def start(
    make: Callable[..., Sequence[Start]], tensors: Sequence[Tensor | None], *options: Hashable,
    made: Sequence[Made | None] = (), finish: Callable[[list], Sequence] = list, keep: bool = True,
    is_all: bool = True,
) -> Sequence:  # fmt: skip
    """Start kernels of one device on the current stream, in order; all are compiled before the first starts.

    Args:
        make: returns the starts, given the made tensors. A call whose kind is recorded does not call it.
        tensors: all tensors that `make` reads, except tables; the first is on the device.
        options: everything else that the starts depend on.
        made: further tensors of the launch (outputs, scratch), which follow from `tensors` and `options`. At most one
            is `FLAG`.
        finish: what is returned, given the made tensors; `FLAG` may be None there. It hangs on no other tensor.
        keep: whether the starts may be recorded.
        is_all: whether these starts are all that the call does. It may then be repeated by them alone.
    """
    device = tensors[0].device
    if triton.knobs.runtime.interpret:
        new = [x and x.creator(device)() for x in made]
        _interpret(make(*new))
        return finish(new)
    kind = _kind_of_call(tensors, options) if keep and _is_aligned(tensors) else None
    if recording := _recordings.get(kind):
        new = recording.made_by(tensors)
        if new is not None:
            results = recording.finish(new)
            note(recording if is_all else None, tensors, new, results)
            return results
    new = [x and x.creator(device)() for x in made]
    starts = make(*new)
    compiled = _kind_of_kernels(starts)
    if compiled in _failed:
        raise KernelError(_failed[compiled])
    if compiled not in _compiled:
        try:
            Context().run(_compile, starts)  # a context without another mode of compiling
        except KernelError as error:
            _failed[compiled] = str(error)
            raise
        if len(_compiled) >= KINDS:
            _compiled.clear()
        _compiled.add(compiled)
    kernels = _start(starts)
    results, recording = finish(new), None
    if kind in _recordings and not _is_watched(tensors[0]):
        recording = _recordings[kind] = _record(starts, kernels, tensors, new, made, finish)
    note(recording if is_all else None, tensors, new, results)
    if (
        kind is not None and kind not in _recordings and not _is_watched(tensors[0])
    ):  # most kinds that come once do not come again: sequences of other lengths, say
        if len(_recordings) >= RECORDINGS:
            _recordings.clear()
        _recordings[kind] = None
    return results


def _start(starts: Sequence[Start]) -> list:
    # Triton starts the kernels, and returns those that it compiled.
    return [begun.kernel[begun.grid](*begun.arguments, **begun.named) for begun in starts]


def _interpret(starts: Sequence[Start]) -> None:
    # The interpreter holds the number of a program, and changes the language, for all threads.
    for begun in starts:
        with _interpreting, internals.quick_interpreter():
            begun.kernel[begun.grid](*begun.arguments, **begun.named)


def _is_aligned(tensors: Sequence[Tensor | None]) -> bool:
    # To 16 bytes: Triton has another kernel for tensors that are not.
    return not reduce(or_, [0 if x is None else x.data_ptr() for x in tensors]) % 16


def _is_watched(first: Tensor) -> bool:
    # Whether Triton itself must start the kernels: it has hooks to call, or a CUDA graph is captured, which must see
    # its tables asked for.
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    has_stages_hook = getattr(runtime, "add_stages_inspection_hook", None) is not None
    return has_stages_hook or (first.is_cuda and torch.cuda.is_current_stream_capturing())


def _setting(in_float32: bool) -> tuple:
    # What starts depend on beside their tensors and options; the current device is the first.
    knobs = triton.knobs
    compiler = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    precision = products_of_float32() if in_float32 else None
    return triton.runtime.driver.active.get_current_device(), *compiler, precision, _generation


def _kind_of_call(tensors: Sequence[Tensor | None], options: tuple) -> tuple:
    # All that starts depend on, except addresses. 1, 1.0 and True differ by type.
    ids = [*map(id, tensors)]
    repeated = () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))  # which argument is the same tensor
    forms = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
    return *_setting(tensors[0].dtype == torch.float32), repeated, *forms, *options, *map(type, options)


def _put(cache: dict, key: Hashable, value: object) -> None:
    if len(cache) >= PLACES:
        cache.clear()
    cache[key] = value


def _record(
    starts: Sequence[Start], kernels: list, tensors: Sequence[Tensor | None], new: list[Tensor | None],
    made: Sequence[Made | None], finish: Callable,
) -> Recording | None:  # fmt: skip
    # None where a tensor is not of the call (a copy, say), where Triton's own hook compiled, or where the launcher of
    # this release of Triton is not known. new: the tensors that were made.
    device, setting = tensors[0].device, _setting(tensors[0].dtype == torch.float32)
    all_tensors = (*tensors, *new)
    numbers = {id(x): number for number, x in reversed([*enumerate(all_tensors)]) if x is not None}
    recorded, descriptors, tables = [], [], {}
    for begun, compiled in zip(starts, kernels, strict=True):
        if compiled is None:
            return None
        launcher = internals.launch_of(_finished(compiled), (*begun.grid, 1, 1)[:3])
        if launcher is None:
            return None
        launch, fixed, encoders = launcher
        given = dict(zip(begun.kernel.arg_names, begun.arguments, strict=False)) | begun.named
        arguments, own = [], []
        for parameter in begun.kernel.params:
            x = given.get(parameter.name, parameter.default if parameter.has_default else None)
            tensor = x if isinstance(x, Tensor) else getattr(x, "base", None)  # the base of a descriptor
            number = numbers.get(id(tensor))
            if not isinstance(tensor, Tensor):
                arguments.append(x)
            elif number is None:
                if tensor is not x or parameter.name not in TABLES:
                    return None
                tables[id(x)] = x
                arguments.append(x.data_ptr())
            elif tensor is x:
                own.append((len(arguments), number))
                arguments.append(0)
            else:
                encode = next(encoders, None)
                attributes = {name: value for name, value in vars(x).items() if name != "base"}
                own.append((len(arguments), len(all_tensors) + len(descriptors)))
                descriptors.append((number, _Descriptor(type(x), attributes, encode, {})))
                arguments += 0, *(encode(x)[1:] if encode else ())
        recorded.append(_Launch(begun.kernel, launch, fixed, arguments, own))
    creators = [None if x is None or x is FLAG else x.creator(device) for x in made]
    table_refs, flags = [*map(ref, tables.values())], [number for number, x in enumerate(made) if x is FLAG]
    return Recording(recorded, creators, flags, finish, descriptors, table_refs, setting)


def forget() -> None:
    """Forget all recordings and failures: needed once other kernels or configurations take the place of these."""
    global _generation
    _recordings.clear()
    _failed.clear()
    _generation += 1


def _kind_of_kernels(starts: Sequence[Start]) -> tuple:
    # The arguments that decide which kernels are compiled. Alignment decides too: those kernels compile as they start.
    like = [begun.arguments[0] for begun in starts]
    constants = [(id(begun.kernel), *map(begun.named.get, _constants(begun.kernel))) for begun in starts]
    has_optional = [starts[-1].named.get(name) is not None for name in OPTIONAL]
    return like[0].device, *(x.dtype for x in like), *has_optional, *constants


@cache
def _constants(kernel: triton.JITFunction) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)


def _compile(starts: Sequence[Start]) -> None:
    # A new thread is on device 0.
    on_device = {"initializer": torch.cuda.set_device, "initargs": (starts[0].arguments[0].device,)}
    # Compilation makes many objects and little garbage. A collection would go through all of torch and free next to
    # nothing.
    was_on = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(len(starts), **on_device) as pool:
            compiled = _compiled_at_once(starts, pool)
        for kernel in dict.fromkeys(compiled):
            _load(kernel)
    finally:
        if was_on:
            gc.enable()


def _compiled_at_once(starts: Sequence[Start], pool: ThreadPoolExecutor) -> list:
    kernels = []
    try:
        with triton.AsyncCompileMode(pool):
            for begun in starts:
                kernels.append(begun.kernel.run(*begun.arguments, grid=begun.grid, warmup=True, **begun.named))
        return [*map(_finished, kernels)]  # a kernel that failed in another call is in Triton's own cache
    except Exception as error:  # of Triton's front end, of LLVM or of ptxas: the kernel is not there
        raise not_compiled(f"kernel {_failing(starts, kernels).kernel.__name__}", error) from error


def _failing(starts: Sequence[Start], kernels: list) -> Start:
    # The first start whose kernel did not compile. Where all of these did, the next one: it raised at once.
    for begun, kernel in zip(starts, kernels, strict=False):
        try:
            _finished(kernel)
        except Exception:
            return begun
    return starts[min(len(kernels), len(starts) - 1)]


def _finished(kernel: object) -> object:
    # The compiled kernel; waits where another thread still compiles it.
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(compiled) -> None:
    # Triton 3.6 builds the launcher of a kernel with the C compiler when `run` is first read. All its launchers are
    # Python modules of one name: of two that are loaded at once, a kernel can be given the other's.
    with _loading:
        _ = compiled.run


def _renew_after_fork() -> None:
    # In a forked child, no thread is there that could free the locks.
    global _loading, _interpreting
    _loading, _interpreting = Lock(), Lock()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_renew_after_fork)
