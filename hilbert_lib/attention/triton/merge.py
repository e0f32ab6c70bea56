"""Merge or sum of all partial results of one call, by one kernel that writes each row once.

The kernel walks over the rows of the result. A table lists the parts that hold rows of a sequence and head, and where
they begin in memory. The place of a row in a part follows by arithmetic. Parts stay as the dense kernels wrote them.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.request import StridedRows
from hilbert_lib.attention.triton.geometry import power_of_2

PLACE = tl.constexpr(5)  # numbers of a part's place in the result: start, segment length, rate, segments, rows
ADDRESS = tl.constexpr(3)  # numbers of one of its tensors: pointer, strides of segment and row
ELEMENTS = 8192  # elements of a tile: 64 registers of float32 a thread


def merge_parts(parts: list[StridedRows], q: Tensor) -> tuple[Tensor, Tensor]:
    """Merge parts of out, in q's dtype, and of lse, float32. Rows that no part holds are 0 and -inf.

    out is shaped like q. A part's out has a last stride of 1, and its rows begin at 16-byte addresses.

    >>> out, lse = merge_parts([], torch.ones(1, 2, 1, 4))
    >>> out.any().item(), lse.tolist()
    (False, [[[-inf, -inf]]])
    """
    batch, rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    _launch(merge_kernel, parts, out, lse)
    return out, lse


def sum_parts(parts: list[StridedRows], x: Tensor) -> Tensor:
    """Sum parts of one tensor in float32, rounded once: shaped like x, stored as for `merge_parts`."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(sum_kernel, parts, total)
    return total


