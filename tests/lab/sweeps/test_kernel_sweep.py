"""The sweeps behind notebook 06: their errors are real, their times are never an interpreter's."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch
from matplotlib.colors import same_color
from matplotlib.container import BarContainer, ErrorbarContainer

from hilbert_lib import DilatedPattern, Ordering, dilated_attention
from hilbert_lib.attention.backends import reference
from hilbert_lib.attention.backends.registry import BACKENDS
from hilbert_lib.attention.call import Call
from hilbert_lib.lab import pairs as paired
from hilbert_lib.lab import records as committed
from hilbert_lib.lab.baselines import BASELINES
from hilbert_lib.lab.exact_rows import exact_gradients, exact_out, sampled_positions
from hilbert_lib.lab.figures import kernels as figures
from hilbert_lib.lab.figures import redraw, show
from hilbert_lib.lab.ledger.claims import claim_pairs, claim_table
from hilbert_lib.lab.pairs import Recorded, Side, relative_difference, run_sides
from hilbert_lib.lab.records import REPORTS, RESULTS, append_records, read_records
from hilbert_lib.lab.sweeps import kernels as benchmarks
from hilbert_lib.lab.sweeps.graphs import pair_table
from hilbert_lib.lab.tables import ratio_table, side_table
from hilbert_lib.lab.timing import Case, compare_paired
from hilbert_lib.lab.workload import Workload
from hilbert_lib.machine import kernel_mode

PATTERNS = [
    DilatedPattern((8, 24), (1, 3)),
    DilatedPattern((7, 20, 64), (2, 3, 5), offsets="branch"),
    DilatedPattern((16, 16), (4, 1), mixing="head_groups"),
    DilatedPattern((9,), (4,)),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: str(pattern.branches))
def test_sampled_rows_equal_the_whole_reference(pattern, is_causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 50, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    call = Call(pattern, is_causal=is_causal, scale=0.7)
    out, lse = reference.forward(q, k, v, call)
    dq, dk, dv = reference.backward(dout, q, k, v, out, lse, call)
    for head in range(4):
        rows = torch.arange(head, 50, 3)
        exact = exact_out(q, k, v, call, head=head, queries=rows)
        torch.testing.assert_close(exact, out[0, rows, head], atol=1e-12, rtol=0)
    for g in range(2):
        queries, keys = torch.arange(3, 50, 7), torch.tensor([0, 21, 49])
        exact = exact_gradients(q, k, v, dout, call, kv_head=g, queries=queries, keys=keys)
        expected = dq[0, queries, 2 * g], dk[0, keys, g], dv[0, keys, g]
        torch.testing.assert_close(exact, expected, atol=1e-12, rtol=0)


def test_sampled_rows_of_a_decoding_call_equal_the_reference():
    q, k, v = (torch.randn(1, rows, 2, 4, dtype=torch.float64) for rows in (3, 30, 30))
    call = Call(DilatedPattern((8, 30), (1, 4)), is_causal=True, query_start=11)
    out, _ = reference.forward(q, k, v, call)
    exact = exact_out(q, k, v, call, head=1, queries=torch.arange(11, 14))
    torch.testing.assert_close(exact, out[0, :, 1], atol=1e-12, rtol=0)


def test_sampled_positions_reach_every_branch_and_stay_in_the_sequence():
    pattern = DilatedPattern((8, 64), (1, 16))
    positions = sampled_positions(pattern, 64, kv_head=3, kv_heads=4, count=20, seed=0)
    assert pattern.contains(1, positions, 3, 4).sum() == 4
    assert 0 <= positions.min() <= positions.max() < 64


@pytest.mark.parametrize("length", [7, 40, 41, 47, 50])
@pytest.mark.parametrize("kv_head", range(4))
@pytest.mark.parametrize("branch", [(10, 4), (8, 4), (9, 5), (5, 5), (64, 6)], ids=str)
def test_every_sampled_position_is_in_the_branch_unless_its_segment_has_none_of_it(branch, kv_head, length):
    pattern, every = DilatedPattern(branch[:1], branch[1:]), torch.arange(length)
    sampled = sampled_positions(pattern, length, kv_head=kv_head, kv_heads=4, count=1000, seed=0)
    inside = pattern.contains(0, every, kv_head, 4)
    segment = every // branch[0]
    unreachable = ~torch.isin(segment, segment[inside])
    assert sampled.equal(every[inside | unreachable])


def one(name, value, *, exact=1.0, parameters=None):
    """A side that returns a number, which should be `exact`."""
    parameters = {"sweep": "numbers", **(parameters or {})}
    true = [torch.tensor([exact])]
    return Side(name, parameters, lambda: (torch.tensor([value]),), lambda results: relative_difference(results, true))


def test_results_of_another_shape_are_no_results():
    with pytest.raises(ValueError, match=r"results must have the shape of exact, \(3,\), got \(1,\)"):
        relative_difference([torch.ones(1)], [torch.ones(3)])


def timed(a, b):
    """A pair's record as a GPU would leave it; the times are those of two additions on the CPU."""
    cases = [Case(side.name, lambda: 1 + 1, side.parameters, 0.0, 4e9, 2e6) for side in (a, b)]
    return Recorded(compare_paired(*cases, device="cpu", repetitions=5), (2**20, 2**21), 0.0)


