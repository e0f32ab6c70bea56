"""Points that are spread over ranks: which rows of k and v each rank needs of the others, found from the cells.

bounds      the least and the largest cell of all ranks
boxes       what each 64 queries of a rank reach, sent to all: half a byte for each point
candidates  the cells of a rank that lie in a box of another, sent to that one
seen        which candidates any query there sees, sent back: their rows of k and v will travel in every call
parts       the queries that see no others, computed while rows travel, and the border
"""

from dataclasses import dataclass
from typing import ClassVar, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hilbert_lib.checks import grouped
from hilbert_lib.patterns.packed_lists import BLOCK, PackedLists, words_of
from hilbert_lib.patterns.point_lists import FAR, Cells, boxes, in_order, meeting, reached
from hilbert_lib.patterns.points import PointNeighbourhood, check_span, divided, lists_of
from hilbert_lib.ring.agreement import Agreement, resolved
from hilbert_lib.ring.plan.cost import Sizes
from hilbert_lib.ring.plan.points import PointCounts, PointParts, PointPlan, Travelling
from hilbert_lib.ring.rank.exchange import exchange
from hilbert_lib.ring.rank.halo_layout import HaloLayout, layout_of_points

NOWHERE = torch.iinfo(torch.int64)  # bounds of a rank without points


