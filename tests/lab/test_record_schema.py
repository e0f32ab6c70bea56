"""No speed stands without a check that passed: the schema refuses any other record, and all committed ones hold."""

import copy
import json

import pytest
from jsonschema import Draft202012Validator

from hilbert_lib.lab import record_schema
from hilbert_lib.lab.ledger import numbers
from hilbert_lib.lab.record_schema import SCHEMA, faults_below, faults_of, main
from hilbert_lib.lab.records import MACHINES, REPORTS, RESULTS, append_lines, newest_run, read_records
from hilbert_lib.lab.sweeps.halos import GRID_RESULTS
from hilbert_lib.lab.tables import sides_of
from hilbert_lib.lab.timing import Case, compare_paired, measure

CASE = Case("a", lambda: None, {"dtype": "bfloat16"}, error=0.002)
HOW = {"device": "cpu", "repetitions": 3, "min_sample_ms": 0.001}
RING = {"sweep": "weak", "side": "auto", "ranks": 2, "backward": True, "forward_ms": 1.0, "out_error": 0.002}
RING |= {"dq_error": 0.002}
CAUSE = {"kind": "cause", "cause": "fair", "standard_ms": [1.0], "hilbert_ms": [1.0], "ratio": 1.0, "interval": [1, 1]}
CAUSE |= {"output_difference": 0.0}


@pytest.fixture(scope="module")
def records():
    """A record of each kind, as the laboratory makes it."""
    pair, one = (json.loads(json.dumps(x.record())) for x in (compare_paired(CASE, CASE, **HOW), measure(CASE, **HOW)))
    point = {"kind": "point", "point": {}, "outcomes": {}, "records": [pair]}
    found = {"comparison": pair, "measurement": one, "back to back": {"kind": "back to back", "sides": [one]}}
    return found | {"point": point, "cause": CAUSE, "ring": RING}


@pytest.mark.evidence
@pytest.mark.parametrize("folder", sorted(REPORTS.glob(f"{MACHINES}/*")), ids=lambda folder: folder.name[-20:])
def test_every_committed_record_keeps_to_the_schema(folder):
    assert list(faults_below(folder)) == []


@pytest.mark.evidence
def test_the_whole_schema_holds_too_for_tools_that_do_not_know_kinds(records):
    schema = json.loads(SCHEMA.read_text())
    whole = Draft202012Validator(schema)
    run = newest_run("06_kernel_benchmarks")
    assert all(whole.is_valid(record) for record in [*records.values(), *read_records(run / RESULTS)[:50]])
    assert {definition["$ref"].rpartition("/")[2] for definition in schema["anyOf"]} >= {
        kind.replace(" ", "_") for kind in record_schema.TIMED_KINDS if kind != "measurement"
    }


def changed(record, path, value):
    """A copy with a value at a path, or without it (None)."""
    made = copy.deepcopy(record)
    *inside, last = path
    place = made
    for name in inside:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return made


@pytest.mark.parametrize("kind", ["comparison", "measurement", "back to back", "point", "cause", "ring"])
def test_a_record_as_it_is_made_holds(records, kind):
    assert faults_of(records[kind]) == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("comparison", ["b", "error"], None),
        ("comparison", ["b", "error"], 0.03),
        ("comparison", ["a", "error"], float("nan")),
        ("comparison", ["a", "samples_ms"], []),
        ("comparison", ["interval"], None),
        ("measurement", ["error"], None),
        ("measurement", ["error"], "small"),
        ("back to back", ["sides", 0, "error"], 1.0),
        ("point", ["records", 0, "b", "error"], 0.5),
        ("cause", ["output_difference"], 0.5),
        ("cause", ["output_difference"], None),
        ("ring", ["out_error"], 0.5),
        ("ring", ["dq_error"], None),
        ("ring", ["dq_error"], 0.5),
    ],
)
def test_a_speed_without_a_check_that_passed_is_refused(records, kind, path, value):
    assert faults_of(changed(records[kind], path, value))


def test_an_error_is_as_small_as_its_dtype_allows(records):
    single = changed(records["measurement"], ["parameters", "dtype"], "float32")
    assert faults_of(single)
    assert faults_of(changed(single, ["error"], 1e-5)) == []
    by_tf32 = changed(single, ["parameters", "allows_tf32"], True)
    assert faults_of(changed(by_tf32, ["error"], 2e-3)) == []
    assert faults_of(changed(by_tf32, ["error"], 6e-3))
    assert faults_of(changed(changed(single, ["error"], 2e-3), ["parameters", "allows_tf32"], False))
    double = changed(single, ["parameters", "dtype"], "float64")
    assert faults_of(changed(double, ["error"], 1e-5))
    assert faults_of(changed(double, ["error"], 1e-12)) == []


def test_a_time_of_a_kernel_without_a_part_is_named_so(records):
    wrong = changed(records["measurement"], ["error"], 100.0)
    assert faults_of(changed(wrong, ["name"], "without softmax")) == []
    assert faults_of(wrong)


def test_sides_of_another_function_alone_have_no_error_and_no_number_is_theirs():
    unchecked = changed({**RING, "out_error": None, "dq_error": None}, ["side"], "dense ring")
    assert faults_of(unchecked) == []
    assert faults_of({**unchecked, "side": "auto"})


@pytest.mark.evidence
def test_no_number_is_taken_from_a_side_without_a_check():
    ring = read_records(newest_run(numbers.RING) / RESULTS)
    grids = read_records(newest_run(numbers.RING, GRID_RESULTS) / GRID_RESULTS)
    for records in (ring, grids):
        assert any(record["out_error"] is None for record in records)
    checked = [[record for record in records if record["out_error"] is not None] for records in (ring, grids)]
    assert numbers._ring(checked[0]) == numbers._ring(ring)
    assert numbers._weak_grids(checked[1]) == numbers._weak_grids(grids)


def test_a_kind_that_nobody_knows_holds_no_time():
    assert faults_of({"kind": "new", "count": 1}) == []
    for name in ("median_ms", "forward_ms", "ms", "samples_ms", "flop_per_s"):
        assert faults_of({"kind": "new", name: 1.0})


def test_who_sends_a_run_in_is_told_the_file_the_record_and_the_fault(records, tmp_path, capsys):
    good, bad = records["comparison"], changed(records["comparison"], ["a", "error"], 0.5)
    append_lines([good, bad], tmp_path / "run" / RESULTS)
    assert main(str(tmp_path)) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{tmp_path / 'run' / RESULTS}, record 2: a.error: 0.5 is greater than the maximum of 0.02",
        "1 faults",
    ]
    assert sides_of(good)
    with pytest.raises(SystemExit, match="FOLDER must be a folder of runs, got 'nowhere'"):
        main("nowhere")


@pytest.mark.parametrize("line", ['{"kind": "comparison"', "[1, 2]", "null", ""])
@pytest.mark.filterwarnings("ignore:.*unfinished or no record")
def test_a_file_without_a_record_is_no_run_without_faults(line, tmp_path, capsys):
    """A reader passes over such lines, and so nothing of a run whose every line is broken would be checked."""
    (tmp_path / RESULTS).write_text(line + "\n")
    assert main(str(tmp_path)) == 1
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / RESULTS}, all lines: no record", "1 faults"]


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="FOLDER must hold files of records"):
        main(str(tmp_path))
    for arguments in ((), ("a", "b")):
        with pytest.raises(SystemExit, match=f"FOLDER; got {len(arguments)} arguments"):
            main(*arguments)