def test_on_the_cpu_errors_are_known_and_nothing_is_timed_or_written(tmp_path):
    (record,) = run_sides([(one("a", 1.0), one("b", 1.5))], device="cpu", output_dir=str(tmp_path))
    assert record["kind"] == "check"
    assert record["a"]["error"] == 0
    assert record["b"]["error"] == record["output_difference"] == 0.5
    assert ratio_table([record], "numbers").ratio.isna().all()
    assert side_table([record], "numbers").median_ms.isna().all()
    assert not list(tmp_path.iterdir())


def test_on_the_cpu_a_side_of_several_pairs_runs_once():
    runs = []
    shared = replace(one("b", 1.0), run=lambda: runs.append(1) or (torch.ones(1),))
    records = run_sides([(one(name, 1.5), shared) for name in "acd"], device="cpu")
    assert [record["output_difference"] for record in records] == [pytest.approx(1 / 3)] * 3
    assert len(runs) == 1


def test_what_is_not_finite_is_never_a_small_error():
    with pytest.raises(ValueError, match="results must be finite"):
        run_sides([(one("a", 1.0), one("b", float("nan")))], device="cpu")


def test_a_case_without_room_is_left_out_and_the_others_go_on(capsys):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    large = Side("large", {"sweep": "numbers", "length": 9}, full, lambda results: 0.0)
    records = run_sides([(large, one("b", 1.0)), (one("a", 1.0), one("b", 1.0))], device="cpu")
    assert [record["a"]["name"] for record in records] == ["a"]
    assert "large | b: left out, no room: CUDA out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("changed", ["nothing", "hardware", "code_hash", "packages"])
def test_only_what_this_code_measured_on_this_hardware_is_not_run_again(tmp_path, changed):
    pair = one("a", 1.0), one("b", 1.0)
    append_records([timed(*pair)], tmp_path)
    path = tmp_path / "results.jsonl"
    record = json.loads(path.read_text())
    if changed != "nothing":
        another = {"flash-attn-4": "4.0.0b36"} if changed == "packages" else "another"
        record["environment"][changed] = another
        path.write_text(json.dumps(record) + "\n")
    (found,) = run_sides([pair], device="cpu", output_dir=str(tmp_path))
    assert (found == record) == (changed == "nothing")


def test_a_side_of_several_pairs_stands_in_the_table_once_with_all_its_samples():
    ours = one("triton", 1.0)
    records = [timed(one(name, 1.0), ours).record() for name in ("cudnn", "flash")]
    table = side_table(records, "numbers").set_index("name")
    assert table.index.tolist() == ["cudnn", "triton", "flash"]
    samples = [x for record in records for x in record["b"]["samples_ms"]]
    assert table.median_ms["triton"] == pytest.approx(torch.tensor(samples, dtype=torch.float64).quantile(0.5).item())
    assert table.tflop_per_s["triton"] == pytest.approx(4e9 / table.median_ms["triton"] / 1e9)
    assert table.peak_bytes.to_dict() == {"cudnn": 2**20, "triton": 2**21, "flash": 2**20}
    with pytest.raises(ValueError, match=r"sweep must be one of the records' \(numbers\), got 'layouts'"):
        side_table(records, "layouts")


def test_a_pair_that_two_lists_of_parameters_name_stands_in_the_tables_once():
    older, newer = (timed(one("flash", 1.0), one("triton", 1.0)).record() for _ in range(2))
    records = [older, timed(one("cudnn", 1.0), one("triton", 1.0)).record(), newer, newer]
    assert ratio_table(records, "numbers").a.tolist() == ["flash", "cudnn"]
    assert pair_table(records, "numbers").a_ms[0] == newer["a"]["median_ms"]
    assert side_table(records, "numbers").set_index("name").median_ms["flash"] == newer["a"]["median_ms"]


