"""Descriptors and layouts of tiles, segments, and the hardware's barriers, for all warp-specialised kernels."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hilbert_lib import internals
from hilbert_lib.attention.triton.geometry import is_in

LN_2 = gl.constexpr(0.6931471805599453)
FIRST_BARRIER = gl.constexpr(8)  # number of the first hardware barrier that is free; Triton takes those below it
GROUP_ROWS = gl.constexpr(64)  # rows of one group of four warps, and of one wgmma
# These have other names in other releases of Triton.
group_barrier = internals.group_barrier()
async_load = internals.async_load()
async_store = internals.async_store()
async_add = internals.async_add()
reinterpret = internals.reinterpret()


class Ring(NamedTuple):
    """The forward's stages in shared memory, and the barriers that say that they are full.

        copying warp  writes stage 0 | 1 | 2 | 0 ...     waits until both groups have freed a stage
        groups        read   stage     0 | 1 | 2 | 0     wait until a stage is full

    Tiles are [stages, 1, keys, 1, 1, columns], as the copy engine writes them.
    """

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


def descriptor(x: Tensor, rate: int, rows: int, columns: int) -> TensorDescriptor:
    """The copy engine's descriptor for (rows, columns) tiles of x, whose rows lie `rate` positions apart.

    x is (batch, seq, heads, head_dim), with rows at 16-byte addresses. Columns past head_dim are filled with zeros.
    """
    new = object.__new__(TensorDescriptor)
    new.__dict__.update(_described(tuple(x.shape), x.stride(), x.dtype, rate, rows, columns), base=x)
    return new


@lru_cache(maxsize=1024)
def _described(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rate: int, rows: int, columns: int
) -> dict:
    # The attributes of a descriptor, except the tensor. Triton checks every descriptor that is made: for a forward that
    # took a quarter of the host's time, without the launches.
    batch, length, heads, head_dim = shape
    # An axis of length 1 may have any stride, but Triton checks it all the same.
    aligned = 16 // dtype.itemsize
    stride_b, stride_n, stride_h = (
        aligned if n == 1 and stride % aligned else stride for stride, n in zip(strides[:3], shape, strict=False)
    )
    return vars(
        TensorDescriptor(
            torch.empty(0, dtype=dtype, device="cpu"),
            # The last length % rate rows have residues past the rate. So no row lies outside of x.
            [batch, length // rate, rate + length % rate, heads, head_dim],
            [stride_b, rate * stride_n, stride_n, stride_h, 1],
            [1, rows, 1, 1, columns],
            _layout(rows, columns, dtype),
        )
    )


@lru_cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, 1, columns], element(dtype))


def element(dtype: torch.dtype) -> object:
    """Gluon's name for a dtype."""
    return {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]


@gluon.constexpr_function
def product_layout(columns):
    """Layout of a (64, columns) product in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_layout(columns):
    """Layout of (64, columns) for reads and writes of whole rows: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(columns):
    """Layout of a 2-D tile in shared memory, as wgmma and the copy engine take it: rows of up to 128 bytes."""
    return gl.NVMMASharedLayout(min(128, 2 * columns), 16, 2)


@gluon.constexpr_function
def rows_of(shape):
    """Rows of a tile [stages, four axes of rows, columns], as the copy engine writes it."""
    return shape[1] * shape[2] * shape[3] * shape[4]


@gluon.jit
def tile_of_stage(tiles, block):
    """The tile of a block among the stages, as two axes; the copy engine wrote it as five."""
    STAGES: gl.constexpr = tiles.shape[0]
    ROWS: gl.constexpr = rows_of(tiles.shape)
    return reinterpret(tiles.index(block % STAGES), tiles.dtype, [ROWS, tiles.shape[5]], shared_layout(tiles.shape[5]))


