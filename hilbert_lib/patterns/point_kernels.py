"""The kernel that finds which points see each other: a GPU makes packed lists of a million points with it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hilbert_lib.patterns.packed_lists import BLOCK


def met(
    keys: Tensor, least: Tensor, largest: Tensor, query_count: int, key_count: int, query_blocks: Tensor,
    key_blocks: Tensor,
) -> Tensor:  # fmt: skip
    """Keys of a block that any query of another sees: (pairs, 64) bool.

    Args:
        keys: (axes, key places) int32, cells in the order of work.
        least, largest: (axes, query places) int32, the least and the largest cell that each query sees.
        query_count, key_count: further places hold nobody.
        query_blocks, key_blocks: (pairs,) int64.
    """
    seen = torch.empty(len(query_blocks), BLOCK, dtype=torch.bool, device=keys.device)
    _launch(keys, least, largest, query_count, key_count, query_blocks, key_blocks, seen)
    return seen


def words(
    keys: Tensor, least: Tensor, largest: Tensor, query_count: int, key_count: int, tile_blocks: Tensor,
    tile_places: Tensor,
) -> Tensor:  # fmt: skip
    """Keys of a tile that each query of its block sees: (tiles, 64) int64, a bit for each key.

    Args:
        keys, least, largest, query_count, key_count: as for `met`.
        tile_blocks: (tiles,) int64, the block of each tile.
        tile_places: (tiles, 64) int64, the places of its keys, -1 for none.
    """
    bits = torch.empty(len(tile_blocks), BLOCK, dtype=torch.int64, device=keys.device)
    _launch(keys, least, largest, query_count, key_count, tile_blocks, tile_places, bits)
    return bits


def _launch(
    keys: Tensor, least: Tensor, largest: Tensor, query_count: int, key_count: int, query_blocks: Tensor,
    key_places: Tensor, out: Tensor,
) -> None:  # fmt: skip
    if not len(out):
        return
    with torch.cuda.device_of(out):
        seen_kernel[(len(out),)](
            keys, least, largest, query_blocks, key_places, out,
            query_count, key_count, least.shape[1], keys.shape[1],
            AXES=len(keys), BLOCK=BLOCK, WORDS=out.dtype == torch.int64, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["query_count", "key_count", "query_stride", "key_stride"])
def seen_kernel(
    keys, least, largest, query_blocks, key_places, out, query_count, key_count, query_stride, key_stride,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Keys of a block that any query of a block sees; with WORDS, keys of a tile that each query sees."""
    number = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)  # [BLOCK]
    query = tl.load(query_blocks + number) * BLOCK + cols  # [BLOCK]
    key = key_places + number * BLOCK + cols  # [BLOCK]
    key = tl.load(key) if WORDS else tl.load(key_places + number) * BLOCK + cols  # [BLOCK]
    is_query, is_key = query < query_count, (key >= 0) & (key < key_count)  # [BLOCK] each
    seen = is_query[:, None] & is_key[None, :]  # [BLOCK, BLOCK]
    for axis in tl.static_range(AXES):
        cell = tl.load(keys + axis * key_stride + key, mask=is_key, other=0)  # [BLOCK]
        first = tl.load(least + axis * query_stride + query, mask=is_query, other=0)  # [BLOCK]
        last = tl.load(largest + axis * query_stride + query, mask=is_query, other=0)  # [BLOCK]
        seen &= (cell[None, :] >= first[:, None]) & (cell[None, :] <= last[:, None])
    if WORDS:
        bits = seen.to(tl.int64) << cols[None, :].to(tl.int64)  # [BLOCK, BLOCK]
        tl.store(out + number * BLOCK + cols, tl.sum(bits, 1))
    else:
        tl.store(out + number * BLOCK + cols, tl.max(seen.to(tl.int32), 0) != 0)
