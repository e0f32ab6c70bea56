"""Records of what was measured, packed and read back; which run speaks for a notebook; runs side by side."""

import gzip
import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_machine import FakeMachine

from hilbert_lib.lab import records
from hilbert_lib.lab.records import RESULTS, read_records
from hilbert_lib.lab.suite.points import read_notebook
from hilbert_lib.lab.tables import sides_of
from hilbert_lib.lab.timing import compare_paired, measure

NOTEBOOKS = records.REPORTS.parent / "notebooks"


@pytest.fixture
def machine(monkeypatch):
    return FakeMachine(monkeypatch)


@pytest.fixture
def on_hardware(monkeypatch):
    """Record as if on the named hardware."""
    return lambda name: monkeypatch.setattr(records, "environment", lambda: {"hardware": name})


def test_records_hold_samples_statistics_error_and_environment(machine, tmp_path):
    case = machine.case("a", 2.0, parameters={"seq_len": 8}, error=1e-6, useful_flop=4.0)
    records.append_records([measure(case, device="cpu", repetitions=3)], tmp_path)
    records.append_records([compare_paired(case, case, device="cpu", repetitions=3)], tmp_path)
    records.append_records([], tmp_path)
    measurement, comparison = read_records(tmp_path / RESULTS)
    expected = {"kind": "measurement", "name": "a", "parameters": {"seq_len": 8}, "samples_ms": [2.0, 2.0, 2.0], "n": 3}
    expected |= {"median_ms": 2.0, "warmup": 5, "calls_per_sample": 1, "error": 1e-6, "device": "cpu"}
    expected |= {"useful_flop": 4.0, "useful_bytes": None, "sm_clock_mhz": [None, None]}
    assert expected.items() <= measurement.items()
    assert {"hardware", "torch", "code_hash", "kernel_mode"} <= measurement["environment"].keys()
    assert (comparison["kind"], comparison["ratio"], comparison["interval"]) == ("comparison", 1.0, [1.0, 1.0])
    assert comparison["a"]["samples_ms"] == comparison["b"]["samples_ms"] == [2.0, 2.0, 2.0]
    json.loads((tmp_path / RESULTS).read_text().splitlines()[0], parse_constant=pytest.fail)  # no NaN


def test_a_killed_run_costs_its_unfinished_line_alone(machine, tmp_path, on_hardware):
    on_hardware("one")
    path = tmp_path / RESULTS
    measured = [measure(machine.case(name, 2.0), device="cpu", repetitions=3) for name in "abc"]
    records.append_records(measured[:2], tmp_path)
    path.write_bytes(path.read_bytes()[:-30])  # killed while it wrote b
    records.append_records(measured[2:], tmp_path)  # resumed
    for _ in range(2):
        with pytest.warns(UserWarning, match="line 2: unfinished or no record, skipped"):
            assert [each["name"] for each in read_records(path)] == ["a", "c"]
    with pytest.warns(UserWarning, match="line 2"):
        records.pack_records(path)
    assert [each["name"] for each in read_records(path)] == ["a", "c"]


def test_a_line_that_is_no_record_is_skipped_with_a_warning(tmp_path):
    path = tmp_path / RESULTS
    for line in (b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000):
        path.write_bytes(b'{"name": "a"}\n' + line + b"\n")
        with pytest.warns(UserWarning, match="line 2: unfinished or no record, skipped"):
            assert read_records(path) == [{"name": "a"}]


def test_writers_at_the_same_time_do_not_mix_their_lines(machine, tmp_path, on_hardware):
    on_hardware("one")
    written = [measure(machine.case("a", 2.0), device="cpu", repetitions=1000)] * 3  # longer than any buffer
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda _: records.append_records(written, tmp_path), range(8)))
    with warnings.catch_warnings(action="error"):
        assert len(read_records(tmp_path / RESULTS)) == 24


def facts(moment, hardware="one"):
    return {"utc": f"2026-11-26T00:00:{moment:02d}", "hardware": hardware, "gpus": [{"name": "a", "clock": moment}]}


