"""Values, global memory and shared memory of the emulator: numpy arrays with the names that kernels use."""

import operator
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from greenlet import getcurrent
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hilbert_lib.attention import dropout

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.int64: gl.int64,
    torch.bool: gl.int1,
}
KNOWN_BY = {"e": gl.float32, "f": gl.float32, "d": gl.float32, "?": gl.int1}  # numpy's letters; others are integers


class Fault(Exception):
    """What would be undefined on a GPU, or never end."""


def raw(x):
    """The numpy array or the number of a value."""
    return x.array if type(x) is Value else x


def rounded(array: np.ndarray, dtype) -> np.ndarray:
    # Dtypes are the language's own objects: == between them takes longer than rounding a small tile.
    if dtype is gl.bfloat16:
        bits = array.view(np.uint32)
        result = bits >> 16
        result &= 1
        result += 0x7FFF
        result += bits
        result &= np.uint32(0xFFFF0000)
        return result.view(np.float32)
    return array.astype(np.float16).astype(np.float32) if dtype is gl.float16 else array


class Value:
    """A tile or a number in registers: float32, int64 or bool, and the dtype that the kernel knows it by."""

    __slots__ = ("array", "dtype")
    type = SimpleNamespace(layout=None)

    def __init__(self, array, dtype=None):
        kind = array.dtype.char
        self.array = array.astype(np.float32) if kind == "d" else array
        self.dtype = KNOWN_BY.get(kind, gl.int32) if dtype is None else dtype

    @property
    def shape(self):
        return self.array.shape

    def __getitem__(self, index):
        return Value(self.array[index], self.dtype)

    def __bool__(self):
        return bool(self.array)

    def __index__(self):
        return int(self.array)

    __int__ = __index__

    def __neg__(self):
        return Value(-self.array, self.dtype)

    def to(self, dtype, bitcast=False):
        if bitcast and dtype is gl.uint32:
            return Value(self.array.astype(np.uint32), dtype)
        if bitcast:
            as_bits = self.array if self.array.dtype == np.float32 else self.array.astype(np.int32)
            return Value(as_bits.view(np.float32 if dtype.is_floating() else np.int32), dtype)
        if dtype.is_floating():
            return Value(rounded(self.array.astype(np.float32, copy=False), dtype), dtype)
        return Value(self.array.astype(np.int64, copy=False), dtype)

    def reshape(self, *shape):
        return Value(self.array.reshape(*shape), self.dtype)

    def expand_dims(self, axis):
        return Value(np.expand_dims(self.array, axis), self.dtype)


def quotient(a, b):
    """Division as on a GPU, towards zero."""
    return (a - np.fmod(a, b)) // b


def _add_operators() -> None:
    # Python's operators, since numpy's functions take several times as long for two numbers.
    both = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
    both |= {"floordiv": quotient, "mod": np.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor}
    both |= {"lshift": operator.lshift, "rshift": operator.rshift}
    compared = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}

    def method(function: Callable) -> Callable:
        def operate(self, other):
            return Value(function(self.array, other.array if type(other) is Value else other))

        return operate

    def reversed_method(function: Callable) -> Callable:
        return lambda self, other: Value(function(other, self.array))  # two values have the other method

    for name, function in (both | compared).items():
        setattr(Value, f"__{name}__", method(function))
    for name, function in both.items():
        setattr(Value, f"__r{name}__", reversed_method(function))


_add_operators()


