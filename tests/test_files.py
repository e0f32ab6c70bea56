"""A file is replaced whole or stays as it was, whoever writes and whatever ends the writing."""

import gzip
import json
import math
import os
from pathlib import Path

import pytest
from full_disk import room_for

from hilbert_lib.cli.options import print_json
from hilbert_lib.files import json_text, one_line, write_whole
from hilbert_lib.lab.figures.record import read_figures, write_figures
from hilbert_lib.lab.records import append_lines, pack_records

LARGE = json.dumps({"whole": True}) + " " * 2**18  # several writes of the system, if it were written in place


def test_a_disk_that_fills_while_a_file_is_written_leaves_the_old_one_whole_and_nothing_beside(tmp_path):
    path = write_whole(tmp_path / "one.json", "old")
    with room_for(1000), pytest.raises(OSError, match="File too large"):
        write_whole(path, LARGE)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_is_stopped_before_the_new_file_has_its_name_leaves_the_old_one_whole(tmp_path, monkeypatch):
    path, written = write_whole(tmp_path / "one.json", "old"), []

    def stopped(draft, target):
        written.append(draft.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert written == ["new"]  # all of it was there
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", [b"n" * 255, b"\xff *?[a]\n.json", b"-n", b"..."], ids=range(4))
def test_any_name_that_the_system_takes_is_written(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    assert write_whole(write_whole(path, "old"), "new").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def strict(text):
    """What a reader that knows JSON alone finds."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_numbers_that_json_has_no_word_for_are_written_as_json():
    value = {"a": [math.nan, {"b": -math.inf}], "NaN": "Infinity \\", "c": 'NaN "-Infinity"', "d": math.inf, "e": 1.5}
    read = strict(json_text(value, indent=1))
    assert read == value | {"a": [None, {"b": -math.inf}]}
    assert strict(json_text({"a": 1.5}, separators=(",", ":"))) == {"a": 1.5}
    circle = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        json_text(circle)


def test_every_file_of_records_and_figures_is_json(tmp_path):
    append_lines([{"error": math.nan, "environment": {"mhz": math.inf}}], tmp_path / "results.jsonl")
    line = (tmp_path / "results.jsonl").read_text()
    assert strict(line) == {"error": None, "environment": {"mhz": math.inf}}
    pack_records(tmp_path / "results.jsonl")
    packed = gzip.decompress((tmp_path / "results.jsonl.gz").read_bytes()).decode()
    assert [strict(line) for line in packed.splitlines()] == [{"error": None, "environment": {"mhz": math.inf}}]
    figure = {"draw": "d", "options": {"limit": math.inf}, "table": {"x": [1.0, -math.inf]}}
    write_figures(tmp_path, {"one": figure})
    (path,) = list(tmp_path.glob("figures*"))
    assert strict(gzip.decompress(path.read_bytes())) == {"one": figure}
    assert read_figures(tmp_path) == {"one": figure}


def test_what_the_command_prints_as_json_is_json(capsys):
    print_json([{"ratio": math.nan, "when": math.inf}])
    assert strict(capsys.readouterr().out) == [{"ratio": None, "when": math.inf}]


LINES = {
    "": "",
    "\n \t\r\n": "",
    "one\ntwo": "one",
    "\r\n\x0b one\rtwo": "one",
    "one\u2028two": "one",
    "\x1b[0;31mred\x1b[0m\tand\x07 \x00black\udcff": "red and black",
    "a\u200bb \u0905 \u00e9": "a b \u0905 \u00e9",
}


@pytest.mark.parametrize("text", LINES, ids=ascii)
def test_of_a_text_of_any_kind_one_line_that_can_be_printed_is_left(text):
    assert one_line(text) == LINES[text]


def test_a_long_line_is_cut():
    assert one_line("x" * 500) == "x" * 500
    assert one_line("x" * 10**7) == "x" * 499 + "\u2026"
