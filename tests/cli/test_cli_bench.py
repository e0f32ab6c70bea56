"""`hilbert bench`: what it measures, prints and refuses, and how it ends."""

import errno
import json
import os
import re
from functools import partial
from unittest.mock import Mock

import pytest
from command import call

from hilbert_lib.cli.options import numbers
from hilbert_lib.lab import records

SMALL = ["--lengths", "64", "--segment-lengths", "16,32", "--dilation-rates", "1,2", "--heads", "2", "--head-dim", "8"]


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Call `hilbert bench` in an empty folder, on the CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    return partial(call, "bench")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1k:1m", [2**n for n in range(10, 21)]),
        ("1k,4k,3000", [1024, 4096, 3000]),
        ("1:5,7", [1, 2, 4, 5, 7]),
        ("2K:2K", [2048]),
        ("1024G", [2**40]),
    ],
)
def test_lengths_double_to_the_end_of_a_range_or_are_a_list(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "1x"], "'1x' is no whole number above 0"),
        (["--lengths", "0"], "'0' is no whole number above 0"),
        (["--lengths", "4k:1k"], "'4k:1k' ends below its start"),
        (["--lengths", "99999999999g"], "'99999999999g' is above 1024g"),
        (["--lengths", "1g", "--heads", "99999999999"], "lengths must be such that q has less than 2^63 bytes"),
        (["--backends", "flsh"], "backends must be a list of"),
        (["--direction", "sideways"], "directions must be a list of forward, backward; got ['sideways']"),
        (["--dtype", "int8"], "'int8' is not one of 'bfloat16', 'float16', 'float32', 'float64'"),
        (["--dilation-rates", "1"], "dilation_rates"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_runs(bench, tmp_path, words, message):
    assert message in " ".join(bench("attention", *words, status=2).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("statuses", "status"),
    [(("ok", "failed"), 1), (("failed", "ok"), 1), (("ok", "cannot serve"), 0), (("ok", "ok"), 0)],
)
def test_the_exit_status_is_1_if_anything_failed(bench, monkeypatch, statuses, status):
    def run(runner, points, *, on_point, **_):
        for number, (point, each) in enumerate(zip(points, statuses, strict=True)):
            outcomes = {side: {"status": each, "cause": "", "paired": False} for side in point["sides"]}
            on_point({"key": str(number), "point": point, "records": [], "outcomes": outcomes}, False)

    monkeypatch.setattr("hilbert_lib.lab.guarded.runner.SafeBenchmarkRunner.run", run)
    bench("attention", *SMALL, "--backends", "sdpa", "--direction", "forward,backward", status=status)


@pytest.mark.usefixtures("calls_are_copied")
def test_backends_are_timed_recorded_shown_and_reused(bench, tmp_path):
    asked = ["attention", *SMALL, "--backends", "sdpa,eager,flash", "--json", "out.jsonl"]
    first = bench(*asked)
    assert "forward 64  flash cannot serve, sdpa ok, eager ok" in first
    assert re.search(r"^ +64 +forward +sdpa +ok", first, re.MULTILINE)
    assert re.search(r"^ +64 +forward +flash +cannot serve .*needs a CUDA device, got cpu$", first, re.MULTILINE)
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    (record,) = line["records"]
    assert [record[side]["name"] for side in "ab"] == ["sdpa", "eager"]
    assert record["b"]["error"] < 1e-5
    assert len(record["b"]["samples_ms"]) == record["b"]["n"] >= 5
    assert line["environment"]["code_hash"]
    assert record["output_difference"] is None
    assert "(reused)" in bench(*asked)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_a_failed_side_is_shown_and_retried_when_asked(bench, monkeypatch):
    words = ["attention", *SMALL, "--backends", "eager"]
    monkeypatch.setenv("HILBERT_SAFETY_MAX_SECONDS", "0.1")  # shorter than the start of a process
    output = bench(*words, status=1)
    assert re.search(r"^ +64 +forward +eager +timed out .*longer than 0.1 s$", output, re.MULTILINE)
    assert "(reused)" in bench(*words, status=1)
    monkeypatch.delenv("HILBERT_SAFETY_MAX_SECONDS")
    assert "(reused)" not in bench(*words, "--retry-failed")


def test_a_dry_run_says_what_would_not_be_tried_and_why(bench, tmp_path):
    output = bench("attention", "--lengths", "1k,1m", "--backends", "sdpa,reference,cudnn", "--dry-run")
    assert "forward 1024  sdpa  would be tried" in output
    assert re.search(r"forward 1048576  reference  not tried: does not fit: \d+", output)
    assert "forward 1024  cudnn  cannot serve: needs a CUDA device, got cpu" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("calls_are_copied")
def test_what_was_measured_and_cannot_be_written_is_shown(bench, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.jsonl")
    monkeypatch.setattr(records, "append_lines", Mock(side_effect=full))
    output = bench("attention", *SMALL, "--backends", "eager", "--json", "out.jsonl", status=1)
    assert re.search(r"^ +64 +forward +eager +ok", output, re.MULTILINE)
    assert "Error: [Errno 28] No space left on device: 'out.jsonl'" in output