class Memory:
    """The whole storage of a tensor. numpy has no bfloat16: it sees the bits."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype = DTYPES[tensor.dtype]
        self.pointed = SimpleNamespace(element_ty=self.dtype)  # the dtype of pointers to it
        cells = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
        is_bits = tensor.dtype == torch.bfloat16
        self.cells = cells.view(torch.int16).numpy().view(np.uint16) if is_bits else cells.numpy()

    def decoded(self, cells: np.ndarray) -> np.ndarray:
        if self.dtype is gl.bfloat16:
            bits = cells.astype(np.uint32)
            bits <<= np.uint32(16)
            return bits.view(np.float32)
        return cells.astype(np.float32 if self.dtype.is_floating() else np.int64)

    def encoded(self, array: np.ndarray) -> np.ndarray:
        if self.dtype is gl.bfloat16:
            bits = rounded(array.astype(np.float32, copy=False), self.dtype).view(np.uint32)
            return (bits >> np.uint32(16)).astype(np.uint16)
        return array.astype(self.cells.dtype)


class Pointer:
    """Places in a tensor's storage."""

    def __init__(self, memory: Memory, at):
        self.memory, self.at = memory, at
        self.dtype = memory.pointed

    def __add__(self, more):
        return Pointer(self.memory, self.at + raw(more))

    def _reached(self, mask) -> tuple[np.ndarray, np.ndarray]:
        at, mask = np.broadcast_arrays(self.at, True if mask is None else raw(mask))
        at = at[mask]
        self._check(at)
        return at, mask

    def _check(self, at: np.ndarray):
        if at.size and not 0 <= np.minimum.reduce(at, None) <= np.maximum.reduce(at, None) < self.memory.cells.size:
            raise Fault(f"places {at.min()} to {at.max()} of a storage of {self.memory.cells.size}")

    def load(self, mask, other):
        if mask is None:
            at = np.asarray(self.at)
            self._check(at)
            return Value(self.memory.decoded(self.memory.cells[at]), self.memory.dtype)
        at, mask = self._reached(mask)
        found = self.memory.decoded(self.memory.cells[at])
        array = np.empty(mask.shape, found.dtype)
        array[...] = raw(other)
        array[mask] = found
        return Value(array, self.memory.dtype)

    def store(self, value, mask):
        at, mask = self._reached(mask)
        self.memory.cells[at] = self.memory.encoded(np.broadcast_to(raw(value), mask.shape)[mask])

    def add(self, value, mask):
        at, mask = self._reached(mask)
        np.add.at(self.memory.cells, at, np.broadcast_to(raw(value), mask.shape)[mask])

    def grow(self, value):
        at, _ = self._reached(None)
        np.maximum.at(self.memory.cells, at, raw(value))


