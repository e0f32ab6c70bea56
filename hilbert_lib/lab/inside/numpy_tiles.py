"""The few words of Gluon that the kernels of notebook 11 use, on numpy arrays, which count what a kernel does.

So the kernels run where Triton has no GPU, or is not installed. Tiles are float32: numpy has no bfloat16. Warps run as
one and copies come at once. Layouts and forgotten barriers are not seen.
"""

import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from torch import Tensor

KERNELS = Path(__file__).with_name("kernels.py")
ELEMENT_BYTES = 2  # of bfloat16, as which a GPU reads what is counted here
counted: Counter = Counter()
program: list[int] = [0, 0]


class Tile(np.ndarray):
    """A tile in registers."""

    def to(self, _dtype) -> "Tile":
        return self


def tile(array) -> Tile:
    return np.asarray(array).view(Tile)


class Pointer:
    """Addresses in a flat array."""

    dtype = SimpleNamespace(element_ty="float32")

    def __init__(self, cells: np.ndarray, at=0):
        self.cells, self.at = cells, at

    def __add__(self, more) -> "Pointer":
        return Pointer(self.cells, self.at + more)


class Boxes:
    """A descriptor for TMA: rectangles of (side, side, heads, D) that begin anywhere, zero outside."""

    layout = None

    def __init__(self, cells: np.ndarray, box: Sequence[int]):
        self.cells, self.box = cells, box
        self.block_type = SimpleNamespace(nbytes=int(np.prod(box)) * ELEMENT_BYTES)


class SharedTile:
    """A tile in shared memory, NaN until it is written."""

    dtype = "float32"

    def __init__(self, array: np.ndarray):
        self.array, self.shape = array, array.shape

    def index(self, number: int) -> "SharedTile":
        return SharedTile(self.array[number])

    def permute(self, axes: Sequence[int]) -> "SharedTile":
        return SharedTile(self.array.transpose(axes))

    def store(self, values: np.ndarray) -> None:
        self.array[...] = values


def load(pointer: Pointer, mask=True, other=0.0) -> Tile:
    counted["addresses"] += pointer.at.size
    if mask is True:
        counted["bytes"] += pointer.at.size * ELEMENT_BYTES
        return tile(pointer.cells.take(pointer.at))
    counted["bytes"] += int(mask.sum()) * ELEMENT_BYTES
    return tile(np.where(mask, pointer.cells.take(pointer.at, mode="clip"), np.float32(other)))


def store(pointer: Pointer, values: np.ndarray, mask=True) -> None:
    at, mask = np.broadcast_arrays(pointer.at, mask)
    pointer.cells[at[mask]] = values[mask]


def copy_box(boxes: Boxes, corner: Sequence[int], _barrier, shared: SharedTile) -> None:
    top, left, head, _ = corner
    rows, columns, _, _ = boxes.box
    inside = boxes.cells[max(top, 0) : top + rows, max(left, 0) : left + columns, head]
    shared.array[...] = 0
    shared.array[max(-top, 0) :, max(-left, 0) :, 0][: inside.shape[0], : inside.shape[1]] = inside
    counted["boxes"] += 1
    counted["bytes"] += inside.size * ELEMENT_BYTES


def where(seen, values, other) -> Tile:
    counted["scores"] += values.size  # kernels hide what is not seen by this, and use it for nothing else
    return tile(np.where(seen, values, np.float32(other)))


def exp2(x: np.ndarray) -> Tile:
    counted["exponentials"] += x.size
    return tile(np.exp2(x))


def matrix_product(a, b, acc, is_async=False) -> Tile:
    a, b = (x.array if isinstance(x, SharedTile) else x for x in (a, b))
    return tile(acc + a @ b)


def same(x, *_, **__):
    return x


def nothing(*_, **__) -> None:
    return None


def jit(function: Callable | None = None, **_) -> Callable:
    return function or jit


GL = SimpleNamespace(
    constexpr=same,
    float32="float32",
    int64="int64",
    program_id=lambda axis: program[axis],
    arange=lambda start, stop, layout=None: tile(np.arange(start, stop)),
    full=lambda shape, value, dtype, layout=None: tile(np.full(shape, value, np.float32)),
    zeros=lambda shape, dtype, layout=None: tile(np.zeros(shape, np.float32)),
    load=load,
    store=store,
    where=where,
    exp2=exp2,
    minimum=lambda a, b: tile(np.minimum(a, b)),
    maximum=lambda a, b: tile(np.maximum(a, b)),
    max=lambda x, axis: tile(np.max(x, axis)),
    sum=lambda x, axis: tile(np.sum(x, axis)),
    cdiv=lambda a, b: -(-a // b),
    convert_layout=same,
    static_range=range,
    allocate_shared_memory=lambda dtype, shape, layout: SharedTile(np.full(shape, np.nan, np.float32)),
    **dict.fromkeys(
        ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "NVMMASharedLayout"), nothing
    ),
)
GLUON = SimpleNamespace(jit=jit, constexpr_function=same, language=GL)
HOPPER = SimpleNamespace(
    fence_async_shared=nothing,
    mbarrier=SimpleNamespace(MBarrierLayout=nothing, init=nothing, expect=nothing, wait=nothing),
    warpgroup_mma=matrix_product,
    warpgroup_mma_wait=lambda _outstanding, deps: deps[0],
)
INTERNALS = SimpleNamespace(
    group_barrier=lambda: nothing,
    async_load=lambda: copy_box,
    reinterpret=lambda: lambda shared, dtype, shape, layout: SharedTile(shared.array.reshape(shape)),
)
STAND_INS = {
    "triton.experimental": SimpleNamespace(gluon=GLUON),
    "triton.experimental.gluon": GLUON,
    "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
    "hilbert_lib": SimpleNamespace(internals=INTERNALS),
}


@cache
def kernels() -> SimpleNamespace:
    """The functions of `kernels.py`, run with the words above in place of Triton's."""
    return kernels_of(KERNELS.read_text(encoding="utf-8"))


def kernels_of(source: str) -> SimpleNamespace:
    """The same of another text."""
    names = {"__builtins__": {**vars(builtins), "__import__": lambda name, *_: STAND_INS[name]}}
    exec(compile(source, KERNELS, "exec"), names)
    return SimpleNamespace(**names)


def pointer(x: Tensor) -> Pointer:
    """Addresses of a contiguous float32 tensor, whose memory they share: a kernel's argument."""
    return Pointer(x.numpy().reshape(-1))


def boxes(x: Tensor, box: Sequence[int]) -> Boxes:
    """Descriptor of boxes of x, (side, side, heads, D): a kernel's argument."""
    return Boxes(x.numpy(), box)


def launch(kernel: Callable, programs: Iterable[tuple[int, int]], arguments: Sequence, constants: dict) -> Counter:
    """Run some programs of a kernel, by what `program_id` is on both axes. Gives what they did in all.

    scores, exponentials: of elements. addresses, boxes: that were read from. bytes: that were read.
    """
    counted.clear()
    for program[:] in programs:
        kernel(*arguments, **constants)
    return Counter(counted)
