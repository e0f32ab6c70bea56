"""Orders of work over points: tiles, blocks, and the neighbours that patches keep, counted."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from hilbert_lib import checks
from hilbert_lib.curves.codes import hilbert_codes, morton_codes
from hilbert_lib.lab.cache.neighbourhood import BLOCK as FLEX_BLOCK
from hilbert_lib.lab.cache.neighbourhood import BOX, used_by_boxes
from hilbert_lib.lab.clouds import CLOUDS
from hilbert_lib.patterns.neighbourhood import Neighbourhood
from hilbert_lib.patterns.packed_lists import BLOCK, BLOCKS_AT_ONCE, PackedLists
from hilbert_lib.patterns.point_lists import Cells, packed
from hilbert_lib.patterns.points import PointNeighbourhood

HALVED = "hilbert, halved"  # the order that `PointNeighbourhood` takes
RANDOM = "random"
WORK_ORDERS = ("raster", "morton", "hilbert", HALVED, RANDOM)
PATCH = 1024  # tokens of a patch, as Point Transformer V3 has them
MOST_RANDOM = 2**18  # points that are worked on in a random order too: every block then meets every other
TILE_BYTES = 768  # of a tile of 64 x 64: rows of int32, words of int64
COUNTED = (("tissue", (5, 9, 17, 33)), ("room", (3, 5, 7, 11)))  # clouds and windows of the tables and of the claim

PICTURED = (("tissue", 9), ("room", 5))  # of the pictures, and of the kernels that are counted


def point_orders(points: PointNeighbourhood) -> dict[str, Tensor]:
    """The orders of work that are compared, by name: (n,) int64 each, the row of the token at each place.

    A random one stands among them up to `MOST_RANDOM` points.

    >>> points = PointNeighbourhood(torch.tensor([[1, 1], [0, 1], [0, 0]]), 3)
    >>> point_orders(points)["raster"].tolist()
    [2, 1, 0]
    """
    cells = (points.coordinates - points.coordinates.amin(0)).T.long()
    raster = torch.arange(cells.shape[1], device=cells.device)
    for line in cells.flip(0):
        raster = raster[line[raster].argsort(stable=True)]
    orders = {
        "raster": raster,
        "morton": morton_codes(cells).argsort(stable=True),
        "hilbert": hilbert_codes(cells).argsort(stable=True),
        HALVED: points.order,
    }
    if len(raster) <= MOST_RANDOM:
        orders[RANDOM] = random_order(points)
    return orders


def random_order(points: PointNeighbourhood) -> Tensor:
    """The rows of the tokens in a random order, (n,) int64: the same for the same number of points.

    >>> sorted(random_order(PointNeighbourhood(torch.tensor([[1, 1], [0, 1], [0, 0]]), 3)).tolist())
    [0, 1, 2]
    """
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randperm(len(points.coordinates), generator=generator, device="cpu")
    return rows.to(points.coordinates.device)


def lists_in_order(points: PointNeighbourhood, order: Tensor) -> PackedLists:
    """The packed lists of points whose blocks are 64 consecutive tokens of an order of work, (n,) int64.

    ValueError: for an even window, whose lists for dk and dv are others; for clouds, a dilation or keys of their own.
    """
    if points.batch is not None or points.key_coordinates is not None or max(points.dilation) > 1:
        raise ValueError("points must be one cloud without keys of their own and without dilation")
    if any(w % 2 == 0 for w in points.window):
        raise ValueError(f"window must be odd, got {points.window}")
    cells = (points.coordinates - points.coordinates.amin(0)).T.int()
    in_order = Cells(pad(cells[:, order], (0, -len(order) % BLOCK)), order)
    return packed(in_order, in_order, tuple(w // 2 for w in points.window), points.window)


def pairs_by_block(lists: PackedLists, order: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The pairs that attend in each block of `size` x `size` tokens that are stored in an order, if there are any.

    lists: in that order. size: a multiple of 64.

    Returns:
        the block's number (blocks,) int64, query block * blocks of keys + key block, ascending, and its pairs.
    """
    place, blocks = _places(order), -(-len(order) // size)
    numbers, counts = [], []
    for tiles in torch.arange(lists.tiles, device=order.device).split(BLOCKS_AT_ONCE):
        keys, seen = lists.key_rows[tiles].long(), lists.attends(tiles).sum(1)
        query_block = lists.tile_blocks[tiles, None] * BLOCK // size
        number = query_block * blocks + place[keys.clamp(min=0)] // size
        numbers.append(number[keys >= 0])
        counts.append(seen[keys >= 0])
    number, which = torch.cat(numbers).unique(return_inverse=True)
    return number, torch.zeros_like(number).index_add(0, which, torch.cat(counts))


def patch_starts(count: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """The first place of each patch of consecutive tokens: (patches,) int64.

    The last patch takes tokens of the one before, so that all are full, as in Point Transformer V3.
    """
    starts = torch.arange(0, count, size, device=device)
    return starts.clamp(max=max(0, count - size))


def patch_recall(points: PointNeighbourhood, order: Tensor, size: int = PATCH) -> float:
    """The share of the pairs of a window whose key is in the query's patch of an order."""
    place, starts, kept = _places(order), patch_starts(len(order), size, order.device), 0
    lists = points.lists
    query_rows = lists.query_rows.view(-1, BLOCK).long().clamp(min=0)
    for tiles in torch.arange(lists.tiles, device=order.device).split(BLOCKS_AT_ONCE):
        first = starts[place[query_rows[lists.tile_blocks[tiles]]] // size][:, :, None]  # (tiles, queries, 1)
        key = place[lists.key_rows[tiles].long().clamp(min=0)][:, None]  # (tiles, 1, keys)
        kept += int((lists.attends(tiles) & (key >= first) & (key < first + size)).sum())
    return kept / points.pairs


def count_lists(
    count: int,
    *,
    works: Sequence[tuple[str, Sequence[int]]] = COUNTED,
    orders: Sequence[str] = WORK_ORDERS,
    device: torch.device | str = "cpu",
) -> pd.DataFrame:
    """Count what packed lists and blocks hold, for made clouds of so many points and for each window and order.

    A row has pairs (of a query), keys and tiles (of a block of 64 queries), used (the share of the tiles' pairs that
    attend), blocks and block_used (the same of blocks of 64 tokens that hold a pair), and list_bytes (of a point).

    >>> count_lists(100, works=[("room", [3])], orders=["raster", "hilbert"]).order.tolist()
    ['raster', 'hilbert']
    """
    checks.integer("count", count, least=1)
    rows = []
    for about, points, by_name in _neighbourhoods(count, works, device):
        present = [name for name in orders if name in by_name]
        rows += [{**about, **_counts(points, by_name[name], name)} for name in present]
    return pd.DataFrame(rows)


def _neighbourhoods(
    count: int, works: Sequence[tuple[str, Sequence[int]]], device: torch.device | str
) -> Iterator[tuple[dict, PointNeighbourhood, dict[str, Tensor]]]:
    # Cloud and window by name, the points, and their orders by name.
    for cloud, windows in works:
        coordinates = CLOUDS[cloud](count).to(device)
        for window in windows:
            points = PointNeighbourhood(coordinates, window)
            yield {"cloud": cloud, "window": window}, points, point_orders(points)


def point_reach(points: PointNeighbourhood, names: Sequence[str], query: int) -> pd.DataFrame:
    """The block of 64 queries that holds a token, and what it reaches in each order: a row a token of a plane.

    Columns are order, row and col (the cell), place (in the order), is_query (the token itself), and part: "own" (a key
    of the query), "queries" (of its block), "seen" (a key of others of these), "computed" (not seen, but in a block of
    64 tokens that holds one that is) or "skipped".
    """
    cells = (points.coordinates - points.coordinates.amin(0)).T.numpy()
    rows, own, tables = torch.arange(len(points.coordinates)), points.keys(query), []
    for name in names:
        order = point_orders(points)[name]
        block = _places(order) // BLOCK
        is_block = block == block[query]
        seen = points.attends(rows[is_block][:, None], rows).any(0)
        parts = {
            "own": torch.isin(rows, own),
            "queries": is_block,
            "seen": seen,
            "computed": torch.isin(block, block[seen].unique()),
        }
        part = np.select([mask.numpy() for mask in parts.values()], list(parts), "skipped")
        table = {"order": name, "row": cells[0], "col": cells[1], "place": _places(order), "part": part}
        tables.append(pd.DataFrame(table | {"is_query": rows == query}))
    return pd.concat(tables, ignore_index=True)


def block_words(points: PointNeighbourhood, names: Sequence[str], query: int) -> pd.DataFrame:
    """The pairs that attend in the tiles of the block that holds a token: order, query, key, of each pair and order.

    query: the place in the block, 0 to 63. key: the place in the block's tiles, one after the other.
    """
    tables = []
    for name in names:
        lists = lists_in_order(points, point_orders(points)[name])
        block = int((lists.query_rows == query).nonzero()[0]) // BLOCK
        first, last = lists.starts[block : block + 2].tolist()
        tile, own, key = lists.attends(slice(first, last)).nonzero(as_tuple=True)
        tables.append(pd.DataFrame({"order": name, "query": own, "key": tile * BLOCK + key}))
    return pd.concat(tables, ignore_index=True)


def _counts(points: PointNeighbourhood, order: Tensor, name: str) -> dict:
    lists = points.lists if name == HALVED else lists_in_order(points, order)
    touched = len(pairs_by_block(lists, order, BLOCK)[0])
    return {
        "order": name,
        "pairs": lists.pairs / lists.queries,
        "keys": int((lists.key_rows >= 0).sum()) / lists.blocks,
        "tiles": lists.tiles / lists.blocks,
        "used": lists.pairs / (lists.tiles * BLOCK**2),
        "blocks": touched / lists.blocks,
        "block_used": lists.pairs / (touched * BLOCK**2),
        "list_bytes": lists.tiles * TILE_BYTES / lists.queries,
    }


def count_recall(
    count: int,
    *,
    works: Sequence[tuple[str, Sequence[int]]] = COUNTED,
    orders: Sequence[str] = ("raster", "morton", "hilbert"),
    size: int = PATCH,
    device: torch.device | str = "cpu",
) -> pd.DataFrame:
    """`patch_recall` for made clouds of so many points: cloud, window, order, recall.

    >>> float(count_recall(100, works=[("room", [3])], orders=["hilbert"], size=100).recall[0])
    1.0
    """
    rows = []
    for about, points, by_name in _neighbourhoods(count, works, device):
        rows += [{**about, "order": name, "recall": patch_recall(points, by_name[name], size)} for name in orders]
    return pd.DataFrame(rows)


def count_kernels(
    count: int,
    *,
    works: Sequence[tuple[str, int]] = PICTURED,
    size: int = PATCH,
    device: torch.device | str = "cpu",
) -> pd.DataFrame:
    """Count what each kernel computes and reads for a query of made clouds, on average.

    kernel: lists, patches, blocks of 128 by order, boxes (on the grid around all points) and gather. products: of the
    query and a key, attending or not. rows: of k that are read for it, shared by the queries that are computed
    together. kept: the share of its neighbours that it attends to.

    >>> count_kernels(64, works=[("room", 3)]).set_index("kernel").products["patches, hilbert"]
    np.float64(64.0)
    """
    rows = []
    for cloud, window in works:
        points = PointNeighbourhood(CLOUDS[cloud](count).to(device), window)
        about = {"cloud": cloud, "window": window}
        rows += [{**about, "kernel": kernel, **counts} for kernel, counts in _kernel_counts(points, size).items()]
    return pd.DataFrame(rows)


def _kernel_counts(points: PointNeighbourhood, size: int) -> dict[str, dict[str, float]]:
    lists, orders, count = points.lists, point_orders(points), len(points.coordinates)
    tiles_of_block, size = lists.tiles / lists.blocks, min(size, count)
    counts = {"lists": {"products": tiles_of_block * BLOCK, "rows": tiles_of_block, "kept": 1.0}}
    recall = patch_recall(points, orders["hilbert"], size)
    counts["patches, hilbert"] = {"products": float(size), "rows": size / FLEX_BLOCK, "kept": recall}
    for name in ("hilbert", "raster"):
        number, _ = pairs_by_block(lists_in_order(points, orders[name]), orders[name], FLEX_BLOCK)
        touched = len(number) / -(-count // FLEX_BLOCK)
        counts[f"blocks, {name}"] = {"products": touched * FLEX_BLOCK, "rows": touched, "kept": 1.0}
    cells = points.coordinates - points.coordinates.amin(0)
    grid = Neighbourhood(tuple((cells.amax(0) + 1).tolist()), points.window, edge="clip")
    products = grid.pairs / used_by_boxes(grid) / count
    counts["boxes"] = {"products": products, "rows": products / BOX, "kept": 1.0}
    seen = torch.zeros(count, dtype=torch.int64, device=points.device)
    query_rows = lists.query_rows.view(-1, BLOCK).long()
    for tiles in torch.arange(lists.tiles, device=points.device).split(BLOCKS_AT_ONCE):
        own, keys = query_rows[lists.tile_blocks[tiles]], lists.attends(tiles).sum(2)
        seen.index_add_(0, own[own >= 0], keys[own >= 0])
    most = float(seen.amax())
    counts["gather"] = {"products": most, "rows": most, "kept": 1.0}
    return counts


def _places(order: Tensor) -> Tensor:
    # The place of each row in an order.
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place
