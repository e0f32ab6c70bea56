"""Starts the kernels of a call. The first time, all are compiled at once: the call waits for the slowest alone."""

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import cache
from typing import NamedTuple

import torch
import triton

KINDS = 4096  # of calls whose kernels are known to be compiled; more are looked up again, and found compiled
_compiled: set[tuple] = set()


class Start(NamedTuple):
    """A kernel, of `triton.jit` or of Gluon's, and what it is started with."""

    kernel: triton.runtime.KernelInterface
    grid: tuple[int, ...]
    arguments: tuple  # by position; a tensor is the first
    named: dict  # by name, with constants and Triton's own options


def start(starts: Sequence[Start]) -> None:
    """Start kernels of one device on the current stream, in order; all are compiled before the first starts."""
    if not triton.knobs.runtime.interpret:
        kind = _kind(starts)
        if kind not in _compiled:
            Context().run(_compile, starts)  # a context without another mode of compiling
            if len(_compiled) >= KINDS:
                _compiled.clear()
            _compiled.add(kind)
    for each in starts:
        each.kernel[each.grid](*each.arguments, **each.named)


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
            with triton.AsyncCompileMode(pool):
                found = [each.kernel.run(*each.arguments, grid=each.grid, warmup=True, **each.named) for each in starts]
            list(pool.map(_load, set(found)))
    finally:
        if was_on:
            gc.enable()


def _load(kernel) -> None:
    # Triton 3.6 has the C compiler make what starts a kernel, when `run` is first asked for.
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    _ = compiled.run
