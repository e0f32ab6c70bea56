"""`hilbert claims` shows every claim, and measures one again by what its entry names."""

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pandas as pd
import pytest
import torch
from command import call as hilbert
from made_up import comparison

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.ledger import answer as answering
from hilbert_lib.lab.ledger import kernels, rerun
from hilbert_lib.lab.ledger.answer import ROOT, answer
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.documents import loop_sides
from hilbert_lib.lab.ledger.rerun import command
from hilbert_lib.lab.records import newest_run, read_records
from hilbert_lib.lab.suite.points import find_notebooks, make_points

CALLS = {"b": ["call"], "what": ["Hilbert ordering"], "length": [64], "b_ms": [1.0]}


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine that seems to have a GPU, and whose environment asks git nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(rerun, "environment", lambda: {})
    monkeypatch.setattr(rerun, "run_id", lambda facts: "here")


def test_a_rerun_runs_what_the_notebooks_accept():
    folder = ROOT / "notebooks"
    there = {path.stem for path in folder.glob("*.ipynb")}
    for name, claim in LEDGER.items():
        words = shlex.split(command(claim))
        assert words[0] in ("hilbert", "pytest"), name
        if words[:2] == ["hilbert", "run"]:
            assert claim.record in there, name
            texts = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "-p"}
            assert set(texts) == set(claim.only), name
            source = ROOT / words[words.index("-f") + 1] if "-f" in words else None
            (point,) = make_points(*find_notebooks(folder, [claim.record]), texts, source)
            assert point.parameters.items() >= claim.only.items(), name


@pytest.mark.evidence
def test_the_command_shows_every_claim_and_an_entry_with_its_cases(monkeypatch):
    entry = hilbert("claims", "K3")
    assert "does not hold" in entry
    assert answer(LEDGER["K3"]).evidence in entry
    assert "two layouts" in entry
    monkeypatch.setattr(
        answering, "answer", lambda claim: answering.Answer(claim, "holds")
    )  # all are computed elsewhere
    shown = hilbert("claims")
    assert all(f"{name} " in shown for name in LEDGER)
    assert shown.count("*") == sum(bool(claim.note) for claim in LEDGER.values()) + 1  # and what it means, below


def test_what_is_timed_again_answers_from_its_own_folder(tmp_path, monkeypatch, one_gpu):
    def timed(_pairs, *, output_dir, **_):
        work = {"sweep": "claims", "pair": "dense and dilated", "length": 64, "head_dim": 64, "direction": "forward"}
        record = comparison("dense", "dilated", 6.0, **work)
        Path(output_dir).mkdir(parents=True)
        (Path(output_dir) / "results.jsonl").write_text(json.dumps(record) + "\n")
        return [record]

    monkeypatch.setattr(rerun, "run_sides", timed)
    shown = hilbert("claims", "--rerun", "K10", "--out", tmp_path)
    assert "6 (5.99 to 6.01)" in shown
    assert str(tmp_path / "here" / "claims_K10") in shown
    monkeypatch.setattr(rerun, "run_sides", lambda *_, **__: [])
    assert "nothing of it has room" in hilbert("claims", "--rerun", "K4", "--out", tmp_path, status=1)


@pytest.mark.evidence
def test_a_run_that_left_no_new_record_is_no_answer(tmp_path, monkeypatch, one_gpu):
    monkeypatch.setattr(rerun.subprocess, "run", lambda words, **_: CompletedProcess(words, 0))
    assert "C4 was not measured again" in hilbert("claims", "--rerun", "C4", "--out", tmp_path, status=1)
    old = tmp_path / "a-run" / "06_kernel_benchmarks-0a1b2c3d"
    shutil.copytree(newest_run("06_kernel_benchmarks"), old)
    (file,) = old.glob("results.jsonl*")
    os.utime(file, (2**31, 2**31))  # by a clock that was ahead
    assert "wrote no results.jsonl" in hilbert("claims", "--rerun", "C4", "--out", tmp_path, status=1)

    def run(words, **_):  # the notebook writes, by a clock that was set back
        file.write_bytes(file.read_bytes())
        os.utime(file, (0, 0))
        return CompletedProcess(words, 0)

    monkeypatch.setattr(rerun.subprocess, "run", run)
    assert str(old) in hilbert("claims", "--rerun", "C4", "--out", tmp_path)


def test_a_claim_of_several_gpus_is_measured_again_on_those_there_are():
    assert "configs/h200x2/" in rerun.command(LEDGER["R4"], gpus=3)
    assert "configs/h200x4/" in rerun.command(LEDGER["R4"])
    with pytest.raises(ValueError, match="R4 needs 2 GPUs, and torch sees 1"):
        rerun.command(LEDGER["R4"], gpus=1)


def test_tests_are_run_again(monkeypatch):
    ran = []
    environment()  # asks git by `subprocess.run`, once in a process
    monkeypatch.setattr(rerun.subprocess, "run", lambda words, **_: ran.append(words) or CompletedProcess(words, 1))
    assert "this failed: pytest tests/test_machine.py" in hilbert("claims", "--rerun", "B3", status=1)
    assert ran[0][1:3] == ["-m", "pytest"]


def test_what_needs_a_gpu_is_refused_without_one_and_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("K4", "B7"):
        assert "CUDA device" in hilbert("claims", "--rerun", name, status=1)
    assert hilbert("claims", "--rerun", "B7", "--dry-run").startswith("hilbert run 05_backend_selection")
    shown = hilbert("claims", "--rerun", "K4", "--dry-run", "--segment-length", "512")
    assert shown.splitlines()[0].startswith("standard | hilbert: pair=two functions, length=2048")
    assert shown.count("branches=512:") == 4
    assert hilbert("claims", "--rerun", "C1", "--dry-run") == "C1 is computed, nothing is run\n"
    assert answer(LEDGER["C8"]).value in hilbert("claims", "--rerun", "C8")
    assert hilbert("claims", "--rerun", "K11", "--dry-run").splitlines()[0] == "loop: length=65536"


def test_what_is_timed_on_the_cpu_needs_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(LEDGER, "K11", replace(LEDGER["K11"], pairs=lambda **_: loop_sides((8,))))
    monkeypatch.setattr(kernels, "pair_table", lambda *_: pd.DataFrame(CALLS))
    assert "K11" in hilbert("claims", "--rerun", "K11", "--out", tmp_path)
    (record,) = read_records(next(tmp_path.glob("*/claims_K11")) / "results.jsonl")
    assert record["name"] == "loop"
    assert min(record["samples_ms"]) > 0


def test_an_unknown_claim_is_named():
    assert "got 'K99'" in hilbert("claims", "K99", status=2)
    assert "got 'K99'" in hilbert("claims", "--rerun", "K99", status=2)
    assert "there is no --rerun" in hilbert("claims", "K3", "--dry-run", status=2)


def test_a_claim_that_needs_no_gpu_is_measured_at_the_notebooks_defaults():
    claim = replace(LEDGER["L1"], device="cpu")
    assert command(claim, gpus=0) == "hilbert run 10_in_a_model --force --out reports/local"