def _launch(kernel: triton.JITFunction, parts: list[StridedRows], result: Tensor, *rest: Tensor) -> None:
    batch, rows, heads, head_dim = result.shape
    table = _table(parts, batch, heads, tensors=1 + len(rest)).to(result.device, non_blocking=True)
    block_d = power_of_2(head_dim)
    block_m = max(1, ELEMENTS // block_d)
    kernel[(batch * heads * triton.cdiv(rows, block_m),)](
        table, result, *rest, len(table), batch, rows, heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=block_m
    )


def _table(parts: list[StridedRows], batch: int, heads: int, tensors: int) -> Tensor:
    # (slots, batch, heads, numbers) int64, pinned where there is a GPU. Slots that a head does not use are zero.
    depth = np.zeros((batch, heads), dtype=np.int64)  # slots taken
    slots = []
    for part in parts:
        used_slots = depth[part.batch, part.heads]
        slots.append(used_slots.max())
        used_slots[:] = slots[-1] + 1
    table = np.zeros((depth.max(), batch, heads, PLACE.value + tensors * ADDRESS.value), dtype=np.int64)
    for slot, part in zip(slots, parts, strict=True):
        numbers = table[slot, part.batch, part.heads]
        sequences, segments, rows, own_heads = part.tensors[0].shape[:4]
        numbers[..., 0] = part.start + np.arange(own_heads) * part.shift
        numbers[..., 1 : PLACE.value] = min(part.segment_length, 2**31 - 1), part.rate, segments, rows
        for n, x in enumerate(part.tensors):
            column = PLACE.value + n * ADDRESS.value
            of_sequence, of_segment, of_row, of_head = x.stride()[:4]
            elements = np.arange(sequences)[:, None] * of_sequence + np.arange(own_heads) * of_head
            numbers[..., column] = x.data_ptr() + elements * x.element_size()
            numbers[..., column + 1 : column + ADDRESS.value] = of_segment, of_row
    table = torch.from_numpy(table)
    return table.pin_memory() if torch.cuda.is_available() else table  # pinned: the host need not wait for the copy


@triton.jit(do_not_specialize=["slots", "batch", "rows", "heads"])
def merge_kernel(
    table, out, lse, slots, batch, rows, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """out (batch, rows, heads, head_dim) and lse (batch, heads, rows) of one tile of rows of one head."""
    b, h, first = _tile(rows, heads, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for slot in range(slots):
        part = table + ((slot * batch + b) * heads + h) * (PLACE + 2 * ADDRESS)
        if _reaches(part, first, BLOCK_M):
            in_part, segment, number = _find(part, row)  # [BLOCK_M] each
            out_rows = _address(part + PLACE, segment, number, out, True)  # [BLOCK_M]
            tile = tl.load(
                out_rows[:, None] + dims[None, :], mask=in_part[:, None] & in_dim, other=0.0
            )  # [BLOCK_M, BLOCK_D]
            lse_rows = _address(part + PLACE + ADDRESS, segment, number, lse, False)  # [BLOCK_M]
            part_lse = tl.load(lse_rows, mask=in_part, other=float("-inf"))  # [BLOCK_M]
            largest = tl.maximum(m, part_lse)  # [BLOCK_M]
            finite = tl.where(largest == float("-inf"), 0.0, largest)  # [BLOCK_M]; -inf minus -inf would be NaN
            weight, decay = tl.exp(part_lse - finite), tl.exp(m - finite)  # [BLOCK_M] each
            total = total * decay + weight  # [BLOCK_M]
            acc = acc * decay[:, None] + weight[:, None] * tile.to(tl.float32)  # [BLOCK_M, BLOCK_D]
            m = largest  # [BLOCK_M]
    denominator = tl.where(total == 0.0, 1.0, total)  # [BLOCK_M]; 0: no keys
    exists = row < rows  # [BLOCK_M]
    result_rows = ((b * rows + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    result = (acc / denominator[:, None]).to(out.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
    tl.store(out + result_rows[:, None] + dims[None, :], result, mask=exists[:, None] & in_dim)
    tl.store(lse + (b * heads + h) * rows + row, m + tl.log(denominator), mask=exists)


@triton.jit(do_not_specialize=["slots", "batch", "rows", "heads"])
def sum_kernel(
    table, total, slots, batch, rows, heads, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """total (batch, rows, heads, head_dim) of one tile of rows of one head."""
    b, h, first = _tile(rows, heads, BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_dim = dims[None, :] < HEAD_DIM  # [1, BLOCK_D]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    for slot in range(slots):
        part = table + ((slot * batch + b) * heads + h) * (PLACE + ADDRESS)
        if _reaches(part, first, BLOCK_M):
            in_part, segment, number = _find(part, row)  # [BLOCK_M] each
            part_rows = _address(part + PLACE, segment, number, total, True)  # [BLOCK_M]
            tile = tl.load(
                part_rows[:, None] + dims[None, :], mask=in_part[:, None] & in_dim, other=0.0
            )  # [BLOCK_M, BLOCK_D]
            acc += tile.to(tl.float32)
    result_rows = ((b * rows + row) * heads + h) * HEAD_DIM  # [BLOCK_M]
    result = acc.to(total.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
    tl.store(total + result_rows[:, None] + dims[None, :], result, mask=(row < rows)[:, None] & in_dim)


@triton.jit
def _tile(rows, heads, BLOCK_M: tl.constexpr):
    """Sequence (int64), head and first row of this program. Neighbouring programs take heads of the same rows."""
    pid = tl.program_id(0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    tile = pid // heads
    return (tile // tiles).to(tl.int64), pid % heads, tile % tiles * BLOCK_M


@triton.jit
def _reaches(part, first, BLOCK_M: tl.constexpr):
    """Whether a part spans any of the rows first to first + BLOCK_M - 1."""
    start = tl.load(part)
    end = start + tl.load(part + 1) * tl.load(part + 3)
    return (start < first + BLOCK_M) & (end > first)


@triton.jit
def _find(part, row):
    """Whether each row is in a part, its segment, and its number in the segment."""
    start = tl.load(part).to(tl.int32)
    segment_length = tl.load(part + 1).to(tl.int32)
    rate = tl.load(part + 2).to(tl.int32)
    segment = (row - start) // segment_length  # [BLOCK_M]
    within = (row - start) % segment_length  # [BLOCK_M]
    number = within // rate  # [BLOCK_M]
    in_part = (
        (row >= start) & (segment < tl.load(part + 3)) & (within % rate == 0) & (number < tl.load(part + 4))
    )  # [BLOCK_M]
    return in_part, segment, number


@triton.jit
def _address(numbers, segment, number, like, ALIGNED: tl.constexpr):
    """Pointers to rows of one tensor of a part, with the element type of `like`."""
    base = tl.load(numbers).to(like.dtype)
    of_segment = tl.load(numbers + 1)
    of_row = tl.load(numbers + 2)
    if ALIGNED:  # without the hint Triton would load one element at a time
        size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
        base = tl.multiple_of(base, 16)
        of_segment = tl.multiple_of(of_segment, 16 // size)
        of_row = tl.multiple_of(of_row, 16 // size)
    return base + segment * of_segment + number * of_row
