"""What counts as a bool, an integer, a number, a sequence or a device: one judgement for every room."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor


def boolean(name: str, value: object) -> bool:
    """The argument, if it is True or False.

    Raises:
        TypeError: for what only counts as true or false, such as 1 and "no".

    >>> boolean("is_causal", False)
    False
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def integer(name: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """An argument as an int.

    Args:
        name: of the argument, for the error.
        value: anything with an exact integer value, such as int and np.int64; no bool and no tensor.
        least, most: the range allowed, both ends included; None is no bound.

    Raises:
        TypeError: if value is no integer.
        ValueError: if it is out of range.

    >>> integer("heads", 4, least=1)
    4
    """
    try:
        if isinstance(value, bool | Tensor):
            raise TypeError
        # An int is taken as it is: torch.compile makes a constant of what goes through `index`.
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer{_range(least, most)}, got {value!r}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} must be an integer{_range(least, most)}, got {number}")
    return number


def number(name: str, value: object) -> float:
    """An argument as a float.

    Raises:
        TypeError: for what is no number, a bool among it.

    >>> number("seconds", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def positive(name: str, value: object) -> float:
    """An argument as a float.

    Raises:
        TypeError: for what is no number, a bool among it.
        ValueError: unless it is finite and above 0.

    >>> positive("seconds", 1)
    1.0
    """
    found = number(name, value)
    if not 0.0 < found < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {found}")
    return found


def _range(least: int | None, most: int | None) -> str:
    # Called for errors only: put into words, a length is a constant to torch.compile, which compiles for each.
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" of at least {least}"
    return "" if most is None else f" of at most {most}"


def integers(
    name: str, values: object, *, least: int | None = None, distinct: bool = False, empty: bool = False
) -> tuple[int, ...]:
    """A sequence (or a numpy array of one axis) of integers, as a tuple.

    Args:
        name: of the argument, for the error.
        values: the sequence.
        least: of each, None is no bound.
        distinct: whether a value may come once only, as where each is a row of a table.
        empty: whether there may be none.

    Raises:
        TypeError: if values is no such sequence, or one of them no integer; text and bytes are none.
        ValueError: if it is empty, or one of them is too small or there twice.

    >>> integers("shape", [3, 4], least=1)
    (3, 4)
    """
    if not is_listed(values):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    if not len(values) and not empty:
        raise ValueError(f"{name} must hold at least one integer, got {values!r}")
    found = tuple(integer(f"{name}[{n}]", value, least=least) for n, value in enumerate(values))
    if distinct and len(set(found)) < len(found):
        raise ValueError(f"{name} must hold each integer once, got {values!r}")
    return found


def each(check: Callable, values: Mapping[str, object], names: str, **limits) -> None:
    """Holds several values to one check, each by its own name, as the parameters of a notebook.

    Args:
        check: `integer`, `integers`, `number` or `positive`.
        values: by name, such as globals().
        names: of those to check, with spaces between.
        **limits: as `check` takes them.

    Raises:
        TypeError, ValueError: of the check.

    >>> each(integer, {"heads": 4, "kv_heads": 0}, "heads kv_heads", least=1)
    Traceback (most recent call last):
    ValueError: kv_heads must be an integer of at least 1, got 0
    """
    for name in names.split():
        check(name, values[name], **limits)


def is_listed(values: object) -> bool:
    """Whether values are a sequence, or a numpy array of one axis; text and bytes are none.

    >>> is_listed((1, 2)), is_listed("12")
    (True, False)
    """
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview)


def device(value: object) -> torch.device:
    """The argument `device` as torch names it; None is the CPU, whatever torch's default device is.

    Raises:
        ValueError: if torch knows no such device.

    >>> device("cpu")
    device(type='cpu')
    """
    try:
        return torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a device that torch knows, such as 'cpu' or 'cuda', got {value!r}") from None
