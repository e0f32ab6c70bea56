"""Which run speaks for a notebook."""

import json

from hilbert_lib.lab import committed
from hilbert_lib.lab.committed import newest_run


def test_the_newest_run_is_taken_of_the_ring_on_the_most_gpus_no_failed_one_and_none_of_a_longer_name(tmp_path):
    def made(folder, day, gpus=1):
        path = tmp_path / folder / "results.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"environment": {"utc": f"2026-11-{day:02d}", "gpus": [{}] * gpus}}))

    for folder, day in (("a/05_x-1", 3), ("b/05_x-2", 9), ("b/05_xy", 11), ("c/05_x", 5), ("c/05_x-3.failed", 12)):
        made(f"h200/{folder}", day)
    machines = [tmp_path / "h200"]
    assert newest_run("05_x", machines=machines) == tmp_path / "h200/b/05_x-2"
    assert newest_run("05", machines=machines) is None
    for name, newest in (("05_x", "h200/b/05_x-2"), ("07_ring_attention", "h200x4/d/07_ring_attention")):
        made(f"h200x4/d/{name}", 1, gpus=4)
        made(f"h200x2/e/{name}", 2, gpus=2)
        assert newest_run(name, machines=tmp_path.glob("h200*")) == tmp_path / newest


def test_a_run_without_a_gpu_speaks_for_no_notebook_unless_its_folder_is_named(tmp_path, monkeypatch):
    path = tmp_path / "h200" / "a" / "05_x-1" / "results.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"environment": {"utc": "2026-11-01", "gpus": []}}))
    monkeypatch.setattr(committed, "REPORTS", tmp_path)
    assert newest_run("05_x") is None
    assert newest_run("05_x", machines=[tmp_path / "h200"]) == path.parent


def test_a_run_on_another_gpu_is_committed_and_speaks_for_no_notebook(tmp_path, monkeypatch):
    for machine, day in (("h200", 1), ("h100", 2)):
        path = tmp_path / machine / "a" / "05_x-1" / "results.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"environment": {"utc": f"2026-11-0{day}", "gpus": [{}]}}))
    monkeypatch.setattr(committed, "REPORTS", tmp_path)
    assert newest_run("05_x") == tmp_path / "h200/a/05_x-1"
    assert {path.name for path in tmp_path.glob(committed.MACHINES)} == {"h200", "h100"}
