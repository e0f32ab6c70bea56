"""Facts about this machine: its GPU, how Triton kernels run on it, and what a measurement made here depends on."""

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import pynvml
import torch

from hilbert_lib import checks
from hilbert_lib.internals import compile_time_constant, ordinals_of, visible_devices

PACKAGE = Path(__file__).resolve().parent

# Distributions whose kernels backends call, and what flash-attn-4 compiles its own with.
ATTENTION_PACKAGES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "natten",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "xformers",
)

# Compute capability from which an architecture begins (NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities").
ARCHITECTURES = (
    ((0, 0), "older"),
    ((6, 0), "Pascal"),
    ((7, 0), "Volta"),
    ((7, 5), "Turing"),
    ((8, 0), "Ampere"),
    ((8, 9), "Ada"),
    ((9, 0), "Hopper"),
    ((10, 0), "Blackwell"),
    ((13, 0), "newer"),
)
# The lowest capability whose hardware computes with a dtype. Below it torch emulates, if it takes the dtype at all.
DTYPES = (
    ((0, 0), torch.float32),
    ((0, 0), torch.float64),
    ((5, 3), torch.float16),
    ((8, 0), torch.bfloat16),
    ((8, 9), torch.float8_e4m3fn),
    ((8, 9), torch.float8_e5m2),
)
# The dtype for attention. Pascal has no matrix units, and most of it computes float16 at 1/64 of float32's rate.
RECOMMENDED = (((0, 0), torch.float32), ((7, 0), torch.float16), ((8, 0), torch.bfloat16))


@dataclass(frozen=True)
class GpuInfo:
    """One GPU, or none: then capability and all sizes are None.

    Attributes:
        architecture: as NVIDIA names it, "older" than Pascal, "newer" than is known here, "none" without a GPU.
        capability: the compute capability, as (9, 0).
        name: the model.
        memory_bytes, l2_bytes: size of the device's memory and of the second-level cache.
        multiprocessors: how many.
        shared_memory_bytes: the most that one block can have.
        bandwidth_bytes_per_s: peak of the memory, twice its clock times its bus width; None if the driver gives none.
        dtypes, recommended_dtype: floating dtypes that the hardware computes with, and the one for attention.
    """

    architecture: str
    capability: tuple[int, int] | None
    name: str
    memory_bytes: int | None
    multiprocessors: int | None
    l2_bytes: int | None
    shared_memory_bytes: int | None
    bandwidth_bytes_per_s: float | None
    dtypes: tuple[torch.dtype, ...]
    recommended_dtype: torch.dtype

    def __str__(self) -> str:
        dtypes = ", ".join(_short(dtype) for dtype in self.dtypes)
        rows = {"GPU": f"{self.name}, {self.architecture}"}
        if self.capability:
            rows["GPU"] += " {}.{}".format(*self.capability)
            rows["memory"] = f"{self.memory_bytes / 2**30:.0f} GiB"
            if self.bandwidth_bytes_per_s:
                rows["memory"] += f" at {self.bandwidth_bytes_per_s / 1e12:.1f} TB/s peak"
            shared = f"{self.shared_memory_bytes / 2**10:.0f} KiB shared memory a block"
            rows["units"] = f"{self.multiprocessors} SMs, {shared}"
            rows["L2"] = f"{self.l2_bytes / 2**20:.0f} MiB"
        rows["dtypes"] = f"{dtypes}; recommended {_short(self.recommended_dtype)}"
        return "\n".join(f"{name:<6}  {value}" for name, value in rows.items())


NO_GPU = GpuInfo(
    "none", None, "no NVIDIA GPU", None, None, None, None, None, (torch.float32, torch.float64), torch.float32
)


def get_gpu_info(device: torch.device | str | int | None = None) -> GpuInfo:
    """The facts of a GPU; without a GPU or a driver, and for the CPU, those of none.

    Args:
        device: a CUDA device, or its index; by default the current one.

    Raises:
        TypeError, ValueError: if it is no device, or a CUDA device that this process does not see.

    >>> get_gpu_info("cpu").architecture
    'none'
    """
    if isinstance(device, int):  # torch makes a device of it only where it sees a GPU, and keeps 8 bits of it
        device = torch.device("cuda", checks.integer("device", device, least=0, most=127))
    device = torch.device("cuda") if device is None else checks.device(device)
    if device.type != "cuda":
        return NO_GPU
    if device.index is not None:
        return _seen(device)
    return _asked(device) if _sees_gpus() else NO_GPU


@cache  # every call of attention asks, and a GPU stays what it is; refusals are not kept
def _seen(device: torch.device) -> GpuInfo:
    if not _sees_gpus():
        raise ValueError(f"device must be a GPU that this process sees, of which there is none; got {device}")
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device must be below cuda:{torch.cuda.device_count()}, got {device}")
    return _asked(device)


def _sees_gpus() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


def _asked(device: torch.device) -> GpuInfo:
    return gpu_info(torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device))


def gpu_info(capability: tuple[int, int], properties: object) -> GpuInfo:
    """The facts of a GPU with a capability and properties as `torch.cuda.get_device_properties` gives them."""
    # Not every build of torch has the clock and the width, and not every driver tells them.
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return GpuInfo(
        architecture=_reached(ARCHITECTURES, capability)[-1],
        capability=capability,
        name=properties.name,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        shared_memory_bytes=properties.shared_memory_per_block_optin,
        bandwidth_bytes_per_s=2e3 * clock_khz * bus_bits / 8 or None,
        dtypes=_reached(DTYPES, capability),
        recommended_dtype=_reached(RECOMMENDED, capability)[-1],
    )


