"""Orders of work that are searched: tokens swapped between blocks by simulated annealing, which reads fewer keys."""

import json
from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
import torch

from hilbert_lib.lab.cache.points import HALVED, PICTURED, point_orders
from hilbert_lib.lab.clouds import CLOUDS
from hilbert_lib.lab.records import Kept
from hilbert_lib.patterns.packed_lists import BLOCK
from hilbert_lib.patterns.points import PointNeighbourhood

KIND = "annealing"
STARTS = ("hilbert", HALVED)
HOTTEST, COLDEST = 1.0, 0.05  # keys: a swap that adds so many is taken with probability 1 / e


class Blocks:
    """Points in blocks of 64, and the keys that each block sees, kept while tokens are swapped.

    points: a PointNeighbourhood of a multiple of 64 points, whose windows see each other. order: (n,) int64.
    """

    def __init__(self, points: PointNeighbourhood, order: torch.Tensor):
        rows = torch.arange(len(order))
        self.sees = points.attends(rows[:, None], rows).numpy().astype(np.int16)  # (queries, keys)
        self.members = order.view(-1, BLOCK).numpy().copy()
        self.block_of = np.empty(len(order), dtype=np.int64)
        self.place_of = np.empty(len(order), dtype=np.int64)
        self.block_of[self.members] = np.arange(len(self.members))[:, None]
        self.place_of[self.members] = np.arange(BLOCK)
        self.seen_by = self.sees[self.members].sum(1, dtype=np.int16)  # (blocks, keys): queries of a block that see one

    @property
    def keys(self) -> float:
        """Keys that a block sees, on average."""
        return float((self.seen_by > 0).sum() / len(self.seen_by))

    def swap(self, one: int, other: int, most: float) -> int | None:
        """Swaps two tokens of different blocks if that adds at most so many keys: the number added, else None."""
        a, b = self.block_of[one], self.block_of[other]
        moved = self.sees[other] - self.sees[one]
        of_a, of_b = self.seen_by[a] + moved, self.seen_by[b] - moved
        before = np.count_nonzero(self.seen_by[a]) + np.count_nonzero(self.seen_by[b])
        added = int(np.count_nonzero(of_a) + np.count_nonzero(of_b) - before)
        if added > most:
            return None
        self.seen_by[a], self.seen_by[b] = of_a, of_b
        place, other_place = self.place_of[one], self.place_of[other]
        self.members[a, place], self.members[b, other_place] = other, one
        self.block_of[one], self.block_of[other] = b, a
        self.place_of[one], self.place_of[other] = other_place, place
        return added


def anneal(blocks: Blocks, swaps: int, *, seed: int = 0) -> list[float]:
    """Try so many swaps of a token with one that it sees in another block; keys of a block, after each tenth of them.

    The temperature falls from `HOTTEST` to `COLDEST` keys.
    """
    random = np.random.default_rng(seed)
    neighbours = [np.flatnonzero(row) for row in blocks.sees]
    ones = random.integers(len(neighbours), size=swaps)
    # The place among the neighbours, and how many keys may be added: -T log u, as Metropolis takes them.
    chosen, limits = random.random(swaps), -np.log(random.random(swaps))
    cooling = np.geomspace(HOTTEST, COLDEST, swaps) if swaps else []
    keys = [blocks.keys]
    for step, (one, share, limit, heat) in enumerate(zip(ones, chosen, limits, cooling, strict=True), start=1):
        near = neighbours[one]
        other = near[int(share * len(near))]
        if blocks.block_of[one] != blocks.block_of[other]:
            blocks.swap(one, other, heat * limit)
        if step * 10 // swaps > (step - 1) * 10 // swaps:
            keys.append(blocks.keys)
    return keys


def run_annealing(
    count: int,
    swaps: int,
    *,
    works: Sequence[tuple[str, int]] = PICTURED,
    starts: Sequence[str] = STARTS,
    seed: int = 0,
    output_dir: str = "",
) -> list[dict]:
    """Anneal made clouds from some orders of work; a record each, kept in a folder's results.jsonl.

    count: points of a cloud, rounded up to a multiple of 64. A record has name (of the start), parameters, keys of a
    block of 64 queries (before, and after each tenth of the swaps) and raster: those row by row. What is there already
    is not searched again.

    >>> (record,) = run_annealing(512, 2000, works=[("tissue", 5)], starts=["hilbert"])
    >>> record["keys"][-1] < record["keys"][0] < record["raster"]
    True
    """
    kept = Kept(output_dir, _key)
    records = []
    for (cloud, window), start in product(works, starts):
        size = -(-count // BLOCK) * BLOCK
        parameters = {"sweep": KIND, "cloud": cloud, "window": window, "points": size, "swaps": swaps, "seed": seed}
        record = {"kind": KIND, "name": start, "parameters": parameters}
        if known := kept.known.get(_key(record)):
            records.append(known)
            continue
        points = PointNeighbourhood(CLOUDS[cloud](size), window)
        orders = point_orders(points)
        keys = anneal(Blocks(points, orders[start]), swaps, seed=seed)
        records.append(kept.add({**record, "keys": keys, "raster": Blocks(points, orders["raster"]).keys}))
    return records


def annealing_table(records: list[dict]) -> pd.DataFrame:
    """The records of `run_annealing`, a row for each tenth: cloud, window, points, start, tried (swaps), keys, raster.

    ValueError where there is none.
    """
    rows = []
    for record in records:
        if record.get("kind") == KIND:
            about, tenths = record["parameters"], len(record["keys"]) - 1
            case = (about["cloud"], about["window"], about["points"], record["name"])
            rows += [
                (*case, about["swaps"] * step // max(1, tenths), keys, record["raster"])
                for step, keys in enumerate(record["keys"])
            ]
    if not rows:
        raise ValueError(f"records must hold one of kind {KIND!r}, got none")
    return pd.DataFrame(rows, columns=["cloud", "window", "points", "start", "tried", "keys", "raster"])


def _key(record: dict) -> str | None:
    return json.dumps([record["name"], record["parameters"]], sort_keys=True) if record.get("kind") == KIND else None
