"""A file is replaced whole or stays as it was, whoever writes and whatever ends the writing."""

import json
import os
from pathlib import Path

import pytest
from full_disk import room_for

from hilbert_lib.files import write_whole

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
