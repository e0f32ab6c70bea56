"""Kernels that the installed Triton does not compile: the error that says so, and the backends that met it."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hilbert_lib.machine import installed_version

# Errors of kernels that did not compile, by function, backend, dtype and head_dim.
_failed: dict[tuple, str] = {}
changes = 0  # how often that changed


class KernelError(RuntimeError):
    """A kernel that the installed Triton does not compile; the compiler's own error is its cause the first time."""


def not_compiled(kernel: str, error: BaseException) -> KernelError:
    """The error that says it in a sentence: which kernel, which release of Triton, why, and what helps."""
    *_, last = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return KernelError(
        f"{kernel} does not compile with triton {installed_version('triton')}: {type(error).__name__}: {last[:300]}; "
        "install a pair of torch and triton that `hilbert doctor` lists, or ask for another backend or 'auto', which "
        "passes over this one from now on"
    )


def failure(function: str, backend: str, q: Tensor) -> str:
    """The error of a backend's kernel that did not compile in an earlier call of such tensors, or ""."""
    # An empty dict is asked first: torch.compile then guards on that alone.
    return _failed.get((function, backend, q.dtype, q.shape[-1]), "") if _failed else ""


def compiling(function: str, names: Sequence[str], q: Tensor) -> tuple[str, ...]:
    """The backends, without those of which a kernel is known not to compile."""
    return tuple(name for name in names if not failure(function, name, q))


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Raises `KernelError` where a module of kernels does not load: a name of Triton's is another today."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise not_compiled(module, error) from error


def remember(error: KernelError, function: str, backend: str, q: Tensor) -> None:
    """Keep for `failure` that a kernel of a backend did not compile for tensors like q, or dout."""
    _failed[function, backend, q.dtype, q.shape[-1]] = str(error)
    _count_change()


def first_that_compiles(choose: Callable[[], str], run: Callable[[str], tuple], backend: str, level: int) -> tuple:
    """The result of `run` with the backend that `choose` names.

    backend: as the user named it. level: how far above this the user's call stands, for the warning.

    For "auto" a backend whose kernel does not compile is passed over with a warning: `run` remembers it, and `choose`
    names the next. A compiled graph has nothing that could catch the error: it is raised there.
    """
    if backend != "auto" or torch.compiler.is_compiling():
        return run(choose())
    while True:
        chosen = choose()
        try:
            return run(chosen)
        except KernelError as error:
            warnings.warn(f"backend='auto' passes over {chosen!r}: {error}", RuntimeWarning, stacklevel=level + 1)


def forget() -> None:
    """Forget what was remembered, for who installs what failed anew."""
    _failed.clear()
    _count_change()


def _count_change() -> None:
    global changes
    changes += 1
