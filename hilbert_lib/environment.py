"""What machine, what software and which code this is: the facts that a measurement is worthless without."""

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy
import psutil
import pynvml
import torch

PACKAGE = Path(__file__).resolve().parent

# What a measurement depends on, of the facts of `environment`: where one differs, it is measured again.
MACHINE = (
    *("hardware", "torch", "triton", "cuda", "cudnn", "driver", "code_hash", "torch_threads", "kernel_mode"),
    "packages",
)
# Distributions whose kernels backends call, and what flash-attn-4 compiles its own with.
ATTENTION_PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "xformers")


def environment() -> dict:
    """Facts about this process that JSON can hold: code, versions, hardware, and the GPUs' clocks now.

    No host names, user names or paths are among them. Outside a git checkout the variables HILBERT_COMMIT
    and HILBERT_DIRTY (0 or 1) say which code runs; what nobody knows is None.

    Returns:
        `utc` (ISO 8601), `commit`, `dirty`, `code_hash`, `python`, `torch`, `triton`, `numpy`, `cuda`,
        `cudnn`, `driver`, `platform`, `cpu`, `cpu_cores` (those this process may use), `torch_threads`,
        `memory_gib`, `gpus` (a list of `name`, `capability`, `memory_gib`, `sm_clock_mhz`), `hardware`
        (what `compare_runs` compares), `kernel_mode` and `packages` (versions by name of those of
        `ATTENTION_PACKAGES` that are installed; records of before it was held lack it).

    Raises:
        RuntimeError: if there is a GPU that torch cannot use, as `check_gpu` says it.

    >>> environment()["kernel_mode"] in ("compiled", "interpreted", "absent")
    True
    """
    check_gpu()
    commit, dirty = code_version()
    gpus = _gpus()
    cpu, cores = _cpu_model(), _cpu_cores()
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "code_hash": code_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu,
        "cpu_cores": cores,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "hardware": " + ".join(gpu["name"] for gpu in gpus) or f"{cpu}, {cores} cores",
        "kernel_mode": kernel_mode(),
        "packages": {name: found for name in ATTENTION_PACKAGES if (found := installed_version(name)) is not None},
    }


def say_hardware(facts: dict) -> str:
    """On what something ran, several GPUs of one kind as their number.

    Args:
        facts: as `environment` gives them, which name GPUs one by one.

    >>> say_hardware({"hardware": "NVIDIA H200 + NVIDIA H200"})
    '2 × NVIDIA H200'
    """
    kinds = Counter(facts["hardware"].split(" + "))
    return " + ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())


def describe_environment() -> str:
    """The facts of `environment` as the short table that opens every notebook.

    Returns:
        One line a fact: its name, padded, and its value.

    Raises:
        RuntimeError: as `environment`.

    >>> print(describe_environment().splitlines()[0].split()[0])
    hardware
    """
    facts = environment()
    code = "unknown" if facts["commit"] is None else facts["commit"][:12]
    rows = {
        "hardware": facts["hardware"],
        "kernels": {
            "compiled": "compiled for the GPU",
            "interpreted": "Triton kernels, where used, are interpreted: right results, meaningless times",
            "absent": "absent: no GPU, or no triton for this platform",
        }[facts["kernel_mode"]],
        "code": f"{code}{' with local changes' if facts['dirty'] else ''}, library {facts['code_hash']}",
        "software": ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton", "numpy")),
        "platform": f"{facts['platform']}, {facts['torch_threads']} torch threads, {facts['memory_gib']} GiB",
    }
    if facts["packages"]:
        rows["packages"] = ", ".join(f"{name} {found}" for name, found in facts["packages"].items())
    if facts["gpus"]:
        clocks = ", ".join(str(gpu["sm_clock_mhz"]) for gpu in facts["gpus"])
        rows["CUDA"] = ", ".join(f"{name} {facts[name]}" for name in ("cuda", "cudnn", "driver"))
        rows["SM clock"] = f"{clocks} MHz"
    rows["time"] = facts["utc"]
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, by the name that pip takes; None where it is not installed.

    >>> installed_version("torch") is None
    False
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def kernel_mode() -> str:
    """How Triton kernels would run in this process.

    Returns:
        "compiled" (on a GPU), "interpreted" (TRITON_INTERPRET is set) or "absent" (triton is not installed,
        or there is nothing to run its kernels on).

    >>> kernel_mode() in ("compiled", "interpreted", "absent")
    True
    """
    if importlib.util.find_spec("triton") is None:
        return "absent"
    if _is_interpreting():
        return "interpreted"
    return "compiled" if torch.cuda.is_available() else "absent"


