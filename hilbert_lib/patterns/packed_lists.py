"""Packed lists: for each block of 64 queries the rows of all keys that any of them sees, and who sees whom.

    block 0   query_rows[0:64]     tiles starts[0] .. starts[1] - 1
    tile t    key_rows[t]          64 rows of k, -1 for none
              words[t, i]          bit j: whether query i of the block sees key j of the tile

A kernel that reads lists knows no geometry: rows by number, and words.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

BLOCK = 64  # queries of a block, and keys of a tile: a word has so many bits
BLOCKS_AT_ONCE = 2**12  # whose words are taken apart together


@dataclass(frozen=True, eq=False, repr=False)
class PackedLists:
    """The pairs of a query and a key that attend, as kernels read them. For dk and dv queries and keys change places.

    >>> lists = PackedLists.from_mask(torch.tensor([[True, False], [True, True]]))
    >>> lists.key_rows[0, :3].tolist(), lists.words[0, :3].tolist()
    ([0, 1, -1], [1, 3, 0])
    """

    query_rows: Tensor  # (blocks * 64,) int32: the row of q of each query of a block, -1 past the end
    starts: Tensor  # (blocks + 1,) int32: the first tile of each block, and the end
    # (tiles, 64) int32: rows of k and v, -1 for none. Within a block each occurs once, of a union once a pattern.
    key_rows: Tensor
    words: Tensor  # (tiles, 64) int64, by query of the block: bit j says whether it sees the tile's key j
    queries: int  # rows of q
    keys: int  # rows of k

    def __repr__(self) -> str:
        return f"PackedLists({self.queries} queries, {self.keys} keys, {self.tiles} tiles)"

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four arrays."""
        return self.query_rows, self.starts, self.key_rows, self.words

    @property
    def blocks(self) -> int:
        """Number of blocks of queries."""
        return len(self.starts) - 1

    @property
    def tiles(self) -> int:
        """Number of tiles of keys."""
        return len(self.key_rows)

    @cached_property
    def tile_blocks(self) -> Tensor:
        """The block of each tile: (tiles,) int64."""
        number = torch.arange(self.blocks, device=self.starts.device)
        return number.repeat_interleave(self.starts.diff().long(), output_size=self.tiles)

    @cached_property
    def pairs(self) -> int:
        """Number of pairs that attend."""
        return sum(int(_bits(words).sum()) for words in self.words.split(BLOCKS_AT_ONCE))

    def attends(self, tiles: slice | Tensor = slice(None)) -> Tensor:
        """Whether each query of a tile's block sees each key of some tiles: (tiles, 64, 64) bool."""
        return _bits(self.words[tiles])

    def keys_of(self, query: int) -> Tensor:
        """The rows of k that a query sees: (n,) int64, ascending."""
        block, number = divmod(int((self.query_rows == query).nonzero()[0]), BLOCK)
        first, last = self.starts[block : block + 2].tolist()
        seen = _bits(self.words[first:last, number])
        return self.key_rows[first:last][seen].long().sort().values

    @property
    def mask(self) -> Tensor:
        """Whether each row of q sees each row of k: (queries, keys) bool, memory of queries * keys."""
        mask = torch.zeros(self.queries + 1, self.keys + 1, dtype=torch.bool, device=self.words.device)
        # Rows past the end, which nobody sees, lie in a last row and a last column, which are cut off.
        query_rows = self.query_rows.view(-1, BLOCK)[self.tile_blocks].long()
        mask[query_rows[:, :, None], self.key_rows[:, None].long()] = self.attends()
        return mask[:-1, :-1]

    def to(self, device: torch.device) -> Self:
        """The lists on a device."""
        return type(self)(*(x.to(device) for x in self.tensors), self.queries, self.keys)

    @classmethod
    def from_mask(cls, mask: Tensor, query_order: Tensor | None = None, key_order: Tensor | None = None) -> Self:
        """The lists of a mask (queries, keys) bool.

        query_order, key_order: (queries,) and (keys,) int64, the row at each place; by default in order of rows.
        """
        (queries, keys), device = mask.shape, mask.device
        query_order = torch.arange(queries, device=device) if query_order is None else query_order
        key_order = torch.arange(keys, device=device) if key_order is None else key_order
        query_rows = torch.nn.functional.pad(query_order, (0, -queries % BLOCK), value=-1)
        ordered = torch.nn.functional.pad(mask[query_order][:, key_order], (0, 0, 0, -queries % BLOCK))
        by_block = ordered.unflatten(0, (len(query_rows) // BLOCK, BLOCK))
        block, place = by_block.any(1).nonzero(as_tuple=True)
        tile_blocks, starts, tile_places = tiles_of(block, place, len(by_block))
        seen = by_block[tile_blocks[:, None], :, tile_places.clamp(min=0)] & (tile_places >= 0)[:, :, None]
        key_rows = key_order[tile_places.clamp(min=0)].where(tile_places >= 0, -1)
        return cls(query_rows.int(), starts, key_rows.int(), words_of(seen.mT), queries, keys)


def both_ways(tensors: tuple[Tensor, ...], queries: int, keys: int) -> tuple[PackedLists, PackedLists]:
    """The lists of the keys that queries see, and of the queries that see keys.

    tensors: four arrays where the two are the same lists, otherwise eight. queries, keys: rows of q and of k.
    """
    lists = PackedLists(*tensors[:4], queries, keys)
    return lists, PackedLists(*tensors[4:], keys, queries) if len(tensors) > 4 else lists


def tiles_of(block: Tensor, place: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of blocks packed in tiles of 64.

    Args:
        block, place: (n,) int64, the block and the place in the order of keys of each, by block and then by place.
        blocks: how many there are.

    Returns:
        the block of each tile (tiles,) int64, the first tile of each block (blocks + 1,) int32, and the places of each
        tile's keys (tiles, 64) int64, -1 for none.
    """
    keys = torch.bincount(block, minlength=blocks)
    tiles = (keys + BLOCK - 1) // BLOCK
    starts = torch.nn.functional.pad(tiles.cumsum(0), (1, 0))
    ahead = keys.cumsum(0) - keys  # keys of the blocks before
    to = starts[:-1][block] * BLOCK + torch.arange(len(block), device=block.device) - ahead[block]
    tile_places = place.new_full((int(starts[-1]), BLOCK), -1)
    tile_places.view(-1)[to] = place
    tile_blocks = torch.arange(blocks, device=block.device).repeat_interleave(tiles)
    return tile_blocks, starts.int(), tile_places


def words_of(attends: Tensor) -> Tensor:
    """One word of 64 bits for each query: (...) int64 of (..., 64) bool, by key."""
    shifts = torch.arange(8, dtype=torch.uint8, device=attends.device)
    by_byte = attends.view(torch.uint8).unflatten(-1, (8, 8)) << shifts
    return by_byte.sum(-1, dtype=torch.uint8).view(torch.int64)[..., 0]


def _bits(words: Tensor) -> Tensor:
    # The inverse of `words_of`: (..., 64) bool. By bytes, the lowest first, it takes an eighth of the memory.
    by_byte = words[..., None].view(torch.uint8)[..., None] >> torch.arange(8, dtype=torch.uint8, device=words.device)
    return (by_byte & 1).flatten(-2).bool()
