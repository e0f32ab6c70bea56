"""Facts that stand with every measurement: machine, software and code."""

import os
import platform
from collections import Counter
from datetime import UTC, datetime
from functools import cache

import numpy
import psutil
import pynvml

from hilbert_lib import machine
from hilbert_lib.attention.backends.flex_masks import FLEX_BLOCK, FLEX_NARROW
from hilbert_lib.attention.backends.registry import BACKENDS

# What a measurement depends on, of the facts of `environment`: where one differs, it is measured again.
MACHINE = ("hardware", "torch", "triton", "cuda", "cudnn", "driver", "code_hash", "torch_threads", "kernel_mode")
MACHINE += ("packages",)
KERNELS = {
    "compiled": "compiled for the GPU",
    "interpreted": "Triton kernels, where used, are interpreted: right results, meaningless times",
    "absent": "absent: no GPU, and Triton's interpreter was not asked for",
}
NO_TRITON = "absent: triton is not installed; it has builds for Linux alone"


def environment() -> dict:
    """Facts about this process that JSON can hold: code, versions, hardware, and the GPUs' clocks now.

    No host names, user names or paths are among them; what nobody knows is None. A RuntimeError says that there is a
    GPU which torch cannot use.
    """
    facts = machine.machine_facts()
    commit, dirty = code_version()
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": machine.cpu_model(),
        "cpu_cores": machine.cpu_cores(),
        "memory_gib": _gib(psutil.virtual_memory().total),
        # Of FlexAttention, beside its own defaults: tokens of a block each way, and options for rows of at most 64.
        "flex_attention": {"block": FLEX_BLOCK, "narrow": FLEX_NARROW},
        "backends": list(BACKENDS),  # along sequences, by name: of records without "hopper", "triton" was both
        "gpus": [_gpu_facts(*gpu) for gpu in zip(machine.gpu_properties(), sm_clocks_mhz(), strict=True)],
        **facts,
    }


def _gpu_facts(gpu, clock: int | None) -> dict:
    capability = f"{gpu.major}.{gpu.minor}"
    return {"name": gpu.name, "capability": capability, "memory_gib": _gib(gpu.total_memory), "sm_clock_mhz": clock}


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


def say_hardware(facts: dict | None = None) -> str:
    """On what something ran, by default this machine; several GPUs of one kind as their number: "2 × NVIDIA H200"."""
    kinds = Counter((facts or environment())["hardware"].split(" + "))
    return " + ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())


def describe_environment(facts: dict | None = None) -> str:
    """The facts of `environment`, by default those of now, as a short table: a line each, its name and its value."""
    facts = facts or environment()
    code = "unknown" if facts["commit"] is None else facts["commit"][:12]
    rows = {
        "hardware": facts["hardware"],
        "kernels": KERNELS[facts["kernel_mode"]] if facts["triton"] else NO_TRITON,
        "code": f"{code}{' with local changes' if facts['dirty'] else ''}, library {facts['code_hash']}",
        "software": ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton", "numpy")),
        "platform": f"{facts['platform']}, {facts['torch_threads']} torch threads, {facts['memory_gib']} GiB",
    }
    if facts.get("packages"):  # older records lack it
        rows["packages"] = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    if facts["gpus"]:
        clocks = ", ".join(str(gpu["sm_clock_mhz"]) for gpu in facts["gpus"])
        rows["CUDA"] = ", ".join(f"{name} {facts[name]}" for name in ("cuda", "cudnn", "driver"))
        rows["SM clock"] = f"{clocks} MHz"
    rows["time"] = facts["utc"]
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


@cache
def code_version() -> tuple[str | None, bool | None]:
    """The library's commit, and whether the tree differs from it; outside a checkout HILBERT_COMMIT, HILBERT_DIRTY."""
    root = machine.PACKAGE.parent
    if (root / ".git").exists():  # so that an enclosing repository's commit is never taken for ours
        commit = machine.output("git", "-C", str(root), "rev-parse", "HEAD")
        # Not the records: a run that writes its own among them would call the next one's code changed.
        status = machine.output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)reports")
        if commit is not None and status is not None:
            return commit, status != ""
    dirty = os.environ.get("HILBERT_DIRTY")
    if dirty not in (None, "0", "1"):
        raise ValueError(f"HILBERT_DIRTY must be 0 or 1, got {dirty!r}")
    return os.environ.get("HILBERT_COMMIT"), None if dirty is None else dirty == "1"


def sm_clocks_mhz() -> list[int | None]:
    """The clock of each GPU's multiprocessors now, in torch's order; None where the driver does not tell (MIG)."""
    clocks = []
    for gpu in machine.gpu_properties():
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
            clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            clocks.append(None)
    return clocks
