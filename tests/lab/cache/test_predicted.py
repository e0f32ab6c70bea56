"""The model of what hardware counts: the sectors and bytes that the kernels load, held against every address."""

import pandas as pd
import pytest
import torch
from lru import Lru
from triton.runtime import interpreter

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.attention.triton import arguments, decode
from hilbert_lib.lab.cache.cache import Storage
from hilbert_lib.lab.cache.l2 import Gpu
from hilbert_lib.lab.cache.predicted import attention_reads, gather_reads, model_errors
from hilbert_lib.lab.cache.sweeps import compared_orderings
from hilbert_lib.lab.records import committed_records
from hilbert_lib.lab.sweeps import counters as benchmarks
from hilbert_lib.ordering import Ordering
from hilbert_lib.patterns.dilated import DilatedPattern

LARGE = Gpu("large", 2**30, 7)
LENGTH, HEADS = 96, 2
interpreted = pytest.mark.skipif(not arguments.is_interpreted(), reason="only Triton's interpreter shows addresses")


@pytest.fixture
def loaded(monkeypatch):
    """The sectors that each program of a kernel loads, by program: what L1 asks for if it keeps them till its end."""
    programs = {}
    load = interpreter.InterpreterBuilder.create_masked_load

    def watched(self, pointers, mask, *rest):
        sizes = pointers.get_element_ty().primitive_bitwidth // 8
        first = pointers.data[mask.data].astype("int64")
        sectors = programs.setdefault(self.grid_idx, set())
        sectors.update((first // 32).tolist(), ((first + sizes - 1) // 32).tolist())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
    return programs


def fetched_bytes(loaded):
    return 64 * len({sector // 2 for sector in set().union(*loaded.values())})


def stored(ordering, head_dim, queries):
    q, k, v = (torch.randn(1, rows, HEADS, head_dim) for rows in (queries, LENGTH, LENGTH))
    k, v = (ordering.apply(x, dim=1).transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return q, k, v


@interpreted
@pytest.mark.parametrize("layout", ["linear", "residue", "hilbert", "random"])
@pytest.mark.parametrize(("segment", "rate", "head_dim"), [(96, 3, 8), (48, 1, 16), (32, 2, 8)])
def test_the_fused_forward_loads_what_is_predicted(loaded, layout, segment, rate, head_dim):
    ordering = compared_orderings(LENGTH, rate)[layout]
    pattern = DilatedPattern((segment,), (rate,), offsets="zero")
    q, k, v = stored(ordering, head_dim, LENGTH)
    dilated_attention(q, k, v, pattern, kv_ordering=ordering, backend="triton")
    # Compiled, the kernel has no use for the names of branches; the interpreter loads them: a fifth table.
    tiles = {"tile_queries": 16, "tile_keys": 16, "table_sectors": 5}
    found = attention_reads(Storage(ordering, 4 * head_dim, HEADS, "bhsd"), pattern, **tiles, gpu=LARGE)
    assert found.l1_sectors == sum(map(len, loaded.values()))
    assert found.dram_read_bytes == pytest.approx(fetched_bytes(loaded), abs=64)  # a table may be longer than a fetch


@interpreted
@pytest.mark.parametrize("layout", ["linear", "hilbert"])
@pytest.mark.parametrize("kernel", ["forward", "decoding"])
def test_counted_works_are_predicted_with_the_tiles_of_their_kernel(loaded, layout, kernel, monkeypatch):
    class NoMerge:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    monkeypatch.setattr(decode, "merge_kernel", NoMerge())
    monkeypatch.setattr(benchmarks, "FORWARD_TABLES", benchmarks.FORWARD_TABLES + 1)  # as above, interpreted
    monkeypatch.setitem(arguments.INTERPRETED, "forward", arguments.Config(32, 16))
    heads = 3  # whose tables are more than a sector long
    # On the CPU the same elements are float32: rows twice as wide.
    wide = property(lambda work: Storage(work.ordering, 4 * work.inputs.head_dim, heads, "bhsd"))
    monkeypatch.setattr(benchmarks.CountedCall, "storage", wide)
    sizes = {"lengths": [384], "heads": heads, "dilations": [2], "row_bytes": [32], "keys": 96}
    (work,) = (each for each in benchmarks.calls(kernel, **sizes) if each.record["parameters"]["layout"] == layout)
    work.call()()
    found = work.predicted(LARGE)
    assert found.l1_sectors == sum(map(len, loaded.values()))
    assert found.dram_read_bytes == pytest.approx(fetched_bytes(loaded), abs=128)  # two tables


@pytest.mark.parametrize("layout", ["linear", "residue", "hilbert", "random"])
@pytest.mark.parametrize(("row_bytes", "l2_bytes"), [(32, 640), (32, 2**20), (64, 640)])
def test_a_gather_reads_rows_and_numbers_and_memory_what_l2_forgot(layout, row_bytes, l2_bytes):
    rate, heads = 4, 3
    storage = Storage(compared_orderings(64, rate)[layout], row_bytes, heads, "bhsd")
    slots = storage.ordering.inverse.tolist()
    rows = [(head * 64 + slots[p]) * row_bytes for head in range(heads) for p in range(0, 64, rate)]
    sectors = sum(len(range(row // 32, (row + row_bytes) // 32)) + 1 for row in rows)
    misses = Lru(l2_bytes // 64).count_misses(row // 64 for row in rows)
    found = gather_reads(storage, DilatedPattern((64,), (rate,), offsets="zero"), gpu=Gpu("any", l2_bytes, 1))
    assert found.l1_sectors == sectors
    assert found.dram_read_bytes == 64 * misses + 8 * len(rows)
    missed = misses * min(row_bytes, 64) // 32 + 8 * len(rows) // 64  # each number is asked for by a warp of its own
    assert found.l2_found_percent == pytest.approx(100 * (1 - missed / sectors), abs=0.01)


@pytest.mark.parametrize(("concurrent", "rate"), [(1, 1), (5, 1), (5, 16)])
@pytest.mark.parametrize("l2_bytes", [1024, 4096, 2**20])
def test_what_l2_forgets_comes_again_from_memory(concurrent, rate, l2_bytes):
    # One segment, one head: programs of a wave read tile after tile of k and v in step.
    keys, tile_queries, tile_keys, size = 60, 8, 16, 64
    queries = -(-keys // tile_queries)
    reads = []
    for first in range(0, queries, concurrent):
        programs = len(range(first, min(first + concurrent, queries)))
        for start in range(0, keys, tile_keys):
            for tensor in "kv":
                reads += [(tensor, row) for row in range(start, min(start + tile_keys, keys)) for _ in range(programs)]
    misses = Lru(l2_bytes // size).count_misses(reads)
    tiles = {"tile_queries": tile_queries, "tile_keys": tile_keys, "table_sectors": 4}
    storage, pattern = Storage(Ordering.random(60 * rate, 0), size), DilatedPattern((60 * rate,), (rate,))
    found = attention_reads(storage, pattern, **tiles, gpu=Gpu("any", l2_bytes, concurrent))
    index = [4 * rate * n for n in range(keys)]
    index_sectors, index_fetches = ({byte // unit for byte in index} for unit in (32, 64))
    assert found.dram_read_bytes == misses * size + len(index_fetches) * 64 + keys * size + 4 * 64
    sectors = 2 * len(reads) + queries * len(index_sectors) + 2 * keys + queries * 4
    assert found.l1_sectors == sectors
    missed = 2 * misses + len(index_sectors) + 2 * keys + 4
    assert found.l2_found_percent == pytest.approx(100 * (1 - missed / sectors), abs=0.01)


@pytest.mark.parametrize("layout", ["linear", "residue", "hilbert", "random"])
@pytest.mark.parametrize("rate", [1, 2, 8])
@pytest.mark.parametrize("l2_bytes", [1024, 2**20])
def test_a_second_sector_misses_where_one_quarter_asks_for_both(layout, rate, l2_bytes):
    # Decoding, one program at a time: tiles of 16 keys, k then v, in requests of 4 rows of 32 bytes.
    length, chunk, tile = 256, 64 // rate, 16
    storage = Storage(compared_orderings(length, rate)[layout], 32)
    slots = storage.ordering.inverse.tolist()
    cache, missed = Lru(l2_bytes // 64), 0
    for start in range(0, length // rate, chunk):
        for step in range(start, start + chunk, tile):
            for tensor in "kv":
                keys = range(step, min(step + tile, start + chunk))
                for quarter in (keys[n : n + 4] for n in range(0, len(keys), 4)):
                    asked = [slots[key * rate] for key in quarter]
                    for fetch in sorted({slot // 2 for slot in asked}):
                        missed += cache.misses((tensor, fetch)) * sum(slot // 2 == fetch for slot in asked)
    pattern = DilatedPattern((chunk * rate,), (rate,), offsets="zero")
    tiles = {"tile_queries": None, "tile_keys": tile, "table_sectors": 0, "gpu": Gpu("any", l2_bytes, 1)}
    found = attention_reads(storage, pattern, **tiles)
    rows = length // rate
    index = len({4 * rate * key // 32 for key in range(rows)})  # whose fetches a tile asks for whole
    programs = 4  # each of which asks for the sector of q
    misses = missed + index + 1
    sectors = 2 * rows + index + programs
    assert found.l1_sectors == sectors
    assert found.l2_found_percent == pytest.approx(100 * (1 - misses / sectors), abs=0.01)


@pytest.mark.evidence
def test_counts_are_near_the_predicted_ones_but_where_the_notebook_says():
    table = benchmarks.counter_table(committed_records("06b_orders_and_counters"))
    off = table[(table.predicted_l1_sectors / table.l1_sectors - 1).abs() > 0.1]
    works = off.groupby(["kernel", "length", "dilation", "row_bytes"])[["predicted_l1_sectors", "l1_sectors"]].sum()
    shares = works.predicted_l1_sectors / works.l1_sectors
    assert shares.round(2).to_dict() == {("forward", 1024, 64, 128): 0.31, ("forward", 65536, 16, 32): 1.16}
    short = off[off.length == 1024]
    assert (short.l1_spill_sectors > short.l1_sectors).all()  # spilled registers are read back
    assert (off[off.length == 65536].l1_hit_percent > 13).all()  # what the model takes past L1
    long = table[table.length > 1024]
    points = (long.predicted_l2_found_percent - long.l2_found_percent).abs().groupby(long.kernel).max()
    assert (points < pd.Series({"decoding": 4.5, "forward": 10.0, "gather": 14.0})).all()


def test_errors_are_relative_and_for_a_share_in_points():
    rows = {"kernel": "f", "layout": ["linear", "hilbert", "random"], "length": 64, "dilation": 4}
    rows |= {"row_bytes": 32, "l1_sectors": [100.0, 200.0, 50.0], "predicted_l1_sectors": [100, 150, 51]}
    rows |= {"l2_found_percent": 50.0, "predicted_l2_found_percent": [50, 49, 70]}
    rows |= {"dram_read_bytes": float("nan"), "predicted_dram_read_bytes": 8}
    sectors, found = model_errors(pd.DataFrame(rows)).to_dict("records")
    assert sectors["worst_case"] == "hilbert, 64 tokens, dilation 4, 32 B"
    assert [sectors[name] for name in ("unit", "cases", "median", "worst", "above_10")] == ["%", 3, 2.0, 25.0, 1]
    assert [found[name] for name in ("unit", "cases", "median", "worst", "above_10")] == ["points", 3, 1.0, 20.0, 1]
