"""Rows of several tensors, copied, added or summed by index, in one launch.

Plain torch starts a kernel for each tensor, and two or three where it splits rows and joins them. Tensors are (batch,
rows, heads, head_dim), of any strides. A row of heads is one (row, head) with the number row * heads + head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.attention.triton.geometry import power_of_2
from hilbert_lib.attention.triton.start import Start, start

ELEMENTS = tl.constexpr(2048)  # elements of a tile: 16 a thread
GATHER, SCATTER, ADD = map(tl.constexpr, range(3))
COPIES = 12  # of one launch: six tensors of a backward in each of two borders
SLOTS = 6  # parts of one sum, as many as a box has sides


class Copy(NamedTuple):
    """Rows of heads that lie in order in `dense`, and anywhere in `indexed`."""

    dense: Tensor  # (batch, n, heads, head_dim), the last stride is 1
    indexed: Tensor  # (batch, rows, heads or a multiple, head_dim)
    # int64: (n,) for each row of `dense` where its heads lie, one after the other: row * groups + group, of as many
    # groups of heads as a row of `indexed` has; or (n * heads,) rows of heads. Where these are read beside `other`, -1
    # is zeros, and -2 - m is row m of `other`. Without `other` each is a row: nothing is written for one below 0.
    at: Tensor
    other: Tensor | None = None  # (batch, rows, 1, head_dim)
    through: Tensor | None = None  # int64: then `at` holds places in it, and it what is said of `at`


class Part(NamedTuple):
    """Rows that a sum adds to k and to v, both contiguous (batch, rows, heads, head_dim)."""

    k: Tensor
    v: Tensor
    # (n,) int64: for each row of the sum one of these, or -1 for none; a row of heads where the totals have one head.
    at: Tensor


class Answers(NamedTuple):
    """Rows that a sum adds to rows of heads after its parts."""

    rows: Tensor  # (rows, 2, batch, head_dim), contiguous
    at: Tensor  # (n * heads, columns) int64: for each row of heads some of these, one after the other, or -1 for none


def gather_rows(copies: Sequence[Copy]) -> None:
    """Fill `dense` of each copy."""
    _copy_all(copies, GATHER.value)


def scatter_rows(copies: Sequence[Copy]) -> None:
    """Write `dense` of each copy to `indexed`; no row is named twice."""
    _copy_all(copies, SCATTER.value)


def add_rows(copies: Sequence[Copy]) -> None:
    """Add `dense` of each copy to `indexed`, in the wider of the two dtypes, rounded once; no row is named twice."""
    _copy_all(copies, ADD.value)


def _copy_all(copies: Sequence[Copy], mode: int) -> None:
    copies = [copy for copy in copies if copy.dense.numel()]
    for first in range(0, len(copies), COPIES):
        _copy_some(copies[first : first + COPIES], mode)


def _copy_some(copies: Sequence[Copy], mode: int) -> None:
    tensors = [x for copy in copies for x in copy]
    start(lambda: [_start_of_copies(copies, mode)], tensors, copy_kernel, mode)


def _start_of_copies(copies: Sequence[Copy], mode: int) -> Start:
    block_d = power_of_2(max(copy.dense.shape[3] for copy in copies))
    named, tiles = {"MODE": mode, "BLOCK_D": block_d}, 0
    for n in range(COPIES):
        copy = copies[n] if n < len(copies) else None
        arguments = (None,) * 6 + (1,) if copy is None else (*copy, _sizes(copy), copy.dense.shape[3])
        names = ("dense", "indexed", "table", "other", "through", "sizes", "HEAD_DIM")
        named |= {f"{name}{n}": x for name, x in zip(names, arguments, strict=True)}
        if copy is not None:
            _, rows, heads, head_dim = copy.dense.shape
            tiles += _tiles(rows * heads, block_d if head_dim > 1 else 1)
    return Start(copy_kernel, (tiles, copies[0].dense.shape[0]), (named.pop("dense0"),), named)


def _sizes(copy: Copy) -> tuple[int, ...]:
    # Rows of heads and heads of `dense`, then the factors of `_copy` for each of the tensors.
    dense, indexed, index, other, _ = copy
    _, n, heads, _ = dense.shape
    by_row = index.numel() == n  # then one number says where all heads of a row are
    table = (1, 0) if by_row else (heads, 1)
    own_heads = indexed.shape[2] // (heads if by_row else 1)
    steps = (own_heads, heads * indexed.stride(2), indexed.stride(2)) if by_row else (own_heads, indexed.stride(2), 0)
    other_strides = (0, 0, 0) if other is None else (other.stride(0), other.stride(1), other.stride(3))
    indexed_strides = indexed.stride(0), indexed.stride(1), indexed.stride(3)
    return n * heads, heads, *table, *dense.stride()[:3], *indexed_strides, *steps, *other_strides


def _tiles(rows: int, block_d: int) -> int:
    return triton.cdiv(rows, ELEMENTS.value // block_d)


def sum_rows(
    totals: tuple[Tensor, Tensor], at: Tensor | None, parts: Sequence[Part], answers: Answers | None = None
) -> None:
    """Sum rows of k and v in one order, rounded once: parts, then answers, then the values of the totals.

    totals: (batch, rows, heads, head_dim), of any strides but the last one, which is 1. at: (n,) int64, the rows that
    are added to, none twice; or None where the totals are all rows and have no values yet. Parts and answers are of one
    dtype, that of the sums.
    """
    if not (totals[0].shape[1] if at is None else len(at)):
        return
    tensors = *totals, at, *(x for part in parts for x in part), *(answers or (None, None))
    start(lambda: [_start_of_sum(totals, at, parts, answers)], tensors, sum_kernel)


def _start_of_sum(
    totals: tuple[Tensor, Tensor], places: Tensor | None, parts: Sequence[Part], answers: Answers | None
) -> Start:
    total, total_v = totals
    batch, rows, heads, head_dim = total.shape
    rows = rows if places is None else len(places)
    named = {"total_v": total_v, "places": places, "HEAD_DIM": head_dim, "BLOCK_D": power_of_2(head_dim)}
    lengths = [part.k.shape[1] * part.k.shape[2] for part in parts] + [0] * (SLOTS - len(parts))
    for n in range(SLOTS):
        part = parts[n] if n < len(parts) else (None, None, None)
        named |= {f"{name}{n}": x for name, x in zip(("k", "v", "table"), part, strict=True)}
    answer_rows, columns = answers or (None, None)
    named |= {"answers": answer_rows, "columns": columns, "count": 0 if columns is None else columns.shape[1]}
    named |= {"sizes": (rows * heads, heads, batch, *total.stride()[:3]), "lengths": tuple(lengths)}
    named["like"] = parts[0].k if parts else answer_rows
    return Start(sum_kernel, (_tiles(rows * heads, named["BLOCK_D"]), batch), (total,), named)


@triton.jit
def copy_kernel(
    dense0, indexed0, table0, other0, through0, sizes0, dense1, indexed1, table1, other1, through1, sizes1,
    dense2, indexed2, table2, other2, through2, sizes2, dense3, indexed3, table3, other3, through3, sizes3,
    dense4, indexed4, table4, other4, through4, sizes4, dense5, indexed5, table5, other5, through5, sizes5,
    dense6, indexed6, table6, other6, through6, sizes6, dense7, indexed7, table7, other7, through7, sizes7,
    dense8, indexed8, table8, other8, through8, sizes8, dense9, indexed9, table9, other9, through9, sizes9,
    dense10, indexed10, table10, other10, through10, sizes10, dense11, indexed11, table11, other11, through11, sizes11,
    MODE: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM0: tl.constexpr, HEAD_DIM1: tl.constexpr,
    HEAD_DIM2: tl.constexpr, HEAD_DIM3: tl.constexpr, HEAD_DIM4: tl.constexpr,
    HEAD_DIM5: tl.constexpr, HEAD_DIM6: tl.constexpr, HEAD_DIM7: tl.constexpr,
    HEAD_DIM8: tl.constexpr, HEAD_DIM9: tl.constexpr, HEAD_DIM10: tl.constexpr,
    HEAD_DIM11: tl.constexpr,
):  # fmt: skip
    """One tile of rows of heads of one of the copies."""
    tile = _copy(tl.program_id(0), dense0, indexed0, table0, other0, through0, sizes0, MODE, HEAD_DIM0, BLOCK_D)
    if dense1 is not None:
        tile = _copy(tile, dense1, indexed1, table1, other1, through1, sizes1, MODE, HEAD_DIM1, BLOCK_D)
    if dense2 is not None:
        tile = _copy(tile, dense2, indexed2, table2, other2, through2, sizes2, MODE, HEAD_DIM2, BLOCK_D)
    if dense3 is not None:
        tile = _copy(tile, dense3, indexed3, table3, other3, through3, sizes3, MODE, HEAD_DIM3, BLOCK_D)
    if dense4 is not None:
        tile = _copy(tile, dense4, indexed4, table4, other4, through4, sizes4, MODE, HEAD_DIM4, BLOCK_D)
    if dense5 is not None:
        tile = _copy(tile, dense5, indexed5, table5, other5, through5, sizes5, MODE, HEAD_DIM5, BLOCK_D)
    if dense6 is not None:
        tile = _copy(tile, dense6, indexed6, table6, other6, through6, sizes6, MODE, HEAD_DIM6, BLOCK_D)
    if dense7 is not None:
        tile = _copy(tile, dense7, indexed7, table7, other7, through7, sizes7, MODE, HEAD_DIM7, BLOCK_D)
    if dense8 is not None:
        tile = _copy(tile, dense8, indexed8, table8, other8, through8, sizes8, MODE, HEAD_DIM8, BLOCK_D)
    if dense9 is not None:
        tile = _copy(tile, dense9, indexed9, table9, other9, through9, sizes9, MODE, HEAD_DIM9, BLOCK_D)
    if dense10 is not None:
        tile = _copy(tile, dense10, indexed10, table10, other10, through10, sizes10, MODE, HEAD_DIM10, BLOCK_D)
    if dense11 is not None:
        tile = _copy(tile, dense11, indexed11, table11, other11, through11, sizes11, MODE, HEAD_DIM11, BLOCK_D)


@triton.jit
def _copy(
    tile, dense, indexed, table, other, through, sizes,
    MODE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a tile if it is one of this copy's. The result is its number among the tiles of the copies that follow."""
    BLOCK_D: tl.constexpr = BLOCK if HEAD_DIM > 1 else 1
    BLOCK_M: tl.constexpr = ELEMENTS // BLOCK_D
    (
        rows, heads, table_row, table_head, dense_batch, dense_row, dense_head, own_batch, own_row, own_dim,
        own_heads, own_head, all_heads, other_batch, other_row, other_dim,
    ) = sizes  # fmt: skip
    tiles = tl.cdiv(rows, BLOCK_M)
    if (tile >= 0) & (tile < tiles):
        b = tl.program_id(1).to(tl.int64)
        number = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        exists = number < rows  # [BLOCK_M]
        row, head = number // heads, number % heads  # [BLOCK_M] each
        entry = tl.load(table + row * table_row + head * table_head, mask=exists, other=-1)  # [BLOCK_M]
        if through is not None:
            entry = tl.load(through + entry, mask=exists, other=-1)  # [BLOCK_M]
        entry = entry.to(tl.int32)  # [BLOCK_M]
        found_row, found_head = (entry // own_heads).to(tl.int64), (entry % own_heads).to(tl.int64)  # [BLOCK_M] each
        row, head, entry = row.to(tl.int64), head.to(tl.int64), entry.to(tl.int64)  # [BLOCK_M] each
        dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
        is_own = inside & (entry >= 0)[:, None]  # [BLOCK_M, BLOCK_D]
        dense_at = dense + (b * dense_batch + row * dense_row + head * dense_head)[:, None] + dims  # [BLOCK_M, BLOCK_D]
        place = found_row * own_row + found_head * own_head + head * all_heads  # [BLOCK_M]
        indexed_at = indexed + (b * own_batch + place)[:, None] + dims * own_dim  # [BLOCK_M, BLOCK_D]
        if MODE != GATHER:
            rows_tile = tl.load(dense_at, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
            if MODE == ADD:
                rows_tile += tl.load(indexed_at, mask=inside, other=0.0)
            tl.store(indexed_at, rows_tile.to(indexed.dtype.element_ty), mask=inside)
        else:
            tl.store(dense_at, tl.load(indexed_at, mask=is_own, other=0.0), mask=is_own)
            if other is not None:
                other_at = (
                    other + (b * other_batch - (entry + 2) * other_row)[:, None] + dims * other_dim
                )  # [BLOCK_M, BLOCK_D]
                other_tile = tl.load(other_at, mask=inside & (entry < -1)[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
                tl.store(dense_at, other_tile, mask=inside & (entry < 0)[:, None])
    return tile - tiles


@triton.jit
def sum_kernel(
    total, total_v, places, like, k0, v0, table0, k1, v1, table1, k2, v2, table2, k3, v3, table3, k4, v4, table4,
    k5, v5, table5, answers, columns, count, sizes, lengths, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of rows of heads of the sums of k and of v, added in the dtype of `like`."""
    BLOCK_M: tl.constexpr = ELEMENTS // BLOCK_D
    rows, heads, batch, total_batch, total_row, total_head = sizes
    number = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    exists = number < rows  # [BLOCK_M]
    for n in tl.static_range(2):
        acc = tl.zeros([BLOCK_M, BLOCK_D], like.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
        if table0 is not None:
            acc = _plus(
                acc, k0 if n == 0 else v0, table0, lengths[0], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        if table1 is not None:
            acc = _plus(
                acc, k1 if n == 0 else v1, table1, lengths[1], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        if table2 is not None:
            acc = _plus(
                acc, k2 if n == 0 else v2, table2, lengths[2], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        if table3 is not None:
            acc = _plus(
                acc, k3 if n == 0 else v3, table3, lengths[3], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        if table4 is not None:
            acc = _plus(
                acc, k4 if n == 0 else v4, table4, lengths[4], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        if table5 is not None:
            acc = _plus(
                acc, k5 if n == 0 else v5, table5, lengths[5], heads, number, exists, HEAD_DIM, BLOCK_D
            )  # [BLOCK_M, BLOCK_D]
        b, dims = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)  # scalar, [BLOCK_D]
        if columns is not None:
            for column in range(count):
                entry = tl.load(columns + number.to(tl.int64) * count + column, mask=exists, other=-1)  # [BLOCK_M]
                answers_at = answers + (((entry * 2 + n) * batch + b) * HEAD_DIM)[:, None] + dims  # [BLOCK_M, BLOCK_D]
                acc += tl.load(answers_at, mask=(entry >= 0)[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        row, head = (number // heads).to(tl.int64), (number % heads).to(tl.int64)  # [BLOCK_M] each
        if places is not None:
            row = tl.load(places + row, mask=exists, other=0)  # [BLOCK_M]
        target = total if n == 0 else total_v
        target_ptrs = (
            target + (b * total_batch + row * total_row + head * total_head)[:, None] + dims
        )  # [BLOCK_M, BLOCK_D]
        inside = exists[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
        if places is not None:
            acc += tl.load(target_ptrs, mask=inside, other=0.0).to(acc.dtype)
        tl.store(target_ptrs, acc.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _plus(acc, part, table, length, heads, number, exists, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum after a part's rows."""
    entry = tl.load(table + number // heads, mask=exists, other=-1)  # [BLOCK_M]
    place = tl.program_id(1).to(tl.int64) * length + entry * heads + number % heads  # [BLOCK_M]
    dims = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (entry >= 0)[:, None] & (dims < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    return acc + tl.load(part + (place * HEAD_DIM)[:, None] + dims, mask=mask, other=0.0)
