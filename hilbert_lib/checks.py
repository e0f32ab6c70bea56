"""Judgements of arguments, for every room: a bool, an integer, a number, a sequence, a device."""

import difflib
import functools
import inspect
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

LARGEST_SIZE = 2**40  # positions or cells: more than a machine holds, and torch counts their bytes in 64 bits
LARGEST_EMBED_DIM = 2**24  # a matrix of such a side has bytes that torch can count
LARGEST_RANKS = 2**20
P, T = ParamSpec("P"), TypeVar("T")


def boolean(name: str, value: object) -> bool:
    """The argument, if it is True or False; 1 and "no" are a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def integer(name: str, value: object, *, least: int | None = None, most: int | None = None) -> int:
    """An argument as an int from least to most, if given: any exact integer such as np.int64, no bool, no tensor.

    Raises TypeError if value is no integer, ValueError if it is out of range.
    """
    try:
        if isinstance(value, bool | Tensor):
            raise TypeError
        # These are taken as they are: torch.compile and torch.export make a constant of what goes through `index`.
        number = value if type(value) in (int, torch.SymInt) else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer{_range(least, most)}, got {value!r}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} must be an integer{_range(least, most)}, got {number}")
    return number


def number(name: str, value: object) -> float:
    """An argument as a float; TypeError if it is no number, or a bool."""
    # A size that torch traces as a symbol is a number too, but none of Python's.
    if isinstance(value, bool) or not isinstance(value, Real | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def positive(name: str, value: object, *, most: float = math.inf) -> float:
    """An argument as a float that is finite, above 0 and at most `most`, else ValueError; TypeError as `number`."""
    checked = number(name, value)
    if not 0.0 < checked < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {checked}")
    if checked > most:
        raise ValueError(f"{name} must be at most {most:g}, got {checked:g}")
    return checked


def dense_tensor(name: str, value: object) -> Tensor:
    """The argument, if it is a tensor whose elements lie at strides and are numbers; else TypeError."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:  # a nested tensor may say strided, but has no shape
        got = "a nested one (torch.nested.to_padded_tensor pads it)" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {got}")
    if value.is_quantized:
        raise TypeError(f"{name} must be a dense (strided) tensor, got a quantised one: x.dequantize() is dense")
    return value


def rows_of_keys(name: str, value: Tensor, sides: str, k: Tensor) -> None:
    """Raise unless a tensor is dense, of the first sides of k (batch, keys, ...), and on its device.

    sides: their names, as in "batch, keys".
    """
    dense_tensor(name, value)
    names = sides.split(", ")
    shape = tuple(k.shape[: len(names)])
    if value.shape != shape:
        words = f"({sides})" if len(names) > 1 else f"({sides},)"
        raise ValueError(f"{name} must be {words} = {shape}, got shape {tuple(value.shape)}")
    if value.device != k.device:
        raise ValueError(f"{name} must be on the device of k ({k.device}), got {value.device}")


def json_text(name: str, value: object, **options) -> str:
    """The argument as JSON gives it to another process: TypeError if it holds what JSON cannot, or would change.

    JSON makes strings of other keys: {1: 2} would arrive as {"1": 2}.
    """
    try:
        text = json.dumps(value, **options)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold values of JSON, got {value!r}: {error}") from None
    waiting = [value]
    while waiting:
        child = waiting.pop()
        if isinstance(child, dict):
            for key in child:
                if not isinstance(key, str):
                    raise TypeError(f"{name} must have strings as the keys of dictionaries, got {key!r}")
            waiting += child.values()
        elif isinstance(child, list | tuple):
            waiting += child
    return text


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """The argument, if it is one of these strings: TypeError if it is no string, else ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, one of {', '.join(allowed)}; got {value!r}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value


def grouped(heads: object, kv_heads: object | None) -> tuple[int, int]:
    """Query and KV heads as integers, by default the same; ValueError unless the second divide the first."""
    heads = integer("heads", heads, least=1)
    kv_heads = heads if kv_heads is None else integer("kv_heads", kv_heads, least=1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads ({heads}), got {kv_heads}")
    return heads, kv_heads


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
    """A sequence (or a numpy array of one axis) of integers, each at least `least`, as a tuple.

    Raises TypeError if values is no such sequence (text and bytes are none) or one of them no integer; ValueError if
    one is too small, one is there twice (`distinct`), or there are none (unless `empty`).
    """
    if not is_listed(values):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    if not len(values) and not empty:
        raise ValueError(f"{name} must hold at least one integer, got {values!r}")
    checked = tuple(integer(f"{name}[{n}]", value, least=least) for n, value in enumerate(values))
    if distinct and len(set(checked)) < len(checked):
        raise ValueError(f"{name} must hold each integer once, got {values!r}")
    return checked


def countable(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sides of a grid, if its cells are at most LARGEST_SIZE; else ValueError."""
    if not any(map(is_symbol, shape)) and math.prod(shape) > LARGEST_SIZE:
        raise ValueError(f"{name} must hold at most {LARGEST_SIZE} cells, got {shape}")
    return shape


def is_symbol(size: int) -> bool:
    """Whether a size may be a symbol of torch.compile or torch.export, which a comparison with a bound would bind.

    In a strict export symbols look like integers.
    """
    return isinstance(size, torch.SymInt) or torch.compiler.is_exporting()


def is_listed(values: object) -> bool:
    """Whether values are a sequence, or a numpy array of one axis; text and bytes are none."""
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview)


def device(value: object) -> torch.device:
    """The argument `device` as torch names it, else ValueError; None is the CPU, whatever torch's default device is."""
    try:
        return torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a device that torch knows, such as 'cpu' or 'cuda', got {value!r}") from None


def device_here(value: object) -> torch.device:
    """The argument `device` by its full name, as "cuda:0" for "cuda"; ValueError for one that this machine lacks."""
    known = device(value)
    try:
        return torch.empty(0, device=known).device
    except (AssertionError, RuntimeError) as error:  # of a torch without CUDA, and of a machine without a GPU
        why = str(error).partition("\n")[0]
        raise ValueError(f"device must be one of this machine, got {str(known)!r}: {why}") from None


def suggesting(function: Callable[P, T], unserved: Mapping[str, str] = MappingProxyType({})) -> Callable[P, T]:
    """The function, whose error for an unknown keyword names the nearest known one (Python says "unexpected" alone).

    unserved: keywords of its kin that it does not take, and why.
    """
    parameters = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name in unserved:
                raise TypeError(f"{function.__name__} serves no {name}: {unserved[name]}")
            if name not in parameters:
                raise TypeError(f"{function.__name__} has no argument {name!r}{nearest(name, parameters)}")
        return function(*args, **kwargs)

    return call


def unscripted(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which torch.jit.script refuses by its name, inside other functions and modules too."""

    def refuse() -> None:
        raise TypeError(f"{function.__name__} is not scripted by torch.jit.script: use torch.export or torch.compile")

    function.__prepare_scriptable__ = refuse
    return function


def known_by(function: Callable, keywords: Iterable[str], called: str) -> None:
    """Raise TypeError, naming the nearest known one, for a keyword that a function does not take."""
    parameters = inspect.signature(function).parameters.keys()
    for name in keywords:
        if name not in parameters:
            raise TypeError(f"{called} has no argument {name!r}{nearest(name, parameters)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error: which of the known names was likely meant, or all of them.

    >>> nearest("causal", ["is_causal", "scale"])
    "; did you mean 'is_causal'?"
    """
    names = list(names)
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else f"; it has {', '.join(names)}"
