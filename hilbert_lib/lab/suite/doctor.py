"""Whether this machine can run the suite, and in one line what would mend it."""

import importlib.metadata
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hilbert_lib.attention.api import dilated_attention, explain_backend
from hilbert_lib.lab.environment import environment
from hilbert_lib.machine import check_gpu, kernel_mode, prepare_kernels
from hilbert_lib.pattern import DilatedPattern

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
REINSTALL = "make setup, or: python -m pip install -c constraints.txt -e '.[dev]'"
NEEDED_MB = 500  # room for many runs; a run of the suite with its defaults is far smaller


@dataclass(frozen=True)
class Finding:
    """What was looked at and found; `fix` is empty where nothing is broken."""

    subject: str
    found: str
    fix: str = ""


def examine(out: Path) -> Iterator[Finding]:
    """Look at everything that a run needs, one after another; reports are to be written to `out`."""
    yield Finding("python", platform.python_version())
    yield _packages()
    yield (gpu := _gpu())
    if not gpu.fix and kernel_mode() != "absent":
        yield _kernels()
    yield _kernel()
    yield from _disk(out)


def _packages() -> Finding:
    """What is required, and the pins of the tested set: others than these may serve, and are not called broken."""
    try:
        required = map(Requirement, importlib.metadata.requires("hilbert-lib") or [])
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "not known: the library runs from its folder and is not installed")
    versions = {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions()}
    needed = [each for each in required if not each.marker or each.marker.evaluate({"extra": "suite"})]
    wrong = [f"{each.name} is missing" for each in needed if canonicalize_name(each.name) not in versions]
    if wrong := wrong + _unlike(needed, versions):
        return Finding("packages", "; ".join(wrong), REINSTALL)
    lines = CONSTRAINTS.read_text().splitlines() if CONSTRAINTS.exists() else []
    other = _unlike([Requirement(line) for line in lines if "==" in line], versions)
    return Finding("packages", f"all there; unlike the tested set: {'; '.join(other)}" if other else "the tested set")


def _unlike(requirements: list[Requirement], versions: dict[str, str]) -> list[str]:
    found = [(each, versions.get(canonicalize_name(each.name))) for each in requirements]
    return [f"{each} does not allow {v}" for each, v in found if v and not each.specifier.contains(v, prereleases=True)]


def _gpu() -> Finding:
    try:
        check_gpu()
    except RuntimeError as error:
        found, _, fix = str(error).rpartition("; ")
        return Finding("gpu", found, fix)
    prepare_kernels()
    facts = environment()
    triton = f"Triton {facts['triton']}" if facts["triton"] else "no Triton for this platform"
    gpus = ", ".join(gpu["name"] for gpu in facts["gpus"]) or "none"
    return Finding("gpu", f"{gpus}; {triton}, its kernels are {facts['kernel_mode']}")


def _kernels() -> Finding:
    # In half precision on a GPU: float32 may be rounded to TF32 there, as torch is set.
    of = {"device": "cuda", "dtype": torch.float16} if kernel_mode() == "compiled" else {"device": "cpu"}
    q = torch.randn(1, 16, 1, 16, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(**of)
    pattern = DilatedPattern((8, 16), (1, 2))
    asked = explain_backend(q, q, q, pattern, backend="triton")
    if not asked.chosen:
        return Finding("kernels", f"not for this GPU: {asked.reasons['triton']}")
    try:
        out, exact = (dilated_attention(q, q, q, pattern, backend=name) for name in ("triton", "reference"))
        is_equal = torch.allclose(out, exact, atol=1e-4 if q.dtype == torch.float32 else 1e-2)
        wrong = "" if is_equal else "not what the reference gives"
    except Exception as error:  # of Triton, of numpy beneath its interpreter, of a driver: told, whatever it is
        wrong = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if wrong:
        return Finding("kernels", f"the fused ones fail on 16 tokens: {wrong}", REINSTALL)
    return Finding("kernels", "the fused ones equal the reference on 16 tokens")


def _kernel() -> Finding:
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Finding("kernel", "Jupyter has no kernel named python3", REINSTALL)
    # By their folders: a link's target is the interpreter that many environments share.
    if Path(program).name == program or Path(program).absolute().parent == Path(sys.executable).absolute().parent:
        return Finding("kernel", "notebooks run in this Python")
    fix = "python -m ipykernel install --sys-prefix"
    return Finding("kernel", f"notebooks would run in another Python: {program}", fix)


def _disk(out: Path) -> Iterator[Finding]:
    folder = next(each for each in (out.absolute(), *out.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            yield Finding("reports", f"{out} can be written")
    except OSError as error:
        yield Finding("reports", f"{out} cannot be written: {error.strerror}", "name another folder with --out")
    free_mb = shutil.disk_usage(folder).free // 2**20
    fix = "" if free_mb >= NEEDED_MB else f"free {NEEDED_MB - free_mb} MB, or name another folder with --out"
    yield Finding("disk", f"{free_mb} MB free", fix)