def prepare_kernels() -> str:
    """Let Triton interpret its kernels where, and only where, this process sees no GPU.

    Triton reads TRITON_INTERPRET while it is imported, so call this first. Processes started later inherit
    the setting.

    Returns:
        The kernel mode that holds from now on.

    Raises:
        RuntimeError: if triton was imported too early to be told, or torch cannot use the GPU.
    """
    check_gpu()
    if not torch.cuda.is_available() and not _is_interpreting():
        if "triton" in sys.modules:
            raise RuntimeError("triton was imported before prepare_kernels(): call it first, or set TRITON_INTERPRET=1")
        os.environ["TRITON_INTERPRET"] = "1"
    return kernel_mode()


def check_gpu() -> None:
    """Refuse a machine whose NVIDIA GPU this build of torch cannot use.

    CUDA_VISIBLE_DEVICES="" hides the GPUs, and then there is nothing to refuse.

    Raises:
        RuntimeError: naming torch's version, the driver's and what to do.

    >>> check_gpu()  # says nothing where there is no GPU, or where it works
    """
    if not _has_nvidia_device():
        return
    driver = _driver_version() or "of unknown version"
    versions = f"torch {torch.__version__} (CUDA {torch.version.cuda}), NVIDIA driver {driver}"
    hide = 'or hide the GPU with CUDA_VISIBLE_DEVICES=""'
    if torch.version.cuda is None:
        raise RuntimeError(f"this torch cannot use the GPU: {versions}; install torch's CUDA build, {hide}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch cannot start CUDA: {versions}; install a build for that driver, {hide}")
    builds = torch.cuda.get_arch_list()
    for gpu in _gpus():
        if not _is_built_for(gpu["capability"], builds):
            raise RuntimeError(
                f"torch has no kernels for {gpu['name']}, capability {gpu['capability']}: "
                f"{versions}, built for {', '.join(builds)}; install a build that has them, {hide}"
            )


@cache
def code_hash() -> str:
    """A hash of the library's Python files: their relative names and contents, the same on every machine.

    Returns:
        12 hexadecimal digits.

    >>> len(code_hash())
    12
    """
    return _hash_sources(PACKAGE)


@cache
def code_version() -> tuple[str | None, bool | None]:
    """The commit that the library stands on, and whether the tree differs from it, its folder `reports` aside.

    Returns:
        commit (40 hexadecimal digits) and dirty; outside a checkout of this project the values of
        HILBERT_COMMIT and HILBERT_DIRTY (0 or 1), or None where they are not set.

    Raises:
        ValueError: if HILBERT_DIRTY is neither 0 nor 1.
    """
    root = PACKAGE.parent
    if (root / ".git").exists():  # so that an enclosing repository's commit is never taken for ours
        commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
        # Not the records: a run that writes its own among them would call the next one's code changed.
        status = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)reports")
        if commit is not None and status is not None:
            return commit, status != ""
    dirty = os.environ.get("HILBERT_DIRTY")
    if dirty not in (None, "0", "1"):
        raise ValueError(f"HILBERT_DIRTY must be 0 or 1, got {dirty!r}")
    return os.environ.get("HILBERT_COMMIT"), None if dirty is None else dirty == "1"


def sm_clocks_mhz() -> list[int | None]:
    """The clock of each GPU's multiprocessors at this moment.

    Returns:
        MHz, one value a GPU that torch sees, None where the driver does not tell (MIG slices); empty
        without a GPU.
    """
    return [gpu["sm_clock_mhz"] for gpu in _gpus()]


def _hash_sources(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        # Lengths keep the boundaries apart; git may check out other line ends on Windows.
        content = (folder / name).read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _is_interpreting() -> bool:
    # The spellings are those that triton takes.
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def _has_nvidia_device() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Path("/dev/nvidia0").exists()
    except pynvml.NVMLError:  # the driver is there and does not work: library and kernel module differ
        return True


def _driver_version() -> str | None:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


def _gpus() -> list[dict]:
    """The GPUs that torch sees, in its order, which CUDA_VISIBLE_DEVICES makes another than NVML's."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        except pynvml.NVMLError:
            clock = None
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "sm_clock_mhz": clock,
            }
        )
    return gpus


def _is_built_for(capability: str, builds: list[str]) -> bool:
    """Whether machine code for the same major version, or PTX (compute_NN) no newer, is in the build."""
    major, minor = map(int, capability.split("."))
    for build in builds:
        kind, digits = build.split("_")
        built = divmod(int(digits.rstrip("af")), 10)
        if built <= (major, minor) and (built[0] == major or kind == "compute"):
            return True
    return False


def _cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@cache
def _cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()
