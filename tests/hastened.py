"""Triton's interpreter at a third of its time, for tests: what follows from types alone is found once for each of them.

A kernel's source is read once a file, by Python's own parser: Triton looks for each function's end twice, in Python.

It leaves out what finds nothing at the sizes of tests: additions are not computed again in 64 bits, and numpy's numbers
are not asked whether they are wider than their types. What a kernel computes stays the same to the bit.
"""

import ast
import linecache
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MappingProxyType, SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NUMBERS = (bool, int, float)
# Operators of tiles and numbers, and whether the tile is the second operand. Not shifts: they change their operands.
NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "gt", "ge", "lt", "le", "eq", "ne")
OPERATORS = {f"__{name}__": False for name in NAMES} | {f"__r{name}__": True for name in NAMES}
OF_WIDE_STEPS = {"bf16", "fp8e5", "fp8e4nv"}  # which numpy does not have, and holds as integers
# What the builder does to operands before it computes.
CONVERSIONS = {f"create_{name}" for name in ("int_cast", "si_to_fp", "ui_to_fp", "fp_ext", "splat", "broadcast")}
TILES = {}  # all that a type of tiles holds, by the name of its elements and its sides
NUMPY_TYPES = {}  # numpy's, by the names of Triton's
NO_CONSTANTS = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, type(None), str, *NUMBERS}
ELEMENTS = {}  # what pointers point to, by the name of their handle's type


@cache
def hasten() -> None:
    """Use what this file has in the interpreter's place, for all kernels of the process."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.interpreter_semantic = Semantic(builder)
    interpreter.TensorHandle.__init__ = make_handle
    interpreter.TensorHandle.set_attr = set_attribute
    interpreter.TensorHandle.get_element_ty = element_of
    tl.dtype.facts = FactsOfANumber()
    tl.dtype.__eq__ = is_same_type
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_attr = set_builtin
    interpreter._patch_lang = language_changes()
    # The language is changed where a kernel is started, for the functions that it calls too.
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **named: self.rewrite()(*args, **named)
    interpreter.FunctionRewriter.rewrite_ast = rewritten


@cache
def definitions(source: str) -> dict[int, ast.FunctionDef]:
    """The functions at the top of a file, by the lines where they begin, decorators included."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {min(part.lineno for part in (node, *node.decorator_list)): node for node in found}


def rewritten(rewriter: interpreter.FunctionRewriter, *, own=interpreter.FunctionRewriter.rewrite_ast) -> Callable:
    """A kernel in which what is assigned is a tensor; Triton rewrites those that are not at the top of a file."""
    code = rewriter.fn.__code__
    # Taken, since it is changed.
    node = definitions("".join(linecache.getlines(code.co_filename))).pop(code.co_firstlineno, None)
    if node is None or node.name != code.co_name:
        return own(rewriter)
    rewriter.filename, node.decorator_list = code.co_filename, []
    return rewriter._compile_and_exec(ast.fix_missing_locations(ast.Module([rewriter.ast_transformer.visit(node)], [])))


class Semantic(TritonSemantic):
    """Remembers constants, and the types of operands by those that are given. Triton finds each for the first time."""

    def __init__(self, builder: interpreter.InterpreterBuilder):
        super().__init__(builder)
        self.constants, self.operands, self.widened, self.casts = {}, {}, {}, {}
        self.numbers = {}  # of constants, which live to the end, by their ids
        self.loaded, self.instead = {}, {}  # types of what is read; what stands where nothing is read

    def scalar_constant(self, value, dtype):
        key = type(value), value, dtype.name
        if key not in self.constants:
            self.constants[key] = kept(super().scalar_constant(value, dtype))
            self.numbers[id(self.constants[key])] = key
        return self.constants[key]

    def cast(self, x, dtype, rounding=None):
        name = dtype.scalar.name
        if x.dtype.name == name:
            return x
        key = x.type.name, name, rounding
        if key not in self.casts:
            (result,), computed = noting(lambda: [super(Semantic, self).cast(x, dtype, rounding)], passing=())
            is_one = len(computed) == 1 and computed[0][1][0] is x.handle
            self.casts[key] = (computed[0][0], computed[0][1][1:], result.type) if is_one else ()
            return result
        if not self.casts[key]:
            return super().cast(x, dtype, rounding)
        function, rest, result = self.casts[key]
        return tl.tensor(function(x.handle, *rest), result)

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

    def load(self, pointers, mask, other, *options):
        boundary_check, padding, *_ = options
        if not pointers.type.is_block() or boundary_check or padding or pointers.dtype.element_ty == tl.int1:
            return super().load(pointers, mask, other, *options)
        key = pointers.type.name, *(None if x is None else x.type.name for x in (mask, other))
        if key not in self.loaded:
            result = super().load(pointers, mask, other, *options)
            self.loaded[key] = result.type
            return result
        if mask is None:
            handle = self.builder.create_load(pointers.handle, None, None, False)
        else:
            pointers, mask = self.broadcast_impl_value(pointers, mask)
            instead = None if other is None else self.numbers_instead(pointers, other)
            handle = self.builder.create_masked_load(pointers.handle, mask.handle, instead, None, None, False)
        return tl.tensor(handle, self.loaded[key])

    def numbers_instead(self, pointers, other) -> interpreter.TensorHandle:
        """A number for each pointer, for where nothing is read; of a constant they are found once."""
        key = self.numbers.get(id(other)), pointers.type.name
        if key not in self.instead:
            _, wide = self.broadcast_impl_value(pointers, other)
            handle = self.cast(wide, pointers.dtype.element_ty).handle
            if key[0] is None:
                return handle
            self.instead[key] = handle
        return self.instead[key]

    def cast_or_known(self, x, known: tl.tensor | tl.dtype) -> tl.tensor:
        return known if type(known) is tl.tensor else self.cast(x, known)

    def broadcast_impl_value(self, left, right):
        key = left.type.name, right.type.name
        if key not in self.widened:
            wide = super().broadcast_impl_value(left, right)
            self.widened[key] = [each.type for each in wide]
        return map(widened, (left, right), self.widened[key])