@gluon.jit
def wait_full(full, block):
    """Wait until the stage of a block is full; `full` has one barrier a stage."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(block % STAGES), block // STAGES & 1)


@gluon.jit
def tell(numbers, place, number):
    """Write a number of numbers [count, 1] at a place, modulo count: of a block's stage, or of a branch.

    The warp that copies calls this.
    """
    COUNT: gl.constexpr = numbers.shape[0]
    zero = gl.arange(0, 1, gl.BlockedLayout([1], [32], [1], [0]))  # [1]
    numbers.index(place % COUNT).store(zero + number)


@gluon.jit
def told(numbers, place, WARPS: gl.constexpr = 4):
    """The number that was written so. WARPS: 4 in a group, 1 in the warp that copies."""
    COUNT: gl.constexpr = numbers.shape[0]
    return gl.max(numbers.index(place % COUNT).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def counted(block):
    """The number of a block, not negative to the compiler: its stage then needs no care for a sign.

    No program counts as far as 2^30. That would take a quarter of an hour.
    """
    return block & 0x3FFFFFFF


@gluon.jit
def is_inside(w, r, o, first):
    """Whether the tile that begins at position `first` is in a branch, and the start of its segment."""
    start = first // w * w  # [8]
    return (o >= 0) & is_in(first, start, r, o), start


@gluon.jit
def segment_of(branches, i, first):
    """Whether the tile that begins at `first` is in branch i, and its segment's start, length, rate and offset.

    branches: the table of segment lengths and rates, that of offsets, the number of KV heads, and the KV head.
    """
    pairs, offsets, kv_heads, g = branches
    w, r, o = gl.load(pairs + 2 * i), gl.load(pairs + 2 * i + 1), gl.load(offsets + i * kv_heads + g)
    inside, start = is_inside(w, r, o, first)
    return inside, start, w, r, o


@gluon.jit
def segment_coordinates(position, r, n, length):
    """Row and residue in a descriptor of rate r of n rows from a position on."""
    row = position // r
    residue = position % r
    # Rows past the last multiple of r are reached through the residues past r.
    late = row + n > length // r
    return gl.where(late, row - 1, row), gl.where(late, residue + r, residue)


@gluon.jit
def placed_coordinates(position, place, r, n, length, PACKED: gl.constexpr):
    """The same from a position of the tile's sequence or document on; `place` is the tile's `geometry.Place`."""
    if PACKED:
        position += place.origin
    return segment_coordinates(position, r, n, length)


@gluon.jit
def arrive(barrier, THREADS: gl.constexpr = 288):
    """Arrive at one of the hardware's barriers without waiting; for THREADS see `meet`.

    `mbarrier.arrive` joins the four warps of the group first. That costs time in every step.
    """
    gl.inline_asm_elementwise(
        f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_behind(barrier, values, count, THREADS: gl.constexpr = 288):
    """Arrive once `values`, exactly two a thread, are computed.

    ptxas moves a wait for products before computations that do not need them. It was not seen to move one before this.
    `count` is not negative, but ptxas cannot know that: its sign keeps the values out of the barrier's number.
    """
    gl.inline_asm_elementwise(
        f"""{{
            .reg .b32 nothing, at;
            shr.s32 nothing, $6, 31; or.b32 at, $2, $3; and.b32 at, at, nothing; add.s32 at, at, $4;
            bar.arrive at, {THREADS}; mov.u32 $0, 0; mov.u32 $1, 0;
        }}""",
        "=r,=r,r,r,r,r,r,r",
        [values.to(gl.int32, bitcast=True), barrier, count],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def held(values, count):
    """The values unchanged. A wait for products that follows them in the source follows them in the code.

    `count` is not negative, as in `arrive_behind`: no thread arrives anywhere.
    """
    ELEMENTS: gl.constexpr = of_a_thread(values.shape)
    return gl.inline_asm_elementwise(
        _held_asm(ELEMENTS), _held_constraints(ELEMENTS), [values, count],
        dtype=gl.float32, is_pure=False, pack=ELEMENTS,
    )  # fmt: skip


@gluon.constexpr_function
def of_a_thread(shape):
    """Elements of a tile in each thread of a group."""
    return shape[0] * shape[1] // 128


@gluon.constexpr_function
def _held_constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n)


@gluon.constexpr_function
def _held_asm(n):
    sampled = range(0, n, max(1, n // 8))  # values that are computed at different times
    joined = " ".join(f"mov.b32 one, ${i}; or.b32 all, all, one;" for i in sampled)
    return f"""{{
        .reg .b32 one, all;
        .reg .pred never;
        mov.b32 all, 0; {joined}
        shr.s32 one, ${2 * n}, 31; and.b32 all, all, one; setp.ne.s32 never, all, 0;
        @never bar.arrive 15, 288;
    }}"""


@gluon.jit
def meet(barrier, THREADS: gl.constexpr = 288):
    """Arrive at one of the hardware's barriers and wait for THREADS: 256 are both groups, 288 a warp more.

    Triton does not see this. It joins the group once more where shared memory needs that.
    """
    gl.inline_asm_elementwise(
        f"bar.sync $1, {THREADS}; mov.u32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )
