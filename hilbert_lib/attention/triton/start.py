"""Starts of the kernels of a call: compiled all at once, recorded, and replayed.

Triton binds the arguments of every start anew. That takes the host longer than a short call takes a GPU. So the second
call of a kind is recorded, and later calls of that kind replay its launches:

    call of a kind    make()   compile   Triton binds arguments    afterwards _recordings[kind]
    first             yes      yes       yes                       None
    second            yes      no        yes                       a _Recording
    third and later   no       no        no: the recording's launches are called with the new addresses

The kind of a call is all that its starts depend on, except the addresses of its tensors: device, shapes, strides,
dtypes and options. A recording holds the arguments of all its starts in one list, and each start picks its places:

    values            [address of q, of k, of v, ..., | a number, address of a table, None, a descriptor, ...]
                       <- tensors of this call ->       <- the same in every call of the kind ->
    places of a start  (0, 1, 2, 7, 8, 10): what the launcher of this kernel is called with
"""

import gc
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import cache, reduce
from operator import call, itemgetter, or_
from threading import Lock
from types import NoneType
from typing import NamedTuple
from weakref import ref

import torch
import triton
from torch import Tensor

from hilbert_lib import internals
from hilbert_lib.attention.failures import KernelError, not_compiled
from hilbert_lib.attention.starts import STARTS
from hilbert_lib.attention.triton.geometry import products_of_float32

KINDS = 4096  # kinds of starts in `_compiled`; past it the set is emptied, and Triton finds its kernels compiled
RECORDINGS = 512  # kinds of calls in `_recordings`
OPTIONAL = ("documents", "bias", *STARTS)  # tensors of some calls; elsewhere None, which is a constant too
PLACES = 64  # addresses in a cache of descriptors, or of launches
# Arguments that are tables of `graph_cache`: the only tensors in a recording besides those of the call.
TABLES = frozenset(("branches", "offsets", "branch_ids", "items", "classes", "table", "windows", "boxes", "part"))
_compiled: set[tuple] = set()
_loading = Lock()
_failed: dict[tuple, str] = {}  # the message for kernels that did not compile
_recordings: dict[tuple, "_Recording | None"] = {}  # None for a kind that came once


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
        if address in self.maps:
            return self.maps[address]
        descriptor = object.__new__(self.kind)
        descriptor.__dict__ = self.attributes | {"base": x}
        if self.encode is not None:
            descriptor, *_ = self.encode(descriptor)
            _put(self.maps, address, descriptor)
        return descriptor


class _Recording(NamedTuple):
    # The starts of a call. It holds no tensor: a caller may free them.
    starts: list[tuple]  # (kernel, launcher, its arguments before and after the stream, getter of places)
    values: list  # arguments that follow the addresses of the call's tensors
    descriptors: list[tuple]  # (place among values, number of the tensor, `_Descriptor`)
    tables: list[ref]  # tables whose addresses are among values
    launches: dict  # (stream, *addresses) -> [(launcher, arguments)]


def start(
    make: Callable[[], Sequence[Start]], tensors: Sequence[Tensor | None] = (), *options: Hashable,
    made: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    """Start kernels of one device on the current stream, in order; all are compiled before the first starts.

    Args:
        make: returns the starts. A call whose kind is recorded does not call it.
        tensors: all tensors that `make` reads, except tables; the first is on the device. () records nothing.
        options: everything else that the starts depend on.
        made: further tensors of the launch (outputs, scratch). Their shapes, strides and dtypes must follow from
            `tensors` and `options`; an entry may be None.
    """
    if triton.knobs.runtime.interpret:
        _start(make())
        return
    inputs, tensors = tensors, (*tensors, *made)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    is_recorded = bool(inputs) and not _is_special(tensors, addresses)
    kind = _kind_of_call(inputs, (*options, *map(type, made))) if is_recorded else None
    if (recording := _recordings.get(kind)) and _replay(recording, kind[0], tensors, addresses):
        return
    starts = make()
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
    if kind in _recordings:
        _recordings[kind] = _record(starts, kernels, tensors)
    elif kind is not None:  # most kinds that come once do not come again: sequences of other lengths, say
        if len(_recordings) >= RECORDINGS:
            _recordings.clear()
        _recordings[kind] = None


def _start(starts: Sequence[Start]) -> list:
    # Triton starts the kernels, and returns those that it compiled.
    return [begun.kernel[begun.grid](*begun.arguments, **begun.named) for begun in starts]


def _is_special(tensors: Sequence[Tensor | None], addresses: list[int]) -> object:
    # Whether Triton itself must start the kernels. It has hooks to call, or another kernel for tensors that are not
    # aligned to 16 bytes. A CUDA graph must see its tables asked for while it is captured.
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (
        reduce(or_, addresses) % 16
        or any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
        or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _kind_of_call(tensors: Sequence[Tensor | None], options: tuple) -> tuple:
    # All that starts depend on, except addresses; the current device is the first. 1, 1.0 and True differ by type.
    knobs, ids = triton.knobs, [*map(id, tensors)]
    repeated = () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))  # which argument is the same tensor
    forms = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
    compiler = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    if tensors[0].dtype == torch.float32:
        compiler += (products_of_float32(),)
    device = triton.runtime.driver.active.get_current_device()
    return device, *compiler, repeated, *forms, *options, *map(type, options)


