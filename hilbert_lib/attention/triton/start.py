"""Starts the kernels of a call. The first time all are compiled at once.

Triton binds the arguments of every start anew, which takes the host longer than a short call takes a GPU. So what a
kind of call starts is kept: compiled kernels and their arguments, with places for the tensors of the next call.
"""

import gc
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import cache, reduce
from operator import call, itemgetter, or_
from types import NoneType
from typing import NamedTuple
from weakref import ref

import torch
import triton
from torch import Tensor

from hilbert_lib import internals
from hilbert_lib.attention.failures import KernelError, not_compiled
from hilbert_lib.attention.triton.geometry import products_of_float32

KINDS = 4096  # of calls whose kernels are known to be compiled; more are looked up again, and found compiled
KEPT = 512  # kinds of calls whose starts are kept
PLACES = 64  # addresses of tensors at which what is made of them is kept
# Arguments that are tables of `graph_cache`: the only tensors that a kept start knows besides those of its call.
TABLES = frozenset(("branches", "offsets", "branch_ids", "items", "classes", "table", "windows", "boxes", "part"))
_compiled: set[tuple] = set()
_failed: dict[tuple, str] = {}  # what was said of kernels that did not compile
_kept: dict[tuple, "_Kept | None"] = {}  # None for a kind that came once


class Start(NamedTuple):
    """A kernel, of `triton.jit` or of Gluon's, and what it is started with."""

    kernel: triton.runtime.KernelInterface
    grid: tuple[int, ...]
    arguments: tuple  # by position; a tensor is the first
    named: dict  # by name, with constants and Triton's own options


class _Descriptor(NamedTuple):
    # A descriptor without its tensor.
    kind: type
    rest: dict  # all else
    made: Callable | None  # what makes of it what the launcher takes; None where the launcher makes it itself
    maps: dict  # by address, what was made; the same is made at every start

    def of(self, x: Tensor, address: int) -> object:
        if address in self.maps:
            return self.maps[address]
        found = object.__new__(self.kind)
        found.__dict__ = self.rest | {"base": x}
        if self.made is not None:
            found, *_ = self.made(found)
            _put(self.maps, address, found)
        return found


class _Kept(NamedTuple):
    # The starts of a call without its tensors, nor a hold on any.
    starts: list[tuple]  # kernel, what is called and its `_through`, and what takes the arguments from all values
    values: list  # those that come after the addresses of the call's tensors
    described: list[tuple]  # a place among values, the number of a descriptor's tensor, and a `_Descriptor`
    tables: list[ref]  # whose addresses are among values
    given: dict  # by stream and addresses, what is called for each start, and with what


def start(
    make: Callable[[], Sequence[Start]], tensors: Sequence[Tensor | None] = (), *asked: Hashable,
    made: Sequence[Tensor | None] = (),
) -> None:  # fmt: skip
    """Start kernels of one device on the current stream, in order; all are compiled before the first starts.

    Args:
        make: gives the starts; it is not called where those of such a call are kept, as from the second one on.
        tensors: all that `make` takes, the first one on the device; tables apart. Without any nothing is kept.
        asked: all else that the starts depend on.
        made: those it takes besides, whose shapes, strides and dtypes follow from all of these, unless one is None.
    """
    if triton.knobs.runtime.interpret:
        _start(make())
        return
    given, tensors = tensors, (*tensors, *made)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    kind = None if not given or _is_special(tensors, addresses) else _kind_of_call(given, (*asked, *map(type, made)))
    if (kept := _kept.get(kind)) and _start_kept(kept, kind[0], tensors, addresses):
        return
    starts = make()
    compiled = _kind(starts)
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
    if kind in _kept:
        _kept[kind] = _keep(starts, kernels, tensors)
    elif kind is not None:  # most kinds that come once do not come again: of sequences of other lengths, say
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[kind] = None


def _start(starts: Sequence[Start]) -> list:
    # As Triton starts kernels; those that it compiled.
    return [each.kernel[each.grid](*each.arguments, **each.named) for each in starts]


def _is_special(tensors: Sequence[Tensor | None], addresses: list[int]) -> object:
    # Whether Triton itself must start the kernels: it has more to do, or other kernels for tensors off 16 bytes. A CUDA
    # graph keeps the tables that its capture asks for.
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (
        reduce(or_, addresses) % 16
        or any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
        or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _kind_of_call(tensors: Sequence[Tensor | None], asked: tuple) -> tuple:
    # All that starts depend on, but addresses; the current device is the first. 1, 1.0 and True are not the same.
    knobs, ids = triton.knobs, [*map(id, tensors)]
    same = () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))  # where one tensor is given twice
    forms = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
    compiler = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    if tensors[0].dtype == torch.float32:
        compiler += (products_of_float32(),)
    device = triton.runtime.driver.active.get_current_device()
    return device, *compiler, same, *forms, *asked, *map(type, asked)