def test_packed_records_are_plain_lines_of_whole_records(tmp_path):
    path = tmp_path / RESULTS
    lines = [{"name": "a", "environment": facts(n, "one" if n < 40 else "two"), "n": n} for n in range(50)]
    lines.append({"name": "no environment"})
    records.append_lines(lines, path)
    size = path.stat().st_size
    records.pack_records(path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl.gz"]
    (packed,) = tmp_path.iterdir()
    assert packed.stat().st_size < size / 5
    assert read_records(path) == read_records(packed) == lines
    assert [json.loads(line) for line in gzip.decompress(packed.read_bytes()).splitlines()] == lines
    records.append_lines(lines[:1], path)  # measured later
    assert read_records(path) == [*lines, lines[0]]
    records.pack_records(path)
    assert read_records(packed) == [*lines, lines[0]]
    assert not path.exists()
    (tmp_path / "empty.jsonl").write_text("")
    records.pack_records(tmp_path / "empty.jsonl")
    assert (tmp_path / "empty.jsonl").read_text() == ""


def test_records_of_older_code_which_number_their_environments_are_read(tmp_path):
    first, second = {"hardware": "one", "threads": 2}, {"hardware": "two"}
    lines = [{"environments": [first, second]}]
    lines += [{"n": n, "environment": [n % 2, {"utc": f"day {n}"}]} for n in range(3)]
    lines += [{"n": 3}, {"n": 4, "environment": [1, {"hardware": "another"}]}]
    path = tmp_path / RESULTS
    packed = tmp_path / f"{RESULTS}.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    records.append_lines([{"n": 5, "environment": second}], path)
    told = [
        first | {"utc": "day 0"},
        second | {"utc": "day 1"},
        first | {"utc": "day 2"},
        None,
        {"hardware": "another"},
    ]
    assert [each.get("environment") for each in read_records(path)] == [*told, second]
    records.pack_records(path)
    assert b"environments" not in gzip.decompress(packed.read_bytes())
    assert [each.get("environment") for each in read_records(packed)] == [*told, second]


def test_what_this_code_measured_on_this_hardware_is_found_again(tmp_path):
    here = records.environment()
    others = [{"n": name, "environment": {**here, name: "x"}} for name in records.MACHINE]
    records.append_lines([*others, {"n": 1, "environment": here}, {"n": 2}], tmp_path / RESULTS)
    assert [each["n"] for each in records.measured_before(tmp_path)] == [1]
    records.pack_records(tmp_path / RESULTS)
    assert [each["n"] for each in records.measured_before(tmp_path)] == [1]
    assert records.measured_before(tmp_path / "nowhere") == []


def made(path, day, gpus=1, pack=False):
    records.append_lines([{"environment": {"utc": f"2026-11-{day:02d}", "gpus": [{}] * gpus}}], path / RESULTS)
    if pack:
        records.pack_records(path / RESULTS)
    return path


def test_the_newest_finished_run_speaks_and_of_a_ring_that_on_the_most_gpus(tmp_path):
    for folder, day in (("a/05_x-1", 3), ("b/05_x-n=2-0a", 9), ("b/05_xy", 11), ("c/05_x", 5), ("c/05_x-3.failed", 12)):
        made(tmp_path / "h200" / folder, day, pack=day == 9)
    machines = [tmp_path / "h200"]
    assert records.newest_run("05_x", machines=machines) == tmp_path / "h200/b/05_x-n=2-0a"
    assert records.newest_run("05", machines=machines) is None
    for name, newest in (("05_x", "h200/b/05_x-n=2-0a"), ("07_ring_attention", "h200x4/d/07_ring_attention")):
        made(tmp_path / "h200x4/d" / name, 1, gpus=4)
        made(tmp_path / "h200x2/e" / name, 2, gpus=2)
        assert records.newest_run(name, machines=tmp_path.glob("h200*")) == tmp_path / newest


def test_the_newest_run_speaks_whatever_its_gpu_and_one_without_where_its_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "REPORTS", tmp_path)
    path = made(tmp_path / "h200" / "a" / "05_x-1", 9, gpus=0)
    assert records.newest_run("05_x") is None
    assert records.newest_run("05_x", machines=[tmp_path / "h200"]) == path
    for day, machine in ((1, "h200"), (2, "h100"), (3, "local")):
        made(tmp_path / machine / "b" / "05_x-1", day)
    assert records.newest_run("05_x") == tmp_path / "h100/b/05_x-1"