@dataclass(frozen=True, eq=False, init=False, repr=False)
class PointShard(PointNeighbourhood):
    """The points of one rank, where ranks share clouds: the `PointNeighbourhood` of all ranks' points, a part of it.

    Each rank makes one of its own cells, at the same time as the others, once for each cloud, and gives it to every
    layer: `ring_attend` or `ring_neighbourhood_attention`. Results are exact however points are spread; few rows travel
    where those of a rank lie together, as in runs of `point_order`. No rank holds the cells of all: ranks send each
    other boxes around 64 queries, and the cells that lie in a box.

    Its lists are those of this rank's queries and of all keys that they see: this rank's points, then those of others.
    Queries that see own keys alone are computed while rows travel.

    Args:
        coordinates: (n, axes) int32 or int64, this rank's cells, as its q is stored, and its k and v unless `keys` is
            given; there may be none. No cell of a key occurs twice in a cloud, on all ranks together.
        window, dilation: as for a `PointNeighbourhood`; the same on all ranks.
        batch: (n,) int32 or int64, the cloud of each cell; a cloud may lie on several ranks.
        keys: (m, axes) this rank's cells of keys, if k and v live on other cells than q; on all ranks or on none. A
            rank may have keys that no query of it sees, and queries without keys.
        key_batch: (m,) the cloud of each key; with `keys` and `batch`.
        group: the ranks, as a process group or a 1-D DeviceMesh; by default all.

    Raises:
        TypeError, ValueError: as `PointNeighbourhood`. An error on one rank is raised on all, and mismatched arguments
            are named.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> points = PointShard(torch.tensor([[0, 0], [5, 7], [1, 1]]), 3)
    >>> points.lengths, points.pairs
    ((3,), 5)
    >>> dist.destroy_process_group()
    """

    kind: ClassVar[str] = "shard_of_points"
    keys_in_words: ClassVar[str] = "its points and those of other ranks, which `ring_attend` brings here"

    own_keys: Tensor | None  # (m, 1 + axes) int64: clouds and cells of this rank's keys, where `keys` was given
    counts: tuple[PointCounts, ...]  # of each rank
    travelling: Travelling
    parts: PointParts
    known_group: "ref[ProcessGroup]"
    _layouts: dict

    def __init__(
        self,
        coordinates: Tensor,
        window: int | tuple[int, ...],
        batch: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        key_batch: Tensor | None = None,
        dilation: int | tuple[int, ...] = 1,
        group: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        group = resolved(group)
        refusal, words, rows = None, {}, 0
        try:
            self._set_cells(coordinates, window, batch, keys, key_batch, dilation)
            words = {"coordinates": f"cells of {coordinates.shape[1]} axes on {coordinates.device.type}"}
            words |= {"batch": "None" if batch is None else "a tensor", "keys": "None" if keys is None else "a tensor"}
            words |= {"window": repr(self.window), "dilation": repr(self.dilation)}
            rows = len(coordinates)
        except (TypeError, ValueError) as error:
            refusal = error
        lengths = Agreement(words, rows, refusal, group).lengths()
        cells = with_clouds(coordinates, batch)
        key_cells = cells if keys is None else with_clouds(keys, key_batch)
        self._set(own_keys=None if keys is None else key_cells)
        travelling, others, refusal = _travelling(self, cells, key_cells, lengths, group)
        try:
            if refusal is None:
                is_alone = keys is None and not len(others)
                self._set_lists(*self.lists_with(None if is_alone else torch.cat([key_cells, others])))
        except ValueError as error:
            refusal = error
        Agreement({}, rows, refusal, group).lengths()  # raises if some rank has a refusal
        parts = _parts(self, key_cells, others)
        counts = rows, len(key_cells), len(parts.border_queries), len(parts.border_keys), _list_bytes(self, parts)
        counts = _of_all_ranks(torch.tensor([counts], device=self.device), [1] * group.size(), group)
        counts = tuple(PointCounts(*own) for own in counts.tolist())
        self._set(counts=counts, travelling=travelling, parts=parts, known_group=ref(group), _layouts={})

    @property
    def names_of_keys(self) -> tuple[str, str]:
        """The arguments of the keys' cells and clouds, in errors."""
        names = ("coordinates", "batch") if self.own_keys is None else ("keys", "key_batch")
        return f"{names[0]} of all ranks", names[1]

    @property
    def has_keys(self) -> bool:
        """Whether k and v live on other cells than q."""
        return self.own_keys is not None

    @property
    def key_cells(self) -> Tensor:
        """The cell of each row of this rank's k: (m, axes). They are `coordinates` unless points have keys."""
        return self.coordinates if self.own_keys is None else self.own_keys[:, 1:]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of points of each rank."""
        return tuple(count.points for count in self.counts)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(count.keys for count in self.counts)

    def lists_with(self, keys: Tensor | None) -> tuple[PackedLists, PackedLists]:
        """The lists of these queries and of some keys (m, 1 + axes), their clouds first; None: of the points alone."""
        of_keys = None, None
        if keys is not None:
            of_keys = keys[:, 1:], None if self.batch is None else keys[:, 0]
        self._set_cells(self.coordinates, self.window, self.batch, *of_keys, self.dilation)
        return lists_of(self)

    def __repr__(self) -> str:
        points, keys = (" + ".join(map(str, lengths)) for lengths in (self.lengths, self.key_lengths))
        of_keys = "" if self.own_keys is None else f", keys={keys}"
        return f"PointShard({points} points, window={self.window}{of_keys}, dilation={self.dilation})"

    def to(self, device: torch.device | str) -> Self:
        """The same points on a device, made once for each device."""
        copy = super().to(device)
        for name in ("own_keys", "counts", "travelling", "parts", "known_group", "_layouts"):
            copy._set(**{name: getattr(self, name)})
        return copy

    def plan(
        self, *, batch: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, padded: bool = False
    ) -> PointPlan:
        """The bytes that each rank sends, receives and holds in a call, as `plan_halo` has them for a grid.

        Args:
            batch, heads, kv_heads, head_dim: sizes of q, k and v.
            dtype: of q, k and v.
            padded: whether the call has a key_padding_mask: one byte of it travels with each row.

        Raises:
            TypeError, ValueError: naming the argument and what is allowed.
        """
        heads, kv_heads = grouped(heads, kv_heads)
        sizes = Sizes.checked(batch, heads, kv_heads, head_dim, dtype, padded)
        return PointPlan(sizes, dtype, self.counts, self.travelling.by_ranks, self.window)

    def layout(self, kv_heads: int, device: torch.device) -> HaloLayout:
        """This rank's part of a call, as index tensors."""
        key = kv_heads, device
        if key not in self._layouts:
            self._layouts[key] = layout_of_points(self.parts, self.travelling, kv_heads, device)
        return self._layouts[key]


def with_clouds(cells: Tensor, clouds: Tensor | None) -> Tensor:
    """Cells (n, 1 + axes) int64, their clouds first; of one cloud where none is given."""
    clouds = cells.new_zeros(len(cells)) if clouds is None else clouds
    return torch.cat([clouds.long()[:, None], cells.long()], 1)


def _travelling(
    points: PointShard, cells: Tensor, key_cells: Tensor, lengths: tuple[int, ...], group: ProcessGroup
) -> tuple[Travelling, Tensor, Exception | None]:
    # Which rows travel; the cells of other ranks that own queries see; and the error of this rank, which goes on so
    # that others do not wait. cells, key_cells: those of this rank's queries and keys, their clouds first.
    ranks, device = group.size(), points.device
    rows_for = _rows_in_reach(points, cells, key_cells, lengths, group)
    offered, rows = [len(rows) for rows in rows_for], torch.cat(rows_for)
    ones = [1] * ranks
    coming = exchange(torch.tensor(offered, device=device), ones, ones, group).wait().tolist()
    candidates = exchange(key_cells[rows], offered, coming, group).wait()
    is_seen, refusal = torch.zeros(len(candidates), dtype=torch.bool, device=device), None
    try:
        is_seen = _seen(points, candidates)
    except ValueError as error:
        refusal = error
    is_wanted = exchange(is_seen.byte(), coming, offered, group).wait().bool()
    sent = [int(own.sum()) for own in is_wanted.split(offered)]
    by_source = _of_all_ranks(torch.tensor([sent], device=device), ones, group).tolist()
    received = tuple(row[group.rank()] for row in by_source)
    by_ranks = {}
    for source, row in enumerate(by_source):
        by_ranks |= {(source, destination): count for destination, count in enumerate(row) if count}
    return Travelling(rows[is_wanted], tuple(sent), received, by_ranks), candidates[is_seen], refusal


def _rows_in_reach(
    points: PointShard, cells: Tensor, key_cells: Tensor, lengths: tuple[int, ...], group: ProcessGroup
) -> list[Tensor]:  # fmt: skip
    # The rows of this rank's keys whose cells lie in a box of each other rank, ascending. A box is what 64 queries
    # reach.
    ordered, ordered_keys = _in_order_of_all(points, cells, key_cells, group)
    windows = (1, *points.window)
    before = tuple(w // 2 for w in windows)
    own_boxes = torch.stack(boxes(*reached(ordered, before, windows), len(cells)), 1).permute(2, 1, 0)
    counts = [-(-length // BLOCK) for length in lengths]
    own_cells = ordered_keys.places[:, : len(key_cells)]
    rows_for = []
    for rank, their_boxes in enumerate(_of_all_ranks(own_boxes, counts, group).split(counts)):
        rows = ordered_keys.order[:0]
        if rank != group.rank():
            least, largest = their_boxes.permute(1, 2, 0)
            _, places = meeting((least, largest), (own_cells, own_cells))
            rows = ordered_keys.order[places.unique()].sort().values
        rows_for.append(rows)
    return rows_for


def _in_order_of_all(
    points: PointShard, cells: Tensor, key_cells: Tensor, group: ProcessGroup
) -> tuple[Cells, Cells]:  # fmt: skip
    # This rank's queries and keys in steps of the dilation, counted from the least of all ranks, in the order of work.
    # Clouds may share a number, since boxes may be too large.
    sides = [cells] if points.own_keys is None else [cells, key_cells]
    lines = [torch.cat([each[:, :1].T, divided(each[:, 1:].T, points.dilation)]) for each in sides]
    all_lines = torch.cat(lines, 1)
    own = torch.tensor([NOWHERE.max, NOWHERE.min], device=cells.device)[:, None].repeat(1, len(all_lines))
    if all_lines.shape[1]:
        own = torch.stack([all_lines.amin(1), all_lines.amax(1)])
    bounds = _of_all_ranks(own[None], [1] * group.size(), group)
    least, largest = bounds[:, 0].amin(0), bounds[:, 1].amax(0)
    if bool((least <= largest).all()):  # some rank has points
        check_span(least[1:], largest[1:], has_keys=points.own_keys is not None)
    ordered = []
    for each in lines:
        each = each - least[:, None]
        each[0] %= FAR
        ordered.append(in_order(each.int(), has_clouds=True))
    return ordered[0], ordered[-1]


def _of_all_ranks(rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    # The rows of all ranks, one after the other. counts: how many each has.
    copies = rows.repeat(group.size(), *[1] * (rows.dim() - 1))
    return exchange(copies, [len(rows)] * group.size(), counts, group).wait()


def _seen(points: PointShard, candidates: Tensor) -> Tensor:
    # Which cells of other ranks (m, 1 + axes) own queries see: (m,) bool.
    is_seen = torch.zeros(len(candidates), dtype=torch.bool, device=candidates.device)
    if len(candidates):
        lists, _ = points.lists_with(candidates)
        rows = lists.key_rows.flatten()
        is_seen[rows[rows >= 0].long()] = True
    return is_seen


def _parts(points: PointShard, key_cells: Tensor, others: Tensor) -> PointParts:
    # The queries that see own keys alone, and the border. key_cells: of this rank's keys. others: cells of other ranks
    # that are keys, in the lists of points after the own ones.
    lists, own = points.lists, len(key_cells)
    none = lists.query_rows[:0].long()
    if not len(others):
        return PointParts(lists.queries, own, points.list_tensors, (), none, none)
    is_theirs = lists.key_rows >= own
    sees_theirs = (lists.words & words_of(is_theirs)[:, None]) != 0  # of each tile, each query of its block
    in_border = torch.zeros(lists.blocks, BLOCK, dtype=torch.bool, device=points.device)
    tile, place = sees_theirs.nonzero(as_tuple=True)
    in_border[lists.tile_blocks[tile], place] = True
    border_rows = lists.query_rows[in_border.flatten()]
    tiles = in_border.any(1)[lists.tile_blocks].nonzero()[:, 0]
    is_key = (lists.attends(tiles) & in_border[lists.tile_blocks[tiles], :, None]).any(1)
    keys = lists.key_rows[tiles][is_key].long().unique()
    queries, keys = border_rows.long().sort().values, keys[keys < own]
    # Queries and keys that are none of the interior are no rows of its lists.
    query_rows, key_rows = lists.query_rows.where(~in_border.flatten(), -1), lists.key_rows.where(~is_theirs, -1)
    own_keys = points.turned.query_rows.where(points.turned.query_rows < own, -1)
    interior = query_rows, lists.starts, key_rows, lists.words, own_keys, *points.turned.tensors[1:]
    border = _border_lists(points, queries, torch.cat([key_cells[keys], others]))
    return PointParts(lists.queries, own, interior, border, queries, keys)


def _border_lists(points: PointShard, queries: Tensor, key_cells: Tensor) -> tuple[Tensor, ...]:
    # The lists of some queries, given by their rows, over some keys (m, 1 + axes).
    sides, batch = {"keys": key_cells[:, 1:]}, None
    if points.batch is not None:
        batch, sides["key_batch"] = points.batch[queries], key_cells[:, 0]
    return PointNeighbourhood(
        points.coordinates[queries], points.window, batch, dilation=points.dilation, **sides
    ).list_tensors


def _list_bytes(points: PointShard, parts: PointParts) -> int:
    # Of all lists, each tensor once.
    tensors = {x.data_ptr(): x for x in (*points.list_tensors, *parts.interior, *parts.border)}
    return sum(x.nbytes for x in tensors.values())