SMALL = {"heads": 2, "head_dims": [16], "device": torch.device("cpu")}


def test_backends_that_serve_are_all_close_to_float64_and_the_others_say_why(capsys):
    patterns = {"paper": DilatedPattern((24, 48), (1, 5))}
    pairs = benchmarks.backends(patterns, opponents=["cudnn", "eager"], lengths=[50], **SMALL)
    records = run_sides(pairs, device="cpu")
    table = ratio_table(records, "backends")
    assert table.direction.tolist() == ["forward", "backward"] * 2
    assert table.is_causal.tolist() == [False, False, True, True]
    assert table[["error_a", "error_b", "output_difference"]].max(axis=None) < 0.01
    assert capsys.readouterr().out.count("cudnn is left out: needs a CUDA device") == 1


def test_a_wrong_gradient_shows_as_an_error():
    work = Workload(DilatedPattern((8,), (2,)), 16, 2, 4, torch.device("cpu"), dtype="float64")
    gradients = torch.autograd.grad(
        dilated_attention(*work.leaves, work.pattern, backend="reference"), work.leaves, work.tensors[3]
    )
    assert work.error(gradients) < 1e-12
    for wrong in range(3):
        changed = [x * 1.5 if n == wrong else x for n, x in enumerate(gradients)]
        assert work.error(changed) == pytest.approx(0.5)


def test_long_sequences_have_fewer_heads():
    pairs = benchmarks.backends(
        {"p": DilatedPattern((8,), (1,))}, opponents=["eager"], lengths=[8, 32], rows=32, **SMALL
    )
    heads = {ours.parameters["length"]: ours.parameters["heads"] for _, ours in pairs}
    assert heads == {8: 2, 32: 1}


def test_an_unknown_opponent_is_refused():
    with pytest.raises(ValueError, match=r"opponents must be of triton, .*, fkodom; got 'cuddn'"):
        next(benchmarks.backends({}, opponents=["cuddn"], lengths=[8], **SMALL))


LAYOUTS = {"lengths": [36], "dilations": [3], "row_bytes": [16], "keys": 6, "heads": 2, "device": torch.device("cpu")}


@pytest.mark.parametrize("queries", [0, 2])
def test_every_layout_gives_the_same_bits(queries):
    records = run_sides(benchmarks.layouts(queries=queries, **LAYOUTS), device="cpu")
    table = ratio_table(records, "decoding" if queries else "layouts")
    assert set(table.b) >= {"no table", "residue", "snake", "morton", "hilbert", "hilbert per segment", "random"}
    assert (table.output_difference == 0).all()
    assert 0 < table.error_b.max() < 0.01


def test_rows_of_a_head_lie_side_by_side_in_every_layout():
    work = Workload(DilatedPattern((8,), (2,)), 20, 2, 4, torch.device("cpu"), heads_first=True)
    order = Ordering.from_curve("hilbert", 20)
    for x, stored in zip(work.tensors[1:3], work.stored(order), strict=True):
        assert stored.stride()[1:] == (4, 80, 1)
        assert torch.equal(order.undo(stored, dim=1), x)


def test_decoding_counts_each_row_that_is_needed_once():
    work = Workload(DilatedPattern((16, 32), (1, 4), offsets="zero"), 32, 3, 8, torch.device("cpu"), queries=(16, 2))
    flop, moved, *_ = work.flop_and_bytes
    assert flop == 4 * 8 * 3 * (16 + 8 + 16)  # query 16 sees 16 and 8 keys, query 17 sees 16
    assert moved == 3 * (2 * (16 + 4) + 2 * 2) * 8 * 2  # rows of k and v: 16 to 31, and 0, 4, 8, 12; q and out


def test_a_wrong_curve_shows_as_an_error(monkeypatch):
    sides = [ours for _, ours in benchmarks.curves([(4, 4), (3, 2, 5)], device=torch.device("cpu"))]
    assert [side.error(side.run()) for side in sides] == [0.0] * (6 if kernel_mode() == "interpreted" else 4)
    for side in sides:
        (result,) = side.run()
        assert side.error((result.flip(0),)) > 0.5


def test_a_copy_moves_as_many_bytes_as_the_curve():
    for copy, ours in benchmarks.curves([(4, 4)], device=torch.device("cpu")):
        (result,) = ours.run()
        read = 0 if result.ndim == 2 else 16 * 2 * 8
        assert copy.useful_bytes == ours.useful_bytes == result.nbytes + read


