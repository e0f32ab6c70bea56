"""Measuring a claim again: by its tests, its notebook, its own pairs, or by computing it."""

import shlex
import subprocess
import sys
from pathlib import Path

import torch

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.ledger.claim import ROOT, Answer, Claim, answer
from hilbert_lib.lab.ledger.claims import CLAIMS, ON_CPU, claim_pairs
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import RESULTS, TELLING, newest_run
from hilbert_lib.lab.suite.manifest import run_id

REPETITIONS = 30
PROGRAMS = {"hilbert": ["-c", "from hilbert_lib.cli.main import main; main()"], "pytest": ["-m", "pytest"]}


def command(claim: Claim, out: str | Path = "reports/local", *, gpus: int | None = None) -> str:
    """The command line, from the root of the checkout, that measures a claim again.

    gpus: how many there are; by default the notebook's largest configuration is taken.
    """
    if claim.tests:
        return shlex.join(["pytest", *claim.tests])
    if claim.id in CLAIMS or not claim.record:
        return f"hilbert claims --rerun {claim.id}"
    words = ["hilbert", "run", claim.record, "--force", "--out", str(out)]
    configs = ROOT.glob(f"notebooks/configs/{TELLING}/{claim.record}.yaml")
    if configs := {int(path.parent.name.partition("x")[2] or 1): path for path in configs}:
        fitting = [count for count in configs if gpus is None or count <= gpus]
        if not fitting:
            raise ValueError(f"{claim.id} needs {min(configs)} GPUs, and torch sees {gpus}")
        words += ["-f", configs[max(fitting)].relative_to(ROOT).as_posix()]
    for name, value in claim.only.items():
        words += ["-p", name, (",".join(map(str, value)) or "[]") if isinstance(value, list) else str(value).lower()]
    return shlex.join(words)


def dry_run(claim: Claim, *, out: str | Path, segment_length: int = 1024) -> list[str]:
    """What `rerun` would do, in lines: the command that it runs, or the pairs that it times itself."""
    if claim.id not in CLAIMS:
        return [command(claim, out) if claim.record or claim.tests else f"{claim.id} is computed, nothing is run"]
    lines = []
    for pair in claim_pairs([claim.id], device="cpu", segment_length=segment_length):
        names, given = ("pair", "length", "heads", "head_dim", "dilation", "branches"), pair[-1].parameters
        told = ", ".join(f"{name}={given[name]}" for name in names if given.get(name) is not None)
        lines.append(f"{' | '.join(side.name for side in pair)}: {told}")
    return lines


def rerun(claim: Claim, *, out: Path, segment_length: int = 1024) -> Answer:
    """Measure a claim again and say what this measurement answers; what is timed stays in a folder of `out`.

    RuntimeError: without a CUDA device, where one is needed; or if nothing was measured.
    """
    device = "cpu" if claim.id in ON_CPU else "cuda"
    if claim.record and device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{claim.id} is measured on a CUDA device, and torch sees none here; --dry-run shows what would run"
        )
    if claim.id in CLAIMS:
        folder = out / run_id(environment()) / f"claims_{claim.id}"
        (folder / RESULTS).unlink(missing_ok=True)
        pairs = claim_pairs([claim.id], device=device, segment_length=segment_length)
        how = {"device": device, "on_cpu": True, "repetitions": REPETITIONS, "output_dir": str(folder)}
        if not run_sides(pairs, **how):
            raise RuntimeError(f"{claim.id} was not measured again: nothing of it has room on this GPU")
        return answer(claim, folder)
    if not claim.record and not claim.tests:
        return answer(claim)
    line = command(claim, out.resolve(), gpus=torch.cuda.device_count() if claim.record else None)
    program, *words = shlex.split(line)
    before = _states(claim, out)
    if subprocess.run([sys.executable, *PROGRAMS[program], *words], cwd=ROOT).returncode:
        raise RuntimeError(f"{claim.id} was not measured again, because this failed: {line}")
    if not claim.record:
        return answer(claim)
    run = newest_run(claim.record, claim.file, [out])
    if not run or _states(claim, out) == before:  # an older run's is no answer
        raise RuntimeError(f"{claim.id} was not measured again: {line} wrote no {claim.file}")
    return answer(claim, run)


def _states(claim: Claim, out: Path) -> dict[Path, tuple[int, int, int]]:
    # What tells that a record was written, whatever the clock shows.
    files = (file for file in out.rglob(f"{claim.file}*") if file.is_file())
    return {file: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
