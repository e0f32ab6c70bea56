"""Packed documents: several in one row of q, k and v, each attended to by itself, one after the other."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hilbert_lib.attention.dropout import NAME, Branch, name_table, named
from hilbert_lib.attention.request import Request
from hilbert_lib.checks import dense_tensor, integer
from hilbert_lib.internals import assert_async

LOOPED = "attends to one document after the other; the host waits for the device to tell their lengths"


def check_documents(q: Tensor, cu_seqlens: object, max_seqlen: object, **excluded: object) -> int | None:
    """max_seqlen, if the documents of q are described as `dilated_attention` takes them, without these other options.

    Values on the device are not read: `lengths_of` checks them.
    """
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"max_seqlen must be None without cu_seqlens, got {max_seqlen!r}")
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor or None, got {got}")
    dense_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens must be (documents + 1,), got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q ({q.device}), got {cu_seqlens.device}")
    if q.shape[0] != 1:
        raise ValueError(f"q must have a batch of 1 with cu_seqlens, got {q.shape[0]}")
    for name, value in excluded.items():
        if value is not None:
            got = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be None with cu_seqlens, got {got}")
    return None if max_seqlen is None else integer("max_seqlen", max_seqlen, least=1)


def rows_of(cu_seqlens: Tensor, total: int, max_seqlen: int | None = None) -> list[slice]:
    """The rows of each document; the host waits for the device.

    >>> rows_of(torch.tensor([0, 3, 3]), 3)
    [slice(0, 3, None), slice(3, 3, None)]
    """
    ends = cu_seqlens.tolist()
    rows = [slice(*pair) for pair in itertools.pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total or any(document.start > document.stop for document in rows):
        raise ValueError(f"cu_seqlens must begin with 0, never fall and end with q's length {total}, got {_some(ends)}")
    longest = max((document.stop - document.start for document in rows), default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen must be at least the length of every document, {longest}, got {max_seqlen}")
    return rows


def check_rows(cu_seqlens: Tensor, total: int, max_seqlen: int | None) -> None:
    """The checks of `rows_of` without a wait: a GPU stops at the first fault, and later calls of CUDA raise."""
    if cu_seqlens.device.type == "cpu" or len(cu_seqlens) == 1:  # no document: none has a length to look up
        rows_of(cu_seqlens, total, max_seqlen)
        return
    lengths = cu_seqlens.diff()
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & (lengths.amin() >= 0)
    assert_async(right, f"cu_seqlens must begin with 0, never fall and end with q's length {total}")
    if max_seqlen is not None:
        assert_async(lengths.amax() <= max_seqlen, "max_seqlen must be at least the length of every document")


def places_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(total,) int64 each: the place of every row in its document, and the length of that; no wait.

    >>> places_of(torch.tensor([0, 3, 3, 4]), 4)
    (tensor([0, 1, 2, 0]), tensor([3, 3, 3, 1]))
    """
    ends = cu_seqlens.long()
    row = torch.arange(total, device=ends.device)
    document = torch.searchsorted(ends[1:], row, right=True)
    return row - ends[document], ends.diff()[document]


def _some(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{str(numbers[:4])[:-1]}, ..., {str(numbers[-4:])[1:]}"


def documents(call: Request, q: Tensor, kv_heads: int) -> Iterator[tuple[slice, Request]]:
    """The rows of each document and the call that it is by itself. Dropout is that of a batch of them."""
    heads = torch.arange(q.shape[2], device=q.device)
    branches = [Branch(part, *call.pattern.branch_of(part)) for part in range(call.pattern.part_count(kv_heads))]
    for number, rows in enumerate(rows_of(call.cu_seqlens, q.shape[1], call.max_seqlen)):
        if rows.start == rows.stop:
            continue
        seed = call.seed
        if seed is not None:
            names = torch.tensor([number, 0, 1, 0, 0, 0, 0], device=q.device).repeat(1, len(heads), 1)
            names[..., 1] = heads
            seed = named(seed, name_table(names.view(1, -1, NAME), branches))
        yield rows, replace(call, cu_seqlens=None, max_seqlen=None, seed=seed)