def _replay(recording: _Recording, device: int, tensors: Sequence[Tensor | None], addresses: list[int]) -> bool:
    # Start the launches of a recording. False where a table is gone, or a kernel has hooks of its own.
    tables = [*map(call, recording.tables)]  # alive until all are started
    if NoneType in map(type, tables) or any(kernel.pre_run_hooks for kernel, *_ in recording.starts):
        return False
    stream = triton.runtime.driver.active.get_current_stream(device)
    launches = recording.launches.get((stream, *addresses))
    if launches is None:
        values, launches = addresses + recording.values, []
        for place, number, descriptor in recording.descriptors:
            values[place] = descriptor.of(tensors[number], addresses[number])
        for _, launcher, (before, after, is_tuple), pick in recording.starts:
            picked = pick(values)
            arguments = (picked,) if is_tuple else picked
            launches.append((launcher, (*before, stream, *after, *arguments)))
        if all(descriptor.encode is not None for *_, descriptor in recording.descriptors):  # others hold tensors
            _put(recording.launches, (stream, *addresses), launches)
    for launcher, arguments in launches:
        launcher(*arguments)
    return True


def _put(cache: dict, key: Hashable, value: object) -> None:
    if len(cache) >= PLACES:
        cache.clear()
    cache[key] = value


def _record(starts: Sequence[Start], kernels: list, tensors: Sequence[Tensor | None]) -> _Recording | None:
    # None where a tensor is not of the call (a copy, say), where Triton's own hook compiled, or where the launcher of
    # this release of Triton is not known.
    numbers = {id(x): number for number, x in reversed([*enumerate(tensors)]) if x is not None}
    recorded, values, descriptors, tables = [], [], [], {}
    for begun, compiled in zip(starts, kernels, strict=True):
        if compiled is None:
            return None
        launcher = internals.launch_of(_finished(compiled), (*begun.grid, 1, 1)[:3])
        if launcher is None:
            return None
        launch, around_stream, encoders = launcher
        arguments = dict(zip(begun.kernel.arg_names, begun.arguments, strict=False)) | begun.named
        places = []
        for parameter in begun.kernel.params:
            x = arguments.get(parameter.name, parameter.default if parameter.has_default else None)
            tensor = x if isinstance(x, Tensor) else getattr(x, "base", None)  # the base of a descriptor
            number, place = numbers.get(id(tensor)), len(tensors) + len(values)
            is_table = tensor is x and parameter.name in TABLES
            if isinstance(tensor, Tensor) and number is None and not is_table:
                return None
            if tensor is x and number is not None:
                places.append(number)
                continue
            if tensor is x and x is not None:
                tables[id(x)] = x
                x = x.data_ptr()
            constants = [x]
            if tensor is not x and number is not None:
                encode = next(encoders, None)
                attributes = {name: value for name, value in vars(x).items() if name != "base"}
                descriptors.append((place, number, _Descriptor(type(x), attributes, encode, {})))
                constants = [None, *(encode(x)[1:] if encode else ())]
            places += range(place, place + len(constants))
            values += constants
        recorded.append((begun.kernel, launch, around_stream, itemgetter(*places)))
    return _Recording(recorded, values, descriptors, [*map(ref, tables.values())], {})


def forget() -> None:
    """Forget all recordings and failures: needed once other kernels or configurations take the place of these."""
    _recordings.clear()
    _failed.clear()


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
    # In a forked child, no thread is there that could free the lock.
    global _loading
    _loading = Lock()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_renew_after_fork)
