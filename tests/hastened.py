"""Triton's interpreter at a third of its time, for tests: what follows from types alone is found once for each of them.

It leaves out what finds nothing at the sizes of tests: additions are not computed again in 64 bits, and numpy's numbers
are not asked whether they are wider than their types. What a kernel computes stays the same to the bit.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = (bool, int, float)
TILES = {}  # all that a type of tiles holds, by the name of its elements and its sides
NUMPY_TYPES = {}  # numpy's, by the names of Triton's


def hasten() -> None:
    """Use what this file has in the interpreter's place, for all kernels of the process."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.interpreter_semantic = Semantic(builder)
    interpreter.TensorHandle.__post_init__ = lambda handle: None
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_attr = set_builtin
    interpreter._patch_lang = language_changes()
    # The language is changed where a kernel is started, for the functions that it calls too.
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **named: self.rewrite()(*args, **named)


class Semantic(TritonSemantic):
    """Remembers constants, and the types of operands by those that are given. Triton finds each for the first time."""

    def __init__(self, builder: interpreter.InterpreterBuilder):
        super().__init__(builder)
        self.constants, self.operands, self.widened = {}, {}, {}

    def scalar_constant(self, value, dtype):
        key = type(value), value, dtype.name
        if key not in self.constants:
            self.constants[key] = kept(super().scalar_constant(value, dtype))
        return self.constants[key]

    def cast(self, x, dtype, rounding=None):
        return x if x.dtype.name == dtype.scalar.name else super().cast(x, dtype, rounding)

    def binary_op_type_checking_impl(self, left, right, *rules, **named):
        given = left, right
        key = *map(kind, given), rules, *named.items()
        if key not in self.operands:
            found = super().binary_op_type_checking_impl(left, right, *rules, **named)
            self.operands[key] = [
                kept(new) if type(x) in NUMBERS else new.dtype for new, x in zip(found, given, strict=True)
            ]
            return found
        for_left, for_right = self.operands[key]
        return self.broadcast_impl_value(self.cast_or_known(left, for_left), self.cast_or_known(right, for_right))

    def cast_or_known(self, x, known: tl.tensor | tl.dtype) -> tl.tensor:
        return known if type(known) is tl.tensor else self.cast(x, known)

    def broadcast_impl_value(self, left, right):
        key = left.type.name, right.type.name
        if key not in self.widened:
            wide = super().broadcast_impl_value(left, right)
            self.widened[key] = [each.type for each in wide]
        return map(widened, (left, right), self.widened[key])


def kept(constant: tl.tensor) -> tl.tensor:
    """A constant that no operation may write to."""
    constant.handle.data.flags.writeable = False
    return constant


def kind(x):
    """What decides of an operand which type the result has: its type, or all of a number."""
    return x.type.name if type(x) is tl.tensor else (type(x), x)


def widened(x: tl.tensor, wide: tl.dtype) -> tl.tensor:
    """A tensor as one of a type that may have more elements."""
    if x.type.name == wide.name:
        return x
    data = np.empty(wide.sides, x.handle.data.dtype)  # a third of the time of numpy.broadcast_to
    data[...] = x.handle.data
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), wide)


def make_type(self, element_ty, shape, *, own=tl.block_type.__init__):
    """The constructor of a type of tiles."""
    sides = tuple([side.value if type(side) is tl.constexpr else side for side in shape])
    key = element_ty.name, sides
    if key not in TILES:
        own(self, element_ty, shape)
        self.sides, self.sizes = sides, (tl.tuple(map(tl.constexpr, sides)), tl.constexpr(self.numel))
        TILES[key] = dict(vars(self))
    vars(self).update(TILES[key])


def make_tensor(self, handle, type):
    """The constructor of a tensor."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.sizes if type.is_block() else OF_A_NUMBER


def unwrapped(x, *, own=core._unwrap_if_constexpr):
    """What is no constant is what it is."""
    return x if type(x) is tl.tensor else own(x)


def set_builtin(place, name: str, member: Callable, _builder, scope) -> None:
    """Have a function of the language find the interpreter by itself."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args, _semantic=None, **named):
        return function(*args, _semantic=semantic, **named)

    scope.set_attr(place, name, call)


def language_changes() -> Callable:
    """What makes Triton's language the interpreter's while a kernel runs, of any file, and gives what ends it."""
    everywhere = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    everywhere.set_attr(tl.block_type, "__init__", make_type)
    everywhere.set_attr(tl.tensor, "__init__", make_tensor)
    everywhere.set_attr(core, "_unwrap_if_constexpr", unwrapped)
    changes = [(place, name, getattr(place, name)) for place, name, _ in everywhere._changes]
    everywhere.restore()

    def change(_kernel: Callable):
        scope = interpreter._LangPatchScope()
        for each in changes:
            scope.set_attr(*each)
        return scope

    return change


def numpy_type(type: tl.dtype, *, own=interpreter._get_np_dtype) -> np.dtype:
    if type.name not in NUMPY_TYPES:
        NUMPY_TYPES[type.name] = own(type)
    return NUMPY_TYPES[type.name]


OF_A_NUMBER = tl.tuple([]), tl.constexpr(1)  # its sides, and how many elements it has
