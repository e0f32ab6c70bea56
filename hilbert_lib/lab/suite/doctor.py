"""Whether this machine can run the suite, and in one line what would mend it."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from hilbert_lib.attention.api import dilated_attention
from hilbert_lib.attention.explain import explain_backend
from hilbert_lib.lab.environment import environment
from hilbert_lib.machine import check_gpu, installed_version, kernel_mode, prepare_kernels
from hilbert_lib.patterns.dilated import DilatedPattern

REINSTALL = "make setup, or: python -m pip install -c constraints.txt -e '.[dev]'"
# Releases of torch and Triton that were tried together, and with what.
TRIED = {
    ("2.11.0", "3.6.0"): "all tests on an H100 and an H200",
    ("2.13.0", "3.7.1"): "all tests without a GPU; it is the pinned set",
    ("2.14.1", "3.8.0"): "all tests without a GPU but those of faulty ranks and of notebooks",
    ("2.15.0", "3.9.0"): "kernels compile; torch itself was not tried",
}
NEEDED_MB = 500  # room for many runs; a run of the suite with its defaults is far smaller

Finding = tuple[str, str, str]  # what was looked at, what was found, and what mends it: "" where nothing is broken


def examine(out: Path) -> Iterator[Finding]:
    """Look at everything that a run needs, one after another; reports are to be written to `out`."""
    yield (gpu := _gpu())
    yield "versions", *pair_of(torch.__version__, installed_version("triton"))
    if not gpu[-1] and kernel_mode() != "absent":
        yield "kernels", *_kernels()
    yield "python", *_notebooks_python()
    yield "reports", *_disk(out)


def _gpu() -> Finding:
    try:
        check_gpu()
    except RuntimeError as error:
        problem, _, fix = str(error).rpartition("; ")
        return "gpu", problem, fix
    prepare_kernels()
    facts = environment()
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "none"
    versions = f"Python {facts['python']}, torch {facts['torch']}, triton {facts['triton']}"
    where = " by notebooks, and elsewhere with TRITON_INTERPRET=1" if facts["kernel_mode"] == "interpreted" else ""
    return "gpu", f"{gpus}; {versions}, its kernels are {facts['kernel_mode']}{where}", ""


def pair_of(torch_version: str, triton_version: str | None) -> tuple[str, str]:
    """Whether releases of torch and Triton were tried together; Triton is None where it has no build.

    >>> pair_of("2.13.1", "3.7.1")
    ('torch 2.13 and triton 3.7 were tried: all tests without a GPU; it is the pinned set', '')
    """
    if triton_version is None:
        return f"torch {_minor(torch_version)} without triton: its kernels and their tests are passed over", ""
    releases = _minor(torch_version), _minor(triton_version)
    with_what = {tuple(map(_minor, pair)): how for pair, how in TRIED.items()}.get(releases)
    if with_what is not None:
        return f"torch {releases[0]} and triton {releases[1]} were tried: {with_what}", ""
    pairs = "; ".join(f"{torch} and {triton}" for torch, triton in TRIED)
    return f"torch {releases[0]} and triton {releases[1]} were not tried; of torch and triton these were: {pairs}", ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _kernels() -> tuple[str, str]:
    # In half precision on a GPU: float32 may be rounded to TF32 there, as torch is set.
    of = {"device": "cuda", "dtype": torch.float16} if kernel_mode() == "compiled" else {"device": "cpu"}
    q = torch.randn(1, 16, 1, 16, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(**of)
    pattern = DilatedPattern((8, 16), (1, 2))
    choice = explain_backend(q, q, q, pattern, backend="triton")
    if not choice.chosen:
        return f"not for this GPU: {choice.reasons['triton']}", ""
    serving = [backend for backend in ("hopper", "triton") if explain_backend(q, q, q, pattern, backend=backend).chosen]
    try:
        exact = dilated_attention(q, q, q, pattern, backend="reference")
        for name in serving:
            out = dilated_attention(q, q, q, pattern, backend=name)
            torch.testing.assert_close(out, exact, atol=1e-4 if q.dtype == torch.float32 else 1e-2, rtol=0)
    except Exception as error:  # of Triton, of numpy beneath its interpreter, of a driver: told, whatever it is
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return f"the fused ones fail on 16 tokens: {reason}", REINSTALL
    return "the fused ones equal the reference on 16 tokens", ""


def _notebooks_python() -> tuple[str, str]:
    try:
        program = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    except NoSuchKernel:
        return "Jupyter has no kernel named python3", REINSTALL
    # By their folders: a link's target is the interpreter that many environments share.
    if program.name == str(program) or program.absolute().parent == Path(sys.executable).absolute().parent:
        return "notebooks run in this Python", ""
    return f"notebooks would run in another Python: {program}", "python -m ipykernel install --sys-prefix"


def _disk(out: Path) -> tuple[str, str]:
    folder, fix = out.absolute(), "name another folder with --out"
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            free_mb = shutil.disk_usage(folder).free // 2**20
    except OSError as error:
        return f"{out} cannot be written: {error.strerror}", fix
    lacking = f"free {NEEDED_MB - free_mb} MB, or {fix}" if free_mb < NEEDED_MB else ""
    return f"{out} can be written; {free_mb} MB free", lacking