def test_a_notebook_that_was_cells_of_another_is_found_under_the_older_name(tmp_path, monkeypatch):
    """So long as these cells were there: later runs under the older name hold none of its records."""
    monkeypatch.setattr(records, "CAME_FROM", {"05b_y": ("05_x", "rates")})
    for name, day, parameters in (("05_x-1", 1, ["lengths", "rates"]), ("05_x-2", 3, ["lengths"])):
        run = made(tmp_path / "h200" / "a" / name, day)
        facts = {"utc": f"2026-11-{day:02d}", "gpus": [{}]}
        manifest = {"parameters": dict.fromkeys(parameters, 1), "environment": facts}
        (run / "manifest.json").write_text(json.dumps(manifest))
    made(tmp_path / "h200" / "a" / "05_x-3", 4)  # who kept the records alone kept no word of the cells
    machines = [tmp_path / "h200"]
    assert records.newest_run("05b_y", machines=machines) == tmp_path / "h200/a/05_x-1"
    assert records.newest_run("05_x", machines=machines) == tmp_path / "h200/a/05_x-3"
    own = made(tmp_path / "h200" / "b" / "05b_y-1", 2)
    assert records.newest_run("05b_y", machines=iter(machines)) == own
    assert len(records.committed_runs("05b_y", machines=iter(machines))) == 2


@pytest.mark.evidence
@pytest.mark.parametrize("name", records.CAME_FROM)
def test_records_under_the_older_name_are_those_of_cells_that_moved(name):
    older_name, parameter = records.CAME_FROM[name]
    parameters = {each: read_notebook(NOTEBOOKS / f"{each}.ipynb").parameters for each in (name, older_name)}
    assert parameter in parameters[name]
    assert parameter not in parameters[older_name]
    assert any(run.name.startswith(f"{older_name}-") for run in records.committed_runs(name))


@pytest.fixture
def run_folder(machine, on_hardware, tmp_path):
    """Make a run's folder: names and times of its cases, and its hardware."""

    def make(folder, times_ms, hardware="one GPU"):
        on_hardware(hardware)
        jitter = np.random.default_rng(len(folder))
        for name, milliseconds in times_ms.items():
            case = machine.case(
                name,
                lambda milliseconds=milliseconds: milliseconds * jitter.uniform(0.95, 1.05),
                parameters={"seq_len": 8, "layout": "hilbert"},
                error=milliseconds * 1e-6,
            )
            records.append_records([measure(case, device="cpu")], tmp_path / folder / "06_notebook")
        return tmp_path / folder

    return make


def test_runs_on_one_hardware_are_compared_by_the_ratio_of_medians(run_folder):
    a, b = run_folder("a", {"kernel": 6.0, "old": 2.0}), run_folder("bb", {"kernel": 4.0, "new": 2.0})
    c = run_folder("ccc", {"kernel": 12.0})
    records.pack_records(b / "06_notebook" / RESULTS)
    table = records.compare_runs(a, b).set_index("name")
    kernel = table.loc["kernel"]
    assert kernel["parameters"] == 'layout="hilbert", seq_len=8'
    assert kernel["ratio"] == pytest.approx(1.5, rel=0.05)
    assert kernel["low"] < kernel["ratio"] < kernel["high"]
    assert kernel["low"] < 1.5 < kernel["high"]
    assert (kernel["error_a"], kernel["error_b"]) == (6e-6, 4e-6)
    assert table["found"].to_dict() == {"kernel": "both", "old": "only in A", "new": "only in B"}
    assert np.isnan(table.loc["old", ["ratio", "low"]].astype(float)).all()
    of_three = records.compare_runs(a, b, c).query("name == 'kernel'").set_index("run")
    assert of_three.ratio.to_dict() == pytest.approx({"B": 1.5, "C": 0.5}, rel=0.05)


def pair(folder, machine, ratio):
    a, b = (machine.case(name, ms, parameters={"n": 8}) for name, ms in (("plain", 2.0 * ratio), ("hilbert", 2.0)))
    records.append_records([compare_paired(a, b, device="cpu", repetitions=30)], folder)
    return folder


def test_runs_on_different_hardware_are_compared_by_ratios_of_pairs(machine, on_hardware, tmp_path):
    on_hardware("NVIDIA H200")
    here = pair(tmp_path / "h200", machine, 2.0)
    records.append_records([measure(machine.case("alone", 2.0), device="cpu")], here)
    on_hardware("NVIDIA H100")
    there = pair(tmp_path / "h100", machine, 3.0)
    (row,) = records.compare_runs(here, there).to_dict("records")
    assert (row["a"], row["b"], row["a_parameters"], row["run"]) == ("plain", "hilbert", "n=8", "B")
    assert (row["ratio_here"], row["ratio_there"], row["ratio_of_ratios"]) == (2.0, 3.0, 1.5)
    assert row["low"] == row["high"] == 1.5
    records.append_records([measure(machine.case("x", 2.0), device="cpu")], here)  # recorded as an H100 too
    with pytest.raises(ValueError, match="NVIDIA H100 and NVIDIA H200"):
        records.compare_runs(here, there)