def test_the_ceilings_are_a_copy_and_a_product_that_are_right():
    records = run_sides(benchmarks.ceilings(copied_bytes=64, matrix_side=16, device=torch.device("cpu")), device="cpu")
    table = side_table(records, "ceilings").set_index("name")
    assert table.error["copy"] == 0 < table.error["matrix product"] < 0.01
    assert table.useful_flop["matrix product"] == 2 * 16**3


@pytest.mark.parametrize("machine", ["h200", "h100"])
def test_calls_of_the_kernels_took_their_results_and_delta_and_a_sum_of_dq_and_nothing_beyond(machine):
    """In the committed record: out and lse, or the gradients and delta; dq in float32 unless determinism is asked for.

    All have as many heads of k as of q, and one sequence. The table of a pattern is there before. Some forwards have a
    flag of 4 bytes, for NaN.
    """
    run = committed.newest_run("06_kernel_benchmarks", machines=[REPORTS / machine])
    peaks = [
        (side["name"], side["parameters"], peak)
        for record in read_records(run / RESULTS)
        if record["kind"] == "comparison"
        for side, peak in zip((record["a"], record["b"]), record["peak_bytes"], strict=True)
        if side["name"] in ("triton", "triton, deterministic")
    ]
    assert {(name, at["direction"]) for name, at, _ in peaks} == {
        *(("triton", "forward"), ("triton", "backward"), ("triton, deterministic", "backward"))
    }
    for name, at, peak in peaks:
        rows = at["length"] * at["heads"]
        elements, lse = rows * at["head_dim"], 4 * rows
        size = getattr(torch, at["dtype"]).itemsize
        sums = 4 * elements if name == "triton" else 0
        if at["direction"] == "forward":
            assert peak - (size * elements + lse) in (0, 4), at
        else:
            assert peak == 3 * size * elements + lse + sums, f"{name}, {at}"


@pytest.mark.parametrize("sweep", ["layouts", "decoding"])
def test_an_order_costs_at_most_a_twentieth_more_than_linear_storage_by_a_table(sweep):
    """In the H200's record, by the interval's nearer end; at random, which is no order to choose, up to a fifth."""
    pairs = ratio_table(benchmarks.committed_records(), sweep)
    ordered = pairs[~pairs.b.isin([benchmarks.NO_TABLE, "random"])]
    assert len(ordered) > 50
    assert (1 / ordered.high).max() <= 1.05
    assert 1 < (1 / pairs[pairs.b == "random"].high).max() <= 1.2


