"""The measurements of graphs, pools and caches: both sides compute one function, and the tables hold what was seen."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from hilbert_lib import DilatedPattern
from hilbert_lib.lab.figures import memory as figures
from hilbert_lib.lab.figures import redraw, show
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import compare_runs, read_records
from hilbert_lib.lab.sweeps import graphs as graph_benchmarks
from hilbert_lib.lab.sweeps import memory as memory_benchmarks
from hilbert_lib.lab.sweeps.graphs import captured, graph_gains, pair_table
from hilbert_lib.lab.sweeps.memory import PoolRecord, memory_table, pattern_cache, pool_comparison, pool_table
from hilbert_lib.lab.tables import ratio_table
from hilbert_lib.lab.timing import Case, compare_paired

PATTERN = DilatedPattern((8, 16), (1, 2))
SIZES = {"pattern": PATTERN, "heads": 2, "head_dim": 4}
CPU = torch.device("cpu")


class Replayed:
    """Stands in for a CUDA graph: runs the call again and writes into the first results."""

    def __init__(self, run):
        self.run, self.results = run, run()

    def replay(self):
        for kept, new in zip(self.results, self.run(), strict=True):
            kept.copy_(new)


@pytest.fixture
def on_cpu(monkeypatch):
    """The measurements without a GPU: graphs and pools are stood in for, and every byte counted is 7."""
    for module in (graph_benchmarks, memory_benchmarks):
        monkeypatch.setattr(module, "require_cuda", lambda device: None)
        monkeypatch.setattr(module, "captured", lambda run, pool=None: ((graph := Replayed(run)), graph.results))
    monkeypatch.setattr(memory_benchmarks, "begin_peak", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setitem(memory_benchmarks.STRATEGIES, "pool", memory_benchmarks.STRATEGIES["caching"])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name, count in (("memory_allocated", 2), ("memory_reserved", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, count=count: count)
        monkeypatch.setattr(torch.cuda, f"max_{name}", lambda device, count=count: 10 * count)


def test_a_replay_computes_what_the_call_does_forward_and_backward(on_cpu):
    records = run_sides(graph_gains([16, 20], device=CPU, dtype="float32", **SIZES), device=CPU)
    table = ratio_table(records, "graphs")
    assert len(table) == len(table.drop_duplicates(["length", "module", "direction"])) == 8
    assert (table.output_difference == 0).all()
    assert 0 < table[["error_a", "error_b"]].max(axis=None) < 1e-4


def test_a_wrong_module_shows_as_an_error(on_cpu, monkeypatch):
    original = graph_benchmarks._called

    def wrong(module, inputs, direction):
        results = original(module, inputs, direction)
        return results if inputs[0].dtype == torch.float64 else (*results[:-1], results[-1] * 1.5)

    monkeypatch.setattr(graph_benchmarks, "_called", wrong)
    records = run_sides(graph_gains([16], device=CPU, dtype="float32", **SIZES), device=CPU)
    assert ratio_table(records, "graphs").error_b.min() > 0.4


@pytest.mark.parametrize("measure", [lambda: next(graph_gains([8], device=CPU, **SIZES)),
                                     lambda: pool_comparison([[8]], device=CPU, **SIZES)])  # fmt: skip
def test_without_a_gpu_nothing_is_measured_in_its_place(measure):
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        measure()


@pytest.mark.parametrize("direction", ["forward", "training"])
def test_every_strategy_gives_the_results_of_the_plain_call(on_cpu, direction, tmp_path):
    records = pool_comparison(
        [[16], [16, 24, 8]], device=CPU, direction=direction, repetitions=2, output_dir=str(tmp_path), **SIZES
    )
    without = [{**each, "environment": None} for each in read_records(tmp_path / "results.jsonl")]
    assert without == json.loads(json.dumps([{**each, "environment": None} for each in records]))
    assert all(record["output_difference"] == 0 for record in records)
    table = pool_table(records, "pools")
    assert table.strategy.tolist() == ["caching", "kept", "pool", "graph"] * 2
    assert table.lengths.unique().tolist() == ["16", "16 24 8"]
    assert 0 < table.error.max() < 0.02
    assert (table.allocated_bytes == 18).all()
    assert (table.fragmented_bytes == 30 - 20).all()
    tensors = 3 if direction == "forward" else 4
    assert table.input_bytes.unique().tolist() == [n * 2 * 4 * 2 * tensors for n in (16, 16 + 24 + 8)]
    assert len(compare_runs(tmp_path, tmp_path)) == 8


def test_a_strategy_that_the_folder_holds_is_not_run_again(on_cpu, monkeypatch, tmp_path):
    asked = {"device": CPU, "repetitions": 2, "output_dir": str(tmp_path), **SIZES}
    first = pool_comparison([[16]], **asked)
    monkeypatch.setattr(memory_benchmarks, "_pool_records", None)  # what it would be run by
    found = pool_comparison([[16]], **asked)
    assert [each["b"] for each in found] == json.loads(json.dumps([each["b"] for each in first]))  # samples and all
    with pytest.raises(TypeError):  # another workload
        pool_comparison([[16]], **asked, curve="hilbert")


def test_an_interrupted_workload_goes_on_with_the_strategies_that_are_missing(on_cpu, tmp_path):
    asked = {"device": CPU, "repetitions": 2, "output_dir": str(tmp_path), **SIZES}
    pool_comparison([[16]], **asked)
    path = tmp_path / "results.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:-1]
    path.write_text("".join(kept))
    found = pool_comparison([[16]], **asked)
    assert [each["b"]["name"] for each in found] == ["kept", "pool", "graph"]
    assert path.read_text().splitlines(keepends=True)[:-1] == kept


def test_with_a_curve_torchs_allocator_is_compared_too(on_cpu):
    table = pool_table(pool_comparison([[16]], device=CPU, curve="hilbert", repetitions=2, **SIZES), "pools")
    assert list(zip(table.strategy, table.curve, strict=True)) == [
        ("caching", ""), ("caching", "hilbert"), ("kept", "hilbert"), ("pool", "hilbert"), ("graph", "hilbert")
    ]  # fmt: skip


def test_a_workload_without_room_is_left_out_and_the_others_go_on(on_cpu, monkeypatch, capsys):
    def full(call, lengths):
        if max(lengths) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return call

    monkeypatch.setitem(memory_benchmarks.STRATEGIES, "kept", full)
    records = pool_comparison([[24], [16]], device=CPU, repetitions=2, **SIZES)
    assert pool_table(records, "pools").lengths.unique().tolist() == ["16"]
    assert "[24]: left out, no room: CUDA out of memory" in capsys.readouterr().out


def test_kept_buffers_stay_where_they_are():
    run = memory_benchmarks.STRATEGIES["kept"](lambda n: (torch.full((1, n), float(n)),), [3, 5])
    first, second = run(5)[0], run(3)[0]
    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [[3.0, 3.0, 3.0, 5.0, 5.0]]


def pool_record(name: str, curve: str, *, tokens: int = 8192, sweep: str = "memory table", lengths: str = "") -> dict:
    common = {"sweep": sweep, "lengths": lengths or str(tokens), "direction": "forward", "input_bytes": 2**30}
    cases = [
        Case(each, lambda: 1 + 1, {**common, "curve": order}, 0.0) for each, order in (("caching", ""), (name, curve))
    ]
    measured = compare_paired(*cases, device="cpu", repetitions=3)
    return PoolRecord(measured, (2**28, 2**29), 0.0, (2**29, 2**30)).record()


def test_the_documents_numbers_stand_beside_the_configurations_they_name():
    records = [pool_record(name, "hilbert", tokens=n) for n in (8192, 16384) for name in ("caching", "kept", "pool")]
    table = memory_table(records).set_index(["tokens", "configuration"])
    assert table.claimed_gb.dropna().to_dict() == {
        (8192, "caching, linear"): 0.08,
        (8192, "pool, hilbert"): 0.25,
        (16384, "caching, linear"): 0.92,
        (16384, "pool, hilbert"): 0.92,
    }
    assert table.allocated_gib[8192, "caching, linear"] == 1.25
    assert table.reserved_gib[8192, "pool, hilbert"] == 2


def test_what_a_cache_finds_is_what_was_built_and_is_found_faster(tmp_path, monkeypatch):
    original, cached = memory_benchmarks._schedule_tables, []

    def spied(*arguments):
        functions = arguments[4:] or original.__defaults__
        cached.append(tuple(hasattr(each, "cache_info") for each in functions))
        return original(*arguments)

    monkeypatch.setattr(memory_benchmarks, "_schedule_tables", spied)
    records = pattern_cache([64, 256], device=CPU, repetitions=5, output_dir=str(tmp_path), **SIZES)
    assert set(cached) == {(False, False), (True, True)}, "a part of what is built was found"
    table = pair_table(records, "pattern cache")
    assert table.what.tolist() == ["schedule tables", "Hilbert ordering"] * 2
    assert (table.b == "look-up").all()
    assert table.ratio.min() > 1
    assert all(record["peak_bytes"][0] > 0 for record in records)
    assert len(read_records(tmp_path / "results.jsonl")) == 4
    again = pattern_cache([64, 256], device=CPU, repetitions=5, output_dir=str(tmp_path), **SIZES)
    assert again == read_records(tmp_path / "results.jsonl"), "they were measured again"


def test_a_cache_that_finds_something_else_is_an_error(monkeypatch):
    made_up = SimpleNamespace(__wrapped__=lambda ordering, device: (ordering.perm, ordering.perm, ordering.perm))
    monkeypatch.setattr(memory_benchmarks, "ordering_tables", made_up)
    with pytest.raises(ValueError, match="Hilbert ordering must be found as they are built, at 64 tokens"):
        pattern_cache([64], device=CPU, repetitions=2, **SIZES)


def graph_data() -> pd.DataFrame:
    rows = [
        {"module": module, "direction": direction, "length": n, "a_ms": 0.2, "b_ms": 0.1, "ratio": 2.0}
        for module in ("attention", "multihead") for direction in ("forward", "training") for n in (128, 1024)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(low=1.9, high=2.1)


def cache_data() -> pd.DataFrame:
    rows = [
        {"what": what, "length": n, "b": b, "a_ms": 1.0, "b_ms": ms}
        for what in ("schedule tables", "Hilbert ordering") for n in (1024, 4096)
        for b, ms in (("look-up", 0.001), ("call", 0.1))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def pool_data() -> pd.DataFrame:
    records = [
        pool_record(name, "", sweep="pools", lengths=n) for n in ("8192", "8192 65536") for name in ("kept", "pool")
    ]
    return pool_table(records, "pools")


def table_data() -> pd.DataFrame:
    return memory_table([pool_record(name, "hilbert", tokens=n) for n in (8192, 32768) for name in ("caching", "pool")])


FIGURES = {
    figures.draw_graph_gains: (graph_data, ["attention", "multihead"], ["forward, called", "training, replayed"]),
    figures.draw_pools: (pool_data, [], ["torch's caching allocator", "torch.cuda.MemPool"]),
    figures.draw_memory_table: (table_data, [], ["pool, hilbert", "the documents' [GB], sizes not told"]),
    figures.draw_pattern_cache: (
        cache_data,
        ["schedule tables", "Hilbert ordering"],
        ["build", "look-up in the cache"],
    ),
}


@pytest.mark.parametrize("draw", FIGURES, ids=lambda draw: draw.__name__)
def test_a_figure_names_its_source_and_all_it_shows_and_is_redrawn(draw, tmp_path):
    data, titles, labels = FIGURES[draw]
    figure = show(draw, data(), output_dir=str(tmp_path), source="an H200")
    assert "an H200" in figure.get_suptitle()
    assert set(titles) <= {axes.get_title() for axes in figure.axes}
    assert set(labels) <= {text.get_text() for text in figure.legends[0].texts}
    assert redraw(tmp_path) == [tmp_path / f"{draw.__name__}.png"]


def test_panels_that_share_an_axis_show_the_largest_of_all():
    data = graph_data()
    data.loc[data.module == "multihead", ["ratio", "low", "high"]] *= 10
    figure = figures.draw_graph_gains(data, source="an H200")
    ratios = [axes for axes in figure.axes if axes.get_xlabel() == "tokens"]
    assert len(ratios) == 2
    for axes in ratios:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > data.high.max()


GPU = {"pattern": DilatedPattern((256, 512), (1, 2)), "heads": 2, "head_dim": 64}


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_replays_are_timed_and_give_the_calls_bits():
    records = run_sides(graph_gains([256], device=torch.device("cuda"), **GPU), device="cuda", repetitions=5)
    table = pair_table(records, "graphs")
    assert len(table) == 4
    assert (table[table.direction == "forward"].output_difference == 0).all()
    assert table[["error_a", "error_b", "output_difference"]].max(axis=None) < 0.02
    assert table.ratio.min() > 1, "a replay of a short call must be faster than the call"


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "training"])
def test_on_a_gpu_each_strategy_holds_its_results_and_leaves_nothing(direction):
    torch.ones(1, 1, device="cuda") @ torch.ones(1, 1, device="cuda")  # the library of products keeps its workspace
    before = torch.cuda.memory_allocated()
    records = pool_comparison(
        [[8192], [8192, 32768, 16384]], device=torch.device("cuda"), direction=direction, repetitions=5, **GPU
    )
    table = pool_table(records, "pools").set_index(["lengths", "strategy"])
    result = 8192 * 2 * 64 * 2 * (1 if direction == "forward" else 3)
    assert (table.allocated_bytes >= result).all()
    assert (table.fragmented_bytes >= 0).all()
    assert table.allocated_bytes["8192", "kept"] >= table.allocated_bytes["8192", "caching"] + result
    assert torch.cuda.memory_allocated() - before < 2**20  # but for tables that are kept


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_tables_are_built_found_and_set_beside_a_call():
    table = pair_table(pattern_cache([4096], device=torch.device("cuda"), repetitions=5, **GPU), "pattern cache")
    assert table.b.tolist() == ["look-up", "call"] * 2
    assert table[table.b == "look-up"].ratio.min() > 1  # medians: one of five samples may meet a busy host


@pytest.mark.gpu
def test_replays_read_the_inputs_of_the_moment():
    x = torch.ones(4, device="cuda")
    graph, (doubled,) = captured(lambda: (x * 2,))
    x.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6.0] * 4