def test_runs_that_cannot_be_compared_are_refused(run_folder, tmp_path):
    a, b = run_folder("a", {"kernel": 6.0}, "NVIDIA H200"), run_folder("b", {"kernel": 4.0}, "GTX 1080")
    with pytest.raises(ValueError, match=r"GTX 1080 and NVIDIA H200.*compared by their pairs, and one has none"):
        records.compare_runs(a, b)
    with pytest.raises(ValueError, match="two runs or more"):
        records.compare_runs(a)
    with pytest.raises(ValueError, match=r"no measurements.*nowhere"):
        records.compare_runs(a, tmp_path / "nowhere")


def test_the_sides_of_pairs_count_and_repeats_are_pooled(machine, on_hardware, tmp_path):
    on_hardware("one")
    case = machine.case("a", 2.0, error=1e-3)
    records.append_records([compare_paired(case, machine.case("b", 1.0), device="cpu", repetitions=30)], tmp_path)
    records.append_records([measure(machine.case("a", 4.0, error=1e-6), device="cpu", repetitions=29)], tmp_path)
    table = records.compare_runs(tmp_path, tmp_path).set_index("name")
    assert list(table.index) == ["a", "b"]
    assert table.loc["a", ["median_a_ms", "error_a"]].to_list() == [2.0, 1e-3]  # of 30 at 2 ms and 29 at 4 ms
    records.append_records([measure(machine.case("a", 4.0, error=2e-3), device="cpu", repetitions=2)], tmp_path)
    table = records.compare_runs(tmp_path, tmp_path).set_index("name")
    assert table.loc["a", ["median_a_ms", "error_a"]].to_list() == [4.0, 2e-3]  # whichever repeat it is of


def test_columns_hold_the_medians_whose_ratio_stands_beside_them(tmp_path):
    sides = {"a": ([2.0, 4.0, 9.0], 0.25), "b": ([1.0, 3.0, 5.0], 0.5)}
    for folder, (samples, error) in sides.items():
        case = {"kind": "measurement", "name": "x", "parameters": {}, "device": "cpu", "samples_ms": samples}
        records.append_lines([case | {"error": error, "environment": {"hardware": "one"}}], tmp_path / folder / RESULTS)
    (row,) = records.compare_runs(tmp_path / "a", tmp_path / "b").to_dict("records")
    assert (row["median_a_ms"], row["median_b_ms"], row["ratio"]) == (4.0, 3.0, 4 / 3)
    assert (row["error_a"], row["error_b"]) == (0.25, 0.5)


def test_what_failed_or_is_of_another_kind_is_not_compared(run_folder):
    whole = run_folder("whole", {"kernel": 6.0})
    broken = run_folder("broken", {"kernel": 60.0, "other": 1.0}) / "06_notebook"
    broken.rename(whole / "06_notebook.failed")
    shutil.copytree(whole / "06_notebook.failed", whole / ".06_notebook.1")
    ranks = {"side": "auto", "ranks": 4, "environment": {"hardware": "elsewhere"}}  # notebook 07's
    records.append_lines([ranks, {**ranks, "kind": "counters"}], whole / "06_notebook" / RESULTS)
    assert records.compare_runs(whole, whole)["name"].to_list() == ["kernel"]


