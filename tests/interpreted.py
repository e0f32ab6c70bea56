"""Triton's interpreter for tests: strict about memory."""

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

THROUGH_TABLES = {"merge_kernel", "sum_kernel"}  # their tables hold addresses of tensors that they are not given


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
        if name in THROUGH_TABLES:
            return
        at, shown = pointers.data, mask.data
        if not shown.all():
            at = at[np.broadcast_to(shown, at.shape).astype(bool)]
            if not at.size:
                return
        # Reductions by their own names: an array's methods find them anew.
        last = int(np.maximum.reduce(at, axis=None)) + pointers.get_element_ty().primitive_bitwidth // 8
        first = int(np.minimum.reduce(at, axis=None))
        for begin, end in given:
            if begin <= first and last <= end:
                return
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