def _reached(steps: tuple, capability: tuple[int, int]) -> tuple:
    return tuple(value for least, value in steps if capability >= least)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine_facts() -> dict:
    """The facts that a measurement depends on: where one differs, it is measured again. JSON can hold all of them.

    Raises RuntimeError as `check_gpu` does.
    """
    check_gpu()
    return {
        "hardware": " + ".join(gpu.name for gpu in gpu_properties()) or f"{cpu_model()}, {cpu_cores()} cores",
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver_version(),
        "code_hash": code_hash(),
        "torch_threads": torch.get_num_threads(),
        "kernel_mode": kernel_mode(),
        "packages": {name: version for name in ATTENTION_PACKAGES if (version := installed_version(name)) is not None},
    }


@compile_time_constant
def kernel_mode() -> str:
    """The way Triton kernels run here: "compiled" (on a GPU), "interpreted" (TRITON_INTERPRET is set) or "absent"."""
    if importlib.util.find_spec("triton") is None:
        return "absent"
    if _is_interpreting():
        return "interpreted"
    return "compiled" if torch.cuda.is_available() else "absent"


def prepare_kernels() -> str:
    """Let Triton interpret its kernels if this process sees no GPU; returns the kernel mode from now on.

    Triton reads TRITON_INTERPRET while it is imported, so call this first. Processes started later inherit the
    setting. Raises RuntimeError if triton was imported before, or torch cannot use the GPU.
    """
    check_gpu()
    if not torch.cuda.is_available() and not _is_interpreting():
        if "triton" in sys.modules:
            raise RuntimeError("triton was imported before prepare_kernels(): call it first, or set TRITON_INTERPRET=1")
        os.environ["TRITON_INTERPRET"] = "1"
    return kernel_mode()


def check_gpu() -> None:
    """Raise RuntimeError if this build of torch cannot use the machine's NVIDIA GPU, naming the versions and a remedy.

    Where CUDA_VISIBLE_DEVICES hides all GPUs, as "" or SLURM's "NoDevFiles", there is nothing to refuse.
    """
    if not _has_nvidia_device():
        return
    driver = driver_version() or "of unknown version"
    versions = f"torch {torch.__version__} (CUDA {torch.version.cuda}), NVIDIA driver {driver}"
    hide = 'or hide the GPU with CUDA_VISIBLE_DEVICES=""'
    if torch.version.cuda is None:
        raise RuntimeError(f"this torch cannot use the GPU: {versions}; install torch's CUDA build, {hide}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch cannot start CUDA: {versions}; install a build for that driver, {hide}")
    builds = torch.cuda.get_arch_list()
    for gpu in gpu_properties():
        if not _is_built_for((gpu.major, gpu.minor), builds):
            raise RuntimeError(
                f"torch has no kernels for {gpu.name}, capability {gpu.major}.{gpu.minor}: "
                f"{versions}, built for {', '.join(builds)}; install a build that has them, {hide}"
            )


@cache
def code_hash(folder: Traversable | None = None) -> str:
    """A hash of the library's Python files, their relative names and contents: 12 hexadecimal digits.

    Raises RuntimeError where there is none, as of a library that is compiled alone: all of these would be the same.
    """
    contents = dict(_sources(files("hilbert_lib") if folder is None else folder))  # which may lie in a zip
    if not contents:
        raise RuntimeError("the library's Python files are not there, so that nothing tells which code runs")
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        # Lengths keep the boundaries apart; git may check out other line ends on Windows.
        content = content.replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _sources(folder: Traversable, inside: str = "") -> Iterator[tuple[str, bytes]]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _sources(path, f"{inside}{path.name}/")
        elif path.name.endswith(".py"):
            yield f"{inside}{path.name}", path.read_bytes()


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, by the name that pip takes; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def gpu_properties() -> list:
    """The properties of the GPUs that torch sees, in its order (CUDA_VISIBLE_DEVICES makes it another than NVML's)."""
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None without one that works."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


def cpu_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@cache
def cpu_model() -> str:
    """The CPU's name as its maker prints it, or its architecture if the system does not tell."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        return output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def output(*command: str) -> str | None:
    """The output of a command; None if it is missing or fails."""
    # Whoever called, such as git's hooks, names a repository of its own in GIT_DIR, GIT_INDEX_FILE and others.
    env = {name: text for name, text in os.environ.items() if not name.startswith("GIT_") or "CONFIG" in name}
    how = {"capture_output": True, "text": True, "errors": "replace", "check": True, "timeout": 20, "env": env}
    try:
        return subprocess.run(command, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _is_interpreting() -> bool:
    # The spellings are those that triton takes.
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def _has_nvidia_device() -> bool:
    """Whether there is a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    shown = visible_devices()
    try:
        pynvml.nvmlInit()
        gpus = range(pynvml.nvmlDeviceGetCount())
        if shown and str(shown[0]).startswith("GPU-"):
            uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in gpus]
            shown = ordinals_of(shown, uuids)
        return bool(shown) and (shown[0] in gpus or str(shown[0]).startswith("MIG-"))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return bool(shown) and Path("/dev/nvidia0").exists()
    except pynvml.NVMLError:  # the driver is there and does not work: library and kernel module differ
        return bool(shown)


def _is_built_for(capability: tuple[int, int], builds: list[str]) -> bool:
    """Whether machine code for the same major version, or PTX (compute_NN) no newer, is in the build."""
    for build in builds:
        kind, digits = build.split("_")
        built = divmod(int(digits.rstrip("af")), 10)
        if built <= capability and (built[0] == capability[0] or kind == "compute"):
            return True
    return False