HALF = {"branches": "64:1 5000:6", "length": 4096, "head_dim": 64, "dtype": "bfloat16"}
HOPPER_CARD = {"utc": "2026-11-01T00:00:00", "gpus": [{"name": "NVIDIA H100", "capability": "9.0"}]}
NAMED = {  # what differs from a side by "triton" in half precision, the facts of its record, and its name now
    "as it was": ({}, HOPPER_CARD, "hopper"),
    "deterministic": ({"name": "triton, deterministic"}, HOPPER_CARD, "hopper, deterministic"),
    "another backend": ({"name": "cudnn"}, HOPPER_CARD, "cudnn"),
    "another card": ({}, {"gpus": [{"capability": "8.0"}]}, "triton"),
    "of a CPU": ({}, {"gpus": []}, "triton"),
    "of nobody knows what": ({}, {}, "triton"),
    "of today": ({}, {**HOPPER_CARD, "backends": ["hopper", "triton"]}, "triton"),
    "float32": ({"dtype": "float32"}, HOPPER_CARD, "triton"),
    "wide": ({"head_dim": 256}, HOPPER_CARD, "triton"),
    "ragged": ({"head_dim": 20}, HOPPER_CARD, "triton"),
    "rows out of reach": ({"branches": "5000:6", "length": 4099}, HOPPER_CARD, "triton"),
    "a grid": ({"branches": None, "grid": [64, 64]}, HOPPER_CARD, "triton"),
}


def side_of(name="triton", **changed):
    work = {each: value for each, value in {**HALF, "sweep": "backends", **changed}.items() if value is not None}
    return {"name": name, "parameters": work, "samples_ms": [1.0]}


@pytest.mark.parametrize("kind", NAMED)
def test_triton_of_an_old_record_reads_as_hopper_where_those_kernels_ran(tmp_path, kind):
    changed, facts, name = NAMED[kind]
    own, other = side_of(**changed), side_of("flash")
    kinds = [own, {"a": own, "b": other}, {"a": other, "b": own}, {"sides": [other, own]}]
    records.append_lines([{**each, "environment": facts} for each in kinds], tmp_path / RESULTS)
    records.pack_records(tmp_path / RESULTS)
    alone, first, second, long = read_records(tmp_path / RESULTS)
    assert [alone["name"], first["a"]["name"], second["b"]["name"], long["sides"][1]["name"]] == [name] * 4
    assert {first["b"]["name"], second["a"]["name"], long["sides"][0]["name"]} == {"flash"}
    assert {each: alone[each] for each in ("parameters", "samples_ms")} == {
        "parameters": own["parameters"],
        "samples_ms": [1.0],
    }


def test_packing_keeps_the_names_that_were_written(tmp_path):
    record = {**side_of(), "environment": HOPPER_CARD}
    records.append_lines([record], tmp_path / RESULTS)
    records.pack_records(tmp_path / RESULTS)
    packed = gzip.decompress((tmp_path / f"{RESULTS}.gz").read_bytes())
    assert json.loads(packed) == record


@pytest.mark.parametrize(("dtype", "name"), [("float16", "hopper"), ("float32", "triton")])
def test_the_sides_of_an_old_point_are_named_as_today(tmp_path, dtype, name):
    pattern = {"segment_lengths": [64], "dilation_rates": [1], "offsets": "head", "mixing": "softmax"}
    point = {"pattern": pattern, "length": 128, "head_dim": 64, "dtype": dtype, "sides": ["triton", "flash"]}
    pair = {"a": side_of(branches="64:1", length=128, dtype=dtype), "b": side_of("flash")}
    line = {"point": point, "outcomes": {"triton": {"status": "ok"}, "flash": {}}, "records": [pair]}
    records.append_lines([{**line, "environment": HOPPER_CARD}], tmp_path / RESULTS)
    (found,) = read_records(tmp_path / RESULTS)
    assert found["point"]["sides"] == list(found["outcomes"]) == [name, "flash"]
    assert [found["records"][0][each]["name"] for each in "ab"] == [name, "flash"]


@pytest.mark.parametrize(
    ("card", "name"), [("nvidia-h200-torch2.11.0-0", "hopper"), ("nvidia-a100-torch2.11.0-0", "triton")]
)
def test_a_record_without_an_environment_is_of_the_card_that_its_folder_names(tmp_path, card, name):
    records.append_lines([side_of()], tmp_path / card / "bench" / RESULTS)
    (found,) = read_records(tmp_path / card / "bench" / RESULTS)
    assert found["name"] == name


def test_what_is_measured_today_says_which_backends_it_knows():
    assert {"hopper", "triton"} <= set(records.environment()["backends"])


@pytest.mark.evidence
def test_the_committed_calls_of_the_fused_kernel_are_found_by_its_name_of_today():
    sides = [each for record in records.committed_records() for each in sides_of(record) if "name" in each]
    names = {each["name"] for each in sides if each["parameters"].get("sweep") == "backends"}
    assert "hopper" in names
    assert "triton" not in names
