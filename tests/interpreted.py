"""Triton's interpreter for tests: at twice its speed, and strict about memory."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from torch import Tensor

THROUGH_TABLES = {"merge_kernel", "sum_kernel"}  # their tables hold addresses of tensors that they are not given


def hasten() -> None:
    """Leave out of the interpreter what takes half of its time and finds nothing at the sizes of tests.

    Additions are not computed again in 64 bits. A call from a kernel's function to another one does not replace
    Triton's language by the interpreter's where that has been done. And numpy's name of a type is looked up once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    numpy_type, known = interpreter._get_np_dtype, {}

    def known_type(triton_type):
        if triton_type.name not in known:
            known[triton_type.name] = numpy_type(triton_type)
        return known[triton_type.name]

    @cache
    def languages(function) -> list:
        return [each for each in function.__globals__.values() if inspect.ismodule(each) and each in (tl, tl.core)]

    def call(self, *args, **kwargs):
        if any(tl.core.is_builtin(language.load) for language in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._get_np_dtype = known_type
    interpreter.InterpretedFunction.__call__ = call


def confine() -> None:
    """Have the interpreter refuse what a kernel reads or writes outside of the tensors that it was started with.

    Without it such a kernel takes what lies there, or writes over it, and a test of values may pass.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    given, name = [], ""

    def ends(x: Tensor) -> tuple[int, int]:
        last = sum((side - 1) * step for side, step in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() * (x.numel() > 0)

    def copied(self, args, kwargs, *, own=executor._init_args_hst):
        nonlocal given, name
        found = own(self, args, kwargs)
        given, name = [*map(ends, _tensors([*found[0], *found[1].values()]))], self.fn.__name__
        return found

    def check(what: str, pointers, mask) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        if not at.size or name in THROUGH_TABLES:
            return
        first, last = int(at.min()), int(at.max()) + pointers.get_element_ty().primitive_bitwidth // 8
        if not any(begin <= first and last <= end for begin, end in given):
            raise IndexError(f"{name} {what} outside of its tensors")

    def load(self, pointers, mask, *rest, own=builder.create_masked_load):
        check("reads", pointers, mask)
        return own(self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest, own=builder.create_masked_store):
        check("writes", pointers, mask)
        return own(self, pointers, value, mask, *rest)

    executor._init_args_hst, builder.create_masked_load, builder.create_masked_store = copied, load, store


def _tensors(values: Iterable) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, tuple | list):
            yield from _tensors(x)
        elif isinstance(x := getattr(x, "base", x), Tensor):
            yield x