class Operator:
    """One of the language's operators, of a tile and what stands beside it.

    What numpy computes for two kinds of operands, and which types these need, is found once. numpy makes them as wide
    as each other; its results are no wider than they, which Triton would ask of each.
    """

    def __init__(self, own: Callable, is_reversed: bool):
        self.own, self.is_reversed, self.known = own, is_reversed, {}

    def method(self) -> Callable:
        own, observed, known, is_reversed = self.own, self.observed, self.known, self.is_reversed
        handle_of, tensor = interpreter.TensorHandle, tl.tensor

        def operate(tile: tl.tensor, other, _semantic=None):
            other_kind = type(other)
            if other_kind is tl.constexpr:
                other = other.value
                other_kind = type(other)
            if other_kind is tensor:
                key = tile.type.name, other.type.name
            elif other_kind in NUMBERS:
                key = tile.type.name, (other_kind, other)
            else:
                return own(tile, other)
            plan = known.get(key)
            if plan is None:
                result, known[key] = observed(tile, other)
                return result
            if not plan:
                return own(tile, other)
            compute, for_tile, for_other, constant, result = plan
            handle = tile.handle if for_tile is None else cast_handle(tile, for_tile)
            if constant is not None:
                other_handle = constant
            else:
                other_handle = other.handle if for_other is None else cast_handle(other, for_other)
            if is_reversed:
                handle, other_handle = other_handle, handle
            return tensor(handle_of(compute(handle.data, other_handle.data), handle.dtype), result)

        return operate

    def observed(self, tile: tl.tensor, other) -> tuple[tl.tensor, tuple]:
        """The result, and how it came about; nothing where more than one function computed."""
        result, computed = noting(lambda: self.own(tile, other), passing=CONVERSIONS)
        tiles = [x for x in (tile, other) if type(x) is tl.tensor]
        if len(computed) != 1 or any(x.dtype.name in OF_WIDE_STEPS for x in tiles):
            return result, ()
        ((function, operands),) = computed
        for_tile, for_other = reversed(operands) if self.is_reversed else operands
        if any(is_pointer(x) != is_pointer(y) for x, y in zip((for_tile, for_other), tiles, strict=False)):
            return result, ()  # they have changed places
        compute = on_arrays(function, operands[0].dtype)
        if len(tiles) == 2:
            return result, (compute, wanted(for_tile, tile), wanted(for_other, other), None, result.type)
        constant = interpreter.TensorHandle(for_other.data.reshape(-1)[:1], for_other.dtype)
        return result, (compute, wanted(for_tile, tile), None, constant, result.type)


def noting(run: Callable, passing) -> tuple:
    """What a function returns, and what the builder computed meanwhile: functions, each with its operands.

    passing: names of functions that are not noted.
    """
    semantic = interpreter.interpreter_semantic
    semantic.builder, builder = Noting(semantic.builder, passing), semantic.builder
    try:
        return run(), semantic.builder.computed
    finally:
        semantic.builder = builder


