"""The tables of orderings: computed from their recipes, and the ones last used kept."""

import threading
from collections import OrderedDict
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hilbert_lib.curves.coordinates import curve_coordinates, raster_index
from hilbert_lib.graph_cache import made_to_share, wait_for_readers

if TYPE_CHECKING:
    from hilbert_lib.ordering import Ordering

CACHED_POSITIONS = 2**24  # 20 bytes each (perm, inverse and slots): 320 MiB

Tables = tuple[Tensor, Tensor, Tensor]  # perm, inverse and slots


@torch.inference_mode(False)  # tables made in inference mode could not serve a later backward pass
def compute_tables(ordering: "Ordering") -> Tables:
    """`perm`, `inverse` and `slots` of an ordering, computed on its device."""
    length, device = ordering.length, ordering.device
    if device.type == "meta":  # nothing to compute, and some kinds select by values, which it has none of
        perm = torch.empty(length, dtype=torch.int64, device=device)
        return perm, torch.empty_like(perm), perm.int()
    chunk = min(ordering.chunk or length, length)
    starts = torch.arange(0, length - length % chunk, chunk, device=device)
    perm = (starts[:, None] + _chunk_perm(ordering, chunk)).flatten()
    if tail := length % chunk:
        perm = torch.cat([perm, length - tail + _chunk_perm(ordering, tail)])
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(length, device=device)
    # 32 bits: an int64 index read at a stride costs a sector a row twice as soon.
    return perm, inverse, inverse.int()


def _chunk_perm(ordering: "Ordering", length: int) -> Tensor:
    """The layout of one chunk: (length,) int64."""
    device = ordering.device
    if ordering.kind == "linear":
        return torch.arange(length, device=device)
    if ordering.kind == "residue":
        rate = min(ordering.rate, length)  # a larger rate leaves one position in each residue class
        padded = torch.arange(-(-length // rate) * rate, device=device).view(-1, rate).T.flatten()
        return padded[padded < length]
    if ordering.kind == "random":
        # On the CPU always: each device's own generator would give another permutation.
        return torch.randperm(length, generator=torch.Generator("cpu").manual_seed(ordering.seed), device="cpu").to(
            device
        )
    cols = isqrt(length - 1) + 1
    grid = ordering.grid or (-(-length // cols), cols)
    perm = raster_index(curve_coordinates(ordering.kind, grid, device=device), grid)
    return perm[perm < length]


class CacheInfo(NamedTuple):
    """What the cache of orderings did: look-ups answered and not, tables held, positions in them and their bound.

    Tables that a CUDA graph has captured are held beyond the bound.
    """

    hits: int
    misses: int
    orderings: int
    positions: int
    max_positions: int


def ordering_cache_info() -> CacheInfo:
    """How often the tables of an ordering were found in the cache since the process began, and what it holds now.

    >>> ordering_cache_info().positions <= CACHED_POSITIONS
    True
    """
    return CACHE.info()


class TableCache:
    """The tables last used, up to a number of positions; the newest stays even if it alone is larger.

    Tables asked for while a CUDA graph is captured stay too, beyond that number: the graph holds addresses alone.
    """

    def __init__(self, max_positions: int):
        self.max_positions = max_positions
        self._hits = self._misses = self._positions = 0
        self._held: OrderedDict[tuple[Ordering, torch.device], Tables] = OrderedDict()
        self._captured: dict[tuple[Ordering, torch.device], Tables] = {}
        self._lock = threading.Lock()  # autograd runs backward passes in threads of its own

    def tables(self, ordering: "Ordering") -> Tables:
        """Those of an ordering, on its device."""
        key = (ordering, ordering.device)
        with self._lock:
            tables = self._captured.get(key) or self._held.get(key)
            self._hits, self._misses = self._hits + (tables is not None), self._misses + (tables is None)
        if tables is None:
            # Not under the lock: it waits for the stream, on which there may be work that waits for another thread.
            tables = made_to_share(partial(compute_tables, ordering), ordering.device)
        let_go = []
        with self._lock:
            if key in self._captured:
                return self._captured[key]
            if key not in self._held:
                self._held[key] = tables
                self._positions += ordering.length
            self._held.move_to_end(key)
            tables = self._held[key]
            # Asked of CUDA's tables alone: a build of torch without CUDA cannot answer.
            if ordering.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                self._captured[key] = self._held.pop(key)
                self._positions -= ordering.length
            while self._positions > self.max_positions and len(self._held) > 1:
                let_go.append(self._held.popitem(last=False))
                self._positions -= let_go[-1][0][0].length
        for device in {device for (_, device), _ in let_go}:  # not under the lock, as above
            wait_for_readers(device)
        return tables

    def info(self) -> CacheInfo:
        """What it did and holds."""
        with self._lock:
            held = len(self._held) + len(self._captured)
            positions = self._positions + sum(ordering.length for ordering, _ in self._captured)
            return CacheInfo(self._hits, self._misses, held, positions, self.max_positions)


CACHE = TableCache(CACHED_POSITIONS)