def test_a_peak_is_what_a_call_asked_for_beyond_what_was_there_before(monkeypatch):
    events = []
    side = replace(one("a", 1.0), run=lambda: events.append("run"))
    counts = {"requested_bytes.all.current": 100, "requested_bytes.all.peak": 1124, "allocated_bytes.all.peak": 2048}
    monkeypatch.setattr(paired, "begin_peak", lambda device: events.append("begin"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: counts)
    assert paired._once(side, torch.device("cuda"))[1] == 1024
    assert events == ["run", "begin", "run", "wait"]


def test_the_newest_committed_record_is_drawn_where_nothing_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(committed, "REPORTS", tmp_path)
    check = run_sides([(one("a", 1.0), one("b", 1.0))], device="cpu")
    assert benchmarks.records_to_draw(check) == ([], "")
    for run, utc in (("new", "2026-02-02"), ("old", "2026-01-01")):
        folder = tmp_path / "h200" / run / "06_kernel_benchmarks-0a1b2c3d"
        append_records([timed(one(run, 1.0), one("b", 1.0))], folder)
        record = json.loads((folder / "results.jsonl").read_text())
        record["environment"] |= {"utc": utc, "hardware": "an H200", "gpus": [{}]}
        lines = 1 if run == "new" else 2  # the newest, not the longest
        (folder / "results.jsonl").write_text((json.dumps(record) + "\n") * lines)
    records, source = benchmarks.records_to_draw(check)
    assert records[0]["a"]["name"] == "new"
    assert source == "committed record, an H200"
    assert benchmarks.records_to_draw(records) == (records, "an H200")


def test_a_layout_is_faster_only_where_its_whole_interval_says_so():
    ratios = pd.DataFrame({"row_bytes": 32, "b": "hilbert", "ratio": [1.1, 1.0, 0.9], "low": [1.05, 0.99, 0.85]})
    ratios["high"] = ratios.ratio + 0.02
    (verdict,) = benchmarks.layout_verdicts(ratios).to_dict("records")
    assert verdict == {"row_bytes": 32, "b": "hilbert", "cases": 3, "faster": 1, "slower": 1, "best": 1.1, "worst": 0.9}


def drawings():
    """Each figure with its table and options, from sides that never ran."""
    cpu = torch.device("cpu")
    of_backends = benchmarks.backends(
        {"reference": DilatedPattern((8, 16), (1, 2))}, opponents=["eager"], lengths=[16, 32], **SMALL
    )
    sweeps = {
        "backends": of_backends,
        "layouts": benchmarks.layouts(**LAYOUTS | {"lengths": [36, 64]}),
        "decoding": benchmarks.layouts(queries=1, **LAYOUTS),
        "claims": claim_pairs(["K3"], device=cpu),
    }
    records = [timed(*pair).record() for pairs in sweeps.values() for pair in pairs]
    speeds, rates = {"source": "invented"}, {"copy_gb_per_s": 4e3}
    backends, layouts = side_table(records, "backends"), ratio_table(records, "layouts")
    decoded = side_table(records, "decoding")
    yield figures.draw_speeds, backends, {"length": 16, **speeds}
    yield figures.draw_speeds_by_length, backends, {"pattern": "reference", **speeds}
    yield figures.draw_roofline, backends, {"product_tflop_per_s": 700.0, **rates, **speeds}
    yield figures.draw_layouts, layouts, {"x": "length", "panel": "row_bytes", **speeds}
    yield figures.draw_decoding, decoded, {**rates, **speeds}
    yield figures.draw_claims, claim_table(records), speeds


def test_every_figure_is_drawn_from_its_table_alone(tmp_path):
    drawn = [show(draw, data, output_dir=str(tmp_path), **options) for draw, data, options in drawings()]
    assert all(axes.has_data() for figure in drawn for axes in figure.axes)
    assert len(redraw(tmp_path)) == len(drawn) == 6


def test_every_opponent_has_a_style_of_its_own():
    assert {*BACKENDS, *BASELINES} < set(figures.BACKEND_STYLES)
    assert len(set(figures.BACKEND_STYLES.values())) == len(figures.BACKEND_STYLES)


def test_a_backend_has_one_colour_in_all_figures_of_speeds():
    reference = DilatedPattern((8, 16), (1, 2))
    groups = replace(reference, offsets="branch", mixing="head_groups")
    works = [("reference", reference, ["eager", "torchscale"]), ("groups", groups, ["fkodom"])]
    pairs = [
        timed(*pair).record()
        for label, pattern, names in works
        for pair in benchmarks.backends({label: pattern}, opponents=names, lengths=[16, 32], **SMALL)
    ]
    table = side_table(pairs, "backends")
    drawn = [figures.draw_speeds(table, length=16, source="invented")]
    drawn += [figures.draw_speeds_by_length(table, pattern=label, source="invented") for label, _, _ in works]
    bars = {each.get_label(): each.patches[0].get_facecolor() for each in _labelled(drawn[0], BarContainer)}
    assert list(bars) == ["triton", "eager", "torchscale", "fkodom"]
    lines = [line for figure in drawn[1:] for line in _labelled(figure, ErrorbarContainer)]
    assert {line.get_label() for line in lines} == set(bars)
    assert all(same_color(line.lines[0].get_color(), bars[line.get_label()]) for line in lines)


def _labelled(figure, kind):
    containers = [each for axes in figure.axes for each in axes.containers if isinstance(each, kind)]
    return [each for each in containers if not each.get_label().startswith("_")]


@pytest.mark.gpu
def test_on_a_gpu_pairs_are_timed_and_recorded_with_their_peak_memory(tmp_path):
    device = torch.device("cuda")
    pattern = {"reference": DilatedPattern((512, 1024), (1, 2))}
    pairs = benchmarks.backends(pattern, opponents=["flash"], lengths=[4096], heads=4, head_dims=[64], device=device)
    records = run_sides(pairs, device=device, output_dir=str(tmp_path), repetitions=5)
    assert len(read_records(tmp_path / "results.jsonl")) == len(records) == 4
    table = ratio_table(records, "backends")
    assert (table.low <= table.ratio).all()
    assert table[["error_a", "error_b"]].max(axis=None) < 0.02
    sides = side_table(records, "backends")
    out_bytes = 4096 * 4 * 64 * 2
    assert (sides.peak_bytes >= out_bytes).all()