def on_arrays(function: Callable, first: tl.dtype) -> Callable:
    """What a function of the builder computes of two handles, as a function of their arrays.

    first: the type of the first one's elements.
    """
    if function.__func__ is interpreter.InterpreterBuilder.create_addptr:
        width = max(1, first.element_ty.primitive_bitwidth // 8)
        return lambda at, steps: at + width * steps.astype(np.uint64)
    # The builder's others pass their operands on, with what numpy computes.
    builder = SimpleNamespace(binary_op=lambda a, b, computes: computes, create_idiv=lambda a, b: quotient)
    return function.__func__(builder, None, None)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division as Triton's language has it, towards zero."""
    return (a - np.fmod(a, b)) // b


def indexed(own: Callable) -> Callable:
    """Tiles by None and whole slices, which add axes; the type of what results is found once for each."""
    types = {}

    def take(tile: tl.tensor, places, _semantic=None) -> tl.tensor:
        if type(places) is not tuple or not all(x is None or x == slice(None) for x in places):
            return own(tile, places)
        key = tile.type.name, *[x is None for x in places]
        if key not in types:
            result = own(tile, places)
            types[key] = result.type
            return result
        handle = interpreter.TensorHandle(tile.handle.data[places], tile.handle.dtype.scalar)
        return tl.tensor(handle, types[key])

    return take


class Noting:
    """A builder, which notes what it computes, apart from some of its functions."""

    def __init__(self, builder: interpreter.InterpreterBuilder, passing):
        self.builder, self.passing, self.computed = builder, passing, []

    def __getattr__(self, name: str):
        found = getattr(self.builder, name)
        if not name.startswith("create_") or name in self.passing:
            return found

        def noted(*operands):
            self.computed.append((found, operands))
            return found(*operands)

        return noted


def is_pointer(x: tl.tensor | interpreter.TensorHandle) -> bool:
    return x.dtype.scalar.is_ptr()


def wanted(operand: interpreter.TensorHandle, x: tl.tensor) -> tl.dtype | None:
    """The type that x was cast to; None where it was not. The handle of a comparison may not say that it holds bool."""
    return None if operand.data.dtype == x.handle.data.dtype else operand.dtype


def cast_handle(x: tl.tensor, dtype: tl.dtype | None) -> interpreter.TensorHandle:
    return x.handle if dtype is None else interpreter.interpreter_semantic.cast(x, dtype).handle


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
        self.sides = sides
        self.facts = element_ty, tl.tuple(map(tl.constexpr, sides)), tl.constexpr(self.numel)
        TILES[key] = dict(vars(self))
    vars(self).update(TILES[key])


def make_tensor(self, handle, type):
    """The constructor of a tensor."""
    self.handle, self.type = handle, type
    self.dtype, self.shape, self.numel = type.facts


class FactsOfANumber:
    """Of a type that is no tile's: itself, no sides, and how many elements there are."""

    def __get__(self, dtype: tl.dtype, _owner) -> tuple:
        if dtype.is_block():
            raise AttributeError(f"{dtype} was made before the language was changed")
        return dtype, *OF_A_NUMBER


def make_handle(self, data: np.ndarray, dtype: tl.dtype, attr: dict = MappingProxyType({})):
    """The constructor of a handle, which asks nothing of its numbers."""
    self.data, self.dtype, self.attr = data, dtype, attr


def set_attribute(handle: interpreter.TensorHandle, name: str, value) -> None:
    """Give a handle an attribute: at first all handles share having none."""
    handle.attr = {**handle.attr, name: value}


def element_of(handle: interpreter.TensorHandle, *, own=interpreter.TensorHandle.get_element_ty) -> tl.dtype:
    """The type that a handle's pointers point to, or its own."""
    name = handle.dtype.name
    if name not in ELEMENTS:
        ELEMENTS[name] = own(handle)
    return ELEMENTS[name]


def unwrapped(x, *, own=core._unwrap_if_constexpr):
    """What is no constant is what it is."""
    return x if type(x) in NO_CONSTANTS else own(x)


def is_same_type(self, other) -> bool:
    """Whether two types, neither of tiles nor of pointers, are the same."""
    return self is other or (isinstance(other := unwrapped(other), tl.dtype) and self.name == other.name)


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
    for n, (place, name, function) in enumerate(changes):
        if place is tl.tensor and name in OPERATORS:
            changes[n] = place, name, Operator(function, OPERATORS[name]).method()
        if (place, name) == (tl.tensor, "__getitem__"):
            changes[n] = place, name, indexed(function)

    names = {(place, name) for place, name, _ in changes}
    before = [(place, name, getattr(place, name)) for place, name in names if hasattr(place, name)]
    added = [(place, name) for place, name in names if not hasattr(place, name)]

    def restore() -> None:
        for member in before:
            setattr(*member)
        for member in added:
            delattr(*member)

    def change(_kernel: Callable) -> SimpleNamespace:
        for member in changes:
            setattr(*member)
        return SimpleNamespace(restore=restore)

    return change


def numpy_type(type: tl.dtype, *, own=interpreter._get_np_dtype) -> np.dtype:
    if type.name not in NUMPY_TYPES:
        NUMPY_TYPES[type.name] = own(type)
    return NUMPY_TYPES[type.name]


OF_A_NUMBER = tl.tuple([]), tl.constexpr(1)  # its sides, and how many elements it has
