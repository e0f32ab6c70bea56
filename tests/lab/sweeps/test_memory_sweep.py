"""The measurements of graphs, pools and caches: both sides compute one function, and the tables hold what was seen."""

import json
from contextlib import nullcontext

import pytest
import torch
from counts import ElementsMade

from hilbert_lib import DilatedPattern
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import compare_runs, read_records
from hilbert_lib.lab.sweeps import memory as sweeps
from hilbert_lib.lab.sweeps.memory import captured, graph_gains, pair_table, pool_comparison, pool_table, table_pairs
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.workload import Workload

PATTERN = DilatedPattern((8, 16), (1, 2))


def works(*lengths, dtype="float32"):
    return [Workload(PATTERN, n, 2, 4, torch.device("cpu"), dtype=dtype) for n in lengths]


class Replayed:
    """Stands in for a CUDA graph: runs the call again and writes into the first results."""

    def __init__(self, run):
        self.run, self.results = run, run()

    def replay(self):
        for kept, new in zip(self.results, self.run(), strict=True):
            kept.copy_(new)


@pytest.fixture
def on_cpu(monkeypatch):
    """The measurements without a GPU: graphs and pools are stood in for, and every byte counted is 2 or 3, tenfold at
    the peak."""
    monkeypatch.setattr(sweeps, "captured", lambda run, pool=None: ((graph := Replayed(run)), graph.results))
    monkeypatch.setattr(sweeps, "begin_peak", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setitem(sweeps.STRATEGIES, "pool", sweeps.STRATEGIES["caching"])
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: nullcontext())
    for name, count in (("memory_allocated", 2), ("memory_reserved", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
        monkeypatch.setattr(torch.cuda, f"max_{name}", lambda device, count=count: 10 * count)


def test_a_replay_computes_what_the_call_does_forward_and_backward(on_cpu):
    table = ratio_table(run_sides(graph_gains(works(16, 20)), device="cpu"), "graphs")
    assert len(table) == len(table.drop_duplicates(["length", "direction"])) == 4
    assert (table.output_difference == 0).all()
    assert 0 < table[["error_a", "error_b"]].max(axis=None) < 1e-4


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_every_strategy_gives_the_results_of_the_plain_call(on_cpu, direction, tmp_path):
    workloads = [works(16, dtype="bfloat16"), works(16, 24, 8, dtype="bfloat16")]
    records = pool_comparison(workloads, direction=direction, repetitions=2, output_dir=str(tmp_path))
    without = [{**each, "environment": None} for each in read_records(tmp_path / "results.jsonl")]
    assert without == json.loads(json.dumps([{**each, "environment": None} for each in records]))
    assert all(record["output_difference"] == 0 for record in records)
    table = pool_table(records)
    assert table.strategy.tolist() == ["caching", "kept", "pool", "graph"] * 2
    assert table.lengths.unique().tolist() == ["16", "16 24 8"]
    assert 0 < table.error.max() < 0.02
    assert (table.allocated_bytes == 18).all()
    assert (table.fragmented_bytes == 30 - 20).all()
    assert len(compare_runs(tmp_path, tmp_path)) == 8
    run = sweeps.STRATEGIES["kept"](lambda n: (torch.full((1, n), float(n)),), [3, 5])
    first, second = run(5)[0], run(3)[0]
    assert first.data_ptr() == second.data_ptr(), "kept buffers stay where they are"
    assert first.tolist() == [[3.0, 3.0, 3.0, 5.0, 5.0]]


def test_an_interrupted_workload_goes_on_with_the_strategies_that_are_missing(on_cpu, monkeypatch, tmp_path):
    asked, path = {"repetitions": 2, "output_dir": str(tmp_path)}, tmp_path / "results.jsonl"
    pool_comparison([works(16)], **asked)
    kept = path.read_text().splitlines(keepends=True)[:-1]
    path.write_text("".join(kept))
    assert [each["b"]["name"] for each in pool_comparison([works(16)], **asked)] == ["kept", "pool", "graph"]
    assert path.read_text().splitlines(keepends=True)[:-1] == kept
    monkeypatch.setattr(sweeps, "_watched", None)  # what another workload would be run by
    assert pool_comparison([works(16)], **asked) == read_records(path)
    with pytest.raises(TypeError):
        pool_comparison([works(24)], **asked)


HOST = {"device": "cpu", "on_cpu": True, "repetitions": 5, "seconds": 0.1}


def test_what_a_cache_finds_is_what_was_built_and_makes_nothing(monkeypatch):
    original, cached = sweeps._schedule_tables, []

    def spied(*arguments):
        cached.append(tuple(hasattr(each, "cache_info") for each in arguments[1:]))
        return original(*arguments)

    monkeypatch.setattr(sweeps, "_schedule_tables", spied)
    for build, find in table_pairs(works(64, 256)):
        find.run()
        with ElementsMade() as built:
            build.run()
        with ElementsMade() as found:
            find.run()
        assert built.count > found.count == 0
    records = run_sides(table_pairs(works(64, 256)), **HOST)
    assert set(cached) == {(False, False), (True, True)}, "a part of what is built was found"
    table = pair_table(records, "pattern cache")
    assert table.what.tolist() == ["schedule tables", "Hilbert ordering"] * 2
    assert (table.b == "look-up").all()
    assert (table.output_difference == 0).all()


def on_gpu(*lengths):
    pattern = DilatedPattern((256, 512), (1, 2))
    return [Workload(pattern, n, 2, 64, torch.device("cuda")) for n in lengths]


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_replays_are_timed_and_give_the_calls_bits():
    table = pair_table(run_sides(graph_gains(on_gpu(256)), device="cuda", repetitions=5), "graphs")
    assert len(table) == 2
    assert (table[table.direction == "forward"].output_difference == 0).all()
    assert table[["error_a", "error_b", "output_difference"]].max(axis=None) < 0.02
    assert table.ratio.min() > 1, "a replay of a short call must be faster than the call"


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_on_a_gpu_each_strategy_holds_its_results_and_leaves_nothing(direction):
    torch._C._cuda_clearCublasWorkspaces()  # of 32 MiB for each stream on which products ran
    before = torch.cuda.memory_allocated()
    records = pool_comparison([on_gpu(8192), on_gpu(8192, 32768, 16384)], direction=direction, repetitions=5)
    table = pool_table(records).set_index(["lengths", "strategy"])
    result = 8192 * 2 * 64 * 2 * (1 if direction == "forward" else 3)
    assert (table.allocated_bytes >= result).all()
    assert (table.fragmented_bytes >= 0).all()
    assert table.allocated_bytes["8192", "kept"] >= table.allocated_bytes["8192", "caching"] + result
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 2**20  # but for tables that are kept


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_tables_are_built_found_and_set_beside_a_call():
    table = pair_table(run_sides(table_pairs(on_gpu(4096)), **HOST), "pattern cache")
    assert table.b.tolist() == ["look-up", "call"] * 2


@pytest.mark.gpu
def test_replays_read_the_inputs_of_the_moment():
    x = torch.ones(4, device="cuda")
    graph, (doubled,) = captured(lambda: (x * 2,))
    x.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6.0] * 4
