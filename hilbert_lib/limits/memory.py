"""Free memory, whether a need fits, and the peak of a call."""

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import psutil
import torch

from hilbert_lib import checks
from hilbert_lib.limits.config import SafetyConfig, config_or_default

GB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Memory:
    """The memory of one device, or of the host, in bytes."""

    name: str  # "cuda:0", "host"
    total: int
    available: int  # can be taken without ending another's run
    bounds: tuple[tuple[int, int], ...] = ()  # (total, available) of the machine and its cgroups; () is the pair above

    def room(self, share: float, min_free_gb: float) -> tuple[int, str]:
        """Bytes that may still be taken, below 0 where a limit is passed, and the limit that binds, in words.

        >>> Memory("host", 100 * GB, 40 * GB).room(share=0.9, min_free_gb=1.0)
        (32212254720, '90 % of the 100.0 GB of host may be in use')
        """
        rooms = [(self.available - int(min_free_gb * GB), f"{min_free_gb:.1f} GB of {self.name} must stay free")]
        for total, available in self.bounds or [(self.total, self.available)]:
            words = f"{100 * share:g} % of the {_gb(total)} of {self.name} may be in use"
            rooms.append((int(share * total) - (total - available), words))
        return min(rooms, key=lambda room: room[0])

    def in_use(self) -> str:
        """The memory in use, in words."""
        return f"{_gb(self.total - self.available)} of {self.name} in use"


class MemorySafetyChecker:
    """Says whether memory can be taken without passing a limit.

    Args:
        config: the limits; by default as `SafetyConfig.load` finds them.
        device: a CUDA device or the CPU; by default torch's current CUDA device, and the CPU where there is none.
        for_child: True if a process that this one starts will take the memory. By default this one takes it, and may
            use what torch's caching allocator holds here unused.

    Raises:
        TypeError, ValueError: naming the argument; also for a GPU that this process does not see.

    >>> MemorySafetyChecker(device="cpu").check_memory_available(0.001)[0]
    True
    """

    def __init__(self, config: SafetyConfig | None = None, device: object = None, *, for_child: bool = False):
        self.config = config_or_default(config)
        self.device = present_device(device)
        self._for_child = checks.boolean("for_child", for_child)

    def check_memory_available(self, required_gb: float) -> tuple[bool, str]:
        """Whether so much more fits on the device, and why. On a GPU the host's limits count too.

        The reason is a sentence with what is required, what is available and the limit that decides. Raises TypeError
        if required_gb, in units of 2^30 bytes, is no number, ValueError if it is below 0 or NaN.
        """
        required_gb = checks.number("required_gb", required_gb)
        if not required_gb >= 0:
            raise ValueError(f"required_gb must be at least 0, got {required_gb}")
        needs = [(*self._own(), required_gb)]
        if self.device.type == "cuda":
            needs.append((host_memory(), self.config.min_free_host_gb, 0.0))
        reasons = []
        for memory, min_free_gb, required in needs:
            room, limit = memory.room(self.config.max_memory_share, min_free_gb)
            reasons.append(f"{required:.3f} GB required, {_gb(memory.available)} of {memory.name} available; {limit}")
            if required * GB > room:
                return False, f"does not fit: {reasons[-1]}"
        return True, f"fits: {reasons[0]}"

    def room(self) -> int:
        """Bytes that may still be taken on the device; below 0 where a limit is passed."""
        memory, min_free_gb = self._own()
        return memory.room(self.config.max_memory_share, min_free_gb)[0]

    def _own(self) -> tuple[Memory, float]:
        """The device's memory, and how much of it must stay free."""
        if self.device.type == "cuda":
            return gpu_memory(self.device, for_child=self._for_child), self.config.min_free_gpu_gb
        return host_memory(), self.config.min_free_host_gb