def _start_kept(kept: _Kept, device: int, tensors: Sequence[Tensor | None], addresses: list[int]) -> bool:
    # Whether the starts could be started: not where a table is gone, or a kernel has hooks of its own.
    tables = [*map(call, kept.tables)]  # held until all are started
    if NoneType in map(type, tables) or any(each[0].pre_run_hooks for each in kept.starts):
        return False
    at = triton.runtime.driver.active.get_current_stream(device), *addresses
    launches = kept.given.get(at)
    if launches is None:
        values, launches = addresses + kept.values, []
        for place, number, descriptor in kept.described:
            values[place] = descriptor.of(tensors[number], addresses[number])
        for _, launch, (before, after, is_one), arguments in kept.starts:
            own = arguments(values)
            launches.append((launch, (*before, at[0], *after, *((own,) if is_one else own))))
        if all(each.made is not None for *_, each in kept.described):  # otherwise they hold tensors
            _put(kept.given, at, launches)
    for launch, given in launches:
        launch(*given)
    return True


def _put(known: dict, key: Hashable, value: object) -> None:
    if len(known) >= PLACES:
        known.clear()
    known[key] = value


def _keep(starts: Sequence[Start], kernels: list, tensors: Sequence[Tensor | None]) -> _Kept | None:
    # None where a tensor is not of the call, such as a copy that was made of one, where Triton's own hook compiled, or
    # where its launcher is not known.
    numbers = {id(x): number for number, x in reversed([*enumerate(tensors)]) if x is not None}
    kept, values, described, tables = [], [], [], {}
    for one, compiled in zip(starts, kernels, strict=True):
        if compiled is None:
            return None
        launcher = internals.launch_of(_finished(compiled), (*one.grid, 1, 1)[:3])
        if launcher is None:
            return None
        launch, given_to_launch, metas = launcher
        given = dict(zip(one.kernel.arg_names, one.arguments, strict=False)) | one.named
        places = []
        for each in one.kernel.params:
            x = given.get(each.name, each.default if each.has_default else None)
            own = x if isinstance(x, Tensor) else getattr(x, "base", None)
            number, place = numbers.get(id(own)), len(tensors) + len(values)
            if isinstance(own, Tensor) and number is None and (own is not x or each.name not in TABLES):
                return None
            if own is x and number is not None:
                places.append(number)
                continue
            if own is x and x is not None:
                tables[id(x)] = x
                x = x.data_ptr()
            more = [x]
            if own is not x and number is not None:
                made = next(metas, None)
                rest = {name: y for name, y in vars(x).items() if name != "base"}
                described.append((place, number, _Descriptor(type(x), rest, made, {})))
                more = [None, *(made(x)[1:] if made else ())]
            places += range(place, place + len(more))
            values += more
        kept.append((one.kernel, launch, given_to_launch, itemgetter(*places)))
    return _Kept(kept, values, described, [*map(ref, tables.values())], {})


def forget() -> None:
    """Forget the starts that are kept: for who puts other kernels or configurations in the place of these."""
    _kept.clear()
    _failed.clear()


def _kind(starts: Sequence[Start]) -> tuple:
    # What is compiled depends on this, and on how arguments are aligned: what that changes is compiled at its start.
    like = starts[0].arguments[0]
    constants = [(id(each.kernel), *map(each.named.get, _constants(each.kernel))) for each in starts]
    has_documents = starts[-1].named.get("documents") is not None  # None is a constant too
    return like.device, like.dtype, has_documents, *constants


@cache
def _constants(kernel: triton.JITFunction) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)


def _compile(starts: Sequence[Start]) -> None:
    # A thread begins on device 0, where it would load another device's kernels.
    at = {"initializer": torch.cuda.set_device, "initargs": (starts[0].arguments[0].device,)}
    # Compiling makes many objects and little garbage: collections would go through all of torch and free next to
    # nothing.
    was_on = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(len(starts), **at) as pool:
            list(pool.map(_load, set(_compiled_at_once(starts, pool))))
    finally:
        if was_on:
            gc.enable()


def _compiled_at_once(starts: Sequence[Start], pool: ThreadPoolExecutor) -> list:
    found = []
    try:
        with triton.AsyncCompileMode(pool):
            for each in starts:
                found.append(each.kernel.run(*each.arguments, grid=each.grid, warmup=True, **each.named))
        return [*map(_finished, found)]  # one that did not compile in another call is among Triton's own
    except Exception as error:  # of Triton's front end, of LLVM, of ptxas: whatever it is, the kernel is not there
        raise not_compiled(f"kernel {_failing(starts, found).kernel.__name__}", error) from error


def _failing(starts: Sequence[Start], found: list) -> Start:
    # The first start whose kernel did not compile; the last that was begun where each of them says that it did.
    for each, kernel in zip(starts, found, strict=False):
        try:
            _finished(kernel)
        except Exception:
            return each
    return starts[min(len(found), len(starts) - 1)]


def _finished(kernel: object) -> object:
    # A compiled kernel, of one that may still be compiled by another thread.
    return kernel.result() if hasattr(kernel, "result") else kernel


def _load(compiled) -> None:
    # Triton 3.6 has the C compiler make what starts a kernel, when `run` is first asked for.
    _ = compiled.run
