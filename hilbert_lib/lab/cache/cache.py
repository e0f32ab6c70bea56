"""Sectors, lines and pages that a branch of dilated attention touches when k and v are stored in some order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

SECTOR_BYTES = 32  # the least that an NVIDIA GPU's L2 sends to an L1
# What a miss in L2 brings from memory: two sectors, CUDA's default (cudaLimitMaxL2FetchGranularity: 32, 64 or 128).
FETCH_BYTES = 64
LINE_BYTES = 128  # four sectors under one tag
LAYOUTS = ("bshd", "bhsd")
KEY_ORDERS = ("storage", "position")


@dataclass(frozen=True)
class Storage:
    """Place of the rows of k in memory; v lies behind k in the same way.

    row_bytes: of one head's row. layout: "bshd" where the heads of a token lie side by side, "bhsd" where the tokens of
    a head do.
    """

    ordering: Ordering
    row_bytes: int
    heads: int = 1
    layout: str = "bshd"

    @property
    def length(self) -> int:
        """Positions stored."""
        return self.ordering.length

    def addresses(self, positions: Tensor, head: int) -> Tensor:
        """The first byte of the rows of one head, counted from the start of k."""
        slots = self.ordering.inverse[positions]
        if self.layout == "bshd":
            return (slots * self.heads + head) * self.row_bytes
        return (head * self.length + slots) * self.row_bytes


@dataclass(frozen=True)
class BranchRows:
    """The key rows that one head reads through one branch, in order, and the segment and tile (in it) of each."""

    positions: Tensor
    segments: Tensor
    tiles: Tensor


def branch_rows(
    storage: Storage,
    pattern: DilatedPattern,
    *,
    branch: int = 0,
    head: int = 0,
    tile_keys: int = 64,
    key_order: str = "storage",
) -> BranchRows:
    """The rows of a branch in reading order, cut into tiles of `tile_keys` rows.

    key_order: "storage", every ordering's best case, or "position", the sequence's; a softmax does not depend on it.
    """
    positions = torch.arange(storage.length, device=storage.ordering.device)
    positions = positions[pattern.contains(branch, positions, head, storage.heads)]
    segments = positions // pattern.segment_lengths[branch]
    if key_order == "storage":
        slots = storage.ordering.inverse[positions]
        positions = positions[(segments * storage.length + slots).argsort()]  # segments stay where they are
    first = torch.searchsorted(segments, segments)  # the first row of each row's segment
    return BranchRows(positions, segments, (torch.arange(len(positions), device=first.device) - first) // tile_keys)


def row_units(addresses: Tensor, row_bytes: int, unit_bytes: int) -> tuple[Tensor, Tensor]:
    """Every unit (sector, line or page) that each row overlaps: `rows[i]` overlaps `units[i]`, rows ascending."""
    first = addresses // unit_bytes
    count = (addresses + row_bytes - 1) // unit_bytes - first + 1
    rows = torch.arange(len(addresses), device=addresses.device).repeat_interleave(count)
    within = torch.arange(len(rows), device=addresses.device) - (count.cumsum(0) - count)[rows]
    return first[rows] + within, rows


def units_touched(addresses: Tensor, row_bytes: int, unit_bytes: int) -> int:
    """Number of different units that a set of rows touches."""
    return row_units(addresses, row_bytes, unit_bytes)[0].unique().numel()


def tile_requests(addresses: Tensor, tiles: Tensor, row_bytes: int, unit_bytes: int) -> tuple[Tensor, Tensor]:
    """Units that each tile requests, each once: (tiles, units), ascending."""
    units, rows = row_units(addresses, row_bytes, unit_bytes)
    span = int(units.max()) + 1
    requests = (tiles[rows] * span + units).unique()
    return requests // span, requests % span
