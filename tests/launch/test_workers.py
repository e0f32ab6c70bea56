"""A function runs on every rank of a group, started from here or by torchrun on several machines."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import refusals
from forked_ranks import fork_ranks
from own_processes import PATIENCE

from hilbert_lib.launch.workers import RankError, run_ranks

PAGE = (Path(__file__).parents[2] / "docs/several_gpus.md").read_text()
BLOCKS = re.findall(r"^```(?:python|bash)\n(.*?)^```", PAGE, re.S | re.M)
# A cluster of so many machines as SLURM_NNODES says, all of them this one.
SRUN = """
while [ "${1#--}" != "$1" ]; do shift; done
for node in $(seq "$SLURM_NNODES"); do "$@" & started="$started $!"; done
for each in $started; do wait "$each" || exit 1; done
"""


def test_every_rank_is_called_and_what_rank_0_prints_is_seen_while_it_runs(tmp_path, monkeypatch, capfd):
    seen = []

    def write(text):
        seen.append(text)
        (tmp_path / "seen").touch()

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    arguments = {"start": 5, "file": str(tmp_path / "seen")}
    results = run_ranks("faulty_ranks:sum_of_ranks", 2, arguments, backend="gloo")
    shared = {"total": 11, "threads": 1, "backend": "gloo", "device": None}
    assert results == [{"rank": rank, "is_heard": rank == 0, **shared} for rank in range(2)]
    assert "".join(seen) == "rank 0 has begun\nhalf a line", "what the others print is theirs"
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_ends_badly_after_its_result_has_not_failed(monkeypatch, calls_are_copied):
    fork_ranks(monkeypatch)
    assert run_ranks("faulty_ranks:aborting_at_its_end", 2, backend="gloo") == [0, 1]


def test_a_file_that_runs_ranks_where_it_is_imported_starts_them_once(tmp_path, monkeypatch):
    call = "from hilbert_lib.launch.workers import run_ranks\nrun_ranks('without_guard:attend', 1, backend='gloo')\n"
    (tmp_path / "without_guard.py").write_text(f"{call}\ndef attend(arguments):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankError, match=r"rank 0 failed: RuntimeError: run_ranks was called while a rank imports"):
        import without_guard  # noqa: F401


def refused(target="faulty_ranks:sum_of_ranks", ranks=2, **options):
    run_ranks(target, ranks, **options)


DTYPE = {"dtype": torch.float32}
TYPES = [
    (lambda: refused(seconds="5"), "seconds must be a number, got '5'"),
    (lambda: refused(arguments=DTYPE), "arguments must hold values of JSON, got .*float32"),
    (lambda: refused(arguments={"a": [{1: 2}]}), "arguments must have strings as the keys of dictionaries, got 1"),
]
VALUES = [
    (lambda: refused(3), "target must be 'module:function', got 3"),
    (lambda: refused("faulty_ranks"), "target must be 'module:function', got 'faulty_ranks'"),
    (lambda: refused(ranks=0), "ranks must be an integer from 1 to 1048576, got 0"),
    (lambda: refused(backend="mpi"), "backend must be one of gloo, nccl; got 'mpi'"),
    (lambda: refused(backend="nccl", ranks=10**6), "ranks must be at most [0-9]+ with nccl, .* got 1000000"),
    (lambda: refused(seconds=6e7), r"seconds must be at most 5e\+07, got 6e\+07"),
    (lambda: refused(stall_seconds=-1), "stall_seconds must be finite and above 0, got -1"),
    (lambda: refused(stall_seconds=1e300), r"stall_seconds must be at most 1e\+08, got 1e\+300"),
]
test_what_cannot_run_is_refused_before_anything_starts = refusals({TypeError: TYPES, ValueError: VALUES})


def block(text):
    (found,) = (each for each in BLOCKS if text in each)
    return found


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs a script of the page as a job whose commands are this checkout's; what it printed."""
    commands = {
        "bin/srun": SRUN,
        "bin/scontrol": "echo localhost",
        ".venv/bin/torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        ".venv/bin/hilbert": f'exec {sys.executable} -c "from hilbert_lib.cli.main import main; main()" "$@" --dry-run',
    }
    for name, text in commands.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "long_context.py").write_text(block("# long_context.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # both machines would take the same GPU

    def run(script, **variables):
        environment = os.environ | {f"SLURM_{name}": str(value) for name, value in variables.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True, **pipes)
        try:
            printed, said = process.communicate(timeout=PATIENCE)
        finally:
            with suppress(ProcessLookupError):  # what it started in the background ends with it
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, said
        return printed

    return run


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_pages_job_runs_one_group_over_all_machines(job, machines):
    script = block("--job-name=ring").replace("16777216", "256").replace("29400", str(free_port()))
    assert script.count("256") == 1
    job(script, NNODES=machines, GPUS_ON_NODE=3 - machines, JOB_ID=1, JOB_NODELIST="both")
    results = [json.loads(Path(f"results/rank-{rank}.json").read_text()) for rank in range(2)]
    assert results == [{"result": [1, 128, 8, 64]}] * 2


@pytest.mark.full
def test_rings_over_two_launchers_compute_what_one_process_does(job, monkeypatch):
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tests), str(tests / "ring")]))
    sequence = {"branches": "longer", "lengths": [5, 9, 4, 8], "heads": 4, "is_causal": True}
    grid = {"rules": "plane", "heads": "grouped", "more": "extra and padding"}
    shards = [{"parts": [2, 2]}, {"order": "hilbert", "lengths": [30, 20, 40, 18]}]
    calls = [["compare", sequence | {"transport": transport}] for transport in ("ring", "all_gather", "all_to_all")]
    calls += [["compare_on_grid", grid | {"shards": each}] for each in shards]
    script = block("--job-name=ring").replace('{"tokens": 16777216}', json.dumps({"calls": calls}))
    script = script.replace("long_context:attend", "ring_ranks:run").replace("29400", str(free_port()))
    job(script, NNODES=2, GPUS_ON_NODE=2, JOB_ID=1, JOB_NODELIST="both")
    by_rank = [json.loads(Path(f"results/rank-{rank}.json").read_text())["result"] for rank in range(4)]
    for call, *found in zip(calls, *by_rank, strict=True):
        for name in found[0]:
            mine, one = (sum(rank[name][n] for rank in found) ** 0.5 for n in (0, 1))
            assert mine <= 2 * one, (call, name, mine, one)


def test_the_pages_call_returns_one_value_a_rank(job, monkeypatch, calls_are_copied):
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    fork_ranks(monkeypatch)
    names = {}
    exec(block("run_ranks(").replace("65536", "256"), names)
    assert names["shapes"] == [[1, 128, 8, 64]] * 2


def test_a_job_of_the_pages_array_takes_its_share(job):
    printed = job(block("--array"), NNODES=1, ARRAY_TASK_ID=2, ARRAY_TASK_COUNT=2)
    assert printed.splitlines()[-1] == "2 of 4 to run"


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


@pytest.mark.multigpu
@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_over_nccl_every_rank_has_a_gpu_of_its_own():
    ranks = torch.cuda.device_count()
    results = run_ranks("faulty_ranks:sum_of_ranks", ranks)
    assert {result["total"] for result in results} == {sum(range(ranks))}
    assert [(result["backend"], result["device"]) for result in results] == [("nccl", rank) for rank in range(ranks)]
