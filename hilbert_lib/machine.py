"""What GPU this is, and what its architecture can compute with."""

from dataclasses import dataclass
from functools import cache

import torch

from hilbert_lib import checks

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
# From which capability the hardware computes with a dtype; below it torch emulates, if it takes the dtype at all.
DTYPES = (
    ((0, 0), torch.float32),
    ((0, 0), torch.float64),
    ((5, 3), torch.float16),
    ((8, 0), torch.bfloat16),
    ((8, 9), torch.float8_e4m3fn),
    ((8, 9), torch.float8_e5m2),
)
# What to compute attention in. Pascal has no matrix units, and most of it computes float16 at 1/64 of float32's rate.
RECOMMENDED = (((0, 0), torch.float32), ((7, 0), torch.float16), ((8, 0), torch.bfloat16))


@dataclass(frozen=True)
class GpuInfo:
    """One GPU, or none.

    Attributes:
        architecture: a name of `ARCHITECTURES`; "newer" than all that were known when this was written; "none".
        capability: the compute capability, as (9, 0); None without a GPU. So are all numbers below.
        name: the model.
        memory_bytes: of the device.
        multiprocessors: how many.
        l2_bytes: of the second-level cache.
        shared_memory_bytes: what one block can have at most.
        bandwidth_bytes_per_s: of the memory, peak: twice its clock times its bus width; None where the driver tells
            neither.
        dtypes: floating dtypes that the hardware computes with.
        recommended_dtype: for attention.
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
            rows["units"] = (
                f"{self.multiprocessors} SMs, {self.shared_memory_bytes / 2**10:.0f} KiB shared memory a block"
            )
            rows["L2"] = f"{self.l2_bytes / 2**20:.0f} MiB"
        rows["dtypes"] = f"{dtypes}; recommended {_short(self.recommended_dtype)}"
        return "\n".join(f"{name:<6}  {value}" for name, value in rows.items())


NO_GPU = GpuInfo(
    "none", None, "no NVIDIA GPU", None, None, None, None, None, (torch.float32, torch.float64), torch.float32
)


def get_gpu_info(device: torch.device | str | int | None = None) -> GpuInfo:
    """What a GPU is and can. Needs neither a GPU nor a driver: without them it says "none".

    Args:
        device: a CUDA device, or its index; by default the current one. The CPU is no GPU.

    Raises:
        TypeError, ValueError: for what is no device, and for a CUDA device that this process does not see.

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
    """The facts of a GPU with a capability and properties as `torch.cuda.get_device_properties` gives them.

    >>> from types import SimpleNamespace
    >>> pascal = SimpleNamespace(name="GTX 1080", total_memory=2**33, multi_processor_count=20, L2_cache_size=2**21,
    ...                          shared_memory_per_block_optin=49152)
    >>> gpu_info((6, 1), pascal).recommended_dtype
    torch.float32
    """
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
