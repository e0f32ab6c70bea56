"""Measuring a claim again: by its tests, its notebook, by computing it, or by its own pairs."""

import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from hilbert_lib.lab.environment import environment
from hilbert_lib.lab.ledger.answer import ROOT, Answer, answer
from hilbert_lib.lab.ledger.claim import Claim
from hilbert_lib.lab.ledger.claims import LEDGER
from hilbert_lib.lab.ledger.documents import Pairs
from hilbert_lib.lab.pairs import run_sides
from hilbert_lib.lab.records import RESULTS, newest_run
from hilbert_lib.lab.suite.folders import run_id

REPETITIONS = 30
PROGRAMS = {"hilbert": ["-c", "from hilbert_lib.cli.main import main; main()"], "pytest": ["-m", "pytest"]}


def claim_pairs(claims: Iterable[str], *, device: torch.device | str, segment_length: int = 1024) -> Pairs:
    """Pairs that are timed for some claims, for `pairs.run_sides`, the standard side first.

    segment_length: w of K3 and K4; the documents name none. Their D = 768 is 12 heads of 64.
    """
    shape = {"heads": 12, "head_dim": 64, "device": torch.device(device)}
    timed = {name: claim.pairs for name, claim in LEDGER.items() if claim.pairs}
    for name in claims:
        if name not in timed:
            raise ValueError(f"claims must be of {', '.join(timed)}; got {name!r}")
        yield from timed[name](segment_length=segment_length, **shape)


def command(claim: Claim, out: str | Path = "reports/local", *, gpus: int | None = None) -> str:
    """The command line, from the root of the checkout, that measures a claim again.

    gpus: how many there are; by default the notebook's largest configuration is taken.
    """
    if claim.tests:
        return shlex.join(["pytest", *claim.tests])
    if claim.pairs:
        return f"hilbert claims --rerun {claim.id}"
    if not claim.record:
        return f"hilbert claims {claim.id}"  # which computes it each time
    words = ["hilbert", "run", claim.record, "--force", "--out", str(out)]
    configs = ROOT.glob(f"notebooks/configs/h200*/{claim.record}.yaml") if claim.device == "cuda" else ()
    if configs := {int(path.parent.name.partition("x")[2] or 1): path for path in configs}:
        fitting = [count for count in configs if gpus is None or count <= gpus]
        if not fitting:
            raise ValueError(f"{claim.id} needs {min(configs)} GPUs, and torch sees {gpus}")
        words += ["-f", configs[max(fitting)].relative_to(ROOT).as_posix()]
    for name, value in claim.only.items():
        words += ["-p", name, (",".join(map(str, value)) or "[]") if isinstance(value, list) else str(value).lower()]
    return shlex.join(words)


def dry_run(claim: Claim, *, out: str | Path, segment_length: int = 1024) -> list[str]:
    """Lines on what `rerun` would do: the command that it runs, or the pairs that it times itself."""
    if not claim.pairs:
        return [command(claim, out) if claim.record or claim.tests else f"{claim.id} is computed, nothing is run"]
    lines = []
    for pair in claim_pairs([claim.id], device="cpu", segment_length=segment_length):
        names, parameters = ("pair", "length", "heads", "head_dim", "dilation", "branches"), pair[-1].parameters
        settings = ", ".join(f"{name}={parameters[name]}" for name in names if parameters.get(name) is not None)
        lines.append(f"{' | '.join(side.name for side in pair)}: {settings}")
    return lines


def rerun(claim: Claim, *, out: Path, segment_length: int = 1024) -> Answer:
    """Measure a claim again and say what this measurement answers; what is timed stays in a folder of `out`.

    RuntimeError: without a CUDA device, where one is needed; or if nothing was measured.
    """
    if claim.record and claim.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{claim.id} is measured on a CUDA device, and torch sees none here; --dry-run shows what would run"
        )
    if claim.pairs:
        folder = out / run_id(environment()) / f"claims_{claim.id}"
        (folder / RESULTS).unlink(missing_ok=True)
        pairs = claim_pairs([claim.id], device=claim.device, segment_length=segment_length)
        how = {"device": claim.device, "on_cpu": True, "repetitions": REPETITIONS, "output_dir": str(folder)}
        if not run_sides(pairs, **how):
            raise RuntimeError(f"{claim.id} was not measured again: nothing of it has room on this GPU")
        return answer(claim, folder)
    if not claim.record and not claim.tests:
        return answer(claim)
    line = command(claim, out.resolve(), gpus=torch.cuda.device_count() if claim.record else None)
    program, *words = shlex.split(line)
    before = _states(out)
    if subprocess.run([sys.executable, *PROGRAMS[program], *words], cwd=ROOT).returncode:
        raise RuntimeError(f"{claim.id} was not measured again, because this failed: {line}")
    if not claim.record:
        return answer(claim)
    run = newest_run(claim.record, machines=[out])
    if not run or _states(out) == before:  # an older run's is no answer
        raise RuntimeError(f"{claim.id} was not measured again: {line} wrote no {RESULTS}")
    return answer(claim, run)


def _states(out: Path) -> dict[Path, tuple[int, int, int]]:
    # What tells that a record was written, whatever the clock shows.
    files = (file for file in out.rglob(f"{RESULTS}*") if file.is_file())
    return {file: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]}
