"""Calls that were validated, and what was decided for them: a later call of the same form is looked up.

    form of a call   all that its validation and the choice of a backend hang on, as a key: `form_of`
    known call       its request without tensors, and the backend that served: `KnownCall`

A form holds shapes, dtypes and devices of tensors, and never a tensor. Calls under autocast, and those with an argument
of a type that is not listed here, have no form: they are validated each time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hilbert_lib.attention import failures
from hilbert_lib.attention.autograd import Served
from hilbert_lib.attention.measured_rules import changed_at
from hilbert_lib.attention.request import Request
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.pattern import Pattern
from hilbert_lib.patterns.points import PointNeighbourhood

MOST = 1024  # forms; all are forgotten where there are more
_PLAIN = {type(None), bool, int, float, str}
_LISTS = {tuple, list}
_TENSORS = {Tensor, torch.nn.Parameter}

Form = tuple


class KnownCall(NamedTuple):
    """The decisions for a form of call."""

    request: Request  # without tensors
    served: Served  # the backend
    is_undone: bool  # whether k and v are put in sequence order first
    takes_extra: bool  # whether the pattern's kind has extra keys, be they none
    # Fields of the request -> the arguments that it takes as they are: a mask of no extra keys is none.
    masks: dict[str, str]


_calls: dict[Form, KnownCall] = {}


def form_of(tensors: tuple[Tensor, ...], pattern: Pattern, door: Callable, backend: str, options: dict) -> Form | None:
    """The form of a call, or None where it has none.

    tensors: q, k and v. door: what the pattern's kind is checked by. options: all other arguments.
    """
    if any(type(x) not in _TENSORS for x in tensors) or torch.is_autocast_enabled(tensors[0].device.type):
        return None
    # Points themselves would keep their lists.
    key = pattern.form if isinstance(pattern, PointNeighbourhood) else pattern
    form = [key, door, backend, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()]
    for x in tensors:
        form += x.shape, x.dtype, x.device, x.requires_grad
    for name, value in options.items():
        kind = type(value)
        form += name, kind
        if kind in _PLAIN:
            form.append(value)
        elif kind in _TENSORS:
            form += value.shape, value.dtype, value.device, value.requires_grad
        elif kind is Ordering and value.table is None:
            form.append(value)
        elif kind in _LISTS and _is_plain(value):
            form.append(repr(value))  # of equal numbers too: False == 0, which is no integer here
        else:
            return None
    if backend == "auto":
        form += failures.changes, changed_at()
    return tuple(form)


def _is_plain(values: tuple | list) -> bool:
    return all(_is_plain(value) if type(value) in _LISTS else type(value) in _PLAIN for value in values)


def known(form: Form | None) -> KnownCall | None:
    """The decisions for calls of this form, or None."""
    try:
        return _calls.get(form)
    except TypeError:  # a pattern, or a list of them, that has no hash
        return None


def remember(form: Form | None, call: KnownCall) -> None:
    """Keep the decisions for calls of a form."""
    if form is None:
        return
    if len(_calls) >= MOST:
        _calls.clear()
    try:
        _calls[form] = call
    except TypeError:
        return


def forget() -> None:
    """Forget every call: what a choice hangs on has changed, beside what a form holds."""
    _calls.clear()