def device_or_default(device: object) -> torch.device:
    """A device as torch names it; None is the current CUDA device, and the CPU where there is none."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return checks.device(device)


def present_device(device: object) -> torch.device:
    """`device_or_default`, refused with a ValueError unless it is the CPU or a GPU that this process sees."""
    device = device_or_default(device)
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type != "cpu" and (device.index or 0) >= gpus:
        raise ValueError(f"device must be the CPU or a GPU that this process sees, got {device}")
    return device


def gpu_memory(device: torch.device, *, for_child: bool = False) -> Memory:
    """Memory of a CUDA device; unless `for_child`, what torch's allocator holds here unused is available too."""
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(str(device), total, free if for_child else free + cached)


def host_memory() -> Memory:
    """Memory of the host, or of the container where its limit is lower."""
    # The system's own total is not trusted alone: on some virtual machines it grows with what is used.
    system = psutil.virtual_memory()
    bounds = [(system.total, system.available), *_cgroup_bounds()]
    return Memory("host", *map(min, zip(*bounds, strict=True)), tuple(bounds))


def _cgroup_bounds() -> Iterator[tuple[int, int]]:
    """(total, available) under the memory limit of each cgroup that this process is in, of version 1 or 2."""
    try:
        lines = os.fsdecode(OWN_CGROUPS.read_bytes()).split("\n")
    except OSError:  # not Linux, or no /proc
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if controllers == "":
            # At "high" the kernel takes pages back and slows the processes until they stand still.
            root, limits, usage, cache = CGROUPS, ("memory.max", "memory.high"), "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limits = CGROUPS / "memory", ("memory.limit_in_bytes",)
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be the host's, or lead out of what is mounted; at the root is then its own group.
        folder = Path(os.path.normpath(f"{root}/{path}"))
        groups = [parent for parent in (folder, *folder.parents) if parent.is_relative_to(root)]
        for group in groups or [root]:
            bounds = [_number(group / name) for name in limits]
            if bounds := [limit for limit in bounds if limit is not None and limit >= 0]:  # some write "none" as -1
                limit, used = min(bounds), _number(group / usage) or 0
                # Pages of files are given back at need.
                free = limit - used + (_number(group / "memory.stat", f"^{cache} ([0-9]{{1,20}})$") or 0)
                yield limit, max(0, min(limit, free))


def _number(file: Path, words: str = r"\A\s*(-?[0-9]{1,20})\s*\Z") -> int | None:
    """A number of the kernel's; None where the file is missing, cannot be read or holds another word, as "max"."""
    try:
        match = re.search(words.encode(), file.read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def measure_peak(run: Callable[[], object], device: object = None) -> int:
    """Bytes that a call takes at its highest point, its result included, as torch's allocator counts them."""
    device = present_device(device)
    if device.type != "cuda":
        gc.collect()  # what an earlier call left in cycles: freed during `run`, it would hide what that takes
        return _measure_cpu_peak(run)
    before = begin_peak(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def begin_peak(device: torch.device) -> int:
    """Free what earlier calls left on a CUDA device, reset its peak, and return the bytes still allocated."""
    gc.collect()  # what torch.compile leaves in cycles holds a call's inputs
    # The thread that runs a device's backward passes holds the results of the last one until it is scheduled again,
    # which a busy host delays; a backward of an empty tensor ends that.
    with torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(nothing * 1, nothing, nothing.detach())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _measure_cpu_peak(run: Callable[[], object]) -> int:
    # Only a profiler sees every allocation, those inside operators too. torch.profiler.profile starts this one, but
    # imports torch's compiler first: seconds of every process.
    profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    with ExitStack() as silence:  # torch 2.13's profiler prints a line at its start, and one at its end
        silence.enter_context(_silent_stderr())
        with profiler:  # which ends too where an interrupt comes while the silence does
            silence.close()
            try:
                run()
            finally:
                silence.enter_context(_silent_stderr())
    changes = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(changes, initial=0))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    # The stderr of the process, not of Python: C++ prints to it.
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB"
