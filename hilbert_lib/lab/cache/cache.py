"""Which sectors, lines and pages a branch of dilated attention touches when k and v are stored in some order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

SECTOR_BYTES = 32  # the least that an NVIDIA GPU's L2 sends to an L1
# What a miss in L2 brings from memory: two sectors, the granularity at which CUDA's L2 fetches by default (a device's
# limit cudaLimitMaxL2FetchGranularity may make it 32 or 128).
FETCH_BYTES = 64
LINE_BYTES = 128  # four sectors under one tag
LAYOUTS = ("bshd", "bhsd")
KEY_ORDERS = ("storage", "position")


@dataclass(frozen=True)
class Storage:
    """Where the rows of k lie in memory; v lies behind k in the same way, and each batch element repeats this.

    Args:
        ordering: the order in which positions are stored.
        row_bytes: bytes of one head's row, head_dim times the bytes of an element.
        heads: KV heads.
        layout: "bshd" for (batch, seq, heads, dim), where the heads of a token lie side by side; "bhsd" for
            (batch, heads, seq, dim), where the tokens of a head do.

    Raises:
        ValueError: where row_bytes or heads is below 1, or the layout is unknown.

    >>> storage = Storage(Ordering.residue(8, 2), row_bytes=16, heads=4)
    >>> storage.addresses(torch.tensor([0, 2, 1]), head=1).tolist()
    [16, 80, 272]
    """

    ordering: Ordering
    row_bytes: int
    heads: int = 1
    layout: str = "bshd"

    def __post_init__(self) -> None:
        check_positive(row_bytes=self.row_bytes, heads=self.heads)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {self.layout!r}")

    @property
    def length(self) -> int:
        """Positions stored."""
        return self.ordering.length

    @property
    def tensor_bytes(self) -> int:
        """Bytes of k, and of v, for one batch element."""
        return self.length * self.heads * self.row_bytes

    def addresses(self, positions: Tensor, head: int) -> Tensor:
        """The first byte of the rows of one head, counted from the start of k.

        Args:
            positions: int64, any shape, on the ordering's device.
            head: which KV head, 0 to heads - 1.

        Returns:
            int64, shaped like positions.

        Raises:
            ValueError: if there is no such head.
        """
        if not 0 <= head < self.heads:
            raise ValueError(f"head must be from 0 to {self.heads - 1}, got {head}")
        slots = self.ordering.inverse[positions]
        if self.layout == "bshd":
            return (slots * self.heads + head) * self.row_bytes
        return (head * self.length + slots) * self.row_bytes


@dataclass(frozen=True)
class BranchRows:
    """The key rows that one head reads through one branch, in the order in which a kernel reads them.

    Attributes:
        positions: (rows,) int64, segment after segment.
        segments: (rows,) int64, the segment of each row.
        tiles: (rows,) int64, the key tile of each row, counted from 0 in every segment.
    """

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
    """The rows of a branch in reading order, cut into a kernel's key tiles.

    Args:
        storage: where the rows lie.
        pattern: which rows a branch has.
        branch, head: which branch, for which KV head.
        tile_keys: rows a tile; the last tile of a segment may have fewer.
        key_order: "storage" reads the keys of a segment in the order in which they are stored, which is every
            ordering's best case and leaves a softmax as it was; "position" reads them in the sequence's order.

    Raises:
        ValueError: where tile_keys is below 1 or key_order is unknown.

    >>> rows = branch_rows(Storage(Ordering.linear(8), 16), DilatedPattern((4,), (2,)), tile_keys=1)
    >>> rows.positions.tolist(), rows.segments.tolist(), rows.tiles.tolist()
    ([0, 2, 4, 6], [0, 0, 1, 1], [0, 1, 0, 1])
    """
    check_positive(tile_keys=tile_keys)
    if key_order not in KEY_ORDERS:
        raise ValueError(f"key_order must be one of {KEY_ORDERS}, got {key_order!r}")
    every = torch.arange(storage.length, device=storage.ordering.device)
    positions = every[pattern.contains(branch, every, head, storage.heads)]
    segments = positions // pattern.segment_lengths[branch]
    if key_order == "storage":
        slots = storage.ordering.inverse[positions]
        positions = positions[(segments * storage.length + slots).argsort()]  # segments stay where they are
    first = torch.searchsorted(segments, segments)  # the first row of each row's segment
    return BranchRows(positions, segments, (torch.arange(len(positions), device=first.device) - first) // tile_keys)


def row_units(addresses: Tensor, row_bytes: int, unit_bytes: int) -> tuple[Tensor, Tensor]:
    """Every unit (sector, line or page) that each row overlaps.

    Args:
        addresses: (rows,) int64, first bytes.
        row_bytes: bytes a row.
        unit_bytes: bytes a unit; units start at multiples of it.

    Returns:
        units and rows, both (overlaps,) int64: row `rows[i]` overlaps unit `units[i]`, rows ascending.

    Raises:
        ValueError: where row_bytes or unit_bytes is below 1.

    >>> [t.tolist() for t in row_units(torch.tensor([0, 24]), row_bytes=16, unit_bytes=32)]
    [[0, 0, 1], [0, 1, 1]]
    """
    check_positive(row_bytes=row_bytes, unit_bytes=unit_bytes)
    first = addresses // unit_bytes
    count = (addresses + row_bytes - 1) // unit_bytes - first + 1
    rows = torch.arange(len(addresses), device=addresses.device).repeat_interleave(count)
    within = torch.arange(len(rows), device=addresses.device) - (count.cumsum(0) - count)[rows]
    return first[rows] + within, rows


def units_touched(addresses: Tensor, row_bytes: int, unit_bytes: int) -> int:
    """How many different units a set of rows touches: what memory must deliver at least once.

    >>> units_touched(torch.tensor([0, 16, 256]), row_bytes=16, unit_bytes=32)
    2
    """
    return row_units(addresses, row_bytes, unit_bytes)[0].unique().numel()


def tile_requests(addresses: Tensor, tiles: Tensor, row_bytes: int, unit_bytes: int) -> tuple[Tensor, Tensor]:
    """Which units each tile requests, each once; a unit shared by two tiles is requested by both.

    Args:
        addresses: (rows,) int64, first bytes.
        tiles: (rows,) int64, the tile of each row, from 0.
        row_bytes, unit_bytes: as in `row_units`.

    Returns:
        tiles and units, both (requests,) int64: tile `tiles[i]` requests unit `units[i]`, ascending.

    >>> tiles, units = tile_requests(torch.tensor([0, 16, 32, 256]), torch.tensor([0, 0, 1, 1]), 16, 64)
    >>> tiles.tolist(), units.tolist()
    ([0, 1, 1], [0, 0, 4])
    """
    units, rows = row_units(addresses, row_bytes, unit_bytes)
    span = int(units.max()) + 1
    requests = (tiles[rows] * span + units).unique()
    return requests // span, requests % span


def check_positive(**values: int) -> None:
    """Raise ValueError for a named value below 1."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
