"""What the hardware counts when three kernels read k and v in every order, beside what the cache model predicts.

The kernels: the fused forward and decoding with one query, which read through a table of slots, and a plain gather of
the rows of k. `count` needs a GPU and NVIDIA's `ncu`; the predictions need neither.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.lab.cache.cache import SECTOR_BYTES, Storage
from hilbert_lib.lab.cache.counters import METRICS, count_calls, found_percent
from hilbert_lib.lab.cache.l2 import Gpu
from hilbert_lib.lab.cache.predicted import Predicted, attention_reads, gather_reads
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.sweep import Kept
from hilbert_lib.lab.workload import Workload
from hilbert_lib.machine import get_gpu_info
from hilbert_lib.ordering import Ordering
from hilbert_lib.pattern import DilatedPattern

SWEEP = "counters"
# The launch of a call that is counted. A gather has torch's name for it, which differs between versions.
KERNELS = {"forward": "regex:^forward_kernel", "decoding": "regex:^decode_kernel", "gather": "regex:gather|[iI]ndex"}
# Sectors that each program reads to know its work. Forward: branches, offsets, a tile and its class, one each.
# Decoding: three int32 a KV head.
FORWARD_TABLES, PAIR_BYTES = 4, 12


@dataclass(frozen=True)
class Work:
    """One call of one kernel on k and v stored heads first in one order, in bfloat16: one branch, of offset 0."""

    kernel: str
    layout: str
    ordering: Ordering
    length: int
    heads: int
    dilation: int
    keys: int
    row_bytes: int

    @property
    def record(self) -> dict:
        """What a record begins with."""
        names = ("layout", "length", "heads", "dilation", "keys", "row_bytes")
        parameters = {"sweep": SWEEP, **{name: getattr(self, name) for name in names}}
        return {"kind": SWEEP, "name": self.kernel, "parameters": parameters}

    @cached_property
    def pattern(self) -> DilatedPattern:
        return DilatedPattern((min(self.length, self.keys * self.dilation),), (self.dilation,), offsets="zero")

    @property
    def query(self) -> int:
        """The position that decoding asks for: the branch's last."""
        return (self.length - 1) // self.dilation * self.dilation

    @property
    def storage(self) -> Storage:
        return Storage(self.ordering, self.row_bytes, self.heads, "bhsd")

    def call(self, device: torch.device) -> Callable[[], Tensor]:
        """The call on random inputs, which are drawn here."""
        head_dim = self.row_bytes // 2
        asked = (self.query, 1) if self.kernel == "decoding" else None
        work = Workload(self.pattern, self.length, self.heads, head_dim, device, queries=asked, heads_first=True)
        q, (k, v) = work.tensors[0], work.stored(self.ordering)
        if self.kernel == "gather":
            rows = k.transpose(1, 2).reshape(-1, head_dim)
            slots = self.ordering.inverse[:: self.dilation].to(device)
            numbers = (torch.arange(self.heads, device=device)[:, None] * self.length + slots).flatten()
            return lambda: rows[numbers]
        options = {"query_start": work.call.query_start, "kv_ordering": self.ordering, "backend": "triton"}
        return lambda: dilated_attention(q, k, v, self.pattern, **options)

    def predicted(self, gpu: Gpu) -> Predicted:
        """What the model predicts of the kernel as it runs here, with its tiles."""
        if self.kernel == "gather":
            return gather_reads(self.storage, self.pattern, gpu=gpu)
        from hilbert_lib.attention.triton import decode  # only here: not every system has triton
        from hilbert_lib.attention.triton.arguments import config_of

        head_dim, pattern = self.row_bytes // 2, self.pattern
        if self.kernel == "forward":
            config = config_of("forward", torch.empty(0, head_dim, dtype=torch.bfloat16))
            queries, keys, tables = config.block_m, config.block_n, FORWARD_TABLES
        else:
            keys = decode.step_keys(head_dim, torch.bfloat16.itemsize)
            chunk, *_ = decode.split(pattern, self.length, self.query, 1, 1, self.heads, decode.KEYS_PER_ROW, keys)
            pattern = DilatedPattern((chunk * self.dilation,), (self.dilation,), offsets="zero")
            queries, tables = None, -(-PAIR_BYTES * self.heads // SECTOR_BYTES)
        tiles = {"tile_queries": queries, "tile_keys": keys, "table_sectors": tables}
        return attention_reads(self.storage, pattern, **tiles, gpu=gpu)


def works(
    kernel: str, *, lengths: list[int], heads: int, dilations: list[int], row_bytes: list[int], keys: int
) -> Iterator[Work]:
    """The works of one kernel: every length, dilation and row size [bytes], in every order of `compared_orderings`.

    keys: that a query of the forward sees at most; the other kernels read the whole sequence's branch.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    for length, rate, size in product(lengths, dilations, row_bytes):
        if size % SECTOR_BYTES:
            raise ValueError(f"row_bytes must be multiples of {SECTOR_BYTES}, got {size}")
        seen = keys if kernel == "forward" else length
        for layout, ordering in compared_orderings(length, rate, segment=seen * rate).items():
            yield Work(kernel, layout, ordering, length, heads, rate, seen, size)


def calls(**options) -> Iterator[Callable[[], Tensor]]:
    """The calls of `works`, one at a time: what `count` watches."""
    for work in works(**options):
        yield work.call(torch.device("cuda"))


def count(kernel: str, *, output_dir: str = "", **options) -> list[dict]:
    """Count every work of a kernel in one run of `ncu`, with empty caches, beside what the model predicts for this GPU.

    What the folder's results.jsonl holds from this code on this hardware is not counted again; an empty name keeps
    nothing. A record a work; what this GPU does not count is None.
    """
    todo = list(works(kernel, **options))
    kept = Kept(output_dir, _key)
    if any(_key(work.record) not in kept.known for work in todo):
        info = get_gpu_info()
        gpu = Gpu(info.name, info.l2_bytes, info.multiprocessors)
        table = count_calls(f"{__name__}:{calls.__name__}", {"kernel": kernel, **options}, kernel=KERNELS[kernel])
        if len(table) != len(todo):
            raise RuntimeError(f"each call must be one launch, got {len(table)} launches of {len(todo)} calls")
        for work, row in zip(todo, table.to_dict("records"), strict=True):
            counted = {name: None if pd.isna(value) else value for name, value in row.items()}
            model = {"predicted": vars(work.predicted(gpu)), "model": vars(gpu)}
            kept.add({**work.record, "counted": counted, **model})
    return [kept.known[_key(work.record)] for work in todo]


def _key(record: dict) -> tuple | None:
    return (record["name"], *record["parameters"].values()) if record.get("kind") == SWEEP else None


def counter_table(records: Sequence[dict]) -> pd.DataFrame:
    """Counted `METRICS` beside what was predicted (predicted_), the last record of each work; others are left out."""
    rows = {}
    for record in records:
        if record.get("kind") == SWEEP:
            work = {"kernel": record["name"], **record["parameters"]}
            predicted = {f"predicted_{name}": value for name, value in record["predicted"].items()}
            rows[tuple(work.values())] = {**work, **record["counted"], **predicted}
    table = pd.DataFrame(rows.values())
    if table.empty:
        return table
    table[list(METRICS)] = table[list(METRICS)].astype(float)
    return table.drop(columns="sweep").assign(l2_found_percent=found_percent(table))
