"""Starts the kernels of a call. The first time they are compiled beside each other: the call waits for the longest."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from functools import cache
from typing import NamedTuple

import torch
import triton

KINDS = 4096  # of calls whose kernels are known to be compiled; more are looked up again, and found compiled
_compiled: set[tuple] = set()


class Start(NamedTuple):
    """A kernel and what it is started with.

    Attributes:
        kernel: a function of `triton.jit`, or of Gluon's.
        grid: programs along each axis.
        arguments: without names; a tensor is the first.
        named: by name, constants and Triton's own options among them.
    """

    kernel: triton.runtime.KernelInterface
    grid: tuple[int, ...]
    arguments: tuple
    named: dict


def start(starts: Sequence[Start]) -> None:
    """Start kernels on the current stream, one after the other; all are compiled before the first starts.

    Args:
        starts: in order, at least one; all on one device.
    """
    if not triton.knobs.runtime.interpret:
        kind = _kind(starts)
        if kind not in _compiled:
            # In a context of its own, where no other mode of compiling is active.
            Context().run(_compile, starts)
            if len(_compiled) >= KINDS:
                _compiled.clear()
            _compiled.add(kind)
    for each in starts:
        each.kernel[each.grid](*each.arguments, **each.named)


def _kind(starts: Sequence[Start]) -> tuple:
    # What is compiled depends on this, and on how arguments are aligned: what that changes is compiled at its start.
    like = starts[0].arguments[0]
    constants = [(id(each.kernel), *map(each.named.get, _constants(each.kernel))) for each in starts]
    return like.device, like.dtype, *constants


@cache
def _constants(kernel: triton.JITFunction) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)


def _compile(starts: Sequence[Start]) -> None:
    # A thread begins on device 0, for which the kernels of another would then be loaded.
    at = {"initializer": torch.cuda.set_device, "initargs": (starts[0].arguments[0].device,)}
    with _no_collections(), ThreadPoolExecutor(len(starts), **at) as pool:
        with triton.AsyncCompileMode(pool):
            found = [each.kernel.run(*each.arguments, grid=each.grid, warmup=True, **each.named) for each in starts]
        list(pool.map(_load, set(found)))


@contextmanager
def _no_collections() -> Iterator[None]:
    # Compiling makes many objects and little garbage: collections would begin often, each going through all that torch
    # has loaded, and free next to nothing.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(kernel) -> None:
    # Triton 3.6 has the C compiler make what starts a kernel, when `run` is first asked for.
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    _ = compiled.run
