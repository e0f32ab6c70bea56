"""Counts in place of times: a busy machine changes none of them."""

import sys
from collections.abc import Callable
from cProfile import Profile

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def lines_run(work: Callable[[], object], most: int) -> int:
    """How many lines of Python some work runs; an error once they are more than `most`, which ends what would not end.

    A line that works on a whole array counts as one: what goes through elements one by one runs many.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        assert count <= most, f"it runs more than {most:,} lines of Python"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def calls_made(work: Callable[[], object]) -> int:
    """How many functions some work calls, those of Python and those in C."""
    profile = Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


class ElementsMade(TorchDispatchMode):
    """Counts the elements of all tensors that torch's operators make or view in a block."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        return made


class ElementsAllocated(ElementsMade):
    """Counts the elements in the memory that torch's operators take anew in a block: no views, nothing given back."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.count += x.untyped_storage().nbytes() // x.element_size()
        return made