class Descriptor:
    """A copy engine's descriptor in a kernel: boxes of a tensor of up to five dimensions."""

    def __init__(self, host: TensorDescriptor):
        self.memory, self.layout, self.block_shape = Memory(host.base), host.layout, list(host.block_shape)
        self.shape, self.dtype = host.shape, self.memory.dtype
        start, size = host.base.storage_offset(), self.memory.cells.itemsize
        last = start + sum((n - 1) * stride for n, stride in zip(host.shape, host.strides, strict=True))
        if last >= self.memory.cells.size:
            raise Fault(f"a descriptor reaches place {last} of a storage of {self.memory.cells.size}")
        strides = [stride * size for stride in host.strides]
        self.whole = np.lib.stride_tricks.as_strided(self.memory.cells[start:], host.shape, strides)
        self.block_type = SimpleNamespace(nbytes=int(np.prod(host.block_shape)) * size)

    @property
    def handle(self):
        return self

    def parts(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor lies in the box at some coordinates, which may be negative, and where in the box."""
        sides = list(zip(at, self.block_shape, self.shape, strict=True))
        inside = tuple(slice(min(max(x, 0), n), max(min(x + size, n), 0)) for x, size, n in sides)
        return inside, tuple(slice(s.start - x, max(s.stop, s.start) - x) for x, s in zip(at, inside, strict=True))

    def box(self, at: list[int]) -> np.ndarray:
        """A box, zero outside of the tensor."""
        inside, within = self.parts(at)
        found = self.memory.decoded(self.whole[inside])
        if found.shape == tuple(self.block_shape):
            return found
        box = np.zeros(self.block_shape, np.float32)
        box[within] = found
        return box

    def reduce(self, function: np.ufunc, at: list[int], box: np.ndarray) -> None:
        """What of a box lies in the tensor, joined to what is there."""
        inside, within = self.parts(at)
        self.whole[inside] = self.memory.encoded(function(self.memory.decoded(self.whole[inside]), box[within]))


class SharedTile:
    """A tile in shared memory, NaN at first: as instructions see it, and as copies and products do after a fence."""

    def __init__(self, dtype, by_instructions: np.ndarray, by_engines: np.ndarray):
        self.dtype, self.by_instructions, self.by_engines = dtype, by_instructions, by_engines
        self.shape = by_instructions.shape

    def _viewed(self, view: Callable):
        return SharedTile(self.dtype, view(self.by_instructions), view(self.by_engines))

    @property
    def handle(self):
        return self

    def index(self, i):
        if not 0 <= int(i) < self.shape[0]:
            raise Fault(f"tile {int(i)} of {self.shape[0]}")
        return self._viewed(lambda x: x[int(i)])

    def slice(self, start, length, dim=0):
        if not 0 <= int(start) <= int(start) + length <= self.shape[dim]:
            raise Fault(f"rows from {int(start)} on, {length} of {self.shape[dim]}")
        places = *[slice(None)] * dim, slice(int(start), int(start) + length)
        return self._viewed(lambda x: x[places])

    def permute(self, axes):
        return self._viewed(lambda x: x.transpose(axes))

    def reshape(self, shape):
        return self._viewed(lambda x: x.reshape(shape, copy=False))

    def _reinterpret(self, dtype, shape, layout, _semantic):
        if dtype != self.dtype:
            raise Fault(f"a tile of {self.dtype} read as {dtype}")
        return self.reshape(shape)

    def load(self, layout=None):
        return Value(self.by_instructions.copy(), self.dtype)

    def store(self, value):
        if value.dtype != self.dtype:
            raise Fault(f"{value.dtype} stored in a tile of {self.dtype}")
        self.by_instructions[...] = value.array
        unfenced().append(self)

    def fill(self, box: np.ndarray):
        self.by_instructions[...] = self.by_engines[...] = box


def unfenced() -> list[SharedTile]:
    """The tiles that this greenlet, which is a group of warps, stored since its last fence."""
    return vars(getcurrent()).setdefault("unfenced", [])


def fence():
    """Copies and products see what this group stored."""
    tiles = unfenced()
    for tile in tiles:
        tile.by_engines[...] = tile.by_instructions
    tiles.clear()


def matrix_product(a: np.ndarray, b: np.ndarray, acc: Value | None) -> Value:
    """a times b, added to acc. By torch, since numpy's own library starts threads for it."""
    found = torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    if acc is not None:
        found += acc.array
    return Value(found)


def on_arrays(function: Callable) -> Callable:
    return lambda *args: Value(function(*[x.array if type(x) is Value else x for x in args]))


def philox(seed: Value, *counter: Value) -> tuple[Value, ...]:
    """The four words of the language's own Philox."""
    key = int(seed) & 0xFFFFFFFF, int(seed) >> 32 & 0xFFFFFFFF
    words = dropout.philox(
        tuple(torch.from_numpy(x.array & 0xFFFFFFFF) for x in counter), tuple(map(torch.tensor, key))
    )
    return tuple(Value(x.numpy(), gl.uint32) for x in words)


# What kernels call by the names of `triton.language`; `layout` is Gluon's.
FUNCTIONS = {
    "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
    "atomic_add": lambda pointer, value, mask=None, sem=None: pointer.add(value, mask),
    "atomic_max": lambda pointer, value, sem=None: pointer.grow(value),
    "arange": lambda start, end, layout=None: Value(np.arange(start, end)),
    "full": lambda shape, value, dtype, layout=None: Value(np.full(shape, value, np.float32), None).to(dtype),
    "zeros": lambda shape, dtype, layout=None: Value(
        np.zeros(shape, np.float32 if dtype.is_floating() else np.int64), dtype
    ),
    "zeros_like": lambda x: Value(np.zeros_like(x.array), x.dtype),
    "where": on_arrays(np.where),
    # Of a NaN and a number these give the number, as a GPU does.
    "minimum": on_arrays(np.fmin),
    "maximum": on_arrays(np.fmax),
    "max": on_arrays(np.fmax.reduce),
    "cumsum": on_arrays(np.cumsum),
    "sum": on_arrays(lambda x, axis=None: np.add.reduce(x, axis)),
    "exp2": on_arrays(np.exp2),
    "sqrt": on_arrays(np.sqrt),
    "abs": on_arrays(np.abs),
    "log2": on_arrays(np.log2),
    "log": on_arrays(np.log),
    "cdiv": on_arrays(lambda a, b: quotient(a + b - 1, b)),
    "philox": philox,
    "join": lambda a, b: Value(np.stack(np.broadcast_arrays(a.array, b.array), -1), a.dtype),
    "trans": lambda x: Value(x.array.T, x.dtype),
    "dot": lambda a, b, acc=None, input_precision=None: matrix_product(a.array, b.array, acc),
    "convert_layout": lambda x, layout: x,
}
